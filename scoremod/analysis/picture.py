"""Tile maps as pictures: text, SVG for notebooks, PNG.

##/.
###/   #: full  /: partial  .: empty
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ScoremodError
from ..ir.ops import Array

# EMPTY, PARTIAL, FULL
CHARACTERS = np.array([".", "/", "#"])
COLORS = ("#f4f4f4", "#f2b134", "#3b6ea8")
MAX_ROWS, MAX_COLUMNS = 64, 128


@dataclass(frozen=True, eq=False)
class TileMap:
    """The kind of every tile of a mask; printing it draws it."""

    kind: Array  # uint8 [q tiles, kv tiles]: 0 empty, 1 partial, 2 full
    q_len: int
    kv_len: int
    block_m: int = 128
    block_n: int = 128

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many tiles are empty, partial and full."""
        partial, full = (int(np.count_nonzero(self.kind == kind)) for kind in (1, 2))
        return self.kind.size - partial - full, partial, full

    @property
    def kept(self) -> float:
        """The share of tiles that are computed."""
        return 1 - self.counts[0] / self.kind.size if self.kind.size else 0.0

    def shrunk(self, rows: int = MAX_ROWS, columns: int = MAX_COLUMNS) -> Array:
        """The map on at most that many cells: a cell of several kinds is partial."""
        kind = self.kind
        for axis, most in ((0, rows), (1, columns)):
            step = max(1, -(-kind.shape[axis] // most))
            starts = np.arange(0, kind.shape[axis], step)
            if step > 1:
                least, greatest = (f.reduceat(kind, starts, axis) for f in (np.minimum, np.maximum))
                kind = np.where(least == greatest, least, 1).astype(np.uint8)
        return kind

    @property
    def legend(self) -> str:
        """Counts in words, on one line."""
        empty, partial, full = self.counts
        rows, columns = self.kind.shape
        return (
            f"{rows} x {columns} tiles of {self.block_m} x {self.block_n}: {empty} empty (.), "
            f"{partial} partial (/), {full} full (#); {100 * self.kept:.3g} % of the work kept"
        )

    def __str__(self) -> str:
        shrunk = self.shrunk()
        lines = ["".join(row) for row in CHARACTERS[shrunk]]
        if shrunk.shape != self.kind.shape:
            steps = (-(-n // m) for n, m in zip(self.kind.shape, shrunk.shape, strict=True))
            lines.append("one character: {} x {} tiles".format(*steps))
        return "\n".join([*lines, self.legend])

    def _repr_svg_(self) -> str:
        """A small picture for notebooks."""
        cells = self.shrunk(128, 128)
        rows, columns = cells.shape
        size = 384 / max(rows, columns, 1)
        boxes = [
            f'<rect x="{start}" y="{y}" width="{stop - start}" height="1" fill="{COLORS[kind]}"/>'
            for y, row in enumerate(cells)
            for start, stop, kind in stretches(row)
        ]
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{columns * size:.0f}" '
            f'height="{rows * size:.0f}" viewBox="0 0 {columns} {rows}" '
            f'shape-rendering="crispEdges"><title>{self.legend}</title>{"".join(boxes)}</svg>'
        )

    def plot(self, path: str | Path) -> None:
        """Write a PNG (or what the path's ending says) with counts and the share of work kept."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.colors import ListedColormap
            from matplotlib.figure import Figure
            from matplotlib.patches import Patch
        except ImportError:
            raise ScoremodError(
                "drawing a tile map needs matplotlib, which is not installed",
                hint="pip install 'scoremod[plot]', or print the map: print(attn.tiles(...))",
            ) from None
        figure = Figure(figsize=(6, 6.6), dpi=150)
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.imshow(
            self.shrunk(1024, 1024), cmap=ListedColormap(COLORS), vmin=0, vmax=2,
            extent=(0, self.kv_len, self.q_len, 0), interpolation="nearest", aspect="auto",
        )  # fmt: skip
        axes.set(xlabel="key", ylabel="query", title=f"{100 * self.kept:.3g} % of the work kept")
        words = zip(("empty", "partial", "full"), self.counts, COLORS, strict=True)
        handles = [Patch(facecolor=c, edgecolor="#888", label=f"{w} {n:,}") for w, n, c in words]
        figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False)
        figure.subplots_adjust(bottom=0.16)
        figure.savefig(path)


def stretches(row: Array) -> list[tuple[int, int, int]]:
    """Neighbours of equal value: (start, stop, value)."""
    edges = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
    return [(a, b, int(row[a])) for a, b in itertools.pairwise(edges) if a < b]

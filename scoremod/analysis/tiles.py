"""Which tiles of a mask are empty, which are full? Proved from the mask, for any length.

    classify(j <= i, 512, 512, block_m=128, block_n=128, values={})   ->   a triangle of kinds

A kind is a claim about the pairs inside the lengths. Scalars are put into the mask, then ranges
(`ranges.py`) decide what they can in both directions, and intervals (`boxes.py`) test the rest.
Every means is sound alone, so the sharper answer wins. Large grids are first looked at in tiles 16
times as large: what is decided there is not looked at again.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ir.evaluate import Dtype, evaluate
from ..ir.expr import FALSE, TRUE, Expr, const, index, load, rewrite
from ..ir.ops import Array, Op, Type
from .boxes import Boxes, Tables
from .cuts import cut, uncut
from .linear import INDICES
from .normal import normal
from .picture import TileMap
from .ranges import FAR, Index, Piece, opened
from .reasons import Atom, explain_atoms
from .runs import Runs, reduce_rows
from .summary import Pieces, Side, reproducible

__all__ = ["EMPTY", "FULL", "PARTIAL", "Atom", "TileMap", "classify", "explain_atoms"]

EMPTY, PARTIAL, FULL = 0, 1, 2

# Grids of more tiles are classified coarsely first.
PYRAMID_TILES = 1 << 18
COARSER = 16
# Tiles, and boxes of pieces, that are worked on at a time.
CHUNK_TILES = 1 << 19
CHUNK_BOXES = 1 << 18


def classify(
    mask: Expr,
    q_len: int,
    kv_len: int,
    *,
    block_m: int,
    block_n: int,
    values: Mapping[str, Any],
    b: int = 0,
    h: int = 0,
    hk: int = 0,
    q_offset: int = 0,
    strict: Dtype | None = None,
) -> Array:
    """The kind of each tile, uint8 [q tiles, kv tiles].

    `values` maps captures to scalars and arrays of the types that the mask declares; a dimension of
    length 1 that stands for a longer one is broadcast by the caller. `strict` is the precision of
    floats that decide: float64 where `values` holds that, else float32.
    """
    scalars = {"b": b, "h": h, "hk": hk, "q_len": q_len, "kv_len": kv_len}
    arrays = {name: np.asarray(value) for name, value in values.items()}
    if strict is None:
        strict = np.float64 if any(a.dtype == np.float64 for a in arrays.values()) else np.float32
    with np.errstate(all="ignore"):
        grounded, tables = ground(mask, {**arrays, **scalars}, strict)
        grid = Grid(
            Side("i", q_offset, q_len, block_m, tables, strict),
            Side("j", 0, kv_len, block_n, tables, strict),
        )
        return _kinds(normal(grounded), grid)


@dataclass(frozen=True)
class Grid:
    """The rows and the columns of a mask."""

    q: Side
    kv: Side

    @property
    def shape(self) -> tuple[int, int]:
        """How many tiles there are."""
        return self.q.tiles, self.kv.tiles

    @property
    def coarser(self) -> Grid:
        """The same pairs in larger tiles."""
        return Grid(
            self.q.in_blocks(COARSER * self.q.block), self.kv.in_blocks(COARSER * self.kv.block)
        )

    def side(self, x: Index) -> Side:
        """The side that an index runs over."""
        return self.q if x == "i" else self.kv


# -- scalars ---------------------------------------------------------------------------------------


def ground(mask: Expr, values: Mapping[str, Any], strict: Dtype) -> tuple[Expr, dict[str, Any]]:
    """The mask with every value that is free of i and j put in, and the tables it still reads."""
    tables = dict(values)

    def rule(node: Expr) -> Expr:
        if node.op is Op.LOAD:
            return _sliced(node, tables)
        known = node.op in (Op.CAPTURE, Op.SIZE) or (
            node.op is Op.INDEX and node.attr not in INDICES
        )
        if not known and not (node.args and all(a.is_const for a in node.args)):
            return node
        return _constant(node, values, strict) if reproducible(node) else node

    return rewrite(mask, rule), tables


def _constant(node: Expr, values: Mapping[str, Any], strict: Dtype) -> Expr:
    value = evaluate(node, values, strict, strict).item()
    return const({Type.BOOL: bool, Type.INT: int, Type.FLOAT: float}[node.type](value), node.span)


def _sliced(node: Expr, tables: dict[str, Any]) -> Expr:
    """A read with some constant indices, as a read of the slice that they pick."""
    at = tuple(a.attr if a.is_const else slice(None) for a in node.args)
    rest = tuple(a for a in node.args if not a.is_const)
    if len(rest) == len(at):
        return node
    table = np.asarray(tables[node.attr])
    picks = zip(at, table.shape, strict=True)
    inside = all(isinstance(k, slice) or 0 <= k < n for k, n in picks)
    entry = table[at] if inside else np.zeros((), table.dtype)
    if entry.ndim == 0:
        kinds = {Type.BOOL: bool, Type.INT: int, Type.FLOAT: float}
        return const(kinds[node.type](entry), node.span)
    words = ", ".join(str(a.attr) if a.is_const else ":" for a in node.args)
    name = f"{node.attr}[{words}]"
    tables[name] = entry
    return load(name, rest, node.type, node.span)


# -- kinds -----------------------------------------------------------------------------------------


def _kinds(mask: Expr, grid: Grid) -> Array:
    if mask in (TRUE, FALSE) or 0 in grid.shape:
        return np.full(grid.shape, FULL if mask == TRUE else EMPTY, np.uint8)
    kinds = _seen_from_afar(mask, grid)
    means = Means.of(mask, grid)
    step = max(1, CHUNK_TILES // grid.kv.tiles)
    for start in range(0, grid.q.tiles, step):
        q, kv = np.nonzero(kinds[start : start + step] == PARTIAL)
        kinds[q + start, kv] = means.kinds(q + start, kv)
    return kinds


def _seen_from_afar(mask: Expr, grid: Grid) -> Array:
    """What larger tiles show already; the rest is partial."""
    if grid.q.tiles * grid.kv.tiles <= PYRAMID_TILES:
        return np.full(grid.shape, PARTIAL, np.uint8)
    coarse = _kinds(mask, grid.coarser)
    kinds = np.empty(grid.shape, np.uint8)
    for row, start in zip(coarse, range(0, grid.q.tiles, COARSER), strict=True):
        kinds[start : start + COARSER] = row.repeat(COARSER)[: grid.kv.tiles]
    return kinds


@dataclass(frozen=True)
class Means:
    """Ranges in both directions, then intervals over whole tiles, then over pieces of tiles."""

    solved: tuple[Solved, ...]
    tests: tuple[IntervalTest, ...]

    @staticmethod
    def of(mask: Expr, grid: Grid) -> Means:
        """Everything that can be prepared for a mask."""
        solved = tuple(Solved.of(mask, grid, x) for x in ("j", "i"))
        tables = Tables(grid.q.values, grid.q.strict)
        whole = IntervalTest(mask, uncut(grid.q), uncut(grid.kv), solved, tables)
        fine = IntervalTest(mask, cut(mask, grid.q), cut(mask, grid.kv), solved, tables)
        return Means(solved, (whole, fine) if fine.boxes_per_pair > 1 else (whole,))

    def kinds(self, q: Array, kv: Array) -> Array:
        """The kinds of pairs of tiles."""
        kinds = np.full(q.shape, PARTIAL, np.uint8)
        for solved in self.solved:
            seen, full = solved.decide(q, kv)
            kinds[~seen] = EMPTY
            kinds[full] = FULL
        for test in self.tests:
            rest = np.flatnonzero(kinds == PARTIAL)
            kinds[rest] = test.kinds(q[rest], kv[rest])
        return kinds


@dataclass(frozen=True)
class Solved:
    """The runs of a mask solved for x, per tile of the other index."""

    x: Index
    pieces: tuple[tuple[Piece, Runs], ...]
    lo: Array  # the first and last x of each tile
    hi: Array

    @staticmethod
    def of(mask: Expr, grid: Grid, x: Index) -> Solved:
        """Solve, and evaluate the rows."""
        rows = grid.side("j" if x == "i" else "i")
        sure = (_reproducible(p, index(x)) for p in opened(mask, x))
        pieces = tuple((p, _runs(p, rows)) for p in sure)
        return Solved(x, pieces, *grid.side(x).ends)

    def decide(self, q: Array, kv: Array) -> tuple[Array, Array]:
        """Which pairs of tiles some visible run meets, and which lie within full runs."""
        seen, full = (np.zeros(q.shape, bool) for _ in range(2))
        for p, runs in self.pieces:
            hit, inside = self.meets(runs, q, kv)
            seen |= hit
            full |= inside & p.is_pure
        for runs in self.unions:
            full |= self.meets(runs, q, kv)[1]
        return seen, full

    def meets(self, runs: Runs, q: Array, kv: Array) -> tuple[Array, Array]:
        """Which pairs of tiles meet a visible run, and which lie within the full one."""
        row, tile = (q, kv) if self.x == "j" else (kv, q)
        first, last = self.lo[tile], self.hi[tile]
        lo, hi, full_lo, full_hi = (r[row] for r in runs.ends)
        return (first <= hi) & (last >= lo), (first >= full_lo) & (last <= full_hi)

    @functools.cached_property
    def unions(self) -> list[Runs]:
        """Full runs of pure pieces that touch are one: their union may cover a tile."""
        full = [(r.full_lo, r.full_hi) for p, r in self.pieces if p.is_pure]
        if len(full) < 2:
            return []
        order = np.argsort(np.stack([lo for lo, _ in full]), axis=0, kind="stable")
        los, his = (np.take_along_axis(np.stack(x), order, 0) for x in zip(*full, strict=True))
        unions, lo, hi = [], los[0], his[0]
        for next_lo, next_hi in zip(los[1:], his[1:], strict=True):
            real = next_lo <= next_hi
            touches = real & (lo <= hi) & (next_lo <= hi + 1)
            lo = np.where(touches | ~real, lo, next_lo)
            hi = np.where(touches, np.maximum(hi, next_hi), np.where(real, next_hi, hi))
            unions.append(Runs(lo, hi, lo, hi))
        return unions


def _reproducible(p: Piece, x: Expr) -> Piece:
    """The piece with what a backend may compute in another way moved to its conditions."""
    if all(map(reproducible, (*p.los, *p.his, *p.guards))):
        return p
    los, his, guards = (tuple(filter(reproducible, q)) for q in (p.los, p.his, p.guards))
    opaque = [lo <= x for lo in p.los if not reproducible(lo)]
    opaque += [x <= hi for hi in p.his if not reproducible(hi)]
    opaque += [g for g in p.guards if not reproducible(g)]
    return Piece(los, his, guards, (*p.opaque, *opaque))


def _runs(p: Piece, rows: Side) -> Runs:
    def row(e: Expr) -> Array:
        return rows.at_positions(e)

    lo = np.maximum.reduce([np.full(rows.length, -FAR), *map(row, p.los)])
    hi = np.minimum.reduce([np.full(rows.length, FAR), *map(row, p.his)])
    alive = np.logical_and.reduce([np.full(rows.length, True), *map(row, p.guards)])
    return reduce_rows(lo, hi, alive, rows.starts)


@dataclass(frozen=True)
class IntervalTest:
    """The interval test of single tiles, in pieces given by `rows` and `columns`."""

    mask: Expr
    rows: Pieces
    columns: Pieces
    solved: tuple[Solved, ...]
    tables: Tables

    @property
    def boxes_per_pair(self) -> int:
        """How many boxes a pair of tiles is cut into."""
        return int(self.rows.lo.shape[1] * self.columns.lo.shape[1])

    def kinds(self, q: Array, kv: Array) -> Array:
        """The kind of each pair of tiles."""
        step = max(1, CHUNK_BOXES // self.boxes_per_pair)
        parts = [self._kinds(q[k : k + step], kv[k : k + step]) for k in range(0, len(q), step)]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint8)

    def _kinds(self, q: Array, kv: Array) -> Array:
        boxes = Boxes(self.rows, self.columns, q, kv, self.tables)
        maybe, surely = _over(boxes, self.mask)
        for solved in self.solved:
            if not all(p.is_pure for p, _ in solved.pieces):
                some, every = _by_pieces(boxes, solved)
                maybe, surely = maybe & some, surely | every
        return np.where(~maybe, EMPTY, np.where(surely, FULL, PARTIAL)).astype(np.uint8)


def _over(boxes: Boxes, e: Expr) -> tuple[Array, Array]:
    """Whether a condition may be true in some box of a pair, and whether it is in all of them."""
    found, real = boxes.interval(e), boxes.real
    return (found.hi & real).any((1, 2)), (found.lo | ~real).all((1, 2))


def _by_pieces(boxes: Boxes, solved: Solved) -> tuple[Array, Array]:
    """A pair is empty if it meets no piece, or only where its conditions are never true."""
    some, every = np.zeros(len(boxes.q), bool), np.zeros(len(boxes.q), bool)
    for p, runs in solved.pieces:
        hit, inside = solved.meets(runs, boxes.q, boxes.kv)
        tests = [_over(boxes, e) for e in p.opaque]
        some |= np.logical_and.reduce([hit, *(t for t, _ in tests)])
        every |= np.logical_and.reduce([inside, *(f for _, f in tests)])
    return some, every

"""What a tile of rows makes of a piece, in NumPy: the reference of what kernels do.

rows 0..3 of  j <= i   ->   visible 0..3, full 0..0
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..ir.ops import Array
from .pieces import FAR


@dataclass(frozen=True)
class Runs:
    """What each tile of rows makes of one piece: ranges of x, both ends included.

    Empty where lo > hi. `full` does not know of opaque conditions.
    """

    lo: Array
    hi: Array
    full_lo: Array
    full_hi: Array

    @property
    def ends(self) -> tuple[Array, Array, Array, Array]:
        """lo, hi, full_lo, full_hi."""
        return self.lo, self.hi, self.full_lo, self.full_hi


def reduce_rows(lo: Array, hi: Array, alive: Array, starts: Array) -> Runs:
    """The runs of tiles, from max(los), min(his) and all(guards) of every row that exists.

    `starts` are the first rows of the tiles.
    """
    lo, hi = np.where(alive, lo, FAR), np.where(alive, hi, -FAR)
    seen = lo <= hi
    return Runs(
        np.minimum.reduceat(np.where(seen, lo, FAR), starts),
        np.maximum.reduceat(np.where(seen, hi, -FAR), starts),
        np.maximum.reduceat(lo, starts),
        np.minimum.reduceat(hi, starts),
    )


def disjoint(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs [start, end) in order, each cut where the ones before it end."""
    result, last = [], 0
    for start, end in sorted(runs):
        start = max(start, last)
        if start < end:
            result.append((start, end))
            last = end
    return result

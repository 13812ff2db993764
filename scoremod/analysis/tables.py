"""Tables prepared for look-ups over boxes of indices; outside, a table reads 0.

RangeTable(t).over([3..9])       ->   least and greatest of t[3..9]
TruthTable(keep).over([3..9])      ->   whether all, or any, of keep[3..9] is true
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np

from ..ir.ops import Array, Op
from .interval import Interval, bools, meaning

Ends = tuple[Array, Array]


def clipped(ranges: Sequence[Interval], shape: tuple[int, ...]) -> tuple[list[Ends], Array, Array]:
    """Index ranges cut to the table; where they may leave it, and where some of it is inside."""
    inside, leaves, meets = [], np.False_, np.True_
    for x, n in zip(ranges, shape, strict=True):
        leaves = leaves | (x.lo < 0) | (x.hi >= n)
        meets = meets & (x.hi >= 0) & (x.lo < n)
        lo = np.clip(x.lo, 0, max(n - 1, 0))
        inside.append((lo, np.maximum(np.clip(x.hi, 0, max(n - 1, 0)), lo)))
    return inside, leaves, meets


class TruthTable:
    """A bool table as sums over corners: how many entries of a box are true, in 2**rank reads."""

    def __init__(self, table: Array, outside: bool) -> None:
        self.table, self.shape, self.outside = table, table.shape, outside

    @functools.cached_property
    def sums(self) -> Array:
        """How many entries before each corner are true."""
        dtype = np.int64 if self.table.size >= 2**31 else np.int32
        sums = np.pad(self.table.astype(dtype), [(1, 0)] * self.table.ndim)
        for axis in range(sums.ndim):
            np.cumsum(sums, axis=axis, out=sums)
        return sums

    def over(self, ranges: Sequence[Interval]) -> Interval:
        """Whether all, and whether some, of the entries that the ranges reach are true."""
        if 0 in self.shape:
            return bools(self.outside, self.outside)
        inside, leaves, meets = clipped(ranges, self.shape)
        count, size = np.int64(0), np.int64(1)
        for corner in itertools.product((0, 1), repeat=len(inside)):
            sign = (-1) ** (len(corner) - sum(corner))
            at = tuple(hi + 1 if c else lo for c, (lo, hi) in zip(corner, inside, strict=True))
            count = count + sign * self.sums[at].astype(np.int64)
        for lo, hi in inside:
            size = size * (hi - lo + 1)
        some, every = meets & (count > 0), ~meets | (count == size)
        return bools(every & (~leaves | self.outside), some | (leaves & self.outside))


# Longer tables are kept by blocks, which widens a range to whole blocks.
MAX_FINE = 1 << 17
BLOCK = 32


class RangeTable:
    """Least and greatest over ranges of a vector: two overlapping powers of two cover any range.

    Tables of more dimensions answer exactly for single entries, and roughly for boxes.
    """

    def __init__(self, table: Array) -> None:
        self.shape = table.shape
        missing = np.isnan(table) if table.dtype.kind == "f" else np.False_
        self.nan = np.any(missing)
        self.clean = np.where(missing, np.zeros_like(table), table)
        self.block = 1 if table.size <= MAX_FINE else BLOCK

    @functools.cached_property
    def levels(self) -> Ends:
        """Least and greatest of 2**k neighbouring blocks, [k, block]."""
        starts = np.arange(0, len(self.clean), self.block)
        lows, highs = (
            [np.minimum.reduceat(self.clean, starts)],
            [np.maximum.reduceat(self.clean, starts)],
        )
        while 2 << (len(lows) - 1) <= len(starts):
            step = 1 << (len(lows) - 1)
            lows.append(np.minimum(lows[-1][:-step], lows[-1][step:]))
            highs.append(np.maximum(highs[-1][:-step], highs[-1][step:]))
        padded = ([_padded(x, len(starts)) for x in level] for level in (lows, highs))
        low, high = map(np.stack, padded)
        return low, high

    def over(self, ranges: Sequence[Interval]) -> Interval:
        """Least and greatest of the entries that the ranges reach."""
        zero = np.zeros((), self.clean.dtype)
        if not self.clean.size:
            return Interval(zero, zero)
        inside, leaves, meets = clipped(ranges, self.shape)
        lo, hi = self._line(*inside[0]) if len(inside) == 1 else self._box(inside)
        lo = np.where(meets, np.where(leaves, np.minimum(lo, zero), lo), zero)
        hi = np.where(meets, np.where(leaves, np.maximum(hi, zero), hi), zero)
        return Interval(lo, hi, self.nan)

    def _line(self, lo: Array, hi: Array) -> Ends:
        lo, hi = lo // self.block, hi // self.block
        k = meaning(Op.ILOG2)(hi - lo + 1)
        other = hi - np.left_shift(np.int64(1), k) + 1
        lows, highs = self.levels
        return np.minimum(lows[k, lo], lows[k, other]), np.maximum(highs[k, lo], highs[k, other])

    def _box(self, inside: list[Ends]) -> Ends:
        known = np.logical_and.reduce(np.broadcast_arrays(*(lo == hi for lo, hi in inside)))
        value = self.clean[tuple(lo for lo, _ in inside)]
        return np.where(known, value, self.clean.min()), np.where(known, value, self.clean.max())


def _padded(x: Array, n: int) -> Array:
    return np.pad(x, (0, n - len(x)), mode="edge")

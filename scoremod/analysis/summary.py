"""What a tile's rows, or its columns, make of an expression of one index: exact, and O(length).

    doc[i] over rows 0..127   ->   least 3, greatest 5

A tile is looked at in pieces, stretches of positions on which more can be said; any cut is sound,
since a tile is empty, or full, if all its pieces are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..ir.evaluate import Dtype, evaluate
from ..ir.expr import Expr
from ..ir.ops import INT_MAX, INT_MIN, Array, Op, Type
from .facts import remembered
from .interval import Interval, bools
from .linear import INDICES

# Functions that a backend may round in another way than NumPy.
INEXACT = frozenset((
    Op.EXP, Op.EXP2, Op.EXPM1, Op.LOG, Op.LOG2, Op.LOG1P, Op.RSQRT, Op.TANH, Op.SIGMOID,
    Op.SOFTPLUS, Op.ERF, Op.SIN, Op.COS,
))  # fmt: skip
INEXACT_OF_FLOATS = frozenset((Op.POW, Op.FLOORDIV, Op.MOD))
# Positions evaluated at a time, so that the values of every operation stay in the cache.
CHUNK = 1 << 16
# lo of a piece that does not exist; hi is its negative.
NO_PIECE = 1 << 40


def reproducible(root: Expr) -> bool:
    """Whether every backend computes the very value that NumPy does."""
    return bool(remembered(root, "reproducible", _reproducible))


def _reproducible(node: Expr) -> bool:
    inexact = node.op in INEXACT or (node.type is Type.FLOAT and node.op in INEXACT_OF_FLOATS)
    return not inexact and all(a.__dict__["reproducible"] for a in node.args)


@dataclass(frozen=True)
class Side:
    """The rows (i) or the columns (j) of a grid of tiles, and the tables they read."""

    index: str
    first: int
    length: int
    block: int
    values: Mapping[str, Any]
    strict: Dtype
    memo: dict[Expr, Array] = field(default_factory=dict, compare=False, repr=False)

    @property
    def tiles(self) -> int:
        """How many tiles there are."""
        return -(-self.length // self.block)

    @property
    def starts(self) -> Array:
        """The first position of each tile, counted from 0."""
        return np.arange(0, self.length, self.block)

    @property
    def ends(self) -> tuple[Array, Array]:
        """The first and last index of each tile."""
        lo = self.starts + self.first
        return lo, np.minimum(lo + self.block, self.first + self.length) - 1

    def in_blocks(self, block: int) -> Side:
        """The same positions in other tiles."""
        return replace(self, block=block)

    def at_positions(self, e: Expr) -> Array:
        """The value of `e` at every position."""
        if e.op is Op.INDEX and e.attr == self.index:
            return np.arange(self.first, self.first + self.length)
        if e not in self.memo:
            parts = [self._stretch(e, k) for k in range(0, self.length, CHUNK)]
            self.memo[e] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return self.memo[e]

    def _stretch(self, e: Expr, start: int) -> Array:
        stop = min(start + CHUNK, self.length)
        positions = np.arange(self.first + start, self.first + stop)
        values = {**self.values, self.index: positions}
        return np.broadcast_to(evaluate(e, values, self.strict, self.strict), positions.shape)


@dataclass(frozen=True)
class Pieces:
    """Every tile of a side in pieces lo..hi [tiles, pieces], both included; lo > hi is no piece.

    Positions where `keep` is false are left out; lo and hi are the first and last one kept.
    """

    side: Side
    lo: Array
    hi: Array
    keep: Array | None = None
    memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def real(self) -> Array:
        """Which pieces exist."""
        return self.lo <= self.hi

    def interval(self, e: Expr) -> Interval:
        """The exact least and greatest value of an expression of this side's index."""
        if e.op is Op.INDEX:
            return Interval(self.lo, self.hi)
        if e not in self.memo:
            self.memo[e] = self._summary(self.side.at_positions(e))
        found = self.memo[e]
        assert isinstance(found, Interval)
        return found

    def _summary(self, x: Array) -> Interval:
        if x.dtype.kind == "b":
            keep = self.keep if self.keep is not None else np.True_
            every = self.reduce(np.logical_and, x | ~keep, True)
            return bools(every, self.reduce(np.logical_or, x & keep, False))
        if x.dtype.kind == "f":
            x = self._kept(x, np.nan)
            lo, hi = (self.reduce(f, x, np.nan) for f in (np.fmin, np.fmax))
            nan = self.reduce(np.logical_or, np.isnan(x) & self._kept(np.True_, False), False)
            return Interval(_or_else(lo, -np.inf), _or_else(hi, np.inf), nan)
        lo = self.reduce(np.minimum, self._kept(x, INT_MAX), INT_MAX)
        return Interval(lo, self.reduce(np.maximum, self._kept(x, INT_MIN), INT_MIN))

    def _kept(self, x: Array, otherwise: Any) -> Array:
        if self.keep is None:
            return np.broadcast_to(x, self.side.length)
        return np.where(self.keep, x, np.asarray(otherwise, np.asarray(x).dtype))

    def bits(self, name: Any, values: Callable[[], Array], every: bool = False) -> Array:
        """The union (what `every` position has) of 64-bit sets; `name` is for memory."""
        if name not in self.memo:
            ufunc, none = (
                (np.bitwise_and, ~np.uint64(0)) if every else (np.bitwise_or, np.uint64(0))
            )
            self.memo[name] = self.reduce(ufunc, self._kept(values(), none), none)
        return self.memo[name]

    def narrowed(self, guards: tuple[Expr, ...]) -> Pieces:
        """The same pieces without the positions where a guard is false."""
        if not guards:
            return self
        if guards not in self.memo:
            keep = np.logical_and.reduce([self.side.at_positions(g) for g in guards])
            keep = keep if self.keep is None else keep & self.keep
            at = np.arange(self.side.length) + self.side.first
            lo = self.reduce(np.minimum, np.where(keep, at, NO_PIECE), NO_PIECE)
            hi = self.reduce(np.maximum, np.where(keep, at, -NO_PIECE), -NO_PIECE)
            self.memo[guards] = Pieces(self.side, lo, hi, keep)
        found = self.memo[guards]
        assert isinstance(found, Pieces)
        return found

    def reduce(self, ufunc: np.ufunc, x: Array, none: Any) -> Array:
        """`ufunc` over the positions of each piece."""
        return reduced(ufunc, x, self.lo - self.side.first, self.hi - self.side.first, none)


def reduced(ufunc: np.ufunc, x: Array, lo: Array, hi: Array, none: Any) -> Array:
    """ufunc.reduce(x[lo : hi + 1]) for arrays lo and hi in order; `none` where lo > hi."""
    real = lo <= hi
    # reduceat takes from each index to the next; every second result is a stretch between pieces.
    stops = np.where(real, hi + 1, 0).reshape(-1)
    before = np.maximum.accumulate(np.append(0, stops[:-1])).reshape(lo.shape)
    bounds = np.stack([np.where(real, lo, before), np.where(real, hi + 1, before)], -1).reshape(-1)
    padded = np.append(x, np.asarray(none, x.dtype))
    found = ufunc.reduceat(padded, bounds)[::2].reshape(lo.shape)
    return np.where(real, found, np.asarray(none, found.dtype))


def _or_else(x: Array, value: float) -> Array:
    return np.where(np.isnan(x), np.asarray(value, x.dtype), x)


def names_one_index(e: Expr) -> str | None:
    """i or j, if the value depends on just that one."""
    found = e.names & INDICES
    return next(iter(found)) if len(found) == 1 else None

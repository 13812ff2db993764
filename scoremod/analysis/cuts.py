"""Where to cut a tile into pieces: at runs of `//` and `%`, and where a table changes.

    i // 48   with tiles of 128   ->   head, whole runs, tail

Any cut is sound. A whole run is a rectangle in (i // 48, i % 48), so that the product of intervals
is exact on it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from ..ir.expr import Expr, postorder
from ..ir.ops import Array, Op, Type
from .linear import Sum
from .summary import NO_PIECE, Pieces, Side, names_one_index, reproducible

# Pieces per tile; a period that would need more is left uncut.
MAX_PIECES = 6
# Whole runs that are looked at one by one where each has a value of its own.
MAX_EACH = 4
# A table that changes more often per tile, on average, is rough: cutting it gains nothing.
MAX_CHANGES = 4


@dataclass(frozen=True, order=True)
class Period:
    """Runs begin where (x + offset) % length == 0; `each`: every run has a value of its own."""

    length: int
    offset: int
    each: bool = False


def cut(mask: Expr, side: Side) -> Pieces:
    """The tiles of one side in pieces; the mask is in normal form, without scalars."""
    lo, hi = at_changes(mask, side)
    return Pieces(side, *at_runs(lo, hi, periods(mask, side.index)))


def uncut(side: Side) -> Pieces:
    """Each tile as one piece."""
    lo, hi = side.ends
    return Pieces(side, lo[:, None], hi[:, None])


# -- runs ------------------------------------------------------------------------------------------

# What makes a value of its own of each quotient: a table, or the bits of a hash.
_SCATTERS = frozenset((Op.LOAD, Op.BITAND, Op.BITOR, Op.BITXOR, Op.SHR))


# A run longer than any sequence is not worth a cut, and its length must fit in 64 bits.
MAX_PERIOD = 2**47


@functools.lru_cache(maxsize=512)
def periods(mask: Expr, x: str) -> list[Period]:
    """The runs in a mask, longest first."""
    found: dict[tuple[int, int], bool] = {}
    scattered: set[int] = set()
    for node in reversed(list(postorder(mask))):
        if node.op in _SCATTERS or id(node) in scattered:
            scattered.update(map(id, node.args))
        key = _period(node, x)
        if key is not None and key[0] <= MAX_PERIOD:
            found[key] = found.get(key, False) or id(node) in scattered
    return sorted((Period(*key, each) for key, each in found.items()), reverse=True)


def _period(node: Expr, x: str) -> tuple[int, int] | None:
    if node.op not in (Op.FLOORDIV, Op.MOD) or names_one_index(node) != x:
        return None
    inner, divisor = node.args
    if not divisor.is_const or divisor.attr <= 1 or node.type is not Type.INT:
        return None
    total, c = Sum.of(inner), divisor.attr
    if list(total.terms.values()) != [1]:
        return None
    (term,) = total.terms
    if term.op is Op.INDEX:
        return c, total.constant % c
    if term.op not in (Op.FLOORDIV, Op.MOD) or term.args[0].op is not Op.INDEX:
        return None
    return _nested(term, c, total.constant)


def _nested(term: Expr, c: int, offset: int) -> tuple[int, int] | None:
    """(i // w + offset) // c, and (i % (k * c) + offset) // c."""
    w = term.args[1].attr if term.args[1].is_const else 0
    if w <= 0 or (term.op is Op.MOD and w % c):
        return None
    return (c * w, offset * w % (c * w)) if term.op is Op.FLOORDIV else (c, offset % c)


def at_runs(lo: Array, hi: Array, found: list[Period]) -> tuple[Array, Array]:
    """Cut pieces at runs, longest first; whole runs are not cut again by a shorter period."""
    whole = np.zeros(lo.shape, bool)
    for period in found:
        new = _at_period(lo, hi, whole, period)
        count = max(1, int((new[0] <= new[1]).sum(1).max(initial=0)))
        if count <= MAX_PIECES:
            lo, hi, whole = (part[:, :count] for part in new)
    return lo, hi


def _at_period(lo: Array, hi: Array, whole: Array, period: Period) -> tuple[Array, Array, Array]:
    """Head, whole runs and tail of each piece, those that exist first, in order."""
    p, o = period.length, period.offset
    first = np.where(whole, hi + 1, -(-(lo + o) // p) * p - o)
    last = np.where(whole, hi + 1, (hi + 1 + o) // p * p - o)
    single = period.each & (last - first <= MAX_EACH * p)
    runs = []
    for k in range(MAX_EACH if period.each else 1):
        start = np.where(single, first + k * p, first if k == 0 else hi + 1)
        stop = np.where(single, np.minimum(start + p, last), last if k == 0 else hi + 1)
        runs.append((start, np.where(start < last, stop, start) - 1))
    los = np.concatenate([lo, *(a for a, _ in runs), np.maximum(first, last)], 1)
    his = np.concatenate([np.minimum(first - 1, hi), *(b for _, b in runs), hi], 1)
    done = np.concatenate([whole, *(np.ones_like(whole) for _ in runs), whole], 1)
    order = np.argsort(np.where(los <= his, los, NO_PIECE), axis=1, kind="stable")
    return tuple(np.take_along_axis(x, order, 1) for x in (los, his, done))  # type: ignore[return-value]


# -- changes of a table ----------------------------------------------------------------------------


def at_changes(mask: Expr, side: Side) -> tuple[Array, Array]:
    """Head, middle and tail of each tile by the first and last change of a table."""
    lo, hi = side.ends
    if side.block > 1:
        for term in _table_terms(mask, side.index):
            x = side.at_positions(term)
            change = np.append(False, x[1:] != x[:-1])
            change[side.starts] = False
            if change.any() and change.sum() <= MAX_CHANGES * side.tiles:
                return _between_changes(side, change, lo, hi)
    return lo[:, None], hi[:, None]


def _between_changes(side: Side, change: Array, lo: Array, hi: Array) -> tuple[Array, Array]:
    at = np.arange(side.length) + side.first
    first = np.minimum.reduceat(np.where(change, at, NO_PIECE), side.starts)
    last = np.maximum.reduceat(np.where(change, at, -NO_PIECE), side.starts)
    first = np.minimum(first, hi + 1)
    last = np.where(first > hi, hi + 1, last)
    return np.stack([lo, first, last], 1), np.stack([first - 1, last - 1, hi], 1)


@functools.lru_cache(maxsize=512)
def _table_terms(mask: Expr, x: str) -> list[Expr]:
    """One-index terms with a table, those of equalities first."""
    equal: list[Expr] = []
    other: list[Expr] = []
    for node in postorder(mask):
        if node.op in (Op.EQ, Op.LE) and node.args[0].type is Type.INT:
            mine = Sum.of(node.args[0]).part(x).expr()
            (equal if node.op is Op.EQ else other).extend([mine] if mine is not None else [])
        if node.op is Op.LOAD and len(node.args) == 2:
            other.extend(node.args)
    return [t for t in equal + other if names_one_index(t) == x and _gathers(t) and reproducible(t)]


def _gathers(e: Expr) -> bool:
    return any(n.op is Op.LOAD for n in postorder(e))

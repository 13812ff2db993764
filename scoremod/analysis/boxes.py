"""Intervals of a mask over boxes of (i, j): pairs of a piece of a q tile and one of a kv tile.

    j <= i and doc[i] == doc[j]   over rows 0..127, columns 128..255   ->   never true

What depends on one index is exact (`summary.py`); the rest follows the rules of `interval.py`,
with sharper ones for sums, equality, tables and guards. Arrays are [pairs of tiles, pieces of the q
tile, pieces of the kv tile].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..ir.evaluate import Dtype, evaluate
from ..ir.expr import Expr, capture, postorder, rewrite
from ..ir.ops import Array, Op, Type
from .facts import bounds, exact
from .interval import INTERVAL, Interval, bools, point
from .linear import Sum, indices
from .normal import INT_ZERO, negation, operands
from .summary import Pieces, names_one_index, reproducible
from .tables import RangeTable, TruthTable


@dataclass
class Boxes:
    """Pairs of tiles: `q[p]` and `kv[p]` are the tiles of pair p."""

    rows: Pieces
    columns: Pieces
    q: Array
    kv: Array
    tables: Tables
    memo: dict[Expr, Interval] = field(default_factory=dict)
    narrowed: dict[tuple[Expr, ...], Boxes] = field(default_factory=dict)

    @property
    def real(self) -> Array:
        """Which boxes exist."""
        return self._spread(self.rows.real, "i") & self._spread(self.columns.real, "j")

    def _spread(self, x: Array, index: str) -> Array:
        """An array [tiles, pieces] of one side, as one of this class's shape."""
        return x[self.q][:, :, None] if index == "i" else x[self.kv][:, None, :]

    def pieces(self, index: str) -> Pieces:
        """The side that an index runs over."""
        return self.rows if index == "i" else self.columns

    def interval(self, e: Expr) -> Interval:
        """Bounds of an expression of any type."""
        if e not in self.memo:
            self.memo[e] = self._stored(e, self._interval(e))
        return self.memo[e]

    def _interval(self, e: Expr) -> Interval:
        index = names_one_index(e)
        if index is not None and reproducible(e):
            found = self.pieces(index).interval(e)
            nan = self._spread(found.nan, index) if np.ndim(found.nan) else found.nan
            return Interval(self._spread(found.lo, index), self._spread(found.hi, index), nan)
        if e.op is Op.CONST:
            return point(np.asarray(e.attr))
        if e.type is Type.BOOL and (seen := _through_table(self, e)) is not None:
            return seen
        rule = SHARPER.get(e.op)
        return rule(self, e) if rule else self.by_rule(e)

    def bits(
        self, index: str, name: Any, values: Callable[[], Array], every: bool = False
    ) -> Array:
        """The union (intersection) of 64-bit sets at the positions of each piece."""
        return self._spread(self.pieces(index).bits(name, values, every), index)

    def by_rule(self, e: Expr) -> Interval:
        """What the operands' bounds say."""
        return INTERVAL[e.op](*map(self.interval, e.args))

    def _stored(self, e: Expr, x: Interval) -> Interval:
        """Floats in the precision that they are computed in; rounding is monotone."""
        if e.type is not Type.FLOAT:
            return x
        strict = self.rows.side.strict
        return Interval(np.asarray(x.lo).astype(strict), np.asarray(x.hi).astype(strict), x.nan)

    def narrow(self, guards: tuple[Expr, ...]) -> Boxes:
        """The same boxes without the rows and columns where a guard is false."""
        if guards not in self.narrowed:
            mine = {v: tuple(g for g in guards if names_one_index(g) == v) for v in "ij"}
            self.narrowed[guards] = Boxes(
                self.rows.narrowed(mine["i"]), self.columns.narrowed(mine["j"]),
                self.q, self.kv, self.tables,
            )  # fmt: skip
        return self.narrowed[guards]


@dataclass
class Tables:
    """The captured tables, and what was made of them for look-ups over boxes."""

    values: Any
    strict: Dtype
    memo: dict[Any, Any] = field(default_factory=dict)

    def truth(self, name: str, condition: Expr) -> TruthTable:
        """The table of where `condition` on one entry holds."""
        key = name, condition
        if key not in self.memo:
            table = np.asarray(self.values[name])
            of = functools.partial(self._entries, condition)
            self.memo[key] = TruthTable(of(table), bool(of(np.zeros((), table.dtype))))
        found = self.memo[key]
        assert isinstance(found, TruthTable)
        return found

    def _entries(self, condition: Expr, table: Array) -> Array:
        values = {**self.values, ENTRY_NAME: table}
        return np.broadcast_to(evaluate(condition, values, self.strict, self.strict), table.shape)

    def extremes(self, name: str) -> RangeTable:
        """Least and greatest entry over ranges of indices."""
        if name not in self.memo:
            table = np.asarray(self.values[name])
            floating = table.dtype.kind == "f"
            self.memo[name] = RangeTable(table.astype(self.strict if floating else np.int64))
        found = self.memo[name]
        assert isinstance(found, RangeTable)
        return found


ENTRY_NAME = "<entry>"
ENTRY = {t: capture(ENTRY_NAME, t) for t in (Type.BOOL, Type.INT, Type.FLOAT)}


# -- sharper rules ---------------------------------------------------------------------------------


def _sum(boxes: Boxes, e: Expr) -> Interval:
    """The terms of i together, those of j together, then the mixed ones: each part is exact."""
    if e.type is not Type.INT or not exact(e):
        return boxes.by_rule(e)
    total = Sum.of(e)
    parts = [total.part(x) for x in "ij"]
    parts += [Sum({t: k}) for t, k in total.terms.items() if len(indices(t)) != 1]
    spelled = [p.expr() for p in parts if p.terms]
    if (len(spelled) < 2 and not total.constant) or None in spelled:
        return boxes.by_rule(e)
    lo = hi = np.int64(total.constant)
    for part in spelled:
        assert part is not None and part != e
        x = _within_bounds(part, boxes.interval(part))
        # The whole sum fits in 64 bits, so no end of it overflows.
        lo, hi = lo + x.lo, hi + x.hi
    return Interval(lo, hi)


def _within_bounds(e: Expr, x: Interval) -> Interval:
    """Bounds that a rule gave up on, cut to what always holds."""
    if names_one_index(e) and reproducible(e):
        return x
    low, high = bounds(e)
    return Interval(np.maximum(x.lo, low), np.minimum(x.hi, high))


def _load(boxes: Boxes, e: Expr) -> Interval:
    return boxes.tables.extremes(e.attr).over([boxes.interval(a) for a in e.args])


def _through_table(boxes: Boxes, e: Expr) -> Interval | None:
    """A condition on one table entry: the table of its truth, over a box of indices."""
    reads = {n for n in postorder(e) if n.op is Op.LOAD and len(indices(n)) == 2}
    if len(reads) != 1 or not reproducible(e):
        return None
    (read,) = reads
    condition = rewrite(e, lambda n: ENTRY[n.type] if n == read else n)
    if indices(condition):
        return None
    table = boxes.tables.truth(read.attr, condition)
    if _has_types(read) and table.shape[1] <= MAX_TYPES:
        return _type_sets(boxes, read, condition, table)
    return table.over([boxes.interval(a) for a in read.args])


MAX_TYPES = 63


def _has_types(read: Expr) -> bool:
    """Whether this is like allow[type[i], type[j]]."""
    return [names_one_index(a) for a in read.args] == ["i", "j"] and all(
        reproducible(a) and any(n.op is Op.LOAD for n in postorder(a)) for a in read.args
    )


def _type_sets(boxes: Boxes, read: Expr, condition: Expr, table: TruthTable) -> Interval:
    """A q tile's rows of the table as bits, against the types that a kv tile holds: exact."""
    x, y = read.args
    # A type outside the table is bit 63, and its row is the last.
    rows = np.pad(table.table, ((0, 1), (0, 64 - table.shape[1])), constant_values=table.outside)
    sets = (rows * (np.uint64(1) << np.arange(64, dtype=np.uint64))).sum(1, dtype=np.uint64)

    def set_of(index: Array) -> Array:
        return sets[np.where((index >= 0) & (index < len(sets) - 1), index, len(sets) - 1)]

    def bit_of(index: Array) -> Array:
        return _bit(np.where((index >= 0) & (index < table.shape[1]), index, 63))

    key = read, condition
    some = boxes.bits("i", ("some", key), lambda: set_of(boxes.rows.side.at_positions(x)))
    every = boxes.bits("i", ("every", key), lambda: set_of(boxes.rows.side.at_positions(x)), True)
    types = boxes.bits("j", ("types", key), lambda: bit_of(boxes.columns.side.at_positions(y)))
    return bools((types & ~every) == 0, (types & some) != 0)


def _eq(boxes: Boxes, e: Expr) -> Interval:
    found = boxes.by_rule(e)
    if e.args[0].type is not Type.INT or e.args[1] != INT_ZERO:
        return found
    maybe = found.hi & _share_a_value(boxes, e.args[0])
    power = _power_of_two(e.args[0])
    if power is not None:
        maybe = maybe & _holds_a_power(boxes.interval(power))
    return Interval(found.lo, maybe)


def _share_a_value(boxes: Boxes, x: Expr) -> Array:
    """f[i] + g[j] + c == 0: the values of each piece modulo 64, as bits, must meet."""
    total = Sum.of(x)
    f, g = (total.part(v).expr() for v in "ij")
    one_index = all(len(indices(t)) == 1 and reproducible(t) for t in total.terms)
    gathers = any(n.op is Op.LOAD for t in total.terms for n in postorder(t))
    if f is None or g is None or f.is_const or g.is_const or not one_index or not gathers:
        return np.True_
    rows, columns = boxes.rows.side, boxes.columns.side
    of_i = boxes.bits("i", ("values", f), lambda: _bit(rows.at_positions(f)))
    of_j = boxes.bits(
        "j", ("values", g, total.constant), lambda: _bit(-columns.at_positions(g) - total.constant)
    )
    return (of_i & of_j) != 0


def _bit(x: Array) -> Array:
    return np.uint64(1) << (x & 63).astype(np.uint64)


def _power_of_two(x: Expr) -> Expr | None:
    """t, where x is t & (t - 1): it is 0 just at powers of two, and at 0."""
    if x.op is Op.BITAND:
        for a, b in (x.args, x.args[::-1]):
            step = Sum.of(a) - Sum.of(b)
            if not step.terms and step.constant == 1:
                return a
    return None


def _holds_a_power(x: Interval) -> Array:
    top = np.left_shift(np.int64(1), INTERVAL[Op.ILOG2](Interval(x.hi, x.hi)).hi)
    return (
        ((x.lo <= 0) & (x.hi >= 0))
        | ((x.hi >= 1) & (top >= x.lo))
        | (x.lo == np.iinfo(np.int64).min)
    )


def _junction(boxes: Boxes, e: Expr) -> Interval:
    """Terms of one index are guards: for `and`, the others matter only where those hold.

    For `or`, where they do not. The guards' own falsehood (truth) counts everywhere.
    """
    terms = operands(e.op, e)
    guards = tuple(t for t in terms if names_one_index(t) and reproducible(t))
    rest = [t for t in terms if t not in guards]
    join = INTERVAL[e.op]
    if not guards or not rest:
        return functools.reduce(join, map(boxes.interval, terms))
    inside = boxes.narrow(guards if e.op is Op.AND else tuple(map(negation, guards)))
    of_rest = functools.reduce(join, map(inside.interval, rest))
    # Where nothing is left inside, the guards together decide.
    decided, live = e.op is Op.OR, inside.real
    lo, hi = (np.where(live, end, decided) for end in (of_rest.lo, of_rest.hi))
    return functools.reduce(join, map(boxes.interval, guards), Interval(lo, hi))


SHARPER: dict[Op, Callable[[Boxes, Expr], Interval]] = {
    Op.ADD: _sum,
    Op.SUB: _sum,
    Op.NEG: _sum,
    Op.LOAD: _load,
    Op.EQ: _eq,
    Op.AND: _junction,
    Op.OR: _junction,
}

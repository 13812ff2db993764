"""The interval test of one tile as expressions, for a kernel that classifies tiles by itself.

    j <= i                  ->   may be true: j_lo <= i_hi      always true: j_hi <= i_lo
    doc[b, i] == doc[b, j]  ->   may be true: i0_lo - j0_hi <= 0 and i0_hi - j0_lo >= 0

A tile is the box i_lo..i_hi, j_lo..j_hi. What depends on one index and is more than a sum of it is
a `Part`: its least and greatest value over the tile's rows, or columns, is found once per row or
column of tiles. What no rule bounds may be true or false. `interval.py` is the same in numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from ..ir.expr import FALSE, TRUE, Expr, capture, const, make, postorder
from ..ir.ops import Op, Type
from .facts import exact
from .linear import Sum, indices
from .normal import normal
from .summary import names_one_index, reproducible

# Operations of a test; a larger one costs more than looking into the tile.
MAX_NODES = 400


@dataclass(frozen=True)
class Part:
    """An expression of one index, of which a tile knows the least and the greatest value."""

    name: str
    expr: Expr

    @property
    def index(self) -> str:
        return self.name[0]

    @property
    def ends(self) -> tuple[str, str]:
        """The names of its least and its greatest value; for a condition: every, some."""
        return f"{self.name}_lo", f"{self.name}_hi"


@dataclass(frozen=True)
class TileTest:
    """Whether some pair of a tile may attend, and whether every pair surely does."""

    maybe: Expr
    surely: Expr
    parts: tuple[Part, ...] = ()

    def parts_of(self, index: str) -> tuple[Part, ...]:
        """The parts of one index that the test reads."""
        return tuple(p for p in self.parts if p.index == index)


UNDECIDED = TileTest(TRUE, FALSE)


def tile_test(mask: Expr, simplify: Callable[[Expr], Expr] = lambda e: e) -> TileTest:
    """The test of a mask; scalars and what depends on b and h are read as they are."""
    walk = _Walk()
    found = walk.ends(normal(mask))
    assert found is not None  # of a condition
    surely, maybe = map(simplify, found)
    read = {e.attr for e in postorder(surely, maybe) if e.op is Op.CAPTURE}
    parts = tuple(p for p in walk.parts.values() if read & set(p.ends))
    if len(set(postorder(surely, maybe))) > MAX_NODES:
        return UNDECIDED
    return TileTest(maybe, surely, parts)


# The least and the greatest value; of a condition "every" and "some". None: nothing is known.
Ends = tuple[Expr, Expr]


@dataclass
class _Walk:
    """The ends of each node, and the parts that they are made of."""

    parts: dict[Expr, Part] = field(default_factory=dict)
    done: dict[Expr, Ends | None] = field(default_factory=dict)

    def ends(self, root: Expr) -> Ends | None:
        for node in postorder(root):
            if node not in self.done:
                self.done[node] = self._found(node)
        return self.done[root]

    def _found(self, node: Expr) -> Ends | None:
        found = self._by_index(node)
        if found is None and node.op in ENDS and not _is_whole_part(node):
            found = ENDS[node.op](self, node)
        if found is None and node.type is Type.BOOL:
            return FALSE, TRUE
        return found

    def _by_index(self, node: Expr) -> Ends | None:
        """What depends on no index is itself; what depends on one is exact, as a part."""
        if node.op is Op.INDEX and node.attr in ("i", "j"):
            return _captured(node.attr, Type.INT)
        if not indices(node):
            return node, node
        if _is_whole_part(node):
            return _captured(self._part(node).name, node.type)
        return None

    def _part(self, node: Expr) -> Part:
        if node not in self.parts:
            (index,) = indices(node)
            number = sum(p.index == index for p in self.parts.values())
            self.parts[node] = Part(f"{index}{number}", node)
        return self.parts[node]

    def sum(self, total: Sum) -> Ends | None:
        """Terms of i together, terms of j together, then the mixed ones: each part is exact."""
        groups = [total.part(x) for x in "ij"]
        mixed = [Sum({t: k}) for t, k in total.terms.items() if len(indices(t)) > 1]
        free = Sum({t: k for t, k in total.terms.items() if not indices(t)}, total.constant).expr()
        if not total.fits or free is None:
            return None
        lo = hi = free
        for group in [*groups, *mixed]:
            found = self._group(group) if group.terms else (const(0), const(0))
            if found is None:
                return None
            lo, hi = _plus(lo, found[0]), _plus(hi, found[1])
        return lo, hi

    def _group(self, group: Sum) -> Ends | None:
        if len(group.terms) > 1:
            whole = group.expr()
            assert whole is not None
            return self.ends(whole) if reproducible(whole) else None
        ((term, k),) = group.terms.items()
        found = self.ends(term)
        if found is None:
            return None
        lo, hi = found if k > 0 else found[::-1]
        return _times(k, lo), _times(k, hi)


def _captured(name: str, kind: Type) -> Ends:
    return capture(f"{name}_lo", kind), capture(f"{name}_hi", kind)


def _is_whole_part(node: Expr) -> bool:
    """Whether a node is bounded as a whole: one index, and more than a sum of that index."""
    if names_one_index(node) is None or node.type is Type.FLOAT or not reproducible(node):
        return False
    if node.type is Type.INT:
        return not _is_affine(node)
    if node.op in (Op.AND, Op.OR, Op.NOT):
        return any(map(_is_whole_part, node.args))
    return not (node.op in (Op.LE, Op.EQ) and all(map(_is_affine, node.args)))


def _is_affine(node: Expr) -> bool:
    """Whether an int is one index times a number, and terms without index."""
    if node.type is not Type.INT:
        return False
    terms = [t for t in Sum.of(node).terms if indices(t)]
    return len(terms) <= 1 and all(t.op is Op.INDEX for t in terms)


def _plus(x: Expr, y: Expr) -> Expr:
    if y.is_const and y.attr == 0:
        return x
    if x.is_const and x.attr == 0:
        return y
    return make(Op.SUB, x, y.args[0]) if y.op is Op.NEG else make(Op.ADD, x, y)


def _times(k: int, x: Expr) -> Expr:
    if abs(k) == 1:
        return x if k == 1 else make(Op.NEG, x)
    return make(Op.MUL, const(k), x)


# -- rules -------------------------------------------------------------------------------------


Rule = Callable[[_Walk, Expr], Ends | None]


def _int_sum(walk: _Walk, node: Expr) -> Ends | None:
    total = Sum.of(node)
    return None if total.terms.keys() == {node} else walk.sum(total)


def _product(walk: _Walk, node: Expr) -> Ends | None:
    """By a number as a sum; otherwise the extremes are at the corners."""
    if any(a.is_const for a in node.args):
        return _int_sum(walk, node)
    x, y = (walk.done[a] for a in node.args)
    if x is None or y is None or not exact(node):
        return None
    corners = [make(Op.MUL, p, q) for p in dict.fromkeys(x) for q in dict.fromkeys(y)]
    return _extremes(corners)


def _extremes(values: list[Expr]) -> Ends:
    return (
        functools.reduce(lambda a, b: make(Op.MIN, a, b), values),
        functools.reduce(lambda a, b: make(Op.MAX, a, b), values),
    )


def _divisor(node: Expr) -> int | None:
    """A literal divisor above 0."""
    y = node.args[1]
    return int(y.attr) if y.is_const and y.type is Type.INT and y.attr > 0 else None


def _quotient(walk: _Walk, node: Expr) -> Ends | None:
    x = walk.done[node.args[0]]
    if x is None or _divisor(node) is None:
        return None
    lo, hi = (make(Op.FLOORDIV, end, node.args[1]) for end in x)
    return lo, hi


def _remainder(walk: _Walk, node: Expr) -> Ends | None:
    """Within one run of a constant c the ends' residues, else 0..c - 1."""
    x, c = walk.done[node.args[0]], _divisor(node)
    if x is None or c is None:
        return None
    one_run = make(Op.EQ, *(make(Op.FLOORDIV, end, const(c)) for end in x))
    lo, hi = (make(Op.MOD, end, const(c)) for end in x)
    return make(Op.WHERE, one_run, lo, const(0)), make(Op.WHERE, one_run, hi, const(c - 1))


def _monotone(walk: _Walk, node: Expr) -> Ends | None:
    found = [walk.done[a] for a in node.args]
    if any(x is None for x in found):
        return None
    los, his = zip(*(x for x in found if x is not None), strict=True)
    return make(node.op, *los), make(node.op, *his)


def _abs(walk: _Walk, node: Expr) -> Ends | None:
    x = walk.done[node.args[0]]
    if x is None or not exact(node):
        return None
    lo, hi = x
    least = make(Op.MAX, make(Op.MAX, lo, make(Op.NEG, hi)), const(0))
    return least, make(Op.MAX, make(Op.NEG, lo), hi)


def _where(walk: _Walk, node: Expr) -> Ends | None:
    condition, yes, no = (walk.done[a] for a in node.args)
    if condition is None or yes is None or no is None:
        return None
    join = (Op.AND, Op.OR) if node.type is Type.BOOL else (Op.MIN, Op.MAX)
    every, some = condition
    lo, hi = (make(op, y, n) for op, y, n in zip(join, yes, no, strict=True))
    ends = [
        make(Op.WHERE, every, y, make(Op.WHERE, some, end, n))
        for y, n, end in zip(yes, no, (lo, hi), strict=True)
    ]
    return ends[0], ends[1]


def _int_of_bool(walk: _Walk, node: Expr) -> Ends | None:
    x = walk.done[node.args[0]]
    if node.args[0].type is not Type.BOOL or x is None:
        return None
    return make(Op.INT, x[0]), make(Op.INT, x[1])


def _compared(every: Callable[..., Expr], some: Callable[..., Expr]) -> Rule:
    """A comparison of ints, by the ends of the difference of its operands."""

    def rule(walk: _Walk, node: Expr) -> Ends | None:
        if any(a.type is not Type.INT for a in node.args):
            return None
        total = Sum.of(node.args[0]) - Sum.of(node.args[1])
        found = walk.sum(total)
        return None if found is None else (every(*found), some(*found))

    return rule


ZERO = const(0)


def _both(p: Expr, q: Expr) -> Expr:
    return make(Op.AND, p, q)


def _not(walk: _Walk, node: Expr) -> Ends | None:
    x = walk.done[node.args[0]]
    return None if x is None else (make(Op.NOT, x[1]), make(Op.NOT, x[0]))


ENDS: dict[Op, Rule] = {
    Op.ADD: _int_sum,
    Op.SUB: _int_sum,
    Op.NEG: _int_sum,
    Op.INVERT: _int_sum,
    Op.MUL: _product,
    Op.FLOORDIV: _quotient,
    Op.MOD: _remainder,
    Op.MIN: _monotone,
    Op.MAX: _monotone,
    Op.ABS: _abs,
    Op.WHERE: _where,
    Op.INT: _int_of_bool,
    Op.LE: _compared(lambda lo, hi: hi <= ZERO, lambda lo, hi: lo <= ZERO),
    Op.LT: _compared(lambda lo, hi: hi < ZERO, lambda lo, hi: lo < ZERO),
    Op.EQ: _compared(
        lambda lo, hi: _both(make(Op.EQ, lo, ZERO), make(Op.EQ, hi, ZERO)),
        lambda lo, hi: _both(lo <= ZERO, hi >= ZERO),
    ),
    Op.AND: _monotone,
    Op.OR: _monotone,
    Op.NOT: _not,
}

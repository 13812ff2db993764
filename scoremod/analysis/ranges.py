"""Ranges: which keys may a query attend, as half-lines whose ends depend on the query alone?

    solve(j <= i and i - j < window, "j")   ->   one piece,  i - window + 1 <= j <= i

A mask becomes a few pieces; it is true where some piece is. A piece holds at x (`j` for the
forward, `i` for the backward) where

    every guard is true,  max(los) <= x <= min(his),  and every opaque condition is true.

Bounds and guards are free of x and read the other index (a row), scalars and tables: ordinary
INT and BOOL expressions with 64-bit meaning, to which solving adds nothing that overflows. A mask
without opaque conditions is solved completely.

What a kernel does with a piece, in the prologue of a tile of rows (`runs.py` is this in NumPy):

1. Per row: lo = max(first x, *los), hi = min(last x, *his), in int64 and only then narrowed, since
   a bound may take 64 bits; a row whose guard is false gets lo = +FAR and hi = -FAR. For j,
   `first x` is 0 and `last x` kv_len - 1; for i, q_offset and q_offset + q_len - 1. Rows are
   logical positions: i contains q_offset, in tables too.
2. visible = [min lo, max hi] over the rows with lo <= hi. Only these x can be true.
3. full = [max lo, min hi] over all rows that exist, those with a false guard or lo > hi included:
   there the mask is true for every row, if the piece has no opaque conditions.
   Rows past the end of the tensor exist in neither.
4. To tiles: visible outwards (lo // BLOCK, hi // BLOCK + 1), full inwards.
5. Visible runs of different pieces may overlap: sort them by start, then start = max(start, last
   end) (`disjoint`); otherwise a tile would enter the softmax twice. Full runs may be
   joined where they touch (next lo <= last hi + 1).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Literal

from ..ir.expr import Expr, const, index, make, postorder, rewrite
from ..ir.ops import Op, Type
from .facts import bounds, exact, magnitude
from .linear import Sum
from .normal import (
    INT_ZERO,
    at_most_zero,
    both,
    either,
    is_zero,
    negation,
    normal,
    normalise,
    operands,
)
from .pieces import (
    EVERYWHERE,
    FAR,
    MAX_WORKING,
    Piece,
    Pieces,
    Unsolved,
    chosen,
    guard,
    guarded_by,
    hull,
    is_compared_with_zero,
    join_exclusive,
    joined,
    meet,
)

__all__ = ["FAR", "MAX_PIECES", "Index", "Piece", "Pieces", "opened", "solve", "solved"]

Index = Literal["i", "j"]

# Pieces that a kernel can hold: four runs per tile lost 1 % of tiles over the catalogue, one 25 %.
MAX_PIECES = 4
# x % C with C from here on has few runs of x, which are worth opening one by one.
LONG_RUN = 256
# Solving takes time with the square of a comparison's nodes: tiles are tested for longer ones.
MAX_NODES = 120


def solve(mask: Expr, x: Index, limit: int = MAX_PIECES) -> Pieces:
    """At most `limit` pieces whose union is `mask`; without pieces it is false everywhere.

    The atoms of opaque conditions keep their spans.
    """
    mask = normalise(mask)
    pieces = solved(mask, x)
    if len(pieces) > limit:
        # Costs sharpness in tiles that hold rows of both kinds; an opaque piece costs more.
        pieces = join_exclusive(pieces, lambda guard: True, limit)
    return pieces if len(pieces) <= limit else (hull(pieces, mask),)


# -- conditions ------------------------------------------------------------------------------------


def solved(e: Expr, x: Index) -> Pieces:
    """The pieces of a condition in normal form."""
    if x not in e.names:
        return guard(e)
    if e.op in _COMPARED and sum(1 for _ in postorder(e)) > MAX_NODES:
        return _opaque(e)
    try:
        rule = _CONDITION.get(e.op)
        return rule(e, x) if rule else _opaque(e)
    except Unsolved:
        return _opaque(e)


def _opaque(e: Expr) -> Pieces:
    return (Piece(opaque=(e,)),)


def _and(e: Expr, x: Index) -> Pieces:
    result = EVERYWHERE
    for term in operands(Op.AND, e):
        result = joined(_meet_or_keep(result, solved(term, x), term))
    return result


def _meet_or_keep(a: Pieces, b: Pieces, term: Expr) -> Pieces:
    """a and b; where that is too many pieces, b's half-lines are lost and it stays a condition."""
    return meet(a, b) if len(a) * len(b) <= MAX_WORKING else meet(a, _opaque(term))


def _or(e: Expr, x: Index) -> Pieces:
    pieces = joined(tuple(p for term in operands(Op.OR, e) for p in solved(term, x)))
    if len(pieces) > MAX_WORKING:
        raise Unsolved
    return pieces


def _le(e: Expr, x: Index) -> Pieces:
    a, b = e.args
    if a.type is not Type.INT or (x in a.names and x in b.names):
        return _opaque(e)
    return bounded(b, a, x, up=False) if x in b.names else bounded(a, b, x, up=True)


def _eq(e: Expr, x: Index) -> Pieces:
    a, b = e.args if x in e.args[0].names else e.args[::-1]
    if a.type is not Type.INT or x in b.names:
        return _opaque(e)
    return meet(bounded(a, b, x, up=True), bounded(a, b, x, up=False))


def _not(e: Expr, x: Index) -> Pieces:
    inner = e.args[0]
    if inner.op is not Op.EQ or not is_compared_with_zero(inner):
        return _opaque(e)
    t = inner.args[0]
    return joined(bounded(t, const(-1), x, up=True) + bounded(t, const(1), x, up=False))


_COMPARED = (Op.LE, Op.EQ, Op.NOT)
_CONDITION: dict[Op, Callable[[Expr, Index], Pieces]] = {
    Op.AND: _and,
    Op.OR: _or,
    Op.LE: _le,
    Op.EQ: _eq,
    Op.NOT: _not,
}


# -- t <= b and t >= b -----------------------------------------------------------------------------


def bounded(t: Expr, b: Expr, x: Index, *, up: bool) -> Pieces:
    """Pieces for t <= b (`up`) or t >= b, where b is free of x."""
    if x not in t.names:
        return guard(at_most(t, b) if up else at_most(b, t))
    if t.op not in _BOUND or not exact(t):
        raise Unsolved
    return _BOUND[t.op](t, b, x, up)


def at_most(a: Expr, b: Expr) -> Expr:
    """a <= b in normal form."""
    return at_most_zero(Sum.of(a) - Sum.of(b)) or make(Op.LE, a, b)


def _half_line(t: Expr, b: Expr, x: Index, up: bool) -> Pieces:
    return (Piece(his=(b,)) if up else Piece(los=(b,)),)


def _sum(t: Expr, b: Expr, x: Index, up: bool) -> Pieces:
    """k * a + rest <= b, with one term a that holds x."""
    total = Sum.of(t)
    mine = [term for term in total.terms if x in term.names]
    if len(mine) != 1 or mine[0] == t:
        raise Unsolved
    (a,) = mine
    k = total.terms[a]
    room = Sum.of(b) - (total - Sum({a: k}))
    # k * a <= room; dividing by a negative k turns the sense
    sign = 1 if k > 0 else -1
    up = up == (k > 0)
    return bounded(a, divided(room * sign, const(abs(k)), up=up), x, up=up)


def _mul(t: Expr, b: Expr, x: Index, up: bool) -> Pieces:
    """p * c <= b, c free of x."""
    if any(a.is_const for a in t.args):
        return _sum(t, b, x, up)
    p, c = t.args if x in t.args[0].names else t.args[::-1]
    if x in c.names:
        raise Unsolved
    room, size = Sum.of(b), Sum.of(c)
    return by_sign(
        c,
        lambda: bounded(p, divided(room, c, up=up), x, up=up),
        lambda: bounded(p, divided(room * -1, _whole(size * -1), up=not up), x, up=not up),
        lambda: guard(at_most(INT_ZERO, b) if up else at_most(b, INT_ZERO)),
    )


def _floordiv(t: Expr, b: Expr, x: Index, up: bool) -> Pieces:
    """p // c <= b, c free of x: p <= (b + 1) * c - 1 for c > 0, p >= (b + 1) * c + 1 for c < 0."""
    p, c = t.args
    if x in c.names:
        raise Unsolved
    edge = _whole(Sum.of(b).plus(1)) if up else b
    limit = Sum.of(times(edge, c, reach=magnitude(bounds(p))))
    return by_sign(
        c,
        lambda: bounded(p, _whole(limit.plus(-1 if up else 0)), x, up=up),
        lambda: bounded(p, _whole(limit.plus(1 if up else 0)), x, up=not up),
        lambda: guard(at_most(INT_ZERO, b) if up else at_most(b, INT_ZERO)),
    )


def _abs(t: Expr, b: Expr, x: Index, up: bool) -> Pieces:
    p, minus = t.args[0], _whole(Sum.of(b) * -1)
    parts = bounded(p, b, x, up=up), bounded(p, minus, x, up=not up)
    return meet(*parts) if up else joined(parts[0] + parts[1])


def _extreme(both_when_up: bool) -> Callable[[Expr, Expr, Index, bool], Pieces]:
    """max(p, q) <= b asks for both, min(p, q) <= b for either."""

    def rule(t: Expr, b: Expr, x: Index, up: bool) -> Pieces:
        p, q = (bounded(a, b, x, up=up) for a in t.args)
        return meet(p, q) if up == both_when_up else joined(p + q)

    return rule


def _where(t: Expr, b: Expr, x: Index, up: bool) -> Pieces:
    condition, yes, no = t.args
    return joined(
        meet(solved(condition, x), bounded(yes, b, x, up=up))
        + meet(solved(negation(condition), x), bounded(no, b, x, up=up))
    )


_BOUND: dict[Op, Callable[[Expr, Expr, Index, bool], Pieces]] = {
    Op.INDEX: _half_line,
    Op.ADD: _sum,
    Op.SUB: _sum,
    Op.NEG: _sum,
    Op.MUL: _mul,
    Op.FLOORDIV: _floordiv,
    Op.ABS: _abs,
    Op.MIN: _extreme(both_when_up=False),
    Op.MAX: _extreme(both_when_up=True),
    Op.WHERE: _where,
}


# -- arithmetic of bounds --------------------------------------------------------------------------


def _whole(total: Sum) -> Expr:
    """A sum as an expression; a bound that might overflow is no bound."""
    e = total.expr()
    if e is None:
        raise Unsolved
    return e


def divided(total: Sum, divisor: Expr, *, up: bool) -> Expr:
    """floor(total / divisor) for an upper bound, ceil for a lower one, divisor > 0."""
    if up:
        return normal(make(Op.FLOORDIV, _whole(total), divisor))
    quotient = normal(make(Op.FLOORDIV, _whole(total * -1), divisor))
    return _whole(Sum.of(quotient) * -1)


def times(edge: Expr, c: Expr, reach: int) -> Expr:
    """edge * c, as the end of the p with p // c == edge, where abs(p) <= reach."""
    total, parts = Sum({}), Sum.of(edge)
    for term, k in [*parts.terms.items(), (const(1), parts.constant)]:
        product = normal(make(Op.MUL, term, c))
        total += Sum.of(product) * k
    return total.expr() or _clipped_product(edge, c, reach)


def _clipped_product(edge: Expr, c: Expr, reach: int) -> Expr:
    """p // c is the same for all abs(c) > reach, and never leaves -reach - 1..reach + 1."""
    return _whole(Sum.of(make(Op.MUL, _clipped(edge, reach + 3), _clipped(c, reach + 1))))


def _clipped(e: Expr, reach: int) -> Expr:
    low, high = bounds(e)
    e = e if high <= reach else make(Op.MIN, e, const(reach))
    return e if low >= -reach else make(Op.MAX, e, const(-reach))


def by_sign(
    c: Expr,
    positive: Callable[[], Pieces],
    negative: Callable[[], Pieces],
    zero: Callable[[], Pieces],
) -> Pieces:
    """The case that holds if the sign of c is known; else all three, of which a row takes one."""
    low, high = bounds(c)
    cases: list[tuple[bool, Expr, Callable[[], Pieces]]] = [
        (high > 0, at_most(const(1), c), positive),
        (low < 0, at_most(c, const(-1)), negative),
        (low <= 0 <= high, is_zero(Sum.of(c)) or make(Op.EQ, c, INT_ZERO), zero),
    ]
    alive = [(g, case()) for possible, g, case in cases if possible]
    if any(len(pieces) > 1 or not all(p.is_pure for p in pieces) for _, pieces in alive):
        return joined(tuple(p for g, pieces in alive for p in meet(guard(g), pieces)))
    ones = [(g, pieces[0]) for g, pieces in alive if pieces]
    if not ones:
        return ()
    ends = functools.reduce(lambda no, one: chosen(one[0], one[1], no), ones[-2::-1], ones[-1][1])
    return guarded_by(ends, either(*(both(g, *p.guards) for g, p in ones)))


# -- runs of x % C ---------------------------------------------------------------------------------


@functools.lru_cache(maxsize=512)
def opened(mask: Expr, x: Index) -> Pieces:
    """Every piece of a mask in normal form, with the first two runs of some x % C opened.

    In the run C * k <= x < C * (k + 1), x % C is x - C * k and x // C is k. Beyond, the mask is
    solved as it stands: one opaque piece would lose the half-lines that the other atoms give.
    """
    pieces = solved(mask, x)
    mods = [n for n in postorder(mask) if n.op is Op.MOD and _opens(n, x)]
    if not mods:
        return pieces
    c = min(n.args[1].attr for n in mods)
    spans = [(None, -1), (0, c - 1), (c, 2 * c - 1), (2 * c, None)]
    runs = [solved(_in_run(mask, x, c, k), x) for k in (0, 1)]
    try:
        cases = [
            meet(_between(x, low, high), inside)
            for (low, high), inside in zip(spans, [pieces, *runs, pieces], strict=True)
        ]
    except Unsolved:
        return pieces
    return joined(tuple(itertools.chain.from_iterable(cases)))


def _opens(mod: Expr, x: Index) -> bool:
    p, c = mod.args
    return p == index(x) and c.is_const and bool(c.attr >= LONG_RUN)


def _between(x: Index, low: int | None, high: int | None) -> Pieces:
    los, his = (() if end is None else (const(end),) for end in (low, high))
    return (Piece(los, his),)


def _in_run(mask: Expr, x: Index, c: int, k: int) -> Expr:
    """The mask on c * k <= x < c * (k + 1)."""
    p, divisor = index(x), const(c)
    known = {make(Op.MOD, p, divisor): p - c * k, make(Op.FLOORDIV, p, divisor): const(k)}
    here = normal(rewrite(mask, lambda node: known.get(node, node)))
    return normal(rewrite(here, lambda node: _decided(node, p, c * k, c * (k + 1) - 1)))


def _decided(e: Expr, p: Expr, low: int, high: int) -> Expr:
    """a * p + b <= 0 where all of low..high agree on it."""
    if e.op is not Op.LE or not is_compared_with_zero(e):
        return e
    total = Sum.of(e.args[0])
    if set(total.terms) != {p}:
        return e
    ends = [total.terms[p] * end + total.constant <= 0 for end in (low, high)]
    return const(ends[0]) if ends[0] == ends[1] else e

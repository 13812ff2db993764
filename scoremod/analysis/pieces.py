"""Pieces of half-lines, and how a disjunction of them is kept short.

    j <= a  or  j <= b            ->   j <= max(a, b)
    j <= a and c >= 1  or  ...    ->   one piece, its ends chosen by the sign of c

See `ranges.py` for what a piece means.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..ir.expr import FALSE, Expr, const, make
from ..ir.ops import Op, Type
from .linear import Sum, indices
from .normal import INT_ZERO, both, either, operands

# Beyond every index. Lengths are below 2**31, so the last index is below FAR, which fits in int32.
FAR = 2**31 - 1
# Pieces while solving; a sub-formula that needs more stays opaque.
MAX_WORKING = 16
# Guards with `or` that are tried case by case.
MAX_CASES = 3


@dataclass(frozen=True)
class Piece:
    """guards and max(los) <= x <= min(his) and opaque."""

    los: tuple[Expr, ...] = ()
    his: tuple[Expr, ...] = ()
    guards: tuple[Expr, ...] = ()
    opaque: tuple[Expr, ...] = ()

    @property
    def is_pure(self) -> bool:
        """Whether the piece says exactly where the mask is true."""
        return not self.opaque

    @property
    def parts(self) -> tuple[tuple[Expr, ...], ...]:
        """los, his, guards, opaque."""
        return self.los, self.his, self.guards, self.opaque

    def meet(self, other: Piece) -> Piece:
        """Where both hold."""
        pairs = zip(self.parts, other.parts, strict=True)
        return Piece(*(tuple(dict.fromkeys(a + b)) for a, b in pairs))

    def implies(self, other: Piece) -> bool:
        """Whether this one asks for everything that the other asks for."""
        return all(set(b) <= set(a) for a, b in zip(self.parts, other.parts, strict=True))


Pieces = tuple[Piece, ...]  # a disjunction
EVERYWHERE: Pieces = (Piece(),)


class Unsolved(Exception):
    """An atom that half-lines cannot say; it becomes an opaque condition."""


def guard(e: Expr) -> Pieces:
    """A condition free of x."""
    if e.is_const:
        return EVERYWHERE if e.attr else ()
    return (Piece(guards=tuple(operands(Op.AND, e))),)


def meet(a: Pieces, b: Pieces) -> Pieces:
    """Where both disjunctions hold: every pair, without those that contradict themselves."""
    if len(a) * len(b) > MAX_WORKING:
        raise Unsolved
    pairs = (p.meet(q) for p, q in itertools.product(a, b))
    return tuple(p for p in pairs if not _contradictory(p.guards))


def joined(pieces: Pieces) -> Pieces:
    """The same union in fewer pieces, where that costs nothing."""
    # Guards free of i and j leave one of two alive at any launch.
    pieces = join_exclusive(_absorbed(dict.fromkeys(pieces)), lambda guard: not indices(guard))
    for up in (True, False):
        pieces = _join_half_lines(pieces, up)
    return pieces


def _absorbed(pieces: Iterable[Piece]) -> Pieces:
    kept: list[Piece] = []
    for p in pieces:
        if not any(p.implies(q) for q in kept):
            kept = [q for q in kept if not q.implies(p)] + [p]
    return tuple(kept)


def _join_half_lines(pieces: Pieces, up: bool) -> Pieces:
    """x <= a or x <= b is x <= max(a, b); a guard makes a bound that lets nothing through."""
    mine = [p for p in pieces if p.is_pure and not (p.los if up else p.his)]
    if len(mine) < 2:
        return pieces
    if not any(p.los or p.his for p in mine):
        together = (Piece(guards=(either(*(both(*p.guards) for p in mine)),)),)
    else:
        outer = functools.reduce(_greatest if up else _least, (_end(p, up) for p in mine))
        together = (Piece(his=(outer,)) if up else Piece(los=(outer,)),)
    return together + tuple(p for p in pieces if p not in mine)


_greatest = functools.partial(make, Op.MAX)
_least = functools.partial(make, Op.MIN)


def _end(p: Piece, up: bool, guarded: bool = True) -> Expr:
    """The piece's bound on one side: far out if it has none, far in where its guards fail."""
    far = const(FAR if up else -FAR)
    ends = p.his if up else p.los
    end = functools.reduce(_least if up else _greatest, ends) if ends else far
    if not guarded or not p.guards:
        return end
    return make(Op.WHERE, both(*p.guards), end, const(-far.attr))


def join_exclusive(pieces: Pieces, take: Callable[[Expr], bool], enough: int = 1) -> Pieces:
    """Two pure pieces are one where guards that `take` takes exclude each other.

    Its ends are chosen by the guards. Where rows differ in them, a tile's visible run becomes the
    hull of both.
    """
    for p, q in itertools.combinations([p for p in pieces if p.is_pure and p.guards], 2):
        if len(pieces) <= enough:
            break
        ours, theirs = (tuple(filter(take, r.guards)) for r in (p, q))
        if _contradictory(ours + theirs):
            one = chosen(both(*ours), p, q)
            new = guarded_by(one, either(both(*p.guards), both(*q.guards)))
            rest = tuple(r for r in pieces if r is not p and r is not q)
            return join_exclusive((*new, *rest), take, enough)
    return pieces


def chosen(condition: Expr, p: Piece, q: Piece) -> Piece:
    """The ends of p where the condition holds, else those of q."""

    def pick(up: bool) -> tuple[Expr, ...]:
        if not ((p.his or q.his) if up else (p.los or q.los)):
            return ()
        yes, no = (_end(r, up, guarded=False) for r in (p, q))
        return (yes if yes == no else make(Op.WHERE, condition, yes, no),)

    return Piece(pick(False), pick(True))


def guarded_by(p: Piece, alive: Expr) -> Pieces:
    return tuple(Piece(p.los, p.his, g.guards) for g in guard(alive))


def is_compared_with_zero(e: Expr) -> bool:
    """Whether this is a comparison that `normal` has brought to `lin <= 0` or `lin == 0`."""
    return e.args[0].type is Type.INT and e.args[1] == INT_ZERO


def _contradictory(guards: Sequence[Expr]) -> bool:
    """Whether guards, as sums compared with 0, cannot hold together."""
    if FALSE in guards:
        return True
    cases = [g for g in guards if g.op is Op.OR]
    if 0 < len(cases) <= MAX_CASES:
        rest = tuple(g for g in guards if g is not cases[0])
        return all(
            _contradictory((*operands(Op.AND, case), *rest)) for case in operands(Op.OR, cases[0])
        )
    sums = [
        (g.op, Sum.of(g.args[0])) for g in guards if g.op in _SIGNS and is_compared_with_zero(g)
    ]
    return any(_exclude(a, b) for a, b in itertools.combinations(sums, 2)) or any(
        g.args[0] in guards for g in guards if g.op is Op.NOT
    )


# p <= 0 and q <= 0 give p + q <= 0; an equation may be taken with either sign.
_SIGNS: dict[Op, tuple[int, ...]] = {Op.LE: (1,), Op.EQ: (1, -1)}


def _exclude(a: tuple[Op, Sum], b: tuple[Op, Sum]) -> bool:
    sums = (a[1] * s + b[1] * t for s, t in itertools.product(_SIGNS[a[0]], _SIGNS[b[0]]))
    return any(not total.terms and total.constant > 0 for total in sums)


def hull(pieces: Pieces, mask: Expr) -> Piece:
    """One piece around all of them, with the mask itself as its condition."""

    def ends(up: bool) -> tuple[Expr, ...]:
        if not all(p.guards or (p.his if up else p.los) for p in pieces):
            return ()
        return (functools.reduce(_greatest if up else _least, [_end(p, up) for p in pieces]),)

    return Piece(ends(False), ends(True), (), (mask,))

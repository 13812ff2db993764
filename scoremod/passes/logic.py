"""And, or and not: what is implied, repeated or contradicted goes.

j <= i and (j <= i or doc[j] > 0) and i - j >= 0   ->   j <= i
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..analysis.interval import Bounds
from ..ir.expr import FALSE, TRUE, Expr, const, make
from ..ir.ops import Op, Type
from .linear import difference

MAX_TERMS = 256  # a longer chain is simplified in pieces

DUAL: dict[Op, Op] = {Op.AND: Op.OR, Op.OR: Op.AND}
NEUTRAL: dict[Op, Expr] = {Op.AND: TRUE, Op.OR: FALSE}


@dataclass(frozen=True)
class Literal:
    """A condition without its `not`."""

    base: Expr
    negated: bool

    def __invert__(self) -> Literal:
        return Literal(self.base, not self.negated)


def literal(node: Expr) -> Literal:
    """`not x` and `x != y` as the negation of what they negate; so also `y < x` over ints."""
    if node.op is Op.NOT:
        return ~literal(node.args[0])
    if node.op is Op.NE:
        return Literal(make(Op.EQ, *_ordered(node)), True)
    if node.op is Op.EQ:
        return Literal(make(Op.EQ, *_ordered(node)), False)
    if node.op is Op.LT and node.args[0].type is Type.INT:
        return Literal(make(Op.LE, node.args[1], node.args[0]), True)
    return Literal(node, False)


def _ordered(node: Expr) -> list[Expr]:
    return sorted(node.args, key=lambda a: a.digest)


def terms_of(op: Op, node: Expr) -> list[Expr]:
    """The operands of a chain of one operation, in order, at most MAX_TERMS."""
    terms = [node]
    position = 0
    while position < len(terms):
        if terms[position].op is op and len(terms) < MAX_TERMS:
            terms[position : position + 1] = terms[position].args
        else:
            position += 1
    return terms


def chain(op: Op, terms: list[Expr]) -> Expr:
    """The terms joined to the left again."""
    if not terms:
        return NEUTRAL[op]
    total = terms[0]
    for term in terms[1:]:
        total = make(op, total, term)
    return total


def negation(node: Expr, bounds: Bounds) -> Expr | None:
    """`not node` where it costs no operation more than `node`."""
    if node.op is Op.NOT:
        return node.args[0]
    if node.is_const:
        return const(not node.attr)
    if node.op in (Op.EQ, Op.NE):
        return make(Op.NE if node.op is Op.EQ else Op.EQ, *node.args)
    if node.op in (Op.LT, Op.LE) and _never_nan(node, bounds):
        return make(Op.LE if node.op is Op.LT else Op.LT, node.args[1], node.args[0])
    return None


def _never_nan(node: Expr, bounds: Bounds) -> bool:
    # In the precision that is in use where a float decides; both, if that is not known here.
    if node.args[0].type is Type.INT:
        return True
    return not any(bounds(a, d).nan.any() for a in node.args for d in (bounds.dtype, bounds.strict))


def simplify_not(node: Expr, bounds: Bounds) -> Expr:
    """not (i < j) -> j <= i; not (a and b) -> a' or b' where both negations are free."""
    (inner,) = node.args
    free = negation(inner, bounds)
    if free is None and inner.op in DUAL:
        parts = [negation(a, bounds) for a in inner.args]
        if parts[0] is not None and parts[1] is not None:
            free = make(DUAL[inner.op], parts[0], parts[1])
    return node if free is None else free


def simplify_pair(node: Expr) -> Expr:
    """The constants and repetitions that one `and` or `or` shows by itself."""
    x, y = node.args
    for one, other in ((x, y), (y, x)):
        if other == NEUTRAL[node.op]:
            return one
        if other == NEUTRAL[DUAL[node.op]]:
            return other
    return x if x == y else node


def simplify_chain(node: Expr, bounds: Bounds) -> Expr:
    """An `and` or `or` without repeated, implied and absorbed terms."""
    op = node.op
    terms = _distinct(op, terms_of(op, node))
    if terms is not None:
        terms = _half_lines(op, terms, bounds)
    if terms is not None:
        terms = _absorbed(op, terms)
    return NEUTRAL[DUAL[op]] if terms is None else _factored(op, terms, node)


# Each step gives the terms that are left, or None where the whole chain is decided.
Terms = list[Expr] | None


def _distinct(op: Op, terms: list[Expr]) -> Terms:
    """Constants and repetitions go; a term beside its negation decides."""
    seen: dict[Literal, Expr] = {}
    for term in terms:
        if term == NEUTRAL[op]:
            continue
        key = literal(term)
        if term == NEUTRAL[DUAL[op]] or ~key in seen:
            return None
        seen.setdefault(key, term)
    return list(seen.values())


@dataclass(frozen=True)
class HalfLine:
    """Integers `form` with lo <= form <= hi, either end open."""

    form: tuple[tuple[Expr, int], ...]
    lo: float
    hi: float


def half_line(node: Expr, bounds: Bounds) -> HalfLine | None:
    """A comparison of ints as a range of a linear form; `!=` is none."""
    if node.op not in (Op.LT, Op.LE, Op.EQ) or node.args[0].type is not Type.INT:
        return None
    form = difference(node, bounds)
    if form is None or not form.terms:
        return None
    terms = sorted(form.terms, key=lambda term: term[0].digest)
    sign = 1 if terms[0][1] > 0 else -1
    key, end = tuple((t, sign * k) for t, k in terms), -sign * form.constant
    if node.op is Op.EQ:
        return HalfLine(key, end, end)
    return HalfLine(key, -INFINITE, end) if sign > 0 else HalfLine(key, end, INFINITE)


INFINITE = float("inf")


def _half_lines(op: Op, terms: list[Expr], bounds: Bounds) -> Terms:
    """Of half-lines of one form, the sharpest stays (for `or`: of their complements)."""
    lines = {k: line for k, t in enumerate(terms) if (line := _line(op, t, bounds)) is not None}
    by_form: dict[object, list[int]] = {}
    for k, line in lines.items():
        by_form.setdefault(line.form, []).append(k)
    drop: set[int] = set()
    for group in by_form.values():
        if max(lines[k].lo for k in group) > min(lines[k].hi for k in group):
            return None
        drop.update(_implied(group, lines))
    return [term for k, term in enumerate(terms) if k not in drop]


def _line(op: Op, term: Expr, bounds: Bounds) -> HalfLine | None:
    line = half_line(term, bounds)
    if line is None or op is Op.AND:
        return line
    if line.lo == line.hi:  # the complement of a point is not a half-line
        return None
    if line.lo == -INFINITE:
        return HalfLine(line.form, line.hi + 1, INFINITE)
    return HalfLine(line.form, -INFINITE, line.lo - 1)


def _implied(group: list[int], lines: dict[int, HalfLine]) -> Iterator[int]:
    """The terms that the others of their group imply, last first."""
    kept = list(group)
    for k in reversed(group):
        others = [lines[other] for other in kept if other != k]
        lo = max((line.lo for line in others), default=-INFINITE)
        hi = min((line.hi for line in others), default=INFINITE)
        if lines[k].lo <= lo and hi <= lines[k].hi:
            kept.remove(k)
            yield k


def _absorbed(op: Op, terms: list[Expr]) -> Terms:
    """a and (a or b) -> a; a and (not a or b) -> a and b."""
    literals = {literal(term) for term in terms}
    result = []
    for term in terms:
        if term.op is not DUAL[op]:
            result.append(term)
            continue
        parts = terms_of(DUAL[op], term)
        keys = [literal(part) for part in parts]
        if literals.isdisjoint(keys):
            left = [p for p, key in zip(parts, keys, strict=True) if ~key not in literals]
            if not left:
                return None
            result.append(term if len(left) == len(parts) else chain(DUAL[op], left))
    return result


def _factored(op: Op, terms: list[Expr], node: Expr) -> Expr:
    """(a and b) or (a and c) -> a and (b or c); the node itself where nothing changed."""
    parts = [terms_of(DUAL[op], term) for term in terms]
    common = [p for p in parts[0] if all(p in other for other in parts[1:])] if parts else []
    if len(terms) > 1 and common:
        rest = [chain(DUAL[op], [p for p in own if p not in common]) for own in parts]
        return chain(DUAL[op], [*common, chain(op, rest)])
    return node if terms == terms_of(op, node) else chain(op, terms)

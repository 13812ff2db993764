"""Integer sums as linear forms, and comparisons of them in the form that reads best.

    2 * i - 2 * j < 4   ->   i - j <= 1

A linear form is exact modulo 2**64 whatever overflows below it. What holds over the integers only
is done where `fits` shows that the sums on both sides stay inside int64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from ..analysis.interval import Bounds
from ..ir.expr import FALSE, TRUE, Expr, const, kept, make
from ..ir.ops import INT_MAX, INT_MIN, Op, Type

MAX_TERMS = 32  # a longer sum is left as it was written
MAX_COEFFICIENT = 2**62


@dataclass(frozen=True)
class Linear:
    """coefficient * term + ... + constant, terms in the order of first appearance."""

    terms: tuple[tuple[Expr, int], ...]
    constant: int

    def scaled(self, k: int) -> Linear:
        """k times this."""
        return _linear({t: k * c for t, c in self.terms}, k * self.constant)

    def plus(self, other: Linear) -> Linear:
        """The sum, equal terms merged."""
        terms = dict(self.terms)
        for term, k in other.terms:
            terms[term] = terms.get(term, 0) + k
        return _linear(terms, self.constant + other.constant)

    def minus(self, other: Linear) -> Linear:
        """The difference."""
        return self.plus(other.scaled(-1))

    @property
    def factor(self) -> int:
        """The greatest common divisor of the coefficients; 0 without terms."""
        return math.gcd(*(k for _, k in self.terms))


def _linear(terms: dict[Expr, int], constant: int) -> Linear:
    return Linear(tuple((t, k) for t, k in terms.items() if k), constant)


def _product(x: Linear, y: Linear) -> Linear | None:
    if not x.terms:
        return y.scaled(x.constant)
    return x.scaled(y.constant) if not y.terms else None


_RULES: dict[Op, Callable[..., Linear | None]] = {
    Op.ADD: Linear.plus,
    Op.SUB: Linear.minus,
    Op.NEG: lambda x: x.scaled(-1),
    Op.MUL: _product,
}


def _own(node: Expr) -> Linear:
    """The form of one node, those of its operands being known."""
    if node.is_const and node.type is Type.INT:
        return Linear((), node.attr)
    result = None
    if node.type is Type.INT and node.op in _RULES:
        result = _RULES[node.op](*(a.__dict__["linear"] for a in node.args))
    if result is None or len(result.terms) > MAX_TERMS or _largest(result) > MAX_COEFFICIENT:
        return Linear(((node, 1),), 0)
    return result


def _largest(form: Linear) -> int:
    return max((abs(form.constant), *(abs(k) for _, k in form.terms)))


def linear(expr: Expr) -> Linear:
    """An int expression as a linear form of expressions that are not sums."""
    form = kept(expr, "linear", _own)
    assert isinstance(form, Linear)
    return form


def span(form: Linear, bounds: Bounds) -> tuple[int, int]:
    """Least and greatest value over the integers."""
    lo = hi = form.constant
    for term, k in form.terms:
        x = bounds(term)
        ends = k * int(x.lo.min()), k * int(x.hi.max())
        lo, hi = lo + min(ends), hi + max(ends)
    return lo, hi


def fits(bounds: Bounds, *forms: Linear) -> bool:
    """Whether the forms stay inside int64, so that wrapped and exact values are the same."""
    spans = [span(form, bounds) for form in forms]
    return all(lo >= INT_MIN and hi <= INT_MAX for lo, hi in spans)


# -- back to expressions -----------------------------------------------------------------------


def cost(expr: Expr) -> int:
    """How many operations the tree has; what shorter means to every rule."""
    result = kept(expr, "cost", _own_cost)
    assert isinstance(result, int)
    return result


def _own_cost(node: Expr) -> int:
    return int(bool(node.args)) + sum(int(a.__dict__["cost"]) for a in node.args)


def cheapest(candidates: Iterable[Expr]) -> Expr:
    """The first of the cheapest."""
    return min(candidates, key=cost)


def _times(k: int, term: Expr) -> Expr:
    return term if k == 1 else make(Op.MUL, const(k), term)


def build(form: Linear) -> Expr:
    """A sum that starts with a positive term: g * (i - 2 * j + 3)."""
    g = math.gcd(form.factor, form.constant)
    if g > 1 and len(form.terms) + bool(form.constant) > 1:
        rest = _linear({t: k // g for t, k in form.terms}, form.constant // g)
        return make(Op.MUL, const(g), build(rest))
    positive = [(t, k) for t, k in form.terms if k > 0]
    total = _times(positive[0][1], positive[0][0]) if positive else None
    for term, k in form.terms:
        if not positive or term is not positive[0][0]:
            total = _join(total, _times(abs(k), term), k < 0)
    if form.constant or total is None:
        negative = total is not None and form.constant < 0
        total = _join(total, const(-form.constant if negative else form.constant), negative)
    return total


def _join(total: Expr | None, part: Expr, negative: bool) -> Expr:
    if total is None:
        return make(Op.NEG, part) if negative else part
    return make(Op.SUB if negative else Op.ADD, total, part)


def shorter_sum(node: Expr) -> Expr:
    """The node, or its linear form where that has fewer operations."""
    return cheapest((node, build(linear(node))))


# -- comparisons -------------------------------------------------------------------------------


def difference(node: Expr, bounds: Bounds) -> Linear | None:
    """What `node`, a comparison of ints, compares with 0: form <= 0 for < and <=, form == 0 else.

    None where something might overflow. The coefficients have no common factor, which rounds the
    constant; a form without terms is decided.
    """
    left, right = (linear(a) for a in node.args)
    form = left.minus(right)
    if not fits(bounds, left, right, form):
        return None
    if node.op is Op.LT:
        form = Linear(form.terms, form.constant + 1)
    g = form.factor
    if g == 0 or (node.op in (Op.EQ, Op.NE) and form.constant % g):
        return Linear((), form.constant) if g == 0 else Linear((), 1)
    # g*y + c <= 0 is y + ceil(c / g) <= 0
    return _linear({t: k // g for t, k in form.terms}, -(-form.constant // g))


_DECIDED: dict[Op, Callable[[int], bool]] = {
    Op.LT: lambda c: c <= 0,
    Op.LE: lambda c: c <= 0,
    Op.EQ: lambda c: c == 0,
    Op.NE: lambda c: c != 0,
}


def shorter_comparison(node: Expr, bounds: Bounds) -> Expr:
    """The node, or the same comparison with fewer operations."""
    form = difference(node, bounds)
    if form is None:
        return node
    if not form.terms:
        return TRUE if _DECIDED[node.op](form.constant) else FALSE
    ways = [way for way in _ways(node.op, form) if fits(bounds, *way[1:])]
    return cheapest((node, *(make(op, build(left), build(right)) for op, left, right in ways)))


Way = tuple[Op, Linear, Linear]


def _ways(op: Op, form: Linear) -> Iterator[Way]:
    """Ways to write form <= 0 or form == 0, the most readable first."""
    finish = _order if op in (Op.LT, Op.LE) else partial(_equality, op)
    # What varies over the scores on the left: i - j <= window.
    yield finish(*_split(form, lambda term, _: bool(term.names & {"i", "j"}), False))
    # Only sums: i <= j + window.
    yield finish(*_split(form, lambda _, k: k > 0, False))
    yield finish(*_split(form, lambda _, k: k > 0, True))


def _split(
    form: Linear, near: Callable[[Expr, int], bool], constant_left: bool
) -> tuple[Linear, Linear]:
    left = {t: k for t, k in form.terms if near(t, k)}
    right = {t: -k for t, k in form.terms if not near(t, k)}
    c = form.constant
    return _linear(left, c if constant_left else 0), _linear(right, 0 if constant_left else -c)


def _order(left: Linear, right: Linear) -> Way:
    """left <= right; x + 1 <= y reads better as x < y, and -x <= -y as y <= x."""
    if not _starts_positive(left) and not _starts_positive(right):
        left, right = right.scaled(-1), left.scaled(-1)
    if left.constant == 1:
        return Op.LT, Linear(left.terms, 0), right
    if right.constant == -1:
        return Op.LT, left, Linear(right.terms, 0)
    return Op.LE, left, right


def _starts_positive(form: Linear) -> bool:
    return any(k > 0 for _, k in form.terms) or (not form.terms and form.constant >= 0)


def _equality(op: Op, left: Linear, right: Linear) -> Way:
    if left.terms and left.terms[0][1] < 0:
        left, right = left.scaled(-1), right.scaled(-1)
    return op, left, right

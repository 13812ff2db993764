"""Sums over the integers: constant + the sum of coefficient * term.

    Sum.of(2 * (i - j) + 3)   ->   {i: 2, j: -2} + 3

An expression is taken apart only where its bounds (`facts.py`) show that nothing overflows, and a
sum becomes an expression only where no order of summation can.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import Span
from ..ir.expr import Expr, const, index, make
from ..ir.ops import INT_MAX, Op, Type
from ..ir.show import show
from .facts import bounds, exact, magnitude

INDICES = frozenset("ij")


def indices(e: Expr) -> frozenset[str]:
    """Which of i and j the value depends on."""
    return e.names & INDICES


@dataclass(frozen=True)
class Sum:
    """constant + the sum of coefficient * term, over the integers."""

    terms: Mapping[Expr, int]
    constant: int = 0

    @staticmethod
    def of(e: Expr) -> Sum:
        """Take an int expression apart as far as it cannot overflow."""
        rule = _LINEAR.get(e.op) if e.type is Type.INT and exact(e) else None
        parts = rule(e) if rule else None
        return parts if parts is not None else Sum({e: 1})

    def __add__(self, other: Sum) -> Sum:
        terms = dict(self.terms)
        for term, k in other.terms.items():
            terms[term] = terms.get(term, 0) + k
        return Sum({t: k for t, k in terms.items() if k}, self.constant + other.constant)

    def __sub__(self, other: Sum) -> Sum:
        return self + other * -1

    def __mul__(self, factor: int) -> Sum:
        terms = {t: k * factor for t, k in self.terms.items() if factor}
        return Sum(terms, self.constant * factor)

    def plus(self, number: int) -> Sum:
        """The sum and a number."""
        return Sum(self.terms, self.constant + number)

    def part(self, x: str) -> Sum:
        """The terms that depend on just that index, without the constant."""
        return Sum({t: k for t, k in self.terms.items() if indices(t) == {x}})

    @property
    def indices(self) -> frozenset[str]:
        """Which of i and j the terms depend on."""
        return frozenset().union(*map(indices, self.terms))

    @property
    def fits(self) -> bool:
        """Whether no order of summation can overflow."""
        reach = sum(abs(k) * magnitude(bounds(t)) for t, k in self.terms.items())
        return reach + abs(self.constant) <= INT_MAX

    def expr(self, span: Span | None = None) -> Expr | None:
        """As an expression, positive terms first; None where it might overflow."""
        if not self.fits:
            return None
        if not self.terms:
            return const(self.constant, span)
        return _spelled(self, span)


def slope(e: Expr, x: str) -> int | None:
    """By how much e grows with i or j; None where it depends on more than that and scalars."""
    terms = Sum.of(e).terms
    others = (term for term in terms if term != index(x))
    if any(term.names & _PLACES for term in others):
        return None
    return terms.get(index(x), 0)


_PLACES = INDICES | {"b", "h", "hk"}


def _spelled(total: Sum, span: Span | None) -> Expr:
    ordered = sorted(total.terms.items(), key=_order)
    result: Expr | None = None
    for term, k in ordered:
        size = term if abs(k) == 1 else make(Op.MUL, const(abs(k)), term)
        if result is None:
            result = size if k > 0 else make(Op.NEG, size)
        else:
            result = make(Op.ADD if k > 0 else Op.SUB, result, size)
    assert result is not None
    if total.constant:
        op = Op.ADD if total.constant > 0 else Op.SUB
        result = make(op, result, const(abs(total.constant)))
    return with_span(result, span)


def _order(item: tuple[Expr, int]) -> tuple[bool, bool, str]:
    return item[1] < 0, not indices(item[0]), text(item[0])


@functools.lru_cache(maxsize=4096)
def text(e: Expr) -> str:
    """The text of an expression, for an order that does not depend on the run."""
    return show(e)


def with_span(e: Expr, span: Span | None) -> Expr:
    """The same expression, standing for another piece of the user's text."""
    return e if span is None else Expr(e.op, e.args, e.attr, e.type, span)


def _shifted_left(e: Expr) -> Sum | None:
    x, n = e.args
    if not n.is_const or not 0 <= n.attr < 63:
        return None
    return Sum.of(x) * int(1 << n.attr)


def _multiplied(e: Expr) -> Sum | None:
    for x, k in (e.args, e.args[::-1]):
        if k.is_const:
            return Sum.of(x) * int(k.attr)
    return None


_LINEAR: dict[Op, Callable[[Expr], Sum | None]] = {
    Op.CONST: lambda e: Sum({}, e.attr),
    Op.ADD: lambda e: Sum.of(e.args[0]) + Sum.of(e.args[1]),
    Op.SUB: lambda e: Sum.of(e.args[0]) - Sum.of(e.args[1]),
    Op.NEG: lambda e: Sum.of(e.args[0]) * -1,
    Op.INVERT: lambda e: (Sum.of(e.args[0]) * -1).plus(-1),  # ~x == -x - 1
    Op.MUL: _multiplied,
    Op.SHL: _shifted_left,
}

"""Normal form of a mask: linear sums over the integers, compared with 0.

    not (i - j >= window)              ->   i - j - window + 1 <= 0
    i - i % 64 <= j                    ->   64 * (i // 64) - j <= 0
    i % r == j % r                     ->   (i - j) % r == 0

`not` is pushed to the leaves, equal terms are merged, `//` and `%` are rewritten where that leaves
fewer terms. The result means the same modulo 2**64: a law of the integers is used only where the
static bounds (`facts.py`) show that nothing in it overflows; otherwise the node stays as it is.
Floats are never touched: their bounds stay bounds only in source order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import numpy as np

from ..errors import Span
from ..ir.evaluate import evaluate
from ..ir.expr import FALSE, TRUE, Expr, const, make, rewrite
from ..ir.ops import INT_MAX, Op, Type
from .facts import bounds, congruence, exact, remembered
from .linear import Sum, indices, text, with_span

INT_ZERO = const(0)
# A float32 holds every int up to here, so comparisons below it are comparisons of ints.
FLOAT32_INTS = 2**24
# A condition is written twice, for `a == b` or `where` of conditions, only while that stays small.
MAX_WRITTEN_OUT = 200


# -- the rules for ints --------------------------------------------------------------------------


def _linear(e: Expr) -> Expr:
    """Merge equal terms, then trade `%` for `//` where that shortens the sum."""
    return _shortened(Sum.of(e)).expr(e.span) or e


def _shortened(total: Sum) -> Sum:
    """x - x % C is C * (x // C); either is taken for the other where fewer terms remain."""
    for term in total.terms:
        other = _traded(total, term)
        if other is not None and len(other.terms) < len(total.terms):
            return _shortened(other)
    return total


def _traded(total: Sum, term: Expr) -> Sum | None:
    if term.op not in (Op.MOD, Op.FLOORDIV) or not _positive(term.args[1]):
        return None
    x, c, k = Sum.of(term.args[0]), term.args[1].attr, total.terms[term]
    if x.constant or (term.op is Op.FLOORDIV and k % c):
        return None
    # k * (x % C) == k * x - k * C * (x // C);   k * C * (x // C) == k * x - k * (x % C)
    weight = k if term.op is Op.MOD else k // c
    twin = Op.FLOORDIV if term.op is Op.MOD else Op.MOD
    rest = Sum({make(twin, *term.args): -weight * (c if term.op is Op.MOD else 1)})
    return total - Sum({term: k}) + x * weight + rest


def _positive(e: Expr) -> bool:
    return e.is_const and e.type is Type.INT and bool(e.attr > 0)


def _product(e: Expr) -> Expr:
    if any(a.is_const for a in e.args):
        return _linear(e)
    return make(Op.MUL, *sorted(e.args, key=text), span=e.span)


def _quotient(e: Expr) -> Expr:
    x, divisor = e.args
    if not divisor.is_const or not exact(e):
        return e
    if divisor.attr in (0, -1, 1):
        return (Sum.of(x) * divisor.attr).expr(e.span) or e
    return _whole_quotient(x, divisor.attr, e.span) or e


def _whole_quotient(x: Expr, c: int, span: Span | None) -> Expr | None:
    """(C * t + y) // C is t + y // C."""
    total = Sum.of(x)
    whole = Sum({t: k // c for t, k in total.terms.items() if k % c == 0})
    rest = Sum({t: k for t, k in total.terms.items() if k % c}, total.constant)
    y = rest.expr()
    if y is None or c < 0:
        return None
    if y.is_const:
        return _shortened(whole.plus(y.attr // c)).expr(span)
    return _shortened(whole + Sum({_nested_quotient(y, c): 1})).expr(span)


def _nested_quotient(x: Expr, c: int) -> Expr:
    """x // A // C is x // (A * C) for C > 0; A > 0 keeps the divisor positive."""
    if x.op is Op.FLOORDIV and _positive(x.args[1]) and x.args[1].attr * c <= INT_MAX:
        x, c = x.args[0], x.args[1].attr * c
    return make(Op.FLOORDIV, x, const(c))


def _remainder(e: Expr) -> Expr:
    x, divisor = e.args
    if divisor.is_const and divisor.attr in (0, -1, 1):
        return const(0, e.span)
    total = _flattened(Sum.of(x), divisor)
    if not _positive(divisor):
        inner = total.expr()
        return e if inner is None else make(Op.MOD, inner, divisor, span=e.span)
    c = divisor.attr
    near = {t: _nearest(k, c) for t, k in total.terms.items() if k % c}
    inner = Sum(near, total.constant % c).expr()
    if inner is None:
        return e
    m, r = congruence(inner)
    known = m % c == 0
    return const(r % c, e.span) if known else make(Op.MOD, inner, divisor, span=e.span)


def _flattened(total: Sum, divisor: Expr) -> Sum:
    """(x % C + y) % C is (x + y) % C, for any C."""
    result = Sum({}, total.constant)
    for term, k in total.terms.items():
        same = term.op is Op.MOD and term.args[1] == divisor
        result += (Sum.of(term.args[0]) if same else Sum({term: 1})) * k
    return result


def _nearest(k: int, c: int) -> int:
    """The residue of k nearest to 0: -1 stays -1, since as c - 1 it would ruin every interval."""
    half = (c - 1) // 2
    return (k + half) % c - half


def _shl(e: Expr) -> Expr:
    n = e.args[1]
    if n.is_const and not 0 <= n.attr < 64:
        return const(0, e.span)
    return _linear(e)


def _shr(e: Expr) -> Expr:
    """x >> n is x // 2**n."""
    x, n = e.args
    if not n.is_const or n.attr == 63:
        return e
    divisor = const(1 << n.attr) if 0 <= n.attr < 64 else INT_ZERO
    return _quotient(make(Op.FLOORDIV, x, divisor, span=e.span))


def _int_of_bool(e: Expr) -> Expr:
    if e.args[0].type is not Type.BOOL:
        return e
    return _where(make(Op.WHERE, e.args[0], const(1), INT_ZERO, span=e.span))


def _extreme(e: Expr) -> Expr:
    return e.args[0] if e.args[0] == e.args[1] else e


def _where(e: Expr) -> Expr:
    condition, yes, no = e.args
    if condition.is_const or yes == no:
        return with_span(no if condition == FALSE else yes, e.span)
    if e.type is not Type.BOOL or weight(condition) > MAX_WRITTEN_OUT:
        return e
    return either(both(condition, yes), both(negation(condition), no))


# -- the rules for conditions --------------------------------------------------------------------


def at_most_zero(total: Sum, span: Span | None = None) -> Expr | None:
    """total <= 0, divided by what the coefficients share; None where it might overflow."""
    divisor = math.gcd(*total.terms.values()) or 1
    # g * y + c <= 0 is y + ceil(c / g) <= 0
    total = Sum({t: k // divisor for t, k in total.terms.items()}, -(-total.constant // divisor))
    x = total.expr()
    if x is None:
        return None
    low, high = bounds(x)
    if high <= 0 or low > 0:
        return const(high <= 0, span)
    return make(Op.LE, x, INT_ZERO, span=span)


def is_zero(total: Sum, span: Span | None = None) -> Expr | None:
    """total == 0, with one `%` where there were two; None where it might overflow."""
    divisor = math.gcd(*total.terms.values()) or 1
    if total.constant % divisor:
        return const(False, span)
    total = Sum({t: k // divisor for t, k in total.terms.items()}, total.constant // divisor)
    if total.terms and next(iter(sorted(total.terms.items(), key=_sign_key)))[1] < 0:
        total = total * -1
    x = total.expr()
    if x is None:
        return None
    (m, r), (low, high) = congruence(x), bounds(x)
    if (r % m if m else r) or not low <= 0 <= high:
        return const(False, span)
    return const(True, span) if low == high else _residues(total, span) or _equal_zero(x, span)


def _sign_key(item: tuple[Expr, int]) -> tuple[bool, str]:
    return item[0].op is not Op.MOD, text(item[0])


def _equal_zero(x: Expr, span: Span | None) -> Expr:
    return make(Op.EQ, x, INT_ZERO, span=span)


def _residues(total: Sum, span: Span | None) -> Expr | None:
    """a % r == b % r is (a - b) % r == 0;  a % r == c is (a - c) % r == 0 where c % r == c.

    The second holds for either sign of r, and for r == 0, if c and r are free of i and j.
    """
    mods = [t for t, k in total.terms.items() if t.op is Op.MOD and abs(k) == 1 and indices(t)]
    if len(mods) == 2 == len(total.terms) and not total.constant:
        return _same_residue(total, mods, span)
    if len(mods) != 1 or (len(total.terms) == 1 and not total.constant):
        return None
    (mod,) = mods
    r = mod.args[1]
    rest = total - Sum({mod: total.terms[mod]})
    c = (rest * -total.terms[mod]).expr()  # mod == c
    if c is None or indices(c) or indices(r):
        return None
    difference = (Sum.of(mod.args[0]) - Sum.of(c)).expr()
    proper = is_zero(Sum.of(_remainder(make(Op.MOD, c, r))) - Sum.of(c), span)
    if difference is None or proper is None:
        return None
    return both(_no_remainder(difference, r, span), proper)


def _same_residue(total: Sum, mods: list[Expr], span: Span | None) -> Expr | None:
    a, b = mods
    difference = (Sum.of(a.args[0]) - Sum.of(b.args[0])).expr()
    if a.args[1] != b.args[1] or total.terms[a] != -total.terms[b] or difference is None:
        return None
    return _no_remainder(difference, a.args[1], span)


def _no_remainder(x: Expr, r: Expr, span: Span | None) -> Expr:
    mod = _remainder(make(Op.MOD, x, r))
    return const(mod.attr == 0, span) if mod.is_const else _equal_zero(mod, span)


def _difference(e: Expr) -> Sum:
    return Sum.of(e.args[0]) - Sum.of(e.args[1])


def _le(e: Expr) -> Expr:
    return _of_types(e, lambda e: at_most_zero(_difference(e), e.span))


def _lt(e: Expr) -> Expr:
    return _of_types(e, lambda e: at_most_zero(_difference(e).plus(1), e.span))


def _eq(e: Expr) -> Expr:
    if e.args[0].type is Type.BOOL and e.args[1].type is Type.BOOL:
        return _equivalence(e)
    return _of_types(e, lambda e: is_zero(_difference(e), e.span))


def _ne(e: Expr) -> Expr:
    return negation(_eq(make(Op.EQ, *e.args, span=e.span)))


def _of_types(e: Expr, of_ints: Callable[[Expr], Expr | None]) -> Expr:
    types = {a.type for a in e.args}
    if types == {Type.INT}:
        return of_ints(e) or e
    return _float_comparison(e) if types == {Type.FLOAT} else e


def _float_comparison(e: Expr) -> Expr:
    """float(int) against a small literal is a comparison of ints, in float32 and float64 alike."""
    x, y = e.args
    if _whole(x) and y.is_const and _small(y.attr):
        below, above = math.floor(y.attr), math.ceil(y.attr)
        limit = {Op.LE: below, Op.LT: above - 1, Op.EQ: below}[e.op]
        if e.op is Op.EQ and below != above:
            return const(False, e.span)
        return _again(e.op if e.op is Op.EQ else Op.LE, x.args[0], const(limit), e.span)
    if _whole(y) and x.is_const and _small(x.attr):
        below, above = math.floor(x.attr), math.ceil(x.attr)
        limit = {Op.LE: above, Op.LT: below + 1, Op.EQ: below}[e.op]
        if e.op is Op.EQ and below != above:
            return const(False, e.span)
        return _again(e.op if e.op is Op.EQ else Op.LE, const(limit), y.args[0], e.span)
    return e


def _whole(e: Expr) -> bool:
    return e.op is Op.FLOAT and e.args[0].type is Type.INT


def _small(value: float) -> bool:
    """Whether a literal lies between the same ints after rounding to float32."""
    if not abs(value) < FLOAT32_INTS - 1:  # nan too
        return False
    rounded = float(np.float32(value))
    return (math.floor(rounded), math.ceil(rounded)) == (math.floor(value), math.ceil(value))


def _again(op: Op, x: Expr, y: Expr, span: Span | None) -> Expr:
    e = make(op, x, y, span=span)
    return RULES[op](e)


def _equivalence(e: Expr) -> Expr:
    """a == b of conditions, so that ranges can solve it: both, or neither."""
    a, b = e.args
    if a == b:
        return const(True, e.span)
    for x, y in ((a, b), (b, a)):
        if x.is_const:
            return y if x.attr else negation(y)
    if weight(a) + weight(b) > MAX_WRITTEN_OUT:
        return e
    return either(both(a, b), both(negation(a), negation(b)))


def weight(e: Expr) -> int:
    """The number of nodes of the expression written out."""
    return int(remembered(e, "weight", lambda e: 1 + sum(a.__dict__["weight"] for a in e.args)))


def both(*terms: Expr) -> Expr:
    """a and b, with constants and repeated terms taken out."""
    return _junction(Op.AND, terms, TRUE, FALSE)


def either(*terms: Expr) -> Expr:
    """a or b, likewise."""
    return _junction(Op.OR, terms, FALSE, TRUE)


def _junction(op: Op, terms: Iterable[Expr], unit: Expr, zero: Expr) -> Expr:
    kept = dict.fromkeys(x for t in terms for x in operands(op, t) if x != unit)
    if zero in kept:
        return zero
    return functools.reduce(lambda a, b: make(op, a, b), kept) if kept else unit


def operands(op: Op, e: Expr) -> list[Expr]:
    """What a chain of `and`, or of `or`, consists of."""
    found, stack = [], [e]
    while stack:
        node = stack.pop()
        if node.op is op:
            stack.extend(reversed(node.args))
        else:
            found.append(node)
    return found


def negation(e: Expr) -> Expr:
    """not e, pushed to the leaves."""
    if e.op in (Op.AND, Op.OR):
        join = either if e.op is Op.AND else both
        return join(*(negation(x) for x in operands(e.op, e)))
    rule = _NEGATION.get(e.op)
    return (rule(e) if rule else None) or make(Op.NOT, e, span=e.span)


def _not_at_most_zero(e: Expr) -> Expr | None:
    x, y = e.args
    if x.type is not Type.INT:
        return None  # of floats, the negation holds for nan too
    return at_most_zero((Sum.of(y) - Sum.of(x)).plus(1), e.span)


_NEGATION: dict[Op, Callable[[Expr], Expr | None]] = {
    Op.CONST: lambda e: const(not e.attr, e.span),
    Op.NOT: lambda e: e.args[0],
    Op.LE: _not_at_most_zero,
}


def _truth(e: Expr) -> Expr:
    x = e.args[0]
    if x.type is not Type.INT:
        return e
    return negation(is_zero(Sum.of(x), e.span) or make(Op.EQ, x, INT_ZERO, span=e.span))


RULES: dict[Op, Callable[[Expr], Expr]] = {
    Op.ADD: _linear,
    Op.SUB: _linear,
    Op.NEG: _linear,
    Op.INVERT: _linear,
    Op.MUL: _product,
    Op.FLOORDIV: _quotient,
    Op.MOD: _remainder,
    Op.SHL: _shl,
    Op.SHR: _shr,
    Op.MIN: _extreme,
    Op.MAX: _extreme,
    Op.INT: _int_of_bool,
    Op.WHERE: _where,
    Op.LE: _le,
    Op.LT: _lt,
    Op.EQ: _eq,
    Op.NE: _ne,
    Op.AND: lambda e: _junction(Op.AND, e.args, TRUE, FALSE),
    Op.OR: lambda e: _junction(Op.OR, e.args, FALSE, TRUE),
    Op.NOT: lambda e: negation(e.args[0]),
    Op.BOOL: _truth,
}


def normalise(root: Expr) -> Expr:
    """The normal form of a condition or an int."""
    return rewrite(root, _normal_node)


def _normal_node(node: Expr) -> Expr:
    if node.type in (Type.FLOAT, Type.ANY) or node.op not in RULES:
        return _folded(node)
    folded = _folded(node)
    return folded if folded.is_const else RULES[node.op](folded)


def _folded(node: Expr) -> Expr:
    """An operation on literal ints and bools is a literal."""
    plain = all(a.is_const and a.type is not Type.FLOAT for a in node.args)
    if not node.args or not plain or node.type not in (Type.INT, Type.BOOL) or node.op is Op.LOAD:
        return node
    value = evaluate(node, {})
    return const(bool(value) if node.type is Type.BOOL else int(value), node.span)


@functools.lru_cache(maxsize=1024)
def normal(root: Expr) -> Expr:
    """`normalise`, remembered: for analyses that do not look at spans."""
    return normalise(root)

"""A score as the softmax wants it: affine in s, in base 2, its terms sorted by what they vary with.

s / 8.0 - slopes[h] * (i - j)   ->   slope 1.0 / 8.0, offset -slopes[h] * (i - j)
cap * tanh(s / cap)             ->   (1.44 * cap) * tanh(s * (1.0 / cap))
bias[j] + x * i + rel[i, j]     ->   row x * i, column bias[j], mixed rel[i, j]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..ir.expr import ONE, ZERO, Expr, const, make, postorder
from ..ir.ops import Op, Type
from .simplify import simplify

LOG2E = const(math.log2(math.e))


@dataclass(frozen=True)
class Affine:
    """slope * s + offset; neither reads s."""

    slope: Expr
    offset: Expr


@dataclass(frozen=True)
class Terms:
    """row + column + mixed: what reads neither i nor j, or i only; j only; both."""

    row: Expr
    column: Expr
    mixed: Expr


# -- affine in s -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """slope * s + offset, either perhaps absent: an absent part is no 0 that could meet an inf."""

    slope: Expr | None
    offset: Expr | None


def _plus(x: Expr | None, y: Expr | None) -> Expr | None:
    if x is None or y is None:
        return x if y is None else y
    return x + y


def _negative(x: Expr | None) -> Expr | None:
    return None if x is None else -x


def _by(x: Parts, change: Callable[[Expr], Expr]) -> Parts:
    """Both parts multiplied or divided."""
    return Parts(*(None if part is None else change(part) for part in (x.slope, x.offset)))


def _add(node: Expr, x: Parts, y: Parts) -> Parts | None:
    return Parts(_plus(x.slope, y.slope), _plus(x.offset, y.offset))


def _sub(node: Expr, x: Parts, y: Parts) -> Parts | None:
    return _add(node, x, Parts(_negative(y.slope), _negative(y.offset)))


def _neg(node: Expr, x: Parts) -> Parts | None:
    return Parts(_negative(x.slope), _negative(x.offset))


def _mul(node: Expr, x: Parts, y: Parts) -> Parts | None:
    left, right = node.args
    if not right.reads_s:
        return _by(x, lambda part: _product(part, right))
    return None if left.reads_s else _by(y, lambda part: _product(left, part))


def _div(node: Expr, x: Parts, y: Parts) -> Parts | None:
    divisor = node.args[1]
    return None if divisor.reads_s else _by(x, lambda part: part / divisor)


def _where(node: Expr, x: Parts, y: Parts) -> Parts | None:
    """Only with one slope: 0 * s would bring an infinite s in where it was not taken."""
    condition = node.args[0]
    if condition.reads_s or x.slope != y.slope:
        return None
    if x.offset is None and y.offset is None:
        return x
    return Parts(x.slope, make(Op.WHERE, condition, x.offset or ZERO, y.offset or ZERO))


AFFINE: dict[Op, Callable[..., Parts | None]] = {
    Op.ADD: _add,
    Op.SUB: _sub,
    Op.NEG: _neg,
    Op.MUL: _mul,
    Op.DIV: _div,
    Op.WHERE: _where,
}


def affine_in_s(score: Expr) -> Affine | None:
    """Slope and offset with score == slope * s + offset, or None."""
    done: dict[int, Parts | None] = {}
    for node in postorder(score):
        done[id(node)] = _parts_of(node, done)
    parts = done[id(score)]
    if parts is None:
        return None
    return Affine(simplify(parts.slope or ZERO), simplify(parts.offset or ZERO))


def _parts_of(node: Expr, done: dict[int, Parts | None]) -> Parts | None:
    if not node.reads_s:
        return Parts(None, node)
    if node.op is Op.INDEX:
        return Parts(ONE, None)
    operands = [done[id(a)] for a in node.args if a.type is Type.FLOAT]
    if node.op not in AFFINE or node.type is not Type.FLOAT or None in operands:
        return None
    return AFFINE[node.op](node, *operands)


# -- base 2 ------------------------------------------------------------------------------------


def variation(node: Expr) -> int:
    """How often a value changes: 0 a literal, 1 once a program, 2 a row or column, 3 a score."""
    if not node.names:
        return 0
    varying = len(node.names & {"i", "j"})
    return 3 if node.reads_s else varying + 1


def base2(score: Expr) -> Expr:
    """score * log2(e), the factor moved to where it is paid once; invariant divisors inverted."""
    return scaled(score, LOG2E)


def scaled(score: Expr, factor: Expr) -> Expr:
    """factor * score for a factor that is the same for every score.

    s - slopes[h] * (i - j)   ->   factor * s - (factor * slopes[h]) * (i - j)
    """
    done: dict[Scaled, Expr] = {}
    stack = [(score, factor)]
    while stack:
        key = stack[-1]
        todo = [k for k in _parts(*key) if k not in done]
        if todo:
            stack.extend(todo)
            continue
        stack.pop()
        done[key] = _joined(key, [done[k] for k in _parts(*key)])
    return done[score, factor]


Scaled = tuple[Expr, Expr]  # an expression, and the factor that it takes


def _parts(node: Expr, factor: Expr) -> list[Scaled]:
    """The operands to scale, and by what; none where the node itself is multiplied."""
    if node.type is not Type.FLOAT or variation(node) <= 1:
        return []
    if _multiplies(node):
        return [(node.args[0], _quotient(factor, node.args[1]))]
    if node.op in (Op.ADD, Op.SUB, Op.NEG):
        return [(a, factor) for a in node.args]
    if node.op is Op.WHERE:
        return [(node.args[0], ONE), *((a, factor) for a in node.args[1:])]
    takes = 0
    if node.op is Op.MUL:  # the operand that varies least takes the factor
        takes = min((0, 1), key=lambda k: variation(node.args[k]))
    elif node.op is not Op.DIV:
        takes = -1
    return [(a, factor if k == takes else ONE) for k, a in enumerate(node.args)]


def _joined(key: Scaled, parts: list[Expr]) -> Expr:
    node, factor = key
    if not parts:
        return _product(factor, node)
    if _multiplies(node):
        return parts[0]
    if node.op is Op.MUL:
        return _product(*parts)
    if node.op is Op.LOG and factor == LOG2E:
        return make(Op.LOG2, *parts)
    passed = node.op in (Op.ADD, Op.SUB, Op.NEG, Op.WHERE, Op.DIV)
    if node.op is Op.LOAD:
        return _product(factor, node)
    result = node if parts == list(node.args) else make(node.op, *parts, span=node.span)
    return result if passed else _product(factor, result)


def _product(x: Expr, y: Expr) -> Expr:
    if x == ONE or y == ONE:
        return y if x == ONE else x
    if x.is_const and y.is_const:
        return const(x.attr * y.attr)
    return -y if x.is_const and x.attr == -1 else x * y


def _multiplies(node: Expr) -> bool:
    """Whether a division is by what is the same for all scores, to multiply by its inverse.

    Not by 0: (bias[j] + 0.0) / 0.0 is infinite, and 0.0 * (1.0 / 0.0) would be nan.
    """
    if node.op is not Op.DIV:
        return False
    divisor = node.args[1]
    return variation(divisor) <= 1 and not (divisor.is_const and divisor.attr == 0)


def _quotient(x: Expr, y: Expr) -> Expr:
    if x.is_const and y.is_const and y.attr != 0:
        return const(x.attr / y.attr)
    return x / y


# -- terms -------------------------------------------------------------------------------------


def split_terms(offset: Expr) -> Terms:
    """The terms of a sum by the indices that they read.

    float(i - j) reads both and stays whole: i and j apart would round.
    """
    sums: list[Expr | None] = [None, None, None]
    stack = [(offset, ONE)]
    while stack:
        node, factor = stack.pop()
        pieces = _pieces(node, factor)
        if pieces:
            stack.extend(reversed(pieces))
        else:
            kind = _kind(node)
            sums[kind] = _with_term(sums[kind], node, factor)
    return Terms(*(total or ZERO for total in sums))


def _kind(node: Expr) -> int:
    return 2 if {"i", "j"} <= node.names else 1 if "j" in node.names else 0


def _pieces(node: Expr, factor: Expr) -> list[Scaled]:
    """The terms that a node is the sum of; none where it is one term, or varies with i only."""
    if node.type is not Type.FLOAT or _kind(node) == 0:
        return []
    if node.op in (Op.ADD, Op.SUB):
        x, y = node.args
        return [(x, factor), (y, factor if node.op is Op.ADD else _negated(factor))]
    if node.op is Op.NEG:
        return [(node.args[0], _negated(factor))]
    if node.op is Op.MUL and _kind(node) == 2:
        for one, other in (node.args, node.args[::-1]):
            if variation(one) <= 1 and _separates(other):
                return [(other, _product(factor, one))]
    if _multiplies(node) and _kind(node) == 2 and _separates(node.args[0]):
        return [(node.args[0], _quotient(factor, node.args[1]))]
    return []


def _separates(node: Expr) -> bool:
    """Whether taking a sum apart leaves a term that is not mixed."""
    stack = [node]
    while stack:
        term = stack.pop()
        if _kind(term) != 2:
            return True
        if term.type is Type.FLOAT and term.op in (Op.ADD, Op.SUB, Op.NEG):
            stack.extend(term.args)
    return False


def _negated(factor: Expr) -> Expr:
    return factor.args[0] if factor.op is Op.NEG else -factor


def _with_term(total: Expr | None, term: Expr, factor: Expr) -> Expr:
    """total + factor * term, written with a minus where the factor has one."""
    if factor.op is Op.NEG or (factor.is_const and factor.attr < 0):
        part = _product(_negated(factor), term)
        return -part if total is None else total - part
    part = _product(factor, term)
    return part if total is None else total + part

"""Symbolic derivatives, with torch's subgradients at ties.

    d_ds(cap * tanh(s / cap))   ->   1.0 - tanh(s / cap) * tanh(s / cap)

Conditions and ints have derivative 0. At a tie min and max give half to each side, abs gives 0,
and `min(max(x, lo), hi)` is a clamp: it passes the whole gradient to x at both ends.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

from ..analysis.interval import Interval, Name
from ..ir.expr import ONE, ZERO, Expr, const, index, make, postorder
from ..ir.ops import Op, Type
from .simplify import simplify

# From a node and the derivative of each operand (None for 0) to the node's; None is 0.
Derivative = Expr | None
Rule = Callable[[Expr, tuple[Derivative, ...]], Derivative]


def _plus(x: Derivative, y: Derivative) -> Derivative:
    if x is None or y is None:
        return x if y is None else y
    return x + y


def _times(factor: Expr, x: Derivative, depth: int = 4) -> Derivative:
    """factor * x; a 0 of `where` stays 0: sqrt(max(s, 0)) has slope 0, not inf * 0, for s < 0."""
    if x is None or x == ONE:
        return None if x is None else factor
    if x.op is Op.WHERE and depth:
        inner = (None if a == ZERO else _times(factor, a, depth - 1) for a in x.args[1:])
        return _either(x.args[0], *inner)
    return factor * x


def _minus(x: Derivative) -> Derivative:
    return None if x is None else -x


def _either(condition: Expr, x: Derivative, y: Derivative) -> Derivative:
    """Selected, not multiplied by 0: what is not taken may be nan."""
    if x is None and y is None:
        return None
    return make(Op.WHERE, condition, x or ZERO, y or ZERO)


def _nothing(node: Expr, d: tuple[Derivative, ...]) -> Derivative:
    return None


def _add(node: Expr, d: tuple[Derivative, ...]) -> Derivative:
    return _plus(*d)


def _sub(node: Expr, d: tuple[Derivative, ...]) -> Derivative:
    x, y = d
    return _minus(y) if x is None else x if y is None else x - y


def _mul(node: Expr, d: tuple[Derivative, ...]) -> Derivative:
    x, y = node.args
    return _plus(_times(y, d[0]), _times(x, d[1]))


def _div(node: Expr, d: tuple[Derivative, ...]) -> Derivative:
    """(dx - (x / y) * dy) / y"""
    _, y = node.args
    above = _sub(node, (d[0], _times(node, d[1])))
    return None if above is None else above / y


def _pow(node: Expr, d: tuple[Derivative, ...]) -> Derivative:
    x, y = node.args
    by_exponent = None
    if d[1] is not None:
        # 0 ** y is flat in y for y >= 0, where log(0) is not finite; torch says 0 as well.
        flat = make(Op.AND, make(Op.EQ, x, ZERO), y >= ZERO)
        by_exponent = _either(flat, None, _times(node * make(Op.LOG, x), d[1]))
    return _plus(_power(x, y, d[0]), by_exponent)


def _power(x: Expr, y: Expr, d: Derivative) -> Derivative:
    """y * x ** (y - 1) * dx, and 0 at y = 0 whatever x."""
    if d is None or (y.is_const and y.attr == 0):
        return None
    if y.is_const:
        lower = x if y.attr == 2 else make(Op.POW, x, const(y.attr - 1))
        return _times(y * lower if y.attr != 1 else ONE, d)
    slope = y * make(Op.POW, x, y - ONE)
    return _either(make(Op.EQ, y, ZERO), None, _times(slope, d))


def _mod(node: Expr, d: tuple[Derivative, ...]) -> Derivative:
    """x % y is x - floor(x / y) * y; x % 0 is 0."""
    x, y = node.args
    whole = _times(make(Op.FLOORDIV, x, y), d[1])
    inside = _sub(node, (d[0], whole))
    return inside if y.is_const and y.attr else _either(make(Op.EQ, y, ZERO), None, inside)


def _abs(node: Expr, d: tuple[Derivative, ...]) -> Derivative:
    (x,) = node.args
    if d[0] is None:
        return None
    falling = _either(x < ZERO, _minus(d[0]), None)
    return _either(x > ZERO, d[0], falling)


def _extreme(node: Expr, d: tuple[Derivative, ...]) -> Derivative:
    if d == (None, None):
        return None
    x, y = node.args
    if d[0] is None or d[1] is None:
        return _one_sided(node, d)
    first = make(Op.LT, x, y) if node.op is Op.MIN else make(Op.LT, y, x)
    tied = make(Op.EQ, x, y)
    half = _times(const(0.5), _plus(*d))
    return _either(first, d[0], _either(tied, half, d[1]))


def _one_sided(node: Expr, d: tuple[Derivative, ...]) -> Derivative:
    """Only one operand varies: all of its slope where it is taken, half of it at a tie."""
    vary, fixed = node.args if d[1] is None else node.args[::-1]
    slope = d[0] if d[1] is None else d[1]
    inside = vary < fixed if node.op is Op.MIN else fixed < vary
    half = _either(make(Op.EQ, vary, fixed), _times(const(0.5), slope), None)
    return _either(inside, slope, half)


def _where(node: Expr, d: tuple[Derivative, ...]) -> Derivative:
    return _either(node.args[0], d[1], d[2])


def _function(slope: Callable[[Expr, Expr], Expr]) -> Rule:
    """A function of one float: its slope from the node (its own value) and its operand."""

    def rule(node: Expr, d: tuple[Derivative, ...]) -> Derivative:
        return None if d[0] is None else _times(slope(node, node.args[0]), d[0])

    return rule


LN2 = math.log(2.0)

DERIVATIVE: dict[Op, Rule] = {
    Op.CONST: _nothing,
    Op.INDEX: _nothing,  # `derivative` answers for the variable itself
    Op.CAPTURE: _nothing,
    Op.LOAD: _nothing,
    Op.SIZE: _nothing,
    Op.ADD: _add,
    Op.SUB: _sub,
    Op.MUL: _mul,
    Op.DIV: _div,
    Op.FLOORDIV: _nothing,
    Op.MOD: _mod,
    Op.POW: _pow,
    Op.NEG: lambda node, d: _minus(d[0]),
    Op.ABS: _abs,
    Op.MIN: _extreme,
    Op.MAX: _extreme,
    Op.BITAND: _nothing,
    Op.BITOR: _nothing,
    Op.BITXOR: _nothing,
    Op.INVERT: _nothing,
    Op.SHL: _nothing,
    Op.SHR: _nothing,
    Op.ILOG2: _nothing,
    Op.LT: _nothing,
    Op.LE: _nothing,
    Op.EQ: _nothing,
    Op.NE: _nothing,
    Op.AND: _nothing,
    Op.OR: _nothing,
    Op.NOT: _nothing,
    Op.WHERE: _where,
    Op.FLOAT: _nothing,
    Op.INT: _nothing,
    Op.BOOL: _nothing,
    Op.FLOOR: _nothing,
    Op.CEIL: _nothing,
    Op.ROUND: _nothing,
    Op.EXP: _function(lambda y, x: y),
    Op.EXP2: _function(lambda y, x: const(LN2) * y),
    Op.EXPM1: _function(lambda y, x: make(Op.EXP, x)),
    Op.LOG: _function(lambda y, x: ONE / x),
    Op.LOG2: _function(lambda y, x: ONE / (const(LN2) * x)),
    Op.LOG1P: _function(lambda y, x: ONE / (ONE + x)),
    Op.SQRT: _function(lambda y, x: const(0.5) / y),
    Op.RSQRT: _function(lambda y, x: const(-0.5) * y / x),
    Op.TANH: _function(lambda y, x: ONE - y * y),
    Op.SIGMOID: _function(lambda y, x: y * (ONE - y)),
    Op.SOFTPLUS: _function(lambda y, x: make(Op.SIGMOID, x)),
    Op.ERF: _function(lambda y, x: const(2 / math.sqrt(math.pi)) * make(Op.EXP, -(x * x))),
    Op.SIN: _function(lambda y, x: make(Op.COS, x)),
    Op.COS: _function(lambda y, x: -make(Op.SIN, x)),
}


def derivative(expr: Expr, variable: Expr, env: Mapping[Name, Interval] | None = None) -> Expr:
    """The derivative of a float expression by a node: `s`, a captured scalar, or a read.

    Every occurrence of an equal node is the variable: `bias[j]` is another variable than `bias[i]`.
    """
    done: dict[int, Derivative] = {}
    for node in postorder(expr):
        if node == variable:
            done[id(node)] = ONE
        elif node.type is not Type.FLOAT:
            done[id(node)] = None
        elif _is_clamp(node):
            done[id(node)] = _clamp(node, done)
        else:
            done[id(node)] = DERIVATIVE[node.op](node, tuple(done[id(a)] for a in node.args))
    # A row with a value that is not finite has gradient nan already, from its softmax.
    return simplify(done[id(expr)] or ZERO, env, finite=True)


def _is_clamp(node: Expr) -> bool:
    return node.op is Op.MIN and node.args[0].op is Op.MAX


def _clamp(node: Expr, done: Mapping[int, Derivative]) -> Derivative:
    """min(max(x, lo), hi) as torch.clamp: x for lo <= x <= hi, else the bound that it passed."""
    (x, lo), hi = node.args[0].args, node.args[1]
    dx, dlo, dhi = (done[id(a)] for a in (x, lo, hi))
    beyond = _either(make(Op.AND, x < lo, lo <= hi), dlo, dhi)
    return _either(make(Op.AND, lo <= x, x <= hi), dx, beyond)


def d_ds(score: Expr, env: Mapping[Name, Interval] | None = None) -> Expr:
    """The derivative of a score by the raw score `s`."""
    return d_dread(score, index("s"), env)


def reads(score: Expr) -> tuple[Expr, ...]:
    """The distinct captured floats that a score depends on, scalars and reads, in order."""
    kinds = (Op.CAPTURE, Op.LOAD)
    found = (n for n in postorder(score) if n.op in kinds and n.type is Type.FLOAT)
    return tuple(dict.fromkeys(found))


def d_dread(score: Expr, read: Expr, env: Mapping[Name, Interval] | None = None) -> Expr:
    """The derivative of a score by one of its `reads`."""
    return _known(score, read) if env is None else derivative(score, read, env)


@functools.lru_cache(maxsize=256)
def _known(score: Expr, variable: Expr) -> Expr:
    """The same at any launch, remembered: every kernel of a backward asks for it."""
    return derivative(score, variable)

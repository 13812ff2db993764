"""What is known of an int at every launch: bounds, freedom from overflow, residue class.

    bounds(j // 4)  ->  (0, 2**29 - 1)        congruence(6 * i + 3)  ->  (6, 3)

Indices and lengths are below 2**31 and captured ints at most 2**47 in magnitude (DESIGN section 3);
nothing else is assumed. Arithmetic here is on Python's ints, which never overflow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir.expr import Expr, postorder
from ..ir.ops import INT_MAX, INT_MIN, Op, Type

INDEX_LIMIT = 2**31
CAPTURE_LIMIT = 2**47

Bounds = tuple[int, int]  # least, greatest; both included
ANYTHING: Bounds = (INT_MIN, INT_MAX)
TRUTH: Bounds = (0, 1)


@dataclass(frozen=True)
class Fact:
    """`exact`: the operation itself cannot overflow, so that the laws of the integers hold."""

    bounds: Bounds
    exact: bool
    congruence: tuple[int, int]


def bounds(e: Expr) -> Bounds:
    """The least and greatest value of an int or bool expression."""
    return fact(e).bounds


def exact(e: Expr) -> bool:
    """Whether the outermost operation of `e` never leaves 64 bits."""
    return fact(e).exact


def congruence(e: Expr) -> tuple[int, int]:
    """(m, r): every value of `e` is r modulo m; m is 0 for a constant, 1 where nothing is known."""
    return fact(e).congruence


def fact(root: Expr) -> Fact:
    """Everything known of `root`."""
    result = remembered(root, "fact", _fact)
    assert isinstance(result, Fact)
    return result


def remembered(root: Expr, key: str, own: Callable[[Expr], Any]) -> Any:
    """What `own` finds for a node whose operands have it already; each node is looked at once."""
    if key not in root.__dict__:
        new = all(key in a.__dict__ for a in root.args)
        for node in (root,) if new else postorder(root):
            if key not in node.__dict__:
                node.__dict__[key] = own(node)
    return root.__dict__[key]


def magnitude(b: Bounds) -> int:
    """The greatest absolute value."""
    return max(-b[0], b[1])


def within(b: Bounds) -> bool:
    """Whether all values fit in 64 bits."""
    return b[0] >= INT_MIN and b[1] <= INT_MAX


def _fact(node: Expr) -> Fact:
    raw = _raw(node)
    if not within(raw):
        return Fact(ANYTHING, False, (1, 0))
    return Fact(raw, True, _RESIDUE.get(node.op, _no_residue)(node))


# -- bounds --------------------------------------------------------------------------------------


def _raw(node: Expr) -> Bounds:
    """The bounds over the integers: they may lie outside 64 bits."""
    if node.op in _LEAVES:
        return _LEAVES[node.op](node)
    if node.type is Type.BOOL:
        return TRUTH
    if node.op in _BOUNDS and all(a.type in (Type.INT, Type.BOOL) for a in node.args):
        return _BOUNDS[node.op](node, [a.__dict__["fact"].bounds for a in node.args])
    return ANYTHING


def _const(node: Expr) -> Bounds:
    return ANYTHING if node.type is Type.FLOAT else (int(node.attr), int(node.attr))


def _index(node: Expr) -> Bounds:
    # q_offset may be negative as far as anything here is concerned.
    return (-INDEX_LIMIT, INDEX_LIMIT - 1) if node.attr == "i" else (0, INDEX_LIMIT - 1)


def _captured(node: Expr) -> Bounds:
    if node.type is Type.BOOL:
        return TRUTH
    return (-CAPTURE_LIMIT, CAPTURE_LIMIT) if node.type is Type.INT else ANYTHING


_LEAVES: dict[Op, Callable[[Expr], Bounds]] = {
    Op.CONST: _const,
    Op.INDEX: _index,
    Op.SIZE: lambda node: (0, INDEX_LIMIT - 1),
    Op.CAPTURE: _captured,
    Op.LOAD: _captured,
}


def _hull(values: Sequence[int]) -> Bounds:
    return min(values), max(values)


def _mul(node: Expr, b: list[Bounds]) -> Bounds:
    for quotient, divisor in (node.args, node.args[::-1]):
        if quotient.op is Op.FLOORDIV and quotient.args[1] == divisor and exact(quotient):
            # (x // c) * c is x - x % c, however large c may be; and 0 for c == 0
            x, c = bounds(quotient.args[0]), bounds(divisor)
            return min(0, x[0] - max(0, c[1] - 1)), max(0, x[1] - min(0, c[0] + 1))
    return _hull([x * y for x, y in itertools.product(*b)])


def _floordiv(_: Expr, b: list[Bounds]) -> Bounds:
    x, y = b
    if y[0] <= 0 <= y[1]:
        return -magnitude(x), magnitude(x)  # |x // y| <= |x|, and x // 0 is 0
    return _hull([p // q for p, q in itertools.product(x, y)])


def _mod(_: Expr, b: list[Bounds]) -> Bounds:
    x, y = b
    low, high = min(0, y[0] + 1), max(0, y[1] - 1)
    return low, min(high, x[1]) if x[0] >= 0 and y[0] >= 0 else high


def _abs(_: Expr, b: list[Bounds]) -> Bounds:
    low, high = b[0]
    return max(low, -high, 0), magnitude(b[0])


def _bits(_: Expr, b: list[Bounds]) -> Bounds:
    power = 1 << max(magnitude(x) for x in b).bit_length()
    return (0 if all(x[0] >= 0 for x in b) else -power), power - 1


def _bitand(node: Expr, b: list[Bounds]) -> Bounds:
    tops = [x[1] for x in b if x[0] >= 0]
    return (0, min(tops)) if tops else _bits(node, b)


def _shl(_: Expr, b: list[Bounds]) -> Bounds:
    x, n = b
    if n[1] < 0 or n[0] > 63:
        return 0, 0
    ends = [v << max(0, min(k, 63)) for v, k in itertools.product(x, n)]
    return _hull([*ends, 0])


def _shr(_: Expr, b: list[Bounds]) -> Bounds:
    x, n = b
    ends = [v >> max(0, min(k, 63)) for v, k in itertools.product(x, n)]
    return _hull(ends if n[0] >= 0 and n[1] < 64 else [*ends, 0])


def _pow(node: Expr, b: list[Bounds]) -> Bounds:
    exponent = node.args[1].attr
    if exponent > 64:
        return ANYTHING[0] - 1, ANYTHING[1] + 1
    ends = [v**exponent for v in b[0]]
    return _hull([*ends, 0] if b[0][0] < 0 < b[0][1] else ends)


_BOUNDS: dict[Op, Callable[[Expr, list[Bounds]], Bounds]] = {
    Op.ADD: lambda _, b: (b[0][0] + b[1][0], b[0][1] + b[1][1]),
    Op.SUB: lambda _, b: (b[0][0] - b[1][1], b[0][1] - b[1][0]),
    Op.NEG: lambda _, b: (-b[0][1], -b[0][0]),
    Op.INVERT: lambda _, b: (-b[0][1] - 1, -b[0][0] - 1),
    Op.MUL: _mul,
    Op.FLOORDIV: _floordiv,
    Op.MOD: _mod,
    Op.POW: _pow,
    Op.ABS: _abs,
    Op.MIN: lambda _, b: (min(b[0][0], b[1][0]), min(b[0][1], b[1][1])),
    Op.MAX: lambda _, b: (max(b[0][0], b[1][0]), max(b[0][1], b[1][1])),
    Op.BITAND: _bitand,
    Op.BITOR: _bits,
    Op.BITXOR: _bits,
    Op.SHL: _shl,
    Op.SHR: _shr,
    Op.ILOG2: lambda _, b: (0, max(1, b[0][1]).bit_length() - 1),
    Op.WHERE: lambda _, b: (min(b[1][0], b[2][0]), max(b[1][1], b[2][1])),
    Op.INT: lambda _, b: b[0],  # of a bool
}


# -- residues ------------------------------------------------------------------------------------


def _no_residue(_: Expr) -> tuple[int, int]:
    return 1, 0


def _residue_const(node: Expr) -> tuple[int, int]:
    return (1, 0) if node.type is Type.FLOAT else (0, int(node.attr))


def _residue_sum(sign: int) -> Callable[[Expr], tuple[int, int]]:
    def rule(node: Expr) -> tuple[int, int]:
        (m, r), (n, s) = map(_of, node.args)
        return _reduced(math.gcd(m, n), r + sign * s)

    return rule


def _residue_mul(node: Expr) -> tuple[int, int]:
    (m, r), (n, s) = map(_of, node.args)
    return _reduced(math.gcd(m * n, m * s, n * r), r * s)


def _residue_neg(node: Expr) -> tuple[int, int]:
    m, r = _of(node.args[0])
    return _reduced(m, -r)


def _residue_div(node: Expr) -> tuple[int, int]:
    (m, r), (n, c) = map(_of, node.args)
    return _reduced(m // c, r // c) if n == 0 and c > 0 and m % c == 0 else (1, 0)


def _residue_mod(node: Expr) -> tuple[int, int]:
    (m, r), (n, c) = map(_of, node.args)
    if n != 0 or c == 0:
        return 1, 0
    return (0, r % c) if m % c == 0 else _reduced(math.gcd(m, c), r)


def _of(arg: Expr) -> tuple[int, int]:
    return congruence(arg) if arg.type is Type.INT else (1, 0)


def _reduced(m: int, r: int) -> tuple[int, int]:
    return m, r % m if m else r


_RESIDUE: dict[Op, Callable[[Expr], tuple[int, int]]] = {
    Op.CONST: _residue_const,
    Op.ADD: _residue_sum(1),
    Op.SUB: _residue_sum(-1),
    Op.NEG: _residue_neg,
    Op.MUL: _residue_mul,
    Op.FLOORDIV: _residue_div,
    Op.MOD: _residue_mod,
}

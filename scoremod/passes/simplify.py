"""Simplify an expression without changing what it means.

    where(0 <= j, s * 1 - 0.0, s) + (i - j >= 0 and j <= i)   ->   s + (j <= i)

An int or bool never changes, wrapping at 2**64 included: what holds over the integers only is
guarded by intervals. Floats that decide an int or bool are rewritten only where every bit stays
the same. Other floats are reassociated, taking values to be finite, but nothing that might not be
finite is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from ..analysis.interval import Bounds, Interval, Name
from ..ir.expr import FALSE, Expr, const, make, postorder, rebuild
from ..ir.ops import INT_MAX, OPS, Op, Rule, Type
from .linear import Linear, build, fits, linear, shorter_comparison, shorter_sum
from .logic import DUAL, simplify_chain, simplify_not, simplify_pair
from .polynomial import in_region, shorter_polynomial


class Context:
    """Where a node stands: what is known of names, and whether its float bits matter."""

    def __init__(self, bounds: Bounds, exact: bool) -> None:
        self.bounds, self.exact = bounds, exact

    def at(self, node: Expr) -> Interval:
        """The interval of an int or bool, or of a float whose bits do not matter."""
        return self.bounds(node)

    def within(self, node: Expr, lo: float, hi: float) -> bool:
        """Whether a node is proved to lie in lo..hi."""
        x = self.at(node)
        return bool((x.lo >= lo).all() and (x.hi <= hi).all() and not np.any(x.nan))


# A rule gives a simpler expression, or None where it does not apply.
Simplifier = Callable[[Expr, Context], Expr | None]


def _is(node: Expr, value: bool | int | float) -> bool:
    """Whether a node is this literal (-0.0 is not 0.0)."""
    if not node.is_const or node.attr != value:
        return False
    return node.type is not Type.FLOAT or math.copysign(1, node.attr) == math.copysign(1, value)


# -- every operation ---------------------------------------------------------------------------

# Rounded the same everywhere; other functions of literals are left to run where bits matter.
_ROUNDED = frozenset(op for op, record in OPS.items() if record.rule is not Rule.FLOAT) - {Op.POW}
_ROUNDED |= {Op.DIV, Op.SQRT}


def _folded(node: Expr, context: Context) -> Expr | None:
    """Constants: the value, if it is the same in float32 and float64 where bits matter."""
    meaning = OPS[node.op].meaning
    if meaning is None or not node.args or not all(a.is_const for a in node.args):
        return None
    deciding = any(a.type is Type.FLOAT for a in node.args) and node.type is not Type.FLOAT
    exact = context.exact or deciding
    if exact and node.op not in _ROUNDED:
        return None
    wide, narrow = (_value(node, dtype) for dtype in (np.float64, np.float32))
    if exact and wide != narrow:
        return None
    return const(wide) if node.type is not Type.FLOAT or math.isfinite(wide) else None


def _value(node: Expr, dtype: type[np.floating]) -> bool | int | float:
    storage = {Type.BOOL: np.bool_, Type.INT: np.int64, Type.FLOAT: dtype}
    meaning = OPS[node.op].meaning
    assert meaning is not None
    with np.errstate(all="ignore"):
        value = meaning(*(np.asarray(a.attr).astype(storage[a.type]) for a in node.args))
        result: bool | int | float = np.asarray(value).astype(storage[node.type]).item()
    return result


def _proved(node: Expr, context: Context) -> Expr | None:
    """An int or bool that can have one value only."""
    if node.type not in (Type.INT, Type.BOOL) or node.is_const:
        return None
    x = context.at(node)
    lo, hi = x.lo.min(), x.hi.max()
    return const(lo.item()) if lo == hi else None


# -- numbers -----------------------------------------------------------------------------------


def _sum(node: Expr, context: Context) -> Expr | None:
    if node.type is Type.INT:
        return shorter_sum(node)
    x, y = node.args
    minus = node.op is Op.SUB
    if y.op is Op.NEG:
        return make(Op.ADD if minus else Op.SUB, x, y.args[0])
    if y.is_const and y.attr < 0:
        return make(Op.ADD if minus else Op.SUB, x, const(-y.attr))
    # x + 0.0 is 0.0 for x = -0.0; x - 0.0 is x
    if _is(y, 0.0) and (minus or not context.exact or x.op is Op.FLOAT):
        return x
    return None if context.exact else _loose_sum(node, context)


def _loose_sum(node: Expr, context: Context) -> Expr | None:
    x, y = node.args
    minus = node.op is Op.SUB
    if _is(x, 0.0):
        return -y if minus else y
    if x.op is Op.NEG and not minus:
        return y - x.args[0]
    # Differences of ints are exact: float(i) - float(j) is float(i - j).
    if x.op is Op.FLOAT and y.op is Op.FLOAT:
        inner = make(node.op, x.args[0], y.args[0])
        if fits(context.bounds, linear(inner)):
            return make(Op.FLOAT, inner)
    return None


def _neg(node: Expr, context: Context) -> Expr | None:
    (x,) = node.args
    if x.op is Op.NEG:
        return x.args[0]
    if node.type is Type.INT:
        return shorter_sum(node)
    if x.op is Op.SUB and not context.exact:  # -(x - x) is -0.0
        return x.args[1] - x.args[0]
    return None


def _mul(node: Expr, context: Context) -> Expr | None:
    if node.type is Type.INT:
        return shorter_sum(node)
    for x, y in (node.args, node.args[::-1]):
        if _is(y, 1.0):
            return x
        if _is(y, -1.0):
            return -x
        finite = not context.exact and y.is_const and y.attr == 0
        if finite and bool(context.at(x).is_finite.all()):
            return const(0.0)
    x, y = node.args
    return x.args[0] * y.args[0] if x.op is Op.NEG and y.op is Op.NEG else None


def _div(node: Expr, context: Context) -> Expr | None:
    x, y = node.args
    if _is(y, 1.0):
        return x
    if _is(y, -1.0):
        return -x
    return x.args[0] / y.args[0] if x.op is Op.NEG and y.op is Op.NEG else None


def _floordiv(node: Expr, context: Context) -> Expr | None:
    x, y = node.args
    if node.type is not Type.INT or not y.is_const:
        return None
    if y.attr == 1:
        return x
    if y.attr > 0 and x.op is Op.FLOORDIV and x.args[1].is_const and x.args[1].attr > 0:
        divisor = y.attr * x.args[1].attr
        return make(Op.FLOORDIV, x.args[0], const(divisor)) if divisor <= INT_MAX else None
    whole, rest = _multiples(x, y.attr, context)
    # (C*t + y) // C is t + y // C
    return None if whole is None else build(whole) + make(Op.FLOORDIV, build(rest), y)


def _mod(node: Expr, context: Context) -> Expr | None:
    x, y = node.args
    if node.type is not Type.INT or not y.is_const:
        return None
    if y.attr > 0 and context.within(x, 0, y.attr - 1):
        return x
    if x.op is Op.MOD and x.args[1] == y:
        return x
    whole, rest = _multiples(x, y.attr, context)
    return None if whole is None else make(Op.MOD, build(rest), y)


def _multiples(x: Expr, divisor: int, context: Context) -> tuple[Linear | None, Linear]:
    """x as divisor * whole + rest, the rest with 0 <= constant < divisor; over the integers."""
    form = linear(x)
    if divisor < 2 or not any(k % divisor == 0 for _, k in form.terms):
        return None, form
    multiples = tuple((t, k // divisor) for t, k in form.terms if k % divisor == 0)
    whole = Linear(multiples, form.constant // divisor)
    rest = Linear(tuple(t for t in form.terms if t[1] % divisor), form.constant % divisor)
    return (whole, rest) if fits(context.bounds, form, whole, rest) else (None, form)


def _pow(node: Expr, context: Context) -> Expr | None:
    x, y = node.args
    if y.is_const and y.attr == 1:
        return x
    if y.is_const and y.attr == 0:
        return const(1) if node.type is Type.INT else None  # nan ** 0.0 is for the reader to decide
    return None


def _abs(node: Expr, context: Context) -> Expr | None:
    (x,) = node.args
    if x.op in (Op.ABS, Op.NEG) and node.type is Type.FLOAT:
        return x if x.op is Op.ABS else make(Op.ABS, x.args[0])
    if node.type is Type.INT:
        if context.within(x, 0, INT_MAX):
            return x
        return -x if context.within(x, -INT_MAX, 0) else None
    return x if not context.exact and context.within(x, 0, math.inf) else None


def _extreme(node: Expr, context: Context) -> Expr | None:
    """min and max of equal, nested or ordered operands."""
    x, y = node.args
    if x == y:
        return x
    for outer, inner in ((x, y), (y, x)):
        if inner.op is node.op and outer in inner.args:
            return inner
    if x.op is node.op and x.args[1].is_const and y.is_const:
        return make(node.op, x.args[0], make(node.op, x.args[1], y))
    return None if context.exact and node.type is Type.FLOAT else _ordered(node, context)


def _ordered(node: Expr, context: Context) -> Expr | None:
    """The smaller (or larger) operand, if it is always the same one and the other is never nan."""
    for kept, gone in (node.args, node.args[::-1]):
        x, y = context.at(kept), context.at(gone)
        settled = x.hi <= y.lo if node.op is Op.MIN else x.lo >= y.hi
        if np.all(settled) and not np.any(y.nan):
            return kept
    return None


# -- bits --------------------------------------------------------------------------------------


def _bitand(node: Expr, context: Context) -> Expr | None:
    return _bits(node, same=None, absorbing=0, neutral=-1)


def _bitor(node: Expr, context: Context) -> Expr | None:
    return _bits(node, same=None, absorbing=-1, neutral=0)


def _bitxor(node: Expr, context: Context) -> Expr | None:
    return _bits(node, same=const(0), absorbing=None, neutral=0)


def _bits(node: Expr, same: Expr | None, absorbing: int | None, neutral: int) -> Expr | None:
    x, y = node.args
    if x == y:
        return x if same is None else same
    for one, other in ((x, y), (y, x)):
        if _is(other, neutral):
            return one
        if absorbing is not None and _is(other, absorbing):
            return other
    return None


def _invert(node: Expr, context: Context) -> Expr | None:
    (x,) = node.args
    return x.args[0] if x.op is Op.INVERT else None


def _shift(node: Expr, context: Context) -> Expr | None:
    x, n = node.args
    if _is(n, 0):
        return x
    outside = n.is_const and not 0 <= n.attr < 64
    return const(0) if outside or _is(x, 0) else None


# -- conditions and conversions ----------------------------------------------------------------


def _compare(node: Expr, context: Context) -> Expr | None:
    x, y = node.args
    if x.type is Type.INT:
        if x == y:
            return const(node.op in (Op.LE, Op.EQ))
        return shorter_comparison(node, context.bounds)
    if x.type is Type.BOOL:
        return _compare_bools(node, x, y)
    if x == y and node.op is Op.LT:
        return FALSE
    return None


def _compare_bools(node: Expr, x: Expr, y: Expr) -> Expr | None:
    """b == True -> b; b != True -> not b."""
    equal = node.op is Op.EQ
    if x == y:
        return const(equal)
    for one, other in ((x, y), (y, x)):
        if other.is_const:
            return one if other.attr is equal else make(Op.NOT, one)
    if x.op is Op.NOT and y.op is Op.NOT:
        return make(node.op, x.args[0], y.args[0])
    return None


def _where(node: Expr, context: Context) -> Expr | None:
    c, x, y = node.args
    if c.is_const:
        return x if c.attr else y
    if x == y:
        return x
    if c.op is Op.NOT:
        return make(Op.WHERE, c.args[0], y, x)
    if x.op is Op.WHERE and x.args[0] == c:
        return make(Op.WHERE, c, x.args[1], y)
    if y.op is Op.WHERE and y.args[0] == c:
        return make(Op.WHERE, c, x, y.args[2])
    return _choice(c, x, y) if node.type is Type.BOOL else None


def _choice(c: Expr, x: Expr, y: Expr) -> Expr | None:
    """where(c, x, y) of conditions, one of them a constant."""
    if x.is_const:
        return make(Op.OR, c, y) if x.attr else make(Op.AND, make(Op.NOT, c), y)
    if y.is_const:
        return make(Op.OR, make(Op.NOT, c), x) if y.attr else make(Op.AND, c, x)
    return None


def _bool(node: Expr, context: Context) -> Expr | None:
    """bool(float(n)) -> bool(n), bool(int(b)) -> b."""
    (x,) = node.args
    widened = x.op is Op.FLOAT or (x.op is Op.INT and x.args[0].type is Type.BOOL)
    return make(Op.BOOL, x.args[0]) if widened else None


EXACT_FLOAT32 = 2**24  # ints up to here are floats of either precision


def _to_int(node: Expr, context: Context) -> Expr | None:
    """floor(float(n)) -> n where the conversion is exact."""
    (x,) = node.args
    if x.op is not Op.FLOAT:
        return None
    if x.args[0].type is Type.BOOL:
        return make(Op.INT, x.args[0])
    exact = context.within(x.args[0], -EXACT_FLOAT32, EXACT_FLOAT32)
    return x.args[0] if exact else None


SIMPLIFY: dict[Op, Simplifier] = {
    Op.ADD: _sum,
    Op.SUB: _sum,
    Op.NEG: _neg,
    Op.MUL: _mul,
    Op.DIV: _div,
    Op.FLOORDIV: _floordiv,
    Op.MOD: _mod,
    Op.POW: _pow,
    Op.ABS: _abs,
    Op.MIN: _extreme,
    Op.MAX: _extreme,
    Op.BITAND: _bitand,
    Op.BITOR: _bitor,
    Op.BITXOR: _bitxor,
    Op.INVERT: _invert,
    Op.SHL: _shift,
    Op.SHR: _shift,
    Op.LT: _compare,
    Op.LE: _compare,
    Op.EQ: _compare,
    Op.NE: _compare,
    Op.AND: lambda node, context: simplify_pair(node),
    Op.OR: lambda node, context: simplify_pair(node),
    Op.NOT: lambda node, context: simplify_not(node, context.bounds),
    Op.WHERE: _where,
    Op.BOOL: _bool,
    Op.INT: _to_int,
    Op.FLOOR: _to_int,
    Op.CEIL: _to_int,
    Op.ROUND: _to_int,
}


# -- the walk ----------------------------------------------------------------------------------


def simplify(expr: Expr, env: Mapping[Name, Interval] | None = None, finite: bool = False) -> Expr:
    """An expression of the same meaning that is shorter to read and to run.

    `env` says more than `default_env` of what the names can be; `finite` that no float is
    infinite and no divisor 0.
    """
    if any(node.type is Type.ANY for node in postorder(expr)):
        return expr  # what the operations mean is not decided yet
    walk = _Walk(Bounds(env), finite)
    while (new := walk.whole(walk.run(expr))) != expr:
        expr = new
    return expr


Key = tuple[Expr, bool]  # a node, and whether its float bits matter


class _Walk:
    """Every node by every rule until none applies; each distinct node once."""

    def __init__(self, bounds: Bounds, finite: bool) -> None:
        self.bounds, self.finite = bounds, finite
        self.done: dict[Key, Expr] = {}

    def run(self, root: Expr) -> Expr:
        forward: dict[Key, Key] = {}
        top = (root, False)
        stack = [top]
        while stack:
            node, exact = key = stack[-1]
            todo = [k for k in self._operands(node, exact) if k not in self.done]
            if key in forward and forward[key] in self.done:
                self.done[key] = self.done[forward[key]]
            if key in self.done:
                stack.pop()
            elif key in forward:
                stack.append(forward[key])
            elif todo:
                stack.extend(todo)
            else:
                new = self._step(node, exact)
                if new == node:
                    self.done[key] = new
                else:
                    forward[key] = (new, exact and new.type is Type.FLOAT)
        return self.done[top]

    def _operands(self, node: Expr, exact: bool) -> list[Key]:
        return [
            (a, a.type is Type.FLOAT and (exact or self._jumps(node, k)))
            for k, a in enumerate(node.args)
        ]

    def _jumps(self, node: Expr, k: int) -> bool:
        """Whether one bit of a float operand may change the result by more."""
        if node.type is not Type.FLOAT or node.op in (Op.FLOORDIV, Op.MOD):
            return True
        # The sign of a zero decides between inf and -inf.
        return not self.finite and k in _POLES.get(node.op, ())

    def _step(self, node: Expr, exact: bool) -> Expr:
        """One rule applied to a node whose operands are simple."""
        old = node
        args = [self.done[key] for key in self._operands(node, exact)]
        if not exact:
            args = [self._root(node, k, arg) for k, arg in enumerate(args)]
        if any(new is not a for new, a in zip(args, node.args, strict=True)):
            node = rebuild(node, args)
        if _loses_s(old, node):
            node = old
        context = Context(self.bounds, exact)
        for rule in (_folded, _proved, SIMPLIFY.get(node.op)):
            new = rule(node, context) if rule else None
            if new is not None and new != node:
                return new
        return node

    def _root(self, node: Expr, k: int, arg: Expr) -> Expr:
        """An operand that is the root of a polynomial or of a chain, in its shortest form."""
        chained = arg.op is node.op and arg.type is Type.BOOL
        part = in_region(node) and not (k == 1 and node.op in (Op.DIV, Op.POW))
        exact = arg.type is Type.FLOAT and self._jumps(node, k)
        return arg if chained or part or exact else self.whole(arg)

    def whole(self, node: Expr) -> Expr:
        """The rules that see more than one operation at a time."""
        if node.op in DUAL:
            return simplify_chain(node, self.bounds)
        return shorter_polynomial(node, self.bounds, self.finite) if in_region(node) else node


# Operands at whose zero an operation is infinite.
_POLES: dict[Op, tuple[int, ...]] = {Op.DIV: (1,), Op.POW: (0, 1), Op.RSQRT: (0,)}


def _loses_s(old: Expr, new: Expr) -> bool:
    """Whether floats that decide would move from the kernel's precision to float32."""
    floats = any(a.type is Type.FLOAT for a in old.args) and old.type is not Type.FLOAT
    return floats and old.reads_s and not new.reads_s and not new.is_const

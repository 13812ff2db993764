"""Interval analysis: which values can an expression take on a tile?

    j <= i   with i in 0..127, j in 128..191   ->   never true

Bounds are arrays: with `i` shaped [q tiles, 1] and `j` shaped [1, kv tiles] one walk answers for
the whole grid. Integers are 64 bit: where an exact result might leave int64, nothing is claimed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ir.evaluate import Dtype
from ..ir.expr import Expr, decides, postorder
from ..ir.ops import INT_MAX, INT_MIN, OPS, Array, Op, Type

Name = str | tuple[str, int]  # an index or scalar capture; (table, axis) for the size of a table
MAX_INDEX = 2**31 - 1
MAX_CAPTURE = 2**47


@dataclass(frozen=True)
class Interval:
    """Every value lies in lo..hi, or is nan where `nan` says so.

    int64 bounds for INT, floats for FLOAT. For BOOL, `lo` is "certainly true" and `hi` is "may be
    true". Bounds of infinity belong to the interval.
    """

    lo: Array
    hi: Array
    nan: Array = np.False_

    @property
    def always(self) -> Array:
        """Where a condition is certainly true."""
        return self.lo

    @property
    def never(self) -> Array:
        """Where a condition is certainly false."""
        return np.logical_not(self.hi)

    @property
    def is_point(self) -> Array:
        """Where only one value is left."""
        return (self.lo == self.hi) & ~self.nan

    @property
    def is_finite(self) -> Array:
        """Where neither nan nor an infinity can occur."""
        return np.isfinite(self.lo) & np.isfinite(self.hi) & ~self.nan

    def holds(self, value: Array, slack: float = 0.0) -> Array:
        """Whether a value lies inside (up to a relative `slack`)."""
        value = np.asarray(value)
        if value.dtype.kind != "f":
            return (self.lo <= value) & (value <= self.hi)
        with np.errstate(invalid="ignore"):
            room = np.where(np.isfinite(value), slack * np.abs(value), 0)
            inside = (self.lo <= value + room) & (value - room <= self.hi)
        return np.where(np.isnan(value), self.nan, inside)


def ints(lo: Array, hi: Array) -> Interval:
    """Integers from lo to hi."""
    return Interval(np.asarray(lo, np.int64), np.asarray(hi, np.int64))


def floats(lo: Array, hi: Array, nan: Array = False) -> Interval:
    """Floats from lo to hi, infinities included; perhaps nan."""
    return Interval(np.asarray(lo, np.float64), np.asarray(hi, np.float64), np.asarray(nan, bool))


def bools(always: Array, maybe: Array) -> Interval:
    """A condition that is certainly true, or may be true."""
    return Interval(np.asarray(always, bool), np.asarray(maybe, bool))


def point(value: Array) -> Interval:
    """One value."""
    value = np.asarray(value)
    if value.dtype.kind == "f":
        missing = np.isnan(value)
        return floats(np.where(missing, -np.inf, value), np.where(missing, np.inf, value), missing)
    return bools(value, value) if value.dtype.kind == "b" else ints(value, value)


OPEN: dict[Type, Interval] = {
    Type.BOOL: bools(False, True),
    Type.INT: ints(INT_MIN, INT_MAX),
    Type.FLOAT: floats(-np.inf, np.inf, True),
}
# What a captured number or the element of a table can be; DESIGN section 3 bounds the ints.
CAPTURED: dict[Type, Interval] = {**OPEN, Type.INT: ints(-MAX_CAPTURE, MAX_CAPTURE)}
_INDEX = ints(0, MAX_INDEX)
_SIZE = ints(0, MAX_CAPTURE)

Load = Callable[[Expr, tuple[Interval, ...]], Interval]


def open_load(node: Expr, indices: tuple[Interval, ...]) -> Interval:
    """A table of which nothing is known; what lies outside reads 0, which is inside these."""
    return CAPTURED[node.type]


def meaning(op: Op) -> Callable[..., Array]:
    """What an operation does to arrays."""
    function = OPS[op].meaning
    assert function is not None, f"{op} is a leaf"
    return function


# -- integers ----------------------------------------------------------------------------------


def _guarded(lo: Array, hi: Array, overflow: Array) -> Interval:
    """lo..hi, or all of int64 where the exact result might not fit."""
    return Interval(np.where(overflow, INT_MIN, lo), np.where(overflow, INT_MAX, hi))


def _least(*values: Array) -> Array:
    return np.minimum.reduce(np.broadcast_arrays(*values))


def _greatest(*values: Array) -> Array:
    return np.maximum.reduce(np.broadcast_arrays(*values))


def _carries(x: Array, y: Array, total: Array) -> Array:
    """Whether x + y = total wrapped: both operands differ from it in sign."""
    return ((x ^ total) & (y ^ total)) < 0


def _add_int(x: Interval, y: Interval) -> Interval:
    lo, hi = x.lo + y.lo, x.hi + y.hi
    return _guarded(lo, hi, _carries(x.lo, y.lo, lo) | _carries(x.hi, y.hi, hi))


def _sub_int(x: Interval, y: Interval) -> Interval:
    lo, hi = x.lo - y.hi, x.hi - y.lo
    # x = lo + y.hi is the sum to check
    return _guarded(lo, hi, _carries(lo, y.hi, x.lo) | _carries(hi, y.lo, x.hi))


def _too_big(product: Array) -> Array:
    """Whether a product, known as a float, might leave int64; the margin is rounding."""
    return np.abs(product) >= 2.0**63 * (1 - 2.0**-50)


def _corners(x: Interval, y: Interval, function: Callable[[Array, Array], Array]) -> list[Array]:
    """`function` at the four corners: its extremes if it is monotone in each operand."""
    return [function(p, q) for p, q in itertools.product((x.lo, x.hi), (y.lo, y.hi))]


def _mul_int(x: Interval, y: Interval) -> Interval:
    corners = _corners(x, y, np.multiply)
    sizes = _corners(x, y, lambda p, q: np.asarray(p, np.float64) * q)
    return _guarded(_least(*corners), _greatest(*corners), _too_big(_greatest(*map(abs, sizes))))


Part = Callable[[Interval, Interval], tuple[Array, Array]]


def _by_sign(x: Interval, y: Interval, negative: Part, positive: Part) -> tuple[Array, Array]:
    """The hull over the divisor's negative part, its positive part, and 0 at divisor 0."""
    below, above, zero = y.lo < 0, y.hi > 0, (y.lo <= 0) & (y.hi >= 0)
    # A part that does not exist is computed at -1 or 1 and left out.
    minus = Interval(np.where(below, y.lo, -1), np.where(below, np.minimum(y.hi, -1), -1))
    plus = Interval(np.where(above, np.maximum(y.lo, 1), 1), np.where(above, y.hi, 1))
    (p, q), (r, s) = negative(x, minus), positive(x, plus)
    lows, highs = ((below, p), (above, r), (zero, 0)), ((below, q), (above, s), (zero, 0))
    return (
        _least(*(np.where(exists, end, INT_MAX) for exists, end in lows)),
        _greatest(*(np.where(exists, end, INT_MIN) for exists, end in highs)),
    )


def _quotients(x: Interval, y: Interval) -> tuple[Array, Array]:
    # INT_MIN // -1 is dealt with by the caller; here it must only not raise.
    corners = _corners(x, y, meaning(Op.FLOORDIV))
    return _least(*corners), _greatest(*corners)


def _floordiv_int(x: Interval, y: Interval) -> Interval:
    lo, hi = _by_sign(x, y, _quotients, _quotients)
    return _guarded(lo, hi, (x.lo == INT_MIN) & (y.lo <= -1) & (y.hi >= -1))


def _residues_positive(x: Interval, y: Interval) -> tuple[Array, Array]:
    """x % y for y > 0: x itself below y, the ends within one run of a constant y, else 0..y-1."""
    run = (y.lo == y.hi) & (x.lo // y.lo == x.hi // y.lo)
    itself = (x.lo >= 0) & (x.hi < y.lo)
    top = np.where(x.lo >= 0, np.minimum(x.hi, y.hi - 1), y.hi - 1)
    lo = np.where(run, x.lo % y.lo, np.where(itself, x.lo, 0))
    return lo, np.where(run, x.hi % y.lo, np.where(itself, x.hi, top))


def _residues_negative(x: Interval, y: Interval) -> tuple[Array, Array]:
    """x % y for y < 0, the mirror: y+1..0."""
    one = (y.lo == y.hi) & (y.lo != -1)
    c = np.where(one, y.lo, -2)
    run = one & (x.lo // c == x.hi // c)
    itself = (x.hi <= 0) & (x.lo > y.hi)
    bottom = np.where(x.hi <= 0, np.maximum(x.lo, y.lo + 1), y.lo + 1)
    lo = np.where(run, x.lo % c, np.where(itself, x.lo, bottom))
    return lo, np.where(run, x.hi % c, np.where(itself, x.hi, 0))


def _mod_int(x: Interval, y: Interval) -> Interval:
    return Interval(*_by_sign(x, y, _residues_negative, _residues_positive))


def _pow_int(x: Interval, y: Interval) -> Interval:
    """x ** n, n a literal: even powers are powers of abs(x)."""
    n = int(np.max(y.hi))
    base = _abs_int(x) if n % 2 == 0 else x
    reach = _greatest(*(np.abs(np.asarray(v, np.float64)) for v in (x.lo, x.hi)))
    power = meaning(Op.POW)
    return _guarded(power(base.lo, y.lo), power(base.hi, y.lo), _too_big(reach ** float(n)))


def _neg_int(x: Interval) -> Interval:
    return _guarded(-x.hi, -x.lo, x.lo == INT_MIN)


def _abs_lo(x: Interval) -> Array:
    return np.where(x.lo >= 0, x.lo, np.where(x.hi <= 0, -x.hi, 0))


def _abs_int(x: Interval) -> Interval:
    return _guarded(_abs_lo(x), np.maximum(-x.lo, x.hi), x.lo == INT_MIN)


# -- bits --------------------------------------------------------------------------------------


def _smear(x: Array) -> Array:
    """The least 2**k - 1 that is at least x, for x >= 0."""
    for shift in (1, 2, 4, 8, 16, 32):
        x = x | (x >> shift)
    return x


def _exact(function: Callable[..., Array], result: Interval, *args: Interval) -> Interval:
    """`result`, or the value itself where every operand is a point."""
    known = np.logical_and.reduce(np.broadcast_arrays(*(a.is_point for a in args)))
    value = function(*(a.lo for a in args))
    return Interval(np.where(known, value, result.lo), np.where(known, value, result.hi))


def _bitand(x: Interval, y: Interval) -> Interval:
    lo = np.where((x.lo >= 0) | (y.lo >= 0), 0, ~_smear(~np.minimum(np.minimum(x.lo, y.lo), -1)))
    smaller, larger = np.minimum(x.hi, y.hi), np.maximum(x.hi, y.hi)
    both = ((x.lo >= 0) & (y.lo >= 0)) | ((x.hi < 0) & (y.hi < 0))
    hi = np.where(x.lo >= 0, x.hi, np.where(y.lo >= 0, y.hi, larger))
    return _exact(np.bitwise_and, Interval(lo, np.where(both, smaller, hi)), x, y)


def _invert(x: Interval) -> Interval:
    return Interval(~x.hi, ~x.lo)


def _bitor(x: Interval, y: Interval) -> Interval:
    return _invert(_bitand(_invert(x), _invert(y)))


def _bitxor(x: Interval, y: Interval) -> Interval:
    ends = (x.lo, x.hi, y.lo, y.hi)
    reach = _smear(_greatest(*(np.maximum(v, ~v) for v in ends)))
    same = ((x.lo >= 0) & (y.lo >= 0)) | ((x.hi < 0) & (y.hi < 0))
    return _exact(np.bitwise_xor, Interval(np.where(same, 0, ~reach), reach), x, y)


def _shift(x: Interval, n: Interval, corners: list[Array], overflow: Array) -> Interval:
    """A shift with its corners at valid amounts; 0 where the amount may be outside 0..63."""
    some, outside = (n.hi >= 0) & (n.lo <= 63), (n.lo < 0) | (n.hi > 63)
    lo, hi = _least(*corners), _greatest(*corners)
    lo = np.where(some, np.where(outside, np.minimum(lo, 0), lo), 0)
    hi = np.where(some, np.where(outside, np.maximum(hi, 0), hi), 0)
    return _guarded(lo, hi, some & overflow)


def _amount(n: Interval) -> Interval:
    return Interval(np.clip(n.lo, 0, 63), np.clip(n.hi, 0, 63))


def _shl(x: Interval, n: Interval) -> Interval:
    sizes = _corners(x, _amount(n), lambda p, q: np.abs(np.ldexp(np.asarray(p, float), q)))
    shifted = _corners(x, _amount(n), np.left_shift)
    return _shift(x, n, shifted, _too_big(_greatest(*sizes)))


def _shr(x: Interval, n: Interval) -> Interval:
    return _shift(x, n, _corners(x, _amount(n), np.right_shift), np.False_)


# -- floats ------------------------------------------------------------------------------------
# Correctly rounded operations are monotone, so bounds made by the same operation, in the same
# order and precision, are bounds. Functions that a backend may round differently are widened.


def _float(lo: Array, hi: Array, nan: Array) -> Interval:
    """Bounds that may have come out as nan themselves are open."""
    lo, hi = np.where(np.isnan(lo), -np.inf, lo), np.where(np.isnan(hi), np.inf, hi)
    return Interval(lo.astype(hi.dtype), hi, nan)


def _infinite(x: Interval) -> Array:
    return np.isinf(x.lo) | np.isinf(x.hi)


def _has_zero(x: Interval) -> Array:
    return (x.lo <= 0) & (x.hi >= 0)


def _add_float(x: Interval, y: Interval) -> Interval:
    rise, fall = np.inf, -np.inf
    meet = ((x.hi == rise) & (y.lo == fall)) | ((x.lo == fall) & (y.hi == rise))
    return _float(x.lo + y.lo, x.hi + y.hi, x.nan | y.nan | meet)


def _neg_float(x: Interval) -> Interval:
    return Interval(-x.hi, -x.lo, x.nan)


def _sub_float(x: Interval, y: Interval) -> Interval:
    return _add_float(x, _neg_float(y))


def _hull(corners: list[Array], nan: Array) -> Interval:
    """The hull of corners; 0 * inf and inf / inf stand beside values on both sides of 0."""
    values = [np.where(np.isnan(c), np.zeros_like(c), c) for c in corners]
    return Interval(_least(*values), _greatest(*values), nan)


def _mul_float(x: Interval, y: Interval) -> Interval:
    nan = (_has_zero(x) & _infinite(y)) | (_has_zero(y) & _infinite(x))
    return _hull(_corners(x, y, np.multiply), x.nan | y.nan | nan)


def _opened(result: Interval, where: Array) -> Interval:
    """No bounds at all at some places."""
    lo, hi = np.where(where, -np.inf, result.lo), np.where(where, np.inf, result.hi)
    dtype = np.asarray(result.lo).dtype
    return Interval(lo.astype(dtype), hi.astype(dtype), result.nan)


def _div_float(x: Interval, y: Interval) -> Interval:
    zero = _has_zero(y)
    nan = (_has_zero(x) & zero) | (_infinite(x) & _infinite(y))
    return _opened(_hull(_corners(x, y, np.divide), x.nan | y.nan | nan), zero)


def _spread(x: Array, ulps: int) -> Array:
    """How far `ulps` reach; a flushed subnormal is covered too."""
    tiny = np.finfo(np.asarray(x).dtype).tiny
    return np.where(np.isfinite(x), ulps * np.spacing(np.abs(x)) + tiny, 0).astype(x.dtype)


def _floordiv_float(x: Interval, y: Interval) -> Interval:
    zero = _has_zero(y)
    q = _hull(_corners(x, y, np.floor_divide), x.nan | y.nan | _infinite(x))
    # Quotients are exact integers until their spacing is 1.
    exact = 1 / np.finfo(np.asarray(q.lo).dtype).eps
    lo = np.where(np.abs(q.lo) < exact, q.lo, q.lo - _spread(q.lo, 4))
    hi = np.where(np.abs(q.hi) < exact, q.hi, q.hi + _spread(q.hi, 4))
    return _opened(Interval(lo, hi, q.nan), zero | _infinite(x))


def _mod_float(x: Interval, y: Interval) -> Interval:
    """0..y or y..0, ends included: a tiny negative x rounds up to y."""
    itself = (x.lo >= 0) & (x.hi < y.lo)
    lo = np.where(itself, x.lo, np.minimum(y.lo, 0))
    hi = np.where(itself, x.hi, np.maximum(y.hi, 0))
    return Interval(lo, hi, x.nan | y.nan | _infinite(x))


def _pow_float(x: Interval, y: Interval) -> Interval:
    """Corners for a base that is not negative; for a whole constant exponent abs(x) or the ends."""
    whole = y.is_point & (y.lo == np.rint(y.lo)) & (y.lo >= 0) & np.isfinite(y.lo)
    even = whole & (np.remainder(y.lo, 2) == 0)
    base = Interval(np.where(even, _abs_lo(x), x.lo), np.where(even, _abs_hi(x), x.hi), x.nan)
    powers = _widened(_hull(_corners(base, y, np.power), x.nan | y.nan | ((x.lo < 0) & ~whole)))
    # (-0.0) ** -1.0 is -inf
    return _opened(powers, ((x.lo < 0) & ~whole) | ((x.lo <= 0) & (y.lo < 0)))


def _abs_hi(x: Interval) -> Array:
    return np.maximum(np.abs(x.lo), np.abs(x.hi))


def _abs_float(x: Interval) -> Interval:
    return Interval(_abs_lo(x), _abs_hi(x), x.nan)


ULPS = 8  # covers the accurate single-precision functions of CUDA, ROCm, SLEEF and NumPy


def _widened(x: Interval, exact_zero: bool = False) -> Interval:
    lo, hi = x.lo - _spread(x.lo, ULPS), x.hi + _spread(x.hi, ULPS)
    if exact_zero:  # log(1), tanh(0) and the like are 0 everywhere
        lo, hi = np.where(x.lo == 0, x.lo, lo), np.where(x.hi == 0, x.hi, hi)
    return Interval(lo, hi, x.nan)


def _rising(
    op: Op,
    lowest: float = -np.inf,
    highest: float = np.inf,
    domain: float = -np.inf,
    exact_zero: bool = False,
) -> Callable[[Interval], Interval]:
    """The rule of an increasing function with the given range, nan below its domain."""
    function = meaning(op)

    def rule(x: Interval) -> Interval:
        lo, hi = function(np.maximum(x.lo, domain)), function(np.maximum(x.hi, domain))
        wide = _widened(Interval(lo, hi), exact_zero)
        lo, hi = (np.clip(v, lowest, highest) for v in (wide.lo, wide.hi))
        return Interval(lo, hi, x.nan | (x.lo < domain))

    return rule


def _sqrt(x: Interval) -> Interval:
    return Interval(np.sqrt(np.maximum(x.lo, 0)), np.sqrt(np.maximum(x.hi, 0)), x.nan | (x.lo < 0))


def _rsqrt(x: Interval) -> Interval:
    tiny = np.finfo(np.asarray(x.lo).dtype).tiny
    lo, hi = (1 / np.sqrt(np.maximum(v, tiny)) for v in (x.hi, x.lo))
    result = _widened(Interval(lo, hi, x.nan | (x.lo < 0)))
    return _opened(Interval(np.maximum(result.lo, 0), result.hi, result.nan), x.lo <= tiny)


def _wave(op: Op) -> Callable[[Interval], Interval]:
    """sin and cos: the value at a point, else -1..1."""
    function = meaning(op)

    def rule(x: Interval) -> Interval:
        at = _widened(Interval(function(x.lo), function(x.lo)), exact_zero=True)
        known = x.is_point & np.isfinite(x.lo)
        lo = np.where(known, np.maximum(at.lo, -1), -1)
        hi = np.where(known, np.minimum(at.hi, 1), 1)
        return Interval(lo, hi, x.nan | _infinite(x))

    return rule


# -- conversions, comparison and logic ---------------------------------------------------------


def _min(x: Interval, y: Interval) -> Interval:
    return Interval(np.minimum(x.lo, y.lo), np.minimum(x.hi, y.hi), x.nan | y.nan)


def _max(x: Interval, y: Interval) -> Interval:
    return Interval(np.maximum(x.lo, y.lo), np.maximum(x.hi, y.hi), x.nan | y.nan)


def _rounded(op: Op) -> Callable[[Interval], Interval]:
    """A float to an int, monotone; nan gives 0."""
    function = meaning(op)

    def rule(x: Interval) -> Interval:
        lo, hi = function(x.lo), function(x.hi)
        lo = np.where(x.nan, np.minimum(lo, 0), lo)
        return Interval(lo, np.where(x.nan, np.maximum(hi, 0), hi))

    return rule


def _condition(always: Array, maybe: Array, nan: Array) -> Interval:
    """A comparison; nan never proves anything."""
    return Interval(np.logical_and(always, ~nan), np.logical_or(maybe, nan))


def _lt(x: Interval, y: Interval) -> Interval:
    return _condition(x.hi < y.lo, x.lo < y.hi, x.nan | y.nan)


def _le(x: Interval, y: Interval) -> Interval:
    return _condition(x.hi <= y.lo, x.lo <= y.hi, x.nan | y.nan)


def _eq(x: Interval, y: Interval) -> Interval:
    same = (x.lo == x.hi) & (y.lo == y.hi) & (x.lo == y.lo)
    return _condition(same, (x.lo <= y.hi) & (y.lo <= x.hi), x.nan | y.nan)


def _not(x: Interval) -> Interval:
    return Interval(np.logical_not(x.hi), np.logical_not(x.lo))


def _where(c: Interval, x: Interval, y: Interval) -> Interval:
    """The condition decides, else the hull."""

    def pick(p: Array, q: Array, hull: Array) -> Array:
        return np.where(c.always, p, np.where(c.never, q, hull))

    lo = pick(x.lo, y.lo, np.minimum(x.lo, y.lo))
    return Interval(lo, pick(x.hi, y.hi, np.maximum(x.hi, y.hi)), pick(x.nan, y.nan, x.nan | y.nan))


def _truth(x: Interval) -> Interval:
    return _not(_eq(x, Interval(np.zeros_like(x.lo), np.zeros_like(x.lo))))


Rule = Callable[..., Interval]


def _typed(of_ints: Rule, of_floats: Rule) -> Rule:
    """One rule for ints, one for floats."""

    def rule(*args: Interval) -> Interval:
        kind = np.asarray(args[0].lo).dtype.kind
        return of_floats(*args) if kind == "f" else of_ints(*args)

    return rule


INTERVAL: dict[Op, Rule] = {
    Op.ADD: _typed(_add_int, _add_float),
    Op.SUB: _typed(_sub_int, _sub_float),
    Op.MUL: _typed(_mul_int, _mul_float),
    Op.DIV: _div_float,
    Op.FLOORDIV: _typed(_floordiv_int, _floordiv_float),
    Op.MOD: _typed(_mod_int, _mod_float),
    Op.POW: _typed(_pow_int, _pow_float),
    Op.NEG: _typed(_neg_int, _neg_float),
    Op.ABS: _typed(_abs_int, _abs_float),
    Op.MIN: _min,
    Op.MAX: _max,
    Op.BITAND: _bitand,
    Op.BITOR: _bitor,
    Op.BITXOR: _bitxor,
    Op.INVERT: _invert,
    Op.SHL: _shl,
    Op.SHR: _shr,
    Op.ILOG2: lambda x: Interval(meaning(Op.ILOG2)(x.lo), meaning(Op.ILOG2)(x.hi)),
    Op.LT: _lt,
    Op.LE: _le,
    Op.EQ: _eq,
    Op.NE: lambda x, y: _not(_eq(x, y)),
    Op.AND: lambda x, y: Interval(x.lo & y.lo, x.hi & y.hi),
    Op.OR: lambda x, y: Interval(x.lo | y.lo, x.hi | y.hi),
    Op.NOT: _not,
    Op.WHERE: _where,
    Op.FLOAT: lambda x: x,  # the walk rounds to the float type in use
    Op.INT: _rounded(Op.INT),
    Op.BOOL: _truth,
    Op.FLOOR: _rounded(Op.FLOOR),
    Op.CEIL: _rounded(Op.CEIL),
    Op.ROUND: _rounded(Op.ROUND),
    Op.EXP: _rising(Op.EXP, lowest=0),
    Op.EXP2: _rising(Op.EXP2, lowest=0),
    Op.EXPM1: _rising(Op.EXPM1, lowest=-1, exact_zero=True),
    Op.LOG: _rising(Op.LOG, domain=0, exact_zero=True),
    Op.LOG2: _rising(Op.LOG2, domain=0, exact_zero=True),
    Op.LOG1P: _rising(Op.LOG1P, domain=-1, exact_zero=True),
    Op.SQRT: _sqrt,
    Op.RSQRT: _rsqrt,
    Op.TANH: _rising(Op.TANH, lowest=-1, highest=1, exact_zero=True),
    Op.SIGMOID: _rising(Op.SIGMOID, lowest=0, highest=1),
    Op.SOFTPLUS: _rising(Op.SOFTPLUS, lowest=0),
    Op.ERF: _rising(Op.ERF, lowest=-1, highest=1, exact_zero=True),
    Op.SIN: _wave(Op.SIN),
    Op.COS: _wave(Op.COS),
}


# -- the walk ----------------------------------------------------------------------------------


class Bounds:
    """Intervals of any number of expressions in one environment, each node once."""

    def __init__(
        self,
        env: Mapping[Name, Interval] | None = None,
        load: Load | None = None,
        dtype: Dtype = np.float64,
        strict: Dtype = np.float32,
    ) -> None:
        self.env, self.load = env or {}, load or open_load
        self.dtype, self.strict = dtype, strict
        self.done: dict[tuple[Expr, Dtype], Interval] = {}

    def __call__(self, root: Expr, dtype: Dtype | None = None) -> Interval:
        """The interval of `root`; floats that decide a bool or int are bounded in `strict`."""
        top = self.dtype if dtype is None else dtype
        stack = [(root, top)]
        with np.errstate(all="ignore"):
            while stack:
                node, dtype = stack[-1]
                inner = self.strict if decides(node) else dtype
                todo = [(a, inner) for a in node.args if (a, inner) not in self.done]
                if todo:
                    stack.extend(todo)
                    continue
                stack.pop()
                args = tuple(self.done[a, inner] for a in node.args)
                self.done[node, dtype] = _stored(self._node(node, args), node.type, dtype)
        return self.done[root, top]

    def _node(self, node: Expr, args: tuple[Interval, ...]) -> Interval:
        if node.op is Op.LOAD:
            return self.load(node, args)
        if node.op is Op.CONST:
            return point(np.asarray(node.attr))
        if not node.args:
            known = self.env.get(node.attr)
            return known if known is not None else leaf(node)
        return INTERVAL[node.op](*args)


def _stored(x: Interval, type_: Type, dtype: Dtype) -> Interval:
    """Bounds in the type that the value is computed in; rounding is monotone."""
    storage: Any = {Type.BOOL: np.bool_, Type.INT: np.int64, Type.FLOAT: dtype}[type_]
    return Interval(np.asarray(x.lo).astype(storage), np.asarray(x.hi).astype(storage), x.nan)


def leaf(node: Expr) -> Interval:
    """What is known of an index, a scalar capture or a size without being told."""
    if node.op is Op.INDEX:
        return OPEN[Type.FLOAT] if node.attr == "s" else _INDEX
    return _SIZE if node.op is Op.SIZE else CAPTURED[node.type]


def default_env(*roots: Expr) -> dict[Name, Interval]:
    """What holds at every launch: indices in [0, 2**31), captured ints within 2**47."""
    leaves = (n for n in postorder(*roots) if n.op in (Op.INDEX, Op.CAPTURE, Op.SIZE))
    return {node.attr: leaf(node) for node in leaves}


def interval(
    expr: Expr, env: Mapping[Name, Interval] | None = None, load: Load | None = None
) -> Interval:
    """Bounds of `expr` where names lie in `env` and `load` answers for tables.

    Names that `env` leaves out have the bounds of `default_env`.
    """
    return Bounds(env, load)(expr)

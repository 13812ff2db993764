"""The operations of the language: name, number of operands, type rule and meaning.

Everything that must know every operation is a table keyed by `Op`; `tests/test_tables.py` names
the ones that a table forgot.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any  # a NumPy array or scalar of bool, int64, float32 or float64
INT_MIN, INT_MAX = -(2**63), 2**63 - 1


class Type(enum.Enum):
    """The type of a value; ANY is a capture whose type the call decides."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    ANY = "any"

    def __repr__(self) -> str:
        return self.value


class Op(enum.Enum):
    """One operation; its value is its name in the mini-language or its operator."""

    # leaves
    CONST = "const"
    INDEX = "index"
    CAPTURE = "capture"
    LOAD = "load"
    SIZE = "size"
    # arithmetic
    ADD = "+"
    SUB = "-"
    MUL = "*"
    DIV = "/"
    FLOORDIV = "//"
    MOD = "%"
    POW = "**"
    NEG = "neg"
    ABS = "abs"
    MIN = "min"
    MAX = "max"
    # bits
    BITAND = "&"
    BITOR = "|"
    BITXOR = "^"
    INVERT = "~"
    SHL = "<<"
    SHR = ">>"
    ILOG2 = "ilog2"
    # comparison and logic
    LT = "<"
    LE = "<="
    EQ = "=="
    NE = "!="
    AND = "and"
    OR = "or"
    NOT = "not"
    WHERE = "where"
    # conversion
    FLOAT = "float"
    INT = "int"
    BOOL = "bool"
    FLOOR = "floor"
    CEIL = "ceil"
    ROUND = "round"
    # functions of floats
    EXP = "exp"
    EXP2 = "exp2"
    EXPM1 = "expm1"
    LOG = "log"
    LOG2 = "log2"
    LOG1P = "log1p"
    SQRT = "sqrt"
    RSQRT = "rsqrt"
    TANH = "tanh"
    SIGMOID = "sigmoid"
    SOFTPLUS = "softplus"
    ERF = "erf"
    SIN = "sin"
    COS = "cos"

    def __repr__(self) -> str:
        return f"Op.{self.name}"


class Rule(enum.Enum):
    """How an operation's type follows from its operands (`expr.make` applies it)."""

    LEAF = enum.auto()  # given with the node
    ARITH = enum.auto()  # bool -> int -> float promotion, same type out
    FLOAT = enum.auto()  # operands become float, float out
    POW = enum.auto()  # int ** non-negative int literal is int, else float
    BITS = enum.auto()  # int, or bool when every operand is bool
    INTEGER = enum.auto()  # int operands only
    COMPARE = enum.auto()  # promotion, bool out
    LOGIC = enum.auto()  # bool operands, bool out
    WHERE = enum.auto()  # bool condition, the branches promote
    CONVERT = enum.auto()  # to the named type
    ROUNDING = enum.auto()  # float to int


@dataclass(frozen=True)
class OpRecord:
    """What the compiler knows of an operation: operands, type rule and meaning on NumPy arrays."""

    arity: int
    rule: Rule
    meaning: Callable[..., Array] | None  # None: a leaf, see `evaluate`


def _floordiv(x: Array, y: Array) -> Array:
    """Floor division; x // 0 is 0."""
    safe = np.where(y == 0, np.ones_like(y), y)
    if np.asarray(x).dtype.kind == "f":
        return np.where(y == 0, np.zeros_like(x), np.floor_divide(x, safe))
    return np.where(y == 0, 0, np.where(safe == -1, np.negative(x), np.floor_divide(x, safe)))


def _mod(x: Array, y: Array) -> Array:
    """Remainder with the divisor's sign; x % 0 is 0."""
    safe = np.where(y == 0, np.ones_like(y), y)
    if np.asarray(x).dtype.kind == "f":
        return np.where(y == 0, np.zeros_like(x), np.remainder(x, safe))
    return np.where((y == 0) | (y == -1), 0, np.remainder(x, np.where(y == -1, 1, safe)))


def _pow(x: Array, y: Array) -> Array:
    if np.asarray(x).dtype.kind != "f":  # the type rule lets only a literal >= 0 here
        return _int_pow(x, int(np.max(y)))
    return np.power(x, y)


def _int_pow(x: Array, n: int) -> Array:
    """x ** n modulo 2**64, by squaring."""
    result, base = np.ones_like(x), x
    while n:
        if n & 1:
            result = result * base
        base = base * base
        n >>= 1
    return result


def _shift(shift: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """A shift by a negative amount, or by 64 and more, is 0."""

    def meaning(x: Array, n: Array) -> Array:
        valid = (n >= 0) & (n < 64)
        return np.where(valid, shift(x, np.where(valid, n, 0)), 0)

    return meaning


def _ilog2(x: Array) -> Array:
    """floor(log2(x)), exact; 0 for x < 1."""
    result = np.zeros_like(x)
    for bit in (32, 16, 8, 4, 2, 1):
        big = x >= (np.int64(1) << np.int64(bit))
        result = np.where(big, result + bit, result)
        x = np.where(big, x >> np.int64(bit), x)
    return result


def to_int(x: Array) -> Array:
    """A float that holds an integer, as int64: nan gives 0, out of range saturates."""
    x = np.asarray(x)
    if x.dtype.kind != "f":
        return x.astype(np.int64)
    low, high = x <= -(2.0**63), x >= 2.0**63
    inside = np.where(low | high | np.isnan(x), 0, x).astype(np.int64)
    return np.where(low, INT_MIN, np.where(high, INT_MAX, inside))


def _sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[np.asarray(x).dtype])(x)


def _keep(x: Array) -> Array:
    return x


_A, _F, _L = Rule.ARITH, Rule.FLOAT, Rule.LEAF

OPS: dict[Op, OpRecord] = {
    Op.CONST: OpRecord(0, _L, None),
    Op.INDEX: OpRecord(0, _L, None),
    Op.CAPTURE: OpRecord(0, _L, None),
    Op.LOAD: OpRecord(-1, _L, None),  # one operand per dimension
    Op.SIZE: OpRecord(0, _L, None),
    Op.ADD: OpRecord(2, _A, np.add),
    Op.SUB: OpRecord(2, _A, np.subtract),
    Op.MUL: OpRecord(2, _A, np.multiply),
    Op.DIV: OpRecord(2, _F, np.divide),
    Op.FLOORDIV: OpRecord(2, _A, _floordiv),
    Op.MOD: OpRecord(2, _A, _mod),
    Op.POW: OpRecord(2, Rule.POW, _pow),
    Op.NEG: OpRecord(1, _A, np.negative),
    Op.ABS: OpRecord(1, _A, np.abs),
    Op.MIN: OpRecord(2, _A, np.minimum),
    Op.MAX: OpRecord(2, _A, np.maximum),
    Op.BITAND: OpRecord(2, Rule.BITS, np.bitwise_and),
    Op.BITOR: OpRecord(2, Rule.BITS, np.bitwise_or),
    Op.BITXOR: OpRecord(2, Rule.BITS, np.bitwise_xor),
    Op.INVERT: OpRecord(1, Rule.BITS, np.invert),
    Op.SHL: OpRecord(2, Rule.INTEGER, _shift(np.left_shift)),
    Op.SHR: OpRecord(2, Rule.INTEGER, _shift(np.right_shift)),
    Op.ILOG2: OpRecord(1, Rule.INTEGER, _ilog2),
    Op.LT: OpRecord(2, Rule.COMPARE, np.less),
    Op.LE: OpRecord(2, Rule.COMPARE, np.less_equal),
    Op.EQ: OpRecord(2, Rule.COMPARE, np.equal),
    Op.NE: OpRecord(2, Rule.COMPARE, np.not_equal),
    Op.AND: OpRecord(2, Rule.LOGIC, np.logical_and),
    Op.OR: OpRecord(2, Rule.LOGIC, np.logical_or),
    Op.NOT: OpRecord(1, Rule.LOGIC, np.logical_not),
    Op.WHERE: OpRecord(3, Rule.WHERE, np.where),
    Op.FLOAT: OpRecord(1, Rule.CONVERT, _keep),  # `evaluate` rounds to the float type in use
    Op.INT: OpRecord(1, Rule.CONVERT, lambda x: to_int(np.trunc(x))),
    Op.BOOL: OpRecord(1, Rule.CONVERT, lambda x: x != 0),
    Op.FLOOR: OpRecord(1, Rule.ROUNDING, lambda x: to_int(np.floor(x))),
    Op.CEIL: OpRecord(1, Rule.ROUNDING, lambda x: to_int(np.ceil(x))),
    Op.ROUND: OpRecord(1, Rule.ROUNDING, lambda x: to_int(np.rint(x))),
    Op.EXP: OpRecord(1, _F, np.exp),
    Op.EXP2: OpRecord(1, _F, np.exp2),
    Op.EXPM1: OpRecord(1, _F, np.expm1),
    Op.LOG: OpRecord(1, _F, np.log),
    Op.LOG2: OpRecord(1, _F, np.log2),
    Op.LOG1P: OpRecord(1, _F, np.log1p),
    Op.SQRT: OpRecord(1, _F, np.sqrt),
    Op.RSQRT: OpRecord(1, _F, lambda x: 1 / np.sqrt(x)),
    Op.TANH: OpRecord(1, _F, np.tanh),
    Op.SIGMOID: OpRecord(1, _F, _sigmoid),
    Op.SOFTPLUS: OpRecord(1, _F, lambda x: np.logaddexp(x, np.zeros_like(x))),
    Op.ERF: OpRecord(1, _F, _erf),
    Op.SIN: OpRecord(1, _F, np.sin),
    Op.COS: OpRecord(1, _F, np.cos),
}

"""Hypothesis strategies: random typed expressions of the whole language, and values to put in.

@given(exprs(Type.BOOL), values())
def test_a_law(mask, env): evaluate(mask, env) ...
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from scoremod.ir.expr import Expr, capture, const, index, load, make, size
from scoremod.ir.ops import Op, Type

BOOL, INT, FLOAT = Type.BOOL, Type.INT, Type.FLOAT
LANES = 16
SCALARS: dict[str, Type] = {"flag": BOOL, "n": INT, "m": INT, "x": FLOAT, "y": FLOAT}
TABLES: dict[str, tuple[Type, int]] = {  # element type and rank
    "keep": (BOOL, 1),
    "doc": (INT, 1),
    "grid": (INT, 2),
    "bias": (FLOAT, 1),
    "rel": (FLOAT, 2),
}
TYPES: dict[str, Type] = {**SCALARS, **{name: type_ for name, (type_, _) in TABLES.items()}}

# What an operation takes, for each type that it can give.
OPERATIONS: dict[Type, tuple[tuple[Op, tuple[Type, ...]], ...]] = {
    BOOL: (
        *((op, (INT, INT)) for op in (Op.LT, Op.LE, Op.EQ, Op.NE, Op.LE, Op.LT)),
        *((op, (FLOAT, FLOAT)) for op in (Op.LT, Op.LE, Op.EQ, Op.NE)),
        *((op, (BOOL, BOOL)) for op in (Op.AND, Op.OR, Op.AND, Op.OR, Op.EQ, Op.NE)),
        (Op.NOT, (BOOL,)),
        (Op.WHERE, (BOOL, BOOL, BOOL)),
        (Op.BOOL, (INT,)),
        (Op.BOOL, (FLOAT,)),
    ),
    INT: (
        *((op, (INT, INT)) for op in (Op.ADD, Op.SUB, Op.MUL, Op.FLOORDIV, Op.MOD) * 2),
        *((op, (INT, INT)) for op in (Op.MIN, Op.MAX, Op.BITAND, Op.BITOR, Op.BITXOR)),
        *((op, (INT, INT)) for op in (Op.SHL, Op.SHR)),
        *((op, (INT,)) for op in (Op.NEG, Op.ABS, Op.INVERT, Op.ILOG2)),
        (Op.WHERE, (BOOL, INT, INT)),
        (Op.INT, (BOOL,)),
        *((op, (FLOAT,)) for op in (Op.INT, Op.FLOOR, Op.CEIL, Op.ROUND)),
    ),
    FLOAT: (
        *((op, (FLOAT, FLOAT)) for op in (Op.ADD, Op.SUB, Op.MUL, Op.DIV) * 2),
        *((op, (FLOAT, FLOAT)) for op in (Op.FLOORDIV, Op.MOD, Op.POW, Op.MIN, Op.MAX)),
        *((op, (FLOAT,)) for op in (Op.NEG, Op.ABS)),
        (Op.WHERE, (BOOL, FLOAT, FLOAT)),
        (Op.FLOAT, (INT,)),
        (Op.FLOAT, (INT,)),
        (Op.FLOAT, (BOOL,)),
        *((op, (FLOAT,)) for op in (Op.EXP, Op.EXP2, Op.EXPM1, Op.LOG, Op.LOG2, Op.LOG1P)),
        *((op, (FLOAT,)) for op in (Op.SQRT, Op.RSQRT, Op.TANH, Op.SIGMOID, Op.SOFTPLUS)),
        *((op, (FLOAT,)) for op in (Op.ERF, Op.SIN, Op.COS)),
    ),
}
# Smooth enough for a finite difference almost everywhere.
SMOOTH = frozenset(row[0] for row in OPERATIONS[FLOAT]) - {Op.FLOORDIV, Op.MOD}
SMOOTH |= {Op.LT, Op.LE, Op.AND, Op.OR, Op.NOT, Op.ADD, Op.SUB}

_LITERALS: dict[Type, tuple[Any, ...]] = {
    BOOL: (False, True),
    INT: (0, *range(-9, 10), 0, 1, 2, -1, 4, 64, 63, 128, 2**31 - 1, 3 * 2**29, 2**62),
    FLOAT: (0.0, 1.0, -1.0, 0.5, 2.0, -2.0, 3.0, 0.125, 0.1, 10.0, 1e-3, 50.0),
}
_INDICES = ("i", "j", "i", "j", "i", "j", "b", "h", "q_len")
_NAMES = {t: tuple(n for n, own in SCALARS.items() if own is t) for t in OPERATIONS}
_TABLES = {t: tuple(n for n, (own, _) in TABLES.items() if own is t) for t in OPERATIONS}


class _Choices:
    """Choices read from bytes: one draw an expression, and zeros are the simplest one."""

    def __init__(self, data: bytes, s: bool, ops: frozenset[Op] | None) -> None:
        self.data, self.s = iter(data), s
        self.rows = {
            type_: [row for row in rows if ops is None or row[0] in ops]
            for type_, rows in OPERATIONS.items()
        }
        self.powers = ops is None

    def below(self, n: int) -> int:
        return next(self.data, 0) % n

    def one_of(self, options: Any) -> Any:
        return options[self.below(len(options))]

    def expr(self, type_: Type, depth: int) -> Expr:
        choice = self.below(12)
        if depth <= 0 or choice == 0:
            return self.leaf(type_)
        if choice == 1:
            return self.read(type_, min(depth - 1, 2))
        if choice == 2 and type_ is INT and self.powers:
            return make(Op.POW, self.expr(INT, depth - 1), const(self.below(5)))
        op, types = self.one_of(self.rows[type_])
        return make(op, *(self.expr(t, depth - 1) for t in types))

    def leaf(self, type_: Type) -> Expr:
        """A literal, an index, a capture, or the size of a table."""
        kind = self.below(8)
        if kind <= 1:
            return const(self.one_of(_LITERALS[type_]))
        if type_ is INT and kind <= 5:
            return index(self.one_of(_INDICES)) if self.below(20) < 19 else size("doc", 0)
        if type_ is FLOAT and self.s and kind <= 4:
            return index("s")
        return capture(self.one_of(_NAMES[type_]), type_)

    def read(self, type_: Type, depth: int) -> Expr:
        """A read of a table at random positions, inside it or not."""
        name = self.one_of(_TABLES[type_])
        positions = tuple(self.expr(INT, depth) for _ in range(TABLES[name][1]))
        return load(name, positions, type_)


def exprs(
    type_: Type | None = None, depth: int = 4, s: bool = True, ops: frozenset[Op] | None = None
) -> st.SearchStrategy[Expr]:
    """Random expressions of a type (or any), at most `depth` operations deep.

    `s=False` leaves the score out; `ops` restricts the operations.
    """

    def build(data: bytes) -> Expr:
        choices = _Choices(data, s, ops)
        return choices.expr(type_ or choices.one_of((INT, BOOL, FLOAT)), depth)

    return st.binary(min_size=32, max_size=120).map(build)


def _pick(rng: np.random.Generator, pool: list[Any], shape: Any, dtype: Any) -> Any:
    return np.asarray(pool, dtype)[rng.integers(0, len(pool), shape)]


_NUMBERS = [*range(-4, 5), 7, -9, 16, 63, 64, 100, 1000, -1000, 2**31, -(2**31), 3 * 2**29]
_HUGE = [2**47, -(2**47), 2**40 + 1]
_TAME = [0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 0.1, 7.25, -20.0]
_REALS = [*_TAME, -0.0, 100.0, 1e-4, 1e5]
_WILD = [np.inf, -np.inf, np.nan, 1e30, -1e30, 1e-40]


def sample(seed: int, wild: bool = True) -> dict[str, Any]:
    """Values for every name in LANES lanes, and tables; `wild` adds nan, inf and large numbers."""
    rng = np.random.default_rng(seed)
    small = np.asarray([rng.choice((5, 40, 1000)), 2**31 - 1 if wild else 20])
    reals, numbers = (_REALS + _WILD, _NUMBERS + _HUGE) if wild else (_TAME, list(range(-9, 9)))
    tops = {name: rng.choice(small, LANES) for name in ("i", "j", "b", "h", "hk")}
    env: dict[str, Any] = {name: rng.integers(0, top + 1) for name, top in tops.items()}
    env["q_len"] = env["kv_len"] = rng.integers(0, 2**31 - 1, LANES)
    scores = rng.normal(size=LANES) * 3
    env["s"] = np.where(rng.random(LANES) < 0.7, scores, _pick(rng, reals, LANES, float))
    pools = {BOOL: ([False, True], bool), INT: (numbers, np.int64), FLOAT: (reals, float)}
    for name, type_ in SCALARS.items():
        env[name] = _pick(rng, pools[type_][0], LANES, pools[type_][1])
    for name, (type_, rank) in TABLES.items():
        shape = tuple(rng.integers(1, 7, rank))
        env[name] = _pick(rng, pools[type_][0], shape, pools[type_][1])
    return env


def values(wild: bool = True) -> st.SearchStrategy[dict[str, Any]]:
    """Environments for `evaluate`."""
    return st.integers(0, 10**6).map(lambda seed: sample(seed, wild))

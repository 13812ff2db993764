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
SMOOTH = frozenset(
    (Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.NEG, Op.ABS, Op.MIN, Op.MAX, Op.WHERE, Op.EXP, Op.EXP2)
    + (Op.EXPM1, Op.LOG, Op.LOG2, Op.LOG1P, Op.SQRT, Op.RSQRT, Op.TANH, Op.SIGMOID, Op.SOFTPLUS)
    + (Op.ERF, Op.SIN, Op.COS, Op.LT, Op.LE, Op.AND, Op.OR, Op.NOT, Op.POW, Op.FLOAT)
)

_INTS = st.one_of(
    st.integers(-9, 9), st.sampled_from((0, 1, 2, -1, 4, 64, 63, 128, 2**31 - 1, 3 * 2**29, 2**62))
)
_FLOATS = st.sampled_from((0.0, 1.0, -1.0, 0.5, 2.0, -2.0, 3.0, 0.125, 0.1, 10.0, 1e-3, 50.0))


@st.composite
def leaves(draw: st.DrawFn, type_: Type, s: bool = True) -> Expr:
    """A literal, an index, a capture, or the size of a table."""
    kind = draw(st.integers(0, 5))
    if kind <= 1:
        literals: dict[Type, st.SearchStrategy[Any]] = {BOOL: st.booleans(), INT: _INTS}
        return const(draw(literals.get(type_, _FLOATS)))
    if type_ is INT and kind <= 4:
        return index(draw(st.sampled_from(("i", "j", "i", "j", "i", "j", "b", "h", "q_len"))))
    if type_ is INT and draw(st.integers(0, 5)) == 0:
        return size("doc", 0)
    if type_ is FLOAT and s and kind <= 3:
        return index("s")
    return capture(draw(st.sampled_from([n for n, t in SCALARS.items() if t is type_])), type_)


@st.composite
def exprs(
    draw: st.DrawFn,
    type_: Type | None = None,
    depth: int = 4,
    s: bool = True,
    ops: frozenset[Op] | None = None,
) -> Expr:
    """A random expression of a type (or any), at most `depth` operations deep.

    `s=False` leaves the score out; `ops` restricts the operations.
    """
    if type_ is None:
        type_ = draw(st.sampled_from((BOOL, INT, FLOAT)))
    choice = draw(st.integers(0, 11))
    if depth <= 0 or choice == 0:
        return draw(leaves(type_, s))
    if choice == 1:
        return draw(loads(type_, depth, s))
    if choice == 2 and type_ is INT and (ops is None or Op.POW in ops):
        return make(Op.POW, draw(exprs(INT, depth - 1, s, ops)), const(draw(st.integers(0, 4))))
    rows = [row for row in OPERATIONS[type_] if ops is None or row[0] in ops]
    op, types = draw(st.sampled_from(rows))
    return make(op, *(draw(exprs(t, depth - 1, s, ops)) for t in types))


@st.composite
def loads(draw: st.DrawFn, type_: Type, depth: int = 2, s: bool = True) -> Expr:
    """A read of a table at random positions, inside it or not."""
    name = draw(st.sampled_from([n for n, (t, _) in TABLES.items() if t is type_]))
    positions = tuple(draw(exprs(INT, min(depth - 1, 2), s)) for _ in range(TABLES[name][1]))
    return load(name, positions, type_)


def _pick(rng: np.random.Generator, pool: list[Any], shape: Any, dtype: Any) -> Any:
    return np.asarray(pool, dtype)[rng.integers(0, len(pool), shape)]


_NUMBERS = [*range(-4, 5), 7, -9, 16, 63, 64, 100, 1000, -1000, 2**31, -(2**31), 3 * 2**29]
_HUGE = [2**47, -(2**47), 2**40 + 1]
_REALS = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 0.1, 7.25, -20.0, 100.0, 1e-4, 1e5]
_WILD = [np.inf, -np.inf, np.nan, 1e30, -1e30, 1e-40]


def sample(seed: int, wild: bool = True) -> dict[str, Any]:
    """Values for every name in LANES lanes, and tables; `wild` adds nan, inf and large numbers."""
    rng = np.random.default_rng(seed)
    small = np.asarray([int(rng.choice((5, 40, 1000))), *([2**31 - 1] if wild else [])])
    reals, numbers = (_REALS + _WILD, _NUMBERS + _HUGE) if wild else (_REALS[:10], list(range(-9, 9)))
    tops = {name: rng.choice(small, LANES) for name in ("i", "j", "b", "h", "hk")}
    env: dict[str, Any] = {name: rng.integers(0, top + 1) for name, top in tops.items()}
    env["q_len"] = env["kv_len"] = rng.integers(0, 2**31 - 1, LANES)
    env["s"] = np.where(rng.random(LANES) < 0.7, rng.normal(size=LANES) * 3, _pick(rng, reals, LANES, float))
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

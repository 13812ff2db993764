"""Masks for the tests of the tile analysis: random ones over the language, directed ones.

    @given(masks(), launches())
    def test_sound(mask, launch): ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from scoremod.frontend.text import parse_expression
from scoremod.ir.evaluate import evaluate
from scoremod.ir.expr import Expr, capture, const, index, load, make
from scoremod.ir.ops import Op, Type

BOOL, INT, FLOAT = Type.BOOL, Type.INT, Type.FLOAT

SCALARS: dict[str, Type] = {
    "P": INT,  # positive
    "N": INT,  # negative
    "Z": INT,  # any sign
    "S": INT,  # any sign, larger; huge in some launches
    "F": FLOAT,
    "flag": BOOL,
}
TABLES: dict[str, tuple[Type, int]] = {
    "T": (INT, 1),  # rough
    "D": (INT, 1),  # ids, mostly sorted
    "C": (INT, 1),  # few values
    "K": (BOOL, 1),
    "A": (BOOL, 2),  # small: read outside, too
    "G": (INT, 2),
    "X": (FLOAT, 1),  # with nan and inf in some launches
}
TYPES: dict[str, Type] = {**SCALARS, **{name: type_ for name, (type_, _) in TABLES.items()}}


def parse(text: str, **types: Type) -> Expr:
    """A mask from its text; T, D, P, ... are the captures of `launches`."""
    return parse_expression(text, {**TYPES, **types})


# -- random masks ----------------------------------------------------------------------------------

I, J = index("i"), index("j")  # noqa: E741
Draw = st.DrawFn
Make = Callable[[Draw, int], Expr]


def _int(low: int, high: int) -> Make:
    return lambda draw, _: const(draw(st.integers(low, high)))


def _op(op: Op, *parts: Make) -> Make:
    return lambda draw, depth: make(op, *(part(draw, depth) for part in parts))


def _load(name: str, *parts: Make) -> Make:
    return lambda draw, depth: load(name, tuple(p(draw, depth) for p in parts), TYPES[name])


def _scalar(name: str) -> Make:
    return lambda draw, _: capture(name, TYPES[name])


def _leaf(e: Expr) -> Make:
    return lambda draw, _: e


def _one(options: list[Make]) -> Make:
    picks = st.sampled_from(options)
    return lambda draw, depth: draw(picks)(draw, depth)


def _shared(part: Make, use: Callable[[Expr], Make]) -> Make:
    """The same sub-expression in two places."""
    return lambda draw, depth: use(part(draw, depth))(draw, depth)


def _number(draw: Draw, depth: int) -> Expr:
    if depth <= 0:
        return _INT_LEAF(draw, 0)
    return draw(_INT_CHOICE)(draw, depth - 1)


def _float(draw: Draw, depth: int) -> Expr:
    return draw(_FLOAT_CHOICE)(draw, depth - 1)


def _condition(draw: Draw, depth: int) -> Expr:
    if depth <= 0 or draw(st.integers(0, 9)) < 5:
        return draw(_ATOM_CHOICE)(draw, max(depth - 1, 1))
    return draw(_JUNCTION_CHOICE)(draw, depth - 1)


_DIVISOR = _one([
    *[_leaf(const(c)) for c in (1, 2, 3, 4, 5, 7, 8, 12, 16, 25, 32, -1, -3, -8)],
    *[_scalar(name) for name in ("P", "N", "Z", "P", "Z")],
    _op(Op.SUB, _leaf(J), _int(0, 20)), _load("C", _leaf(I)), _load("C", _leaf(J)),
])  # fmt: skip
_INT_LEAF = _one([
    _leaf(I), _leaf(J), _leaf(I), _leaf(J), _leaf(I - J), _leaf(J - I), _int(-9, 40), _scalar("S"),
    *[_load(t, _leaf(x)) for t in "TD" for x in (I, J)], _leaf(index("kv_len")), _leaf(index("h")),
])  # fmt: skip
_B = _op  # (shorter rows below)
_INT_CHOICE = st.sampled_from([
    _INT_LEAF, _INT_LEAF, _INT_LEAF,
    *[_op(op, _number, _number) for op in (Op.ADD, Op.SUB, Op.ADD, Op.SUB, Op.MIN, Op.MAX)],
    _op(Op.MUL, _number, _int(-4, 5)), _op(Op.MUL, _number, _number), _op(Op.MUL, _number, _scalar("S")),
    *[_op(op, _number, _DIVISOR) for op in (Op.FLOORDIV, Op.MOD) * 3],
    *[_op(op, _number, _number) for op in (Op.FLOORDIV, Op.MOD)],
    *[_op(op, _op(op, _number, _DIVISOR), _DIVISOR) for op in (Op.FLOORDIV, Op.MOD)],
    _shared(_DIVISOR, lambda c: _op(Op.MOD, _op(Op.ADD, _op(Op.MOD, _number, _leaf(c)), _number), _leaf(c))),
    _shared(_number, lambda x: _shared(_DIVISOR, lambda c: _op(Op.SUB, _leaf(x), _op(Op.MOD, _leaf(x), _leaf(c))))),
    _shared(_DIVISOR, lambda c: _op(Op.MUL, _op(Op.FLOORDIV, _number, _leaf(c)), _leaf(c))),
    _op(Op.ABS, _number), _op(Op.NEG, _number), _op(Op.INVERT, _number), _op(Op.ILOG2, _number),
    _op(Op.MIN, _op(Op.MAX, _number, _int(-9, 40)), _scalar("S")),
    _op(Op.WHERE, _condition, _number, _number),
    *[_op(op, _number, _number) for op in (Op.BITAND, Op.BITOR, Op.BITXOR)],
    *[_op(op, _number, _int(0, 3)) for op in (Op.SHL, Op.SHR)],
    *[_op(op, _number, _load("C", _number)) for op in (Op.SHL, Op.SHR)],
    *[_op(op, _number, _number) for op in (Op.SHL, Op.SHR)],
    _op(Op.POW, _number, _int(0, 3)), _op(Op.INT, _condition),
    *[_op(op, _float) for op in (Op.FLOOR, Op.CEIL, Op.ROUND, Op.INT)],
    _load("T", _number), _load("G", _number, _number), _load("D", _op(Op.SUB, _number, _int(-5, 5))),
])  # fmt: skip
_FLOAT_LEAF = _one([
    _op(Op.FLOAT, _number), _load("X", _leaf(I)), _load("X", _leaf(J)), _scalar("F"),
    lambda draw, _: const(draw(st.sampled_from((0.0, 0.5, 2.0, -1.5, 7.25, 3e7, -0.1)))),
    _load("X", _number),
])  # fmt: skip
_FLOAT_CHOICE = st.sampled_from([
    *[_FLOAT_LEAF] * 4,
    *[_op(op, _FLOAT_LEAF, _FLOAT_LEAF) for op in (Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.MIN, Op.MAX, Op.MOD)],
    *[_op(op, _FLOAT_LEAF) for op in (Op.ABS, Op.NEG, Op.EXP, Op.TANH, Op.SQRT, Op.LOG1P)],
    _op(Op.WHERE, _condition, _FLOAT_LEAF, _FLOAT_LEAF),
])  # fmt: skip
_COMPARISONS = (Op.LE, Op.LT, Op.LE, Op.LT, Op.EQ, Op.NE)
_ATOM_CHOICE = st.sampled_from([
    *[_op(op, _number, _number) for op in _COMPARISONS],
    *[_op(op, _leaf(x), _number) for op in (Op.LE, Op.LT) for x in (I, J)],
    *[_op(op, _number, _leaf(x)) for op in (Op.LE, Op.LT) for x in (I, J)],
    *[_op(op, _float, _float) for op in (Op.LE, Op.LT, Op.EQ, Op.NE)],
    _shared(_DIVISOR, lambda c: _op(Op.LE, _op(Op.FLOORDIV, _leaf(J), _leaf(c)), _op(Op.FLOORDIV, _leaf(I), _leaf(c)))),
    _shared(_DIVISOR, lambda c: _op(Op.EQ, _op(Op.FLOORDIV, _leaf(J), _leaf(c)), _op(Op.FLOORDIV, _leaf(I), _leaf(c)))),
    _shared(_DIVISOR, lambda c: _op(Op.EQ, _op(Op.MOD, _leaf(J), _leaf(c)), _op(Op.MOD, _leaf(I), _leaf(c)))),
    _op(Op.EQ, _op(Op.MOD, _leaf(I - J), _DIVISOR), _int(-3, 6)),
    _op(Op.EQ, _load("D", _leaf(I)), _load("D", _leaf(J))), _op(Op.LE, _load("T", _leaf(I)), _leaf(J)),
    _load("K", _number), _load("K", _leaf(J)), _load("A", _number, _number),
    _load("A", _load("C", _leaf(I)), _load("C", _leaf(J))),
    _load("A", _op(Op.FLOORDIV, _leaf(I), _DIVISOR), _op(Op.FLOORDIV, _leaf(J), _DIVISOR)),
    _shared(_leaf(I - J), lambda x: _op(Op.EQ, _op(Op.BITAND, _leaf(x), _op(Op.SUB, _leaf(x), _int(1, 1))), _int(0, 0))),
    _op(Op.BOOL, _number), _scalar("flag"),
])  # fmt: skip
_JUNCTION_CHOICE = st.sampled_from([
    *[_op(op, _condition, _condition) for op in (Op.AND, Op.OR) * 3],
    *[_op(op, _condition, _condition) for op in (Op.EQ, Op.NE)],
    _op(Op.NOT, _condition), _op(Op.WHERE, _condition, _condition, _condition),
])  # fmt: skip


@st.composite
def masks(draw: st.DrawFn, depth: int = 3) -> Expr:
    """A random condition on i, j and captures."""
    return _condition(draw, depth)


@st.composite
def numbers(draw: st.DrawFn, depth: int = 3) -> Expr:
    """A random int of i, j and captures."""
    return _number(draw, depth)


# -- launches --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """Lengths, tiles and values to put in."""

    q_len: int
    kv_len: int
    block_m: int = 128
    block_n: int = 128
    q_offset: int = 0
    h: int = 0
    seed: int = 0
    wild: bool = False
    given: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def values(self) -> dict[str, Any]:
        """The captures."""
        return {**sample(self.seed, self.wild), **self.given}

    @property
    def env(self) -> dict[str, Any]:
        """What `evaluate` needs for every pair."""
        return {
            **self.values,
            "i": np.arange(self.q_len)[:, None] + self.q_offset,
            "j": np.arange(self.kv_len)[None],
            "b": 0, "h": self.h, "hk": self.h // 2, "q_len": self.q_len, "kv_len": self.kv_len,
        }  # fmt: skip

    def dense(self, mask: Expr) -> np.ndarray[Any, Any]:
        """The mask at every pair, by definition."""
        value = evaluate(mask, self.env, dtype=np.float32)
        return np.broadcast_to(value, (self.q_len, self.kv_len)).astype(bool)

    def kinds(self, dense: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """0 empty, 1 partial, 2 full by enumeration."""
        rows = [dense[m : m + self.block_m] for m in range(0, self.q_len, self.block_m)]
        tiles = [[r[:, n : n + self.block_n] for n in range(0, self.kv_len, self.block_n)] for r in rows]
        kinds = [[int(t.any()) + int(t.all()) for t in row] for row in tiles]
        return np.asarray(kinds, np.uint8).reshape(len(tiles), -1 if tiles else 0)


def sample(seed: int, wild: bool) -> dict[str, Any]:
    """Values for the captures; `wild`: huge ints, zero divisors, nan and inf."""
    r = np.random.default_rng(seed)
    n = int(r.integers(1, 170))
    huge = [2**31 - 1, 2**31, 3 * 2**29, -(2**31), 2**47, -(2**47), 2**40 + 1, 0]
    reals = r.choice([0.0, -0.0, 0.5, 1.0, -3.25, 20.0, 33.5, 60.0, 1e8], n).astype(np.float32)
    if wild:
        reals[r.random(n) < 0.05] = np.nan
        reals[r.random(n) < 0.05] = np.inf
    return {
        "P": np.int64(r.integers(1, 40)),
        "N": np.int64(-r.integers(1, 20)),
        "Z": np.int64(r.integers(-9, 30)) if wild or r.random() < 0.9 else np.int64(3),
        "S": np.int64(r.choice(huge)) if wild else np.int64(r.integers(-40, 60)),
        "F": np.float32(r.choice([0.5, -2.0, 31.75, 1e9, 0.1])),
        "flag": np.bool_(r.random() < 0.5),
        "T": r.choice(huge, n) if wild and r.random() < 0.3 else r.integers(-30, 120, n),
        "D": np.sort(r.integers(0, 12, n)) if r.random() < 0.7 else r.integers(0, 12, n),
        "C": r.integers(-1 if wild else 0, 6, n),
        "K": r.random(n) < r.choice([0.02, 0.5, 0.98]),
        "A": r.random((6, 6)) < r.choice([0.1, 0.5, 0.9]),
        "G": r.integers(-3, 40, (int(r.integers(1, 30)), int(r.integers(1, 30)))),
        "X": np.sort(reals) if r.random() < 0.5 else reals,
    }


@st.composite
def launches(draw: st.DrawFn) -> Launch:
    """Lengths 1 to 96, tiles 1 to 32, offsets, and captures."""
    blocks = st.sampled_from((1, 2, 3, 4, 8, 16, 32))
    lengths = st.integers(1, 96)
    launch = Launch(
        draw(lengths), draw(lengths), draw(blocks), draw(blocks), draw(st.sampled_from((0, 0, 5, 33))),
        draw(st.integers(0, 3)), draw(st.integers(0, 10**6)), draw(st.booleans()),
    )  # fmt: skip
    while -(-launch.q_len // launch.block_m) * -(-launch.kv_len // launch.block_n) > 400:
        launch = replace(launch, block_m=2 * launch.block_m, block_n=2 * launch.block_n)
    return launch


# What random masks reach too seldom.
DIRECTED: list[tuple[str, dict[str, int]]] = [
    ("min(i, 2) * S - max(S, j) - max(S, i - j) <= 0", {"S": 3 * 2**29}),
    ("(4 * i + 1) % 16 <= 2", {}),
    ("(4 * i + 1) % 16 >= 14", {}),
    ("2 * (i - j) + 1 == 0", {}),
    ("6 * i - 3 * j != 4", {}),
    ("9 * i // 4 % 2 == 1", {}),
    ("9 * i // 4 % 2 * 3 >= j", {}),
    ("ilog2(i * S) >= 32", {"S": 2**31}),
    ("i // 2 // -3 <= j - 20", {}),
    ("i // -2 // 3 >= j - 40", {}),
    ("((j - 3) & (j - 4)) == 0", {}),
    ("((i - 9) << C[j]) <= 30", {}),
    ("i % S == j % S", {"S": -7}),
    ("i % S == j % S", {"S": 0}),
    ("i % S == 3", {"S": -7}),
    ("i % S == 3", {"S": 2}),
    ("i % S == 0", {"S": 0}),
    ("j // S == i // S", {"S": -5}),
    ("j // S == i // S", {"S": 0}),
    ("j // S == i // S", {"S": 2**47}),
    ("0 <= i // S - j // S and i // S - j // S < Z", {"S": 2**47}),
    ("0 <= i // S - j // S and i // S - j // S < Z", {"S": 7}),
    ("(i - Z) // S == (j - Z) // S and j <= i", {"S": 11}),
    ("j * S <= i", {"S": 0}),
    ("j * S <= i", {"S": 2**47}),
    ("j * S * S <= i", {"S": 2**40 + 1}),
    ("j * S * S == i * S * S", {"S": 2**32}),
    ("9 * i // 4 == 9", {}),
    ("(j - 5) // S >= i - 30", {"S": -4}),
    ("(i + 7) // 16 * 16 <= j", {}),
    ("i - i % 16 <= j", {}),
    ("K[i - j] or K[j]", {}),
    ("(i << 62) <= j", {}),
    ("(j << 61 >> 61) <= i", {}),
    ("j - S * S <= i", {"S": 2**47}),
    ("abs(i - j - S * S * S) <= 5", {"S": -(2**21)}),
    ("T[S] <= j", {"S": -1}),
    ("A[i // 8, j // 8]", {}),
    ("A[i - 3, j - 3] or i == j", {}),
    ("X[i] - X[j] <= 1.5", {}),
    ("not (X[i] <= X[j])", {}),
    ("i / 3 <= j * 0.5", {}),
    ("i - j < 3.5 and i - j >= 0.0", {}),
    ("floor(X[i]) <= j", {}),
]

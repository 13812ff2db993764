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
from scoremod.ir.expr import Expr, const, substitute
from scoremod.ir.ops import Type

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

# What may stand for the letters of the templates below; one letter is one expression throughout.
LETTERS: dict[str, Type] = {
    **dict.fromkeys("nmdk", INT),  # n, m numbers, d a divisor, k a literal
    **dict.fromkeys("pq", BOOL),
    **dict.fromkeys("xy", FLOAT),
}


def templates(text: str) -> list[Expr]:
    """One expression for each part between semicolons; `3: n + m` counts three times."""
    found = []
    for part in filter(None, map(str.strip, text.replace("\n", " ").split(";"))):
        times, _, words = part.rpartition(": ")
        found += [parse(words, **LETTERS)] * int(times or 1)
    return found


DIVISORS = templates("""
    1; 2; 3; 4; 5; 7; 8; 12; 16; 25; 32; -1; -3; -8; 2: P; N; 2: Z; j - 7; j - 20; C[i]; C[j]
""")
SIMPLE_NUMBERS = templates("""
    2: i; 2: j; i - j; j - i; 2: k; S; T[i]; T[j]; D[i]; D[j]; kv_len; h
""")
NUMBERS = templates("""
    4: i; 4: j; i - j; k; T[i]; D[j];
    2: n + m; 2: n - m; min(n, m); max(n, m); n * k; n * m; n * S;
    3: n // d; 3: n % d; n // m; n % m; n // d // -3; n // -2 // d; n % d % 12; n // 4 // d;
    (n % d + m) % d; n - n % d; n // d * d; (i % 24 + k) % 24; k * n + 5 - k * m; (6 * n + k) % 4;
    abs(n); -n; ~n; ilog2(n); ilog2(i * S + n); min(max(n, k), S); min(i * S - n, j * S + n);
    where(p, n, m); n & m; n | m; n ^ m; n << 2; n >> 1; n >> 3; n << C[m]; n >> C[m];
    n << m; n >> m; n ** 2; n ** 3; int(p); floor(x); ceil(x); round(x); int(x);
    T[n]; G[n, m]; D[n - 2]; size(T, 0)
""")
SIMPLE_FLOATS = templates("""
    float(n); X[i]; X[j]; X[n]; F; 0.0; 0.5; 2.0; -1.5; 7.25; 3e7; -0.1
""")
FLOATS = templates("""
    4: x; x + y; x - y; x * y; x / y; min(x, y); max(x, y); x % y; x // y; abs(x); -x;
    exp(x); tanh(x); sqrt(x); log1p(x); where(p, x, y)
""")
ATOMS = templates("""
    2: n <= m; 2: n < m; n == m; n != m; j <= n; j < n; n <= j; i <= n; n < i;
    x <= y; x < y; x == y; x != y;
    j // d <= i // d; j // d == i // d; j // d < i // 7; j % d == i % d; (i - j) % d == k;
    D[i] == D[j]; T[i] <= j; X[i] - X[j] <= x; K[n]; K[j]; A[n, m]; A[C[i], C[j]];
    A[i // d, j // 8]; ((i - j) & (i - j - 1)) == 0; bool(n); flag
""")
JUNCTIONS = templates("""
    3: p and q; 3: p or q; p == q; p != q; not p; where(p, q, K[j])
""")

Draw = st.DrawFn


def _filled(draw: Draw, choices: st.SearchStrategy[Expr], depth: int) -> Expr:
    template = draw(choices)
    letters = sorted(template.names & LETTERS.keys())
    return substitute(template, {a: _FILL[a](draw, depth) for a in letters})


def _number(draw: Draw, depth: int) -> Expr:
    return _filled(draw, _NUMBERS if depth > 0 else _SIMPLE_NUMBERS, depth - 1)


def _float(draw: Draw, depth: int) -> Expr:
    return _filled(draw, _FLOATS if depth > 0 else _SIMPLE_FLOATS, depth - 1)


def _condition(draw: Draw, depth: int) -> Expr:
    if depth <= 0 or draw(st.integers(0, 9)) < 5:
        return _filled(draw, _ATOMS, max(depth - 1, 0))
    return _filled(draw, _JUNCTIONS, depth - 1)


def _divisor(draw: Draw, depth: int) -> Expr:
    return draw(_DIVISORS)


def _literal(draw: Draw, depth: int) -> Expr:
    return const(draw(_LITERALS))


_FILL: dict[str, Callable[[Draw, int], Expr]] = {
    **dict.fromkeys("nm", _number),
    **dict.fromkeys("pq", _condition),
    **dict.fromkeys("xy", _float),
    "d": _divisor,
    "k": _literal,
}
_LITERALS = st.integers(-9, 40)
_DIVISORS, _SIMPLE_NUMBERS, _NUMBERS, _SIMPLE_FLOATS, _FLOATS, _ATOMS, _JUNCTIONS = map(
    st.sampled_from,
    (DIVISORS, SIMPLE_NUMBERS, NUMBERS, SIMPLE_FLOATS, FLOATS, ATOMS, JUNCTIONS),
)


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
        starts = np.arange(0, self.q_len, self.block_m), np.arange(0, self.kv_len, self.block_n)
        some, every = dense, dense
        for axis in (0, 1):
            some = np.logical_or.reduceat(some, starts[axis], axis)
            every = np.logical_and.reduceat(every, starts[axis], axis)
        return some.astype(np.uint8) + every


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


_BLOCKS, _LENGTHS = st.sampled_from((1, 2, 3, 4, 8, 16, 32)), st.integers(1, 96)
_LAUNCH = (
    *(_LENGTHS, _LENGTHS, _BLOCKS, _BLOCKS),
    *(st.sampled_from((0, 0, 5, 33)), st.integers(0, 3)),  # q_offset, h
    *(st.integers(0, 10**6), st.booleans()),  # seed, wild
)


@st.composite
def launches(draw: st.DrawFn) -> Launch:
    """Lengths 1 to 96, tiles 1 to 32, offsets, and captures."""
    launch = Launch(*(draw(part) for part in _LAUNCH))
    # Few tiles: what they test is the same.
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
    ("j <= i and Z <= 0 and Z >= 0", {"Z": 0}),
    ("((i - 50) & (j - 40)) >= -40", {}),
    ("((i - 50) ^ (j - 40)) <= 22 or (i ^ j) <= 20", {}),
    ("j * S <= i", {"S": 2**47}),
    ("j * S * S <= i", {"S": 2**40 + 1}),
    ("j * S * S == i * S * S", {"S": 2**32}),
    ("9 * i // 4 == 9", {}),
    ("(j - 5) // S >= i - 30", {"S": -4}),
    ("(i + 7) // 16 * 16 <= j", {}),
    ("i - i % 16 <= j", {}),
    ("K[i - j] or K[j]", {}),
    ("T[i - j] <= j", {}),
    ("T[abs(i - j)] + j > i", {}),
    ("X[i - j] <= X[j]", {}),
    ("G[i // 8, i - j] <= T[j]", {}),
    ("abs(6 * i - 3 * j) <= 4", {}),
    ("(i << 62) <= j", {}),
    ("(j << 61 >> 61) <= i", {}),
    ("i >> 64 == 0 and (j >> 70) + (j << 64) <= i - 9", {}),
    ("(i >> -1) + (j << -3) <= j - i", {}),
    ("(30 - i >> 63) <= 29 - j", {}),
    ("where(i < 20, j, j - 30) <= i", {}),
    ("where(j < 20, j + 40, j) >= i and where(K[i], j, 3) <= 9", {}),
    ("j - S * S <= i", {"S": 2**47}),
    ("i * j * S * S + 1 <= j", {"S": 2**31 - 1}),
    ("i * j * S * S - i * j >= j", {"S": 2**31 - 1}),
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

"""simplify: text cases, and the laws that nothing changes and that it is done at once."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import BOOL, FLOAT, INT, exprs, values
from text_cases import cases, parse

from scoremod.analysis.interval import ints, point
from scoremod.ir.evaluate import evaluate
from scoremod.ir.expr import Expr, const, index, make
from scoremod.ir.ops import Op
from scoremod.ir.show import show
from scoremod.passes.simplify import simplify

Env = dict[str, Any]


@cases("simplify.txt")
def test_simplified_form(given: str, expected: str) -> None:
    assert show(simplify(parse(given))) == expected


@settings(max_examples=400)
@given(st.one_of(exprs(BOOL), exprs(INT)), values())
def test_ints_and_bools_never_change(expr: Expr, env: Env) -> None:
    simple = simplify(expr)
    before, after = np.broadcast_arrays(evaluate(expr, env), evaluate(simple, env))
    assert np.array_equal(before, after), f"{show(expr)}  ->  {show(simple)}"


SUMS = frozenset((Op.ADD, Op.SUB, Op.MUL, Op.NEG, Op.LT, Op.LE, Op.EQ, Op.NE))
LOGIC = frozenset((Op.AND, Op.OR, Op.NOT))
ROUNDED = frozenset((Op.FLOORDIV, Op.MOD, Op.ABS, Op.MIN, Op.MAX, Op.SHL))


@settings(max_examples=300)
@given(
    st.one_of(
        exprs(BOOL, ops=SUMS), exprs(BOOL, ops=SUMS | LOGIC), exprs(BOOL, ops=SUMS | ROUNDED)
    ),
    st.one_of(values(), values(wild=False)),
)
def test_comparisons_of_sums_never_change(expr: Expr, env: Env) -> None:
    simple = simplify(expr)
    before, after = np.broadcast_arrays(evaluate(expr, env), evaluate(simple, env))
    assert np.array_equal(before, after), f"{show(expr)}  ->  {show(simple)}"


@settings(max_examples=400)
@given(exprs(FLOAT), values(wild=False))
def test_floats_stay_close_and_not_finite_stays_so(expr: Expr, env: Env) -> None:
    simple = simplify(expr)
    wide, double = evaluate(expr, env, np.longdouble), evaluate(expr, env)
    wide, double, after = np.broadcast_arrays(wide, double, evaluate(simple, env, np.longdouble))
    text = f"{show(expr)}  ->  {show(simple)}"
    with np.errstate(all="ignore"):
        # Where float64 itself is far off (sin(exp(50))), so may a reassociated sum be.
        sound = np.abs(wide - double) <= 1e-9 * np.abs(wide) + 1e-12
        close = np.abs(wide - after) <= 1e-6 * np.abs(wide) + 1e-9
    assert np.all(close[np.isfinite(wide) & sound]), text
    assert not np.any(np.isfinite(after[~np.isfinite(wide) & ~np.isfinite(double)])), text


@settings(max_examples=200)
@given(exprs())
def test_simplifying_again_changes_nothing(expr: Expr) -> None:
    simple = simplify(expr)
    assert simplify(simple) == simple, show(expr)


def test_a_tighter_environment_decides_more() -> None:
    assert simplify(parse("j <= i"), {"i": ints(128, 255), "j": ints(0, 127)}) == const(True)
    assert show(simplify(parse("i - j < window"), {"window": point(np.int64(4))})) == "i - j < 4"


def test_deciding_floats_keep_their_precision() -> None:
    """Without s the comparison would move to float32: it stays."""
    text = "where(0 <= j, x, s) < y"
    assert show(simplify(parse(text))) == text


@pytest.mark.parametrize("op", [Op.ADD, Op.MIN])
def test_long_sums_need_no_recursion(op: Op) -> None:
    total = index("s")
    for k in range(2000):
        total = make(op, total, const(0.5 + k))
    assert simplify(total).type is FLOAT


def test_long_masks_need_no_recursion() -> None:
    mask = const(True)
    for k in range(1200):
        mask = make(Op.AND, mask, make(Op.NE, index("j"), const(k)))
    assert simplify(mask).type is BOOL


def test_a_typical_variant_takes_milliseconds() -> None:
    text = """where(j <= i and i - j < window and doc[b, i] == doc[b, j] or j < 4,
                    cap * tanh((s - slopes[h] * (i - j)) / cap), s * 0.5 - x * abs(i - j))"""
    simplify(parse("s * x + s * y + s"))  # imports SymPy
    start = time.perf_counter()
    simplify(parse(text))
    assert time.perf_counter() - start < 0.5  # 15 ms alone on a quiet machine

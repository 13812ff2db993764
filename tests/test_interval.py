"""Intervals: text cases, and the law that every value lies inside."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from strategies import SCALARS, TABLES, exprs, values
from text_cases import cases, parse

from scoremod.analysis.interval import (
    Bounds,
    Interval,
    Name,
    bools,
    default_env,
    floats,
    interval,
    ints,
)
from scoremod.ir.evaluate import evaluate
from scoremod.ir.expr import Expr, index
from scoremod.ir.show import show

Env = dict[str, Any]


@cases("interval.txt")
def test_bounds(given: str, expected: str) -> None:
    where, text = given.rsplit(":", 1) if " in " in given else ("", given)
    env: dict[Name, Interval] = {}
    for name, lo, hi in re.findall(r"(\w+) in (\S+?)\.\.([^\s,]+)", where):
        number: Callable[[str], Any] = float if re.search(r"\.|inf", lo) else int
        make = floats if number is float else ints
        env[name] = make(number(lo), number(hi))
    assert words(interval(parse(text), env)) == expected


def words(x: Interval) -> str:
    if x.lo.dtype != bool:
        return f"{x.lo}..{x.hi}"
    return "true" if x.always else "false" if x.never else "unknown"


def hulls(env: Env, step: int) -> dict[Name, Interval]:
    """In every lane the interval of two lanes' values (of one, for step 0)."""
    found: dict[Name, Interval] = {}
    for name in {*SCALARS, "i", "j", "b", "h", "hk", "q_len", "kv_len", "s"}:
        v = np.asarray(env[name])
        w = np.roll(v, step)
        if v.dtype.kind == "f":
            lo, hi, nan = np.fmin(v, w), np.fmax(v, w), np.isnan(v) | np.isnan(w)
            none = np.isnan(lo)
            found[name] = floats(np.where(none, -np.inf, lo), np.where(none, np.inf, hi), nan)
        elif v.dtype.kind == "b":
            found[name] = bools(v & w, v | w)
        else:
            found[name] = ints(np.minimum(v, w), np.maximum(v, w))
    for name, (_, rank) in TABLES.items():
        for axis, n in enumerate(env[name].shape[:rank]):
            found[name, axis] = ints(n, n)
    return found


def tables(env: Env) -> Callable[[Expr, tuple[Interval, ...]], Interval]:
    """Every table by its extremes and the 0 that an index outside reads."""

    def load(node: Expr, indices: tuple[Interval, ...]) -> Interval:
        table = np.append(env[node.attr].ravel(), np.zeros((), env[node.attr].dtype))
        if table.dtype.kind == "b":
            return bools(False, table.any())
        if table.dtype.kind == "i":
            return ints(table.min(), table.max())
        return floats(np.nanmin(table), np.nanmax(table), np.isnan(table).any())

    return load


@settings(max_examples=500)
@given(exprs(), values())
def test_every_value_lies_inside(expr: Expr, env: Env) -> None:
    check(expr, env)


def check(expr: Expr, env: Env) -> None:
    value = evaluate(expr, env)
    for step in (0, 1, 3):
        x = interval(expr, hulls(env, step), tables(env))
        assert np.all(x.holds(value)), f"{show(expr)}, lanes {step} apart: {value} in {x}"
    x = interval(expr)
    assert np.all(x.holds(value)), f"{show(expr)}: {value} in {x}"


# What random expressions find too seldom.
DIRECTED = (
    "(n << 62) // -1",
    "(n << 63) // m",
    "-(n << 63) + abs(n << 63)",
    "x - y < 0.0",
    "1.0 / x - 1.0 / y",
    "0.0 * (1.0 / x)",
    "exp(x) / exp(y) - exp(x)",
    "(n * 1152921504606846976) % m",
    "min(i, 2) * n - max(n, j) - max(n, i - j) <= 0",
    "floor(x / y) + int(x * y)",
    "x // y + x % y",
    "(0.0 - x) ** y",
    "x ** 3 + x ** 4 + x ** -1",
    "floor(x * 0.1 + 0.2)",
    "n % m + n // m",
    "(n % -7) * (n // -7)",
    "ilog2(n) + (n & (n - 1)) + (n | m) + (n ^ m) + ~n",
    "(n << m) + (n >> m)",
    "rsqrt(x) + sqrt(x) + log(x) + log1p(x)",
)


@pytest.mark.parametrize("text", DIRECTED)
@settings(max_examples=40)
@given(env=values())
def test_directed(text: str, env: Env) -> None:
    check(parse(text), env)


def test_a_grid_of_tiles_is_one_evaluation() -> None:
    starts = np.arange(4) * 16
    i, j = (ints(v, v + 15) for v in (starts[:, None], starts[None, :]))
    causal = interval(parse("j <= i"), {"i": i, "j": j})
    assert causal.lo.shape == causal.hi.shape == (4, 4)
    assert np.array_equal(causal.hi, np.tril(np.ones((4, 4), bool)))
    assert np.array_equal(causal.lo, np.tril(np.ones((4, 4), bool), -1))


def test_deciding_floats_are_bounded_in_float32() -> None:
    """0.1 + 0.2 <= 0.3 holds in float32, not in float64."""
    x, y = floats(0.1, 0.1), floats(0.2, 0.2)
    third = parse("x + y <= 0.3")
    assert evaluate(third, {"x": 0.1, "y": 0.2}) == interval(third, {"x": x, "y": y}).always
    double = Bounds({"x": x, "y": y}, strict=np.float64)(third)
    assert double.always != interval(third, {"x": x, "y": y}).always


def test_a_table_read_is_asked_for() -> None:
    asked = []

    def load(node: Expr, indices: tuple[Interval, ...]) -> Interval:
        asked.append((node.attr, int(indices[0].lo), int(indices[0].hi)))
        return ints(0, 5)

    assert interval(parse("doc[i + 1] < 6"), {"i": ints(0, 3)}, load).always
    assert asked == [("doc", 1, 4)]


def test_default_environment_names_every_leaf() -> None:
    env = default_env(parse("i - j < n and x < s and doc[b] > 0"))
    assert set(env) == {"i", "j", "n", "x", "s", "b"}
    assert int(env["n"].hi) == 2**47 and int(env["i"].hi) == 2**31 - 1
    assert interval(index("i")).lo == 0

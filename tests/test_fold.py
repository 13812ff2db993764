"""Folding: affine parts, base 2, and terms by what they vary with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from strategies import FLOAT, exprs, values
from text_cases import parse

from scoremod.ir.evaluate import evaluate
from scoremod.ir.expr import Expr, index
from scoremod.ir.show import show
from scoremod.passes.fold import affine_in_s, base2, split_terms

Env = dict[str, Any]


@pytest.mark.parametrize(
    ("score", "slope", "offset"),
    [
        ("s", "1.0", "0.0"),
        ("s / 8.0 - slopes[h] * (i - j)", "0.125", "-(slopes[h] * (i - j))"),
        ("x * (s + bias[j]) / y", "x / y", "x * bias[j] / y"),
        ("where(j < n, s + bias[j], s)", "1.0", "where(j < n, bias[j], 0.0)"),
        ("bias[i]", "0.0", "bias[i]"),
        ("rel[h, i - j] * s + bias[j]", "rel[h, i - j]", "bias[j]"),
    ],
)
def test_affine(score: str, slope: str, offset: str) -> None:
    affine = affine_in_s(parse(score))
    assert affine is not None
    assert (show(affine.slope), show(affine.offset)) == (slope, offset)


@pytest.mark.parametrize(
    "score", ["tanh(s)", "s * s", "x / s", "where(s < 0, s, x)", "where(flag, s, x)", "s + abs(s)"]
)
def test_not_affine(score: str) -> None:
    assert affine_in_s(parse(score)) is None


@pytest.mark.parametrize(
    ("score", "folded"),
    [
        ("s", "K * s"),
        ("cap * tanh(s / cap)", "K * cap * tanh(1.0 / cap * s)"),
        ("50.0 * tanh(s / 50.0)", "72.13475204444816 * tanh(0.02 * s)"),
        ("s - slopes[h] * (i - j)", "K * s - K * slopes[h] * (i - j)"),
        ("where(flag, s, -s)", "where(flag, K * s, -(K * s))"),
        ("log(exp(s) + x)", "log2(exp(s) + x)"),
        ("s * (x + y)", "s * (K * (x + y))"),
        ("(s + bias[j]) / 2.0", "0.7213475204444817 * s + 0.7213475204444817 * bias[j]"),
        ("rsqrt((bias[j] + 0.0) / 0.0)", "K * rsqrt((bias[j] + 0.0) / 0.0)"),
    ],
)
def test_base2(score: str, folded: str) -> None:
    assert show(base2(parse(score))) == folded.replace("K", "1.4426950408889634")


@pytest.mark.parametrize(
    ("offset", "row", "column", "mixed"),
    [
        ("bias[j] + x * i + rel[i, j]", "x * i", "bias[j]", "rel[i, j]"),
        ("-slopes[h] * (i - j)", "0.0", "0.0", "-slopes[h] * (i - j)"),
        ("x - bias[j]", "x", "-bias[j]", "0.0"),
        ("x * (bias[i] - bias[j])", "x * bias[i]", "-(x * bias[j])", "0.0"),
        ("(bias[i] - bias[j]) / y", "1.0 / y * bias[i]", "-(1.0 / y * bias[j])", "0.0"),
        ("slopes[h] + y", "slopes[h] + y", "0.0", "0.0"),
    ],
)
def test_terms(offset: str, row: str, column: str, mixed: str) -> None:
    terms = split_terms(parse(offset))
    assert tuple(map(show, (terms.row, terms.column, terms.mixed))) == (row, column, mixed)


def close(found: Any, expected: Any, known: Any = True) -> bool:
    """Whether two values agree where the expected one is finite and not made of large parts."""
    found, expected, known = np.broadcast_arrays(found, expected, known)
    with np.errstate(all="ignore"):
        near = np.abs(found - expected) <= 1e-8 * np.abs(expected) + 1e-8
    return bool(np.all(near[np.isfinite(expected) & (np.abs(expected) < 1e9) & known]))


@settings(max_examples=150)
@given(exprs(FLOAT), values(wild=False))
def test_folding_keeps_the_value(score: Expr, env: Env) -> None:
    value = evaluate(score, env, np.longdouble)
    with np.errstate(all="ignore"):
        # Ill conditioned scores (sin(exp(50))) tell nothing.
        known = np.abs(value - evaluate(score, env)) <= 1e-10 * np.abs(value) + 1e-12
    scaled = evaluate(base2(score), env, np.longdouble)
    assert close(scaled, value * np.log2(np.longdouble(np.e)), known), show(score)
    affine = affine_in_s(score)
    if affine is not None:
        assert not affine.slope.reads_s and not affine.offset.reads_s
        total = evaluate(affine.slope * index("s") + affine.offset, env, np.longdouble)
        assert close(total, value, known), show(score)


@settings(max_examples=100)
@given(exprs(FLOAT, s=False), values(wild=False))
def test_terms_add_up(offset: Expr, env: Env) -> None:
    terms = split_terms(offset)
    assert "j" not in terms.row.names and "i" not in terms.column.names
    value = evaluate(offset, env, np.longdouble)
    with np.errstate(all="ignore"):
        known = np.abs(value - evaluate(offset, env)) <= 1e-10 * np.abs(value) + 1e-12
    total = evaluate(terms.row + terms.column + terms.mixed, env, np.longdouble)
    assert close(total, value, known), show(offset)

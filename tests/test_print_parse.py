"""Printing and reading are inverse: parse(str(v)) == v, and parse_expression(show(e)) == e."""

# ruff: noqa: B008 - const(...) as a default is the language

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import SCALARS, TABLES, TYPES, exprs
from text_cases import cases
from text_cases import parse as read

from scoremod import Variant, const, inf, mask, parse, variant, variants, where
from scoremod.frontend.text import parse_expression
from scoremod.ir.capture import MISSING, Capture, Kind
from scoremod.ir.expr import Expr, postorder
from scoremod.ir.ops import INT_MIN, Op, Type
from scoremod.ir.show import show
from scoremod.variant import Program

STOCK = {name: v for name, v in vars(variants).items() if isinstance(v, Variant)}


@cases("parse.txt")
def test_a_case_is_printed_and_read_back(given: str, expected: str) -> None:
    assert show(read(given)) == expected
    assert read(expected) == read(given)


@pytest.mark.parametrize("found", STOCK.values(), ids=STOCK)
def test_stock_variants(found: Variant) -> None:
    assert parse(str(found)) == found
    assert str(parse(str(found))) == str(found)


COMPOSED = {
    "and": variants.alibi & variants.causal,
    "or": variants.causal | variants.prefix_lm,
    "not": ~(variants.document & ~variants.causal),
    "then": variants.alibi.then(variants.softcap) & variants.key_padding,
    "rename": variants.sliding_window | variants.sink_window.rename(window="far"),
    "bind": variants.sliding_window.bind(window=3) & variants.softcap.bind(cap=2),
    "t5": variants.t5_bias & variants.causal,
}


@pytest.mark.parametrize("found", COMPOSED.values(), ids=COMPOSED)
def test_compositions(found: Variant) -> None:
    assert parse(str(found)) == found


def test_free_variables_are_printed_as_plain_captures() -> None:
    import torch

    width, table, weight = 3, torch.ones(2, 3, 4), torch.tensor(0.5)

    @variant
    def f(s, b, h, i, j):
        return where(i - j < width, s * weight + table[b, i % 3, j], -inf)

    assert "f(width, weight, table: tensor[B, _, Lk])" in str(f)
    assert parse(str(f)) == f


def test_consts_are_printed_as_their_values() -> None:
    @variant
    def f(s, n=const(3), x=const(0.5)):
        for k in range(n):
            s = s * x + k
        return s

    assert "const" not in str(f)
    assert parse(str(f)) == f
    assert parse(str(f.bind(n=1))) == f.bind(n=1)


def test_names_that_are_words_of_the_mini_language() -> None:
    @mask
    def range_(b, j, mask: bool[B, Lk], let, score: int = 3, const: int = 1, variant=True):
        return mask[b, j] and let < score < const and variant

    assert parse(str(range_)) == range_


def test_numbers_of_every_kind() -> None:
    @variant
    def f(s, a: float = inf, c: float = -inf, d: float = 1e-300, e_=-0.0, g=-(2**40), n=True):
        return s * a + c + d + e_ + g + n + 0.1 + 1e308 * 10 - 2**62

    assert parse(str(f)) == f


def test_undeclared_and_unused_captures() -> None:
    def body(s, h, i, t, u: bf16[...], unused: f32[H], nothing: tensor[...], number):
        return s + t[h, i * 2] + u[i]

    found = variant(body)
    captures = "t: tensor[H, _], u: bf16[Lq], unused: f32[H], nothing: tensor[...], number"
    assert f"body({captures})" in str(found)
    assert parse(str(found)) == found


def test_lambdas_and_partials_have_names_that_read_back() -> None:
    for found in (
        variant(lambda s: s * 2),
        mask(functools.partial(lambda i, j, w: i - j < w, w=3)),
    ):
        assert parse(str(found)).name == found.name == "lambda"
        assert parse(str(found)) == found


# -- laws --------------------------------------------------------------------------------------


def writable(e: Expr) -> bool:
    """Whether a text can say it: -2**63 is a literal of no text, as its digits do not fit."""
    return not any(n.is_const and n.attr == INT_MIN for n in postorder(e))


@given(exprs().filter(writable))
def test_expressions(e: Expr) -> None:
    assert parse_expression(show(e), TYPES) == e


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A random program, with the captures that it reads and some that it does not."""
    score = draw(exprs(Type.FLOAT, depth=4).filter(writable))
    keep = draw(exprs(Type.BOOL, depth=3, s=False).filter(writable))
    used = score.names | keep.names | draw(st.sets(st.sampled_from(sorted(TYPES)), max_size=2))
    captures = tuple(draw(declarations(name)) for name in sorted(used & TYPES.keys()))
    return Program("random", score, keep, captures)


@st.composite
def declarations(draw: st.DrawFn, name: str) -> Capture:
    """A declaration that fits how the expressions read a name."""
    element: Any = TYPES[name].value
    if name in SCALARS:
        defaults = {"bool": st.booleans(), "int": st.integers(-(2**47), 2**47)}
        floats = st.floats(allow_nan=False)
        default = draw(st.just(MISSING) | defaults.get(element, floats))
        return Capture(name, Kind.SCALAR, element, default=default)
    words = {"bool": ("bool",), "int": ("int", "i8", "i64"), "float": ("float", "bf16", "f32")}
    dim = st.sampled_from((None, "B", "Lk", "Name", 7))
    dims = tuple(draw(dim) for _ in range(TABLES[name][1]))
    return Capture(name, Kind.TENSOR, draw(st.sampled_from(words[element])), dims, rank=len(dims))


@given(programs())
def test_programs(program: Program) -> None:
    found = parse(program.text)._program
    # A score of the text may hold a mask at its root, which reading takes out.
    root = program.score
    if root.op is not Op.WHERE and not root.is_const:
        assert replace(found, name="random") == program
    assert found.captures == program.captures
    assert parse(found.text)._program == found

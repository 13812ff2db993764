"""The IR: one immutable typed node, its meaning and its text."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import TYPES, exprs, values
from text_cases import parse

from scoremod.errors import TypeMismatch
from scoremod.frontend.text import parse_expression
from scoremod.ir.evaluate import evaluate, size_of
from scoremod.ir.expr import (
    Expr,
    capture,
    const,
    convert,
    decides,
    index,
    load,
    make,
    postorder,
    rebuild,
    resolve,
    rewrite,
    substitute,
)
from scoremod.ir.ops import INT_MAX, INT_MIN, Op, Type
from scoremod.ir.show import show

Env = dict[str, Any]
I, J, S = index("i"), index("j"), index("s")  # noqa: E741


def value(text: str, **env: Any) -> Any:
    return evaluate(parse(text), {k: np.asarray(v) for k, v in env.items()}).tolist()


# -- nodes -------------------------------------------------------------------------------------


def test_nodes_are_immutable_and_equal_by_what_they_say() -> None:
    assert make(Op.SUB, I, J) == make(Op.SUB, I, J) and hash(I - J) == hash(I - J)
    assert make(Op.SUB, I, J) != make(Op.SUB, J, I)
    with pytest.raises(AttributeError):
        I.op = Op.CONST  # type: ignore[misc]


def test_literals_of_equal_value_and_other_type_differ() -> None:
    literals = [const(v) for v in (1, 1.0, True, 0.0, -0.0, 0, False)]
    assert len(set(literals)) == len(literals)


def test_a_literal_fits_in_64_bits() -> None:
    assert const(INT_MIN).attr == INT_MIN
    with pytest.raises(TypeMismatch, match="64 bits"):
        const(INT_MAX + 1)


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        ("i + j", Type.INT),
        ("i / j", Type.FLOAT),
        ("i + s", Type.FLOAT),
        ("flag + flag", Type.INT),
        ("flag & flag", Type.BOOL),
        ("flag ^ (j <= i)", Type.BOOL),
        ("i & flag", Type.INT),
        ("i ** 2", Type.INT),
        ("i ** -1", Type.FLOAT),
        ("i ** j", Type.FLOAT),
        ("floor(i)", Type.INT),
        ("exp(i)", Type.FLOAT),
        ("i if flag else 1.0", Type.FLOAT),
        ("i < s", Type.BOOL),
    ],
)
def test_types_promote_as_in_python(text: str, type_: Type) -> None:
    assert parse(text).type is type_


def test_conversions_are_nodes() -> None:
    total = make(Op.ADD, S, I)
    assert [a.op for a in total.args] == [Op.INDEX, Op.FLOAT]
    assert convert(const(2), Type.FLOAT) == const(2.0)


@pytest.mark.parametrize("text", ["s & 1", "s << 1", "not i", "i and flag", "i if j else s"])
def test_wrong_types_are_errors(text: str) -> None:
    with pytest.raises(TypeMismatch):
        parse(text)


def test_an_index_is_an_int_and_a_negative_literal_reads_0() -> None:
    with pytest.raises(TypeMismatch, match="index of `bias`"):
        load("bias", (S,), Type.FLOAT)
    assert load("bias", (const(-1),), Type.FLOAT) == const(0.0)


def test_open_types_are_converted_once_they_are_known() -> None:
    open_sum = make(Op.ADD, capture("n", Type.ANY), I)
    assert open_sum.type is Type.ANY
    assert resolve(open_sum, {"n": Type.FLOAT}) == make(Op.ADD, capture("n", Type.FLOAT), I)


def test_what_decides() -> None:
    x = capture("x", Type.FLOAT)
    assert decides(x < const(1.0)) and not decides(x < S) and not decides(x + S)
    assert not decides(I < J) and decides(make(Op.FLOOR, x))


def test_names() -> None:
    assert parse("doc[b, i] + n < size(doc, 1)").names == {"doc", "b", "i", "n"}
    assert parse("s + i").reads_s and not parse("x + i").reads_s


def test_walks() -> None:
    d = I - J
    total = make(Op.ADD, d, make(Op.ABS, d))
    assert [n.op for n in postorder(total)] == [Op.INDEX, Op.INDEX, Op.SUB, Op.ABS, Op.ADD]
    assert size_of(total) == 5
    assert show(substitute(total, {"j": const(3)})) == "i - 3 + abs(i - 3)"
    assert rewrite(total, lambda n: n) is total
    assert rebuild(d, (J, I)) == J - I


def test_deep_expressions_need_no_recursion() -> None:
    total = S
    for k in range(4000):
        total = make(Op.ADD, total, const(1.0)) if k % 2 else make(Op.MUL, total, const(1.0))
    assert total.reads_s and len(show(total)) > 4000
    assert evaluate(total, {"s": np.zeros(2)}).tolist() == [2000.0] * 2
    assert substitute(total, {"i": J}) == total


def test_a_shared_node_is_evaluated_once() -> None:
    total = I
    for _ in range(200):
        total = make(Op.ADD, total, total)
    assert size_of(total) == 201
    assert evaluate(total, {"i": np.int64(3)}) == 0  # 3 * 2**200 modulo 2**64


# -- meaning -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "y"), list(itertools.product((-9, -8, -1, 0, 1, 7, 8), (-4, -1, 1, 3)))
)
def test_floor_and_modulo_for_all_signs(x: int, y: int) -> None:
    assert value("n // m", n=x, m=y) == x // y
    assert value("n % m", n=x, m=y) == x % y
    assert value("x // y", x=float(x), y=float(y)) == x // y
    assert value("x % y", x=float(x), y=float(y)) == x % y


@settings(max_examples=100)
@given(st.integers(INT_MIN, INT_MAX), st.integers(INT_MIN, INT_MAX).filter(bool))
def test_floor_and_modulo_of_large_ints(x: int, y: int) -> None:
    if (x, y) != (INT_MIN, -1):
        assert value("n // m", n=x, m=y) == x // y
    assert value("n % m", n=x, m=y) == x % y


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7 // n", 0),
        ("7 % n", 0),
        ("7.0 // x", 0.0),
        ("7.0 % x", 0.0),
        ("1 << (n - 1)", 0),
        ("1 << (n + 64)", 0),
        ("-1 >> (n + 63)", -1),
        ("-1 >> (n + 64)", 0),
        ("1 << (n + 63)", INT_MIN),
        ("(1 << (n + 63)) // (n - 1)", INT_MIN),
        ("(n + 3) ** 41", 3**41 - 2**64 * round(3**41 / 2**64)),
        ("n ** 0", 1),
        ("ilog2(n)", 0),
        ("ilog2(n - 5)", 0),
        ("ilog2(n + 1023)", 9),
        ("ilog2(n + 1024)", 10),
        ("ilog2((1 << 62) + n)", 62),
        ("round(x + 0.5) + round(x + 1.5)", 2),
        ("int(x - 2.7)", -2),
        ("floor(x - 2.7)", -3),
        ("ceil(x - 2.7)", -2),
        ("int(0.0 * (1.0 / x))", 0),
        ("int(1.0 / x)", INT_MAX),
        ("floor(-1.0 / x)", INT_MIN),
        ("bool(x)", False),
        ("flag + flag", 2),
    ],
)
def test_corners_of_the_meaning(text: str, expected: Any) -> None:
    assert value(text, n=0, x=0.0, flag=True) == expected


def test_reads_outside_a_table_are_0() -> None:
    doc = np.array([[1, 2, 3], [4, 5, 6]])
    assert value("doc[b, j]", doc=doc, b=1, j=[-1, 0, 2, 3]) == [0, 4, 6, 0]
    assert value("doc[b, j]", doc=doc[:, :0], b=1, j=[-1, 0]) == [0, 0]
    assert value("keep[j]", keep=np.array([True]), j=[0, 1]) == [True, False]
    assert value("size(doc, 1) + size(doc, 0)", doc=doc) == 5


def test_deciding_floats_are_float32() -> None:
    assert value("x + y <= 0.3", x=0.1, y=0.2) is True
    assert evaluate(parse("x + y <= 0.3"), {"x": 0.1, "y": 0.2}, strict=np.float64) == np.False_
    assert value("x + y + s <= 0.3", x=0.1, y=0.2, s=0.0) is False


@pytest.mark.parametrize("name", ["exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "tanh"])
def test_functions_are_those_of_math(name: str) -> None:
    for x in (0.25, 1.0, 3.5):
        assert math.isclose(value(f"{name}(x)", x=x), getattr(math, name)(x))


def test_functions_that_math_does_not_have() -> None:
    assert math.isclose(value("sigmoid(x)", x=-2.0), 1 / (1 + math.exp(2)))
    assert value("sigmoid(x)", x=[-1e4, 1e4]) == [0.0, 1.0]
    assert value("softplus(x)", x=[-1e4, 1e4]) == [0.0, 1e4]
    assert math.isclose(value("rsqrt(x)", x=4.0), 0.5)
    assert math.isclose(value("erf(x)", x=0.5), math.erf(0.5))


@settings(max_examples=200)
@given(exprs(), values())
def test_every_expression_has_its_type(expr: Expr, env: Env) -> None:
    kind = {Type.BOOL: "b", Type.INT: "i", Type.FLOAT: "f"}
    assert evaluate(expr, env).dtype.kind == kind[expr.type]


# -- text --------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(exprs(depth=5))
def test_text_reads_back(expr: Expr) -> None:
    again = parse_expression(show(expr), TYPES)
    assert again == expr, f"{show(expr)} reads back as {show(again)}"


@pytest.mark.parametrize(
    "text",
    [
        "s - slopes[h] * (i - j)",
        "i - (j - b)",
        "i - j - b",
        "(i + j) * b",
        "-(i + j)",
        "-i ** 2",
        "(-i) ** 2",
        "2.0 ** -x",
        "(2.0 ** x) ** y",
        "2.0 ** x ** y",
        "not (flag and j <= i)",
        "not flag and j <= i",
        "(flag or j <= i) and flag",
        "i & j | b ^ h",
        "i & (j | b)",
        "(i < j) == flag",
        "~(i << 2) >> 1",
        "where(j <= i, s, -inf)",
        "float(i) / 2.0 + s",
        "int(flag) == 1",
        "i % 2 == 1",
    ],
)
def test_text_reads_back_by_hand(text: str) -> None:
    assert parse(show(parse(text))) == parse(text)

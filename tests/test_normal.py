"""The normal form means what the mask meant, and says it in one way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from text_cases import cases
from tile_masks import DIRECTED, Launch, launches, masks, numbers, parse

from scoremod.analysis.facts import bounds, congruence, exact
from scoremod.analysis.normal import normalise
from scoremod.ir.evaluate import evaluate
from scoremod.ir.expr import Expr, postorder
from scoremod.ir.ops import Op, Type
from scoremod.ir.show import show


@cases("normal.txt")
def test_case(given: str, expected: str) -> None:
    assert show(normalise(parse(given))) == expected


@settings(max_examples=1000)
@given(masks(), launches())
def test_means_the_same(mask: Expr, launch: Launch) -> None:
    assert np.array_equal(launch.dense(mask), launch.dense(normalise(mask)))


@pytest.mark.parametrize(("text", "values"), DIRECTED)
@pytest.mark.parametrize("seed", range(6))
def test_directed_means_the_same(text: str, values: dict[str, int], seed: int) -> None:
    launch = Launch(70, 80, q_offset=seed, seed=seed, wild=seed % 2 == 0, given=values)
    mask = parse(text)
    assert np.array_equal(launch.dense(mask), launch.dense(normalise(mask)))


@settings(max_examples=300)
@given(numbers(), launches())
def test_facts_hold(number: Expr, launch: Launch) -> None:
    for node in postorder(number, normalise(number)):
        if node.type is not Type.INT:
            continue
        value = evaluate(node, launch.env, dtype=np.float32)
        low, high = bounds(node)
        assert np.all((low <= value) & (value <= high)), show(node)
        if exact(node) and node.op in INTEGERS:
            args = [evaluate(a, launch.env, dtype=np.float32).astype(object) for a in node.args]
            assert np.all(INTEGERS[node.op](*args) == value), show(node)
        m, r = congruence(node)
        assert np.all((value == r) if m == 0 else ((value.astype(object) - r) % m == 0)), show(node)


INTEGERS: dict[Op, Callable[..., Any]] = {
    Op.ADD: lambda x, y: x + y,
    Op.SUB: lambda x, y: x - y,
    Op.MUL: lambda x, y: x * y,
    Op.NEG: lambda x: -x,
    Op.ABS: abs,
}

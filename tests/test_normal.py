"""The normal form means what the mask meant, and says it in one way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from tile_masks import DIRECTED, Launch, launches, masks, numbers, parse

from scoremod.analysis.facts import bounds, congruence, exact
from scoremod.analysis.normal import normalise
from scoremod.ir.evaluate import evaluate
from scoremod.ir.expr import Expr, postorder
from scoremod.ir.ops import Op, Type
from scoremod.ir.show import show

CASES = """
i - j >= 0                                ->  j - i <= 0
not (S <= i - j)                          ->  i - j - S + 1 <= 0
i < j                                     ->  i - j + 1 <= 0
2 * i - 2 * j <= 3                        ->  i - j - 1 <= 0
2 * (i - j) + 1 == 0                      ->  False
6 * i - 3 * j == 4                        ->  False
0 <= j                                    ->  True
i - i % 64 <= j                           ->  64 * (i // 64) - j <= 0
i - 64 * (i // 64) <= j                   ->  i % 64 - j <= 0
(64 * i + j) // 64 <= 5                   ->  i + j // 64 - 5 <= 0
i // 4 // 3 <= j                          ->  i // 12 - j <= 0
i // -4 // 3 <= j                         ->  i // -4 // 3 - j <= 0
i // 4 // -3 <= j                         ->  i // 4 // -3 - j <= 0
(i % 24 + 5) % 24 <= j                    ->  (i + 5) % 24 - j <= 0
(i - j) % 8 <= 3                          ->  (i - j) % 8 - 3 <= 0
(9 * i - 17 * j + 30) % 8 <= 3            ->  (i - j + 6) % 8 - 3 <= 0
i % S == j % S                            ->  (i - j) % S == 0
i % S == 3                                ->  (i - 3) % S == 0 and 3 % S - 3 == 0
i % 8 == 9                                ->  False
i >> 3 < j << 2                           ->  i // 8 - 4 * j + 1 <= 0
~i <= j                                   ->  -i - j - 1 <= 0
i * S <= j                                ->  S * i <= j
i * S * S == j * S * S                    ->  S * (S * i) == S * (S * j)
i - j <= 3.5                              ->  i - j - 3 <= 0
i - j < 3.0                               ->  i - j - 2 <= 0
X[i] <= X[j]                              ->  X[i] <= X[j]
not (X[i] <= X[j])                        ->  not X[i] <= X[j]
(j <= i) == (i <= P)                      ->  j - i <= 0 and i - P <= 0 or i - j + 1 <= 0 and P - i + 1 <= 0
not (K[i] and not K[j])                   ->  not K[i] or K[j]
where(K[i], j <= i, K[j])                 ->  K[i] and j - i <= 0 or not K[i] and K[j]
j <= i and j <= i and True                ->  j - i <= 0
T[i] // 0 == 0                            ->  True
"""


@pytest.mark.parametrize("case", [line for line in CASES.splitlines() if line])
def test_case(case: str) -> None:
    before, after = case.split("->")
    assert show(normalise(parse(before.strip()))) == after.strip()


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

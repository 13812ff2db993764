"""What a score adds to s times a number: what is found, what is not, and what the parts mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_hopper import program

from scoremod import Variant, parse, variants
from scoremod.ir.evaluate import evaluate
from scoremod.ir.expr import Expr
from scoremod.passes.distance import added

PARTS = ("of_query", "of_key", "per_key")
SUMS: dict[str, tuple[Variant, set[str]]] = {
    "alibi": (variants.alibi, {"per_key"}),
    "its own sign": (parse("variant own(m: float) { score s + m * (j - i) }"), {"per_key"}),
    "scaled scores": (
        parse("variant scaled(m: float) { score 0.5 * s - 3.0 * (m * (i - j)) / 4.0 }"),
        {"per_key"},
    ),
    "nothing but distance": (parse("variant alone(m: float) { score -m * (i - j) }"), {"per_key"}),
    "forget gates": (
        parse("variant gates(t: float[N]) { score s + t[i] - t[j] }"),
        {"of_query", "of_key"},
    ),
    "keys": (parse("variant keys(t: float[N]) { score s - 2.0 * t[j] }"), {"of_key"}),
    "queries": (parse("variant queries(t: float[N]) { score t[i] + s }"), {"of_query"}),
    "scaled, keys": (parse("variant both(t: float[N]) { score 2.0 * s + t[j] }"), {"of_key"}),
    "distance and keys": (
        parse("variant two(m: float, t: float[N]) { score s + m * (i - j) + t[j] }"),
        {"of_key", "per_key"},
    ),
    "all of them": (
        parse("variant whole(m: float, t: float[N]) { score s - m * (i - j) + t[i] - t[j] }"),
        {"of_query", "of_key", "per_key"},
    ),
    "a number": (parse("variant number(m: float) { score s + m }"), {"of_query"}),
}
OTHERS: dict[str, Variant] = {
    # Apart, large numbers that nearly cancel would round.
    "a rate of elapsed time": variants.time_decay,
    "whole numbers": parse("variant ints(t: int[N]) { score s - (float(t[i]) - float(t[j])) }"),
    "s alone": parse("variant alone() { score s }"),
    "s times a number": parse("variant times() { score 2.0 * s }"),
    "either side": variants.symmetric_alibi,
    "soft-cap": variants.softcap,
    "a table of pairs": parse("variant pairs(t: float[N, N]) { score s + t[i, j] }"),
    "a sum": parse("variant total(m: float) { score s + m * (i + j) }"),
    "an offset": parse("variant offset(m: float) { score s + m * (i - j + 1) }"),
    "twice one side": parse("variant twice(m: float) { score s + m * (i - 2 * j) }"),
    "distances of two slopes": parse(
        "variant two(m: float, t: float[N]) { score s + m * (i - j) + t[i] * (i - j) }"
    ),
    "a slope that reads j": parse("variant reads(t: float[N]) { score s * t[j] + (i - j) * 0.5 }"),
    "a factor that reads i": parse("variant rows(t: float[N]) { score s + t[i] * (i - j) }"),
    "under a function": parse("variant under(m: float) { score tanh(s - m * (i - j)) }"),
}


@pytest.mark.parametrize("name", SUMS)
@given(s=st.floats(-50, 50), i=st.integers(0, 10**6), j=st.integers(0, 10**6))
def test_the_parts_make_the_score(name: str, s: float, i: int, j: int) -> None:
    variant, there = SUMS[name]
    score = program(variant).score
    found = added(score)
    assert found is not None
    assert {x for x in PARTS if getattr(found, x) is not None} == there
    if "t" in score.names:
        i, j = i % 10, j % 10
    captures = {"slopes": np.array([0.25]), "m": 0.25, "t": np.linspace(-3.0, 7.0, 10)}
    values = {"s": s, "i": i, "j": j, "h": 0, "b": 0, **captures}

    def value(x: Expr | None) -> float:
        return 0.0 if x is None else float(evaluate(x, values))

    total = value(found.slope) * s + value(found.of_query) + value(found.of_key)
    total += value(found.per_key) * (j - i)
    assert float(evaluate(score, values)) == pytest.approx(total, rel=1e-12, abs=1e-9)


@pytest.mark.parametrize("name", SUMS)
def test_no_part_reads_what_it_does_not_vary_with(name: str) -> None:
    found = added(program(SUMS[name][0]).score)
    assert found is not None
    apart = (
        (found.slope, {"i", "j", "s"}),
        (found.of_query, {"j", "s"}),
        (found.of_key, {"i", "s"}),
        (found.per_key, {"i", "j", "s"}),
    )
    assert all(not x.names & others for x, others in apart if x is not None)


@pytest.mark.parametrize("name", OTHERS)
def test_other_scores_stay_as_they_are(name: str) -> None:
    assert added(program(OTHERS[name]).score) is None

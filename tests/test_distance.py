"""Scores that change evenly with distance: what is found, what is not, and what the parts mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_hopper import program

from scoremod import Variant, parse, variants
from scoremod.ir.evaluate import evaluate
from scoremod.ir.expr import Expr, index
from scoremod.passes.distance import added, by_distance

EVEN = {
    "alibi": variants.alibi,
    "its own sign": parse("variant own(m: float[H]) { score s + m[h] * (j - i) }"),
    "scaled scores": parse(
        "variant scaled(m: float) { score 0.5 * s - 3.0 * (m * (i - j)) / 4.0 }"
    ),
    "nothing but distance": parse("variant alone(m: float) { score -m * (i - j) }"),
}
OTHERS = {
    "either side": variants.symmetric_alibi,
    "soft-cap": variants.softcap,
    "a sum": parse("variant total(m: float) { score s + m * (i + j) }"),
    "an offset": parse("variant offset(m: float) { score s + m * (i - j + 1) }"),
    "twice one side": parse("variant twice(m: float) { score s + m * (i - 2 * j) }"),
    "two terms": parse("variant two(m: float, t: float[N]) { score s + m * (i - j) + t[j] }"),
    "a slope that reads j": parse("variant reads(t: float[N]) { score s * t[j] + (i - j) * 0.5 }"),
    "a factor that reads i": parse("variant rows(t: float[N]) { score s + t[i] * (i - j) }"),
    "under a function": parse("variant under(m: float) { score tanh(s - m * (i - j)) }"),
}


@pytest.mark.parametrize("name", EVEN)
@given(s=st.floats(-50, 50), i=st.integers(0, 10**6), j=st.integers(0, 10**6))
def test_both_parts_make_the_score(name: str, s: float, i: int, j: int) -> None:
    score = program(EVEN[name]).score
    found = by_distance(score)
    assert found is not None
    captures = {
        "slopes": np.array([0.25]),
        "m": np.array([0.25]) if name == "its own sign" else 0.25,
    }
    values = {"s": s, "i": i, "j": j, "h": 0, "b": 0, **captures}
    whole, slope, per_key = (
        float(evaluate(x, values)) for x in (score, found.slope, found.per_key)
    )
    assert whole == pytest.approx(slope * s + per_key * (j - i), rel=1e-12, abs=1e-9)


@pytest.mark.parametrize("name", EVEN)
def test_the_parts_read_no_place(name: str) -> None:
    found = by_distance(program(EVEN[name]).score)
    assert found is not None
    for part in (found.slope, found.per_key):
        assert not part.names & {"i", "j", "s"} and part is not index("s")


@pytest.mark.parametrize("name", OTHERS)
def test_other_scores_stay_as_they_are(name: str) -> None:
    variant: Variant = OTHERS[name]
    assert by_distance(program(variant).score) is None


# -- what is added to s ------------------------------------------------------------------------

GATES = parse("variant gates(t: float[N]) { score s + t[i] - t[j] }")
ALL_OF_THEM = parse(
    "variant all_of(m: float, t: float[N]) { score s - m * (i - j) + (t[i] - t[j]) / 4.0 }"
)
SUMS = {
    "alibi": (variants.alibi, {"per_key"}),
    "forget gates": (GATES, {"of_query", "of_key"}),
    "keys": (parse("variant keys(t: float[N]) { score s - 2.0 * t[j] }"), {"of_key"}),
    "queries": (parse("variant queries(t: float[N]) { score t[i] + s }"), {"of_query"}),
    "all of them": (ALL_OF_THEM, {"of_query", "of_key", "per_key"}),
    "a number": (parse("variant number(m: float) { score s + m }"), {"of_query"}),
}
NO_SUMS = {
    "s alone": parse("variant alone() { score s }"),
    "scaled": parse("variant scaled(t: float[N]) { score 2.0 * s + t[j] }"),
    "a table of pairs": parse("variant pairs(t: float[N, N]) { score s + t[i, j] }"),
    "either side": variants.symmetric_alibi,
    "soft-cap": variants.softcap,
    "distances of two slopes": parse(
        "variant two(m: float, t: float[N]) { score s + m * (i - j) + t[i] * (i - j) }"
    ),
}


@pytest.mark.parametrize("name", SUMS)
@given(s=st.floats(-50, 50), i=st.integers(0, 9), j=st.integers(0, 9))
def test_the_parts_make_what_is_added(name: str, s: float, i: int, j: int) -> None:
    variant, there = SUMS[name]
    score = program(variant).score
    found = added(score)
    assert found is not None
    assert {x for x in ("of_query", "of_key", "per_key") if getattr(found, x) is not None} == there
    captures = {"slopes": np.array([0.25]), "m": 0.25, "t": np.linspace(-3.0, 7.0, 10)}
    values = {"s": s, "i": i, "j": j, "h": 0, "b": 0, **captures}

    def value(x: Expr | None) -> float:
        return 0.0 if x is None else float(evaluate(x, values))

    total = s + value(found.of_query) + value(found.of_key) + value(found.per_key) * (j - i)
    assert float(evaluate(score, values)) == pytest.approx(total, rel=1e-12, abs=1e-9)


@pytest.mark.parametrize("name", SUMS)
def test_no_part_reads_what_it_does_not_vary_with(name: str) -> None:
    found = added(program(SUMS[name][0]).score)
    assert found is not None
    apart = (found.of_query, {"j", "s"}), (found.of_key, {"i", "s"}), (found.per_key, {"i", "j"})
    assert all(not x.names & others for x, others in apart if x is not None)


@pytest.mark.parametrize("name", NO_SUMS)
def test_nothing_else_is_taken_apart(name: str) -> None:
    assert added(program(NO_SUMS[name]).score) is None

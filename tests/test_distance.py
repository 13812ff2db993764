"""Scores that change evenly with distance: what is found, what is not, and what the parts mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_hopper import program

from scoremod import Variant, parse, variants
from scoremod.ir.evaluate import evaluate
from scoremod.ir.expr import index
from scoremod.passes.distance import by_distance

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

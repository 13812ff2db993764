"""Random variants of the whole language on every backend against the oracle.

SCOREMOD_FUZZ=20 draws 20 times as many, from other seeds each time; `make fuzz` goes on for as long
as it is told to. What is found becomes a line of FOUND.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from attention_cases import each_backend
from fuzz_variants import Draw, bodies, calls, check_forward, check_gradients, wide_calls
from hypothesis import HealthCheck, Phase, given, note, settings

FACTOR = int(os.environ.get("SCOREMOD_FUZZ", "1"))
EXAMPLES = {"cpu": 150, "triton": 60}
# Of gradients: Triton's interpreter takes about a second for each.
GRADIENTS = {"cpu": 60, "triton": 8}


@each_backend
def test_random_variants(backend: str) -> None:
    @settings(
        max_examples=EXAMPLES[backend] * FACTOR,
        derandomize=FACTOR == 1,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(bodies(), calls)
    def law(body: str, call: Draw) -> None:
        note(body)
        check_forward(body, call, backend)

    law()


@each_backend
def test_gradients_of_random_variants(backend: str) -> None:
    @settings(
        max_examples=GRADIENTS[backend] * FACTOR,
        derandomize=FACTOR == 1,
        phases=[Phase.generate, Phase.shrink],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(bodies(), wide_calls(backend))
    def law(body: str, call: Draw) -> None:
        note(body)
        check_gradients(body, call, backend)

    law()


# What random variants found, shrunk; each on every backend.
FOUND = [
    # Triton 3.6's interpreter gave a comparison of scalars its operands' type.
    "mask float(h) * float(h) <= 0.1 and j <= i",
    "mask not (h == 2 and j <= i) and x < 10.0",
]
CALL = Draw(1, 17, 40, 3, True, False)


@each_backend
@pytest.mark.parametrize("body", FOUND)
def test_found_by_random_variants(body: str, backend: str) -> None:
    for by_value in (True, False):
        check_forward(body, replace(CALL, by_value=by_value), backend)

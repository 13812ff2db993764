"""Random variants of the whole language on every backend against the oracle.

SCOREMOD_FUZZ=20 draws 20 times as many, from other seeds each time; `make fuzz` goes on for as long
as it is told to. What is found becomes a line of FOUND.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from dataclasses import replace

import fuzz_gpu
import pytest
import sanitize
import torch
from attention_cases import each_backend
from fuzz_variants import Draw, bodies, calls, check_forward, check_gradients, wide_calls
from hypothesis import HealthCheck, Phase, given, note, settings
from test_check import off_by

from scoremod import attention

FACTOR = int(os.environ.get("SCOREMOD_FUZZ", "1"))
EXAMPLES = {"cpu": 100, "triton": 24}
# Of gradients: Triton's interpreter takes about a second for each.
GRADIENTS = {"cpu": 40, "triton": 5}


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
    # Triton takes an int from 2**31 on for an unsigned one of 32 bits.
    "mask i < where(i < j, 4294967295, -1)",
    "mask i - 5 < 3000000000 and j <= i",
]
CALL = Draw(1, 17, 40, 3, True, False)


@each_backend
@pytest.mark.parametrize("body", FOUND)
def test_found_by_random_variants(body: str, backend: str) -> None:
    for by_value in (True, False):
        check_forward(body, replace(CALL, by_value=by_value), backend)


# -- what a GPU is given -----------------------------------------------------------------------


def gpu_job(body: str, dtype: str, *layouts: str) -> fuzz_gpu.Job:
    calls = [Draw(k, 33, 40, 3, False, k == 1, (4, 2), (16, 16), dtype, layout)
             for k, layout in enumerate(layouts)]  # fmt: skip
    return fuzz_gpu.Job(0, body, dtype, (16, 16), "auto", "auto", tuple(calls))


CAPPED = "score 20.0 * tanh(s / 20.0) + rel[h, abs(i - j)]\nmask 0 <= i - j < n or keep[j]"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_limits_are_met_by_rounding_alone(dtype: str) -> None:
    job = gpu_job(CAPPED, dtype, "plain", "heads last", "inside")
    answer = fuzz_gpu.do(job, "cpu", float("inf"), Counter())
    assert (answer.cases, answer.failures) == (3, ()) and 0 < answer.worst < 1


@pytest.mark.parametrize(("what", "factor"), [("out", 1.05), ("dk", 1.2), ("rel", 1.2)])
def test_limits_are_not_met_by_a_wrong_kernel(
    what: str, factor: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward, backward = off_by(factor, what)
    monkeypatch.setattr(attention, "RUN", forward)
    monkeypatch.setattr(attention, "RUN_BACKWARD", backward)
    job = replace(gpu_job(CAPPED, "bfloat16", "plain"), precision="exact")
    (failure,) = fuzz_gpu.do(job, "cpu", float("inf"), Counter()).failures
    assert failure.kind == f"off: {what}"
    # The command says the same.
    words = shlex.split(failure.repeat)
    assert fuzz_gpu.repeat(words[-1], "cpu") and f"BAD   {what} " in capsys.readouterr().out


def test_nothing_beside_a_tensor_is_read() -> None:
    x = torch.ones(2, 3)
    around = fuzz_gpu.surrounded(x, "cpu")
    assert torch.equal(x, around)
    assert around.as_strided((6 + 2 * fuzz_gpu.SLACK,), (1,), 0).isnan().sum() == 2 * fuzz_gpu.SLACK


@pytest.mark.parametrize("name", sanitize.CASES)
def test_calls_for_the_sanitizer(name: str) -> None:
    assert sanitize.check(sanitize.CASES[name], "cpu", "cpu") == ""

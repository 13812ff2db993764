"""`check`: that right variants pass, that wrong kernels do not, and what is told of either."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from attention_cases import agree
from click.testing import CliRunner

import scoremod
from scoremod import attention, check, parse, variants
from scoremod.cli import main
from scoremod.errors import CheckFailed, InputMismatch
from scoremod.testing import assert_variant

QUICK = {"dtype": "f32", "backend": "cpu"}
ALIBI = variants.alibi & variants.causal


def off_by(factor: float, what: str) -> Any:
    """A CPU backend with one wrong result."""
    forward, backward = attention.RUN["cpu"], attention.RUN_BACKWARD["cpu"]

    def run(*call: Any) -> Any:
        answer = forward(*call)
        return answer._replace(out=answer.out * factor) if what == "out" else answer

    def run_backward(*call: Any) -> Any:
        found = backward(*call)
        if what == "dk" and found.k is not None:
            found.k.mul_(factor)
        for name, value in found.captures.items():
            if name == what:
                value.mul_(factor)
        return found

    return {"cpu": run}, {"cpu": run_backward}


def test_a_report_names_every_result_and_what_was_drawn() -> None:
    report = ALIBI.check(**QUICK)
    assert {x.result for x in report.found} == {"out", "lse", "dq", "dk", "dv", "slopes"}
    assert {str(x.case.setting.shape) for x in report.found} >= {"1x1x1x8", "1x2/1x140/270x32"}
    text = str(report)
    assert "alibi_and_causal" in text and "units of rounding" in text
    assert "slopes: tensor[H]" in text and "normal" in text
    assert all(0 <= x.units <= x.limit for x in report.found)


@pytest.mark.parametrize("what", ["out", "dk", "slopes"])
def test_a_wrong_kernel_fails_at_the_smallest_case(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, backward = off_by(1.01, what)
    monkeypatch.setattr(attention, "RUN", forward)
    monkeypatch.setattr(attention, "RUN_BACKWARD", backward)
    with pytest.raises(CheckFailed) as caught:
        ALIBI.check(**QUICK)
    # With i = j = 0 nothing reaches the slopes.
    smallest = {"out": "1x1x1x8", "dk": "1x1x1x8", "slopes": "2x2/1x5/9x16"}[what]
    text = str(caught.value)
    assert f"{what} is off by" in text and f"smallest case: f32 on cpu, {smallest}" in text
    assert '.check(dtype="f32", backend="cpu", seed=0)' in text


def test_given_tables_limit_the_shapes() -> None:
    """Two documents of 40 tokens, and slopes of 3 heads."""
    attn = parse("variant v(slopes, doc: i32[B, L]) { score s - slopes[h] * (i - j) "
                 "mask doc[b, i] == doc[b, j] }")  # fmt: skip
    doc = torch.arange(40).div(7, rounding_mode="floor").int().expand(2, 40)
    report = attn.check(**QUICK, slopes=torch.rand(3), doc=doc)
    shapes = {x.case.setting.shape for x in report.found}
    assert max(s.kv_len for s in shapes) == 40 and max(s.q_heads for s in shapes) <= 3
    assert not report.drawn


def test_bounds_tells_reads_outside_tables() -> None:
    attn = parse("variant v(t: f32[9]) { score s + t[i - j] mask j <= i + 1 }")
    (line,) = attn.check(**QUICK, bounds=True).outside
    assert "t[i - j] in the score reads 0 at" in line and "dimension 0 has length 9" in line
    inside = parse("variant v(t: f32[9]) { score s + t[clamp(i - j, 0, 8)] }")
    assert inside.check(**QUICK, bounds=True).outside == ()


def test_captures_called_like_options_are_given_in_a_dictionary() -> None:
    attn = parse("variant v(seed: float) { score s * seed }")
    report = attn.check(**QUICK, captures={"seed": torch.tensor(0.5)})
    assert "seed" in {x.result for x in report.found} and not report.drawn


def test_mistakes() -> None:
    with pytest.raises(InputMismatch, match="nothing to check on 'eager'"):
        ALIBI.check(backend="eager")
    with pytest.raises(InputMismatch, match="takes f16, bf16, f32 and f64, not i32"):
        ALIBI.check(dtype=torch.int32)


def test_one_line_in_a_test_suite() -> None:
    slopes = variants.alibi_slopes(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "DTYPES", {"cpu": ("f32",)})
        patch.setattr(check, "available", lambda: ("cpu",))
        assert_variant(ALIBI, slopes=slopes)
    agree(slopes, variants.alibi_slopes(2), 0)


def test_the_command() -> None:
    quick = ["--dtype", "f32", "--backend", "cpu"]
    told = CliRunner().invoke(main, ["check", "alibi", *quick])
    assert told.exit_code == 0 and "largest errors" in told.output
    data = CliRunner().invoke(main, ["check", "alibi", *quick, "--json"])
    assert json.loads(data.output)["variant"] == "alibi"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "RUN", off_by(2.0, "out")[0])
        wrong = CliRunner().invoke(main, ["check", "causal", *quick])
    assert wrong.exit_code == 1 and "out is off by" in wrong.output


def test_the_exported_names() -> None:
    assert scoremod.testing.assert_variant is assert_variant

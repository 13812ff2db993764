"""Backwards like one before on a GPU: the gradients of backwards that are decided anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from scoremod import Variant, autograd, parse, variants, warm_backward

pytestmark = pytest.mark.gpu

NOOP = parse("variant noop() { mask True }")
BAND = parse(
    "variant band(t: f32[H], n: int) { score s - t[h] * (i - j) mask j <= i and i - j < n }"
)
ALIBI, SOFTCAP = variants.alibi & variants.causal, variants.softcap & variants.causal


def slopes() -> dict[str, Any]:
    return {"slopes": torch.rand(4, device="cuda")}


def band() -> dict[str, Any]:
    return {"t": torch.rand(4, device="cuda"), "n": int(torch.randint(1, 400, ()))}


CASES: dict[str, tuple[Variant, Callable[[], dict[str, Any]], int, dict[str, Any]]] = {
    "no mask, head dim 64": (NOOP, dict, 64, {}),
    "causal, head dim 64": (variants.causal, dict, 64, {}),
    "causal": (variants.causal, dict, 128, {}),
    "causal, float16": (variants.causal, dict, 128, {"dtype": torch.float16}),
    "two heads a kv head": (variants.causal, dict, 128, {"kv_heads": 2}),
    "lengths": (variants.causal, dict, 128, {"lengths": True}),
    "soft-cap": (SOFTCAP, dict, 128, {}),
    "ALiBi": (ALIBI, slopes, 128, {}),
    "a captured number": (BAND, band, 64, {}),
    "ALiBi, head dim 256": (ALIBI, slopes, 256, {}),
    "a captured number, head dim 192": (BAND, band, 192, {}),
}


def gradients(
    variant: Variant, captures: dict[str, Any], leaves: list[torch.Tensor], **options: Any
) -> tuple[torch.Tensor, ...]:
    out = variant(*leaves, **captures, **options)
    return torch.autograd.grad(out, leaves, torch.ones_like(out) / 8)


@pytest.mark.parametrize("name", CASES)
def test_they_give_what_one_decided_anew_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variant, captures, head_dim, shape = CASES[name]
    warm: list[int] = []
    repeat = warm_backward.WarmBackward.__call__

    def counted(self: Any, given: Any) -> Any:
        warm.append(1)
        return repeat(self, given)

    monkeypatch.setattr(warm_backward.WarmBackward, "__call__", counted)
    heads, kv_heads = 4, shape.get("kv_heads", 4)
    for turn in range(4):
        torch.manual_seed(turn)
        leaves = [
            torch.randn(
                2, h, 700, head_dim, device="cuda", dtype=shape.get("dtype", torch.bfloat16)
            )
            for h in (heads, kv_heads, kv_heads)
        ]
        leaves = [x.requires_grad_() for x in leaves]
        options: dict[str, Any] = {"q_offset": 30 * turn}
        if shape.get("lengths"):
            options["kv_lens"] = torch.tensor(
                [650 - 90 * turn, 700], dtype=torch.int32, device="cuda"
            )
        given = captures()
        found = gradients(variant, given, leaves, **options)
        assert len(warm) == max(turn - 1, 0) or turn < 2
        with monkeypatch.context() as anew:
            anew.setattr(autograd.Call, "kind_of_return", lambda *_: None)
            expected = gradients(variant, given, leaves, **options)
        for x, y in zip(found, expected, strict=True):
            # dq is added up in another order in each run.
            assert torch.isfinite(x).all() and x.ne(0).any()
            assert (x - y).float().norm() <= 1e-3 * y.float().norm()
    assert len(warm) >= 2

"""Scores that a tile's first maximum does not do for: the Hopper forward has to try again.

The kernel keeps the maximum of a row's first kv tile. Later scores may be far above it, or the
first tile masked and all others far below 0; sums then overflow or vanish.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_hopper_gpu import HOLES, NOOP, on_hopper
from torch import Tensor

from scoremod import Variant, variants

# More than one turn for each multiprocessor, and for what is tried again.
BATCH, HEADS, LENGTH = 2, 16, 1500
VARIANTS: dict[str, tuple[Variant, dict[str, Any]]] = {
    "every pair": (NOOP, {}),
    "causal": (variants.causal, {}),
    "window": (variants.sliding_window, {"window": 200}),
    "queries without keys": (HOLES, {}),
}
Scores = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def along(q: Tensor, k: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """q and k whose scores are `level` [length of k], but for some noise."""
    first = torch.zeros_like(q[0, 0, 0])
    first[0] = 1.0
    scale = math.sqrt(q.shape[-1])
    return q * 0.1 + first * 8 * scale, k * 0.1 + first * level[:, None] / 8


# How scores run over the keys; `place` is 0 at the first one and 1 at the last.
SCORES: dict[str, Scores] = {
    "normal": lambda q, k, place: (q, k),
    "large": lambda q, k, place: (q * 5, k * 6),
    "rising": lambda q, k, place: along(q, k, place * 320),
    "falling": lambda q, k, place: along(q, k, (1 - place) * 320),
    "low": lambda q, k, place: along(q, k, place * 0 - 400),
    "high": lambda q, k, place: along(q, k, place * 0 + 400),
    "one first key": lambda q, k, place: along(q, k, 30.0 * (place == 0)),
    "one last key": lambda q, k, place: along(q, k, 200.0 * (place == 1)),
}


def tensors(scores: str, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(11)
    shape = (BATCH, HEADS, LENGTH, head_dim)
    q, k, v = (torch.randn(shape, generator=make).cuda() for _ in range(3))
    q, k = SCORES[scores](q, k, torch.linspace(0, 1, LENGTH, device="cuda"))
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_any_scores_give_the_softmax(head_dim: int, dtype: torch.dtype, name: str) -> None:
    on_hopper()
    variant, values = VARIANTS[name]
    for scores in SCORES:
        q, k, v = tensors(scores, head_dim, dtype)
        call = {"backend": "hopper", "return_lse": True, **values}
        (out, lse), (again, _) = variant(q, k, v, **call), variant(q, k, v, **call)
        exact, exact_lse = variant.eager(q.float(), k.float(), v.float(), return_lse=True, **values)
        # p may round where the largest one was 1: half a unit of the last place.
        close = {"rtol": 2e-2, "atol": 1e-2, "msg": lambda text, s=scores: f"{s}: {text}"}
        torch.testing.assert_close(out.float(), exact, **close)
        torch.testing.assert_close(lse, exact_lse, rtol=1e-5, atol=1e-4)
        assert torch.equal(out, again), scores


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["every pair", "causal"])
def test_nan_stays_where_it_is_seen(name: str) -> None:
    on_hopper()
    variant, values = VARIANTS[name]
    q, k, v = tensors("normal", 128, torch.bfloat16)
    k[:, :, LENGTH // 2] = float("nan")
    out = variant(q, k, v, backend="hopper", **values)
    seen = torch.ones(LENGTH, dtype=torch.bool, device="cuda")
    if name == "causal":
        seen[: LENGTH // 2] = False
    assert torch.equal(out.isnan().any(-1), seen.expand(BATCH, HEADS, -1))

"""The Hopper backward on a GPU: gradients against float64 autograd of the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import scoremod
from scoremod import Variant, attend_hopper, backward_triton, parse, variants

pytestmark = pytest.mark.gpu

bf16, f16 = torch.bfloat16, torch.float16
NOOP = parse("variant noop() { mask True }")
GAPS = parse("variant gaps() { mask j <= i - 50 }")
HEADS = parse("variant heads(w: i32[H]) { mask j <= i and i - j < w[h] }")
LOGS = parse("variant logs() { score s + log(1.0 + (i - j)) mask j <= i }")
ROOTS = parse("variant roots() { score 2.0 * sqrt(abs(s)) mask j <= i }")
SOFTCAP, ALIBI = variants.softcap & variants.causal, variants.alibi & variants.causal

Tables = Callable[[], dict[str, Any]]


def offsets() -> dict[str, Any]:
    first = torch.tensor([3, 100], dtype=torch.int32, device="cuda")
    return {"q_offset": first, "slopes": 0.1 * torch.rand(4, device="cuda")}


def widths() -> dict[str, Any]:
    return {"w": torch.tensor([5, 60, 200, 1000], dtype=torch.int32, device="cuda")}


@dataclass(frozen=True)
class Case:
    """A call; k and v have `kv_heads` heads and batch `kv_batch`."""

    variant: Variant
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int | None = None
    kv_heads: int = 4
    kv_batch: int = 2
    dtype: torch.dtype = bf16
    transposed: bool = False  # heads behind the length in memory
    call: dict[str, Any] = field(default_factory=dict)
    tables: Tables = dict

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """q, k, v, what comes back for the output, and for the LSE."""
        torch.manual_seed(0)
        v_head_dim = self.v_head_dim or self.head_dim
        shapes = (
            (2, 4, self.q_len, self.head_dim),
            (self.kv_batch, self.kv_heads, self.kv_len, self.head_dim),
            (self.kv_batch, self.kv_heads, self.kv_len, v_head_dim),
            (2, 4, self.q_len, v_head_dim),
        )
        found = [torch.randn(s, device="cuda").to(self.dtype) for s in shapes]
        if self.transposed:
            found = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in found]
        return (*found, torch.randn(2, 4, self.q_len, device="cuda"))


CASES: dict[str, Case] = {
    "whole tiles": Case(NOOP, 256, 256, 128),
    "ragged, grouped heads, fp16": Case(NOOP, 200, 333, 128, kv_heads=2, dtype=f16),
    "ragged, narrow": Case(NOOP, 190, 70, 64, dtype=f16),
    "causal, one kv head": Case(variants.causal, 457, 457, 128, kv_heads=1),
    "causal, narrow, transposed": Case(variants.causal, 457, 457, 64, transposed=True),
    "a window and an offset": Case(
        variants.sliding_window, 600, 620, 128, kv_heads=2, call={"window": 100, "q_offset": 20}
    ),
    "a window and an offset, narrow": Case(
        variants.sliding_window, 600, 620, 64, call={"window": 100, "q_offset": 20}
    ),
    "soft-cap": Case(SOFTCAP, 333, 333, 128, kv_heads=2),
    "soft-cap, narrow": Case(SOFTCAP, 333, 333, 64, kv_heads=2),
    "offsets per sequence": Case(ALIBI, 300, 400, 128, kv_heads=2, tables=offsets),
    "offsets per sequence, narrow": Case(ALIBI, 300, 400, 64, kv_heads=2, tables=offsets),
    "a padded head dim": Case(variants.causal, 457, 457, 96),
    "two head dims": Case(NOOP, 300, 300, 72, 128),
    "two head dims, one of them half": Case(variants.causal, 300, 300, 64, 128),
    "rows and keys without pairs": Case(GAPS, 300, 300, 128),
    "rows and keys without pairs, narrow": Case(GAPS, 300, 300, 64),
    "ranges by head": Case(HEADS, 500, 500, 128, kv_heads=2, tables=widths),
    "k and v for all sequences": Case(variants.causal, 300, 300, 128, kv_heads=2, kv_batch=1),
    "few queries": Case(NOOP, 17, 1000, 64),
    "one key": Case(NOOP, 100, 1, 128),
    "a score that is nan where no pair attends": Case(LOGS, 300, 300, 128),
    "a slope that is infinite at 0": Case(ROOTS, 300, 300, 64),
}


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU, and no portable backward to fall back to."""
    if not attend_hopper.is_hopper(scoremod.launch.device()):
        pytest.skip("not a Hopper GPU")

    def fail(*_: Any) -> None:
        raise AssertionError("the portable backward was called")

    monkeypatch.setattr(backward_triton, "backward", fail)


def gradients(
    attend: Callable[..., Any], qkv: tuple[torch.Tensor, ...], back: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out, lse = attend(*leaves, return_lse=True)
    found = torch.autograd.grad(
        [out, lse], leaves, [x.to(y.dtype) for x, y in zip(back, (out, lse), strict=True)]
    )
    return list(found)


@pytest.mark.parametrize("name", CASES)
def test_gradients_agree_with_the_oracle(name: str) -> None:
    case = CASES[name]
    q, k, v, do, dlse = case.tensors()
    call = {**case.call, **case.tables()}
    found = gradients(
        lambda *x, **more: case.variant(*x, backend="hopper", **call, **more), (q, k, v), (do, dlse)
    )
    wanted = gradients(
        lambda *x, **more: case.variant.eager(*x, **call, **more),
        (q.double(), k.double(), v.double()),
        (do.double(), dlse.double()),
    )
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.isfinite().all() and mine.stride() == mine.clone().stride()
        # p and ds are rounded to 8 bits in bf16, to 11 in fp16: 2.5e-3 and 3e-4 were seen.
        limit = 5e-3 if case.dtype is bf16 else 6e-4
        assert float((mine.double() - theirs).norm() / theirs.norm()) < limit


def test_rows_and_keys_without_pairs_have_gradients_of_exactly_zero() -> None:
    q, k, v, do, dlse = Case(GAPS, 300, 300, 128).tensors()
    dq, dk, dv = gradients(
        lambda *x, **more: GAPS(*x, backend="hopper", **more), (q, k, v), (do, dlse)
    )
    assert (
        (dq[:, :, :50] == 0).all() and (dk[:, :, 250:] == 0).all() and (dv[:, :, 250:] == 0).all()
    )


def test_learned_slopes_have_gradients_beside_the_hopper_backward() -> None:
    q, k, v, do, _ = Case(NOOP, 300, 300, 64).tensors()
    found = []
    for backend in ("hopper", "eager"):
        slopes = variants.alibi_slopes(4).cuda().requires_grad_()
        out = ALIBI(q, k, v, slopes=slopes, backend=backend)
        found += torch.autograd.grad(out, slopes, do)
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 1e-2


def test_learned_distances_fall_back_to_the_portable_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their reads would spill registers in the Hopper backward."""
    monkeypatch.undo()
    q, k, v, do, _ = Case(NOOP, 300, 300, 64).tensors()
    attn = variants.relative_bias & variants.causal
    tables = []
    for backend in ("hopper", "eager"):
        table = torch.randn(4, 129, generator=torch.Generator().manual_seed(1)).cuda()
        table.requires_grad_()
        out = attn(q, k, v, table=table, max_distance=64, backend=backend)
        tables += torch.autograd.grad(out, table, do)
    assert float((tables[0] - tables[1]).norm() / tables[1].norm()) < 1e-2


def test_the_same_bits_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    q, k, v, do, dlse = Case(variants.causal, 1000, 1000, 128).tensors()

    def run() -> list[torch.Tensor]:
        return gradients(
            lambda *x, **more: variants.causal(*x, deterministic=True, **more),
            (q, k, v),
            (do, dlse),
        )

    first = run()
    for _ in range(3):
        assert all(torch.equal(x, y) for x, y in zip(first, run(), strict=True))

"""The Hopper backward on a GPU: gradients against float64 autograd of the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import scoremod
from scoremod import Variant, attend_hopper, backward_hopper, backward_triton, parse, variants

pytestmark = pytest.mark.gpu

bf16, f16 = torch.bfloat16, torch.float16
NOOP = parse("variant noop() { mask True }")
GAPS = parse("variant gaps() { mask j <= i - 50 }")
HEADS = parse("variant heads(w: i32[H]) { mask j <= i and i - j < w[h] }")
KEY_BIAS = parse("variant key_bias(t: f32[B, H, Lk]) { score s - 0.5 * t[b, h, j] }")
QUERY_BIAS = parse("variant query_bias(t: f32[B, H, Lq]) { score s + 2.0 * t[b, h, i] }")
WEIGHTED_KEYS = parse("variant keys(t: f32[Lk]) { score s - t[j] * (i - j) mask j <= i }")
LOGS = parse("variant logs() { score s + log(1.0 + (i - j)) mask j <= i }")
ROOTS = parse("variant roots() { score 2.0 * sqrt(abs(s)) mask j <= i }")
BAND = parse(
    "variant band(t: f32[H], n: int) { score s - t[h] * (i - j) mask j <= i and i - j < n }"
)
RISING = parse("variant rising(t: f32[H]) { score s + t[h] * (j - i) }")
GATES = parse("variant gates(t: f32[B, H, L]) { score s + t[b, h, i] - t[b, h, j] mask j <= i }")
PARTS = parse("variant parts(t: f32[L], m: f32[H]) { score s - m[h] * (i - j) + t[j] + t[i] }")
SOFTCAP, ALIBI = variants.softcap & variants.causal, variants.alibi & variants.causal
DOCUMENTS = variants.document & variants.causal
CAPPED_DOCUMENTS = variants.softcap & DOCUMENTS
# Kv tiles with more runs of q tiles than a record holds, which have a map.
SCATTERED = parse("variant scattered() { mask (i // 128) % 2 == (j // 128) % 2 }")
DILATED = parse("variant dilated() { mask j <= i and (i - j) % 7 == 0 }")
# Two runs of full tiles of a kv tile, and partial ones before, between and behind them.
BANDS = parse("variant bands() { score s + 0.001 * (i - j) mask j <= i and (i - j) % 1200 < 600 }")
TWO_RANGES = parse("variant two() { mask i < 4 or j == i or i - j > 200 }")

Tables = Callable[[], dict[str, Any]]


def offsets() -> dict[str, Any]:
    first = torch.tensor([3, 100], dtype=torch.int32, device="cuda")
    return {"q_offset": first, "slopes": 0.1 * torch.rand(4, device="cuda")}


def slopes() -> dict[str, Any]:
    return {"slopes": torch.tensor([0.5, 0.25, 0.1, 0.01], device="cuda")}


def rises() -> dict[str, Any]:
    return {"t": torch.tensor([0.5, 0.1, -0.5, -0.01], device="cuda")}


def band() -> dict[str, Any]:
    return {"n": 90, "t": torch.tensor([0.5, 0.25, 0.1, 0.01], device="cuda")}


def gates() -> dict[str, Any]:
    """Sums of the logs of forget gates, of which the last are some -180."""
    torch.manual_seed(2)
    return {"t": (torch.rand(2, 4, 457, device="cuda").log() * 0.4).cumsum(-1)}


def parts() -> dict[str, Any]:
    return {"t": torch.linspace(-3, 9, 457, device="cuda"), "m": rises()["t"]}


def holes() -> dict[str, Any]:
    torch.manual_seed(4)
    t = torch.randn(457, device="cuda")
    t[torch.rand(457, device="cuda") < 0.3] = float("-inf")
    t[100:300] = float("-inf")
    return {"t": t, "m": rises()["t"]}


def widths() -> dict[str, Any]:
    return {"w": torch.tensor([5, 60, 200, 1000], dtype=torch.int32, device="cuda")}


def documents(*lengths: int, batch: int = 1) -> Tables:
    """Ids of documents of these lengths; each sequence of a batch has them turned by one more."""

    def found() -> dict[str, Any]:
        rows = [
            torch.repeat_interleave(
                torch.arange(len(lengths)), torch.tensor(lengths[k:] + lengths[:k])
            )
            for k in range(batch)
        ]
        return {"doc": torch.stack(rows).to(torch.int32).cuda()}

    return found


def ends(first: int, second: int) -> dict[str, Any]:
    """Where the keys of both sequences end."""
    return {"kv_lens": torch.tensor([first, second], dtype=torch.int32, device="cuda")}


def allowed(rows: int, columns: int, heads: int = 1) -> dict[str, Any]:
    """A list of blocks of 128 x 128, about half of them; none for the first row of blocks."""
    drawn = torch.rand(1, heads, rows, columns, generator=torch.Generator().manual_seed(3)) < 0.5
    drawn[:, :, 0] = False
    return {"tiles": (drawn.cuda(), 128)}


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
    batch: int = 2
    dtype: torch.dtype = bf16
    transposed: bool = False  # heads behind the length in memory
    call: dict[str, Any] = field(default_factory=dict)
    tables: Tables = dict

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """q, k, v, what comes back for the output, and for the LSE."""
        torch.manual_seed(0)
        v_head_dim = self.v_head_dim or self.head_dim
        shapes = (
            (self.batch, 4, self.q_len, self.head_dim),
            (self.kv_batch, self.kv_heads, self.kv_len, self.head_dim),
            (self.kv_batch, self.kv_heads, self.kv_len, v_head_dim),
            (self.batch, 4, self.q_len, v_head_dim),
        )
        found = [torch.randn(s, device="cuda").to(self.dtype) for s in shapes]
        if self.transposed:
            found = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in found]
        return (*found, torch.randn(self.batch, 4, self.q_len, device="cuda"))

    def given(self) -> dict[str, Any]:
        """What the call brings besides: captures, offsets, ends, blocks."""
        call = {**self.call, **self.tables()}
        call |= ends(*call.pop("ends")) if "ends" in call else {}
        return call | (allowed(*call.pop("blocks")) if "blocks" in call else {})


def beyond_is_nan(x: torch.Tensor, kv_lens: torch.Tensor | None) -> torch.Tensor:
    """k or v with nan where no key is."""
    if kv_lens is None:
        return x
    beyond = torch.arange(x.shape[2], device="cuda") >= kv_lens[:, None, None]
    return torch.where(beyond[..., None], float("nan"), x)


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
    "slopes and a window": Case(BAND, 600, 620, 128, kv_heads=2, tables=band),
    "slopes and a window, narrow": Case(BAND, 600, 620, 64, kv_heads=1, tables=band),
    "slopes without a mask, fp16": Case(RISING, 1500, 1500, 128, dtype=f16, tables=rises),
    "slopes without a mask, narrow": Case(RISING, 1500, 1500, 64, kv_heads=2, tables=rises),
    "slopes and keys that end": Case(
        ALIBI, 300, 300, 128, tables=slopes, call={"ends": (1, 200), "q_offset": 7}
    ),
    "slopes and documents": Case(
        variants.alibi & DOCUMENTS,
        900,
        900,
        64,
        tables=lambda: slopes() | documents(600, 40, 260, batch=2)(),
    ),
    "forget gates": Case(GATES, 457, 457, 128, kv_heads=2, tables=gates),
    "forget gates, narrow, fp16": Case(GATES, 457, 457, 64, dtype=f16, tables=gates),
    "all that may be added": Case(PARTS, 300, 457, 128, tables=parts),
    "all that may be added, narrow": Case(PARTS, 300, 457, 64, kv_heads=1, tables=parts),
    "keys and queries of -inf": Case(PARTS, 457, 457, 128, tables=holes),
    "keys and queries of -inf, narrow": Case(PARTS, 457, 457, 64, tables=holes),
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
    "documents": Case(DOCUMENTS, 1000, 1000, 128, tables=documents(300, 5, 395, 300)),
    "documents, narrow": Case(DOCUMENTS, 1000, 1000, 64, tables=documents(300, 5, 395, 300)),
    "documents by sequence, one kv head, fp16": Case(
        DOCUMENTS, 900, 900, 128, kv_heads=1, dtype=f16, tables=documents(600, 40, 260, batch=2)
    ),
    "documents by sequence, narrow, fp16": Case(
        DOCUMENTS, 900, 900, 64, kv_heads=2, dtype=f16, tables=documents(600, 40, 260, batch=2)
    ),
    "documents both ways, ragged": Case(
        variants.document, 457, 457, 128, tables=documents(200, 257)
    ),
    "capped documents": Case(
        CAPPED_DOCUMENTS, 457, 457, 128, kv_heads=2, tables=documents(200, 257)
    ),
    "capped documents, narrow": Case(CAPPED_DOCUMENTS, 457, 457, 64, tables=documents(200, 257)),
    "documents and an offset": Case(
        DOCUMENTS, 300, 400, 128, call={"q_offset": 90}, tables=documents(150, 250)
    ),
    "documents and an offset, narrow": Case(
        DOCUMENTS, 300, 400, 64, call={"q_offset": 90}, tables=documents(150, 250)
    ),
    "scattered tiles": Case(SCATTERED, 2500, 2500, 128, kv_heads=2),
    "scattered tiles, narrow": Case(SCATTERED, 2500, 2500, 64, kv_heads=1),
    "every seventh key": Case(DILATED, 400, 400, 128),
    "several ranges": Case(TWO_RANGES, 600, 600, 128, kv_heads=2),
    "several ranges, narrow": Case(TWO_RANGES, 600, 600, 64),
    "blocks": Case(NOOP, 700, 500, 128, kv_heads=2, call={"blocks": (6, 4, 4)}),
    "blocks, narrow, causal": Case(variants.causal, 700, 700, 64, call={"blocks": (6, 6)}),
    "keys that end": Case(NOOP, 300, 400, 128, kv_heads=2, call={"ends": (70, 301)}),
    "keys that end, narrow": Case(variants.causal, 300, 300, 64, call={"ends": (1, 200)}),
    "keys that end, capped, fp16": Case(SOFTCAP, 300, 300, 128, dtype=f16, call={"ends": (300, 9)}),
    "documents whose keys end": Case(
        DOCUMENTS, 600, 600, 128, kv_heads=2, tables=documents(250, 350), call={"ends": (555, 0)}
    ),
    "documents whose keys end, narrow": Case(
        DOCUMENTS, 600, 600, 64, tables=documents(250, 350), call={"ends": (130, 600)}
    ),
}

# Head dims above 128, which have kernels of their own.
WIDE: dict[str, Case] = {
    "whole tiles": Case(NOOP, 256, 256, 256),
    "ragged, grouped heads, fp16": Case(NOOP, 200, 333, 256, kv_heads=2, dtype=f16),
    "causal, padded, one kv head": Case(variants.causal, 457, 457, 192, kv_heads=1),
    "causal, transposed, fp16": Case(variants.causal, 457, 457, 256, transposed=True, dtype=f16),
    "two head dims": Case(NOOP, 300, 300, 192, 128),
    "two head dims, the wider behind": Case(variants.causal, 300, 300, 72, 256),
    "the narrowest": Case(variants.causal, 190, 70, 136),
    "a window and an offset": Case(
        variants.sliding_window, 600, 620, 256, kv_heads=2, call={"window": 100, "q_offset": 20}
    ),
    "soft-cap": Case(SOFTCAP, 333, 333, 256, kv_heads=2),
    "offsets per sequence": Case(ALIBI, 300, 400, 256, kv_heads=2, tables=offsets),
    "slopes and a window": Case(BAND, 600, 620, 256, kv_heads=2, tables=band),
    "slopes without a mask, fp16": Case(RISING, 1500, 1500, 192, dtype=f16, tables=rises),
    "forget gates": Case(GATES, 457, 457, 256, kv_heads=2, tables=gates),
    "all that may be added": Case(PARTS, 300, 457, 192, tables=parts),
    "keys and queries of -inf": Case(PARTS, 457, 457, 256, tables=holes),
    "rows and keys without pairs": Case(GAPS, 300, 300, 256),
    "ranges by head": Case(HEADS, 500, 500, 192, kv_heads=2, tables=widths),
    "k and v for all sequences": Case(variants.causal, 300, 300, 256, kv_heads=2, kv_batch=1),
    "few queries": Case(NOOP, 17, 1000, 256),
    "one key": Case(NOOP, 100, 1, 256),
    "a score that is nan where no pair attends": Case(LOGS, 300, 300, 256),
    "a slope that is infinite at 0": Case(ROOTS, 300, 300, 256),
    "documents": Case(DOCUMENTS, 1000, 1000, 256, tables=documents(300, 5, 395, 300)),
    "documents by sequence, one kv head, fp16": Case(
        DOCUMENTS, 900, 900, 192, kv_heads=1, dtype=f16, tables=documents(600, 40, 260, batch=2)
    ),
    "capped documents, ragged": Case(
        CAPPED_DOCUMENTS, 457, 457, 256, kv_heads=2, tables=documents(200, 257)
    ),
    "documents and an offset": Case(
        DOCUMENTS, 300, 400, 256, call={"q_offset": 90}, tables=documents(150, 250)
    ),
    "scattered tiles": Case(SCATTERED, 2500, 2500, 256, kv_heads=2),
    "every seventh key": Case(DILATED, 400, 400, 256),
    "several ranges": Case(TWO_RANGES, 600, 600, 256, kv_heads=2),
    "blocks": Case(NOOP, 700, 500, 256, kv_heads=2, call={"blocks": (6, 4, 4)}),
    "blocks, causal": Case(variants.causal, 700, 700, 192, call={"blocks": (6, 6)}),
    "keys that end": Case(NOOP, 300, 400, 256, kv_heads=2, call={"ends": (70, 301)}),
    "keys that end, causal": Case(variants.causal, 300, 300, 192, call={"ends": (1, 200)}),
    "keys that end, capped, fp16": Case(SOFTCAP, 300, 300, 256, dtype=f16, call={"ends": (300, 9)}),
    "documents whose keys end": Case(
        DOCUMENTS, 600, 600, 256, kv_heads=2, tables=documents(250, 350), call={"ends": (555, 0)}
    ),
}
CASES |= {f"wide: {name}": case for name, case in WIDE.items()}


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
    agrees_with_the_oracle(CASES[name])


def agrees_with_the_oracle(case: Case) -> None:
    q, k, v, do, dlse = case.tensors()
    call = case.given()
    qkv = (q, *(beyond_is_nan(x, call.get("kv_lens")) for x in (k, v)))
    found = gradients(
        lambda *x, **more: case.variant(*x, backend="hopper", **call, **more), qkv, (do, dlse)
    )
    wanted = gradients(
        lambda *x, **more: case.variant(*x, backend="eager", **call, **more),
        (q.double(), k.double(), v.double()),
        (do.double(), dlse.double()),
    )
    for x, mine, theirs in zip(qkv, found, wanted, strict=True):
        assert mine.isfinite().all() and mine.stride() == mine.clone().stride()
        assert (mine[x.isnan()] == 0).all()
        # p and ds are rounded to 8 bits in bf16, to 11 in fp16: 2.5e-3 and 3e-4 were seen.
        limit = 5e-3 if case.dtype is bf16 else 6e-4
        assert float((mine.double() - theirs).norm() / theirs.norm()) < limit


def repeats_itself(case: Case) -> None:
    """Deterministic gradients of a case agree with the oracle, and are the same in each run."""
    q, k, v, do, dlse = case.tensors()
    call = case.given()

    def run(backend: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return gradients(
            lambda *x, **more: case.variant(*x, backend=backend, **call, **more),
            tensors,
            (do, dlse),
        )

    qkv = (q, *(beyond_is_nan(x, call.get("kv_lens")) for x in (k, v)))
    oracle = run("eager", *(x.double() for x in (q, k, v)))
    call["deterministic"] = True
    first = run("hopper", *qkv)
    for mine, theirs in zip(first, oracle, strict=True):
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 5e-3
    for _ in range(4):
        assert all(torch.equal(x, y) for x, y in zip(first, run("hopper", *qkv), strict=True))


# Of many heads, whose sums of dq take six slots in turns.
SLOTTED: dict[str, Case] = {
    "every pair": Case(NOOP, 700, 900, 128, batch=5, kv_batch=5),
    "causal, narrow": Case(variants.causal, 900, 900, 64, batch=5, kv_batch=5),
    "causal, padded, grouped heads, transposed": Case(
        variants.causal, 457, 700, 96, kv_heads=2, batch=7, kv_batch=7, transposed=True
    ),
    "a window, fp16, k and v for all sequences": Case(
        variants.sliding_window, 900, 900, 128, batch=5, kv_batch=1, dtype=f16, call={"window": 90}
    ),
    "soft-cap, narrow, one kv head": Case(SOFTCAP, 333, 333, 64, kv_heads=1, batch=9, kv_batch=9),
    "few queries": Case(NOOP, 17, 3000, 128, batch=5, kv_batch=5),
    "few keys": Case(NOOP, 3000, 100, 64, batch=5, kv_batch=5),
    "documents of very different lengths": Case(
        DOCUMENTS,
        1500,
        1500,
        128,
        batch=5,
        kv_batch=5,
        tables=documents(5, 1300, 3, 1, 191, batch=5),
    ),
    "documents, every pair, narrow": Case(
        variants.document,
        900,
        900,
        64,
        kv_heads=2,
        batch=7,
        kv_batch=7,
        tables=documents(350, 5, 545, batch=7),
    ),
}


@pytest.fixture
def six_slots(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sums of dq for the fewest heads, so that programs have to wait; how many heads there were."""
    asked: list[int] = []

    def slots(heads: int, tiles: int, processors: int) -> int:
        asked.append(heads)
        return 6

    monkeypatch.setattr(backward_hopper, "slots_of", slots)
    return asked


@pytest.mark.parametrize("name", SLOTTED)
def test_heads_take_the_sums_of_others(name: str, six_slots: list[int]) -> None:
    case = SLOTTED[name]
    agrees_with_the_oracle(case)
    assert six_slots == [case.batch * case.kv_heads] and six_slots[0] > 8


@pytest.mark.parametrize(
    "name", ["every pair", "causal, narrow", "documents of very different lengths"]
)
def test_the_same_bits_where_heads_take_the_sums_of_others(name: str, six_slots: list[int]) -> None:
    case = SLOTTED[name]
    repeats_itself(case)
    assert set(six_slots) == {20}


@pytest.mark.parametrize("head_dim", [128, 256])
def test_rows_and_keys_without_pairs_have_gradients_of_exactly_zero(head_dim: int) -> None:
    q, k, v, do, dlse = Case(GAPS, 300, 300, head_dim).tensors()
    dq, dk, dv = gradients(
        lambda *x, **more: GAPS(*x, backend="hopper", **more), (q, k, v), (do, dlse)
    )
    assert (
        (dq[:, :, :50] == 0).all() and (dk[:, :, 250:] == 0).all() and (dv[:, :, 250:] == 0).all()
    )


LEARNED: dict[str, Case] = {
    "forget gates": Case(variants.forget_gate & variants.causal, 457, 457, 128, kv_heads=2),
    "keys, one kv head, fp16": Case(KEY_BIAS, 300, 333, 128, dtype=f16, kv_heads=1),
    "keys, narrow": Case(KEY_BIAS, 300, 333, 64),
    "keys that end": Case(KEY_BIAS, 300, 400, 128, call={"ends": (301, 70)}),
    "queries, narrow": Case(QUERY_BIAS, 300, 333, 64),
    "queries, wide": Case(QUERY_BIAS, 300, 333, 256),
    "forget gates, wide": Case(variants.forget_gate & variants.causal, 457, 457, 256, kv_heads=2),
    "keys, wide, one kv head, fp16": Case(KEY_BIAS, 300, 333, 192, dtype=f16, kv_heads=1),
    "keys that end, wide": Case(KEY_BIAS, 300, 400, 256, call={"ends": (301, 70)}),
    "keys of documents, wide": Case(
        variants.forget_gate & DOCUMENTS, 600, 600, 256, tables=documents(250, 5, 345)
    ),
    "keys that nobody sees, wide": Case(
        parse("variant v(t: f32[B, H, Lk]) { score s + t[b, h, j] mask j <= i - 50 }"),
        300,
        300,
        256,
        kv_heads=2,
    ),
}


@pytest.mark.parametrize("name", LEARNED)
def test_what_is_added_per_query_and_per_key_learns_here(name: str) -> None:
    case = LEARNED[name]
    q, k, v, do, dlse = case.tensors()
    call = case.given()
    length = case.q_len if case.variant is QUERY_BIAS else case.kv_len
    bias = -torch.rand(2, 4, length, device="cuda").cumsum(-1) / 8
    capture = next(c for c in case.variant._program.captures if c.name not in call)

    def run(backend: str, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        learned = bias.detach().clone().requires_grad_()
        given = {**call, capture.name: learned}
        out, lse = case.variant(*leaves, backend=backend, return_lse=True, **given, **options)
        back = [do.to(out.dtype), dlse.to(lse.dtype)]
        return list(torch.autograd.grad([out, lse], [*leaves, learned], back))

    theirs = run("eager", torch.float64)
    for options in ({}, {"deterministic": True}):
        for mine, wanted in zip(run("hopper", case.dtype, **options), theirs, strict=True):
            assert float((mine.double() - wanted).norm() / wanted.norm()) < 6e-3


# What is summed of each query, with a slope of its own.
WEIGHTED_QUERY_BIAS = parse(
    "variant weighted(t: f32[B, H, Lq]) { score s + 0.01 * t[b, h, i] * (i - j) mask j <= i }"
)
TEMPERATURE = parse("variant temperature(t: f32[H]) { score s * t[h] mask j <= i }")
NUMBER = parse("variant number(t: float) { score s * t }")
BOTH = parse("variant both(t: f32[H], a: f32[H]) { score s * t[h] - a[h] * (i - j) mask j <= i }")
LEARNED_LOGS = parse("variant logs(t: f32[H]) { score s + t[h] * log(1.0 + (i - j)) mask j <= i }")
LEARNED_GAPS = parse("variant gaps(t: f32[H]) { score s - t[h] * (i - j) mask j <= i - 50 }")
CAPPED_ALIBI = variants.alibi.then(variants.softcap) & variants.causal


def drawn(**shapes: tuple[int, ...]) -> Tables:
    """Tables between 0 and 1."""

    def found() -> dict[str, Any]:
        make = torch.Generator().manual_seed(1)
        return {name: torch.rand(shape, generator=make).cuda() for name, shape in shapes.items()}

    return found


def both(*several: Tables) -> Tables:
    return lambda: {name: x for tables in several for name, x in tables().items()}


SLOPES: dict[str, Case] = {
    "slopes, grouped heads": Case(ALIBI, 457, 457, 256, kv_heads=2, tables=drawn(slopes=(4,))),
    "slopes and an offset, fp16": Case(
        ALIBI, 300, 400, 192, dtype=f16, call={"q_offset": 90}, tables=drawn(slopes=(4,))
    ),
    "slopes, offsets per sequence": Case(ALIBI, 300, 400, 256, kv_heads=2, tables=offsets),
    "slopes, capped": Case(CAPPED_ALIBI, 333, 333, 256, kv_heads=1, tables=drawn(slopes=(4,))),
    "slopes, documents": Case(
        variants.alibi & DOCUMENTS,
        600,
        600,
        256,
        kv_heads=2,
        tables=both(documents(250, 5, 345), drawn(slopes=(4,))),
    ),
    "slopes, documents whose keys end": Case(
        variants.alibi & DOCUMENTS,
        600,
        600,
        136,
        tables=both(documents(250, 350), drawn(slopes=(4,))),
        call={"ends": (555, 0)},
    ),
    "slopes, keys that end": Case(
        ALIBI, 300, 300, 256, tables=drawn(slopes=(4,)), call={"ends": (1, 200)}
    ),
    "slopes, blocks": Case(
        ALIBI, 700, 700, 256, tables=drawn(slopes=(4,)), call={"blocks": (6, 6)}
    ),
    "temperatures": Case(TEMPERATURE, 457, 457, 256, kv_heads=2, tables=drawn(t=(4,))),
    "temperatures, fp16": Case(TEMPERATURE, 190, 70, 160, dtype=f16, tables=drawn(t=(4,))),
    "a number": Case(NUMBER, 200, 333, 256, tables=drawn(t=())),
    "weighted, per query": Case(WEIGHTED_QUERY_BIAS, 300, 333, 256, tables=drawn(t=(2, 4, 300))),
    "both together": Case(BOTH, 333, 333, 256, kv_heads=2, tables=drawn(t=(4,), a=(4,))),
    "logarithms": Case(LEARNED_LOGS, 300, 300, 256, tables=drawn(t=(4,))),
    "rows without keys": Case(LEARNED_GAPS, 300, 300, 256, tables=drawn(t=(4,))),
}


SLOPES |= {
    f"{name}, head dim {head_dim}": replace(SLOPES[name], head_dim=head_dim)
    for name, head_dim in (
        ("slopes, grouped heads", 128),
        ("slopes, grouped heads", 64),
        ("slopes, documents whose keys end", 128),
        ("slopes, documents", 64),
        ("temperatures", 96),
        ("temperatures, fp16", 64),
        ("weighted, per query", 64),
        ("slopes, capped", 64),
        ("rows without keys", 64),
    )
}


@pytest.mark.parametrize("name", SLOPES)
def test_slopes_and_temperatures_learn_here(name: str) -> None:
    case = SLOPES[name]
    q, k, v, do, dlse = case.tensors()
    call = case.given()
    learned = [n for n, x in call.items() if torch.is_tensor(x) and x.is_floating_point()]
    qkv = (q, *(beyond_is_nan(x, call.get("kv_lens")) for x in (k, v)))

    def run(backend: str, tensors: tuple[torch.Tensor, ...], **more: Any) -> list[torch.Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        given = {n: call[n].clone().requires_grad_() for n in learned}
        out, lse = case.variant(
            *leaves, backend=backend, return_lse=True, **{**call, **given}, **more
        )
        back = [do.to(out.dtype), dlse.to(lse.dtype)]
        return list(torch.autograd.grad([out, lse], [*leaves, *given.values()], back))

    theirs = run("eager", (q.double(), k.double(), v.double()))
    first = run("hopper", qkv, deterministic=True)
    for found in (run("hopper", qkv), first):
        for mine, wanted in zip(found, theirs, strict=True):
            assert float((mine.double() - wanted).norm() / wanted.norm()) < 6e-3
    for mine, again in zip(first, run("hopper", qkv, deterministic=True), strict=True):
        assert torch.equal(mine, again)


@pytest.mark.parametrize("name", ["weights per key", "distances"])
def test_learned_captures_may_take_the_portable_backward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of a key are summed along with dk, and reads of distances would spill registers."""
    monkeypatch.undo()
    q, k, v, do, _ = Case(NOOP, 300, 300, 64).tensors()
    found = []
    for backend in ("hopper", "eager"):
        make = torch.Generator().manual_seed(1)
        if name == "weights per key":
            learned = torch.rand(300, generator=make).cuda().requires_grad_()
            out = WEIGHTED_KEYS(q, k, v, t=learned, backend=backend)
        else:
            learned = torch.randn(4, 129, generator=make).cuda().requires_grad_()
            attn = variants.relative_bias & variants.causal
            out = attn(q, k, v, table=learned, max_distance=64, backend=backend)
        found += torch.autograd.grad(out, learned, do)
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 1e-2


# More programs than multiprocessors: those of a head wait for one another.
REPEATED = {
    "wide": Case(variants.causal, 2500, 2500, 256, kv_heads=2),
    "wide, documents": Case(DOCUMENTS, 2000, 2000, 192, tables=documents(1100, 5, 695, 200)),
    "every pair": Case(NOOP, 2400, 2500, 128, kv_heads=2),
    "every pair, narrow": Case(NOOP, 2560, 2300, 64),
    "causal": Case(variants.causal, 2500, 2500, 128),
    "causal, narrow, one kv head, fp16": Case(
        variants.causal, 2500, 2500, 64, kv_heads=1, dtype=f16
    ),
    "a window": Case(variants.sliding_window, 2500, 2500, 128, kv_heads=2, call={"window": 300}),
    "a window, narrow": Case(variants.sliding_window, 2500, 2500, 64, call={"window": 700}),
    "capped": Case(SOFTCAP, 2000, 2000, 128),
    "ranges by head": Case(HEADS, 2000, 2000, 128, kv_heads=2, tables=widths),
    "offsets per sequence": Case(ALIBI, 1900, 2000, 64, kv_heads=2, tables=offsets),
    "documents by sequence": Case(
        DOCUMENTS, 2500, 2500, 128, tables=documents(1300, 5, 695, 500, batch=2)
    ),
    "documents, narrow": Case(
        DOCUMENTS, 2500, 2500, 64, kv_heads=2, tables=documents(1300, 5, 695, 500)
    ),
    "scattered tiles": Case(SCATTERED, 2500, 2500, 128, kv_heads=2),
    "several ranges": Case(TWO_RANGES, 2000, 2000, 64),
    "bands": Case(BANDS, 2500, 2500, 128, kv_heads=2),
    "bands, narrow": Case(BANDS, 2500, 2500, 64),
    "slopes": Case(ALIBI, 2500, 2500, 128, tables=lambda: {"slopes": torch.rand(4).cuda()}),
    "rows and keys without pairs": Case(GAPS, 2000, 2000, 128),
    "blocks": Case(variants.causal, 2000, 2000, 128, call={"blocks": (16, 16, 4)}),
    "keys that end": Case(NOOP, 2000, 2500, 128, kv_heads=2, call={"ends": (70, 2301)}),
    "documents whose keys end": Case(
        DOCUMENTS, 2500, 2500, 64, tables=documents(1250, 1250), call={"ends": (2000, 0)}
    ),
}


@pytest.mark.parametrize("name", REPEATED)
def test_the_same_bits_where_they_are_asked_for(name: str) -> None:
    repeats_itself(REPEATED[name])


@pytest.mark.parametrize("variant", [NOOP, variants.causal], ids=["every pair", "causal"])
def test_the_same_bits_of_a_head_with_more_tiles_than_multiprocessors(variant: Variant) -> None:
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 1, 40_000, 64, device="cuda").to(bf16) for _ in range(4))
    back = do, torch.zeros(1, 1, 40_000, device="cuda")

    def run(deterministic: bool) -> list[torch.Tensor]:
        return gradients(
            lambda *x, **more: variant(*x, deterministic=deterministic, **more), (q, k, v), back
        )

    first, unordered = run(True), run(False)
    for mine, theirs in zip(first, unordered, strict=True):
        assert float((mine - theirs).float().norm() / theirs.float().norm()) < 5e-3
    for _ in range(2):
        assert all(torch.equal(x, y) for x, y in zip(first, run(True), strict=True))

"""The Hopper forward beside the oracle, on an sm_90 GPU: ragged shapes, holes, poisoned memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import scoremod
from scoremod import Variant, attend_hopper, parse, variants
from scoremod.binding import Bound
from scoremod.blocks import read_blocks
from scoremod.inputs import Inputs, check_inputs
from scoremod.plan import Typed
from scoremod.variants import causal, document

NOOP = parse("variant noop() { mask True }")
WINDOW = variants.sliding_window
STRIPES = parse("variant stripes() { mask (j // 128) % 2 == 0 }")
BOTH_KINDS = parse("variant both() { mask (j // 128) % 2 == 0 or (j % 3 == 0 and j <= i) }")
DILATED = parse("variant dilated() { mask j <= i and (i - j) % 4 == 0 }")
RANGES = parse("variant ranges() { mask j < 40 or (j >= i - 30 and j <= i + 9) or j > 900 }")
HOLES = parse("variant holes() { mask (i // 150) % 2 == 0 and (i - j) % 2 == 0 }")
OF_HEADS = parse("variant of_heads() { mask (i * 7 + j * 13 + h * 3) % 5 != b }")
GATES = parse("variant gates(t: f32[H, L]) { score s + t[h, i] - t[h, j] mask j <= i }")
KEYS = parse("variant keys(t: f32[L]) { score 0.5 * s + t[j] }")
QUERIES = parse("variant queries(t: f32[L]) { score s + t[i] }")
PARTS = parse("variant parts(t: f32[L], m: f32[H]) { score s - m[h] * (i - j) + t[j] - t[i] }")
MIXED = parse("variant mixed() { mask (i * 7 + j * 13) % 3 != 0 score s * 0.5 - 0.25 * j }")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call."""

    batch: int = 2
    q_heads: int = 4
    kv_heads: int = 2
    q_len: int = 700
    kv_len: int = 700
    head_dim: int = 64
    v_head_dim: int = 64


@dataclass(frozen=True)
class Case:
    """A call; its captures and options are made on a device, from its sizes."""

    variant: Variant
    sizes: Sizes = field(default_factory=Sizes)
    captures: Callable[[Sizes], dict[str, Any]] = lambda sizes: {}
    options: Callable[[Sizes], dict[str, Any]] = lambda sizes: {}
    prepared: bool = False
    dtype: torch.dtype = torch.bfloat16

    def values(self, device: str) -> dict[str, Any]:
        """The captures."""
        return _on(device, self.captures(self.sizes))

    def call(self, device: str) -> dict[str, Any]:
        """The options of the call."""
        return _on(device, self.options(self.sizes))

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v; what lies beyond kv_lens is nan."""
        make, sizes = torch.Generator().manual_seed(7), self.sizes
        q = torch.randn(sizes.batch, sizes.q_heads, sizes.q_len, sizes.head_dim, generator=make)
        k = torch.randn(sizes.batch, sizes.kv_heads, sizes.kv_len, sizes.head_dim, generator=make)
        v = torch.randn(sizes.batch, sizes.kv_heads, sizes.kv_len, sizes.v_head_dim, generator=make)
        for b, end in enumerate(self.options(sizes).get("kv_lens", ())):
            k[b, :, max(0, int(end)) :] = v[b, :, max(0, int(end)) :] = float("nan")
        return q.to(device, self.dtype), k.to(device, self.dtype), v.to(device, self.dtype)


def _on(device: str, x: Any) -> Any:
    if isinstance(x, dict):
        return {name: _on(device, part) for name, part in x.items()}
    if isinstance(x, tuple):
        return tuple(_on(device, part) for part in x)
    return x.to(device) if isinstance(x, Tensor) else x


def documents(mean: int, beyond: int = 0) -> Callable[[Sizes], dict[str, Any]]:
    """Documents of up to 2 * mean tokens; `beyond` is how many positions queries reach further."""

    def captures(sizes: Sizes) -> dict[str, Any]:
        make = torch.Generator().manual_seed(3)
        starts = torch.rand(sizes.batch, sizes.kv_len + beyond, generator=make) < 1 / mean
        return {"doc": starts.int().cumsum(1).to(torch.int32)}

    return captures


def lens(*ends: int) -> Callable[[Sizes], dict[str, Any]]:
    return lambda sizes: {"kv_lens": torch.tensor(ends, dtype=torch.int32)}


def offsets(*values: int, **more: Any) -> Callable[[Sizes], dict[str, Any]]:
    return lambda sizes: {"q_offset": torch.tensor(values, dtype=torch.int32), **more}


def gates(sizes: Sizes) -> dict[str, Any]:
    """Sums of the logs of forget gates, of which the last are some -300."""
    make = torch.Generator().manual_seed(2)
    logs = torch.rand(sizes.q_heads, sizes.kv_len, generator=make).log() * 0.4
    return {"t": logs.cumsum(1)}


def holes(sizes: Sizes) -> dict[str, Any]:
    """Numbers by place, of which a third is -inf, and all of 300 to 600."""
    make = torch.Generator().manual_seed(4)
    t = torch.randn(max(sizes.q_len, sizes.kv_len), generator=make)
    t[torch.rand(t.shape, generator=make) < 0.3] = float("-inf")
    t[300:600] = float("-inf")
    return {"t": t}


def blocks(size: int, heads: int = 1) -> Callable[[Sizes], dict[str, Any]]:
    """Half of the blocks, drawn; the second row of blocks has none."""

    def options(sizes: Sizes) -> dict[str, Any]:
        make = torch.Generator().manual_seed(5)
        shape = (1, heads, -(-sizes.q_len // size), -(-sizes.kv_len // size))
        allowed = torch.rand(shape, generator=make) < 0.5
        allowed[:, :, 1] = False
        return {"tiles": (allowed, size)}

    return options


RAGGED = Sizes(q_len=333, kv_len=900)
WIDE = Sizes(head_dim=128, v_head_dim=128)
LONG = Sizes(batch=1, q_heads=2, kv_heads=1, q_len=300, kv_len=2600)
SOFT = variants.softcap & document & causal
CASES: dict[str, Case] = {
    "documents": Case(document & causal, captures=documents(100)),
    "short documents, prepared": Case(document, WIDE, documents(9), prepared=True),
    "documents at an offset": Case(
        document & causal, RAGGED, documents(200), lambda sizes: {"q_offset": 567}
    ),
    "documents at offsets of batches": Case(
        document & causal, RAGGED, documents(200), offsets(0, 567), prepared=True
    ),
    "documents and scores": Case(
        SOFT.then(variants.alibi),
        captures=lambda sizes: {
            **documents(150)(sizes),
            "slopes": variants.alibi_slopes(sizes.q_heads),
        },
    ),
    "documents, head dim 256": Case(
        document & causal, Sizes(head_dim=256, v_head_dim=256), documents(150)
    ),
    "documents, odd head dims": Case(
        document & causal, Sizes(head_dim=72, v_head_dim=128), documents(150), dtype=torch.float16
    ),
    "causal": Case(causal, WIDE, options=lambda sizes: {"q_offset": 20}),
    "causal soft-cap": Case(variants.softcap & causal, Sizes(q_len=457), dtype=torch.float16),
    "causal ALiBi": Case(
        variants.alibi & causal,
        Sizes(q_len=128),
        lambda sizes: {"slopes": variants.alibi_slopes(sizes.q_heads)},
    ),
    # Places of 70,000 tokens, whose products with a slope would round.
    "ALiBi far from the start": Case(
        variants.alibi & causal,
        Sizes(batch=1, q_heads=2, kv_heads=1, q_len=300, kv_len=70_000),
        lambda sizes: {"slopes": torch.tensor([0.7, 0.001])},
        lambda sizes: {"q_offset": 69_700},
    ),
    "forget gates": Case(GATES, WIDE, gates),
    "forget gates, narrow, fp16": Case(GATES, captures=gates, dtype=torch.float16),
    "forget gates, head dim 256": Case(GATES, Sizes(head_dim=256, v_head_dim=256), gates),
    "forget gates of documents": Case(
        GATES & document, captures=lambda sizes: gates(sizes) | documents(150)(sizes)
    ),
    "keys that are added to": Case(KEYS, RAGGED, holes),
    "keys that are added to, head dim 128": Case(KEYS, WIDE, holes),
    "queries that are added to": Case(QUERIES, WIDE, holes),
    "all that may be added": Case(
        PARTS,
        captures=lambda sizes: {
            "t": torch.linspace(-3, 9, sizes.kv_len),
            "m": torch.tensor([0.5, 0.1, -0.01, 0.0]),
        },
    ),
    "every pair": Case(NOOP, Sizes(q_len=457, head_dim=256, v_head_dim=256)),
    # More than one turn a multiprocessor.
    "documents of many heads": Case(
        document & causal, Sizes(q_heads=24, kv_heads=12), documents(150), prepared=True
    ),
    "many heads": Case(NOOP, Sizes(q_heads=24, kv_heads=12, head_dim=128, v_head_dim=128)),
    "several ranges": Case(RANGES, RAGGED),
    "prefix": Case(
        variants.prefix_lm, captures=lambda sizes: {"prefix": torch.tensor([300, 0]).int()}
    ),
    "sinks": Case(variants.sink_window, RAGGED, lambda sizes: {"window": 100}),
    "every fourth key": Case(DILATED, WIDE),
    "more runs than a record holds": Case(STRIPES, LONG, prepared=True),
    "such runs of both kinds": Case(BOTH_KINDS, LONG),
    "queries without keys": Case(HOLES, WIDE),
    "of batch and head": Case(OF_HEADS, Sizes(q_len=150, kv_len=300)),
    "a score that reads j": Case(MIXED, RAGGED),
    "blocks": Case(NOOP, RAGGED, options=blocks(128)),
    "causal blocks of heads": Case(causal, WIDE, options=blocks(256, heads=4)),
    "scattered blocks": Case(NOOP, LONG, options=blocks(128)),
    "lengths": Case(NOOP, Sizes(batch=5, kv_len=600), options=lens(0, 1, 600, 300, 384)),
    "lengths, head dim 128": Case(
        NOOP, Sizes(batch=3, head_dim=128, v_head_dim=128), options=lens(129, 700, 127)
    ),
    "lengths, head dim 256, padded values": Case(
        NOOP, Sizes(batch=3, head_dim=192, v_head_dim=72), options=lens(65, 701, 5)
    ),
    "lengths of many heads": Case(
        causal, Sizes(batch=3, q_heads=16, kv_heads=8), options=lens(77, 500, 640)
    ),
    "lengths and causal": Case(
        causal, Sizes(batch=3, head_dim=128, v_head_dim=128), options=lens(0, 500, 77)
    ),
    "lengths, a window and offsets": Case(
        WINDOW,
        Sizes(batch=3, q_len=200),
        lambda sizes: {"window": 150},
        lambda sizes: {**lens(0, 500, 377)(sizes), **offsets(500, 0, 250)(sizes)},
    ),
    "lengths and documents": Case(
        document & causal, Sizes(batch=3), documents(150), lens(0, 500, 77), prepared=True
    ),
    "a window between two keys": Case(WINDOW, RAGGED, lambda sizes: {"window": 130}),
    "few queries": Case(document & causal, Sizes(q_len=17, kv_len=700), documents(60)),
    "one key": Case(NOOP, Sizes(q_len=100, kv_len=1)),
}


# Those whose kv tiles the kernel finds itself.
RANGES_OF_KEYS = {
    "prefix",
    "lengths",
    "lengths, head dim 128",
    "lengths, head dim 256, padded values",
    "lengths and causal",
    "lengths, a window and offsets",
    "a window between two keys",
    "one key",
    "causal",
    "causal soft-cap",
    "causal ALiBi",
    "forget gates",
    "forget gates, narrow, fp16",
    "forget gates, head dim 256",
    "keys that are added to",
    "keys that are added to, head dim 128",
    "queries that are added to",
    "all that may be added",
    "ALiBi far from the start",
    "every pair",
    "many heads",
    "lengths of many heads",
}


def checked(case: Case, device: str) -> tuple[Typed, Inputs, tuple[Bound, ...]]:
    """A case as backends take it."""
    q, k, v = case.tensors(device)
    call = case.call(device)
    given, offset, ends = (call.get(name) for name in ("tiles", "q_offset", "kv_lens"))
    inputs = check_inputs(
        q, k, v, scale=None, q_offset=0 if offset is None else offset, kv_lens=ends,
        precision="auto",
    )  # fmt: skip
    if given is not None:
        sizes = (*q.shape[:3], k.shape[2])
        inputs = replace(inputs, tiles=read_blocks(given, *sizes, q.device))
    program, bound = case.variant._bind(case.values(device), inputs.sizes, q.device)
    return case.variant._type(program, bound), inputs, bound


@pytest.mark.parametrize("name", CASES)
def test_each_is_a_call_for_hopper(name: str) -> None:
    program, inputs, bound = checked(CASES[name], "cpu")
    assert attend_hopper.unfit(program, inputs) == ""
    stored = attend_hopper.options(program, inputs, bound).stored
    assert stored == (name not in RANGES_OF_KEYS)


# -- on a GPU ----------------------------------------------------------------------------------

LISTED = {
    size: parse(f"variant listed(allowed: bool[H, Rows, Columns]) {{ mask allowed[h, i // {size}, "
    f"j // {size}] }}")
    for size in (128, 256)
}  # fmt: skip


def wanted(case: Case) -> tuple[Tensor, Tensor]:
    """What the oracle says; it is given 0 where the memory is nan."""
    q, k, v = (x.float().nan_to_num(0.0) for x in case.tensors("cuda"))
    variant, values, call = case.variant, case.values("cuda"), case.call("cuda")
    if "tiles" in call:
        allowed, size = call.pop("tiles")
        values["allowed"] = allowed[0].expand(case.sizes.q_heads, -1, -1)
        variant = variant & LISTED[size]
    found: tuple[Tensor, Tensor] = variant.eager(q, k, v, return_lse=True, **values, **call)
    return found


def prepared(case: Case, values: dict[str, Any], call: dict[str, Any]) -> dict[str, Any]:
    """The call with its structure, for calls that make it before."""
    sizes = case.sizes
    tiles = case.variant.prepare(
        sizes.q_len, sizes.kv_len, batch=sizes.batch, q_heads=sizes.q_heads, device="cuda",
        **values, **call,
    )  # fmt: skip
    return {**call, "tiles": tiles}


def on_hopper() -> None:
    if not attend_hopper.is_hopper(scoremod.launch.device()):
        pytest.skip("not a Hopper GPU")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_the_oracle(name: str) -> None:
    on_hopper()
    case = CASES[name]
    values, call = case.values("cuda"), case.call("cuda")
    if case.prepared:
        call = prepared(case, values, call)
    exact, exact_lse = wanted(case)
    tensors = case.tensors("cuda")
    for backend in ("hopper", None, None):  # the last call is a warm one
        out, lse = case.variant(*tensors, backend=backend, return_lse=True, **values, **call)
        torch.testing.assert_close(out.float(), exact.float(), rtol=2.5e-2, atol=2.5e-2)
        torch.testing.assert_close(lse, exact_lse.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_a_structure_follows_its_documents() -> None:
    on_hopper()
    attn, case = document & causal, CASES["documents"]
    q, k, v = case.tensors("cuda")
    first, second = (documents(n)(case.sizes)["doc"].cuda() for n in (100, 60))
    doc = first.clone()
    tiles = attn.prepare(700, 700, batch=2, doc=doc)
    expected = [attn(q, k, v, doc=x) for x in (first, second)]
    assert torch.equal(attn(q, k, v, doc=doc, tiles=tiles), expected[0])
    doc.copy_(second)
    tiles.refresh()
    assert torch.equal(attn(q, k, v, doc=doc, tiles=tiles), expected[1])
    assert not torch.equal(*expected)


@pytest.mark.gpu
def test_gradients_follow_a_forward_with_a_structure() -> None:
    on_hopper()
    attn, case = document & causal, CASES["lengths and documents"]
    ends, values = case.call("cuda")["kv_lens"], case.values("cuda")
    exact, half = (
        [x.nan_to_num(0.0).to(dtype).requires_grad_() for x in case.tensors("cuda")]
        for dtype in (torch.float32, torch.bfloat16)
    )
    attn.eager(*exact, kv_lens=ends, **values).sum().backward()
    attn(*half, kv_lens=ends, **values).sum().backward()
    for x, y in zip(half, exact, strict=True):
        torch.testing.assert_close(x.grad.float(), y.grad, rtol=5e-2, atol=5e-2)

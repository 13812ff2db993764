"""How many kernels a sweep of calls takes: new lengths, batches and values never compile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bundle import Gpu, uncompiled

from scoremod import Variant, attend_hopper, attend_triton, cache, compile_count, variants
from scoremod.attend_triton import options
from scoremod.inputs import check_inputs
from scoremod.plan_triton import RECORD, tiles_of
from scoremod.structure import structure_key
from scoremod.target import parse_target

LENGTHS = [128 + 7 * n for n in range(29)] + [4096]
BATCHES = (1, 2, 3, 5, 8)


def kernels(
    variant: Variant,
    calls: Iterator[tuple[int, int, dict[str, Any]]],
    backend: Any = attend_triton,
) -> set[Any]:
    """What decides each kernel that the calls (batch, length, captures) would compile."""
    found: set[Any] = set()
    for batch, length, captures in calls:
        q = torch.empty(batch, 4, length, 64, dtype=torch.bfloat16)
        k = q[:, :2]
        inputs = check_inputs(q, k, k, scale=None, q_offset=0, kv_lens=None, precision="auto")
        program, bound = variant._bind(captures, inputs.sizes, q.device)
        known = variant._type(program, bound)
        chosen = backend.options(known, inputs, bound)
        found.add(backend.forward_key(known, chosen))
        if chosen.stored:
            found.add(structure_key(known.only_mask, chosen, (64, 64)))
    return found


def sweep(capture: str, values: list[Any]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    for n, value in enumerate(values):
        yield BATCHES[n % 5], LENGTHS[n % 30], {capture: value}


@pytest.mark.parametrize(
    ("variant", "capture", "values"),
    [
        (variants.sliding_window, "window", list(range(1, 61))),
        (variants.softcap & variants.causal, "cap", [0.5 * n for n in range(1, 61)]),
        (variants.alibi & variants.causal, "slopes", [torch.rand(4) for _ in range(60)]),
        (variants.document & variants.causal, "doc", [torch.full((1, 1), n) for n in range(60)]),
        (variants.prefix_lm, "prefix", [torch.full((8,), n) for n in range(60)]),
    ],
    ids=["window", "softcap", "alibi", "document", "prefix"],
)
@pytest.mark.parametrize("backend", [attend_triton, attend_hopper], ids=["triton", "hopper"])
def test_a_sweep_takes_two_kernels_at_most(
    variant: Variant, capture: str, values: list[Any], backend: Any
) -> None:
    assert len(kernels(variant, sweep(capture, values), backend)) <= 2


def test_documents_compile_twice_and_not_for_new_tables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The attention, and the one kernel that makes the structure it reads."""
    monkeypatch.setenv("SCOREMOD_CACHE_DIR", str(tmp_path))
    uncompiled(monkeypatch)
    gpu, attn = Gpu(monkeypatch, "cuda:90"), variants.document & variants.sliding_window
    cache.forget()
    before = compile_count()
    for n in range(60):
        q = torch.empty(BATCHES[n % 5], 4, LENGTHS[n % 30], 64, dtype=torch.bfloat16)
        doc = torch.full((1, 4096), n)
        attn(q, q[:, :2], q[:, :2], doc=doc, window=n + 1, backend="triton")
    cache.forget()  # what only stands for kernels
    assert compile_count() - before == 2
    assert [k.entry for k in gpu.take()] == 60 * [*2 * ["tile_structure"], "attention_fwd"]


def test_names_and_formatting_share_a_kernel() -> None:
    from scoremod import parse

    one = parse("variant one(w: int) { mask i - j < w and j <= i }")
    other = parse("variant other(width: int) {\n  # the same\n  mask (i - j) < width and j <= i\n}")
    calls = [(2, 256, {"w": 5})], [(2, 256, {"width": 7})]
    assert kernels(one, iter(calls[0])) == kernels(other, iter(calls[1]))


def test_what_differs_does_not_share() -> None:
    from scoremod import parse

    texts = [
        "variant v(w: int) { mask i - j < w }",
        "variant v(w: int) { mask i - j <= w }",
        "variant v(w: int) { mask j - i < w }",
        "variant v(w: int) { mask i - j < w score s * 2.0 }",
        "variant v(w: int) { mask i - j < w score s * 3.0 }",
    ]
    found = [kernels(parse(t), iter([(1, 256, {"w": 5})])) for t in texts]
    assert len(set.union(*found)) == sum(len(f) for f in found)


@pytest.mark.parametrize(("length", "tile"), [(8192, (64, 32)), (10**6, (64, 64))])
def test_a_long_sequence_has_coarser_tiles(length: int, tile: tuple[int, int]) -> None:
    """A structure for a million tokens stays below 64 MB."""
    q = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16).expand(1, 1, length, 64)
    inputs = check_inputs(q, q, q, scale=None, q_offset=0, kv_lens=None, precision="auto")
    doc = torch.zeros(1, 1, dtype=torch.int32)
    known = variants.document._type(*variants.document._bind({"doc": doc}, inputs.sizes, q.device))
    chosen = options(known, inputs, ())
    found = tiles_of(known, chosen, parse_target("cuda:90"))[0]
    assert (found.block_m, found.block_n) == tile
    rows, columns = -(-length // found.block_m), -(-length // found.block_n)
    assert 4 * rows * (RECORD + 2 * -(-columns // 32)) < 64e6

"""Run the CPU backend: render and compile once, plan the kv tiles on the host, fill the output."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from .analysis.tiles import EMPTY, FULL, PARTIAL, classify
from .backends.cpu import CPU
from .binding import ANY_LENGTH, Bound
from .blocks import Blocks
from .gradients import Answer
from .inputs import Inputs, as_numpy, bound_of, dtype_of, empty_like_q
from .plan import CpuPlan, Typed, cpu_plan
from .render import render
from .structure import Sizes
from .tiles import Tiles

# Scores that one tile may hold, over all batches and heads: 16 MiB of float32.
TILE_ELEMENTS = 2**22
# Structures that are classified one by one; beyond it, every tile is masked.
MAX_STRUCTURES = 256

P = ParamSpec("P")
R = TypeVar("R")
Schedule = list[tuple[int, int, list[tuple[int, int, bool]]]]


def without_autocast(run: Callable[P, R]) -> Callable[P, R]:
    """Leave products in the precision of their operands; q, k and v are cast already."""

    @functools.wraps(run)
    def plain(*args: P.args, **keywords: P.kwargs) -> R:
        with torch.autocast("cpu", enabled=False), torch.no_grad(), products_in_float32():
            return run(*args, **keywords)

    return plain


@contextlib.contextmanager
def products_in_float32() -> Iterator[None]:
    """Keep oneDNN from bf16, which `set_float32_matmul_precision` allows on CPUs that have it."""
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@without_autocast
def attend(program: Typed, inputs: Inputs, bound: tuple[Bound, ...]) -> Answer:
    """Attention on the CPU; no residual, as the backward's sums are of float32."""
    float64 = inputs.q.dtype is torch.float64
    kernel = kernel_of(
        program,
        float64=float64,
        has_kv_lens=inputs.kv_lens is not None,
        has_blocks=isinstance(inputs.tiles, Blocks),
    )
    q, k, v = inputs.q, inputs.k, inputs.v
    batch, kv_heads = q.shape[0], k.shape[1]
    out = empty_like_q(q, v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=torch.float64 if float64 else torch.float32)
    heads = (batch, kv_heads, inputs.gqa_group)
    kernel(
        q.detach().view(*heads, *q.shape[2:]),
        k.detach().expand(batch, -1, -1, -1),
        v.detach().expand(batch, -1, -1, -1),
        out.view(*heads, *out.shape[2:]),
        lse.view(*heads, lse.shape[2]),
        inputs.scale,
        per_batch(inputs.q_offset),
        per_batch(inputs.kv_lens),
        schedule(program, inputs, bound),
        user_blocks(inputs),
        *(argument(x, float64=float64) for x in bound),
    )
    return Answer(out, lse)


def user_blocks(inputs: Inputs) -> tuple[torch.Tensor, int, int] | None:
    """The user's list of blocks: [B, Hk, G, q blocks, kv blocks], and the size of its blocks."""
    found = inputs.tiles
    if not isinstance(found, Blocks):
        return None
    batch, kv_heads = inputs.q.shape[0], inputs.k.shape[1]
    return found.per_head(batch, kv_heads, inputs.gqa_group), found.block_m, found.block_n


def source(plan: CpuPlan) -> str:
    """The program's text."""
    return render("attention_fwd.py", plan, CPU)


@functools.lru_cache(maxsize=256)
def kernel_of(
    program: Typed, *, float64: bool, has_kv_lens: bool, has_blocks: bool = False
) -> Callable[..., None]:
    """The compiled program of a variant."""
    plan = cpu_plan(program, float64=float64, has_kv_lens=has_kv_lens, has_blocks=has_blocks)
    text = source(plan)
    kernel: Callable[..., None] = CPU.compile(text)["attention_fwd"]
    return kernel


def per_batch(value: int | torch.Tensor | None) -> Any:
    """An int for each sequence, as it broadcasts against [B, Hk, G, Lq, Lk]."""
    return value.to(torch.int64).view(-1, 1, 1, 1, 1) if isinstance(value, torch.Tensor) else value


def argument(item: Bound, *, float64: bool) -> torch.Tensor:
    """A scalar as a 0-d tensor of the program's types; a table is converted where it is read."""
    value = torch.as_tensor(item.value).detach()
    if item.param.rank and not item.param.as_float:
        return value
    return value.to(dtype_of(item, float64))


# -- which tiles to visit ----------------------------------------------------------------------


def blocks(inputs: Inputs) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_N): as large as TILE_ELEMENTS lets them be."""
    heads = max(1, inputs.q.shape[0] * inputs.q.shape[1])
    block_m, block_n = 128, 256
    while heads * block_m * block_n > TILE_ELEMENTS and block_n > 32:
        block_m, block_n = max(32, block_m // 2), block_n // 2
    return block_m, block_n


def schedule(program: Typed, inputs: Inputs, bound: tuple[Bound, ...]) -> Schedule:
    """For each q tile its rows and the kv tiles to visit: (start, end, masked)."""
    block_m, block_n = blocks(inputs)
    q_len, kv_len = inputs.q.shape[2], inputs.k.shape[2]
    kind = _kinds(program, inputs, bound)
    visible = kv_len
    if inputs.kv_lens is not None:
        visible = min(kv_len, max(inputs.kv_lens.tolist(), default=0))
    result: Schedule = []
    for m, start_m in enumerate(range(0, q_len, block_m)):
        row = [
            (n * block_n, min(kv_len, (n + 1) * block_n), bool(kind[m, n] != FULL))
            for n in range(-(-visible // block_n))
            if kind[m, n] != EMPTY
        ]
        result.append((start_m, min(q_len, start_m + block_m), row))
    return result


def _kinds(program: Typed, inputs: Inputs, bound: tuple[Bound, ...]) -> np.ndarray[Any, Any]:
    """The kind of each tile for all batches and heads together."""
    size, tiles = blocks(inputs), inputs.tiles
    if isinstance(tiles, Tiles):
        mask = program.only_mask
        tiles.check(mask, bound_of(mask, bound), Sizes.of(inputs), inputs.q_offset, inputs.kv_lens)
        return tiles.kinds(size, lambda: _classified(program, inputs, bound))
    kinds = _classified(program, inputs, bound)
    if isinstance(tiles, Blocks):
        some, every = tiles.over(inputs.q.shape[2], inputs.k.shape[2], *size)
        kinds = np.where(every, kinds, np.where(some & (kinds != EMPTY), PARTIAL, EMPTY))
    return kinds


def _classified(program: Typed, inputs: Inputs, bound: tuple[Bound, ...]) -> np.ndarray[Any, Any]:
    """The kinds that the mask alone leaves."""
    block_m, block_n = blocks(inputs)
    q_len, kv_len = inputs.q.shape[2], inputs.k.shape[2]
    shape = (-(-q_len // block_m), -(-kv_len // block_n))
    structures = _structures(program, inputs)
    # A table broadcast to any length cannot be laid out for the analysis.
    tables = (x.value for x in bound if isinstance(x.value, torch.Tensor))
    endless = any(ANY_LENGTH in table.shape for table in tables)
    if len(structures) > MAX_STRUCTURES or endless:
        return np.full(shape, PARTIAL, np.uint8)
    values = as_numpy(bound, float64=inputs.q.dtype is torch.float64)
    strict = np.float64 if inputs.q.dtype is torch.float64 else np.float32
    kinds = [
        classify(
            program.mask, q_len, kv_len, block_m=block_m, block_n=block_n, values=values,
            b=b, h=h, hk=h // inputs.gqa_group, q_offset=offset, strict=strict,
        )
        for b, h, offset in structures
    ]  # fmt: skip
    if not kinds:
        return np.full(shape, EMPTY, np.uint8)
    stacked = np.stack(kinds)
    same = (stacked == stacked[0]).all(0)
    return np.where(same, stacked[0], PARTIAL)


def _structures(program: Typed, inputs: Inputs) -> list[tuple[int, int, int]]:
    """The (batch, head, q_offset) whose masks can differ."""
    batch, q_heads = inputs.q.shape[:2]
    offsets = inputs.q_offset
    per_batch = offsets.tolist() if isinstance(offsets, torch.Tensor) else [offsets] * batch
    reads_b = "b" in program.mask.names
    by_batch = sorted({(b if reads_b else 0, offset) for b, offset in enumerate(per_batch)})
    heads = range(q_heads) if program.mask.names & {"h", "hk"} else range(1)
    return [(b, h, offset) for (b, offset), h in product(by_batch, heads)]

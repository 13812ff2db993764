"""Run the portable Triton backend: pick the kernel for a call, then launch it.

A variant has a small, closed set of kernels per dtype, head dims and target; `options` picks one
from the call's sizes, strides and values, and a new length or scalar never compiles.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .backends.compile_triton import Kernel, compile_kernel
from .backends.triton import TRITON, fp_fusion
from .binding import ELEMENT_OF, Bound
from .blocks import Blocks
from .errors import BackendUnavailable
from .gradients import Answer
from .inputs import Inputs, bound_of, empty_like_q, empty_residual, shared_values
from .plan import Typed
from .plan_triton import ELEMENT_BYTES, SMALL, Options, TritonPlan, tiles_of, triton_plan
from .ready import Interpreted, Ready, ready, stored
from .render import render
from .structure import Sizes, Stored, store_structure, structure
from .target import INTERPRETER, Target, Tile
from .tiles import Tiles

INT32_MAX = 2**31 - 1
# Queries of a "short" call; the rest of a normal q tile would be idle.
SHORT = 16
# Pairs from which a structure has tiles of 64 x 64 at least: 61 MB for a million by a million.
COARSE = 2**38


def options(program: Typed, inputs: Inputs, bound: tuple[Bound, ...]) -> Options:
    """The kernel variant that serves a call."""
    q, k, v = inputs.q, inputs.k, inputs.v
    dtype = ELEMENT_OF[q.dtype]
    precision = inputs.precision
    if precision == "auto":
        precision = "exact" if dtype == "f32" else "fast"
    tensors = [q, k, v, *(x.value for x in bound if isinstance(x.value, torch.Tensor))]
    in_memory = isinstance(inputs.scale, torch.Tensor)
    blocks = isinstance(inputs.tiles, Blocks)
    # With few queries, looking at the tiles first costs as much as the attention.
    stored = blocks or (q.shape[2] > SHORT and not program.half_lines)
    return Options(
        dtype=dtype,
        head_dim=q.shape[3],
        v_head_dim=v.shape[3],
        precision=precision,
        small=is_small(inputs, bound),
        wide_offsets=any(reach(x) > INT32_MAX for x in tensors),
        aligned=all(is_aligned(x, ELEMENT_BYTES[dtype]) for x in (q, k, v))
        and v.shape[3] * ELEMENT_BYTES[dtype] % 16 == 0,  # the output's rows too
        short=q.shape[2] <= SHORT,
        # A structure brings kernels of its own; a sweep of lengths is to compile two at most.
        even=(q.shape[2] | k.shape[2]) % 16 == 0 and program.half_lines,
        stored=stored,
        blocks=blocks,
        coarse=stored and q.shape[2] * k.shape[2] >= COARSE,
        has_kv_lens=inputs.kv_lens is not None,
        offset_per_batch=isinstance(inputs.q_offset, torch.Tensor),
        scale_in_memory=in_memory,
        positive_scale=not isinstance(inputs.scale, torch.Tensor) and inputs.scale > 0,
        keeps_residual=inputs.keeps_residual,
    )


def is_small(inputs: Inputs, bound: tuple[Bound, ...]) -> bool:
    """Whether lengths, offset and int scalars are below SMALL, as far as the host knows."""
    if isinstance(inputs.q_offset, torch.Tensor):
        return False
    q_end = inputs.q_offset + inputs.q.shape[2]
    scalars = (x.value for x in bound if isinstance(x.value, int))
    return max(q_end, inputs.k.shape[2]) <= SMALL and all(abs(x) <= SMALL for x in scalars)


def reach(x: torch.Tensor) -> int:
    """The largest element offset; expanded dimensions do not move."""
    return sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True) if s)


def is_aligned(x: torch.Tensor, element_bytes: int) -> bool:
    """Whether rows begin at multiples of 16 bytes, so that loads are wide."""
    return x.data_ptr() % 16 == 0 and all(s * element_bytes % 16 == 0 for s in x.stride()[:3])


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """x with a unit last stride; anything else is copied once."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def attend(program: Typed, inputs: Inputs, bound: tuple[Bound, ...]) -> Answer:
    """Attention on a GPU, or in Triton's interpreter for tensors on the CPU."""
    with on_device(inputs.q):
        chosen = options(program, inputs, bound)
        kernel = forward(program, chosen, inputs.q.device)
        made = outputs(inputs)
        grid = programs(kernel.block_m, inputs)
        if grid:
            values = arguments(inputs, bound, made)
            if chosen.stored:
                blocks = kernel.block_m, kernel.block_n
                values += stored_structure(program, chosen, inputs, bound, blocks).arguments
            kernel.run(grid, values)
    return made


def outputs(inputs: Inputs) -> Answer:
    """Room for a call's answer."""
    q, v_head_dim = inputs.q, inputs.v.shape[3]
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    residual = empty_residual(q, v_head_dim) if inputs.keeps_residual else None
    return Answer(empty_like_q(q, v_head_dim), lse, residual)


def on_device(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Make the GPU of a tensor the current one."""
    if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


def programs(block_m: int, inputs: Inputs) -> int:
    """How many programs a call takes: q tiles times heads."""
    batch, q_heads, q_len, _ = inputs.q.shape
    return -(-q_len // block_m) * batch * q_heads


def stored_structure(
    program: Typed,
    chosen: Options,
    inputs: Inputs,
    bound: tuple[Bound, ...],
    blocks: tuple[int, int],
    *,
    transposed: bool = False,
    by_length: bool = False,
) -> Stored:
    """The structure that a kernel with tiles of BLOCK_M x BLOCK_N reads: prepared, or made now."""
    mask, sizes = program.only_mask, Sizes.of(inputs)
    bound = bound_of(mask, bound)
    ways = {"transposed": transposed, "by_length": by_length}
    if isinstance(inputs.tiles, Tiles):
        inputs.tiles.check(mask, bound, sizes, inputs.q_offset, inputs.kv_lens)
        return inputs.tiles.stored(mask, chosen, sizes, blocks, **ways)
    user = inputs.tiles
    if user is not None:
        user.check_tile(*blocks)
    device = inputs.q.device
    how = structure(mask, chosen, sizes, blocks, device, user, **ways)
    shared = shared_values(inputs.q_offset, inputs.kv_lens, bound)
    return how.make(device, shared, () if user is None else user.arguments)


# -- kernels -----------------------------------------------------------------------------------


def forward(program: Typed, chosen: Options, device: torch.device) -> Ready:
    """The attention kernel for a device."""

    def build(target: Target) -> Kernel:
        return compile_forward(program, chosen, target)

    def interpret() -> Interpreted:
        plan = triton_plan(program, chosen, INTERPRETER)
        return Interpreted(source(plan), "attention_fwd", plan.constants)

    return ready(forward_key(program, chosen), device, build, interpret, program.bundle)


def forward_key(program: Typed, chosen: Options) -> tuple[object, ...]:
    """What decides an attention kernel."""
    return ("attention_fwd", program.canonical, chosen)


def compile_forward(program: Typed, chosen: Options, target: Target) -> Kernel:
    """Compile the attention kernel, with a smaller tile where the score needs more memory."""
    for tile in tiles_of(program, chosen, target):
        kernel = _without_spills(program, chosen, target, tile)
        # A table of pairs is prefetched through shared memory too, which no table foresees.
        if kernel.shared <= target.shared:
            return kernel
    raise BackendUnavailable(
        f"no tile of `{program.name}` fits the {target.shared} bytes of shared memory of {target}"
    )


def _without_spills(program: Typed, chosen: Options, target: Target, tile: Tile) -> Kernel:
    """A kernel for a tile; where it spills registers, the better of two ways to find places."""
    plan = triton_plan(program, chosen, target, tile)
    kernel = compile_plan(plan)
    if kernel.spills == 0 or not plan.places_ahead:
        return kernel
    other = compile_plan(triton_plan(program, chosen, target, tile, few_registers=True))
    return other if other.spills < kernel.spills else kernel


def compile_plan(plan: TritonPlan) -> Kernel:
    """Render and compile one plan."""
    return compile_kernel(
        source(plan),
        "attention_fwd",
        plan.arguments,
        plan.constants,
        plan.target,
        num_warps=plan.tile.num_warps,
        num_stages=plan.tile.num_stages,
        aligned=plan.options.aligned,
        even=plan.options.even,
        fp_fusion=fp_fusion(plan),
    )


def source(plan: TritonPlan) -> str:
    """The kernel's text."""
    return render("attention_fwd.py", plan, TRITON)


def store(program: Typed, chosen: Options, target: Target) -> None:
    """Put the kernels of a call into the disk cache; needs no GPU."""
    what = forward_key(program, chosen)
    kernel = stored(what, target, lambda target: compile_forward(program, chosen, target))
    if chosen.stored:
        constants = dict(kernel.constants)
        blocks = constants["BLOCK_M"], constants["BLOCK_N"]
        store_structure(program.only_mask, chosen, target, blocks)


# -- arguments ---------------------------------------------------------------------------------


def arguments(inputs: Inputs, bound: tuple[Bound, ...], made: Answer) -> list[Any]:
    """The run-time arguments, in the order of `plan_triton.arguments`."""
    batch = inputs.q.shape[0]
    q = unit_stride(inputs.q.detach())
    k, v = (unit_stride(x.detach()).expand(batch, -1, -1, -1) for x in (inputs.k, inputs.v))
    values: list[Any] = [q, k, v, made.out, made.lse]
    for x in (q, k, v, made.out):
        values += x.stride()[:3]
    values += [q.shape[2], k.shape[2], q.shape[1], inputs.gqa_group]
    values += [in_float32(inputs.scale), *made.residuals]
    return values + shared_values(inputs.q_offset, inputs.kv_lens, bound)


def in_float32(value: float | torch.Tensor) -> Any:
    return value.to(torch.float32) if isinstance(value, torch.Tensor) else value

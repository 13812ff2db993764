"""Run the portable Triton backend: pick the kernel for a call, then launch it.

A variant has a small, closed set of kernels per dtype, head dims and target; `options` picks one
from the call's sizes, strides and values, and a new length or scalar never compiles.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .backends.compile_triton import Kernel, compile_kernel
from .backends.triton import TRITON, fp_fusion
from .binding import ELEMENT_OF, Bound
from .cache import CACHE, fingerprint, key
from .errors import BackendUnavailable
from .inputs import Inputs, empty_like_q
from .ir.capture import Kind
from .ir.ops import Type
from .launch import HipLauncher, Launcher, current_stream, device, launcher
from .plan import Typed
from .plan_triton import ELEMENT_BYTES, SMALL, Options, TritonPlan, tiles_of, triton_plan
from .render import render
from .target import INTERPRETER, Target

INT32_MAX = 2**31 - 1
# Queries of a "short" call; the rest of a normal q tile would be idle.
SHORT = 16


def options(inputs: Inputs, bound: tuple[Bound, ...]) -> Options:
    """The kernel variant that serves a call."""
    q, k, v = inputs.q, inputs.k, inputs.v
    dtype = ELEMENT_OF[q.dtype]
    precision = inputs.precision
    if precision == "auto":
        precision = "exact" if dtype == "f32" else "fast"
    tensors = [q, k, v, *(x.value for x in bound if isinstance(x.value, torch.Tensor))]
    in_memory = isinstance(inputs.scale, torch.Tensor)
    return Options(
        dtype=dtype,
        head_dim=q.shape[3],
        v_head_dim=v.shape[3],
        precision=precision,
        small=_is_small(inputs, bound),
        wide_offsets=any(_reach(x) > INT32_MAX for x in tensors),
        aligned=all(_is_aligned(x, ELEMENT_BYTES[dtype]) for x in (q, k, v))
        and v.shape[3] * ELEMENT_BYTES[dtype] % 16 == 0,  # the output's rows too
        short=q.shape[2] <= SHORT,
        has_kv_lens=inputs.kv_lens is not None,
        offset_per_batch=isinstance(inputs.q_offset, torch.Tensor),
        scale_in_memory=in_memory,
        positive_scale=not isinstance(inputs.scale, torch.Tensor) and inputs.scale > 0,
    )


def _is_small(inputs: Inputs, bound: tuple[Bound, ...]) -> bool:
    """Whether lengths, offset and int scalars are below SMALL; what only the device knows is not."""
    if isinstance(inputs.q_offset, torch.Tensor):
        return False
    q_end = inputs.q_offset + inputs.q.shape[2]
    scalars = (x.value for x in bound if isinstance(x.value, int))
    return max(q_end, inputs.k.shape[2]) <= SMALL and all(abs(x) <= SMALL for x in scalars)


def _reach(x: torch.Tensor) -> int:
    """The largest element offset; expanded dimensions do not move."""
    return sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True) if s)


def _is_aligned(x: torch.Tensor, element_bytes: int) -> bool:
    """Whether rows begin at multiples of 16 bytes, so that loads are wide."""
    return x.data_ptr() % 16 == 0 and all(s * element_bytes % 16 == 0 for s in x.stride()[:3])


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """x with a unit last stride; anything else is copied once."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


@dataclass(frozen=True)
class Ready:
    """A kernel that is loaded: its q tile, and how to launch it."""

    block_m: int
    launcher: Launcher | HipLauncher


# Kernels found so far, so that a warm call hashes no program.
_READY: dict[tuple[int, Options, int], tuple[Typed, Ready]] = {}


def attend(program: Typed, inputs: Inputs, bound: tuple[Bound, ...]) -> tuple[Any, Any]:
    """Attention on a GPU, or in Triton's interpreter for tensors on the CPU: (out, lse)."""
    chosen = options(inputs, bound)
    out = empty_like_q(inputs.q, inputs.v.shape[3])
    lse = torch.empty(inputs.q.shape[:3], dtype=torch.float32, device=inputs.q.device)
    values = arguments(inputs, bound, out, lse)
    if inputs.q.device.type != "cuda":
        plan = triton_plan(program, chosen, INTERPRETER)
        grid = programs(plan.tile.block_m, inputs)
        if grid:
            interpreted(source(plan))[(grid,)](*values, **plan.constants)
        return out, lse
    index = inputs.q.device.index
    with torch.cuda.device(index) if index != torch.cuda.current_device() else nullcontext():
        ready = kernel_of(program, chosen, index)
        grid = programs(ready.block_m, inputs)
        ready.launcher.launch((grid, 1, 1), current_stream(index), values)
    return out, lse


def ready(program: Typed, inputs: Inputs, bound: tuple[Bound, ...]) -> Ready:
    """The kernel that serves a call on a GPU."""
    index = inputs.q.device.index
    with torch.cuda.device(index):
        return kernel_of(program, options(inputs, bound), index)


def programs(block_m: int, inputs: Inputs) -> int:
    """How many programs a call takes: q tiles times heads."""
    batch, q_heads, q_len, _ = inputs.q.shape
    return -(-q_len // block_m) * batch * q_heads


def kernel_of(program: Typed, chosen: Options, index: int) -> Ready:
    """The kernel for a GPU: from memory, from the disk cache, or compiled."""
    found = _READY.get((id(program), chosen, index))
    if found is None:
        target = device(index)
        kernel = compiled(program, chosen, target)
        ready = Ready(dict(kernel.constants)["BLOCK_M"], launcher(kernel))
        # The program is kept, so that its id stays its own.
        found = _READY[id(program), chosen, index] = (program, ready)
    return found[1]


def compiled(program: Typed, chosen: Options, target: Target) -> Kernel:
    """The compiled kernel; simplified, rendered and compiled only if it is not stored."""

    def build() -> Kernel:
        for tile in tiles_of(chosen, target):
            kernel = compile_plan(triton_plan(program, chosen, target, tile))
            # A table of pairs is prefetched through shared memory too, which no table foresees.
            if kernel.shared <= target.shared:
                return kernel
        raise BackendUnavailable(
            f"no tile of `{program.name}` fits the {target.shared} bytes of shared memory of {target}"
        )

    name = key(fingerprint(), "attention_fwd", program.canonical, chosen, target)
    return CACHE.get_or_compile(name, build)


def compile_plan(plan: TritonPlan) -> Kernel:
    """Render and compile, without cache."""
    return compile_kernel(
        source(plan),
        "attention_fwd",
        plan.arguments,
        plan.constants,
        plan.target,
        num_warps=plan.tile.num_warps,
        num_stages=plan.tile.num_stages,
        aligned=plan.options.aligned,
        fp_fusion=fp_fusion(plan),
    )


def source(plan: TritonPlan) -> str:
    """The kernel's text."""
    return render("attention_fwd.py", plan, TRITON)


_INTERPRETED: dict[str, Any] = {}


def interpreted(text: str) -> Any:
    """The kernel in Triton's interpreter, to be called as kernel[grid](...)."""
    if text not in _INTERPRETED:
        folder = Path(tempfile.gettempdir()) / f"scoremod_interpreter_{os.getuid()}"
        _INTERPRETED[text] = TRITON.compile(text, folder).attention_fwd
    return _INTERPRETED[text]


def arguments(
    inputs: Inputs, bound: tuple[Bound, ...], out: torch.Tensor, lse: torch.Tensor
) -> list[Any]:
    """The run-time arguments, in the order of `plan_triton.arguments`."""
    batch = inputs.q.shape[0]
    q = unit_stride(inputs.q.detach())
    k, v = (unit_stride(x.detach()).expand(batch, -1, -1, -1) for x in (inputs.k, inputs.v))
    values: list[Any] = [q, k, v, out, lse]
    for x in (q, k, v, out):
        values += x.stride()[:3]
    values += [q.shape[2], k.shape[2], q.shape[1], inputs.gqa_group]
    values.append(_in_float32(inputs.scale))
    values.append(_in_int32(inputs.q_offset))
    if inputs.kv_lens is not None:
        values.append(_in_int32(inputs.kv_lens))
    for item in bound:
        values += _capture_arguments(item)
    return values


def _in_float32(value: float | torch.Tensor) -> Any:
    return value.to(torch.float32) if isinstance(value, torch.Tensor) else value


def _in_int32(value: int | torch.Tensor) -> Any:
    return value.to(torch.int32) if isinstance(value, torch.Tensor) else value


def _capture_arguments(item: Bound) -> list[Any]:
    if item.param.kind is Kind.TENSOR:
        assert isinstance(item.value, torch.Tensor)
        table = item.value.detach()
        return [table, *table.shape, *table.stride()]
    if isinstance(item.value, torch.Tensor):
        return [item.value.detach()]
    return [int(item.value) if item.param.type is Type.BOOL else item.value]

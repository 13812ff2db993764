"""Run the portable Triton backend: pick the kernel for a call, then launch it.

A variant has a small, closed set of kernels per dtype, head dims and target; `options` picks one
from the call's sizes, strides and values, and a new length or scalar never compiles.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .backends.compile_triton import Kernel, compile_kernel
from .backends.triton import TRITON, fp_fusion, mend_interpreter
from .binding import ELEMENT_OF, Bound
from .cache import CACHE, fingerprint, key
from .errors import BackendUnavailable
from .inputs import Inputs, empty_like_q
from .ir.capture import Kind
from .ir.ops import Type
from .launch import HipLauncher, Launcher, current_stream, launcher
from .launch import device as gpu
from .plan import Typed
from .plan_triton import (
    ELEMENT_BYTES,
    SMALL,
    Options,
    StructurePlan,
    TritonPlan,
    structure_plan,
    tiles_of,
    triton_plan,
)
from .render import render
from .target import INTERPRETER, Target

INT32_MAX = 2**31 - 1
# Queries of a "short" call; the rest of a normal q tile would be idle.
SHORT = 16


def options(program: Typed, inputs: Inputs, bound: tuple[Bound, ...]) -> Options:
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
        # Lists bring a kernel of their own; a sweep of lengths is to compile two at most.
        even=(q.shape[2] | k.shape[2]) % 16 == 0 and program.half_lines,
        # With few queries, looking at the tiles first costs as much as the attention.
        lists=q.shape[2] > SHORT and not program.half_lines,
        has_kv_lens=inputs.kv_lens is not None,
        offset_per_batch=isinstance(inputs.q_offset, torch.Tensor),
        scale_in_memory=in_memory,
        positive_scale=not isinstance(inputs.scale, torch.Tensor) and inputs.scale > 0,
    )


def _is_small(inputs: Inputs, bound: tuple[Bound, ...]) -> bool:
    """Whether lengths, offset and int scalars are below SMALL, as far as the host knows."""
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


Run = Callable[[int, Sequence[Any]], None]  # programs and arguments


@dataclass(frozen=True)
class Ready:
    """A kernel that can be launched, with its q and kv tile."""

    run: Run
    block_m: int
    block_n: int
    launcher: Launcher | HipLauncher | None = None  # None in Triton's interpreter


def attend(program: Typed, inputs: Inputs, bound: tuple[Bound, ...]) -> tuple[Any, Any]:
    """Attention on a GPU, or in Triton's interpreter for tensors on the CPU: (out, lse)."""
    with on_device(inputs.q):
        chosen = options(program, inputs, bound)
        kernel = forward(program, chosen, inputs.q.device)
        out = empty_like_q(inputs.q, inputs.v.shape[3])
        lse = torch.empty(inputs.q.shape[:3], dtype=torch.float32, device=inputs.q.device)
        grid = programs(kernel.block_m, inputs)
        if grid:
            values = arguments(inputs, bound, out, lse)
            if chosen.lists:
                found = structure(program, chosen, inputs, kernel)
                values += found.lists(inputs.q.device, shared_values(inputs, bound))
            kernel.run(grid, values)
    return out, lse


def on_device(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Make the GPU of a tensor the current one."""
    if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


def programs(block_m: int, inputs: Inputs) -> int:
    """How many programs a call takes: q tiles times heads."""
    batch, q_heads, q_len, _ = inputs.q.shape
    return -(-q_len // block_m) * batch * q_heads


# -- tile structure ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Structure:
    """How to list the kv tiles of each q tile, for calls of one shape."""

    kernel: Ready
    rows: int  # q tiles, of all structures
    kv_tiles: int
    sizes: tuple[int, ...]
    stride_b: int
    stride_h: int

    def lists(self, device: torch.device, shared: Sequence[Any]) -> list[Any]:
        """Look at the tiles; gives the arguments that the attention reads the lists by."""
        lists = torch.empty((self.rows, self.kv_tiles), dtype=torch.int32, device=device)
        counts = torch.empty((self.rows, 2), dtype=torch.int32, device=device)
        self.kernel.run(self.rows, [lists, counts, *self.sizes, *shared])
        return [lists, counts, self.stride_b, self.stride_h]


def structure(program: Typed, chosen: Options, inputs: Inputs, kernel: Ready) -> Structure:
    """The structure of a call: one for each batch and head that the mask reads."""
    names = program.given_mask.names
    per_batch = "b" in names or chosen.has_kv_lens or chosen.offset_per_batch
    per_head = bool(names & {"h", "hk"})
    structures_h = inputs.q.shape[1] if per_head else 1
    q_len, kv_len = inputs.q.shape[2], inputs.k.shape[2]
    q_tiles = -(-q_len // kernel.block_m)
    return Structure(
        structure_kernel(program, chosen, kernel, inputs.q.device),
        (inputs.q.shape[0] if per_batch else 1) * structures_h * q_tiles,
        -(-kv_len // kernel.block_n),
        (q_len, kv_len, inputs.gqa_group, structures_h),
        structures_h if per_batch else 0,
        1 if per_head else 0,
    )


def structure_kernel(program: Typed, chosen: Options, kernel: Ready, device: torch.device) -> Ready:
    """The kernel that writes the lists."""
    blocks = kernel.block_m, kernel.block_n

    def interpreted_text() -> tuple[str, str, dict[str, int]]:
        plan = structure_plan(program, chosen, INTERPRETER, *blocks)
        return structure_source(plan), "list_tiles", plan.constants

    return _prepared(
        structure_key(program, chosen, blocks),
        device,
        lambda target: compile_structure(structure_plan(program, chosen, target, *blocks)),
        interpreted_text,
    )


def structure_key(program: Typed, chosen: Options, blocks: tuple[int, int]) -> tuple[object, ...]:
    """What decides the kernel: dtypes, head dims and scores share it."""
    flags = (chosen.small, chosen.wide_offsets, chosen.has_kv_lens, chosen.offset_per_batch)
    return ("list_tiles", program.canonical, flags, blocks)


def structure_source(plan: StructurePlan) -> str:
    """The kernel's text."""
    return render("tile_structure.py", plan, TRITON)


def compile_structure(plan: StructurePlan) -> Kernel:
    """Render and compile the kernel that writes the lists."""
    return compile_kernel(
        structure_source(plan),
        "list_tiles",
        plan.arguments,
        plan.constants,
        plan.target,
        num_warps=8,
        num_stages=1,
        aligned=False,
        even=False,
        fp_fusion=fp_fusion(plan),
    )


# -- kernels -----------------------------------------------------------------------------------


def forward(program: Typed, chosen: Options, device: torch.device) -> Ready:
    """The attention kernel for a device."""

    def build(target: Target) -> Kernel:
        return compile_forward(program, chosen, target)

    def interpreted_text() -> tuple[str, str, dict[str, int]]:
        plan = triton_plan(program, chosen, INTERPRETER)
        return source(plan), "attention_fwd", plan.constants

    return _prepared(("attention_fwd", program.canonical, chosen), device, build, interpreted_text)


# Kernels found so far, by what decides them and where they run.
_READY: dict[tuple[object, ...], Ready] = {}


def _prepared(
    what: tuple[object, ...],
    device: torch.device,
    build: Callable[[Target], Kernel],
    interpret: Callable[[], tuple[str, str, dict[str, int]]],
) -> Ready:
    """A kernel from memory, from the disk cache, compiled, or in the interpreter."""
    found = _READY.get((what, device))
    if found is None:
        if device.type == "cuda":
            found = _on_gpu(what, device, build)
        else:
            found = _interpreted(*interpret())
        _READY[what, device] = found
    return found


def _on_gpu(
    what: tuple[object, ...],
    device: torch.device,
    build: Callable[[Target], Kernel],
) -> Ready:
    target = gpu(device.index)
    name = key(fingerprint(), what, target)
    kernel = CACHE.get_or_compile(name, lambda: build(target))
    constants, launching = dict(kernel.constants), launcher(kernel)

    def run(grid: int, values: Sequence[Any]) -> None:
        launching.launch((grid, 1, 1), current_stream(device.index), values)

    return Ready(run, constants["BLOCK_M"], constants["BLOCK_N"], launching)


def _interpreted(text: str, entry: str, constants: dict[str, int]) -> Ready:
    mend_interpreter()
    # A folder of this process alone: what lies in it is executed.
    folder = Path(_interpreter_folder().name)
    kernel = getattr(TRITON.compile(text, folder), entry)
    return Ready(
        lambda grid, values: kernel[(grid,)](*values, **constants),
        constants["BLOCK_M"],
        constants["BLOCK_N"],
    )


@functools.cache
def _interpreter_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="scoremod-")


def compile_forward(program: Typed, chosen: Options, target: Target) -> Kernel:
    """Compile the attention kernel, with a smaller tile where the score needs more memory."""
    for tile in tiles_of(program, chosen, target):
        kernel = compile_plan(triton_plan(program, chosen, target, tile))
        # A table of pairs is prefetched through shared memory too, which no table foresees.
        if kernel.shared <= target.shared:
            return kernel
    raise BackendUnavailable(
        f"no tile of `{program.name}` fits the {target.shared} bytes of shared memory of {target}"
    )


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


def stored(program: Typed, chosen: Options, target: Target) -> None:
    """Put the kernels of a call into the cache; needs no GPU."""
    what = ("attention_fwd", program.canonical, chosen)
    name = key(fingerprint(), what, target)
    kernel = CACHE.get_or_compile(name, lambda: compile_forward(program, chosen, target))
    if chosen.lists:
        constants = dict(kernel.constants)
        blocks = constants["BLOCK_M"], constants["BLOCK_N"]
        name = key(fingerprint(), structure_key(program, chosen, blocks), target)
        plan = structure_plan(program, chosen, target, *blocks)
        CACHE.get_or_compile(name, lambda: compile_structure(plan))


# -- arguments ---------------------------------------------------------------------------------


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
    values.append(in_float32(inputs.scale))
    return values + shared_values(inputs, bound)


def shared_values(inputs: Inputs, bound: tuple[Bound, ...]) -> list[Any]:
    """The values of `plan_triton.shared_arguments`."""
    values = [_in_int32(inputs.q_offset)]
    if inputs.kv_lens is not None:
        values.append(_in_int32(inputs.kv_lens))
    for item in bound:
        values += _capture_arguments(item)
    return values


def in_float32(value: float | torch.Tensor) -> Any:
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

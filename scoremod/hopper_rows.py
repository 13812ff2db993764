"""What both Hopper backwards have around their products: what each row needs, and scratch.

The kernel that looks at each row leaves its LSE in base 2 and delta where products take them from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .attend_hopper import copyable
from .backends.compile_triton import Kernel, compile_kernel
from .backends.hopper import WITHOUT_PRODUCTS
from .backward_triton import Call, Line, settled
from .errors import BackendUnavailable
from .ir.capture import Kind
from .passes.patterns import Pattern
from .plan import Typed
from .plan_hopper_backward import ROWS, SmallPlan, counts_of, rows_plan
from .plan_triton import Options, wide_scalars
from .plan_triton_backward import DKDV
from .ready import Interpreted, Ready, ready
from .render import render
from .target import INTERPRETER, Target

Tensor = torch.Tensor


def indifferent(program: Typed, chosen: Options, *, stored: bool) -> Options:
    """Options of a portable kernel without what makes no difference to kernels with products.

    Only captures are passed in types that depend on what is small, or on how far offsets reach.
    """
    tables = any(p.kind is Kind.TENSOR for p in program.params)
    return replace(
        chosen,
        small=not wide_scalars(program.params, chosen),
        wide_offsets=chosen.wide_offsets and tables,
        aligned=True,
        short=False,
        positive_scale=True,
        even=False,
        stored=stored,
        coarse=False,
    )


def not_interpreted() -> Interpreted:
    """What a kernel with products is in place of a GPU."""
    raise BackendUnavailable("Triton's interpreter does not run the Hopper backward")


# -- kernels without products ------------------------------------------------------------------


def rows_kernel(call: Call, block_m: int, *, ordered: bool = False) -> Ready:
    """The kernel that looks at each row first."""
    chosen = small_options(call.options)
    given = call.result.given | {"ordered": ordered}
    return small_kernel(
        call,
        rows_key(chosen, block_m, **given),
        lambda target: rows_plan(chosen, target, block_m, **given),
    )


def rows_key(
    chosen: Options,
    block_m: int,
    *,
    has_grad_lse: bool,
    has_residual: bool = False,
    ordered: bool = False,
) -> tuple[object, ...]:
    """What decides the kernel that looks at each row."""
    return (ROWS, chosen, block_m, has_grad_lse, has_residual, ordered)


def small_options(chosen: Options) -> Options:
    """What these kernels are specialised for: nothing of the variant."""
    return Options(
        chosen.dtype,
        chosen.head_dim,
        chosen.v_head_dim,
        wide_offsets=chosen.wide_offsets,
        scale_in_memory=chosen.scale_in_memory,
    )


def small_kernel(
    call: Call, what: tuple[object, ...], plan: Callable[[Target], SmallPlan]
) -> Ready:
    """A kernel without products."""

    def interpret() -> Interpreted:
        made = plan(INTERPRETER)
        return Interpreted(small_source(made), made.kernel, made.constants)

    return ready(
        what, call.device, lambda t: compile_small(plan(t)), interpret, call.program.bundle
    )


def small_source(plan: SmallPlan) -> str:
    """The text of a kernel without products."""
    return render(f"{plan.kernel}.py", plan, WITHOUT_PRODUCTS)


def compile_small(plan: SmallPlan) -> Kernel:
    """Render and compile a kernel without products."""
    return compile_kernel(
        small_source(plan),
        plan.kernel,
        plan.arguments,
        plan.constants,
        plan.target,
        num_warps=4,
        num_stages=1,
        aligned=True,
        even=False,
        fp_fusion=True,
    )


# -- the call ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scratch:
    """What the kernels of a call hand to each other."""

    rows: Tensor  # float32 [q tiles of all heads * 2 * block_m]: LSE in base 2 and delta
    sums: Tensor  # float32 [., 256]: of dq, for `slots` kv heads
    slots: int
    counters: Tensor  # int32 [`counts_of`]
    turns: tuple[Tensor, ...]  # int32 [q tiles of all heads]: the kv tile whose turn it is
    ds_sums: tuple[Tensor, ...] = ()  # float32 [B, Hq, Lk], where something per key learns


def kv_heads_of(call: Call) -> int:
    """How many kv heads there are, of all batches."""
    return call.inputs.q.shape[0] * call.inputs.k.shape[1]


def as_copyable(x: Tensor) -> Tensor:
    """x as TMA can copy it; anything else is copied once."""
    return x if copyable(x) else x.contiguous()


def q_tiles_of(call: Call, block_m: int) -> int:
    """How many q tiles there are, of all heads."""
    batch, q_heads, q_len, _ = call.inputs.q.shape
    return -(-q_len // block_m) * batch * q_heads


def sums_keys(call: Call) -> bool:
    """Whether something that is read per key learns."""
    return bool(call.reads_in(DKDV))


def key_sums(call: Call) -> tuple[Tensor, ...]:
    """Room for sums of ds per key, where something learns of them."""
    if not sums_keys(call):
        return ()
    shape = (*call.heads, call.inputs.k.shape[2])
    return (torch.empty(shape, dtype=torch.float32, device=call.device),)


def settle(call: Call, kernel: str, sums: Tensor, line: Line, by_read: dict[int, Tensor]) -> None:
    """The gradients of reads along a line, of the sums of ds [B, Hq, length] that all share.

    But for reads that have theirs.
    """
    for n in call.reads_in(kernel):
        if n not in by_read:
            factor = call.reads[n].slope.attr
            by_read[n] = settled(call, n, sums * factor, line)


def settle_keys(call: Call, sums: tuple[Tensor, ...], by_read: dict[int, Tensor]) -> None:
    """The gradients of what is added per key."""
    for ds_sums in sums:
        settle(call, DKDV, ds_sums, Line(Pattern.COLUMN, ds_sums.shape[2]), by_read)


def look_at_rows(call: Call, kernel: Ready, do: Tensor, block_m: int, scratch: Scratch) -> None:
    """Write the row values, and clear all else."""
    result, tiles, heads = call.result, q_tiles_of(call, block_m), kv_heads_of(call)
    o, lse = as_copyable(result.out.detach()), result.lse.contiguous()
    grad_lse = lse if result.grad_lse is None else result.grad_lse.to(torch.float32)
    values: list[Any] = [o, do, lse, grad_lse, scratch.rows, scratch.sums, scratch.counters]
    values += [*o.stride()[:3], *do.stride()[:3], *grad_lse.stride()]
    _, q_heads, q_len, _ = call.inputs.q.shape
    values += [q_len, q_heads, tiles // heads * scratch.slots, counts_of(heads)]
    kernel.run(tiles, [*values, *result.residuals, *scratch.turns])

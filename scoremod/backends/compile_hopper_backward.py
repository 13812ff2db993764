"""Compile the Hopper backward's rendered text, and judge what the assembler says of it."""

from __future__ import annotations

from typing import Any

from ..plan_hopper_backward import MAIN, SPILLS, HopperBackwardPlan
from ..plan_triton import Argument
from .compile_hopper import (
    HOPELESS,
    Refused,
    flaw,
    source_of,
    spills_in_loops,
    tensor_map,
    tensors_as_passed,
)
from .compile_triton import Compiled, Kernel, compiled_text, kernel_of
from .triton import fp_fusion

# Tensors of the main kernel that TMA copies by one or two dimensions, and these.
_SUMS = {"row_values": 1, "dq_sums": 2}


def compile_plan(plan: HopperBackwardPlan, text: str) -> tuple[Kernel, str]:
    """The kernel of a plan, and what is wrong with it: "" for nothing."""
    options = {"num_warps": 4, "enable_fp_fusion": fp_fusion(plan)}
    compiled = compiled_text(text, MAIN, lambda f: _source(f, plan), plan.target, options)
    elements = [plan.options.dtype] * len(plan.tensor_maps) + ["f32"] * len(_SUMS)
    maps = tuple(
        tensor_map(made, element)
        for made, element in zip(compiled.metadata.tensordesc_meta, elements, strict=True)
    )
    kernel = kernel_of(compiled, text, plan.target, launched(plan), constants(plan), maps)
    return kernel, complaint(compiled, plan)


def complaint(compiled: Compiled, plan: HopperBackwardPlan) -> str:
    """Why another configuration should be tried; "" for no reason."""
    if found := flaw(compiled, plan.target):
        return found
    spilled = spills_in_loops(compiled.image) if compiled.report.spills else 0
    if spilled > HOPELESS and not plan.config.holds_operands:
        raise Refused(
            f"the slope of `{plan.score.name if plan.score else MAIN}` needs more registers than a "
            f"consumer has: {spilled} accesses to spilled ones a q tile",
            hint="the portable backward runs it",
        )
    if spilled > SPILLS:
        return f"{spilled} accesses to spilled registers a q tile"
    return ""


def constants(plan: HopperBackwardPlan) -> dict[str, int]:
    """What the kernel's text holds and its launches must know."""
    return {
        "BLOCK_M": plan.config.block_m,
        "BLOCK_N": plan.block_n,
        "DQ_COLUMNS": plan.dq_columns,
    }


def launched(plan: HopperBackwardPlan) -> tuple[Argument, ...]:
    """The arguments as they are passed."""
    ranks = {m.name: 4 for m in plan.tensor_maps} | _SUMS
    return (*tensors_as_passed(ranks), *plan.arguments)


def _source(function: Any, plan: HopperBackwardPlan) -> Any:
    """What Gluon compiles: the function and the types of its arguments."""
    from triton.experimental.gluon import language as gl

    line, table = (gl.NVMMASharedLayout(0, 32, rank=rank) for rank in _SUMS.values())
    others = {
        "row_values": f"tensordesc<fp32[{2 * plan.config.block_m}],{line!r}>",
        "dq_sums": f"tensordesc<fp32[{plan.dq_columns // 4}, 256],{table!r}>",
    }
    # Allocations begin at multiples of 16 bytes, and rows of what TMA reads like dq are such.
    known = {"sums": 16, "dq": 16, "dq_stride_b": 8, "dq_stride_h": 8, "dq_stride_l": 8}
    return source_of(function, MAIN, plan.tensor_maps, others, plan.arguments, known)

"""Compile the Hopper backward of wide heads, and judge what the assembler says of it."""

from __future__ import annotations

from typing import Any

from ..plan_hopper_wide import WidePlan
from ..plan_triton import Argument
from .compile_hopper import (
    flaw,
    source_of,
    spills_in_loops,
    tensor_map,
    tensors_as_passed,
)
from .compile_triton import Compiled, Kernel, compiled_text, kernel_of
from .triton import fp_fusion

# Accesses to spilled registers a tile that a kernel may have. The portable kernels take about three
# times as long as these without any; those with some were not timed.
SPILLS = 64


def compile_plan(plan: WidePlan, text: str) -> tuple[Kernel, str]:
    """The kernel of a plan, and what is wrong with it: "" for nothing."""
    options = {"num_warps": 4, "enable_fp_fusion": fp_fusion(plan)}
    compiled = compiled_text(text, plan.kernel, lambda f: _source(f, plan), plan.target, options)
    elements = [plan.options.dtype] * len(plan.tensor_maps) + ["f32"] * plan.row_map
    maps = tuple(
        tensor_map(made, element)
        for made, element in zip(compiled.metadata.tensordesc_meta, elements, strict=True)
    )
    kernel = kernel_of(compiled, text, plan.target, launched(plan), constants(plan), maps)
    return kernel, complaint(compiled, plan)


def complaint(compiled: Compiled, plan: WidePlan) -> str:
    """Why the portable backward should run instead; "" for no reason."""
    if found := flaw(compiled, plan.target):
        return found
    spilled = spills_in_loops(compiled.image) if compiled.report.spills else 0
    if spilled > SPILLS:
        return f"{spilled} accesses to spilled registers a tile"
    return ""


def constants(plan: WidePlan) -> dict[str, int]:
    """What the kernel's text holds and its launches must know."""
    return {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n}


def launched(plan: WidePlan) -> tuple[Argument, ...]:
    """The arguments as they are passed."""
    ranks = {m.name: 4 for m in plan.tensor_maps} | ({"row_values": 1} if plan.row_map else {})
    return (*tensors_as_passed(ranks), *plan.arguments)


def _source(function: Any, plan: WidePlan) -> Any:
    """What Gluon compiles: the function and the types of its arguments."""
    from triton.experimental.gluon import language as gl

    rows = {}
    if plan.row_map:
        line = gl.NVMMASharedLayout(0, 32, rank=1)
        rows["row_values"] = f"tensordesc<fp32[{2 * plan.block_m}],{line!r}>"
    return source_of(function, plan.kernel, plan.tensor_maps, rows, plan.arguments)

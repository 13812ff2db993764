"""Compile rendered Gluon text to machine code, and judge what the assembler says of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import BackendUnavailable
from ..plan_hopper import REGISTERS, HopperPlan
from ..plan_hopper import TensorMap as PlannedMap
from ..plan_triton import Argument
from ..target import Target
from .compile_triton import (
    Compiled,
    Kernel,
    TensorMap,
    compiled_text,
    kernel_of,
    softmax_loops,
)
from .triton import fp_fusion

ENTRY = "attention_fwd"
# Accesses to spilled registers a kv tile that were not felt: 8 did not show, 35 cost 22 % (of a
# backward of head dim 128, H200). What is spilled outside of the loops costs nothing.
SPILLS = 8
# From here on no configuration of as many consumers helps, and trying each takes minutes; 70 were
# cured by 64 keys.
HOPELESS = 200
# ptxas' notes about products that it runs one after the other.
_SERIALISED = re.compile(r"C75\d\d|serializ", re.IGNORECASE)
_SPILL = re.compile(r"\b(LDL|STL)\b")


class Refused(BackendUnavailable):
    """No configuration suits a kernel, which takes long to find out."""


def compile_plan(plan: HopperPlan, text: str) -> tuple[Kernel, str]:
    """The kernel of a plan, and what is wrong with it: "" for nothing."""
    options = {"num_warps": 4, "enable_fp_fusion": fp_fusion(plan)}
    compiled = compiled_text(text, ENTRY, lambda f: _source(f, plan), plan.target, options)
    maps = tuple(tensor_map(made, plan.options.dtype) for made in compiled.metadata.tensordesc_meta)
    kernel = kernel_of(compiled, text, plan.target, launched(plan), constants(plan), maps)
    return kernel, complaint(compiled, plan)


def complaint(compiled: Compiled, plan: HopperPlan) -> str:
    """Why another configuration should be tried; "" for no reason."""
    if found := flaw(compiled, plan.target):
        return found
    spilled = spills_in_loops(compiled.image) if compiled.report.spills else 0
    if spilled > HOPELESS and plan.config.consumers == min(REGISTERS):
        raise Refused(
            f"`{plan.score.name if plan.score else ENTRY}` needs more registers than a consumer "
            f"has: {spilled} accesses to spilled ones a kv tile",
            hint="backend='triton' runs it",
        )
    if spilled > SPILLS:
        return f"{spilled} accesses to spilled registers a kv tile"
    return ""


def flaw(compiled: Compiled, target: Target) -> str:
    """Why no kernel with products should be as this one is; "" for no reason."""
    if compiled.metadata.shared > target.shared:
        return f"{compiled.metadata.shared} bytes of shared memory"
    return "its products would run one after the other" if is_serialised(compiled) else ""


def is_serialised(compiled: Compiled) -> bool:
    """Whether ptxas notes that it runs products one after the other."""
    return any(_SERIALISED.search(w) for w in compiled.report.warnings)


def spills_in_loops(cubin: bytes) -> int:
    """The most loads and stores of spilled registers in a loop over kv tiles."""
    counts = [sum(bool(_SPILL.search(x)) for x in loop) for loop in softmax_loops(cubin)]
    return max(counts, default=0)


def constants(plan: HopperPlan) -> dict[str, int]:
    """What the kernel's text holds and its launch must know."""
    return {"BLOCK_M": plan.config.block_m, "BLOCK_N": plan.config.block_n}


def launched(plan: HopperPlan) -> tuple[Argument, ...]:
    """The arguments as they are passed."""
    return (*tensors_as_passed({m.name: 4 for m in plan.tensor_maps}), *plan.arguments)


def tensors_as_passed(ranks: Mapping[str, int]) -> list[Argument]:
    """A tensor that TMA copies is its map, then its shape and its strides."""
    found = []
    for name, rank in ranks.items():
        found.append(Argument(name, "tensormap"))
        found += [Argument(f"{name}_size_{k}", "i32") for k in range(rank)]
        found += [Argument(f"{name}_stride_{k}", "i64") for k in range(rank)]
    return found


def _source(function: Any, plan: HopperPlan) -> Any:
    return source_of(function, ENTRY, plan.tensor_maps, {}, plan.arguments)


def source_of(
    function: Any,
    entry: str,
    maps: tuple[PlannedMap, ...],
    others: Mapping[str, str],
    arguments: tuple[Argument, ...],
    multiples: Mapping[str, int] | None = None,
) -> Any:
    """What Gluon compiles: a function and the types of its arguments, `others` after the maps.

    `multiples` are what some arguments are known to be multiples of.
    """
    from triton.experimental.gluon._runtime import GluonASTSource

    types = {m.name: descriptor_type(m) for m in maps} | dict(others)
    types |= {a.name: a.type for a in arguments}
    if list(types) != list(function.arg_names):
        raise BackendUnavailable(
            f"the plan and the text of `{entry}` differ in their arguments",
            hint="this is a defect of scoremod, not of the variant",
        )
    given = multiples or {}
    known = {
        (k,): [["tt.divisibility", given[name]]] for k, name in enumerate(types) if name in given
    }
    return GluonASTSource(function, types, attrs=known)


def descriptor_type(tensor: PlannedMap) -> str:
    """Triton's type of a tensor map with the layout of its tiles in shared memory."""
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout(tensor.swizzle, 16, rank=4)
    return f"tensordesc<{tensor.element}[1, 1, {tensor.rows}, {tensor.head_dim}],{layout!r}>"


def tensor_map(made: Mapping[str, Any], element: str) -> TensorMap:
    return TensorMap(element, tuple(made["block_size"]), made["swizzle"])

"""Generated source on demand: the kernel of a call, or of a described shape."""

from __future__ import annotations

import torch

from . import attend_cpu, attend_triton, backward_cpu
from .binding import ELEMENT_OF, Bound
from .errors import InputMismatch
from .inputs import Inputs
from .ir.ops import Type
from .plan import Typed, cpu_backward_plan, cpu_plan
from .plan_triton import ELEMENT_BYTES, Options, structure_plan, tiles_of, triton_plan
from .target import parse_target

_WORDS = {"f16": "f16", "fp16": "f16", "float16": "f16", "bfloat16": "bf16", "fp32": "f32"}
_WORDS |= {"float32": "f32", "float64": "f64", "half": "f16", "float": "f32"}


def element(dtype: torch.dtype | str) -> str:
    """A torch dtype or a word as a word of the language: torch.bfloat16 -> bf16."""
    if isinstance(dtype, torch.dtype):
        if dtype in ELEMENT_OF:
            return ELEMENT_OF[dtype]
    else:
        word = _WORDS.get(dtype.removeprefix("torch."), dtype)
        if word in ELEMENT_OF.values():
            return word
    known = ", ".join(ELEMENT_OF.values())
    raise InputMismatch(f"{dtype!r} is not a dtype", hint=f"give a torch dtype or one of {known}")


def of_call(program: Typed, inputs: Inputs, bound: tuple[Bound, ...], target: str) -> str:
    """The kernel that serves a call."""
    if target == "cpu":
        float64 = inputs.q.dtype is torch.float64
        plan = cpu_plan(program, float64=float64, has_kv_lens=inputs.kv_lens is not None)
        return attend_cpu.source(plan)
    return attend_triton.source(
        triton_plan(program, attend_triton.options(program, inputs, bound), parse_target(target))
    )


def of_tiles(program: Typed, chosen: Options, target: str) -> str:
    """The kernel that lists the tiles which the mask leaves."""
    if program.half_lines:
        raise InputMismatch(
            f"`{program.name}` has no kernel for tiles",
            hint="its mask is ranges of keys, which the forward kernel finds by itself",
        )
    found = parse_target(target)
    tile = tiles_of(program, chosen, found)[0]
    plan = structure_plan(program, chosen, found, tile.block_m, tile.block_n)
    return attend_triton.structure_source(plan)


def of_backward(program: Typed, target: str, *, float64: bool, has_kv_lens: bool) -> str:
    """The backward with every gradient that a call can ask for."""
    if target != "cpu":
        raise InputMismatch(f"there is no backward for {target} yet", hint="target='cpu' has one")
    read = program.given_score.names
    learned = (p.type is Type.FLOAT and p.name in read for p in program.params)
    plan = cpu_backward_plan(
        program, float64=float64, has_kv_lens=has_kv_lens, wanted=(True, True, True, *learned)
    )
    return backward_cpu.source(plan)


def of_shape(
    program: Typed, *, head_dim: int, v_head_dim: int, dtype: str, precision: str, target: str
) -> str:
    """The kernel for a dtype and head dims."""
    if target == "cpu":
        return attend_cpu.source(cpu_plan(program, float64=dtype == "f64", has_kv_lens=False))
    chosen = options_of_shape(
        program, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype, precision=precision
    )
    return attend_triton.source(triton_plan(program, chosen, parse_target(target)))


def options_of_shape(
    program: Typed, *, head_dim: int, v_head_dim: int, dtype: str, precision: str
) -> Options:
    """The kernel variant that an ordinary call of these dtypes and head dims takes."""
    for name, value in (("head_dim", head_dim), ("v_head_dim", v_head_dim)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 512:
            raise InputMismatch(f"{name} must be an int from 1 to 512, not {value!r}")
    if dtype not in ELEMENT_BYTES:
        raise InputMismatch(f"kernels take f16, bf16 or f32, not {dtype}")
    if precision == "auto":
        precision = "exact" if dtype == "f32" else "fast"
    half_lines = program.half_lines
    return Options(dtype, head_dim, v_head_dim, precision, even=half_lines, lists=not half_lines)

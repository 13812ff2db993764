"""Generated source on demand: the kernel of a call, or of a described shape."""

from __future__ import annotations

import torch

from . import (
    attend_cpu,
    attend_hopper,
    attend_triton,
    backward_cpu,
    backward_hopper,
    backward_triton,
)
from .analysis.tiles import TileMap
from .binding import ELEMENT_OF, Bound
from .errors import InputMismatch
from .inputs import Inputs
from .ir.ops import Type
from .plan import Typed, cpu_backward_plan, cpu_plan
from .plan_hopper import Config
from .plan_structure import structure_plan
from .plan_triton import ELEMENT_BYTES, Options, tiles_of, triton_plan
from .plan_triton_backward import learnable
from .structure import structure_source
from .target import Target, Tile, parse_target

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


def picture(tiles: TileMap) -> str:
    """A picture of tiles as comments in front of a kernel."""
    head = f"The tiles of {tiles.q_len} queries by {tiles.kv_len} keys:"
    return "".join(f"# {line}".rstrip() + "\n" for line in (head, *str(tiles).splitlines(), ""))


def of_call(program: Typed, inputs: Inputs, bound: tuple[Bound, ...], target: str) -> str:
    """The kernel that serves a call."""
    if target == "cpu":
        float64 = inputs.q.dtype is torch.float64
        plan = cpu_plan(program, float64=float64, has_kv_lens=inputs.kv_lens is not None)
        return attend_cpu.source(plan)
    found, chosen = parse_target(target), attend_triton.options(program, inputs, bound)
    if attend_hopper.is_hopper(found) and not attend_hopper.unfit(program, inputs):
        return _of_hopper(program, chosen, found)
    return attend_triton.source(triton_plan(program, chosen, found))


def _of_hopper(program: Typed, chosen: Options, target: Target) -> str:
    """The configuration that was compiled, else the one that is tried first."""
    chosen = attend_hopper.of_options(program, chosen)
    kernel = attend_hopper.found(program, chosen, target)
    if kernel is not None:
        return kernel.text
    best = attend_hopper.tuned(program, chosen, target)
    return attend_hopper.source(attend_hopper.plans(program, chosen, target, best)[0])


def of_tiles(program: Typed, chosen: Options, target: str) -> str:
    """The kernels that find the tiles which the mask leaves."""
    found = parse_target(target)
    shape = (chosen.dtype, chosen.head_dim, chosen.v_head_dim)
    reader: Tile | Config = tiles_of(program, chosen, found)[0]
    if attend_hopper.is_hopper(found) and not attend_hopper.unfit_shape(*shape):
        chosen = attend_hopper.of_options(program, chosen)
        reader = attend_hopper.plans(program, chosen, found)[0].config
    if not chosen.stored:
        raise InputMismatch(
            f"`{program.name}` has no kernel for tiles",
            hint="its mask is ranges of keys, which the forward kernel finds by itself",
        )
    plan = structure_plan(program.only_mask, chosen, found, reader.block_m, reader.block_n)
    return structure_source(plan)


def of_cpu_backward(program: Typed, *, float64: bool, has_kv_lens: bool) -> str:
    """The CPU's backward with every gradient that a call can ask for."""
    learned = (p.type is Type.FLOAT and p.name in _read(program) for p in program.params)
    plan = cpu_backward_plan(
        program, float64=float64, has_kv_lens=has_kv_lens, wanted=(True, True, True, *learned)
    )
    return backward_cpu.source(plan)


def of_backward(program: Typed, chosen: Options, target: str) -> str:
    """The kernels of a backward in their order, with every gradient that can be asked for.

    On Hopper those of dq, dk and dv, then the portable ones, which serve learned captures.
    """
    found, learned, texts = parse_target(target), learnable(program), []
    shape = chosen.dtype, chosen.head_dim, chosen.v_head_dim
    if attend_hopper.is_hopper(found) and not backward_hopper.unfit_shape(*shape):
        texts = backward_hopper.sources(program, backward_hopper.of_options(program, chosen), found)
    if learned or not texts:
        texts += backward_triton.sources(program, chosen, learned, found)
    return "\n\n".join(texts)


def _read(program: Typed) -> frozenset[str]:
    """What the score reads."""
    return program.given_score.names


def of_shape(
    program: Typed, *, head_dim: int, v_head_dim: int, dtype: str, precision: str, target: str
) -> str:
    """The kernel for a dtype and head dims."""
    if target == "cpu":
        return attend_cpu.source(cpu_plan(program, float64=dtype == "f64", has_kv_lens=False))
    chosen = options_of_shape(
        program, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype, precision=precision
    )
    found = parse_target(target)
    reason = attend_hopper.unfit_shape(dtype, head_dim, v_head_dim)
    if attend_hopper.is_hopper(found) and not reason:
        return _of_hopper(program, chosen, found)
    return attend_triton.source(triton_plan(program, chosen, found))


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
    return Options(dtype, head_dim, v_head_dim, precision, even=half_lines, stored=not half_lines)

"""Say what scoremod made of a variant, in the user's own words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import attend_cpu, attend_hopper, attend_triton, backward_hopper
from . import backward_hopper_wide as wide
from .analysis.reasons import explain_atoms
from .backward_hopper_wide import is_wide
from .binding import Bound
from .inputs import Inputs
from .ir.capture import MISSING
from .ir.expr import TRUE, Expr, resolve
from .ir.show import show
from .launch import device
from .passes.simplify import simplify
from .plan import Param, Typed
from .plan_hopper import HopperPlan
from .plan_hopper_wide import KERNELS, KEYS, QUERIES, wide_plan
from .plan_triton import Options, TritonPlan, triton_plan
from .plan_triton_backward import learnable
from .target import INTERPRETER, Target
from .variant import Program


def explain_program(program: Program, params: tuple[Param, ...]) -> list[str]:
    """The simplified form, the captures with what was assumed, and the mask's atoms."""
    types = {p.name: p.type for p in params}
    score = simplify(resolve(program.score, types))
    mask = simplify(resolve(program.mask, types))
    lines = [f"variant {program.name}"]
    lines += [f"  score    {show(score)}"]
    lines += ["  mask     every pair" if mask == TRUE else f"  mask     {show(mask)}"]
    for found, param in zip(program.captures, params, strict=True):
        default = "" if found.default is MISSING else f" = {found.default}"
        assumed = "" if found.element else f"   (assumed {param.element}; a call decides)"
        lines.append(f"  capture  {found.declaration}{default}{assumed}")
    if mask != TRUE:
        lines += ["", "mask atoms", *_atoms(mask)]
    return lines


def _atoms(mask: Expr) -> list[str]:
    rows = [(atom.text, atom.means, atom.reason) for atom in explain_atoms(mask)]
    width = max((len(text) for text, _, _ in rows), default=0)
    return [f"  {text:{width}}  {means}: {reason}" for text, means, reason in rows]


def explain_call(
    program: Typed, inputs: Inputs, bound: tuple[Bound, ...], backend: str, why: str
) -> list[str]:
    """The backend of a call, its tiles, and what is copied."""
    lines = ["", f"backend {backend}: {why}"]
    if backend == "triton":
        on_gpu = inputs.q.device.type == "cuda"
        target = device(inputs.q.device.index) if on_gpu else INTERPRETER
        chosen = attend_triton.options(program, inputs, bound)
        lines += explain_kernel(triton_plan(program, chosen, target))
    if backend == "hopper":
        lines += _hopper(
            program,
            attend_hopper.options(program, inputs, bound),
            device(inputs.q.device.index),
        )
        lines += _hopper_backward(
            program,
            replace(
                attend_triton.options(program, inputs, bound), deterministic=inputs.must_repeat
            ),
            device(inputs.q.device.index),
            backward_hopper.unfit(program, inputs),
        )
    if backend == "cpu":
        block_m, block_n = attend_cpu.blocks(inputs)
        lines.append(f"  tiles    {block_m} queries by {block_n} keys, of all heads at a time")
    if backend == "eager":
        lines.append("  dense, in float64: memory for every pair")
    named = (("q", inputs.q), ("k", inputs.k), ("v", inputs.v))
    for name, x in named:
        if backend == "triton" and attend_triton.unit_stride(x) is not x:
            lines.append(f"  copy     {name} once: its last stride is {x.stride(3)}, not 1")
    return lines


def explain_shape(program: Typed, chosen: Options, target: Target) -> list[str]:
    """The kernel for a described shape."""
    shape = chosen.dtype, chosen.head_dim, chosen.v_head_dim
    if not attend_hopper.is_hopper(target):
        lines = ["", f"backend triton: for {target}"]
    elif reason := attend_hopper.unfit_shape(*shape):
        lines = ["", f"backend triton: for {target}; the hopper backend is not for it: {reason}"]
    else:
        lines = ["", f"backend hopper: for {target}"]
        lines += _hopper(program, attend_hopper.of_options(program, chosen), target)
        return lines + _hopper_backward(
            program, chosen, target, backward_hopper.unfit_shape(*shape)
        )
    return lines + explain_kernel(triton_plan(program, chosen, target))


def _hopper(program: Typed, chosen: Options, target: Target) -> list[str]:
    """The decisions of a Hopper kernel, and which configuration the assembler took."""
    kernel = attend_hopper.found(program, chosen, target)
    note = attend_hopper.tuning(program, chosen, target)
    plans = attend_hopper.plans(
        program, chosen, target, attend_hopper.tuned(program, chosen, target)
    )
    lines = explain_hopper(plans[len(kernel.notes) - 1 if kernel is not None else 0])
    if note is not None:
        lines.append(_tuned("bench --tune", note))
    if kernel is None:
        return [*lines, "  tried    nothing so far: it is compiled at the first call"]
    return lines + [f"  tried    {note}" for note in kernel.notes]


def _tuned(command: str, note: Mapping[str, Any]) -> str:
    return f"  tuned    by `{command}` for {note.get('shape')} on {note.get('gpu')}"


def _hopper_backward(program: Typed, chosen: Options, target: Target, unfit: str) -> list[str]:
    """What computes the gradients of a call on a Hopper GPU."""
    if reason := unfit or backward_hopper.known_refusal(program, chosen, target):
        return [f"  backward portable: {reason}"]
    if is_wide(chosen):
        return _wide_backward(program, chosen, target)
    chosen = backward_hopper.of_options(program, chosen)
    kernel = backward_hopper.found(program, chosen, target)
    note = backward_hopper.tuning(program, chosen, target)
    plans = backward_hopper.plans(
        program, chosen, target, backward_hopper.tuned(program, chosen, target)
    )
    plan = plans[len(kernel.notes) - 1 if kernel is not None else 0]
    lines = [f"  backward dq, dk and dv in one kernel: {plan.config}"]
    if note is not None:
        lines.append(_tuned("bench --tune-backward", note))
    if plan.in_slots:
        lines.append("  dq       summed in float32 for a few heads at a time")
    if chosen.deterministic:
        lines.append("  dq       the same bits in each run: kv tiles add to it in turns")
    lines += _unlearned(program, chosen, target)
    if kernel is None:
        return [*lines, _UNTRIED]
    return lines + [f"  tried    {note}" for note in kernel.notes]


_UNTRIED = "  tried    no backward so far: it is compiled when it is first asked for"


def _wide_backward(program: Typed, chosen: Options, target: Target) -> list[str]:
    """The same of wide heads, whose gradients come from two kernels."""
    mine = {kernel: wide.of_options(kernel, program, chosen) for kernel in KERNELS}
    plans = {kernel: wide_plan(kernel, program, mine[kernel], target) for kernel in KERNELS}
    lines = [
        f"  backward dk and dv in one kernel: {plans[KEYS]}",
        f"  backward dq in another: {plans[QUERIES]}",
        "  dq       the same bits in each run: each program sums that of its own queries",
    ]
    lines += _unlearned(program, chosen, target)
    kernels = (wide.found(kernel, program, mine[kernel], target) for kernel in KERNELS)
    return lines if all(kernels) else [*lines, _UNTRIED]


def _unlearned(program: Typed, chosen: Options, target: Target) -> list[str]:
    """Why the portable backward runs where all learns that can, if it does."""
    reads = backward_hopper.possible_reads(program, chosen)
    reason = backward_hopper.unlearned(program, reads)
    reason = reason or wide.known_refusal(program, chosen, target, learnable(program))
    return [f"  backward portable with learned captures: {reason}"] if reason else []


def explain_hopper(plan: HopperPlan) -> list[str]:
    """The decisions of a plan, one line each."""
    lines = [f"  tile     {plan.config}", *_numbers(plan), f"  folded   {_folded(plan)}"]
    lines += [f"  keys     {_keys(*plan.keys.body)}"] if plan.keys is not None else []
    lines += [f"  loop     {segment.title}" for segment in plan.kv_segments]
    return lines + _tiles(plan)


def explain_kernel(plan: TritonPlan) -> list[str]:
    """The decisions of a plan, one line each."""
    tile = plan.tile
    lines = [
        f"  tile     {tile.block_m} queries by {tile.block_n} keys, {tile.num_warps} warps, "
        f"{tile.num_stages} stages",
        *_numbers(plan),
        f"  folded   {_folded(plan)}",
    ]
    lines += [f"  keys     {_keys(*run.range.body)}" for run in plan.runs]
    lines += [f"  loop     {segment.title}" for segment in plan.kv_segments]
    return lines + _tiles(plan)


def _tiles(plan: TritonPlan | HopperPlan) -> list[str]:
    """Where the tiles to visit come from, unless the kernel finds them."""
    return _STORED if plan.stored else []


_STORED = [
    "  tiles    found once per call, or by .prepare(): proved from the ends of each tile, "
    "and looked into where that does not decide"
]


def _numbers(plan: TritonPlan | HopperPlan) -> list[str]:
    """Types, and what is padded."""
    options = plan.options
    lines = [
        f"  numbers  {options.dtype}, {options.precision}; ints in "
        f"{'32' if options.small else '64'} bits where they fit",
    ]
    for what, given, padded in (
        ("head dim", options.head_dim, plan.block_d),
        ("v head dim", options.v_head_dim, plan.block_dv),
    ):
        if given != padded:
            lines.append(f"  padded   {what} {given} to {padded} inside the kernel")
    return lines


def _keys(first: Expr, last: Expr) -> str:
    first, last = simplify(first), simplify(last)
    return f"a query sees keys from {show(first)} to {show(last)}"


def _folded(plan: TritonPlan | HopperPlan) -> str:
    if plan.scale_in_softmax:
        return "scale and log2(e) into the softmax: one fused multiply-add per score"
    if plan.score is None:
        return "scale and log2(e) into one factor; its sign is not known"
    return f"scale and log2(e) into the score: {show(plan.score.body[0])}"

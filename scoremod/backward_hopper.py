"""Run the Hopper backward: which calls it takes, its three kernels, their launches.

dq, dk and dv come from one kernel of its own; captures that are read by pairs or along diagonals
from the portable backward's kernels, which also serve every call that this one does not take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from . import attend_hopper, backward_triton
from .attend_hopper import HEAD_DIMS, copyable, described
from .attend_triton import in_float32, on_device
from .backends.compile_hopper_backward import compile_plan
from .backends.compile_triton import Kernel, compile_kernel
from .backends.hopper import HOPPER
from .backward_triton import Call, call_of, collected, nothing, over_batch, row_values, sum_others
from .binding import ELEMENT_OF, Bound
from .blocks import Blocks
from .cache import CACHE, fingerprint, key
from .errors import BackendUnavailable
from .gradients import Gradients, Result, Wanted
from .inputs import Inputs, empty_like_q, shared_values
from .ir.expr import TRUE
from .passes.patterns import Pattern, Read
from .plan import Typed
from .plan_hopper import padded
from .plan_hopper_backward import (
    CONFIGS,
    FINISH,
    MAIN,
    ROWS,
    HopperBackwardPlan,
    SmallPlan,
    configs_of,
    finish_plan,
    hopper_backward_plan,
    rows_plan,
)
from .plan_triton import Options
from .ready import Interpreted, Ready, ready
from .render import render
from .target import INTERPRETER, Target

Tensor = torch.Tensor


def backward(
    program: Typed, inputs: Inputs, bound: tuple[Bound, ...], result: Result, wanted: Wanted
) -> Gradients:
    """The gradients of a call that ran on a Hopper GPU."""
    call = call_of(program, inputs, bound, result, wanted)
    if unfit(program, inputs) or unlearned(call.reads) or refusal(call):
        return backward_triton.backward(program, inputs, bound, result, wanted)
    with on_device(inputs.q), torch.no_grad():
        return nothing(call, wanted) if call.is_empty else _gradients(call, wanted)


def _gradients(call: Call, wanted: Wanted) -> Gradients:
    found: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    if wanted.q or wanted.k or wanted.v:
        found = tensor_gradients(call)
    by_read: dict[int, Tensor] = {}
    if call.reads:
        sum_others(call, row_values(call), by_read)
    return collected(call, wanted, found, by_read)


# -- which calls -------------------------------------------------------------------------------


def unfit(program: Typed, inputs: Inputs) -> str:
    """What about a call does not suit this backward, on a Hopper GPU; "" for nothing."""
    q, k, v = inputs.q, inputs.k, inputs.v
    reason = unfit_shape(program, ELEMENT_OF[q.dtype], q.shape[3], v.shape[3])
    if reason:
        return reason
    if inputs.must_repeat:
        return "deterministic: its dq is added up in the order in which programs come"
    if inputs.kv_lens is not None:
        return "kv_lens: TMA would copy keys beyond them"
    if isinstance(inputs.tiles, Blocks):
        return "tiles= is a list of blocks"
    if program.bundle:
        return "bundles have the portable backward"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not copyable(x):
            return f"TMA cannot copy {name}: its strides are {x.stride()}"
    return ""


def unfit_shape(program: Typed, element: str, head_dim: int, v_head_dim: int) -> str:
    """The same of what a kernel is made for."""
    if element not in ("f16", "bf16"):
        return f"its products are of 16-bit floats, not of {element}"
    if not {head_dim, v_head_dim} <= set(HEAD_DIMS):
        return f"head dims {head_dim} and {v_head_dim} are not multiples of 8 from 40 to 256"
    if (max(padded(head_dim), padded(v_head_dim)), True) not in CONFIGS:
        return f"dk and dv of head dims {head_dim} and {v_head_dim} take more registers than there are"
    if not program.one_query_range:
        return "the mask is not one range of queries"
    return ""


def unlearned(reads: Sequence[Read]) -> str:
    """Which captured gradient belongs to sums that the portable kernels of dq, dk and dv take."""
    for read in reads:
        if read.pattern in (Pattern.ROW, Pattern.COLUMN):
            line = "query" if read.pattern is Pattern.ROW else "key"
            return f"the gradient of `{read.capture}` is summed per {line}"
    return ""


# -- kernels -----------------------------------------------------------------------------------

# Why there is no kernel, by what decides it and where it would run.
_REFUSED: dict[tuple[object, ...], str] = {}


def refusal(call: Call) -> str:
    """Why a call that fits has no kernel, which is compiled to know it; "" if it has one."""
    what = (call.program.canonical, options(call), call.device)
    if what not in _REFUSED:
        try:
            main(call)
        except BackendUnavailable as error:
            _REFUSED[what] = error.message.partition("\n")[0]
    return _REFUSED.get(what, "")


def options(call: Call) -> Options:
    """The kernel variant that serves a call."""
    return of_options(call.options)


def of_options(chosen: Options) -> Options:
    """Options of a portable kernel without what makes no difference here."""
    return replace(attend_hopper.of_options(chosen), positive_scale=True)


def main(call: Call) -> Ready:
    """The kernel of dq, dk and dv."""
    program, chosen = call.program, options(call)

    def build(target: Target) -> Kernel:
        return compile_backward(program, chosen, target)

    return ready(backward_key(program, chosen), call.device, build, _only_on_gpu, "")


def _only_on_gpu() -> Interpreted:
    raise BackendUnavailable("the Hopper backward needs tensors on a GPU")


def backward_key(program: Typed, chosen: Options) -> tuple[object, ...]:
    """What decides the main kernel."""
    return ("hopper_bwd", program.canonical, chosen)


def found(program: Typed, chosen: Options, target: Target) -> Kernel | None:
    """The main kernel, if it was compiled before."""
    return CACHE.find(key(fingerprint(), backward_key(program, chosen), target))


def compile_backward(program: Typed, chosen: Options, target: Target) -> Kernel:
    """Compile the first configuration that the assembler takes as it was meant."""
    notes: list[str] = []
    for plan in plans(program, chosen, target):
        kernel, complaint = compile_plan(plan, source(plan))
        notes.append(f"{plan.config}: {complaint or 'taken'}")
        if not complaint:
            return replace(kernel, notes=tuple(notes))
    raise BackendUnavailable(
        f"no configuration of `{program.name}`'s backward suits {target}: {'; '.join(notes)}",
        hint="the portable backward runs it",
    )


def plans(program: Typed, chosen: Options, target: Target) -> list[HopperBackwardPlan]:
    """The plans to try, the best first."""
    configs = configs_of(chosen, masked=program.mask != TRUE)
    return [hopper_backward_plan(program, chosen, target, config) for config in configs]


def source(plan: HopperBackwardPlan) -> str:
    """The main kernel's text."""
    return render(f"{MAIN}.py", plan, HOPPER)


def small(plan: SmallPlan) -> Ready:
    """A kernel without products."""


def _small(call: Call, kernel: str, make: Any) -> Ready:
    def interpret() -> Interpreted:
        plan = make(INTERPRETER)
        return Interpreted(small_source(plan), plan.kernel, plan.constants)

    what = ("hopper", kernel, make(INTERPRETER).arguments, tuple(make(INTERPRETER).constants.items()), make(INTERPRETER).has_grad_lse)
    return ready(what, call.device, lambda t: compile_small(make(t)), interpret, "")


def small_source(plan: SmallPlan) -> str:
    return render(f"{plan.kernel}.py", plan, HOPPER)


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


def tensor_gradients(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv."""
    inputs, chosen, kernel = call.inputs, options(call), main(call)
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    batch, q_heads, q_len, head_dim = q.shape
    block_m, columns = kernel.block_m, kernel.constants["DQ_COLUMNS"]
    tiles = -(-q_len // block_m) * batch * q_heads
    values = torch.empty(tiles * 2 * block_m, dtype=torch.float32, device=q.device)
    sums = torch.empty(
        (tiles * block_m * padded(head_dim) // 256, 256), dtype=torch.float32, device=q.device
    )
    do = unit(call.grad_out)
    has_grad_lse = call.result.grad_lse is not None
    lse = call.result.lse.contiguous()
    grad_lse = lse if call.result.grad_lse is None else call.result.grad_lse.to(torch.float32)
    o = unit(call.result.out.detach())
    first = _small(call, ROWS, lambda t: rows_plan(chosen, t, block_m, has_grad_lse=has_grad_lse))
    strides = (*o.stride()[:3], *do.stride()[:3], *grad_lse.stride())
    first.run(tiles, [o, do, lse, grad_lse, values, sums, *strides, q_len, q_heads])

    dk, dv = (empty_like_q(x.expand(batch, -1, -1, -1), x.shape[3]) for x in (k, v))
    arguments: list[Any] = []
    for x in (q, k, v, do, dk, dv, values, sums):
        arguments += described(x)
    arguments += [in_float32(inputs.scale)]
    arguments += shared_values(inputs.q_offset, inputs.kv_lens, call.bound)
    kernel.run(-(-k.shape[2] // kernel.block_n) * batch * k.shape[1], arguments)

    dq = empty_like_q(q, head_dim)
    last = _small(call, FINISH, lambda t: finish_plan(chosen, t, block_m, columns))
    last.run(
        tiles * (block_m // 64),
        [sums, dq, *dq.stride()[:3], in_float32(inputs.scale), q_len, q_heads],
    )
    return dq, over_batch(dk, k), over_batch(dv, v)


def unit(x: Tensor) -> Tensor:
    """x as TMA can copy it; anything else is copied once."""
    return x if copyable(x) else x.contiguous()

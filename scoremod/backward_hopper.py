"""Run the Hopper backward: which calls it takes, its three kernels, their launches.

One kernel gives dq, dk and dv; one before it looks at each row, one after it makes dq of its sums.
Captures that are read by pairs or along diagonals get their gradients from the portable backward's
kernels, which also serve every call that this backward does not take. Head dims above 128 have
kernels of their own (`backward_hopper_wide.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import attend_hopper, backward_hopper_wide, backward_triton
from .attend_hopper import HEAD_DIMS, copyable, described, unfit_blocks
from .attend_triton import in_float32, on_device, stored_structure
from .backends.compile_hopper import Refused
from .backends.compile_hopper_backward import compile_plan
from .backends.compile_triton import Kernel
from .backends.hopper import HOPPER
from .backward_hopper_wide import WideKernels, is_wide
from .backward_triton import (
    Call,
    KindOfBackward,
    Line,
    call_of,
    collected,
    keep_kind,
    nothing,
    over_batch,
    row_values,
    sum_others,
)
from .binding import ELEMENT_OF, Bound
from .blocks import Blocks
from .bundle import loaded
from .cache import CACHE, fingerprint, key
from .errors import BackendUnavailable, KernelMissing
from .gradients import Gradients, Result, Wanted
from .hopper_rows import (
    Scratch,
    as_copyable,
    indifferent,
    key_sums,
    kv_heads_of,
    look_at_rows,
    not_interpreted,
    q_tiles_of,
    rows_kernel,
    settle,
    settle_keys,
    small_kernel,
    small_options,
    small_source,
    sums_keys,
)
from .inputs import Inputs, empty_like_q, shared_values
from .launch import device as gpu
from .passes.patterns import Pattern, Read
from .plan import Typed
from .plan_hopper import padded
from .plan_hopper_backward import (
    BLOCK_N,
    CONFIGS,
    FINISH,
    HALF,
    MAIN,
    RANKS,
    BackwardConfig,
    HopperBackwardPlan,
    by_length,
    config_of,
    configs_of,
    counts_of,
    finish_plan,
    hopper_backward_plan,
    in_slots,
    ranks_plan,
    rows_plan,
    slots_of,
    width_of,
)
from .plan_hopper_wide import SUMS, WIDTH, is_added, summed_rows
from .plan_triton import Options
from .plan_triton_backward import DIAGONALS, DQ, PAIRS, learnable, reads_of
from .ready import Ready, ready
from .render import render
from .structure import Sizes, Stored, differing
from .target import Target
from .tuned import keep, noted

Tensor = torch.Tensor


def backward(
    program: Typed, inputs: Inputs, bound: tuple[Bound, ...], result: Result, wanted: Wanted
) -> Gradients:
    """The gradients of a call whose forward ran on a Hopper GPU."""
    call = call_of(program, inputs, bound, result, wanted)
    kernels = kernels_of(call)
    if kernels is None:
        return backward_triton.backward(program, inputs, bound, result, wanted)
    with on_device(inputs.q), torch.no_grad():
        return nothing(call, wanted) if call.is_empty else gradients_of(call, wanted, kernels)


def gradients_of(call: Call, wanted: Wanted, kernels: Kernels | WideKernels) -> Gradients:
    """The gradients of a call that has pairs."""
    found: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    by_read: dict[int, Tensor] = {}
    if wanted.q or wanted.k or wanted.v or kernels.row_reads or sums_keys(call):
        if isinstance(kernels, WideKernels):
            found = backward_hopper_wide.tensor_gradients(call, kernels, wanted, by_read)
        else:
            found = tensor_gradients(call, kernels, by_read)
    sum_rows(call, by_read)
    if call.reads_in(DIAGONALS) or call.reads_in(PAIRS):
        sum_others(call, row_values(call), by_read)
    return collected(call, wanted, found, by_read)


# -- which calls -------------------------------------------------------------------------------


def unfit(program: Typed, inputs: Inputs) -> str:
    """Why the portable backward has to serve a call on a Hopper GPU; "" for no reason."""
    q, k, v = inputs.q, inputs.k, inputs.v
    reason = unfit_shape(ELEMENT_OF[q.dtype], q.shape[3], v.shape[3])
    if reason:
        return reason
    if reason := unfit_blocks(inputs.tiles):
        return reason
    if inputs.must_repeat and (needed := ranks_bytes(program, inputs)) > MOST_RANKS:
        return f"deterministic: the order in which tiles add to dq takes {needed / 2**20:.0f} MB"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not copyable(x):
            return f"TMA cannot copy {name}: its strides are {x.stride()}"
    return ""


def unfit_shape(element: str, head_dim: int, v_head_dim: int) -> str:
    """The same of what a kernel is made for."""
    if element not in ("f16", "bf16"):
        return f"its products are of 16-bit floats, not of {element}"
    if not {head_dim, v_head_dim} <= set(HEAD_DIMS):
        return f"head dims {head_dim} and {v_head_dim} are not multiples of 8 from 40 to 256"
    return ""


# Bytes that `attention_bwd_ranks` may write: at 131,072 tokens it takes 8 MB for each mask.
MOST_RANKS = 2**28


def ranks_bytes(program: Typed, inputs: Inputs) -> int:
    """What it takes to say in which order kv tiles add to dq."""
    width = max(map(padded, (inputs.q.shape[3], inputs.v.shape[3])))
    if width == WIDTH or (not program.has_mask and inputs.tiles is None):
        return 0
    by_sequence = inputs.kv_lens is not None or isinstance(inputs.q_offset, Tensor)
    user = inputs.tiles if isinstance(inputs.tiles, Blocks) else None
    sizes = Sizes.of(inputs)
    batches, heads = differing(program, sizes, user, by_sequence=by_sequence)
    block_m = CONFIGS[width, program.has_score][0].block_m
    return 4 * batches * heads * -(-sizes.q_len // block_m) * -(-sizes.kv_len // BLOCK_N)


def unlearned(program: Typed, reads: Sequence[Read]) -> str:
    """Which captured gradient the portable dq, dk and dv kernels sum as well; "" for none.

    All that is read per query is summed here, and what is added to all scores of a key, times a
    number.
    """
    for read in reads:
        if read.pattern is Pattern.COLUMN and not is_added(program, read):
            return f"the gradient of `{read.capture}` is summed per key"
    return ""


def possible_reads(program: Typed, chosen: Options) -> tuple[Read, ...]:
    """The reads of all captures that a call may ask gradients of."""
    learned = learnable(program)
    return reads_of(program, learned, offset_per_batch=chosen.offset_per_batch) if learned else ()


# -- the main kernel ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernels:
    """What the backward of a call launches, and the options that the main kernel was made for."""

    options: Options
    in_slots: bool
    rows: Ready
    main: Ready
    finish: Ready
    row_reads: tuple[int, ...] = ()  # reads per query that another kernel sums
    sums: Ready | None = None


# What calls launch, by their kind and whether they repeat; None where the portable kernels run.
_KERNELS: dict[KindOfBackward, Kernels | WideKernels | None] = {}


def kernels_of(call: Call) -> Kernels | WideKernels | None:
    """What a call launches, compiled if it has to be; None if it does not fit or was refused."""
    what = (*call.kind, call.inputs.must_repeat)
    if what not in _KERNELS:
        keep_kind(_KERNELS, what, launched(call) if fits(call) and not refusal(call) else None)
    return _KERNELS[what]


def fits(call: Call) -> bool:
    """Whether a kernel of this backward may serve a call, so far as is known without compiling."""
    return not (unfit(call.program, call.inputs) or unlearned(call.program, call.reads))


def launched(call: Call) -> Kernels | WideKernels:
    """What a call launches that has a main kernel."""
    if is_wide(call.options):
        return backward_hopper_wide.kernels(call)
    return around(call, main(call))


def around(call: Call, made: Ready) -> Kernels:
    """A main kernel, and those before and after it."""
    chosen = options_of(call)
    return Kernels(
        chosen,
        in_slots(call.program, chosen),
        rows_kernel(call, made.block_m, ordered=call.inputs.must_repeat),
        made,
        finish_kernel(call, made.block_m, made.constants["DQ_COLUMNS"]),
        tuple(summed_rows(call.program, call.reads)),
        sums_kernel(call),
    )


def sums_kernel(call: Call) -> Ready | None:
    """The kernel that sums for what is read per query, where that learns: the main one cannot."""
    if not summed_rows(call.program, call.reads):
        return None
    return backward_hopper_wide.main(call, SUMS)


def refusal(call: Call) -> str:
    """Why a call that fits has no main kernel, which is compiled to know it; "" if it has one."""
    if is_wide(call.options):
        return _why_none(lambda: backward_hopper_wide.kernels(call))
    return _why_none(lambda: (main(call), sums_kernel(call)))


def _why_none(find: Callable[[], object]) -> str:
    """Why a kernel is not found, in one line; "" where it is."""
    try:
        find()
    except (BackendUnavailable, KernelMissing) as error:
        return error.message.partition("\n")[0]
    return ""


def known_refusal(program: Typed, chosen: Options, target: Target) -> str:
    """The same without compiling: "" where nothing was tried so far, too."""
    if is_wide(chosen):
        return backward_hopper_wide.known_refusal(program, chosen, target)
    chosen = of_options(program, chosen)
    if program.bundle:
        return _why_none(lambda: found(program, chosen, target))
    if tuned(program, chosen, target) is not None:
        return ""
    note = CACHE.note(_refusal_key(program, chosen, target))
    return "" if note is None else str(note.get("reason")).partition("\n")[0]


def _refusal_key(program: Typed, chosen: Options, target: Target) -> str:
    return key("refused", fingerprint(), backward_key(program, chosen), target)


def of_options(program: Typed, chosen: Options) -> Options:
    """Options of a portable kernel without what makes no difference here.

    Several ranges of queries are not solved in the kernel, but read as any other structure; so are
    those of all masks where kv tiles add to dq in an order, which then comes from what they visit.
    """
    by_place = chosen.deterministic and program.has_mask
    stored = chosen.blocks or not program.one_query_range or by_place
    return indifferent(program, chosen, stored=stored)


def options_of(call: Call) -> Options:
    """What the main kernel is specialised for."""
    repeats, summed = call.inputs.must_repeat, sums_keys(call)
    chosen = replace(call.options, deterministic=repeats, sums_keys=summed)
    return of_options(call.program, chosen)


def main(call: Call) -> Ready:
    """The kernel of dq, dk and dv."""
    program, chosen, device = call.program, options_of(call), call.device
    best = tuned(program, chosen, gpu(device.index)) if device.type == "cuda" else None

    def build(target: Target) -> Kernel:
        return compile_unless_refused(program, chosen, target, best)

    what = backward_key(program, chosen, best)
    return ready(what, device, build, not_interpreted, program.bundle)


def backward_key(
    program: Typed, chosen: Options, best: BackwardConfig | None = None
) -> tuple[object, ...]:
    """What decides the main kernel; `best` is the configuration that was measured to be."""
    what = ("hopper_bwd", program.canonical, chosen)
    return what if best is None else (*what, best)


def found(program: Typed, chosen: Options, target: Target) -> Kernel | None:
    """The main kernel, if it was compiled before; a bundle has it, or says why not."""
    what = backward_key(program, chosen, tuned(program, chosen, target))
    if program.bundle:
        return loaded(program.bundle).kernel(what, target)
    return CACHE.find(key(fingerprint(), what, target))


def compile_unless_refused(
    program: Typed, chosen: Options, target: Target, best: BackwardConfig | None = None
) -> Kernel:
    """The main kernel; a refusal takes a minute of assembling, and is kept beside the kernels."""
    if reason := known_refusal(program, chosen, target):
        raise Refused(reason, hint="the portable backward runs it")
    try:
        return compile_backward(program, chosen, target, best)
    except Refused as error:
        with contextlib.suppress(OSError):
            note = _refusal_key(program, of_options(program, chosen), target)
            CACHE.put_note(note, {"reason": error.message})
        raise


def compile_backward(
    program: Typed, chosen: Options, target: Target, best: BackwardConfig | None = None
) -> Kernel:
    """Compile the first configuration that the assembler takes as it was meant."""
    notes: list[str] = []
    for plan in plans(program, chosen, target, best):
        kernel, complaint = compile_plan(plan, source(plan))
        notes.append(f"{plan.config}: {complaint or 'taken'}")
        if not complaint:
            return replace(kernel, notes=tuple(notes))
    raise Refused(
        f"no configuration of the backward of `{program.name}` suits {target}: {'; '.join(notes)}",
        hint="the portable backward runs it",
    )


def plans(
    program: Typed, chosen: Options, target: Target, best: BackwardConfig | None = None
) -> list[HopperBackwardPlan]:
    """The plans to try, the best first."""
    known = configs_of(program, chosen)
    configs = known if best is None else tuple(dict.fromkeys((best, *known)))
    return [hopper_backward_plan(program, chosen, target, config) for config in configs]


def source(plan: HopperBackwardPlan) -> str:
    """The main kernel's text."""
    return render(f"{MAIN}.py", plan, HOPPER)


def sources(program: Typed, chosen: Options, target: Target) -> list[str]:
    """The texts of the three kernels, in their order, and of one that sums where captures learn.

    Of the main one the configuration that was compiled, else the one that is tried first.
    """
    if is_wide(chosen):
        return backward_hopper_wide.sources(program, chosen, target)
    tried = plans(program, chosen, target, tuned(program, chosen, target))
    kernel = found(program, chosen, target)
    plan = tried[len(kernel.notes) - 1 if kernel is not None else 0]
    block_m = plan.config.block_m
    first = rows_plan(chosen, target, block_m, has_grad_lse=False)
    last = finish_plan(chosen, target, block_m, plan.dq_columns)
    summing = backward_hopper_wide.sums_sources(program, chosen, target)
    return [small_source(first), source(plan), *summing, small_source(last)]


# -- configurations that were measured ---------------------------------------------------------


def tuned(program: Typed, chosen: Options, target: Target) -> BackwardConfig | None:
    """The configuration that `bench --tune-backward` noted for a main kernel, if it did."""
    note = tuning(program, chosen, target)
    return None if note is None else config_of(note.get("config"), configs_of(program, chosen))


def tuning(program: Typed, chosen: Options, target: Target) -> dict[str, Any] | None:
    """What `bench --tune-backward` noted."""
    return noted(program, backward_key(program, chosen), target)


def keep_tuned(
    program: Typed,
    chosen: Options,
    target: Target,
    config: BackwardConfig,
    measured: dict[str, Any],
) -> None:
    """Note the best configuration for calls from now on, in other processes too."""
    keep(backward_key(program, chosen), target, config, measured)
    _KERNELS.clear()


# -- the kernels before and after --------------------------------------------------------------


def finish_kernel(call: Call, block_m: int, dq_columns: int) -> Ready:
    """The kernel that makes dq of its sums."""
    chosen = small_options(call.options)
    return small_kernel(
        call,
        finish_key(chosen, block_m, dq_columns),
        lambda target: finish_plan(chosen, target, block_m, dq_columns),
    )


def finish_key(chosen: Options, block_m: int, dq_columns: int) -> tuple[object, ...]:
    """What decides the kernel that makes dq of its sums."""
    return (FINISH, chosen, block_m, dq_columns)


def ranks_kernel(call: Call) -> Ready:
    """The kernel that says in which order kv tiles add to dq."""
    chosen = small_options(call.options)
    return small_kernel(call, (RANKS, chosen), lambda target: ranks_plan(chosen, target))


# -- the call ----------------------------------------------------------------------------------


def tensor_gradients(
    call: Call, kernels: Kernels, by_read: dict[int, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; the gradients of what is read per key go to `by_read`."""
    kernel, q, k, v = kernels.main, call.inputs.q, call.inputs.k, call.inputs.v
    batch, kv_heads, kv_len, _ = k.expand(q.shape[0], -1, -1, -1).shape
    do = as_copyable(call.grad_out)
    slots = slots_of_call(call, kernel) if kernels.in_slots else batch * kv_heads
    scratch = scratch_of(call, kernel.block_m, slots)
    look_at_rows(call, kernels.rows, do, kernel.block_m, scratch)
    dq = empty_like_q(q, q.shape[3])
    dk, dv = (empty_like_q(x.expand(batch, -1, -1, -1), x.shape[3]) for x in (k, v))
    programs = -(-kv_len // kernel.block_n) * batch * kv_heads
    kernel.run(programs, arguments(call, kernels, scratch, do, (dq, dk, dv)))
    settle_keys(call, scratch.ds_sums, by_read)
    if kernels.sums is not None:
        rows = scratch.rows, kernel.block_m
        backward_hopper_wide.add_row_sums(call, kernels.sums, kernels.row_reads, do, rows, by_read)
    finish(call, kernels.finish, scratch, dq, kernel.block_m)
    return dq, over_batch(dk, k), over_batch(dv, v)


def sum_rows(call: Call, by_read: dict[int, Tensor]) -> None:
    """Gradients of what is added to a query's scores, whose ds add up to its LSE's gradient."""
    if any(n not in by_read for n in call.reads_in(DQ)):
        grad_lse, lse = call.result.grad_lse, call.result.lse
        sums = torch.zeros_like(lse) if grad_lse is None else grad_lse.to(torch.float32)
        sums = torch.where(lse == -torch.inf, 0.0, sums)
        settle(call, DQ, sums, Line(Pattern.ROW, lse.shape[2]), by_read)


def slots_of_call(call: Call, kernel: Ready) -> int:
    """For how many kv heads there are sums of dq at a time."""
    q, k = call.inputs.q, call.inputs.k
    # A causal mask leaves nothing to do for kv tiles past the queries: fewer are at work at a time.
    tiles = -(-min(q.shape[2], k.shape[2]) // kernel.block_n)
    return slots_of(
        q.shape[0] * k.shape[1], tiles, attend_hopper.multiprocessors(call.device.index)
    )


def structure_of(call: Call, kernels: Kernels, scratch: Scratch) -> list[Any]:
    """Which q tiles each kv tile visits and when, where the kernel reads it from memory."""
    chosen, blocks = kernels.options, (kernels.main.block_m, kernels.main.block_n)
    if not chosen.stored:
        return [*scratch.turns]
    found = stored_structure(
        call.program,
        chosen,
        call.inputs,
        call.bound,
        blocks,
        transposed=True,
        by_length=by_length(chosen, in_slots=kernels.in_slots),
    )
    if not chosen.deterministic:
        return found.arguments
    q_len, kv_len = call.inputs.q.shape[2], call.inputs.k.shape[2]
    ranks = ranks_of(call, found, -(-q_len // blocks[0]), -(-kv_len // blocks[1]))
    return [*found.arguments, *scratch.turns, ranks]


def ranks_of(call: Call, found: Stored, q_tiles: int, kv_tiles: int) -> Tensor:
    """How many kv tiles add to a q tile before one does, int32 [structures * kv tiles, q tiles]."""
    rows = found.runs.shape[0]
    ranks = found.runs.new_empty(rows, q_tiles)
    programs = rows // kv_tiles * -(-q_tiles // 32)
    ranks_kernel(call).run(programs, [found.runs, found.words, ranks, q_tiles, kv_tiles])
    return ranks


def scratch_of(call: Call, block_m: int, slots: int) -> Scratch:
    """Room for them, with sums of dq for so many kv heads."""
    tiles, heads = q_tiles_of(call, block_m), kv_heads_of(call)
    floats: dict[str, Any] = {"dtype": torch.float32, "device": call.device}
    ints: dict[str, Any] = {"dtype": torch.int32, "device": call.device}
    sums = tiles // heads * slots * block_m * width_of(call.options)
    return Scratch(
        torch.empty(tiles * 2 * block_m, **floats),
        torch.empty(sums // 256, 256, **floats),
        slots,
        torch.empty(counts_of(heads), **ints),
        (torch.empty(tiles, **ints),) if call.inputs.must_repeat else (),
        key_sums(call),
    )


def arguments(
    call: Call, kernels: Kernels, scratch: Scratch, do: Tensor, made: tuple[Tensor, Tensor, Tensor]
) -> list[Any]:
    """The run-time arguments of the main kernel, in its order; `made` are dq, dk and dv."""
    inputs, (dq, *others) = call.inputs, made
    given = (inputs.q.detach(), inputs.k.detach(), inputs.v.detach(), do)
    values: list[Any] = []
    for x in (*given, *others, scratch.rows, scratch.sums):
        values += described(x)
    values.append(in_float32(inputs.scale))
    values += shared_values(inputs.q_offset, inputs.kv_lens, call.bound)
    values += structure_of(call, kernels, scratch)
    if kernels.in_slots:
        values += [scratch.slots, scratch.counters, scratch.sums, dq, *dq.stride()[:3]]
    return [*values, *scratch.ds_sums]


def finish(call: Call, kernel: Ready, scratch: Scratch, dq: Tensor, block_m: int) -> None:
    """Make dq of the sums that there are."""
    _, q_heads, q_len, _ = dq.shape
    heads, group = kv_heads_of(call), q_heads // call.inputs.k.shape[1]
    values = [scratch.sums, dq, *dq.stride()[:3], in_float32(call.inputs.scale)]
    tiles = q_tiles_of(call, block_m) // heads * scratch.slots
    kernel.run(tiles * (block_m // HALF), [*values, q_len, q_heads, heads, group, scratch.slots])

"""Run the Hopper backward of head dims above 128: one kernel of dk and dv, one of dq.

At head dims up to 128 another sums each query's rows, for gradients of slopes or temperatures.
Each program owns what it sums, so that nothing is added up in memory, and gradients are the same
bits in each run.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from .attend_hopper import described
from .attend_triton import in_float32, stored_structure
from .backends.compile_hopper import Refused
from .backends.compile_hopper_wide import compile_plan
from .backends.compile_triton import Kernel
from .backends.hopper import HOPPER
from .backward_triton import Call, over_batch, row_sums, settled_rows
from .bundle import loaded
from .cache import CACHE, fingerprint, key
from .errors import BackendUnavailable, KernelMissing
from .gradients import Wanted
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
    settle_keys,
    small_source,
    sums_keys,
)
from .inputs import empty_like_q, shared_values
from .plan import Typed
from .plan_hopper_backward import counts_of, rows_plan, width_of
from .plan_hopper_wide import (
    KERNELS,
    KEYS,
    QUERIES,
    ROWS,
    SUMS,
    WIDTH,
    WidePlan,
    summed_rows,
    wide_plan,
)
from .plan_triton import Options
from .plan_triton_backward import Learned, learnable, reads_of
from .ready import Ready, ready
from .render import render
from .target import Target

Tensor = torch.Tensor


def is_wide(chosen: Options) -> bool:
    """Whether these kernels serve such head dims."""
    return width_of(chosen) == WIDTH


# -- the kernels -------------------------------------------------------------------------------


@dataclass(frozen=True)
class WideKernels:
    """What the backward of a call launches."""

    rows: Ready
    keys: Ready
    queries: Ready
    row_reads: tuple[int, ...] = ()  # reads per query that the last one sums


def kernels(call: Call) -> WideKernels:
    """What a call launches, compiled if it has to be."""
    keys, queries = (main(call, kernel) for kernel in KERNELS)
    mine = tuple(summed_rows(call.program, call.reads))
    return WideKernels(rows_kernel(call, ROWS), keys, queries, mine)


def of_options(kernel: str, program: Typed, chosen: Options) -> Options:
    """What a kernel is specialised for; the order of additions is always the same."""
    solved = program.one_query_range if kernel == KEYS else program.one_range
    sums_keys = chosen.sums_keys and kernel == KEYS
    chosen = replace(chosen, deterministic=False, sums_keys=sums_keys)
    return indifferent(program, chosen, stored=chosen.blocks or not solved)


def options_of(kernel: str, call: Call) -> Options:
    """What a kernel of a call is specialised for."""
    return of_options(kernel, call.program, replace(call.options, sums_keys=sums_keys(call)))


def main(call: Call, kernel: str) -> Ready:
    """One of these kernels for a call."""
    program, chosen = call.program, options_of(kernel, call)
    learned = learned_in(kernel, program, chosen, call.learned)

    def build(target: Target) -> Kernel:
        return compile_unless_refused(kernel, program, chosen, target, learned)

    what = wide_key(kernel, program, chosen, learned)
    return ready(what, call.device, build, not_interpreted, program.bundle)


def learned_in(
    kernel: str, program: Typed, chosen: Options, learned: tuple[Learned, ...]
) -> tuple[Learned, ...]:
    """What learns, if a kernel sums anything for it; else one serves all calls."""
    reads = reads_of(program, learned, offset_per_batch=chosen.offset_per_batch)
    return learned if kernel in (QUERIES, SUMS) and summed_rows(program, reads) else ()


def wide_key(
    kernel: str, program: Typed, chosen: Options, learned: tuple[Learned, ...] = ()
) -> tuple[object, ...]:
    """What decides a kernel."""
    what = (kernel, program.canonical, chosen)
    return (*what, learned) if learned else what


def found(
    kernel: str, program: Typed, chosen: Options, target: Target, learned: tuple[Learned, ...] = ()
) -> Kernel | None:
    """A kernel, if it was compiled before; a bundle has it, or says why not."""
    what = wide_key(kernel, program, chosen, learned)
    if program.bundle:
        return loaded(program.bundle).kernel(what, target)
    return CACHE.find(key(fingerprint(), what, target))


def known_refusal(
    program: Typed, chosen: Options, target: Target, learned: tuple[Learned, ...] = ()
) -> str:
    """Why there is no kernel, without compiling: "" where there is, or nothing was tried so far.

    Of head dims up to 128 that of the kernel that sums, where something asks for it.
    """
    for kernel in KERNELS if is_wide(chosen) else (SUMS,):
        mine = of_options(kernel, program, chosen)
        asked = learned_in(kernel, program, mine, learned)
        if kernel == SUMS and not asked:
            continue
        if program.bundle:
            try:
                found(kernel, program, mine, target, asked)
            except (BackendUnavailable, KernelMissing) as error:
                return error.message.partition("\n")[0]
        elif note := CACHE.note(_refusal_key(kernel, program, mine, target, asked)):
            return str(note.get("reason")).partition("\n")[0]
    return ""


def _refusal_key(
    kernel: str, program: Typed, chosen: Options, target: Target, learned: tuple[Learned, ...]
) -> str:
    return key("refused", fingerprint(), wide_key(kernel, program, chosen, learned), target)


def compile_unless_refused(
    kernel: str, program: Typed, chosen: Options, target: Target, learned: tuple[Learned, ...] = ()
) -> Kernel:
    """A kernel; a refusal is kept beside the kernels."""
    note = _refusal_key(kernel, program, chosen, target, learned)
    if (refused := CACHE.note(note)) is not None:
        raise Refused(str(refused.get("reason")), hint="the portable backward runs it")
    try:
        return compile_wide(kernel, program, chosen, target, learned)
    except Refused as error:
        with contextlib.suppress(OSError):
            CACHE.put_note(note, {"reason": error.message})
        raise


def compile_wide(
    kernel: str, program: Typed, chosen: Options, target: Target, learned: tuple[Learned, ...] = ()
) -> Kernel:
    """Compile a kernel, if the assembler takes it as it was meant."""
    plan = wide_plan(kernel, program, chosen, target, learned)
    made, complaint = compile_plan(plan, source(plan))
    if complaint:
        raise Refused(
            f"`{kernel}` of `{program.name}` does not suit {target}: {complaint}",
            hint="the portable backward runs it",
        )
    return made


def source(plan: WidePlan) -> str:
    """A kernel's text."""
    return render(f"{plan.kernel}.py", plan, HOPPER)


def sources(program: Typed, chosen: Options, target: Target) -> list[str]:
    """The texts of the three kernels, in their order, with every gradient that they sum."""
    learned = learnable(program)
    made = (wide_plan(k, program, of_options(k, program, chosen), target, learned) for k in KERNELS)
    first = rows_plan(chosen, target, ROWS, has_grad_lse=False)
    return [small_source(first), *map(source, made)]


def sums_sources(program: Typed, chosen: Options, target: Target) -> list[str]:
    """The text of the kernel that sums for what can be learned per query, if anything can."""
    mine = of_options(SUMS, program, chosen)
    learned = learned_in(SUMS, program, mine, learnable(program))
    return [source(wide_plan(SUMS, program, mine, target, learned))] if learned else []


# -- the call ----------------------------------------------------------------------------------


def tensor_gradients(
    call: Call, made: WideKernels, wanted: Wanted, by_read: dict[int, Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dq, dk and dv, those that are wanted; the gradients of what is summed go to `by_read`."""
    q, k, v = call.inputs.q, call.inputs.k, call.inputs.v
    batch, q_heads, q_len, _ = q.shape
    do, dq, dk, dv = as_copyable(call.grad_out), None, None, None
    scratch = scratch_of(call)
    look_at_rows(call, made.rows, do, ROWS, scratch)
    if wanted.k or wanted.v or scratch.ds_sums:
        dk, dv = (empty_like_q(x.expand(batch, -1, -1, -1), x.shape[3]) for x in (k, v))
        programs = -(-k.shape[2] // made.keys.block_n) * batch * k.shape[1]
        values = arguments(call, KEYS, made.keys, (do, scratch.rows), (dk, dv))
        made.keys.run(programs, [*values, *scratch.ds_sums])
        settle_keys(call, scratch.ds_sums, by_read)
        dk, dv = over_batch(dk, k), over_batch(dv, v)
    if wanted.q or made.row_reads:
        dq = empty_like_q(q, q.shape[3])
        programs = -(-q_len // made.queries.block_m) * batch * q_heads
        values = arguments(call, QUERIES, made.queries, (do, scratch.rows), (dq,))
        sums = row_sums(call, len(made.row_reads))
        values += [sums, sums.stride(0)] if made.row_reads else []
        made.queries.run(programs, values)
        by_read |= settled_rows(call, made.row_reads, sums)
    return dq, dk, dv


def add_row_sums(
    call: Call,
    kernel: Ready,
    numbers: tuple[int, ...],
    do: Tensor,
    rows: tuple[Tensor, int],
    by_read: dict[int, Tensor],
) -> None:
    """The gradients of reads per query, by a kernel of their own; row values come in tiles."""
    values, row_tile = rows
    batch, q_heads, q_len, _ = call.inputs.q.shape
    sums = row_sums(call, len(numbers))
    given = arguments(call, SUMS, kernel, (do, values), ())
    programs = -(-q_len // kernel.block_m) * batch * q_heads
    kernel.run(programs, [*given, sums, sums.stride(0), row_tile])
    by_read |= settled_rows(call, numbers, sums)


def scratch_of(call: Call) -> Scratch:
    """Row values, and sums of captures' gradients: nothing else is added up in memory."""
    tiles, device = q_tiles_of(call, ROWS), call.device
    rows = torch.empty(tiles * 2 * ROWS, dtype=torch.float32, device=device)
    counters = torch.empty(counts_of(kv_heads_of(call)), dtype=torch.int32, device=device)
    # Of keys that no query of a head sees, nothing is written.
    ds_sums = tuple(x.zero_() for x in key_sums(call))
    return Scratch(rows, rows.new_empty(0, 256), 0, counters, (), ds_sums)


def arguments(
    call: Call,
    kernel: str,
    ready: Ready,
    came: tuple[Tensor, Tensor],
    made: tuple[Tensor, ...],
) -> list[Any]:
    """The run-time arguments of a kernel, in its order; do and row values came."""
    inputs, (do, rows) = call.inputs, came
    values: list[Any] = []
    for x in (inputs.q.detach(), inputs.k.detach(), inputs.v.detach(), do, *made):
        values += described(x)
    values += described(rows) if kernel == KEYS else [rows]
    values.append(in_float32(inputs.scale))
    values += shared_values(inputs.q_offset, inputs.kv_lens, call.bound)
    chosen = options_of(kernel, call)
    if chosen.stored:
        blocks, transposed = (ready.block_m, ready.block_n), kernel == KEYS
        values += stored_structure(
            call.program, chosen, inputs, call.bound, blocks, transposed=transposed
        ).arguments
    return values

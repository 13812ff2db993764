"""Run the portable Triton backward: which kernels a call needs, and what becomes of their sums.

A first kernel looks at each row; then one walks over q tiles for dk and dv, one over kv tiles for
dq. Gradients of captures are summed on the way, per query or per key, or by kernels of their own
(`passes/patterns.py`); the sums of a line are added to their elements here, in a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from .attend_triton import (
    INT32_MAX,
    SHORT,
    in_float32,
    is_aligned,
    is_small,
    on_device,
    options,
    reach,
    stored_structure,
    unit_stride,
)
from .backends.compile_triton import Kernel, compile_kernel
from .backends.triton import TRITON, fp_fusion
from .binding import Bound
from .blocks import Blocks
from .errors import BackendUnavailable
from .gradients import Gradients, Result, Wanted
from .inputs import Inputs, empty_like_q, shared_values
from .ir.ops import Op
from .passes.patterns import Pattern, Read
from .plan import Typed
from .plan_triton import ELEMENT_BYTES, Options, Reach
from .plan_triton_backward import (
    DELTA,
    DIAGONALS,
    DKDV,
    DQ,
    KERNEL_OF,
    PAIRS,
    PLACES,
    BackwardPlan,
    DeltaPlan,
    Group,
    Learned,
    PlacesPlan,
    Rows,
    backward_plan,
    delta_plan,
    groups_of,
    places_plan,
    reads_of,
    tiles_of,
)
from .ready import Interpreted, Ready, ready
from .render import render
from .target import INTERPRETER, Target

Tensor = torch.Tensor


def backward(
    program: Typed, inputs: Inputs, bound: tuple[Bound, ...], result: Result, wanted: Wanted
) -> Gradients:
    """The gradients that are wanted of a call on a GPU, or in Triton's interpreter."""
    call = call_of(program, inputs, bound, result, wanted)
    with on_device(inputs.q), torch.no_grad():
        return nothing(call, wanted) if call.is_empty else _gradients(call, wanted)


def call_of(
    program: Typed, inputs: Inputs, bound: tuple[Bound, ...], result: Result, wanted: Wanted
) -> Call:
    """A backward that can be computed; raises where it cannot."""
    grad_out = unit_stride(result.grad_out.detach().to(inputs.q.dtype))
    result = Result(result.out, result.lse, grad_out, result.grad_lse, result.residual)
    kind = kind_of_backward(program, inputs, bound, result, wanted)
    chosen = _CHOSEN.get(kind)
    if chosen is None:
        learned = learned_of(program, bound, wanted)
        reads = _reads_of(program, learned, isinstance(inputs.q_offset, Tensor))
        chosen = (backward_options(program, inputs, bound, result), learned, reads)
        keep_kind(_CHOSEN, kind, chosen)
    call = Call(program, inputs, bound, *chosen, result, kind)
    _require_deterministic(call)
    _require_mask(call)
    return call


KindOfBackward = tuple[object, ...]
# Options, what learns and its reads of calls, by their kind.
_CHOSEN: dict[KindOfBackward, tuple[Options, tuple[Learned, ...], tuple[Read, ...]]] = {}
MAX_KINDS = 4096
T = TypeVar("T")


def kind_of_backward(
    program: Typed, inputs: Inputs, bound: tuple[Bound, ...], result: Result, wanted: Wanted
) -> KindOfBackward:
    """All that options, what learns and the choice of kernels depend on, but for torch's switches.

    It takes a fraction of the time that they take to find. `warm.kind_of` is the same of a forward.
    """
    q, tiles, scale = inputs.q, inputs.tiles, inputs.scale
    captured = [x.value for x in bound if isinstance(x.value, Tensor)]
    tensors = (q, inputs.k, inputs.v, result.out, result.grad_out, *captured)
    return (
        program.bundle,
        program.canonical,
        wanted,
        q.dtype,
        q.device,
        inputs.precision,
        inputs.keeps_residual,
        inputs.kv_lens is None,
        isinstance(inputs.q_offset, Tensor),
        is_small(inputs, bound),
        None if isinstance(scale, Tensor) else scale > 0,
        (tiles.block_m, tiles.block_n, tiles.allowed.shape) if isinstance(tiles, Blocks) else None,
        tiles is None,
        result.grad_lse is None,
        result.residual is None,
        *[(x.shape, x.stride(), x.data_ptr() % 16 == 0) for x in tensors],
        *[x.given.shape for x in bound if isinstance(x.given, Tensor)],
    )


def keep_kind(
    kept: dict[KindOfBackward, T], kind: KindOfBackward, found: T, most: int | None = None
) -> None:
    """Keep what was found of a kind of calls; a sweep of shapes does not pile up."""
    if len(kept) >= (most or MAX_KINDS):
        kept.clear()
    kept[kind] = found


@dataclass(frozen=True)
class Call:
    """One backward: what was given to the forward, and what its gradients need."""

    program: Typed
    inputs: Inputs
    bound: tuple[Bound, ...]
    options: Options
    learned: tuple[Learned, ...]
    reads: tuple[Read, ...]
    result: Result
    kind: KindOfBackward

    @property
    def grad_out(self) -> Tensor:
        return self.result.grad_out

    @property
    def device(self) -> torch.device:
        return self.inputs.q.device

    @property
    def is_empty(self) -> bool:
        """Whether there are no pairs."""
        return self.inputs.q.numel() == 0 or self.inputs.k.shape[2] == 0

    @property
    def heads(self) -> tuple[int, int]:
        """Batch and query heads."""
        return self.inputs.q.shape[0], self.inputs.q.shape[1]

    def reads_in(self, kernel: str) -> list[int]:
        """The numbers of the reads that a kernel sums."""
        return [n for n, read in enumerate(self.reads) if KERNEL_OF[read.pattern] == kernel]

    def learned_with(self, name: str) -> tuple[Learned, Bound]:
        """A learned capture by its name."""
        found = next(x for x in self.learned if self.bound[x.position].param.name == name)
        return found, self.bound[found.position]

    def zeros(self, name: str) -> Tensor:
        """A gradient to sum in: float32, a repeated axis with length 1."""
        learned, item = self.learned_with(name)
        assert isinstance(item.value, Tensor)
        shape = [1 if k in learned.repeated else n for k, n in enumerate(item.value.shape)]
        return torch.zeros(shape, dtype=torch.float32, device=self.device)


def nothing(call: Call, wanted: Wanted) -> Gradients:
    """The gradients of a call without pairs."""
    q, k, v = call.inputs.q, call.inputs.k, call.inputs.v
    asked = ((q, wanted.q), (k, wanted.k), (v, wanted.v))
    dq, dk, dv = (torch.zeros_like(x) if wants else None for x, wants in asked)
    return Gradients(
        dq,
        dk,
        dv,
        {name: _as_given(call, name, call.zeros(name)) for name in wanted.captures},
    )


def _gradients(call: Call, wanted: Wanted) -> Gradients:
    rows = row_values(call)
    dq = dk = dv = None
    by_read: dict[int, Tensor] = {}
    if wanted.k or wanted.v or call.reads_in(DKDV):
        dk, dv = key_gradients(call, rows, by_read)
    if wanted.q or call.reads_in(DQ):
        dq = query_gradient(call, rows, by_read)
    sum_others(call, rows, by_read)
    return collected(call, wanted, (dq, dk, dv), by_read)


def sum_others(call: Call, rows: Tensor, by_read: dict[int, Tensor]) -> None:
    """Gradients of what is read neither per query nor per key."""
    if call.reads_in(DIAGONALS):
        sum_diagonals(call, rows, by_read)
    if call.reads_in(PAIRS):
        sum_pairs(call, rows, by_read)


def collected(
    call: Call,
    wanted: Wanted,
    found: tuple[Tensor | None, Tensor | None, Tensor | None],
    by_read: dict[int, Tensor],
) -> Gradients:
    """What was asked for, out of dq, dk, dv and the gradients of reads."""
    dq, dk, dv = found
    return Gradients(
        dq if wanted.q else None,
        dk if wanted.k else None,
        dv if wanted.v else None,
        {name: _total(call, name, by_read) for name in wanted.captures},
    )


def _total(call: Call, name: str, by_read: dict[int, Tensor]) -> Tensor:
    """The gradient of a capture: those of its reads, added."""
    total = call.zeros(name)
    for n, gradient in by_read.items():
        if call.reads[n].capture == name:
            total += gradient
    return _as_given(call, name, total)


def _as_given(call: Call, name: str, total: Tensor) -> Tensor:
    """A gradient in the shape and dtype of its capture."""
    given = call.learned_with(name)[1].given
    assert isinstance(given, Tensor)
    return total.reshape(given.shape).to(given.dtype)


# -- what is learned, and how ------------------------------------------------------------------


def learned_of(program: Typed, bound: tuple[Bound, ...], wanted: Wanted) -> tuple[Learned, ...]:
    """The captures whose gradients are computed, in the program's order.

    Those that are wanted; a bundle has kernels for all together only.
    """
    names = wanted.captures
    if program.bundle and names:
        names = program.given_score.names & {x.param.name for x in bound if _is_float(x.value)}
    return tuple(Learned(k, _repeated(x)) for k, x in enumerate(bound) if x.param.name in names)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _repeated(item: Bound) -> tuple[int, ...]:
    """The axes of length 1 that binding expanded."""
    assert isinstance(item.value, Tensor) and isinstance(item.given, Tensor)
    if not item.param.rank:
        return ()
    pairs = zip(item.given.shape, item.value.shape, strict=True)
    return tuple(k for k, (given, bound) in enumerate(pairs) if given != bound)


@functools.lru_cache(maxsize=256)
def _reads_of(
    program: Typed, learned: tuple[Learned, ...], offset_per_batch: bool
) -> tuple[Read, ...]:
    return reads_of(program, learned, offset_per_batch=offset_per_batch) if learned else ()


def _require_deterministic(call: Call) -> None:
    """Raise where the same bits are asked for and a capture's gradient needs atomic additions."""
    if not call.inputs.must_repeat:
        return
    for read in call.reads:
        if read.pattern is Pattern.SCATTERED:
            raise BackendUnavailable(
                f"the gradient of the capture `{read.capture}` is summed by atomic additions, "
                "whose order changes from run to run",
                span=call.learned_with(read.capture)[1].capture.span,
                hint="it is read at places that are not rows, columns, diagonals or pairs of "
                "their own; do without torch.use_deterministic_algorithms(True) and "
                "deterministic=True, or detach it",
            )


def _require_mask(call: Call) -> None:
    """Raise where a list of blocks would have to be read pair by pair."""
    if isinstance(call.inputs.tiles, Blocks) and (call.reads_in(DIAGONALS) or call.reads_in(PAIRS)):
        name = call.reads[(call.reads_in(DIAGONALS) + call.reads_in(PAIRS))[0]].capture
        raise BackendUnavailable(
            f"the gradient of the capture `{name}` is not computed with a list of blocks in tiles=",
            hint="write the pattern as a mask, or detach the capture",
        )


def backward_options(
    program: Typed, inputs: Inputs, bound: tuple[Bound, ...], result: Result
) -> Options:
    """The kernel variants that serve a call."""
    chosen = options(program, inputs, bound)
    element_bytes = ELEMENT_BYTES[chosen.dtype]
    tensors = (result.grad_out, result.out)
    # A bundle has no kernels of their own for gradients of few queries.
    stored = chosen.stored or (bool(program.bundle) and not program.half_lines)
    return _for_gradients(
        chosen,
        stored,
        chosen.wide_offsets or any(reach(x) > INT32_MAX for x in tensors),
        chosen.aligned
        and all(is_aligned(x, element_bytes) for x in tensors)
        and chosen.head_dim * element_bytes % 16 == 0,  # the rows of dq and dk too
    )


@functools.lru_cache(maxsize=256)
def _for_gradients(chosen: Options, stored: bool, wide_offsets: bool, aligned: bool) -> Options:
    return replace(
        chosen,
        short=False,
        stored=stored,
        keeps_residual=False,
        wide_offsets=wide_offsets,
        aligned=aligned,
    )


def _options_of(call: Call, kernel: str) -> Options:
    """The call's options, with a tile structure where the kernel's own walk needs one."""
    long = call.inputs.q.shape[2] > SHORT or bool(call.program.bundle)
    return options_for(kernel, call.program, call.options, long=long)


def options_for(kernel: str, program: Typed, chosen: Options, *, long: bool) -> Options:
    """The options of one kernel; `long` for more than a few queries."""
    if kernel == DQ:
        return chosen
    if kernel == DKDV:
        stored = chosen.blocks or (long and not program.query_half_lines)
        return _with_structure(chosen, stored, chosen.blocks, chosen.coarse)
    return _with_structure(chosen, False, False, False)


@functools.lru_cache(maxsize=256)
def _with_structure(chosen: Options, stored: bool, blocks: bool, coarse: bool) -> Options:
    return replace(chosen, stored=stored, blocks=blocks, coarse=coarse)


# -- kernels -----------------------------------------------------------------------------------


def kernel_of(call: Call, kernel: str, group: Group | None = None) -> Ready:
    """A kernel of the backward for the call's device."""
    chosen = _options_of(call, kernel)

    def plan(target: Target) -> BackwardPlan:
        return backward_plan(kernel, call.program, chosen, call.learned, target, group=group)

    def interpret() -> Interpreted:
        made = plan(INTERPRETER)
        return Interpreted(source(made), kernel, made.constants)

    def build(target: Target) -> Kernel:
        return compile_backward(kernel, call.program, chosen, call.learned, target, group)

    what = backward_key(kernel, call.program, chosen, call.learned, group)
    return ready(what, call.device, build, interpret, call.program.bundle)


def backward_key(
    kernel: str,
    program: Typed,
    chosen: Options,
    learned: tuple[Learned, ...],
    group: Group | None = None,
) -> tuple[object, ...]:
    """What decides a kernel of the backward."""
    return (kernel, program.canonical, chosen, learned, group)


def compile_backward(
    kernel: str,
    program: Typed,
    chosen: Options,
    learned: tuple[Learned, ...],
    target: Target,
    group: Group | None = None,
) -> Kernel:
    """Compile a kernel, with a smaller tile where the score needs more memory."""
    for tile in tiles_of(kernel, program, chosen, target):
        plan = backward_plan(kernel, program, chosen, learned, target, tile, group)
        compiled = compile_plan(plan)
        if compiled.shared <= target.shared:
            return compiled
    raise BackendUnavailable(
        f"no tile of `{kernel}` of `{program.name}` fits the {target.shared} bytes of shared "
        f"memory of {target}"
    )


def compile_plan(plan: BackwardPlan) -> Kernel:
    """Render and compile one plan."""
    return compile_kernel(
        source(plan),
        plan.kernel,
        plan.arguments,
        plan.constants,
        plan.target,
        num_warps=plan.tile.num_warps,
        num_stages=plan.tile.num_stages,
        aligned=plan.options.aligned,
        even=plan.options.even,
        fp_fusion=fp_fusion(plan),
    )


def source(plan: BackwardPlan) -> str:
    """The kernel's text."""
    return render(f"{plan.kernel}.py", plan, TRITON)


def sources(
    program: Typed, chosen: Options, learned: tuple[Learned, ...], target: Target
) -> list[str]:
    """The texts of all kernels that a backward runs, in their order."""
    reads = reads_of(program, learned, offset_per_batch=chosen.offset_per_batch)
    needed = [DKDV, DQ, *dict.fromkeys(KERNEL_OF[r.pattern] for r in reads)]
    plans = [
        backward_plan(
            kernel, program, options_for(kernel, program, chosen, long=True), learned, target
        )
        for kernel in dict.fromkeys(needed)
        if kernel != PAIRS
    ]
    plans += [
        backward_plan(
            PAIRS, program, options_for(PAIRS, program, chosen, long=True), learned, target, group=g
        )
        for g in groups_of(program, learned, offset_per_batch=chosen.offset_per_batch)
    ]
    first = render(f"{DELTA}.py", delta_plan(chosen, target, has_grad_lse=False), TRITON)
    return [first, *map(source, plans)]


SmallPlan = DeltaPlan | PlacesPlan


def _small(call: Call, what: tuple[object, ...], plan: Callable[[Target], SmallPlan]) -> Ready:
    """A kernel without products: `plan` makes its plan for a target."""

    def interpret() -> Interpreted:
        made = plan(INTERPRETER)
        return Interpreted(_small_source(made), _entry(made), made.constants)

    return ready(
        what, call.device, lambda t: compile_small(plan(t)), interpret, call.program.bundle
    )


def _entry(plan: SmallPlan) -> str:
    return DELTA if isinstance(plan, DeltaPlan) else PLACES


def _small_source(plan: SmallPlan) -> str:
    return render(f"{_entry(plan)}.py", plan, TRITON)


def compile_small(plan: SmallPlan) -> Kernel:
    """Render and compile a kernel without products."""
    return compile_kernel(
        _small_source(plan),
        _entry(plan),
        plan.arguments,
        plan.constants,
        plan.target,
        num_warps=4,
        num_stages=1,
        aligned=isinstance(plan, DeltaPlan) and plan.options.aligned,
        even=False,
        fp_fusion=fp_fusion(plan),
    )


def delta_key(
    chosen: Options, *, has_grad_lse: bool, has_residual: bool = False
) -> tuple[object, ...]:
    """What decides the kernel that looks at each row: not the variant."""
    given = (has_grad_lse, has_residual)
    rows = Rows(chosen.dtype, chosen.v_head_dim, chosen.wide_offsets, chosen.aligned, *given)
    return (DELTA, rows)


def places_key(
    program: Typed, chosen: Options, learned: tuple[Learned, ...], number: int
) -> tuple[object, ...]:
    """What decides the kernel that finds the places of one read."""
    return (PLACES, program.canonical, learned, number, Reach.of(chosen))


# -- rows --------------------------------------------------------------------------------------


def row_values(call: Call) -> Tensor:
    """What the kernels need of each row, float32 [B, Hq, Lq, 2].

    The LSE in base 2, +inf for a row without keys, and rowsum(o * do) less the LSE's gradient.
    """
    chosen, result, lse = call.options, call.result, call.result.lse.contiguous()
    given = result.given
    kernel = _small(
        call, delta_key(chosen, **given), lambda target: delta_plan(chosen, target, **given)
    )
    rows = torch.empty((*lse.shape, 2), dtype=torch.float32, device=call.device)
    grad_lse = lse if result.grad_lse is None else result.grad_lse.to(torch.float32)
    o = unit_stride(result.out.detach())
    values: list[Any] = [o, call.grad_out, lse, grad_lse, rows]
    values += [*o.stride()[:3], *call.grad_out.stride()[:3], *grad_lse.stride()]
    batch, q_heads, q_len = lse.shape
    tiles = -(-q_len // kernel.block_m)
    kernel.run(tiles * batch * q_heads, [*values, q_len, q_heads, *result.residuals])
    return rows


# -- q, k and v --------------------------------------------------------------------------------


def query_gradient(call: Call, rows: Tensor, by_read: dict[int, Tensor]) -> Tensor:
    """dq; the gradients of what is read per query go to `by_read`."""
    q = call.inputs.q
    kernel, mine = kernel_of(call, DQ), call.reads_in(DQ)
    dq = empty_like_q(q, q.shape[3])
    # Of each read the sums and their weights, and of each row what is left over.
    sums = row_sums(call, len(mine))
    values = _values(call, rows, (dq,), sums)
    values += _structure(call, DQ, kernel)
    kernel.run(-(-q.shape[2] // kernel.block_m) * q.shape[0] * q.shape[1], values)
    by_read |= settled_rows(call, mine, sums)
    return dq


def settled_rows(call: Call, numbers: Sequence[int], sums: Tensor) -> dict[int, Tensor]:
    """The gradients of reads per query from what a kernel summed of each row."""
    line = Line(Pattern.ROW, call.inputs.q.shape[2])
    evened = _evened(call, sums)
    return {n: settled(call, n, x, line) for n, x in zip(numbers, evened, strict=True)}


def row_sums(call: Call, number: int) -> Tensor:
    """Room for what is summed of each row for so many reads: what `settled_rows` takes."""
    return _line_sums(call, 2 * number + 1 if number else 0, call.inputs.q.shape[2])


def _evened(call: Call, sums: Tensor) -> Tensor:
    """Sums of ds * slope per row, without what delta's rounding adds to each ds of a row.

    The ds of a row add up to the gradient of its LSE. Whatever is left over came by way of delta
    and with the weight p: a slope that is summed over many rows would feel it first of all.
    """
    number = len(sums) // 2
    if not number:
        return sums
    totals, weights, left_over = sums[:number], sums[number:-1], sums[-1]
    if call.result.grad_lse is not None:
        has_keys = call.result.lse != -torch.inf
        left_over -= torch.where(has_keys, call.result.grad_lse, 0.0)
    return totals.sub_(torch.where(left_over == 0.0, 0.0, left_over * weights))


def key_gradients(call: Call, rows: Tensor, by_read: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
    """dk and dv; the gradients of what is read per key go to `by_read`."""
    q, k, v = call.inputs.q, call.inputs.k, call.inputs.v
    kernel, mine = kernel_of(call, DKDV), call.reads_in(DKDV)
    dk, dv = (empty_like_q(x.expand(q.shape[0], -1, -1, -1), x.shape[3]) for x in (k, v))
    sums = _line_sums(call, len(mine), k.shape[2])
    values = _values(call, rows, (dk, dv), sums)
    values += _structure(call, DKDV, kernel)
    kernel.run(-(-k.shape[2] // kernel.block_n) * q.shape[0] * k.shape[1], values)
    line = Line(Pattern.COLUMN, k.shape[2])
    by_read |= {n: settled(call, n, sums[row], line) for row, n in enumerate(mine)}
    return over_batch(dk, k), over_batch(dv, v)


def over_batch(gradient: Tensor, x: Tensor) -> Tensor:
    """Summed over the batch where k or v serves every sequence."""
    if gradient.shape[0] == x.shape[0]:
        return gradient
    return gradient.sum(0, keepdim=True, dtype=torch.float32).to(x.dtype)


def _line_sums(call: Call, number: int, length: int) -> Tensor:
    shape = (number, *call.heads, length)
    return torch.empty(shape, dtype=torch.float32, device=call.device)


def _values(call: Call, rows: Tensor, made: Sequence[Tensor], sums: Tensor | None) -> list[Any]:
    """The run-time arguments, in the order of `plan_triton_backward.arguments`."""
    inputs = call.inputs
    batch, q_heads, q_len, _ = inputs.q.shape
    q = unit_stride(inputs.q.detach())
    k, v = (unit_stride(x.detach()).expand(batch, -1, -1, -1) for x in (inputs.k, inputs.v))
    given = (q, k, v, call.grad_out)
    values: list[Any] = [*given, rows, *made]
    if sums is not None and len(sums):
        values += [sums, sums.stride(0)]
    for x in (*given, *made):
        values += x.stride()[:3]
    values += [batch, q_len, k.shape[2], q_heads, inputs.gqa_group, in_float32(inputs.scale)]
    return values + shared_values(inputs.q_offset, inputs.kv_lens, call.bound)


def _structure(call: Call, kernel: str, found: Ready) -> list[Any]:
    """What a kernel reads its tile structure by: that of the forward, or the transposed one."""
    chosen = _options_of(call, kernel)
    if not chosen.stored:
        return []
    blocks = found.block_m, found.block_n
    stored = stored_structure(
        call.program, chosen, call.inputs, call.bound, blocks, transposed=kernel == DKDV
    )
    return stored.arguments


# -- captures ----------------------------------------------------------------------------------


def sum_diagonals(call: Call, rows: Tensor, by_read: dict[int, Tensor]) -> None:
    """Gradients of what is read by i - j."""
    kernel, mine = kernel_of(call, DIAGONALS), call.reads_in(DIAGONALS)
    block, q_len, kv_len = kernel.block_m, call.inputs.q.shape[2], call.inputs.k.shape[2]
    q_tiles, kv_tiles = -(-q_len // block), -(-kv_len // block)
    shape = (len(mine), *call.heads, q_tiles + kv_tiles, 2, block)
    sums = torch.empty(shape, dtype=torch.float32, device=call.device)
    kernel.run((q_tiles + kv_tiles) * call.heads[0] * call.heads[1], _values(call, rows, (), sums))
    # A tile's upper half lies on the diagonals of the lower half of the tiles before.
    below, above = sums.unbind(-2)
    below[..., :-1, :] += above[..., 1:, :]
    line = Line(Pattern.DIAGONAL, (q_tiles + kv_tiles) * block, -kv_tiles * block)
    by_read |= {n: settled(call, n, below[row].flatten(-2), line) for row, n in enumerate(mine)}


def sum_pairs(call: Call, rows: Tensor, by_read: dict[int, Tensor]) -> None:
    """Gradients of what each pair reads for itself, and of what is read anywhere."""
    batch, q_heads = call.heads
    for group in _groups_of(call.program, call.learned, call.options.offset_per_batch):
        kernel = kernel_of(call, PAIRS, group)
        made = [call.zeros(call.reads[n].capture) for n in group.reads]
        values = _values(call, rows, (), None)
        # The gradients stand where other kernels have the sums.
        values[5:5] = made
        tiles = -(-call.inputs.q.shape[2] // kernel.block_m)
        tiles *= -(-call.inputs.k.shape[2] // kernel.block_n)
        owners = (batch if group.owns_b else 1) * (q_heads if group.owns_h else 1)
        kernel.run(tiles * owners, values)
        by_read |= dict(zip(group.reads, made, strict=True))


@functools.lru_cache(maxsize=256)
def _groups_of(
    program: Typed, learned: tuple[Learned, ...], offset_per_batch: bool
) -> tuple[Group, ...]:
    return groups_of(program, learned, offset_per_batch=offset_per_batch)


# -- from sums along lines to elements ---------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """Rows, columns or diagonals, `length` of them; the first diagonal is `first`."""

    pattern: Pattern
    length: int
    first: int = 0

    @property
    def walk(self) -> tuple[int, int, int, int]:
        """Of pairs along it: the first i and j, and their steps."""
        if self.pattern is Pattern.DIAGONAL:
            return self.first, -self.first, 1, -1
        return (0, 0, 1, 0) if self.pattern is Pattern.ROW else (0, 0, 0, 1)


def settled(call: Call, number: int, sums: Tensor, line: Line) -> Tensor:
    """The gradient of a read from its sums [B, Hq, length]: each sum added to its element.

    Sums of one element are added in the order of the line, whatever the device.
    """
    read = call.reads[number]
    summed = []
    if not _depends_on_batch(call, read.names):
        summed.append(0)
    if not read.names & {"h", "hk"}:
        summed.append(1)
    if not read.names & {"i", "j"}:
        summed.append(2)
        line = replace(line, length=1)
    sums = sums.sum(summed, keepdim=True) if summed else sums
    repeated = bool(call.learned_with(read.capture)[0].repeated)
    if is_plain(read, call.options, repeated=repeated):
        return _placed_plainly(call, read, sums)
    gradient = call.zeros(read.capture)
    if gradient.numel() == 0:
        return gradient
    places, reached = _places(call, number, sums.shape, line)
    values = torch.where(reached, sums, 0.0)
    gradient.view(-1).index_put_((places.view(-1),), values.view(-1), accumulate=True)
    return gradient


# The axes of sums along a line.
_AXIS = {"b": 0, "h": 1, "i": 2, "j": 2}


def is_plain(read: Read, chosen: Options, *, repeated: bool) -> bool:
    """Whether each axis of the table is an axis of the sums."""
    names = [x.attr for x in read.indices if x.op is Op.INDEX and x.attr in _AXIS]
    fixed = "i" not in names or not chosen.offset_per_batch
    distinct = len(set(names)) == len(names) == len(read.indices)
    return distinct and fixed and not repeated


def _placed_plainly(call: Call, read: Read, sums: Tensor) -> Tensor:
    """The sums in the order of the table's axes; what lies outside the table is left out."""
    gradient = call.zeros(read.capture)
    axes = [_AXIS[x.attr] for x in read.indices]
    rest = [axis for axis in range(3) if axis not in axes]
    source = sums.permute(*axes, *rest)
    # What is left was summed, and has length 1.
    source, target = source.reshape(source.shape[: len(axes)]), gradient
    for axis, x in enumerate(read.indices):
        length = target.shape[axis]
        offset = call.inputs.q_offset if x.attr == "i" else 0
        first = min(length, int(offset))
        count = min(length - first, source.shape[axis])
        target, source = target.narrow(axis, first, count), source.narrow(axis, 0, count)
    target.copy_(source)
    return gradient


def _depends_on_batch(call: Call, names: frozenset[str]) -> bool:
    """Whether the sequences of a batch read different elements."""
    return "b" in names or ("i" in names and call.options.offset_per_batch)


def _places(call: Call, number: int, shape: torch.Size, line: Line) -> tuple[Tensor, Tensor]:
    """Where in a contiguous gradient each sum belongs, and whether it belongs anywhere."""
    program, chosen = call.program, call.options
    batch, heads, length = shape
    kernel = _small(
        call,
        places_key(program, chosen, call.learned, number),
        lambda target: places_plan(program, chosen, call.learned, number, target),
    )
    places = torch.empty(shape, dtype=torch.int64, device=call.device)
    reached = torch.empty(shape, dtype=torch.bool, device=call.device)
    inputs = call.inputs
    sizes = (inputs.q.shape[2], inputs.k.shape[2], heads, inputs.gqa_group)
    values = [places, reached, *line.walk, length, *sizes]
    blocks = -(-length // kernel.block_n)
    kernel.run(
        blocks * batch * heads, values + shared_values(inputs.q_offset, inputs.kv_lens, call.bound)
    )
    return places, reached

"""Which kernels a bundle has, and their compilation on a machine without a GPU.

A call is served by the kernel that was specialised for it, or by one that promises less. So for
each way in which arguments are passed there is one kernel for any call, and for the usual calls
one of their own:

                          no kv_lens      kv_lens      q_offset as a tensor, with kv_lens or without
    usual                 fwd bwd         fwd bwd      fwd
    multiples of 16       fwd bwd
    few queries           fwd             fwd          fwd
    any                   fwd bwd         fwd bwd      fwd

On sm_90 each line but that of few queries has Hopper's kernels too, where Hopper's take such
calls; where the same kernel serves all, it is there once.

`also` adds ways of passing arguments that few calls use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from . import attend_hopper, attend_triton, backward_hopper, backward_triton, hopper_rows
from . import backward_hopper_wide as wide
from .backends.compile_triton import Kernel
from .backward_hopper_wide import is_wide
from .bundle import Item, Kind
from .errors import BackendUnavailable, InputMismatch
from .ir.capture import Kind as KindOfCapture
from .ir.ops import Op, Type
from .passes.patterns import Read
from .plan import Param, Typed, assumed_params, typed
from .plan_hopper_backward import finish_plan, rows_plan
from .plan_hopper_wide import KERNELS, KEYS, ROWS, SUMS
from .plan_structure import structure_plan
from .plan_triton import ELEMENT_BYTES, Options
from .plan_triton_backward import (
    DKDV,
    DQ,
    KERNEL_OF,
    PAIRS,
    Learned,
    delta_plan,
    groups_of,
    places_plan,
    reads_of,
)
from .sources import element, options_of_shape
from .structure import compile_structure, structure_key
from .target import Target, parse_target
from .variant import Program

PHASES = ("fwd", "bwd")
ALSO = ("blocks", "exact", "offsets", "scale")

# -- what is wished for ------------------------------------------------------------------------


@dataclass(frozen=True)
class Wish:
    """What a bundle is to be made for, as a user says it: all combinations."""

    targets: Sequence[str]
    dtypes: Sequence[Any]  # torch dtypes, or words
    head_dims: Sequence[int]
    phases: Sequence[str]
    v_head_dims: Sequence[int] | None = None  # one for each head dim, or one for all
    captures: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    also: Sequence[str] = ()

    def __post_init__(self) -> None:
        several = {
            "target": self.targets,
            "dtype": self.dtypes,
            "head_dim": self.head_dims,
            "phase": self.phases,
        }
        for name, values in several.items():
            if not values:
                raise InputMismatch(f"build needs one {name} at least")
        for phase in self.phases:
            if phase not in PHASES:
                raise InputMismatch(f"phase must be 'fwd' or 'bwd', not {phase!r}")
        for word in self.also:
            if word not in ALSO:
                raise InputMismatch(f"also takes {', '.join(ALSO)}, not {word!r}")

    @property
    def shapes(self) -> list[tuple[str, int, int]]:
        """Dtypes and head dims."""
        widths = self.v_head_dims or self.head_dims
        if len(widths) not in (1, len(self.head_dims)):
            raise InputMismatch(
                f"v_head_dim must be one value or {len(self.head_dims)}, as head_dim is, "
                f"not {len(widths)}"
            )
        widths = tuple(widths) * (len(self.head_dims) if len(widths) == 1 else 1)
        pairs = list(zip(self.head_dims, widths, strict=True))
        words = [element(dtype) for dtype in self.dtypes]
        return [(word, *pair) for word, pair in itertools.product(words, pairs)]


# -- calls -------------------------------------------------------------------------------------

Change = Mapping[str, bool | str]


@dataclass(frozen=True)
class Passed:
    """How arguments are passed, which no kernel can make up for."""

    words: str
    change: Change
    phases: tuple[str, ...] = PHASES


# An offset that the host does not know may be large.
OFFSETS: Change = {"offset_per_batch": True, "small": False}
PASSED = (
    Passed("", {}),
    Passed("kv_lens", {"has_kv_lens": True}),
    Passed("q_offset as a tensor", OFFSETS, ("fwd",)),
    Passed("kv_lens, q_offset as a tensor", {"has_kv_lens": True, **OFFSETS}, ("fwd",)),
)
# What `also` asks for, with each of the above.
ASKED: Mapping[str, Passed] = {
    "blocks": Passed("a list of blocks", {"blocks": True, "stored": True}),
    "exact": Passed("precision 'exact'", {"precision": "exact"}),
    "scale": Passed("scale as a tensor", {"scale_in_memory": True, "positive_scale": False}),
}


def passed(also: Sequence[str]) -> list[Passed]:
    """The ways of passing arguments that a bundle serves."""
    found = [replace(p, phases=PHASES) if "offsets" in also else p for p in PASSED]
    for more in (ASKED[word] for word in sorted({*also} - {"offsets"})):
        for p in found[: len(PASSED)]:
            words = ", ".join(x for x in (p.words, more.words) if x)
            found.append(Passed(words, {**p.change, **more.change}, p.phases))
    return found


USUAL: Change = {"even": False}
EVEN: Change = {"even": True}
SHORT: Change = {"even": False, "short": True, "stored": False}
ANY: Change = {
    "even": False,
    "small": False,
    "wide_offsets": True,
    "aligned": False,
    "positive_scale": False,
}


def calls(
    program: Typed, usual: Options, phase: str, also: Sequence[str] = ()
) -> list[tuple[str, Options]]:
    """The kinds of calls that get a kernel, in words and as options."""
    found = []
    for way in passed(also):
        if phase not in way.phases:
            continue
        kinds = {"usual": USUAL, "any": ANY}
        if program.half_lines and not way.change:
            kinds["multiples of 16"] = EVEN
        if phase == "fwd":
            kinds["few queries"] = SHORT
            if not program.half_lines:
                # Where few queries read no tile structure, the kernel for any call does.
                kinds["any, few queries"] = {**ANY, **SHORT}
        for words, change in kinds.items():
            named = ", ".join(x for x in (words, way.words) if x)
            changes: dict[str, Any] = {**change, **way.change}
            found.append((named, replace(usual, **changes)))
    return found


def usual_options(program: Typed, dtype: str, head_dim: int, v_head_dim: int) -> Options:
    """What a usual call of a dtype and head dims promises."""
    found = options_of_shape(
        program, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype, precision="auto"
    )
    rows = ((dim * ELEMENT_BYTES[dtype]) % 16 for dim in (head_dim, v_head_dim))
    return replace(found, aligned=not any(rows))


# -- captures ----------------------------------------------------------------------------------


def programs(program: Program, wish: Wish, text: tuple[str, ...]) -> list[Typed]:
    """The program for each combination of the captures' types."""
    elements = {name: [element(x) for x in several] for name, several in wish.captures.items()}
    choices = [dict(zip(elements, x, strict=True)) for x in itertools.product(*elements.values())]
    return [typed(program, params(program, given), text) for given in choices]


def params(program: Program, given: dict[str, str]) -> tuple[Param, ...]:
    """The parameters as a call gives them; a number of a storage type is a 0-d tensor."""
    found = assumed_params(program, given)
    return tuple(
        p
        if p.kind is KindOfCapture.TENSOR
        else replace(p, by_value=False)
        if p.name in given
        else replace(p, element=_NUMBER[p.type])
        for p in found
    )


_NUMBER = {Type.BOOL: "bool", Type.INT: "int", Type.FLOAT: "float"}


def learning(program: Typed) -> list[tuple[Typed, tuple[Learned, ...]]]:
    """What is learned: nothing, all float tables, and all floats, numbers being 0-d tensors.

    What is read for each sequence may be one for the batch, too.
    """
    learned = [
        k
        for k, p in enumerate(program.params)
        if p.type is Type.FLOAT and p.name in program.given_score.names
    ]
    tables = [k for k in learned if not _is_number(program.params[k])]
    found: list[tuple[Typed, tuple[Learned, ...]]] = [(program, ())]
    if tables:
        found += [(program, several) for several in _shared(program, tables)]
    if tables != learned:
        in_memory = tuple(
            replace(p, element="f32", by_value=False) if k in learned and k not in tables else p
            for k, p in enumerate(program.params)
        )
        numbers = replace(program, params=in_memory)
        found += [(numbers, several) for several in _shared(numbers, learned)]
    return found


def _shared(program: Typed, positions: Sequence[int]) -> list[tuple[Learned, ...]]:
    """Learned captures: as many as sequences, and one for all where `b` is an index of them."""
    each = tuple(map(Learned, positions))
    reads = reads_of(program, each, offset_per_batch=False)
    one = []
    for position in positions:
        indices = [x.indices for x in reads if x.capture == program.params[position].name]
        axes = range(program.params[position].rank)
        batch = (k for k in axes if all((x[k].op, x[k].attr) == (Op.INDEX, "b") for x in indices))
        one.append(Learned(position, tuple(batch)))
    return list(dict.fromkeys((each, tuple(one))))


def _is_number(p: Param) -> bool:
    return p.kind is not KindOfCapture.TENSOR and p.by_value


# -- jobs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One kind of call of one program on one target."""

    program: Typed
    target: Target
    call: str
    options: Options
    learned: tuple[Learned, ...] | None = None  # None: a forward

    def __str__(self) -> str:
        phase = "fwd" if self.learned is None else "bwd"
        shape = f"{self.options.dtype}, head dim {self.options.head_dim}"
        return f"{self.target}, {shape}, {phase}: {self.call}"


def jobs(program: Program, wish: Wish, text: tuple[str, ...]) -> list[Job]:
    """All that a bundle is to serve; `text` are the user's own words."""
    targets, shapes = [_target(word) for word in wish.targets], wish.shapes
    found = []
    for known, target, shape in itertools.product(programs(program, wish, text), targets, shapes):
        trained = learning(known) if "bwd" in wish.phases else [(known, ())]
        if "fwd" in wish.phases:
            for one in dict.fromkeys(one for one, _ in trained):
                usual = usual_options(one, *shape)
                found += [Job(one, target, *call) for call in calls(one, usual, "fwd", wish.also)]
        if "bwd" in wish.phases:
            for one, learned in trained:
                usual = usual_options(one, *shape)
                kinds = calls(one, usual, "bwd", wish.also)
                found += [Job(one, target, *kind, learned) for kind in kinds]
    return found


def _target(word: str) -> Target:
    found = parse_target(word)
    if found.kind == "interpreter":
        raise InputMismatch("there are no kernels for interpreter: it runs text")
    return found


class Shelf:
    """The kernels made so far: what serves several jobs is compiled once."""

    def __init__(self) -> None:
        self.items: dict[Kind, Item] = {}

    def run(self, job: Job) -> None:
        """Compile what a job needs."""
        for item in _backward(job, self) if job.learned is not None else _forward(job, self):
            self.items[item.kind] = item


# -- kernels -----------------------------------------------------------------------------------


def _forward(job: Job, shelf: Shelf) -> Iterator[Item]:
    """The kernels of a forward: portable ones, and Hopper's where it takes such calls."""
    program, chosen, target = job.program, job.options, job.target
    what = attend_triton.forward_key(program, chosen)
    kernel = attend_triton.compile_forward(program, chosen, target)
    yield Item(what, target, job.call, kernel)
    if chosen.stored:
        yield from _structure(job, shelf, chosen, kernel, transposed=False)
    if attend_hopper.is_hopper(target) and not _unfit_for_hopper(job):
        yield from _hopper(job, shelf)


def _unfit_for_hopper(job: Job) -> bool:
    chosen = job.options
    shape = (chosen.dtype, chosen.head_dim, chosen.v_head_dim)
    return bool(chosen.short or attend_hopper.unfit_shape(*shape))


def _hopper(job: Job, shelf: Shelf) -> Iterator[Item]:
    """Hopper's kernel, or why there is none."""
    chosen = attend_hopper.of_options(job.program, job.options)
    what = attend_hopper.forward_key(job.program, chosen)
    if Kind.of(what, job.target) in shelf.items:
        return
    result = _or_why_not(attend_hopper.compile_forward, job, chosen)
    yield Item(what, job.target, job.call, result)
    if chosen.stored and isinstance(result, Kernel):
        yield from _structure(job, shelf, chosen, result, transposed=False)


def _or_why_not(
    compile_one: Callable[[Typed, Options, Target], Kernel], job: Job, chosen: Options
) -> Kernel | str:
    """A kernel, or in one line why no configuration suits it."""
    try:
        return compile_one(job.program, chosen, job.target)
    except BackendUnavailable as error:
        return error.message.partition("\n")[0]


def _structure(
    job: Job, shelf: Shelf, chosen: Options, reader: Kernel, *, transposed: bool
) -> Iterator[Item]:
    """The kernel that makes the tile structure which `reader` reads."""
    mask, tile = job.program.only_mask, dict(reader.constants)
    blocks = tile["BLOCK_M"], tile["BLOCK_N"]
    what = structure_key(mask, chosen, blocks, transposed=transposed)
    if Kind.of(what, job.target) not in shelf.items:
        plan = structure_plan(mask, chosen, job.target, *blocks, transposed=transposed)
        yield Item(what, job.target, job.call, compile_structure(plan))


def _backward(job: Job, shelf: Shelf) -> Iterator[Item]:
    """The kernels of a backward: portable ones, and Hopper's where it takes such calls."""
    program, target, call = job.program, job.target, job.call
    assert job.learned is not None
    learned, chosen = job.learned, job.options
    for has_grad_lse in (False, True):
        what = backward_triton.delta_key(chosen, has_grad_lse=has_grad_lse)
        if Kind.of(what, target) not in shelf.items:
            plan = delta_plan(chosen, target, has_grad_lse=has_grad_lse)
            yield Item(what, target, call, backward_triton.compile_small(plan))
    reads = reads_of(program, learned, offset_per_batch=chosen.offset_per_batch)
    for kernel in dict.fromkeys((DKDV, DQ, *(KERNEL_OF[read.pattern] for read in reads))):
        groups = groups_of(program, learned, offset_per_batch=chosen.offset_per_batch)
        for group in groups if kernel == PAIRS else (None,):
            mine = backward_triton.options_for(kernel, program, chosen, long=True)
            made = backward_triton.compile_backward(kernel, program, mine, learned, target, group)
            what = backward_triton.backward_key(kernel, program, mine, learned, group)
            yield Item(what, target, call, made)
            if mine.stored:
                yield from _structure(job, shelf, mine, made, transposed=kernel == DKDV)
    yield from _places(job, shelf, reads)
    if attend_hopper.is_hopper(target) and not _unfit_for_hoppers_backward(job, reads):
        backward = _wide_backward if is_wide(chosen) else _hopper_backward
        yield from backward(job, shelf, sums_keys=False)
        if any(KERNEL_OF[read.pattern] == DKDV for read in reads):
            yield from backward(job, shelf, sums_keys=True)


def _unfit_for_hoppers_backward(job: Job, reads: Sequence[Read]) -> bool:
    chosen = job.options
    shape = (chosen.dtype, chosen.head_dim, chosen.v_head_dim)
    unlearned = backward_hopper.unlearned(job.program, reads)
    return bool(backward_hopper.unfit_shape(*shape) or unlearned)


def _hopper_backward(job: Job, shelf: Shelf, *, sums_keys: bool) -> Iterator[Item]:
    """Hopper's kernel of dq, dk and dv with those around it, or why there is none."""
    chosen = replace(job.options, sums_keys=sums_keys)
    chosen = backward_hopper.of_options(job.program, chosen)
    what = backward_hopper.backward_key(job.program, chosen)
    item = shelf.items.get(Kind.of(what, job.target))
    if item is None:
        result = _or_why_not(backward_hopper.compile_backward, job, chosen)
        item = Item(what, job.target, job.call, result)
        yield item
    if isinstance(item.result, Kernel):
        yield from _around(job, shelf, dict(item.result.constants))
        if chosen.stored:
            yield from _structure(job, shelf, chosen, item.result, transposed=True)
    yield from _wide(job, shelf, SUMS, job.options)


def _around(job: Job, shelf: Shelf, tile: Mapping[str, int]) -> Iterator[Item]:
    """The kernels before and after Hopper's main one, for any call: memory is their limit."""
    block_m, columns = tile["BLOCK_M"], tile["DQ_COLUMNS"]
    yield from _rows(job, shelf, block_m)
    chosen = replace(hopper_rows.small_options(job.options), wide_offsets=True)
    what = backward_hopper.finish_key(chosen, block_m, columns)
    if Kind.of(what, job.target) not in shelf.items:
        plan = finish_plan(chosen, job.target, block_m, columns)
        yield Item(what, job.target, job.call, hopper_rows.compile_small(plan))


def _rows(job: Job, shelf: Shelf, block_m: int) -> Iterator[Item]:
    """The kernels that look at each row first."""
    chosen = replace(hopper_rows.small_options(job.options), wide_offsets=True)
    for has_grad_lse in (False, True):
        what = hopper_rows.rows_key(chosen, block_m, has_grad_lse=has_grad_lse)
        if Kind.of(what, job.target) not in shelf.items:
            plan = rows_plan(chosen, job.target, block_m, has_grad_lse=has_grad_lse)
            yield Item(what, job.target, job.call, hopper_rows.compile_small(plan))


def _wide_backward(job: Job, shelf: Shelf, *, sums_keys: bool) -> Iterator[Item]:
    """Hopper's kernels of wide heads, or why there are none."""
    for kernel in KERNELS:
        yield from _wide(job, shelf, kernel, replace(job.options, sums_keys=sums_keys))
    yield from _rows(job, shelf, ROWS)


def _wide(job: Job, shelf: Shelf, kernel: str, given: Options) -> Iterator[Item]:
    """One of them, or for other heads what is summed of each query where something learns of it."""
    assert job.learned is not None
    chosen = wide.of_options(kernel, job.program, given)
    asked = wide.learned_in(kernel, job.program, chosen, job.learned)
    if kernel == SUMS and not asked:
        return
    what = wide.wide_key(kernel, job.program, chosen, asked)
    item = shelf.items.get(Kind.of(what, job.target))
    if item is None:
        result = _or_why_not(partial(wide.compile_wide, kernel, learned=asked), job, chosen)
        item = Item(what, job.target, job.call, result)
        yield item
    if chosen.stored and isinstance(item.result, Kernel):
        yield from _structure(job, shelf, chosen, item.result, transposed=kernel == KEYS)


def _places(job: Job, shelf: Shelf, reads: Sequence[Read]) -> Iterator[Item]:
    """The kernels that find the elements which sums along lines are added to."""
    assert job.learned is not None
    for number, read in enumerate(reads):
        what = backward_triton.places_key(job.program, job.options, job.learned, number)
        plain = backward_triton.is_plain(read, job.options, repeated=False)
        if KERNEL_OF[read.pattern] == PAIRS or plain or Kind.of(what, job.target) in shelf.items:
            continue
        plan = places_plan(job.program, job.options, job.learned, number, job.target)
        yield Item(what, job.target, job.call, backward_triton.compile_small(plan))

"""The decisions of the Hopper backward: the kernels before and after, and configurations to try.

One kernel gives dq, dk and dv: a program owns a kv tile and sums dk and dv in registers; dq is
added up in memory, in float32. As in the forward, the first configuration of a table that the
assembler takes as it was meant is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from .analysis.linear import slope
from .analysis.ranges import solve
from .ir.capture import Kind
from .ir.expr import ONE, Expr
from .passes.derivative import d_ds
from .passes.distance import added
from .passes.patterns import Read
from .plan import DeviceFunction, Param, Typed, with_kernel_names
from .plan_hopper import (
    Added,
    LineTerm,
    TensorMap,
    TileReader,
    added_functions,
    padded,
    read_ahead,
)
from .plan_triton import (
    ELEMENT_BYTES,
    HEADS_TOGETHER_STORED,
    MAP_PLACE,
    POINTER_TYPE,
    RECORD,
    Argument,
    Options,
    residual_words,
    scalars_in_memory,
    shared_arguments,
    structure_places,
)
from .plan_triton_backward import Slope, is_tame, query_range, score_function, strides
from .target import Target

ROWS, MAIN, FINISH = "attention_bwd_rows", "attention_bwd", "attention_bwd_finish"
RANKS = "attention_bwd_ranks"
CONSUMERS = 2
BLOCK_N = 128  # keys of both consumers
# Queries whose scores are in registers at a time: more do not fit beside dk and dv.
HALF = 64
STAGES = 2  # of q and do; 3 were no faster (noop 491 beside 499, causal 471 beside 484)
# Registers of a thread: of consumers, and of the warps that fetch and that add up, which are padded
# to a warpgroup.
CONSUMER_REGISTERS, WARP_REGISTERS = 240, 24
# Heads whose programs take turns: their q, do and sums of dq stay in L2. 2, 4 and 8 were equal.
HEADS_TOGETHER = 4
# The most heads that are together at the end where there are sums of dq for a few heads only, which
# are at work two at a time before (`heads_in_pairs`). All in pairs, causal was 500 TFLOP/s, as with
# 4 heads in turns and sums of all; 481 one after the other.
LAST_HEADS = 4
# How many programs a multiprocessor runs until the sums of a slot have to be complete: the longest
# of a causal mask takes as long as two others. 3 were no faster.
PROGRAMS_AHEAD = 2
MAKERS = 2  # warps that make dq of the sums of earlier heads: what is left of a warpgroup
# Accesses to spilled registers in a loop over q tiles that timed kernels had, before selections
# were joined in assembly: partial tiles without a mask 19 (head dim 64), of a soft-cap 14 (128).
SPILLS = 20


class InTurn(StrEnum):
    """Tiles whose dP is computed after their p, not beside it."""

    NONE = ""
    MASKED = "masked"
    ALL = "all"


@dataclass(frozen=True)
class BackwardConfig:
    """How the consumers of the backward overlap what they do."""

    block_m: int  # queries of a step: HALF, or two halves in turns
    early_scores: bool  # the next q k^T runs while dq leaves
    # Left operands that stay in registers: shared memory, which products read from, is what limits.
    k_in_registers: bool = False
    v_in_registers: bool = False
    # With scores early: tiles whose dP comes after p, which leaves the mask, or the score, 32
    # registers more.
    in_turn: InTurn = InTurn.NONE
    # With scores early, of one half: dq of a tile is computed a step later, and leaves while dk is
    # computed.
    late_dq: bool = False
    # Copies that no program makes, but which stand in the text of the warp that fetches: with them
    # ptxas orders the second consumer's loop as the first one's (benchmarks/NOTES.md).
    never_run: int = 0

    @property
    def holds_operands(self) -> bool:
        """Whether left operands take registers that another configuration leaves to the score."""
        return self.k_in_registers or self.v_in_registers

    def __str__(self) -> str:
        words = [f"{self.block_m} queries by {BLOCK_N} keys"]
        words += ["scores early"] if self.early_scores else []
        words += ["k in registers"] if self.k_in_registers else []
        words += ["v in registers"] if self.v_in_registers else []
        words += [f"{self.in_turn} tiles in turn"] if self.in_turn else []
        words += ["dq late"] if self.late_dq else []
        return ", ".join(words)


_SINGLE = BackwardConfig(HALF, early_scores=True)
_LATE = replace(_SINGLE, late_dq=True)
_PAIR = BackwardConfig(2 * HALF, early_scores=True, never_run=20)
_PAIRS = (
    replace(_PAIR, k_in_registers=True, v_in_registers=True),
    replace(_PAIR, v_in_registers=True),
    _PAIR,
)

_SINGLES = (
    _LATE,
    replace(_LATE, in_turn=InTurn.MASKED),
    _SINGLE,
    replace(_SINGLE, in_turn=InTurn.MASKED),
    replace(_SINGLE, early_scores=False),
)

# By padded head dim (the wider of the two), and whether there is a score that is not s and what is
# added to it; the best first. TFLOP/s of the pairs that the mask keeps, on one H200, bf16,
# 2x16x8192x128 and 1x32x16384x64, pre- and postprocess included.
CONFIGS: dict[tuple[int, bool], tuple[BackwardConfig, ...]] = {
    # Full 471, causal 465 (cuDNN 387, 358); with v in registers 452, 428; with neither 405, 416.
    # Documents & causal 199 (portable 155). Without copies that never run full 0.99; with row
    # values in their earlier order 0.96, causal 0.96.
    (64, False): _PAIRS,
    (64, True): _PAIRS,
    # Full 519 (dq in its own step 499), causal 499 (463), documents & causal 264 (257), window 1024
    # 333 (332); without early scores full 481, causal 450 (499 and 484 with, in that race). ALiBi,
    # as it is split, 495 (dq in its own step 491; not split 481).
    (128, False): _SINGLES,
    # Soft-cap 466 (dq in its own step 454).
    (128, True): _SINGLES,
}


def neighbours(configs: tuple[BackwardConfig, ...]) -> tuple[BackwardConfig, ...]:
    """Configurations, and those that `bench --tune-backward` tries beside them, of one half."""
    first = configs[0]
    if first.block_m != HALF:
        return configs
    changed = (replace(first, late_dq=x, in_turn=y) for x in (True, False) for y in InTurn)
    return tuple(dict.fromkeys((*configs, *changed)))


def config_of(fields: Any, configs: tuple[BackwardConfig, ...]) -> BackwardConfig | None:
    """The neighbour that plain values, which may be anything, describe; None for none."""
    return next((c for c in neighbours(configs) if dataclasses.asdict(c) == fields), None)


@dataclass(frozen=True)
class QSegment:
    """A loop over q tiles of one kind."""

    title: str
    # As the kernel says it:
    start: str
    end: str
    tile: str  # the number of the t-th tile
    masked: bool


_SEGMENTS = (
    QSegment(
        title="partial tiles: masked pair by pair",
        start="0",
        end="partial_count",
        tile="partial_tile(t, first, full_first, full_end)",
        masked=True,
    ),
    QSegment(
        title="full tiles: every pair attends",
        start="partial_count",
        end="count",
        tile="full_tile(t - partial_count, turn, full_first, full_end)",
        masked=False,
    ),
)
# What `key_scores` and `rows_that_see` give of a program's keys.
LINE = Param("line", Kind.SCALAR, "f32")
SEEING = Param("seeing", Kind.SCALAR, "i32")
# Of tiles that a structure names the one that fetches says the number.
_SAID = "read_number(said.index(step % SAID))"


class GradientReader(TileReader):
    """What the plans of all Hopper backward kernels with products say of scores and masks."""

    functions: tuple[DeviceFunction, ...]
    mask: DeviceFunction | None  # where pairs are masked by it
    # The first and last query that see a key, where they say which pairs attend.
    queries: DeviceFunction | None
    params: tuple[Param, ...]

    @property
    def scalars_in_memory(self) -> tuple[Argument, ...]:
        return scalars_in_memory(self.params)

    @property
    def exact(self) -> bool:
        return self.options.precision == "exact"

    @property
    def propagates_nan(self) -> bool:
        return any(f.propagates_nan for f in self.functions)

    @property
    def every_query(self) -> bool:
        """Whether all queries see all keys of the tensor."""
        return self.mask is None and self.queries is None and not self.stored

    @property
    def masks_by_queries(self) -> bool:
        """Whether pairs are masked by the first and last query of a key, and not by the mask.

        Two comparisons of a query, as for whether there is one: window 825 -> 551 instructions of a
        partial tile, causal 664 -> 535 (head dim 128).
        """
        return self.queries is not None

    @property
    def solved(self) -> bool:
        """Whether tiles to visit are found from first and last positions."""
        return not self.stored

    @property
    def structure(self) -> tuple[Argument, ...]:
        """Where the rows of a stored structure are."""
        return structure_places() if self.stored else ()

    @property
    def column_params(self) -> tuple[Param, ...]:
        return tuple(term.param for term in self.column_terms)

    @property
    def row_params(self) -> tuple[Param, ...]:
        return tuple(term.param for term in self.row_terms)

    @property
    def mask_params(self) -> tuple[Param, ...]:
        """What the mask takes: captures, then what was read of rows and of columns."""
        return (*self.params, *self.row_params, *self.column_params)

    @property
    def adds_by_key(self) -> bool:
        """Whether what a score adds to s varies with the key."""
        return self.of_key is not None or self.per_key is not None

    @property
    def reads_apart(self) -> bool:
        """Whether something of a query is read by one thread, and handed round."""
        return bool(self.row_terms) or self.of_query is not None

    @property
    def read_once(self) -> tuple[Param, ...]:
        """What consumers that own keys know before they visit tiles."""
        of_keys = (*self.column_params, *((LINE,) if self.adds_by_key else ()))
        return (*of_keys, *((SEEING,) if self.masks_by_queries else ()))


@dataclass(frozen=True)
class HopperBackwardPlan(GradientReader):
    """The kernel that gives dq, dk and dv."""

    title: str
    comments: tuple[str, ...]
    target: Target
    options: Options
    functions: tuple[DeviceFunction, ...]
    score: DeviceFunction | None  # None where it is s
    results: str  # the names that the score's function gives
    score_without_s: bool  # its value may be no tile
    slope: Slope | None  # of the score by s, unless it is 1
    added: Added | None  # what the score adds to s, where that is all
    mask: DeviceFunction | None
    queries: DeviceFunction | None
    line_terms: tuple[LineTerm, ...]  # what the mask reads of a query, or of a key, alone
    params: tuple[Param, ...]
    arguments: tuple[Argument, ...]  # after the tensors
    config: BackwardConfig
    block_d: int
    block_dv: int
    in_slots: bool  # there are sums of dq for a few kv heads only, in turns

    @property
    def carried(self) -> str:
        """What consumers carry from one q tile to the next."""
        return "s, dk, dv, key_sums" if self.options.sums_keys else "s, dk, dv"

    @property
    def and_sums(self) -> str:
        """Another result to wait for."""
        return ", key_sums" if self.options.sums_keys else ""

    @property
    def and_ones(self) -> str:
        """What ds is multiplied with for its sums."""
        return ", ones" if self.options.sums_keys else ""

    @property
    def after_s(self) -> int:
        """How many products are started between the second half's scores and its softmax."""
        return 4 if self.options.sums_keys else 3

    @property
    def ordered(self) -> bool:
        """Whether a q tile's parts of dq are added in an order that is always the same."""
        return self.options.deterministic

    @property
    def by_place(self) -> bool:
        """Whether a program visits the tiles of a structure in their order along the queries.

        Then programs that began one after another meet at no tile, whatever the mask.
        """
        return self.stored and self.ordered

    @property
    def by_kind(self) -> bool:
        """Whether it visits partial ones first."""
        return self.stored and not self.ordered

    @property
    def by_length(self) -> bool:
        """Whether the kv tiles of a head are visited in the order of their lengths.

        Beside few heads the longest of a structure would run on alone. Documents 1.02 at head dim
        128 and 1.08 at 64; with 32 heads in turns 0.91 and 0.97.
        """
        return by_length(self.options, in_slots=self.in_slots)

    @property
    def by_number(self) -> bool:
        """Whether a kv tile's rank among the visitors of a q tile is its number from the end."""
        return self.solved and self.ordered

    @property
    def turn(self) -> str:
        """How many full tiles into them a program begins."""
        return "0" if self.ordered else "start_n // BLOCK_M % gl.maximum(full_end - full_first, 1)"

    @property
    def order(self) -> tuple[str, ...]:
        """What `add_up` needs to know when it is its turn."""
        return tuple(a.name for a in order_places(self.options))

    @property
    def block_n(self) -> int:
        return BLOCK_N

    @property
    def rows(self) -> int:
        return BLOCK_N // CONSUMERS

    @property
    def half(self) -> int:
        return HALF

    @property
    def stages(self) -> int:
        return STAGES

    @property
    def said(self) -> int:
        """Numbers of tiles that are kept: dq is added up two or three steps behind the products."""
        return (3 if self.config.late_dq else 2) * STAGES

    @property
    def dq_phase(self) -> str:
        """Of the barriers at which `add_up` waits for dq of a step."""
        return "(step + 1) & 1" if self.config.late_dq else "step & 1"

    @property
    def kv_barriers(self) -> int:
        """Of k and of v, and of what has to be cut before it may be seen."""
        return 4 if self.options.has_kv_lens else 2

    @property
    def single(self) -> bool:
        """Whether a step has one half."""
        return self.config.block_m == HALF

    @property
    def pair(self) -> bool:
        return not self.single

    @property
    def scores_in_turn(self) -> bool:
        """Whether q k^T of a tile is computed in its own step."""
        return not self.config.early_scores

    @property
    def none_in_turn(self) -> bool:
        """Whether dP comes after p in no tile; next, in masked ones, and in all."""
        return self.config.in_turn is InTurn.NONE

    @property
    def masked_in_turn(self) -> bool:
        return self.config.in_turn is InTurn.MASKED

    @property
    def all_in_turn(self) -> bool:
        return self.config.in_turn is InTurn.ALL

    @property
    def waits_for_number(self) -> bool:
        """Whether a tile's number may not have been said when its step begins."""
        return self.stored and self.scores_in_turn

    @property
    def k_in_shared(self) -> bool:
        return not self.config.k_in_registers

    @property
    def v_in_shared(self) -> bool:
        return not self.config.v_in_registers

    @property
    def dq_columns(self) -> int:
        """Of 64 queries: consumers share the columns of one half, or take a half each."""
        return self.block_d // CONSUMERS if self.single else self.block_d

    @property
    def ds_tiles(self) -> int:
        """Tiles of ds: of each consumer and half, of this step and of the one before."""
        return 2 * CONSUMERS * (self.config.block_m // HALF)

    @property
    def q_segments(self) -> tuple[QSegment, ...]:
        if self.by_place:
            return tuple(
                replace(segment, start="0", end=kind, tile=_SAID)
                for segment, kind in zip(_SEGMENTS, ("partial", "full"), strict=True)
            )
        if self.stored:
            return tuple(replace(segment, tile=_SAID) for segment in _SEGMENTS)
        return _SEGMENTS

    @property
    def heads_together(self) -> int:
        # In turns, tiles of one head wait for each other: few heads keep many of its tiles at work.
        by_length = self.stored and not self.ordered
        return HEADS_TOGETHER_STORED if by_length else HEADS_TOGETHER

    @property
    def consumers(self) -> range:
        return range(CONSUMERS)

    @property
    def worker_warps(self) -> list[int]:
        """Of the second consumer, of what fetches, of what adds up, and of what makes dq."""
        return [4, 1, 1, *([MAKERS] if self.in_slots else [])]

    @property
    def worker_registers(self) -> list[int]:
        """Of their threads."""
        return [CONSUMER_REGISTERS, *[WARP_REGISTERS] * (len(self.worker_warps) - 1)]

    @property
    def makers(self) -> int:
        """Warps of a program that make dq of sums."""
        return MAKERS

    @property
    def tensor_maps(self) -> tuple[TensorMap, ...]:
        element = POINTER_TYPE[self.options.dtype].removeprefix("*")
        block_m, rows = self.config.block_m, self.rows
        return (
            TensorMap("q", element, block_m, self.block_d),
            TensorMap("k", element, rows, self.block_d),
            TensorMap("v", element, rows, self.block_dv),
            TensorMap("do", element, block_m, self.block_dv),
            TensorMap("dk", element, rows, self.block_d),
            TensorMap("dv", element, rows, self.block_dv),
        )

    @property
    def shared(self) -> int:
        """Bytes of shared memory that the tiles take."""
        widths, queries = self.block_d + self.block_dv, STAGES * self.config.block_m
        halves = (BLOCK_N + queries) * widths + self.ds_tiles * self.rows * HALF
        floats = (CONSUMERS + self.in_slots) * HALF * self.dq_columns + 2 * queries
        return halves * ELEMENT_BYTES[self.options.dtype] + 4 * floats


def hopper_backward_plan(
    program: Typed, options: Options, target: Target, config: BackwardConfig
) -> HopperBackwardPlan:
    """Decide the main kernel for one configuration."""
    program = with_kernel_names(program, "triton", "hopper")
    by_s, slotted = d_ds(program.given_score), in_slots(program, options)
    score, results, more = score_functions(program, by_s)
    mask, queries = program.mask_function, None
    terms: tuple[LineTerm, ...] = ()
    if mask is not None and not options.stored:
        (piece,) = solve(program.given_mask, "i")
        mask, queries = None, query_range(piece, f"{program.name}_queries_0", program.params)
    if mask is not None:
        mask, terms = read_ahead(program, mask)
    functions = (score, *(more.parts if more else ()), mask, queries, *(t.function for t in terms))
    return HopperBackwardPlan(
        title=f"Attention backward for `{program.name}`: Gluon, {target}",
        comments=program.text,
        target=target,
        options=options,
        functions=tuple(f for f in functions if f is not None),
        score=score,
        results=results,
        score_without_s=score is not None and "s" not in score.body[0].names,
        slope=None if by_s == ONE else Slope(is_tame(by_s)),
        added=more,
        mask=mask,
        queries=queries,
        line_terms=terms,
        params=program.params,
        arguments=(
            Argument("sm_scale", "*fp32" if options.scale_in_memory else "fp32"),
            *shared_arguments(program.params, options),
            *(structure_places() if options.stored else ()),
            *order_places(options),
            *slot_places(options, in_slots=slotted),
            *([Argument("ds_sums", "*fp32")] if options.sums_keys else []),
        ),
        config=config,
        block_d=width_of(options),
        block_dv=width_of(options),
        in_slots=slotted,
    )


def only_adds(program: Typed) -> bool:
    """Whether a score is s and what is added to it by query, by key and by distance."""
    return d_ds(program.given_score) == ONE and added(program.score) is not None


def score_functions(
    program: Typed, by_s: Expr, reads: Sequence[tuple[int, Read]] = ()
) -> tuple[DeviceFunction | None, str, Added | None]:
    """The score with its slopes, and their names; else what it adds to s."""
    more = added_functions(program) if only_adds(program) and not reads else None
    return (None, "", more) if more else (*score_function(program, by_s, reads), None)


def order_places(options: Options) -> tuple[Argument, ...]:
    """Numbers by q tile: of the kv tile whose turn it is, and by kv tile what its turn is."""
    if not options.deterministic:
        return ()
    names = ("turns", "ranks") if options.stored else ("turns",)
    return tuple(Argument(name, "*i32") for name in names)


def slot_places(options: Options, *, in_slots: bool) -> tuple[Argument, ...]:
    """For how many kv heads there are sums of dq, who is done with them, where they are, and dq."""
    if not in_slots:
        return ()
    found = [Argument("slots", "i32"), Argument("counters", "*i32"), Argument("sums", "*fp32")]
    return (*found, Argument("dq", POINTER_TYPE[options.dtype]), *strides(("dq",), "i64"))


def by_length(options: Options, *, in_slots: bool) -> bool:
    """Whether the main kernel visits kv tiles in the order of their lengths."""
    return options.stored and in_slots and not options.deterministic


def in_slots(program: Typed, options: Options) -> bool:
    """Whether sums of dq of a few kv heads are enough: no kv tile is busy much longer than others.

    One that was would hold up the heads that wait for its sums. Of packed documents few are: beside
    a longer one there are many programs of others, but for some lengths (benchmarks/NOTES.md).
    """
    if options.blocks or options.has_kv_lens or options.offset_per_batch:
        return False
    pieces = solve(program.within_documents, "i")
    if len(pieces) != 1 or not pieces[0].is_pure or pieces[0].guards:
        return False
    # The ends of a key's queries are the same for all keys, or one on for the next key.
    bounds = (*pieces[0].los, *pieces[0].his)
    return all(slope(bound, "j") in (0, 1) for bound in bounds)


def counts_of(heads: int) -> int:
    """By kv head: programs that have added to its sums of dq, and warps that cleared them."""
    return 2 * heads


def slots_of(heads: int, tiles: int, processors: int) -> int:
    """For how many of `heads` kv heads, of so many kv tiles, there are sums of dq at a time.

    Two heads are at work while slots of the next ones, at most LAST_HEADS, are cleared. Sums of all
    heads, where slots would not save half of them.
    """
    ahead = round(PROGRAMS_AHEAD * processors / max(tiles, 1))
    slots = max(ahead, LAST_HEADS) + 2
    return slots if 2 * slots <= heads else heads


def width_of(options: Options) -> int:
    """The padded head dim of q and k, and of v: the wider of the two serves both."""
    return max(padded(options.head_dim), padded(options.v_head_dim))


def configs_of(program: Typed, options: Options) -> tuple[BackwardConfig, ...]:
    """The configurations for a call, the best first."""
    return CONFIGS[width_of(options), program.has_score and not only_adds(program)]


# -- the kernels before and after --------------------------------------------------------------


@dataclass(frozen=True)
class SmallPlan:
    """A kernel of the Hopper backward without products, in portable Triton."""

    kernel: str
    title: str
    target: Target
    options: Options
    arguments: tuple[Argument, ...]
    constants: dict[str, int]
    has_grad_lse: bool = False
    has_residual: bool = False
    ordered: bool = False  # numbers for `order_places` are cleared, too
    functions: tuple[DeviceFunction, ...] = ()

    @property
    def record(self) -> int:
        """Int32 of one row of a stored structure; next, where that says how long its map is."""
        return RECORD

    @property
    def map_place(self) -> int:
        return MAP_PLACE

    @property
    def residual_words(self) -> int:
        return residual_words(self.options.v_head_dim)


def rows_plan(
    options: Options,
    target: Target,
    block_m: int,
    *,
    has_grad_lse: bool,
    has_residual: bool = False,
    ordered: bool = False,
) -> SmallPlan:
    """Decide the kernel that looks at each row first."""
    tensor, offset = POINTER_TYPE[options.dtype], "i64" if options.wide_offsets else "i32"
    names = ("lse", "grad_lse", "row_values", "dq_sums")
    found = [Argument("o", tensor), Argument("do", tensor), *(Argument(n, "*fp32") for n in names)]
    found += [Argument("counters", "*i32"), *strides(("o", "do", "grad_lse"), offset)]
    found += [Argument(n, "i32") for n in ("q_len", "q_heads", "sum_tiles", "counts")]
    found += [Argument("residual", "*i32")] if has_residual else []
    found += [Argument("turns", "*i32")] if ordered else []
    return SmallPlan(
        ROWS,
        f"What the backward needs of each row: Triton, {target}",
        target,
        options,
        tuple(found),
        {
            "V_HEAD_DIM": options.v_head_dim,
            "BLOCK_D": width_of(options),
            "BLOCK_DV": width_of(options),
            "BLOCK_M": block_m,
        },
        has_grad_lse,
        has_residual,
        ordered,
    )


def finish_plan(options: Options, target: Target, block_m: int, dq_columns: int) -> SmallPlan:
    """Decide the kernel that makes dq of its sums."""
    tensor, offset = POINTER_TYPE[options.dtype], "i64" if options.wide_offsets else "i32"
    found = [Argument("dq_sums", "*fp32"), Argument("dq", tensor), *strides(("dq",), offset)]
    found.append(Argument("sm_scale", "*fp32" if options.scale_in_memory else "fp32"))
    return SmallPlan(
        FINISH,
        f"dq out of its sums: Triton, {target}",
        target,
        options,
        (*found, *(Argument(n, "i32") for n in ("q_len", "q_heads", "kv_heads", "group", "slots"))),
        {
            "HEAD_DIM": options.head_dim,
            "BLOCK_D": width_of(options),
            "BLOCK_M": block_m,
            "DQ_COLUMNS": dq_columns,
        },
    )


def ranks_plan(options: Options, target: Target) -> SmallPlan:
    """Decide the kernel that gives each kv tile its turn at a q tile."""
    found = [Argument(name, "*i32") for name in ("tile_runs", "tile_words", "ranks")]
    found += [Argument(name, "i32") for name in ("q_tiles", "kv_tiles")]
    return SmallPlan(
        RANKS,
        f"In which order kv tiles add to dq: Triton, {target}",
        target,
        options,
        tuple(found),
        {"ROWS": 64, "ENTRIES": 32},
    )

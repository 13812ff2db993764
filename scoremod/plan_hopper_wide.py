"""The decisions of Hopper's backward kernels that own all they sum, and of head dims above 128.

There dk and dv of 64 keys take all registers that two consumers have, so that dq has a kernel of
its own, which computes scores and dp again: 7 products a tile in place of 5, and nothing is added
up in memory.

    keys     a program owns 64 keys: one consumer computes p and sums dv, the other sums dk
    queries  a program owns 128 queries: each consumer sums dq of 64
    sums     the same without dq, for the captures of narrower heads

Where something that is read per query learns, the second sums what its gradient takes as well, and
the first what is added per key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .analysis.ranges import solve
from .ir.expr import ONE
from .passes.derivative import d_ds
from .passes.patterns import Pattern, Read
from .plan import DeviceFunction, Param, Typed, with_kernel_names
from .plan_hopper import Added, LineTerm, TensorMap, read_ahead
from .plan_hopper_backward import (
    CONSUMER_REGISTERS,
    WARP_REGISTERS,
    GradientReader,
    score_functions,
    width_of,
)
from .plan_triton import (
    ELEMENT_BYTES,
    HEADS_TOGETHER_STORED,
    POINTER_TYPE,
    TITLES,
    Argument,
    Options,
    kv_range,
    shared_arguments,
    structure_places,
)
from .plan_triton_backward import (
    Learned,
    Slope,
    Sum,
    is_tame,
    query_range,
    reads_of,
)
from .target import Target

KEYS, QUERIES = "attention_bwd_keys", "attention_bwd_queries"
KERNELS = (KEYS, QUERIES)
SUMS = "attention_bwd_sums"
WIDTH = 256  # the padded head dim
CONSUMERS = 2
ROWS = 64  # keys or queries whose gradients a consumer has registers for, and columns of a step
# Columns of scores whose slopes are in registers at a time, where rows are summed: of 64 ALiBi had
# 123 accesses to spilled registers a tile, of 32 14, and of 16 no fewer.
PART = 32
# Heads whose programs take turns: what they read stays in L2. Of 4, 2x8x8192x256 takes 3 % longer.
HEADS_TOGETHER = 2
# Stages of q and of do in the kernel of the keys, of k and of v in that of the queries: as many as
# shared memory has room for.
STAGES = {KEYS: (3, 2), QUERIES: (2, 1), SUMS: (3, 3)}


@dataclass(frozen=True)
class WideSegment:
    """A loop over tiles of one kind."""

    title: str
    # As the kernel says it:
    start: str
    end: str
    tile: str  # the number of the t-th tile
    masked: bool


_Q_SEGMENTS = (
    WideSegment(
        title=TITLES["partial"],
        start="0",
        end="partial_count",
        tile="partial_tile(t, first, full_first, full_end)",
        masked=True,
    ),
    WideSegment(
        title=TITLES["full"],
        start="partial_count",
        end="count",
        tile="(full_first + (t - partial_count))",
        masked=False,
    ),
)
_KV_SEGMENTS = (
    replace(
        _Q_SEGMENTS[0], tile="last_partial_tile(t, partial_count, first, full_first, full_end)"
    ),
    _Q_SEGMENTS[1],
)
# Of tiles that a structure names the one that fetches says the number.
_SAID = {
    KEYS: "read_number(said.index(step % SAID))",
    QUERIES: "read_number(said.index(t % STAGES))",
    SUMS: "read_number(said.index(t % SAID))",
}


@dataclass(frozen=True)
class RowSum(Sum):
    """The gradient of a read per query; a tame slope is finite where pairs attend."""

    is_tame: bool = False


def is_added(program: Typed, read: Read) -> bool:
    """Whether what is read is added to s itself, times a number: then its gradient is ds alone."""
    return read.slope.is_const and d_ds(program.given_score) == ONE


def summed_rows(program: Typed, reads: Sequence[Read]) -> list[int]:
    """The reads per query that are summed: the ds of others add up to the LSE's gradient."""
    return [
        n
        for n, read in enumerate(reads)
        if read.pattern is Pattern.ROW and not is_added(program, read)
    ]


@dataclass(frozen=True)
class WidePlan(GradientReader):
    """One of these kernels."""

    kernel: str  # its name, and that of its template
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
    # The first and last query that see a key, or key that a query sees, where that is solved:
    queries: DeviceFunction | None
    keys: DeviceFunction | None
    line_terms: tuple[LineTerm, ...]  # what the mask reads of a query, or of a key, alone
    sums: tuple[RowSum, ...]  # of each query
    params: tuple[Param, ...]
    arguments: tuple[Argument, ...]  # after the tensors
    block_d: int
    block_dv: int

    def __str__(self) -> str:
        return f"{self.block_m} queries by {self.block_n} keys"

    @property
    def block_m(self) -> int:
        """Queries of a step, or of a program."""
        return ROWS if self.kernel == KEYS else CONSUMERS * ROWS

    @property
    def block_n(self) -> int:
        return ROWS

    @property
    def rows(self) -> int:
        return ROWS

    @property
    def stages(self) -> int:
        return STAGES[self.kernel][0]

    @property
    def do_stages(self) -> int:
        return STAGES[self.kernel][1]

    @property
    def v_stages(self) -> int:
        return STAGES[self.kernel][1]

    @property
    def held(self) -> int:
        """Columns of v that the kernel of the keys keeps in registers."""
        return self.block_dv // 2

    @property
    def kv_barriers(self) -> int:
        """Of k and of both halves of v, and of what has to be cut before it may be seen."""
        return 6 if self.options.has_kv_lens else 3

    @property
    def q_segments(self) -> tuple[WideSegment, ...]:
        return self._segments(_Q_SEGMENTS)

    @property
    def kv_segments(self) -> tuple[WideSegment, ...]:
        return self._segments(_KV_SEGMENTS)

    def _segments(self, solved: tuple[WideSegment, ...]) -> tuple[WideSegment, ...]:
        if self.stored:
            return tuple(replace(segment, tile=_SAID[self.kernel]) for segment in solved)
        return solved

    @property
    def and_heads(self) -> str:
        """Where the one that fetches says of which query head each q tile is."""
        return ", heads" if self.options.sums_keys else ""

    @property
    def and_sums(self) -> str:
        """The same, and where sums of ds go."""
        return ", heads, ds_sums, sizes" if self.options.sums_keys else ""

    @property
    def said(self) -> int:
        """Numbers of tiles that are kept where scores are computed a step ahead."""
        return 2 * self.stages

    @property
    def said_place(self) -> str:
        """Where the number of the t-th tile is left."""
        return "t % SAID" if self.kernel == SUMS else "slot"

    @property
    def part(self) -> int:
        return PART

    @property
    def columns(self) -> str:
        """How many keys scores are computed of at a time."""
        return "PART" if self.sums else "BLOCK_N"

    @property
    def layout(self) -> str:
        """Of these scores."""
        return "PART_LAYOUT" if self.sums else "S_LAYOUT"

    @property
    def summed(self) -> str:
        """What is summed of each row: ds, and of each read ds and p times its slope."""
        return ", ".join(["left_over", *(f"{x.total}, {x.weight}" for x in self.sums)])

    @property
    def no_sums(self) -> str:
        """As many zeros."""
        return ", ".join(["nothing"] * (1 + 2 * len(self.sums)))

    @property
    def reads_keys_apart(self) -> bool:
        """Whether something of a key is read by one thread, and handed round."""
        return bool(self.column_terms) or self.of_key is not None

    @property
    def and_slopes(self) -> str:
        """What the score's function gives but for the score."""
        return self.results.removeprefix("s")

    @property
    def left_over_row(self) -> int:
        """Where the sum of a row's ds goes: behind the sums and weights of all reads."""
        return 2 * len(self.sums)

    @property
    def heads_together(self) -> int:
        return HEADS_TOGETHER_STORED if self.stored else HEADS_TOGETHER

    @property
    def consumers(self) -> range:
        return range(CONSUMERS)

    @property
    def worker_warps(self) -> list[int]:
        """Of the second consumer, and of what fetches."""
        return [4, 1]

    @property
    def worker_registers(self) -> list[int]:
        """Of their threads."""
        return [CONSUMER_REGISTERS, WARP_REGISTERS]

    @property
    def tensor_maps(self) -> tuple[TensorMap, ...]:
        element = POINTER_TYPE[self.options.dtype].removeprefix("*")
        made = {KEYS: ("dk", "dv"), QUERIES: ("dq",), SUMS: ()}[self.kernel]
        widths = {"v": self.held} if self.kernel == KEYS else {}
        return tuple(
            TensorMap(name, element, ROWS, widths.get(name, self.block_d))
            for name in ("q", "k", "v", "do", *made)
        )

    @property
    def row_map(self) -> bool:
        """Whether row values are copied by TMA, too."""
        return self.kernel == KEYS

    @property
    def shared(self) -> int:
        """Bytes of shared memory that the tiles take."""
        tile = ROWS * self.block_d * ELEMENT_BYTES[self.options.dtype]
        tiles = sum(STAGES[self.kernel]) + (2 if self.kernel == KEYS else 2 * CONSUMERS)
        return tile * tiles + (4 * self.stages * 2 * ROWS if self.row_map else 0)


def wide_plan(
    kernel: str,
    program: Typed,
    options: Options,
    target: Target,
    learned: tuple[Learned, ...] = (),
) -> WidePlan:
    """Decide one of these kernels; those of queries sum what `learned` asks for."""
    program = with_kernel_names(program, "triton", "hopper")
    by_s = d_ds(program.given_score)
    mine = _row_reads(program, options, learned) if kernel != KEYS else []
    score, results, more = score_functions(program, by_s, mine)
    mask, queries, keys = program.mask_function, None, None
    if mask is not None and not options.stored:
        if kernel == KEYS:
            (piece,) = solve(program.given_mask, "i")
            mask, queries = None, query_range(piece, f"{program.name}_queries_0", program.params)
        else:
            (piece,) = solve(program.given_mask, "j")
            keys = kv_range(piece, f"{program.name}_keys_0", program.params)
    terms: tuple[LineTerm, ...] = ()
    if mask is not None:
        mask, terms = read_ahead(program, mask)
    parts = more.parts if more else ()
    functions = (score, *parts, mask, queries, keys, *(term.function for term in terms))
    return WidePlan(
        kernel=kernel,
        title=f"{TITLE_OF[kernel]} of `{program.name}`: Gluon, {target}",
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
        keys=keys,
        line_terms=terms,
        sums=tuple(
            RowSum(n, row, len(mine) + row, is_tame=is_tame(read.slope))
            for row, (n, read) in enumerate(mine)
        ),
        params=program.params,
        arguments=(
            *([] if kernel == KEYS else [Argument("row_values", "*fp32")]),
            Argument("sm_scale", "*fp32" if options.scale_in_memory else "fp32"),
            *shared_arguments(program.params, options),
            *(structure_places() if options.stored else ()),
            *((Argument("row_sums", "*fp32"), Argument("row_sums_stride", "i64")) if mine else ()),
            *([Argument("row_tile", "i32")] if kernel == SUMS else []),
            *([Argument("ds_sums", "*fp32")] if options.sums_keys else []),
        ),
        block_d=width_of(options),
        block_dv=width_of(options),
    )


def _row_reads(
    program: Typed, options: Options, learned: tuple[Learned, ...]
) -> list[tuple[int, Read]]:
    """The reads whose gradients the kernel of the queries sums, with their numbers."""
    reads = reads_of(program, learned, offset_per_batch=options.offset_per_batch)
    return [(n, reads[n]) for n in summed_rows(program, reads)]


TITLE_OF = {
    KEYS: "Gradients of k and v",
    QUERIES: "Gradient of q",
    SUMS: "Sums per query",
}

"""The decisions of the Hopper forward: which calls it takes, and the configurations to try.

A configuration is a tile, its consumer warpgroups and how they overlap products and softmax. The
first of a table that the assembler takes without serialising its products or spilling is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from .analysis.ranges import solve
from .ir.capture import Kind
from .ir.expr import ONE, TRUE, Expr, capture, index, substitute
from .ir.ops import Type
from .passes.derivative import d_ds
from .passes.distance import added
from .passes.fold import base2
from .passes.lines import LineRead, line_reads, without_line_reads
from .plan import DeviceFunction, Param, Typed, with_kernel_names
from .plan_triton import (
    COUNT_PLACE,
    ELEMENT_BYTES,
    HEADS_TOGETHER,
    HEADS_TOGETHER_STORED,
    ORDER_PLACE,
    POINTER_TYPE,
    RECORD,
    SCATTERED_PLACE,
    TITLES,
    Argument,
    Options,
    kv_range,
    launch_bounds,
    residual_arguments,
    residual_words,
    scalars_in_memory,
    shared_arguments,
    structure_places,
)
from .target import Target

# Registers of a thread, by the number of consumers, of consumers and of the producer, whose warp is
# padded to a warpgroup. 64 K registers are all that a multiprocessor has.
REGISTERS = {2: (240, 24), 3: (160, 32)}
PRODUCER_WARPS = 1
QUERIES = 64  # of a consumer
# How far below 1 p begins in float16: 2**20 below what it cannot hold. More would cost precision.
FLOAT16_HEADROOM = 4
MOST_STAGES = 16


@dataclass(frozen=True)
class Config:
    """A tile of the forward, and how consumers overlap what they do."""

    block_m: int  # queries of all consumers
    block_n: int
    consumers: int  # warpgroups
    stages: int  # of k and of v
    one_loop: bool  # an `if` around the mask in place of a loop for partial tiles
    convert_early: bool  # p becomes 16 bit before the loop's edge: fewer registers
    ping_pong: bool  # consumers take turns to issue products
    o_in_q: bool = False  # o leaves through q's shared memory, if it is as wide
    mask_late: bool = False  # pairs are masked after exp2, so that more of a warp's are in flight

    def __str__(self) -> str:
        words = [f"{self.block_m} queries by {self.block_n} keys", f"{self.consumers} consumers"]
        words += [f"{self.stages} stages"]
        words += ["one loop"] if self.one_loop else []
        words += ["p converted early"] if self.convert_early else []
        words += ["ping-pong"] if self.ping_pong else []
        words += ["o in q's place"] if self.o_in_q else []
        words += ["masked after exp2"] if self.mask_late else []
        return ", ".join(words)


# The best of a head dim, and what gives up some speed for registers.
_WIDE = Config(192, 128, 3, 3, one_loop=True, convert_early=True, ping_pong=True)
_PAIR = Config(128, 128, 2, 2, one_loop=False, convert_early=False, ping_pong=True)
_PAIR_IN_ONE_LOOP = replace(_PAIR, one_loop=True)
_ADDED_PAIR = replace(_PAIR_IN_ONE_LOOP, convert_early=True)
_SCORED_PAIR = replace(_ADDED_PAIR, mask_late=True)
_PAIR_IN_THREE_STAGES = replace(_PAIR_IN_ONE_LOOP, stages=3)
_NARROW = replace(_PAIR, block_n=64, ping_pong=False, o_in_q=True)
_LAST = Config(128, 32, 2, 2, one_loop=False, convert_early=True, ping_pong=False)


def _and_lighter(*configs: Config) -> tuple[Config, ...]:
    """Configurations, then the last of them with p converted early, then with fewer keys."""
    early = replace(configs[-1], convert_early=True)
    return tuple(
        dict.fromkeys((*configs, early, replace(early, block_n=early.block_n // 2), _LAST))
    )


class Tiles(Enum):
    """What is known of the tiles that a kernel visits, and of what it does with them."""

    ALL = "all"  # no mask
    MASKED = "masked"  # found from the first and last keys
    SCORED = "scored"  # the same, with a score
    ADDED = "added"  # with a score that is added to s by query, by key and by distance
    STORED = "stored"  # read from a structure


# By padded head dim (the wider of the two), and what tiles there are; the best first.
# TFLOP/s on one H200, bf16, at the sizes of benchmarks/hopper.py, within one race.
CONFIGS: dict[tuple[int, Tiles], tuple[Config, ...]] = {
    # 522, 461 not in turns.
    (64, Tiles.ALL): _and_lighter(_WIDE, _PAIR_IN_THREE_STAGES),
    # Causal 523, 484 with 2 consumers, these in two loops 449; window 1024 322, 340, -.
    (64, Tiles.MASKED): _and_lighter(_WIDE, _PAIR_IN_THREE_STAGES),
    # Soft-cap 300, 285 with 2 consumers.
    (64, Tiles.SCORED): _and_lighter(_WIDE, _PAIR_IN_THREE_STAGES),
    # With 3 consumers 44 spilled registers a tile.
    (64, Tiles.ADDED): _and_lighter(_PAIR_IN_THREE_STAGES),
    # A structure has q tiles of powers of two: 222.
    (64, Tiles.STORED): _and_lighter(_PAIR_IN_THREE_STAGES),
    # 686, 682 not in turns.
    (128, Tiles.ALL): _and_lighter(_PAIR),
    # Causal 675, 662 not in turns, 658 in one loop; window 1024 496, -, 488.
    (128, Tiles.MASKED): _and_lighter(_PAIR, _PAIR_IN_ONE_LOOP),
    # Soft-cap 491, 475 masked before exp2. All others are: masked after it, ALiBi has 0.93 of that
    # speed, a window 1.02, causal 1.01. Before, p converted late was no faster, two loops 1.01.
    (128, Tiles.SCORED): (_SCORED_PAIR, *_and_lighter(_ADDED_PAIR)[1:]),
    (128, Tiles.ADDED): _and_lighter(_ADDED_PAIR),
    # Documents 346, 312 in two loops.
    (128, Tiles.STORED): _and_lighter(_PAIR_IN_ONE_LOOP),
    # Full 694, in turns 696; causal 669 and 657.
    **dict.fromkeys(((256, tiles) for tiles in Tiles), _and_lighter(_NARROW)),
}


# Single changes of a configuration that `bench --tune` tries.
CHANGES: tuple[Callable[[Config], Config], ...] = (
    lambda c: replace(c, ping_pong=not c.ping_pong),
    lambda c: replace(c, convert_early=not c.convert_early),
    lambda c: replace(c, stages=c.stages + 1),
    lambda c: replace(c, stages=c.stages + 1, o_in_q=True),
    lambda c: replace(c, stages=max(2, c.stages - 1)),
    lambda c: replace(c, block_n=c.block_n // 2, stages=2 * c.stages),
    lambda c: replace(c, mask_late=not c.mask_late),
)


def neighbours(configs: tuple[Config, ...]) -> tuple[Config, ...]:
    """Configurations, and single changes of the first."""
    return tuple(dict.fromkeys((*configs, *(change(configs[0]) for change in CHANGES))))


def config_of(fields: Any) -> Config | None:
    """A configuration from plain values, which may be anything; None for what is none."""
    wanted = {f.name: type(getattr(_PAIR, f.name)) for f in dataclasses.fields(Config)}
    if not isinstance(fields, dict) or {n: type(x) for n, x in fields.items()} != wanted:
        return None
    found = Config(**fields)
    sizes = found.block_m == QUERIES * found.consumers and found.block_n in (32, 64, 128)
    sound = found.consumers in REGISTERS and sizes and 2 <= found.stages <= MOST_STAGES
    return found if sound else None


@dataclass(frozen=True)
class Segment:
    """A loop over kv tiles after the first one."""

    title: str
    # As the kernel says it:
    start: str
    end: str
    start_n: str  # the first key of the t-th tile
    masked: bool
    partial: str  # whether a tile is partial


def _start_n(t: object) -> str:
    """The first key of a tile of a row that is one run, as the kernel says it."""
    return f"kv_tile({t}, partial_count, first, full_first, full_end) * BLOCK_N"


_FULL = Segment(
    title=TITLES["full"],
    start="gl.maximum(partial_count, 1)",
    end="count",
    start_n="(full_first + (t - partial_count)) * BLOCK_N",
    masked=False,
    partial="False",
)
_PARTIAL = Segment(
    title=TITLES["partial"],
    start="1",
    end="partial_count",
    start_n="last_partial_tile(t, partial_count, first, full_first, full_end) * BLOCK_N",
    masked=True,
    partial="True",
)
_BOTH = Segment(
    title="partial tiles, masked pair by pair, then full ones",
    start="1",
    end="count",
    start_n=_start_n("t"),
    masked=True,
    partial="t < partial_count",
)


# Of tiles that a structure names the producer says where they begin.
_SAID = "read_number(start_smem.index(step % STAGES))"


@dataclass(frozen=True)
class LineTerm:
    """What a mask reads of a row or of a column of pairs: read ahead, and passed to it."""

    line: str
    param: Param
    function: DeviceFunction

    @property
    def name(self) -> str:
        return self.param.name


@dataclass(frozen=True)
class TensorMap:
    """A tensor that is copied in tiles of [1, 1, rows, head dim] by TMA."""

    name: str
    element: str  # Triton's word for it
    rows: int
    head_dim: int  # padded
    swizzle: int = 128  # bytes


class TileReader:
    """What the plans of both directions say of tiles that are read from memory, and of lines."""

    options: Options
    line_terms: tuple[LineTerm, ...]
    added: Added | None

    @property
    def of_query(self) -> DeviceFunction | None:
        """What a score adds to s by query; by key and by distance, next."""
        return self.added.of_query if self.added else None

    @property
    def of_key(self) -> DeviceFunction | None:
        return self.added.of_key if self.added else None

    @property
    def per_key(self) -> DeviceFunction | None:
        return self.added.per_key if self.added else None

    @property
    def stored(self) -> bool:
        """Whether the tiles to visit are read from memory (`plan_structure.py`)."""
        return self.options.stored

    @property
    def record(self) -> int:
        """Int32 of one row of a stored structure; next, where that has how many tiles of a kind."""
        return RECORD

    @property
    def partial_place(self) -> int:
        return COUNT_PLACE["partial"]

    @property
    def full_place(self) -> int:
        return COUNT_PLACE["full"]

    @property
    def scattered_place(self) -> int:
        return SCATTERED_PLACE

    @property
    def order_place(self) -> int:
        return ORDER_PLACE

    @property
    def row_terms(self) -> tuple[LineTerm, ...]:
        """What the mask reads of a query; of a key, next."""
        return tuple(term for term in self.line_terms if term.line == "row")

    @property
    def column_terms(self) -> tuple[LineTerm, ...]:
        return tuple(term for term in self.line_terms if term.line == "column")


@dataclass(frozen=True)
class HopperPlan(TileReader):
    """The forward kernel of the Hopper backend."""

    title: str
    comments: tuple[str, ...]
    target: Target
    options: Options
    functions: tuple[DeviceFunction, ...]
    score: DeviceFunction | None
    added: Added | None  # in place of such a score
    mask: DeviceFunction | None
    keys: DeviceFunction | None  # the first and last key that a row sees, where that is the mask
    masks_by_keys: bool  # pairs are masked by these, and not by the mask itself
    line_terms: tuple[LineTerm, ...]
    sharpens: bool  # the score may weigh few keys of many
    params: tuple[Param, ...]
    arguments: tuple[Argument, ...]  # after q, k, v and o
    scalars_in_memory: tuple[Argument, ...]
    config: Config
    block_d: int
    block_dv: int

    @property
    def exact(self) -> bool:
        return self.options.precision == "exact"

    @property
    def propagates_nan(self) -> bool:
        return any(f.propagates_nan for f in self.functions)

    @property
    def renews(self) -> int:
        """1 where few keys may show in gradients, and not be those of a row's first tile, or 0.

        The p of such a query round, unless the largest is 1: dq of head temperatures in float16 was
        off by 1.60 times rounding, and is by 1.51 (H200, benchmarks/NOTES.md). Packed documents
        keep no residual, and round.
        """
        return int((self.stored or self.sharpens) and self.options.keeps_residual)

    @property
    def masked_first(self) -> str:
        """When a tile is masked before its softmax: to find its maximum it has to be."""
        return "MASKED and RENEW" if self.config.mask_late else "MASKED"

    @property
    def headroom(self) -> int:
        """Bits that p may grow by beyond 1 without loss: 16 bits of float16 end at 2**16."""
        return FLOAT16_HEADROOM if self.options.dtype == "f16" else 0

    @property
    def every_tile(self) -> bool:
        """Whether all keys of the tensor are visible to all queries."""
        return self.mask is None and not self.stored

    @property
    def ranged(self) -> bool:
        """Whether they are found from the first and last keys."""
        return self.keys is not None

    @property
    def in_one_run(self) -> bool:
        return not self.stored

    @property
    def uneven(self) -> bool:
        """Whether q tiles visit different numbers of kv tiles, causal ones most at the end."""
        return not self.every_tile

    @property
    def row_params(self) -> tuple[Param, ...]:
        return tuple(term.param for term in self.row_terms)

    @property
    def mask_params(self) -> tuple[Param, ...]:
        """What the mask takes: captures, then what was read of rows and of columns."""
        return (*self.params, *self.row_params, *(term.param for term in self.column_terms))

    @property
    def positions(self) -> tuple[Argument, ...]:
        """The arguments that say where queries begin, where keys end and which tiles there are."""
        known = {"q_offset", "kv_lens", *(a.name for a in structure_places())}
        return tuple(a for a in self.arguments if a.name in known)

    @property
    def reads_apart(self) -> bool:
        """Whether something of a key is read by one thread, and handed round."""
        return bool(self.column_terms) or self.of_key is not None

    @property
    def and_of_key(self) -> str:
        """What a key adds to its scores, as an argument."""
        return ", of_key" if self.of_key else ""

    @property
    def changes_scores(self) -> bool:
        """Whether the variant has a score besides s."""
        return self.score is not None or self.added is not None

    @property
    def scale_in_softmax(self) -> bool:
        """A positive scale commutes with the maximum, and then costs nothing."""
        return not self.changes_scores and self.options.positive_scale

    @property
    def scale_scores(self) -> bool:
        return not self.changes_scores and not self.options.positive_scale

    @property
    def score_of_s(self) -> bool:
        return self.score is not None and "s" in self.score.body[0].names

    @property
    def score_without_s(self) -> bool:
        """A score that is no tile of its own: it may be one number."""
        return self.score is not None and not self.score_of_s

    @property
    def kv_segments(self) -> tuple[Segment, ...]:
        """The loops after the first tile. Without a mask that one is the only partial tile."""
        if self.every_tile:
            return (_FULL,)
        segments = (_BOTH,) if self.config.one_loop else (_PARTIAL, _FULL)
        return tuple(replace(s, start_n=_SAID) for s in segments) if self.stored else segments

    @property
    def masked(self) -> bool:
        """Whether tiles after the first may be partial."""
        return not self.every_tile

    @property
    def kv_start_n(self) -> str:
        """The first key of the t-th tile, as the kernel says it."""
        return _SAID if self.stored else _BOTH.start_n

    @property
    def first_start_n(self) -> str:
        """That of the first tile."""
        return _SAID if self.stored else _start_n(0)

    @property
    def rows_out(self) -> str:
        """Beside o, the arguments that a consumer writes rows of."""
        return "lse, residual" if self.options.keeps_residual else "lse"

    @property
    def residual_words(self) -> int:
        return residual_words(self.options.v_head_dim)

    @property
    def heads_together(self) -> int:
        return HEADS_TOGETHER_STORED if self.stored else HEADS_TOGETHER

    @property
    def rows(self) -> int:
        return self.config.block_m // self.config.consumers

    @property
    def range_rows(self) -> int:
        return 1 << (self.config.block_m - 1).bit_length()

    @property
    def consumers(self) -> range:
        return range(self.config.consumers)

    @property
    def o_in_q(self) -> bool:
        """Whether o leaves through q's shared memory."""
        return self.config.o_in_q and self.block_d == self.block_dv

    @property
    def own_o(self) -> bool:
        return not self.o_in_q

    @property
    def worker_warps(self) -> list[int]:
        """Warps of the consumers after the first, and of the producer."""
        return [4] * (self.config.consumers - 1) + [PRODUCER_WARPS]

    @property
    def worker_registers(self) -> list[int]:
        consumer, producer = REGISTERS[self.config.consumers]
        return [consumer] * (self.config.consumers - 1) + [producer]

    @property
    def tensor_maps(self) -> tuple[TensorMap, ...]:
        element = POINTER_TYPE[self.options.dtype].removeprefix("*")
        q = TensorMap("q", element, self.rows, self.block_d)
        k = TensorMap("k", element, self.config.block_n, self.block_d)
        v = TensorMap("v", element, self.config.block_n, self.block_dv)
        return q, k, v, TensorMap("o", element, self.rows, self.block_dv)

    @property
    def shared(self) -> int:
        """Bytes of shared memory that the tiles take."""
        config = self.config
        q, o = config.block_m * self.block_d, config.block_m * self.block_dv * self.own_o
        kv = config.stages * config.block_n * (self.block_d + self.block_dv)
        return (q + o + kv) * ELEMENT_BYTES[self.options.dtype]


def hopper_plan(program: Typed, options: Options, target: Target, config: Config) -> HopperPlan:
    """Decide the forward kernel for one configuration."""
    program = with_kernel_names(program, "triton", "hopper")
    score, more = score_functions(program)
    mask = program.mask_function
    keys, masks_by_keys = None, False
    if mask is not None and not options.stored:
        (piece,) = solve(program.given_mask, "j")
        keys = kv_range(piece, f"{program.name}_keys_0", program.params)
        # Two comparisons of a key: window 1161 -> 791 instructions of a partial tile. With one end
        # alone the mask itself is shorter (causal 772, by keys 862).
        masks_by_keys = bool(piece.los) and bool(piece.his)
    terms: tuple[LineTerm, ...] = ()
    if mask is not None and not masks_by_keys:
        mask, terms = read_ahead(program, mask)
    functions = (
        score,
        *((more.slope, *more.parts) if more else ()),
        None if masks_by_keys else mask,
        *(t.function for t in terms),
        keys,
    )
    return HopperPlan(
        title=f"Attention forward for `{program.name}`: Gluon, {target}",
        comments=program.text,
        target=target,
        options=options,
        functions=tuple(f for f in functions if f is not None),
        score=score,
        added=more,
        mask=mask,
        keys=keys,
        masks_by_keys=masks_by_keys,
        line_terms=terms,
        sharpens=sharpens(program),
        params=program.params,
        arguments=arguments(program.params, options),
        scalars_in_memory=scalars_in_memory(program.params),
        config=config,
        block_d=padded(options.head_dim),
        block_dv=padded(options.v_head_dim),
    )


def sharpens(program: Typed) -> bool:
    """Whether a score may take scores apart by more than twice what q and k do, as temperatures."""
    slope = launch_bounds(program.params, small=False)(d_ds(program.given_score))
    return bool(slope.lo < -2 or slope.hi > 2)


@dataclass(frozen=True)
class Added:
    """In place of a score: what s is multiplied by, and what is added to it, in base 2."""

    slope: DeviceFunction
    of_query: DeviceFunction | None
    of_key: DeviceFunction | None
    per_key: DeviceFunction | None

    @property
    def parts(self) -> tuple[DeviceFunction | None, ...]:
        return self.of_query, self.of_key, self.per_key


def score_functions(program: Typed) -> tuple[DeviceFunction | None, Added | None]:
    """A score of s = q k^T in base 2, or its parts in its place."""
    written = program.score_function
    if written is None:
        return None, None
    if (more := added_functions(program)) is not None:
        return None, more
    # So that scale and log2(e) meet the constants of the score.
    raw = substitute(program.score, {"s": index("s") * capture("sm_scale", Type.FLOAT)})
    doc = "The score of s = q k^T, times log2(e)."
    return DeviceFunction(written.name, written.params, (base2(raw),), doc), None


def added_functions(program: Typed) -> Added | None:
    """The parts of a score that is added to s; None for others."""
    found, written = added(program.score), program.score_function
    if found is None or written is None:
        return None

    def part(name: str, value: Expr, doc: str) -> DeviceFunction:
        return DeviceFunction(f"{written.name}_{name}", written.params, (base2(value),), doc)

    def maybe(name: str, value: Expr | None, doc: str) -> DeviceFunction | None:
        return None if value is None else part(name, value, doc)

    scale = capture("sm_scale", Type.FLOAT)
    slope = scale if found.slope == ONE else found.slope * scale
    return Added(
        part("slope", slope, "What q k^T is multiplied by, log2(e) in it."),
        maybe("of_query", found.of_query, "What a query adds to its scores, in base 2."),
        maybe("of_key", found.of_key, "What a key adds to its scores, in base 2."),
        maybe("per_key", found.per_key, "What a key further on adds, in base 2."),
    )


def read_ahead(program: Typed, mask: DeviceFunction) -> tuple[DeviceFunction, tuple[LineTerm, ...]]:
    """The mask without what it reads of rows and columns alone, and these terms.

    In the layout of products, 32 columns a thread, they are read one after the other, for want of
    registers: 34 loads and 3.7 us a partial tile for documents at head dim 128.
    """
    # Rows first, as the kernel passes them.
    reads = tuple(sorted(line_reads(program.mask), key=lambda read: read.line != "row"))
    terms = tuple(_line_term(program, read) for read in reads)
    params = (*mask.params, *(term.param for term in terms))
    body = without_line_reads(program.mask, reads)
    return DeviceFunction(mask.name, params, (body,), mask.doc), terms


def _line_term(program: Typed, found: LineRead) -> LineTerm:
    doc = f"What a {found.line} of pairs reads."
    function = DeviceFunction(f"{program.name}_{found.name}", program.params, (found.read,), doc)
    stored = {p.name: p.element for p in program.params}[found.read.attr]
    ints = "i64" if stored == "i64" else "i32"
    element = {Type.BOOL: "bool", Type.INT: ints, Type.FLOAT: "f32"}[found.read.type]
    return LineTerm(found.line, Param(found.name, Kind.SCALAR, element, by_value=False), function)


def padded(head_dim: int) -> int:
    """The tile's width for a head dim; TMA fills what is beyond the tensor with zeros."""
    return max(64, 1 << (head_dim - 1).bit_length())


def tiles_of(program: Typed, options: Options) -> Tiles:
    """Which kind of tiles a call visits."""
    if options.stored:
        return Tiles.STORED
    if program.mask == TRUE:
        return Tiles.ALL
    if not program.has_score:
        return Tiles.MASKED
    return Tiles.ADDED if added(program.score) else Tiles.SCORED


def configs_of(program: Typed, options: Options) -> tuple[Config, ...]:
    """The configurations for a call, the best first."""
    width = max(padded(options.head_dim), padded(options.v_head_dim))
    return CONFIGS[width, tiles_of(program, options)]


def arguments(params: tuple[Param, ...], options: Options) -> tuple[Argument, ...]:
    """The run-time arguments after q, k, v and o, in order."""
    found = [Argument("lse", "*fp32"), Argument("counter", "*i32")]
    found.append(Argument("sm_scale", "*fp32" if options.scale_in_memory else "fp32"))
    found += residual_arguments(options) + shared_arguments(params, options)
    return (*found, *(structure_places() if options.stored else ()))

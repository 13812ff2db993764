"""The decisions of the portable Triton forward: functions, arguments, tiles, kv segments."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from .analysis.interval import Bounds, Interval, Name, ints, open_load
from .analysis.ranges import FAR, Piece, solve
from .ir.capture import Kind
from .ir.expr import TRUE, Expr, capture, const, index, make, substitute
from .ir.ops import Op, Type
from .passes.fold import base2
from .plan import DeviceFunction, Param, Typed, with_kernel_names
from .target import Target, Tile, choose_tiles
from .variant import S

# Lengths, offsets and int scalars below this are computed with in 32 bits.
SMALL = 2**24
# Heads whose tiles take turns where tiles differ in what they visit: the longest come first, and
# short ones are left for the end. Their keys stay in L2 together: 8 is best of 2, 8 and 32 (Hopper,
# causal, head dim 128, H200: 2 is 7 % slower, 32 is 13 %).
HEADS_TOGETHER = 8
# Documents need the keys around a tile alone, so that more heads fit.
HEADS_TOGETHER_STORED = 32
ELEMENT_BYTES = {"f16": 2, "bf16": 2, "f32": 4}


@dataclass(frozen=True)
class Options:
    """What the launch knows and a kernel is specialised for: a small, closed set."""

    dtype: str  # of q, k, v: f16, bf16 or f32
    head_dim: int
    v_head_dim: int
    precision: str = "fast"  # or "exact"
    small: bool = True  # lengths and int scalars below SMALL
    wide_offsets: bool = False  # element offsets may leave 32 bits
    aligned: bool = True  # pointers and strides in multiples of 16 bytes
    short: bool = False  # few queries
    has_kv_lens: bool = False
    offset_per_batch: bool = False
    scale_in_memory: bool = False
    positive_scale: bool = True
    even: bool = True  # q_len and kv_len are multiples of 16
    stored: bool = False  # which tiles to visit is read from memory (`plan_structure.py`)
    blocks: bool = False  # the user gives blocks that may be visited, too
    coarse: bool = False  # so many pairs that a structure of small tiles would take much memory
    keeps_residual: bool = False  # what rounding o to 16 bits takes away is written, too
    # Of the Hopper backward (`plan_hopper_backward.py`):
    deterministic: bool = False  # dq is added up in a fixed order
    sums_keys: bool = False  # ds is summed per key, for the gradients of captures


@dataclass(frozen=True)
class Reach:
    """The part of `Options` that kernels without products are specialised for."""

    small: bool
    wide_offsets: bool
    has_kv_lens: bool
    offset_per_batch: bool

    @staticmethod
    def of(options: Options) -> Reach:
        return Reach(
            options.small, options.wide_offsets, options.has_kv_lens, options.offset_per_batch
        )


@dataclass(frozen=True)
class Argument:
    """A kernel argument: its name and Triton's type for it."""

    name: str
    type: str


@dataclass(frozen=True)
class Run:
    """The kv tiles that one piece of the mask leaves, as names in the kernel."""

    range: DeviceFunction
    number: int

    @property
    def lo(self) -> str:
        return f"lo_{self.number}"

    @property
    def hi(self) -> str:
        return f"hi_{self.number}"

    @property
    def first(self) -> str:
        return f"first_{self.number}"

    @property
    def end(self) -> str:
        return f"end_{self.number}"

    @property
    def full_first(self) -> str:
        return f"full_first_{self.number}"

    @property
    def full_end(self) -> str:
        return f"full_end_{self.number}"


@dataclass(frozen=True)
class Pair:
    """Two runs that are compared."""

    a: Run
    b: Run


@dataclass(frozen=True)
class Stretch:
    """Consecutive tiles that a loop visits: `first` to `end` are names in the kernel.

    Step t of the loop is tile t + shift while t < count, the tiles of all stretches up to this one.
    """

    kind: str
    number: int
    first: str = ""
    end: str = ""

    @property
    def shift(self) -> str:
        return f"{self.kind}_shift_{self.number}"

    @property
    def count(self) -> str:
        return f"{self.kind}_count_{self.number}"

    @property
    def before(self) -> str:
        """The tiles of the stretches before this one."""
        return f"{self.kind}_count_{self.number - 1}" if self.number else "0"

    @property
    def shift_place(self) -> int:
        """Where a stored structure has it."""
        return KIND_PLACE[self.kind] + self.number

    @property
    def count_place(self) -> int:
        return self.shift_place + STORED_RUNS


# Runs of each kind that a stored structure has room for: four lost 1 % of tiles over the catalogue.
STORED_RUNS = 4
# A row of tiles in a stored structure, in int32: shifts and counts of partial and of full runs,
# then whether there are more runs than that, and how many words the map has; the partial count is
# that of all tiles where there are more. The n-th row of a transposed structure has, last,
# which row has the n-th most tiles.
KIND_PLACE = {"partial": 0, "full": 2 * STORED_RUNS}
# How many tiles of a kind there are: the count of the last run.
COUNT_PLACE = {kind: place + 2 * STORED_RUNS - 1 for kind, place in KIND_PLACE.items()}
SCATTERED_PLACE = 4 * STORED_RUNS
MAP_PLACE = SCATTERED_PLACE + 1
ORDER_PLACE = MAP_PLACE + 1
RECORD = 32  # 128 bytes, a cache line


@dataclass(frozen=True)
class LoadMask:
    """What of a k or v tile may lie outside the tensor."""

    past_end: bool
    padded: bool

    @property
    def all(self) -> bool:
        return not self.past_end and not self.padded

    @property
    def rows(self) -> bool:
        return self.past_end and not self.padded

    @property
    def columns(self) -> bool:
        return self.padded and not self.past_end

    @property
    def both(self) -> bool:
        return self.past_end and self.padded


@dataclass(frozen=True)
class Segment:
    """A loop over kv tiles of one kind."""

    kind: str  # a key of TITLES
    stretches: tuple[Stretch, ...]
    load_d: LoadMask  # of tiles as wide as q and k
    load_dv: LoadMask  # of tiles as wide as v
    stored: bool = False

    @property
    def title(self) -> str:
        return TITLES[self.kind]

    @property
    def masked(self) -> bool:
        return self.kind != "full"

    @property
    def scattered(self) -> bool:
        """Whether some rows of a stored structure have a map of their tiles instead of runs."""
        return self.masked and self.stored

    @property
    def last(self) -> Stretch:
        return self.stretches[-1]

    @property
    def earlier(self) -> tuple[Stretch, ...]:
        """The stretches before the last one, the nearest first."""
        return self.stretches[-2::-1]


TITLES = {
    "partial": "partial tiles: masked pair by pair",
    "full": "full tiles: every pair attends",
}


class AttentionPlan:
    """What follows from the decisions of any attention kernel, forward or backward."""

    options: Options
    score: DeviceFunction | None
    mask: DeviceFunction | None
    runs: tuple[Run, ...]
    params: tuple[Param, ...]
    tile: Tile
    block_d: int
    block_dv: int

    @property
    def wide_scalars(self) -> tuple[str, ...]:
        """Ints passed by value that are computed with in 64 bits."""
        return wide_scalars(self.params, self.options)

    @property
    def record(self) -> int:
        """Int32 of one row of a stored structure."""
        return RECORD

    @property
    def scattered_place(self) -> int:
        return SCATTERED_PLACE

    @property
    def stored(self) -> bool:
        return self.options.stored

    @property
    def every_tile(self) -> bool:
        """Whether all keys are visible to all queries."""
        return self.mask is None and not self.stored

    @property
    def heads_together(self) -> int:
        """Heads whose tiles take turns."""
        return HEADS_TOGETHER_STORED if self.stored else HEADS_TOGETHER

    @property
    def exchanges(self) -> tuple[Pair, ...]:
        """A sorting network for the runs."""
        return sorting_pairs(self.runs)

    @property
    def neighbours(self) -> tuple[Pair, ...]:
        return neighbours_of(self.runs)

    @property
    def plain_score(self) -> bool:
        return self.score is None

    @property
    def residual_words(self) -> int:
        return residual_words(self.options.v_head_dim)

    @property
    def exact(self) -> bool:
        return self.options.precision == "exact"

    @property
    def dot_precision(self) -> str:
        """How fp32 products are computed; 16-bit ones are exact anyway."""
        return "ieee" if self.exact else "tf32"

    @property
    def pad_d(self) -> bool:
        return self.block_d != self.options.head_dim

    @property
    def pad_dv(self) -> bool:
        return self.block_dv != self.options.v_head_dim

    @property
    def constants(self) -> dict[str, int]:
        """The compile-time constants of the kernel."""
        return {
            "HEAD_DIM": self.options.head_dim,
            "V_HEAD_DIM": self.options.v_head_dim,
            "BLOCK_D": self.block_d,
            "BLOCK_DV": self.block_dv,
            "BLOCK_M": self.tile.block_m,
            "BLOCK_N": self.tile.block_n,
        }


@dataclass(frozen=True)
class TritonPlan(AttentionPlan):
    """The forward kernel of the portable backend."""

    title: str
    comments: tuple[str, ...]
    target: Target
    options: Options
    functions: tuple[DeviceFunction, ...]
    score: DeviceFunction | None
    mask: DeviceFunction | None
    runs: tuple[Run, ...]
    kv_segments: tuple[Segment, ...]
    params: tuple[Param, ...]
    arguments: tuple[Argument, ...]
    scalars_in_memory: tuple[Argument, ...]  # and the type that each is computed with
    tile: Tile
    block_d: int
    block_dv: int
    places_ahead: bool  # the places of a tile are computed before the loops

    @property
    def full_runs(self) -> bool:
        """Whether the pieces of the mask say which tiles are full."""
        return bool(self.runs) and any(s.kind == "full" for s in self.kv_segments)

    @property
    def scale_in_softmax(self) -> bool:
        """A positive scale commutes with the maximum, and then costs nothing."""
        return self.score is None and self.options.positive_scale

    @property
    def scale_scores(self) -> bool:
        return self.score is None and not self.options.positive_scale


def triton_plan(
    program: Typed,
    options: Options,
    target: Target,
    tile: Tile | None = None,
    *,
    few_registers: bool = False,
) -> TritonPlan:
    """Decide the forward kernel; `tile` replaces the one of the table.

    Places computed ahead save 23 of 385 instructions a tile at head dim 128, but take 24 registers:
    at head dim 64 the third program of each multiprocessor (ALiBi: 1.22 -> 1.01), and where a
    structure is read they spill.
    """
    program = with_kernel_names(program, "triton")
    block_d, block_dv = padded(options.head_dim), padded(options.v_head_dim)
    score = program.score_function
    if score is not None:
        # s = qk * sm_scale, so that scale and log2(e) meet the constants of the score.
        raw = substitute(program.score, {"s": index("s") * capture("sm_scale", Type.FLOAT)})
        score = DeviceFunction(
            score.name, score.params, (base2(raw),), "The score of s = q k^T, times log2(e)."
        )
    mask = program.mask_function
    pieces = solve(program.mask, "j") if mask is not None else ()
    runs = () if options.stored else runs_of(program, pieces)
    pad_d, pad_dv = block_d != options.head_dim, block_dv != options.v_head_dim
    return TritonPlan(
        title=f"Attention forward for `{program.name}`: portable Triton, {target}",
        comments=program.text,
        target=target,
        options=options,
        functions=tuple(f for f in (score, mask, *(r.range for r in runs)) if f is not None),
        score=score,
        mask=mask,
        runs=runs,
        kv_segments=segments_of(mask, pieces, runs, options, (pad_d, pad_dv)),
        params=program.params,
        arguments=arguments(program.params, options),
        scalars_in_memory=scalars_in_memory(program.params),
        tile=tile or tiles_of(program, options, target)[0],
        block_d=block_d,
        block_dv=block_dv,
        places_ahead=block_d >= 128 and not options.stored and not few_registers,
    )


def padded(head_dim: int) -> int:
    """The power of two, at least 16, that tiles have in place of a head dim."""
    return max(16, 1 << (head_dim - 1).bit_length())


def residual_words(v_head_dim: int) -> int:
    """Int32 of a row of o's residual: 2 bits an element, 64 elements in 4 words (`packed`)."""
    return -(-v_head_dim // 64) * 4


def tiles_of(program: Typed, options: Options, target: Target) -> tuple[Tile, ...]:
    """The tile of a kernel variant, and smaller ones for a score that needs more memory."""
    return choose_tiles(
        padded(options.head_dim),
        padded(options.v_head_dim),
        ELEMENT_BYTES[options.dtype],
        target,
        short=options.short,
        scored=program.score != S,
        masked=program.mask != TRUE,
        stored=options.stored and not options.coarse,
    )


def runs_of(program: Typed, pieces: tuple[Piece, ...]) -> tuple[Run, ...]:
    """The runs of visible tiles, one for each piece of the mask."""
    return tuple(
        Run(kv_range(piece, f"{program.name}_keys_{k}", program.params), k)
        for k, piece in enumerate(pieces)
    )


def segments_of(
    mask: DeviceFunction | None,
    pieces: tuple[Piece, ...],
    runs: tuple[Run, ...],
    options: Options,
    padded: tuple[bool, bool],
) -> tuple[Segment, ...]:
    """The loops of a kernel; `padded` says it of the head dims of q and k, and of v."""
    return tuple(
        Segment(
            kind,
            stretches,
            LoadMask(kind != "full", padded[0]),
            LoadMask(kind != "full", padded[1]),
            options.stored,
        )
        for kind, stretches in _stretches(mask, pieces, runs, options)
    )


def _stretches(
    mask: DeviceFunction | None, pieces: tuple[Piece, ...], runs: tuple[Run, ...], options: Options
) -> tuple[tuple[str, tuple[Stretch, ...]], ...]:
    """The loops by kind of tile, and what each visits."""
    if options.stored:
        stored = range(STORED_RUNS)
        partial, full = (tuple(Stretch(kind, k) for k in stored) for kind in ("partial", "full"))
        return ("partial", partial), ("full", full)
    if mask is None:
        ends = [("first_0", "full_first_0"), ("full_end_0", "end_0")]
        return _segment("partial", ends), _segment("full", [("full_first_0", "full_end_0")])
    if not all(piece.is_pure for piece in pieces):
        return (_segment("partial", [(r.first, r.end) for r in runs]),)
    around = [ends for r in runs for ends in ((r.first, r.full_first), (r.full_end, r.end))]
    inside = [(r.full_first, r.full_end) for r in runs]
    return (_segment("partial", around), _segment("full", inside)) if runs else ()


def _segment(kind: str, ends: list[tuple[str, str]]) -> tuple[str, tuple[Stretch, ...]]:
    return kind, tuple(Stretch(kind, k, *names) for k, names in enumerate(ends))


def kv_range(piece: Piece, name: str, params: tuple[Param, ...]) -> DeviceFunction:
    """The first and the last key that a query may see, by one piece of the mask."""
    last = make(Op.SUB, index("kv_len"), const(1))
    doc = "The first and last key that a query may see."
    return DeviceFunction(name, params, range_ends(piece, last), doc)


def q_range(piece: Piece, name: str, params: tuple[Param, ...]) -> DeviceFunction:
    """The first and the last query that may see a key, by one piece of the mask."""
    doc = "The first and last query that may see a key."
    return DeviceFunction(name, params, range_ends(piece, const(FAR - 1)), doc)


def range_ends(piece: Piece, last: Expr) -> tuple[Expr, Expr]:
    """The least and the greatest index of a piece, in 0..last."""
    lo, hi = const(0), last
    for bound in piece.los:
        lo = make(Op.MAX, lo, bound)
    for bound in piece.his:
        hi = make(Op.MIN, hi, bound)
    lo = make(Op.MIN, lo, const(FAR))
    hi = make(Op.MAX, hi, const(-1))
    for condition in piece.guards:
        lo = make(Op.WHERE, condition, lo, const(FAR))
        hi = make(Op.WHERE, condition, hi, const(-1))
    return lo, hi


def launch_bounds(params: tuple[Param, ...], *, small: bool) -> Bounds:
    """What every launch that a kernel serves keeps to, for choosing 32 or 64 bits."""
    env: dict[Name, Interval] = {}
    tables: dict[str, Interval] = {}
    if small:
        env.update({name: ints(0, SMALL) for name in ("i", "j", "q_len", "kv_len")})
    for param in params:
        bits = _STORAGE_BITS.get(param.element) if param.type is Type.INT else None
        stored = ints(-(2**bits), 2**bits - 1) if bits is not None else None
        if param.kind is Kind.TENSOR:
            env.update({(param.name, axis): ints(0, FAR) for axis in range(param.rank)})
            if stored is not None:
                tables[param.name] = stored
        elif param.by_value and param.type is Type.INT and small:
            env[param.name] = ints(-SMALL, SMALL)
        elif stored is not None and not param.by_value:
            env[param.name] = stored

    def load(node: Expr, indices: tuple[Interval, ...]) -> Interval:
        return tables[node.attr] if node.attr in tables else open_load(node, indices)

    return Bounds(env, load)


# Compare-exchange steps that sort so many runs.
_NETWORKS: dict[int, tuple[tuple[int, int], ...]] = {
    0: (),
    1: (),
    2: ((0, 1),),
    3: ((0, 1), (1, 2), (0, 1)),
    4: ((0, 1), (2, 3), (0, 2), (1, 3), (1, 2)),
}


def sorting_pairs(runs: tuple[Run, ...]) -> tuple[Pair, ...]:
    """A sorting network for runs."""
    return tuple(Pair(runs[a], runs[b]) for a, b in _NETWORKS[len(runs)])


def neighbours_of(runs: tuple[Run, ...]) -> tuple[Pair, ...]:
    """Each run with the next one."""
    return tuple(Pair(a, b) for a, b in itertools.pairwise(runs))


# Bits besides the sign of ints in memory; unsigned bytes lie inside 8.
_STORAGE_BITS = {"i8": 7, "u8": 8, "i16": 15, "i32": 31}


# -- arguments ---------------------------------------------------------------------------------

POINTER_TYPE = {
    "bool": "*i1",
    "i8": "*i8",
    "u8": "*u8",
    "i16": "*i16",
    "i32": "*i32",
    "i64": "*i64",
    "f16": "*fp16",
    "bf16": "*bf16",
    "f32": "*fp32",
    "f64": "*fp64",
}


def arguments(params: tuple[Param, ...], options: Options) -> tuple[Argument, ...]:
    """The kernel's run-time arguments, in order."""
    offset = "i64" if options.wide_offsets else "i32"
    tensor = POINTER_TYPE[options.dtype]
    found = [Argument(name, tensor) for name in ("q", "k", "v", "o")]
    found.append(Argument("lse", "*fp32"))
    for name in ("q", "k", "v", "o"):
        found += [Argument(f"{name}_stride_{axis}", offset) for axis in ("b", "h", "l")]
    found += [Argument(name, "i32") for name in ("q_len", "kv_len", "q_heads", "gqa_group")]
    found.append(Argument("sm_scale", "*fp32" if options.scale_in_memory else "fp32"))
    found += residual_arguments(options) + shared_arguments(params, options)
    return (*found, *(structure_places() if options.stored else ()))


def residual_arguments(options: Options) -> list[Argument]:
    """Where the residual of o goes, if it is kept."""
    return [Argument("residual", "*i32")] if options.keeps_residual else []


def structure_places() -> tuple[Argument, ...]:
    """Where a kernel finds its rows of a stored structure."""
    found = [Argument(name, "*i32") for name in ("tile_runs", "tile_words")]
    return (*found, *(Argument(f"structure_stride_{axis}", "i32") for axis in ("b", "h")))


def shared_arguments(params: tuple[Param, ...], options: Options) -> list[Argument]:
    """What the attention kernel and the one that looks at tiles both take."""
    found = [Argument("q_offset", "*i32" if options.offset_per_batch else "i32")]
    if options.has_kv_lens:
        found.append(Argument("kv_lens", "*i32"))
    for param in params:
        found += param_arguments(param, options)
    return found


def scalars_in_memory(params: tuple[Param, ...]) -> tuple[Argument, ...]:
    """Scalars that are passed as pointers, with the type that they are computed with."""
    return tuple(
        Argument(p.name, computed_type(p))
        for p in params
        if p.kind is Kind.SCALAR and not p.by_value
    )


def wide_scalars(params: tuple[Param, ...], options: Options) -> tuple[str, ...]:
    """Ints passed by value that are computed with in 64 bits."""
    found = (p for p in params if p.kind is Kind.SCALAR and p.by_value and p.type is Type.INT)
    return () if options.small else tuple(p.name for p in found)


def computed_type(param: Param) -> str:
    """The type that a scalar in memory is computed with, whatever its storage."""
    if param.type is Type.FLOAT:
        return "float32"
    return "int64" if param.element == "i64" else "int32"


def param_arguments(param: Param, options: Options) -> list[Argument]:
    """A scalar is one argument; a table is a pointer, its lengths and its strides."""
    if param.kind is Kind.TENSOR:
        offset = "i64" if options.wide_offsets else "i32"
        axes = range(param.rank)
        return [
            Argument(param.name, POINTER_TYPE[param.element]),
            *(Argument(f"{param.name}_size_{k}", "i32") for k in axes),
            *(Argument(f"{param.name}_stride_{k}", offset) for k in axes),
        ]
    if not param.by_value:
        return [Argument(param.name, POINTER_TYPE[param.element])]
    if param.type is Type.FLOAT:
        return [Argument(param.name, "fp32")]
    wide = param.type is Type.INT and not options.small
    return [Argument(param.name, "i64" if wide else "i32")]

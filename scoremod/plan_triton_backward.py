"""The decisions of the portable Triton backward: which kernels, what each sums, over which tiles.

alibi & causal   ->   attention_bwd_delta, attention_bwd_dkdv, attention_bwd_dq;
                      with learned slopes the last one sums -float(i - j) * dS per query
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from .analysis.ranges import FAR, Index, Piece, solve
from .ir.expr import (
    ONE,
    TRUE,
    Expr,
    capture,
    const,
    index,
    make,
    postorder,
    size,
    substitute,
)
from .ir.ops import Op, Type
from .passes.derivative import d_ds
from .passes.fold import base2, scaled, variation
from .passes.patterns import Pattern, Read, classified
from .passes.patterns import pattern as pattern_of
from .plan import DeviceFunction, Param, Typed, with_kernel_names
from .plan_triton import (
    ELEMENT_BYTES,
    POINTER_TYPE,
    Argument,
    AttentionPlan,
    Options,
    Run,
    Segment,
    padded,
    residual_words,
    runs_of,
    scalars_in_memory,
    segments_of,
    shared_arguments,
    wide_scalars,
)
from .target import Target, Tile, backward_tiles
from .variant import S

DELTA, DKDV, DQ = "attention_bwd_delta", "attention_bwd_dkdv", "attention_bwd_dq"
DIAGONALS, PAIRS = "attention_bwd_diagonals", "attention_bwd_pairs"
PLACES = "capture_places"
# The kernel in which the gradient of a read is summed.
KERNEL_OF: dict[Pattern, str] = {
    Pattern.ROW: DQ,
    Pattern.COLUMN: DKDV,
    Pattern.DIAGONAL: DIAGONALS,
    Pattern.PAIR: PAIRS,
    Pattern.SCATTERED: PAIRS,
}


# -- learned captures --------------------------------------------------------------------------


@dataclass(frozen=True)
class Learned:
    """A capture whose gradient is wanted; `repeated` are the axes that binding expanded."""

    position: int  # among the program's parameters
    repeated: tuple[int, ...] = ()


def learnable(program: Typed) -> tuple[Learned, ...]:
    """The captures that can have a gradient."""
    read = program.given_score.names
    return tuple(
        Learned(k) for k, p in enumerate(program.params) if p.type is Type.FLOAT and p.name in read
    )


def reads_of(
    program: Typed, learned: Sequence[Learned], *, offset_per_batch: bool
) -> tuple[Read, ...]:
    """The reads of learned captures; a repeated axis is one that the index does not move along."""
    repeated = {program.params[x.position].name: x.repeated for x in learned}
    found = []
    for read in classified(program.given_score, frozenset(repeated)):
        axes = repeated[read.capture]
        moving = tuple(x for k, x in enumerate(read.indices) if k not in axes)
        # A position itself lies inside whatever is repeated along it.
        plain = all(read.indices[k].op is Op.INDEX for k in axes)
        pattern = pattern_of(moving) if axes and plain else read.pattern
        names = frozenset[str]().union(*(x.names for x in moving))
        if pattern is Pattern.PAIR and not _owned(names, offset_per_batch):
            pattern = Pattern.SCATTERED
        found.append(replace(read, pattern=pattern))
    return tuple(found)


def _owned(names: frozenset[str], offset_per_batch: bool) -> bool:
    """Whether programs can own elements: with an offset per sequence i alone says no place."""
    return {"i", "j"} <= names and ("b" in names or not offset_per_batch)


@dataclass(frozen=True)
class Sum:
    """The gradient of one read, as a kernel accumulates it."""

    number: int  # among the reads of the program
    row: int  # among the sums of the kernel
    weight_row: int = 0  # the same of p * slope, which a kernel sums that walks along rows
    place: DeviceFunction | None = None  # of the element, where the kernel itself writes there

    @property
    def slope(self) -> str:
        return f"slope_{self.number}"

    @property
    def total(self) -> str:
        return f"sum_{self.number}"

    @property
    def weight(self) -> str:
        return f"weight_{self.number}"

    @property
    def gradient(self) -> str:
        return f"grad_{self.number}"


def place_function(
    program: Typed, read: Read, repeated: tuple[int, ...], number: int
) -> DeviceFunction:
    """Where a read's element lies in a contiguous gradient, and whether it lies in the table."""
    offset, inside = const(0), TRUE
    for axis, x in enumerate(read.indices):
        length = size(read.capture, axis)
        inside = make(
            Op.AND, inside, make(Op.AND, make(Op.LE, const(0), x), make(Op.LT, x, length))
        )
        if axis not in repeated:
            offset = make(Op.ADD, make(Op.MUL, offset, length), x)
    return DeviceFunction(
        f"{program.name}_place_{number}",
        program.params,
        (offset, inside),
        f"The element of `{read.capture}` that a pair reads, and whether there is one.",
    )


# -- plans -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slope:
    """The score's slope by s as the kernel's `slope`; a tame one is finite."""

    is_tame: bool


@dataclass(frozen=True)
class BackwardPlan(AttentionPlan):
    """One kernel of the portable backward."""

    kernel: str  # its name, and that of its template
    title: str
    comments: tuple[str, ...]
    target: Target
    options: Options
    functions: tuple[DeviceFunction, ...]
    score: DeviceFunction | None  # None where it is s
    results: str  # the names that the score's function gives
    slope: Slope | None  # of the score by s, unless it is 1
    mask: DeviceFunction | None
    runs: tuple[Run, ...]
    segments: tuple[Segment, ...]
    sums: tuple[Sum, ...]
    params: tuple[Param, ...]
    arguments: tuple[Argument, ...]
    tile: Tile
    block_d: int
    block_dv: int
    owns_b: bool = True  # a program of `attention_bwd_pairs` has one sequence, or all
    owns_h: bool = True
    atomic: bool = False

    @property
    def scalars_in_memory(self) -> tuple[Argument, ...]:
        return scalars_in_memory(self.params)

    @property
    def every_tile(self) -> bool:
        """Whether all keys are visible to all queries."""
        return self.mask is None and not self.stored

    @property
    def full_runs(self) -> bool:
        """Whether the pieces of the mask say which tiles are full."""
        return bool(self.runs) and any(s.kind == "full" for s in self.segments)

    @property
    def left_over_row(self) -> int:
        """Where the sum of a row's ds goes: behind the sums and weights of all reads."""
        return 2 * len(self.sums)

    @property
    def stores(self) -> bool:
        """Whether the programs own the elements that they sum."""
        return not self.atomic

    @property
    def places_ahead(self) -> bool:
        """Whether the places of a tile are computed before the loops, which costs registers.

        dk and dv, no mask, 2x16x8192x128: 3.91 without, 4.16 ms with; 2x32x8192x64: 4.77, 4.25.
        """
        return self.block_d < 128

    @property
    def constants(self) -> dict[str, int]:
        scanned = {"CHUNK": SCANNED} if self.kernel == DIAGONALS else {}
        return {**super().constants, **scanned}


# Tiles of a diagonal that are looked at in one step.
SCANNED = 16


def backward_plan(
    kernel: str,
    program: Typed,
    options: Options,
    learned: tuple[Learned, ...],
    target: Target,
    tile: Tile | None = None,
    group: Group | None = None,
) -> BackwardPlan:
    """Decide a kernel; `group` says which reads `attention_bwd_pairs` is for."""
    program = with_kernel_names(program, "triton")
    block_d, block_dv = padded(options.head_dim), padded(options.v_head_dim)
    reads = reads_of(program, learned, offset_per_batch=options.offset_per_batch)
    mine = [
        (n, r)
        for n, r in enumerate(reads)
        if KERNEL_OF[r.pattern] == kernel and (group is None or n in group.reads)
    ]
    slope = None if kernel in (DIAGONALS, PAIRS) else d_ds(program.given_score)
    score, results = score_function(program, slope, mine)
    sums = tuple(
        Sum(n, row, len(mine) + row, _place(program, r, n, learned) if kernel == PAIRS else None)
        for row, (n, r) in enumerate(mine)
    )
    mask = program.mask_function
    x: Index = "i" if kernel == DKDV else "j"
    pieces = solve(program.mask, x) if mask is not None else ()
    runs = () if options.stored or kernel == PAIRS else _runs(program, pieces, x)
    pad = block_d != options.head_dim, block_dv != options.v_head_dim
    places = (s.place for s in sums)
    functions = (score, mask, *(r.range for r in runs), *places)
    return BackwardPlan(
        kernel=kernel,
        title=f"{TITLE_OF[kernel]} of `{program.name}`: portable Triton, {target}",
        comments=program.text,
        target=target,
        options=options,
        functions=tuple(f for f in functions if f is not None),
        score=score,
        results=results,
        slope=None if slope is None or slope == ONE else Slope(is_tame(slope)),
        mask=mask,
        runs=runs,
        segments=segments_of(mask, pieces, runs, options, pad),
        sums=sums,
        params=program.params,
        arguments=arguments(kernel, program.params, options, sums),
        tile=tile or tiles_of(kernel, program, options, target)[0],
        block_d=block_d,
        block_dv=block_dv,
        owns_b=group is None or group.owns_b,
        owns_h=group is None or group.owns_h,
        atomic=group is not None and group.atomic,
    )


TITLE_OF = {
    DELTA: "What the softmax takes off each row",
    DKDV: "Gradients of k and v",
    DQ: "Gradient of q",
    DIAGONALS: "Gradients of captures along diagonals",
    PAIRS: "Gradients of captures by pairs",
    PLACES: "Where the sums of a line belong",
}


def _place(program: Typed, read: Read, number: int, learned: tuple[Learned, ...]) -> DeviceFunction:
    repeated = {program.params[x.position].name: x.repeated for x in learned}
    return place_function(program, read, repeated[read.capture], number)


def score_function(
    program: Typed, slope: Expr | None, reads: Sequence[tuple[int, Read]]
) -> tuple[DeviceFunction | None, str]:
    """The score in base 2 with its slopes, and the names of these results.

    One function for all of them, so that what they share is computed once.
    """
    slopes = {} if slope is None or slope == ONE else {"slope": slope}
    slopes |= {f"slope_{n}": r.slope for n, r in reads}
    if program.score == S and not slopes:
        return None, ""
    raw = {"s": index("s") * capture("sm_scale", Type.FLOAT)}
    body = (
        base2(substitute(program.score, raw)),
        # Slopes take their constants in as the score does, or they would share nothing.
        *(scaled(substitute(x, raw), ONE) for x in slopes.values()),
    )
    function = DeviceFunction(
        f"{program.name}_dscore",
        program.params,
        body,
        "The score of s = q k^T, times log2(e), and its slopes.",
    )
    return function, ", ".join(["s", *slopes])


def is_tame(slope: Expr) -> bool:
    """Whether a slope is finite for finite values, so that 0 * slope is 0."""
    return all(
        node.type is not Type.FLOAT
        or node.op in _TAME
        or (node.op is Op.DIV and variation(node.args[1]) <= 1)
        for node in postorder(slope)
    )


_TAME = frozenset(
    (
        *(Op.CONST, Op.INDEX, Op.CAPTURE, Op.LOAD, Op.ADD, Op.SUB, Op.MUL, Op.NEG, Op.ABS),
        *(Op.MIN, Op.MAX, Op.WHERE, Op.FLOAT, Op.TANH, Op.SIGMOID, Op.SIN, Op.COS),
    )
)


def _runs(program: Typed, pieces: tuple[Piece, ...], x: Index) -> tuple[Run, ...]:
    if x == "j":
        return runs_of(program, pieces)
    return tuple(
        Run(query_range(piece, f"{program.name}_queries_{k}", program.params), k)
        for k, piece in enumerate(pieces)
    )


def query_range(piece: Piece, name: str, params: tuple[Param, ...]) -> DeviceFunction:
    """The first and the last query that may see a key, by one piece; logical positions."""
    lo = functools.reduce(partial(make, Op.MAX), piece.los) if piece.los else const(-FAR)
    hi = functools.reduce(partial(make, Op.MIN), piece.his) if piece.his else const(FAR)
    for condition in piece.guards:
        lo = make(Op.WHERE, condition, lo, const(FAR))
        hi = make(Op.WHERE, condition, hi, const(-FAR))
    return DeviceFunction(name, params, (lo, hi), "The first and last query that may see a key.")


def tiles_of(kernel: str, program: Typed, options: Options, target: Target) -> tuple[Tile, ...]:
    """The tile of a kernel, and smaller ones for a score that needs more memory."""
    return backward_tiles(
        kernel,
        padded(options.head_dim),
        padded(options.v_head_dim),
        ELEMENT_BYTES[options.dtype],
        target,
        heavy=_is_heavy(program),
    )


def _is_heavy(program: Typed) -> bool:
    """Whether a score takes many registers: its slope varies, or each pair reads a table."""
    reads_pairs = any(
        node.op is Op.LOAD and {"i", "j"} <= node.names for node in postorder(program.given_score)
    )
    return reads_pairs or d_ds(program.given_score) != ONE


# -- the kernels before ------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """What decides the kernel that looks at each row."""

    dtype: str
    v_head_dim: int
    wide_offsets: bool
    aligned: bool
    has_grad_lse: bool
    has_residual: bool = False


@dataclass(frozen=True)
class DeltaPlan:
    """The kernel that takes the LSE to base 2 and computes delta."""

    title: str
    target: Target
    options: Options
    has_grad_lse: bool
    has_residual: bool = False
    block_m: int = 64
    comments: tuple[str, ...] = ()
    functions: tuple[DeviceFunction, ...] = ()

    @property
    def arguments(self) -> tuple[Argument, ...]:
        offset = "i64" if self.options.wide_offsets else "i32"
        found = [Argument(name, POINTER_TYPE[self.options.dtype]) for name in ("o", "do")]
        found += [Argument(n, "*fp32") for n in ("lse", "grad_lse", "row_values")]
        found += strides(("o", "do", "grad_lse"), offset)
        found += [Argument("q_len", "i32"), Argument("q_heads", "i32")]
        return (*found, *([Argument("residual", "*i32")] if self.has_residual else []))

    @property
    def residual_words(self) -> int:
        return residual_words(self.options.v_head_dim)

    @property
    def constants(self) -> dict[str, int]:
        v_head_dim = self.options.v_head_dim
        return {"V_HEAD_DIM": v_head_dim, "BLOCK_DV": padded(v_head_dim), "BLOCK_M": self.block_m}


def delta_plan(
    options: Options, target: Target, *, has_grad_lse: bool, has_residual: bool = False
) -> DeltaPlan:
    """Decide the kernel that looks at each row first: no variant has one of its own."""
    title = f"{TITLE_OF[DELTA]}: portable Triton, {target}"
    return DeltaPlan(title, target, options, has_grad_lse, has_residual)


# -- captures by pairs -------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Reads that one launch of `attention_bwd_pairs` serves: they own the same programs."""

    reads: tuple[int, ...]
    owns_b: bool
    owns_h: bool
    atomic: bool


def groups_of(
    program: Typed, learned: tuple[Learned, ...], *, offset_per_batch: bool
) -> tuple[Group, ...]:
    """Reads by pairs, by what of a batch and head their elements belong to."""
    repeated = {program.params[x.position].name: x.repeated for x in learned}
    found: dict[tuple[bool, bool, bool], list[int]] = {}
    for n, read in enumerate(reads_of(program, learned, offset_per_batch=offset_per_batch)):
        if KERNEL_OF[read.pattern] == PAIRS:
            atomic = read.pattern is Pattern.SCATTERED
            moving = [x for k, x in enumerate(read.indices) if k not in repeated[read.capture]]
            names = frozenset[str]().union(*(x.names for x in moving))
            owns = (atomic or "b" in names, atomic or "h" in names, atomic)
            found.setdefault(owns, []).append(n)
    return tuple(Group(tuple(numbers), *owns) for owns, numbers in found.items())


# -- places along lines ------------------------------------------------------------------------


@dataclass(frozen=True)
class PlacesPlan:
    """The kernel that says to which element of a table each sum along a line belongs."""

    title: str
    comments: tuple[str, ...]
    target: Target
    options: Options
    functions: tuple[DeviceFunction, ...]
    place: DeviceFunction
    params: tuple[Param, ...]
    arguments: tuple[Argument, ...]
    block: int = 256

    @property
    def scalars_in_memory(self) -> tuple[Argument, ...]:
        return scalars_in_memory(self.params)

    @property
    def wide_scalars(self) -> tuple[str, ...]:
        return wide_scalars(self.params, self.options)

    @property
    def exact(self) -> bool:
        """What decides a place is computed exactly whatever the precision of the score."""
        return True

    @property
    def constants(self) -> dict[str, int]:
        return {"BLOCK_N": self.block}


def places_plan(
    program: Typed, options: Options, learned: tuple[Learned, ...], number: int, target: Target
) -> PlacesPlan:
    """Decide the kernel that finds the places of one read."""
    program = with_kernel_names(program, "triton")
    read = reads_of(program, learned, offset_per_batch=options.offset_per_batch)[number]
    place = _place(program, read, number, learned)
    found = [Argument("places", "*i64"), Argument("reached", "*i1")]
    found += [Argument(n, "i32") for n in ("first_i", "first_j", "step_i", "step_j", "length")]
    found += [Argument(n, "i32") for n in ("q_len", "kv_len", "heads", "gqa_group")]
    return PlacesPlan(
        title=f"{TITLE_OF[PLACES]} of `{program.name}`: portable Triton, {target}",
        comments=program.text,
        target=target,
        options=options,
        functions=(place,),
        place=place,
        params=program.params,
        arguments=(*found, *shared_arguments(program.params, options)),
    )


# -- arguments ---------------------------------------------------------------------------------


def arguments(
    kernel: str, params: tuple[Param, ...], options: Options, sums: Sequence[Sum] = ()
) -> tuple[Argument, ...]:
    """The run-time arguments of a kernel, in order."""
    offset = "i64" if options.wide_offsets else "i32"
    tensor = POINTER_TYPE[options.dtype]
    given = ("q", "k", "v", "do")
    made = {DKDV: ("dk", "dv"), DQ: ("dq",)}.get(kernel, ())
    found = [Argument(name, tensor) for name in given]
    found.append(Argument("row_values", "*fp32"))
    found += [Argument(name, tensor) for name in made]
    if sums and kernel == PAIRS:
        found += [Argument(s.gradient, "*fp32") for s in sums]
    elif sums:
        found += [Argument("sums", "*fp32"), Argument("sums_stride", "i64")]
    found += strides((*given, *made), offset)
    found += [Argument(n, "i32") for n in ("batch", "q_len", "kv_len", "q_heads", "gqa_group")]
    found.append(Argument("sm_scale", "*fp32" if options.scale_in_memory else "fp32"))
    found += shared_arguments(params, options)
    if options.stored:
        found += [Argument(name, "*i32") for name in ("tile_runs", "tile_words")]
        found += [Argument(f"structure_stride_{axis}", "i32") for axis in ("b", "h")]
    return tuple(found)


def strides(names: Sequence[str], offset: str) -> list[Argument]:
    return [Argument(f"{name}_stride_{axis}", offset) for name in names for axis in ("b", "h", "l")]

"""The decisions of the kernel that finds out which tiles a mask leaves, forward and transposed.

    doc[b, i] == doc[b, j] and j <= i   ->   per kv tile the least and greatest doc, then per q tile
                                             two runs of partial tiles and one of full tiles

Rows of tiles are what the reading kernel has a program for: q tiles in the forward, kv tiles where
the structure is transposed; columns are what that program loops over.
"""

from __future__ import annotations

from dataclasses import dataclass

from .analysis.ranges import solve
from .analysis.tile_test import Part, tile_test
from .ir.capture import Kind
from .ir.ops import Type
from .passes.simplify import simplify
from .plan import DeviceFunction, Param, Typed, with_kernel_names
from .plan_triton import (
    COUNT_PLACE,
    KIND_PLACE,
    MAP_PLACE,
    ORDER_PLACE,
    RECORD,
    SCATTERED_PLACE,
    STORED_RUNS,
    Argument,
    Options,
    Run,
    kv_range,
    launch_bounds,
    q_range,
    scalars_in_memory,
    shared_arguments,
    wide_scalars,
)
from .target import Target

# Tiles that are tested at once, in words of 32.
CHUNK = 128
# Pairs of a tile that are looked into at once. 128 x 128 do not fit the registers of 4 warps: for
# documents at 8,192 they took 212 us, and tiles of 128 x 64 took 68 (H200).
PAIRS = 2**12


@dataclass(frozen=True)
class PartPlan:
    """A part of the tile test: its function, and the names of its least and greatest value."""

    function: DeviceFunction
    lo: str
    hi: str
    type: str  # that the test computes it with
    number: int

    @property
    def lo_place(self) -> int:
        """Which summary of a tile it is."""
        return 2 * self.number

    @property
    def hi_place(self) -> int:
        return 2 * self.number + 1


@dataclass(frozen=True)
class StructurePlan:
    """The kernel `tile_structure`."""

    title: str
    comments: tuple[str, ...]
    target: Target
    options: Options
    functions: tuple[DeviceFunction, ...]
    mask: DeviceFunction
    test: DeviceFunction
    test_params: tuple[Param, ...]
    runs: tuple[Run, ...]
    row_parts: tuple[PartPlan, ...]
    column_parts: tuple[PartPlan, ...]
    params: tuple[Param, ...]
    arguments: tuple[Argument, ...]
    scalars_in_memory: tuple[Argument, ...]
    row_block: int
    column_block: int
    transposed: bool

    @property
    def wide_scalars(self) -> tuple[str, ...]:
        """Ints passed by value that are computed with in 64 bits."""
        return wide_scalars(self.params, self.options)

    @property
    def exact(self) -> bool:
        """What decides a pair is computed exactly whatever the precision of the score."""
        return True

    @property
    def no_runs(self) -> bool:
        return not self.runs

    @property
    def blocks(self) -> bool:
        """Whether the user gives blocks, too."""
        return self.options.blocks

    @property
    def row_i(self) -> str:
        return "0" if self.transposed else "row_idx"

    @property
    def row_j(self) -> str:
        return "row_idx" if self.transposed else "0"

    @property
    def column_i(self) -> str:
        return "column_idx" if self.transposed else "0"

    @property
    def column_j(self) -> str:
        return "0" if self.transposed else "column_idx"

    @property
    def pair_i(self) -> str:
        return "column_idx[None, :]" if self.transposed else "row_idx[:, None]"

    @property
    def pair_j(self) -> str:
        return "row_idx[:, None]" if self.transposed else "column_idx[None, :]"

    @property
    def block_start_m(self) -> str:
        """The first query of a tile, which says which of the user's blocks has it."""
        return "tile * COLUMN_BLOCK" if self.transposed else "start_row"

    @property
    def block_start_n(self) -> str:
        return "start_row" if self.transposed else "tile * COLUMN_BLOCK"

    @property
    def row_ends(self) -> str:
        """What the test calls the ends of a tile's rows."""
        return "j" if self.transposed else "i"

    @property
    def column_ends(self) -> str:
        return "i" if self.transposed else "j"

    @property
    def record(self) -> int:
        return RECORD

    @property
    def stored_runs(self) -> int:
        return STORED_RUNS

    @property
    def full_place(self) -> int:
        """Where the runs of full tiles begin in a row's record."""
        return KIND_PLACE["full"]

    @property
    def scattered_place(self) -> int:
        return SCATTERED_PLACE

    @property
    def map_place(self) -> int:
        """Where the record has how many words of tiles its map has."""
        return MAP_PLACE

    @property
    def order_place(self) -> int:
        """Where the n-th row's record has which row is the n-th longest."""
        return ORDER_PLACE

    @property
    def partial_count_place(self) -> int:
        """Where a record has how many tiles of a kind there are."""
        return COUNT_PLACE["partial"]

    @property
    def full_count_place(self) -> int:
        return COUNT_PLACE["full"]

    @property
    def transposed_offsets(self) -> bool:
        """Whether the columns begin elsewhere in each batch."""
        return self.transposed and self.options.offset_per_batch

    @property
    def constants(self) -> dict[str, int]:
        """The compile-time constants."""
        return {
            "ROW_BLOCK": self.row_block,
            "COLUMN_BLOCK": self.column_block,
            "COLUMN_PART": min(self.column_block, max(16, PAIRS // self.row_block)),
            "CHUNK": CHUNK,
            "SUMMARIES": 2 * len(self.column_parts),
        }


def structure_plan(
    program: Typed,
    options: Options,
    target: Target,
    block_m: int,
    block_n: int,
    *,
    transposed: bool = False,
) -> StructurePlan:
    """Decide the kernel for tiles of BLOCK_M queries and BLOCK_N keys."""
    program = with_kernel_names(program, "triton")
    mask = program.mask_function or DeviceFunction(
        f"{program.name}_mask", program.params, (program.mask,), "Whether a pair attends."
    )
    runs = _runs(program, transposed=transposed)
    test = tile_test(program.mask, simplify)
    row, column = ("j", "i") if transposed else ("i", "j")
    row_parts, column_parts = (
        tuple(_part(program, part, k) for k, part in enumerate(test.parts_of(x)))
        for x in (row, column)
    )
    test_params = _test_params(row_parts + column_parts)
    test_function = DeviceFunction(
        f"{program.name}_tile",
        (*program.params, *test_params),
        (test.maybe, test.surely),
        "Whether some pair of a tile may attend, and whether every pair does.",
    )
    parts = (p.function for p in row_parts + column_parts)
    rows = "kv" if transposed else "q"
    return StructurePlan(
        title=f"Which tiles `{program.name}` leaves, per {rows} tile: portable Triton, {target}",
        comments=program.text,
        target=target,
        options=options,
        functions=(mask, test_function, *parts, *(r.range for r in runs)),
        mask=mask,
        test=test_function,
        test_params=test_params,
        runs=runs,
        row_parts=row_parts,
        column_parts=column_parts,
        params=program.params,
        arguments=structure_arguments(program.params, options),
        scalars_in_memory=scalars_in_memory(program.params),
        row_block=block_n if transposed else block_m,
        column_block=block_m if transposed else block_n,
        transposed=transposed,
    )


def _runs(program: Typed, *, transposed: bool) -> tuple[Run, ...]:
    """The half-lines of the mask: nothing outside them is looked at."""
    pieces = solve(program.mask, "i" if transposed else "j")
    ends, word = (q_range, "queries") if transposed else (kv_range, "keys")
    return tuple(
        Run(ends(piece, f"{program.name}_{word}_{k}", program.params), k)
        for k, piece in enumerate(pieces)
    )


def _part(program: Typed, part: Part, number: int) -> PartPlan:
    doc = f"What a tile keeps the ends of, as {part.ends[0]} and {part.ends[1]}."
    function = DeviceFunction(f"{program.name}_{part.name}", program.params, (part.expr,), doc)
    return PartPlan(function, *part.ends, _width(program, part), number)


def _width(program: Typed, part: Part) -> str:
    """The narrowest type that holds every value at every launch."""
    if part.expr.type is Type.BOOL:
        return "int1"
    found = launch_bounds(program.params, small=False)(part.expr)
    narrow = found.lo.min() >= -(2**31) and found.hi.max() < 2**31
    return "int32" if narrow else "int64"


_ELEMENT = {"int1": "bool", "int32": "i32", "int64": "i64"}


def _test_params(parts: tuple[PartPlan, ...]) -> tuple[Param, ...]:
    """What the test takes besides the captures: the ends of a tile, and of its parts."""
    found = [(f"{x}_{end}", "i32") for x in "ij" for end in ("lo", "hi")]
    found += [(name, _ELEMENT[part.type]) for part in parts for name in (part.lo, part.hi)]
    return tuple(Param(name, Kind.SCALAR, element, by_value=False) for name, element in found)


def structure_arguments(params: tuple[Param, ...], options: Options) -> tuple[Argument, ...]:
    """The run-time arguments, in order."""
    found = [Argument("phase", "i32")]
    found += [Argument(name, "*i32") for name in ("tile_runs", "tile_words")]
    found.append(Argument("summaries", "*i64"))
    found += [Argument(n, "i32") for n in ("q_len", "kv_len", "gqa_group", "structures_h")]
    if options.blocks:
        found.append(Argument("blocks", "*i1"))
        found += [Argument(f"blocks_stride_{axis}", "i64") for axis in ("b", "h", "m", "n")]
        found += [Argument(name, "i32") for name in ("blocks_m", "blocks_n")]
    return (*found, *shared_arguments(params, options))

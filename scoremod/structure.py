"""Tile structure on a device: which kv tiles each q tile visits, made by one small kernel.

A mask that is not a range of keys is classified once per call, for all heads that share it; with
`prepare` once for many layers. Transposed, the structure says which q tiles each kv tile visits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .backends.compile_triton import Kernel, compile_kernel
from .backends.triton import TRITON, fp_fusion
from .blocks import Blocks
from .inputs import Inputs
from .plan import Typed
from .plan_structure import StructurePlan, structure_plan
from .plan_triton import RECORD, Options, Reach
from .ready import Interpreted, Ready, ready, stored
from .render import render
from .target import INTERPRETER, Target


@dataclass(frozen=True)
class Stored:
    """A structure in memory, and how the attention finds its row."""

    runs: torch.Tensor  # int32 [rows, RECORD]
    words: torch.Tensor  # int32 [rows, 2 * words of 32 column tiles]
    stride_b: int
    stride_h: int

    @property
    def arguments(self) -> list[Any]:
        return [self.runs, self.words, self.stride_b, self.stride_h]

    @property
    def nbytes(self) -> int:
        return self.runs.nbytes + self.words.nbytes


@dataclass(frozen=True)
class Structure:
    """How to make the structure of calls of one shape."""

    kernel: Ready
    summaries: int  # numbers of a tile of columns; 0 where the test reads nothing of them
    structures: int  # batches and heads whose masks can differ
    row_tiles: int
    column_tiles: int
    sizes: tuple[int, ...]
    stride_b: int
    stride_h: int
    by_length: bool  # the rows' order is made, too

    def make(self, device: torch.device, shared: Sequence[Any], blocks: Sequence[Any]) -> Stored:
        """A new structure; `shared` are the values of `plan_triton.shared_arguments`."""
        rows = self.structures * self.row_tiles
        width = 2 * -(-self.column_tiles // 32)
        memory = torch.empty(rows * (RECORD + width), dtype=torch.int32, device=device)
        runs, words = memory[: rows * RECORD], memory[rows * RECORD :]
        found = Stored(
            runs.view(rows, RECORD), words.view(rows, width), self.stride_b, self.stride_h
        )
        self.refresh(found, shared, blocks)
        return found

    def refresh(self, found: Stored, shared: Sequence[Any], blocks: Sequence[Any]) -> None:
        """Classify again, in place: no compilation, no synchronisation."""
        columns = self.structures * self.column_tiles
        rows = self.structures * self.row_tiles
        summaries = found.runs.new_empty(2 * columns * max(1, self.summaries)).view(torch.int64)
        values = [found.runs, found.words, summaries, *self.sizes, *blocks, *shared]
        if self.summaries and columns:
            self.kernel.run(columns, [SUMMARIZE, *values])
        if rows:
            self.kernel.run(rows, [CLASSIFY, *values])
        if rows and self.by_length:
            self.kernel.run(rows, [ORDER, *values])


@dataclass(frozen=True)
class Sizes:
    """What of a call its structure depends on."""

    batch: int
    q_heads: int
    q_len: int
    kv_len: int
    gqa_group: int

    @staticmethod
    def of(inputs: Inputs) -> Sizes:
        batch, q_heads, q_len, _ = inputs.q.shape
        return Sizes(batch, q_heads, q_len, inputs.k.shape[2], inputs.gqa_group)


def structure(
    program: Typed,
    chosen: Options,
    sizes: Sizes,
    blocks: tuple[int, int],
    device: torch.device,
    user: Blocks | None = None,
    *,
    transposed: bool = False,
    by_length: bool = False,
) -> Structure:
    """The structure of a call: one for each batch and head that the mask, or a block list, reads.

    `blocks` is (BLOCK_M, BLOCK_N) of the kernel that will read it, `by_length` whether that visits
    the rows of a transposed one in the order of their lengths.
    """
    by_sequence = chosen.has_kv_lens or chosen.offset_per_batch
    structures_b, structures_h = differing(program, sizes, user, by_sequence=by_sequence)
    q_tiles, kv_tiles = -(-sizes.q_len // blocks[0]), -(-sizes.kv_len // blocks[1])
    kernel = structure_kernel(program, chosen, blocks, device, transposed=transposed)
    return Structure(
        kernel,
        kernel.constants["SUMMARIES"],
        structures_b * structures_h,
        *((kv_tiles, q_tiles) if transposed else (q_tiles, kv_tiles)),
        (sizes.q_len, sizes.kv_len, sizes.gqa_group, structures_h),
        structures_h if structures_b > 1 else 0,
        1 if structures_h > 1 else 0,
        by_length,
    )


def differing(
    program: Typed, sizes: Sizes, user: Blocks | None, *, by_sequence: bool
) -> tuple[int, int]:
    """Of how many batches and query heads the masks can differ.

    `by_sequence` where lengths or offsets are given per batch.
    """
    names = program.given_mask.names
    per_batch = by_sequence or "b" in names or (user is not None and user.batch > 1)
    per_head = bool(names & {"h", "hk"}) or (user is not None and user.heads > 1)
    return sizes.batch if per_batch else 1, sizes.q_heads if per_head else 1


# -- the kernel --------------------------------------------------------------------------------

# What a launch does: `phase` of the kernel.
SUMMARIZE, CLASSIFY, ORDER = 0, 1, 2


def structure_kernel(
    program: Typed,
    chosen: Options,
    blocks: tuple[int, int],
    device: torch.device,
    *,
    transposed: bool,
) -> Ready:
    """The kernel for a device."""

    def plan(target: Target) -> StructurePlan:
        return structure_plan(program, chosen, target, *blocks, transposed=transposed)

    def interpret() -> Interpreted:
        made = plan(INTERPRETER)
        return Interpreted(structure_source(made), "tile_structure", made.constants)

    what = structure_key(program, chosen, blocks, transposed=transposed)
    return ready(
        what, device, lambda target: compile_structure(plan(target)), interpret, program.bundle
    )


def structure_key(
    program: Typed, chosen: Options, blocks: tuple[int, int], *, transposed: bool = False
) -> tuple[object, ...]:
    """What decides a kernel: dtypes, head dims and scores share it."""
    reach = Reach.of(chosen)
    return ("tile_structure", program.canonical, reach, chosen.blocks, blocks, transposed)


def structure_source(plan: StructurePlan) -> str:
    """The kernel's text."""
    return render("tile_structure.py", plan, TRITON)


def compile_structure(plan: StructurePlan) -> Kernel:
    """Render and compile the kernel."""
    return compile_kernel(
        structure_source(plan),
        "tile_structure",
        plan.arguments,
        plan.constants,
        plan.target,
        num_warps=8,  # 49 us where 4 take 62, for documents of 8,192 tokens
        num_stages=1,
        aligned=False,
        even=False,
        fp_fusion=fp_fusion(plan),
    )


def store_structure(
    program: Typed, chosen: Options, target: Target, blocks: tuple[int, int]
) -> None:
    """Put the kernel into the disk cache; needs no GPU."""

    def build(target: Target) -> Kernel:
        return compile_structure(structure_plan(program, chosen, target, *blocks))

    stored(structure_key(program, chosen, blocks), target, build)

"""Reads that a row or a column of pairs shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import scoremod
from scoremod import variants
from scoremod.ir.evaluate import evaluate
from scoremod.ir.expr import Expr, postorder
from scoremod.ir.ops import Op
from scoremod.ir.show import show
from scoremod.passes.lines import line_reads, without_line_reads
from scoremod.plan import assumed_params, typed


def mask(variant: scoremod.Variant) -> Expr:
    program = variant._program
    return typed(program, assumed_params(program)).mask


def split(variant: scoremod.Variant) -> tuple[str, dict[str, str]]:
    """What is left of a mask, and what was taken out."""
    root = mask(variant)
    reads = line_reads(root)
    return show(without_line_reads(root, reads)), {x.name: show(x.read) for x in reads}


def test_documents_are_two_numbers_a_pair() -> None:
    left, reads = split(variants.document)
    assert left in ("row_0 == column_0", "column_0 == row_0")
    assert reads == {"row_0": "doc[b, i]", "column_0": "doc[b, j]"}


def test_what_is_read_by_no_position_or_by_both_stays() -> None:
    attn = scoremod.parse("variant v(t, u, w) { mask t[b] <= i and u[i, j] > 0 and w[j // 2] > 1 }")
    left, reads = split(attn)
    assert set(reads.values()) == {"w[j // 2]"}
    assert "t[b]" in left and "u[i, j]" in left and "column_0" in left


def test_of_nested_reads_the_outermost_is_taken_and_equal_ones_once() -> None:
    attn = scoremod.parse("variant v(t, u) { mask t[u[j]] <= i or t[u[j]] > 9 or u[j] == i }")
    left, reads = split(attn)
    assert reads == {"column_0": "t[u[j]]"}
    # u[j] alone is read per pair: it stands inside the other read as well.
    assert left.count("column_0") == 2 and left.count("u[j]") == 1


@pytest.mark.parametrize("name", ["document", "jagged", "tree", "flashmask_intervals", "own"])
def test_with_what_was_read_it_is_the_same_mask(name: str) -> None:
    own = scoremod.parse("variant v(t: i32[L], u: i32[L]) { mask t[u[j]] < t[i] or u[j] == u[i] }")
    root = mask(own if name == "own" else getattr(variants, name))
    rng, length = np.random.default_rng(0), 24
    ranks = {x.attr: len(x.args) for x in postorder(root) if x.op is Op.LOAD}
    values: dict[str, Any] = {
        table: rng.integers(
            0, length, (2, 2, length, 4)[-rank:] if rank == 4 else (2, length)[-rank:]
        )
        for table, rank in ranks.items()
    }
    values |= {"b": np.int64(1), "hk": np.int64(1)}
    values |= {"i": np.arange(length)[:, None], "j": np.arange(length)[None, :]}
    reads = line_reads(root)
    known = {**values, **{x.name: evaluate(x.read, values) for x in reads}}
    shapes = {x.line: evaluate(x.read, values).shape for x in reads}
    assert shapes.items() <= {"row": (length, 1), "column": (1, length)}.items()
    left = evaluate(without_line_reads(root, reads), known)
    assert np.array_equal(left, evaluate(root, values)) and 0 < left.mean() < 1

"""Reads that a row or a column of pairs shares."""

from __future__ import annotations

import scoremod
from scoremod import variants
from scoremod.ir.expr import Expr
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

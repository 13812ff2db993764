"""Pieces of half-lines hold exactly where the mask does, or wherever it may where one is opaque."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from text_cases import cases
from tile_masks import DIRECTED, Launch, launches, masks, parse

from scoremod.analysis.facts import exact
from scoremod.analysis.normal import normalise
from scoremod.analysis.ranges import (
    FAR,
    MAX_PIECES,
    Index,
    Piece,
    opened,
    solve,
)
from scoremod.analysis.runs import disjoint, reduce_rows
from scoremod.ir.evaluate import evaluate
from scoremod.ir.expr import Expr, postorder
from scoremod.ir.ops import Op, Type
from scoremod.ir.show import show

Array = np.ndarray[Any, Any]
OTHER: dict[Index, Index] = {"i": "j", "j": "i"}


def text(piece: Piece, x: str) -> str:
    """A piece as one line."""
    words = [f"{show(e)} <= {x}" for e in piece.los] + [f"{x} <= {show(e)}" for e in piece.his]
    words += [f"if {show(e)}" for e in piece.guards] + [f"test {show(e)}" for e in piece.opaque]
    return "; ".join(words) or "all"


@cases("ranges.txt")
def test_case(given: str, expected: str) -> None:
    found = [" or ".join(text(p, x) for p in solve(parse(given), x)) for x in ("j", "i")]
    assert found == [part.strip() for part in expected.split("|")]


def test_a_long_comparison_is_not_solved() -> None:
    """Found by mutated inputs: 600 divisions took a minute."""
    long = "i // Z == j" + " // Z" * 300
    assert [text(p, "j") for p in solve(parse(f"{long} and j <= i"), "j")] == [
        f"j <= i; test {show(normalise(parse(long)))}"
    ]


@pytest.mark.parametrize(
    ("mask", "pieces"),
    [
        ("j <= i and (j < P or i - j < S)", 2),  # sinks and a window
        ("j < P or j <= i", 1),  # half-lines of one direction join
        ("K[i] or j <= i", 1),  # so does a guard
        ("i // Z == j // Z", 1),  # the cases of a sign exclude each other
        ("0 <= i // Z - j // Z and i // Z - j // Z < S", 1),
        ("(i - S) // Z == (j - S) // Z and j <= i and j >= S", 1),
        ("j <= i and (flag or j < 4 or i - j < S)", 2),
        ("j < P or abs(i - j) < S or i >= P - 9", 2),
    ],
)
def test_solved_in_few_pieces(mask: str, pieces: int) -> None:
    found = solve(parse(mask), "j")
    assert len(found) == pieces and all(p.is_pure for p in found)


# -- laws ----------------------------------------------------------------------------------------


def holds(pieces: tuple[Piece, ...], x: Index, launch: Launch) -> tuple[Array, Array]:
    """Where some piece holds, opaque conditions included, and where some piece may hold."""
    surely = np.zeros((launch.q_len, launch.kv_len), bool)
    maybe = surely.copy()
    for p in pieces:
        here = np.ones_like(surely)
        for e in p.los:
            here &= evaluate(e, launch.env, dtype=np.float32) <= launch.env[x]
        for e in p.his:
            here &= launch.env[x] <= evaluate(e, launch.env, dtype=np.float32)
        for e in p.guards:
            here &= evaluate(e, launch.env, dtype=np.float32)
        maybe |= here
        for e in p.opaque:
            here = here & evaluate(e, launch.env, dtype=np.float32)
        surely |= here
    return surely, maybe


def check(mask: Expr, launch: Launch, pieces: tuple[Piece, ...], x: Index) -> None:
    dense = launch.dense(mask)
    surely, maybe = holds(pieces, x, launch)
    assert np.array_equal(surely, dense), (x, pieces)
    assert np.all(dense <= maybe), (x, pieces)


def check_form(pieces: tuple[Piece, ...], x: Index) -> None:
    """What a kernel may rely on."""
    assert len(pieces) <= MAX_PIECES
    for p in pieces:
        assert all(e.type is Type.INT and x not in e.names for e in p.los + p.his)
        assert all(e.type is Type.BOOL and x not in e.names for e in p.guards)
        assert all(e.type is Type.BOOL for e in p.opaque)


@settings(max_examples=1000)
@given(masks(), launches())
def test_pieces_hold_where_the_mask_does(mask: Expr, launch: Launch) -> None:
    for x in ("j", "i"):
        pieces = solve(mask, x)
        check(mask, launch, pieces, x)
        check_form(pieces, x)


@pytest.mark.parametrize(("mask", "values"), DIRECTED)
@pytest.mark.parametrize("seed", range(4))
def test_directed(mask: str, values: dict[str, int], seed: int) -> None:
    launch = Launch(70, 80, q_offset=seed, seed=seed, wild=seed % 2 == 0, given=values)
    for x in ("j", "i"):
        check(parse(mask), launch, solve(parse(mask), x), x)


BLOCK_DIFFUSION = """
(i < 300) == (j < 300) and i % 300 // 48 == j % 300 // 48
or j % 300 // 48 < i % 300 // 48 and i < 300 and j >= 300
or j % 300 // 48 <= i % 300 // 48 and i >= 300 and j >= 300
"""


@pytest.mark.parametrize("mask", [BLOCK_DIFFUSION, "j % 256 < i % 256", "i % 300 // 7 <= j // 300"])
def test_opened_runs(mask: str) -> None:
    launch = Launch(700, 650, q_offset=3)
    for x in ("j", "i"):
        check(parse(mask), launch, opened(normalise(parse(mask)), x), x)


@settings(max_examples=300)
@given(masks())
def test_bounds_do_not_overflow(mask: Expr) -> None:
    """Sums and products that solving itself made; atoms of the mask may wrap as they did."""
    known = {n.digest for n in postorder(mask, normalise(mask))}
    for x in ("j", "i"):
        for p in solve(mask, x):
            for node in postorder(*p.los, *p.his):
                fresh = node.op in (Op.ADD, Op.SUB, Op.MUL, Op.NEG) and node.digest not in known
                assert not fresh or exact(node), show(node)


# -- what a kernel does with them ----------------------------------------------------------------


@settings(max_examples=300)
@given(masks(), launches())
def test_runs_of_tiles(mask: Expr, launch: Launch) -> None:
    """Nothing outside the visible runs is true; everything inside a full run is."""
    dense = launch.dense(mask)
    starts = np.arange(0, launch.q_len, launch.block_m)
    rows = np.arange(launch.q_len)
    env = {**launch.env, "i": rows + launch.q_offset}

    def value(e: Expr) -> Array:
        return np.broadcast_to(evaluate(e, env, dtype=np.float32), rows.shape)

    seen = np.zeros((len(starts), launch.kv_len), bool)
    for p in solve(mask, "j"):
        lo = np.maximum.reduce([np.zeros_like(rows), *map(value, p.los)])
        hi = np.minimum.reduce([np.full_like(rows, launch.kv_len - 1), *map(value, p.his)])
        alive = np.logical_and.reduce([rows >= 0, *map(value, p.guards)])
        runs = reduce_rows(lo, hi, alive, starts)
        for tile, start in enumerate(starts):
            seen[tile, max(runs.lo[tile], 0) : max(runs.hi[tile] + 1, 0)] = True
            if p.is_pure and runs.full_lo[tile] <= runs.full_hi[tile]:
                block = dense[start : start + launch.block_m]
                assert block[:, runs.full_lo[tile] : runs.full_hi[tile] + 1].all()
    for tile, start in enumerate(starts):
        assert np.all(dense[start : start + launch.block_m].any(0) <= seen[tile])


def test_disjoint() -> None:
    assert disjoint([(4, 9), (0, 5), (2, 3), (9, 9), (8, 12)]) == [(0, 5), (5, 9), (9, 12)]


def test_far_is_past_every_index() -> None:
    assert np.iinfo(np.int32).max == FAR

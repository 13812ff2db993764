"""Tiles proved empty or full are so by enumeration, and the catalogue's are all found."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from text_cases import cases
from tile_catalogue import catalogue
from tile_masks import DIRECTED, Launch, launches, masks, parse
from tile_mutants import MUTANTS

import scoremod
from scoremod.analysis.tiles import EMPTY, FULL, PARTIAL, TileMap, classify, explain_atoms
from scoremod.errors import ScoremodError
from scoremod.ir.expr import Expr

Array = np.ndarray[Any, Any]
ANALYSIS = Path(__file__).parent.parent / "scoremod" / "analysis"


def kinds_of(mask: Expr, launch: Launch) -> Array:
    return classify(
        mask, launch.q_len, launch.kv_len, block_m=launch.block_m, block_n=launch.block_n,
        values=launch.values, h=launch.h, hk=launch.h // 2, q_offset=launch.q_offset,
    )  # fmt: skip


def check_sound(mask: Expr, launch: Launch, dense: Array) -> Array:
    """The kinds, after comparing them with every pair of the mask."""
    found, true = kinds_of(mask, launch), launch.kinds(dense)
    assert found.dtype == np.uint8 and found.shape == true.shape
    wrong = (found != PARTIAL) & (found != true)
    assert not wrong.any(), np.argwhere(wrong)[:4]
    return found


# -- soundness -------------------------------------------------------------------------------------


# `make fuzz-tiles` asks for a million tiles.
EXAMPLES = int(os.environ.get("SCOREMOD_TILE_EXAMPLES", "1600"))


@settings(max_examples=EXAMPLES)
@given(masks(), launches())
def test_proved_tiles_are_so(mask: Expr, launch: Launch) -> None:
    check_sound(mask, launch, launch.dense(mask))


def test_runs_longer_than_any_sequence() -> None:
    """2**78 positions: more than 64 bits hold."""
    text = "variant v(c: int = 8192) { mask i // c == j // c // c // c // c // c // c }"
    assert (scoremod.parse(text).tiles(300, 300).kind == FULL).all()


@pytest.mark.parametrize(("mask", "values"), DIRECTED)
@pytest.mark.parametrize("seed", range(4))
def test_directed(mask: str, values: dict[str, int], seed: int) -> None:
    launch = Launch(70, 90, q_offset=seed, seed=seed, wild=seed % 2 == 0, given=values)
    dense = launch.dense(parse(mask))
    for blocks in ((1, 1), (4, 8), (16, 3), (32, 32)):
        at = replace(launch, block_m=blocks[0], block_n=blocks[1])
        found = check_sound(parse(mask), at, dense)
        if blocks == (1, 1):
            # A single pair is a point: only tables with nan, and what wraps, may stay open.
            exact = "X" not in mask and "S * S" not in mask
            assert not exact or np.array_equal(found, at.kinds(dense))


def test_floats_decide_in_the_precision_of_the_call() -> None:
    mask = parse("X[j] <= 0.1")
    values = {"X": np.full(8, 0.1)}
    kind = classify(mask, 1, 8, block_m=1, block_n=8, values=values)
    assert kind.tolist() == [[FULL]]
    values = {"X": np.full(8, np.float32(0.1))}
    assert classify(mask, 1, 8, block_m=1, block_n=8, values=values).tolist() == [[FULL]]
    # as a float64, float32(0.1) is greater than 0.1
    wide = classify(mask, 1, 8, block_m=1, block_n=8, values=values, strict=np.float64)
    assert wide.tolist() == [[EMPTY]]


def test_nan_proves_nothing() -> None:
    values = {"X": np.array([1.0, np.nan, 1.0, 1.0], np.float32)}
    kind = classify(parse("X[j] <= 2.0"), 1, 4, block_m=1, block_n=2, values=values)
    assert kind.tolist() == [[PARTIAL, FULL]]
    kind = classify(parse("X[j - i] <= 2.0"), 2, 4, block_m=2, block_n=2, values=values)
    assert kind.tolist() == [[PARTIAL, PARTIAL]]


def test_reads_outside_a_table_are_zero() -> None:
    values = {"T": np.full(4, 7), "K": np.ones(4, bool)}
    for text in ("T[i - j] == 7", "T[j] == 7", "K[i - j]", "K[j]", "T[i - j] * 2 > 3"):
        mask = parse(text)
        launch = Launch(12, 12, 4, 4, given=values)
        found = check_sound(mask, launch, launch.dense(mask))
        assert FULL not in found[:, 1:] and EMPTY in found


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0), (1, 1)])
def test_lengths_of_nothing(q_len: int, kv_len: int) -> None:
    kind = classify(parse("j <= i"), q_len, kv_len, block_m=4, block_n=2, values={})
    assert kind.shape == (-(-q_len // 4), -(-kv_len // 2))
    assert "tiles" in str(TileMap(kind, q_len, kv_len, 4, 2))


@pytest.mark.parametrize(
    "text", ["j <= i and i - j < 900", "D[i] == D[j] and j <= i", "i // 48 == j // 48"]
)
def test_a_large_grid_is_seen_as_a_small_one_is(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at larger tiles first changes nothing, nor does working in chunks."""
    launch = Launch(3000, 2900, 16, 16, given={"D": np.arange(3000) // 170})
    at_once = kinds_of(parse(text), launch)
    monkeypatch.setattr("scoremod.analysis.tiles.PYRAMID_TILES", 50)
    monkeypatch.setattr("scoremod.analysis.tiles.CHUNK_TILES", 1000)
    monkeypatch.setattr("scoremod.analysis.tiles.CHUNK_BOXES", 300)
    monkeypatch.setattr("scoremod.analysis.summary.CHUNK", 64)
    assert np.array_equal(kinds_of(parse(text), launch), at_once)


def test_long_tables_are_kept_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scoremod.analysis.tables.MAX_FINE", 64)
    values = {"T": np.arange(500) // 10, "X": np.arange(500, dtype=np.float32)}
    launch = Launch(300, 310, 16, 32, given=values)
    for text in (
        "T[i - j] <= 9 or T[j - i] > 3",
        "T[i - j] <= T[j - i] + i // 9",
        "X[i - j] < X[i] - 40.5",
    ):
        found = check_sound(parse(text), launch, launch.dense(parse(text)))
        assert (found != PARTIAL).mean() > 0.4, text


# -- tightness -------------------------------------------------------------------------------------

LENGTHS = [(1024, 1024, 0), (1000, 1000, 0), (1000, 1537, 537)]
BLOCKS = [(128, 128), (64, 128), (128, 64)]
# What the prototype found of empty and full tiles in short documents, in percent, if not all.
SHARES = {("49", 40): 99.2, ("49", 150): 99.4, ("53", 150): 98.7}


def shares(lengths: list[tuple[int, int, int]], seed: int, docs: int) -> dict[str, float]:
    """The percentage of empty and full tiles that are found, per mask of the catalogue."""
    true_tiles: dict[str, int] = {}
    found_tiles: dict[str, int] = {}
    for q_len, kv_len, q_offset in lengths:
        for entry in catalogue(max(kv_len, q_len + q_offset), seed, docs):
            launch = Launch(q_len, kv_len, q_offset=q_offset, given=entry.values)
            dense, mask = launch.dense(entry.mask), entry.mask
            for block_m, block_n in BLOCKS:
                at = replace(launch, block_m=block_m, block_n=block_n)
                decided = at.kinds(dense) != PARTIAL
                found = check_sound(mask, at, dense)
                name = entry.number
                true_tiles[name] = true_tiles.get(name, 0) + int(decided.sum())
                found_tiles[name] = found_tiles.get(name, 0) + int((found != PARTIAL).sum())
    return {name: 100 * found_tiles[name] / n if n else 100.0 for name, n in true_tiles.items()}


@pytest.mark.slow
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_tile_of_the_catalogue_is_found(lengths: tuple[int, int, int]) -> None:
    found = shares([lengths], seed=0, docs=10)
    assert len(found) == 81
    assert {name: share for name, share in found.items() if share < 100} == {}


@pytest.mark.slow
@pytest.mark.parametrize(("docs", "seed"), [(40, 6), (150, 7)])
def test_short_documents(docs: int, seed: int) -> None:
    found = shares(LENGTHS[-1:], seed, docs)
    below = {n: x for n, x in found.items() if x < SHARES.get((n, docs), 100)}
    assert below == {}


# -- pictures --------------------------------------------------------------------------------------


def map_of(text: str, n: int, block: int, **values: Any) -> TileMap:
    kind = classify(parse(text), n, n, block_m=block, block_n=block, values=values)
    return TileMap(kind, n, n, block, block)


PICTURES: dict[str, Callable[[], TileMap]] = {
    "causal": lambda: map_of("j <= i", 16, 1),
    "window": lambda: map_of("j <= i and i - j < 5", 64, 4),
    "documents": lambda: map_of(
        "D[i] == D[j] and j <= i", 64, 4, D=np.repeat([0, 1, 2, 3], [20, 9, 23, 12])
    ),
    "sinks": lambda: map_of("j <= i and (j < 4 or i - j < 9)", 64, 4),
    "blocks": lambda: map_of("i // 12 == j // 12 or j >= 52", 64, 4),
    "shrunk": lambda: map_of("abs(i - j) <= 300", 8192, 32),
}


@pytest.mark.parametrize("name", PICTURES)
def test_picture(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"tiles/{name}.txt", str(PICTURES[name]()))


def test_a_picture_is_at_most_64_by_128() -> None:
    lines = str(map_of("j <= i", 20000, 64)).splitlines()
    assert len(lines) <= 64 + 2 and max(map(len, lines[:-2])) <= 128


def test_svg_and_png(tmp_path: Any) -> None:
    drawn = PICTURES["sinks"]()
    assert drawn._repr_svg_().startswith("<svg") and "% of the work kept" in drawn._repr_svg_()
    drawn.plot(tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ScoremodError, match="matplotlib") as caught:
        PICTURES["causal"]().plot(tmp_path / "map.png")
    assert "scoremod[plot]" in str(caught.value)


# -- reasons ---------------------------------------------------------------------------------------


@cases("reasons.txt")
def test_reason(given: str, expected: str) -> None:
    assert [(a.text, f"{a.means}: {a.reason}") for a in explain_atoms(parse(given))] == [
        (given, expected)
    ]


def test_reasons_are_in_the_order_and_words_of_the_text() -> None:
    found = explain_atoms(parse("not (j <= i and 0 <= i - j < P) or (K[i] == flag)"))
    assert [a.text for a in found] == ["j <= i", "0 <= i - j", "i - j < P", "K[i]", "flag"]


# -- the tests themselves --------------------------------------------------------------------------


@pytest.mark.parametrize(("what", "module", "old", "new"), MUTANTS)
def test_mutants_still_apply(what: str, module: str, old: str, new: str) -> None:
    """tests/tile_mutants.py runs these tests against each."""
    text = (ANALYSIS / f"{module}.py").read_text(encoding="utf-8")
    assert text.count(old) == 1 and old != new, what

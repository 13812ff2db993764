"""Tiles proved empty or full are so by enumeration, and the catalogue's are all found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from tile_catalogue import catalogue
from tile_masks import DIRECTED, Launch, launches, masks, parse

from scoremod.analysis.tiles import EMPTY, FULL, PARTIAL, TileMap, classify
from scoremod.ir.expr import Expr

Array = np.ndarray[Any, Any]


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


@settings(max_examples=2500)
@given(masks(), launches())
def test_proved_tiles_are_so(mask: Expr, launch: Launch) -> None:
    check_sound(mask, launch, launch.dense(mask))


@pytest.mark.parametrize(("mask", "values"), DIRECTED)
@pytest.mark.parametrize("seed", range(4))
def test_directed(mask: str, values: dict[str, int], seed: int) -> None:
    launch = Launch(70, 90, q_offset=seed, seed=seed, wild=seed % 2 == 0, given=values)
    dense = launch.dense(parse(mask))
    for blocks in ((1, 1), (4, 8), (16, 3), (32, 32)):
        at = replace(launch, block_m=blocks[0], block_n=blocks[1])
        found = check_sound(parse(mask), at, dense)
        if blocks == (1, 1):
            # A single pair is a point: nothing but floats' functions may stay open.
            assert np.array_equal(found, at.kinds(dense)) or "X" in mask

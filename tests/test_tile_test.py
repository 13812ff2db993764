"""The interval test that kernels run: sound on every tile, sharp where it should be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from tile_catalogue import catalogue
from tile_masks import DIRECTED, Launch, launches, masks, parse

from scoremod.analysis.tile_test import TileTest, tile_test
from scoremod.ir.evaluate import evaluate
from scoremod.ir.expr import Expr
from scoremod.ir.show import show
from scoremod.passes.simplify import simplify

Array = np.ndarray[Any, Any]


def ends_of(test: TileTest, launch: Launch) -> dict[str, Array]:
    """Each tile's box and the ends of its parts, as [q tiles, 1] and [1, kv tiles]."""
    sides = {
        "i": (launch.q_len, launch.block_m, launch.q_offset, (-1, 1)),
        "j": (launch.kv_len, launch.block_n, 0, (1, -1)),
    }
    found = {}
    for index, (length, block, first, shape) in sides.items():
        starts = np.arange(0, length, block)
        found[f"{index}_lo"] = (starts + first).reshape(shape)
        found[f"{index}_hi"] = (np.minimum(starts + block, length) - 1 + first).reshape(shape)
        positions = {**launch.env, index: np.arange(length) + first}
        for part in test.parts_of(index):
            values = np.broadcast_to(evaluate(part.expr, positions), length)
            for name, ufunc in zip(part.ends, (np.minimum, np.maximum), strict=True):
                found[name] = ufunc.reduceat(values, starts).reshape(shape)
    return found


def kinds_of(mask: Expr, launch: Launch) -> Array:
    """0 empty, 1 not decided, 2 full."""
    test = tile_test(mask)
    env = {**launch.env, **ends_of(test, launch)}
    shape = -(-launch.q_len // launch.block_m), -(-launch.kv_len // launch.block_n)
    maybe, surely = (
        np.broadcast_to(evaluate(e, env), shape).astype(int) for e in (test.maybe, test.surely)
    )
    assert (surely <= maybe).all()
    return maybe + surely


def check_sound(mask: Expr, launch: Launch) -> None:
    found, true = kinds_of(mask, launch), launch.kinds(launch.dense(mask))
    wrong = (found != 1) & (found != true)
    assert not wrong.any(), np.argwhere(wrong)[:4]


@settings(max_examples=600)
@given(masks(), launches())
def test_decided_tiles_are_so(mask: Expr, launch: Launch) -> None:
    check_sound(mask, launch)


@pytest.mark.parametrize(("mask", "values"), DIRECTED)
def test_directed(mask: str, values: dict[str, int]) -> None:
    for seed, blocks in enumerate(((1, 1), (4, 8), (16, 3))):
        check_sound(
            parse(mask),
            Launch(70, 90, *blocks, q_offset=seed, seed=seed, wild=seed % 2 == 0, given=values),
        )


@pytest.mark.parametrize(
    ("mask", "maybe", "surely"),
    [
        ("j <= i", "j_lo <= i_hi", "j_hi <= i_lo"),
        ("D[i] == D[j]", "i0_lo <= j0_hi and j0_lo <= i0_hi", "i0_lo == j0_hi and i0_hi == j0_lo"),
        ("K[j] or K[i]", "j0_hi or i0_hi", "j0_lo or i0_lo"),
        ("G[i, j] > 0", "True", "False"),
    ],
)
def test_form(mask: str, maybe: str, surely: str) -> None:
    test = tile_test(parse(mask), simplify)
    assert (show(test.maybe), show(test.surely)) == (maybe, surely)


def test_most_of_the_catalogue_is_decided_without_looking_into_tiles() -> None:
    decided = total = 0
    for entry in catalogue(1024):
        launch = Launch(1024, 1024, 64, 64, given=entry.values)
        true = launch.kinds(launch.dense(entry.mask))
        found = kinds_of(entry.mask, launch)
        assert np.all((found == 1) | (found == true)), entry.name
        decided += int((found == true)[true != 1].sum())
        total += int((true != 1).sum())
    assert decided >= 0.9 * total, decided / total

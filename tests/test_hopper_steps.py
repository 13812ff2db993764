"""Steps of the Hopper kernels as rendered, beside the oracle: masks, row values, p and its slope.

Products and copies are left to a GPU (`test_hopper_backward_gpu.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from gluon_steps import Memory, Steps
from test_hopper import plans as forward_plans
from test_hopper_backward import H200, options, plans, program

from scoremod import (
    Variant,
    attend_hopper,
    backward_hopper,
    backward_hopper_wide,
    parse,
    variants,
)
from scoremod.backends.hopper import HOPPER
from scoremod.draw import Shape, draw_missing
from scoremod.hopper_rows import small_source
from scoremod.ir.evaluate import evaluate
from scoremod.plan_hopper import HopperPlan
from scoremod.plan_hopper_backward import MAIN, GradientReader, rows_plan
from scoremod.plan_hopper_wide import KEYS, QUERIES, WidePlan, wide_plan
from scoremod.render import render

B, H, Q_LEN, KV_LEN, KV_END, Q_OFFSET, SCALE = 1, 2, 150, 190, 170, 9, 0.125
BATCH, HEADS = 2, 4
TILE = 64
LOG2_E = float(np.log2(np.e))
NONE = torch.tensor(0)  # a position that nobody reads
STOCK = {n: v for n, v in vars(variants).items() if isinstance(v, Variant)}
MORE = {
    "noop": parse("variant noop() { mask True }"),
    "softcap & document": variants.softcap & variants.document & variants.causal,
    "alibi & window": variants.alibi & variants.sliding_window,
    "forget_gate & causal": variants.forget_gate & variants.causal,
    "nan": parse("variant nan() { score s + 0.0 * sqrt(s) mask j <= i }"),
}
VARIANTS = {**STOCK, **MORE}


# -- the oracle --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """A tile of pairs, [keys, queries]: what a kernel is given of it, and what it should give."""

    start_m: int
    start_n: int
    raw: torch.Tensor
    keep: torch.Tensor
    lse: torch.Tensor  # of queries, in base 2
    p: torch.Tensor
    w: torch.Tensor  # p times the slope of the score

    @property
    def keys(self) -> torch.Tensor:
        return self.start_n + torch.arange(TILE, dtype=torch.int32)


def tiles(variant: Variant, captures: dict[str, Any]) -> list[Tile]:
    """All tiles of a call whose last keys do not count, ragged ones among them."""
    mask = variant.mask_dense(Q_LEN, KV_LEN, b=B, h=H, q_offset=Q_OFFSET, **captures)
    mask[:, KV_END:] = False
    starts = [(m, n) for m in range(0, Q_LEN, TILE) for n in range(0, KV_LEN, TILE)]
    return [tile_of(variant, captures, mask, *start) for start in starts]


def tile_of(
    variant: Variant, captures: dict[str, Any], mask: torch.Tensor, start_m: int, start_n: int
) -> Tile:
    generator = torch.Generator().manual_seed(start_m + start_n)
    raw = 8 * torch.randn(TILE, TILE, generator=generator)
    # Rows past the end are copied as zeros.
    raw[max(KV_LEN - start_n, 0) :], raw[:, max(Q_LEN - start_m, 0) :] = 0.0, 0.0
    keep = torch.zeros(TILE, TILE, dtype=torch.bool)
    cut = mask[start_m : start_m + TILE, start_n : start_n + TILE].T
    keep[: cut.shape[0], : cut.shape[1]] = cut
    score, slope = scores(variant, captures, raw, start_m, start_n)
    lse = torch.logsumexp(torch.where(keep, score.nan_to_num(0.0), -torch.inf), 0) + 0.5
    lse[lse == -torch.inf] = torch.inf  # as the kernel before the main one says it
    p = torch.where(keep, torch.exp(score - lse), 0.0)
    w = torch.where(keep, p * slope, 0.0)
    return Tile(start_m, start_n, raw, keep, (lse * LOG2_E).float(), p, w)


def scores(
    variant: Variant, captures: dict[str, Any], raw: torch.Tensor, start_m: int, start_n: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of raw products [keys, queries], and their slopes by s, from differences."""
    place = np.arange(TILE)
    at = {"i": (start_m + Q_OFFSET + place)[None, :], "j": (start_n + place)[:, None]}
    at |= {"b": B, "h": H, "hk": H}
    values = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in captures.items()}
    s, step = raw.double().numpy() * SCALE, 1e-5
    given = program(variant).given_score
    found = [evaluate(given, at | values | {"s": x}) for x in (s, s - step, s + step)]
    exact, less, more = (torch.tensor(np.broadcast_to(x, s.shape)) for x in found)
    return exact, (more - less) / (2 * step)


def values_of(variant: Variant) -> dict[str, Any]:
    """Values of the captures: defaults, or drawn."""
    shape = Shape(BATCH, HEADS, HEADS, Q_OFFSET + Q_LEN, KV_LEN, 64, 64)
    defaults = {c.name: c.default for c in variant._program.captures}
    missing = draw_missing(variant._program, {}, shape, {})
    return defaults | {name: value for name, (value, _) in missing.items()}


# -- the rendered steps ------------------------------------------------------------------------


def steps_of(text: str) -> Steps:
    return Steps(text, HALF=TILE, ROWS=TILE, BLOCK_N=TILE)


def known_to(
    plan: GradientReader | HopperPlan, captures: dict[str, Any], tile: Tile
) -> dict[str, Any]:
    """What the kernel's functions are given by name: captures with their sizes, and places."""
    known: dict[str, Any] = {
        "b": torch.tensor(B), "h": torch.tensor(H), "hk": torch.tensor(H), "sm_scale": SCALE,
        "q_len": torch.tensor(Q_LEN), "kv_len": torch.tensor(KV_LEN),
        "kv_end": torch.tensor(KV_END), "q_start": torch.tensor(Q_OFFSET),
        "start_m": torch.tensor(tile.start_m), "start_n": torch.tensor(tile.start_n),
        "kv_idx": tile.keys,
        "q_idx": tile.start_m + Q_OFFSET + torch.arange(TILE, dtype=torch.int32),
    }  # fmt: skip
    for given, value in captures.items():
        name = next(p.name for p in plan.params if p.name.rstrip("_") == given.rstrip("_"))
        if isinstance(value, torch.Tensor):
            known[name] = Memory(value.flatten())
            known |= {f"{name}_size_{k}": size for k, size in enumerate(value.shape)}
            known |= {f"{name}_stride_{k}": torch.tensor(x) for k, x in enumerate(value.stride())}
        else:
            known[name] = torch.tensor(value)
    return known


def by_keys(plan: GradientReader, steps: Steps, captures: dict[str, Any], tile: Tile) -> Any:
    """p and its slope as a program finds them that owns keys."""
    known = known_to(plan, captures, tile)
    for term in plan.column_terms:
        known[term.name] = steps.call(term.function.name, known, s=0.0, i=NONE, j=tile.keys)
    if plan.masks_by_queries:
        known["seeing"] = steps.call("rows_that_see", known)
    if plan.adds_by_key:
        known["line"] = steps.call("key_scores", known)
    known["row_lse"] = in_memory(tile.lse)
    for masked in (True, False) if tile.keep.all() else (True,):
        yield steps.call("weights", known, MASKED=masked, s=tile.raw)


def by_queries(plan: GradientReader, steps: Steps, captures: dict[str, Any], tile: Tile) -> Any:
    """p times its slope, [queries, keys], as a program finds it that owns queries."""
    known = known_to(plan, captures, tile)
    row_lse = tile.lse.clone()
    if plan.of_query is not None:
        row_lse -= steps.call(plan.of_query.name, known, s=0.0, i=known["q_idx"], j=NONE)
    for term in plan.row_terms:
        known[term.name] = steps.call(term.function.name, known, s=0.0, i=known["q_idx"], j=NONE)
    for masked in (True, False) if tile.keep.all() else (True,):
        yield steps.call("weights", known, MASKED=masked, s=tile.raw.T, row_lse=row_lse)


def pairs_that_attend(
    plan: HopperPlan, steps: Steps, captures: dict[str, Any], tile: Tile
) -> torch.Tensor:
    """Which pairs, [queries, keys], the forward does not mask."""
    known = known_to(plan, captures, tile)
    limits: Any = torch.tensor(KV_END)
    if plan.masks_by_keys:
        assert plan.keys is not None
        lo, hi = steps.call(plan.keys.name, known, s=0.0, i=known["q_idx"], j=NONE)
        ends = (steps.call("of_rows", {}, key=x, rows=known["q_idx"]) for x in (lo, hi))
        limits = next(ends)[:, None], next(ends).clamp(max=KV_END - 1)[:, None]
    for term in plan.row_terms:
        known[term.name] = steps.call(term.function.name, known, s=0.0, i=known["q_idx"], j=NONE)
    for term in plan.column_terms:
        known[term.name] = steps.call(term.function.name, known, s=0.0, i=NONE, j=tile.keys)
    found = steps.call("attends", known, limits=limits)
    return found.expand(TILE, TILE)  # type: ignore[no-any-return]


def places(text: str) -> torch.Tensor:
    """Where a kernel has the row values of 64 queries."""
    found = re.search(r"^    place = (.*)$", text, re.MULTILINE)
    assert found is not None
    at = torch.arange(TILE)
    return eval(found[1], {"column": at, "row": at})  # type: ignore[no-any-return]


ROWS_TEXT = small_source(rows_plan(options(128), H200, TILE, has_grad_lse=False))


def in_memory(values: torch.Tensor) -> Memory:
    laid = torch.full((TILE,), torch.nan)
    laid[places(ROWS_TEXT)] = values
    return Memory(laid)


def wide(kernel: str, variant: Variant) -> WidePlan:
    chosen = backward_hopper_wide.of_options(
        kernel, program(variant), options(256, variant=variant)
    )
    return wide_plan(kernel, program(variant), chosen, H200)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=2e-4, atol=2e-5, equal_nan=True)


# -- both, side by side ------------------------------------------------------------------------


def test_row_values_come_back_in_the_order_of_columns() -> None:
    values = torch.randn(TILE)
    steps = steps_of(backward_hopper.source(plans(MORE["noop"])[0]))
    assert torch.equal(steps.call("per_query", {}, values=in_memory(values)), values)
    # And those that add something for each place in the tile.
    steps = steps_of(backward_hopper.source(plans(variants.alibi & variants.causal)[0]))
    found = steps.call("per_query_of_line", {}, values=in_memory(values), per_key=0.5)
    torch.testing.assert_close(found, values + 0.5 * torch.arange(TILE))


def test_kernels_of_rows_read_them_where_they_lie() -> None:
    queries = backward_hopper_wide.source(wide(QUERIES, variants.causal))
    (sums,) = backward_hopper_wide.sums_sources(program(variants.alibi), options(128), H200)
    for text in (queries, sums):
        assert torch.equal(places(text), places(ROWS_TEXT))


@pytest.mark.parametrize("name", VARIANTS)
def test_which_pairs_attend_forward(name: str) -> None:
    variant, captures = VARIANTS[name], values_of(VARIANTS[name])
    plan = forward_plans(variant)[0]
    steps = steps_of(attend_hopper.source(plan))
    for tile in tiles(variant, captures):
        rows = max(Q_LEN - tile.start_m, 0)  # those past the end are left out of the output
        found = pairs_that_attend(plan, steps, captures, tile)
        assert torch.equal(found[:rows], tile.keep.T[:rows])


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kernel", [MAIN, KEYS])
def test_p_and_its_slope_by_keys(kernel: str, name: str) -> None:
    variant, captures = VARIANTS[name], values_of(VARIANTS[name])
    plan = plans(variant)[0] if kernel == MAIN else wide(KEYS, variant)
    steps = steps_of(render(f"{kernel}.py", plan, HOPPER))
    for tile in tiles(variant, captures):
        for p, w in by_keys(plan, steps, captures, tile):
            same(p, tile.p)
            same(w, tile.w)


@pytest.mark.parametrize("name", VARIANTS)
def test_p_times_its_slope_by_queries(name: str) -> None:
    variant, captures = VARIANTS[name], values_of(VARIANTS[name])
    plan = wide(QUERIES, variant)
    steps = steps_of(backward_hopper_wide.source(plan))
    for tile in tiles(variant, captures):
        for w in by_queries(plan, steps, captures, tile):
            same(w.T, tile.w)

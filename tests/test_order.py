"""In which order programs take the tiles of several heads, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from attention_cases import DEVICE  # asks for the interpreter, where there is no GPU
from hypothesis import given, settings
from hypothesis import strategies as st

from scoremod.backends.triton import TRITON
from scoremod.plan_hopper_backward import LAST_HEADS
from scoremod.ready import Interpreted, _interpreted
from scoremod.render import _steps_of, _with_shared_steps
from scoremod.resources import read_text

ORDER = """
import triton
import triton.language as tl

# -- shared steps


@triton.jit
def order(found, tiles, heads, TOGETHER: tl.constexpr):
    program = tl.program_id(0)
    head, tile = heads_together(program, tiles, heads, TOGETHER)
    tl.store(found + 2 * program, head)
    tl.store(found + 2 * program + 1, tile)
"""


def order(heads: int, tiles: int, together: int) -> list[tuple[int, int]]:
    """The (head, tile) of each program."""
    text = _with_shared_steps(ORDER, _steps_of(TRITON))
    found = torch.full((heads * tiles, 2), -1, dtype=torch.int32)
    kernel = _interpreted(Interpreted(text, "order", {"TOGETHER": together}))
    kernel.run(heads * tiles, [found, tiles, heads])
    return [(head, tile) for head, tile in found.tolist()]


@pytest.mark.skipif(DEVICE["triton"] != "cpu", reason="for Triton's interpreter")
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 19), st.integers(1, 7), st.sampled_from((1, 4, 8)))
def test_every_tile_of_every_head_has_one_program(heads: int, tiles: int, together: int) -> None:
    found = order(heads, tiles, together)
    assert sorted(found) == [(h, t) for h in range(heads) for t in range(tiles)]
    # Group after group, and in a group tile after tile.
    assert found == sorted(found, key=lambda x: (x[0] // together, x[1], x[0]))


# -- heads that take the sums of others, in the Hopper backward --------------------------------

PAIRS = """
import triton
import triton.language as tl

{steps}


@triton.jit
def pairs(found, ends, tiles, heads):
    program = tl.program_id(0)
    head, tile = heads_in_pairs(program, tiles, heads)
    tl.store(found + 2 * program, head)
    tl.store(found + 2 * program + 1, tile)
    tl.store(ends + program // tiles, end_of_next_heads(program // tiles, heads))
"""
STEPS = ("first_of_last_heads", "heads_in_pairs", "end_of_next_heads")


def step(name: str) -> str:
    """A shared step of the Hopper kernels, as Triton itself runs it."""
    text = read_text("templates/hopper/tile.py")
    body = text[text.index(f"def {name}(") :].partition("\n\n\n")[0]
    return "@triton.jit\n" + body.replace("gl.", "tl.")


@pytest.mark.skipif(DEVICE["triton"] != "cpu", reason="for Triton's interpreter")
@settings(max_examples=20, deadline=None)
@given(heads=st.integers(1, 40), tiles=st.integers(1, 5), more=st.integers(0, 5))
def test_who_waits_waits_for_programs_of_lower_numbers(heads: int, tiles: int, more: int) -> None:
    text = PAIRS.format(steps="\n\n\n".join(map(step, STEPS)))
    found = torch.full((heads * tiles, 2), -1, dtype=torch.int32)
    ends = torch.full((heads,), -1, dtype=torch.int32)
    _interpreted(Interpreted(text, "pairs", {})).run(heads * tiles, [found, ends, tiles, heads])
    order = [(head, tile) for head, tile in found.tolist()]
    assert sorted(order) == [(h, t) for h in range(heads) for t in range(tiles)]
    first, last = {}, {}
    for number, (head, _) in enumerate(order):
        first.setdefault(head, number)
        last[head] = number

    slots = LAST_HEADS + 2 + more
    cleared = []
    for own in range(heads):
        for later in range(own + 2, int(ends[own]), 2):
            cleared.append(later)
            assert last[own] < first[later]  # whose additions wait for all programs that clear
            if later >= slots:
                assert last[later - slots] < first[own]  # whose additions the clearing waits for
    assert set(range(slots, heads)) <= set(cleared) and len(cleared) == len(set(cleared))
    # The longest tiles of the last heads begin together.
    together = {head for head in range(heads) if first[head] >= first[max(heads - 3, 0) // 2 * 2]}
    assert together == set(range(max(heads - 3, 0) // 2 * 2, heads))

"""In which order programs take the tiles of several heads, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from attention_cases import DEVICE  # asks for the interpreter, where there is no GPU
from hypothesis import given, settings
from hypothesis import strategies as st

from scoremod.backends.triton import TRITON
from scoremod.ready import Interpreted, _interpreted
from scoremod.render import _steps_of, _with_shared_steps

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

"""The Hopper backward around its main kernel, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import NOOP, on

from scoremod import (
    attend_triton,
    backward_hopper,
    backward_triton,
    hopper_rows,
    parse,
    ready,
    variants,
)
from scoremod.backward_triton import Call, call_of
from scoremod.gradients import Gradients, Result, Wanted
from scoremod.hopper_rows import Scratch
from scoremod.inputs import check_inputs
from scoremod.plan import typed
from scoremod.ready import Interpreted
from scoremod.resources import read_text

ALL = Wanted(True, True, True)

# -- a call that it does not take, in Triton's interpreter -------------------------------------

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the main kernel")


def recorded(q: torch.Tensor, **call: Any) -> Call:
    """A causal backward: q, k and v [B, H, L, D] are the same."""
    inputs = check_inputs(q, q, q, scale=None, q_offset=0, kv_lens=None, precision="auto")
    known = typed(variants.causal._program, ())
    out, lse, _ = attend_triton.attend(known, inputs, ())
    result = Result(out, lse, torch.randn_like(out), None)
    return call_of(known, replace(inputs, **call), (), result, ALL)


def made_up() -> Call:
    """A backward of an output and an LSE out of thin air; rows 0 to 20 have no keys."""
    torch.manual_seed(0)
    q, out, do = on("triton", torch.randn(3, 2, 3, 150, 72).half())
    lse, dlse = on("triton", torch.randn(2, 2, 3, 150))
    lse[..., :21] = float("-inf")
    result = Result(out, lse, do, dlse)
    inputs = check_inputs(q, q, q, scale=None, q_offset=0, kv_lens=None, precision="auto")
    return call_of(typed(NOOP._program, ()), inputs, (), result, ALL)


def both(call: Call) -> tuple[Gradients, Gradients]:
    given = (call.program, call.inputs, call.bound, call.result, ALL)
    return backward_hopper.backward(*given), backward_triton.backward(*given)


@interpreted
def test_what_it_does_not_take_the_portable_kernels_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = on("triton", torch.randn(1, 2, 40, 64))
    asked = []
    monkeypatch.setattr(backward_hopper, "main", lambda call: asked.append(call))
    mine, portable = both(recorded(q))
    assert not asked and torch.equal(mine.q, portable.q) and torch.equal(mine.k, portable.k)


@interpreted
def test_without_a_kernel_the_portable_ones_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main kernel does not run in the interpreter: as where no configuration suits."""
    call = recorded(on("triton", torch.randn(1, 2, 40, 64).half()))
    mine, portable = both(call)
    assert torch.equal(mine.q, portable.q) and torch.equal(mine.v, portable.v)
    assert "interpreter" in backward_hopper.refusal(call)


# -- the kernels before and after, in Triton's interpreter -------------------------------------


def in_place(column: int) -> int:
    """Where a tile of 64 row values has that of a column: of 16, four for each of four threads."""
    return column // 16 * 16 + column % 8 // 2 * 4 + column % 16 // 8 * 2 + column % 2


def looked_at(call: Call, block_m: int, slots: int) -> Scratch:
    """What the kernel before the main one leaves in memory full of sevens."""
    scratch = backward_hopper.scratch_of(call, block_m, slots)
    for x in (scratch.rows, scratch.sums, scratch.counters, *scratch.turns):
        x.fill_(7)
    kernel = hopper_rows.rows_kernel(call, block_m, ordered=call.inputs.must_repeat)
    hopper_rows.look_at_rows(call, kernel, call.grad_out, block_m, scratch)
    return scratch


@pytest.mark.parametrize("block_m", [64, 128])
def test_what_the_backward_needs_of_each_row(block_m: int) -> None:
    call = made_up()
    scratch = looked_at(call, block_m, slots=6)
    rows, sums = scratch.rows, scratch.sums
    assert sums.abs().max() == 0 and sums.numel() == -(-150 // block_m) * block_m * 6 * 128
    order = [in_place(m % 64) + m // 64 * 64 for m in range(block_m)]
    lse, delta = rows.view(2, 3, -1, 2, block_m)[..., order].unbind(3)
    lse, delta = lse.flatten(2), delta.flatten(2)
    result = call.result
    empty_rows = result.lse == float("-inf")
    assert int(empty_rows.sum()) == 2 * 3 * 21
    wanted = (result.out.float() * result.grad_out.float()).sum(3) - result.grad_lse
    wanted = torch.where(empty_rows, 0.0, wanted)
    torch.testing.assert_close(delta[..., :150], wanted, rtol=1e-5, atol=1e-5)
    base2 = torch.where(empty_rows, float("inf"), result.lse * 1.4426950408889634)
    torch.testing.assert_close(lse[..., :150], base2)
    assert (lse[..., 150:] == float("inf")).all() and (delta[..., 150:] == 0).all()


@pytest.mark.parametrize("slots", [2, 6])
def test_what_is_counted_and_added_up_is_cleared(slots: int) -> None:
    call = made_up()
    call = replace(call, inputs=replace(call.inputs, deterministic=True))
    scratch = looked_at(call, 64, slots)
    assert scratch.sums.numel() == slots * 3 * 64 * 128 and scratch.sums.abs().max() == 0
    (turns,) = scratch.turns
    assert turns.numel() == 3 * 6 and turns.abs().max() == 0  # a q tile of each head
    # Two of each head.
    assert scratch.counters.numel() == 12 and scratch.counters.abs().max() == 0


@pytest.mark.parametrize(
    ("block_m", "columns", "slots"), [(64, 64, 6), (128, 128, 6), (64, 64, 4), (128, 64, 5)]
)
def test_dq_out_of_its_sums(block_m: int, columns: int, slots: int) -> None:
    """Of all heads, or of the last ones, each in its slot; dq of the others is there already."""
    call = made_up()
    tiles = backward_hopper.q_tiles_of(call, block_m)
    wanted = on("triton", torch.randn(6, tiles * block_m // 6, 128))
    # As a product's threads hold it: warp, half, row, chunk, pair, column of each 64 x columns.
    parts = wanted.view(6, -1, 64, 128 // columns, columns).transpose(2, 3)
    parts = parts.reshape(6, -1, 4, 2, 8, columns // 8, 4, 2).permute(0, 1, 5, 2, 4, 6, 3, 7)
    scratch = backward_hopper.scratch_of(call, block_m, slots)
    for head in range(6 - slots, 6):
        scratch.sums.view(slots, -1)[head % slots] = parts[head].flatten()
    dq = torch.full_like(call.inputs.q, 7)
    kernel = backward_hopper.finish_kernel(call, block_m, columns)
    backward_hopper.finish(call, kernel, scratch, dq, block_m)
    found = dq.view(6, 150, 72)
    assert (found[: 6 - slots] == 7).all()
    torch.testing.assert_close(
        found[6 - slots :], (wanted[6 - slots :, :150, :72] * call.inputs.scale).half()
    )


# -- turns, in Triton's interpreter ------------------------------------------------------------

MASKS = {
    # Kv tiles with more runs than a record has: their maps alone say what they see.
    "scattered": "(i // 128) % 2 == (j // 128) % 2 and j <= i",
    "window": "j <= i and i - j < 300",
    "nothing": "i - j > 5000",
}


@pytest.mark.parametrize(
    ("name", "block_m"), [("scattered", 64), ("window", 64), ("nothing", 64), ("window", 128)]
)
def test_ranks_count_the_later_kv_tiles_that_see_a_q_tile(name: str, block_m: int) -> None:
    """2,300 queries: more tiles than a word of a map has."""
    variant = parse(f"variant {name}() {{ mask {MASKS[name]} }}")
    q = on("triton", torch.randn(1, 2, 2300, 64).half())
    k = q[:, :, :1100]
    inputs = check_inputs(q, k, k, scale=None, q_offset=0, kv_lens=None, precision="auto")
    result = Result(q, on("triton", torch.zeros(1, 2, 2300)), q, None)
    known = typed(variant._program, ())
    call = call_of(known, replace(inputs, deterministic=True), (), result, ALL)
    chosen, blocks = backward_hopper.options_of(call), (block_m, 128)
    found = attend_triton.stored_structure(known, chosen, inputs, (), blocks, transposed=True)
    q_tiles, kv_tiles = -(-2300 // block_m), -(-1100 // 128)
    ranks = backward_hopper.ranks_of(call, found, q_tiles, kv_tiles)

    mask = torch.zeros(q_tiles * block_m, kv_tiles * 128, dtype=torch.bool)
    mask[:2300, :1100] = torch.as_tensor(variant.mask_dense(2300, 1100))
    sees = mask.view(q_tiles, block_m, kv_tiles, 128).any(3).any(1).T.int()
    assert torch.equal(ranks.cpu(), sees.flip(0).cumsum(0).flip(0).int() - sees)
    assert bool(sees.any()) == (name != "nothing")


# -- stretches, in Triton's interpreter --------------------------------------------------------

STRETCHES = """
import triton
import triton.language as tl

{steps}

@triton.jit
def stretches(runs, found):
    count = full_runs(runs + 8) + 1
    tl.store(found, count)
    for stretch in range(count):
        partial, full = stretch_tiles(stretch, count, tl.load(runs + 7) + tl.load(runs + 15), runs)
        tl.store(found + 1 + 2 * stretch, partial)
        tl.store(found + 2 + 2 * stretch, full)
"""


def stretches_of(runs: torch.Tensor) -> str:
    """The kinds of tiles that the main kernel's loops visit, as p and f."""
    text = read_text("templates/hopper/tile.py")
    steps = {f.name: f for f in ast.parse(text).body if isinstance(f, ast.FunctionDef)}
    wanted = [ast.unparse(steps[name]) for name in ("full_runs", "stretch_tiles")]
    made = "\n\n\n".join(wanted).replace("gluon.jit", "triton.jit").replace("gl.", "tl.")
    found = torch.zeros(11, dtype=torch.int32)
    kernel = ready._interpreted(Interpreted(STRETCHES.format(steps=made), "stretches", {}))
    kernel.run(1, [runs, found])
    count, *numbers = found.tolist()
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return "".join("p" * p + "f" * f for p, f in list(pairs)[:count])


def record(kinds: str) -> torch.Tensor:
    """A structure's record of tiles p, f or none; shifts of runs that are not there are wild."""
    runs = torch.randint(-(2**31), 2**31, (32,), dtype=torch.int64).to(torch.int32)
    if max(len(re.findall(f"{kind}+", kinds)) for kind in "pf") > 4:
        runs[4:8], runs[12:16] = len(kinds.replace(".", "")), 0
        return runs
    for place, kind in ((0, "p"), (8, "f")):
        tiles = 0
        for k, run in enumerate(re.finditer(f"{kind}+", kinds)):
            runs[place + k] = run.start() - tiles
            tiles += len(run[0])
            runs[place + 4 + k] = tiles
        runs[place + 4 + len(re.findall(f"{kind}+", kinds)) : place + 8] = tiles
    return runs


@pytest.mark.parametrize(
    "kinds",
    [
        "pp",
        "ppffff",
        "..ffpp",
        "f",
        "....",
        "pfpfpfpf",
        "fpfpfpf.p",
        "p..p.ff..fp..p",
        "ff.f..f.fpp",
    ],
)
def test_stretches_have_the_kinds_of_tiles_in_their_order(kinds: str) -> None:
    torch.manual_seed(0)
    for _ in range(3):
        assert stretches_of(record(kinds)) == kinds.replace(".", "")


def test_tiles_that_a_map_has_are_partial() -> None:
    torch.manual_seed(0)
    assert stretches_of(record("f.f.f.f.ff")) == "pppppp"

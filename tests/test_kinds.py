"""Calls of one kind share what is decided of a backward: none finds what was decided of another."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from scoremod import backward_hopper, backward_triton, parse
from scoremod.backward_triton import Call, call_of
from scoremod.blocks import Blocks
from scoremod.gradients import Result, Wanted
from scoremod.inputs import Inputs
from scoremod.plan_triton import SMALL

VARIANT = parse("variant v(t: f32[H], u: f32[Lk], n: int) { score s - t[h] * u[j] mask i - j < n }")
BASE: dict[str, Any] = {
    "shape": (2, 4, 128, 64),
    "dtype": torch.bfloat16,
    "n": 300,
    "learned": "",
    "t": torch.ones(4),
    "u": torch.ones(128),
}
# Each differs from the first in one thing.
CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "dtype": {"dtype": torch.float16},
    "length": {"shape": (2, 4, 136, 64), "u": torch.ones(136)},
    "few queries": {"shape": (2, 4, 16, 64), "u": torch.ones(16)},
    "head dim": {"shape": (2, 4, 128, 72)},
    "strides of q": {"q": torch.empty(2, 128, 4, 64, dtype=torch.bfloat16).transpose(1, 2)},
    "rows of q apart": {"q": torch.empty(2, 4, 128, 65, dtype=torch.bfloat16)[..., :64]},
    "alignment of q": {"q": torch.empty(2 * 4 * 128 * 64 + 1).bfloat16()[1:].view(2, 4, 128, 64)},
    "strides of out": {"out": torch.empty(2, 128, 4, 64, dtype=torch.bfloat16).transpose(1, 2)},
    "strides of what comes back": {
        "back": torch.empty(2, 4, 128, 65, dtype=torch.bfloat16)[..., :64]
    },
    "what learns": {"learned": "t"},
    "what else learns": {"learned": "u"},
    "a repeated capture": {"t": torch.ones(1)},
    "a repeated capture that learns": {"t": torch.ones(1), "learned": "t"},
    "a large number": {"n": SMALL + 1},
    "kv_lens": {"kv_lens": torch.ones(2, dtype=torch.int32)},
    "an offset": {"q_offset": 7},
    "a large offset": {"q_offset": SMALL},
    "offsets": {"q_offset": torch.ones(2, dtype=torch.int32)},
    "a negative scale": {"scale": -1.0},
    "a scale in memory": {"scale": torch.ones(())},
    "precision": {"precision": "exact"},
    "blocks": {"tiles": Blocks(torch.ones(1, 1, 1, 1).bool(), 128, 128)},
    "small blocks": {"tiles": Blocks(torch.ones(1, 1, 2, 2).bool(), 64, 64)},
    "a gradient of the LSE": {"grad_lse": torch.ones(2, 4, 128)},
    "a residual": {"residual": torch.zeros(2, 4, 128, 4, dtype=torch.int32)},
    "no dq": {"wanted": (False, True, True)},
}


def call(**change: Any) -> Call:
    given = {**BASE, **change}
    q = given.get("q", torch.empty(given["shape"], dtype=given["dtype"]))
    k = torch.empty(q.shape, dtype=q.dtype)
    inputs = Inputs(q, k, k, 0.125, 0, None)
    fields = {
        n: given[n] for n in ("scale", "q_offset", "kv_lens", "precision", "tiles") if n in given
    }
    inputs = replace(inputs, **fields)
    captures = {name: given[name] for name in ("t", "u", "n")}
    for name in given["learned"]:
        captures[name] = captures[name].clone().requires_grad_()
    known, bound = VARIANT._bind(captures, inputs.sizes, q.device)
    out = given.get("out", torch.empty(q.shape, dtype=q.dtype))
    back = given.get("back", torch.empty(q.shape, dtype=q.dtype))
    lse = torch.empty(q.shape[:3])
    result = Result(out, lse, back, given.get("grad_lse"), given.get("residual"))
    wanted = Wanted(*given.get("wanted", (True, True, True)), frozenset(given["learned"]))
    return call_of(VARIANT._type(known, bound), inputs, bound, result, wanted)


def decided(made: Call) -> tuple[Any, ...]:
    """What calls of a kind share, as far as it needs no GPU."""
    given = tuple(made.result.given.items())
    hopper = (backward_hopper.unfit(made.program, made.inputs), backward_hopper.fits(made))
    return made.options, made.learned, made.reads, hopper, given


@pytest.fixture(autouse=True)
def none_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_triton, "_CHOSEN", {})


@functools.cache
def decided_alone() -> dict[str, tuple[Any, ...]]:
    """The same of each call, when nothing is known of any other."""
    found = {}
    for name, change in CHANGES.items():
        backward_triton._CHOSEN.clear()
        found[name] = decided(call(**change))
    return found


@pytest.mark.parametrize("first", CHANGES)
def test_no_call_finds_what_was_decided_of_another(first: str) -> None:
    alone = decided_alone()
    backward_triton._CHOSEN.clear()
    kind = call(**CHANGES[first]).kind
    for name, change in CHANGES.items():
        made = call(**change)
        assert decided(made) == alone[name]
        if alone[name] != alone[first]:
            assert made.kind != kind


def test_calls_of_a_kind_are_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    plain = backward_triton.backward_options
    monkeypatch.setattr(
        backward_triton, "backward_options", lambda *a: asked.append(a) or plain(*a)
    )
    for _ in range(3):
        call()
    assert len(asked) == 1


def test_a_sweep_of_shapes_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_triton, "MAX_KINDS", 3)
    for length in range(20, 40):
        call(shape=(1, 4, length, 64), u=torch.ones(length))
        assert len(backward_triton._CHOSEN) <= 3

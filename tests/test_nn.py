"""The module face: what becomes a parameter, what a buffer, and that both travel with a model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from attention_cases import Shape, bf16, f32, identical, tensors

import scoremod
from scoremod import parse, variants
from scoremod.errors import CaptureMismatch, MissingCapture
from scoremod.nn import Attention

QKV = tensors(Shape(2, 4, 2, 12, 12))
ALIBI = variants.alibi & variants.causal
MIXED = parse(
    "variant mixed(slopes, cap: float, doc: tensor[B, L], cut: tensor[L], w: tensor[H]) {"
    "  score cap * tanh(s / cap) - slopes[h] * w[h] * (i - j)"
    "  mask doc[b, i] == doc[b, j] and cut[j] < 0.9 }"
)


def mixed() -> Attention:
    return Attention(
        MIXED,
        slopes=torch.rand(4),
        cap=5.0,
        doc=torch.arange(12).expand(2, 12) // 5,
        cut=torch.linspace(0, 1, 12),
        w=torch.nn.Buffer(torch.ones(4)),
    )


def test_floats_of_the_score_are_learned_and_the_rest_is_kept() -> None:
    attend = mixed()
    assert [n for n, _ in attend.named_parameters()] == ["slopes"]
    assert {n for n, _ in attend.named_buffers()} == {"doc", "cut", "w"}
    attend(*QKV).sum().backward()
    assert attend.slopes.grad.abs().sum() > 0
    values = dict(attend.state_dict())
    assert torch.equal(attend(*QKV), MIXED(*QKV, cap=5.0, **values))


def test_a_parameter_is_taken_as_it_is() -> None:
    shared = torch.nn.Parameter(torch.rand(4))
    assert Attention(ALIBI, slopes=shared).slopes is shared


def test_state_dict_and_deepcopy() -> None:
    first, second = mixed(), mixed()
    assert not torch.equal(first(*QKV), second(*QKV))
    second.load_state_dict(first.state_dict())
    third = copy.deepcopy(first)
    assert identical([first(*QKV)] * 2, [second(*QKV), third(*QKV)])
    with torch.no_grad():
        third.slopes.zero_()
    assert first.slopes.any() and third.variant is first.variant


def test_to_moves_floats_as_in_any_module() -> None:
    attend = mixed().to(bf16)
    assert (attend.slopes.dtype, attend.doc.dtype) == (bf16, torch.int64)
    attend(*QKV)
    strict = Attention(parse("variant v(t: f32[H]) { score s * t[h] }"), t=torch.rand(4)).to(bf16)
    with pytest.raises(CaptureMismatch, match=r"`t` holds bf16(.|\n)*f32\[H\]"):
        strict(*QKV)


def test_more_captures_at_the_call() -> None:
    attend = Attention(ALIBI)
    slopes = torch.rand(4)
    assert torch.equal(attend(*QKV, slopes=slopes), ALIBI(*QKV, slopes=slopes))
    held = Attention(ALIBI, slopes=torch.zeros(4))
    assert torch.equal(held(*QKV, slopes=slopes), attend(*QKV, slopes=slopes))
    out, lse = held(*QKV, return_lse=True, q_offset=3)
    assert lse.dtype is f32 and out.shape == QKV[0].shape
    with pytest.raises(MissingCapture, match="`slopes` was not given"):
        attend(*QKV)


def test_what_a_module_cannot_hold() -> None:
    with pytest.raises(MissingCapture, match="did you mean slopes"):
        Attention(ALIBI, slope=torch.rand(4))
    attn: Any = parse("variant v(training) { score s * training[h] }")
    with pytest.raises(CaptureMismatch, match="has an attribute `training` already"):
        Attention(attn, training=torch.rand(4))
    assert scoremod.nn.Attention is Attention


def test_it_shows_the_variant_and_its_tables() -> None:
    text = repr(Attention(ALIBI, slopes=torch.rand(4)))
    assert text == "Attention(alibi_and_causal(slopes: tensor[H]), slopes=(4,))"

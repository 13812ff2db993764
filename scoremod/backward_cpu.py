"""Run the CPU backend's backward: scores again from the LSE, gradients tile by tile.

Tiles are visited in the forward's order and sums are made in that order, so that a second run
gives the same bits. Beyond q, k, v and their gradients it takes memory for one tile only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .attend_cpu import argument, per_batch, schedule, user_blocks, without_autocast
from .backends.cpu import CPU
from .binding import Bound
from .blocks import Blocks
from .gradients import Gradients, Result, Wanted
from .inputs import Inputs
from .plan import CpuBackwardPlan, Typed, cpu_backward_plan
from .render import render


@without_autocast
def backward(
    program: Typed, inputs: Inputs, bound: tuple[Bound, ...], result: Result, wanted: Wanted
) -> Gradients:
    """The gradients that are wanted of a call on the CPU."""
    q, k, v = inputs.q.detach(), inputs.k.detach(), inputs.v.detach()
    real = torch.float64 if q.dtype is torch.float64 else torch.float32
    asked = [item.param.name in wanted.captures for item in bound]
    kernel = kernel_of(
        program,
        float64=real is torch.float64,
        has_kv_lens=inputs.kv_lens is not None,
        has_blocks=isinstance(inputs.tiles, Blocks),
        wanted=(wanted.q, wanted.k, wanted.v, *asked),
    )
    batch, heads = q.shape[0], (q.shape[0], k.shape[1], inputs.gqa_group)
    dq = torch.zeros(q.shape, dtype=real)
    dk, dv = (torch.zeros((batch, *x.shape[1:]), dtype=real) for x in (k, v))
    captured = {
        item.param.name: torch.zeros(_shape(item), dtype=real)
        for item, wants in zip(bound, asked, strict=True)
        if wants
    }
    kernel(
        q.view(*heads, *q.shape[2:]),
        *(x.expand(batch, -1, -1, -1) for x in (k, v)),
        result.grad_out.view(*heads, *result.grad_out.shape[2:]),
        result.lse.view(*heads, q.shape[2]),
        _delta(result, real).view(*heads, q.shape[2]),
        dq.view(*heads, *dq.shape[2:]),
        dk,
        dv,
        *captured.values(),
        inputs.scale,
        per_batch(inputs.q_offset),
        per_batch(inputs.kv_lens),
        schedule(program, inputs, bound),
        user_blocks(inputs),
        *(argument(x, float64=real is torch.float64) for x in bound),
    )
    return Gradients(
        dq.to(q.dtype) if wanted.q else None,
        dk.sum_to_size(k.shape).to(k.dtype) if wanted.k else None,
        dv.sum_to_size(v.shape).to(v.dtype) if wanted.v else None,
        {
            item.param.name: captured[item.param.name].view(_given(item).shape).to(_given(item))
            for item in bound
            if item.param.name in captured
        },
    )


def _delta(result: Result, real: torch.dtype) -> torch.Tensor:
    """What softmax takes off each row: sum(do * o), less the gradient of the LSE. [B, Hq, Lq]"""
    delta = (result.grad_out.to(real) * result.out.to(real)).sum(-1)
    return delta if result.grad_lse is None else delta - result.grad_lse.to(real)


def _given(item: Bound) -> torch.Tensor:
    assert isinstance(item.given, torch.Tensor)
    return item.given


def _shape(item: Bound) -> tuple[int, ...]:
    """The gradient's shape: a repeated dimension has one element."""
    return tuple(_given(item).shape) if item.param.rank else ()


def source(plan: CpuBackwardPlan) -> str:
    """The program's text."""
    return render("attention_bwd.py", plan, CPU)


@functools.lru_cache(maxsize=256)
def kernel_of(
    program: Typed,
    *,
    float64: bool,
    has_kv_lens: bool,
    has_blocks: bool = False,
    wanted: tuple[bool, ...],
) -> Callable[..., None]:
    """The compiled program of a variant, for what is wanted."""
    plan = cpu_backward_plan(
        program, float64=float64, has_kv_lens=has_kv_lens, has_blocks=has_blocks, wanted=wanted
    )
    kernel: Callable[..., Any] = CPU.compile(source(plan))["attention_bwd"]
    return kernel

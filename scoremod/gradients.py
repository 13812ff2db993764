"""What a backward is asked for and what it gives: the same two values for every backend.

Each backend has `backward(program, inputs, bound, result, wanted) -> Gradients`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Result:
    """A forward's answer and what came back for it."""

    out: torch.Tensor  # [B, Hq, Lq, Dv]
    lse: torch.Tensor  # [B, Hq, Lq], natural log, -inf for a row without keys
    grad_out: torch.Tensor  # like out; any strides
    grad_lse: torch.Tensor | None  # like lse; None where nothing came


@dataclass(frozen=True)
class Wanted:
    """Which gradients are asked for; captures by their name in the program."""

    q: bool
    k: bool
    v: bool
    captures: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Gradients:
    """Gradients in the shape of what they belong to; None or absent where not asked for.

    dq, dk, dv have q's dtype, k and v the batch that was given (1, if it was 1); a captured
    tensor's gradient has its shape and dtype, summed in float32 (float64 for float64 q). Its shape
    is that of `Bound.given`, or of `Bound.value` where that is expanded.
    """

    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    captures: dict[str, torch.Tensor] = field(default_factory=dict)

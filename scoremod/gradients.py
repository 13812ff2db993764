"""What a forward gives, what a backward is asked for, what it gives: the same for every backend.

Each has `attend(program, inputs, bound) -> Answer`, and
`backward(program, inputs, bound, result, wanted) -> Gradients`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class Answer(NamedTuple):
    """What a forward gives."""

    out: torch.Tensor  # [B, Hq, Lq, Dv]
    lse: torch.Tensor  # [B, Hq, Lq], natural log, -inf for a row without keys
    # What rounding took from out, in 2 bits an element: int32 [B, Hq, Lq, 4 * ceil(Dv / 64)], in
    # the order of `packed` in templates/triton/tile.py; None where it is not kept.
    residual: torch.Tensor | None = None

    @property
    def residuals(self) -> tuple[torch.Tensor, ...]:
        """The residual as an argument of a kernel that writes it."""
        return () if self.residual is None else (self.residual,)


@dataclass(frozen=True)
class Result:
    """A forward's answer and what came back for it."""

    out: torch.Tensor  # [B, Hq, Lq, Dv]
    lse: torch.Tensor  # [B, Hq, Lq], natural log, -inf for a row without keys
    grad_out: torch.Tensor  # like out; any strides
    grad_lse: torch.Tensor | None  # like lse; None where nothing came
    residual: torch.Tensor | None = None  # as the forward gave it

    @property
    def given(self) -> dict[str, bool]:
        """What the kernel that looks at each row is specialised for."""
        return {
            "has_grad_lse": self.grad_lse is not None,
            "has_residual": self.residual is not None,
        }

    @property
    def residuals(self) -> tuple[torch.Tensor, ...]:
        """The residual as the last argument of the kernel that looks at each row."""
        return () if self.residual is None else (self.residual,)


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

"""What is the same for all pairs of one call, and the pairs that are looked at."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import ScoremodError, Span
from .values import Value, as_known, number_value

RESERVED = ("s", "b", "h", "hk", "i", "j", "q_len", "kv_len")
DIM_OF_INDEX = {"b": "B", "h": "H", "hk": "Hk", "i": "Lq", "j": "Lk"}


@dataclass(frozen=True, eq=False)
class Call:
    """What one call gives: captures and sizes."""

    given: Mapping[str, Any]
    precision: torch.dtype
    device: torch.device
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    q_offset: int | Tensor
    # (capture, axis) -> the indices that this dimension is read at exactly; see `_survey`.
    exact: dict[tuple[str, int], set[str]] = field(default_factory=dict)

    def number(self, x: bool | int | float) -> Value:
        return number_value(x, self.precision, self.device)

    def literal(self, x: bool | int | float) -> Value:
        return as_known(self.number(x))

    def extent(self, dim: str) -> float:
        """The size that a dimension of that name broadcasts to."""
        q_end = math.inf if isinstance(self.q_offset, Tensor) else self.q_offset + self.q_len
        extents = {
            "B": self.batch,
            "H": self.q_heads,
            "Hk": self.kv_heads,
            "Lk": self.kv_len,
            "Lq": q_end,
            "L": max(q_end, self.kv_len),
        }
        return extents[dim]


@dataclass(frozen=True, eq=False)
class View:
    """The pairs that an expression is evaluated at, and how its captures are called outside."""

    call: Call
    indices: Mapping[str, Tensor]  # b, h, hk, i, j: int64
    s: Value
    renamed: Callable[[str], str] = lambda name: name

    def reserved(self, name: str) -> Value:
        """A reserved name."""
        if name == "s":
            return self.s
        if name in ("q_len", "kv_len"):
            return replace(self.call.number(getattr(self.call, name)), index=name)
        data = self.indices[name]
        return Value(data, data, self.call.precision, index=name)


def score_value(data: Tensor, precision: torch.dtype) -> Value:
    return Value(data, data.detach(), precision, reads_s=True)


class Located:
    """Gives an error that has no place yet this one."""

    def __init__(self, span: Span | None) -> None:
        self.span = span

    def __enter__(self) -> None: ...

    def __exit__(self, _type: Any, error: BaseException | None, _traceback: Any) -> None:
        if isinstance(error, ScoremodError) and error.span is None:
            error.span = self.span

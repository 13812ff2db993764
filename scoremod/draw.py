"""Values for captures that nobody gave, by declared type: for timing and for checking.

doc: i32[B, L]   ->   sorted ids        slopes: f32[H]   ->   normal        window: int   ->   1..L
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from .binding import DTYPE_OF
from .ir.capture import MISSING, Capture, Kind
from .ir.ops import Type
from .plan import Param, assumed_params
from .variant import Program

DOCUMENT = 1024  # mean length of drawn documents


class Shape(NamedTuple):
    """The sizes of a call."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int

    def __str__(self) -> str:
        heads = f"{self.q_heads}" if self.q_heads == self.kv_heads else self._pair(1, 2)
        return f"{self.batch}x{heads}x{self._pair(3, 4)}x{self._pair(5, 6)}"

    def _pair(self, first: int, second: int) -> str:
        x, y = self[first], self[second]
        return f"{x}" if x == y else f"{x}/{y}"


def draw_missing(
    program: Program,
    fixed: Mapping[str, Any],
    shape: Shape,
    given: Mapping[str, Any],
    *,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> dict[str, tuple[Any, str]]:
    """Values for captures that have none, by declared type, each with what was drawn."""
    rng = torch.Generator(device).manual_seed(seed)
    found = {}
    for item, param in zip(program.captures, assumed_params(program), strict=True):
        has_value = item.free is not None or item.default is not MISSING
        if has_value or item.name in given or item.name in fixed:
            continue
        found[item.name] = _drawn(item, param, shape, rng)
    return found


def _drawn(item: Capture, param: Param, shape: Shape, rng: torch.Generator) -> tuple[Any, str]:
    """Floats are normal, bools even, ints of positions sorted ids, other ints in 1..L."""
    longest = max(shape.q_len, shape.kv_len, 1)
    sizes = {"B": shape.batch, "H": shape.q_heads, "Hk": shape.kv_heads}
    sizes |= {"Lq": shape.q_len, "Lk": shape.kv_len, "L": longest}
    names = item.dims if item.dims is not None else (None,) * param.rank
    # Long enough for any distance that indexes it.
    dims = [d if isinstance(d, int) else sizes.get(d or "", 2 * longest + 1) for d in names]
    dtype = DTYPE_OF[{"int": "i32", "float": "f32"}.get(param.element, param.element)]
    if param.type is Type.FLOAT:
        value, words = torch.randn(dims, generator=rng, device=rng.device), "normal"
    elif param.type is Type.BOOL:
        value, words = torch.rand(dims, generator=rng, device=rng.device) < 0.5, "true or false"
    elif any(d in ("L", "Lq", "Lk") for d in names):
        axis = max(k for k, d in enumerate(names) if d in ("L", "Lq", "Lk"))
        mean = min(DOCUMENT, max(2, longest // 8))
        starts = torch.rand(dims, generator=rng, device=rng.device) < 1 / mean
        value, words = starts.cumsum(axis), "sorted ids"
    else:
        value = torch.randint(1, longest + 1, dims, generator=rng, device=rng.device)
        words = f"ints in 1..{longest}"
    if dtype is not torch.bool and not dtype.is_floating_point:
        value = value.clamp(max=torch.iinfo(dtype).max)
    if item.kind is Kind.SCALAR:
        number = value.item()
        return number, f"{item.declaration} = {number} ({words})"
    return value.to(dtype), f"{item.declaration} {tuple(dims)} ({words})"

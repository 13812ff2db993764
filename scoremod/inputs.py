"""What a call gives, checked: tensors and options.

Shapes: q [B, Hq, Lq, D], k [B or 1, Hk, Lk, D], v [B or 1, Hk, Lk, Dv]; out [B, Hq, Lq, Dv] and
lse float32 [B, Hq, Lq], natural log.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .binding import Bound, Sizes
from .blocks import Blocks
from .errors import InputMismatch
from .ir.capture import Kind
from .ir.ops import Type
from .plan import Typed
from .plan_triton import residual_words

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32, torch.float64)
PRECISIONS = ("auto", "exact", "fast")


@dataclass(frozen=True)
class Inputs:
    """The tensors and options of a call, checked."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float | torch.Tensor
    q_offset: int | torch.Tensor
    kv_lens: torch.Tensor | None
    precision: str = "auto"
    tiles: Any = None  # prepared Tiles, or the user's Blocks
    deterministic: bool | None = None  # None: as torch's own switch says
    keeps_residual: bool = False  # the forward is to write what rounding takes from out

    @property
    def sizes(self) -> Sizes:
        batch, q_heads, q_len, _ = self.q.shape
        return Sizes(
            batch,
            q_heads,
            self.k.shape[1],
            q_len,
            self.k.shape[2],
            self.q_offset if isinstance(self.q_offset, int) else None,
        )

    @property
    def must_repeat(self) -> bool:
        """Whether gradients have to be the same bits in each run."""
        if self.deterministic is None:
            return torch.are_deterministic_algorithms_enabled()
        return self.deterministic

    @property
    def gqa_group(self) -> int:
        return self.q.shape[1] // max(1, self.k.shape[1])


def check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | torch.Tensor | None,
    q_offset: int | torch.Tensor,
    kv_lens: torch.Tensor | None,
    precision: str,
) -> Inputs:
    """Check what the caller gave; autocast's dtype is applied first."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise InputMismatch(f"{name} must be a tensor, not {type(x).__name__}")
        if x.ndim != 4:
            raise InputMismatch(
                f"{name} must have 4 dimensions [batch, heads, length, head dim], "
                f"but has shape {tuple(x.shape)}"
            )
    q, k, v = autocast(q, k, v)
    _check_dtypes(q, k, v)
    _check_shapes(q, k, v)
    if precision not in PRECISIONS:
        raise InputMismatch(f"precision must be auto, exact or fast, not {precision!r}")
    return Inputs(
        q,
        k,
        v,
        _checked_scale(scale, q),
        *check_positions(q_offset, kv_lens, q.shape[0], q.shape[2], q.device),
        precision,
    )


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k and v in the dtype that autocast asks for, if it does."""
    kind = tensors[0].device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        return tuple(x.to(dtype) if x.dtype is not torch.float64 else x for x in tensors)
    return tensors


def _check_dtypes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise InputMismatch(
            f"q, k and v must share a dtype, but are {q.dtype}, {k.dtype} and {v.dtype}",
            hint="convert them, or call under torch.autocast",
        )
    if q.dtype not in DTYPES:
        raise InputMismatch(f"q, k and v must be floats (16, 32 or 64 bit), not {q.dtype}")
    if not q.device == k.device == v.device:
        raise InputMismatch(f"q, k and v are on {q.device}, {k.device} and {v.device}")


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.shape[3] != k.shape[3]:
        raise InputMismatch(f"q and k must have the same head dim: {shapes}")
    if k.shape[1:3] != v.shape[1:3]:
        raise InputMismatch(f"k and v must have the same heads and length: {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise InputMismatch(f"the query heads must be a multiple of the kv heads: {shapes}")
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] not in (1, q.shape[0]):
            raise InputMismatch(f"the batch of {name} must be 1 or that of q: {shapes}")
    if q.shape[3] == 0:
        raise InputMismatch(f"the head dim must be at least 1: {shapes}")


def _checked_scale(scale: float | torch.Tensor | None, q: torch.Tensor) -> float | torch.Tensor:
    if scale is None:
        return 1.0 / math.sqrt(q.shape[3])
    if isinstance(scale, torch.Tensor):
        if scale.ndim != 0 or not scale.is_floating_point():
            raise InputMismatch(f"scale must be a 0-d float tensor, not {tuple(scale.shape)}")
        if scale.requires_grad:
            raise InputMismatch(
                "scale must not require grad",
                hint="a learned scale is a capture: multiply s by it in the variant",
            )
        return scale
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise InputMismatch(f"scale must be a number, not {type(scale).__name__}")
    return float(scale)


def check_positions(
    q_offset: int | torch.Tensor,
    kv_lens: torch.Tensor | None,
    batch: int,
    q_len: int,
    device: torch.device,
) -> tuple[int | torch.Tensor, torch.Tensor | None]:
    """Where i begins and j ends, checked."""
    return _checked_offset(q_offset, batch, q_len), _checked_lens(kv_lens, batch, device)


def _checked_offset(q_offset: int | torch.Tensor, batch: int, q_len: int) -> int | torch.Tensor:
    if isinstance(q_offset, torch.Tensor):
        if q_offset.dtype not in (torch.int32, torch.int64) or q_offset.shape != (batch,):
            raise InputMismatch(
                f"q_offset must be an int or an int tensor [{batch}], "
                f"not {q_offset.dtype} {tuple(q_offset.shape)}"
            )
        return q_offset
    if isinstance(q_offset, bool) or not isinstance(q_offset, int):
        raise InputMismatch(f"q_offset must be an int, not {type(q_offset).__name__}")
    if not 0 <= q_offset < 2**31 - max(1, q_len):
        raise InputMismatch(f"q_offset must be at least 0 and below 2**31, not {q_offset}")
    return q_offset


def _checked_lens(
    kv_lens: torch.Tensor | None, batch: int, device: torch.device
) -> torch.Tensor | None:
    if kv_lens is None:
        return None
    if not isinstance(kv_lens, torch.Tensor) or kv_lens.shape != (batch,):
        shape = tuple(getattr(kv_lens, "shape", ()))
        raise InputMismatch(f"kv_lens must be an int32 tensor [{batch}], not {shape}")
    if kv_lens.dtype not in (torch.int32, torch.int64):
        raise InputMismatch(f"kv_lens must be int32, not {kv_lens.dtype}")
    if kv_lens.device != device:
        raise InputMismatch(f"kv_lens is on {kv_lens.device}, but q is on {device}")
    return kv_lens


def empty_like_q(q: torch.Tensor, v_head_dim: int) -> torch.Tensor:
    """An output with q's dimension order in memory: a transposed view gives a transposed one."""
    strides = q.stride()
    shape = (*q.shape[:3], v_head_dim)
    if strides[0] >= strides[1] >= strides[2]:
        return torch.empty(shape, dtype=q.dtype, device=q.device)
    order = sorted(range(3), key=lambda axis: -strides[axis])
    sizes = [*(shape[axis] for axis in order), v_head_dim]
    out = torch.empty(sizes, dtype=q.dtype, device=q.device)
    inverse = sorted(range(3), key=order.__getitem__)
    return out.permute(*inverse, 3)


def empty_residual(q: torch.Tensor, v_head_dim: int) -> torch.Tensor:
    """Room for what rounding takes from an output (`gradients.Result.residual`)."""
    shape = (*q.shape[:3], residual_words(v_head_dim))
    return torch.empty(shape, dtype=torch.int32, device=q.device)


def bound_of(program: Typed, bound: tuple[Bound, ...]) -> tuple[Bound, ...]:
    """The values of a program's captures, out of those of a call."""
    return tuple(x for x in bound if x.param in program.params)


def shared_values(
    q_offset: int | torch.Tensor, kv_lens: torch.Tensor | None, bound: Sequence[Bound]
) -> list[Any]:
    """The run-time values that every kernel of a variant takes (`plan_triton.shared_arguments`)."""
    values = [_in_int32(q_offset)]
    if kv_lens is not None:
        values.append(_in_int32(kv_lens))
    for item in bound:
        values += _capture_arguments(item)
    return values


def _in_int32(value: int | torch.Tensor) -> Any:
    return value.to(torch.int32) if isinstance(value, torch.Tensor) else value


def _capture_arguments(item: Bound) -> list[Any]:
    if item.param.kind is Kind.TENSOR:
        assert isinstance(item.value, torch.Tensor)
        table = item.value.detach()
        return [table, *table.shape, *table.stride()]
    if isinstance(item.value, torch.Tensor):
        return [item.value.detach()]
    return [int(item.value) if item.param.type is Type.BOOL else item.value]


def needs_grad(inputs: Inputs, bound: tuple[Bound, ...]) -> bool:
    """Whether the call would have to record a backward."""
    tensors = [inputs.q, inputs.k, inputs.v, *(x.given for x in bound)]
    return torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in tensors
    )


def needs_residual(program: Typed, inputs: Inputs) -> bool:
    """Whether what rounding takes from the output of a call with gradients would show in them."""
    if inputs.q.dtype not in HALVES or program.bundle:
        return False
    return isinstance(inputs.tiles, Blocks) or not program.sees_many_keys


def as_numpy(bound: tuple[Bound, ...], *, float64: bool = False) -> Mapping[str, Any]:
    """Captured values for the analysis on the host: NumPy arrays, floats rounded to float32."""
    return {
        item.param.name: torch.as_tensor(item.value)
        .detach()
        .cpu()
        .to(dtype_of(item, float64))
        .numpy()
        for item in bound
    }


def dtype_of(item: Bound, float64: bool) -> torch.dtype:
    """What a captured value is computed with on the host."""
    real = torch.float64 if float64 else torch.float32
    return {Type.BOOL: torch.bool, Type.INT: torch.int64}.get(item.param.type, real)

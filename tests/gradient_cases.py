"""Shared by the tests of gradients: leaves, a loss of out and LSE, comparison with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from attention_cases import agree, f64, on
from torch import Tensor

# Triton's interpreter is slow: it has cases of its own.
DIFFERENTIABLE = ("cpu", "triton") if torch.cuda.is_available() else ("cpu",)
each_differentiable = pytest.mark.parametrize("backend", DIFFERENTIABLE)
# Of gradients of values of size 1.
TOLERANCE = {f64: 1e-10, torch.float32: 3e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def leaf(value: Any) -> Any:
    """A float tensor as a leaf that requires grad; anything else as it is."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    return value


def weights(like: Tensor) -> Tensor:
    make = torch.Generator().manual_seed(3)
    return torch.randn(like.shape, generator=make).to(like)


def loss(out: Tensor, lse: Tensor) -> Tensor:
    """Each output with a weight of its own; the LSE of rows that have one."""
    lse = torch.where(lse == -torch.inf, 0, lse)
    return (out * weights(out)).sum() + (lse * weights(lse)).sum()


def gradients(
    attend: Callable[..., Any], qkv: tuple[Tensor, ...], captures: Mapping[str, Any], **call: Any
) -> Iterator[Tensor]:
    """The gradients of q, k, v and every float captured."""
    leaves = [leaf(x) for x in qkv]
    learned = {name: leaf(x) for name, x in captures.items()}
    loss(*attend(*leaves, return_lse=True, **call, **learned)).backward()
    for x in (*leaves, *learned.values()):
        if isinstance(x, Tensor) and x.requires_grad:
            # What only a condition reads has none in torch; its gradient is 0.
            yield torch.zeros_like(x) if x.grad is None else x.grad


def compare_gradients(
    variant: Any,
    qkv: tuple[Tensor, ...],
    backend: str,
    captures: Mapping[str, Any] | None = None,
    **call: Any,
) -> list[Tensor]:
    """Assert that a backend's gradients are the oracle's, and give them."""
    qkv, call = tuple(on(backend, x) for x in qkv), on(backend, call)
    captures = on(backend, dict(captures or {}))
    found = list(gradients(variant, qkv, captures, backend=backend, **call))
    wanted = list(gradients(variant.eager, qkv, captures, **call))
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype is y.dtype and x.shape == y.shape
        # Of a capture, many pairs are summed.
        size = max(1.0, float(y.detach().abs().nan_to_num(0).max())) if y.numel() else 1.0
        agree(x / size, y / size, max(TOLERANCE[qkv[0].dtype], TOLERANCE[x.dtype]))
    return found

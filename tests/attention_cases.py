"""Shared by the tests of whole calls: backends, tensors, and the comparison with the oracle."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

# Triton reads it when it is imported; with a GPU the kernels run there.
if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton was imported before TRITON_INTERPRET=1 was set")
    os.environ["TRITON_INTERPRET"] = "1"

import scoremod

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the other cores have workers of their own

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DEVICE = {"cpu": "cpu", "triton": "cuda" if torch.cuda.is_available() else "cpu"}
BACKENDS = tuple(DEVICE)
# Of outputs of values of size 1: float32's rounding, or that of p and of the output itself.
TOLERANCE = {f64: 1e-10, f32: 1e-5, f16: 3e-3, bf16: 2.5e-2}

each_backend = pytest.mark.parametrize("backend", BACKENDS)
NOOP = scoremod.parse("variant noop() { mask True }")


@functools.cache
def interpreter_multiplies(dtype: torch.dtype) -> bool:
    """Whether a product of two 16 x 16 tiles of this type is right here."""
    if DEVICE["triton"] == "cuda":
        return True
    q, k, v = (x.to(dtype) for x in tensors(Shape(1, 1, 1, 16, 16, 16)))
    found = NOOP(q, k, v, backend="triton").float()
    return torch.allclose(found, NOOP.eager(q, k, v).float(), atol=TOLERANCE[dtype])


def skip_unless_right(backend: str, dtype: torch.dtype) -> None:
    """Skip what Triton's interpreter computes wrongly: its bf16 products are of bit patterns."""
    if backend == "triton" and dtype is bf16 and not interpreter_multiplies(dtype):
        pytest.skip("Triton's interpreter multiplies the bit patterns of bf16")


@dataclass(frozen=True)
class Shape:
    """The sizes of a call."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int = 16
    v_head_dim: int = 16

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return (
            (self.batch, self.q_heads, self.q_len, self.head_dim),
            (self.batch, self.kv_heads, self.kv_len, self.head_dim),
            (self.batch, self.kv_heads, self.kv_len, self.v_head_dim),
        )

    def __str__(self) -> str:
        return (
            f"{self.batch}x{self.q_heads}.{self.kv_heads}x{self.q_len}.{self.kv_len}"
            f"x{self.head_dim}.{self.v_head_dim}"
        )


def tensors(shape: Shape, dtype: torch.dtype = f32, seed: int = 0) -> tuple[Tensor, ...]:
    """Normal q, k and v."""
    make = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(x, generator=make).to(dtype) for x in shape.shapes)


def on(backend: str, value: Any) -> Any:
    """A tensor, several, or a dictionary of captures, on the device of a backend."""
    if isinstance(value, tuple):
        return tuple(on(backend, x) for x in value)
    if isinstance(value, dict):
        return {name: on(backend, x) for name, x in value.items()}
    return value.to(DEVICE[backend]) if isinstance(value, Tensor) else value


def compare(
    variant: Any, qkv: tuple[Tensor, ...], backend: str, tolerance: float | None = None, **call: Any
) -> tuple[Tensor, Tensor]:
    """Call a backend, assert that it agrees with the oracle, and give (out, lse).

    The oracle computes in float64. 16-bit inputs are given to it as float32 and not as float64,
    so that it, too, decides pairs in float32.
    """
    q, k, v = (on(backend, x) for x in qkv)
    call = on(backend, call)
    out, lse = variant(q, k, v, backend=backend, return_lse=True, **call)
    exact = (x if x.dtype is f64 else x.float() for x in (q, k, v))
    wanted, wanted_lse = variant.eager(*exact, return_lse=True, **call)
    assert out.dtype is q.dtype and out.device == q.device and out.shape == wanted.shape
    assert lse.dtype is wanted_lse.dtype
    agree(out, wanted, tolerance or TOLERANCE[q.dtype])
    agree(lse, wanted_lse, max(1e-5, tolerance or 0))
    return out, lse


def agree(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Equal to within a tolerance, and non-finite in the same places."""
    torch.testing.assert_close(
        found.to(wanted.dtype), wanted, rtol=tolerance, atol=tolerance, equal_nan=True
    )


def identical(found: Any, wanted: Any) -> bool:
    """Whether two results are equal bit by bit, as far as numbers go."""
    pairs = zip(found, wanted, strict=True)
    return all(torch.equal(x.nan_to_num(77), y.nan_to_num(77)) for x, y in pairs)


# -- captures of other lengths -----------------------------------------------------------------


def stretched(
    variant: Any, captures: dict[str, Any], shape: Shape, q_offset: int
) -> dict[str, Any]:
    """Captures for another shape: dimensions with a meaning are repeated or cut."""
    q_end = q_offset + shape.q_len
    needs = {
        "B": shape.batch,
        "H": shape.q_heads,
        "Hk": shape.kv_heads,
        "Lq": q_end,
        "Lk": shape.kv_len,
        "L": max(q_end, shape.kv_len),
    }
    dims = dict(_declared(variant))
    return {
        name: _stretch(x, [needs.get(d) for d in dims[name]]) if isinstance(x, np.ndarray) else x
        for name, x in captures.items()
    }


def _declared(variant: Any) -> Iterator[tuple[str, list[str]]]:
    for declaration in variant.captures:
        found = re.fullmatch(r"(\w+): \w+\[(.*)\]", declaration)
        if found:
            yield found[1], found[2].split(", ")


def _stretch(table: np.ndarray[Any, Any], needs: list[int | None]) -> Tensor:
    for axis, need in enumerate(needs):
        if need is not None and table.shape[axis] > 1:
            table = table.take(np.arange(need) % table.shape[axis], axis)
    return torch.from_numpy(table)

"""A dozen awkward calls, small and each by itself, for compute-sanitizer.

    python tests/sanitize.py                      # compiles into the cache; then, from the cache,
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no \\
        --error-exitcode 9 python tests/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python tests/sanitize.py --backend triton

Errors of API calls are cuda-bindings' questions for functions that an older driver lacks. Racecheck
reports all Hopper kernels, whose warps wait for each other at mbarriers.

Without torch's caching every tensor has an allocation of its own, so that memcheck sees the first
byte beyond it. Answers are compared with the oracle on the CPU, which the tools do not slow down.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import scoremod
from scoremod import variants as v

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
LIMIT = {bf16: 0.1, f16: 0.02, f32: 1e-3}  # of values of size 1


@dataclass(frozen=True)
class Case:
    """A call: sizes as batch, query heads, kv heads, q_len, kv_len, head dim, value head dim."""

    variant: Any
    sizes: tuple[int, int, int, int, int, int, int]
    dtype: torch.dtype = bf16
    backend: str = "triton"
    captures: Callable[[], dict[str, Any]] = dict
    learned: tuple[str, ...] = ()
    options: Callable[[], dict[str, Any]] = dict
    layout: Callable[[Tensor], Tensor] = field(default=lambda x: x)
    backward: bool = True


def documents(batch: int, length: int, mean: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"doc": (torch.arange(length) // mean).int().expand(batch, -1).contiguous()}


def decoding() -> dict[str, Any]:
    return {"q_offset": torch.tensor([4, 69, 0]), "kv_lens": torch.tensor([5, 70, 0]).int()}


def inside(x: Tensor) -> Tensor:
    """Rows that begin at odd addresses."""
    return torch.nn.functional.pad(x, (3, 2))[..., 3:-2]


SCATTERED = scoremod.parse("variant scattered() { mask (i // 16) * 5 % 3 == (j // 16) % 3 }")
CHECKERED = torch.tensor([[True, False], [True, True]])
CASES = {
    "causal": Case(v.causal, (1, 2, 1, 65, 129, 64, 64)),
    "causal on hopper": Case(v.causal, (1, 2, 1, 130, 257, 128, 128), backend="hopper"),
    "causal on hopper, wide": Case(v.causal, (1, 2, 1, 130, 257, 192, 256), backend="hopper"),
    # More heads than there are sums of dq for.
    "heads in slots on hopper": Case(v.causal, (5, 4, 4, 140, 140, 64, 64), backend="hopper"),
    "window on hopper": Case(
        v.sliding_window.bind(window=40), (2, 2, 2, 129, 129, 64, 64), f16, "hopper"
    ),
    "softcap on hopper": Case(
        v.softcap.bind(cap=20.0) & v.causal, (1, 1, 1, 200, 72, 64, 128), backend="hopper"
    ),
    "turns on hopper": Case(
        v.causal,
        (1, 2, 1, 300, 400, 64, 64),
        backend="hopper",
        options=lambda: {"deterministic": True},
    ),
    "documents and kv_lens on hopper": Case(
        v.document & v.causal,
        (2, 2, 1, 150, 210, 64, 64),
        backend="hopper",
        captures=documents(2, 210, 40),
        options=lambda: {"kv_lens": torch.tensor([210, 33]).int()},
    ),
    "a list of blocks on hopper": Case(
        v.causal,
        (1, 2, 2, 200, 256, 128, 128),
        backend="hopper",
        options=lambda: {"tiles": (CHECKERED, 128)},
    ),
    "documents": Case(
        v.document & v.causal, (2, 2, 1, 97, 97, 64, 64), captures=documents(2, 97, 30)
    ),
    "a map of tiles": Case(SCATTERED, (1, 1, 1, 300, 700, 64, 64)),
    "a list of blocks": Case(
        v.causal, (1, 2, 2, 200, 256, 64, 64), options=lambda: {"tiles": (CHECKERED, 128)}
    ),
    "decoding": Case(v.causal, (3, 8, 2, 1, 70, 80, 48), options=decoding, backward=False),
    "kv_lens": Case(
        v.document,
        (3, 2, 2, 33, 70, 40, 40),
        f16,
        captures=documents(3, 70, 9),
        options=lambda: {"kv_lens": torch.tensor([70, 0, 33]).int()},
    ),
    "odd rows": Case(v.causal, (1, 3, 1, 37, 50, 24, 17), f32, layout=inside),
    "learned slopes": Case(
        v.softcap.then(v.alibi) & v.causal,
        (2, 4, 2, 50, 66, 64, 64),
        captures=lambda: {"slopes": torch.rand(4), "cap": torch.tensor(20.0)},
        learned=("slopes", "cap"),
    ),
    "learned distances": Case(
        v.relative_bias,
        (1, 2, 2, 70, 50, 16, 16),
        f32,
        captures=lambda: {"table": torch.randn(2, 41), "max_distance": 20},
        learned=("table",),
    ),
    "a learned pair": Case(
        v.dense_bias,
        (2, 2, 1, 40, 70, 64, 64),
        captures=lambda: {"bias": torch.randn(1, 2, 40, 70)},
        learned=("bias",),
    ),
    "scattered sums": Case(
        v.graph_bias,
        (2, 2, 2, 33, 36, 16, 16),
        f32,
        captures=lambda: {
            "table": torch.randn(8, 2),
            "dist": (torch.arange(2376).view(2, 33, 36) * 7 % 9).int(),
        },
        learned=("table",),
    ),
}


def run(case: Case, device: str, backend: str | None) -> dict[str, Tensor]:
    """out, lse and gradients on a device; `backend` None is the oracle."""
    torch.manual_seed(0)
    batch, q_heads, kv_heads, q_len, kv_len, dim, v_dim = case.sizes
    shapes = ((batch, q_heads, q_len, dim), (batch, kv_heads, kv_len, dim),
              (batch, kv_heads, kv_len, v_dim))  # fmt: skip
    qkv = [torch.randn(s).to(case.dtype) for s in shapes]
    if backend is None:
        qkv = [x.float() for x in qkv]
    given = {**case.captures(), **case.options()}
    if backend is None and given.keys() & {"tiles", "deterministic"}:
        given["backend"] = "eager"  # which `.eager` does not take
    given = {n: _to(x, device) for n, x in given.items()}
    leaves = {n: case.layout(x.to(device)).detach() for n, x in zip("qkv", qkv, strict=True)}
    leaves |= {n: given[n] for n in case.learned}
    for x in leaves.values():
        x.requires_grad_(case.backward)
    attend = case.variant.eager if backend is None and "backend" not in given else case.variant
    how = {"backend": backend} if backend is not None else {}
    out, lse = attend(*(leaves[n] for n in "qkv"), return_lse=True, **given, **how)
    found = {"out": out.detach(), "lse": lse.detach()}
    if case.backward:
        do = torch.randn(out.shape).to(case.dtype).to(out)
        gradients = torch.autograd.grad(out, list(leaves.values()), do)
        found |= {f"d{n}": g for n, g in zip(leaves, gradients, strict=True)}
    return found


def _to(value: Any, device: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_to(x, device) for x in value)
    return value.to(device) if isinstance(value, Tensor) else value


def check(case: Case, device: str, backend: str) -> str:
    """What is wrong; "" for nothing."""
    found, wanted = run(case, device, backend), run(case, "cpu", None)
    bad = []
    for name, x in found.items():
        x, y = x.cpu().double(), wanted[name].double()
        error = torch.where(x == y, 0, x - y).abs().nan_to_num(torch.inf).max()
        size = max(1.0, float(y[y.isfinite()].abs().max())) if y.isfinite().any() else 1.0
        if error > LIMIT[case.dtype] * size:
            bad.append(f"{name} is off by {float(error):.3g}")
    return "; ".join(bad)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--backend", default="", help="its cases alone: triton or hopper")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    wrong = 0
    for name, case in CASES.items():
        if given.only and name not in given.only.split(","):
            continue
        if given.backend and case.backend != given.backend:
            continue
        start = time.monotonic()
        bad = check(case, given.device, case.backend if given.device == "cuda" else "cpu")
        wrong += bool(bad)
        print(f"{bad or 'right':40} {time.monotonic() - start:5.1f} s  {name}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Peak memory of a forward and its backward, beside the sum of the tensors that it has to hold.

    python benchmarks/memory.py [--commit 0123abc]

Needs a GPU; some seconds. The sum is that of q, k, v, out, their gradients, what comes back for
out, LSE and delta in float32, and captured tables with their gradients. Writes memory.json to
benchmarks/results/, or to $OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import scoremod
from scoremod import bench as benches
from scoremod.variants import causal, document, relative_bias

RESULTS = Path(__file__).parent / "results"
SHAPES = ((2, 16, 8192, 128), (2, 32, 8192, 64))
BACKENDS = ("triton", "hopper")
# What may be held besides, as a part of the sum: without captured gradients, and with.
LIMIT, LIMIT_WITH_CAPTURES = 0.05, 0.15
MAX_DISTANCE = 1024

Sizes = tuple[int, int, int, int]
Captures = Callable[[Sizes], dict[str, Any]]


def table(sizes: Sizes) -> dict[str, Any]:
    """A learned number per head and clipped distance."""
    learned = torch.randn(sizes[1], 2 * MAX_DISTANCE + 1, device="cuda", requires_grad=True)
    return {"table": learned, "max_distance": MAX_DISTANCE}


def documents(sizes: Sizes) -> dict[str, Any]:
    doc = (torch.arange(sizes[2], device="cuda") // 1000).int()
    return {"doc": doc.expand(sizes[0], -1).contiguous()}


CASES: dict[str, tuple[scoremod.Variant, Captures]] = {
    "noop": (scoremod.parse("variant noop() { mask True }"), lambda sizes: {}),
    "causal": (causal, lambda sizes: {}),
    "document & causal": (document & causal, documents),
    "learned distances": (relative_bias & causal, table),
}


def measured(name: str, sizes: Sizes, backend: str) -> dict[str, Any]:
    """Bytes of one case; everything is compiled before."""
    variant, make = CASES[name]
    captures = make(sizes)
    learned = [x for x in captures.values() if isinstance(x, torch.Tensor) and x.requires_grad]

    def step() -> int:
        torch.cuda.synchronize()
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        qkv = [
            torch.randn(sizes, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        ]
        out = variant(*qkv, backend=backend, **captures)
        out.backward(torch.ones_like(out))
        torch.cuda.synchronize()
        for x in learned:
            x.grad = None
        return torch.cuda.max_memory_allocated() - start

    step()
    peak = step()
    rows, tables = sizes[0] * sizes[1] * sizes[2], sum(x.nbytes for x in learned)
    held = 8 * 2 * rows * sizes[3] + 2 * 4 * rows + tables
    over = peak / held - 1
    limit = LIMIT_WITH_CAPTURES if learned else LIMIT
    shape = "x".join(map(str, sizes))
    row = {"case": name, "shape": shape, "backend": backend, "peak": peak, "sum": held}
    return {**row, "over": round(over, 4), "limit": limit, "good": over <= limit}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--commit", help="where git cannot tell it")
    given = options.parse_args()
    rows = []
    for sizes in SHAPES:
        for name in CASES:
            for backend in BACKENDS:
                try:
                    rows.append(measured(name, sizes, backend))
                except scoremod.errors.ScoremodError as error:
                    print(f"{name}, {backend}: {error}".splitlines()[0])
                    continue
                print(rows[-1], flush=True)
    folder = Path(os.environ.get("OUT") or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    record = {"machine": benches.machine(given.commit), "rows": rows}
    (folder / "memory.json").write_text(json.dumps(record, indent=1) + "\n")
    return any(not row["good"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())

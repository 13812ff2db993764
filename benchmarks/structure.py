"""What it costs to know which tiles a mask leaves, beside FlexAttention's create_block_mask.

    python benchmarks/structure.py [--rounds 20] [--commit 0123abc]

Needs a GPU; about a minute on an H200. Writes structure.json to benchmarks/results/, or to $OUT.
GPU time is that of the kernels alone (a CUDA graph of ten); wall time is from the call to the
synchronised result, with everything compiled and warm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from forward import documents
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from scoremod import bench as benches
from scoremod.variants import causal, document, sliding_window

RESULTS = Path(__file__).parent / "results"
MASK = document & causal
WINDOW = 1024


def wall_us(work: Callable[[], object], rounds: int) -> float:
    """The median time from a call to its synchronised result."""
    times = []
    for _ in range(rounds + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times[3:])


def gpu_us(work: Callable[[], object], rounds: int) -> float:
    """The median GPU time of a call, out of a graph of ten."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            work()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / 10)
    return statistics.median(times)


def document_mod(doc: torch.Tensor) -> Callable[..., Any]:
    return lambda b, h, i, j: (doc[b, i] == doc[b, j]) & (j <= i)


def window_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (j <= i) & (i - j < WINDOW)


def of_documents(batch: int, length: int, rounds: int, *, flex: bool) -> dict[str, Any]:
    """Documents and causal: the structure alone."""
    doc = documents(batch, length).cuda()
    tiles = MASK.prepare(length, length, batch=batch, doc=doc)
    q = torch.randn(batch, 1, length, 64, device="cuda", dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    MASK(q, q, q, doc=doc, tiles=tiles)
    torch.cuda.synchronize()
    # Without the output, and the lse in float32.
    answer = q.nbytes + 4 * batch * length
    found = {
        "case": f"documents & causal, B={batch}, {length}",
        "gpu_us": gpu_us(tiles.refresh, rounds),
        "wall_us": wall_us(tiles.refresh, rounds),
        "bytes": tiles.nbytes,
        "peak_bytes": torch.cuda.max_memory_allocated() - before - answer,
    }
    if flex:
        make = torch.compile(create_block_mask, dynamic=False)
        mod = document_mod(doc)
        found["flex_wall_us"] = wall_us(
            lambda: make(mod, batch, None, length, length, device="cuda"), rounds
        )
    return found


def with_mask(name: str, rounds: int) -> dict[str, Any]:
    """A call whose mask is new, from the call to the synchronised result."""
    batch, heads, length, head_dim = 2, 16, 8192, 128
    q, k, v = (
        torch.randn(batch, heads, length, head_dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(3)
    )
    doc = documents(batch, length).cuda()
    attend = torch.compile(flex_attention, dynamic=False)
    if name == "documents & causal":
        mod, mask_batch = document_mod(doc), batch

        def ours() -> object:
            return MASK(q, k, v, doc=doc)
    else:
        mod, mask_batch = window_mod, None

        def ours() -> object:
            return sliding_window(q, k, v, window=WINDOW)

    def eager_mask() -> Any:
        return create_block_mask(mod, mask_batch, None, length, length, device="cuda")

    compiled = torch.compile(create_block_mask, dynamic=False)

    def compiled_mask() -> Any:
        return compiled(mod, mask_batch, None, length, length, device="cuda")

    times = {
        "ours_us": ours,
        "flex_compiled_mask_us": lambda: attend(q, k, v, block_mask=compiled_mask()),
        "flex_eager_mask_us": lambda: attend(q, k, v, block_mask=eager_mask()),
    }
    found = {key: wall_us(work, rounds) for key, work in times.items()}
    return {"case": f"{name} with its mask, {batch}x{heads}x{length}x{head_dim}", **found}


def cases(rounds: int) -> Iterator[dict[str, Any]]:
    """The rows, one after the other."""
    yield of_documents(2, 8192, rounds, flex=True)
    yield of_documents(2, 131_072, rounds, flex=False)
    yield of_documents(1, 1_000_000, rounds, flex=False)
    yield with_mask("documents & causal", rounds)
    yield with_mask(f"window {WINDOW}", rounds)
    tiles = causal.prepare(1_000_000, 1_000_000, device="cuda")
    yield {"case": "causal, 1000000", "bytes": tiles.nbytes}


@torch.no_grad()
def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--commit", help="where git cannot tell it")
    given = options.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for row in cases(given.rounds):
        print({k: round(x, 1) if isinstance(x, float) else x for k, x in row.items()}, flush=True)
        rows.append(row)
    folder = Path(os.environ.get("OUT") or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    record = {"machine": benches.machine(given.commit), "rows": rows}
    (folder / "structure.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

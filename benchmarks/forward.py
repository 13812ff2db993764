"""The portable forward beside FlexAttention and SDPA, interleaved, in one command.

    python benchmarks/forward.py [--only causal,softcap] [--shapes 2x16x8192x128] [--rounds 5]

Needs a GPU; under 4 minutes on an H200. Writes forward.json and forward.md to benchmarks/results/,
or to $OUT. Ratios are FlexAttention's time over ours, so above 1 is faster; its mask's time is not
counted. A checkout without git is told its commit by --commit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import scoremod
from scoremod import bench as benches
from scoremod.bench import FLEX, OURS, BenchResult, Case, Shape
from scoremod.variants import (
    alibi,
    alibi_slopes,
    causal,
    document,
    forget_gate,
    sliding_window,
    softcap,
)

RESULTS = Path(__file__).parent / "results"
SHAPES = ("2x16x8192x128", "2x32x8192x64")
AGAINST = ("flex", "sdpa")
# What a row should reach; the others are to be as fast as FlexAttention.
WANTED = {"softcap & causal": 1.5, "window 1024": 1.15, "document & causal": 1.15}


def documents(batch: int, length: int, mean: int = 1024) -> torch.Tensor:
    """Ids [batch, length] of documents of mean / 4 to 2 * mean tokens."""
    rng = torch.Generator().manual_seed(1)
    ids = torch.zeros(batch, length, dtype=torch.int32)
    for row in ids:
        start = number = 0
        while start < length:
            tokens = int(torch.randint(mean // 4, mean * 2, (1,), generator=rng))
            row[start : start + tokens] = number
            start, number = start + tokens, number + 1
    return ids


def gates(batch: int, heads: int, length: int) -> torch.Tensor:
    """Sums of the logs of forget gates, a twentieth a token."""
    rng = torch.Generator().manual_seed(1)
    return (-0.1 * torch.rand(batch, heads, length, generator=rng)).cumsum(-1)


NOOP = scoremod.parse("variant noop() { mask True }")
# name -> (variant, its captures for a shape)
CASES: dict[str, tuple[scoremod.Variant, Callable[[Shape], dict[str, Any]]]] = {
    "noop": (NOOP, lambda shape: {}),
    "causal": (causal, lambda shape: {}),
    "alibi & causal": (alibi & causal, lambda shape: {"slopes": alibi_slopes(shape.q_heads)}),
    "softcap & causal": (softcap & causal, lambda shape: {}),
    "window 1024": (sliding_window, lambda shape: {"window": 1024}),
    "document & causal": (
        document & causal,
        lambda shape: {"doc": documents(shape.batch, shape.kv_len)},
    ),
    "forget gates & causal": (
        forget_gate & causal,
        lambda shape: {"log_decay": gates(shape.batch, shape.q_heads, shape.kv_len)},
    ),
}
Task = tuple[str, Shape]


def parse_shape(text: str) -> Shape:
    batch, heads, length, head_dim = map(int, text.split("x"))
    return Shape(batch, heads, heads, length, length, head_dim, head_dim)


def portable(name: str, shape: Shape) -> Case:
    """A case for the kernels that run on any GPU, also where there are better ones."""
    variant, captures = CASES[name]
    dtype, backend = torch.bfloat16, "triton"
    return benches.prepare(variant, shape, dtype, captures(shape), "cuda", backend=backend)


# -- compile in parallel -----------------------------------------------------------------------


def warm(task: Task) -> str:
    """Call every candidate once, so that its kernels lie in the caches on disk."""
    name, shape = task
    rig = replace(COLD_RIG, compile=lambda f: torch.compile(f, dynamic=False))
    with torch.no_grad():
        case = portable(name, shape)
        made = [benches.candidate(peer, case, rig) for peer in (OURS, FLEX)]
    return "; ".join(c.note for c in made if c.note)


def warm_all(tasks: Sequence[Task], workers: int) -> None:
    start = time.perf_counter()
    # One compile thread each: the processes are the parallelism.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for (name, shape), note in zip(tasks, pool.map(warm, tasks), strict=True):
            if note:
                print(f"{name} {shape}: {note}", flush=True)
    del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)


def nothing() -> None:
    """No heater: nothing is timed."""


COLD_RIG = benches.Rig("cuda", benches.gpu_elapsed, nothing, torch.compile)


# -- time and tell -----------------------------------------------------------------------------


def row(name: str, result: BenchResult) -> dict[str, Any]:
    flex_ratio = result[FLEX].ratio
    wanted = WANTED.get(name, 1.0)
    good = flex_ratio is not None and flex_ratio >= wanted
    return {"name": name, "flex_ratio": flex_ratio, "wanted": wanted, "good": good}


def cells(result: BenchResult) -> list[str]:
    return [
        "-" if t.ms is None or t.tflops is None else f"{t.ms:.3f} ({t.tflops:.0f})"
        for t in result.timings
    ]


def markdown(rows: Sequence[dict[str, Any]], results: Sequence[BenchResult]) -> str:
    first = results[0]
    machine = first.machine
    peers = [t.name for t in first.timings]
    lines = [
        "# The portable forward beside FlexAttention and SDPA",
        "",
        f"{machine['gpu']}; {versions(machine)}; commit {machine['commit']}; {machine['date']}.",
        f"Command: `{machine['command']}`. {first.dtype}, all candidates of a row interleaved in",
        "one process with a heater; median ms (TFLOP/s of the pairs that the mask keeps).",
        "FlexAttention's block mask and our tile structure, where a mask needs one, are made",
        "before and not counted.",
        "",
        f"| shape | variant | {' | '.join(peers)} | FlexAttention / ours "
        "| block mask, ms | structure, ms |",
        f"|---|---|{'---|' * len(peers)}---|---|---|",
    ]
    for made, result in zip(rows, results, strict=True):
        ratio = "-" if made["flex_ratio"] is None else f"{made['flex_ratio']:.2f}"
        mask = "-" if result.block_mask_ms is None else f"{result.block_mask_ms:.2f}"
        ours = "-" if result.structure_ms is None else f"{result.structure_ms:.2f}"
        words = [str(result.shape), made["name"], *cells(result), ratio, mask, ours]
        lines.append(f"| {' | '.join(words)} |")
    notes = [
        f"* {made['name']}, {result.shape}: {t.name}: {t.note}"
        for made, result in zip(rows, results, strict=True)
        for t in result.timings
        if t.note and "it has no" not in t.note
    ]
    return "\n".join([*lines, *([""] if notes else []), *notes, ""])


def versions(machine: Any) -> str:
    names = ("torch", "triton", "cuda", "cudnn", "python", "scoremod")
    return ", ".join(f"{name} {machine[name]}" for name in names)


def short(rows: Sequence[dict[str, Any]], results: Sequence[BenchResult]) -> str:
    lines = []
    for made, result in zip(rows, results, strict=True):
        tflops = "  ".join(
            f"{t.name} {'-' if t.tflops is None else format(t.tflops, '.0f')}"
            for t in result.timings
        )
        ratio = "  -  " if made["flex_ratio"] is None else f"{made['flex_ratio']:5.2f}"
        verdict = "ok" if made["good"] else f"below {made['wanted']}"
        lines.append(f"{result.shape!s:15} {made['name']:18} {ratio} {verdict:10} {tflops}")
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", default=",".join(CASES), help="names with commas between")
    options.add_argument("--shapes", default=",".join(SHAPES), help="BxHxNxD with commas between")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    options.add_argument("--commit", help="where git cannot tell it")
    given = options.parse_args()
    names = [n for n in CASES if any(n.startswith(x) for x in given.only.split(","))]
    tasks = [(name, parse_shape(text)) for text in given.shapes.split(",") for name in names]

    start = time.perf_counter()
    if not torch.cuda.is_available():
        sys.exit("this needs a GPU, and torch sees none")
    if given.workers > 1:
        warm_all(tasks, given.workers)
    machine = benches.machine(given.commit)
    rig = benches.gpu_rig()
    rows, results = [], []
    for name, shape in tasks:
        case = portable(name, shape)
        result = benches.measure(case, benches.peers(AGAINST), rig, given.rounds, machine)
        rows.append(row(name, result))
        results.append(result)
        print(short(rows[-1:], results[-1:]), f"[{time.perf_counter() - start:.0f} s]", flush=True)

    folder = Path(os.environ.get("OUT") or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    both = [{**made, **result.record()} for made, result in zip(rows, results, strict=True)]
    (folder / "forward.json").write_text(json.dumps(both, indent=1) + "\n")
    (folder / "forward.md").write_text(markdown(rows, results))
    print(f"\n{machine['gpu']}, {versions(machine)}, {time.perf_counter() - start:.0f} s in all")
    print(short(rows, results))


if __name__ == "__main__":
    main()

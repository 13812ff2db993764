"""The Hopper backward with `deterministic=True` beside itself without, and beside the portable one.

    python benchmarks/hopper_deterministic.py [--only causal] [--shapes 2x16x8192x128] [--rounds 5]

Needs an sm_90 GPU. The candidates of a row take turns in one process, a heater before each;
forwards are not counted. Gradients of two deterministic runs must be the same bits. Writes
hopper_deterministic.json and hopper_deterministic.md to benchmarks/results/, or to $OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from backward import compare, prepared
from forward import RESULTS, parse_shape
from hopper import PORTABLE, Row
from hopper_backward import hopper_call, portable_call

from scoremod import bench as benches
from scoremod.bench import Candidate, Case, Rig, Shape

SHAPES = ("2x16x8192x128", "2x32x8192x64")
NAMES = ("noop", "causal", "alibi & causal", "window 1024", "document & causal")
ORDERED, UNORDERED = "deterministic", "default"


def built(case: Case, do: torch.Tensor) -> list[Candidate]:
    """The three candidates, the deterministic one first."""
    calls = {
        ORDERED: hopper_call(case, do, deterministic=True),
        UNORDERED: hopper_call(case, do),
        PORTABLE: portable_call(case, do),
    }
    first, second = calls[ORDERED](), calls[ORDERED]()
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True)), "other bits"
    found = [Candidate(peer, call) for peer, call in calls.items()]
    compare(found)
    return found


def measure(name: str, shape: Shape, rig: Rig, rounds: int) -> Row:
    case, do = prepared(name, shape)
    candidates = built(case, do)
    benches.race(candidates, rig, rounds)
    flop = 2 * benches.kept_pairs(case) * (3 * shape.head_dim + 2 * shape.v_head_dim)
    return Row(
        str(shape),
        name,
        {c.name: flop / statistics.median(c.rounds_ms) / 1e9 for c in candidates},
        {c.name: c.rounds_ms for c in candidates},
        {c.name: c.error for c in candidates},
        {},
    )


COLUMNS = (ORDERED, UNORDERED, PORTABLE)


def line(row: Row) -> str:
    cells = [f"{row.tflops[c]:.0f}" for c in COLUMNS]
    cells += [f"{row.tflops[ORDERED] / row.tflops[c]:.2f}" for c in (UNORDERED, PORTABLE)]
    return f"| {' | '.join([row.shape, row.variant, *cells])} |"


def markdown(rows: list[Row], machine: dict[str, Any]) -> str:
    words = ", ".join(f"{k} {machine[k]}" for k in ("torch", "triton", "cuda"))
    return "\n".join(
        [
            "# The Hopper backward with the same bits in each run",
            "",
            f"{machine['gpu']}; {words}; commit {machine['commit']}; {machine['date']}.",
            f"Command: `{machine['command']}`. bf16, TFLOP/s of five products for the pairs that",
            "the mask keeps, the median of the rounds; candidates of a row interleaved in one",
            "process with a heater. All kernels of a backward are counted; what says which tiles",
            "documents leave was made before.",
            "",
            f"| shape | variant | {' | '.join(COLUMNS)} | / {UNORDERED} | / {PORTABLE} |",
            f"|---|---|{'---|' * (len(COLUMNS) + 2)}",
            *map(line, rows),
            "",
        ]
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", default=",".join(NAMES), help="names with commas between")
    options.add_argument("--shapes", default=",".join(SHAPES), help="BxHxNxD with commas between")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--commit", help="where git cannot tell it")
    given = options.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("this needs an sm_90 GPU")
    start, rig = time.perf_counter(), benches.gpu_rig()
    machine, rows = benches.machine(given.commit), []
    folder = Path(os.environ.get("OUT") or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    for shape in map(parse_shape, given.shapes.split(",")):
        for name in (n for n in NAMES if any(n.startswith(x) for x in given.only.split(","))):
            rows.append(measure(name, shape, rig, given.rounds))
            print(line(rows[-1]), f"[{time.perf_counter() - start:.0f} s]", flush=True)
            record = {"machine": machine, "rows": [asdict(r) for r in rows]}
            (folder / "hopper_deterministic.json").write_text(json.dumps(record, indent=1) + "\n")
            (folder / "hopper_deterministic.md").write_text(markdown(rows, machine))
    print(markdown(rows, machine))


if __name__ == "__main__":
    main()

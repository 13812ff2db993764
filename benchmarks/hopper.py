"""The Hopper forward beside FlashAttention-4, FlexAttention, cuDNN and the portable kernels.

    python benchmarks/hopper.py [--only causal,softcap] [--shapes 2x16x8192x128] [--rounds 5]
                                [--peers FlashAttention-4,FlexAttention]

Needs an sm_90 GPU, and flash-attn-4 for that peer. All candidates of a row take turns in one
process, a heater before each. Writes hopper.json and hopper.md to benchmarks/results/, or to $OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from forward import CASES, RESULTS, parse_shape

from scoremod import bench as benches
from scoremod.bench import CUDNN, FLEX, OURS, Candidate, Case, Rig

SHAPES = ("2x16x8192x128", "1x32x16384x64", "2x8x8192x256")
PORTABLE, FA4 = "portable", "FlashAttention-4"


@dataclass(frozen=True)
class Row:
    """One case: TFLOP/s of each candidate, of the pairs that the mask keeps, and its notes."""

    shape: str
    variant: str
    tflops: dict[str, float]
    rounds_ms: dict[str, list[float]]
    errors: dict[str, float | None]
    notes: dict[str, str]

    def ratio(self, peer: str) -> float | None:
        """The peer's time over ours: above 1, ours is faster."""
        return self.tflops[OURS] / self.tflops[peer] if peer in self.tflops else None


def built(name: str, case: Case, rig: Rig, peers: Collection[str]) -> list[Candidate]:
    """Every candidate, called once."""
    stock = (OURS, *(peer for peer in (FLEX, CUDNN) if peer in peers))
    found = [benches.candidate(peer, case, rig) for peer in stock]
    calls: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {
        PORTABLE: lambda: lambda: _portable(case),
        FA4: lambda: _fa4(name, case),
    }
    for peer, make in calls.items():
        if peer not in peers:
            continue
        made = Candidate(peer)
        try:
            made.call = make()
            made.first_s = rig.first(made.call)
        except Exception as error:  # a peer that fails is a note in the table
            made.call, made.note = None, f"{type(error).__name__}: {str(error)[:160]}"
        found.append(made)
    return found


def _portable(case: Case) -> torch.Tensor:
    given = {"tiles": case.tiles, **case.captures}
    out: torch.Tensor = case.variant(case.q, case.k, case.v, backend="triton", **given)
    return out


def _fa4(name: str, case: Case) -> Callable[[], torch.Tensor]:
    from peer_fa4 import fa4

    return fa4(name, case)


@torch.no_grad()
def measure(name: str, shape: benches.Shape, rig: Rig, rounds: int, peers: Collection[str]) -> Row:
    variant, captures = CASES[name]
    case = benches.prepare(variant, shape, torch.bfloat16, captures(shape), "cuda")
    candidates = built(name, case, rig, peers)
    benches.compare(candidates, case.q.dtype)
    benches.race(candidates, rig, rounds)
    flop = 2 * benches.kept_pairs(case) * (shape.head_dim + shape.v_head_dim)
    return Row(
        str(shape),
        name,
        {c.name: flop / statistics.median(c.rounds_ms) / 1e9 for c in candidates if c.rounds_ms},
        {c.name: c.rounds_ms for c in candidates if c.rounds_ms},
        {c.name: c.error for c in candidates},
        {c.name: c.note for c in candidates if c.note},
    )


PEERS = (FA4, CUDNN, FLEX, PORTABLE)
COLUMNS = (OURS, *PEERS)


def line(row: Row) -> str:
    cells = [f"{row.tflops[c]:.0f}" if c in row.tflops else "-" for c in COLUMNS]
    ratios = [row.ratio(peer) for peer in (FA4, FLEX)]
    cells += ["-" if r is None else f"{r:.2f}" for r in ratios]
    return f"| {' | '.join([row.shape, row.variant, *cells])} |"


def markdown(rows: list[Row], machine: dict[str, object]) -> str:
    words = ", ".join(f"{k} {machine[k]}" for k in ("torch", "triton", "cuda", "cudnn"))
    notes = [f"* {r.variant}, {r.shape}: {n}: {w}" for r in rows for n, w in r.notes.items()]
    return "\n".join(
        [
            "# The Hopper forward beside its peers",
            "",
            f"{machine['gpu']}; {words}; commit {machine['commit']}; {machine['date']}.",
            f"Command: `{machine['command']}`. bf16, TFLOP/s of the pairs that the mask keeps, the",
            "median of the rounds; candidates of a row interleaved in one process with a heater.",
            "What says which tiles documents leave was made before, for all candidates.",
            "",
            f"| shape | variant | {' | '.join(COLUMNS)} | ours / {FA4} | ours / {FLEX} |",
            f"|---|---|{'---|' * (len(COLUMNS) + 2)}",
            *map(line, rows),
            *(["", *notes] if notes else []),
            "",
        ]
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", default=",".join(CASES), help="names with commas between")
    options.add_argument("--peers", default=",".join(PEERS), help="names with commas between")
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
        for name in (n for n in CASES if any(n.startswith(x) for x in given.only.split(","))):
            rows.append(measure(name, shape, rig, given.rounds, given.peers.split(",")))
            print(line(rows[-1]), f"[{time.perf_counter() - start:.0f} s]", flush=True)
            record = {"machine": machine, "rows": [asdict(r) for r in rows]}
            (folder / "hopper.json").write_text(json.dumps(record, indent=1) + "\n")
            (folder / "hopper.md").write_text(markdown(rows, machine))
    print(markdown(rows, machine))


if __name__ == "__main__":
    main()

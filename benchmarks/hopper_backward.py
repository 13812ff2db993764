"""The Hopper backward beside FlashAttention-4, FlexAttention, cuDNN and the portable backward.

    python benchmarks/hopper_backward.py [--only causal,softcap] [--shapes 2x16x8192x128]

Needs an sm_90 GPU, and flash-attn-4 for that peer. All candidates of a row take turns in one
process, a heater before each; forwards are not counted. Writes hopper_backward.json and
hopper_backward.md to benchmarks/results/, or to $OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from backward import CUDNN, FLEX, OURS, compare, ours, prepared, theirs
from forward import RESULTS, parse_shape
from hopper import FA4, PORTABLE, Row

from scoremod import attend_hopper, backward_hopper, backward_triton
from scoremod import bench as benches
from scoremod.bench import Candidate, Case, Rig, Shape

SHAPES = ("2x16x8192x128", "1x32x16384x64")
NAMES = (
    "noop",
    "causal",
    "alibi & causal",
    "softcap & causal",
    "window 1024",
    "document & causal",
    "forget gates & causal",
    "learned slopes",
)
PEERS = (FLEX, CUDNN, PORTABLE, FA4)
Call = Callable[[], Any]


def hopper_call(case: Case, do: torch.Tensor, *, deterministic: bool = False) -> Call:
    """Ours."""
    attend, backward = attend_hopper.attend, backward_hopper.backward
    return ours(case, do, attend, backward, deterministic=deterministic)


def portable_call(case: Case, do: torch.Tensor) -> Call:
    """The portable backward of the same forward."""
    return ours(case, do, attend_hopper.attend, backward_triton.backward)


def fa4(name: str, case: Case, do: torch.Tensor) -> Call:
    """FlashAttention-4's, whose tensors are [batch, length, heads, head dim]."""
    from flash_attn.cute.interface import flash_attn_func
    from peer_fa4 import OPTIONS

    if name not in OPTIONS or "score_mod" in OPTIONS[name]:
        raise benches.NotComparable("its backward is given no such score here")
    leaves = [
        x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (case.q, case.k, case.v)
    ]
    found = flash_attn_func(*leaves, **OPTIONS[name])
    out, back = found[0] if isinstance(found, tuple) else found, do.transpose(1, 2).contiguous()

    def call() -> list[torch.Tensor]:
        gradients = torch.autograd.grad(out, leaves, back, retain_graph=True)
        return [x.transpose(1, 2) for x in gradients]

    return call


def built(
    name: str, case: Case, do: torch.Tensor, rig: Rig, peers: Sequence[str]
) -> list[Candidate]:
    """Ours and these, each called once."""
    calls: dict[str, Callable[[], Call]] = {
        OURS: lambda: hopper_call(case, do),
        FLEX: lambda: theirs(case, do, FLEX, rig),
        CUDNN: lambda: theirs(case, do, CUDNN, rig),
        PORTABLE: lambda: portable_call(case, do),
        FA4: lambda: fa4(name, case, do),
    }
    found = []
    for peer in (OURS, *peers):
        made = Candidate(peer)
        try:
            made.call = calls[peer]()
            made.call()
        except Exception as error:  # a peer that fails is a note in the table
            if peer == OURS:
                raise
            made.call, made.note = None, f"{type(error).__name__}: {str(error)[:160]}"
        found.append(made)
    return found


def measure(name: str, shape: Shape, rig: Rig, rounds: int, peers: Sequence[str]) -> Row:
    case, do = prepared(name, shape)
    candidates = built(name, case, do, rig, peers)
    compare(candidates)
    benches.race(candidates, rig, rounds)
    flop = 2 * benches.kept_pairs(case) * (3 * shape.head_dim + 2 * shape.v_head_dim)
    timed = [c for c in candidates if c.rounds_ms]
    return Row(
        str(shape),
        name,
        {c.name: flop / statistics.median(c.rounds_ms) / 1e9 for c in timed},
        {c.name: c.rounds_ms for c in timed},
        {c.name: c.error for c in candidates},
        {c.name: c.note for c in candidates if c.note},
    )


COLUMNS = (OURS, FA4, CUDNN, FLEX, PORTABLE)


def line(row: Row) -> str:
    cells = [f"{row.tflops[c]:.0f}" if c in row.tflops else "-" for c in COLUMNS]
    ratios = [row.ratio(peer) for peer in (FA4, FLEX)]
    cells += ["-" if r is None else f"{r:.2f}" for r in ratios]
    return f"| {' | '.join([row.shape, row.variant, *cells])} |"


def markdown(rows: list[Row], machine: dict[str, Any]) -> str:
    words = ", ".join(f"{k} {machine[k]}" for k in ("torch", "triton", "cuda", "cudnn"))
    notes = [f"* {r.variant}, {r.shape}: {n}: {w}" for r in rows for n, w in r.notes.items()]
    return "\n".join(
        [
            "# The Hopper backward beside its peers",
            "",
            f"{machine['gpu']}; {words}; commit {machine['commit']}; {machine['date']}.",
            f"Command: `{machine['command']}`. bf16, TFLOP/s of five products for the pairs that",
            "the mask keeps, the median of the rounds; candidates of a row interleaved in one",
            "process with a heater. What comes before and after the main kernel is counted; what",
            "says which tiles documents leave was made before, for all candidates.",
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
    options.add_argument("--only", default=",".join(NAMES), help="names with commas between")
    options.add_argument("--shapes", default=",".join(SHAPES), help="BxHxNxD with commas between")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--peers", default=",".join(PEERS), help="names with commas between")
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
            rows.append(measure(name, shape, rig, given.rounds, given.peers.split(",")))
            print(line(rows[-1]), f"[{time.perf_counter() - start:.0f} s]", flush=True)
            record = {"machine": machine, "rows": [asdict(r) for r in rows]}
            (folder / "hopper_backward.json").write_text(json.dumps(record, indent=1) + "\n")
            (folder / "hopper_backward.md").write_text(markdown(rows, machine))
    print(markdown(rows, machine))


if __name__ == "__main__":
    main()

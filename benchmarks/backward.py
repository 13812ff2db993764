"""The portable backward beside FlexAttention and SDPA, interleaved, in one command.

    python benchmarks/backward.py [--only causal,softcap] [--shapes 2x16x8192x128] [--rounds 5]

Needs a GPU; under 4 minutes on an H200. Writes backward.json and backward.md to
benchmarks/results/, or to $OUT. Ratios are FlexAttention's time over ours, so above 1 is faster;
the forward is not counted. A checkout without git is told its commit by --commit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from forward import CASES as FORWARD_CASES
from forward import COLD_RIG, RESULTS, SHAPES, parse_shape, versions

import scoremod
from scoremod import attend_triton, backward_triton
from scoremod import bench as benches
from scoremod.bench import CUDNN, FLASH, FLEX, OURS, Candidate, Case, Rig, Shape
from scoremod.gradients import Gradients, Result, Wanted
from scoremod.inputs import check_inputs, needs_residual
from scoremod.variants import alibi, alibi_slopes, causal, relative_bias

PEERS = (FLEX, CUDNN, FLASH)
WANTED = {"softcap & causal": 1.5, "learned distances": 3.0}
MAX_DISTANCE = 1024
# Two bf16 results of sums of thousands of terms, as norm(difference) / norm(ours).
TOLERANCE = 2e-2


def table(shape: Shape) -> dict[str, Any]:
    """A learned number per head and clipped distance."""
    learned = torch.randn(shape.q_heads, 2 * MAX_DISTANCE + 1, device="cuda", requires_grad=True)
    return {"table": learned, "max_distance": MAX_DISTANCE}


def slopes(shape: Shape) -> dict[str, Any]:
    """ALiBi's, which learn."""
    return {"slopes": alibi_slopes(shape.q_heads).cuda().requires_grad_()}


CASES: dict[str, tuple[scoremod.Variant, Callable[[Shape], dict[str, Any]]]] = {
    **FORWARD_CASES,
    "learned distances": (relative_bias & causal, table),
    "learned slopes": (alibi & causal, slopes),
}
Task = tuple[str, Shape]

# -- candidates --------------------------------------------------------------------------------


def prepared(name: str, shape: Shape) -> tuple[Case, torch.Tensor]:
    """The tensors of a case, and what comes back for its output."""
    variant, captures = CASES[name]
    case = benches.prepare(variant, shape, torch.bfloat16, captures(shape), "cuda")
    for x in (case.q, case.k, case.v):
        x.requires_grad_()
    return case, torch.randn_like(case.q)


def learned(case: Case) -> list[str]:
    values = case.captures.items()
    return [n for n, x in values if isinstance(x, torch.Tensor) and x.requires_grad]


def ours(
    case: Case,
    do: torch.Tensor,
    attend: Callable[..., Any] = attend_triton.attend,
    backward: Callable[..., Gradients] = backward_triton.backward,
    *,
    deterministic: bool = False,
) -> Callable[[], Any]:
    """Our backward alone, from one forward: the kernels and what is done with their sums."""
    inputs = check_inputs(
        case.q, case.k, case.v, scale=None, q_offset=0, kv_lens=None, precision="auto"
    )
    # Made before, as FlexAttention's block mask is.
    inputs = replace(inputs, tiles=case.tiles, deterministic=deterministic)
    inputs = replace(inputs, keeps_residual=needs_residual(case.program, inputs))
    with torch.no_grad():
        out, lse, residual = attend(case.program, inputs, case.bound)
    names = learned(case)
    wanted = Wanted(True, True, True, frozenset(names))
    result = Result(out, lse, do, None, residual)

    def call() -> list[torch.Tensor | None]:
        found = backward(case.program, inputs, case.bound, result, wanted)
        return [found.q, found.k, found.v, *(found.captures[name] for name in names)]

    return call


def theirs(case: Case, do: torch.Tensor, name: str, rig: Rig) -> Callable[[], Any]:
    """A peer's backward by autograd, from one forward."""
    # With its own choice of stages a captured table does not fit into shared memory.
    made = benches.candidate(name, case, rig, {"num_stages": 1} if learned(case) else None)
    if made.call is None:
        raise benches.NotComparable(made.note)
    out = made.call()
    leaves = [case.q, case.k, case.v, *(case.captures[n] for n in learned(case))]
    return lambda: torch.autograd.grad(out, leaves, do, retain_graph=True)


def candidate(name: str, case: Case, do: torch.Tensor, rig: Rig) -> Candidate:
    """A candidate, called once; a peer that fails becomes a note."""
    made = Candidate(name)
    try:
        made.call = ours(case, do) if name == OURS else theirs(case, do, name, rig)
        made.call()
    except Exception as error:
        if name == OURS:
            raise
        made.call, made.note = None, (str(error).strip().splitlines() or [repr(error)])[0][:160]
    return made


def compare(candidates: Sequence[Candidate]) -> None:
    """The largest distance of a gradient from ours; what is too far is not timed."""
    assert candidates[0].call is not None
    wanted: Any = candidates[0].call()
    for peer in candidates[1:]:
        if peer.call is not None:
            pairs = list(zip(peer.call(), wanted, strict=True))
            peer.error = max(float((x - y).float().norm() / y.float().norm()) for x, y in pairs)
            if not peer.error <= TOLERANCE:
                peer.call, peer.note = None, f"differs from ours by {peer.error:.1e}: not timed"


def warm(task: Task, names: Sequence[str]) -> str:
    """Call what is compiled once, so that its kernels lie in the caches on disk."""
    rig = replace(COLD_RIG, compile=lambda f: torch.compile(f, dynamic=False))
    case, do = prepared(*task)
    made = [candidate(name, case, do, rig) for name in names]
    return "; ".join(c.note for c in made if c.note)


def warm_all(tasks: Sequence[Task], names: Sequence[str], workers: int) -> None:
    start = time.perf_counter()
    # One compile thread each: the processes are the parallelism.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        notes = pool.map(partial(warm, names=names), tasks)
        for (name, shape), note in zip(tasks, notes, strict=True):
            if note:
                print(f"{name} {shape}: {note}", flush=True)
    del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)


# -- time and tell -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One case; times are medians in ms, and every round's."""

    name: str
    shape: Shape
    flop: int  # of the five products of the pairs that the mask keeps
    ms: dict[str, float]
    rounds_ms: dict[str, list[float]]
    errors: dict[str, float | None]
    notes: dict[str, str]

    @property
    def ratio(self) -> float | None:
        return self.ms[FLEX] / self.ms[OURS] if FLEX in self.ms else None

    @property
    def wanted(self) -> float:
        return WANTED.get(self.name, 1.0)

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "not comparable"
        return "ok" if self.ratio >= self.wanted else f"below {self.wanted}"

    def cell(self, name: str) -> str:
        if name not in self.ms:
            return "-"
        return f"{self.ms[name]:.3f} ({self.flop / self.ms[name] / 1e9:.0f})"


def measure(task: Task, peers: Sequence[str], rig: Rig, rounds: int) -> Row:
    case, do = prepared(*task)
    candidates = [candidate(name, case, do, rig) for name in (OURS, *peers)]
    compare(candidates)
    benches.race(candidates, rig, rounds)
    timed = [c for c in candidates if c.rounds_ms]
    widths = 3 * case.shape.head_dim + 2 * case.shape.v_head_dim
    return Row(
        *task,
        2 * benches.kept_pairs(case) * widths,
        {c.name: statistics.median(c.rounds_ms) for c in timed},
        {c.name: c.rounds_ms for c in timed},
        {c.name: c.error for c in candidates},
        {c.name: c.note for c in candidates if c.note},
    )


def markdown(rows: Sequence[Row], machine: Any) -> str:
    lines = [
        "# The portable backward beside FlexAttention and SDPA",
        "",
        f"{machine['gpu']}; {versions(machine)}; commit {machine['commit']}; {machine['date']}.",
        f"Command: `{machine['command']}`. bf16, all candidates of a row interleaved in one",
        "process with a heater; median ms (TFLOP/s of five products for the pairs that the mask",
        "keeps).",
        "",
        f"| shape | variant | {' | '.join((OURS, *PEERS))} | FlexAttention / ours | wanted |",
        f"|---|---|{'---|' * (1 + len(PEERS))}---|---|",
    ]
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        cells = [row.cell(name) for name in (OURS, *PEERS)]
        lines.append(
            f"| {' | '.join([str(row.shape), row.name, *cells, ratio, str(row.wanted)])} |"
        )
    notes = [
        f"* {row.name}, {row.shape}: {name}: {note}"
        for row in rows
        for name, note in row.notes.items()
        if "it has no" not in note
    ]
    return "\n".join([*lines, *([""] if notes else []), *notes, ""])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", default=",".join(CASES), help="names with commas between")
    options.add_argument("--shapes", default=",".join(SHAPES), help="BxHxNxD with commas between")
    options.add_argument("--against", default="flex,sdpa", help="peers with commas between")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    options.add_argument("--commit", help="where git cannot tell it")
    given = options.parse_args()
    names = [n for n in CASES if any(n.startswith(x) for x in given.only.split(","))]
    tasks = [(name, parse_shape(text)) for text in given.shapes.split(",") for name in names]

    peers = benches.peers(given.against.split(","))
    start = time.perf_counter()
    if not torch.cuda.is_available():
        sys.exit("this needs a GPU, and torch sees none")
    if given.workers > 1:
        warm_all(tasks, [OURS, *(p for p in peers if p == FLEX)], given.workers)
    machine, rig = benches.machine(given.commit), benches.gpu_rig()
    rows = []
    for task in tasks:
        row = measure(task, peers, rig, given.rounds)
        rows.append(row)
        ratio = "  -  " if row.ratio is None else f"{row.ratio:5.2f}"
        cells = "  ".join(f"{name} {row.cell(name)}" for name in (OURS, *PEERS))
        passed = f"[{time.perf_counter() - start:.0f} s]"
        print(
            f"{row.shape!s:15} {row.name:18} {ratio} {row.verdict:12} {cells} {passed}", flush=True
        )

    folder = Path(os.environ.get("OUT") or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    both = {"machine": machine, "rows": [{**asdict(r), "ratio": r.ratio} for r in rows]}
    (folder / "backward.json").write_text(json.dumps(both, indent=1) + "\n")
    (folder / "backward.md").write_text(markdown(rows, machine))


if __name__ == "__main__":
    main()

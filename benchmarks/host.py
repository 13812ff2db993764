"""Time on the host: the first call with empty and with full caches, and a warm call.

    python benchmarks/host.py [--parts first,warm,training,backward,profile]
                              [--repeats 2]

first:    in a process with packages imported and CUDA up, seconds from the call to the synchronised
          result: with empty caches of scoremod and Triton, then in a second process that finds
          scoremod's kernels on disk (and Triton's cache empty).
warm:     host time of a call without grad, median of 1,000, on a tiny problem; SDPA and compiled
          FlexAttention beside it, in turns.
training: the same of the forward of a call whose gradients are wanted.
backward: the same of its backward, by torch.autograd.grad.
profile:  cProfile of 2,000 warm calls, the 25 functions with most cumulative time.

Writes host.json to benchmarks/results/, or to $OUT.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FIRST = ("noop", "alibi & causal", "softcap & causal")
WARM = ("noop", "alibi & causal")
CALLS, TURNS, PROFILED, SHOWN = 1_000, 10, 2_000, 25
LIMITS = {"empty_s": 3.0, "second_s": 0.3, "warm_us": 30.0, "training_us": 60.0}


def variant_of(name: str) -> tuple[Any, dict[str, Any]]:
    """A variant and its captures, for 8 heads."""
    import scoremod
    from scoremod.variants import alibi, alibi_slopes, causal, softcap

    if name == "noop":
        return scoremod.parse("variant noop() { mask True }"), {}
    if name == "alibi & causal":
        return alibi & causal, {"slopes": alibi_slopes(8).cuda()}
    return softcap & causal, {}


def inputs(length: int, head_dim: int, *, learned: bool = False) -> list[Any]:
    import torch

    shape = (1, 8, length, head_dim)
    found = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    return [x.requires_grad_(learned) for x in found]


# -- the first call ----------------------------------------------------------------------------


def first_child(name: str) -> None:
    """In a process of its own: time the first call, and print it."""
    import torch
    import triton  # noqa: F401  (imported, as the measurement says)

    start = time.perf_counter()
    variant, captures = variant_of(name)
    declared = time.perf_counter() - start
    q, k, v = inputs(1024, 128)
    (q[0, 0] @ k[0, 0].T).sum().item()  # CUDA and its libraries are up
    torch.cuda.synchronize()
    times = []
    with torch.no_grad():
        for _ in range(2):
            start = time.perf_counter()
            variant(q, k, v, **captures)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    print(json.dumps({"declare_s": declared, "first_s": times[0], "next_s": times[1]}))


def first_call(name: str) -> dict[str, float]:
    """Seconds with empty caches, and of a second process."""
    with tempfile.TemporaryDirectory() as folder:
        # Triton's own cache is empty for both.
        empty, second = (
            _child(name, {"SCOREMOD_CACHE_DIR": f"{folder}/s", "TRITON_CACHE_DIR": f"{folder}/{n}"})
            for n in range(2)
        )
    return {
        "empty_s": empty["first_s"],
        "second_s": second["first_s"],
        "declare_s": empty["declare_s"],
        "next_s": second["next_s"],
    }


def _child(name: str, caches: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", name]
    environment = {**os.environ, **caches}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if ran.returncode:
        sys.exit(f"{name}: the process failed\n{ran.stderr[-3000:]}")
    found: dict[str, float] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found


def first_part(repeats: int) -> dict[str, Any]:
    """Medians of several processes."""
    found: dict[str, Any] = {}
    for name in FIRST:
        runs = [first_call(name) for _ in range(repeats)]
        found[name] = {key: statistics.median(r[key] for r in runs) for key in runs[0]}
        found[name]["runs"] = runs
    return found


# -- a warm call -------------------------------------------------------------------------------


def calls(*, learned: bool) -> dict[str, Callable[[], Any]]:
    """What is called, by name."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = inputs(128, 64, learned=learned)
    found: dict[str, Callable[[], Any]] = {}
    for name in WARM:
        variant, captures = variant_of(name)
        found[f"scoremod {name}"] = functools.partial(variant, q, k, v, **captures)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    found["SDPA noop"] = lambda: sdpa(q, k, v)
    found["SDPA causal"] = lambda: sdpa(q, k, v, is_causal=True)
    slopes = variant_of("alibi & causal")[1]["slopes"]
    attend = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, 128, 128, device="cuda")

    def alibi(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - slopes[h] * (i - j)

    found["FlexAttention noop"] = lambda: attend(q, k, v)
    found["FlexAttention alibi & causal"] = lambda: attend(
        q, k, v, score_mod=alibi, block_mask=mask
    )
    return found


def warm_part(*, learned: bool) -> dict[str, Any]:
    """Microseconds of the host's part of a call."""
    import torch

    with torch.set_grad_enabled(learned):
        return _in_turns(calls(learned=learned))


def backward_part() -> dict[str, Any]:
    """Microseconds of the host's part of a backward, from the call to its return."""
    import torch

    def back(out: Any, grad_out: Any) -> Any:
        return torch.autograd.grad(out, _leaves(out), grad_out, retain_graph=True)

    found = {}
    for name, call in calls(learned=True).items():
        call()  # what later calls of its kind repeat is decided in the first
        out = call()
        found[name] = functools.partial(back, out, torch.ones_like(out))
    return _in_turns(found)


def _leaves(out: Any) -> list[Any]:
    """The tensors that a result's gradient reaches."""
    nodes = [node for node, _ in out.grad_fn.next_functions if node is not None]
    return [node.variable for node in nodes if hasattr(node, "variable")]


def _in_turns(made: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Each call's median and spread: nothing waits for the GPU."""
    import torch

    times: dict[str, list[float]] = {}
    for call in made.values():
        for _ in range(50):
            call()
    for _ in range(TURNS):
        for name, call in made.items():
            torch.cuda.synchronize()
            times.setdefault(name, []).extend(_each(call, CALLS // TURNS))
    return {name: {"median_us": statistics.median(t), **_spread(t)} for name, t in times.items()}


def _each(call: Callable[[], Any], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        call()
        found.append((time.perf_counter_ns() - start) / 1e3)
    return found


def _spread(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=10)
    return {"low_us": cuts[0], "high_us": cuts[-1]}


# -- where a warm call spends its time ---------------------------------------------------------


def profile_part() -> dict[str, Any]:
    """cProfile of warm calls; its overhead makes small functions look larger than they are."""
    import torch

    found = {}
    for name in WARM:
        variant, captures = variant_of(name)
        q, k, v = inputs(128, 64)
        with torch.no_grad():
            for _ in range(50):
                variant(q, k, v, **captures)
            torch.cuda.synchronize()
            profiler = cProfile.Profile()
            profiler.enable()
            for _ in range(PROFILED):
                variant(q, k, v, **captures)
            profiler.disable()
        found[name] = rows(pstats.Stats(profiler).strip_dirs())
        print(f"\n{PROFILED} warm calls of {name}, per call\n    own us  total us  calls  function")
        for x in found[name]:
            print(f"  {x['own_us']:8.2f}  {x['total_us']:8.2f}  {x['calls']:5.1f}  {x['place']}")
    return found


def rows(stats: pstats.Stats) -> list[dict[str, Any]]:
    """Functions by cumulative time: microseconds a call of the variant, alone and with callees."""
    table = []
    entries: dict[Any, Any] = vars(stats)["stats"]
    for (file, line, function), (_, count, own, cumulative, _) in entries.items():
        place = f"{file}:{line}({function})"
        each = [x / PROFILED * 1e6 for x in (own, cumulative)]
        table.append(
            {"place": place, "calls": count / PROFILED, "own_us": each[0], "total_us": each[1]}
        )
    return sorted(table, key=lambda x: -x["total_us"])[:SHOWN]


# -- tell --------------------------------------------------------------------------------------


def tell(found: dict[str, Any]) -> str:
    lines = []
    for name, x in found.get("first", {}).items():
        lines.append(
            f"first call, {name:18} empty caches {x['empty_s']:6.3f} s ({_limit('empty_s', x)})"
            f"   second process {x['second_s']:6.3f} s ({_limit('second_s', x)})"
        )
    for part in ("warm", "training", "backward"):
        for name, x in found.get(part, {}).items():
            key, limit = f"{part}_us", ""
            if name.startswith("scoremod") and key in LIMITS:
                limit = f"({_limit(key, {key: x['median_us']})})"
            lines.append(
                f"{part} call, {name:30} {x['median_us']:6.1f} us"
                f"  [{x['low_us']:.1f}..{x['high_us']:.1f}] {limit}"
            )
    return "\n".join(lines)


def _limit(key: str, values: dict[str, float]) -> str:
    return f"{'ok' if values[key] <= LIMITS[key] else 'ABOVE'}, limit {LIMITS[key]:g}"


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "first": first_part,
    "warm": lambda repeats: warm_part(learned=False),
    "training": lambda repeats: warm_part(learned=True),
    "backward": lambda repeats: backward_part(),
    "profile": lambda repeats: profile_part(),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--parts", default=",".join(PARTS), help="with commas between")
    options.add_argument("--repeats", type=int, default=2, help="processes of each first call")
    options.add_argument("--commit", help="where git cannot tell it")
    options.add_argument("--child", help=argparse.SUPPRESS)
    given = options.parse_args()

    import torch

    if not torch.cuda.is_available():
        sys.exit("this needs a GPU, and torch sees none")
    if given.child:
        first_child(given.child)
        return
    from scoremod.bench import machine

    found: dict[str, Any] = {"machine": machine(given.commit)}
    for part in given.parts.split(","):
        found[part] = PARTS[part](given.repeats)
    folder = Path(os.environ.get("OUT") or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "host.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['machine']['gpu']}, torch {torch.__version__}")
    print(tell(found))


if __name__ == "__main__":
    main()

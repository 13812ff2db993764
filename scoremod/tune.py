"""Try configurations of the Hopper forward on this GPU, and keep the fastest for later calls.

    print(tune(alibi & causal, shape=(2, 16, 16, 8192, 8192, 128, 128)))

All take turns in one process, as `bench` has it, and are compared with the first. What was found is
noted beside the cache of kernels, for this version of scoremod and of Triton; `explain` names it.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import attend_hopper
from .api import Variant
from .attend_hopper import Ready, ready_of
from .backends.compile_hopper import compile_plan
from .bench import (
    TOLERANCE,
    Candidate,
    Case,
    Rig,
    compare,
    gpu_rig,
    machine,
    prepare,
    race,
    shape_of,
)
from .binding import DTYPE_OF
from .cache import CACHE, fingerprint, key
from .draw import Shape
from .errors import BackendUnavailable, InputMismatch
from .inputs import Inputs, check_inputs
from .launch import device as gpu
from .plan_hopper import Config, HopperPlan, configs_of, hopper_plan, neighbours
from .plan_triton import Options
from .sources import element
from .target import Target

# What tiles, barriers and numbers take besides `HopperPlan.shared`.
ROOM = 4096


@dataclass(frozen=True)
class Tried:
    """A configuration: its median time, or why there is none."""

    config: Config
    ms: float | None
    note: str


@dataclass(frozen=True)
class Tuning:
    """What was tried for a call, and the best, which calls take from now on."""

    variant: str
    shape: Shape
    dtype: str
    tried: tuple[Tried, ...]
    best: Config
    machine: Mapping[str, Any]

    def __str__(self) -> str:
        title = Text(f"{self.variant}, {self.shape} {self.dtype}, {self.machine['gpu']}")
        table = Table(title=title, caption=Text(f"kept: {self.best}"), caption_justify="left")
        for head in ("configuration", "ms", ""):
            table.add_column(head, justify="right" if head == "ms" else "left")
        for one in self.tried:
            table.add_row(str(one.config), "" if one.ms is None else f"{one.ms:.4g}", one.note)
        shown = io.StringIO()
        Console(file=shown, width=110).print(table)
        return shown.getvalue()


def tune(
    variant: Variant,
    *,
    shape: Shape | Sequence[int],
    dtype: torch.dtype | str = torch.bfloat16,
    captures: Mapping[str, Any] | None = None,
    rounds: int = 5,
    seed: int = 0,
) -> Tuning:
    """Find the fastest configuration of the Hopper forward for a call, and keep it."""
    if len(shape) != len(Shape._fields):
        raise InputMismatch(f"shape must be ({', '.join(Shape._fields)}), not {tuple(shape)}")
    rig, wanted = gpu_rig(), DTYPE_OF[element(dtype)]
    if wanted not in TOLERANCE:
        raise InputMismatch(f"tune takes f16 and bf16, not {dtype}")
    case = prepare(variant, Shape(*shape), wanted, captures or {}, rig.device, seed)
    return measure(case, rig, rounds, gpu(case.q.device.index), machine())


@torch.no_grad()
def measure(
    case: Case, rig: Rig, rounds: int, target: Target, made_by: Mapping[str, Any]
) -> Tuning:
    """Compile, compare and time every configuration; note the fastest."""
    inputs = _inputs(case)
    reason = attend_hopper.unsupported(case.program, inputs)
    if reason:
        raise BackendUnavailable(f"there is nothing to tune for this call: {reason}")
    chosen = attend_hopper.options(case.program, inputs, case.bound)
    made = {p.config: _candidate(p, case, chosen, inputs) for p in plans(case, chosen, target)}
    # The first that compiles is what the others are compared with.
    runners = [one for one in made.values() if one.call is not None]
    if not runners:
        notes = "; ".join(f"{config}: {one.note}" for config, one in made.items())
        raise BackendUnavailable(f"no configuration of `{case.variant.name}` compiles: {notes}")
    compare(runners, case.q.dtype)
    race(runners, rig, rounds)
    tried = tuple(Tried(config, _median(one), one.note) for config, one in made.items())
    best = min((one for one in tried if one.ms is not None), key=lambda one: one.ms or 0.0)
    dtype = str(case.q.dtype).removeprefix("torch.")
    measured = {
        "shape": f"{case.shape} {dtype}",
        "gpu": made_by["gpu"],
        "date": made_by["date"],
        "ms": {str(one.config): one.ms for one in tried},
    }
    attend_hopper.keep_tuned(case.program, chosen, target, best.config, measured)
    case.variant._warm.clear()  # recorded calls hold the kernel of before
    return Tuning(case.variant.name, case.shape, dtype, tried, best.config, made_by)


def _median(made: Candidate) -> float | None:
    return statistics.median(made.rounds_ms) if made.rounds_ms else None


def plans(case: Case, chosen: Options, target: Target) -> list[HopperPlan]:
    """A plan for each configuration that fits the multiprocessor."""
    configs = neighbours(configs_of(case.program, chosen))
    made = (hopper_plan(case.program, chosen, target, config) for config in configs)
    return [plan for plan in made if plan.shared + ROOM <= target.shared]


def _inputs(case: Case) -> Inputs:
    inputs = check_inputs(
        case.q, case.k, case.v, scale=None, q_offset=0, kv_lens=None, precision="auto"
    )
    return replace(inputs, tiles=case.tiles)


def _candidate(plan: HopperPlan, case: Case, chosen: Options, inputs: Inputs) -> Candidate:
    """A configuration's kernel, compiled; one that the assembler spoils is not timed."""
    try:
        kernel, complaint = compile_plan(plan, attend_hopper.source(plan))
    except BackendUnavailable as error:
        return Candidate(str(plan.config), note=error.message.partition("\n")[0])
    made = Candidate(str(plan.config), note=complaint)
    if not complaint:
        kernel = replace(kernel, notes=(f"{plan.config}: taken",))
        what = attend_hopper.forward_key(case.program, chosen, plan.config)
        CACHE.get_or_compile(key(fingerprint(), what, plan.target), lambda: kernel)
        made.call = _call(ready_of(kernel), case, chosen, inputs)
    return made


def _call(ready: Ready, case: Case, chosen: Options, inputs: Inputs) -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        out, *_ = attend_hopper.run(ready, case.program, chosen, inputs, case.bound)
        return out

    return call


# -- the command line --------------------------------------------------------------------------


def from_options(variant: Variant, captures: Mapping[str, Any], how: Mapping[str, Any]) -> Tuning:
    """`tune` by the words of `bench` on the command line."""
    shape, words = shape_of(how), {name: how[name] for name in ("dtype", "rounds")}
    return tune(variant, shape=shape, captures=captures, **words)

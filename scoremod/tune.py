"""Try configurations of Hopper's kernels on this GPU, and keep the fastest for later calls.

    print(tune(alibi & causal, shape=(2, 16, 16, 8192, 8192, 128, 128)))
    print(tune(alibi & causal, shape=(2, 16, 16, 8192, 8192, 128, 128), phase="bwd"))

All take turns in one process, as `bench` has it, and are compared with the first. What was found is
noted beside the cache of kernels, for this version of scoremod and of Triton; `explain` names it.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import attend_hopper, backward_hopper, backward_triton
from .api import Variant
from .attention import attend, choose_backend
from .backends import compile_hopper, compile_hopper_backward
from .backends.compile_triton import Kernel
from .backward_hopper_wide import is_wide
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
from .gradients import Result, Wanted
from .inputs import Inputs, check_inputs
from .launch import device as gpu
from .plan_hopper import Config, HopperPlan, configs_of, hopper_plan, neighbours
from .plan_hopper_backward import BackwardConfig, HopperBackwardPlan, hopper_backward_plan
from .plan_hopper_backward import configs_of as backward_configs_of
from .plan_hopper_backward import neighbours as backward_neighbours
from .ready import ready_kernel
from .sources import element
from .target import Target

Phase = Literal["fwd", "bwd"]
Answers = Callable[[], tuple[torch.Tensor, ...]]

# What tiles, barriers and numbers take besides `HopperPlan.shared`.
ROOM = 4096


@dataclass(frozen=True)
class Tried:
    """A configuration: its median time, or why there is none."""

    config: Config | BackwardConfig
    ms: float | None
    note: str


@dataclass(frozen=True)
class Tuning:
    """What was tried for a call, and the best, which calls take from now on."""

    variant: str
    phase: Phase
    shape: Shape
    dtype: str
    tried: tuple[Tried, ...]
    best: Config | BackwardConfig
    machine: Mapping[str, Any]

    def __str__(self) -> str:
        words = [self.variant, f"{self.shape} {self.dtype}", str(self.machine["gpu"])]
        title = Text(", ".join([*words, "backward"] if self.phase == "bwd" else words))
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
    phase: Phase = "fwd",
) -> Tuning:
    """Find the fastest configuration of Hopper's kernel for a call, and keep it.

    `phase="bwd"` looks at the kernel of dq, dk and dv, with what runs before and after it.
    """
    if phase not in PHASES:
        raise InputMismatch(f"phase must be 'fwd' or 'bwd', not {phase!r}")
    if len(shape) != len(Shape._fields):
        raise InputMismatch(f"shape must be ({', '.join(Shape._fields)}), not {tuple(shape)}")
    rig, wanted = gpu_rig(), DTYPE_OF[element(dtype)]
    if wanted not in TOLERANCE:
        raise InputMismatch(f"tune takes f16 and bf16, not {dtype}")
    case = prepare(variant, Shape(*shape), wanted, captures or {}, rig.device, seed)
    return measure(PHASES[phase](case), rig, rounds, gpu(case.q.device.index), machine())


class Tunable(Protocol):
    """A kernel of a call, whose configurations are to be tried."""

    phase: Phase
    case: Case

    @property
    def reason(self) -> str:
        """Why there is nothing to tune; "" for no reason."""

    def plans(self, target: Target) -> Sequence[HopperPlan | HopperBackwardPlan]:
        """A plan for each configuration."""

    def compile(self, plan: Any) -> tuple[Kernel, str]:
        """Its kernel, and what is wrong with it."""

    def key(self, plan: Any) -> tuple[object, ...]:
        """What the cache has the kernel under where its configuration is the best."""

    def call(self, kernel: Kernel) -> Answers:
        """The call, with this kernel."""

    def keep(self, target: Target, config: Any, measured: dict[str, Any]) -> None:
        """Note the best."""


class Forward:
    """The forward of a call."""

    phase: Phase = "fwd"

    def __init__(self, case: Case) -> None:
        self.case, self.inputs = case, _inputs(case)
        self.options = attend_hopper.options(case.program, self.inputs, case.bound)

    @property
    def reason(self) -> str:
        return attend_hopper.unsupported(self.case.program, self.inputs)

    def plans(self, target: Target) -> list[HopperPlan]:
        program, chosen = self.case.program, self.options
        configs = neighbours(configs_of(program, chosen))
        return [hopper_plan(program, chosen, target, config) for config in configs]

    def compile(self, plan: HopperPlan) -> tuple[Kernel, str]:
        return compile_hopper.compile_plan(plan, attend_hopper.source(plan))

    def key(self, plan: HopperPlan) -> tuple[object, ...]:
        return attend_hopper.forward_key(self.case.program, self.options, plan.config)

    def call(self, kernel: Kernel) -> Answers:
        ready, case = attend_hopper.ready_of(kernel), self.case
        return lambda: (
            attend_hopper.run(ready, case.program, self.options, self.inputs, case.bound).out,
        )

    def keep(self, target: Target, config: Config, measured: dict[str, Any]) -> None:
        attend_hopper.keep_tuned(self.case.program, self.options, target, config, measured)


class Backward:
    """The backward of a call, from one forward."""

    phase: Phase = "bwd"

    def __init__(self, case: Case) -> None:
        self.case, inputs = case, _inputs(case)
        with torch.no_grad():
            backend, _ = choose_backend(case.program, inputs, case.bound, case.backend)
            out, lse, _ = attend(case.program, inputs, case.bound, backend)
        result = Result(out, lse, torch.randn_like(out), None)
        wanted = Wanted(True, True, True)
        self.of = backward_triton.call_of(case.program, inputs, case.bound, result, wanted)
        self.options = backward_hopper.options_of(self.of)

    @property
    def reason(self) -> str:
        if is_wide(self.options):
            return "the backward of head dims above 128 has one configuration"
        return backward_hopper.unfit(self.case.program, self.of.inputs)

    def plans(self, target: Target) -> list[HopperBackwardPlan]:
        program, chosen = self.case.program, self.options
        configs = backward_neighbours(backward_configs_of(program, chosen))
        return [hopper_backward_plan(program, chosen, target, config) for config in configs]

    def compile(self, plan: HopperBackwardPlan) -> tuple[Kernel, str]:
        return compile_hopper_backward.compile_plan(plan, backward_hopper.source(plan))

    def key(self, plan: HopperBackwardPlan) -> tuple[object, ...]:
        return backward_hopper.backward_key(self.case.program, self.options, plan.config)

    def call(self, kernel: Kernel) -> Answers:
        kernels = backward_hopper.around(self.of, ready_kernel(kernel, self.of.device))
        return lambda: backward_hopper.tensor_gradients(self.of, kernels, {})

    def keep(self, target: Target, config: BackwardConfig, measured: dict[str, Any]) -> None:
        backward_hopper.keep_tuned(self.case.program, self.options, target, config, measured)


PHASES: dict[str, Callable[[Case], Tunable]] = {"fwd": Forward, "bwd": Backward}


@torch.no_grad()
def measure(
    tuned: Tunable, rig: Rig, rounds: int, target: Target, made_by: Mapping[str, Any]
) -> Tuning:
    """Compile, compare and time every configuration; note the fastest."""
    case = tuned.case
    if reason := tuned.reason:
        raise BackendUnavailable(f"there is nothing to tune for this call: {reason}")
    fitting = (p for p in tuned.plans(target) if p.shared + ROOM <= target.shared)
    made = {plan.config: _candidate(tuned, plan) for plan in fitting}
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
    tuned.keep(target, best.config, measured)
    case.variant._warm.clear()  # recorded calls hold the kernel of before
    return Tuning(case.variant.name, tuned.phase, case.shape, dtype, tried, best.config, made_by)


def _median(made: Candidate) -> float | None:
    return statistics.median(made.rounds_ms) if made.rounds_ms else None


def _inputs(case: Case) -> Inputs:
    inputs = check_inputs(
        case.q, case.k, case.v, scale=None, q_offset=0, kv_lens=None, precision="auto"
    )
    return replace(inputs, tiles=case.tiles)


def _candidate(tuned: Tunable, plan: HopperPlan | HopperBackwardPlan) -> Candidate:
    """A configuration's kernel, compiled; one that the assembler spoils is not timed."""
    try:
        kernel, complaint = tuned.compile(plan)
    except BackendUnavailable as error:
        return Candidate(str(plan.config), note=error.message.partition("\n")[0])
    made = Candidate(str(plan.config), note=complaint)
    if not complaint:
        kernel = replace(kernel, notes=(f"{plan.config}: taken",))
        CACHE.get_or_compile(key(fingerprint(), tuned.key(plan), plan.target), lambda: kernel)
        made.call = tuned.call(kernel)
    return made


# -- the command line --------------------------------------------------------------------------


def from_options(
    variant: Variant, captures: Mapping[str, Any], how: Mapping[str, Any], phase: Phase = "fwd"
) -> Tuning:
    """`tune` by the words of `bench` on the command line."""
    shape, words = shape_of(how), {name: how[name] for name in ("dtype", "rounds")}
    return tune(variant, shape=shape, captures=captures, phase=phase, **words)

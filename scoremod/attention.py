"""From a bound call to its answer: choose the backend and run it."""

from __future__ import annotations

import os

import torch

from . import (
    attend_cpu,
    attend_hopper,
    attend_triton,
    backward_cpu,
    backward_hopper,
    backward_triton,
)
from .binding import Bound
from .errors import BackendUnavailable
from .gradients import Answer, Gradients, Result, Wanted
from .inputs import Inputs
from .plan import Typed

BACKENDS = ("hopper", "triton", "cpu", "eager")
RUN = {
    "cpu": attend_cpu.attend,
    "triton": attend_triton.attend,
    "hopper": attend_hopper.attend,
}
RUN_BACKWARD = {
    "cpu": backward_cpu.backward,
    "triton": backward_triton.backward,
    "hopper": backward_hopper.backward,
}


def attend(program: Typed, inputs: Inputs, bound: tuple[Bound, ...], backend: str) -> Answer:
    """The answer of a call on a backend other than eager."""
    return RUN[backend](program, inputs, bound)


def gradients(
    program: Typed,
    inputs: Inputs,
    bound: tuple[Bound, ...],
    backend: str,
    result: Result,
    wanted: Wanted,
) -> Gradients:
    """The gradients of a call on a backend other than eager."""
    return RUN_BACKWARD[backend](program, inputs, bound, result, wanted)


def interpreting() -> bool:
    """Whether Triton's interpreter is asked for."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def choose_backend(
    program: Typed, inputs: Inputs, bound: tuple[Bound, ...], asked: str | None
) -> tuple[str, str]:
    """The backend of a call, and why."""
    if asked is not None and asked not in BACKENDS:
        raise BackendUnavailable(
            f"there is no backend {asked!r}", hint=f"there are {', '.join(BACKENDS)}"
        )
    on_gpu = inputs.q.device.type == "cuda"
    if asked == "triton" and not on_gpu and not interpreting():
        raise BackendUnavailable(
            "backend='triton' needs tensors on a GPU",
            hint="set TRITON_INTERPRET=1 to run the kernels in Triton's interpreter",
        )
    if asked == "hopper" and (reason := attend_hopper.unsupported(program, inputs)):
        raise BackendUnavailable(f"backend='hopper' cannot run this call: {reason}")
    if asked == "triton" and inputs.q.dtype is torch.float64:
        raise BackendUnavailable("float64 runs on the backends cpu and eager only")
    if asked == "cpu" and on_gpu:
        raise BackendUnavailable("backend='cpu' needs tensors on the CPU")
    if asked is not None:
        return asked, "asked for"
    if not on_gpu:
        return "cpu", "the tensors are on the CPU"
    if inputs.q.dtype is torch.float64:
        return "eager", "float64 on a GPU"
    reason = attend_hopper.unsupported(program, inputs)
    reason = reason or attend_hopper.refusal(program, inputs, bound)
    if reason:
        return "triton", f"the tensors are on a GPU, and the hopper backend is not for it: {reason}"
    return "hopper", "the tensors are on a Hopper GPU"

"""Kernels that can be launched: from memory, a bundle, the disk cache, compiled, or interpreted."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .backends.compile_triton import Kernel
from .backends.triton import TRITON, mend_interpreter
from .bundle import loaded
from .cache import CACHE, fingerprint, key
from .launch import HipLauncher, Launcher, current_stream, launcher
from .launch import device as gpu
from .target import Target

Run = Callable[[int, Sequence[Any]], None]  # programs and arguments


@dataclass(frozen=True)
class Ready:
    """A kernel that can be launched, with its compile-time constants."""

    run: Run
    constants: Mapping[str, int]
    launcher: Launcher | HipLauncher | None = None  # None in Triton's interpreter

    @property
    def block_m(self) -> int:
        return self.constants.get("BLOCK_M", 0)

    @property
    def block_n(self) -> int:
        return self.constants.get("BLOCK_N", 0)


@dataclass(frozen=True)
class Interpreted:
    """What Triton's interpreter runs in place of a kernel."""

    text: str
    entry: str
    constants: dict[str, int]


# Kernels found so far, by what decides them and where they run.
_READY: dict[tuple[object, ...], Ready] = {}


def ready(
    what: tuple[object, ...],
    device: torch.device,
    build: Callable[[Target], Kernel],
    interpret: Callable[[], Interpreted],
    bundle: str,
) -> Ready:
    """The kernel that `what` decides, for a GPU or for tensors on the CPU."""
    found = _READY.get((bundle, what, device))
    if found is None:
        on_gpu = device.type == "cuda"
        found = _on_gpu(what, device, build, bundle) if on_gpu else _interpreted(interpret())
        _READY[bundle, what, device] = found
    return found


def _on_gpu(
    what: tuple[object, ...], device: torch.device, build: Callable[[Target], Kernel], bundle: str
) -> Ready:
    return ready_kernel(stored(what, gpu(device.index), build, bundle), device)


def ready_kernel(kernel: Kernel, device: torch.device) -> Ready:
    """A compiled kernel with its launcher."""
    launching = launcher(kernel)

    def run(grid: int, values: Sequence[Any]) -> None:
        launching.launch((grid, 1, 1), current_stream(device.index), values)

    return Ready(run, dict(kernel.constants), launching)


def stored(
    what: tuple[object, ...],
    target: Target,
    build: Callable[[Target], Kernel],
    bundle: str = "",
) -> Kernel:
    """The kernel in a bundle, else in the disk cache, compiled if it is not there; needs no GPU.

    What a bundle lacks is an error: where bundles are used, nothing may be able to compile.
    """
    if bundle:
        return loaded(bundle).kernel(what, target)
    return CACHE.get_or_compile(key(fingerprint(), what, target), lambda: build(target))


def _interpreted(found: Interpreted) -> Ready:
    mend_interpreter()
    # A folder of this process alone: what lies in it is executed.
    module = TRITON.compile(found.text, Path(_interpreter_folder().name))
    kernel = getattr(module, found.entry)
    return Ready(lambda grid, values: kernel[(grid,)](*values, **found.constants), found.constants)


@functools.cache
def _interpreter_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="scoremod-")

"""A process without Triton and without a compiler: loads a bundle, and launches on a fake GPU.

python tests/bundle_process.py BUNDLE CALL: one JSON object, what was launched by which call, of
documents on an sm_80 or causal attention on an sm_90.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import scoremod
from scoremod import (
    attend_hopper,
    attend_triton,
    backward_hopper,
    backward_triton,
    hopper_rows,
    ready,
    structure,
)
from scoremod import backward_hopper_wide as wide
from scoremod.backends.compile_triton import Kernel, TensorMap
from scoremod.launch import Launcher
from scoremod.target import parse_target

if __name__ == "__main__":
    assert "triton" not in sys.modules
    sys.modules["triton"] = None  # type: ignore[assignment]  # from here on importing it fails

LAUNCHED: list[str] = []


class Driver:
    """Takes what a driver is given, and writes down which kernel ran."""

    def device(self) -> int:
        return 0

    def bind(self, device: int) -> None:
        pass

    def load(self, kernel: Kernel, device: int) -> int:
        assert kernel.image.startswith(b"\x7fELF")
        self.entry = kernel.entry
        return 1

    def launch(self, config: int, function: int, arguments: int, extra: None) -> int:
        LAUNCHED.append(self.entry)
        return 0

    def tensor_map(self, x: torch.Tensor, tile: TensorMap) -> bytes:
        return bytes(128)


class Watching(TorchDispatchMode):
    """A mode that sees each operator and changes nothing."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


def pretend(
    target: str, launcher: Callable[[Kernel], Launcher], put: Callable[..., Any] = setattr
) -> None:
    """Let tensors on the CPU pass for tensors on a GPU where a kernel is looked for."""
    gpu, found = torch.device("cuda", 0), parse_target(target)

    def on_gpu(what: Any, device: Any, *rest: Any) -> Any:
        return ready.ready(what, gpu, *rest)

    for module in (attend_triton, backward_triton, hopper_rows, wide, backward_hopper, structure):
        put(module, "ready", on_gpu)
    for module in (ready, attend_hopper):
        put(module, "gpu", lambda index: found)
        put(module, "current_stream", lambda index: 0)
    put(ready, "launcher", launcher)
    put(attend_hopper, "Launcher", launcher)
    put(attend_hopper, "multiprocessors", lambda index: 132)
    if attend_hopper.is_hopper(found):
        put(attend_hopper, "unsupported", attend_hopper.unfit)


def launched() -> list[str]:
    """What ran since the last time."""
    found = LAUNCHED.copy()
    LAUNCHED.clear()
    return found


DOC = torch.zeros(1, 80, dtype=torch.int64)
# By the target: the backend, the head dim and the captures of a call.
CALLS: dict[str, tuple[str, int, dict[str, torch.Tensor]]] = {
    "cuda:80": ("triton", 16, {"doc": DOC}),
    "cuda:90": ("hopper", 64, {}),
}


def main(path: str, target: str) -> None:
    start = time.perf_counter()
    attn = scoremod.load(path)
    load = time.perf_counter() - start
    pretend(target, lambda kernel: Launcher(kernel, Driver()))  # type: ignore[arg-type]
    backend, head_dim, captures = CALLS[target]
    q = torch.zeros(1, 2, 80, head_dim, dtype=torch.bfloat16, requires_grad=True)
    start = time.perf_counter()
    out = attn(q, q, q, backend=backend, **captures)
    first = time.perf_counter() - start
    found: dict[str, Any] = {"load": load, "first": first, "forward": launched()}
    out.sum().backward()
    found["backward"] = launched()
    found["sympy"] = "sympy" in sys.modules
    with Watching():  # as under torch.compile, but without its import of 8 s
        out = attn(q, q, q, backend=backend, **captures)
        out.sum().backward()
    found["operator"] = launched()
    found["compile_count"] = scoremod.compile_count()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

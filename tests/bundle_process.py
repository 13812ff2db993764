"""A process without Triton and without a compiler: loads a bundle, and launches on a fake GPU.

python tests/bundle_process.py BUNDLE: one JSON object, what was launched by which call
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import scoremod
from scoremod import attend_triton, backward_triton, ready, structure
from scoremod.backends.compile_triton import Kernel
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


class Watching(TorchDispatchMode):
    """A mode that sees each operator and changes nothing."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


def pretend(target: str) -> None:
    """Let tensors on the CPU pass for tensors on a GPU where a kernel is looked for."""
    gpu, found = torch.device("cuda", 0), parse_target(target)

    def on_gpu(what: Any, device: Any, *rest: Any) -> Any:
        return ready.ready(what, gpu, *rest)

    for module in (attend_triton, backward_triton, structure):
        module.ready = on_gpu  # type: ignore[attr-defined]
    ready.gpu = lambda index: found  # type: ignore[assignment]
    ready.current_stream = lambda index: 0  # type: ignore[assignment]
    ready.launcher = lambda kernel: Launcher(kernel, Driver())  # type: ignore[arg-type]


def launched() -> list[str]:
    """What ran since the last time."""
    found = LAUNCHED.copy()
    LAUNCHED.clear()
    return found


def main(path: str) -> None:
    start = time.perf_counter()
    attn = scoremod.load(path)
    load = time.perf_counter() - start
    pretend("cuda:80")
    q = torch.zeros(1, 2, 80, 16, dtype=torch.bfloat16, requires_grad=True)
    doc = torch.zeros(1, 80, dtype=torch.int64)
    start = time.perf_counter()
    out = attn(q, q, q, doc=doc, backend="triton")
    first = time.perf_counter() - start
    found: dict[str, Any] = {"load": load, "first": first, "forward": launched()}
    out.sum().backward()
    found["backward"] = launched()
    found["sympy"] = "sympy" in sys.modules
    with Watching():  # as under torch.compile, but without its import of 8 s
        out = attn(q, q, q, doc=doc, backend="triton")
        out.sum().backward()
    found["operator"] = launched()
    found["compile_count"] = scoremod.compile_count()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])

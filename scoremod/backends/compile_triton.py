"""Compile rendered Triton text to machine code, on a machine with or without a GPU.

    kernel = compile_kernel(text, "attention_fwd", plan.arguments, plan.constants, plan.target, ...)
    kernel.image     a cubin or hsaco that launch.py loads without Triton

The image depends on what the text computes and on Triton's version, not on comments, paths or the
user's settings for Triton.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..errors import BackendUnavailable
from ..plan_triton import Argument
from ..target import Target
from .triton import load_text


@dataclass(frozen=True)
class Scratch:
    """Global memory that a kernel wants, in bytes per program."""

    size: int = 0
    alignment: int = 1


@dataclass(frozen=True)
class TensorMap:
    """How TMA copies tiles of a tensor, as cuTensorMapEncodeTiled takes it."""

    element: str  # f16, bf16 or f32
    box: tuple[int, ...]  # of the copies that a tile is made of, the last dimension last
    swizzle: int  # CUtensorMapSwizzle


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel and everything that a launch must know."""

    entry: str  # the name in the image
    target: Target
    image: bytes
    # What is passed, in order. Two pointers follow: to `global_scratch` and to `profile_scratch`.
    arguments: tuple[Argument, ...]
    global_scratch: Scratch
    profile_scratch: Scratch
    constants: tuple[tuple[str, int], ...]  # compile-time constants, the tile among them
    num_warps: int
    cluster: tuple[int, int, int]
    shared: int  # dynamic shared memory in bytes
    registers: int  # per thread
    spills: int  # bytes of memory per thread in place of registers
    text: str
    triton: str  # its version
    tensor_maps: tuple[TensorMap, ...] = ()  # of the arguments of type `tensormap`, in order
    notes: tuple[str, ...] = ()  # which configurations were tried, and why one was taken


# Every option whose default a Triton release or an environment variable may change. A release
# ignores those it does not know.
_OPTIONS: dict[str, Any] = {
    "num_ctas": 1,
    "launch_cooperative_grid": False,
    "default_dot_input_precision": "ieee",
    "debug": False,
    "sanitize_overflow": False,
    "instrumentation_mode": "",
}
_TARGET_OPTIONS: dict[str, dict[str, Any]] = {
    "cuda": {
        "ptx_options": "",
        "enable_reflect_ftz": True,
        "launch_pdl": False,
        "sched4reg": False,
        "clc": False,
    },
    "hip": {
        "waves_per_eu": 0,
        "kpack": 1,
        "matrix_instr_nonkdim": 0,
        "allow_flush_denorm": False,
        "schedule_hint": "none",
    },
}
# Triton's settings are global to the process.
_LOCK = threading.Lock()


def compile_kernel(
    text: str,
    entry: str,
    arguments: Sequence[Argument],
    constants: Mapping[str, int],
    target: Target,
    *,
    num_warps: int,
    num_stages: int,
    aligned: bool,
    even: bool,
    fp_fusion: bool,
) -> Kernel:
    """Compile the jit function `entry` of `text`.

    `aligned` promises that q, k, v, o, their gradients and strides are multiples of 16 bytes,
    `even` that q_len and kv_len are multiples of 16 (which saves 87 of 255 registers at head dim
    128).
    """
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": fp_fusion}

    def source(function: Any) -> Any:
        return _source(function, arguments, constants, aligned=aligned, even=even)

    compiled = compiled_text(text, entry, source, target, options)
    return kernel_of(compiled, text, target, arguments, constants)


@dataclass(frozen=True)
class Compiled:
    """What Triton made of a text."""

    metadata: Any
    image: bytes
    report: Report  # its warnings are ptxas's


def compiled_text(
    text: str,
    entry: str,
    source: Callable[[Any], Any],
    target: Target,
    options: Mapping[str, Any],
) -> Compiled:
    """Compile the jit function `entry` of `text`; `source` says how Triton is to read it."""
    known = {**_OPTIONS, **_TARGET_OPTIONS.get(target.kind, {}), **options}
    with _LOCK, _settings() as folder:
        said = _Overheard()
        with contextlib.redirect_stdout(said):
            made = _compile(source(getattr(load_text(text, folder), entry)), target, known)
        report = code_report(made.asm["amdgcn" if target.kind == "hip" else "cubin"])
    return Compiled(
        made.metadata, made.kernel, replace(report, warnings=complaints(said.getvalue()))
    )


class _Overheard(io.StringIO):
    """What this thread prints; other threads print where they did."""

    def __init__(self) -> None:
        super().__init__()
        self._thread, self._stdout = threading.get_ident(), sys.stdout

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            return super().write(text)
        return self._stdout.write(text)


def kernel_of(
    compiled: Compiled,
    text: str,
    target: Target,
    arguments: Sequence[Argument],
    constants: Mapping[str, int],
    tensor_maps: tuple[TensorMap, ...] = (),
) -> Kernel:
    """A compiled text with what its launch must know."""
    metadata = compiled.metadata
    return Kernel(
        entry=metadata.name,
        target=target,
        image=compiled.image,
        arguments=tuple(Argument(a.name, a.type) for a in arguments),
        global_scratch=_scratch(metadata, "global"),
        profile_scratch=_scratch(metadata, "profile"),
        constants=tuple(sorted(constants.items())),
        num_warps=metadata.num_warps,
        cluster=(metadata.num_ctas, 1, 1),
        shared=metadata.shared,
        registers=compiled.report.registers,
        spills=compiled.report.spills,
        text=text,
        triton=triton_version(),
        tensor_maps=tensor_maps,
    )


def triton_version() -> str:
    """The installed Triton's version, without importing it; "" if there is none."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


@contextlib.contextmanager
def _settings() -> Iterator[Path]:
    """Triton's settings while a kernel is compiled, and a folder that is gone afterwards.

    Line tables would make the image depend on paths and comments. Triton's own cache knows
    nothing of that setting, may be full or read-only, and is of no use below ours.
    """
    try:
        from triton import knobs
    except ImportError as error:
        raise BackendUnavailable(
            f"Triton cannot be imported: {error}", hint="pip install 'triton >= 3.6'"
        ) from None
    if knobs.runtime.interpret:
        raise BackendUnavailable(
            "Triton cannot compile under TRITON_INTERPRET=1",
            hint="unset it, and start Python anew",
        )
    with (
        tempfile.TemporaryDirectory(prefix="scoremod-", ignore_cleanup_errors=True) as folder,
        knobs.compilation.scope(),
        knobs.cache.scope(),
        knobs.nvidia.scope(),
        knobs.runtime.scope(),
    ):
        knobs.compilation.disable_line_info = True
        knobs.nvidia.dump_ptxas_log = True  # `compiled_text` reads it
        knobs.cache.dir = folder
        knobs.runtime.override_arch = None
        yield Path(folder)


def _source(
    function: Any,
    arguments: Sequence[Argument],
    constants: Mapping[str, int],
    *,
    aligned: bool,
    even: bool,
) -> Any:
    """What Triton compiles: the function, argument types, constants and divisibility."""
    from triton.compiler import ASTSource

    types = {a.name: a.type for a in arguments} | dict.fromkeys(constants, "constexpr")
    names = function.arg_names
    if set(types) != set(names):
        odd = ", ".join(f"`{name}`" for name in sorted(set(types) ^ set(names)))
        raise BackendUnavailable(f"the plan and the text of `{function.__name__}` differ in {odd}")
    divisors = _divisors(types) if aligned else {}
    if even:
        divisors |= {"q_len": 16, "kv_len": 16}
    return ASTSource(
        function,
        {name: types[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(n),): [["tt.divisibility", d]] for n, d in divisors.items()},
    )


def _divisors(types: Mapping[str, str]) -> dict[str, int]:
    """What `aligned` promises: pointers count bytes, strides count elements."""
    found = {name: 16 for name in ("residual", "row_values", "dq_sums") if name in types}
    for name, kind in types.items():
        tensor = re.fullmatch(r"(d?[qkvo])(_stride_\w+)?", name)
        if tensor and kind.startswith("*"):
            found[name] = 16
        elif tensor and tensor[2]:
            found[name] = 16 // _ELEMENT_BYTES[types[tensor[1]]]
    return found


_ELEMENT_BYTES = {"*fp16": 2, "*bf16": 2, "*fp32": 4, "*fp64": 8}


def _compile(source: Any, target: Target, options: dict[str, Any]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    arch = int(target.arch) if target.kind == "cuda" else target.arch
    try:
        return triton.compile(
            source, target=GPUTarget(target.kind, arch, target.warp_size), options=options
        )
    except Exception as error:
        raise BackendUnavailable(
            f"Triton {triton_version()} cannot compile `{source.name}` for {target}: {error}",
            hint="this is a defect of scoremod or of Triton, not of the variant",
        ) from error


def _scratch(metadata: Any, name: str) -> Scratch:
    """Absent from the metadata where a backend has none."""
    size = getattr(metadata, f"{name}_scratch_size", 0)
    return Scratch(size, getattr(metadata, f"{name}_scratch_align", 1))


# -- what the assembler says -------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """Registers per thread, bytes spilled to memory per thread, and the assembler's warnings."""

    registers: int
    spills: int
    warnings: tuple[str, ...] = ()


def code_report(code: str | bytes) -> Report:
    """The report for a cubin, for PTX (assembled for that: 1 s) or for AMD's assembly."""
    if isinstance(code, bytes):
        return _cubin_report(code)
    return _amd_report(code) if ".amdgcn_target" in code else ptxas_report(code)


def ptxas_report(ptx: str) -> Report:
    """What ptxas says about PTX; `spills` counts stores."""
    from triton.backends.nvidia.compiler import get_ptxas

    architecture = _first(r"\.target (sm_\w+)", ptx)
    tool = get_ptxas(int(_first(r"(\d+)", architecture))).path
    said = _run([tool, "-v", f"--gpu-name={architecture}", "-o", "/dev/null"], ptx.encode(), "ptx")
    return Report(
        int(_first(r"Used (\d+) registers", said)),
        int(_first(r"(\d+) bytes spill stores", said)),
        complaints(said),
    )


def complaints(said: str) -> tuple[str, ...]:
    """The lines in which ptxas warns, or notes that it serialises products."""
    return tuple(re.findall(r"^(?:ptxas)?.*(?:warning|\(C\d+\)).*$", said, re.MULTILINE))


def _cubin_report(cubin: bytes) -> Report:
    """The same from the finished cubin, in 20 ms: what is spilled is its stack."""
    from triton import knobs

    said = _run([knobs.nvidia.cuobjdump.path, "-res-usage"], cubin, "cubin")
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    assert usage is not None, said
    return Report(int(usage[1]), int(usage[2]) + int(usage[3]))


def softmax_loops(cubin: bytes) -> tuple[tuple[str, ...], ...]:
    """The instructions of each loop over kv tiles: products on wgmma, and exponentials."""
    from triton import knobs

    said = _run([knobs.nvidia.nvdisasm.path, "-c"], cubin, "cubin").splitlines()
    labels = {m[1]: k for k, line in enumerate(said) if (m := re.match(r"\s*(\.L_\w+):", line))}
    spans = []
    for end, line in enumerate(said):
        target = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line)
        start = labels.get(target[1], end) if target else end
        body = "\n".join(said[start:end])
        if "HGMMA" in body and "MUFU.EX2" in body:
            spans.append((end - start, start, end))
    # A branch back out of a block that stands elsewhere looks like a loop too, but a longer one.
    kept: list[tuple[int, int]] = []
    for _, start, end in sorted(spans):
        if all(end < a or b < start for a, b in kept):
            kept.append((start, end))
    return tuple(tuple(said[a : b + 1]) for a, b in sorted(kept))


def _amd_report(assembly: str) -> Report:
    return Report(
        int(_first(r"\.vgpr_count:\s*(\d+)", assembly)),
        int(_first(r"\.private_segment_fixed_size:\s*(\d+)", assembly)),
    )


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, f"no {pattern} in:\n{text[:2000]}"
    return found[1]


def _run(command: list[str], content: bytes, suffix: str) -> str:
    """What a tool prints about a file."""
    with tempfile.NamedTemporaryFile(suffix=f".{suffix}") as file:
        file.write(content)
        file.flush()
        done = subprocess.run([*command, file.name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


# -- AMD ---------------------------------------------------------------------------------------


def hip_launcher(kernel: Kernel, device: int) -> Callable[..., None]:
    """A kernel as a call (grid, stream, values), through Triton's own HIP launcher.

    Not run so far: there was no AMD GPU. The signatures are those of Triton 3.6 and 3.9.
    """
    from triton.backends.amd.driver import HIPLauncher
    from triton.runtime.driver import driver

    metadata = SimpleNamespace(
        warp_size=kernel.target.warp_size,
        num_ctas=kernel.cluster[0],
        launch_cooperative_grid=False,
        tensordesc_meta=None,
        global_scratch_size=kernel.global_scratch.size,
        global_scratch_align=kernel.global_scratch.alignment,
        profile_scratch_size=kernel.profile_scratch.size,
        profile_scratch_align=kernel.profile_scratch.alignment,
    )
    signature = {k: a.type for k, a in enumerate(kernel.arguments)}
    launch = HIPLauncher(SimpleNamespace(signature=signature, constants={}), metadata)
    loaded = driver.active.utils.load_binary(kernel.entry, kernel.image, kernel.shared, device)
    packed = (kernel.num_warps, kernel.cluster[0], kernel.shared)

    def run(grid: tuple[int, int, int], stream: int, values: Sequence[Any]) -> None:
        launch(*grid, stream, loaded[1], packed, None, None, None, *values)

    return run

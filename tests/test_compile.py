"""Rendered kernels compile for GPUs that are not here, without spilling registers on sm_90."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import scoremod
from scoremod import Variant, variants
from scoremod.attend_triton import compile_forward
from scoremod.backends.compile_triton import Kernel, Report, code_report, compile_kernel
from scoremod.backward_triton import compile_backward
from scoremod.errors import BackendUnavailable
from scoremod.plan import assumed_params, typed
from scoremod.plan_triton import Argument, Options, TritonPlan, triton_plan
from scoremod.plan_triton_backward import DIAGONALS, DKDV, DQ, PAIRS, Learned, groups_of
from scoremod.target import parse_target

SIX: dict[str, Variant] = {
    "noop": scoremod.parse("variant noop() { score s }"),
    "causal": variants.causal,
    "alibi": variants.alibi & variants.causal,
    "softcap": variants.softcap & variants.causal,
    "window": variants.sliding_window,
    "document": variants.document & variants.causal,
}
STOCK = {name: v for name, v in vars(variants).items() if isinstance(v, Variant)}


def plan(variant: Variant, target: str, **options: Any) -> TritonPlan:
    """The forward plan of a variant, bf16 and head dim 128 unless told otherwise."""
    chosen = {"dtype": "bf16", "head_dim": 128, **options}
    chosen.setdefault("v_head_dim", chosen["head_dim"])
    if chosen["dtype"] == "f32":
        chosen["precision"] = "exact"
    program = variant._program
    declared = typed(program, assumed_params(program))
    return triton_plan(declared, Options(**chosen), parse_target(target))


@pytest.fixture(scope="module")
def apart() -> Iterator[Callable[..., Any]]:
    """Call a function in a process where Triton's interpreter was never asked for.

    Triton decides when it is imported, and other test modules do ask for it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            pool.submit(os.getpid).result()
            yield lambda function, *args: pool.submit(function, *args).result()


def compile_it(name: str, target: str, options: dict[str, Any]) -> Kernel:
    """The forward kernel as a call would take it."""
    variant = {**STOCK, **SIX}[name]
    made = plan(variant, target, **options)
    program = typed(variant._program, assumed_params(variant._program))
    stored = not program.half_lines
    chosen = replace(made.options, stored=stored, even=not stored)
    return compile_forward(program, chosen, made.target)


def check(kernel: Kernel, target: str) -> None:
    """What holds of every kernel: it is whole, and fits the device."""
    assert kernel.entry == "attention_fwd" and kernel.image[:4] == b"\x7fELF"
    assert kernel.shared <= parse_target(target).shared
    assert (kernel.global_scratch.size, kernel.profile_scratch.size) == (0, 0)
    assert kernel.cluster == (1, 1, 1) and kernel.registers > 0


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", SIX)
def test_six_kernels_compile_for_sm_90_without_spills(
    apart: Callable[..., Kernel], name: str, head_dim: int
) -> None:
    kernel = apart(compile_it, name, "cuda:90", {"head_dim": head_dim})
    check(kernel, "cuda:90")
    assert kernel.spills == 0, f"{kernel.spills} bytes, {kernel.registers} registers"


# Bytes that a kernel may spill, by head dim. The two accumulators of dk and dv take 128 of 255
# registers at head dim 128, and larger tiles were measured to be faster than none (target.py); dq
# spills 8 bytes for a stored structure (documents), which its loop over tiles does not touch.
SPILLED = {DKDV: {64: 256, 128: 512}, DQ: {64: 0, 128: 8}}


@pytest.mark.parametrize("name", ["causal", "softcap", "document"])
def test_backwards_compile_for_sm_90(apart: Callable[..., Kernel], name: str) -> None:
    check_backward(apart(compile_backward_of, name, DKDV, 128), DKDV, 128)


@pytest.mark.compile_all
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kernel", [DKDV, DQ])
@pytest.mark.parametrize("name", SIX)
def test_six_backwards_compile_at_all_head_dims(
    apart: Callable[..., Kernel], name: str, kernel: str, head_dim: int
) -> None:
    check_backward(apart(compile_backward_of, name, kernel, head_dim), kernel, head_dim)


def check_backward(kernel: Kernel, name: str, head_dim: int) -> None:
    assert kernel.entry == name and kernel.shared <= parse_target("cuda:90").shared
    assert kernel.spills <= SPILLED[name][head_dim] if name in SPILLED else kernel.spills == 0


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("relative_bias", DIAGONALS), ("dense_bias", PAIRS), ("softcap", DQ)],
    ids=str,
)
def test_other_kernels_of_the_backward_compile_for_sm_90(
    apart: Callable[..., Kernel], name: str, kernel: str
) -> None:
    made = apart(compile_backward_of, name, kernel, 64)
    assert made.entry == kernel and made.spills == 0


def compile_backward_of(name: str, kernel: str, head_dim: int) -> Kernel:
    """A kernel of the backward; captured tables of floats are learned."""
    program = {**STOCK, **SIX}[name]._program
    known = typed(program, assumed_params(program))
    pure = known.query_half_lines if kernel == DKDV else known.half_lines
    stored = not pure and kernel in (DKDV, DQ)
    options = Options("bf16", head_dim, head_dim, stored=stored, even=not stored)
    learned = tuple(Learned(k) for k, p in enumerate(known.params) if p.rank and p.element == "f32")
    if kernel in (DKDV, DQ):
        learned = ()
    groups = groups_of(known, learned, offset_per_batch=False)
    target = parse_target("cuda:90")
    return compile_backward(
        kernel, known, options, learned, target, groups[0] if kernel == PAIRS else None
    )


# All six, at more head dims, are in `make compile-all`.
@pytest.mark.parametrize("name", ["noop", "alibi", "document"])
def test_kernels_compile_for_gfx942(apart: Callable[..., Kernel], name: str) -> None:
    check(apart(compile_it, name, "hip:gfx942", {"head_dim": 64}), "hip:gfx942")


@pytest.mark.compile_all
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("target", ["cuda:80", "cuda:100", "hip:gfx942"])
@pytest.mark.parametrize("name", SIX)
def test_six_kernels_compile_for_all_targets(
    apart: Callable[..., Kernel], name: str, target: str, head_dim: int
) -> None:
    check(apart(compile_it, name, target, {"head_dim": head_dim}), target)


@pytest.mark.compile_all
@pytest.mark.parametrize("name", STOCK)
def test_stock_variants_compile(apart: Callable[..., Kernel], name: str) -> None:
    check(apart(compile_it, name, "cuda:90", {}), "cuda:90")


@pytest.mark.compile_all
@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("name", SIX)
def test_all_dtypes_compile(apart: Callable[..., Kernel], name: str, dtype: str) -> None:
    check(apart(compile_it, name, "cuda:90", {"dtype": dtype}), "cuda:90")


@pytest.mark.compile_all
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("head_dim", [16, 32, 72, 96, 192, 256])
@pytest.mark.parametrize("name", ["causal", "softcap"])
def test_all_head_dims_compile(
    apart: Callable[..., Kernel], name: str, head_dim: int, dtype: str
) -> None:
    options = {"head_dim": head_dim, "dtype": dtype}
    check(apart(compile_it, name, "cuda:90", options), "cuda:90")


# -- what the image depends on -----------------------------------------------------------------

ADD = '''
import triton
import triton.language as tl


@triton.jit
def add(q, o, n, q_stride_l, BLOCK: tl.constexpr):
    """o[n, BLOCK] = q[n, BLOCK] + 1."""
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    tl.store(o + row * BLOCK + i, tl.load(q + row * q_stride_l + i) + 1, mask=row < n)
'''
ADD_ARGUMENTS = (
    Argument("q", "*bf16"),
    Argument("o", "*bf16"),
    Argument("n", "i32"),
    Argument("q_stride_l", "i32"),
)


def add(target: str, text: str = ADD, aligned: bool = True, **constants: int) -> Kernel:
    return compile_kernel(
        text,
        "add",
        ADD_ARGUMENTS,
        constants or {"BLOCK": 1024},
        parse_target(target),
        num_warps=4,
        num_stages=1,
        aligned=aligned,
        even=False,
        fp_fusion=True,
    )


def comment(text: str) -> str:
    """The same program on other lines."""
    return "# a remark\n\n" + text.replace("    i = ", "    # a remark\n    i = ")


@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
def test_comments_and_paths_do_not_change_the_image(
    apart: Callable[..., Any], target: str, tmp_path: Path
) -> None:
    first, second = apart(add, target), apart(add, target, comment(ADD))
    assert first.text != second.text and first.image == second.image
    assert b"scoremod" not in first.image and b"/tmp" not in first.image


def settings_around(target: str) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """The environment before and after compiling, and what stays in the folder for files."""
    import tempfile

    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        before = {**os.environ, "knob": str(knobs.compilation.disable_line_info)}
        add(target)
        after = {**os.environ, "knob": str(knobs.compilation.disable_line_info)}
        tempfile.tempdir = None
        return before, after, os.listdir(folder)


def test_compiling_leaves_settings_and_folders_as_they_were(apart: Callable[..., Any]) -> None:
    before, after, left = apart(settings_around, "cuda:90")
    assert before == after and left == []


def test_alignment_makes_wide_loads(apart: Callable[..., Any]) -> None:
    wide, narrow = apart(add, "cuda:90"), apart(add, "cuda:90", ADD, False)
    assert wide.image != narrow.image


def test_the_kernel_records_its_launch(apart: Callable[..., Any]) -> None:
    kernel = apart(add, "cuda:90")
    assert (kernel.entry, kernel.arguments, kernel.num_warps) == ("add", ADD_ARGUMENTS, 4)
    assert (kernel.target, kernel.text) == (parse_target("cuda:90"), ADD)
    assert kernel.triton and kernel.spills == 0


def report_both_ways() -> tuple[Report, Report]:
    """What ptxas says, and what its cubin says."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget

    from scoremod.backends import compile_triton

    with compile_triton._settings() as folder:
        function = compile_triton.load_text(ADD, folder).add
        source = compile_triton._source(
            function, ADD_ARGUMENTS, {"BLOCK": 4096}, aligned=False, even=False
        )
        options = {"num_warps": 1, "maxnreg": 24, "enable_fp_fusion": True}
        done = triton_compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        return code_report(done.asm["ptx"]), code_report(done.asm["cubin"])


def test_spills_are_reported(apart: Callable[..., Any]) -> None:
    said, found = apart(report_both_ways)
    assert said.registers == found.registers == 24
    assert said.spills > 0 and found.spills > 0


def test_a_text_that_does_not_fit_the_plan_is_an_error(apart: Callable[..., Any]) -> None:
    with pytest.raises(BackendUnavailable, match="differ in `WARPS`"):
        apart(_with_constants, {"BLOCK": 128, "WARPS": 4})
    with pytest.raises(BackendUnavailable, match="cannot compile `add` for cuda:90"):
        apart(_with_constants, {"BLOCK": 100})


def _with_constants(constants: dict[str, int]) -> Kernel:
    return add("cuda:90", **constants)


def test_the_interpreter_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(BackendUnavailable, match="under TRITON_INTERPRET=1"):
        add("cuda:90")

"""Hopper's kernels in bundles: which calls they serve, and what serves the others."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bundle import (
    DOC,
    HOPPER,
    Gpu,
    built,
    compiled,
    compiled_forward,
    only_usual,
    tensors,
    uncompiled,
    without_triton,
)

import scoremod
from scoremod import (
    Variant,
    attend_hopper,
    attend_triton,
    backward_hopper,
    backward_hopper_wide,
    backward_triton,
    bundle,
    explain,
    variants,
)
from scoremod.backends.compile_triton import Kernel
from scoremod.errors import BackendUnavailable

USUAL_AND_ANY = "(usual|any)(, kv_lens)?"
ALIBI = variants.alibi & variants.causal
VARIANTS = {"causal": variants.causal, "alibi": ALIBI, "documents": DOC}
LENS = torch.tensor([5, 80], dtype=torch.int32)
OURS = ["attention_bwd_rows", "attention_bwd", "attention_bwd_finish"]
WIDE = ["attention_bwd_rows", "attention_bwd_keys", "attention_bwd_queries"]
PORTABLE = ["attention_bwd_delta", "attention_bwd_dkdv", "attention_bwd_dq"]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles of a mask that is a range, and of one that needs a structure; without code."""
    with pytest.MonkeyPatch.context() as patch:
        uncompiled(patch)
        only_usual(patch, USUAL_AND_ANY)
        return {
            name: built(
                tmp_path_factory.mktemp(name), variant, target="cuda:90", phase=("fwd", "bwd")
            )
            for name, variant in (("range", ALIBI), ("structure", DOC))
        }


def captures_of(name: str) -> dict[str, torch.Tensor]:
    if name == "structure":
        return {"doc": torch.zeros(2, 1, dtype=torch.int32)}
    return {"slopes": torch.zeros(2)}


def trained(gpu: Gpu, attn: Variant, captures: dict[str, torch.Tensor], **how: Any) -> list[str]:
    """What the backward of a call launches; its tensors have gradients then."""
    leaves = tensors(dim=how.pop("dim", 64), requires_grad=True)
    wants_lse = how.pop("lse", False)
    found = attn(*leaves, backend="hopper", return_lse=wants_lse, **how, **captures)
    forward = [x.entry for x in gpu.take()]
    assert forward[-1] == "hopper"
    sum(x.sum() for x in (found if wants_lse else [found])).backward()
    assert all(x.grad is not None for x in leaves)
    return [x.entry for x in gpu.take() if x.entry != "tile_structure"]


CALLS: dict[str, dict[str, Any]] = {
    "usual": {},
    "kv_lens": {"kv_lens": LENS},
    "large": {"q_offset": 2**30},
    "large, kv_lens": {"q_offset": 2**30, "kv_lens": LENS},
    "a gradient of the log-sum-exp": {"lse": True},
    "negative scale": {"scale": -1.0},
}


@pytest.mark.parametrize("name", ["range", "structure"])
@pytest.mark.parametrize("call", CALLS)
def test_hoppers_backward_serves_what_it_takes(
    name: str, call: str, bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, attn = Gpu(monkeypatch, "cuda:90"), scoremod.load(bundles[name])
    monkeypatch.setattr(attend_hopper.CACHE, "get_or_compile", lambda *_: pytest.fail("compiles"))
    assert trained(gpu, attn, captures_of(name), **CALLS[call]) == OURS


def test_the_portable_backward_serves_the_rest(
    bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, attn = Gpu(monkeypatch, "cuda:90"), scoremod.load(bundles["range"])
    assert trained(gpu, attn, captures_of("range"), deterministic=True) == PORTABLE


def test_slopes_learn_in_a_kernel_of_their_own(
    bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, attn = Gpu(monkeypatch, "cuda:90"), scoremod.load(bundles["range"])
    slopes = torch.zeros(2, requires_grad=True)
    rows, main, finish = OURS
    assert trained(gpu, attn, {"slopes": slopes}) == [rows, main, "attention_bwd_sums", finish]
    assert slopes.grad is not None


def test_large_tensors_have_kernels_around_whatever_the_main_one_is(
    bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, attn = Gpu(monkeypatch, "cuda:90"), scoremod.load(bundles["structure"])
    for module in (attend_triton, backward_triton):
        monkeypatch.setattr(module, "INT32_MAX", 99)
    assert trained(gpu, attn, captures_of("structure")) == OURS


# -- where there is no kernel ------------------------------------------------------------------


def explained(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `explain` says of a call's kernels, from the backward's on, and of the forward's."""
    monkeypatch.setattr(explain, "device", lambda index: HOPPER)
    attn = scoremod.load(path)
    captures = captures_of("range") if "slopes" in str(attn) else {}
    said = attn.explain(*tensors(), backend="hopper", **captures).splitlines()
    first = next(k for k, line in enumerate(said) if line.startswith("  backward"))
    return [*said[first:], *(line for line in said[:first] if line.startswith("  tried"))]


def refuse(*_: Any) -> Kernel:
    raise BackendUnavailable("its slope needs too many registers\nand more")


def test_a_refusal_is_recorded_and_followed(
    tmp_path: Path, bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    uncompiled(monkeypatch)
    only_usual(monkeypatch)
    monkeypatch.setattr(backward_hopper, "compile_backward", refuse)
    path = built(tmp_path, ALIBI, target="cuda:90", phase=("fwd", "bwd"))
    gpu, slopes = Gpu(monkeypatch, "cuda:90"), {"slopes": torch.zeros(2)}
    assert trained(gpu, scoremod.load(path), slopes) == PORTABLE
    # It is that bundle's alone.
    assert trained(gpu, scoremod.load(bundles["range"]), slopes) == OURS
    assert (
        explained(path, monkeypatch)[0] == "  backward portable: its slope needs too many registers"
    )
    refused = [r for r in bundle.read(path).records if "refused" in r]
    assert [r["kernel"] for r in refused] == ["hopper_bwd"]


def test_a_bundle_that_lacks_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uncompiled(monkeypatch)
    only_usual(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(backward_hopper, "unfit_shape", lambda *_: "there was none when it was built")
        path = built(tmp_path, variants.causal, target="cuda:90", phase=("fwd", "bwd"))
    gpu = Gpu(monkeypatch, "cuda:90")
    assert trained(gpu, scoremod.load(path), {}) == PORTABLE
    assert "made.smk has no kernel `hopper_bwd` for this call" in explained(path, monkeypatch)[0]


def test_biases_per_key_learn_in_hoppers_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uncompiled(monkeypatch)
    only_usual(monkeypatch, USUAL_AND_ANY)
    gates = variants.forget_gate & variants.causal
    path = built(tmp_path, gates, target="cuda:90", phase=("fwd", "bwd"))
    sums = [
        "ds_sums" in str(r["launch"])
        for r in bundle.read(path).records
        if r["kernel"] == "hopper_bwd"
    ]
    assert sums and 2 * sum(sums) == len(sums)
    gpu, attn = Gpu(monkeypatch, "cuda:90"), scoremod.load(path)
    for learns in (False, True):
        decay = torch.zeros(2, 2, 80, requires_grad=learns)
        assert trained(gpu, attn, {"log_decay": decay}) == OURS
        assert (decay.grad is not None) == learns


@pytest.mark.parametrize("name", ["range", "structure"])
def test_wide_heads_have_two_kernels(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uncompiled(monkeypatch)
    only_usual(monkeypatch, USUAL_AND_ANY)
    variant = {"range": ALIBI, "structure": DOC}[name]
    path = built(tmp_path, variant, target="cuda:90", phase=("fwd", "bwd"), head_dim=192)
    gpu, attn = Gpu(monkeypatch, "cuda:90"), scoremod.load(path)
    monkeypatch.setattr(attend_hopper.CACHE, "get_or_compile", lambda *_: pytest.fail("compiles"))
    for call in CALLS.values():
        assert trained(gpu, attn, captures_of(name), dim=192, **call) == WIDE
    # Deterministic ones are the same.
    assert trained(gpu, attn, captures_of(name), dim=192, deterministic=True) == WIDE


@pytest.mark.parametrize(
    ("variant", "captures", "kernel", "argument"),
    [
        (ALIBI, {"slopes": torch.zeros(2)}, "attention_bwd_queries", "row_sums"),
        (
            variants.forget_gate & variants.causal,
            {"log_decay": torch.zeros(2, 2, 80)},
            "attention_bwd_keys",
            "ds_sums",
        ),
    ],
    ids=["per query", "per key"],
)
def test_captures_of_wide_heads_learn_in_kernels_of_their_own(
    variant: Variant,
    captures: dict[str, torch.Tensor],
    kernel: str,
    argument: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uncompiled(monkeypatch)
    only_usual(monkeypatch)
    path = built(tmp_path, variant, target="cuda:90", phase=("fwd", "bwd"), head_dim=192)
    launches = [str(r["launch"]) for r in bundle.read(path).records if r["kernel"] == kernel]
    assert [f"'{argument}'" in launch for launch in launches].count(True) * 2 == len(launches) > 0
    gpu, attn = Gpu(monkeypatch, "cuda:90"), scoremod.load(path)
    monkeypatch.setattr(attend_hopper.CACHE, "get_or_compile", lambda *_: pytest.fail("compiles"))
    for learns in (False, True):
        given = {n: x.clone().requires_grad_(learns) for n, x in captures.items()}
        assert trained(gpu, attn, given, dim=192) == WIDE
        assert all((x.grad is not None) == learns for x in given.values())


def test_a_refusal_of_one_of_them_is_recorded_and_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uncompiled(monkeypatch)
    only_usual(monkeypatch)
    made = backward_hopper_wide.compile_wide

    def refuse_one(kernel: str, *rest: Any, **more: Any) -> Kernel:
        return refuse() if kernel == "attention_bwd_queries" else made(kernel, *rest, **more)

    monkeypatch.setattr(backward_hopper_wide, "compile_wide", refuse_one)
    path = built(tmp_path, variants.causal, target="cuda:90", phase=("fwd", "bwd"), head_dim=192)
    gpu = Gpu(monkeypatch, "cuda:90")
    assert trained(gpu, scoremod.load(path), {}, dim=192) == PORTABLE
    refused = [r["kernel"] for r in bundle.read(path).records if "refused" in r]
    assert refused == ["attention_bwd_queries"]


def test_explain_says_what_a_bundle_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uncompiled(monkeypatch)
    only_usual(monkeypatch)
    path = built(tmp_path, variants.causal, target="cuda:90", phase=("fwd", "bwd"))
    Gpu(monkeypatch, "cuda:90")
    first, sums, *tried = explained(path, monkeypatch)
    assert sums == "  dq       summed in float32 for a few heads at a time"
    assert first.startswith("  backward dq, dk and dv in one kernel: 128 queries by 128 keys")
    # Of the backward and of the forward.
    assert len(tried) == 2 and all(line.endswith(": taken") for line in tried)


# -- what is compiled for a bundle -------------------------------------------------------------


def kernels_of(variant: Variant, folder: Path, **wish: Any) -> list[tuple[str, str, str]]:
    """Hopper's backward kernels in a bundle: which, of what call and captures."""
    folder.mkdir()
    path = built(folder, variant, target="cuda:90", phase=("fwd", "bwd"), **wish)
    return sorted(
        (r["kernel"], r["call"], *r["params"])
        for r in bundle.read(path).records
        if r["kernel"] in ("hopper_bwd", "attention_bwd_rows", "attention_bwd_finish")
    )


def test_one_kernel_serves_any_call_where_nothing_depends_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uncompiled(monkeypatch)
    only_usual(monkeypatch, f"{USUAL_AND_ANY}|multiples of 16")
    around = [
        ("attention_bwd_finish", "usual"),
        ("attention_bwd_rows", "usual"),
        ("attention_bwd_rows", "usual"),
    ]
    assert kernels_of(variants.causal, tmp_path / "a") == [
        *around,
        ("hopper_bwd", "usual"),
        ("hopper_bwd", "usual, kv_lens"),
    ]
    # How far a table reaches decides the type of its strides, and a large number its own.
    for variant, captures in ((ALIBI, ["f32[1-d]"]), (variants.sliding_window, ["int"])):
        calls = ("any", "any, kv_lens", "usual", "usual, kv_lens")
        assert kernels_of(variant, tmp_path / variant.name) == [
            *around,
            *(("hopper_bwd", call, *captures) for call in calls),
        ]


def test_kernels_that_no_call_would_reach_are_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uncompiled(monkeypatch)
    only_usual(monkeypatch)
    assert kernels_of(variants.causal, tmp_path / "f32", dtype="f32") == []
    # A number that learns is a tensor.
    found = kernels_of(variants.softcap, tmp_path / "softcap")
    assert [x[1:] for x in found if x[0] == "hopper_bwd"] == [
        ("usual", "0-d f32"),
        ("usual", "float"),
    ]


# -- compiled ----------------------------------------------------------------------------------


def build_for_hopper(name: str, folder: Path) -> Path:
    """A bundle of usual calls. Hopper's backward has code, and what is not launched has none."""
    with pytest.MonkeyPatch.context() as patch:
        only_usual(patch)
        for module in (attend_triton, backward_triton):
            patch.setattr(module, "compile_kernel", compiled)
        patch.setattr(attend_hopper, "compile_plan", compiled_forward)
        folder.mkdir()
        return built(folder, VARIANTS[name], target="cuda:90", phase=("fwd", "bwd"))


@pytest.fixture(scope="module")
def build_apart() -> Iterator[Callable[..., Path]]:
    """Build in a process where Triton's interpreter was never asked for, as other tests do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            pool.submit(os.getpid).result()
            yield lambda *args: pool.submit(build_for_hopper, *args).result()


# Half a minute; what a bundle holds for Hopper is looked at above.
@pytest.mark.compile_all
def test_a_process_without_triton_runs_hoppers_backward(
    tmp_path: Path, build_apart: Callable[..., Path]
) -> None:
    found = without_triton(build_apart("causal", tmp_path / "made"), "cuda:90")
    assert (found["forward"], found["backward"]) == (["hopper"], OURS)
    assert found["operator"] == ["hopper", *OURS]
    assert found["compile_count"] == 0 and not found["sympy"]


@pytest.mark.compile_all
@pytest.mark.parametrize("name", VARIANTS)
def test_two_builds_of_hoppers_backward_are_the_same_bytes(
    name: str, tmp_path: Path, build_apart: Callable[..., Path]
) -> None:
    first, again = (build_apart(name, tmp_path / x).read_bytes() for x in ("first", "again"))
    assert first == again

"""Bundles: built twice alike, loaded without Triton, and never read damaged or guessed from."""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bundle_process import pretend
from click.testing import CliRunner
from test_launch import FakeDriver
from test_launch import kernel as fake_kernel

import scoremod
from scoremod import (
    Variant,
    ahead,
    attend_hopper,
    attend_triton,
    backward_hopper,
    backward_hopper_wide,
    backward_triton,
    bundle,
    hopper_rows,
    ready,
    structure,
    variants,
)
from scoremod.backends import compile_hopper, compile_hopper_backward, compile_hopper_wide
from scoremod.backends.compile_triton import Kernel, TensorMap, compile_kernel
from scoremod.bundle import Bundle, Item, Kind, Title
from scoremod.cli import main
from scoremod.errors import (
    BackendUnavailable,
    BundleInvalid,
    KernelMissing,
    MissingCapture,
    ScoremodError,
)
from scoremod.frontend import parsed
from scoremod.frontend.parsed import as_data, from_data
from scoremod.frontend.source import read_text_source
from scoremod.launch import Launcher
from scoremod.plan_hopper import HopperPlan
from scoremod.plan_hopper_backward import MAIN, HopperBackwardPlan
from scoremod.plan_hopper_wide import WidePlan
from scoremod.plan_triton import Options
from scoremod.target import parse_target

TESTS = Path(__file__).parent
NOTHING = Title(read_text_source("variant nothing() { mask true }"), (), ())
DOC = variants.document & variants.causal
AMPERE, HOPPER = parse_target("cuda:80"), parse_target("cuda:90")


def compiled(
    text: str, entry: str, arguments: Any, constants: Any, target: Any, **_: Any
) -> Kernel:
    """What stands for a compiled kernel: rendered and with its arguments, but without code."""
    found, image = tuple(arguments), b"\x7fELF" + entry.encode()
    plain = fake_kernel(entry=entry, target=target, text=text, shared=1024, image=image)
    maps = (TensorMap("bf16", (1,), 0),) * sum(a.type == "tensormap" for a in found)
    return replace(plain, arguments=found, constants=tuple(constants.items()), tensor_maps=maps)


def compiled_forward(plan: HopperPlan, text: str) -> tuple[Kernel, str]:
    """The same of Hopper's forward, and of its backward."""
    arguments, tile = compile_hopper.launched(plan), compile_hopper.constants(plan)
    return compiled(text, "hopper", arguments, tile, plan.target), ""


def compiled_backward(plan: HopperBackwardPlan, text: str) -> tuple[Kernel, str]:
    arguments, tile = (
        compile_hopper_backward.launched(plan),
        compile_hopper_backward.constants(plan),
    )
    return compiled(text, MAIN, arguments, tile, plan.target), ""


def compiled_wide(plan: WidePlan, text: str) -> tuple[Kernel, str]:
    arguments, tile = compile_hopper_wide.launched(plan), compile_hopper_wide.constants(plan)
    return compiled(text, plan.kernel, arguments, tile, plan.target), ""


def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build bundles without a compiler."""
    for module in (attend_triton, backward_triton, hopper_rows, structure):
        monkeypatch.setattr(module, "compile_kernel", compiled)
    monkeypatch.setattr(attend_hopper, "compile_plan", compiled_forward)
    monkeypatch.setattr(backward_hopper, "compile_plan", compiled_backward)
    monkeypatch.setattr(backward_hopper_wide, "compile_plan", compiled_wide)


@pytest.fixture(scope="module")
def apart() -> Iterator[None]:
    """Compile in a process where Triton's interpreter was never asked for, as other tests do."""
    spawn = multiprocessing.get_context("spawn")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        with ProcessPoolExecutor(1, spawn) as pool:
            pool.submit(os.getpid).result()

            def compiled_apart(*args: Any, **options: Any) -> Kernel:
                return pool.submit(compile_kernel, *args, **options).result()

            for module in (attend_triton, backward_triton, structure):
                patch.setattr(module, "compile_kernel", compiled_apart)
            yield


def only_usual(monkeypatch: pytest.MonkeyPatch, words: str = "usual") -> None:
    """Build the kernels of some calls alone, which takes seconds."""
    found = ahead.calls
    monkeypatch.setattr(
        ahead, "calls", lambda *args: [c for c in found(*args) if re.fullmatch(words, c[0])]
    )


class Driver(FakeDriver):
    """Takes all that it is given."""

    def launch(self, *_: Any) -> int:
        return 0


class Gpu:
    """A GPU to launch on: tensors on the CPU pass for its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
        self.launched: list[Kernel] = []
        pretend(target, self._launcher, monkeypatch.setattr)
        monkeypatch.setattr(ready, "_READY", {})
        monkeypatch.setattr(attend_hopper, "_REFUSED", {})
        monkeypatch.setattr(attend_hopper, "_READY", {})
        monkeypatch.setattr(backward_hopper, "_KERNELS", {})
        # So that `backend="triton"` takes tensors on the CPU.
        monkeypatch.setenv("TRITON_INTERPRET", "1")

    def _launcher(self, kernel: Kernel) -> Launcher:
        launching = Launcher(kernel, Driver())
        prepare = launching.prepare

        def noted(*args: Any) -> Any:
            self.launched.append(kernel)
            return prepare(*args)

        launching.prepare = noted  # type: ignore[method-assign]
        return launching

    def take(self) -> list[Kernel]:
        """What was launched since the last time."""
        found, self.launched[:] = self.launched[:], []
        return found


def built(folder: Path, variant: Variant, **wish: Any) -> Path:
    wish = {"target": "cuda:80", "dtype": "bf16", "head_dim": 64, **wish}
    return variant.build(folder / "made.smk", **wish)


def tensors(q_len: int = 80, kv_len: int = 80, dim: int = 64, **options: Any) -> list[torch.Tensor]:
    options = {"dtype": torch.bfloat16, **options}
    return [torch.zeros(2, 2, n, dim, **options) for n in (q_len, kv_len, kv_len)]


# -- without Triton ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory, apart: None) -> Path:
    """A bundle with real kernels: forward, backward and tile structures."""
    with pytest.MonkeyPatch.context() as patch:
        only_usual(patch)
        return built(
            tmp_path_factory.mktemp("bundle"),
            DOC,
            head_dim=16,
            phase=("fwd", "bwd"),
            captures={"doc": torch.int64},
        )


def without_triton(path: Path, target: str) -> dict[str, Any]:
    """What a process without Triton and compiler launches of a bundle's kernels."""
    environment = {**os.environ, "PATH": "", "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(TESTS / "bundle_process.py"), str(path), target]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_process_without_triton_and_compiler_runs_forward_and_backward(documents: Path) -> None:
    found = without_triton(documents, "cuda:80")
    tiles = ["tile_structure"] * 2  # its two phases
    forward = [*tiles, "attention_fwd"]
    backward = ["attention_bwd_delta", *tiles, "attention_bwd_dkdv", *tiles, "attention_bwd_dq"]
    assert found["forward"] == forward
    assert found["backward"] == backward
    assert found["operator"] == forward + backward
    assert found["compile_count"] == 0
    assert not found["sympy"]  # nothing was simplified, either
    assert found["load"] + found["first"] < 1, found  # some 0.03 s on an idle machine


def test_what_a_bundle_holds(documents: Path) -> None:
    with zipfile.ZipFile(documents) as file:
        manifest = json.loads(file.read("manifest.json"))
        names = file.namelist()
        assert names == sorted(names)
        assert {i.compress_type for i in file.infolist()} == {zipfile.ZIP_STORED}
        assert {i.date_time for i in file.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        for name, digest in manifest["digests"].items():
            assert hashlib.sha256(file.read(name)).hexdigest() == digest
        assert set(names) == {*manifest["digests"], "manifest.json"}
    assert manifest["text"] == str(DOC)
    assert manifest["captures"] == ["doc: tensor[B, L]"]
    for record in manifest["kernels"]:
        assert record["launch"]["num_warps"] in (1, 4, 8)
        assert record["image"] in names
        assert record["source"] in names


def test_a_parsed_text_is_read_again_without_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    text = str(DOC | variants.sliding_window.bind(window=8))
    source = read_text_source(text)
    data = json.loads(json.dumps(as_data(source)))
    again = from_data(data, source.file)
    assert again.tree == source.tree
    nodes = zip(source.tree.iter_subtrees(), again.tree.iter_subtrees(), strict=True)
    assert all(source.span(a) == again.span(b) for a, b in nodes)
    # Another grammar may have other rules.
    assert from_data({**data, "grammar": "", "tree": None}, "x").tree == source.tree
    monkeypatch.setattr(parsed, "read_text_source", lambda *_: pytest.fail("parses"))
    assert from_data(data, "x").text == text


# -- built twice -------------------------------------------------------------------------------

AGAIN = """
import scoremod, sys
from scoremod import ahead
found = ahead.calls
ahead.calls = lambda *args: [c for c in found(*args) if c[0] == "usual"]
scoremod.variants.causal.build(
    sys.argv[1], target=["hip:gfx942", "cuda:80"], dtype="f16", head_dim=16
)
"""


@pytest.mark.usefixtures("apart")
def test_two_builds_are_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_usual(monkeypatch)
    targets = ["cuda:80", "hip:gfx942"]
    first = built(tmp_path, variants.causal, target=targets, dtype=torch.float16, head_dim=16)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    again = elsewhere / "again.smk"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TMPDIR": str(elsewhere)}
    environment["PYTHONPATH"] = str(TESTS.parent)
    command = [sys.executable, "-c", AGAIN, str(again)]
    subprocess.run(command, check=True, env=environment, cwd=elsewhere)
    assert again.read_bytes() == first.read_bytes()
    assert os.listdir(elsewhere) == ["again.smk"]
    images = {r["target"]: r["image"] for r in bundle.read(first).records}
    assert {t: Path(x).suffix for t, x in images.items()} == {
        "cuda:80": ".cubin",
        "hip:gfx942": ".hsaco",
    }


# -- damage ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of one kernel without code."""
    path = tmp_path_factory.mktemp("small") / "small.smk"
    what = ("attention_fwd", ("score", "mask", ()), Options("bf16", 64, 64))
    title = Title(read_text_source(str(variants.causal)), (), ())
    bundle.write(path, title, [Item(what, AMPERE, "usual", fake_kernel(target=AMPERE))])
    return path


def test_every_changed_byte_is_found_out(small: Path) -> None:
    data = small.read_bytes()
    for place in [*range(0, len(data), 17), *range(len(data) - 90, len(data))]:
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(BundleInvalid):
            bundle.unpack(bytes(changed), "changed.smk")


def with_manifest(data: bytes, **changes: Any) -> bytes:
    """A bundle with another manifest, and a digest that fits."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        entries = {name: file.read(name) for name in file.namelist()}
    manifest = {**json.loads(entries["manifest.json"]), **changes}
    return bundle.pack({**entries, "manifest.json": json.dumps(manifest).encode()})


def another_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("a", "b")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "it is not even a zip file"),
        (lambda data: b"#!/bin/sh\n" * 40, "it is not even a zip file"),
        (lambda data: data[:-1], "is cut short"),
        (lambda data: data[: len(data) // 2], "is cut short"),
        (lambda data: another_zip(), "is a zip file, but no bundle"),
        (lambda data: data[:99] + b"?" + data[100:], "not as it was written"),
        (lambda data: with_manifest(data, format=9), "has format 9; this scoremod reads format 4"),
        (lambda data: bundle.pack({"a": b"b"}), "it has no manifest.json"),
    ],
    ids=["empty", "script", "a byte less", "half", "zip", "changed", "format", "no manifest"],
)
def test_each_damage_has_its_message(
    small: Path, tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    path = tmp_path / "damaged.smk"
    path.write_bytes(change(small.read_bytes()))
    path.chmod(0o600)
    with pytest.raises(BundleInvalid, match=message):
        scoremod.load(path)


def test_files_that_cannot_be_trusted_are_not_read(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "shared.smk"
    path.write_bytes(small.read_bytes())
    path.chmod(0o664)
    with pytest.raises(BundleInvalid, match=r"others can write .*\n  hint: chmod go-w"):
        scoremod.load(path)
    path.chmod(0o644)
    link = tmp_path / "link.smk"
    link.symlink_to(path)
    assert scoremod.load(link) == variants.causal
    with pytest.raises(BundleInvalid, match="there is no file"):
        scoremod.load(tmp_path / "none.smk")
    with pytest.raises(BundleInvalid, match=r"is a folder|belongs to somebody"):
        scoremod.load(tmp_path)
    with pytest.raises(BundleInvalid, match="cannot write"):
        bundle.write(tmp_path, NOTHING, [])
    assert sorted(os.listdir(tmp_path)) == ["link.smk", "shared.smk"]


# -- which kernel serves a call ----------------------------------------------------------------


def bundle_of(*options: Options) -> Bundle:
    """A bundle in memory: a kernel for each of some options, told apart by its registers."""
    items = [
        Item(what(chosen), AMPERE, "", replace(fake_kernel(), registers=k))
        for k, chosen in enumerate(options)
    ]
    entries = bundle._entries(NOTHING, items)
    return bundle.unpack(bundle.pack(entries), "made.smk")


def what(chosen: Options) -> tuple[object, ...]:
    return ("attention_fwd", ("score", "mask", ()), chosen)


USUAL = Options("bf16", 64, 64, even=False)
ANY = replace(USUAL, small=False, wide_offsets=True, aligned=False, positive_scale=False)


@pytest.mark.parametrize(
    ("call", "number"),
    [
        (USUAL, 0),
        (replace(USUAL, even=True), 0),
        (replace(USUAL, short=True), 0),
        (replace(USUAL, aligned=False), 1),
        (replace(USUAL, small=False), 1),
        (replace(ANY, even=True), 1),
    ],
)
def test_a_kernel_that_promises_less_serves_where_none_fits(call: Options, number: int) -> None:
    found = bundle_of(USUAL, ANY)
    assert found.kernel(what(call), AMPERE).registers == number


@pytest.mark.parametrize(
    "change", [{"has_kv_lens": True}, {"dtype": "f16"}, {"head_dim": 128}, {"precision": "exact"}]
)
def test_nothing_stands_in_for_other_arguments(change: dict[str, Any]) -> None:
    with pytest.raises(KernelMissing):
        bundle_of(USUAL, ANY).kernel(what(replace(USUAL, **change)), AMPERE)


def test_a_promise_is_never_broken() -> None:
    strong, weak = (Kind.of(what(x), AMPERE) for x in (replace(USUAL, even=True), USUAL))
    assert weak.serves(strong)
    assert not strong.serves(weak)
    assert not weak.serves(Kind.of(what(USUAL), HOPPER))


CALLS: dict[str, dict[str, Any]] = {
    "usual": {},
    "multiples of 16": {"q_len": 96, "kv_len": 96},
    "few queries": {"q_len": 1},
    "large": {"q_offset": 2**30},
    "kv_lens": {"kv_lens": torch.tensor([5, 80], dtype=torch.int32)},
    "decoding": {
        "q_len": 1,
        "kv_lens": torch.tensor([5, 80], dtype=torch.int32),
        "q_offset": torch.tensor([4, 79], dtype=torch.int32),
    },
    "offsets": {"q_offset": torch.tensor([4, 79], dtype=torch.int32)},
    "offsets, few queries": {"q_len": 1, "q_offset": torch.tensor([4, 79], dtype=torch.int32)},
    "large, kv_lens": {"q_offset": 2**30, "kv_lens": torch.tensor([5, 80], dtype=torch.int32)},
    "negative scale": {"scale": -1.0},
    "odd rows": {"odd": True},
    "odd rows, few queries": {"odd": True, "q_len": 3},
}


@pytest.fixture(scope="module")
def sweeping(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles of a mask that is a range, and of one that needs a structure."""
    with pytest.MonkeyPatch.context() as patch:
        uncompiled(patch)
        learned = variants.alibi & variants.causal
        return {
            name: built(
                tmp_path_factory.mktemp(name), variant, phase=["fwd", "bwd"], captures=captures
            )
            for name, variant, captures in (
                ("range", learned, {}),
                ("structure", DOC, {"doc": torch.int64}),
            )
        }


@pytest.mark.parametrize("name", ["range", "structure"])
@pytest.mark.parametrize("call", CALLS)
def test_ordinary_calls_find_a_kernel(
    name: str, call: str, sweeping: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, attn = Gpu(monkeypatch, "cuda:80"), scoremod.load(sweeping[name])
    how = dict(CALLS[call])
    q, k, v = tensors(how.pop("q_len", 80), how.pop("kv_len", 80))
    if how.pop("odd", False):
        q = torch.zeros(*q.shape[:3], 65, dtype=q.dtype)[..., 1:]
    if name == "structure":
        captures = {"doc": torch.zeros(2, 1, dtype=torch.int64)}
    else:
        captures = {"slopes": torch.zeros(2)}
    attn(q, k, v, backend="triton", **how, **captures)
    assert [x.entry for x in gpu.take()][-1] == "attention_fwd"
    if isinstance(how.get("q_offset"), torch.Tensor):
        return  # gradients there are asked for by `also`
    leaves = [x.requires_grad_() for x in (q.detach(), k, v)]
    learned = {n: x.requires_grad_(x.is_floating_point()) for n, x in captures.items()}
    attn(*leaves, backend="triton", **how, **learned).sum().backward()
    launched = [x.entry for x in gpu.take()]
    assert {"attention_bwd_delta", "attention_bwd_dkdv", "attention_bwd_dq"} <= set(launched)
    assert leaves[0].grad is not None


def test_a_learned_number_is_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uncompiled(monkeypatch)
    only_usual(monkeypatch)
    made = built(tmp_path, scoremod.parse("variant c(cap: float) { score s * cap }"),
                 phase=("fwd", "bwd"))  # fmt: skip
    Gpu(monkeypatch, "cuda:80")
    attn, (q, k, v) = scoremod.load(made), tensors(requires_grad=True)
    cap = torch.tensor(30.0, requires_grad=True)
    attn(q, k, v, cap=cap, backend="triton").sum().backward()
    attn(q, k, v, cap=30.0, backend="triton").sum().backward()
    assert cap.grad is not None


BIASED = (
    "variant v(bias: f32[B, H, Lq, Lk], slopes: f32[H]) { score s + bias[b, h, i, j] * slopes[h] }"
)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("learned", [("bias", "slopes"), ("bias",), ("slopes",)], ids="_".join)
def test_some_captures_are_learned_and_batches_share_a_table(
    sharing: Path, monkeypatch: pytest.MonkeyPatch, batch: int, learned: tuple[str, ...]
) -> None:
    gpu, attn = Gpu(monkeypatch, "cuda:80"), scoremod.load(sharing)
    captures = {"bias": torch.zeros(batch, 2, 80, 80), "slopes": torch.zeros(2)}
    for name in learned:
        captures[name].requires_grad_()
    attn(*tensors(), backend="triton", **captures).sum().backward()
    assert all((x.grad is not None) == (n in learned) for n, x in captures.items())
    assert "attention_bwd_pairs" in [x.entry for x in gpu.take()]


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        uncompiled(patch)
        only_usual(patch)
        folder = tmp_path_factory.mktemp("sharing")
        return built(folder, scoremod.parse(BIASED), phase=("fwd", "bwd"))


def test_what_few_calls_use_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uncompiled(monkeypatch)
    only_usual(monkeypatch, "usual, .*(scale|exact|blocks|offset).*")
    made = built(tmp_path, variants.causal, phase=("fwd", "bwd"), also=ahead.ALSO)
    Gpu(monkeypatch, "cuda:80")
    attn = scoremod.load(made)
    offsets, lens = torch.tensor([4, 79]), torch.tensor([5, 80])
    for how in (
        {"scale": torch.tensor(0.5)},
        {"scale": torch.tensor(0.5), "kv_lens": lens, "q_offset": offsets},
        {"precision": "exact", "kv_lens": lens},
        {"tiles": (torch.ones(1, 1, dtype=torch.bool), 128)},
        {"q_offset": offsets},
    ):
        q, k, v = (x.requires_grad_() for x in tensors())
        attn(q, k, v, backend="triton", **how).sum().backward()
        assert q.grad is not None


# -- what is missing ---------------------------------------------------------------------------


def missing(attn: Variant, dim: int = 64, dtype: Any = torch.bfloat16, **call: Any) -> str:
    with pytest.raises(KernelMissing) as caught:
        attn(*tensors(dim=dim, dtype=dtype), backend="triton", **call)
    return str(caught.value)


def test_a_missing_kernel_is_named_with_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uncompiled(monkeypatch)
    path = built(tmp_path, DOC)
    Gpu(monkeypatch, "cuda:80")
    attn, doc = scoremod.load(path), torch.zeros(2, 80, dtype=torch.int32)
    of_dim = missing(attn, dim=32, doc=doc)
    assert "no kernel `attention_fwd` for this call on cuda:80: bf16, head dim 32" in of_dim
    assert "captures i32[2-d]" in of_dim
    assert "hint: it has it for: bf16, head dim 64, captures i32[2-d] (any, any, few quer" in of_dim
    assert "f16, head dim 64" in missing(attn, dtype=torch.float16, doc=doc)
    assert "captures i64[2-d]" in missing(attn, doc=doc.long())
    of_scale = missing(attn, doc=doc, scale=torch.tensor(0.5))
    assert "scale as a tensor" in of_scale and "build it with also='scale'; it has" in of_scale
    assert "precision 'exact'" in missing(attn, doc=doc, precision="exact")
    assert "a list of blocks in tiles=" in missing(
        attn, doc=doc, tiles=(torch.ones(1, 1, dtype=torch.bool), 128)
    )
    q, k, v = tensors(requires_grad=True)
    with pytest.raises(KernelMissing, match="gradients need phase='bwd' when it is built"):
        attn(q, k, v, doc=doc, backend="triton").sum().backward()


def test_another_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uncompiled(monkeypatch)
    only_usual(monkeypatch)
    attn = scoremod.load(built(tmp_path, variants.causal))
    Gpu(monkeypatch, "cuda:90")
    assert "made.smk has kernels for cuda:80, not for this GPU, cuda:90" in missing(attn)


def test_nothing_is_compiled_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uncompiled(monkeypatch)
    only_usual(monkeypatch)
    attn = scoremod.load(built(tmp_path, variants.causal))
    Gpu(monkeypatch, "cuda:80")
    monkeypatch.setattr(ready.CACHE, "get_or_compile", lambda *_: pytest.fail("compiles"))
    missing(attn, dim=32)
    bound = attn.rename().bind()
    assert bound(*tensors(), backend="triton").shape == (2, 2, 80, 64)
    # What is put together with others is another variant, and compiled as ever.
    assert (attn & variants.causal)._bundle == ""


def test_a_program_of_a_bundle_that_is_not_loaded(small: Path) -> None:
    with pytest.raises(KernelMissing, match="which this process did not load"):
        bundle.loaded("0" * 64)
    attn = scoremod.load(small)
    text = attn._operator_text(())
    assert bundle.digest_in(text) == bundle.read(small).digest
    assert scoremod.parse(text) == attn


# -- Hopper ------------------------------------------------------------------------------------


def test_hoppers_kernels_and_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uncompiled(monkeypatch)
    only_usual(monkeypatch)
    with_hopper = bundle.read(built(tmp_path, variants.causal, target="cuda:90"))
    assert {r["kernel"] for r in with_hopper.records} == {"attention_fwd", "hopper"}

    def refuse(*_: Any) -> Kernel:
        raise BackendUnavailable("it needs too many registers\nand more")

    monkeypatch.setattr(attend_hopper, "compile_forward", refuse)
    path = built(tmp_path, variants.causal, target="cuda:90")
    attn = scoremod.load(path)
    program, bound = attn._bind({}, attn._sizes(80, 80, 0, 0, 0), None)
    known = attn._type(program, bound)
    chosen = attend_hopper.of_options(known, Options("bf16", 64, 64))
    with pytest.raises(BackendUnavailable, match=r"^it needs too many registers$"):
        attend_hopper.store(known, chosen, HOPPER)


# -- what was asked for ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"target": "cuda:42"}, "there is no target 'cuda:42'"),
        ({"target": "interpreter"}, "no kernels for interpreter"),
        ({"target": []}, "needs one target"),
        ({"dtype": "int8"}, "is not a dtype"),
        ({"dtype": "f64"}, "kernels take f16, bf16 or f32, not f64"),
        ({"head_dim": 0}, "head_dim must be an int from 1 to 512"),
        ({"head_dim": [64, 128], "v_head_dim": [64, 64, 64]}, "v_head_dim must be one value or 2"),
        ({"phase": "sideways"}, "phase must be 'fwd' or 'bwd'"),
        ({"also": "everything"}, "also takes blocks, exact, offsets, scale, not 'everything'"),
        ({"captures": {"dok": torch.int64}}, "did you mean doc"),
    ],
)
def test_wishes_that_cannot_be(
    wish: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead.Shelf, "run", lambda *_: pytest.fail("compiles before it checks"))
    with pytest.raises(ScoremodError, match=re.escape(message)):
        built(tmp_path, DOC, **wish)
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_costs_no_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead.Shelf, "run", lambda *_: pytest.fail("compiles before it checks"))
    with pytest.raises(BundleInvalid, match="there is no folder"):
        built(tmp_path / "none", DOC)


def test_all_combinations_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_usual(monkeypatch)
    uncompiled(monkeypatch)
    path = built(tmp_path, DOC, target="hip:gfx942", dtype=["bf16", torch.float32],
                 head_dim=[64, 128], v_head_dim=[64, 256],
                 captures={"doc": [torch.int32, torch.int64]})  # fmt: skip
    found = {
        (r["target"], r["made_for"], *r["params"])
        for r in bundle.read(path).records
        if r["kernel"] == "attention_fwd"
    }
    assert len(found) == 8
    assert ("hip:gfx942", "f32, head dims 128 and 256", "i64[2-d]") in found


def test_what_was_bound_is_a_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uncompiled(monkeypatch)
    only_usual(monkeypatch)
    attn = scoremod.load(built(tmp_path, variants.sliding_window.bind(window=7)))
    q, k, v = tensors(dtype=torch.float32)
    assert torch.equal(attn(q, k, v), variants.sliding_window(q, k, v, window=7))
    with pytest.raises(MissingCapture, match="`slopes` was not given"):
        scoremod.load(built(tmp_path, variants.alibi.bind(slopes=torch.zeros(2))))(q, k, v)


# -- the command line --------------------------------------------------------------------------


def command(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, args)
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.output


def test_build_and_inspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uncompiled(monkeypatch)
    monkeypatch.chdir(tmp_path)
    said = command(
        *("build", "sliding_window", "--target", "cuda:90", "--target", "cuda:80"),
        *("--head-dim", "64", "--set", "window=9", "-o", "made.smk"),
    )
    assert said.startswith("made.smk: 34 kernels for cuda:80, cuda:90, ")
    text = command("inspect", "made.smk")
    assert "captures\n  window: int = 9\n" in text
    lines = text.splitlines()
    assert sum(line.startswith("  cuda:90  hopper ") for line in lines) == 8
    assert sum("few queries, kv_lens " in line for line in lines) == 2
    found = json.loads(command("inspect", "made.smk", "--json"))
    assert found["digest"] == bundle.read("made.smk").digest
    assert len(found["kernels"]) == 34
    assert "window: int = 9" in command("show", "made.smk")


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["inspect", "none.smk"], 1, "error: there is no file none.smk"),
        (["inspect", str(TESTS / "test_bundle.py")], 1, "it is not even a zip file"),
        (["show", "none.smk"], 1, "error: there is no file none.smk"),
        (["build", "causal"], 2, "Missing option '-o'"),
        (["build", "causal", "-o", "no/such/folder.smk"], 1, "cannot write no/such/folder.smk"),
        (["build", "causal", "--target", "cuda:42", "-o", "x"], 1, "no target 'cuda:42'"),
        (["build", "causal", "--phase", "both", "-o", "x"], 2, "'both' is not one of"),
        (["build", "document", "--capture", "doc", "-o", "x"], 2, "'doc' is not NAME=DTYPE"),
    ],
)
def test_mistakes_on_the_command_line(
    args: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uncompiled(monkeypatch)
    only_usual(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert message in command(*args, code=code)
    assert os.listdir(tmp_path) == []


# -- the format --------------------------------------------------------------------------------


def test_the_order_of_arguments_is_part_of_the_format(
    sweeping: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    golden: Callable[[str, str], None],
) -> None:
    """A change here makes old bundles wrong: raise bundle.FORMAT with it."""
    uncompiled(monkeypatch)
    only_usual(monkeypatch)
    hopper = built(tmp_path, DOC, target="cuda:90", phase=("fwd", "bwd"))
    longest: dict[str, str] = {}
    for path in (*sweeping.values(), hopper):
        for record in bundle.read(path).records:
            words = " ".join(a["name"] for a in record["launch"]["arguments"])
            longest[record["kernel"]] = max(longest.get(record["kernel"], ""), words, key=len)
    lines = [f"{name}\n  {words}" for name, words in sorted(longest.items())]
    golden("bundle_arguments.txt", "\n".join([f"format {bundle.FORMAT}", *lines]))

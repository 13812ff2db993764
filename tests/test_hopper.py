"""The Hopper backend without a GPU: which calls it takes, what it renders, that it compiles."""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scoremod import Variant, attend_hopper, attend_triton, parse, variants
from scoremod.backends import compile_hopper
from scoremod.backends.compile_hopper import SPILLS, complaint, launched, spills_in_loops
from scoremod.backends.compile_triton import Kernel, Report, softmax_loops
from scoremod.blocks import Blocks
from scoremod.errors import BackendUnavailable
from scoremod.gradients import Answer
from scoremod.inputs import check_inputs
from scoremod.plan import Typed, assumed_params, typed
from scoremod.plan_hopper import CONFIGS, REGISTERS, HopperPlan, Tiles, padded
from scoremod.plan_triton import Options
from scoremod.target import parse_target

H200 = parse_target("cuda:90")
NOOP = parse("variant noop() { mask True }")
FIVE: dict[str, Variant] = {
    "noop": NOOP,
    "causal": variants.causal,
    "alibi": variants.alibi & variants.causal,
    "softcap": variants.softcap & variants.causal,
    "window": variants.sliding_window,
}
NAMED = {
    **FIVE,
    "documents": variants.document & variants.causal,
    "sinks": variants.sink_window,  # two ranges of keys
}


def program(variant: Variant) -> Typed:
    return typed(variant._program, assumed_params(variant._program), ("what the user wrote",))


def plans(variant: Variant, head_dim: int = 128, **options: Any) -> list[HopperPlan]:
    known = program(variant)
    chosen = attend_hopper.of_options(known, Options("bf16", head_dim, head_dim, **options))
    return attend_hopper.plans(known, chosen, H200)


# -- which calls it takes ----------------------------------------------------------------------


def reason(variant: Variant = NOOP, **call: Any) -> str:
    """Why a call is not for Hopper kernels: [2, 4, 128, 64] in bf16 unless told otherwise."""
    q = call.pop("q", torch.empty(2, 4, 128, 64, dtype=torch.bfloat16))
    k = call.pop("k", q)
    v = call.pop("v", k)
    lens, blocks = call.pop("kv_lens", None), call.pop("blocks", None)
    inputs = check_inputs(q, k, v, scale=None, q_offset=0, kv_lens=lens, precision="auto")
    if blocks is not None:
        tiles = Blocks(torch.ones(1, 1, 9, 9, dtype=torch.bool), blocks, blocks)
        inputs = replace(inputs, tiles=tiles)
    return attend_hopper.unfit(program(variant), inputs)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


GROUPED = empty(1, 2, 128, 64)
TAKEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "a window": {"variant": variants.sliding_window},
    "grouped heads, k and v of batch 1": {"k": GROUPED},
    "heads behind the length": {"q": empty(2, 128, 4, 64).transpose(1, 2)},
    "a head dim that is padded": {"q": empty(2, 4, 128, 72)},
    "kv_lens": {"kv_lens": torch.ones(2, dtype=torch.int32)},
    "a table of documents": {"variant": variants.document},
    "two ranges": {"variant": parse("variant v() { mask j < 4 or j == i }")},
    "blocks of 256": {"blocks": 256},
    "another head dim of v": {"q": empty(2, 4, 128, 192), "v": empty(2, 4, 128, 128)},
}
NOT_TAKEN: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"q": empty(2, 4, 128, 64, dtype=torch.float32)}, "16-bit floats, not of f32"),
    "small head dims": ({"q": empty(2, 4, 128, 32)}, "head dims 32 and 32 are not multiples of 8"),
    "odd head dims": ({"q": empty(2, 4, 128, 100)}, "head dims 100 and 100"),
    "large head dims": ({"q": empty(2, 4, 128, 264)}, "head dims 264 and 264"),
    "decoding": ({"q": empty(2, 4, 1, 64), "k": empty(2, 4, 128, 64)}, "1 queries would leave"),
    "no keys": ({"k": empty(2, 4, 0, 64)}, "nothing to copy"),
    "small blocks": ({"blocks": 64}, "64 x 64 do not hold whole tiles of 128 x 128"),
    "rows at odd places": ({"q": empty(2, 4, 128, 68)[..., :64]}, r"copy q: its strides are"),
    "an expanded head": ({"k": empty(2, 1, 128, 64).expand(2, 4, 128, 64)}, "copy k"),
    "columns apart": ({"v": empty(2, 4, 128, 128)[..., ::2]}, "copy v"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_calls_that_are_taken(name: str) -> None:
    assert reason(**TAKEN[name]) == ""


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_calls_that_are_not_taken_say_why(name: str) -> None:
    call, words = NOT_TAKEN[name]
    assert re.search(words, reason(**call))


def test_asked_for_on_the_cpu_it_is_an_error() -> None:
    q = torch.randn(1, 1, 128, 64, dtype=torch.bfloat16)
    with pytest.raises(BackendUnavailable, match="cannot run this call: the tensors are not on a"):
        variants.causal(q, q, q, backend="hopper")


def test_explain_names_the_backend_or_why_not() -> None:
    assert "backend hopper: for cuda:90" in variants.causal.explain(head_dim=128)
    documents = variants.document.explain(head_dim=128)
    assert "backend hopper: for cuda:90" in documents
    assert "  tiles    found once per call, or by .prepare()" in documents
    said = variants.document.explain(head_dim=100)
    assert "backend triton: for cuda:90; the hopper backend is not for it: head dims 100" in said
    assert "backend triton: for cuda:80" in variants.causal.explain(head_dim=128, target="cuda:80")


# -- configurations ----------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        (NOOP, Tiles.ALL),
        (variants.softcap, Tiles.ALL),
        (variants.causal, Tiles.MASKED),
        (variants.softcap & variants.causal, Tiles.SCORED),
        (variants.alibi & variants.causal, Tiles.ADDED),
        (variants.document, Tiles.STORED),
    ],
    ids=["noop", "softcap", "causal", "softcap and causal", "alibi and causal", "document"],
)
def test_every_configuration_fits_the_multiprocessor(
    variant: Variant, kind: Tiles, head_dim: int
) -> None:
    made = plans(variant, head_dim)
    assert tuple(p.config for p in made) == CONFIGS[head_dim, kind]
    for plan in made:
        consumers = plan.config.consumers
        consumer, producer = REGISTERS[consumers]
        assert 128 * (consumers * consumer + producer) <= 2**16
        assert plan.rows == 64 and plan.shared + 1024 <= H200.shared


def test_head_dims_are_padded_to_what_there_are_configurations_for() -> None:
    assert {padded(d) for d in attend_hopper.HEAD_DIMS} == {d for d, _ in CONFIGS}


@pytest.mark.parametrize(
    ("complaints", "taken"), [((), 0), (("spilled",), 1), (("spilled", "serialised"), 2)]
)
def test_a_configuration_that_does_badly_is_followed_by_the_next(
    complaints: tuple[str, ...], taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = iter((*complaints, ""))
    monkeypatch.setattr(attend_hopper, "compile_plan", lambda plan, text: (kernel(), next(said)))
    chosen = attend_hopper.of_options(program(NOOP), Options("bf16", 128, 128))
    found = attend_hopper.compile_forward(program(NOOP), chosen, H200)
    configs = CONFIGS[128, Tiles.ALL]
    assert found.notes == (
        *(f"{configs[k]}: {complaint}" for k, complaint in enumerate(complaints)),
        f"{configs[taken]}: taken",
    )


def test_no_configuration_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_hopper, "compile_plan", lambda plan, text: (kernel(), "spilled"))
    with pytest.raises(
        BackendUnavailable, match=r"no configuration of `noop` suits cuda:90.*spill"
    ):
        attend_hopper.compile_forward(program(NOOP), Options("bf16", 128, 128), H200)


def test_a_call_whose_kernel_does_badly_is_named_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def stored(*_: Any) -> Kernel:
        tried.append(1)
        raise BackendUnavailable("no configuration suits", hint="another backend")

    monkeypatch.setattr(attend_hopper, "store", stored)
    monkeypatch.setattr(attend_hopper, "gpu", lambda index: H200)
    monkeypatch.setattr(attend_hopper, "_REFUSED", {})
    q = empty(2, 4, 128, 64)
    inputs = check_inputs(q, q, q, scale=None, q_offset=0, kv_lens=None, precision="auto")
    found = {attend_hopper.refusal(program(NOOP), inputs, ()) for _ in range(3)}
    assert found == {"no configuration suits"} and tried == [1]


def test_a_refusal_is_kept_for_other_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SCOREMOD_CACHE_DIR", str(tmp_path))
    tried: list[object] = []

    def compile_plan(plan: Any, text: str) -> tuple[Kernel, str]:
        tried.append(plan)
        return kernel(), "spilled"

    monkeypatch.setattr(attend_hopper, "compile_plan", compile_plan)
    known, chosen = program(variants.causal), Options("bf16", 64, 64)
    said = []
    for _ in range(2):
        with pytest.raises(BackendUnavailable) as caught:
            attend_hopper.store(known, chosen, H200)
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert len(tried) == len(attend_hopper.configs_of(known, chosen))


def test_a_score_that_no_configuration_can_hold_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (plan, *_) = plans(FIVE["softcap"])
    monkeypatch.setattr(compile_hopper, "spills_in_loops", lambda image: 201)
    compiled = SimpleNamespace(
        metadata=SimpleNamespace(shared=0), image=b"", report=Report(168, 900)
    )
    with pytest.raises(BackendUnavailable, match=r"_score` needs more registers.*201 accesses"):
        complaint(compiled, plan)


def kernel() -> Kernel:
    from test_launch import kernel as made

    return made()


def test_what_the_assembler_may_complain_of() -> None:
    (plan, *_) = plans(NOOP)

    def said(warnings: tuple[str, ...] = (), shared: int = 2**17) -> str:
        report = Report(168, 0, warnings)
        metadata = SimpleNamespace(shared=shared)
        return complaint(SimpleNamespace(metadata=metadata, image=b"", report=report), plan)

    note = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async are serialized due to"
    assert said((note,)) == "its products would run one after the other"
    assert said(shared=2**18) == "262144 bytes of shared memory"


# -- masks -------------------------------------------------------------------------------------


def test_a_window_is_its_ends() -> None:
    by_keys = {name for name, variant in NAMED.items() if plans(variant)[0].masks_by_keys}
    assert by_keys == {"window"}
    text = attend_hopper.source(plans(FIVE["window"])[0])
    assert "sliding_window_keys_0" in text and "sliding_window_mask" not in text


def test_documents_are_read_once_a_row_and_once_a_column() -> None:
    (plan, *_) = plans(NAMED["documents"])
    assert [p.name for p in plan.mask_params] == ["doc", "row_0", "column_0"]
    assert plan.mask is not None and "doc" not in plan.mask.body[0].names


@pytest.mark.parametrize(("name", "stored"), [("window", False), ("sinks", True), ("noop", False)])
def test_what_is_not_one_range_is_read_from_a_structure(name: str, stored: bool) -> None:
    (plan, *_) = plans(NAMED[name])
    assert plan.stored == stored and ("tile_runs" in (a.name for a in plan.positions)) == stored
    (listed, *_) = plans(NAMED[name], blocks=True)
    assert listed.stored and listed.keys is None


def test_only_calls_with_lengths_cut_values() -> None:
    texts = [attend_hopper.source(plans(NOOP, has_kv_lens=flag)[0]) for flag in (False, True)]
    assert ["clear_rows" in text for text in texts] == [False, True]


# -- what is rendered --------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIVE)
def test_the_text_is_gluon_alone(name: str) -> None:
    for plan in plans(FIVE[name], 64) + plans(FIVE[name], scale_in_memory=True):
        text = attend_hopper.source(plan)
        tree = ast.parse(text)
        functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
        assert all(ast.unparse(f.decorator_list[0]) == "gluon.jit" for f in functions)
        assert functions[-1].name == "attention_fwd"
        assert not re.search(r"\btl\b|\btriton\.jit\b", text)


def test_a_mask_costs_the_full_tiles_nothing() -> None:
    split, one_loop = (
        attend_hopper.source(replace(plan, config=replace(plan.config, one_loop=flag)))
        for plan in plans(variants.causal)[:1]
        for flag in (False, True)
    )
    loops = re.compile(r"WHO, (True|False), (True|False),")  # masked, renews the maximum
    assert loops.findall(split) == [("True", "False"), ("False", "False"), ("True", "True")]
    assert loops.findall(one_loop) == [("True", "False"), ("True", "True")]
    assert "t < partial_count," in one_loop


def test_arguments_reach_the_kernel_in_its_order() -> None:
    variant = FIVE["alibi"]
    (plan, *_) = plans(variant, 64)
    names = [a.name for a in launched(plan)]
    q = torch.empty(2, 4, 128, 64, dtype=torch.bfloat16)
    inputs = check_inputs(q, q, q, scale=0.5, q_offset=7, kv_lens=None, precision="auto")
    _, bound = variant._bind({"slopes": torch.rand(4)}, inputs.sizes, q.device)
    lse, drawn = torch.empty(2, 4, 128), torch.zeros(1, dtype=torch.int32)
    values = attend_hopper.arguments(inputs, bound, Answer(q, lse), drawn)
    given = dict(zip(names, values, strict=True))
    assert (given["q_size_1"], given["k_stride_2"], given["sm_scale"]) == (4, 64, 0.5)
    assert (given["q_offset"], given["slopes_size_0"]) == (7, 4)
    assert given["lse"] is lse and given["counter"] is drawn


def test_warm_calls_know_the_places() -> None:
    from scoremod.warm import COUNTER, HOPPER, PORTABLE

    x = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16)
    inputs = check_inputs(x, x, x, scale=None, q_offset=0, kv_lens=None, precision="auto")
    for keeps in (False, True):
        hopper = [a.name for a in launched(plans(NOOP, keeps_residual=keeps)[0])]
        portable = [a.name for a in _portable_arguments(keeps_residual=keeps)]
        for names, plain in ((hopper, HOPPER), (portable, PORTABLE)):
            places = plain.of(replace(inputs, keeps_residual=keeps))
            fields = {"q": places.q, "k": places.k, "v": places.v, "o": places.out}
            fields |= {"lse": places.lse, "q_offset": places.q_offset}
            fields |= {"residual": places.residual} if keeps else {}
            assert {name: names.index(name) for name in fields} == fields
            assert keeps == ("residual" in names)
        assert hopper.index("counter") == COUNTER


@pytest.mark.parametrize(("dtype", "bits"), [("bf16", 0), ("f16", 4)])
def test_p_starts_where_its_dtype_has_room_to_grow(dtype: str, bits: int) -> None:
    known = program(variants.causal)
    options = attend_hopper.of_options(known, Options(dtype, 128, 128))
    plan = attend_hopper.plans(known, options, H200)[0]
    text = attend_hopper.source(plan)
    assert plan.headroom == bits and f"HEADROOM = gl.constexpr({bits})" in text


def test_the_first_maximum_is_not_kept_where_gradients_would_feel_it() -> None:
    for variant, keeps, renews in (
        (variants.document, True, 1),
        (variants.document, False, 0),
        (variants.causal, True, 0),
        (variants.head_temperature & variants.causal, True, 1),
        (variants.head_temperature & variants.causal, False, 0),
        (variants.softcap & variants.causal, True, 0),
    ):
        plan = plans(variant, keeps_residual=keeps)[0]
        tries = re.findall(r"WHO, (True|False),\n +step, number", attend_hopper.source(plan))
        assert plan.renews == renews and tries == (["True"] if renews else ["True", "False"])


def test_what_is_added_to_s_is_its_parts() -> None:
    gates = parse("variant gates(t: f32[L]) { score s + t[i] - t[j] mask j <= i }")
    query = parse("variant query(t: f32[L]) { score 2.0 * s + t[i] }")
    for variant, parts in (
        (variants.alibi, {"slope", "per_key"}),
        (gates, {"slope", "of_query", "of_key"}),
        (query, {"slope", "of_query"}),
        (variants.symmetric_alibi, set()),
    ):
        plan = plans(variant)[0]
        text = attend_hopper.source(plan)
        functions = {n.name for n in ast.parse(text).body if hasattr(n, "name")}
        assert (plan.added is not None) is bool(parts)
        assert (f"{variant.name}_score" in functions) is not bool(parts)
        said = ("slope", "of_query", "of_key", "per_key")
        assert {x for x in said if f"{variant.name}_score_{x}" in functions} == parts
        # What a key adds is read by one thread of it, and handed round.
        assert ("gl.convert_layout(of_key, COLUMN)" in text) is ("of_key" in parts)


def _portable_arguments(**options: Any) -> tuple[Any, ...]:
    from scoremod.plan_triton import arguments

    return arguments((), Options("bf16", 64, 64, **options))


def test_one_kernel_serves_all_lengths() -> None:
    q = torch.empty(1, 2, 1024, 64, dtype=torch.bfloat16)
    found = set()
    for length in (17, 128, 333, 1024):
        x = q[:, :, :length]
        inputs = check_inputs(x, x, x, scale=None, q_offset=0, kv_lens=None, precision="auto")
        found.add(attend_hopper.options(program(NOOP), inputs, ()))
        assert attend_triton.options(program(NOOP), inputs, ()).short is False
    assert len(found) == 1


# -- compiling ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def apart() -> Iterator[Callable[..., Any]]:
    """Call a function in a process where Triton's interpreter was never asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            pool.submit(os.getpid).result()
            yield lambda function, *args: pool.submit(function, *args).result()


def compiled(
    name: str, head_dim: int, dtype: str, options: dict[str, Any]
) -> tuple[Kernel, int, int]:
    """A variant's kernel, its loops over kv tiles, and the most spills in one."""
    known = program(NAMED[name])
    chosen = attend_hopper.of_options(known, Options(dtype, head_dim, head_dim, **options))
    made = attend_hopper.compile_forward(known, chosen, H200)
    return made, len(softmax_loops(made.image)), spills_in_loops(made.image)


# Whether configurations were measured under this release of Triton.
MEASURED = version("triton").startswith("3.6.")


def taken(plans: list[HopperPlan], notes: tuple[str, ...]) -> HopperPlan:
    """The plan that was taken: the first one under the release that it was measured under."""
    plan = plans[len(notes) - 1]
    assert notes[-1] == f"{plan.config}: taken"
    assert len(notes) == 1 or not MEASURED
    return plan


# Accesses to spilled registers a partial tile: 8 were not felt.
SPILLED = {"sinks": 4, "window": 4}


def check(
    found: tuple[Kernel, int, int], name: str, head_dim: int, options: dict[str, Any]
) -> None:
    made, loops, spills = found
    plan = taken(plans(NAMED[name], head_dim, **options), made.notes)
    assert spills <= SPILLED.get(name, 0 if MEASURED else SPILLS)
    # One more loop is for second tries, or the only one.
    assert loops == plan.config.consumers * (1 if plan.renews else len(plan.kv_segments) + 1)
    assert made.shared <= H200.shared and made.cluster == (1, 1, 1)
    assert made.num_warps == 4 * (plan.config.consumers + 1)
    assert [m.box[-1] for m in made.tensor_maps] == [64] * 4


# What a call may bring besides: long lengths, offsets and a scale in memory.
LARGE = {
    "small": False,
    "wide_offsets": True,
    "offset_per_batch": True,
    "scale_in_memory": True,
    "positive_scale": False,
}


# The rest is for `make compile-all`: a kernel takes 5 s.
@pytest.mark.parametrize(
    ("name", "head_dim", "options"),
    [
        ("noop", 64, {}),
        ("softcap", 128, {"keeps_residual": True}),
        ("documents", 128, {**LARGE, "has_kv_lens": True}),
    ],
    ids=["noop", "softcap with gradients", "documents in 64 bits"],
)
def test_kernels_compile_without_spills(
    apart: Callable[..., Any], name: str, head_dim: int, options: dict[str, Any]
) -> None:
    check(apart(compiled, name, head_dim, "bf16", options), name, head_dim, options)


@pytest.mark.compile_all
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", NAMED)
def test_all_kernels_compile_without_spills(
    apart: Callable[..., Any], name: str, head_dim: int, dtype: str, keeps: bool
) -> None:
    options = {"keeps_residual": keeps}
    check(apart(compiled, name, head_dim, dtype, options), name, head_dim, options)

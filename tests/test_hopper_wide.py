"""The Hopper backward of wide heads: what it renders, that it compiles, what it asks for."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_hopper_backward import (
    COMPILED,
    DOCUMENTS,
    FIVE,
    H200,
    LARGE,
    NOOP,
    apart,  # noqa: F401  a fixture
    empty,
    inputs_of,
    options,
    program,
)

from scoremod import Variant, backward_hopper, parse, variants
from scoremod import backward_hopper_wide as wide
from scoremod.backends import compile_hopper_wide
from scoremod.backends.compile_hopper import spills_in_loops
from scoremod.backends.compile_hopper_wide import SPILLS, complaint, launched
from scoremod.backends.compile_triton import Kernel, Report
from scoremod.backward_triton import Call, call_of
from scoremod.cache import Cache
from scoremod.errors import BackendUnavailable
from scoremod.gradients import Result, Wanted
from scoremod.hopper_rows import Scratch
from scoremod.plan_hopper_wide import KERNELS, KEYS, QUERIES, SUMS, WidePlan, wide_plan
from scoremod.plan_triton_backward import Learned, learnable
from scoremod.ready import Ready

# In both directions a range, or in one alone.
BY_KEYS = parse("variant by_keys(first: i32[Lk]) { mask i >= first[j] }")


def plan(kernel: str, variant: Variant = NOOP, dtype: str = "bf16", **changes: Any) -> WidePlan:
    chosen = replace(options(192, 256, dtype, variant), **changes)
    chosen = wide.of_options(kernel, program(variant), chosen)
    return wide_plan(kernel, program(variant), chosen, H200)


def call(variant: Variant = NOOP, **given: Any) -> Call:
    """A backward of [2, 4, 128, 192]."""
    q = empty(2, 4, 128, 192)
    inputs = replace(inputs_of(q=q, k=empty(2, 2, 100, 192)), **given)
    result = Result(inputs.q, torch.empty(2, 4, 128), inputs.q, None)
    return call_of(program(variant), inputs, (), result, Wanted(True, True, True))


# -- which kernels -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dims", "expected"),
    [((128, 128), False), ((136, 64), True), ((64, 136), True), ((256, 256), True)],
)
def test_the_wider_head_dim_decides(head_dims: tuple[int, int], expected: bool) -> None:
    assert wide.is_wide(options(*head_dims)) == expected


def test_each_kernel_reads_a_structure_where_its_own_range_is_not_solved() -> None:
    for variant, stored in (
        (NOOP, (False, False)),
        (variants.causal, (False, False)),
        (DOCUMENTS, (True, True)),
        (BY_KEYS, (False, True)),
    ):
        assert tuple(plan(kernel, variant).stored for kernel in KERNELS) == stored
    # The order of additions is always the same.
    for kernel in KERNELS:
        assert plan(kernel, variants.causal, deterministic=True) == plan(kernel, variants.causal)
        assert plan(kernel, variants.causal, blocks=True).stored


CAPPED_GATES = variants.forget_gate.then(variants.softcap)
CAPPED_ALIBI = variants.alibi.then(variants.softcap) & variants.causal


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        (FIVE["alibi"], ""),
        (CAPPED_ALIBI, ""),
        (parse("variant v(t: float) { score s * t }"), ""),
        (variants.forget_gate, ""),
        (CAPPED_GATES, "the gradient of `log_decay` is summed per key"),
        (
            parse("variant v(t: f32[Lk]) { score s + (i - j) * t[j] }"),
            "the gradient of `t` is summed per key",
        ),
    ],
    ids=["slopes", "capped", "a number", "per key", "per key, capped", "per key, weighted"],
)
def test_all_that_is_read_per_query_learns_here(variant: Variant, words: str) -> None:
    reads = backward_hopper.possible_reads(program(variant), options(192))
    assert reads and backward_hopper.unlearned(program(variant), reads) == words


def test_rows_are_summed_where_somebody_learns_of_it_alone() -> None:
    known = program(parse("variant v(t: f32[H], u: f32[H]) { score s + t[h] - u[h] * (i - j) }"))
    # The gradient of what is added to all scores of a row is that of its LSE.
    for name, learned in (("t", ()), ("u", (Learned(1),))):
        asked = (Learned([p.name for p in known.params].index(name)),)
        assert wide.learned_in(QUERIES, known, options(192), asked) == learned
        assert wide.learned_in(KEYS, known, options(192), asked) == ()
    chosen = wide.of_options(QUERIES, known, options(192))
    plain = wide_plan(QUERIES, known, chosen, H200)
    summing = wide_plan(QUERIES, known, chosen, H200, learnable(known))
    assert [(x.slope, x.row, x.weight_row) for x in summing.sums] == [("slope_1", 0, 1)]
    assert summing.left_over_row == 2 and plain.sums == ()
    texts = [wide.source(made) for made in (plain, summing)]
    assert ["row_sums" in text for text in texts] == ["left_over" in text for text in texts]
    assert ["row_sums" in text for text in texts] == [False, True]


def test_keys_are_summed_where_somebody_learns_of_it_alone() -> None:
    for sums_keys in (False, True):
        assert ("ds_sums" in wide.source(plan(KEYS, sums_keys=sums_keys))) == sums_keys
        assert not plan(QUERIES, sums_keys=sums_keys).options.sums_keys


# -- what is rendered --------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", COMPILED)
def test_the_text_is_gluon_alone(name: str, kernel: str) -> None:
    for changes in ({}, {"scale_in_memory": True, "has_kv_lens": True}):
        text = wide.source(plan(kernel, COMPILED[name], **changes))
        functions = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
        assert {ast.unparse(f.decorator_list[0]) for f in functions} == {"gluon.jit"}
        assert functions[-1].name == kernel
        assert not re.search(r"\btl\b|\btriton\.jit\b", text)
        assert ("clear_rows(" in text) == bool(changes)


def test_masks_and_scores_are_the_first_consumers_alone() -> None:
    text = wide.source(plan(KEYS, FIVE["softcap"]))
    assert "w = p * slope" in text
    other = text[text.index("def sum_dk(") : text.index("def attention_bwd_keys(")]
    assert "weights(" not in other and "q_tiles(" not in other


@pytest.mark.parametrize("kernel", KERNELS)
def test_tiles_fit_the_multiprocessor(kernel: str) -> None:
    made = plan(kernel, has_kv_lens=True)
    # And barriers.
    assert made.shared + 768 <= H200.shared
    assert 128 * (2 * made.worker_registers[0] + made.worker_registers[1]) <= 2**16


def test_the_sources_are_those_of_three_kernels() -> None:
    texts = backward_hopper.sources(program(variants.causal), options(192), H200)
    last = [re.findall(r"^def (\w+)\(", text, re.MULTILINE)[-1] for text in texts]
    assert last == ["attention_bwd_rows", *KERNELS]


# -- refusals ----------------------------------------------------------------------------------


def test_what_the_assembler_may_complain_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(warnings: tuple[str, ...] = (), shared: int = 2**17, spilled: int = 0) -> str:
        monkeypatch.setattr(compile_hopper_wide, "spills_in_loops", lambda image: spilled)
        found = SimpleNamespace(metadata=SimpleNamespace(shared=shared), image=b"")
        found.report = Report(168, spilled, warnings)
        return complaint(found, plan(KEYS))

    assert said(("ptxas info : (C7512) wgmma.mma_async are serialized",)).startswith("its products")
    assert said(shared=2**18) == "262144 bytes of shared memory"
    assert said(spilled=SPILLS) == "" and said(spilled=SPILLS + 1).startswith("65 accesses to")


def test_a_refusal_is_remembered_and_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wide, "CACHE", Cache(tmp_path))
    tried = []

    def compile_plan(made: WidePlan, text: str) -> tuple[Any, str]:
        tried.append(made.kernel)
        return None, "spilled"

    monkeypatch.setattr(wide, "compile_plan", compile_plan)
    known, chosen = program(NOOP), options(192)
    assert backward_hopper.known_refusal(known, chosen, H200) == ""
    mine = wide.of_options(QUERIES, known, chosen)
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match="does not suit cuda:90: spilled"):
            wide.compile_unless_refused(QUERIES, known, mine, H200)
    assert tried == [QUERIES]
    assert "`attention_bwd_queries` of `noop`" in backward_hopper.known_refusal(known, chosen, H200)


# -- the call ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_arguments_reach_the_kernel_in_its_order(kernel: str) -> None:
    made = plan(kernel)
    given = call(scale=0.5, q_offset=7)
    do, rows = given.grad_out, torch.empty(8)
    outputs = (given.inputs.k, given.inputs.v) if kernel == KEYS else (given.inputs.q,)
    ready = Ready(lambda *_: None, compile_hopper_wide.constants(made))
    values = wide.arguments(given, kernel, ready, (do, rows), outputs)
    found = dict(zip([a.name for a in launched(made)], values, strict=True))
    assert found["row_values"] is rows and found["do"] is do
    assert (found["q_size_1"], found["k_size_2"]) == (4, 100)
    assert (found["sm_scale"], found["q_offset"]) == (0.5, 7)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Wanted(True, True, True), ["rows 16", "keys 8", "queries 8"]),
        (Wanted(True, False, False), ["rows 16", "queries 8"]),
        (Wanted(False, False, True), ["rows 16", "keys 8"]),
    ],
)
def test_what_nobody_wants_is_not_computed(
    wanted: Wanted, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 batches of 4 heads of 128 queries, and of 2 heads of 100 keys."""
    ran: list[str] = []

    def ready(name: str) -> Ready:
        sizes = {"BLOCK_M": 64 if name == "keys" else 128, "BLOCK_N": 64}
        return Ready(lambda programs, _: ran.append(f"{name} {programs}"), sizes)

    made = wide.WideKernels(ready("rows"), ready("keys"), ready("queries"))
    found = wide.tensor_gradients(call(), made, wanted, {})
    assert ran == expected
    assert [x is not None for x in found] == [wanted.q, "keys 8" in ran, "keys 8" in ran]


def test_scratch_is_of_rows_alone() -> None:
    scratch: Scratch = wide.scratch_of(call())
    assert scratch.rows.numel() == 2 * 4 * 2 * 2 * 64
    assert scratch.sums.numel() == 0 and scratch.slots == 0 and scratch.turns == ()


# -- compiling ---------------------------------------------------------------------------------


def compiled(name: str, dtype: str, changes: dict[str, Any]) -> list[tuple[Kernel, int]]:
    """Both kernels of a variant, and the most spills in one of their loops."""
    found = []
    for kernel in KERNELS:
        chosen = wide.of_options(
            kernel, program(COMPILED[name]), replace(options(256, dtype=dtype), **changes)
        )
        made = wide.compile_wide(kernel, program(COMPILED[name]), chosen, H200)
        found.append((made, spills_in_loops(made.image)))
    return found


# The rest is for `make compile-all`: a kernel takes 4 s.
@pytest.mark.parametrize(
    ("name", "changes"),
    [("documents", {**LARGE, "has_kv_lens": True})],
    ids=["documents whose keys end, in 64 bits"],
)
def test_kernels_compile_as_they_were_meant(
    apart: Callable[..., Any],  # noqa: F811
    name: str,
    changes: dict[str, Any],
) -> None:
    for (made, spills), kernel in zip(apart(compiled, name, "bf16", changes), KERNELS, strict=True):
        assert spills <= 20 and made.shared <= H200.shared and made.num_warps == 12
        maps = len(plan(kernel).tensor_maps)
        assert [m.element for m in made.tensor_maps][:maps] == ["bf16"] * maps


def summing(kernel: str, name: str, head_dim: int) -> tuple[int, int, int]:
    """Sums of a kernel in which all learns that can, and the most spills in one of its loops."""
    known = program({**FIVE, "capped": CAPPED_ALIBI}[name])
    chosen = wide.of_options(kernel, known, options(head_dim))
    made = wide.compile_wide(kernel, known, chosen, H200, learnable(known))
    sums = len(wide_plan(kernel, known, chosen, H200, learnable(known)).sums)
    return sums, spills_in_loops(made.image), made.shared


def test_a_kernel_of_sums_compiles_as_it_was_meant(
    apart: Callable[..., Any],  # noqa: F811
) -> None:
    sums, spills, shared = apart(summing, SUMS, "alibi", 128)
    assert (sums, spills) == (1, 0) and shared <= H200.shared


@pytest.mark.compile_all
@pytest.mark.parametrize("kernel", [QUERIES, SUMS])
@pytest.mark.parametrize("name", ["alibi", "softcap", "capped"])
def test_kernels_that_sum_compile_as_they_were_meant(
    apart: Callable[..., Any],  # noqa: F811
    name: str,
    kernel: str,
) -> None:
    sums, spills, _ = apart(summing, kernel, name, 256 if kernel == QUERIES else 128)
    assert sums and spills <= (SPILLS if kernel == QUERIES else 8)


def test_numbers_of_tiles_are_kept_until_they_were_looked_at() -> None:
    """Of a structure, scores are a step ahead of what looks at the number: twice the stages."""
    made = plan(SUMS, DOCUMENTS)
    text = wide.source(made)
    assert f"SAID = gl.constexpr({2 * made.stages})" in text
    assert text.count("said.index(t % SAID)") == 1 + len(made.kv_segments)


@pytest.mark.compile_all
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", COMPILED)
def test_seven_variants_compile_as_they_were_meant(
    apart: Callable[..., Any],  # noqa: F811
    name: str,
    dtype: str,
) -> None:
    for made, spills in apart(compiled, name, dtype, {}):
        assert spills <= (SPILLS if name == "dilated" else 20), made.entry

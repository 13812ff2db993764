"""The Hopper backward: which calls it takes, what it renders, that it compiles, what it gives."""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_hopper import taken

from scoremod import Variant, backward_hopper, explain, parse, variants
from scoremod.backends.compile_hopper import spills_in_loops
from scoremod.backends.compile_hopper_backward import complaint, constants, launched
from scoremod.backends.compile_triton import Kernel, Report, softmax_loops, triton_version
from scoremod.backward_hopper import Kernels
from scoremod.backward_triton import call_of
from scoremod.blocks import Blocks
from scoremod.cache import Cache
from scoremod.errors import BackendUnavailable
from scoremod.gradients import Result, Wanted
from scoremod.hopper_rows import Scratch, compile_small
from scoremod.inputs import Inputs, check_inputs
from scoremod.plan import Typed, assumed_params, typed
from scoremod.plan_hopper_backward import (
    CONFIGS,
    CONSUMER_REGISTERS,
    LAST_HEADS,
    PROGRAMS_AHEAD,
    SPILLS,
    WARP_REGISTERS,
    HopperBackwardPlan,
    InTurn,
    rows_plan,
    slots_of,
)
from scoremod.plan_triton import Options
from scoremod.ready import Ready
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
DOCUMENTS = variants.document & variants.causal
COMPILED = {**FIVE, "documents": DOCUMENTS, "dilated": variants.dilated}


def program(variant: Variant) -> Typed:
    return typed(variant._program, assumed_params(variant._program), ("what the user wrote",))


def options(
    head_dim: int, v_head_dim: int | None = None, dtype: str = "bf16", variant: Variant = NOOP
) -> Options:
    chosen = Options(dtype, head_dim, v_head_dim or head_dim)
    return backward_hopper.of_options(program(variant), chosen)


def plans(variant: Variant, head_dim: int = 128, **changes: Any) -> list[HopperBackwardPlan]:
    chosen = replace(options(head_dim, variant=variant), **changes)
    chosen = backward_hopper.of_options(program(variant), chosen)
    return backward_hopper.plans(program(variant), chosen, H200)


# -- which calls it takes ----------------------------------------------------------------------


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def inputs_of(*, q: torch.Tensor | None = None, **call: Any) -> Inputs:
    """[2, 4, 128, 64] in bf16 unless told otherwise."""
    q = empty(2, 4, 128, 64) if q is None else q
    k = call.pop("k", q)
    v = call.pop("v", k)
    found = check_inputs(
        q, k, v, scale=None, q_offset=0, kv_lens=call.pop("kv_lens", None), precision="auto"
    )
    return replace(found, **call)


def reason(variant: Variant = NOOP, **call: Any) -> str:
    return backward_hopper.unfit(program(variant), inputs_of(**call))


GROUPED = empty(1, 2, 128, 64)
TAKEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "a window": {"variant": variants.sliding_window},
    "grouped heads, k and v of batch 1": {"k": GROUPED},
    "heads behind the length": {"q": empty(2, 128, 4, 64).transpose(1, 2)},
    "a head dim that is padded": {"q": empty(2, 4, 128, 72)},
    "another head dim of v": {"q": empty(2, 4, 128, 64), "v": empty(2, 4, 128, 128)},
    "keys that end": {"kv_lens": torch.ones(2, dtype=torch.int32)},
    "documents": {"variant": variants.document},
    "two ranges": {"variant": parse("variant v() { mask i < 4 or j == i }")},
    "blocks of whole tiles": {"tiles": Blocks(torch.ones(1, 1, 1, 1).bool(), 128, 256)},
    "wide heads": {"q": empty(2, 4, 128, 192)},
    "the same bits of very many tiles of wide heads": {
        "q": empty(1, 2, 2**20, 192),
        "variant": parse("variant v(t: i32[H]) { mask j <= i + t[h] }"),
        "deterministic": True,
    },
    "the same bits": {"deterministic": True, "variant": variants.document},
}
NOT_TAKEN: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"q": empty(2, 4, 128, 64, dtype=torch.float32)}, "16-bit floats, not of f32"),
    "odd head dims": ({"q": empty(2, 4, 128, 100)}, "head dims 100 and 100 are not multiples"),
    "the same bits of very many tiles": (
        {
            "q": empty(1, 2, 2**20, 64),
            "variant": parse("variant v(t: i32[H]) { mask j <= i + t[h] }"),
            "deterministic": True,
        },
        "deterministic: the order in which tiles add to dq takes 512 MB",
    ),
    "small blocks": (
        {"tiles": Blocks(torch.ones(1, 1, 2, 2).bool(), 64, 64)},
        "blocks of 64 x 64 do not hold whole tiles",
    ),
    "an expanded head": ({"k": empty(2, 1, 128, 64).expand(2, 4, 128, 64)}, "TMA cannot copy k"),
    "columns apart": ({"v": empty(2, 4, 128, 128)[..., ::2]}, "TMA cannot copy v"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_calls_that_are_taken(name: str) -> None:
    assert reason(**TAKEN[name]) == ""


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_calls_that_are_not_taken_say_why(name: str) -> None:
    call, words = NOT_TAKEN[name]
    assert re.search(words, reason(**call))


def test_deterministic_follows_torch_unless_told() -> None:
    def chosen(**call: Any) -> Options:
        inputs = inputs_of(**call)
        result = Result(inputs.q, torch.empty(2, 4, 128), inputs.q, None)
        wanted = Wanted(True, True, True)
        return backward_hopper.options_of(
            call_of(program(variants.causal), inputs, (), result, wanted)
        )

    torch.use_deterministic_algorithms(True)
    try:
        assert chosen().deterministic and chosen().stored
        assert not chosen(deterministic=False).deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    assert not chosen().deterministic and not chosen().stored
    assert chosen(deterministic=True) != chosen()


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        (variants.alibi, ""),
        (
            parse("variant v(t: f32[Lk]) { score s + i * t[j] }"),
            "the gradient of `t` is summed per key",
        ),
        (
            parse("variant v(t: f32[Lk]) { score 2.0 * s + t[j] }"),
            "the gradient of `t` is summed per key",
        ),
        (parse("variant v(t: f32[Lk]) { score s - 0.5 * t[j] }"), ""),
        (parse("variant v(t: f32[H], u: f32[Lk]) { score s + t[h] - u[j] }"), ""),
        (variants.forget_gate & variants.causal, ""),
        (variants.t5_bias, ""),
    ],
    ids=[
        "per query",
        "per key, with weights",
        "per key, where ds has a slope",
        "per key",
        "per head and per key",
        "per query and per key",
        "along diagonals",
    ],
)
def test_captures_that_the_portable_kernels_sum_beside_dq_dk_and_dv(
    variant: Variant, words: str
) -> None:
    reads = backward_hopper.possible_reads(program(variant), options(64))
    assert reads and backward_hopper.unlearned(program(variant), reads) == words


def test_ds_is_summed_where_somebody_learns_of_it() -> None:
    for head_dim in (64, 128):
        plain = backward_hopper.source(plans(FIVE["causal"], head_dim)[0])
        summing = backward_hopper.source(plans(FIVE["causal"], head_dim, sums_keys=True)[0])
        assert "key_sums" not in plain and "ds_sums" not in plain
        # Once for each half of a q tile.
        assert summing.count("key_sums = start_sums(") == (2 if head_dim == 64 else 1)
    variant = parse("variant v(t: f32[H, L], u: f32[Lk]) { score s + t[h, i] - u[j] }")
    for learned, summed in (((), False), (("t",), False), (("u",), True), (("t", "u"), True)):
        values = {"t": torch.rand(4, 128), "u": torch.rand(128)}
        for name in learned:
            values[name].requires_grad_()
        inputs = inputs_of()
        known, bound = variant._bind(values, inputs.sizes, inputs.q.device)
        result = Result(inputs.q, torch.empty(2, 4, 128), inputs.q, None)
        wanted = Wanted(True, True, True, frozenset(learned))
        call = call_of(variant._type(known, bound), inputs, bound, result, wanted)
        assert backward_hopper.options_of(call).sums_keys == summed


def test_what_learns_decides_what_a_call_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of one kind that differ in nothing else find each their own kernels."""
    monkeypatch.setattr(backward_hopper, "refusal", lambda call: "")
    monkeypatch.setattr(backward_hopper, "main", backward_hopper.options_of)
    monkeypatch.setattr(backward_hopper, "around", lambda call, made: made)
    monkeypatch.setattr(backward_hopper, "_KERNELS", {})
    variant, inputs = parse("variant v(u: f32[Lk]) { score s - u[j] }"), inputs_of()
    for learns in (False, True, False):
        bias = torch.rand(128, requires_grad=learns)
        known, bound = variant._bind({"u": bias}, inputs.sizes, inputs.q.device)
        result = Result(inputs.q, torch.empty(2, 4, 128), inputs.q, None)
        wanted = Wanted(True, True, True, frozenset("u" if learns else ""))
        call = call_of(variant._type(known, bound), inputs, bound, result, wanted)
        found: Any = backward_hopper.kernels_of(call)
        assert found.sums_keys == learns


def test_what_is_added_to_a_query_learns_from_its_lse_alone() -> None:
    """Whatever is added to all scores of a row changes nothing but its LSE."""
    variant = parse("variant v(t: f32[B, H, L]) { score s - 3.0 * t[b, h, i] mask i > 1 }")
    inputs = inputs_of()
    bias = torch.randn(2, 4, 128, requires_grad=True)
    known, bound = variant._bind({"t": bias}, inputs.sizes, inputs.q.device)
    lse, grad_lse = torch.randn(2, 2, 4, 128)
    lse[..., :2] = -torch.inf
    wanted = Wanted(True, True, True, frozenset("t"))
    for came in (None, grad_lse):
        call = call_of(
            variant._type(known, bound),
            inputs,
            bound,
            Result(inputs.q, lse, inputs.q, came),
            wanted,
        )
        found: dict[int, torch.Tensor] = {}
        backward_hopper.sum_rows(call, found)
        given = torch.zeros_like(lse) if came is None else torch.where(lse.isinf(), 0.0, came)
        assert torch.equal(found[0], -3.0 * given)


def test_explain_says_what_computes_gradients() -> None:
    said = FIVE["alibi"].explain(head_dim=128)
    assert "  backward dq, dk and dv in one kernel: 64 queries by 128 keys, scores early" in said
    assert "portable" not in said
    said = variants.causal.explain(head_dim=256)
    assert "  backward dk and dv in one kernel: 64 queries by 64 keys" in said
    assert "  backward dq in another: 128 queries by 64 keys" in said
    assert "  dq       the same bits in each run: each program sums that of its own queries" in said
    for variant in (FIVE["alibi"], variants.forget_gate):
        assert "portable" not in variant.explain(head_dim=192)
    said = variants.forget_gate.then(variants.softcap).explain(head_dim=192)
    assert (
        "  backward portable with learned captures: the gradient of `log_decay` is summed" in said
    )
    assert "backward" not in variants.causal.explain(head_dim=128, target="cuda:80")


def test_explain_says_how_many_sums_there_are() -> None:
    said = "  dq       summed in float32 for a few heads at a time"
    assert said in variants.causal.explain(head_dim=128)
    assert said not in variants.dilated.explain(head_dim=128)


def test_explain_says_that_kv_tiles_take_turns() -> None:
    said = "  dq       the same bits in each run: kv tiles add to it in turns"
    for deterministic in (False, True):
        chosen = replace(options(128), deterministic=deterministic)
        lines = explain._hopper_backward(program(NOOP), chosen, H200, "")
        assert (said in lines) == deterministic


# -- configurations ----------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("variant", [variants.causal, variants.softcap])
def test_every_configuration_fits_the_multiprocessor(head_dim: int, variant: Variant) -> None:
    made = plans(variant, head_dim)
    width = max(64, 128 * (head_dim > 64))
    assert tuple(p.config for p in made) == CONFIGS[width, variant is variants.softcap]
    # Two consumers, and two warps that are padded to a warpgroup.
    assert 128 * (2 * CONSUMER_REGISTERS + WARP_REGISTERS) <= 2**16
    for plan in made:
        assert plan.shared + 1024 <= H200.shared
        # Both consumers together give the dq of a step.
        assert 2 * 64 * plan.dq_columns == plan.config.block_m * plan.block_d


@pytest.mark.parametrize(
    ("complaints", "taken"), [((), 0), (("spilled",), 1), (("spilled", "serialised"), 2)]
)
def test_a_configuration_that_does_badly_is_followed_by_the_next(
    complaints: tuple[str, ...], taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = iter((*complaints, ""))
    monkeypatch.setattr(backward_hopper, "compile_plan", lambda plan, text: (kernel(), next(said)))
    found = backward_hopper.compile_backward(program(NOOP), options(64), H200)
    configs = CONFIGS[64, False]
    assert found.notes == (
        *(f"{configs[k]}: {complaint}" for k, complaint in enumerate(complaints)),
        f"{configs[taken]}: taken",
    )


def test_no_configuration_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_hopper, "compile_plan", lambda plan, text: (kernel(), "spilled"))
    with pytest.raises(
        BackendUnavailable, match=r"no configuration of the backward of `noop` suits cuda:90.*spill"
    ):
        backward_hopper.compile_backward(program(NOOP), options(128), H200)


def test_a_refusal_is_remembered_by_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(backward_hopper, "CACHE", Cache(tmp_path))
    tried = []

    def compile_plan(plan: HopperBackwardPlan, text: str) -> tuple[Kernel, str]:
        tried.append(plan.config)
        return kernel(), "spilled"

    monkeypatch.setattr(backward_hopper, "compile_plan", compile_plan)
    known = program(NOOP)
    assert backward_hopper.known_refusal(known, options(64), H200) == ""
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match="no configuration of the backward"):
            backward_hopper.compile_unless_refused(known, options(64), H200)
    assert tuple(tried) == CONFIGS[64, False]
    assert backward_hopper.known_refusal(known, options(64), H200).startswith("no configuration")


def kernel() -> Kernel:
    from test_launch import kernel as made

    return made()


def test_what_the_assembler_may_complain_of(monkeypatch: pytest.MonkeyPatch) -> None:
    first = plans(NOOP)[0]

    def said(
        warnings: tuple[str, ...] = (),
        shared: int = 2**17,
        spilled: int = 0,
        plan: HopperBackwardPlan = first,
    ) -> str:
        monkeypatch.setattr(
            "scoremod.backends.compile_hopper_backward.spills_in_loops", lambda image: spilled
        )
        report = Report(168, spilled, warnings)
        metadata = SimpleNamespace(shared=shared)
        return complaint(SimpleNamespace(metadata=metadata, image=b"", report=report), plan)

    note = "ptxas info : (C7512) Potential Performance Loss: wgmma.mma_async are serialized due to"
    assert said((note,)) == "its products would run one after the other"
    assert said(shared=2**18) == "262144 bytes of shared memory"
    assert said(spilled=SPILLS) == "" and said(spilled=SPILLS + 1).startswith("21 accesses to")
    holds_k_and_v, holds_v, holds_none = plans(NOOP, 64)
    for plan in (holds_k_and_v, holds_v):
        assert said(spilled=201, plan=plan).startswith("201 accesses to")
    for plan in (first, holds_none):
        with pytest.raises(BackendUnavailable, match=r"needs more registers.*201 accesses"):
            said(spilled=201, plan=plan)


# -- what is rendered --------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIVE)
def test_the_text_is_gluon_alone(name: str) -> None:
    for plan in plans(FIVE[name], 64) + plans(FIVE[name], scale_in_memory=True):
        text = backward_hopper.source(plan)
        tree = ast.parse(text)
        functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
        found = {f.name: ast.unparse(f.decorator_list[0]) for f in functions}
        # Gluon has no name for adding to memory by TMA: that step is a builtin of its own.
        assert found.pop("add_to") == "builtin" and set(found.values()) == {"gluon.jit"}
        assert functions[-1].name == "attention_bwd"
        assert not re.search(r"\btl\b|\btriton\.jit\b", text)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("variant", [NOOP, variants.causal, DOCUMENTS], ids=["no", "range", "ids"])
def test_every_configuration_has_the_five_products(variant: Variant, deterministic: bool) -> None:
    for head_dim in (64, 128):
        for plan in plans(variant, head_dim, deterministic=deterministic):
            text = backward_hopper.source(plan)
            step = text[text.index("def add_up(") : text.index("def consume(")]
            found = re.findall(r"(\w+) = (?:warpgroup_mma|next_scores)\(", step)
            assert {name.partition("_")[0] for name in found} == {"s", "dp", "dv", "dk", "dq"}


def test_a_warp_reads_row_values_from_different_banks() -> None:
    """Eight lanes read 16 bytes each at a time, from 32 banks of 4 bytes."""
    wide = backward_hopper.sources(program(NOOP), options(256), H200)
    pattern = re.compile(r"FOURS = .*?DistributedLinearLayout\(\s*(.*?), \[HALF", re.DOTALL)
    layouts = pattern.findall("\n".join([backward_hopper.source(plans(NOOP)[0]), *wide]))
    assert len(layouts) == 2  # of the two kernels whose programs own keys
    for layout in layouts:
        registers, lanes, _warps, _block = ast.literal_eval(f"({layout})")
        assert [bit for (bit,) in registers[:2]] == [1, 2]  # 16 bytes of a lane
        for lane in range(0, 32, 8):
            reads = {
                sum(bit for k, (bit,) in enumerate(lanes) if member >> k & 1)
                for member in range(lane, lane + 8)
            }
            banks = [(place + value) % 32 for place in reads for value in range(4)]
            assert len(banks) == len(set(banks)) == 16


def test_pairs_are_masked_by_the_queries_that_see_a_key_where_these_are_one_range() -> None:
    for name in ("causal", "window", "alibi"):
        plan = plans(FIVE[name])[0]
        text = backward_hopper.source(plan)
        assert plan.mask is None and plan.masks_by_queries and "_mask(" not in text
        assert text.count("first_row, last_row = seeing") == 1
    for variant in (NOOP, DOCUMENTS, variants.dilated):
        plan = plans(variant)[0]
        assert not plan.masks_by_queries and "seeing" not in backward_hopper.source(plan)
        assert (plan.mask is None) == (variant is NOOP)


@pytest.mark.parametrize("in_turn", InTurn)
def test_dp_comes_after_p_in_the_tiles_that_a_configuration_says(in_turn: InTurn) -> None:
    plan = plans(variants.softcap)[0]
    text = backward_hopper.source(replace(plan, config=replace(plan.config, in_turn=in_turn)))
    before, after = text[text.index("def visit(") :].split("p, w = weights(", 1)
    after = after[: after.index("dv = warpgroup_mma(")]
    starts = [
        bool(re.search(r"^    dp = warpgroup_mma\(", x, re.MULTILINE)) for x in (before, after)
    ]
    assert starts == {
        InTurn.NONE: [True, False], InTurn.MASKED: [False, False], InTurn.ALL: [False, True]
    }[in_turn]  # fmt: skip
    masked = in_turn is InTurn.MASKED
    assert ("if not MASKED:\n" in before) == ("if MASKED:\n" in after) == masked


def test_a_mask_and_a_slope_cost_only_where_they_are() -> None:
    text = backward_hopper.source(plans(FIVE["softcap"])[0])
    assert re.findall(r"WHO, (True|False),", text) == ["True", "False"]
    assert "w = p * slope" in text
    assert "w = p\n" in backward_hopper.source(plans(variants.causal)[0])
    assert "chained(p, slope)" in backward_hopper.source(
        plans(parse("variant v() { score sqrt(s) }"))[0]
    )


def test_what_changes_evenly_with_distance_is_split() -> None:
    evenly = ("s - t[h] * (i - j)", "s + (j - i) / 8.0", "s - 0.5 * t[h] * float(i - j)")
    for score in evenly:
        plan = plans(parse(f"variant v(t: f32[H]) {{ score {score} mask j <= i }}"))[0]
        text = backward_hopper.source(plan)
        assert plan.config == CONFIGS[128, False][0] and plan.added and plan.added.per_key
        assert "v_score_per_key(" in text and "v_dscore" not in text and "- of_query[None" in text
    others = ("t[h] * s + (j - i)", "s - abs(i - j)", "s - t[h] * (i + j)", "tanh(s) + (j - i)")
    for score in others:
        plan = plans(parse(f"variant v(t: f32[H]) {{ score {score} mask j <= i }}"))[0]
        assert plan.config == CONFIGS[128, True][0] and plan.added is None
        assert "v_dscore" in backward_hopper.source(plan)


def test_a_structure_is_read_where_queries_are_not_one_range() -> None:
    assert [plans(v)[0].stored for v in (*FIVE.values(), DOCUMENTS)] == [False] * 5 + [True]
    plan = plans(DOCUMENTS, 64)[0]
    names = [a.name for a in launched(plan)]
    first = names.index("tile_runs")
    assert names[first : first + 4] == [
        "tile_runs", "tile_words", "structure_stride_b", "structure_stride_h"
    ]  # fmt: skip
    # Documents are read once a query and once a key, and compared pair by pair.
    assert [(t.line, t.name) for t in plan.line_terms] == [("row", "row_0"), ("column", "column_0")]
    text = backward_hopper.source(plan)
    mask = text[text.index(f"def {plan.mask.name if plan.mask else ''}(") :].split("\n\n")[0]
    assert "load_" not in mask and "row_0 == column_0" in mask.replace("(", "").replace(")", "")
    assert "q_tiles(" not in text and "stored_tiles(" in text


@pytest.mark.parametrize(
    ("variant", "changes", "by_length"),
    [
        (DOCUMENTS, {}, True),
        (DOCUMENTS, {"deterministic": True}, False),
        (DOCUMENTS, {"has_kv_lens": True}, False),
        (variants.dilated, {}, False),
    ],
    ids=["documents", "in an order", "that end", "no documents"],
)
def test_a_structure_has_the_order_that_a_kernel_reads(
    variant: Variant, changes: dict[str, Any], by_length: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, asked = plans(variant, **changes)[0], {}

    def stored(*_: Any, **ways: bool) -> Any:
        asked.update(ways)
        return SimpleNamespace(arguments=[])

    monkeypatch.setattr(backward_hopper, "stored_structure", stored)
    monkeypatch.setattr(backward_hopper, "ranks_of", lambda *_: None)
    made = SimpleNamespace(block_m=64, block_n=128)
    kernels: Any = SimpleNamespace(options=plan.options, in_slots=plan.in_slots, main=made)
    x = torch.empty(1, 1, 300, 128)
    inputs = SimpleNamespace(q=x, k=x)
    call: Any = SimpleNamespace(program=program(variant), inputs=inputs, bound=())
    scratch: Any = SimpleNamespace(turns=())
    backward_hopper.structure_of(call, kernels, scratch)
    assert asked == {"transposed": True, "by_length": by_length} and plan.by_length is by_length
    assert ("The longest first" in backward_hopper.source(plan)) is by_length


def test_kv_tiles_take_turns_where_the_same_bits_are_asked_for() -> None:
    for variant in (NOOP, variants.causal, DOCUMENTS):
        text = backward_hopper.source(plans(variant, 64, deterministic=True)[0])
        # Programs begin with the last kv tile.
        assert "- 1 - kv_tile" in text
        adding = text[text.index("def add_up(") :]
        steps = ("wait_for_turn(", "add_to(", "wait_until_read(0)", "pass_turn_on(")
        places = [adding.index(step) for step in steps]
        assert places == sorted(places)
        assert "start_n // BLOCK_M %" not in text
        plain = backward_hopper.source(plans(variant, 64)[0])
        assert "turns" not in plain and "pass_turn_on" not in plain
    made = {v: plans(v, deterministic=True)[0] for v in (NOOP, variants.causal)}
    # Ranks are read where a mask decides who visits a tile.
    names = {v: [a.name for a in launched(plan)] for v, plan in made.items()}
    assert names[NOOP][-8:-4] == ["turns", "slots", "counters", "sums"]
    assert names[variants.causal][-9:-4] == ["turns", "ranks", "slots", "counters", "sums"]


def test_turns_are_of_a_head_where_heads_share_sums() -> None:
    """A slot's next head begins with turn 0 again."""
    text = backward_hopper.source(plans(NOOP, deterministic=True)[0])
    assert "first_head = kv_head % slots" in text
    assert "turns_of_head = turns + (b * q.shape[1] + h) * gl.cdiv(q_len, BLOCK_M)" in text


# What kv tiles of the same head see: about as many queries each, or not.
@pytest.mark.parametrize(
    ("variant", "changes", "slotted"),
    [
        (NOOP, {}, True),
        (NOOP, {"deterministic": True}, True),
        (NOOP, {"has_kv_lens": True}, False),
        (NOOP, {"blocks": True}, False),
        (variants.causal, {}, True),
        (variants.causal, {"offset_per_batch": True}, False),
        (variants.causal, {"deterministic": True}, True),
        (variants.sliding_window, {}, True),
        (FIVE["softcap"], {}, True),
        (parse("variant all_see_some(n: int) { mask j < n or i >= j }"), {}, False),
        (parse("variant every_other() { mask i >= 2 * j }"), {}, False),
        (parse("variant by_head(width: i32[H]) { mask abs(i - j) < width[h] }"), {}, False),
        (
            parse("variant strip(first: int, n: int) { mask i >= first and i < first + n }"),
            {},
            True,
        ),
        (DOCUMENTS, {}, True),
        (DOCUMENTS, {"blocks": True}, False),
        (DOCUMENTS, {"has_kv_lens": True}, False),
        (variants.document, {}, True),
        (variants.tree, {}, False),
    ],
    ids=lambda x: x.name if isinstance(x, Variant) else str(x),
)
def test_sums_of_a_few_heads_do_where_tiles_take_as_long_as_each_other(
    variant: Variant, changes: dict[str, bool], slotted: bool
) -> None:
    plan = plans(variant, **changes)[0]
    text = backward_hopper.source(plan)
    assert plan.in_slots == slotted == ("def make_dq(" in text)
    assert ("sums" in [a.name for a in launched(plan)]) == slotted
    assert plan.worker_warps == ([4, 1, 1, 2] if slotted else [4, 1, 1])


@given(heads=st.integers(1, 4096), tiles=st.integers(0, 9999), processors=st.integers(1, 160))
def test_slots_are_enough_and_save_something(heads: int, tiles: int, processors: int) -> None:
    slots = slots_of(heads, tiles, processors)
    # Nobody waits for a head that is at work beside it.
    assert slots == heads or LAST_HEADS + 2 <= slots <= heads // 2
    if slots < heads and slots > LAST_HEADS + 2:
        # So many programs begin between the last that adds to a slot and the first that clears it.
        since = (slots - 2) * max(tiles, 1)
        assert since >= PROGRAMS_AHEAD * processors - tiles / 2


def test_sums_take_less_than_a_twentieth_of_all_else() -> None:
    """2 x 16 heads of 8,192 tokens and head dim 128 on 132 multiprocessors."""
    slots = slots_of(32, 64, 132)
    assert 4 * slots * 8192 * 128 < 0.05 * 8 * 2 * 32 * 8192 * 128


def test_keys_beyond_the_end_are_cut_before_products_see_them() -> None:
    text = backward_hopper.source(plans(NOOP, has_kv_lens=True)[0])
    assert text.count("clear_rows(") == 2 and "kv_full = barriers(4, 1)" in text
    assert "clear_rows(" not in backward_hopper.source(plans(NOOP)[0])


def test_arguments_reach_the_kernel_in_its_order() -> None:
    variant = FIVE["alibi"]
    plan = plans(variant, 64)[0]
    names = [a.name for a in launched(plan)]
    inputs = replace(inputs_of(), scale=0.5, q_offset=7)
    known, bound = variant._bind({"slopes": torch.rand(4)}, inputs.sizes, inputs.q.device)
    result = Result(inputs.q, torch.empty(2, 4, 128), inputs.q, None)
    call = call_of(variant._type(known, bound), inputs, bound, result, Wanted(True, True, True))
    rows, sums, counters = torch.empty(8), torch.empty(3, 256), torch.empty(9)
    scratch = Scratch(rows, sums, 4, counters, ())
    made = Ready(lambda *_: None, constants(plan))
    kernels = Kernels(plan.options, True, made, made, made)
    dq = torch.empty(2, 4, 128, 64)
    values = backward_hopper.arguments(call, kernels, scratch, inputs.q, (dq, inputs.k, inputs.v))
    found = dict(zip(names, values, strict=True))
    assert found["counters"] is counters and found["slots"] == 4 and found["sums"] is sums
    assert found["dq"] is dq and found["dq_stride_l"] == 64
    assert (found["q_size_1"], found["dk_stride_2"], found["sm_scale"]) == (4, 64, 0.5)
    assert (found["q_offset"], found["slopes_size_0"]) == (7, 4)
    assert found["row_values"] is rows and found["dq_sums_size_0"] == 3


def test_one_kernel_serves_all_lengths_and_scales() -> None:
    q, found = empty(1, 2, 1024, 64), set()
    for length in (17, 128, 333, 1024):
        inputs = replace(inputs_of(q=q[:, :, :length]), scale=float(length - 100))
        result = Result(inputs.q, torch.empty(1, 2, length), inputs.q, None)
        call = call_of(program(NOOP), inputs, (), result, Wanted(True, True, True))
        found.add(backward_hopper.of_options(call.program, call.options))
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
    name: str, head_dim: int, dtype: str, changes: dict[str, Any]
) -> tuple[Kernel, int, int]:
    """A variant's kernel, its loops over q tiles, and the most spills in one."""
    variant = COMPILED[name]
    chosen = replace(options(head_dim, dtype=dtype, variant=variant), **changes)
    chosen = backward_hopper.of_options(program(variant), chosen)
    made = backward_hopper.compile_backward(program(variant), chosen, H200)
    return made, len(softmax_loops(made.image)), spills_in_loops(made.image)


def check(
    found: tuple[Kernel, int, int], name: str, head_dim: int, changes: dict[str, Any]
) -> None:
    made, loops, spills = found
    plan = taken(plans(COMPILED[name], head_dim, **changes), made.notes)
    assert spills <= SPILLS
    assert loops == 2 * len(plan.q_segments)
    assert made.shared <= H200.shared and made.cluster == (1, 1, 1)
    # Two consumers; the warps that fetch and that add up are padded to a warpgroup.
    assert made.num_warps == 12
    assert [m.element for m in made.tensor_maps] == [plan.options.dtype] * 6 + ["f32"] * 2


def compiled_small() -> list[Kernel]:
    """The kernels before and after, for head dim 72 and half tiles."""
    first = rows_plan(options(72, 64), H200, 128, has_grad_lse=True, ordered=True)
    ranks = backward_hopper.ranks_plan(options(72, 64), H200)
    last = backward_hopper.finish_plan(options(72, 64), H200, 128, 128)
    return [compile_small(plan) for plan in (first, ranks, last)]


def first_reads(name: str) -> list[str]:
    """Products and loads that each loop of a kernel of head dim 64 begins with, in their order."""
    made, *_ = compiled(name, 64, "bf16", {})
    found = []
    for loop in softmax_loops(made.image):
        kinds = "".join(x[0] for x in re.findall(r"\b(HGMMA|LDS)\b", "\n".join(loop)))
        found.append(kinds[:12])
    return found


@pytest.mark.skipif(triton_version() != "3.6.0", reason="what another ptxas does was not timed")
@pytest.mark.parametrize("name", ["noop", "causal"])
def test_both_consumers_read_rows_between_their_first_products(
    name: str, apart: Callable[..., Any]
) -> None:
    """Over full tiles; in another order the second one's loop was 4 % slower (H200)."""
    first, second = apart(first_reads, name)[1::2]
    assert first == second and first.startswith("HHHHLLH")


def test_the_kernels_before_and_after_compile(apart: Callable[..., Any]) -> None:
    for made in apart(compiled_small):
        assert made.spills == 0 and made.shared <= H200.shared


# What a call may bring besides: long lengths, offsets and a scale in memory.
LARGE = {
    "small": False,
    "wide_offsets": True,
    "offset_per_batch": True,
    "scale_in_memory": True,
}


# The rest is for `make compile-all`: a kernel takes 8 s.
@pytest.mark.parametrize(
    ("name", "head_dim", "changes"),
    [
        ("noop", 64, {}),
        ("window", 128, LARGE),
        pytest.param("documents", 64, {"has_kv_lens": True}, marks=pytest.mark.compile_all),
        ("causal", 128, {"deterministic": True, "has_kv_lens": True}),
    ],
    ids=["noop", "window in 64 bits", "documents whose keys end", "the same bits where keys end"],
)
def test_kernels_compile_as_they_were_meant(
    apart: Callable[..., Any], name: str, head_dim: int, changes: dict[str, Any]
) -> None:
    check(apart(compiled, name, head_dim, "bf16", changes), name, head_dim, changes)


@pytest.mark.compile_all
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", COMPILED)
def test_seven_kernels_compile_as_they_were_meant(
    apart: Callable[..., Any], name: str, head_dim: int, dtype: str
) -> None:
    made, loops, spills = apart(compiled, name, head_dim, dtype, {})
    assert spills <= SPILLS and loops == 4, made.notes


@pytest.mark.compile_all
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", COMPILED)
def test_deterministic_kernels_compile(apart: Callable[..., Any], name: str, head_dim: int) -> None:
    made, loops, spills = apart(compiled, name, head_dim, "bf16", {"deterministic": True})
    assert spills <= SPILLS and loops == 4, made.notes

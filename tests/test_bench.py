"""FlexAttention's functions mean what the variant means, and a bench tells what it did."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from attention_cases import NOOP
from click.testing import CliRunner
from torch.nn.attention import flex_attention

import scoremod
from scoremod import bench as benches
from scoremod import variants
from scoremod.bench import (
    OURS,
    Candidate,
    Case,
    NotComparable,
    Rig,
    Shape,
    bench,
    draw_missing,
    flex_functions,
    flex_source,
    is_causal,
    kept_pairs,
    prepare,
)
from scoremod.errors import BackendUnavailable, InputMismatch

STOCK = {n: v for n, v in vars(variants).items() if isinstance(v, scoremod.Variant)}
SMALL = Shape(2, 4, 2, 40, 40, 8, 8)
BOTTOM = variants.bottom_right_causal


def alibi_causal() -> scoremod.Variant:
    return variants.alibi & variants.causal


def case_of(variant: scoremod.Variant, shape: Shape = SMALL, **captures: Any) -> Case:
    return prepare(variant, shape, torch.float32, captures, "cpu")


def indices(shape: Shape) -> tuple[torch.Tensor, ...]:
    return torch.arange(shape.q_len)[:, None], torch.arange(shape.kv_len)[None, :]


# -- FlexAttention's functions -----------------------------------------------------------------


def test_the_text_is_what_a_user_would_write() -> None:
    assert flex_source(alibi_causal()) == (
        '"""FlexAttention\'s functions for `alibi_and_causal`."""\n\n'
        "import torch\n\n\n"
        "def functions(slopes):\n"
        "    def score_mod(s, b, h, i, j):\n"
        "        return s - slopes[h] * (i - j)\n\n"
        "    def mask_mod(b, h, i, j):\n"
        "        return j <= i\n\n"
        "    return score_mod, mask_mod\n"
    )


def body(text: str) -> str:
    """The returned expressions of a variant's functions."""
    lines = flex_source(scoremod.parse(text)).splitlines()
    return "; ".join(x.strip().removeprefix("return ") for x in lines if x.startswith(" " * 8))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("variant a(cap: float) { score cap * tanh(s / cap) }", "cap * torch.tanh(s / cap)"),
        ("variant a(n: int) { score s * log(n) }", "s * math.log(float(n))"),
        ("variant a() { score s + i / 2 }", "s + i / 2.0"),
        ("variant a() { score s + exp(i) }", "s + torch.exp(i.float())"),
        ("variant a(t: bf16[H]) { score s + t[h] }", "s + t[h].float()"),
        ("variant a(t: u8[B, Lk]) { mask t[b, j] < 3 }", "t[b, j].int() < 3"),
        ("variant a(t: f32[Hk]) { score s + t[hk] }", "s + t[h // gqa_group]"),
        ("variant a(n: int) { mask i - j < (n if n > 3 else 3) }", "i - j < (n if 3 < n else 3)"),
        ("variant a(t: f32[H, 4]) { score s + t[h, 3] }", "s + t_part_0[h]"),
        ("variant a() { mask True or i < j }", ""),
        ("variant a(n: int) { mask n > 3 }", "torch.full_like(j, 3 < n, dtype=torch.bool)"),
    ],
)
def test_torch_is_spelled_naturally(text: str, expected: str) -> None:
    assert body(text) == expected


def test_a_capture_may_be_called_torch() -> None:
    variant = scoremod.parse("variant v(torch: f32[H], t0: float) { score s * t0 + torch[h] }")
    case = case_of(variant, torch=torch.arange(4.0), t0=2.0)
    score_mod, _ = flex_functions(case)
    s, h = torch.ones(()), torch.tensor(3)
    assert score_mod(s, h, h, h, h) == 5


@pytest.mark.parametrize("name", [n for n, v in STOCK.items() if v._program.mask.names])
def test_mask_mod_is_the_mask(name: str) -> None:
    shape = SMALL
    case = case_of(STOCK[name], shape)
    _, mask_mod = flex_functions(case)
    i, j = indices(shape)
    for b, h in ((0, 0), (1, 3)):
        if name == "flashmask_intervals" and h:
            continue  # mask_dense knows no groups of heads
        found = mask_mod(torch.tensor(b), torch.tensor(h), i, j).expand(40, 40)
        wanted = case.variant.mask_dense(40, 40, b=b, h=h, **case.captures)
        assert torch.equal(found, wanted), name


@pytest.mark.parametrize("name", STOCK)
def test_flex_attention_gives_our_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through FlexAttention itself, its mask by vmap, without Dynamo."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    case = case_of(STOCK[name])
    call, _ = benches._flex(case, cpu_rig())
    torch.testing.assert_close(call(), case.ours(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["alibi", "flashmask_intervals", "t5_bias"])
def test_flex_attention_gives_our_answer_through_dynamo(name: str) -> None:
    case = case_of(STOCK[name])
    call, _ = benches._flex(case, cpu_rig())
    torch.testing.assert_close(call(), case.ours(), atol=2e-5, rtol=1e-4)


def test_dynamo_takes_the_functions() -> None:
    case = case_of(alibi_causal())
    score_mod, mask_mod = flex_functions(case)

    def both(s: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> Any:
        return torch.where(mask_mod(h, h, i, j), score_mod(s, h, h, i, j), 0.0)

    i, j = indices(SMALL)
    given = (torch.randn(40, 40), torch.tensor(1), i, j)
    compiled = torch.compile(both, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*given), both(*given))


def test_a_read_outside_its_table_is_guarded() -> None:
    variant = scoremod.parse("variant v(t: f32[9]) { score s + t[i - j + 4] }")
    score_mod, _ = flex_functions(case_of(variant, t=torch.arange(1.0, 10.0)))
    i, j = indices(SMALL)
    found = score_mod(torch.zeros(()), 0, 0, i, j)
    at = i - j + 4
    assert torch.equal(found, torch.where((at >= 0) & (at < 9), at + 1.0, 0.0))


# -- captures and pairs ------------------------------------------------------------------------


def test_missing_captures_are_drawn_by_type_and_told() -> None:
    variant = scoremod.parse(
        """variant v(doc: i32[B, L], slopes: f32[H], n: int, keep: bool[B, Lk], cap: float = 2.0) {
        score s * cap - slopes[h]
        mask doc[b, i] == doc[b, j] and keep[b, j] and i - j < n }"""
    )
    drawn = draw_missing(variant._program, variant._fixed, SMALL, {"keep": None})
    assert [words for _, words in drawn.values()] == [
        "doc: i32[B, L] (2, 40) (sorted ids)",
        "slopes: f32[H] (4,) (normal)",
        f"n: int = {drawn['n'][0]} (ints in 1..40)",
    ]
    doc = drawn["doc"][0]
    assert doc.dtype is torch.int32 and bool((doc.diff() >= 0).all()) and doc.max() > 0


@pytest.mark.parametrize(
    "name", ["causal", "document", "dilated", "neighborhood_1d", "key_padding"]
)
@pytest.mark.parametrize("lengths", [(40, 40), (300, 270)])
def test_kept_pairs_are_those_of_the_dense_mask(name: str, lengths: tuple[int, int]) -> None:
    shape = SMALL._replace(q_len=lengths[0], kv_len=lengths[1])
    case = case_of(STOCK[name], shape)
    dense = (
        case.variant.mask_dense(*lengths, b=b, h=h, **case.captures)
        for b in range(shape.batch)
        for h in range(shape.q_heads)
    )
    assert kept_pairs(case) == sum(int(m.sum()) for m in dense)


def test_a_long_length_is_counted_without_all_its_pairs() -> None:
    n = 100_000
    case = case_of(variants.causal, Shape(1, 1, 1, n, n, 1, 1))
    assert kept_pairs(case) == n * (n + 1) // 2


# -- SDPA --------------------------------------------------------------------------------------


def test_sdpa_takes_part_where_it_has_the_mask() -> None:
    assert not is_causal(case_of(NOOP))
    assert is_causal(case_of(variants.causal))
    assert is_causal(case_of(BOTTOM))
    assert is_causal(case_of(scoremod.parse("variant v() { mask not (i < j) }")))
    for other in (alibi_causal(), variants.sliding_window, variants.softcap):
        with pytest.raises(NotComparable):
            is_causal(case_of(other))
    with pytest.raises(NotComparable):
        is_causal(case_of(variants.causal, SMALL._replace(kv_len=50)))


# -- a whole bench, on the CPU -----------------------------------------------------------------


def cpu_elapsed(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(min(repeats, 2)):
        call()
    return (time.perf_counter() - start) * 1e3 / min(repeats, 2)


def cpu_rig() -> Rig:
    return Rig("cpu", cpu_elapsed, lambda: None, lambda f: f)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benches, "gpu_rig", cpu_rig)


@pytest.mark.usefixtures("on_cpu")
def test_a_bench_compares_times_and_tells(tmp_path: Path) -> None:
    result = bench(alibi_causal(), shape=SMALL, dtype="f32", rounds=3)
    ours, flex = result[OURS], result["FlexAttention"]
    assert ours.ratio == 1.0 and len(ours.rounds_ms) == 3 and ours.error is None
    assert flex.error is not None and flex.error < 1e-5 and flex.ratio == flex.ms / ours.ms
    assert result.kept == pytest.approx(41 / 80)
    assert result.flop == 4 * 8 * 2 * 4 * 40 * 41 // 2
    assert result["SDPA cuDNN"].note == "it has no scores"
    assert result.block_mask_ms is not None
    text = str(result)
    assert "drawn: slopes: tensor[H] (4,) (normal)" in text and "not counted" in text
    read = json.loads(result.json())
    assert read["shape"]["q_len"] == 40 and read["timings"][1]["ratio"] == flex.ratio
    assert {"gpu", "torch", "triton", "commit", "command"} <= read["machine"].keys()
    result.plot(tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_a_wrong_peer_is_not_timed() -> None:
    ours = Candidate(OURS, lambda: torch.ones(3))
    wrong = Candidate("wrong", lambda: torch.ones(3) * 1.1)
    nan = Candidate("nan", lambda: torch.full((3,), float("nan")))
    benches.compare([ours, wrong, nan], torch.float32)
    assert wrong.call is None and "differs" in wrong.note
    assert nan.call is None


@pytest.mark.usefixtures("on_cpu")
def test_a_peer_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no kernel\nand a long story")

    monkeypatch.setattr(benches, "_flex", broken)
    result = bench(variants.causal, shape=SMALL, dtype="f32", against=["flex"], rounds=1)
    assert result["FlexAttention"].note == "RuntimeError: no kernel"
    assert result["FlexAttention"].ms is None


def test_mistakes_are_told() -> None:
    with pytest.raises(InputMismatch, match="no peer 'fa9'"):
        bench(variants.causal, shape=SMALL, against=["fa9"])
    with pytest.raises(InputMismatch, match="batch, q_heads"):
        bench(variants.causal, shape=(1, 2))
    with pytest.raises(InputMismatch, match="f16, bf16 or f32"):
        bench(variants.causal, shape=SMALL, dtype="f64")
    if not torch.cuda.is_available():
        with pytest.raises(BackendUnavailable, match="needs a GPU"):
            bench(variants.causal, shape=SMALL)


@pytest.mark.usefixtures("on_cpu")
def test_the_options_of_a_command() -> None:
    @click.command()
    @benches.options
    def command(**options: Any) -> None:
        click.echo(benches.from_options(variants.causal, {}, options).json())

    words = "--len 40 --batch 1 --heads 2 --kv-heads 1 --head-dim 8 --dtype f32 --rounds 1"
    ran = CliRunner().invoke(command, [*words.split(), "--against", "flex"])
    assert ran.exit_code == 0, ran.output
    shape = json.loads(ran.output)["shape"]
    assert Shape(**shape) == Shape(1, 2, 1, 40, 40, 8, 8)

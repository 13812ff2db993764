"""The portable backward in Triton's interpreter, against float64 autograd of the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from attention_cases import NOOP, Shape, f16, f32, identical, on
from attention_cases import tensors as tensors_of
from bundle_process import Watching
from torch import Tensor

from scoremod import Variant, attend_triton, parse, variants
from scoremod.backward_triton import backward
from scoremod.errors import BackendUnavailable
from scoremod.gradients import Gradients, Result, Wanted
from scoremod.inputs import check_inputs
from scoremod.passes.patterns import Pattern, classified
from scoremod.plan import Typed

nan = math.nan
# Of the largest gradient: float32's rounding over a few hundred terms.
TOLERANCE = {f32: 1e-5, f16: 4e-3}


def tensors(shape: Shape, dtype: torch.dtype = f32) -> tuple[Tensor, ...]:
    """q, k and v where the kernels run."""
    return tuple(on("triton", x) for x in tensors_of(shape, dtype))


@dataclass(frozen=True)
class Case:
    """A call with the gradients that are asked for."""

    variant: Variant
    shape: Shape
    captures: Callable[[Shape], dict[str, Any]] = lambda shape: {}
    learned: tuple[str, ...] = ()
    call: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = f32


def run(
    variant: Variant,
    qkv: tuple[Tensor, ...],
    do: Tensor,
    dlse: Tensor | None = None,
    learned: tuple[str, ...] = (),
    **call: Any,
) -> tuple[Tensor, Gradients]:
    """The forward's output and the gradients of the Triton backend."""
    options = {name: call.pop(name, None) for name in ("scale", "kv_lens")}
    inputs = check_inputs(
        *qkv, **options, q_offset=call.pop("q_offset", 0), precision=call.pop("precision", "auto")
    )
    with torch.no_grad():
        program, bound = variant._bind(call, inputs.sizes, inputs.q.device)
        known = variant._type(program, bound)
        out, lse, _ = attend_triton.attend(known, inputs, bound)
        wanted = Wanted(True, True, True, frozenset(learned))
        return out, backward(known, inputs, bound, Result(out, lse, do, dlse), wanted)


def oracle(
    variant: Variant,
    qkv: tuple[Tensor, ...],
    do: Tensor,
    dlse: Tensor,
    learned: tuple[str, ...] = (),
    **call: Any,
) -> tuple[Tensor, ...]:
    """The same gradients by autograd, in float64: of q, k, v and each learned capture."""
    leaves = [x.double().requires_grad_() for x in qkv]
    captured = {name: call[name].double().requires_grad_() for name in learned}
    out, lse = variant.eager(*leaves, return_lse=True, **{**call, **captured})
    loss = (out * do.double()).sum()
    # An LSE of -inf is a constant.
    loss = loss + torch.where(lse.isinf(), 0.0, lse * dlse.double()).sum()
    found = torch.autograd.grad(loss, [*leaves, *captured.values()], allow_unused=True)
    given = [*leaves, *captured.values()]
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(given, found, strict=True))


def everything(found: Gradients, learned: tuple[str, ...] = ()) -> list[Tensor]:
    assert found.q is not None and found.k is not None and found.v is not None
    return [found.q, found.k, found.v, *(found.captures[name] for name in learned)]


def noise(qkv: tuple[Tensor, ...], seed: int = 7) -> tuple[Tensor, Tensor]:
    """What comes back for out and lse."""
    q, _, v = qkv
    make = torch.Generator().manual_seed(seed)
    do = torch.randn((*q.shape[:3], v.shape[3]), generator=make).to(q)
    return do, torch.randn(q.shape[:3], generator=make).to(q.device)


def compare(case: Case) -> None:
    qkv = tensors(case.shape, case.dtype)
    do, dlse = noise(qkv)
    call = {**case.captures(case.shape), **case.call}
    call = on("triton", call)
    _, found = run(case.variant, qkv, do, dlse, case.learned, **call)
    wanted = oracle(case.variant, qkv, do, dlse, case.learned, **call)
    agree(everything(found, case.learned), wanted, TOLERANCE[case.dtype])


def agree(found: Any, wanted: Any, tolerance: float) -> None:
    for mine, exact in zip(found, wanted, strict=True):
        assert mine.shape == exact.shape
        size = float(exact.abs().max()) if exact.numel() else 0.0
        torch.testing.assert_close(mine.double(), exact, rtol=0, atol=tolerance * max(size, 1.0))


# -- masks and scores --------------------------------------------------------------------------


def documents(shape: Shape) -> dict[str, Any]:
    ids = torch.arange(max(shape.q_len, shape.kv_len)) // 37
    return {"doc": ids.int().expand(shape.batch, -1).contiguous()}


def slopes(shape: Shape) -> dict[str, Any]:
    return {"slopes": variants.alibi_slopes(shape.q_heads)}


def randn(*dims: int | str) -> Callable[[Shape], Tensor]:
    """A table with dimensions of the shape, the same in each run."""

    def make(shape: Shape) -> Tensor:
        sizes = {"B": shape.batch, "H": shape.q_heads, "Hk": shape.kv_heads}
        sizes |= {"Lq": shape.q_len, "Lk": shape.kv_len, "L": max(shape.q_len, shape.kv_len)}
        rng = torch.Generator().manual_seed(3)
        return torch.randn([sizes[d] if isinstance(d, str) else d for d in dims], generator=rng)

    return make


CAPPED = variants.softcap.bind(cap=2.0) & variants.sliding_window.bind(window=20)
LENS = {"kv_lens": torch.tensor([0, 33], dtype=torch.int32)}
CASES: dict[str, Case] = {
    "noop, GQA, few keys": Case(NOOP, Shape(1, 3, 1, 19, 3, 8, 24)),
    "causal, odd head dims": Case(variants.causal, Shape(1, 2, 1, 70, 50, 17, 40)),
    "kv_lens, rows without keys": Case(NOOP, Shape(2, 2, 2, 20, 40), call=LENS),
    "offset": Case(variants.causal, Shape(2, 2, 1, 30, 40), call={"q_offset": 25}),
    "offset per sequence": Case(
        variants.causal, Shape(2, 2, 1, 30, 40), call={"q_offset": torch.tensor([0, 25])}
    ),
    "window, soft cap": Case(CAPPED, Shape(1, 1, 1, 70, 70)),
    "ALiBi, negative scale": Case(
        variants.alibi & variants.causal, Shape(1, 3, 1, 33, 65), slopes, call={"scale": -0.3}
    ),
    "scale in memory": Case(NOOP, Shape(1, 1, 1, 17, 16), call={"scale": torch.tensor(0.7)}),
    "a structure of tiles": Case(
        variants.document & variants.causal, Shape(1, 1, 1, 90, 140), documents
    ),
    "several runs": Case(variants.sink_window, Shape(1, 1, 1, 100, 150), call={"window": 30}),
    "jagged": Case(
        variants.jagged,
        Shape(2, 1, 1, 40, 50),
        lambda shape: {
            "start": torch.arange(40).expand(2, -1) % 17,
            "end": torch.arange(40).expand(2, -1) % 17 + 20,
        },
    ),
    "half precision": Case(variants.causal, Shape(1, 2, 1, 40, 40, 32, 32), dtype=f16),
    "wide head dims": Case(variants.causal, Shape(1, 1, 1, 18, 20, 256, 130)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_gradients_of_q_k_and_v(name: str) -> None:
    compare(CASES[name])


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0)])
def test_no_queries_or_no_keys(q_len: int, kv_len: int) -> None:
    case = Case(variants.alibi, Shape(1, 2, 1, q_len, kv_len), slopes, learned=("slopes",))
    compare(case)


def test_a_batch_of_one_serves_all_sequences() -> None:
    q, k, v = tensors(Shape(3, 2, 1, 20, 30))
    qkv = q, k[:1], v[:1]
    do, dlse = noise(qkv)
    _, found = run(variants.causal, qkv, do, dlse)
    agree(everything(found), oracle(variants.causal, qkv, do, dlse), 1e-5)


def strided(qkv: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """The same values in other places: [B, L, H, D] in memory, and a last stride of 2."""
    yield tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv)
    yield tuple(x.repeat_interleave(2, 3)[..., ::2] for x in qkv)


def test_strides_do_not_matter() -> None:
    qkv = tensors(Shape(2, 2, 1, 9, 36))
    do, _ = noise(qkv)
    _, expected = run(variants.causal, qkv, do)
    for other in strided(qkv):
        _, found = run(variants.causal, other, do.transpose(0, 1).contiguous().transpose(0, 1))
        assert identical(everything(found), everything(expected))


def test_an_expanded_gradient_arrives() -> None:
    qkv = tensors(Shape(1, 1, 1, 9, 20))
    one = torch.ones((), device=qkv[0].device).expand(qkv[0].shape)
    _, found = run(NOOP, qkv, one)
    _, expected = run(NOOP, qkv, one.contiguous())
    assert identical(everything(found), everything(expected))


# -- values ------------------------------------------------------------------------------------


def test_what_is_masked_reaches_no_gradient() -> None:
    wild = parse("variant wild() { score sqrt(float(i - j)) * s  mask j <= i }")
    compare(Case(wild, Shape(1, 2, 1, 40, 50)))


def test_rows_without_keys_have_no_gradient() -> None:
    qkv = tensors(Shape(1, 1, 1, 40, 30))
    do, dlse = noise(qkv)
    dlse[0, 0, 35] = nan
    _, found = run(parse("variant few() { mask i < 30 and j < 20 }"), qkv, do, dlse)
    dq, dk, dv = everything(found)
    assert not dq[:, :, 30:].any() and not dk[:, :, 20:].any() and not dv[:, :, 20:].any()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


def test_an_attended_nan_stays_in_its_row() -> None:
    shifted = parse("variant shifted(t: tensor[Lq]) { score s + t[i]  mask j <= i }")
    qkv = tensors(Shape(1, 1, 1, 20, 20))
    do, _ = noise(qkv)
    t = torch.zeros(20, device=do.device)
    t[3] = nan
    dq, dk, dv = everything(run(shifted, qkv, do, t=t)[1])
    assert dq[0, 0, 3].isnan().all() and dq[0, 0, torch.arange(20) != 3].isfinite().all()
    for x in (dk, dv):
        assert x[0, 0, :4].isnan().all() and x[0, 0, 4:].isfinite().all()


# -- captures ----------------------------------------------------------------------------------

SMALL = Shape(2, 2, 1, 33, 36)
GATHER = parse("variant g(t: tensor[N], d: tensor[B, Lq]) { score s + t[d[b, i]] * float(j) / 9 }")
TWICE = parse("variant twice(t: tensor[L, L]) { score s + t[i, j] * t[j, i] }")
GROUP = parse("variant group(t: tensor[Hk, Lk]) { score s * t[hk, j] }")
SHORT = parse("variant short(t: tensor[N]) { score s + t[i + 1] * t[j - 3] }")


def captured(variant: Variant, name: str, table: Any, shape: Shape = SMALL, **more: Any) -> Case:
    call = {n: x for n, x in more.items() if n in ("q_offset", "kv_lens")}
    rest = {n: x for n, x in more.items() if n not in call}
    return Case(
        variant,
        shape,
        lambda s: {name: table(s) if callable(table) else table, **rest},
        (name,),
        call,
    )


LEARNED: dict[str, tuple[set[Pattern], Case]] = {
    "a slope per head": (
        {Pattern.ROW},
        captured(variants.alibi & variants.causal, "slopes", randn("H")),
    ),
    "a number": ({Pattern.ROW}, captured(variants.softcap, "cap", torch.tensor(2.0))),
    "rows and columns": (
        {Pattern.ROW, Pattern.COLUMN},
        captured(variants.forget_gate & variants.causal, "log_decay", randn("B", "H", "L")),
    ),
    "rows that share elements": (
        {Pattern.ROW},
        captured(GATHER, "t", randn(7), Shape(2, 1, 1, 33, 36), d=torch.arange(66).view(2, 33) % 8),
    ),
    "columns of a kv head": (
        {Pattern.COLUMN},
        captured(GROUP, "t", randn("Hk", "Lk"), Shape(1, 4, 2, 10, 33)),
    ),
    "reads outside the table": (
        {Pattern.ROW, Pattern.COLUMN},
        captured(SHORT, "t", randn(30), Shape(2, 1, 1, 33, 36), q_offset=torch.tensor([0, 3])),
    ),
    "distances, clipped": (
        {Pattern.DIAGONAL},
        captured(
            variants.relative_bias, "table", randn("H", 41), Shape(1, 2, 1, 40, 36), max_distance=20
        ),
    ),
    "distances, offset per sequence": (
        {Pattern.DIAGONAL},
        captured(
            variants.relative_bias & variants.causal,
            "table",
            randn("H", 41),
            Shape(2, 1, 1, 33, 36),
            max_distance=20,
            q_offset=torch.tensor([3, 30]),
        ),
    ),
    "buckets of distances": (
        {Pattern.DIAGONAL},
        captured(variants.t5_bias, "table", randn(32, "H"), Shape(1, 1, 1, 33, 36)),
    ),
    "pairs": (
        {Pattern.PAIR},
        captured(variants.dense_bias & variants.causal, "bias", randn("B", "H", "Lq", "Lk")),
    ),
    "pairs, one table for all": (
        {Pattern.PAIR},
        captured(variants.dense_bias, "bias", randn(1, 1, "Lq", "Lk"), Shape(2, 2, 1, 9, 36)),
    ),
    "pairs, a table per head": (
        {Pattern.PAIR},
        captured(variants.dense_bias, "bias", randn(1, "H", "Lq", "Lk"), Shape(2, 2, 1, 9, 36)),
    ),
    "pairs, read twice": ({Pattern.PAIR}, captured(TWICE, "t", randn("L", "L"))),
    "anywhere": (
        {Pattern.SCATTERED},
        captured(
            variants.graph_bias,
            "table",
            randn(8, "H"),
            dist=(torch.arange(2376).view(2, 33, 36) * 7 % 9),
        ),
    ),
}


@pytest.mark.parametrize("name", LEARNED)
def test_the_gradients_of_captures(name: str) -> None:
    patterns, case = LEARNED[name]
    reads = classified(typed_of(case).given_score, frozenset(case.learned))
    assert {r.pattern for r in reads} == patterns
    compare(case)


def test_a_slope_does_not_feel_the_rounding_of_the_output() -> None:
    """delta of an output in fp16 is wrong by 1e-4 in each row, which a sum per head collects."""
    shape = Shape(1, 2, 1, 90, 90)
    attn, qkv, values = variants.alibi & variants.causal, tensors(shape, f16), slopes(shape)
    values = on("triton", values)
    do, dlse = noise(qkv)
    _, found = run(attn, qkv, do, dlse, ("slopes",), **values)
    exact = oracle(attn, qkv, do, dlse, ("slopes",), **values)[3]
    error = (found.captures["slopes"].double() - exact).abs().max() / exact.abs().max()
    assert error < 1e-5


def typed_of(case: Case) -> Typed:
    q, k, v = tensors(case.shape, case.dtype)
    inputs = check_inputs(q, k, v, scale=None, q_offset=0, kv_lens=None, precision="auto")
    call = on("triton", case.captures(case.shape))
    return case.variant._type(*case.variant._bind(call, inputs.sizes, q.device))


def test_a_capture_keeps_its_dtype_and_shape() -> None:
    case = captured(variants.alibi, "slopes", lambda s: randn("H")(s).to(f16), Shape(1, 2, 1, 8, 9))
    qkv = tensors(case.shape)
    do, _ = noise(qkv)
    call = on("triton", case.captures(case.shape))
    _, found = run(case.variant, qkv, do, learned=("slopes",), **call)
    assert found.captures["slopes"].dtype is f16 and found.captures["slopes"].shape == (2,)
    number = on("triton", torch.tensor([2.0]))
    _, found = run(variants.softcap, qkv, do, learned=("cap",), cap=number)
    assert found.captures["cap"].shape == (1,) and found.captures["cap"].item() != 0


def test_only_what_is_wanted_is_given() -> None:
    q, k, v = tensors(Shape(1, 1, 1, 8, 8))
    inputs = check_inputs(q, k, v, scale=None, q_offset=0, kv_lens=None, precision="auto")
    program, bound = NOOP._bind({}, inputs.sizes, q.device)
    known = NOOP._type(program, bound)
    out, lse, _ = attend_triton.attend(known, inputs, bound)
    found = backward(known, inputs, bound, Result(out, lse, out, None), Wanted(True, False, False))
    assert found.q is not None and found.k is None and found.v is None and not found.captures


# -- reproducibility ---------------------------------------------------------------------------


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_atomic_additions_are_refused_where_torch_asks_for_determinism() -> None:
    _, case = LEARNED["anywhere"]
    with pytest.raises(BackendUnavailable, match="capture `table` is summed by atomic additions"):
        compare(case)


@pytest.mark.parametrize("watched", [nullcontext, Watching], ids=["eager", "operator"])
def test_a_call_asks_for_determinism_by_itself(watched: Callable[[], Any]) -> None:
    _, case = LEARNED["anywhere"]
    q, k, v = (x.requires_grad_() for x in tensors(Shape(2, 1, 1, 3, 4)))
    call = on("triton", {**case.captures(case.shape), "backend": "triton"})
    call["table"].requires_grad_()
    with watched():
        case.variant(q, k, v, deterministic=False, **call).sum().backward()
        out = case.variant(q, k, v, deterministic=True, **call)
        with pytest.raises(BackendUnavailable, match="capture `table` is summed by atomic add"):
            out.sum().backward()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", ["distances, clipped", "rows that share elements"])
def test_gradients_are_the_same_bits_each_time(name: str) -> None:
    _, case = LEARNED[name]
    qkv = tensors(case.shape)
    do, dlse = noise(qkv)
    call = on("triton", case.captures(case.shape))
    twice = [run(case.variant, qkv, do, dlse, case.learned, **call)[1] for _ in range(2)]
    assert identical(*(everything(g, case.learned) for g in twice))

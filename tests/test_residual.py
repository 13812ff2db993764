"""What rounding o to 16 bits takes away: kept where gradients are wanted, and added back.

In Triton's interpreter; the kernels' texts and what torch sees of the residual need none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import NOOP, Shape, bf16, f16, f32, identical, on, tensors
from gradient_cases import leaf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from scoremod import Variant, attend_triton, backward_hopper, hopper_rows, library, parse, variants
from scoremod.backends.triton import TRITON
from scoremod.backward_triton import backward, call_of, row_values
from scoremod.gradients import Answer, Result, Wanted
from scoremod.inputs import HALVES, check_inputs
from scoremod.plan import assumed_params, typed
from scoremod.plan_triton import residual_words
from scoremod.ready import Interpreted, _interpreted
from scoremod.render import _steps_of, _with_shared_steps

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="for Triton's interpreter")
CAUSAL = typed(variants.causal._program, ())
NEAR = parse("variant near() { mask abs(i - j) < 9 }")  # rows see few keys
ALL = Wanted(True, True, True)

# -- the two steps -----------------------------------------------------------------------------

ROUND_TRIP = """
import triton
import triton.language as tl

# -- shared steps


@triton.jit
def round_trip(
    x, o, words, found, WORDS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    places = rows[:, None] * WIDTH + columns[None, :]
    rounded = tl.load(o + places)
    made = packed(residual_codes(tl.load(x + places), rounded), columns, ROWS, WIDTH)
    offs_w = tl.arange(0, made.shape[1])
    inside = (rows >= 0)[:, None] & (offs_w < WORDS)[None, :]
    tl.store(words + rows[:, None] * WORDS + offs_w[None, :], made, mask=inside)
    codes = load_codes(words + rows * WORDS, rows >= 0, WORDS, ROWS, WIDTH)
    tl.store(found + places, restored(rounded, codes))
"""


def round_trip(x: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """float32 numbers rounded to a dtype, and restored with what that took away."""
    x = x.reshape(-1, width).to(f32)
    rows, words = len(x), residual_words(width)
    sizes = {"WORDS": words, "ROWS": rows, "WIDTH": width}
    text = _with_shared_steps(ROUND_TRIP, _steps_of(TRITON))
    found, kept = torch.empty_like(x), torch.empty(rows, words, dtype=torch.int32)
    kernel = _interpreted(Interpreted(text, "round_trip", sizes))
    kernel.run(1, [x, x.to(dtype), kept, found])
    return found


def last_places(o: Tensor) -> Tensor:
    """What the last place of each number counts, in float64."""
    bits, least = (11, -24) if o.dtype is f16 else (8, -133)
    _, exponent = torch.frexp(o.double())
    return torch.where(o == 0, 0.0, 2.0 ** (exponent - bits)).clamp_min(2.0**least)


def check_round_trip(x: Tensor, dtype: torch.dtype, width: int) -> None:
    """Within a seventh of the last place; where float16 has no more exponents, not much farther.

    Rows that lost less than a quarter everywhere may have lost nothing.
    """
    found, x = round_trip(x, dtype, width).double(), x.reshape(-1, width).double()
    o = x.to(dtype)
    error, before, normal = (found - x).abs(), (o.double() - x).abs(), torch.finfo(dtype).tiny
    small = (before <= last_places(o) / 4).all(1, keepdim=True)
    assert (error <= last_places(o) / torch.where(small, 4, 7))[o.abs() > normal].all()
    if dtype is f16:  # the interpreter converts such numbers of bfloat16 wrongly
        farther = o.double().abs() * 2**-13 + torch.finfo(f32).tiny
        assert (error <= before + farther)[o.abs() <= normal].all()


AWKWARD = [0.0, -0.0, 1.0, 1 - 2**-12, 2 - 2**-12, -(4 - 2**-9), 2**-14, 2**-14 - 2**-25, 3e-8]
AWKWARD += [2**-24, 2**-25, -(2**-26), 1.1e-38, 1e-45, 2**-100 + 2**-109, 60000.0, 65519.0]


@interpreted
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("width", [16, 32, 128])
def test_awkward_numbers_come_back(dtype: torch.dtype, width: int) -> None:
    numbers = torch.tensor(AWKWARD, dtype=f32).repeat(math.ceil(2 * width / len(AWKWARD)))
    check_round_trip(numbers[: 2 * width], dtype, width)


@interpreted
@settings(deadline=None, max_examples=20)
@given(st.lists(st.floats(-6e4, 6e4, width=32), min_size=64, max_size=64), st.sampled_from(HALVES))
def test_numbers_come_back(numbers: list[float], dtype: torch.dtype) -> None:
    check_round_trip(torch.tensor(numbers, dtype=f32), dtype, 64)


@interpreted
@pytest.mark.parametrize("dtype", HALVES)
def test_rows_that_lost_nothing_come_back_exactly(dtype: torch.dtype) -> None:
    """As queries do that see one key; the second row loses something in one place."""
    exact = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).to(dtype).float()
    # As sums in float32 may be: off by roundings of their own, to both sides.
    x = exact * (1 + torch.linspace(-3e-7, 3e-7, 64))
    x[1, 7] *= 1 + 0.3 * torch.finfo(dtype).eps
    found = round_trip(x, dtype, 64)
    assert torch.equal(found[0], exact[0])
    assert (found[1] != exact[1]).all()


@interpreted
def test_what_is_not_finite_stays_so() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e6] * 4)
    found = round_trip(x, f16, 16)[0, :4]
    assert found[:2].tolist() == [math.inf, -math.inf] and found[3] == math.inf
    assert found[2].isnan()


# -- delta -------------------------------------------------------------------------------------


def unpacked(words: Tensor, v_head_dim: int) -> Tensor:
    """Codes [..., Dv] of packed words, written from the format's description."""
    columns = torch.arange(v_head_dim)
    word = columns // 64 * 4 + columns % 8 // 2
    place = columns % 64 // 8 * 4 + columns % 2 * 2
    codes = (words[..., word].long() >> place) & 3
    return torch.where(codes > 1, codes - 4, codes)


def in_columns(v_head_dim: int) -> Tensor:
    """The bits of a row's words that belong to columns: int32 [words]."""
    bits = [0] * residual_words(v_head_dim)
    for column in range(v_head_dim):
        place = column % 64 // 8 * 4 + column % 2 * 2
        bits[column // 64 * 4 + column % 8 // 2] |= 3 << place
    return torch.tensor(bits).to(torch.uint32).view(torch.int32)


@interpreted
@pytest.mark.parametrize("v_head_dim", [72, 64, 19])
def test_both_backwards_restore_o(v_head_dim: int) -> None:
    """Of rows of codes out of thin air; dims that no chunk of 64 columns fits."""
    torch.manual_seed(1)
    shape = (2, 3, 70)
    q = torch.randn(*shape, 64).half()
    out, do = torch.randn(2, *shape, v_head_dim).half()
    words = torch.randint(-(2**31), 2**31, (*shape, residual_words(v_head_dim)), dtype=torch.int32)
    words &= in_columns(v_head_dim)
    inputs = check_inputs(
        q, q, torch.empty_like(out), scale=None, q_offset=0, kv_lens=None, precision="auto"
    )
    words[1, 2, 5] = 0
    result = Result(out, torch.zeros(shape), do, None, words)
    call = call_of(typed(NOOP._program, ()), inputs, (), result, ALL)
    shifted = out.float().view(torch.int32) + (unpacked(words, v_head_dim).int() << 11) + 1024 - 32
    shifted[1, 2, 5] = out[1, 2, 5].float().view(torch.int32)
    exact = (shifted.view(f32).double() * do.double()).sum(3)
    torch.testing.assert_close(row_values(call)[..., 1].double(), exact, rtol=1e-5, atol=1e-4)
    assert (exact - (out.double() * do.double()).sum(3)).abs().max() > 1e-3
    if v_head_dim % 8 == 0:
        kernel = hopper_rows.rows_kernel(call, 64)
        scratch = backward_hopper.scratch_of(call, 64, 6)
        hopper_rows.look_at_rows(call, kernel, do, 64, scratch)
        found = scratch.rows.view(2, 3, -1, 2, 64)[..., 1, :].flatten(2).sort().values
        padded = torch.cat([exact, torch.zeros(2, 3, 58)], 2).sort().values
        torch.testing.assert_close(found.double(), padded, rtol=1e-5, atol=1e-4)


def peaked(dtype: torch.dtype, **options: Any) -> tuple[Any, Answer, Tensor]:
    """A causal call whose rows look at few keys; its answer; what comes back."""
    torch.manual_seed(0)
    q, k, v, do = on("triton", tuple(torch.randn(4, 1, 2, 70, 64).to(dtype)))
    inputs = check_inputs(q, k, v, scale=1.0, q_offset=0, kv_lens=None, precision="auto")
    inputs = replace(inputs, **options)
    return inputs, attend_triton.attend(CAUSAL, inputs, ()), do


def test_gradients_of_peaked_attention_are_nearer() -> None:
    """dq's error, in units of rounding the exact dq: a quarter of delta's part is left."""
    inputs, answer, do = peaked(f16, keeps_residual=True)
    leaves = [x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = variants.causal.eager(*leaves, scale=1.0)
    exact, *_ = torch.autograd.grad(out, leaves, do.double())
    rounding = (exact.half().double() - exact).square().mean().sqrt()

    def error(residual: Tensor | None) -> float:
        result = Result(answer.out, answer.lse, do, None, residual)
        dq = backward(CAUSAL, inputs, (), result, ALL).q
        assert dq is not None
        return float((dq.double() - exact).square().mean().sqrt() / rounding)

    assert error(answer.residual) < 1.85 < 2.5 < error(None)


# -- which forwards keep it --------------------------------------------------------------------

SMALL = Shape(1, 2, 1, 20, 24, 16, 24)


def kept(
    dtype: torch.dtype, backend: str = "triton", variant: Variant = NEAR, **call: Any
) -> list[Tensor]:
    """The int32 tensors that an eager call saves, but those that it is given."""
    q, k, v = (leaf(x) for x in on(backend, tensors(SMALL, dtype)))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        variant(q, k, v, backend=backend, **call)
    given = [x for x in call.values() if isinstance(x, Tensor)]
    return [x for x in saved if x.dtype is torch.int32 and not any(x is y for y in given)]


def test_calls_in_16_bits_keep_2_bits_an_element() -> None:
    for dtype in HALVES:
        (residual,) = kept(dtype)
        assert residual.shape == (1, 2, 20, 4)  # 24 columns take a chunk of 64
    assert not kept(f32) and not kept(f16, "cpu")


FEW_KEYS = {
    "every key": (NOOP, False),
    "causal": (variants.causal, False),
    "as many as there are from a query on": (parse("variant ahead() { mask j >= i }"), False),
    "causal, an offset": (parse("variant late(n: int) { mask j <= i + n }"), False),
    "a window": (variants.sliding_window, True),
    "the first keys": (variants.prefix_lm, True),
    "documents": (variants.document, False),
    "documents, causal": (variants.document & variants.causal, False),
    "documents, a window": (variants.document & variants.sliding_window, True),
    "keys by what they are": (parse("variant kinds(t: i32[L]) { mask t[i] <= t[j] }"), True),
    "every other query's": (parse("variant half() { mask 2 * j <= i }"), True),
    "an end by head": (parse("variant ends(n: i32[H]) { mask j <= i + n[h] }"), True),
    "some queries": (parse("variant some() { mask j <= i and i % 2 == 0 }"), True),
    "a score of a pair's place": (variants.alibi & variants.causal, True),
    "a score that may be steep": (variants.softcap & variants.causal, True),
}


@pytest.mark.parametrize("name", FEW_KEYS)
def test_it_is_kept_where_rows_may_see_few_keys_or_weigh_few(name: str) -> None:
    variant, few = FEW_KEYS[name]
    program = typed(variant._program, assumed_params(variant._program))
    assert program.sees_many_keys != few


def test_calls_keep_it_by_what_they_ask_for() -> None:
    assert not kept(f16, variant=variants.causal)
    assert kept(f16, variant=variants.alibi & variants.causal, slopes=on("triton", torch.rand(2)))
    some = on("triton", torch.ones(1, 1, dtype=torch.bool))
    assert kept(f16, variant=variants.causal, tiles=(some, 128))


def test_the_output_is_the_same_bits_with_and_without() -> None:
    (_, plain, _), (_, keeping, _) = peaked(f16), peaked(f16, keeps_residual=True)
    assert plain.residual is None and keeping.residual is not None
    assert identical(plain[:2], keeping[:2])


def forward_text(**options: Any) -> str:
    q = torch.empty(1, 1, 64, 64, dtype=bf16)
    inputs = check_inputs(q, q, q, scale=None, q_offset=0, kv_lens=None, precision="auto")
    chosen = replace(attend_triton.options(CAUSAL, inputs, ()), **options)
    return attend_triton.source(
        attend_triton.triton_plan(CAUSAL, chosen, attend_triton.INTERPRETER)
    )


def test_a_forward_without_gradients_knows_nothing_of_it() -> None:
    assert "residual" not in forward_text() and "packed" not in forward_text()
    assert "residual_codes(" in forward_text(keeps_residual=True)


# -- what else calls it ------------------------------------------------------------------------


def ways() -> Iterator[tuple[str, Any]]:
    """Ways to the gradients of q, k and v of a loss."""
    from torch.utils.checkpoint import checkpoint

    def plain(attend: Any, qkv: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        leaves = [leaf(x) for x in qkv]
        return torch.autograd.grad(attend(*leaves).float().square().sum(), leaves)

    def functional(attend: Any, qkv: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.func.grad(lambda *x: attend(*x).float().square().sum(), (0, 1, 2))(*qkv)

    def again(attend: Any) -> Any:
        return lambda *x: checkpoint(attend, *x, use_reentrant=False)

    def compiled(attend: Any) -> Any:
        return torch.compile(attend, fullgraph=True, backend="aot_eager")

    yield "eager", plain
    yield "torch.func", functional
    yield "checkpoint", lambda attend, qkv: plain(again(attend), qkv)
    yield "torch.compile", lambda attend, qkv: plain(compiled(attend), qkv)


def test_all_ways_to_gradients_give_the_same_bits() -> None:
    qkv = on("triton", tensors(SMALL, f16))
    found = {
        name: way(lambda *x: variants.causal(*x, backend="triton"), qkv) for name, way in ways()
    }
    assert all(identical(x, found["eager"]) for x in found.values())


def operator_call(qkv: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """What the operator is called with."""
    seen: list[tuple[Any, ...]] = []
    operator = library._attend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_attend", lambda *args: seen.append(args) or operator(*args))
        with FlopCounterMode(display=False):  # any mode will do
            NEAR(*qkv, backend="triton")
    return seen[0]


def test_the_operator_keeps_it_where_gradients_are_wanted() -> None:
    qkv = tuple(leaf(x) for x in on("triton", tensors(SMALL, f16)))
    arguments = operator_call(qkv)
    assert " kept " in arguments[-1]
    torch.library.opcheck(library._attend, arguments)
    with torch.no_grad():
        arguments = operator_call(qkv)
        *_, residual = library._attend(*arguments)
    assert residual.numel() == 0


@interpreted
def test_another_backend_took_nothing_away() -> None:
    """As where an exported program runs on another device."""
    *arguments, how = operator_call(tuple(leaf(x) for x in tensors(SMALL, f16)))
    *_, residual = library._attend(*arguments, how.replace("triton", "cpu"))
    assert residual.shape == (1, 2, 20, 4) and not residual.any()

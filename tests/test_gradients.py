"""Gradients of every differentiable backend against float64 autograd of the oracle."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import test_attention
import torch
from attention_cases import DEVICE, NOOP, Shape, agree, bf16, f16, f32, f64, identical, on, tensors
from gradient_cases import compare_gradients, each_differentiable, gradients, leaf, loss
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from strategies import SMOOTH, TABLES, TYPES, exprs, sample
from torch import Tensor

import scoremod
from scoremod import autograd, parse, variants
from scoremod.errors import BackendUnavailable, CaptureMismatch
from scoremod.gradients import Answer
from scoremod.inputs import check_inputs
from scoremod.ir.capture import Capture, Kind
from scoremod.ir.ops import Op, Type
from scoremod.variant import Program

inf, nan = math.inf, math.nan
SMALL = test_attention.SMALL
ALIBI = variants.alibi & variants.causal
CAPPED = variants.softcap.bind(cap=2.0) & variants.sliding_window.bind(window=9)
LEARNED = parse(
    "variant learned(slope, temperature) { score s * temperature - slope[h] * (i - j) }"
)
LEARNED &= variants.causal


def learned(heads: int, dtype: torch.dtype = f32) -> dict[str, Tensor]:
    return {"slope": torch.linspace(0.1, 0.5, heads, dtype=dtype), "temperature": torch.tensor(0.8)}


# -- shapes, strides, dtypes -------------------------------------------------------------------

SHAPES = {
    "several tiles": (Shape(1, 2, 1, 130, 270, 16, 24), {}),
    "of one": (Shape(1, 1, 1, 1, 1, 1, 1), {}),
    "no key": (Shape(2, 2, 1, 3, 0), {}),
    "no query": (Shape(2, 2, 1, 0, 3), {}),
    "no sequence": (Shape(0, 2, 1, 3, 5), {}),
    "odd heads": (Shape(2, 6, 2, 17, 33, 17, 31), {"q_offset": 16}),
    "lengths": (Shape(3, 2, 2, 20, 40), {"kv_lens": torch.tensor([7, 0, 40], dtype=torch.int32)}),
    "offsets": (Shape(2, 2, 1, 9, 40), {"q_offset": torch.tensor([31, 3])}),
    "scale in memory": (SMALL, {"scale": torch.tensor(0.3)}),
    "negative scale": (SMALL, {"scale": -0.3}),
}


@each_differentiable
@pytest.mark.parametrize("attn", [ALIBI, CAPPED], ids=["alibi", "capped"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, attn: Any, backend: str) -> None:
    shape, call = SHAPES[name]
    captures = {"slopes": torch.rand(shape.q_heads)} if attn is ALIBI else {}
    compare_gradients(attn, tensors(shape), backend, captures, **call)


@each_differentiable
@pytest.mark.parametrize("dtype", [f64, f16, bf16], ids=str)
def test_dtypes(dtype: torch.dtype, backend: str) -> None:
    """Captures keep their own dtype: float32 parameters beside 16-bit q, k and v."""
    if backend == "triton" and (dtype is f64 or DEVICE["triton"] == "cpu"):
        pytest.skip("float64, and 16-bit products in the interpreter")
    found = compare_gradients(LEARNED, tensors(SMALL, dtype), backend, learned(4))
    assert [x.dtype for x in found] == [dtype] * 3 + [f32] * 2


@each_differentiable
@pytest.mark.parametrize("batches", [(1, 3), (3, 1), (1, 1)], ids=str)
def test_k_and_v_of_batch_1(batches: tuple[int, int], backend: str) -> None:
    q, k, v = tensors(Shape(3, 4, 2, 9, 20))
    compare_gradients(variants.causal, (q, k[: batches[0]], v[: batches[1]]), backend)


@each_differentiable
@pytest.mark.parametrize("layout", test_attention.LAYOUTS)
def test_strides(layout: str, backend: str) -> None:
    """Of q, k and v, and of what comes back."""
    view = test_attention.LAYOUTS[layout]
    q, k, v = (on(backend, x) for x in tensors(Shape(2, 2, 2, 18, 35, 16, 16)))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = variants.causal(*(view(x) for x in leaves), backend=backend)
    out.backward(view(torch.ones_like(q)))
    wanted = [x.clone().requires_grad_() for x in (q, k, v)]
    variants.causal.eager(*(view(x) for x in wanted)).backward(torch.ones_like(q))
    for x, y in zip(leaves, wanted, strict=True):
        agree(x.grad, y.grad, 3e-5)


@each_differentiable
def test_only_what_is_asked_for(backend: str) -> None:
    """Each gradient alone is the one that all together give."""
    qkv, values = [on(backend, x) for x in tensors(SMALL)], on(backend, learned(4))
    wanted = list(gradients(LEARNED, tuple(qkv), values, backend=backend))
    for place, all_together in enumerate(wanted):
        given = [*qkv, *values.values()]
        given[place] = leaf(given[place])
        q, k, v, slope, temperature = given
        out = LEARNED(q, k, v, slope=slope, temperature=temperature, return_lse=True,
                      backend=backend)  # fmt: skip
        loss(*out).backward()
        assert torch.equal(given[place].grad, all_together)


@each_differentiable
def test_bitwise_reproducible(backend: str) -> None:
    attn = parse("variant v(t, f) { score s * f[h] + t[h, i - j + 269] mask j <= i + 140 }")
    qkv = tuple(on(backend, x) for x in tensors(Shape(2, 4, 2, 130, 270)))
    values = on(backend, {"t": torch.randn(4, 400), "f": torch.rand(4)})
    first, again = (list(gradients(attn, qkv, values, backend=backend)) for _ in range(2))
    assert identical(first[:3], again[:3])
    assert backend != "cpu" or identical(first, again)


# -- rows, nan, inf ----------------------------------------------------------------------------


@each_differentiable
def test_rows_without_keys_have_gradient_zero_whatever_stands_in_them(backend: str) -> None:
    if backend != "cpu":
        pytest.skip("what is not finite in q or in what comes back reaches the keys of its tile")
    attn = parse("variant v(t) { score s + t[j] mask j < i and i != 7 }")
    q, k, v, t = (on(backend, x).clone() for x in (*tensors(SMALL), torch.randn(40)))
    q[:, :, 7], coming = inf, torch.randn_like(q)
    coming[:, :, [0, 7]] = nan
    leaves = [x.requires_grad_() for x in (q, k, v, t)]
    attn(q, k, v, t=t, backend=backend).backward(coming)
    assert all(x.grad.isfinite().all() for x in leaves)
    assert not q.grad[:, :, [0, 7]].any()


@each_differentiable
def test_masked_pairs_have_no_gradient_whatever_their_score(backend: str) -> None:
    """log of what is negative or 0 at every masked pair, and infinite slopes there."""
    attn = parse("variant v(w) { score s + w * log(i - j) + sqrt(i - j) * s mask j < i }")
    found = compare_gradients(attn, tensors(SMALL), backend, {"w": torch.tensor(0.3)})
    assert all(x.isfinite().all() for x in found)


@each_differentiable
def test_keys_beyond_kv_lens_are_not_read(backend: str) -> None:
    q, k, v = (on(backend, x).clone() for x in tensors(SMALL))
    k[1, :, 5:], v[1, :, 5:] = nan, inf
    lens = on(backend, torch.tensor([40, 5], dtype=torch.int32))
    found = list(gradients(NOOP, (q, k, v), {}, backend=backend, kv_lens=lens))
    assert all(x.isfinite().all() for x in found)
    assert not found[1][1, :, 5:].any() and not found[2][1, :, 5:].any()


@each_differentiable
def test_a_row_with_nan_has_gradients_nan_and_others_do_not(backend: str) -> None:
    attn = parse("variant v(n: float) { score s + (n if i == 3 and j == 2 else 0.0) mask j <= i }")
    q, k, v = (on(backend, x) for x in tensors(Shape(1, 1, 1, 8, 8)))
    dq, *_ = gradients(attn, (q, k, v), {}, n=nan, backend=backend)
    assert dq[:, :, 3].isnan().all()
    assert dq[:, :, [0, 1, 2, 4, 5, 6, 7]].isfinite().all()


# -- captures ----------------------------------------------------------------------------------

FLOATS = {
    name: row
    for name, row in test_attention.INDEXED.items()
    if isinstance(row[2]["t"], Tensor) and row[2]["t"].is_floating_point() and "score" in row[1]
}


@each_differentiable
@pytest.mark.parametrize("name", FLOATS)
def test_captures_of_every_index(name: str, backend: str) -> None:
    declared, body, values = FLOATS[name]
    attn = parse(f"variant v({declared}) {{ {body} }}")
    compare_gradients(attn, tensors(SMALL), backend, values)


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "read twice": ("variant v(t) { score s * t[h] + t[b] * t[h] }", {"t": torch.randn(4)}),
    "at two places": ("variant v(t) { score s + t[i] - t[j] }", {"t": torch.randn(40)}),
    "a number": ("variant v(a: float, c: float) { score a * s + c * i }",
                 {"a": torch.tensor(0.5), "c": torch.tensor([0.01])}),
    "an int beside it": ("variant v(t, n: int) { score s + t[j + n] }",
                         {"t": torch.randn(30), "n": torch.tensor(3)}),
    "repeated": ("variant v(t: f32[B, H, L]) { score s + t[b, h, i] * t[b, h, j] }",
                 {"t": torch.randn(1, 4, 1)}),
    "clamped": ("variant v(lo: float, t) { score clamp(s, lo, t[h]) }",
                {"lo": torch.tensor(-0.5), "t": torch.rand(4)}),
    "mask reads it too": ("variant v(t) { score s + t[j] mask t[j] < 0.4 }",
                          {"t": torch.randn(40)}),
    "condition reads it": ("variant v(t) { score s * 2 if t[j] < 0.4 else s }",
                           {"t": torch.randn(40)}),
    "16 bit": ("variant v(t) { score s + t[h] * j }", {"t": torch.rand(4).bfloat16()}),
    "64 bit": ("variant v(t) { score s + t[h] * j }", {"t": torch.rand(4).double()}),
}  # fmt: skip


AWKWARD = ("b, h, i, 1", "b, h, 1, j", "of no element", "far outside", "nested")


@pytest.mark.parametrize("name", AWKWARD)
def test_captures_of_awkward_indices_on_triton(name: str) -> None:
    """Elsewhere the Triton backend is compared where there is a GPU: its interpreter is slow."""
    declared, body, values = FLOATS[name]
    compare_gradients(
        parse(f"variant v({declared}) {{ {body} }}"), tensors(SMALL), "triton", values
    )


@each_differentiable
@pytest.mark.parametrize("name", OTHERS)
def test_captures(name: str, backend: str) -> None:
    text, values = OTHERS[name]
    compare_gradients(parse(text), tensors(SMALL), backend, values)


@each_differentiable
def test_the_gradient_goes_to_the_tensor_that_was_given(backend: str) -> None:
    """Through views and operations of the user's: expanded, not a leaf, a slice, a closure."""
    whole = on(backend, torch.randn(3, 1)).requires_grad_()
    factor = on(backend, torch.tensor(0.7)).requires_grad_()

    @scoremod.variant
    def attn(s, h, j, t):  # type: ignore[no-untyped-def]
        return s * factor + t[h, j]

    q, k, v = (on(backend, x) for x in tensors(SMALL))
    found = []
    for attend in (lambda *a, **x: attn(*a, backend=backend, **x), attn.eager):
        whole.grad = factor.grad = None
        table = (2 * whole[1:]).expand(2, 40).repeat(2, 1)
        loss(*attend(q, k, v, t=table, return_lse=True)).backward()
        found.append((whole.grad, factor.grad))
    for x, y in zip(*found, strict=True):
        agree(x, y, 1e-4)


@each_differentiable
def test_a_capture_of_the_mask_alone_cannot_require_grad(backend: str) -> None:
    attn = parse("variant v(cut) { score s mask cut[j] < 0.5 }")
    q, k, v, cut = (on(backend, x) for x in (*tensors(SMALL), torch.rand(40)))
    cut.requires_grad_()
    with pytest.raises(CaptureMismatch, match=r"`cut` requires grad, but only the mask(.|\n)*hint"):
        attn(q, k, v, cut=cut, backend=backend)
    with torch.no_grad():
        attn(q, k, v, cut=cut, backend=backend)
    attn(q.requires_grad_(), k, v, cut=cut.detach(), backend=backend).sum().backward()


@each_differentiable
@pytest.mark.parametrize("word", ["slope", "place", "dk", "t_grad", "v_slope", "t0"])
def test_a_capture_may_be_called_like_a_name_of_the_kernel(word: str, backend: str) -> None:
    attn = parse(f"variant v(t, {word}) {{ score s * t[h] + {word}[j] }}")
    values = {"t": torch.rand(4), word: torch.randn(40)}
    compare_gradients(attn, tensors(SMALL), backend, values)


# -- torch's own laws --------------------------------------------------------------------------


@pytest.mark.parametrize("attn", [LEARNED, LEARNED.then(CAPPED)], ids=["learned", "capped"])
def test_gradcheck(attn: Any) -> None:
    shape = Shape(1, 2, 1, 5, 7, 3, 2)
    leaves = [x.requires_grad_() for x in tensors(shape, f64)]
    more = [leaf(x.double()) for x in learned(2).values()]

    def attend(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, temperature: Tensor) -> Any:
        out, lse = attn(q, k, v, slope=slope, temperature=temperature, return_lse=True, q_offset=2)
        return out, lse

    assert torch.autograd.gradcheck(attend, (*leaves, *more), fast_mode=True)


LENGTH = 12
# Without those that are infinite somewhere: 0 times that slope is nan, in torch as well.
FINITE = SMOOTH - {Op.DIV, Op.POW, Op.LOG, Op.LOG2, Op.LOG1P, Op.SQRT, Op.RSQRT}


def random_variant(score: Any) -> scoremod.Variant:
    """A variant of an expression over the captures of `strategies`."""
    words = {Type.BOOL: "bool", Type.INT: "int", Type.FLOAT: "float"}
    captures = []
    for name in sorted(score.names & TYPES.keys()):
        element = words[TYPES[name]]
        if name in TABLES:
            dims = (None,) * TABLES[name][1]
            captures.append(Capture(name, Kind.TENSOR, element, dims, rank=len(dims)))
        else:
            captures.append(Capture(name, Kind.SCALAR, element))
    return parse(Program("v", score, scoremod.variants.causal._program.mask, tuple(captures)).text)


@settings(max_examples=30, phases=[Phase.explicit, Phase.generate])
@given(exprs(Type.FLOAT, 3, ops=FINITE), st.integers(0, 99))
def test_random_variants(score: Any, seed: int) -> None:
    """On the CPU in float64; where scores leave digits to softmax."""
    attn = random_variant(score)
    env = sample(seed, wild=False)
    names = [declaration.partition(":")[0] for declaration in attn.captures]
    # Tables twice over: one of length 1 might stand for any length.
    values = {
        n: torch.as_tensor(env[n]).repeat([2] * TABLES[n][1])
        if n in TABLES
        else torch.as_tensor(env[n][0])
        for n in names
    }
    learn = {n: x for n, x in values.items() if n in attn._program.score.names}
    fixed = {n: x for n, x in values.items() if n not in learn}
    qkv = tensors(Shape(1, 2, 1, LENGTH, LENGTH, 2, 2), f64, seed)
    _, lse = attn.eager(*qkv, return_lse=True, **values)
    if not lse.abs().max() < 1e4:
        return
    exact = list(gradients(attn.eager, qkv, learn, **fixed))
    if all(x.isfinite().all() and (x.abs() < 1e6).all() for x in exact):
        for x, y in zip(gradients(attn, qkv, learn, **fixed), exact, strict=True):
            agree(x, y, 1e-7)


def test_the_graph_may_be_kept_and_used_twice() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(SMALL))
    out = ALIBI(q, k, v, slopes=torch.rand(4))
    out.sum().backward(retain_graph=True)
    once = q.grad.clone()
    out.sum().backward()
    assert torch.equal(q.grad, 2 * once)


def test_second_derivatives_are_an_error() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(SMALL))
    (dq,) = torch.autograd.grad(ALIBI(q, k, v, slopes=torch.rand(4)).sum(), q, create_graph=True)
    with pytest.raises(BackendUnavailable, match="second derivatives"):
        dq.sum().backward()


def test_functional_gradients() -> None:
    q, k, v = tensors(SMALL)
    slopes = torch.rand(4)
    found = torch.func.grad(lambda q, t: ALIBI(q, k, v, slopes=t).sum(), (0, 1))(q, slopes)
    leaves = leaf(q), leaf(slopes)
    ALIBI(leaves[0], k, v, slopes=leaves[1]).sum().backward()
    assert all(torch.equal(x, y.grad) for x, y in zip(found, leaves, strict=True))


def test_hooks_of_torch_are_called() -> None:
    """Saved tensors may be moved elsewhere, and a parameter's gradient looked at."""
    q, k, v = (x.requires_grad_() for x in tensors(SMALL))
    seen: list[Any] = []
    slopes = torch.rand(4, requires_grad=True)
    slopes.register_hook(seen.append)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x.numpy(force=True),
                                                  torch.from_numpy):  # fmt: skip
        out = ALIBI(q, k, v, slopes=slopes)
    assert len(seen) == 6  # q, k, v, slopes, out and lse
    out.sum().backward()
    assert torch.equal(seen[-1], slopes.grad)


def test_what_was_saved_must_not_change() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(SMALL))
    slopes = torch.rand(4)
    out = ALIBI(q, k, v, slopes=slopes)
    slopes.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_checkpointing_computes_the_same() -> None:
    from torch.utils.checkpoint import checkpoint

    q, k, v = tensors(SMALL)
    values = learned(4)

    def attend(*qkv: Tensor, **call: Any) -> Any:
        return checkpoint(lambda *x: LEARNED(*x, **call), *qkv, use_reentrant=False)

    plain, saved = (list(gradients(f, (q, k, v), values)) for f in (LEARNED, attend))
    assert identical(plain, saved)


def test_autocast_gives_gradients_in_the_dtypes_of_the_leaves() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(SMALL))
    values = {n: x.requires_grad_() for n, x in learned(4).items()}
    with torch.autocast("cpu", bf16):
        out = LEARNED(q, k, v, **values)
        out.float().sum().backward()
    exact = [leaf(x) for x in (q, k, v)]
    LEARNED.eager(*exact, **values).sum().backward()
    assert out.dtype is bf16
    for x, y in zip((q, k, v), exact, strict=True):
        assert x.grad.dtype is f32
        agree(x.grad, y.grad, 5e-2)


def test_without_grad_nothing_is_recorded() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(SMALL))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not NOOP(q, k, v).requires_grad
    assert not NOOP(q.detach(), k.detach(), v.detach()).requires_grad


def test_memory_is_that_of_the_tensors() -> None:
    """No operation of a backward makes more than a tile: never all pairs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = f(*args, **(kwargs or {}))
            sizes.append(made.numel() if isinstance(made, Tensor) else 0)
            return made

    window = variants.symmetric_window.bind(radius=5)
    q, k, v = (x.requires_grad_() for x in tensors(Shape(1, 1, 1, 3000, 3000, 8, 8)))
    out = window(q, k, v).sum()
    with Sizes():
        out.backward()
    assert q.numel() <= max(sizes) <= 2 * 128 * 256


# -- calls like one before ---------------------------------------------------------------------


def test_a_call_like_one_before_has_the_same_gradients() -> None:
    """What is left of its forward runs in place of the whole; its backward is the first one's."""
    qkv, given = tuple(leaf(x) for x in tensors(SMALL)), learned(SMALL.q_heads)
    given = {name: leaf(x) for name, x in given.items()}
    inputs = check_inputs(*qkv, scale=None, q_offset=3, kv_lens=None, precision="auto")
    program, bound = LEARNED._bind(given, inputs.sizes, inputs.q.device)
    known = LEARNED._type(program, bound)
    ran = []

    def answer(q: Any, k: Any, v: Any, q_offset: int, *rest: Any) -> Answer:
        ran.append(rest)
        names = (item.param.name for item in bound)
        captures = dict(zip(names, rest[1], strict=True))
        return Answer(*LEARNED(q, k, v, q_offset=q_offset, return_lse=True, **captures))

    warm = SimpleNamespace(answer=answer)
    again = autograd.Recorded.of(known, inputs, bound, "cpu", warm)  # type: ignore[arg-type]
    captures = [item.given for item in bound]
    leaves = [*qkv, *given.values()]
    found = again(*qkv, 3, None, captures, None, return_lse=True)
    wanted = LEARNED(*qkv, q_offset=3, return_lse=True, **given)
    pairs = [torch.autograd.grad(loss(*x), leaves) for x in (found, wanted)]
    assert len(ran) == 1 and identical(*pairs)
    assert again(*qkv, 3, None, captures, None, return_lse=False).requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize("tiles", [False, True])
def test_a_warm_training_call_is_a_call(backend: str | None, tiles: bool) -> None:
    attn = LEARNED & variants.document
    shape = Shape(2, 2, 1, 200, 200, 64, 64)
    doc = torch.arange(200, device="cuda").div(60, rounding_mode="floor").int().expand(2, -1)
    prepared = variants.causal & variants.document
    for seed in range(4):
        qkv = tuple(leaf(x.cuda()) for x in tensors(shape, bf16, seed))
        given = {n: leaf(x.cuda() * (1 + seed)) for n, x in learned(2).items()}
        given["doc"] = doc + seed
        made = prepared.prepare(200, 200, batch=2, doc=given["doc"]) if tiles else None
        out = attn(*qkv, tiles=made, backend=backend, return_lse=True, **given)
        exact = attn.eager(*(x.float() for x in qkv), return_lse=True, **given)
        leaves = [*qkv, given["slope"], given["temperature"]]
        for mine, true in zip(
            torch.autograd.grad(loss(*out), leaves),
            torch.autograd.grad(loss(*exact), leaves),
            strict=True,
        ):
            agree(mine.float(), true.float(), 5e-2 * max(1.0, float(true.abs().max())))
    assert any(isinstance(x, autograd.Recorded) for x in attn._warm.values())


@pytest.mark.gpu
def test_what_raised_once_raises_again() -> None:
    """No call is remembered before it has passed all checks."""
    qkv = tuple(x.cuda() for x in tensors(Shape(1, 1, 1, 64, 64, 64, 64), bf16))
    attn = parse("variant kept(t: f32[Lk]) { mask t[j] < 0.5 }")
    for _ in range(2):
        with pytest.raises(CaptureMismatch, match="only the mask reads it"):
            attn(*qkv, t=torch.rand(64, device="cuda", requires_grad=True))

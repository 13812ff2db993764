"""The oracle against values computed by hand and against plain dense attention."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from scoremod import language, reference
from scoremod.errors import (
    CaptureMismatch,
    MissingCapture,
    ScoremodError,
    TypeMismatch,
    UnknownName,
    UnsupportedPython,
)
from scoremod.frontend.source import read_python, read_text_source
from scoremod.language import clamp, exp, floor, ilog2, inf, log, tanh, where
from scoremod.origin import Both, Chained, Either, Leaf, Negated, Origin, Renamed

# -- helpers -----------------------------------------------------------------------------------


def score_of(function: Any) -> Leaf:
    return Leaf(read_python(function, "score"))


def mask_of(function: Any) -> Leaf:
    return Leaf(read_python(function, "mask"))


def text_of(text: str) -> Leaf:
    return Leaf(read_text_source(text))


def tensors(
    batch: int = 2, q_heads: int = 2, kv_heads: int = 2, q_len: int = 5, kv_len: int = 6
) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    q = torch.randn(batch, q_heads, q_len, 4, generator=make, dtype=torch.float64)
    k = torch.randn(batch, kv_heads, kv_len, 4, generator=make, dtype=torch.float64)
    v = torch.randn(batch, kv_heads, kv_len, 3, generator=make, dtype=torch.float64)
    return q, k, v


def plain(score: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Dense attention of finite or -inf scores without empty rows."""
    return torch.softmax(score, -1) @ v, torch.logsumexp(score, -1)


def raw(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def pairs(q_len: int, kv_len: int) -> tuple[Tensor, Tensor]:
    return torch.arange(q_len)[:, None], torch.arange(kv_len)[None]


def show(mask: Tensor) -> list[str]:
    return ["".join(".#"[int(x)] for x in row) for row in mask]


def value_of(expression: str, **given: Any) -> Any:
    """What an expression of the mini-language gives at b = h = 0, i = 5, j = 3."""
    parameters = ", ".join(given)
    origin = text_of(f"variant ({parameters}) {{ score s + ({expression}) }}")
    s = torch.zeros(1, 1, 1, 4, dtype=torch.float64)
    result = reference.scores_dense(origin, s, given, q_offset=5, kv_heads=1)
    return result[0, 0, 0, 3].item()


def holds(condition: str, **given: Any) -> bool:
    """Whether a condition holds at i = 5, j = 3."""
    origin = text_of(f"variant ({', '.join(given)}) {{ mask {condition} }}")
    return bool(reference.mask_dense(origin, 1, 4, given, q_offset=5)[0, 3])


def causal(i, j):
    return j <= i


def alibi(s, h, i, j, slopes):
    return s - slopes[h] * (i - j)


# -- masks and scores --------------------------------------------------------------------------


def test_causal_is_lower_triangular():
    assert show(reference.mask_dense(mask_of(causal), 3, 4, {})) == ["#...", "##..", "###."]


def test_causal_agrees_with_dense_attention():
    q, k, v = tensors()
    out, lse = reference.attend(mask_of(causal), q, k, v, {})
    i, j = pairs(5, 6)
    expected, expected_lse = plain(raw(q, k).masked_fill(j > i, -inf), v)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_alibi_agrees_with_dense_attention():
    q, k, v = tensors()
    slopes = torch.tensor([0.5, 0.25])
    out, _ = reference.attend(score_of(alibi), q, k, v, {"slopes": slopes})
    i, j = pairs(5, 6)
    expected, _ = plain(raw(q, k) - slopes.double()[:, None, None] * (i - j), v)
    torch.testing.assert_close(out, expected)


def test_scale_and_dtypes():
    q, k, v = (x.half() for x in tensors())
    out, lse = reference.attend(mask_of(causal), q, k, v, {}, scale=torch.tensor(0.1))
    assert out.dtype == torch.float16 and lse.dtype == torch.float32
    i, j = pairs(5, 6)
    score = (q.double() @ k.double().transpose(-1, -2) * 0.1).masked_fill(j > i, -inf)
    torch.testing.assert_close(out, plain(score, v.double())[0].half(), rtol=1e-3, atol=1e-3)


def softcap_window(s, i, j, cap: float = 2.0, window: int = 3):
    near = i - j < window
    x = cap * tanh(s / cap)
    return where(j <= i and near, x, -inf)


def softcap_mirror(s, i, j, cap: float = 2.0, window: int = 3):
    if j > i:
        return -inf
    hidden = i - j >= window
    return float("-inf") if hidden else cap * math.tanh(s / cap)


SOFTCAP_TEXT = """
variant softcap(cap: float = 2.0, window: int = 3) {
  let x = cap * tanh(s / cap)
  score where(j > i, -inf, x if i - j < window else -inf)
}
"""


@pytest.mark.parametrize(
    "origin",
    [score_of(softcap_window), score_of(softcap_mirror), text_of(SOFTCAP_TEXT)],
    ids=["where", "if", "text"],
)
def test_minus_infinity_at_the_root_is_a_mask(origin: Origin):
    q, k, v = tensors()
    i, j = pairs(5, 6)
    keep = (j <= i) & (i - j < 3)
    out, lse = reference.attend(origin, q, k, v, {})
    expected = plain((2 * torch.tanh(raw(q, k) / 2)).masked_fill(~keep, -inf), v)
    torch.testing.assert_close((out, lse), expected)
    assert torch.equal(reference.mask_dense(origin, 5, 6, {}), keep)
    wide = reference.mask_dense(origin, 5, 6, {"window": 5})
    assert torch.equal(wide, (j <= i) & (i - j < 5))


def test_minus_infinity_elsewhere_is_a_value():
    def shifted(s, i, j):
        return where(j <= i, s, -inf) + 1

    def by_score(s, i, j):
        return where(s > 0, s, -inf)

    for function in (shifted, by_score):
        assert reference.mask_dense(score_of(function), 3, 3, {}).all()
    s = torch.tensor([[[[1.0, -1.0]]]])
    result = reference.scores_dense(score_of(by_score), s, {}, kv_heads=1)
    assert result.tolist() == [[[[1.0, -inf]]]]


def test_documents():
    def document(b, i, j, doc):
        return doc[b][i] == doc[b, j]

    doc = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]], dtype=torch.int32)
    mask = reference.mask_dense(mask_of(document), 4, 4, {"doc": doc}, b=1, batch=2)
    assert show(mask) == ["#...", ".###", ".###", ".###"]


def test_rows_without_key_are_zero():
    def late(i, j):
        return i >= 2 and j <= i

    def all_minus_infinity(s, i, j):
        return where(s == s, -inf, 0.0) if i < 2 else where(j <= i, s, -inf)

    for origin in (mask_of(late), score_of(all_minus_infinity)):
        q, k, v = (x.requires_grad_() for x in tensors())
        out, lse = reference.attend(origin, q, k, v, {})
        assert (out[:, :, :2] == 0).all() and (lse[:, :, :2] == -inf).all()
        (out.sum() + torch.where(lse > -inf, lse, 0).sum()).backward()
        assert (q.grad[:, :, :2] == 0).all()
        for x in (q, k, v):
            assert x.grad.isfinite().all() and x.grad.abs().sum() > 0


def test_nan_and_plus_infinity_make_the_row_nan():
    def bad(s, i, j, table):
        return where(j <= i, s + table[j], -inf)

    q, k, v = tensors(1, 1, 1, 4, 4)
    for x in (math.nan, math.inf):
        table = torch.tensor([0.0, 0.0, x, 0.0])
        out, lse = reference.attend(score_of(bad), q, k, v, {"table": table})
        assert out[0, 0, :2].isfinite().all() and out[0, 0, 2:].isnan().all()
        assert lse[0, 0, :2].isfinite().all() and lse[0, 0, 2:].isnan().all()


def test_keys_beyond_kv_lens_are_not_read():
    q, k, v = tensors()
    k[1, :, 2:], v[1, :, 2:] = math.nan, math.nan
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = reference.attend(mask_of(causal), q, k, v, {}, kv_lens=torch.tensor([6, 2]))
    (out.sum() + lse.sum()).backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    i, j = pairs(5, 2)
    expected = plain(raw(q, k[:, :, :2]).masked_fill(j > i, -inf), v[:, :, :2])
    torch.testing.assert_close((out[1], lse[1]), (expected[0][1], expected[1][1]))


def test_lengths_of_zero():
    q, k, v = tensors()
    out, lse = reference.attend(mask_of(causal), q, k[:, :, :0], v[:, :, :0], {})
    assert (out == 0).all() and (lse == -inf).all()
    assert reference.attend(mask_of(causal), q[:, :, :0], k, v, {})[0].shape == (2, 2, 0, 3)


def test_q_offset_makes_steps_equal_rows_of_the_full_pass():
    q, k, v = tensors(q_len=6)
    given = {"slopes": torch.tensor([0.5, 0.25])}
    origin = Both(score_of(alibi), mask_of(causal))
    full, _ = reference.attend(origin, q, k, v, given)
    last, _ = reference.attend(origin, q[:, :, 4:], k, v, given, q_offset=4)
    torch.testing.assert_close(last, full[:, :, 4:])
    rows = torch.stack([q[0, :, 3:5], q[1, :, 1:3]])
    mixed, _ = reference.attend(origin, rows, k, v, given, q_offset=torch.tensor([3, 1]))
    torch.testing.assert_close(mixed, torch.stack([full[0, :, 3:5], full[1, :, 1:3]]))


def test_grouped_heads_and_shared_batch():
    def by_head(s, h, hk, table, kv_table):
        return s * table[h] + kv_table[hk] * 0

    q, k, v = tensors(2, 6, 2)
    table = torch.arange(1.0, 7.0)
    given = {"table": table, "kv_table": torch.ones(2)}
    out, _ = reference.attend(score_of(by_head), q, k[:1], v[:1], given)
    wide_k, wide_v = (x[:1].repeat_interleave(3, 1) for x in (k, v))
    expected, _ = plain(raw(q, wide_k) * table[:, None, None], wide_v)
    torch.testing.assert_close(out, expected)
    which = mask_of(lambda hk, h: hk == 1)
    found = [
        bool(reference.mask_dense(which, 1, 1, {}, h=h, q_heads=6, kv_heads=2)) for h in range(6)
    ]
    assert found == [False, False, False, True, True, True]


# -- Python: names and functions ---------------------------------------------------------------

LIMIT = 2
FOUR = language.const(4)


def test_free_variables_are_read_at_each_call():
    window = 1

    def near(i, j):
        return i - j < window and j <= i and i - j < LIMIT + 10

    origin = mask_of(near)
    assert reference.mask_dense(origin, 3, 3, {}).sum() == 3
    window = 2
    assert reference.mask_dense(origin, 3, 3, {}).sum() == 5
    assert reference.mask_dense(origin, 3, 3, {"window": 3}).sum() == 6
    assert reference.mask_dense(origin, 3, 3, {"LIMIT": -9, "window": 3}).sum() == 3


def near_start(y, x, length=4, kernel=3):
    start = max(min(y - kernel // 2, length - kernel), 0)
    return start, start + kernel


def test_helpers_return_tuples_and_inline():
    def neighborhood(i, j):
        lo, hi = near_start(i, j, kernel=2)
        return lo <= j < hi

    mask = reference.mask_dense(mask_of(neighborhood), 4, 4, {})
    assert show(mask) == ["##..", "##..", ".##.", "..##"]


def test_nested_helpers_see_the_names_of_the_moment():
    def f(s, i, j):
        scale = 1

        def scaled(x, extra=LIMIT):
            return x * scale + extra

        scale = 10
        twice = lambda x: 2 * scaled(x, 0)  # noqa: E731
        return s * 0 + scaled(i) + twice(j)

    result = reference.scores_dense(score_of(f), torch.zeros(1, 1, 2, 2), {}, kv_heads=1)
    assert result[0, 0].tolist() == [[2.0, 22.0], [12.0, 32.0]]


def test_partials_lambdas_and_callable_objects():
    def window(i, j, left, right=0):
        return -right <= i - j < left

    class Window:
        def __init__(self, left: int) -> None:
            self.left = left

        def __call__(self, i, j):
            return self.inside(i - j)

        def inside(self, d):
            return 0 <= d < self.left

    left = 2
    expected = ["#...", "##..", ".##."]
    for function in (
        functools.partial(window, left=2),
        lambda i, j: 0 <= i - j < left,
        Window(2),
        Window(2).__call__,
    ):
        assert show(reference.mask_dense(mask_of(function), 3, 4, {})) == expected
    narrow = reference.mask_dense(mask_of(Window(2)), 3, 4, {"left": 1})
    assert show(narrow) == ["#...", ".#..", "..#."]


def test_loops_are_unrolled():
    def powers(s, i, n=FOUR):
        total = 0
        for k in range(1, n):
            if k % 2 == 0:
                total += i**k
            else:
                total += k
        for weight in (1, 2):
            total = total + weight
        return s + total

    result = reference.scores_dense(score_of(powers), torch.zeros(1, 1, 4, 1), {}, kv_heads=1)
    assert result.flatten().tolist() == [1 + i**2 + 3 + 3 for i in range(4)]


def test_if_statements_are_elementwise():
    def f(s, i, j):
        """A docstring."""
        x, y = i, j
        if i > j:
            x: int = 100
            for k in range(3):
                if x + k == i + 101:
                    return s + 7
        elif i == j:
            y = 50
            if j == 0:
                return s - 1
        x += y
        return s + x

    def python(i, j):
        return f(0, i, j)

    result = reference.scores_dense(score_of(f), torch.zeros(1, 1, 4, 4), {}, kv_heads=1)
    expected = [[python(i, j) for j in range(4)] for i in range(4)]
    assert result[0, 0].tolist() == expected


def test_torch_functions_and_methods():
    def f(s, i, j, t):
        d = (i - j).abs().clamp(max=2).float()
        near = torch.where(torch.logical_and(i > 0, j > 0), torch.exp(d), d.to(torch.float32))
        return s + near + t.shape[1] + len(t) + t.size(0) + (i > j).int() + math.log(8, 2)

    result = reference.scores_dense(
        score_of(f), torch.zeros(1, 1, 4, 4), {"t": torch.zeros(2, 5)}, kv_heads=1
    )
    i, j = pairs(4, 4)
    d = (i - j).abs().clamp(max=2).double()
    expected = torch.where((i > 0) & (j > 0), d.exp(), d) + 5 + 2 + 2 + (i > j).int() + 3
    torch.testing.assert_close(result[0, 0], expected)


def test_a_default_gives_the_type_and_given_wins():
    def f(s, cap=2.0, shift: int = 1):
        return s * cap + shift

    s = torch.ones(1, 1, 1, 1)
    for given, expected in (({}, 3), ({"cap": 5}, 6), ({"cap": torch.tensor([4])}, 5)):
        assert reference.scores_dense(score_of(f), s, given, kv_heads=1).item() == expected
    with pytest.raises(CaptureMismatch):
        reference.scores_dense(score_of(f), s, {"shift": 0.5}, kv_heads=1)
    with pytest.raises(MissingCapture, match="slopes"):
        reference.scores_dense(score_of(alibi), s, {}, kv_heads=1)


def test_roles_rename_parameters():
    def flex(score, batch, head, q_idx, kv_idx):
        return score + q_idx * 10 + kv_idx

    roles = tuple(zip(("score", "batch", "head", "q_idx", "kv_idx"), "sbhij", strict=True))
    origin = Leaf(read_python(flex, "score", roles))
    result = reference.scores_dense(origin, torch.zeros(1, 1, 2, 2), {}, kv_heads=1)
    assert result[0, 0].tolist() == [[0, 1], [10, 11]]


# -- text and Python ---------------------------------------------------------------------------


def gemma(s, b, i, j, doc: tensor[B, L], window: int = 4, cap: float = 5.0):
    return where(j <= i and i - j < window and doc[b, i] == doc[b, j], cap * tanh(s / cap), -inf)


GEMMA = """
variant gemma(doc: tensor[B, L], window: int = 4, cap: float = 5.0) {
  let near = i - j < window
  score cap * tanh(s / cap)     # soft cap
  mask  j <= i and near and doc[b, i] == doc[b, j]
}
"""


def test_text_equals_python():
    q, k, v = tensors(2, 4, 2, 6, 6)
    given = {"doc": torch.tensor([[0, 0, 0, 1, 1, 1]]), "window": 2}
    for extra in ({}, {"cap": 1}):
        ours = reference.attend(score_of(gemma), q, k, v, {**given, **extra})
        theirs = reference.attend(text_of(GEMMA), q, k, v, {**given, **extra})
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_text_statements():
    text = """
    variant (const n: int = 3, t: f32[N, 2], start: int = -1) {
      x = start
      for k in range(n) { x = x + size(t, 0) * (k ** 2 + 0x10) }
      score x if not False else nan; mask True
    }"""
    s = torch.zeros(1, 1, 1, 1)
    result = reference.scores_dense(text_of(text), s, {"t": torch.zeros(4, 2)}, kv_heads=1)
    assert result.item() == -1 + 4 * (0 + 1 + 4 + 48)


# -- composition -------------------------------------------------------------------------------


def even(j):
    return j % 2 == 0


def diagonal(i, j):
    return i == j


def test_masks_compose_as_logic():
    c, e, d = (reference.mask_dense(mask_of(f), 4, 4, {}) for f in (causal, even, diagonal))
    origin = Both(Negated(mask_of(even)), Either(mask_of(diagonal), mask_of(causal)))
    assert torch.equal(reference.mask_dense(origin, 4, 4, {}), ~e & (d | c))


def test_chained_scores_feed_each_other_and_masks_come_last():
    def first(s, i, j, w):
        return where(j <= i, s * w, -inf)

    def second(s, j):
        return where(j % 2 == 0, s + 1, -inf)

    origin = Chained(Renamed(score_of(first), (("w", "far"),)), score_of(second))
    s = torch.ones(1, 1, 4, 4, dtype=torch.float64)
    result = reference.scores_dense(origin, s, {"far": 3.0}, kv_heads=1)
    i, j = pairs(4, 4)
    keep = (j <= i) & (j % 2 == 0)
    assert torch.equal(result[0, 0], torch.where(keep, 4.0, -inf).double())
    assert torch.equal(reference.mask_dense(origin, 4, 4, {"far": 1.0}), keep)
    with pytest.raises(MissingCapture, match="far"):
        reference.mask_dense(origin, 4, 4, {"w": 1.0})


def test_renaming_keeps_two_windows_apart():
    def window(i, j, window: int = 1):
        return i - j < window

    renamed = Renamed(Renamed(mask_of(window), (("window", "w"),)), (("w", "far"),))
    origin = Either(Both(mask_of(window), mask_of(even)), renamed)
    given = {"window": 9, "far": 2}
    i, j = pairs(6, 6)
    expected = ((i - j < 9) & (j % 2 == 0)) | (i - j < 2)
    assert torch.equal(reference.mask_dense(origin, 6, 6, given), expected)


# -- gradients ---------------------------------------------------------------------------------


def log_distance(s, h, i, j, rate, bias):
    return where(j < i, s - rate[h] * log(i - j) + bias, -inf)


def test_masked_nan_scores_reach_no_gradient():
    q, k, v = (x.requires_grad_() for x in tensors())
    rate = torch.ones(2, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
    given = {"rate": rate, "bias": bias}
    out, lse = reference.attend(score_of(log_distance), q, k, v, given)
    (out.sum() + lse[:, :, 1:].sum()).backward()
    for x in (q, k, v, rate, bias):
        assert x.grad.isfinite().all() and x.grad.abs().sum() > 0


def test_unselected_branches_reach_no_gradient():
    def f(s, i, j, w):
        d = i - j
        far = w * log(d)
        return s + (far if d > 0 else 0.0)

    q, k, v = tensors()
    w = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    out, _ = reference.attend(score_of(f), q, k, v, {"w": w})
    out[..., 0].sum().backward()
    assert w.grad.isfinite() and w.grad != 0


def test_gradients_agree_with_finite_differences():
    def f(s, h, i, j, slopes, temperature):
        return where(j <= i + 2, tanh(s * exp(temperature)) - slopes[h] * abs(i - j), -inf)

    q, k, v = tensors(1, 2, 1, 3, 4)
    slopes, temperature = torch.tensor([0.3, 0.7]).double(), torch.tensor(0.2).double()
    origin = score_of(f)

    def run(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, temperature: Tensor) -> Any:
        return reference.attend(origin, q, k, v, {"slopes": slopes, "temperature": temperature})

    inputs = [x.clone().requires_grad_() for x in (q, k, v, slopes, temperature)]
    assert torch.autograd.gradcheck(run, inputs)


def test_ties_have_the_gradients_of_torch():
    def f(s, x, y):
        return s + max(x, y) + clamp(x, 1.0, 9.0)

    x = torch.tensor(1.0, requires_grad=True)
    y = torch.tensor(1.0, requires_grad=True)
    reference.scores_dense(
        score_of(f), torch.zeros(1, 1, 1, 1), {"x": x, "y": y}, kv_heads=1
    ).sum().backward()
    # Half of the maximum to each; all of a clamp to what stands at its bound.
    assert (x.grad, y.grad) == (1.5, 0.5)


def test_reads_outside_a_table_are_zero_and_get_no_gradient():
    def f(s, i, j, t):
        return s + t[i - j]

    t = torch.tensor([1.0, 2.0], requires_grad=True)
    result = reference.scores_dense(score_of(f), torch.zeros(1, 1, 3, 3), {"t": t}, kv_heads=1)
    assert result[0, 0].tolist() == [[1, 0, 0], [2, 1, 0], [0, 2, 1]]
    result.sum().backward()
    assert t.grad.tolist() == [3.0, 2.0]


# -- tables ------------------------------------------------------------------------------------


def test_a_dimension_of_one_is_broadcast():
    def f(s, b, h, j, t, u: f32[L]):
        return s + t[b, h, j] + t[b, h, j + 1] + u[j + 1]

    s = torch.zeros(2, 2, 1, 3)
    t = torch.tensor([[[1.0]], [[2.0]]])  # [2, 1, 1]
    given = {"t": t, "u": torch.tensor([10.0])}
    result = reference.scores_dense(score_of(f), s, given, kv_heads=2)
    # j + 1 = 3 lies outside the 3 keys, and outside max(1 query, 3 keys)
    assert result[:, 0, 0].tolist() == [[12, 12, 1], [14, 14, 2]]
    assert torch.equal(result[:, 0], result[:, 1])


def test_other_dimensions_of_one_are_not_broadcast():
    def f(s, j, t: f32[N], u):
        return s + t[j] + u[j * 1]

    given = {"t": torch.ones(1), "u": torch.ones(1)}
    result = reference.scores_dense(score_of(f), torch.zeros(1, 1, 1, 2), given, kv_heads=1)
    assert result.flatten().tolist() == [2, 0]


def test_a_tensor_q_offset_leaves_i_unbounded():
    def f(i, keep):
        return keep[i]

    given = {"keep": torch.tensor([True])}
    assert show(reference.mask_dense(mask_of(f), 2, 1, given, q_offset=7)) == ["#", "#"]
    offset = torch.tensor([-1])
    assert show(reference.mask_dense(mask_of(f), 3, 1, given, q_offset=offset)) == [".", "#", "#"]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("t[-1]", 4.0),
        ("t[-5]", 0.0),
        ("t[0 - 1]", 0.0),
        ("t[4]", 0.0),
        ("t[i - j]", 3.0),
        ("size(t, 0) + size(t, -1)", 8),
    ],
)
def test_indices(expression: str, expected: float):
    assert value_of(expression, t=torch.tensor([1.0, 2.0, 3.0, 4.0])) == expected


# -- numbers -----------------------------------------------------------------------------------

TOP = 2**63 - 1


@pytest.mark.parametrize(
    ("condition", "given"),
    [
        ("n + 1 == m and n - m == -1", {"n": TOP, "m": -TOP - 1}),
        ("m // -1 == m and m % -1 == 0 and abs(m) == m and -m == m", {"m": -TOP - 1}),
        ("-7 // 2 == -4 and -7 % 2 == 1 and 7 % -2 == -1 and 7 // -2 == -4", {}),
        ("i // 0 == 0 and i % 0 == 0 and x // 0 == 0 and x % 0 == 0", {"x": 7.5}),
        ("-7.5 // 2 == -4.0 and -7.5 % 2 == 0.5 and x % -2.0 == -0.5", {"x": 7.5}),
        ("1 << 64 == 0 and 1 << -1 == 0 and -1 >> 64 == 0 and -8 >> 1 == -4", {}),
        ("1 << 63 == m", {"m": -TOP - 1}),
        ("int(x) == -2 and floor(x) == -3 and ceil(x) == -2", {"x": -2.5}),
        ("round(2.5) == 2 and round(3.5) == 4 and round(-0.5) == 0", {}),
        ("int(nan) == 0 and int(inf) == m and floor(-inf) == -m - 1", {"m": TOP}),
        ("i ** 2 // 2 == 12 and (i - 7) ** 3 == -8", {}),
        ("3 ** 41 % 2 == 1", {}),
        ("ilog2(1) == 0 and ilog2(0) == 0 and ilog2(-4) == 0 and ilog2(7) == 2", {}),
        ("ilog2(n) == 62 and ilog2(n + 1) == 0", {"n": TOP}),
        ("i / 2 == 2.5 and (True + True) == 2", {}),
        ("(5 & 3) == 1 and (5 | 3) == 7 and (5 ^ 3) == 6 and ~5 == -6", {}),
        ("(i > j) & ~(i < j) and (True ^ False) and (True & 3) == 1", {}),
        ("xor(i > j, i < j) and not isfinite(inf) and isfinite(3)", {}),
        ("0 <= j < i <= 5 != 4", {}),
        ("min(i, j, 4) == 3 and max(i, j, 4.5) == 5 and clamp(i, 0, 4) == 4", {}),
    ],
)
def test_integers_and_conditions(condition: str, given: dict[str, Any]):
    assert holds(condition, **given)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("exp2(3)", 8.0),
        ("expm1(0) + log1p(0)", 0.0),
        ("rsqrt(4) + sqrt(4)", 2.5),
        ("log10(1000)", 3.0),
        ("softplus(0)", math.log(2)),
        ("silu(2)", 2 / (1 + math.exp(-2))),
        ("relu(-2) + relu(2)", 2.0),
        ("erf(1)", math.erf(1)),
        ("sin(pi) + cos(pi)", -1.0),
        ("pow(2, -1)", 0.5),
        ("2 ** 3 ** 2", 512.0),
        ("-2 ** 2", -4.0),
    ],
)
def test_functions(expression: str, expected: float):
    assert value_of(expression) == pytest.approx(expected, abs=1e-15)


def test_every_function_of_the_language_has_a_meaning():
    assert language.FUNCTIONS.keys() <= reference.operations.FUNCTIONS.keys()


def test_conditions_free_of_s_are_decided_in_float32():
    # In float64 0.1 + 0.2 > 0.3; in float32 they are equal.
    assert holds("x + 0.2 == 0.3", x=0.1)
    assert holds("x * 10 == 1", x=torch.tensor(0.1, dtype=torch.float64))
    assert holds("int(x * 100) == 114", x=1.15) is (int(torch.tensor(1.15) * 100) == 114)

    def doubled(s, x):
        return where(x + 0.2 == 0.3, s, 0.0)

    def by_score(s, x):
        return where(x + 0.2 + s == 0.3, 1.0, 0.0)

    one = torch.ones(1, 1, 1, 1)
    assert reference.scores_dense(score_of(doubled), one, {"x": 0.1}, kv_heads=1).item() == 1
    wide = reference.scores_dense(score_of(doubled), one.double(), {"x": 0.1}, kv_heads=1)
    assert wide.item() == 0
    assert reference.scores_dense(score_of(by_score), 0 * one, {"x": 0.1}, kv_heads=1).item() == 0


def test_captured_floats_are_float32():
    x = torch.tensor(0.1, dtype=torch.float64)
    assert value_of("x", x=x) == 0.1
    s = torch.zeros(1, 1, 1, 1)
    origin = text_of("variant (x) { score s + x }")
    result = reference.scores_dense(origin, s, {"x": x}, kv_heads=1)
    assert result.item() == x.float().item()


# -- mistakes ----------------------------------------------------------------------------------


def while_loop(s, i):
    while i > 0:
        i = i - 1
    return s


def unset(s, i):
    if i > 0:
        x = 1
    return s + x


def forever(s, i):
    return forever(s, i)


def no_return(s, i):
    if i > 0:
        s = s + 1


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (while_loop, UnsupportedPython, "while i > 0:"),
        (unset, UnknownName, "x"),
        (forever, UnsupportedPython, "forever(s, i)"),
        (no_return, UnsupportedPython, None),
        (lambda s, i: where(i, s, 0), TypeMismatch, "where(i, s, 0)"),
        (lambda s, i: s if i else 0, TypeMismatch, "i"),
        (lambda s, i: s + (i and 1), TypeMismatch, "i and 1"),
        (lambda s, i: s + len(str(i)), UnsupportedPython, "str(i)"),
        (lambda s, i: ilog2(s) + 0.0, TypeMismatch, "ilog2(s)"),
        (lambda s, i: floor(s, 2) + 0.0, TypeMismatch, "floor(s, 2)"),
        (lambda s, i: s + max(k for k in (1, 2)), UnsupportedPython, "(k for k in (1, 2))"),
        (lambda s, i: i > 0, TypeMismatch, None),
        (lambda s, i: (s, i), TypeMismatch, None),
    ],
)
def test_mistakes_point_at_the_text(function: Any, error: type[ScoremodError], words: str | None):
    with pytest.raises(error) as caught:
        reference.scores_dense(score_of(function), torch.zeros(1, 1, 2, 2), {}, kv_heads=1)
    assert caught.value.span is not None
    if words is not None:
        assert caught.value.span.words == words


def test_a_mask_is_a_bool_free_of_s():
    for text in ("mask i", "mask s > 0", "let x = s * 2 mask x > 0"):
        with pytest.raises(TypeMismatch):
            reference.mask_dense(text_of(f"variant () {{ {text} }}"), 2, 2, {})

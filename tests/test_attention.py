"""Whole calls on every backend against the oracle: shapes, strides, captures, options, values."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import test_variants
import torch
from attention_cases import (
    DEVICE,
    NOOP,
    Shape,
    agree,
    bf16,
    compare,
    each_backend,
    f16,
    f32,
    f64,
    identical,
    interpreter_multiplies,
    on,
    skip_unless_right,
    stretched,
    tensors,
)
from torch import Tensor

from scoremod import parse, variants
from scoremod.errors import BackendUnavailable, InputMismatch

inf, nan = math.inf, math.nan
SMALL = Shape(2, 4, 2, 20, 40)

# -- shapes ------------------------------------------------------------------------------------

LENGTHS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 130, 200, 257)
HEAD_DIMS = (1, 8, 16, 17, 31, 48, 64, 80, 96, 128, 192, 256)
GROUPS = (1, 2, 3, 6, 7)
BATCHES = (1, 2, 0, 3)
ALIBI = variants.alibi & variants.bottom_right_causal
CAPPED = variants.softcap.bind(cap=2.0) & variants.sliding_window.bind(window=40)
SHAPED = {"noop": NOOP, "causal": variants.causal, "alibi": ALIBI, "softcap window": CAPPED}


@dataclass(frozen=True)
class Row:
    """One call of the grid."""

    shape: Shape
    name: str
    dtype: torch.dtype
    q_offset: int
    kv_lens: bool

    @property
    def call(self) -> dict[str, Any]:
        call: dict[str, Any] = {"q_offset": self.q_offset}
        if self.kv_lens:
            lens = [self.shape.kv_len // 2, self.shape.kv_len, 0]
            call["kv_lens"] = torch.tensor(lens, dtype=torch.int32)[: self.shape.batch]
        if self.name == "alibi":
            call["slopes"] = variants.alibi_slopes(self.shape.q_heads)
        return call

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.shape}-{self.name}-{kind}+{self.q_offset}{'-lens' * self.kv_lens}"


def shuffled(values: Any, seed: int) -> Iterator[Any]:
    """The values in ever new orders, so that axes of a grid meet."""
    rng, values = random.Random(seed), list(values)
    while True:
        rng.shuffle(values)
        yield from values


def grid(rows: int) -> list[Row]:
    """Every value of every axis, several times; where there are many queries, fewer heads."""
    axes = (LENGTHS, LENGTHS, HEAD_DIMS, HEAD_DIMS, GROUPS, (1, 2), BATCHES, SHAPED, (f32, f16))
    draws = zip(*(shuffled(values, seed) for seed, values in enumerate(axes)), strict=True)
    found = []
    for k, draw in zip(range(rows), draws, strict=False):
        q_len, kv_len, d, dv, group, kv_heads, batch, name, dtype = draw
        tiles = -(-q_len // 64) * -(-max(kv_len, 1) // 64)
        if tiles * batch * group * kv_heads > 16:
            batch, kv_heads = min(batch, 1), 1
        if tiles * group > 24:
            group = 2
        shape = Shape(batch, group * kv_heads, kv_heads, q_len, kv_len, d, dv)
        found.append(Row(shape, name, dtype, (0, 0, 5)[k % 3], k % 4 == 3))
    return found


GRID = grid(64)


def test_the_grid_has_every_value_with_keys_and_queries() -> None:
    shapes = [row.shape for row in GRID]
    assert {s.q_len for s in shapes} == {s.kv_len for s in shapes} == set(LENGTHS)
    busy = [s for s in shapes if s.batch and s.q_len and s.kv_len]
    assert {s.head_dim for s in busy} == {s.v_head_dim for s in busy} == set(HEAD_DIMS)
    assert {s.q_heads // s.kv_heads for s in busy} == set(GROUPS)
    assert any(s.q_len < s.kv_len for s in busy) and any(s.q_len > s.kv_len for s in busy)


@each_backend
@pytest.mark.parametrize("row", GRID, ids=str)
def test_every_shape(row: Row, backend: str) -> None:
    compare(SHAPED[row.name], tensors(row.shape, row.dtype), backend, **row.call)


@each_backend
@pytest.mark.parametrize("dtype", [f16, bf16, f32], ids=str)
def test_every_dtype(dtype: torch.dtype, backend: str) -> None:
    skip_unless_right(backend, dtype)
    qkv = tensors(SMALL, dtype)
    out, _ = compare(ALIBI, qkv, backend, slopes=variants.alibi_slopes(4))
    assert out.dtype is dtype


def test_float64_is_float64_throughout() -> None:
    qkv = tensors(SMALL, f64)
    compare(ALIBI, qkv, "cpu", slopes=variants.alibi_slopes(4))
    with pytest.raises(BackendUnavailable, match="float64"):
        NOOP(*(on("triton", x) for x in qkv), backend="triton")


@each_backend
@pytest.mark.parametrize("batches", [(1, 1), (1, 3), (3, 1)], ids=str)
def test_k_and_v_of_batch_1_serve_every_sequence(batches: tuple[int, int], backend: str) -> None:
    q, k, v = tensors(Shape(3, 4, 2, 9, 20))
    compare(variants.causal, (q, k[: batches[0]], v[: batches[1]]), backend)


# -- stock variants ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [c for c in test_variants.CASES if c.q_len * c.kv_len < 2000], ids=str
)
def test_stock_variants_in_triton(case: Any) -> None:
    """As `test_variants` does on the CPU; long ones below."""
    qkv = test_variants.tensors(case, f32)
    compare(case.variant, qkv, "triton", scale=case.scale, q_offset=case.q_offset, **case.tensors)


FIRST = {case.name: case for case in reversed(test_variants.CASES)}


@pytest.mark.parametrize("dtype", [f32, f16], ids=str)
@each_backend
@pytest.mark.parametrize("name", sorted(FIRST))
def test_stock_variants_over_several_tiles(name: str, backend: str, dtype: torch.dtype) -> None:
    case, q_offset = FIRST[name], 61
    shape = Shape(2, 1, 1, 66, 131, 24, 17) if dtype is f32 else Shape(1, 2, 1, 66, 131, 24, 17)
    captures = stretched(case.variant, case.captures, shape, q_offset)
    if "slopes" in captures:  # slopes below 0 would make scores of 100, which float32 rounds
        captures["slopes"] = variants.alibi_slopes(shape.q_heads)
    qkv = tensors(shape, dtype)
    compare(case.variant, qkv, backend, scale=case.scale, q_offset=q_offset, **captures)


# -- memory layouts ----------------------------------------------------------------------------


def in_larger(x: Tensor, fill: float = nan) -> Tensor:
    """The same values cut out of a buffer that is wider in every direction."""
    around = x.new_full([n + 3 for n in x.shape], fill)
    inside = around[tuple(slice(1, n + 1) for n in x.shape)]
    return inside.copy_(x)


def every_second(x: Tensor) -> Tensor:
    return torch.stack([x, torch.full_like(x, nan)], -1).flatten(-2)[..., ::2]


def by_token(x: Tensor) -> Tensor:
    """[B, L, H, D] in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


LAYOUTS = {
    "by token": by_token,
    "sliced": in_larger,
    "last stride 2": every_second,
    "columns first": lambda x: x.mT.contiguous().mT,
    "heads outermost": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded over heads": lambda x: x[:, :1].expand_as(x),
    "expanded over batch": lambda x: x[:1].expand_as(x),
    "expanded over positions": lambda x: x[:, :, :1].expand_as(x),
    "not at 16 bytes": lambda x: x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x),
}


@each_backend
@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str, which: str, backend: str) -> None:
    given = dict(zip("qkv", tensors(Shape(2, 2, 2, 18, 35, 16, 32)), strict=True))
    views = given | {name: LAYOUTS[layout](given[name]) for name in which}
    compare(variants.causal, tuple(views.values()), backend)


@each_backend
def test_q_k_and_v_of_one_projection(backend: str) -> None:
    fused = torch.randn(2, 40, 3, 4, 16)
    q, k, v = fused.permute(2, 0, 3, 1, 4).unbind()
    out, _ = compare(variants.causal, (q, k, v), backend)
    assert out.transpose(1, 2).is_contiguous()


@each_backend
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1), (2, 1, 0)], ids=str)
def test_out_has_the_dimension_order_of_q(order: tuple[int, ...], backend: str) -> None:
    q, k, v = tensors(Shape(2, 3, 1, 5, 7, 8, 11))
    q = q.permute(*order, 3).contiguous().permute(*(order.index(n) for n in range(3)), 3)
    out, lse = compare(NOOP, (q, k, v), backend)
    assert out.permute(*order, 3).is_contiguous() and lse.is_contiguous()


@each_backend
def test_one_tensor_is_q_k_and_v(backend: str) -> None:
    x = torch.randn(2, 3, 20, 16)
    compare(variants.causal, (x, x, x), backend)


@each_backend
def test_places_beyond_32_bits(backend: str) -> None:
    """Two sequences 2**31 elements apart; pages between them are never touched."""
    attn, (q, k, v) = (
        parse("variant v(t) { score s + t[b, j] }"),
        tensors(Shape(2, 1, 1, 17, 20), f16),
    )
    table = whole(100, 2, 20).to(torch.int8)
    far = [x.new_empty(2**31 + 2 * x.stride(0)) for x in (k, table)]
    k, table = (
        memory.as_strided(x.shape, (2**31 + 16, *x.stride()[1:])).copy_(x)
        for memory, x in zip(far, (k, table), strict=True)
    )
    compare(attn, (q, k, v), backend, t=table)


@each_backend
@pytest.mark.parametrize("dtype", [f32, f16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 17])
def test_nothing_outside_q_k_and_v_is_read(head_dim: int, dtype: torch.dtype, backend: str) -> None:
    qkv = tensors(Shape(2, 2, 1, 19, 45, head_dim, head_dim + 3), dtype)
    found = compare(variants.causal, tuple(in_larger(x) for x in qkv), backend)
    assert identical(found, compare(variants.causal, qkv, backend))


# -- captures ----------------------------------------------------------------------------------


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def whole(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(6))


B, H, HK, LQ, LK = 2, 4, 2, 20, 40
# name: (declarations, score or mask, values)
INDEXED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "h": ("t", "score s * t[h]", {"t": normal(H)}),
    "hk": ("t", "score s * t[hk]", {"t": normal(HK)}),
    "b": ("t", "score s * t[b]", {"t": normal(B)}),
    "i": ("t", "score s * t[i]", {"t": normal(LQ)}),
    "j": ("t", "score s + t[j]", {"t": normal(LK)}),
    "b, i": ("t", "score s * t[b, i]", {"t": normal(B, LQ)}),
    "b, j": ("t", "score s + t[b][j]", {"t": normal(B, LK)}),
    "b, h, j": ("t", "score s + t[b, h, j]", {"t": normal(B, H, LK)}),
    "h, i - j + n": ("t, n: int", "score s + t[h, i - j + n]", {"t": normal(H, 60), "n": LK - 1}),
    "h, clipped": ("t", "score s + t[h, clamp(i - j, -8, 8) + 8]", {"t": normal(H, 17)}),
    "h, bucket": (
        "t, bucket",
        "score s + t[h, bucket[i - j + 39]]",
        {"t": normal(H, 12), "bucket": whole(12, 60)},
    ),
    "b, h, i, j": ("t", "score s + t[b, h, i, j]", {"t": normal(B, H, LQ, LK)}),
    "1, h, i, j": ("t", "score s + t[b, h, i, j]", {"t": normal(1, H, LQ, LK)}),
    "b, 1, i, j": ("t", "score s + t[b, h, i, j]", {"t": normal(B, 1, LQ, LK)}),
    "b, h, 1, j": ("t", "score s + t[b, h, i, j]", {"t": normal(B, H, 1, LK)}),
    "b, h, i, 1": ("t", "score s * t[b, h, i, j]", {"t": normal(B, H, LQ, 1)}),
    "1, 1, i, j": ("t", "score s + t[b, h, i, j]", {"t": normal(1, 1, LQ, LK)}),
    "five": ("t", "score s + t[b, h, i, j, 1]", {"t": normal(B, H, LQ, LK, 2)}),
    "nested": (
        "t, cut, doc: tensor[B, L]",
        "score s + t[doc[b, i], doc[b, j]] mask j <= cut[doc[b, i]]",
        {"t": normal(5, 5), "cut": whole(LK, 5), "doc": whole(5, B, LK)},
    ),
    "bool, j": ("t", "mask t[j]", {"t": whole(2, LK) > 0}),
    "bool, b, j": ("t", "mask t[b, j]", {"t": whole(2, B, LK) > 0}),
    "bool, i, j": ("t", "mask t[i, j]", {"t": whole(2, LQ, LK) > 0}),
    "bool as a number": ("t", "score s + t[j]", {"t": whole(2, LK) > 0}),
    "bit of a word": ("t", "mask (t[i, j >> 5] >> (j & 31)) & 1 != 0", {"t": whole(2**31, LQ, 3)}),
    "documents": ("t", "mask t[b, i] == t[b, j]", {"t": whole(3, B, LK)}),
    "document of 1": ("t", "mask t[b, i] == t[b, j]", {"t": whole(3, 1, LK)}),
    "head of the query": ("t", "mask j <= i + t[h]", {"t": whole(40, H)}),
    "far outside": ("t", "score s + t[i - 40] + t[j * 1000]", {"t": normal(50)}),
    "from the end": ("t", "score s + t[-1] * t[-3]", {"t": normal(9)}),
    "at a literal": ("t", "score s * t[2]", {"t": normal(4)}),
    "of no element": ("t", "score s + t[j + 1]", {"t": normal(0)}),
}


HUGE = {torch.int64: 2**60, torch.int32: 2**31 - 1, torch.bool: True}


def poisoned(table: Tensor, seed: int) -> Tensor:
    """The same table inside a buffer of nan or huge numbers, its dimensions in any order."""
    order = random.Random(seed).sample(range(table.ndim), table.ndim)
    moved = in_larger(table.permute(order), HUGE.get(table.dtype, nan))
    return moved.permute([order.index(axis) for axis in range(table.ndim)])


@each_backend
@pytest.mark.parametrize("name", INDEXED)
def test_captures_of_every_index(name: str, backend: str) -> None:
    """Right, and the same bit by bit when huge numbers stand around the tables."""
    declared, body, captures = INDEXED[name]
    attn, qkv = parse(f"variant v({declared}) {{ {body} }}"), tensors(SMALL)
    wanted = compare(attn, qkv, backend, **captures)
    around = {k: poisoned(x, 1) if isinstance(x, Tensor) else x for k, x in captures.items()}
    found = attn(
        *(on(backend, x) for x in qkv), backend=backend, return_lse=True, **on(backend, around)
    )
    assert identical(found, wanted)


STORAGE = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, f16, bf16, f32, f64]


@each_backend
@pytest.mark.parametrize("dtype", STORAGE, ids=str)
def test_captures_of_every_element_type(dtype: torch.dtype, backend: str) -> None:
    if backend == "triton" and dtype is bf16 and not interpreter_multiplies(bf16):
        pytest.skip("Triton's interpreter does not load bf16")
    attn = parse("variant v(t, n) { score s + t[b, j] * n mask i - n * 50 <= t[b, j] + 60 }")
    table = (
        whole(100, B, LK).to(dtype)
        if not dtype.is_floating_point
        else (normal(B, LK) * 3).to(dtype)
    )
    for n in (torch.tensor(3).to(dtype), torch.tensor([3]).to(dtype)):
        compare(attn, tensors(SMALL), backend, t=table, n=n)


@each_backend
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64], ids=str)
def test_ints_where_floats_are_declared(dtype: torch.dtype, backend: str) -> None:
    attn = parse(
        "variant v(t: float[Lk], x: float) "
        "{ score s + t[j] // x - x / 7 + t[j] ** 2 / 9e3 mask t[j] != x + t[i] / 2 }"
    )
    table = whole(100, LK).to(dtype)
    for x in (torch.tensor(3, dtype=dtype), 3):
        compare(attn, tensors(SMALL), backend, 2e-5, t=table, x=x)
    # In float32, as declared, these are equal.
    attn = parse("variant v(t: float[Lk], x: float) { mask t[j] == x }")
    out, _ = compare(
        attn, tensors(SMALL), backend, t=torch.full((LK,), 2**24 + 1), x=torch.tensor(2**24)
    )
    assert out.ne(0).all()


@each_backend
def test_storage_is_read_with_its_sign(backend: str) -> None:
    attn = parse("variant v(t) { score s + t[j] mask t[j] > -5 }")
    for dtype, least in (
        (torch.int8, -128),
        (torch.uint8, 0),
        (torch.int16, -(2**15)),
        (torch.int32, -(2**31)),
    ):
        table = torch.tensor([least, 127, 1, -5 * (least < 0), 5], dtype=dtype)
        compare(attn, tensors(Shape(1, 1, 1, 3, 5)), backend, t=table)


@each_backend
def test_ints_of_47_bits_are_exact(backend: str) -> None:
    attn = parse("variant v(t, n: int) { mask t[i] + n == t[j] + n or (t[j] ^ n) % 7 == i % 7 }")
    table = 2**47 - whole(4, LK)
    compare(attn, tensors(SMALL), backend, t=table, n=-(2**47))


@each_backend
@pytest.mark.parametrize("make", [lambda x: x, torch.tensor, lambda x: torch.tensor([x])])
def test_scalars_by_value_and_in_tensors(make: Any, backend: str) -> None:
    attn = parse("variant v(n, x, flag) { score s * x + n mask j <= i + n if flag else j > n }")
    for n, x, flag in ((7, 0.5, True), (0, -2.0, False)):
        compare(attn, tensors(SMALL), backend, n=make(n), x=make(x), flag=make(flag))


@each_backend
def test_numbers_of_numpy_are_numbers(backend: str) -> None:
    numpy = pytest.importorskip("numpy")
    attn, qkv = parse("variant v(n, x) { score s * x mask j <= i + n }"), tensors(SMALL)
    found = compare(attn, qkv, backend, n=7, x=0.5)
    wanted = compare(attn, qkv, backend, n=numpy.int32(7), x=numpy.float32(0.5))
    assert identical(found, wanted)


@each_backend
def test_a_capture_may_be_a_view_of_an_input(backend: str) -> None:
    q, k, v = tensors(SMALL)
    attn = parse("variant v(first: tensor[B, Hk, Lk], same: tensor[B, Hk, Lk]) "
                 "{ score s + first[b, hk, j] - 0.5 * same[b, hk, j] }")  # fmt: skip
    compare(attn, (q, k, v), backend, first=k[..., 0], same=k[..., 0])


# -- masks of every batch and head -------------------------------------------------------------


@each_backend
@pytest.mark.parametrize(
    "text",
    ["j <= i + 7 * b", "j % 4 == h", "j <= i - 5 * hk", "(b + h) % 2 == 0 or j == i",
     "i - j < w[h] and j <= i", "w[b] <= j"],
)  # fmt: skip
def test_masks_that_read_b_or_h(text: str, backend: str) -> None:
    attn = parse(f"variant v(w) {{ mask {text} }}")
    call = {"w": torch.tensor([3, 0, 40, 1000])} if "w[" in text else {"w": 0}
    shape = Shape(3, 4, 2, 70, 140)
    out, lse = compare(attn, tensors(shape), backend, q_offset=20, **call)
    if text == "(b + h) % 2 == 0 or j == i":
        assert out.isfinite().all() and lse.isfinite().all()


@each_backend
def test_more_structures_than_are_classified(backend: str) -> None:
    attn = parse("variant v(w) { mask j <= i - w[b, h] }")
    shape = Shape(3, 90, 90, 3, 5, 8, 8) if backend == "cpu" else Shape(3, 5, 5, 3, 5, 8, 8)
    compare(attn, tensors(shape), backend, w=whole(4, shape.batch, shape.q_heads))


# -- options -----------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_q_offset_of_each_sequence(kind: torch.dtype, backend: str) -> None:
    doc, offsets = whole(3, 2, 90), torch.tensor([50, 3], dtype=kind)
    attn, qkv = variants.document & variants.causal, tensors(SMALL)
    out, lse = compare(attn, qkv, backend, q_offset=offsets, doc=doc)
    for n, offset in enumerate(offsets.tolist()):
        alone = compare(
            attn, tuple(x[n : n + 1] for x in qkv), backend, q_offset=offset, doc=doc[n : n + 1]
        )
        agree(out[n : n + 1], alone[0], 1e-6)
        agree(lse[n : n + 1], alone[1], 1e-6)


@each_backend
@pytest.mark.parametrize("offset", [2**24 - 10, 2**24, 2**31 - 100])
def test_queries_far_away(offset: int, backend: str) -> None:
    for text in (
        "j <= i",
        "(i * 3 + j) % 7 == 0",
        "i * i * 5 - j > n and (i - j) // 3 % 2 == 0",
        "i + n < 2147483640 + j",
        "(i ^ j) & 5 != 1",
    ):
        attn = parse(f"variant v(n: int = 20) {{ mask {text} }}")
        compare(attn, tensors(Shape(1, 1, 1, 18, 30)), backend, q_offset=offset)
    compare(attn, tensors(SMALL), backend, q_offset=torch.tensor([offset, 3]))


@each_backend
@pytest.mark.parametrize("dtype", [f32, f16], ids=str)
@pytest.mark.parametrize("name", ["noop", "causal", "alibi"])
def test_keys_from_kv_lens_on_are_not_read(name: str, dtype: torch.dtype, backend: str) -> None:
    q, k, v = tensors(Shape(4, 2, 1, 20, 150), dtype)
    lens = torch.tensor([150, 64, 0, 63], dtype=torch.int32)
    for n, end in enumerate(lens.tolist()):
        k[n, :, end:], v[n, :, end:] = nan, inf
    call = {"slopes": variants.alibi_slopes(2)} if name == "alibi" else {}
    out, lse = compare(SHAPED[name], (q, k, v), backend, q_offset=100, kv_lens=lens, **call)
    assert out.isfinite().all() and out[2].eq(0).all() and lse[2].eq(-inf).all()


@each_backend
def test_kv_lens_beyond_the_keys_and_below_0(backend: str) -> None:
    q, k, v = tensors(Shape(3, 1, 1, 5, 20))
    lens = torch.tensor([1000, -7, 2**31 - 1], dtype=torch.int32)
    out, lse = compare(variants.causal, (q, k, v), backend, kv_lens=lens, q_offset=9)
    assert out[1].eq(0).all() and lse[1].eq(-inf).all()


@each_backend
def test_kv_len_is_the_length_of_the_tensor(backend: str) -> None:
    attn = parse("variant v() { mask j >= kv_len - q_len - i }")
    lens = torch.tensor([30, 70], dtype=torch.int32)
    compare(attn, tensors(SMALL), backend, kv_lens=lens, q_offset=11)


SCALES = [0.3, -0.7, 0, 0.0, 25.0, 1, torch.tensor(0.3), torch.tensor(-0.7, dtype=f64),
          torch.tensor(0.0), torch.tensor(0.25, dtype=f16)]  # fmt: skip


@each_backend
@pytest.mark.parametrize("scale", SCALES, ids=repr)
@pytest.mark.parametrize("name", ["causal", "alibi", "softcap window"])
def test_scale(name: str, scale: Any, backend: str) -> None:
    call = {"slopes": variants.alibi_slopes(4)} if name == "alibi" else {}
    compare(SHAPED[name], tensors(SMALL), backend, 2e-5, scale=scale, **call)


@each_backend
def test_lse_is_in_natural_log(backend: str) -> None:
    q, k, v = (on(backend, x) for x in tensors(SMALL))
    _, lse = NOOP(q, k, v, backend=backend, return_lse=True)
    wanted = torch.logsumexp(q @ k.repeat_interleave(2, 1).mT / 4, -1)
    assert lse.dtype is f32
    agree(lse, wanted, 1e-5)


@each_backend
@pytest.mark.parametrize("precision", ["exact", "fast", "auto"])
def test_precision(precision: str, backend: str) -> None:
    q, k, v = (on(backend, x) for x in tensors(SMALL))
    attn = CAPPED & variants.causal
    out, lse = attn(q, k, v, precision=precision, backend=backend, return_lse=True)
    wanted, wanted_lse = attn.eager(q, k, v, return_lse=True)
    tolerance = 1e-5 if precision != "fast" else 1e-2
    agree(out, wanted, tolerance)
    agree(lse, wanted_lse, tolerance)


# -- values ------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("dtype", [f32, f16], ids=str)
def test_rows_without_a_key(dtype: torch.dtype, backend: str) -> None:
    attn = parse("variant v() { mask i >= 4 and j <= i and i % 5 != 0 }")
    out, lse = compare(attn, tensors(Shape(2, 2, 1, 140, 140), dtype), backend)
    empty = (torch.arange(140) < 4) | (torch.arange(140) % 5 == 0)
    assert out[:, :, empty].eq(0).all() and lse[:, :, empty].eq(-inf).all()
    assert out[:, :, ~empty].ne(0).any() and lse[:, :, ~empty].isfinite().all()


@each_backend
@pytest.mark.parametrize("body", ["s + t[j]", "s if s > 1000.0 else -inf", "s - inf"])
def test_rows_whose_scores_are_all_minus_infinity(body: str, backend: str) -> None:
    attn = (
        parse(f"variant v(t) {{ score {body} }}")
        if "t[" in body
        else parse(f"variant v() {{ score {body} }}")
    )
    call = {"t": torch.full((LK,), -inf)} if "t[" in body else {}
    out, lse = compare(attn, tensors(SMALL), backend, **call)
    assert out.eq(0).all() and lse.eq(-inf).all()


@each_backend
def test_a_tile_of_minus_infinity_before_and_after_others(backend: str) -> None:
    attn = parse("variant v(t) { score s + t[j] }")
    for first, last in ((0, 130), (130, 300), (70, 200)):
        table = torch.zeros(300)
        table[first:last] = -inf
        compare(attn, tensors(Shape(1, 1, 1, 17, 300)), backend, t=table)


@each_backend
@pytest.mark.parametrize("bad", [nan, inf], ids=repr)
@pytest.mark.parametrize("dtype", [f32, f16], ids=str)
def test_nan_and_infinity_in_an_attended_score(
    dtype: torch.dtype, bad: float, backend: str
) -> None:
    attn = parse("variant v(t) { score s + t[j] mask j <= i }")
    table = torch.zeros(150)
    table[100] = bad
    out, lse = compare(attn, tensors(Shape(1, 2, 1, 150, 150), dtype), backend, t=table)
    assert out[:, :, :100].isfinite().all() and out[:, :, 100:].isnan().all()
    assert lse[:, :, :100].isfinite().all() and lse[:, :, 100:].isnan().all()


@each_backend
@pytest.mark.parametrize("bad", [nan, inf, -inf], ids=repr)
@pytest.mark.parametrize(
    "body", ["score s + t[i, j] mask j <= i", "score where(j <= i, s * (1 + t[i, j]), -inf)",
             "score where(j <= i, s, t[i, j]) mask j <= i"],
)  # fmt: skip
def test_a_masked_pair_changes_nothing(body: str, bad: float, backend: str) -> None:
    attn, qkv = parse(f"variant v(t) {{ {body} }}"), tensors(Shape(1, 2, 1, 150, 150))
    table = torch.zeros(150, 150)
    wanted = compare(attn, qkv, backend, t=table)
    found = compare(attn, qkv, backend, t=table.masked_fill(torch.ones(150, 150).triu(1) > 0, bad))
    assert identical(found, wanted)


@each_backend
def test_scores_undefined_at_masked_pairs(backend: str) -> None:
    attn = parse("variant v() { score s + log(i - j + 1) / sqrt(i - j) mask j < i }")
    out, _ = compare(attn, tensors(Shape(1, 2, 1, 90, 90)), backend)
    assert out.isfinite().all()


@each_backend
def test_nan_keys_that_are_masked(backend: str) -> None:
    q, k, v = tensors(Shape(1, 1, 1, 100, 100))
    k[:, :, 50] = nan
    out, lse = compare(variants.causal, (q, k, v), backend)
    assert out[:, :, :50].isfinite().all() and lse[:, :, :50].isfinite().all()
    assert lse[:, :, 50:].isnan().all()


@each_backend
@pytest.mark.parametrize("size", [1e4, 1e-4])
def test_large_and_tiny_scores(size: float, backend: str) -> None:
    q, k, v = tensors(SMALL)
    compare(variants.causal, (q * size, k, v), backend, 1e-2 if size > 1 else 1e-5)
    _, lse = compare(variants.softcap & variants.causal, (q * size, k, v), backend, 3e-5, cap=30.0)
    assert lse.max() < 30 + math.log(LK)


@each_backend
def test_a_score_that_ignores_s(backend: str) -> None:
    for body in ("t[i, j]", "1.0", "t[i, j] if j <= i else -inf", "i - j"):
        attn = (
            parse(f"variant v(t) {{ score {body} }}")
            if "t[" in body
            else parse(f"variant v() {{ score {body} }}")
        )
        compare(attn, tensors(SMALL), backend, **({"t": normal(LQ, LK)} if "t[" in body else {}))


# -- two paths, one answer ---------------------------------------------------------------------

CACHED = variants.alibi & variants.sliding_window.bind(window=30)


@each_backend
def test_decoding_step_by_step_is_one_pass(backend: str) -> None:
    q, k, v = (on(backend, x) for x in tensors(Shape(2, 6, 2, 45, 45)))
    slopes = on(backend, variants.alibi_slopes(6))
    whole_pass, whole_lse = CACHED(q, k, v, slopes=slopes, backend=backend, return_lse=True)
    cache = [torch.full((2, 2, 64, 16), nan, device=k.device) for _ in range(2)]
    for at in (30, 31, 37, 44):
        cache[0][:, :, : at + 1], cache[1][:, :, : at + 1] = k[:, :, : at + 1], v[:, :, : at + 1]
        step, lse = CACHED(
            q[:, :, at : at + 1], *cache, slopes=slopes, backend=backend, return_lse=True,
            q_offset=at, kv_lens=torch.full((2,), at + 1, dtype=torch.int32, device=k.device),
        )  # fmt: skip
        agree(step, whole_pass[:, :, at : at + 1], 2e-6)
        agree(lse, whole_lse[:, :, at : at + 1], 2e-6)


@each_backend
def test_a_batch_is_one_call_per_sequence(backend: str) -> None:
    q, k, v = (on(backend, x) for x in tensors(Shape(4, 2, 1, 40, 80)))
    offsets, lens = torch.tensor([0, 40, 7, 21]), torch.tensor([80, 50, 0, 33], dtype=torch.int32)
    offsets, lens = on(backend, offsets), on(backend, lens)
    slopes = on(backend, variants.alibi_slopes(2))
    together = CACHED(q, k, v, slopes=slopes, backend=backend, q_offset=offsets, kv_lens=lens)
    for n in range(4):
        end = int(lens[n])
        alone = CACHED(
            q[n : n + 1], k[n : n + 1, :, :end], v[n : n + 1, :, :end], slopes=slopes,
            backend=backend, q_offset=int(offsets[n]),
        )  # fmt: skip
        agree(together[n : n + 1], alone, 2e-6)


@each_backend
def test_parts_of_the_keys_merge_by_their_lse(backend: str) -> None:
    attn = parse(
        "variant v(slope: float, low: int, high: int) "
        "{ score s - slope * (i - j) mask low <= j < high and j <= i }"
    )
    q, k, v = (on(backend, x) for x in tensors(Shape(1, 2, 2, 60, 60)))
    whole_out, whole_lse = attn(
        q, k, v, slope=0.1, low=0, high=60, backend=backend, return_lse=True
    )
    parts = [
        attn(q, k, v, slope=0.1, low=low, high=high, backend=backend, return_lse=True)
        for low, high in ((0, 20), (20, 21), (21, 60))
    ]
    lses = torch.stack([lse for _, lse in parts])
    weights = torch.softmax(lses, 0)
    merged = sum(w[..., None] * out for w, (out, _) in zip(weights, parts, strict=True))
    agree(merged, whole_out, 2e-6)
    agree(torch.logsumexp(lses, 0), whole_lse, 2e-6)


@each_backend
def test_a_call_does_not_change_its_tensors_and_repeats_bitwise(backend: str) -> None:
    qkv, t = tuple(on(backend, x) for x in tensors(SMALL)), on(backend, normal(H))
    before = [x.clone() for x in (*qkv, t)]
    attn = parse("variant v(t) { score s * t[h] mask j <= i }")
    first = attn(*qkv, t=t, backend=backend, return_lse=True)
    second = attn(*qkv, t=t, backend=backend, return_lse=True)
    assert identical(first, second)
    assert all(torch.equal(x, y) for x, y in zip((*qkv, t), before, strict=True))


# -- errors of the call ------------------------------------------------------------------------

Q, K, V = tensors(Shape(2, 4, 2, 5, 7, 8, 9))
# What is wrong: (the call, words of the message)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no tensor": ({"q": [1.0]}, "q must be a tensor"),
    "three dimensions": ({"k": K[0]}, "k must have 4 dimensions"),
    "dtypes": ({"k": K.half()}, "share a dtype"),
    "ints": ({"q": Q.int(), "k": K.int(), "v": V.int()}, "floats"),
    "head dims": ({"k": K[..., :7]}, "same head dim"),
    "lengths": ({"v": V[:, :, :6]}, "same heads and length"),
    "heads": ({"q": Q[:, :3]}, "multiple of the kv heads"),
    "batch": ({"k": torch.cat([K, K])}, "batch of k must be 1 or that of q"),
    "head dim 0": ({"q": Q[..., :0], "k": K[..., :0]}, "at least 1"),
    "scale": ({"scale": "big"}, "scale must be a number"),
    "scale tensor": ({"scale": torch.ones(1)}, "0-d float"),
    "scale int tensor": ({"scale": torch.tensor(1)}, "0-d float"),
    "learned scale": ({"scale": torch.tensor(1.0, requires_grad=True)}, "must not require grad"),
    "negative offset": ({"q_offset": -1}, "at least 0"),
    "far offset": ({"q_offset": 2**31}, "below 2"),
    "float offset": ({"q_offset": 1.0}, "q_offset must be an int"),
    "bool offset": ({"q_offset": True}, "q_offset must be an int"),
    "offset shape": ({"q_offset": torch.tensor([1, 2, 3])}, "int tensor"),
    "offset dtype": ({"q_offset": torch.tensor([1.0, 2.0])}, "int tensor"),
    "lens shape": ({"kv_lens": torch.tensor(3)}, "kv_lens"),
    "lens dtype": ({"kv_lens": torch.tensor([1.0, 2.0])}, "kv_lens must be int32"),
    "lens list": ({"kv_lens": [3, 4]}, "kv_lens"),
    "precision": ({"precision": "high"}, "precision must be"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_inputs_are_named(what: str) -> None:
    change, words = WRONG[what]
    with pytest.raises(InputMismatch, match=words):
        variants.causal(**({"q": Q, "k": K, "v": V} | change))


def test_unknown_backend() -> None:
    with pytest.raises(BackendUnavailable, match="no backend 'cuda'"):
        NOOP(Q, K, V, backend="cuda")


@pytest.mark.skipif(DEVICE["triton"] == "cuda", reason="there is a GPU")
def test_triton_needs_a_gpu_or_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BackendUnavailable, match="TRITON_INTERPRET=1"):
        NOOP(Q, K, V, backend="triton")


def test_autocast_casts_first() -> None:
    with torch.autocast("cpu", bf16):
        out = NOOP(Q, K.bfloat16(), V)
    assert out.dtype is bf16
    agree(out, NOOP.eager(Q, K, V), 3e-2)


# -- memory ------------------------------------------------------------------------------------

LONG = """
import resource, torch
from scoremod import variants
window = variants.symmetric_window.bind(radius=5)
window(*torch.randn(3, 1, 1, 64, 32).unbind())
q, k, v = torch.randn(3, 1, 1, 25_000, 32).unbind()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = window(q, k, v)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
rows = slice(24_000, 24_010)
near = window.eager(q[:, :, rows], k[:, :, 23_900:24_100], v[:, :, 23_900:24_100], q_offset=100)
torch.testing.assert_close(out[:, :, rows], near, rtol=0, atol=1e-5)
"""


def test_25000_queries_and_keys_in_little_memory() -> None:
    done = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 300 * 1024  # KiB


def test_a_constant_score_is_float64_in_a_float64_call() -> None:
    attn = parse("variant v() { score tanh(clamp(1.0, -4.0, 4.0)) }")
    q, k, v = tensors(Shape(1, 1, 1, 5, 7), f64)
    found, wanted = (f(q, k, v, return_lse=True) for f in (attn, attn.eager))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-14)

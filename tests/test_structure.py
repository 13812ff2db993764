"""The structure that kernels make: every tile is there once and of the right kind, both ways."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import BACKENDS, DEVICE, on
from hypothesis import given, settings
from hypothesis import strategies as st
from tile_masks import Launch, launches, masks, parse

import scoremod
from scoremod import variants
from scoremod.binding import Bound
from scoremod.errors import InputMismatch
from scoremod.inputs import shared_values
from scoremod.ir.capture import Capture, Kind
from scoremod.ir.expr import Expr
from scoremod.plan import Param, S, Typed
from scoremod.plan_triton import ORDER_PLACE, RECORD, SCATTERED_PLACE, STORED_RUNS, Options
from scoremod.structure import Sizes, Stored, structure

Array = np.ndarray[Any, Any]
CPU = torch.device("cpu")
TRITON = torch.empty(0, device=DEVICE["triton"]).device  # where kernels run, or the interpreter


def unpacked(stored: Stored, columns: int) -> Array:
    """The kinds that rows of a structure say: 0 empty, 1 partial, 2 full; 3 seen, kind unknown."""
    runs, words = stored.runs.cpu().numpy(), stored.words.cpu().numpy().view(np.uint32)
    kinds = np.zeros((len(runs), columns), np.uint8)
    for row, record, map_ in zip(kinds, runs, words, strict=True):
        full = record[2 * STORED_RUNS : 4 * STORED_RUNS]
        if record[SCATTERED_PLACE]:
            bits = [
                32 * int(number) + bit
                for number, word in map_.reshape(-1, 2)
                for bit in range(32)
                if word >> bit & 1
            ]
            scattered = bits[: record[2 * STORED_RUNS - 1]]
            assert scattered == sorted(set(scattered)) and scattered[-1] < columns
            assert full[-1] == 0
            row[scattered] = 3
        else:
            visit(row, 1, record[: 2 * STORED_RUNS])
            visit(row, 2, full)
    return kinds


def visit(row: Array, kind: int, record: Array) -> None:
    """What the attention's loop does with shifts and counts."""
    shifts, counts = record[:STORED_RUNS], record[STORED_RUNS:]
    assert (np.diff(counts) >= 0).all()
    for t in range(counts[-1]):
        tile = t + shifts[np.argmax(t < counts)]
        assert 0 <= tile < len(row) and row[tile] == 0, "in range, and not visited before"
        row[tile] = kind


def kinds_of(mask: Expr, launch: Launch, *, transposed: bool = False) -> Array:
    """What the kernels say of a mask, exactly as a call would run them."""
    program, values = typed_mask(mask, launch)
    sizes = Sizes(1, 1, launch.q_len, launch.kv_len, 1)
    chosen = Options("f32", 16, 16, "exact", small=False, stored=True)
    blocks = launch.block_m, launch.block_n
    ways = {"transposed": transposed, "by_length": transposed}
    how = structure(program, chosen, sizes, blocks, TRITON, **ways)
    stored = how.make(TRITON, shared_values(launch.q_offset, None, values), ())
    assert stored.runs.shape == (how.structures * how.row_tiles, RECORD)
    kinds = unpacked(stored, how.column_tiles)
    if transposed:
        tiles, order = (kinds > 0).sum(1), stored.runs[:, ORDER_PLACE].cpu().numpy()
        assert (order == np.argsort(-tiles, kind="stable")).all()
    return kinds


def typed_mask(mask: Expr, launch: Launch) -> tuple[Typed, tuple[Bound, ...]]:
    """The mask with its captures of a launch; tables may be shorter than the lengths."""
    bound = []
    for name in sorted(mask.names & launch.values.keys()):
        value = np.asarray(launch.values[name])
        element = {"b": "bool", "i": "i64", "f": "f32"}[value.dtype.kind]
        if value.ndim:
            param = Param(name, Kind.TENSOR, element, value.ndim)
            given: Any = torch.from_numpy(np.ascontiguousarray(value)).to(TRITON)
        else:
            param, given = Param(name, Kind.SCALAR, element), value.item()
        capture = Capture(name, param.kind, element)
        bound.append(Bound(param, given, capture, given))
    return Typed("m", tuple(x.param for x in bound), S, mask, ()), tuple(bound)


def true_kinds(dense: Array, blocks: tuple[int, int]) -> Array:
    launch = Launch(*dense.shape, *blocks)
    return launch.kinds(dense)


def check(found: Array, dense: Array, blocks: tuple[int, int], *, transposed: bool) -> None:
    """Every tile is exact, but that the kernel wants all columns of a full tile to exist."""
    true = true_kinds(dense, blocks)
    _, columns = dense.shape[::-1] if transposed else dense.shape
    true = true.T if transposed else true
    width = blocks[0] if transposed else blocks[1]
    if columns % width:
        true[:, -1] = np.minimum(true[:, -1], 1)
    scattered = found == 3
    assert ((found == true) | scattered).all()
    assert (true[scattered] > 0).all() and ((true > 0) == (found > 0)).all()
    for row, some in zip(true, scattered.any(1), strict=True):
        runs = [1 + np.diff(np.flatnonzero(row == kind)).__gt__(1).sum() for kind in (1, 2)]
        assert some == (max(n * (row == k).any() for n, k in zip(runs, (1, 2), strict=True)) > 4)


# -- random masks ------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(masks(), launches(), st.booleans())
def test_random_masks(mask: Expr, launch: Launch, transposed: bool) -> None:
    # A kernel's tiles are powers of two.
    blocks = tuple(1 << (max(n, 8) - 1).bit_length() for n in (launch.block_m, launch.block_n))
    launch = replace(launch, h=0, block_m=blocks[0], block_n=blocks[1])
    kinds = kinds_of(mask, launch, transposed=transposed)
    check(kinds, launch.dense(mask), blocks, transposed=transposed)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "(i // 16) * 5 % 3 == (j // 16) % 3",  # scattered
        "(i // 8) % 4 == 1 or j // 64 == 3",
        "(j // 32) % 4 == 1 or i == j",  # eight runs over several words
        "A[i // 99, j // 99] or j < 3",
        "j >= 60 and i < 200",
        "j > i and j < i",
    ],
)
def test_directed(text: str, transposed: bool) -> None:
    blocks, lengths = ((8, 64), (700, 90)) if transposed else ((32, 16), (90, 700))
    mask, launch = parse(text), Launch(*lengths, *blocks, q_offset=5)
    kinds = kinds_of(mask, launch, transposed=transposed)
    check(kinds, launch.dense(mask), blocks, transposed=transposed)


@pytest.mark.parametrize("transposed", [False, True])
def test_large_tiles_are_looked_into_in_parts(transposed: bool) -> None:
    mask = parse("(i // 100) % 2 == (j // 70) % 2 and j <= i + 140 or j >= 384")
    blocks, launch = (128, 128), Launch(300, 500, 128, 128, q_offset=5)
    kinds = kinds_of(mask, launch, transposed=transposed)
    check(kinds, launch.dense(mask), blocks, transposed=transposed)


def test_the_longest_of_many_rows_come_first() -> None:
    # More rows than are looked at at a time.
    mask, launch = parse("(i // 8) % 4 >= (j // 8) % 5"), Launch(32, 1100, 8, 8)
    kinds = kinds_of(mask, launch, transposed=True)
    check(kinds, launch.dense(mask), (8, 8), transposed=True)


# -- batches, heads, prepared structures -------------------------------------------------------


def call(attn: scoremod.Variant, q: Any, k: Any, **options: Any) -> torch.Tensor:
    out: torch.Tensor = attn(q, k, k, **options)
    return out


@pytest.fixture
def qk() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 2, 90, 16), torch.randn(2, 2, 120, 16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_prepared_once_refreshed_in_place(qk: Any, backend: str) -> None:
    attn = variants.alibi & variants.document & variants.causal
    qk = on(backend, tuple(x[:, :1] for x in qk))
    doc = torch.arange(120).div(25, rounding_mode="floor").int().expand(2, -1).contiguous()
    doc, slopes = on(backend, doc), on(backend, torch.rand(1))
    tiles = (variants.document & variants.causal).prepare(90, 120, batch=2, doc=doc)
    options = {"doc": doc, "slopes": slopes, "backend": backend}
    plain = call(attn, *qk, **options)
    assert torch.equal(call(attn, *qk, tiles=tiles, **options), plain)
    doc.copy_(torch.arange(120).div(40, rounding_mode="floor").expand(2, -1))
    tiles.refresh()
    changed = call(attn, *qk, **options)
    assert not torch.equal(changed, plain)
    assert torch.equal(call(attn, *qk, tiles=tiles, **options), changed)
    other = doc.flip(1)
    tiles.refresh(doc=other)
    options["doc"] = other
    assert torch.equal(call(attn, *qk, tiles=tiles, **options), call(attn, *qk, **options))


@pytest.mark.parametrize("backend", BACKENDS)
def test_prepared_tiles_serve_gradients(qk: Any, backend: str) -> None:
    q, k = (x[:1, :1].clone().requires_grad_() for x in on(backend, qk))
    doc = on(backend, torch.arange(120).div(25, rounding_mode="floor").int()[None])
    tiles = variants.document.prepare(90, 120, doc=doc)
    found = []
    for prepared in (tiles, None):
        out = call(variants.document, q, k, doc=doc, backend=backend, tiles=prepared)
        found.append(torch.autograd.grad(out.square().sum(), (q, k)))
    # For the tiles of each kernel, or the host's.
    assert {key[3] for key in tiles._made} == {False, True} or tiles._kinds
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_was_not_prepared_is_an_error(qk: Any) -> None:
    q, k = qk
    doc = torch.zeros(2, 120, dtype=torch.int32)
    attn = variants.document
    tiles = attn.prepare(90, 120, batch=2, doc=doc)
    for message, call_ in {
        "another value of `doc`": lambda: attn(q, k, k, doc=doc.clone(), tiles=tiles),
        "lengths 90 and 120": lambda: attn(q[:, :, :80], k, k, doc=doc, tiles=tiles),
        "batch of 2": lambda: attn(q[:1], k[:1], k[:1], doc=doc, tiles=tiles),
        "not for this one": lambda: variants.causal(q, k, k, tiles=tiles),
        "takes what .prepare": lambda: variants.causal(q, k, k, tiles=3),
    }.items():
        with pytest.raises(InputMismatch, match=message):
            call_()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranges_need_no_structure(qk: Any, backend: str) -> None:
    qk = on(backend, qk)
    tiles = variants.causal.prepare(90, 120, device=DEVICE[backend])
    out = call(variants.causal, *qk, tiles=tiles, backend=backend)
    assert torch.equal(out, call(variants.causal, *qk, backend=backend)) and tiles.nbytes == 0


# -- the user's own blocks ---------------------------------------------------------------------


def dense_blocks(allowed: torch.Tensor, m: int, n: int, q_len: int, kv_len: int) -> torch.Tensor:
    spread = allowed.repeat_interleave(m, -2).repeat_interleave(n, -1)
    return spread[..., :q_len, :kv_len]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("base", ["noop", "causal", "document"])
def test_blocks_and_with_the_mask(qk: Any, backend: str, heads: int, base: str) -> None:
    q, k = on(backend, qk)
    torch.manual_seed(heads)
    allowed = on(backend, torch.rand(2, heads, 2, 2) < 0.6)
    table = dense_blocks(allowed, 64, 64, 90, 120)

    @scoremod.mask
    def listed(b, h, i, j, table):  # type: ignore[no-untyped-def]
        return table[b, h, i, j]

    attn = {"noop": scoremod.parse("variant noop() { score s }"), "causal": variants.causal}.get(
        base, variants.document
    )
    captures = {"doc": torch.arange(120).div(50).int()[None]} if base == "document" else {}
    captures = on(backend, captures)
    expected = (attn & listed).eager(q, k, k, table=table, **captures)
    given = (allowed, 64)
    out = call(attn, q, k, tiles=given, backend=backend, **captures)
    assert (out - expected).abs().max() < 1e-5


@pytest.mark.parametrize("backend", [*BACKENDS, "eager"])
def test_gradients_stop_at_the_listed_blocks(qk: Any, backend: str) -> None:
    where = backend if backend in DEVICE else "cpu"
    q, k = (x.requires_grad_() for x in on(where, qk))
    # causal alone has the third block
    allowed = on(where, torch.tensor([[True, True], [False, True]]))
    keep = dense_blocks(allowed, 64, 64, 90, 120)

    @scoremod.mask
    def listed(i, j, keep):  # type: ignore[no-untyped-def]
        return keep[i, j]

    out = call(variants.causal, q, k, tiles=(allowed, 64), backend=backend)
    expected = (variants.causal & listed).eager(q, k, k, keep=keep)
    weights = torch.randn_like(out)
    grads = [torch.autograd.grad((x * weights).sum(), (q, k)) for x in (out, expected)]
    for got, wanted in zip((out, *grads[0]), (expected, *grads[1]), strict=True):
        assert (got - wanted).abs().max() < 1e-5


def test_lists_of_all_kinds_read_the_same() -> None:
    from scoremod.blocks import read_blocks

    allowed = torch.rand(8, 6) < 0.5
    forms: list[Any] = [allowed, allowed.float().to_sparse_csr(), (allowed[None, None], (128, 128))]
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    forms.append(
        flex.create_block_mask(
            lambda b, h, i, j: allowed[i // 128, j // 128], 1, 1, 1024, 768, "cpu"
        )
    )
    for form in forms:
        found = read_blocks(form, 2, 3, 1024, 768, CPU)
        assert torch.equal(found.allowed[0, 0], allowed)
        assert (found.block_m, found.block_n) == (128, 128)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.ones(8, 6, dtype=torch.bool), "is not known"),
        ((torch.ones(8, 6, dtype=torch.bool), 10), "do not cover"),
        ((torch.ones(3, 1, 1, 1, dtype=torch.bool), 128), "the batch of a list"),
        ((torch.ones(1, dtype=torch.bool), 128), "a list of blocks is bool"),
        ((torch.ones(1, 1, dtype=torch.bool), 0), "positive int"),
    ],
)
def test_bad_lists(qk: Any, given: Any, message: str) -> None:
    with pytest.raises(InputMismatch, match=message):
        call(variants.causal, *qk, tiles=given)

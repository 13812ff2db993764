"""Every stock variant against its formula in `numpy_variants`."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy_variants
import pytest
import torch
from numpy_variants import Array, At

from scoremod import mask, variants

# fmt: off
MASKS = [
    "causal", "bottom_right_causal", "sliding_window", "symmetric_window", "asymmetric_window",
    "prefix_lm", "chunked", "block_causal", "sink_window", "a_shape", "dilated",
    "strided_sparse", "neighborhood_1d", "neighborhood_2d", "neighborhood_3d", "sliding_tile",
    "block_diffusion", "key_padding", "document", "jagged", "shared_prompt",
    "flashmask_intervals", "tree", "tree_table",
]
SCORES = [
    "alibi", "symmetric_alibi", "softcap", "relative_bias", "t5_bias", "dense_bias",
    "graph_bias", "forget_gate", "time_decay", "temperature", "head_temperature",
]
# fmt: on

EMPTY, FULL = 0, 2
B, H, HK, D = 2, 4, 2, 8
RNG = np.random.default_rng(7)


@dataclass(frozen=True)
class Case:
    """One call of a variant; `given` is what its formula takes, if not the captures."""

    name: str
    q_len: int
    kv_len: int
    captures: dict[str, Any] = field(default_factory=dict)
    q_offset: int = 0
    given: dict[str, Any] | None = None
    scale: float | None = None
    masked: bool = False  # by causal, because the paper knows no other pairs

    @property
    def variant(self) -> Any:
        stock = getattr(variants, self.name)
        return stock & variants.causal if self.masked else stock

    @property
    def formula(self) -> Callable[..., Array]:
        given = self.captures if self.given is None else self.given
        exact = {k: np.float64(x) if is_float32(x) else x for k, x in given.items()}
        return partial(getattr(numpy_variants, self.name), **exact)

    @property
    def tensors(self) -> dict[str, Any]:
        arrays = {name: x for name, x in self.captures.items() if isinstance(x, np.ndarray)}
        return self.captures | {name: torch.from_numpy(x) for name, x in arrays.items()}

    def __str__(self) -> str:
        return f"{self.name}-{self.q_len}x{self.kv_len}+{self.q_offset}"


def is_float32(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.float32


def floats(*shape: int) -> Array:
    return RNG.normal(size=shape).astype(np.float32)


def ints(*rows: list[int]) -> Array:
    return np.array(rows, np.int32)


def axes(prefix: str, **sizes: int) -> dict[str, int]:
    return {prefix + axis: size for axis, size in sizes.items()}


PARENTS = [[-1, 0, 1, 2, 2, 4, 1, 6, 6, 0, 9], [-1, 0, 0, 0, 1, 1, 2, 2, 5, 5, 9]]
TOURS = np.array([numpy_variants.euler_tour(tree) for tree in PARENTS], np.int32)
ANCESTOR = np.array(
    [[[c in numpy_variants.ancestors(p, r) for c in range(11)] for r in range(11)] for p in PARENTS]
)
GATES = RNG.uniform(0.4, 1.0, size=(B, H, 14))
# Document 0 goes on after document 1.
DOCS = ints([0, 0, 0, 5, 5, 1, 1, 1, 1, 0, 0, 3], [2] * 7 + [4] * 5)
FLASH_ROWS = np.sort(RNG.integers(0, 13, size=(B, H, 12, 4)), axis=-1).astype(np.int32)
T5 = {"bidirectional": True, "buckets": 32, "max_distance": 128}
T5_CAUSAL = T5 | {"bidirectional": False}
T5_SMALL = {"bidirectional": True, "buckets": 12, "max_distance": 20}

CASES = [
    Case("causal", 9, 9),
    Case("causal", 5, 12, q_offset=7),
    Case("causal", 5, 3),
    Case("bottom_right_causal", 4, 7),
    Case("bottom_right_causal", 7, 4),
    Case("sliding_window", 12, 12, {"window": 4}),
    Case("sliding_window", 6, 11, {"window": 3}, q_offset=5),
    Case("sliding_window", 6, 11, {"window": 0}),
    Case("symmetric_window", 12, 9, {"radius": 2}),
    Case("symmetric_window", 150, 140, {"radius": 64}),
    Case("asymmetric_window", 10, 14, {"left": 3, "right": 1}, q_offset=4),
    Case("asymmetric_window", 10, 14, {"left": -1, "right": 3}),
    Case("prefix_lm", 9, 11, {"prefix": np.array([4, 7])}, q_offset=2),
    Case("chunked", 10, 13, {"chunk": 4}, q_offset=3),
    Case("block_causal", 10, 13, {"block": 4}, q_offset=1),
    Case("sink_window", 14, 14, {"sinks": 2, "window": 3}),
    Case("a_shape", 14, 14, {"sinks": 2, "window": 3, "last": 4}),
    Case("a_shape", 9, 14, {"sinks": 1, "window": 2, "last": 3}, q_offset=5),
    Case("dilated", 16, 16, {"dilation": np.array([1, 2, 3, 5]), "window": 7}),
    Case("strided_sparse", 17, 17, {"stride": 4}),
    Case("neighborhood_1d", 12, 12, {"length": 12, "kernel": 5}),
    Case("neighborhood_1d", 7, 12, {"length": 12, "kernel": 4}, q_offset=5),
    Case("neighborhood_2d", 30, 30, {"height": 5, "width": 6, "kernel_h": 3, "kernel_w": 4}),
    Case("neighborhood_2d", 25, 25, {"height": 5, "width": 5, "kernel_h": 5, "kernel_w": 2}),
    Case(
        "neighborhood_3d",
        60,
        60,
        {"depth": 3, "height": 4, "width": 5, "kernel_d": 2, "kernel_h": 3, "kernel_w": 4},
    ),
    Case(
        "sliding_tile",
        76,
        76,
        {"tile": 3} | axes("tiles_", t=2, h=3, w=4) | axes("window_", t=1, h=3, w=2),
    ),
    Case("block_diffusion", 18, 18, {"length": 9, "block": 2}),
    Case("block_diffusion", 7, 16, {"length": 8, "block": 4}, q_offset=5),
    Case("key_padding", 6, 9, {"keep": RNG.random((B, 9)) < 0.6}),
    Case("key_padding", 140, 300, {"keep": RNG.random((1, 300)) < 0.6}),
    Case("document", 12, 12, {"doc": DOCS}),
    Case("document", 5, 12, {"doc": DOCS[:1].astype(np.int64)}, q_offset=6),
    Case("jagged", 6, 9, {"start": ints([0, 0, 3, 3, 3, 9]), "end": ints([3, 3, 6, 6, 8, 9])}),
    Case("shared_prompt", 12, 12, {"prompt": np.array([3, 5]), "answer": DOCS}),
    Case("flashmask_intervals", 12, 12, {"rows": FLASH_ROWS}),
    Case("flashmask_intervals", 7, 12, {"rows": FLASH_ROWS[:, :1]}, q_offset=4),
    Case("tree", 11, 11, {"enter": TOURS[:, 0], "leave": TOURS[:, 1]}, given={"parents": PARENTS}),
    Case(
        "tree_table",
        15,
        15,
        {"prefix": np.array([5, 4]), "ancestor": ANCESTOR},
        given={"prefix": np.array([5, 4]), "parents": PARENTS},
    ),
    Case("alibi", 9, 12, {"slopes": floats(H)}, q_offset=3),
    Case("symmetric_alibi", 9, 12, {"slopes": floats(H)}),
    Case("softcap", 9, 12, {"cap": 1.5}),
    Case("relative_bias", 9, 12, {"table": floats(H, 9), "max_distance": 4}, q_offset=2),
    Case("t5_bias", 140, 150, {"table": floats(32, H)} | T5, scale=1.0),
    Case("t5_bias", 9, 150, {"table": floats(32, H)} | T5_CAUSAL, q_offset=139, scale=1.0),
    Case("t5_bias", 40, 40, {"table": floats(12, H)} | T5_SMALL),
    Case("dense_bias", 9, 12, {"bias": floats(B, 1, 9, 12)}),
    Case("dense_bias", 4, 12, {"bias": floats(1, H, 9, 12)}, q_offset=5),
    Case("graph_bias", 9, 9, {"dist": RNG.integers(0, 6, (B, 9, 9)), "table": floats(6, H)}),
    Case(
        "forget_gate",
        12,
        14,
        {"log_decay": np.log(GATES).cumsum(-1)},
        q_offset=2,
        given={"gates": GATES},
        masked=True,
    ),
    Case(
        "time_decay",
        9,
        12,
        {"rate": abs(floats(H)), "time": abs(floats(B, 12)).cumsum(-1)},
        q_offset=3,
        masked=True,
    ),
    Case("temperature", 12, 9, {"floor_scale": 4, "strength": 0.5}, q_offset=10),
    Case("head_temperature", 9, 12, {"log_tau": np.array([0.0, 0.3, 5.0, -1.0], np.float32)}),
]
MASK_CASES = [case for case in CASES if case.name in MASKS]


def tensors(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    rng = np.random.default_rng(3)
    shapes = [(B, H, case.q_len, D), (B, HK, case.kv_len, D), (B, HK, case.kv_len, D + 3)]
    return [torch.from_numpy(rng.normal(size=shape)).to(dtype) for shape in shapes]


def expected(case: Case, qkv: list[torch.Tensor]) -> tuple[Array, Array]:
    kind = "mask" if case.name in MASKS else "score"
    q, k, v = (x.double().numpy() for x in qkv)
    formulas = {"mask": numpy_variants.causal if case.masked else None, kind: case.formula}
    return numpy_variants.attention(q, k, v, scale=case.scale, q_offset=case.q_offset, **formulas)


@pytest.mark.parametrize("case", MASK_CASES, ids=str)
def test_the_mask_is_the_formula(case: Case) -> None:
    for b, h in np.ndindex(B, H):
        found = case.variant.mask_dense(
            case.q_len, case.kv_len, b=b, h=h, q_offset=case.q_offset, **case.tensors
        ).numpy()
        # A mask alone knows no kv heads: it takes each query head for one.
        wanted = case.formula(At(b, h, h, case.q_len, case.kv_len, case.q_offset))
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(found.sum(axis=1), wanted.sum(axis=1))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_oracle_is_the_formula(case: Case) -> None:
    qkv = tensors(case, torch.float64)
    out, lse = case.variant.eager(
        *qkv, return_lse=True, scale=case.scale, q_offset=case.q_offset, **case.tensors
    )
    wanted_out, wanted_lse = expected(case, qkv)
    np.testing.assert_allclose(out, wanted_out, rtol=0, atol=1e-10)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6, atol=1e-5)  # float32 by contract


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_call_is_the_formula(case: Case) -> None:
    qkv = tensors(case, torch.float32)
    out, lse = case.variant(
        *qkv, return_lse=True, scale=case.scale, q_offset=case.q_offset, **case.tensors
    )
    wanted_out, wanted_lse = expected(case, qkv)
    np.testing.assert_allclose(out, wanted_out, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("case", MASK_CASES, ids=str)
def test_its_tiles_are_what_they_are_called(case: Case) -> None:
    captures = {"b": 1, "h": 3, "q_offset": case.q_offset} | case.tensors
    keep = case.variant.mask_dense(case.q_len, case.kv_len, **captures)
    tiles = case.variant.tiles(case.q_len, case.kv_len, block_m=3, block_n=4, **captures)
    for (row, column), kind in np.ndenumerate(tiles.kind):
        pairs = keep[3 * row : 3 * row + 3, 4 * column : 4 * column + 4]
        assert kind != EMPTY or not pairs.any()
        assert kind != FULL or pairs.all()


# ---- what the papers say about how many keys a query sees ---------------------------------------


def counts(name: str, q_len: int, kv_len: int, **captures: Any) -> list[int]:
    rows: list[int] = getattr(variants, name).mask_dense(q_len, kv_len, **captures).sum(-1).tolist()
    return rows


def test_a_window_of_w_is_w_keys_with_the_query() -> None:
    assert counts("sliding_window", 7, 7, window=3) == [1, 2, 3, 3, 3, 3, 3]


def test_flash_attention_calls_the_same_window_one_less() -> None:
    ours = variants.sliding_window.mask_dense(9, 9, window=4)
    theirs = variants.asymmetric_window.mask_dense(9, 9, left=3, right=0)
    assert torch.equal(ours, theirs)


def test_modernbert_128_is_64_on_either_side() -> None:
    rows = counts("symmetric_window", 300, 300)
    assert (rows[0], rows[64], rows[150], rows[-1]) == (65, 129, 129, 65)


def test_bottom_right_leaves_the_first_of_too_many_queries_without_a_key() -> None:
    assert counts("bottom_right_causal", 7, 4) == [0, 0, 0, 1, 2, 3, 4]
    q, kv = torch.ones(1, 1, 7, 8), torch.ones(1, 1, 4, 8)
    out, lse = variants.bottom_right_causal(q, kv, kv, return_lse=True)
    assert out[0, 0, :3].eq(0).all() and lse[0, 0, :3].eq(-torch.inf).all()
    assert out[0, 0, 3:].eq(1).all()


def test_chunks_start_over() -> None:
    assert counts("chunked", 10, 10, chunk=4) == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]


def test_a_prefix_is_seen_by_all() -> None:
    assert counts("prefix_lm", 6, 6, prefix=torch.tensor([3, 1])) == [3, 3, 3, 4, 5, 6]


def test_sinks_are_counted_once() -> None:
    assert counts("sink_window", 8, 8, sinks=2, window=3) == [1, 2, 3, 4, 5, 5, 5, 5]
    assert counts("a_shape", 8, 8, sinks=2, window=3, last=2) == [1, 2, 3, 4, 5, 5, 7, 8]


def test_a_dilated_window_sees_a_share_of_its_span() -> None:
    rows = counts("dilated", 20, 20, dilation=torch.tensor([3]), window=7)
    assert rows[-1] == 3 and rows[0] == 1


def test_strided_sees_its_stride_and_one_key_per_stride_before() -> None:
    assert counts("strided_sparse", 13, 13, stride=4)[-1] == 4 + 3


@pytest.mark.parametrize("kernel", [(1, 1), (3, 4), (4, 2), (5, 6)])
def test_a_neighbourhood_never_shrinks(kernel: tuple[int, int]) -> None:
    size = {"height": 5, "width": 6, "kernel_h": kernel[0], "kernel_w": kernel[1]}
    assert set(counts("neighborhood_2d", 30, 30, **size)) == {kernel[0] * kernel[1]}


def test_an_even_neighbourhood_has_its_extra_key_before_the_query() -> None:
    keep = variants.neighborhood_1d.mask_dense(9, 9, length=9, kernel=4)
    assert keep[4].nonzero().flatten().tolist() == [2, 3, 4, 5]
    assert keep[0].nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert keep[8].nonzero().flatten().tolist() == [5, 6, 7, 8]


def test_text_sees_the_video_and_is_seen() -> None:
    tiles = {"tile": 3} | axes("tiles_", t=2, h=3, w=3) | axes("window_", t=1, h=3, w=2)
    rows = counts("sliding_tile", 60, 60, **tiles)
    assert set(rows[:54]) == {1 * 3 * 2 * 3 + 6} and set(rows[54:]) == {60}


def test_clean_tokens_never_see_noised_ones() -> None:
    keep = variants.block_diffusion.mask_dense(16, 16, length=8, block=4)
    assert not keep[8:, :8].any()
    assert keep.sum(-1).tolist() == [4] * 4 + [8] * 4 + [4] * 4 + [8] * 4


def test_a_document_may_go_on_later() -> None:
    keep = variants.document.mask_dense(5, 5, doc=torch.tensor([[1, 2, 1, 2, 2]]))
    assert keep.int().tolist() == [[1, 0, 1, 0, 0], [0, 1, 0, 1, 1]] * 2 + [[0, 1, 0, 1, 1]]


def test_a_node_sees_its_line_to_the_root() -> None:
    enter, leave = torch.from_numpy(TOURS).unbind(1)
    assert counts("tree", 11, 11, enter=enter, leave=leave) == [1, 2, 3, 4, 4, 5, 3, 4, 4, 2, 3]


def test_nodes_alone_are_queries_after_their_prefix() -> None:
    captures = {"prefix": torch.tensor([5]), "ancestor": torch.from_numpy(ANCESTOR[:1])}
    keep = variants.tree_table.mask_dense(11, 16, q_offset=5, **captures)
    assert (keep.sum(-1) - 5).tolist() == [1, 2, 3, 4, 4, 5, 3, 4, 4, 2, 3]


def test_each_row_of_a_batch_may_have_a_prefix_of_its_own() -> None:
    captures = {"prefix": torch.tensor([5, 4]), "ancestor": torch.from_numpy(ANCESTOR)}
    q, k, v = (torch.randn(B, 2, 16, D, generator=torch.Generator().manual_seed(1)) for _ in "qkv")
    whole = variants.tree_table(q, k, v, **captures)
    nodes = torch.stack([q[0, :, 5:15], q[1, :, 4:14]])
    out = variants.tree_table(nodes, k, v, q_offset=captures["prefix"], **captures)
    torch.testing.assert_close(out[0], whole[0, :, 5:15], rtol=0, atol=1e-6)
    torch.testing.assert_close(out[1], whole[1, :, 4:14], rtol=0, atol=1e-6)


# ---- what the papers say about values -----------------------------------------------------------


@pytest.mark.parametrize("n_heads", [1, 2, 3, 6, 8, 12, 16, 20, 71])
def test_slopes_for_any_number_of_heads(n_heads: int) -> None:
    slopes = variants.alibi_slopes(n_heads)
    assert slopes.shape == (n_heads,) and slopes.dtype == torch.float32
    np.testing.assert_allclose(slopes, numpy_variants.alibi_slopes(n_heads), rtol=1e-6)


def test_the_slopes_of_the_paper() -> None:
    assert variants.alibi_slopes(8).tolist() == [2.0**-k for k in range(1, 9)]
    np.testing.assert_allclose(variants.alibi_slopes(12)[8:], [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


def test_alibi_is_the_same_wherever_the_queries_stand() -> None:
    q, k, v = tensors(CASES[0], torch.float32)
    slopes = variants.alibi_slopes(H)
    whole = (variants.alibi & variants.causal)(q, k, v, slopes=slopes)
    tail = (variants.alibi & variants.bottom_right_causal)(q[:, :, -4:], k, v, slopes=slopes)
    torch.testing.assert_close(tail, whole[:, :, -4:], rtol=0, atol=1e-6)


def test_a_cap_comes_before_the_mask() -> None:
    q, k, v = tensors(CASES[0], torch.float32)
    capped = (variants.softcap & variants.causal)(100 * q, k, v, cap=5.0)
    formulas = {"score": partial(numpy_variants.softcap, cap=5.0), "mask": numpy_variants.causal}
    wanted, _ = numpy_variants.attention(100 * q.double().numpy(), k.numpy(), v.numpy(), **formulas)
    np.testing.assert_allclose(capped, wanted, rtol=0, atol=1e-5)


def test_images_open_before_documents_close() -> None:
    """Causal or same image, and only then the window: the order of `|` and `&` matters."""

    @mask
    def image(b, i, j, img: "tensor[B, L]"):
        return img[b, i] == img[b, j] and img[b, i] >= 0

    attn = (variants.causal | image) & variants.document
    img = torch.tensor([[-1, 0, 0, -1, 1, 1]])
    doc = torch.tensor([[0, 0, 0, 0, 0, 1]])
    assert attn.mask_dense(6, 6, img=img, doc=doc).sum(-1).tolist() == [1, 3, 3, 4, 5, 1]


def test_chunks_of_a_left_padded_row_count_from_its_first_token() -> None:
    @mask
    def padded_chunks(b, i, j, pad: "tensor[B]", chunk: int):
        return (i - pad[b]) // chunk == (j - pad[b]) // chunk and pad[b] <= j <= i

    keep = padded_chunks.mask_dense(9, 9, pad=torch.tensor([2]), chunk=3)
    assert keep.sum(-1).tolist() == [0, 0, 1, 2, 3, 1, 2, 3, 1]


# ---- the list itself ----------------------------------------------------------------------------


def test_every_stock_variant_has_a_case() -> None:
    stock = {name for name, value in vars(variants).items() if hasattr(value, "mask_dense")}
    assert stock == {*MASKS, *SCORES} == {case.name for case in CASES}


@pytest.mark.parametrize("name", MASKS + SCORES)
def test_its_docstring_names_its_source_and_captures(name: str) -> None:
    stock = getattr(variants, name)
    assert re.search(r"\([^)]*[A-Z][^)]*\)", stock.__doc__), "no (paper or model)"
    for capture in stock.captures:
        assert re.search(rf"\b{capture.partition(':')[0]}\b", stock.__doc__), capture

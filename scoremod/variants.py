# The annotations below are the language's types, not Python's.
# mypy: ignore-errors
"""Stock variants: masks and scores of published models, each a few lines of the language.

    attn = alibi & causal
    out = attn(q, k, v, slopes=alibi_slopes(n_heads))

`i` counts queries from `q_offset`, `j` counts keys from 0: unless a docstring says otherwise,
query 0 stands at key 0 (top left), and queries that end a longer sequence of keys are given
`q_offset=kv_len - q_len`. In shapes, B, H, Hk, Lq and Lk are batch, query heads, kv heads, query
and key positions, L is both positions; B, H and Hk may be 1. A table may have any fitting element
type. All numbers without default are given at the call.
"""

import math

import torch

from .api import mask, variant
from .language import clamp, exp, log, tanh

# ---- masks of position alone --------------------------------------------------------------------


@mask
def causal(i, j):
    """No key after the query (decoder of Vaswani et al. 2017, "Attention is all you need").

    Top left: with fewer queries than keys, say where they start (`q_offset`) or use
    `bottom_right_causal`.
    """
    return j <= i


@mask
def bottom_right_causal(i, j, q_len, kv_len):
    """Causal, the last query standing at the last key (FlashAttention since 2.1, chunked prefill).

    Leave `q_offset` at 0: it would move the queries a second time. With more queries than keys
    the first rows have no key, and their output is 0.
    """
    return j <= i + (kv_len - q_len)


@mask
def sliding_window(i, j, window: int = 4096):
    """Causal, the query and the `window - 1` keys before it (Mistral, 4096; Gemma 2; gpt-oss, 128).

    window: how many keys a query sees, itself included, as in Hugging Face; FlashAttention's
    `left` is one less.
    """
    return j <= i and i - j < window


@mask
def symmetric_window(i, j, radius: int = 64):
    """Keys at most `radius` away on either side (Longformer; ModernBERT).

    radius: a query sees 2 * radius + 1 keys; ModernBERT's `local_attention=128` is radius 64.
    """
    return abs(i - j) <= radius


@mask
def asymmetric_window(i, j, left: int, right: int):
    """From `left` keys before the query to `right` after it (FlashAttention; Conformer).

    left, right: both included. FlashAttention's `window_size` aligns bottom right
    (`q_offset=kv_len - q_len`) and writes -1 for no limit; here a large number does that.
    """
    return -left <= j - i <= right


@mask
def prefix_lm(b, i, j, prefix: "tensor[B]"):
    """Causal, but all see the first `prefix[b]` keys (Raffel et al. 2020, T5; UniLM; PaliGemma).

    prefix: int [B], the length of each prompt.
    """
    return j < prefix[b] or j <= i


@mask
def chunked(i, j, chunk: int = 8192):
    """Causal within chunks of `chunk` positions (Llama 4, layers with RoPE).

    chunk: positions per chunk, counted from position 0. A batch padded on the left counts from
    each row's first token: write `(i - pad[b]) // chunk == (j - pad[b]) // chunk`.
    """
    return i // chunk == j // chunk and j <= i


@mask
def block_causal(i, j, block: int):
    """Causal between blocks, all to all within one (CausVid and Magi-1 frames; block decoding).

    block: positions per block.
    """
    return j // block <= i // block


@mask
def sink_window(i, j, sinks: int = 4, window: int = 4096):
    """Sliding window that keeps the first keys (Xiao et al. 2023, StreamingLLM; LM-Infinite).

    sinks: how many first keys every later query sees. window: as in `sliding_window`.
    """
    return j <= i and (j < sinks or i - j < window)


@mask
def a_shape(i, j, kv_len, sinks: int = 64, window: int = 4096, last: int = 128):
    """Sinks, a window, and a dense tail of queries (MInference's A-shape; TriangleMix).

    sinks, window: as in `sink_window`. last: queries within the last `last` of `kv_len` positions
    see every key up to themselves; 0 is the plain A-shape.
    """
    return j <= i and (j < sinks or i - j < window or i >= kv_len - last)


@mask
def dilated(h, i, j, dilation: "tensor[H]", window: int):
    """Causal window of every `dilation[h]`-th key (Beltagy et al. 2020, Longformer).

    dilation: int [H], 1 for none. window: positions spanned, so ceil(window / dilation[h]) keys;
    Longformer counts keys.
    """
    return 0 <= i - j < window and (i - j) % dilation[h] == 0


@mask
def strided_sparse(i, j, stride: int):
    """The last `stride` keys and every `stride`-th before (Child et al. 2019, Sparse Transformer).

    stride: about the square root of the length.
    """
    return j <= i and (i - j < stride or (i - j) % stride == 0)


# ---- neighbourhoods and tiles in space ----------------------------------------------------------


def _near(y, x, length, kernel):
    """Whether x is in the window of y: `kernel` wide, shifted inwards at borders, never shrunk.

    An even kernel has one more before y than after it, as in NATTEN.
    """
    start = max(min(y - kernel // 2, length - kernel), 0)
    return start <= x < start + kernel


@mask
def neighborhood_1d(i, j, length: int, kernel: int = 7):
    """The `kernel` nearest positions on a line (Hassani et al. 2023, NAT; NATTEN `na1d`).

    length: of the line. kernel: at most `length`; at a border the window shifts and keeps its
    size, and an even one has its extra position before the query.
    """
    return _near(i, j, length, kernel)


@mask
def neighborhood_2d(i, j, height: int, width: int, kernel_h: int = 7, kernel_w: int = 7):
    """The `kernel_h` x `kernel_w` window around a pixel (Hassani et al. 2023, NAT; NATTEN `na2d`).

    height, width: of the image, stored row by row. Each axis as in `neighborhood_1d`.
    """
    rows = _near(i // width, j // width, height, kernel_h)
    return rows and _near(i % width, j % width, width, kernel_w)


@mask
def neighborhood_3d(
    i,
    j,
    depth: int,
    height: int,
    width: int,
    kernel_d: int = 3,
    kernel_h: int = 7,
    kernel_w: int = 7,
):
    """The `kernel_d` x `kernel_h` x `kernel_w` window around a voxel (NATTEN `na3d`; video models).

    depth, height, width: of the volume, stored slice by slice and row by row. Each axis as in
    `neighborhood_1d`.
    """
    slices = _near(i // (height * width), j // (height * width), depth, kernel_d)
    rows = _near(i // width % height, j // width % height, height, kernel_h)
    return slices and rows and _near(i % width, j % width, width, kernel_w)


@mask
def sliding_tile(
    i,
    j,
    tile: int,
    tiles_t: int,
    tiles_h: int,
    tiles_w: int,
    window_t: int = 3,
    window_h: int = 3,
    window_w: int = 3,
):
    """Neighbourhood of whole tiles of a video, then text (Zhang et al. 2025, STA; FastVideo).

    tile: tokens per tile, stored tile by tile. tiles_t, tiles_h, tiles_w: tiles per axis.
    window_t, window_h, window_w: tiles seen per axis, as in `neighborhood_3d`. Tokens after the
    video are text: they see all and are seen by all; hide padded text with `key_padding` or
    `kv_lens`.
    """
    video = tile * tiles_t * tiles_h * tiles_w
    a, c = i // tile, j // tile
    frames = _near(a // (tiles_h * tiles_w), c // (tiles_h * tiles_w), tiles_t, window_t)
    rows = _near(a // tiles_w % tiles_h, c // tiles_w % tiles_h, tiles_h, window_h)
    columns = _near(a % tiles_w, c % tiles_w, tiles_w, window_w)
    return i >= video or j >= video or (frames and rows and columns)


@mask
def block_diffusion(i, j, length: int, block: int):
    """Training mask of block diffusion over [noised, clean] (Arriola et al. 2025, BD3-LM).

    length: of the sequence, given twice: noised in 0..length-1, clean from `length` on. block:
    tokens denoised together. A noised block sees itself and the clean blocks strictly before it;
    a clean block sees clean blocks up to itself and nothing noised.
    """
    i_noised, j_noised = i < length, j < length
    i_block, j_block = i % length // block, j % length // block
    within = i_block == j_block and i_noised == j_noised
    return within or (not j_noised and (j_block < i_block if i_noised else j_block <= i_block))


# ---- masks that read tables ---------------------------------------------------------------------


@mask
def key_padding(b, j, keep: "bool[B, Lk]"):
    """Keys that are real tokens (BERT and every padded batch; Hugging Face's 2-D `attention_mask`).

    keep: bool [B, Lk], True at tokens. Padding on the right alone may also be given as `kv_lens`.
    """
    return keep[b, j]


@mask
def document(b, i, j, doc: "tensor[B, L]"):
    """Only keys of the query's document (Krell et al. 2021, packing; Llama 3).

    In a language model: `document & causal`.

    doc: int [B, L], a number per token. Compared by equality: a number used again later is the
    same document.
    """
    return doc[b, i] == doc[b, j]


@mask
def jagged(b, i, j, start: "tensor[B, Lq]", end: "tensor[B, Lq]"):
    """Keys start <= j < end of each query (variable-length calls by offsets; Qwen2.5-VL windows).

    start, end: int [B, Lq]; from offsets `cu`, the two that enclose the query.
    """
    return start[b, i] <= j < end[b, i]


@mask
def shared_prompt(b, i, j, prompt: "tensor[B]", answer: "tensor[B, L]"):
    """One prompt, many answers that do not see each other (FlashMask; DPO and GRPO packing).

    prompt: int [B], its length. answer: int [B, L], the number of the answer a token belongs to.
    """
    return j <= i and (j < prompt[b] or answer[b, i] == answer[b, j])


@mask
def flashmask_intervals(b, hk, i, j, rows: "tensor[B, Hk, Lk, 4]"):
    """Two intervals of queries hidden from each key (Wang et al. 2024, FlashMask; PaddlePaddle).

    rows: int [B, Hk, Lk, 4] as PaddlePaddle's `startend_row_indices`: where the lower interval
    starts and ends (the end is seen again), and the upper one. Query heads that share a kv head
    share its intervals.
    """
    lower = rows[b, hk, j, 0] <= i < rows[b, hk, j, 1]
    upper = rows[b, hk, j, 2] <= i < rows[b, hk, j, 3]
    return not (lower or upper)


@mask
def tree(b, i, j, enter: "tensor[B, L]", leave: "tensor[B, L]"):
    """The query's ancestors and itself, by Euler tour (SpecInfer; Sequoia; shared roll-outs).

    enter, leave: int [B, L], when a depth-first walk enters and leaves a node. A prompt is a
    chain: its k-th token enters at k and leaves last.
    """
    return enter[b, j] <= enter[b, i] < leave[b, j]


@mask
def tree_table(b, i, j, prefix: "tensor[B]", ancestor: "bool[B, Nodes, Nodes]"):
    """A prefix seen by all, then a tree given as a table (Medusa; EAGLE-2 verification).

    prefix: int [B], its length, where the nodes start; give `q_offset=prefix` when only nodes are
    queries. ancestor: bool [B, nodes, nodes], whether node `column` is an ancestor of node `row` or
    `row` itself.
    """
    return j < prefix[b] or ancestor[b, i - prefix[b], j - prefix[b]]


# ---- scores -------------------------------------------------------------------------------------


def alibi_slopes(n_heads: int) -> torch.Tensor:
    """The slopes of Press et al. 2022 for any number of heads, float32 [n_heads].

    A power of two n has 2**(-8/n), 2**(-16/n), ...; another number takes those of the power of
    two below it and then every other one of the power above it, as BLOOM and MPT do.
    """

    def slopes(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (k + 1) / n) for k in range(n)]

    below = 2 ** int(math.log2(n_heads))
    return torch.tensor(slopes(below) + slopes(2 * below)[0::2][: n_heads - below])


@variant
def alibi(s, h, i, j, slopes: "tensor[H]"):
    """Penalty that grows with distance (Press et al. 2022, ALiBi; BLOOM, MPT). For causal masks.

    slopes: float [H], positive; `alibi_slopes(n_heads)`. Only distances count, so that `q_offset`
    changes the LSE but not the output.
    """
    return s - slopes[h] * (i - j)


@variant
def symmetric_alibi(s, h, i, j, slopes: "tensor[H]"):
    """ALiBi for encoders: the penalty grows on both sides (JinaBERT).

    slopes: as in `alibi`.
    """
    return s - slopes[h] * abs(i - j)


@variant
def softcap(s, cap: float = 50.0):
    """Scores squeezed into -cap..cap before the mask (Gemma 2, 50; Grok-1, 30).

    cap: in units of the scaled score.
    """
    return cap * tanh(s / cap)


@variant
def relative_bias(s, h, i, j, table: "tensor[H, Distances]", max_distance: int):
    """A learned number per head and clipped distance (Shaw et al. 2018, scalar form; BEiT).

    table: float [H, 2 * max_distance + 1]; column `max_distance` is distance 0, columns above it
    are keys before the query (i > j). max_distance: farther keys share the last column of their
    side.
    """
    return s + table[h, clamp(i - j, -max_distance, max_distance) + max_distance]


def _t5_bucket(distance, bidirectional, buckets, max_distance):
    """T5's bucket of a distance j - i: half are exact, the others grow with its logarithm."""
    side = buckets // 2 if bidirectional else buckets
    first = side if bidirectional and distance > 0 else 0
    n = abs(distance) if bidirectional else max(-distance, 0)
    exact = side // 2
    growth = log(max(n, exact) / exact) / log(max_distance / exact)
    return first + (n if n < exact else min(exact + int(growth * (side - exact)), side - 1))


@variant
def t5_bias(
    s,
    h,
    i,
    j,
    table: "tensor[Buckets, H]",
    bidirectional: bool = True,
    buckets: int = 32,
    max_distance: int = 128,
):
    """A learned number per head and bucket of distances (Raffel et al. 2020, T5).

    T5 does not scale by 1/sqrt(D): call with `scale=1.0`.

    table: float [buckets, H], the weight of `relative_attention_bias`. bidirectional: True in
    encoders (half of the buckets are for keys after the query), False in decoders, with `causal`.
    max_distance: from there on, all keys of a side share its last bucket.
    """
    return s + table[_t5_bucket(j - i, bidirectional, buckets, max_distance), h]


@variant
def dense_bias(s, b, h, i, j, bias: "tensor[B, H, Lq, Lk]"):
    """A number for every pair (AlphaFold's pair bias, Evoformer; any additive `attn_mask`).

    bias: float [B, H, Lq, Lk].
    """
    return s + bias[b, h, i, j]


@variant
def graph_bias(s, b, h, i, j, dist: "tensor[B, Lq, Lk]", table: "tensor[Hops, H]"):
    """A learned number per head and distance in a graph (Ying et al. 2021, Graphormer).

    dist: int [B, Lq, Lk], hops between nodes, clipped to the table, with a number of their own
    where there is no path. table: float [hops, H].
    """
    return s + table[dist[b, i, j], h]


@variant
def forget_gate(s, b, h, i, j, log_decay: "tensor[B, H, L]"):
    """Keys behind closed gates are forgotten (Lin et al. 2025, FoX). With `causal`.

    log_decay: float [B, H, L], `log_f.cumsum(-1)` of the log forget gates: a pair gets the sum
    over j+1..i.
    """
    return s + (log_decay[b, h, i] - log_decay[b, h, j])


@variant
def time_decay(s, b, h, i, j, rate: "tensor[H]", time: "tensor[B, L]"):
    """Penalty that grows with elapsed time (Hawkes processes; recommenders). With `causal`.

    rate: float [H], per unit of time. time: [B, L], when each event happened.
    """
    return s - rate[h] * (time[b, i] - time[b, j])


@variant
def temperature(s, i, floor_scale: int = 8192, strength: float = 0.1):
    """Sharper scores at far positions, against fading over length (Llama 4, layers without RoPE).

    s * (1 + strength * log(1 + floor((i + 1) / floor_scale))). A temperature learned per head is
    `head_temperature`.
    """
    return s * (1.0 + strength * log(1.0 + (i + 1) // floor_scale))


@variant
def head_temperature(s, h, log_tau: "tensor[H]"):
    """A learned temperature per head, by its logarithm (Henry et al. 2020, QK-norm; Swin v2).

    log_tau: float [H]; the score is multiplied by min(exp(log_tau), 100).
    """
    return s * min(exp(log_tau[h]), 100.0)

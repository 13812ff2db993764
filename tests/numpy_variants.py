"""The stock variants once more, in NumPy and from their papers, to check `scoremod.variants`.

A mask is a function `(at, **captures) -> keep`, a score `(at, s, **captures) -> s`, both [q_len,
kv_len] for one batch and head. They share no formula with the variants where a definition can be
followed literally: windows are shifted, trees are climbed, gates are multiplied, volumes are laid
out.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray  # of any element type


@dataclass(frozen=True)
class At:
    """The pairs of one batch and head; row r is the query at `q_offset + r`, column c is key c."""

    b: int
    h: int
    hk: int
    q_len: int
    kv_len: int
    q_offset: int = 0

    @property
    def queries(self) -> range:
        return range(self.q_offset, self.q_offset + self.q_len)

    @property
    def keys(self) -> range:
        return range(self.kv_len)

    def by_query(self, keys_of) -> Array:
        """The mask where query i sees the keys in the collection `keys_of(i)`."""
        keep = np.zeros((self.q_len, self.kv_len), bool)
        for row, i in enumerate(self.queries):
            seen = [j for j in keys_of(i) if 0 <= j < self.kv_len]
            keep[row, seen] = True
        return keep

    def by_pair(self, value, dtype=bool) -> Array:
        """The matrix of `value(i, j)`."""
        cells = [[value(i, j) for j in self.keys] for i in self.queries]
        return np.array(cells, dtype).reshape(self.q_len, self.kv_len)


def at_batch(table: Array, b: int) -> Array:
    """Row b of a table whose first dimension is the batch, or 1 for all."""
    return table[b if table.shape[0] > 1 else 0]


# ---- masks of position alone --------------------------------------------------------------------


def causal(at):
    return np.tri(at.q_len, at.kv_len, at.q_offset, dtype=bool)


def bottom_right_causal(at):
    """The triangle whose last row is full."""
    return np.tri(at.q_len, at.kv_len, at.kv_len - at.q_len, dtype=bool)


def sliding_window(at, window):
    return at.by_query(lambda i: range(i - window + 1, i + 1))


def symmetric_window(at, radius):
    return at.by_query(lambda i: range(i - radius, i + radius + 1))


def asymmetric_window(at, left, right):
    return at.by_query(lambda i: range(i - left, i + right + 1))


def prefix_lm(at, prefix):
    keep = causal(at)
    keep[:, : at_batch(prefix, at.b)] = True
    return keep


def chunked(at, chunk):
    return at.by_query(lambda i: range(i - i % chunk, i + 1))


def block_causal(at, block):
    return at.by_query(lambda i: range((i // block + 1) * block))


def sink_window(at, sinks, window):
    return at.by_query(lambda i: {*range(min(sinks, i + 1)), *range(i - window + 1, i + 1)})


def a_shape(at, sinks, window, last):
    keep = sink_window(at, sinks, window)
    tail = np.array(at.queries) >= at.kv_len - last
    keep[tail] = causal(at)[tail]
    return keep


def dilated(at, dilation, window):
    return at.by_query(lambda i: range(i, i - window, -int(at_batch(dilation, at.h))))


def strided_sparse(at, stride):
    """Child et al.: {t, ..., i} with t = max(0, i - l), and {j : (i - j) mod l = 0}."""
    return at.by_query(
        lambda i: {*range(max(0, i - stride), i + 1), *range(i % stride, i + 1, stride)}
    )


# ---- neighbourhoods and tiles in space ----------------------------------------------------------


def axis_window(center: int, length: int, kernel: int) -> set[int]:
    """`kernel` positions around `center`, an extra one before it, pushed inside [0, length)."""
    window = np.arange(kernel) + center - kernel // 2
    while window[0] < 0:
        window += 1
    while window[-1] >= length:
        window -= 1
    return set(window.tolist())


def neighborhood(at, shape, kernel):
    """Neighbourhood attention on a grid of any dimension, stored in row-major order."""
    cells = int(np.prod(shape))
    place = np.stack(np.unravel_index(np.arange(cells), shape), axis=-1)

    def keys_of(i):
        windows = [
            axis_window(*axis) for axis in zip(place[i].tolist(), shape, kernel, strict=True)
        ]
        return [
            j
            for j in range(cells)
            if all(c in w for c, w in zip(place[j].tolist(), windows, strict=True))
        ]

    return at.by_query(keys_of)


def neighborhood_1d(at, length, kernel):
    return neighborhood(at, (length,), (kernel,))


def neighborhood_2d(at, height, width, kernel_h, kernel_w):
    return neighborhood(at, (height, width), (kernel_h, kernel_w))


def neighborhood_3d(at, depth, height, width, kernel_d, kernel_h, kernel_w):
    return neighborhood(at, (depth, height, width), (kernel_d, kernel_h, kernel_w))


def sliding_tile(at, tile, tiles_t, tiles_h, tiles_w, window_t, window_h, window_w):
    """Neighbourhood attention between tiles, blown up to tokens; text rows and columns are full."""
    tiles = tiles_t * tiles_h * tiles_w
    grid = At(at.b, at.h, at.hk, tiles, tiles)
    near = neighborhood(grid, (tiles_t, tiles_h, tiles_w), (window_t, window_h, window_w))
    n = max(at.q_offset + at.q_len, at.kv_len, tiles * tile)
    keep = np.ones((n, n), bool)
    keep[: tiles * tile, : tiles * tile] = np.kron(near, np.ones((tile, tile), bool))
    return keep[at.q_offset : at.q_offset + at.q_len, : at.kv_len]


def block_diffusion(at, length, block):
    """Arriola et al.: [[block diagonal, offset block causal], [0, block causal]]."""
    blocks = np.arange(length) // block
    same, before = np.equal.outer(blocks, blocks), np.greater.outer(blocks, blocks)
    keep = np.block([[same, before], [np.zeros_like(same), same | before]])
    return keep[at.q_offset : at.q_offset + at.q_len, : at.kv_len]


# ---- masks that read tables ---------------------------------------------------------------------


def key_padding(at, keep):
    return np.tile(at_batch(keep, at.b)[: at.kv_len], (at.q_len, 1))


def document(at, doc):
    members = {}
    for position, name in enumerate(at_batch(doc, at.b).tolist()):
        members.setdefault(name, []).append(position)
    return at.by_query(lambda i: members[at_batch(doc, at.b).tolist()[i]])


def jagged(at, start, end):
    return at.by_query(lambda i: range(at_batch(start, at.b)[i], at_batch(end, at.b)[i]))


def shared_prompt(at, prompt, answer):
    answers = document(at, answer)
    answers[:, : at_batch(prompt, at.b)] = True
    return np.logical_and(answers, causal(at))


def flashmask_intervals(at, rows):
    keep = np.ones((at.q_offset + at.q_len, at.kv_len), bool)
    by_head = at_batch(rows, at.b)
    for j, (lts, lte, uts, ute) in enumerate(at_batch(by_head, at.hk)[: at.kv_len]):
        keep[lts:lte, j] = False
        keep[uts:ute, j] = False
    return keep[at.q_offset :]


def ancestors(parent: list[int], node: int) -> list[int]:
    """The node and all above it; a root's parent is -1."""
    line = []
    while node >= 0:
        line.append(node)
        node = parent[node]
    return line


def euler_tour(parent: list[int]) -> tuple[list[int], list[int]]:
    """When a depth-first walk enters and leaves each node."""
    children = {}
    for node, above in enumerate(parent):
        children.setdefault(above, []).append(node)
    enter, leave, clock = [0] * len(parent), [0] * len(parent), 0

    def walk(node):
        nonlocal clock
        enter[node], clock = clock, clock + 1
        for child in children.get(node, []):
            walk(child)
        leave[node] = clock

    for root in children[-1]:
        walk(root)
    return enter, leave


def tree(at, parents):
    """`parents[b][k]` is the node above node k."""
    return at.by_query(lambda i: ancestors(parents[at.b], i))


def tree_table(at, prefix, parents):
    """Nodes follow a prefix that all see."""
    start = int(at_batch(prefix, at.b))
    return at.by_query(
        lambda i: [
            *range(start),
            *(start + k for k in (ancestors(parents[at.b], i - start) if i >= start else [])),
        ]
    )


# ---- scores -------------------------------------------------------------------------------------


def alibi_slopes(n_heads):
    """Press et al., section 3, and their rule for other numbers of heads."""
    if n_heads & (n_heads - 1) == 0:
        first = 2 ** (-8 / n_heads)
        return first ** np.arange(1, n_heads + 1)
    below = 1 << (n_heads.bit_length() - 1)
    return np.concatenate([alibi_slopes(below), alibi_slopes(2 * below)[::2][: n_heads - below]])


def alibi(at, s, slopes):
    """Each step back costs one slope."""
    return s + slopes[at.h] * at.by_pair(lambda i, j: j - i, float)


def symmetric_alibi(at, s, slopes):
    return s - slopes[at.h] * at.by_pair(lambda i, j: max(i, j) - min(i, j), float)


def softcap(at, s, cap):
    """cap * tanh(s / cap), by the exponential form of tanh."""
    grown = np.exp(2 * s / cap)
    return cap * (grown - 1) / (grown + 1)


def relative_bias(at, s, table, max_distance):
    by_distance = {d: table[at.h, d + max_distance] for d in range(-max_distance, max_distance + 1)}
    return s + at.by_pair(
        lambda i, j: by_distance[max(-max_distance, min(max_distance, i - j))], float
    )


@cache
def t5_bucket(distance, bidirectional, buckets, max_distance):
    """T5's bucket of `j - i`, in exact arithmetic.

    Above `exact`, bucket `exact + k` starts at the distance n with (n / exact) ** steps =
    (max_distance / exact) ** k.
    """
    side = buckets // 2 if bidirectional else buckets
    first = side if bidirectional and distance > 0 else 0
    n = abs(distance) if bidirectional else max(0, -distance)
    exact = side // 2
    if n < exact:
        return first + n
    steps = side - exact
    grown, top = Fraction(n, exact) ** steps, Fraction(max_distance, exact)
    passed = sum(grown >= top**k for k in range(1, steps))
    return first + exact + passed


def t5_bias(at, s, table, bidirectional, buckets, max_distance):
    return s + at.by_pair(
        lambda i, j: table[t5_bucket(j - i, bidirectional, buckets, max_distance), at.h], float
    )


def dense_bias(at, s, bias):
    by_head = at_batch(at_batch(bias, at.b), at.h)
    return s + by_head[at.q_offset : at.q_offset + at.q_len, : at.kv_len]


def graph_bias(at, s, dist, table):
    hops = at_batch(dist, at.b)[at.q_offset : at.q_offset + at.q_len, : at.kv_len]
    return s + np.eye(len(table))[hops] @ table[:, at.h]


def forget_gate(at, s, gates):
    """A pair weighs the product of the gates f_l over j < l <= i; `gates` are the f."""
    f = gates[at.b, at.h]
    return s + at.by_pair(lambda i, j: np.log(np.prod(f[j + 1 : i + 1])), float)


def time_decay(at, s, rate, time):
    """A weight that falls by exp(-rate) each unit of time."""
    clock = at_batch(time, at.b)
    return s + np.log(np.exp(-rate[at.h]) ** at.by_pair(lambda i, j: clock[i] - clock[j], float))


def temperature(at, s, floor_scale, strength):
    position = np.array(at.queries, float) + 1
    return s * (np.log(np.floor(position / floor_scale) + 1) * strength + 1)[:, None]


def head_temperature(at, s, log_tau):
    return s * np.minimum(np.exp(log_tau), 100)[at.h]


# ---- attention ----------------------------------------------------------------------------------


def attention(q, k, v, mask=None, score=None, scale=None, q_offset=0):
    """Return softmax attention and its LSE; `mask(at)` and `score(at, s)` say what changes."""
    batch, q_heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    out, lse = (
        np.zeros((batch, q_heads, q_len, v.shape[-1])),
        np.full((batch, q_heads, q_len), -np.inf),
    )
    for b, h in np.ndindex(batch, q_heads):
        at = At(b, h, h // (q_heads // kv_heads), q_len, kv_len, q_offset)
        s = q[b, h] @ k[b, at.hk].T * (head_dim**-0.5 if scale is None else scale)
        s = s if score is None else score(at, s)
        keep = np.ones_like(s, bool) if mask is None else mask(at)
        for row in np.flatnonzero(keep.any(axis=1)):
            seen = np.flatnonzero(keep[row])
            weight = np.exp(s[row, seen] - s[row, seen].max())
            out[b, h, row] = weight @ v[b, at.hk, seen] / weight.sum()
            lse[b, h, row] = s[row, seen].max() + np.log(weight.sum())
    return out, lse

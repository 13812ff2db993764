"""The catalogue of masks (variants.md) with realistic parameters, for soundness and tightness.

for entry in catalogue(1024): entry.number, entry.name, entry.mask, entry.values
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from scoremod.frontend.text import parse_expression
from scoremod.ir.expr import Expr
from scoremod.ir.ops import Type

WIDTH = {1024: 32, 1000: 40, 1537: 29}  # of a 2-D grid of about that many tokens


@dataclass(frozen=True)
class Entry:
    """One mask: its number in variants.md, its text and its captures."""

    number: str
    name: str
    text: str
    values: dict[str, Any]

    @property
    def mask(self) -> Expr:
        """The mask itself."""
        kinds = {"b": Type.BOOL, "i": Type.INT, "f": Type.FLOAT}
        types = {k: kinds[np.asarray(v).dtype.kind] for k, v in self.values.items()}
        return parse_expression(self.text, types)


def start(x: str, k: int | str, n: int | str) -> str:
    """The first of k neighbours of x in 0..n-1, the window shifted inwards at the ends."""
    return f"min(max({x} - {k} // 2, 0), {n} - {k})"


def near(x: str, y: str, k: int, n: int | str) -> str:
    """Whether y is one of the k neighbours of x."""
    return f"({start(x, k, n)} <= {y} and {y} < {start(x, k, n)} + {k})"


def both(text: str) -> tuple[str, str]:
    """A text about x, for i and for j."""
    return text.replace("x", "i"), text.replace("x", "j")


def catalogue(n: int, seed: int = 0, docs: int = 10) -> Iterator[Entry]:
    """Every mask for n positions, tables that long, packed from so many documents."""
    r = np.random.default_rng(seed)
    for part in (positions, grids, blocks, tables):
        for number, name, text, values in part(n, r, docs):
            yield Entry(number, name, text, {k: np.asarray(v) for k, v in values.items()})


Row = tuple[str, str, str, dict[str, Any]]


def positions(n: int, r: np.random.Generator, docs: int) -> Iterator[Row]:
    """Masks of position alone."""
    yield "2", "causal", "j <= i", {}
    yield "3", "bottom-right causal", "j <= i + O", {"O": n // 3}
    yield "4", "shifted causal", "j <= i - k", {"k": 17}
    yield "5", "anti-causal", "j >= i", {}
    yield "6", "sliding window", "j <= i and i - j < W", {"W": 300}
    yield "6b", "sliding window, W <= 0", "j <= i and i - j < W", {"W": -5}
    yield "7", "symmetric window", "abs(i - j) <= w", {"w": 64}
    yield "8", "asymmetric window", "-L <= j - i and j - i <= R", {"L": 200, "R": 40}
    yield "13", "prefix LM", "j < P or j <= i", {"P": 333}
    yield "19", "sink + window", "j <= i and (j < n or i - j < W)", {"n": 4, "W": 256}
    yield (
        "20", "A-shape, dense tail", "j <= i and (j < n or i - j < W or i >= Q - 128)",
        {"n": 64, "W": 200, "Q": n},
    )  # fmt: skip
    yield (
        "21", "per-head mix", "j <= i and (full == 1 or j < 4 or i - j < W)",
        {"full": 0, "W": 256},
    )  # fmt: skip
    yield "35", "Transformer-XL memory", "j <= i + M", {"M": 256}
    yield "42", "U-shape", "j < 100 or abs(i - j) < 90 or i >= n - 100", {"n": n}
    yield "43", "key padding right and left", "j < len and j >= lp", {"len": n - 137, "lp": 90}
    yield "45", "cross attention padding", "j < kl and i < ql", {"kl": n - 300, "ql": n - 100}
    yield (
        "62", "HSTU context, target", "i < nc and j < nh or j <= i and (j < nh or i == j)",
        {"nc": 50, "nh": n - 200},
    )  # fmt: skip
    yield "78", "ring shard, striped", "j * 4 + ko <= i * 4 + qo", {"ko": 3, "qo": 1}
    yield "9", "chunked causal", "i // 192 == j // 192 and j <= i", {}
    yield (
        "9b", "chunked causal, left pad",
        "(i - lp) // 192 == (j - lp) // 192 and j <= i and j >= lp", {"lp": 70},
    )  # fmt: skip
    yield "10", "block local + look back", "0 <= i // 48 - j // 48 and i // 48 - j // 48 <= 3", {}
    yield "11", "block causal", "j // 48 <= i // 48", {}
    yield (
        "12", "block causal, left limit", "0 <= i // 100 - j // 100 and i // 100 - j // 100 < L",
        {"L": 3},
    )  # fmt: skip
    yield "14", "dilated window", "0 <= i - j and i - j < 512 and (i - j) % r == 0", {"r": 4}
    yield "14b", "dilated, r > tile", "0 <= i - j and (i - j) % r == 0", {"r": 300}
    yield "15", "strided sparse", "j <= i and (i - j < l or (i - j) % l == 0)", {"l": 400}
    yield "16", "fixed sparse", "j <= i and (i // 256 == j // 256 or j % 256 >= 256 - 32)", {}
    yield (
        "17", "LongNet segment", "i // 256 == j // 256 and i % 4 == h0 % 4 and j % 4 == h0 % 4",
        {"h0": 5},
    )  # fmt: skip
    yield "18", "LogSparse", "i - j >= 0 and (((i - j) & (i - j - 1)) == 0 or i - j < 32)", {}


def grids(n: int, r: np.random.Generator, docs: int) -> Iterator[Row]:
    """Neighbourhoods and frames."""
    w = WIDTH.get(n, 32)
    h = -(-n // w)
    (yi, yj), (xi, xj) = both(f"x // {w}"), both(f"x % {w}")
    yield "22r", "axial rows", f"{yi} == {yj}", {}
    yield "22c", "axial columns", f"{xi} == {xj}", {}
    yield "23", "criss-cross", f"{yi} == {yj} or {xi} == {xj}", {}
    (a, c), (b, e) = both(f"(x // {w} + 3) % {h} // 8"), both(f"(x % {w} + 3) % {w} // 8")
    yield "24", "shifted window (Swin)", f"{a} == {c} and {b} == {e}", {}
    yield "25", "neighbourhood 1-D", near("i", "j", 129, "n"), {"n": n}
    yield "26", "neighbourhood 2-D", f"{near(yi, yj, 7, h)} and {near(xi, xj, 7, w)}", {}
    t = -(-n // 96)
    parts = (("x // 96", 3, t), ("x // 8 % 12", 5, 12), ("x % 8", 5, 8))
    text = " and ".join(near(*both(x), k, m) for x, k, m in parts)
    yield "27", "neighbourhood 3-D", text, {}
    same = f"{yi} % 2 == {yj} % 2 and {xi} % 2 == {xj} % 2"
    dilated = (near(f"{p} // 2", f"{q} // 2", 5, m // 2) for p, q, m in ((yi, yj, h), (xi, xj, w)))
    yield "28", "dilated neighbourhood 2-D", f"{same} and {' and '.join(dilated)}", {}
    text = f"0 <= {yi} - {yj} and {yi} - {yj} < 7 and {near(xi, xj, 7, w)}"
    yield "29", "causal neighbourhood 2-D", text, {}
    lead = [f"min({x} // 4 * 4 + 2, {m} - 1)" for x, m in ((yi, h), (xi, w))]
    text = f"{near(lead[0], yj, 8, h)} and {near(lead[1], xj, 8, w)}"
    yield "30", "strided neighbourhood 2-D (GNA)", text, {}
    slabs = f"{near(*both('x // 512'), 1, 2)} and {near(*both('x // 128 % 4'), 3, 4)}"
    text = f"{slabs} or i >= nv or j >= nv"
    yield "31", "sliding tile attention + text", text, {"nv": n - 100}
    yield "32s", "spatial head", "abs(i // 96 - j // 96) <= 1 or j // 96 == 0", {}
    yield "32t", "temporal head", "i % 96 == j % 96 or j // 96 == 0", {}
    power = "(1 << ilog2(max(abs(i // 96 - j // 96), 1)))"
    yield "33", "radial", f"abs(i % 96 - j % 96) <= (N + {power} - 1) // {power}", {"N": 80}
    text = "j // 96 <= i // 96 and (j // 96 < 1 or i // 96 - j // 96 < 4)"
    yield "34", "frame causal + sink frames", text, {}


def blocks(n: int, r: np.random.Generator, docs: int) -> Iterator[Row]:
    """Generation, caches, random blocks."""
    bi, bj = both("x % n // 48")
    text = (
        f"{bi} == {bj} and (i < n) == (j < n) or {bj} < {bi} and i < n and j >= n"
        f" or {bj} <= {bi} and i >= n and j >= n"
    )
    yield "36", "block diffusion", text, {"n": n // 2}
    text = "j < q and j <= i - 1 and j < len or j >= q and (j - i) % q == 0 and j % q < len"
    yield "37", "EAGLE-3 unrolled", text, {"q": n // 3, "len": n // 3 - 40}
    text = "j < P or (j - P) // 16 == i // 16 and (j - P) % 16 <= i % 16"
    yield "38", "draft blocks", text, {"P": n // 2}
    c = n // 4 + 1
    pos = f"where(x < {c}, x + rank * {c}, x - {c} + (3 - rank) * {c})"
    pi, pj = pos.replace("x", "i"), pos.replace("x", "j")
    yield "39", "zigzag context parallel", f"{pj} <= {pi}", {"rank": 1}
    slot = "(t - (t - j) % Wc)"  # slot j of a ring holds the newest position of its residue
    text = f"{slot} <= i and i - {slot} < Wc and {slot} >= 0"
    yield "63", "rolling cache", text, {"t": n - 1, "Wc": n // 2 + 5}
    text = "abs(i // 64 - j // 64) <= 1 or i // 64 < 1 or j // 64 < 1 or R[i // 64, j // 64]"
    yield "41", "BigBird", text, {"R": r.random((-(-n // 64), -(-n // 64))) < 0.1}
    tree = np.tril(r.random((n, 64)) < 0.3)
    yield "65", "tree attention", "j < P or anc[i, j - P]", {"P": n - 64, "anc": tree}
    chosen = r.random((-(-n // 128), -(-n // 64))) < 0.25
    yield "72", "block top-k", "j <= i and sel[i // 128, j // 64]", {"sel": chosen}
    mixed = "(i // 64 * 405 + j // 64 * 311 + seed) * 26544"
    yield "40", "hashed random blocks", f"({mixed} >> 8 & 1023) < 200", {"seed": 11}


def tables(n: int, r: np.random.Generator, docs: int) -> Iterator[Row]:
    """Masks that read a table by i or by j."""
    cuts = np.sort(r.choice(np.arange(1, n), docs - 1, replace=False))
    bounds = np.r_[0, cuts, n]
    doc = np.searchsorted(cuts, np.arange(n), side="right")
    first, end = bounds[doc], bounds[doc + 1]
    at = np.arange(n)
    same = "doc[i] == doc[j]"
    yield "44", "arbitrary key padding", "keep[j]", {"keep": at // 50 % 5 != 2}
    yield "46", "documents", same, {"doc": doc}
    yield "46b", "documents, ids repeat", same, {"doc": doc % 4 * 7}
    yield "47", "documents and causal", f"{same} and j <= i", {"doc": doc}
    yield "47b", "documents, causal, window", f"{same} and j <= i and i - j < 150", {"doc": doc}
    text = f"{same} and j <= i and pos[i] // 64 == pos[j] // 64"
    yield "47c", "documents, causal, chunks inside", text, {"doc": doc, "pos": at - first}
    yield "48", "jagged by offsets", "start[i] <= j and j < end[i]", {"start": first, "end": end}
    text = f"{same} and (pos[j] < P[doc[i]] or j <= i)"
    prefixes = r.integers(0, 90, docs)
    yield "49", "prefix-LM + document", text, {"doc": doc, "pos": at - first, "P": prefixes}
    groups = np.maximum(doc - 2, -1) + 1
    text = "j <= i and (j < P or grp[i] == grp[j])"
    yield "50", "shared prompt, many answers", text, {"P": bounds[min(3, docs)], "grp": groups}
    text = "not (a[j] <= i and i < b0[j] or c[j] <= i and i < e[j])"
    values = {"a": end, "b0": np.full(n, n), "c": np.zeros(n, int), "e": at}
    yield "51", "FlashMask, two intervals per key", text, values
    text = " or ".join(f"l{k}[i] <= j and j < h{k}[i]" for k in range(3))
    lows = (np.zeros(n, int), np.maximum(first - 300, 0), first)
    highs = (np.full(n, 16), np.maximum(first - 220, 0), at + 1)
    values = {f"l{k}": x for k, x in enumerate(lows)} | {f"h{k}": x for k, x in enumerate(highs)}
    yield "52", "three intervals per query", text, values
    img = np.where(doc % 3 == 1, doc, -1)
    text = "j <= i or img[i] == img[j] and img[i] >= 0"
    yield "53", "image blocks in causal text", text, {"img": img}
    last = np.maximum(np.maximum.accumulate(np.where(img >= 0, img, -1)), 0)
    yield "54", "Flamingo, last image only", "j // 64 == last[i]", {"last": last}
    values = {"c": np.cumsum(r.random(n) < 0.02), "ok": at < n - 80}
    yield "55", "cumulative-block mask", "c[j] <= c[i] and ok[j] and ok[i]", values
    scales = np.cumsum([1, 4, 9, 16, 25, 36, 64, 100, 169, 256, 400])
    yield "56", "next-scale", "sc[j] <= sc[i]", {"sc": np.searchsorted(scales, at, side="right")}
    values = {"allow": r.random((6, 6)) < 0.5, "type": doc % 6, "tt": at // 40}
    yield "57", "token-type groups", "allow[type[i], type[j]] and tt[j] <= tt[i]", values
    yield "58", "RETRO chunked cross", "nchunk[j] == (i - 63) // 64", {"nchunk": at // 80}
    values = {"doc": doc, "last": at >= bounds[-2], "anchor": at < 16}
    text = f"j <= i and ({same} or last[i] or anchor[j])"
    yield "59", "parallel context windows", text, values
    values = {"bk": np.sort(r.integers(0, 24, n)), "ps": r.permutation(n)}
    yield "60", "LSH buckets, sorted", "bk[i] == bk[j] and ps[j] <= ps[i]", values
    chunks = np.repeat(r.integers(0, 24, -(-n // 50)), 50)[:n]
    yield "60b", "LSH buckets, chunks unsorted", "bk[i] == bk[j]", {"bk": chunks}
    times = np.cumsum(r.integers(0, 9, n))
    yield "61", "time window events", "t[j] <= t[i] and t[i] - t[j] <= T", {"t": times, "T": 900}
    text = "j <= i and (sep[j] or j < 4 or i - j < 128)"
    yield "64", "separators, sinks, window", text, {"sep": r.random(n) < 0.004}
    text = "tin[j] <= tin[i] and tin[i] < tout[j]"
    yield "66", "tree by Euler tour", text, {"tin": at, "tout": end}
    yield "68", "permutation LM", "perm[j] <= perm[i]", {"perm": r.permutation(n)}
    values = {"G": np.isin(at, [0, 1, 2, n // 2])}
    yield "69", "global tokens", "abs(i - j) <= 100 or G[i] or G[j]", values
    slashes = np.zeros(n, bool)
    slashes[:70] = True
    vertical = r.random(n) < 0.005
    slashes[r.choice(n, 3)] = True
    text = "j <= i and (Vt[j] or Sl[i - j])"
    yield "70", "vertical-slash", text, {"Vt": vertical, "Sl": slashes}
    values = {"keep": (r.random(n) < 0.01) | (at > n - 200)}
    yield "71", "KV eviction", "j <= i and keep[j]", values
    alive = np.repeat(r.random(-(-n // 90)) < 0.6, 90)[:n]
    yield "79", "token dropping", "al[i] and al[j]", {"al": alive}

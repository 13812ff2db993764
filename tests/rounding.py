"""How far a kernel may be from the oracle: the dense computation with its operands in the dtype.

    exact = oracle(attn, qkv, ...)     what is right, in float64
    limits(exact, ...)                 four times what rounding alone does, and what scores add

Products take operands of the inputs' dtype (p, and the gradients of scores), delta is computed from
the rounded output, and every result is rounded: that much error has a kernel without a mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import fuzz_variants
import torch
from gradient_cases import weights
from torch import Tensor

from scoremod import reference

# Errors of scores: of cancelled parts, and of float32's rounding over some operations for their
# size; and of the hardware's tanh, which is multiplied.
CANCELLED, SCORE_ERROR = 2.0**-15, 2.0**-20
TANH_ERROR, LARGEST_TANH, TANH = 2.0**-10, 32.0, re.compile("tanh|sigmoid")
# Of rounding alone; gradients sum errors of scores over many pairs.
FACTOR, GRADIENT_FACTOR = 4.0, 4.0


@dataclass(frozen=True)
class Call:
    """A call in the oracle's terms; `learned` are the captures whose gradients are wanted."""

    variant: Any
    qkv: tuple[Tensor, ...]  # of the dtype that is tested
    captures: Mapping[str, Any]
    options: Mapping[str, Any]
    learned: tuple[str, ...]
    tiles: Any = None  # prepared, or a list of blocks and their size

    @property
    def dtype(self) -> torch.dtype:
        return self.qkv[0].dtype


Results = dict[str, Tensor]


def results(attend: Any, call: Call, qkv: tuple[Tensor, ...]) -> Results:
    """out, lse and gradients by name, of whatever computes attention."""
    leaves = dict(zip(("dq", "dk", "dv"), map(_leaf, qkv), strict=True))
    learned = {name: _leaf(call.captures[name]) for name in call.learned}
    out, lse = attend(*leaves.values(), **call.options, **{**call.captures, **learned})
    leaves |= learned
    total = _loss(out, lse)
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), found, strict=True)
    gradients = {n: torch.zeros_like(x) if g is None else g for (n, x), g in pairs}
    return {"out": out.detach(), "lse": lse.detach(), **gradients}


def _leaf(x: Tensor) -> Tensor:
    """A leaf in the same memory: strides, and what lies around it, are part of the call."""
    return x.detach().requires_grad_()


def oracle(call: Call) -> Results:
    """What is right. Pairs are decided in float32 unless q is float64."""

    def attend(*qkv: Tensor, **given: Any) -> Any:
        return fuzz_variants.oracle(call.variant, call.tiles, qkv, **given)

    return results(attend, call, tuple(x.float() for x in call.qkv))


def _loss(out: Tensor, lse: Tensor) -> Tensor:
    """Each output with a weight that every dtype holds; the LSE of rows that have one."""
    lse = torch.where(lse == -torch.inf, 0, lse)
    return (out.double() * _weights(out)).sum() + (lse.double() * _weights(lse)).sum()


def _weights(like: Tensor) -> Tensor:
    """Multiples of 1/4: exact in 16 bits."""
    return (weights(like.double()) * 4).round().clamp(-8, 8) / 4


# -- the dense computation ---------------------------------------------------------------------


@dataclass(frozen=True)
class Dense:
    """What is computed of operands that are rounded to the dtype."""

    results: Results  # all but gradients of captures
    captured: dict[str, float]  # how far those are off
    largest: float  # score


# A gradient of one number is a sum whose errors may cancel: several are drawn.
DRAWS = 6


def dense(call: Call) -> Dense:
    """The same results with operands rounded to the dtype."""
    q, k, v = (x.double() for x in call.qkv)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    raw = (q @ k.mT * call.options["scale"]).float().requires_grad_()
    learned = {name: _leaf(call.captures[name]) for name in call.learned}
    scores = _scores(call, raw, {**call.captures, **learned})
    lse = scores.detach().logsumexp(-1)
    p = torch.exp(scores.detach() - torch.where(lse == -torch.inf, 0, lse)[..., None])
    finite = scores.detach()[scores.isfinite()]
    out = _rounded(_rounded(p, call) @ v, call)
    do, dlse = _weights(out), torch.where(lse == -torch.inf, 0, _weights(lse))
    dp, delta = do @ v.mT, (out * do).sum(-1) - dlse
    ds = torch.where(p == 0, 0, p * (dp - delta[..., None]))
    (draw,) = _slopes(scores, ds, [raw])
    draw = _rounded(draw, call) * call.options["scale"]
    gradients = {
        "dq": draw @ k,
        "dk": _grouped(draw.mT @ q, group),
        "dv": _grouped(_rounded(p, call).mT @ do, group),
    }
    off = delta - ((p @ v * do).sum(-1) - dlse)
    return Dense(
        {"out": out, "lse": lse, **{n: _rounded(x, call) for n, x in gradients.items()}},
        _captured(scores, p, off, learned),
        float(finite.abs().max()) if finite.numel() else 0.0,
    )


def _captured(
    scores: Tensor, p: Tensor, off: Tensor, learned: Mapping[str, Tensor]
) -> dict[str, float]:
    """What errors of delta, of either sign, make of the gradients of captures."""
    found = dict.fromkeys(learned, 0.0)
    make = torch.Generator(off.device).manual_seed(0)
    for _ in range(DRAWS if learned else 0):
        signs = torch.randn(off.shape, generator=make, device=off.device, dtype=off.dtype)
        ds = torch.where(p == 0, 0, p * (off * signs)[..., None])
        for name, x in zip(learned, _slopes(scores, ds, list(learned.values())), strict=True):
            found[name] = max(found[name], _largest(x))
    return found


def _scores(call: Call, raw: Tensor, captures: Mapping[str, Any]) -> Tensor:
    """Scores [B, Hq, Lq, Lk] with a graph; -inf where masked and beyond kv_lens."""
    scores = reference.scores_dense(
        call.variant._origin,
        raw,
        {**call.variant._fixed, **captures},
        q_offset=call.options["q_offset"],
        kv_heads=call.qkv[1].shape[1],
    )
    lens = call.options.get("kv_lens")
    if lens is not None:
        keys = torch.arange(raw.shape[3], device=raw.device)
        scores = torch.where(keys < lens[:, None, None, None], scores, -torch.inf)
    if isinstance(call.tiles, tuple):
        allowed, block = call.tiles
        spread = allowed.repeat_interleave(block, 2).repeat_interleave(block, 3)
        keep = spread[:, :, : raw.shape[2], : raw.shape[3]]
        scores = torch.where(keep, scores, -torch.inf)
    return scores


def _slopes(scores: Tensor, ds: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """ds through the score function."""
    if not scores.requires_grad:
        return [torch.zeros_like(x, dtype=torch.float64) for x in leaves]
    found = torch.autograd.grad(scores, leaves, ds, allow_unused=True, retain_graph=True)
    pairs = zip(leaves, found, strict=True)
    return [(torch.zeros_like(x) if g is None else g).double() for x, g in pairs]


def _rounded(x: Tensor, call: Call) -> Tensor:
    return x.to(call.dtype).double()


def _grouped(x: Tensor, group: int) -> Tensor:
    """Summed over the query heads that share a kv head."""
    batch, heads, *rest = x.shape
    return x.view(batch, heads // group, group, *rest).sum(2)


# -- comparison --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Off:
    """How far one result is from the oracle's."""

    result: str
    error: float  # the largest; inf where one is finite and the other is not
    limit: float

    @property
    def good(self) -> bool:
        return self.error <= self.limit


def compare(found: Results, call: Call, body: str, precision: str) -> list[Off]:
    """Every result whose limit is known: gradients where the oracle's are finite."""
    exact = oracle(call)
    model = dense(call)
    # Where a row is nan, so is what it gives: the place is all there is to compare.
    score_error = CANCELLED + SCORE_ERROR * model.largest
    if precision == "fast" and TANH.search(body):
        score_error += TANH_ERROR * min(1 + model.largest, LARGEST_TANH)
    whole = bool(exact["out"].isfinite().all())
    offs, beside = [], None
    for name, mine in found.items():
        wanted = exact[name].double()
        if name not in ("out", "lse") and not (whole and wanted.isfinite().all()):
            continue
        size = max(1.0, _largest(wanted))
        rounding = model.captured.get(name, 0.0)
        if name in model.results and (whole or name == "out"):
            rounding = _largest(model.results[name] - wanted)
        factor = {"out": size, "lse": 1.0}.get(name, GRADIENT_FACTOR * size)
        unit = torch.finfo(mine.dtype).eps * size
        limit = FACTOR * rounding + score_error * factor + unit
        error = difference(mine.double(), wanted)
        if error > limit and beside is None:
            beside = list(_beside(call))
        near = [] if error <= limit or beside is None else beside
        error = min([error, *(difference(mine.double(), x[name].double()) for x in near)])
        offs.append(Off(name, error, limit))
    return offs


NUDGE = 2.0**-20


def _beside(call: Call) -> Iterator[Results]:
    """The oracle beside this place: at a bend of the score rounding takes either side."""
    for factor in (1 + NUDGE, 1 - NUDGE):
        moved = {n: x * factor if _is_float(x) else x for n, x in call.captures.items()}
        yield oracle(replace(call, captures=moved))


def _is_float(x: Any) -> bool:
    return x.is_floating_point() if isinstance(x, Tensor) else isinstance(x, float)


def difference(mine: Tensor, wanted: Tensor) -> float:
    """The largest difference; inf where one is nan or infinite and the other is not the same."""
    if not mine.numel():
        return 0.0
    same = (mine == wanted) | (mine.isnan() & wanted.isnan())
    return float(torch.where(same, 0, (mine - wanted).abs()).nan_to_num(torch.inf, torch.inf).max())


def _largest(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0

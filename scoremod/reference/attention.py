"""Dense attention of a variant: the grid of all pairs, softmax, and the public functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InputMismatch
from ..origin import Origin
from .call import Call, View, score_value
from .compose import kept, score_of


def _grid(call: Call) -> dict[str, Tensor]:
    """The indices of all pairs, as they broadcast to [batch, q_heads, q_len, kv_len]."""
    b, h, i, j = (
        torch.arange(n, device=call.device)
        for n in (call.batch, call.q_heads, call.q_len, call.kv_len)
    )
    group = max(1, call.q_heads // max(1, call.kv_heads))
    offset = torch.as_tensor(call.q_offset, device=call.device).long().reshape(-1, 1)
    return {
        "b": b[:, None, None, None],
        "h": h[:, None, None],
        "hk": (h // group)[:, None, None],
        "i": (offset + i)[:, None, :, None],
        "j": j,
    }


def _survey(origin: Origin, call: Call) -> None:
    """Read the source at no pair: `call.exact` learns which index each dimension is read at.

    A dimension of length 1 that is read at exactly b, h, hk, i or j anywhere is broadcast
    everywhere.
    """
    nowhere = torch.zeros(0, dtype=torch.int64, device=call.device)
    s = score_value(nowhere.double(), call.precision)
    view = View(call, dict.fromkeys(("b", "h", "hk", "i", "j"), nowhere), s)
    with torch.no_grad():
        kept(origin, view)
        score_of(origin, view)


def _mask(origin: Origin, call: Call, grid: Mapping[str, Tensor]) -> Tensor:
    """The mask at all pairs of a grid; bool, broadcasting to the grid's shape."""
    _survey(origin, call)
    # Conditions that read `s` mask nothing, so that any score will do here.
    s = score_value(torch.zeros((), dtype=torch.float64, device=call.device), call.precision)
    with torch.no_grad():
        return kept(origin, View(call, grid, s))


def _dense(
    origin: Origin, call: Call, grid: Mapping[str, Tensor], raw: Tensor, keep: Tensor
) -> Tensor:
    """The scores, computed at the attended pairs only; -inf elsewhere."""
    pairs = {name: index.expand(raw.shape)[keep] for name, index in grid.items()}
    s = score_value(raw[keep], call.precision)
    score = score_of(origin, View(call, pairs, s)).expand(s.data.shape)
    return torch.full_like(raw, -math.inf).index_put((keep,), score)


def _softmax(score: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and log-sum-exp of each row; a row of -inf has weights 0."""
    # With one -inf more there is a maximum even without a key.
    none = score.new_full((*score.shape[:-1], 1), -math.inf)
    top = torch.cat([score, none], -1).detach().amax(-1, keepdim=True)
    empty = top == -math.inf
    top = torch.where(empty, 0, top)
    powers = torch.exp(score - top)
    total = torch.where(empty, 1, powers.sum(-1, keepdim=True))
    lse = torch.where(empty, -math.inf, top + torch.log(total))
    return powers / total, lse.squeeze(-1)


def attend(
    origin: Origin,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Mapping[str, Any],
    *,
    scale: float | Tensor | None = None,
    q_offset: int | Tensor = 0,
    kv_lens: Tensor | None = None,
    listed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention as the variant says: the output [B, Hq, Lq, Dv], and the LSE [B, Hq, Lq].

    `listed` are the pairs that a user lets through besides, bool [B or 1, Hq or 1, Lq, Lk].
    """
    batch, q_heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    if kv_heads == 0 or q_heads % kv_heads:
        raise InputMismatch(f"{q_heads} query heads cannot share {kv_heads} kv heads")
    precision = torch.float64 if q.dtype == torch.float64 else torch.float32
    call = Call(given, precision, q.device, batch, q_heads, kv_heads, q_len, kv_len, q_offset)
    grid = _grid(call)
    shape = (batch, q_heads, q_len, kv_len)
    keep = _mask(origin, call, grid).expand(shape)
    keep = keep if listed is None else keep & listed
    k, v = (
        x.double().expand(batch, -1, -1, -1).repeat_interleave(q_heads // kv_heads, 1)
        for x in (k, v)
    )
    if kv_lens is not None:
        # Keys beyond are never read: whatever stands there, 0 times it would be a reading.
        valid = grid["j"] < kv_lens.to(q.device).reshape(-1, 1, 1, 1)
        k, v = (torch.where(valid.transpose(-1, -2), x, 0) for x in (k, v))
        keep = keep & valid
    raw = q.double() @ k.transpose(-1, -2) * (head_dim**-0.5 if scale is None else scale)
    weights, lse = _softmax(_dense(origin, call, grid, raw, keep))
    return (weights @ v).to(q.dtype), lse.to(precision)


def mask_dense(
    origin: Origin,
    q_len: int,
    kv_len: int,
    given: Mapping[str, Any],
    *,
    b: int = 0,
    h: int = 0,
    batch: int = 1,
    q_heads: int = 1,
    kv_heads: int = 1,
    q_offset: int | Tensor = 0,
) -> Tensor:
    """Which pairs of one batch entry and query head attend: bool [q_len, kv_len]."""
    device = next((x.device for x in given.values() if isinstance(x, Tensor)), torch.device("cpu"))
    call = Call(
        given,
        torch.float32,
        device,
        max(batch, b + 1),
        max(q_heads, h + 1),
        kv_heads,
        q_len,
        kv_len,
        q_offset,
    )
    grid = _grid(call)
    one = {"b": grid["b"][b], "h": grid["h"][h], "hk": grid["hk"][h], "j": grid["j"]}
    one["i"] = grid["i"][b if len(grid["i"]) > 1 else 0, 0]
    return _mask(origin, call, one).expand(1, 1, q_len, kv_len)[0, 0].clone()


def scores_dense(
    origin: Origin,
    s: Tensor,
    given: Mapping[str, Any],
    *,
    q_offset: int | Tensor = 0,
    kv_heads: int,
) -> Tensor:
    """The scores made of raw, scaled ones [B, Hq, Lq, Lk]: float64, -inf where masked.

    `s` stands for q in the choice of precision: float64 scores decide bools in float64.
    """
    batch, q_heads, q_len, kv_len = s.shape
    precision = torch.float64 if s.dtype == torch.float64 else torch.float32
    call = Call(given, precision, s.device, batch, q_heads, kv_heads, q_len, kv_len, q_offset)
    grid = _grid(call)
    keep = _mask(origin, call, grid).expand(s.shape)
    return _dense(origin, call, grid, s.double(), keep)

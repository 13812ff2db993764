"""FlashAttention-4 (CuTe DSL) as a peer: the stock variants that it has, and ALiBi in its language.

Needs the packages flash-attn-4 and nvidia-cutlass-dsl; importing this module imports them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cutlass import Float32, cute
from flash_attn.cute.interface import flash_attn_func

from scoremod.bench import Case, NotComparable


@cute.jit
def alibi(s, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
    """s - 2**(-(h + 1) / 2) * (i - j): the slopes of 16 heads. Its arguments are keywords."""
    score = s.to(Float32)
    halves = (h + cute.full_like(h, 1)).to(Float32) * cute.full_like(score, -0.5)
    return score - cute.math.exp2(halves) * (q_idx - kv_idx).to(Float32)


# What `flash_attn_func` takes for each of the benchmark's cases.
OPTIONS: dict[str, dict[str, Any]] = {
    "noop": {},
    "causal": {"causal": True},
    "alibi & causal": {"causal": True, "score_mod": alibi},
    "softcap & causal": {"causal": True, "softcap": 50.0},
    "window 1024": {"window_size": (1023, 0)},
}


def fa4(name: str, case: Case) -> Callable[[], torch.Tensor]:
    """A case as a call of FlashAttention-4, whose tensors are [batch, length, heads, head dim]."""
    if name not in OPTIONS:
        raise NotComparable("it is given no such mask here")
    if "score_mod" in OPTIONS[name] and case.shape.q_heads != 16:
        raise NotComparable("its ALiBi is written for 16 heads")
    q, k, v = (x.transpose(1, 2).contiguous() for x in (case.q, case.k, case.v))

    def call() -> torch.Tensor:
        found = flash_attn_func(q, k, v, **OPTIONS[name])
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out.transpose(1, 2)

    return call

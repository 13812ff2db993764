"""FlashAttention-4 (CuTe DSL) as a peer: the stock variants that it has, and ALiBi and documents in
its language.

Needs the packages flash-attn-4 and nvidia-cutlass-dsl; importing this module imports them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cutlass import Float32, Int32, cute
from flash_attn.cute import utils
from flash_attn.cute.compute_block_sparsity import compute_block_sparsity
from flash_attn.cute.interface import flash_attn_func

from scoremod.bench import Case, NotComparable


@cute.jit
def alibi(s, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
    """s - 2**(-(h + 1) / 2) * (i - j): the slopes of 16 heads. Its arguments are keywords."""
    score = s.to(Float32)
    halves = (h + cute.full_like(h, 1)).to(Float32) * cute.full_like(score, -0.5)
    return score - cute.math.exp2(halves) * (q_idx - kv_idx).to(Float32)


@cute.jit
def same_document(b, h, i, j, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
    """doc[b, i] == doc[b, j] and j <= i."""
    doc = aux_tensors[0]
    of_query, of_key = (utils.scalar_to_ssa(doc[b[0], x[0]], Int32) for x in (i, j))
    return (of_query == of_key) & (i >= j)


def listed(case: Case) -> dict[str, Any]:
    """Documents with lists of blocks, made before."""
    shape, doc = case.shape, case.captures["doc"]
    sizes = (shape.batch, shape.q_heads, shape.q_len, shape.kv_len)
    found = compute_block_sparsity(BLOCK, BLOCK, *sizes, same_document, [doc], case.q.device)
    lists = found[-1] if type(found) is tuple else found
    return {"mask_mod": same_document, "aux_tensors": [doc], "block_sparse_tensors": lists}


DOCUMENTS = "document & causal"
BLOCK = 128  # of a list: its tile at head dim 128
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
    if name not in (*OPTIONS, DOCUMENTS):
        raise NotComparable("it is given no such mask here")
    if name == DOCUMENTS and case.shape.head_dim != 128:
        raise NotComparable("its lists are for tiles of 128 x 128")
    if "score_mod" in OPTIONS.get(name, {}) and case.shape.q_heads != 16:
        raise NotComparable("its ALiBi is written for 16 heads")
    q, k, v = (x.transpose(1, 2).contiguous() for x in (case.q, case.k, case.v))
    options = listed(case) if name == DOCUMENTS else OPTIONS[name]

    def call() -> torch.Tensor:
        found = flash_attn_func(q, k, v, **options)
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out.transpose(1, 2)

    return call

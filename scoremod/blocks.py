"""Block lists from users: which blocks of pairs may be visited at all.

    tiles=allowed               bool [q blocks, kv blocks], or with [B or 1, H or 1] in front
    tiles=(allowed, 128)        with the block's size, or (queries, keys)
    tiles=block_mask            FlexAttention's BlockMask; tiles=csr, a sparse CSR matrix

A pair attends where the mask says so and its block is listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .errors import InputMismatch
from .ir.ops import Array

LARGEST = 2**16  # of the block sizes that are tried where none is given


@dataclass(frozen=True)
class Blocks:
    """Blocks that may be visited: bool [B or 1, H or 1, q blocks, kv blocks]."""

    allowed: torch.Tensor
    block_m: int
    block_n: int

    @property
    def batch(self) -> int:
        return self.allowed.shape[0]

    @property
    def heads(self) -> int:
        return self.allowed.shape[1]

    @property
    def arguments(self) -> list[Any]:
        """The table, its strides (0 where it is broadcast) and the block's size."""
        strides = (
            0 if n == 1 else s
            for n, s in zip(self.allowed.shape, self.allowed.stride(), strict=True)
        )
        return [self.allowed, *strides, self.block_m, self.block_n]

    def per_head(self, batch: int, kv_heads: int, group: int) -> torch.Tensor:
        """The table as [B, Hk, G, q blocks, kv blocks]."""
        blocks = self.allowed.shape[2:]
        expanded = self.allowed.expand(batch, kv_heads * group, *blocks)
        return expanded.reshape(batch, kv_heads, group, *blocks)

    def dense(self, q_len: int, kv_len: int) -> torch.Tensor:
        """The table pair by pair: bool [B or 1, H or 1, q_len, kv_len]."""
        spread = self.allowed.repeat_interleave(self.block_m, 2)
        return spread[:, :, :q_len].repeat_interleave(self.block_n, 3)[..., :kv_len]

    def over(self, q_len: int, kv_len: int, block_m: int, block_n: int) -> tuple[Array, Array]:
        """Whether some, and whether all, pairs of each tile are let through, for any head."""
        of_heads = self.allowed.flatten(0, 1).cpu().numpy()
        some, every = of_heads.any(0), of_heads.all(0)
        sides = ((q_len, block_m, self.block_m), (kv_len, block_n, self.block_n))
        for axis, (length, tile, block) in enumerate(sides):
            of_position = np.arange(length) // block
            starts = np.arange(0, length, tile)
            some = np.logical_or.reduceat(some.take(of_position, axis), starts, axis)
            every = np.logical_and.reduceat(every.take(of_position, axis), starts, axis)
        return some, every

    def check_tile(self, block_m: int, block_n: int) -> None:
        """Raise where a kernel's tile would lie in several blocks."""
        if self.block_m % block_m or self.block_n % block_n:
            raise InputMismatch(
                f"blocks of {self.block_m} x {self.block_n} do not hold whole tiles of this "
                f"kernel, {block_m} x {block_n}",
                hint="use blocks of 128 x 128, or write the pattern as a mask",
            )


def read_blocks(
    given: Any, batch: int, q_heads: int, q_len: int, kv_len: int, device: torch.device
) -> Blocks:
    """A user's list, checked against the sizes of the call."""
    size: Any = None
    if isinstance(given, tuple) and len(given) == 2:
        given, size = given
    if hasattr(given, "kv_num_blocks") and hasattr(given, "BLOCK_SIZE"):
        size = size or given.BLOCK_SIZE
        allowed = _of_block_mask(given)
    elif isinstance(given, torch.Tensor):
        allowed = given.to_dense() if given.layout is torch.sparse_csr else given
    else:
        raise InputMismatch(
            f"tiles= takes what .prepare() gives, or a list of blocks, not {type(given).__name__}"
        )
    allowed = _checked(allowed, batch, q_heads, device)
    lengths = (q_len, kv_len)
    sizes = size if isinstance(size, tuple | list) else (size, size)
    block_m, block_n = (
        _block_size(*args) for args in zip(sizes, lengths, allowed.shape[2:], strict=True)
    )
    return Blocks(allowed, block_m, block_n)


def _checked(allowed: torch.Tensor, batch: int, q_heads: int, device: torch.device) -> torch.Tensor:
    if allowed.dtype is not torch.bool:
        allowed = allowed != 0
    if allowed.ndim == 2:
        allowed = allowed[None, None]
    if allowed.ndim != 4:
        raise InputMismatch(
            "a list of blocks is bool [q blocks, kv blocks] or [batch, heads, q blocks, kv blocks],"
            f" not {tuple(allowed.shape)}"
        )
    for what, n, needed in zip(("batch", "heads"), allowed.shape, (batch, q_heads), strict=False):
        if n not in (1, needed):
            raise InputMismatch(f"the {what} of a list of blocks must be 1 or {needed}, not {n}")
    if allowed.device != device:
        raise InputMismatch(f"the list of blocks is on {allowed.device}, but q is on {device}")
    return allowed


def _block_size(size: Any, length: int, blocks: int) -> int:
    if size is None:
        return _guessed_size(length, blocks)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InputMismatch(f"a block's size must be a positive int, not {size!r}")
    if blocks * size < length:
        raise InputMismatch(f"{blocks} blocks of {size} do not cover a length of {length}")
    return size


def _guessed_size(length: int, blocks: int) -> int:
    """The one power of two that makes so many blocks of a length."""
    powers = [1 << k for k in range(LARGEST.bit_length())]
    fitting = [size for size in powers if -(-length // size) == blocks]
    if len(fitting) != 1:
        raise InputMismatch(
            f"the size of {blocks} blocks over a length of {length} is not known",
            hint="give it: tiles=(allowed, 128)",
        )
    return fitting[0]


def _of_block_mask(found: Any) -> torch.Tensor:
    """FlexAttention's lists of partial and of full blocks as one table, without a host sync."""
    allowed = _of_lists(found.kv_num_blocks, found.kv_indices)
    if found.full_kv_num_blocks is not None:
        allowed = allowed | _of_lists(found.full_kv_num_blocks, found.full_kv_indices)
    return allowed


def _of_lists(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """counts [B, H, rows] entries of indices [B, H, rows, columns] as bool of that shape."""
    columns = indices.shape[-1]
    listed = torch.arange(columns, device=indices.device) < counts[..., None]
    # What is not listed goes to a column of its own, which is cut off.
    places = torch.where(listed, indices, columns).long()
    table = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    return table.scatter(-1, places, True)[..., :columns]

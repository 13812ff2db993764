"""GPUs as the compiler sees them: architecture, shared memory, and the tiles that suit them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .errors import BackendUnavailable

KB = 1024


@dataclass(frozen=True)
class Target:
    """What a kernel is compiled for; `shared` is the most bytes that one program may use."""

    kind: str  # "cuda", "hip" or "interpreter"
    arch: str  # "90" or "gfx942"
    shared: int
    warp_size: int = 32

    def __str__(self) -> str:
        return f"{self.kind}:{self.arch}" if self.arch else self.kind


# Shared memory a program may ask for, by compute capability (CUDA programming guide, table of
# technical specifications) and for AMD's CDNA 3.
_SHARED: dict[str, int] = {
    "75": 64 * KB,
    "80": 163 * KB,
    "86": 99 * KB,
    "87": 163 * KB,
    "89": 99 * KB,
    "90": 227 * KB,
    "100": 227 * KB,
    "103": 227 * KB,
    "120": 99 * KB,
    "gfx90a": 64 * KB,
    "gfx942": 64 * KB,
    "gfx950": 160 * KB,
}
INTERPRETER = Target("interpreter", "", 227 * KB)
OLDEST = 75


def parse_target(text: str) -> Target:
    """`"cuda:90"`, `"hip:gfx942"` or `"interpreter"` as a Target."""
    kind, _, arch = text.partition(":")
    if text == "interpreter":
        return INTERPRETER
    known = ", ".join(f"cuda:{a}" if a.isdigit() else f"hip:{a}" for a in _SHARED)
    if kind not in ("cuda", "hip") or arch not in _SHARED or (kind == "cuda") != arch.isdigit():
        raise BackendUnavailable(f"there is no target {text!r}", hint=f"there are {known}")
    return Target(kind, arch, _SHARED[arch], 64 if kind == "hip" else 32)


@dataclass(frozen=True)
class Tile:
    """A tile of the forward: BLOCK_M queries, BLOCK_N keys, and how it is run."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def shared(self, head_dim: int, v_head_dim: int, element_bytes: int) -> int:
        """An upper bound of the shared memory: q, the stages of k and v, and p for the dot."""
        q = self.block_m * head_dim
        # Without prefetching, k is done with before v is read.
        one = max(head_dim, v_head_dim) if self.num_stages == 1 else head_dim + v_head_dim
        kv = self.num_stages * self.block_n * one
        p = self.block_m * self.block_n
        return (q + kv + p) * element_bytes

    def backward_shared(
        self, kernel: str, head_dim: int, v_head_dim: int, element_bytes: int
    ) -> int:
        """The same for a backward: a fixed tile of two tensors, stages of two, and p or ds."""
        widths = head_dim + v_head_dim
        fixed = self.block_n if kernel == "attention_bwd_dkdv" else self.block_m
        moving = self.block_m if kernel == "attention_bwd_dkdv" else self.block_n
        pairs = self.block_m * self.block_n
        return (widths * (fixed + self.num_stages * moving) + pairs) * element_bytes

    def smaller(self) -> Iterator[Tile]:
        """Ever smaller tiles, fewer stages first."""
        tile = self
        while tile.num_stages > 1:
            tile = replace(tile, num_stages=tile.num_stages - 1)
            yield tile
        while tile.block_n > 16 or tile.block_m > 16:
            if tile.block_n >= tile.block_m:
                tile = replace(tile, block_n=tile.block_n // 2)
            else:
                tile = replace(tile, block_m=tile.block_m // 2)
            yield replace(tile, num_warps=max(4, min(tile.num_warps, tile.block_m // 16)))


# (largest head dim, tile) for 16-bit inputs, for fp32 inputs. Numbers are ratios to FlexAttention
# on an H200, bf16, 2026-11-29 (benchmarks/NOTES.md). Not timed: head dims above 128, and fp32.
_TILES_16: tuple[tuple[int, Tile], ...] = (
    # Softcap 3.14, ALiBi 1.22;
    # 64x128: 2.94, 1.13.
    (64, Tile(64, 64, 4, 3)),
    # Full 0.97..1.08, causal 1.16..1.26;
    # 128x128 with 8 warps 0.94, 1.14; 128x64 with 8 warps 0.98, 1.15.
    (128, Tile(64, 64, 4, 3)),
    (256, Tile(64, 64, 8, 2)),
    (512, Tile(64, 32, 8, 1)),
)
# Without a score or a mask: 1.07; 64x64: 1.02. Few queries read keys alone.
_PLAIN_64 = Tile(64, 128, 4, 3)
# Without a score: causal 1.17, window 1.17; 3 stages: 1.13, 1.12; 64x128: 1.14, 0.91.
_MASKED_64 = Tile(64, 64, 4, 2)
# Documents of 1,024 tokens: 1.21; 64x64 takes 219 registers, the third program's room: 1.14.
_STORED_64 = Tile(64, 32, 4, 3)
_TILES_32: tuple[tuple[int, Tile], ...] = (
    # IEEE products run on the CUDA cores: 8 warps keep the operands in registers, 4 spill 34 KB.
    (64, Tile(64, 32, 8, 2)),
    (128, Tile(64, 32, 8, 2)),
    (256, Tile(32, 32, 8, 1)),
    (512, Tile(16, 16, 8, 1)),
)


def choose_tiles(
    head_dim: int,
    v_head_dim: int,
    element_bytes: int,
    target: Target,
    *,
    short: bool = False,
    scored: bool = True,
    masked: bool = True,
    stored: bool = False,
) -> tuple[Tile, ...]:
    """The tiles for padded head dims that fit the target's shared memory, the best first.

    `short` is for calls with few queries, such as decoding; `scored` for a score other than s;
    `stored` for tiles that a structure names. A captured table of pairs may need a later one.
    """
    table = _TILES_16 if element_bytes == 2 else _TILES_32
    widest = max(head_dim, v_head_dim)
    tile = next((t for limit, t in table if widest <= limit), table[-1][1])
    if element_bytes == 2 and widest == 64:
        if stored:
            tile = _STORED_64
        elif not scored:
            tile = _MASKED_64 if masked and not short else _PLAIN_64
    if short:
        tile = replace(tile, block_m=16, num_warps=4)
    tiles = tuple(
        t
        for t in (tile, *tile.smaller())
        if t.shared(head_dim, v_head_dim, element_bytes) <= target.shared
    )
    if not tiles:
        raise BackendUnavailable(
            f"no tile of head dims {head_dim} and {v_head_dim} fits the {target.shared // KB} KB "
            f"of shared memory of {target}"
        )
    return tiles


# -- the backward ------------------------------------------------------------------------------

# (largest head dim, tile) of each kernel, for 16-bit inputs and for fp32 inputs. Times are ms on an
# H200, bf16, 2x16x8192x128 and 2x32x8192x64, 2026-11-29 (benchmarks/NOTES.md).
_BACKWARD_16: dict[str, tuple[tuple[int, Tile], ...]] = {
    "attention_bwd_dkdv": (
        # No mask 4.25, soft cap 2.66; 2 stages: 4.63, 2.81; 64x128, 8 warps: 6.50, 3.77.
        (64, Tile(64, 64, 4, 3)),
        # No mask 3.91, ALiBi 2.14; 32x64, 3 stages: 4.40, 2.38; 64x128, 8 warps, 3 stages: 4.03.
        (128, Tile(64, 64, 4, 2)),
        (256, Tile(32, 64, 8, 1)),
        (512, Tile(16, 32, 8, 1)),
    ),
    "attention_bwd_dq": (
        # No mask 2.65, ALiBi 1.58; 2 stages: 2.76, 1.64; 128x64, 8 warps, 2 stages: 2.65.
        (64, Tile(64, 64, 4, 3)),
        # No mask 2.59, soft cap 1.51; 3 stages: 3.22, 1.84; 128x64, 8 warps, 3 stages: 2.61, 1.61.
        (128, Tile(64, 64, 4, 2)),
        (256, Tile(128, 32, 8, 1)),
        (512, Tile(32, 16, 8, 1)),
    ),
    # Square, as diagonals need them.
    "attention_bwd_diagonals": ((128, Tile(64, 64, 4, 2)), (512, Tile(32, 32, 4, 1))),
    "attention_bwd_pairs": ((128, Tile(64, 64, 4, 1)), (512, Tile(32, 32, 4, 1))),
}
# dk and dv at head dim 128 where the score takes many registers: soft cap 2.44; 64x64: 3.29.
_HEAVY_128 = Tile(32, 64, 4, 3)
# Not timed; IEEE products run on the CUDA cores, and these tiles spill least.
_BACKWARD_32: dict[str, tuple[tuple[int, Tile], ...]] = {
    "attention_bwd_dkdv": ((64, Tile(32, 32, 8, 1)), (512, Tile(16, 32, 8, 1))),
    "attention_bwd_dq": ((64, Tile(32, 32, 8, 1)), (512, Tile(32, 16, 8, 1))),
    "attention_bwd_diagonals": ((512, Tile(32, 32, 8, 1)),),
    "attention_bwd_pairs": ((512, Tile(32, 32, 8, 1)),),
}


def backward_tiles(
    kernel: str,
    head_dim: int,
    v_head_dim: int,
    element_bytes: int,
    target: Target,
    *,
    heavy: bool = False,
) -> tuple[Tile, ...]:
    """The tiles of a kernel of the backward that fit the target's shared memory, the best first.

    `heavy` is for scores that take many registers.
    """
    table = (_BACKWARD_16 if element_bytes == 2 else _BACKWARD_32)[kernel]
    widest = max(head_dim, v_head_dim)
    tile = next((t for limit, t in table if widest <= limit), table[-1][1])
    if heavy and kernel == "attention_bwd_dkdv" and element_bytes == 2 and widest == 128:
        tile = _HEAVY_128
    square = kernel in ("attention_bwd_diagonals", "attention_bwd_pairs")
    tiles = tuple(
        t
        for t in (tile, *tile.smaller())
        if (not square or t.block_m == t.block_n)
        and t.backward_shared(kernel, head_dim, v_head_dim, element_bytes) <= target.shared
    )
    if not tiles:
        raise BackendUnavailable(
            f"no tile of `{kernel}` for head dims {head_dim} and {v_head_dim} fits the "
            f"{target.shared // KB} KB of shared memory of {target}"
        )
    return tiles

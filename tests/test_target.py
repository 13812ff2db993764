"""The tile chooser: every head dim and dtype gets a tile that fits, on any GPU."""

from __future__ import annotations

import pytest

from scoremod.errors import BackendUnavailable
from scoremod.plan_triton_backward import DIAGONALS, DKDV, DQ, PAIRS
from scoremod.target import KB, Target, Tile, backward_tiles, choose_tiles, parse_target

HEAD_DIMS = (16, 32, 64, 128, 256, 512)


def choose_tile(d: int, dv: int, element_bytes: int, target: Target, short: bool = False) -> Tile:
    return choose_tiles(d, dv, element_bytes, target, short=short)[0]


def fake(kilobytes: int) -> Target:
    return Target("cuda", "90", kilobytes * KB)


@pytest.mark.parametrize("kilobytes", [48, 64, 99, 163, 227])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("short", [False, True])
def test_every_head_dim_has_a_tile_that_fits(
    kilobytes: int, element_bytes: int, short: bool
) -> None:
    target = fake(kilobytes)
    # 16 rows of q and of k in fp32 alone take 64 KB at head dim 512.
    largest = 256 if element_bytes == 4 and kilobytes <= 64 else 512
    head_dims = [d for d in HEAD_DIMS if d <= largest]
    for d in head_dims:
        for dv in head_dims:
            tile = choose_tile(d, dv, element_bytes, target, short=short)
            assert tile.shared(d, dv, element_bytes) <= target.shared
            assert tile.block_m >= 16 and tile.block_n >= 16 and tile.num_stages >= 1


def test_smaller_memory_never_gives_a_larger_tile() -> None:
    sizes = [choose_tile(128, 128, 2, fake(kb)).shared(128, 128, 2) for kb in (48, 64, 99, 163)]
    assert sizes == sorted(sizes)


def test_the_table_is_used_where_memory_allows() -> None:
    tile = choose_tile(128, 128, 2, parse_target("cuda:90"))
    assert (tile.block_m, tile.block_n) == (64, 64)


@pytest.mark.parametrize("kernel", [DKDV, DQ, DIAGONALS, PAIRS])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("kilobytes", [99, 163, 227])
def test_every_kernel_of_the_backward_has_tiles_that_fit(
    kilobytes: int, element_bytes: int, kernel: str
) -> None:
    for d in HEAD_DIMS[:-1]:
        tiles = backward_tiles(kernel, d, d, element_bytes, fake(kilobytes), heavy=True)
        for tile in tiles:
            assert tile.backward_shared(kernel, d, d, element_bytes) <= kilobytes * KB
            assert min(tile.block_m, tile.block_n) >= 16
            # A diagonal of tiles is one only if they are square.
            assert tile.block_m == tile.block_n or kernel in (DKDV, DQ)


def test_no_tile_of_the_backward_is_an_error() -> None:
    with pytest.raises(BackendUnavailable, match="no tile of `attention_bwd_dq` for head dims"):
        backward_tiles(DQ, 256, 256, 4, fake(16))


def test_no_tile_at_all_is_an_error() -> None:
    with pytest.raises(BackendUnavailable, match="no tile of head dims 512 and 512 fits the 8 KB"):
        choose_tile(512, 512, 4, fake(8))


@pytest.mark.parametrize("text", ["cuda:91", "cuda", "gfx942", "hip:90", "tpu:1", ""])
def test_unknown_targets_are_named(text: str) -> None:
    with pytest.raises(BackendUnavailable, match="there is no target"):
        parse_target(text)


def test_targets_know_their_shared_memory() -> None:
    assert parse_target("cuda:90").shared == 227 * KB
    assert parse_target("hip:gfx942").warp_size == 64
    assert str(parse_target("cuda:100")) == "cuda:100"

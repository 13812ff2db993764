"""Gemma 2's local layers: scores capped at 50, then a sliding window of 4096 keys."""

import torch

from scoremod.variants import sliding_window, softcap

attn = softcap & sliding_window


def main() -> None:
    torch.manual_seed(0)
    heads, kv_heads, length, head_dim = 8, 4, 300, 64
    q = 25 * torch.randn(1, heads, length, head_dim)
    k, v = (torch.randn(1, kv_heads, length, head_dim) for _ in range(2))

    # Gemma 2 scales by query_pre_attn_scalar, which need not be the head dimension.
    options = {"scale": 256**-0.5, "cap": 50.0, "window": 128}
    out, lse = attn(q, k, v, return_lse=True, **options)

    largest = (q @ k.repeat_interleave(2, dim=1).mT * options["scale"]).abs().max().item()
    print(f"Largest score: {largest:.0f}. With the cap, the largest LSE of a row: {lse.max():.1f}.")
    assert largest > 60 and lse.max() < 50 + torch.tensor(128.0).log()

    tiles = attn.tiles(length, length, block_m=32, block_n=32, window=128)
    print("Tiles of 32 x 32 pairs under a window of 128:\n")
    print(tiles)

    # A float32 score of 60 is itself only good to some 1e-5.
    torch.testing.assert_close(out, attn.eager(q, k, v, **options), rtol=0, atol=5e-5)
    print("\nEqual to the dense reference.")


if __name__ == "__main__":
    main()

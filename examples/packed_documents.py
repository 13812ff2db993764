"""Packed documents: one long row of several texts gives each the answer it would get alone."""

import torch

from scoremod.variants import causal, document

attn = document & causal


def main() -> None:
    torch.manual_seed(0)
    lengths = [70, 25, 120, 41]
    q, k, v = (torch.randn(1, 2, sum(lengths), 32) for _ in range(3))
    doc = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]

    packed = attn(q, k, v, doc=doc)
    alone = [
        causal(*parts) for parts in zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(alone, dim=2), rtol=0, atol=1e-5)
    torch.testing.assert_close(packed, attn.eager(q, k, v, doc=doc), rtol=0, atol=1e-5)

    tiles = attn.tiles(sum(lengths), sum(lengths), block_m=16, block_n=16, doc=doc)
    print(f"Documents of {lengths} tokens in one row, in tiles of 16 x 16 pairs:\n")
    print(tiles)
    skipped = (torch.as_tensor(tiles.kind) == 0).float().mean().item()
    print(f"\n{skipped:.0%} of the tiles are skipped; each document gets its answer as if alone.")


if __name__ == "__main__":
    main()

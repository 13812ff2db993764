"""One variant from its text to its answer: simplified form, tile picture, check against oracle."""

import torch

import scoremod
from scoremod import inf, tanh, where


@scoremod.variant
def gemma(s, b, i, j, doc: "tensor[B, L]", window: int = 96, cap: float = 50.0):
    """Gemma 2's local layers on packed documents: cap the scores, then look back `window` keys."""
    capped = cap * tanh(s / cap)
    ahead = not (i >= j)
    same = doc[b, i] == doc[b, j]
    return where(ahead or not same, -inf, where(i - j < window, capped, -inf))


def main() -> None:
    torch.manual_seed(0)
    length = 256
    q, k, v = (torch.randn(1, heads, length, 32) for heads in (4, 2, 2))
    doc = torch.tensor([100, 60, 96]).repeat_interleave(torch.tensor([100, 60, 96]))[None]

    print("The variant as read: what was -inf became a mask.\n")
    print(gemma)
    print("\nSimplified, and what is assumed until a call:\n")
    print(gemma.explain())

    tiles = gemma.tiles(length, length, block_m=16, block_n=16, doc=doc)
    print("\nIts tiles of 16 x 16 pairs, queries down, keys across:\n")
    print(tiles)

    out = gemma(q, k, v, doc=doc)
    error = (out - gemma.eager(q, k, v, doc=doc)).abs().max().item()
    print(f"\nAnswer {tuple(out.shape)}; furthest from the dense reference: {error:.1e}")
    assert error < 1e-5


if __name__ == "__main__":
    main()

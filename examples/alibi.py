"""ALiBi: each head loses interest with distance, at its own slope."""

import torch

import scoremod
from scoremod.variants import alibi_slopes


@scoremod.variant
def alibi(s, h, i, j, slopes: "tensor[H]"):
    return s - slopes[h] * (i - j)


@scoremod.mask
def causal(i, j):
    return j <= i


attn = alibi & causal


def main() -> None:
    heads, length = 8, 6
    slopes = alibi_slopes(heads)

    # With q = 0 all scores are 0, and with v = 1 the output is the weights themselves.
    q, k = torch.zeros(1, heads, length, 16), torch.zeros(1, heads, length, 16)
    v = torch.eye(length).expand(1, heads, length, length)
    weights = attn(q, k, v, slopes=slopes)

    print("What the last query takes from each key, oldest first:")
    for h in (0, 3, 7):
        row = "  ".join(f"{w:.3f}" for w in weights[0, h, -1])
        print(f"  head {h}, slope {slopes[h]:.4f}:  {row}")

    distance = torch.arange(length).flip(0)
    for h in range(heads):
        wanted = torch.softmax(-slopes[h] * distance, dim=0)
        torch.testing.assert_close(weights[0, h, -1], wanted, rtol=0, atol=1e-5)

    q = torch.randn(1, heads, length, 16)
    torch.testing.assert_close(
        attn(q, q, v, slopes=slopes), attn.eager(q, q, v, slopes=slopes), rtol=0, atol=1e-5
    )
    print("Equal to the softmax of -slope * distance, and to the dense reference.")


if __name__ == "__main__":
    main()

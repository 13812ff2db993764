"""T5's decoder: a learned bias by bucketed distance, and decoding token by token."""

import torch

from scoremod.variants import causal, t5_bias

attn = t5_bias.bind(bidirectional=False) & causal


def main() -> None:
    torch.manual_seed(0)
    heads, length = 4, 24
    q, k, v = (torch.randn(2, heads, length, 16) for _ in range(3))
    table = torch.randn(32, heads)  # the weight of `relative_attention_bias`

    # T5 does not scale by 1/sqrt(D).
    whole = attn(q, k, v, table=table, scale=1.0)
    torch.testing.assert_close(
        whole, attn.eager(q, k, v, table=table, scale=1.0), rtol=0, atol=1e-5
    )

    for step in range(length):
        seen = slice(step + 1)
        token = attn(
            q[:, :, step : step + 1],
            k[:, :, seen],
            v[:, :, seen],
            table=table,
            scale=1.0,
            q_offset=step,
        )
        torch.testing.assert_close(token, whole[:, :, step : step + 1], rtol=0, atol=1e-5)
    print(f"{length} single steps give the rows of one full pass, and those of the reference.")

    # A table that counts shows the buckets: with q = 0 the LSE of one key is its bias.
    counting = torch.arange(32.0)[:, None].expand(32, heads)
    zero = torch.zeros(1, heads, 1, 16)
    distances = [0, 1, 2, 15, 16, 20, 31, 64, 127, 128, 1000]
    buckets = []
    for distance in distances:
        _, lse = t5_bias(
            zero,
            zero,
            zero,
            table=counting,
            bidirectional=False,
            q_offset=distance,
            return_lse=True,
        )
        buckets.append(round(lse[0, 0, 0].item()))
    print("distance", *(f"{d:5}" for d in distances))
    print("bucket  ", *(f"{n:5}" for n in buckets))
    assert buckets == [0, 1, 2, 15, 16, 17, 21, 26, 31, 31, 31]


if __name__ == "__main__":
    main()

"""A pair of functions written for FlexAttention, taken over as they are."""

import torch

import scoremod

LENGTH = 96
slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
document = torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor([40, 16, 40]))


def distance_penalty(score, b, h, q_idx, kv_idx):
    return score - slopes[h] * torch.abs(q_idx - kv_idx)


def packed_causal(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (document[q_idx] == document[kv_idx])


def main() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, LENGTH, 32) for _ in range(3))

    attn = scoremod.from_flex(score_mod=distance_penalty, mask_mod=packed_causal)
    out = attn(q, k, v)  # slopes and document are read from this module, at each call
    torch.testing.assert_close(out, attn.eager(q, k, v), rtol=0, atol=1e-5)

    # The functions mean the same when torch itself runs them, on all pairs at once.
    b, h, i, j = torch.meshgrid(*map(torch.arange, (2, 4, LENGTH, LENGTH)), indexing="ij")
    scores = distance_penalty(q @ k.mT * 32**-0.5, b, h, i, j)
    dense = scores.masked_fill(~packed_causal(b, h, i, j), -torch.inf).softmax(dim=-1) @ v
    torch.testing.assert_close(out, dense, rtol=0, atol=1e-5)

    print(attn)
    print("\nEqual to the dense reference, and to torch running both functions on all pairs.")


if __name__ == "__main__":
    main()

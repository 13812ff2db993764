"""A variant from a .smod text, without Python source: for configuration files and other tools."""

from pathlib import Path

import torch

import scoremod
from scoremod.variants import document, sliding_window, softcap

TEXT = Path(__file__).with_name("gemma2.smod").read_text(encoding="utf-8")


def main() -> None:
    torch.manual_seed(0)
    gemma2 = scoremod.parse(TEXT)
    print(TEXT)

    q, k, v = (torch.randn(1, heads, 200, 32) for heads in (4, 2, 2))
    captures = {"doc": (torch.arange(200) // 70)[None], "window": 48}
    out = gemma2(q, k, v, **captures)
    torch.testing.assert_close(out, gemma2.eager(q, k, v, **captures), rtol=0, atol=1e-5)

    composed = softcap & sliding_window & document
    torch.testing.assert_close(out, composed(q, k, v, **captures), rtol=0, atol=1e-5)
    print("Equal to the dense reference, and to softcap & sliding_window & document.")


if __name__ == "__main__":
    main()

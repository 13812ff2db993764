"""Neighbourhood attention: each pixel sees a window around it, moved inwards at the border."""

import torch

from scoremod.variants import neighborhood_2d

HEIGHT, WIDTH = 9, 14
attn = neighborhood_2d.bind(height=HEIGHT, width=WIDTH, kernel_h=5, kernel_w=5)


def picture(keep: torch.Tensor, y: int, x: int) -> str:
    """The image as pixel (y, x) sees it: o itself, # what it sees."""
    cells = [
        ["#" if seen else "." for seen in row] for row in keep[y * WIDTH + x].view(HEIGHT, WIDTH)
    ]
    cells[y][x] = "o"
    return "\n".join(" ".join(row) for row in cells)


def main() -> None:
    torch.manual_seed(0)
    pixels = HEIGHT * WIDTH
    q, k, v = (torch.randn(1, 2, pixels, 16) for _ in range(3))

    keep = attn.mask_dense(pixels, pixels)
    for y, x in [(4, 6), (0, 13)]:
        print(f"Pixel ({y}, {x}) sees\n{picture(keep, y, x)}\n")
    assert (keep.sum(dim=1) == 25).all()

    torch.testing.assert_close(attn(q, k, v), attn.eager(q, k, v), rtol=0, atol=1e-5)
    print("Each of the 126 pixels sees 25; the answer equals the dense reference.")


if __name__ == "__main__":
    main()

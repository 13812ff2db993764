"""A small decoder learns to write like the standard library's docstrings, slopes included.

python examples/train_alibi.py --steps 300 --plot loss.png     # a minute on two cores
python examples/train_alibi.py --steps 50 --compare 50         # each step beside the oracle
"""

import argparse
import codecs
import contextlib
import importlib
import inspect
import io
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import scoremod
from scoremod import tanh
from scoremod.variants import alibi_slopes, causal

MODULES = "argparse ast bisect collections csv functools heapq inspect itertools random re".split()
LENGTH, BATCH = 96, 8
DIM, HEADS, KV_HEADS, LAYERS = 64, 4, 2, 2
HEAD_DIM = DIM // HEADS


@scoremod.variant
def capped_alibi(s, h, i, j, slopes: "tensor[H]", cap: float = 20.0):
    return cap * tanh(s / cap) - slopes[h] * (i - j)


attn = capped_alibi & causal


# -- text --------------------------------------------------------------------------------------


def corpus() -> torch.Tensor:
    """The Zen of Python and docstrings, as bytes."""
    with contextlib.redirect_stdout(io.StringIO()):
        zen = importlib.import_module("this")
    found = [codecs.decode(zen.s, "rot13")]
    for name in MODULES:
        module = importlib.import_module(name)
        things = [module, *(vars(module)[n] for n in sorted(vars(module)))]
        found += [inspect.getdoc(x) or "" for x in things if callable(x) or x is module]
    return torch.tensor(list("\n\n".join(found).encode()))


def batches(text: torch.Tensor, seed: int = 0):
    """Endless pairs of pieces and the same pieces one byte later, [BATCH, LENGTH]."""
    rng = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH, 1), generator=rng)
        pieces = text[starts + torch.arange(LENGTH + 1)]
        yield pieces[:, :-1], pieces[:, 1:]


# -- model -------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, oracle: bool) -> None:
        super().__init__()
        self.oracle = oracle
        self.norm, self.norm_mlp = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.project = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.attend = scoremod.nn.Attention(attn, slopes=alibi_slopes(HEADS))
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(self.norm(x)).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        if self.oracle:
            mixed = attn.eager(q, k, v, slopes=self.attend.slopes)
        else:
            mixed = self.attend(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class Decoder(nn.Module):
    def __init__(self, oracle: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(256, DIM)
        self.layers = nn.Sequential(*(Layer(oracle) for _ in range(LAYERS)))
        self.norm = nn.RMSNorm(DIM)
        nn.init.normal_(self.embed.weight, std=DIM**-0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layers(self.embed(tokens))) @ self.embed.weight.T


class Training:
    """A model and its optimizer."""

    def __init__(self, oracle: bool = False) -> None:
        self.model = Decoder(oracle)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.01)

    def step(self, tokens: torch.Tensor, wanted: torch.Tensor) -> float:
        """The loss before the step."""
        loss = cross_entropy(self.model(tokens).flatten(0, 1), wanted.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


# -- training ----------------------------------------------------------------------------------


def compare(steps: int) -> float:
    """Train beside the oracle; the largest difference of the losses, or an error."""
    ours, oracle = Training(), Training(oracle=True)
    largest = 0.0
    pieces = batches(corpus())
    for _ in range(steps):
        batch = next(pieces)
        losses = ours.step(*batch), oracle.step(*batch)
        for (name, x), y in zip(
            ours.model.named_parameters(), oracle.model.parameters(), strict=True
        ):
            error, size = (x.grad - y.grad).abs().max(), y.grad.abs().max()
            assert error <= 1e-4 * (1e-3 + size), f"the gradient of {name} is off by {error}"
        largest = max(largest, abs(losses[0] - losses[1]))
    return largest


def train(steps: int) -> tuple[Training, list[float]]:
    training, losses, pieces = Training(), [], batches(corpus())
    for step in range(steps):
        losses.append(training.step(*next(pieces)))
        if step % 50 == 0:
            print(f"  step {step:4}: loss {losses[-1]:.3f}")
    return training, losses


@torch.no_grad()
def write(model: Decoder, start: str, count: int) -> str:
    """Continue a text with the likeliest bytes."""
    tokens = torch.tensor([list(start.encode())])
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens[:, -LENGTH:])[:, -1:].argmax(-1)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def draw(losses: list[float], path: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    axes.plot(losses)
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title=attn.name)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(steps: int = 20, compare_steps: int = 2, plot: str | None = None) -> None:
    if compare_steps:
        largest = compare(compare_steps)
        print(f"{compare_steps} steps beside the oracle: losses differ by at most {largest:.1e}.")
        assert largest < 1e-4
    start = time.perf_counter()
    training, losses = train(steps)
    print(
        f"{steps} steps in {time.perf_counter() - start:.0f} s: {losses[0]:.2f} -> {losses[-1]:.2f}"
    )
    assert losses[-1] < losses[0]
    for number, layer in enumerate(training.model.layers):
        moved = (layer.attend.slopes - alibi_slopes(HEADS)).abs().max().item()
        print(f"  layer {number}: slopes moved by up to {moved:.4f}")
        assert moved > 0
    print("It writes:", repr(write(training.model, "Return the ", 40)))
    if plot is not None:
        draw(losses, plot)
        print(f"Loss curve in {plot}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--compare", type=int, default=0, help="so many steps beside the oracle")
    parser.add_argument("--plot", help="a PNG of the loss curve")
    options = parser.parse_args()
    main(options.steps, options.compare, options.plot)

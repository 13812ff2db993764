"""Every stock variant on this GPU against the oracle, forward and backward, in fp16, bf16 and fp32.

    python benchmarks/accuracy.py [--only NAME,NAME] [--dtypes f16,bf16] [--workers 14]
                                  [--out results.json] [--seconds 300]

Comparisons that are not done when the time is up are named, and make the run fail.

The error of a result is compared with that of a dense float32 computation rounded to the dtype:
of the output, RMS at most 1.5 times and largest at most 4 times; of a gradient 1.6 and 4 times;
in fp32 at most 2e-5 of the largest value, or of 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

import torch

from scoremod import Variant, variants
from scoremod.ir.capture import Kind
from scoremod.plan import assumed_params

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
RMS_LIMIT, GRADIENT_RMS_LIMIT, MAX_LIMIT, F32_LIMIT = 1.5, 1.6, 4.0, 2e-5
OUT, LSE = "out", "lse"


@dataclass(frozen=True)
class Shape:
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    q_offset: int = 0


# An even shape, a ragged one with grouped heads and an offset, and decoding.
EVEN = Shape(2, 4, 4, 512, 512, 64, 64)
RAGGED = Shape(2, 6, 2, 333, 457, 128, 128, 20)
DECODING = Shape(16, 8, 2, 1, 1000, 80, 48, 999)
SHAPES = {"f16": (EVEN,), "bf16": (EVEN, RAGGED, DECODING), "f32": (RAGGED,)}


@dataclass(frozen=True)
class Row:
    """One tensor of a call: `out`, or what the gradient is of.

    Ratios are to the errors of the float32 computation rounded to the dtype.
    """

    variant: str
    dtype: str
    shape: str
    tensor: str
    rms_ratio: float
    max_ratio: float
    relative: float
    lse_error: float

    @property
    def good(self) -> bool:
        if self.dtype == "f32":
            return self.relative <= F32_LIMIT
        limit = RMS_LIMIT if self.tensor == OUT else GRADIENT_RMS_LIMIT
        return self.rms_ratio <= limit and self.max_ratio <= MAX_LIMIT


def stock() -> dict[str, Variant]:
    """The stock variants, scores with a causal mask."""
    found = {n: v for n, v in vars(variants).items() if isinstance(v, Variant)}
    return {n: v if v._program.is_mask else v & variants.causal for n, v in found.items()}


def draw(variant: Variant, shape: Shape) -> dict[str, Any]:
    """Values for the captures, by type: ids sorted, floats small, ints up to the length."""
    length = max(shape.q_offset + shape.q_len, shape.kv_len)
    known = {"B": shape.batch, "H": shape.q_heads, "Hk": shape.kv_heads, "L": length}
    known |= {"Lk": shape.kv_len, "Lq": shape.q_offset + shape.q_len}
    program = variant._program
    seed = zlib.crc32(f"{program.name} {shape}".encode())
    generator = torch.Generator().manual_seed(seed)
    values: dict[str, Any] = {}
    for found, param in zip(program.captures, assumed_params(program), strict=True):
        if found.kind is Kind.SCALAR:
            if not isinstance(found.default, bool | int | float):
                values[found.name] = {"bool": True, "int": 37, "float": 0.7}[param.type.value]
            continue
        sizes = [
            d if isinstance(d, int) else known.get(str(d), 2 * length) for d in found.dims or ()
        ]
        table = torch.rand(tuple(sizes), generator=generator)
        if param.type.value == "int":
            table = (table * 8).int().sort(-1).values.to(torch.int32)
        elif param.type.value == "bool":
            table = table < 0.7
        values[found.name] = table
    return values


def inputs_of(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(shape.q_len)
    q = (shape.batch, shape.q_heads, shape.q_len, shape.head_dim)
    k = (shape.batch, shape.kv_heads, shape.kv_len, shape.head_dim)
    v = (*k[:3], shape.v_head_dim)
    return tuple(torch.randn(s, generator=generator).to(dtype) for s in (q, k, v))


Job = tuple[str, str, Shape]


def compare(job: Job) -> list[Row] | str:
    """One variant, dtype and shape: a row for each tensor, or what went wrong."""
    try:
        return list(rows_of(*job))
    except Exception as error:  # every other comparison still counts
        return f"{job}: {error!r}"[:400]


def rows_of(name: str, dtype: str, shape: Shape) -> Iterator[Row]:
    variant, kind = stock()[name], DTYPES[dtype]
    tensors = dict(zip("qkv", (x.cuda() for x in inputs_of(shape, kind)), strict=True))
    captures = {
        n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in draw(variant, shape).items()
    }
    ours = results(variant, tensors, captures, shape, kind)
    doubles = {n: x.double() for n, x in tensors.items()}
    exact = results(variant.eager, doubles, captures, shape, kind)
    lse, exact_lse = ours.pop(LSE), exact.pop(LSE)
    finite = exact_lse.isfinite()
    assert torch.equal(finite, lse.isfinite()), "other rows without keys"
    lse_error = (lse.double() - exact_lse)[finite].abs().amax().item() if finite.any() else 0.0
    for tensor, wanted in exact.items():
        assert ours[tensor].isfinite().all() or not wanted.isfinite().all(), f"{tensor}: not finite"
        errors = ratios(ours[tensor].double(), wanted.double(), kind)
        yield Row(name, dtype, words(shape), tensor, *errors, lse_error)


def results(
    call: Any,
    tensors: dict[str, torch.Tensor],
    captures: dict[str, Any],
    shape: Shape,
    kind: torch.dtype,
) -> dict[str, torch.Tensor]:
    """out, lse and, where queries are many enough to be trained on, every gradient."""
    leaves = {n: x.detach().requires_grad_() for n, x in tensors.items()}
    learned = {n: leaf(x) for n, x in captures.items() if is_float(x)}
    learns = shape.q_len > 1
    with torch.set_grad_enabled(learns):
        out, lse = call(
            *leaves.values(), return_lse=True, q_offset=shape.q_offset, **(captures | learned)
        )
    found = {OUT: out.detach(), LSE: lse.detach()}
    if not learns:
        return found
    generator = torch.Generator().manual_seed(shape.kv_len)
    grad_out = torch.randn(out.shape, generator=generator).to(kind).to(out)
    wanted = leaves | learned
    gradients = torch.autograd.grad(out, list(wanted.values()), grad_out, allow_unused=True)
    pairs = zip(wanted, gradients, strict=True)
    return found | {f"d{n}": g for n, g in pairs if g is not None}


def is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_()


def ratios(x: torch.Tensor, exact: torch.Tensor, kind: torch.dtype) -> tuple[float, float, float]:
    """RMS and largest error, to those of rounding, and the largest to the largest value."""
    error, (rms, peak) = (x - exact).abs(), rounding(exact, kind)
    # A gradient that is 0 is a sum of terms of size 1 and more that cancel.
    largest = exact.abs().amax().clamp_min(1.0)
    rms_ratio = error.square().mean().sqrt() / rms
    return rms_ratio.item(), (error.amax() / peak).item(), (error.amax() / largest).item()


def rounding(exact: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS and largest error of rounding to a dtype; of few elements, what is to be expected."""
    unit = torch.finfo(kind).eps
    if exact.numel() > 1000:
        error = (exact.float().to(kind).double() - exact).abs()
        rms, peak = error.square().mean().sqrt(), error.amax()
    else:
        last_place = unit * exact.abs().clamp_min(1e-30).log2().floor().exp2()
        rms, peak = (last_place.square().mean() / 12).sqrt(), last_place.amax() / 2
    return rms.clamp_min(unit / 1000), peak.clamp_min(unit / 1000)


def words(shape: Shape) -> str:
    text = f"{shape.batch}x{shape.q_heads}.{shape.kv_heads}x{shape.q_len}.{shape.kv_len}"
    return f"{text}x{shape.head_dim}.{shape.v_head_dim}"


def answers(jobs: Sequence[Job], workers: int, seconds: float) -> Iterator[list[Row] | str]:
    """What comes of each job, as it comes; of those that are not done in time, what they are."""
    # Compiling takes most of the time, so that processes share the jobs, and the GPU.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        begun = {pool.submit(compare, job): job for job in jobs}
        waiting = as_completed(begun, timeout=seconds)
        try:
            for future in waiting:
                yield future.result()
        except TimeoutError:
            late = [job for future, job in begun.items() if not future.done()]
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()  # or this one would wait for them when it ends
            yield from (f"{job}: not in time" for job in late)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--out", default="")
    parser.add_argument("--seconds", type=float, default=1e6)
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    chosen = parser.parse_args()
    names = [n for n in stock() if not chosen.only or n in chosen.only.split(",")]
    jobs = [(n, d, s) for n in names for d in chosen.dtypes.split(",") for s in SHAPES[d]]
    rows: list[Row] = []
    failed = 0
    for answer in answers(jobs, chosen.workers, chosen.seconds):
        if isinstance(answer, str):
            failed += 1
            print("BAD", answer, flush=True)
        else:
            rows += answer
    bad = [row for row in rows if not row.good]
    for row in bad:
        print("BAD", row)
    for dtype in DTYPES:
        for what, of in (
            ("outputs", [r for r in rows if r.dtype == dtype and r.tensor == OUT]),
            ("gradients", [r for r in rows if r.dtype == dtype and r.tensor != OUT]),
        ):
            if of:
                print(f"{dtype}: {len(of)} {what}; at most: {summary(of)}")
    if chosen.out:
        with open(chosen.out, "w") as file:
            json.dump([{**asdict(r), "good": r.good} for r in rows], file, indent=1)
    return len(bad) + failed > 0


def summary(rows: list[Row]) -> str:
    most = {f: max(getattr(r, f) for r in rows) for f in ("rms_ratio", "max_ratio", "relative")}
    text = f"rms ratio {most['rms_ratio']:.2f}, max ratio {most['max_ratio']:.2f}"
    lse = max(r.lse_error for r in rows)
    return f"{text}, of the largest value {most['relative']:.1e}, lse {lse:.1e}"


if __name__ == "__main__":
    sys.exit(main())

"""Every stock variant on this GPU against the oracle, in fp16, bf16 and fp32.

    python benchmarks/accuracy.py [--only NAME,NAME] [--out results.json]

The error of a kernel is compared with that of a dense float32 computation rounded to the dtype:
RMS at most 1.5 times, largest at most 4 times; fp32 at most 2e-5 of the largest value.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import zlib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch

from scoremod import Variant, attend_hopper, attend_triton, variants
from scoremod.inputs import check_inputs
from scoremod.ir.capture import Kind
from scoremod.launch import device
from scoremod.plan import assumed_params
from scoremod.target import parse_target

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
RMS_LIMIT, MAX_LIMIT, F32_LIMIT = 1.5, 4.0, 2e-5


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
    """One comparison; ratios are to the float32 computation rounded to the dtype."""

    variant: str
    dtype: str
    shape: str
    rms_ratio: float
    max_ratio: float
    relative: float
    lse_error: float
    good: bool


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


def compile_one(job: tuple[str, str, Shape, Any]) -> None:
    """Put a kernel into the disk cache; needs no GPU."""
    name, dtype, shape, target = job
    variant = stock()[name]
    q, k, v = inputs_of(shape, DTYPES[dtype])
    given = check_inputs(
        q, k, v, scale=None, q_offset=shape.q_offset, kv_lens=None, precision="auto"
    )
    program, bound = variant._bind(draw(variant, shape), given.sizes, q.device)
    known = variant._type(program, bound)
    backend = attend_triton
    if attend_hopper.is_hopper(target) and not attend_hopper.unfit(known, given):
        backend = attend_hopper
    backend.store(known, backend.options(known, given, bound), target)


def compare(name: str, dtype: str, shape: Shape) -> Row:
    """One variant, dtype and shape."""
    variant, kind = stock()[name], DTYPES[dtype]
    q, k, v = (x.cuda() for x in inputs_of(shape, kind))
    captures = {
        n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in draw(variant, shape).items()
    }
    with torch.no_grad():
        out, lse = variant(q, k, v, return_lse=True, q_offset=shape.q_offset, **captures)
        exact, exact_lse = variant.eager(
            *(x.double() for x in (q, k, v)), return_lse=True, q_offset=shape.q_offset, **captures
        )
    rounded = exact.float().to(kind).double()
    error, base = (out.double() - exact).abs(), (rounded - exact).abs()
    finite = exact_lse.isfinite()
    same_rows = torch.equal(finite, lse.isfinite())
    lse_error = (lse.double() - exact_lse)[finite].abs().amax().item() if finite.any() else 0.0
    largest = exact.abs().amax().item()
    rms = (error.square().mean().sqrt() / base.square().mean().sqrt().clamp_min(1e-30)).item()
    peak = (error.amax() / base.amax().clamp_min(1e-30)).item()
    relative = error.amax().item() / max(largest, 1e-30)
    fits = rms <= RMS_LIMIT and peak <= MAX_LIMIT
    good = relative <= F32_LIMIT if dtype == "f32" else fits
    words = f"{shape.batch}x{shape.q_heads}.{shape.kv_heads}x{shape.q_len}.{shape.kv_len}"
    words += f"x{shape.head_dim}.{shape.v_head_dim}"
    return Row(name, dtype, words, rms, peak, relative, lse_error, good and same_rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", default="")
    parser.add_argument("--compile", metavar="TARGET", help="only fill the kernel cache")
    chosen = parser.parse_args()
    names = [n for n in stock() if not chosen.only or n in chosen.only.split(",")]
    jobs = [(n, d, s) for n in names for d in DTYPES for s in SHAPES[d]]
    target = parse_target(chosen.compile) if chosen.compile else device()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(2, (os.cpu_count() or 2) - 2), mp_context=spawn) as pool:
        list(pool.map(compile_one, [(*job, target) for job in jobs], chunksize=4))
    if chosen.compile:
        return 0
    rows, failed = [], 0
    for job in jobs:
        try:
            rows.append(compare(*job))
        except Exception as error:  # every other comparison still counts
            print("FAILED", *job, repr(error)[:300])
            failed += 1
    bad = [r for r in rows if not r.good]
    for row in bad:
        print("BAD", row)
    for dtype in DTYPES:
        of = [r for r in rows if r.dtype == dtype]
        most = {f: max(getattr(r, f) for r in of) for f in ("rms_ratio", "max_ratio", "relative")}
        lse = max(r.lse_error for r in of)
        print(
            f"{dtype}: {len(of)} comparisons; at most: rms ratio {most['rms_ratio']:.2f}, "
            f"max ratio {most['max_ratio']:.2f}, of the largest value {most['relative']:.1e}, "
            f"lse {lse:.1e}"
        )
    if chosen.out:
        with open(chosen.out, "w") as file:
            json.dump([asdict(r) for r in rows], file, indent=1)
    return len(bad) + failed > 0


if __name__ == "__main__":
    sys.exit(main())

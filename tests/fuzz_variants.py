"""Random variants of the whole language, calls of every kind, and their comparison with the oracle.

@given(bodies(), calls)
def law(body, call): check_forward(body, call, "triton")
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from attention_cases import DEVICE, Shape, agree, on
from gradient_cases import leaf, loss
from hypothesis import strategies as st
from torch import Tensor

import scoremod
from scoremod.errors import BackendUnavailable

# -- variants ----------------------------------------------------------------------------------

# Dyadic numbers small enough that sums and products of a few are exact, and others.
FLOATS = ("0.0", "1.0", "0.5", "2.0", "0.25", "3.0", "0.1", "1.7", "0.3", "10.0")
INTS = ("0", "1", "2", "3", "5", "7", "16", "63", "64", "1000", "2147483647", "4294967295",
        "0x3fffffffffff", "4611686018427387904")  # fmt: skip
INDEX = ("i", "j", "i", "j", "i - j", "b", "h", "hk", "q_len", "kv_len")
USUAL = ("j <= i", "flag", "True", "False", "i != j", "doc[i] == doc[j]", "seq[b, i] == seq[b, j]",
         "seq[0, i] <= seq[1, j]", "keep[j]", "pair[i - q_len, j]", "0 <= i - j < n")  # fmt: skip
# type: (table, rank)
TABLES: dict[str, dict[str, int]] = {
    "bool": {"keep": 1, "pair": 2},
    "int": {"doc": 1, "seq": 2, "wide": 1},
    "float": {"bias": 1, "rel": 2},
}
SCALARS = {"bool": ("flag",), "int": ("n", "m"), "float": ("x", "y")}


@st.composite
def ints(draw: st.DrawFn, depth: int) -> str:
    """An int expression, in parentheses where needed."""
    leaf = draw(st.integers(0, 11 if depth > 0 else 3))
    if leaf <= 1:
        return f"({draw(st.sampled_from(INDEX))})"
    if leaf == 2:
        return draw(st.sampled_from(INTS))
    if leaf == 3:
        return draw(st.sampled_from((*SCALARS["int"], "size(doc, 0)", "-1", "-3")))
    a, b = ints(depth - 1), ints(depth - 1)
    if leaf <= 6:
        symbol = draw(st.sampled_from(("+", "-", "*", "//", "%", "//", "%", "&", "|", "^")))
        return f"({draw(a)} {symbol} {draw(b)})"
    if leaf == 7:
        symbol = draw(st.sampled_from(("<<", ">>")))
        return f"({draw(a)} {symbol} {draw(b)})"
    if leaf == 8:
        name = draw(st.sampled_from(("min", "max", "abs", "ilog2", "-", "~", "clamp")))
        args = {"min": (a, b), "max": (a, b), "clamp": (a, b, a)}.get(name, (a,))
        return (
            f"{name}({', '.join(draw(x) for x in args)})" if len(name) > 1 else f"({name}{draw(a)})"
        )
    if leaf == 9:
        return f"where({draw(bools(depth - 1))}, {draw(a)}, {draw(b)})"
    if leaf == 10:
        return draw(loads("int", depth))
    name = draw(st.sampled_from(("floor", "ceil", "round", "int")))
    return f"{name}({draw(exact(depth - 1))})"


@st.composite
def exact(draw: st.DrawFn, depth: int) -> str:
    """A float free of s, of operations that every library rounds alike."""
    leaf = draw(st.integers(0, 9 if depth > 0 else 3))
    if leaf == 0:
        return draw(st.sampled_from(FLOATS))
    if leaf == 1:
        return draw(st.sampled_from(SCALARS["float"]))
    if leaf <= 3:
        return f"float({draw(ints(max(depth - 1, 0)))})"
    a, b = exact(depth - 1), exact(depth - 1)
    if leaf <= 6:
        symbol = draw(st.sampled_from(("+", "-", "*", "/")))
        return f"({draw(a)} {symbol} {draw(b)})"
    if leaf == 7:
        name = draw(st.sampled_from(("min", "max", "abs", "-", "sqrt")))
        first = draw(a)
        if name not in ("min", "max"):
            return f"{name}({first})"
        # The compiler's `min(max(x, lo), hi)` is a clamp, whose subgradients differ at ties.
        name, first = ("clamp", first[4:-1]) if first.startswith("max(") else (name, first)
        return f"{name}({first}, {draw(b)})"
    if leaf == 8:
        return f"where({draw(bools(depth - 1))}, {draw(a)}, {draw(b)})"
    return draw(loads("float", depth))


@st.composite
def bools(draw: st.DrawFn, depth: int) -> str:
    """A condition free of s."""
    leaf = draw(st.integers(0, 11))
    if leaf <= 4 or (depth <= 0 and leaf > 6):
        links = draw(st.sampled_from((1, 1, 1, 2)))
        parts = [draw(ints(depth - 1))]
        for _ in range(links):
            parts += [
                draw(st.sampled_from(("<", "<=", ">", ">=", "==", "!="))),
                draw(ints(depth - 1)),
            ]
        return f"({' '.join(parts)})"
    if leaf == 5:
        return f"({draw(st.sampled_from(USUAL))})"
    if leaf == 6:
        return draw(loads("bool", depth))
    if leaf == 7:
        symbol = draw(st.sampled_from(("<", "<=", ">", "==", "!=")))
        return f"({draw(exact(depth - 1))} {symbol} {draw(exact(depth - 1))})"
    a, b = bools(depth - 1), bools(depth - 1)
    if leaf <= 9:
        return f"({draw(a)} {draw(st.sampled_from(('and', 'or', '&', '|', '^', '==')))} {draw(b)})"
    if leaf == 10:
        return f"(not {draw(a)})"
    return f"({draw(a)} if {draw(b)} else {draw(bools(depth - 1))})"


@st.composite
def loads(draw: st.DrawFn, kind: str, depth: int) -> str:
    """A read of a table, often outside of it."""
    name, rank = draw(st.sampled_from(sorted(TABLES[kind].items())))
    return f"{name}[{', '.join(draw(ints(min(depth - 1, 1))) for _ in range(rank))}]"


@st.composite
def scores(draw: st.DrawFn, depth: int) -> str:
    """A float that may read s; a decision on s is exact, since s is a multiple of 1/16."""
    leaf = draw(st.integers(0, 9 if depth > 0 else 2))
    if leaf == 0:
        return "s"
    if leaf <= 2:
        return f"clamp({draw(exact(max(depth - 1, 1)))}, -4.0, 4.0)"
    a, b = scores(depth - 1), scores(depth - 1)
    if leaf <= 4:
        return f"({draw(a)} {draw(st.sampled_from(('+', '-', '*')))} {draw(b)})"
    if leaf == 5:
        name = draw(
            st.sampled_from(("tanh", "sigmoid", "softplus", "sin", "cos", "erf", "abs", "-"))
        )
        return f"{name}({draw(a)})"
    if leaf == 6:
        name = draw(st.sampled_from(("exp(-", "exp2(-", "expm1(-", "log1p(", "sqrt(1.0 + ",
                                     "rsqrt(1.0 + ", "log(1.0 + ", "log2(1.0 + ")))  # fmt: skip
        return f"{name}abs({draw(a)}))"
    if leaf == 7:
        return f"({draw(a)} / (1.0 + abs({draw(b)})))"
    if leaf == 8:
        condition = draw(
            st.sampled_from(("s < 0.25", "s >= -0.5", "abs(s) > 1.0", "floor(s * 4.0) % 3 == 1"))
        )
        return f"where({condition}, {draw(a)}, {draw(b)})"
    return f"where({draw(bools(depth - 1))}, {draw(a)}, {draw(b)})"


@st.composite
def bodies(draw: st.DrawFn) -> str:
    """A variant with a score, a mask, or both."""
    lines = []
    for name in draw(st.sampled_from(((), (), ("t0",), ("t0", "t1")))):
        lines.append(f"let {name} = {draw(ints(2))}")
    what = draw(st.sampled_from(("mask", "score", "both", "both", "excluded")))
    score, condition = draw(scores(3)), draw(bools(3))
    for line in lines:
        # A local takes the place of an index somewhere.
        local = line.split()[1]
        condition = condition.replace("i - j", local, 1)
        score = score.replace("(j)", local, 1)
    if what == "excluded":
        score = f"where({condition}, {score}, -inf)"
    if what in ("score", "both", "excluded"):
        lines.append(f"score {score}")
    if what in ("mask", "both"):
        lines.append(f"mask {condition}")
    return "\n".join(lines)


# -- calls -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """Sizes, places and values of one call."""

    seed: int
    q_len: int
    kv_len: int
    q_offset: int
    by_value: bool
    per_batch: bool  # offsets and lengths of each sequence
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (8, 4)
    dtype: str = "float32"
    layout: str = "plain"
    tiles: str = "none"  # or prepared, or a list of blocks

    @property
    def shape(self) -> Shape:
        return Shape(2, *self.heads, self.q_len, self.kv_len, *self.head_dims)


# The same values in other places.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "heads last": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every second": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "transposed": lambda x: x.mT.contiguous().mT,
    "inside": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 4), value=torch.nan)[
        ..., 1 : 1 + x.shape[2], 3 : 3 + x.shape[3]
    ],
}


calls = st.builds(
    Draw,
    st.integers(0, 999),
    st.sampled_from((1, 5, 17)),
    st.sampled_from((3, 18, 40)),
    st.sampled_from((0, 0, 3, 20)),
    st.booleans(),
    st.sampled_from((False, False, True)),
)
# Every dtype that a backend computes rightly here: the interpreter has no bf16 and no float64.
DTYPES = {"cpu": ("float32", "float32", "float64", "float16", "bfloat16"),
          "triton": ("float32", "float32", "float16")}  # fmt: skip


def wide_calls(backend: str) -> st.SearchStrategy[Draw]:
    """Calls of all shapes, dtypes and layouts."""
    return st.builds(
        Draw,
        st.integers(0, 9999),
        st.sampled_from((1, 2, 16, 17, 33, 0)),
        st.sampled_from((3, 1, 16, 40, 70, 0)),
        st.sampled_from((0, 0, 1, 20)),
        st.booleans(),
        st.booleans(),
        st.sampled_from(((4, 2), (1, 1), (2, 2), (3, 1))),
        st.sampled_from(((8, 4), (16, 16), (5, 3), (1, 33))),
        st.sampled_from(DTYPES[backend]),
        st.sampled_from(tuple(LAYOUTS)),
        st.sampled_from(("none", "none", "prepared", "blocks")),
    )


NUMBERS = (0, 1, 2, -1, 3, -7, 16, 64, 100, -100, 2**31, 2**47, -(2**47))


def captures(call: Draw) -> dict[str, Any]:
    """Values for every capture: ints of either sign and of many sizes, zeros, nan at times."""
    rng = np.random.default_rng(call.seed)
    length = max(call.q_offset + call.q_len, call.kv_len, 1)
    reals = np.array([0.0, -0.0, 0.5, -1.5, 2.0, 0.1, -0.7, 3.0, 1e-3, 40.0], np.float32)

    def number(value: Any) -> Any:
        return value if call.by_value else torch.tensor(value)

    return {
        "keep": torch.from_numpy(rng.random(length) < 0.6),
        "pair": torch.from_numpy(rng.random((call.q_offset + call.q_len, call.kv_len)) < 0.6),
        "doc": torch.from_numpy(rng.integers(-1, 5, length).astype(np.int32)),
        "seq": torch.from_numpy(np.sort(rng.integers(0, 4, (2, length)), axis=1)),
        "wide": torch.from_numpy(rng.choice(NUMBERS, length)),
        "bias": torch.from_numpy(rng.choice(reals, length)),
        "rel": torch.from_numpy(rng.choice(reals, (4, length)).astype(np.float64)),
        "flag": number(bool(rng.random() < 0.5)),
        "n": number(int(rng.choice(NUMBERS[:10]))),
        "m": number(int(rng.choice(NUMBERS))),
        "x": number(float(rng.choice(reals))),
        "y": number(float(rng.choice(reals))),
    }


def declaration(name: str) -> str:
    """Tables have dimensions without a meaning, so that any index may be read at any length."""
    rank = next((ranks[name] for ranks in TABLES.values() if name in ranks), 0)
    return f"{name}: tensor[{', '.join(f'{name}{axis}' for axis in range(rank))}]" if rank else name


def inputs(call: Draw) -> tuple[Tensor, ...]:
    """q and k of halves, so that s = q k / 4 is exact; v is anything."""
    make, dtype = torch.Generator().manual_seed(call.seed), getattr(torch, call.dtype)
    q, k, v = (torch.randn(shape, generator=make) for shape in call.shape.shapes)
    halves = ((x * 2).round().clamp(-3, 3) / 2 for x in (q, k))
    return tuple(LAYOUTS[call.layout](x.to(dtype)) for x in (*halves, v))


# -- laws --------------------------------------------------------------------------------------

# Of values of size 1.
FORWARD = {"float64": 1e-9, "float32": 2e-4, "float16": 4e-3, "bfloat16": 4e-2}
BACKWARD = {"float64": 1e-7, "float32": 2e-3, "float16": 4e-2, "bfloat16": 2e-1}
# Beyond it float32's rounding of a score is a part of a weight.
LARGE = 300.0


def prepare(body: str, call: Draw, backend: str) -> tuple[Any, tuple[Tensor, ...], Any, Any]:
    """The variant, q, k and v, options of the call, and captures."""
    used = set(re.findall(r"\w+", body))
    given = {k: on(backend, x) for k, x in captures(call).items() if k in used}
    attn = scoremod.parse(f"variant v({', '.join(map(declaration, given))}) {{\n{body}\n}}")
    options: dict[str, Any] = {"scale": 0.25, "q_offset": call.q_offset, "return_lse": True}
    if call.per_batch:
        options["q_offset"] = on(backend, torch.tensor([call.q_offset, call.q_offset // 2]))
        options["kv_lens"] = on(backend, torch.tensor([call.kv_len // 2, call.kv_len + 1]))
    return attn, tuple(on(backend, x) for x in inputs(call)), options, given


def tiles_of(
    attn: Any,
    call: Draw,
    device: str,
    options: dict[str, Any],
    given: dict[str, Any],
    block: int = 64,
) -> Any:
    """What the call gives as tiles=; a capture that is learned is another tensor than prepared.

    A block holds whole tiles of every kernel.
    """
    if call.tiles == "blocks":
        rng, sizes = np.random.default_rng(call.seed), (call.q_len, call.kv_len)
        allowed = rng.random((*rng.choice((1, 2), 1), 1, *(-(-n // block) for n in sizes))) < 0.7
        return torch.from_numpy(allowed).to(device), block
    if call.tiles == "prepared" and not attn._program.mask.names & attn._program.score.names:
        places = {n: options.get(n) for n in ("q_offset", "kv_lens")}
        shape = call.shape
        return attn.prepare(
            shape.q_len, shape.kv_len, batch=shape.batch, q_heads=shape.q_heads,
            device=device, **places, **given,
        )  # fmt: skip
    return None


def oracle(attn: Any, tiles: Any, qkv: Sequence[Tensor], **call: Any) -> Any:
    """(out, lse) of the oracle, which sees lists of blocks too."""
    if isinstance(tiles, tuple):
        return attn(*qkv, backend="eager", tiles=tiles, **call)
    return attn.eager(*qkv, **call)


def widened(x: Tensor) -> Tensor:
    """What the oracle takes: 16 bits as float32, so that it decides pairs in float32 too."""
    return x if x.dtype is torch.float64 else x.float()


def check_forward(body: str, call: Draw, backend: str) -> None:
    """A backend and the oracle agree on out and LSE, and on where they are not finite."""
    attn, qkv, options, given = prepare(body, call, backend)
    # A decision in the mask shows in the LSE; a weight of exactly 0 could hide it from out.
    tiles = tiles_of(attn, call, DEVICE[backend], options, given)
    out, lse = attn(*qkv, backend=backend, tiles=tiles, **options, **given)
    wanted, wanted_lse = oracle(attn, tiles, [*map(widened, qkv)], **options, **given)
    agree(lse, wanted_lse, FORWARD["float64" if call.dtype == "float64" else "float32"])
    agree(out, wanted, FORWARD[call.dtype])


def check_gradients(body: str, call: Draw, backend: str) -> None:
    """Gradients of q, k, v and every float of the score, where the oracle's are finite."""
    attn, qkv, options, given = prepare(body, call, backend)
    learn = {
        n: leaf(x)
        for n, x in given.items()
        if isinstance(x, Tensor) and n in attn._program.score.names
    }
    tiles = tiles_of(attn, call, DEVICE[backend], options, given)
    given = {**given, **learn}
    wanted_leaves = [leaf(widened(x)) for x in qkv]
    out, lse = oracle(attn, tiles, wanted_leaves, **options, **given)
    if not (out.isfinite().all() and (lse[lse.isfinite()].abs() < LARGE).all()):
        return
    wanted = slopes(loss(out, lse), [*wanted_leaves, *learn.values()])
    leaves = [leaf(x) for x in qkv]
    try:
        found = slopes(
            loss(*attn(*leaves, backend=backend, tiles=tiles, **options, **given)),
            [*leaves, *learn.values()],
        )
    except BackendUnavailable as error:
        # Of tables by distances or pairs, which kernels refuse beside a list of blocks.
        if call.tiles == "blocks" and "with a list of blocks" in str(error):
            return
        raise
    for x, y in zip(found, wanted, strict=True):
        if y.isfinite().all():
            size = max(1.0, float(y.abs().max())) if y.numel() else 1.0
            # A float32 table beside float64 tensors has a gradient in float32.
            tolerance = max(BACKWARD[call.dtype], 4 * torch.finfo(y.dtype).eps)
            agree(x.to(y.dtype) / size, y / size, tolerance)


def slopes(total: Tensor, leaves: list[Any]) -> list[Tensor]:
    """The gradient of each float; 0 where torch has none."""
    floats = [x for x in leaves if x.requires_grad]
    found = torch.autograd.grad(total, floats, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(floats, found, strict=True)]


LAWS = {"forward": check_forward, "gradients": check_gradients}

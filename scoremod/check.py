"""A variant against the oracle, forward and backward, over awkward shapes and every backend here.

    print((alibi & causal).check())

Errors are told in units of the dtype's rounding: 1 is the distance between two neighbouring
numbers of the size of the largest entry (of 1, where all are smaller). Scores are computed in
float32, whose rounding grows with them; limits grow alike.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from . import attention, reference
from .binding import DTYPE_OF, ELEMENT_OF, Sizes
from .draw import Shape, draw_missing
from .errors import CheckFailed, InputMismatch
from .inputs import as_numpy
from .ir.capture import Kind
from .ir.evaluate import evaluate
from .ir.expr import Expr, postorder
from .ir.ops import Op
from .ir.show import show

if TYPE_CHECKING:
    from .api import Variant

# How many units a result may be off: of the forward, of dq, dk and dv, and of captures, whose
# gradients sum over many pairs. At most a sixth of these was seen over the stock variants.
LIMITS = {"out": 8.0, "lse": 8.0, "dq": 32.0, "dk": 32.0, "dv": 32.0}
CAPTURE_LIMIT = 128.0
DTYPES = {"cpu": ("f32", "f64", "bf16"), "triton": ("f32", "f16", "bf16")}
INTERPRETED = ("f32",)  # Triton's interpreter multiplies 16-bit numbers wrongly
DEVICE = {"cpu": "cpu", "triton": "cuda"}


@dataclass(frozen=True)
class Setting:
    """A shape, and where it is in the sequence."""

    shape: Shape
    q_offset: int = 0
    kv_lens: bool = False

    def __str__(self) -> str:
        lens = ", kv_lens" if self.kv_lens else ""
        return f"{self.shape}" + (f", q_offset {self.q_offset}" if self.q_offset else "") + lens


# From small to large, so that the first failure is the smallest.
SETTINGS = (
    Setting(Shape(1, 1, 1, 1, 1, 8, 8)),
    Setting(Shape(2, 2, 1, 5, 9, 16, 16), q_offset=4),
    Setting(Shape(1, 3, 1, 17, 16, 17, 31)),
    Setting(Shape(3, 2, 2, 16, 33, 16, 48), kv_lens=True),
    Setting(Shape(2, 4, 2, 64, 64, 64, 64)),
    Setting(Shape(1, 2, 1, 65, 130, 80, 64), q_offset=61),
    Setting(Shape(1, 2, 1, 140, 270, 32, 32), q_offset=130),
)


@dataclass(frozen=True)
class Case:
    """One comparison."""

    setting: Setting
    dtype: str
    backend: str

    def __str__(self) -> str:
        return f"{self.dtype} on {self.backend}, {self.setting}"


@dataclass(frozen=True)
class Found:
    """How far one result of a case is from the oracle's."""

    case: Case
    result: str  # out, lse, dq, dk, dv, or a capture's name
    units: float
    limit: float


@dataclass(frozen=True)
class Report:
    """What a check compared, and the errors that it found."""

    variant: str
    found: tuple[Found, ...]
    drawn: tuple[str, ...]  # captures without value, and what was drawn for them
    outside: tuple[str, ...]  # reads outside tables, where they were asked for

    def worst(self, backend: str, dtype: str, result: str) -> float | None:
        """The largest error of a result, in units."""
        units = [
            x.units
            for x in self.found
            if (x.case.backend, x.case.dtype, x.result) == (backend, dtype, result)
        ]
        return max(units, default=None)

    def json(self, indent: int | None = 2) -> str:
        """Everything, for a machine."""
        return json.dumps(asdict(self), indent=indent)

    def __rich__(self) -> Table:
        results = list(dict.fromkeys(x.result for x in self.found))
        cases = {x.case for x in self.found}
        notes = [*self.drawn, *self.outside]
        title = f"{self.variant}: largest errors in units of rounding, {len(cases)} cases"
        table = Table(
            title=title,
            min_width=min(len(title), 98),
            caption="\n".join(notes) or None,
            caption_justify="left",
        )
        for column in ("backend", "dtype", *results):
            table.add_column(column, justify="left" if column == "backend" else "right")
        for backend, dtype in dict.fromkeys((x.case.backend, x.case.dtype) for x in self.found):
            worst = [self.worst(backend, dtype, result) for result in results]
            table.add_row(backend, dtype, *("" if x is None else f"{x:.2g}" for x in worst))
        return table

    def __str__(self) -> str:
        shown = io.StringIO()
        Console(file=shown, width=100).print(self)
        return shown.getvalue().rstrip()


@dataclass(frozen=True)
class Wish:
    """What to check."""

    dtypes: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    bounds: bool = False
    seed: int = 0


def check(
    variant: Variant,
    captures: Mapping[str, Any],
    wish: Wish,
    progress: Callable[[Sequence[Case]], Any] = iter,
) -> Report:
    """Compare every case; raise CheckFailed at the first, smallest one that is off."""
    settings = tuple(dict.fromkeys(_clipped(variant, captures, s) for s in SETTINGS))
    cases = [Case(s, dtype, backend) for backend, dtype in runs(wish) for s in settings]
    found: list[Found] = []
    drawn: dict[str, str] = {}
    for case in progress(cases):
        call = _Call.of(variant, captures, case, wish.seed)
        drawn.update(call.drawn)
        for result in call.compare():
            if not result.units <= result.limit:
                raise _failure(variant, result, wish, call.drawn)
            found.append(result)
    outside = _outside(variant, captures, settings[-1], wish.seed) if wish.bounds else ()
    return Report(variant.name, tuple(found), tuple(drawn.values()), tuple(outside))


def _failure(variant: Variant, result: Found, wish: Wish, drawn: Mapping[str, str]) -> CheckFailed:
    case = result.case
    lines = [
        f"`{variant.name}` is not the oracle: {result.result} is off by {result.units:.3g} units "
        f"of {case.dtype} rounding, where {result.limit:.3g} are allowed",
        f"  smallest case: {case}",
        *(f"  drawn: {words}" for words in drawn.values()),
    ]
    again = f'.check(dtype="{case.dtype}", backend="{case.backend}", seed={wish.seed})'
    return CheckFailed("\n".join(lines), hint=f"to repeat it, call {again} with the same captures")


# -- cases -------------------------------------------------------------------------------------


def available() -> tuple[str, ...]:
    """The compiled backends that run here."""
    triton = torch.cuda.is_available() or attention.interpreting()
    return ("cpu", "triton") if triton else ("cpu",)


def runs(wish: Wish) -> Iterator[tuple[str, str]]:
    """The backends and dtypes that are compared."""
    for backend in wish.backends or available():
        if backend not in DTYPES:
            raise InputMismatch(
                f"there is nothing to check on {backend!r}", hint=f"there are {', '.join(DTYPES)}"
            )
        interpreted = backend == "triton" and not torch.cuda.is_available()
        for dtype in wish.dtypes or (INTERPRETED if interpreted else DTYPES[backend]):
            yield backend, dtype


def _clipped(variant: Variant, captures: Mapping[str, Any], setting: Setting) -> Setting:
    """The setting cut down to what given tables cover."""
    limits: dict[str, int] = {}
    for item in variant._program.captures:
        value = captures.get(item.name, variant._fixed.get(item.name))
        if item.kind is Kind.TENSOR and isinstance(value, Tensor) and item.dims is not None:
            for dim, length in zip(item.dims, value.shape, strict=False):
                if isinstance(dim, str) and length > 1:
                    limits[dim] = min(length, limits.get(dim, length))
    shape = setting.shape
    far = 2**31
    q_end = min(limits.get("Lq", far), limits.get("L", far))
    kv_len = min(shape.kv_len, limits.get("Lk", far), limits.get("L", far))
    q_offset = setting.q_offset if setting.q_offset < q_end else 0
    kv_heads = min(shape.kv_heads, limits.get("Hk", far), limits.get("H", far))
    group = min(shape.q_heads // shape.kv_heads, max(1, limits.get("H", far) // kv_heads))
    clipped = shape._replace(
        batch=min(shape.batch, limits.get("B", far)),
        q_heads=group * kv_heads,
        kv_heads=kv_heads,
        q_len=min(shape.q_len, q_end - q_offset),
        kv_len=kv_len,
    )
    return Setting(clipped, q_offset, setting.kv_lens)


def _drawn(
    variant: Variant, captures: Mapping[str, Any], setting: Setting, device: str, seed: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """All captures of a call on a device, and words for those that were drawn."""
    covered = setting.shape._replace(q_len=setting.q_offset + setting.shape.q_len)
    drawn = draw_missing(
        variant._program, variant._fixed, covered, captures, device=device, seed=seed
    )
    values = {**captures, **{name: value for name, (value, _) in drawn.items()}}
    values = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in values.items()}
    return values, {name: words for name, (_, words) in drawn.items()}


# -- one comparison ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """The tensors of a case."""

    variant: Variant
    case: Case
    qkv: tuple[Tensor, ...]
    captures: Mapping[str, Any]
    options: Mapping[str, Any]
    drawn: Mapping[str, str]

    @classmethod
    def of(cls, variant: Variant, captures: Mapping[str, Any], case: Case, seed: int) -> _Call:
        setting, (batch, q_heads, kv_heads, q_len, kv_len, d, dv) = case.setting, case.setting.shape
        device = DEVICE[case.backend] if torch.cuda.is_available() else "cpu"
        rng = torch.Generator().manual_seed(seed)
        shapes = (
            (batch, q_heads, q_len, d), (batch, kv_heads, kv_len, d), (batch, kv_heads, kv_len, dv)
        )  # fmt: skip
        dtype = DTYPE_OF[case.dtype]
        qkv = tuple(torch.randn(s, generator=rng).to(device, dtype) for s in shapes)
        values, drawn = _drawn(variant, captures, setting, device, seed)
        options: dict[str, Any] = {"q_offset": setting.q_offset}
        if setting.kv_lens:
            lens = [kv_len // 2, kv_len, 0][:batch]
            options["kv_lens"] = torch.tensor(lens, dtype=torch.int32, device=device)
        return cls(variant, case, qkv, values, options, drawn)

    def compare(self) -> Iterator[Found]:
        """Every result against the oracle's."""

        def ours(*qkv: Tensor, **call: Any) -> Any:
            return self.variant(*qkv, backend=self.case.backend, **call)

        found = self._results(ours, self.qkv)
        # The oracle decides pairs in float32 unless it is given float64.
        exact = tuple(x if x.dtype is torch.float64 else x.float() for x in self.qkv)
        wanted = self._results(self.variant.eager, exact)
        growth = self._growth()
        for name, (value, limit) in found.items():
            yield Found(
                self.case, name, _units(value, wanted[name][0], self.qkv[0]), limit * growth
            )

    def _results(
        self, attend: Callable[..., Any], qkv: Sequence[Tensor]
    ) -> dict[str, tuple[Tensor, float]]:
        """out, lse and gradients by name, with their limits."""
        named = dict(zip(("dq", "dk", "dv"), qkv, strict=True))
        read = self.variant._program.score.names
        learned = {n: x for n, x in self.captures.items() if n in read and _is_float(x)}
        leaves = {n: x.detach().clone().requires_grad_() for n, x in {**named, **learned}.items()}
        call = {**self.captures, **{n: leaves[n] for n in learned}, **self.options}
        out, lse = attend(*(leaves[n] for n in named), return_lse=True, **call)
        results = {"out": out.detach(), "lse": lse.detach()}
        loss = _weighted(out) + _weighted(torch.where(lse == -torch.inf, 0, lse))
        given = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        pairs = zip(leaves.items(), given, strict=True)
        results |= {n: torch.zeros_like(x) if g is None else g for (n, x), g in pairs}
        return {n: (x, LIMITS.get(n, CAPTURE_LIMIT)) for n, x in results.items()}

    def _growth(self) -> float:
        """How much larger the rounding of float32 scores is than that of 1, in q's dtype."""
        q, k, _ = (x.double() for x in self.qkv)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        raw = q @ k.mT / q.shape[3] ** 0.5
        scores = reference.scores_dense(
            self.variant._origin,
            raw.to(torch.float64 if self.qkv[0].dtype is torch.float64 else torch.float32),
            {**self.variant._fixed, **self.captures},
            q_offset=self.options["q_offset"],
            kv_heads=self.qkv[1].shape[1],
        )
        largest = float(torch.where(scores.isfinite(), scores, 0).abs().max()) if raw.numel() else 0
        float64 = self.qkv[0].dtype is torch.float64
        computed = torch.finfo(torch.float64 if float64 else torch.float32).eps
        return 1 + largest * computed / torch.finfo(self.qkv[0].dtype).eps


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _weighted(x: Tensor) -> Tensor:
    """A sum with weights of their own, the same for ours and the oracle's."""
    rng = torch.Generator().manual_seed(1)
    return (x.double() * torch.randn(x.shape, generator=rng).to(x.device)).sum()


def _units(found: Tensor, wanted: Tensor, q: Tensor) -> float:
    """The largest error in units of rounding; inf where one is finite and the other is not."""
    if not found.numel():
        return 0.0
    eps = max(torch.finfo(found.dtype).eps, torch.finfo(q.dtype).eps)
    found, wanted = found.double(), wanted.double()
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    error = torch.where(same, 0, (found - wanted).abs()).nan_to_num(torch.inf)
    size = torch.where(wanted.isfinite(), wanted, 0).abs().max().clamp(min=1)
    return float(error.max() / (size * eps))


# -- reads outside tables ----------------------------------------------------------------------


def _outside(
    variant: Variant, captures: Mapping[str, Any], setting: Setting, seed: int
) -> Iterator[str]:
    """Each read whose index leaves its table at an attended pair, in words."""
    shape = setting.shape
    values, _ = _drawn(variant, captures, setting, "cpu", seed)
    sizes = Sizes(*shape[:5], setting.q_offset)
    program, bound = variant._bind(values, sizes, None)
    known = variant._type(program, bound)
    env = {**as_numpy(bound), **_indices(setting)}
    attended = np.broadcast_to(evaluate(known.given_mask, env), shape[:2] + shape[3:5])
    for where, root in (("score", known.given_score), ("mask", known.given_mask)):
        for node in dict.fromkeys(n for n in postorder(root) if n.op is Op.LOAD):
            yield from _leaving(node, where, env, attended)


def _indices(setting: Setting) -> dict[str, Any]:
    batch, q_heads, kv_heads, q_len, kv_len, *_ = setting.shape
    b, h, i, j = np.ogrid[:batch, :q_heads, :q_len, :kv_len]
    places = {"b": b, "h": h, "hk": h // (q_heads // kv_heads), "i": i + setting.q_offset, "j": j}
    return {**places, "s": np.zeros(1), "q_len": np.asarray(q_len), "kv_len": np.asarray(kv_len)}


def _leaving(
    node: Expr, where: str, env: Mapping[str, Any], attended: np.ndarray[Any, Any]
) -> Iterator[str]:
    """Words for each index of a read that leaves the table at an attended pair."""
    for axis, index in enumerate(node.args):
        length = np.shape(env[node.attr])[axis]
        place = np.broadcast_to(evaluate(index, env), attended.shape)
        outside = attended & ((place < 0) | (place >= length))
        if outside.any():
            first = tuple(int(x) for x in np.argwhere(outside)[0])
            b, h, row, j = first
            i = row + int(env["i"].min())
            yield (
                f"outside: {show(node)} in the {where} reads 0 at {int(outside.sum())} of "
                f"{int(attended.sum())} attended pairs: {show(index)} is {int(place[first])} at "
                f"b={b} h={h} i={i} j={j}, and dimension {axis} has length {length}"
            )


def words_of(dtype: Any) -> tuple[str, ...]:
    """`f32`, torch.float32, or several of them, as words."""
    if dtype is None:
        return ()
    several = dtype if isinstance(dtype, list | tuple) else (dtype,)
    words = tuple(ELEMENT_OF.get(x, str(x)) for x in several)
    for word in words:
        if word not in ("f16", "bf16", "f32", "f64"):
            raise InputMismatch(f"check takes f16, bf16, f32 and f64, not {word}")
    return words

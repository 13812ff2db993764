"""Time a variant beside FlexAttention and SDPA, interleaved, on one GPU.

    print(bench(alibi & causal, shape=(2, 16, 16, 8192, 8192, 128, 128)))

A power-limited card's clock drifts by 15 % within a minute and remembers the kernel before. So all
candidates take turns in one process, and the same heater (a large bf16 product) runs before each;
only ratios within one table mean something. TFLOP/s count the pairs that the mask keeps.
"""

from __future__ import annotations

import io
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module, metadata
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from .analysis.interval import Bounds, Interval, Name, ints, open_load
from .analysis.tiles import FULL, PARTIAL, classify
from .api import Variant
from .backends import flex
from .binding import DTYPE_OF, Bound, Sizes
from .draw import Shape, draw_missing
from .errors import BackendUnavailable, InputMismatch, ScoremodError
from .inputs import as_numpy
from .ir.expr import TRUE, Expr, const, index, make, substitute
from .ir.ops import Op
from .passes.simplify import simplify
from .plan import Typed, assumed_params, typed
from .sources import element
from .tiles import Tiles
from .variant import S

# Parts of torch have no types.
_cuda: Any = torch.cuda
_cudnn: Any = torch.backends.cudnn

OURS, FLEX, CUDNN, FLASH = "scoremod", "FlexAttention", "SDPA cuDNN", "SDPA flash"
AGAINST = {"flex": (FLEX,), "sdpa": (CUDNN, FLASH), "cudnn": (CUDNN,), "flash": (FLASH,)}

# What a candidate's output may differ from ours by, as norm(difference) / norm(ours).
TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 2e-2, torch.float32: 1e-3}
HEAT_MS, CASE_MS = 30.0, 40.0  # the heater before each measurement, and the measurement
TILE, TILES_AT_ONCE = 128, 512  # for counting pairs


@dataclass(frozen=True)
class Case:
    """A call to be timed: tensors, and captures with those that were drawn."""

    variant: Variant
    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    captures: Mapping[str, Any]
    drawn: tuple[str, ...]
    program: Typed
    bound: tuple[Bound, ...]
    tiles: Tiles | None = None  # prepared, as FlexAttention's block mask is
    backend: str | None = None  # ours; None: what a call chooses

    def ours(self) -> Tensor:
        """The variant's own call."""
        how = {"tiles": self.tiles, "backend": self.backend, **self.captures}
        out: Tensor = self.variant(self.q, self.k, self.v, **how)
        return out


# -- calls -----------------------------------------------------------------------------------


def prepare(
    variant: Variant,
    shape: Shape,
    dtype: torch.dtype,
    captures: Mapping[str, Any],
    device: str,
    seed: int = 0,
    backend: str | None = None,
) -> Case:
    """Draw q, k, v and missing captures, and bind them."""
    if min(shape) < 1:
        raise InputMismatch(f"every size must be at least 1, but the shape is {tuple(shape)}")
    torch.manual_seed(seed)
    b, q_heads, kv_heads, q_len, kv_len, head_dim, v_head_dim = shape
    q = torch.randn(b, q_heads, q_len, head_dim, device=device).to(dtype)
    k = torch.randn(b, kv_heads, kv_len, head_dim, device=device).to(dtype)
    v = torch.randn(b, kv_heads, kv_len, v_head_dim, device=device).to(dtype)
    drawn = draw_missing(
        variant._program, variant._fixed, shape, captures, device=device, seed=seed
    )
    values = {**captures, **{name: value for name, (value, _) in drawn.items()}}
    values = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in values.items()}
    sizes = Sizes(b, q_heads, kv_heads, q_len, kv_len)
    program, bound = variant._bind(values, sizes, q.device)
    notes = tuple(words for _, words in drawn.values())
    known = variant._type(program, bound)
    tiles = None
    if not known.one_range:  # the portable kernels need none for several ranges, Hopper's do
        tiles = variant.prepare(q_len, kv_len, batch=b, q_heads=q_heads, device=q.device, **values)
    return Case(variant, shape, q, k, v, values, notes, known, bound, tiles, backend)


# -- FlexAttention's functions -----------------------------------------------------------------


def flex_source(variant: Variant) -> str:
    """FlexAttention's score_mod and mask_mod for a variant, as Python text."""
    program = variant._program
    return flex.source(typed(program, assumed_params(program)))


def flex_functions(case: Case) -> tuple[Any, Any]:
    """(score_mod, mask_mod) of a case; None where the variant has none."""
    program = flex.with_free_names(case.program)
    names = [p.name for p in program.params]
    values: dict[str, Any] = {n: x.value for n, x in zip(names, case.bound, strict=True)}
    inside = _reads_inside(case, values)
    sizes = {"q_len": case.shape.q_len, "kv_len": case.shape.kv_len}
    group = case.shape.q_heads // case.shape.kv_heads
    text = flex.source(program, inside)
    return flex.functions(text, {**sizes, "gqa_group": group, **values})


def _reads_inside(case: Case, values: Mapping[str, Any]) -> flex.Inside:
    """Whether an index stays in its table, from the sizes and values of the case."""
    shape = case.shape
    ends = {"i": shape.q_len, "j": shape.kv_len, "b": shape.batch}
    ends |= {"h": shape.q_heads, "hk": shape.kv_heads}
    env: dict[Name, Interval] = {name: ints(0, end - 1) for name, end in ends.items()}
    env |= {"q_len": ints(shape.q_len, shape.q_len), "kv_len": ints(shape.kv_len, shape.kv_len)}
    stored: dict[str, Interval] = {}
    for name, value in values.items():
        table = torch.as_tensor(value)
        if table.dtype is torch.bool or table.is_floating_point() or not table.numel():
            continue
        low, high = (int(x) for x in torch.aminmax(table))
        (stored if isinstance(value, Tensor) and value.ndim else env)[name] = ints(low, high)

    def load(node: Expr, indices: tuple[Interval, ...]) -> Interval:
        # A read outside a table is 0.
        known = stored.get(node.attr)
        if known is None:
            return open_load(node, indices)
        return ints(np.minimum(known.lo, 0), np.maximum(known.hi, 0))

    bounds = Bounds(env, load)

    def inside(node: Expr, axis: int) -> bool:
        found = bounds(node.args[axis])
        return bool(found.lo.min() >= 0 and found.hi.max() < values[node.attr].shape[axis])

    return inside


# -- what the mask keeps -----------------------------------------------------------------------


def kept_pairs(case: Case) -> int:
    """How many pairs attend, over all batches and heads; only unproved tiles are evaluated."""
    shape, mask = case.shape, case.program.mask
    _, mask_mod = flex_functions(case)
    if mask_mod is None:
        return shape.batch * shape.q_heads * shape.q_len * shape.kv_len
    batches = range(shape.batch if "b" in mask.names else 1)
    heads = range(shape.q_heads if mask.names & {"h", "hk"} else 1)
    values = as_numpy(tuple(x for x in case.bound if x.param.name in mask.names))
    total = 0
    for b, h in product(batches, heads):
        kind = classify(
            mask, shape.q_len, shape.kv_len, block_m=TILE, block_n=TILE, values=values,
            b=b, h=h, hk=h // (shape.q_heads // shape.kv_heads),
        )  # fmt: skip
        total += _full_pairs(kind, shape)
        for tiles in _chunks(np.argwhere(kind == PARTIAL), TILES_AT_ONCE):
            total += _partial_pairs(mask_mod, b, h, tiles, case)
    return total * (shape.batch // len(batches)) * (shape.q_heads // len(heads))


def _full_pairs(kind: np.ndarray[Any, Any], shape: Shape) -> int:
    rows, columns = (
        np.minimum(TILE, length - TILE * np.arange(tiles))
        for length, tiles in zip((shape.q_len, shape.kv_len), kind.shape, strict=True)
    )
    return int(rows @ (kind == FULL).astype(np.int64) @ columns)


def _partial_pairs(mask_mod: Any, b: int, h: int, tiles: np.ndarray[Any, Any], case: Case) -> int:
    device, within = case.q.device, torch.arange(TILE, device=case.q.device)
    starts = torch.as_tensor(tiles * TILE, device=device)
    i = starts[:, :1, None] + within[:, None]
    j = starts[:, 1:, None] + within[None, :]
    real = (i < case.shape.q_len) & (j < case.shape.kv_len)
    i, j = i.clamp(max=case.shape.q_len - 1), j.clamp(max=case.shape.kv_len - 1)
    kept = mask_mod(torch.tensor(b, device=device), torch.tensor(h, device=device), i, j)
    return int((kept & real).sum())


def _chunks(x: np.ndarray[Any, Any], size: int) -> Iterator[np.ndarray[Any, Any]]:
    for start in range(0, len(x), size):
        yield x[start : start + size]


# -- candidates --------------------------------------------------------------------------------


class NotComparable(Exception):
    """A peer that does not compute this variant."""


@dataclass(frozen=True)
class Rig:
    """Where candidates run, and how they are timed."""

    device: str
    elapsed: Callable[[Callable[[], object], int], float]  # ms a call, of so many calls
    heat: Callable[[], object]
    compile: Callable[[Any], Any]

    def first(self, call: Callable[[], object]) -> float:
        """Seconds of a call, to its result."""
        start = time.perf_counter()
        call()
        self.elapsed(lambda: None, 1)  # waits for the device
        return time.perf_counter() - start


def gpu_rig() -> Rig:
    """The current GPU, timed by its own events."""
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            "bench needs a GPU, and torch sees none",
            hint="torch.cuda.is_available() is False; check the driver and torch's build",
        )
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    heater = _repeated(lambda: x @ x, HEAT_MS, gpu_elapsed)
    return Rig("cuda", gpu_elapsed, heater, lambda f: torch.compile(f, dynamic=False))


def gpu_elapsed(call: Callable[[], object], repeats: int) -> float:
    """Milliseconds that a call takes on the GPU."""
    start, end = (_cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / repeats


def _repeated(
    call: Callable[[], object], ms: float, elapsed: Callable[[Callable[[], object], int], float]
) -> Callable[[], None]:
    call()
    repeats = max(1, round(ms / elapsed(call, 3)))

    def repeated() -> None:
        for _ in range(repeats):
            call()

    return repeated


def _flex(
    case: Case, rig: Rig, options: Mapping[str, Any] | None = None
) -> tuple[Callable[[], Tensor], Callable[[], object] | None]:
    """Compiled FlexAttention, and the making of its block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # A process that times many variants would run into Dynamo's limit of recompilations.
    torch._dynamo.reset()
    score_mod, mask_mod = flex_functions(case)
    attend, make_mask = rig.compile(flex_attention), rig.compile(create_block_mask)
    names, shape = case.program.mask.names, case.shape
    sizes = (
        shape.batch if "b" in names else None,
        shape.q_heads if names & {"h", "hk"} else None,
        shape.q_len,
        shape.kv_len,
    )

    def block_mask() -> Any:
        return make_mask(mask_mod, *sizes, device=case.q.device)

    made = None if mask_mod is None else block_mask()
    gqa = shape.q_heads != shape.kv_heads

    def call() -> Tensor:
        how = {"block_mask": made, "enable_gqa": gqa, "kernel_options": options}
        out: Tensor = attend(case.q, case.k, case.v, score_mod=score_mod, **how)
        return out

    return call, None if made is None else block_mask


def is_causal(case: Case) -> bool:
    """Whether SDPA is to be causal; raises where it would need a matrix of pairs."""
    shape, program = case.shape, case.program
    if program.score != S:
        raise NotComparable("it has no scores")
    if program.mask == TRUE:
        return False
    lengths = {"q_len": const(shape.q_len), "kv_len": const(shape.kv_len)}
    causal = simplify(make(Op.LE, index("j"), index("i")))
    if simplify(substitute(program.mask, lengths)) != causal:
        raise NotComparable("it has no such mask")
    if shape.q_len != shape.kv_len:
        raise NotComparable("its causal mask stands elsewhere when lengths differ")
    return True


def _sdpa(case: Case, backend: str) -> Callable[[], Tensor]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    causal = is_causal(case)
    gqa = case.shape.q_heads != case.shape.kv_heads
    chosen = getattr(SDPBackend, backend)

    def call() -> Tensor:
        with sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(
                case.q, case.k, case.v, is_causal=causal, enable_gqa=gqa
            )

    return call


@dataclass
class Candidate:
    """One way to compute the case."""

    name: str
    call: Callable[[], Tensor | tuple[Tensor, ...]] | None = None
    block_mask: Callable[[], object] | None = None
    first_s: float | None = None
    error: float | None = None
    note: str = ""
    rounds_ms: list[float] = field(default_factory=list)


_SDPA = {CUDNN: "CUDNN_ATTENTION", FLASH: "FLASH_ATTENTION"}


def candidate(
    name: str, case: Case, rig: Rig, flex_options: Mapping[str, Any] | None = None
) -> Candidate:
    """Build a candidate and call it once; a peer that fails becomes a note.

    `flex_options` are FlexAttention's kernel_options, where its own do not run.
    """
    made = Candidate(name)

    def first() -> None:
        if name == OURS:
            made.call = case.ours
        elif name == FLEX:
            made.call, made.block_mask = _flex(case, rig, flex_options)
        else:
            made.call = _sdpa(case, _SDPA[name])
        made.call()

    try:
        made.first_s = rig.first(first)
    except NotComparable as reason:
        made.call, made.note = None, str(reason)
    except Exception as error:
        if name == OURS:
            raise
        lines = str(error).strip().splitlines() or [""]
        made.call, made.note = None, f"{type(error).__name__}: {lines[0][:160]}"
    return made


def compare(candidates: Sequence[Candidate], dtype: torch.dtype) -> None:
    """Each candidate's distance from ours, the first; what is too far is not timed."""
    ours = candidates[0]
    assert ours.call is not None
    wanted = _in_one(ours.call())
    norm = wanted.norm().item()
    for peer in candidates[1:]:
        if peer.call is None:
            continue
        distance = (_in_one(peer.call()) - wanted).norm().item()
        peer.error = distance / norm if norm else distance
        # Not `>`: nan never passes.
        if not peer.error <= TOLERANCE[dtype]:
            peer.call, peer.note = None, f"differs from ours by {peer.error:.1e}: not timed"


def _in_one(answer: Tensor | tuple[Tensor, ...]) -> Tensor:
    """All numbers of an answer."""
    parts = answer if isinstance(answer, tuple) else (answer,)
    return torch.cat([x.float().flatten() for x in parts])


def race(candidates: Sequence[Candidate], rig: Rig, rounds: int) -> None:
    """Time round-robin, the heater before each."""
    runners = [c for c in candidates if c.call is not None]
    repeats = {}
    for runner in runners:
        assert runner.call is not None
        repeats[runner.name] = max(2, round(CASE_MS / max(1e-3, rig.elapsed(runner.call, 2))))
    for _ in range(rounds):
        for runner in runners:
            assert runner.call is not None
            rig.heat()
            runner.rounds_ms.append(rig.elapsed(runner.call, repeats[runner.name]))


# -- the public function -----------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """A candidate's times; `ratio` is its time over ours, `note` why there is none."""

    name: str
    ms: float | None
    tflops: float | None
    ratio: float | None
    error: float | None
    first_s: float | None
    rounds_ms: tuple[float, ...]
    note: str


@dataclass(frozen=True)
class BenchResult:
    """One variant beside its peers; print it, or take `.json()` or `.plot(path)`."""

    variant: str
    text: str
    shape: Shape
    dtype: str
    kept: float  # the part of all pairs that the mask keeps
    flop: int  # of both products, for these pairs
    timings: tuple[Timing, ...]
    block_mask_ms: float | None  # FlexAttention's, not counted in its time
    structure_ms: float | None  # our tile structure, not counted either; None: it needs none
    drawn: tuple[str, ...]
    machine: Mapping[str, Any]

    def __getitem__(self, name: str) -> Timing:
        return next(t for t in self.timings if t.name == name)

    def record(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**asdict(self), "shape": self.shape._asdict(), "machine": dict(self.machine)}

    def json(self, indent: int | None = 2) -> str:
        """Everything as JSON text."""
        return json.dumps(self.record(), indent=indent)

    def __rich__(self) -> Table:
        title = f"{self.variant}, {self.shape} {self.dtype}, {self.kept:.1%} of pairs kept"
        notes = Text("\n".join(self._notes()))
        table = Table(title=Text(title), caption=notes, caption_justify="left")
        for head in ("", "ms", "TFLOP/s", "time / ours", "error", "first call"):
            table.add_column(head, justify="right" if head else "left")
        for t in self.timings:
            cells = (
                "" if t.ms is None else f"{t.ms:.4g}",
                "" if t.tflops is None else f"{t.tflops:.0f}",
                "" if t.ratio is None else f"{t.ratio:.2f}",
                "" if t.error is None else f"{t.error:.1e}",
                "" if t.first_s is None else f"{t.first_s:.2f} s",
            )
            table.add_row(t.name, *cells)
        return table

    def _notes(self) -> list[str]:
        notes = [f"drawn: {words}" for words in self.drawn]
        notes += [f"{t.name}: {t.note}" for t in self.timings if t.note]
        if self.block_mask_ms is not None:
            notes.append(f"{FLEX}'s block mask takes {self.block_mask_ms:.3g} ms, not counted")
        if self.structure_ms is not None:
            notes.append(f"our tile structure takes {self.structure_ms:.3g} ms, not counted")
        versions = (f"{name} {self.machine.get(name)}" for name in ("torch", "triton"))
        return [*notes, f"{self.machine['gpu']}, {', '.join(versions)}"]

    def __str__(self) -> str:
        shown = io.StringIO()
        Console(file=shown, width=100).print(self)
        return shown.getvalue()

    def plot(self, path: str | Path) -> None:
        """Draw TFLOP/s with the spread of the rounds; needs matplotlib."""
        try:
            pyplot = import_module("matplotlib.pyplot")
        except ImportError:
            raise ScoremodError(
                "plot needs matplotlib", hint="pip install 'scoremod[plot]'"
            ) from None
        timed = [t for t in self.timings if t.rounds_ms]
        figure, axes = pyplot.subplots(figsize=(7, 1 + 0.5 * len(timed)), layout="constrained")
        for row, t in enumerate(timed):
            times = statistics.median(t.rounds_ms), max(t.rounds_ms), min(t.rounds_ms)
            middle, slow, fast = (self.flop / ms / 1e9 for ms in times)
            spread = [[middle - slow], [fast - middle]]
            axes.barh(row, middle, xerr=spread, color="C0" if t.name == OURS else "0.7")
        axes.set_yticks(range(len(timed)), [t.name for t in timed])
        axes.invert_yaxis()
        axes.set_xlabel("TFLOP/s of the pairs that the mask keeps")
        axes.set_title(f"{self.variant}, {self.shape} {self.dtype}, {self.machine['gpu']}", size=9)
        figure.savefig(path)
        pyplot.close(figure)


def bench(
    variant: Variant,
    *,
    shape: Shape | Sequence[int],
    dtype: torch.dtype | str = torch.bfloat16,
    captures: Mapping[str, Any] | None = None,
    against: Sequence[str] = ("flex", "sdpa"),
    rounds: int = 5,
    seed: int = 0,
    backend: str | None = None,
) -> BenchResult:
    """Time a variant's forward beside peers on the current GPU.

    shape: (batch, q_heads, kv_heads, q_len, kv_len, head_dim, v_head_dim). Captures that are not
    given are drawn by declared type, and the result says so. FlexAttention is compiled anew:
    Dynamo's cache is reset. SDPA takes part where it has the mask: none, or causal. `backend` is
    ours, `"triton"` for the portable kernels; by default what a call chooses.
    """
    names = peers(against)
    if len(shape) != len(Shape._fields):
        raise InputMismatch(f"shape must be ({', '.join(Shape._fields)}), not {tuple(shape)}")
    torch_dtype = DTYPE_OF[element(dtype)]
    if torch_dtype not in TOLERANCE:
        raise InputMismatch(f"bench takes f16, bf16 or f32, not {dtype}")
    rig = gpu_rig()
    values = captures or {}
    case = prepare(variant, Shape(*shape), torch_dtype, values, rig.device, seed, backend)
    return measure(case, names, rig, rounds, machine())


def peers(against: Sequence[str]) -> list[str]:
    """The candidates' names of `against`."""
    for name in against:
        if name not in AGAINST:
            raise InputMismatch(
                f"there is no peer {name!r}", hint=f"there are {', '.join(AGAINST)}"
            )
    return list(dict.fromkeys(full for name in against for full in AGAINST[name]))


@torch.no_grad()
def measure(
    case: Case, names: Sequence[str], rig: Rig, rounds: int, made_by: Mapping[str, Any]
) -> BenchResult:
    """Build, compare and time every candidate."""
    candidates = [candidate(name, case, rig) for name in (OURS, *names)]
    compare(candidates, case.q.dtype)
    race(candidates, rig, max(1, rounds))
    kept = kept_pairs(case)
    flop = 2 * kept * (case.shape.head_dim + case.shape.v_head_dim)
    ours_ms = statistics.median(candidates[0].rounds_ms)
    pairs = case.shape.batch * case.shape.q_heads * case.shape.q_len * case.shape.kv_len
    return BenchResult(
        variant=case.variant.name,
        text=str(case.variant),
        shape=case.shape,
        dtype=str(case.q.dtype).removeprefix("torch."),
        kept=kept / pairs,
        flop=flop,
        timings=tuple(_timing(c, flop, ours_ms) for c in candidates),
        block_mask_ms=_block_mask_ms(candidates, rig),
        structure_ms=_median_ms(case.tiles.refresh, rig) if case.tiles is not None else None,
        drawn=case.drawn,
        machine=made_by,
    )


def _timing(made: Candidate, flop: int, ours_ms: float) -> Timing:
    ms = statistics.median(made.rounds_ms) if made.rounds_ms else None
    return Timing(
        made.name,
        ms,
        None if ms is None else flop / ms / 1e9,
        None if ms is None else ms / ours_ms,
        made.error,
        made.first_s,
        tuple(made.rounds_ms),
        made.note,
    )


def _block_mask_ms(candidates: Sequence[Candidate], rig: Rig) -> float | None:
    make_mask = next((c.block_mask for c in candidates if c.block_mask is not None), None)
    if make_mask is None:
        return None
    return _median_ms(make_mask, rig)


def _median_ms(work: Callable[[], object], rig: Rig) -> float:
    work()
    return statistics.median(rig.elapsed(work, 1) for _ in range(5))


def machine(commit: str | None = None) -> dict[str, Any]:
    """What a result depends on: GPU, versions, commit, command."""
    on_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else platform.processor() or "CPU",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "cudnn": _cudnn.version() if on_gpu else None,
        "python": platform.python_version(),
        "scoremod": _version("scoremod"),
        "commit": commit or _commit(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": _command(sys.argv),
    }


def _command(argv: Sequence[str]) -> str:
    """The command line that started this process."""
    script = ["python", argv[0]] if argv[0].endswith(".py") else [Path(argv[0]).name]
    return shlex.join([*script, *argv[1:]])


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of this checkout, `+` if files were changed; None outside a checkout."""
    folder = str(Path(__file__).parent)

    def git(*words: str) -> str:
        command = ["git", "-C", folder, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # An installed package may lie below somebody else's checkout.
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


# -- the command line --------------------------------------------------------------------------

_OPTIONS = (
    click.option("--len", "length", default=8192, show_default=True, help="Queries."),
    click.option("--kv-len", type=int, help="Keys; as many as queries if left out."),
    click.option("--batch", default=2, show_default=True),
    click.option("--heads", default=16, show_default=True, help="Query heads."),
    click.option("--kv-heads", type=int, help="As many as query heads if left out."),
    click.option("--head-dim", default=128, show_default=True),
    click.option("--v-head-dim", type=int, help="As --head-dim if left out."),
    click.option("--dtype", default="bf16", show_default=True, help="f16, bf16 or f32."),
    click.option("--against", multiple=True, default=("flex", "sdpa"), show_default=True),
    click.option("--backend", help="Ours: triton or hopper; what a call chooses if left out."),
    click.option("--rounds", type=click.IntRange(1), default=5, show_default=True),
    click.option("--plot", type=click.Path(dir_okay=False), help="Draw into a file."),
)


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a click command the options of `from_options`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def from_options(
    variant: Variant, captures: Mapping[str, Any], how: Mapping[str, Any]
) -> BenchResult:
    """`bench` by the words of the command line; draws if asked to."""
    words = {name: how[name] for name in ("dtype", "against", "backend", "rounds")}
    result = bench(variant, shape=shape_of(how), captures=captures, **words)
    if how["plot"] is not None:
        result.plot(how["plot"])
    return result


def shape_of(how: Mapping[str, Any]) -> Shape:
    """The shape that options describe."""
    heads, length, head_dim = how["heads"], how["length"], how["head_dim"]
    of_heads = (heads, how["kv_heads"] or heads)
    lengths = (length, how["kv_len"] or length)
    return Shape(how["batch"], *of_heads, *lengths, head_dim, how["v_head_dim"] or head_dim)

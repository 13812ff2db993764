"""Bundles on a GPU: built elsewhere, loaded where Triton cannot be imported, timed beside JIT.

    python benchmarks/bundles.py --build DIR [--quick]      needs no GPU; minutes
    python benchmarks/bundles.py --run DIR                  needs one; about a minute on an H200

`--quick` builds the kernels of usual calls alone, which are those that are timed.

A process in which `import triton` fails loads the bundles; another compiles the same variants. Both
compare output and gradients with the oracle, then they take turns: one is timed while the other
waits. Writes bundles.json and bundles.md to benchmarks/results/, or to $OUT; a bundle is to be as
fast as JIT to within 2 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
TARGET, DTYPE, HEAD_DIMS = "cuda:90", "bf16", (64, 128)
WITHIN = {"forward": 1.02, "backward": 1.02, "host": 1.1}  # the host's times vary more
# Of values of size 1, in bf16.
LIMIT = 0.06
SIDES = ("bundle", "jit")


def variants() -> dict[str, Any]:
    """The variants by their names, which are those of the files too."""
    from scoremod.variants import alibi, causal, document, sliding_window, softcap

    return {
        "alibi": alibi & causal,
        "gemma": softcap.bind(cap=50.0) & sliding_window.bind(window=1024),
        "documents": document & causal,
    }


def captures(name: str, batch: int, heads: int, length: int) -> dict[str, Any]:
    """Values of what a variant captures."""
    from forward import documents

    from scoremod.variants import alibi_slopes

    return {
        "alibi": lambda: {"slopes": alibi_slopes(heads)},
        "gemma": dict,
        "documents": lambda: {"doc": documents(batch, length)},
    }[name]()


# -- building ----------------------------------------------------------------------------------


def build_one(name: str, folder: Path, quick: bool) -> str:
    """Build one bundle; says how large it is, and how long it took."""
    start = time.monotonic()
    if quick:
        _only_usual()
    made = variants()[name].build(
        folder / f"{name}.smk",
        target=TARGET,
        dtype=DTYPE,
        head_dim=HEAD_DIMS,
        phase=("fwd", "bwd"),
    )
    size = made.stat().st_size
    return f"{made}: {size / 1e6:.1f} MB in {time.monotonic() - start:.0f} s"


def _only_usual() -> None:
    """Leave out of this process's bundles what is not timed."""
    from scoremod import ahead

    calls = ahead.calls

    def usual(*args: Any) -> list[tuple[str, Any]]:
        return [c for c in calls(*args) if c[0] in ("usual", "multiples of 16")]

    ahead.calls = usual


def build(folder: Path, names: Sequence[str], workers: int, quick: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    several = [folder] * len(names), [quick] * len(names)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for line in pool.map(build_one, names, *several):
            print(line, flush=True)


# -- one side ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Of a call, and of the call that is compared with the oracle."""

    batch: int
    heads: int
    length: int


TIMED, CHECKED = Sizes(2, 16, 8192), Sizes(2, 4, 300)
SMALL = {"cpu": (Sizes(1, 2, 64), Sizes(1, 2, 40))}  # to try the script without a GPU


@dataclass(frozen=True)
class Asked:
    """What a side is to do: check, or time forward, backward or the host's part of a call."""

    what: str
    name: str
    head_dim: int


class Side:
    """One process: variants from bundles, or compiled."""

    def __init__(self, side: str, folder: Path, device: str) -> None:
        import torch

        import scoremod

        self._torch, self._device = torch, device
        self._timed, self._checked = SMALL.get(device, (TIMED, CHECKED))
        self._variants: dict[str, Any] = {}
        self._loaded: dict[str, float] = {}
        for name, variant in variants().items():
            file = folder / f"{name}.smk"
            if side == "bundle" and file.exists():
                start = time.perf_counter()
                variant = scoremod.load(file)
                self._loaded[name] = 1e3 * (time.perf_counter() - start)
            self._variants[name] = variant
        self._works: dict[Asked, Callable[[], Any]] = {}

    def answer(self, asked: Asked) -> Any:
        """A number, or for a check what is off."""
        if asked.what == "check":
            return self._check(asked)
        if asked.what == "load":
            return self._loaded.get(asked.name)
        if asked not in self._works:
            self._works[asked] = self._work(asked)
        time_of = self._host_us if asked.what == "host" else self._milliseconds
        return time_of(self._works[asked])

    def _call(self, asked: Asked, sizes: Sizes, *, grad: bool) -> tuple[list[Any], dict[str, Any]]:
        torch = self._torch
        torch.manual_seed(asked.head_dim)
        shape = sizes.batch, sizes.heads, sizes.length, asked.head_dim
        dtype = torch.bfloat16 if self._device == "cuda" else torch.float32
        qkv = [torch.randn(shape, dtype=dtype, device=self._device) for _ in "qkv"]
        given = captures(asked.name, sizes.batch, sizes.heads, sizes.length)
        return [x.requires_grad_(grad) for x in qkv], {
            n: x.to(self._device) for n, x in given.items()
        }

    def _check(self, asked: Asked) -> str:
        """Output and gradients against the oracle; "" where they agree."""
        torch, found = self._torch, {}
        qkv, given = self._call(asked, self._checked, grad=True)
        attn = self._variants[asked.name]
        exact = [x.detach().float().requires_grad_() for x in qkv]
        for side, attend, leaves in (("ours", attn, qkv), ("oracle", attn.eager, exact)):
            out = attend(*leaves, **given)
            do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
            gradients = torch.autograd.grad(out, leaves, do.to(out))
            found[side] = dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))
        bad = []
        for name, wanted in found["oracle"].items():
            error = (found["ours"][name].float() - wanted).abs().max()
            if not error <= LIMIT * wanted.abs().max().clamp_min(1):
                bad.append(f"{name} is off by {error:.2g}")
        return "; ".join(bad)

    def _work(self, asked: Asked) -> Callable[[], Any]:
        attn, torch = self._variants[asked.name], self._torch
        sizes = Sizes(1, 4, 256) if asked.what == "host" else self._timed
        qkv, given = self._call(asked, sizes, grad=asked.what == "backward")
        if asked.what != "backward":
            return lambda: attn(*qkv, **given)
        out = attn(*qkv, **given)
        do = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, qkv, do, retain_graph=True)

    def _milliseconds(self, work: Callable[[], Any]) -> float:
        """The time of a call on the device, of about 40 ms of them."""
        if self._device != "cuda":
            return self._host_us(work) / 1e3
        torch = self._torch
        for _ in range(3):
            work()
        count = 4
        while True:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # 50 ms in which the host runs ahead: it takes longer than a short backward.
            torch.cuda._sleep(10**8)
            start.record()
            for _ in range(count):
                work()
            end.record()
            torch.cuda.synchronize()
            spent = start.elapsed_time(end)
            if spent > 30:
                return spent / count
            count = max(count * 2, int(count * 40 / max(spent, 0.1)))

    def _host_us(self, work: Callable[[], Any]) -> float:
        """The host's part of a call, without waiting for the device."""
        number = 300 if self._device == "cuda" else 3
        times = []
        for _ in range(number):
            start = time.perf_counter()
            work()
            times.append(1e6 * (time.perf_counter() - start))
        if self._device == "cuda":
            self._torch.cuda.synchronize()
        return statistics.median(times)


def serve(line: Connection, side: str, folder: Path, device: str) -> None:
    """Answer until told to stop."""
    if side == "bundle":
        assert "triton" not in sys.modules
        sys.modules["triton"] = None  # type: ignore[assignment]  # from here on importing it fails
    one = Side(side, folder, device)
    while (asked := line.recv()) is not None:
        try:
            line.send(one.answer(asked))
        except Exception as error:
            line.send(f"{type(error).__name__}: {error}")


# -- both sides --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One measurement: medians of both sides, and of the ratios within a round."""

    variant: str
    head_dim: int
    what: str  # forward and backward in ms, host in us
    bundle: float
    jit: float
    ratio: float

    @property
    def good(self) -> bool:
        return self.ratio <= WITHIN[self.what]


def warm_up(name: str, head_dim: int, device: str) -> None:
    """Compile what JIT is going to need into the cache, beside others that do."""
    side = Side("jit", Path(), device)
    for what in ("check", "forward", "backward", "host"):
        side.answer(Asked(what, name, head_dim))


@contextlib.contextmanager
def sides(folder: Path, device: str) -> Iterator[dict[str, Connection]]:
    """A connection to each process."""
    context = multiprocessing.get_context("spawn")
    lines: dict[str, Connection] = {}
    for side in SIDES:
        lines[side], theirs = context.Pipe()
        arguments = (theirs, side, folder, device)
        context.Process(target=serve, args=arguments, daemon=True).start()
    yield lines
    for line in lines.values():
        line.send(None)


def ask(line: Connection, asked: Asked) -> Any:
    line.send(asked)
    return line.recv()


def measured(lines: dict[str, Connection], asked: Asked, rounds: int) -> Row | str:
    """Both sides in turns; what went wrong where one has no number."""
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(rounds + 1):  # the first round warms up
        for side in SIDES if number % 2 else SIDES[::-1]:
            found = ask(lines[side], asked)
            if not isinstance(found, float):
                return f"{side}, {asked}: {found}"
            if number:
                times[side].append(found)
    pairs = zip(times["bundle"], times["jit"], strict=True)
    ratio = statistics.median(b / j for b, j in pairs)
    medians = (statistics.median(times[side]) for side in SIDES)
    return Row(asked.name, asked.head_dim, asked.what, *medians, ratio)


def run(given: argparse.Namespace, names: Sequence[str]) -> int:
    pairs = [(name, dim) for name in names for dim in HEAD_DIMS]
    with ProcessPoolExecutor(given.workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(warm_up, *zip(*pairs, strict=True), [given.device] * len(pairs)))
    rows, wrong, loads = [], [], {}
    with sides(given.run, given.device) as lines:
        for name, dim in pairs:
            for side in SIDES:
                bad = ask(lines[side], Asked("check", name, dim))
                wrong += [f"{side}, {name}, head dim {dim}: {bad}"] if bad else []
            loads[name] = ask(lines["bundle"], Asked("load", name, dim))
            for what in ("forward", "backward", "host"):
                row = measured(lines, Asked(what, name, dim), given.rounds)
                print(row, flush=True)
                (rows if isinstance(row, Row) else wrong).append(row)  # type: ignore[arg-type]
    write(given, rows, wrong, loads)
    return 1 if wrong or not all(row.good for row in rows) else 0


HEAD = """# Bundles beside JIT

{gpu}; torch {torch}, triton {triton} in JIT's process and none in the bundle's; commit {commit};
{date}. Command: `{command}`.
bf16, {timed.batch}x{timed.heads}x{timed.length}; the host's time at 1x4x256. Medians of the rounds;
the ratio is that within a round.

| variant | head dim | what | bundle | JIT | bundle / JIT |
|---|---|---|---|---|---|"""


def write(
    given: argparse.Namespace, rows: list[Row], wrong: list[str], loads: dict[str, float]
) -> None:
    """The table, for people and for machines."""
    from scoremod import bench as benches

    machine = benches.machine(given.commit)
    lines = [HEAD.format(**machine, timed=TIMED)]
    for row in rows:
        unit = "us" if row.what == "host" else "ms"
        values = f"{row.bundle:.3f} {unit} | {row.jit:.3f} {unit} | {row.ratio:.3f}"
        lines.append(f"| {row.variant} | {row.head_dim} | {row.what} | {values} |")
    lines += ["", *(f"Wrong: {x}" for x in wrong)]
    loaded = ", ".join(f"{name} {ms:.1f}" for name, ms in loads.items() if isinstance(ms, float))
    lines.append(f"Loading a bundle, ms: {loaded}.")
    text = "\n".join(lines) + "\n"
    folder = Path(os.environ.get("OUT") or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bundles.md").write_text(text, encoding="utf-8")
    record = {
        "machine": machine,
        "rows": [{**asdict(row), "good": row.good} for row in rows],
        "wrong": wrong,
        "load_ms": loads,
    }
    (folder / "bundles.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--build", type=Path, metavar="DIR")
    what.add_argument("--run", type=Path, metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="only what is timed")
    parser.add_argument("--only", default="", help="names of variants, separated by commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=min(6, os.cpu_count() or 1))
    parser.add_argument("--commit", help="where git cannot tell it")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a trial")
    given = parser.parse_args()
    names = [n for n in variants() if not given.only or n in given.only.split(",")]
    if not names:
        parser.error(f"--only takes {', '.join(variants())}")
    if given.build:
        build(given.build, names, given.workers, given.quick)
        return 0
    absent = [str(f) for n in names if not (f := given.run / f"{n}.smk").is_file()]
    if absent:
        parser.error(f"--run: there is no {', '.join(absent)}; --build DIR makes it")
    return run(given, names)


if __name__ == "__main__":
    sys.exit(main())

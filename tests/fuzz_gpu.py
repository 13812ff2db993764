"""Random variants on a GPU: compiled by processes that share it, run at many shapes each.

    python tests/fuzz_gpu.py --seconds 150 --seed 1 [--device cuda] [--out fuzz_gpu.json]
    python tests/fuzz_gpu.py --device compile     only compile, for cuda:90, where there is no GPU
    python tests/fuzz_gpu.py --device cpu         the same calls on the `cpu` backend
    python tests/fuzz_gpu.py --repeat JOB CALL    one call again: its numbers are in the summary

A job is a variant with a dtype, head dims and a backend, which decide its kernels; its calls are of
many lengths, offsets, groups of heads and strides. Around every tensor lie nans, and outputs begin
as nans. What is compared, and how nearly, is said in `rounding.py`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import rounding
import torch
from fuzz_variants import Draw, bodies, captures, declaration, inputs, tiles_of
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor

import scoremod
from scoremod import ahead, api, attend_triton, attention
from scoremod.inputs import check_inputs
from scoremod.plan_triton_backward import Learned
from scoremod.target import parse_target

# -- jobs --------------------------------------------------------------------------------------

# What people write, beside what `bodies` draws: masks with and without structure, and scores.
MASKS = ("", "j <= i", "0 <= i - j < n", "j <= i or j < n", "keep[j] and j <= i", "pair[i, j]",
         "seq[b, i] == seq[b, j] and j <= i", "doc[i] == doc[j]", "i // 64 == j // 64",
         "(i - j) % 3 == 0 and j <= i", "j <= i and (i - j < 64 or j < 4)", "h % 2 == 0 or j <= i",
         "i // 32 % 2 == j // 32 % 2", "abs(i - j) < 40 or i % 50 == 0")  # fmt: skip
SCORES = ("", "s - x * float(i - j) / 16.0", "20.0 * tanh(s / 20.0)", "s + bias[j]",
          "s + rel[h, j]", "s + rel[h, abs(i - j)]", "s * x + y", "s + bias[i] * 0.5",
          "where(s > 0.5, s, s * 0.25)", "s - log1p(abs(float(i - j))) * 0.5")  # fmt: skip
Q_LENS = (128, 200, 65, 33, 129, 257, 17, 320, 64)
KV_LENS = (128, 200, 129, 333, 64, 40, 1, 256, 17, 448)
OFFSETS = (0, 0, 1, 64, 100)
HEADS = ((4, 2), (1, 1), (2, 2), (3, 1), (8, 2))
HEAD_DIMS = ((64, 64), (128, 128), (64, 64), (128, 128), (16, 16), (80, 48), (40, 40), (128, 64),
             (256, 256), (192, 128))  # fmt: skip
BLOCK = 128  # of lists of blocks
ALIGNED, OTHERS = ("plain", "heads last"), ("every second", "transposed", "inside")


@dataclass(frozen=True)
class Job:
    """A variant and what decides its kernels."""

    number: int
    body: str
    dtype: str
    head_dims: tuple[int, int]
    backend: str  # `auto`: Hopper's where it takes the call
    precision: str
    calls: tuple[Draw, ...]


def drawn_bodies(number: int, count: int) -> list[str]:
    """Bodies of the whole language, each once."""
    found: list[str] = []

    @seed(number)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(bodies())
    def draw(body: str) -> None:
        found.append(body)

    draw()
    return list(dict.fromkeys(found))


def jobs(number: int, count: int, calls: int) -> list[Job]:
    """Jobs, from a seed: every other one is of what people write."""
    rng = random.Random(number)
    drawn = drawn_bodies(number, count // 2 + 1)
    rng.shuffle(drawn)
    usual = [
        "\n".join(x for x in (f"score {s}" if s else "", f"mask {m}" if m else "") if x)
        for s, m in itertools.product(SCORES, MASKS)
        if s or m
    ]
    rng.shuffle(usual)
    pairs = zip(itertools.cycle(usual), drawn, strict=False)
    return [_job(k, body, calls, rng) for k, body in enumerate(itertools.chain(*pairs))]


def _job(number: int, body: str, calls: int, rng: random.Random) -> Job:
    dtype = rng.choice(("float16", "bfloat16", "bfloat16", "float32"))
    head_dims, by_value = rng.choice(HEAD_DIMS), rng.random() < 0.7
    # Hopper's kernels with exact functions are refused after a minute of assembling.
    backend = "triton" if dtype == "float32" else rng.choice(("auto", "auto", "triton"))
    precision = rng.choice(("auto", "exact")) if backend == "triton" else "auto"

    def usual() -> Draw:
        return Draw(
            rng.randrange(10_000), rng.choice(Q_LENS), rng.choice(KV_LENS), rng.choice(OFFSETS),
            by_value, False, rng.choice(HEADS), head_dims, dtype, rng.choice(ALIGNED),
            "prepared" if rng.random() < 0.25 else "none",
        )  # fmt: skip

    # A second kind of call has kernels of its own.
    change: Callable[[Draw], Draw] = rng.choice(
        (
            lambda c: replace(c, per_batch=True),
            lambda c: replace(c, layout=rng.choice(OTHERS)),
            lambda c: replace(c, q_len=rng.choice((1, 2, 16, 0))),
            lambda c: replace(c, tiles="blocks"),
        )
    )
    kinds = [usual() for _ in range(calls)]
    kinds[1::3] = [change(c) for c in kinds[1::3]]
    return Job(number, body, dtype, head_dims, backend, precision, tuple(kinds))


# -- one call ----------------------------------------------------------------------------------

POISON = {torch.bool: True, torch.int32: 2**30, torch.int64: 2**46}
SLACK = 64  # elements on both sides


def surrounded(x: Any, device: str) -> Any:
    """The same tensor with values around it that must not be read."""
    if not isinstance(x, Tensor) or x.ndim == 0:
        return x.to(device) if isinstance(x, Tensor) else x
    span = (
        1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    )
    store = torch.full((span + 2 * SLACK,), POISON.get(x.dtype, torch.nan), dtype=x.dtype)
    store = store.to(device)
    made = store.as_strided(x.shape, x.stride(), SLACK)
    made.copy_(x)
    return made


def variant_of(job: Job, call: Draw, device: str) -> tuple[Any, dict[str, Any]]:
    """The variant, and the captures that it has."""
    used = set(re.findall(r"\w+", job.body))
    values = {n: surrounded(x, device) for n, x in captures(call).items() if n in used}
    declared = ", ".join(map(declaration, values))
    return scoremod.parse(f"variant v({declared}) {{\n{job.body}\n}}"), values


def prepared(job: Job, call: Draw, device: str) -> rounding.Call:
    """A call with all its tensors."""
    attn, values = variant_of(job, call, device)
    qkv = tuple(surrounded(x, device) for x in inputs(call))
    options: dict[str, Any] = {"scale": 0.25, "q_offset": call.q_offset, "return_lse": True}
    if call.per_batch:
        ends = [call.q_offset, call.q_offset // 2], [call.kv_len // 2, call.kv_len + 1]
        options["q_offset"], options["kv_lens"] = (torch.tensor(x, device=device) for x in ends)
    read = attn._program.score.names
    learned = tuple(
        n
        for n, x in values.items()
        if isinstance(x, Tensor) and x.is_floating_point() and n in read
    )
    tiles = tiles_of(attn, call, device, options, values, block=BLOCK)
    return rounding.Call(attn, qkv, values, options, learned, tiles)


def run(job: Job, call: Draw, device: str) -> list[rounding.Off]:
    """Compare one call with the oracle, forward and backward, and the forward without gradients."""
    found = prepared(job, call, device)
    backend = {"cpu": "cpu"}.get(device) or (None if job.backend == "auto" else job.backend)

    def attend(*qkv: Tensor, **given: Any) -> Any:
        poison_memory(qkv[0])
        how = {"backend": backend, "precision": job.precision, "tiles": found.tiles}
        return found.variant(*qkv, **how, **given)

    mine = rounding.results(attend, found, found.qkv)
    precision = "exact" if job.precision == "exact" or job.dtype == "float32" else "fast"
    offs = rounding.compare(mine, found, job.body, precision)
    with torch.no_grad():
        alone, warm = (attend(*found.qkv, **found.options, **found.captures)[0] for _ in range(2))
    same = torch.equal(alone.nan_to_num(77), warm.nan_to_num(77))
    offs.append(rounding.Off("out, warm", 0.0 if same else torch.inf, 0.0))
    # Without gradients the kernel may be one of other tiles, which rounds elsewhere.
    limit = 2 * next(off.limit for off in offs if off.result == "out")
    error = rounding.difference(alone.double(), mine["out"].double())
    offs.append(rounding.Off("out, alone", error, limit))
    return offs


def poison_memory(like: Tensor) -> None:
    """Leave nans where the next allocations will be."""
    for size in (like.numel(), 4 * like.numel(), like.numel() // max(1, like.shape[-1])):
        torch.full((size,), torch.nan, dtype=like.dtype, device=like.device)


def compile_only(job: Job, call: Draw) -> None:
    """Compile for sm_90 what a call would run, forward and backward."""
    found = prepared(job, call, "cpu")
    options = {n: found.options.get(n) for n in ("scale", "q_offset", "kv_lens")}
    given = check_inputs(*found.qkv, **options, precision=job.precision)
    given = replace(given, tiles=api._tiles(found.tiles, given))
    program, bound = found.variant._bind(found.captures, given.sizes, found.qkv[0].device)
    known = found.variant._type(program, bound)
    chosen = attend_triton.options(known, given, bound)
    learned = tuple(Learned(k) for k, x in enumerate(bound) if x.param.name in found.learned)
    shelf, target = ahead.Shelf(), parse_target("cuda:90")
    portable = mock.patch.object(ahead, "_unfit_for_hopper", return_value=True)
    with portable if job.backend == "triton" else nullcontext():
        shelf.run(ahead.Job(known, target, "usual", chosen))
    # The backward of few queries reads no structure, which no bundle has.
    if not chosen.short:
        shelf.run(ahead.Job(known, target, "usual", chosen, learned))


# -- one job, in a process of its own ----------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """A call that is off, or raised."""

    job: int
    call: int
    kind: str
    words: str
    body: str
    how: str
    repeat: str


@dataclass
class Answer:
    """What came of a job."""

    job: int
    cases: int = 0
    seconds: float = 0.0
    worst: float = 0.0  # the largest part of a limit
    fatal: bool = False  # the process can do nothing more
    backends: dict[str, int] | None = None
    failures: tuple[Failure, ...] = ()


def do(job: Job, device: str, until: float, ran: Counter[str]) -> Answer:
    """Run the calls of a job; the first failure ends it, and the time."""
    start, answer = time.monotonic(), Answer(job.number)
    ran.clear()
    for k, call in enumerate(job.calls if device != "compile" else _kinds(job.calls)):
        if time.time() > until:
            break
        try:
            if device == "compile":
                compile_only(job, call)
                answer.cases += 1
                continue
            offs = run(job, call, device)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".strip()
            answer.failures = (_failure(job, k, call, device, "raised", text[:2000]),)
            answer.fatal = "CUDA" in text
            break
        answer.cases += 1
        bad = [x for x in offs if not x.good]
        answer.worst = max([answer.worst, *(x.error / x.limit for x in offs if x.limit)])
        if bad:
            words = "; ".join(f"{x.result}: {x.error:.3g} > {x.limit:.3g}" for x in bad)
            answer.failures = (_failure(job, k, call, device, f"off: {bad[0].result}", words),)
            break
    answer.seconds, answer.backends = time.monotonic() - start, dict(ran)
    return answer


def _kinds(calls: Sequence[Draw]) -> list[Draw]:
    """One call of each kind: they share kernels."""
    kinds = ((c.per_batch, c.layout in ALIGNED, c.q_len <= 16, c.tiles == "blocks") for c in calls)
    return list(dict(zip(kinds, calls, strict=True)).values())


def _failure(job: Job, k: int, call: Draw, device: str, kind: str, words: str) -> Failure:
    how = f"{job.backend} {job.precision} {call}"
    one = json.dumps(asdict(replace(job, calls=(call,))))
    repeat = f"PYTHONPATH=.:tests python tests/fuzz_gpu.py --device {device} --repeat '{one}'"
    return Failure(job.number, k, kind, words, job.body, how, repeat)


def serve(line: Connection, device: str, until: float) -> None:
    """Do jobs as they come; after an error of the device this process ends."""
    if device != "cpu":
        os.environ.pop("TRITON_INTERPRET", None)  # set where a test's module saw no GPU
    torch.set_num_threads(1)
    ran = count_backends()
    while (job := line.recv()) is not None:
        answer = do(job, device, until, ran)
        line.send(answer)
        gc.collect()
        if answer.fatal:
            return


def count_backends() -> Counter[str]:
    """How often each backend ran; a warm call is not counted."""
    ran: Counter[str] = Counter()

    def counted(name: str, attend: Any) -> Any:
        def run_one(*call: Any) -> Any:
            ran[name] += 1
            return attend(*call)

        return run_one

    attention.RUN = {name: counted(name, attend) for name, attend in attention.RUN.items()}
    return ran


# -- processes ---------------------------------------------------------------------------------

JOB_SECONDS = 200.0  # then a kernel is taken to hang
GRACE = 10.0  # seconds


class Worker:
    """A process, and the job that it has."""

    def __init__(self, device: str, until: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, device, until), daemon=True)
        self.process.start()
        theirs.close()
        self.job: Job | None = None
        self.since = 0.0

    def give(self, job: Job) -> None:
        self.job, self.since = job, time.monotonic()
        self.line.send(job)

    def lost(self, device: str, why: str) -> Answer:
        """The answer for a job whose process is gone."""
        assert self.job is not None
        failure = _failure(self.job, 0, self.job.calls[0], device, "process", why)
        return Answer(self.job.number, fatal=True, failures=(failure,))


def all_answers(
    waiting: Iterator[Job], device: str, number: int, seconds: float, unfinished: list[Job]
) -> Iterator[Answer]:
    """Answers as they come; a kernel that is compiled when the time is up has some more.

    Jobs that have no answer then are `unfinished`.
    """
    until = time.time() + seconds
    workers = []

    def start(job: Job | None) -> None:
        if job is not None and time.time() < until:
            workers.append(Worker(device, until))
            workers[-1].give(job)

    for _ in range(number):
        start(next(waiting, None))
    while workers and time.time() < until + GRACE:
        ready = set(wait([w.line for w in workers], timeout=1.0))
        for worker in list(workers):
            answer = _answer_of(worker, device, arrived=worker.line in ready)
            if answer is None:
                continue
            yield answer
            job = next(waiting, None) if time.time() < until else None
            if job is not None and not answer.fatal:
                worker.give(job)
                continue
            worker.process.kill()
            workers.remove(worker)
            start(job)
    for worker in workers:
        assert worker.job is not None
        unfinished.append(worker.job)
        worker.process.kill()


def _answer_of(worker: Worker, device: str, *, arrived: bool) -> Answer | None:
    if arrived:
        try:
            answer: Answer = worker.line.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join(5)
            return worker.lost(device, f"ended with code {worker.process.exitcode}")
        return answer
    if time.monotonic() - worker.since > JOB_SECONDS:
        return worker.lost(device, f"no answer in {JOB_SECONDS} s")
    return None


# -- the command -------------------------------------------------------------------------------


def summary(answers: Sequence[Answer], given_: argparse.Namespace, wall: float) -> dict[str, Any]:
    """What ran and what failed, for a machine."""
    backends: Counter[str] = Counter()
    for answer in answers:
        backends.update(answer.backends or {})
    failures = [f for a in answers for f in a.failures]
    return {
        "device": torch.cuda.get_device_name() if given_.device == "cuda" else given_.device,
        "seed": given_.seed,
        "seconds": round(wall, 1),
        "jobs": len(answers),
        "cases": sum(a.cases for a in answers),
        "forwards": dict(backends),
        "worst_part_of_a_limit": max((a.worst for a in answers), default=0.0),
        "kinds": Counter(f.kind for f in failures),
        "failures": [asdict(f) for f in failures],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu", "compile"), default="cuda")
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--jobs", type=int, default=400, help="at most")
    parser.add_argument("--calls", type=int, default=30, help="of a job")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeat", metavar="JOB", help="as a summary's failure gives it")
    given_ = parser.parse_args()
    if given_.repeat:
        return repeat(given_.repeat, given_.device)
    start = time.monotonic()
    waiting = iter(jobs(given_.seed, given_.jobs, given_.calls))
    answers: list[Answer] = []
    unfinished: list[Job] = []
    how = given_.device, given_.workers, given_.seconds
    for answer in all_answers(waiting, *how, unfinished):
        answers.append(answer)
        for f in answer.failures:
            print(f"{f.kind}\n  {f.words[:400]}\n  {f.body!r}\n  {f.how}", flush=True)
    found = summary(answers, given_, time.monotonic() - start)
    found["unfinished"] = [f"{job.backend} {job.precision} {job.body!r}" for job in unfinished]
    folder = Path(os.environ.get("OUT") or "build")
    out = given_.out or folder / "fuzz_gpu.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    found["unfinished"] = len(unfinished)
    print({k: x for k, x in found.items() if k != "failures"}, f"-> {out}")
    return 1 if found["failures"] else 0


def repeat(text: str, device: str) -> int:
    """One call again, all its results told."""
    if device != "cpu":
        os.environ.pop("TRITON_INTERPRET", None)
    read = json.loads(text)
    tuples = {"heads", "head_dims"}
    calls = [
        Draw(**{n: tuple(x) if n in tuples else x for n, x in c.items()}) for c in read["calls"]
    ]
    job = Job(**{**read, "head_dims": tuple(read["head_dims"]), "calls": tuple(calls)})
    (call,) = job.calls
    if device == "compile":
        compile_only(job, call)
        return 0
    offs = run(job, call, device)
    for off in offs:
        verdict = "good" if off.good else "BAD"
        print(f"{verdict:4}  {off.result:10} {off.error:.3e} <= {off.limit:.3e}")
    return any(not off.good for off in offs)


if __name__ == "__main__":
    sys.exit(main())

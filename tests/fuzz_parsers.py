"""Mutated inputs of both front ends: each gives a variant or an error of scoremod's, in a second.

python tests/fuzz_parsers.py --seconds 1800 --most 1000000 --seed 1

Python inputs are compiled but only a bare function is ever defined: no decorator, no default but
numbers, no annotation is evaluated. Variants must print to a text that reads the same, and every
kernel of theirs must consist of functions, imports and constants alone.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import contextlib
import linecache
import math
import random
import re
import signal
import sys
import time
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import scoremod
from scoremod import variants
from scoremod.errors import ScoremodError

ROOT = Path(__file__).parent.parent
SLOW = 1.0  # seconds of this process's time
HANGS = 20.0
KERNELS = 10  # one variant in so many is rendered

WORDS = """i j s b h hk q_len kv_len t doc w + - * / // % ** & | ^ ~ << >> < <= == != > >= and or
not if else for in range let score mask return def lambda where min max clamp tanh size True False
inf nan ( ) [ ] { } , : ; = . ... # 0 1 -1 64 9223372036854775807 9223372036854775808 0x7f 1e400
1_000 const int float bool tensor[B,L] f32[H] variant import exec __import__ __class__ self None _
' " @ {{ }} #% ##""".split()
# Ends of lines that only some tools know, and letters that Python reads as `s` and `h`.
WORDS += list("\\ \r\n\t\x0c\x00\x85\u2028\u202e\ufeff\u00b2\u017f\u210e")
PYTHON = """def f(s, b, h, i, j, t, w=8):
    near = 0 <= i - j < w
    x = s
    for k in range(3):
        x = x + t[h, k] if i > k else x * 2.0
    def g(y):
        return max(y, -1.0)
    if near and not (i % 4 == 1 or j // 3 > 2):
        return g(x)
    return where(near, x, -inf)
""", """def f(i, j, doc, b):
    return (doc[b, i] == doc[b, j]) & (j <= i) | ~(abs(i - j) < 4)
""", """def f(s, i, j):
    (x, y) = (i, j)
    x += 1
    return s * math.tanh(s / 5.0) + float(x ^ y >> 2) - torch.exp(-s)
"""  # fmt: skip


@dataclass(frozen=True)
class Input:
    """A text for one of the front ends."""

    kind: str  # "text" or "python"
    text: str


def corpus() -> list[Input]:
    """Stock variants as texts, lines of the parser's cases, and a few functions."""
    stock = [str(v) for v in vars(variants).values() if isinstance(v, scoremod.Variant)]
    lines = (ROOT / "tests" / "cases" / "parse.txt").read_text(encoding="utf-8").splitlines()
    cases = [line.split("->")[0].strip() for line in lines if "->" in line]
    texts = [*stock, *(f"variant v(t, w: int = 4) {{ score {case} }}" for case in cases)]
    texts.append("variant v(t) { let x = i for k in range(5) { let x = x ^ (x >> k) } mask x > t }")
    return [Input("text", t) for t in texts] + [Input("python", t) for t in PYTHON * 12]


def mutated(rng: random.Random, items: list[Input]) -> Input:
    """One to six changes to an input."""
    item = rng.choice(items)
    text = item.text
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        text = rng.choice(MUTATIONS)(rng, text, items)
    return Input(item.kind, text[:400_000])


def _place(rng: random.Random, text: str) -> tuple[int, int]:
    """A piece that begins and ends with a word or sign."""
    bounds = [m.start() for m in re.finditer(r"\b|(?<=\W)|(?=\W)", text)] or [0]
    start = rng.randrange(len(bounds))
    return bounds[start], bounds[min(start + rng.randrange(1, 6), len(bounds) - 1)]


def _delete(rng: random.Random, text: str, items: list[Input]) -> str:
    start, end = _place(rng, text)
    return text[:start] + text[end:]


def _replace(rng: random.Random, text: str, items: list[Input]) -> str:
    start, end = _place(rng, text)
    return text[:start] + rng.choice(WORDS) + text[end:]


def _insert(rng: random.Random, text: str, items: list[Input]) -> str:
    at, _ = _place(rng, text)
    return f"{text[:at]} {rng.choice(WORDS)} {text[at:]}"


def _repeat(rng: random.Random, text: str, items: list[Input]) -> str:
    start, end = _place(rng, text)
    return text[:start] + text[start:end] * rng.choice((2, 2, 3, 20, 300)) + text[end:]


def _splice(rng: random.Random, text: str, items: list[Input]) -> str:
    other = rng.choice(items).text
    start, end = _place(rng, other)
    at, to = _place(rng, text)
    return text[:at] + other[start:end] + text[to:]


def _nest(rng: random.Random, text: str, items: list[Input]) -> str:
    start, end = _place(rng, text)
    depth = rng.choice((1, 3, 50, 199, 500))
    left, right = rng.choice((("(", ")"), ("t[", "]"), ("-", ""), ("not ", ""), ("min(1,", ")")))
    return text[:start] + left * depth + text[start:end] + right * depth + text[end:]


def _character(rng: random.Random, text: str, items: list[Input]) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + chr(rng.choice((rng.randrange(128), rng.randrange(0x3000)))) + text[at + 1 :]


MUTATIONS = (_delete, _replace, _replace, _insert, _repeat, _splice, _nest, _character)

# -- what must hold ----------------------------------------------------------------------------


def bare_function(text: str) -> types.FunctionType | None:
    """Define the one function of a Python text, if that evaluates nothing of it."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        return None
    function = tree.body[0]
    arguments = function.args
    defaults = [*arguments.defaults, *(d for d in arguments.kw_defaults if d is not None)]
    if function.decorator_list or not all(isinstance(d, ast.Constant) for d in defaults):
        return None
    file = "<fuzz>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"where": scoremod.where, "inf": scoremod.inf}
    scope |= {"math": math, "torch": torch}
    try:
        # Annotations stay texts.
        exec(compile(text, file, "exec",
                     flags=__future__.annotations.compiler_flag), scope)  # fmt: skip
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return next(x for x in scope.values() if isinstance(x, types.FunctionType) and
                x.__code__.co_filename == file)  # fmt: skip


def read(item: Input) -> scoremod.Variant | None:
    """The variant of an input; None where Python itself refuses it."""
    if item.kind == "text":
        return scoremod.parse(item.text)
    function = bare_function(item.text)
    if function is None:
        return None
    try:
        return scoremod.variant(function)
    except ScoremodError:
        return scoremod.mask(function)


def check(item: Input, render: bool = False) -> str:
    """What became of an input: `variant`, `error` or `python`; anything else raises."""
    try:
        found = read(item)
    except ScoremodError as error:
        str(error)
        return "error"
    if found is None:
        return "python"
    if render:
        for source in kernels(found):
            assert_only_functions(source)
    return "variant"


def kernels(variant: scoremod.Variant) -> Iterator[str]:
    """Its forward kernels; what cannot be rendered must say so."""
    for target in ("cpu", "cuda:90"):
        with contextlib.suppress(ScoremodError):
            yield variant.source(head_dim=32, dtype="f32", target=target)


def assert_only_functions(source: str) -> None:
    """A kernel is imports of two modules, names of numbers, and functions."""
    for node in ast.parse(source).body:
        match node:
            case ast.Import(names=names):
                assert {n.name for n in names} <= {"torch", "triton", "triton.language"}
            case ast.ImportFrom(module=module):
                assert module is not None and module.startswith("triton")
            case ast.Assign(value=value):
                assert not any(
                    isinstance(n, ast.Call) and not _is_known(n) for n in ast.walk(value)
                )
            case _:
                assert isinstance(node, ast.FunctionDef), ast.unparse(node)


def _is_known(call: ast.Call) -> bool:
    return ast.unparse(call.func).startswith(("tl.", "float", "torch."))


# -- running -----------------------------------------------------------------------------------


class Hang(BaseException):
    """An input that did not come back."""


def _hang(*_: object) -> None:
    raise Hang


def attempt(item: Input, render: bool) -> str:
    """`check`, with what went wrong as a word of its own."""
    start = time.process_time()
    signal.setitimer(signal.ITIMER_REAL, HANGS)
    try:
        result = check(item, render)
    except Hang:
        return "HANGS"
    except BaseException as error:  # all but scoremod's own is a finding
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{item.kind}: {type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    limit = SLOW + 3 * render  # the picture of tiles takes a part of a second
    return "SLOW" if time.process_time() - start > limit else result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--most", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz-parsers"))
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, _hang)
    warnings.simplefilter("ignore")  # of Python, about its own syntax
    rng, items = random.Random(options.seed), corpus()
    until, counts = time.monotonic() + options.seconds, Counter[str]()
    for number in range(options.most):
        if time.monotonic() > until:
            break
        item = mutated(rng, items)
        result = attempt(item, render=rng.randrange(KERNELS) == 0)
        counts[result] += 1
        if result not in ("variant", "error", "python") and counts[result] == 1:
            options.folder.mkdir(parents=True, exist_ok=True)
            file = options.folder / f"{options.seed}-{number}.{item.kind}"
            file.write_text(item.text, encoding="utf-8", errors="surrogatepass")
            print(f"{result}: {file}", flush=True)
        elif result == "variant" and len(item.text) < 3000 and rng.random() < 0.02:
            items[rng.randrange(len(items))] = item  # what is accepted is worth changing further
    for result, count in counts.most_common():
        print(f"{count:8} {result}")
    return 0 if counts.keys() <= {"variant", "error", "python"} else 1


if __name__ == "__main__":
    sys.exit(main())

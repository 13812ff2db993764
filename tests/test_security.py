"""User text is never evaluated, and no name or number of it can become code of a kernel."""

from __future__ import annotations

import ast
import contextlib
import linecache
import random
import time
from typing import Any

import fuzz_parsers
import pytest
import torch

import scoremod
from scoremod import parse
from scoremod.errors import ReservedName, ScoremodError, UnsupportedPython
from scoremod.frontend.source import MAX_NODES

# Names that stand in the kernels or mean something to Python or Jinja.
NAMES = """torch tl FLOAT scores v_score attention_fwd q_tile plan self __builtins__ _ match
t0""".split()
HOSTILE = [
    "x): import os #",
    "a\nimport os",
    "a\rimport os",
    "{{ 7 * 7 }}",
    "#% if x",
    '"""',
    "'",
    "",
]


def shape_of(source: str) -> list[str]:
    """The kinds of a kernel's nodes, whatever its names are."""
    return [type(node).__name__ for node in ast.walk(ast.parse(source))]


def sources(attn: Any) -> list[str]:
    kinds: list[dict[str, Any]] = [{"target": "cpu", "dtype": "f32"}, {"dtype": "f16"}]
    kinds.append({"dtype": "f16", "phase": "bwd"})
    return [attn.source(head_dim=16, **kind) for kind in kinds]


PLAIN = sources(parse("variant v(quiet) { score s * quiet + quiet mask j <= i }"))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_only_a_name(name: str) -> None:
    try:
        attn = parse(f"variant {name}({name}) {{ score s * {name} + {name} mask j <= i }}")
    except ReservedName:
        assert name == "self"
        return
    for found, plain in zip(sources(attn), PLAIN, strict=True):
        assert shape_of(found) == shape_of(plain)
    q, k, v = torch.randn(3, 1, 1, 5, 4)
    given = {name: 0.5}
    torch.testing.assert_close(attn(q, k, v, **given), attn.eager(q, k, v, **given))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_function_may_be_called_anything(name: str) -> None:
    def plain(s, i, j, quiet):
        return s * quiet + quiet

    plain.__name__ = name
    attn = scoremod.variant(plain) & scoremod.variants.causal
    for source in sources(attn):
        fuzz_parsers.assert_only_functions(source)


@pytest.mark.parametrize("name", ["\u017f", "\u210e", "\U0001d422", "\uff4a", "\ufb01"])
def test_letters_that_python_reads_as_others_are_no_captures(name: str) -> None:
    with pytest.raises(ReservedName, match="Python reads that as"):
        parse(f"variant v({name}) {{ score s + {name} }}")


@pytest.mark.parametrize("end", ["\r", "\x0c", "\x85", "\u2028", "\x00"])
def test_no_comment_ends_early(end: str) -> None:
    try:
        attn = parse(f"variant v() {{ # hi{end}import os\n mask j <= i }}")
    except ScoremodError:
        return
    for source in sources(attn):
        fuzz_parsers.assert_only_functions(source)
        assert not any(line.lstrip().startswith("import os") for line in source.splitlines())


def test_nothing_is_evaluated() -> None:
    """Bodies that would raise or write if they ran are read, or refused, without running."""
    ran: list[int] = []

    def body(s, i, j):
        ran.append(1)
        return s

    def hidden(s, i, j):
        return s + 0.0 * ran.append(1)

    for function in (body, hidden):
        with pytest.raises(ScoremodError):
            scoremod.variant(function)
    assert not ran


# -- bounds ------------------------------------------------------------------------------------

LONG = {
    "brackets": "mask " + "(" * 90_000 + "j" + ")" * 90_000,
    "signs": "score " + "-" * 100_000 + "s",
    "chain": "mask " + "<".join(["i", "j"] * 1400),
    "sum": "score s" + "+s" * 90_000,
    "arguments": "mask min(" + ",".join(["i"] * 2900) + ") > 0",
    "doubling": "let t = s " + "let t = t + t " * 700 + "score t",
    "loop without end": "let t = i for a in range(10 ** 12) { let t = t + a } mask t > 0",
    "digits": "score s * " + "9" * 190_000,
    "power": "score s * 2 ** 2 ** 60",
    "shift": "mask i << (1 << (1 << 40)) > j",
}


@pytest.mark.parametrize("name", LONG)
def test_long_texts_are_answered_soon(name: str) -> None:
    start = time.process_time()
    with contextlib.suppress(ScoremodError):
        parse(f"variant v() {{ {LONG[name]} }}")
    assert time.process_time() - start < 2.0  # a second where nothing else runs


def test_deep_nesting_stays_below_the_limit_of_python() -> None:
    body = "s"
    for step in range(90):
        body = f"min({step + 0.5}, max({body}, -1.0))" if step % 2 else f"tanh({body})"
    attn = parse(f"variant v() {{ score {body} }}")
    q, k, v = torch.randn(3, 1, 1, 5, 4)
    torch.testing.assert_close(attn(q, k, v), attn.eager(q, k, v))
    for source in sources(attn)[1:]:
        fuzz_parsers.assert_only_functions(source)


def test_long_functions_are_refused() -> None:
    text = "def f(s, i, j):\n    return s if " + " and ".join(["i < j"] * MAX_NODES) + " else 0.0\n"
    linecache.cache["<long>"] = (len(text), None, text.splitlines(keepends=True), "<long>")
    scope: dict[str, Any] = {}
    exec(compile(text, "<long>", "exec"), scope)
    with pytest.raises(UnsupportedPython, match="is too long"):
        scoremod.variant(scope["f"])


def test_mutated_inputs_give_a_variant_or_an_error() -> None:
    rng, items = random.Random(5), fuzz_parsers.corpus()
    for _ in range(1500):
        item = fuzz_parsers.mutated(rng, items)
        assert fuzz_parsers.check(item) in ("variant", "error", "python"), item

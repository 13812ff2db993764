"""What a user reads when something is wrong: one look, their own line, and no internals.

The messages stand in tests/errors/*.txt; `pytest --update-golden` writes them.
"""

from __future__ import annotations

import contextlib
import runpy
import string
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import scoremod
from scoremod import Variant, mask, parse, variants
from scoremod.errors import ScoremodError

PACKAGE = str(Path(scoremod.__file__).parent)
Golden = Callable[[str, str], None]


# -- helpers -----------------------------------------------------------------------------------


def error_of(action: Callable[[], object]) -> ScoremodError:
    """The error that an action raises; its traceback shows the user's frames only."""
    with pytest.raises(ScoremodError) as raised:
        action()
    error = raised.value
    inside = {
        f"{Path(f.filename).name}:{f.name}"
        for f in traceback.extract_tb(error.__traceback__)
        if f.filename.startswith(PACKAGE)
    }
    assert inside <= {"api.py:call"}, "internal frames reach the user"
    assert error.__cause__ is None and error.__suppress_context__
    return error


def report(cases: Iterable[tuple[str, Callable[[], object]]]) -> str:
    """The errors as Python prints them, each under its title."""
    parts = []
    for title, action in cases:
        error = error_of(action)
        kind = f"{type(error).__module__}.{type(error).__name__}"
        parts.append(f"# {title}\n{kind}: {error}\n")
    return "\n".join(parts)


def python_case(file: Path, body: str) -> Callable[[], object]:
    """Run a declaration that stands in a file of its own."""

    def action() -> None:
        text = "import math, torch\nfrom scoremod import *\n" + textwrap.dedent(body).strip("\n")
        file.write_text(text + "\n", encoding="utf-8")
        runpy.run_path(str(file))

    return action


def sections(text: str) -> list[tuple[str, str]]:
    """Titles and bodies of a text of cases: a title begins with `###`."""
    parts = [p.partition("\n") for p in textwrap.dedent(text).split("### ")[1:]]
    return [(title.strip(), body.strip("\n")) for title, _, body in parts]


def from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    monkeypatch.chdir(tmp_path)
    return report(
        (title, python_case(tmp_path / f"case{n}.py", body))
        for n, (title, body) in enumerate(sections(text), 1)
    )


def from_text(text: str) -> str:
    return report(
        (title, lambda body=body: parse(body, file="case.smod")) for title, body in sections(text)
    )


# -- Python ------------------------------------------------------------------------------------

UNSUPPORTED = """
    ### a loop over a tensor
    @variant
    def f(s, t: "f32[H]"):
        for x in t:
            s = s + x
        return s
    ### a while loop
    @variant
    def f(s):
        while s > 1:
            s = s / 2
        return s
    ### recursion of a helper
    def halve(x):
        return halve(x / 2) if x > 1 else x

    @variant
    def f(s):
        return halve(s)
    ### recursion of the variant
    @variant
    def f(s):
        return f(s)
    ### try
    @variant
    def f(s):
        try:
            return s
        except ValueError:
            return 0
    ### with
    @variant
    def f(s):
        with torch.no_grad():
            return s
    ### a comprehension
    @variant
    def f(s, t: "f32[4]"):
        x = [t[k] for k in range(4)]
        return s + x[0]
    ### sum over a table
    @variant
    def f(s, t: "f32[4]"):
        return s + sum(t)
    ### any over a table
    @mask
    def f(i, t: "bool[4]"):
        return t.any()
    ### a reduction of torch
    @variant
    def f(s, t: "f32[4]"):
        return s + torch.cumsum(t, 0)
    ### softmax
    @variant
    def f(s):
        return torch.softmax(s, -1)
    ### a slice
    @variant
    def f(s, b, t: "f32[B, 4]"):
        return s + t[b, :]
    ### an ellipsis
    @variant
    def f(s, b, t: "f32[B, 4]"):
        return s + t[..., 0]
    ### print
    @variant
    def f(s):
        print(s)
        return s
    ### an unknown function
    @variant
    def f(s):
        return sigmoidal(s)
    ### a known function of a library that has no meaning here
    @variant
    def f(s, i):
        return s + math.gcd(i, 4)
    ### *args
    @variant
    def f(s, *rest):
        return s
    ### **captures
    @variant
    def f(s, **rest):
        return s
    ### an assignment outside
    @variant
    def f(s, t: "f32[4]"):
        t[0] = 1
        return s
    ### global
    @variant
    def f(s):
        global x
        x = 1
        return s
    ### a walrus
    @variant
    def f(s):
        return (x := s) + x
    ### an f-string
    @variant
    def f(s):
        return f"{s}"
    ### in
    @mask
    def f(i):
        return i in (1, 2)
    ### is
    @mask
    def f(i):
        return i is None
    ### a keyword argument
    @variant
    def f(s):
        return exp(x=s)
    ### break
    @variant
    def f(s):
        for k in range(3):
            break
        return s
    ### match
    @variant
    def f(s, i):
        match i:
            case 0: return s
    ### a dict
    @variant
    def f(s):
        return {"a": s}["a"]
    ### async
    @variant
    async def f(s):
        return s
    ### yield
    @variant
    def f(s):
        yield s
    ### matrix product
    @variant
    def f(s):
        return s @ s
    ### an attribute of a number
    @variant
    def f(s):
        return s.real
"""

TYPES = """
    ### a condition that is an int
    @variant
    def window(s, i, j):
        return where(i - j, s, -inf)
    ### an `if` on an int, at the place where the name is read
    @variant
    def f(s, i, j):
        d = i - j
        return s if d else 0
    ### `and` of ints
    @mask
    def f(i, j):
        return i and j
    ### a score that is a bool
    @variant
    def causal(s, i, j):
        return j <= i
    ### a mask that is an int
    @mask
    def f(i, j):
        return i - j
    ### a mask that reads s
    @mask
    def f(s, j):
        return s > 0
    ### an index that is a float
    @variant
    def f(s, i, t: "f32[Lq]"):
        return s + t[i / 2]
    ### too many indices
    @variant
    def f(s, h, i, slopes: "f32[H]"):
        return s + slopes[h, i]
    ### a table that is not indexed
    @variant
    def f(s, b, i, t: "f32[B, Lq]"):
        return s + t
    ### a number that is indexed
    @variant
    def f(s, h, x: float):
        return s + x[h]
    ### indexed here, not there
    @variant
    def f(s, h, t):
        return s + t[h] + t
    ### no such dimension
    @variant
    def f(s, t: "f32[H]"):
        return s + t.shape[1]
    ### a shift by a float
    @variant
    def f(s, i):
        return s + (i << 0.5)
    ### too many arguments
    @variant
    def f(s):
        return tanh(s, 2)
    ### a helper without its argument
    def twice(x, by):
        return x * by

    @variant
    def f(s):
        return twice(s)
    ### a tuple where a number stands
    def pair(x):
        return x, x

    @variant
    def f(s):
        return s + pair(s)
    ### a module where a number stands
    @variant
    def f(s):
        return s + math
    ### no return
    @variant
    def f(s):
        x = s
    ### a path without return
    @variant
    def f(s, i):
        if i > 3:
            return s
    ### assigned on one path
    @variant
    def f(s, i):
        if i > 3:
            x = 1
        return s + x
"""

NAMES = """
    ### an unknown name
    @variant
    def f(s, slopes: float):
        return s * slope
    ### an unknown name with nothing near
    @variant
    def f(s):
        return s + weight
    ### an index that is no parameter
    @variant
    def f(s):
        return s + j
    ### nothing of that name in a module
    @variant
    def f(s):
        return math.tan_h(s)
    ### a keyword of the call
    @variant
    def f(s, scale):
        return s * scale
    ### a keyword of a method
    @variant
    def f(s, dtype):
        return s * dtype
    ### a default of a reserved name
    @variant
    def f(s, i=0):
        return s + i
    ### not a type
    @variant
    def f(s, x: "integer"):
        return s + x
    ### an element without dimensions
    @variant
    def f(s, x: "f32"):
        return s + x
    ### not an element
    @variant
    def f(s, h, x: "f8[H]"):
        return s + x[h]
    ### a bracket that is open
    @variant
    def f(s, h, x: "f32[H"):
        return s + x[h]
    ### not a dimension
    @variant
    def f(s, h, x: "f32[H + 1]"):
        return s + x[h]
    ### a default of another type
    @variant
    def f(s, n: int = 2.5):
        return s * n
    ### a default that is no number
    @variant
    def f(s, t=torch.ones(3)):
        return s
    ### a variable that has no value yet
    def outer():
        @mask
        def f(i, j):
            return j < later
        later = 3
    outer()
    ### two variables of one name
    n = 1
    def helper(x):
        return x + n
    def outer(n):
        return variant(lambda s: helper(s) + n)
    outer(2)
    ### a loop bound that is no constant
    @variant
    def f(s, n: int):
        for k in range(n):
            s = s + k
        return s
    ### const of something else
    @variant
    def f(s):
        return s * const(s)
"""


def test_unsupported_python(
    golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden("../errors/unsupported.txt", from_python(tmp_path, monkeypatch, UNSUPPORTED))


def test_types(golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden("../errors/types.txt", from_python(tmp_path, monkeypatch, TYPES))


def test_names_and_declarations(
    golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden("../errors/names.txt", from_python(tmp_path, monkeypatch, NAMES))


# -- the mini-language -------------------------------------------------------------------------

SYNTAX = """
    ### an empty text
    ### a comment only
    # nothing here
    ### no variant around it
    mask j <= i
    ### Python instead
    def causal(i, j):
        return j <= i
    ### a brace that is open
    variant v(w: int) {
      score s * 2
      mask i - j < w
    ### a parenthesis that is open
    variant v() { mask (i - j < 4 }
    ### a parenthesis too many
    variant v() { mask i - j < 4) }
    ### an operator that is missing
    variant v() { mask j <= i b == 0 }
    ### an operand that is missing
    variant v() { score s + }
    ### two variants
    variant a() { mask j <= i }
    variant b() { mask i <= j }
    ### &&
    variant v() { mask j <= i && b == 0 }
    ### ||
    variant v() { mask j <= i || b == 0 }
    ### !
    variant v() { mask !(j <= i) }
    ### = for ==
    variant v() { mask i = j }
    ### an unknown character
    variant v() { score s $ 2 }
    ### text in quotes
    variant v() { score "s" }
    ### an attribute
    variant v(t: f32[H]) { score s + t.shape[0] }
    ### return
    variant v() { return j <= i }
    ### an if statement
    variant v() { if j <= i { score s } }
    ### a while loop
    variant v() { while True { } score s }
    ### a ternary of C
    variant v() { score i < j ? s : 0 }
    ### no block
    variant v(): score s
    ### no parameters
    variant v { score s }
    ### *args
    variant v(*tables) { score s }
    ### a default that is no number
    variant v(x: float = y) { score s * x }
    ### a default that is no literal
    variant v(x: float = 1 + 2) { score s * x }
    ### an expression as dimension
    variant v(t: f32[H + 1]) { score s + t[h] }
    ### a name that begins with a digit
    variant v(2x: float) { score s }
"""

MEANING = """
    ### neither score nor mask
    variant v() { let x = i }
    ### two scores
    variant v() { score s score s * 2 }
    ### two masks
    variant v() { mask i < j mask j < i }
    ### a type that is none
    variant v(n: integer) { mask i < n }
    ### a type that is near
    variant v(n: flaot) { score s * n }
    ### an element without dimensions
    variant v(x: f32) { score s * x }
    ### a const without value
    variant v(const n: int) { mask i < n }
    ### a const of another type
    variant v(const n: int = 0.5) { mask i < n }
    ### a default of another type
    variant v(n: int = 0.5) { mask i < n }
    ### a table with a default
    variant v(t: f32[H] = 1) { score s * t[h] }
    ### a reserved name as capture
    variant v(i: int) { mask i < j }
    ### a reserved name with let
    variant v() { let h = 3 score s * h }
    ### a keyword of the call
    variant v(scale: float) { score s * scale }
    ### a word of Python
    variant v(lambda: float) { score s * lambda }
    ### declared twice
    variant v(x: float, x: int) { score s * x }
    ### an unknown name
    variant v(window: int) { mask i - j < windw }
    ### a word of other languages
    variant v() { mask true }
    ### an unknown function
    variant v() { score tahn(s) }
    ### a reduction
    variant v(t: bool[Lk]) { mask any(t) }
    ### a mask that is an int
    variant v() { mask i - j }
    ### a score that is a bool
    variant v() { score j <= i }
    ### a mask that reads s
    variant v() { mask s > 0 }
    ### a condition that is an int
    variant v() { score s if i else 0 }
    ### size without dimension
    variant v(t: f32[H]) { score s + size(t) }
    ### a loop bound that is no constant
    variant v() { let x = 0 for k in range(q_len) { x = x + k } mask i < x }
    ### a loop without steps
    variant v() { for k in range(0, 8, 0) { } score s }
"""


def test_syntax(golden: Golden) -> None:
    golden("../errors/syntax.txt", from_text(SYNTAX))


def test_meaning(golden: Golden) -> None:
    golden("../errors/meaning.txt", from_text(MEANING))


# -- limits ------------------------------------------------------------------------------------


def test_limits(golden: Golden) -> None:
    def text(body: str, captures: str = "") -> Callable[[], Variant]:
        return lambda: parse(f"variant v({captures}) {{ {body} }}", file="case.smod")

    cases: list[tuple[str, Callable[[], object]]] = [
        ("a huge literal", text("mask i < 99999999999999999999")),
        ("a literal of very many digits", text("mask i < 1" + "0" * 5000)),
        ("a huge default", text("mask i < n", "n: int = 1000000000000000")),
        ("brackets too deep", text("score " + "(" * 300 + "s" + ")" * 300)),
        ("operators too deep", text("score " + "-" * 5000 + "s")),
        ("a chain too long", text("score s" + " + 1" * 4000)),
        ("a loop too long", text("let x = 0 for k in range(100000) { x = x + k } mask i < x")),
        ("loops in loops", text("for a in range(99) { for c in range(99) { } } mask i < j")),
        ("a doubling loop", text("let x = s for k in range(60) { x = x + x } score x")),
        ("a text too long", text("score s" + " " * 200_000)),
        ("no text", lambda: parse(Path("alibi.smod"))),  # type: ignore[arg-type]
    ]
    golden("../errors/limits.txt", report(cases))


def test_paths_that_double_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scoremod.frontend.python.MAX_STATEMENTS", 2000)
    lines = "".join(
        f"    if i > {n}:\n        if j > {n}:\n            return s\n" for n in range(40)
    )
    text = f"def f(s, i, j):\n{lines}    return s\n"
    file = tmp_path / "many_paths.py"
    file.write_text(text)
    found = runpy.run_path(str(file))["f"]
    assert "too many paths" in error_of(lambda: scoremod.variant(found)).message


# -- composition and calls ---------------------------------------------------------------------

alibi, causal, window = variants.alibi, variants.causal, variants.sliding_window


def test_composition(golden: Golden) -> None:
    def v(name: str, captures: str) -> Variant:
        return parse(f"variant {name}({captures}) {{ mask j <= i }}", file=f"{name}.smod")

    def make(n: int) -> Variant:
        return parse("variant n() { mask i < j }") & mask(lambda i, j: i - j < n)

    cases: list[tuple[str, Callable[[], object]]] = [
        ("two scores under &", lambda: alibi & variants.softcap),
        ("a score under |", lambda: causal | alibi),
        ("a score under ~", lambda: ~alibi),
        ("something else under &", lambda: causal & 3),  # type: ignore[operator]
        ("captures of other type", lambda: v("a", "x: int") & v("b", "x: float")),
        ("captures of other default", lambda: v("a", "x: int = 1") & v("b", "x: int = 2")),
        ("consts that differ", lambda: v("a", "const n: int = 1") & v("b", "const n: int = 2")),
        ("a const and a capture", lambda: v("a", "const n: int = 1") & v("b", "n: int")),
        ("bound to different values", lambda: window.bind(window=1) | window.bind(window=2)),
        ("bound, but no capture", lambda: window.bind(windw=3)),
        ("renamed, but no capture", lambda: window.rename(size="far")),
        ("renamed to a reserved name", lambda: window.rename(window="i")),
        ("renamed to a number", lambda: window.rename(window=512)),  # type: ignore[arg-type]
        ("a variant of a variant", lambda: mask(causal)),  # type: ignore[arg-type]
        ("a class", lambda: mask(int)),
        ("a builtin", lambda: mask(max)),
    ]
    golden("../errors/composition.txt", report(cases))


def test_calls(golden: Golden) -> None:
    q = torch.zeros(2, 4, 8, 16)
    captures = "w: int, t: f32[B, Lk], flag: bool = True, n: tensor[H, N], m: tensor[N]"
    body = "score s + t[b, j] + n[h, 0] + m[0] mask flag and i - j < w"
    found = parse(f"variant v({captures}) {{ {body} }}", file="case.smod")
    given = {"w": 3, "t": torch.zeros(2, 8), "n": torch.zeros(4, 5), "m": torch.zeros(5)}

    def call(**changed: Any) -> Callable[[], object]:
        every = {k: x for k, x in {**given, **changed}.items() if x is not None}
        return lambda: found(q, q, q, **every)

    cases: list[tuple[str, Callable[[], object]]] = [
        ("a missing capture", call(w=None)),
        ("not a capture", call(window=3)),
        ("a float for an int", call(w=2.5)),
        ("text for an int", call(w="3")),
        ("a huge int", call(w=2**50)),
        ("a number for a table", call(t=1.0)),
        ("a table for a number", call(w=torch.zeros(3))),
        ("another dtype", call(t=torch.zeros(2, 8, dtype=torch.float16))),
        ("another rank", call(t=torch.zeros(8))),
        ("too short", call(t=torch.zeros(2, 7))),
        ("dimensions that do not agree", call(m=torch.zeros(6))),
    ]
    assert found(q, q, q, **given).shape == q.shape
    golden("../errors/calls.txt", report(cases))


# -- nothing else gets out ---------------------------------------------------------------------

TEXTS = [str(v) for v in vars(variants).values() if isinstance(v, Variant)]
WORDS = r"""variant score mask let for in range const if else and or not True False ( ) { } [ ] , :
    ; = == != < <= > >= + - * / // % ** & | ^ ~ << >> . ... _ i j b h hk s q_len kv_len inf nan x t
    w where min max clamp abs exp log tanh int float bool floor size 0 1 2 -1 1.5 1e9 0x1F 7_000 int
    tensor f32 bool[H] # $ ? " ' \\ @ é 99999999999999999999"""
TOKENS = [*WORDS.split(), "\n", "\0", " "]


def settle(text: str) -> None:
    """A Variant or a ScoremodError, within a second; what is read can be written and read."""
    start = time.perf_counter()
    with contextlib.suppress(ScoremodError):
        found = parse(text)
        assert parse(str(found)) == found
    assert time.perf_counter() - start < 1 * SLOW


SLOW = 5  # how much slower a busy machine may be


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A stock variant with a few pieces cut, doubled, moved or replaced."""
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        end = min(len(text), at + draw(st.integers(0, 12)))
        other = draw(st.integers(0, len(text)))
        token = draw(st.sampled_from(TOKENS))
        piece = draw(st.sampled_from(("", token, f" {token} ", text[at:end] * 2, text[other:][:9])))
        text = text[:at] + piece + text[end:]
    return text


@settings(max_examples=200)
@given(mutated())
def test_mutated_texts(text: str) -> None:
    settle(text)


@settings(max_examples=200)
@given(st.lists(st.sampled_from(TOKENS), max_size=25).map(" ".join))
@example("")
def test_token_soups(soup: str) -> None:
    settle(soup)
    settle(f"variant v(x: float, t: f32[H, Lk], w: int = 3) {{ score {soup} }}")
    settle(f"variant v({soup}) {{ mask j <= i }}")


@settings(max_examples=100)
@given(st.text(max_size=60))
def test_any_text(text: str) -> None:
    settle(text)
    settle(f"variant v() {{ score s {text} }}")


@settings(max_examples=100)
@given(st.text(string.ascii_lowercase + " []()0123456789.,_-", max_size=14))
def test_any_annotation(annotation: str) -> None:
    with contextlib.suppress(ScoremodError):
        parse(f"variant v(x: {annotation}) {{ score s }}")


@pytest.mark.parametrize("steps", [300, 2000])
def test_long_chains_pass_through_everything(steps: int) -> None:
    text = f"let x = s for k in range({steps}) {{ x = x + t[k] * 2 }} score x mask j <= i"
    found = parse(f"variant v(t: f32[{steps}]) {{ {text} }}")
    q = torch.zeros(1, 1, 4, 4)
    with contextlib.suppress(ScoremodError):
        assert parse(str(found)) == found
        found.explain()
        found.tiles(4, 4, t=torch.zeros(steps))
        found(q, q, q, t=torch.zeros(steps), backend="cpu")
        found.eager(q, q, q, t=torch.zeros(steps))

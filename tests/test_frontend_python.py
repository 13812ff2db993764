"""Python functions become the IR: everything that the language allows in a body."""

# ruff: noqa: B008 - const(...) as a default is the language

from __future__ import annotations

import functools
import importlib.util
import linecache
import math
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it

import scoremod
from scoremod import (
    Variant,
    clamp,
    const,
    exp,
    floor,
    from_flex,
    ilog2,
    inf,
    mask,
    maximum,
    parse,
    tanh,
    variant,
    where,
)
from scoremod.errors import (
    MissingCapture,
    ReservedName,
    ScoremodError,
    SourceUnavailable,
    TypeMismatch,
    UnknownName,
    UnsupportedPython,
)

# -- helpers -----------------------------------------------------------------------------------


def same(found: Variant, body: str, captures: str = "") -> None:
    """The variant is what the mini-language says in `variant v(captures) { body }`."""
    assert str(found) == str(parse(f"variant {found.name}({captures}) {{ {body} }}"))
    assert found == parse(f"variant v({captures}) {{ {body} }}")


def run(found: Variant, q_len: int = 3, kv_len: int = 4, **captures: Any) -> list[list[int]]:
    return found.mask_dense(q_len, kv_len, **captures).int().tolist()


@pytest.fixture
def module(tmp_path: Path) -> Callable[[str], ModuleType]:
    """Import a text as a module from a file of its own."""

    def load(text: str) -> ModuleType:
        file = tmp_path / "written.py"
        file.write_text(textwrap.dedent(text), encoding="utf-8")
        spec = importlib.util.spec_from_file_location("written", file)
        assert spec is not None and spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        return found

    return load


# -- names -------------------------------------------------------------------------------------


def test_reserved_names_are_indices_sizes_and_the_score() -> None:
    @variant
    def every(kv_len, q_len, j, i, hk, h, b, s):
        return s + b + h + hk + i + j + q_len + kv_len

    same(every, "score s + b + h + hk + i + j + q_len + kv_len")
    assert every.captures == ()


@pytest.mark.parametrize("name", ["scale", "q", "backend", "tiles", "dtype", "batch", "captures"])
def test_keywords_of_calls_and_methods_are_no_captures(
    name: str, module: Callable[[str], ModuleType]
) -> None:
    with pytest.raises(ReservedName, match=f"cannot be called `{name}`: it is a keyword of"):
        variant(module(f"def f(s, {name}):\n    return s * {name}\n").f)
    with pytest.raises(ReservedName, match=f"cannot be called `{name}`"):
        parse(f"variant f({name}: float) {{ score s * {name} }}")


def test_self_is_no_capture(module: Callable[[str], ModuleType]) -> None:
    with pytest.raises(ReservedName):
        variant(module("def f(s, self):\n    return s * self\n").f)


def test_a_reserved_name_has_no_default() -> None:
    with pytest.raises(ReservedName, match="it has no default"):

        @variant
        def f(s, i=3):
            return s + i


def test_a_reserved_name_that_is_no_parameter_is_unknown() -> None:
    with pytest.raises(UnknownName, match="`i` is not a parameter") as error:

        @variant
        def f(s):
            return s + i

    assert error.value.hint == "add it: `i` is the query index"


# -- captures ----------------------------------------------------------------------------------


def test_what_is_indexed_is_a_tensor_and_its_exact_indices_name_dimensions() -> None:
    @variant
    def f(s, b, h, hk, i, j, a, c, d, e, g):
        return s + a[h] + c[b, i] + c[b, j] + d[j] + e[i, hk] + g[i - j, h]

    captures = "a: tensor[H], c: tensor[B, L], d: tensor[Lk], e: tensor[Lq, Hk], g: tensor[_, H]"
    assert ", ".join(f.captures) == captures


def test_what_is_not_indexed_is_a_number_of_the_type_of_its_default() -> None:
    @variant
    def f(s, i, x, n=3, y=0.5, flag=True):
        return s * x + y * n if flag else s

    assert f.captures == ("x", "n: int", "y: float", "flag: bool")
    assert "n: int = 3, y: float = 0.5, flag: bool = True" in str(f)


def test_declared_types_may_be_strings_or_types() -> None:
    @variant
    def f(s, b, h, j, slopes: f32[H], m: bool[B, Lk], n: int, ids: i64[B, 3], x: torch.Tensor):
        return s * slopes[h] + n + ids[b, 0] + x[j] if m[b, j] else s

    declared = ("slopes: f32[H]", "m: bool[B, Lk]", "n: int", "ids: i64[B, 3]", "x: tensor[Lk]")
    assert f.captures == declared


def test_declared_types_without_future_annotations(module: Callable[[str], ModuleType]) -> None:
    found = module(
        """
        import torch, scoremod

        @scoremod.variant
        def f(s, h, slopes: "tensor[H]", window: int, t: torch.Tensor, cap: "float" = 3):
            return s * slopes[h] + window * cap + t
        """
    )
    assert found.f.captures == ("slopes: tensor[H]", "window: int", "t", "cap: float")


def test_any_dimensions() -> None:
    @variant
    def f(s, h, i, t: bf16[...], u: tensor[_, 7]):
        return s + t[h, i % 5] + u[h, 0]

    assert f.captures == ("t: bf16[H, _]", "u: tensor[_, 7]")


def test_an_int_default_of_a_float_is_a_float() -> None:
    @variant
    def f(s, x: float = 3):
        return s * x

    assert "x: float = 3.0" in str(f)


def test_a_0d_tensor_type_is_a_number() -> None:
    @variant
    def f(s, x: "f32[]", y: "tensor[]", z: torch.Tensor):
        return s * x + y + z

    assert f.captures == ("x: float", "y", "z")


def test_shape_len_and_size() -> None:
    @variant
    def f(s, h, i, t: f32[H, N], u):
        return s + t.shape[0] + t.shape[-1] + t.size(1) + len(t) + u.shape[0] + u[h]

    body = "score s + size(t, 0) + size(t, 1) + size(t, 1) + size(t, 0) + size(u, 0) + u[h]"
    same(f, body, "t: f32[H, N], u")


def test_a_literal_negative_index_counts_from_the_end() -> None:
    @variant
    def f(s, i, t: f32[N]):
        return s + t[-1] + t[i - 3]

    same(f, "score s + t[size(t, 0) + -1] + t[i - 3]", "t: f32[N]")


def test_indices_may_come_in_steps() -> None:
    @variant
    def f(s, b, h, i, t):
        row = t[b]
        return s + row[h][i] + row[h, i] + t[b][h, i] + t[b, h][i]

    same(f, "score s + t[b, h, i] + t[b, h, i] + t[b, h, i] + t[b, h, i]", "t")


# -- closures ----------------------------------------------------------------------------------

LIMIT = 2
TABLE = torch.tensor([5, 1, 0, 2])


def test_globals_are_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    @mask
    def f(i, j):
        return j < LIMIT

    assert run(f, 1) == [[1, 1, 0, 0]]
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 3)
    assert run(f, 1) == [[1, 1, 1, 0]]


def test_cells_are_read_at_each_call_and_may_be_given_by_name() -> None:
    n = 1

    @mask
    def f(i, j):
        return j < n

    assert run(f, 1) == [[1, 0, 0, 0]]
    n = 2
    assert run(f, 1) == [[1, 1, 0, 0]]
    assert run(f, 1, n=3) == [[1, 1, 1, 0]]
    assert run(f.bind(n=0), 1) == [[0, 0, 0, 0]]
    assert run(f.bind(n=0), 1, n=4) == [[1, 1, 1, 1]]


def test_a_captured_tensor_of_the_module() -> None:
    @mask
    def f(i, j):
        return TABLE[j] > i

    assert f.captures == ("TABLE: tensor[Lk]",)
    assert run(f, 2) == [[1, 1, 0, 1], [1, 0, 0, 1]]


def test_partial_arguments() -> None:
    def f(n, i, j, *, m):
        return n <= j < m

    assert run(mask(functools.partial(f, 1, m=3)), 1) == [[0, 1, 1, 0]]
    twice = functools.partial(functools.partial(f, m=9), 2, m=3)
    assert run(mask(twice), 1) == [[0, 0, 1, 0]]


class Window:
    def __init__(self, width: int) -> None:
        self.width = width
        self.inner = (0, 7)

    def __call__(self, i, j):
        return i - j < self.width + self.inner[0]

    def method(self, i, j):
        return i - j < self.width

    def calls(self, i, j):
        return self.near(i, j) and j <= i

    def near(self, i, j):
        return i - j < 1


def test_attributes_of_callables_and_bound_methods() -> None:
    window = Window(1)
    called, method = mask(window), mask(window.method)
    assert run(called, 2, 2) == run(method, 2, 2) == [[1, 1], [0, 1]]
    window.width = 2
    assert run(called, 2, 2) == run(method, 2, 2) == [[1, 1], [1, 1]]
    assert "width" in str(method)


def test_a_number_of_a_library_is_a_constant() -> None:
    @variant
    def f(s):
        return s * math.pi + torch.pi + math.inf

    assert f.captures == ()
    assert str(math.pi) in str(f)


def test_two_variables_of_one_name_are_an_error() -> None:
    def helper(x):
        return x + n

    def outer(n):
        def f(s):
            return helper(s) + n

        return f

    n = 2
    with pytest.raises(ReservedName, match="two different variables are both called `n`"):
        variant(outer(1))


def test_a_free_variable_of_a_reserved_name_is_read_but_cannot_be_given() -> None:
    scale, b = 2, 3

    @mask
    def f(i, j):
        return j < scale and i < b

    assert run(f, 4, 3) == [[1, 1, 0]] * 3 + [[0, 0, 0]]
    with pytest.raises(MissingCapture):
        f.mask_dense(4, 3, free_scale=1)


def test_a_variable_without_value_is_an_error() -> None:
    def outer():
        @mask
        def f(i, j):
            return j < later

        later = 3
        return f, later

    with pytest.raises(UnknownName, match="`later` has no value yet"):
        outer()


# -- const -------------------------------------------------------------------------------------

STEPS = 3


def test_const_as_default_and_range_bound() -> None:
    @variant
    def f(s, i, n=const(3)):
        for k in range(n):
            s = s + i * k
        return s

    assert f == parse("variant f() { score s + i * 0 + i * 1 + i * 2 }")
    assert f.captures == ()
    assert f.bind(n=1) == parse("variant f() { score s + i * 0 }")


def test_const_in_the_body_of_a_name_and_of_a_literal() -> None:
    @variant
    def f(s, i):
        for k in range(const(STEPS)):
            s = s + k
        return s + const(2.5)

    assert f == parse("variant f() { score s + 0 + 1 + 2 + 2.5 }")
    assert f.bind(STEPS=0) == parse("variant f() { score s + 2.5 }")


def test_const_in_the_mini_language() -> None:
    f = parse("variant f(const n: int = 2) { let x = s for k in range(n) { x = x + k } score x }")
    assert f == parse("variant f() { score s + 0 + 1 }")
    assert f.bind(n=3) == parse("variant f() { score s + 0 + 1 + 2 }")


def test_range_bounds_must_be_known() -> None:
    with pytest.raises(UnsupportedPython, match="must be literals or const") as error:

        @variant
        def f(s, n: int):
            for k in range(n):
                s = s + k
            return s

    assert "scoremod.const" in (error.value.hint or "")


# -- helpers -----------------------------------------------------------------------------------


def _near(x, y, width=2, *, shift=0):
    """A helper with defaults."""
    distance = x - y + shift
    return distance < width


def _both(x, y):
    return x + y, x - y


def test_helpers_are_inlined_with_defaults_and_keywords() -> None:
    @mask
    def f(i, j, w: int):
        return _near(i, j) and _near(y=j, x=i, width=w) and _near(i, j, shift=1)

    same(f, "mask i - j + 0 < 2 and i - j + 0 < w and i - j + 1 < 2", "w: int")


def test_helpers_give_tuples() -> None:
    @variant
    def f(s, i, j):
        total, (a, b) = i, _both(i, j)
        return s + total + a * b + _both(i, 1)[1]

    same(f, "score s + i + (i + j) * (i - j) + (i - 1)")


def test_nested_functions_and_lambdas() -> None:
    @variant
    def f(s, i, j, c: float):
        def twice(x, by=c):
            return x * by

        half = lambda x: x / 2  # noqa: E731
        return twice(half(s)) + (lambda a, b: a + b)(i, j)

    same(f, "score s / 2 * c + (i + j)", "c: float")


def test_a_helper_sees_captures_of_its_own() -> None:
    table = torch.arange(4.0)

    def helper(x):
        return table[x]

    @variant
    def f(s, j):
        return s + helper(j)

    assert f.captures == ("table: tensor[Lk]",)


def test_helpers_of_other_modules_keep_their_places(module: Callable[[str], ModuleType]) -> None:
    helpers = module("def wrong(x):\n    return x if x else 0\n")
    wrong = helpers.wrong
    with pytest.raises(TypeMismatch) as error:
        variant(lambda s, i: s + wrong(i))
    assert error.value.span is not None
    assert error.value.span.file.endswith("written.py")
    assert (error.value.span.line, error.value.span.words) == (2, "x")


# -- statements and expressions ----------------------------------------------------------------


def test_if_statements_that_return() -> None:
    @variant
    def f(s, i, j):
        if j > i:
            return -inf
        if i - j < 3:
            x = s
        elif i == j + 3:
            x = s + 1
        else:
            x = s * 2
        return x

    body = "score where(i - j < 3, s, where(i == j + 3, s + 1, s * 2)) mask not i < j"
    same(f, body)


def test_branches_may_assign_and_augment() -> None:
    @variant
    def f(s, i, x: float):
        y = 1.0
        if i > 2:
            s += x
        else:
            y, z = x, 2
            s -= z
        return s * y

    same(f, "score where(2 < i, s + x, s - 2) * where(2 < i, 1.0, x)", "x: float")


def test_a_known_condition_picks_its_branch() -> None:
    @variant
    def f(s, i, flag=const(False)):
        if flag:
            s = s / 0.0
        return s + (1 if flag else 2) + (3 if 1 else missing)

    same(f, "score s + 2 + 3")


def test_a_name_of_one_branch_only_is_an_error() -> None:
    with pytest.raises(UnknownName, match="in one branch of an if only"):

        @variant
        def f(s, i):
            if i > 2:
                x = 1
            return s + x


def test_comparisons_chain_and_join() -> None:
    @mask
    def f(i, j, w: int):
        return 0 <= i - j < w != 3 or (not (i > j >= 2) and i == j)

    same(f, "mask 0 <= i - j < w != 3 or not (j < i and 2 <= j) and i == j", "w: int")


def test_bit_operators_on_bools_are_logical() -> None:
    @mask
    def f(i, j):
        return (i <= j) & (i < 3) | ~(j < 2) ^ (i == j)

    same(f, "mask (i <= j and i < 3) or ((not j < 2) != (i == j))")


def test_bit_operators_on_ints() -> None:
    @mask
    def f(i, j):
        return (i & 3 | j ^ ~5) >> 1 << 2 == 4

    same(f, "mask (i & 3 | j ^ ~5) >> 1 << 2 == 4")


def test_arithmetic() -> None:
    @variant
    def f(s, i, j, x: float):
        return +s - -x * (i // 3 % 5) / 2 ** (i % 4) + i**2 + x**0.5 + True

    same(f, "score s - -x * (i // 3 % 5) / 2 ** (i % 4) + i ** 2 + x ** 0.5 + True", "x: float")


def test_functions_of_every_library() -> None:
    @variant
    def f(s, i):
        a = torch.tanh(s) + math.exp(s) + exp(s) + F.softplus(s) + torch.nn.functional.relu(s)
        b = s.tanh() + s.abs() + torch.abs(s) + math.fabs(s) + (-s).sigmoid().sqrt()
        c = max(s, 1, 2) + min(s, 3) + torch.maximum(s, a) + maximum(a, b)
        c = c + torch.where(i > 2, a, b)
        d = clamp(s, -1, 1) + torch.clamp(s, max=1, min=-1) + s.clamp(min=0) + torch.clamp(s, 0, 1)
        e = i.float() + i.to(torch.float32) + s.long() + int(s) + round(s) + floor(s) + ilog2(i)
        return a + b + c + d + e + math.log(s) + math.log(s, 2) + bool(i) + float("inf")

    a = "tanh(s) + exp(s) + exp(s) + softplus(s) + max(s, 0)"
    b = "tanh(s) + abs(s) + abs(s) + abs(s) + sqrt(sigmoid(-s))"
    c = "max(s, 1, 2) + min(s, 3) + max(s, a) + max(a, c) + where(i > 2, a, c)"
    d = "min(max(s, -1), 1) + min(max(s, -1), 1) + max(s, 0) + min(max(s, 0), 1)"
    e = "float(i) + float(i) + int(s) + int(s) + round(s) + floor(s) + ilog2(i)"
    g = "a + c + d + f + e2 + log(s) + log(s) / log(2) + bool(i) + inf"
    lets = f"let a = {a} let c = {b} let d = {c} let f = {d} let e2 = {e}"
    assert f == parse(f"variant f() {{ {lets} score {g} }}")


def test_loops_are_unrolled() -> None:
    @variant
    def f(s, i, t: f32[8]):
        for k in range(4, 0, -2):
            for a, c in ((k, 1), (2, k)):
                s = s + t[a] * c
        return s

    same(f, "score s + t[4] * 1 + t[2] * 4 + t[2] * 1 + t[2] * 2", "t: f32[8]")


def test_a_loop_may_return_early() -> None:
    @mask
    def f(i, j):
        for k in range(3):
            if i == k:
                return j > k
        return j < 1

    same(f, "mask where(i == 0, 0 < j, where(i == 1, 1 < j, where(i == 2, 2 < j, j < 1)))")


def test_tuples_of_the_module_are_read_element_by_element() -> None:
    offsets = (1, 2)

    @mask
    def f(i, j):
        hit = j == i
        for k in offsets:
            hit = hit or j == i + k
        return hit

    assert run(f, 1) == [[1, 1, 1, 0]]


def test_docstrings_annotations_pass_and_comments_mean_nothing() -> None:
    @variant
    def f(s, i):
        """What it does."""
        x: int = i  # a comment
        return s + x

    same(f, "score s + i")


def test_local_names_may_be_reserved_or_shadow_functions() -> None:
    @variant
    def f(s, i):
        j = i + 1
        exp = j * 2
        return s + exp

    same(f, "score s + (i + 1) * 2")


# -- masks inside scores -----------------------------------------------------------------------


def test_where_with_minus_infinity_is_a_mask() -> None:
    same(variant(lambda s, i, j: where(j <= i, s, -inf)), "score s mask j <= i")


def test_its_mirror() -> None:
    same(variant(lambda s, i, j: where(j > i, float("-inf"), s * 2)), "score s * 2 mask not i < j")


def test_nested_and_through_names_and_helpers() -> None:
    def keep(x, condition):
        return torch.where(condition, x, -torch.inf)

    @variant
    def f(s, i, j):
        nothing = -math.inf
        x = s + 1 if i - j < 9 else nothing
        return keep(x, j <= i)

    same(f, "score s + 1 mask j <= i and i - j < 9")


def test_both_branches_may_hold_masks() -> None:
    @variant
    def f(s, i, j):
        return where(i < 3, where(j < 2, s, -inf), where(j > 5, s * 2, -inf))

    same(f, "score where(i < 3, s, s * 2) mask where(i < 3, j < 2, 5 < j)")


def test_a_condition_on_the_score_stays_a_value() -> None:
    found = variant(lambda s, i, j: where(s > 0, s, -inf))
    assert found == parse("variant f() { score where(0 < s, s, -inf) }")
    assert "mask" not in str(found)


def test_elsewhere_minus_infinity_is_a_value() -> None:
    found = variant(lambda s, i, j: s + where(j <= i, 0, -inf))
    assert "mask" not in str(found)


def test_a_score_of_minus_infinity_attends_nowhere() -> None:
    assert run(variant(lambda s: -inf), 1) == [[0, 0, 0, 0]]


# -- finding the source ------------------------------------------------------------------------


def test_two_lambdas_on_one_line() -> None:
    first, second = mask(lambda i, j: j <= i), mask(lambda i, j: j < i)
    same(first, "mask j <= i")
    same(second, "mask j < i")


def test_lambdas_over_several_lines() -> None:
    found = mask(
        lambda i,
        j,
        w=3: (
            j <= i
            and i - j
            < w
        )
    )  # fmt: skip
    same(found, "mask j <= i and i - j < w", "w: int = 3")


def test_nested_lambdas_on_one_line() -> None:
    make = lambda w: lambda i, j: i - j < w  # noqa: E731
    assert run(mask(make(1)), 2, 2) == [[1, 1], [0, 1]]


def test_decorated_functions_are_unwrapped() -> None:
    def traced(function):
        @functools.wraps(function)
        def call(*args):
            return function(*args)

        return call

    @mask
    @traced
    def f(i, j):
        return j <= i

    same(f, "mask j <= i")


def test_a_notebook_cell() -> None:
    text = "import scoremod\n@scoremod.mask\ndef cell(i, j):\n    return j <= i\n"
    name = "/tmp/ipykernel_1/2345.py"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope: dict[str, Any] = {}
    exec(compile(text, name, "exec"), scope)
    same(scope["cell"], "mask j <= i")


def test_text_that_was_executed_says_so_and_names_the_way_out() -> None:
    scope: dict[str, Any] = {}
    exec("def hidden(i, j):\n    return j <= i\n", scope)
    with pytest.raises(SourceUnavailable, match="the source of `hidden` cannot be read") as error:
        mask(scope["hidden"])
    assert "scoremod.parse" in (error.value.hint or "")


@pytest.mark.parametrize("what", [math.exp, max, 5, None, torch.add, int])
def test_what_is_no_python_function_says_so(what: Any) -> None:
    with pytest.raises(SourceUnavailable, match=r"is not a Python function|is a class"):
        mask(what)


def test_a_variant_is_not_declared_twice() -> None:
    with pytest.raises(SourceUnavailable, match="is a variant already"):
        mask(scoremod.variants.causal)


@pytest.mark.parametrize("file", ["<string>", "<stdin>", "/no/such/file.py"])
def test_python_dash_c_and_the_like_say_so(file: str) -> None:
    code = compile("import scoremod\nscoremod.mask(lambda i, j: j <= i)\n", file, "exec")
    with pytest.raises(SourceUnavailable, match="the source of this lambda") as error:
        exec(code, {})
    assert file.removeprefix("/no/such") in error.value.message


def test_a_file_that_changed_is_read_anew(tmp_path: Path) -> None:
    for text in ("def f(i, j):\n    return j <= i\n", "# moved\ndef f(i, j):\n    return j < i\n"):
        file = tmp_path / "changing.py"
        file.write_text(text)
        scope: dict[str, Any] = {}
        exec(compile(text, str(file), "exec"), scope)
        found = mask(scope["f"])
    same(found, "mask j < i")


# -- from_flex ---------------------------------------------------------------------------------


def test_from_flex_takes_any_parameter_names() -> None:
    slopes = torch.rand(4)

    def score_mod(score, batch, head, q_idx, kv_idx):
        return score - slopes[head] * (q_idx - kv_idx)

    def mask_mod(i, scale, q, k):
        return q >= k

    found = from_flex(score_mod, mask_mod)
    same(found, "score s - slopes[h] * (i - j) mask j <= i", "slopes: tensor[H]")
    same(from_flex(mask_mod=mask_mod), "mask j <= i")
    assert from_flex(score_mod=lambda j, i, b, s, h: j + h) == parse("variant f() { score s + j }")


def test_from_flex_masks_with_bit_operators_and_closures() -> None:
    def make(document_id, window):
        def mask_mod(b, h, q_idx, kv_idx):
            same_document = document_id[b, q_idx] == document_id[b, kv_idx]
            return (q_idx >= kv_idx) & same_document & (q_idx - kv_idx <= window)

        return mask_mod

    doc = torch.tensor([[0, 0, 1, 1]])
    found = from_flex(mask_mod=make(doc, 5))
    assert found.captures == ("document_id: tensor[B, L]", "window")
    assert run(found, 4) == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def test_from_flex_wants_flex_functions() -> None:
    with pytest.raises(ScoremodError, match="needs a score_mod"):
        from_flex()
    with pytest.raises(ScoremodError, match="takes 5 parameters, not 3"):
        from_flex(lambda s, i, j: s)


# -- both front ends ---------------------------------------------------------------------------

GEMMA = """
variant gemma(window: int = 4096, cap: float = 50.0, doc: tensor[B, L]) {
  let near = i - j < window
  score cap * tanh(s / cap)                 # score and mask may each be left out
  mask  j <= i and near and doc[b, i] == doc[b, j]
}
"""


def test_the_same_variant_in_both_forms_is_equal() -> None:
    @variant
    def gemma(s, b, i, j, window: int = 4096, cap: float = 50.0, *, doc: tensor[B, L]):
        near = i - j < window
        keep = j <= i and near and doc[b, i] == doc[b, j]
        return cap * tanh(s / cap) if keep else -inf

    assert gemma == parse(GEMMA)
    assert hash(gemma) == hash(parse(GEMMA))
    assert gemma != parse(GEMMA.replace("4096", "4097"))
    assert gemma != parse(GEMMA.replace("tensor[B", "i32[B"))

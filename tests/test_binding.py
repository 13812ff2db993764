"""How captures get their values: who wins, what fits, and what is said when something does not."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from attention_cases import Shape, compare, each_backend, tensors

import scoremod
from scoremod import mask, parse, variant, variants
from scoremod.errors import CaptureMismatch, CompositionError, MissingCapture, ScoremodError

SHAPE = Shape(2, 4, 2, 5, 7)
QKV = tensors(SHAPE)


def seen(attn: Any, **captures: Any) -> list[int]:
    """How many of 6 keys each of 3 queries sees."""
    found: list[int] = attn.mask_dense(3, 6, **captures).sum(-1).tolist()
    called = attn(*tensors(Shape(1, 1, 1, 3, 6)), return_lse=True, **captures)[1]
    assert [n > 0 for n in found] == (called > -torch.inf).flatten().tolist()
    return found


# -- who wins ----------------------------------------------------------------------------------


def test_call_before_bind_before_default() -> None:
    attn = parse("variant v(n: int = 1) { mask j < n }")
    assert seen(attn) == [1, 1, 1]
    assert seen(attn.bind(n=2)) == [2, 2, 2]
    assert seen(attn.bind(n=2), n=3) == [3, 3, 3]
    assert seen(attn.bind(n=2).bind(n=4)) == [4, 4, 4]


def test_call_before_bind_before_closure() -> None:
    n = 1

    @mask
    def attn(j):
        return j < n

    assert seen(attn) == [1, 1, 1]
    assert seen(attn.bind(n=2)) == [2, 2, 2]
    assert seen(attn.bind(n=2), n=3) == [3, 3, 3]
    n = 5
    assert seen(attn) == [5, 5, 5]


def test_closure_before_the_default_of_a_partial() -> None:
    def keys(j, n=1):
        return j < n

    assert seen(mask(keys)) == [1, 1, 1]
    bound = mask(functools.partial(keys, n=4))
    assert seen(bound) == [4, 4, 4]
    assert seen(bound, n=2) == [2, 2, 2]


# -- free variables are read at each call ------------------------------------------------------

LIMIT = 2


def test_a_global_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    attn = mask(lambda j: j < LIMIT)
    assert seen(attn) == [2, 2, 2]
    monkeypatch.setitem(globals(), "LIMIT", 4)
    assert seen(attn) == [4, 4, 4]


def test_an_attribute_is_read_at_each_call() -> None:
    class Window:
        def __init__(self) -> None:
            self.width = 1

        def __call__(self, b, h, i, j):
            return j < self.width

    window = Window()
    attn = scoremod.from_flex(mask_mod=window)
    assert seen(attn) == [1, 1, 1]
    window.width = 3
    assert seen(attn) == [3, 3, 3]


def test_a_closure_may_change_its_type() -> None:
    limit: Any = 2

    @mask
    def attn(j):
        return j < limit

    assert seen(attn) == [2, 2, 2]
    for limit in (
        2.5,
        torch.tensor(4),
        torch.tensor([1.5]),
        True,
        torch.tensor(3, dtype=torch.int8),
    ):
        assert seen(attn) == [-int(-float(limit) // 1)] * 3


def test_a_closure_may_change_its_tensor_and_contents() -> None:
    table = torch.tensor([1, 2, 3])

    @mask
    def attn(i, j):
        return j < table[i]

    assert seen(attn) == [1, 2, 3]
    table[0] = 5
    assert seen(attn) == [5, 2, 3]
    table = torch.tensor([4.0, 0.5, 2.5], dtype=torch.float64)
    assert seen(attn) == [4, 1, 3]


def test_a_closure_that_becomes_something_else_is_an_error() -> None:
    limit: Any = 2

    @mask
    def attn(j):
        return j < limit

    limit = "many"
    with pytest.raises(CaptureMismatch, match="`limit` must be a number or a tensor, not str"):
        attn(*QKV)


@each_backend
def test_loop_variables_bind_late(backend: str) -> None:
    found = [mask(lambda j: j < n) for n in (1, 2, 3)]  # noqa: B023
    assert [seen(attn)[0] for attn in found] == [3, 3, 3]
    assert len({str(attn) for attn in found}) == 1
    compare(found[0], QKV, backend)


def test_a_free_variable_of_a_reserved_name_is_read_but_not_given() -> None:
    scale = 2

    @mask
    def attn(j):
        return j < scale

    assert seen(attn) == [2, 2, 2]
    with pytest.raises(MissingCapture):
        attn.bind(scale=3)
    with pytest.raises(MissingCapture):
        attn(*QKV, free_scale=3)
    assert attn(*QKV, scale=0.5).shape == (2, 4, 5, 16)


# -- names -------------------------------------------------------------------------------------


def message(error: type[ScoremodError], call: Any, *args: Any, **given: Any) -> str:
    """What is said when a call goes wrong."""
    with pytest.raises(error) as found:
        call(*args, **given)
    return str(found.value)


def test_a_missing_capture_is_named_with_its_declaration() -> None:
    said = message(MissingCapture, variants.document, *QKV)
    assert (
        "`doc` was not given" in said and "doc: tensor[B, L]" in said and ".bind(doc=...)" in said
    )


def test_a_misspelt_capture() -> None:
    said = message(MissingCapture, variants.sliding_window, *QKV, windw=3)
    assert "`windw` is not a capture" in said and "did you mean window?" in said
    said = message(MissingCapture, variants.causal, *QKV, zzz=3)
    assert "it has none" in said
    assert "windw" in message(MissingCapture, variants.sliding_window.bind, windw=3)


@pytest.mark.parametrize("call", ["__call__", "eager", "mask_dense", "tiles"])
def test_every_method_checks_names(call: str) -> None:
    sizes = QKV if call in ("__call__", "eager") else (5, 7)
    with pytest.raises(MissingCapture, match="`nope`"):
        getattr(variants.causal, call)(*sizes, nope=1)


# -- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [2**47 + 1, -(2**47) - 1, 2**63, 10**30])
def test_a_larger_int_is_an_error(value: int) -> None:
    attn = parse("variant v(n) { mask j < n }")
    said = message(CaptureMismatch, attn, *QKV, n=value)
    assert "`n`" in said and str(value) in said and "2**47" in said
    with pytest.raises(ScoremodError, match=r"2\*\*47|64 bits"):
        parse(f"variant v(n: int = {value}) {{ mask j < n }}")


@pytest.mark.parametrize("value", [2**47, -(2**47)])
def test_the_largest_ints_fit(value: int) -> None:
    attn = parse("variant v(n) { mask j < n }")
    assert seen(attn, n=value) == [6 * (value > 0)] * 3


# declared type: (values that fit, values that do not)
FITTING: dict[str, tuple[list[Any], list[Any]]] = {
    "bool": ([True, torch.tensor(False), torch.tensor([True])], [1, 1.0, torch.tensor(1)]),
    "int": (
        [3, True, torch.tensor(3), torch.tensor([3], dtype=torch.uint8)],
        [3.0, torch.tensor(3.0), "3", None, [3], 1j],
    ),
    "float": (
        [
            3.0,
            3,
            True,
            torch.tensor(3),
            torch.tensor(3.0, dtype=torch.float16),
            torch.tensor([3.0]),
        ],
        ["3", None, torch.tensor([3.0, 4.0]), torch.ones(1, 1), torch.tensor(1j)],
    ),
}


@pytest.mark.parametrize("declared", FITTING)
def test_declared_numbers(declared: str) -> None:
    attn = parse(f"variant v(n: {declared}) {{ mask {'n' if declared == 'bool' else 'j < n'} }}")
    good, bad = FITTING[declared]
    for value in good:
        compare(attn, QKV, "cpu", n=value)
    for value in bad:
        said = message(CaptureMismatch, attn, *QKV, n=value)
        assert "`n`" in said and f"n: {declared}" in said


@each_backend
def test_an_int_for_a_float_is_a_float(backend: str) -> None:
    attn = parse(
        "variant v(x: float) { score s + x / 2 + x // 2 + (i + x) ** 2 * 0.01 + floor(x / 2) }"
    )
    values = [3, 3.0, torch.tensor(3), torch.tensor([3], dtype=torch.int8), torch.tensor(3.0)]
    for x in values:
        compare(attn, QKV, backend, x=x)


@each_backend
def test_a_bool_for_an_int_is_an_int(backend: str) -> None:
    attn = parse("variant v(n: int) { score s * (n + n) mask j <= i + n }")
    compare(attn, QKV, backend, n=True)


def test_one_number_is_not_a_table_and_the_other_way_round() -> None:
    attn = parse("variant v(t, n) { mask t[j] < n }")
    said = message(CaptureMismatch, attn, *QKV, t=3, n=1)
    assert "`t` must be a tensor, not int" in said
    said = message(CaptureMismatch, attn, *QKV, t=torch.ones(7), n=torch.ones(7))
    assert "`n` is read as one number" in said and "index it" in said


@pytest.mark.parametrize("value", [[1, 2, 3], "abc", object(), None])
def test_things_that_are_neither_number_nor_tensor(value: Any) -> None:
    attn = parse("variant v(t) { mask t[j] > 0 }")
    assert "`t` must be" in message(CaptureMismatch, attn, *QKV, t=value)


# -- element types -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "given"),
    [("i32", torch.int64), ("i64", torch.int32), ("i8", torch.uint8), ("f32", torch.float16),
     ("f16", torch.float32), ("bf16", torch.float16), ("bool", torch.uint8), ("f32", torch.int32),
     ("f64", torch.float32), ("i16", torch.bool)],
)  # fmt: skip
def test_a_declared_element_type_is_exact(declared: str, given: torch.dtype) -> None:
    attn = parse(f"variant v(t: {declared}[Lk]) {{ mask bool(t[j]) }}")
    said = message(CaptureMismatch, attn, *QKV, t=torch.ones(7).to(given))
    assert "`t` holds" in said and f"t: {declared}[Lk]" in said


@pytest.mark.parametrize(
    "element", ["bool", "i8", "u8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64"]
)
def test_each_element_type_by_its_word(element: str) -> None:
    dtype = {"b": "bool", "u": "uint", "i": "int"}.get(element[0], "float")
    name = {"bool": "bool", "bf16": "bfloat16"}.get(element, dtype + element[1:])
    attn = parse(f"variant v(t: {element}[Lk]) {{ mask bool(t[j]) }}")
    compare(attn, QKV, "cpu", t=torch.tensor([0, 1, 1, 0, 1, 0, 1]).to(getattr(torch, name)))


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.uint16, torch.uint32, torch.uint64], ids=str
)
def test_other_dtypes_are_named(dtype: torch.dtype) -> None:
    attn = parse("variant v(t) { mask t[j] > 0 }")
    said = message(CaptureMismatch, attn, *QKV, t=torch.ones(7).to(dtype))
    assert "`t` has dtype" in said and str(dtype) in said


def test_a_call_decides_an_open_type_and_its_operators() -> None:
    attn = parse("variant v(t) { mask (t[j] & 2) == 2 }")
    compare(attn, QKV, "cpu", t=torch.arange(7))
    with pytest.raises(ScoremodError, match="`&` needs ints or bools, but this is float"):
        attn(*QKV, t=torch.ones(7))


def test_a_condition_of_an_open_type() -> None:
    attn = parse("variant v(t) { mask t[j] }")
    compare(attn, QKV, "cpu", t=torch.arange(7) > 3)
    with pytest.raises(ScoremodError, match="bool condition, but this is int"):
        attn(*QKV, t=torch.arange(7))


# -- dimensions --------------------------------------------------------------------------------

# B, H, Hk = 2, 4, 2 and Lq, Lk = 5, 7. dimension: (index, lengths that fit, that do not)
DIMENSIONS = {
    "B": ("b", (1, 2, 3), (0,)),
    "H": ("h", (1, 4, 6), (0, 2, 3)),
    "Hk": ("hk", (1, 2, 4), (0,)),
    "Lq": ("i", (1, 5, 9), (0, 2, 4)),
    "Lk": ("j", (1, 7, 9), (0, 5, 6)),
    "L": ("(i if h == 0 else j)", (1, 7, 9), (5, 6)),
}


@pytest.mark.parametrize("dim", DIMENSIONS)
def test_dimensions_are_lower_bounds(dim: str) -> None:
    index, good, bad = DIMENSIONS[dim]
    declared = parse(f"variant v(t: tensor[{dim}]) {{ score s + t[{index}] }}")
    silent = parse(f"variant v(t) {{ score s + t[{index}] }}")
    for attn in (declared, silent) if dim != "L" else (declared,):
        for length in good:
            compare(attn, QKV, "cpu", t=torch.randn(length))
        for length in bad:
            said = message(CaptureMismatch, attn, *QKV, t=torch.randn(length))
            assert f"{dim} must be 1 or at least" in said and f"({length},)" in said


def test_a_dimension_read_at_i_and_j_is_l() -> None:
    attn = parse("variant v(t) { mask t[i] <= t[j] }")
    compare(attn, QKV, "cpu", t=torch.randn(7))
    assert "L must be 1 or at least 7" in message(CaptureMismatch, attn, *QKV, t=torch.randn(5))


@pytest.mark.parametrize(("dim", "need"), [("Lq", 15), ("L", 15), ("Lk", 7)])
def test_q_offset_moves_the_bound(dim: str, need: int) -> None:
    index = "j" if dim == "Lk" else "i"
    attn = parse(f"variant v(t: tensor[{dim}]) {{ score s + t[{index}] }}")
    compare(attn, QKV, "cpu", q_offset=10, t=torch.randn(need))
    said = message(CaptureMismatch, attn, *QKV, q_offset=10, t=torch.randn(need - 1))
    assert f"must be 1 or at least {need}" in said


@each_backend
@pytest.mark.parametrize("dim", ["Lq", "L"])
def test_an_offset_that_only_the_device_knows_is_not_checked(dim: str, backend: str) -> None:
    attn = parse(f"variant v(t: tensor[{dim}]) {{ score s + t[i] * t[j] }}")
    offsets = torch.tensor([0, 10])
    for length in (1, 3, 15):
        compare(attn, QKV, backend, q_offset=offsets, t=torch.randn(length))
        compare(attn, QKV, backend, q_offset=offsets, t=torch.arange(length, dtype=torch.int32))


def test_a_broadcast_dimension_ends_where_the_known_one_ends() -> None:
    attn = parse("variant v(t: tensor[Lk]) { score s + t[j + 3] }")
    compare(attn, QKV, "cpu", t=torch.tensor([2.0]))


def test_a_literal_dimension_is_exact() -> None:
    attn = parse("variant v(t: tensor[3, B]) { score s + t[h, b] }")
    compare(attn, QKV, "cpu", t=torch.randn(3, 2))
    for rows in (1, 2, 4):
        said = message(CaptureMismatch, attn, *QKV, t=torch.randn(rows, 2))
        assert "dimension 0 must be 3" in said


def test_other_names_agree_across_captures() -> None:
    attn = parse("variant v(t: tensor[N], u: tensor[B, N]) { score s + t[j] + u[b, j] }")
    compare(attn, QKV, "cpu", t=torch.randn(4), u=torch.randn(2, 4))
    said = message(CaptureMismatch, attn, *QKV, t=torch.randn(4), u=torch.randn(2, 5))
    assert "`u` has 5 for N, but `t` has 4" in said
    twice = parse("variant v(t: tensor[N, N]) { score s + t[i, j] }")
    assert "3 for N" in message(CaptureMismatch, twice, *QKV, t=torch.randn(2, 3))


def test_names_of_joined_variants_agree() -> None:
    first = parse("variant a(t: tensor[N]) { score s + t[j] }")
    second = parse("variant b(u: tensor[N]) { mask u[i] > -9.0 }")
    compare(first & second, QKV, "cpu", t=torch.randn(4), u=torch.randn(4))
    with pytest.raises(CaptureMismatch, match="for N"):
        (first & second)(*QKV, t=torch.randn(4), u=torch.randn(5))


def test_the_number_of_dimensions() -> None:
    declared, silent = variants.document, parse("variant v(t) { mask t[b, j + 0] > 0 }")
    said = message(CaptureMismatch, declared, *QKV, doc=torch.ones(7))
    assert "1 dimensions, not 2" in said and "doc: tensor[B, L]" in said
    assert "`t` has shape (7,)" in message(CaptureMismatch, silent, *QKV, t=torch.ones(7))


def test_a_dimension_of_no_known_index_is_free() -> None:
    attn = parse("variant v(t) { score s + t[i - j] + t[j] * 0.5 }")
    for length in (1, 3, 100):
        with pytest.raises(CaptureMismatch) if 1 < length < 7 else _no_error():
            compare(attn, QKV, "cpu", t=torch.randn(length))
    free = parse("variant v(t) { score s + t[i - j] }")
    for length in (0, 1, 3, 100):
        compare(free, QKV, "cpu", t=torch.randn(length))


class _no_error:  # noqa: N801
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


# -- consts ------------------------------------------------------------------------------------


def test_a_const_is_given_like_a_capture() -> None:
    attn = parse(
        "variant v(const n: int = 2) { let x = 0 for k in range(n) { x = x + 1 } mask j < x }"
    )
    assert seen(attn) == [2, 2, 2]
    assert seen(attn, n=3) == [3, 3, 3]
    assert seen(attn.bind(n=4)) == [4, 4, 4] and seen(attn.bind(n=4), n=1) == [1, 1, 1]
    assert seen(attn) == [2, 2, 2]


def test_a_const_of_python() -> None:
    @mask
    def attn(j, n=scoremod.const(2)):  # noqa: B008
        x = 0
        for _ in range(n):
            x += 1
        return j < x

    assert seen(attn) == [2, 2, 2] and seen(attn, n=3) == [3, 3, 3]


def test_a_const_is_no_tensor() -> None:
    attn = parse("variant v(const n: int = 2) { mask j < n }")
    with pytest.raises(ScoremodError, match="`n` must be a number"):
        attn(*QKV, n=torch.tensor(3))


def test_other_names_are_checked_where_a_const_is_given() -> None:
    attn = parse("variant v(const n: int = 2, m: int = 0) { mask j < n + m }")
    assert seen(attn, n=1, m=1) == [2, 2, 2]
    with pytest.raises(MissingCapture, match="`mm`"):
        attn(*QKV, n=1, mm=2)


# -- composition -------------------------------------------------------------------------------


def test_bound_values_go_with_their_variant() -> None:
    near, far = variants.sliding_window.bind(window=2), variants.symmetric_window.bind(radius=1)
    assert seen(near | far) == [2, 3, 3]
    assert seen(near & far, window=1) == [1, 1, 1]
    assert seen(~near) == [5, 4, 4]


def test_bound_values_are_renamed_with_their_capture() -> None:
    near = variants.sliding_window.bind(window=2).rename(window="far")
    assert seen(near) == [1, 2, 2] and seen(near, far=1) == [1, 1, 1]
    both = near | variants.sliding_window
    assert seen(both, window=1, far=3) == [1, 2, 3]
    with pytest.raises(MissingCapture, match="`window`"):
        near.bind(window=3)


def test_two_parts_that_fix_a_capture_differently() -> None:
    near, far = variants.sliding_window.bind(window=2), variants.sliding_window.bind(window=3)
    said = message(CompositionError, lambda: near & far)
    assert "`window`" in said and '.rename(window="other_window")' in said
    assert seen(near & near.bind(window=2)) == [1, 2, 2]
    table = torch.arange(7)[None]
    same = variants.document.bind(doc=table)
    assert seen(same & same, doc=table) == [1, 1, 1]
    with pytest.raises(CompositionError):
        same & variants.document.bind(doc=table.clone())


def test_bind_does_not_change_its_variant() -> None:
    bound = variants.sliding_window.bind(window=1)
    assert seen(variants.sliding_window) == [1, 2, 3] and seen(bound) == [1, 1, 1]


# -- devices -----------------------------------------------------------------------------------


def test_a_capture_without_data_is_an_error() -> None:
    attn = parse("variant v(t) { mask t[j] > 0 }")
    with pytest.raises(CaptureMismatch, match="`t` is on meta"):
        attn(*QKV, t=torch.ones(7, device="meta"))


@pytest.mark.gpu
def test_a_capture_on_another_device_is_named() -> None:
    q, k, v = (x.cuda() for x in QKV)
    with pytest.raises(CaptureMismatch, match="`doc` is on cpu, but q is on cuda"):
        variants.document(q, k, v, doc=torch.ones(1, 7))


# -- the rest of a declaration -----------------------------------------------------------------


def test_annotations_of_python_declare_the_same() -> None:
    @variant
    def attn(s, b, j, t: f32[B, Lk], u: tensor[N], n: int = 2, x: float = 1.0):
        return s + t[b, j] * n * x + u[j]

    assert attn.captures == ("t: f32[B, Lk]", "u: tensor[N]", "n: int", "x: float")

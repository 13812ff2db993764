"""The mini-language becomes the IR: what a `.smod` text may say."""

from __future__ import annotations

import pytest
import torch

from scoremod import Variant, parse
from scoremod.errors import LanguageError, MissingCapture, ReservedName, ScoremodError, TypeMismatch
from scoremod.frontend.text import parse_expression
from scoremod.ir.expr import const, index, make
from scoremod.ir.ops import Op, Type


def body(text: str, captures: str = "") -> Variant:
    return parse(f"variant v({captures}) {{ {text} }}")


# -- the whole ---------------------------------------------------------------------------------


def test_a_text_may_hold_a_score_a_mask_or_both() -> None:
    assert body("score s * 2").mask_dense(1, 2).all()
    assert body("mask j <= i").mask_dense(1, 2).tolist() == [[True, False]]
    both = parse("variant v() { mask j <= i score s * 2 }")
    assert both == body("score s * 2") & body("mask j <= i")


def test_names_semicolons_commas_and_comments() -> None:
    text = """# first line
    variant named(a: int = 1, b_: float,) {  # a comment
      let x = i - j;
      x = x * a;   # assigned anew
      score s + x + b_;
    }
    # last line"""
    found = parse(text)
    assert found.name == "named"
    assert found == body("score s + (i - j) * a + b_", "a: int = 1, b_: float")


def test_a_variant_needs_no_name() -> None:
    assert parse("variant (w: int) { mask i - j < w }").captures == ("w: int",)


def test_windows_line_ends_and_tabs() -> None:
    assert parse("variant v() {\r\n\tmask j <= i\r\n}\r\n") == body("mask j <= i")


def test_names_may_be_of_any_alphabet() -> None:
    found = parse("variant größe(λ: float = 0.5) { score s * λ }")
    assert (found.name, found.captures) == ("größe", ("λ: float",))


@pytest.mark.parametrize(
    "name", ["score", "mask", "let", "variant", "const", "range", "size", "e", "pi", "abs", "min"]
)
def test_words_of_the_language_may_name_captures(name: str) -> None:
    found = body(f"score s + {name}[h] mask {name}[h] > 0", f"{name}: f32[H]")
    assert found.captures == (f"{name}: f32[H]",)
    assert parse(str(found)) == found
    assert parse(f"variant {name}() {{ let {name} = s score {name} }}") == body("score s")


@pytest.mark.parametrize("name", ["if", "for", "not", "True", "in", "lambda", "inf", "nan"])
def test_words_of_python_may_not(name: str) -> None:
    with pytest.raises(ScoremodError):
        body(f"score s + {name}", f"{name}: float")


# -- captures ----------------------------------------------------------------------------------


def test_every_declaration() -> None:
    captures = (
        "a: bool, c: int, d: float, t: tensor[B, _, 7], u: i32[B, Lk], v_: f32[H], w: bf16[...], "
        "x: bool[Lq], y, z: tensor"
    )
    text = "score s + t[b, 0, 1] + u[b, j] + v_[h] + w[i] + y + z[j] mask a and x[i] and c > d"
    assert body(text, captures).captures == (
        "a: bool",
        "c: int",
        "d: float",
        "t: tensor[B, _, 7]",
        "u: i32[B, Lk]",
        "v_: f32[H]",
        "w: bf16[Lq]",
        "x: bool[Lq]",
        "y",
        "z: tensor[Lk]",
    )


def test_defaults() -> None:
    captures = "a = 1, c = 0.5, d = True, f: float = -2, g: int = 0x10, n: float = -inf, m = 1_000"
    found = body("score s + a + c + f + g + n + m mask d", captures)
    assert str(found).startswith(
        "variant v(a: int = 1, c: float = 0.5, d: bool = True, f: float = -2.0, g: int = 16, "
        "n: float = -inf, m: int = 1000)"
    )


def test_const_is_compiled_in_and_may_be_bound() -> None:
    found = body("mask j < n", "const n: int = 8")
    assert found == body("mask j < 8")
    assert found.captures == ()
    assert found.bind(n=9) == body("mask j < 9")
    assert found.mask_dense(1, 9, n=1).sum() == 1


def test_a_const_keeps_its_declared_type() -> None:
    assert body("score s * x", "const x: float = 3") == body("score s * 3.0")
    for captures, given in (("const n: int = 3", 2.5), ("const x: float = 3", "a")):
        with pytest.raises(TypeMismatch):
            body("score s", captures).bind(**{captures.split()[1][:-1]: given})


def test_a_const_has_a_value() -> None:
    with pytest.raises(LanguageError, match="needs a value"):
        body("mask j < n", "const n: int")


def test_a_missing_capture_is_named() -> None:
    with pytest.raises(MissingCapture, match="`w` was not given") as error:
        body("mask i - j < w", "w: int").mask_dense(1, 1)
    assert error.value.span is not None
    assert error.value.span.words == "w"


def test_reserved_names() -> None:
    for name in ("s", "b", "h", "hk", "i", "j", "q_len", "kv_len"):
        with pytest.raises(ReservedName, match=f"`{name}` is reserved"):
            body("score s", f"{name}: int")
        with pytest.raises(ReservedName, match=f"`{name}` is reserved"):
            body(f"let {name} = 1 score s")
        with pytest.raises(ReservedName, match=f"`{name}` is reserved"):
            body(f"for {name} in range(2) {{ }} score s")
    with pytest.raises(ReservedName, match="keyword of the call"):
        body("score s", "kv_lens: int")
    with pytest.raises(ReservedName, match="declared twice"):
        body("score s", "a: int, a: int")


# -- expressions -------------------------------------------------------------------------------

READS = [
    ("i - j - 1", "(i - j) - 1"),
    ("-i ** 2", "-(i ** 2)"),
    ("2 ** 3 ** 2", "2 ** (3 ** 2)"),
    ("2 ** -i", "2 ** (-i)"),
    ("not i < j and j < 2", "(not (i < j)) and (j < 2)"),
    ("i < j or j < 2 and b < 3", "(i < j) or ((j < 2) and (b < 3))"),
    ("i | j ^ b & h", "i | (j ^ (b & h))"),
    ("i << 1 + 2", "i << (1 + 2)"),
    ("i & j == 2", "(i & j) == 2"),
    ("~i * 2", "(~i) * 2"),
    ("i // 3 % 4 * 2", "((i // 3) % 4) * 2"),
    ("i if j < 2 else b if h < 3 else 4", "i if j < 2 else (b if h < 3 else 4)"),
    ("i if j < 2 else b", "where(j < 2, i, b)"),
    ("0 <= i - j < 4", "0 <= i - j and i - j < 4"),
    ("i > j", "j < i"),
    ("i >= j", "j <= i"),
    ("min(i, j, b)", "min(min(i, j), b)"),
    ("clamp(i, 0, 9)", "min(max(i, 0), 9)"),
    ("clamp(i, 0)", "max(i, 0)"),
    ("relu(s)", "max(s, 0)"),
    ("silu(s)", "s * sigmoid(s)"),
    ("isnan(s)", "s != s"),
    ("isinf(s)", "abs(s) == inf"),
    ("isfinite(s)", "abs(s) < inf"),
    ("xor(i < j, b < 1)", "(i < j) != (b < 1)"),
    ("log(s, 2)", "log(s) / log(2)"),
    ("minimum(i, j)", "min(i, j)"),
    ("pow(i, 2)", "i ** 2"),
    ("0x1F + 0b101 + 1_000", "31 + 5 + 1000"),
    ("1e3 + .5 + 2. + 1_0.5", "1000.0 + 0.5 + 2.0 + 10.5"),
    ("+i", "i"),
    ("e + pi", "2.718281828459045 + 3.141592653589793"),
    ("(i < j) & (b < 2)", "i < j and b < 2"),
    ("1 if True else s / 0", "1"),
    ("2 if 3 < 2 else i", "i"),
]


@pytest.mark.parametrize(("text", "plain"), READS)
def test_it_reads_as(text: str, plain: str) -> None:
    assert parse_expression(text) == parse_expression(plain)


def test_grouping_is_kept() -> None:
    assert parse_expression("i - (j - 1)") != parse_expression("i - j - 1")
    assert parse_expression("i + (j + 1)") != parse_expression("i + j + 1")


def test_an_expression_is_typed() -> None:
    assert parse_expression("i - j < w", {"w": Type.INT}).type is Type.BOOL
    assert parse_expression("i + True").type is Type.INT
    assert parse_expression("i / 2").type is Type.FLOAT
    assert parse_expression("i ** 2").type is Type.INT
    assert parse_expression("i ** j").type is Type.FLOAT
    assert parse_expression("w", {"w": Type.ANY}).type is Type.ANY


def test_it_is_the_tree_that_make_builds() -> None:
    i, j = index("i"), index("j")
    expected = make(Op.LE, make(Op.SUB, i, j), const(3))
    assert parse_expression("i - j <= 3") == expected


# -- statements --------------------------------------------------------------------------------


def test_loops() -> None:
    found = body("let x = s for k in range(1, 8, 3) { x = x + t[k] } score x", "t: f32[8]")
    assert found == body("score s + t[1] + t[4] + t[7]", "t: f32[8]")
    nested = "let x = 0 for a in range(2) { for c in range(a, 2) { x = x + a * c } } mask i < x"
    assert body(nested) == body("mask i < 0 + 0 * 0 + 0 * 1 + 1 * 1")


def test_let_may_hold_a_table() -> None:
    found = body("let row = t[b] score s + row[h][i]", "t: tensor[B, H, Lq]")
    assert found == body("score s + t[b, h, i]", "t: tensor[B, H, Lq]")


def test_a_literal_negative_index_counts_from_the_end() -> None:
    assert body("score s + t[-1]", "t: f32[4]") == body("score s + t[size(t, 0) + -1]", "t: f32[4]")
    t = torch.arange(4.0)
    q = torch.zeros(1, 1, 1, 1)
    _, lse = body("score s + t[-1]", "t: f32[4]").eager(q, q, q, return_lse=True, t=t)
    assert lse.item() == 3


def test_masks_in_scores_are_taken_out() -> None:
    assert body("score where(j <= i, s * 2, -inf)") == body("score s * 2 mask j <= i")
    assert body("score s if j <= i else -inf mask b < 2") == body("mask b < 2 and j <= i")

"""Variants are put together: & | ~ then, bind and rename, and what cannot be joined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from scoremod import Variant, parse, variants
from scoremod.errors import (
    CaptureMismatch,
    CompositionError,
    MissingCapture,
    ReservedName,
    ScoremodError,
)

alibi, causal, softcap = variants.alibi, variants.causal, variants.softcap
window = variants.sliding_window


def v(body: str, captures: str = "") -> Variant:
    return parse(f"variant v({captures}) {{ {body} }}")


def attends(found: Variant, q_len: int = 3, kv_len: int = 3, **captures: Any) -> list[list[int]]:
    return found.mask_dense(q_len, kv_len, **captures).int().tolist()


# -- masks -------------------------------------------------------------------------------------


def test_a_mask_is_a_variant_with_score_s() -> None:
    assert attends(causal) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert str(causal) == "variant causal() {\n  mask j <= i\n}"


def test_logic_of_masks() -> None:
    left, right = v("mask j <= i"), v("mask j < 2")
    assert left & right == v("mask j <= i and j < 2")
    assert left | right == v("mask j <= i or j < 2")
    assert ~left == v("mask not j <= i")
    assert ~(left | ~right) == v("mask not (j <= i or not j < 2)")
    assert attends(~left) == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]


def test_names_tell_how_it_was_made() -> None:
    names = (causal & window, causal | window, ~causal, alibi.then(softcap))
    assert [x.name for x in names] == [
        "causal_and_sliding_window",
        "causal_or_sliding_window",
        "not_causal",
        "alibi_then_softcap",
    ]


def test_a_score_takes_a_mask_from_either_side() -> None:
    assert (
        alibi & causal
        == causal & alibi
        == v("score s - slopes[h] * (i - j) mask j <= i", "slopes: tensor[H]")
    )


def test_a_mask_out_of_a_score_takes_part_in_logic() -> None:
    found = v("score where(j <= i, s, -inf)")
    assert found | v("mask j < 2") == v("mask j <= i or j < 2")


def test_then_feeds_the_first_score_to_the_second() -> None:
    first, second = v("score s + i mask j <= i"), v("score s * s mask j < 2")
    assert first.then(second) == v("score (s + i) * (s + i) mask j <= i and j < 2")
    assert causal.then(second) == v("score s * s mask j <= i and j < 2")
    assert first.then(second).then(v("score -s")) == first.then(second.then(v("score -s")))


def test_then_applies_masks_after_both() -> None:
    q = torch.zeros(1, 1, 2, 1, dtype=torch.float64)
    # Were the -inf of the mask fed to the second score, it would be 0 there.
    found = causal.then(v("score where(s < -1000, 0, s)"))
    _, lse = found.eager(q, q, q, return_lse=True)
    assert lse.flatten().tolist() == pytest.approx([0.0, 0.6931471805599453])


# -- captures ----------------------------------------------------------------------------------


def test_captures_of_equal_name_and_type_are_one() -> None:
    left = v("mask i - j < w", "w: int = 8, t: tensor[L]")
    right = v("mask j - i < w and t[j]", "w: int = 8, t: bool[Lk]")
    assert (left & right).captures == ("w: int", "t: bool[L]")


CONFLICTS = [
    ("x: int", "x: float", "x: int and x: float"),
    ("x: int = 1", "x: int = 2", "the defaults are 1 and 2"),
    ("x: int = 1", "x: int", "the defaults are 1 and none"),
    ("x: int = 1", "x: bool = True", "x: int and x: bool"),
    ("x: f32[H]", "x: f16[H]", "x: f32"),
    ("x: f32[H]", "x: f32[B]", "x: f32"),
    ("x: f32[H]", "x: f32[H, Lk]", "x: f32"),
    ("x: f32[H]", "x: float", "x: f32"),
]


@pytest.mark.parametrize(("left", "right", "message"), CONFLICTS)
def test_captures_that_differ_are_an_error(left: str, right: str, message: str) -> None:
    a, c = v("score s", left), v("mask j <= i", right)
    for join in (lambda: a & c, lambda: c & a, lambda: a.then(c), lambda: a | c):
        with pytest.raises(CompositionError, match=r"two different captures are called `x`"):
            join()
    with pytest.raises(CompositionError) as error:
        _ = a & c
    assert message in error.value.message
    assert error.value.hint == '.rename(x="other_x") one of them'
    renamed = a & c.rename(x="other_x")
    assert len(renamed.captures) == 2


def test_free_variables_of_one_name_are_told_apart() -> None:
    from scoremod import mask

    def make(n: int) -> Variant:
        return mask(lambda i, j: i - j < n)

    with pytest.raises(CompositionError, match="they read different variables"):
        _ = make(1) | make(2)
    found = make(1) | make(2).rename(n="far")
    assert attends(found) == [[1, 1, 1], [1, 1, 1], [0, 1, 1]]
    assert attends(found, far=3) == [[1, 1, 1]] * 3
    with pytest.raises(CompositionError, match="one is a free variable"):
        _ = make(1) | v("mask i < n", "n")


def test_consts_of_both_parts() -> None:
    a, c = v("mask j < n", "const n: int = 2"), v("mask i < n", "const n: int = 3")
    with pytest.raises(CompositionError, match="two different consts are called `n`: 2 and 3"):
        _ = a & c
    both = a & c.bind(n=2)
    assert both == v("mask j < 2 and i < 2")
    assert both.bind(n=4) == v("mask j < 4 and i < 4")
    renamed = a & c.rename(n="m")
    assert renamed.bind(m=5) == v("mask j < 2 and i < 5")
    assert renamed.bind(n=4) == v("mask j < 4 and i < 3")
    assert attends(renamed, n=1) == [[1, 0, 0]] * 3
    with pytest.raises(CompositionError, match="`n` is a const in one part and a capture in"):
        _ = a & v("mask i < n", "n: int")


# -- bind and rename ---------------------------------------------------------------------------


def test_bind_fixes_values_that_a_call_may_override() -> None:
    bound = window.bind(window=1)
    assert attends(bound) == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert attends(bound, window=2) == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert attends(bound.bind(window=9)) == attends(causal)
    assert attends(window) == attends(causal)


def test_a_bound_number_is_written_as_default() -> None:
    assert "window: int = 1)" in str(window.bind(window=1))
    assert parse(str(window.bind(window=1))) == window.bind(window=1) != window
    assert window.bind(window=4096) == window


def test_bound_tensors_count_by_identity() -> None:
    slopes = torch.ones(2)
    assert alibi.bind(slopes=slopes) == alibi.bind(slopes=slopes)
    assert alibi.bind(slopes=slopes) != alibi.bind(slopes=torch.ones(2))
    assert alibi.bind(slopes=slopes) != alibi


def test_bind_names_what_is_no_capture() -> None:
    with pytest.raises(MissingCapture, match="`windw` is not a capture") as error:
        window.bind(windw=3)
    assert error.value.hint == "did you mean window?"
    with pytest.raises(MissingCapture):
        causal.bind(window=3)


@pytest.mark.parametrize("value", [2.5, 2**50, 10**60])
def test_bind_takes_numbers_that_fit(value: Any) -> None:
    with pytest.raises(CaptureMismatch, match="the capture `window`"):
        window.bind(window=value)
    with pytest.raises(CaptureMismatch, match="must be a tensor"):
        alibi.bind(slopes=0.5)


def test_rename_gives_other_names() -> None:
    far = window.rename(window="far")
    assert far == v("mask j <= i and i - j < far", "far: int = 4096")
    assert window.bind(window=2).rename(window="far") == far.bind(far=2)
    assert far.rename(far="window") == window
    swapped = v("mask x < y", "x: int, y: int").rename(x="y", y="x")
    assert swapped == v("mask y < x", "y: int, x: int")
    assert attends(swapped, 1, 1, x=5, y=3) == [[1]]


def test_rename_renames_tables_and_their_sizes() -> None:
    found = v("score s + t[h] + size(t, 0)", "t: f32[H]").rename(t="u")
    assert found == v("score s + u[h] + size(u, 0)", "u: f32[H]")


def test_rename_may_make_one_of_two() -> None:
    found = v("mask x < y", "x: int, y: int").rename(x="y")
    assert found == v("mask y < y", "y: int")
    with pytest.raises(CompositionError, match="two different captures"):
        v("mask x < y", "x: int, y: float").rename(x="y")


BAD_RENAMES: list[tuple[Callable[[], object], type[ScoremodError], str]] = [
    (lambda: window.rename(windw="x"), CompositionError, "has no capture `windw`"),
    (lambda: causal.rename(x="y"), CompositionError, "has no capture `x`"),
    (lambda: window.rename(window="i"), ReservedName, "`i` is reserved"),
    (lambda: window.rename(window="scale"), ReservedName, "keyword of the call"),
    (lambda: window.rename(window="a b"), ReservedName, "cannot be called `a b`"),
    (lambda: window.rename(window="if"), ReservedName, "cannot be called `if`"),
    (lambda: window.rename(window=3), CompositionError, "must be text, not int"),  # type: ignore
]


@pytest.mark.parametrize(("rename", "kind", "message"), BAD_RENAMES)
def test_bad_names(rename: Callable[[], object], kind: type[ScoremodError], message: str) -> None:
    with pytest.raises(kind, match=message):
        rename()


# -- what cannot be joined ---------------------------------------------------------------------

JOINS: list[tuple[Callable[[], object], str]] = [
    (lambda: alibi & softcap, "both change the score"),
    (lambda: alibi | causal, "`|` joins masks, but `alibi` changes the score"),
    (lambda: causal | alibi, "`|` joins masks, but `alibi` changes the score"),
    (lambda: ~alibi, "`~` joins masks, but `alibi` changes the score"),
]


@pytest.mark.parametrize(("join", "message"), JOINS)
def test_scores_are_ordered_by_then(join: Callable[[], object], message: str) -> None:
    with pytest.raises(CompositionError) as error:
        join()
    assert message in error.value.message
    assert ".then(" in (error.value.hint or "")


@pytest.mark.parametrize("other", [3, None, "causal", lambda i, j: j <= i])
def test_only_variants_are_joined(other: Any) -> None:
    for join in (lambda: causal & other, lambda: causal | other, lambda: causal.then(other)):
        with pytest.raises(CompositionError, match="joins variants, but this is"):
            join()


def test_different_bound_values_are_an_error() -> None:
    with pytest.raises(CompositionError, match="both parts fix `window`") as error:
        _ = window.bind(window=1) | window.bind(window=2)
    assert error.value.hint == '.rename(window="other_window") one of them'
    assert window.bind(window=1) | window.bind(window=1)
    slopes = torch.ones(1)
    assert alibi.bind(slopes=slopes) & causal == causal & alibi.bind(slopes=slopes)


# -- meaning -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "found",
    [
        alibi & causal,
        (alibi & causal).then(softcap),
        alibi.rename(slopes="rates").then(softcap.bind(cap=3.0)) & ~window.bind(window=2),
    ],
    ids=["mask", "then", "all"],
)
def test_kernel_and_oracle_agree(found: Variant) -> None:
    make = torch.Generator().manual_seed(0)
    q, k, values = (torch.randn(1, 2, 5, 4, generator=make) for _ in range(3))
    name = "rates" if "rates: tensor[H]" in found.captures else "slopes"
    given = {name: torch.tensor([0.5, 0.25])}
    out = found(q, k, values, backend="cpu", **given)
    torch.testing.assert_close(out, found.eager(q, k, values, **given), rtol=1e-5, atol=1e-5)

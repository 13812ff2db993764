"""Which conditions of a mask keep tokens within their document, and what is left of it."""

from __future__ import annotations

import pytest

from scoremod import Variant, parse, variants
from scoremod.analysis.documents import within_documents
from scoremod.ir.expr import TRUE
from scoremod.plan import Typed, assumed_params, typed


def program(variant: Variant) -> Typed:
    return typed(variant._program, assumed_params(variant._program))


def mask(text: str) -> Variant:
    return parse(f"variant v(doc: i32[B, L], other: i32[L], n: int) {{ mask {text} }}")


LEFT = {
    "doc[b, i] == doc[b, j]": "True",
    "doc[b, j] == doc[b, i]": "True",
    "doc[b, i] == doc[b, j] and j <= i": "j <= i",
    "j <= i and other[i] == other[j]": "j <= i",
    "j <= i and (doc[b, i] == doc[b, j] and i - j < n)": "j <= i and i - j < n",
    "doc[b, i] == doc[b, j] and other[i + n] == other[j + n]": "True",
    "other[doc[b, i]] == other[doc[b, j]]": "True",
}


@pytest.mark.parametrize("given", LEFT)
def test_documents_are_told_apart(given: str) -> None:
    wanted = program(mask(LEFT[given])).given_mask
    assert program(mask(given)).within_documents == wanted


OTHERS = [
    "doc[b, i] <= doc[b, j]",
    "doc[b, i] == other[j]",
    "doc[b, i] == n",
    "doc[b, i] == doc[b, j] + 1",
    "doc[b, i] == doc[b, j] or j <= i",
    "not (doc[b, i] == doc[b, j])",
    "doc[b, i + 1] == doc[b, j]",
    "i // 8 == j // 8",
    "other[i - j] == other[j - i]",
    "j <= i",
]


@pytest.mark.parametrize("given", OTHERS)
def test_other_conditions_stay(given: str) -> None:
    found = program(mask(given))
    assert found.within_documents == found.given_mask


def test_stock_documents() -> None:
    assert program(variants.document).within_documents == TRUE
    both = program(variants.document & variants.causal).within_documents
    assert both == program(variants.causal).given_mask
    assert within_documents(TRUE) == TRUE

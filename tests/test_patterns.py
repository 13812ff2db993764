"""How reads move over the pairs of a tile: which gradients are sums along lines."""

from __future__ import annotations

import pytest
from text_cases import parse

from scoremod.passes.patterns import Pattern, classified, pattern

PATTERNS = {
    "bias[h]": Pattern.ROW,
    "bias[b, i]": Pattern.ROW,
    "bias[doc[b, i], 3]": Pattern.ROW,
    "bias[h, j // 2]": Pattern.COLUMN,
    "bias[h, i - j]": Pattern.DIAGONAL,
    "bias[min(max(2 * i - 2 * j, -8), 8) + 8]": Pattern.DIAGONAL,
    "bias[where(i < j, 1, abs(j - i))]": Pattern.DIAGONAL,
    "bias[i - j + b, doc[j - i, h]]": Pattern.DIAGONAL,
    "bias[b, h, i, j]": Pattern.PAIR,
    "bias[j, i]": Pattern.PAIR,
    "bias[i, j, 2]": Pattern.PAIR,
    "bias[i + j]": Pattern.SCATTERED,
    "bias[i - 2 * j]": Pattern.SCATTERED,
    "bias[i, j, i]": Pattern.SCATTERED,
    "bias[i // 2, j]": Pattern.SCATTERED,
    "bias[doc[b, i], j]": Pattern.SCATTERED,
    "bias[int(s)]": Pattern.SCATTERED,
}


@pytest.mark.parametrize("text", PATTERNS)
def test_a_read_has_a_pattern(text: str) -> None:
    assert pattern(parse(text).args) is PATTERNS[text]


def test_only_what_moves_the_score_is_classified() -> None:
    score = parse("s * bias[h] + where(x < bias[j], 1.0, 2.0)")
    found = classified(score, frozenset(("bias", "x")))
    assert [(read.capture, read.pattern) for read in found] == [("bias", Pattern.ROW)]

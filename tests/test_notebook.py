"""What a notebook shows of a variant."""

from __future__ import annotations

from xml.etree import ElementTree

import scoremod
from scoremod import variants


def test_html_shows_formula_picture_and_captures() -> None:
    text = variants.sliding_window._repr_html_()
    found = ElementTree.fromstring(text)  # whole, and escaped where it has to be
    assert found.findtext("b") == "sliding_window"
    assert found.findtext("pre") == "score s\nmask  j <= i and i - j < window"
    assert found.findtext("ul/li/code") == "window: int = 4096"
    assert len(found.findall(".//{http://www.w3.org/2000/svg}rect")) > 16
    assert found.findtext("small", "").startswith("1024 queries by 1024 keys: 16 x 16 tiles")


def test_markdown_shows_the_same_in_characters() -> None:
    text = (variants.alibi & variants.causal)._repr_markdown_()
    assert text.startswith("**alibi_and_causal**\n\n```\nscore s - slopes[h] * (i - j)\nmask ")
    assert "- `slopes: tensor[H]`" in text
    assert "\n#/..............\n" in text


def test_a_mask_that_waits_for_a_table_has_no_picture() -> None:
    assert "<svg" not in variants.document._repr_html_()
    assert "which tiles are visited depends on doc" in variants.document._repr_markdown_()


def test_a_variant_without_mask_and_captures() -> None:
    plain = scoremod.parse("variant plain() { score s * 2 }")
    assert plain._repr_markdown_() == "**plain**\n\n```\nscore s * 2.0\nevery pair attends\n```"

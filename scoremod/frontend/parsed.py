"""Mini-language text with its parse tree as plain data: read again without the parser.

The parser's tables take 0.2 s to make, which the first call of a loaded bundle would wait for.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import lark

from ..resources import read_text
from .source import TextSource, read_text_source

_PLACE = ("line", "column", "end_line", "end_column")


@functools.cache
def grammar_digest() -> str:
    """What a stored tree was made by, and only fits."""
    return hashlib.sha256(read_text("grammar/scoremod.lark").encode()).hexdigest()


def as_data(source: TextSource) -> dict[str, Any]:
    """A parsed text for JSON."""
    return {
        "text": source.text,
        "name": source.name,
        "grammar": grammar_digest(),
        "tree": _data(source.tree),
    }


def from_data(data: Mapping[str, Any], file: str) -> TextSource:
    """The parsed text; parsed anew where the grammar is another one."""
    if data["grammar"] != grammar_digest():
        return read_text_source(data["text"], file)
    return TextSource(data["text"], file, _node(data["tree"]), data["name"])


def _data(node: lark.Tree[Any] | lark.Token | None) -> Any:
    if node is None:
        return None
    tree = isinstance(node, lark.Tree)
    place = [getattr(node.meta if tree else node, name, None) for name in _PLACE]  # type: ignore[union-attr]
    if isinstance(node, lark.Tree):
        return [str(node.data), place, [_data(x) for x in node.children]]
    return [node.type, place, str(node)]


def _node(data: Any) -> Any:
    if data is None:
        return None
    name, place, rest = data
    where = dict(zip(_PLACE, place, strict=True))
    if isinstance(rest, str):
        return lark.Token(name, rest, **where)
    tree = lark.Tree(name, [_node(x) for x in rest])
    for attribute, value in where.items():
        if value is not None:
            setattr(tree.meta, attribute, value)
    return tree

"""How a variant came to be: sources and the operations that joined them.

    (alibi & causal).bind(window=8)   ->   Bound(Both(Leaf(alibi), Leaf(causal)), window=8)

The compiler and the oracle each read this tree in their own way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .frontend.source import PythonSource, TextSource


@dataclass(frozen=True)
class Leaf:
    """A function or a text."""

    source: PythonSource | TextSource


@dataclass(frozen=True)
class Both:
    """`left & right`: masks are ANDed; at most one of the two has a score."""

    left: Origin
    right: Origin


@dataclass(frozen=True)
class Either:
    """`left | right` of two masks."""

    left: Origin
    right: Origin


@dataclass(frozen=True)
class Negated:
    """`~part` of a mask."""

    part: Origin


@dataclass(frozen=True)
class Chained:
    """`first.then(second)`: first's score is second's `s`; masks of both, after both."""

    first: Origin
    second: Origin


@dataclass(frozen=True)
class Renamed:
    """Captures under other names: pairs (inner, outer)."""

    part: Origin
    names: tuple[tuple[str, str], ...]


Origin = Leaf | Both | Either | Negated | Chained | Renamed


def sources(origin: Origin) -> tuple[PythonSource | TextSource, ...]:
    """The sources of an origin, left to right."""
    return fold(origin, lambda leaf: (leaf.source,), lambda _, parts: sum(parts, ()))


def fold(
    origin: Origin, leaf: Callable[[Leaf], Any], node: Callable[[Origin, tuple[Any, ...]], Any]
) -> Any:
    """Walk the tree from the leaves."""
    match origin:
        case Leaf():
            return leaf(origin)
        case Both(left, right) | Either(left, right):
            return node(origin, (fold(left, leaf, node), fold(right, leaf, node)))
        case Chained(first, second):
            return node(origin, (fold(first, leaf, node), fold(second, leaf, node)))
        case Negated(part) | Renamed(part, _):
            return node(origin, (fold(part, leaf, node),))

"""How a variant came to be: sources and the operations that joined them.

    (alibi & causal).bind(window=8)   ->   Bound(Both(Leaf(alibi), Leaf(causal)), window=8)

The compiler and the oracle each read this tree in their own way.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def leaves(origin: Origin) -> tuple[PythonSource | TextSource, ...]:
    """The sources of an origin, left to right."""
    match origin:
        case Leaf(source):
            return (source,)
        case Both(left, right) | Either(left, right) | Chained(left, right):
            return leaves(left) + leaves(right)
        case Negated(part) | Renamed(part, _):
            return leaves(part)

"""How a read of a captured tensor moves over the pairs of a tile, which decides how it is summed.

    slopes[h], x, bias[b, i], t[doc[b, i]]   ->   ROW        free of j: one sum per query
    decay[h, j]                              ->   COLUMN     free of i: one sum per key
    table[h, clamp(i - j, -n, n) + n]        ->   DIAGONAL   i and j only as i - j
    bias[b, h, i, j]                         ->   PAIR       each pair reads an element of its own
    table[dist[b, i, j]]                     ->   SCATTERED  anything else

The first three are sums along lines of the score matrix, of which there are O(L).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..analysis.linear import Sum
from ..ir.expr import ZERO, Expr, index
from ..ir.ops import Op, Type
from .derivative import d_dread, reads
from .simplify import simplify

QUERY, KEY = index("i"), index("j")


class Pattern(enum.Enum):
    """What the elements that a read touches share."""

    ROW = "row"
    COLUMN = "column"
    DIAGONAL = "diagonal"
    PAIR = "pair"
    SCATTERED = "scattered"


@dataclass(frozen=True)
class Read:
    """A captured float that the score depends on, where it is read, and the score's slope by it."""

    capture: str
    indices: tuple[Expr, ...]  # none for a scalar
    slope: Expr
    pattern: Pattern

    @property
    def names(self) -> frozenset[str]:
        """Everything that the place depends on."""
        return frozenset().union(*(x.names for x in self.indices))


def classified(score: Expr, captures: frozenset[str]) -> tuple[Read, ...]:
    """The reads of some captures that the score's value varies with."""
    found = []
    for node in reads(score):
        slope = d_dread(score, node) if node.attr in captures else ZERO
        # What only decides a condition or an index has slope 0.
        if slope != ZERO:
            indices = tuple(simplify(x) for x in node.args)
            found.append(Read(node.attr, indices, slope, pattern(indices)))
    return tuple(found)


def pattern(indices: tuple[Expr, ...]) -> Pattern:
    """The pattern of a read by its indices."""
    names = frozenset[str]().union(*(x.names for x in indices))
    if "s" in names:
        return Pattern.SCATTERED
    if "j" not in names:
        return Pattern.ROW
    if "i" not in names:
        return Pattern.COLUMN
    if all(_on_diagonals(x) for x in indices):
        return Pattern.DIAGONAL
    plain = [x.attr for x in indices if x.op is Op.INDEX]
    own = len(plain) == len(set(plain)) and {"i", "j"} <= set(plain) <= {"b", "h", "i", "j"}
    rest = [x for x in indices if x.op is not Op.INDEX]
    return Pattern.PAIR if own and all(x.is_const for x in rest) else Pattern.SCATTERED


def _on_diagonals(e: Expr) -> bool:
    """Whether a value depends on i and j only through i - j."""
    if not e.names & {"i", "j"}:
        return True
    terms = _terms(e)
    if terms.pop(QUERY, 0) + terms.pop(KEY, 0) == 0 and e not in terms:
        return all(_on_diagonals(t) for t in terms)
    return bool(e.args) and all(_on_diagonals(a) for a in e.args)


def _terms(e: Expr) -> dict[Expr, int]:
    """The terms of the sum that an int is, or that a comparison of ints looks at."""
    if e.op in _COMPARISONS and e.args[0].type is Type.INT:
        return dict((Sum.of(e.args[0]) - Sum.of(e.args[1])).terms)
    return dict(Sum.of(e).terms) if e.type is Type.INT else {e: 1}


_COMPARISONS = (Op.LT, Op.LE, Op.EQ, Op.NE)

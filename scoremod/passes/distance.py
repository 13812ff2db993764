"""Scores that are s times a number and what is added to it, by query, by key and by distance.

slope * s + a(i) + b(j) + per_key * (j - i)

With n for the first key of a kv tile, per_key * (j - n) is the same for all rows of the tile, as
b(j) is, and per_key * (n - i) and a(i) belong to what a softmax takes off a row: one product and
one sum a pair, where ALiBi's score as written takes four. Both parts of a distance are small near
the diagonal, as the whole is; with 0 for n they would round for long sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.expr import ONE, ZERO, Expr
from ..ir.ops import Op, Type
from .fold import affine_in_s, split_terms
from .linear import linear


@dataclass(frozen=True)
class Added:
    """slope * s + of_query + of_key + per_key * (j - i); None for what is not there.

    Nothing reads s, the first and the last neither i nor j, the second no j, the third no i.
    """

    slope: Expr
    of_query: Expr | None
    of_key: Expr | None
    per_key: Expr | None


def added(score: Expr) -> Added | None:
    """A score in this form to whose s something is added, or None."""
    found = affine_in_s(score)
    if found is None or not _same_for_all_pairs(found.slope) or found.offset == ZERO:
        return None
    terms = split_terms(found.offset)
    of_query, of_key = (None if x == ZERO else x for x in (terms.row, terms.column))
    if of_query and of_key and not (_is_read(of_query) and _is_read(of_key)):
        return None
    if terms.mixed == ZERO:
        return Added(found.slope, of_query, of_key, None)
    per_key = _per_key(terms.mixed)
    return None if per_key is None else Added(found.slope, of_query, of_key, per_key)


def _is_read(node: Expr) -> bool:
    """Whether a node is what a table holds, whose own rounding is as large as that of two apart.

    A product is not: rate * (time[i] - time[j]) is exact for times that are whole numbers.
    """
    if node.op in (Op.ADD, Op.SUB, Op.NEG):
        return all(map(_is_read, node.args))
    return node.op is Op.LOAD and node.type is Type.FLOAT


def _per_key(node: Expr) -> Expr | None:
    """x where a node is x * (j - i)."""
    if node.op is Op.FLOAT:
        form = linear(node.args[0])
        signs = {str(term.attr): k for term, k in form.terms if term.op is Op.INDEX}
        if form.constant == 0 and len(form.terms) == 2 and _opposite(signs):
            return {1: ONE, -1: -ONE}.get(signs["j"])
        return None
    if node.op is Op.NEG:
        inner = _per_key(node.args[0])
        return None if inner is None else -inner
    if node.op is Op.MUL:
        for factor, other in (node.args, node.args[::-1]):
            inner = _per_key(other) if _same_for_all_pairs(factor) else None
            if inner is not None:
                return factor * inner
    if node.op is Op.DIV and _same_for_all_pairs(node.args[1]):
        inner = _per_key(node.args[0])
        return None if inner is None else inner / node.args[1]
    return None


def _opposite(signs: dict[str, int]) -> bool:
    return set(signs) == {"i", "j"} and signs["i"] == -signs["j"]


def _same_for_all_pairs(node: Expr) -> bool:
    return not node.reads_s and not node.names & {"i", "j"}

"""Scores that are s times a number and what is added to it, by query, by key and by distance.

slope * s + factor * (a(i) + b(j)) + per_key * (j - i)

With n for the first key of a kv tile, b(j) - b(n) and per_key * (j - n) are the same for all rows
of the tile, and a(i) + b(n) and per_key * (n - i) belong to what a softmax takes off a row: one
product and one sum a pair, where ALiBi's score as written takes four. All of them are small near
the diagonal, as the whole is, where a(i) and b(j) nearly cancel; with 0 for n they would round.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.expr import ONE, ZERO, Expr
from ..ir.ops import Op
from .fold import affine_in_s, split_terms
from .linear import linear
from .simplify import simplify


@dataclass(frozen=True)
class Added:
    """slope * s + factor * (of_query + of_key) + per_key * (j - i); None for what is not there.

    Nothing reads s; slope, factor and per_key read neither i nor j, of_query no j, of_key no i.
    """

    slope: Expr
    factor: Expr
    of_query: Expr | None
    of_key: Expr | None
    per_key: Expr | None


def added(score: Expr) -> Added | None:
    """A score in this form to whose s something is added, or None."""
    found = affine_in_s(score)
    if found is None or not _same_for_all_pairs(found.slope) or found.offset == ZERO:
        return None
    factor, total = _factored(found.offset)
    terms = split_terms(total)
    of_query, of_key = (None if x == ZERO else x for x in (terms.row, terms.column))
    if terms.mixed == ZERO:
        return Added(found.slope, factor, of_query, of_key, None)
    per_key = _per_key(terms.mixed)
    if per_key is None:
        return None
    return Added(found.slope, factor, of_query, of_key, simplify(factor * per_key))


def _factored(node: Expr) -> tuple[Expr, Expr]:
    """What all pairs are multiplied by, and what of them."""
    if node.op is Op.NEG:
        factor, total = _factored(node.args[0])
        return simplify(-factor), total
    if node.op is Op.MUL:
        for one, other in (node.args, node.args[::-1]):
            if _same_for_all_pairs(one) and not _same_for_all_pairs(other):
                factor, total = _factored(other)
                return simplify(one * factor), total
    if node.op is Op.DIV and _same_for_all_pairs(node.args[1]):
        factor, total = _factored(node.args[0])
        return simplify(factor / node.args[1]), total
    return ONE, node


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

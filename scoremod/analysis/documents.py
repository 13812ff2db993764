"""Conditions that keep tokens within their document, told apart from the rest of a mask.

    doc[b, i] == doc[b, j] and j <= i   ->   j <= i

Packed documents are attended as each would be alone, by what is left. How long they are, only the
values of a table say.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ir.expr import TRUE, Expr, index, make, substitute
from ..ir.ops import Op

_SWAPPED = {"i": index("j"), "j": index("i")}


def within_documents(mask: Expr) -> Expr:
    """Which pairs of one document attend."""
    left = TRUE
    for part in _parts(mask):
        if not _same_document(part):
            left = part if left == TRUE else make(Op.AND, left, part)
    return left


def _parts(mask: Expr) -> Iterator[Expr]:
    """The conditions that have to hold together."""
    if mask.op is not Op.AND:
        yield mask
        return
    for arg in mask.args:
        yield from _parts(arg)


def _same_document(condition: Expr) -> bool:
    """Whether a table says the same of a query's place and of a key's."""
    if condition.op is not Op.EQ:
        return False
    of_one, of_other = condition.args
    alone = len(of_one.names & {"i", "j"}) == 1
    return of_one.op is Op.LOAD and alone and substitute(of_one, _SWAPPED) == of_other

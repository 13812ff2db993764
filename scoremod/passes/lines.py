"""Reads of tables that a row or a column of pairs shares, taken out of an expression.

    doc[b, i] == doc[b, j] and j <= i   ->   row_0 == column_0 and j <= i,
                                             with row_0 = doc[b, i] and column_0 = doc[b, j]

A kernel reads them once per query and once per key, and not once per pair.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.expr import Expr, capture, postorder, rewrite
from ..ir.ops import Op

LINES = {"i": "row", "j": "column"}  # of the index that a read depends on


@dataclass(frozen=True)
class LineRead:
    """A read that depends on i alone, or on j alone, and what stands in its place."""

    read: Expr
    line: str  # row or column
    number: int

    @property
    def name(self) -> str:
        return f"{self.line}_{self.number}"


def line_reads(root: Expr) -> tuple[LineRead, ...]:
    """The outermost reads of this kind, each once."""
    reads = [node for node in postorder(root) if _line(node)]
    inner = {part for node in reads for part in postorder(*node.args)}
    found: list[LineRead] = []
    for node in dict.fromkeys(reads):
        if node not in inner:
            line = _line(node)
            found.append(LineRead(node, line, sum(x.line == line for x in found)))
    return tuple(found)


def _line(node: Expr) -> str:
    """Which line of pairs shares a read; "" for none."""
    indices = node.names & {"i", "j", "s"}
    if node.op is not Op.LOAD or len(indices) != 1:
        return ""
    (name,) = indices
    return LINES.get(str(name), "")


def without_line_reads(root: Expr, reads: tuple[LineRead, ...]) -> Expr:
    """The expression with captures in their place."""
    places = {x.read: capture(x.name, x.read.type) for x in reads}
    return rewrite(root, lambda node: places.get(node, node))

"""What is known of each atom of a mask, in the user's own words."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.expr import Expr


@dataclass(frozen=True)
class Atom:
    """One condition of a mask."""

    text: str
    means: str
    reason: str


def explain_atoms(mask: Expr) -> list[Atom]:
    """(to be written)"""
    return []

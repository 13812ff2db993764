"""What proves each atom of a mask, in the user's own words.

j <= i               half-line       exact, from position alone
doc[i] == doc[j]     table by tile   least, greatest and value bits of doc per tile; ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from ..ir.expr import Expr, postorder
from ..ir.ops import Op, Type
from ..ir.show import show
from .cuts import periods
from .linear import Sum, indices
from .normal import normalise
from .ranges import Pieces, solved
from .summary import names_one_index, reproducible


class Atom(NamedTuple):
    """One condition of a mask: the user's text, what decides it per tile, and why that is sharp."""

    text: str
    means: str
    reason: str


def explain_atoms(mask: Expr) -> list[Atom]:
    """Every condition that the mask is made of, in the order of the text."""
    atoms = list(dict.fromkeys(_atoms(mask)))
    # The parts of `0 <= i - j < w` share one span: those are written out.
    spans = Counter(a.span for a in atoms)
    return [_atom(a, named=spans[a.span] == 1) for a in atoms]


_CONNECTIVES = frozenset((Op.AND, Op.OR, Op.NOT, Op.WHERE, Op.EQ, Op.NE))


def _atoms(e: Expr) -> list[Expr]:
    """The leaves below `and`, `or`, `not` and their like, from left to right."""
    found, stack = [], [e]
    while stack:
        node = stack.pop()
        inner = node.op in _CONNECTIVES and all(a.type is Type.BOOL for a in node.args)
        if inner:
            stack.extend(reversed(node.args))
        else:
            found.append(node)
    return found


def _atom(e: Expr, named: bool) -> Atom:
    text = " ".join(e.span.words.split()) if named and e.span is not None else ""
    found = normalise(e)
    means, reason = next(told for rule in _RULES if (told := rule(found)) is not None)
    return Atom(text or show(e), means, reason)


# -- the rules: the first that fits speaks -------------------------------------------------------

Told = tuple[str, str] | None


def _constant(e: Expr) -> Told:
    return ("constant", f"always {str(e.attr).lower()}") if e.is_const else None


def _scalar(e: Expr) -> Told:
    return ("scalar", "decided once per launch") if not indices(e) else None


def _one_index(e: Expr) -> Told:
    index = names_one_index(e)
    if index is None or not reproducible(e) or not _tables(e):
        return None
    side, rows = ("q", "query") if index == "i" else ("kv", "key")
    return f"one {rows} at a time", f"every or some per {side} tile of {_tables(e)}, so exact"


def _half_line(e: Expr) -> Told:
    keys, queries = (solved(e, x) for x in ("j", "i"))
    if not (_pure(keys) or _pure(queries)):
        return None
    best = keys if _pure(keys) else queries
    count = "half-line" if len(best) == 1 else f"{len(best)} ranges"
    if _pure(keys) and _pure(queries):
        return count, "exact, per query and per key"
    one, other = ("query", "key") if _pure(keys) else ("key", "query")
    return count, f"exact per {one}; per {other}, {_tables(e) or 'it'} is bounded by tile"


def _pure(pieces: Pieces) -> bool:
    return all(p.is_pure for p in pieces)


def _residue(e: Expr) -> Told:
    mod = e.args[0] if e.op is Op.EQ else None
    if mod is None or mod.op is not Op.MOD or names_one_index(mod) or _tables(mod):
        return None
    r = show(mod.args[1])
    hint = f"tiles wider than {r} are always partial: a layout by residue modulo {r} would be exact"
    return "residues", f"one run of residues per tile; {hint}"


def _equal_tables(e: Expr) -> Told:
    if e.op is not Op.EQ or not _by_side(e):
        return None
    what = _tables(e)
    return (
        "table by tile",
        f"least, greatest and value bits of {what} per tile, cut where it changes",
    )


def _ordered_tables(e: Expr) -> Told:
    if e.op not in (Op.LE, Op.LT) or not _by_side(e):
        return None
    kind = "float32 in source order" if e.args[0].type is Type.FLOAT else "exact"
    return "table by tile", f"least and greatest of {_tables(e)} per tile, {kind}"


def _by_side(e: Expr) -> bool:
    """Whether this compares what rows read with what columns read."""
    if e.args[0].type is Type.FLOAT:
        return bool(_tables(e))
    parts = Sum.of(e.args[0]) - Sum.of(e.args[1])
    return bool(_tables(e)) and all(len(indices(t)) <= 1 for t in parts.terms)


def _pair_table(e: Expr) -> Told:
    reads = [n for n in postorder(e) if n.op is Op.LOAD and len(indices(n)) == 2]
    if not reads:
        return None
    names = ", ".join(sorted({n.attr for n in reads}))
    if _tables(e):
        return "types by tile", f"what a tile holds of {_tables(e)}, as bits, against {names}"
    return "table by pair", f"{names} counted over the box of entries that a tile reads"


def _bits(e: Expr) -> Told:
    scattering = (Op.BITAND, Op.BITOR, Op.BITXOR)
    if not any(n.op in scattering for n in postorder(e)):
        return None
    return "bits", "exact where a piece of a tile holds one value; other tiles are evaluated"


def _runs(e: Expr) -> Told:
    lengths = {show(n.args[1]) for n in postorder(e) if n.op in (Op.FLOORDIV, Op.MOD)}
    if not lengths and not any(periods(e, x) for x in "ij"):
        return None
    return "runs", f"tiles are cut at runs of {', '.join(sorted(lengths))}, bounds on each piece"


def _floats(e: Expr) -> Told:
    if not any(n.type is Type.FLOAT for n in postorder(e)):
        return None
    return "bounds", "float32 bounds in source order; tiles that they leave open are evaluated"


def _bounds(_: Expr) -> Told:
    return "bounds", "least and greatest value per tile; tiles that they leave open are evaluated"


def _tables(e: Expr) -> str:
    """The tables that are read by one index, as words."""
    reads = (n for n in postorder(e) if n.op is Op.LOAD and len(indices(n)) <= 1)
    return ", ".join(dict.fromkeys(n.attr for n in reads))


_RULES: tuple[Callable[[Expr], Told], ...] = (
    _constant,
    _scalar,
    _one_index,
    _half_line,
    _residue,
    _pair_table,
    _equal_tables,
    _ordered_tables,
    _bits,
    _runs,
    _floats,
    _bounds,
)

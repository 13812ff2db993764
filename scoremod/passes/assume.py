"""Guess element types that only a call would decide, for output made without a call.

doc[i] == doc[j]   ->   doc: i32      m[b, j] and j <= i   ->   m: bool      t[h] * s -> f32
"""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.expr import Expr, postorder, resolve
from ..ir.ops import OPS, Op, Rule, Type

# Operators that hand a demand for ints on to their operands.
_PASS_ON = frozenset((Op.ADD, Op.SUB, Op.MUL, Op.NEG, Op.ABS, Op.MIN, Op.MAX))
_INTEGER = frozenset((Op.FLOORDIV, Op.MOD, Op.SHL, Op.SHR, Op.ILOG2, Op.INVERT))
_BITS = frozenset((Op.BITAND, Op.BITOR, Op.BITXOR, Op.INVERT))


def assume(roots: Iterable[Expr]) -> dict[str, str]:
    """The assumed element (`bool`, `i32` or `f32`) of each capture whose type is open."""
    roots = tuple(roots)
    known: dict[str, str] = {}
    while True:
        # What is compared with an int is one, so each int found may settle others.
        guesses = _guess(tuple(resolve(r, dict.fromkeys(known, Type.INT)) for r in roots))
        fresh = {name: "i32" for name, element in guesses.items() if element == "i32"}
        if not fresh:
            return {**guesses, **known}
        known |= fresh


def _guess(roots: tuple[Expr, ...]) -> dict[str, str]:
    demands: dict[str, set[Type]] = {}
    for node in postorder(*roots):
        if node.op in (Op.CAPTURE, Op.LOAD) and node.type is Type.ANY:
            demands.setdefault(node.attr, set())
    wanted: dict[int, set[Type]] = {id(r): {Type.BOOL} for r in roots if r.type is Type.ANY}
    for node in reversed(list(postorder(*roots))):
        own = wanted.get(id(node), set())
        if node.op in (Op.CAPTURE, Op.LOAD) and node.type is Type.ANY:
            demands[node.attr] |= own or {Type.FLOAT}
        for position, arg in enumerate(node.args):
            wanted.setdefault(id(arg), set()).update(_demand(node, position, own))
    return {name: _choose(types) for name, types in demands.items()}


def _choose(types: set[Type]) -> str:
    if types == {Type.BOOL}:
        return "bool"
    return "i32" if Type.INT in types else "f32"


def _demand(node: Expr, position: int, own: set[Type]) -> set[Type]:
    """What a node asks of one operand."""
    rule = OPS[node.op].rule
    if node.op is Op.LOAD or node.op in _INTEGER - {Op.INVERT}:
        return {Type.INT}
    if rule is Rule.LOGIC or (node.op is Op.WHERE and position == 0):
        return {Type.BOOL}
    if node.op in _BITS:
        bools = any(a.type is Type.BOOL for a in node.args)
        return {Type.BOOL} if bools or own == {Type.BOOL} else {Type.INT}
    if rule is Rule.COMPARE:
        other = node.args[1 - position]
        return {Type.INT} if other.type is Type.INT or _same_capture(node) else {Type.FLOAT}
    if node.op in _PASS_ON and Type.INT in own:
        return {Type.INT}
    if node.op is Op.WHERE:
        return own
    return {Type.FLOAT}


def _same_capture(node: Expr) -> bool:
    """Whether one capture is compared with itself: doc[i] == doc[j]."""
    left, right = node.args
    open_ = [a for a in (left, right) if a.op in (Op.CAPTURE, Op.LOAD) and a.type is Type.ANY]
    return len(open_) == 2 and left.attr == right.attr

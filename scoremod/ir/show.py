"""An expression as mini-language text that reads back to the same expression.

    make(Op.SUB, s, slopes[h] * float(i - j))   ->   s - slopes[h] * (i - j)

Conversions that promotion would insert again are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .expr import Expr, postorder
from .ops import OPS, Op, Rule, Type

# How tightly an operator binds, as in Python.
TERNARY, OR, AND, NOT, COMPARE, BITOR, BITXOR, BITAND, SHIFT, SUM, PRODUCT, UNARY, POWER, ATOM = (
    range(14)
)

BINDING: dict[Op, int] = {
    Op.OR: OR,
    Op.AND: AND,
    Op.LT: COMPARE,
    Op.LE: COMPARE,
    Op.EQ: COMPARE,
    Op.NE: COMPARE,
    Op.BITOR: BITOR,
    Op.BITXOR: BITXOR,
    Op.BITAND: BITAND,
    Op.SHL: SHIFT,
    Op.SHR: SHIFT,
    Op.ADD: SUM,
    Op.SUB: SUM,
    Op.MUL: PRODUCT,
    Op.DIV: PRODUCT,
    Op.FLOORDIV: PRODUCT,
    Op.MOD: PRODUCT,
    Op.POW: POWER,
}
PREFIX: dict[Op, tuple[str, int]] = {
    Op.NOT: ("not ", NOT),
    Op.NEG: ("-", UNARY),
    Op.INVERT: ("~", UNARY),
}
# Rules under which a conversion is always implied, and those where another operand implies it.
_ALWAYS = {Rule.FLOAT, Rule.POW, Rule.INTEGER}
_ANCHORED = {Rule.ARITH, Rule.COMPARE, Rule.WHERE, Rule.BITS}

Text = tuple[str, int]  # the text, and how tightly its outermost operator binds


def show(root: Expr, lets: Mapping[Expr, str] | None = None) -> str:
    """The text of `root`; expressions in `lets` are written as the given names."""
    texts: dict[int, Text] = {}
    for node in postorder(root):
        name = lets.get(node) if lets and node is not root else None
        texts[id(node)] = (name, ATOM) if name is not None else _text(node, texts)
    return texts[id(root)][0]


def literal(value: bool | int | float) -> str:
    """A number as text."""
    return repr(value)


def _text(node: Expr, texts: Mapping[int, Text]) -> Text:
    if node.op in _LEAVES:
        return _LEAVES[node.op](node)
    if node.op is Op.LOAD:
        return f"{node.attr}[{', '.join(texts[id(a)][0] for a in node.args)}]", ATOM
    args = [texts[id(a)] for a in _implied(node)]
    if node.op in PREFIX:
        symbol, binding = PREFIX[node.op]
        return symbol + _wrap(args[0], binding), binding
    if node.op in BINDING:
        return _infix(node.op, args)
    return f"{node.op.value}({', '.join(text for text, _ in args)})", ATOM


def _const(node: Expr) -> Text:
    text = literal(node.attr)
    return text, UNARY if text.startswith("-") else ATOM


_LEAVES: dict[Op, Callable[[Expr], Text]] = {
    Op.CONST: _const,
    Op.INDEX: lambda node: (node.attr, ATOM),
    Op.CAPTURE: lambda node: (node.attr, ATOM),
    Op.SIZE: lambda node: (f"size({node.attr[0]}, {node.attr[1]})", ATOM),
}


def _infix(op: Op, args: list[Text]) -> Text:
    binding = BINDING[op]
    # `**` groups to the right, comparisons would chain, everything else groups to the left.
    left = binding + (op is Op.POW or binding == COMPARE)
    right = UNARY if op is Op.POW else binding + 1
    return f"{_wrap(args[0], left)} {op.value} {_wrap(args[1], right)}", binding


def _wrap(text: Text, binding: int) -> str:
    return text[0] if text[1] >= binding else f"({text[0]})"


def _implied(node: Expr) -> tuple[Expr, ...]:
    """The operands, without the conversions that reading the text would insert again."""
    rule = OPS[node.op].rule
    if rule in _ALWAYS:
        return tuple(_inner(a) for a in node.args)
    if rule not in _ANCHORED:
        return node.args
    operands = node.args[1:] if rule is Rule.WHERE else node.args
    shown = [_inner(a) for a in operands]
    if not _still_promotes(node, operands, shown):
        shown[0] = operands[0]
    return (*node.args[: len(node.args) - len(shown)], *shown)


def _still_promotes(node: Expr, operands: tuple[Expr, ...], shown: list[Expr]) -> bool:
    """Whether the shown operands promote to the type that the operands have."""
    types = {a.type for a in shown}
    if operands[0].type in types:
        return True
    # Sums of bools, and < between them, are ints by themselves.
    bools = OPS[node.op].rule is Rule.ARITH or node.op in (Op.LT, Op.LE)
    return bools and operands[0].type is Type.INT and types == {Type.BOOL}


def _inner(arg: Expr) -> Expr:
    implicit = arg.op is Op.FLOAT or (arg.op is Op.INT and arg.args[0].type is Type.BOOL)
    return arg.args[0] if implicit else arg

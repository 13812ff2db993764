"""The CPU backend: tiles of PyTorch operations, rendered and run as ordinary Python.

Every int is int64 and every float the plan's float type, so promotion needs no care here.
"""

from __future__ import annotations

import hashlib
import linecache
import math
from collections.abc import Sequence
from typing import Any

from ..emit import Call, Infix, Prefix, Spelling, Text, emit
from ..ir.expr import Expr
from ..ir.ops import Op, Type
from ..ir.show import ATOM, BITAND, BITOR, COMPARE, PRODUCT, SUM, UNARY
from ..plan import INDICES, CpuPlan, DeviceFunction, Param
from .base import Backend


def _const(node: Expr, args: Sequence[Text]) -> Text:
    value = node.attr
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")', ATOM
    return repr(value), UNARY if repr(value).startswith("-") else ATOM


def _name(node: Expr, args: Sequence[Text]) -> Text:
    return node.attr, ATOM


def _size(node: Expr, args: Sequence[Text]) -> Text:
    return f"{node.attr[0]}.shape[{node.attr[1]}]", ATOM


def _load(node: Expr, args: Sequence[Text]) -> Text:
    return f"load({', '.join([node.attr, *(text for text, _ in args)])})", ATOM


def _cast(node: Expr, args: Sequence[Text]) -> Text:
    if node.op is Op.INT and node.args[0].type is Type.FLOAT:
        return f"to_int(torch.trunc(as_float({args[0][0]})))", ATOM
    name = {Op.FLOAT: "as_float", Op.INT: "as_int", Op.BOOL: "as_bool"}[node.op]
    return f"{name}({args[0][0]})", ATOM


def _rounding(function: str) -> Any:
    return lambda node, args: (f"to_int({function}({args[0][0]}))", ATOM)


def _function(function: str) -> Any:
    """A function of torch, which takes no literal."""

    def spell(node: Expr, args: Sequence[Text]) -> Text:
        operand = f"as_float({args[0][0]})" if node.args[0].is_const else args[0][0]
        return f"{function}({operand})", ATOM

    return spell


def _power(node: Expr, args: Sequence[Text]) -> Text:
    base, exponent = args
    return f"power({base[0]}, {exponent[0]})", ATOM


SPELLING: Spelling = {
    Op.CONST: _const,
    Op.INDEX: _name,
    Op.CAPTURE: _name,
    Op.LOAD: _load,
    Op.SIZE: _size,
    Op.ADD: Infix("+", SUM),
    Op.SUB: Infix("-", SUM),
    Op.MUL: Infix("*", PRODUCT),
    Op.DIV: Call("divide"),
    Op.FLOORDIV: Call("floor_divide"),
    Op.MOD: Call("remainder"),
    Op.POW: _power,
    Op.NEG: Prefix("-", UNARY),
    Op.ABS: Call("abs"),
    Op.MIN: Call("minimum"),
    Op.MAX: Call("maximum"),
    Op.BITAND: Infix("&", BITAND),
    Op.BITOR: Infix("|", BITOR),
    Op.BITXOR: Call("bitwise_xor"),
    Op.INVERT: Prefix("~", UNARY),
    Op.SHL: Call("shift_left"),
    Op.SHR: Call("shift_right"),
    Op.ILOG2: Call("ilog2"),
    Op.LT: Infix("<", COMPARE),
    Op.LE: Infix("<=", COMPARE),
    Op.EQ: Infix("==", COMPARE),
    Op.NE: Infix("!=", COMPARE),
    Op.AND: Infix("&", BITAND),
    Op.OR: Infix("|", BITOR),
    Op.NOT: Call("logical_not"),
    Op.WHERE: Call("where"),
    Op.FLOAT: _cast,
    Op.INT: _cast,
    Op.BOOL: _cast,
    Op.FLOOR: _rounding("torch.floor"),
    Op.CEIL: _rounding("torch.ceil"),
    Op.ROUND: _rounding("torch.round"),
    Op.EXP: _function("torch.exp"),
    Op.EXP2: _function("torch.exp2"),
    Op.EXPM1: _function("torch.expm1"),
    Op.LOG: _function("torch.log"),
    Op.LOG2: _function("torch.log2"),
    Op.LOG1P: _function("torch.log1p"),
    Op.SQRT: _function("torch.sqrt"),
    Op.RSQRT: _function("torch.rsqrt"),
    Op.TANH: _function("torch.tanh"),
    Op.SIGMOID: _function("torch.sigmoid"),
    Op.SOFTPLUS: _function("softplus"),
    Op.ERF: _function("torch.erf"),
    Op.SIN: _function("torch.sin"),
    Op.COS: _function("torch.cos"),
}


def define(function: DeviceFunction, plan: CpuPlan) -> str:
    """The user's score or mask as a Python function of tensors."""
    params = ", ".join((*INDICES, *(p.name for p in function.params)))
    body = [f"    {line}" for line in emit(function.body, SPELLING)]
    return "\n".join([f"def {function.name}({params}):", f'    """{function.doc}"""', *body])


def compile_text(text: str) -> dict[str, Any]:
    """Run rendered text as a module, and give its names."""
    # A path from the digest lets tracebacks and debuggers show the text.
    file = f"<scoremod cpu {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"__name__": file}
    exec(compile(text, file, "exec"), scope)
    return scope


def parameter_names(params: Sequence[Param]) -> list[str]:
    """Each capture is one argument."""
    return [p.name for p in params]


CPU = Backend("cpu", "cpu", define, parameter_names, compile_text)

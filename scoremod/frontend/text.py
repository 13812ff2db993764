"""The mini-language to IR: the same walk as for Python functions, over lark's parse tree.

mask 0 <= i - j and i - j < w   ->   (0 <= i - j) and (i - j < w)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lark import Token, Tree

from ..errors import LanguageError, ReservedName, Span, TypeMismatch
from ..ir.capture import MISSING, Capture, Kind
from ..ir.expr import Expr, const, make, require_bool
from ..ir.ops import Op, Type
from . import names
from .names import Captures, Lowered, Table
from .source import TextSource, read_text_source

MAX_DIGITS = 1000  # of an integer; Python itself refuses to read some thousands
_CONST_HINT = "declare it as a const: const n: int = 8; it is then compiled in"

Value = Expr | Table
Node = Any  # Tree[Any] | Token
Environment = dict[str, Value]


def lower(source: TextSource, consts: Mapping[str, Any]) -> Lowered:
    """Read a text; `consts` overrides values of const parameters."""
    captures = Captures(consts)
    reader = _Reader(source, captures)
    (variant,) = source.tree.find_data("variant")
    _, parameters, block = variant.children
    environment = reader.parameters(parameters)
    try:
        reader.block(block, environment)
    except RecursionError:
        raise LanguageError(
            "this is nested too deeply", span=source.span(block),
            hint="give parts names of their own with `let`",
        ) from None  # fmt: skip
    if reader.score is None and reader.mask is None:
        raise LanguageError(
            "a variant needs a score or a mask", span=source.span(variant),
            hint="write e.g. `mask j <= i`",
        )  # fmt: skip
    return Lowered(reader.score, reader.mask, captures.finish(), tuple(captures.consts.items()))


def parse_expression(text: str, types: Mapping[str, Type] | None = None) -> Expr:
    """One expression; `types` gives the captures it may read.

    >>> parse_expression("i - j < w", {"w": Type.INT}).type
    bool
    """
    source = read_text_source(text, "<expression>", start="expression")
    captures = Captures({})
    environment: Environment = {}
    elements = {Type.BOOL: "bool", Type.INT: "int", Type.FLOAT: "float", Type.ANY: None}
    for name, type_ in (types or {}).items():
        # Either kind fits: what is indexed is a table.
        found = Capture(name, Kind.TENSOR, elements[type_])
        captures.uses[name] = names.Uses(found)
        environment[name] = Table(name, (), None)
    reader = _Reader(source, captures)
    return reader.expr(reader.value(source.tree, environment), source.tree)


@dataclass
class _Reader:
    source: TextSource
    captures: Captures
    score: Expr | None = None
    mask: Expr | None = None
    steps: int = 0

    def span(self, node: Node) -> Span:
        return self.source.span(node)

    # -- parameters

    def parameters(self, node: Node | None) -> Environment:
        environment: Environment = {}
        for parameter in node.children if node is not None else ():
            environment[str(parameter.children[1])] = self.parameter(parameter)
        return environment

    def parameter(self, node: Node) -> Value:
        is_const, token, declared, default = node.children
        name, span = str(token), self.span(token)
        value = MISSING if default is None else self.default(default)
        if is_const is not None:
            return self.const_parameter(name, declared, value, span)
        found = Capture(name, Kind.SCALAR, span=span)
        if declared is not None:
            element, *dims = declared.children
            is_tensor = declared.data == "tensor_type"
            found = names.declared(
                name,
                str(element),
                tuple(_dim(d) for d in dims if d) if is_tensor else None,
                self.span(declared),
            )
            found = replace(found, span=span)
        at = span if default is None else self.span(default)
        self.captures.declare(names.with_default(found, value, at))
        return Table(name, (), span)

    def const_parameter(self, name: str, declared: Any, value: Any, span: Span) -> Expr:
        names.check_name(name, span)
        value = self.captures.given.get(name, value)
        if value is MISSING:
            raise LanguageError(
                f"the const `{name}` needs a value", span=span, hint=f"write const {name}: int = 8"
            )
        if declared is not None:
            element = str(declared.children[0])
            dims = None if declared.data == "scalar_type" else ()
            found = names.declared(name, element, dims, self.span(declared))
            value = names.with_default(found, value, span).default
        return self.captures.const(name, value, span)

    def default(self, node: Node) -> bool | int | float:
        if node.data == "negative_default":
            return -self.default(node.children[0])
        value = self.expr(_EXPRESSIONS[node.data](self, node, {}), node)
        return value.attr  # type: ignore[no-any-return]

    # -- statements

    def block(self, node: Node, environment: Environment) -> None:
        for statement in node.children:
            _STATEMENTS[statement.data](self, statement, environment)

    def assign(self, node: Node, environment: Environment) -> None:
        target, value = node.children
        name = self.target(target.children[0])
        environment[name] = self.value(value, environment)

    def target(self, token: Token) -> str:
        """A name that may be assigned."""
        name = str(token)
        if name in names.RESERVED or name in names.NUMBERS:
            what = names.RESERVED.get(name, "a number")
            raise ReservedName(
                f"`{name}` is reserved: it is {what}", span=self.span(token),
                hint="give it another name",
            )  # fmt: skip
        return name

    def for_loop(self, node: Node, environment: Environment) -> None:
        target, arguments, body = node.children
        name = self.target(target)
        bounds = [self.operand(a, environment) for a in arguments.children]
        for value in names.loop_bounds(bounds, self.span(arguments), _CONST_HINT):
            self.steps += 1
            if self.steps > names.MAX_LOOP:
                raise names.too_many_steps(self.span(node))
            environment[name] = const(value, self.span(target))
            self.block(body, environment)

    def set_score(self, node: Node, environment: Environment) -> None:
        value = self.operand(node.children[0], environment)
        if self.score is not None:
            raise LanguageError(
                "a variant has one score, and this is another", span=self.span(node),
                hint="name the first with `let` and use it in the second",
            )  # fmt: skip
        self.score = names.check_score(value, self.span(node), can_use_masks="`mask`")

    def set_mask(self, node: Node, environment: Environment) -> None:
        value = self.operand(node.children[0], environment)
        if self.mask is not None:
            raise LanguageError(
                "a variant has one mask, and this is another", span=self.span(node),
                hint="join them with `and`",
            )  # fmt: skip
        self.mask = names.check_mask(value, self.span(node), can_use_scores="`score`")

    # -- expressions

    def value(self, node: Node, environment: Environment) -> Value:
        read: Callable[[_Reader, Any, Environment], Value] = _EXPRESSIONS[node.data]
        found: Value = read(self, node, environment)
        return found

    def expr(self, value: Value, node: Node) -> Expr:
        if isinstance(value, Expr):
            return value
        return self.captures.load(value) if value.indices else self.captures.scalar(value)

    def operand(self, node: Node, environment: Environment) -> Expr:
        return self.expr(self.value(node, environment), node)

    def name(self, node: Node, environment: Environment) -> Value:
        name, span = str(node.children[0]), self.span(node)
        if name in environment:
            return names.at(environment[name], span)
        if name in names.RESERVED:
            return names.reserved(name, span)
        if name in names.CONSTANTS:
            return const(names.CONSTANTS[name], span)
        known = (*environment, *names.RESERVED)
        hint = f"add it to the parameters, or name a value: let {name} = ..."
        raise names.unknown(name, span, known, hint)

    def integer(self, node: Node, environment: Environment) -> Expr:
        text, span = str(node.children[0]).lower(), self.span(node)
        if len(text) > MAX_DIGITS:
            raise TypeMismatch(
                f"an integer of {len(text)} digits does not fit in 64 bits", span=span,
                hint="write it as a float, e.g. 1e30",
            )  # fmt: skip
        return names.literal(int(text, 0 if text[:2] in ("0x", "0b") else 10), span)

    def real(self, node: Node, environment: Environment) -> Expr:
        return const(float(node.children[0]), self.span(node))

    def binary(self, node: Node, environment: Environment) -> Expr:
        left, symbol, right = node.children
        return names.binary(
            str(symbol),
            self.operand(left, environment),
            self.operand(right, environment),
            self.span(node),
        )

    def prefix(self, node: Node, environment: Environment) -> Expr:
        symbol, operand = node.children
        value = self.operand(operand, environment)
        if symbol == "+":
            return value
        return make(names.PREFIX[str(symbol)], value, span=self.span(node))

    def compare(self, node: Node, environment: Environment) -> Expr:
        operands = [self.operand(n, environment) for n in node.children[::2]]
        symbols = [str(t) for t in node.children[1::2]]
        return names.compare(symbols, operands, [self.span(node)] * len(symbols))

    def conditional(self, node: Node, environment: Environment) -> Expr:
        condition = self.operand(node.children[1], environment)
        known = names.fold_const(condition)
        if known is not None:
            return self.operand(node.children[0 if known else 2], environment)
        require_bool(condition, "`if`", self.span(node.children[1]))
        yes, no = (self.operand(n, environment) for n in node.children[::2])
        return make(Op.WHERE, condition, yes, no, span=self.span(node))

    def subscript(self, node: Node, environment: Environment) -> Value:
        target, arguments = node.children
        table = self.value(target, environment)
        if not isinstance(table, Table):
            raise TypeMismatch("only a captured tensor can be indexed", span=self.span(target))
        indices = list(table.indices)
        for part in arguments.children:
            indices.append(self.one_index(table, len(indices), part, environment))
        return Table(table.name, tuple(indices), self.span(node))

    def one_index(self, table: Table, axis: int, node: Node, environment: Environment) -> Expr:
        position = self.operand(node, environment)
        if _is_negative_literal(node):
            span = self.span(node)
            return make(Op.ADD, self.captures.size(table.name, axis, span), position, span=span)
        return position

    def call(self, node: Node, environment: Environment) -> Expr:
        token, arguments = node.children
        name, parts = str(token), list(arguments.children) if arguments is not None else []
        if name == "size":
            return self.size(node, parts, environment)
        if name not in names.CALLS:
            raise names.unknown_function(name, self.span(node))
        return names.call(name, [self.operand(a, environment) for a in parts], self.span(node))

    def size(self, node: Node, parts: list[Node], environment: Environment) -> Expr:
        table = self.value(parts[0], environment) if parts else None
        if not isinstance(table, Table) or table.indices or len(parts) != 2:
            raise TypeMismatch("write size(table, dimension)", span=self.span(node))
        axis = names.constant_int(
            self.operand(parts[1], environment), self.span(parts[1]), "the dimension of size()"
        )
        return self.captures.size(table.name, axis, self.span(node))


def _dim(token: Token) -> str | int | None:
    if token.type == "INTEGER":
        return int(token[:MAX_DIGITS]) if token.isdecimal() else int(token[:MAX_DIGITS], 0)
    return None if token == "_" else str(token)


def _is_negative_literal(node: Node) -> bool:
    return (
        isinstance(node, Tree)
        and node.data == "prefix"
        and node.children[0] == "-"
        and isinstance(node.children[1], Tree)
        and node.children[1].data == "integer"
    )


def _infix(symbol: str) -> Callable[[_Reader, Any, Environment], Expr]:
    """A rule whose operator is fixed by the grammar."""

    def read(reader: _Reader, node: Tree[Any], environment: Environment) -> Expr:
        left, right = (reader.operand(n, environment) for n in node.children)
        return names.binary(symbol, left, right, reader.span(node))

    return read


def _logic(op: Op) -> Callable[[_Reader, Any, Environment], Expr]:
    def read(reader: _Reader, node: Tree[Any], environment: Environment) -> Expr:
        operands = [reader.operand(n, environment) for n in node.children]
        return make(op, *operands, span=reader.span(node))

    return read


def _literal(value: bool) -> Callable[[_Reader, Any, Environment], Expr]:
    return lambda reader, node, environment: const(value, reader.span(node))


_STATEMENTS: dict[str, Callable[[_Reader, Any, Environment], None]] = {
    "assign": _Reader.assign,
    "for_loop": _Reader.for_loop,
    "score": _Reader.set_score,
    "mask": _Reader.set_mask,
}
_EXPRESSIONS: dict[str, Callable[[_Reader, Any, Environment], Value]] = {
    "name": _Reader.name,
    "integer": _Reader.integer,
    "real": _Reader.real,
    "true": _literal(True),
    "false": _literal(False),
    "conditional": _Reader.conditional,
    "or_": _logic(Op.OR),
    "and_": _logic(Op.AND),
    "not_": _logic(Op.NOT),
    "compare": _Reader.compare,
    "bitor": _infix("|"),
    "bitxor": _infix("^"),
    "bitand": _infix("&"),
    "power": _infix("**"),
    "binary": _Reader.binary,
    "prefix": _Reader.prefix,
    "subscript": _Reader.subscript,
    "call": _Reader.call,
}

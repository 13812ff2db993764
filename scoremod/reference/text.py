"""The walker over the mini-language's tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lark

from .. import language
from ..errors import ReservedName, TypeMismatch, UnknownName, UnsupportedPython
from ..frontend.source import TextSource
from .call import RESERVED, Call, Located, View
from .captures import MISSING, Declared, Table, declared_as, parameter_value
from .operations import BINARY, CONSTANTS, FUNCTIONS, UNARY, comparison, invoke, logical
from .things import Thing, item_of, range_of, select, value_of
from .values import Value, bools

Tree = lark.Tree[Any]


def walk_text(source: TextSource, view: View) -> dict[str, Value]:
    """The values of the statements `score` and `mask`, those that are there."""
    (variant,) = source.tree.find_data("variant")
    _, parameters, block = variant.children
    reader = _TextReader(source, view)
    for node in parameters.children if parameters else ():
        with Located(source.span(node)):
            reader.declare(*node.children)
    reader.block(block)
    return reader.said


class _TextReader:
    """Reads one variant of the mini-language."""

    def __init__(self, source: TextSource, view: View) -> None:
        self.source, self.view = source, view
        self.names: dict[str, Thing] = {}
        self.said: dict[str, Value] = {}

    @property
    def call(self) -> Call:
        return self.view.call

    def declare(self, const: Any, name: Any, declared: Tree | None, default: Tree | None) -> None:
        """A parameter."""
        if str(name) in RESERVED:
            raise ReservedName(f"`{name}` is reserved")
        number: Any = MISSING if default is None else _text_number(default)
        if const is not None:
            number = language.Const(number)
        kind = Declared()
        if declared is not None:
            word, *dims = (str(x) for x in declared.children if x is not None)
            kind = declared_as(word, dims if declared.data == "tensor_type" else None)
        self.names[str(name)] = parameter_value(str(name), kind, number, self.view)

    # -- statements

    def block(self, node: Tree) -> None:
        for statement in node.children:
            with Located(self.source.span(statement)):
                TEXT_STATEMENTS[statement.data](self, *statement.children)

    def assign(self, target: Tree, expression: Tree) -> None:
        self.names[str(target.children[0])] = self.read(expression)

    def loop(self, name: Any, bounds: Tree, body: Tree) -> None:
        for step in range_of([self.read(b) for b in bounds.children], self.call):
            self.names[str(name)] = step
            self.block(body)

    def say(self, what: str, expression: Tree) -> None:
        if what in self.said:
            raise UnsupportedPython(f"a variant has one {what}")
        self.said[what] = self.number(expression)

    # -- expressions

    def read(self, node: Tree) -> Thing:
        with Located(self.source.span(node)):
            return TEXT_EXPRESSIONS[node.data](self, *node.children)

    def number(self, node: Tree) -> Value:
        thing = self.read(node)
        with Located(self.source.span(node)):
            return value_of(thing)

    def condition(self, node: Tree) -> Value:
        value = self.number(node)
        with Located(self.source.span(node)):
            return bools("if", value)[0]

    def lookup(self, name: Any) -> Thing:
        word = str(name)
        if word in self.names:
            return self.names[word]
        if word in RESERVED:
            return self.view.reserved(word)
        if word in CONSTANTS:
            return self.call.literal(CONSTANTS[word])
        raise UnknownName(f"`{word}` is not known here")

    def conditional(self, yes: Tree, test: Tree, no: Tree) -> Thing:
        condition = self.condition(test)
        if condition.known:
            return self.read(yes if condition.data.item() else no)
        return select(condition, self.read(yes), self.read(no))

    def compare(self, *parts: Any) -> Value:
        return comparison([str(x) for x in parts[1::2]], [self.number(x) for x in parts[::2]])

    def subscript(self, table: Tree, positions: Tree) -> Thing:
        thing = self.read(table)
        if not isinstance(thing, Table):
            raise TypeMismatch("only a captured tensor can be indexed")
        for part in positions.children:
            thing = thing.at(self.number(part), from_end=_is_negative_integer(part))
        return thing

    def called(self, name: Any, arguments: Tree | None) -> Thing:
        args = [self.read(a) for a in arguments.children] if arguments else []
        if name == "size" and len(args) == 2 and isinstance(args[0], Table):
            return value_of(item_of(args[0].sizes, args[1]))
        if str(name) not in FUNCTIONS:
            raise UnknownName(f"`{name}` is not a function of the language")
        return invoke(str(name), FUNCTIONS[str(name)], *map(value_of, args))

    def binary(self, left: Tree, symbol: Any, right: Tree) -> Value:
        return BINARY[str(symbol)](self.number(left), self.number(right))

    def prefix(self, symbol: Any, operand: Tree) -> Value:
        return UNARY[str(symbol)](self.number(operand))


def _infix(symbol: str) -> Callable[[_TextReader, Tree, Tree], Value]:
    return lambda reader, left, right: reader.binary(left, symbol, right)


def _joined(symbol: str) -> Callable[[_TextReader, Tree, Tree], Value]:
    return lambda reader, left, right: logical(symbol, reader.number(left), reader.number(right))


TEXT_STATEMENTS: dict[str, Callable[..., None]] = {
    "assign": _TextReader.assign,
    "for_loop": _TextReader.loop,
    "score": lambda reader, expression: reader.say("score", expression),
    "mask": lambda reader, expression: reader.say("mask", expression),
}
TEXT_EXPRESSIONS: dict[str, Callable[..., Thing]] = {
    "integer": lambda reader, token: reader.call.literal(_integer(token)),
    "real": lambda reader, token: reader.call.literal(float(token)),
    "true": lambda reader: reader.call.literal(True),
    "false": lambda reader: reader.call.literal(False),
    "name": _TextReader.lookup,
    "binary": _TextReader.binary,
    "bitand": _infix("&"),
    "bitor": _infix("|"),
    "bitxor": _infix("^"),
    "power": lambda reader, base, *rest: reader.binary(base, "**", rest[-1]),
    "prefix": _TextReader.prefix,
    "not_": lambda reader, operand: reader.prefix("not", operand),
    "and_": _joined("and"),
    "or_": _joined("or"),
    "compare": _TextReader.compare,
    "conditional": _TextReader.conditional,
    "subscript": _TextReader.subscript,
    "call": _TextReader.called,
}


def _integer(token: Any) -> int:
    """42, 0x2a or 0b101010."""
    text = str(token)
    return int(text, 0) if text[:2].lower() in ("0x", "0b") else int(text)


def _text_number(node: Tree) -> bool | int | float:
    """The default of a parameter."""
    if node.data == "negative_default":
        (number,) = (child for child in node.children if isinstance(child, lark.Tree))
        return -_text_number(number)
    if node.data in ("true", "false"):
        return node.data == "true"
    (token,) = node.children
    return _integer(token) if node.data == "integer" else float(str(token))


def _is_negative_integer(node: Tree) -> bool:
    if node.data != "prefix":
        return False
    symbol, operand = node.children
    return bool(symbol == "-" and operand.data == "integer")

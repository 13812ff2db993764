"""What a name may stand for besides a value, and what is done with it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import TypeMismatch, UnknownName, UnsupportedPython
from ..ir.capture import FreeVariable
from .call import Call
from .captures import Table
from .operations import either
from .values import Kind, Value

if TYPE_CHECKING:
    from .python import PythonReader


@dataclass(frozen=True, eq=False)
class Opaque:
    """A Python object that is no number: a module, a function, `self`."""

    value: Any
    found: FreeVariable


@dataclass(frozen=True, eq=False)
class Local:
    """A function defined in the body."""

    node: ast.FunctionDef | ast.Lambda
    parameters: tuple[inspect.Parameter, ...]
    scope: PythonReader


@dataclass(frozen=True, eq=False)
class Unset:
    """A name that has no value on some path."""


Thing = Value | Table | tuple[Any, ...] | Opaque | Local | Unset


def value_of(thing: Thing) -> Value:
    """A thing as a number."""
    if isinstance(thing, Value):
        return thing
    if isinstance(thing, Table):
        return thing.value()
    if isinstance(thing, Unset):
        raise UnknownName("this name is not assigned on every path", hint="assign it before the if")
    what = "a tuple" if isinstance(thing, tuple) else "a Python object"
    raise TypeMismatch(f"expected a number, but this is {what}")


def select(condition: Value, yes: Thing, no: Thing) -> Thing:
    """`yes if condition else no`, element by element; tuples position by position."""
    if yes is no:
        return yes
    if isinstance(yes, tuple) and isinstance(no, tuple) and len(yes) == len(no):
        return tuple(select(condition, a, b) for a, b in zip(yes, no, strict=True))
    return either(condition, value_of(yes), value_of(no))


def _constant_int(thing: Thing, what: str) -> int:
    value = value_of(thing)
    if not value.known or value.kind is Kind.FLOAT:
        raise UnsupportedPython(f"{what} must be a literal or const int")
    return int(value.data.item())


def range_of(bounds: Sequence[Thing], call: Call) -> list[Value]:
    """The steps of a constant loop."""
    numbers = [_constant_int(b, "a bound of range()") for b in bounds]
    if not 1 <= len(numbers) <= 3 or numbers[2:] == [0]:
        raise TypeMismatch("range() takes one to three bounds")
    return [call.literal(n) for n in range(*numbers)]


def item_of(thing: tuple[Any, ...], position: Thing) -> Any:
    k = _constant_int(position, "an index of a tuple")
    if not -len(thing) <= k < len(thing):
        raise TypeMismatch(f"the tuple has {len(thing)} elements")
    return thing[k]

"""What a variant knows of a captured value: its name, type, dimensions and default.

slopes: "f32[H]"     ->  Capture("slopes", kind=TENSOR, element="f32", dims=("H",))
window: int = 4096   ->  Capture("window", kind=SCALAR, element="int", default=4096)
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import Span
from .ops import Type

# The elements a declaration may name, with the type that the language gives them.
ELEMENTS: dict[str, Type] = {
    "bool": Type.BOOL,
    "int": Type.INT,
    "i8": Type.INT,
    "u8": Type.INT,
    "i16": Type.INT,
    "i32": Type.INT,
    "i64": Type.INT,
    "float": Type.FLOAT,
    "f16": Type.FLOAT,
    "bf16": Type.FLOAT,
    "f32": Type.FLOAT,
    "f64": Type.FLOAT,
}
GENERIC = ("bool", "int", "float")  # elements that do not fix the storage

# Dimensions with a meaning of their own; any other name only has to agree across captures.
KNOWN_DIMS = ("B", "H", "Hk", "Lq", "Lk", "L")
# An undeclared dimension indexed by exactly this index is one of the known ones.
DIM_OF_INDEX = {"b": "B", "h": "H", "hk": "Hk", "i": "Lq", "j": "Lk"}

Dim = str | int | None


class Missing:
    """Marks a capture without default."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING = Missing()


class Kind(enum.Enum):
    """A capture is one number or a table of them."""

    SCALAR = "scalar"
    TENSOR = "tensor"


@dataclass(frozen=True)
class FreeVariable:
    """A closure cell, module global, partial argument or attribute, read at each call.

    `place` tells two variables of equal name apart; `read` gives the value of this moment.
    """

    place: tuple[Any, ...]
    read: Callable[[], Any] = field(compare=False)
    label: str = field(compare=False, default="")


@dataclass(frozen=True)
class Capture:
    """One captured value of a variant.

    `element` is a word of `ELEMENTS`, or None where the call decides; `dims` is None where the
    declaration is silent, and `rank` then says how many indices the body uses.
    """

    name: str
    kind: Kind
    element: str | None = None
    dims: tuple[Dim, ...] | None = None
    default: Any = MISSING
    free: FreeVariable | None = None
    rank: int = 0
    span: Span | None = field(default=None, compare=False)

    @property
    def type(self) -> Type:
        """The type in expressions; ANY while the call decides."""
        return Type.ANY if self.element is None else ELEMENTS[self.element]

    @property
    def declaration(self) -> str:
        """The declaration as the mini-language writes it, without default."""
        if self.kind is Kind.SCALAR:
            return self.name if self.element is None else f"{self.name}: {self.element}"
        dims = self.dims if self.dims is not None else (None,) * self.rank
        words = ", ".join("_" if d is None else str(d) for d in dims)
        return f"{self.name}: {self.element or 'tensor'}[{words}]"

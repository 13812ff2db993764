"""Captures: declared types and dimensions, tables, and what is given for them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import language
from ..errors import CaptureMismatch, MissingCapture, TypeMismatch
from .call import DIM_OF_INDEX, Call, View
from .operations import BINARY
from .values import Kind, Value, convert, kind_of, rounded

_ELEMENTS = {
    "bool": Kind.BOOL,
    **dict.fromkeys(("int", "i8", "u8", "i16", "i32", "i64"), Kind.INT),
    **dict.fromkeys(("float", "f16", "bf16", "f32", "f64"), Kind.FLOAT),
}
Dim = str | int | None


@dataclass(frozen=True)
class Declared:
    """A declared type: the kind of its elements, and its dimensions if it is a tensor."""

    kind: Kind | None = None
    dims: tuple[Dim, ...] | None = None

    def dim(self, axis: int, rank: int) -> Dim:
        """The name of one dimension; `...` stands for any number of them."""
        dims = self.dims or ()
        if "..." in dims:
            at = dims.index("...")
            dims = (*dims[:at], *(None,) * (rank - len(dims) + 1), *dims[at + 1 :])
        return dims[axis] if axis < len(dims) else None


def declared_as(word: str, dims: Sequence[str] | None) -> Declared:
    if word != "tensor" and word not in _ELEMENTS:
        raise TypeMismatch(f"`{word}` is not a type")
    names = None if dims is None else tuple(_dim(d.strip()) for d in dims if d.strip())
    return Declared(_ELEMENTS.get(word), names)


def _dim(word: str) -> Dim:
    return int(word) if word.isdigit() else None if word == "_" else word


@dataclass(frozen=True, eq=False)
class Table:
    """A captured tensor with the indices given so far: `t`, `t[b]`, `t[b][i]`."""

    name: str
    tensor: Tensor
    declared: Declared
    call: Call
    indices: tuple[Value, ...] = ()

    @property
    def sizes(self) -> tuple[Value, ...]:
        """The lengths of the dimensions that are not indexed yet."""
        return tuple(self.call.number(n) for n in self.tensor.shape[len(self.indices) :])

    def at(self, position: Value, *, from_end: bool = False) -> Table:
        """One more index; a literal negative one counts from the end."""
        axis = len(self.indices)
        if axis >= self.tensor.dim():
            raise TypeMismatch(f"`{self.name}` has {self.tensor.dim()} dimensions only")
        if position.kind is Kind.FLOAT:
            raise TypeMismatch(f"an index of `{self.name}` must be an int, but this is float")
        if position.index in DIM_OF_INDEX:
            self.call.exact.setdefault((self.name, axis), set()).add(position.index)
        if from_end:
            position = BINARY["+"](position, self.call.number(self.tensor.shape[axis]))
        return replace(self, indices=(*self.indices, convert(position, Kind.INT)))

    def value(self) -> Value:
        """The elements read; a tensor of one element serves as a number."""
        if not self.indices and tuple(self.tensor.shape) in ((), (1,)):
            return self._typed(self.tensor.reshape(()), reads_s=False)
        if len(self.indices) != self.tensor.dim():
            raise TypeMismatch(
                f"`{self.name}` has {self.tensor.dim()} dimensions, "
                f"but is read with {len(self.indices)} indices"
            )
        return self._typed(self._gather(), reads_s=any(v.reads_s for v in self.indices))

    def _gather(self) -> Tensor:
        """An index outside the table reads 0 and passes no gradient."""
        inside = torch.ones((), dtype=torch.bool, device=self.tensor.device)
        positions = []
        for axis, index in enumerate(self.indices):
            extent = self._broadcast(axis)
            limit = self.tensor.shape[axis] if extent is None else extent
            within = (index.data >= 0) & (index.data < limit)
            inside = inside & within
            read = within if extent is None else torch.zeros_like(within)
            positions.append(torch.where(read, index.data, 0))
        if self.tensor.numel() == 0:
            return self.tensor.new_zeros(inside.shape)
        return self.tensor[tuple(positions)].masked_fill(~inside, 0)

    def _broadcast(self, axis: int) -> float | None:
        """The size that a dimension of length 1 is broadcast to, if it is one of the known."""
        if self.tensor.shape[axis] != 1:
            return None
        dim = self.declared.dim(axis, self.tensor.dim())
        if dim is None:
            names = self.call.exact.get((self.name, axis), set())
            dim = "L" if names == {"i", "j"} else None
            dim = DIM_OF_INDEX[next(iter(names))] if len(names) == 1 else dim
        return self.call.extent(dim) if dim in ("B", "H", "Hk", "Lk", "Lq", "L") else None

    def _typed(self, elements: Tensor, *, reads_s: bool) -> Value:
        """Elements as bool, int64 or float64; a float is what float32 holds of it."""
        precision = self.call.precision
        if elements.is_floating_point():
            data = elements.to(precision).double()
        else:
            data = elements if elements.dtype == torch.bool else elements.long()
        value = Value(data, data.detach() if reads_s else rounded(data, precision), precision,
                      reads_s)  # fmt: skip
        return _fitted(self.name, value, self.declared.kind)


def _fitted(name: str, value: Value, kind: Kind | None) -> Value:
    """A capture as its declared type; promotion only."""
    if kind is not None and value.kind > kind:
        raise CaptureMismatch(
            f"`{name}` is declared as {kind.name.lower()}, but {value.kind.name.lower()} is given"
        )
    return value if kind is None else convert(value, kind)


def read_capture(name: str, found: Any, declared: Declared, call: Call) -> Value | Table:
    """A captured number or tensor."""
    if isinstance(found, Tensor):
        return Table(name, found.to(call.device), declared, call)
    found = found.item() if isinstance(found, np.generic) else found
    if not isinstance(found, bool | int | float):
        raise CaptureMismatch(f"`{name}` must be a number or a tensor, not {type(found).__name__}")
    if declared.dims is not None:
        raise CaptureMismatch(f"`{name}` is declared as a tensor, but a number is given")
    return _fitted(name, call.number(found), declared.kind)


MISSING = inspect.Parameter.empty


def parameter_value(name: str, declared: Declared, default: Any, view: View) -> Value | Table:
    """A parameter of the variant that is a capture, or a const."""
    outer = view.renamed(name)
    found = view.call.given.get(outer, default)
    if isinstance(default, language.Const):
        number = found.value if isinstance(found, language.Const) else found
        return view.call.literal(number)
    if found is MISSING:
        raise MissingCapture(f"`{outer}` is not given and has no default")
    if declared.kind is None and isinstance(default, bool | int | float):
        declared = replace(declared, kind=kind_of(default))
    return read_capture(outer, found, declared, view.call)

"""Bind captures by name at the call: find each value, check it, and give it its declared shape.

Call keywords win over bound values, those over free variables, those over defaults.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .errors import CaptureMismatch, MissingCapture
from .frontend.names import MAX_INT
from .ir.capture import ELEMENTS, GENERIC, KNOWN_DIMS, MISSING, Capture, Kind
from .ir.ops import Type
from .plan import Param

Value = torch.Tensor | bool | int | float

ELEMENT_OF: dict[torch.dtype, str] = {
    torch.bool: "bool",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
}
DTYPE_OF: dict[str, torch.dtype] = {word: dtype for dtype, word in ELEMENT_OF.items()}
ANY_LENGTH = 2**31 - 1  # of a dimension whose need is known to the device only


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call; `q_offset` is None where only the device knows it."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    q_offset: int | None = 0

    def need(self, dim: str) -> int | None:
        """How long a known dimension must be at least; None where it cannot be checked."""
        q_end = None if self.q_offset is None else self.q_offset + self.q_len
        needs = {
            "B": self.batch,
            "H": self.q_heads,
            "Hk": self.kv_heads,
            "Lk": self.kv_len,
            "Lq": q_end,
            "L": None if q_end is None else max(q_end, self.kv_len),
        }
        return needs[dim]


@dataclass(frozen=True)
class Bound:
    """A capture with its value of this call."""

    param: Param
    value: Value  # in its declared shape: dimensions of length 1 may be expanded
    capture: Capture
    given: Value  # as the user gave it: what a gradient belongs to


def bind(
    captures: Sequence[Capture],
    consts: Mapping[str, Any],
    given: Mapping[str, Any],
    fixed: Mapping[str, Any],
    sizes: Sizes,
    device: torch.device | None,
) -> tuple[Bound, ...]:
    """Bind every capture; `given` is from the call, `fixed` from `.bind`."""
    check_names(captures, consts, given)
    bound = []
    agreed: dict[str, tuple[int, str]] = {}
    for found in captures:
        value = value_of(found, given, fixed)
        bound.append(_bind_one(found, value, sizes, device, agreed))
    return tuple(bound)


def check_names(
    captures: Sequence[Capture], consts: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    """Raise for a keyword that is not a capture."""
    from_outside = {c.name for c in captures if not _cannot_be_given(c)} | set(consts)
    for name in given:
        if name not in from_outside:
            close = difflib.get_close_matches(name, from_outside, 1)
            known = f"it has {', '.join(sorted(from_outside))}" if from_outside else "it has none"
            raise MissingCapture(
                f"`{name}` is not a capture of this variant",
                hint=f"did you mean {close[0]}?" if close else known,
            )


def _cannot_be_given(found: Capture) -> bool:
    """A free variable of a reserved name is read, but has no keyword."""
    return found.free is not None and found.name.startswith("free_")


def value_of(found: Capture, given: Mapping[str, Any], fixed: Mapping[str, Any]) -> Any:
    """The value of a capture, by order of precedence."""
    if found.name in given:
        return given[found.name]
    if found.name in fixed:
        return fixed[found.name]
    if found.free is not None:
        return found.free.read()
    if found.default is not MISSING:
        return found.default
    raise MissingCapture(
        f"the capture `{found.name}` was not given",
        span=found.span,
        hint=f"pass {found.name}=... at the call, or fix it with .bind({found.name}=...); "
        f"it is declared as {found.declaration}",
    )


def _bind_one(
    found: Capture,
    value: Any,
    sizes: Sizes,
    device: torch.device | None,
    agreed: dict[str, tuple[int, str]],
) -> Bound:
    if not isinstance(value, torch.Tensor):
        value = _number(found, value)
    elif device is not None and device.type != "meta" and value.device != device:
        raise _mismatch(found, f"is on {value.device}, but q is on {device}")
    if found.kind is Kind.SCALAR:
        return _scalar(found, value)
    if not isinstance(value, torch.Tensor):
        raise _mismatch(found, f"must be a tensor, not {type(value).__name__}")
    element = _element(found, value)
    _check_element(found, element)
    table = _fit(found, value, sizes, agreed)
    as_float = _as_float(found, element)
    param = Param(found.name, Kind.TENSOR, element, table.ndim, as_float=as_float)
    return Bound(param, table, found, value)


def _number(found: Capture, value: Any) -> bool | int | float:
    """A Python number; NumPy's scalars become one."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, bool | int | float):
        raise _mismatch(found, f"must be a number or a tensor, not {type(value).__name__}")
    if isinstance(value, int) and abs(value) > MAX_INT:
        raise _mismatch(found, f"is {value}; ints may be at most 2**47 in magnitude")
    return value


def _scalar(found: Capture, value: Value) -> Bound:
    if isinstance(value, torch.Tensor):
        if value.shape not in ((), (1,)):
            raise _mismatch(
                found, f"is read as one number, but has shape {tuple(value.shape)}; index it"
            )
        element = _element(found, value)
        _check_element(found, element)
        param = Param(found.name, Kind.SCALAR, element, 0, False, _as_float(found, element))
        return Bound(param, value.reshape(()), found, value)
    element = type(value).__name__
    if found.element is not None and (element, found.element) in _WIDENING:
        element = found.element
    _check_element(found, element)
    value = {"bool": bool, "int": int, "float": float}[element](value)
    return Bound(Param(found.name, Kind.SCALAR, element), value, found, value)


_WIDENING = {("bool", "int"), ("int", "float"), ("bool", "float")}


def _element(found: Capture, value: torch.Tensor) -> str:
    if value.dtype not in ELEMENT_OF:
        raise _mismatch(found, f"has dtype {value.dtype}, which is not bool, int or float")
    return ELEMENT_OF[value.dtype]


def _as_float(found: Capture, element: str) -> bool:
    return found.type is Type.FLOAT and ELEMENTS[element] is Type.INT


def _check_element(found: Capture, element: str) -> None:
    declared = found.element
    if declared is None or declared == element:
        return
    widens = ELEMENTS[element] is Type.INT and declared == "float"
    if declared in GENERIC and (ELEMENTS[element] is ELEMENTS[declared] or widens):
        return
    raise _mismatch(found, f"holds {element}")


def _fit(
    found: Capture, value: torch.Tensor, sizes: Sizes, agreed: dict[str, tuple[int, str]]
) -> torch.Tensor:
    """Check the shape; dimensions of length 1 that stand for a known one are expanded."""
    dims = found.dims
    if dims is None:
        if found.rank and value.ndim != found.rank:
            shape = tuple(value.shape)
            raise _mismatch(found, f"has shape {shape}, but is read with {found.rank} indices")
        return value
    if value.ndim != len(dims):
        shape = tuple(value.shape)
        raise _mismatch(found, f"has shape {shape}: {value.ndim} dimensions, not {len(dims)}")
    lengths = [_fit_dim(found, value, axis, dim, sizes, agreed) for axis, dim in enumerate(dims)]
    return value.expand(lengths)


def _fit_dim(
    found: Capture,
    value: torch.Tensor,
    axis: int,
    dim: str | int | None,
    sizes: Sizes,
    agreed: dict[str, tuple[int, str]],
) -> int:
    length = value.shape[axis]
    if dim is None:
        return length
    if isinstance(dim, int):
        if length != dim:
            shape = tuple(value.shape)
            raise _mismatch(found, f"has shape {shape}: dimension {axis} must be {dim}")
        return length
    if dim not in KNOWN_DIMS:
        first, name = agreed.setdefault(dim, (length, found.name))
        if first != length:
            raise _mismatch(found, f"has {length} for {dim}, but `{name}` has {first} for it")
        return length
    need = sizes.need(dim)
    if length == 1:
        return max(1, ANY_LENGTH if need is None else need)
    if need is not None and length < need:
        raise _mismatch(
            found, f"has shape {tuple(value.shape)}: {dim} must be 1 or at least {need}"
        )
    return length


def _mismatch(found: Capture, problem: str) -> CaptureMismatch:
    return CaptureMismatch(
        f"the capture `{found.name}` {problem}",
        span=found.span,
        hint=f"it is declared as {found.declaration}",
    )

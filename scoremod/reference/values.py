"""Values: a tensor of one kind, and what is known of it; conversions between kinds."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import TypeMismatch


class Kind(enum.IntEnum):
    """The types of the language, in the order of promotion."""

    BOOL = 0
    INT = 1
    FLOAT = 2


_DTYPE = {Kind.BOOL: torch.bool, Kind.INT: torch.int64, Kind.FLOAT: torch.float64}


@dataclass(frozen=True, eq=False)
class Value:
    """What an expression is at every pair: one element per pair, or 0-d where all agree.

    A float has two readings. `data` is float64 and carries gradients. `strict` is what decides
    bools, indices and ints: the same operations in `precision` (float32, or float64 for float64
    q). What reads `s` has no strict reading; there `strict` repeats `data`.
    """

    data: Tensor  # bool, int64 or float64
    strict: Tensor  # bool, int64 or `precision`
    precision: torch.dtype
    reads_s: bool = False
    known: bool = False  # made of literals, consts and loop variables only
    excluded: Tensor | None = None  # where this is the literal -inf, which masks a pair
    index: str = ""  # the name of the index that this is exactly

    @property
    def kind(self) -> Kind:
        return next(kind for kind, dtype in _DTYPE.items() if dtype == self.data.dtype)


def number_value(x: bool | int | float, precision: torch.dtype, device: torch.device) -> Value:
    """A Python number; a float enters the strict reading rounded."""
    if isinstance(x, int) and not -(2**63) <= x < 2**63:
        raise TypeMismatch(f"the integer {x} does not fit in 64 bits", hint="write it as a float")
    data = torch.tensor(x, dtype=_DTYPE[kind_of(x)], device=device)
    return Value(data, rounded(data, precision), precision)


def kind_of(x: bool | int | float) -> Kind:
    return Kind.BOOL if isinstance(x, bool) else Kind.INT if isinstance(x, int) else Kind.FLOAT


def rounded(data: Tensor, precision: torch.dtype) -> Tensor:
    return data.detach().to(precision) if data.is_floating_point() else data


def literal_like(x: bool | int | float, like: Value) -> Value:
    """A number of the program text."""
    return as_known(number_value(x, like.precision, like.data.device))


def as_known(value: Value) -> Value:
    """Known at compile time; a known -inf is the mark of a masked pair."""
    masks = value.kind is Kind.FLOAT and value.data.item() == -math.inf
    excluded = torch.ones_like(value.data, dtype=torch.bool) if masks else None
    return replace(value, known=True, excluded=excluded)


def result_of(data: Tensor, strict: Tensor, operands: Sequence[Value]) -> Value:
    """A value computed from others."""
    reads_s = any(v.reads_s for v in operands)
    result = Value(data, data.detach() if reads_s else strict, operands[0].precision, reads_s)
    return as_known(result) if all(v.known for v in operands) else result


class _Elementwise(torch.autograd.Function):
    """A function of single elements whose gradient is selected, not multiplied.

    Where no gradient arrives none is passed on, even if the derivative is infinite or nan there:
    in `where(d > 0, w * log(d), 0)` the pairs with d <= 0 must not reach the gradient of w.
    """

    @staticmethod
    def forward(ctx: Any, f: Callable[..., Tensor], *operands: Tensor) -> Tensor:
        ctx.f = f
        ctx.save_for_backward(*operands)
        return f(*operands)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        operands = [
            x.detach().requires_grad_(need)
            for x, need in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            result = ctx.f(*operands)
        wanted = [x for x in operands if x.requires_grad]
        found = iter(torch.autograd.grad(result, wanted, gradient))
        silent = gradient == 0
        return None, *(next(found).masked_fill(silent, 0) if need else None for need in needed)


def _compute(f: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        # Expanded first: a number shared by all pairs sums its gradient after the selection.
        return _Elementwise.apply(f, *torch.broadcast_tensors(*operands))  # type: ignore[no-any-return, no-untyped-call]
    return f(*operands)


def apply(f: Callable[..., Tensor], *operands: Value) -> Value:
    """An operation whose result has the type of its operands."""
    data = _compute(f, *(v.data for v in operands))
    single = not data.is_floating_point() or any(v.reads_s for v in operands)
    strict = data.detach() if single else f(*(v.strict for v in operands))
    return result_of(data, strict, operands)


def decide(f: Callable[..., Tensor], *operands: Value) -> Value:
    """An operation that gives a bool or an int: it looks at the strict reading if there is one."""
    reads_s = any(v.reads_s for v in operands)
    data = f(*(v.data.detach() if reads_s else v.strict for v in operands))
    return result_of(data, data, operands)


def convert(value: Value, kind: Kind) -> Value:
    """`bool(x)`, `int(x)` and `float(x)`."""
    if value.kind is kind:
        return value
    if kind is Kind.BOOL:
        return decide(lambda x: x != 0, value)
    if kind is Kind.INT:
        return decide(saturated, value)
    return result_of(value.data.double(), value.data.to(value.precision), [value])


def saturated(x: Tensor) -> Tensor:
    """Truncated to int64: nan gives 0, and what is out of range saturates."""
    if not x.is_floating_point():
        return x.long()
    low, high = x < -(2.0**63), x >= 2.0**63
    inside = torch.where(low | high | x.isnan(), 0, x).long()
    limits = torch.iinfo(torch.int64)
    return torch.where(low, limits.min, torch.where(high, limits.max, inside))


def promote(*operands: Value, least: Kind = Kind.INT) -> list[Value]:
    """bool -> int -> float, as in Python."""
    kind = max(least, *(v.kind for v in operands))
    return [convert(v, kind) for v in operands]


def floats(*operands: Value) -> list[Value]:
    return promote(*operands, least=Kind.FLOAT)


def ints(what: str, *operands: Value) -> list[Value]:
    if any(v.kind is Kind.FLOAT for v in operands):
        raise TypeMismatch(f"`{what}` needs ints, but this is float", hint="convert it with int(x)")
    return [convert(v, Kind.INT) for v in operands]


def bools(what: str, *operands: Value) -> Sequence[Value]:
    for v in operands:
        if v.kind is not Kind.BOOL:
            raise TypeMismatch(
                f"`{what}` needs a bool condition, but this is {v.kind.name.lower()}",
                hint="compare it, e.g. x != 0",
            )
    return operands

"""What operators and functions mean, from values to values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import TypeMismatch
from .values import (
    Kind,
    Value,
    apply,
    bools,
    convert,
    decide,
    floats,
    ints,
    literal_like,
    promote,
    result_of,
    saturated,
)

Operation = Callable[..., Value]


def _arithmetic(f: Callable[..., Tensor]) -> Operation:
    return lambda x, y: apply(f, *promote(x, y))


def _floor_div(x: Tensor, y: Tensor) -> Tensor:
    """Floors; x // 0 is 0. The processor traps at the smallest int // -1, which wraps here."""
    unsafe = y == 0 if x.is_floating_point() else (y == 0) | (y == -1)
    quotient = torch.div(x, torch.where(unsafe, 1, y), rounding_mode="floor")
    if not x.is_floating_point():
        quotient = torch.where(y == -1, -x, quotient)
    return torch.where(y == 0, 0, quotient)


def _remainder(x: Tensor, y: Tensor) -> Tensor:
    """Has the divisor's sign; x % 0 is 0."""
    unsafe = y == 0 if x.is_floating_point() else (y == 0) | (y == -1)
    return torch.where(unsafe, 0, torch.remainder(x, torch.where(unsafe, 1, y)))


def _power(x: Value, y: Value) -> Value:
    """int ** known non-negative int is int; anything else is float."""
    if Kind.FLOAT not in (x.kind, y.kind) and y.known and y.data.item() >= 0:
        exponent = int(y.data.item())
        return apply(lambda n: _int_power(n, exponent), *ints("**", x))
    return apply(torch.pow, *floats(x, y))


def _int_power(x: Tensor, exponent: int) -> Tensor:
    """Modulo 2**64, by squaring."""
    result = torch.ones_like(x)
    while exponent:
        if exponent & 1:
            result = result * x
        x, exponent = x * x, exponent >> 1
    return result


def _bitwise(symbol: str, f: Callable[..., Tensor]) -> Operation:
    """Logical on bools, bitwise on ints."""

    def operation(*operands: Value) -> Value:
        if all(v.kind is Kind.BOOL for v in operands):
            return apply(f, *operands)
        return apply(f, *ints(symbol, *operands))

    return operation


def _shift(symbol: str, f: Callable[..., Tensor]) -> Operation:
    """By a negative amount, or by 64 and more, gives 0."""

    def shift(x: Tensor, n: Tensor) -> Tensor:
        valid = (n >= 0) & (n < 64)
        return torch.where(valid, f(x, torch.where(valid, n, 0)), 0)

    return lambda x, n: apply(shift, *ints(symbol, x, n))


BINARY: dict[str, Operation] = {
    "+": _arithmetic(torch.add),
    "-": _arithmetic(torch.sub),
    "*": _arithmetic(torch.mul),
    "/": lambda x, y: apply(torch.div, *floats(x, y)),
    "//": _arithmetic(_floor_div),
    "%": _arithmetic(_remainder),
    "**": _power,
    "&": _bitwise("&", torch.bitwise_and),
    "|": _bitwise("|", torch.bitwise_or),
    "^": _bitwise("^", torch.bitwise_xor),
    "<<": _shift("<<", torch.bitwise_left_shift),
    ">>": _shift(">>", torch.bitwise_right_shift),
}
UNARY: dict[str, Operation] = {
    "+": lambda x: x,
    "-": lambda x: apply(torch.neg, *promote(x)),
    "~": _bitwise("~", torch.bitwise_not),
    "not": lambda x: apply(torch.logical_not, *bools("not", x)),
}
COMPARE: dict[str, Callable[..., Tensor]] = {
    "<": torch.lt,
    "<=": torch.le,
    ">": torch.gt,
    ">=": torch.ge,
    "==": torch.eq,
    "!=": torch.ne,
}
LOGICAL: dict[str, Callable[..., Tensor]] = {"and": torch.logical_and, "or": torch.logical_or}


def comparison(symbols: Sequence[str], operands: Sequence[Value]) -> Value:
    """`a < b <= c`: each link, joined by and."""
    links = [
        decide(COMPARE[symbol], *promote(x, y))
        for symbol, x, y in zip(symbols, operands, operands[1:], strict=False)
    ]
    return logical("and", *links)


def logical(symbol: str, first: Value, *others: Value) -> Value:
    (result,) = bools(symbol, first)
    for other in bools(symbol, *others):
        result = apply(LOGICAL[symbol], result, other)
    return result


def either(condition: Value, x: Value, y: Value) -> Value:
    """x where the condition holds, else y; under a condition free of `s`, -inf stays a mask."""
    bools("where", condition)
    x, y = promote(x, y, least=Kind.BOOL)
    data, strict = (
        torch.where(condition.data, *_same_dtype(a, b))
        for a, b in ((x.data, y.data), (x.strict, y.strict))
    )
    result = result_of(data, strict, (condition, x, y))
    if condition.reads_s or (x.excluded is None and y.excluded is None):
        return replace(result, excluded=None)
    excluded = torch.where(condition.data, _marks(x), _marks(y))
    return replace(result, excluded=excluded)


def _same_dtype(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Strict readings differ in dtype where one side reads `s`; the result is not used then."""
    return (a, b) if a.dtype == b.dtype else (a.double(), b.double())


def _marks(value: Value) -> Tensor:
    nowhere = torch.zeros((), dtype=torch.bool, device=value.data.device)
    return nowhere if value.excluded is None else value.excluded


def _fold(f: Callable[..., Tensor]) -> Operation:
    def operation(x: Value, y: Value, *more: Value) -> Value:
        for other in (y, *more):
            x = apply(f, *promote(x, other))
        return x

    return operation


_minimum, _maximum = _fold(torch.minimum), _fold(torch.maximum)


def _clamp(
    x: Value,
    low: Value | None = None,
    high: Value | None = None,
    *,
    min: Value | None = None,
    max: Value | None = None,
) -> Value:
    """At least `low`, then at most `high`; x has the whole gradient where it is at either."""
    low, high = low or min, high or max
    if low is not None and high is not None:
        return apply(torch.clamp, *promote(x, low, high))
    x = x if low is None else _maximum(x, low)
    return x if high is None else _minimum(x, high)


def logarithm(x: Value, base: Value | None = None) -> Value:
    result = apply(torch.log, *floats(x))
    return result if base is None else BINARY["/"](result, logarithm(base))


def _softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def _float_function(f: Callable[[Tensor], Tensor]) -> Operation:
    return lambda x: apply(f, *floats(x))


def _rounding(f: Callable[[Tensor], Tensor]) -> Operation:
    """A float rounded to an int; an int as it is."""

    def operation(x: Value) -> Value:
        if x.kind is Kind.FLOAT:
            return decide(lambda data: saturated(f(data)), x)
        return convert(x, Kind.INT)

    return operation


def _test(f: Callable[[Tensor], Tensor]) -> Operation:
    return lambda x: decide(f, *floats(x))


def _ilog2(x: Tensor) -> Tensor:
    """The number of times that x can be halved."""
    result = torch.zeros_like(x)
    for bit in range(1, 63):
        result = result + (x >= 2**bit)
    return result


FUNCTIONS: dict[str, Operation] = {
    "where": either,
    "abs": lambda x: apply(torch.abs, *promote(x)),
    "min": _minimum,
    "max": _maximum,
    "minimum": lambda x, y: _minimum(x, y),
    "maximum": lambda x, y: _maximum(x, y),
    "clamp": _clamp,
    "pow": _power,
    "exp": _float_function(torch.exp),
    "exp2": _float_function(torch.exp2),
    "expm1": _float_function(torch.expm1),
    "log": lambda x: logarithm(x),
    "log2": _float_function(torch.log2),
    "log10": _float_function(torch.log10),
    "log1p": _float_function(torch.log1p),
    "sqrt": _float_function(torch.sqrt),
    "rsqrt": _float_function(torch.rsqrt),
    "tanh": _float_function(torch.tanh),
    "sigmoid": _float_function(torch.sigmoid),
    "softplus": _float_function(_softplus),
    "silu": _float_function(lambda x: x * torch.sigmoid(x)),
    "relu": lambda x: _maximum(x, literal_like(0, x)),
    "erf": _float_function(torch.erf),
    "sin": _float_function(torch.sin),
    "cos": _float_function(torch.cos),
    "floor": _rounding(torch.floor),
    "ceil": _rounding(torch.ceil),
    "round": _rounding(torch.round),  # half to even
    "int": lambda x: convert(x, Kind.INT),
    "float": lambda x: convert(x, Kind.FLOAT),
    "bool": lambda x: convert(x, Kind.BOOL),
    "ilog2": lambda x: apply(_ilog2, *ints("ilog2", x)),
    "isfinite": _test(torch.isfinite),
    "isinf": _test(torch.isinf),
    "isnan": _test(torch.isnan),
    "xor": lambda a, b: apply(torch.logical_xor, *bools("xor", a, b)),
    "logical_and": lambda a, b: logical("and", a, b),
    "logical_or": lambda a, b: logical("or", a, b),
    "logical_not": UNARY["not"],
}
CONSTANTS = {"inf": math.inf, "nan": math.nan, "pi": math.pi, "e": math.e}


def invoke(name: str, operation: Operation, *args: Value, **keywords: Value) -> Value:
    """Call an operation; arguments that do not fit are the user's mistake."""
    try:
        inspect.signature(operation).bind(*args, **keywords)
    except TypeError as error:
        raise TypeMismatch(f"`{name}`: {error}") from None
    return operation(*args, **keywords)

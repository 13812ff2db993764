"""The oracle: what a variant means, read from the user's own source and computed pair by pair.

    attend(Leaf(source), q, k, v, {"slopes": slopes})   ->   out, lse

It is a second, independent reading: it walks Python's syntax tree, or the mini-language's, and
evaluates with torch in float64 and int64. It shares the grammar and the finding of sources with
the compiler and nothing else. It is written for reading: values and their operations first, then
captures, the two walkers, composition, and attention itself.
"""

from __future__ import annotations

import ast
import builtins
import enum
import functools
import inspect
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lark
import numpy as np
import torch
from torch import Tensor

from . import language
from .errors import (
    CaptureMismatch,
    InputMismatch,
    MissingCapture,
    ReservedName,
    ScoremodError,
    Span,
    TypeMismatch,
    UnknownName,
    UnsupportedPython,
)
from .frontend.source import PythonSource, TextSource, attribute, read_python
from .ir.capture import FreeVariable
from .origin import Both, Chained, Either, Leaf, Negated, Origin, Renamed

# -- values ------------------------------------------------------------------------------------


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


def _number(x: bool | int | float, precision: torch.dtype, device: torch.device) -> Value:
    """A Python number; a float enters the strict reading rounded."""
    if isinstance(x, int) and not -(2**63) <= x < 2**63:
        raise TypeMismatch(f"the integer {x} does not fit in 64 bits", hint="write it as a float")
    data = torch.tensor(x, dtype=_DTYPE[_kind_of(x)], device=device)
    return Value(data, _rounded(data, precision), precision)


def _kind_of(x: bool | int | float) -> Kind:
    return Kind.BOOL if isinstance(x, bool) else Kind.INT if isinstance(x, int) else Kind.FLOAT


def _rounded(data: Tensor, precision: torch.dtype) -> Tensor:
    return data.detach().to(precision) if data.is_floating_point() else data


def _literal(x: bool | int | float, like: Value) -> Value:
    """A number of the program text."""
    return _as_known(_number(x, like.precision, like.data.device))


def _as_known(value: Value) -> Value:
    """Known at compile time; a known -inf is the mark of a masked pair."""
    masks = value.kind is Kind.FLOAT and value.data.item() == -math.inf
    excluded = torch.ones_like(value.data, dtype=torch.bool) if masks else None
    return replace(value, known=True, excluded=excluded)


def _result(data: Tensor, strict: Tensor, operands: Sequence[Value]) -> Value:
    """A value computed from others."""
    reads_s = any(v.reads_s for v in operands)
    result = Value(data, data.detach() if reads_s else strict, operands[0].precision, reads_s)
    return _as_known(result) if all(v.known for v in operands) else result


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


def _apply(f: Callable[..., Tensor], *operands: Value) -> Value:
    """An operation whose result has the type of its operands."""
    data = _compute(f, *(v.data for v in operands))
    single = not data.is_floating_point() or any(v.reads_s for v in operands)
    strict = data.detach() if single else f(*(v.strict for v in operands))
    return _result(data, strict, operands)


def _decide(f: Callable[..., Tensor], *operands: Value) -> Value:
    """An operation that gives a bool or an int: it looks at the strict reading if there is one."""
    reads_s = any(v.reads_s for v in operands)
    data = f(*(v.data.detach() if reads_s else v.strict for v in operands))
    return _result(data, data, operands)


def _convert(value: Value, kind: Kind) -> Value:
    """`bool(x)`, `int(x)` and `float(x)`."""
    if value.kind is kind:
        return value
    if kind is Kind.BOOL:
        return _decide(lambda x: x != 0, value)
    if kind is Kind.INT:
        return _decide(_saturated, value)
    return _result(value.data.double(), value.data.to(value.precision), [value])


def _saturated(x: Tensor) -> Tensor:
    """Truncated to int64: nan gives 0, and what is out of range saturates."""
    if not x.is_floating_point():
        return x.long()
    low, high = x < -(2.0**63), x >= 2.0**63
    inside = torch.where(low | high | x.isnan(), 0, x).long()
    limits = torch.iinfo(torch.int64)
    return torch.where(low, limits.min, torch.where(high, limits.max, inside))


def _promote(*operands: Value, least: Kind = Kind.INT) -> list[Value]:
    """bool -> int -> float, as in Python."""
    kind = max(least, *(v.kind for v in operands))
    return [_convert(v, kind) for v in operands]


def _floats(*operands: Value) -> list[Value]:
    return _promote(*operands, least=Kind.FLOAT)


def _ints(what: str, *operands: Value) -> list[Value]:
    if any(v.kind is Kind.FLOAT for v in operands):
        raise TypeMismatch(f"`{what}` needs ints, but this is float", hint="convert it with int(x)")
    return [_convert(v, Kind.INT) for v in operands]


def _bools(what: str, *operands: Value) -> Sequence[Value]:
    for v in operands:
        if v.kind is not Kind.BOOL:
            raise TypeMismatch(
                f"`{what}` needs a bool condition, but this is {v.kind.name.lower()}",
                hint="compare it, e.g. x != 0",
            )
    return operands


# -- operations --------------------------------------------------------------------------------

Operation = Callable[..., Value]


def _arithmetic(f: Callable[..., Tensor]) -> Operation:
    return lambda x, y: _apply(f, *_promote(x, y))


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
        return _apply(lambda n: _int_power(n, exponent), *_ints("**", x))
    return _apply(torch.pow, *_floats(x, y))


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
            return _apply(f, *operands)
        return _apply(f, *_ints(symbol, *operands))

    return operation


def _shift(symbol: str, f: Callable[..., Tensor]) -> Operation:
    """By a negative amount, or by 64 and more, gives 0."""

    def shift(x: Tensor, n: Tensor) -> Tensor:
        valid = (n >= 0) & (n < 64)
        return torch.where(valid, f(x, torch.where(valid, n, 0)), 0)

    return lambda x, n: _apply(shift, *_ints(symbol, x, n))


BINARY: dict[str, Operation] = {
    "+": _arithmetic(torch.add),
    "-": _arithmetic(torch.sub),
    "*": _arithmetic(torch.mul),
    "/": lambda x, y: _apply(torch.div, *_floats(x, y)),
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
    "-": lambda x: _apply(torch.neg, *_promote(x)),
    "~": _bitwise("~", torch.bitwise_not),
    "not": lambda x: _apply(torch.logical_not, *_bools("not", x)),
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


def _compare(symbols: Sequence[str], operands: Sequence[Value]) -> Value:
    """`a < b <= c`: each link, joined by and."""
    links = [
        _decide(COMPARE[symbol], *_promote(x, y))
        for symbol, x, y in zip(symbols, operands, operands[1:], strict=False)
    ]
    return _logical("and", *links)


def _logical(symbol: str, first: Value, *others: Value) -> Value:
    (result,) = _bools(symbol, first)
    for other in _bools(symbol, *others):
        result = _apply(LOGICAL[symbol], result, other)
    return result


def _where(condition: Value, x: Value, y: Value) -> Value:
    """x where the condition holds, else y; under a condition free of `s`, -inf stays a mask."""
    _bools("where", condition)
    x, y = _promote(x, y, least=Kind.BOOL)
    data, strict = (
        torch.where(condition.data, *_same_dtype(a, b))
        for a, b in ((x.data, y.data), (x.strict, y.strict))
    )
    result = _result(data, strict, (condition, x, y))
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
            x = _apply(f, *_promote(x, other))
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
        return _apply(torch.clamp, *_promote(x, low, high))
    x = x if low is None else _maximum(x, low)
    return x if high is None else _minimum(x, high)


def _log(x: Value, base: Value | None = None) -> Value:
    result = _apply(torch.log, *_floats(x))
    return result if base is None else BINARY["/"](result, _log(base))


def _softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def _float_function(f: Callable[[Tensor], Tensor]) -> Operation:
    return lambda x: _apply(f, *_floats(x))


def _rounding(f: Callable[[Tensor], Tensor]) -> Operation:
    """A float rounded to an int; an int as it is."""

    def operation(x: Value) -> Value:
        if x.kind is Kind.FLOAT:
            return _decide(lambda data: _saturated(f(data)), x)
        return _convert(x, Kind.INT)

    return operation


def _test(f: Callable[[Tensor], Tensor]) -> Operation:
    return lambda x: _decide(f, *_floats(x))


def _ilog2(x: Tensor) -> Tensor:
    """The number of times that x can be halved."""
    result = torch.zeros_like(x)
    for bit in range(1, 63):
        result = result + (x >= 2**bit)
    return result


FUNCTIONS: dict[str, Operation] = {
    "where": _where,
    "abs": lambda x: _apply(torch.abs, *_promote(x)),
    "min": _minimum,
    "max": _maximum,
    "minimum": lambda x, y: _minimum(x, y),
    "maximum": lambda x, y: _maximum(x, y),
    "clamp": _clamp,
    "pow": _power,
    "exp": _float_function(torch.exp),
    "exp2": _float_function(torch.exp2),
    "expm1": _float_function(torch.expm1),
    "log": lambda x: _log(x),
    "log2": _float_function(torch.log2),
    "log10": _float_function(torch.log10),
    "log1p": _float_function(torch.log1p),
    "sqrt": _float_function(torch.sqrt),
    "rsqrt": _float_function(torch.rsqrt),
    "tanh": _float_function(torch.tanh),
    "sigmoid": _float_function(torch.sigmoid),
    "softplus": _float_function(_softplus),
    "silu": _float_function(lambda x: x * torch.sigmoid(x)),
    "relu": lambda x: _maximum(x, _literal(0, x)),
    "erf": _float_function(torch.erf),
    "sin": _float_function(torch.sin),
    "cos": _float_function(torch.cos),
    "floor": _rounding(torch.floor),
    "ceil": _rounding(torch.ceil),
    "round": _rounding(torch.round),  # half to even
    "int": lambda x: _convert(x, Kind.INT),
    "float": lambda x: _convert(x, Kind.FLOAT),
    "bool": lambda x: _convert(x, Kind.BOOL),
    "ilog2": lambda x: _apply(_ilog2, *_ints("ilog2", x)),
    "isfinite": _test(torch.isfinite),
    "isinf": _test(torch.isinf),
    "isnan": _test(torch.isnan),
    "xor": lambda a, b: _apply(torch.logical_xor, *_bools("xor", a, b)),
    "logical_and": lambda a, b: _logical("and", a, b),
    "logical_or": lambda a, b: _logical("or", a, b),
    "logical_not": UNARY["not"],
}
CONSTANTS = {"inf": math.inf, "nan": math.nan, "pi": math.pi, "e": math.e}


def _invoke(name: str, operation: Operation, *args: Value, **keywords: Value) -> Value:
    """Call an operation; arguments that do not fit are the user's mistake."""
    try:
        inspect.signature(operation).bind(*args, **keywords)
    except TypeError as error:
        raise TypeMismatch(f"`{name}`: {error}") from None
    return operation(*args, **keywords)


# -- one call ----------------------------------------------------------------------------------

RESERVED = ("s", "b", "h", "hk", "i", "j", "q_len", "kv_len")
_DIM_OF_INDEX = {"b": "B", "h": "H", "hk": "Hk", "i": "Lq", "j": "Lk"}


@dataclass(frozen=True, eq=False)
class Call:
    """What one call gives: captures and sizes."""

    given: Mapping[str, Any]
    precision: torch.dtype
    device: torch.device
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    q_offset: int | Tensor
    # (capture, axis) -> the indices that this dimension is read at exactly; see `_survey`.
    exact: dict[tuple[str, int], set[str]] = field(default_factory=dict)

    def number(self, x: bool | int | float) -> Value:
        return _number(x, self.precision, self.device)

    def literal(self, x: bool | int | float) -> Value:
        return _as_known(self.number(x))

    def extent(self, dim: str) -> float:
        """The size that a dimension of that name broadcasts to."""
        q_end = math.inf if isinstance(self.q_offset, Tensor) else self.q_offset + self.q_len
        extents = {
            "B": self.batch,
            "H": self.q_heads,
            "Hk": self.kv_heads,
            "Lk": self.kv_len,
            "Lq": q_end,
            "L": max(q_end, self.kv_len),
        }
        return extents[dim]


@dataclass(frozen=True, eq=False)
class View:
    """The pairs that an expression is evaluated at, and how its captures are called outside."""

    call: Call
    indices: Mapping[str, Tensor]  # b, h, hk, i, j: int64
    s: Value
    renamed: Callable[[str], str] = lambda name: name

    def reserved(self, name: str) -> Value:
        """A reserved name."""
        if name == "s":
            return self.s
        if name in ("q_len", "kv_len"):
            return replace(self.call.number(getattr(self.call, name)), index=name)
        data = self.indices[name]
        return Value(data, data, self.call.precision, index=name)


def _score_value(data: Tensor, precision: torch.dtype) -> Value:
    return Value(data, data.detach(), precision, reads_s=True)


# -- captures ----------------------------------------------------------------------------------

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


def _declared(word: str, dims: Sequence[str] | None) -> Declared:
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
        if position.index in _DIM_OF_INDEX:
            self.call.exact.setdefault((self.name, axis), set()).add(position.index)
        if from_end:
            position = BINARY["+"](position, self.call.number(self.tensor.shape[axis]))
        return replace(self, indices=(*self.indices, _convert(position, Kind.INT)))

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
            dim = _DIM_OF_INDEX[next(iter(names))] if len(names) == 1 else dim
        return self.call.extent(dim) if dim in ("B", "H", "Hk", "Lk", "Lq", "L") else None

    def _typed(self, elements: Tensor, *, reads_s: bool) -> Value:
        """Elements as bool, int64 or float64; a float is what float32 holds of it."""
        precision = self.call.precision
        if elements.is_floating_point():
            data = elements.to(precision).double()
        else:
            data = elements if elements.dtype == torch.bool else elements.long()
        value = Value(data, data.detach() if reads_s else _rounded(data, precision), precision,
                      reads_s)  # fmt: skip
        return _fitted(self.name, value, self.declared.kind)


def _fitted(name: str, value: Value, kind: Kind | None) -> Value:
    """A capture as its declared type; promotion only."""
    if kind is not None and value.kind > kind:
        raise CaptureMismatch(
            f"`{name}` is declared as {kind.name.lower()}, but {value.kind.name.lower()} is given"
        )
    return value if kind is None else _convert(value, kind)


def _capture(name: str, found: Any, declared: Declared, call: Call) -> Value | Table:
    """A captured number or tensor."""
    if isinstance(found, Tensor):
        return Table(name, found.to(call.device), declared, call)
    found = found.item() if isinstance(found, np.generic) else found
    if not isinstance(found, bool | int | float):
        raise CaptureMismatch(f"`{name}` must be a number or a tensor, not {type(found).__name__}")
    if declared.dims is not None:
        raise CaptureMismatch(f"`{name}` is declared as a tensor, but a number is given")
    return _fitted(name, call.number(found), declared.kind)


_MISSING = inspect.Parameter.empty


def _parameter(name: str, declared: Declared, default: Any, view: View) -> Value | Table:
    """A parameter of the variant that is a capture, or a const."""
    outer = view.renamed(name)
    found = view.call.given.get(outer, default)
    if isinstance(default, language.Const):
        number = found.value if isinstance(found, language.Const) else found
        return view.call.literal(number)
    if found is _MISSING:
        raise MissingCapture(f"`{outer}` is not given and has no default")
    if declared.kind is None and isinstance(default, bool | int | float):
        declared = replace(declared, kind=_kind_of(default))
    return _capture(outer, found, declared, view.call)


# -- things that names stand for ---------------------------------------------------------------


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
    scope: _PythonReader


@dataclass(frozen=True, eq=False)
class Unset:
    """A name that has no value on some path."""


Thing = Value | Table | tuple[Any, ...] | Opaque | Local | Unset


def _value(thing: Thing) -> Value:
    """A thing as a number."""
    if isinstance(thing, Value):
        return thing
    if isinstance(thing, Table):
        return thing.value()
    if isinstance(thing, Unset):
        raise UnknownName("this name is not assigned on every path", hint="assign it before the if")
    what = "a tuple" if isinstance(thing, tuple) else "a Python object"
    raise TypeMismatch(f"expected a number, but this is {what}")


def _select(condition: Value, yes: Thing, no: Thing) -> Thing:
    """`yes if condition else no`, element by element; tuples position by position."""
    if yes is no:
        return yes
    if isinstance(yes, tuple) and isinstance(no, tuple) and len(yes) == len(no):
        return tuple(_select(condition, a, b) for a, b in zip(yes, no, strict=True))
    return _where(condition, _value(yes), _value(no))


def _constant_int(thing: Thing, what: str) -> int:
    value = _value(thing)
    if not value.known or value.kind is Kind.FLOAT:
        raise UnsupportedPython(f"{what} must be a literal or const int")
    return int(value.data.item())


def _range(bounds: Sequence[Thing], call: Call) -> list[Value]:
    """The steps of a constant loop."""
    numbers = [_constant_int(b, "a bound of range()") for b in bounds]
    if not 1 <= len(numbers) <= 3 or numbers[2:] == [0]:
        raise TypeMismatch("range() takes one to three bounds")
    return [call.literal(n) for n in range(*numbers)]


def _item(thing: tuple[Any, ...], position: Thing) -> Any:
    k = _constant_int(position, "an index of a tuple")
    if not -len(thing) <= k < len(thing):
        raise TypeMismatch(f"the tuple has {len(thing)} elements")
    return thing[k]


# -- the Python walker -------------------------------------------------------------------------


@dataclass(frozen=True)
class Bind:
    """A step of an unrolled loop: the target takes this value."""

    target: ast.expr
    value: Thing


Statement = ast.stmt | Bind


def _read_python(source: PythonSource, view: View) -> Thing:
    """What a function returns at the pairs of a view."""
    roles = dict(source.roles)
    reader = _PythonReader(source, view, source.node, {})
    for parameter in source.parameters():
        node = reader.annotated(parameter.name)
        role = roles.get(parameter.name, parameter.name)
        with _Located(source.span(node or source.node)):
            if node is None or parameter.kind in _VARIADIC:
                raise UnsupportedPython(f"`*{parameter.name}` cannot be a capture")
            if role in RESERVED:
                thing: Thing = view.reserved(role)
            else:
                declared = _annotation(node.annotation)
                thing = _parameter(role, declared, parameter.default, view)
            reader.names[parameter.name] = thing
    return reader.result()


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _annotation(node: ast.expr | None) -> Declared:
    """`int`, `"f32[H]"`; torch.Tensor says nothing that the call does not."""
    if node is None:
        return Declared()
    text = str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)
    if text in ("Tensor", "torch.Tensor", "Any", "None"):
        return Declared()
    found = re.fullmatch(r"\s*(\w+)\s*(?:\[(.*)\])?\s*", text)
    if found is None:
        raise TypeMismatch(f"`{text}` is not a type")
    return _declared(found[1], None if found[2] is None else found[2].split(","))


class _Located:
    """Gives an error that has no place yet this one."""

    def __init__(self, span: Span | None) -> None:
        self.span = span

    def __enter__(self) -> None: ...

    def __exit__(self, _type: Any, error: BaseException | None, _traceback: Any) -> None:
        if isinstance(error, ScoremodError) and error.span is None:
            error.span = self.span


class _PythonReader:
    """Reads one function body; `names` are its local names at this point."""

    def __init__(
        self,
        source: PythonSource,
        view: View,
        node: ast.FunctionDef | ast.Lambda,
        names: dict[str, Thing],
        parent: _PythonReader | None = None,
        active: tuple[ast.AST, ...] = (),
    ) -> None:
        self.source, self.view, self.node, self.parent = source, view, node, parent
        self.names = names
        self.active = (*active, node)
        if active.count(node):
            raise UnsupportedPython("recursion has no end that a kernel could know")
        self.locals = _local_names(node) - dict(source.fixed).keys()
        if parent is None and source.self_name is not None:
            owner = source.owner
            place = FreeVariable(("self", id(owner)), lambda: owner, source.self_name)
            self.names[source.self_name] = Opaque(owner, place)

    @property
    def call(self) -> Call:
        return self.view.call

    def annotated(self, name: str) -> ast.arg | None:
        """The parameter of that name in the syntax tree."""
        arguments = self.node.args
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        return next((a for a in every if a.arg == name), None)

    # -- statements: `run` gives what the function returns, or None at the end of the body

    def result(self) -> Thing:
        if isinstance(self.node, ast.Lambda):
            return self.read(self.node.body)
        returned = self.run(self.node.body)
        if returned is None:
            with _Located(self.source.span(self.node.body[-1])):
                raise UnsupportedPython("the function can end without return")
        return returned

    def run(self, body: Sequence[Statement]) -> Thing | None:
        for position, statement in enumerate(body):
            rest = body[position + 1 :]
            match statement:
                case Bind(target, value):
                    self.assign(target, value)
                case ast.Return(value=ast.expr() as expression):
                    return self.read(expression)
                case ast.For():
                    return self.run([*self.unrolled(statement), *rest])
                case ast.If():
                    condition = self.condition(statement.test)
                    if condition.known:
                        chosen = statement.body if condition.data.item() else statement.orelse
                        return self.run([*chosen, *rest])
                    if _returns(statement):
                        # What follows belongs to the branch that does not return.
                        return self.returned(condition, statement, rest)
                    self.merged(condition, statement)
                case _:
                    self.execute(statement)
        return None

    def execute(self, statement: ast.stmt) -> None:
        with _Located(self.source.span(statement)):
            if type(statement) not in STATEMENTS:
                raise UnsupportedPython(f"`{type(statement).__name__}` has no meaning here")
            STATEMENTS[type(statement)](self, statement)

    def unrolled(self, node: ast.For) -> Iterator[Statement]:
        """A constant loop is its body, once for every step."""
        with _Located(self.source.span(node)):
            steps = self.steps(node.iter)
        for step in steps:
            yield Bind(node.target, step)
            yield from node.body
        yield from node.orelse

    def steps(self, node: ast.expr) -> Sequence[Thing]:
        if isinstance(node, ast.Call):
            function = self.read(node.func)
            if isinstance(function, Opaque) and function.value is range:
                return _range([self.read(a) for a in node.args], self.call)
        return self.unpacked(self.read(node))

    def branch(self, body: Sequence[Statement]) -> tuple[dict[str, Thing], Thing | None]:
        """The names after a branch, and what it returns; our own names stay as they are."""
        before, self.names = self.names, dict(self.names)
        returned = self.run(body)
        after, self.names = self.names, before
        return after, returned

    def returned(self, condition: Value, node: ast.If, rest: Sequence[Statement]) -> Thing | None:
        _, yes = self.branch([*node.body, *rest])
        _, no = self.branch([*node.orelse, *rest])
        if yes is None or no is None:
            return None
        with _Located(self.source.span(node.test)):
            return _select(condition, yes, no)

    def merged(self, condition: Value, node: ast.If) -> None:
        """An `if` that only assigns: every name takes its value from its own branch."""
        yes, _ = self.branch(node.body)
        no, _ = self.branch(node.orelse)
        with _Located(self.source.span(node.test)):
            for name in yes.keys() | no.keys():
                a, b = yes.get(name, Unset()), no.get(name, Unset())
                unset = isinstance(a, Unset) or isinstance(b, Unset)
                self.names[name] = Unset() if unset else _select(condition, a, b)

    def assign(self, target: ast.expr, value: Thing) -> None:
        match target:
            case ast.Name(id=name):
                self.names[name] = value
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                parts = self.unpacked(value)
                if len(parts) != len(targets):
                    raise TypeMismatch(f"{len(targets)} names for {len(parts)} values")
                for part_target, part in zip(targets, parts, strict=True):
                    self.assign(part_target, part)
            case _:
                raise UnsupportedPython("a variant cannot change anything outside itself")

    def assign_all(self, node: ast.Assign) -> None:
        value = self.read(node.value)
        for target in node.targets:
            self.assign(target, value)

    def annotated_assign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.read(node.value))

    def augmented(self, node: ast.AugAssign) -> None:
        if not isinstance(node.target, ast.Name):
            raise UnsupportedPython("a variant cannot change anything outside itself")
        left = _value(self.lookup(node.target.id))
        self.assign(node.target, _binary(node.op, left, self.number(node.value)))

    def define(self, node: ast.FunctionDef) -> None:
        if node.decorator_list:
            raise UnsupportedPython("a function of the body cannot be decorated")
        self.names[node.name] = Local(node, self.parameters(node), self)

    def ignored(self, node: ast.stmt) -> None:
        """A docstring or pass."""
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            raise UnsupportedPython("this line has no effect", hint="assign it to a name")

    # -- names

    def lookup(self, name: str) -> Thing:
        if name in self.names:
            return self.names[name]
        if name in self.locals:
            return Unset()
        if self.parent is not None:
            return self.parent.lookup(name)
        found = self.source.free(name)
        if found is None:
            raise UnknownName(f"`{name}` is not known here")
        node = self.annotated(name)  # a parameter that a partial has fixed
        return self.free(name, found, _annotation(node.annotation if node else None))

    def free(self, name: str, found: FreeVariable, declared: Declared | None = None) -> Thing:
        """A free variable: a number or tensor is a capture, anything else a Python object."""
        value = found.read()
        outer = self.view.renamed(name)
        if isinstance(value, language.Const):
            return self.call.literal(self.call.given.get(outer, value.value))
        if isinstance(value, bool | int | float) and _is_constant(name, found, value):
            return self.call.literal(value)
        if isinstance(value, bool | int | float | np.generic | Tensor):
            value = self.call.given.get(outer, value)
            return _capture(outer, value, declared or Declared(), self.call)
        if value is None and outer not in self.call.given:
            raise UnknownName(f"`{name}` has no value yet", hint="assign it before the call")
        return Opaque(value, found)

    # -- expressions

    def read(self, node: ast.expr) -> Thing:
        with _Located(self.source.span(node)):
            if type(node) not in EXPRESSIONS:
                raise UnsupportedPython(f"`{type(node).__name__}` has no meaning in a variant")
            return EXPRESSIONS[type(node)](self, node)

    def number(self, node: ast.expr) -> Value:
        thing = self.read(node)
        with _Located(self.source.span(node)):
            return _value(thing)

    def condition(self, node: ast.expr) -> Value:
        value = self.number(node)
        with _Located(self.source.span(node)):
            return _bools("if", value)[0]

    def constant(self, node: ast.Constant) -> Value:
        if not isinstance(node.value, bool | int | float):
            raise UnsupportedPython(f"{node.value!r} has no meaning in a variant")
        return self.call.literal(node.value)

    def conditional(self, node: ast.IfExp) -> Thing:
        condition = self.condition(node.test)
        if condition.known:
            return self.read(node.body if condition.data.item() else node.orelse)
        return _select(condition, self.read(node.body), self.read(node.orelse))

    def compare(self, node: ast.Compare) -> Value:
        for op in node.ops:
            if type(op) not in _COMPARE:
                raise UnsupportedPython("`is` and `in` have no meaning between numbers")
        operands = [self.number(x) for x in (node.left, *node.comparators)]
        return _compare([_COMPARE[type(op)] for op in node.ops], operands)

    def subscript(self, node: ast.Subscript) -> Thing:
        thing = self.read(node.value)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            if isinstance(thing, Table):
                thing = thing.at(self.number(part), from_end=_is_negative_literal(part))
            elif isinstance(thing, Value):
                raise TypeMismatch("only a captured tensor can be indexed")
            else:
                thing = _item(self.unpacked(thing), self.read(part))
        return thing

    def unpacked(self, thing: Thing) -> tuple[Any, ...]:
        """The elements of a tuple, of the body or of a free variable."""
        if isinstance(thing, Opaque) and isinstance(thing.value, tuple | list):
            return tuple(self.element(thing.found, k) for k in range(len(thing.value)))
        if not isinstance(thing, tuple):
            raise UnsupportedPython("only a tuple can be taken apart")
        return thing

    def element(self, found: FreeVariable, k: int) -> Thing:
        label = found.label.strip(".")
        return self.free(f"{label}_{k}", FreeVariable(found.place, lambda: found.read()[k], label))

    def attribute(self, node: ast.Attribute) -> Thing:
        owner = self.read(node.value)
        if isinstance(owner, Table) and node.attr == "shape":
            return owner.sizes
        if isinstance(owner, Opaque) and hasattr(owner.value, node.attr):
            return self.free(node.attr, _member(owner.value, node.attr))
        raise UnsupportedPython(f"`.{node.attr}` has no meaning here")

    # -- calls

    def called(self, node: ast.Call) -> Thing:
        if isinstance(node.func, ast.Attribute):
            receiver = self.read(node.func.value)
            if isinstance(receiver, Value | Table):
                return self.method(receiver, node.func.attr, node)
        function = self.read(node.func)
        if isinstance(function, Local):
            return self.inlined(function, node)
        if not isinstance(function, Opaque):
            raise TypeMismatch("only a function can be called")
        return self.python_call(function.value, node)

    def python_call(self, function: Any, node: ast.Call) -> Thing:
        name = getattr(function, "__name__", type(function).__name__)
        known = _operation(function)
        if known is not None:
            if function is float and node.args and _text_of(node.args[0]) in _FLOAT_TEXTS:
                return self.call.literal(float(_text_of(node.args[0])))
            return self.operated(name, known, node)
        if function is len:
            return self.length(*(self.read(a) for a in node.args))
        if function is language.const:
            return _as_known(self.compiled_in(*(self.read(a) for a in node.args)))
        is_python = isinstance(function, types.FunctionType | types.MethodType)
        has_call = isinstance(getattr(type(function), "__call__", None), types.FunctionType)  # noqa: B004
        is_python = is_python or isinstance(function, functools.partial)
        if isinstance(function, type) or not (is_python or has_call):
            raise UnsupportedPython(f"`{name}` cannot be called in a variant")
        return self.helper(read_python(function, self.source.role), node)

    def operated(self, name: str, operation: Operation, node: ast.Call, *first: Value) -> Value:
        args, keywords = self.arguments(node)
        return _invoke(
            name,
            operation,
            *first,
            *map(_value, args),
            **{k: _value(v) for k, v in keywords.items()},
        )

    def arguments(self, node: ast.Call) -> tuple[list[Thing], dict[str, Thing]]:
        if any(isinstance(a, ast.Starred) for a in node.args):
            raise UnsupportedPython("`*` has no meaning in a call here")
        keywords: dict[str, Thing] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise UnsupportedPython("`**` has no meaning in a call here")
            keywords[keyword.arg] = self.read(keyword.value)
        return [self.read(a) for a in node.args], keywords

    def method(self, receiver: Value | Table, name: str, node: ast.Call) -> Thing:
        """`x.abs()`, `x.to(torch.int64)`, `t.size(0)`."""
        if name == "size" and isinstance(receiver, Table):
            return self.size(receiver, *(self.read(a) for a in node.args))
        if name == "to" and len(node.args) == 1 and not node.keywords:
            dtype = self.read(node.args[0])
            if isinstance(dtype, Opaque) and isinstance(dtype.value, torch.dtype | type):
                return _convert(_value(receiver), _kind_of_dtype(dtype.value))
        if name not in METHODS:
            raise UnsupportedPython(f"`.{name}()` has no meaning here")
        return self.operated(name, METHODS[name], node, _value(receiver))

    def size(self, table: Table, *axes: Thing) -> Value:
        if len(axes) != 1:
            raise TypeMismatch("size takes one dimension")
        return _value(_item(table.sizes, axes[0]))

    def length(self, *args: Thing) -> Value:
        if len(args) == 1 and isinstance(args[0], Table) and args[0].sizes:
            return args[0].sizes[0]
        if len(args) == 1 and isinstance(args[0], tuple | Opaque):
            return self.call.literal(len(self.unpacked(args[0])))
        raise TypeMismatch("len takes a captured tensor or a tuple")

    def compiled_in(self, *args: Thing) -> Value:
        """The operand of const(): a number that does not depend on the pair or on a tensor."""
        if len(args) != 1 or not isinstance(args[0], Value) or args[0].data.dim() or args[0].index:
            raise UnsupportedPython("const takes a literal or a variable that holds a number")
        return args[0]

    # -- helpers

    def parameters(self, node: ast.FunctionDef | ast.Lambda) -> tuple[inspect.Parameter, ...]:
        """The parameters of a function of the body, defaults evaluated where it stands."""
        a = node.args
        if a.vararg or a.kwarg:
            raise UnsupportedPython("helpers cannot take *args or **kwargs")
        positional = (*a.posonlyargs, *a.args)
        defaults = [*[None] * (len(positional) - len(a.defaults)), *a.defaults]
        kinds: list[Any] = [inspect.Parameter.POSITIONAL_OR_KEYWORD] * len(positional)
        kinds += [inspect.Parameter.KEYWORD_ONLY] * len(a.kwonlyargs)
        return tuple(
            inspect.Parameter(x.arg, kind, default=self.read(d) if d else _MISSING)
            for x, d, kind in zip(
                (*positional, *a.kwonlyargs), (*defaults, *a.kw_defaults), kinds, strict=True
            )
        )

    def inlined(self, function: Local, node: ast.Call) -> Thing:
        scope = function.scope
        names = self.bound(function.parameters, node)
        return _PythonReader(
            scope.source, self.view, function.node, names, scope, self.active
        ).result()

    def helper(self, source: PythonSource, node: ast.Call) -> Thing:
        """A function from elsewhere, inlined."""
        reader = _PythonReader(source, self.view, source.node, {}, None, self.active)
        parameters = []
        for p in source.parameters():
            if p.kind in _VARIADIC:
                raise UnsupportedPython("helpers cannot take *args or **kwargs")
            if p.default is not _MISSING:
                p = p.replace(default=reader.default(p.name, p.default))
            parameters.append(p)
        reader.names.update(self.bound(parameters, node))
        return reader.result()

    def default(self, name: str, value: Any) -> Thing:
        """The default of a helper: a number is a literal of its text."""
        if isinstance(value, bool | int | float):
            return self.call.literal(value)
        return self.free(name, FreeVariable(("default", name), lambda: value, name))

    def bound(self, parameters: Sequence[inspect.Parameter], node: ast.Call) -> dict[str, Thing]:
        args, keywords = self.arguments(node)
        try:
            bound = inspect.Signature(parameters).bind(*args, **keywords)
        except TypeError as error:
            raise TypeMismatch(f"this helper: {error}") from None
        bound.apply_defaults()
        return bound.arguments


STATEMENTS: dict[type[ast.stmt], Callable[[_PythonReader, Any], None]] = {
    ast.Assign: _PythonReader.assign_all,
    ast.AnnAssign: _PythonReader.annotated_assign,
    ast.AugAssign: _PythonReader.augmented,
    ast.FunctionDef: _PythonReader.define,
    ast.Expr: _PythonReader.ignored,
    ast.Pass: _PythonReader.ignored,
}
EXPRESSIONS: dict[type[ast.expr], Callable[[_PythonReader, Any], Thing]] = {
    ast.Constant: _PythonReader.constant,
    ast.Name: lambda reader, node: reader.lookup(node.id),
    ast.BinOp: lambda reader, node: _binary(
        node.op, reader.number(node.left), reader.number(node.right)
    ),
    ast.UnaryOp: lambda reader, node: UNARY[_UNARY[type(node.op)]](reader.number(node.operand)),
    ast.BoolOp: lambda reader, node: _logical(
        "and" if isinstance(node.op, ast.And) else "or", *map(reader.number, node.values)
    ),
    ast.Compare: _PythonReader.compare,
    ast.IfExp: _PythonReader.conditional,
    ast.Subscript: _PythonReader.subscript,
    ast.Attribute: _PythonReader.attribute,
    ast.Call: _PythonReader.called,
    ast.Tuple: lambda reader, node: tuple(map(reader.read, node.elts)),
    ast.List: lambda reader, node: tuple(map(reader.read, node.elts)),
    ast.Lambda: lambda reader, node: Local(node, reader.parameters(node), reader),
}
_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.LShift: "<<",
    ast.RShift: ">>",
}
_UNARY: dict[type[ast.unaryop], str] = {
    ast.UAdd: "+",
    ast.USub: "-",
    ast.Invert: "~",
    ast.Not: "not",
}
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}

# What functions of Python and torch are called here, where the names differ.
_ALIASES: dict[str, Operation] = {
    "log": _log,
    "fabs": lambda x: FUNCTIONS["abs"](_convert(x, Kind.FLOAT)),
    "trunc": FUNCTIONS["int"],
    "absolute": FUNCTIONS["abs"],
    "logical_xor": FUNCTIONS["xor"],
}
_MODULES: tuple[Any, ...] = (builtins, math, torch, torch.nn.functional, np)
_PYTHON: dict[Any, Operation] = {
    **{
        getattr(module, name): operation
        for module in _MODULES
        for name, operation in {**FUNCTIONS, **_ALIASES}.items()
        # NumPy's min and max take an axis.
        if callable(getattr(module, name, None)) and not (module is np and name in ("min", "max"))
    },
    **{function: FUNCTIONS[name] for name, function in language.FUNCTIONS.items()},
    math.pow: lambda x, y: _apply(torch.pow, *_floats(x, y)),
}
METHODS: dict[str, Operation] = {
    **{name: FUNCTIONS[name] for name in FUNCTIONS if name not in ("where", "ilog2", "xor")},
    "long": FUNCTIONS["int"],
    "double": FUNCTIONS["float"],
    "trunc": FUNCTIONS["int"],
    "logical_xor": FUNCTIONS["xor"],
}


def _operation(function: Any) -> Operation | None:
    try:
        return _PYTHON.get(function)
    except TypeError:  # not hashable
        return None


def _binary(op: ast.operator, x: Value, y: Value) -> Value:
    if type(op) not in _BINARY:
        raise UnsupportedPython("`@` has no meaning between numbers")
    return BINARY[_BINARY[type(op)]](x, y)


def _own_nodes(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a body without those of functions defined in it."""
    todo = list(body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            todo.extend(ast.iter_child_nodes(node))


def _returns(node: ast.If) -> bool:
    return any(isinstance(n, ast.Return) for n in _own_nodes([*node.body, *node.orelse]))


def _local_names(node: ast.FunctionDef | ast.Lambda) -> set[str]:
    """Parameters and assigned names: these never mean a variable outside."""
    a = node.args
    names = {x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)}
    for n in _own_nodes(node.body) if isinstance(node, ast.FunctionDef) else ():
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
            names.add(n.id)
        elif isinstance(n, ast.FunctionDef):
            names.add(n.name)
    return names


_FLOAT_TEXTS = ("inf", "-inf", "nan")


def _text_of(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _is_negative_literal(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.Constant)
    )


def _member(owner: Any, name: str) -> FreeVariable:
    if isinstance(owner, types.ModuleType):
        place = ("module", owner.__name__, name)
        return FreeVariable(place, lambda: getattr(owner, name), name)
    return attribute(owner, name)


def _is_constant(name: str, found: FreeVariable, value: bool | int | float) -> bool:
    """Whether a number never changes: math.pi, torch.inf, and scoremod's `inf`."""
    if found.place[0] == "module":
        return found.place[1].split(".")[0] in ("math", "torch", "numpy", "scoremod")
    return found.place[0] == "builtin" or (name == "inf" and value == math.inf)


def _kind_of_dtype(dtype: Any) -> Kind:
    if dtype in (bool, torch.bool):
        return Kind.BOOL
    if dtype is int or (isinstance(dtype, torch.dtype) and not dtype.is_floating_point):
        return Kind.INT
    if dtype is float or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return Kind.FLOAT
    raise UnsupportedPython(f"`{dtype}` is not a type of numbers")


# -- the mini-language's walker ----------------------------------------------------------------

Tree = lark.Tree[Any]


def _read_text(source: TextSource, view: View) -> dict[str, Value]:
    """The values of the statements `score` and `mask`, those that are there."""
    (variant,) = source.tree.find_data("variant")
    _, parameters, block = variant.children
    reader = _TextReader(source, view)
    for node in parameters.children if parameters else ():
        with _Located(source.span(node)):
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
        number: Any = _MISSING if default is None else _text_number(default)
        if const is not None:
            number = language.Const(number)
        kind = Declared()
        if declared is not None:
            word, *dims = (str(x) for x in declared.children if x is not None)
            kind = _declared(word, dims if declared.data == "tensor_type" else None)
        self.names[str(name)] = _parameter(str(name), kind, number, self.view)

    # -- statements

    def block(self, node: Tree) -> None:
        for statement in node.children:
            with _Located(self.source.span(statement)):
                TEXT_STATEMENTS[statement.data](self, *statement.children)

    def assign(self, target: Tree, expression: Tree) -> None:
        self.names[str(target.children[0])] = self.read(expression)

    def loop(self, name: Any, bounds: Tree, body: Tree) -> None:
        for step in _range([self.read(b) for b in bounds.children], self.call):
            self.names[str(name)] = step
            self.block(body)

    def say(self, what: str, expression: Tree) -> None:
        if what in self.said:
            raise UnsupportedPython(f"a variant has one {what}")
        self.said[what] = self.number(expression)

    # -- expressions

    def read(self, node: Tree) -> Thing:
        with _Located(self.source.span(node)):
            return TEXT_EXPRESSIONS[node.data](self, *node.children)

    def number(self, node: Tree) -> Value:
        thing = self.read(node)
        with _Located(self.source.span(node)):
            return _value(thing)

    def condition(self, node: Tree) -> Value:
        value = self.number(node)
        with _Located(self.source.span(node)):
            return _bools("if", value)[0]

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
        return _select(condition, self.read(yes), self.read(no))

    def compare(self, *parts: Any) -> Value:
        return _compare([str(x) for x in parts[1::2]], [self.number(x) for x in parts[::2]])

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
            return _value(_item(args[0].sizes, args[1]))
        if str(name) not in FUNCTIONS:
            raise UnknownName(f"`{name}` is not a function of the language")
        return _invoke(str(name), FUNCTIONS[str(name)], *map(_value, args))

    def binary(self, left: Tree, symbol: Any, right: Tree) -> Value:
        return BINARY[str(symbol)](self.number(left), self.number(right))

    def prefix(self, symbol: Any, operand: Tree) -> Value:
        return UNARY[str(symbol)](self.number(operand))


def _infix(symbol: str) -> Callable[[_TextReader, Tree, Tree], Value]:
    return lambda reader, left, right: reader.binary(left, symbol, right)


def _joined(symbol: str) -> Callable[[_TextReader, Tree, Tree], Value]:
    return lambda reader, left, right: _logical(symbol, reader.number(left), reader.number(right))


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


# -- composition -------------------------------------------------------------------------------


def _said(leaf: Leaf, view: View) -> dict[str, Value]:
    """The score and the mask that a source gives, those that are there."""
    source = leaf.source
    if isinstance(source, TextSource):
        said, span = _read_text(source, view), source.span(source.tree)
    else:
        span = source.span(source.node)
        with _Located(span):
            role = "mask" if source.role == "mask" else "score"
            said = {role: _value(_read_python(source, view))}
    with _Located(span):
        return {role: _CHECKS[role](value) for role, value in said.items()}


def _checked_mask(value: Value) -> Value:
    if value.kind is not Kind.BOOL:
        raise TypeMismatch(f"a mask must give a bool, but this is {value.kind.name.lower()}")
    if value.reads_s:
        raise TypeMismatch("a mask cannot depend on the score s")
    return value


def _checked_score(value: Value) -> Value:
    if value.kind is Kind.BOOL:
        raise TypeMismatch("a score must give a float, but this is bool")
    return _convert(value, Kind.FLOAT)


_CHECKS = {"mask": _checked_mask, "score": _checked_score}


def _renamed(view: View, names: tuple[tuple[str, str], ...]) -> View:
    inner = dict(names)
    return replace(view, renamed=lambda name: view.renamed(inner.get(name, name)))


def _keep(origin: Origin, view: View) -> Tensor:
    """Which pairs attend: the masks, and the -inf of where(c, x, -inf) at the root of a score."""
    match origin:
        case Leaf():
            said = _said(origin, view)
            keep = torch.ones((), dtype=torch.bool, device=view.call.device)
            if "mask" in said:
                keep = said["mask"].data
            if "score" in said and said["score"].excluded is not None:
                keep = keep & ~said["score"].excluded
            return keep
        case Both(left, right) | Chained(left, right):
            return _keep(left, view) & _keep(right, view)
        case Either(left, right):
            return _keep(left, view) | _keep(right, view)
        case Negated(part):
            return ~_keep(part, view)
        case Renamed(part, names):
            return _keep(part, _renamed(view, names))


def _score(origin: Origin, view: View) -> Tensor:
    """The score at the pairs of a view; that of a mask is `s`."""
    match origin:
        case Leaf():
            return _said(origin, view).get("score", view.s).data
        case Both(first, second) | Chained(first, second):
            # Of `Both`, one has a score; the other gives `s` back.
            fed = _score_value(_score(first, view), view.call.precision)
            return _score(second, replace(view, s=fed))
        case Either() | Negated():
            return view.s.data
        case Renamed(part, names):
            return _score(part, _renamed(view, names))


# -- attention ---------------------------------------------------------------------------------


def _grid(call: Call) -> dict[str, Tensor]:
    """The indices of all pairs, as they broadcast to [batch, q_heads, q_len, kv_len]."""
    b, h, i, j = (
        torch.arange(n, device=call.device)
        for n in (call.batch, call.q_heads, call.q_len, call.kv_len)
    )
    group = max(1, call.q_heads // max(1, call.kv_heads))
    offset = torch.as_tensor(call.q_offset, device=call.device).long().reshape(-1, 1)
    return {
        "b": b[:, None, None, None],
        "h": h[:, None, None],
        "hk": (h // group)[:, None, None],
        "i": (offset + i)[:, None, :, None],
        "j": j,
    }


def _survey(origin: Origin, call: Call) -> None:
    """Read the source at no pair: `call.exact` learns which index each dimension is read at.

    A dimension of length 1 that is read at exactly b, h, hk, i or j anywhere is broadcast
    everywhere.
    """
    nowhere = torch.zeros(0, dtype=torch.int64, device=call.device)
    s = _score_value(nowhere.double(), call.precision)
    view = View(call, dict.fromkeys(("b", "h", "hk", "i", "j"), nowhere), s)
    with torch.no_grad():
        _keep(origin, view)
        _score(origin, view)


def _mask(origin: Origin, call: Call, grid: Mapping[str, Tensor]) -> Tensor:
    """The mask at all pairs of a grid; bool, broadcasting to the grid's shape."""
    _survey(origin, call)
    # Conditions that read `s` mask nothing, so that any score will do here.
    s = _score_value(torch.zeros((), dtype=torch.float64, device=call.device), call.precision)
    with torch.no_grad():
        return _keep(origin, View(call, grid, s))


def _dense(
    origin: Origin, call: Call, grid: Mapping[str, Tensor], raw: Tensor, keep: Tensor
) -> Tensor:
    """The scores, computed at the attended pairs only; -inf elsewhere."""
    pairs = {name: index.expand(raw.shape)[keep] for name, index in grid.items()}
    s = _score_value(raw[keep], call.precision)
    score = _score(origin, View(call, pairs, s)).expand(s.data.shape)
    return torch.full_like(raw, -math.inf).index_put((keep,), score)


def _softmax(score: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and log-sum-exp of each row; a row of -inf has weights 0."""
    # With one -inf more there is a maximum even without a key.
    none = score.new_full((*score.shape[:-1], 1), -math.inf)
    top = torch.cat([score, none], -1).detach().amax(-1, keepdim=True)
    empty = top == -math.inf
    top = torch.where(empty, 0, top)
    powers = torch.exp(score - top)
    total = torch.where(empty, 1, powers.sum(-1, keepdim=True))
    lse = torch.where(empty, -math.inf, top + torch.log(total))
    return powers / total, lse.squeeze(-1)


def attend(
    origin: Origin,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Mapping[str, Any],
    *,
    scale: float | Tensor | None = None,
    q_offset: int | Tensor = 0,
    kv_lens: Tensor | None = None,
    listed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention as the variant says: the output [B, Hq, Lq, Dv], and the LSE [B, Hq, Lq].

    `listed` are the pairs that a user lets through besides, bool [B or 1, Hq or 1, Lq, Lk].
    """
    batch, q_heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    if kv_heads == 0 or q_heads % kv_heads:
        raise InputMismatch(f"{q_heads} query heads cannot share {kv_heads} kv heads")
    precision = torch.float64 if q.dtype == torch.float64 else torch.float32
    call = Call(given, precision, q.device, batch, q_heads, kv_heads, q_len, kv_len, q_offset)
    grid = _grid(call)
    shape = (batch, q_heads, q_len, kv_len)
    keep = _mask(origin, call, grid).expand(shape)
    keep = keep if listed is None else keep & listed
    k, v = (
        x.double().expand(batch, -1, -1, -1).repeat_interleave(q_heads // kv_heads, 1)
        for x in (k, v)
    )
    if kv_lens is not None:
        # Keys beyond are never read: whatever stands there, 0 times it would be a reading.
        valid = grid["j"] < kv_lens.to(q.device).reshape(-1, 1, 1, 1)
        k, v = (torch.where(valid.transpose(-1, -2), x, 0) for x in (k, v))
        keep = keep & valid
    raw = q.double() @ k.transpose(-1, -2) * (head_dim**-0.5 if scale is None else scale)
    weights, lse = _softmax(_dense(origin, call, grid, raw, keep))
    return (weights @ v).to(q.dtype), lse.to(precision)


def mask_dense(
    origin: Origin,
    q_len: int,
    kv_len: int,
    given: Mapping[str, Any],
    *,
    b: int = 0,
    h: int = 0,
    batch: int = 1,
    q_heads: int = 1,
    kv_heads: int = 1,
    q_offset: int | Tensor = 0,
) -> Tensor:
    """Which pairs of one batch entry and query head attend: bool [q_len, kv_len]."""
    device = next((x.device for x in given.values() if isinstance(x, Tensor)), torch.device("cpu"))
    call = Call(
        given,
        torch.float32,
        device,
        max(batch, b + 1),
        max(q_heads, h + 1),
        kv_heads,
        q_len,
        kv_len,
        q_offset,
    )
    grid = _grid(call)
    one = {"b": grid["b"][b], "h": grid["h"][h], "hk": grid["hk"][h], "j": grid["j"]}
    one["i"] = grid["i"][b if len(grid["i"]) > 1 else 0, 0]
    return _mask(origin, call, one).expand(1, 1, q_len, kv_len)[0, 0].clone()


def scores_dense(
    origin: Origin,
    s: Tensor,
    given: Mapping[str, Any],
    *,
    q_offset: int | Tensor = 0,
    kv_heads: int,
) -> Tensor:
    """The scores made of raw, scaled ones [B, Hq, Lq, Lk]: float64, -inf where masked.

    `s` stands for q in the choice of precision: float64 scores decide bools in float64.
    """
    batch, q_heads, q_len, kv_len = s.shape
    precision = torch.float64 if s.dtype == torch.float64 else torch.float32
    call = Call(given, precision, s.device, batch, q_heads, kv_heads, q_len, kv_len, q_offset)
    grid = _grid(call)
    keep = _mask(origin, call, grid).expand(s.shape)
    return _dense(origin, call, grid, s.double(), keep)

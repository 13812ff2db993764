"""What names, operators and calls mean: the part of the language that both front ends share.

BINARY["<="]               ->  Op.LE
CALLS["clamp"](x, lo, hi)  ->  min(max(x, lo), hi)
"""

from __future__ import annotations

import difflib
import keyword
import math
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ..errors import ReservedName, ScoremodError, Span, TypeMismatch, UnknownName, UnsupportedPython
from ..ir.capture import DIM_OF_INDEX, ELEMENTS, GENERIC, MISSING, Capture, Kind
from ..ir.evaluate import evaluate
from ..ir.expr import Expr, capture, const, index, load, make, postorder, require_bool, size
from ..ir.ops import INT_MAX, INT_MIN, Op, Type

V = TypeVar("V")

RESERVED: dict[str, str] = {
    "s": "the scaled score",
    "b": "the batch index",
    "h": "the query head",
    "hk": "the kv head",
    "i": "the query index",
    "j": "the key index",
    "q_len": "the length of q",
    "kv_len": "the length of k and v",
}
CALL_KEYWORDS = frozenset(
    "q k v return_lse scale q_offset kv_lens tiles deterministic precision backend".split()
)
METHOD_KEYWORDS = frozenset(
    """self batch q_heads device block_m block_n captures head_dim v_head_dim dtype target
    phase""".split()
)
FORBIDDEN = CALL_KEYWORDS | METHOD_KEYWORDS

# Names of numbers: as captures they would hide what the language prints.
NUMBERS = frozenset(("inf", "nan"))

MAX_LOOP = 4096  # steps of constant loops in one variant
MAX_TERMS = 100_000  # operations of a score or mask when written out
MAX_INT = 2**47  # magnitude of captured ints, so that proofs hold modulo 2**64

BINARY: dict[str, Op] = {
    op.value: op
    for op in (
        *(Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.FLOORDIV, Op.MOD, Op.POW),
        *(Op.BITAND, Op.BITOR, Op.BITXOR, Op.SHL, Op.SHR),
    )
}
PREFIX: dict[str, Op] = {"-": Op.NEG, "~": Op.INVERT, "not": Op.NOT}
COMPARE: dict[str, Op] = {"<": Op.LT, "<=": Op.LE, "==": Op.EQ, "!=": Op.NE}
SWAPPED: dict[str, str] = {">": "<", ">=": "<="}


# -- calls -------------------------------------------------------------------------------------

Builder = Callable[..., Expr]


def _fold(op: Op) -> Builder:
    def build(*args: Expr, span: Span | None) -> Expr:
        result = args[0]
        for arg in args[1:]:
            result = make(op, result, arg, span=span)
        return result

    return build


def _op(op: Op) -> Builder:
    return lambda *args, span: make(op, *args, span=span)


def _clamp(
    x: Expr, low: Expr | None = None, high: Expr | None = None, *, span: Span | None
) -> Expr:
    x = x if low is None else make(Op.MAX, x, low, span=span)
    return x if high is None else make(Op.MIN, x, high, span=span)


def _silu(x: Expr, *, span: Span | None) -> Expr:
    return make(Op.MUL, x, make(Op.SIGMOID, x, span=span), span=span)


def _relu(x: Expr, *, span: Span | None) -> Expr:
    return make(Op.MAX, x, const(0, span), span=span)


def _log(x: Expr, base: Expr | None = None, *, span: Span | None) -> Expr:
    result = make(Op.LOG, x, span=span)
    return result if base is None else make(Op.DIV, result, _log(base, span=span), span=span)


def _log10(x: Expr, *, span: Span | None) -> Expr:
    return make(Op.MUL, make(Op.LOG, x, span=span), const(1 / math.log(10)), span=span)


def _isfinite(x: Expr, *, span: Span | None) -> Expr:
    return make(Op.LT, make(Op.ABS, x, span=span), const(math.inf), span=span)


def _isinf(x: Expr, *, span: Span | None) -> Expr:
    return make(Op.EQ, make(Op.ABS, x, span=span), const(math.inf), span=span)


def _isnan(x: Expr, *, span: Span | None) -> Expr:
    return make(Op.NE, x, x, span=span)


def _xor(a: Expr, b: Expr, *, span: Span | None) -> Expr:
    require_bool(a, "`xor`", span)
    require_bool(b, "`xor`", span)
    return make(Op.NE, a, b, span=span)


@dataclass(frozen=True)
class Call:
    """A function of the language: how many arguments it takes and what it builds.

    `keywords` gives the builder's name of each argument that may be given by keyword.
    """

    least: int
    most: int | None
    build: Builder
    keywords: Mapping[str, str] = field(default_factory=dict)


def _unary(op: Op) -> Call:
    return Call(1, 1, _op(op))


CALLS: dict[str, Call] = {
    **{
        op.value: _unary(op)
        for op in (
            *(Op.ABS, Op.ILOG2, Op.FLOAT, Op.INT, Op.BOOL, Op.FLOOR, Op.CEIL, Op.ROUND),
            *(Op.EXP, Op.EXP2, Op.EXPM1, Op.LOG2, Op.LOG1P, Op.SQRT, Op.RSQRT),
            *(Op.TANH, Op.SIGMOID, Op.SOFTPLUS, Op.ERF, Op.SIN, Op.COS),
        )
    },
    "where": Call(3, 3, _op(Op.WHERE)),
    "min": Call(1, None, _fold(Op.MIN)),
    "max": Call(1, None, _fold(Op.MAX)),
    "minimum": Call(2, 2, _op(Op.MIN)),
    "maximum": Call(2, 2, _op(Op.MAX)),
    "clamp": Call(2, 3, _clamp, {"low": "low", "high": "high", "min": "low", "max": "high"}),
    "pow": Call(2, 2, _op(Op.POW)),
    "silu": Call(1, 1, _silu),
    "relu": Call(1, 1, _relu),
    "log": Call(1, 2, _log),
    "log10": Call(1, 1, _log10),
    "isfinite": Call(1, 1, _isfinite),
    "isinf": Call(1, 1, _isinf),
    "isnan": Call(1, 1, _isnan),
    "xor": Call(2, 2, _xor),
    "logical_and": Call(2, 2, _op(Op.AND)),
    "logical_or": Call(2, 2, _op(Op.OR)),
    "logical_not": Call(1, 1, _op(Op.NOT)),
}
CONSTANTS: dict[str, float] = {"inf": math.inf, "nan": math.nan, "pi": math.pi, "e": math.e}


def call(
    name: str,
    args: Sequence[Expr],
    span: Span | None,
    keywords: Mapping[str, Expr] | None = None,
) -> Expr:
    """Build a call of a function of the language."""
    if name not in CALLS:
        raise unknown_function(name, span)
    function, given = CALLS[name], {}
    for keyword_, value in (keywords or {}).items():
        known = function.keywords.get(keyword_)
        if known is None or known in given:
            raise UnsupportedPython(
                f"`{name}` takes no keyword `{keyword_}` here",
                span=value.span or span,
                hint="give arguments by position",
            )
        given[known] = value
    total = len(args) + len(given)
    if total < function.least or (function.most is not None and total > function.most):
        raise TypeMismatch(f"`{name}` takes {_arguments(function)}, not {total}", span=span)
    return function.build(*args, **given, span=span)


def _arguments(function: Call) -> str:
    """How many arguments a function takes, in words."""
    if function.most == function.least:
        return count(function.least, "argument")
    if function.most is None:
        return f"{function.least} or more arguments"
    return f"{function.least} to {function.most} arguments"


def count(number: int, what: str) -> str:
    """`1 index`, `2 dimensions`."""
    plural = "indices" if what == "index" else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def unknown_function(name: str, span: Span | None) -> ScoremodError:
    """The error for a call of something that the language does not have."""
    return UnknownName(
        f"`{name}` is not a function of the language", span=span, hint=_similar(name)
    )


_REDUCTIONS = frozenset(
    """sum mean any all prod cumsum cumprod amax amin argmax argmin std var norm softmax logsumexp
    count_nonzero nansum median""".split()
)


def _similar(name: str) -> str | None:
    if name in ("softmax", "log_softmax", "logsumexp"):
        return "softmax follows by itself; a variant gives the score before it"
    if name in _REDUCTIONS:
        return "a variant sees one pair (i, j); reduce over tables before the call and capture it"
    if name in ("item", "tolist"):
        return "an indexed tensor is a number already"
    return did_you_mean(name, CALLS)


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """A hint with the nearest known name, if one is near."""
    close = difflib.get_close_matches(name, known, 1, 0.7)
    return f"did you mean `{close[0]}`?" if close else None


def binary(symbol: str, left: Expr, right: Expr, span: Span | None) -> Expr:
    """`left symbol right`."""
    return make(BINARY[symbol], left, right, span=span)


def compare(symbols: Sequence[str], operands: Sequence[Expr], spans: Sequence[Span]) -> Expr:
    """A chain `a < b <= c`, as in Python."""
    result: Expr | None = None
    for symbol, left, right, span in zip(symbols, operands, operands[1:], spans, strict=False):
        if symbol in SWAPPED:
            link = make(COMPARE[SWAPPED[symbol]], right, left, span=span)
        else:
            link = make(COMPARE[symbol], left, right, span=span)
        result = link if result is None else make(Op.AND, result, link, span=spans[-1])
    assert result is not None
    return result


def literal(value: bool | int | float, span: Span | None) -> Expr:
    """A number of the text; an int must fit in 64 bits."""
    if isinstance(value, int) and not INT_MIN <= value <= INT_MAX:
        raise TypeMismatch(
            f"the integer {_shown(value)} does not fit in 64 bits",
            span=span,
            hint="write it as a float, e.g. 1e30",
        )
    return const(value, span)


def _shown(value: int) -> str:
    """An int of any size: Python refuses to print thousands of digits."""
    return str(value) if abs(value) < 10**40 else f"of about {value.bit_length() * 3 // 10} digits"


def check_size(root: Expr, span: Span | None) -> Expr:
    """Raise for what would be endless when written out; shared parts count each time."""
    sizes: dict[int, int] = {}
    for node in postorder(root):
        sizes[id(node)] = 1 + sum(sizes[id(a)] for a in node.args)
    if sizes[id(root)] > MAX_TERMS:
        raise UnsupportedPython(
            f"written out, this is more than {MAX_TERMS} operations",
            span=span,
            hint="loops are unrolled; read a table instead",
        )
    return root


def fold_const(value: Expr) -> bool | int | float | None:
    """The value of an expression without names, or None."""
    if value.is_const:
        return value.attr  # type: ignore[no-any-return]
    if value.names:
        return None
    result = evaluate(value, {})
    return result.item()  # type: ignore[no-any-return]


# -- captures ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A captured tensor with the indices given so far: `t`, `t[b]`, `t[b][i]`."""

    name: str
    indices: tuple[Expr, ...]
    span: Span | None


@dataclass
class Uses:
    """How the body uses one capture."""

    capture: Capture
    scalar: Span | None = None  # where it is read without index
    rank: int | None = None
    least: int = 0  # dimensions that its sizes ask for
    exact: list[set[str | None]] = field(default_factory=list)  # per axis: exact index names


class Captures:
    """The captures of one variant while its body is read, in the order of their first mention."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.uses: dict[str, Uses] = {}
        self.given = given  # values for consts, from bind or the call
        self.consts: dict[str, Any] = {}

    def const(self, name: str, default: Any, span: Span | None) -> Expr:
        """A value that is compiled in."""
        value = self.given.get(name, default)
        if not isinstance(value, bool | int | float):
            raise TypeMismatch(
                f"the const `{name}` must be a number, not {type(value).__name__}", span=span
            )
        self.consts[name] = value
        return const(value, span)

    def declare(self, found: Capture) -> None:
        """Add a parameter."""
        check_name(found.name, found.span)
        if found.name in self.uses:
            raise ReservedName(f"`{found.name}` is declared twice", span=found.span)
        self.uses[found.name] = Uses(found)

    def declare_free(self, found: Capture) -> str:
        """Add a free variable and give the name it is called by."""
        name = found.name
        if name in FORBIDDEN or name in RESERVED or name in NUMBERS:
            name = f"free_{name}"
        known = self.uses.get(name)
        if known is None:
            self.uses[name] = Uses(replace(found, name=name))
        elif known.capture.free != found.free:
            raise ReservedName(
                f"two different variables are both called `{name}`",
                span=found.span,
                hint="rename one of them: a capture is given by its name",
            )
        return name

    def scalar(self, table: Table) -> Expr:
        """The capture read as one number."""
        uses = self.uses[table.name]
        uses.scalar = uses.scalar or table.span
        found = uses.capture
        if found.kind is Kind.TENSOR and found.dims:
            raise TypeMismatch(
                f"`{table.name}` is a tensor and must be indexed",
                span=table.span,
                hint=f"it is declared as {found.declaration}: write "
                f"{table.name}[{', '.join(_index_of(d) for d in found.dims)}]",
            )
        return capture(table.name, found.type, table.span)

    def load(self, table: Table) -> Expr:
        """The capture read at indices."""
        uses = self.uses[table.name]
        found = uses.capture
        rank = len(found.dims) if found.dims is not None else uses.rank
        if rank is not None and rank != len(table.indices):
            raise TypeMismatch(
                f"`{table.name}` has {count(rank, 'dimension')}, but is read with "
                f"{count(len(table.indices), 'index')}",
                span=table.span,
                hint=f"it is declared as {found.declaration}"
                if found.dims is not None
                else f"elsewhere it is read with {count(rank, 'index')}",
            )
        if found.kind is Kind.SCALAR and found.element is not None:
            raise TypeMismatch(
                f"`{table.name}` is declared as {found.element} and cannot be indexed",
                span=table.span,
                hint=f"declare it as a tensor, e.g. {table.name}: f32[H]",
            )
        self._note(uses, table.indices)
        return load(table.name, table.indices, found.type, table.span)

    def _note(self, uses: Uses, indices: tuple[Expr, ...]) -> None:
        uses.rank = len(indices)
        if not uses.exact:
            uses.exact = [set() for _ in indices]
        for names, position in zip(uses.exact, indices, strict=True):
            names.add(position.attr if position.op is Op.INDEX else None)

    def size(self, name: str, axis: int, span: Span | None) -> Expr:
        """The length of one dimension; a negative one counts from the last."""
        uses = self.uses[name]
        if uses.capture.kind is Kind.SCALAR and uses.capture.element is not None:
            raise TypeMismatch(
                f"`{name}` is declared as {uses.capture.element} and has no dimensions", span=span
            )
        rank = len(uses.capture.dims) if uses.capture.dims is not None else uses.rank
        if rank is not None and not -rank <= axis < rank:
            raise TypeMismatch(
                f"`{name}` has {count(rank, 'dimension')}, so there is no dimension {axis}",
                span=span,
            )
        if rank is None and axis < 0:
            raise TypeMismatch(
                f"how many dimensions `{name}` has is not known here",
                span=span,
                hint="declare them, or count from the first",
            )
        uses.least = max(uses.least, axis + 1)
        return size(name, axis if rank is None else axis % rank, span)

    def finish(self) -> tuple[Capture, ...]:
        """The captures, with kinds and dimensions that the body made known."""
        return tuple(_finished(uses) for uses in self.uses.values())


def _finished(uses: Uses) -> Capture:
    found = uses.capture
    if found.dims is not None:
        return replace(found, rank=len(found.dims))
    if uses.rank is None and not uses.least:
        # Read as one number: a tensor of no dimensions is a scalar.
        return replace(found, kind=Kind.SCALAR) if uses.scalar is not None else found
    if uses.scalar is not None:
        raise TypeMismatch(
            f"`{found.name}` is indexed elsewhere, so here it must be indexed too",
            span=uses.scalar,
        )
    if uses.rank is None:
        dims: tuple[str | None, ...] = (None,) * uses.least
    else:
        dims = tuple(_dim(names) for names in uses.exact)
    if len(dims) < uses.least:
        raise TypeMismatch(
            f"`{found.name}` is read with {count(len(dims), 'index')}, "
            f"so it has no dimension {uses.least - 1}",
            span=found.span,
        )
    return replace(found, kind=Kind.TENSOR, dims=dims, rank=len(dims))


def _dim(names: set[str | None]) -> str | None:
    """The dimension that is indexed by exactly these."""
    known = names - {None}
    if known == {"i", "j"}:
        return "L"
    return DIM_OF_INDEX.get(known.pop() or "") if len(known) == 1 else None


_INDEX_OF_DIM = {dim: name for name, dim in DIM_OF_INDEX.items()} | {"L": "i"}


def _index_of(dim: str | int | None) -> str:
    """How a dimension would be indexed, for hints."""
    return _INDEX_OF_DIM.get(str(dim), "...")


def check_name(name: str, span: Span | None) -> None:
    """Raise unless a capture may be called so."""
    if name in RESERVED:
        raise ReservedName(f"`{name}` is reserved: it is {RESERVED[name]}", span=span)
    if name in NUMBERS:
        raise ReservedName(f"`{name}` is a number, so no capture can be called so", span=span)
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ReservedName(
            f"a capture cannot be called `{name}`: a call could not give it by keyword", span=span
        )
    if (known := unicodedata.normalize("NFKC", name)) != name:
        # Such names are equal in a kernel, and in the keyword arguments of a call.
        raise ReservedName(
            f"a capture cannot be called `{name}`: Python reads that as `{known}`",
            span=span,
            hint="write it in plain letters",
        )
    if name in FORBIDDEN:
        what = "a keyword of the call" if name in CALL_KEYWORDS else "a keyword of a method"
        raise ReservedName(
            f"a capture cannot be called `{name}`: it is {what}",
            span=span,
            hint=f"rename it, e.g. {name}_",
        )


def check_number(value: bool | int | float, name: str, span: Span | None) -> None:
    """Raise for an int beyond what proofs may assume."""
    if isinstance(value, int) and abs(value) > MAX_INT:
        raise TypeMismatch(
            f"`{name}` is {_shown(value)}; ints may be at most 2**47 in magnitude",
            span=span,
            hint="a float may be larger",
        )


# -- declarations ------------------------------------------------------------------------------


def declared(
    name: str, element: str, dims: tuple[str | int | None, ...] | None, span: Span | None
) -> Capture:
    """A declared capture: a scalar type, or an element type with dimensions.

    `dims` is `("...",)` where any number of dimensions fits.
    """
    if element in GENERIC and dims in (None, ()):
        return Capture(name, Kind.SCALAR, element, span=span)
    if element == "tensor" or (dims is not None and element in ELEMENTS):
        word = None if element == "tensor" else element
        if dims == ():  # a tensor of no dimensions serves as a number
            generic = None if word is None else ELEMENTS[word].value
            return Capture(name, Kind.SCALAR, generic, span=span)
        return Capture(name, Kind.TENSOR, word, _known_dims(dims, span), span=span)
    raise TypeMismatch(
        f"`{element}{'' if dims is None else '[...]'}` is not a type",
        span=span,
        hint=_type_hint(element, dims is not None),
    )


def _known_dims(
    dims: tuple[str | int | None, ...] | None, span: Span | None
) -> tuple[str | int | None, ...] | None:
    if dims is not None and "..." in dims and dims != ("...",):
        raise TypeMismatch(
            "`...` stands for all dimensions, so it stands alone",
            span=span,
            hint="write `_` for one dimension without a name",
        )
    return None if dims == ("...",) else dims


def _type_hint(element: str, has_dims: bool) -> str:
    if element in ELEMENTS and not has_dims:
        generic = ELEMENTS[element].value
        return f"a number is {generic}, a tensor has dimensions, e.g. {element}[H]"
    words = ", ".join(w for w in ELEMENTS if w not in GENERIC)
    return did_you_mean(element, [*ELEMENTS, "tensor"]) or (
        f"numbers are bool, int, float; tensors are tensor[...] or an element ({words}) "
        "with dimensions, e.g. f32[H]"
    )


def with_default(found: Capture, default: Any, span: Span | None) -> Capture:
    """Add a default; an undeclared capture takes its type."""
    if default is MISSING:
        return found
    if not isinstance(default, bool | int | float):
        raise TypeMismatch(
            f"the default of `{found.name}` must be a number, not {type(default).__name__}",
            span=span,
        )
    check_number(default, found.name, span)
    if found.kind is Kind.TENSOR:
        raise TypeMismatch(
            f"the tensor `{found.name}` cannot have a number as default",
            span=span,
            hint="give tensors at the call, or fix them with .bind",
        )
    element = found.element or type(default).__name__
    if (element, type(default)) in _NARROWING:
        raise TypeMismatch(
            f"the default of `{found.name}` is {default!r}, but it is declared as {element}",
            span=span,
            hint=f"declare it as {type(default).__name__}",
        )
    value = {"bool": bool, "int": int, "float": float}[element](default)
    return replace(found, element=element, default=value)


_NARROWING = {("int", float), ("bool", int), ("bool", float)}


# -- results -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lowered:
    """What a source says: a score, a mask (either may be missing) and captures."""

    score: Expr | None
    mask: Expr | None
    captures: tuple[Capture, ...]
    consts: tuple[tuple[str, Any], ...] = ()


def check_mask(mask: Expr, span: Span | None, *, can_use_scores: str) -> Expr:
    """A mask is a bool, free of `s`."""
    if mask.type not in (Type.BOOL, Type.ANY):
        raise TypeMismatch(
            f"a mask must give a bool, but this is {mask.type.value}",
            span=mask.span or span,
            hint=f"compare it, or use {can_use_scores} if it changes the score",
        )
    if mask.reads_s:
        raise TypeMismatch(
            "a mask cannot depend on the score s",
            span=mask.span or span,
            hint="give -inf from a score instead: where(condition, s, -inf)",
        )
    return check_size(mask, span)


def check_score(score: Expr, span: Span | None, *, can_use_masks: str) -> Expr:
    """A score is a float; an int becomes one."""
    if score.type is Type.BOOL:
        raise TypeMismatch(
            "a score must give a float, but this is bool",
            span=score.span or span,
            hint=f"use {can_use_masks} for conditions, or where(condition, s, -inf)",
        )
    return check_size(make(Op.FLOAT, score, span=score.span or span), span)


def reserved(name: str, span: Span | None) -> Expr:
    """A reserved name as an expression."""
    return index(name, span)


def at(value: V, span: Span) -> V:
    """The value of a name, placed where the name is read: errors point at the reader's line."""
    found: Any = value
    if isinstance(found, Expr):
        found = Expr(found.op, found.args, found.attr, found.type, span)
    elif isinstance(found, Table) and not found.indices:
        found = replace(found, span=span)
    return found  # type: ignore[no-any-return]


def unknown(name: str, span: Span | None, known: Iterable[str], hint: str) -> ScoremodError:
    """The error for a name that means nothing here."""
    return UnknownName(
        f"`{name}` is not known here",
        span=span,
        hint=_OTHER_WORDS.get(name) or did_you_mean(name, known) or hint,
    )


_OTHER_WORDS = {
    "true": "write True",
    "false": "write False",
    "none": "there is no such value; a condition is True or False",
    "None": "there is no such value; a condition is True or False",
    "infinity": "write inf",
    "q_idx": "the query index is `i`",
    "kv_idx": "the key index is `j`",
    "score": "the score is `s`",
}


def loop_bounds(bounds: Sequence[Expr], span: Span | None, hint: str) -> range:
    """The steps of a constant loop."""
    numbers = [constant_int(b, b.span or span, "the bounds of range()", hint) for b in bounds]
    if not 1 <= len(numbers) <= 3:
        raise TypeMismatch(f"range() takes one to three bounds, not {len(numbers)}", span=span)
    if len(numbers) == 3 and numbers[2] == 0:
        raise TypeMismatch("the step of range() is 0", span=span)
    return range(*numbers)


def constant_int(value: Expr, span: Span | None, what: str, hint: str | None = None) -> int:
    """A number that is known while compiling: a literal, a const, or made of them."""
    number = fold_const(value)
    if isinstance(number, int) and not isinstance(number, bool):
        return number
    if number is not None:
        raise TypeMismatch(f"{what} must be ints, but this is {value.type.value}", span=span)
    raise UnsupportedPython(f"{what} must be literals or const", span=span, hint=hint)


def too_many_steps(span: Span | None) -> ScoremodError:
    """The error for loops that are too long to unroll."""
    return UnsupportedPython(
        f"the loops take more than {MAX_LOOP} steps",
        span=span,
        hint="loops are unrolled; read a table instead",
    )

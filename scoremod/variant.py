"""A variant as a pure value: a score, a mask and captures, and how variants are put together.

alibi & causal   ->   score s - slopes[h] * (i - j),  mask j <= i
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .errors import CompositionError
from .frontend import python, text
from .frontend.names import Lowered, check_name
from .frontend.source import PythonSource
from .ir.capture import MISSING, Capture, Kind
from .ir.expr import (
    FALSE,
    TRUE,
    Expr,
    capture,
    index,
    load,
    make,
    rewrite,
    size,
    substitute,
)
from .ir.ops import Op, Type
from .ir.show import show
from .origin import Both, Chained, Either, Leaf, Negated, Origin, Renamed

S = index("s")


@dataclass(frozen=True)
class Program:
    """What a variant computes: `score` of s, `mask` free of s, and what both capture."""

    name: str
    score: Expr
    mask: Expr
    captures: tuple[Capture, ...]
    consts: tuple[tuple[str, Any], ...] = ()

    @property
    def is_mask(self) -> bool:
        """Whether it only says which pairs attend."""
        return self.score == S

    def capture(self, name: str) -> Capture | None:
        """The capture of that name."""
        return next((c for c in self.captures if c.name == name), None)

    @property
    def text(self) -> str:
        """The program in the mini-language; it reads back to the same program."""
        parameters = ", ".join(_parameter(c) for c in self.captures)
        lines = [f"variant {self.name}({parameters}) {{"]
        if not self.is_mask:
            lines.append(f"  score {show(self.score)}")
        if self.mask != TRUE or self.is_mask:
            lines.append(f"  mask {show(self.mask)}")
        return "\n".join([*lines, "}"])


def _parameter(found: Capture) -> str:
    default = f" = {found.default!r}" if isinstance(found.default, bool | int | float) else ""
    if found.kind is Kind.TENSOR and found.dims is None:
        return f"{found.name}: {found.element or 'tensor'}[...]"
    return found.declaration + default


def read(origin: Origin, consts: Mapping[str, Any]) -> Program:
    """The program of an origin; `consts` gives values of const parameters by outer name."""
    match origin:
        case Leaf(source):
            if isinstance(source, PythonSource):
                return _program(source.name, python.lower(source, consts))
            return _program(source.name, text.lower(source, consts))
        case Both(left, right):
            return both(read(left, consts), read(right, consts))
        case Either(left, right):
            return either(read(left, consts), read(right, consts))
        case Chained(first, second):
            return chain(read(first, consts), read(second, consts))
        case Negated(part):
            return negate(read(part, consts))
        case Renamed(part, names):
            # An inner name that was changed means something else outside.
            changed = {name for pair in names for name in pair}
            inner = {old: consts[new] for old, new in names if new in consts}
            inner.update({k: v for k, v in consts.items() if k not in changed})
            return rename(read(part, inner), dict(names))


def _program(name: str, lowered: Lowered) -> Program:
    score, mask = lowered.score or S, lowered.mask or TRUE
    score, excluded = split_score(score)
    return Program(
        name if name.isidentifier() else "variant",
        score,
        conjunction(mask, excluded),
        lowered.captures,
        lowered.consts,
    )


# -- masks inside scores -----------------------------------------------------------------------


def split_score(score: Expr) -> tuple[Expr, Expr]:
    """Take `where(c, x, -inf)` at the root of a score out as a mask.

    where(j <= i, s, -inf)   ->   (s, j <= i)
    """
    if score.op is not Op.WHERE or score.args[0].reads_s:
        return score, FALSE if _is_negative_infinity(score) else TRUE
    condition, yes, no = score.args
    (yes, yes_mask), (no, no_mask) = split_score(yes), split_score(no)
    if yes_mask == FALSE and no_mask == FALSE:
        return score, FALSE
    mask = _select(condition, yes_mask, no_mask)
    if no_mask == FALSE:
        return yes, mask
    if yes_mask == FALSE:
        return no, mask
    return make(Op.WHERE, condition, yes, no, span=score.span), mask


def _is_negative_infinity(node: Expr) -> bool:
    return node.is_const and node.type is Type.FLOAT and node.attr == -float("inf")


def _select(condition: Expr, yes: Expr, no: Expr) -> Expr:
    """`yes if condition else no` of masks, as people would write it."""
    if yes == TRUE and no == TRUE:
        return TRUE
    if no == FALSE:
        return conjunction(condition, yes)
    negated = make(Op.NOT, condition, span=condition.span)
    if yes == FALSE:
        return conjunction(negated, no)
    if yes == TRUE:
        return make(Op.OR, condition, no)
    if no == TRUE:
        return make(Op.OR, negated, yes)
    return make(Op.WHERE, condition, yes, no)


def conjunction(left: Expr, right: Expr) -> Expr:
    """`left and right`, without the constants."""
    if left == TRUE or right == FALSE:
        return right
    return left if right == TRUE or left == FALSE else make(Op.AND, left, right)


# -- algebra -----------------------------------------------------------------------------------


def both(left: Program, right: Program) -> Program:
    """`left & right`."""
    if not left.is_mask and not right.is_mask:
        raise CompositionError(
            f"`{left.name}` and `{right.name}` both change the score, so & cannot order them",
            hint=f"{left.name}.then({right.name}) applies {left.name} first",
        )
    return _joined(
        left,
        right,
        "and",
        score=right.score if left.is_mask else left.score,
        mask=conjunction(left.mask, right.mask),
    )


def either(left: Program, right: Program) -> Program:
    """`left | right` of masks."""
    for part in (left, right):
        _require_mask(part, "|")
    return _joined(left, right, "or", score=S, mask=make(Op.OR, left.mask, right.mask))


def negate(part: Program) -> Program:
    """`~part` of a mask."""
    _require_mask(part, "~")
    return replace(part, name=f"not_{part.name}", mask=make(Op.NOT, part.mask))


def chain(first: Program, second: Program) -> Program:
    """`first.then(second)`: second's s is first's score."""
    return _joined(
        first,
        second,
        "then",
        score=substitute(second.score, {"s": first.score}),
        mask=conjunction(first.mask, second.mask),
    )


def rename(part: Program, names: Mapping[str, str]) -> Program:
    """Captures under other names."""
    known = {c.name for c in part.captures} | {name for name, _ in part.consts}
    for old, new in names.items():
        if old not in known:
            raise CompositionError(
                f"`{part.name}` has no capture `{old}`",
                hint=f"it has {', '.join(sorted(known))}" if known else "it has no captures",
            )
        if not isinstance(new, str):
            raise CompositionError(
                f"the new name of `{old}` must be text, not {type(new).__name__}",
                hint=f'write .rename({old}="other_{old}"); .bind({old}=...) gives it a value',
            )
        check_name(new, None)

    captures = tuple(replace(c, name=names.get(c.name, c.name)) for c in part.captures)
    consts = [(names.get(k, k), v) for k, v in part.consts]
    renamed = replace(
        part,
        score=rename_captures(part.score, names),
        mask=rename_captures(part.mask, names),
        captures=merge_captures(captures, ()),
        consts=_merge_consts(consts),
    )
    return _checked(renamed)


def rename_captures(root: Expr, names: Mapping[str, str]) -> Expr:
    """An expression that reads its captures under other names."""

    def rule(node: Expr) -> Expr:
        if node.op is Op.CAPTURE and node.attr in names:
            return capture(names[node.attr], node.type, node.span)
        if node.op is Op.LOAD and node.attr in names:
            return load(names[node.attr], node.args, node.type, node.span)
        if node.op is Op.SIZE and node.attr[0] in names:
            return size(names[node.attr[0]], node.attr[1], node.span)
        return node

    return rewrite(root, rule)


def _require_mask(part: Program, symbol: str) -> None:
    if not part.is_mask:
        raise CompositionError(
            f"`{symbol}` joins masks, but `{part.name}` changes the score",
            hint=f"use {part.name}.then(...) to apply scores one after the other, "
            "or & to add a mask to a score",
        )


def _joined(left: Program, right: Program, word: str, *, score: Expr, mask: Expr) -> Program:
    joined = Program(
        f"{left.name}_{word}_{right.name}",
        score,
        mask,
        merge_captures(left.captures, right.captures),
        _merge_consts((*left.consts, *right.consts)),
    )
    return _checked(joined)


def _merge_consts(pairs: Iterable[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """Consts of both parts; those of equal name must be equal."""
    consts: dict[str, Any] = {}
    for name, value in pairs:
        known = consts.setdefault(name, value)
        if (known, type(known)) != (value, type(value)):
            raise CompositionError(
                f"two different consts are called `{name}`: {known} and {value}",
                hint=f'.rename({name}="other_{name}") one of them',
            )
    return tuple(consts.items())


def _checked(program: Program) -> Program:
    """Raise where one name is both a const and a capture."""
    for name, _ in program.consts:
        found = program.capture(name)
        if found is not None:
            raise CompositionError(
                f"`{name}` is a const in one part and a capture in the other",
                span=found.span,
                hint=f'.rename({name}="other_{name}") one of them',
            )
    return program


# -- captures of both parts --------------------------------------------------------------------


def merge_captures(left: tuple[Capture, ...], right: tuple[Capture, ...]) -> tuple[Capture, ...]:
    """The captures of both; those of equal name must be the same capture."""
    merged: dict[str, Capture] = {}
    for found in (*left, *right):
        known = merged.get(found.name)
        merged[found.name] = found if known is None else _unite(known, found)
    return tuple(merged.values())


def _unite(left: Capture, right: Capture) -> Capture:
    if _conflict(left, right) is not None:
        raise CompositionError(
            f"two different captures are called `{left.name}`: {_conflict(left, right)}",
            span=right.span,
            hint=f'.rename({left.name}="other_{left.name}") one of them',
        )
    dims = left.dims
    if left.dims is not None and right.dims is not None:
        dims = tuple(_unite_dim(a, b) for a, b in zip(left.dims, right.dims, strict=True))
    return replace(left, element=left.element or right.element, dims=dims or right.dims)


def _conflict(left: Capture, right: Capture) -> str | None:
    """What tells two captures of one name apart, or None."""
    if left.free != right.free:
        both_free = left.free is not None and right.free is not None
        return "they read different variables" if both_free else "one is a free variable"
    if left.kind is not right.kind or _differ(left.element, right.element):
        return f"{left.declaration} and {right.declaration}"
    if left.default != right.default or type(left.default) is not type(right.default):
        defaults = ["none" if d is MISSING else repr(d) for d in (left.default, right.default)]
        return f"the defaults are {defaults[0]} and {defaults[1]}"
    if left.kind is Kind.TENSOR and left.dims is not None and right.dims is not None:
        same = len(left.dims) == len(right.dims) and all(
            _unite_dim(a, b) is not _DIFFERENT for a, b in zip(left.dims, right.dims, strict=True)
        )
        if not same:
            return f"{left.declaration} and {right.declaration}"
    return None


def _differ(left: str | None, right: str | None) -> bool:
    return left is not None and right is not None and left != right


_DIFFERENT = "different dimensions"


def _unite_dim(left: str | int | None, right: str | int | None) -> str | int | None:
    """The stronger of two descriptions of one dimension."""
    if left == right or right is None:
        return left
    if left is None:
        return right
    if {left, right} <= {"L", "Lq", "Lk"}:
        return "L"
    return _DIFFERENT

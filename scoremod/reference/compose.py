"""What `&`, `|`, `~`, `.then` and `.rename` do to scores and masks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..errors import TypeMismatch
from ..frontend.source import TextSource
from ..origin import Both, Chained, Either, Leaf, Negated, Origin, Renamed
from .call import Located, View, score_value
from .python import walk_python
from .text import walk_text
from .things import value_of
from .values import Kind, Value, convert


def _said(leaf: Leaf, view: View) -> dict[str, Value]:
    """The score and the mask that a source gives, those that are there."""
    source = leaf.source
    if isinstance(source, TextSource):
        said, span = walk_text(source, view), source.span(source.tree)
    else:
        span = source.span(source.node)
        with Located(span):
            role = "mask" if source.role == "mask" else "score"
            said = {role: value_of(walk_python(source, view))}
    with Located(span):
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
    return convert(value, Kind.FLOAT)


_CHECKS = {"mask": _checked_mask, "score": _checked_score}


def _renamed(view: View, names: tuple[tuple[str, str], ...]) -> View:
    inner = dict(names)
    return replace(view, renamed=lambda name: view.renamed(inner.get(name, name)))


def kept(origin: Origin, view: View) -> Tensor:
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
            return kept(left, view) & kept(right, view)
        case Either(left, right):
            return kept(left, view) | kept(right, view)
        case Negated(part):
            return ~kept(part, view)
        case Renamed(part, names):
            return kept(part, _renamed(view, names))


def score_of(origin: Origin, view: View) -> Tensor:
    """The score at the pairs of a view; that of a mask is `s`."""
    match origin:
        case Leaf():
            return _said(origin, view).get("score", view.s).data
        case Both(first, second) | Chained(first, second):
            # Of `Both`, one has a score; the other gives `s` back.
            fed = score_value(score_of(first, view), view.call.precision)
            return score_of(second, replace(view, s=fed))
        case Either() | Negated():
            return view.s.data
        case Renamed(part, names):
            return score_of(part, _renamed(view, names))

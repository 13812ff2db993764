"""Text cases: one line of tests/cases/NAME.txt is `given  ->  expected`; `#` starts a comment."""

from __future__ import annotations

from pathlib import Path

import pytest

from scoremod.frontend.text import parse_expression
from scoremod.ir.expr import Expr
from scoremod.ir.ops import Type

CASES = Path(__file__).parent / "cases"
# The captures that the cases may read.
TYPES: dict[str, Type] = {
    **dict.fromkeys(("flag", "keep"), Type.BOOL),
    **dict.fromkeys(("n", "m", "window", "doc", "grid"), Type.INT),
    **dict.fromkeys(("x", "y", "cap", "bias", "rel", "slopes"), Type.FLOAT),
}


def cases(name: str) -> pytest.MarkDecorator:
    """Parametrise a test over `given` and `expected`."""
    rows = []
    for number, line in enumerate((CASES / name).read_text(encoding="utf-8").splitlines(), 1):
        text = line.split("#")[0].strip()
        if text:
            given, expected = text.split("->")
            rows.append(pytest.param(given.strip(), expected.strip(), id=f"{name}:{number}"))
    return pytest.mark.parametrize(("given", "expected"), rows)


def parse(text: str) -> Expr:
    """A text of the mini-language, with the captures of the cases."""
    return parse_expression(text, TYPES)

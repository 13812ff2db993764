"""Every table of rules knows every operation."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Collection
from pathlib import Path

import pytest

import scoremod
from scoremod.analysis.interval import INTERVAL
from scoremod.ir.ops import OPS, Op
from scoremod.ir.show import BINDING, PREFIX
from scoremod.passes.derivative import DERIVATIVE

LEAVES = {op for op, record in OPS.items() if record.meaning is None}
BACKENDS = Path(scoremod.__file__).parent / "backends"


def forgotten(table: Collection[Op], expected: Collection[Op] = tuple(Op)) -> list[Op]:
    return [op for op in expected if op not in table]


@pytest.mark.parametrize("op", Op)
def test_the_meaning_is_there(op: Op) -> None:
    assert op in OPS, f"OPS has no record for {op}"


@pytest.mark.parametrize("op", Op)
def test_the_derivative_is_there(op: Op) -> None:
    assert op in DERIVATIVE, f"DERIVATIVE has no rule for {op}"


@pytest.mark.parametrize("op", [op for op in Op if op not in LEAVES])
def test_the_interval_is_there(op: Op) -> None:
    assert op in INTERVAL, f"INTERVAL has no rule for {op}"


@pytest.mark.parametrize("op", [op for op in Op if op not in LEAVES])
def test_the_text_is_there(op: Op) -> None:
    """An operator binds in some way; what is written as a call needs a name that can be called."""
    assert op in BINDING or op in PREFIX or op.value.isidentifier(), f"show has no text for {op}"


def spellings() -> list[str]:
    """The backends that have a table SPELLING, found without importing them."""
    files = sorted(BACKENDS.glob("*.py")) if BACKENDS.exists() else []
    return [file.stem for file in files if _assigns(ast.parse(file.read_text("utf-8")), "SPELLING")]


def _assigns(tree: ast.Module, name: str) -> bool:
    targets = [
        target
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


@pytest.mark.parametrize("backend", spellings())
def test_the_spelling_is_there(backend: str) -> None:
    table = importlib.import_module(f"scoremod.backends.{backend}").SPELLING
    for op in forgotten(table, [op for op in Op if op not in LEAVES]):
        pytest.fail(f"SPELLING of backends/{backend}.py has no rule for {op}")

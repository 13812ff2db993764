"""Imports point one way: a module imports from its own layer and the ones above it in this list."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

LAYERS = """
    errors resources target language
    ir
    frontend passes analysis
    origin
    variant
    plan
    plan_triton
    plan_structure
    plan_triton_backward plan_hopper
    plan_hopper_backward emit
    plan_hopper_wide backends
    render
    cache bundle launch
    binding blocks
    inputs
    gradients ready draw tuned
    structure
    tiles
    attend_cpu attend_triton attend_hopper
    backward_cpu backward_triton
    hopper_rows
    backward_hopper_wide
    backward_hopper
    warm sources attention reference
    warm_backward
    autograd
    library
    ahead explain check notebook
    api
    variants nn
    testing bench tune
    __init__ cli __main__
"""
RANK = {name: rank for rank, row in enumerate(LAYERS.split("\n")) for name in row.split()}

ROOT = Path(__file__).parent.parent / "scoremod"
FILES = {
    ".".join(("scoremod", *file.relative_to(ROOT).with_suffix("").parts)): file
    for file in sorted(ROOT.rglob("*.py"))
}


def room(module: str) -> str:
    """Return the name that LAYERS has for a module: `ir` for scoremod.ir.ops."""
    return module.split(".")[1]


def imports(module: str) -> set[tuple[str, bool]]:
    """Return what a module imports, and whether only inside functions."""
    found: set[tuple[str, bool]] = set()

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        if isinstance(node, ast.Import):
            found.update((alias.name, inside) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            start = ".".join([*base, *filter(None, [node.module])])
            found.update((resolve(start, alias.name), inside) for alias in node.names)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(FILES[module].read_text(encoding="utf-8")), inside=False)
    return found


def resolve(start: str, name: str) -> str:
    """Return the module that `from start import name` loads: start.name where that is one."""
    candidates = (f"{start}.{name}", f"{start}.{name}.__init__", f"{start}.__init__")
    return next((c for c in candidates if c in FILES), start)


def own(module: str) -> set[str]:
    """Return the modules of scoremod that a module imports."""
    names = {name for name, _ in imports(module) if name.split(".")[0] == "scoremod"}
    return {n if n in FILES else f"{n}.__init__" for n in names}


@pytest.mark.parametrize("module", FILES)
def test_imports_point_down(module: str) -> None:
    for other in [module, *own(module)]:
        assert room(other) in RANK, f"{other} has no layer: give it a place in LAYERS"
        assert RANK[room(other)] <= RANK[room(module)], f"{module} imports {other}, above it"


def test_no_import_cycle() -> None:
    TopologicalSorter({module: own(module) for module in FILES}).prepare()


@pytest.mark.parametrize("module", FILES)
def test_heavy_imports_stand_where_they_are_needed(module: str) -> None:
    for name, inside in imports(module):
        match name.split(".")[0]:
            case "triton":
                assert inside, f"{module}: triton is imported inside functions only"
                assert room(module) == "backends", f"{module}: only backends import triton"
            case "torch":
                early = RANK[room(module)] < RANK["launch"]
                assert inside or not early, f"{module}: torch is imported from launch on only"
            case "sympy":
                assert inside, f"{module}: sympy is imported inside functions only"

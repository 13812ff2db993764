"""Fill a template with a plan: text that reads top to bottom, contains all it calls, and runs."""

from __future__ import annotations

import ast
import functools
import re
from typing import Any

import jinja2

from .backends.base import Backend
from .plan import DeviceFunction, Param
from .resources import path, read_text

SHARED = "# -- shared steps"


def render(template: str, plan: Any, backend: Backend) -> str:
    """The text of `template` for `plan`, with the shared steps that it calls."""
    environment = _environment(backend)
    text = environment.get_template(f"{template}.jinja").render(plan=plan)
    return _tidy(_with_shared_steps(text, _steps_of(backend)))


@functools.cache
def _environment(backend: Backend) -> jinja2.Environment:
    """Where a backend's templates are compiled, each once."""

    @jinja2.pass_context
    def spell(context: jinja2.runtime.Context, value: Any) -> Any:
        """What a plan field looks like where a template names it."""
        if isinstance(value, DeviceFunction):
            return backend.define(value, context["plan"])
        if isinstance(value, tuple) and all(isinstance(p, Param) for p in value):
            return "".join(f", {name}" for name in backend.names(value))
        return value

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(path("templates") / backend.templates),
        line_statement_prefix="#%",
        line_comment_prefix="##",
        undefined=jinja2.StrictUndefined,
        finalize=spell,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def _tidy(text: str) -> str:
    """Blank lines as people set them: Jinja's line statements swallow those around them."""
    head, *blocks = re.split(r"\n+(?=@|def |# -- )", text.strip("\n"))
    return "\n\n\n".join([head, *(_sections(b) for b in _decorated(blocks))]) + "\n"


def _decorated(blocks: list[str]) -> list[str]:
    """Decorators joined with what they decorate."""
    joined: list[str] = []
    for block in blocks:
        if joined and joined[-1].startswith("@") and "\n" not in joined[-1]:
            joined[-1] += "\n" + block
        else:
            joined.append(block)
    return joined


def _sections(block: str) -> str:
    """A blank line before each comment that heads a section of a function."""
    lines: list[str] = []
    for line in block.split("\n"):
        opens = lines and not lines[-1].rstrip().endswith((":", "(")) and lines[-1].strip()
        if line.lstrip().startswith("# ") and opens and not lines[-1].lstrip().startswith("#"):
            lines.append("")
        lines.append(line)
    return re.sub(r"\n\n\n+", "\n\n", "\n".join(lines)).rstrip()


# -- shared steps ------------------------------------------------------------------------------


@functools.cache
def _steps(folder: str) -> dict[str, tuple[str, frozenset[str]]]:
    """The functions of a folder's tile.py: text, and the names each one uses."""
    text = read_text(f"templates/{folder}/tile.py")
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            body = "\n".join(lines[first - 1 : node.end_lineno])
            found[node.name] = (body, _names(node))
    return found


def _steps_of(backend: Backend) -> dict[str, tuple[str, frozenset[str]]]:
    """A backend's own steps, after those that it borrows."""
    borrowed = _steps(backend.borrowed) if backend.borrowed else {}
    own = _steps(backend.templates)
    kept = {name: step for name, step in borrowed.items() if name not in own}
    return {name: (backend.translate(body), names) for name, (body, names) in kept.items()} | own


def _names(node: ast.AST) -> frozenset[str]:
    """The names that a function, or each function of a text, reads and does not give a value."""
    if isinstance(node, ast.Module):
        return frozenset().union(*map(_names, node.body))
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    own = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    own |= {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
    return frozenset(n.id for n in names) - own


def _with_shared_steps(text: str, steps: dict[str, tuple[str, frozenset[str]]]) -> str:
    """Copy in the steps that the text calls, and those that they call, in tile.py's order."""
    needed: set[str] = set()
    todo = [_names(ast.parse(text))]
    while todo:
        fresh = (todo.pop() & steps.keys()) - needed
        needed |= fresh
        todo.extend(steps[name][1] for name in fresh)
    bodies = [body for name, (body, _) in steps.items() if name in needed]
    block = "\n\n\n".join([SHARED, *bodies])
    return text.replace(SHARED, block)

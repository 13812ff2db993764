"""The user's text with its syntax tree and places, before any meaning is given to it.

A Python function is found in its file by position, so that lambdas, nested functions and notebook
cells work and every error can point at the user's own line.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import itertools
import linecache
import os
import re
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import lark

from ..errors import LanguageError, SourceUnavailable, Span, UnsupportedPython
from ..ir.capture import FreeVariable
from ..resources import read_text

MAX_TEXT = 200_000  # characters of mini-language text; a variant is a page, not a book
MAX_NESTING = 200  # brackets inside brackets
MAX_WORDS = 6_000  # names, numbers and signs: read at some 0.1 ms each, so within a second

MAX_NODES = 12_000  # of a function's syntax tree, for the same reason

FunctionNode = ast.FunctionDef | ast.Lambda


def display_path(file: str) -> str:
    """The file as a person in the current folder would name it."""
    return _from_folder(file, os.getcwd())


@functools.lru_cache(maxsize=256)
def _from_folder(file: str, folder: str) -> str:
    try:
        relative = os.path.relpath(file, folder)
    except ValueError:  # another drive of Windows
        return file
    return file if relative.startswith("..") else relative


# -- Python ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PythonSource:
    """A function, its syntax tree, and the way to read its free variables.

    `roles` maps parameters to reserved names where they are not called so (`from_flex`).
    """

    function: types.FunctionType = field(compare=False)
    node: FunctionNode = field(compare=False)
    file: str
    line: int
    column: int
    name: str
    role: str  # "score" or "mask"
    roles: tuple[tuple[str, str], ...] = ()
    owner: Any = field(default=None, compare=False)  # `self` of a callable object
    fixed: tuple[tuple[str, Any], ...] = field(default=(), compare=False)  # of a partial

    @property
    def text(self) -> str:
        """The function as the user wrote it."""
        lines = linecache.getlines(self.file)
        chosen = lines[self.node.lineno - 1 : self.node.end_lineno]
        return "".join(chosen).rstrip()

    def span(self, node: ast.AST) -> Span:
        """The place of a node of this function's tree."""
        kind = "mask" if self.role == "mask" else "variant"
        return _span(self.file, node, f"{kind} `{self.name}`")

    def parameters(self) -> Iterator[inspect.Parameter]:
        """The parameters that are neither `self` nor fixed by a partial."""
        fixed = {name for name, _ in self.fixed}
        signature = inspect.signature(self.function)
        for position, parameter in enumerate(signature.parameters.values()):
            is_self = self.owner is not None and position == 0
            if not is_self and parameter.name not in fixed:
                yield parameter

    @property
    def self_name(self) -> str | None:
        """What the function calls its own object, if it is a method."""
        if self.owner is None:
            return None
        return next(iter(inspect.signature(self.function).parameters))

    def free(self, name: str) -> FreeVariable | None:
        """The free variable of that name: partial argument, closure cell, global or builtin."""
        fixed = dict(self.fixed)
        if name in fixed:
            value = fixed[name]
            return FreeVariable(("partial", id(value), name), lambda: value, f"argument `{name}`")
        return free_variable(self.function, name)


def free_variable(function: types.FunctionType, name: str) -> FreeVariable | None:
    """Where a function finds a name that is not its own."""
    code = function.__code__
    if name in code.co_freevars and function.__closure__ is not None:
        cell = function.__closure__[code.co_freevars.index(name)]
        return FreeVariable(("cell", id(cell)), functools.partial(_read_cell, cell), name)
    scope = function.__globals__
    if name in scope:
        return FreeVariable(("global", id(scope), name), lambda: scope[name], name)
    if hasattr(builtins, name):
        return FreeVariable(("builtin", name), lambda: getattr(builtins, name), name)
    return None


def _read_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the name is assigned later than the variant is declared
        return None


def attribute(owner: Any, name: str) -> FreeVariable:
    """`self.name` of a callable object."""
    return FreeVariable(("attribute", id(owner), name), lambda: getattr(owner, name), f".{name}")


def _span(file: str, node: ast.AST, owner: str) -> Span:
    line: int = getattr(node, "lineno", 1)
    text = _stripped(linecache.getline(file, line))
    start = _characters(text, getattr(node, "col_offset", 0))
    same_line = getattr(node, "end_lineno", line) == line
    end = _characters(text, getattr(node, "end_col_offset", 0)) if same_line else len(text)
    return Span(display_path(file), line, start + 1, end + 1, text, owner)


@functools.lru_cache(maxsize=64)
def _stripped(line: str) -> str:
    """Without its end; one string for all the places of a long line."""
    return line.rstrip("\n")


def _characters(line: str, offset: int) -> int:
    """ast counts bytes of UTF-8; people count characters."""
    if line.isascii():
        return min(offset, len(line))
    return len(line.encode()[:offset].decode(errors="ignore"))


def read_python(
    function: Callable[..., Any], role: str, roles: tuple[tuple[str, str], ...] = ()
) -> PythonSource:
    """Find a function's syntax tree; unwraps partials, methods and callable objects."""
    fixed: dict[str, Any] = {}
    label = _label(function)
    while isinstance(function, functools.partial):
        fixed = {**_partial_arguments(function), **fixed}
        function = function.func
    owner: Any = None
    if hasattr(function, "mask_dense"):
        raise SourceUnavailable(
            f"`{label}` is a variant already", hint="join variants with &, |, ~ and .then"
        )
    if inspect.isclass(function):
        raise SourceUnavailable(
            f"`{label}` is a class, so there is no function to read", hint="give an object of it"
        )
    if not isinstance(function, types.FunctionType | types.MethodType):
        call: Any = getattr(type(function), "__call__", None)  # noqa: B004 - the method is wanted
        if not isinstance(call, types.FunctionType):
            raise SourceUnavailable(
                f"`{label}` is not a Python function, so there is no source to read",
                hint="give a function written with def or lambda, or text to scoremod.parse",
            )
        owner = function
        function = call
    if isinstance(function, types.MethodType):
        owner, function = function.__self__, function.__func__
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType):
        raise SourceUnavailable(f"`{label}` wraps something that is not a Python function")
    node = find_node(function)
    return PythonSource(
        function,
        node,
        function.__code__.co_filename,
        node.lineno,
        node.col_offset,
        label,
        role,
        roles,
        owner,
        tuple(fixed.items()),
    )


def _label(function: Any) -> str:
    if isinstance(function, functools.partial):
        return _label(function.func)
    name = getattr(function, "__name__", None)
    if name == "<lambda>":
        return "lambda"
    return name if isinstance(name, str) else type(function).__name__


def _partial_arguments(function: functools.partial[Any]) -> dict[str, Any]:
    names = list(inspect.signature(function.func).parameters)
    return {**dict(zip(names, function.args, strict=False)), **function.keywords}


def find_node(function: types.FunctionType) -> FunctionNode:
    """The syntax tree of a function, from the file that it was defined in."""
    code = function.__code__
    functions = _functions_in(code.co_filename)
    if code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise UnsupportedPython(f"`{code.co_name}` is async, which has no meaning in a variant")
    found = [n for n in functions if _matches(n, code)]
    if len(found) > 1:
        found = [n for n in found if _contains(n, code)]
    if not found:
        name = "this lambda" if code.co_name == "<lambda>" else f"`{code.co_name}`"
        raise SourceUnavailable(
            f"the source of {name} cannot be read (it says {display_path(code.co_filename)})",
            hint="define it in a file or a notebook cell, or write it in the mini-language: "
            "scoremod.parse(text)",
        )
    # Nested lambdas on one line: the innermost that holds all of the code.
    node = min(found, key=lambda n: (n.end_lineno or 0, (n.end_col_offset or 0) - n.col_offset))
    if _size(node) > MAX_NODES:
        raise UnsupportedPython(
            f"`{code.co_name}` is too long: its syntax tree has more than {MAX_NODES} nodes",
            hint="read tables instead of long chains",
        )
    return node


@functools.lru_cache(maxsize=64)
def _size(node: FunctionNode) -> int:
    """How many nodes a tree has, as far as that matters."""
    return sum(1 for _ in itertools.islice(ast.walk(node), MAX_NODES + 1))


def _functions_in(file: str) -> tuple[FunctionNode, ...]:
    """The functions of a file as it is now; none where it cannot be read."""
    linecache.checkcache(file)
    return _functions("".join(linecache.getlines(file)))


@functools.lru_cache(maxsize=64)
def _functions(text: str) -> tuple[FunctionNode, ...]:
    """Kept: to walk a module for each place in a helper takes seconds."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    return tuple(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Lambda))


def _matches(node: FunctionNode, code: types.CodeType) -> bool:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)])
    arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    count = code.co_argcount + code.co_kwonlyargcount
    return (
        first == code.co_firstlineno
        and getattr(node, "name", "<lambda>") == code.co_name
        and tuple(a.arg for a in arguments) == code.co_varnames[:count]
    )


def _contains(node: FunctionNode, code: types.CodeType) -> bool:
    """Whether the code's instructions all lie inside the node."""
    start = (node.lineno, node.col_offset)
    end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
    for line, end_line, column, end_column in code.co_positions():
        if None in (line, end_line, column, end_column) or (line, column) == (node.lineno, 0):
            continue
        if (line, column) < start or (end_line, end_column) > end:
            return False
    return True


# -- mini-language -----------------------------------------------------------------------------


@dataclass(frozen=True)
class TextSource:
    """Mini-language text and its parse tree."""

    text: str
    file: str
    tree: lark.Tree[Any] = field(compare=False)
    name: str = "variant"

    def span(self, node: lark.Tree[Any] | lark.Token) -> Span:
        """The place of a tree or token of this text."""
        place = node.meta if isinstance(node, lark.Tree) else node
        line = getattr(place, "line", None) or 1
        same_line = getattr(place, "end_line", line) == line
        text = _line(self.text, line)
        end = getattr(place, "end_column", None) if same_line else None
        column = getattr(place, "column", None) or 1
        return Span(self.file, line, column, end or len(text) + 1, text, f"variant `{self.name}`")


def _line(text: str, number: int) -> str:
    lines = text.split("\n")
    return lines[number - 1].rstrip("\r") if number <= len(lines) else ""


@functools.cache
def parser(start: str = "start") -> lark.Lark:
    """The grammar's parser; `start` may also be `expression`."""
    return lark.Lark(
        read_text("grammar/scoremod.lark"),
        parser="lalr",
        start=start,
        propagate_positions=True,
        maybe_placeholders=True,
    )


def read_text_source(
    text: str, file: str = "<text>", start: str = "start", max_words: int = MAX_WORDS
) -> TextSource:
    """Parse mini-language text; a mistake says what was expected."""
    if not isinstance(text, str):
        raise LanguageError(
            f"expected text, but this is {type(text).__name__}",
            hint='give the text itself: scoremod.parse(Path("alibi.smod").read_text())',
        )
    if len(text) > MAX_TEXT:
        raise LanguageError(
            f"the text has {len(text)} characters; {MAX_TEXT} are allowed",
            hint="a variant is a page, not a book: read tables instead of long chains",
        )
    _check_characters(text, file)
    _check_nesting(text, file)
    _check_words(text, max_words)
    try:
        tree: lark.Tree[Any] = parser(start).parse(text)
    except lark.exceptions.UnexpectedInput as error:
        raise _language_error(text, file, error) from None
    name = next((str(t) for t in tree.find_data("variant") for t in t.children[:1] if t), "variant")
    return TextSource(text, file, tree, name)


def _check_nesting(text: str, file: str) -> None:
    depth = 0
    for number, line in enumerate(text.split("\n"), 1):
        for column, character in enumerate(line.split("#")[0], 1):
            depth += (character in "([{") - (character in ")]}")
            if depth > MAX_NESTING:
                span = Span(file, number, column, column + 1, line)
                raise LanguageError(f"brackets are nested more than {MAX_NESTING} deep", span=span)


def _check_characters(text: str, file: str) -> None:
    """Also in comments, which stand at the head of kernels."""
    found = re.search(r"[\x00-\x08\x0b\x0e-\x1f\x7f\ud800-\udfff]", text)
    if found is not None:
        line = text.count("\n", 0, found.start()) + 1
        place = f"line {line} of {file}"
        raise LanguageError(f"{place} has the character {found[0]!r}, which is no text")


def _check_words(text: str, most: int) -> None:
    words = sum(1 for _ in re.finditer(r"\w+|[^\w\s]", re.sub(r"#[^\n]*", "", text)))
    if words > most:
        raise LanguageError(
            f"the text has {words} names, numbers and signs; {most} are allowed",
            hint="a variant is a page, not a book: read tables instead of long chains",
        )


# -- what was expected -------------------------------------------------------------------------

# What the grammar's tokens are called in messages; tokens left out stand for themselves.
_TOKEN_WORDS = {
    "NAME": "a name",
    "LPAR": "(",
    "RPAR": ")",
    "LSQB": "[",
    "RSQB": "]",
    "LBRACE": "{",
    "RBRACE": "}",
    "COMMA": ",",
    "COLON": ":",
    "EQUAL": "=",
    "ELLIPSIS": "...",
    "INTEGER": "a number",
    "REAL": "a number",
    "$END": "the end of the text",
}
# Several tokens that go by one word: the word, the tokens that tell, and those that it stands for.
_GROUPS: tuple[tuple[str, frozenset[str], frozenset[str]], ...] = tuple(
    (word, frozenset(tell.split()), frozenset(f"{tell} {others}".split()))
    for word, tell, others in (
        (
            "an operator",
            "OR",
            "COMPARE SHIFT ADDITIVE MULTIPLICATIVE VBAR CIRCUMFLEX AMPERSAND _POWER AND IF LSQB "
            "LPAR",
        ),
        ("a statement", "LET SCORE MASK", "FOR NAME SEMICOLON"),
        ("an expression", "SIGN NAME", "LPAR NOT TRUE FALSE INTEGER REAL"),
        ("a number", "INTEGER REAL", "TRUE FALSE MINUS NUMBER"),
    )
)


def _words(expected: Collection[str]) -> str:
    """The expected tokens in words, those that go by one word together."""
    words, rest = [], set(expected)
    for word, tell, stands_for in _GROUPS:
        if tell <= rest:
            words.append(word)
            rest -= stands_for
    words += sorted({_TOKEN_WORDS.get(token, token.lower()) for token in rest} - set(words))
    quoted = [w if " " in w else f"`{w}`" for w in words] or ["something else"]
    return " or ".join(filter(None, (", ".join(quoted[:-1]), quoted[-1])))


def _language_error(text: str, file: str, error: lark.exceptions.UnexpectedInput) -> LanguageError:
    token = getattr(error, "token", None)
    if not text.strip():
        return LanguageError("the text is empty", hint=_BEGIN)
    if token is not None and token.type == "$END":
        line = text.count("\n") + 1
        found, position, column, got = "", len(text), len(_line(text, line)) + 1, "the text ends"
    else:
        position = error.pos_in_stream or 0
        line, column = max(error.line, 1), max(error.column, 1)
        found = text[position] if token is None else str(token)
        got = f"this is {_quoted(found)}"
    expected = getattr(error, "accepts", None) or getattr(error, "expected", None)
    expected = set(expected or getattr(error, "allowed", None) or ())
    if token is None and "ADDITIVE" in expected:
        # What an unknown character may be instead is known roughly: more than fits.
        expected = {"OR", "RBRACE"}
    span = Span(file, line, column, column + max(1, len(found)), _line(text, line))
    hint = _hint(text[:position], found, text[position : position + 2], expected)
    return LanguageError(f"expected {_words(expected)}, but {got}", span=span, hint=hint)


def _quoted(found: str) -> str:
    return f"`{found}`" if found.isprintable() else repr(found)


_BEGIN = "begin with `variant name(captures) {`"
_PYTHON = "this is Python; decorate a function with @scoremod.variant instead"
# Usual causes: by the word or sign that is not expected, or that stands before it.
_CAUSES = {
    "variant": "a text holds one variant; put the others in texts of their own",
    "def": _PYTHON,
    "import": _PYTHON,
    "from": _PYTHON,
    "@": _PYTHON,
    "return": "say `score` or `mask` instead",
    "if": "there is no if statement; write `a if condition else b`",
    "elif": "there is no if statement; write `a if condition else b`",
    "else": "there is no if statement; write `a if condition else b`",
    "while": "use `for k in range(8) { ... }`",
    "&&": "write `and`",
    "||": "write `or`",
    "!": "write `not`",
    "<>": "write `!=`",
    "?": "write `a if condition else b`",
    "=": "compare with `==`; a value is named by a statement of its own: let x = ...",
    ".": "there are no attributes; the length of a dimension is size(table, 0)",
    ":": "a block stands in braces: { ... }",
    "'": "there is no text in a variant",
    '"': "there is no text in a variant",
    "*": "name each capture: it is given by its name",
}


def _hint(before: str, found: str, ahead: str, expected: Collection[str]) -> str | None:
    """The usual cause of a mistake, if there is one."""
    if expected == {"VARIANT"}:
        return _CAUSES.get(found, _BEGIN)
    if "RBRACE" in expected and not found:
        return "a `{` is not closed"
    if expected == {"EQUAL"}:  # a name where a statement begins
        name = (re.findall(r"\w+", before) or ["it"])[-1]
        return _CAUSES.get(name, f"is an operator missing before `{name}`?")
    if found == "=" and before.endswith("="):  # `b == 0` where a statement begins
        name = (re.findall(r"\w+", before) or ["it"])[-1]
        return f"is an operator missing before `{name}`?"
    for cause in (before[-1:] + ahead[:1], ahead, found):
        is_alone = cause != "*" or "CONST" in expected
        if cause in _CAUSES and is_alone:
            return _CAUSES[cause]
    if found in (")", "]", "}") and "RBRACE" in expected:
        return f"this `{found}` closes nothing"
    return None

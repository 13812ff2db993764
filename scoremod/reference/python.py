"""The walker over Python's syntax tree."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import math
import re
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import language
from ..errors import TypeMismatch, UnknownName, UnsupportedPython
from ..frontend.source import PythonSource, attribute, read_python
from ..ir.capture import FreeVariable
from .call import RESERVED, Call, Located, View
from .captures import MISSING, Declared, Table, declared_as, parameter_value, read_capture
from .operations import BINARY, FUNCTIONS, UNARY, Operation, comparison, invoke, logarithm, logical
from .things import Local, Opaque, Thing, Unset, item_of, range_of, select, value_of
from .values import Kind, Value, apply, as_known, bools, convert, floats


@dataclass(frozen=True)
class Bind:
    """A step of an unrolled loop: the target takes this value."""

    target: ast.expr
    value: Thing


Statement = ast.stmt | Bind


def walk_python(source: PythonSource, view: View) -> Thing:
    """What a function returns at the pairs of a view."""
    roles = dict(source.roles)
    reader = PythonReader(source, view, source.node, {})
    for parameter in source.parameters():
        node = reader.annotated(parameter.name)
        role = roles.get(parameter.name, parameter.name)
        with Located(source.span(node or source.node)):
            if node is None or parameter.kind in _VARIADIC:
                raise UnsupportedPython(f"`*{parameter.name}` cannot be a capture")
            if role in RESERVED:
                thing: Thing = view.reserved(role)
            else:
                declared = _annotation(node.annotation)
                thing = parameter_value(role, declared, parameter.default, view)
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
    return declared_as(found[1], None if found[2] is None else found[2].split(","))


class PythonReader:
    """Reads one function body; `names` are its local names at this point."""

    def __init__(
        self,
        source: PythonSource,
        view: View,
        node: ast.FunctionDef | ast.Lambda,
        names: dict[str, Thing],
        parent: PythonReader | None = None,
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
            with Located(self.source.span(self.node.body[-1])):
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
        with Located(self.source.span(statement)):
            if type(statement) not in STATEMENTS:
                raise UnsupportedPython(f"`{type(statement).__name__}` has no meaning here")
            STATEMENTS[type(statement)](self, statement)

    def unrolled(self, node: ast.For) -> Iterator[Statement]:
        """A constant loop is its body, once for every step."""
        with Located(self.source.span(node)):
            steps = self.steps(node.iter)
        for step in steps:
            yield Bind(node.target, step)
            yield from node.body
        yield from node.orelse

    def steps(self, node: ast.expr) -> Sequence[Thing]:
        if isinstance(node, ast.Call):
            function = self.read(node.func)
            if isinstance(function, Opaque) and function.value is range:
                return range_of([self.read(a) for a in node.args], self.call)
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
        with Located(self.source.span(node.test)):
            return select(condition, yes, no)

    def merged(self, condition: Value, node: ast.If) -> None:
        """An `if` that only assigns: every name takes its value from its own branch."""
        yes, _ = self.branch(node.body)
        no, _ = self.branch(node.orelse)
        with Located(self.source.span(node.test)):
            for name in yes.keys() | no.keys():
                a, b = yes.get(name, Unset()), no.get(name, Unset())
                unset = isinstance(a, Unset) or isinstance(b, Unset)
                self.names[name] = Unset() if unset else select(condition, a, b)

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
        left = value_of(self.lookup(node.target.id))
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
            return read_capture(outer, value, declared or Declared(), self.call)
        if value is None and outer not in self.call.given:
            raise UnknownName(f"`{name}` has no value yet", hint="assign it before the call")
        return Opaque(value, found)

    # -- expressions

    def read(self, node: ast.expr) -> Thing:
        with Located(self.source.span(node)):
            if type(node) not in EXPRESSIONS:
                raise UnsupportedPython(f"`{type(node).__name__}` has no meaning in a variant")
            return EXPRESSIONS[type(node)](self, node)

    def number(self, node: ast.expr) -> Value:
        thing = self.read(node)
        with Located(self.source.span(node)):
            return value_of(thing)

    def condition(self, node: ast.expr) -> Value:
        value = self.number(node)
        with Located(self.source.span(node)):
            return bools("if", value)[0]

    def constant(self, node: ast.Constant) -> Value:
        if not isinstance(node.value, bool | int | float):
            raise UnsupportedPython(f"{node.value!r} has no meaning in a variant")
        return self.call.literal(node.value)

    def conditional(self, node: ast.IfExp) -> Thing:
        condition = self.condition(node.test)
        if condition.known:
            return self.read(node.body if condition.data.item() else node.orelse)
        return select(condition, self.read(node.body), self.read(node.orelse))

    def compare(self, node: ast.Compare) -> Value:
        for op in node.ops:
            if type(op) not in _COMPARE:
                raise UnsupportedPython("`is` and `in` have no meaning between numbers")
        operands = [self.number(x) for x in (node.left, *node.comparators)]
        return comparison([_COMPARE[type(op)] for op in node.ops], operands)

    def subscript(self, node: ast.Subscript) -> Thing:
        thing = self.read(node.value)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            if isinstance(thing, Table):
                thing = thing.at(self.number(part), from_end=_is_negative_literal(part))
            elif isinstance(thing, Value):
                raise TypeMismatch("only a captured tensor can be indexed")
            else:
                thing = item_of(self.unpacked(thing), self.read(part))
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
            return as_known(self.compiled_in(*(self.read(a) for a in node.args)))
        is_python = isinstance(function, types.FunctionType | types.MethodType)
        has_call = isinstance(getattr(type(function), "__call__", None), types.FunctionType)  # noqa: B004
        is_python = is_python or isinstance(function, functools.partial)
        if isinstance(function, type) or not (is_python or has_call):
            raise UnsupportedPython(f"`{name}` cannot be called in a variant")
        return self.helper(read_python(function, self.source.role), node)

    def operated(self, name: str, operation: Operation, node: ast.Call, *first: Value) -> Value:
        args, keywords = self.arguments(node)
        return invoke(
            name,
            operation,
            *first,
            *map(value_of, args),
            **{k: value_of(v) for k, v in keywords.items()},
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
                return convert(value_of(receiver), _kind_of_dtype(dtype.value))
        if name not in METHODS:
            raise UnsupportedPython(f"`.{name}()` has no meaning here")
        return self.operated(name, METHODS[name], node, value_of(receiver))

    def size(self, table: Table, *axes: Thing) -> Value:
        if len(axes) != 1:
            raise TypeMismatch("size takes one dimension")
        return value_of(item_of(table.sizes, axes[0]))

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
            inspect.Parameter(x.arg, kind, default=self.read(d) if d else MISSING)
            for x, d, kind in zip(
                (*positional, *a.kwonlyargs), (*defaults, *a.kw_defaults), kinds, strict=True
            )
        )

    def inlined(self, function: Local, node: ast.Call) -> Thing:
        scope = function.scope
        names = self.bound(function.parameters, node)
        return PythonReader(
            scope.source, self.view, function.node, names, scope, self.active
        ).result()

    def helper(self, source: PythonSource, node: ast.Call) -> Thing:
        """A function from elsewhere, inlined."""
        reader = PythonReader(source, self.view, source.node, {}, None, self.active)
        parameters = []
        for p in source.parameters():
            if p.kind in _VARIADIC:
                raise UnsupportedPython("helpers cannot take *args or **kwargs")
            if p.default is not MISSING:
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


STATEMENTS: dict[type[ast.stmt], Callable[[PythonReader, Any], None]] = {
    ast.Assign: PythonReader.assign_all,
    ast.AnnAssign: PythonReader.annotated_assign,
    ast.AugAssign: PythonReader.augmented,
    ast.FunctionDef: PythonReader.define,
    ast.Expr: PythonReader.ignored,
    ast.Pass: PythonReader.ignored,
}
EXPRESSIONS: dict[type[ast.expr], Callable[[PythonReader, Any], Thing]] = {
    ast.Constant: PythonReader.constant,
    ast.Name: lambda reader, node: reader.lookup(node.id),
    ast.BinOp: lambda reader, node: _binary(
        node.op, reader.number(node.left), reader.number(node.right)
    ),
    ast.UnaryOp: lambda reader, node: UNARY[_UNARY[type(node.op)]](reader.number(node.operand)),
    ast.BoolOp: lambda reader, node: logical(
        "and" if isinstance(node.op, ast.And) else "or", *map(reader.number, node.values)
    ),
    ast.Compare: PythonReader.compare,
    ast.IfExp: PythonReader.conditional,
    ast.Subscript: PythonReader.subscript,
    ast.Attribute: PythonReader.attribute,
    ast.Call: PythonReader.called,
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
    "log": logarithm,
    "fabs": lambda x: FUNCTIONS["abs"](convert(x, Kind.FLOAT)),
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
    math.pow: lambda x, y: apply(torch.pow, *floats(x, y)),
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

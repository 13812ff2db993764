"""Python functions to IR: the syntax tree is read, the function is never called.

def window(i, j, w: int = 8): return 0 <= i - j < w
    ->   mask  0 <= i - j and i - j < w
"""

from __future__ import annotations

import ast
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ReservedName, Span, TypeMismatch, UnknownName, UnsupportedPython
from ..ir.capture import ELEMENTS, MISSING, Capture, FreeVariable, Kind
from ..ir.expr import Expr, const, make, require_bool
from ..ir.ops import Op, Type
from ..language import Const, Function
from ..language import const as const_marker
from . import names
from .names import Captures, Lowered, Table
from .source import PythonSource, attribute, find_node, free_variable

# What a name may stand for while a body is read.
Value = Any  # Expr | Table | Object | LocalFunction | tuple[Value, ...]
Environment = dict[str, Value]


@dataclass(frozen=True)
class Object:
    """A Python object that is not a number or tensor: a module, a function, a tuple, ..."""

    value: Any
    place: FreeVariable


@dataclass(frozen=True)
class LocalFunction:
    """A function or lambda defined inside the body, with the names it can see."""

    node: ast.FunctionDef | ast.Lambda
    scope: Environment


def lower(source: PythonSource, consts: Mapping[str, Any]) -> Lowered:
    """Read a function as a score or a mask; `consts` overrides values of const parameters."""
    captures = Captures(consts)
    reader = _Reader(source, captures, calls=(source.function.__code__,))
    environment = reader.parameters()
    try:
        result = reader.run(source.node, environment)
    except RecursionError:
        raise UnsupportedPython(
            "this is nested too deeply", span=source.span(source.node), hint=_SHORTER
        ) from None
    span = source.span(source.node)
    if source.role == "mask":
        mask = names.check_mask(result, span, can_use_scores="@scoremod.variant")
        return Lowered(None, mask, captures.finish(), tuple(captures.consts.items()))
    score = names.check_score(result, span, can_use_masks="@scoremod.mask")
    return Lowered(score, None, captures.finish(), tuple(captures.consts.items()))


_SHORTER = "give parts names of their own, or read a table instead of a long chain"
_CONST_HINT = "mark the value with scoremod.const(...); it is then compiled in"
MAX_STATEMENTS = 20_000  # read in one variant, over all loops, branches and helpers

# -- parameters --------------------------------------------------------------------------------


def _annotation(node: ast.expr | None, name: str, span: Span) -> Capture:
    """The capture that an annotation declares."""
    if node is None:
        return Capture(name, Kind.SCALAR, span=span)
    text = node.value if isinstance(node, ast.Constant) else ast.unparse(node)
    if not isinstance(text, str):
        raise TypeMismatch(f"`{text!r}` is not a type", span=span, hint='write e.g. "f32[H]"')
    if text.split(".")[-1] in ("Tensor", "Any", "None"):  # says less than the body
        kind = Kind.TENSOR if text.endswith("Tensor") else Kind.SCALAR
        return Capture(name, kind, span=span)
    word, bracket, rest = text.strip().partition("[")
    if not bracket:
        return names.declared(name, word.strip(), None, span)
    if not rest.rstrip().endswith("]"):
        raise TypeMismatch(f"`{text}` is not a type", span=span, hint="a `]` is missing")
    dims = tuple(d.strip() for d in rest.rstrip()[:-1].split(",") if d.strip())
    return names.declared(name, word.strip(), tuple(_dim(d, text, span) for d in dims), span)


def _dim(word: str, text: str, span: Span) -> str | int | None:
    if word.isdecimal():
        return int(word)
    if word != "..." and not word.isidentifier():
        raise TypeMismatch(
            f"`{word}` in `{text}` is not a dimension", span=span,
            hint="a dimension is a name, an int, or `_`",
        )  # fmt: skip
    return None if word == "_" else word


# -- the body ----------------------------------------------------------------------------------


class _Reader:
    """Reads one function body; helpers and local functions get readers of their own."""

    def __init__(
        self,
        source: PythonSource,
        captures: Captures,
        function: types.FunctionType | None = None,
        calls: tuple[Any, ...] = (),
        steps: list[int] | None = None,
    ) -> None:
        self.source, self.captures = source, captures
        self.function = function  # a helper, or None for the source's own function
        self.calls = calls  # the functions being inlined, outermost first
        self.steps = [0, 0] if steps is None else steps  # of loops, and statements: shared

    def span(self, node: ast.AST) -> Span:
        if self.function is None:
            return self.source.span(node)
        own = PythonSource(
            self.function, find_node(self.function), self.function.__code__.co_filename, 0, 0,
            self.source.name, self.source.role,
        )  # fmt: skip
        return own.span(node)

    # -- names

    def parameters(self) -> Environment:
        """The source's parameters: reserved names, captures, consts."""
        roles = dict(self.source.roles)
        annotations = {
            a.arg: a for a in (*self.source.node.args.args, *self.source.node.args.kwonlyargs,
                               *self.source.node.args.posonlyargs)
        }  # fmt: skip
        environment: Environment = {}
        for parameter in self.source.parameters():
            node = annotations.get(parameter.name)
            if node is None:
                raise self.variadic(parameter.name)
            role = roles.get(parameter.name, parameter.name)
            default = MISSING if parameter.default is parameter.empty else parameter.default
            environment[parameter.name] = self.parameter(role, node, default)
        return environment

    def variadic(self, name: str) -> UnsupportedPython:
        """The error for `*name` or `**name`."""
        arguments = self.source.node.args
        stars = "*" if arguments.vararg is not None and arguments.vararg.arg == name else "**"
        return UnsupportedPython(
            f"`{stars}{name}` cannot be a capture",
            span=self.span((arguments.vararg if stars == "*" else arguments.kwarg) or arguments),
            hint="name each capture: it is given by its name",
        )

    def parameter(self, role: str, node: ast.arg, default: Any) -> Value:
        span = self.span(node)
        if role in names.RESERVED:
            if default is not MISSING:
                raise ReservedName(
                    f"`{role}` is reserved: it is {names.RESERVED[role]}, so it has no default",
                    span=span,
                )
            return names.reserved(role, span)
        if isinstance(default, Const):
            names.check_name(role, span)
            return self.captures.const(role, default.value, span)
        found = _annotation(node.annotation, role, span)
        if default is not MISSING and not isinstance(default, bool | int | float):
            raise TypeMismatch(
                f"the default of `{role}` must be a number, not {type(default).__name__}",
                span=span,
                hint="give tensors at the call, or read them from an enclosing scope",
            )
        self.captures.declare(names.with_default(found, default, span))
        return Table(role, (), span)

    def lookup(self, node: ast.Name, environment: Environment) -> Value:
        span = self.span(node)
        if node.id in environment:
            return names.at(environment[node.id], span)
        if self.function is None and node.id == self.source.self_name:
            owner = self.source.owner
            return Object(owner, FreeVariable(("self", id(owner)), lambda: owner, node.id))
        if node.id in self.own_code.co_varnames and node.id not in dict(self.source.fixed):
            raise UnknownName(
                f"`{node.id}` is assigned later, or on some paths only", span=span,
                hint="assign it before it is read",
            )  # fmt: skip
        if self.function is None:
            found = self.source.free(node.id)
        else:
            found = free_variable(self.function, node.id)
        if found is None or found.read() is None:
            raise self.unknown(node.id, found, environment, span)
        return self.free(node.id, found, span)

    def unknown(
        self, name: str, found: FreeVariable | None, environment: Environment, span: Span
    ) -> Exception:
        """The error for a name that has no value."""
        if name == self.source.function.__name__:
            return _recursion(span)
        if name in names.RESERVED:
            return UnknownName(
                f"`{name}` is not a parameter of this function", span=span,
                hint=f"add it: `{name}` is {names.RESERVED[name]}",
            )  # fmt: skip
        if found is not None:
            return UnknownName(
                f"`{name}` has no value yet", span=span, hint="assign it before the variant"
            )
        hint = f"captures are parameters: add `{name}` to the function's parameters"
        return names.unknown(name, span, environment, hint)

    @property
    def own_code(self) -> types.CodeType:
        """The code of the function whose body is read."""
        return (self.function or self.source.function).__code__

    def free(self, name: str, found: FreeVariable, span: Span) -> Value:
        """A free variable: a number or tensor is a capture, anything else a Python object."""
        value = found.read()
        if isinstance(value, Const):
            return self.captures.const(name, value.value, span)
        if isinstance(value, bool | int | float):
            # A builtin or a constant of a module such as math.pi never changes.
            if found.place[0] == "builtin" or _is_library(found):
                return const(value, span)
            names.check_number(value, name, span)
            return self.capture(Capture(name, Kind.SCALAR, free=found, span=span))
        if _is_tensor(value):
            if _element(value) not in ELEMENTS:
                raise TypeMismatch(
                    f"`{name}` holds {value.dtype}, not bool, int or float", span=span
                )
            if tuple(value.shape) in ((), (1,)):
                return self.capture(Capture(name, Kind.SCALAR, free=found, span=span))
            return self.capture(Capture(name, Kind.TENSOR, None, None, free=found, span=span))
        return Object(value, found)

    def capture(self, found: Capture) -> Table:
        return Table(self.captures.declare_free(found), (), found.span)

    # -- statements

    def run(self, node: ast.FunctionDef | ast.Lambda, environment: Environment) -> Expr:
        """The expression that a function returns."""
        value = self.result(node, environment)
        if isinstance(value, tuple):
            raise TypeMismatch(
                "a variant gives one value, but this is a tuple", span=self.span(node)
            )
        return self.expr(value, self.span(node))

    def result(self, node: ast.FunctionDef | ast.Lambda, environment: Environment) -> Value:
        if isinstance(node, ast.Lambda):
            return self.value(node.body, environment)
        returned = self.block(list(node.body), environment)
        if returned is None:
            raise UnsupportedPython(
                f"`{node.name}` can end without return", span=self.span(node.body[-1]),
                hint="return the score or the mask on every path",
            )  # fmt: skip
        return returned

    def block(self, body: list[ast.stmt], environment: Environment) -> Value | None:
        """Run statements; the value returned, or None when the end is reached."""
        for position, statement in enumerate(body):
            self.steps[1] += 1
            if self.steps[1] > MAX_STATEMENTS:
                raise UnsupportedPython(
                    "the loops and branches give too many paths", span=self.span(body[0]),
                    hint="let each `if` that returns do so in every branch",
                )  # fmt: skip
            if isinstance(statement, ast.If):
                return_early, value = self.if_(statement, body[position + 1 :], environment)
                if return_early:
                    return value
                continue
            if isinstance(statement, ast.For) and _returns(statement):
                steps = self.unrolled(statement, environment)
                return self.block([*steps, *body[position + 1 :]], environment)
            run = _STATEMENTS.get(type(statement))
            if run is None:
                raise _unsupported(statement, self.span(statement))
            returned = run(self, statement, environment)
            if returned is not None:
                return returned
        return None

    def if_(
        self, node: ast.If, rest: list[ast.stmt], environment: Environment
    ) -> tuple[bool, Value | None]:
        """An elementwise `if`: both branches are read, `where` picks."""
        condition = self.condition(node.test, environment)
        known = names.fold_const(condition)
        if known is not None:
            returned = self.block(list(node.body if known else node.orelse), environment)
            return returned is not None, returned
        span = self.span(node.test)
        if _returns(node):
            # What follows belongs to the branch that does not return.
            yes = self.block([*node.body, *rest], dict(environment))
            no = self.block([*node.orelse, *rest], dict(environment))
            if yes is None or no is None:
                return True, None
            return True, self.where(condition, yes, no, span)
        yes_env, no_env = dict(environment), dict(environment)
        self.block(list(node.body), yes_env)
        self.block(list(node.orelse), no_env)
        for name in yes_env.keys() & no_env.keys():
            if yes_env[name] is not no_env[name]:
                environment[name] = self.where(condition, yes_env[name], no_env[name], span)
        for name in yes_env.keys() ^ no_env.keys():
            environment[name] = _Unset(name)
        return False, None

    def condition(self, node: ast.expr, environment: Environment) -> Expr:
        """What an `if` asks; a literal may be a number, as in Python."""
        value = self.operand(node, environment)
        if not value.is_const:
            require_bool(value, "`if`", self.span(node))
        return value

    def where(self, condition: Expr, yes: Value, no: Value, span: Span) -> Value:
        if isinstance(yes, tuple) and isinstance(no, tuple) and len(yes) == len(no):
            return tuple(self.where(condition, a, b, span) for a, b in zip(yes, no, strict=True))
        return make(Op.WHERE, condition, self.expr(yes, span), self.expr(no, span), span=span)

    def assign(self, node: ast.Assign, environment: Environment) -> None:
        value = self.value(node.value, environment)
        for target in node.targets:
            self.bind(target, value, environment)

    def annotated(self, node: ast.AnnAssign, environment: Environment) -> None:
        if node.value is not None:
            self.bind(node.target, self.value(node.value, environment), environment)

    def augmented(self, node: ast.AugAssign, environment: Environment) -> None:
        if not isinstance(node.target, ast.Name):
            raise _outside(self.span(node.target))
        left = self.expr(self.lookup(node.target, environment), self.span(node.target))
        right = self.expr(self.value(node.value, environment), self.span(node.value))
        symbol = _symbol(node.op, self.span(node))
        environment[node.target.id] = names.binary(symbol, left, right, self.span(node))

    def bind(self, target: ast.expr, value: Value, environment: Environment) -> None:
        if isinstance(target, ast.Name):
            environment[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            parts = self.unpack(value, target)
            if len(parts) != len(target.elts):
                raise TypeMismatch(
                    f"{names.count(len(target.elts), 'name')} for "
                    f"{names.count(len(parts), 'value')}",
                    span=self.span(target),
                )
            for name, part in zip(target.elts, parts, strict=True):
                self.bind(name, part, environment)
        else:
            raise _outside(self.span(target))

    def unpack(self, value: Value, node: ast.AST) -> tuple[Value, ...]:
        if isinstance(value, Object) and isinstance(value.value, tuple | list):
            return tuple(self.item(value, k, self.span(node)) for k in range(len(value.value)))
        if not isinstance(value, tuple):
            raise UnsupportedPython("only a tuple can be unpacked", span=self.span(node))
        return value

    def for_(self, node: ast.For, environment: Environment) -> None:
        self.block(self.unrolled(node, environment), environment)

    def unrolled(self, node: ast.For, environment: Environment) -> list[ast.stmt]:
        """The statements of all steps, each begun by an assignment of the loop variable."""
        if node.orelse:
            raise UnsupportedPython(
                "`else` after a loop has no meaning here", span=self.span(node.orelse[0]),
                hint="put it after the loop",
            )  # fmt: skip
        statements: list[ast.stmt] = []
        for value in self.steps_of(node, environment):
            self.steps[0] += 1
            if self.steps[0] > names.MAX_LOOP:
                raise names.too_many_steps(self.span(node))
            statements += [_Step(node.target, value), *node.body]
        return statements

    def steps_of(self, node: ast.For, environment: Environment) -> Iterator[Value]:
        """The values of a constant loop."""
        call = node.iter
        is_range = isinstance(call, ast.Call) and self.is_builtin(call.func, range, environment)
        if isinstance(call, ast.Call) and is_range:
            bounds = [self.operand(a, environment) for a in call.args]
            steps = names.loop_bounds(bounds, self.span(call), _CONST_HINT)
            return (const(k, self.span(node.target)) for k in steps)
        value = self.value(call, environment)
        if isinstance(value, Table | Expr):
            raise UnsupportedPython(
                "a loop runs over range() with constant bounds, not over a tensor",
                span=self.span(call),
                hint="a variant sees one pair (i, j): read single elements by index",
            )
        return iter(self.unpack(value, call))

    def is_builtin(self, node: ast.expr, value: Any, environment: Environment) -> bool:
        if not isinstance(node, ast.Name) or node.id in environment:
            return False
        found = self.lookup(node, environment)
        return isinstance(found, Object) and found.value is value

    def define(self, node: ast.FunctionDef, environment: Environment) -> None:
        environment[node.name] = LocalFunction(node, environment)

    # -- expressions

    def expr(self, value: Value, span: Span) -> Expr:
        """A value as an expression."""
        if isinstance(value, Expr):
            return value
        if isinstance(value, Table):
            return self.captures.load(value) if value.indices else self.captures.scalar(value)
        if isinstance(value, _Unset):
            raise UnknownName(
                f"`{value.name}` is assigned in one branch of an if only", span=span,
                hint="assign it before the if",
            )  # fmt: skip
        if isinstance(value, Const):
            return const(value.value, span)
        if isinstance(value, _Shape):
            raise TypeMismatch(
                "expected a number, but this is a shape", span=span,
                hint=f"index it: {value.table.name}.shape[0]",
            )  # fmt: skip
        raise TypeMismatch(f"expected a number, but this is {_what(value)}", span=span)

    def value(self, node: ast.expr, environment: Environment) -> Value:
        read = _EXPRESSIONS.get(type(node))
        if read is None:
            raise _unsupported(node, self.span(node))
        return read(self, node, environment)

    def operand(self, node: ast.expr, environment: Environment) -> Expr:
        return self.expr(self.value(node, environment), self.span(node))

    def constant(self, node: ast.Constant, environment: Environment) -> Expr:
        if not isinstance(node.value, bool | int | float):
            raise UnsupportedPython(
                f"{node.value!r} has no meaning in a variant", span=self.span(node)
            )
        return names.literal(node.value, self.span(node))

    def tuple_(self, node: ast.Tuple | ast.List, environment: Environment) -> tuple[Value, ...]:
        return tuple(self.value(e, environment) for e in node.elts)

    def binary(self, node: ast.BinOp, environment: Environment) -> Expr:
        left, right = self.operand(node.left, environment), self.operand(node.right, environment)
        return names.binary(_symbol(node.op, self.span(node)), left, right, self.span(node))

    def unary(self, node: ast.UnaryOp, environment: Environment) -> Expr:
        operand = self.operand(node.operand, environment)
        if isinstance(node.op, ast.UAdd):
            return operand
        return make(_UNARY[type(node.op)], operand, span=self.span(node))

    def logical(self, node: ast.BoolOp, environment: Environment) -> Expr:
        op = Op.AND if isinstance(node.op, ast.And) else Op.OR
        result = self.operand(node.values[0], environment)
        for value in node.values[1:]:
            result = make(op, result, self.operand(value, environment), span=self.span(node))
        return result

    def compare(self, node: ast.Compare, environment: Environment) -> Expr:
        symbols = []
        for op in node.ops:
            symbol = _COMPARE.get(type(op))
            if symbol is None:
                word = {"NotIn": "not in", "IsNot": "is not"}.get(
                    type(op).__name__, type(op).__name__.lower()
                )
                raise UnsupportedPython(
                    f"`{word}` has no meaning between numbers", span=self.span(node),
                    hint="compare with ==, joined by `or`",
                )  # fmt: skip
            symbols.append(symbol)
        operands = [self.operand(n, environment) for n in (node.left, *node.comparators)]
        return names.compare(symbols, operands, [self.span(node)] * len(symbols))

    def conditional(self, node: ast.IfExp, environment: Environment) -> Value:
        condition = self.condition(node.test, environment)
        known = names.fold_const(condition)
        if known is not None:
            return self.value(node.body if known else node.orelse, environment)
        yes, no = self.value(node.body, environment), self.value(node.orelse, environment)
        return self.where(condition, yes, no, self.span(node))

    def subscript(self, node: ast.Subscript, environment: Environment) -> Value:
        value = self.value(node.value, environment)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if isinstance(value, Table):
            return self.index(value, parts, node, environment)
        if isinstance(value, _Shape):
            axis = self.constant_int(parts[0], "the dimension of a shape", environment)
            return self.captures.size(value.table.name, axis, self.span(node))
        if isinstance(value, tuple) or (
            isinstance(value, Object) and isinstance(value.value, tuple | list)
        ):
            if len(parts) != 1:
                raise TypeMismatch("a tuple has one index", span=self.span(node))
            position = self.constant_int(parts[0], "the index of a tuple", environment)
            return self.item(value, position, self.span(node))
        raise TypeMismatch("only a captured tensor can be indexed", span=self.span(node.value))

    def constant_int(self, node: ast.expr, what: str, environment: Environment) -> int:
        value = self.operand(node, environment)
        return names.constant_int(value, self.span(node), what, _CONST_HINT)

    def index(
        self, table: Table, parts: list[ast.expr], node: ast.AST, environment: Environment
    ) -> Table:
        """`t[b][i, j]`: indices add up."""
        indices = list(table.indices)
        for part in parts:
            if isinstance(part, ast.Slice | ast.Starred):
                raise UnsupportedPython(
                    "a slice has no meaning here: a variant sees one pair (i, j)",
                    span=self.span(part),
                    hint="give one index for each dimension",
                )
            if isinstance(part, ast.Constant) and part.value in (None, ...):
                word = "..." if part.value is ... else "None"
                raise UnsupportedPython(
                    f"`{word}` has no meaning as an index", span=self.span(part),
                    hint="give one index for each dimension",
                )  # fmt: skip
            indices.append(self.one_index(table, len(indices), part, environment))
        return Table(table.name, tuple(indices), self.span(node))

    def one_index(self, table: Table, axis: int, node: ast.expr, environment: Environment) -> Expr:
        from_end = (
            isinstance(node, ast.UnaryOp)
            and isinstance(node.op, ast.USub)
            and isinstance(node.operand, ast.Constant)
        )
        position = self.operand(node, environment)
        if from_end and position.type is Type.INT:
            span = self.span(node)
            return make(Op.ADD, self.captures.size(table.name, axis, span), position, span=span)
        return position

    def item(self, value: Value, position: int, span: Span) -> Value:
        """One element of a tuple, of the body or of a free variable."""
        items = value.value if isinstance(value, Object) else value
        if not -len(items) <= position < len(items):
            raise TypeMismatch(f"the tuple has {names.count(len(items), 'element')}", span=span)
        if not isinstance(value, Object):
            return value[position]
        position %= len(items)
        place = value.place

        def read() -> Any:
            return place.read()[position]

        found = FreeVariable((*place.place, position), read, f"{place.label}[{position}]")
        return self.free(f"{place.label.strip('.')}_{position}", found, span)

    def attribute(self, node: ast.Attribute, environment: Environment) -> Value:
        value = self.value(node.value, environment)
        if isinstance(value, Object) and hasattr(value.value, node.attr):
            return self.free(node.attr, _member(value, node.attr), self.span(node))
        if isinstance(value, Table) and node.attr == "shape":
            return _Shape(value)
        if isinstance(value, Table | Expr):
            what = "a tensor" if isinstance(value, Table) else "a number"
            raise UnsupportedPython(
                f"`.{node.attr}` has no meaning on {what}", span=self.span(node)
            )
        label = ast.unparse(node.value)
        known = dir(value.value) if isinstance(value, Object) else ()
        raise UnknownName(
            f"`{label}` has no `{node.attr}`", span=self.span(node),
            hint=names.did_you_mean(node.attr, known),
        )  # fmt: skip

    # -- calls

    def call(self, node: ast.Call, environment: Environment) -> Value:
        span = self.span(node)
        if isinstance(node.func, ast.Attribute):
            method = self.method(node, node.func, environment)
            if method is not None:
                return method
        function = self.called(node.func, environment)
        if isinstance(function, LocalFunction):
            return self.call_local(function, node, environment)
        if not isinstance(function, Object):
            raise TypeMismatch("only a function can be called", span=self.span(node.func))
        if function.value is len:
            return self.length(node, environment)
        if function.value is float and len(node.args) == 1 and _is_text(node.args[0]):
            return self.float_text(node)
        name = language_name(function.value)
        if name == "const":
            return self.const_call(node, environment)
        if name is not None:
            return self.language_call(name, [], node, environment)
        if isinstance(function.value, types.FunctionType):
            return self.call_helper(function.value, node, environment)
        label = getattr(function.value, "__name__", type(function.value).__name__)
        raise names.unknown_function(str(label), span)

    def called(self, node: ast.expr, environment: Environment) -> Value:
        """What stands before the parentheses of a call."""
        try:
            return self.value(node, environment)
        except UnknownName as error:
            if isinstance(node, ast.Name) and node.id not in names.RESERVED:
                raise names.unknown_function(node.id, error.span) from None
            raise

    def language_call(
        self, name: str, first: list[Expr], node: ast.Call, environment: Environment
    ) -> Expr:
        """A call of a function of the language, as a function or a method."""
        args = [*first, *(self.operand(a, environment) for a in node.args)]
        keywords: dict[str, Expr] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise UnsupportedPython(
                    "`**` has no meaning in a call here", span=self.span(keyword.value)
                )
            keywords[keyword.arg] = self.operand(keyword.value, environment)
        return names.call(name, args, self.span(node), keywords)

    def one_argument(self, node: ast.Call, what: str) -> ast.expr:
        if len(node.args) != 1 or node.keywords:
            total = len(node.args) + len(node.keywords)
            raise TypeMismatch(f"`{what}` takes 1 argument, not {total}", span=self.span(node))
        return node.args[0]

    def const_call(self, node: ast.Call, environment: Environment) -> Expr:
        """`scoremod.const(x)` in the body."""
        value = self.one_argument(node, "const")
        if isinstance(value, ast.Name) and value.id not in environment:
            found = (
                self.source.free(value.id)
                if self.function is None
                else free_variable(self.function, value.id)
            )
            if found is not None and isinstance(found.read(), bool | int | float):
                return self.captures.const(value.id, found.read(), self.span(node))
        number = names.fold_const(self.operand(value, environment))
        if number is None:
            raise UnsupportedPython(
                "const takes a literal or a variable that holds a number", span=self.span(value)
            )
        return const(number, self.span(node))

    def method(
        self, node: ast.Call, function: ast.Attribute, environment: Environment
    ) -> Value | None:
        """`x.abs()` and the like, as FlexAttention's users write them."""
        value = self.value(function.value, environment)
        if isinstance(value, Table) and function.attr == "size" and not value.indices:
            what = "the dimension of a shape"
            axis = self.constant_int(self.one_argument(node, "size"), what, environment)
            return self.captures.size(value.name, axis, self.span(node))
        if not isinstance(value, Table | Expr):
            return None
        name = "to" if function.attr == "to" else _METHODS.get(function.attr)
        if name is None:
            raise names.unknown_function(function.attr, self.span(node))
        receiver = self.expr(value, self.span(function.value))
        if name == "to":
            return self.to_dtype(receiver, node, environment)
        return self.language_call(name, [receiver], node, environment)

    def to_dtype(self, receiver: Expr, node: ast.Call, environment: Environment) -> Expr:
        argument = self.value(self.one_argument(node, "to"), environment)
        word = str(getattr(argument, "value", argument)).removeprefix("torch.")
        for prefix, op in (("float", Op.FLOAT), ("bfloat", Op.FLOAT), ("int", Op.INT)):
            if word.startswith(prefix):
                return make(op, receiver, span=self.span(node))
        if word.startswith("bool"):
            return make(Op.BOOL, receiver, span=self.span(node))
        raise UnsupportedPython(f"`.to({word})` is not supported", span=self.span(node))

    def float_text(self, node: ast.Call) -> Expr:
        """`float("-inf")`."""
        text = node.args[0].value  # type: ignore[attr-defined]
        try:
            return const(float(text), self.span(node))
        except ValueError:
            raise TypeMismatch(f"{text!r} is not a number", span=self.span(node)) from None

    def length(self, node: ast.Call, environment: Environment) -> Expr:
        value = self.value(self.one_argument(node, "len"), environment)
        if isinstance(value, Table) and not value.indices:
            return self.captures.size(value.name, 0, self.span(node))
        if isinstance(value, Table | Expr):
            raise TypeMismatch("a number has no length", span=self.span(node.args[0]))
        return const(len(self.unpack(value, node)), self.span(node))

    def call_local(
        self, function: LocalFunction, node: ast.Call, environment: Environment
    ) -> Value:
        self.check_recursion(function.node, node)
        given = self.bind_arguments(function.node, node, environment)
        scope = dict(function.scope)
        scope.update(given)
        defaults = _local_defaults(function.node)
        for name, default in defaults.items():
            if name not in given:
                scope[name] = self.value(default, function.scope)
        reader = _Reader(
            self.source, self.captures, self.function, (*self.calls, function.node), self.steps
        )
        return reader.result(function.node, scope)

    def call_helper(
        self, function: types.FunctionType, node: ast.Call, environment: Environment
    ) -> Value:
        """Inline a helper function."""
        self.check_recursion(function.__code__, node)
        tree = find_node(function)
        scope = self.bind_arguments(tree, node, environment)
        reader = _Reader(
            self.source, self.captures, function, (*self.calls, function.__code__), self.steps
        )
        for name, default in _defaults(function).items():
            if name not in scope:
                place = FreeVariable(("default", id(function), name), _constant(default), name)
                scope[name] = (
                    const(default, self.span(node))
                    if isinstance(default, bool | int | float)
                    else reader.free(name, place, self.span(node))
                )
        return reader.result(tree, scope)

    def bind_arguments(
        self, function: ast.FunctionDef | ast.Lambda, node: ast.Call, environment: Environment
    ) -> Environment:
        parameters = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
        every = {*parameters, *(a.arg for a in function.args.kwonlyargs)}
        if function.args.vararg or function.args.kwarg:
            raise UnsupportedPython("helpers cannot take *args or **kwargs", span=self.span(node))
        if len(node.args) > len(parameters):
            raise TypeMismatch("too many arguments for this helper", span=self.span(node))
        scope: Environment = {}
        for name, argument in zip(parameters, node.args, strict=False):
            scope[name] = self.value(argument, environment)
        for keyword in node.keywords:
            if keyword.arg not in every or keyword.arg in scope:
                raise TypeMismatch(
                    f"`{keyword.arg}` does not fit this helper", span=self.span(keyword.value)
                )
            scope[keyword.arg] = self.value(keyword.value, environment)
        optional = _local_defaults(function)
        missing = [n for n in every if n not in scope and n not in optional]
        if missing:
            raise TypeMismatch(f"the helper needs `{sorted(missing)[0]}`", span=self.span(node))
        return scope

    def check_recursion(self, function: Any, node: ast.Call) -> None:
        if function in self.calls:
            raise _recursion(self.span(node))


def _recursion(span: Span) -> UnsupportedPython:
    return UnsupportedPython(
        "recursion has no end that a kernel could know",
        span=span,
        hint="use a loop over range() with constant bounds",
    )


def _outside(span: Span) -> UnsupportedPython:
    return UnsupportedPython(
        "a variant cannot change anything outside itself", span=span, hint="assign to a local name"
    )


def _what(value: Value) -> str:
    """A value that is not a number, in words."""
    if isinstance(value, tuple):
        return "a tuple"
    if isinstance(value, LocalFunction) or callable(value.value):
        return "a function"
    return f"a {type(value.value).__name__}"


class _Step(ast.stmt):
    """The loop variable takes its next value."""

    def __init__(self, target: ast.expr, value: Value) -> None:
        super().__init__()
        self.target, self.value = target, value


@dataclass(frozen=True)
class _Unset:
    """A name that only one branch of an if assigns."""

    name: str


@dataclass(frozen=True)
class _Shape:
    """`t.shape`, to be indexed with a literal."""

    table: Table


def _return(reader: _Reader, node: ast.Return, environment: Environment) -> Value:
    if node.value is None:
        raise UnsupportedPython("a variant must return a value", span=reader.span(node))
    return reader.value(node.value, environment)


def _expression(reader: _Reader, node: ast.Expr, environment: Environment) -> None:
    if isinstance(node.value, ast.Constant):  # a docstring
        return
    if type(node.value) in _UNSUPPORTED:
        raise _unsupported(node.value, reader.span(node))
    called = isinstance(node.value, ast.Call)
    raise UnsupportedPython(
        f"`{ast.unparse(node.value)}` has no effect here: a variant is read, not run",
        span=reader.span(node),
        hint="take the line out, or use its value" if called else "assign it to a name",
    )


def _nothing(reader: _Reader, node: ast.stmt, environment: Environment) -> None:
    return None


_STATEMENTS: dict[type[ast.stmt], Callable[[_Reader, Any, Environment], Value | None]] = {
    ast.Return: _return,
    ast.Assign: _Reader.assign,
    ast.AnnAssign: _Reader.annotated,
    ast.AugAssign: _Reader.augmented,
    ast.For: _Reader.for_,
    ast.FunctionDef: _Reader.define,
    ast.Expr: _expression,
    ast.Pass: _nothing,
    _Step: lambda reader, step, environment: reader.bind(step.target, step.value, environment),
}
_EXPRESSIONS: dict[type[ast.expr], Callable[[_Reader, Any, Environment], Value]] = {
    ast.Name: _Reader.lookup,
    ast.Constant: _Reader.constant,
    ast.Tuple: _Reader.tuple_,
    ast.List: _Reader.tuple_,
    ast.BinOp: _Reader.binary,
    ast.UnaryOp: _Reader.unary,
    ast.BoolOp: _Reader.logical,
    ast.Compare: _Reader.compare,
    ast.IfExp: _Reader.conditional,
    ast.Subscript: _Reader.subscript,
    ast.Attribute: _Reader.attribute,
    ast.Call: _Reader.call,
    ast.Lambda: lambda reader, node, environment: LocalFunction(node, environment),
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
_UNARY: dict[type[ast.unaryop], Op] = {ast.USub: Op.NEG, ast.Invert: Op.INVERT, ast.Not: Op.NOT}
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
# Methods of torch tensors that mean a function of the language.
_METHODS: dict[str, str] = {
    **{
        name: name
        for name in """abs exp exp2 log log2 log1p sqrt rsqrt tanh sigmoid floor ceil round clamp
        float int bool sin cos erf expm1 minimum maximum pow""".split()
    },
    "long": "int",
    "logical_not": "logical_not",
}
# Functions of other modules under another name.
_ALIASES: dict[str, str] = {
    "fabs": "abs",
    "trunc": "int",
    "absolute": "abs",
    "logical_xor": "xor",
    "softplus": "softplus",
}
_UNSUPPORTED: dict[type[ast.AST], tuple[str, str | None]] = {
    ast.While: ("a while loop has no end that a kernel could know", "use for ... in range(...)"),
    ast.Try: ("try has no meaning in a variant", None),
    ast.With: ("with has no meaning in a variant", None),
    ast.Raise: ("raise has no meaning in a variant", "give -inf to leave a pair out"),
    ast.Assert: ("assert has no meaning in a variant", None),
    ast.Import: ("import inside a variant", "import at the top of the file"),
    ast.ImportFrom: ("import inside a variant", "import at the top of the file"),
    ast.Global: ("a variant cannot change anything outside itself", None),
    ast.Nonlocal: ("a variant cannot change anything outside itself", None),
    ast.ListComp: ("comprehensions are not supported", "use a for loop over range()"),
    ast.GeneratorExp: ("comprehensions are not supported", "use a for loop over range()"),
    ast.Break: ("break has no meaning in an unrolled loop", "use a condition"),
    ast.Continue: ("continue has no meaning in an unrolled loop", "use a condition"),
    ast.NamedExpr: ("`:=` is not supported", "assign on a line of its own"),
    ast.JoinedStr: ("text has no meaning in a variant", None),
    ast.Await: ("await has no meaning in a variant", None),
    ast.Yield: ("yield has no meaning in a variant", "return the value"),
    ast.YieldFrom: ("yield has no meaning in a variant", "return the value"),
    ast.Delete: ("del has no meaning in a variant", None),
    ast.ClassDef: ("a class has no meaning in a variant", None),
    ast.Match: ("match is not supported", "use if and elif"),
    ast.AsyncFunctionDef: ("async has no meaning in a variant", None),
    ast.Dict: ("a dict has no meaning in a variant", "use a tuple, or a tensor"),
    ast.Set: ("a set has no meaning in a variant", "use a tuple, or a tensor"),
    ast.SetComp: ("comprehensions are not supported", "use a for loop over range()"),
    ast.DictComp: ("comprehensions are not supported", "use a for loop over range()"),
    ast.Starred: ("`*` has no meaning in a call here", "write the arguments out"),
    ast.Slice: ("a slice has no meaning here: a variant sees one pair (i, j)", None),
}


def _unsupported(node: ast.AST, span: Span) -> UnsupportedPython:
    message, hint = _UNSUPPORTED.get(
        type(node), (f"`{type(node).__name__}` is not supported in a variant", None)
    )
    return UnsupportedPython(message, span=span, hint=hint)


def _symbol(op: ast.operator, span: Span) -> str:
    if type(op) not in _BINARY:
        raise UnsupportedPython("`@` has no meaning between numbers", span=span)
    return _BINARY[type(op)]


def _returns(node: ast.If | ast.For) -> bool:
    """Whether a statement can return (functions defined inside do not count)."""
    todo: list[ast.AST] = [*node.body, *node.orelse]
    while todo:
        statement = todo.pop()
        if isinstance(statement, ast.Return):
            return True
        if not isinstance(statement, ast.FunctionDef | ast.Lambda):
            todo.extend(ast.iter_child_nodes(statement))
    return False


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _local_defaults(node: ast.FunctionDef | ast.Lambda) -> dict[str, ast.expr]:
    positional = [*node.args.posonlyargs, *node.args.args]
    late = positional[len(positional) - len(node.args.defaults) :]
    found = {a.arg: d for a, d in zip(late, node.args.defaults, strict=True)}
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return {**found, **{a.arg: d for a, d in pairs if d is not None}}


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    code = function.__code__
    defaults = function.__defaults__ or ()
    late = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return {**dict(zip(late, defaults, strict=True)), **(function.__kwdefaults__ or {})}


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _member(value: Object, name: str) -> FreeVariable:
    owner = value.value
    if isinstance(owner, types.ModuleType):
        return FreeVariable(("module", owner.__name__, name), lambda: getattr(owner, name), name)
    return attribute(owner, name)


def _is_library(found: FreeVariable) -> bool:
    """Whether a value is a constant of math, torch or scoremod, such as math.pi."""
    if found.place[0] == "module":
        return found.place[1].split(".")[0] in ("math", "torch", "numpy", "scoremod")
    return found.label == "inf" and found.read() == math.inf


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "stride")


_ELEMENT_OF_DTYPE = {
    "bool": "bool",
    "int8": "i8",
    "uint8": "u8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
}


def _element(value: Any) -> str:
    return _ELEMENT_OF_DTYPE.get(str(value.dtype).removeprefix("torch."), "other")


def language_name(value: Any) -> str | None:
    """The function of the language that a Python object stands for, if any."""
    if isinstance(value, Function):
        return value.name
    if value is const_marker:
        return "const"
    name = getattr(value, "__name__", "")
    name = _ALIASES.get(name, name)
    owners = ("builtins", "math", "torch", "numpy", "torch.nn.functional")
    for module in (sys.modules.get(m) for m in owners):
        original = getattr(value, "__name__", "")
        if module is not None and original and getattr(module, original, None) is value:
            return name if name in names.CALLS else None
    return None

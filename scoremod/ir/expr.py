"""One immutable node for every expression, made by `make`, which checks and gives types.

    make(Op.ADD, s, make(Op.NEG, i))   ->   s + float(-i)

Conversions that promotion asks for are nodes of their own, so that no later stage has to know
the promotion rules. Where a capture's type is open (`Type.ANY`) they are left out until
`resolve` is told the types.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..errors import Span, TypeMismatch
from .ops import INT_MAX, INT_MIN, OPS, Op, Rule, Type

Attr = Any  # CONST: a value; INDEX, CAPTURE, LOAD: a name; SIZE: (name, axis)


class Expr:
    """An immutable expression; equal when it says the same, whatever its span."""

    __slots__ = ("__dict__", "args", "attr", "op", "span", "type")

    op: Op
    args: tuple[Expr, ...]
    attr: Attr
    type: Type
    span: Span | None

    def __init__(
        self, op: Op, args: tuple[Expr, ...], attr: Attr, type_: Type, span: Span | None
    ) -> None:
        put = object.__setattr__
        put(self, "op", op)
        put(self, "args", args)
        put(self, "attr", attr)
        put(self, "type", type_)
        put(self, "span", span)
        put(self, "__dict__", {})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("Expr is immutable")

    @property
    def digest(self) -> bytes:
        """16 bytes that are equal exactly for equal expressions (a DAG is hashed once a node)."""
        digest = kept(self, "digest", _digest)
        assert isinstance(digest, bytes)
        return digest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expr) and (self is other or self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        if not self.args:
            return f"{self.op.name.lower()}({self.attr!r})"
        inner = ", ".join(map(repr, self.args))
        name = self.op.name.lower() if self.attr is None else f"{self.op.name.lower()} {self.attr}"
        return f"{name}({inner})"

    @property
    def names(self) -> frozenset[str]:
        """The indices and captures that the value depends on."""
        names = kept(self, "names", _names)
        assert isinstance(names, frozenset)
        return names

    @property
    def reads_s(self) -> bool:
        """Whether the value depends on the score."""
        return "s" in self.names

    @property
    def is_const(self) -> bool:
        return self.op is Op.CONST

    # Arithmetic on expressions, for the tables of rules.
    def __add__(self, other: Operand) -> Expr:
        return make(Op.ADD, self, lift(other))

    def __radd__(self, other: Operand) -> Expr:
        return make(Op.ADD, lift(other), self)

    def __sub__(self, other: Operand) -> Expr:
        return make(Op.SUB, self, lift(other))

    def __rsub__(self, other: Operand) -> Expr:
        return make(Op.SUB, lift(other), self)

    def __mul__(self, other: Operand) -> Expr:
        return make(Op.MUL, self, lift(other))

    def __rmul__(self, other: Operand) -> Expr:
        return make(Op.MUL, lift(other), self)

    def __truediv__(self, other: Operand) -> Expr:
        return make(Op.DIV, self, lift(other))

    def __rtruediv__(self, other: Operand) -> Expr:
        return make(Op.DIV, lift(other), self)

    def __neg__(self) -> Expr:
        return make(Op.NEG, self)

    def __le__(self, other: Operand) -> Expr:
        return make(Op.LE, self, lift(other))

    def __lt__(self, other: Operand) -> Expr:
        return make(Op.LT, self, lift(other))


Operand = Expr | bool | int | float


def kept(root: Expr, key: str, compute: Callable[[Expr], Any]) -> Any:
    """What `compute` gives for `root`, kept on every node below; it may ask operands for theirs."""
    stack = [] if key in root.__dict__ else [root]
    while stack:
        node = stack[-1]
        todo = () if key in node.__dict__ else [a for a in node.args if key not in a.__dict__]
        stack.extend(todo)
        if not todo:
            if key not in node.__dict__:
                node.__dict__[key] = compute(node)
            stack.pop()
    return root.__dict__[key]


def _names(node: Expr) -> frozenset[str]:
    own: frozenset[str] = frozenset()
    if node.op in (Op.INDEX, Op.CAPTURE, Op.LOAD):
        own = frozenset((node.attr,))
    elif node.op is Op.SIZE:
        own = frozenset((node.attr[0],))
    return own.union(*(a.__dict__["names"] for a in node.args))


def _digest(node: Expr) -> bytes:
    # repr tells 1, 1.0, True and -0.0 apart.
    head = f"{node.op.name}|{node.attr!r}|{node.type.value}|".encode()
    parts = b"".join(a.__dict__["digest"] for a in node.args)
    return hashlib.blake2b(head + parts, digest_size=16).digest()


def postorder(*roots: Expr) -> Iterator[Expr]:
    """Every distinct node object below the roots, operands first; no recursion."""
    seen: set[int] = set()
    stack: list[tuple[Expr, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.args))


def rewrite(root: Expr, rule: Callable[[Expr], Expr]) -> Expr:
    """Rebuild bottom-up: `rule` sees each node after its operands were rewritten."""
    done: dict[int, Expr] = {}
    for node in postorder(root):
        args = tuple(done[id(a)] for a in node.args)
        same = all(new is old for new, old in zip(args, node.args, strict=True))
        done[id(node)] = rule(node if same else rebuild(node, args))
    return done[id(root)]


def rebuild(node: Expr, args: Iterable[Expr]) -> Expr:
    """The same operation on other operands, types checked anew."""
    if node.op in (Op.CONST, Op.INDEX, Op.CAPTURE, Op.SIZE):
        return node
    if node.op is Op.LOAD:
        return load(node.attr, tuple(args), node.type, node.span)
    return make(node.op, *args, span=node.span)


def substitute(root: Expr, replace: Mapping[str, Expr]) -> Expr:
    """Put expressions in the place of indices or scalar captures."""

    def rule(node: Expr) -> Expr:
        if node.op in (Op.INDEX, Op.CAPTURE) and node.attr in replace:
            return replace[node.attr]
        return node

    return rewrite(root, rule)


# -- leaves ------------------------------------------------------------------------------------


def const(value: bool | int | float, span: Span | None = None) -> Expr:
    """A literal."""
    if isinstance(value, bool):
        return Expr(Op.CONST, (), value, Type.BOOL, span)
    if isinstance(value, int):
        if not INT_MIN <= value <= INT_MAX:
            raise TypeMismatch(
                f"the integer {value} does not fit in 64 bits",
                span=span,
                hint="write it as a float",
            )
        return Expr(Op.CONST, (), value, Type.INT, span)
    return Expr(Op.CONST, (), float(value), Type.FLOAT, span)


def lift(value: Operand) -> Expr:
    """A number as a literal; an expression as it is."""
    return value if isinstance(value, Expr) else const(value)


@functools.cache
def _index(name: str) -> Expr:
    return Expr(Op.INDEX, (), name, Type.FLOAT if name == "s" else Type.INT, None)


def index(name: str, span: Span | None = None) -> Expr:
    """One of `s i j b h hk q_len kv_len`."""
    shared = _index(name)
    return shared if span is None else Expr(Op.INDEX, (), name, shared.type, span)


def capture(name: str, type_: Type, span: Span | None = None) -> Expr:
    """A captured scalar."""
    return Expr(Op.CAPTURE, (), name, type_, span)


def size(name: str, axis: int, span: Span | None = None) -> Expr:
    """The length of one dimension of a captured tensor."""
    return Expr(Op.SIZE, (), (name, axis), Type.INT, span)


def load(name: str, indices: tuple[Expr, ...], type_: Type, span: Span | None = None) -> Expr:
    """A read of a captured tensor; an index outside it reads 0."""
    for position in indices:
        if position.type not in (Type.INT, Type.ANY):
            raise TypeMismatch(
                f"an index of `{name}` must be an int, but this is {position.type.value}",
                span=position.span or span,
                hint="convert it, e.g. int(x) or floor(x)",
            )
    if any(p.is_const and p.attr < 0 for p in indices):
        if type_ is not Type.ANY:
            return _zero(type_, span)
        # Kept apart from the literal t[-1], which counts from the end (and is a SIZE).
        indices = tuple(make(Op.SUB, const(0), -p) if p.is_const else p for p in indices)
    return Expr(Op.LOAD, indices, name, type_, span)


def _zero(type_: Type, span: Span | None) -> Expr:
    return const({Type.BOOL: False, Type.INT: 0, Type.FLOAT: 0.0}[type_], span)


TRUE, FALSE = const(True), const(False)
ZERO, ONE = const(0.0), const(1.0)


# -- typed construction ------------------------------------------------------------------------

_RANK = {Type.BOOL: 0, Type.INT: 1, Type.FLOAT: 2}


def promote(*types: Type) -> Type:
    """bool -> int -> float, as in Python; a float wins over a type that is still open."""
    if Type.FLOAT in types:
        return Type.FLOAT
    if Type.ANY in types:
        return Type.ANY
    return max(types, key=_RANK.__getitem__)


def convert(arg: Expr, to: Type) -> Expr:
    """`arg` as type `to`; an open type is converted once it is known."""
    if arg.type is to or to is Type.ANY or arg.type is Type.ANY:
        return arg
    op = {Type.FLOAT: Op.FLOAT, Type.INT: Op.INT, Type.BOOL: Op.BOOL}[to]
    if arg.is_const and to is Type.FLOAT:
        return const(float(arg.attr), arg.span)
    if arg.is_const and to is Type.INT and arg.type is Type.BOOL:
        return const(int(arg.attr), arg.span)
    return Expr(op, (arg,), None, to, arg.span)


def make(op: Op, *args: Expr, span: Span | None = None) -> Expr:
    """An operation on operands: checks their types, inserts conversions, gives the type."""
    record = OPS[op]
    if len(args) != record.arity:
        raise TypeMismatch(
            f"`{op.value}` takes {record.arity} operands, not {len(args)}", span=span
        )
    return _RULES[record.rule](op, args, span)


def _node(op: Op, args: tuple[Expr, ...], type_: Type, span: Span | None) -> Expr:
    return Expr(op, args, None, type_, span)


def _arith(op: Op, args: tuple[Expr, ...], span: Span | None) -> Expr:
    type_ = promote(*(a.type for a in args))
    if type_ is Type.BOOL:
        type_ = Type.INT
    args = tuple(convert(a, type_) for a in args)
    if op is Op.NEG and args[0].is_const:
        # -3 is a literal, so that printing and reading it gives the same tree
        return const(_negated(args[0].attr), span)
    return _node(op, args, type_, span)


def _negated(value: int | float) -> int | float:
    return value if value == INT_MIN and isinstance(value, int) else -value


def _float(op: Op, args: tuple[Expr, ...], span: Span | None) -> Expr:
    return _node(op, tuple(convert(a, Type.FLOAT) for a in args), Type.FLOAT, span)


def _pow(op: Op, args: tuple[Expr, ...], span: Span | None) -> Expr:
    base, exponent = args
    literal = exponent.is_const and exponent.type is not Type.FLOAT and exponent.attr >= 0
    if literal and base.type in (Type.BOOL, Type.INT):
        return _node(op, (convert(base, Type.INT), convert(exponent, Type.INT)), Type.INT, span)
    if literal and base.type is Type.ANY:
        return _node(op, args, Type.ANY, span)
    return _float(op, args, span)


_LOGICAL = {Op.BITAND: Op.AND, Op.BITOR: Op.OR, Op.BITXOR: Op.NE, Op.INVERT: Op.NOT}


def _bits(op: Op, args: tuple[Expr, ...], span: Span | None) -> Expr:
    types = {a.type for a in args}
    if types == {Type.BOOL}:
        return make(_LOGICAL[op], *args, span=span)
    if Type.FLOAT in types:
        bad = next(a for a in args if a.type is Type.FLOAT)
        raise TypeMismatch(
            f"`{op.value}` needs ints or bools, but this is float",
            span=bad.span or span,
            hint="compare it, or convert it with int(x)",
        )
    if Type.ANY in types:
        return _node(op, args, Type.ANY, span)
    return _node(op, tuple(convert(a, Type.INT) for a in args), Type.INT, span)


def _integer(op: Op, args: tuple[Expr, ...], span: Span | None) -> Expr:
    for arg in args:
        if arg.type is Type.FLOAT:
            raise TypeMismatch(
                f"`{op.value}` needs ints, but this is float",
                span=arg.span or span,
                hint="convert it, e.g. int(x)",
            )
    return _node(op, tuple(convert(a, Type.INT) for a in args), Type.INT, span)


def _compare(op: Op, args: tuple[Expr, ...], span: Span | None) -> Expr:
    type_ = promote(*(a.type for a in args))
    if type_ is Type.BOOL and op in (Op.LT, Op.LE):
        type_ = Type.INT
    return _node(op, tuple(convert(a, type_) for a in args), Type.BOOL, span)


def require_bool(arg: Expr, what: str, span: Span | None) -> None:
    """Raise unless `arg` can be a condition."""
    if arg.type in (Type.BOOL, Type.ANY):
        return
    words = (arg.span.words if arg.span else "") or "x"
    raise TypeMismatch(
        f"{what} needs a bool condition, but this is {arg.type.value}",
        span=arg.span or span,
        hint=f"compare it, e.g. {words} != 0",
    )


def _logic(op: Op, args: tuple[Expr, ...], span: Span | None) -> Expr:
    for arg in args:
        require_bool(arg, f"`{op.value}`", span)
    return _node(op, args, Type.BOOL, span)


def _where(op: Op, args: tuple[Expr, ...], span: Span | None) -> Expr:
    condition, yes, no = args
    require_bool(condition, "`where`", span)
    type_ = promote(yes.type, no.type)
    return _node(op, (condition, convert(yes, type_), convert(no, type_)), type_, span)


_TARGET = {Op.FLOAT: Type.FLOAT, Op.INT: Type.INT, Op.BOOL: Type.BOOL}


def _convert(op: Op, args: tuple[Expr, ...], span: Span | None) -> Expr:
    (arg,) = args
    if arg.type is Type.ANY:
        return _node(op, args, _TARGET[op], span)
    return convert(arg, _TARGET[op])


def _rounding(op: Op, args: tuple[Expr, ...], span: Span | None) -> Expr:
    (arg,) = args
    if arg.type in (Type.INT, Type.BOOL):
        return convert(arg, Type.INT)
    return _node(op, args, Type.INT, span)


_RULES: dict[Rule, Callable[[Op, tuple[Expr, ...], Span | None], Expr]] = {
    Rule.ARITH: _arith,
    Rule.FLOAT: _float,
    Rule.POW: _pow,
    Rule.BITS: _bits,
    Rule.INTEGER: _integer,
    Rule.COMPARE: _compare,
    Rule.LOGIC: _logic,
    Rule.WHERE: _where,
    Rule.CONVERT: _convert,
    Rule.ROUNDING: _rounding,
}


def resolve(root: Expr, types: Mapping[str, Type]) -> Expr:
    """Give captures the types that the call, or an assumption, decided."""

    def rule(node: Expr) -> Expr:
        if node.op not in (Op.CAPTURE, Op.LOAD) or node.type is not Type.ANY:
            return node
        type_ = types.get(node.attr, Type.ANY)
        if node.op is Op.CAPTURE:
            return capture(node.attr, type_, node.span)
        return load(node.attr, node.args, type_, node.span)

    return rewrite(root, rule)


def decides(node: Expr) -> bool:
    """Whether floats free of `s` decide this bool or int.

    Such floats are evaluated in float32 in source order by every backend, the tile analysis and
    the oracle, so that all of them see the same pairs.
    """
    return (
        node.type is not Type.FLOAT
        and any(a.type is Type.FLOAT for a in node.args)
        and not node.reads_s
    )

"""FlexAttention's functions from our IR, spelled as its users write them: the peer in a benchmark.

    s - load(slopes, h) * float(i - j)   ->   def score_mod(s, b, h, i, j):
                                                  return s - slopes[h] * (i - j)

The text is the user's own expression, not the simplified one: FlexAttention's compiler has its own
rules. Conversions that torch's promotion implies are left out, tables are indexed directly, and
what depends on Python numbers alone stays Python (`math.log(8)`).
"""

from __future__ import annotations

import builtins
import hashlib
import linecache
import math
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..emit import Spell, Text, emit, wrap
from ..ir.capture import Kind
from ..ir.expr import TRUE, Expr, postorder
from ..ir.ops import OPS, Op, Rule, Type
from ..ir.show import (
    AND,
    ATOM,
    BITAND,
    BITOR,
    BITXOR,
    COMPARE,
    NOT,
    OR,
    POWER,
    PRODUCT,
    SHIFT,
    SUM,
    TERNARY,
    UNARY,
)
from ..plan import Param, Typed
from ..variant import S, rename_captures

# Whether the indices of a read are known to lie inside the table, by axis.
Inside = Callable[[Expr, int], bool]


@dataclass
class Context:
    """What spelling one function needs to know."""

    params: Mapping[str, Param]
    inside: Inside
    prologue: dict[str, str] = field(default_factory=dict)  # slice of a table -> its name
    originals: dict[bytes, Expr] = field(default_factory=dict)  # reads as `inside` knows them

    def is_python(self, node: Expr) -> bool:
        """Whether the value is a Python number when FlexAttention is compiled."""
        if node.op is Op.INDEX:
            return node.attr in ("q_len", "kv_len")
        if node.op is Op.CAPTURE:
            return self.params[node.attr].by_value
        return node.op is not Op.LOAD and all(self.is_python(a) for a in node.args)


Spelled = Callable[[Context, Expr, Sequence[Text]], Text]


# -- the page of rules -------------------------------------------------------------------------


def _const(context: Context, node: Expr, args: Sequence[Text]) -> Text:
    value = node.attr
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")', ATOM
    return repr(value), UNARY if repr(value).startswith("-") else ATOM


def _index(context: Context, node: Expr, args: Sequence[Text]) -> Text:
    return ("h // gqa_group", PRODUCT) if node.attr == "hk" else (node.attr, ATOM)


def _capture(context: Context, node: Expr, args: Sequence[Text]) -> Text:
    return _widened(context, node, node.attr)


def _size(context: Context, node: Expr, args: Sequence[Text]) -> Text:
    return f"{node.attr[0]}.shape[{node.attr[1]}]", ATOM


def _load(context: Context, node: Expr, args: Sequence[Text]) -> Text:
    fixed = [context.is_python(a) for a in node.args]
    table, axes = node.attr, list(range(len(args)))
    if any(fixed):
        # vmap takes tensors as indices only: Python indices slice the table beforehand.
        pairs = zip(node.args, fixed, strict=True)
        picks = [_unshared(context, a) if is_fixed else ":" for a, is_fixed in pairs]
        axes = [k for k in axes if not fixed[k]]
        name = f"{table}_part_{len(context.prologue)}"
        # Compiled for CPUs, FlexAttention fails on several views of one table.
        part = f"{table}[{', '.join(picks)}].contiguous()"
        table = context.prologue.setdefault(part, name)
    conditions, places = [], []
    for axis, k in enumerate(axes):
        text, length = args[k][0], f"{table}.shape[{axis}]"
        known = context.inside(context.originals[node.digest], k)
        places.append(text if known else f"at({text}, {length})")
        conditions += [] if known else [f"inside({text}, {length})"]
    read = f"{table}[{', '.join(places)}]" if places else table
    if conditions:
        zero = {Type.BOOL: "False", Type.INT: "0", Type.FLOAT: "0.0"}[node.type]
        read = f"torch.where({' & '.join(conditions)}, {read}, {zero})"
    return _widened(context, node, read)


def _unshared(context: Context, root: Expr) -> str:
    """The text without the names that shared values have inside a function."""
    texts: dict[int, Text] = {}
    for node in postorder(root):
        texts[id(node)] = SPELLING[node.op](context, node, [texts[id(a)] for a in node.args])
    return texts[id(root)][0]


def _widened(context: Context, node: Expr, text: str) -> Text:
    """A value from memory in a type that arithmetic neither rounds nor overflows in."""
    param = context.params[node.attr]
    if param.by_value and param.kind is Kind.SCALAR:
        return text, ATOM
    if param.element in ("f16", "bf16", "f64"):
        return f"{text}.float()", ATOM
    return (f"{text}.int()" if param.element in ("i8", "u8", "i16") else text), ATOM


def _either(python: Spelled, tensor: Spelled) -> Spelled:
    """One spelling for Python numbers, one where an operand is a tensor."""

    def rule(context: Context, node: Expr, args: Sequence[Text]) -> Text:
        return (python if context.is_python(node) else tensor)(context, node, args)

    return rule


def _infix(symbol: str, binding: int) -> Spelled:
    left = binding + (binding in (COMPARE, POWER))

    def rule(context: Context, node: Expr, args: Sequence[Text]) -> Text:
        return f"{wrap(args[0], left)} {symbol} {wrap(args[1], binding + 1)}", binding

    return rule


def _prefix(symbol: str, binding: int = UNARY) -> Spelled:
    return lambda context, node, args: (symbol + wrap(args[0], binding), binding)


def _call(function: str) -> Spelled:
    return lambda context, node, args: (f"{function}({', '.join(t for t, _ in args)})", ATOM)


def _form(form: str, binding: int = ATOM) -> Spelled:
    """A form in which {0}, {1}, ... stand for operands, which it encloses or that bind tightly."""
    return lambda context, node, args: (form.format(*(wrap(a, ATOM) for a in args)), binding)


def _function(name: str, python: str | None = None) -> Spelled:
    """A function of floats that torch and Python's math have."""
    return _either(_form(python) if python else _call(f"math.{name}"), _call(f"torch.{name}"))


def _extreme(python: str, both: str, bound: str) -> Spelled:
    """min or max: of two tensors, or of a tensor and a number."""

    def tensor(context: Context, node: Expr, args: Sequence[Text]) -> Text:
        x, y = node.args
        if not (context.is_python(x) or context.is_python(y)):
            return _call(both)(context, node, args)
        number, other = args if context.is_python(x) else args[::-1]
        return f"torch.clamp({other[0]}, {bound}={number[0]})", ATOM

    return _either(_call(python), tensor)


def _logic(python: Spelled, tensor: str, binding: int) -> Spelled:
    return _either(python, _infix(tensor, binding))


def _where(context: Context, node: Expr, args: Sequence[Text]) -> Text:
    if context.is_python(node.args[0]):
        condition, yes, no = args
        text = f"{wrap(yes, OR)} if {wrap(condition, OR)} else {wrap(no, OR)}"
        return text, TERNARY
    return _call("torch.where")(context, node, args)


def _nonzero(context: Context, node: Expr, args: Sequence[Text]) -> Text:
    return f"{wrap(args[0], COMPARE + 1)} != 0", COMPARE


def _method(name: str) -> Spelled:
    return _form(f"{{0}}.{name}()")


SPELLING: dict[Op, Spelled] = {
    Op.CONST: _const,
    Op.INDEX: _index,
    Op.CAPTURE: _capture,
    Op.LOAD: _load,
    Op.SIZE: _size,
    Op.ADD: _infix("+", SUM),
    Op.SUB: _infix("-", SUM),
    Op.MUL: _infix("*", PRODUCT),
    Op.DIV: _infix("/", PRODUCT),
    Op.FLOORDIV: _infix("//", PRODUCT),
    Op.MOD: _infix("%", PRODUCT),
    Op.POW: _infix("**", POWER),
    Op.NEG: _prefix("-"),
    Op.ABS: _either(_call("abs"), _call("torch.abs")),
    Op.MIN: _extreme("min", "torch.minimum", "max"),
    Op.MAX: _extreme("max", "torch.maximum", "min"),
    Op.BITAND: _infix("&", BITAND),
    Op.BITOR: _infix("|", BITOR),
    Op.BITXOR: _infix("^", BITXOR),
    Op.INVERT: _prefix("~"),
    Op.SHL: _infix("<<", SHIFT),
    Op.SHR: _infix(">>", SHIFT),
    Op.ILOG2: _either(
        _form("(max({0}, 1).bit_length() - 1)"),
        _form("torch.log2(torch.clamp({0}, min=1).float()).int()"),
    ),
    Op.LT: _infix("<", COMPARE),
    Op.LE: _infix("<=", COMPARE),
    Op.EQ: _infix("==", COMPARE),
    Op.NE: _infix("!=", COMPARE),
    Op.AND: _logic(_infix("and", AND), "&", BITAND),
    Op.OR: _logic(_infix("or", OR), "|", BITOR),
    Op.NOT: _either(_prefix("not ", NOT), _prefix("~")),
    Op.WHERE: _where,
    Op.FLOAT: _either(_call("float"), _method("float")),
    Op.INT: _either(_call("int"), _method("int")),
    Op.BOOL: _nonzero,
    Op.FLOOR: _either(_call("math.floor"), _form("torch.floor({0}).int()")),
    Op.CEIL: _either(_call("math.ceil"), _form("torch.ceil({0}).int()")),
    Op.ROUND: _either(_call("round"), _form("torch.round({0}).int()")),
    Op.EXP: _function("exp"),
    Op.EXP2: _function("exp2"),
    Op.EXPM1: _function("expm1"),
    Op.LOG: _function("log"),
    Op.LOG2: _function("log2"),
    Op.LOG1P: _function("log1p"),
    Op.SQRT: _function("sqrt"),
    Op.RSQRT: _function("rsqrt", "(1 / math.sqrt({0}))"),
    Op.TANH: _function("tanh"),
    Op.SIGMOID: _function("sigmoid", "(1 / (1 + math.exp(-{0})))"),
    Op.SOFTPLUS: _either(_form("math.log1p(math.exp({0}))"), _call("torch.nn.functional.softplus")),
    Op.ERF: _function("erf"),
    Op.SIN: _function("sin"),
    Op.COS: _function("cos"),
}


# -- conversions that promotion implies --------------------------------------------------------

_ANCHORED = {Rule.ARITH, Rule.COMPARE, Rule.WHERE}


def _without_implied(root: Expr, originals: dict[bytes, Expr]) -> Expr:
    """The expression without `float()` where torch promotes by itself; for spelling only.

    `originals` takes what each read was before.
    """
    done: dict[int, Expr] = {}
    for node in postorder(root):
        args = tuple(done[id(a)] for a in node.args)
        first = 1 if node.op is Op.WHERE else 0
        args = args[:first] + _implied(node, args[first:])
        made = done[id(node)] = Expr(node.op, args, node.attr, node.type, node.span)
        if node.op is Op.LOAD:
            originals[made.digest] = node
    return done[id(root)]


def _implied(node: Expr, operands: tuple[Expr, ...]) -> tuple[Expr, ...]:
    # torch.clamp and torch.minimum promote less.
    anchored = OPS[node.op].rule in _ANCHORED and node.op not in (Op.MIN, Op.MAX)
    is_float = any(a.type is Type.FLOAT and a.op is not Op.FLOAT for a in operands)
    if node.op is Op.DIV or (anchored and is_float):
        return tuple(a.args[0] if a.op is Op.FLOAT else a for a in operands)
    return operands


# -- text --------------------------------------------------------------------------------------

_TAKEN = {*dir(builtins), *"torch math functions score_mod mask_mod inside at gqa_group".split()}
_DERIVED = re.compile(r"t\d+|.*_part_\d+")
_HELPERS = """
def at(x, length):
    return torch.clamp(x, 0, length - 1)


def inside(x, length):
    return (x >= 0) & (x < length)


"""


def with_free_names(program: Typed) -> Typed:
    """The program with captures renamed that are called like something in the text."""
    names = {p.name: p.name for p in program.params}
    for name in names:
        while names[name] in _TAKEN or _DERIVED.fullmatch(names[name]):
            names[name] += "_"
            if names[name] in names:
                names[name] += "capture_"
    score, mask = (rename_captures(e, names) for e in (program.given_score, program.given_mask))
    params = tuple(replace(p, name=names[p.name]) for p in program.params)
    return replace(program, params=params, given_score=score, given_mask=mask)


def source(program: Typed, inside: Inside = lambda node, axis: True) -> str:
    """Python text with `functions(captures...)`, which gives (score_mod, mask_mod).

    Either is None where the variant has none. A read that `inside` does not know to stay in its
    table is guarded to read 0 outside.
    """
    program = with_free_names(program)
    context = Context({p.name: p for p in program.params}, inside)
    body: list[str] = []
    used: set[str] = set()
    results = []
    for head, root, absent, constant in (
        ("score_mod(s, b, h, i, j)", program.given_score, program.score == S, _FLAT_SCORE),
        ("mask_mod(b, h, i, j)", program.given_mask, program.mask == TRUE, _FLAT_MASK),
    ):
        if not absent:
            body += _function_lines(head, root, context, constant)
            used |= root.names
        results.append("None" if absent else head.partition("(")[0])
    parts = [f"{name} = {text}" for text, name in context.prologue.items()]
    lines = [*parts, *([""] if parts else []), *body, f"return {', '.join(results)}"]
    text = "\n".join(f"    {line}" if line else "" for line in lines)
    imports = "import math\n\nimport torch" if "math." in text else "import torch"
    return _FILE.format(
        name=program.name,
        imports=imports,
        helpers=_HELPERS if "inside(" in text else "",
        parameters=", ".join(_parameters(program, used)),
        body=text,
    )


_FLAT_SCORE = "torch.full_like(s, {})"
_FLAT_MASK = "torch.full_like(j, {}, dtype=torch.bool)"
_FILE = '''"""FlexAttention's functions for `{name}`."""

{imports}

{helpers}
def functions({parameters}):
{body}
'''


def _function_lines(head: str, root: Expr, context: Context, constant: str) -> list[str]:
    """A definition; a value that does not depend on tensors is spread by `constant`."""
    root = _without_implied(root, context.originals)
    spelling: dict[Op, Spell] = {op: partial(rule, context) for op, rule in SPELLING.items()}
    lines = emit((root,), spelling)
    if context.is_python(root):
        lines[-1] = f"return {constant.format(lines[-1].removeprefix('return '))}"
    return [f"def {head}:", *(f"    {line}" for line in lines), ""]


def _parameters(program: Typed, used: set[str]) -> list[str]:
    sizes = [name for name in ("q_len", "kv_len") if name in used]
    groups = ["gqa_group"] if "hk" in used else []
    return [*sizes, *groups, *(p.name for p in program.params if p.name in used)]


def functions(text: str, values: Mapping[str, Any]) -> tuple[Any, Any]:
    """(score_mod, mask_mod) of a text, with captures and sizes bound by name."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    # A path from the digest lets tracebacks and debuggers show the text.
    file = f"<scoremod flex {digest}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    # Dynamo imports the module of a function's globals.
    module = types.ModuleType(f"scoremod_flex_{digest}")
    sys.modules[module.__name__] = module
    exec(compile(text, file, "exec"), vars(module))
    make = module.functions
    names = make.__code__.co_varnames[: make.__code__.co_argcount]
    score_mod, mask_mod = make(*(values[name] for name in names))
    return score_mod, mask_mod

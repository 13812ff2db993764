"""The portable Triton backend: how operations are spelled for tiles, and how text is compiled.

    (i - j) % 3 == 0   ->   remainder(i - j, 3) == 0

Ints are computed in 32 bits where intervals prove that they fit, in 64 elsewhere. Floats that
decide which pairs attend use correctly rounded operations whatever the precision.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..analysis.interval import Bounds
from ..emit import Spell, Text, emit, wrap
from ..ir.capture import Kind
from ..ir.expr import Expr, decides, postorder
from ..ir.ops import Op, Type
from ..ir.show import ATOM, BITAND, BITOR, BITXOR, COMPARE, PRODUCT, SUM, UNARY
from ..passes.patterns import Pattern, pattern
from ..plan import INDICES, DeviceFunction, Param
from ..plan_triton import Options, launch_bounds
from ..target import Target
from .base import Backend

INT32 = (-(2**31), 2**31 - 1)


class HasFunctions(Protocol):
    """A plan with device functions."""

    @property
    def functions(self) -> tuple[DeviceFunction, ...]: ...


class KernelPlan(HasFunctions, Protocol):
    """What spelling the device functions of a plan looks at."""

    @property
    def target(self) -> Target: ...

    @property
    def options(self) -> Options: ...

    @property
    def params(self) -> tuple[Param, ...]: ...

    @property
    def exact(self) -> bool: ...


@dataclass
class Context:
    """What spelling one device function needs to know."""

    plan: KernelPlan
    bounds: Bounds
    strict: set[bytes] = field(default_factory=set)
    spelling: dict[Op, Spell] = field(default_factory=dict)

    def convert(self, node: Expr) -> Text:
        """An int as a float, where that is exact."""
        if node.is_const:
            return repr(float(node.attr)), UNARY
        texts: dict[int, Text] = {}
        for part in postorder(node):
            texts[id(part)] = self.spelling[part.op](part, [texts[id(a)] for a in part.args])
        return f"{wrap(texts[id(node)], ATOM)}.to(tl.float32)", ATOM

    def bits(self, node: Expr) -> int:
        """32 where every value of an int fits, else 64."""
        found = self.bounds(node)
        return 32 if INT32[0] <= found.lo.min() and found.hi.max() <= INT32[1] else 64

    def exact(self, node: Expr) -> bool:
        """Whether a float operation must be accurate."""
        return self.plan.exact or node.digest in self.strict


Rule = Callable[[Context, Expr, Sequence[Text]], Text]


# -- leaves ------------------------------------------------------------------------------------


def _const(context: Context, node: Expr, args: Sequence[Text]) -> Text:
    value = node.attr
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")', ATOM
    if isinstance(value, int) and INT32[1] < value < 2**32:
        # By itself Triton would take it for an unsigned number of 32 bits.
        return f"tl.cast({value}, tl.int64)", ATOM
    return repr(value), UNARY if repr(value).startswith("-") else ATOM


def _index(context: Context, node: Expr, args: Sequence[Text]) -> Text:
    return node.attr, ATOM


def _capture(context: Context, node: Expr, args: Sequence[Text]) -> Text:
    # A bool argument travels as an int32.
    return (f"{node.attr} != 0", COMPARE) if node.type is Type.BOOL else (node.attr, ATOM)


def _size(context: Context, node: Expr, args: Sequence[Text]) -> Text:
    return f"{node.attr[0]}_size_{node.attr[1]}", ATOM


def _load(context: Context, node: Expr, args: Sequence[Text]) -> Text:
    name, places = node.attr, []
    for axis, (text, _) in enumerate(args):
        places.append(f"at({text}, {name}_size_{axis}, {name}_stride_{axis})")
    if _is_near(context, node):
        places.append("NEAR=True")
    text = f"load_{len(args)}({', '.join([name, *places])})"
    if node.type is Type.BOOL:
        return text, ATOM
    kind = "float32" if node.type is Type.FLOAT else f"int{context.bits(node)}"
    return f"{text}.to(tl.{kind})", ATOM


def _is_near(context: Context, node: Expr) -> bool:
    """Whether the pairs of a tile read few elements, float32: those of its diagonals."""
    stored = {p.name: p.element for p in context.plan.params}
    on_gpu = context.plan.target.kind == "cuda"
    return on_gpu and stored[node.attr] == "f32" and pattern(node.args) is Pattern.DIAGONAL


# -- ints --------------------------------------------------------------------------------------


def _widened(context: Context, node: Expr, args: Sequence[Text]) -> tuple[list[Text], int]:
    """Int operands in the width that the operation needs, and that width."""
    bits = max([context.bits(a) for a in node.args], default=32)
    if node.type is Type.INT:
        bits = max(bits, context.bits(node))
    widened = []
    for arg, text in zip(node.args, args, strict=True):
        narrow = arg.type is Type.INT and not arg.is_const and context.bits(arg) < bits
        widened.append((f"{wrap(text, ATOM)}.to(tl.int64)", ATOM) if narrow else text)
    return widened, bits


def _narrowed(context: Context, node: Expr, text: Text, bits: int) -> Text:
    """The result in its own width."""
    if node.type is Type.INT and bits > context.bits(node):
        return f"{wrap(text, ATOM)}.to(tl.int32)", ATOM
    return text


def _both(integer: Callable[[Sequence[Text]], Text], floating: Rule | None = None) -> Rule:
    """A rule that widens ints, and another spelling for floats where they differ."""

    def rule(context: Context, node: Expr, args: Sequence[Text]) -> Text:
        if node.args[0].type is Type.FLOAT and floating is not None:
            return floating(context, node, args)
        if node.args[0].type is not Type.INT:
            return integer(args)
        widened, bits = _widened(context, node, args)
        return _narrowed(context, node, integer(widened), bits)

    return rule


def _infix(symbol: str, binding: int) -> Callable[[Sequence[Text]], Text]:
    left = binding + (binding == COMPARE)

    def spell(args: Sequence[Text]) -> Text:
        return f"{wrap(args[0], left)} {symbol} {wrap(args[1], binding + 1)}", binding

    return spell


def _prefix(symbol: str) -> Callable[[Sequence[Text]], Text]:
    return lambda args: (symbol + wrap(args[0], UNARY), UNARY)


def _call(function: str) -> Callable[[Sequence[Text]], Text]:
    return lambda args: (f"{function}({', '.join(text for text, _ in args)})", ATOM)


def _division(symbol: str, step: str) -> Rule:
    """Floor division and remainder: C's where both operands are known to be positive."""

    def rule(context: Context, node: Expr, args: Sequence[Text]) -> Text:
        if node.type is Type.FLOAT:
            return _call(f"{step}_float")(args)
        widened, bits = _widened(context, node, args)
        x, y = (context.bounds(a) for a in node.args)
        simple = bool(x.lo.min() >= 0 and y.lo.min() > 0)
        text = _infix(symbol, PRODUCT)(widened) if simple else _call(step)(widened)
        return _narrowed(context, node, text, bits)

    return rule


def _shift(step: str) -> Rule:
    """Shifts are done in 64 bits: 0 for amounts outside 0..63."""

    def rule(context: Context, node: Expr, args: Sequence[Text]) -> Text:
        wide = [(f"to_int64({text})", ATOM) for text, _ in args]
        return _narrowed(context, node, _call(step)(wide), 64)

    return rule


def _ilog2(context: Context, node: Expr, args: Sequence[Text]) -> Text:
    return f"ilog2(to_int64({args[0][0]})).to(tl.int32)", ATOM


def _power(context: Context, node: Expr, args: Sequence[Text]) -> Text:
    if node.type is Type.INT:
        wide = f"to_int64({args[0][0]})"
        return _narrowed(context, node, (f"int_power({wide}, {args[1][0]})", ATOM), 64)
    if node.args[1].is_const and node.args[1].attr == 2.0:
        base = wrap(args[0], PRODUCT + 1)
        return f"{base} * {base}", PRODUCT
    return f"power({args[0][0]}, {args[1][0]})", ATOM


# -- conversions -------------------------------------------------------------------------------


# Ints up to here are floats exactly.
EXACT_FLOAT = 2**24


def _to_float(context: Context, node: Expr, args: Sequence[Text]) -> Text:
    (inner,) = node.args
    parts = inner.args if inner.op in (Op.ADD, Op.SUB) else ()
    if parts and all(_is_exact_float(context, x) for x in (inner, *parts)):
        # Converting a row and a column costs less than converting a tile (16 a cycle and SM).
        texts = [context.convert(x) for x in parts]
        return _infix("+" if inner.op is Op.ADD else "-", SUM)(texts)
    return f"{wrap(args[0], ATOM)}.to(tl.float32)", ATOM


def _is_exact_float(context: Context, node: Expr) -> bool:
    found = context.bounds(node)
    return bool(found.lo.min() >= -EXACT_FLOAT and found.hi.max() <= EXACT_FLOAT)


def _to_int(context: Context, node: Expr, args: Sequence[Text]) -> Text:
    if node.args[0].type is Type.BOOL:
        return f"{wrap(args[0], ATOM)}.to(tl.int32)", ATOM
    return _saturated(context, node, f"truncate({args[0][0]})")


def _to_bool(context: Context, node: Expr, args: Sequence[Text]) -> Text:
    return f"{wrap(args[0], COMPARE + 1)} != 0", COMPARE


def _rounding(function: str) -> Rule:
    return lambda context, node, args: _saturated(context, node, f"{function}({args[0][0]})")


def _saturated(context: Context, node: Expr, text: str) -> Text:
    """A float without fraction as an int."""
    found = context.bounds(node.args[0])
    safe = not found.nan.any() and context.bits(node) == 32
    if safe and INT32[0] <= found.lo.min() and found.hi.max() <= INT32[1]:
        return f"{text}.to(tl.int32)", ATOM
    return _narrowed(context, node, (f"to_int({text})", ATOM), 64)


# -- floats ------------------------------------------------------------------------------------


def _function(fast: str, exact: str | None = None) -> Rule:
    """A function of floats; `exact` where the fast one is not accurate to a few units."""

    def rule(context: Context, node: Expr, args: Sequence[Text]) -> Text:
        return _call(exact if exact and context.exact(node) else fast)(args)

    return rule


def _divide(context: Context, node: Expr, args: Sequence[Text]) -> Text:
    if context.exact(node):
        return _call("divide_exact")(args)
    return _infix("/", PRODUCT)(args)


def _tanh(context: Context, node: Expr, args: Sequence[Text]) -> Text:
    if context.exact(node):
        return _call("tanh_exact")(args)
    # The hardware's tanh: one instruction, relative error 2**-11 (PTX ISA, tanh.approx.f32).
    on_gpu = context.plan.target.kind == "cuda"
    return _call("tanh_hardware" if on_gpu else "tanh_exp2")(args)


def _multiply_add(context: Context, node: Expr, args: Sequence[Text]) -> Text:
    return _infix("+" if node.op is Op.ADD else "-", SUM)(args)


def _where(context: Context, node: Expr, args: Sequence[Text]) -> Text:
    if node.type is not Type.INT:
        return _call("tl.where")(args)
    widened, bits = _widened(context, node, args)
    return _narrowed(context, node, _call("tl.where")(widened), bits)


def _nan_aware(function: str) -> Rule:
    """min and max give nan where an operand is nan."""
    nan = "propagate_nan=tl.PropagateNan.ALL"
    return lambda context, node, args: (f"{function}({args[0][0]}, {args[1][0]}, {nan})", ATOM)


def _plain(spell: Callable[[Sequence[Text]], Text]) -> Rule:
    return lambda context, node, args: spell(args)


SPELLING: dict[Op, Rule] = {
    Op.CONST: _const,
    Op.INDEX: _index,
    Op.CAPTURE: _capture,
    Op.LOAD: _load,
    Op.SIZE: _size,
    Op.ADD: _both(_infix("+", SUM), _multiply_add),
    Op.SUB: _both(_infix("-", SUM), _multiply_add),
    Op.MUL: _both(_infix("*", PRODUCT)),
    Op.DIV: _divide,
    Op.FLOORDIV: _division("//", "floor_divide"),
    Op.MOD: _division("%", "remainder"),
    Op.POW: _power,
    Op.NEG: _both(_prefix("-")),
    Op.ABS: _both(_call("tl.abs")),
    Op.MIN: _both(_call("tl.minimum"), _nan_aware("tl.minimum")),
    Op.MAX: _both(_call("tl.maximum"), _nan_aware("tl.maximum")),
    Op.BITAND: _both(_infix("&", BITAND)),
    Op.BITOR: _both(_infix("|", BITOR)),
    Op.BITXOR: _both(_infix("^", BITXOR)),
    Op.INVERT: _both(_prefix("~")),
    Op.SHL: _shift("shift_left"),
    Op.SHR: _shift("shift_right"),
    Op.ILOG2: _ilog2,
    Op.LT: _both(_infix("<", COMPARE)),
    Op.LE: _both(_infix("<=", COMPARE)),
    Op.EQ: _both(_infix("==", COMPARE)),
    Op.NE: _both(_infix("!=", COMPARE)),
    Op.AND: _plain(_infix("&", BITAND)),
    Op.OR: _plain(_infix("|", BITOR)),
    Op.NOT: _plain(_prefix("~")),
    Op.WHERE: _where,
    Op.FLOAT: _to_float,
    Op.INT: _to_int,
    Op.BOOL: _to_bool,
    Op.FLOOR: _rounding("tl.floor"),
    Op.CEIL: _rounding("tl.ceil"),
    Op.ROUND: _rounding("round_half_even"),
    Op.EXP: _function("tl.exp", "exp_exact"),
    Op.EXP2: _function("tl.exp2"),
    Op.EXPM1: _function("expm1"),
    Op.LOG: _function("tl.log"),
    Op.LOG2: _function("tl.log2"),
    Op.LOG1P: _function("log1p"),
    Op.SQRT: _function("tl.sqrt", "tl.sqrt_rn"),
    Op.RSQRT: _function("tl.rsqrt", "rsqrt_exact"),
    Op.TANH: _tanh,
    Op.SIGMOID: _function("sigmoid", "sigmoid_exact"),
    Op.SOFTPLUS: _function("softplus"),
    Op.ERF: _function("tl.erf"),
    Op.SIN: _function("tl.sin"),
    Op.COS: _function("tl.cos"),
}


# -- device functions --------------------------------------------------------------------------


def define(function: DeviceFunction, plan: KernelPlan) -> str:
    """The user's score, mask or key range as a jit function."""
    context = Context(plan, launch_bounds(function.params, small=plan.options.small))
    context.strict = _strict(function.body)
    context.spelling.update({op: partial(rule, context) for op, rule in SPELLING.items()})
    names = (*INDICES, "sm_scale", *parameter_names(function.params))
    body = [f"    {line}" for line in emit(function.body, context.spelling)]
    head = f"def {function.name}({', '.join(names)}):"
    return "\n".join(["@triton.jit", head, f'    """{function.doc}"""', *body])


def fp_fusion(plan: HasFunctions) -> bool:
    """Whether products and sums may be fused: not where they decide which pairs attend."""
    return not any(_has_strict_products(function.body) for function in plan.functions)


def _has_strict_products(roots: Sequence[Expr]) -> bool:
    strict = _strict(roots)
    return any(
        node.op in (Op.ADD, Op.SUB)
        and node.digest in strict
        and any(a.op is Op.MUL for a in node.args)
        for node in postorder(*roots)
    )


def _strict(roots: Sequence[Expr]) -> set[bytes]:
    """Floats below a node that they decide."""
    found: set[bytes] = set()
    for node in postorder(*roots):
        if decides(node):
            todo = [a for a in node.args if a.type is Type.FLOAT]
            while todo:
                inner = todo.pop()
                if inner.digest not in found:
                    found.add(inner.digest)
                    todo.extend(a for a in inner.args if a.type is Type.FLOAT)
    return found


def parameter_names(params: Sequence[Param]) -> list[str]:
    """The names of captures as arguments: a table brings its lengths and strides."""
    names = []
    for param in params:
        names.append(param.name)
        if param.kind is Kind.TENSOR:
            names += [f"{param.name}_size_{k}" for k in range(param.rank)]
            names += [f"{param.name}_stride_{k}" for k in range(param.rank)]
    return names


# -- compiling ---------------------------------------------------------------------------------


def load_text(text: str, folder: Path) -> Any:
    """Import rendered text from a path that follows from its digest; gives the module."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    path = folder / f"scoremod_{digest}.py"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial_path = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        partial_path.write_text(text, encoding="utf-8")
        partial_path.replace(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def mend_interpreter() -> None:
    """Let Triton's interpreter compare scalars as compiled code does, and take less time."""
    _compare_scalars()
    _patch_language_once()


def _compare_scalars() -> None:
    """Let a comparison of scalars be a bool.

    Triton 3.6 gives it its operands' type, so that a tile filled with it holds numbers: `&`
    refuses them if they are floats, and `~` turns 1 into -2.
    """
    from triton.language import int1
    from triton.runtime.interpreter import InterpreterBuilder

    binary_op = InterpreterBuilder.binary_op

    def mended(self: Any, left: Any, right: Any, op: Any) -> Any:
        found = binary_op(self, left, right, op)
        if found.data.dtype == bool:
            found.dtype = int1
        return found

    InterpreterBuilder.binary_op = mended


def _patch_language_once() -> None:
    """Put the interpreter's functions in the place of the language's once a launch and module.

    Triton does it in each call of a function by a kernel: 31 tests of tests/test_attention.py
    (-k "test_captures_of_every_index and triton", two cores, no GPU) took 36.7 s, and take 21.0 s.
    """
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterError

    launch, call = GridExecutor.__call__, InterpretedFunction.__call__
    patched: list[set[int]] = []  # modules by the dictionaries of their names, for each launch

    def noted(self: Any, *args: Any, **keywords: Any) -> None:
        patched.append({id(self.fn.__globals__)})
        try:
            launch(self, *args, **keywords)
        finally:
            patched.pop()

    def plain(self: Any, *args: Any, **keywords: Any) -> Any:
        module = id(self.fn.__globals__)
        if not patched or module not in patched[-1]:
            if patched:
                patched[-1].add(module)
            return call(self, *args, **keywords)
        try:
            return self.rewrite()(*args, **keywords)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    GridExecutor.__call__, InterpretedFunction.__call__ = noted, plain


TRITON = Backend("triton", "triton", define, parameter_names, load_text)

"""The operator `scoremod::attend`: what torch.compile, export and fake tensors see of a call.

Its text argument is the variant in the mini-language, read where the operator runs; so an exported
program runs in a process that never saw the variant. Numbers travel in lists beside the tensors,
and `how` says what each value is: `auto exact None fintb` is backend, precision, `deterministic`,
then scale (a float), q_offset (an int), kv_lens (none) and two captures, a tensor and a bool.
The residual of an output, where gradients need it, is a third result, else that is empty: a word
before the kinds of values says so, `kept` or `none`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.library import custom_op

from . import attention, autograd
from .autograd import Call, Pair
from .binding import Bound, bind
from .bundle import digest_in
from .errors import BackendUnavailable
from .frontend.source import MAX_TEXT, read_text_source
from .gradients import Result
from .inputs import HALVES, Inputs, check_inputs, empty_like_q, empty_residual
from .origin import Leaf
from .plan import Param, Typed, assumed_params, typed
from .variant import Program, read

P = ParamSpec("P")
R = TypeVar("R")

KEPT = "kept"  # the residual

PLAIN = (Tensor, torch.nn.Parameter)

_VALUES = (
    "Tensor q, Tensor k, Tensor v, Tensor[] tensors, SymInt[] ints, float[] floats, "
    "str variant, str how"
)


def constant(function: Callable[P, R]) -> Callable[P, R]:
    """Let Dynamo call a function instead of following it, and keep the result.

    What torch.compiler.assume_constant_result does, without its import of Dynamo, and Triton.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_watched(q: object) -> bool:
    """Whether torch looks on: subclasses such as fake tensors, and modes, see one operator."""
    if type(q) in PLAIN:
        return q.is_meta or torch._C._len_torch_dispatch_stack() > 0  # type: ignore[attr-defined]
    return isinstance(q, Tensor)


def attend(text: str, how: str, qkv: Sequence[Tensor], values: Sequence[Any]) -> Pair:
    """(out, lse) through the operator; Dynamo follows this function.

    `values` are scale, q_offset, kv_lens and the captures; `how` is the rest of the call.
    """
    tensors: list[Tensor] = []
    ints: list[int] = []
    floats: list[float] = []
    kinds = ""
    for value in values:
        if value is None:
            kinds += "n"
        elif isinstance(value, Tensor):
            kinds += "t"
            tensors.append(value)
        elif isinstance(value, bool):
            kinds += "b"
            ints.append(int(value))
        elif isinstance(value, int):
            kinds += "i"
            ints.append(value)
        else:
            kinds += "f"
            floats.append(float(value))
    kept = KEPT if _keeps_residual(text, how, qkv, tensors) else "none"
    out, lse, _ = _attend(*qkv, tensors, ints, floats, text, f"{how} {kept} {kinds}")
    return out, lse


def _keeps_residual(text: str, how: str, qkv: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
    """Whether gradients will read what rounding takes from the output."""
    if not torch.is_grad_enabled() or qkv[0].dtype not in HALVES:
        return False
    if qkv[0].device.type == "cpu" and not how.startswith("triton "):
        return False
    return any(x.requires_grad for x in (*qkv, *tensors)) and _shows(text)


@constant
def _shows(text: str) -> bool:
    """The same of the program; a bundle has no kernels for it."""
    if digest_in(text):
        return False
    program = _program(text)
    return not typed(program, assumed_params(program)).sees_many_keys


# -- inside the operator -----------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _program(text: str) -> Program:
    # Printed by scoremod, where the loops of a short source are written out.
    return read(Leaf(read_text_source(text, "<exported>", max_words=MAX_TEXT)), {})


@functools.lru_cache(maxsize=4096)
def _typed(text: str, params: tuple[Param, ...]) -> Typed:
    return typed(_program(text), params, tuple(text.splitlines()), digest_in(text))


def _unpacked(
    tensors: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float], kinds: str
) -> list[Any]:
    """The values in order, from the lists that they travelled in."""
    tables, whole, real = iter(tensors), iter(ints), iter(floats)
    take: dict[str, Callable[[], Any]] = {
        "n": lambda: None,
        "t": lambda: next(tables),
        "b": lambda: bool(next(whole)),
        "i": lambda: next(whole),
        "f": lambda: next(real),
    }
    return [take[kind]() for kind in kinds]


_DETERMINISTIC = {str(x): x for x in (None, False, True)}


def _bound_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    variant: str,
    how: str,
) -> tuple[Typed, Inputs, tuple[Bound, ...], str | None]:
    """What the operator's arguments describe, checked and bound, and the backend asked for."""
    backend, precision, deterministic, kept, kinds = how.split(" ")
    scale, q_offset, kv_lens, *captured = _unpacked(tensors, ints, floats, kinds)
    with torch.autocast(q.device.type, enabled=False):  # what it asks for is done already
        inputs = check_inputs(
            q, k, v, scale=scale, q_offset=q_offset, kv_lens=kv_lens, precision=precision
        )
    inputs = replace(
        inputs, deterministic=_DETERMINISTIC[deterministic], keeps_residual=kept == KEPT
    )
    program = _program(variant)
    given = dict(zip((c.name for c in program.captures), captured, strict=True))
    bound = bind(program.captures, {}, given, {}, inputs.sizes, q.device)
    known = _typed(variant, tuple(item.param for item in bound))
    return known, inputs, bound, None if backend == "auto" else backend


def _call(*arguments: Any) -> tuple[Call, list[Any]]:
    """The call to be run."""
    known, inputs, bound, asked = _bound_call(*arguments)
    name, why = attention.choose_backend(known, inputs, bound, asked)
    if name == "eager":
        raise BackendUnavailable(
            f"the oracle is no operator, and is to run this call: {why}",
            hint="call it outside torch.compile, torch.export and torch's dispatch modes",
        )
    return autograd.take_apart(known, inputs, bound, name)


Triple = tuple[Tensor, Tensor, Tensor]  # out, lse and the residual


@custom_op("scoremod::attend", mutates_args=(), schema=f"({_VALUES}) -> (Tensor, Tensor, Tensor)")
def _attend(q: Tensor, *arguments: Any) -> Triple:
    call, values = _call(q, *arguments)
    out, lse, residual = autograd.forward(call, values)
    # Where another backend runs than the one it was asked of, nobody reads it.
    return out, lse, _room(call.keeps_residual, out).zero_() if residual is None else residual


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Triple:
    check_inputs(q, k, v, scale=None, q_offset=0, kv_lens=None, precision="auto")
    lse = torch.float64 if q.dtype is torch.float64 else torch.float32
    out = empty_like_q(q, v.shape[3])
    kept = f" {KEPT} " in arguments[-1]
    return out, q.new_empty(q.shape[:3], dtype=lse), _room(kept, out)


def _room(kept: bool, out: Tensor) -> Tensor:
    """The operator's third result, unwritten; without elements where no residual is kept."""
    return empty_residual(out, out.shape[3]) if kept else out.new_empty(0, dtype=torch.int32)


@custom_op(
    "scoremod::attend_backward",
    mutates_args=(),
    schema="(Tensor out, Tensor lse, Tensor residual, Tensor grad_out, Tensor grad_lse, "
    f"bool[] wanted, {_VALUES}) -> Tensor[]",
)
def _attend_backward(
    out: Tensor,
    lse: Tensor,
    residual: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor,
    wanted: Sequence[bool],
    *arguments: Any,
) -> list[Tensor]:
    """The gradients of the tensors that are wanted, in order."""
    call, values = _call(*arguments)
    flags = iter(wanted)
    asked = [next(flags) if isinstance(x, Tensor) else False for x in values]
    kept = residual if call.keeps_residual else None
    found = autograd.backward(call, values, Result(out, lse, grad_out, grad_lse, kept), asked)
    return [x.contiguous() for x in found if x is not None]


@_attend_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    wanted, q, k, v, tensors, *_ = arguments[5:]
    pairs = zip((q, k, v, *tensors), wanted, strict=True)
    return [x.new_empty(x.shape) for x, wants in pairs if wants]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Triple) -> None:
    q, k, v, tensors, *ctx.rest = inputs
    _require_scores(q, k, v, tensors, *ctx.rest)
    ctx.save_for_backward(*output, q, k, v, *tensors)


def _require_scores(*arguments: Any) -> None:
    """Raise for captures that require grad where none can reach them."""
    # No backend is chosen: that looks at the memory of tensors, and here they may be fake.
    program, _, bound, _ = _bound_call(*arguments)
    for item in bound:
        if isinstance(item.given, Tensor) and item.given.requires_grad:
            autograd.require_score(item, program)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor, _: Any) -> tuple[Any, ...]:
    *results, q, k, v = ctx.saved_tensors[:6]
    tensors = list(ctx.saved_tensors[6:])
    *first, listed = ctx.needs_input_grad[:4]
    wanted = [*first, *listed]
    found = iter(
        _attend_backward(*results, grad_out, grad_lse, wanted, q, k, v, tensors, *ctx.rest)
    )
    given = [next(found) if wants else None for wants in wanted]
    # torch takes an empty list for a list of tensors.
    rest: list[Any] = [[] if isinstance(x, list) and not x else None for x in ctx.rest]
    return (*given[:3], given[3:], *rest)


_attend.register_autograd(_backward, setup_context=_setup_context)

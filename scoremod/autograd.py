"""Differentiable calls: one `torch.autograd.Function` around every backend's forward and backward.

A call is taken apart into what may be a tensor and the rest, `Call`; so tensors are saved where
torch watches over them, and eager calls and the registered operator run the same two functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._functorch.utils import unwrap_dead_wrappers

from . import attention
from .backward_triton import keep_kind
from .binding import Bound, Value
from .blocks import Blocks
from .errors import BackendUnavailable, CaptureMismatch
from .gradients import Answer, Result, Wanted
from .inputs import Inputs
from .ir.capture import Capture
from .plan import Param, Typed
from .tiles import Tiles
from .warm import Warm
from .warm_backward import KindOfReturn, WarmBackward, first_of_kind, given_of, kind_of_return

# Before the captures: q, k, v, scale, q_offset, kv_lens.
FIXED = 6
MAX_RETURNS = 16  # kinds of backwards that a kind of call keeps

Values = Sequence[Any]  # FIXED ones, then each capture as it was given
Pair = tuple[torch.Tensor, torch.Tensor]  # out and lse


@dataclass(frozen=True)
class Slot:
    """A bound capture without its value."""

    param: Param
    capture: Capture
    shape: tuple[int, ...] | None  # of a tensor, as the program reads it

    @classmethod
    def of(cls, item: Bound) -> Slot:
        """What is left of a capture when its value is taken out."""
        value = item.value
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        return cls(item.param, item.capture, shape)

    def filled(self, given: Value) -> Bound:
        """The capture with a value of the same shape and type."""
        value = given
        if isinstance(given, torch.Tensor):
            assert self.shape is not None
            value = given.expand(self.shape) if self.shape else given.reshape(())
        return Bound(self.param, value, self.capture, given)


@dataclass(frozen=True)
class Call:
    """All of a call but its values."""

    program: Typed
    backend: str
    precision: str
    deterministic: bool | None
    tiles: Tiles | Blocks | None
    slots: tuple[Slot, ...]
    keeps_residual: bool
    warm: Warm | None = None  # runs the forward of calls like one before
    # Backwards of such calls, None where one has to be decided each time.
    returns: dict[KindOfReturn, WarmBackward | None] = field(default_factory=dict, compare=False)

    def kind_of_return(
        self, values: Values, result: Result, wanted: Sequence[bool]
    ) -> KindOfReturn | None:
        """What decides a backward beyond this; None where backwards are not remembered."""
        if self.warm is None or self.backend != "hopper" or self.tiles is not None:
            return None
        if self.deterministic:
            return None
        return kind_of_return(values, result, wanted, self.warm.device)

    def inputs(self, values: Values) -> Inputs:
        """The call's own tensors and options."""
        q, k, v, scale, q_offset, kv_lens = values[:FIXED]
        options = (self.precision, self.tiles, self.deterministic, self.keeps_residual)
        return Inputs(q, k, v, scale, q_offset, kv_lens, *options)

    def bound(self, values: Values) -> tuple[Bound, ...]:
        """The call's captures."""
        pairs = zip(self.slots, values[FIXED:], strict=True)
        return tuple(slot.filled(given) for slot, given in pairs)


def take_apart(
    program: Typed, inputs: Inputs, bound: tuple[Bound, ...], backend: str
) -> tuple[Call, list[Any]]:
    """A bound call as what never is a tensor, and values."""
    options = (inputs.precision, inputs.deterministic, inputs.tiles)
    slots = tuple(Slot.of(item) for item in bound)
    call = Call(program, backend, *options, slots, inputs.keeps_residual)
    values = [inputs.q, inputs.k, inputs.v, inputs.scale, inputs.q_offset, inputs.kv_lens]
    return call, [*values, *(item.given for item in bound)]


# -- both directions ---------------------------------------------------------------------------


def forward(call: Call, values: Values) -> Answer:
    """The answer of a call."""
    if call.warm is not None:
        assert not isinstance(call.tiles, Blocks), "calls with lists of blocks have no kind"
        q, k, v, _, q_offset, kv_lens, *captures = values
        return call.warm.answer(q, k, v, q_offset, kv_lens, captures, call.tiles, None)
    return attention.attend(call.program, call.inputs(values), call.bound(values), call.backend)


def backward(
    call: Call, values: Values, result: Result, wanted: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The gradient of each value, None where it is not wanted."""
    kind = call.kind_of_return(values, result, wanted)
    warm = call.returns.get(kind) if kind is not None else None
    if warm is not None:
        return [*warm(given_of(values, result)), *[None] * (len(values) - 3)]
    bound, inputs = call.bound(values), call.inputs(values)
    captured = zip(bound, wanted[FIXED:], strict=True)
    names = frozenset(item.param.name for item, wants in captured if wants)
    what = Wanted(wanted[0], wanted[1], wanted[2], names)
    if kind is not None and kind not in call.returns:
        found, warm = first_of_kind(call.program, inputs, bound, result, what)
        keep_kind(call.returns, kind, warm, MAX_RETURNS)
    else:
        found = attention.gradients(call.program, inputs, bound, call.backend, result, what)
    rest = [_fitted(found.captures.get(x.param.name), x.given) for x in bound]
    return [found.q, found.k, found.v, None, None, None, *rest]


def _fitted(gradient: torch.Tensor | None, given: Value) -> torch.Tensor | None:
    """The gradient in the shape of what the user gave, which may have been expanded."""
    if gradient is None:
        return None
    assert isinstance(given, torch.Tensor)
    if gradient.numel() == given.numel():
        return gradient.reshape(given.shape)
    return gradient.sum_to_size(given.shape)


def require_score(item: Bound, program: Typed) -> None:
    """Raise for a capture that requires grad where no gradient can reach it."""
    name = item.param.name
    if name in program.given_mask.names and name not in program.given_score.names:
        raise CaptureMismatch(
            f"the capture `{name}` requires grad, but only the mask reads it",
            span=item.capture.span,
            hint=f"a mask selects pairs and has no gradient; give {name}.detach()",
        )


# -- eager calls -------------------------------------------------------------------------------


def attend(program: Typed, inputs: Inputs, bound: tuple[Bound, ...], backend: str) -> Pair:
    """(out, lse), recorded for a backward."""
    for item in bound:
        if isinstance(item.given, torch.Tensor) and item.given.requires_grad:
            require_score(item, program)
    call, values = take_apart(program, inputs, bound, backend)
    out, lse, _ = _recorded(call, *values)
    return out, lse


def _recorded(call: Call, *values: Any) -> Answer:
    """The answer of a call, recorded."""
    transformed = torch._C._are_functorch_transforms_active()
    answer: Answer = _apply(_Transformed if transformed else _Attention, call, *values)
    return answer


def _apply(function: type[torch.autograd.Function], *values: Any) -> Any:
    """`function.apply`, whose look at the signature of its forward takes longer than a launch.

    Outside of torch.func's transforms that look only fills in defaults, and there are none.
    """
    if torch._C._are_functorch_transforms_active():
        return function.apply(*values)  # type: ignore[no-untyped-call]
    plain: Any = super(torch.autograd.Function, function)
    return plain.apply(*unwrap_dead_wrappers(values))


@dataclass(frozen=True)
class Recorded:
    """What a call like one before still has to do where its gradients are wanted."""

    call: Call
    scale: Any

    @classmethod
    def of(
        cls, program: Typed, inputs: Inputs, bound: tuple[Bound, ...], backend: str, warm: Warm
    ) -> Recorded:
        """For calls of this one's kind."""
        call, _ = take_apart(program, replace(inputs, tiles=None), bound, backend)
        return cls(replace(call, warm=warm), inputs.scale)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_offset: int,
        kv_lens: torch.Tensor | None,
        captures: Sequence[Value],
        tiles: Tiles | None,
        *,
        return_lse: bool,
    ) -> Any:
        """out, or (out, lse)."""
        call = self.call if tiles is None else replace(self.call, tiles=tiles)
        out, lse, _ = _recorded(call, q, k, v, self.scale, q_offset, kv_lens, *captures)
        return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    """The attention of a call."""

    @staticmethod
    def forward(ctx: Any, call: Call, *values: Any) -> Answer:
        answer = forward(call, values)
        _save(ctx, call, values, answer)
        return answer

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any, _: Any) -> tuple[Any, ...]:
        *tensors, out, lse, residual = ctx.saved_tensors
        values = [
            number if x is None else x for number, x in zip(ctx.numbers, tensors, strict=True)
        ]
        wanted = ctx.needs_input_grad[1:]
        if (grad_out is None and grad_lse is None) or not any(wanted):
            return (None,) * (1 + len(values))
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        if not torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
            result = Result(out, lse, grad_out, grad_lse, residual)
            return (None, *backward(ctx.call, values, result, wanted))
        found = iter(
            _apply(_Backward, ctx.call, wanted, out, lse, residual, grad_out, grad_lse, *values)
        )
        return (None, *(next(found) if wants else None for wants in wanted))


def _save(ctx: Any, call: Call, values: Values, answer: Answer) -> None:
    """Keep what the backward needs: tensors where torch watches over them."""
    ctx.call = call
    tensors = [x if isinstance(x, torch.Tensor) else None for x in values]
    ctx.numbers = [None if isinstance(x, torch.Tensor) else x for x in values]
    ctx.save_for_backward(*tensors, *answer)
    ctx.set_materialize_grads(False)


class _Transformed(_Attention):
    """The same in two steps, as torch.func's transforms want it; torch takes longer for it."""

    @staticmethod
    def forward(call: Call, *values: Any) -> Answer:  # type: ignore[override]
        return forward(call, values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Answer) -> None:
        call, *values = inputs
        _save(ctx, call, values, output)


class _Backward(torch.autograd.Function):
    """The gradients of a call; it says why they have none themselves.

    A function of its own, so that torch.func runs it on the tensors inside its wrappers, and that
    create_graph=True finds what to say.
    """

    @staticmethod
    def forward(
        call: Call,
        wanted: Sequence[bool],
        out: torch.Tensor,
        lse: torch.Tensor,
        residual: torch.Tensor | None,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        *values: Any,
    ) -> tuple[torch.Tensor, ...]:
        found = backward(call, values, Result(out, lse, grad_out, grad_lse, residual), wanted)
        return tuple(x for x in found if x is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise BackendUnavailable(
            "second derivatives of attention are not computed",
            hint="drop create_graph=True, or write the attention with torch's own operations",
        )

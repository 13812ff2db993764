"""A call like one before: its checks and decisions hold, only pointers and numbers are new.

A warm call's host time is what small problems and decoding feel. `kind_of` is everything that the
checks, the binding and the choice of a kernel look at; calls of equal kind differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import attend_hopper, attend_triton
from .binding import Bound
from .gradients import Answer
from .inputs import Inputs, bound_of, empty_like_q
from .ir.capture import Kind
from .launch import Launcher, current_stream
from .plan import Typed
from .plan_triton import SMALL, Options, residual_words
from .structure import Sizes, Structure, structure
from .tiles import Tiles

Value = Any  # of a capture: a tensor or a number
KindOfCall = tuple[Any, ...]


def kind_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | torch.Tensor | None,
    q_offset: int | torch.Tensor,
    kv_lens: torch.Tensor | None,
    precision: str,
    backend: str | None,
    tiles: Any,
    values: Sequence[Value],
) -> KindOfCall | None:
    """The kind of a call on a GPU; None where it must be checked each time."""
    if torch._C._are_functorch_transforms_active():
        return None
    device = q.get_device()
    if device < 0 or device != torch._C._cuda_getDevice() or torch.is_autocast_enabled("cuda"):
        return None
    grad = torch.is_grad_enabled()
    if tiles is not None and type(tiles) is not Tiles:
        return None
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        return None
    # Device numbers rather than torch.device objects, which are slow to make and to hash.
    found: list[Any] = [
        q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype,
        device, k.get_device(), v.get_device(), precision, backend, tiles is None, grad,
    ]  # fmt: skip
    if grad:
        found += (q.requires_grad, k.requires_grad, v.requires_grad)
    if type(scale) in (float, int):
        found.append(scale)
    elif scale is not None:
        return None
    if type(q_offset) is not int or not 0 <= q_offset <= SMALL - q.shape[2]:
        return None
    if kv_lens is not None:
        found += (kv_lens.shape, kv_lens.stride(), kv_lens.dtype, kv_lens.get_device())
    for value in values:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            found += (value.shape, value.stride(), value.dtype, value.get_device())
            if grad:
                found.append(value.requires_grad)
        elif kind is int and -SMALL <= value <= SMALL:
            found.append(int)
        elif kind is float or kind is bool:
            found.append(kind)
        else:
            return None
    return tuple(found)


@dataclass(frozen=True)
class WarmTiles:
    """How a call of one kind comes to its tile structure."""

    structure: Structure
    places: tuple[int, ...]  # of the kernel's arguments that the structure depends on, too
    mask: Typed
    chosen: Options
    sizes: Sizes
    blocks: tuple[int, int]
    captures: tuple[Bound, ...]  # of the mask, without values
    of_call: tuple[int, ...]  # which of the call's captures they are

    def arguments(
        self,
        tiles: Tiles | None,
        device: torch.device,
        values: Sequence[Any],
        q_offset: int,
        kv_lens: torch.Tensor | None,
        captures: Sequence[Value],
    ) -> list[Any]:
        """What the attention reads the structure by."""
        if tiles is None:
            return self.structure.make(device, [values[k] for k in self.places], ()).arguments
        bound = [
            replace(x, value=captures[k]) for x, k in zip(self.captures, self.of_call, strict=True)
        ]
        tiles.check(self.mask, bound, self.sizes, q_offset, kv_lens)
        return tiles.stored(self.mask, self.chosen, self.sizes, self.blocks).arguments


@dataclass(frozen=True)
class Places:
    """Which argument of a kernel is what changes from call to call."""

    q: int
    k: int
    v: int
    out: int
    lse: int
    q_offset: int  # then kv_lens, where there are any, and the captures
    residual: int | None = None

    def of(self, inputs: Inputs) -> Places:
        """The places in a kernel that may keep a residual, which stands before q_offset."""
        if not inputs.keeps_residual:
            return self
        return replace(self, q_offset=self.q_offset + 1, residual=self.q_offset)

    @property
    def kv_lens(self) -> int:
        return self.q_offset + 1


# In `attend_triton.arguments`, and in `attend_hopper.arguments`.
PORTABLE = Places(0, 1, 2, 3, 4, 22)
HOPPER = Places(0, 9, 18, 27, 36, 39)
COUNTER = 37


@dataclass(frozen=True)
class Warm:
    """What a call of one kind still has to do."""

    launcher: Launcher
    grid: tuple[int, int, int]
    places: Places
    values: tuple[Any, ...]  # the arguments, with holes for what changes
    captures: tuple[int, ...]  # which argument each capture is
    lse_shape: tuple[int, ...]
    residual_shape: tuple[int, ...]
    spare_lse: torch.Tensor | None  # written where nobody reads the lse
    out_like_q: bool
    v_head_dim: int
    device: int
    tiles: WarmTiles | None = None
    counter: int | None = None  # an argument in memory that must be 0 at every launch

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
        lse = None if return_lse else self.spare_lse
        found = self.answer(q, k, v, q_offset, kv_lens, captures, tiles, lse)
        return (found.out, found.lse) if return_lse else found.out

    def answer(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_offset: int,
        kv_lens: torch.Tensor | None,
        captures: Sequence[Value],
        tiles: Tiles | None,
        lse: torch.Tensor | None,
    ) -> Answer:
        """The call's answer, with a new lse where none is given."""
        out = torch.empty_like(q) if self.out_like_q else empty_like_q(q, self.v_head_dim)
        if lse is None:
            lse = torch.empty(self.lse_shape, dtype=torch.float32, device=q.device)
        values, at = list(self.values), self.places
        values[at.q], values[at.k], values[at.v] = q, k, v
        values[at.out], values[at.lse] = out, lse
        values[at.q_offset] = q_offset
        residual = None
        if at.residual is not None:
            residual = torch.empty(self.residual_shape, dtype=torch.int32, device=q.device)
            values[at.residual] = residual
        if kv_lens is not None:
            values[at.kv_lens] = kv_lens
        for position, value in zip(self.captures, captures, strict=True):
            values[position] = value
        if self.tiles is not None:
            values += self.tiles.arguments(tiles, q.device, values, q_offset, kv_lens, captures)
        stream = current_stream(self.device)
        if self.counter is not None:
            values[self.counter] = drawn = attend_hopper.counter(q.device)
            launch = self.launcher.prepare(values, self.device)
            self.launcher.clear(drawn, stream)
        else:
            launch = self.launcher.prepare(values, self.device)
        launch.launch(self.grid, stream)
        return Answer(out, lse, residual)


# The largest lse, in bytes, that a kind of call keeps to itself. On small problems an allocation
# costs as much as the launch; on large ones nobody notices it.
SPARE_LSE = 2**16


def warm_portable(program: Typed, inputs: Inputs, bound: tuple[Bound, ...]) -> Warm | None:
    """What calls like this one will do; None where a call has to convert something each time."""
    chosen = attend_triton.options(program, inputs, bound)
    ready = attend_triton.forward(program, chosen, inputs.q.device)
    tensors = (inputs.q, inputs.k, inputs.v)
    if any(x.stride(3) != 1 for x in tensors) or not isinstance(ready.launcher, Launcher):
        return None
    if _converts_lens(inputs):
        return None
    if inputs.q.device.index != torch.cuda.current_device():
        return None
    made, places = outputs(inputs), PORTABLE.of(inputs)
    return Warm(
        ready.launcher,
        (attend_triton.programs(ready.block_m, inputs), 1, 1),
        places,
        _without_tensors(attend_triton.arguments(inputs, bound, made)),
        _positions(places, inputs, bound),
        **_about(inputs, made),
        tiles=_warm_tiles(places, program, chosen, inputs, bound, (ready.block_m, ready.block_n)),
    )


def _converts_lens(inputs: Inputs) -> bool:
    """Whether a call has to convert kv_lens each time."""
    lens = inputs.kv_lens
    return lens is not None and (lens.dtype is not torch.int32 or lens.stride() != (1,))


def warm_hopper(program: Typed, inputs: Inputs, bound: tuple[Bound, ...]) -> Warm | None:
    """The same for the Hopper backend."""
    device = inputs.q.device.index
    if device != torch.cuda.current_device() or _converts_lens(inputs):
        return None
    chosen = attend_hopper.options(program, inputs, bound)
    ready = attend_hopper.forward(program, chosen, inputs.q.device)
    turns = attend_hopper.turns_of(ready.block_m, inputs)
    grid = attend_hopper.programs(turns, device)
    made, places = outputs(inputs), HOPPER.of(inputs)
    counter = attend_hopper.counter(inputs.q.device)
    values = _without_tensors(attend_hopper.arguments(inputs, bound, made, counter))
    return Warm(
        ready.launcher,
        (grid, 1, 1),
        places,
        # A counter that nobody reads stays.
        (*values[:COUNTER], counter, *values[COUNTER + 1 :]),
        _positions(places, inputs, bound),
        **_about(inputs, made),
        tiles=_warm_tiles(places, program, chosen, inputs, bound, (ready.block_m, ready.block_n)),
        counter=COUNTER if turns > grid else None,
    )


WARM = {"triton": warm_portable, "hopper": warm_hopper}


def outputs(inputs: Inputs) -> Answer:
    """A call's answer, without memory."""
    q = torch.empty_strided(inputs.q.shape, inputs.q.stride(), dtype=inputs.q.dtype, device="meta")
    return attend_triton.outputs(replace(inputs, q=q))


def _without_tensors(values: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments without the tensors of this call, which would be kept alive."""
    return tuple(None if isinstance(x, torch.Tensor) else x for x in values)


def _about(inputs: Inputs, made: Answer) -> dict[str, Any]:
    """The fields of `Warm` about outputs and device."""
    like_q, (out, lse, _) = torch.empty_like(inputs.q, device="meta"), made
    spare = 4 * lse.numel() <= SPARE_LSE
    return {
        "lse_shape": tuple(lse.shape),
        "residual_shape": (*lse.shape, residual_words(inputs.v.shape[3])),
        "spare_lse": torch.empty_like(lse, device=inputs.q.device) if spare else None,
        "out_like_q": (like_q.shape, like_q.stride()) == (out.shape, out.stride()),
        "v_head_dim": inputs.v.shape[3],
        "device": inputs.q.device.index,
    }


def _warm_tiles(
    at: Places,
    program: Typed,
    chosen: Options,
    inputs: Inputs,
    bound: tuple[Bound, ...],
    blocks: tuple[int, int],
) -> WarmTiles | None:
    if not chosen.stored:
        return None
    mask, sizes = program.only_mask, Sizes.of(inputs)
    captures = bound_of(mask, bound)
    of_call = tuple(k for k, x in enumerate(bound) if x.param in mask.params)
    places = [at.q_offset]
    places += [at.kv_lens] if inputs.kv_lens is not None else []
    starts = _positions(at, inputs, bound)
    for k in of_call:
        places += range(starts[k], starts[k] + width(bound[k]))
    how = structure(mask, chosen, sizes, blocks, inputs.q.device)
    without = tuple(replace(x, value=0, given=0) for x in captures)
    return WarmTiles(how, tuple(places), mask, chosen, sizes, blocks, without, of_call)


def _positions(places: Places, inputs: Inputs, bound: tuple[Bound, ...]) -> tuple[int, ...]:
    """The argument that is each capture's value or pointer."""
    position = places.kv_lens + (inputs.kv_lens is not None)
    found = []
    for item in bound:
        found.append(position)
        position += width(item)
    return tuple(found)


def width(item: Bound) -> int:
    """How many arguments a capture is: a table brings its lengths and strides."""
    return 1 + 2 * item.param.rank if item.param.kind is Kind.TENSOR else 1

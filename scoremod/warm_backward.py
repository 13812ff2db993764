"""A backward like one before: the same launches, with its own tensors and numbers.

The first backward of a kind of calls that `warm` knows is watched; where all that it took besides
what it was given is memory, later ones do no more than take memory and launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from . import backward_hopper
from .backward_triton import call_of
from .binding import Bound
from .gradients import Gradients, Result, Wanted
from .inputs import Inputs
from .launch import Launcher, current_stream
from .plan import Typed
from .ready import Ready
from .warm import width

Tensor = torch.Tensor
KindOfReturn = tuple[object, ...]
Seen = tuple[Ready, int, Sequence[Any]]  # a kernel, programs, arguments
# What a backward is given, in this order, and after it the captures.
GIVEN = ("q", "k", "v", "o", "lse", "residual", "do", "q_offset", "kv_lens")
_NUMBER = {name: n for n, name in enumerate(GIVEN)}
# By their arguments' names: memory that kernels clear or fill themselves.
ROOMS = {"row_values", "dq_sums", "sums", "counters", "dq", "dk", "dv"}


def kind_of_return(
    values: Sequence[Any], result: Result, wanted: Sequence[bool], device: int
) -> KindOfReturn | None:
    """What decides a backward beyond the kind of its call; None where each has to be decided anew.

    Tensors that were saved may come back in other memory: hooks of torch's may have moved them.
    """
    if result.grad_lse is not None or torch.are_deterministic_algorithms_enabled():
        return None
    if torch._C._are_functorch_transforms_active() or torch._C._cuda_getDevice() != device:
        return None
    found: list[Any] = [*wanted]
    for x in given_of(values, result):
        if isinstance(x, Tensor):
            found += (x.stride(), x.dtype, x.data_ptr() % 16)
    return tuple(found)


@dataclass(frozen=True)
class Launched:
    """One launch, with holes for what changes from call to call."""

    launcher: Launcher
    programs: int
    values: tuple[Any, ...]
    holes: tuple[tuple[int, int], ...]  # which argument is the n-th given, or made behind these


@dataclass(frozen=True)
class Room:
    """Memory that a backward takes."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class WarmBackward:
    """What a backward of one kind still has to do."""

    device: int
    launches: tuple[Launched, ...]
    rooms: tuple[Room, ...]
    gradients: tuple[int | None, ...]  # which rooms dq, dk and dv are

    def __call__(self, given: Sequence[Any]) -> list[Tensor | None]:
        """dq, dk and dv of what `given_of` gives."""
        device = given[0].device
        made = [
            torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=device) for x in self.rooms
        ]
        known, stream = [*given, *made], current_stream(self.device)
        for launched in self.launches:
            values = list(launched.values)
            for place, n in launched.holes:
                values[place] = known[n]
            launch = launched.launcher.prepare(values, self.device)
            launch.launch((launched.programs, 1, 1), stream)
        return [None if n is None else made[n] for n in self.gradients]


def given_of(values: Sequence[Any], result: Result) -> list[Any]:
    """What a backward is given, of the values of `autograd.Call`: GIVEN, then captures."""
    q, k, v, _, q_offset, kv_lens, *captures = values
    mine = (result.out, result.lse, result.residual, result.grad_out, q_offset, kv_lens)
    return [q, k, v, *mine, *captures]


# -- the first of a kind -----------------------------------------------------------------------


def first_of_kind(
    program: Typed, inputs: Inputs, bound: tuple[Bound, ...], result: Result, wanted: Wanted
) -> tuple[Gradients, WarmBackward | None]:
    """The gradients of a call, and what later ones of its kind do; None for all over again."""
    call = call_of(program, inputs, bound, result, wanted)
    kernels = backward_hopper.kernels_of(call)
    if kernels is None or call.reads or call.is_empty or inputs.must_repeat:
        return backward_hopper.backward(program, inputs, bound, result, wanted), None
    seen: list[Seen] = []
    watched: dict[str, Any] = {
        f.name: _watched(made, seen)
        for f in fields(kernels)
        if isinstance(made := getattr(kernels, f.name), Ready)
    }
    with torch.no_grad():
        found = backward_hopper.gradients_of(call, wanted, replace(kernels, **watched))
    return found, _to_repeat(seen, found, _given(inputs, bound, result), bound)


def _watched(made: Ready, seen: list[Seen]) -> Ready:
    """A kernel whose launches are noted."""

    def run(programs: int, values: Sequence[Any]) -> None:
        seen.append((made, programs, values))
        made.run(programs, values)

    return replace(made, run=run)


def _given(inputs: Inputs, bound: tuple[Bound, ...], result: Result) -> list[Any]:
    values = (inputs.q, inputs.k, inputs.v, inputs.scale, inputs.q_offset, inputs.kv_lens)
    return given_of([*values, *(x.given for x in bound)], result)


def _to_repeat(
    seen: Sequence[Seen], found: Gradients, given: Sequence[Any], bound: tuple[Bound, ...]
) -> WarmBackward | None:
    """What was launched, to be repeated; None where that takes more than memory."""
    rooms: list[Tensor] = []
    launches = []
    for made, programs, values in seen:
        if not isinstance(made.launcher, Launcher):
            return None
        names = [a.name for a in made.launcher.kernel.arguments]
        holes = _holes(names, values, given, rooms, bound)
        if holes is None:
            return None
        kept = tuple(None if place in holes else x for place, x in enumerate(values))
        launches.append(Launched(made.launcher, programs, kept, tuple(holes.items())))
    index = {id(x): n for n, x in enumerate(rooms)}
    gradients = [found.q, found.k, found.v]
    if any(x is not None and id(x) not in index for x in gradients):
        return None  # summed over the batch
    return WarmBackward(
        given[0].get_device(),
        tuple(launches),
        tuple(Room(x.shape, x.stride(), x.dtype) for x in rooms),
        tuple(None if x is None else index[id(x)] for x in gradients),
    )


def _holes(
    names: Sequence[str],
    values: Sequence[Any],
    given: Sequence[Any],
    rooms: list[Tensor],
    bound: tuple[Bound, ...],
) -> dict[int, int] | None:
    """Which arguments are what is given, or room, which is added to `rooms`.

    None where a tensor is neither, or is not what was given but made of it.
    """
    holes = dict(_captures(names, bound))
    for place, (name, value) in enumerate(zip(names, values, strict=True)):
        if place not in holes and (isinstance(value, Tensor) or name in _NUMBER):
            n = _number(name, value, given, rooms)
            if n is None:
                return None
            holes[place] = n
    mine = {place: n for place, n in holes.items() if n < len(given)}
    return None if any(_differ(values[place], given[n]) for place, n in mine.items()) else holes


def _captures(names: Sequence[str], bound: tuple[Bound, ...]) -> list[tuple[int, int]]:
    """Which arguments captures are: a table's lengths and strides are of its kind."""
    if "q_offset" not in names:
        return []
    place, found = names.index("q_offset") + 1 + ("kv_lens" in names), []
    for n, item in enumerate(bound):
        found.append((place, len(GIVEN) + n))
        place += width(item)
    return found


def _number(name: str, value: Any, given: Sequence[Any], rooms: list[Tensor]) -> int | None:
    """Which of what is given, or of the rooms behind it, an argument is; None for neither."""
    # Where there is no gradient of the LSE, the LSE stands in its place.
    if (n := _NUMBER.get("lse" if name == "grad_lse" else name)) is not None:
        return n
    if name not in ROOMS:
        return None
    for n, room in enumerate(rooms):
        if room is value:
            return len(given) + n
    rooms.append(value)
    return len(given) + len(rooms) - 1


def _differ(value: Any, given: Any) -> bool:
    """Whether an argument is not what was given, but made of it."""
    if isinstance(value, Tensor) and isinstance(given, Tensor):
        same = value.dtype == given.dtype and value.device == given.device
        return not same or value.data_ptr() != given.data_ptr()
    return bool(value != given)

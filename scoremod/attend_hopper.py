"""Run the Hopper backend: which calls it takes, the kernel for a call, its launch.

Everything else is the portable backend's; `unsupported` says why, in words for `explain`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import attend_triton
from .attend_triton import SHORT, in_float32, on_device, outputs, stored_structure
from .backends.compile_hopper import Refused, compile_plan
from .backends.compile_triton import Kernel
from .backends.hopper import HOPPER
from .binding import ELEMENT_OF, Bound
from .blocks import Blocks
from .bundle import loaded
from .cache import CACHE, fingerprint, key
from .errors import BackendUnavailable
from .gradients import Answer
from .inputs import Inputs, shared_values
from .launch import Launcher, current_stream
from .launch import device as gpu
from .plan import Typed
from .plan_hopper import Config, HopperPlan, config_of, configs_of, hopper_plan
from .plan_triton import Options
from .ready import stored
from .render import render
from .target import Target
from .tuned import keep, noted

ARCH = "90"
TILE = 128  # queries and keys of the largest tile that a user's blocks have to hold
# Head dims are padded to 64, 128 or 256: below, most of a tile would be padding.
HEAD_DIMS = range(40, 257, 8)  # 8 elements of 16 bits are the 16 bytes that TMA counts in


def unsupported(program: Typed, inputs: Inputs) -> str:
    """Why the portable backend has to run a call; "" for no reason."""
    if inputs.q.device.type != "cuda":
        return "the tensors are not on a GPU"
    target = gpu(inputs.q.device.index)
    if not is_hopper(target):
        return f"the GPU is {target}, not cuda:{ARCH}"
    return unfit(program, inputs)


def is_hopper(target: Target) -> bool:
    return (target.kind, target.arch) == ("cuda", ARCH)


def unfit(program: Typed, inputs: Inputs) -> str:
    """What about a call does not suit these kernels, on whatever GPU; "" for nothing."""
    q, k, v = inputs.q, inputs.k, inputs.v
    reason = unfit_shape(ELEMENT_OF[q.dtype], q.shape[3], v.shape[3])
    if reason:
        return reason
    if 0 in (*q.shape, *k.shape):
        return "there is nothing to copy"
    if q.shape[2] <= SHORT:
        return f"{q.shape[2]} queries would leave most of a tile idle"
    if reason := unfit_blocks(inputs.tiles):
        return reason
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not copyable(x):
            return f"TMA cannot copy {name}: its strides are {x.stride()}"
    return ""


def unfit_blocks(user: object) -> str:
    """The same of a list of blocks; "" for any other tiles."""
    if isinstance(user, Blocks) and (user.block_m % TILE or user.block_n % TILE):
        return (
            f"blocks of {user.block_m} x {user.block_n} do not hold whole tiles of {TILE} x {TILE}"
        )
    return ""


def unfit_shape(element: str, head_dim: int, v_head_dim: int) -> str:
    """The same of what a kernel is made for."""
    if element not in ("f16", "bf16"):
        return f"its products are of 16-bit floats, not of {element}"
    if not {head_dim, v_head_dim} <= set(HEAD_DIMS):
        return f"head dims {head_dim} and {v_head_dim} are not multiples of 8 from 40 to 256"
    return ""


def copyable(x: torch.Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes and no two are the same memory."""
    strides = (s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True) if n > 1)
    return x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(s and s % 8 == 0 for s in strides)


def options(program: Typed, inputs: Inputs, bound: tuple[Bound, ...]) -> Options:
    """The kernel variant that serves a call: what portable kernels are specialised for, less."""
    return of_options(program, attend_triton.options(program, inputs, bound))


def of_options(program: Typed, chosen: Options) -> Options:
    """Options of a portable kernel without what makes no difference here.

    Several ranges of keys are not solved in the kernel, but read as any other structure.
    """
    stored = chosen.blocks or not program.one_range
    return replace(chosen, aligned=True, even=False, stored=stored, coarse=False)


# -- kernels -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """A kernel that can be launched."""

    launcher: Launcher
    block_m: int
    block_n: int


# Kernels found so far, by what decides them and where they run, and why there is none.
_READY: dict[tuple[object, ...], Ready] = {}
_REFUSED: dict[tuple[object, ...], str] = {}


def refusal(program: Typed, inputs: Inputs, bound: tuple[Bound, ...]) -> str:
    """Why a call that fits has no kernel, which is compiled to know it; "" if it has one."""
    chosen = options(program, inputs, bound)
    what = (program.bundle, program.canonical, chosen, inputs.q.device)
    if what not in _REFUSED:
        try:
            forward(program, chosen, inputs.q.device)
        except BackendUnavailable as error:
            _REFUSED[what] = error.message.partition("\n")[0]
    return _REFUSED.get(what, "")


def forward(program: Typed, chosen: Options, device: torch.device) -> Ready:
    """The attention kernel for a device."""
    what = (program.bundle, program.canonical, chosen, device)
    ready = _READY.get(what)
    if ready is None:
        ready = _READY[what] = ready_of(store(program, chosen, gpu(device.index)))
    return ready


def ready_of(kernel: Kernel) -> Ready:
    """A kernel with its launcher and its tile."""
    tile = dict(kernel.constants)
    return Ready(Launcher(kernel), tile["BLOCK_M"], tile["BLOCK_N"])


def store(program: Typed, chosen: Options, target: Target) -> Kernel:
    """The kernel of a call, from its bundle, the cache or compiled into it; needs no GPU."""

    best = tuned(program, chosen, target)

    def build(target: Target) -> Kernel:
        return compile_forward(program, chosen, target, best)

    what = forward_key(program, chosen, best)
    if program.bundle:
        return stored(what, target, build, program.bundle)
    # A refusal takes a minute of assembling, so it is kept beside the kernels.
    note = key("refused", fingerprint(), what, target)
    if (refused := CACHE.note(note)) is not None:
        raise Refused(str(refused.get("reason")), hint="backend='triton' runs it")
    try:
        return stored(what, target, build)
    except Refused as error:
        with contextlib.suppress(OSError):
            CACHE.put_note(note, {"reason": error.message})
        raise


def found(program: Typed, chosen: Options, target: Target) -> Kernel | None:
    """The kernel of a call, if it was compiled before; a bundle has it, or says why not."""
    what = forward_key(program, chosen, tuned(program, chosen, target))
    if program.bundle:
        return loaded(program.bundle).kernel(what, target)
    return CACHE.find(key(fingerprint(), what, target))


def forward_key(program: Typed, chosen: Options, best: Config | None = None) -> tuple[object, ...]:
    """What decides an attention kernel; `best` is the configuration that was measured to be."""
    what = ("hopper", program.canonical, chosen)
    return what if best is None else (*what, best)


def compile_forward(
    program: Typed, chosen: Options, target: Target, best: Config | None = None
) -> Kernel:
    """Compile the first configuration that the assembler takes as it was meant."""
    notes: list[str] = []
    for plan in plans(program, chosen, target, best):
        kernel, complaint = compile_plan(plan, source(plan))
        notes.append(f"{plan.config}: {complaint or 'taken'}")
        if not complaint:
            return replace(kernel, notes=tuple(notes))
    raise Refused(
        f"no configuration of `{program.name}` suits {target}: {'; '.join(notes)}",
        hint="backend='triton' runs it",
    )


def plans(
    program: Typed, chosen: Options, target: Target, best: Config | None = None
) -> list[HopperPlan]:
    """The plans to try, the best first."""
    known = configs_of(program, chosen)
    configs = known if best is None else tuple(dict.fromkeys((best, *known)))
    return [hopper_plan(program, chosen, target, config) for config in configs]


def source(plan: HopperPlan) -> str:
    """The kernel's text."""
    return render("attention_fwd.py", plan, HOPPER)


# -- configurations that were measured ---------------------------------------------------------


def tuned(program: Typed, chosen: Options, target: Target) -> Config | None:
    """The configuration that `bench --tune` noted for a kernel, if it did."""
    note = tuning(program, chosen, target)
    return None if note is None else config_of(note.get("config"))


def tuning(program: Typed, chosen: Options, target: Target) -> dict[str, Any] | None:
    """What `bench --tune` noted."""
    return noted(program, _without_residual(program, chosen), target)


def keep_tuned(
    program: Typed, chosen: Options, target: Target, config: Config, measured: dict[str, Any]
) -> None:
    """Note the best configuration for calls from now on, in other processes too."""
    keep(_without_residual(program, chosen), target, config, measured)
    _READY.clear()
    _REFUSED.clear()


def _without_residual(program: Typed, chosen: Options) -> tuple[object, ...]:
    """What is noted for calls with and without a residual."""
    return forward_key(program, replace(chosen, keeps_residual=False))


# -- the call ----------------------------------------------------------------------------------


def attend(program: Typed, inputs: Inputs, bound: tuple[Bound, ...]) -> Answer:
    """Attention on an sm_90 GPU."""
    reason = unsupported(program, inputs)
    if reason:
        raise BackendUnavailable(f"backend='hopper' cannot run this call: {reason}")
    with on_device(inputs.q):
        device = inputs.q.device
        chosen = options(program, inputs, bound)
        return run(forward(program, chosen, device), program, chosen, inputs, bound)


def run(
    ready: Ready, program: Typed, chosen: Options, inputs: Inputs, bound: tuple[Bound, ...]
) -> Answer:
    """Launch a kernel on the current GPU."""
    device, made = inputs.q.device, outputs(inputs)
    turns = turns_of(ready.block_m, inputs)
    grid = programs(turns, device.index)
    drawn, stream = counter(device), current_stream(device.index)
    values = arguments(inputs, bound, made, drawn)
    if chosen.stored:
        blocks = ready.block_m, ready.block_n
        values += stored_structure(program, chosen, inputs, bound, blocks).arguments
    launch = ready.launcher.prepare(values)
    if turns > grid:
        ready.launcher.clear(drawn, stream)
    launch.launch((grid, 1, 1), stream)
    return made


def turns_of(block_m: int, inputs: Inputs) -> int:
    """How many q tiles there are, of all heads."""
    batch, q_heads, q_len, _ = inputs.q.shape
    return -(-q_len // block_m) * batch * q_heads


def programs(turns: int, device: int) -> int:
    """One program per multiprocessor; each takes its shared memory."""
    return min(turns, multiprocessors(device))


@functools.cache
def multiprocessors(device: int) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)


def counter(device: torch.device) -> torch.Tensor:
    """What programs draw their next turn from, to be cleared; unread where each has one turn.

    Each call has its own, as calls on several streams and CUDA graphs may run at once.
    """
    return torch.empty(1, dtype=torch.int32, device=device)


def arguments(inputs: Inputs, bound: tuple[Bound, ...], made: Answer, drawn: Any) -> list[Any]:
    """The run-time arguments, in the order of the kernel's."""
    values: list[Any] = []
    for x in (inputs.q.detach(), inputs.k.detach(), inputs.v.detach(), made.out):
        values += described(x)
    values += [made.lse, drawn, in_float32(inputs.scale), *made.residuals]
    return values + shared_values(inputs.q_offset, inputs.kv_lens, bound)


def described(x: torch.Tensor) -> Sequence[Any]:
    """A tensor as the kernel takes it: its map, its shape and its strides."""
    return (x, *x.shape, *x.stride())

"""Backwards like one before launch what a backward decided anew would, with their own tensors."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scoremod import attend_hopper, attention, autograd, backward_hopper, parse, warm_backward
from scoremod.autograd import FIXED, Call, take_apart
from scoremod.backends.compile_hopper_backward import constants, launched
from scoremod.backends.compile_hopper_wide import launched as launched_wide
from scoremod.backward_hopper import Kernels
from scoremod.backward_hopper_wide import WideKernels
from scoremod.backward_hopper_wide import of_options as of_wide_options
from scoremod.backward_triton import Call as Backward
from scoremod.gradients import Gradients, Result
from scoremod.inputs import Inputs
from scoremod.launch import Launcher
from scoremod.plan_hopper_backward import finish_plan, in_slots, rows_plan
from scoremod.plan_hopper_wide import KERNELS, ROWS, wide_plan
from scoremod.plan_triton import Argument
from scoremod.ready import Ready
from scoremod.target import parse_target

H200 = parse_target("cuda:90")
VARIANT = parse(
    "variant v(t: f32[H], n: int, flag: bool) { score s - t[h] * (i - j) mask flag and i - j < n }"
)
Launch = tuple[str, int, Sequence[Any]]


class Recorder(Launcher):
    """A kernel that notes its launches instead."""

    def __init__(self, name: str, arguments: Sequence[Argument], log: list[Launch]) -> None:
        self.kernel: Any = SimpleNamespace(arguments=tuple(arguments))
        self.name, self.log = name, log

    def prepare(self, values: Sequence[Any], index: int | None = None) -> Any:
        def launch(grid: tuple[int, int, int], stream: int) -> None:
            self.log.append((self.name, grid[0], values))

        assert len(values) == len(self.kernel.arguments)
        return SimpleNamespace(launch=launch)


def recorded(
    name: str, arguments: Sequence[Argument], sizes: dict[str, int], log: list[Launch]
) -> Ready:
    kernel = Recorder(name, arguments, log)
    return Ready(lambda n, values: kernel.prepare(values).launch((n, 1, 1), 0), sizes, kernel)


def kernels(call: Backward, log: list[Launch]) -> Kernels | WideKernels:
    """The kernels of a call, not compiled."""
    given, program = call.result.given, call.program
    if backward_hopper.is_wide(call.options):
        found = []
        for kernel in KERNELS:
            chosen = of_wide_options(kernel, program, call.options)
            plan = wide_plan(kernel, program, chosen, H200)
            sizes = {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n}
            found.append(recorded(kernel, launched_wide(plan), sizes, log))
        rows = rows_plan(call.options, H200, ROWS, **given).arguments
        return WideKernels(recorded("rows", rows, {}, log), *found)
    chosen = backward_hopper.options_of(call)
    main = backward_hopper.plans(program, chosen, H200)[0]
    block_m = main.config.block_m
    rows = rows_plan(chosen, H200, block_m, **given).arguments
    finish = finish_plan(chosen, H200, block_m, main.dq_columns).arguments
    return Kernels(
        chosen,
        in_slots(program, chosen),
        recorded("rows", rows, {}, log),
        recorded("main", launched(main), constants(main), log),
        recorded("finish", finish, {}, log),
    )


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What is launched, as on a GPU."""
    found: list[Launch] = []
    monkeypatch.setattr(backward_hopper, "kernels_of", lambda call: kernels(call, found))
    monkeypatch.setattr(attend_hopper, "multiprocessors", lambda index: 4)
    monkeypatch.setattr(warm_backward, "current_stream", lambda index: 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    return found


def given(
    head_dim: int = 64,
    n: int = 300,
    q_offset: int = 0,
    flag: bool = True,
    kv_lens: bool = False,
    residual: bool = False,
    batch: int = 2,
) -> tuple[Call, list[Any], Result]:
    """A recorded call, its values, and what comes back for it."""
    q, k, v, out, back = (
        torch.empty(b, 8, 512, head_dim, dtype=torch.bfloat16) for b in (2, batch, batch, 2, 2)
    )
    lens = torch.ones(2, dtype=torch.int32) if kv_lens else None
    inputs = Inputs(q, k, v, 0.125, q_offset, lens)
    captures = {"t": torch.ones(8), "n": n, "flag": flag}
    known, bound = VARIANT._bind(captures, inputs.sizes, q.device)
    call, values = take_apart(VARIANT._type(known, bound), inputs, bound, "hopper")
    kept = torch.zeros(2, 8, 512, 4, dtype=torch.int32) if residual else None
    warm: Any = SimpleNamespace(device=-1)
    object.__setattr__(call, "warm", warm)
    return call, values, Result(out, torch.empty(2, 8, 512), back, None, kept)


WANTED = [True, True, True, *[False] * 6]


def pattern(launches: Sequence[Launch], values: Sequence[Any], result: Result) -> list[Any]:
    """Launches, a tensor as what was given, or as which memory of which shape it is."""
    tensors = [x for x in (*values, *vars(result).values()) if isinstance(x, torch.Tensor)]
    known = {x.data_ptr(): n for n, x in enumerate(tensors)}
    rooms: dict[int, int] = {}

    def word(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if x.data_ptr() in known:
            return known[x.data_ptr()], x.dtype
        room = rooms.setdefault(x.data_ptr(), len(rooms))
        return room, x.shape, x.stride(), x.dtype

    return [(name, grid, [word(x) for x in arguments]) for name, grid, arguments in launches]


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kv_lens": {"kv_lens": True},
    "a residual": {"residual": True},
    "head dim 128": {"head_dim": 128},
    "head dim 256": {"head_dim": 256},
}


@pytest.mark.parametrize("kind", CALLS)
def test_they_launch_what_one_decided_anew_does(log: list[Launch], kind: str) -> None:
    numbers = {"n": 100, "q_offset": 17, "flag": False}
    call, values, result = given(**CALLS[kind])
    autograd.backward(call, values, result, WANTED)
    assert len(log) == 3 and list(map(type, call.returns.values())) == [warm_backward.WarmBackward]

    _, values, result = given(**CALLS[kind], **numbers)
    log.clear()
    warm = autograd.backward(call, values, result, WANTED)
    launches = list(log)
    log.clear()
    anew, _, _ = given(**CALLS[kind])
    object.__setattr__(anew, "warm", None)
    cold = autograd.backward(anew, values, result, WANTED)
    assert pattern(launches, values, result) == pattern(log, values, result)
    numbers_seen = [{x for x in a if isinstance(x, int)} for _, _, a in launches]
    assert any({17, 100} <= seen for seen in numbers_seen)

    made = {x.data_ptr() for _, _, a in launches for x in a if isinstance(x, torch.Tensor)}
    for x, y in zip(warm, cold, strict=True):
        if y is None:
            assert x is None
        else:
            assert x is not None and x.data_ptr() in made
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


def test_what_is_not_wanted_is_another_kind(log: list[Launch]) -> None:
    call, values, result = given(head_dim=256)
    for wanted in (WANTED, [True, *[False] * (len(WANTED) - 1)], WANTED):
        found = autograd.backward(call, values, result, wanted)
        assert [x is not None for x in found] == list(wanted)
    assert len(call.returns) == 2


@pytest.mark.parametrize("fault", ["a copy", "over the batch"])
def test_what_takes_more_than_memory_is_decided_each_time(log: list[Launch], fault: str) -> None:
    call, values, result = given(batch=1 if fault == "over the batch" else 2)
    if fault == "a copy":
        back = torch.zeros(2, 8, 64, 512, dtype=torch.bfloat16).transpose(2, 3)
        result = Result(result.out, result.lse, back, None)
    for _ in range(2):
        autograd.backward(call, values, result, WANTED)
        assert list(call.returns.values()) == [None]


def test_what_learns_is_decided_each_time(
    log: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Gradients(captures={"t": torch.ones(8)})
    monkeypatch.setattr(backward_hopper, "backward", lambda *_: answer)
    monkeypatch.setitem(attention.RUN_BACKWARD, "hopper", lambda *_: answer)
    call, values, result = given()
    for _ in range(2):
        found = autograd.backward(call, values, result, [*WANTED[:FIXED], True, False, False])
        assert found[FIXED] is not None and list(call.returns.values()) == [None]


def test_the_switch_of_torch_is_looked_at_each_time(log: list[Launch]) -> None:
    call, values, result = given()
    autograd.backward(call, values, result, WANTED)
    (kind,) = call.returns
    assert call.kind_of_return(values, result, WANTED) == kind
    torch.use_deterministic_algorithms(True)
    try:
        assert call.kind_of_return(values, result, WANTED) is None
    finally:
        torch.use_deterministic_algorithms(False)
    with_lse = Result(result.out, result.lse, result.grad_out, torch.zeros(2, 8, 512))
    assert call.kind_of_return(values, with_lse, WANTED) is None


@pytest.mark.parametrize("moved", ["q", "k", "v", "slopes", "out"])
def test_tensors_that_were_moved_meanwhile_are_another_kind(log: list[Launch], moved: str) -> None:
    call, values, result = given(head_dim=128)
    autograd.backward(call, values, result, WANTED)
    _, values, result = given(head_dim=128)
    other = torch.empty(2, 512, 8, 128, dtype=torch.bfloat16).transpose(1, 2)
    if moved == "out":
        result = Result(other, result.lse, result.grad_out, None)
    elif moved == "slopes":
        values[FIXED] = torch.ones(16)[::2]
    else:
        values["qkv".index(moved)] = other
    log.clear()
    autograd.backward(call, values, result, WANTED)
    assert len(call.returns) == 2
    strides = (8 * 512 * 128, 128, 8 * 128, 1) if moved != "slopes" else (2,)
    plain = [[None if isinstance(x, torch.Tensor) else x for x in a] for _, _, a in log]
    found = {tuple(a[n : n + len(strides)]) for a in plain for n in range(len(a))}
    assert moved == "out" or strides in found


def test_kinds_do_not_pile_up(log: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "MAX_RETURNS", 2)
    call, values, result = given()
    for wide in range(64, 128, 8):
        room = torch.empty(2, 8, 512, wide, dtype=torch.bfloat16)
        back = Result(result.out, result.lse, room[..., :64], None)
        autograd.backward(call, values, back, WANTED)
        assert len(call.returns) <= 2

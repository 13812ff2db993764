"""Configurations that are measured: which are tried, what is kept, and what calls make of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_launch import kernel

from scoremod import attend_hopper, backward_hopper, cache, explain, tune, variants
from scoremod.bench import Case, Rig, Shape, prepare
from scoremod.errors import BackendUnavailable, InputMismatch
from scoremod.gradients import Answer
from scoremod.plan_hopper import CONFIGS, Config, Tiles, config_of, neighbours
from scoremod.plan_hopper_backward import CONFIGS as BACKWARD_CONFIGS
from scoremod.plan_hopper_backward import BackwardConfig, InTurn
from scoremod.plan_hopper_backward import config_of as backward_config_of
from scoremod.plan_hopper_backward import neighbours as backward_neighbours
from scoremod.plan_triton import Options
from scoremod.target import parse_target

H200 = parse_target("cuda:90")
TABLE = CONFIGS[64, Tiles.MASKED]
OTHER = replace(TABLE[0], stages=2)
MACHINE = {"gpu": "a GPU of tests", "date": "today"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SCOREMOD_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    cache.forget()


@pytest.fixture
def case() -> Case:
    return prepare(variants.causal, Shape(1, 2, 2, 64, 64, 64, 64), torch.bfloat16, {}, "cpu")


def chosen(case: Case) -> Options:
    return attend_hopper.of_options(case.program, Options("bf16", 64, 64))


def keep(case: Case, config: Config) -> None:
    attend_hopper.keep_tuned(case.program, chosen(case), H200, config, {"shape": "1x2", **MACHINE})


def kept(case: Case) -> Config | None:
    return attend_hopper.tuned(case.program, chosen(case), H200)


# -- configurations ----------------------------------------------------------------------------


def test_neighbours_are_the_table_and_single_changes_of_its_first() -> None:
    found = neighbours(TABLE)
    assert found[: len(TABLE)] == TABLE and len(set(found)) == len(found) > len(TABLE) + 3
    for config in found:
        assert config_of(asdict(config)) == config


@pytest.mark.parametrize(
    "change",
    [{"stages": "3"}, {"stages": 1}, {"block_n": 96}, {"consumers": 5}, {"ping_pong": 1}, {"x": 1}],
    ids=str,
)
def test_what_is_no_configuration_is_none(change: dict[str, Any]) -> None:
    assert config_of({**asdict(OTHER), **change}) is None


@pytest.mark.parametrize("fields", [None, [], {}, "128", {"stages": 3}], ids=str)
def test_other_values_are_none_either(fields: Any) -> None:
    assert config_of(fields) is None


# -- what is kept ------------------------------------------------------------------------------


def test_calls_take_what_was_kept(case: Case) -> None:
    program, options = case.program, chosen(case)
    assert kept(case) is None
    keep(case, OTHER)
    assert kept(case) == OTHER
    first, second, *_ = attend_hopper.plans(program, options, H200, kept(case))
    assert (first.config, second.config) == (OTHER, TABLE[0])
    keys = {attend_hopper.forward_key(program, options, c) for c in (None, OTHER)}
    assert len(keys) == 2
    other_kernel = replace(options, positive_scale=False)
    assert attend_hopper.tuned(program, other_kernel, H200) is None
    assert attend_hopper.tuned(replace(program, bundle="digest"), options, H200) is None


def test_explain_and_source_name_it(case: Case) -> None:
    keep(case, OTHER)
    options = Options("bf16", 64, 64)
    lines = "\n".join(explain.explain_shape(case.program, options, H200))
    assert f"tile     {OTHER}" in lines
    assert "tuned    by `bench --tune` for 1x2 on a GPU of tests" in lines
    assert "STAGES = gl.constexpr(2)" in variants.causal.source(head_dim=64, target="cuda:90")


def _emptied(file: Path) -> None:
    file.write_text("{")


def _of_others(file: Path) -> None:
    file.chmod(0o666)


def _renamed(file: Path) -> None:
    file.write_text(file.read_text().replace('"key"', '"name"'))


def _unsound(file: Path) -> None:
    file.write_text(file.read_text().replace('"stages": 2', '"stages": 200'))


@pytest.mark.parametrize("spoil", [_emptied, _of_others, _renamed, _unsound])
def test_a_note_that_cannot_be_trusted_is_as_none(
    spoil: Callable[[Path], None], case: Case, folder: Path
) -> None:
    keep(case, OTHER)
    (file,) = folder.glob("*.note.json")
    assert file.stat().st_mode & 0o077 == 0 or os.name != "posix"
    spoil(file)
    assert kept(case) is None


def test_clearing_the_cache_takes_notes_with_it(case: Case, folder: Path) -> None:
    keep(case, OTHER)
    assert cache.clear() == 0 and not list(folder.glob("*.json")) and kept(case) is None


# -- measuring ---------------------------------------------------------------------------------


class Fake:
    """Kernels that take a time by their configuration, and an assembler that minds one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: Callable[[str], float]) -> None:
        self.running, self.times = "", times
        monkeypatch.setattr(tune.compile_hopper, "compile_plan", self.compile)
        monkeypatch.setattr(attend_hopper, "ready_of", lambda made: made)
        monkeypatch.setattr(attend_hopper, "run", self.run)
        monkeypatch.setattr(attend_hopper, "unsupported", lambda program, inputs: "")

    def compile(self, plan: Any, text: str) -> tuple[Any, str]:
        return kernel(), "spilled" if plan.config == TABLE[1] else ""

    def run(self, ready: Any, program: Any, options: Any, inputs: Any, bound: Any) -> Any:
        self.running = ready.notes[0].removesuffix(": taken")
        wrong = "ping-pong" not in self.running
        out = torch.full_like(inputs.q, 2.0 if wrong else 1.0)
        return Answer(out, out[..., 0])

    def elapsed(self, call: Callable[[], object], repeats: int) -> float:
        call()
        return self.times(self.running)

    @property
    def rig(self) -> Rig:
        return Rig("cpu", self.elapsed, lambda: None, lambda f: f)


def test_the_fastest_that_is_right_is_kept(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, lambda name: 1.0 if "4 stages" in name or "ping" not in name else 2.0)
    found = tune.measure(tune.Forward(case), fake.rig, 3, H200, MACHINE)
    assert found.best == replace(TABLE[0], stages=4) == kept(case)
    notes = {one.config: one.note for one in found.tried}
    assert notes[TABLE[1]] == "spilled"
    assert "differs from ours" in notes[replace(TABLE[0], ping_pong=False)]
    assert f"kept: {found.best}" in str(found)


def test_nothing_to_tune_is_an_error(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, lambda name: 1.0)
    monkeypatch.setattr(
        tune.compile_hopper, "compile_plan", lambda plan, text: (kernel(), "spilled")
    )
    with pytest.raises(BackendUnavailable, match=r"no configuration of `causal` compiles: .*spill"):
        tune.measure(tune.Forward(case), fake.rig, 1, H200, MACHINE)
    monkeypatch.setattr(attend_hopper, "unsupported", lambda program, inputs: "it is not bf16")
    with pytest.raises(BackendUnavailable, match="nothing to tune for this call: it is not bf16"):
        tune.measure(tune.Forward(case), fake.rig, 1, H200, MACHINE)


# -- the backward ------------------------------------------------------------------------------

BACKWARD = BACKWARD_CONFIGS[128, True]
CHANGED = replace(BACKWARD[0], late_dq=False, in_turn=InTurn.ALL)


@pytest.fixture
def scored() -> Case:
    """A call with a score."""
    shape = Shape(1, 2, 2, 64, 64, 128, 128)
    return prepare(variants.softcap & variants.causal, shape, torch.bfloat16, {}, "cpu")


def best_backward(case: Case) -> BackwardConfig | None:
    chosen = backward_hopper.of_options(case.program, Options("bf16", 128, 128))
    return backward_hopper.tuned(case.program, chosen, H200)


def test_backwards_are_tried_beside_their_table() -> None:
    found = backward_neighbours(BACKWARD)
    assert found[: len(BACKWARD)] == BACKWARD and CHANGED in found[len(BACKWARD) :]
    assert backward_config_of(asdict(CHANGED), BACKWARD) == CHANGED
    for other in (None, {}, asdict(replace(CHANGED, block_m=128)), {**asdict(CHANGED), "x": 1}):
        assert backward_config_of(other, BACKWARD) is None
    # Two halves have nothing to change.
    assert backward_neighbours(BACKWARD_CONFIGS[64, True]) == BACKWARD_CONFIGS[64, True]


def test_the_fastest_backward_is_kept(scored: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    running = []

    def compile_plan(plan: Any, text: str) -> tuple[Any, str]:
        return kernel(), "spilled" if plan.config == BACKWARD[1] else ""

    def gradients(call: Any, ready: Any, by_read: Any) -> tuple[torch.Tensor, ...]:
        running[:] = ready.notes
        # dv alone is wrong without early scores.
        wrong = "scores early" not in running[0]
        ones = torch.ones_like(call.inputs.q)
        return ones, ones, ones * 3 if wrong else ones

    def elapsed(call: Callable[[], object], repeats: int) -> float:
        call()
        changed = "all tiles in turn" in running[0] and "dq late" not in running[0]
        return 1.0 if changed or "early" not in running[0] else 2.0

    monkeypatch.setattr(tune.compile_hopper_backward, "compile_plan", compile_plan)
    monkeypatch.setattr(tune, "ready_kernel", lambda made, device: made)
    monkeypatch.setattr(backward_hopper, "around", lambda call, ready: ready)
    monkeypatch.setattr(backward_hopper, "tensor_gradients", gradients)
    rig = Rig("cpu", elapsed, lambda: None, lambda f: f)
    assert best_backward(scored) is None
    found = tune.measure(tune.Backward(scored), rig, 3, H200, MACHINE)
    assert found.best == CHANGED == best_backward(scored)
    assert "backward" in str(found)
    notes = {one.config: one.note for one in found.tried}
    assert notes[BACKWARD[1]] == "spilled" and "differs from ours" in notes[BACKWARD[-1]]
    program, chosen = scored.program, Options("bf16", 128, 128)
    lines = "\n".join(explain.explain_shape(program, chosen, H200))
    assert f"in one kernel: {CHANGED}" in lines and "tuned    by `bench --tune-backward`" in lines
    assert best_backward(replace(scored, program=replace(program, bundle="digest"))) is None
    # What was refused before has a kernel now.
    portable = backward_hopper.of_options(program, chosen)
    note = backward_hopper._refusal_key(program, portable, H200)
    cache.CACHE.put_note(note, {"reason": "spilled"})
    assert backward_hopper.known_refusal(program, chosen, H200) == ""


def test_there_may_be_no_hopper_backward_to_tune() -> None:
    shape = Shape(1, 1, 1, 64, 64, 192, 192)
    case = prepare(variants.causal, shape, torch.bfloat16, {}, "cpu")
    with pytest.raises(BackendUnavailable, match=r"nothing to tune .* one configuration"):
        tune.measure(tune.Backward(case), Rig("cpu", None, None, None), 1, H200, MACHINE)  # type: ignore[arg-type]


def test_the_phase_is_checked() -> None:
    with pytest.raises(InputMismatch, match=r"phase must be 'fwd' or 'bwd', not 'both'"):
        tune.tune(variants.causal, shape=(1, 1, 1, 64, 64, 64, 64), phase="both")  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_on_the_command_line_it_asks_for_a_gpu_as_bench_does() -> None:
    from click.testing import CliRunner

    from scoremod.cli import main

    done = CliRunner().invoke(main, ["bench", "causal", "--tune", "--len", "256"])
    assert done.exit_code == 1 and "bench needs a GPU" in done.output

"""The registered operator: torch.compile without breaks, export to other processes, opcheck."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import NOOP, Shape, agree, bf16, f32, tensors
from gradient_cases import leaf, loss
from torch import Tensor

import scoremod
from scoremod import library, parse, variants
from scoremod.errors import CaptureMismatch, InputMismatch, MissingCapture

SMALL = Shape(2, 4, 2, 12, 20)
ALIBI = variants.alibi & variants.causal
OFFSET = parse("variant offset(t, n: int = 0) { score s + t[h, j + n] mask j <= i }")
FACTOR = torch.tensor(0.5)
MARGIN = 3


@scoremod.variant
def free(s: Any, h: Any, j: Any, shift: float, t: Any) -> Any:
    return s * FACTOR + shift + t[h] * (j % MARGIN)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


class Compiled:
    """A function compiled without breaks, and how often that was."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.graphs: list[Any] = []
        self.run = torch.compile(function, fullgraph=True, backend=self._backend)

    def _backend(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs.append(graph)
        return aot_eager(graph, inputs)

    def __call__(self, *args: Any, **call: Any) -> Any:
        return self.run(*args, **call)


def values(heads: int) -> dict[str, Tensor]:
    return {"slopes": torch.linspace(0.1, 0.5, heads)}


# -- torch.compile -----------------------------------------------------------------------------


CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a mask": (variants.causal, {}),
    "a table": (ALIBI, values(4)),
    "a number": (variants.softcap, {"cap": 3.0}),
    "bound": (variants.softcap.bind(cap=torch.tensor(2.0)) & variants.causal, {}),
    "free variables": (free, {"shift": 0.5, "t": torch.rand(4)}),
    "renamed": (variants.sliding_window.rename(window="far"), {"far": 5}),
    "lengths": (NOOP, {"kv_lens": torch.tensor([3, 20], dtype=torch.int32)}),
    "offsets": (variants.causal, {"q_offset": torch.tensor([3, 8])}),
    "a scale": (NOOP, {"scale": torch.tensor(0.2), "q_offset": 8}),
    "a bool": (parse("variant v(flip: bool) { score -s if flip else s }"), {"flip": True}),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_and_the_same_answer(name: str) -> None:
    attn, call = CALLS[name]
    qkv = tensors(SMALL)
    compiled = Compiled(lambda *x, **y: attn(*x, return_lse=True, **y))
    found, wanted = compiled(*qkv, **call), attn(*qkv, return_lse=True, **call)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert len(compiled.graphs) == 1


def test_gradients_through_compiled_code() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, **call: Tensor) -> Any:
        return ALIBI(q * 2, k, v, return_lse=True, **call)

    found = []
    for run in (Compiled(attend), attend):
        leaves = [leaf(x) for x in (*tensors(SMALL), values(4)["slopes"])]
        loss(*run(*leaves[:3], slopes=leaves[3])).backward()
        found.append([x.grad for x in leaves])
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


def test_lengths_compile_at_most_twice() -> None:
    compiled = Compiled(lambda q, k, v, t: ALIBI(q, k, v, slopes=t).sum())
    for length in (12, 17, 40, 33, 64):
        q, k, v = (x.requires_grad_() for x in tensors(Shape(2, 4, 2, length, length)))
        compiled(q, k, v, values(4)["slopes"]).backward()
    assert len(compiled.graphs) <= 2


def test_ints_compile_at_most_twice() -> None:
    table = torch.randn(4, 60)
    compiled = Compiled(lambda q, k, v, n, o: OFFSET(q, k, v, t=table, n=n, q_offset=o))
    for n, q_offset in ((0, 0), (1, 5), (7, 2), (30, 8)):
        qkv = tensors(SMALL)
        wanted = OFFSET(*qkv, t=table, n=n, q_offset=q_offset)
        assert torch.equal(compiled(*qkv, n, q_offset), wanted)
    # 0 and 1 are constants to Dynamo.
    assert len(compiled.graphs) <= 3


def test_tensors_never_compile_again() -> None:
    compiled = Compiled(lambda q, k, v, cap: variants.softcap(q, k, v, cap=cap))
    found = [compiled(*tensors(SMALL), torch.tensor(float(cap))) for cap in range(1, 6)]
    assert len(compiled.graphs) == 1 and not torch.equal(found[0], found[4])


@torch.no_grad()
def test_a_free_tensor_is_an_input_and_not_a_constant() -> None:
    compiled = Compiled(lambda *qkv: free(*qkv, shift=0.0, t=torch.zeros(4)))
    qkv = tensors(SMALL)
    before = compiled(*qkv)
    FACTOR.mul_(2)
    after, wanted = compiled(*qkv), free(*qkv, shift=0.0, t=torch.zeros(4))
    FACTOR.div_(2)
    assert torch.equal(after, wanted) and not torch.equal(before, after)
    assert len(compiled.graphs) == 1


def test_autocast_under_compile() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        with torch.autocast("cpu", bf16):
            return variants.causal(q, k, v)

    q, k, v = (x.requires_grad_() for x in tensors(SMALL))
    out = Compiled(attend)(q, k, v)
    out.float().sum().backward()
    assert out.dtype is bf16 and q.grad is not None and q.grad.dtype is f32
    assert torch.equal(out, attend(q, k, v))


def test_mistakes_are_told_under_compile() -> None:
    q, k, v = tensors(SMALL)
    with pytest.raises(Exception, match="must share a dtype"):
        Compiled(NOOP)(q, k, v.double())
    with pytest.raises(Exception, match=r"slopes.* was not given"):
        Compiled(ALIBI)(q, k, v)
    with pytest.raises(Exception, match="the oracle is no operator"):
        Compiled(lambda *x: NOOP(*x, backend="eager"))(q, k, v)
    cut = parse("variant v(cut) { mask cut[j] < 0.5 }")
    with pytest.raises(Exception, match="only the mask reads it"):
        Compiled(lambda *x: cut(*x[:3], cut=x[3]))(q, k, v, torch.rand(20, requires_grad=True))


def test_a_module_compiles_with_the_default_backend() -> None:
    """Through inductor, with its memory plan and its assertions about strides."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes = torch.nn.Parameter(values(4)["slopes"])

        def forward(self, fused: Tensor) -> Any:
            q, k, v = fused.permute(2, 0, 3, 1, 4).unbind()
            return ALIBI(q, k, v, slopes=self.slopes, return_lse=True)

    found = []
    for compile_ in (lambda x: x, lambda x: torch.compile(x, fullgraph=True)):
        make = torch.Generator().manual_seed(0)
        layer, fused = Layer(), leaf(torch.randn(2, 10, 3, 4, 16, generator=make))
        loss(*compile_(layer)(fused)).backward()
        found.append((fused.grad, layer.slopes.grad))
    for x, y in zip(*found, strict=True):
        agree(x, y, 1e-5)


# -- torch.library -----------------------------------------------------------------------------

CHECKED = {
    "plain": (ALIBI, SMALL, values(4), {}),
    "options": (
        OFFSET & parse("variant m(keep: bool[Lk]) { mask keep[j] }"),
        Shape(2, 4, 2, 5, 9, 8, 11),
        {"t": torch.randn(4, 30), "n": 2, "keep": torch.arange(9) % 2 == 0},
        {"q_offset": 4, "kv_lens": torch.tensor([9, 3]), "scale": 0.3},
    ),
}


@pytest.mark.parametrize("name", CHECKED)
def test_opcheck(name: str) -> None:
    attn, shape, captures, options = CHECKED[name]
    seen: list[tuple[Any, ...]] = []
    operator = library._attend

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_attend", lambda *args: seen.append(args) or operator(*args))
        qkv = tuple(x.requires_grad_() for x in tensors(shape))
        with torch.utils.flop_counter.FlopCounterMode(display=False):  # any mode will do
            attn(*qkv, **options, **{n: leaf(x) for n, x in captures.items()})
    torch.library.opcheck(operator, seen[0])


def test_fake_and_meta_tensors_have_the_shape_of_the_answer() -> None:
    from torch._subclasses import FakeTensorMode

    q, k, v = tensors(Shape(2, 4, 2, 12, 20, 16, 24))
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    wanted, wanted_lse = ALIBI(q, k, v, **values(4), return_lse=True)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v, values(4)["slopes"])]
    meta = [x.to("meta") for x in (q, k, v, values(4)["slopes"])]
    for a, b, c, slopes in (fake, meta):
        out, lse = ALIBI(a, b, c, slopes=slopes, return_lse=True)
        assert (out.shape, out.stride(), out.dtype) == (wanted.shape, wanted.stride(), f32)
        assert (lse.shape, lse.dtype) == (wanted_lse.shape, f32)
        with pytest.raises(InputMismatch, match="head dim"):
            ALIBI(a[..., :8], b, c, slopes=slopes)


def test_no_backend_is_chosen_for_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """That looks at the memory of tensors on a GPU, of which these have none."""
    from torch._subclasses import FakeTensorMode

    monkeypatch.setattr(library.attention, "choose_backend", None)
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x).requires_grad_() for x in tensors(SMALL))
    assert variants.causal(q, k, v).requires_grad


def test_mistakes_in_front_of_the_operator() -> None:
    q, k, v = (x.to("meta") for x in tensors(SMALL))
    with pytest.raises(MissingCapture, match="was not given"):
        ALIBI(q, k, v)
    with pytest.raises(MissingCapture, match="did you mean slopes"):
        ALIBI(q, k, v, slope=torch.rand(4))
    with pytest.raises(CaptureMismatch, match="must be a number or a tensor"):
        ALIBI(q, k, v, slopes="steep")


# -- torch.export ------------------------------------------------------------------------------

LOADER = """
import sys, torch, scoremod
program = torch.export.load(sys.argv[1]).module()
for q, k, v, slopes, wanted in torch.load(sys.argv[2]):
    torch.testing.assert_close(program(q, k, v, slopes), wanted, rtol=0, atol=0)
print("same")
"""


def test_an_exported_program_runs_where_nobody_declared_the_variant(tmp_path: Path) -> None:
    """With another length than it was exported with."""

    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
            out: Tensor = ALIBI(q, k, v, slopes=slopes)
            return out

    length = torch.export.Dim("length", min=2, max=512)
    shapes = {n: {2: length} for n in ("q", "k", "v")} | {"slopes": None}
    example = (*tensors(Shape(2, 4, 2, 20, 20)), values(4)["slopes"])
    program = torch.export.export(Attend(), example, dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "attend.pt2")
    cases = []
    for size in (20, 33):
        qkv = tensors(Shape(2, 4, 2, size, size))
        cases.append((*qkv, values(4)["slopes"], ALIBI(*qkv, **values(4))))
    torch.save(cases, tmp_path / "cases.pt")
    files = (str(tmp_path / "attend.pt2"), str(tmp_path / "cases.pt"))
    done = subprocess.run(
        [sys.executable, "-c", LOADER, *files], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "same", done.stderr

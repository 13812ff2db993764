"""Derivatives: text cases, finite differences, and torch's own, ties included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import FLOAT, SMOOTH, exprs, values
from text_cases import cases, parse

from scoremod.ir.evaluate import evaluate
from scoremod.ir.expr import Expr, capture, index, postorder
from scoremod.ir.ops import Op, Type
from scoremod.ir.show import show
from scoremod.passes.derivative import d_dread, d_ds, derivative, reads

Env = dict[str, Any]


@cases("derivative.txt")
def test_derivative(given: str, expected: str) -> None:
    variable, score = given.split(":", 1)
    assert show(derivative(parse(score), parse(variable))) == expected


def test_each_read_is_a_variable() -> None:
    score = parse("s + bias[i] * bias[j] + x * bias[i] + float(doc[j])")
    assert [show(read) for read in reads(score)] == ["bias[i]", "bias[j]", "x"]
    assert [show(d_dread(score, r)) for r in reads(score)] == ["bias[j] + x", "bias[i]", "bias[i]"]


@settings(max_examples=300)
@given(exprs(FLOAT, ops=SMOOTH), values(wild=False), st.sampled_from(("s", "x")))
def test_close_to_finite_differences(expr: Expr, env: Env, name: str) -> None:
    # A step is lost beside a term of 2**40.
    assume(all(abs(e.attr) < 2**20 for e in postorder(expr) if e.op is Op.CONST))
    variable = index("s") if name == "s" else capture("x", FLOAT)
    slope = derivative(expr, variable)
    # Off the grid of round numbers, where ties are.
    env[name] = env[name] + 0.01234567
    at = {step: _shifted(expr, env, name, step) for step in (-2, -1, 0, 1, 2)}
    with np.errstate(all="ignore"):
        near, far = ((at[k] - at[-k]) / (2 * k * STEP) for k in (1, 2))
        size = 1e-12 + np.abs(near)
        # A kink or a pole nearby shows as two differences that disagree.
        smooth = np.abs(near - far) < 1e-6 * size
        smooth &= np.abs(at[0]) < 1e6 * (1 + size)
        symbolic = evaluate(slope, env, np.longdouble, np.longdouble)
        # 0.5 / sqrt(0) * 0 is nan, as torch's is.
        smooth &= np.isfinite(symbolic)
        wrong = smooth & ~(np.abs(symbolic - near) < 1e-4 * size + 1e-8)
    assert not np.any(wrong), f"d/d{name} {show(expr)}  ->  {show(slope)}"


STEP = np.longdouble(1e-7)


def _shifted(expr: Expr, env: Env, name: str, step: int) -> Any:
    moved = {**env, name: env[name].astype(np.longdouble) + step * STEP}
    return evaluate(expr, moved, np.longdouble, np.longdouble)


# -- torch -------------------------------------------------------------------------------------


def torch_table() -> dict[Op, Callable[..., Any]]:
    import torch

    return {
        Op.ADD: torch.add,
        Op.SUB: torch.sub,
        Op.MUL: torch.mul,
        Op.DIV: torch.div,
        Op.POW: torch.pow,
        Op.NEG: torch.neg,
        Op.ABS: torch.abs,
        Op.MIN: torch.minimum,
        Op.MAX: torch.maximum,
        Op.WHERE: torch.where,
        Op.LT: torch.lt,
        Op.LE: torch.le,
        Op.AND: torch.logical_and,
        Op.OR: torch.logical_or,
        Op.NOT: torch.logical_not,
        Op.FLOAT: lambda x: x.double(),
        Op.SOFTPLUS: lambda x: torch.logaddexp(x, torch.zeros_like(x)),
        **{
            op: getattr(torch, op.value)
            for op in SMOOTH
            if op.value.isidentifier() and hasattr(torch, op.value) and len(op.value) > 2
            if op not in (Op.MIN, Op.MAX, Op.WHERE, Op.FLOAT, Op.AND, Op.NOT, Op.ABS)
        },
    }


def by_torch(expr: Expr, env: Env, s: Any) -> Any:
    """The value of an expression by torch operations; what else it reads comes from `evaluate`."""
    import torch

    table, done = torch_table(), {}
    for node in postorder(expr):
        if node == index("s"):
            done[node] = s
        elif node.op in table and node.type is not Type.INT:
            done[node] = table[node.op](*(done[a] for a in node.args))
        else:
            value = np.broadcast_to(evaluate(node, env, strict=np.float64), s.shape)
            done[node] = torch.from_numpy(value.copy())
    return done[expr]


@settings(max_examples=150)
@given(exprs(FLOAT, depth=3, ops=SMOOTH), values(wild=False))
def test_the_same_as_torch_ties_included(expr: Expr, env: Env) -> None:
    import torch

    env["s"], env["x"] = np.rint(env["s"]), np.rint(env["x"])
    if any(n.op is Op.MIN and n.args[0].op is Op.MAX for n in postorder(expr)):
        return  # this is a clamp: see below
    s = torch.from_numpy(env["s"].copy()).requires_grad_()
    value = by_torch(expr, env, s)
    if not value.requires_grad:
        return
    (expected,) = torch.autograd.grad(value.sum(), s, allow_unused=True)
    found = np.broadcast_to(evaluate(d_ds(expr), env, strict=np.float64), s.shape)
    if expected is not None:
        finite = [np.isfinite(v) for v in (expected.numpy(), found, value.detach().numpy())]
        close = np.isclose(found, expected.numpy(), rtol=1e-6, atol=1e-9)
        assert np.all(close[np.logical_and.reduce(finite)]), (
            f"d/ds {show(expr)}  ->  {show(d_ds(expr))}"
        )


@pytest.mark.parametrize("name", ["s", "x", "y"])
def test_clamp_has_the_gradients_of_torch(name: str) -> None:
    import torch

    grid = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    s, x, y = (v.ravel() for v in np.meshgrid(grid, grid, grid))
    apart = x < y
    env = {"s": s[apart], "x": x[apart], "y": y[apart]}
    leaves = {k: torch.from_numpy(v).requires_grad_() for k, v in env.items()}
    torch.clamp(leaves["s"], leaves["x"], leaves["y"]).sum().backward()
    variable = index("s") if name == "s" else capture(name, FLOAT)
    found = evaluate(derivative(parse("clamp(s, x, y)"), variable), env)
    assert np.array_equal(found, leaves[name].grad.numpy())

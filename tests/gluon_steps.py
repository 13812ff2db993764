"""Elementwise steps of rendered Gluon text on torch tensors: what Triton's interpreter cannot run.

    found = Steps(text, ROWS=64, HALF=64)
    found.call("weights", known, MASKED=True, s=products)

Layouts are left out: a tensor has its values in their logical order, and shared memory in that of
its places. Integers divide towards minus infinity, where compiled kernels divide towards 0.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Memory:
    """A row of numbers in shared or global memory."""

    values: Tensor
    place: Tensor | int = 0

    def load(self, layout: object) -> Tensor:
        return self.values

    def __add__(self, offset: Tensor | int) -> Memory:
        return Memory(self.values, self.place + offset)

    def to(self, kind: object) -> Memory:
        return self


class Gluon:
    """What steps call of `triton.experimental.gluon.language`."""

    float32, int32, int64 = torch.float32, torch.int32, torch.int64
    exp2, zeros_like = map(staticmethod, (torch.exp2, torch.zeros_like))
    abs, ceil, exp, log, sqrt = map(
        staticmethod, (torch.abs, torch.ceil, torch.exp, torch.log, torch.sqrt)
    )
    div_rn, floor, permute = map(staticmethod, (torch.div, torch.floor, torch.permute))

    @staticmethod
    def arange(start: int, end: int, layout: object = None) -> Tensor:
        return torch.arange(start, end, dtype=torch.int32)

    @staticmethod
    def zeros(shape: Sequence[int], dtype: torch.dtype, layout: object = None) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    @staticmethod
    def convert_layout(x: Tensor, layout: object) -> Tensor:
        return x

    @staticmethod
    def cast(x: Any, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(x).to(dtype)

    @staticmethod
    def fma(x: Any, y: Any, z: Any) -> Tensor:
        return x * y + z

    @staticmethod
    def where(condition: Any, x: Any, y: Any) -> Tensor:
        return torch.where(torch.as_tensor(condition), torch.as_tensor(x), torch.as_tensor(y))

    @staticmethod
    def minimum(x: Any, y: Any, propagate_nan: bool = False) -> Tensor:
        return (torch.minimum if propagate_nan else torch.fmin)(*together(x, y))

    @staticmethod
    def maximum(x: Any, y: Any, propagate_nan: bool = False) -> Tensor:
        return (torch.maximum if propagate_nan else torch.fmax)(*together(x, y))

    @staticmethod
    def load(pointers: Memory, mask: Any = True, other: Any = 0) -> Tensor:
        place, inside = together(pointers.place, mask)
        found = pointers.values[torch.where(inside, place, 0).long()]
        return torch.where(inside, found, torch.as_tensor(other, dtype=found.dtype))

    @staticmethod
    def inline_asm_elementwise(
        asm: str, constraints: str, args: Sequence[Any], *_: Any, **__: Any
    ) -> Any:
        if "tanh.approx" in asm:
            return torch.tanh(args[0])
        if "selp.f32 $0, $1, 0fFF800000" in asm:
            return torch.where(args[1] != 0, args[0], -torch.inf)
        if "ld.global.f32" in asm:
            return Gluon.load(args[0], args[1] != 0)
        raise NotImplementedError(asm)


def together(x: Any, y: Any) -> tuple[Tensor, ...]:
    """Both as tensors of one shape."""
    return torch.broadcast_tensors(torch.as_tensor(x), torch.as_tensor(y))


class Functional(ast.NodeTransformer):
    """`x += y` as `x = x + y`: Triton's values never change, tensors would."""

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.Assign:
        assert isinstance(node.target, ast.Name)
        old = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return ast.fix_missing_locations(ast.copy_location(ast.Assign([node.target], old), node))


class Steps:
    """The functions of a text, and the constants that they read."""

    def __init__(self, text: str, **constants: Any) -> None:
        tree = Functional().visit(ast.parse(text))
        tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        for function in tree.body:
            assert isinstance(function, ast.FunctionDef)
            function.decorator_list = []
            for argument in function.args.args:
                argument.annotation = None
        layouts = dict.fromkeys(("S_LAYOUT", "KEY", "QUERY", "ROW", "COLUMN", "APART", "FOURS"))
        tl = SimpleNamespace(PropagateNan=SimpleNamespace(ALL=True))
        self.names: dict[str, Any] = {"gl": Gluon, "tl": tl, **layouts, **constants}
        exec(compile(tree, "<steps>", "exec"), self.names)

    def call(self, function: str, known: Mapping[str, Any], **given: Any) -> Any:
        """The result of a step, with the arguments that are known by name."""
        wanted = inspect.signature(self.names[function]).parameters
        values = {**known, **given}
        return self.names[function](**{n: values[n] for n in wanted if n in values})

"""The meaning of an expression, by NumPy: the slow, obvious way that the others are tested against.

evaluate(j <= i, {"i": np.arange(4)[:, None], "j": np.arange(4)})   ->   a triangle of bools
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .expr import Expr, decides, postorder
from .ops import OPS, Array, Op, Type

Dtype = type[np.floating[Any]]


def evaluate(
    root: Expr, values: Mapping[str, Array], dtype: Dtype = np.float64, strict: Dtype = np.float32
) -> Array:
    """The value of `root`; `values` gives indices, `s` and captures by name.

    Floats are computed in `dtype`, those that decide a bool or an int without `s` in `strict`.
    """
    with np.errstate(all="ignore"):
        return _Evaluation(values, dtype, strict).run(root)


class _Evaluation:
    def __init__(self, values: Mapping[str, Array], dtype: Dtype, strict: Dtype) -> None:
        self.values, self.dtype, self.strict = values, dtype, strict
        self.done: dict[tuple[int, Dtype], Array] = {}

    def run(self, root: Expr) -> Array:
        stack = [(root, self.dtype)]
        while stack:
            node, dtype = stack[-1]
            inner = self.strict if decides(node) else dtype
            todo = [(a, inner) for a in node.args if (id(a), inner) not in self.done]
            if todo:
                stack.extend(todo)
                continue
            stack.pop()
            if (id(node), dtype) not in self.done:
                args = [self.done[id(a), inner] for a in node.args]
                self.done[id(node), dtype] = self.node(node, args, dtype)
        return self.done[id(root), self.dtype]

    def node(self, node: Expr, args: list[Array], dtype: Dtype) -> Array:
        if node.op is Op.CONST:
            value = node.attr
        elif node.op in (Op.INDEX, Op.CAPTURE):
            value = self.values[node.attr]
        elif node.op is Op.SIZE:
            value = np.shape(self.values[node.attr[0]])[node.attr[1]]
        elif node.op is Op.LOAD:
            value = read(np.asarray(self.values[node.attr]), args)
        else:
            meaning = OPS[node.op].meaning
            assert meaning is not None, node.op
            value = meaning(*args)
        return np.asarray(value).astype(_storage(node.type, dtype))


def _storage(type_: Type, dtype: Dtype) -> Any:
    return {Type.BOOL: np.bool_, Type.INT: np.int64, Type.FLOAT: dtype}[type_]


def read(table: Array, indices: list[Array]) -> Array:
    """table[indices], 0 where any index lies outside it."""
    inside = np.bool_(True)
    safe = []
    for axis, position in enumerate(indices):
        # A dimension of length 1 that stands for a longer one is read at 0 by the caller.
        ok = (position >= 0) & (position < table.shape[axis])
        inside = inside & ok
        safe.append(np.where(ok, position, 0))
    if table.size == 0:
        shape = np.broadcast_shapes(*(np.shape(p) for p in indices))
        return np.zeros(shape, table.dtype)
    return np.where(inside, table[tuple(safe)], np.zeros((), table.dtype))


def size_of(root: Expr) -> int:
    """How many distinct nodes an expression has."""
    return len({node.digest for node in postorder(root)})

"""A variant as a torch module: what it captures is learned, saved and moved with the model.

attend = scoremod.nn.Attention(alibi & causal, slopes=alibi_slopes(8))
out = attend(q, k, v)                       # attend.slopes is a Parameter
"""

from __future__ import annotations

from typing import Any

import torch

from .api import Variant
from .binding import check_names
from .errors import CaptureMismatch


class Attention(torch.nn.Module):
    """Attention by a variant; captures given here belong to the module.

    A float tensor that the score reads becomes a Parameter. Ints, bools, what only the mask reads
    and what is given as `torch.nn.Buffer` become buffers, numbers are bound to the variant, and
    other captures are given at the call, where a keyword also replaces the module's own.

    `.to(dtype)` moves floats as in any module: a capture declared `f32[...]` then no longer fits
    its declaration, which the next call says; declare `float[...]` to allow every dtype.
    """

    def __init__(self, variant: Variant, **captures: Any) -> None:
        super().__init__()
        program = variant._program
        check_names(program.captures, dict(program.consts), captures)
        tensors = {n: x for n, x in captures.items() if isinstance(x, torch.Tensor)}
        self.variant = variant.bind(**{n: x for n, x in captures.items() if n not in tensors})
        self._own = tuple(tensors)
        for name, value in tensors.items():
            if hasattr(self, name):
                raise CaptureMismatch(
                    f"a module has an attribute `{name}` already, so it cannot hold that capture",
                    hint=f'.rename({name}="my_{name}") it, or give it at the call',
                )
            if self._is_learned(name, value):
                self.register_parameter(name, _as_parameter(value))
            else:
                self.register_buffer(name, value)

    def _is_learned(self, name: str, value: torch.Tensor) -> bool:
        if isinstance(value, torch.nn.Parameter):
            return True
        is_buffer = isinstance(value, torch.nn.Buffer) or not value.is_floating_point()
        return not is_buffer and name in self.variant._program.score.names

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The variant's call, with the module's captures."""
        own = {name: getattr(self, name) for name in self._own}
        found: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
        found = self.variant(q, k, v, **{**own, **call})
        return found

    def extra_repr(self) -> str:
        """The variant, and the shapes of what the module holds."""
        shapes = [f"{name}={tuple(getattr(self, name).shape)}" for name in self._own]
        return ", ".join([f"{self.variant.name}({', '.join(self.variant.captures)})", *shapes])


def _as_parameter(value: torch.Tensor) -> torch.nn.Parameter:
    return value if isinstance(value, torch.nn.Parameter) else torch.nn.Parameter(value)

"""A tile structure that a user prepares once, for many layers.

tiles = (causal & document).prepare(8192, 8192, batch=2, doc=doc)
for layer in layers:
    out = attn(q, k, v, doc=doc, tiles=tiles)
doc.copy_(next_batch); tiles.refresh()      # in place; may be captured in a CUDA graph
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .binding import Bound
from .binding import Sizes as CallSizes
from .errors import InputMismatch
from .inputs import shared_values
from .plan import Typed
from .plan_triton import Options
from .structure import Sizes, Stored, Structure, structure

# Captures by name, bound and typed: the mask's program and values.
Rebind = Callable[[Mapping[str, Any]], tuple[Typed, tuple[Bound, ...]]]


@dataclass(frozen=True)
class _Made:
    """A structure for one kernel's tiles, and how it was made."""

    how: Structure
    stored: Stored


class Tiles:
    """Which tiles a mask leaves for calls of one size; made where a kernel first asks for it.

    What the mask captures is held, not copied: after its contents changed, call `refresh`.
    """

    def __init__(
        self,
        rebind: Rebind,
        captures: Mapping[str, Any],
        sizes: CallSizes,
        q_offset: int | torch.Tensor,
        kv_lens: torch.Tensor | None,
        device: torch.device,
    ) -> None:
        self._rebind, self._captures = rebind, dict(captures)
        self._program, self._bound = rebind(captures)
        self._sizes, self._device = sizes, device
        self._q_offset, self._kv_lens = q_offset, kv_lens
        self._made: dict[tuple[Any, ...], _Made] = {}
        self._kinds: dict[tuple[int, int], np.ndarray[Any, Any]] = {}

    def refresh(self, **captures: Any) -> Tiles:
        """Look at the mask again, in place; `captures` replace values that it was prepared with.

        Compiles nothing and does not wait for the device, so that a CUDA graph may capture it.
        """
        if captures:
            program, bound = self._rebind({**self._captures, **captures})
            if program.canonical != self._program.canonical:
                raise InputMismatch(
                    "refresh takes values of the types that the tiles were prepared with",
                    hint="call .prepare(...) again for others",
                )
            self._captures.update(captures)
            self._program, self._bound = program, bound
        self._kinds.clear()
        shared = self._shared()
        for made in self._made.values():
            made.how.refresh(made.stored, shared, ())
        return self

    @property
    def nbytes(self) -> int:
        """Memory that the structure takes on the device."""
        return sum(made.stored.nbytes for made in self._made.values())

    def __repr__(self) -> str:
        sizes = self._sizes
        return (
            f"<tiles of {self._program.name}, {sizes.q_len} x {sizes.kv_len} on {self._device}, "
            f"{self.nbytes} bytes>"
        )

    # -- what backends ask for

    def check(
        self,
        program: Typed,
        bound: Sequence[Bound],
        sizes: Sizes,
        q_offset: int | torch.Tensor,
        kv_lens: torch.Tensor | None,
    ) -> None:
        """Raise where a call is not one that this was prepared for."""
        mine = self._sizes
        if program.canonical != self._program.canonical:
            raise InputMismatch(
                f"tiles= was prepared for the mask of `{self._program.name}`, not for this one"
            )
        if (mine.q_len, mine.kv_len) != (sizes.q_len, sizes.kv_len):
            raise InputMismatch(
                f"tiles= was prepared for lengths {mine.q_len} and {mine.kv_len}, "
                f"but q and k have {sizes.q_len} and {sizes.kv_len}"
            )
        names = program.given_mask.names
        per_batch = "b" in names or kv_lens is not None or isinstance(q_offset, torch.Tensor)
        if per_batch and mine.batch != sizes.batch:
            raise InputMismatch(
                f"tiles= was prepared for a batch of {mine.batch}, but q has {sizes.batch}",
                hint=f".prepare(..., batch={sizes.batch})",
            )
        if names & {"h", "hk"} and mine.q_heads != sizes.q_heads:
            raise InputMismatch(
                f"tiles= was prepared for {mine.q_heads} query heads, but q has {sizes.q_heads}",
                hint=f".prepare(..., q_heads={sizes.q_heads})",
            )
        self._check_values(bound, q_offset, kv_lens)

    def _check_values(
        self, bound: Sequence[Bound], q_offset: int | torch.Tensor, kv_lens: torch.Tensor | None
    ) -> None:
        pairs: list[tuple[str, Any, Any]] = [
            (x.param.name, x.value, y.value) for x, y in zip(bound, self._bound, strict=True)
        ]
        pairs += [("q_offset", q_offset, self._q_offset), ("kv_lens", kv_lens, self._kv_lens)]
        for name, value, prepared in pairs:
            if not _same(value, prepared):
                raise InputMismatch(
                    f"tiles= was prepared with another value of `{name}`",
                    hint=f"call .refresh({name}=...) on it, or prepare again",
                )

    def stored(
        self,
        program: Typed,
        chosen: Options,
        sizes: Sizes,
        blocks: tuple[int, int],
        *,
        transposed: bool = False,
        by_length: bool = False,
    ) -> Stored:
        """The structure for a kernel's tiles."""
        sizes = replace(sizes, batch=self._sizes.batch, q_heads=self._sizes.q_heads)
        key = (chosen.small, chosen.wide_offsets, blocks, transposed, by_length, sizes.gqa_group)
        made = self._made.get(key)
        if made is None:
            how = structure(
                program,
                chosen,
                sizes,
                blocks,
                self._device,
                transposed=transposed,
                by_length=by_length,
            )
            made = self._made[key] = _Made(how, how.make(self._device, self._shared(), ()))
        return made.stored

    def kinds(
        self, blocks: tuple[int, int], classify: Callable[[], np.ndarray[Any, Any]]
    ) -> np.ndarray[Any, Any]:
        """The kinds of tiles for the CPU backend."""
        if blocks not in self._kinds:
            self._kinds[blocks] = classify()
        return self._kinds[blocks]

    def _shared(self) -> list[Any]:
        return shared_values(self._q_offset, self._kv_lens, self._bound)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())
    return type(a) is type(b) and bool(a == b)

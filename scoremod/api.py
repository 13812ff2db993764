"""The public Variant: what a user declares, calls, composes and looks at."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from . import (
    ahead,
    attend_triton,
    attention,
    autograd,
    bundle,
    check,
    explain,
    library,
    notebook,
    reference,
    sources,
)
from .analysis.tiles import TileMap, classify
from .binding import Bound, Sizes, bind, check_given, check_names, number, value_of
from .blocks import Blocks, read_blocks
from .bundle import marked
from .errors import (
    CompositionError,
    InputMismatch,
    ScoremodError,
    UnsupportedPython,
)
from .frontend.source import PythonSource, read_python, read_text_source
from .inputs import (
    Inputs,
    as_numpy,
    autocast,
    check_inputs,
    check_positions,
    needs_grad,
    needs_residual,
)
from .ir.capture import MISSING, Capture
from .ir.expr import TRUE
from .ir.show import show as shown
from .origin import Both, Chained, Either, Leaf, Negated, Origin, Renamed, leaves
from .plan import Typed, assumed_params, assumptions, typed
from .target import parse_target
from .tiles import Tiles
from .variant import Program, S, read
from .warm import WARM, KindOfCall, Warm, kind_of

# Kinds of calls whose decisions are kept, per variant.
MAX_WARM = 4096
# The length of the mask that a kernel's text opens with.
PICTURED = 1024

P = ParamSpec("P")
R = TypeVar("R")


def _public(function: Callable[P, R]) -> Callable[P, R]:
    """Cut scoremod's own frames out of a user's traceback."""

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        __tracebackhide__ = True  # pytest and IPython leave this frame out as well
        try:
            return function(*args, **keywords)
        except ScoremodError as error:
            raise error.with_traceback(None) from None
        except RecursionError:
            raise UnsupportedPython(
                "the variant is nested too deeply", hint="read a table instead of a long chain"
            ) from None

    return call


class Variant:
    """An attention variant: a score, a mask and captures, to be called on q, k, v.

    Made by `@scoremod.variant`, `@scoremod.mask`, `scoremod.parse` or `scoremod.from_flex`, and
    put together with `&`, `|`, `~` and `.then`.
    """

    def __init__(
        self, origin: Origin, fixed: Mapping[str, Any] | None = None, bundle: str = ""
    ) -> None:
        self._origin = origin
        self._fixed = dict(fixed or {})
        self._bundle = bundle  # the digest of the one that its kernels come from
        self._program = read(origin, self._fixed)
        self._typed: dict[Any, Typed] = {}
        self._warm: dict[KindOfCall | None, Warm | autograd.Recorded] = {}

    # -- the call

    @_public
    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        return_lse: bool = False,
        scale: float | torch.Tensor | None = None,
        q_offset: int | torch.Tensor = 0,
        kv_lens: torch.Tensor | None = None,
        tiles: Any = None,
        deterministic: bool | None = None,
        precision: str = "auto",
        backend: str | None = None,
        **captures: Any,
    ) -> Any:
        """Attention of q [B, Hq, Lq, D] over k [B, Hk, Lk, D] and v [B, Hk, Lk, Dv].

        Returns out [B, Hq, Lq, Dv], or (out, lse) with lse [B, Hq, Lq] in natural log. `i` runs
        from `q_offset` (int, or int tensor [B]); keys from `kv_lens` [B] on are not read. `tiles`
        is what `prepare` gives, or a list of blocks that may be visited. `deterministic` asks for
        gradients of the same bits in each run, by default as torch's own switch does: Hopper's dq
        is then added up in an order, and a captured tensor that is read at scattered places raises.
        """
        if torch.compiler.is_compiling() or (backend != "eager" and library.is_watched(q)):
            if tiles is not None:
                raise InputMismatch(
                    "tiles= cannot be given under torch.compile, export or fake tensors",
                    hint="leave it out: the call finds its tiles by itself",
                )
            how = f"{backend or 'auto'} {precision} {deterministic}"
            out, lse = self._operator(how, (q, k, v), (scale, q_offset, kv_lens), captures)
            return (out, lse) if return_lse else out
        kind = values = None
        if deterministic is None and isinstance(q, torch.Tensor) and q.is_cuda:
            values = self._values(captures)
            if values is not None:
                options = (scale, q_offset, kv_lens, precision, backend)
                kind = kind_of(q, k, v, *options, tiles, values)
                warmed = self._warm.get(kind)
                if warmed is not None:
                    assert isinstance(q_offset, int)
                    return warmed(q, k, v, q_offset, kv_lens, values, tiles, return_lse=return_lse)
        inputs = check_inputs(
            q, k, v, scale=scale, q_offset=q_offset, kv_lens=kv_lens, precision=precision
        )
        if tiles is not None or deterministic is not None:
            inputs = replace(inputs, tiles=_tiles(tiles, inputs), deterministic=deterministic)
        out, lse = self._attend(inputs, captures, backend, kind)
        return (out, lse) if return_lse else out

    def _attend(
        self,
        inputs: Inputs,
        captures: Mapping[str, Any],
        backend: str | None,
        kind: KindOfCall | None,
    ) -> tuple[Any, Any]:
        """(out, lse) of a checked call; what calls of its kind need is kept."""
        program, bound = self._bind(captures, inputs.sizes, inputs.q.device)
        known = self._type(program, bound)
        records = needs_grad(inputs, bound)
        if records:
            inputs = replace(inputs, keeps_residual=needs_residual(known, inputs))
        name, _ = attention.choose_backend(known, inputs, bound, backend)
        if name == "eager":
            out, lse = self._oracle(inputs, captures)
        else:
            attend = autograd.attend if records else attention.attend
            out, lse, *_ = attend(known, inputs, bound, name)
        if name in WARM and kind is not None:
            self._remember(kind, name, known, inputs, bound)
        return out, lse

    def _operator(
        self,
        how: str,
        qkv: tuple[torch.Tensor, ...],
        options: tuple[Any, ...],
        captures: Mapping[str, Any],
    ) -> tuple[Any, Any]:
        """The call as an operator of torch; Dynamo follows this function."""
        consts = {name for name, _ in self._program.consts}
        given = tuple((n, x if n in consts else None) for n, x in captures.items())
        text = self._operator_text(given)
        values = [
            number(found, value_of(found, captures, self._fixed))
            for found in self._program.captures
        ]
        return library.attend(text, how, autocast(*qkv), (*options, *values))

    @library.constant
    def _operator_text(self, given: tuple[tuple[str, Any], ...]) -> str:
        """The variant as the operator reads it, for names of captures and values of consts."""
        program, names = self._program, dict(given)
        consts = dict(program.consts)
        check_names(program.captures, consts, names)
        check_given(program.captures, names, self._fixed)
        if consts.keys() & names.keys():
            program = read(self._origin, {**self._fixed, **names})
        return marked(_written(program, {}).text, self._bundle)

    def _values(self, captures: Mapping[str, Any]) -> list[Any] | None:
        """The captures' values in order, unchecked; None where a name is missing or unknown."""
        values, given = [], 0
        for found in self._program.captures:
            if found.name in captures:
                given += 1
                values.append(captures[found.name])
            elif found.name in self._fixed:
                values.append(self._fixed[found.name])
            elif found.free is not None:
                values.append(found.free.read())
            elif found.default is not MISSING:
                values.append(found.default)
            else:
                return None
        return values if given == len(captures) else None

    def _remember(
        self, kind: KindOfCall, name: str, known: Typed, inputs: Inputs, bound: tuple[Bound, ...]
    ) -> None:
        """Keep what later calls of this kind need, once one has passed all checks."""
        warm = WARM[name](known, inputs, bound)
        if warm is None:
            return
        if len(self._warm) >= MAX_WARM:  # a sweep of shapes does not pile up
            self._warm.clear()
        recorded = needs_grad(inputs, bound)
        self._warm[kind] = (
            autograd.Recorded.of(known, inputs, bound, name, warm) if recorded else warm
        )

    @_public
    def eager(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        return_lse: bool = False,
        scale: float | torch.Tensor | None = None,
        q_offset: int | torch.Tensor = 0,
        kv_lens: torch.Tensor | None = None,
        **captures: Any,
    ) -> Any:
        """The oracle: the same answer, dense and in float64, from a second reading of the source.

        Differentiable. Takes memory for every pair (i, j); give float64 for full precision.
        """
        inputs = check_inputs(
            q, k, v, scale=scale, q_offset=q_offset, kv_lens=kv_lens, precision="exact"
        )
        self._bind(captures, inputs.sizes, inputs.q.device)
        out, lse = self._oracle(inputs, captures)
        return (out, lse) if return_lse else out

    def _oracle(self, inputs: Inputs, captures: Mapping[str, Any]) -> tuple[Any, Any]:
        user, lengths = inputs.tiles, (inputs.q.shape[2], inputs.k.shape[2])
        return reference.attend(
            self._origin,
            inputs.q,
            inputs.k,
            inputs.v,
            {**self._fixed, **captures},
            scale=inputs.scale,
            q_offset=inputs.q_offset,
            kv_lens=inputs.kv_lens,
            listed=user.dense(*lengths) if isinstance(user, Blocks) else None,
        )

    def _bind(
        self, captures: Mapping[str, Any], sizes: Sizes, device: torch.device | None
    ) -> tuple[Program, tuple[Bound, ...]]:
        """The program for the consts of this call, and its captures' values."""
        program = self._program
        names = {name for name, _ in program.consts}
        if names & captures.keys():
            check_names(program.captures, dict(program.consts), captures)
            program = read(self._origin, {**self._fixed, **captures})
        consts = dict(program.consts)
        return program, bind(program.captures, consts, captures, self._fixed, sizes, device)

    def _bind_mask(
        self, captures: Mapping[str, Any], sizes: Sizes, device: torch.device | None
    ) -> tuple[Typed, tuple[Bound, ...]]:
        """The mask alone, and the values that it captures; the score's need not be given."""
        check_names(self._program.captures, dict(self._program.consts), captures)
        program = self._program
        if {name for name, _ in program.consts} & captures.keys():
            program = read(self._origin, {**self._fixed, **captures})
        wanted = tuple(c for c in program.captures if c.name in program.mask.names)
        names = {c.name for c in wanted}
        given = {name: value for name, value in captures.items() if name in names}
        bound = bind(wanted, dict(program.consts), given, self._fixed, sizes, device)
        only = replace(program, score=S, captures=wanted)
        params = tuple(x.param for x in bound)
        return typed(only, params, self._text(), self._bundle), bound

    def _type(self, program: Program, bound: tuple[Bound, ...]) -> Typed:
        key = (program.consts, tuple(x.param for x in bound))
        found = self._typed.get(key)
        if found is None:
            params = tuple(x.param for x in bound)
            found = typed(program, params, self._text(), self._bundle)
            self._typed[key] = found
        return found

    # -- what it looks like

    @_public
    def mask_dense(
        self,
        q_len: int,
        kv_len: int,
        *,
        b: int = 0,
        h: int = 0,
        q_offset: int = 0,
        **captures: Any,
    ) -> torch.Tensor:
        """Which pairs attend, as bool [q_len, kv_len]; masks taken out of scores included."""
        self._bind(captures, self._sizes(q_len, kv_len, b, h, q_offset), None)
        return reference.mask_dense(
            self._origin,
            q_len,
            kv_len,
            {**self._fixed, **captures},
            b=b,
            h=h,
            batch=b + 1,
            q_heads=h + 1,
            kv_heads=h + 1,
            q_offset=q_offset,
        )

    @_public
    def tiles(
        self,
        q_len: int,
        kv_len: int,
        *,
        b: int = 0,
        h: int = 0,
        q_offset: int = 0,
        block_m: int = 128,
        block_n: int = 128,
        **captures: Any,
    ) -> TileMap:
        """Which tiles of the score matrix are proved empty or full.

        `.kind` is uint8 [q tiles, kv tiles]: 0 empty, 1 partial, 2 full, about pairs inside the
        lengths; print it for a picture.
        """
        sizes = self._sizes(q_len, kv_len, b, h, q_offset)
        program, bound = self._bind_mask(captures, sizes, None)
        kind = classify(
            program.mask,
            q_len,
            kv_len,
            block_m=block_m,
            block_n=block_n,
            values=as_numpy(bound),
            b=b,
            h=h,
            hk=h,
            q_offset=q_offset,
        )
        return TileMap(kind, q_len, kv_len, block_m, block_n)

    @_public
    def prepare(
        self,
        q_len: int,
        kv_len: int,
        *,
        batch: int = 1,
        q_heads: int = 1,
        q_offset: int | torch.Tensor = 0,
        kv_lens: torch.Tensor | None = None,
        device: torch.device | str | None = None,
        **captures: Any,
    ) -> Tiles:
        """The tile structure of the mask, made once for the `tiles=` of many calls.

        It takes the captures that the mask reads, and lives on `device` (theirs, else the current
        GPU, else the CPU). `batch` and `q_heads` matter to a mask that reads b or h. A mask that is
        a range of keys needs no structure, and takes no memory. After the contents of a captured
        tensor changed, `.refresh()` it.
        """
        given = [*captures.values(), q_offset, kv_lens]
        where = _device(device, [x for x in given if isinstance(x, torch.Tensor)])
        for name, value in (("batch", batch), ("q_heads", q_heads)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputMismatch(f"{name} must be an int >= 1, not {value!r}")
        self._sizes(q_len, kv_len, 0, 0, 0)
        q_offset, kv_lens = check_positions(q_offset, kv_lens, batch, q_len, where)
        offset = q_offset if isinstance(q_offset, int) else None
        # How many kv heads there are is known at the call.
        sizes = Sizes(batch, q_heads, 1, q_len, kv_len, offset)

        def rebind(values: Mapping[str, Any]) -> tuple[Typed, tuple[Bound, ...]]:
            return self._bind_mask(values, sizes, where)

        return Tiles(rebind, captures, sizes, q_offset, kv_lens, where)

    def _sizes(self, q_len: int, kv_len: int, b: int, h: int, q_offset: int) -> Sizes:
        for name, value in (("q_len", q_len), ("kv_len", kv_len), ("b", b), ("h", h)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InputMismatch(f"{name} must be an int >= 0, not {value!r}")
        return Sizes(b + 1, h + 1, h + 1, q_len, kv_len, q_offset)

    @_public
    def source(
        self,
        q: torch.Tensor | None = None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        *,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        dtype: torch.dtype | str | None = None,
        target: str = "cuda:90",
        phase: str = "fwd",
        precision: str = "auto",
        captures: Mapping[str, torch.dtype | str] | None = None,
        **values: Any,
    ) -> str:
        """The kernel that a call would run, as text; needs neither GPU nor values.

        With q, k, v (and captures) it is the kernel of that call; otherwise `head_dim` and `dtype`
        (a torch dtype or `f16`, `bf16`, `f32`) describe it, and element types that a call would
        decide are assumed, or taken from `captures={"doc": torch.int64}`; the text says which.
        `phase="bwd"` gives the kernels of the backward, with the gradients of all captures that can
        have one; `phase="tiles"` those that find the tiles of a mask that is not a range. A picture
        of a small mask is in front where the values of its captures are known.
        """
        if phase not in ("fwd", "bwd", "tiles"):
            raise InputMismatch(f"phase must be 'fwd', 'bwd' or 'tiles', not {phase!r}")
        if q is not None and k is not None and v is not None:
            inputs = check_inputs(
                q, k, v, scale=None, q_offset=0, kv_lens=None, precision=precision
            )
            return self._source_of_call(inputs, values, target, phase)
        if head_dim is None:
            raise InputMismatch("source needs q, k, v or head_dim=")
        given = {name: sources.element(e) for name, e in (captures or {}).items()}
        check_names(self._program.captures, {}, given)
        program = self._program
        params = assumed_params(program, given)
        text = (*self._text(), *assumptions(program, params, given))
        known = typed(program, params, text)
        shape: dict[str, Any] = {
            "head_dim": head_dim,
            "v_head_dim": v_head_dim or head_dim,
            "dtype": sources.element(dtype or "bf16"),
            "precision": precision,
        }
        if phase == "bwd" and target == "cpu":
            float64 = shape["dtype"] == "f64"
            return sources.of_cpu_backward(known, float64=float64, has_kv_lens=False)
        if phase != "fwd":
            chosen = sources.options_of_shape(known, **shape)
            of_phase = sources.of_backward if phase == "bwd" else sources.of_tiles
            return of_phase(known, chosen, target)
        return self._picture({}) + sources.of_shape(known, **shape, target=target)

    def _source_of_call(
        self, inputs: Inputs, values: Mapping[str, Any], target: str, phase: str
    ) -> str:
        program, bound = self._bind(values, inputs.sizes, inputs.q.device)
        known = self._type(program, bound)
        if phase == "fwd":
            return self._picture(values) + sources.of_call(known, inputs, bound, target)
        if phase == "bwd" and target == "cpu":
            float64 = inputs.q.dtype is torch.float64
            return sources.of_cpu_backward(known, float64=float64, has_kv_lens=False)
        chosen = attend_triton.options(known, inputs, bound)
        of_phase = sources.of_backward if phase == "bwd" else sources.of_tiles
        return of_phase(known, chosen, target)

    def _picture(self, values: Mapping[str, Any]) -> str:
        """A picture of the tiles of a small mask, as comments; empty where a value is missing."""
        found = self._small_tiles(values)
        return "" if found is None else sources.picture(found)

    def _small_tiles(self, values: Mapping[str, Any]) -> TileMap | None:
        """The tiles of a small mask; None where there is none, or a value is missing."""
        if self._program.mask == TRUE or self._lacking(values) or self._program.consts:
            return None
        mask = self._program.mask
        given = {name: x for name, x in values.items() if name in mask.names}
        if any(isinstance(x, torch.Tensor) for x in (*given.values(), *self._fixed.values())):
            return None  # a table has the length of its call
        return self.tiles(PICTURED, PICTURED, block_m=64, block_n=64, **given)

    def _lacking(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """The captures of the mask that have no value."""
        known = {c.name for c in self._program.captures if c.default is not MISSING}
        known |= self._fixed.keys() | values.keys()
        wanted = self._program.mask.names
        return tuple(
            c.name for c in self._program.captures if c.name in wanted and c.name not in known
        )

    def _card(self) -> notebook.Card:
        known = typed(self._program, assumed_params(self._program))
        return notebook.Card(
            self.name,
            shown(known.score),
            "" if known.mask == TRUE else shown(known.mask),
            self._declared(),
            self._small_tiles({}),
            self._lacking({}),
        )

    def _repr_html_(self) -> str:
        return self._card().html()

    def _repr_markdown_(self) -> str:
        return self._card().markdown()

    @_public
    def explain(
        self,
        q: torch.Tensor | None = None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        *,
        head_dim: int = 128,
        v_head_dim: int | None = None,
        dtype: torch.dtype | str = "bf16",
        target: str = "cuda:90",
        precision: str = "auto",
        backend: str | None = None,
        captures: Mapping[str, torch.dtype | str] | None = None,
        **values: Any,
    ) -> str:
        """What scoremod made of the variant: simplified form, captures, each atom of the mask.

        With q, k, v (and captures) it adds what that call does: backend and why, tiles, what is
        folded, padded and copied; otherwise what the kernel for `head_dim` and `dtype` does.
        """
        if q is not None and k is not None and v is not None:
            inputs = check_inputs(
                q, k, v, scale=None, q_offset=0, kv_lens=None, precision=precision
            )
            program, bound = self._bind(values, inputs.sizes, inputs.q.device)
            known = self._type(program, bound)
            name, why = attention.choose_backend(known, inputs, bound, backend)
            lines = explain.explain_program(program, tuple(x.param for x in bound))
            lines += explain.explain_call(known, inputs, bound, name, why)
            return "\n".join(lines)
        given = {name: sources.element(e) for name, e in (captures or {}).items()}
        check_names(self._program.captures, {}, given)
        params = assumed_params(self._program, given)
        lines = explain.explain_program(self._program, params)
        chosen = sources.options_of_shape(
            typed(self._program, params),
            head_dim=head_dim,
            v_head_dim=v_head_dim or head_dim,
            dtype=sources.element(dtype),
            precision=precision,
        )
        known = typed(self._program, params)
        return "\n".join(lines + explain.explain_shape(known, chosen, parse_target(target)))

    @_public
    def check(
        self,
        *,
        dtype: Any = None,
        backend: str | Sequence[str] | None = None,
        bounds: bool = False,
        seed: int = 0,
        captures: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> check.Report:
        """Compare with the oracle, forward and backward, and raise CheckFailed where it is off.

        Over awkward lengths, head dims and offsets, each dtype (or those given: `"f32"`,
        torch.bfloat16, or several) and each backend that runs here. Captures that are not given
        are drawn by declared type; one called like an option is given in `captures`. `bounds` adds
        the reads of attended pairs that leave their tables.
        """
        backends = (backend,) if isinstance(backend, str) else tuple(backend or ())
        wish = check.Wish(check.words_of(dtype), backends, bounds, seed)
        return check.check(self, {**(captures or {}), **values}, wish)

    @_public
    def build(
        self,
        path: str | Path,
        *,
        target: str | Sequence[str],
        dtype: torch.dtype | str | Sequence[torch.dtype | str],
        head_dim: int | Sequence[int],
        v_head_dim: int | Sequence[int] | None = None,
        phase: str | Sequence[str] = ("fwd",),
        captures: Mapping[str, Any] | None = None,
        also: str | Sequence[str] = (),
    ) -> Path:
        """Write a bundle: the kernels that calls need, for machines that cannot compile.

        `scoremod.load(path)` opens it. Targets are `"cuda:90"`, `"hip:gfx942"` and the like; phases
        `"fwd"` and `"bwd"`; each option is one value or several. Element types that a call would
        decide are assumed, or taken from `captures={"doc": torch.int64}`; for a captured number a
        dtype says that it comes as a 0-d tensor. What is fixed by `.bind` is a default of the
        loaded variant where it is a number of a declared type; calls give everything else.

        `also` names what few calls use: "scale" as a tensor, "blocks" in tiles=, precision="exact",
        and gradients with "offsets" per sequence.
        """
        wish = ahead.Wish(
            _several(target), _several(dtype), _several(head_dim), _several(phase),
            None if v_head_dim is None else _several(v_head_dim),
            {name: _several(x) for name, x in (captures or {}).items()},
            _several(also),
        )  # fmt: skip
        return self._build(path, wish)

    def _build(
        self,
        path: str | Path,
        wish: ahead.Wish,
        follow: Callable[[Sequence[ahead.Job]], Iterable[ahead.Job]] = iter,
    ) -> Path:
        """Write a bundle; `follow` may show how far it is."""
        bundle.require_folder(path)
        check_names(self._program.captures, {}, wish.captures)
        # What is compiled is what a loaded bundle will read.
        source = read_text_source(str(self), f"<{self.name}>")
        program = read(Leaf(source), {})
        shelf = ahead.Shelf()
        for job in follow(ahead.jobs(program, wish, self._text())):
            shelf.run(job)
        title = bundle.Title(source, self._declared(), self._text())
        bundle.write(path, title, shelf.items.values())
        return Path(path)

    def _declared(self) -> tuple[str, ...]:
        """The captures that a loaded bundle takes, with their defaults."""
        return tuple(
            c.declaration if c.default is MISSING else f"{c.declaration} = {c.default!r}"
            for c in self._written().captures
        )

    def _text(self) -> tuple[str, ...]:
        """The user's own words."""
        lines: list[str] = []
        for source in leaves(self._origin):
            lines.extend(source.text.strip("\n").splitlines())
        return tuple(lines)

    @property
    def name(self) -> str:
        """The name of the function or text it came from."""
        return self._program.name

    @property
    def captures(self) -> tuple[str, ...]:
        """The captures that a call may give, as declarations."""
        return tuple(c.declaration for c in self._program.captures)

    def __deepcopy__(self, memo: object) -> Variant:
        """Itself: a variant never changes, so copies of a module share it."""
        return self

    def __repr__(self) -> str:
        return f"<scoremod variant {self.name}({', '.join(self.captures)})>"

    def __str__(self) -> str:
        """The variant in the mini-language; numbers fixed by .bind are its defaults."""
        return self._written().text

    def _written(self) -> Program:
        """The program without what only this process knows."""
        return _written(self._program, self._new_defaults())

    def _new_defaults(self) -> dict[str, Any]:
        """Numbers of .bind for captures of a declared type, which text can write down."""
        return {
            c.name: _number(c, self._fixed[c.name])
            for c in self._program.captures
            if c.element is not None and isinstance(self._fixed.get(c.name), bool | int | float)
        }

    def __eq__(self, other: object) -> bool:
        """Equal when score, mask and captures say the same, wherever they were written."""
        if not isinstance(other, Variant):
            return NotImplemented
        return self._meaning() == other._meaning()

    def _meaning(self) -> tuple[Any, ...]:
        """What equal variants share; tensors count by identity."""
        written = self._written()
        shown = self._new_defaults().keys() | dict(written.consts).keys()
        rest = {
            name: id(x) if isinstance(x, torch.Tensor) else x
            for name, x in self._fixed.items()
            if name not in shown
        }
        return written.score, written.mask, written.captures, rest

    def __hash__(self) -> int:
        return hash((self._program.score, self._program.mask))

    # -- algebra

    @_public
    def bind(self, **values: Any) -> Variant:
        """Fix values of captures; a call may still override them."""
        check_names(self._program.captures, dict(self._program.consts), values)
        for found in self._program.captures:
            if isinstance(values.get(found.name), bool | int | float):
                _number(found, values[found.name])
        return Variant(self._origin, {**self._fixed, **values}, self._bundle)

    @_public
    def rename(self, **names: str) -> Variant:
        """Give captures other names: `.rename(window="far")`."""
        origin = Renamed(self._origin, tuple(names.items()))
        fixed = {names.get(k, k): v for k, v in self._fixed.items()}
        return Variant(origin, fixed, self._bundle)

    @_public
    def then(self, second: Variant) -> Variant:
        """Feed this score to `second` as its `s`; the masks of both apply after both."""
        return self._join(Chained(self._origin, _variant(second, ".then")._origin), second)

    @_public
    def __and__(self, other: Variant) -> Variant:
        return self._join(Both(self._origin, _variant(other, "&")._origin), other)

    @_public
    def __or__(self, other: Variant) -> Variant:
        return self._join(Either(self._origin, _variant(other, "|")._origin), other)

    @_public
    def __invert__(self) -> Variant:
        return Variant(Negated(self._origin), self._fixed)

    def _join(self, origin: Origin, other: Variant) -> Variant:
        for name in self._fixed.keys() & other._fixed.keys():
            if self._fixed[name] is not other._fixed[name] and (
                isinstance(self._fixed[name], torch.Tensor)
                or self._fixed[name] != other._fixed[name]
            ):
                raise CompositionError(
                    f"both parts fix `{name}`, to different values",
                    hint=f'.rename({name}="other_{name}") one of them',
                )
        return Variant(origin, {**self._fixed, **other._fixed})


def _tiles(given: Any, inputs: Inputs) -> Tiles | Blocks | None:
    """What `tiles=` means: a prepared structure, or the user's own list of blocks."""
    if given is None or isinstance(given, Tiles):
        return given
    batch, q_heads, q_len, _ = inputs.q.shape
    return read_blocks(given, batch, q_heads, q_len, inputs.k.shape[2], inputs.q.device)


def _written(program: Program, defaults: Mapping[str, Any]) -> Program:
    """A program without free variables and with other defaults."""
    captures = (
        replace(c, default=defaults.get(c.name, c.default), free=None) for c in program.captures
    )
    return replace(program, captures=tuple(captures))


def _number(found: Capture, value: bool | int | float) -> Any:
    """A number as the capture's declared type; an error where it does not fit."""
    (bound,) = bind((found,), {}, {found.name: value}, {}, Sizes(1, 1, 1, 0, 0), None)
    return bound.value


def _device(given: torch.device | str | None, tensors: list[torch.Tensor]) -> torch.device:
    """Where a structure lives."""
    if given is not None:
        found = torch.device(given)
    elif tensors:
        found = tensors[0].device
    else:
        found = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found


def _variant(value: object, what: str) -> Variant:
    if not isinstance(value, Variant):
        raise CompositionError(
            f"{what} joins variants, but this is {type(value).__name__}",
            hint="decorate the function with @scoremod.variant or @scoremod.mask",
        )
    return value


def _several(value: Any) -> tuple[Any, ...]:
    """One value, or several, as several."""
    return tuple(value) if isinstance(value, list | tuple | set | frozenset) else (value,)


# -- making variants ---------------------------------------------------------------------------


@_public
def variant(function: Callable[..., Any]) -> Variant:
    """Declare a variant by its score: `@scoremod.variant def alibi(s, i, j, h, slopes): ...`.

    The function is read, not called. Parameters that are not `s b h hk i j q_len kv_len` are
    captures; so are free variables that hold numbers or tensors.
    """
    return _like(function, Variant(Leaf(read_python(function, "score"))))


@_public
def mask(function: Callable[..., Any]) -> Variant:
    """Declare a mask: a function of indices and captures that is true where i attends to j."""
    return _like(function, Variant(Leaf(read_python(function, "mask"))))


def _like(function: Callable[..., Any], made: Variant) -> Variant:
    """Give a variant the function's name, module and docstring, for help() and doc tools."""
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        if hasattr(function, name):
            setattr(made, name, getattr(function, name))
    return made


@_public
def parse(text: str, *, file: str | Path = "<text>") -> Variant:
    """Read a variant written in the mini-language."""
    return Variant(Leaf(read_text_source(text, str(file))))


@_public
def load(path: str | Path) -> Variant:
    """Open a bundle that `.build` wrote: a variant whose kernels come from it.

    Nothing is compiled: needs neither Triton nor a compiler nor the variant's source. A call for
    which the bundle has no kernel raises KernelMissing. Tensors on the CPU are served as ever.
    """
    found = bundle.load(path)
    return Variant(Leaf(found.variant), bundle=found.digest)


_FLEX_SCORE, _FLEX_MASK = ("s", "b", "h", "i", "j"), ("b", "h", "i", "j")


@_public
def from_flex(
    score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None
) -> Variant:
    """Take over FlexAttention's functions, whatever their parameters are called.

    score_mod(score, b, h, q_idx, kv_idx) gives a score, mask_mod(b, h, q_idx, kv_idx) a bool;
    tensors and numbers that they close over become captures.
    """
    if score_mod is None and mask_mod is None:
        raise CompositionError("from_flex needs a score_mod, a mask_mod, or both")
    parts = []
    if score_mod is not None:
        parts.append(Variant(_flex_leaf(score_mod, "score", _FLEX_SCORE)))
    if mask_mod is not None:
        parts.append(Variant(_flex_leaf(mask_mod, "mask", _FLEX_MASK)))
    return parts[0] if len(parts) == 1 else parts[0] & parts[1]


def _flex_leaf(function: Callable[..., Any], role: str, roles: tuple[str, ...]) -> Leaf:
    source: PythonSource = read_python(function, role)
    names = [p.name for p in source.parameters()][: len(roles)]
    if len(names) < len(roles):
        raise CompositionError(
            f"a FlexAttention {role}_mod takes {len(roles)} parameters, not {len(names)}",
            span=source.span(source.node),
        )
    return Leaf(read_python(function, role, tuple(zip(names, roles, strict=True))))

"""The command line: look at variants, their tiles and their kernels.

scoremod show gemma2.smod
scoremod tiles sliding_window --len 4096 --set window=512
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from . import __version__, ahead, bench, bundle, cache, check, tune, variants
from .analysis.picture import TileMap
from .api import Variant, parse
from .api import load as load_bundle
from .errors import ScoremodError
from .ir.capture import MISSING
from .ir.expr import TRUE
from .ir.show import show as shown
from .plan import Typed, assumed_params, typed

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # generic since click 8.2 only

T = TypeVar("T")

STOCK: dict[str, Variant] = {n: v for n, v in vars(variants).items() if isinstance(v, Variant)}
MAX_TILES = 1 << 30  # of a map: one byte each


# -- mistakes ----------------------------------------------------------------------------------


class Mistake(click.ClickException):
    """A user's mistake: told in a few lines on stderr, exit code 1."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\n  hint: {hint}")

    def show(self, file: Any = None) -> None:
        """Tell it."""
        click.echo(click.style("error: ", fg="red", bold=True) + self.message, err=True)


class Commands(click.Group):
    """A group whose commands show scoremod's errors instead of tracebacks."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except ScoremodError as error:
            raise Mistake(str(error)) from None
        except RecursionError:
            raise Mistake("the variant is nested too deeply") from None


# -- the FILE of a command ---------------------------------------------------------------------


class File(ParamType):
    """A `.smod` file, a bundle, `module:name`, or the name of a stock variant."""

    name = "file"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Read the variant."""
        return value if isinstance(value, Variant) else load(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Stock names, and files."""
        names = [CompletionItem(name) for name in STOCK if name.startswith(incomplete)]
        return names or [CompletionItem(incomplete, type="file")]


def load(file: str) -> Variant:
    """The variant that a FILE argument names."""
    if file == "-":
        return parse(sys.stdin.read(), file="<stdin>")
    if file.endswith(bundle.SUFFIX):
        return load_bundle(file)
    if file.endswith(".smod") or Path(file).is_file():
        return parse(_text(Path(file)), file=file)
    if ":" in file:
        return _from_module(*file.split(":", 1))
    if file in STOCK:
        return STOCK[file]
    close = difflib.get_close_matches(file, [*STOCK, *_smod_files()], 1)
    known = f"give a .smod file, module:name, or one of: {_names(STOCK)}"
    raise Mistake(
        f"there is no file and no stock variant `{file}`",
        f"did you mean {close[0]}?" if close else known,
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _smod_files() -> list[str]:
    return [file.name for file in Path().glob("*.smod")]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        close = difflib.get_close_matches(file.name, _smod_files(), 1)
        raise Mistake(
            f"there is no file {file}", f"did you mean {close[0]}?" if close else None
        ) from None
    except UnicodeDecodeError:
        raise Mistake(f"{file} is not UTF-8 text") from None
    except OSError as error:
        raise Mistake(f"cannot read {file}: {error.strerror}") from None


def _from_module(module: str, name: str) -> Variant:
    """`package.module:attribute`, looked for in the current folder first."""
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except ScoremodError:
        raise
    except Exception as error:
        raise Mistake(f"cannot import `{module}`: {type(error).__name__}: {error}") from None
    finally:
        sys.path.pop(0)
    in_module = [n for n, v in vars(found).items() if isinstance(v, Variant)]
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, Variant):
        return found
    if found is None:
        hint = f"it has {_names(in_module)}" if in_module else "it has no variants"
        raise Mistake(f"`{module}` has no `{name}`", hint)
    raise Mistake(
        f"`{module}:{name}` is no variant, but {type(found).__name__}",
        "decorate the function with @scoremod.variant or @scoremod.mask",
    )


# -- values ------------------------------------------------------------------------------------


class Setting(ParamType):
    """NAME=VALUE: a number, True or False, or an .npy or .pt file."""

    name = "name=value"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """The name and the value."""
        name, equals, text = value.partition("=")
        if not equals or not name or not text:
            self.fail(f"{value!r} is not NAME=VALUE", param, ctx)
        return name.strip(), read_value(text.strip())


def read_value(text: str) -> Any:
    """A number or bool as Python writes it, or the tensor in a file."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    readers: tuple[Callable[[], int | float], ...] = (
        lambda: int(text, 0),
        lambda: int(text),
        lambda: float(text),
    )
    for read in readers:
        with contextlib.suppress(ValueError):
            return read()
    if Path(text).suffix not in (".npy", ".pt", ".pth"):
        raise Mistake(f"{text!r} is no number, and no .npy or .pt file")
    return _tensor(Path(text))


def _tensor(file: Path) -> Any:
    import numpy as np
    import torch

    try:
        if file.suffix == ".npy":
            return torch.from_numpy(np.load(file, allow_pickle=False))
        found = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise Mistake(f"there is no file {file}") from None
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise Mistake(f"cannot read a tensor from {file}: {reason}") from None
    if not isinstance(found, torch.Tensor):
        raise Mistake(f"{file} holds no tensor, but {type(found).__name__}")
    return found


def missing(variant: Variant) -> list[str]:
    """The captures that have no value, as declarations."""
    known = variant._fixed
    return [
        c.declaration
        for c in variant._program.captures
        if c.default is MISSING and c.free is None and c.name not in known
    ]


def demand_values(variant: Variant) -> None:
    """Raise where captures have no value."""
    names = missing(variant)
    if names:
        first = names[0].partition(":")[0]
        value = "FILE.npy" if "[" in names[0] else "VALUE"
        raise Mistake(
            f"`{variant.name}` needs values of {', '.join(names)}", f"add --set {first}={value}"
        )


# -- output ------------------------------------------------------------------------------------


def emit(text: str, lexer: str | None = None) -> None:
    """Print; highlighted on a terminal, plain in a pipe."""
    if lexer is None or not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        click.echo(text)
        return
    from rich.console import Console
    from rich.syntax import Syntax

    Console(soft_wrap=True).print(
        Syntax(text, lexer, background_color="default", theme="ansi_dark")
    )


def emit_json(value: Any) -> None:
    """Print for a machine."""
    click.echo(json.dumps(value, indent=2))


def heading(text: str) -> None:
    """Print a heading."""
    click.secho(text, bold=True)


# -- options -----------------------------------------------------------------------------------

_file = click.argument("variant", metavar="FILE", type=File())
_set = click.option(
    "--set",
    "settings",
    metavar="NAME=VALUE",
    type=Setting(),
    multiple=True,
    help="Value of a capture: a number, True, False, or an .npy or .pt file.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def example(*lines: str) -> str:
    """The end of a help text; click keeps its line breaks."""
    return "\n\n".join(["\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)])


COMPLETION = 'eval "$(_SCOREMOD_COMPLETE=bash_source scoremod)"'


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=example("scoremod show gemma2.smod", "scoremod tiles causal --len 4096", COMPLETION),
)
@click.version_option(__version__, prog_name="scoremod")
def main() -> None:
    """Declare attention variants, see what becomes of them, get their kernels.

    FILE is a .smod file, a bundle (.smk), module:name, the name of a stock variant such as
    `causal`, or - for standard input. Completion: the last line below for bash; zsh_source and
    fish_source for others.
    """


# -- commands ----------------------------------------------------------------------------------


@main.command(epilog=example("scoremod show gemma2.smod", "scoremod show alibi --json"))
@_file
@_set
@_json
def show(variant: Variant, settings: tuple[tuple[str, Any], ...], as_json: bool) -> None:
    """Show a variant: as written, simplified, and what it captures."""
    variant = variant.bind(**dict(settings))
    params = assumed_params(variant._program)
    program = typed(variant._program, params, variant._text())
    assumed = {
        c.name: p.element
        for c, p in zip(variant._program.captures, params, strict=True)
        if c.element is None
    }
    if as_json:
        emit_json(as_data(variant, program, assumed))
        return
    heading(f"variant {variant.name}")
    emit("\n".join(f"  {line}" for line in program.text), "python")
    heading("simplified")
    emit(f"  score  {shown(program.score)}")
    emit("  mask   every pair" if program.mask == TRUE else f"  mask   {shown(program.mask)}")
    heading("captures" if variant.captures else "captures nothing")
    for found in variant._written().captures:
        default = "" if found.default is MISSING else f" = {found.default!r}"
        note = f"   assumed {assumed[found.name]}; a call decides" if found.name in assumed else ""
        emit(f"  {found.declaration}{default}{note}")


def as_data(variant: Variant, program: Typed, assumed: Mapping[str, str]) -> dict[str, Any]:
    """A variant for a machine."""
    captures = [
        {
            "name": c.name,
            "kind": c.kind.value,
            "element": c.element,
            "assumed": assumed.get(c.name),
            "dims": None if c.dims is None else list(c.dims),
            "default": _plain(c.default),
            "declaration": c.declaration,
        }
        for c in variant._written().captures
    ]
    return {
        "name": variant.name,
        "source": "\n".join(program.text),
        "text": str(variant),
        "score": shown(program.score),
        "mask": shown(program.mask),
        "captures": captures,
        "consts": dict(variant._program.consts),
    }


def _plain(default: Any) -> Any:
    """A default as JSON has it: inf is text there."""
    if default is MISSING:
        return None
    return default if math.isfinite(default) else repr(default)


@main.command(epilog=example("scoremod explain alibi"))
@_file
@_set
def explain(variant: Variant, settings: tuple[tuple[str, Any], ...]) -> None:
    """Explain what scoremod decides about a variant, and why."""
    variant = variant.bind(**dict(settings))
    emit(variant.explain())
    names = missing(variant)
    if names:
        emit(f"  no value yet: {', '.join(names)} (--set NAME=VALUE)")


@main.command(
    epilog=example(
        "scoremod tiles sliding_window --len 4096 --set window=512",
        "scoremod tiles document --len 8192 --set doc=doc.npy -o document.png",
    )
)
@_file
@click.option("--len", "q_len", type=click.IntRange(0), required=True, help="Queries.")
@click.option("--kv-len", type=click.IntRange(0), help="Keys; as many as queries if left out.")
@click.option("--b", "b", type=click.IntRange(0), default=0, help="Batch index.")
@click.option("--h", "h", type=click.IntRange(0), default=0, help="Query head.")
@click.option("--q-offset", type=int, default=0, help="Position of the first query.")
@click.option("--block-m", type=click.IntRange(1), default=128, show_default=True)
@click.option("--block-n", type=click.IntRange(1), default=128, show_default=True)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Draw into a file.")
@_set
@_json
def tiles(
    variant: Variant,
    q_len: int,
    kv_len: int | None,
    settings: tuple[tuple[str, Any], ...],
    output: str | None,
    as_json: bool,
    **where: Any,
) -> None:
    """Show which tiles of the score matrix are empty, partial and full."""
    variant = variant.bind(**dict(settings))
    demand_values(variant)
    kv_len = q_len if kv_len is None else kv_len
    total = -(-q_len // where["block_m"]) * -(-kv_len // where["block_n"])
    if total > MAX_TILES:
        raise Mistake(f"that is {total} tiles", "take larger --block-m and --block-n")
    found = variant.tiles(q_len, kv_len, **where)
    if output is not None:
        _plot(found, output)
    if as_json:
        empty, partial, full = found.counts
        counts = {"empty": empty, "partial": partial, "full": full}
        sizes = {"q_len": q_len, "kv_len": kv_len, **where}
        emit_json({**sizes, "counts": counts, "kind": found.kind.tolist()})
    else:
        emit(str(found))


def _plot(found: TileMap, output: str) -> None:
    try:
        found.plot(output)
    except (OSError, ValueError) as error:
        raise Mistake(f"cannot draw into {output}: {error}") from None


@main.command(
    epilog=example(
        "scoremod source alibi --head-dim 128 --dtype bf16 --target cuda:90 --phase fwd",
        "scoremod source document --head-dim 64 --capture doc=i64 > kernel.py",
    )
)
@_file
@click.option("--head-dim", type=int, default=128, show_default=True)
@click.option("--v-head-dim", type=int, help="As --head-dim if left out.")
@click.option("--dtype", default="bf16", show_default=True, help="f16, bf16 or f32.")
@click.option(
    "--target", default="cuda:90", show_default=True, help="cuda:80, cuda:90, hip:gfx942, cpu..."
)
@click.option(
    "--phase", type=click.Choice(["fwd", "bwd", "tiles"]), default="fwd", show_default=True
)
@click.option(
    "--capture",
    "elements",
    metavar="NAME=DTYPE",
    multiple=True,
    help="Element type of a capture that leaves it open.",
)
@_set
def source(
    variant: Variant,
    settings: tuple[tuple[str, Any], ...],
    elements: tuple[str, ...],
    **options: Any,
) -> None:
    """Print the kernel: highlighted on a terminal, plain in a pipe."""
    captures = {name: words[-1] for name, words in _elements(elements).items()}
    variant = variant.bind(**dict(settings))
    emit(variant.source(captures=captures, **options).rstrip("\n"), "python")


def _elements(given: tuple[str, ...]) -> dict[str, list[str]]:
    """NAME=DTYPE of --capture, the words of a name together."""
    found: dict[str, list[str]] = {}
    for element in given:
        name, equals, word = element.partition("=")
        if not equals:
            raise click.BadParameter(f"{element!r} is not NAME=DTYPE", param_hint="--capture")
        found.setdefault(name, []).append(word)
    return found


# -- bundles -----------------------------------------------------------------------------------


Command = Callable[..., Any]


def _several(*names: str, default: Any, words: str, **how: Any) -> Callable[[Command], Command]:
    """An option to be given several times."""
    return click.option(
        *names, multiple=True, default=(default,), show_default=True, help=words, **how
    )


@main.command(
    epilog=example(
        "scoremod build alibi --target cuda:90 --target cuda:80 --head-dim 128 -o alibi.smk",
        "scoremod build document --phase fwd --phase bwd --capture doc=i64 -o document.smk",
    )
)
@_file
@_several("--target", "targets", default="cuda:90", words="cuda:80, hip:gfx942...; or several.")
@_several("--dtype", "dtypes", default="bf16", words="f16, bf16 or f32; or several.")
@_several("--head-dim", "head_dims", default=128, type=int, words="One or several.")
@click.option(
    "--v-head-dim", "v_head_dims", type=int, multiple=True, help="As --head-dim if left out."
)
@_several("--phase", "phases", default="fwd", type=click.Choice(ahead.PHASES), words="One or both.")
@click.option(
    "--capture",
    "elements",
    metavar="NAME=DTYPE",
    multiple=True,
    help="Element type of a capture that leaves it open; a number becomes a 0-d tensor.",
)
@click.option(
    "--also",
    multiple=True,
    type=click.Choice(ahead.ALSO),
    help="What few calls use: lists of blocks, exact precision, gradients with offsets per "
    "sequence, a scale as a tensor.",
)
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False), help="The file to write."
)
@_set
def build(
    variant: Variant,
    settings: tuple[tuple[str, Any], ...],
    elements: tuple[str, ...],
    output: str,
    v_head_dims: tuple[int, ...],
    **wish: Any,
) -> None:
    """Compile a variant's kernels into one file, for machines that cannot compile.

    `scoremod.load` opens it. Needs no GPU.
    """
    variant = variant.bind(**dict(settings))
    wished = ahead.Wish(**wish, v_head_dims=v_head_dims or None, captures=_elements(elements))
    variant._build(output, wished, functools.partial(_followed, what="compiling"))
    found = bundle.read(output)
    kernels = sum("launch" in record for record in found.records)
    targets = ", ".join(found.targets)
    emit(f"{output}: {kernels} kernels for {targets}, {_bytes(len(found.data))}")


@main.command(epilog=example("scoremod inspect alibi.smk", "scoremod inspect alibi.smk --json"))
@click.argument("file", metavar="BUNDLE", type=click.Path())
@_json
def inspect(file: str, as_json: bool) -> None:
    """Show what a bundle holds, its digest checked."""
    found = bundle.read(file)
    if as_json:
        emit_json({"digest": found.digest, "bytes": len(found.data), **found.manifest})
        return
    manifest = found.manifest
    heading(f"variant {manifest['name']}")
    emit("\n".join(f"  {line}" for line in manifest["text"].splitlines()), "python")
    heading("captures" if manifest["captures"] else "captures nothing")
    for declaration in manifest["captures"]:
        emit(f"  {declaration}")
    heading("kernels")
    for line in aligned([_HEAD, *(_row(record) for record in found.records)]):
        emit(f"  {line}")
    versions = f"scoremod {manifest['scoremod']}, Triton {manifest['triton']}"
    emit(f"{_bytes(len(found.data))}, built by {versions}, digest {found.digest[:16]}")


_HEAD = ("target", "kernel", "made for", "captures", "call", "registers", "spills", "shared")


def _row(record: Mapping[str, Any]) -> tuple[str, ...]:
    """A kernel in the table of `inspect`."""
    first = tuple(record[name] for name in ("target", "kernel", "made_for"))
    words = (*first, ", ".join(record["params"]), record["call"])
    if "refused" in record:
        return (*words, f"none: {record['refused']}")
    launch = record["launch"]
    spills, shared = _bytes(launch["spills"]), _bytes(launch["shared"])
    return (*words, str(launch["registers"]), spills, shared)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, their columns below one another; the last cell of a row may be long."""
    widths = [max(len(row[k]) for row in rows if k + 1 < len(row)) for k in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(x.ljust(w) for x, w in zip(row[:-1], widths, strict=False)), row[-1]])
        for row in rows
    ]


# -- other commands ----------------------------------------------------------------------------


@main.command("bench", epilog=example("scoremod bench alibi --len 8192 --json"))
@_file
@bench.options
@click.option("--tune", "tuned", is_flag=True, help="First keep the best Hopper configuration.")
@click.option("--tune-backward", is_flag=True, help="First keep the best of the backward.")
@_set
@_json
def bench_(
    variant: Variant,
    settings: tuple[tuple[str, Any], ...],
    as_json: bool,
    tuned: bool,
    tune_backward: bool,
    **how: Any,
) -> None:
    """Time the variant beside FlexAttention and SDPA on this GPU, interleaved."""
    asked: dict[tune.Phase, bool] = {"fwd": tuned, "bwd": tune_backward}
    for phase in (phase for phase, wanted in asked.items() if wanted):
        found = tune.from_options(variant, dict(settings), how, phase)
        click.echo(str(found), err=as_json)
    result = bench.from_options(variant, dict(settings), how)
    emit(result.json() if as_json else str(result))


@main.command("check", epilog=example("scoremod check alibi", "scoremod check gemma2.smod --json"))
@_file
@click.option(
    "--dtype", "dtypes", multiple=True, help="f16, bf16, f32 or f64; several times for several."
)
@click.option(
    "--backend", "backends", multiple=True, help="cpu or triton; what runs here if left out."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of what is drawn.")
@click.option("--bounds", is_flag=True, help="Also list reads outside tables.")
@_set
@_json
def check_(
    variant: Variant,
    settings: tuple[tuple[str, Any], ...],
    as_json: bool,
    dtypes: tuple[str, ...],
    backends: tuple[str, ...],
    bounds: bool,
    seed: int,
) -> None:
    """Compare the variant with the oracle, forward and backward. Exit code 1 if it is off."""
    wish = check.Wish(check.words_of(dtypes), backends, bounds, seed)
    followed = functools.partial(_followed, what="checking")
    report = check.check(variant, dict(settings), wish, followed)
    emit(report.json() if as_json else str(report))


def _followed(steps: Sequence[T], what: str) -> Iterable[T]:
    """The steps, with a bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(steps, what, console=console, transient=True, disable=not console.is_terminal)


# -- the cache ---------------------------------------------------------------------------------


@main.group("cache", epilog=example("scoremod cache size", "scoremod cache clear"))
def cache_() -> None:
    """The kernels on disk; SCOREMOD_CACHE_DIR names their folder."""


@cache_.command("list", epilog=example("scoremod cache list --json"))
@_json
def cache_list(as_json: bool) -> None:
    """List kernels, those used longest ago first."""
    entries = cache.entries()
    if as_json:
        emit_json([{"key": e.key, "size": e.size, "used": e.used} for e in entries])
        return
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        emit(f"{entry.key[:16]}  {_bytes(entry.size):>9}  {used}")
    emit(f"{len(entries)} kernels, {_bytes(cache.size())}, in {cache.CACHE.folder}")


@cache_.command("size", epilog=example("scoremod cache size"))
@_json
def cache_size(as_json: bool) -> None:
    """Print how much the kernels take."""
    if as_json:
        entries = cache.entries()
        total = sum(e.size for e in entries)
        emit_json({"bytes": total, "limit": cache.CACHE.limit, "entries": len(entries)})
    else:
        emit(f"{_bytes(cache.size())} of {_bytes(cache.CACHE.limit)}")


@cache_.command("clear", epilog=example("scoremod cache clear"))
def cache_clear() -> None:
    """Delete all kernels; they are compiled again when needed."""
    emit(f"{cache.clear()} kernels deleted")


@cache_.command("verify", epilog=example("scoremod cache verify"))
@_json
def cache_verify(as_json: bool) -> None:
    """Check every kernel's digest; damaged ones are deleted. Exit code 1 if there were any."""
    total, damaged = len(cache.entries()), cache.verify()
    if as_json:
        emit_json({"entries": total, "damaged": damaged})
    else:
        for name in damaged:
            emit(f"damaged: {name}")
        emit(f"{total - len(damaged)} of {total} kernels are whole")
    if damaged:
        sys.exit(1)


def _bytes(number: int) -> str:
    """A size for people: 1.5 MB."""
    size = float(number)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"

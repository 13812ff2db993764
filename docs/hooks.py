"""What the site shows of the code itself: the language's tables, stock variants, measured results.

<!-- generated: functions -->   ->   a table of frontend.names.CALLS

MkDocs calls `on_page_markdown` for every page; nothing generated is kept in the repository.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scoremod import variants
from scoremod.errors import ScoremodError
from scoremod.frontend import names, source
from scoremod.ir.capture import ELEMENTS, GENERIC
from scoremod.ir.evaluate import evaluate
from scoremod.ir.expr import Expr, capture, const
from scoremod.ir.ops import OPS, Op, Rule, Type
from scoremod.ir.show import show
from scoremod.passes.simplify import simplify
from scoremod.plan import assumed_params, typed

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put generated parts where a page asks for them."""
    return MARK.sub(lambda found: GENERATED[found[1]](), markdown)


def table(head: str, rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; `head` has one word or more a column, separated by `|`."""
    columns = head.split("|")
    cells = (columns, ["---"] * len(columns), *([_cell(c) for c in row] for row in rows))
    return "\n".join(f"| {' | '.join(c.strip() for c in row)} |" for row in cells)


def _cell(text: str) -> str:
    """A bar ends no cell; in code it does not anyway, and would show its backslash."""
    return re.sub(r"(`[^`]*`)|\|", lambda found: found[1] or "\\|", text)


# -- the language ------------------------------------------------------------------------------

# What each function computes; tests/test_docs.py names those that are missing.
MEANING = {
    "abs": "magnitude",
    "ilog2": "floor of the binary logarithm, exact; 0 for x < 1",
    "float": "the number as a float",
    "int": "truncated towards 0; nan gives 0, what is out of range saturates",
    "bool": "whether it is not 0",
    "floor": "rounded down",
    "ceil": "rounded up",
    "round": "rounded, halves to even",
    "exp": "e ** x",
    "exp2": "2 ** x",
    "expm1": "e ** x - 1",
    "log": "natural logarithm, or to the base given second",
    "log2": "binary logarithm",
    "log10": "decimal logarithm",
    "log1p": "log(1 + x)",
    "sqrt": "square root",
    "rsqrt": "1 / sqrt(x)",
    "tanh": "hyperbolic tangent",
    "sigmoid": "1 / (1 + exp(-x))",
    "softplus": "log(1 + exp(x))",
    "erf": "error function",
    "sin": "sine",
    "cos": "cosine",
    "where": "the second where the first is true, else the third",
    "min": "the least",
    "max": "the greatest",
    "minimum": "the lesser of two",
    "maximum": "the greater of two",
    "clamp": "min(max(x, low), high); one of the two may be left out by keyword",
    "pow": "x ** y",
    "silu": "x * sigmoid(x)",
    "relu": "max(x, 0)",
    "isfinite": "neither infinite nor nan",
    "isinf": "infinite",
    "isnan": "nan",
    "xor": "exactly one of two bools",
    "logical_and": "both",
    "logical_or": "one or both",
    "logical_not": "the other bool",
}
RULES = {
    Rule.ARITH: "as the operands: bool to int to float",
    Rule.FLOAT: "float",
    Rule.POW: "int for ints and a literal exponent >= 0, else float",
    Rule.BITS: "int; bool for bools",
    Rule.INTEGER: "int, of ints",
    Rule.COMPARE: "bool",
    Rule.LOGIC: "bool, of bools",
}


def functions() -> str:
    """Every function of the language: arguments, type and meaning."""
    rows = [[f"`{n}`", _count(c), gives(n, c), MEANING[n]] for n, c in _calls()]
    return table("function | arguments | gives | meaning", rows)


def _count(call: names.Call) -> str:
    """How many arguments: `2 to 3`."""
    return names._arguments(call).removesuffix("s").removesuffix(" argument")


def _calls() -> Iterator[tuple[str, names.Call]]:
    return iter(sorted(names.CALLS.items()))


def gives(name: str, call: names.Call) -> str:
    """The type of a call, asked of the type rules themselves."""
    found = {t: _type_of(name, call, t) for t in (Type.BOOL, Type.INT, Type.FLOAT)}
    known = {t for t in found.values() if t is not None}
    if len(known) > 1:
        return "as its arguments"
    (only,) = known
    takes = [t.value for t, result in found.items() if result is not None]
    return only.value if len(takes) == 3 else f"{only.value}, of {' and '.join(takes)}"


def _type_of(name: str, call: names.Call, type_: Type) -> Type | None:
    args: list[Expr] = [capture(f"x{k}", type_) for k in range(max(call.least, 1))]
    if name == "where":
        args[0] = const(True)
    try:
        return names.call(name, args, None).type
    except ScoremodError:
        return None


def operators() -> str:
    """Every operator with its type rule."""
    symbols = {**names.BINARY, **names.PREFIX, **names.COMPARE, "and": Op.AND, "or": Op.OR}
    rules: dict[Rule, list[str]] = {}
    for symbol, op in symbols.items():
        rules.setdefault(OPS[op].rule, []).append(f"`{symbol}`")
    rules[Rule.COMPARE] += [f"`{symbol}`" for symbol in names.SWAPPED]
    rows = [[" ".join(dict.fromkeys(found)), RULES[rule]] for rule, found in rules.items()]
    return table("operators | give", rows)


def reserved() -> str:
    """The names that mean something in every variant."""
    return table("name | meaning", [[f"`{n}`", words] for n, words in names.RESERVED.items()])


def constants() -> str:
    """Numbers with a name."""
    return ", ".join(f"`{name}`" for name in names.CONSTANTS)


def elements() -> str:
    """The element types of a declared tensor."""
    words = ", ".join(f"`{word}`" for word in ELEMENTS if word not in GENERIC)
    return f"`tensor` (any element type), {words}"


def bounds() -> str:
    """How large a variant may be."""
    rows = (
        ["steps of constant loops", names.MAX_LOOP],
        ["operations of a score or mask when written out", names.MAX_TERMS],
        ["magnitude of a captured int", f"2**{names.MAX_INT.bit_length() - 1}"],
        ["characters of mini-language text", source.MAX_TEXT],
        ["names, numbers and signs of it", source.MAX_WORDS],
        ["brackets inside brackets", source.MAX_NESTING],
    )
    return table("what | at most", [[what, str(most)] for what, most in rows])


# -- stock variants ----------------------------------------------------------------------------

LENGTH, TILE = 96, 4  # of the pictures
_PLACES = torch.arange(LENGTH)
_DOC = torch.bucketize(_PLACES, torch.tensor([19, 50, 70]))[None]
# An answer or document begins where its number changes.
_STARTS = torch.tensor([0, 20, 51, 71, LENGTH])
# A prompt of 32 tokens, and two branches of 32 that part there.
_ENTER = _PLACES[None]
_LEAVE = torch.where(_PLACES < 32, LENGTH, torch.where(_PLACES < 64, 64, LENGTH))[None]
_FLASH = torch.stack(
    [(_PLACES + 24).clamp(max=LENGTH), torch.full_like(_PLACES, LENGTH), 0 * _PLACES, _PLACES], -1
)
_NODES = torch.arange(64)

# Captures of each picture, where the defaults would show nothing at this length.
PICTURES: dict[str, dict[str, Any]] = {
    "sliding_window": {"window": 24},
    "symmetric_window": {"radius": 12},
    "asymmetric_window": {"left": 20, "right": 8},
    "prefix_lm": {"prefix": torch.tensor([30])},
    "chunked": {"chunk": 32},
    "block_causal": {"block": 16},
    "sink_window": {"sinks": 6, "window": 24},
    "a_shape": {"sinks": 6, "window": 16, "last": 12},
    "dilated": {"dilation": torch.tensor([8]), "window": 64},
    "strided_sparse": {"stride": 12},
    "neighborhood_1d": {"length": LENGTH, "kernel": 24},
    "neighborhood_2d": {"height": 8, "width": 12, "kernel_h": 3, "kernel_w": 5},
    "neighborhood_3d": {"depth": 3, "height": 4, "width": 8, "kernel_d": 1, "kernel_h": 3,
                        "kernel_w": 3},
    "sliding_tile": {"tile": 4, "tiles_t": 1, "tiles_h": 4, "tiles_w": 5},
    "block_diffusion": {"length": LENGTH // 2, "block": 8},
    "key_padding": {"keep": (_PLACES < 70)[None]},
    "document": {"doc": _DOC},
    "jagged": {"start": _STARTS[_DOC], "end": _STARTS[_DOC + 1]},
    "shared_prompt": {"prompt": torch.tensor([20]), "answer": _DOC},
    "flashmask_intervals": {"rows": _FLASH[None, None]},
    "tree": {"enter": _ENTER, "leave": _LEAVE},
    "tree_table": {"prefix": torch.tensor([32]),
                   "ancestor": (_NODES[:, None] % 2 == _NODES % 2)[None].tril()},
    "alibi": {"slopes": torch.tensor([0.1])},
    "symmetric_alibi": {"slopes": torch.tensor([0.1])},
    "relative_bias": {"table": torch.cos(torch.arange(33) / 5)[None], "max_distance": 16},
    "t5_bias": {"table": torch.linspace(1, -1, 32)[:, None]},
    "dense_bias": {"bias": torch.cos(_PLACES[:, None] * _PLACES / 500)[None, None]},
    "graph_bias": {"dist": (_PLACES[:, None] // 12 - _PLACES // 12).abs()[None],
                   "table": torch.linspace(1, -1, 9)[:, None]},
    "forget_gate": {"log_decay": -(_PLACES**2 / 1000.0)[None, None]},
    "time_decay": {"rate": torch.tensor([1.0]), "time": (_PLACES**2 / 1000.0)[None]},
    "temperature": {"floor_scale": 12, "strength": 0.5},
}  # fmt: skip
HEADS = re.compile(r"^# -{2,} (?P<title>[^-].*?) -*$", re.MULTILINE)


def stock() -> str:
    """Every stock variant with its picture, formula and source, in the order of the file."""
    text = Path(variants.__file__).read_text(encoding="utf-8")
    titles = {text[: m.start()].count("\n"): m["title"] for m in HEADS.finditer(text)}
    parts: list[str] = []
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef) or not node.decorator_list:
            continue
        for line in [line for line in titles if line < node.lineno]:
            parts.append(f"## {titles.pop(line).capitalize()}")
        parts.append(entry(node, text))
    return "\n\n".join(parts)


def entry(node: ast.FunctionDef, text: str) -> str:
    """One variant."""
    variant = getattr(variants, node.name)
    doc = ast.get_docstring(node) or ""
    lines = text.splitlines()[node.decorator_list[0].lineno - 1 : node.end_lineno]
    said = node.body[0]
    start = node.decorator_list[0].lineno
    body = lines[: said.lineno - start] + lines[(said.end_lineno or 0) - start + 1 :]
    code = "\n".join(body)
    return "\n\n".join(
        (f"### {node.name}", doc, picture(variant), formula(variant), f"```py\n{code}\n```")
    )


def formula(variant: Any) -> str:
    """What the compiler makes of it, where that fits on a line or two."""
    program = variant._program
    which = "mask" if is_mask(program) else "score"
    said = show(simplify(getattr(program, which)))
    return f"`{which}  {said}`" if len(said) < 200 else "*(too long to show simplified)*"


def is_mask(program: Any) -> bool:
    """Whether the score stays as it is."""
    return bool(program.score.op is Op.INDEX)


def picture(variant: Any) -> str:
    """Tiles of a mask, or how a score changes from pair to pair."""
    given = PICTURES.get(variant.name, {})
    program = variant._program
    if is_mask(program):
        tiles = variant.tiles(LENGTH, LENGTH, block_m=TILE, block_n=TILE, **given)
        return svg(np.asarray(tiles.kind), ("", "partial", "full"), f"tiles of {variant.name}")
    if not {"i", "j"} & program.score.names:
        return "*(the same for all pairs of positions)*"
    at = np.arange(0, LENGTH, TILE)
    score = typed(program, assumed_params(program), variant._text()).score
    values = {c.name: c.default for c in program.captures}
    values |= {"i": at[:, None], "j": at, "b": 0, "h": 0, "s": float(variant.name == "temperature")}
    values |= {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    found = np.broadcast_to(evaluate(score, values), (len(at), len(at)))
    span = found.max() - found.min()
    levels = np.rint((found - found.min()) / span * (len(SHADES) - 1)).astype(int)
    return svg(levels, SHADES, f"{variant.name}: the darker, the higher the score")


SHADES = tuple(f"shade{k}" for k in range(8))


def svg(kinds: np.ndarray[Any, Any], classes: Sequence[str], title: str) -> str:
    """A grid of small squares, one rectangle for each run of equal ones in a row."""
    rows, columns = kinds.shape
    parts = []
    for y, row in enumerate(kinds):
        ends = [*np.flatnonzero(np.diff(row)) + 1, columns]
        for start, end in zip([0, *ends], ends, strict=False):
            if name := classes[row[start]]:
                rect = f'class="{name}" x="{start}" y="{y}" width="{end - start}" height="1"'
                parts.append(f"<rect {rect}/>")
    return (
        f'<div class="picture"><svg viewBox="0 0 {columns} {rows}" role="img" '
        f'aria-label="{title}"><title>{title}</title>{"".join(parts)}</svg></div>'
    )


# -- measured ----------------------------------------------------------------------------------


def _results(name: str) -> Callable[[], str]:
    """A file of benchmarks/results as it is, one heading lower."""

    def read() -> str:
        text = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
        return re.sub("^#", "##", text, flags=re.MULTILINE).rstrip()

    return read


GENERATED: dict[str, Callable[[], str]] = {
    "functions": functions,
    "operators": operators,
    "reserved": reserved,
    "constants": constants,
    "elements": elements,
    "bounds": bounds,
    "variants": stock,
    "forward": _results("forward_h200"),
    "backward": _results("backward_h200"),
    "hopper": _results("hopper_h200"),
    "hopper_dims": _results("hopper_dims_h200"),
    "hopper_backward": _results("hopper_backward_h200"),
    "hopper_backward_wide": _results("hopper_backward_wide_h200"),
    "hopper_deterministic": _results("hopper_deterministic_h200"),
}

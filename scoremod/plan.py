"""Every decision about a kernel, as data; a template only writes a plan down."""

from __future__ import annotations

import ast
import builtins
import functools
import keyword
import re
from dataclasses import dataclass, replace

from .analysis.ranges import solve
from .ir.capture import ELEMENTS, Kind
from .ir.expr import TRUE, Expr, require_bool, resolve
from .ir.ops import Type
from .passes.assume import assume
from .passes.simplify import simplify
from .resources import path
from .variant import Program, S, rename_captures

# What every device function takes before the captures, in this order.
INDICES = ("s", "b", "h", "hk", "i", "j", "q_len", "kv_len")


@dataclass(frozen=True)
class Param:
    """A captured value as a kernel argument."""

    name: str
    kind: Kind
    element: str  # a word of ELEMENTS: the storage of a table or 0-d tensor
    rank: int = 0
    by_value: bool = True  # a scalar that is passed itself, not by a pointer to it
    as_float: bool = False  # ints in memory, declared as float

    @property
    def type(self) -> Type:
        return Type.FLOAT if self.as_float else ELEMENTS[self.element]


@dataclass(frozen=True)
class DeviceFunction:
    """The user's score or mask as a function of its own, called by the kernel."""

    name: str
    params: tuple[Param, ...]
    body: tuple[Expr, ...]  # what it returns: one value, or several
    doc: str


@dataclass(frozen=True)
class Typed:
    """A program with every type known: what backends start from.

    It is simplified when a kernel is made from it, and not where a stored kernel is found.
    """

    name: str
    params: tuple[Param, ...]
    given_score: Expr
    given_mask: Expr
    text: tuple[str, ...]

    @functools.cached_property
    def score(self) -> Expr:
        """The simplified score."""
        return simplify(self.given_score)

    @functools.cached_property
    def mask(self) -> Expr:
        """The simplified mask."""
        return simplify(self.given_mask)

    @functools.cached_property
    def half_lines(self) -> bool:
        """Whether ranges of keys alone say which pairs attend.

        Of the mask as given, so that a stored kernel is found without simplifying.
        """
        return all(piece.is_pure for piece in solve(self.given_mask, "j"))

    @functools.cached_property
    def one_range(self) -> bool:
        """Whether the keys that a query sees are one range, known exactly."""
        pieces = solve(self.given_mask, "j")
        return len(pieces) == 1 and pieces[0].is_pure

    @functools.cached_property
    def canonical(self) -> tuple[object, ...]:
        """What decides the kernel: equal for programs that differ in names or formatting only."""
        names = {p.name: f"c{k}" for k, p in enumerate(self.params)}
        exprs = (rename_captures(e, names) for e in (self.given_score, self.given_mask))
        params = tuple((p.kind.value, p.element, p.rank, p.by_value) for p in self.params)
        return (*(e.digest for e in exprs), params)

    @property
    def score_function(self) -> DeviceFunction | None:
        """The score, unless it is s itself."""
        if self.score == S:
            return None
        return DeviceFunction(
            f"{self.name}_score", self.params, (self.score,), "The score of a pair."
        )

    @property
    def mask_function(self) -> DeviceFunction | None:
        """The mask, unless every pair attends."""
        if self.mask == TRUE:
            return None
        return DeviceFunction(
            f"{self.name}_mask", self.params, (self.mask,), "Whether a pair attends."
        )


def typed(program: Program, params: tuple[Param, ...], text: tuple[str, ...] = ()) -> Typed:
    """Give captures their types."""
    types = {p.name: p.type for p in params}
    score, mask = resolve(program.score, types), resolve(program.mask, types)
    require_bool(mask, "a mask", mask.span)
    return Typed(program.name, params, score, mask, text)


# -- names in kernels --------------------------------------------------------------------------

# Names that a kernel derives: of a table's sizes, of the user's functions, of shared values.
_DERIVED = re.compile(r".*_(size|stride)_\d+|.*_(score|mask|keys_\d+)|t\d+")


@functools.cache
def names_in_templates(*folders: str) -> frozenset[str]:
    """The names that the templates and shared steps of a backend use themselves."""
    found = {*keyword.kwlist, *dir(builtins), *INDICES}
    files = [file for folder in folders for file in path(f"templates/{folder}").iterdir()]
    for file in sorted(f for f in files if f.suffix in (".py", ".jinja")):
        code = file.read_text(encoding="utf-8")
        code = re.sub(r"^\s*#[%#].*$", "", re.sub(r"{{.*?}}", "x", code), flags=re.MULTILINE)
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.FunctionDef):
                found.add(node.name)
    return frozenset(found)


def with_kernel_names(program: Typed, *folders: str) -> Typed:
    """The program with captures renamed that are called like something in the kernel."""
    taken = names_in_templates(*folders)
    names = {p.name: p.name for p in program.params}
    for name in names:
        while names[name] in taken or _DERIVED.fullmatch(names[name]):
            names[name] += "_"
            if names[name] in names:
                names[name] += "capture_"
    if all(name == new for name, new in names.items()):
        return program
    return replace(
        program,
        given_score=rename_captures(program.given_score, names),
        given_mask=rename_captures(program.given_mask, names),
        params=tuple(replace(p, name=names[p.name]) for p in program.params),
    )


def assumed_params(program: Program, given: dict[str, str] | None = None) -> tuple[Param, ...]:
    """The parameters where no call decides: declared, given, or assumed from their use."""
    given = given or {}
    guesses = assume((program.score, program.mask))
    params = []
    for found in program.captures:
        element = given.get(found.name) or found.element or guesses.get(found.name, "f32")
        if found.kind is Kind.TENSOR:
            element = _STORED_AS.get(element, element)
        rank = len(found.dims) if found.dims is not None else found.rank
        params.append(Param(found.name, found.kind, element, rank))
    return tuple(params)


# What a table declared as `int[...]` or `float[...]` is assumed to hold.
_STORED_AS = {"int": "i32", "float": "f32"}


def assumptions(
    program: Program, params: tuple[Param, ...], given: dict[str, str]
) -> tuple[str, ...]:
    """What was assumed of captures whose type a call decides, one line each."""
    open_ = [
        c.name
        for c in program.captures
        if (c.element is None or (c.kind is Kind.TENSOR and c.element in _STORED_AS))
        and c.name not in given
    ]
    return tuple(f"assumed: {p.name} holds {p.element}" for p in params if p.name in open_)


@dataclass(frozen=True)
class CpuPlan:
    """The tiled PyTorch program of the CPU backend."""

    title: str
    comments: tuple[str, ...]
    functions: tuple[DeviceFunction, ...]
    score: DeviceFunction | None
    mask: DeviceFunction | None
    params: tuple[Param, ...]
    float_type: str  # torch.float32, or torch.float64 for float64 inputs
    has_kv_lens: bool

    @property
    def masked(self) -> bool:
        """Whether a tile may hold a pair that does not attend."""
        return self.mask is not None or self.has_kv_lens


def cpu_plan(program: Typed, *, float64: bool, has_kv_lens: bool) -> CpuPlan:
    """Decide the CPU program."""
    program = with_kernel_names(program, "cpu")
    score, mask = program.score_function, program.mask_function
    return CpuPlan(
        title=f"Attention forward for `{program.name}` on the CPU: tiled PyTorch",
        comments=program.text,
        functions=tuple(f for f in (score, mask) if f is not None),
        score=score,
        mask=mask,
        params=program.params,
        float_type="torch.float64" if float64 else "torch.float32",
        has_kv_lens=has_kv_lens,
    )

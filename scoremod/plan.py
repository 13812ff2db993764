"""Every decision about a kernel, as data; a template only writes a plan down."""

from __future__ import annotations

import ast
import builtins
import functools
import keyword
import re
from dataclasses import dataclass, replace

from .analysis.documents import within_documents
from .analysis.linear import slope
from .analysis.ranges import solve
from .ir.capture import ELEMENTS, Kind
from .ir.expr import TRUE, ZERO, Expr, postorder, require_bool, resolve
from .ir.ops import Op, Type
from .passes.assume import assume
from .passes.derivative import d_dread, d_ds, reads
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

    @property
    def propagates_nan(self) -> bool:
        """Whether it names that: minima and maxima of floats give nan for nan."""
        return any(
            n.op is Op.SOFTPLUS or (n.op in (Op.MIN, Op.MAX) and n.type is Type.FLOAT)
            for n in postorder(*self.body)
        )


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
    bundle: str = ""  # the digest of the bundle that its kernels come from; "": compiled

    @functools.cached_property
    def score(self) -> Expr:
        """The simplified score."""
        return simplify(self.given_score)

    @functools.cached_property
    def mask(self) -> Expr:
        """The simplified mask."""
        return simplify(self.given_mask)

    @property
    def has_mask(self) -> bool:
        """Whether some pair may not attend; of the mask as given, as what follows."""
        return self.given_mask != TRUE

    @property
    def has_score(self) -> bool:
        """Whether scores are changed; of the score as given, too."""
        return self.given_score != S

    @functools.cached_property
    def half_lines(self) -> bool:
        """Whether ranges of keys alone say which pairs attend.

        Of the mask as given, so that a stored kernel is found without simplifying.
        """
        return all(piece.is_pure for piece in solve(self.given_mask, "j"))

    @functools.cached_property
    def query_half_lines(self) -> bool:
        """The same of ranges of queries, for a walk over the queries of a key."""
        return all(piece.is_pure for piece in solve(self.given_mask, "i"))

    @functools.cached_property
    def one_range(self) -> bool:
        """Whether the keys that a query sees are one range, known exactly."""
        pieces = solve(self.given_mask, "j")
        return len(pieces) == 1 and pieces[0].is_pure

    @functools.cached_property
    def one_query_range(self) -> bool:
        """The same of the queries that see a key."""
        pieces = solve(self.given_mask, "i")
        return len(pieces) == 1 and pieces[0].is_pure

    @functools.cached_property
    def within_documents(self) -> Expr:
        """The mask without what keeps tokens within their document; the mask itself mostly."""
        return within_documents(self.given_mask)

    @functools.cached_property
    def sees_many_keys(self) -> bool:
        """Whether most rows see many keys, none of which the variant weighs more than others.

        Of packed documents, where those of a document that stood alone would. Elsewhere what
        rounding takes from the output shows in the gradients of scores.
        """
        if self.has_score or self.within_documents == TRUE:
            return not self.has_score
        pieces = solve(self.within_documents, "j")
        if len(pieces) != 1 or not pieces[0].is_pure or pieces[0].guards:
            return False
        # As of a causal mask: an end on one side, which moves with the query.
        los, his = pieces[0].los, pieces[0].his
        return not (los and his) and all(slope(bound, "i") == 1 for bound in (*los, *his))

    @functools.cached_property
    def canonical(self) -> tuple[object, ...]:
        """What decides the kernel: equal for programs that differ in names or formatting only."""
        names = {p.name: f"c{k}" for k, p in enumerate(self.params)}
        exprs = (rename_captures(e, names) for e in (self.given_score, self.given_mask))
        params = tuple((p.kind.value, p.element, p.rank, p.by_value) for p in self.params)
        return (*(e.digest for e in exprs), params)

    @functools.cached_property
    def only_mask(self) -> Typed:
        """The mask with what it captures: all that a tile structure depends on."""
        params = tuple(p for p in self.params if p.name in self.given_mask.names)
        return Typed(self.name, params, S, self.given_mask, self.text, self.bundle)

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


def typed(
    program: Program, params: tuple[Param, ...], text: tuple[str, ...] = (), bundle: str = ""
) -> Typed:
    """Give captures their types."""
    types = {p.name: p.type for p in params}
    score, mask = resolve(program.score, types), resolve(program.mask, types)
    require_bool(mask, "a mask", mask.span)
    return Typed(program.name, params, score, mask, text, bundle)


# -- names in kernels --------------------------------------------------------------------------

# Names that a kernel derives: of a table's sizes, of the user's functions, of shared values.
_DERIVED = re.compile(
    r".*_(size|stride|keys|queries|place|slope)_\d+|.*_(score|dscore|mask|tile|slope|grad)|t\d+"
    r"|(slope|sum|grad)_\d+|(lo|hi|(full_)?(first|end)|(partial|full)_(shift|count))_\d+"
    r"|[ij]\d*_(lo|hi)|.*_[ij]\d+|(row|column)_\d+"
)


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
    has_blocks: bool = False  # the user lists blocks that may be visited

    @property
    def masked(self) -> bool:
        """Whether a tile may hold a pair that does not attend."""
        return self.mask is not None or self.has_kv_lens or self.has_blocks


def cpu_plan(
    program: Typed, *, float64: bool, has_kv_lens: bool, has_blocks: bool = False
) -> CpuPlan:
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
        has_blocks=has_blocks,
    )


# -- the CPU backend's backward ----------------------------------------------------------------


@dataclass(frozen=True)
class ReadSlope:
    """How the score changes with one captured float that it reads."""

    table: str  # the capture's name
    is_scalar: bool
    slope: DeviceFunction  # gives the slope; of a table's element, its indices as well

    @property
    def gradient(self) -> str:
        """What the gradient of the capture is called."""
        return _gradient_name(self.table)


def _gradient_name(capture: str) -> str:
    return f"{capture}_grad"


@dataclass(frozen=True)
class CpuBackwardPlan:
    """The tiled PyTorch program of the CPU backend's backward."""

    title: str
    comments: tuple[str, ...]
    functions: tuple[DeviceFunction, ...]
    score: DeviceFunction | None
    mask: DeviceFunction | None
    slope: DeviceFunction | None  # of the score by s; None where it is s
    reads: tuple[ReadSlope, ...]
    gradients: tuple[Param, ...]  # of captures, as arguments
    params: tuple[Param, ...]
    float_type: str
    has_kv_lens: bool
    has_blocks: bool
    wants_q: bool
    wants_k: bool
    wants_v: bool

    @property
    def wants_q_or_k(self) -> bool:
        """Whether the gradient of raw scores is needed."""
        return self.wants_q or self.wants_k

    @property
    def wants_scores(self) -> bool:
        """Whether the gradient of scores is needed."""
        return self.wants_q_or_k or bool(self.reads)


def cpu_backward_plan(
    program: Typed,
    *,
    float64: bool,
    has_kv_lens: bool,
    wanted: tuple[bool, ...],
    has_blocks: bool = False,
) -> CpuBackwardPlan:
    """Decide the CPU backward; `wanted` says it of q, k, v and each capture."""
    program = with_kernel_names(program, "cpu")
    wants_q, wants_k, wants_v, *captured = wanted
    params = tuple(p for p, wants in zip(program.params, captured, strict=True) if wants)
    score, mask = program.score_function, program.mask_function
    by_s = slope_function(program) if score and (wants_q or wants_k) else None
    by_read = read_slopes(program, frozenset(p.name for p in params))
    functions = (score, mask, by_s, *(read.slope for read in by_read))
    return CpuBackwardPlan(
        title=f"Attention backward for `{program.name}` on the CPU: tiled PyTorch",
        comments=program.text,
        functions=tuple(f for f in functions if f is not None),
        score=score,
        mask=mask,
        slope=by_s,
        reads=by_read,
        gradients=tuple(replace(p, name=_gradient_name(p.name)) for p in params),
        params=program.params,
        float_type="torch.float64" if float64 else "torch.float32",
        has_kv_lens=has_kv_lens,
        has_blocks=has_blocks,
        wants_q=wants_q,
        wants_k=wants_k,
        wants_v=wants_v,
    )


def slope_function(program: Typed) -> DeviceFunction:
    """The derivative of the score by s; differentiated as given, simplified after."""
    return DeviceFunction(
        f"{program.name}_slope",
        program.params,
        (d_ds(program.given_score),),
        "The slope of the score by s.",
    )


def read_slopes(program: Typed, names: frozenset[str]) -> tuple[ReadSlope, ...]:
    """The derivatives of the score by each read of the named captures."""
    nodes = [node for node in reads(program.given_score) if node.attr in names]
    slopes = [(node, d_dread(program.given_score, node)) for node in nodes]
    # What only decides a condition or an index has slope 0.
    moving = [(node, slope) for node, slope in slopes if slope != ZERO]
    return tuple(_read_slope(program, *found, k) for k, found in enumerate(moving))


def _read_slope(program: Typed, node: Expr, slope: Expr, number: int) -> ReadSlope:
    is_scalar = node.op is Op.CAPTURE
    doc = "The slope of the score by a captured number."
    if not is_scalar:
        doc = f"The slope of the score by an element of {node.attr}, and its indices."
    indices = tuple(simplify(x) for x in node.args)
    name = f"{program.name}_{node.attr}_slope_{number}"
    function = DeviceFunction(name, program.params, (slope, *indices), doc)
    return ReadSlope(node.attr, is_scalar, function)

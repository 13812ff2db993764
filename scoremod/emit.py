"""Expr -> the body of a device function, in a backend's spelling.

    s - slopes[h] * (i - j)   ->   return s - load_1d(slopes, h) * (i - j).to(tl.float32)

Operations that several others use get a name, so that each is computed once; so do those that are
nested too deeply to be read, by people or by Python, which knows 200 brackets inside brackets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .ir.expr import Expr, postorder
from .ir.ops import Op
from .ir.show import ATOM, COMPARE

MAX_DEPTH = 40  # operations in operations of one line; each has three brackets at most

# A text with how tightly its outermost operator binds.
Text = tuple[str, int]


@dataclass(frozen=True)
class Infix:
    """`left symbol right`; `symbol` binds as Python's operator of that level does."""

    symbol: str
    binding: int

    def __call__(self, node: Expr, args: Sequence[Text]) -> Text:
        left, right = args
        # Comparisons would chain, everything else groups to the left.
        outer = self.binding + (self.binding == COMPARE)
        text = f"{wrap(left, outer)} {self.symbol} {wrap(right, self.binding + 1)}"
        return text, self.binding


@dataclass(frozen=True)
class Prefix:
    """`symbol operand`."""

    symbol: str
    binding: int

    def __call__(self, node: Expr, args: Sequence[Text]) -> Text:
        return self.symbol + wrap(args[0], self.binding), self.binding


@dataclass(frozen=True)
class Call:
    """`function(operands)`."""

    function: str

    def __call__(self, node: Expr, args: Sequence[Text]) -> Text:
        return f"{self.function}({', '.join(text for text, _ in args)})", ATOM


Spell = Callable[[Expr, Sequence[Text]], Text]
Spelling = Mapping[Op, Spell]


def wrap(text: Text, binding: int) -> str:
    """The text, in parentheses where an operator of this binding would tear it apart."""
    return text[0] if text[1] >= binding else f"({text[0]})"


def emit(roots: Sequence[Expr], spelling: Spelling, prefix: str = "t") -> list[str]:
    """The lines of a function body that returns the roots."""
    shared = _shared(roots)
    lines: list[str] = []
    texts: dict[bytes, Text] = {}
    depths: dict[bytes, int] = {}
    for node in postorder(*roots):
        if node.digest in texts:
            continue
        text = spelling[node.op](node, [texts[a.digest] for a in node.args])
        depth = 1 + max((depths[a.digest] for a in node.args), default=0)
        if node.digest in shared or depth > MAX_DEPTH:
            depth = 0
            name = f"{prefix}{len(lines)}"
            lines.append(f"{name} = {text[0]}")
            text = (name, ATOM)
        texts[node.digest], depths[node.digest] = text, depth
    return [*lines, f"return {', '.join(texts[r.digest][0] for r in roots)}"]


def _shared(roots: Sequence[Expr]) -> set[bytes]:
    """Operations with more than one user; leaves are cheap enough to repeat."""
    uses: Counter[bytes] = Counter()
    seen: set[bytes] = set()
    for node in postorder(*roots):
        if node.digest not in seen:
            seen.add(node.digest)
            uses.update(a.digest for a in node.args if a.args)
    return {digest for digest, count in uses.items() if count > 1}

"""Float sums and products in their shortest form, by SymPy.

    s * a + s * b - 0.5 * s   ->   s * (a + b - 0.5)

SymPy sees a polynomial: what is not a sum, product or quotient is a symbol, and 1 / x is a symbol
of its own. A polynomial that still holds a symbol is not finite where the symbol is not, so no
non-finite value is lost unless a symbol disappears; that is allowed where it is proved finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..analysis.interval import Bounds
from ..ir.expr import ONE, Expr, const, make
from ..ir.ops import Op, Type

Polynomial = Any  # a SymPy expression; SymPy has no types

MAX_NODES, MAX_MONOMIALS, MAX_POWER = 48, 24, 4

REGION = frozenset((Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.NEG, Op.POW))


def in_region(node: Expr) -> bool:
    """Whether SymPy sees through the node."""
    if node.type is not Type.FLOAT or node.op not in REGION:
        return False
    return node.op is not Op.POW or _power(node) is not None


def _power(node: Expr) -> int | None:
    exponent = node.args[1]
    whole = exponent.is_const and exponent.attr in range(2, MAX_POWER + 1)
    return int(exponent.attr) if whole else None


def _inner(node: Expr) -> tuple[Expr, ...]:
    """The operands that belong to the polynomial; a divisor is a symbol, or a number."""
    return node.args[:1] if node.op in (Op.DIV, Op.POW) else node.args


def region(root: Expr) -> list[Expr]:
    """The sums and products below `root`, operands first, each once."""
    nodes: dict[Expr, None] = {}
    stack = [(root, False)]
    while stack and len(nodes) <= MAX_NODES:
        node, ready = stack.pop()
        if ready:
            nodes.setdefault(node)
        elif node not in nodes and in_region(node):
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(_inner(node)))
    return list(nodes)


def _monomials(nodes: list[Expr]) -> int:
    """A bound on the terms of the expanded polynomial."""
    count: dict[Expr, int] = {}
    for node in nodes:
        count[node] = _count(node, [count.get(a, 1) for a in _inner(node)])
    return max(count.values())


def _count(node: Expr, own: list[int]) -> int:
    if node.op is Op.POW:
        return int(own[0] ** (_power(node) or 1))
    return own[0] * own[1] if node.op is Op.MUL else sum(own)


def _is_worth_it(nodes: list[Expr]) -> bool:
    """Something must occur twice, or there must be two numbers to combine."""
    symbols, numbers = [], 0
    for node in nodes:
        for arg in node.args:
            numbers += arg.is_const and node.op is not Op.POW
            if not arg.is_const and arg not in nodes:
                symbols.append(arg)
    shared = sum(len(node.args) for node in nodes) - len(symbols) - numbers >= len(nodes)
    return numbers > 1 or shared or len(set(symbols)) < len(symbols)


def shorter_polynomial(root: Expr, bounds: Bounds, finite: bool = False) -> Expr:
    """The root of a region, or an equal polynomial with fewer operations.

    `finite`: no value is infinite and no divisor 0, so that any symbol may disappear.
    """
    nodes = region(root)
    small = 1 < len(nodes) <= MAX_NODES
    if not small or not _is_worth_it(nodes) or _monomials(nodes) > MAX_MONOMIALS:
        return root
    names = _Symbols(finite)
    polynomial = names.read(nodes)
    if not finite and not names.may_lose(polynomial, bounds):
        return root
    candidates = [names.write(form) for form in _forms(polynomial, names)]
    shorter = [c for c in candidates if c is not None and len(region(c)) < len(nodes)]
    return min(shorter, key=lambda c: len(region(c)), default=root)


def _forms(polynomial: Polynomial, names: _Symbols) -> Iterator[Polynomial]:
    import sympy

    yield polynomial
    for symbol in sorted(polynomial.free_symbols, key=names.order):
        yield sympy.collect(polynomial, symbol)
    yield sympy.factor_terms(polynomial)
    yield sympy.factor(polynomial)


class _Symbols:
    """SymPy's names for the expressions that it cannot see into."""

    def __init__(self, finite: bool) -> None:
        self.finite = finite
        self.symbol: dict[Expr, Polynomial] = {}  # by expression
        self.inverse: dict[Expr, Polynomial] = {}  # by divisor
        self.meaning: dict[Polynomial, tuple[Expr, bool]] = {}  # expression, whether its inverse

    def read(self, nodes: list[Expr]) -> Polynomial:
        """The expanded polynomial of a region."""
        import sympy

        done: dict[Expr, Polynomial] = {}
        for node in nodes:
            done[node] = sympy.expand(SYMPY[node.op](self, node, [
                done[a] if a in done else self.leaf(a) for a in _inner(node)
            ]))  # fmt: skip
        return done[nodes[-1]]

    def leaf(self, node: Expr, inverse: bool = False) -> Polynomial:
        """A finite number as itself, anything else as a symbol."""
        import sympy

        value = float(node.attr) if node.is_const else float("nan")
        if abs(value) < float("inf") and not (inverse and value == 0):
            number = sympy.Rational(value)
            return 1 / number if inverse else number
        if inverse and self.finite and not node.is_const:
            return 1 / self.leaf(node)
        table = self.inverse if inverse else self.symbol
        if node not in table:
            table[node] = sympy.Symbol(f"x{len(self.meaning):03}", real=True)
            self.meaning[table[node]] = (node, inverse)
        return table[node]

    def order(self, polynomial: Polynomial) -> tuple[str, ...]:
        """Sums and products are written in the order of first appearance."""
        return tuple(sorted(str(symbol) for symbol in polynomial.free_symbols)) or ("~",)

    def may_lose(self, polynomial: Polynomial, bounds: Bounds) -> bool:
        """Whether every symbol that disappeared is finite."""
        lost = [m for symbol, m in self.meaning.items() if symbol not in polynomial.free_symbols]
        values = (make(Op.DIV, ONE, node) if inverse else node for node, inverse in lost)
        return all(bool(bounds(value).is_finite.all()) for value in values)

    def write(self, polynomial: Polynomial) -> Expr | None:
        """Back to an expression; None where a number is too large for a float."""
        try:
            return self._sum(polynomial)
        except OverflowError:
            return None

    # The polynomial is small (MAX_NODES), so recursion is short here.
    def _sum(self, polynomial: Polynomial) -> Expr:
        parts = sorted(polynomial.as_ordered_terms(), key=self.order)
        signed = [(self._negative(part), part) for part in parts]
        first = next((k for k, (negative, _) in enumerate(signed) if not negative), 0)
        negative, part = signed.pop(first)
        total = self._product(part)
        for negative, part in signed:
            total = total - self._product(-part) if negative else total + self._product(part)
        return total

    def _negative(self, part: Polynomial) -> bool:
        return bool(part.as_coeff_Mul()[0] < 0)

    def _product(self, part: Polynomial) -> Expr:
        coefficient, rest = part.as_coeff_Mul()
        above, below = self._factors(rest)
        number = int(coefficient.p) / int(coefficient.q)
        result = _joined(above)
        if result is None:
            result = const(number)
        elif abs(number) != 1:
            result = const(number) * result
        divisor = _joined(below)
        result = result if divisor is None else result / divisor
        return -result if number == -1 and above else result

    def _factors(self, product: Polynomial) -> tuple[list[Expr], list[Expr]]:
        above: list[Expr] = []
        below: list[Expr] = []
        for factor in sorted(product.as_ordered_factors(), key=self.order):
            base, power = factor.as_base_exp()
            if base.is_Number:
                continue
            node, inverse = self.meaning.get(base) or (self._sum(base), False)
            (below if inverse or power < 0 else above).extend([node] * abs(int(power)))
        return above, below


def _joined(factors: list[Expr]) -> Expr | None:
    total: Expr | None = None
    for factor in factors:
        total = factor if total is None else total * factor
    return total


Reader = Callable[[_Symbols, Expr, list[Polynomial]], Polynomial]
SYMPY: dict[Op, Reader] = {
    Op.ADD: lambda names, node, x: x[0] + x[1],
    Op.SUB: lambda names, node, x: x[0] - x[1],
    Op.MUL: lambda names, node, x: x[0] * x[1],
    Op.NEG: lambda names, node, x: -x[0],
    Op.DIV: lambda names, node, x: x[0] * names.leaf(node.args[1], inverse=True),
    Op.POW: lambda names, node, x: x[0] ** _power(node),
}

"""The functions that a variant may call; they have a meaning inside a variant only.

from scoremod import where, tanh
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import UnsupportedPython


@dataclass(frozen=True)
class Function:
    """A function of the variant language: its name, its parameters, and what it gives."""

    name: str
    parameters: str
    meaning: str

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        return f"{self.name}({self.parameters}): {self.meaning}"

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        raise UnsupportedPython(
            f"scoremod.{self.name} has a meaning inside a variant only",
            hint="write it in the body of a function decorated with @scoremod.variant or "
            "@scoremod.mask; outside, use the function of torch or math",
        )


@dataclass(frozen=True)
class Const:
    """A number that is compiled into the kernel instead of being passed to it."""

    value: Any


def const(value: bool | int | float) -> Any:
    """Compile a value in: `def f(s, i, j, n=scoremod.const(8))`, or `n = scoremod.const(8)`.

    A const may bound a `range()`. Each value is a kernel of its own.
    """
    if not isinstance(value, bool | int | float):
        raise UnsupportedPython(f"const takes a number, not {type(value).__name__}")
    return Const(value)


inf = float("inf")

where = Function("where", "condition, x, y", "x where the condition holds, else y")
exp = Function("exp", "x", "e to the power x")
exp2 = Function("exp2", "x", "2 to the power x")
expm1 = Function("expm1", "x", "exp(x) - 1, accurate near 0")
log = Function("log", "x", "natural logarithm")
log2 = Function("log2", "x", "logarithm to base 2")
log10 = Function("log10", "x", "logarithm to base 10")
log1p = Function("log1p", "x", "log(1 + x), accurate near 0")
sqrt = Function("sqrt", "x", "square root")
rsqrt = Function("rsqrt", "x", "1 / sqrt(x)")
tanh = Function("tanh", "x", "hyperbolic tangent")
sigmoid = Function("sigmoid", "x", "1 / (1 + exp(-x))")
softplus = Function("softplus", "x", "log(1 + exp(x))")
silu = Function("silu", "x", "x * sigmoid(x)")
relu = Function("relu", "x", "max(x, 0)")
erf = Function("erf", "x", "error function")
sin = Function("sin", "x", "sine")
cos = Function("cos", "x", "cosine")
pow = Function("pow", "x, y", "x ** y")
minimum = Function("minimum", "x, y", "the smaller of two; also written min(x, y, ...)")
maximum = Function("maximum", "x, y", "the larger of two; also written max(x, y, ...)")
clamp = Function("clamp", "x, low, high", "x, at least low and at most high")
floor = Function("floor", "x", "the largest int <= x")
ceil = Function("ceil", "x", "the smallest int >= x")
ilog2 = Function("ilog2", "n", "floor(log2(n)) of an int, exact; 0 for n < 1")
isfinite = Function("isfinite", "x", "whether x is neither nan nor infinite")
xor = Function("xor", "a, b", "whether exactly one of two conditions holds")

FUNCTIONS: dict[str, Function] = {
    f.name: f for f in list(globals().values()) if isinstance(f, Function)
}

"""scoremod: declare an attention variant in three lines, get its kernels.

@scoremod.variant
def alibi(s, i, j, h, slopes):
    return s - slopes[h] * (i - j)
"""

from . import errors, nn, testing, variants
from .api import Variant, from_flex, load, mask, parse, variant
from .cache import compile_count
from .language import (
    ceil,
    clamp,
    const,
    cos,
    erf,
    exp,
    exp2,
    expm1,
    floor,
    ilog2,
    inf,
    isfinite,
    log,
    log1p,
    log2,
    log10,
    maximum,
    minimum,
    pow,
    relu,
    rsqrt,
    sigmoid,
    silu,
    sin,
    softplus,
    sqrt,
    tanh,
    where,
    xor,
)

__version__ = "0.1.0"

__all__ = [
    "Variant",
    "ceil",
    "clamp",
    "compile_count",
    "const",
    "cos",
    "erf",
    "errors",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "from_flex",
    "ilog2",
    "inf",
    "isfinite",
    "load",
    "log",
    "log1p",
    "log2",
    "log10",
    "mask",
    "maximum",
    "minimum",
    "nn",
    "parse",
    "pow",
    "relu",
    "rsqrt",
    "sigmoid",
    "silu",
    "sin",
    "softplus",
    "sqrt",
    "tanh",
    "testing",
    "variant",
    "variants",
    "where",
    "xor",
]

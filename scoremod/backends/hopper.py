"""The Hopper backend: device functions as the portable backend spells them, in Gluon.

Gluon has Triton's elementwise operations under the same names, so `tl.where` is `gl.where`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ..plan import DeviceFunction
from ..plan_hopper import HopperPlan
from . import triton
from .base import Backend

# Of Triton's language, PropagateNan alone is missing in Gluon's.
_LANGUAGE = re.compile(r"\btl\.(?!PropagateNan)")


def in_gluon(text: str) -> str:
    """Triton's text of an elementwise function, as Gluon's."""
    return _LANGUAGE.sub("gl.", text.replace("@triton.jit", "@gluon.jit"))


def define(function: DeviceFunction, plan: HopperPlan) -> str:
    """The user's score, mask or key range as a jit function."""
    return in_gluon(triton.define(function, plan))


HOPPER = Backend(
    "hopper",
    "hopper",
    define,
    triton.parameter_names,
    triton.load_text,
    borrowed="triton",
    translate=in_gluon,
)

# Kernels without products are in Triton itself, and so are their shared steps.
WITHOUT_PRODUCTS = replace(HOPPER, translate=str)

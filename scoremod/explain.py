"""Say what scoremod made of a variant, in the user's own words."""

from __future__ import annotations

from .ir.expr import TRUE, resolve
from .ir.show import show
from .passes.simplify import simplify
from .plan import assumed_params
from .variant import Program


def explain(program: Program, text: tuple[str, ...]) -> str:
    """The simplified form, the captures with what was assumed, and the mask."""
    params = assumed_params(program)
    types = {p.name: p.type for p in params}
    score = simplify(resolve(program.score, types))
    mask = simplify(resolve(program.mask, types))
    lines = [f"variant {program.name}"]
    lines += [f"  score  {show(score)}"]
    lines += ["  mask   every pair" if mask == TRUE else f"  mask   {show(mask)}"]
    for found, param in zip(program.captures, params, strict=True):
        assumed = "" if found.element else f"   (assumed {param.element}; a call decides)"
        lines.append(f"  capture {found.declaration}{assumed}")
    return "\n".join(lines)

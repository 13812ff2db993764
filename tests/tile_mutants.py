"""Plausible mistakes in the tile analysis, and whether the tests see them.

    python tests/tile_mutants.py [number ...]   ->   one line for each: caught by what, or SURVIVED

Each mutant is one wrong line. Those that only lose sharpness are caught by the catalogue.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ("tests/test_normal.py", "tests/test_ranges.py", "tests/test_tiles.py")
# The first of them that sees the module.
FIRST = {"normal": 0, "linear": 0, "facts": 0, "ranges": 1, "pieces": 1, "runs": 1}

# (the mistake, the file of scoremod/analysis, what stands there, what an implementer might write)
MUTANTS: list[tuple[str, str, str, str]] = [
    # normal form
    ("i % r == c without `c is a residue`", "normal",
     "    return both(_no_remainder(difference, r, span), proper)",
     "    return _no_remainder(difference, r, span)"),
    ("g * y + c == 0 where g does not divide c", "normal",
     "    if total.constant % divisor:\n        return const(False, span)\n", ""),
    ("g * y + c <= 0 rounded down", "normal", "-(-total.constant // divisor)",
     "total.constant // divisor"),
    ("x // A // C joined for a negative A", "normal",
     "x.op is Op.FLOORDIV and _positive(x.args[1]) and",
     "x.op is Op.FLOORDIV and x.args[1].is_const and"),
    ("(C * t + y) // C for any coefficient above C", "normal",
     "total.terms.items() if k % c == 0}", "total.terms.items() if k % c == 0 or k > c}"),
    ("coefficients of % as C - 1: loses, is not unsound", "normal",
     "    return (k + half) % c - half", "    return k % c"),
    ("(x % A + y) % C for A != C", "normal",
     "term.op is Op.MOD and term.args[1] == divisor", "term.op is Op.MOD"),
    ("not (a <= b) is b <= a", "normal", "(Sum.of(y) - Sum.of(x)).plus(1), e.span)",
     "Sum.of(y) - Sum.of(x), e.span)"),
    ("negation of a comparison of floats", "normal",
     "        return None  # of floats, the negation holds for nan too",
     "        return make(Op.LT, y, x)"),
    ("a sum that may overflow is taken apart", "linear",
     "if e.type is Type.INT and exact(e) else None", "if e.type is Type.INT else None"),
    ("comparisons whose difference may overflow", "linear",
     "        return reach + abs(self.constant) <= INT_MAX",
     "        return True"),
    ("float(i) <= 2.5 is i <= 3", "normal", "{Op.LE: below, Op.LT: above - 1, Op.EQ: below}",
     "{Op.LE: above, Op.LT: above - 1, Op.EQ: below}"),
    ("x >> 63 and beyond as a division", "normal",
     "const(1 << n.attr) if 0 <= n.attr < 64 else INT_ZERO", "const(1 << min(n.attr, 62))"),
    ("congruence of x // C where C does not divide m", "facts",
     "if n == 0 and c > 0 and m % c == 0 else (1, 0)", "if n == 0 and c > 0 and m else (1, 0)"),
    ("captures are below 2**31", "facts", "CAPTURE_LIMIT = 2**47", "CAPTURE_LIMIT = 2**31"),
    # ranges
    ("j // C <= b is j <= b * C", "ranges", "edge = _whole(Sum.of(b).plus(1)) if up else b",
     "edge = b"),
    ("a divisor of unknown sign taken as positive", "ranges",
     "    low, high = bounds(c)\n    cases",
     "    return positive()\n    low, high = bounds(c)\n    cases"),
    ("x // 0 is anything", "ranges",
     "        (low <= 0 <= high, is_zero(", "        (False, is_zero("),
    ("negative divisor without + 1", "ranges", "limit.plus(1 if up else 0)", "limit.plus(0)"),
    ("abs(x) >= b as both sides at once", "ranges",
     "    return meet(*parts) if up else joined(parts[0] + parts[1])", "    return meet(*parts)"),
    ("min <= b as a conjunction", "ranges", "Op.MIN: _extreme(both_when_up=False)",
     "Op.MIN: _extreme(both_when_up=True)"),
    ("k * j >= r by floor", "ranges",
     "_whole(total * -1), divisor))\n    return _whole(Sum.of(quotient) * -1)",
     "_whole(total), divisor))\n    return quotient"),
    ("a negative factor that does not turn the sense", "ranges", "    up = up == (k > 0)\n", ""),
    ("!= as one half-line", "ranges",
     "joined(bounded(t, const(-1), x, up=True) + bounded(t, const(1), x, up=False))",
     "joined(bounded(t, const(-1), x, up=True))"),
    ("or of half-lines by min", "pieces", "outer = functools.reduce(_greatest if up else _least",
     "outer = functools.reduce(_least if up else _greatest"),
    ("half-lines joined without their guards", "pieces", "    if not guarded or not p.guards:",
     "    if True:"),
    ("where without its condition", "ranges",
     "        meet(solved(condition, x), bounded(yes, b, x, up=up))",
     "        bounded(yes, b, x, up=up)"),
    ("pieces joined although their guards can hold together", "pieces",
     "        if _contradictory(ours + theirs):", "        if True:"),
    ("a contradiction seen at p + q <= 0 with 0", "pieces",
     "not total.terms and total.constant > 0", "not total.terms and total.constant >= 0"),
    ("a product in a bound that overflows", "ranges",
     "    return total.expr() or _clipped_product(edge, c, reach)",
     "    return make(Op.MUL, edge, c)"),
    ("full range from the lower bounds' least", "runs", "np.maximum.reduceat(lo, starts)",
     "np.minimum.reduceat(lo, starts)"),
    ("rows with a false guard left out of the full range", "runs",
     "    lo, hi = np.where(alive, lo, FAR), np.where(alive, hi, -FAR)\n    seen = lo <= hi",
     "    seen = alive & (lo <= hi)"),
    ("empty rows left out of the full range", "runs",
     "        np.minimum.reduceat(hi, starts),",
     "        np.minimum.reduceat(np.where(seen, hi, FAR), starts),"),
    ("empty rows count as visible at their ends", "runs",
     "np.maximum.reduceat(np.where(seen, hi, -FAR), starts)",
     "np.maximum.reduceat(np.where(seen, hi, -FAR), starts) - 1"),
    ("in_run: beyond taken as the run itself", "ranges", "(2 * c, None)]", "(2 * c + 1, None)]"),
    # intervals
    ("x // y in int by truncation", "interval",
     "    corners = _corners(x, y, meaning(Op.FLOORDIV))",
     "    corners = _corners(x, y, lambda p, q: np.trunc(p / q).astype(np.int64))"),
    ("x % c keeps its run when hi - lo < c", "interval",
     "run = (y.lo == y.hi) & (x.lo // y.lo == x.hi // y.lo)",
     "run = (y.lo == y.hi) & (x.hi - x.lo < y.lo)"),
    ("divisors on both sides of 0 by their ends", "interval",
     "    below, above, zero = y.lo < 0, y.hi > 0, (y.lo <= 0) & (y.hi >= 0)",
     "    below, above, zero = y.lo < 0, y.hi > 0, (y.lo == 0) & (y.hi == 0)"),
    ("abs from the ends' absolute values", "interval",
     "np.where(x.lo >= 0, x.lo, np.where(x.hi <= 0, -x.hi, 0))",
     "np.minimum(np.abs(x.lo), np.abs(x.hi))"),
    ("a & b of negatives as low as the lower one", "interval",
     "0, ~_smear(~np.minimum(np.minimum(x.lo, y.lo), -1)))", "0, np.minimum(x.lo, y.lo))"),
    ("a ^ b at most the greater", "interval",
     "Interval(np.where(same, 0, ~reach), reach)",
     "Interval(np.where(same, 0, ~reach), np.maximum(x.hi, y.hi))"),
    ("x == y is full when the lower ends meet", "interval",
     "same = (x.lo == x.hi) & (y.lo == y.hi) & (x.lo == y.lo)", "same = x.lo == y.lo"),
    ("not keeps may and must", "interval",
     "    return Interval(np.logical_not(x.hi), np.logical_not(x.lo))",
     "    return Interval(np.logical_not(x.lo), np.logical_not(x.hi))"),
    ("nan proves a comparison", "interval",
     "np.logical_and(always, ~nan)", "np.logical_and(always, True)"),
    ("a shift by 64 and more keeps its bounds", "interval",
     "np.where(outside, np.minimum(lo, 0), lo)", "lo"),
    ("sums that wrap", "interval",
     "_carries(x.lo, y.lo, lo) | _carries(x.hi, y.hi, hi))", "np.False_)"),
    # boxes, tables, cuts
    ("one shared bit proves equality", "boxes", "    return Interval(found.lo, maybe)",
     "    return Interval(found.lo | (maybe & (np.ndim(maybe) > 0)), maybe)"),
    ("power of two: 0 forgotten", "boxes",
     "        ((x.lo <= 0) & (x.hi >= 0))\n        | ((x.hi >= 1)",
     "        ((x.hi >= 1)"),
    ("narrowed `and`: the guards' own falsehood forgotten", "boxes",
     "    return functools.reduce(join, map(boxes.interval, guards), Interval(lo, hi))",
     "    return Interval(lo, hi)"),
    ("narrowed `or`: guards not negated", "boxes", "tuple(map(negation, guards))", "guards"),
    ("types: every from some", "boxes", "set_of(boxes.rows.side.at_positions(x)), True)",
     "set_of(boxes.rows.side.at_positions(x)))"),
    ("types outside the table forgotten", "boxes", "index < table.shape[1]), index, 63))",
     "index < table.shape[1]), index, 0))"),
    ("T[lo..hi] from its two ends", "tables",
     "np.minimum(lows[k, lo], lows[k, other]), np.maximum(highs[k, lo], highs[k, other])",
     "np.minimum(lows[0, lo], lows[0, hi]), np.maximum(highs[0, lo], highs[0, hi])"),
    ("reads outside a table clipped into it", "tables",
     "        lo = np.where(meets, np.where(leaves, np.minimum(lo, zero), lo), zero)\n", ""),
    ("bool reads outside a table clipped into it", "tables",
     "every & (~leaves | self.outside)", "every"),
    ("summed area not closed at the top", "tables", "hi + 1 if c else lo for c",
     "hi if c else lo for c"),
    ("every row is some row", "summary", "self.reduce(np.logical_and, x | ~keep, True)",
     "self.reduce(np.logical_or, x & keep, True)"),
    ("a piece one position short", "summary", "np.where(real, hi + 1, before)],",
     "np.where(real, hi, before)],"),
    ("a table's nan forgotten", "summary", "np.isnan(x) & self._kept(np.True_, False), False)",
     "np.isnan(x) & False, False)"),
    ("tail of a cut lost", "cuts", "*(b for _, b in runs), hi], 1)",
     "*(b for _, b in runs), hi - 1], 1)"),
    ("last change of a table lost", "cuts", "np.stack([first - 1, last - 1, hi], 1)",
     "np.stack([first - 1, last - 2, hi], 1)"),
    # tiles
    ("opaque condition forgotten for full", "tiles", "            full |= inside & p.is_pure",
     "            full |= inside"),
    ("full runs with a gap of one joined", "tiles", "(next_lo <= hi + 1)", "(next_lo <= hi + 2)"),
    ("full runs of pieces with conditions joined", "tiles",
     "for p, r in self.pieces if p.is_pure]", "for p, r in self.pieces]"),
    ("q_offset forgotten", "tiles", 'Side("i", q_offset, q_len', 'Side("i", 0, q_len'),
    ("rows past the end in the tile's box", "summary",
     "np.minimum(lo + self.block, self.first + self.length) - 1", "lo + self.block - 1"),
    ("boxes that do not exist count", "tiles", "(found.hi & real).any((1, 2))",
     "found.hi.any((1, 2)) & np.True_"),
]  # fmt: skip


# Any failure will do: making it small would take most of the time.
PROFILE = """
from hypothesis import Phase
settings.register_profile("mutant", deadline=None, derandomize=True, phases=[Phase.generate])
settings.load_profile("mutant")
"""


def run(number: int) -> str:
    """One line about one mutant."""
    what, module, old, new = MUTANTS[number]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("scoremod", "grammar", "templates", "tests", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder, name))
        # The analysis needs neither torch nor the public surface.
        Path(folder, "scoremod", "__init__.py").write_text("", encoding="utf-8")
        with Path(folder, "tests", "conftest.py").open("a", encoding="utf-8") as conftest:
            conftest.write(PROFILE)
        file = Path(folder, "scoremod", "analysis", f"{module}.py")
        file.write_text(file.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
        command = [
            *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"),
            *("-k", "not still_apply"),
            *TESTS[FIRST.get(module, 2) :],
        ]
        env = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return f"{number:3} {what}: {failed[0][:90] if failed else 'SURVIVED'}"


def main() -> None:
    for number in map(int, sys.argv[1:]) if sys.argv[1:] else range(len(MUTANTS)):
        print(run(number), flush=True)


if __name__ == "__main__":
    main()

"""How many empty and full tiles of the catalogue of masks are found, without looking at pairs.

    python benchmarks/tightness.py [-o docs/tightness.md]

Needs no GPU; about two minutes. Every claim is compared with all pairs; one that is wrong stops it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from test_tile_test import kinds_of as tested  # noqa: E402
from test_tiles import BLOCKS, LENGTHS, check_sound  # noqa: E402
from tile_catalogue import Entry, catalogue  # noqa: E402
from tile_masks import Launch  # noqa: E402

from scoremod.analysis.ranges import solve  # noqa: E402
from scoremod.analysis.tiles import PARTIAL  # noqa: E402
from scoremod.ir.expr import Expr  # noqa: E402

HEAD = """# How sharp the tile analysis is

Each mask of the catalogue is classified in {blocks} and compared with every pair, at the lengths
(q_len, kv_len, q_offset) {lengths}. A tile that is empty or full and not found
costs time, never correctness. Written by `python benchmarks/tightness.py`.

* **half-lines**: the mask is ranges of keys per query (fwd), of queries per key (bwd); kernels find
  them in their prologue, and nothing is stored.
* **host**: empty and full tiles that `.tiles()` proves, in percent.
* **tile test**: those that a kernel proves from the ends of a tile alone. It looks into the others
  pair by pair, so that a structure on the GPU misses none.

{masks} masks, {tiles} tiles, {decided} of them empty or full: host {host:.2f} %, tile test
{test:.2f} %.

| # | mask | half-lines | empty or full | host | tile test |
|---|---|---|---|---|---|
"""


@dataclass
class Row:
    """One mask, over all lengths and tiles."""

    name: str
    mask: Expr
    tiles: int = 0
    decided: int = 0
    host: int = 0
    test: int = 0

    def add(self, entry: Entry, launch: Launch) -> None:
        dense = launch.dense(entry.mask)
        for block_m, block_n in BLOCKS:
            at = replace(launch, block_m=block_m, block_n=block_n)
            decided = at.kinds(dense) != PARTIAL
            self.tiles += decided.size
            self.decided += int(decided.sum())
            self.host += int((check_sound(entry.mask, at, dense) != PARTIAL).sum())
            found = tested(entry.mask, at)
            assert np.all((found == 1) | (found == at.kinds(dense))), entry.name
            self.test += int((found != 1).sum())

    @property
    def half_lines(self) -> str:
        ways = (("fwd", "j"), ("bwd", "i"))
        pure = [word for word, x in ways if all(p.is_pure for p in solve(self.mask, x))]
        return ", ".join(pure) or "-"

    def cells(self, number: str) -> str:
        shares = (self.share(n) for n in (self.host, self.test))
        cells = [number, self.name, self.half_lines, str(self.decided), *shares]
        return f"| {' | '.join(cells)} |"

    def share(self, found: int) -> str:
        return f"{100 * found / self.decided:.4g}" if self.decided else "100"


def measure() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for q_len, kv_len, q_offset in LENGTHS:
        for entry in catalogue(max(kv_len, q_len + q_offset)):
            row = rows.setdefault(entry.number, Row(entry.name, entry.mask))
            row.add(entry, Launch(q_len, kv_len, q_offset=q_offset, given=entry.values))
    return rows


def lines(rows: dict[str, Row]) -> Iterator[str]:
    total = {
        k: sum(getattr(r, k) for r in rows.values()) for k in ("tiles", "decided", "host", "test")
    }
    yield HEAD.format(
        blocks=", ".join(f"{m} x {n}" for m, n in BLOCKS),
        lengths=", ".join(map(str, LENGTHS)),
        masks=len(rows),
        tiles=total["tiles"],
        decided=total["decided"],
        host=100 * total["host"] / total["decided"],
        test=100 * total["test"] / total["decided"],
    ).rstrip()
    yield from (row.cells(number) for number, row in rows.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "tightness.md")
    output: Path = parser.parse_args().output
    output.write_text("\n".join(lines(measure())) + "\n", encoding="utf-8")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()

"""Draw variants and calls until the time is up; what fails is shrunk and written to a file.

python tests/fuzz_whole.py --seconds 600 --seed 1

Each round has a seed of its own, so a run can be repeated. A finding is a script that runs by
itself; findings of one kind (backend, law, error) are written once. On a GPU: fuzz_gpu.py.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from fuzz_variants import LAWS, Draw, bodies, wide_calls
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky

ROUND = {"cpu": 40, "triton": 6}  # examples: a round takes seconds
REPRODUCTION = '''"""Found by tests/fuzz_whole.py, shrunk: {error}

Run in a checkout: PYTHONPATH=.:tests python FILE
"""

from fuzz_variants import LAWS, Draw

LAWS[{law!r}]({body!r}, {call!r}, {backend!r})
'''


@dataclass(frozen=True)
class Finding:
    """The smallest variant and call that break a law."""

    law: str
    backend: str
    body: str
    call: Draw
    error: str

    @property
    def kind(self) -> str:
        """Findings of one kind are likely of one cause: numbers do not count."""
        words = re.sub(r"[-\d.]+(e[-+]?\d+)?|nan", "N", self.error.partition("\n")[0])
        return f"{self.backend} {self.law}: {words[:160]}"

    def write(self, folder: Path) -> Path:
        """Write a script that fails as this did."""
        text = REPRODUCTION.format(
            law=self.law, body=self.body, call=self.call, backend=self.backend,
            error=self.error.partition("\n")[0].replace('"""', "'''").replace("\\", "/"),
        )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:8]}.py"
        file.write_text(text, encoding="utf-8")
        return file


def run_round(number: int, law: str, backend: str, until: float) -> tuple[int, Finding | None]:
    """One seed: how many examples ran, and what they found."""
    ran, failures = 0, []

    @seed(number)
    @settings(
        max_examples=ROUND[backend],
        phases=[Phase.generate, Phase.shrink],
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(bodies(), wide_calls(backend))
    def draw(body: str, call: Draw) -> None:
        nonlocal ran
        ran += 1
        if time.monotonic() > until:
            return
        try:
            LAWS[law](body, call, backend)
        except Exception as error:
            failures.append(Finding(law, backend, body, call, f"{type(error).__name__}: {error}"))
            raise

    try:
        draw()
    except Flaky:
        pass  # time ran out while it shrank: what was found is still the smallest so far
    except Exception as error:
        if not failures:
            raise error from None
    return ran, failures[-1] if failures else None


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=600)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--folder", type=Path, default=Path("build/fuzz"))
    arguments.add_argument("--only", help="cpu or triton")
    given_ = arguments.parse_args()
    until = time.monotonic() + given_.seconds
    seen: Counter[str] = Counter()
    total: Counter[str] = Counter()
    pairs = [(law, b) for b in ROUND for law in LAWS if given_.only in (None, b)]
    for number, (law, backend) in zip(
        itertools.count(given_.seed), itertools.cycle(pairs), strict=False
    ):
        if time.monotonic() > until:
            break
        ran, found = run_round(number, law, backend, until)
        total[f"{backend} {law}"] += ran
        if found is not None:
            seen[found.kind] += 1
            if seen[found.kind] == 1:
                print(f"{found.kind}\n  {found.body}\n  {found.write(given_.folder)}", flush=True)
    print(", ".join(f"{n} of {what}" for what, n in total.items()))
    for kind, count in seen.most_common():
        print(f"{count} x {kind}")
    return 1 if seen else 0


if __name__ == "__main__":
    sys.exit(main())

"""A built wheel works outside the checkout: grammar and templates travel inside the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PROGRAM = """
import importlib.metadata, pathlib, sys, torch, scoremod
from scoremod.resources import path

home = pathlib.Path(sys.argv[1])
for file in scoremod.__file__, path("grammar"), path("templates"):
    assert home in pathlib.Path(file).parents, file

(plugin,) = importlib.metadata.entry_points(group="pytest11", name="pytest_scoremod")
assert home in pathlib.Path(plugin.load().__file__).parents

window = scoremod.parse('''
variant near(window: int = 3) {
  score s / 2
  mask  0 <= i - j < window
}
''')
q, k, v = torch.randn(3, 1, 2, 9, 16, dtype=torch.float32)
torch.testing.assert_close(window(q, k, v), window.eager(q, k, v), rtol=0, atol=1e-5)
assert "def " in window.source(q, k, v, target="cpu")
print("wheel works")
"""


def run(*command: object, cwd: Path, **env: str) -> str:
    """Run a command and return what it printed; a failure shows that too."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    dist, home = tmp_path / "dist", tmp_path / "home"
    # The wheel is built from the source archive, so both are complete.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, ROOT, cwd=tmp_path)
    (wheel,) = dist.glob("*.whl")
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "-t", home, wheel, cwd=tmp_path)
    script = tmp_path / "use.py"
    script.write_text(PROGRAM, encoding="utf-8")
    places = {"PYTHONPATH": str(home), "SCOREMOD_CACHE_DIR": str(tmp_path / "cache")}
    assert "wheel works" in run(sys.executable, script, home, cwd=tmp_path, **places)

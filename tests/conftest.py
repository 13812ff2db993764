"""What all tests share: hypothesis profiles, golden files, and the skip of `gpu` tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

GOLDEN = Path(__file__).parent / "golden"

# Examples that plot must not look for a screen.
os.environ.setdefault("MPLBACKEND", "Agg")

# The first call of a law compiles or imports something: no deadline holds for it.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("dev", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch sees no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not cuda_is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def cuda_is_available() -> bool:
    # Imported here: most tests need no torch, and it takes a second.
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with tests/golden/NAME, or rewrite that file with --update-golden.

    golden("causal.txt", str(causal.tiles(16, 16, block_m=4, block_n=4)))
    """
    command = f"pytest '{request.node.nodeid}' --update-golden"

    def compare(name: str, text: str) -> None:
        file, text = GOLDEN / name, text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        elif not file.exists():
            pytest.fail(f"tests/golden/{name} does not exist; to write it: {command}")
        else:
            expected = file.read_text(encoding="utf-8")
            assert text == expected, f"tests/golden/{name} differs; to accept: {command}"

    return compare

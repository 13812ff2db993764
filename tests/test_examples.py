"""Every example runs, and so does what the README shows."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import scoremod

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def fenced(language: str) -> list[str]:
    """Return the README's code blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def load(file: Path) -> ModuleType:
    """Import a file that is in no package."""
    spec = importlib.util.spec_from_file_location(f"run_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.py")), ids=lambda f: f.name)
def test_example(file: Path) -> None:
    load(file).main()


def test_readme_python(tmp_path: Path) -> None:
    # From a file: the front end reads the source of functions.
    script = tmp_path / "readme.py"
    script.write_text("\n".join(fenced("python")), encoding="utf-8")
    load(script)


@pytest.mark.parametrize("text", fenced("smod"))
def test_readme_smod(text: str) -> None:
    scoremod.parse(text)

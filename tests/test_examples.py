"""Every example runs, and so does what the README and the pages of docs/ show."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import scoremod

ROOT = Path(__file__).parent.parent
# design.md shows what is planned as well, and pieces that stand for many.
PAGES = [ROOT / "README.md", *sorted(set(ROOT.glob("docs/*.md")) - {ROOT / "docs" / "design.md"})]


def fenced(page: Path, language: str) -> list[str]:
    """Return a page's code blocks in one language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


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


@pytest.mark.parametrize("page", [p for p in PAGES if fenced(p, "python")], ids=lambda p: p.name)
def test_python_of_a_page(page: Path, tmp_path: Path) -> None:
    # From a file: the front end reads the source of functions.
    script = tmp_path / f"{page.stem}_page.py"
    script.write_text("\n".join(fenced(page, "python")), encoding="utf-8")
    load(script)


@pytest.mark.parametrize("text", [text for page in PAGES for text in fenced(page, "smod")])
def test_smod_of_a_page(text: str) -> None:
    scoremod.parse(text)

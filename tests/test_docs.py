"""The pages of docs/: generated parts are complete, links lead somewhere, and the site builds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_examples import ROOT, load

import scoremod
from scoremod.frontend import names
from scoremod.ir.ops import OPS, Rule

hooks = load(ROOT / "docs" / "hooks.py")
PAGES = sorted((ROOT / "docs").glob("*.md"))
STOCK = [n for n, x in vars(scoremod.variants).items() if isinstance(x, scoremod.Variant)]


def test_every_generated_part_is_on_a_page() -> None:
    marks = [m for page in PAGES for m in hooks.MARK.findall(page.read_text(encoding="utf-8"))]
    assert sorted(marks) == sorted(hooks.GENERATED)


def test_every_function_and_rule_is_explained() -> None:
    assert hooks.MEANING.keys() == names.CALLS.keys()
    used = {OPS[op].rule for op in (*names.BINARY.values(), *names.COMPARE.values())}
    assert used | {Rule.LOGIC} == hooks.RULES.keys()


def test_every_stock_variant_has_an_entry_with_source() -> None:
    text = hooks.stock()
    for name in STOCK:
        entry = text.partition(f"### {name}\n")[2].partition("\n### ")[0]
        assert f"def {name}(" in entry and "@" in entry
    assert hooks.PICTURES.keys() <= set(STOCK)
    # The picture of a mask shows its two kinds of tiles, or that it has but one.
    assert text.count("<svg") == len(STOCK) - 2


def test_links_between_pages() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((\w+\.md)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr  # --strict: of any warning
    assert "<svg" in (tmp_path / "variants.html").read_text(encoding="utf-8")

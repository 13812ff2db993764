"""The plug-in for pytest: which `.smod` files it collects, and what it says of those that fail."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from test_check import off_by

from scoremod import attention, check

pytest_plugins = ["pytester"]

WINDOW = "variant near(window: int = 3) {\n  mask 0 <= i - j < window\n}\n"


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder of files, and a check of one small case."""
    monkeypatch.setattr(check, "DTYPES", {"cpu": ("f32",)})
    monkeypatch.setattr(check, "available", lambda: ("cpu",))
    monkeypatch.setattr(check, "SETTINGS", check.SETTINGS[1:2])
    pytester.makefile(".smod", near=WINDOW)
    return pytester


def run(folder: pytest.Pytester, *options: str) -> pytest.RunResult:
    return folder.runpytest_inprocess("-p", "pytest_scoremod", *options)


def test_files_are_collected_where_they_are_asked_for(folder: pytest.Pytester) -> None:
    named, unnamed, switched = (run(folder, *o) for o in (["near.smod"], [], ["--scoremod"]))
    named.assert_outcomes(passed=1)
    unnamed.assert_outcomes()
    switched.assert_outcomes(passed=1)
    folder.makeini("[pytest]\nscoremod_files = models/*.smod")
    place = folder.mkdir("models") / "kept.smod"
    place.write_text(WINDOW, encoding="utf-8")
    run(folder, "-v").stdout.fnmatch_lines(["models/kept.smod::near?cpu-f32? PASSED*"])


def test_a_failure_is_its_smallest_case_and_how_to_repeat_it(
    folder: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "RUN", off_by(1.01, "out")[0])
    result = run(folder, "near.smod")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*near?cpu-f32?*",
            "`near` is not the oracle: out is off by * units of f32 rounding, where * are allowed",
            "  smallest case: f32 on cpu, 2x2/1x5/9x16, q_offset 4",
            "  to repeat it: scoremod check near.smod --dtype f32 --backend cpu",
        ]
    )
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*check.py*")


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (
            b"variant v() {\n  mask j <=\n}",
            [
                "scoremod.errors.LanguageError: expected an expression, but this is `}`",
                "  broken.smod:3:1",
                "    3 | }",
                "      | ^",
            ],
        ),
        (b"variant v() { mask j + 1 }", ["scoremod.errors.TypeMismatch: *", "  broken.smod:1:*"]),
        (b"\xff\xfe", ["broken.smod is not UTF-8 text"]),
    ],
    ids=["syntax", "type", "bytes"],
)
def test_a_file_that_is_wrong_is_one_error(
    folder: pytest.Pytester, content: bytes, lines: list[str]
) -> None:
    (folder.path / "broken.smod").write_bytes(content)
    result = run(folder, "--scoremod", "--continue-on-collection-errors")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*ERROR collecting broken.smod*", *lines], consecutive=True)


def test_a_defect_of_scoremod_keeps_its_traceback(
    folder: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(attention, "RUN", {"cpu": fails})
    result = run(folder, "near.smod")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*ZeroDivisionError: a defect"])


def test_a_start_of_pytest_imports_nothing_of_scoremod(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\ndef test(): assert not {'torch', 'scoremod'} & {*sys.modules}")
    root = Path(__file__).parent.parent
    program = f"import sys, pytest; sys.path.insert(0, {str(root)!r}); sys.exit(pytest.main())"
    assert pytester.run(sys.executable, "-c", program, "-p", "pytest_scoremod").ret == 0

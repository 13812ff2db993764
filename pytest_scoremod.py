"""pytest collects `.smod` files: what they say is compared with the oracle on every backend here.

    pytest attn.smod                     a file that is named
    pytest --scoremod                    those in all folders that pytest looks into

    [tool.pytest.ini_options]
    scoremod_files = ["*.smod"]          the same at every run

A module beside the package: pytest imports its plug-ins at every start, and torch takes seconds.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from scoremod import Variant

SUFFIX = ".smod"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The switch for one run, and the one for every run."""
    parser.getgroup("scoremod").addoption(
        "--scoremod", action="store_true", help=f"check the *{SUFFIX} files in collected folders"
    )
    parser.addini("scoremod_files", f"globs of {SUFFIX} files to check at every run", "args")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> VariantFile | None:
    """A file that is named, or that a switch asks for."""
    globs = [*parent.config.getini("scoremod_files")]
    globs += [f"*{SUFFIX}"] if parent.config.getoption("scoremod") else []
    named = file_path.suffix == SUFFIX and parent.session.isinitpath(file_path)
    if named or any(file_path.match(glob) for glob in globs):
        return VariantFile.from_parent(parent, path=file_path)
    return None


class VariantFile(pytest.File):
    """A file in the mini-language."""

    @property
    def shown(self) -> str:
        """The file, as one would name it in the folder that pytest was called in."""
        here = self.config.invocation_params.dir
        return str(self.path.relative_to(here) if self.path.is_relative_to(here) else self.path)

    def collect(self) -> Iterator[Comparison]:
        """One test for each backend and dtype."""
        from scoremod import check

        variant = self._read()
        for backend, dtype in check.runs(check.Wish()):
            name = f"{variant.name}[{backend}-{dtype}]"
            yield Comparison.from_parent(
                self, name=name, variant=variant, backend=backend, dtype=dtype
            )

    def _read(self) -> Variant:
        from scoremod import parse
        from scoremod.errors import ScoremodError

        try:
            return parse(self.path.read_text(encoding="utf-8-sig"), file=self.shown)
        except UnicodeDecodeError:
            raise self.CollectError(f"{self.shown} is not UTF-8 text") from None
        except ScoremodError as error:
            raise self.CollectError(_one_look(error)) from None


class Comparison(pytest.Item):
    """A variant against the oracle, on one backend in one dtype."""

    def __init__(self, *, variant: Variant, backend: str, dtype: str, **of_pytest: Any) -> None:
        super().__init__(**of_pytest)
        self._variant, self._backend, self._dtype = variant, backend, dtype

    def runtest(self) -> None:
        """Raise at the smallest case that is off."""
        from scoremod import check

        report = check.check(self._variant, {}, check.Wish((self._dtype,), (self._backend,)))
        self.add_report_section("call", "scoremod", str(report))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """A user's mistake in one look; a traceback where scoremod itself fails."""
        from scoremod.errors import CheckFailed, ScoremodError

        error = excinfo.value
        if isinstance(error, CheckFailed):
            return f"{error.message}\n  to repeat it: {self._command}"
        if isinstance(error, ScoremodError):
            return _one_look(error)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Where it stands, and what it is called."""
        return self.path, 0, self.name

    @property
    def _command(self) -> str:
        """What repeats this comparison alone."""
        assert isinstance(self.parent, VariantFile)
        interpreted = self._backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        options = f"--dtype {self._dtype} --backend {self._backend}"
        command = f"scoremod check {shlex.quote(self.parent.shown)} {options}"
        return f"TRITON_INTERPRET=1 {command}" if interpreted else command


def _one_look(error: Exception) -> str:
    return f"{type(error).__module__}.{type(error).__name__}: {error}"

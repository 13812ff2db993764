"""Errors in one look: what was expected, where it stands in the user's text, and a hint.

scoremod.errors.TypeMismatch: `where` needs a bool condition, but this is int
  model/attn.py:14:18, in variant `window`
   14 |     return where(i - j, s, -inf)
      |                  ^^^^^
  hint: compare it, e.g. where(i - j >= 0, s, -inf)
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BackendUnavailable",
    "BundleInvalid",
    "CaptureMismatch",
    "CheckFailed",
    "CompositionError",
    "InputMismatch",
    "KernelMissing",
    "LanguageError",
    "MissingCapture",
    "ReservedName",
    "ResourceMissing",
    "ScoremodError",
    "SourceUnavailable",
    "Span",
    "TypeMismatch",
    "UnknownName",
    "UnsupportedPython",
]


LONG_LINE = 200  # characters; of a longer line only a part is shown


@dataclass(frozen=True)
class Span:
    """A piece of the user's text: a file, a place in it, and the line to show.

    Columns count characters from 1; `end` is one past the last character on that line.
    """

    file: str
    line: int
    column: int
    end: int
    text: str
    owner: str = ""

    @property
    def words(self) -> str:
        """The spanned text itself, as the user wrote it."""
        return self.text[self.column - 1 : self.end - 1]

    def show(self) -> str:
        """Place, line and carets, indented by two."""
        owner = f", in {self.owner}" if self.owner else ""
        number = f"{self.line:>5}"
        text, start = self._shown()
        width = max(1, min(self.end - self.column, len(text) - start))
        # Tabs stay tabs under the line, so that the carets stand where the editor shows the text.
        lead = "".join("\t" if c == "\t" else " " for c in text[:start])
        return (
            f"  {self.file}:{self.line}:{self.column}{owner}\n"
            f"{number} | {text}\n"
            f"{' ' * len(number)} | {lead}{'^' * width}"
        )

    def _shown(self) -> tuple[str, int]:
        """The line, or of a very long one the part around the place; and where the place begins."""
        start = self.column - 1
        if len(self.text) <= LONG_LINE:
            return self.text, start
        first = max(0, min(start - LONG_LINE // 4, len(self.text) - LONG_LINE))
        last = first + LONG_LINE
        before, after = "..." if first else "", "..." if last < len(self.text) else ""
        return before + self.text[first:last] + after, start - first + len(before)


class ScoremodError(Exception):
    """Base of every error that scoremod raises for a user's mistake."""

    def __init__(self, message: str, *, span: Span | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.span = span
        self.hint = hint

    def __str__(self) -> str:
        parts = [self.message]
        if self.span is not None:
            parts.append(self.span.show())
        if self.hint is not None:
            parts.append(f"  hint: {self.hint}")
        return "\n".join(parts)


class LanguageError(ScoremodError):
    """The mini-language text does not parse."""


class UnsupportedPython(ScoremodError):
    """A Python construct that has no meaning in a variant."""


class SourceUnavailable(ScoremodError):
    """A function whose source text cannot be read."""


class UnknownName(ScoremodError):
    """A name that is neither reserved, nor a capture, nor a known function."""


class ReservedName(ScoremodError):
    """A capture with a name that already means something."""


class TypeMismatch(ScoremodError, TypeError):
    """An expression of the wrong type."""


class MissingCapture(ScoremodError, TypeError):
    """A capture was not given, or a keyword is not a capture of this variant."""


class CaptureMismatch(ScoremodError, ValueError):
    """A capture's shape, dtype, device or value does not fit its declaration."""


class InputMismatch(ScoremodError, ValueError):
    """q, k, v or an option of the call do not fit together."""


class CompositionError(ScoremodError, TypeError):
    """Two variants that cannot be put together in this way."""


class BackendUnavailable(ScoremodError, RuntimeError):
    """The asked-for backend cannot run this here."""


class BundleInvalid(ScoremodError, ValueError):
    """A file that is no bundle, is not as it was written, or is of another format."""


class KernelMissing(ScoremodError, LookupError):
    """A call of a loaded bundle needs a kernel that is not in it; nothing is compiled instead."""


class CheckFailed(ScoremodError, AssertionError):
    """A backend does not compute what the variant's source says."""


class ResourceMissing(ScoremodError, RuntimeError):
    """A grammar or template file of scoremod itself is not where it should be."""

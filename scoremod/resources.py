"""The files that are not Python: the grammar and the kernel templates.

They stand at the top of a checkout and inside the package in a wheel:

>>> path("templates").name
'templates'
"""

from __future__ import annotations

from pathlib import Path

from .errors import ResourceMissing

__all__ = ["path", "read_text"]

PACKAGE = Path(__file__).resolve().parent
# The wheel's place first: a folder beside an installed package may belong to somebody else.
PLACES = (PACKAGE / "_data", PACKAGE.parent)


def path(name: str) -> Path:
    """Return the file or folder called `name`, such as "grammar/scoremod.lark"."""
    for place in PLACES:
        if (place / name).exists():
            return place / name
    looked = " and ".join(str(place / name) for place in PLACES)
    raise ResourceMissing(
        f"scoremod's own file `{name}` is missing: looked for {looked}",
        hint="install scoremod again, or run it from a complete checkout",
    )


def read_text(name: str) -> str:
    """Return the text of the file called `name`."""
    return path(name).read_text(encoding="utf-8")

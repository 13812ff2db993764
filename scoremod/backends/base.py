"""What a backend is: a name, a folder of templates, a spelling, and a way to compile text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..emit import Spelling
from ..plan import DeviceFunction


@dataclass(frozen=True)
class Backend:
    """A target of rendered text."""

    name: str
    templates: str  # folder below templates/
    spelling: Spelling
    define: Callable[[DeviceFunction], str]  # a device function as text
    compile: Callable[[str], Any]

"""What a backend is: a name, templates, how a function is spelled, and how text is compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..plan import DeviceFunction, Param


@dataclass(frozen=True)
class Backend:
    """A target of rendered text."""

    name: str
    templates: str  # folder below templates/
    define: Callable[[DeviceFunction, Any], str]  # a device function of a plan as text
    names: Callable[[Sequence[Param]], list[str]]  # the arguments that captures become
    compile: Callable[..., Any]
    borrowed: str = ""  # a folder whose shared steps serve too, once translated
    translate: Callable[[str], str] = str

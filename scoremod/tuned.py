"""Notes beside the cache of kernels: which configuration `bench --tune` found to be the fastest."""

from __future__ import annotations

import dataclasses
from typing import Any

from .cache import CACHE, fingerprint, key
from .plan import Typed
from .plan_hopper import Config
from .plan_hopper_backward import BackwardConfig
from .target import Target


def noted(program: Typed, what: tuple[object, ...], target: Target) -> dict[str, Any] | None:
    """What was noted for a kernel. A bundle brings the kernels it was built with."""
    return None if program.bundle else CACHE.note(_key(what, target))


def keep(
    what: tuple[object, ...],
    target: Target,
    config: Config | BackwardConfig,
    measured: dict[str, Any],
) -> None:
    """Note the best configuration for calls from now on, in other processes too."""
    CACHE.put_note(_key(what, target), {"config": dataclasses.asdict(config), **measured})


def _key(what: tuple[object, ...], target: Target) -> str:
    return key("tuned", fingerprint(), what, target)

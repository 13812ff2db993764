"""One line for a test suite: a variant is what its source says, forward and backward.

def test_my_variant():
    assert_variant(alibi & causal)
"""

from __future__ import annotations

from typing import Any

from .api import Variant
from .check import Report


def assert_variant(variant: Variant, **captures: Any) -> Report:
    """Compare a variant with the oracle on every backend here; see `Variant.check`."""
    return variant.check(captures=captures)

"""Counts of calls: how much work something is, whatever machine and load the tests run on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def num_calls(f: Callable[[], object]) -> int:
    """Calls of Python and C functions in this thread while ``f()`` runs."""
    found, before = 0, sys.getprofile()

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        f()
    finally:
        sys.setprofile(before)
    return found

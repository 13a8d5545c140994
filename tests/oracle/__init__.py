"""Oracles nobody here wrote: llama.cpp and ggml from a prebuilt wheel, for tests and benchmarks only.

`require()` decides whether they can be had. Where the wheel exists (Linux on x86-64) it must be installed: a missing
one is an error, not a skip, so that a run without oracles cannot look like a success.
"""

from __future__ import annotations

import importlib.util
import platform
import sys

import pytest

WHEEL = "llama-cpp-py-sync==0.11739"  # llama.cpp b11739


def require() -> None:
    """Skip the calling test where no wheel of llama.cpp exists; fail it where one exists but is not installed."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        pytest.skip(
            f"no {WHEEL} wheel for {sys.platform} on {platform.machine()}: the llama.cpp oracle cannot run here"
        )
    if importlib.util.find_spec("llama_cpp_py_sync") is None:
        pytest.fail(f"the llama.cpp oracle is missing: pip install '{WHEEL}' (part of the extra `test`)", pytrace=False)

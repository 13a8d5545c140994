"""Who computes an operation that has a kernel: Triton or the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

Result = TypeVar("Result")  # an array or a pytree of some

BACKENDS = ("reference", "triton")


def interprets() -> bool:
    """Say whether a kernel that is asked for runs in Pallas' interpreter: without a GPU, which only tests want."""
    return jax.default_backend() == "cpu"


def on_backend(
    backend: str | None, kernel: Callable[..., Result], plain: Callable[..., Result], *operands: Any
) -> Result:
    """Call ``kernel`` or ``plain``.

    Args:
        backend: ``"triton"`` or ``"reference"``; None = Triton on CUDA, the reference elsewhere.

    Raises:
        ValueError: `backend` is unknown.
    """
    if backend is None:
        return jax.lax.platform_dependent(*operands, cuda=kernel, default=plain)
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; known: {', '.join(BACKENDS)}")
    return (kernel if backend == "triton" else plain)(*operands)

"""Who computes an operation that has a kernel: Triton, Mosaic or the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

Result = TypeVar("Result")  # an array or a pytree of some


def interprets() -> bool:
    """Say whether a kernel that is asked for runs in Pallas' interpreter: without a GPU, which only tests want."""
    return jax.default_backend() == "cpu"


def on_backend(
    backend: str | None,
    triton: Callable[..., Result],
    plain: Callable[..., Result],
    *operands: Any,
    mosaic: Callable[..., Result] | None = None,
) -> Result:
    """Call one of the functions.

    Args:
        backend: ``"reference"`` for ``plain``, ``"triton"``, ``"mosaic"`` where there is such a kernel; None = Mosaic,
            or else Triton, on CUDA, the reference elsewhere.

    Raises:
        ValueError: `backend` is unknown.
    """
    if backend is None:
        return jax.lax.platform_dependent(*operands, cuda=mosaic or triton, default=plain)
    known = {"reference": plain, "triton": triton, **({} if mosaic is None else {"mosaic": mosaic})}
    if backend not in known:
        raise ValueError(f"backend={backend!r} is unknown; known: {', '.join(known)}")
    return known[backend](*operands)

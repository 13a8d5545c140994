"""Who computes an operation that has a kernel: Triton or the reference."""

from __future__ import annotations

from collections.abc import Callable

import jax

BACKENDS = ("reference", "triton")


def on_backend(
    backend: str | None, kernel: Callable[..., jax.Array], plain: Callable[..., jax.Array], *operands: jax.Array
) -> jax.Array:
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

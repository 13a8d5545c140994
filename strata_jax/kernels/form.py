"""How errors name the arrays that they refuse."""

from __future__ import annotations

import jax


def form(array: jax.Array) -> str:
    """Return dtype and shape, as in ``float32[4, 8]``."""
    return f"{array.dtype}{list(array.shape)}"

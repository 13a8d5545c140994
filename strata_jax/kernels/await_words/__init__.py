"""Words from the host that a program may be started before: it waits for them on the device.

A round's programs take the host longer to start than parts of it take the GPU. Started while the round before runs,
they find their window in host memory as soon as the host has written it, and nothing is started in between.

The host writes the words, then their number. The device takes words whose number is the one it wants; after ``polls``
looks at the number it goes on without: all words are 0 then, which asks a round for nothing. Nothing waits forever.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from strata_jax.kernels.await_words import reference
from strata_jax.kernels.backend import on_backend
from strata_jax.kernels.form import form

__all__ = ["POLLS", "await_words"]

POLLS = 2**20
"""Looks at the number: 1.2 s over the link of an H200, one after the other."""


def await_words(
    box: jax.Array, number: jax.Array, *, polls: int = POLLS, backend: str | None = None, interpret: bool = False
) -> jax.Array:
    """Return the words i32[n] of a box once they have a number; zeros if they did not get it.

    Args:
        box: i32[1 + n], the number and then the words; on a GPU it may be in host memory.
        number: i32[1], the wanted one.
        polls: looks at the number, at least 1; the reference, which is for devices that nobody writes to meanwhile,
            looks once.
        backend: ``"reference"`` or ``"triton"``; None = Triton on CUDA, the reference elsewhere.
        interpret: run the Triton kernel in Pallas' interpreter, on any device.

    Raises:
        ValueError: shapes or types do not fit, `polls` is not positive, or `backend` is unknown.
    """
    if box.ndim != 1 or box.shape[0] < 2 or box.dtype != jnp.int32:
        raise ValueError(f"a box is i32[1 + n] with n from 1, got {form(box)}")
    if number.shape != (1,) or number.dtype != jnp.int32:
        raise ValueError(f"the number is i32[1], got {form(number)}")
    if polls < 1:
        raise ValueError(f"polls={polls}: the number is looked at once at least")

    def on_triton(box: jax.Array, number: jax.Array) -> jax.Array:
        from strata_jax.kernels.await_words import triton

        return triton.await_words(box, number, polls, interpret=interpret)

    return on_backend(backend, on_triton, reference.await_words, box, number)

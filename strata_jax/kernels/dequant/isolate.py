"""A materialisation point inside a jitted program: a call that XLA must not inline.

Why it exists (measured 2026-08, jax 0.10.2, CPU): XLA-CPU fuses the reshape that follows a decoder into the decoder's
loop, which then runs over flat weight numbers and finds block, group and lane by division: Q4_K ran at 0.8 instead of
8.2 weights/ns on two cores. It also fuses small per-group values (scales, codebook words) into the per-weight loop,
where they are computed again for each weight. `lax.optimization_barrier` stops neither: it is gone before fusion runs.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def isolated(fn: Callable[..., jax.Array], *args: jax.Array) -> jax.Array:
    """Return ``fn(*args)``, compiled on CPU as its own function, so that the result is written to memory once.

    `fn` takes arrays and returns one array; it may hold the slicing of its input, so that only the slice is read. On
    other platforms this is a plain call (decided when the program is lowered, not by the machine that traces it).
    """

    def body(*args: jax.Array) -> jax.Array:
        with set_xla_metadata(inlineable=None):  # not for calls inside, jnp functions among them
            return fn(*args)

    def call(*args: jax.Array) -> jax.Array:
        with set_xla_metadata(inlineable="false"):
            return jax.jit(body)(*args)

    return jax.lax.platform_dependent(*args, cpu=call, default=fn)

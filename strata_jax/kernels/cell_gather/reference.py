"""Plain `jnp`: every run from both arrays, then a choice; what is not chosen comes from row 0, which is in a cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def gather_runs(
    arena: jax.Array, store: jax.Array, page: jax.Array, row: jax.Array, first_word: jax.Array, num_words: int
) -> jax.Array:
    """See `strata_jax.kernels.cell_gather.gather_runs`."""
    dims = jax.lax.GatherDimensionNumbers(offset_dims=(page.ndim,), collapsed_slice_dims=(0,), start_index_map=(0, 1))
    in_store = page < 0

    def read(array: jax.Array, line: jax.Array) -> jax.Array:
        index = jnp.stack([line, first_word], axis=-1)
        mode = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
        return jax.lax.gather(array, index, dims, (1, num_words), mode=mode)

    return jnp.where(
        in_store[..., None], read(store, jnp.where(in_store, row, 0)), read(arena, jnp.where(in_store, 0, page))
    )

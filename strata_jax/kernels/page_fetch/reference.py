"""One expert after the other, by slices; what lies behind a blob in its last page becomes 0."""

from __future__ import annotations

from itertools import accumulate

import jax
import jax.numpy as jnp


def fetch_pages(
    bank: jax.Array, experts: jax.Array, pages: jax.Array, count: jax.Array, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """See `strata_jax.kernels.page_fetch.fetch_pages`."""
    page_words, num_words = arrays[0].shape[1], bank.shape[1]
    num_pages = -(-num_words // page_words)
    ends = list(accumulate(array.shape[0] for array in arrays))

    def step(i: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        words = jax.lax.dynamic_index_in_dim(bank, experts[i], keepdims=False)
        words = jnp.pad(jax.device_put(words, jax.memory.Space.Device), (0, num_pages * page_words - num_words))
        run = words.reshape(num_pages, page_words)

        def written(array: jax.Array, first: int, end: int) -> jax.Array:
            if len(arrays) == 1:
                return jax.lax.dynamic_update_slice(array, run, (pages[i], 0))
            return jax.lax.cond(
                (pages[i] >= first) & (pages[i] < end),
                lambda array: jax.lax.dynamic_update_slice(array, run, (pages[i] - first, 0)),
                lambda array: array,
                array,
            )

        return tuple(written(a, first, end) for a, first, end in zip(arrays, (0, *ends), ends))

    return jax.lax.fori_loop(0, count[0], step, arrays)

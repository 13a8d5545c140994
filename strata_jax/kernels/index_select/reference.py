"""Plain `jnp`: a product and a sort."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def index_scores(q: jax.Array, keys: jax.Array, seen: jax.Array) -> jax.Array:
    """See `strata_jax.kernels.index_select.index_scores`."""
    del seen  # what a token does not see may hold anything
    dots = jnp.einsum("thd,bd->thb", q, keys, precision=jax.lax.Precision.HIGHEST)
    return jnp.sum(jax.nn.relu(dots), axis=1)


def best_blocks(scores: jax.Array, seen: jax.Array, num_kept: int) -> jax.Array:
    """See `strata_jax.kernels.index_select.best_blocks`."""
    num_blocks = scores.shape[1]
    visible = jnp.arange(num_blocks) < seen[:, None]
    scores = jnp.where(visible, jnp.where(scores > 0, scores, 0.0), -1.0)
    scores = jnp.pad(scores, ((0, 0), (0, max(0, num_kept - num_blocks))), constant_values=-1.0)
    values, found = jax.lax.top_k(scores, num_kept)
    found = jnp.sort(jnp.where(values >= 0, found, scores.shape[1]), axis=1)
    return jnp.where(found < scores.shape[1], found, 0)

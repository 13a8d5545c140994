"""The gated delta net on a prompt as a recurrence over tokens in plain jnp: the oracle of the kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def gdn_chunks(
    q: jax.Array, k: jax.Array, v: jax.Array, log_a: jax.Array, beta: jax.Array, memory: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """As `strata_jax.kernels.gdn_chunks.gdn_chunks`."""
    copies = (1, memory.shape[0] // k.shape[1], 1)
    kept = jnp.arange(q.shape[0]) < count

    def step(state: tuple[jax.Array, jax.Array], token: tuple[jax.Array, ...]) -> tuple[tuple, jax.Array]:
        q, k, v, log_a, beta, real = token
        moving, last = state
        moving = jnp.exp(log_a)[:, None, None] * moving
        delta = beta[:, None] * (v - _times(k, moving))
        moving = moving + k[:, :, None] * delta[:, None, :]
        return (moving, jnp.where(real, moving, last)), _times(q, moving)

    tokens = jnp.tile(q, copies), jnp.tile(k, copies), v, log_a, beta, kept
    (_, memory), out = jax.lax.scan(step, (memory, memory), tokens)
    return out, memory


def _times(x: jax.Array, memory: jax.Array) -> jax.Array:
    return jnp.einsum("hk,hkv->hv", x, memory, precision=jax.lax.Precision.HIGHEST)

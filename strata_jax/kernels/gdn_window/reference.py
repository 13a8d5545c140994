"""The gated delta net as a recurrence over tokens in plain jnp: the oracle of the kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from strata_jax.kernels.gdn_window.rows import GdnVectors, WindowRows

_einsum = jax.tree_util.Partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def window(
    qkv: jax.Array,
    gate: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    w: GdnVectors,
    memory: jax.Array,
    history: jax.Array,
    *,
    eps: float,
) -> tuple[jax.Array, WindowRows]:
    """As `strata_jax.kernels.gdn_window.gdn_window`."""
    num_tokens, num_heads, width = qkv.shape[0], memory.shape[0], memory.shape[1]
    inputs, taps = jnp.concatenate([history, qkv]), w.conv.shape[1]
    mixed = jax.nn.silu(sum(inputs[j : j + num_tokens] * w.conv[:, j] for j in range(taps)))
    heads = mixed.reshape(num_tokens, -1, width)
    num_keys = (heads.shape[1] - num_heads) // 2
    q = _l2_norm(heads[:, :num_keys], eps) / width**0.5
    k, v = _l2_norm(heads[:, num_keys : 2 * num_keys], eps), heads[:, 2 * num_keys :]
    decay, strength = jnp.exp(w.a * jax.nn.softplus(alpha + w.dt_bias)), jax.nn.sigmoid(beta)
    deltas, outs = [], []
    for t in range(num_tokens):
        query, key = _per_value_head(q[t], num_heads), _per_value_head(k[t], num_heads)
        memory = decay[t, :, None, None] * memory
        delta = strength[t, :, None] * (v[t] - _times(key, memory))
        memory = memory + key[:, :, None] * delta[:, None, :]
        outs.append(_times(query, memory))
        deltas.append(delta)
    out = jnp.stack(outs)
    normed = w.norm * out / jnp.sqrt(jnp.mean(out * out, axis=-1, keepdims=True) + eps)
    return normed.reshape(num_tokens, -1) * jax.nn.sigmoid(gate), WindowRows(qkv, k, jnp.stack(deltas), decay)


def advance(memory: jax.Array, history: jax.Array, rows: WindowRows, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `strata_jax.kernels.gdn_window.gdn_advance`."""

    def step(t: jax.Array, memory: jax.Array) -> jax.Array:
        key = _per_value_head(rows.keys[t], memory.shape[0])
        return rows.decay[t, :, None, None] * memory + key[:, :, None] * rows.deltas[t][:, None, :]

    inputs = jnp.concatenate([history, rows.inputs])
    return (
        jax.lax.fori_loop(0, count, step, memory),
        jax.lax.dynamic_slice_in_dim(inputs, count, history.shape[0]),
    )


def _times(x: jax.Array, memory: jax.Array) -> jax.Array:
    return jnp.einsum("hk,hkv->hv", x, memory, precision=jax.lax.Precision.HIGHEST)


def _per_value_head(x: jax.Array, num_heads: int) -> jax.Array:
    """f32[Hk, D] -> f32[Hv, D]: value head h uses key head ``h mod Hk``."""
    return jnp.tile(x, (num_heads // x.shape[0], 1))


def _l2_norm(x: jax.Array, eps: float) -> jax.Array:
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)

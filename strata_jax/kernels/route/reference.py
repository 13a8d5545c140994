"""Routing in plain jnp: the oracle of the kernels, and what runs on the CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from strata_jax.kernels.expert_gemv import VectorRows, WindowPlan, pack_input, plan_window


def choose_experts(scores: jax.Array, num_used: int) -> tuple[jax.Array, jax.Array]:
    """As `choose_experts` of the operation."""
    values, ids = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), num_used)
    weights = values / jnp.sum(values, axis=-1, keepdims=True)
    ids, weights = jax.lax.sort((ids, weights), num_keys=1)
    return ids, weights


def keep_real(ids: jax.Array, weights: jax.Array, count: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Mark rows past ``count`` as using no expert: id X, weight 0."""
    real = jnp.arange(ids.shape[0])[:, None] < count
    return jnp.where(real, ids, num_experts), jnp.where(real, weights, 0.0)


def count_uses(ids: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Count resident pairs i32[] and uses of each expert i32[X]; ``ids: i32[T, K]``, X = none."""
    num_experts = pages.shape[0]
    hits = jnp.sum(jnp.where(ids < num_experts, pages[jnp.minimum(ids, num_experts - 1)] >= 0, False))
    uses = jnp.zeros(num_experts + 1, jnp.int32).at[ids.reshape(-1)].add(1)[:num_experts]
    return hits.astype(jnp.int32), uses


def weigh_shared(u: jax.Array, shared_router: jax.Array) -> jax.Array:
    """The weight of the shared expert for each token ``u: f32[T, E]``: f32[T, 1]."""
    return jax.nn.sigmoid(jnp.sum(u * shared_router, axis=-1, keepdims=True))


def route_window(
    scores: jax.Array,
    u: jax.Array,
    shared_router: jax.Array,
    pages: jax.Array,
    count: jax.Array,
    *,
    num_used: int,
    rows: VectorRows,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, WindowPlan, jax.Array]:
    """As `route_window` of the operation."""
    ids, weights = keep_real(*choose_experts(scores, num_used), count, pages.shape[0])
    shared = weigh_shared(u, shared_router)
    return ids, weights, shared, *count_uses(ids, pages), plan_window(ids, pages), pack_input(u, rows)

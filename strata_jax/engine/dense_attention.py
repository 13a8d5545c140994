"""Attention of each token over all cells up to its own, and decoding of cells for attention in plain jnp.

Shapes as in `attention.py`: T tokens, H/G query/K-V heads, d head size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from strata_jax.engine.arena import CellLayout, CellStore, read_cells
from strata_jax.geometry import Geometry
from strata_jax.kernels.kv_codec import decode_k, decode_v

HIGHEST = jax.lax.Precision.HIGHEST
MASKED = -1e30


def dense_attention(
    q: jax.Array,
    arena: jax.Array,
    pages: jax.Array,
    positions: jax.Array,
    end: jax.Array,
    g: Geometry,
    layout: CellLayout,
    store: CellStore | None,
) -> jax.Array:
    """Attention of each token over all cells up to its own, page by page with a running softmax."""
    num_tokens, groups, heads, width = q.shape
    run = layout.cells_per_page

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, out = carry
        written = i * run + jnp.arange(run) < end
        words = read_cells(arena, pages, (i * run)[None], run, layout, store)
        k, v = decode_cells(*words, written[None], g, layout)
        keep = i * run + jnp.arange(run) <= positions[:, None]
        scores = jnp.einsum("tghd,ngd->tghn", q, k, precision=HIGHEST)
        scores = jnp.where(keep[:, None, None, :], scores, MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weight = jnp.where(keep[:, None, None, :], jnp.exp(scores - new_top[..., None]), 0.0)
        shrink = jnp.exp(top - new_top)
        out = out * shrink[..., None] + jnp.einsum("tghn,ngd->tghd", weight, v, precision=HIGHEST)
        return new_top, total * shrink + jnp.sum(weight, axis=-1), out

    shape = (num_tokens, groups, heads)
    start = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, width)))
    _, total, out = jax.lax.fori_loop(0, (end + run - 1) // run, step, start)
    return out / jnp.maximum(total, 1e-30)[..., None]


def decode_cells(
    k: jax.Array, v: jax.Array, keep: jax.Array, g: Geometry, layout: CellLayout
) -> tuple[jax.Array, jax.Array]:
    """Keys and values f32[..., N, G, d] of N cells in runs; those not in ``keep`` may hold anything, NaN included."""
    flat = lambda x: x.reshape(*keep.shape[:-2], -1, x.shape[-1])  # noqa: E731
    v = jnp.where(keep[..., None], v, 0)
    k = decode_k(flat(k), layout.kv_type, g.num_kv_heads, g.head_dim)
    return k, decode_v(flat(v), layout.kv_type, g.num_kv_heads, g.head_dim)

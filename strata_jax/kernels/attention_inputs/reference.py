"""Plain `jnp`, piece by piece."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.kernels.attention_inputs.operands import AttentionInputs, CellShape, Norms, Projections
from strata_jax.kernels.kv_codec import encode_k, encode_v


def prepare(
    projected: Projections,
    norms: Norms,
    tail: jax.Array,
    pages: jax.Array,
    start: jax.Array,
    count: jax.Array,
    arena: jax.Array,
    keys: jax.Array,
    *,
    shape: CellShape,
) -> AttentionInputs:
    """See `strata_jax.kernels.attention_inputs.attention_inputs`."""
    num_tokens, head, index_head = projected.k.shape[0], norms.q.shape[0], norms.index_q.shape[0]
    groups, ratio = shape.num_kv_heads, shape.ratio
    position = start + jnp.arange(num_tokens)

    turn, eps = turns(position, shape), shape.eps
    q = norm_and_turn(projected.query_gate.reshape(num_tokens, -1, 2 * head)[..., :head], norms.q, turn, eps)
    index_q = norm_and_turn(projected.index_q.reshape(num_tokens, -1, index_head), norms.index_q, turn, eps)
    k = norm_and_turn(projected.k.reshape(num_tokens, groups, head), norms.k, turn, eps)
    k_words, v_words = encode_k(k, shape.kv_type), encode_v(projected.v.reshape(k.shape), shape.kv_type)
    group = jnp.minimum(position // shape.cells_per_page, pages.shape[0] - 1)
    in_page, page = position - group * shape.cells_per_page, pages[group]
    dropped = (jnp.arange(num_tokens) >= count) | (position >= shape.num_cells) | (page < 0)
    page = jnp.where(dropped, arena.shape[0], page)[:, None]
    first_value = shape.cells_per_page * k_words.shape[1]
    for words, first in ((k_words, 0), (v_words, first_value)):
        at = first + in_page[:, None] * words.shape[1] + jnp.arange(words.shape[1])
        arena = arena.at[page, at].set(words, mode="drop")

    raw = jnp.concatenate([tail, projected.index_k])  # raw[i] belongs to position start - (r - 1) + i
    block = blocks_of(start, num_tokens, ratio)
    first_row = block * ratio - start + ratio - 1
    mean = jnp.mean(raw[first_row[:, None] + jnp.arange(ratio)], axis=1)
    place = jnp.where((block + 1) * ratio <= start + count, block, keys.shape[0])
    new = norm_and_turn(mean[:, None], norms.index_k, turns(block * ratio, shape), eps)[:, 0]
    keys = keys.at[place].set(new, mode="drop")
    q = q.reshape(num_tokens, groups, -1, head) / head**0.5
    seen = jnp.minimum((position + 1) // ratio, keys.shape[0])
    return AttentionInputs(arena, keys, q, index_q / index_head**0.5, raw, position, seen)


def norm_and_turn(x: jax.Array, gamma: jax.Array, turn: jax.Array, eps: float) -> jax.Array:
    """Norm heads ``x: f32[T, n, d]`` and rotate their first values in pairs (i, i + rope_dim / 2) by `turns`."""
    x = gamma * x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    half, cos, sin = turn.shape[-1], turn[:, None, 0], turn[:, None, 1]
    a, b = x[..., :half], x[..., half : 2 * half]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], axis=-1)


def blocks_of(start: jax.Array, num_tokens: int, ratio: int) -> jax.Array:
    """The blocks of ``ratio`` cells that tokens from ``start`` on may complete: i32[T / r + 1]."""
    return start // ratio + jnp.arange(num_tokens // ratio + 1)


def turns(position: jax.Array, shape: CellShape) -> jax.Array:
    """Cosine and sine of each rotated pair at positions i32[T]: f32[T, 2, rope_dim / 2]."""
    half = shape.rope_dim // 2
    frequency = jnp.asarray(shape.rope_base ** (-np.arange(half, dtype=np.float64) / half), jnp.float32)
    angle = position[:, None].astype(jnp.float32) * frequency
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)

"""Attention over K/V cells in arena pages, with block-sparse selection by an indexer.

A token at position p (0-based) sees ``nb = (p + 1) // r`` complete blocks of r cells. It keeps the best
``top_k // r`` of them (ties: the lower block index) and the incomplete tail. A block's index key is the mean of its r
raw index keys, normed, rotated at the block's first position; it is written once, when the block completes, so rejected
drafts are overwritten before anything reads them. Shapes: T tokens, H/G query/K-V heads, d head size, B blocks.
Source: qwen4exp (`attn_*`, `indexer.*`, `attention.compress_ratios`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from strata_jax.engine import attention_kernels as kernels
from strata_jax.engine.arena import CellLayout, CellStore, read_cells, write_cells
from strata_jax.engine.dense_attention import HIGHEST, MASKED, decode_cells, dense_attention
from strata_jax.engine.layers import rms_norm, rope_tables, rotate
from strata_jax.engine.matrix import Matrix, linear, linears, matmul_t
from strata_jax.geometry import Geometry
from strata_jax.kernels.attention_inputs import Norms, Projections
from strata_jax.kernels.kv_codec import encode_k, encode_v
from strata_jax.memory.attention_kernels import attention_problem
from strata_jax.memory.layout import GATHER_TILE_VALUES

SCORE_TILE_BLOCKS = 256


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class IndexerWeights:
    """Projections of index queries (all heads) and of the raw index key, and their norms."""

    q: Matrix
    k: Matrix
    q_norm: jax.Array
    k_norm: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionWeights:
    """``q`` rows are per head d query rows then d gate rows; ``ratio`` is r, 0 for dense attention (no indexer)."""

    q: Matrix
    k: Matrix
    v: Matrix
    out: Matrix
    q_norm: jax.Array
    k_norm: jax.Array
    indexer: IndexerWeights | None
    ratio: int = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class IndexState:
    """``keys: f32[B, d_index]`` of complete blocks; ``tail: f32[r - 1, d_index]``, the last raw keys."""

    keys: jax.Array
    tail: jax.Array


def empty_state(g: Geometry, ratio: int, num_cells: int) -> IndexState | None:
    """The index state before the first token; None for dense attention."""
    if ratio == 0:
        return None
    keys = jnp.zeros((num_cells // ratio + 1, g.index_dim), jnp.float32)
    return IndexState(keys, jnp.zeros((ratio - 1, g.index_dim), jnp.float32))


def attend(
    u: jax.Array,
    w: AttentionWeights,
    arena: jax.Array,
    pages: jax.Array,
    state: IndexState | None,
    start: jax.Array,
    count: jax.Array,
    g: Geometry,
    layout: CellLayout,
    store: CellStore | None = None,
) -> tuple[jax.Array, jax.Array, IndexState | None]:
    """Attend from T tokens at positions ``start + i``, of which the first ``count`` are real.

    Args:
        pages: i32[N], where the layer's groups of cells are. store: where those without a page are; new cells have one.

    Returns:
        output f32[T, E] (0 in rows past ``count``), the arena with the new cells, and the rows for `advance`. Rows past
        ``count`` write nothing.
    """
    num_tokens = u.shape[0]
    valid = jnp.arange(num_tokens) < count
    query_gate, k, v = linears(u, (w.q, w.k, w.v))
    rows: IndexState | None
    if w.indexer is not None and state is not None and _by_kernels(w.ratio, g, layout):
        index_q, index_k = linears(u, (w.indexer.q, w.indexer.k))
        out, arena, keys, raw = kernels.sparse(
            Projections(query_gate, k, v, index_q, index_k),
            Norms(w.q_norm, w.k_norm, w.indexer.q_norm, w.indexer.k_norm),
            state.keys, state.tail, arena, pages, store, start, count, w.ratio, g, layout,
        )  # fmt: skip
        rows = IndexState(keys, raw)
    else:
        out, arena, rows = _in_jnp(u, query_gate, k, v, w, arena, pages, state, start, count, valid, g, layout, store)
    gate = jax.nn.sigmoid(query_gate.reshape(num_tokens, g.num_heads, 2 * g.head_dim)[..., g.head_dim :])
    gated = (out.reshape(num_tokens, g.num_heads, g.head_dim) * gate).reshape(num_tokens, -1)
    # rows past `count` see cells that nobody has written; their NaN would reach real rows in a GDN block's products
    return linear(jnp.where(valid[:, None], gated, 0.0), w.out), arena, rows


def advance(before: IndexState | None, after: IndexState | None, count: jax.Array) -> IndexState | None:
    """The index state once only the first ``count`` tokens of the window that gave ``after`` are kept."""
    if before is None or after is None:
        return None
    return IndexState(after.keys, jax.lax.dynamic_slice_in_dim(after.tail, count, before.tail.shape[0]))


def _by_kernels(ratio: int, g: Geometry, layout: CellLayout) -> bool:
    return layout.kernels and attention_problem(g, ratio, layout.kv_type) is None


def _in_jnp(
    u: jax.Array,
    query_gate: jax.Array,
    k: jax.Array,
    v: jax.Array,
    w: AttentionWeights,
    arena: jax.Array,
    pages: jax.Array,
    state: IndexState | None,
    start: jax.Array,
    count: jax.Array,
    valid: jax.Array,
    g: Geometry,
    layout: CellLayout,
    store: CellStore | None,
) -> tuple[jax.Array, jax.Array, IndexState | None]:
    """What `attend` does between the products: f32[T, G, H/G, d], the arena, the rows for `advance`."""
    num_tokens = u.shape[0]
    positions = start + jnp.arange(num_tokens)
    cos, sin = rope_tables(positions, g.rope_dim, g.rope_base)
    query_gate = query_gate.reshape(num_tokens, g.num_heads, 2 * g.head_dim)
    q = rotate(rms_norm(query_gate[..., : g.head_dim], w.q_norm, g.rms_eps), cos, sin)
    k = k.reshape(num_tokens, g.num_kv_heads, g.head_dim)
    k = rotate(rms_norm(k, w.k_norm, g.rms_eps), cos, sin)
    v = v.reshape(num_tokens, g.num_kv_heads, g.head_dim)
    k, v = encode_k(k, layout.kv_type), encode_v(v, layout.kv_type)
    arena = write_cells(arena, pages, positions, valid, k, v, layout)
    q = q.reshape(num_tokens, g.num_kv_heads, g.num_heads // g.num_kv_heads, g.head_dim) / g.head_dim**0.5
    if w.indexer is None or state is None:
        return dense_attention(q, arena, pages, positions, start + count, g, layout, store), arena, None
    rows = _update_keys(u, w.indexer, w.ratio, state, start, count, g)
    blocks, chosen = _select(u, w.indexer, w.ratio, rows.keys, positions, start + count, cos, sin, g)
    return _sparse(q, arena, pages, blocks, chosen, positions, w.ratio, g, layout, store), arena, rows


def _update_keys(
    u: jax.Array, w: IndexerWeights, ratio: int, state: IndexState, start: jax.Array, count: jax.Array, g: Geometry
) -> IndexState:
    """Write the keys of the blocks that complete in this window; ``tail`` of the result holds all raw keys at hand."""
    raw = jnp.concatenate([state.tail, linear(u, w.k)])  # raw[i] belongs to position start - (r - 1) + i
    num_blocks = u.shape[0] // ratio + 1
    block = start // ratio + jnp.arange(num_blocks)
    first_row = block * ratio - start + ratio - 1
    members = raw[first_row[:, None] + jnp.arange(ratio)]
    cos, sin = rope_tables(block * ratio, g.rope_dim, g.rope_base)
    keys = rotate(rms_norm(jnp.mean(members, axis=1), w.k_norm, g.rms_eps)[:, None], cos, sin)[:, 0]
    complete = (block + 1) * ratio <= start + count
    slot = jnp.where(complete, block, state.keys.shape[0])
    return IndexState(state.keys.at[slot].set(keys, mode="drop"), raw)


def _select(
    u: jax.Array,
    w: IndexerWeights,
    ratio: int,
    keys: jax.Array,
    positions: jax.Array,
    end: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    g: Geometry,
) -> tuple[jax.Array, jax.Array]:
    """The kept blocks of each token i32[T, k] and which entries count bool[T, k]."""
    num_tokens = u.shape[0]
    q = linear(u, w.q).reshape(num_tokens, g.index_heads, g.index_dim)
    q = rotate(rms_norm(q, w.q_norm, g.rms_eps), cos, sin) / g.index_dim**0.5
    flat = q.reshape(num_tokens * g.index_heads, g.index_dim)
    seen = (positions + 1) // ratio

    def score(first: jax.Array | int, tile: jax.Array) -> jax.Array:
        dots = matmul_t(flat, tile).reshape(num_tokens, g.index_heads, tile.shape[0])
        block = first + jnp.arange(tile.shape[0])
        return jnp.where(block < seen[:, None], jnp.sum(jax.nn.relu(dots), axis=1), -1.0)

    num_blocks = keys.shape[0]
    if num_blocks <= SCORE_TILE_BLOCKS:
        scores = score(0, keys)
    else:
        # a dynamic number of tiles, so that one program serves every context length
        last = num_blocks - SCORE_TILE_BLOCKS

        def step(i: jax.Array, scores: jax.Array) -> jax.Array:
            first = jnp.minimum(i * SCORE_TILE_BLOCKS, last)
            tile = jax.lax.dynamic_slice_in_dim(keys, first, SCORE_TILE_BLOCKS)
            return jax.lax.dynamic_update_slice_in_dim(scores, score(first, tile), first, 1)

        num_tiles = (end // ratio + SCORE_TILE_BLOCKS - 1) // SCORE_TILE_BLOCKS
        scores = jax.lax.fori_loop(0, num_tiles, step, jnp.full((num_tokens, num_blocks), -1.0))
    values, blocks = jax.lax.top_k(scores, min(g.index_top_k // ratio, num_blocks))
    return blocks, values >= 0


def _sparse(
    q: jax.Array,
    arena: jax.Array,
    pages: jax.Array,
    blocks: jax.Array,
    chosen: jax.Array,
    positions: jax.Array,
    ratio: int,
    g: Geometry,
    layout: CellLayout,
    store: CellStore | None,
) -> jax.Array:
    """Attention of each token over its own kept blocks and tail: f32[T, G, H/G, d]."""
    tail = (positions[:, None] + 1) // ratio
    last_block = layout.num_cells // ratio - 1
    blocks = jnp.concatenate([jnp.where(chosen, blocks, 0), jnp.minimum(tail, last_block)], axis=1)
    # of a chosen block all cells count; of the tail block those up to the token itself; of padding none
    member = jnp.arange(ratio)
    mask = jnp.concatenate(
        [
            jnp.broadcast_to(chosen[:, :, None], (*chosen.shape, ratio)),
            tail[:, :, None] * ratio + member <= positions[:, None, None],
        ],
        axis=1,
    )

    def tile(args: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q_t, blocks_t, mask_t = args
        num_tokens = q_t.shape[0]
        keep = mask_t.reshape(num_tokens, -1)
        k, v = decode_cells(*read_cells(arena, pages, blocks_t * ratio, ratio, layout, store), mask_t, g, layout)
        scores = jnp.einsum("tghd,tngd->tghn", q_t, k, precision=HIGHEST)
        scores = jnp.where(keep[:, None, None, :], scores, MASKED)
        weight = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
        return jnp.einsum("tghn,tngd->tghd", weight, v, precision=HIGHEST)

    per_token = blocks.shape[1] * ratio * g.num_kv_heads * g.head_dim
    tile_tokens = max(1, min(q.shape[0], GATHER_TILE_VALUES // per_token))
    return _map_tiles(tile, (q, blocks, mask), tile_tokens)


def _map_tiles(f: Callable[[Any], jax.Array], args: tuple[jax.Array, ...], tile_tokens: int) -> jax.Array:
    """Apply ``f`` to equal tiles of the leading axis (the last one padded with zeros)."""
    num_tokens = args[0].shape[0]
    if num_tokens <= tile_tokens:
        return f(args)
    num_tiles = -(-num_tokens // tile_tokens)
    pad = num_tiles * tile_tokens - num_tokens

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(num_tiles, tile_tokens, *x.shape[1:])

    out = jax.lax.map(f, tuple(split(x) for x in args))
    return out.reshape(num_tiles * tile_tokens, *out.shape[2:])[:num_tokens]

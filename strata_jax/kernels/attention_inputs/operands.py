"""What goes into `attention_inputs` and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Projections:
    """Products of the tokens with the weights of an attention block, as they are.

    Attributes:
        query_gate: f32[T, H * 2 d], per head d query values, then d of its gate.
        k, v: f32[T, G * d].
        index_q: f32[T, I * e].
        index_k: f32[T, e].
    """

    query_gate: jax.Array
    k: jax.Array
    v: jax.Array
    index_q: jax.Array
    index_k: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Norms:
    """Weights of the norms of queries and keys f32[d], and of the indexer's f32[e]."""

    q: jax.Array
    k: jax.Array
    index_q: jax.Array
    index_k: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionInputs:
    """Results.

    Attributes:
        arena: u32[P, W] with the new cells.
        keys: f32[B, e] with the keys of blocks that are complete now.
        q: f32[T, G, h, d], divided by the square root of d.
        index_q: f32[T, I, e], divided by the square root of e.
        raw: f32[r - 1 + T, e], the raw index keys of the last r - 1 tokens before, then those of the T tokens.
        positions: i32[T].
        seen: i32[T], the complete blocks that each token sees, at most B.
    """

    arena: jax.Array
    keys: jax.Array
    q: jax.Array
    index_q: jax.Array
    raw: jax.Array
    positions: jax.Array
    seen: jax.Array


@dataclass(frozen=True, slots=True)
class CellShape:
    """How cells lie in pages, and what else is static.

    Attributes:
        kv_type: one of `kv_types.KV_TYPES`.
        num_kv_heads, cells_per_page, num_cells: G, cells of a page, cells of the context.
        ratio: r, cells of a block.
        rope_dim, rope_base: values of a head that are rotated, and the base of their frequencies.
        eps: of the norms.
    """

    kv_type: str
    num_kv_heads: int
    cells_per_page: int
    num_cells: int
    ratio: int
    rope_dim: int
    rope_base: float
    eps: float

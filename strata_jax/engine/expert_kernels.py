"""The routed experts of a block by kernels on planes: what `mixture` runs where the bank holds planes.

Both functions are jitted inside the programs that call them, so that blocks of one layout are traced and lowered once,
not once a layer. Without a GPU the kernels run in Pallas' interpreter, which is slow and only good for tests.
Shapes: T tokens, X experts, K experts per token, E model width, F expert width, P = T K pairs.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from strata_jax.kernels.expert_gemv import ExpertLayout, expert_gemv
from strata_jax.kernels.grouped_matmul import (
    arena_lines,
    choose_blocks,
    combine,
    grouped_down,
    grouped_swiglu,
    sort_pairs,
    tile_map,
)


def window(
    u: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    arrays: tuple[jax.Array, ...],
    bank: jax.Array,
    pages: jax.Array,
    layout: ExpertLayout,
) -> jax.Array:
    """Few tokens, in float32: arguments and result as of `expert_gemv`."""
    return _window(u, ids, weights, arrays, bank, pages, layout=layout, interpret=_interprets())


def chunk(
    u: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    arrays: tuple[jax.Array, ...],
    bank: jax.Array,
    pages: jax.Array,
    layout: ExpertLayout,
) -> jax.Array:
    """Many tokens, operands of the products in bfloat16: f32[T, E].

    Each array of the arena is one source of experts and the bank another, read where it lies: experts of one source are
    computed by one launch of each product. What a token's experts give is kept in bfloat16 until it is summed, in
    float32 and in ascending order of expert.

    Args:
        u: f32[T, E]. ids: i32[T, K], X = none. weights: f32[T, K], 0 there.
        arrays: the arena's core and its segments; bank: u32[X, blob_words]; pages: i32[X], as of `expert_gemv`.
    """
    return _chunk(u, ids, weights, arrays, bank, pages, layout=layout, interpret=_interprets())


@partial(jax.jit, static_argnames=("layout", "interpret"))
def _window(
    u: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    arrays: tuple[jax.Array, ...],
    bank: jax.Array,
    pages: jax.Array,
    *,
    layout: ExpertLayout,
    interpret: bool,
) -> jax.Array:
    return expert_gemv(u, ids, weights, arrays, bank, pages, layout, backend="triton", interpret=interpret)


@partial(jax.jit, static_argnames=("layout", "interpret"))
def _chunk(
    u: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    arrays: tuple[jax.Array, ...],
    bank: jax.Array,
    pages: jax.Array,
    *,
    layout: ExpertLayout,
    interpret: bool,
) -> jax.Array:
    num_experts, num_pairs = bank.shape[0], ids.size
    blocks = choose_blocks(num_pairs / num_experts, layout.tile_rows, jax.devices()[0].device_kind)
    pairs = sort_pairs(ids, num_experts, blocks.rows)
    u = u.astype(jnp.bfloat16)
    h = jnp.zeros((num_pairs + blocks.rows, layout.gate.rows), jnp.bfloat16)
    y = jnp.zeros((num_pairs + blocks.rows, layout.down.rows), jnp.bfloat16)  # 0 where no expert was asked
    sources = [(words, *where) for words, where in zip(arrays, arena_lines(arrays, pages), strict=True)]
    sources.append((bank, jnp.arange(num_experts, dtype=jnp.int32), pages < 0))
    for words, lines, chosen in sources:
        tiles = tile_map(pairs, blocks.rows, chosen)
        h = grouped_swiglu(
            u, pairs.token_of, tiles, words, lines, layout, h, blocks, backend="triton", interpret=interpret
        )
        y = grouped_down(h, tiles, words, lines, layout, y, blocks, backend="triton", interpret=interpret)
    return combine(y, pairs.row_of, weights)


def _interprets() -> bool:
    return jax.default_backend() == "cpu"

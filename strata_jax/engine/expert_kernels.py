"""The routed experts of a block by kernels on planes: what `mixture` runs where the bank holds planes.

All are jitted inside the programs that call them, so that blocks of one layout are traced and lowered once,
not once a layer. Without a GPU the kernels run in Pallas' interpreter, which is slow and only good for tests.
Shapes: T tokens, X experts, K experts per token, E model width, F expert width, P = T K pairs.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from strata_jax.kernels import backend
from strata_jax.kernels.expert_gemv import ExpertLayout, input_rows, planned_gemv
from strata_jax.kernels.grouped_matmul import (
    arena_lines,
    choose_blocks,
    combine,
    grouped_down,
    grouped_swiglu,
    sort_pairs,
    tile_map,
)
from strata_jax.kernels.route import Routing, choose_experts, route_window

Source = tuple[jax.Array, jax.Array]
"""Words of experts u32[lines, words_per_line], and the line where each expert starts, i32[X], -1 = it is not there."""


def route(
    scores: jax.Array,
    u: jax.Array,
    shared_router: jax.Array,
    pages: jax.Array,
    count: jax.Array,
    num_used: int,
    layout: ExpertLayout,
) -> Routing:
    """Route a window: arguments and result as of `route_window`."""
    return _route(
        scores, u, shared_router, pages, count, num_used=num_used, layout=layout, interpret=backend.interprets()
    )


def choose(scores: jax.Array, num_used: int) -> tuple[jax.Array, jax.Array]:
    """Route any number of tokens: arguments and result as of `choose_experts`."""
    return _choose(scores, num_used=num_used, interpret=backend.interprets())


def window(
    routing: Routing, arrays: tuple[jax.Array, ...], bank: jax.Array, pages: jax.Array, layout: ExpertLayout
) -> jax.Array:
    """Few tokens, in float32: f32[T, E]; the other arguments as of `expert_gemv`."""
    return _window(routing, arrays, bank, pages, layout=layout, interpret=backend.interprets())


def chunk(
    u: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    arrays: tuple[jax.Array, ...],
    bank: jax.Array,
    pages: jax.Array,
    layout: ExpertLayout,
    staged: tuple[Source, ...] = (),
) -> jax.Array:
    """Many tokens, operands of the products in bfloat16: f32[T, E].

    Each array of the arena is one source of experts, each staging buffer another and the bank, read where it lies, the
    last: experts of one source are computed by one launch of each product. What a token's experts give is kept in
    bfloat16 until it is summed, in float32 and in ascending order of expert.

    Args:
        u: f32[T, E]. ids: i32[T, K], X = none. weights: f32[T, K], 0 there.
        arrays: the arena's core and its segments; bank: u32[X, blob_words]; pages: i32[X], as of `expert_gemv`.
        staged: copies on the device of experts that are not resident; each lies in one of them at most.
    """
    return _chunk(u, ids, weights, arrays, bank, pages, staged, layout=layout, interpret=backend.interprets())


@partial(jax.jit, static_argnames=("num_used", "layout", "interpret"))
def _route(
    scores: jax.Array,
    u: jax.Array,
    shared_router: jax.Array,
    pages: jax.Array,
    count: jax.Array,
    *,
    num_used: int,
    layout: ExpertLayout,
    interpret: bool,
) -> Routing:
    rows = input_rows(layout)
    return route_window(scores, u, shared_router, pages, count, num_used, rows, backend="triton", interpret=interpret)


@partial(jax.jit, static_argnames=("num_used", "interpret"))
def _choose(scores: jax.Array, *, num_used: int, interpret: bool) -> tuple[jax.Array, jax.Array]:
    return choose_experts(scores, num_used, backend="triton", interpret=interpret)


@partial(jax.jit, static_argnames=("layout", "interpret"))
def _window(
    routing: Routing,
    arrays: tuple[jax.Array, ...],
    bank: jax.Array,
    pages: jax.Array,
    *,
    layout: ExpertLayout,
    interpret: bool,
) -> jax.Array:
    return planned_gemv(routing.x, routing.plan, routing.weights, arrays, bank, pages, layout, interpret=interpret)


@partial(jax.jit, static_argnames=("layout", "interpret"))
def _chunk(
    u: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    arrays: tuple[jax.Array, ...],
    bank: jax.Array,
    pages: jax.Array,
    staged: tuple[Source, ...],
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
    tiles = tile_map(pairs, blocks.rows)
    sources = list(zip(arrays, arena_lines(arrays, pages), strict=True))
    missing = pages < 0
    for words, lines in staged:
        sources.append((words, jnp.where(missing, lines, -1)))
        missing &= lines < 0
    sources.append((bank, jnp.where(missing, jnp.arange(num_experts, dtype=jnp.int32), -1)))
    for words, lines in sources:
        h = grouped_swiglu(
            u, pairs.token_of, tiles, words, lines, layout, h, blocks, backend="triton", interpret=interpret
        )
        y = grouped_down(h, tiles, words, lines, layout, y, blocks, backend="triton", interpret=interpret)
    return combine(y, pairs.row_of, weights)

"""The routed experts of a block by kernels on planes: what `mixture` runs where the bank holds planes.

All are jitted inside the programs that call them, so that blocks of one layout are traced and lowered once,
not once a layer. Without a GPU the kernels run in Pallas' interpreter, which is slow and only good for tests.
Shapes: T tokens, X experts, K experts per token, E model width, F expert width, P = T K pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from strata_jax.kernels import backend
from strata_jax.kernels.expert_gemv import ExpertLayout, input_rows, planned_gemv
from strata_jax.kernels.grouped_matmul import (
    Blocks,
    SortedPairs,
    Source,
    TileMap,
    arena_sources,
    choose_blocks,
    combine,
    grouped_down,
    grouped_swiglu,
    sort_pairs,
    tile_map,
)
from strata_jax.kernels.route import Routing, choose_experts, route_window


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertRows:
    """What the experts of a chunk have given so far, a row for each pair of a token and one of its experts.

    What a token's experts give is kept in bfloat16 until it is summed, in float32 and in ascending order of expert: in
    whatever order experts are added, and from wherever their words are read, the sum is the same to the bit.

    Attributes:
        pairs: the pairs, sorted by expert. tiles: of their rows.
        h: bf16[P + pad, F], hidden rows. y: bf16[P + pad, E], outputs; rows of no expert hold anything.
        left: bool[X], experts that have not been added.
    """

    pairs: SortedPairs
    tiles: TileMap
    h: jax.Array
    y: jax.Array
    left: jax.Array


def start_rows(
    u: jax.Array,
    ids: jax.Array,
    arrays: tuple[jax.Array, ...],
    pages: jax.Array,
    layout: ExpertLayout,
    bank: jax.Array | None = None,
) -> ExpertRows:
    """Sort the pairs of a chunk and add what is resident; operands of the products are bfloat16.

    Args:
        u: f32[T, E]. ids: i32[T, K], X = none.
        arrays: the arena's core and its segments; pages: i32[X], as of `expert_gemv`.
        bank: u32[X, blob_words], from which the others are added; None: they are left.
    """
    return _start(u, ids, arrays, pages, bank, layout=layout, interpret=backend.interprets())


def add_rows(rows: ExpertRows, u: jax.Array, words: jax.Array, lines: jax.Array, layout: ExpertLayout) -> ExpertRows:
    """Add experts that are left and lie in one array, a staging buffer say.

    Args:
        u: f32[T, E].
        words: u32[lines, words_per_line]. lines: i32[X], where each expert starts, -1 = it is not there.
    """
    return _add(rows, u, (Source(words, lines),), layout=layout, interpret=backend.interprets())


def sum_rows(rows: ExpertRows, weights: jax.Array) -> jax.Array:
    """The sum of each token's experts, weighted by ``weights: f32[T, K]``: f32[T, E]."""
    return combine(rows.y, rows.pairs, weights)


def count_left(rows: ExpertRows) -> jax.Array:
    """How many experts that some token asked for have not been added: i32[]."""
    return jnp.sum(rows.left & (rows.pairs.count > 0), dtype=jnp.int32)


def chunk(
    u: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    arrays: tuple[jax.Array, ...],
    bank: jax.Array,
    pages: jax.Array,
    layout: ExpertLayout,
) -> jax.Array:
    """Many tokens at once, from the arena and from the bank u32[X, blob_words]: f32[T, E]."""
    return sum_rows(start_rows(u, ids, arrays, pages, layout, bank), weights)


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
def _start(
    u: jax.Array,
    ids: jax.Array,
    arrays: tuple[jax.Array, ...],
    pages: jax.Array,
    bank: jax.Array | None,
    *,
    layout: ExpertLayout,
    interpret: bool,
) -> ExpertRows:
    num_experts, num_pairs = pages.shape[0], ids.size
    blocks = _blocks(num_pairs, num_experts, layout)
    pairs = sort_pairs(ids, num_experts, blocks.rows)
    h, y = (jax.lax.empty((num_pairs + blocks.rows, m.rows), jnp.bfloat16) for m in (layout.gate, layout.down))
    rows = ExpertRows(pairs, tile_map(pairs, blocks.rows), h, y, jnp.ones(num_experts, bool))
    sources = arena_sources(arrays, pages)
    if bank is not None:
        sources.append(Source(bank, jnp.where(_in_none(sources), jnp.arange(num_experts, dtype=jnp.int32), -1)))
    return _add(rows, u, tuple(sources), layout=layout, interpret=interpret)


@partial(jax.jit, static_argnames=("layout", "interpret"))
def _add(
    rows: ExpertRows, u: jax.Array, sources: tuple[Source, ...], *, layout: ExpertLayout, interpret: bool
) -> ExpertRows:
    """The experts of the sources that are left are computed; the products write their rows in place."""
    blocks = _blocks(rows.pairs.row_of.size, rows.left.shape[0], layout)
    sources = tuple(source._replace(lines=jnp.where(rows.left, source.lines, -1)) for source in sources)
    h = grouped_swiglu(
        u.astype(jnp.bfloat16), rows.pairs.token_of, rows.tiles, sources, layout, rows.h, blocks, backend="mosaic",
        interpret=interpret,
    )  # fmt: skip
    y = grouped_down(h, rows.tiles, sources, layout, rows.y, blocks, backend="mosaic", interpret=interpret)
    return replace(rows, h=h, y=y, left=rows.left & _in_none(sources))


def _in_none(sources: Sequence[Source]) -> jax.Array:
    """Which experts no source has: bool[X]."""
    return jnp.stack([source.lines < 0 for source in sources]).all(axis=0)


def _blocks(num_pairs: int, num_experts: int, layout: ExpertLayout) -> Blocks:
    return choose_blocks(num_pairs / num_experts, layout.tile_rows, jax.devices()[0].device_kind)

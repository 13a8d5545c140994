"""Sparse attention of a block by kernels on packed cells: what `attend` runs where they can compute it.

Four or five launches: inputs (norms, rotation, new cells, new block keys), scores, choice, attention and, for windows,
the sum of its pieces. Jitted inside the programs that call it, so that blocks of one layout are traced and lowered
once, not once a layer. Without a GPU the kernels run in Pallas' interpreter, which is slow and only good for tests.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from strata_jax.engine.arena import CellLayout, CellStore
from strata_jax.geometry import Geometry
from strata_jax.kernels import backend
from strata_jax.kernels.attention_inputs import CellShape, Norms, Projections, attention_inputs
from strata_jax.kernels.index_select import best_blocks, index_scores
from strata_jax.kernels.sparse_attention import sparse_attention


def sparse(
    projected: Projections,
    norms: Norms,
    keys: jax.Array,
    tail: jax.Array,
    arena: jax.Array,
    pages: jax.Array,
    store: CellStore | None,
    start: jax.Array,
    count: jax.Array,
    ratio: int,
    g: Geometry,
    layout: CellLayout,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Write the cells of T tokens, choose the blocks that each of them keeps, and attend to these.

    Args:
        keys: f32[B, d_index], of complete blocks. tail: f32[r - 1, d_index], the last raw index keys.

    Returns:
        f32[T, G, H/G, d], the arena, the keys with those of the blocks that are complete now, and the tail followed by
        the tokens' own raw keys.
    """
    shape = CellShape(
        layout.kv_type, g.num_kv_heads, layout.cells_per_page, layout.num_cells, ratio, g.rope_dim, g.rope_base,
        g.rms_eps,
    )  # fmt: skip
    return _sparse(
        projected, norms, keys, tail, arena, pages, store, start, count,
        shape=shape, most_blocks=min(g.index_top_k // ratio, keys.shape[0]), interpret=backend.interprets(),
    )  # fmt: skip


@partial(jax.jit, static_argnames=("shape", "most_blocks", "interpret"))
def _sparse(
    projected: Projections,
    norms: Norms,
    keys: jax.Array,
    tail: jax.Array,
    arena: jax.Array,
    pages: jax.Array,
    store: CellStore | None,
    start: jax.Array,
    count: jax.Array,
    *,
    shape: CellShape,
    most_blocks: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    how: Any = {"backend": "triton", "interpret": interpret}
    made = attention_inputs(projected, norms, tail, pages, start, count, arena, keys, shape, **how)
    scores = index_scores(made.index_q, made.keys, made.seen, **how)
    blocks = best_blocks(scores, made.seen, most_blocks, **how)
    out = sparse_attention(
        made.q, made.arena, pages, blocks, made.positions, shape.ratio, shape.kv_type, shape.cells_per_page,
        store=None if store is None else (store.words, store.first_row), **how,
    )  # fmt: skip
    return out, made.arena, made.keys, made.raw

"""Plain `jnp`: gather the kept cells, decode them to float32, one softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from strata_jax.kernels.kv_codec import decode_k, decode_v
from strata_jax.kv_types import cell_bytes

HIGHEST = jax.lax.Precision.HIGHEST


def attend(
    q: jax.Array,
    arena: jax.Array,
    pages: jax.Array,
    blocks: jax.Array,
    positions: jax.Array,
    store: tuple[jax.Array, ...],  # words and first row, or nothing
    *,
    ratio: int,
    kv_type: str,
    cells_per_page: int,
) -> jax.Array:
    """See `strata_jax.kernels.sparse_attention.sparse_attention`."""
    num_tokens, groups, _, width = q.shape
    complete = (positions + 1) // ratio
    entry, member = jnp.arange(blocks.shape[1]), jnp.arange(ratio)
    listed = entry < complete[:, None]
    block = jnp.concatenate([jnp.where(listed, blocks, 0), complete[:, None]], axis=1)
    cell = block[:, :, None] * ratio + member
    keep = jnp.concatenate(
        [jnp.broadcast_to(listed[:, :, None], (*listed.shape, ratio)), cell[:, -1:] <= positions[:, None, None]], axis=1
    )
    cell, keep = (x.reshape(num_tokens, -1) for x in (cell, keep))
    group = jnp.minimum(cell // cells_per_page, pages.shape[0] - 1)
    page, in_page = pages[group], jnp.minimum(cell - group * cells_per_page, cells_per_page - 1)

    def read(first: jax.Array, num_words: int) -> jax.Array:
        at = first[..., None] + jnp.arange(num_words)
        words = arena[jnp.maximum(page, 0)[..., None], at]
        if store:
            in_store = store[0][(store[1] + group)[..., None], at]
            words = jnp.where(page[..., None] < 0, in_store, words)
        return jnp.where(keep[..., None], words, 0)

    k_words, v_words = (num_bytes // 4 for num_bytes in cell_bytes(kv_type, groups, width))
    k = decode_k(read(in_page * k_words, k_words), kv_type, groups, width)
    v = decode_v(read(cells_per_page * k_words + in_page * v_words, v_words), kv_type, groups, width)
    scores = jnp.einsum("tghd,tngd->tghn", q, k, precision=HIGHEST)
    weight = jax.nn.softmax(jnp.where(keep[:, None, None, :], scores, -jnp.inf), axis=-1)
    return jnp.einsum("tghn,tngd->tghd", weight, v, precision=HIGHEST)

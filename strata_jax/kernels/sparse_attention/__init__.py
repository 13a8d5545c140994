"""Attention of each token over its own kept blocks of K/V cells and its incomplete block, read where they lie.

Cells are packed words in pages of the arena or, where a store is given, in its rows; nothing decoded leaves the kernel.
Not here: which blocks are kept (`kernels/index_select`), encoding (`kernels/kv_codec`), attention to all cells.
Shapes: T tokens, G K/V heads, h query heads for each of them, d head size, k kept blocks of r cells, N groups of cells.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from strata_jax.kernels.backend import on_backend
from strata_jax.kernels.form import form
from strata_jax.kernels.sparse_attention import reference
from strata_jax.kernels.sparse_attention.blocks import Blocks, blocks_for
from strata_jax.memory.layout import MAX_WINDOW_TOKENS

__all__ = ["MAX_WINDOW_TOKENS", "Blocks", "blocks_for", "sparse_attention"]


def sparse_attention(
    q: jax.Array,
    arena: jax.Array,
    pages: jax.Array,
    blocks: jax.Array,
    positions: jax.Array,
    ratio: int,
    kv_type: str,
    cells_per_page: int,
    *,
    store: tuple[jax.Array, jax.Array] | None = None,
    backend: str | None = None,
    sizes: Blocks | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attend from each token to the cells of ``blocks[t, : min(k, n)]`` and to those from ``n r`` to its own.

    n = (p + 1) // r is the number of complete blocks of a token at position p. Sums and the softmax are float32; of the
    operands of the kernel's products 18 bits count in windows of up to `MAX_WINDOW_TOKENS`, 8 in longer chunks.

    Args:
        q: f32[T, G, h, d], already divided by the square root of d.
        arena: u32[P, W], pages of cells: keys of all cells of a page, then their values.
        pages: i32[N], the page of each group of ``cells_per_page`` cells; -1 = it lies in the store.
        blocks: i32[T, k]; further entries may hold anything.
        positions: i32[T], at least 0.
        ratio: r, cells of a block; a block does not cross pages.
        kv_type: one of `kv_types.KV_TYPES`.
        store: u32[M, W] in host memory beside a GPU, and i32[] the row of group 0.
        backend: ``"reference"`` or ``"triton"``; None = Triton on CUDA, the reference elsewhere.
        sizes: of the kernel's tiles; None = from the table.
        interpret: run the kernel in Pallas' interpreter, on any device.

    Returns:
        f32[T, G, h, d]. Cells that a token does not keep have no influence, whatever they hold.

    Raises:
        ValueError: shapes or types do not fit, or `backend` is unknown.
    """
    _check(q, arena, pages, blocks, positions, ratio, cells_per_page)
    sizes = sizes or blocks_for(q.shape[0])
    if sizes.tile_cells % ratio or sizes.split_cells % sizes.tile_cells:
        raise ValueError(
            f"tiles of {sizes.tile_cells} and pieces of {sizes.split_cells} cells: a tile must be whole blocks of "
            f"{ratio} cells and a piece whole tiles"
        )

    how: Any = {"ratio": ratio, "kv_type": kv_type, "cells_per_page": cells_per_page}

    def in_jnp(q: jax.Array, arena: jax.Array, pages: jax.Array, blocks: jax.Array, positions: jax.Array, *store: Any
               ) -> jax.Array:  # fmt: skip
        return reference.attend(q, arena, pages, blocks, positions, store, **how)

    def on_triton(q: jax.Array, arena: jax.Array, pages: jax.Array, blocks: jax.Array, positions: jax.Array, *store: Any
                  ) -> jax.Array:  # fmt: skip
        from strata_jax.kernels.sparse_attention import triton

        return triton.attend(q, arena, pages, blocks, positions, store, sizes=sizes, interpret=interpret, **how)

    return on_backend(backend, on_triton, in_jnp, q, arena, pages, blocks, positions, *(store or ()))


def _check(
    q: jax.Array, arena: jax.Array, pages: jax.Array, blocks: jax.Array, positions: jax.Array, ratio: int, per_page: int
) -> None:
    if q.ndim != 4 or q.dtype != jnp.float32:
        raise ValueError(f"q is f32[T, G, h, d], got {form(q)}")
    num_tokens = q.shape[0]
    if arena.ndim != 2 or arena.dtype != jnp.uint32:
        raise ValueError(f"the arena is u32[P, W], got {form(arena)}")
    if pages.ndim != 1 or pages.dtype != jnp.int32:
        raise ValueError(f"pages are i32[N], got {form(pages)}")
    if blocks.ndim != 2 or blocks.shape[0] != num_tokens or blocks.dtype != jnp.int32:
        raise ValueError(f"blocks are i32[{num_tokens}, k], got {form(blocks)}")
    if positions.shape != (num_tokens,) or positions.dtype != jnp.int32:
        raise ValueError(f"positions are i32[{num_tokens}], got {form(positions)}")
    if ratio < 1 or per_page % ratio:
        raise ValueError(f"blocks of {ratio} cells: a page of {per_page} cells must hold whole blocks")

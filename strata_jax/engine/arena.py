"""Reading and writing the paged arena inside compiled programs.

The arena is one array ``u32[P, page_words]``. Experts sit in runs of consecutive pages, K/V cells in single pages
behind a table; both are addressed through tables, so giving a page another owner is an edit of a table.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tables:
    """Who sits where.

    Attributes:
        slot_of: i32[L', X], the slot of each expert of each block (MTP block included), -1 = only in the bank.
        slot_page: i32[S], the first page of each slot.
        kv_pages: i32[A, N], the page of the n-th group of K/V cells of each attention layer, -1 = not mapped.
    """

    slot_of: jax.Array
    slot_page: jax.Array
    kv_pages: jax.Array

    def expert_pages(self, layer: jax.Array | int) -> jax.Array:
        """First arena page of every expert of a block, or -1: i32[X]."""
        slots = self.slot_of[layer]
        return jnp.where(slots >= 0, self.slot_page[jnp.maximum(slots, 0)], -1)


@dataclass(frozen=True)
class CellLayout:
    """How K/V cells lie in pages: ``cells_per_page`` cells of ``k_words`` then ``v_words`` 32-bit words."""

    kv_type: str
    cells_per_page: int
    k_words: int
    v_words: int
    num_cells: int

    @property
    def cell_words(self) -> int:
        return self.k_words + self.v_words


def write_cells(
    arena: jax.Array, pages: jax.Array, positions: jax.Array, valid: jax.Array, words: jax.Array, layout: CellLayout
) -> jax.Array:
    """Write ``words: u32[T, cell_words]`` to the cells ``positions: i32[T]``; rows that are not ``valid`` are dropped.

    Args:
        pages: i32[N], the page table of one attention layer.
    """
    page, offset = _locate(pages, positions, layout)
    dropped = ~valid | (positions >= layout.num_cells) | (page < 0)
    index = jnp.stack([jnp.where(dropped, arena.shape[0], page), offset], axis=-1)
    dims = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    return jax.lax.scatter(
        arena, index, words, dims, mode=jax.lax.GatherScatterMode.FILL_OR_DROP, unique_indices=True
    )


def read_cells(arena: jax.Array, pages: jax.Array, first: jax.Array, run: int, layout: CellLayout) -> jax.Array:
    """Read runs of ``run`` consecutive cells (never crossing a page) from ``first: i32[...]``: u32[..., run, cell_words]."""
    page, offset = _locate(pages, first, layout)
    index = jnp.stack([jnp.maximum(page, 0), offset], axis=-1)
    dims = jax.lax.GatherDimensionNumbers(
        offset_dims=(first.ndim,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )
    flat = jax.lax.gather(
        arena, index, dims, (1, run * layout.cell_words), mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    )
    return flat.reshape(*first.shape, run, layout.cell_words)


def _locate(pages: jax.Array, cells: jax.Array, layout: CellLayout) -> tuple[jax.Array, jax.Array]:
    group = jnp.minimum(cells // layout.cells_per_page, pages.shape[0] - 1)
    return pages[group], cells % layout.cells_per_page * layout.cell_words

"""Reading and writing the paged arena inside compiled programs.

The arena is a core array ``u32[P, page_words]`` and, where the plan has some, segments of the same width behind it;
page numbers run through all of them. Experts sit in runs of consecutive pages of one array, K/V cells in single pages
of the core behind a table; both are addressed through tables, so giving a page another owner is an edit of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp

from strata_jax.kernels.cell_gather import gather_runs

Segments = tuple[jax.Array, ...]  # those that are there; lent ones are no operands


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tables:
    """Who sits where.

    Attributes:
        slot_of: i32[L', X], the slot of each expert of each block (MTP block included), -1 = only in the bank.
        slot_page: i32[S], the first page of each slot, -1 = its pages hold K/V cells.
        kv_pages: i32[A, N], the page of the n-th group of K/V cells of each attention layer, -1 = not mapped, or in the
            store if there is one.
        cell_store: u32[A * N, page_words] in host memory; None: all cells are on the device.
    """

    slot_of: jax.Array
    slot_page: jax.Array
    kv_pages: jax.Array
    cell_store: jax.Array | None = None

    def store_of(self, row: jax.Array | int) -> CellStore | None:
        """The store as seen by the attention layer with this row of `kv_pages`."""
        if self.cell_store is None:
            return None
        return CellStore(self.cell_store, jnp.int32(row * self.kv_pages.shape[1]))

    def expert_pages(self, layer: jax.Array | int) -> jax.Array:
        """First arena page of every expert of a block, or -1: i32[X]."""
        slots = self.slot_of[layer]
        return jnp.where(slots >= 0, self.slot_page[jnp.maximum(slots, 0)], -1)


def read_pages(arrays: Sequence[jax.Array], page: jax.Array, count: int) -> jax.Array:
    """Read ``count`` consecutive pages of one of the arena's arrays: u32[count, page_words]."""

    def read(array: jax.Array, first: int) -> jax.Array:
        return jax.lax.dynamic_slice(array, (page - first if first else page, 0), (count, array.shape[1]))

    core, *segments = arrays
    if not segments:
        return read(core, 0)
    firsts = list(accumulate(array.shape[0] for array in arrays))[:-1]
    which = sum((page >= first).astype(jnp.int32) for first in firsts)
    return jax.lax.switch(which, [partial(read, array, first) for array, first in zip(arrays, (0, *firsts))])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CellStore:
    """The groups of cells of an attention layer in host memory: rows of ``words: u32[M, page_words]`` from a first one.

    first_row: i32[], the row of group 0.
    """

    words: jax.Array
    first_row: jax.Array


@dataclass(frozen=True)
class CellLayout:
    """How K/V cells lie in a page: the keys of all its cells (``k_words`` 32-bit words each), then their values.

    kernels: cells are attended to by kernels, in the layers that these can compute.
    """

    kv_type: str
    cells_per_page: int
    k_words: int
    v_words: int
    num_cells: int
    kernels: bool = False


def write_cells(
    arena: jax.Array,
    pages: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layout: CellLayout,
) -> jax.Array:
    """Write ``k: u32[T, k_words]`` and ``v: u32[T, v_words]`` to the cells ``positions: i32[T]``.

    Rows that are not ``valid``, lie past the context or on a page that is not mapped are dropped.

    Args:
        pages: i32[N], the page table of one attention layer.
    """
    page, cell = _locate(pages, positions, layout)
    dropped = ~valid | (positions >= layout.num_cells) | (page < 0)
    page = jnp.where(dropped, arena.shape[0], page)
    dims = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    first_value = layout.cells_per_page * layout.k_words
    for words, offset in ((k, cell * layout.k_words), (v, first_value + cell * layout.v_words)):
        arena = jax.lax.scatter(
            arena,
            jnp.stack([page, offset], axis=-1),
            words,
            dims,
            mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
        )
    return arena


def read_cells(
    arena: jax.Array,
    pages: jax.Array,
    first: jax.Array,
    run: int,
    layout: CellLayout,
    store: CellStore | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Read runs of ``run`` consecutive cells (never crossing a page) from ``first: i32[...]``.

    Args:
        store: where groups of cells without a page are.

    Returns:
        keys u32[..., run, k_words] and values u32[..., run, v_words].
    """
    page, cell = _locate(pages, first, layout)
    first_value = layout.cells_per_page * layout.k_words
    if store is not None:
        row = store.first_row + _group(pages, first, layout)
        k = gather_runs(arena, store.words, page, row, cell * layout.k_words, run * layout.k_words)
        v = gather_runs(arena, store.words, page, row, first_value + cell * layout.v_words, run * layout.v_words)
        return k.reshape(*first.shape, run, layout.k_words), v.reshape(*first.shape, run, layout.v_words)
    page = jnp.maximum(page, 0)
    dims = jax.lax.GatherDimensionNumbers(offset_dims=(first.ndim,), collapsed_slice_dims=(0,), start_index_map=(0, 1))

    def read(offset: jax.Array, words: int) -> jax.Array:
        index = jnp.stack([page, offset], axis=-1)
        mode = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
        return jax.lax.gather(arena, index, dims, (1, run * words), mode=mode).reshape(*first.shape, run, words)

    return read(cell * layout.k_words, layout.k_words), read(first_value + cell * layout.v_words, layout.v_words)


def _locate(pages: jax.Array, cells: jax.Array, layout: CellLayout) -> tuple[jax.Array, jax.Array]:
    return pages[_group(pages, cells, layout)], cells % layout.cells_per_page


def _group(pages: jax.Array, cells: jax.Array, layout: CellLayout) -> jax.Array:
    return jnp.minimum(cells // layout.cells_per_page, pages.shape[0] - 1)

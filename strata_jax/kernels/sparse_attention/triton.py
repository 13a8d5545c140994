"""Attention over kept blocks as one Pallas-Triton launch, or two where a token's cells are split among programs.

A program attends from the query heads of one token that share a K/V head. It looks up the pages of a tile of kept
cells, reads their words where they lie, decodes them in registers and goes on to the next tile with a running softmax
in float32. For windows a token's list of blocks is cut into pieces of one length, a program each; `_join_kernel` adds
them up in their order. Reads of cells that the token does not keep are masked off, so these may hold anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from strata_jax.kernels.kv_codec import hadamard
from strata_jax.kernels.launch import launch
from strata_jax.kernels.sparse_attention.blocks import Blocks
from strata_jax.kernels.sparse_attention.cells import Load, Side
from strata_jax.kernels.split_dot import split_dot
from strata_jax.kv_types import cell_bytes, sides

Ref = Any
MIN_ROWS = 16  # of a product on tensor cores
MASKED = -1e30
JOINED = 16  # pieces that are read at a time


@dataclass(frozen=True)
class _Kept:
    """What a token keeps: the first ``num_kept`` blocks of its list, then its incomplete block.

    ratio: cells of a block.
    """

    position: jax.Array
    most: int
    ratio: int

    @property
    def complete(self) -> jax.Array:
        """Complete blocks before the token's end; the incomplete one has this number."""
        return jax.lax.div(self.position + 1, jnp.int32(self.ratio))

    @property
    def num_kept(self) -> jax.Array:
        return jnp.minimum(self.complete, self.most)

    @property
    def num_entries(self) -> jax.Array:
        """Blocks with cells to attend to; at least 1."""
        return self.num_kept + (self.complete * self.ratio <= self.position).astype(jnp.int32)


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
    sizes: Blocks,
    interpret: bool = False,
) -> jax.Array:
    """See `strata_jax.kernels.sparse_attention.sparse_attention`."""
    num_tokens, groups, heads, width = q.shape
    k_format, v_format = sides(kv_type)
    if k_format == "q4_0":
        q = hadamard(q)  # the stored keys are rotated, and the rotation is orthogonal
    num_entries = blocks.shape[1] + 1
    split = sizes.split_cells // ratio if sizes.split_cells else num_entries
    pieces = pl.cdiv(num_entries, split)
    kernel = partial(
        _attend_kernel,
        k_side=Side(k_format, groups, width),
        v_side=Side(v_format, groups, width),
        cells_per_page=cells_per_page,
        words=tuple(num_bytes // 4 for num_bytes in cell_bytes(kv_type, groups, width)),
        ratio=ratio,
        split=split,
        sizes=sizes,
        has_store=bool(store),
    )
    out: Any = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    parts = tuple(
        jax.ShapeDtypeStruct((num_tokens, groups, pieces, *shape), jnp.float32) for shape in ((heads, width), (heads,))
    )
    # the K/V heads of a cell are neighbours in memory and are read close in time
    grid = groups, num_tokens, pieces
    call = launch(kernel, grid, parts if pieces > 1 else out, sizes.warps, interpret=interpret)
    row = store[1].reshape(1) if store else jnp.zeros(1, jnp.int32)
    result = call(q, pages, row, blocks, positions, arena, *store[:1])
    if pieces > 1:
        join = partial(_join_kernel, most=blocks.shape[1], ratio=ratio, split=split)
        result = launch(join, (heads, groups, num_tokens), out, num_warps=4, interpret=interpret)(*result, positions)
    return hadamard(result) if v_format == "q4_0" else result


def _attend_kernel(
    q_ref: Ref,  # f32[T, G, h, d], h query heads for each of G K/V heads
    pages_ref: Ref,  # i32[N]
    first_row_ref: Ref,  # i32[1]
    blocks_ref: Ref,  # i32[T, k]
    positions_ref: Ref,  # i32[T]
    arena_ref: Ref,  # u32[P, W]
    *refs: Ref,  # the store u32[M, W], if there is one; f32[T, G, h, d], or the pieces as of `_join_kernel`
    k_side: Side,
    v_side: Side,
    cells_per_page: int,
    words: tuple[int, ...],
    ratio: int,
    split: int,
    sizes: Blocks,
    has_store: bool,
) -> None:
    store, (out_ref, *total_refs) = (refs[:1], refs[1:]) if has_store else ((), refs)
    group, token, piece = (pl.program_id(i) for i in range(3))
    kept = _Kept(positions_ref[token], blocks_ref.shape[1], ratio)
    first = piece * split
    end = jnp.minimum(first + split, kept.num_entries)
    num_heads = q_ref.shape[2]
    head = jnp.arange(max(MIN_ROWS, pl.next_power_of_2(num_heads)))
    is_head = head < num_heads

    @pl.when(first < end)
    def _() -> None:
        q = [_queries(q_ref, token, group, head, k_side.columns(tile)) for tile in range(k_side.num_tiles)]

        def step(i: jax.Array, carry: Any) -> Any:
            top, total, sums = carry
            cell, keep = _cells_of_tile(blocks_ref, token, first + i * (sizes.tile_cells // ratio), end, kept, sizes)
            page_group = jnp.minimum(jax.lax.div(cell, jnp.int32(cells_per_page)), pages_ref.shape[0] - 1)
            in_page = jnp.minimum(cell - page_group * cells_per_page, cells_per_page - 1)
            page = plt.load(pages_ref.at[page_group], mask=keep, other=jnp.zeros_like(cell))
            row = first_row_ref[0] + page_group if has_store else None
            read = partial(_reader, arena_ref, store, page, row, keep)
            keys = k_side.decode(read(in_page * words[0]), group)
            scores = sum(_product(a, b, 1, sizes.num_parts) for a, b in zip(q, keys))
            scores = jnp.where(keep[None, :], scores, MASKED)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            weight = jnp.where(keep[None, :], jnp.exp(scores - new_top[:, None]), 0.0)
            shrink = jnp.exp(top - new_top)
            values = v_side.decode(read(cells_per_page * words[0] + in_page * words[1]), group)
            sums = tuple(
                old * shrink[:, None] + _product(weight, new, 0, sizes.num_parts) for old, new in zip(sums, values)
            )
            return new_top, total * shrink + jnp.sum(weight, axis=1), sums

        zero = jnp.zeros((head.shape[0], v_side.tile_width), jnp.float32)
        start = (jnp.full(head.shape, MASKED), jnp.zeros(head.shape), (zero,) * v_side.num_tiles)
        num_tiles = jax.lax.div((end - first) * ratio + (sizes.tile_cells - 1), jnp.int32(sizes.tile_cells))
        top, total, sums = jax.lax.fori_loop(0, num_tiles, step, start)
        place = (token, group, piece) if total_refs else (token, group)
        for tile, value in enumerate(sums):
            column = v_side.columns(tile)
            mask = jnp.broadcast_to(is_head[:, None], value.shape)
            plt.store(out_ref.at[*place, head[:, None], column[None, :]], value / total[:, None], mask=mask)
        for ref in total_refs:
            plt.store(ref.at[*place, head], top + jnp.log(total), mask=is_head)


def _queries(q_ref: Ref, token: jax.Array, group: jax.Array, head: jax.Array, column: jax.Array) -> jax.Array:
    shape = (head.shape[0], column.shape[0])
    mask = jnp.broadcast_to((head < q_ref.shape[2])[:, None], shape)
    place = q_ref.at[token, group, head[:, None], column[None, :]]
    return plt.load(place, mask=mask, other=jnp.zeros(shape, jnp.float32))


def _cells_of_tile(
    blocks_ref: Ref, token: jax.Array, first: jax.Array, end: jax.Array, kept: _Kept, sizes: Blocks
) -> tuple[jax.Array, jax.Array]:
    """The cells of the entries from ``first`` on and which of them count: i32[C], bool[C]."""
    index = jnp.arange(sizes.tile_cells)
    entry = first + jax.lax.div(index, jnp.int32(kept.ratio))
    member = jax.lax.rem(index, jnp.int32(kept.ratio))
    listed = entry < jnp.minimum(end, kept.num_kept)
    last = jnp.broadcast_to(kept.complete, entry.shape)
    block = plt.load(blocks_ref.at[token, entry], mask=listed, other=last)
    cell = block * kept.ratio + member
    return cell, listed | ((entry < end) & (cell <= kept.position))


def _reader(
    arena_ref: Ref, store: Sequence[Ref], page: jax.Array, row: jax.Array | None, keep: jax.Array, first_word: jax.Array
) -> Load:
    """Return a function that reads words of one side of some cells, from wherever each cell lies."""

    def load(word: jax.Array) -> jax.Array:
        shape = (*page.shape, *word.shape)
        wide = lambda x: jnp.broadcast_to(x.reshape(-1, *[1] * word.ndim), shape)  # noqa: E731
        at = wide(first_word) + word[None]
        in_arena = keep & (page >= 0) if store else keep
        line = wide(jnp.maximum(page, 0))
        value = plt.load(arena_ref.at[line, at], mask=wide(in_arena), other=jnp.zeros(shape, jnp.uint32))
        for ref in store:
            value = plt.load(ref.at[wide(row), at], mask=wide(keep & (page < 0)), other=value)
        return value

    return load


def _product(a: jax.Array, b: jax.Array, axis: int, num_parts: int) -> jax.Array:
    """``a: [M, K]`` times b, whose axis ``axis`` is K."""
    return split_dot(a, b, (((1,), (axis,)), ((), ())), num_parts)


def _join_kernel(
    values_ref: Ref,  # f32[T, G, S, h, d]
    totals_ref: Ref,  # f32[T, G, S, h], logarithms of the sums of weights
    positions_ref: Ref,  # i32[T]
    out_ref: Ref,  # f32[T, G, h, d]
    *,
    most: int,
    ratio: int,
    split: int,
) -> None:
    head, group, token = (pl.program_id(i) for i in range(3))
    width = out_ref.shape[3]
    kept = _Kept(positions_ref[token], most, ratio)
    num_pieces = jax.lax.div(kept.num_entries + (split - 1), jnp.int32(split))
    column = jnp.arange(width)

    def totals(piece: jax.Array) -> jax.Array:
        place = totals_ref.at[token, group, piece, head]
        return plt.load(place, mask=piece < num_pieces, other=jnp.full(piece.shape, MASKED))

    top = jnp.max(totals(jnp.arange(pl.next_power_of_2(totals_ref.shape[2]))))

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, sums = carry
        piece = i * JOINED + jnp.arange(JOINED)
        weight = jnp.exp(totals(piece) - top)
        shape = (JOINED, width)
        mask = jnp.broadcast_to((piece < num_pieces)[:, None], shape)
        place = values_ref.at[token, group, piece[:, None], head, column[None, :]]
        values = plt.load(place, mask=mask, other=jnp.zeros(shape, jnp.float32))
        return total + jnp.sum(weight), sums + jnp.sum(weight[:, None] * values, axis=0)

    num_steps = jax.lax.div(num_pieces + (JOINED - 1), jnp.int32(JOINED))
    total, sums = jax.lax.fori_loop(0, num_steps, step, (jnp.float32(0), jnp.zeros(width, jnp.float32)))
    out_ref[token, group, head, pl.ds(0, width)] = sums / total

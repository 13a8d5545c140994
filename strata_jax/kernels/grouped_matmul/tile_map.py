"""Which tile of sorted rows belongs to which expert. P = T * K pairs of a token and one of its experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SortedPairs:
    """Pairs sorted by expert, ties by token.

    Attributes:
        token_of: i32[P + pad], the token of each sorted row; 0 in the padding.
        row_of: i32[T, K], the sorted row of each pair.
        count: i32[X], rows of each expert.
        first: i32[X], first row of each expert.
    """

    token_of: jax.Array
    row_of: jax.Array
    count: jax.Array
    first: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TileMap:
    """Tiles of up to M sorted rows of one expert; the first ``num`` entries count.

    Attributes:
        expert, first, count: i32[tiles], the expert, its first row in the tile and the rows of the tile.
        num: i32[1].
    """

    expert: jax.Array
    first: jax.Array
    count: jax.Array
    num: jax.Array


class Source(NamedTuple):
    """Where some experts are: pages of the arena, places of a staging buffer, or the bank in host memory.

    Attributes:
        words: u32[lines, words_per_line].
        lines: i32[X], the line at which the blob of each expert starts, below 0 = it is not here.
    """

    words: jax.Array
    lines: jax.Array


def sort_pairs(ids: jax.Array, num_experts: int, pad: int) -> SortedPairs:
    """Sort the pairs of ``ids: i32[T, K]``; ids of ``num_experts`` (no expert) come last and are counted nowhere."""
    num_tokens, num_used = ids.shape
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    count = jnp.zeros(num_experts + 1, jnp.int32).at[flat].add(1)[:num_experts]
    first = jnp.cumsum(count) - count
    row_of = jnp.zeros(flat.shape[0], jnp.int32).at[order].set(jnp.arange(flat.shape[0], dtype=jnp.int32))
    token_of = jnp.pad(order // num_used, (0, pad))
    return SortedPairs(token_of, row_of.reshape(num_tokens, num_used), count, first)


def tile_map(pairs: SortedPairs, tile_rows: int) -> TileMap:
    """Cut the rows of every expert into tiles, experts in order."""
    num_pairs = pairs.row_of.size
    num_experts = pairs.count.shape[0]
    max_tiles = min(num_pairs, num_pairs // tile_rows + num_experts)
    tiles = (pairs.count + tile_rows - 1) // tile_rows
    last = jnp.cumsum(tiles)
    index = jnp.arange(max_tiles, dtype=jnp.int32)
    # comparisons of all with all are one launch; a binary search is a loop of them
    before = jnp.sum(last[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(before, num_experts - 1)
    skipped = (index - (last - tiles)[expert]) * tile_rows
    rows = jnp.clip(pairs.count[expert] - skipped, 0, tile_rows)
    return TileMap(expert, (pairs.first[expert] + skipped).astype(jnp.int32), rows.astype(jnp.int32), last[-1:])


def arena_sources(arrays: Sequence[jax.Array], pages: jax.Array) -> list[Source]:
    """Say where in each array of the arena its experts are.

    Args:
        arrays: the core and its segments, u32[pages, page_words], page numbers running through all of them.
        pages: i32[X], first arena page of each expert, below 0 = not resident.
    """
    found, first = [], 0
    for array in arrays:
        end = first + array.shape[0]
        found.append(Source(array, jnp.where((pages >= first) & (pages < end), pages - first, -1)))
        first = end
    return found

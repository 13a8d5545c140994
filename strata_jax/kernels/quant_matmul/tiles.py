"""What the Triton kernels of quantised products share: one tile of decoded weights, read from planes.

A kernel holds its matrices as words u32[lines, words_per_line] (the arena: lines are pages; a buffer: lines are blobs;
one matrix alone: one line). A matrix starts at a word of a line and goes on over the following lines, as memory does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from strata_jax.kernels.planes import ITEM, PlaneLayout, decode_tile, load_fields

Ref = Any
_MATMUL_ITEMS = 4
THREAD_ROWS = 4
"""Of a line that a thread reads at once, 16 bytes."""


@dataclass(frozen=True, slots=True)
class PlanePart:
    """One matrix in planes, starting ``first_word`` words after the start of its line: whole runs of its tile rows."""

    layout: PlaneLayout
    first_word: int = 0


class PlaneRows(NamedTuple):
    """Where R rows of a matrix are: word w of row r is ``start[r] + w * stride``, of i32[R] and i32[]."""

    start: jax.Array
    stride: jax.Array

    def aligned(self, tile_rows: int) -> PlaneRows:
        """Tell the compiler what it does not see where rows are chosen among matrices: so many are always together."""
        together = min(tile_rows, THREAD_ROWS)
        return PlaneRows(plt.max_contiguous(pl.multiple_of(self.start, together), together), self.stride)


def own_words(words: jax.Array, part: PlanePart) -> jax.Array:
    """The words u32[layout.num_words] of one matrix of an array of some."""
    return words[part.first_word : part.first_word + part.layout.num_words]


def step_items(layout: PlaneLayout) -> int:
    """Return the items of a row that a product of many rows decodes at a time: 4, or fewer if 4 do not divide it."""
    return min(_MATMUL_ITEMS, layout.num_items & -layout.num_items)


def row_loader(
    words: Ref, line: jax.Array | int, part: PlanePart, row: jax.Array, num_rows: int
) -> Callable[[jax.Array], jax.Array]:
    """Return ``load(word: i32[J]) -> u32[J, num_rows]``: words of the rows ``row ... row + num_rows - 1``.

    Args:
        words: u32[lines, words_per_line], lines of whole runs of ``tile_rows`` words.
        row: first row, a multiple of ``num_rows``; rows of one tile of the planes.
    """
    layout, length = part.layout, words.shape[1]
    runs_per_line = jnp.int32(length // layout.tile_rows)
    block, per_tile = jax.lax.div(row, jnp.int32(num_rows)), jnp.int32(layout.tile_rows // num_rows)
    first = part.first_word // layout.tile_rows + jax.lax.div(block, per_tile) * layout.row_words
    lanes = jax.lax.rem(block, per_tile) * num_rows + jnp.arange(num_rows, dtype=jnp.int32)

    def load(word: jax.Array) -> jax.Array:
        run = first + word
        if part.first_word + layout.num_words <= length:
            return words[line, run[:, None] * layout.tile_rows + lanes[None, :]]
        at = jax.lax.rem(run, runs_per_line)[:, None] * layout.tile_rows + lanes[None, :]
        found = line + jax.lax.div(run, runs_per_line)
        return words[jnp.broadcast_to(found[:, None], at.shape), at]

    return load


def weight_tile(
    load: Callable[[jax.Array], jax.Array], layout: PlaneLayout, table: Ref, step: jax.Array, num_items: int
) -> jax.Array:
    """Decode columns ``32 * num_items * step`` and up of the loaded rows: bf16[32 * num_items, rows].

    Weights are decoded in float32, equal to `dequantize`, and rounded once.
    """
    items = num_items * step + jnp.arange(num_items, dtype=jnp.int32)
    fields = load_fields(load, layout, items)
    tiles = [tile.astype(jnp.bfloat16) for tile in decode_tile(fields, layout.type_name, lambda index: table[index])]
    return interleave(tiles)


def interleave(tiles: list[jax.Array]) -> jax.Array:
    """Merge 32 tiles [J, R], tile s holding position s of every item, into [32 J, R]: in registers, nothing moves."""
    num_items, num_rows = tiles[0].shape
    while len(tiles) > 1:
        half = len(tiles) // 2
        tiles = [jnp.stack([low, high], axis=-1) for low, high in zip(tiles[:half], tiles[half:])]
    bits = tuple(range(2, tiles[0].ndim))
    return tiles[0].transpose(0, *bits, 1).reshape(num_items * ITEM, num_rows)


def product(x: jax.Array, weights: jax.Array, *, swap: bool = False) -> jax.Array:
    """``x: bf16[M, K]`` times ``weights: bf16[K, R]``: f32[M, R], or f32[R, M] if swapped (better for few rows)."""
    if swap:
        return jax.lax.dot_general(weights, x, (((0,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return jax.lax.dot_general(x, weights, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

"""Products of an expert's rows with a few vectors, inside a kernel: reading, decoding, multiplying.

Both operands are whole numbers, four bytes a word (`kernels/planes/quads.py`). A tile in registers is [J, R]: J items
(32 columns each) by R neighbouring rows, 16 bytes of a line per thread. The words of the next items are read before
those at hand are multiplied. Codes are decoded once for all vectors of an expert, which then take turns in a loop: work
follows their number, and the program is as long for 8 vectors as for 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from strata_jax.kernels.expert_gemv.blocks import LaunchBlocks
from strata_jax.kernels.expert_gemv.layout import ExpertLayout
from strata_jax.kernels.expert_gemv.vectors import VectorRows
from strata_jax.kernels.item_products import decode_items, item_products
from strata_jax.kernels.planes import PlaneLayout, raw_words

Ref = Any
Sums = list[list[jax.Array]]
"""f32[J, R] for each vector and part."""


@dataclass(frozen=True)
class Part:
    """One matrix of a blob in a kernel: its layout, its first line in the blob and its lookup table."""

    layout: PlaneLayout
    first_line: int
    table: Ref


@dataclass(frozen=True)
class Vectors:
    """The vectors of an expert: ``ref: u32[., rows.count, items]``, the i-th of ``count`` at ``index(i)``."""

    ref: Ref
    rows: VectorRows
    index: Callable[[int | jax.Array], jax.Array]
    count: jax.Array
    most: int


def multiply_rows(
    parts: Sequence[Part],
    line: Callable[[jax.Array, jax.Array], jax.Array],
    row: jax.Array,
    vectors: Vectors,
    blocks: LaunchBlocks,
    store: Callable[[int | jax.Array, Sequence[jax.Array]], None],
    interpret: bool,
) -> None:
    """Multiply R rows from ``row`` of each part by all vectors; ``store(i, sums)`` gets f32[J, R] for each part.

    All parts have the same number of columns.
    """
    num_items = parts[0].layout.num_items
    step = blocks.items_at_once(num_items)
    num_steps = num_items // step
    lanes = jnp.arange(step, dtype=jnp.int32)

    def load(k: int | jax.Array) -> list[tuple[jax.Array, ...]]:
        def read(part: Part, word: jax.Array) -> jax.Array:
            first = part.first_line + jax.lax.div(row, jnp.int32(part.layout.tile_rows)) * part.layout.row_words
            return line(first + word, jnp.int32(k) < num_steps)

        return [raw_words(partial(read, part), part.layout, k * step + lanes) for part in parts]

    def multiply(k: int | jax.Array, words: Sequence[tuple[jax.Array, ...]], sums: Sums) -> Sums:
        items = k * step + lanes
        tiles = [decode_items(part.layout, part.table, raw, items, interpret) for part, raw in zip(parts, words)]

        def add(i: int | jax.Array, sums: Sums) -> Sums:
            index = vectors.index(i)

            def x(vector_row: int) -> jax.Array:
                return vectors.ref[index, vector_row, pl.ds(k * step, step)][:, None]

            products = item_products(tiles, x, vectors.rows, interpret)
            if vectors.most == 1:
                return [[total + product for total, product in zip(sums[0], products)]]
            return [
                [jnp.where(i == t, total + product, total) for total, product in zip(of_token, products)]
                for t, of_token in enumerate(sums)
            ]

        return add(0, sums) if vectors.most == 1 else jax.lax.fori_loop(0, vectors.count, add, sums)

    def both(k: jax.Array, carry: tuple[Any, Sums]) -> tuple[Any, Sums]:
        words, sums = carry
        following = load(k + 1)
        return following, multiply(k, words, sums)

    zero = jnp.zeros((step, blocks.rows), jnp.float32)
    sums: Sums = [[zero for _ in parts] for _ in range(vectors.most)]
    _, sums = jax.lax.fori_loop(0, num_steps, both, (load(0), sums))
    if vectors.most == 1:
        store(0, sums[0])
        return

    def store_one(i: jax.Array, _: None) -> None:
        mine = sums[0]
        for t in range(1, vectors.most):
            mine = [jnp.where(i == t, total, other) for total, other in zip(sums[t], mine)]
        store(i, mine)

    jax.lax.fori_loop(0, vectors.count, store_one, None)


def line_reader(
    expert: jax.Array,
    pages_ref: Ref,
    bank_ref: Ref,
    arena_refs: Sequence[Ref],
    row: jax.Array,
    layout: ExpertLayout,
    page_lines: int,
    num_rows: int,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return a function that reads R neighbouring words of each of some lines of the blob: i32[J] -> u32[J, R].

    Its second argument says whether they are wanted at all. Every source is read under a mask that is the same in the
    whole program, so only one of them moves bytes.
    """
    page, tile_rows = pages_ref[expert], layout.tile_rows
    # not a remainder: Triton would no longer know that 16 bytes of a line are aligned
    lane = row - jax.lax.div(row, jnp.int32(tile_rows)) * tile_rows
    lanes = (lane + jnp.arange(num_rows, dtype=jnp.int32))[None, :]
    ends = list(accumulate(ref.shape[0] // page_lines for ref in arena_refs))

    def read(line: jax.Array, wanted: jax.Array) -> jax.Array:
        shape = (line.shape[0], num_rows)
        value = plt.load(
            bank_ref.at[expert, line[:, None] * tile_rows + lanes],
            mask=jnp.full(shape, wanted & (page < 0)),
            other=jnp.zeros(shape, jnp.uint32),
        )
        for ref, first, end in zip(arena_refs, [0, *ends], ends):
            here = (page >= first) & (page < end)
            first_line = jnp.where(here, page - first, 0) * page_lines
            value = plt.load(
                ref.at[first_line + line[:, None], lanes],
                mask=jnp.full(shape, wanted & here),
                other=value,
            )
        return value

    return read

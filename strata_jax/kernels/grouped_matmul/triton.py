"""Grouped products on packed experts in Pallas Triton: one program per (tile of weight rows, tile of sorted rows).

A program decodes its expert's weights once, step by step along the width, in registers, and multiplies all rows of its
tile by them on the tensor cores; nothing decoded leaves the chip. Programs past the last tile, and those whose expert
lies elsewhere, end at once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from strata_jax.kernels.grouped_matmul.blocks import Blocks
from strata_jax.kernels.grouped_matmul.tile_map import Source, TileMap
from strata_jax.kernels.launch import launch
from strata_jax.kernels.planes import ITEM, lookup_table
from strata_jax.kernels.quant_matmul.tiles import PlanePart, product, row_loader, step_items, weight_tile

Ref = Any


def swiglu(
    u: jax.Array,
    token_of: jax.Array,
    tiles: TileMap,
    source: Source,
    parts: tuple[PlanePart, PlanePart],
    out: jax.Array,
    blocks: Blocks,
    interpret: bool = False,
) -> jax.Array:
    """Fill rows of ``out: bf16[P, F]`` by the products with gate and up; other arguments as of `grouped_swiglu`."""
    layout = parts[0].layout
    weight_rows, num_items = blocks.swiglu.rows, step_items(layout)

    def kernel(
        u: Ref, token_of: Ref, first: Ref, count: Ref, expert: Ref, num: Ref, lines: Ref, words: Ref,
        gate_table: Ref, up_table: Ref, _: Ref, out: Ref,
    ) -> None:  # fmt: skip
        row, i = pl.program_id(0) * weight_rows, pl.program_id(1)

        line = lines[expert[i]]

        @pl.when((i < num[0]) & (line >= 0))
        def _work() -> None:
            tokens = token_of[pl.ds(first[i], blocks.rows)]
            loads = [row_loader(words, line, part, row, weight_rows) for part in parts]

            def step(k: jax.Array, accs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                x = u[tokens, pl.ds(k * num_items * ITEM, num_items * ITEM)]
                g, v = (
                    acc + product(x, weight_tile(load, part.layout, table, k, num_items), swap=blocks.swap)
                    for acc, load, part, table in zip(accs, loads, parts, (gate_table, up_table))
                )
                return g, v

            zero = _zero(blocks, weight_rows)
            g, v = jax.lax.fori_loop(0, layout.num_items // num_items, step, (zero, zero))
            _store(out, first[i], count[i], row, g * jax.nn.sigmoid(g) * v, blocks)

    tables = [jnp.asarray(lookup_table(part.layout.type_name)) for part in parts]
    grid = (out.shape[1] // weight_rows, tiles.expert.shape[0])
    call = launch(kernel, grid, _like(out), blocks.swiglu.warps, in_place=1, interpret=interpret)
    words, lines = source
    return call(u, token_of, tiles.first, tiles.count, tiles.expert, tiles.num, lines, words, *tables, out)


def down(
    h: jax.Array,
    tiles: TileMap,
    source: Source,
    part: PlanePart,
    out: jax.Array,
    blocks: Blocks,
    interpret: bool = False,
) -> jax.Array:
    """Fill rows of ``out: [P, E]`` by the product with down; other arguments as of `grouped_down`."""
    weight_rows, num_items = blocks.down.rows, step_items(part.layout)

    def kernel(
        h: Ref, first: Ref, count: Ref, expert: Ref, num: Ref, lines: Ref, words: Ref, table: Ref, _: Ref, out: Ref
    ) -> None:
        row, i = pl.program_id(0) * weight_rows, pl.program_id(1)

        line = lines[expert[i]]

        @pl.when((i < num[0]) & (line >= 0))
        def _work() -> None:
            load = row_loader(words, line, part, row, weight_rows)

            def step(k: jax.Array, acc: jax.Array) -> jax.Array:
                x = h[pl.ds(first[i], blocks.rows), pl.ds(k * num_items * ITEM, num_items * ITEM)]
                return acc + product(x, weight_tile(load, part.layout, table, k, num_items), swap=blocks.swap)

            acc = jax.lax.fori_loop(0, part.layout.num_items // num_items, step, _zero(blocks, weight_rows))
            _store(out, first[i], count[i], row, acc, blocks)

    table = jnp.asarray(lookup_table(part.layout.type_name))
    grid = (out.shape[1] // weight_rows, tiles.expert.shape[0])
    call = launch(kernel, grid, _like(out), blocks.down.warps, in_place=1, interpret=interpret)
    words, lines = source
    return call(h, tiles.first, tiles.count, tiles.expert, tiles.num, lines, words, table, out)


def _like(out: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(out.shape, out.dtype)


def _zero(blocks: Blocks, weight_rows: int) -> jax.Array:
    return jnp.zeros((weight_rows, blocks.rows) if blocks.swap else (blocks.rows, weight_rows), jnp.float32)


def _store(out: Ref, first: jax.Array, count: jax.Array, col: jax.Array, acc: jax.Array, blocks: Blocks) -> None:
    """Write the tile's ``count`` rows; the others belong to the next expert."""
    value = (acc.T if blocks.swap else acc).astype(out.dtype)
    mask = jnp.broadcast_to((jnp.arange(blocks.rows) < count)[:, None], value.shape)
    plt.store(out.at[pl.ds(first, blocks.rows), pl.ds(col, value.shape[1])], value, mask=mask)

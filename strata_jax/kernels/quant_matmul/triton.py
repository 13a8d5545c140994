"""Dense products with a matrix in planes, in Pallas Triton: tensor cores for many rows, float32 sums for few."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from strata_jax.kernels.expert_gemv.blocks import LaunchBlocks
from strata_jax.kernels.launch import launch
from strata_jax.kernels.planes import (
    ITEM,
    decode_codes,
    decode_offset,
    decode_scales,
    load_fields,
    lookup_table,
)
from strata_jax.kernels.quant_matmul.blocks import MatmulBlocks
from strata_jax.kernels.quant_matmul.tiles import PlanePart, product, row_loader, step_items, weight_tile

Ref = Any


def matmul(
    x: jax.Array,
    words: jax.Array,
    line: jax.Array,
    part: PlanePart,
    blocks: MatmulBlocks,
    interpret: bool = False,
) -> jax.Array:
    """``x: bf16[T, cols]`` (T a multiple of ``blocks.rows``) times the transpose of a matrix: f32[T, rows].

    The matrix starts in line ``line: i32[1]`` of ``words: u32[lines, words_per_line]``.
    """
    layout, num_items, weight_rows = part.layout, step_items(part.layout), blocks.launch.rows

    def kernel(x: Ref, words: Ref, line: Ref, table: Ref, out: Ref) -> None:
        first, row = pl.program_id(0) * blocks.rows, pl.program_id(1) * weight_rows
        load = row_loader(words, line[0], part, row, weight_rows)

        def step(k: jax.Array, acc: jax.Array) -> jax.Array:
            rows = x[pl.ds(first, blocks.rows), pl.ds(k * num_items * ITEM, num_items * ITEM)]
            return acc + product(rows, weight_tile(load, layout, table, k, num_items))

        zero = jnp.zeros((blocks.rows, weight_rows), jnp.float32)
        acc = jax.lax.fori_loop(0, layout.num_items // num_items, step, zero)
        out[pl.ds(first, blocks.rows), pl.ds(row, weight_rows)] = acc

    grid = (x.shape[0] // blocks.rows, layout.rows // weight_rows)
    out = jax.ShapeDtypeStruct((x.shape[0], layout.rows), jnp.float32)
    call = launch(kernel, grid, out, blocks.launch.warps, interpret=interpret)
    return call(x, words, line, jnp.asarray(lookup_table(layout.type_name)))


def gemv(
    x: jax.Array,
    words: jax.Array,
    line: jax.Array,
    part: PlanePart,
    blocks: LaunchBlocks,
    interpret: bool = False,
) -> jax.Array:
    """``x: f32[T, cols]`` for small T times the transpose of a matrix, products and sums in float32: f32[T, rows].

    A thread keeps the sums of its own items and rows to the end; each item's sum of codes is scaled once. Rows of x
    come as [T, position in an item, item], so that items lie side by side.
    """
    layout, num_tokens = part.layout, x.shape[0]
    by_position = x.reshape(num_tokens, layout.num_items, ITEM).swapaxes(1, 2)
    sums = jnp.sum(x.reshape(num_tokens, layout.num_items, ITEM), axis=-1)
    num_items = blocks.items_at_once(layout.num_items)
    fma = _multiply_add if interpret else _fused_multiply_add

    def kernel(x: Ref, sums: Ref, words: Ref, line: Ref, table: Ref, out: Ref) -> None:
        row = pl.program_id(0) * blocks.rows
        load = row_loader(words, line[0], part, row, blocks.rows)

        def step(k: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            first = k * num_items
            fields = load_fields(load, layout, first + jnp.arange(num_items, dtype=jnp.int32))
            scales, offset = decode_scales(fields, layout.type_name), decode_offset(fields, layout.type_name)
            totals, group = list(accs), dict[int, jax.Array]()  # group: sums of codes that share a scale
            for s, code in enumerate(decode_codes(fields, layout.type_name, lambda index: table[index])):
                for t in range(num_tokens):
                    value = x[t, s, pl.ds(first, num_items)][:, None]
                    group[t] = fma(code, value, group[t]) if t in group else code * value
                if (s + 1) % (ITEM // len(scales)) == 0:
                    scale = scales[s * len(scales) // ITEM]
                    totals = [fma(group.pop(t), scale, total) for t, total in enumerate(totals)]
            if offset is not None:
                values = [sums[t, pl.ds(first, num_items)][:, None] for t in range(num_tokens)]
                totals = [fma(offset, value, total) for value, total in zip(values, totals)]
            return tuple(totals)

        zero = jnp.zeros((num_items, blocks.rows), jnp.float32)
        accs = jax.lax.fori_loop(0, layout.num_items // num_items, step, (zero,) * num_tokens)
        for t, acc in enumerate(accs):
            out[t, pl.ds(row, blocks.rows)] = jnp.sum(acc, axis=0)

    out = jax.ShapeDtypeStruct((num_tokens, layout.rows), jnp.float32)
    call = launch(kernel, (layout.rows // blocks.rows,), out, blocks.warps, interpret=interpret)
    return call(by_position, sums, words, line, jnp.asarray(lookup_table(layout.type_name)))


def _multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    return a * b + c


def _fused_multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """``a * b + c`` in one instruction; the compiler of these kernels fuses nothing by itself (seen in jax 0.11)."""
    shape = jnp.broadcast_shapes(a.shape, b.shape, c.shape)
    (result,) = plt.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[jnp.broadcast_to(v, shape) for v in (a, b, c)],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
    )
    return result

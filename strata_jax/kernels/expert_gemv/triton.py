"""The routed experts of a window as two Pallas-Triton launches on packed planes.

`gate_up`: one program for each (tile of R rows of gate and up, active expert). It loads the words of its rows once,
from the arena or straight from host memory, decodes them and multiplies by the rows of all tokens that chose the
expert: h = silu(gate u) * (up u). `down`: the same for the rows of down, giving one output row per pair of token and
expert; the caller sums a token's rows in ascending order of expert, so the result depends neither on where an expert
lies nor on the order in which programs run.

Products are of whole numbers (`products.py`). Vectors lie quad by quad, the same quad of all items side by side:
u32[rows, items] with rows as of `VectorRows`. `gate_up` writes h in this form.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from strata_jax.kernels.expert_gemv.blocks import Blocks, LaunchBlocks
from strata_jax.kernels.expert_gemv.layout import ExpertLayout, WindowPlan
from strata_jax.kernels.expert_gemv.products import Part, Vectors, line_reader, multiply_rows
from strata_jax.kernels.expert_gemv.vectors import down_rows, input_rows, pack_rows
from strata_jax.kernels.launch import launch
from strata_jax.kernels.planes import ITEM, lookup_table
from strata_jax.kernels.planes.quads import pack_vector

Ref = Any


def gate_up(
    x: jax.Array,
    plan: WindowPlan,
    arrays: Sequence[jax.Array],
    bank: jax.Array,
    pages: jax.Array,
    layout: ExpertLayout,
    blocks: LaunchBlocks,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Return h: u32[P, down_rows, F / 32]; rows without a pair are not written.

    Args:
        x: u32[T, input_rows, E / 32].
    """
    rows = layout.gate.rows
    num_pairs = plan.token_of.shape[0]
    tables = [jnp.asarray(lookup_table(part.type_name)) for part in (layout.gate, layout.up)]
    kernel = partial(
        _gate_up_kernel,
        layout=layout,
        blocks=blocks,
        page_lines=arrays[0].shape[1] // layout.tile_rows,
        interpret=interpret,
    )
    # the tile of rows is the fast axis: experts start in the order of the plan
    grid = rows // blocks.rows, plan.experts.shape[0]
    out = jax.ShapeDtypeStruct((num_pairs, down_rows(layout).count, rows // ITEM), jnp.uint32)
    call = launch(kernel, grid, out, blocks.warps, interpret=interpret)
    lines = _lines(arrays, layout.tile_rows)
    return call(x, plan.experts, plan.first_row, plan.token_of, pages, *tables, bank, *lines)


def down(
    h: jax.Array,
    plan: WindowPlan,
    arrays: Sequence[jax.Array],
    bank: jax.Array,
    pages: jax.Array,
    layout: ExpertLayout,
    blocks: LaunchBlocks,
    max_tokens: int,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Return y: f32[P, E]; rows without a pair are not written.

    Args:
        h: u32[P, down_rows, F / 32], as `gate_up` makes it.
        max_tokens: T, the most rows that one expert can have.
    """
    rows = layout.down.rows
    num_pairs = plan.token_of.shape[0]
    table = jnp.asarray(lookup_table(layout.down.type_name))
    kernel = partial(
        _down_kernel,
        layout=layout,
        blocks=blocks,
        page_lines=arrays[0].shape[1] // layout.tile_rows,
        max_tokens=max_tokens,
        interpret=interpret,
    )
    grid = rows // blocks.rows, plan.experts.shape[0]  # as of `gate_up`
    call = launch(kernel, grid, jax.ShapeDtypeStruct((num_pairs, rows), jnp.float32), blocks.warps, interpret=interpret)
    return call(h, plan.experts, plan.first_row, pages, table, bank, *_lines(arrays, layout.tile_rows))


def expert_window(
    x: jax.Array,
    plan: WindowPlan,
    weights: jax.Array,
    arrays: Sequence[jax.Array],
    bank: jax.Array,
    pages: jax.Array,
    layout: ExpertLayout,
    blocks: Blocks,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Both launches and the weighted sum: f32[T, E].

    Args:
        x: u32[T, input_rows, E / 32].
    """
    num_tokens, num_used = weights.shape
    h = gate_up(x, plan, arrays, bank, pages, layout, blocks.gate_up, interpret=interpret)
    y = down(h, plan, arrays, bank, pages, layout, blocks.down, num_tokens, interpret=interpret)
    used = plan.row_of < plan.token_of.shape[0]
    total = jnp.zeros((num_tokens, y.shape[1]), jnp.float32)
    for k in range(num_used):
        row = y[jnp.where(used[:, k], plan.row_of[:, k], 0)]
        total = total + jnp.where(used[:, k, None], weights[:, k, None] * row, 0.0)
    return total


# Kernels -------------------------------------------------------------------------------------------------------------


def _gate_up_kernel(
    x_ref: Ref,  # u32[T, input_rows, E / 32]
    experts_ref: Ref,  # i32[M]
    first_row_ref: Ref,  # i32[M + 1]
    token_ref: Ref,  # i32[P]
    pages_ref: Ref,  # i32[X]
    gate_table: Ref,  # u32[n]
    up_table: Ref,  # u32[n]
    bank_ref: Ref,  # u32[X, blob_words], host memory
    *refs: Ref,  # u32[lines, tile_rows] for each of the arena's arrays; u32[P, down_rows, F / 32] the result
    layout: ExpertLayout,
    blocks: LaunchBlocks,
    page_lines: int,
    interpret: bool,
) -> None:
    row, slot = pl.program_id(0) * blocks.rows, pl.program_id(1)
    first, count = first_row_ref[slot], first_row_ref[slot + 1] - first_row_ref[slot]
    *arena_refs, out_ref = refs
    _, up_first, _ = layout.firsts
    gate = Part(layout.gate, 0, gate_table)
    up = Part(layout.up, up_first // layout.tile_rows, up_table)
    packed = down_rows(layout)

    def store(i: int | jax.Array, sums: Sequence[jax.Array]) -> None:
        gates, ups = (jnp.sum(total, axis=0) for total in sums)
        hidden = (gates / (1.0 + jnp.exp(-gates)) * ups).reshape(-1, ITEM)
        pack_rows(out_ref, first + i, row // ITEM, pack_vector(hidden, packed.orders), packed)

    @pl.when(count > 0)
    def work() -> None:
        line = line_reader(experts_ref[slot], pages_ref, bank_ref, arena_refs, row, layout, page_lines, blocks.rows)
        vectors = Vectors(x_ref, input_rows(layout), lambda i: token_ref[first + i], count, x_ref.shape[0])
        multiply_rows((gate, up), line, row, vectors, blocks, store, interpret)


def _down_kernel(
    h_ref: Ref,  # u32[P, down_rows, F / 32]
    experts_ref: Ref,  # i32[M]
    first_row_ref: Ref,  # i32[M + 1]
    pages_ref: Ref,  # i32[X]
    table: Ref,  # u32[n]
    bank_ref: Ref,  # u32[X, blob_words], host memory
    *refs: Ref,  # u32[lines, tile_rows] for each of the arena's arrays; f32[P, E] the result
    layout: ExpertLayout,
    blocks: LaunchBlocks,
    page_lines: int,
    max_tokens: int,
    interpret: bool,
) -> None:
    row, slot = pl.program_id(0) * blocks.rows, pl.program_id(1)
    first, count = first_row_ref[slot], first_row_ref[slot + 1] - first_row_ref[slot]
    *arena_refs, out_ref = refs
    part = Part(layout.down, layout.firsts[2] // layout.tile_rows, table)

    def store(i: int | jax.Array, sums: Sequence[jax.Array]) -> None:
        (total,) = sums
        plt.store(out_ref.at[first + i, row + jnp.arange(blocks.rows, dtype=jnp.int32)], jnp.sum(total, axis=0))

    @pl.when(count > 0)
    def work() -> None:
        line = line_reader(experts_ref[slot], pages_ref, bank_ref, arena_refs, row, layout, page_lines, blocks.rows)
        vectors = Vectors(h_ref, down_rows(layout), lambda i: first + i, count, max_tokens)
        multiply_rows((part,), line, row, vectors, blocks, store, interpret)


def _lines(arrays: Sequence[jax.Array], tile_rows: int) -> list[jax.Array]:
    """The arena's arrays as u32[lines, tile_rows]: the same bytes."""
    return [array.reshape(-1, tile_rows) for array in arrays]

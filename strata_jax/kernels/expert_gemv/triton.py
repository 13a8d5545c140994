"""The routed experts of a window as two Pallas-Triton launches on packed planes.

`gate_up`: one program for each (tile of R rows of gate and up, active expert). It loads the words of its rows once,
from the arena or straight from host memory, decodes them position by position and multiplies by the rows of all tokens
that chose the expert: h = silu(gate u) * (up u). `down`: the same for the rows of down, giving one output row per pair
of token and expert; the caller sums a token's rows in ascending order of expert, so the result depends neither on where
an expert lies nor on the order in which programs run.

A matrix tile in registers is [J, R]: J items (32 columns each) by R neighbouring rows, 16 bytes of a line per thread.
Inputs of a product lie position-major, [32, items], so that position s of J items is one contiguous load. Products are
sums in float32 of whole-number codes times float32 inputs, scaled once per item or half of it.
A program is compiled for 1, 2, 4 and 8 tokens of its expert and takes the smallest that holds them.
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

from strata_jax.kernels.expert_gemv.blocks import Blocks, LaunchBlocks
from strata_jax.kernels.expert_gemv.layout import ExpertLayout, WindowPlan
from strata_jax.kernels.launch import launch
from strata_jax.kernels.planes import (
    ITEM,
    Load,
    PlaneLayout,
    decode_codes,
    decode_offset,
    decode_scales,
    load_fields,
    lookup_table,
)

Ref = Any


@dataclass(frozen=True)
class _Part:
    """One matrix of a blob in a kernel: its layout, its first line in the blob and its lookup table."""

    layout: PlaneLayout
    first_line: int
    table: Ref

    def lookup(self, index: jax.Array) -> jax.Array:
        # Entries lie anywhere. The hint only makes Triton keep the layout of the words (rows contiguous) for this load;
        # without it each lookup goes through shared memory twice. Nothing is read wider: no alignment is claimed.
        return plt.load(self.table.at[plt.max_contiguous(index.astype(jnp.int32), (1, 4))])


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
    """Return h: f32[P, 32, F / 32], position-major; rows without a pair are not written.

    Args:
        x: f32[T, 32, E / 32], position-major.
    """
    rows = layout.gate.rows
    num_pairs = plan.token_of.shape[0]
    tables = [jnp.asarray(lookup_table(part.type_name)) for part in (layout.gate, layout.up)]
    kernel = partial(_gate_up_kernel, layout=layout, blocks=blocks, page_lines=arrays[0].shape[1] // layout.tile_rows)
    # the tile of rows is the fast axis: experts start in the order of the plan
    grid = rows // blocks.rows, plan.experts.shape[0]
    out = jax.ShapeDtypeStruct((num_pairs, ITEM, rows // ITEM), jnp.float32)
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
        h: f32[P, 32, F / 32], as `gate_up` makes it.
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
    )
    grid = rows // blocks.rows, plan.experts.shape[0]  # as of `gate_up`
    call = launch(kernel, grid, jax.ShapeDtypeStruct((num_pairs, rows), jnp.float32), blocks.warps, interpret=interpret)
    return call(h, plan.experts, plan.first_row, pages, table, bank, *_lines(arrays, layout.tile_rows))


def expert_window(
    u: jax.Array,
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
    """Both launches and the weighted sum: f32[T, E]."""
    num_tokens, width = u.shape
    x = u.reshape(num_tokens, width // ITEM, ITEM).swapaxes(1, 2)
    h = gate_up(x, plan, arrays, bank, pages, layout, blocks.gate_up, interpret=interpret)
    y = down(h, plan, arrays, bank, pages, layout, blocks.down, num_tokens, interpret=interpret)
    used = plan.row_of < plan.token_of.shape[0]
    total = jnp.zeros_like(u)
    for k in range(weights.shape[1]):
        row = y[jnp.where(used[:, k], plan.row_of[:, k], 0)]
        total = total + jnp.where(used[:, k, None], weights[:, k, None] * row, 0.0)
    return total


# Kernels -------------------------------------------------------------------------------------------------------------


def _gate_up_kernel(
    x_ref: Ref,  # f32[T, 32, E / 32]
    experts_ref: Ref,  # i32[M]
    first_row_ref: Ref,  # i32[M + 1]
    token_ref: Ref,  # i32[P]
    pages_ref: Ref,  # i32[X]
    gate_table: Ref,  # u32[n]
    up_table: Ref,  # u32[n]
    bank_ref: Ref,  # u32[X, blob_words], host memory
    *refs: Ref,  # u32[lines, tile_rows] for each of the arena's arrays; f32[P, 32, F / 32] the result
    layout: ExpertLayout,
    blocks: LaunchBlocks,
    page_lines: int,
) -> None:
    row, slot = pl.program_id(0) * blocks.rows, pl.program_id(1)
    first, count = first_row_ref[slot], first_row_ref[slot + 1] - first_row_ref[slot]
    *arena_refs, out_ref = refs
    _, up_first, _ = layout.firsts
    gate = _Part(layout.gate, 0, gate_table)
    up = _Part(layout.up, up_first // layout.tile_rows, up_table)
    num_tokens = x_ref.shape[0]
    lane = jnp.arange(blocks.rows, dtype=jnp.int32)

    def work(tokens_at_once: int) -> None:
        line = _line_reader(
            experts_ref[slot], pages_ref, bank_ref, arena_refs, row, layout.tile_rows, page_lines, blocks.rows
        )
        # rows past the last are computed from a copy of it and not stored
        rows = [first + jnp.minimum(i, count - 1) for i in range(tokens_at_once)]
        tokens = [token_ref[row] for row in rows]
        gates, ups = _products((gate, up), line, row, x_ref, tokens, blocks)
        position, item = jax.lax.rem(row + lane, jnp.int32(ITEM)), jax.lax.div(row + lane, jnp.int32(ITEM))
        for i in range(tokens_at_once):
            hidden = gates[i] / (1.0 + jnp.exp(-gates[i])) * ups[i]
            _store_if(i, count, out_ref.at[first + i, position, item], hidden)

    _for_each_count(count, num_tokens, work)


def _down_kernel(
    h_ref: Ref,  # f32[P, 32, F / 32]
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
) -> None:
    row, slot = pl.program_id(0) * blocks.rows, pl.program_id(1)
    first, count = first_row_ref[slot], first_row_ref[slot + 1] - first_row_ref[slot]
    *arena_refs, out_ref = refs
    part = _Part(layout.down, layout.firsts[2] // layout.tile_rows, table)
    lane = jnp.arange(blocks.rows, dtype=jnp.int32)

    def work(tokens_at_once: int) -> None:
        line = _line_reader(
            experts_ref[slot], pages_ref, bank_ref, arena_refs, row, layout.tile_rows, page_lines, blocks.rows
        )
        rows = [first + jnp.minimum(i, count - 1) for i in range(tokens_at_once)]
        (out,) = _products((part,), line, row, h_ref, rows, blocks)
        for i in range(tokens_at_once):
            _store_if(i, count, out_ref.at[first + i, row + lane], out[i])

    _for_each_count(count, max_tokens, work)


def _for_each_count(count: jax.Array, most: int, work: Callable[[int], None]) -> None:
    """Run ``work(n)`` for the smallest n of 1, 2, 4, 8 that is at least ``count``, and nothing if there are no rows."""
    below, size = 0, 1
    while below < most:
        last = size >= most
        fits = (count > below) if last else (count > below) & (count <= size)
        pl.when(fits)(partial(work, min(size, most)))
        below, size = size, size * 2


def _store_if(i: int, count: jax.Array, ref: Ref, value: jax.Array) -> None:
    if i == 0:
        plt.store(ref, value)
    else:
        plt.store(ref, value, mask=jnp.full(value.shape, i, jnp.int32) < count)


def _products(
    parts: Sequence[_Part],
    line: Load,
    row: jax.Array,
    x_ref: Ref,
    vectors: Sequence[jax.Array],
    blocks: LaunchBlocks,
) -> list[list[jax.Array]]:
    """Multiply R rows from ``row`` of each part by some vectors: f32[R] for each part and each of ``vectors``.

    All parts have the same number of columns. ``vectors`` are indices into ``x_ref: f32[., 32, items]``.
    """
    num_items = parts[0].layout.num_items
    step = blocks.items_at_once(num_items)
    num_steps = num_items // step

    def load(first: int | jax.Array) -> list[dict[str, tuple[jax.Array, ...]]]:
        items = first + jnp.arange(step, dtype=jnp.int32)
        return [load_fields(partial(_read_words, line, part, row), part.layout, items) for part in parts]

    def multiply(
        first: int | jax.Array, fields: Sequence[dict[str, tuple[jax.Array, ...]]], sums: list[list[jax.Array]]
    ) -> list[list[jax.Array]]:
        def x(vector: jax.Array, position: int) -> jax.Array:
            return x_ref[vector, position, pl.ds(first, step)][:, None]

        return _add_items(parts, fields, x, vectors, sums)

    sums = [[jnp.zeros((step, blocks.rows), jnp.float32) for _ in vectors] for _ in parts]
    sums = jax.lax.fori_loop(0, num_steps, lambda i, sums: multiply(i * step, load(i * step), sums), sums)
    return [[jnp.sum(total, axis=0) for total in of_part] for of_part in sums]


def _add_items(
    parts: Sequence[_Part],
    fields: Sequence[dict[str, tuple[jax.Array, ...]]],
    x: Callable[[jax.Array, int], jax.Array],
    vectors: Sequence[jax.Array],
    sums: list[list[jax.Array]],
) -> list[list[jax.Array]]:
    """Add the products of J items to ``sums``: whole-number codes first, each scale once per item or half of it."""
    sums = [list(of_part) for of_part in sums]
    names = [part.layout.type_name for part in parts]
    codes = [decode_codes(f, name, part.lookup) for part, f, name in zip(parts, fields, names)]
    scales = [decode_scales(f, name) for f, name in zip(fields, names)]
    offsets = [decode_offset(f, name) for f, name in zip(fields, names)]
    halves = max(len(scale) for scale in scales)
    run = ITEM // halves
    for half in range(halves):
        products: list[list[Any]] = [[0.0] * len(vectors) for _ in parts]
        x_sums: list[Any] = [0.0] * len(vectors)
        for s in range(half * run, half * run + run):
            tiles = [next(code) for code in codes]
            for v, vector in enumerate(vectors):
                value = x(vector, s)
                x_sums[v] = x_sums[v] + value
                for p, tile in enumerate(tiles):
                    products[p][v] = products[p][v] + tile * value
        for p, scale in enumerate(scales):
            for v in range(len(vectors)):
                sums[p][v] = sums[p][v] + scale[half * len(scale) // halves] * products[p][v]
                offset = offsets[p]
                if offset is not None:
                    sums[p][v] = sums[p][v] + offset * x_sums[v]
    return sums


def _read_words(line: Load, part: _Part, row: jax.Array, word: jax.Array) -> jax.Array:
    """Words ``word: i32[J]`` of the row strings of R rows from ``row``: u32[J, R]."""
    return line(part.first_line + jax.lax.div(row, jnp.int32(part.layout.tile_rows)) * part.layout.row_words + word)


def _line_reader(
    expert: jax.Array,
    pages_ref: Ref,
    bank_ref: Ref,
    arena_refs: Sequence[Ref],
    row: jax.Array,
    tile_rows: int,
    page_lines: int,
    num_rows: int,
) -> Load:
    """Return a function that reads R neighbouring words of each of some lines of the blob: i32[J] -> u32[J, R].

    Every source is read under a mask that is the same in the whole program, so only one of them moves bytes.
    """
    page = pages_ref[expert]
    # not a remainder: Triton would no longer know that 16 bytes of a line are aligned
    lane = row - jax.lax.div(row, jnp.int32(tile_rows)) * tile_rows
    lanes = (lane + jnp.arange(num_rows, dtype=jnp.int32))[None, :]
    ends = list(accumulate(ref.shape[0] // page_lines for ref in arena_refs))

    def read(line: jax.Array) -> jax.Array:
        shape = (line.shape[0], num_rows)
        value = plt.load(
            bank_ref.at[expert, line[:, None] * tile_rows + lanes],
            mask=jnp.full(shape, page < 0),
            other=jnp.zeros(shape, jnp.uint32),
        )
        for ref, first, end in zip(arena_refs, [0, *ends], ends):
            here = (page >= first) & (page < end)
            first_line = jnp.where(here, page - first, 0) * page_lines
            value = plt.load(
                ref.at[first_line + line[:, None], lanes],
                mask=jnp.full(shape, here),
                other=value,
            )
        return value

    return read


def _lines(arrays: Sequence[jax.Array], tile_rows: int) -> list[jax.Array]:
    """The arena's arrays as u32[lines, tile_rows]: the same bytes."""
    return [array.reshape(-1, tile_rows) for array in arrays]

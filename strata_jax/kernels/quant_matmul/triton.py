"""Dense products with matrices in planes, in Pallas Triton: tensor cores for many rows, float32 sums for few."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from strata_jax.kernels.expert_gemv.blocks import LaunchBlocks
from strata_jax.kernels.expert_gemv.vectors import VectorRows, pack_rows
from strata_jax.kernels.item_products import WHOLE_BITS, add_items, decode_items, item_products
from strata_jax.kernels.launch import launch
from strata_jax.kernels.planes import ITEM, Load, PlaneLayout, load_fields, lookup_table, raw_words
from strata_jax.kernels.planes.quads import pack_vector, quad_order
from strata_jax.kernels.quant_matmul.blocks import GemvLaunch, MatmulBlocks
from strata_jax.kernels.quant_matmul.tiles import PlanePart, PlaneRows, product, row_loader, step_items, weight_tile

Ref = Any
Sums = tuple[jax.Array, ...]
# of programs with several codes: two codes for four tokens took 9 s to compile together and 2 s each alone
_MAX_TOKENS_OF_TYPES = 2
_PACK_ITEMS = 16


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
            return acc + product(rows, weight_tile(load, layout, table, k, num_items), swap=blocks.swap)

        zero = jnp.zeros((weight_rows, blocks.rows) if blocks.swap else (blocks.rows, weight_rows), jnp.float32)
        acc = jax.lax.fori_loop(0, layout.num_items // num_items, step, zero)
        out[pl.ds(first, blocks.rows), pl.ds(row, weight_rows)] = acc.T if blocks.swap else acc

    grid = (x.shape[0] // blocks.rows, layout.rows // weight_rows)
    out = jax.ShapeDtypeStruct((x.shape[0], layout.rows), jnp.float32)
    call = launch(kernel, grid, out, blocks.launch.warps, interpret=interpret)
    return call(x, words, line, jnp.asarray(lookup_table(layout.type_name)))


def decode(words: jax.Array, part: PlanePart, blocks: LaunchBlocks, interpret: bool = False) -> jax.Array:
    """Decode a whole matrix of ``words: u32[n]``: bf16[rows, cols], each weight rounded once."""
    layout, num_items = part.layout, step_items(part.layout)

    def kernel(words: Ref, table: Ref, out: Ref) -> None:
        row, step = pl.program_id(0) * blocks.rows, pl.program_id(1)
        load = row_loader(words, 0, part, row, blocks.rows)
        tile = weight_tile(load, layout, table, step, num_items)
        out[pl.ds(row, blocks.rows), pl.ds(step * num_items * ITEM, num_items * ITEM)] = tile.T

    grid = (layout.rows // blocks.rows, layout.num_items // num_items)
    out = jax.ShapeDtypeStruct((layout.rows, layout.cols), jnp.bfloat16)
    return launch(kernel, grid, out, blocks.warps, interpret=interpret)(
        words[None], jnp.asarray(lookup_table(layout.type_name))
    )


def gemv(
    x: jax.Array,
    words: jax.Array,
    parts: Sequence[PlanePart],
    blocks: GemvLaunch,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """``x: f32[T, cols]`` for small T times the transposes of matrices of ``words: u32[n]``: f32[T, rows] each.

    Matrices of one type run one code, whatever their tiles. Few tokens: one launch. More: one for each type, for the
    time to compile two codes together grows faster than their size. Products and sums are in float32, or of whole
    numbers as exact. A thread keeps the sums of its own items and rows to the end of its part of the columns; each
    item's sum of codes is scaled once.
    Parts of the columns are added in their order, by XLA in whatever uses them, so the result does not depend on when
    programs run. All matrices have the same number of columns.
    """
    of_type = dict[str, list[int]]()
    for i, part in enumerate(parts):
        of_type.setdefault(part.layout.type_name, []).append(i)
    groups, found = list(of_type.values()), dict[int, jax.Array]()
    together = blocks.tokens <= _MAX_TOKENS_OF_TYPES and not blocks.whole_numbers
    for some in [groups] if together else [[group] for group in groups]:
        found |= _launch_groups(x, words, parts, some, blocks, interpret)
    return tuple(found[i] for i in range(len(parts)))


def _launch_groups(
    x: jax.Array,
    words: jax.Array,
    parts: Sequence[PlanePart],
    groups: Sequence[Sequence[int]],
    blocks: GemvLaunch,
    interpret: bool,
) -> dict[int, jax.Array]:
    """Return the products with some of ``parts`` by their place; a group has one type."""
    num_tokens, members = x.shape[0], [i for group in groups for i in group]
    token_groups = -(-num_tokens // blocks.tokens)
    programs = [token_groups * sum(blocks.programs(parts[i].layout) for i in group) for group in groups]

    def kernel(x: Ref, whole: Ref, words: Ref, *refs: Ref) -> None:
        tables, results = refs[: len(groups)], dict(zip(members, refs[len(groups) :], strict=True))
        program, first = pl.program_id(0), 0
        for group, table, num in zip(groups, tables, programs, strict=True):
            own, outs = [parts[i] for i in group], [results[i] for i in group]
            work = partial(_gemv_group, x, whole[0], words, own, outs, table, blocks, interpret)
            if len(groups) == 1:
                work(program)
            else:
                pl.when((program >= first) & (program < first + num))(partial(work, program - first))
            first += num

    outs = tuple(jax.ShapeDtypeStruct((blocks.splits, num_tokens, parts[i].layout.rows), jnp.float32) for i in members)
    tables = [jnp.asarray(lookup_table(parts[group[0]].layout.type_name)) for group in groups]
    whole = jnp.full(1, WHOLE_BITS, jnp.uint32)
    if blocks.whole_numbers:
        x = _pack(x, VectorRows((quad_order(parts[members[0]].layout.type_name),)), interpret)
    call = launch(kernel, (sum(programs),), outs, blocks.warps, interpret=interpret)
    found = call(x, whole, words, *tables)
    return {i: functools.reduce(operator.add, split) for i, split in zip(members, found, strict=True)}


def _gemv_group(
    x: Ref,
    whole: jax.Array,
    words: Ref,
    parts: Sequence[PlanePart],
    outs: Sequence[Ref],
    table: Ref,
    blocks: GemvLaunch,
    interpret: bool,
    program: jax.Array,
) -> None:
    """One program of matrices of one type, ``outs: f32[splits, T, rows]`` of each.

    Tokens are the fastest axis: words come from the cache the second time.
    """
    layout, num_tokens = parts[0].layout, x.shape[0]
    program, token_group = _div_rem(program, -(-num_tokens // blocks.tokens))
    block, split = _div_rem(program, blocks.splits)
    # past the last token the last one is computed again
    token = [jnp.minimum(token_group * blocks.tokens + t, num_tokens - 1) for t in range(blocks.tokens)]
    firsts = [*accumulate((blocks.row_blocks(part.layout) for part in parts), initial=0)]
    here = [(block >= first) & (block < end) for first, end in itertools.pairwise(firsts)]
    own_block = _of_member(here, [block - first for first in firsts[:-1]])
    row = own_block * blocks.rows + jnp.arange(blocks.rows, dtype=jnp.int32)
    rows = _plane_rows(parts, here, row)
    load = lambda word: words[word[:, None] * rows.stride + rows.start[None, :]]  # noqa: E731
    num_items = layout.num_items // blocks.splits
    columns = _Columns(x, token, load, layout, table, whole, split * num_items, num_items, blocks, interpret)
    totals = _whole_sums(columns) if blocks.whole_numbers else _float_sums(columns)
    for t, total in enumerate(totals):
        result = jnp.sum(total, axis=0)
        for part, out, inside in zip(parts, outs, here, strict=True):
            at = out.at[split, token[t], pl.ds(own_block * blocks.rows, blocks.rows)]
            plt.store(at, result, mask=inside & (row < part.layout.rows))


@dataclass(frozen=True)
class _Columns:
    """What a program multiplies: some rows of one part of the columns by the vectors of its tokens.

    Attributes:
        x: f32[T, cols], or packed u32[T, rows, items]. token: which ones.
        load: words of its rows, i32[J] -> u32[J, R].
        first_item, num_items: the part of the columns.
    """

    x: Ref
    token: Sequence[jax.Array]
    load: Load
    layout: PlaneLayout
    table: Ref
    whole_bits: jax.Array
    first_item: jax.Array
    num_items: int
    blocks: GemvLaunch
    interpret: bool

    @property
    def zeros(self) -> Sums:
        return (jnp.zeros((self.blocks.items, self.blocks.rows), jnp.float32),) * len(self.token)


def _float_sums(p: _Columns) -> Sums:
    """Products of floats: f32[J, R] of each token."""
    size, lane = p.blocks.items, jnp.arange(p.blocks.items, dtype=jnp.int32)

    def step(k: jax.Array, totals: Sums) -> Sums:
        offset = k * size + lane
        items = p.first_item + jnp.minimum(offset, p.num_items - 1)
        inside = None if p.num_items % size == 0 else (offset < p.num_items)[:, None]
        value = lambda t, s: p.x[p.token[t], items * ITEM + s][:, None]  # noqa: E731
        fields = load_fields(p.load, p.layout, items)
        return add_items(fields, p.layout.type_name, p.table, p.whole_bits, value, inside, totals, p.interpret)

    return jax.lax.fori_loop(0, -(-p.num_items // size), step, p.zeros)


def _whole_sums(p: _Columns) -> Sums:
    """Products of whole numbers; whole steps only."""
    size, lane = p.blocks.items, jnp.arange(p.blocks.items, dtype=jnp.int32)
    num_steps, rows = p.num_items // size, VectorRows((quad_order(p.layout.type_name),))

    def read(k: jax.Array | int) -> tuple[jax.Array, ...]:
        return raw_words(p.load, p.layout, p.first_item + jnp.minimum(k, num_steps - 1) * size + lane)

    def step(k: jax.Array, carry: tuple[tuple[jax.Array, ...], Sums]) -> tuple[tuple[jax.Array, ...], Sums]:
        words, totals = carry
        following, first = read(k + 1), p.first_item + k * size
        if not p.interpret:
            plt.debug_barrier()  # or the compiler reads each word where it is needed, and waits for memory at each
        tile = decode_items(p.layout, p.table, words, first + lane, p.interpret)
        vector = lambda t: lambda row: p.x[t, row, pl.ds(first, size)][:, None]  # noqa: E731
        products = [item_products([tile], vector(t), rows, p.interpret)[0] for t in p.token]
        return following, tuple(total + product for total, product in zip(totals, products, strict=True))

    return jax.lax.fori_loop(0, num_steps, step, (read(0), p.zeros))[1]


def _pack(x: jax.Array, rows: VectorRows, interpret: bool) -> jax.Array:
    """Pack vectors ``x: f32[T, cols]``, as `pack_input` does, in one launch: u32[T, rows.count, cols / 32]."""
    num_tokens, num_items = x.shape[0], x.shape[1] // ITEM
    items = min(_PACK_ITEMS, num_items & -num_items)

    def kernel(x: Ref, out: Ref) -> None:
        token, first = pl.program_id(0), pl.program_id(1) * items
        item, place = (jnp.arange(n, dtype=jnp.int32) for n in (items, ITEM))
        values = x[token, (first + item)[:, None] * ITEM + place[None, :]]
        pack_rows(out, token, first, pack_vector(values, rows.orders), rows)

    out = jax.ShapeDtypeStruct((num_tokens, rows.count, num_items), jnp.uint32)
    return launch(kernel, (num_tokens, num_items // items), out, 4, name="pack", interpret=interpret)(x)


def _of_member(here: Sequence[jax.Array], values: Sequence[Any]) -> Any:
    """The value of the member whose program this is."""
    found = values[0]
    for inside, value in zip(here[1:], values[1:], strict=True):
        found = jnp.where(inside, value, found)
    return found


def _plane_rows(parts: Sequence[PlanePart], here: Sequence[jax.Array], row: jax.Array) -> PlaneRows:
    """Where the rows ``row: i32[R]`` of a member are; past its last tile, those of the last."""
    of_height = dict[int, jax.Array]()
    layouts = [part.layout for part in parts]
    first_word = _of_member(here, [jnp.int32(part.first_word) for part in parts])
    for height in dict.fromkeys(layout.tile_rows for layout in layouts):
        last_tile = _of_member(here, [jnp.int32(layout.rows // height - 1) for layout in layouts])
        tile, within = _div_rem(row, height)
        tile = jnp.minimum(tile, last_tile)
        of_height[height] = first_word + tile * (layouts[0].row_words * height) + within
    start = _of_member(here, [of_height[layout.tile_rows] for layout in layouts])
    stride = _of_member(here, [jnp.int32(layout.tile_rows) for layout in layouts])
    return PlaneRows(start, stride).aligned(min(of_height))


def _div_rem(value: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder; not `lax.rem`, after which Triton no longer knows that 16 bytes of a line are aligned."""
    quotient = jax.lax.div(value, jnp.int32(divisor))
    return quotient, value - quotient * divisor

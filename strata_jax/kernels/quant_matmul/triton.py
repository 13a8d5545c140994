"""Dense products with matrices in planes, in Pallas Triton: tensor cores for many rows, float32 sums for few."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from strata_jax.kernels.expert_gemv.blocks import LaunchBlocks
from strata_jax.kernels.instructions import multiply_add, quad_ops
from strata_jax.kernels.launch import launch
from strata_jax.kernels.planes import (
    ITEM,
    Load,
    PlaneLayout,
    decode_offset,
    decode_scales,
    load_fields,
    lookup_table,
)
from strata_jax.kernels.planes.quads import Ops, decode_quads, quad_order, quad_positions
from strata_jax.kernels.quant_matmul.blocks import GemvBlocks, GemvLaunch, MatmulBlocks
from strata_jax.kernels.quant_matmul.tiles import PlanePart, product, row_loader, step_items, weight_tile

Ref = Any
_WHOLE = 2**23
_WHOLE_BITS = np.float32(_WHOLE).view(np.uint32)
# of programs with several codes: two codes for four tokens took 9 s to compile together and 2 s each alone
_MAX_TOKENS_OF_GROUPS = 2


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

    One launch, or with many tokens one for each group of matrices that run the same code: the time to compile two codes
    together grows faster than their size. Products and sums are in float32. A thread keeps the sums of its own items
    and rows to the end of its part of the columns; each item's sum of codes is scaled once. Parts of the columns are
    added in their order, by XLA in whatever uses them, so the result does not depend on when programs run.
    All matrices have the same number of columns.
    """
    groups, found = _groups(parts, blocks), dict[int, jax.Array]()
    for some in [groups] if blocks.tokens <= _MAX_TOKENS_OF_GROUPS else [[group] for group in groups]:
        found |= _launch_groups(x, words, some, blocks, interpret)
    return tuple(found[i] for i in range(len(parts)))


def _launch_groups(
    x: jax.Array, words: jax.Array, groups: Sequence[_Group], blocks: GemvLaunch, interpret: bool
) -> dict[int, jax.Array]:
    """Return the products with the matrices of some groups by their place in ``words``."""
    num_tokens, members = x.shape[0], [i for group in groups for i in group.members]
    token_groups = -(-num_tokens // blocks.tokens)

    def kernel(x: Ref, whole: Ref, words: Ref, *refs: Ref) -> None:
        tables, results = refs[: len(groups)], dict(zip(members, refs[len(groups) :], strict=True))
        program, first = pl.program_id(0), 0
        for group, table in zip(groups, tables, strict=True):
            outs = [results[i] for i in group.members]
            work = partial(_gemv_group, x, whole[0], words, outs, table, group, blocks.tokens, interpret)
            programs = group.num_programs * token_groups
            if len(groups) == 1:
                work(program)
            else:
                pl.when((program >= first) & (program < first + programs))(partial(work, program - first))
            first += programs

    outs = tuple(
        jax.ShapeDtypeStruct((group.blocks.splits, num_tokens, rows), jnp.float32)
        for group in groups
        for rows in group.rows
    )
    grid = (sum(group.num_programs for group in groups) * token_groups,)
    tables = [jnp.asarray(lookup_table(group.layout.type_name)) for group in groups]
    # an operand, not a constant: an instruction has room for one constant, and would need another to bring in this one
    whole = jnp.full(1, _WHOLE_BITS, jnp.uint32)
    call = launch(kernel, grid, outs, blocks.warps, interpret=interpret)
    parts = call(x, whole, words, *tables)
    return {i: functools.reduce(operator.add, part) for i, part in zip(members, parts, strict=True)}


@dataclass(frozen=True)
class _Group:
    """Matrices of one type whose programs run the same code, so that it is compiled once.

    ``members``: their places in the call. ``layout``: of the first one; the others differ in ``rows`` and in where
    their words begin, ``first_words``.
    """

    members: tuple[int, ...]
    layout: PlaneLayout
    blocks: GemvBlocks
    rows: tuple[int, ...]
    first_words: tuple[int, ...]

    @property
    def num_programs(self) -> int:
        return sum(self.rows) // self.blocks.rows * self.blocks.splits


def _groups(parts: Sequence[PlanePart], blocks: GemvLaunch) -> list[_Group]:
    found: dict[Any, list[int]] = {}
    for i, (part, own) in enumerate(zip(parts, blocks.matrices, strict=True)):
        found.setdefault((part.layout.type_name, part.layout.tile_rows, own), []).append(i)
    return [
        _Group(
            tuple(members), parts[members[0]].layout, own, tuple(parts[i].layout.rows for i in members),
            tuple(parts[i].first_word for i in members),
        )
        for (_, _, own), members in found.items()
    ]  # fmt: skip


def _gemv_group(
    x: Ref,
    whole: jax.Array,
    words: Ref,
    outs: Sequence[Ref],
    table: Ref,
    group: _Group,
    tokens: int,
    interpret: bool,
    program: jax.Array,
) -> None:
    """One program of a group, ``outs: f32[splits, T, rows]`` of its matrices.

    Tokens are the fastest axis: words come from the cache the second time.
    """
    layout, blocks, num_tokens = group.layout, group.blocks, x.shape[0]
    program, token_group = _div_rem(program, -(-num_tokens // tokens))
    block, split = _div_rem(program, blocks.splits)
    # past the last token the last one is computed again
    token = [jnp.minimum(token_group * tokens + t, num_tokens - 1) for t in range(tokens)]
    starts = [*accumulate((rows // blocks.rows for rows in group.rows[:-1]), initial=0)]
    ends = [*starts[1:], sum(group.rows) // blocks.rows]
    here = [(block >= start) & (block < end) for start, end in zip(starts, ends)]
    first_run = jnp.int32(group.first_words[0] // layout.tile_rows)
    for start, inside, first_word in zip(starts[1:], here[1:], group.first_words[1:]):
        block = jnp.where(inside, block - start, block)
        first_run = jnp.where(inside, jnp.int32(first_word // layout.tile_rows), first_run)
    row = block * blocks.rows
    load = _row_words(words, first_run, layout, block, blocks.rows)
    num_items = layout.num_items // blocks.splits
    first_item = split * num_items

    def step(k: jax.Array | int, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        offset = k * blocks.items + jnp.arange(blocks.items, dtype=jnp.int32)
        items = first_item + jnp.minimum(offset, num_items - 1)
        inside = None if num_items % blocks.items == 0 else (offset < num_items)[:, None]
        fields = load_fields(load, layout, items)
        value = lambda t, s: x[token[t], items * ITEM + s][:, None]  # noqa: E731
        return _add_items(fields, layout.type_name, table, whole, value, inside, totals, interpret)

    zero = jnp.zeros((blocks.items, blocks.rows), jnp.float32)
    totals = jax.lax.fori_loop(0, -(-num_items // blocks.items), step, (zero,) * tokens)
    for t, total in enumerate(totals):
        result = jnp.sum(total, axis=0)
        for out, inside in zip(outs, here):
            at = out.at[split, token[t], pl.ds(row, blocks.rows)]
            plt.store(at, result, mask=None if len(outs) == 1 else jnp.full(result.shape, inside))


def _row_words(words: Ref, first_run: jax.Array, layout: PlaneLayout, block: jax.Array, num_rows: int) -> Load:
    """Return ``load(word: i32[J]) -> u32[J, num_rows]``: words of a block of rows of a matrix.

    ``first_run``: of ``tile_rows`` words, where the matrix begins.
    """
    tile, part = _div_rem(block, layout.tile_rows // num_rows)
    lanes = part * num_rows + jnp.arange(num_rows, dtype=jnp.int32)

    def load(word: jax.Array) -> jax.Array:
        return words[(first_run + tile * layout.row_words + word)[:, None] * layout.tile_rows + lanes[None, :]]

    return load


def _add_items(
    fields: Mapping[str, tuple[jax.Array, ...]],
    type_name: str,
    table: Ref,
    whole: jax.Array,
    value: Callable[[int, int], jax.Array],
    inside: jax.Array | None,
    totals: tuple[jax.Array, ...],
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Add the products of J items to ``totals: f32[J, R]`` of each token; ``value(t, s): f32[J, 1]``, position s."""
    fma = partial(multiply_add, interpret=interpret)
    scales, offset = decode_scales(fields, type_name), decode_offset(fields, type_name)
    if inside is not None:  # items past the last are copies of it
        scales = tuple(jnp.where(inside, scale, 0.0) for scale in scales)
        offset = None if offset is None else jnp.where(inside, offset, 0.0)
    ops = quad_ops(interpret)
    quads = decode_quads(fields, type_name, partial(_look_up, table), ops)
    positions, per_scale = quad_positions(quad_order(type_name)), len(quads) // len(scales)
    found, sums, group = list(totals), dict[int, jax.Array](), dict[int, jax.Array]()
    for i, quad in enumerate(quads):
        for byte, code in enumerate(_quad_codes(quad, whole, ops)):
            for t in range(len(totals)):
                x = value(t, positions[i][byte])
                if offset is not None:
                    sums[t] = sums[t] + x if t in sums else x
                group[t] = fma(code, x, group[t]) if t in group else code * x
        if (i + 1) % per_scale == 0:
            found = [fma(group.pop(t), scales[i // per_scale], total) for t, total in enumerate(found)]
    if offset is not None:
        found = [fma(offset, sums[t], total) for t, total in enumerate(found)]
    return tuple(found)


def _quad_codes(quad: jax.Array, whole: jax.Array, ops: Ops) -> Iterator[jax.Array]:
    """Yield the four signed bytes of a quad as f32.

    A whole number in the last bits of the float 2^23 is that float plus the number: one instruction puts it there, one
    subtracts; shifting, masking and converting would take more.
    """
    unsigned, high = quad ^ np.uint32(0x80808080), jnp.broadcast_to(whole, quad.shape)
    for byte in range(4):
        bits = ops.permute(unsigned, high, jnp.full(quad.shape, 0x7440 + byte, jnp.uint32))
        yield jax.lax.bitcast_convert_type(bits, jnp.float32) - np.float32(_WHOLE + 128)


def _look_up(table: Ref, index: jax.Array) -> jax.Array:
    # entries lie anywhere: the hint only keeps the layout of the words, or each lookup would go through memory twice
    return plt.load(table.at[plt.max_contiguous(index.astype(jnp.int32), (1, 4))])


def _div_rem(value: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder; not `lax.rem`, after which Triton no longer knows that 16 bytes of a line are aligned."""
    quotient = jax.lax.div(value, jnp.int32(divisor))
    return quotient, value - quotient * divisor

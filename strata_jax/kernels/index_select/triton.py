"""Scores and choice as two Pallas-Triton launches whose work follows the blocks that tokens see, not the capacity.

`index_scores`: a program multiplies the index queries of some tokens by every n-th tile of keys on tensor cores, with
all bits of both (`kernels/split_dot.py`), which is as exact as a float32 product.

`best_blocks`: one program for each token. Scores are not negative, so their bits are ordered like them; the smallest
kept score is found two bits at a time by counting how many scores reach each of three candidates. One more pass gives
every kept block its place, a running count of those before it; of the blocks with the smallest kept score it takes the
first ones that still fit. The first tile of scores stays in registers through all passes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from strata_jax.kernels.index_select.blocks import Blocks
from strata_jax.kernels.launch import launch
from strata_jax.kernels.split_dot import split_dot

Ref = Any
Load = Callable[[jax.Array], jax.Array]
"""A tile's number to the bits of its scores."""

NUM_PARTS = 3  # all bits of a float32
MIN_ROWS = 16  # of a product on tensor cores
DIGIT_BITS = 2
ROW_MULTIPLE = 4  # scores of a row: rows then start at multiples of 16 bytes
COUNT_BITS = 16  # of a tile's count; two counts share a word


def index_scores(
    q: jax.Array, keys: jax.Array, seen: jax.Array, blocks: Blocks, *, interpret: bool = False
) -> jax.Array:
    """See `strata_jax.kernels.index_select.index_scores`."""
    num_tokens, num_heads, width = q.shape
    num_blocks = keys.shape[0]
    columns = pl.cdiv(num_blocks, ROW_MULTIPLE) * ROW_MULTIPLE
    # few rows, or as many as the products of a group of warps take: those between would need too many registers
    rows = max(num_heads, MIN_ROWS if num_tokens * num_heads <= MIN_ROWS else blocks.score_rows)
    num_token_tiles, num_tiles = pl.cdiv(num_tokens * num_heads, rows), pl.cdiv(num_blocks, blocks.score_blocks)
    programs = max(1, min(num_tiles, blocks.score_programs // num_token_tiles))
    kernel = partial(_score_kernel, rows=rows, heads=num_heads, tile=blocks.score_blocks, programs=programs)
    out = jax.ShapeDtypeStruct((num_tokens, columns), jnp.float32)
    call = launch(kernel, (programs, num_token_tiles), out, blocks.score_warps, interpret=interpret)
    return call(q.reshape(num_tokens * num_heads, width), keys, seen)


def _score_kernel(
    q_ref: Ref,  # f32[T H, d]
    keys_ref: Ref,  # f32[B, d]
    seen_ref: Ref,  # i32[T]
    out_ref: Ref,  # f32[T, B']
    *,
    rows: int,
    heads: int,
    tile: int,
    programs: int,
) -> None:
    num_rows, width = q_ref.shape
    num_blocks, tokens = keys_ref.shape[0], rows // heads
    program, first_token = pl.program_id(0), pl.program_id(1) * tokens
    token = first_token + jnp.arange(tokens)
    is_token = token < num_rows // heads
    seen = plt.load(seen_ref.at[token], mask=is_token, other=jnp.zeros_like(token))
    live = jnp.minimum(jnp.max(seen), num_blocks)
    num_tiles = jax.lax.div(live + (tile - 1), jnp.int32(tile))
    row, column = first_token * heads + jnp.arange(rows), jnp.arange(width)
    q = _load_rows(q_ref, row, column, row < num_rows)

    def step(i: jax.Array, _: jax.Array) -> jax.Array:
        block = (program + i * programs) * tile + jnp.arange(tile)
        keys = _load_rows(keys_ref, block, column, block < live)
        dots = split_dot(q, keys, (((1,), (1,)), ((), ())), NUM_PARTS)
        scores = jnp.sum(jnp.maximum(dots, 0.0).reshape(tokens, heads, tile), axis=1)
        place = out_ref.at[token[:, None], block[None, :]]
        plt.store(place, scores, mask=is_token[:, None] & (block < live)[None, :])
        return _

    jax.lax.fori_loop(0, jax.lax.div(num_tiles - program + (programs - 1), jnp.int32(programs)), step, jnp.int32(0))


def best_blocks(
    scores: jax.Array, seen: jax.Array, num_kept: int, blocks: Blocks, *, interpret: bool = False
) -> jax.Array:
    """See `strata_jax.kernels.index_select.best_blocks`."""
    num_tokens, num_blocks = scores.shape
    tile = min(blocks.choose_blocks, max(16, pl.next_power_of_2(num_blocks)))
    kernel = partial(_choose_kernel, tile=tile)
    out = jax.ShapeDtypeStruct((num_tokens, num_kept), jnp.int32)
    warps = max(1, min(blocks.choose_warps, tile // 128))
    return launch(kernel, (num_tokens,), out, warps, interpret=interpret)(scores, seen)


def _choose_kernel(
    scores_ref: Ref,  # f32[T, B]
    seen_ref: Ref,  # i32[T]
    out_ref: Ref,  # i32[T, k]
    *,
    tile: int,
) -> None:
    token, (num_kept, num_blocks) = pl.program_id(0), (out_ref.shape[1], scores_ref.shape[1])
    live = jnp.minimum(seen_ref[token], num_blocks)
    num_tiles = jax.lax.div(live + (tile - 1), jnp.int32(tile))

    def load(i: jax.Array | int) -> jax.Array:
        block = i * tile + jnp.arange(tile)
        score = plt.load(scores_ref.at[token, block], mask=block < live, other=jnp.zeros(tile, jnp.float32))
        return jax.lax.bitcast_convert_type(jnp.where(score > 0, score, 0.0), jnp.uint32)

    first = load(0)
    smallest = _smallest_kept(first, load, num_tiles, num_kept, live)
    num_above = _over_tiles(lambda bits: _count(bits > smallest), first, load, num_tiles)
    room = jnp.minimum(num_kept, live) - num_above  # for blocks with the smallest kept score

    def place(i: jax.Array | int, bits: jax.Array, before: tuple[jax.Array, jax.Array]
              ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        # blocks that the token does not see score 0 here: they come last, when there is no more room
        better, equal = bits > smallest, bits == smallest
        # both running counts in one scan: a tile has at most 2^15 blocks
        counts = jnp.cumsum(_count(better) + (_count(equal) << COUNT_BITS))
        num_better, num_equal = before[0] + (counts & (2**COUNT_BITS - 1)), before[1] + (counts >> COUNT_BITS)
        kept = better | (equal & (num_equal <= room))
        # those that are not kept point past the row: where masks are emulated, no place may have two owners
        entry = jnp.where(kept, num_better + jnp.minimum(num_equal, room) - 1, num_kept)
        plt.store(out_ref.at[token, entry], i * tile + jnp.arange(tile), mask=kept)
        return before[0] + jnp.sum(_count(better)), before[1] + jnp.sum(_count(equal))

    before = place(0, first, (jnp.int32(0), jnp.int32(0)))
    jax.lax.fori_loop(1, num_tiles, lambda i, before: place(i, load(i), before), before)
    entry = jnp.arange(pl.next_power_of_2(num_kept))
    unused = (entry >= live) & (entry < num_kept)
    plt.store(out_ref.at[token, entry], jnp.zeros_like(entry), mask=unused)


def _smallest_kept(first: jax.Array, load: Load, num_tiles: jax.Array, num_kept: int, live: jax.Array) -> jax.Array:
    """Return the bits of the score with rank ``num_kept``, the largest value that so many reach; 0 if all are kept."""
    digits = range(1, 2**DIGIT_BITS)

    def digit(i: jax.Array, found: jax.Array) -> jax.Array:
        shift = (32 - DIGIT_BITS) - DIGIT_BITS * i.astype(jnp.uint32)
        candidates = [found + (jnp.uint32(d) << shift) for d in digits]

        def reach(bits: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(_count(bits >= candidate) for candidate in candidates)

        counts = _over_tiles(reach, first, load, num_tiles)
        return found + (sum((count >= num_kept).astype(jnp.uint32) for count in counts) << shift)

    num_digits = (num_kept < live).astype(jnp.int32) * (32 // DIGIT_BITS)
    return jax.lax.fori_loop(0, num_digits, digit, jnp.uint32(0))


def _over_tiles(count: Callable[[jax.Array], Any], first: jax.Array, load: Load, num_tiles: jax.Array) -> Any:
    """Sum what ``count(bits)`` gives for every score, the first tile being in registers."""

    def step(i: jax.Array, totals: Any) -> Any:
        return jax.tree.map(jnp.add, totals, count(load(i)))

    return jax.tree.map(jnp.sum, jax.lax.fori_loop(1, num_tiles, step, count(first)))


def _count(where: jax.Array) -> jax.Array:
    return where.astype(jnp.int32)


def _load_rows(ref: Ref, row: jax.Array, column: jax.Array, mask: jax.Array) -> jax.Array:
    shape = (row.shape[0], column.shape[0])
    mask = jnp.broadcast_to(mask[:, None], shape)
    return plt.load(ref.at[row[:, None], column[None, :]], mask=mask, other=jnp.zeros(shape, ref.dtype))

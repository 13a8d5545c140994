"""Scores and choice as Pallas-Triton launches whose work follows the blocks that tokens see, not the capacity.

`index_scores`: a program multiplies the index queries of some tokens by every n-th tile of keys on tensor cores, with
all bits of both (`kernels/split_dot.py`), which is as exact as a float32 product.

`best_blocks`: one program for each token. Scores are not negative, so their bits are ordered like them; the border
between what is kept and what is not is found by counting how many scores reach each of three values between its two
bounds. One more pass gives every kept block its place, a running count of those before it; of the blocks whose score is
the border it takes the first ones that still fit. The first tile of scores stays in registers through all passes. With
few tokens and many blocks, each part of a token's blocks has a program, and a second launch chooses among the kept ones
of all parts: what is best is best in its part, and parts are in order, so the choice is the same.
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
Ends = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""A value that enough scores reach, one that too few reach, and how many reach each of them."""

NUM_PARTS = 3  # all bits of a float32
MIN_ROWS = 16  # of a product on tensor cores
PROBES = 3  # values between the two ends whose scores are counted at a time
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
    choose = partial(_choose, seen=seen, num_kept=num_kept, blocks=blocks, interpret=interpret)
    if num_tokens > blocks.split_tokens or num_blocks <= blocks.choose_blocks:
        return choose(scores)[0].reshape(num_tokens, num_kept)
    part = part_blocks(num_blocks, num_kept)
    names, kept = (found.reshape(num_tokens, -1) for found in choose(scores, part=part))
    return choose(kept, names=names, part_before=part)[0].reshape(num_tokens, num_kept)


def part_blocks(num_blocks: int, num_kept: int) -> int:
    """Blocks of a part, so that there are about as many in a part as all parts keep: a power of two."""
    return max(pl.next_power_of_2(num_kept), pl.next_power_of_2(int((num_blocks * num_kept) ** 0.5)))


def _choose(
    scores: jax.Array,
    *,
    seen: jax.Array,
    num_kept: int,
    blocks: Blocks,
    interpret: bool,
    names: jax.Array | None = None,
    part: int | None = None,
    part_before: int | None = None,
) -> tuple[jax.Array, ...]:
    """Choose in each part of a row: blocks i32[T, P, k], and with a ``part`` their scores f32[T, P, k].

    Args:
        scores: f32[T, B], of all blocks or, with ``names: i32[T, B]``, of those that parts of ``part_before`` kept.
    """
    (num_tokens, num_blocks), shape = scores.shape, jax.ShapeDtypeStruct
    size = num_blocks if part is None else part
    tile = min(blocks.choose_blocks, max(16, pl.next_power_of_2(size)))
    kernel = partial(_choose_kernel, tile=tile, part=size, part_before=part_before)
    found = num_tokens, pl.cdiv(num_blocks, size), num_kept
    out = [shape(found, jnp.int32)] + ([] if part is None else [shape(found, jnp.float32)])
    warps = max(1, min(blocks.choose_warps, tile // blocks.choose_warp_blocks))
    call = launch(kernel, found[:2], tuple(out), warps, interpret=interpret)
    return call(scores, seen, *([] if names is None else [names]))


def _choose_kernel(
    scores_ref: Ref,  # f32[T, B]
    seen_ref: Ref,  # i32[T]
    *refs: Ref,  # with part_before: names i32[T, B]; out i32[T, P, k]; where there are parts: its scores f32[T, P, k]
    tile: int,
    part: int,
    part_before: int | None,
) -> None:
    names_ref, (out_ref, *kept_refs) = (None, refs) if part_before is None else (refs[0], refs[1:])
    token, own = pl.program_id(0), pl.program_id(1)
    num_kept, num_blocks, first_block = out_ref.shape[2], scores_ref.shape[1], own * part
    live = seen_ref[token]
    if part_before is not None:  # all parts but the last one that has any are full
        full = jax.lax.div(live, jnp.int32(part_before))
        live = full * num_kept + jnp.minimum(live - full * part_before, num_kept)
    live = jnp.clip(jnp.minimum(live, num_blocks) - first_block, 0, part)
    num_tiles = jax.lax.div(live + (tile - 1), jnp.int32(tile))

    def load(i: jax.Array | int, size: int = tile) -> jax.Array:
        block = i * size + jnp.arange(size)
        at = scores_ref.at[token, first_block + block]
        score = plt.load(at, mask=block < live, other=jnp.zeros(size, jnp.float32))
        return jax.lax.bitcast_convert_type(jnp.where(score > 0, score, 0.0), jnp.int32)

    def keep(entry: jax.Array, block: jax.Array, bits: jax.Array, kept: jax.Array) -> None:
        name = first_block + block
        if names_ref is not None:
            name = plt.load(names_ref.at[token, name], mask=kept, other=jnp.zeros_like(name))
        plt.store(out_ref.at[token, own, entry], name, mask=kept)
        for kept_ref in kept_refs:
            score = jax.lax.bitcast_convert_type(bits, jnp.float32)
            plt.store(kept_ref.at[token, own, entry], score, mask=kept)

    @pl.when(live <= num_kept)
    def _() -> None:
        entry = jnp.arange(pl.next_power_of_2(num_kept))
        keep(jnp.where(entry < live, entry, num_kept), entry, load(0, entry.shape[0]), entry < live)
        unused = (entry >= live) & (entry < num_kept)
        plt.store(out_ref.at[token, own, entry], jnp.zeros_like(entry), mask=unused)

    @pl.when(live > num_kept)
    def _() -> None:
        first = load(0)
        border, num_above = _border(first, load, num_tiles, num_kept)
        room = num_kept - num_above  # for blocks whose score is the border

        def place(i: jax.Array | int, bits: jax.Array, before: tuple[jax.Array, jax.Array]
                  ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
            # blocks that the token does not see score 0 here: they come last, when there is no more room
            better, equal = bits > border, bits == border
            # both running counts in one scan: a tile has at most 2^15 blocks
            counts = jnp.cumsum(_count(better) + (_count(equal) << COUNT_BITS))
            num_better, num_equal = before[0] + (counts & (2**COUNT_BITS - 1)), before[1] + (counts >> COUNT_BITS)
            kept = better | (equal & (num_equal <= room))
            # those that are not kept point past the row: where masks are emulated, no place may have two owners
            entry = jnp.where(kept, num_better + jnp.minimum(num_equal, room) - 1, num_kept)
            keep(entry, i * tile + jnp.arange(tile), bits, kept)
            return before[0] + jnp.sum(_count(better)), before[1] + jnp.sum(_count(equal))

        before = place(0, first, (jnp.int32(0), jnp.int32(0)))
        jax.lax.fori_loop(1, num_tiles, lambda i, before: place(i, load(i), before), before)


def _border(first: jax.Array, load: Load, num_tiles: jax.Array, num_kept: int) -> tuple[jax.Array, jax.Array]:
    """Return a border and how many scores are above it: these are kept, and of those at the border the first ones.

    There are more than ``num_kept`` scores. Between a value that so many reach and one that too few reach lies less and
    less, until nothing is between them, or exactly ``num_kept`` reach the lower one.
    """
    most = jax.lax.fori_loop(1, num_tiles, lambda i, most: jnp.maximum(most, load(i)), first)
    groups, low = pl.next_power_of_2(num_kept), jnp.int32(0)
    if groups <= first.shape[0]:  # in each of at least num_kept groups of scores there is one that reaches this
        low = jnp.min(jnp.max(most.reshape(-1, groups), axis=0))

    def undecided(ends: Ends) -> jax.Array:
        low, high, reach_low, _ = ends
        return (high - low > 1) & (reach_low != num_kept)

    def narrowed(ends: Ends) -> Ends:
        low, high, reach_low, reach_high = ends
        step = jnp.maximum(jax.lax.div(high - low, jnp.int32(PROBES + 1)), 1)
        probes = [low + step * (i + 1) for i in range(PROBES)]
        counts = _over_tiles(lambda bits: tuple(_count(bits >= probe) for probe in probes), first, load, num_tiles)
        tried = list(zip(probes, counts, strict=True))
        for probe, count in tried:
            enough = count >= num_kept
            low, reach_low = jnp.where(enough, probe, low), jnp.where(enough, count, reach_low)
        for probe, count in reversed(tried):
            few = count < num_kept
            high, reach_high = jnp.where(few, probe, high), jnp.where(few, count, reach_high)
        return low, high, reach_low, reach_high

    start = low, jnp.max(most) + 1, jnp.int32(num_kept + 1), jnp.int32(0)  # more than num_kept may reach the first one
    low, _, reach_low, reach_high = jax.lax.while_loop(undecided, narrowed, start)
    exact = reach_low == num_kept
    return jnp.where(exact, low - 1, low), jnp.where(exact, num_kept, reach_high)


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

"""Routing in Pallas Triton: scores stay in registers, one lane an expert.

The best K are taken one after the other: the largest score, then the lowest expert that has it. Scores are not
negative, so their bits order as they do, a NaN first. Where an expert stands in its token's list, in the window's list
of experts and among its rows are running sums over the experts; every result goes straight to its place.
`route_window` is one launch: its first program routes, the others weigh the shared expert, one for each token, and pack
the tokens' vectors meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from strata_jax.kernels.expert_gemv import VectorRows, WindowPlan, pack_rows
from strata_jax.kernels.launch import launch
from strata_jax.kernels.planes import ITEM
from strata_jax.kernels.planes.quads import pack_vector

Ref = Any

_PACK_ITEMS = 16
_CHUNK_WARPS = 1
_FIELD_BITS = 8  # of the four running sums that share a word: 80 pairs at most


def choose_experts(scores: jax.Array, num_used: int, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Return ids i32[T, K] and weights f32[T, K]; one program a token."""
    num_tokens = scores.shape[0]

    def kernel(scores_ref: Ref, ids_ref: Ref, weights_ref: Ref) -> None:
        chosen = _choose(scores_ref, pl.program_id(0), 1, num_used)
        chosen.store(ids_ref, weights_ref, chosen.mask)

    shape = num_tokens, num_used
    out = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
    return launch(kernel, (num_tokens,), out, _CHUNK_WARPS, interpret=interpret)(scores)


def route_window(
    scores: jax.Array,
    u: jax.Array,
    shared_router: jax.Array,
    pages: jax.Array,
    count: jax.Array,
    *,
    num_used: int,
    rows: VectorRows,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, WindowPlan, jax.Array]:
    """Return ids, weights, the shared expert's weights, hits, uses, the plan and the packed vectors."""
    (num_tokens, num_experts), num_items = scores.shape, u.shape[1] // ITEM
    num_pairs = num_tokens * num_used
    size = min(num_experts, num_pairs)
    items = min(_PACK_ITEMS, num_items & -num_items)
    integers = [
        jax.ShapeDtypeStruct(shape, jnp.int32)
        for shape in ((num_tokens, num_used), (1,), (num_experts,), (size,), (size + 1,), (num_pairs,))
    ]
    out = (
        *integers,
        jax.ShapeDtypeStruct((num_tokens, num_used), jnp.int32),
        jax.ShapeDtypeStruct((num_tokens, num_used), jnp.float32),
        jax.ShapeDtypeStruct((num_tokens, 1), jnp.float32),
        jax.ShapeDtypeStruct((num_tokens, rows.count, num_items), jnp.uint32),
    )
    kernel = partial(_window_kernel, num_used=num_used, rows=rows, items=items)
    grid = (1 + num_tokens + num_tokens * (num_items // items),)
    call = launch(kernel, grid, out, 4 if num_tokens <= 4 else 8, interpret=interpret)
    found = call(scores, u, shared_router, pages, count.reshape(1))
    ids, hits, uses, experts, first_row, token_of, row_of, weights, shared, x = found
    return ids, weights, shared, hits[0], uses, WindowPlan(experts, first_row, token_of, row_of), x


def _window_kernel(
    scores_ref: Ref,  # f32[T, X]
    u_ref: Ref,  # f32[T, E]
    shared_router_ref: Ref,  # f32[E]
    pages_ref: Ref,  # i32[X]
    count_ref: Ref,  # i32[1]
    ids_ref: Ref,  # i32[T, K]
    hits_ref: Ref,  # i32[1]
    uses_ref: Ref,  # i32[X]
    experts_ref: Ref,  # i32[M]
    first_row_ref: Ref,  # i32[M + 1]
    token_of_ref: Ref,  # i32[P]
    row_of_ref: Ref,  # i32[T, K]
    weights_ref: Ref,  # f32[T, K]
    shared_ref: Ref,  # f32[T, 1]
    x_ref: Ref,  # u32[T, rows.count, E / 32]
    *,
    num_used: int,
    rows: VectorRows,
    items: int,
) -> None:
    program, num_tokens = pl.program_id(0), u_ref.shape[0]

    @pl.when(program == 0)
    def route() -> None:
        plan = experts_ref, first_row_ref, token_of_ref, row_of_ref
        _route(scores_ref, pages_ref, count_ref[0], num_used, ids_ref, weights_ref, hits_ref, uses_ref, plan)

    @pl.when((program > 0) & (program <= num_tokens))
    def weigh_shared() -> None:
        token, width = program - 1, u_ref.shape[1]
        column = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
        none = jnp.zeros(column.shape, jnp.float32)
        value = plt.load(u_ref.at[token, column], mask=column < width, other=none)
        factor = plt.load(shared_router_ref.at[column], mask=column < width, other=none)
        shared_ref[token, 0] = 1.0 / (1.0 + jnp.exp(-jnp.sum(value * factor)))

    @pl.when(program > num_tokens)
    def pack() -> None:
        per_token = x_ref.shape[2] // items
        run = program - 1 - num_tokens
        token = jax.lax.div(run, per_token)
        first = (run - token * per_token) * items
        item, place = (jnp.arange(n, dtype=jnp.int32) for n in (items, ITEM))
        values = plt.load(u_ref.at[token, (first + item)[:, None] * ITEM + place[None, :]])
        pack_rows(x_ref, token, first, pack_vector(values, rows.orders), rows)


def _route(
    scores_ref: Ref,
    pages_ref: Ref,
    count: jax.Array,
    num_used: int,
    ids_ref: Ref,
    weights_ref: Ref,
    hits_ref: Ref,
    uses_ref: Ref,
    plan: tuple[Ref, Ref, Ref, Ref],
) -> None:
    """Write everything but the vectors."""
    num_tokens, num_experts = scores_ref.shape
    experts_ref, first_row_ref, token_of_ref, row_of_ref = plan
    chosen = _choose(scores_ref, 0, num_tokens, num_used)
    expert, token = chosen.expert, chosen.token[:, None]
    real = token < jnp.minimum(count, num_tokens)
    mask = chosen.mask & real
    chosen.store(ids_ref, weights_ref, mask)

    exists = expert < num_experts
    resident = plt.load(pages_ref.at[expert], mask=exists, other=jnp.full(expert.shape, -1, jnp.int32)) >= 0
    uses = jnp.sum(mask.astype(jnp.int32), axis=0)
    plt.store(uses_ref.at[expert], uses, mask=exists)
    hits_ref[0] = jnp.sum(jnp.where(resident, uses, 0))

    # running sums of experts and rows, of missing and resident ones apart
    side = jnp.where(resident, 2 * _FIELD_BITS, 0)
    own = (jnp.where(uses > 0, 1, 0) + (uses << _FIELD_BITS)) << side
    before = jnp.cumsum(own, axis=0) - own
    totals = jnp.sum(own, axis=0)
    all_missing, missing_rows = _field(totals, 0), _field(totals, 1)
    num_active, num_rows = all_missing + _field(totals, 2), missing_rows + _field(totals, 3)
    group = _field(before >> side, 0) + jnp.where(resident, all_missing, 0)
    first_row = _field(before >> side, 1) + jnp.where(resident, missing_rows, 0)
    group = _only(group, uses > 0)
    plt.store(experts_ref.at[group], expert, mask=uses > 0)
    plt.store(first_row_ref.at[group], first_row, mask=uses > 0)

    one = mask.astype(jnp.int32)
    row = first_row[None, :] + jnp.cumsum(one, axis=0) - one
    tokens = jnp.broadcast_to(token, row.shape)
    plt.store(token_of_ref.at[_only(row, mask)], tokens, mask=mask)
    plt.store(row_of_ref.at[tokens, _only(chosen.place, mask)], row, mask=mask)

    # what is not used
    slots = jnp.arange(pl.next_power_of_2(first_row_ref.shape[0]), dtype=jnp.int32)
    rest = slots >= num_active
    plt.store(experts_ref.at[slots], jnp.zeros_like(slots), mask=rest & (slots < experts_ref.shape[0]))
    ends = jnp.full(slots.shape, num_rows, jnp.int32)
    plt.store(first_row_ref.at[slots], ends, mask=rest & (slots < first_row_ref.shape[0]))
    pairs = jnp.arange(pl.next_power_of_2(token_of_ref.shape[0]), dtype=jnp.int32)
    unused = (pairs >= num_rows) & (pairs < token_of_ref.shape[0])
    plt.store(token_of_ref.at[pairs], jnp.zeros_like(pairs), mask=unused)
    place = jnp.arange(pl.next_power_of_2(num_used), dtype=jnp.int32)[None, :]
    skipped = jnp.broadcast_to(~real & (token < num_tokens), (token.shape[0], place.shape[1])) & (place < num_used)
    for ref, value in ((ids_ref, num_experts), (row_of_ref, token_of_ref.shape[0]), (weights_ref, 0.0)):
        at = ref.at[jnp.broadcast_to(token, skipped.shape), jnp.broadcast_to(place, skipped.shape)]
        plt.store(at, jnp.full(skipped.shape, value, ref.dtype), mask=skipped)


def _only(index: jax.Array, mask: jax.Array) -> jax.Array:
    """Indices that are not meant far away: the interpreter writes what was there, maybe over what is meant."""
    return jnp.where(mask, index, jnp.iinfo(jnp.int32).max)


def _field(word: jax.Array, index: int) -> jax.Array:
    return (word >> (index * _FIELD_BITS)) & ((1 << _FIELD_BITS) - 1)


@dataclass(frozen=True)
class _Chosen:
    """Experts of some tokens, both padded to powers of two.

    Attributes:
        token: i32[T']. expert: i32[X'].
        mask: bool[T', X'], the chosen pairs; none of a token that does not exist.
        place: i32[T', X'], where a chosen expert stands in its token's list.
        weight: f32[T', X'].
    """

    token: jax.Array
    expert: jax.Array
    mask: jax.Array
    place: jax.Array
    weight: jax.Array

    def store(self, ids_ref: Ref, weights_ref: Ref, mask: jax.Array) -> None:
        token, expert = (jnp.broadcast_to(v, mask.shape) for v in (self.token[:, None], self.expert[None, :]))
        place = _only(self.place, mask)
        plt.store(ids_ref.at[token, place], expert, mask=mask)
        plt.store(weights_ref.at[token, place], self.weight, mask=mask)


def _choose(scores_ref: Ref, first: int | jax.Array, size: int, num_used: int) -> _Chosen:
    """Choose the experts of ``size`` tokens from ``first``."""
    num_experts = scores_ref.shape[1]
    token = first + jnp.arange(pl.next_power_of_2(size), dtype=jnp.int32)
    expert = jnp.arange(pl.next_power_of_2(num_experts), dtype=jnp.int32)
    known = jnp.minimum(token, first + size - 1)[:, None]
    exists = jnp.broadcast_to(expert < num_experts, (token.shape[0], expert.shape[0]))
    at = scores_ref.at[jnp.broadcast_to(known, exists.shape), jnp.broadcast_to(expert, exists.shape)]
    scores = plt.load(at, mask=exists, other=jnp.full(exists.shape, -jnp.inf, jnp.float32))
    power = jnp.exp(scores - jnp.max(scores, axis=1)[:, None])
    share = power / jnp.sum(power, axis=1)[:, None]
    bits = jax.lax.bitcast_convert_type(share, jnp.int32) & 0x7FFFFFFF
    taken = -1

    def take(_: jax.Array, left: jax.Array) -> jax.Array:
        best = jnp.max(left, axis=1)
        lowest = jnp.min(jnp.where(left == best[:, None], expert, expert.shape[0]), axis=1)
        return jnp.where(expert == lowest[:, None], taken, left)

    left = jax.lax.fori_loop(0, num_used, take, jnp.where(exists, bits, taken - 1))
    mask = (left == taken) & (token < first + size)[:, None]
    one = mask.astype(jnp.int32)
    total = jnp.sum(jnp.where(mask, share, 0.0), axis=1)
    return _Chosen(token, expert, mask, jnp.cumsum(one, axis=1) - one, share / total[:, None])

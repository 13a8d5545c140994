"""Pallas on Triton: one program with the block's experts in registers, one turn for each expert that gets a slot.

A turn is six reductions over X numbers within one warp. An expert takes tens of microseconds to arrive over the link,
so the turns do not matter; a window without misses has none.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from strata_jax.kernels.launch import launch
from strata_jax.kernels.replace_experts.tables import Replaced, ResidentTables

NUM_WARPS = 1
_FAR = 2**31 - 1


def replace_experts(
    tables: ResidentTables,
    layer: jax.Array,
    uses: jax.Array,
    slot_page: jax.Array,
    decay: float,
    max_fetches: int,
    *,
    interpret: bool = False,
) -> Replaced:
    """See `strata_jax.kernels.replace_experts.replace_experts`; ``layer`` is i32[1]."""
    num_experts = uses.shape[0]
    kernel = partial(_replace, decay=decay, num_experts=num_experts, max_fetches=max_fetches)
    in_place = (tables.slot_of, tables.count, tables.last)
    results = [(num_experts,), (max_fetches,), (max_fetches,), (1,)]
    out = (
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in in_place),
        *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in results),
    )
    call = launch(kernel, (1,), out, NUM_WARPS, in_place=len(in_place), interpret=interpret)
    slot_of, count, last, *rest = call(layer, tables.clock, uses, slot_page, *in_place)
    return Replaced(ResidentTables(slot_of, count, last, tables.clock), *rest)


def _replace(
    layer_ref: Any,  # i32[1]
    clock_ref: Any,  # i32[1]
    uses_ref: Any,  # i32[X]
    slot_page_ref: Any,  # i32[S]
    slot_of_ref: Any,  # i32[L', X], as operand
    count_ref: Any,  # f32[L', X], as operand
    last_ref: Any,  # i32[L', X], as operand
    new_slot_of_ref: Any,  # the same memory
    new_count_ref: Any,
    new_last_ref: Any,
    pages_ref: Any,  # i32[X]
    experts_ref: Any,  # i32[M]
    fetch_pages_ref: Any,  # i32[M]
    num_ref: Any,  # i32[1]
    *,
    decay: float,
    num_experts: int,
    max_fetches: int,
) -> None:
    width = pl.next_power_of_2(num_experts)
    expert, layer = jnp.arange(width), layer_ref[0]
    real = expert < num_experts
    uses = plt.load(uses_ref.at[expert], mask=real, other=0)
    slots = plt.load(slot_of_ref.at[layer, expert], mask=real, other=-1)
    factor = jnp.where(jnp.sum(uses) > 0, jnp.float32(decay), jnp.float32(1.0))
    count = plt.load(count_ref.at[layer, expert], mask=real, other=0.0) * factor + uses.astype(jnp.float32)
    last = plt.load(last_ref.at[layer, expert], mask=real, other=0)
    last = jnp.where(uses > 0, clock_ref[0], last)
    is_new, is_victim = (uses > 0) & (slots < 0), (slots >= 0) & (uses == 0)
    turns = jnp.minimum(jnp.sum(is_new.astype(jnp.int32)), jnp.sum(is_victim.astype(jnp.int32)))

    fetch = jnp.arange(pl.next_power_of_2(max_fetches))
    for ref in (experts_ref, fetch_pages_ref):
        plt.store(ref.at[fetch], jnp.zeros_like(fetch), mask=fetch < max_fetches)

    def turn(idx: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        slots, is_new, is_victim, done = carry
        most = jnp.max(jnp.where(is_new != 0, count, -1.0))
        coming = jnp.min(jnp.where((is_new != 0) & (count == most), expert, _FAR))
        least = jnp.min(jnp.where(is_victim != 0, count, jnp.inf))
        coldest = (is_victim != 0) & (count == least)
        oldest = jnp.min(jnp.where(coldest, last, _FAR))
        leaving = jnp.max(jnp.where(coldest & (last == oldest), expert, -1))
        slot = jnp.max(jnp.where(expert == leaving, slots, -1))
        pays = most >= least

        @pl.when(pays)
        def _() -> None:
            experts_ref[done] = coming
            fetch_pages_ref[done] = slot_page_ref[slot]

        takes = pays & (expert == coming)
        leaves = pays & (expert == leaving)
        slots = jnp.where(takes, slot, jnp.where(leaves, -1, slots))
        is_new = jnp.where(expert == coming, 0, is_new)
        is_victim = jnp.where(expert == leaving, 0, is_victim)
        return slots, is_new, is_victim, done + pays.astype(jnp.int32)

    flags = is_new.astype(jnp.int32), is_victim.astype(jnp.int32)
    slots, _, _, done = jax.lax.fori_loop(0, turns, turn, (slots, *flags, jnp.int32(0)))
    num_ref[0] = done
    plt.store(new_slot_of_ref.at[layer, expert], slots, mask=real)
    plt.store(new_count_ref.at[layer, expert], count, mask=real)
    plt.store(new_last_ref.at[layer, expert], last, mask=real)
    page = plt.load(slot_page_ref.at[jnp.maximum(slots, 0)], mask=slots >= 0, other=-1)
    plt.store(pages_ref.at[expert], page, mask=real)

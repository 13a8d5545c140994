"""The rule by sorting: newcomers by worth, residents by worth, pairs as long as the newcomer's count is not below."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from strata_jax.kernels.replace_experts.tables import Replaced, ResidentTables


def replace_experts(
    tables: ResidentTables, layer: jax.Array, uses: jax.Array, slot_page: jax.Array, decay: float, max_fetches: int
) -> Replaced:
    """See `strata_jax.kernels.replace_experts.replace_experts`."""
    num_experts, block = uses.shape[0], layer[0]
    slots = tables.slot_of[block]
    held, expert = slots >= 0, jnp.arange(num_experts)
    count = tables.count[block] * jnp.where(jnp.any(uses > 0), decay, 1.0) + uses.astype(jnp.float32)
    last = jnp.where(uses > 0, tables.clock[0], tables.last[block])
    is_new, is_victim = (uses > 0) & ~held, held & (uses == 0)
    coming = jnp.lexsort((expert, -count, ~is_new))[:max_fetches]
    leaving = jnp.lexsort((-expert, last, count, ~is_victim))[:max_fetches]
    paired = is_new[coming] & is_victim[leaving] & (count[coming] >= count[leaving])
    given = slots[leaving]
    slots = slots.at[jnp.where(paired, leaving, num_experts)].set(-1, mode="drop")
    slots = slots.at[jnp.where(paired, coming, num_experts)].set(given, mode="drop")
    return Replaced(
        replace(
            tables,
            slot_of=tables.slot_of.at[block].set(slots),
            count=tables.count.at[block].set(count),
            last=tables.last.at[block].set(last),
        ),
        pages=jnp.where(slots >= 0, slot_page[jnp.maximum(slots, 0)], -1),
        experts=jnp.where(paired, coming, 0).astype(jnp.int32),
        fetch_pages=jnp.where(paired, slot_page[jnp.maximum(given, 0)], 0),
        num_fetches=jnp.sum(paired, dtype=jnp.int32)[None],
    )

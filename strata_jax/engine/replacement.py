"""Residency kept up inside a decode round: what a block misses is fetched into slots of what is worth less.

A block of a window takes its turn after routing and before its experts are computed: the window's uses are counted, the
tables change on the device, and one launch copies what has won a slot. Then it is computed from the arena like any
resident, so the link is read once; what has won none is read where it lies, as without replacement. The host knows
nothing of it until it asks for `Engine.residency`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp

from strata_jax.engine.arena import Segments, Tables
from strata_jax.kernels import backend
from strata_jax.kernels.page_fetch import fetch_pages
from strata_jax.kernels.replace_experts import Replaced, ResidentTables, replace_experts
from strata_jax.memory.slot_order import SlotOrder
from strata_jax.policies.replacement import first_values, ranks_in_layer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UseValues:
    """What experts are worth, as `ResidentTables` has it: donated to every round and updated in place."""

    count: jax.Array
    last: jax.Array
    clock: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Turn:
    """What a block's turn starts from, in place of the pages of its experts.

    Attributes:
        slot_page: i32[S], the first page of each slot.
        decay: factor of use counts each round.
    """

    tables: ResidentTables
    slot_page: jax.Array
    layer: int = field(metadata={"static": True})
    decay: float = field(metadata={"static": True})

    @property
    def pages(self) -> jax.Array:
        """i32[X], the first page of each expert of the block before the turn, -1 = none."""
        slots = self.tables.slot_of[self.layer]
        return jnp.where(slots >= 0, self.slot_page[jnp.maximum(slots, 0)], -1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """What turns have changed besides the arena's core: its segments, and who is where."""

    segments: Segments
    tables: ResidentTables

    @property
    def values(self) -> UseValues:
        return UseValues(self.tables.count, self.tables.last, self.tables.clock)

    def next_round(self, count: jax.Array) -> Kept:
        """The same for the round after this one of ``count`` tokens; one without any does not count."""
        return replace(self, tables=replace(self.tables, clock=self.tables.clock + jnp.minimum(count, 1)))


def start_values(order: SlotOrder, num_blocks: int) -> UseValues:
    """The values of an engine that has just been loaded: nothing was used, slots are worth their rank."""
    first = first_values(ranks_in_layer(order.expert, num_blocks, order.num_experts))
    return UseValues(jnp.asarray(first.count), jnp.asarray(first.last), jnp.zeros(1, jnp.int32))


def kept_before(values: UseValues, tables: Tables, segments: Segments) -> Kept:
    """What a round with replacement starts from."""
    return Kept(segments, ResidentTables(tables.slot_of, values.count, values.last, values.clock))


def take_turn(
    turn: Turn, uses: jax.Array, blobs: jax.Array, arrays: tuple[jax.Array, ...], max_fetches: int, *, kernels: bool
) -> tuple[tuple[jax.Array, ...], Replaced]:
    """Count a window's uses i32[X] in a block, and fetch what has won a slot.

    Args:
        blobs: u32[X, blob_words], the block's bank. arrays: the arena's core and its segments.
        max_fetches: experts that the window can ask for.
        kernels: whether kernels are asked for; else they run on a GPU only.
    """
    return _turn(
        turn.tables, jnp.array([turn.layer], jnp.int32), uses, turn.slot_page, blobs, arrays, decay=turn.decay,
        max_fetches=max_fetches, by="triton" if kernels else None, interpret=kernels and backend.interprets(),
    )  # fmt: skip


@partial(jax.jit, static_argnames=("decay", "max_fetches", "by", "interpret"))
def _turn(
    tables: ResidentTables,
    layer: jax.Array,
    uses: jax.Array,
    slot_page: jax.Array,
    blobs: jax.Array,
    arrays: tuple[jax.Array, ...],
    *,
    decay: float,
    max_fetches: int,
    by: str | None,
    interpret: bool,
) -> tuple[tuple[jax.Array, ...], Replaced]:
    """Jitted inside the programs that call it, so that blocks of one layout are traced and lowered once."""
    done = replace_experts(
        tables, layer, uses, slot_page, decay=decay, max_fetches=max_fetches, backend=by, interpret=interpret
    )
    arrays = fetch_pages(
        arrays, blobs, done.experts, done.fetch_pages, done.num_fetches, backend=by, interpret=interpret
    )
    return arrays, done

"""What replacement reads and changes, and what one block's turn gives."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ResidentTables:
    """Who has a slot, and what experts are worth: `ExpertValues` on the device.

    Attributes:
        slot_of: i32[L', X], the slot of each expert, -1 = none.
        count: f32[L', X], decayed uses. last: i32[L', X], round of the last use, negative before the first.
        clock: i32[1], rounds so far.
    """

    slot_of: jax.Array
    count: jax.Array
    last: jax.Array
    clock: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Replaced:
    """A block's residents after the window's turn.

    Attributes:
        tables: with the window counted and the slots given.
        pages: i32[X], first page of each expert of the block now, -1 = none.
        experts, fetch_pages: i32[M], the experts to copy and the first pages of their slots; 0 past `num_fetches`.
        num_fetches: i32[1].
    """

    tables: ResidentTables
    pages: jax.Array
    experts: jax.Array
    fetch_pages: jax.Array
    num_fetches: jax.Array

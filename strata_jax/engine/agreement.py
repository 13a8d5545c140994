"""Whether the policies' picture of the memory, the tables and the bytes of the engine's arrays agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np

from strata_jax.engine.engine import LEDGER_TOLERANCE_FRAC, Engine
from strata_jax.engine.session import Session
from strata_jax.memory.ledger import Owner
from strata_jax.policies.invariants import check_state
from strata_jax.policies.ledger_now import owner_bytes
from strata_jax.policies.policy import PolicyContext
from strata_jax.policies.state import GIVEN, MemoryState

if TYPE_CHECKING:
    from collections.abc import Sequence


def check_agreement(
    engine: Engine, ctx: PolicyContext, state: MemoryState, pledged: Sequence[int] = ()
) -> dict[str, int]:
    """Compare the policies' state with the tables, and the ledger with the bytes of the engine's arrays.

    Args:
        pledged: slots that have been emptied to pay for cells and have not paid yet.

    Returns:
        ``planned_bytes`` and ``found_bytes``, for the record.

    Raises:
        ValueError: tables differ from the state or from the device's. RuntimeError: bytes differ by more than 1 %.
        BrokenInvariant: the state itself is none that may be.
    """
    check_state(ctx.sizes, ctx.plan, state)
    engine.check_tables()
    _check_slots(engine, state, pledged)
    owners = owner_bytes(ctx.sizes, ctx.plan, state)
    arena = sum(array.nbytes for array in engine.arrays)
    ledger = owners[Owner.EXPERT_SLOTS] + owners[Owner.KV]
    if arena != ledger:
        raise RuntimeError(f"the arena's arrays have {arena:,} bytes; slots and K/V have {ledger:,} in the ledger")
    if (engine.weights.head is not None) != state.head_loaded:
        raise ValueError(f"the head is loaded: {engine.weights.head is not None}; the state says the opposite")
    owner = engine.owner if isinstance(engine.owner, Session) else None
    residency = engine.residency
    cells = residency.layout.context_cells if residency.layout.has_window else residency.mapped_cells
    if owner is not None and owner.lost_from is None and len(owner.tokens) > cells:
        raise ValueError(f"the live sequence has {len(owner.tokens):,} tokens; {cells:,} cells are mapped")
    live = None if owner is None else owner.state
    temporary = {Owner.DECODE_BUFFERS, Owner.PROMPT_BUFFERS, Owner.FREE}
    temporary |= set() if live is not None else {Owner.INDEX_KEYS, Owner.RECURRENT_STATE}
    planned = sum(num for owner, num in owners.items() if owner not in temporary)
    trees = (engine.weights, engine.tables, engine.values, engine.arrays, live)
    leaves = [x for x in jax.tree.leaves(trees) if not x.is_deleted()]
    found = sum({id(x): x.nbytes for x in leaves}.values())
    if abs(found - planned) > LEDGER_TOLERANCE_FRAC * planned:
        raise RuntimeError(f"the ledger has {planned:,} bytes of device memory, the engine's arrays {found:,}")
    return {"planned_bytes": planned, "found_bytes": found}


def _check_slots(engine: Engine, state: MemoryState, pledged: Sequence[int]) -> None:
    residency, ranks = engine.residency, state.slots.occupant
    expected = np.where(ranks >= 0, engine.plan.order.expert[ranks], -1)
    present = state.slots.num_present if state.lent_from is None else min(state.slots.num_present, state.lent_from)
    expected[present:] = -1
    if not np.array_equal(expected, residency.occupant):
        slot = int(np.flatnonzero(expected != residency.occupant)[0])
        raise ValueError(f"slot {slot} holds {residency.expert_in(slot)}; the policies have rank {ranks[slot]}")
    if present != residency.num_present:
        raise ValueError(f"slots from {residency.num_present:,} on are away; the policies say from {present:,}")
    given = np.flatnonzero(ranks == GIVEN)
    if set(given.tolist()) != {*np.flatnonzero(residency.slot_page < 0).tolist(), *pledged}:
        raise ValueError("the slots that pay for K/V cells are not those that the policies have given")
    if residency.layout.groups(state.kv_mapped_cells) != residency.mapped_groups:
        raise ValueError(f"{residency.mapped_cells:,} cells are mapped; the policies say {state.kv_mapped_cells:,}")

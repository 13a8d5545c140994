"""Who owns the device memory in a state: the plan's ledger at start, with what has moved since. Conserves bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata_jax.memory.ledger import Memory, Owner, Phase
from strata_jax.policies.state import MemoryState, beside_head_bytes

if TYPE_CHECKING:
    from strata_jax.memory.strata.result import StrataPlan
    from strata_jax.memory.strata.sizes import PackSizes


def owner_bytes(sizes: PackSizes, plan: StrataPlan, state: MemoryState) -> dict[Owner, int]:
    """Return the bytes of every owner of device memory, what is free among them.

    Their sum is the card's memory, plus `overcommit_bytes` where the driver has let the engine take more than that.
    Bytes of lent slots are the prompt buffers'; chunks that the K/V holds in reserve are the K/V's.
    """
    owners = plan.ledger.owner_bytes(Phase.START, Memory.DEVICE)
    owners.pop(Owner.RESERVE, None)  # memory that nobody takes: it is free
    lent = 0 if state.lent_from is None else state.slots.lendable_bytes(state.lent_from)
    away = segment_bytes_given(state)
    owners[Owner.HEAD] = beside_head_bytes(plan) + (plan.head_bytes if state.head_loaded else 0)
    owners[Owner.KV] = owners.get(Owner.KV, 0) + (state.kv_grown_chunks + state.spare_chunks) * state.chunk_bytes
    owners[Owner.EXPERT_SLOTS] = (
        owners.get(Owner.EXPERT_SLOTS, 0) - lent - away - state.slots.unmapped_chunks * state.chunk_bytes
    )
    owners[Owner.PROMPT_BUFFERS] = lent + state.own_buffer_bytes
    owners[Owner.FREE] = max(0, state.free_bytes)
    return owners


def overcommit_bytes(state: MemoryState) -> int:
    """Return the device memory that the engine holds beyond the card's."""
    return max(0, -state.free_bytes)


def parked_bytes(state: MemoryState) -> int:
    """Return the RAM of parked conversations."""
    return sum(c.bytes for c in state.parked)


def segment_bytes_given(state: MemoryState) -> int:
    """Return the bytes of cache segments that the driver has at present."""
    return state.slots.total_bytes - state.slots.kept_bytes(state.segments_given)

"""What is true of every state, whatever policies did: no byte is lost, no page has two owners, no expert two slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strata_jax.memory.ledger import MIB
from strata_jax.policies.ledger_now import overcommit_bytes, owner_bytes, segment_bytes_given
from strata_jax.policies.state import GIVEN, MemoryState, expert_bytes

if TYPE_CHECKING:
    from strata_jax.memory.strata.result import StrataPlan
    from strata_jax.memory.strata.sizes import PackSizes


class BrokenInvariant(AssertionError):
    """A state that no sequence of moves may lead to. A bug, never a user's mistake."""


def check_state(sizes: PackSizes, plan: StrataPlan, state: MemoryState) -> None:
    """Raise BrokenInvariant, naming everything that does not hold."""
    problems = [*_bytes(sizes, plan, state), *_slots(sizes, plan, state), *_kv(plan, state), *_parked(plan, state)]
    if problems:
        raise BrokenInvariant("; ".join(problems))


def _bytes(sizes: PackSizes, plan: StrataPlan, state: MemoryState) -> list[str]:
    owners = owner_bytes(sizes, plan, state)
    total = sum(owners.values()) - overcommit_bytes(state)
    problems = [f"{owner} has {num:,} B" for owner, num in owners.items() if num < 0]
    if total != plan.card.vram_bytes:
        problems.append(f"owners have {total:,} B of a card of {plan.card.vram_bytes:,} B")
    return problems


def _slots(sizes: PackSizes, plan: StrataPlan, state: MemoryState) -> list[str]:
    slots, problems = state.slots, []
    occupant = slots.occupant[: slots.num_present]
    held = np.flatnonzero(occupant >= 0)
    ranks = occupant[held]
    arriving = np.array([s.incoming for s in state.pending], np.int64)
    both = np.concatenate([ranks, arriving])
    if len(np.unique(both)) != len(both):
        problems.append("an expert has two slots")
    if len(ranks) and int(ranks.max()) >= len(sizes.rank_bytes):
        problems.append(f"rank {int(ranks.max())} of {len(sizes.rank_bytes)}")
    elif np.any(expert_bytes(sizes, plan.uniform)[ranks] > slots.sizes()[held]):
        problems.append("an expert is larger than its slot")
    if any(occupant[s.slot] != -1 for s in state.pending if s.slot < len(occupant)):
        problems.append("a slot with an arriving expert holds another one")
    if np.any(slots.occupant < GIVEN):
        problems.append("a slot has an occupant of no meaning")
    if not 0 <= slots.low <= slots.top <= slots.num_present <= slots.num_slots:
        problems.append(f"low {slots.low}, top {slots.top}, present {slots.num_present}, slots {slots.num_slots}")
    if state.lent_from is not None and not slots.top <= state.lent_from <= slots.num_present:
        problems.append(f"lent from {state.lent_from}, lendable from {slots.top}")
    return problems


def _kv(plan: StrataPlan, state: MemoryState) -> list[str]:
    slots, g, problems = state.slots, state.chunk_bytes, []
    given = np.flatnonzero(slots.occupant == GIVEN)
    if slots.low < slots.top or slots.unmapped_from:  # just under the loan: one run of chunks within one run of slots
        if not np.array_equal(given, np.arange(slots.low, slots.top)):
            problems.append(f"the K/V's slots are not [{slots.low}, {slots.top})")
        first, last = -(-int(slots.offset_bytes[slots.low]) // g), int(slots.offset_bytes[slots.top]) // g
        if slots.unmapped_from < first or slots.unmapped_from + slots.unmapped_chunks != last:
            problems.append(
                f"chunks [{slots.unmapped_from}, +{slots.unmapped_chunks}) are the K/V's, slots give [{first}, {last})"
            )
    elif int((slots.sizes()[given] // g).sum()) != slots.unmapped_chunks or bool(len(given)) != bool(
        slots.unmapped_chunks
    ):
        problems.append(f"{slots.unmapped_chunks} chunks are the K/V's, its {len(given)} slots have another number")
    if state.spare_chunks < 0 or slots.unmapped_chunks < 0:
        problems.append(f"{state.spare_chunks} spare and {slots.unmapped_chunks} unmapped chunks")
    if not 0 <= state.kv_mapped_cells <= plan.request.context_cells:
        problems.append(f"{state.kv_mapped_cells} of {plan.request.context_cells} cells are mapped")
    if segment_bytes_given(state) > 0 and slots.end is None:
        problems.append("segments are given and all slots are there")
    return problems


def _parked(plan: StrataPlan, state: MemoryState) -> list[str]:
    request, problems = plan.request, []
    if sum(c.bytes for c in state.parked) > request.conversation_mib * MIB:
        problems.append("parked conversations exceed their budget")
    if len(state.parked) > request.conversation_slots:
        problems.append(f"{len(state.parked)} parked conversations, {request.conversation_slots} slots")
    if len({c.name for c in state.parked}) != len(state.parked):
        problems.append("a conversation is parked twice")
    if state.ram_available_bytes is not None and state.ram_available_bytes < 0:
        problems.append("less than no RAM is available")
    return problems

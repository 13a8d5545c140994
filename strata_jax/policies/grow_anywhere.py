"""Slots that pay for K/V cells wherever they lie: the coldest first, without a copy.

Where pages are table entries a page need not be next to the K/V. A slot gives its whole pages. The loan starts lower
if it has lost slots, and the chunk shrinks when it cannot; at least the floor's slots stay with the cache.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from strata_jax.policies.moves import Move, MoveKind
from strata_jax.policies.policy import PolicyContext, refit_chunk
from strata_jax.policies.residency import heat
from strata_jax.policies.state import EMPTY, GIVEN, MemoryState, SlotTable, Step, with_slots


def slot_pages(ctx: PolicyContext, slots: SlotTable) -> NDArray[np.int64]:
    """Return i64[S], the whole pages of each slot."""
    return slots.sizes() // ctx.granule_bytes


def give_coldest(ctx: PolicyContext, state: MemoryState, pages: int) -> Step:
    """Give the coldest slots until `pages` pages are spare, or as many as the floor and the prompt path allow."""
    if pages <= 0:
        return Step(state)
    slots = state.slots
    present = slots.occupant[: slots.num_present]
    open_slots = np.flatnonzero(present != GIVEN)
    if slots.borders:  # those in segments are lent whole
        open_slots = open_slots[open_slots < slots.borders[0]]
    most = len(open_slots) - ctx.plan.request.grow.floor_slots
    keys = np.full(len(open_slots), -np.inf)
    held = present[open_slots] >= 0
    keys[held] = heat(present[open_slots][held], state.usage)
    order = open_slots[np.lexsort((-open_slots, keys))][: max(0, most)]
    pages_of = slot_pages(ctx, slots)
    order = order[pages_of[order] > 0]
    reach = np.cumsum(pages_of[order])
    count = min(int(np.searchsorted(reach, pages)) + 1, len(order))
    if not count:
        return Step(state)
    after = _refit(ctx, state, order[:count])
    if after is None:
        return Step(state)
    chosen = order[:count]
    ranks = slots.occupant[chosen]
    ranks = ranks[ranks >= 0]
    freed = int(reach[count - 1])
    table = replace(after.slots, unmapped_chunks=slots.unmapped_chunks + freed)
    move = Move(
        MoveKind.EVICT, "expert slots", int(ctx.rank_bytes[ranks].sum()), count=len(ranks),
        first=int(chosen.min()), last=int(chosen.max()) + 1, cause="kv_grow: the coldest slots pay for cells",
        detail=(("given_slots", count), ("unmapped_bytes", freed * ctx.granule_bytes)),
    )  # fmt: skip
    shrunk = after.chunk_tokens != state.chunk_tokens
    notes = (f"prompt chunk {after.chunk_tokens:,} tokens: the K/V has taken slots of the loan",) if shrunk else ()
    return Step(replace(after, slots=table, spare_chunks=state.spare_chunks + freed), (move,), notes)


def take_back(ctx: PolicyContext, slots: SlotTable, pages: int) -> tuple[int, SlotTable, NDArray[np.int64]]:
    """Return (pages used, table, slots) of giving spare pages back to slots, the last ones first."""
    given = np.flatnonzero(slots.occupant == GIVEN)[::-1]
    reach = np.cumsum(slot_pages(ctx, slots)[given])
    count = int(np.searchsorted(reach, pages, side="right"))
    used = int(reach[count - 1]) if count else 0
    returned = np.sort(given[:count])
    occupant = slots.occupant.copy()
    occupant[returned] = EMPTY
    table = replace(slots, occupant=occupant, unmapped_chunks=slots.unmapped_chunks - used)
    return used, loan_edge(ctx, table), returned


def loan_edge(ctx: PolicyContext, slots: SlotTable) -> SlotTable:
    """Return the table with the loan's first slot as the plan has it, or lower where the loan has lost slots."""
    prompt = ctx.plan.prompt
    if slots.borders:
        return slots
    if not prompt.lent_slots:
        return replace(slots, low=slots.num_present, top=slots.num_present)
    first = slots.loan_first(max(0, prompt.buffer_bytes - ctx.guest_bytes))
    least = _first_lendable(ctx, slots)
    top = least if first is None else max(least, min(first, prompt.first_lent))
    return replace(slots, low=top, top=top)


def _first_lendable(ctx: PolicyContext, slots: SlotTable) -> int:
    """Return the first slot that may ever be lent: as many as the plan keeps, at most the floor, stay below it."""
    keep = min(ctx.plan.prompt.first_lent, ctx.plan.request.grow.floor_slots)
    staying = np.flatnonzero(slots.occupant[: slots.num_present] != GIVEN)
    return int(staying[keep]) if keep < len(staying) else slots.num_present


def _refit(ctx: PolicyContext, state: MemoryState, chosen: NDArray[np.int64]) -> MemoryState | None:
    occupant = state.slots.occupant.copy()
    occupant[chosen] = GIVEN
    after = with_slots(state, occupant=occupant)
    after = replace(after, slots=loan_edge(ctx, after.slots))
    return refit_chunk(ctx, after, after.slots.top)

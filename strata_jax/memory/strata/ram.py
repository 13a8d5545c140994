"""Host memory of a plan: the arena or copies of experts, pinned K/V, checkpoints and parked conversations.

All experts lie in one pinned arena, or RAM holds copies of those that have no slot, or only files do (planning notes
2.8). Parked conversations get what the copies leave (2.9).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata_jax.memory.layout import align_up
from strata_jax.memory.strata.kv_pools import checkpoint_bytes
from strata_jax.memory.strata.own_buffers import expert_headroom_bytes
from strata_jax.memory.strata.request import MIB, Card, ExpertTier, StrataRequest
from strata_jax.memory.strata.result import PromptPath
from strata_jax.memory.strata.sizes import PackSizes

ARENA_ALIGN_BYTES = 2 * MIB
BUDGET_MARGIN_BYTES = 256 * MIB
ROW_CACHE_ROWS = 1_048_576


@dataclass(frozen=True, slots=True)
class RamPlan:
    """What lies in host memory.

    Attributes:
        tier: where experts without a slot live, after fallbacks.
        headroom_bytes: RAM that copies of experts leave free.
        resident_experts: experts without a slot that have a copy, the hottest first.
        resident_bytes: all copies. copies_from_slot: slots from here on have copies too.
        short_bytes: what is missing for what must be there.
        conversation_bytes: most that parked conversations may take beside the rest.
    """

    tier: ExpertTier
    arena_bytes: int
    headroom_bytes: int
    resident_experts: int
    resident_bytes: int
    copies_from_slot: int
    conversation_bytes: int
    short_bytes: int
    notes: tuple[str, ...]


def available_bytes(card: Card) -> int | None:
    """Return the RAM that the plan may take: what was available at start within the limit; None when not known."""
    if card.ram_bytes <= 0:
        return None
    return card.ram_bytes if card.ram_available_bytes is None else min(card.ram_bytes, card.ram_available_bytes)


def row_cache_bytes(sizes: PackSizes) -> int:
    """Return the bytes of the host's cache of n-gram rows (planning notes 1.7)."""
    return ROW_CACHE_ROWS * sizes.ple_row_bytes


def headroom(request: StrataRequest) -> int:
    """Return the RAM in bytes that copies of experts leave free: enough for the conversation budget, if it is on."""
    serves = request.tier is ExpertTier.RESIDENT and request.checkpoints > 0 and request.conversation_slots > 0
    return expert_headroom_bytes(
        request.resident_headroom_bytes,
        request.conversation_mib * MIB,
        request.conversation_min_free_mib * MIB,
        request.conversation_budget and serves,
    )


def plan_ram(
    sizes: PackSizes, card: Card, request: StrataRequest, slots: int, prompt: PromptPath, other_bytes: int
) -> RamPlan:
    """Plan the host memory beside `other_bytes` that are taken first: pinned K/V and caches.

    slots: experts of the cache, which are the hottest. Without a known amount of RAM nothing is checked.
    """
    available = available_bytes(card)
    left = None if available is None else available - other_bytes
    notes = []
    if card.ram_source.startswith("cgroup"):
        notes.append(f"RAM: a {card.ram_source} is in effect, {card.ram_bytes / 2**30:,.2f} GiB")
    if request.tier is ExpertTier.ARENA:
        arena = align_up(int(sizes.total_expert_bytes), ARENA_ALIGN_BYTES)
        copies = _Copies(ExpertTier.ARENA, 0, 0, slots, ())
    else:
        arena = 0
        copies = _copies(sizes, request, slots, prompt, left)
    reserved = headroom(request)
    taken = arena + copies.bytes
    short = 0 if left is None else max(0, taken - left)
    kept = request.checkpoints * checkpoint_bytes(sizes) + request.conversation_min_free_mib * MIB
    budget = request.conversation_mib * MIB
    room = budget if left is None else max(0, left - taken - kept)
    if budget > room:
        notes.append(
            f"conversation.budget_mib={request.conversation_mib}: only {room / MIB:,.0f} MiB are left beside experts,"
            f" checkpoints and the {request.conversation_min_free_mib:,} MiB that parking leaves free"
        )
    return RamPlan(
        copies.tier, arena, reserved, copies.experts, copies.bytes, copies.from_slot, min(budget, room), short,
        (*notes, *copies.notes),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Copies:
    tier: ExpertTier
    experts: int
    bytes: int
    from_slot: int
    notes: tuple[str, ...]


def _copies(sizes: PackSizes, request: StrataRequest, slots: int, prompt: PromptPath, left: int | None) -> _Copies:
    """Choose the copies: all experts without a slot, else the hottest of them, else none; then lent slots, last first.

    A lent slot is refilled after the prompt, from RAM if its expert has a copy there and from a file if not. Lent slots
    get copies from an automatic budget only: hosts that were given a budget with room for them show none.
    """
    if request.tier is ExpertTier.MMAP:
        return _Copies(ExpertTier.MMAP, 0, 0, slots, ())
    ends = sizes.rank_end_bytes
    in_slots = sizes.slots_bytes(0, slots)
    rest_bytes, rest = sizes.slots_bytes(slots, sizes.num_ranks), sizes.num_ranks - slots
    budget = copies_budget(request, left)
    if budget is None or rest_bytes <= budget:
        first = slots
        if prompt.lent_slots and request.resident_budget_bytes is None:
            spare = in_slots if budget is None else budget - rest_bytes
            first = max(_first_slot_within(sizes, slots, spare), prompt.first_lent)
        copied_bytes = rest_bytes + sizes.slots_bytes(first, slots)
        return _Copies(ExpertTier.RESIDENT, rest, copied_bytes, first, ())
    if not request.profile or budget <= 0:
        note = f"RAM for copies of experts: {max(0, budget) / MIB:,.0f} MiB, so experts without a slot stay in files"
        return _Copies(ExpertTier.MMAP, 0, 0, slots, (note,))
    kept = int(np.searchsorted(ends, in_slots + budget, side="right")) - slots
    kept_bytes = sizes.slots_bytes(slots, slots + kept)
    note = (
        f"copies of all {rest:,} experts without a slot need {rest_bytes / MIB:,.0f} MiB of RAM, {budget / MIB:,.0f}"
        f" are there: the {kept:,} hottest have one, {rest - kept:,} stay in files"
    )
    return _Copies(ExpertTier.RESIDENT if kept else ExpertTier.MMAP, kept, kept_bytes, slots, (note,))


def copies_budget(request: StrataRequest, left: int | None) -> int | None:
    """Return the RAM for copies in bytes; a given budget is clipped to what is available less headroom and margin."""
    given = request.resident_budget_bytes
    if left is None:
        return given
    room = left - headroom(request)
    return room if given is None else min(given, room - BUDGET_MARGIN_BYTES)


def _first_slot_within(sizes: PackSizes, slots: int, spare_bytes: int) -> int:
    """Return the first of the last slots whose experts take no more than `spare_bytes` together."""
    threshold = sizes.slots_bytes(0, slots) - spare_bytes
    if threshold <= 0:
        return 0
    return int(np.searchsorted(sizes.rank_end_bytes, threshold, side="left")) + 1

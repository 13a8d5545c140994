"""A Strata plan: what is allocated at start and what may move later. Frozen data, JSON both ways."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from strata_jax.memory.ledger import Ledger
from strata_jax.memory.strata.request import MIB, Card, ExpertTier, StrataRequest


class Layout(StrEnum):
    """Where prompt buffers lie."""

    BORROWED = "borrowed"
    OWN = "own"
    HYBRID = "hybrid"  # borrowed slots and own memory together, only with the head lent


@dataclass(frozen=True, slots=True)
class PromptPath:
    """The prompt path of a plan.

    Attributes:
        buffer_bytes: bytes needed by a full chunk, ring included. own_bytes: the part that is allocated on its own.
        first_lent: slots from here on may be lent; equal to the number of slots when none are.
        why_not_larger: why the next larger chunk was not chosen.
    """

    chunk_tokens: int
    layout: Layout
    ring_slots: int
    buffer_bytes: int
    own_bytes: int
    lent_slots: int
    first_lent: int
    lent_bytes: int
    why_not_larger: str


@dataclass(frozen=True, slots=True)
class StrataPlan:
    """What the original allocates at start, in its order, and what follows from it.

    Attributes:
        free_for_cache_bytes: device memory free when the cache is sized.
        reserve_bytes: kept out of the cache: the reserve, owned buffers' price and the drafter's bind.
        slots: real expert slots; cache_bytes: their bytes; uniform: whether every slot has the largest blob's size.
        free_after_fill_bytes: free when the cache has been filled (the decision point of own buffers).
        free_after_start_bytes: free when the engine is ready, never negative. overcommit_bytes: what is missing then.
        peak_overcommit_bytes: what is missing in the phase that needs most; the driver pages it, where it can.
        bind_bytes: draft vocabulary rows and logits of verify windows, allocated after the cache and reserved for.
        reserve_mib: the reserve kept, after the rule for small cards.
        tier: where experts without a slot live; ram_resident_experts: how many of them have RAM copies, the hottest
            first. ram_copies_from_slot: slots from here on have RAM copies too, for refills; `slots` when none have.
        floor_slots: an elastic cache never shrinks below; segments: of an elastic cache, 0 otherwise.
        kv_mapped_cells, kv_mapped_bytes: mapped at start; kv_max_bytes: the whole window.
        warnings: what a user must see.
    """

    pack: str
    card: Card
    request: StrataRequest
    free_for_cache_bytes: int
    reserve_bytes: int
    slots: int
    cache_bytes: int
    uniform: bool
    prompt: PromptPath
    head_bytes: int
    head_aliased: bool
    kv_mapped_cells: int
    kv_mapped_bytes: int
    kv_max_bytes: int
    kv_pinned_ram_bytes: int
    free_after_fill_bytes: int
    free_after_start_bytes: int
    overcommit_bytes: int
    grow_refusal: str | None
    expert_headroom_bytes: int
    ram_resident_bytes: int
    ram_resident_experts: int
    arena_bytes: int
    conversation_budget_bytes: int
    ledger: Ledger
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    reserve_mib: int = 0
    bind_bytes: int = 0
    tier: ExpertTier = ExpertTier.ARENA
    ram_copies_from_slot: int = 0
    floor_slots: int = 0
    segments: int = 0
    peak_overcommit_bytes: int = 0

    @property
    def kv_streamed(self) -> bool:
        """Whether the K/V lies in RAM, with a part of its cells in device memory."""
        return self.request.kv_streamed

    @property
    def free_after_start_mib(self) -> float:
        return self.free_after_start_bytes / MIB

"""Published figures of the start that follow from a plan, or from why there is none."""

from __future__ import annotations

from collections.abc import Callable

from strata_jax.memory.ledger import MIB, Memory, Owner, Phase
from strata_jax.memory.strata.result import StrataPlan
from strata_jax.reproduce.outcome import Outcome

GIB = 2**30
AFTER_CACHE = (Owner.EXPERT_SLOTS, Owner.RESERVE, Owner.DRAFT_BIND, Owner.PROMPT_BUFFERS, Owner.LATE)


class NoFigure(Exception):
    """There is no number for a metric; the message says why."""


def plan_of(outcome: Outcome) -> StrataPlan:
    if outcome.plan is None:
        short = outcome.unfit.shortfall_bytes / MIB if outcome.unfit else 0
        raise NoFigure(f"our plan does not fit: {short:,.0f} MiB short")
    return outcome.plan


def _free_bytes(plan: StrataPlan, *phases: Phase) -> float:
    """Least free device memory of some phases, never negative: the driver pages what is too much."""
    return max(0, min(plan.card.vram_bytes - plan.ledger.total_bytes(phase, Memory.DEVICE) for phase in phases))


def _file_reads(plan: StrataPlan) -> float:
    """Lent slots whose experts have no copy in RAM: they are read from files after every prompt."""
    if plan.tier is plan.tier.ARENA or not plan.prompt.lent_slots:
        return 0
    return max(0, plan.ram_copies_from_slot - plan.prompt.first_lent)


def _in_ram_bytes(plan: StrataPlan) -> float:
    return plan.arena_bytes + plan.ram_resident_bytes


OF_PLAN: dict[str, Callable[[StrataPlan], float]] = {
    "expert_cache_slots": lambda p: p.slots,
    "expert_cache_full_slots": lambda p: p.slots,
    "expert_cache_mib": lambda p: p.cache_bytes / MIB,
    "expert_cache_full_mib": lambda p: p.cache_bytes / MIB,
    "expert_cache_gib": lambda p: p.cache_bytes / GIB,
    "prompt_chunk_tokens": lambda p: p.prompt.chunk_tokens,
    "lent_slots": lambda p: p.prompt.lent_slots,
    "lent_gib": lambda p: p.prompt.lent_bytes / GIB,
    "ring_slots": lambda p: p.prompt.ring_slots,
    "own_buffers_mib": lambda p: p.prompt.own_bytes / MIB,
    "kv_mapped_cells": lambda p: p.kv_mapped_cells,
    "kv_mapped_before_cells": lambda p: p.kv_mapped_cells,
    "kv_vram_gib": lambda p: p.kv_mapped_bytes / GIB,
    "kv_pinned_ram_gib": lambda p: p.kv_pinned_ram_bytes / GIB,
    "arena_mib": lambda p: _in_ram_bytes(p) / MIB,
    "ram_resident_experts": lambda p: p.ram_resident_experts + max(0, p.slots - p.ram_copies_from_slot),
    "ram_resident_experts_gib": lambda p: p.ram_resident_bytes / GIB,
    "ram_headroom_mib": lambda p: p.expert_headroom_bytes / MIB,
    "ram_headroom_gib": lambda p: p.expert_headroom_bytes / GIB,
    "file_blob_reads": _file_reads,
    "vram_free_for_cache_gib": lambda p: p.free_for_cache_bytes / GIB,
    "vram_free_after_start_mib": lambda p: p.free_after_start_bytes / MIB,
    "vram_free_at_capture_mib": lambda p: _free_bytes(p, Phase.DECODE) / MIB,
    "vram_free_at_request_mib": lambda p: _free_bytes(p, Phase.START, Phase.DECODE) / MIB,
    "vram_used_after_load_mib": lambda p: (p.card.vram_bytes - p.free_after_start_bytes) / MIB,
    "vram_used_max_mib": lambda p: (p.card.vram_bytes - _free_bytes(p, *Phase)) / MIB,
    "vram_used_peak_mib": lambda p: (p.card.vram_bytes - _free_bytes(p, *Phase)) / MIB,
}


def _needed_gib(outcome: Outcome) -> float:
    """A fixed cache of equal slots that was refused: slots times the largest blob."""
    slots = outcome.scenario.request.expert_cache
    if outcome.unfit is None or slots is None:
        raise NoFigure("our plan fits")
    return slots * outcome.sizes.max_blob_bytes / GIB


def _free_when_refused_gib(outcome: Outcome) -> float:
    """Free device memory when the cache was refused: what else the ledger of the refusal holds by then."""
    if outcome.unfit is None:
        raise NoFigure("our plan fits")
    ledger = outcome.unfit.ledger
    taken = sum(e.phase_bytes[0] for e in ledger.entries if e.memory is Memory.DEVICE and e.owner not in AFTER_CACHE)
    return (outcome.unfit.shortage.budget_bytes - taken) / GIB


OF_UNFIT: dict[str, Callable[[Outcome], float]] = {
    "needed_gib": _needed_gib,
    "vram_free_gib": _free_when_refused_gib,
}

"""A plan of this project's own engine in the shape that policies and the simulator read (``memory_model=xla``)."""

from __future__ import annotations

from strata_jax.geometry import Geometry
from strata_jax.memory.ledger import MIB, Memory, Owner, Phase
from strata_jax.memory.plan import MemoryPlan
from strata_jax.memory.strata.request import Card, ExpertTier, StrataRequest, Version
from strata_jax.memory.strata.result import Layout, PromptPath, StrataPlan
from strata_jax.memory.strata.sizes import PackSizes


def from_memory_plan(geometry: Geometry, sizes: PackSizes, plan: MemoryPlan, card: Card) -> StrataPlan:
    """Return `plan` as a `StrataPlan`: the whole window is mapped, prompts have buffers of their own, nothing is lent.

    Slots of the draft block's experts do not count: the simulator's profile ranks those of the trunk. The request only
    describes the plan; planning it under a strata memory model gives another one.
    """
    peak = plan.ledger.peak_owner_bytes()
    slots = min(plan.expert_slots, sizes.num_ranks)
    buffers = peak[Owner.PROMPT_BUFFERS]
    start = plan.ledger.owner_bytes(Phase.START, Memory.DEVICE)
    left = card.vram_bytes - sum(num for owner, num in start.items() if owner is not Owner.RESERVE)
    highest = max(
        sum(num for owner, num in plan.ledger.owner_bytes(phase, Memory.DEVICE).items() if owner is not Owner.RESERVE)
        for phase in Phase
    )
    reserve_mib = plan.request.reserve_bytes // MIB
    request = StrataRequest(
        version=Version.V0_1_43, context_cells=plan.context_cells, kv_type=plan.kv_type, expert_cache=slots,
        chunk_tokens=plan.chunk_tokens, reserve_mib=reserve_mib, borrow=False, own="on",
        spec_window=plan.spec_window, suffix_draft=0, mtp=plan.with_draft, short_read_tokens=0, checkpoints=0,
        ranked=slots or None,
    )  # fmt: skip
    return StrataPlan(
        pack=geometry.name,
        card=card,
        request=request,
        free_for_cache_bytes=max(0, left) + start.get(Owner.EXPERT_SLOTS, 0),
        reserve_bytes=plan.request.reserve_bytes,
        slots=slots,
        cache_bytes=plan.slot_pages * plan.page_bytes,
        uniform=False,
        prompt=PromptPath(
            chunk_tokens=plan.chunk_tokens, layout=Layout.OWN, ring_slots=0, buffer_bytes=buffers, own_bytes=buffers,
            lent_slots=0, first_lent=slots, lent_bytes=0, why_not_larger="",
        ),
        head_bytes=peak[Owner.HEAD],
        head_aliased=False,
        kv_mapped_cells=plan.context_cells,
        kv_mapped_bytes=peak[Owner.KV],
        kv_max_bytes=peak[Owner.KV],
        kv_pinned_ram_bytes=0,
        free_after_fill_bytes=max(0, left),
        free_after_start_bytes=max(0, left),
        overcommit_bytes=max(0, -left),
        grow_refusal=None,
        expert_headroom_bytes=0,
        ram_resident_bytes=0,
        ram_resident_experts=0,
        arena_bytes=peak[Owner.BANK],
        conversation_budget_bytes=0,
        ledger=plan.ledger,
        notes=plan.notes,
        warnings=(),
        reserve_mib=reserve_mib,
        tier=ExpertTier.ARENA,
        ram_copies_from_slot=slots,
        peak_overcommit_bytes=max(0, highest - card.vram_bytes),
    )  # fmt: skip

"""The policies of this project's own engine: its memory plan in the shape that policies read.

A slot of the engine is a slot of the policies, and rank r is the expert that slot r holds at the start
(`MemoryPlan.order`), so hotness is the order of slots until usage is counted. Ranks cover every loaded block, the draft
block included. K/V pages are the unit in which slots pay. What the allocator has to spare beyond the plan is never seen
here: programs' temporaries take it, so free memory is 0 unless the head is unloaded or prompt buffers have memory of
their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from strata_jax.geometry import Geometry
from strata_jax.memory import layout
from strata_jax.memory.frame import make_frame
from strata_jax.memory.ledger import MIB, Ledger, Memory, Owner, Phase, always
from strata_jax.memory.plan import MemoryPlan
from strata_jax.memory.sizes import model_sizes
from strata_jax.memory.strata.from_memory_plan import from_memory_plan
from strata_jax.memory.strata.request import Card, GrowSettings
from strata_jax.memory.strata.result import Layout, PromptPath, StrataPlan
from strata_jax.memory.strata.sizes import PackSizes, pack_sizes
from strata_jax.policies.head_alias import break_even_tokens
from strata_jax.policies.policy import AdaptSettings, PolicyParameters, Prices
from strata_jax.policies.stack import PolicyStack, policy_stack
from strata_jax.policies.state import MemoryState

NO_SWAPS = AdaptSettings(every_rounds=0, swaps=0)


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    """Settings of policies that the memory plan does not hold.

    Attributes:
        grow_anywhere: the coldest slots pay for K/V cells wherever they lie; False: those just under the loan.
        grow_step_cells: K/V cells mapped at a time. hysteresis_steps: spare steps kept before cells are given back.
        alias_min_fresh_tokens: shorter reads keep the head; None: those that slots alone have room for.
        short_read_tokens: reads up to this length go through decode windows.
        conversation_slots: conversations that may be parked. conversation_min_free_mib: RAM that parking leaves free.
    """

    grow_anywhere: bool = True
    grow_step_cells: int = 8_192
    hysteresis_steps: int = 2
    keep_restorable: bool = False
    request_margin_cells: int = 256
    round_margin_cells: int = 64
    alias_min_fresh_tokens: int | None = None
    short_read_tokens: int = 0
    conversation_slots: int = 4
    conversation_min_free_mib: int = 2_560
    adapt: AdaptSettings = field(default_factory=lambda: NO_SWAPS)


def device_stack(
    geometry: Geometry,
    plan: MemoryPlan,
    settings: DeviceSettings,
    *,
    image_bytes: Callable[[int], int],
    checkpoint_bytes: int,
) -> PolicyStack:
    """Return the policies that a memory plan turns on.

    Args:
        image_bytes: RAM of a parked conversation of so many tokens, without its checkpoints.
    """
    sizes = device_sizes(geometry, plan)
    own = _own_bytes(geometry, plan)
    segments = plan.bucket_segments or (0,) * len(plan.prefill_buckets)
    needs = {bucket: plan.lent_bytes(n) + own[bucket] for bucket, n in zip(plan.prefill_buckets, segments, strict=True)}
    made = _as_strata_plan(geometry, sizes, plan, settings, own[plan.prefill_buckets[-1]])
    prices = Prices(
        buffer_bytes=needs.__getitem__,
        kv_chunks=lambda cells, _: plan.num_kv_layers * layout.kv_pages_per_layer(cells, plan.cells_per_page),
        image_bytes=lambda tokens, checkpoints: image_bytes(tokens) + checkpoints * checkpoint_bytes,
        checkpoint_bytes=checkpoint_bytes,
    )
    rows = 2 * plan.spec_window  # a window and the drafts after it
    parameters = PolicyParameters(
        alias_min_fresh_tokens=settings.alias_min_fresh_tokens or 0,
        grow_anywhere=settings.grow_anywhere,
        page_bytes=plan.page_bytes,
        pages_stay=True,
        keep_restorable=settings.keep_restorable,
        request_margin_cells=max(rows, settings.request_margin_cells),
        round_margin_cells=max(rows, settings.round_margin_cells),
        adapt=settings.adapt,
        read_grid=plan.prefill_buckets,
        own_first=True,
    )
    stack = policy_stack(sizes, made, parameters=parameters, prices=prices)
    if made.head_aliased and settings.alias_min_fresh_tokens is None:
        parameters = replace(parameters, alias_min_fresh_tokens=break_even_tokens(stack.ctx, 1.0))
        stack = policy_stack(sizes, made, parameters=parameters, prices=prices)
    return stack


def first_state(stack: PolicyStack, plan: MemoryPlan, ram_available_bytes: int | None) -> MemoryState:
    """Return the memory of an engine that has just been loaded."""
    state = replace(stack.initial_state(), ram_available_bytes=ram_available_bytes)
    slots, borders = state.slots, plan.arena.segment_first_slot
    # any segment can be lent, and only slots before them pay for cells
    first = borders[0] if borders else slots.num_slots
    cuts = tuple(slots.offset_bytes[list(borders)].tolist()) if plan.request.moving.elastic_bytes else ()
    return replace(state, slots=replace(slots, borders=borders, low=first, top=first, cut_bytes=cuts))


def bytes_beyond_plan(plan: MemoryPlan) -> int:
    """Return the device memory that the plan leaves to other programs at all times, the reserve included.

    0 where the device has no memory of its own: then only what is given back counts.
    """
    budget = plan.request.device_budget_bytes
    if budget is None:
        return 0
    taken = max(plan.ledger.total_bytes(phase, Memory.DEVICE) for phase in Phase)
    return budget - taken + plan.request.reserve_bytes


def device_sizes(geometry: Geometry, plan: MemoryPlan) -> PackSizes:
    """Return the sizes of a model in the units of the arena, with a rank for every expert of every loaded block."""
    slot_bytes = np.array(plan.pages_per_expert, np.int64) * plan.page_bytes
    rank_layer = plan.order.block.astype(np.int16)
    return replace(
        pack_sizes(geometry),
        num_layers=plan.num_blocks,
        blob_bytes=tuple(slot_bytes.tolist()),
        rank_layer=rank_layer,
        rank_bytes=slot_bytes[rank_layer],
        rank_end_bytes=np.cumsum(slot_bytes[rank_layer]),
    )


def _own_bytes(geometry: Geometry, plan: MemoryPlan) -> dict[int, int]:
    """Return what prompts of each bucket take beside a loan: of the unloaded head, or of memory kept for them."""
    frame = make_frame(model_sizes(geometry), plan.request)
    needs = {
        bucket: sum(e.peak_bytes for e in frame.prompt_entries(plan.context_requested_cells, bucket, plan.stage_bytes))
        for bucket in plan.prefill_buckets
    }
    if plan.request.moving.head_alias:
        head = plan.ledger.owner_bytes(Phase.DECODE, Memory.DEVICE)[Owner.HEAD]
        return {bucket: min(head, max(0, need - plan.prompt_base_bytes)) for bucket, need in needs.items()}
    if plan.lent_slots:
        return dict.fromkeys(needs, 0)
    decode = plan.ledger.owner_bytes(Phase.DECODE, Memory.DEVICE)[Owner.DECODE_BUFFERS]
    return {bucket: max(0, need - decode) for bucket, need in needs.items()}


def _as_strata_plan(
    geometry: Geometry, sizes: PackSizes, plan: MemoryPlan, settings: DeviceSettings, own_bytes: int
) -> StrataPlan:
    """Return the plan; the card is as large as what the policies may move, temporaries of programs included."""
    moving = plan.request.moving
    start = plan.ledger.owner_bytes(Phase.START, Memory.DEVICE)
    decode = plan.ledger.owner_bytes(Phase.DECODE, Memory.DEVICE)[Owner.DECODE_BUFFERS]
    kind = Layout(plan.prompt_layout)
    temporaries = decode
    if kind is not Layout.OWN and plan.request.device_budget_bytes is not None:
        peak = plan.ledger.peak_owner_bytes()[Owner.PROMPT_BUFFERS]
        temporaries = max(decode, min(plan.prompt_base_bytes, peak))
    entries = [
        always(e.owner, e.item, e.phase_bytes[0], e.rule)
        for e in plan.ledger.entries
        if e.memory is Memory.DEVICE and e.owner is not Owner.RESERVE and e.phase_bytes[0]
    ]
    entries.append(always(Owner.DECODE_BUFFERS, "programs", temporaries, "temporaries of the programs"))
    resting = sum(num for owner, num in start.items() if owner is not Owner.RESERVE) + temporaries
    vram = resting + (own_bytes if kind is Layout.OWN else 0)
    card = Card("device", vram_bytes=vram, vmm_chunk_bytes=plan.page_bytes)
    prompt = PromptPath(
        chunk_tokens=plan.prefill_buckets[-1], layout=kind, ring_slots=0,
        buffer_bytes=plan.lent_bytes(plan.lent_segments) + own_bytes, own_bytes=own_bytes,
        lent_slots=plan.lent_slots, first_lent=plan.expert_slots - plan.lent_slots,
        lent_bytes=plan.lent_bytes(plan.lent_segments), why_not_larger="",
    )  # fmt: skip
    base = from_memory_plan(geometry, sizes, plan, card)
    request = replace(
        base.request,
        grow=GrowSettings(
            enabled=moving.grow_init_cells is not None,
            init_cells=plan.mapped_cells,
            step_cells=settings.grow_step_cells,
            floor_slots=moving.floor_slots,
            hysteresis_steps=settings.hysteresis_steps,
        ),
        vram_elastic_mib=-(-moving.elastic_bytes // MIB),  # the segments are the arena's own
        short_read_tokens=settings.short_read_tokens,
        checkpoints=moving.checkpoints,
        conversation_mib=moving.conversation_bytes // MIB,
        conversation_slots=settings.conversation_slots,
        conversation_min_free_mib=settings.conversation_min_free_mib,
    )
    return replace(
        base,
        request=request,
        prompt=prompt,
        head_aliased=moving.head_alias,
        head_bytes=start[Owner.HEAD],
        kv_mapped_cells=plan.mapped_cells,
        ledger=Ledger(tuple(entries)),
    )

"""From settings to what moves on the device: the planner's part, and that of the policies while requests run."""

from __future__ import annotations

from strata_jax.config.cache import replacement_decay
from strata_jax.config.choices import OwnBuffers, Replacement
from strata_jax.config.fields import AUTO
from strata_jax.config.resolve import GROW_FLOOR_SLOTS, GROW_INIT_CELLS, GROW_STEP_CELLS
from strata_jax.config.schema import RunConfig
from strata_jax.geometry import Geometry
from strata_jax.memory.ledger import MIB
from strata_jax.memory.plan import MemoryPlan
from strata_jax.memory.request import MovingMemory
from strata_jax.policies.device import NO_SWAPS, DeviceSettings
from strata_jax.policies.policy import AdaptSettings

INIT_SHARE, STEP_SHARE = 16, 32  # of a published context of 262,144 cells the first cells and a step are these parts


def moving_memory(config: RunConfig, geometry: Geometry, context_cells: int | None) -> MovingMemory:
    """Return what may change hands, for the planner.

    context_cells: the context as far as it is known before planning; None: the model's own.
    """
    grow, own, elastic = config.kv.grow, config.prefill.own, config.policy.vram_elastic
    grows = grow.enabled is True
    init = None
    if grows:
        cells = geometry.context_length if context_cells is None else context_cells
        init = min(GROW_INIT_CELLS, -(-cells // INIT_SHARE)) if grow.init_cells == AUTO else int(grow.init_cells)
    blocks = geometry.num_layers + (geometry.num_mtp_layers if config.spec.window > 1 else 0)
    floor = min(GROW_FLOOR_SLOTS, blocks * geometry.num_experts_used)
    return MovingMemory(
        lend=config.prefill.borrow is True and own is not OwnBuffers.on,
        own=own.name if config.policy.prefill_own.enabled is True else "off",
        head_alias=config.policy.head_alias.enabled is True,
        grow_init_cells=init,
        floor_slots=0 if not grows else floor if grow.floor_slots == AUTO else int(grow.floor_slots),
        resident_cells=config.kv.resident_cells,
        elastic_bytes=elastic.segment_mib * MIB if elastic.enabled else 0,
        conversation_bytes=int(config.conversation.budget_mib) * MIB,
        checkpoints=int(config.conversation.prompt_cache.checkpoints),
        replacement_decay=replacement_decay(config),
    )


def moves_memory(config: RunConfig, plan: MemoryPlan, *, conversations: bool) -> bool:
    """Say whether requests run under policies: something may move or is counted, or conversations go on."""
    counts = config.cache.replacement is Replacement.adaptive or config.cache.profile_save is not None
    return plan.request.moving != MovingMemory() or counts or conversations or int(config.prefill.short_read_tokens) > 0


def device_settings(config: RunConfig, plan: MemoryPlan) -> DeviceSettings:
    """Return the settings of policies that no plan holds."""
    grow, adapt, conversation = config.kv.grow, config.cache.adapt, config.conversation
    step = min(GROW_STEP_CELLS, max(plan.cells_per_page, plan.context_cells // STEP_SHARE))
    least = config.policy.head_alias.min_fresh_tokens
    return DeviceSettings(
        grow_anywhere=grow.anywhere is not False,
        grow_step_cells=step if grow.step_cells == AUTO else int(grow.step_cells),
        hysteresis_steps=grow.hysteresis_steps,
        keep_restorable=grow.keep_restorable,
        request_margin_cells=grow.request_margin_cells,
        round_margin_cells=grow.round_margin_cells,
        alias_min_fresh_tokens=None if least == AUTO else int(least),
        short_read_tokens=int(config.prefill.short_read_tokens),
        conversation_slots=conversation.slots,
        conversation_min_free_mib=conversation.min_free_mib,
        adapt=AdaptSettings(
            adapt.every_rounds, adapt.swaps, adapt.decay, adapt.least_usage, adapt.gap, adapt.lag_rounds
        )
        if config.cache.replacement is Replacement.adaptive
        else NO_SWAPS,
    )

"""The values of `auto` that follow from other settings, filled in one place and written down with the run.

What needs a machine, a file or the planner stays `auto` here; the plan says what became of it.
"""

from __future__ import annotations

from strata_jax.config.choices import Compat, ExecutorName, OwnBuffers
from strata_jax.config.contradictions import VRAM_RESERVE_MIB
from strata_jax.config.executors import executor_of, has_strata_memory, is_preset
from strata_jax.config.fields import AUTO
from strata_jax.config.schema import RunConfig

MIB = 2**20
MODEL_FILE = "file"  # quant.name of a model that is a file
STRATA_SHORT_READ_TOKENS = 64  # planning notes 3.1
STRATA_CHECKPOINTS = 6
STRATA_SUFFIX_DRAFT = 3
GROW_INIT_CELLS, GROW_STEP_CELLS, GROW_FLOOR_SLOTS = 16_384, 8_192, 128  # planning notes 6.3
STRATA_DRAFT_VOCAB = 106_299  # planning notes 1.6, the default vocabulary of drafts
CONVERSATION_BUDGET_MIB = 2_048  # ours, the published runs have 1,024 to 8,192
HEAD_RESERVE_MIB = 1_024  # free at a request's start below which the original warns (0.1.43.1)


def resolve(config: RunConfig) -> RunConfig:
    """Replace the `auto` values that other settings decide, in place, and return the configuration."""
    config.executor.name = executor_of(config)
    if not is_preset(config):
        config.quant.name = MODEL_FILE
    if config.executor.name is ExecutorName.sim:
        _resolve_sim(config, strata=has_strata_memory(config))
    else:
        _resolve_device(config)
    return config


def searches(config: RunConfig) -> bool:
    """Say whether the search of policy=auto is still to come: a switch is `auto` until it is done."""
    policy = config.policy
    switches = (policy.prefill_own, policy.conversation_budget, policy.head_alias, policy.kv_grow)
    return any(switch.enabled == AUTO for switch in switches)


def reserve_mib(config: RunConfig, *, returning_head_bytes: int = 0) -> int:
    """Return the device memory to leave free in MiB, where nothing makes the default smaller.

    returning_head_bytes: of a lent head that must find its place in the reserve again, as no driver pages memory; 0:
    none does. The default then grows by it, so that what is taken after the cache is sized finds the room it has beside
    a resident head, and is no less than what a request should find free.
    """
    given = config.hardware.vram_reserve_mib
    if not isinstance(given, str):
        return given
    if not returning_head_bytes:
        return VRAM_RESERVE_MIB
    return max(HEAD_RESERVE_MIB, VRAM_RESERVE_MIB - (-returning_head_bytes // MIB))


def _resolve_sim(config: RunConfig, *, strata: bool) -> None:
    if config.conversation.prompt_cache.checkpoints == AUTO:
        config.conversation.prompt_cache.checkpoints = STRATA_CHECKPOINTS if strata else 0
    if config.spec.suffix_draft == AUTO:
        config.spec.suffix_draft = STRATA_SUFFIX_DRAFT if strata else 0
    if config.spec.draft_vocab == AUTO and strata:
        config.spec.draft_vocab = STRATA_DRAFT_VOCAB
    _resolve_given_switches(config)
    if not searches(config):  # what follows from the policies is known when they are
        _resolve_policies(config, strata=strata)


def _resolve_device(config: RunConfig) -> None:
    """What follows from the policies; cells and slots follow from the plan, when there is one."""
    policy, conversation = config.policy, config.conversation
    if config.kv.grow.enabled == AUTO:
        config.kv.grow.enabled = policy.kv_grow.enabled
    if conversation.budget_mib == AUTO:
        conversation.budget_mib = CONVERSATION_BUDGET_MIB if policy.conversation_budget.enabled is True else 0
    if conversation.prompt_cache.checkpoints == AUTO:
        conversation.prompt_cache.checkpoints = STRATA_CHECKPOINTS if conversation.budget_mib else 0
    if config.prefill.borrow == AUTO:
        switches = (policy.prefill_own, policy.head_alias, policy.vram_elastic)
        config.prefill.borrow = True in (config.kv.grow.enabled, *(switch.enabled for switch in switches))
    if config.prefill.short_read_tokens == AUTO:
        config.prefill.short_read_tokens = 0


def _resolve_given_switches(config: RunConfig) -> None:
    """A switch that is left to the search follows the setting that it steers, where that is given."""
    policy, grow, own = config.policy, config.kv.grow.enabled, config.prefill.own
    if policy.kv_grow.enabled == AUTO and grow != AUTO:
        policy.kv_grow.enabled = grow
    if policy.prefill_own.enabled == AUTO and own is not OwnBuffers.auto:
        policy.prefill_own.enabled = own is OwnBuffers.on
    if policy.conversation_budget.enabled == AUTO and config.conversation.budget_mib == 0:
        policy.conversation_budget.enabled = False


def _resolve_policies(config: RunConfig, *, strata: bool) -> None:
    grow, alias = config.kv.grow, config.policy.head_alias
    if grow.enabled == AUTO:
        grow.enabled = config.policy.kv_grow.enabled
    if config.conversation.budget_mib == AUTO:
        config.conversation.budget_mib = CONVERSATION_BUDGET_MIB if config.policy.conversation_budget.enabled else 0
    if grow.init_cells == AUTO:
        grow.init_cells = GROW_INIT_CELLS
    if grow.step_cells == AUTO:
        grow.step_cells = GROW_STEP_CELLS
    if grow.floor_slots == AUTO:
        grow.floor_slots = GROW_FLOOR_SLOTS
    if alias.inside_head == AUTO:
        alias.inside_head = False
    if config.prefill.borrow == AUTO:
        config.prefill.borrow = strata
    if config.prefill.short_read_tokens == AUTO:
        lends_head = alias.enabled is True and config.policy.compat is Compat.upstream
        config.prefill.short_read_tokens = STRATA_SHORT_READ_TOKENS if strata and not lends_head else 0

"""From settings to everything a simulation needs: card, model sizes, profile, plan, policies, requests.

The only place where a setting meets its parameter of the planner, the policies or the simulator. No JAX.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from strata_jax.config.cache import NO_RANKING, replacement_decay
from strata_jax.config.checks import auto_limit
from strata_jax.config.choices import Compat, Replacement, Tier
from strata_jax.config.executors import LOCAL, has_strata_memory, is_preset
from strata_jax.config.fields import AUTO
from strata_jax.config.resolve import reserve_mib
from strata_jax.config.schema import RunConfig
from strata_jax.errors import ConfigError
from strata_jax.geometry import Geometry
from strata_jax.gguf.reader import open_gguf
from strata_jax.hardware import MIB, Hardware, describe_local
from strata_jax.memory.expert_kernels import choose_kernels
from strata_jax.memory.expert_ranking import ExpertRanking
from strata_jax.memory.layout import KIB
from strata_jax.memory.plan import plan as plan_xla
from strata_jax.memory.request import PlanRequest
from strata_jax.memory.strata.from_memory_plan import from_memory_plan
from strata_jax.memory.strata.plan import try_plan_strata
from strata_jax.memory.strata.request import Card, ExpertTier, GrowSettings, StrataRequest, Version, pages_memory
from strata_jax.memory.strata.result import StrataPlan
from strata_jax.memory.strata.sizes import PackSizes, pack_sizes
from strata_jax.memory.strata.unfit import StrataUnfit
from strata_jax.policies.head_alias import break_even_tokens
from strata_jax.policies.policy import AdaptSettings, PolicyParameters
from strata_jax.policies.policy import Compat as PolicyCompat
from strata_jax.policies.prompt_segments import CheckpointRule
from strata_jax.policies.stack import PolicyStack, policy_stack
from strata_jax.preset_settings import geometry_of_preset
from strata_jax.sim.compat import allowed_request
from strata_jax.sim.executor import CONTEXT_SLACK
from strata_jax.sim.longest import LongestRequest
from strata_jax.sim.machine import SimOptions
from strata_jax.sim.prefill_cost import head_load_ms, relayout_ms
from strata_jax.sim.profile import Profile, load_profile, profile_for_gpu, read_profile
from strata_jax.sim.rankings import num_ranked, ranked_sizes, ranking_note, ranking_of, trunk_order
from strata_jax.sim.requests import SimRequest
from strata_jax.sim.trace import read_routing_trace
from strata_jax.sim.workload import sim_requests
from strata_jax.synthetic import builtin_model_path

SPARE_CELLS = 8  # of the K/V, beyond prompt and output (planning notes 3.2)
ALIAS_SPARE_MIB = 512  # planning notes 6.2
AUTO_CHUNK_MAX_TOKENS = 8_192  # what `auto` tries at most (planning notes 2.6)
# RAM beyond the experts from which a whole copy of them is kept (planning notes 2.8, setup's rule)
ARENA_SPARE_MIB = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class SimInputs:
    """A model on a card, before anything is planned.

    notes: what the original switches off, line by line. ranking: the given one; None: the popularity model's.
    """

    geometry: Geometry
    sizes: PackSizes
    profile: Profile
    card: Card
    request: StrataRequest
    requests: tuple[SimRequest, ...]
    notes: tuple[str, ...]
    ranking: ExpertRanking | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SimSetup:
    """A planned simulation."""

    inputs: SimInputs
    plan: StrataPlan
    stack: PolicyStack
    options: SimOptions


def sim_inputs(config: RunConfig, requests: tuple[SimRequest, ...] | None = None) -> SimInputs:
    """Return the model, the machine and the planner's request for checked and resolved settings.

    requests: of the workload, where they are known already; None: they are made.
    Raises:
        ConfigError: an unknown preset or profile, or a setting that the original refuses with policy.compat=upstream.
        FormatError: the model's or the profile's file is broken.
    """
    geometry = geometry_of(config)
    ranking = ranking_of(config, geometry)
    sizes = pack_sizes(geometry) if ranking is None else ranked_sizes(pack_sizes(geometry), ranking)
    profile = profile_of(config)
    card = card_of(config, profile)
    requests = requests_of(config) if requests is None else requests
    asked = strata_request(config, geometry, sizes, card)
    needed = max((request.prompt_tokens + request.output_tokens for request in requests), default=0)
    _check_context(asked.context_cells, needed, geometry.context_length)
    if ranking is not None:
        asked = replace(asked, ranked=num_ranked(config, ranking))
    request, notes = allowed_request(config, asked, num_layers=geometry.num_layers, needed_cells=needed)
    notes = (*notes, *_reserve_note(config, sizes, card), *_replaced(config, request))
    notes += () if ranking is None else (ranking_note(ranking, request.ranked),)
    return SimInputs(geometry, sizes, profile, card, request, requests, notes, ranking)


def _returning_head_bytes(config: RunConfig, sizes: PackSizes, card: Card) -> int:
    """Return the bytes of a lent head that come back into the reserve; 0 where the driver pages, or upstream decides.

    The original plans as if the head took nothing, and buffers inside the head's own bytes leave the reserve whole.
    """
    policy = config.policy
    natively = has_strata_memory(config) and policy.compat is Compat.native
    pages = pages_memory(card, _switch(policy.head_alias.spill))
    if not natively or policy.head_alias.enabled is not True or policy.head_alias.inside_head is True or pages:
        return 0
    return sizes.head_bytes


def _reserve_note(config: RunConfig, sizes: PackSizes, card: Card) -> list[str]:
    head_bytes = _returning_head_bytes(config, sizes, card)
    if not head_bytes or config.hardware.vram_reserve_mib != AUTO:
        return []
    return [
        f"hardware.vram_reserve_mib=auto is {reserve_mib(config, returning_head_bytes=head_bytes):,} MiB: the lent head"
        f" ({head_bytes / MIB:,.0f} MiB) comes back into it to decode, and nothing pages device memory"
    ]


def _replaced(config: RunConfig, request: StrataRequest) -> list[str]:
    """Return a line for every given number that the original reads as another one."""
    if not has_strata_memory(config):
        return []
    lines = []
    if config.cache.slots == 0:
        lines.append("cache.slots=0 counts as auto, as in the original with a profile")
    if request.kv_streamed and request.resident_cells != config.kv.resident_cells:
        lines.append(f"kv.resident_cells={config.kv.resident_cells} became {request.resident_cells}, the least")
    if request.grow.enabled and request.grow.init_cells > request.context_cells:
        lines.append(f"kv.grow.init_cells={request.grow.init_cells} is more than the window: all of it is mapped")
    return lines


def _check_context(cells: int, needed: int, longest: int) -> None:
    """Raise ConfigError, with numbers, where a request is longer than the K/V. needed: prompt and output."""
    if needed + SPARE_CELLS <= cells:
        return
    wider = f", or set model.max_context={needed + SPARE_CELLS}" if needed + SPARE_CELLS <= longest else ""
    raise ConfigError(
        f"model.max_context={cells} and the workload: its longest request has {needed:,} tokens, prompt and output,"
        f" and needs {SPARE_CELLS} cells more. Shorten it by {needed + SPARE_CELLS - cells:,}"
        f" (workload.prompt_tokens, workload.max_output_tokens){wider}; the model takes {longest:,} at most"
    )


def plan_or_unfit(config: RunConfig, inputs: SimInputs) -> StrataPlan | StrataUnfit:
    """Plan the memory with the chosen memory model, for requests as long as the longest that will come.

    Raises DoesNotFit itself where the model is xla.
    """
    if has_strata_memory(config):
        compat, parameters = PolicyCompat(config.policy.compat.value), policy_parameters(config)
        check = LongestRequest(inputs.sizes, compat, parameters, sim_options(config, inputs.ranking), inputs.requests)
        return try_plan_strata(inputs.sizes, inputs.card, inputs.request, check=check)
    made = plan_xla(inputs.geometry, _xla_request(config, inputs))
    return from_memory_plan(inputs.geometry, inputs.sizes, made, inputs.card)


def complete_setup(config: RunConfig, inputs: SimInputs, plan: StrataPlan) -> SimSetup:
    """Return what runs a plan: the policies it turns on, the requests, the simulator's options."""
    compat, parameters = PolicyCompat(config.policy.compat.value), policy_parameters(config)
    stack = policy_stack(inputs.sizes, plan, compat=compat, parameters=parameters)
    if plan.head_aliased and compat is PolicyCompat.NATIVE and config.policy.head_alias.min_fresh_tokens == AUTO:
        pinned = config.policy.head_alias.pinned is not False
        cycle_ms = relayout_ms(inputs.profile) + head_load_ms(inputs.profile, plan.head_bytes, pinned=pinned)
        least = break_even_tokens(stack.ctx, cycle_ms)
        parameters = replace(parameters, alias_min_fresh_tokens=least)
        stack = policy_stack(inputs.sizes, plan, compat=compat, parameters=parameters)
    return SimSetup(inputs, plan, stack, sim_options(config, inputs.ranking))


def geometry_of(config: RunConfig) -> Geometry:
    """Return the geometry of a preset, or of a model file from its header."""
    if is_preset(config):
        return geometry_of_preset(config)
    path = Path(config.model.path).expanduser() if config.model.path else builtin_model_path(seed=config.model.seed)
    with open_gguf(path) as file:
        return Geometry.from_gguf(file)


def profile_of(config: RunConfig) -> Profile:
    """Return the hardware profile with the numbers that the settings give in place of its own.

    Raises ConfigError for hardware=local on a machine without a GPU that has a profile.
    """
    hardware = config.hardware
    if hardware.profile_file is not None:
        profile = read_profile(Path(hardware.profile_file).expanduser())
    elif hardware.name == LOCAL:
        profile = _local_profile(describe_local())
    else:
        profile = load_profile(hardware.name)
    given = {
        "pcie_gb_s": hardware.pcie_gb_s,
        "hbm_gb_s": hardware.hbm_gb_s,
        "ram_gb_s": hardware.ram_gb_s,
        "file_gb_s": hardware.file_gb_s,
        "pinned_share": hardware.pinned_share,
        "cpu_cores": hardware.cores,
    }
    numbers = {name: _number(value) for name, value in given.items()}
    if all(value is None for value in numbers.values()):
        return profile
    return profile.with_values("given in the settings", "given", **numbers)


def card_of(config: RunConfig, profile: Profile) -> Card:
    """Return the machine as the planner sees it."""
    hardware = config.hardware
    card = profile.card(
        vram_mib=_number(hardware.vram_mib),
        taken_mib=_number(hardware.vram_taken_mib),
        ram_mib=_number(hardware.ram_mib),
        ram_available_mib=_number(hardware.ram_available_mib),
        os=None if hardware.os == AUTO else hardware.os,
    )
    if hardware.name == LOCAL and hardware.profile_file is None:
        machine = describe_local()
        if machine.gpu is not None and hardware.vram_mib == AUTO:
            card = replace(card, vram_bytes=machine.gpu.total_bytes)
        if hardware.ram_mib == AUTO:
            card = replace(card, ram_bytes=machine.ram_bytes, ram_source=machine.ram_source)
    return card


def strata_request(config: RunConfig, geometry: Geometry, sizes: PackSizes, card: Card) -> StrataRequest:
    """Return the planner's request as the settings have it."""
    policy, kv, cache, prefill = config.policy, config.kv, config.cache, config.prefill
    upstream = policy.compat is Compat.upstream
    own = prefill.own.name if policy.prefill_own.enabled is True else "off"
    elastic = policy.vram_elastic.enabled is True or config.upstream.vram_elastic
    reserve = reserve_mib(config, returning_head_bytes=_returning_head_bytes(config, sizes, card))
    return StrataRequest(
        version=Version(config.memory_model.name.value) if has_strata_memory(config) else Version.V0_1_43,
        context_cells=geometry.context_length if config.model.max_context == AUTO else int(config.model.max_context),
        kv_type=kv.type.name,
        kv_resident_cells=kv.resident_cells,
        expert_cache=_integer(cache.slots),
        cap_expert_cache=upstream,
        cache_per_layer=cache.per_layer,
        chunk_tokens=_integer(prefill.chunk),
        chunk_auto_max=auto_limit(str(prefill.chunk)) or AUTO_CHUNK_MAX_TOKENS,
        reserve_mib=reserve,
        reserve_given=config.hardware.vram_reserve_mib != AUTO,
        borrow=prefill.borrow is True or prefill.borrow == AUTO,
        own=own,
        decide_at=policy.prefill_own.decide_at.name,
        head_alias=bool(policy.head_alias.enabled),
        alias_spare_mib=_alias_spare_mib(config, reserve),
        alias_inside_head=bool(policy.head_alias.inside_head),
        alias_beyond=not upstream if policy.head_alias.large_chunks == AUTO else bool(policy.head_alias.large_chunks),
        grow=GrowSettings(
            enabled=kv.grow.enabled is True,
            init_cells=int(kv.grow.init_cells),
            step_cells=int(kv.grow.step_cells),
            floor_slots=int(kv.grow.floor_slots),
            hysteresis_steps=kv.grow.hysteresis_steps,
            anywhere=not upstream if kv.grow.anywhere == AUTO else bool(kv.grow.anywhere),
        ),
        vram_elastic_mib=policy.vram_elastic.segment_mib if elastic else 0,
        profile=cache.profile != NO_RANKING,
        ranked=_integer(cache.ranked),
        stream_min_tokens=prefill.stream_min_tokens,
        ring_slots=_integer(prefill.ring_slots),
        lend_pct=_integer(prefill.lend_pct),
        short_read_tokens=_integer(prefill.short_read_tokens) or 0,
        spec_window=config.spec.window,
        suffix_draft=int(config.spec.suffix_draft),
        draft_vocab=min(_integer(config.spec.draft_vocab) or geometry.vocab_size, geometry.vocab_size),
        mtp=config.upstream.mtp,
        token_graph=config.upstream.token_graph,
        checkpoints=int(config.conversation.prompt_cache.checkpoints),
        tier=_tier(config, sizes, card),
        resident_budget_bytes=_bytes(config.ram.resident_budget_mib),
        resident_headroom_bytes=config.ram.resident_headroom_mib * MIB,
        conversation_budget=bool(policy.conversation_budget.enabled),
        conversation_mib=_integer(config.conversation.budget_mib) or 0,
        conversation_slots=config.conversation.slots,
        conversation_min_free_mib=config.conversation.min_free_mib,
        spill=_switch(policy.head_alias.spill),
    )


def policy_parameters(config: RunConfig) -> PolicyParameters:
    """Return the parameters of policies that no plan holds; what `auto` takes from a plan is filled in later."""
    alias, grow, adapt = config.policy.head_alias, config.kv.grow, config.cache.adapt
    adaptive = config.cache.replacement is Replacement.adaptive
    return PolicyParameters(
        alias_min_fresh_tokens=_integer(alias.min_fresh_tokens) or 0,
        grow_anywhere=_switch(grow.anywhere),
        keep_restorable=grow.keep_restorable,
        request_margin_cells=grow.request_margin_cells,
        round_margin_cells=grow.round_margin_cells,
        adapt=AdaptSettings(
            every_rounds=adapt.every_rounds if adaptive else 0,
            swaps=adapt.swaps,
            decay=adapt.decay,
            least_usage=adapt.least_usage,
            gap=adapt.gap,
            lag_rounds=adapt.lag_rounds,
        ),
    )


def sim_options(config: RunConfig, ranking: ExpertRanking | None = None) -> SimOptions:
    """Return the simulator's options. Raises FormatError for a routing trace that cannot be read.

    ranking: whose ranks a routing trace's experts have; None: they are ranked by use in the trace itself.
    """
    executor, cache = config.executor, config.conversation.prompt_cache
    trace = None if executor.routing_trace is None else read_routing_trace(Path(executor.routing_trace).expanduser())
    if trace is not None and ranking is not None:
        trace = replace(trace, order=trunk_order(ranking).expert)
    return SimOptions(
        spec_min_p=config.spec.min_p,
        pcie_frac=_number(config.cache.pcie_frac),
        checkpoints=CheckpointRule(every=cache.every, root=cache.root),
        vram_change_bytes=_bytes(config.policy.vram_elastic.wanted_mib),
        head_pinned=_switch(config.policy.head_alias.pinned),
        spill=config.hardware.os_effects,
        noise=executor.noise,
        seed=executor.seed,
        trace=trace,
        replacement_decay=replacement_decay(config),
    )


def requests_of(config: RunConfig) -> tuple[SimRequest, ...]:
    """Return the requests of the whole run: the workload's, as often as asked, every time anew."""
    once = sim_requests(config.workload)
    if config.workload.requests == 1:
        return tuple(once)
    return tuple(
        replace(request, name=f"{request.name}.{run}", conversation=f"{request.conversation}.{run}")
        for run in range(config.workload.requests)
        for request in once
    )


def _local_profile(machine: Hardware) -> Profile:
    if machine.gpu is None:
        raise ConfigError(
            "hardware=local and executor=sim: there is no GPU here whose profile could be taken. Choose a card, such"
            " as hardware=rtx5090, or give hardware.profile_file."
        )
    profile = profile_for_gpu(machine.gpu.name)
    if profile is None:
        raise ConfigError(
            f"hardware=local and executor=sim: {machine.gpu.name} has no profile. Run pipeline=calibrate and give the"
            " file it writes as hardware.profile_file."
        )
    return profile


def _xla_request(config: RunConfig, inputs: SimInputs) -> PlanRequest:
    need = max(
        (request.prompt_tokens + request.output_tokens + CONTEXT_SLACK for request in inputs.requests), default=None
    )
    card = inputs.card
    kernels, _ = choose_kernels(
        config.engine.kernels.name, inputs.geometry, on_gpu=True, spec_window=config.spec.window
    )
    return PlanRequest(
        context_cells=_integer(config.model.max_context),
        workload_cells=need,
        chunk_tokens=_integer(config.prefill.chunk),
        chunk_auto_max=auto_limit(str(config.prefill.chunk)) or AUTO_CHUNK_MAX_TOKENS,
        expert_slots=_integer(config.cache.slots),
        page_bytes=None if config.engine.page_kib == AUTO else int(config.engine.page_kib) * KIB,
        kv_type=config.kv.type.name,
        spec_window=config.spec.window,
        device_budget_bytes=card.vram_bytes - card.taken_bytes,
        reserve_bytes=reserve_mib(config) * MIB,
        host_budget_bytes=card.ram_bytes if card.ram_available_bytes is None else card.ram_available_bytes,
        shared_memory=False,
        expert_kernels=kernels,
        ranking=inputs.ranking,
    )


def _tier(config: RunConfig, sizes: PackSizes, card: Card) -> ExpertTier:
    if config.ram.tier is not Tier.auto:
        return ExpertTier(config.ram.tier.value)
    available = card.ram_bytes if card.ram_available_bytes is None else card.ram_available_bytes
    needed = sizes.total_expert_bytes + ARENA_SPARE_MIB * MIB
    return ExpertTier.ARENA if available >= needed else ExpertTier.RESIDENT


def _alias_spare_mib(config: RunConfig, reserve: int) -> int:
    """The original leaves 512 MiB beside hybrid buffers, whatever the reserve; natively the reserve is kept."""
    given = _integer(config.policy.head_alias.spare_mib)
    if given is not None:
        return given
    return ALIAS_SPARE_MIB if config.policy.compat is Compat.upstream else reserve


def _integer(value: int | str) -> int | None:
    """A number that was given; None for `auto` and `auto:N`."""
    return None if str(value).startswith(AUTO) else int(value)


def _number(value: float | str) -> float | None:
    return None if isinstance(value, str) else float(value)


def _bytes(mib: int | str | None) -> int | None:
    return None if mib is None or isinstance(mib, str) else mib * MIB


def _switch(value: bool | str) -> bool | None:
    return None if isinstance(value, str) else value

"""Plan and simulate the scenarios of published rows; equal scenarios once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from strata_jax.errors import ConfigError
from strata_jax.memory.strata.plan import try_plan_strata
from strata_jax.memory.strata.request import MIB, Card, ExpertTier
from strata_jax.memory.strata.result import StrataPlan
from strata_jax.memory.strata.sizes import PackSizes, pack_sizes
from strata_jax.memory.strata.unfit import StrataUnfit
from strata_jax.policies.policy import Compat
from strata_jax.policies.stack import policy_stack
from strata_jax.presets import preset_geometry
from strata_jax.reproduce.asks import Ask
from strata_jax.reproduce.translate import Machine, Scenario
from strata_jax.sim.acceptance import DraftModel, drafts_of_text
from strata_jax.sim.executor import simulate
from strata_jax.sim.machine import SimOptions
from strata_jax.sim.popularity import PopularityCurve
from strata_jax.sim.profile import Profile, profile_for_gpu
from strata_jax.sim.requests import SimRequest, agent_loop, follow_up, forced, from_order, single, taking_turns
from strata_jax.sim.results import SimRun
from strata_jax.workloads import load_workload

GIB = 2**30
WINDOWS_UNPINNED_BYTES = 8 * GIB  # pinning `auto` on Windows: half of the RAM less this (planning notes 2.8)
BETWEEN_TOKENS = 44  # of the conversation that comes between a stored prefix and its return
SUBAGENT_TOKENS = 15_000

Profiles = Callable[[str], Profile | None]


@dataclass(frozen=True, slots=True, eq=False)
class Mapping:
    """One growth of the K/V: for which request, to how many cells, and whether it was already generating."""

    request: str
    cells: int
    decoding: bool


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a scenario came to.

    Attributes:
        run: None where nothing was asked. unfit: why there is no plan. mappings: growths of the K/V in their order.
    """

    scenario: Scenario
    sizes: PackSizes
    profile: Profile
    plan: StrataPlan | None
    unfit: StrataUnfit | None = None
    run: SimRun | None = None
    mappings: tuple[Mapping, ...] = ()


@dataclass(slots=True)
class Outcomes:
    """Outcomes by scenario. `profiles` gives the profile of a GPU by the name that a row uses.

    Scenarios that differ only in what is asked share their plan. curve, noise: of the simulator.
    """

    profiles: Profiles = profile_for_gpu
    curve: PopularityCurve = field(default_factory=PopularityCurve)
    noise: float = 0.0
    _plans: dict[Scenario, Outcome] = field(default_factory=dict)
    _runs: dict[Scenario, Outcome] = field(default_factory=dict)

    def planned(self, scenario: Scenario) -> Outcome:
        """Return the plan of a scenario, without its requests. Raises ConfigError for an unknown card or preset."""
        key = replace(scenario, ask=Ask(), pcie_frac=None, min_p=0.0, reserve_later_mib=None, draft_acceptance=None)
        if key not in self._plans:
            sizes = pack_sizes(preset_geometry(scenario.model, scenario.quant, ple=scenario.ple))
            profile = self.profiles(scenario.machine.gpu)
            if profile is None:
                raise ConfigError(f"{scenario.machine.gpu}: there is no hardware profile of this card.")
            card = card_of(scenario.machine, profile, sizes, scenario.request.tier)
            # The original starts with a plan of which a phase takes too much, and so have the published runs.
            found = try_plan_strata(sizes, card, replace(scenario.request, spill=True))
            plan, unfit = (found, None) if isinstance(found, StrataPlan) else (None, found)
            self._plans[key] = Outcome(scenario, sizes, profile, plan, unfit)
        return self._plans[key]

    def with_profiles(self, profiles: Profiles) -> Outcomes:
        """Return outcomes that keep the plans made so far: for profiles that differ in speeds only."""
        plans = {
            key: replace(each, profile=profiles(each.scenario.machine.gpu) or each.profile)
            for key, each in self._plans.items()
        }
        return Outcomes(profiles, self.curve, self.noise, plans)

    def with_noise(self, sigma: float) -> Outcomes:
        """Return outcomes with the same plans whose times scatter by `sigma`, as `SimOptions.noise` says."""
        return Outcomes(self.profiles, self.curve, sigma, self._plans)

    def outcome(self, scenario: Scenario) -> Outcome:
        """Return the plan of a scenario and the simulation of its requests."""
        if scenario not in self._runs:
            planned = self.planned(scenario)
            self._runs[scenario] = (
                planned if planned.plan is None else _simulated(scenario, planned, planned.plan, self.curve, self.noise)
            )
        return self._runs[scenario]


def card_of(machine: Machine, profile: Profile, sizes: PackSizes, tier: ExpertTier) -> Card:
    """Return the planner's card: the profile's, with what a row says of its own machine.

    Without an arena nothing is registered as a whole: copies and files count as unpinned.
    """
    ram_mib = None if machine.ram_gib is None else machine.ram_gib * 1024
    card = profile.card(vram_mib=machine.vram_mib, ram_mib=ram_mib, os=machine.os)
    return replace(card, pinned_share=_pinned_share(machine, card, sizes, tier))


def _pinned_share(machine: Machine, card: Card, sizes: PackSizes, tier: ExpertTier) -> float:
    if machine.pin == "none" or tier is not ExpertTier.ARENA:
        return 0.0
    if machine.pin == "auto":
        room = card.ram_bytes // 2 - WINDOWS_UNPINNED_BYTES
        return min(1.0, max(0, room) / sizes.total_expert_bytes) if card.os == "windows" else 1.0
    return machine.pin if isinstance(machine.pin, float) else card.pinned_share


def requests_of(scenario: Scenario) -> list[SimRequest]:
    """Return the requests that a scenario asks for, in order; the last one is what a row about one prompt measures."""
    ask = scenario.ask
    if ask.name == "agent_loop":
        entry = load_workload("agent_loop")
        arms = list(entry["requests"])
        arm = "head_alias" if scenario.request.head_alias else "default"
        buckets = {name: counts[arms.index(arm)] for name, counts in entry["fresh_token_buckets"].items()}
        outputs = entry["output_tokens"]
        return agent_loop(
            buckets, num_requests=int(entry["requests"][arm]), max_prompt_tokens=int(entry["max_prompt_tokens"]),
            output_tokens=(int(outputs[0]), int(outputs[1])),
        )  # fmt: skip
    if ask.name == "grow_agents":
        entry = load_workload("grow_agents")
        turns = taking_turns(entry["order"], entry["agents"])
        return [*turns, single(SUBAGENT_TOKENS, name="subagent_after")]  # so that the last main agent gives back too
    if ask.name:
        return _prompt(ask) if ask.name == "prompt" else from_order(load_workload(ask.name)["order"])
    return []


def _prompt(ask: Ask) -> list[SimRequest]:
    """One prompt, after the requests that leave its prefix behind."""
    if not ask.reused_tokens:
        make = forced if ask.forced else single
        earlier = [make(ask.prompt_tokens, ask.output_tokens, name="before")] if ask.warm else []
        return [*earlier, make(ask.prompt_tokens, ask.output_tokens)]
    # one output token: everything of the first prompt is state, and nothing else is
    before = single(ask.reused_tokens, 1, name="before", tail_tokens=0)
    fresh = ask.prompt_tokens - ask.reused_tokens
    request = follow_up(before, fresh, ask.output_tokens, name="prompt", common=ask.reused_tokens)
    between = [single(BETWEEN_TOKENS, 1, name="between")] if ask.parked else []
    return [before, *between, request]


@lru_cache(maxsize=256)
def _drafts(acceptance: float | None, spec_window: int, min_p: float) -> DraftModel:
    """Return the draft model under which the stated share of drafts is accepted; without one, that of a mean text."""
    return DraftModel() if acceptance is None else drafts_of_text(acceptance, spec_window, min_p)


def _simulated(scenario: Scenario, planned: Outcome, plan: StrataPlan, curve: PopularityCurve, noise: float) -> Outcome:
    requests = requests_of(scenario)
    if not requests:
        return replace(planned, scenario=scenario)
    options = SimOptions(
        curve=curve,
        noise=noise,
        drafts=_drafts(scenario.draft_acceptance, scenario.request.spec_window, scenario.min_p),
        spec_min_p=scenario.min_p,
        pcie_frac=scenario.pcie_frac,
        vram_change_bytes=None if scenario.reserve_later_mib is None else scenario.reserve_later_mib * MIB,
    )
    stack = policy_stack(planned.sizes, plan, compat=Compat.UPSTREAM)
    watch = _Watch()
    sink = watch if plan.request.grow.enabled else None
    profile = planned.profile
    if scenario.machine.pcie_gb_s is not None:
        profile = profile.with_values("probed, as the row says", pcie_gb_s=scenario.machine.pcie_gb_s)
    run = simulate(plan, planned.sizes, profile, stack, requests, options=options, sink=sink)
    return replace(planned, scenario=scenario, run=run, mappings=tuple(watch.mappings))


@dataclass(slots=True)
class _Watch:
    """Listens to a simulation for the growths of its K/V."""

    mappings: list[Mapping] = field(default_factory=list)
    _since: int = 0
    _decoding: bool = False

    def event(self, kind: str, **values: Any) -> None:
        if kind == "map_cells":
            self.mappings.append(Mapping("", int(values["last"]), self._decoding))
        elif kind == "memory":
            self._decoding = values.get("phase") == "decode"

    def metric(self, kind: str, **values: Any) -> None:
        if kind == "request":
            found = self.mappings[self._since :]
            self.mappings[self._since :] = [replace(each, request=str(values.get("request"))) for each in found]
            self._since = len(self.mappings)
            self._decoding = False

"""policy=auto: search policies and parameters with the simulator, for the least time of a whole workload.

Every combination of the policies is planned and simulated; from the best one, parameters are varied one after the
other, then every policy is turned once more, and again as long as that helps. Pure and deterministic: no clock, no
chance. Long workloads are sampled (`search_space.sample`), so that the search takes seconds.

A candidate that leaves less device memory free than the user's reserve asks for is shown and only chosen where nothing
else fits: it would be faster at the cost of what the reserve is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from strata_jax.config.contradictions import VRAM_RESERVE_MIB
from strata_jax.config.schema import RunConfig
from strata_jax.errors import ConfigError, DoesNotFit, StrataError
from strata_jax.memory.ledger import MIB, Ledger, Memory, Phase
from strata_jax.memory.strata.request import StrataRequest
from strata_jax.memory.strata.result import StrataPlan
from strata_jax.memory.strata.unfit import StrataUnfit
from strata_jax.policies.stack import PolicyStack
from strata_jax.report.progress import SlowProgress
from strata_jax.sim.executor import simulate
from strata_jax.sim.results import SimRun
from strata_jax.sim.search_space import (
    Settings,
    complexity,
    flipped,
    label,
    parameters,
    sample,
    switch_settings,
    with_settings,
)
from strata_jax.sim.setup import complete_setup, plan_or_unfit, requests_of, sim_inputs

TIE_SHARE = 0.005  # candidates this near to the fastest are equal, no fit can tell them apart; the simplest is taken
SAMPLE_REQUESTS = 40  # that a candidate is tried on, at least: whole conversations
LEAST_GAIN = 0.005  # a parameter leaves its default for this much and more
ROUNDS = 3  # of varying parameters and turning policies; most searches stand still after one
OPEN_SLACK_MIB = 64  # of the reserve that the original's cache may take (planning notes 2.3)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a candidate does with the workload. Times in ms, summed over requests; rates over all of their tokens.

    Attributes:
        switch_ms: parking and restoring. head_ms: unloading and loading the head.
        free_mib: least free device memory in any phase. reserve_mib: what the reserve asks for once the engine is
            ready: the user's, less what is taken after the cache is sized and the slack the original allows itself.
    """

    total_ms: float
    prompt_ms: float
    decode_ms: float
    switch_ms: float
    refill_ms: float
    copy_wait_ms: float
    head_ms: float
    growth_ms: float
    fresh_tokens: int
    reused_tokens: int
    output_tokens: int
    hit_rate: float
    slots: int
    chunk_tokens: int
    layout: str
    lent_slots: int
    own_mib: float
    kv_start_cells: int
    free_mib: float
    reserve_mib: float
    warnings: tuple[str, ...]

    @property
    def keeps_reserve(self) -> bool:
        return self.free_mib >= self.reserve_mib

    @property
    def prompt_tok_s(self) -> float:
        return 1000 * self.fresh_tokens / self.prompt_ms if self.prompt_ms else 0.0

    @property
    def decode_tok_s(self) -> float:
        return 1000 * self.output_tokens / self.decode_ms if self.decode_ms else 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings and what they give: facts, or the reason why they cannot be used.

    Attributes:
        same_as: the label of an earlier candidate that gives exactly the same.
        notes: policies that the original switches off here.
    """

    settings: Settings
    facts: Facts | None
    error: StrataError | None = None
    same_as: str = ""
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return label(self.settings)


@dataclass(frozen=True, slots=True)
class Search:
    """All that was tried, in order; the first candidate is the plain one. `chosen` is None where nothing fits.

    Attributes:
        tried: values of parameters that were tried beside the chosen one, by setting.
        num_requests, num_sampled: of the workload, and those that were simulated for each candidate.
    """

    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    tried: dict[str, tuple[Any, ...]]
    num_requests: int
    num_sampled: int

    @property
    def plain(self) -> Candidate:
        return self.candidates[0]

    def find(self, settings: Settings) -> Candidate | None:
        """Return the candidate with exactly these settings."""
        return next((c for c in self.candidates if dict(c.settings) == dict(settings)), None)

    def error(self) -> StrataError:
        """Return why nothing can be chosen: the candidate that is short of least, and the plain one's reason."""
        text = f"policy=auto: none of {len(self.candidates)} candidates can run this workload."
        short = [c for c in self.candidates if isinstance(c.error, DoesNotFit)]
        nearest = min(short, key=lambda c: _shortfall_bytes(c.error), default=None)
        if nearest is None:
            return ConfigError(f"{text} {self.plain.label}: {self.plain.error}")
        if nearest is not self.plain:
            text = f"{text} The nearest, {nearest.label}: {str(nearest.error).rstrip('.')}."
        return DoesNotFit(
            f"{text} {self.plain.label}: {self.plain.error}", shortfall_bytes=_shortfall_bytes(nearest.error)
        )


def search_policies(config: RunConfig) -> Search:
    """Search the free policies and parameters of checked and resolved settings.

    Raises ConfigError or FormatError only for what no candidate can repair: an unknown workload, a broken file.
    """
    return _Searcher(config).search()


def best_of(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the candidate with the least time among those that keep the reserve, else among all that ran.

    Of candidates within `TIE_SHARE` of the least the simplest is returned, the first one of equals.
    """
    ran = [c for c in candidates if c.facts is not None]
    pool = [c for c in ran if keeps_reserve(c)] or ran
    if not pool:
        return None
    limit = min(total_ms(c) for c in pool) * (1 + TIE_SHARE)
    return min((c for c in pool if total_ms(c) <= limit), key=lambda c: complexity(c.settings))


def total_ms(candidate: Candidate) -> float:
    """Return a candidate's time for the workload; infinite if it cannot run."""
    return candidate.facts.total_ms if candidate.facts is not None else float("inf")


def _shortfall_bytes(error: StrataError | None) -> int:
    return error.shortfall_bytes if isinstance(error, DoesNotFit) else 0


def keeps_reserve(candidate: Candidate) -> bool:
    """Say whether a candidate runs and leaves what the reserve asks for."""
    return candidate.facts is not None and candidate.facts.keeps_reserve


class _Searcher:
    """The state of one search: what was tried so far."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.requests = requests_of(config)
        self.sampled = sample(self.requests, SAMPLE_REQUESTS)
        self.candidates: list[Candidate] = []
        self.plans: list[tuple[Any, Candidate]] = []
        self.tried: dict[str, tuple[Any, ...]] = {}
        self.progress = SlowProgress()

    def search(self) -> Search:
        for settings in switch_settings(self.config):
            self._try(settings)
        best = best_of(self.candidates)
        for _ in range(ROUNDS):
            if best is None:
                break
            best = self._vary_parameters(best)
            turned = [self._try(settings) for settings in flipped(self.config, best.settings)]
            better = best_of([best, *turned]) or best
            if better is best:
                break
            best = better
        return Search(tuple(self.candidates), best, self.tried, len(self.requests), len(self.sampled))

    def _vary_parameters(self, best: Candidate) -> Candidate:
        for parameter in parameters(self.config, best.settings):
            others = [self._try({**best.settings, parameter.setting: value}) for value in parameter.values]
            self.tried[parameter.setting] = parameter.values
            found = best_of([best, *others]) or best
            if total_ms(found) < total_ms(best) * (1 - LEAST_GAIN) or keeps_reserve(found) > keeps_reserve(best):
                best = found
        return best

    def _try(self, settings: Settings) -> Candidate:
        """Plan and simulate a candidate, unless it has been tried or plans the same as one that has."""
        known = next((c for c in self.candidates if dict(c.settings) == dict(settings)), None)
        if known is not None:
            return known
        self.progress.at(f"policy=auto: {len(self.candidates)} candidates; {label(settings)}")
        found = self._evaluate(settings)
        self.candidates.append(found)
        return found

    def _evaluate(self, settings: Settings) -> Candidate:
        config = with_settings(self.config, settings)
        try:
            inputs = sim_inputs(config, self.requests)
            plan = plan_or_unfit(config, inputs)
            if isinstance(plan, StrataUnfit):
                return Candidate(settings, None, plan.error(), notes=inputs.notes)
            setup = complete_setup(config, inputs, plan)
            key = _key(plan, setup.stack)
            same = next((c for known, c in self.plans if known == key), None)
            if same is not None:
                return replace(same, settings=settings, same_as=same.label, notes=inputs.notes)
            options = replace(setup.options, noise=0.0)
            done = simulate(plan, inputs.sizes, inputs.profile, setup.stack, self.sampled, options=options)
        except (ConfigError, DoesNotFit) as error:
            return Candidate(settings, None, error)
        facts = facts_of(plan, done)
        same = next((c for c in self.candidates if c.facts == facts and not c.same_as), None)
        found = Candidate(settings, facts, same_as=same.label if same else "", notes=inputs.notes)
        self.plans.append((key, found))
        return found


def facts_of(plan: StrataPlan, done: SimRun) -> Facts:
    """Return what counts of a simulation."""
    every = done.requests
    lookups = sum(r.lookups for r in every)
    planned = [plan.card.vram_bytes - plan.ledger.total_bytes(phase, Memory.DEVICE) for phase in Phase]
    free = min([max(0, left) / MIB for left in planned] + [min(r.free_mib, r.free_decode_mib) for r in every])
    return Facts(
        total_ms=done.total_ms,
        prompt_ms=sum(r.prompt_ms for r in every),
        decode_ms=sum(r.first_round_ms + r.decode_ms for r in every),
        switch_ms=sum(r.park_ms + r.restore_ms for r in every),
        refill_ms=sum(r.refill_ms for r in every),
        copy_wait_ms=sum(r.copy_wait_ms for r in every),
        head_ms=sum(r.head_load_ms + r.relayout_ms for r in every),
        growth_ms=sum(r.growth_ms for r in every),
        fresh_tokens=sum(r.fresh_tokens for r in every),
        reused_tokens=sum(r.reused_tokens for r in every),
        output_tokens=sum(r.output_tokens for r in every),
        hit_rate=sum(r.hits for r in every) / lookups if lookups else 0.0,
        slots=plan.slots,
        chunk_tokens=plan.prompt.chunk_tokens,
        layout=str(plan.prompt.layout),
        lent_slots=plan.prompt.lent_slots,
        own_mib=plan.prompt.own_bytes / MIB,
        kv_start_cells=plan.kv_mapped_cells,
        free_mib=free,
        reserve_mib=max(0.0, _asked_mib(plan.request) - plan.card.late_bytes / MIB - OPEN_SLACK_MIB),
        warnings=done.warnings,
    )


def _asked_mib(request: StrataRequest) -> int:
    """Return the reserve that a user has in mind: as given, or the default without what a lent head adds to it."""
    return request.reserve_mib if request.reserve_given else min(request.reserve_mib, VRAM_RESERVE_MIB)


def _key(plan: StrataPlan, stack: PolicyStack) -> Any:
    """What decides the time of a plan: not how it was asked for, nor the words around it."""
    asked = replace(plan.request, own="off", borrow=True, decide_at="filled", conversation_budget=False)
    prompt = replace(plan.prompt, why_not_larger="")
    bare = replace(plan, request=asked, prompt=prompt, ledger=Ledger(()), notes=(), warnings=())
    return bare, stack.names, stack.ctx.parameters

"""Decoding in steps from event to event: K/V growth, a decision of adaptive slots, the end (planning notes 4).

Between events nothing changes, so the rounds in between are priced at once: every kind of window by its probability,
at the context in the middle, on which a round's cost depends linearly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from strata_jax.memory.ledger import MIB
from strata_jax.memory.strata.request import ExpertTier, StrataRequest
from strata_jax.policies.adaptive import AdaptiveSlots
from strata_jax.policies.moves import Move, MoveKind
from strata_jax.policies.state import MemoryState
from strata_jax.sim.acceptance import NO_DRAFTS, RoundMix
from strata_jax.sim.decode_cost import RoundFacts, round_cost
from strata_jax.sim.machine import Journal, Machine, SimOptions
from strata_jax.sim.move_times import time_of
from strata_jax.sim.popularity import Residency
from strata_jax.sim.requests import SimRequest


@dataclass(slots=True)
class DecodeTally:
    """What decoding one request took. `weighted` sums are divided by the rounds at the end."""

    first_round_ms: float = 0.0
    decode_ms: float = 0.0
    rounds: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    lookups: float = 0.0
    hits: float = 0.0
    pcie_weighted: float = 0.0
    cpu_weighted: float = 0.0
    free_mib: float = float("inf")
    moves: int = 0
    growth_ms: float = 0.0
    growth: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True)
class AverageRound:
    """The expected round of a mix of windows."""

    ms: float
    pcie_share: float
    cpu_experts_per_layer: float


def round_facts(
    machine: Machine, state: MemoryState, held: Residency, rows: int, context: int, *, drafts: float
) -> RoundFacts:
    """Return what the price of a verify window depends on; `drafts`: tokens that the draft block proposes next."""
    distinct, misses = held.distinct_per_layer(rows)
    return RoundFacts(
        rows=rows,
        context=context,
        hit_rate=held.hit_rate,
        distinct_experts=distinct,
        distinct_misses=misses,
        pcie_frac=machine.pcie_frac,
        file_share=held.share_of_misses(~machine.in_ram) if machine.plan.tier is not ExpertTier.ARENA else 0.0,
        kv_type=machine.plan.request.kv_type,
        kv_streamed=machine.plan.kv_streamed,
        free_bytes=state.free_bytes,
        drafts=drafts,
        draft_vocab=machine.plan.request.draft_vocab,
        tier=machine.plan.tier,
        pinned_share=machine.plan.card.pinned_share,
    )


def average_round(machine: Machine, state: MemoryState, held: Residency, mix: RoundMix, context: int) -> AverageRound:
    """Return the expected round of `mix` at `context` tokens."""
    ms, pcie, cpu = machine.spilled_ms(state), 0.0, 0.0
    for window in mix.windows:
        facts = round_facts(machine, state, held, window.rows, context, drafts=mix.rows - 1)
        cost = round_cost(machine.profile, machine.sizes, facts)
        ms += window.probability * cost.total_ms
        pcie += window.probability * cost.pcie_share
        cpu += window.probability * cost.cpu_experts_per_layer
    return AverageRound(ms, pcie, cpu)


def round_mix(settings: StrataRequest, request: SimRequest, options: SimOptions) -> RoundMix:
    """Return the windows that a request's rounds are made of."""
    drafts = request.drafts and settings.mtp and settings.spec_window > 1
    return options.drafts.rounds(settings.spec_window, options.spec_min_p) if drafts else NO_DRAFTS


class Decoder:
    """Decodes one request's output. `factor` multiplies its times (noise)."""

    def __init__(self, machine: Machine, journal: Journal, request: SimRequest, factor: float) -> None:
        self.machine, self.journal, self.request, self.factor = machine, journal, request, factor
        self.tally = DecodeTally()
        self.mix = round_mix(machine.plan.request, request, machine.options)

    def decode(self, state: MemoryState) -> MemoryState:
        """Decode all output tokens: a first window of one row, then rounds with drafts."""
        position, left = self.request.prompt_tokens - 1, self.request.output_tokens
        if left:
            state = self._prepare(state, position, 1)
            self.tally.first_round_ms = self._rounds(state, position, NO_DRAFTS, 1, 1)
            position, left = position + 1, left - 1
        adapting = True
        while left > 0:
            state = self._prepare(state, position, self.mix.max_rows)
            take = min(left, self._tokens_until_growth(state, position))
            adapting = adapting and self._can_adapt(state)
            if adapting:
                every = self.machine.ctx.parameters.adapt.every_rounds
                take = min(take, max(1, round(every * self.mix.tokens)))
            self.tally.decode_ms += self._rounds(state, position, self.mix, take / self.mix.tokens, take)
            position, left = position + take, left - take
            if adapting:
                state = self._adapt(state, position)
        return state

    def _tokens_until_growth(self, state: MemoryState, position: int) -> int:
        """Tokens from `position` on that need no further cells; the token after them is the first that does."""
        if state.kv_mapped_cells >= self.machine.plan.request.context_cells:
            return self.request.output_tokens
        last = state.kv_mapped_cells - self.mix.max_rows - self.machine.ctx.parameters.round_margin_cells
        return max(1, last - position + 1)

    def _prepare(self, state: MemoryState, position: int, rows: int) -> MemoryState:
        step = self.machine.stack.before_round(state, position, rows)
        if step.moves or step.notes:
            spent = self.journal.carry_out(step, lambda move: self.factor * time_of(self.machine, move))
            self.tally.decode_ms += sum(spent.values())
            self.tally.moves += len(step.moves)
            if MoveKind.MAP_CELLS in spent:
                self.tally.growth_ms += sum(spent.values())
                self.tally.growth += step.moves
            self.journal.memory(step.state, "decode")
        return step.state

    def _rounds(self, state: MemoryState, position: int, mix: RoundMix, rounds: float, tokens: int) -> float:
        """Price `rounds` rounds that give `tokens` tokens from `position` on; return their ms."""
        held, tally = self.machine.residency(state), self.tally
        average = average_round(self.machine, state, held, mix, position + tokens // 2)
        ms = rounds * average.ms * self.factor
        self.journal.now_ms += ms
        look_ups = rounds * mix.rows * self.machine.traffic.look_ups_per_row
        tally.rounds += rounds
        tally.drafted += rounds * (mix.rows - 1)
        tally.accepted += rounds * (mix.tokens - 1)
        tally.lookups += look_ups
        tally.hits += look_ups * held.hit_rate
        tally.pcie_weighted += rounds * average.pcie_share
        tally.cpu_weighted += rounds * average.cpu_experts_per_layer
        tally.free_mib = min(tally.free_mib, max(0, state.free_bytes) / MIB)
        if state.free_bytes <= 0:
            self.journal.warn("0 MiB of device memory are free while decoding")
        self.journal.metric(
            "round", request=self.request.name, position=position, rounds=rounds, window_tokens=mix.rows,
            emitted=tokens, seconds=ms / 1000, lookups=look_ups, hits=look_ups * held.hit_rate,
            pcie_share=average.pcie_share, cpu_experts_per_layer=average.cpu_experts_per_layer,
        )  # fmt: skip
        return ms

    def _can_adapt(self, state: MemoryState) -> bool:
        """Whether an absent expert is expected to be so much hotter than a resident one that it takes its slot."""
        if AdaptiveSlots.name not in self.machine.stack.names:
            return False
        if state.pending:
            return True
        settings, held = self.machine.ctx.parameters.adapt, self.machine.residency(state)
        absent = self._counter_scale() * held.hottest_absent_odds
        return absent >= settings.least_usage and (
            absent - self._counter_scale() * held.coldest_present_odds >= settings.gap
        )

    def _adapt(self, state: MemoryState, position: int) -> MemoryState:
        """One decision of adaptive slots on the expected counters; what was on its way lands. Copies run beside rounds.

        Only lasting differences count here: what slots gain by following a text is in the popularity curve.
        """
        settings = self.machine.ctx.parameters.adapt
        usage = (self.machine.traffic.row_odds * self._counter_scale() / settings.decay).astype(np.float32)
        rounds = (state.rounds // settings.every_rounds + 1) * settings.every_rounds - 1
        counted = replace(state, usage=usage, rounds=rounds)
        step = self.machine.stack.before_round(counted, position, self.mix.max_rows, np.zeros(0, dtype=np.int32))
        self.journal.carry_out(step, lambda move: 0.0)
        self.tally.moves += len(step.moves)
        return step.state

    def _counter_scale(self) -> float:
        """The counter, after many rounds, of an expert that every row asks for: what is added decays at decisions."""
        settings = self.machine.ctx.parameters.adapt
        return self.mix.rows * settings.every_rounds * settings.decay / (1 - settings.decay)

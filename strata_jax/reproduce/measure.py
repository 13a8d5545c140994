"""From a metric's name to its number in a plan or a simulation.

Figures of the start come from the plan, figures of requests from the simulation of those that the row is about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median

from strata_jax.memory.ledger import MIB
from strata_jax.memory.strata.kv_pools import kv_mapped_bytes
from strata_jax.reproduce.asks import Focus
from strata_jax.reproduce.bootstrap import (
    MIN_OUTPUT_TOKENS,
    MIN_PROMPT_MS,
    BandedChange,
    Sample,
    banded_change,
)
from strata_jax.reproduce.outcome import Outcome, Outcomes
from strata_jax.reproduce.plan_figures import GIB, OF_PLAN, OF_UNFIT, NoFigure, plan_of
from strata_jax.reproduce.translate import Case, without_policies
from strata_jax.sim.results import RequestResult

CROSSOVER_BINS = 16  # of equal logarithmic width, over the fresh tokens of an agent loop
CROSSOVER_RANGE_TOKENS = (64, 8_192)


def measure(metric: str, case: Case, outcomes: Outcomes) -> float:
    """Return our figure for a published metric. Raises NoFigure where the scenario gives none."""
    if metric in OF_BOTH_ARMS:
        return OF_BOTH_ARMS[metric](case, outcomes)
    if metric in OF_UNFIT:
        return OF_UNFIT[metric](outcomes.planned(case.scenario))
    if metric in OF_REQUESTS and (case.scenario.ask.name or metric not in OF_PLAN):
        outcome = outcomes.outcome(case.scenario)
        plan_of(outcome)
        return OF_REQUESTS[metric](outcome, chosen(outcome, case.focus), case.focus)
    if metric in OF_STATE and case.scenario.reserve_later_mib is not None:
        return OF_STATE[metric](outcomes.outcome(case.scenario))
    if metric in OF_PLAN:
        return OF_PLAN[metric](plan_of(outcomes.planned(case.scenario)))
    raise NoFigure(f"nothing here is called {metric}")


def chosen(outcome: Outcome, focus: Focus) -> list[RequestResult]:
    """Return the results of the requests that a row is about."""
    if outcome.run is None:
        raise NoFigure("the source does not say what was asked")
    results = list(outcome.run.requests)
    if focus.requests is not None:
        results = [results[index] for index in focus.requests]
    if focus.fresh is not None:
        results = [r for r in results if focus.fresh[0] <= r.fresh_tokens <= focus.fresh[1]]
    if focus.conversation_tokens is not None:
        tokens = focus.conversation_tokens
        name = next((r.conversation for r in results if r.prompt_tokens == tokens), None)
        results = [r for r in results if r.conversation == name][-1:]
    if not results:
        raise NoFigure("no simulated request is of this kind")
    return results


# ---- the memory after a call that asked for memory back


def _state_slots(outcome: Outcome) -> float:
    if outcome.run is None:
        raise NoFigure("nothing was simulated")
    return outcome.run.state.slots.num_present


def _state_cache_bytes(outcome: Outcome) -> float:
    if outcome.run is None:
        raise NoFigure("nothing was simulated")
    slots = outcome.run.state.slots
    return float(slots.offset_bytes[slots.num_present])


def _state_free_mib(outcome: Outcome) -> float:
    if outcome.run is None:
        raise NoFigure("nothing was simulated")
    return outcome.run.state.free_bytes / MIB


OF_STATE: dict[str, Callable[[Outcome], float]] = {
    "expert_cache_slots": _state_slots,
    "expert_cache_mib": lambda o: _state_cache_bytes(o) / MIB,
    "expert_cache_gib": lambda o: _state_cache_bytes(o) / GIB,
    "vram_free_after_call_mib": _state_free_mib,
    "vram_free_min_mib": lambda o: min((r.free_mib for r in chosen(o, Focus())), default=0.0),
    "vram_used_peak_mib": lambda o: plan_of(o).card.vram_bytes / MIB - _state_free_mib(o),
}


# ---- requests

Chosen = Sequence[RequestResult]


def _middle(values: Sequence[float | None], what: str) -> float:
    known = [value for value in values if value is not None]
    if not known:
        raise NoFigure(f"no simulated request has {what}")
    return median(known)


def _of(name: str, scale: float = 1.0) -> Callable[[Outcome, Chosen, Focus], float]:
    """The median of a field or rate over the chosen requests."""
    return lambda outcome, results, focus: _middle([getattr(r, name) for r in results], name) * scale


def _total(name: str) -> Callable[[Outcome, Chosen, Focus], float]:
    return lambda outcome, results, focus: float(sum(getattr(r, name) for r in results))


def prompt_rates(results: Chosen) -> list[RequestResult]:
    """Return the requests whose prompt rate counts: of many, those that read for 5 s or more, as the source does."""
    return [r for r in results if r.prompt_ms >= MIN_PROMPT_MS] if len(results) > 2 else list(results)


def decode_rates(results: Chosen) -> list[RequestResult]:
    """Return the requests whose decode rate counts: of many, those with 32 output tokens or more."""
    return [r for r in results if r.output_tokens >= MIN_OUTPUT_TOKENS] if len(results) > 2 else list(results)


def _prefill(outcome: Outcome, results: Chosen, focus: Focus) -> float:
    if not focus.stated:
        raise NoFigure("the length of the prompt is not stated")
    return _middle([r.prompt_tok_s for r in prompt_rates(results)], "a prompt rate")


def _decode(outcome: Outcome, results: Chosen, focus: Focus) -> float:
    return _middle([r.decode_tok_s for r in decode_rates(results)], "a decode rate")


def _mapped_cells(outcome: Outcome, results: Chosen, focus: Focus) -> float:
    """Cells mapped for the request; before it generates, unless the row is about decoding."""
    request = results[-1]
    found = [m.cells for m in outcome.mappings if m.request == request.request and (focus.decoding or not m.decoding)]
    return found[-1] if found else request.kv_mapped_cells


def _mapped_before(outcome: Outcome, results: Chosen, focus: Focus) -> float:
    every = outcome.run.requests if outcome.run else ()
    place = [r.request for r in every].index(results[0].request)
    return every[place - 1].kv_mapped_cells if place else plan_of(outcome).kv_mapped_cells


def _returned(outcome: Outcome, results: Chosen, focus: Focus) -> float:
    """Slots that come back: at the request itself, or after a conversation until the K/V grows again."""
    if focus.conversation_tokens is None:
        return float(sum(r.returned_slots for r in results))
    every = outcome.run.requests if outcome.run else ()
    total = 0
    for after in every[[r.request for r in every].index(results[-1].request) + 1 :]:
        if after.given_slots:
            break
        total += after.returned_slots
    return float(total)


def _kv_vram(outcome: Outcome, results: Chosen, focus: Focus) -> float:
    request, card = outcome.scenario.request, plan_of(outcome).card
    cells = int(_mapped_cells(outcome, results, focus))
    return kv_mapped_bytes(outcome.sizes, request.kv_type, cells, card.vmm_chunk_bytes, with_drafter=request.mtp) / GIB


def _resident_experts(outcome: Outcome, results: Chosen, focus: Focus) -> float:
    every = outcome.run.requests if outcome.run else ()
    return plan_of(outcome).slots - sum(r.given_slots - r.returned_slots for r in every)


def _hit_rate(outcome: Outcome, results: Chosen, focus: Focus) -> float:
    return 100 * _middle([r.hit_rate for r in results], "a hit rate")


OF_REQUESTS: dict[str, Callable[[Outcome, Chosen, Focus], float]] = {
    "prefill_tok_s": _prefill,
    "decode_tok_s": _decode,
    "round_ms": _of("round_ms"),
    "prompt_ms": _of("prompt_ms"),
    "prompt_s": _of("prompt_ms", 1e-3),
    "ttft_s": _of("ttft_ms", 1e-3),
    "total_s": lambda o, rs, f: _middle([r.ttft_ms + r.decode_ms for r in rs], "a total time") * 1e-3,
    "hit_rate_pct": _hit_rate,
    "pcie_share_pct": lambda o, rs, f: 100 * fmean(r.pcie_share for r in rs),
    "cpu_experts_per_layer": lambda o, rs, f: fmean(r.cpu_experts_per_layer for r in rs),
    "copy_wait_ms": _of("copy_wait_ms"),
    "head_load_ms": _of("head_load_ms"),
    "relayout_ms": _of("relayout_ms"),
    "restore_ms": _of("restore_ms"),
    "reused_tokens": _of("reused_tokens"),
    "chunks_count": _of("chunks"),
    "file_blob_reads": _of("file_blobs"),
    "given_slots": _total("given_slots"),
    "moved_experts": _total("moved_experts"),
    "returned_slots": _returned,
    "refilled_slots": _total("returned_slots"),
    "resident_experts": _resident_experts,
    "kv_mapped_cells": _mapped_cells,
    "kv_mapped_before_cells": _mapped_before,
    "kv_vram_gib": _kv_vram,
}


# ---- two arms

LOOP_RATES: dict[str, tuple[Callable[[Chosen], list[RequestResult]], str]] = {
    "prefill_tok_s": (prompt_rates, "prompt_tok_s"),
    "decode_tok_s": (decode_rates, "decode_tok_s"),
}


def arms(case: Case, outcomes: Outcomes) -> tuple[Outcome, Outcome]:
    """Return the outcomes without and with the row's policies."""
    return outcomes.outcome(without_policies(case.scenario)), outcomes.outcome(case.scenario)


def loop_change(metric: str, case: Case, outcomes: Outcomes, draws: int = 200) -> BandedChange | None:
    """Return how an agent loop's rate changes from the arm without policies, by medians within bands of context."""
    rates, name = LOOP_RATES[metric]
    every = Focus()
    samples = [
        [Sample(r.prompt_tokens, getattr(r, name)) for r in rates(chosen(outcome, every)) if getattr(r, name)]
        for outcome in arms(case, outcomes)
    ]
    return banded_change(samples[0], samples[1], draws=draws)


def _change(metric: str) -> Callable[[Case, Outcomes], float]:
    """The change of a metric from the arm without policies, in per cent."""

    def of(case: Case, outcomes: Outcomes) -> float:
        if case.scenario.ask.name == "agent_loop" and metric in LOOP_RATES:
            banded = loop_change(metric, case, outcomes)
            if banded is None:
                raise NoFigure("no band of context has enough requests of both arms")
            return 100 * banded.change
        before = measure(metric, replace(case, scenario=without_policies(case.scenario)), outcomes)
        return 100 * (measure(metric, case, outcomes) / before - 1)

    return of


def _added_prompt_s(case: Case, outcomes: Outcomes) -> float:
    before = measure("prompt_s", replace(case, scenario=without_policies(case.scenario)), outcomes)
    return measure("prompt_s", case, outcomes) - before


def _crossover(case: Case, outcomes: Outcomes) -> float:
    """Fresh tokens from which the row's policies read faster, by medians within logarithmic bins of an agent loop."""
    loop = replace(case.scenario, ask=replace(case.scenario.ask, name="agent_loop"))
    before, after = arms(replace(case, scenario=loop), outcomes)
    low, high = CROSSOVER_RANGE_TOKENS
    edges = [low * (high / low) ** (i / CROSSOVER_BINS) for i in range(CROSSOVER_BINS + 1)]
    for first, last in pairwise(edges):
        inside = Focus(fresh=(int(first) + 1, int(last)))
        try:
            times = [_middle([r.prompt_ms for r in chosen(o, inside)], "a prompt time") for o in (before, after)]
        except NoFigure:
            continue
        if times[1] < times[0]:
            return first
    raise NoFigure("the policy is nowhere faster")


def _free_gain_gib(case: Case, outcomes: Outcomes) -> float:
    with_policy = plan_of(outcomes.planned(case.scenario))
    without = plan_of(outcomes.planned(without_policies(case.scenario)))
    return (with_policy.free_for_cache_bytes - without.free_for_cache_bytes) / GIB


OF_BOTH_ARMS: dict[str, Callable[[Case, Outcomes], float]] = {
    "prefill_change_pct": _change("prefill_tok_s"),
    "decode_change_pct": _change("decode_tok_s"),
    "prompt_time_change_pct": _change("prompt_ms"),
    "added_prompt_s": _added_prompt_s,
    "crossover_fresh_tokens": _crossover,
    "vram_free_gain_gib": _free_gain_gib,
}

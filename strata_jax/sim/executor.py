"""The executor `sim`: requests run through the real stages, priced with a card's profile instead of carried out.

A request finds what can be reused, switches conversations (parks, trims, grows, restores), reads its segments, refills,
loads the head and decodes. Policies decide on memory exactly as on a device; here their moves only take time.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata_jax.errors import ConfigError
from strata_jax.memory.ledger import MIB
from strata_jax.memory.strata.result import StrataPlan
from strata_jax.memory.strata.sizes import PackSizes
from strata_jax.policies.conversation_budget import match_prefix
from strata_jax.policies.moves import Move, MoveKind
from strata_jax.policies.prompt_segments import segments
from strata_jax.policies.stack import PolicyStack
from strata_jax.policies.state import MemoryState, RequestFacts, Step
from strata_jax.sim.decoding import Decoder, DecodeTally
from strata_jax.sim.machine import LOW_FREE_MIB, Journal, Machine, SimOptions, Sink, noise_factors
from strata_jax.sim.move_times import time_of
from strata_jax.sim.profile import Profile
from strata_jax.sim.reading import PromptReader, ReadTally
from strata_jax.sim.requests import SimRequest
from strata_jax.sim.results import RequestResult, SimRun

__all__ = ["SimOptions", "simulate"]

CONTEXT_SLACK = 8  # upstream refuses prompt + output + 8 > context (planning notes 3.2)


def simulate(
    plan: StrataPlan,
    sizes: PackSizes,
    profile: Profile,
    stack: PolicyStack,
    requests: Sequence[SimRequest],
    *,
    options: SimOptions | None = None,
    sink: Sink | None = None,
) -> SimRun:
    """Run requests in order on one machine that has just started, and return what they took.

    sink: where events and metrics go, under the names of real runs, marked `executor: sim`; None: nowhere.
    Raises ConfigError for a request beyond the context, DoesNotFit when a policy cannot get the memory it must.
    """
    options = options or SimOptions()
    machine = Machine.build(plan, sizes, profile, stack, options)
    journal = Journal(machine, sink)
    for text in plan.warnings:
        journal.warn(text)
    state = _start(machine, journal)
    results = []
    for request, factors in zip(requests, noise_factors(options, len(requests)), strict=True):
        _check_length(request, plan)
        state, result = _serve(machine, journal, state, request, factors)
        results.append(result)
        if sink is not None:
            journal.metric("request", **result.to_json())
    return SimRun(profile.name, profile.calibrated, tuple(results), state, journal.now_ms, tuple(journal.warnings))


def _start(machine: Machine, journal: Journal) -> MemoryState:
    """Fill the cache and make the engine ready; the clock starts afterwards."""
    step = machine.stack.on_start(machine.stack.initial_state())
    journal.loaded(step.state)
    journal.carry_out(step, lambda move: 0.0)
    journal.memory(step.state, "start")
    wished = machine.options.vram_change_bytes
    if wished is None:
        return step.state
    step = machine.stack.on_vram_change(step.state, wished)
    journal.carry_out(step, lambda move: time_of(machine, move))
    journal.memory(step.state, "start")
    return step.state


def _serve(
    machine: Machine, journal: Journal, state: MemoryState, request: SimRequest, factors: tuple[float, float]
) -> tuple[MemoryState, RequestResult]:
    """Answer one request: switch, read, decode."""
    prompt_factor, decode_factor = factors
    start_ms, free_mib = journal.now_ms, max(0, state.free_bytes) / MIB
    if free_mib < LOW_FREE_MIB:
        text = f"{free_mib:,.0f} MiB of device memory are free when a request starts"
        journal.warn(text, f", less than {LOW_FREE_MIB:,} MiB: {request.name}")
    match = match_prefix(state, request.conversation, request.common_tokens, request.prompt_tokens)
    # the last prompt token is the first decode window
    parts = segments(request.prompt_tokens - 1, request.turns, match.tokens, machine.options.checkpoints)
    facts = RequestFacts(
        name=request.name,
        conversation=request.conversation,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        reused_tokens=match.tokens,
        fresh_tokens=request.prompt_tokens - match.tokens,
        switches=state.live is not None and state.live.name != request.conversation,
        boundaries=tuple(position for part in parts for position in part.checkpoints),
    )
    entry = machine.stack.on_request(state, facts)
    spent = journal.carry_out(entry, lambda move: prompt_factor * time_of(machine, move))
    if entry.moves:
        journal.memory(entry.state, "park" if facts.switches else "prefill")
    reader = PromptReader(machine, journal, request, facts, prompt_factor)
    state = reader.read(entry.state, parts)
    journal.memory(state, "decode")
    decoder = Decoder(machine, journal, request, decode_factor)
    state = decoder.decode(state)
    done = machine.stack.after_request(state, facts, request.prompt_tokens + max(0, request.output_tokens - 1))
    journal.carry_out(done, lambda move: 0.0)  # states are copied beside the computation
    result = _result(request, facts, match.source, start_ms, free_mib, entry, spent, done, reader.tally, decoder.tally)
    return done.state, result


def _result(
    request: SimRequest,
    facts: RequestFacts,
    reuse: str,
    start_ms: float,
    free_mib: float,
    entry: Step,
    spent: dict[MoveKind, float],
    done: Step,
    read: ReadTally,
    decode: DecodeTally,
) -> RequestResult:
    park_ms, restore_ms = spent.get(MoveKind.PARK, 0.0), spent.get(MoveKind.RESTORE, 0.0)
    growth_ms = sum(spent.values()) - park_ms - restore_ms
    prompt_ms = growth_ms + read.prompt_ms
    moves = (*entry.moves, *decode.growth)
    return RequestResult(
        request=request.name,
        label=request.label,
        conversation=request.conversation,
        reuse=reuse,
        start_ms=start_ms,
        prompt_tokens=request.prompt_tokens,
        fresh_tokens=facts.fresh_tokens,
        reused_tokens=facts.reused_tokens,
        output_tokens=request.output_tokens,
        finish_reason="length",
        ttft_ms=park_ms + restore_ms + prompt_ms + decode.first_round_ms,
        prompt_ms=prompt_ms,
        first_round_ms=decode.first_round_ms,
        decode_ms=decode.decode_ms,
        park_ms=park_ms,
        restore_ms=restore_ms,
        refill_ms=read.refill_ms,
        relayout_ms=read.relayout_ms,
        head_load_ms=read.head_load_ms,
        growth_ms=growth_ms + decode.growth_ms,
        copy_wait_ms=read.copy_wait_ms,
        chunks=read.chunks,
        chunk_tokens=read.chunk_tokens,
        rounds=decode.rounds,
        draft_tokens=decode.drafted,
        draft_accepted_tokens=decode.accepted,
        lookups=decode.lookups,
        hits=decode.hits,
        prompt_lookups=read.lookups,
        prompt_hits=read.hits,
        pcie_share=decode.pcie_weighted / decode.rounds if decode.rounds else 0.0,
        cpu_experts_per_layer=decode.cpu_weighted / decode.rounds if decode.rounds else 0.0,
        growth_cells=sum(move.count for move in moves if move.kind is MoveKind.MAP_CELLS),
        kv_mapped_cells=done.state.kv_mapped_cells,
        given_slots=_detail(moves, MoveKind.MAP_CELLS, "given_slots"),
        returned_slots=_detail(moves, MoveKind.TRIM_CELLS, "returned_slots"),
        moved_experts=sum(move.count for move in moves if move.kind is MoveKind.MOVE_EXPERT),
        file_blobs=read.file_blobs,
        free_mib=free_mib,
        free_decode_mib=decode.free_mib if decode.rounds else max(0, done.state.free_bytes) / MIB,
        moves=len(entry.moves) + read.moves + decode.moves + len(done.moves),
    )


def _detail(moves: Sequence[Move], kind: MoveKind, name: str) -> int:
    return sum(value for move in moves if move.kind is kind for key, value in move.detail if key == name)


def _check_length(request: SimRequest, plan: StrataPlan) -> None:
    need = request.prompt_tokens + request.output_tokens + CONTEXT_SLACK
    if need > plan.request.context_cells:
        raise ConfigError(
            f"request {request.name}: {request.prompt_tokens:,} prompt and {request.output_tokens:,} output tokens need"
            f" {need:,} cells; model.max_context={plan.request.context_cells:,}. Set it to {need:,} or more."
        )

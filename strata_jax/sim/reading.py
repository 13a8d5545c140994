"""Reading a prompt: segments, short reads through decode windows, chunks, checkpoints, and the refill afterwards.

Planning notes 5.1 to 5.3. The cost of a chunk hardly bends with its place, so of a run of up to eight equal chunks
the first and the last are priced and the others lie between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from strata_jax.memory.strata.kv_pools import kv_token_bytes
from strata_jax.memory.strata.request import ExpertTier
from strata_jax.policies.moves import Move, MoveKind
from strata_jax.policies.prompt_segments import Segment
from strata_jax.policies.state import MemoryState, RequestFacts, Step
from strata_jax.sim.decode_cost import round_cost
from strata_jax.sim.decoding import round_facts
from strata_jax.sim.machine import Journal, Machine
from strata_jax.sim.move_times import time_of
from strata_jax.sim.popularity import Residency
from strata_jax.sim.prefill_cost import ChunkCost, ChunkFacts, chunk_cost, segment_ms
from strata_jax.sim.requests import SimRequest

SUFFIX_ROWS = 2  # prompt look-up widens the verify window by two rows (planning notes 4.2)
MAX_ROWS = 8
CHUNKS_PRICED_TOGETHER = 8


@dataclass(slots=True)
class ReadTally:
    """What reading one prompt took: times in ms, look-ups of its chunks and windows, experts read from files."""

    prompt_ms: float = 0.0
    copy_wait_ms: float = 0.0
    refill_ms: float = 0.0
    relayout_ms: float = 0.0
    head_load_ms: float = 0.0
    chunks: int = 0
    chunk_tokens: int = 0
    lookups: float = 0.0
    hits: float = 0.0
    file_blobs: int = 0
    moves: int = 0


class PromptReader:
    """Reads one prompt. `factor` multiplies all its times (noise)."""

    def __init__(
        self, machine: Machine, journal: Journal, request: SimRequest, facts: RequestFacts, factor: float
    ) -> None:
        self.machine, self.journal, self.request, self.facts, self.factor = machine, journal, request, facts, factor
        self.tally = ReadTally()
        self._read_from_files = np.zeros(machine.traffic.num_ranks, dtype=np.bool_)

    def read(self, state: MemoryState, parts: list[Segment]) -> MemoryState:
        """Read the segments and return the memory, ready for decode windows."""
        for segment in parts:
            step = self.machine.stack.before_read(state, self.facts, segment.tokens)
            self._carry_out(state, step)
            state = step.state
            if self.machine.stack.reads_by_windows(self.facts, segment.tokens):
                self._windows(state, segment)
            else:
                self.journal.memory(state, "prefill")
                self._chunks(state, segment)
        step = self.machine.stack.after_read(state, self.facts)
        self._carry_out(state, step)
        return step.state

    def _chunks(self, state: MemoryState, segment: Segment) -> None:
        """Read a segment in chunks; the last one may be shorter."""
        self._spend(segment_ms(self.machine.profile))
        chunk = self.machine.ctx.read_tokens(state, segment.tokens)
        held = self.machine.residency(state)
        full, rest = divmod(segment.tokens, chunk)
        self._spend((full + bool(rest)) * self.machine.spilled_ms(state))
        start = segment.start
        while full:
            # the first chunk may read files that later ones find in the page cache
            count = 1 if start == segment.start else min(full, CHUNKS_PRICED_TOGETHER)
            self._equal_chunks(held, start, chunk, count)
            start += count * chunk
            full -= count
        if rest:
            self._equal_chunks(held, start, rest, 1)

    def _equal_chunks(self, held: Residency, start: int, tokens: int, count: int) -> None:
        """Price `count` chunks of `tokens` tokens each from `start` on."""
        first = self._price(held, start, tokens)
        last = first if count == 1 else self._price(held, start + (count - 1) * tokens, tokens)
        look_ups = tokens * self.machine.traffic.look_ups_per_row
        for index, cost in enumerate(_between(first, last, count)):
            self._spend(cost.total_ms)
            self.tally.copy_wait_ms += cost.copy_wait_ms * self.factor
            self.journal.metric(
                "chunk", request=self.request.name, start=start + index * tokens, num_tokens=tokens,
                padded_tokens=tokens, seconds=cost.total_ms * self.factor / 1000, lookups=look_ups,
                hits=round(look_ups * held.hit_rate), copy_ms=cost.copy_ms * self.factor,
                copy_wait_ms=cost.copy_wait_ms * self.factor,
            )  # fmt: skip
        self.tally.chunks += count
        self.tally.chunk_tokens = max(self.tally.chunk_tokens, tokens)
        self._count(held, tokens * count)

    def _price(self, held: Residency, start: int, tokens: int) -> ChunkCost:
        machine, plan = self.machine, self.machine.plan
        all_experts = tokens >= plan.request.stream_min_tokens
        streamed = held.missing_bytes if all_experts else held.touched_missing_bytes(tokens)
        cell_bytes = kv_token_bytes(machine.sizes, plan.request.kv_type, with_drafter=False)
        facts = ChunkFacts(
            tokens=tokens,
            position=start,
            streamed_bytes=streamed,
            resident_share=held.resident_share,
            streamed_all=all_experts,
            ring_slots=plan.prompt.ring_slots if all_experts else 0,
            kv_staged_bytes=(start + tokens) * cell_bytes if plan.kv_streamed else 0,
            file_bytes=self._from_files(~held.held, streamed / max(1.0, held.missing_bytes)),
            pinned_share=plan.card.pinned_share,
        )
        return chunk_cost(machine.profile, machine.sizes, plan.request, facts)

    def _from_files(self, wanted: np.ndarray, share: float) -> int:
        """Return the bytes of `share` of the wanted experts that are in files only; each is read once a prompt.

        Afterwards the page cache has it; the published runs count each of them once a prompt too (own-ab-borrow).
        """
        if self.machine.plan.tier is ExpertTier.ARENA:
            return 0
        new = np.flatnonzero(wanted & ~self.machine.in_ram & ~self._read_from_files)
        ranks = new[: round(share * len(new))]  # a chunk asks for hot experts first
        self._read_from_files[ranks] = True
        self.tally.file_blobs += len(ranks)
        return int(self.machine.sizes.rank_bytes[ranks].sum())

    def _windows(self, state: MemoryState, segment: Segment) -> None:
        """Read a segment with verify windows, without drafts (planning notes 5.1: short reads)."""
        machine, request = self.machine, self.machine.plan.request
        rows = min(MAX_ROWS, request.spec_window + (SUFFIX_ROWS if request.suffix_draft else 0))
        held = machine.residency(state)
        full, rest = divmod(segment.tokens, rows)
        for count, size in ((full, rows), (1 if rest else 0, rest)):
            if count:
                facts = round_facts(machine, state, held, size, segment.start, drafts=0)
                self._spend(count * round_cost(machine.profile, machine.sizes, facts).total_ms)
        self._count(held, segment.tokens)

    def _carry_out(self, before: MemoryState, step: Step) -> None:
        """Carry out what a read needs; a refill reads what has no copy in RAM from files."""

        def time(move: Move) -> float:
            file_bytes = 0
            if move.kind is MoveKind.REFILL:
                ranks = before.slots.occupant[move.first : move.last]
                file_bytes = self._from_files(self.machine.traffic.mask(ranks), 1.0)
            return self.factor * time_of(self.machine, move, file_bytes)

        spent = self.journal.carry_out(step, time)
        self.tally.prompt_ms += sum(spent.values())
        self.tally.refill_ms += spent.get(MoveKind.REFILL, 0.0)
        self.tally.head_load_ms += spent.get(MoveKind.LOAD_HEAD, 0.0)
        self.tally.relayout_ms += spent.get(MoveKind.UNLOAD_HEAD, 0.0)
        self.tally.moves += len(step.moves)

    def _spend(self, ms: float) -> None:
        self.journal.now_ms += ms * self.factor
        self.tally.prompt_ms += ms * self.factor

    def _count(self, held: Residency, tokens: int) -> None:
        look_ups = tokens * self.machine.traffic.look_ups_per_row
        self.tally.lookups += look_ups
        self.tally.hits += look_ups * held.hit_rate


def _between(first: ChunkCost, last: ChunkCost, count: int) -> Iterator[ChunkCost]:
    """Yield `count` costs from the first to the last in equal steps."""
    for index in range(count):
        part = index / (count - 1) if count > 1 else 0.0
        yield ChunkCost(
            total_ms=first.total_ms + part * (last.total_ms - first.total_ms),
            copy_ms=first.copy_ms + part * (last.copy_ms - first.copy_ms),
            compute_ms=first.compute_ms + part * (last.compute_ms - first.compute_ms),
            copy_wait_ms=first.copy_wait_ms + part * (last.copy_wait_ms - first.copy_wait_ms),
        )

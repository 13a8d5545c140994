"""Policies at work: a request runs on the engine as the policy stack says, every move carried out as it comes.

The hooks are called in the order in which the simulator calls them too; ``carry_out.py`` does what they decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from strata_jax.engine.carry_out import Carrier, Quiet, Sink
from strata_jax.engine.chunk import compile_programs
from strata_jax.engine.conversations import ConversationSettings, ConversationStore
from strata_jax.engine.engine import Engine
from strata_jax.engine.moves import Mover
from strata_jax.engine.session import ChunkRecord, RoundRecord, Session
from strata_jax.engine.snapshots import checkpoint_bytes, image_bytes
from strata_jax.errors import DoesNotFit
from strata_jax.hardware import available_ram_bytes
from strata_jax.memory.expert_ranking import ExpertRanking
from strata_jax.memory.ledger import Owner
from strata_jax.policies.adaptive import AdaptiveSlots
from strata_jax.policies.conversation_budget import recheck
from strata_jax.policies.device import DeviceSettings, bytes_beyond_plan, device_stack, first_state
from strata_jax.policies.learned import learned_ranking
from strata_jax.policies.moves import MoveKind
from strata_jax.policies.prompt_segments import CheckpointRule, Segment, segments
from strata_jax.policies.stack import PolicyStack
from strata_jax.policies.state import Conversation, MemoryState, RequestFacts

NO_LIMIT = 2**62
Fault = Callable[[MoveKind, str], None]


@dataclass(eq=False)
class Reading:
    """A request whose prompt has been read.

    Attributes:
        first_logits: f32[1, V] after the prompt. source: where the reused tokens came from.
    """

    facts: RequestFacts
    session: Session
    source: str
    first_logits: np.ndarray


@dataclass
class Runtime:
    """One engine with its policies.

    Attributes:
        carrier: the memory as policies see it, and what carries their moves out.
        available_ram: RAM that can be had now, in bytes; None: unknown, and nothing is parked.
        min_p: of the decode programs that are compiled when segments of the cache go; None: each at its first call.
        uses: i64[L', X], how often decode windows used each expert; None: not counted.
    """

    engine: Engine
    stack: PolicyStack
    carrier: Carrier
    rule: CheckpointRule | None
    available_ram: Callable[[], int | None]
    min_p: float | None = None
    uses: np.ndarray | None = None
    _used: np.ndarray | None = field(default=None, init=False)

    @classmethod
    def start(
        cls,
        engine: Engine,
        settings: DeviceSettings | None = None,
        *,
        rule: CheckpointRule | None = None,
        sink: Sink | None = None,
        available_ram: Callable[[], int | None] = available_ram_bytes,
        check: bool = False,
        min_p: float | None = None,
        count_uses: bool = False,
        fault: Fault | None = None,
    ) -> Runtime:
        """Put the policies of the engine's plan to work.

        Args:
            rule: where on the way through a prompt states are stored.
            count_uses: count how often experts are used, for `learned`.
            fault: is called with a move and the stage that it is in; what it raises fails the move. For tests.
        """
        stack = device_stack(
            engine.geometry, engine.plan, settings or DeviceSettings(),
            image_bytes=lambda tokens: image_bytes(engine, tokens), checkpoint_bytes=checkpoint_bytes(engine),
        )  # fmt: skip
        checkpoints = engine.plan.request.moving.checkpoints
        # the policies admit and evict: the store carries out
        limits = ConversationSettings(NO_LIMIT, NO_LIMIT, 0, checkpoints)
        mover, store = Mover(engine, check=check), ConversationStore(engine, limits, lambda: NO_LIMIT)
        state = first_state(stack, engine.plan, available_ram())
        carrier = Carrier(engine, stack, state, mover, store, sink or Quiet(), check)
        made = cls(engine, stack, carrier, (rule or CheckpointRule()) if checkpoints else None, available_ram, min_p)
        if count_uses:
            made.uses = np.zeros((engine.plan.num_blocks, engine.plan.num_experts), np.int64)
        if fault is not None:
            mover.fault = store.fault = fault
        carrier.memory("start")
        carrier.carry_out(stack.on_start(carrier.state), "start")
        return made

    @property
    def state(self) -> MemoryState:
        """The memory as policies see it."""
        return self.carrier.state

    @property
    def mover(self) -> Mover:
        return self.carrier.mover

    @property
    def store(self) -> ConversationStore:
        return self.carrier.store

    def owners(self) -> dict[Owner, int]:
        """The bytes of every owner of device memory now, as the policies' ledger has them."""
        return self.carrier.owners()

    def verify(self) -> dict[str, int]:
        """Compare state, tables and bytes; see `check_agreement`."""
        self.carrier.catch_up()
        return self.carrier.verify()

    # --- memory that other programs want

    def free_bytes(self) -> int:
        """Device memory that other programs find free: what the plan leaves, and segments that were given back."""
        return bytes_beyond_plan(self.engine.plan) + self.stack.ctx.spendable_bytes(self.state)

    def vram_change(self, reserve_bytes: int) -> None:
        """Let other programs find ``reserve_bytes`` free, between requests; see `VramElastic`.

        Programs for the segments that are left are compiled when the fewest are there.

        Raises:
            DoesNotFit: the allocator does not have the bytes of segments that are to come back; they stay away.
        """
        self.engine.check_running()
        self.carrier.catch_up()
        before = self.state.segments_given
        step = self.stack.on_vram_change(self.state, max(0, reserve_bytes - bytes_beyond_plan(self.engine.plan)))
        after = step.state.segments_given
        if after < before:
            self._compile(after)
        self.carrier.carry_out(step, "start")
        if after > before:
            self._compile(after)

    def _compile(self, segments_given: int) -> None:
        if self.min_p is None:
            return
        engine, copy = self.engine, self.mover.head_copy
        if engine.weights.head is None and copy is not None:
            shape: Any = jax.ShapeDtypeStruct(copy.data.shape, copy.data.dtype)
            engine = replace(engine, weights=replace(engine.weights, head=replace(copy, data=shape)))
        compile_programs(engine, engine.plan.loans(segments_given), self.min_p, segments_given)

    # --- a request

    def read(
        self,
        prompt: Sequence[int],
        *,
        name: str = "request",
        conversation: str | None = None,
        turns: Sequence[int] = (),
        output_tokens: int = 0,
        on_chunk: Callable[[ChunkRecord], None] = lambda record: None,
    ) -> Reading:
        """Make a request's conversation live and read what of its prompt is new.

        Args:
            conversation: whose state it continues; None: of the one whose tokens it shares.
            turns: positions of the prompt where turns start.

        Raises:
            ConfigError: no tokens, or ids outside the vocabulary.
            DoesNotFit: the prompt is longer than the context, or a policy cannot get the memory that it must.
        """
        engine, store, carrier = self.engine, self.store, self.carrier
        engine.check_running()
        carrier.catch_up()
        engine.geometry.check_token_ids(prompt)
        if len(prompt) > engine.plan.context_cells:
            raise DoesNotFit(
                f"a prompt of {len(prompt):,} tokens does not fit into {engine.plan.context_cells:,} cells; set"
                f" model.max_context={len(prompt)} or more"
            )
        self._read_telemetry()
        carrier.match = match = store.match(prompt)
        carrier.conversation = who = store.name_for(prompt, match, conversation)
        live = self.state.live
        facts = RequestFacts(
            name=name, conversation=who, prompt_tokens=len(prompt), output_tokens=output_tokens,
            reused_tokens=match.tokens, fresh_tokens=len(prompt) - match.tokens,
            switches=live is not None and live.name != who,
        )  # fmt: skip
        self._used = None
        if self.state.reading:  # an earlier prompt has failed, and giving back what it held too
            self._give_back(facts)
        session = self._enter(facts)
        session.on_chunk = on_chunk
        session.count_uses = self.uses is not None or AdaptiveSlots.name in self.stack.names
        parts = segments(len(prompt), turns, match.tokens, self.rule)
        try:
            for segment in parts:
                self._read_segment(session, prompt, facts, segment)
            carrier.carry_out(self.stack.after_read(self.state, facts), "decode")
        except BaseException:
            self._give_back(facts)
            raise
        return Reading(facts, session, match.source, session.last_logits())

    def decode(self, reading: Reading, **how: Any) -> Iterator[RoundRecord]:
        """Generate tokens after a prompt: `Session.decode` with its arguments, memory moving between the rounds."""
        return self._rounds(reading.session, reading.session.decode(reading.first_logits, **how))

    def force(self, reading: Reading, tokens: Sequence[int]) -> Iterator[tuple[RoundRecord, np.ndarray]]:
        """Continue with given tokens: `Session.force`, memory moving between the rounds."""
        return self._rounds(reading.session, reading.session.force(tokens))

    def finish(self, reading: Reading) -> None:
        """Note that a request has ended."""
        step = self.stack.after_request(self.state, reading.facts, len(reading.session.tokens))
        self.carrier.carry_out(step, "decode")
        self._read_telemetry()
        self.carrier.memory("start")

    def learned(self) -> ExpertRanking | None:
        """Return the experts as this run has ranked them; None: no use was counted."""
        return learned_ranking(self.engine.plan, self.state, self.uses)

    # --- parts of a request

    def _enter(self, facts: RequestFacts) -> Session:
        """Park, trim, grow and restore as the policies say; returns the session at the end of the reused tokens."""
        carrier, store = self.carrier, self.store
        step = self.stack.on_request(self.state, facts)
        carrier.carry_out(step, "park" if facts.switches else "prefill")
        kinds = {move.kind for move in step.moves}
        if MoveKind.RESTORE not in kinds:
            store.resume(carrier.match, facts.conversation)
        if MoveKind.PARK in kinds:
            self._read_telemetry()
            carrier.carry_out(recheck(self.stack.ctx, self.state), "park")
        live = store.live
        if live is None:
            raise RuntimeError("no conversation is live")
        return live.session

    def _read_segment(self, session: Session, prompt: Sequence[int], facts: RequestFacts, segment: Segment) -> None:
        self.carrier.carry_out(self.stack.before_read(self.state, facts, segment.tokens), "prefill")
        by_windows = self.stack.reads_by_windows(facts, segment.tokens)
        for first, last in segment.parts():
            if by_windows:
                session.read_windows(prompt[first:last])
            else:
                for _ in session.chunks(prompt[first:last]):
                    pass
            if last in segment.checkpoints:
                self.store.store_checkpoint()

    def _rounds(self, session: Session, steps: Iterator[Any]) -> Iterator[Any]:
        window = self.engine.plan.spec_window if self.engine.plan.with_draft else 1
        while True:
            # a window and the drafts that follow it
            step = self.stack.before_round(self.state, len(session.tokens), 2 * window, self._used)
            if step.moves and self.carrier.catch_up():  # decided on residents of some rounds ago
                step = self.stack.before_round(self.state, len(session.tokens), 2 * window, self._used)
            self.carrier.carry_out(step, "decode")
            self._used = None
            record = next(steps, None)
            if record is None:
                return
            done = record if isinstance(record, RoundRecord) else record[0]
            if self.uses is not None and done.uses is not None:
                self.uses += done.uses
            self._used = self._ranks_used(done.uses)
            yield record

    def _give_back(self, facts: RequestFacts) -> None:
        """After a prompt that failed: return what it held, if the engine can still do that."""
        if self.engine.stopped is None:
            self.carrier.carry_out(self.stack.after_read(self.state, facts), "decode")

    def _ranks_used(self, uses: np.ndarray | None) -> np.ndarray | None:
        """The rank of every expert that a window used, once for each use, from i32[L', X]."""
        if uses is None:
            return None
        counts = uses.reshape(-1)[self.engine.plan.order.expert]
        return np.repeat(np.arange(len(counts), dtype=np.int32), counts)

    def _read_telemetry(self) -> None:
        """Bring the state in line with what the store holds and the system says."""
        live, state = self.store.live, self.state
        parked = tuple(
            Conversation(c.name, c.tokens, c.bytes, tuple(p.num_tokens for p in c.checkpoints), c.order, c.pinned)
            for c in self.store.parked
        )
        now = None
        if live is not None:
            stored = tuple(p.num_tokens for p in live.checkpoints)
            now = Conversation(live.name, len(live.session.tokens), 0, stored, state.clock, live.pinned)
        clock = max([state.clock, *(c.order + 1 for c in parked)])
        self.carrier.state = replace(
            state, live=now, parked=parked, clock=clock, ram_available_bytes=self.available_ram()
        )

"""Policies at work: a request runs on the engine as the policy stack says, every move carried out as it comes.

The stack decides on its own picture of the memory, a `MemoryState`, with the hooks in the order in which the simulator
calls them too. Each move is carried out by a `Mover` or the conversation store; only then the state after it becomes
the present one, so a move that fails leaves the state of the moves before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import numpy as np

from strata_jax.engine.conversations import ConversationSettings, ConversationStore
from strata_jax.engine.engine import LEDGER_TOLERANCE_FRAC, Engine
from strata_jax.engine.moves import MoveDone, Mover
from strata_jax.engine.prompt_cache import Match
from strata_jax.engine.residency import Fill
from strata_jax.engine.session import ChunkRecord, RoundRecord, Session
from strata_jax.engine.snapshots import checkpoint_bytes, image_bytes
from strata_jax.errors import DoesNotFit
from strata_jax.hardware import available_ram_bytes
from strata_jax.memory.ledger import Owner
from strata_jax.policies.adaptive import AdaptiveSlots
from strata_jax.policies.conversation_budget import recheck
from strata_jax.policies.device import DeviceSettings, device_stack, first_state
from strata_jax.policies.invariants import check_state
from strata_jax.policies.ledger_now import owner_bytes
from strata_jax.policies.moves import Move, MoveKind
from strata_jax.policies.prompt_segments import CheckpointRule, Segment, segments
from strata_jax.policies.stack import PolicyStack
from strata_jax.policies.state import EMPTY, GIVEN, Conversation, MemoryState, RequestFacts, Step, with_slots

NO_LIMIT = 2**62
Fault = Callable[[MoveKind, str], None]


class Sink(Protocol):
    """Where events go: `RunRecord` is one."""

    def event(self, kind: str, **values: Any) -> None: ...


class Quiet:
    """Drops events."""

    def event(self, kind: str, **values: Any) -> None:
        """Drop an event."""


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
        state: the memory as policies see it.
        available_ram: RAM that can be had now, in bytes; None: unknown, and nothing is parked.
        check: compare state, tables and bytes after every move.
    """

    engine: Engine
    stack: PolicyStack
    state: MemoryState
    mover: Mover
    store: ConversationStore
    sink: Sink
    rule: CheckpointRule | None
    available_ram: Callable[[], int | None]
    check: bool = False
    pledged: tuple[int, ...] = ()  # slots that have been emptied to pay for cells and have not paid yet
    _conversation: str = ""
    _match: Match = field(default_factory=Match)
    _used: np.ndarray | None = None

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
        fault: Fault | None = None,
    ) -> Runtime:
        """Put the policies of the engine's plan to work.

        Args:
            rule: where on the way through a prompt states are stored.
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
        made = cls(
            engine, stack, first_state(stack, engine.plan, available_ram()), mover, store, sink or Quiet(),
            (rule or CheckpointRule()) if checkpoints else None, available_ram, check,
        )  # fmt: skip
        mover.on_move = store.on_move = made._log
        store.on_note = made._note
        if fault is not None:
            mover.fault = store.fault = fault
        made._memory("start")
        made._carry_out(stack.on_start(made.state), "start")
        return made

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
        engine = self.engine
        engine.check_running()
        engine.geometry.check_token_ids(prompt)
        if len(prompt) > engine.plan.context_cells:
            raise DoesNotFit(
                f"a prompt of {len(prompt):,} tokens does not fit into {engine.plan.context_cells:,} cells; set"
                f" model.max_context={len(prompt)} or more"
            )
        self._read_telemetry()
        self._match = match = self.store.match(prompt)
        self._conversation = who = self.store.name_for(prompt, match, conversation)
        live = self.state.live
        facts = RequestFacts(
            name=name, conversation=who, prompt_tokens=len(prompt), output_tokens=output_tokens,
            reused_tokens=match.tokens, fresh_tokens=len(prompt) - match.tokens,
            switches=live is not None and live.name != who,
        )  # fmt: skip
        self._used = None
        session = self._enter(facts)
        session.on_chunk = on_chunk
        session.count_uses = AdaptiveSlots.name in self.stack.names
        parts = segments(len(prompt), turns, match.tokens, self.rule)
        try:
            for segment in parts:
                self._read_segment(session, prompt, facts, segment)
            self._carry_out(self.stack.after_read(self.state, facts), "decode")
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
        self._carry_out(step, "decode")
        self._read_telemetry()
        self._memory("start")

    # --- parts of a request

    def _enter(self, facts: RequestFacts) -> Session:
        """Park, trim, grow and restore as the policies say; returns the session at the end of the reused tokens."""
        step = self.stack.on_request(self.state, facts)
        self._carry_out(step, "park" if facts.switches else "prefill")
        kinds = {move.kind for move in step.moves}
        if MoveKind.RESTORE not in kinds:
            self.store.resume(self._match, facts.conversation)
        if MoveKind.PARK in kinds:
            self._read_telemetry()
            self._carry_out(recheck(self.stack.ctx, self.state), "park")
        live = self.store.live
        if live is None:
            raise RuntimeError("no conversation is live")
        return live.session

    def _read_segment(self, session: Session, prompt: Sequence[int], facts: RequestFacts, segment: Segment) -> None:
        self._carry_out(self.stack.before_read(self.state, facts, segment.tokens), "prefill")
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
            self._carry_out(step, "decode")
            self._used = None
            record = next(steps, None)
            if record is None:
                return
            done = record if isinstance(record, RoundRecord) else record[0]
            self._used = self._ranks_used(done.uses)
            yield record

    def _give_back(self, facts: RequestFacts) -> None:
        """After a prompt that failed: return what it held, if the engine can still do that."""
        if self.engine.stopped is None:
            self._carry_out(self.stack.after_read(self.state, facts), "decode")

    def _ranks_used(self, uses: np.ndarray | None) -> np.ndarray | None:
        """The rank of every expert that a window used, once for each use, from i32[L', X]."""
        if uses is None:
            return None
        counts = uses.T.reshape(-1)  # rank = expert * L' + block
        return np.repeat(np.arange(len(counts), dtype=np.int32), counts)

    def _read_telemetry(self) -> None:
        """Bring the state in line with what the store holds and the system says."""
        live = self.store.live
        parked = tuple(
            Conversation(c.name, c.tokens, c.bytes, tuple(p.num_tokens for p in c.checkpoints), c.order, c.pinned)
            for c in self.store.parked
        )
        now = None
        if live is not None:
            stored = tuple(p.num_tokens for p in live.checkpoints)
            now = Conversation(live.name, len(live.session.tokens), 0, stored, self.state.clock, live.pinned)
        clock = max([self.state.clock, *(c.order + 1 for c in parked)])
        self.state = replace(self.state, live=now, parked=parked, clock=clock, ram_available_bytes=self.available_ram())

    # --- moves

    def _carry_out(self, step: Step, phase: str) -> None:
        """Carry out a step, part by part and move by move."""
        for part in step.each():
            for idx, move in enumerate(part.moves):
                before = self.state
                refilled = any(later.kind is MoveKind.REFILL for later in part.moves[idx + 1 :])
                after = self._without_refills(part.state) if refilled else part.state
                self._move(move, before, after)
                self.state = after
                self._check()
            self.state = part.state
            for note in part.notes:
                self.sink.event("note", text=note)
            if part.moves:
                self._memory(phase)

    def _without_refills(self, after: MemoryState) -> MemoryState:
        """The state before experts are copied into slots that have just come back."""
        occupant = after.slots.occupant.copy()
        coming = self._is_empty() & (occupant >= 0)
        coming[after.slots.num_slots if after.lent_from is None else after.lent_from :] = False
        occupant[coming] = EMPTY
        return with_slots(after, occupant=occupant)

    def _move(self, move: Move, before: MemoryState, after: MemoryState) -> None:
        mover, kind = self.mover, move.kind
        if kind is MoveKind.EVICT:
            self._evict(before, after, move.cause)
        elif kind in (MoveKind.REFILL, MoveKind.SWAP_EXPERT):
            carry = mover.refill if kind is MoveKind.REFILL else mover.swap_experts
            carry(self._fills(after), move.cause)
        elif kind is MoveKind.LEND:
            mover.lend(self._num_segments(move.first, move.last), move.cause)
        elif kind is MoveKind.RETURN:
            mover.take_back(self._num_segments(move.first, move.last), move.cause)
        elif kind is MoveKind.MAP_CELLS:
            mover.map_cells(after.kv_mapped_cells, self.pledged, move.cause)
            self.pledged = ()
        elif kind is MoveKind.TRIM_CELLS:
            returned = np.flatnonzero((before.slots.occupant == GIVEN) & (after.slots.occupant != GIVEN)).tolist()
            paid = [slot for slot in returned if slot not in self.pledged]
            mover.trim_cells(after.kv_mapped_cells, move.cause, paid)
            self.pledged = tuple(slot for slot in self.pledged if slot not in returned)
        elif kind is MoveKind.UNLOAD_HEAD:
            mover.unload_head(move.cause)
        elif kind is MoveKind.LOAD_HEAD:
            mover.load_head(move.cause)
        elif kind in (MoveKind.ALLOC_BUFFERS, MoveKind.FREE_BUFFERS):
            # temporaries of the prompt programs: XLA takes them when one runs
            self._log(MoveDone(kind, Owner.PROMPT_BUFFERS, move.bytes, 1, 0.0, None, move.cause))
        elif kind is MoveKind.PARK:
            self.store.park(incoming=self._conversation, cause=move.cause)
        elif kind is MoveKind.RESTORE:
            self.store.resume(self._match, self._conversation)
        elif kind is MoveKind.DROP:
            self.store.drop(move.conversation, move.cause)
        elif kind is not MoveKind.CHECKPOINT:  # those are stored on the way through the prompt
            raise NotImplementedError(f"the engine has no move {kind}")

    def _evict(self, before: MemoryState, after: MemoryState, cause: str) -> None:
        old, new = before.slots.occupant, after.slots.occupant
        given = np.flatnonzero((new == GIVEN) & (old != GIVEN)).tolist()
        emptied = np.flatnonzero((new == EMPTY) & (old >= 0)).tolist()
        self.mover.evict([*given, *emptied], cause)
        self.pledged += tuple(given)

    def _fills(self, after: MemoryState) -> list[Fill]:
        """The experts that a state has in slots which are empty now."""
        slots = np.flatnonzero(self._is_empty() & (after.slots.occupant >= 0))
        slots = slots[slots < self.engine.residency.num_present]
        blocks = self.engine.plan.num_blocks
        return [
            Fill(rank % blocks, rank // blocks, slot)
            for slot, rank in zip(slots.tolist(), after.slots.occupant[slots].tolist())
        ]

    def _is_empty(self) -> np.ndarray:
        return self.engine.residency.occupant < 0

    def _num_segments(self, first: int, last: int) -> int:
        borders = self.state.slots.borders
        if first not in borders:
            raise ValueError(f"slots {first} to {last} are no whole segments: these begin at {borders}")
        return sum(first <= border < last for border in borders)

    # --- accounts

    def _log(self, done: MoveDone) -> None:
        self.sink.event(
            done.kind.value, owner=str(done.owner), bytes=done.bytes, count=done.count, ms=done.ms, gb_s=done.gb_s,
            cause=done.cause, conversation=self._conversation,
        )  # fmt: skip

    def _note(self, note: str) -> None:
        """What the store says beyond the policies: that it could not do what they decided."""
        if note.startswith("skip"):
            self.sink.event("note", text=note)

    def owners(self) -> dict[Owner, int]:
        """The bytes of every owner of device memory now, as the policies' ledger has them."""
        ctx = self.stack.ctx
        return owner_bytes(ctx.sizes, ctx.plan, self.state)

    def _memory(self, phase: str) -> None:
        owners = {str(owner): num for owner, num in self.owners().items() if num}
        self.sink.event("memory", phase=phase, owners=owners, executor="device")

    def _check(self) -> None:
        if self.check:
            self.verify()

    def verify(self) -> dict[str, int]:
        """Compare the policies' state with the tables, and the ledger with the bytes of the engine's arrays.

        Raises:
            ValueError: tables differ from the state or from the device's. RuntimeError: bytes differ by more than 1 %.
            BrokenInvariant: the state itself is none that may be.
        """
        engine, state, ctx = self.engine, self.state, self.stack.ctx
        check_state(ctx.sizes, ctx.plan, state)
        engine.check_tables()
        self._check_slots()
        owners = self.owners()
        arena = sum(array.nbytes for array in engine.arrays)
        ledger = owners[Owner.EXPERT_SLOTS] + owners[Owner.KV]
        if arena != ledger:
            raise RuntimeError(f"the arena's arrays have {arena:,} bytes; slots and K/V have {ledger:,} in the ledger")
        if (engine.weights.head is not None) != state.head_loaded:
            raise ValueError(f"the head is loaded: {engine.weights.head is not None}; the state says the opposite")
        live = engine.owner.state if isinstance(engine.owner, Session) else None
        temporary = {Owner.DECODE_BUFFERS, Owner.PROMPT_BUFFERS, Owner.FREE}
        temporary |= set() if live is not None else {Owner.INDEX_KEYS, Owner.RECURRENT_STATE}
        planned = sum(num for owner, num in owners.items() if owner not in temporary)
        trees = (engine.weights, engine.tables, engine.arrays, live)
        leaves = [x for x in jax.tree.leaves(trees) if not x.is_deleted()]
        found = sum({id(x): x.nbytes for x in leaves}.values())
        if abs(found - planned) > LEDGER_TOLERANCE_FRAC * planned:
            raise RuntimeError(f"the ledger has {planned:,} bytes of device memory, the engine's arrays {found:,}")
        return {"planned_bytes": planned, "found_bytes": found}

    def _check_slots(self) -> None:
        residency, state = self.engine.residency, self.state
        blocks, experts = self.engine.plan.num_blocks, self.engine.plan.num_experts
        ranks = state.slots.occupant.astype(np.int64)
        expected = np.where(ranks >= 0, ranks % blocks * experts + ranks // blocks, -1)
        present = residency.num_slots if state.lent_from is None else state.lent_from
        expected[present:] = -1
        if not np.array_equal(expected, residency.occupant):
            slot = int(np.flatnonzero(expected != residency.occupant)[0])
            raise ValueError(f"slot {slot} holds {residency.expert_in(slot)}; the policies have rank {ranks[slot]}")
        if present != residency.num_present:
            raise ValueError(f"slots from {residency.num_present:,} on are lent; the policies say from {present:,}")
        given = np.flatnonzero(ranks == GIVEN)
        if set(given.tolist()) != {*np.flatnonzero(residency.slot_page < 0).tolist(), *self.pledged}:
            raise ValueError("the slots that pay for K/V cells are not those that the policies have given")
        if residency.layout.groups(state.kv_mapped_cells) != residency.mapped_groups:
            raise ValueError(f"{residency.mapped_cells:,} cells are mapped; the policies say {state.kv_mapped_cells:,}")

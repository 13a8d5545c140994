"""Steps of the policies, carried out: each move on the engine as it comes, and the state after it.

The policies decide on a picture of the memory, a `MemoryState`. Each move is carried out by a `Mover` or the
conversation store; only then the state after it becomes the present one, so a move that fails leaves the state of the
moves before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from strata_jax.engine.agreement import check_agreement
from strata_jax.engine.conversations import ConversationStore
from strata_jax.engine.engine import Engine
from strata_jax.engine.move_report import MoveDone
from strata_jax.engine.moves import Mover
from strata_jax.engine.prompt_cache import Match
from strata_jax.engine.residency import Fill
from strata_jax.memory.ledger import Owner
from strata_jax.policies.ledger_now import owner_bytes
from strata_jax.policies.moves import Move, MoveKind
from strata_jax.policies.stack import PolicyStack
from strata_jax.policies.state import EMPTY, GIVEN, MemoryState, Step, with_slots


class Sink(Protocol):
    """Where events go: `RunRecord` is one."""

    def event(self, kind: str, **values: Any) -> None: ...


class Quiet:
    """Drops events."""

    def event(self, kind: str, **values: Any) -> None:
        """Drop an event."""


@dataclass
class Carrier:
    """The memory as policies see it, and what carries their moves out.

    Attributes:
        state: the memory now.
        check: compare state, tables and bytes after every move.
        conversation: whose request the moves are for. match: what that request continues.
        pledged: slots that have been emptied to pay for cells and have not paid yet.
    """

    engine: Engine
    stack: PolicyStack
    state: MemoryState
    mover: Mover
    store: ConversationStore
    sink: Sink
    check: bool = False
    conversation: str = ""
    match: Match = field(default_factory=Match)
    pledged: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.mover.on_move = self.store.on_move = self.log
        self.store.on_note = self._note

    def carry_out(self, step: Step, phase: str) -> None:
        """Carry out a step, part by part and move by move.

        Args:
            phase: what the memory is written down for afterwards, if anything has moved.
        """
        for part in step.each():
            for idx, move in enumerate(part.moves):
                before = self.state
                refilled = any(later.kind is MoveKind.REFILL for later in part.moves[idx + 1 :])
                after = self._without_refills(part.state) if refilled else part.state
                self._move(move, before, after)
                self.state = after
                if self.check:
                    self.verify()
            self.state = part.state
            for note in part.notes:
                self.sink.event("note", text=note)
            if part.moves:
                self.memory(phase)

    def catch_up(self) -> bool:
        """Bring the state in line with residents that rounds have replaced; says whether it changed.

        Only slots that hold an expert on the device are looked at: what lent or given ones stand for is the policies'.
        """
        engine, slots = self.engine, self.state.slots
        if engine.values is None:
            return False
        order, found = engine.plan.order, engine.residency.occupant
        rank_of = np.empty(len(order.expert), np.int32)
        rank_of[order.expert] = np.arange(len(order.expert), dtype=np.int32)
        occupant = np.where(found >= 0, rank_of[found], slots.occupant).astype(np.int32)
        if np.array_equal(occupant, slots.occupant):
            return False
        self.state = with_slots(self.state, occupant=occupant)
        return True

    def verify(self) -> dict[str, int]:
        """See `check_agreement`."""
        return check_agreement(self.engine, self.stack.ctx, self.state, self.pledged)

    def owners(self) -> dict[Owner, int]:
        """The bytes of every owner of device memory now, as the policies' ledger has them."""
        ctx = self.stack.ctx
        return owner_bytes(ctx.sizes, ctx.plan, self.state)

    def memory(self, phase: str) -> None:
        """Write down who owns how much."""
        owners = {str(owner): num for owner, num in self.owners().items() if num}
        self.sink.event("memory", phase=phase, owners=owners, executor="device")

    def log(self, done: MoveDone) -> None:
        """Write down a move."""
        self.sink.event(
            done.kind.value, owner=str(done.owner), bytes=done.bytes, count=done.count, ms=done.ms, gb_s=done.gb_s,
            cause=done.cause, conversation=self.conversation, device_change_bytes=done.device_change_bytes,
        )  # fmt: skip

    def _note(self, note: str) -> None:
        """What the store says beyond the policies: that it could not do what they decided."""
        if note.startswith("skip"):
            self.sink.event("note", text=note)

    def _without_refills(self, after: MemoryState) -> MemoryState:
        """The state before experts are copied into slots that have just come back."""
        occupant, present = after.slots.occupant.copy(), after.slots.num_present
        coming = self._is_empty() & (occupant >= 0)
        coming[present if after.lent_from is None else min(present, after.lent_from) :] = False
        occupant[coming] = EMPTY
        return with_slots(after, occupant=occupant)

    def _move(self, move: Move, before: MemoryState, after: MemoryState) -> None:
        mover, kind = self.mover, move.kind
        if kind is MoveKind.EVICT:
            self._evict(before, after, move.cause)
        elif kind is MoveKind.MOVE_EXPERT:
            self._move_experts(before, after, move.cause)
        elif kind in (MoveKind.REFILL, MoveKind.SWAP_EXPERT):
            carry = mover.refill if kind is MoveKind.REFILL else mover.swap_experts
            carry(self._fills(after), move.cause)
        elif kind in (MoveKind.LEND, MoveKind.GIVE_SEGMENT):
            mover.lend(self._num_segments(move.first, move.last), move.cause, kind)
        elif kind in (MoveKind.RETURN, MoveKind.TAKE_SEGMENT):
            mover.take_back(self._num_segments(move.first, move.last), move.cause, kind)
        elif kind is MoveKind.MAP_CELLS:
            mover.map_cells(after.kv_mapped_cells, self.pledged, move.cause)
            self.pledged = ()
        elif kind is MoveKind.TRIM_CELLS:
            if self.pledged:  # for cells that were not mapped, as that failed: the policies count their pages as free
                mover.map_cells(before.kv_mapped_cells, self.pledged, move.cause)
                self.pledged = ()
            returned = np.flatnonzero((before.slots.occupant == GIVEN) & (after.slots.occupant != GIVEN)).tolist()
            mover.trim_cells(after.kv_mapped_cells, move.cause, returned)
        elif kind is MoveKind.UNLOAD_HEAD:
            mover.unload_head(move.cause)
        elif kind is MoveKind.LOAD_HEAD:
            mover.load_head(move.cause)
        elif kind in (MoveKind.ALLOC_BUFFERS, MoveKind.FREE_BUFFERS):
            # temporaries of the prompt programs: XLA takes them when one runs
            self.log(MoveDone(kind, Owner.PROMPT_BUFFERS, move.bytes, 1, 0.0, None, move.cause))
        elif kind is MoveKind.PARK:
            self.store.park(incoming=self.conversation, cause=move.cause)
        elif kind is MoveKind.RESTORE:
            self.store.resume(self.match, self.conversation)
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

    def _move_experts(self, before: MemoryState, after: MemoryState, cause: str) -> None:
        """Copy experts to where they are afterwards; what a failure has written over is in the bank only."""
        old, new, present = before.slots.occupant, after.slots.occupant, before.slots.num_present
        targets = np.flatnonzero((new != old) & (new >= 0)).tolist()
        home = {rank: slot for slot, rank in enumerate(old[:present].tolist()) if rank >= 0}
        try:
            self.mover.move_experts([(home[int(new[slot])], slot) for slot in targets], cause)
        except BaseException:
            lost = self._is_empty() & (old >= 0)
            lost[present:] = False
            self.state = with_slots(before, occupant=np.where(lost, EMPTY, old).astype(old.dtype))
            raise

    def _fills(self, after: MemoryState) -> list[Fill]:
        """The experts that a state has in slots which are empty now."""
        slots = np.flatnonzero(self._is_empty() & (after.slots.occupant >= 0))
        slots = slots[slots < self.engine.residency.num_present]
        order = self.engine.plan.order
        pairs = (divmod(code, order.num_experts) for code in order.expert[after.slots.occupant[slots]].tolist())
        return [Fill(block, expert, slot) for slot, (block, expert) in zip(slots.tolist(), pairs, strict=True)]

    def _is_empty(self) -> np.ndarray:
        return self.engine.residency.occupant < 0

    def _num_segments(self, first: int, last: int) -> int:
        borders = self.state.slots.borders
        if first not in borders:
            raise ValueError(f"slots {first} to {last} are no whole segments: these begin at {borders}")
        return sum(first <= border < last for border in borders)

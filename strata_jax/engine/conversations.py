"""Conversations on one engine: the live one, checkpoints to go back to, and others parked in host memory.

A request continues the longest prefix of its prompt for which an exact state is at hand: the live session, a checkpoint
of it (its cells up to there are still on the device), or a parked image or a checkpoint inside one. The last token of a
prompt is always computed. When a request switches away from the live conversation, that one is parked if the budget and
the RAM allow it. Everything that is stored is a copy which nothing writes to again, so a move that fails leaves what
was stored as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain

import jax
import numpy as np

from strata_jax.engine.engine import Engine
from strata_jax.engine.move_report import MoveDone
from strata_jax.engine.prompt_cache import (
    LiveConversation,
    Match,
    ParkedConversation,
    checkpoint_arrays,
    common_prefix,
    distinct_bytes,
    longest_match,
)
from strata_jax.engine.session import Session, fresh_session
from strata_jax.engine.snapshots import (
    capture,
    check_restorable,
    image_bytes,
    restore,
    roll_back,
    take_checkpoint,
)
from strata_jax.errors import DoesNotFit
from strata_jax.hardware import available_ram_bytes
from strata_jax.memory.ledger import MIB, Owner
from strata_jax.policies.admission import make_room, ram_refusal, with_checkpoint
from strata_jax.policies.moves import MoveKind
from strata_jax.policies.prompt_segments import CheckpointRule, Segment, segments


@dataclass(frozen=True, slots=True)
class ConversationSettings:
    """What may be stored.

    Attributes:
        budget_bytes: RAM of all parked conversations; 0: none are parked.
        slots: how many may be parked.
        min_free_bytes: RAM that stays available after parking.
        checkpoints: how many states are kept per conversation; 0: none.
        rule: where on the way through a prompt they are stored.
    """

    budget_bytes: int = 0
    slots: int = 4
    min_free_bytes: int = 2560 * MIB
    checkpoints: int = 6
    rule: CheckpointRule = field(default_factory=CheckpointRule)


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """A request whose session is ready to read the rest of its prompt."""

    conversation: str
    session: Session
    prompt: tuple[int, ...]
    reused_tokens: int
    source: str
    segments: tuple[Segment, ...]

    @property
    def fresh_tokens(self) -> int:
        return len(self.prompt) - self.reused_tokens


def _ignore(done: MoveDone) -> None:
    """Report nothing."""


def _no_fault(kind: MoveKind, stage: str) -> None:
    """Let a move go on."""


@dataclass
class ConversationStore:
    """The live conversation of an engine and those that are parked.

    Attributes:
        available_ram: RAM that can be had now, in bytes; None: unknown, and nothing is parked.
        on_move: is told of everything parked, restored, dropped and of every checkpoint, once it is done.
        on_note: is told what was parked or restored, and why something was not.
        fault: is called with the move and ``"prepared"`` or ``"copied"`` when it gets there; what it raises fails the
            move. For tests.
    """

    engine: Engine
    settings: ConversationSettings = field(default_factory=ConversationSettings)
    available_ram: Callable[[], int | None] = available_ram_bytes
    on_move: Callable[[MoveDone], None] = _ignore
    on_note: Callable[[str], None] = lambda note: None
    fault: Callable[[MoveKind, str], None] = _no_fault
    parked: tuple[ParkedConversation, ...] = field(default=(), init=False)
    num_dropped: int = field(default=0, init=False)
    _live: LiveConversation | None = field(default=None, init=False)
    _clock: int = field(default=0, init=False)

    # --- what there is

    @property
    def live(self) -> LiveConversation | None:
        """The live conversation, unless its cells were taken over or given up, or a failed step left no state."""
        live = self._live
        if live is not None and (self.engine.owner is not live.session or _is_broken(live.session)):
            self._live = live = None
        return live

    @property
    def parked_bytes(self) -> int:
        """What counts against the budget."""
        return sum(c.bytes for c in self.parked)

    def host_bytes(self) -> int:
        """All host memory of parked conversations and checkpoints, shared arrays once."""
        live = self._live.checkpoints if self._live is not None else ()
        return distinct_bytes(chain(checkpoint_arrays(live), *(c.arrays() for c in self.parked)))

    def match(self, prompt: Sequence[int]) -> Match:
        """Return the longest prefix of a prompt for which there is an exact state; of equal ones what costs least."""
        live = self.live
        return longest_match(prompt, *([] if live is None else [live]), *sorted(self.parked, key=lambda c: -c.order))

    def name_for(self, prompt: Sequence[int], match: Match, conversation: str | None = None) -> str:
        """Return the conversation a request belongs to.

        One without a name continues the parked one that it reuses whole; else the live one if it shares at least half
        of that one's tokens; else it is a new one.
        """
        if conversation is not None:
            return conversation
        live, holder = self.live, match.holder
        if isinstance(holder, ParkedConversation) and match.checkpoint is None:
            return holder.name
        if live is not None and 2 * common_prefix(live.session.tokens, prompt) >= len(live.session.tokens):
            return live.name
        return f"conversation {self._clock + 1}"

    # --- a request

    def start(
        self,
        prompt: Sequence[int],
        conversation: str | None = None,
        *,
        turns: Sequence[int] = (),
        before_resume: Callable[[Match], None] = lambda match: None,
    ) -> Start:
        """Make the conversation of a request live, at the end of the longest usable prefix of its prompt.

        Args:
            turns: positions of the prompt where turns start.
            before_resume: is called when the outgoing conversation has been parked and before anything is restored; K/V
                cells can be mapped or given back here, those of the matched prefix must be there afterwards.

        Raises:
            ConfigError: no tokens, or ids outside the vocabulary.
            DoesNotFit: more tokens than the context has cells.
        """
        self.engine.check_running()
        self.engine.geometry.check_token_ids(prompt)
        if len(prompt) > self.engine.plan.context_cells:
            raise DoesNotFit(
                f"a prompt of {len(prompt):,} tokens does not fit into {self.engine.plan.context_cells:,} cells;"
                f" set model.max_context={len(prompt)} or more"
            )
        match = self.match(prompt)
        name = self.name_for(prompt, match, conversation)
        self._clock += 1
        if self.live is not None and self.live.name != name:
            self.park(incoming=match.holder.name if match.holder is not None else name, cause=f"{name} takes over")
        before_resume(match)
        session = self.resume(match, name)
        rule = self.settings.rule if self.settings.checkpoints > 0 else None
        parts = segments(len(prompt), turns, match.tokens, rule)
        return Start(name, session, tuple(prompt), match.tokens, match.source, tuple(parts))

    def read(self, start: Start) -> np.ndarray:
        """Read the rest of a prompt, storing checkpoints on the way; returns the last token's logits f32[1, V]."""
        for segment in start.segments:
            for first, last in segment.parts():
                for _ in start.session.chunks(start.prompt[first:last]):
                    pass
                if last in segment.checkpoints:
                    self.store_checkpoint()
        return start.session.last_logits()

    # --- moves

    def park(self, incoming: str = "", cause: str = "") -> str | None:
        """Park the live conversation if it is admitted; it is no longer live either way.

        The cells stay on the device until another session takes them over.

        Args:
            incoming: a parked conversation that is about to be restored, which is not evicted.

        Returns:
            why it was not parked, if so.
        """
        live, settings = self.live, self.settings
        if live is None or not live.session.tokens:
            self._live = None
            return None
        reason = self._park(live, incoming, cause) if settings.budget_bytes > 0 else "conversation.budget_mib=0"
        self._live = None
        if reason is not None:
            self.on_note(f"skip parking of {live.name} ({reason})")
        return reason

    def resume(self, match: Match, name: str) -> Session:
        """Make a conversation live from what was matched; its session has ``match.tokens`` tokens.

        A parked conversation of the same name becomes the live one; of another it is copied and stays. After a failure
        all that is parked is as it was; once cells or states have been written over, nothing is live.
        """
        holder = match.holder
        stored = () if holder is None else holder.checkpoints
        pinned = holder is not None and holder.pinned and holder.name == name
        owner, length = self.engine.owner, self._owner_tokens()
        try:
            if isinstance(holder, LiveConversation):
                session = holder.session
                if match.checkpoint is not None:
                    with self._move(MoveKind.RESTORE, Owner.CHECKPOINTS, f"{name} goes back") as job:
                        self.fault(MoveKind.RESTORE, "prepared")
                        roll_back(session, match.checkpoint)
                        self.fault(MoveKind.RESTORE, "copied")
                        job.append(match.checkpoint.bytes)
            elif holder is not None:
                session = self._restore(holder, match, name)
            else:
                session = fresh_session(self.engine)
        except BaseException:
            if self.engine.owner is not owner or self._owner_tokens() != length:
                self.engine.owner = self._live = None
            raise
        if isinstance(holder, ParkedConversation) and holder.name == name:
            self.parked = tuple(c for c in self.parked if c is not holder)
        checkpoints = tuple(c for c in stored if c.num_tokens <= match.tokens)
        self._live = LiveConversation(name, session, checkpoints, pinned)
        if holder is not None:
            self.on_note(f"restored {match.tokens:,} tokens of {name} ({match.source})")
        return session

    def store_checkpoint(self) -> None:
        """Store the live session's state at its present length; of too many the oldest but the first goes."""
        live, capacity = self.live, self.settings.checkpoints
        if live is None or capacity <= 0 or any(c.num_tokens == len(live.session.tokens) for c in live.checkpoints):
            return
        cause = f"prompt cache: {live.name}"
        with self._move(MoveKind.CHECKPOINT, Owner.CHECKPOINTS, cause) as job:
            self.fault(MoveKind.CHECKPOINT, "prepared")
            taken = take_checkpoint(live.session)
            self.fault(MoveKind.CHECKPOINT, "copied")
            live.checkpoints = with_checkpoint(live.checkpoints, taken, capacity)
            job.append(taken.bytes)

    def drop(self, name: str, cause: str = "") -> None:
        """Forget the parked conversations of a name."""
        self._replace_parked(tuple(c for c in self.parked if c.name != name), cause)

    def pin(self, name: str, pinned: bool = True) -> None:
        """Keep the conversation of a name from being evicted, or allow it again."""
        self.parked = tuple(replace(c, pinned=pinned) if c.name == name else c for c in self.parked)
        if self._live is not None and self._live.name == name:
            self._live.pinned = pinned

    # --- parts of moves

    def _park(self, live: LiveConversation, incoming: str, cause: str) -> str | None:
        """Park, or return why not; nothing is changed then but for conversations that had to go before the copy."""
        settings, session, floor = self.settings, live.session, self.settings.min_free_bytes
        copied = image_bytes(self.engine, len(session.tokens))
        size = copied + distinct_bytes(checkpoint_arrays(live.checkpoints))
        superseded = [c for c in self.parked if not c.pinned and c.name != incoming and c.is_prefix_of(session.tokens)]
        others = [c for c in self.parked if c not in superseded]
        room = make_room(others, live.name, incoming, size, settings.budget_bytes, settings.slots)
        if isinstance(room, str):
            return room
        kept, leaving = room[0], [*superseded, *room[1]]
        freed = self._freed_bytes(leaving)
        available = self.available_ram()
        reason = ram_refusal(None if available is None else available + freed, copied, floor)
        if reason is not None:
            return reason
        if ram_refusal(available, copied, floor) is not None:  # the copy needs their RAM
            self._replace_parked(tuple(kept), "room for a newer one")
            freed = 0
        with self._move(MoveKind.PARK, Owner.CONVERSATIONS, cause) as job:
            self.fault(MoveKind.PARK, "prepared")
            try:
                image = capture(session)
            except MemoryError:
                return "the system refused the memory"
            self.fault(MoveKind.PARK, "copied")
            available = self.available_ram()
            reason = ram_refusal(None if available is None else available + freed, 0, floor)
            if reason is not None:
                return f"{reason} (after the copy)"
            self._clock += 1
            parked = ParkedConversation(live.name, image, live.checkpoints, self._clock, live.pinned)
            self._replace_parked((*kept, parked), "room for a newer one")
            job.append(image.bytes)
        self.on_note(
            f"parked {parked.tokens:,} tokens of {live.name}; parked={len(self.parked)} bytes={self.parked_bytes:,}"
            f" dropped={self.num_dropped}"
        )
        return None

    def _restore(self, holder: ParkedConversation, match: Match, name: str) -> Session:
        point = match.checkpoint or holder.image.end
        with self._move(MoveKind.RESTORE, Owner.CONVERSATIONS, f"{name} takes over") as job:
            check_restorable(self.engine, holder.image, point)
            self.fault(MoveKind.RESTORE, "prepared")
            session = fresh_session(self.engine)
            restore(session, holder.image, point)
            self.fault(MoveKind.RESTORE, "copied")
            job.append(image_bytes(self.engine, match.tokens))
        return session

    def _replace_parked(self, after: tuple[ParkedConversation, ...], cause: str) -> None:
        """Change what is parked in one step, then report what is gone."""
        gone = [c for c in self.parked if c not in after]
        num_bytes = [self._freed_bytes(gone[i:]) - self._freed_bytes(gone[i + 1 :]) for i in range(len(gone))]
        self.parked = after
        self.num_dropped += len(gone)
        for freed in num_bytes:
            self.on_move(MoveDone(MoveKind.DROP, Owner.CONVERSATIONS, freed, 1, 0.0, None, cause))

    def _freed_bytes(self, leaving: Sequence[ParkedConversation]) -> int:
        """What dropping some frees: arrays that the others and the live one do not hold."""
        live = self._live.checkpoints if self._live is not None else ()
        staying = (c.arrays() for c in self.parked if c not in leaving)
        held = {id(x) for x in chain(checkpoint_arrays(live), *staying)}
        return distinct_bytes(x for c in leaving for x in c.arrays() if id(x) not in held)

    def _owner_tokens(self) -> int | None:
        """Length of the sequence that owns the cells; None if there is no whole one."""
        owner = self.engine.owner
        return len(owner.tokens) if isinstance(owner, Session) and not _is_broken(owner) else None

    @contextmanager
    def _move(self, kind: MoveKind, owner: Owner, cause: str) -> Iterator[list[int]]:
        """Report a move once it has appended the bytes it copied."""
        started, done = time.perf_counter(), list[int]()
        yield done
        if done:
            seconds = time.perf_counter() - started
            rate = done[0] / seconds / 1e9 if seconds > 0 else None
            self.on_move(MoveDone(kind, owner, done[0], 1, 1000 * seconds, rate, cause))


def _is_broken(session: Session) -> bool:
    """Whether a step was broken off, or took arrays of the state with it, or cells of the sequence were given up."""
    return session.lost_from is not None or any(x.is_deleted() for x in jax.tree.leaves(session.state))

"""Conversations parked in RAM: admission, eviction, restoring, checkpoints (planning notes 2.9, 7.3).

A conversation is parked when a request switches away from it. It is admitted when the parked ones and it stay within
the budget and the count, the oldest unpinned making room, and when RAM that is known to be available stays above the
floor: checked before anything is allocated and again when it has been captured. Unknown RAM: nothing is parked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from strata_jax.memory.ledger import MIB
from strata_jax.policies.admission import make_room, ram_refusal, with_checkpoint
from strata_jax.policies.moves import Move, MoveKind
from strata_jax.policies.policy import Policy, PolicyContext
from strata_jax.policies.state import Conversation, MemoryState, RequestFacts, Step


@dataclass(frozen=True, slots=True)
class Match:
    """The longest usable prefix of a prompt: how many tokens, and where their state is."""

    tokens: int
    source: str  # live, checkpoint, parked or none


class ConversationBudget(Policy):
    """Park, evict and restore whole sessions; keep their checkpoints."""

    name = "conversation_budget"

    def on_park(self, ctx: PolicyContext, state: MemoryState, facts: RequestFacts) -> Step:
        """Park the live session if it is admitted; it is no longer live either way."""
        live = state.live
        if live is None or live.tokens <= 0 or live.name == facts.conversation:
            return Step(state)
        request = ctx.plan.request
        budget, floor = request.conversation_mib * MIB, request.conversation_min_free_mib * MIB
        gone = replace(state, live=None)
        if budget <= 0 or request.conversation_slots <= 0:
            return Step(gone)
        size = ctx.prices.image_bytes(live.tokens, len(live.checkpoints))
        room = make_room(state.parked, live.name, facts.conversation, size, budget, request.conversation_slots)
        if isinstance(room, str):
            return _skip(gone, live, room)
        kept, dropped = room
        available = state.ram_available_bytes
        freed = sum(c.bytes for c in dropped)
        refusal = ram_refusal(None if available is None else available + freed, size, floor)
        if refusal is not None:
            return _skip(gone, live, refusal)
        assert available is not None  # unknown RAM is refused
        image = replace(live, bytes=size, order=state.clock)
        moves = [_drop(c, "room for a newer one") for c in dropped]
        moves.append(
            Move(
                MoveKind.PARK, "parked conversations", size, count=1,
                cause=f"{self.name}: {facts.conversation} takes over",
                conversation=live.name, detail=(("tokens", live.tokens), ("checkpoints", len(live.checkpoints))),
            )
        )  # fmt: skip
        after = replace(
            gone, parked=(*kept, image), clock=state.clock + 1, ram_available_bytes=available + freed - size
        )
        return Step(after, tuple(moves), (f"parked {live.tokens:,} tokens of {live.name}",))

    def on_restore(self, ctx: PolicyContext, state: MemoryState, facts: RequestFacts) -> Step:
        """Make the request's parked session live; its RAM is free again."""
        image = find_parked(state, facts.conversation)
        if image is None or state.live is not None:
            return Step(state)
        tokens = min(image.tokens, max(facts.reused_tokens, 0)) or image.tokens
        move = Move(
            MoveKind.RESTORE, "parked conversations", ctx.prices.image_bytes(tokens, 0), count=1,
            cause=f"{self.name}: it takes over", conversation=image.name,
            detail=(("tokens", tokens), ("image_bytes", image.bytes)),
        )  # fmt: skip
        available = state.ram_available_bytes
        after = replace(
            state, live=replace(image, bytes=0, order=state.clock), clock=state.clock + 1,
            parked=tuple(c for c in state.parked if c is not image),
            ram_available_bytes=None if available is None else available + image.bytes,
        )  # fmt: skip
        return Step(after, (move,), (f"restored {tokens:,} tokens of {image.name}",))

    def after_request(self, ctx: PolicyContext, state: MemoryState, facts: RequestFacts, tokens: int) -> Step:
        """Note the live session's length and store the checkpoints that the read passed."""
        return with_live(ctx, state, facts, tokens)


def recheck(ctx: PolicyContext, state: MemoryState) -> Step:
    """Forget the image just captured if available RAM, read again, is below the floor (`additional` = 0)."""
    floor = ctx.plan.request.conversation_min_free_mib * MIB
    available = state.ram_available_bytes
    if not state.parked or (available is not None and available >= floor):
        return Step(state)
    newest = max(state.parked, key=lambda c: c.order)
    after = replace(
        state, parked=tuple(c for c in state.parked if c is not newest),
        ram_available_bytes=None if available is None else available + newest.bytes,
    )  # fmt: skip
    why = "available RAM is unknown" if available is None else "less RAM than the floor is available after capturing"
    return Step(after, (_drop(newest, why),), (f"skip parking of {newest.name}: {why}",))


def find_parked(state: MemoryState, name: str) -> Conversation | None:
    """Return the newest parked session of a conversation."""
    return max((c for c in state.parked if c.name == name), key=lambda c: c.order, default=None)


def match_prefix(state: MemoryState, conversation: str, shared_tokens: int, prompt_tokens: int) -> Match:
    """Return the longest usable prefix: exact states only, and the last prompt token is always computed.

    shared_tokens: leading tokens that the prompt shares with what the conversation has stored.
    """
    limit = min(shared_tokens, prompt_tokens - 1)
    live = state.live if state.live is not None and state.live.name == conversation else None
    found = Match(0, "none")
    for holder, source in ((live, "live"), (find_parked(state, conversation), "parked")):
        if holder is None:
            continue
        if holder.tokens <= limit and holder.tokens > found.tokens:
            found = Match(holder.tokens, source)
        best = max((c for c in holder.checkpoints if c <= limit), default=0)
        if best > found.tokens:
            found = Match(best, "checkpoint" if source == "live" else source)
    return found


def store_checkpoint(checkpoints: tuple[int, ...], tokens: int, capacity: int) -> tuple[int, ...]:
    """Return the checkpoints with one more: of too many the oldest goes, but the first (the root) stays.

    The order is that of use, oldest first behind the root; capacity 1 keeps no root.
    """
    if capacity <= 0 or tokens <= 0:
        return checkpoints[: max(0, capacity)]
    return with_checkpoint([c for c in checkpoints if c != tokens], tokens, capacity)


def with_live(ctx: PolicyContext, state: MemoryState, facts: RequestFacts, tokens: int) -> Step:
    """Return the state with `tokens` tokens in the live session, and a move for each checkpoint that was stored.

    Checkpoints are stored at the boundaries of `facts` that the request has read anew; those past a point from which
    the prompt differs are gone.
    """
    capacity = ctx.plan.request.checkpoints
    live = state.live if state.live is not None and state.live.name == facts.conversation else None
    reused = facts.reused_tokens
    stored = tuple(c for c in (live.checkpoints if live else ()) if c <= max(reused, 0))
    moves: list[Move] = []
    for boundary in facts.boundaries:
        if capacity > 0 and reused < boundary <= facts.prompt_tokens and boundary not in stored:
            stored = store_checkpoint(stored, boundary, capacity)
            moves.append(
                Move(
                    MoveKind.CHECKPOINT, "checkpoints", ctx.prices.checkpoint_bytes, count=1, first=boundary,
                    last=boundary, cause="prompt_cache: boundary", conversation=facts.conversation,
                )
            )  # fmt: skip
    session = Conversation(facts.conversation, tokens, checkpoints=stored, order=state.clock)
    return Step(replace(state, live=session, clock=state.clock + 1), tuple(moves))


def _drop(conversation: Conversation, why: str) -> Move:
    return Move(
        MoveKind.DROP, "parked conversations", conversation.bytes, count=1,
        cause=f"{ConversationBudget.name}: {why}", conversation=conversation.name,
    )  # fmt: skip


def _skip(state: MemoryState, live: Conversation, why: str) -> Step:
    return Step(state, notes=(f"skip parking of {live.name} ({why})",))

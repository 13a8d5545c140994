"""Parking: admission in its order, who is evicted, restoring, prefixes and checkpoints."""

from __future__ import annotations

from dataclasses import replace

import policy_models as pm
import pytest

from strata_jax.memory.ledger import MIB
from strata_jax.policies.conversation_budget import Match, match_prefix, recheck, store_checkpoint
from strata_jax.policies.moves import MoveKind
from strata_jax.policies.state import Conversation, MemoryState

SETTINGS = {"conversation_mib": 2_816, "conversation_slots": 2, "conversation_min_free_mib": 2_560}


def stack_of(**changes: object) -> pm.PolicyStack:
    return pm.make_stack(**(SETTINGS | changes))


def with_live(stack: pm.PolicyStack, tokens: int, *, ram: int | None = 100_000 * MIB) -> MemoryState:
    return replace(pm.ready(stack), live=Conversation("old", tokens), ram_available_bytes=ram)


def switch(stack: pm.PolicyStack, state: MemoryState, to: str = "new") -> pm.Step:
    return pm.checked(stack, stack.on_request(state, pm.ask(to, 100, switches=True)))


def test_parking_books_the_image_in_ram() -> None:
    stack = stack_of()
    step = switch(stack, with_live(stack, 20_000))
    park = pm.one(step.moves, MoveKind.PARK)
    assert park.bytes == stack.ctx.prices.image_bytes(20_000, 0)
    assert park.bytes == pytest.approx(20_000 * (13_728 + 1_536) + 118e6, rel=0.002)
    assert step.state.parked[0].bytes == park.bytes
    assert step.state.ram_available_bytes == 100_000 * MIB - park.bytes
    assert step.state.live is None


@pytest.mark.parametrize(("extra", "parks"), [(0, True), (-1, False)])
def test_admission_needs_the_floor_and_the_image_to_the_byte(extra: int, parks: bool) -> None:
    stack = stack_of()
    size = stack.ctx.prices.image_bytes(20_000, 0)
    step = switch(stack, with_live(stack, 20_000, ram=2_560 * MIB + size + extra))
    assert (MoveKind.PARK in pm.kinds(step.moves)) is parks
    if not parks:
        assert "conversation.min_free_mib=2,560 must stay free" in step.notes[0]
        assert step.state.live is None


def test_unknown_ram_parks_nothing_and_says_so() -> None:
    stack = stack_of()
    step = switch(stack, with_live(stack, 20_000, ram=None))
    assert step.moves == ()
    assert step.notes == ("skip parking of old (available RAM is unknown)",)


def test_an_image_above_the_budget_is_skipped_and_evicts_nobody() -> None:
    stack = stack_of()
    state = switch(stack, with_live(stack, 10_000)).state
    step = switch(stack, replace(state, live=Conversation("huge", 240_000)), "other")
    assert "conversation.budget_mib=2,816 has no room for it" in step.notes[0]
    assert [c.name for c in step.state.parked] == ["old"]


@pytest.mark.parametrize("limit", ["count", "budget"])
def test_the_oldest_unpinned_makes_room(limit: str) -> None:
    tokens = 10_000 if limit == "count" else 60_000
    stack = stack_of(**({} if limit == "count" else {"conversation_slots": 9}))
    state = with_live(stack, tokens)
    names = ["b", "c", "d"]
    for name in names:
        state = replace(switch(stack, state, name).state, live=Conversation(name, tokens))
    step = switch(stack, state, "e")
    assert [m.conversation for m in step.moves if m.kind is MoveKind.DROP] == ["b"]
    assert [c.name for c in step.state.parked] == ["c", "d"]
    pinned = tuple(replace(c, pinned=c.name == "c") for c in step.state.parked)
    step = switch(stack, replace(step.state, parked=pinned, live=Conversation("e", tokens)), "f")
    assert [c.name for c in step.state.parked] == ["c", "e"]


def test_what_the_request_restores_is_not_evicted_for_the_outgoing() -> None:
    stack = stack_of()
    state = with_live(stack, 10_000)
    for name in ("b", "c"):
        state = replace(switch(stack, state, name).state, live=Conversation(name, 10_000))
    step = pm.checked(stack, stack.on_request(state, pm.ask("old", 10_100, reused=10_000, switches=True)))
    assert pm.kinds(step.moves) == [MoveKind.DROP, MoveKind.PARK, MoveKind.RESTORE]
    assert step.moves[0].conversation == "b"
    assert step.state.live is not None
    assert (step.state.live.name, step.state.live.tokens) == ("old", 10_000)


def test_a_newer_image_supersedes_the_older_of_its_conversation() -> None:
    stack = stack_of()
    state = replace(switch(stack, with_live(stack, 10_000)).state, live=Conversation("old", 12_000))
    step = switch(stack, state, "x")
    assert [c.tokens for c in step.state.parked] == [12_000]


def test_restoring_frees_its_ram() -> None:
    stack = stack_of()
    state = with_live(stack, 10_000)
    before = state.ram_available_bytes
    step = stack.on_request(switch(stack, state).state, pm.ask("old", 10_100, reused=10_000))
    assert (step.state.ram_available_bytes, step.state.parked) == (before, ())


def test_telemetry_is_read_again_after_capturing() -> None:
    stack = stack_of()
    state = switch(stack, with_live(stack, 20_000)).state
    assert recheck(stack.ctx, state).moves == ()
    for ram in (2_559 * MIB, None):
        step = pm.checked(stack, recheck(stack.ctx, replace(state, ram_available_bytes=ram)))
        assert pm.kinds(step.moves) == [MoveKind.DROP]
        assert step.state.parked == ()


@pytest.mark.parametrize("off", [{"conversation_mib": 0}, {"conversation_slots": 0}])
def test_without_a_budget_the_outgoing_session_is_lost_quietly(off: dict[str, int]) -> None:
    stack = stack_of(**off)
    step = switch(stack, with_live(stack, 20_000))
    assert (step.moves, step.notes, step.state.live) == ((), (), None)


def test_the_longest_exact_state_is_reused_and_the_last_token_never() -> None:
    stack = pm.make_stack()
    live = Conversation("a", 1_000, checkpoints=(300, 700))
    state = replace(pm.ready(stack), live=live)
    assert match_prefix(state, "a", 1_000, 2_000) == Match(1_000, "live")
    assert match_prefix(state, "a", 1_000, 1_000).tokens == 700, "n - 1 at most"
    assert match_prefix(state, "a", 699, 2_000).tokens == 300
    assert match_prefix(state, "a", 299, 2_000).source == "none"
    assert match_prefix(state, "b", 1_000, 2_000).tokens == 0
    parked = replace(state, live=Conversation("b", 10), parked=(replace(live, order=1),))
    assert match_prefix(parked, "a", 1_000, 2_000).source == "parked"


def test_checkpoints_keep_the_root_and_the_newest() -> None:
    kept: tuple[int, ...] = ()
    for tokens in (2_048, 5_000, 9_000, 16_384):
        kept = store_checkpoint(kept, tokens, 3)
    assert kept == (2_048, 9_000, 16_384)
    assert store_checkpoint((5,), 9, 1) == (9,)
    assert store_checkpoint((5,), 9, 0) == ()
    assert store_checkpoint((5, 9), 5, 3) == (9, 5)


def test_boundaries_that_were_read_anew_are_stored_and_counted() -> None:
    stack = pm.make_stack(checkpoints=3)
    facts = pm.ask("a", 10_000, boundaries=(2_048, 6_000, 9_999))
    step = stack.after_request(pm.ready(stack), facts, 10_050)
    assert [m.first for m in step.moves] == [2_048, 6_000, 9_999]
    assert step.moves[0].bytes == pytest.approx(118e6, rel=0.01)
    again = stack.after_request(step.state, pm.ask("a", 7_000, reused=6_000, boundaries=(6_000, 6_900)), 7_010)
    assert again.state.live is not None
    assert again.state.live.checkpoints == (2_048, 6_000, 6_900)
    assert len(again.moves) == 1

"""Conversations taking turns: what is reused, what is parked, what goes, and that none of it changes a bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
import pytest

from strata_jax.engine import conversations, snapshots
from strata_jax.engine.conversations import ConversationSettings, ConversationStore, Start
from strata_jax.engine.engine import Engine
from strata_jax.engine.gdn import GdnState
from strata_jax.engine.move_report import MoveDone
from strata_jax.engine.session import Session
from strata_jax.engine.snapshots import checkpoint_bytes, image_bytes, image_hash, state_hash
from strata_jax.errors import ConfigError, DoesNotFit
from strata_jax.memory.ledger import Owner
from strata_jax.policies.moves import MoveKind
from strata_jax.policies.prompt_segments import CheckpointRule
from tests.engine.conftest import load
from tests.oracle.models import PARITY_CASES, ModelStore

MIB = 2**20
TOKENS = PARITY_CASES[0].token_ids
A1, A2, B1, C1 = TOKENS[:70], TOKENS[70:100], TOKENS[120:200], TOKENS[220:300]
PLENTY = ConversationSettings(
    budget_bytes=1000 * MIB, min_free_bytes=10 * MIB, checkpoints=3, rule=CheckpointRule(every=32, root=16)
)
RAM = 4000 * MIB


@pytest.fixture(scope="module")
def engine(models: ModelStore) -> Engine:
    """A model whose drafts are right some of the time."""
    return load(models.synthetic("nano", 0, echo_mtp=0.1))


class Log:
    """What a store has reported."""

    def __init__(self) -> None:
        self.moves: list[MoveDone] = []
        self.notes: list[str] = []

    def kinds(self) -> list[str]:
        return [str(move.kind) for move in self.moves if move.kind is not MoveKind.CHECKPOINT]


def new_store(engine: Engine, log: Log | None = None, **changes: object) -> ConversationStore:
    log = log or Log()
    return ConversationStore(
        engine, replace(PLENTY, **changes), available_ram=lambda: RAM, on_move=log.moves.append,
        on_note=log.notes.append,
    )  # type: ignore[arg-type]  # fmt: skip


def ask(
    store: ConversationStore, prompt: Sequence[int], name: str | None = None, count: int = 8
) -> tuple[Start, np.ndarray, list[int]]:
    """One request: the prompt's last logits and the answer."""
    start = store.start(prompt, name)
    logits = store.read(start)
    return start, logits, [token for r in start.session.decode(logits, max_tokens=count) for token in r.emitted]


def seen(store: ConversationStore) -> list[int]:
    assert store.live is not None
    return list(store.live.session.tokens)


def parked_names(store: ConversationStore) -> list[str]:
    return [c.name for c in store.parked]


# --- what is reused


def test_turns_of_three_conversations_equal_uninterrupted_ones(engine: Engine) -> None:
    expected = {}
    for name, first in (("A", A1), ("B", B1), ("C", C1)):
        store = new_store(engine)
        ask(store, first, name)
        start, logits, text = ask(store, [*seen(store), *A2], name, 16)
        assert start.source == "live"
        expected[name] = logits, text, state_hash(start.session)
    log = Log()
    store, after = new_store(engine, log), {}
    for name, first in (("A", A1), ("B", B1), ("C", C1)):
        start = ask(store, first, name)[0]
        assert (start.source, start.reused_tokens) == ("none", 0)
        after[name] = seen(store)
    for name in "ABC":
        assert name not in parked_names(store) or store.live is not None
        start, logits, text = ask(store, [*after[name], *A2], name, 16)
        assert (start.source, start.reused_tokens) == ("parked", len(after[name]))
        np.testing.assert_array_equal(logits, expected[name][0])
        assert text == expected[name][1]
        assert state_hash(start.session) == expected[name][2]
    assert log.kinds() == ["park", "park", "park", "restore", "park", "restore", "park", "restore"]
    restored = next(move for move in log.moves if move.kind is MoveKind.RESTORE)
    assert restored.bytes == image_bytes(engine, len(after["A"]))
    assert (restored.owner, restored.count) == (Owner.CONVERSATIONS, 1)
    assert restored.gb_s is not None
    assert restored.gb_s * restored.ms * 1e6 == pytest.approx(restored.bytes)


def test_an_edited_tail_goes_on_from_the_last_checkpoint_before_it(engine: Engine) -> None:
    edited = [*A1[:66], *B1]
    ends = [32, 64, 96, 128, len(edited)]
    fresh = Session(engine)
    for end in ends:
        expected = fresh.prefill(edited[len(fresh.tokens) : end])
    expected_text = [token for r in fresh.decode(expected, max_tokens=16) for token in r.emitted]
    store = new_store(engine)
    ask(store, [*A1, *A2], "A")
    start, logits, text = ask(store, edited, "A", 16)
    assert (start.source, start.reused_tokens, start.fresh_tokens) == ("checkpoint", 64, len(edited) - 64)
    np.testing.assert_array_equal(logits, expected)
    assert text == expected_text
    assert store.parked == ()


def test_at_least_one_token_is_always_computed(engine: Engine) -> None:
    store = new_store(engine)
    ask(store, A1, "A", 1)
    assert seen(store) == A1
    start, logits, _ = ask(store, A1, "A", 1)  # the whole state is one token too many
    assert (start.source, start.reused_tokens) == ("checkpoint", 64)
    ask(store, B1, "B", 1)
    assert store.match(A1).tokens == 64
    assert store.match([*A1, 1]).tokens == 70
    assert store.match(A1[:33]).tokens == 32
    assert store.match(A1[:32]).tokens == 0
    assert store.match([*A1[:50], *B1]).tokens == 32
    fresh = Session(engine)
    fresh.prefill(A1[:32])
    fresh.prefill(A1[32:64])
    np.testing.assert_array_equal(logits, fresh.prefill(A1[64:]))


def test_checkpoints_are_kept_by_count_and_those_past_the_edit_are_gone(engine: Engine) -> None:
    store = new_store(engine)
    ask(store, TOKENS[:200], "A", 1)
    assert store.live is not None
    assert [c.num_tokens for c in store.live.checkpoints] == [32, 160, 192]  # the root and the newest
    ask(store, [*TOKENS[:170], *TOKENS[300:310]], "A", 1)
    assert [c.num_tokens for c in store.live.checkpoints] == [32, 160]
    assert store.host_bytes() == 2 * checkpoint_bytes(engine)
    store = new_store(engine, checkpoints=0)
    ask(store, TOKENS[:200], "A", 1)
    assert store.live is not None
    assert (store.live.checkpoints, store.host_bytes()) == ((), 0)


def test_turns_and_the_root_are_stored(engine: Engine) -> None:
    store = new_store(engine, rule=CheckpointRule(every=0, root=20))
    start = store.start(A1, "A", turns=(5, 25, 40, 61))
    store.read(start)
    assert store.live is not None
    assert [c.num_tokens for c in store.live.checkpoints] == [25, 61]
    assert [(s.start, s.end) for s in start.segments] == [(0, 25), (25, 61), (61, 70)]


def test_another_conversation_may_use_a_shared_prefix_and_leaves_it_there(engine: Engine) -> None:
    store = new_store(engine)
    ask(store, [*A1, *A2], "A")
    ask(store, C1, "C")
    before = image_hash(store.parked[0].image)
    shared = [*A1[:40], *B1]
    start, logits, _ = ask(store, shared, "B")
    assert (start.source, start.reused_tokens) == ("parked", 32)
    assert parked_names(store) == ["A", "C"]
    assert image_hash(store.parked[0].image) == before
    fresh = Session(engine)
    for end in (32, 64, 96, len(shared)):
        expected = fresh.prefill(shared[len(fresh.tokens) : end])
    np.testing.assert_array_equal(logits, expected)
    assert store.host_bytes() < store.parked_bytes + 4 * checkpoint_bytes(engine)


def test_a_shared_prefix_of_the_live_one_is_used_where_it_lies_and_that_one_is_parked(engine: Engine) -> None:
    log = Log()
    store = new_store(engine, log)
    ask(store, [*A1, *A2], "A")
    whole = seen(store)
    start = ask(store, [*A1[:40], *B1], "B")[0]
    assert (start.source, start.reused_tokens) == ("checkpoint", 32)
    assert parked_names(store) == ["A"]
    assert log.kinds() == ["park", "restore"]
    assert log.moves[-1].owner is Owner.CHECKPOINTS
    start, logits, _ = ask(store, [*whole, *C1], "A")
    assert (start.source, start.reused_tokens) == ("parked", len(whole))
    again = new_store(engine)
    ask(again, [*A1, *A2], "A")
    np.testing.assert_array_equal(logits, ask(again, [*whole, *C1], "A")[1])


@pytest.mark.parametrize("kept", [50, 20])
def test_requests_without_a_name_are_told_apart_by_their_tokens(engine: Engine, kept: int) -> None:
    store = new_store(engine)
    first = ask(store, A1, count=1)[0].conversation
    assert ask(store, [*seen(store), *A2], count=1)[0].conversation == first
    start = ask(store, [*A1[:kept], *B1], count=1)[0]
    assert (start.conversation == first) == (kept == 50)  # half of it is shared
    assert parked_names(store) == ([] if kept == 50 else [first])
    second = ask(store, C1, count=1)[0].conversation
    assert second not in (first, start.conversation)
    back = [*A1[:kept], *B1, *A2]
    assert ask(store, back, count=1)[0].conversation == start.conversation


# --- what is parked, and what goes


def test_bytes_are_those_of_the_arrays_and_stay_within_the_budget(engine: Engine) -> None:
    one = image_bytes(engine, 80)
    log = Log()
    store = new_store(engine, log, checkpoints=0, budget_bytes=2 * one + one // 2)
    for i, name in enumerate("ABCDE"):
        ask(store, [i, *B1[1:]], name, 1)
        assert store.parked_bytes == sum(x.nbytes for c in store.parked for x in c.arrays()) == store.host_bytes()
        assert store.parked_bytes <= store.settings.budget_bytes
    assert parked_names(store) == ["C", "D"]
    assert log.kinds() == ["park", "park", "drop", "park", "drop", "park"]
    drops = [move for move in log.moves if move.kind is MoveKind.DROP]
    assert [move.bytes for move in drops] == [one, one]
    assert store.num_dropped == 2


def test_the_oldest_unpinned_one_goes_and_not_the_one_that_is_wanted(engine: Engine) -> None:
    store = new_store(engine, checkpoints=0, slots=2)
    for i, name in enumerate("ABC"):
        ask(store, [i, *B1[1:]], name, 1)
    assert parked_names(store) == ["A", "B"]
    ask(store, [0, *B1[1:], 5], "A", 1)  # A is the oldest, and about to be restored
    assert parked_names(store) == ["C"]
    ask(store, [3, *B1[1:]], "D", 1)
    store.pin("C")
    ask(store, [4, *B1[1:]], "E", 1)
    assert parked_names(store) == ["C", "D"]
    store.pin("D")
    log = Log()
    store.on_note = log.notes.append
    ask(store, [5, *B1[1:]], "F", 1)
    assert parked_names(store) == ["C", "D"]
    assert "skip parking of E (conversation.slots=2 are taken)" in log.notes
    store.drop("C")
    assert parked_names(store) == ["D"]


def test_what_a_newer_one_begins_with_is_superseded(engine: Engine) -> None:
    store = new_store(engine, checkpoints=0)
    ask(store, A1, "A", 1)
    ask(store, B1, "B", 1)
    ask(store, [*A1, *A2], "A2", 1)  # copies A, which stays
    assert sorted(parked_names(store)) == ["A", "B"]
    ask(store, C1, "C", 1)
    assert sorted(parked_names(store)) == ["A2", "B"]


@pytest.mark.parametrize(
    ("changes", "available", "reason"),
    [
        ({}, lambda: None, "available RAM is unknown"),
        ({"budget_bytes": 0}, lambda: RAM, "conversation.budget_mib=0"),
        ({"budget_bytes": 1000}, lambda: RAM, "has no room for it"),
        ({"slots": 0}, lambda: RAM, "conversation.slots=0"),
        ({}, lambda: 10 * MIB, "conversation.min_free_mib=10"),
    ],
)
def test_a_conversation_that_is_not_admitted_is_not_copied(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, changes: dict, available: object, reason: str
) -> None:
    log = Log()
    store = new_store(engine, log, **changes)
    store.available_ram = available  # type: ignore[assignment]
    ask(store, A1, "A", 1)
    with monkeypatch.context() as patch:
        patch.setattr(conversations, "capture", lambda session: pytest.fail("copied"))
        ask(store, B1, "B", 1)
    assert [note for note in log.notes if "skip parking of A" in note and reason in note]
    assert (store.parked, log.kinds()) == ((), [])
    assert ask(store, [*A1, 1], "A", 1)[0].source == "none"


@pytest.mark.parametrize("later", [None, 9 * MIB])
def test_ram_is_looked_at_again_after_the_copy(engine: Engine, later: int | None) -> None:
    log = Log()
    store = new_store(engine, log)
    ask(store, A1, "A", 1)
    answers = [RAM, later]
    store.available_ram = lambda: answers.pop(0)
    ask(store, B1, "B", 1)
    assert store.parked == ()
    assert [note for note in log.notes if "skip parking of A" in note and "(after the copy)" in note]


def test_where_the_copy_needs_their_ram_the_oldest_go_first(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_store(engine, checkpoints=0, slots=1)
    ask(store, A1, "A", 1)
    ask(store, B1, "B", 1)
    kept, capture = [], conversations.capture

    def watched(session: Session) -> snapshots.Image:
        kept.append(parked_names(store))
        return capture(session)

    monkeypatch.setattr(conversations, "capture", watched)
    tight = store.settings.min_free_bytes + image_bytes(engine, 80) - 1
    store.available_ram = lambda: tight
    ask(store, C1, "C", 1)
    store.available_ram = lambda: RAM
    ask(store, A1, "A", 1)
    assert kept == [[], ["B"]]  # gone before the copy; still there during it
    assert parked_names(store) == ["C"]


def test_memory_that_the_system_refuses_is_no_failure(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(session: Session) -> None:
        raise MemoryError

    log = Log()
    store = new_store(engine, log)
    ask(store, A1, "A", 1)
    monkeypatch.setattr(conversations, "capture", refuse)
    ask(store, B1, "B", 1)
    assert "skip parking of A (the system refused the memory)" in log.notes


# --- failures


class Fault(Exception):
    """Injected."""


def contents(store: ConversationStore) -> list[tuple]:
    return [(c.name, c.order, image_hash(c.image), len(c.checkpoints)) for c in store.parked]


@pytest.mark.parametrize("kind", [MoveKind.PARK, MoveKind.RESTORE, MoveKind.CHECKPOINT])
@pytest.mark.parametrize("stage", ["prepared", "copied"])
def test_a_fault_leaves_what_is_stored_as_it_was(engine: Engine, kind: MoveKind, stage: str) -> None:
    store = new_store(engine, slots=2)
    for i, name in enumerate("ABC"):
        ask(store, [i, *B1[1:]], name)
    before, wanted = contents(store), [*store.parked[0].token_ids.tolist(), *A2]

    def fail(at: MoveKind, reached: str) -> None:
        if (at, reached) == (kind, stage):
            raise Fault

    store.fault = fail
    tokens = seen(store)
    with pytest.raises(Fault):
        ask(store, wanted, "A")
    store.fault = lambda at, reached: None
    if kind is MoveKind.PARK:  # it failed before anything changed: C is still live
        assert contents(store) == before
        assert seen(store) == tokens
    elif kind is MoveKind.RESTORE:  # C has been parked, and A is still there
        assert [c.name for c in store.parked] == ["A", "C"]
        assert contents(store)[0] == before[0]
    start, logits, text = ask(store, wanted, "A")
    assert start.source in ("parked", "checkpoint", "live")
    uninterrupted = new_store(engine)
    ask(uninterrupted, [0, *B1[1:]], "A")
    start, expected, expected_text = ask(uninterrupted, wanted, "A")
    np.testing.assert_array_equal(logits, expected)
    assert text == expected_text


@pytest.mark.parametrize("stage", ["prepared", "copied"])
def test_a_fault_while_going_back_leaves_a_usable_store(engine: Engine, stage: str) -> None:
    store = new_store(engine)
    ask(store, [*A1, *A2], "A")
    tokens = seen(store)

    def fail(at: MoveKind, reached: str) -> None:
        if (at, reached) == (MoveKind.RESTORE, stage):
            raise Fault

    store.fault = fail
    with pytest.raises(Fault):
        store.start([*A1[:40], *B1], "A")
    store.fault = lambda at, reached: None
    assert (store.live is not None) == (stage == "prepared")
    start = ask(store, [*tokens, *B1], "A")[0]
    assert start.source == ("live" if stage == "prepared" else "none")


def test_a_sequence_that_others_took_over_or_a_failed_step_left_is_not_live(engine: Engine) -> None:
    store = new_store(engine)
    ask(store, A1, "A")
    Session(engine)
    assert store.live is None
    assert ask(store, [*A1, 1], "A")[0].source == "none"
    assert store.live is not None
    store.live.session.state.hidden.delete()
    assert store.live is None
    assert ask(store, A1, "A")[0].source == "none"


def test_there_is_never_room_for_two_states(engine: Engine) -> None:
    store = new_store(engine)
    before = ask(store, [*A1, *A2], "A")[0].session
    states = [before.state]
    store.start([*A1[:40], *B1], "A")
    assert all(x.is_deleted() for x in jax.tree.leaves([b for b in states[0].blocks if isinstance(b, GdnState)]))
    states.append(before.state)
    store.start(B1, "B")  # a new session
    store.start([*A1[:40], *C1], "A")  # a restored one
    assert all(x.is_deleted() for x in jax.tree.leaves(states[1]))


def test_what_cannot_be_read_is_refused_before_anything_is_parked(engine: Engine) -> None:
    store = new_store(engine)
    ask(store, A1, "A")
    with pytest.raises(ConfigError):
        store.start([engine.geometry.vocab_size], "B")
    with pytest.raises(DoesNotFit, match="513 tokens does not fit into 512 cells"):
        store.start([1] * 513, "B")
    assert store.live is not None
    assert (store.live.name, store.parked) == ("A", ())


def test_cells_can_be_moved_between_parking_and_restoring(engine: Engine) -> None:
    store = new_store(engine)
    ask(store, A1, "A")
    whole, first = seen(store), state_hash(store.live.session)  # type: ignore[union-attr]
    ask(store, B1, "B")
    calls = []

    def shuffle(match: conversations.Match) -> None:
        calls.append((match.tokens, parked_names(store)))
        pages = engine.residency.kv_pages
        turned = np.roll(pages.reshape(-1), 5).reshape(pages.shape)
        engine.publish(replace(engine.residency, kv_pages=turned))

    start = store.start([*whole, *A2], "A", before_resume=shuffle)
    assert calls == [(len(whole), ["A", "B"])]
    assert state_hash(start.session) == first


def test_many_requests_with_faults_leave_nothing_behind_and_an_exact_state(engine: Engine) -> None:
    store = new_store(engine, slots=2, budget_bytes=3 * image_bytes(engine, 140) + 20 * checkpoint_bytes(engine))
    rng, histories, counts, faults = np.random.default_rng(0), {name: [] for name in "ABCD"}, [], 0
    # for every prefix that was ever read: the ends of the parts in which that can have happened
    ways: dict[tuple[int, ...], set[tuple[int, ...]]] = {(): {()}}

    def begin(prompt: list[int], name: str) -> Start:
        start = store.start(prompt, name)
        reached = ways[tuple(prompt[: start.reused_tokens])]
        for end in (end for segment in start.segments for _, end in segment.parts()):
            reached = {(*way, end) for way in reached}
            ways.setdefault(tuple(prompt[:end]), set()).update(reached)
        return start

    for i in range(400):
        name = str(rng.choice(list("ABCD")))
        kept = histories[name]
        if rng.random() < 0.3:
            kept = kept[: int(rng.integers(0, len(kept) + 1))]
        prompt = [*kept, *rng.integers(1, 400, 9).tolist()]
        where = str(rng.choice(["park", "restore", "checkpoint"])), str(rng.choice(["prepared", "copied"]))

        def fail(kind: MoveKind, stage: str, where: tuple = where, armed: bool = rng.random() < 0.2) -> None:
            if armed and (kind, stage) == where:
                raise Fault

        store.fault = fail
        try:
            start = begin(prompt, name)
            if rng.random() < 0.9:
                store.read(start)
            histories[name] = [] if len(prompt) > 120 else prompt
        except Fault:
            faults += 1
        assert store.live is None or store.live.session.tokens == prompt[: len(seen(store))] or store.live.name != name
        assert store.parked_bytes <= store.settings.budget_bytes
        assert len(store.parked) <= 2
        assert all(c.bytes == sum({id(x): x.nbytes for x in c.arrays()}.values()) for c in store.parked)
        if i >= 100 and store.live is not None:
            counts.append((len(jax.live_arrays()), sum(x.nbytes for x in jax.live_arrays())))
    assert faults > 10
    assert len(set(counts)) == 1
    store.fault = lambda kind, stage: None
    for name in "ABCD":
        store.read(begin([*histories[name], 1, 2, 3], name))
    finals = [(tuple(c.token_ids.tolist()), image_hash(c.image)) for c in store.parked]
    finals.append((tuple(seen(store)), state_hash(store.live.session)))  # type: ignore[union-attr]
    assert len(finals) == 3
    for tokens, found in finals:
        possible = []
        for way in ways[tokens]:
            fresh = Session(engine)
            for end in way:
                fresh.prefill(tokens[len(fresh.tokens) : end])
            possible.append(state_hash(fresh))
        assert found in possible

"""Rounds that are started before they are told what to read: which are, and that one in vain leaves no trace.

Programs on a CPU do not wait: here, a round that is really started ahead finds no words, keeps no token, and the host
starts it once more; in one test a function on the host waits in place of the kernel. That a GPU waits is for
`tests/kernels/test_await_words.py`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.engine import decode, rounds
from strata_jax.engine import session as session_module
from strata_jax.engine.conversations import ConversationSettings, ConversationStore
from strata_jax.engine.engine import Engine
from strata_jax.engine.mailbox import Mailbox
from strata_jax.engine.moves import Mover
from strata_jax.engine.replacement import start_values
from strata_jax.engine.rounds import RoundAhead
from strata_jax.engine.session import Session, fresh_session
from strata_jax.engine.snapshots import Image, capture, restore
from strata_jax.sampling import Sampling
from tests.engine.conftest import load
from tests.engine.policy_runs import SMALL, Engines
from tests.oracle.models import ModelStore

PROMPT = list(range(3, 43))
NEW = 24


@pytest.fixture(scope="module")
def engines(models: ModelStore) -> Callable[[int], Engine]:
    path, kept = models.synthetic("nano", 0, echo_mtp=0.1), dict[int, Engine]()

    def get(window: int) -> Engine:
        if window not in kept:
            kept[window] = load(path, spec_window=window)
        return kept[window]

    return get


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rounds are really started ahead; the positions before them."""
    found, start_ahead = list[int](), session_module.start_ahead

    def started(session: Session, *how: Any) -> None:
        found.append(len(session.tokens))
        start_ahead(session, *how)
        ahead = session.engine.ahead
        assert ahead is not None
        assert ahead.found is not None
        jax.block_until_ready(ahead.found)  # it has looked for its words before they are there
        engine = session.engine
        arrays = jax.tree.leaves((engine.arrays, engine.tables, engine.values, session.state))
        assert not any(array.is_deleted() for array in arrays)  # whoever looks at them now finds all

    monkeypatch.setattr(session_module, "start_ahead", started)
    monkeypatch.setattr(rounds, "backend", SimpleNamespace(interprets=lambda: False))
    return found


def run(engine: Engine, sampling: Sampling, between: Callable[[], Any] = lambda: None) -> tuple[list[Any], list[Any]]:
    """Text, then tokens through windows, then a chunk: what was kept, and every logit and value of the state."""
    session, texts = fresh_session(engine), list[Any]()
    for record in session.decode(session.prefill(PROMPT), max_tokens=NEW, sampling=sampling):
        texts.append((record.position, record.emitted, record.lookups, record.hits))
        between()
    session.read_windows([5, 6, 7, 8, 9, 10, 11])
    logits = [session.last_logits(), session.prefill([8, 9], want="all")]
    more = list(session.decode(logits[1][-1:], max_tokens=4, sampling=sampling))
    texts += [(record.position, record.emitted) for record in more]
    return texts, [np.asarray(x) for x in (*logits, *jax.tree.leaves(session.state))]


def emitted(session: Session, logits: np.ndarray, max_tokens: int) -> list[tuple[int, ...]]:
    """The tokens of each round."""
    return [record.emitted for record in session.decode(logits, max_tokens=max_tokens)]


def after_the_prompt(engine: Engine) -> tuple[Session, np.ndarray, Image, list[tuple[int, ...]]]:
    """A session, its logits, an image of it, and the twelve tokens that follow."""
    session = fresh_session(engine)
    logits = session.prefill(PROMPT)
    image = capture(session)
    expected = emitted(session, logits, 12)
    restore(session, image)
    return session, logits, image, expected


def assert_same(found: tuple[list[Any], list[Any]], expected: tuple[list[Any], list[Any]]) -> None:
    assert found[0] == expected[0]
    for mine, theirs in zip(found[1], expected[1], strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("window", [1, 3])
def test_a_round_that_is_told_too_late_leaves_no_trace(
    window: int, sampling: Sampling, engines: Callable[[int], Engine], request: pytest.FixtureRequest
) -> None:
    engine = engines(window)
    expected, begun = run(engine, sampling), engine.mailbox.begun
    plain = engine.mailbox.begun - begun
    begun = engine.mailbox.begun
    ahead = request.getfixturevalue("ahead")
    assert_same(run(engine, sampling), expected)
    assert plain == 0
    assert len(ahead) > 5
    assert engine.ahead is None
    assert engine.mailbox.begun > begun + len(ahead)


def test_a_round_that_waits_until_it_is_told_gives_the_same_text(
    models: ModelStore, engines: Callable[[int], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of the kernel a function on the host looks for the words, for up to two seconds."""
    expected = run(engines(3), Sampling())
    found_late = list[bool]()

    def look(number: np.ndarray, num_words: int) -> np.ndarray:
        memory, until, late = engine.mailbox._boxes[num_words][1], time.monotonic() + 2, False
        while memory[0] != number[0] and time.monotonic() < until:
            late = True
            time.sleep(0.0005)
        found_late.append(late and bool(memory[0] == number[0]))
        return memory[1:].copy() if memory[0] == number[0] else np.zeros(num_words, np.int32)

    def await_words(box: jax.Array, number: jax.Array, backend: str) -> jax.Array:
        words = jax.ShapeDtypeStruct((box.shape[0] - 1,), jnp.int32)
        return jax.pure_callback(partial(look, num_words=words.shape[0]), words, number)

    monkeypatch.setattr(decode, "await_words", await_words)
    monkeypatch.setattr(rounds, "backend", SimpleNamespace(interprets=lambda: False))
    engine = load(models.synthetic("nano", 0, echo_mtp=0.1), spec_window=3)
    found = run(engine, Sampling(), lambda: time.sleep(0.01))
    assert sum(found_late) > 3
    assert_same(found, expected)


@pytest.mark.parametrize("window", [1, 3])
def test_what_comes_between_rounds_withdraws_the_one_that_waits(
    window: int, engines: Callable[[int], Engine], request: pytest.FixtureRequest
) -> None:
    engine = engines(window)
    expected, mover, waited = run(engine, Sampling()), Mover(engine), list[bool]()

    def swap() -> None:
        """Take an expert out of its slot, and put it back."""
        waited.append(engine.ahead is not None)
        mover.refill(mover.evict([3]))
        assert engine.ahead is None

    ahead = request.getfixturevalue("ahead")
    found = run(engine, Sampling(), swap)
    assert_same(found, expected)
    assert ahead
    assert any(waited)


def test_replacement_does_not_count_a_round_in_vain(models: ModelStore, request: pytest.FixtureRequest) -> None:
    engines = Engines(models.synthetic("nano", 0, echo_mtp=0.1, overrides=SMALL), spec_window=2)
    engine = engines.get(("replacement",))
    assert engine.values is not None
    first = engine.residency

    def text() -> tuple[list[tuple[int, ...]], list[np.ndarray]]:
        assert engine.residency.num_slots == first.num_slots  # the host has read what rounds have changed
        engine.publish(first)
        engine.copy_experts(first.residents(range(first.num_slots)))
        engine.values = start_values(engine.plan.order, engine.plan.num_blocks)
        session = fresh_session(engine)
        records = list(session.decode(session.prefill(PROMPT[:20])[-1:], max_tokens=NEW))
        return [r.emitted for r in records], [np.asarray(x) for x in jax.tree.leaves((engine.values, engine.tables))]

    expected = text()
    ahead = request.getfixturevalue("ahead")
    assert_same(text(), expected)
    assert len(ahead) > 5


@pytest.mark.parametrize("window", [1, 3])
def test_a_round_in_vain_changes_no_bit_of_the_state_or_the_cells(
    window: int, engines: Callable[[int], Engine], request: pytest.FixtureRequest
) -> None:
    engine = engines(window)

    def ended_early() -> list[np.ndarray]:
        session = fresh_session(engine)
        decoding = session.decode(session.prefill(PROMPT), max_tokens=NEW)
        for _ in range(4):
            next(decoding)
        decoding.close()
        return [np.asarray(x) for x in jax.tree.leaves((session.state, engine.arrays, engine.tables))]

    ended_early()
    expected = ended_early()
    ahead = request.getfixturevalue("ahead")
    for mine, theirs in zip(ended_early(), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert ahead


def test_a_round_that_is_broken_off_while_the_next_one_waits_leaves_the_engine_running(
    engines: Callable[[int], Engine], ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(1)
    session, logits, image, expected = after_the_prompt(engine)
    read = session_module.read_report

    def interrupted(*args: Any) -> Any:
        if len(session.tokens) == len(PROMPT) + 3 and engine.ahead is not None:
            raise KeyboardInterrupt
        return read(*args)

    monkeypatch.setattr(session_module, "read_report", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(session.decode(logits, max_tokens=12))
    monkeypatch.setattr(session_module, "read_report", read)
    assert engine.ahead is None
    assert engine.stopped is None
    with pytest.raises(RuntimeError, match="a round was broken off after 43 tokens"):
        session.last_logits()
    restore(session, image)
    assert emitted(session, logits, 12) == expected


def test_a_round_ahead_that_nobody_knows_of_is_withdrawn_all_the_same(
    engines: Callable[[int], Engine], ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host may be interrupted when the programs have been started, and before it notes that."""
    engine = engines(1)
    session, logits, image, expected = after_the_prompt(engine)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(rounds, "RoundAhead", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(session.decode(logits, max_tokens=12))
    assert engine.mailbox.told == engine.mailbox.begun
    restore(session, image)
    assert emitted(session, logits, 12) == expected


@pytest.mark.parametrize("what", ["the next round", "the end"])
def test_a_round_is_withdrawn_later_if_telling_it_was_interrupted(
    what: str, engines: Callable[[int], Engine], ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(1)
    session = fresh_session(engine)
    decoding = session.decode(session.prefill(PROMPT), max_tokens=12)
    for _ in range(4):
        next(decoding)
    assert engine.ahead is not None

    def interrupted(self: Mailbox, words: np.ndarray) -> None:
        raise KeyboardInterrupt

    go_on = partial(next, decoding) if what == "the next round" else decoding.close
    with monkeypatch.context() as patched:
        patched.setattr(Mailbox, "tell", interrupted)
        with pytest.raises(KeyboardInterrupt):
            go_on()
    assert engine.stopped is None
    assert engine.mailbox.told < engine.mailbox.begun
    session = fresh_session(engine)
    assert engine.mailbox.told == engine.mailbox.begun
    expected = emitted(session, session.prefill(PROMPT), 12)
    session = fresh_session(engine)
    assert emitted(session, session.prefill(PROMPT), 12) == expected


def test_a_generator_that_is_collected_late_leaves_the_rounds_of_others_alone(
    engines: Callable[[int], Engine], ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, collected = engines(1), list[bool]()
    session = fresh_session(engine)
    expected = emitted(session, session.prefill(PROMPT), 14)
    left = Session(engine)
    holder = SimpleNamespace(decoding=left.decode(left.prefill(PROMPT[:9]), max_tokens=14))
    holder.itself = holder  # a cycle: it stays until somebody looks for such
    next(holder.decoding)
    next(holder.decoding)
    session = Session(engine)
    decoding = session.decode(session.prefill(PROMPT), max_tokens=14)
    found = [next(decoding).emitted for _ in range(4)]
    del holder, left
    fits = RoundAhead.fits

    def fits_after_collecting(self: RoundAhead, *args: Any) -> bool:
        gc.collect()  # as any allocation may
        collected.append(True)
        return fits(self, *args)

    monkeypatch.setattr(RoundAhead, "fits", fits_after_collecting)
    assert [*found, *(record.emitted for record in decoding)] == expected
    assert collected


def test_what_is_captured_between_rounds_is_the_state_before_the_one_that_waits(
    engines: Callable[[int], Engine], ahead: list[int]
) -> None:
    engine = engines(1)
    session = fresh_session(engine)
    decoding = session.decode(session.prefill(PROMPT), max_tokens=12)
    some, images = list[int](), dict[int, Image]()
    for record in decoding:
        some += record.emitted
        if engine.ahead is not None:
            images[len(session.tokens) - len(PROMPT)] = capture(session)
            assert engine.ahead is None
    assert len(images) > 2
    for count, image in images.items():
        restore(session, image)
        rest = session.decode(session.prefill([some[count]]), max_tokens=len(some) - count - 1)
        assert [t for record in rest for t in record.emitted] == some[count + 1 :]


def test_a_conversation_whose_next_round_waits_is_live_and_is_parked(
    engines: Callable[[int], Engine], ahead: list[int]
) -> None:
    engine = engines(1)
    store = ConversationStore(engine, ConversationSettings(budget_bytes=2**30, min_free_bytes=0))
    start = store.start(PROMPT, "first")
    decoding = start.session.decode(store.read(start), max_tokens=NEW)
    some = [next(decoding).emitted[0] for _ in range(4)]
    assert engine.ahead is not None
    live = store.live
    assert live is not None
    assert live.session is start.session
    store.read(store.start(list(range(100, 130)), "second"))  # the first request has not been ended
    assert engine.ahead is None
    assert [c.name for c in store.parked] == ["first"]
    again = store.start([*PROMPT, *some], "first")
    assert again.reused_tokens == len(PROMPT) + 3
    rest = again.session.decode(store.read(again), max_tokens=NEW - 4)
    found = [*some, *(t for record in rest for t in record.emitted)]
    session = fresh_session(engine)
    assert found == [t for record in session.decode(session.prefill(PROMPT), max_tokens=NEW) for t in record.emitted]


def test_a_request_that_ends_early_leaves_no_round_behind(engines: Callable[[int], Engine], ahead: list[int]) -> None:
    engine = engines(1)
    session = fresh_session(engine)
    logits = session.prefill(PROMPT)
    whole = [r.emitted[0] for r in session.decode(logits, max_tokens=12)]
    session = fresh_session(engine)
    decoding = session.decode(session.prefill(PROMPT), max_tokens=12)
    some = [next(decoding).emitted[0] for _ in range(5)]
    assert len(ahead) > 5
    decoding.close()
    assert engine.ahead is None
    rest = [r.emitted[0] for r in session.decode(_logits_of(session, some[-1]), max_tokens=7)]
    assert [*some, *rest][: len(whole)] == whole
    stop = frozenset({whole[4]})
    session = fresh_session(engine)
    list(session.decode(session.prefill(PROMPT), max_tokens=12, stop_ids=stop))
    assert engine.ahead is None


def _logits_of(session: Session, token: int) -> np.ndarray:
    """What is chosen after a token that has been decided, but not read."""
    return session.prefill([token])


@pytest.mark.parametrize(
    ("window", "min_p", "count_uses", "max_tokens", "expected"),
    [
        (1, 0.0, False, 6, True), (3, 0.0, False, 20, True),
        (3, 0.5, False, 20, False),  # the next window may be of one token or of three
        (1, 0.0, True, 6, False),  # uses are read after the report
        (1, 0.0, False, 2, False),  # none follows
    ],
)  # fmt: skip
def test_only_a_round_that_is_sure_to_follow_is_started_ahead(
    window: int,
    min_p: float,
    count_uses: bool,
    max_tokens: int,
    expected: bool,
    engines: Callable[[int], Engine],
    ahead: list[int],
) -> None:
    session = fresh_session(engines(window), count_uses=count_uses)
    list(session.decode(session.prefill(PROMPT), max_tokens=max_tokens, min_p=min_p))
    assert bool(ahead) == expected
    list(session.force([5, 6, 7]))
    assert bool(ahead) == expected  # the logits of each are read


def test_no_round_is_started_ahead_past_the_last_cell(models: ModelStore, ahead: list[int]) -> None:
    engine = load(models.synthetic("nano", 0, echo_mtp=0.1), spec_window=1, context_cells=64)
    session = Session(engine)
    records = list(session.decode(session.prefill(PROMPT), max_tokens=100))
    assert len(session.tokens) == 64 == len(PROMPT) + len(records) - 1
    assert max(ahead) == 62  # before the round at 62 was counted, that at 63 was started


def test_a_round_that_keeps_no_token_though_it_was_told_is_an_error(
    engines: Callable[[int], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(1)
    session = fresh_session(engine)
    logits = session.prefill(PROMPT)
    decoding = session.decode(logits, max_tokens=12)
    next(decoding)

    def untold(self: Mailbox, words: np.ndarray) -> None:
        self.told += 1

    with monkeypatch.context() as patched:
        patched.setattr(Mailbox, "tell", untold)
        with pytest.raises(RuntimeError, match="told what to read has kept no token"):
            next(decoding)
    list(fresh_session(engine).decode(logits, max_tokens=4))  # those that follow are told

"""A round in parts: the same bits however many there are, written over those of the round before."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from strata_jax.engine import rounds
from strata_jax.engine import session as session_module
from strata_jax.engine.engine import Engine
from strata_jax.engine.sampler import sampling_arrays
from strata_jax.engine.session import Session
from strata_jax.engine.snapshots import capture, restore
from strata_jax.sampling import Sampling
from tests.engine.conftest import load
from tests.oracle.models import ModelStore

PROMPT = list(range(3, 43))


@pytest.fixture(scope="module")
def engine(models: ModelStore) -> Engine:
    return load(models.synthetic("nano", 0, echo_mtp=0.1), spec_window=2)


def outputs(engine: Engine) -> tuple[list[tuple[int, ...]], list[np.ndarray]]:
    """Text with drafts, then forced tokens; every logit, use and value of the state."""
    session = Session(engine, count_uses=True)
    records = list(session.decode(session.prefill(PROMPT), max_tokens=24))
    arrays: list[Any] = [r.uses for r in records if r.uses is not None]
    arrays += [logits for _, logits in session.force([5, 6, 7])]
    return [r.emitted for r in records], [np.asarray(x) for x in (*arrays, *jax.tree.leaves(session.state))]


@pytest.mark.parametrize(("size", "firsts"), [(1, {0, 1, 2, 3}), (3, {0, 3})])
def test_a_round_in_parts_gives_the_bits_of_one_in_one_part(
    size: int, firsts: set[int], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 3 < engine.geometry.num_layers <= rounds.PART_BLOCKS
    text, arrays = outputs(engine)
    assert len(text) < 24  # drafts were kept
    started, run_part = set[int](), engine.programs.round_part

    def round_part(form: Any, first: int, *args: Any) -> Any:
        started.add(first)
        return run_part(form, first, *args)

    monkeypatch.setattr(engine.programs, "round_part", round_part)
    monkeypatch.setattr(rounds, "PART_BLOCKS", size)
    text_in_parts, arrays_in_parts = outputs(engine)
    assert started == firsts
    assert text_in_parts == text
    assert len(arrays_in_parts) == len(arrays)
    for found, expected in zip(arrays_in_parts, arrays, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_round_is_written_over_the_one_before(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "PART_BLOCKS", 1)
    session, how, programs = Session(engine), sampling_arrays(Sampling()), engine.programs
    session.prefill(PROMPT)

    def places() -> dict[str, int]:
        """Addresses of all that a round leaves, of both window sizes."""
        found = jax.tree_util.tree_leaves_with_path(programs.places)
        return {jax.tree_util.keystr(path): leaf.unsafe_buffer_pointer() for path, leaf in found}

    with engine.rounds():
        for window in ([7], [7, 9]):
            logits = session._round(window, [], how, 0.5, 0)[2]
            before = places()
            later = session._round(window, [], how, 0.5, 0)[2]
            assert places() == before
            assert later.unsafe_buffer_pointer() in before.values()
            assert logits.is_deleted()
        assert {"decode", "decode end"} == {key[0] for key in programs.places}
        assert len(programs.places) == 2 * (len(rounds.parts_of(engine.geometry.num_layers)) + 1)
    assert not programs.places


def test_what_rounds_leave_goes_with_them(engine: Engine) -> None:
    session = Session(engine)
    decoding = session.decode(session.prefill(PROMPT), max_tokens=20)
    next(decoding)
    next(decoding)
    assert engine.programs.places
    decoding.close()  # the request is given up
    assert not engine.programs.places
    list(session.force([5, 6]))
    session.read_windows([7, 8, 9])
    assert not engine.programs.places


def test_a_sequence_whose_round_was_broken_off_goes_on_from_before_it_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is that after the round, which the host has not read: going on would be another text."""
    session = Session(engine)
    logits = session.prefill(PROMPT)
    image, seen = capture(session), list[int]()
    expected = [record.emitted for record in session.decode(logits, max_tokens=12)]
    restore(session, image)
    read = session_module.read_report

    def interrupted(words: Any, num_rows: int) -> Any:
        seen.append(num_rows)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return read(words, num_rows)

    monkeypatch.setattr(session_module, "read_report", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(session.decode(logits, max_tokens=12))
    monkeypatch.undo()
    message = f"cannot go on: a round was broken off after {len(session.tokens)} tokens"
    assert len(session.tokens) > len(PROMPT)
    for go_on in (lambda: session.prefill([1]), session.last_logits, lambda: list(session.force([1]))):
        with pytest.raises(RuntimeError, match=message):
            go_on()
    restore(session, image)
    assert [record.emitted for record in session.decode(logits, max_tokens=12)] == expected


def test_an_engine_that_lost_its_arena_in_a_round_says_so(models: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(models.synthetic("nano", 0, echo_mtp=0.1), spec_window=2)
    session = Session(engine)
    logits = session.prefill(PROMPT)

    def failing(*args: Any) -> Any:
        raise OSError("no memory")

    monkeypatch.setattr(engine.programs, "round_end", failing)
    with pytest.raises(OSError, match="no memory"):
        list(session.decode(logits, max_tokens=12))
    with pytest.raises(RuntimeError, match=r"engine has stopped: a round failed and left no arena \(no memory\)"):
        Session(engine).prefill(PROMPT)

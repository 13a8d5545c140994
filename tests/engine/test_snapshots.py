"""Captured state: exact whatever came in between, wherever the cells lie, and shared with nothing."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from strata_jax.engine import row_copies, snapshots
from strata_jax.engine.engine import Engine
from strata_jax.engine.session import Session
from strata_jax.engine.snapshots import (
    SECTIONS,
    Image,
    capture,
    checkpoint_bytes,
    image_bytes,
    image_hash,
    restore,
    roll_back,
    state_hash,
    take_checkpoint,
)
from tests.engine.conftest import LoadEngine, load
from tests.oracle.models import PARITY_CASES, ModelStore

TOKENS = PARITY_CASES[0].token_ids
PROMPT, TURN, OTHER = TOKENS[:70], TOKENS[100:130], TOKENS[200:390]


@pytest.fixture(scope="module")
def engine(models: ModelStore) -> Engine:
    """A model whose drafts are right some of the time."""
    return load(models.synthetic("nano", 0, echo_mtp=0.1))


def answer(session: Session, logits: np.ndarray, count: int) -> list[int]:
    return [token for r in session.decode(logits, max_tokens=count) for token in r.emitted]


def read_parts(session: Session, tokens: list[int], *ends: int) -> np.ndarray:
    """Read up to each of the ends."""
    for end in ends:
        logits = session.prefill(tokens[len(session.tokens) : end])
    return logits


def conversation(engine: Engine) -> Session:
    """A session in the middle of a conversation: a prompt and an answer with drafts."""
    session = Session(engine)
    answer(session, session.prefill(PROMPT), 21)
    return session


def going_on(session: Session) -> tuple[np.ndarray, list[int]]:
    """Logits after a further turn and 16 greedy tokens."""
    logits = session.prefill(TURN)
    return logits, answer(session, logits, 16)


def assert_same(found: tuple[np.ndarray, list[int]], expected: tuple[np.ndarray, list[int]]) -> None:
    np.testing.assert_array_equal(found[0], expected[0])
    assert found[1] == expected[1]


def shuffled_pages(engine: Engine) -> None:
    """Give every K/V cell another page."""
    pages = engine.residency.kv_pages
    turned = np.roll(pages.reshape(-1), 7).reshape(pages.shape)
    engine.publish(replace(engine.residency, kv_pages=turned))
    engine.check_tables()


@pytest.mark.parametrize(
    "settings",
    [{}, {"spec_window": 1}, {"kv_type": "int8", "expert_slots": 10}, {"kv_type": "q4_0"}],
    ids=["drafts", "no drafts", "int8 cells, streamed experts", "q4_0 cells"],
)
def test_A_then_B_then_A_is_bit_exact(models: ModelStore, load_engine: LoadEngine, settings: dict) -> None:
    engine = load_engine(models.synthetic("nano", 0, echo_mtp=0.1), **settings)
    session = conversation(engine)
    expected_hash = state_hash(session)
    expected = going_on(session)
    image = capture(conversation(engine))
    assert image_hash(image) == expected_hash
    assert set(expected_hash) == set(SECTIONS)
    assert len(set(expected_hash.values())) == len(SECTIONS)
    Session(engine).prefill(OTHER)
    shuffled_pages(engine)
    Session(engine).prefill(OTHER)
    session = Session(engine)
    restore(session, image)
    assert session.tokens == image.token_ids.tolist()
    assert state_hash(session) == expected_hash
    assert_same(going_on(session), expected)
    assert image_hash(image) == expected_hash  # going on wrote to none of the image's arrays


def test_going_back_to_a_checkpoint_equals_a_fresh_read_of_the_same_chunks(engine: Engine) -> None:
    edited = [*PROMPT[:50], *OTHER[:90]]
    fresh = Session(engine)
    read_parts(fresh, edited, 50)
    at_checkpoint = state_hash(fresh)
    expected = read_parts(fresh, edited, 140), answer(fresh, fresh.last_logits(), 16)
    session = Session(engine)
    read_parts(session, PROMPT, 50)
    checkpoint = take_checkpoint(session)
    answer(session, read_parts(session, PROMPT, 70), 30)  # its rows and keys lie where the edited tail goes
    assert state_hash(session) != at_checkpoint
    roll_back(session, checkpoint)
    assert state_hash(session) == at_checkpoint
    assert_same((read_parts(session, edited, 140), answer(session, session.last_logits(), 16)), expected)
    roll_back(session, checkpoint)  # and once more
    assert state_hash(session) == at_checkpoint


def test_decoding_can_follow_at_once_and_drafts_as_it_would_have(engine: Engine) -> None:
    def decoded(session: Session) -> tuple[list[tuple[int, ...]], dict[str, str]]:
        rounds = [r.emitted for r in session.decode(session.last_logits(), max_tokens=24)]
        return rounds, state_hash(session)

    session = Session(engine)
    session.prefill(PROMPT)
    image, checkpoint = capture(session), take_checkpoint(session)
    expected = decoded(session)
    roll_back(session, checkpoint)
    assert decoded(session) == expected
    session = Session(engine)
    session.prefill(OTHER)
    restore(session, image)
    assert decoded(session) == expected


def test_a_checkpoint_inside_an_image_can_be_restored(engine: Engine) -> None:
    session = Session(engine)
    read_parts(session, PROMPT, 45)
    checkpoint, expected_hash = take_checkpoint(session), state_hash(session)
    answer(session, read_parts(session, PROMPT, 70), 20)
    image = capture(session)
    Session(engine).prefill(OTHER)
    session = Session(engine)
    restore(session, image, checkpoint)
    assert session.tokens == PROMPT[:45]
    assert state_hash(session) == expected_hash


def test_tokens_that_the_draft_block_missed_stay_missed(engine: Engine) -> None:
    session = Session(engine)
    session.prefill(PROMPT)
    list(session.force(TURN))
    image = capture(session)
    again = Session(engine)
    assert again.drafts_usable
    restore(again, image)
    assert not again.drafts_usable


@pytest.mark.parametrize("count", [1, 3, 4, 5, 64, 70])
def test_sizes_are_those_of_the_arrays(engine: Engine, count: int) -> None:
    session = Session(engine)
    session.prefill(PROMPT[:count])
    image = capture(session)
    assert image.bytes == sum(x.nbytes for x in image.arrays()) == image_bytes(engine, count)
    assert take_checkpoint(session).bytes == checkpoint_bytes(engine) == image.end.bytes


def test_only_the_used_prefix_is_copied(engine: Engine) -> None:
    def cells(count: int) -> int:
        return image_bytes(engine, count) - checkpoint_bytes(engine)

    assert cells(0) == 0
    page = engine.plan.cells_per_page
    assert cells(page) < cells(page + 1) == cells(page) + engine.plan.num_kv_layers * engine.plan.page_bytes + 4
    assert cells(3 * page) == 3 * cells(page)


SECTION_OF = [("gdn/0/memory", "gdn"), ("gdn/0/conv", "gdn"), ("ple/history", "ple"), ("mtp/hidden", "mtp")]


def altered(image: Image, name: str, index: tuple[int, ...]) -> Image:
    """The image with one value changed."""

    def change(arrays: snapshots.Arrays) -> dict[str, np.ndarray]:
        copies = {key: x.copy() for key, x in arrays.items()}
        if name in copies:
            copies[name][index] += 1
        return copies

    return replace(image, end=replace(image.end, arrays=change(image.end.arrays)), cells=change(image.cells))


def test_every_array_is_in_the_hash_of_its_section(engine: Engine) -> None:
    image = capture(conversation(engine))
    before = image_hash(image)
    names = [*image.end.arrays, *image.cells]
    assert {name.partition("/")[0] for name in names} == set(SECTIONS)
    for name in names:
        after = image_hash(altered(image, name, (0, 0) if name != "mtp/hidden" else (0,)))
        assert [section for section in SECTIONS if after[section] != before[section]] == [name.partition("/")[0]]


def test_what_lies_past_the_last_cell_of_a_page_does_not_count(engine: Engine) -> None:
    session = Session(engine)
    count = engine.plan.cells_per_page + 1
    session.prefill(PROMPT[:count])
    image = capture(session)
    layout = image.layout
    name = next(name for name in image.cells if name.endswith("/cells"))
    assert image_hash(altered(image, name, (1, layout.k_words))) == image_hash(image)
    assert image_hash(altered(image, name, (1, 0))) != image_hash(image)


def test_nothing_is_changed_where_a_state_does_not_belong(models: ModelStore, engine: Engine) -> None:
    image = capture(conversation(engine))
    session = Session(engine)
    session.prefill(PROMPT[:20])
    before = state_hash(session)
    wrong = dict(image.end.arrays)
    wrong["gdn/0/memory"] = wrong["gdn/0/memory"][:1]
    with pytest.raises(ValueError, match="another model or plan: gdn/0/memory"):
        restore(session, replace(image, end=replace(image.end, arrays=wrong)))
    with pytest.raises(ValueError, match="cells are laid out"):
        restore(session, replace(image, layout=replace(image.layout, kv_type="f16")))
    with pytest.raises(ValueError, match="not inside an image of 90"):
        restore(session, image, replace(image.end, num_tokens=91))
    with pytest.raises(ValueError, match="not inside a sequence of 20"):
        roll_back(session, replace(image.end, num_tokens=21))
    mapped = engine.residency
    pages = mapped.kv_pages.copy()
    pages[:, snapshots.num_pages(engine, 90) - 1 :] = -1
    engine.publish(replace(mapped, kv_pages=pages))
    with pytest.raises(RuntimeError, match="first 90 K/V cells are mapped"):
        restore(session, image)
    engine.publish(mapped)
    assert state_hash(session) == before
    assert session.tokens == PROMPT[:20]
    Session(engine)
    for use in (lambda: restore(session, image), lambda: capture(session), lambda: roll_back(session, image.end)):
        with pytest.raises(RuntimeError, match="taken over"):
            use()


@pytest.mark.parametrize("allowed", [0, 1, 2, 5])
def test_after_a_failed_write_the_session_is_unusable_and_the_image_whole(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    image = capture(conversation(engine))
    expected = image_hash(image)
    calls, call = [0], engine.programs.call

    def failing(key: tuple, *args: object, **options: object) -> object:
        calls[0] += key[0] == "rows in"
        if calls[0] > allowed:
            raise OSError("no more")
        return call(key, *args, **options)  # type: ignore[arg-type]

    session = Session(engine)
    monkeypatch.setattr(engine.programs, "call", failing)
    monkeypatch.setattr(row_copies, "STAGE_BYTES", engine.plan.page_bytes)  # a block is a page
    with pytest.raises(OSError, match="no more"):
        restore(session, image)
    monkeypatch.undo()
    assert engine.stopped is None
    with pytest.raises(RuntimeError, match="taken over"):
        session.prefill(TURN)
    session = Session(engine)
    restore(session, image)
    assert state_hash(session) == expected == image_hash(image)


def test_an_engine_that_lost_its_arena_stops(models: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(models.synthetic("nano", 0, echo_mtp=0.1))
    session = Session(engine)
    session.prefill(PROMPT)
    image, call = capture(session), engine.programs.call

    def failing(key: tuple, f: object, args: tuple, *options: object) -> object:
        if key[0] == "rows in":
            args[0].delete()
            raise OSError("no memory")
        return call(key, f, args, *options)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.programs, "call", failing)
    with pytest.raises(OSError, match="no memory"):
        restore(session, image)
    with pytest.raises(RuntimeError, match="the engine has stopped: restore failed and left no arena"):
        session.prefill(TURN)


def test_nothing_is_left_on_the_device(engine: Engine) -> None:
    image, session = capture(conversation(engine)), Session(engine)
    restore(session, image)
    counts = []
    for _ in range(5):
        checkpoint = take_checkpoint(session)
        capture(session)
        restore(session, image)
        roll_back(session, replace(checkpoint))
        counts.append((len(jax.live_arrays()), sum(x.nbytes for x in jax.live_arrays())))
    assert len(set(counts)) == 1


# --- copying rows


@pytest.mark.parametrize("count", [0, 1, 2, 5, 15, 16, 17, 31, 40])
def test_rows_go_out_and_in_where_they_belong(engine: Engine, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(row_copies, "STAGE_BYTES", 16 * 12)
    values = np.arange(40 * 3, dtype=np.uint32).reshape(40, 3)
    rows = np.random.default_rng(count).permutation(40)[:count].astype(np.int32)
    out = row_copies.read_rows(engine.programs, jax.numpy.asarray(values), rows)
    np.testing.assert_array_equal(out, values[rows])
    assert out.flags.owndata
    back = jax.numpy.zeros((40, 3), np.uint32)
    for back in row_copies.write_rows(engine.programs, back, rows, out):  # noqa: B020
        assert back.shape == (40, 3)
    expected = np.zeros_like(values)
    expected[rows] = values[rows]
    np.testing.assert_array_equal(back, expected)


def row_programs(engine: Engine) -> list[tuple]:
    return [key for key in engine.programs.compiled if isinstance(key, tuple) and str(key[0]).startswith("rows ")]


def test_few_programs_serve_every_length(models: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(models.synthetic("nano", 0, echo_mtp=0.1))
    monkeypatch.setattr(row_copies, "STAGE_BYTES", 32 * engine.plan.page_bytes)
    session, images = Session(engine), []
    for token in TOKENS[:300:10]:
        session.prefill([token] * 10)
        images.append(capture(session))
    for image in images:
        restore(Session(engine), image)
    shapes = {key[1] for key in row_programs(engine)}
    assert len(shapes) <= 3  # the arena, and index keys of each ratio
    assert len(row_programs(engine)) <= 4 * len(shapes)


def test_no_program_copies_the_arena(engine: Engine) -> None:
    image = capture(conversation(engine))
    restore(Session(engine), image)
    checked = 0
    shape = ",".join(map(str, engine.arena.shape))
    for key in row_programs(engine):
        if key[1] == engine.arena.shape:
            program = engine.programs.compiled[key]
            text = program.as_text()
            assert not [line for line in text.splitlines() if f"u32[{shape}]" in line and " copy" in line]
            assert program.memory_analysis().temp_size_in_bytes < engine.arena.nbytes // 2
            checked += 1
    assert checked >= 2

"""Moves on a loaded engine: they free what they say, fail whole, and do not change a bit of what the model computes."""

from __future__ import annotations

import gc
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.engine.engine import Engine
from strata_jax.engine.move_report import MoveDone
from strata_jax.engine.moves import Mover
from strata_jax.engine.residency import Fill
from strata_jax.engine.session import Session
from strata_jax.engine.snapshots import capture, roll_back, take_checkpoint
from strata_jax.errors import ConfigError, DoesNotFit
from strata_jax.geometry import Geometry
from strata_jax.gguf.reader import open_gguf
from strata_jax.memory.ledger import Owner
from strata_jax.memory.plan import MemoryPlan, plan
from strata_jax.memory.request import PlanRequest
from strata_jax.policies.moves import MoveKind
from tests.oracle.models import ModelStore, sample_tokens

NUM_EXPERTS, NUM_BLOCKS = 16, 5  # four trunk layers and the draft block
PROMPT = sample_tokens(3, 55, 512, 480)
NUM_TOKENS = 32
CONTEXT, START_CELLS = 256, 64
# 5 KiB pages make everything ragged: 10 for an expert of 48 KiB, 8 cells in one
SETTINGS: dict = {"context_cells": CONTEXT, "chunk_tokens": 16, "kv_type": "f32", "page_bytes": 5120}
CORE_SLOTS, SEGMENT_SLOTS = 18, (7, 8)


def model(models: ModelStore) -> Path:
    """A model whose drafts are right some of the time."""
    return models.synthetic("nano", 0, echo_mtp=0.1)


def load(
    path: Path,
    slots: int,
    segment_slots: tuple[int, ...] = (),
    mapped: int | None = None,
    loans: set[tuple[int, int]] | None = None,
) -> Engine:
    file = open_gguf(path)
    geometry = Geometry.from_gguf(file)
    made = plan(geometry, PlanRequest(spec_window=2, expert_slots=slots, **SETTINGS))
    made = replace(made, segment_slots=segment_slots, kv_mapped_cells=mapped)
    return Engine.load(file, geometry, made, loans=loans)


@pytest.fixture(scope="module")
def whole(models: ModelStore) -> Engine:
    """Every expert and every cell resident, in one array."""
    return load(model(models), NUM_BLOCKS * NUM_EXPERTS)


@pytest.fixture(scope="module")
def loaded(models: ModelStore) -> Engine:
    """Two fifths of the experts resident, half of these in two segments, and a quarter of the cells mapped.

    The programs are compiled for prompts that borrow both segments.
    """
    lent = {(8, 2), (16, 2)}
    return load(model(models), CORE_SLOTS + sum(SEGMENT_SLOTS), SEGMENT_SLOTS, START_CELLS, lent)


@pytest.fixture
def pieces(loaded: Engine) -> Iterator[Engine]:
    """The engine in pieces; afterwards it is as it was loaded."""
    start = loaded.residency
    yield loaded
    loaded.stopped = None
    mover = Mover(loaded, check=True)
    if loaded.weights.head is None:
        pytest.fail("the test left the head unloaded")
    mover.take_back(len(SEGMENT_SLOTS) - loaded.residency.segments)
    mover.trim_cells(START_CELLS)
    mover.evict(range(start.num_slots))
    mover.refill(start.residents(range(start.num_slots)))
    assert np.array_equal(loaded.residency.slot_of, start.slot_of)


# --- the same bits


@dataclass(frozen=True)
class Outputs:
    """What a prompt and the tokens after it gave."""

    first_logits: np.ndarray
    tokens: list[int]
    windows: list[int]
    state: list[np.ndarray]
    cells: list[np.ndarray]

    def differences(self, other: Outputs) -> list[str]:
        """The names of what is not the same, bit by bit."""
        arrays = [([self.first_logits], [other.first_logits], "first logits"), (self.state, other.state, "state")]
        arrays.append((self.cells, other.cells, "cells"))
        found = [name for a, b, name in arrays if any(x.tobytes() != y.tobytes() for x, y in zip(a, b, strict=True))]
        return found + [name for name in ("tokens", "windows") if getattr(self, name) != getattr(other, name)]


Between = Callable[[str, int], None]


def run(engine: Engine, between: Between = lambda stage, idx: None) -> Outputs:
    """Read the prompt and decode greedily; ``between`` is called before and after every chunk and every round."""
    session = Session(engine)
    between("chunk", 0)
    for idx, _ in enumerate(session.chunks(PROMPT), 1):
        between("chunk", idx)
    between("prompt", 0)
    first, tokens, windows = session.last_logits(), [], []
    for idx, record in enumerate(session.decode(first, max_tokens=NUM_TOKENS)):
        tokens += record.emitted
        windows.append(record.window_tokens)
        between("round", idx)
    return Outputs(first, tokens, windows, [np.asarray(x) for x in jax.tree.leaves(session.state)], cells_of(session))


def cells_of(session: Session) -> list[np.ndarray]:
    """The keys and values of every layer, in the order of their cells."""
    engine, layout = session.engine, session.engine.programs.spec.cells
    arena, found = np.asarray(engine.arena), []
    for pages in engine.residency.kv_pages[:, : engine.residency.mapped_groups]:
        for first, words in ((0, layout.k_words), (layout.cells_per_page * layout.k_words, layout.v_words)):
            part = arena[pages, first : first + layout.cells_per_page * words]
            found.append(part.reshape(-1, words)[: len(session.tokens)])
    return found


@pytest.fixture(scope="module")
def expected(whole: Engine) -> Outputs:
    found = run(whole)
    assert len(found.tokens) == NUM_TOKENS
    assert max(found.windows) == 2
    assert len(found.windows) < NUM_TOKENS, "no draft was accepted"
    return found


@dataclass
class Turbulence:
    """Moves of every kind between chunks and rounds."""

    engine: Engine
    mover: Mover
    wrong: int = 0  # added to the number of every expert that is copied: a fault to be found

    def __call__(self, stage: str, idx: int) -> None:
        if stage == "chunk":
            self.while_reading(idx)
        elif stage == "prompt":
            self.after_reading()
        else:
            self.while_decoding(idx)

    def while_reading(self, idx: int) -> None:
        mover = self.mover
        if idx == 0:
            mover.unload_head("test")
            self.lent = mover.lend(2, "test")
            assert len(self.lent) == sum(SEGMENT_SLOTS)
        elif idx == 1:
            self.evicted = mover.evict(range(3, 9), "test")
            mover.move_experts([(0, 3), (1, 12)], "test")
        elif idx == 2:
            self.mover.take_back(1, "test")
            self.fill([fill for fill in self.lent if fill.slot < CORE_SLOTS + 4])
            self.fill([Fill(4, 15, 0), Fill(0, 15, 1), Fill(2, 15, 4)])
            self.swap([Fill(0, 14, 10), Fill(3, 14, 11), Fill(4, 14, 0)])
        elif idx == 3:
            self.grow(120)
            mover.trim_cells(90, "test")

    def after_reading(self) -> None:
        self.mover.take_back(1, "test")
        self.fill([fill for fill in self.lent if fill.slot >= CORE_SLOTS + 4])
        self.mover.load_head("test")

    def while_decoding(self, idx: int) -> None:
        mover, residency = self.mover, self.engine.residency
        if residency.mapped_cells < len(PROMPT) + NUM_TOKENS + 8:
            self.grow(residency.mapped_cells + 16)
        if idx % 4 == 1:
            slot = CORE_SLOTS + idx % 7
            absent = np.flatnonzero(residency.slot_of[idx % NUM_BLOCKS] < 0)
            self.swap([Fill(idx % NUM_BLOCKS, int(absent[0]), slot)])
        if idx == 3:
            mover.trim_cells(96, "test")
        if idx == 5:
            gone = mover.lend(1, "test", MoveKind.GIVE_SEGMENT)
            mover.take_back(1, "test", MoveKind.TAKE_SEGMENT)
            self.fill(list(gone))

    def grow(self, cells: int) -> None:
        residency = self.engine.residency
        self.mover.map_cells(cells, residency.slots_to_pay(cells, reversed(range(CORE_SLOTS))) or (), "test")

    def fill(self, fills: list[Fill]) -> None:
        self.mover.refill(fills, "test")
        self.corrupt(fills)

    def swap(self, fills: list[Fill]) -> None:
        self.mover.swap_experts(fills, "test")
        self.corrupt(fills)

    def corrupt(self, fills: list[Fill]) -> None:
        if self.wrong:
            wrong = [replace(fill, expert=(fill.expert + self.wrong) % NUM_EXPERTS) for fill in fills]
            self.engine.copy_experts(wrong)


def test_a_loan_needs_no_program_that_was_not_compiled_before_the_arena_was_there(
    pieces: Engine, expected: Outputs
) -> None:
    compiled, mover = set(pieces.programs.compiled), Mover(pieces, check=True)
    assert len(compiled) > 12
    mover.map_cells(96, pieces.residency.slots_to_pay(96, [2, 5]) or ())
    lent: list[Fill] = []

    def borrow(stage: str, idx: int) -> None:
        if (stage, idx) == ("chunk", 0):
            lent.extend(mover.lend(2))
        elif stage == "prompt":
            mover.take_back(2)
            mover.refill(lent)

    assert run(pieces, borrow).differences(expected) == []
    assert set(pieces.programs.compiled) == compiled


def test_moves_of_every_kind_do_not_change_a_bit(pieces: Engine, expected: Outputs) -> None:
    done: list[MoveDone] = []
    found = run(pieces, Turbulence(pieces, Mover(pieces, done.append, check=True)))
    assert found.differences(expected) == []
    kinds = Counter(move.kind for move in done)
    not_here = {MoveKind.ALLOC_BUFFERS, MoveKind.FREE_BUFFERS, MoveKind.PARK, MoveKind.RESTORE, MoveKind.DROP}
    with_a_window = {MoveKind.SPILL_CELLS, MoveKind.FETCH_CELLS}  # of cells on the device
    assert set(kinds) == set(MoveKind) - not_here - with_a_window - {MoveKind.CHECKPOINT}
    assert all(move.cause == "test" for move in done)
    blob_bytes = pieces.banks[0].blobs[0].nbytes
    for move in done:
        assert (move.bytes > 0) == (move.count > 0 or move.gb_s is not None), move
        if move.kind in (MoveKind.REFILL, MoveKind.SWAP_EXPERT):
            assert move.bytes == move.count * blob_bytes
            assert move.gb_s == pytest.approx(move.bytes / move.ms / 1e6)


def test_a_wrong_expert_in_a_slot_is_noticed(pieces: Engine, expected: Outputs) -> None:
    found = run(pieces, Turbulence(pieces, Mover(pieces, check=True), wrong=1))
    assert "first logits" in found.differences(expected)


def test_pieces_at_rest_give_the_same_bits(pieces: Engine, expected: Outputs) -> None:
    mover = Mover(pieces)
    mover.map_cells(96, pieces.residency.slots_to_pay(96, [2, 5, 7]) or ())
    assert run(pieces).differences(expected) == []


def test_a_plan_with_segments_is_the_same_after_json(pieces: Engine) -> None:
    again = MemoryPlan.from_json(json.loads(json.dumps(pieces.plan.to_json())))
    assert again.arena == pieces.plan.arena == pieces.residency.layout
    assert (again.segment_slots, again.kv_mapped_cells) == (SEGMENT_SLOTS, START_CELLS)


# --- cells that are not mapped


def test_programs_that_would_write_to_cells_without_a_page_do_not_run(pieces: Engine) -> None:
    session = Session(pieces)
    logits = session.prefill(PROMPT)
    with pytest.raises(RuntimeError, match=r"6\d K/V cells are needed; 64 are mapped"):
        list(session.decode(logits, max_tokens=NUM_TOKENS))
    before = len(session.tokens)
    with pytest.raises(RuntimeError, match="64 are mapped"):
        session.prefill(PROMPT[:16])
    assert len(session.tokens) == before
    mover = Mover(pieces)
    mover.map_cells(128, pieces.residency.slots_to_pay(128, range(CORE_SLOTS)) or ())
    session.prefill(PROMPT[:16])


def test_a_page_is_mapped_moved_with_its_bytes_and_released(pieces: Engine) -> None:
    """Slot 4 pays for the ninth group, slot 5 for the tenth; when the tenth goes, slot 4 is put together again."""
    mover, core = Mover(pieces, check=True), pieces.arena.shape
    free = len(pieces.residency.free_pages())
    mover.map_cells(72, [4])
    mover.map_cells(80, [5])
    page = int(pieces.residency.kv_pages[1, 8])
    assert page in range(40, 50)
    cells = np.arange(core[1], dtype=np.uint32)
    pieces.arena = pieces.arena.at[page].set(cells)
    assert mover.trim_cells(72, returning=[4]) == (4,)
    target = int(pieces.residency.kv_pages[1, 8])
    assert target in range(50, 60)
    np.testing.assert_array_equal(np.asarray(pieces.arena)[target], cells)
    assert mover.trim_cells(START_CELLS) == (5,)
    assert len(pieces.residency.free_pages()) == free
    assert pieces.arena.shape == core


def test_a_sequence_whose_cells_were_given_up_only_goes_on_from_before(pieces: Engine) -> None:
    session, mover = Session(pieces), Mover(pieces, check=True)
    session.prefill(PROMPT[:16])
    checkpoint = take_checkpoint(session)
    session.prefill(PROMPT[16:40])
    late = take_checkpoint(session)
    expected = session.last_logits()
    mover.trim_cells(40)
    session.last_logits()  # nothing that has tokens is gone
    mover.trim_cells(24)
    mover.map_cells(START_CELLS)  # what was in the cells is lost all the same
    lost = "of 40 tokens were given up from 24 on"
    for use in (session.last_logits, lambda: session.prefill([1]), lambda: capture(session),
                lambda: roll_back(session, late)):  # fmt: skip
        with pytest.raises(RuntimeError, match=lost):
            use()
    roll_back(session, checkpoint)
    assert session.prefill(PROMPT[16:40]).tobytes() == expected.tobytes()


def scatter(mover: Mover) -> None:
    """Map 17 groups so that those past the twelfth leave pages in use in two of three slots."""
    for cells, slot in ((88, 4), (120, 1), (136, 0)):
        mover.map_cells(cells, [slot])


def test_pages_in_the_way_of_a_slot_are_moved_and_keep_their_bytes(pieces: Engine) -> None:
    mover = Mover(pieces, check=True)
    scatter(mover)
    before = pieces.residency.kv_pages
    marks = (7 + np.arange(2 * 17, dtype=np.uint32)).reshape(2, 17)
    pieces.arena = pieces.arena.at[before[:, :17]].set(marks[..., None])
    assert mover.trim_cells(8 * 12) == (0, 1)
    after = pieces.residency.kv_pages
    assert (before[:, :12] != after[:, :12]).sum() == 2
    np.testing.assert_array_equal(np.asarray(pieces.arena)[after[:, :12]], np.repeat(marks[:, :12, None], 1280, 2))


# --- bytes


def live_bytes() -> int:
    gc.collect()  # engines of other tests, whose sessions hold them
    return sum(x.nbytes for x in jax.live_arrays())


def test_lent_segments_are_given_back_to_the_allocator(pieces: Engine) -> None:
    mover, before = Mover(pieces, check=True), live_bytes()
    sizes = [segment.nbytes for segment in pieces.segments]
    gone = mover.lend(1)
    assert before - live_bytes() == sizes[1]
    gone += mover.lend(1)
    assert before - live_bytes() == sum(sizes)
    assert pieces.segments == ()
    assert pieces.arena_bytes() == {Owner.EXPERT_SLOTS: 5120 * 10 * CORE_SLOTS, Owner.KV: 5120 * 2 * 8}
    assert {fill.slot for fill in gone} == set(range(CORE_SLOTS, pieces.residency.num_slots))
    slots = mover.take_back(2)
    assert live_bytes() == before
    assert set(slots) == {fill.slot for fill in gone}
    mover.refill(gone)
    for fill in gone:
        np.testing.assert_array_equal(
            bytes_of(pieces, fill.slot), np.asarray(pieces.banks[fill.layer].blobs[fill.expert])
        )


def test_a_move_is_checked_with_the_devices_own_count(pieces: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU keeps no count: the bytes of live arrays stand in for it."""
    done: list[MoveDone] = []
    mover = Mover(pieces, check=True)
    mover.unload_head()
    mover.load_head()  # the copy in host memory, which is an array of this device too, is there from now on
    monkeypatch.setattr(Engine, "bytes_in_use", lambda engine: live_bytes())
    mover.on_move = done.append
    for move in (lambda: mover.lend(2), lambda: mover.take_back(2), mover.unload_head, mover.load_head):
        move()
    lent, back, unloaded, loaded = done
    assert lent.device_change_bytes == -lent.bytes == -back.bytes == -back.device_change_bytes
    assert unloaded.device_change_bytes == -unloaded.bytes == -loaded.device_change_bytes
    kept = live_bytes()
    monkeypatch.setattr(Engine, "bytes_in_use", lambda engine: kept)  # as if somebody held on to what was lent
    with pytest.raises(RuntimeError, match=r"lend of .* bytes changed the device's bytes in use by 0"):
        mover.lend(1)


@pytest.mark.parametrize("check", [True, False])
def test_a_count_that_comes_late_is_waited_for_by_who_checks_it(
    pieces: Engine, monkeypatch: pytest.MonkeyPatch, check: bool
) -> None:
    done: list[MoveDone] = []
    mover, counts = Mover(pieces, on_move=done.append, check=check), list[int]()

    def count(engine: Engine) -> int:
        counts.append(live_bytes() if len(counts) in (0, 4) else counts[0])
        return counts[-1]

    monkeypatch.setattr(Engine, "bytes_in_use", count)
    mover.lend(2)
    assert len(counts) == (5 if check else 2)
    assert done[0].device_change_bytes == (-done[0].bytes if check else 0)


def bytes_of(engine: Engine, slot: int) -> np.ndarray:
    array, page = engine.residency.layout.locate(engine.residency.layout.slot_first_page[slot])
    num_pages = engine.residency.layout.slot_num_pages[slot]
    return np.asarray(engine.arrays[array])[page : page + num_pages].reshape(-1)[: engine.banks[0].blobs.shape[1]]


def test_an_unloaded_head_is_in_host_memory_only(pieces: Engine) -> None:
    mover, head = Mover(pieces), np.asarray(pieces.weights.head.data).copy()
    mover.unload_head()
    mover.load_head()  # from now on the host has its copy
    before = live_bytes()
    mover.unload_head()
    assert before - live_bytes() == head.nbytes
    session = Session(pieces)
    for _ in session.chunks(PROMPT[:16]):
        pass
    for needs_head in (session.last_logits, lambda: next(session.force([1])), mover.unload_head):
        with pytest.raises(RuntimeError, match="head is unloaded"):
            needs_head()
    mover.load_head()
    np.testing.assert_array_equal(np.asarray(pieces.weights.head.data), head)
    with pytest.raises(ValueError, match="is loaded"):
        mover.load_head()


def test_a_tied_head_stays(models: ModelStore) -> None:
    path = models.synthetic("nano", 0, overrides={"tied_output": True})
    engine = load(path, 0)
    with pytest.raises(ConfigError, match="is its embedding"):
        Mover(engine).unload_head()
    assert not engine.head().data.is_deleted()


# --- faults


class Injected(Exception):
    """A fault of a test."""


@dataclass
class FaultAt:
    """Raises the n-th time that a move gets to a stage."""

    kind: MoveKind
    stage: str
    countdown: int = 1

    def __call__(self, kind: MoveKind, stage: str) -> None:
        if (kind, stage) == (self.kind, self.stage):
            self.countdown -= 1
            if self.countdown == 0:
                raise Injected


def everything(engine: Engine) -> list[np.ndarray]:
    """Tables, head and the bytes that tables name: a move that failed has changed none of them."""
    r = engine.residency
    found = [r.slot_of, r.occupant, r.slot_page, r.kv_pages, np.array(r.segments)]
    found += [np.asarray(x) for x in jax.tree.leaves((engine.tables, engine.weights.head))]
    found += [bytes_of(engine, slot) for slot in np.flatnonzero(r.occupant >= 0)]
    found.append(np.asarray(engine.arena)[r.kv_pages[r.kv_pages >= 0]])
    return [x.copy() for x in found]


FULL, EMPTY = 6, 7  # slots
MOVES: dict[MoveKind, tuple[Callable[[Mover], object], Callable[[Mover], object]]] = {
    MoveKind.EVICT: (lambda m: None, lambda m: m.evict([1, 2])),
    MoveKind.REFILL: (lambda m: None, lambda m: m.refill([Fill(0, 15, EMPTY), Fill(3, 15, EMPTY + 1)])),
    MoveKind.SWAP_EXPERT: (lambda m: None, lambda m: m.swap_experts([Fill(0, 15, FULL), Fill(3, 15, 5)])),
    MoveKind.MOVE_EXPERT: (lambda m: None, lambda m: m.move_experts([(FULL, EMPTY), (5, 20)])),
    MoveKind.LEND: (lambda m: None, lambda m: m.lend(2)),
    MoveKind.RETURN: (lambda m: m.lend(2), lambda m: m.take_back(2)),
    MoveKind.MAP_CELLS: (lambda m: None, lambda m: m.map_cells(90, [FULL, 5])),
    MoveKind.TRIM_CELLS: (scatter, lambda m: m.trim_cells(96)),
    MoveKind.UNLOAD_HEAD: (lambda m: None, lambda m: m.unload_head()),
    MoveKind.LOAD_HEAD: (lambda m: m.unload_head(), lambda m: m.load_head()),
}
STAGES = {
    MoveKind.EVICT: ["prepared"],
    MoveKind.REFILL: ["copied", "copied 2", "prepared"],
    MoveKind.SWAP_EXPERT: ["prepared", "copied", "copied 2", "prepared 2"],
    MoveKind.MOVE_EXPERT: ["prepared", "copied", "prepared 2"],
    MoveKind.LEND: ["prepared", "published"],
    MoveKind.RETURN: ["prepared", "copied", "copied 2"],
    MoveKind.MAP_CELLS: ["prepared"],
    MoveKind.TRIM_CELLS: ["copied", "prepared"],
    MoveKind.UNLOAD_HEAD: ["prepared", "published"],
    MoveKind.LOAD_HEAD: ["prepared", "copied"],
}
FAULTS = [(kind, stage) for kind, stages in STAGES.items() for stage in stages]


@pytest.mark.parametrize(("kind", "stage"), FAULTS, ids=lambda x: str(x))
def test_a_move_that_fails_leaves_a_whole_state_and_can_be_repeated(kind: MoveKind, stage: str, pieces: Engine) -> None:
    prepare, move = MOVES[kind]
    mover = Mover(pieces)
    mover.evict([EMPTY, EMPTY + 1])
    prepare(mover)
    done: list[MoveDone] = []
    mover.on_move = done.append
    before, live = everything(pieces), live_bytes()
    name, _, count = stage.partition(" ")
    mover.fault = FaultAt(kind, name, int(count or 1))
    with pytest.raises(Injected):
        move(mover)
    pieces.check_tables()
    assert pieces.stopped is None
    overwrites = kind in (MoveKind.SWAP_EXPERT, MoveKind.MOVE_EXPERT) and stage != "prepared"
    if overwrites:  # the experts whose bytes went are in the bank only, and that is reported
        gone = {MoveKind.SWAP_EXPERT: {FULL, 5}, MoveKind.MOVE_EXPERT: {20}}[kind]
        assert [(move.kind, move.count) for move in done] == [(MoveKind.EVICT, len(gone))]
        assert {slot for slot in range(pieces.residency.num_slots) if pieces.residency.occupant[slot] < 0} == gone | {
            EMPTY, EMPTY + 1,
        }  # fmt: skip
    else:
        assert done == []
        for a, b in zip(everything(pieces), before, strict=True):
            np.testing.assert_array_equal(a, b)
    if kind is not MoveKind.UNLOAD_HEAD:  # whose copy in host memory stays
        assert live_bytes() == live
    mover.fault = lambda kind, stage: None
    move(mover)
    pieces.check_tables()
    assert done[-1].kind is kind
    if pieces.weights.head is None:
        mover.load_head()


def test_the_arena_lost_in_a_move_stops_the_engine(models: ModelStore) -> None:
    engine = load(model(models), 10)
    session, mover = Session(engine), Mover(engine)

    def lose(kind: MoveKind, stage: str) -> None:
        engine.arena.delete()
        raise Injected("power cut")

    mover.fault = lose
    with pytest.raises(Injected):
        mover.swap_experts([Fill(0, 15, 0)])
    for use in (lambda: session.prefill([1]), lambda: mover.evict([1]), session.last_logits):
        with pytest.raises(RuntimeError, match=r"engine has stopped: swap_expert failed .*power cut"):
            use()


def test_an_allocator_without_room_leaves_the_segments_lent(pieces: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    mover = Mover(pieces, check=True)
    gone, live = mover.lend(2), None

    def full(num_pages: int, page_bytes: int) -> jax.Array:
        nonlocal live
        if live is None:
            live = live_bytes()
            return jnp.zeros((num_pages, page_bytes // 4), jnp.uint32)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("strata_jax.engine.moves.new_pages", full)
        with pytest.raises(DoesNotFit, match=r"segment of the arena needs 0\.\d MiB in one piece"):
            mover.take_back(2)
    assert live_bytes() == live
    assert pieces.residency.segments == 0
    mover.take_back(2)
    mover.refill(gone)


# --- compiled programs


def array_sized_copies(text: str, arrays: tuple[jax.Array, ...]) -> list[str]:
    """Lines of a compiled program that copy something as large as an array of the arena."""
    shapes = {f"u32[{a.shape[0]},{a.shape[1]}]" for a in arrays}
    copies = re.findall(r"^.* = (\S+?)(?:\{\S*)? (copy|copy-start|select)\(.*$", text, re.MULTILINE)
    return [f"{op} {shape}" for shape, op in copies if shape in shapes]


def test_no_program_copies_an_array_of_the_arena(pieces: Engine, whole: Engine, expected: Outputs) -> None:
    mover = Mover(pieces)
    run(pieces, Turbulence(pieces, mover))
    mover.trim_cells(START_CELLS)
    in_core = pieces.residency.residents(range(CORE_SLOTS))
    mover.move_experts([(in_core[0].slot, CORE_SLOTS)])  # into a segment
    scatter(mover)
    mover.trim_cells(8 * 12)
    for engine in (pieces, whole):
        names = {key[0] for key in engine.programs.compiled}
        assert {"gdn", "attention", "draft", "first_window", "decode", "decode end", "fill"} <= names
        for key, program in engine.programs.compiled.items():
            assert array_sized_copies(program.as_text(), engine.arrays) == [], key
            assert program.memory_analysis().temp_size_in_bytes < engine.arena.nbytes, key
    assert {key[-1] for key in pieces.programs.compiled} >= {"+2", "+1"}
    assert {"move", "copy", "pages"} <= {key[0] for key in pieces.programs.compiled}


def test_a_copy_of_the_arena_would_be_found(pieces: Engine) -> None:
    program = jax.jit(lambda a: a.at[3, 5].set(0)).lower(pieces.arena).compile()  # not donated
    assert array_sized_copies(program.as_text(), pieces.arrays)

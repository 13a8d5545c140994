"""K/V in host memory with a window of it on the device: not a bit of the results changes, and both copies are real.

One engine has everything on the device, the other one a window; both have a sparse layer in the trunk and a dense draft
block. The second one's policies move other memory, too, where a test lets them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.engine import attention, cell_store
from strata_jax.engine.arena import CellLayout, CellStore
from strata_jax.engine.engine import Engine
from strata_jax.engine.move_report import MoveDone
from strata_jax.engine.moves import Mover
from strata_jax.engine.residency import first_residency
from strata_jax.engine.runtime import Runtime
from strata_jax.engine.session import RoundRecord, Session
from strata_jax.engine.snapshots import capture, restore, roll_back, state_hash, take_checkpoint
from strata_jax.geometry import Geometry
from strata_jax.kv_types import cell_bytes
from strata_jax.memory.ledger import Memory, Owner, Phase
from strata_jax.policies.moves import MoveKind
from tests.engine import policy_runs
from tests.engine.policy_runs import RULE, SMALL, Ask, Engines, Injected, Run, Sink, settings_of, tokens
from tests.oracle.models import ModelStore

POLICIES = ("residence", "borrow", "head_alias", "conversations", "adaptive", "short_reads", "vram_elastic")
WINDOWS = (24, 40, 51, 104)  # cells; the least is a chunk of 16 and a page of 8
PROMPT, OTHER = tokens(300, 1), tokens(150, 2)
POISON, SIGN_BIT = np.uint32(0xFFFFFFFF), np.uint32(0x80000000)
Answer = tuple[bytes, list[tuple[int, ...]], dict[str, str]]


class MixedGeometry:
    """A geometry as in the file, but for the draft block's attention, which is dense."""

    @staticmethod
    def from_gguf(file: Any) -> Geometry:
        return replace(Geometry.from_gguf(file), compress_ratio=(0, 4, 0))


@pytest.fixture(scope="module")
def path(models: ModelStore) -> Path:
    return models.synthetic("nano", 0, echo_mtp=0.1, overrides=SMALL)


@pytest.fixture(scope="module")
def engines(path: Path) -> Iterator[Engines]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_runs, "Geometry", MixedGeometry)
        yield Engines(path, spec_window=2)


@pytest.fixture(scope="module")
def whole(engines: Engines) -> Engine:
    """Everything on the device."""
    return engines.reference.engine


@pytest.fixture(scope="module")
def planned(engines: Engines) -> Engine:
    return engines.get(POLICIES)


@pytest.fixture
def engine(planned: Engine) -> Iterator[Engine]:
    """The engine with a window of five pages, to be changed at will."""
    plan = planned.plan
    _resize(planned, 40)
    yield planned
    _resize(planned, plan.mapped_cells)
    planned.plan, planned.mover = plan, None


def _resize(engine: Engine, cells: int) -> None:
    """Load the engine again with a window of another size in the same arena, so that the same programs run."""
    plan = replace(engine.plan, kv_mapped_cells=cells)
    more = plan.num_kv_layers * (engine.plan.arena.start_groups - plan.arena.start_groups)
    engine.plan = replace(plan, spare_pages=plan.spare_pages + more)
    pages, experts = engine.plan.pages_per_expert, engine.geometry.num_experts
    engine.publish(first_residency(engine.plan.arena, pages, experts, engine.plan.resident_pairs()))
    engine.copy_experts(engine.residency.residents(range(engine.residency.num_slots)))
    engine.check_tables()


def answer(session: Session, logits: np.ndarray, count: int) -> Answer:
    rounds: list[RoundRecord] = list(session.decode(logits, max_tokens=count))
    assert sum(r.num_drafted for r in rounds) > count // 2
    return logits.tobytes(), [r.emitted for r in rounds], state_hash(session)


def read(engine: Engine, prompt: tuple[int, ...], *ends: int) -> tuple[Session, np.ndarray]:
    """A session that has read a prompt up to each of the ends."""
    session = Session(engine)
    for end in ends or (len(prompt),):
        logits = session.prefill(prompt[len(session.tokens) : end])
    return session, logits


def watched(engine: Engine) -> list[MoveDone]:
    done: list[MoveDone] = []
    Mover(engine, done.append, check=True)
    return done


# --- the same bits


@pytest.fixture(scope="module")
def expected(whole: Engine) -> Answer:
    found = answer(*read(whole, PROMPT), 64)
    assert sum(len(tokens) - 1 for tokens in found[1]) > 5, "no draft was accepted"
    return found


@pytest.mark.parametrize("cells", WINDOWS)
def test_logits_tokens_and_state_do_not_depend_on_the_window(engine: Engine, expected: Answer, cells: int) -> None:
    _resize(engine, cells)
    done = watched(engine)
    assert answer(*read(engine, PROMPT), 64) == expected
    assert {move.kind for move in done} == {MoveKind.SPILL_CELLS}
    page, layers = engine.plan.page_bytes, engine.plan.num_kv_layers
    assert sum(move.bytes for move in done) == engine.residency.first_group * page * layers > 0
    assert all(move.owner is Owner.KV and move.gb_s is not None and "written next" in move.cause for move in done)


def test_A_then_B_then_A_is_exact_past_the_window(engine: Engine, whole: Engine) -> None:
    reference, _ = read(whole, PROMPT, 130)
    session, _ = read(engine, PROMPT, 130)
    expected_hash = state_hash(session)
    assert expected_hash == state_hash(reference)
    image = capture(session)
    _spoil(engine)
    read(engine, OTHER)
    session = Session(engine)
    restore(session, image)
    engine.check_tables()
    assert engine.residency.first_group > 0
    assert state_hash(session) == expected_hash
    assert answer(session, session.prefill(OTHER[:20]), 24) == answer(reference, reference.prefill(OTHER[:20]), 24)


@pytest.mark.parametrize("back", [5, 48, 67, 100, 131])
def test_going_back_anywhere_equals_a_fresh_read(engine: Engine, whole: Engine, back: int) -> None:
    """Far below the window, at its first page's border, inside a page of it."""
    edited = (*PROMPT[:back], *OTHER[:90])
    fresh, logits = read(whole, edited, back, len(edited))
    done = watched(engine)
    session, _ = read(engine, PROMPT, back)
    checkpoint, at_checkpoint = take_checkpoint(session), state_hash(session)
    answer(session, session.prefill(PROMPT[back:140]), 12)
    below = back < engine.residency.first_group * engine.plan.cells_per_page
    spilled = len(done)
    roll_back(session, checkpoint)
    assert state_hash(session) == at_checkpoint
    again = session.prefill(edited[back:])
    assert answer(session, again, 24) == answer(fresh, logits, 24)
    assert (done[spilled].kind is MoveKind.FETCH_CELLS) == below
    assert done[spilled].bytes > 0


def test_a_new_sequence_reads_nothing_of_an_old_one(engine: Engine, whole: Engine) -> None:
    read(engine, PROMPT)
    _spoil(engine)
    done = watched(engine)
    assert answer(*read(engine, OTHER), 16) == answer(*read(whole, OTHER), 16)
    assert (done[0].kind, done[0].bytes) == (
        MoveKind.FETCH_CELLS,
        0,
    )  # the window goes back, and nothing is worth a copy


@pytest.mark.parametrize(("kv_type", "ratio"), [("int8", 4), ("q4_0", 4), ("k8v4", 0), ("bf16", 0)])
def test_cells_of_every_type_are_read_from_either_memory(whole: Engine, kv_type: str, ratio: int) -> None:
    """Attention of one layer over an arena that has all pages, and over one whose first pages are rows of a store."""
    g, w = whole.geometry, whole.weights.blocks[1].whole().token_mixer
    assert isinstance(w, attention.AttentionWeights)
    w = replace(w, ratio=ratio, indexer=w.indexer if ratio else None)
    k_bytes, v_bytes = cell_bytes(kv_type, g.num_kv_heads, g.head_dim)
    layout = CellLayout(kv_type, 8, k_bytes // 4, v_bytes // 4, 96)
    rng, groups = np.random.default_rng(0), 12
    inputs = rng.standard_normal((96, g.embed_width)).astype(np.float32)
    state = attention.empty_state(g, ratio, 96)
    pages = jnp.asarray(rng.permutation(groups).astype(np.int32))
    arena = jnp.zeros((groups, 8 * (k_bytes + v_bytes) // 4), jnp.uint32)

    @jax.jit
    def attend(u: jax.Array, *args: Any) -> Any:
        *args, store = args
        return attention.attend(u, w, *args, jnp.int32(len(u)), g, layout, store)

    for first in range(0, 80, 16):
        _, arena, rows = attend(inputs[first : first + 16], arena, pages, state, jnp.int32(first), None)
        state = attention.advance(state, rows, jnp.int32(16))
    plain, *_ = attend(inputs[80:], arena, pages, state, jnp.int32(80), None)
    away = 7  # groups that are in the store, whose rows of this layer begin at 5
    words = np.full((5 + groups, arena.shape[1]), POISON)
    words[5 : 5 + away] = np.asarray(arena)[np.asarray(pages)[:away]]
    spoiled = np.asarray(arena).copy()
    spoiled[np.asarray(pages)[:away]] = POISON
    store = CellStore(jnp.asarray(words), jnp.int32(5))
    found, *_ = attend(inputs[80:], jnp.asarray(spoiled), pages.at[:away].set(-1), state, jnp.int32(80), store)
    np.testing.assert_array_equal(np.asarray(found).view(np.uint32), np.asarray(plain).view(np.uint32))
    wrong = CellStore(store.words ^ jnp.uint32(0x00010000), store.first_row)
    other, *_ = attend(inputs[80:], jnp.asarray(spoiled), pages.at[:away].set(-1), state, jnp.int32(80), wrong)
    assert not np.array_equal(other, plain)


# --- both copies are real


def _spoil(engine: Engine) -> None:
    """Overwrite every cell in either memory."""
    pages = engine.residency.kv_pages
    engine.arena = engine.arena.at[pages[pages >= 0]].set(POISON)
    assert engine.cell_store is not None
    engine.cell_store = jnp.full_like(engine.cell_store, POISON)


def _flip(engine: Engine, layer: int, *, resident: bool) -> None:
    """Turn the signs of what an attention layer has in one memory."""
    assert engine.cell_store is not None
    pages, first = engine.residency.kv_pages[layer], engine.residency.first_group
    if resident:
        chosen = pages[pages >= 0]
        engine.arena = engine.arena.at[chosen].set(engine.arena[chosen] ^ SIGN_BIT)
    else:
        rows = engine.residency.store_rows(layer, np.arange(first))
        engine.cell_store = engine.cell_store.at[rows].set(engine.cell_store[rows] ^ SIGN_BIT)


@pytest.mark.parametrize("resident", [False, True], ids=["store", "window"])
@pytest.mark.parametrize("layer", [0, 1], ids=["sparse trunk", "dense draft block"])
def test_wrong_bytes_in_either_memory_change_the_result(engine: Engine, layer: int, resident: bool) -> None:
    def outputs(flip: bool) -> tuple[np.ndarray, np.ndarray]:
        session, _ = read(engine, PROMPT, 200)
        if flip:
            _flip(engine, layer, resident=resident)
        drafted = session.prefill(PROMPT[200:210], want="draft")
        return session.last_logits(), drafted

    (trunk, draft), (trunk_then, draft_then) = outputs(False), outputs(True)
    assert np.array_equal(trunk, trunk_then) == (layer == 1)
    assert layer == 0 or not np.array_equal(draft, draft_then)


def test_rows_of_cells_that_are_on_the_device_and_pages_past_the_end_are_not_read(
    engine: Engine, expected: Answer
) -> None:
    session, logits = read(engine, PROMPT)
    assert engine.cell_store is not None
    groups = np.flatnonzero(engine.residency.kv_pages[0] >= 0)
    rows = np.concatenate([engine.residency.store_rows(layer, groups) for layer in range(2)])
    engine.cell_store = engine.cell_store.at[rows].set(POISON)
    assert answer(session, logits, 64) == expected


def test_the_arrays_are_as_large_as_planned_and_updated_in_place(engine: Engine, whole: Engine) -> None:
    _resize(engine, 104)  # as planned
    plan, store = engine.plan, engine.cell_store
    assert store is not None
    host = plan.ledger.owner_bytes(Phase.START, Memory.HOST)[Owner.KV]
    assert store.nbytes == host == plan.num_kv_layers * plan.kv_pages_per_layer * plan.page_bytes
    device = plan.ledger.owner_bytes(Phase.START, Memory.DEVICE)
    assert engine.arena_bytes()[Owner.KV] == device[Owner.KV] == plan.num_kv_layers * 13 * plan.page_bytes
    assert sum(x.nbytes for x in engine.arrays) == device[Owner.KV] + device[Owner.EXPERT_SLOTS]
    assert whole.arena_bytes()[Owner.KV] == host
    places = [store.unsafe_buffer_pointer(), engine.arena.unsafe_buffer_pointer()]
    session, logits = read(engine, PROMPT)
    assert store.is_deleted()
    count = len(jax.live_arrays())
    list(session.decode(logits, max_tokens=40))
    assert engine.cell_store is not None
    assert [engine.cell_store.unsafe_buffer_pointer(), engine.arena.unsafe_buffer_pointer()] == places
    assert len(jax.live_arrays()) <= count
    assert whole.cell_store is None
    assert jax.tree.leaves(whole.program_tables) == jax.tree.leaves(whole.tables)


# --- faults


@pytest.mark.parametrize("stage", ["first block", "last block", "prepared"])
@pytest.mark.parametrize("kind", [MoveKind.SPILL_CELLS, MoveKind.FETCH_CELLS])
def test_a_move_that_fails_leaves_all_as_it_was(
    engine: Engine, whole: Engine, monkeypatch: pytest.MonkeyPatch, kind: MoveKind, stage: str
) -> None:
    monkeypatch.setattr(cell_store, "ROWS_PER_CALL", 1)  # a move is many copies
    seen, broken = [0], [True]

    def fault(now: MoveKind, at: str) -> None:
        seen[0] += at == "copied"
        last = seen[0] >= 4  # two layers, two pages
        hit = at == "prepared" if stage == "prepared" else at == "copied" and (stage == "first block" or last)
        if now is kind and hit and broken[0]:
            raise Injected

    session, _ = read(engine, PROMPT, 20)
    checkpoint = take_checkpoint(session)
    if kind is MoveKind.FETCH_CELLS:
        session.prefill(PROMPT[20:120])
        roll_back(session, checkpoint)
    else:
        session.prefill(PROMPT[20:36])
    before, length = state_hash(session), len(session.tokens)
    tables, mover = engine.residency, Mover(engine, check=True)
    mover.fault = fault
    for _ in range(2):
        seen[0] = 0
        with pytest.raises(Injected):
            session.prefill(OTHER[:64])
        assert len(session.tokens) == length
        assert engine.residency is tables
        engine.check_tables()
        assert state_hash(session) == before
    broken[0] = False
    assert engine.stopped is None
    reference, _ = read(whole, (*PROMPT[:20], *PROMPT[20:length]), *({20, length}))
    assert answer(session, session.prefill(OTHER[:64]), 16) == answer(reference, reference.prefill(OTHER[:64]), 16)


def test_an_engine_that_lost_its_cells_stops(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    session, _ = read(engine, PROMPT, 36)
    call, kept = engine.programs.call, np.asarray(engine.cell_store).copy()

    def failing(key: tuple, f: object, args: tuple, *rest: object, **options: object) -> object:
        if key[0] == "spill":
            args[0].delete()
            raise OSError("no memory")
        return call(key, f, args, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.programs, "call", failing)
    with pytest.raises(OSError, match="no memory"):
        session.prefill(OTHER[:64])
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="the engine has stopped: spill_cells failed and left no K/V in host memory"):
        session.prefill(OTHER[:64])
    engine.stopped, engine.cell_store = None, jnp.asarray(kept)


# --- with policies, last: a failure leaves the engine in disorder


def test_other_policies_move_memory_beside_the_window(engines: Engines, planned: Engine) -> None:
    sink = Sink()
    run = Run(Runtime.start(planned, settings_of(POLICIES), rule=RULE, sink=sink, check=True), engines.reference)
    for ask in (Ask("a", tokens(90, 1)), Ask("b", tokens(200, 2)), Ask("a", tokens(9, 3), 24), Ask("b", tokens(40, 4))):
        run.serve(ask)
        run.runtime.verify()
    assert run.differences == []
    assert run.reused[2] > 0
    kinds = {
        MoveKind.SPILL_CELLS,
        MoveKind.LEND,
        MoveKind.RETURN,
        MoveKind.UNLOAD_HEAD,
        MoveKind.PARK,
        MoveKind.RESTORE,
    }
    assert kinds <= set(sink.kinds())

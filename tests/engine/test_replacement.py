"""Experts replaced inside the round: the same bits as without, the experts that the policy names, tables that agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.engine import rounds as rounds_in_parts
from strata_jax.engine.engine import Engine
from strata_jax.engine.moves import Mover
from strata_jax.engine.replacement import Turn, kept_before, start_values, take_turn
from strata_jax.engine.residency import Fill
from strata_jax.engine.sampler import sampling_arrays
from strata_jax.engine.session import Session
from strata_jax.memory.ledger import Owner
from strata_jax.policies.moves import MoveKind
from strata_jax.policies.replacement import ExpertValues, counted, ranks_in_layer, replaced
from strata_jax.sampling import Sampling
from tests.engine.policy_runs import NUM_BLOCKS, NUM_EXPERTS, SMALL, Ask, Engines, Injected, Sink, start, tokens
from tests.oracle.models import ModelStore

POLICIES = ("borrow", "kv_grow", "conversations", "replacement")
DECAY, TRUNK = 0.5, NUM_BLOCKS - 1
PROMPT, NEW = tokens(20, 1), 40


@pytest.fixture(scope="module")
def engines(models: ModelStore) -> Engines:
    return Engines(models.synthetic("nano", 0, echo_mtp=0.1, overrides=SMALL), spec_window=2)


@pytest.fixture
def engine(engines: Engines) -> Engine:
    """An engine whose rounds replace experts, as loaded but for the cells that these tests write."""
    engine = engines.get(POLICIES)
    cells = len(PROMPT) + NEW + 8
    paying = engine.residency.slots_to_pay(cells, range(engine.residency.layout.segment_first_slot[0] - 1, -1, -1))
    assert paying is not None
    Mover(engine).map_cells(cells, paying)
    engine.values = start_values(engine.plan.order, engine.plan.num_blocks)
    return engine


def check_arena(engine: Engine) -> None:
    """Verify the tables, and that every resident's words in the arena are those of the bank."""
    engine.check_tables()
    pages = np.concatenate([np.asarray(array) for array in engine.arrays])
    for fill in engine.residency.residents(range(engine.residency.num_slots)):
        bank, first = engine.banks[fill.layer], int(engine.residency.slot_page[fill.slot])
        words = pages[first : first + bank.num_pages].reshape(-1)[: bank.blobs.shape[1]]
        np.testing.assert_array_equal(words, np.asarray(bank.blobs[fill.expert]))


def values_of(engine: Engine) -> ExpertValues:
    """Of the trunk: how the draft block's windows divide its uses is not reported."""
    assert engine.values is not None
    count, last = (np.asarray(x)[:TRUNK] for x in (engine.values.count, engine.values.last))
    return ExpertValues(count, last, int(engine.values.clock[0]))


def decoded(engine: Engine) -> tuple[tuple[int, ...], list[np.ndarray], list[np.ndarray]]:
    """The text, the state after it, and the uses of the trunk's experts in each round, i32[L, X]."""
    session = Session(engine, count_uses=True)
    records = list(session.decode(session.prefill(PROMPT)[-1:], max_tokens=NEW))
    state = [np.asarray(x) for x in jax.tree.leaves(session.state)]
    return tuple(t for r in records for t in r.emitted), state, [r.uses[:TRUNK] for r in records if r.uses is not None]


@pytest.mark.parametrize(("left", "part_blocks"), [(None, rounds_in_parts.PART_BLOCKS), (3, 2)])
def test_rounds_replace_whom_the_policy_names_and_compute_the_same_bits(
    engines: Engines, engine: Engine, left: int | None, part_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """left: residents of each block, fewer than the experts of a window."""
    monkeypatch.setattr(rounds_in_parts, "PART_BLOCKS", part_blocks)
    if left is not None:
        slots = [row[row >= 0][left:] for row in engine.residency.slot_of]
        Mover(engine).evict(np.concatenate(slots).tolist())
    before, values, known = engine.residency.slot_of.copy(), values_of(engine), engine.known
    held = before[:TRUNK] >= 0
    ranks = ranks_in_layer(engine.plan.order.expert, NUM_BLOCKS, NUM_EXPERTS)
    assert np.array_equal(-1 - values.last, ranks[:TRUNK])

    text, state, rounds = decoded(engine)
    assert engine.behind
    assert engine.known is known, "the host has read the tables although nobody asked"
    expected, state_there, _ = decoded(engines.reference.engine)
    assert text == expected
    assert all(np.array_equal(a, b) for a, b in zip(state, state_there, strict=True))

    moved = 0
    for uses in rounds:
        values = counted(values, uses, DECAY)
        layers, coming, leaving = replaced(held, uses, values)
        held[layers, leaving], held[layers, coming] = False, True
        moved += len(layers)
    assert moved > 5
    assert np.array_equal(engine.residency.slot_of[:TRUNK] >= 0, held)
    assert not engine.behind
    assert (engine.residency.slot_of != before).any(axis=1).all(), "the draft block has its turns too"
    after = values_of(engine)
    assert np.array_equal(after.count, values.count)
    assert np.array_equal(after.last, values.last)
    assert after.clock == len(rounds)
    check_arena(engine)


def test_the_plan_prices_the_values_to_the_byte(engine: Engine) -> None:
    (entry,) = [e for e in engine.plan.ledger.entries if e.item == "use of experts"]
    assert entry.owner is Owner.TABLES
    assert entry.phase_bytes[0] == sum(x.nbytes for x in jax.tree.leaves(engine.values))


def test_tables_from_before_a_round_cannot_be_published_and_empty_slots_stay_empty(engine: Engine) -> None:
    before = engine.residency
    occupied = np.flatnonzero(before.occupant >= 0)[:2]
    decoded(engine)
    with pytest.raises(RuntimeError, match="older than the device's: rounds have replaced experts since"):
        engine.publish(before.evicted([0]))
    mover = Mover(engine, check=True)
    gone = mover.evict(occupied.tolist())
    decoded(engine)
    assert (engine.residency.occupant[occupied] == -1).all()
    absent = [int(np.flatnonzero(row < 0)[0]) for row in engine.residency.slot_of]
    mover.refill([Fill(fill.layer, absent[fill.layer], fill.slot) for fill in gone[:1]])
    check_arena(engine)


def test_a_table_that_the_device_cannot_have_made_is_refused(engine: Engine) -> None:
    residency, table = engine.residency, engine.residency.slot_of
    (here, there), (first, _) = (np.flatnonzero(row >= 0)[:2] for row in table[:2])
    for changes in ({(0, there): table[0, here]}, {(0, here): -1}):
        made = table.copy()
        for where, slot in changes.items():
            made[where] = slot
        with pytest.raises(ValueError, match="not in the slots that had some: one each"):
            residency.with_experts(made)
    made = table.copy()
    made[0, here], made[1, first] = table[1, first], table[0, here]
    with pytest.raises(ValueError, match=r"had expert \(\d, \d+\); the device gave it to \(\d, \d+\), of another"):
        residency.with_experts(made)


def test_rounds_write_over_the_tables_of_those_before(engine: Engine) -> None:
    """A GPU changes each recorded launch of which an address has moved."""
    session, how = Session(engine), sampling_arrays(Sampling())
    session.prefill(PROMPT)

    def places() -> list[int]:
        trees = (engine.arrays, engine.tables.slot_of, engine.values)
        return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(trees)]

    before, first = places(), np.asarray(engine.tables.slot_of).copy()
    with engine.rounds():
        for window in ([7], [9], [11, 12]):
            session._round(window, [], how, 0.5, 0)
            assert places() == before
    assert (np.asarray(engine.tables.slot_of) != first).any()


def test_a_turn_by_kernels_is_a_turn_without(engine: Engine) -> None:
    """Interpreted, two blocks one after the other; slots lie in the core and in segments."""
    assert engine.values is not None
    assert engine.segments
    uses = np.random.default_rng(0).integers(0, 2, (2, NUM_EXPERTS)).astype(np.int32)

    def both(arrays: Sequence[jax.Array], *, kernels: bool) -> Any:
        kept = kept_before(engine.values, engine.tables, ())
        arrays, pages = tuple(arrays), []
        for layer, used in enumerate(uses):
            turn = Turn(kept.tables, engine.tables.slot_page, layer, DECAY)
            blobs = engine.banks[layer].blobs
            arrays, done = take_turn(turn, jnp.asarray(used), blobs, arrays, NUM_EXPERTS, kernels=kernels)
            kept, pages = replace(kept, tables=done.tables), [*pages, done.pages, done.num_fetches]
        return arrays, kept, pages

    expected, found = (jax.jit(lambda a, k=k: both(a, kernels=k))(engine.arrays) for k in (False, True))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(found[1:]), jax.tree.leaves(expected[1:])))
    assert all(int(num[0]) >= 2 for num in found[2][1::2])
    before = [np.asarray(array) for array in engine.arrays]
    changed = [(np.asarray(new) != old).any() for new, old in zip(found[0], before, strict=True)]
    assert sum(changed) >= 2, "no slot of a segment took part"
    engine.arena, engine.segments = found[0][0], found[0][1:]
    engine.after_turns(replace(found[1], segments=engine.segments))
    check_arena(engine)


# --- with what else moves memory

ASKS = (Ask("a", tokens(44, 1)), Ask("b", tokens(160, 2), 24), Ask("a", tokens(9, 3), 40))


def test_loans_growth_and_replacement_together_change_no_bit(engines: Engines) -> None:
    sink = Sink()
    run = start(engines, POLICIES, sink)
    engine, before = run.runtime.engine, run.runtime.engine.residency.slot_of.copy()
    for ask in ASKS:
        run.serve(ask)
        run.runtime.verify()
        check_arena(engine)
    assert run.differences == []
    moved = {MoveKind.LEND, MoveKind.REFILL, MoveKind.MAP_CELLS, MoveKind.TRIM_CELLS, MoveKind.PARK, MoveKind.RESTORE}
    assert moved <= set(sink.kinds())
    assert (engine.residency.slot_of != before).sum() > NUM_BLOCKS


@pytest.mark.parametrize("kind", [MoveKind.MAP_CELLS, MoveKind.REFILL])
def test_a_move_that_fails_between_rounds_leaves_tables_that_agree(engines: Engines, kind: MoveKind) -> None:
    left = [3]

    def fault(at: MoveKind, stage: str) -> None:
        if at is kind and stage == "prepared":
            left[0] -= 1
            if not left[0]:
                raise Injected

    run = start(engines, POLICIES, fault=fault)

    def serve_all() -> None:
        for ask in (*ASKS, *ASKS):
            run.serve(ask)

    with pytest.raises(Injected):
        serve_all()
    run.runtime.verify()
    check_arena(run.runtime.engine)
    run.ops.clear(), run.histories.clear()
    run.serve(Ask("new", tokens(50, 9), 30))
    assert run.differences == []
    check_arena(run.runtime.engine)

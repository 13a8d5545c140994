"""Where experts and cells lie does not matter to the bits, and it is real: the copy that the tables name is read.

Every test runs two prompt chunks, a forced window, a single step and rounds with drafts, so all paths that read experts
and cells are covered. Which experts a token uses is taken from llama.cpp's graph, not from the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.engine.arena import Tables
from strata_jax.engine.engine import Engine
from strata_jax.engine.experts import LayerBank
from strata_jax.engine.residency import Fill
from strata_jax.engine.sampler import sampling_arrays
from strata_jax.engine.session import ChunkRecord, RoundRecord, Session
from strata_jax.sampling import Sampling
from tests.engine.conftest import load
from tests.oracle import llama
from tests.oracle.models import ModelStore

NUM_EXPERTS = 64  # 33 tokens with 4 experts each leave some of them unused in every layer
TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 480, 33)]
PROMPT, WINDOW, LAST = TOKENS[:28], TOKENS[28:30], TOKENS[30:]
# a page of 5 KiB makes everything ragged: a 48 KiB expert leaves a tail in its last page, 8 cells leave one in theirs
SETTINGS = {"context_cells": 64, "chunk_tokens": 16, "page_bytes": 5120, "spec_window": 2}
NUM_BLOCKS = 5  # four trunk layers and the draft block
POISON = np.uint32(0xFFFFFFFF)  # a float NaN
SIGN_BIT = np.uint32(0x80000000)


@dataclass(frozen=True)
class Outputs:
    """What the runs of `outputs` gave, with how many expert reads the arena served."""

    trunk: np.ndarray  # f32[33, V]
    draft: np.ndarray  # f32[28, V], of the prompt
    rounds: list[tuple[int, ...]]  # tokens of three rounds with drafts
    state: list[np.ndarray]  # after these rounds, the draft block's included
    lookups: int
    hits: int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Outputs):
            return NotImplemented
        arrays = zip([self.trunk, self.draft, *self.state], [other.trunk, other.draft, *other.state], strict=True)
        return self.rounds == other.rounds and all(_same(a, b) for a, b in arrays)

    __hash__ = None  # type: ignore[assignment]


def outputs(engine: Engine) -> Outputs:
    """Read the prompt, a forced window and a last token; then the prompt again and three rounds with drafts."""
    records: list[ChunkRecord | RoundRecord] = []
    session = Session(engine, on_chunk=records.append)
    rows = [session.prefill(PROMPT, want="all")]
    greedy = sampling_arrays(Sampling())
    record, _, window = session._round(WINDOW, WINDOW[1:], greedy, 0.0, len(WINDOW) - 1)
    assert session.tokens == TOKENS[:30], "the forced window was not kept whole"
    records.append(record)
    rows.append(np.asarray(window))
    for record, step in session.force(LAST):
        records.append(record)
        rows.append(step[None])
    session = Session(engine, on_chunk=records.append)
    draft = session.prefill(PROMPT, want="draft")
    rounds = list(islice(session.decode(rows[0][-1:], max_tokens=100), 4))
    records += rounds[1:]
    return Outputs(
        trunk=np.concatenate(rows),
        draft=draft,
        rounds=[r.emitted for r in rounds],
        state=[np.asarray(x) for x in jax.tree.leaves(session.state)],
        lookups=sum(r.lookups for r in records),
        hits=sum(r.hits for r in records),
    )


def model(models: ModelStore) -> Path:
    return models.synthetic("nano", 0, overrides={"num_experts": NUM_EXPERTS})


@pytest.fixture(scope="module")
def engine(models: ModelStore) -> Engine:
    """An engine with every expert in the arena."""
    return load(model(models), expert_slots=NUM_BLOCKS * NUM_EXPERTS, **SETTINGS)


@pytest.fixture(scope="module")
def expected(engine: Engine) -> Outputs:
    found = outputs(engine)
    assert found.hits == found.lookups
    assert 3 * len(WINDOW) > sum(len(tokens) for tokens in found.rounds) - 1
    return found


@pytest.fixture
def whole(engine: Engine, expected: Outputs) -> Iterator[Engine]:
    """The engine, to be changed at will: arena, banks and tables are restored."""
    arena, banks, tables = np.asarray(engine.arena).copy(), engine.banks, engine.tables
    yield engine
    engine.arena, engine.banks, engine.tables = jnp.array(arena), banks, tables


@pytest.fixture
def half(whole: Engine) -> Engine:
    """The engine with the first half of every block's experts in the arena, and nothing of the others."""
    _evict(whole, [(layer, e) for layer in range(NUM_BLOCKS) for e in range(NUM_EXPERTS // 2, NUM_EXPERTS)])
    return whole


@pytest.fixture(scope="module")
def used(models: ModelStore, llama_oracle: None) -> np.ndarray:
    """The experts of each token, as llama.cpp routes them: i32[layer, token, expert per token]."""
    _, seen = llama.dump(model(models), TOKENS, r"ffn_moe_topk-\d+")
    by_layer = {int(name.split("-")[1]): ids.reshape(len(TOKENS), -1) for name, ids in seen}
    return np.stack([by_layer[layer] for layer in range(NUM_BLOCKS - 1)])


# --- how much is resident


@pytest.mark.parametrize("kept", [0, 1, NUM_BLOCKS * NUM_EXPERTS // 2], ids=["none", "one", "half"])
def test_any_number_of_resident_experts_gives_the_same_bits(
    kept: int, whole: Engine, expected: Outputs, used: np.ndarray
) -> None:
    first = (0, int(used[0, 0, 0]))
    pairs = [pair for pair in np.ndindex(NUM_BLOCKS, NUM_EXPERTS) if pair != first]
    _evict(whole, pairs[max(0, kept - 1) :] if kept else [first, *pairs])
    found = outputs(whole)
    assert found == expected
    assert found.lookups == expected.lookups
    assert (found.hits > 0) == (kept > 0)
    assert found.hits < expected.hits


def test_an_arena_planned_without_slots_gives_the_same_bits(models: ModelStore, expected: Outputs) -> None:
    engine = load(model(models), expert_slots=0, **SETTINGS)
    assert engine.plan.slot_pages == 0
    found = outputs(engine)
    assert found == expected
    assert (found.hits, found.lookups) == (0, expected.lookups)


# --- which copy is read


def test_bank_bytes_of_resident_experts_are_not_read(half: Engine, expected: Outputs) -> None:
    for layer in range(NUM_BLOCKS):
        half.banks = _with_bank(half, layer, np.arange(NUM_EXPERTS // 2), POISON)
    assert outputs(half) == expected


def test_arena_and_bank_bytes_of_experts_that_no_token_uses_are_not_read(
    half: Engine, expected: Outputs, used: np.ndarray
) -> None:
    for layer in range(NUM_BLOCKS - 1):
        idle = np.setdiff1d(np.arange(NUM_EXPERTS), used[layer])
        assert (idle < NUM_EXPERTS // 2).any()
        assert (idle >= NUM_EXPERTS // 2).any()
        half.banks = _with_bank(half, layer, idle, POISON)
        for expert in idle[idle < NUM_EXPERTS // 2]:
            _poison_slot(half, layer, int(expert), POISON)
    assert _same(outputs(half).trunk, expected.trunk)


@pytest.mark.parametrize("layer", range(NUM_BLOCKS - 1))
def test_arena_bytes_of_a_resident_expert_are_read_by_the_tokens_that_use_it(
    layer: int, half: Engine, expected: Outputs, used: np.ndarray
) -> None:
    expert, first = _late_expert(used[layer], range(NUM_EXPERTS // 2))
    _poison_slot(half, layer, expert, SIGN_BIT)
    _assert_changed_from(outputs(half).trunk, expected.trunk, first)


@pytest.mark.parametrize("layer", range(NUM_BLOCKS - 1))
def test_bank_bytes_of_an_expert_without_a_slot_are_read_by_the_tokens_that_use_it(
    layer: int, half: Engine, expected: Outputs, used: np.ndarray
) -> None:
    expert, first = _late_expert(used[layer], range(NUM_EXPERTS // 2, NUM_EXPERTS))
    half.banks = _with_bank(half, layer, np.array([expert]), SIGN_BIT)
    _assert_changed_from(outputs(half).trunk, expected.trunk, first)


@pytest.mark.parametrize("copy", ["arena", "bank"])
def test_experts_of_the_draft_block_are_read_from_the_copy_in_use_and_only_for_drafts(
    copy: str, half: Engine, expected: Outputs
) -> None:
    layer = NUM_BLOCKS - 1
    if copy == "arena":
        for expert in range(NUM_EXPERTS // 2):
            _poison_slot(half, layer, expert, SIGN_BIT)
    else:
        half.banks = _with_bank(half, layer, np.arange(NUM_EXPERTS // 2, NUM_EXPERTS), SIGN_BIT)
    found = outputs(half)
    assert _same(found.trunk, expected.trunk)
    assert not _same(found.draft, expected.draft)


# --- tables


def test_experts_may_trade_slots(half: Engine, expected: Outputs) -> None:
    pages = half.plan.pages_per_expert
    assert len(set(pages)) == 1, "the slots are of one size"
    first_page = np.asarray(half.tables.slot_page)
    order = np.random.default_rng(0).permutation(len(first_page))
    arena = np.asarray(half.arena).copy()
    moved = arena.copy()
    for old, new in zip(first_page, first_page[order], strict=True):
        moved[new : new + pages[0]] = arena[old : old + pages[0]]
    half.arena = jnp.array(moved)
    assert not _same(outputs(half).trunk, expected.trunk), "the slots were moved and the table still names the old ones"
    half.arena = jnp.array(moved)
    half.tables = replace(half.tables, slot_page=jnp.array(first_page[order]))
    assert outputs(half) == expected


def test_a_slot_may_change_hands_while_the_engine_is_loaded(half: Engine, expected: Outputs) -> None:
    slot_of = np.roll(np.asarray(half.tables.slot_of), NUM_EXPERTS // 2 - 5, axis=1)
    half.tables = replace(half.tables, slot_of=jnp.array(slot_of))
    half.copy_experts([Fill(int(b), int(e), int(slot_of[b, e])) for b, e in np.argwhere(slot_of >= 0)])
    for layer in range(NUM_BLOCKS):
        half.banks = _with_bank(half, layer, np.flatnonzero(slot_of[layer] >= 0), POISON)
    assert outputs(half) == expected


def test_cells_may_lie_in_any_page(half: Engine, expected: Outputs) -> None:
    pages = np.asarray(half.tables.kv_pages)
    assert pages.shape[1] * half.plan.cells_per_page == half.plan.context_cells
    assert len(TOKENS) > 3 * half.plan.cells_per_page
    shuffled = np.random.default_rng(1).permutation(pages.reshape(-1)).reshape(pages.shape)
    half.tables = replace(half.tables, kv_pages=jnp.array(shuffled))
    assert outputs(half) == expected


def test_cells_that_share_a_page_overwrite_each_other(half: Engine, expected: Outputs) -> None:
    """The cells are in the arena and nowhere else."""
    pages = np.asarray(half.tables.kv_pages).copy()
    pages[0, 1] = pages[0, 0]
    half.tables = replace(half.tables, kv_pages=jnp.array(pages))
    # of the first chunk's 16 tokens the second half overwrites the first before anything is read
    assert not _same(outputs(half).trunk[:1], expected.trunk[:1])


# --- what must not be read


def test_nothing_is_read_from_pages_and_cells_that_nobody_wrote(whole: Engine, expected: Outputs) -> None:
    plan, arena = whole.plan, np.asarray(whole.arena).copy()
    blob_words = whole.banks[0].layout.num_words
    slots = arena[: plan.slot_pages].reshape(plan.expert_slots, -1)
    assert slots.shape[1] > blob_words, "no slot has a tail"
    slots[:, blob_words:] = POISON
    arena[plan.slot_pages :] = POISON
    whole.arena = jnp.array(arena)
    assert outputs(whole) == expected


# --- in place


def test_the_arena_is_updated_in_place(whole: Engine) -> None:
    where, before = whole.arena.unsafe_buffer_pointer(), whole.arena
    session = Session(whole)
    logits = session.prefill(PROMPT, want="all")
    assert whole.arena.unsafe_buffer_pointer() == where
    assert before.is_deleted()
    for _ in islice(session.decode(logits, max_tokens=100), 3):
        assert whole.arena.unsafe_buffer_pointer() == where
    for _ in session.force(LAST):
        assert whole.arena.unsafe_buffer_pointer() == where
    whole.copy_experts([Fill(0, 0, int(whole.residency.slot_of[0, 0]))])
    assert whole.arena.unsafe_buffer_pointer() == where


def test_recurrent_state_is_updated_in_place(whole: Engine) -> None:
    session = Session(whole)
    session.prefill(PROMPT, want="all")
    before = session.state
    session.prefill(PROMPT[:16], want="all")
    assert all(x.is_deleted() for x in jax.tree.leaves((before.blocks, before.draft.keys, before.ple_history)))
    before = session.state
    list(session.force(LAST))
    assert all(x.is_deleted() for x in jax.tree.leaves((before.blocks, before.ple_history)))


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool((a.view(np.uint32) == b.view(np.uint32)).all())


def _assert_changed_from(found: np.ndarray, expected: np.ndarray, first: int) -> None:
    """The logits are those expected up to a token and others at it."""
    assert _same(found[:first], expected[:first]), f"a token before {first} changed"
    assert not _same(found[first], expected[first]), f"token {first} did not change"


def _evict(engine: Engine, pairs: Iterable[tuple[int, int]]) -> None:
    """Take experts out of the table and overwrite their slots."""
    slot_of, arena = np.asarray(engine.tables.slot_of).copy(), np.asarray(engine.arena).copy()
    slot_page = np.asarray(engine.tables.slot_page)
    for layer, expert in pairs:
        first = slot_page[slot_of[layer, expert]]
        arena[first : first + engine.plan.pages_per_expert[layer]] = POISON
        slot_of[layer, expert] = -1
    engine.tables, engine.arena = replace(engine.tables, slot_of=jnp.array(slot_of)), jnp.array(arena)


def _late_expert(used: np.ndarray, among: range) -> tuple[int, int]:
    """The expert of `among` that is used for the first time latest, and the token that does."""
    first_use = {e: int(np.flatnonzero((used == e).any(axis=1))[0]) for e in among if (used == e).any()}
    expert = max(first_use, key=lambda e: first_use[e])
    assert first_use[expert] > 8
    return expert, first_use[expert]


def _with_bank(engine: Engine, layer: int, experts: np.ndarray, pattern: np.uint32) -> tuple[LayerBank, ...]:
    """The banks with the bytes of some experts changed: all bits set, or every sign flipped."""
    bank = engine.banks[layer]
    blobs = np.asarray(bank.blobs).copy()
    blobs[experts] = POISON if pattern == POISON else blobs[experts] ^ pattern
    changed = replace(bank, blobs=jax.device_put(blobs, bank.blobs.sharding))
    return (*engine.banks[:layer], changed, *engine.banks[layer + 1 :])


def _poison_slot(engine: Engine, layer: int, expert: int, pattern: np.uint32) -> None:
    tables: Tables = engine.tables
    slot = int(tables.slot_of[layer, expert])
    assert slot >= 0
    first = int(tables.slot_page[slot])
    arena = np.asarray(engine.arena).copy()
    pages = arena[first : first + engine.plan.pages_per_expert[layer]]
    pages[:] = POISON if pattern == POISON else pages ^ pattern
    engine.arena = jnp.array(arena)

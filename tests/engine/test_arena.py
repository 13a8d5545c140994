"""Cells in arena pages: where they lie, what is dropped, and what each storage type costs in accuracy."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.engine.arena import CellLayout, Tables, read_cells, write_cells
from strata_jax.engine.engine import Engine
from strata_jax.engine.session import Session
from strata_jax.kv_types import KV_TYPES
from tests.engine.conftest import load
from tests.oracle.models import ModelStore, sample_tokens

NUM_PAGES, PAGE_WORDS, UNWRITTEN = 7, 50, 0xFFFFFFFF
LAYOUT = CellLayout("f32", cells_per_page=4, k_words=5, v_words=3, num_cells=18)  # the last page is cut by the context
PAGES = np.array([5, 2, 6, 0, 3], np.int32)
WRITE = jax.jit(write_cells, static_argnames="layout")
READ = jax.jit(read_cells, static_argnames=("run", "layout"))


def empty_arena() -> jax.Array:
    return jnp.full((NUM_PAGES, PAGE_WORDS), UNWRITTEN, jnp.uint32)


def words(positions: np.ndarray, width: int, kind: int) -> np.ndarray:
    """Words that say which cell they belong to."""
    return (1000 * kind + 10 * positions[:, None] + np.arange(width)).astype(np.uint32)


def expected_arena(positions: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """Keys of all cells of a page first, then their values; the rest untouched."""
    arena = np.full((NUM_PAGES, PAGE_WORDS), UNWRITTEN, np.uint32)
    for position, k, v in zip(positions, words(positions, 5, 1), words(positions, 3, 2), strict=True):
        page, cell = pages[position // 4], position % 4
        arena[page, 5 * cell : 5 * cell + 5] = k
        arena[page, 20 + 3 * cell : 20 + 3 * cell + 3] = v
    return arena


def write(positions: np.ndarray, valid: np.ndarray, pages: np.ndarray = PAGES) -> np.ndarray:
    k, v = words(positions, 5, 1), words(positions, 3, 2)
    args = (jnp.asarray(pages), jnp.asarray(positions), jnp.asarray(valid), jnp.asarray(k), jnp.asarray(v))
    return np.asarray(WRITE(empty_arena(), *args, layout=LAYOUT))


@pytest.mark.parametrize("first", [0, 1, 3, 4, 10])
def test_cells_are_written_to_the_pages_of_the_table_and_nowhere_else(first: int) -> None:
    positions = np.arange(first, first + 8)
    np.testing.assert_array_equal(write(positions, np.ones(8, bool)), expected_arena(positions, PAGES))


def test_invalid_rows_positions_past_the_context_and_pages_that_are_not_mapped_are_dropped() -> None:
    positions = np.arange(12, 20)
    valid = np.array([1, 1, 0, 1, 1, 1, 1, 1], bool)
    pages = PAGES.copy()
    np.testing.assert_array_equal(write(positions, valid), expected_arena(np.array([12, 13, 15, 16, 17]), PAGES))
    pages[3] = -1
    np.testing.assert_array_equal(write(positions, valid, pages), expected_arena(np.array([16, 17]), pages))
    beyond = np.arange(2**30, 2**30 + 8)
    np.testing.assert_array_equal(write(beyond, np.ones(8, bool)), np.asarray(empty_arena()))


@pytest.mark.parametrize("run", [1, 2, 4])
def test_runs_of_cells_are_read_from_where_they_were_written(run: int) -> None:
    positions = np.arange(16)
    arena = jnp.asarray(expected_arena(positions, PAGES))
    first = np.array([[0, 12], [4, 8]]) if run == 4 else np.array([[0, 14 - run % 2], [6, 8]])
    k, v = READ(arena, jnp.asarray(PAGES), jnp.asarray(first), run=run, layout=LAYOUT)
    wanted = first[..., None] + np.arange(run)
    np.testing.assert_array_equal(k, words(wanted.reshape(-1), 5, 1).reshape(2, 2, run, 5))
    np.testing.assert_array_equal(v, words(wanted.reshape(-1), 3, 2).reshape(2, 2, run, 3))


def test_expert_pages_follow_both_tables() -> None:
    slot_of = jnp.array([[2, -1, 0], [-1, 1, -1]])
    tables = Tables(slot_of, jnp.array([30, 10, 20]), jnp.zeros((1, 1), jnp.int32))
    assert tables.expert_pages(0).tolist() == [20, -1, 30]
    assert tables.expert_pages(1).tolist() == [-1, 10, -1]


# --- storage types

BITS = {"f32": 32, "f16": 16, "bf16": 16, "int8": 8, "k8v4": 6, "q4_0": 4}
# largest mean difference to float32 cells, at a logit std of 1.5; measured 6e-5, 5e-4, 2e-3, 2e-2, 3e-2 (2026-11)
MEAN_BOUND = {"f16": 3e-4, "bf16": 2e-3, "int8": 1e-2, "k8v4": 0.1, "q4_0": 0.1}
# A chunk reads its own cells back encoded, as a step does, so every type agrees as closely as float32 does, but where a
# value falls on the other side of a rounding border: then one code differs by a step, which the largest must allow for.
TYPICAL_DIFFERENCE = 1e-5
LARGEST_DIFFERENCE = {"f32": 2e-5, "f16": 1e-3, "bf16": 5e-3, "int8": 5e-3, "k8v4": 5e-2, "q4_0": 5e-2}
# nothing but attention, so that little else has to be compiled for each type
ATTENTION_ONLY: dict[str, object] = {
    "num_layers": 2, "full_attention_interval": 1, "ple_layer": None, "num_experts": 4, "num_experts_used": 2,
}  # fmt: skip
TOKENS = sample_tokens(1, 120, 512, 480)  # past the sparse budget of 32


@pytest.fixture(scope="module")
def by_type(models: ModelStore) -> dict[str, np.ndarray]:
    """Logits f32[120, V] of every type."""
    path = models.synthetic("nano", 0, overrides=ATTENTION_ONLY)
    engines = {t: _load(path, t) for t in KV_TYPES}
    return {t: Session(engine).prefill(TOKENS, want="all") for t, engine in engines.items()}


def _load(path: Path, kv_type: str) -> Engine:
    return load(path, context_cells=128, chunk_tokens=40, kv_type=kv_type, spec_window=1)


def test_fewer_bits_cost_more_accuracy_within_bounds(by_type: dict[str, np.ndarray]) -> None:
    exact = by_type["f32"]
    assert 1 < exact.std() < 2
    cost = {t: float(np.abs(logits - exact).mean()) for t, logits in by_type.items()}
    for kv_type, bound in MEAN_BOUND.items():
        assert bound / 20 < cost[kv_type] < bound, cost
    order = sorted(BITS, key=lambda t: (-BITS[t], t == "bf16"))
    assert order == ["f32", "f16", "bf16", "int8", "k8v4", "q4_0"]
    assert [cost[t] for t in order] == sorted(cost.values()), cost


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_chunks_and_single_steps_agree_in_every_type(
    kv_type: str, models: ModelStore, by_type: dict[str, np.ndarray]
) -> None:
    stepped = np.stack(
        [row for _, row in Session(_load(models.synthetic("nano", 0, overrides=ATTENTION_ONLY), kv_type)).force(TOKENS)]
    )
    difference = np.abs(stepped - by_type[kv_type])
    assert np.median(difference) <= TYPICAL_DIFFERENCE
    assert difference.max() <= LARGEST_DIFFERENCE[kv_type]


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_cells_take_the_planned_bytes(kv_type: str, models: ModelStore) -> None:
    engine = _load(models.synthetic("nano", 0, overrides=ATTENTION_ONLY), kv_type)
    assert engine.plan.cell_bytes == {
        "f32": 512, "f16": 256, "bf16": 256, "int8": 136, "k8v4": 68 + 36, "q4_0": 72,
    }[kv_type]  # fmt: skip
    layout = engine.programs.spec.cells
    assert 4 * (layout.k_words + layout.v_words) == engine.plan.cell_bytes
    assert engine.plan.kv_pages_per_layer * layout.cells_per_page >= 128

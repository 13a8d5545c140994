"""Attention by kernels, interpreted on the CPU: what the reference gives, in windows and chunks, wherever cells lie."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.engine import attention
from strata_jax.engine.arena import CellLayout, CellStore
from strata_jax.engine.attention import AttentionWeights, IndexerWeights
from strata_jax.engine.matrix import Matrix
from strata_jax.geometry import Geometry
from strata_jax.kernels import backend
from strata_jax.kv_types import cell_bytes
from strata_jax.memory.attention_kernels import attention_problem
from strata_jax.presets import preset_geometry
from tests.kernels.lowering import lower_for_cuda

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton backend:DeprecationWarning")

WIDTH, CELLS, PAGE_CELLS, RATIO = 32, 64, 8, 4
GROUPS = CELLS // PAGE_CELLS
NUM_TOKENS = 52  # keeps 3 of 13 blocks at the end
WINDOW_TOLERANCE, CHUNK_TOLERANCE = 2e-5, 1e-2  # of the largest value; a chunk's products have bfloat16 operands
POISON = 0xFFFFFFFF


@pytest.fixture(scope="module")
def geometry() -> Geometry:
    g = preset_geometry("synthetic_small", "q2_0", num_layers=4, num_experts=16)
    return replace(
        g, embed_width=WIDTH, num_heads=6, num_kv_heads=2, head_dim=64, rope_dim=16, index_heads=4, index_dim=16,
        index_top_k=12,
    )  # fmt: skip


def weights(g: Geometry) -> AttentionWeights:
    rng = np.random.default_rng(0)

    def matrix(rows: int, cols: int = WIDTH) -> Matrix:
        return Matrix(jnp.asarray(rng.standard_normal((rows, cols)) * 1.5 / cols**0.5, jnp.float32), "F32", cols)

    def gamma(width: int) -> jax.Array:
        return jnp.asarray(1 + 0.2 * rng.standard_normal(width), jnp.float32)

    queries, cells = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
    return AttentionWeights(
        q=matrix(2 * queries), k=matrix(cells), v=matrix(cells), out=matrix(WIDTH, queries),
        q_norm=gamma(g.head_dim), k_norm=gamma(g.head_dim), ratio=RATIO,
        indexer=IndexerWeights(
            matrix(g.index_heads * g.index_dim), matrix(g.index_dim), gamma(g.index_dim), gamma(g.index_dim)
        ),
    )  # fmt: skip


class Run:
    """One layer's attention over windows and chunks, its pages in disorder and poisoned; cells can go to a store."""

    def __init__(self, g: Geometry, *, kernels: bool) -> None:
        k_words, v_words = (num_bytes // 4 for num_bytes in cell_bytes("int8", g.num_kv_heads, g.head_dim))
        layout = CellLayout("int8", PAGE_CELLS, k_words, v_words, CELLS, kernels=kernels)
        self.w = weights(g)
        self.arena = jnp.full((GROUPS + 3, PAGE_CELLS * (k_words + v_words) + 5), POISON, jnp.uint32)
        self.pages = np.random.default_rng(1).permutation(GROUPS + 3)[:GROUPS].astype(np.int32)
        self.store: CellStore | None = None
        state = attention.empty_state(g, RATIO, CELLS)
        assert state is not None
        self.state = replace(state, keys=jnp.full_like(state.keys, np.nan))
        self.position = 0
        self.step = jax.jit(partial(attention.attend, g=g, layout=layout))

    def __call__(self, u: np.ndarray, kept: int | None = None, padding: int = 0) -> np.ndarray:
        """Attend from the rows of ``u`` and keep the first ``kept``; padding rows hold NaN."""
        padded = np.concatenate([u, np.full((padding, WIDTH), np.nan, np.float32)])
        out, self.arena, rows = self.step(
            padded, self.w, self.arena, self.pages, self.state, jnp.int32(self.position), jnp.int32(len(u)),
            store=self.store,
        )  # fmt: skip
        kept = len(u) if kept is None else kept
        state = attention.advance(self.state, rows, jnp.int32(kept))
        assert state is not None
        self.state, self.position = state, self.position + kept
        assert not np.asarray(out)[len(u) :].any()
        return np.asarray(out)[: len(u)]

    def move_to_store(self, groups: list[int]) -> None:
        arena, words = np.array(self.arena), np.full((GROUPS + 2, self.arena.shape[1]), POISON, np.uint32)
        for group in groups:
            words[2 + group] = arena[self.pages[group]]
            arena[self.pages[group]] = POISON
            self.pages[group] = -1
        self.arena, self.store = jnp.asarray(arena), CellStore(jnp.asarray(words), jnp.int32(2))


def far(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_kernels_give_what_the_reference_gives(geometry: Geometry) -> None:
    """A chunk and windows with padding and rejected rows; then half of the groups lie in a store."""
    u = np.random.default_rng(2).standard_normal((NUM_TOKENS, WIDTH)).astype(np.float32)
    runs = [Run(geometry, kernels=kernels) for kernels in (False, True)]
    assert far(*(run(u[:33], padding=2) for run in runs)) < CHUNK_TOLERANCE
    for run in runs:
        run.move_to_store([0, 2, 3])
    windows = [(33, 4, 1), (34, 4, 4), (38, 3, 2), (40, 4, 4), (44, 4, 4), (48, 4, 4)]
    for first, count, kept in windows:
        rows = u[first : first + count]
        assert far(*(run(rows, kept, padding=4 - count) for run in runs)) < WINDOW_TOLERANCE
    reference, by_kernel = runs
    assert by_kernel.position == NUM_TOKENS
    np.testing.assert_array_equal(by_kernel.arena, reference.arena)  # what was poison still is
    np.testing.assert_allclose(by_kernel.state.keys, reference.state.keys, atol=2e-6)
    np.testing.assert_allclose(by_kernel.state.tail, reference.state.tail, atol=1e-6)


@pytest.mark.parametrize(("num_tokens", "launches"), [(1, 5), (64, 4)])
def test_a_layer_is_few_launches_and_lowered_once(
    num_tokens: int, launches: int, geometry: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "interprets", lambda: False)
    run = Run(replace(geometry, index_top_k=CELLS), kernels=True)  # more blocks than a program of a window reads

    def two(u: jax.Array, *rest: Any) -> Any:
        return [run.step(factor * u, *rest) for factor in (2.0, 3.0)]

    u, zero = jax.ShapeDtypeStruct((num_tokens, WIDTH), jnp.float32), jnp.int32(0)
    text = lower_for_cuda(two, u, run.w, run.arena, jnp.asarray(run.pages), run.state, zero, zero)
    assert text.count("__gpu$xla.gpu.triton") == launches
    assert text.count("call @attend(") == 2


def test_what_the_kernels_cannot_compute_is_named(geometry: Geometry) -> None:
    def problem(kv_type: str = "int8", ratio: int = RATIO, **changes: int) -> str:
        found = attention_problem(replace(geometry, **changes), ratio, kv_type)
        assert found is not None
        return found

    assert attention_problem(geometry, RATIO, "int8") is None
    assert problem(ratio=0) == "dense attention is computed by the reference"
    assert problem(ratio=6) == "cells of a block: 6 is no power of two"
    assert problem(ratio=64) == "blocks have 64 cells, not 2 to 32"
    assert problem(ratio=1) == "blocks have 1 cells, not 2 to 32"
    assert problem(num_kv_heads=3) == "K/V heads: 3 is no power of two"
    assert problem(head_dim=80) == "head size: 80 is no power of two"
    assert problem("q4_0") == "heads of 64 values are smaller than 128, which kv.type=q4_0 needs"
    assert problem(index_dim=8) == "index heads of 8 values are smaller than 16"

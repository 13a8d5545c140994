"""Attention against the model's description in float64: selection of blocks, ties, tails, masks, rotation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.engine import attention
from strata_jax.engine.arena import CellLayout
from strata_jax.engine.attention import AttentionWeights, IndexerWeights, IndexState
from strata_jax.engine.layers import rope_tables, rotate
from strata_jax.engine.matrix import Matrix
from strata_jax.engine.session import Session
from strata_jax.geometry import Geometry
from strata_jax.gguf.reader import open_gguf
from tests.engine.conftest import load
from tests.oracle.models import ModelStore, oracle_logits, oracle_mtp_logits, sample_tokens

WIDTH, HEADS, KV_HEADS, HEAD = 16, 4, 2, 8
INDEX_HEADS, INDEX, TOP_K, RATIO, ROPE = 3, 8, 12, 4, 4
CELLS, PAGE_CELLS = 64, 8
NUM_TOKENS = 50  # keeps 3 of 12 blocks at the end
TOLERANCE = 2e-5
STEP = jax.jit(attention.attend, static_argnames=("g", "layout"))


@pytest.fixture(scope="module")
def geometry(models: ModelStore) -> Geometry:
    g = Geometry.from_gguf(open_gguf(models.synthetic("nano", 0)))
    return replace(
        g, embed_width=WIDTH, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD, rope_dim=ROPE, rope_base=1e4,
        index_heads=INDEX_HEADS, index_dim=INDEX, index_top_k=TOP_K,
    )  # fmt: skip


def weights(ratio: int, seed: int = 0) -> AttentionWeights:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, cols: int = WIDTH, scale: float = 1.5) -> Matrix:
        return Matrix(jnp.asarray(rng.standard_normal((rows, cols)) * scale / cols**0.5, jnp.float32), "F32", cols)

    def gamma(width: int) -> jax.Array:
        return jnp.asarray(1 + 0.2 * rng.standard_normal(width), jnp.float32)

    indexer = IndexerWeights(matrix(INDEX_HEADS * INDEX), matrix(INDEX), gamma(INDEX), gamma(INDEX))
    return AttentionWeights(
        q=matrix(2 * HEADS * HEAD), k=matrix(KV_HEADS * HEAD), v=matrix(KV_HEADS * HEAD),
        out=matrix(WIDTH, HEADS * HEAD), q_norm=gamma(HEAD), k_norm=gamma(HEAD),
        indexer=indexer if ratio else None, ratio=ratio,
    )  # fmt: skip


class Run:
    """Attention of one layer over windows of any size, in an arena of its own whose pages lie in disorder."""

    def __init__(self, w: AttentionWeights, g: Geometry, step: Callable[..., Any] = STEP) -> None:
        words = KV_HEADS * HEAD
        self.w, self.g = w, g
        self.layout = CellLayout("f32", PAGE_CELLS, words, words, CELLS)
        num_pages = CELLS // PAGE_CELLS
        # every page is poisoned, and page words behind the cells are too
        self.arena = jnp.full((num_pages + 3, 2 * words * PAGE_CELLS + 5), 0xFFFFFFFF, jnp.uint32)
        self.pages = jnp.asarray(np.random.default_rng(0).permutation(num_pages + 3)[:num_pages], jnp.int32)
        self.state = attention.empty_state(g, w.ratio, CELLS)
        if self.state is not None:
            self.state = replace(self.state, keys=jnp.full_like(self.state.keys, np.nan))
        self.position = 0
        self.step = partial(step, g=g, layout=self.layout)

    def __call__(self, u: np.ndarray, kept: int | None = None, padding: int = 0) -> np.ndarray:
        """Attend from the rows of ``u`` and keep the first ``kept``; padding rows hold NaN."""
        count = len(u)
        padded = np.concatenate([u, np.full((padding, WIDTH), np.nan, np.float32)])
        out, self.arena, rows = self.step(
            jnp.asarray(padded), self.w, self.arena, self.pages, self.state, jnp.int32(self.position), jnp.int32(count)
        )
        kept = count if kept is None else kept
        self.state = attention.advance(self.state, rows, jnp.int32(kept))
        self.position += kept
        return np.asarray(out)[:kept]


def reference(u: np.ndarray, w: AttentionWeights, g: Geometry) -> np.ndarray:
    """Token by token in float64. Of blocks with equal scores the first is kept."""
    f64 = partial(np.asarray, dtype=np.float64)
    u = f64(u)

    def rms(x: np.ndarray, gamma: jax.Array) -> np.ndarray:
        return f64(gamma) * x / np.sqrt((x**2).mean(-1, keepdims=True) + g.rms_eps)

    def turned(x: np.ndarray, position: int) -> np.ndarray:
        return np.stack([_rotated(row, position, g.rope_dim, g.rope_base) for row in x])

    outs, keys, values = [], [], []
    raw = u @ f64(w.indexer.k.data).T if w.indexer else None
    for p in range(len(u)):
        query_gate = (f64(w.q.data) @ u[p]).reshape(HEADS, 2 * HEAD)
        q = turned(rms(query_gate[:, :HEAD], w.q_norm), p)
        keys.append(turned(rms((f64(w.k.data) @ u[p]).reshape(KV_HEADS, HEAD), w.k_norm), p))
        values.append((f64(w.v.data) @ u[p]).reshape(KV_HEADS, HEAD))
        kept = list(range(p + 1))
        if w.indexer is not None and raw is not None:
            index_q = turned(rms((f64(w.indexer.q.data) @ u[p]).reshape(INDEX_HEADS, INDEX), w.indexer.q_norm), p)
            num_blocks = (p + 1) // RATIO
            scores = []
            for b in range(num_blocks):
                mean = raw[b * RATIO : (b + 1) * RATIO].mean(0)
                key = turned(rms(mean[None], w.indexer.k_norm), b * RATIO)[0]
                scores.append(np.maximum(index_q @ key, 0).sum() / INDEX**0.5)
            best = np.argsort(-np.round(scores, 12), kind="stable")[: TOP_K // RATIO]
            kept = [b * RATIO + i for b in best for i in range(RATIO)] + list(range(num_blocks * RATIO, p + 1))
        heads = []
        for h in range(HEADS):
            group = h // (HEADS // KV_HEADS)
            score = np.array([keys[c][group] @ q[h] for c in kept]) / HEAD**0.5
            weight = np.exp(score - score.max())
            heads.append((weight / weight.sum()) @ np.array([values[c][group] for c in kept]))
        gate = 1 / (1 + np.exp(-query_gate[:, HEAD:]))
        outs.append(f64(w.out.data) @ (np.array(heads) * gate).reshape(-1))
    return np.stack(outs)


def inputs(num_tokens: int = NUM_TOKENS, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_tokens, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("tiled", [False, True], ids=["whole", "in tiles"])
@pytest.mark.parametrize("ratio", [RATIO, 0], ids=["sparse", "dense"])
def test_attention_equals_the_description(
    ratio: int, tiled: bool, geometry: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = STEP
    if tiled:
        step = jax.jit(partial(attention.attend), static_argnames=("g", "layout"))  # traced with these constants
        monkeypatch.setattr(attention, "SCORE_TILE_BLOCKS", 3)  # 17 rows of index keys: the last tile overlaps
        monkeypatch.setattr(attention, "GATHER_TILE_VALUES", 16 * KV_HEADS * HEAD * 3)  # 3 tokens a tile
    w, u = weights(ratio), inputs()
    expected = reference(u, w, geometry)
    np.testing.assert_allclose(Run(w, geometry, step)(u), expected, atol=TOLERANCE)
    run = Run(w, geometry, step)
    parts = [
        run(u[:17], padding=3),
        run(u[17:18]),
        run(u[18:22], kept=1),
        run(u[19:23], kept=4),
        run(u[23:], padding=5),
    ]
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=TOLERANCE)


def test_the_sparse_selection_matters_past_its_budget_and_only_there(geometry: Geometry) -> None:
    """A token may see TOP_K cells of complete blocks and the incomplete tail; up to there sparse is dense."""
    u = inputs()
    sparse = Run(weights(RATIO), geometry)(u)
    dense = Run(replace(weights(RATIO), indexer=None, ratio=0), geometry)(u)
    budget = TOP_K + RATIO - 1
    np.testing.assert_allclose(sparse[:budget], dense[:budget], atol=TOLERANCE)
    assert (np.abs(sparse[budget:] - dense[budget:]).max(axis=1) > 1e-3).all()


@pytest.mark.parametrize("tile_blocks", [256, 3])
def test_of_equal_scores_the_lower_block_is_kept(
    tile_blocks: int, geometry: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SCORE_TILE_BLOCKS", tile_blocks)
    w = weights(RATIO).indexer
    assert w is not None
    u = inputs(2)
    positions = jnp.array([39, 42])  # 10 complete blocks; position 39 completes the last of them
    cos, sin = rope_tables(positions, ROPE, geometry.rope_base)
    keys = np.tile(np.random.default_rng(3).standard_normal(INDEX).astype(np.float32), (17, 1))

    def chosen(keys: np.ndarray) -> list[list[int]]:
        blocks, counts = attention._select(
            jnp.asarray(u), w, RATIO, jnp.asarray(keys), positions, jnp.int32(43), cos, sin, geometry
        )
        assert np.asarray(counts).all()
        return np.asarray(blocks).tolist()

    assert chosen(keys) == [[0, 1, 2]] * 2
    assert chosen(np.zeros_like(keys)) == [[0, 1, 2]] * 2, "scores of 0 tie as well"
    better = keys.copy()
    better[7] *= 2
    better[12] *= 100  # beyond what these tokens see
    assert chosen(better) == [[7, 0, 1]] * 2
    small = np.asarray(chosen_few(u, w, keys, geometry))
    assert small.tolist() == [[True, False, False], [True, True, False]]


def chosen_few(u: np.ndarray, w: IndexerWeights, keys: np.ndarray, g: Geometry) -> jax.Array:
    """Which choices count for tokens that see one and two complete blocks."""
    positions = jnp.array([6, 7])
    cos, sin = rope_tables(positions, ROPE, g.rope_base)
    return attention._select(jnp.asarray(u), w, RATIO, jnp.asarray(keys), positions, jnp.int32(8), cos, sin, g)[1]


@pytest.mark.parametrize("ratio", [RATIO, 0], ids=["sparse", "dense"])
def test_a_token_sees_nothing_of_later_ones(ratio: int, geometry: Geometry) -> None:
    w, u = weights(ratio), inputs()
    whole = Run(w, geometry)(u)
    for place in (1, 13, 32, 47):
        changed = u.copy()
        changed[place:] = inputs(seed=9)[place:]
        found = Run(w, geometry)(changed)
        np.testing.assert_array_equal(found[:place], whole[:place])
        assert np.abs(found[place] - whole[place]).max() > 1e-3


def test_index_keys_of_rejected_tokens_are_overwritten(geometry: Geometry) -> None:
    w, u = weights(RATIO), inputs()
    plain, drafted = Run(w, geometry), Run(w, geometry)
    plain(u[:24])
    drafted(u[:21])
    drafted(np.concatenate([u[21:22], inputs(5, seed=8)]), kept=1)  # completes a block with tokens that are dropped
    drafted(u[22:24])
    for run in (plain, drafted):
        assert isinstance(run.state, IndexState)
    np.testing.assert_allclose(drafted.state.keys[:6], plain.state.keys[:6], atol=1e-6)
    np.testing.assert_allclose(drafted.state.tail, plain.state.tail, atol=1e-6)
    np.testing.assert_allclose(drafted(u[24:]), plain(u[24:]), atol=TOLERANCE)


def test_rotation_equals_float64_up_to_the_longest_context() -> None:
    x = np.random.default_rng(0).standard_normal((6, 3, 80)).astype(np.float32)
    positions = np.array([0, 1, 17, 4095, 65_536, 262_143])
    cos, sin = rope_tables(jnp.asarray(positions), 64, 1e7)
    found = np.asarray(rotate(jnp.asarray(x), cos, sin))
    for i, position in enumerate(positions):
        expected = np.stack([_rotated(row.astype(np.float64), int(position), 64, 1e7) for row in x[i]])
        # an angle in float32 is off by its last bit, as in llama.cpp
        np.testing.assert_allclose(found[i], expected, atol=1e-6 + 8 * position * 2.0**-24)
    np.testing.assert_array_equal(found[..., 64:], x[..., 64:])
    np.testing.assert_array_equal(found[0], x[0])


def test_a_model_with_dense_attention_equals_llama_cpp(models: ModelStore, llama_oracle: None) -> None:
    path = models.synthetic("nano", 0, overrides={"compress_ratio": 0})
    engine = load(path, context_cells=128)
    assert set(engine.geometry.compress_ratio) == {0}
    tokens = sample_tokens(2, 100, 512, 480)
    expected = oracle_logits(path, tokens)
    assert np.abs(Session(engine).prefill(tokens, want="all") - expected).max() <= 5e-5
    session = Session(engine)
    session.prefill(tokens[:90])
    stepped = np.stack([row for _, row in session.force(tokens[90:])])
    assert np.abs(stepped - expected[90:]).max() <= 5e-5
    draft = Session(engine).prefill(tokens, want="draft")
    assert np.abs(draft - oracle_mtp_logits(path, tokens)).max() <= 5e-5


def _rotated(x: np.ndarray, position: int, rope_dim: int, base: float) -> np.ndarray:
    half = rope_dim // 2
    out = x.copy()
    for i in range(half):
        angle = position * base ** (-i / half)
        out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
        out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return out

"""Scores of blocks against float64, and the exact choice among them: ties, few blocks, none, borders of tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.kernels.index_select import Blocks, best_blocks, index_scores
from strata_jax.kernels.index_select.triton import part_blocks
from tests.kernels.lowering import lower_for_cuda
from tests.kernels.place import INTERPRET

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton backend:DeprecationWarning")

TILE = 32
SMALL = Blocks(score_blocks=16, score_programs=2, choose_blocks=TILE)
KEPT = 12


def test_scores_equal_float64_before_the_last_block_that_a_token_sees() -> None:
    rng = np.random.default_rng(0)
    q, keys = rng.standard_normal((3, 4, 32), np.float32), rng.standard_normal((61, 32), np.float32)
    seen = np.array([0, 17, 52], np.int32)
    keys[52:] = np.nan
    expected = np.maximum(np.einsum("thd,bd->thb", q.astype(np.float64), keys), 0).sum(1)
    for options in ({"backend": "reference"}, {"backend": "triton", "blocks": SMALL, "interpret": INTERPRET}):
        found = np.asarray(index_scores(*map(jnp.asarray, (q, keys, seen)), **options))
        for row, sees in enumerate(seen):
            np.testing.assert_allclose(found[row, :sees], expected[row, :sees], rtol=0, atol=2e-5)


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Scores of tokens, each a case, and how many blocks each sees; what it does not see is large or NaN."""
    rng = np.random.default_rng(1)
    size = 3 * TILE + 4
    ties = np.round(np.abs(rng.standard_normal(size)), 1)
    across = np.zeros(size)
    across[[3, TILE - 1, TILE, 2 * TILE - 1, 2 * TILE]] = 7.0
    across[TILE - 6 : TILE + 6] = 5.0  # 5 is the smallest kept score, and its blocks lie on both sides of a border
    cases = [
        (rng.random(size), size), (rng.random(size) * 1e-30, size), (ties, size), (ties, TILE), (across, size),
        (np.zeros(size), size), (np.full(size, 3e38), 2 * TILE + 1), (ties, KEPT), (ties, KEPT - 1), (ties, 1),
        (ties, 0), (np.where(np.arange(size) % 3, ties, np.nan), size),
    ]  # fmt: skip
    scores, seen = np.stack([row for row, _ in cases]).astype(np.float32), np.array([n for _, n in cases], np.int32)
    unseen = np.arange(size) >= seen[:, None]
    scores[unseen] = np.where(rng.random(unseen.sum()) < 0.5, np.nan, 1e30)
    return scores, seen


def chosen(scores: np.ndarray, seen: np.ndarray, kept: int) -> np.ndarray:
    """By a stable sort: of equal scores the lower index first."""
    out = np.zeros((len(scores), kept), np.int32)
    for row, sees in enumerate(seen):
        best = np.sort(np.argsort(-np.nan_to_num(scores[row, :sees]), kind="stable")[:kept])
        out[row, : len(best)] = best
    return out


@pytest.mark.parametrize("split_tokens", [None, 0, 12], ids=["reference", "interpreted", "in parts"])
def test_the_choice_is_exact_and_ascending(split_tokens: int | None) -> None:
    scores, seen = rows()
    options: dict[str, Any] = {"backend": "reference"}
    if split_tokens is not None:
        options = {"backend": "triton", "blocks": replace(SMALL, split_tokens=split_tokens), "interpret": INTERPRET}
    found = best_blocks(jnp.asarray(scores), jnp.asarray(seen), KEPT, **options)
    np.testing.assert_array_equal(found, chosen(scores, seen, KEPT))
    narrow = best_blocks(jnp.asarray(scores[:3, :5]), jnp.asarray([5, 4, 0], jnp.int32), KEPT, **options)
    np.testing.assert_array_equal(narrow, chosen(scores[:3, :5], np.array([5, 4, 0]), KEPT))


@pytest.mark.parametrize("levels", [2, 7, 10_000])
def test_parts_choose_what_the_whole_does(levels: int) -> None:
    """Seven parts of 64, with many blocks of equal scores on both sides of their borders."""
    num_blocks, kept = 400, 5
    assert part_blocks(num_blocks, kept) == 64
    seen = np.array([0, 1, 5, 6, 63, 64, 65, 69, 70, 128, 133, 399, 400], np.int32)
    scores = np.random.default_rng(levels).integers(levels, size=(len(seen), num_blocks)).astype(np.float32)
    options = {"blocks": replace(SMALL, split_tokens=len(seen)), "backend": "triton", "interpret": INTERPRET}
    found = best_blocks(jnp.asarray(scores), jnp.asarray(seen), kept, **options)
    np.testing.assert_array_equal(found, chosen(scores, seen, kept))


@pytest.mark.parametrize("tokens", [1, 8, 2048])
def test_the_models_sizes_lower_for_a_gpu(tokens: int) -> None:
    shape, blocks = jax.ShapeDtypeStruct, 65_537  # 262,144 cells

    def both(q: jax.Array, keys: jax.Array, seen: jax.Array) -> jax.Array:
        return best_blocks(index_scores(q, keys, seen, backend="triton"), seen, 512, backend="triton")

    text = lower_for_cuda(
        both, shape((tokens, 4, 128), jnp.float32), shape((blocks, 128), jnp.float32), shape((tokens,), jnp.int32)
    )
    assert text.count("__gpu$xla.gpu.triton") == (3 if tokens <= 8 else 2)


def test_operands_that_do_not_fit_are_refused() -> None:
    q, keys, seen = jnp.zeros((2, 4, 32)), jnp.zeros((9, 32)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="q has 3 index heads of 32: both must be powers of two"):
        index_scores(q[:, :3], keys, seen)
    with pytest.raises(ValueError, match=r"keys are f32\[B, 32\], got float32\[9, 16\]"):
        index_scores(q, keys[:, :16], seen)
    with pytest.raises(ValueError, match=r"seen is i32\[2\], got int32\[1\]"):
        index_scores(q, keys, seen[:1])
    with pytest.raises(ValueError, match=r"scores are f32\[T, B\], got int32\[2, 9\]"):
        best_blocks(jnp.zeros((2, 9), jnp.int32), seen, 3)
    with pytest.raises(ValueError, match="num_kept=0"):
        best_blocks(jnp.zeros((2, 9)), seen, 0)
    with pytest.raises(ValueError, match="backend='cuda' is unknown"):
        best_blocks(jnp.zeros((2, 9)), seen, 3, backend="cuda")

"""Routing by the kernel, interpreted, against top_k and a sort."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.kernels.expert_gemv import VectorRows
from strata_jax.kernels.route import Routing, choose_experts, route_window
from tests.kernels.lowering import lower_for_cuda
from tests.kernels.place import INTERPRET

pytestmark = pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
T, X, K, E = 3, 40, 5, 96
ROWS = VectorRows(("consecutive", "strided"))


def scores_of(num_tokens: int, num_experts: int) -> jax.Array:
    """Most scores are equal to others; one row is all the same, one has a NaN."""
    scores = np.round(2 * np.random.default_rng(3).standard_normal((num_tokens, num_experts))) / 2
    scores[-1] = 0.25
    return jnp.asarray(scores, jnp.float32)


def both(scores: jax.Array, u: jax.Array, pages: jax.Array, count: jax.Array) -> tuple[Routing, Routing]:
    run = partial(route_window, scores, u, u[1] / 8, pages, count, K, ROWS)
    return run(backend="reference"), run(backend="triton", interpret=INTERPRET)


def test_a_window_goes_where_the_reference_sends_it() -> None:
    rng = np.random.default_rng(4)
    scores, u = scores_of(T, X), jnp.asarray(rng.standard_normal((T, E)), jnp.float32)
    run = jax.jit(both)
    for count, resident in ((T, 0.5), (T, 0.0), (1, 1.0), (0, 0.5)):
        pages = np.where(rng.random(X) < resident, rng.integers(0, 99, X), -1).astype(np.int32)
        expected, found = jax.tree.map(np.asarray, run(scores, u, pages, jnp.int32(count)))
        pairs = count * K
        for name in ("ids", "hits", "uses", "x"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
        for name in ("experts", "first_row", "row_of"):
            np.testing.assert_array_equal(getattr(found.plan, name), getattr(expected.plan, name), err_msg=name)
        np.testing.assert_array_equal(found.plan.token_of[:pairs], expected.plan.token_of[:pairs])
        assert not found.plan.token_of[pairs:].any()
        np.testing.assert_allclose(found.weights, expected.weights, atol=1e-6)
        np.testing.assert_allclose(found.shared, expected.shared, atol=1e-6)
        assert (found.weights[count:] == 0).all()
        assert found.uses.sum() == pairs
    # rows that hold no number are in range all the same
    bad = scores.at[1, 7].set(jnp.nan)
    found = run(bad, u, pages, jnp.int32(T))[1]
    assert (np.diff(np.asarray(found.ids), axis=1) > 0).all()
    assert np.asarray(found.ids)[1].max() < X
    assert np.isnan(np.asarray(found.weights)[1]).all()


def test_equal_scores_go_to_the_lower_experts_in_a_chunk_too() -> None:
    scores = scores_of(9, 130)
    expected = choose_experts(scores, 10, backend="reference")
    found = choose_experts(scores, 10, backend="triton", interpret=INTERPRET)
    np.testing.assert_array_equal(found[0], expected[0])
    assert np.asarray(found[0])[-1].tolist() == list(range(10))
    np.testing.assert_allclose(found[1], expected[1], atol=1e-6)


def test_a_window_of_the_model_is_one_launch() -> None:
    shape = jax.ShapeDtypeStruct
    text = lower_for_cuda(
        lambda *args: route_window(*args, 10, ROWS), shape((8, 512), jnp.float32), shape((8, 2560), jnp.float32),
        shape((2560,), jnp.float32), shape((512,), jnp.int32), shape((), jnp.int32),
    )  # fmt: skip
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scores": np.zeros((9, X), np.float32), "u": np.zeros((9, E), np.float32)}, "at most 8 tokens, got 9"),
        ({"scores": np.zeros((T, X), np.int32)}, r"scores is f32\[T, X\], got int32\[3, 40\]"),
        ({"num_used": 41}, "cannot use 41 of 40 experts"),
        ({"num_used": 0}, "cannot use 0 of 40 experts"),
        ({"u": np.zeros((T, 33), np.float32)}, r"u is f32\[3, E\], E a multiple of 32, got float32\[3, 33\]"),
        ({"shared_router": np.zeros((1, E), np.float32)}, r"shared_router is f32\[96\], got float32\[1, 96\]"),
        ({"pages": np.zeros(5, np.int32)}, r"pages is i32\[40\], got int32\[5\]"),
        ({"backend": "mosaic"}, "backend='mosaic' is unknown"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict, message: str) -> None:
    given = {
        "scores": np.zeros((T, X), np.float32), "u": np.zeros((T, E), np.float32),
        "shared_router": np.zeros(E, np.float32), "pages": np.zeros(X, np.int32),
        "count": 1, "num_used": K, "rows": ROWS,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        route_window(**(given | changed))

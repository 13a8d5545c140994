"""Random packed blocks: every type's decoder gives finite weights of the stated size, centred, marked where asked."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.errors import FormatError
from strata_jax.gguf.blocks import ENGINE_TYPES, block_type
from strata_jax.kernels.dequant import dequantize
from strata_jax.synthetic.packed import FLOAT_TYPES, MARK_TYPES, MARKED_WEIGHTS, mark_rows, random_rows, rescaled

COLS = 512
RMS = 0.02


def decoded(rows: np.ndarray, type_name: str) -> np.ndarray:
    return np.asarray(dequantize(jnp.asarray(rows), type_name))


@pytest.mark.parametrize("type_name", sorted(ENGINE_TYPES))
def test_weights_are_finite_centred_and_as_large_as_asked(type_name: str) -> None:
    rows = random_rows(np.random.default_rng(1), 600, COLS, type_name, RMS)
    block = block_type(type_name)
    assert rows.shape == (600, COLS // block.block_len * block.block_bytes)
    values = decoded(rows, type_name)
    assert np.isfinite(values).all()
    assert np.sqrt(np.mean(values**2)) == pytest.approx(RMS, rel=0.05)
    # 307,200 weights: the mean of centred ones is 0 within RMS / sqrt(blocks)
    assert abs(values.mean()) < 4 * RMS / np.sqrt(values.size / block.block_len)
    assert np.abs(values.mean(axis=1)).max() < 0.9 * RMS
    assert len(np.unique(rows, axis=0)) == 600


@pytest.mark.parametrize("type_name", MARK_TYPES)
def test_a_mark_is_one_value_in_its_column(type_name: str) -> None:
    rng = np.random.default_rng(2)
    rows = random_rows(rng, 64, COLS, type_name, 0.7)
    before = decoded(rows, type_name)
    column = rng.integers(0, MARKED_WEIGHTS, 64)
    value = mark_rows(rows, type_name, column, 0.7)
    head = decoded(rows, type_name)[:, :MARKED_WEIGHTS]
    assert 2 < value / 0.7 < 7
    np.testing.assert_allclose(head[np.arange(64), column], value, rtol=1e-2)
    others = head[np.arange(MARKED_WEIGHTS) != column[:, None]]
    assert np.abs(others).max() <= value / 110
    rest = decoded(rows, type_name)[:, 32:]
    assert np.isfinite(rest).all()
    assert np.sqrt(np.mean(rest**2)) == pytest.approx(0.7, rel=0.15)
    if type_name != "Q8_0":
        np.testing.assert_array_equal(decoded(rows, type_name)[:, 256:], before[:, 256:])


@pytest.mark.parametrize("type_name", sorted(ENGINE_TYPES))
def test_rescaled_rows_keep_their_codes(type_name: str) -> None:
    rows = random_rows(np.random.default_rng(3), 8, COLS, type_name, 0.7)
    np.testing.assert_allclose(
        decoded(rescaled(rows, type_name, 0.1), type_name), 0.1 * decoded(rows, type_name), rtol=0.02, atol=2e-3
    )


def test_types_without_a_decoder_are_refused() -> None:
    with pytest.raises(FormatError, match="IQ1_M cannot be made; of F32"):
        random_rows(np.random.default_rng(0), 1, 256, "IQ1_M", 1.0)
    with pytest.raises(FormatError, match="Q2_0 cannot be marked; of F32"):
        mark_rows(np.zeros((1, 72), np.uint8), "Q2_0", np.zeros(1, int), 1.0)
    assert set(FLOAT_TYPES) < ENGINE_TYPES

"""Codes four to a word against the decoder of single codes, and vectors in whole numbers against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.kernels.planes import (
    ITEM,
    PLANE_TYPES,
    decode_codes,
    load_fields,
    lookup_table,
    plane_layout,
)
from strata_jax.kernels.planes.quads import LIMBS, PLAIN_OPS, QUADS, decode_quads, pack_vector, quad_order

ROWS, COLS = 16, 256


def bytes_of(words: jax.Array) -> np.ndarray:
    return np.ascontiguousarray(words).view(np.int8).reshape(*words.shape, 4).astype(np.int32)


@pytest.mark.parametrize("type_name", sorted(PLANE_TYPES))
def test_products_of_quads_are_products_of_codes(type_name: str) -> None:
    """Bytes without any meaning; sums of a half each, since some types have a scale for each half."""
    layout, rng = plane_layout(type_name, ROWS, COLS), np.random.default_rng(1)
    words = rng.integers(0, 2**32, (layout.row_words, ROWS), dtype=np.uint32)
    table, items = jnp.asarray(lookup_table(type_name)), jnp.arange(layout.num_items, dtype=jnp.int32)
    fields = load_fields(lambda word: jnp.asarray(words)[word], layout, items)

    def lookup(index: jax.Array) -> jax.Array:
        return table[index]

    codes = np.stack([np.asarray(code, np.float64) for code in decode_codes(fields, type_name, lookup)])
    quads = decode_quads(fields, type_name, lookup, PLAIN_OPS)
    x = rng.integers(-127, 128, (layout.num_items, ITEM)).astype(np.float32)
    x[:, 3] = 127  # scales are a power of two then, and limb 0 is x itself
    vector = pack_vector(jnp.asarray(x), (quad_order(type_name),))
    for half in range(2):
        run = slice(half * ITEM // 2, half * ITEM // 2 + ITEM // 2)
        expected = np.einsum("sjr,js->jr", codes[run], x[:, run].astype(np.float64))
        if quad_order(type_name) == "interleaved":  # halves share words: one scale
            run, expected = slice(0, ITEM), np.einsum("sjr,js->jr", codes, x.astype(np.float64))
        total = np.zeros(expected.shape)
        for limb in range(LIMBS):
            acc = jnp.zeros(expected.shape, jnp.int32)
            for quad in range(run.start // 4, run.stop // 4):
                acc = PLAIN_OPS.dot4(quads[quad], vector.words[limb][:, quad][:, None], acc)
            total = 256 * total + np.asarray(acc)
        np.testing.assert_allclose(total * np.asarray(vector.scale)[:, None], expected, rtol=1e-6, atol=1e-2)


def test_a_vector_is_rounded_to_about_a_unit_of_24_bits() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((6, ITEM)).astype(np.float32)
    x[1], x[2], x[3, 1:] = 0.0, x[2] * 1e30, 0.0
    x[4, 7], x[5, 8] = np.inf, np.nan
    for order in ("consecutive", "strided", "interleaved"):
        packed = jax.jit(pack_vector, static_argnums=1)(x, ("consecutive", order))
        assert len(packed.words) == 2 * LIMBS
        assert packed.words[0].shape == (6, QUADS)
        limbs = [bytes_of(words).reshape(6, ITEM) for words in packed.words]
        whole = (limbs[0] * 256 + limbs[1]) * 256 + limbs[2]
        same = (limbs[3] * 256 + limbs[4]) * 256 + limbs[5]
        assert (np.sort(same, axis=1) == np.sort(whole, axis=1)).all()
        assert (same == whole).all() == (order == "consecutive")
        scale = np.asarray(packed.scale, np.float64)[:, None]
        largest = np.abs(x[:4]).max(axis=1, keepdims=True)
        assert (np.abs(whole[:4] * scale[:4] - x[:4]) <= 1.25 * 2.0**-23 * largest).all()
        assert np.isnan(scale[4:]).all()
        np.testing.assert_allclose(packed.sum[:4], x[:4].sum(axis=1), rtol=1e-5, atol=1e-6)

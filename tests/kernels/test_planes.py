"""Planes hold the same bits as blocks: repacked and back, and decoded to the same numbers, for every type."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.errors import FormatError
from strata_jax.gguf.blocks import ENGINE_TYPES, block_type
from strata_jax.kernels.planes import (
    PLANE_TYPES,
    PlaneLayout,
    decode_planes,
    from_planes,
    plane_layout,
    to_planes,
    word_address,
)
from tests.kernels.test_dequant import assert_same_bits, gguf_py, random_rows

ROWS, COLS = 12, 1024
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # compile, not run


def decoded(packed: np.ndarray, layout: PlaneLayout) -> jax.Array:
    words = to_planes(packed, layout)
    return jax.jit(lambda words: decode_planes(words, layout), compiler_options=FAST)(words)


def test_every_quantised_type_of_the_engine_has_planes():
    assert set(PLANE_TYPES) == ENGINE_TYPES - {"F32", "F16", "BF16"}


@pytest.mark.parametrize("type_name", PLANE_TYPES)
def test_repacked_rows_come_back_bit_for_bit_and_decode_as_the_blocks(type_name):
    packed = random_rows(type_name, ROWS, COLS)
    packed.flags.writeable = False  # as a mapped file is
    layout = plane_layout(type_name, ROWS, COLS)
    words = to_planes(packed, layout)
    assert words.shape == (layout.num_words,)
    assert words.dtype == np.uint32
    assert (from_planes(words, layout) == packed).all()
    assert_same_bits(decoded(packed, layout), gguf_py(packed, type_name))


@pytest.mark.parametrize("type_name", ["IQ3_XXS", "Q5_K", "Q2_0"])
def test_a_matrix_larger_than_what_is_repacked_at_once_comes_back(type_name):
    packed = random_rows(type_name, 3 * 640, 2560)
    layout = plane_layout(type_name, *packed.shape[:1], 2560)
    words = to_planes(packed, layout)
    assert packed.nbytes > 1.1 * 2**20
    assert (from_planes(words, layout) == packed).all()
    last = plane_layout(type_name, layout.tile_rows, 2560)
    assert (words[-last.num_words :] == to_planes(packed[-layout.tile_rows :], last)).all()


@pytest.mark.parametrize(
    ("type_name", "rows", "cols"),
    [
        (type_name, rows, cols)
        for type_name in PLANE_TYPES
        for rows, cols in ((640, 2560), (2560, 640), (248320, 2560))
        if cols % block_type(type_name).block_len == 0
    ],
)
def test_planes_of_the_models_matrices_take_no_byte_more(type_name, rows, cols):
    layout = plane_layout(type_name, rows, cols)
    assert layout.tile_rows == 128
    assert 4 * layout.num_words == rows * layout.row_bytes


@pytest.mark.parametrize("type_name", PLANE_TYPES)
def test_a_line_holds_one_word_of_neighbouring_rows(type_name):
    """Rows that differ in one row only differ in that row's lane only."""
    packed = random_rows(type_name, ROWS, COLS, seed=2)
    layout = plane_layout(type_name, ROWS, COLS)
    assert layout.tile_rows == 4
    other = packed.copy()
    other[6] ^= 0xFF
    changed = np.flatnonzero(to_planes(packed, layout) != to_planes(other, layout))
    assert changed.tolist() == [word_address(layout, 6, word) for word in range(layout.row_words)]


@pytest.mark.parametrize(("type_name", "cols"), [("Q2_0", 192), ("Q4_K", 768)])
def test_rows_with_a_partly_filled_last_word_survive(type_name, cols):
    packed = random_rows(type_name, 6, cols, seed=3)
    layout = plane_layout(type_name, 6, cols)
    words = to_planes(packed, layout)
    assert 0 < 4 * words.size - packed.size <= 4 * 6 * 2
    rubbish = np.full(layout.num_words, 0xFFFFFFFF, np.uint32)
    assert to_planes(packed, layout, rubbish) is rubbish
    assert (rubbish == words).all()
    assert (from_planes(words, layout) == packed).all()
    assert_same_bits(decoded(packed, layout), gguf_py(packed, type_name))


@pytest.mark.parametrize("tile_rows", [1, 12])
def test_any_divisor_of_the_rows_can_be_interleaved(tile_rows):
    packed = random_rows("Q8_0", ROWS, COLS, seed=4)
    layout = plane_layout("Q8_0", ROWS, COLS, tile_rows)
    assert (from_planes(to_planes(packed, layout), layout) == packed).all()
    assert_same_bits(decoded(packed, layout), gguf_py(packed, "Q8_0"))


def test_what_has_no_planes_is_refused():
    with pytest.raises(FormatError, match=r"'F16'; there are for Q8_0, .*Q2_0"):
        plane_layout("F16", 4, 64)
    with pytest.raises(ValueError, match=r"4 x 320 matrix cannot be Q6_K: .* blocks of 256"):
        plane_layout("Q6_K", 4, 320)
    with pytest.raises(ValueError, match=r"tile_rows=8 does not divide 12 rows; 4 does"):
        plane_layout("Q6_K", 12, 256, 8)


def test_arrays_that_do_not_fit_the_layout_are_refused():
    layout = plane_layout("Q8_0", 4, 64)
    with pytest.raises(ValueError, match=r"Q8_0 4 x 64 is uint8\[4, 68\], got uint8\[4, 64\]"):
        to_planes(np.zeros((4, 64), np.uint8), layout)
    with pytest.raises(ValueError, match=r"out is contiguous uint32\[68\], got uint32\[67\]"):
        to_planes(np.zeros((4, 68), np.uint8), layout, np.zeros(67, np.uint32))
    with pytest.raises(ValueError, match=r"uint32\[68\], got int32\[68\]"):
        from_planes(np.zeros(68, np.int32), layout)
    with pytest.raises(ValueError, match=r"uint32\[68\], got uint32\[67\]"):
        decode_planes(jnp.zeros(67, jnp.uint32), layout)

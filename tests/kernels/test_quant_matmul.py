"""Products with packed dense matrices: kernels under interpretation against decoded matrices in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.kernels.expert_gemv import LaunchBlocks
from strata_jax.kernels.planes import PlaneLayout, decode_planes, lookup_table, plane_layout
from strata_jax.kernels.quant_matmul import MatmulBlocks, PlanePart, quant_matmul
from strata_jax.kernels.quant_matmul import triton as kernels
from strata_jax.kernels.quant_matmul.blocks import choose_gemv_blocks, choose_matmul_blocks
from strata_jax.kernels.quant_matmul.tiles import row_loader, weight_tile
from tests.kernels.lowering import lower_for_cuda

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton backend:DeprecationWarning")
ROWS, COLS = 256, 1024


def random_words(layout: PlaneLayout, seed: int = 0) -> np.ndarray:
    """u32[layout.num_words]: any bits, but f16 fields between 2^-7 and 2^-6, so that every weight is finite."""
    words = np.random.default_rng(seed).integers(0, 2**32, layout.num_words, np.uint32)
    rows = words.reshape(-1, layout.row_words, layout.tile_rows)
    for field in layout.fields:
        if field.name in ("d", "m"):
            at = slice(field.first, field.first + field.num_words)
            rows[:, at] = rows[:, at] & np.uint32(0x03FF03FF) | np.uint32(0x20002000)
    return words


@functools.cache
def matrix(type_name: str, rows: int = ROWS, cols: int = COLS) -> tuple[PlaneLayout, np.ndarray, np.ndarray]:
    """A layout, its words, and the decoded weights f64[rows, cols]."""
    layout = plane_layout(type_name, rows, cols)
    words = random_words(layout)
    return layout, words, np.asarray(decode_planes(jnp.asarray(words), layout), np.float64)


def rows_of_x(num_rows: int, cols: int = COLS) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((num_rows, cols)).astype(np.float32)


def rel_err(got: jax.Array, expected: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("type_name", ["Q5_K", "IQ3_XXS", "IQ4_NL"])  # all types: test_planes
def test_a_tile_holds_the_decoded_weights_rounded_once_in_the_order_of_columns(type_name):
    layout, words, weights = matrix(type_name)
    part = PlanePart(layout, 256)
    lines = np.zeros((3 + -(-(256 + layout.num_words) // 640), 640), np.uint32)
    lines.reshape(-1)[1536 : 1536 + layout.num_words] = words  # two lines, then two runs of 128 words
    load = row_loader(jnp.asarray(lines), jnp.int32(2), part, jnp.int32(192), 64)
    fields = [load(jnp.arange(layout.row_words, dtype=jnp.int32))]  # every word of the rows, in one load
    tile = weight_tile(lambda word: fields[0][word], layout, jnp.asarray(lookup_table(type_name)), jnp.int32(3), 4)
    expected = jnp.asarray(weights[192:256, 384:512], jnp.float32).astype(jnp.bfloat16)
    assert tile.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(tile, np.float32), np.asarray(expected.T, np.float32))


def test_many_rows():
    layout, words, weights = matrix("Q6_K")
    x = jnp.asarray(rows_of_x(32), jnp.bfloat16)
    blocks = MatmulBlocks(16, LaunchBlocks(64, 4))
    two = jnp.asarray(np.stack([np.zeros_like(words), words]))
    got = kernels.matmul(x, two, jnp.ones(1, jnp.int32), PlanePart(layout), blocks, interpret=True)
    assert rel_err(got, np.asarray(x, np.float64) @ weights.T) < 5e-3


@pytest.mark.parametrize("type_name", ["Q5_K", "Q6_K", "IQ2_S"])  # an offset, two scales, a codebook
def test_few_rows_are_exact_to_float32(type_name):
    layout, words, weights = matrix(type_name)
    x, line = rows_of_x(2), jnp.zeros(1, jnp.int32)
    blocks = LaunchBlocks(64, 4)
    got = kernels.gemv(jnp.asarray(x), jnp.asarray(words)[None], line, PlanePart(layout), blocks, interpret=True)
    assert rel_err(got, np.asarray(x, np.float64) @ weights.T) < 1e-6


@pytest.mark.parametrize(("num_rows", "bound"), [(1, 1e-6), (8, 1e-6), (9, 5e-3)])
def test_the_op_on_this_machine(num_rows, bound):
    layout, words, weights = matrix("Q5_K")
    x = rows_of_x(num_rows)
    got = jax.jit(quant_matmul, static_argnums=2)(x, jnp.asarray(words), layout)
    err = rel_err(got, np.asarray(x, np.float64) @ weights.T)
    assert err < bound
    assert (err > 1e-4) == (num_rows > 8)  # rounded operands where it says so, and only there


def test_wrong_shapes_are_named():
    layout, words, _ = matrix("Q5_K")
    with pytest.raises(ValueError, match=r"Q5_K 256 x 1024 in .* words"):
        quant_matmul(jnp.zeros((1, COLS)), jnp.asarray(words[:-1]), layout)
    with pytest.raises(ValueError, match=r"x\[1, 512\]"):
        quant_matmul(jnp.zeros((1, 512)), jnp.asarray(words), layout)


@pytest.mark.parametrize(("rows", "cols"), [(248_320, 2560), (10_240, 2560), (2560, 10_240), (2560, 640), (512, 2560)])
def test_chosen_blocks_fit_the_matrices_of_the_model(rows, cols):
    layout = plane_layout("Q8_0", rows, cols)
    gemv, many = choose_gemv_blocks(layout), choose_matmul_blocks(2048, layout)
    for blocks in (gemv, many.launch):
        assert layout.tile_rows % blocks.rows == 0


@pytest.mark.parametrize("num_rows", [2, 128])
def test_kernels_lower_for_a_gpu(num_rows):
    layout = plane_layout("Q5_K", 256, 2560)
    x = jax.ShapeDtypeStruct((num_rows, 2560), jnp.float32)
    words = jax.ShapeDtypeStruct((layout.num_words,), jnp.uint32)
    assert "triton" in lower_for_cuda(lambda x, words: quant_matmul(x, words, layout), x, words)

"""Products with packed dense matrices: kernels under interpretation against decoded matrices in float64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.kernels.expert_gemv import LaunchBlocks
from strata_jax.kernels.planes import PlaneLayout, decode_planes, lookup_table, plane_layout
from strata_jax.kernels.quant_matmul import MatmulBlocks, PlanePart, quant_matmul, quant_matmuls
from strata_jax.kernels.quant_matmul import triton as kernels
from strata_jax.kernels.quant_matmul.blocks import GemvLaunch, choose_gemv_launch, choose_matmul_blocks
from strata_jax.kernels.quant_matmul.tiles import row_loader, weight_tile
from tests.kernels.lowering import lower_for_cuda
from tests.kernels.place import INTERPRET

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton backend:DeprecationWarning")
ROWS, COLS = 256, 1024
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # compile, not run


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
    words = random_words(layout, rows)  # matrices of other sizes have other words
    return layout, words, np.asarray(decode_planes(jnp.asarray(words), layout), np.float64)


def end_to_end(
    cases: Sequence[tuple[PlaneLayout, np.ndarray, np.ndarray]],
) -> tuple[list[PlanePart], np.ndarray, list[np.ndarray]]:
    """Matrices in one array, the tallest tiles first and 128 other words before them; parts and weights as given."""
    order = sorted(range(len(cases)), key=lambda i: -cases[i][0].tile_rows)
    arrays, first, firsts = [np.full(128, 0xFFFFFFFF, np.uint32)], 128, dict[int, int]()
    for i in order:
        firsts[i] = first
        arrays.append(cases[i][1])
        first += len(cases[i][1])
    parts = [PlanePart(layout, firsts[i]) for i, (layout, _, _) in enumerate(cases)]
    return parts, np.concatenate(arrays), [weights for _, _, weights in cases]


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


@pytest.mark.parametrize("rows", [16, 64])  # weights are the left operand, and the right one
def test_many_rows(rows):
    layout, words, weights = matrix("Q6_K", cols=256)
    x = jnp.asarray(rows_of_x(128, 256), jnp.bfloat16)
    blocks = MatmulBlocks(rows, LaunchBlocks(64, 4))
    two = jnp.asarray(np.stack([np.zeros_like(words), words]))
    got = kernels.matmul(x, two, jnp.ones(1, jnp.int32), PlanePart(layout), blocks, interpret=INTERPRET)
    assert rel_err(got, np.asarray(x, np.float64) @ weights.T) < 5e-3


def test_a_matrix_is_decoded_whole_and_rounded_once():
    layout, words, weights = matrix("Q5_K", 192, 256)  # three tiles of 64 rows
    op = functools.partial(kernels.decode, part=PlanePart(layout, 64), blocks=LaunchBlocks(32, 4), interpret=INTERPRET)
    got = jax.jit(op, compiler_options=FAST)(np.concatenate([words[:64], words]))
    np.testing.assert_array_equal(np.asarray(got, np.float32), jnp.asarray(weights, jnp.float32).astype(jnp.bfloat16))


def test_few_rows_are_exact_to_float32():
    """One launch: an offset, two scales, a codebook; two matrices that share code, though tiles of one are lower than a
    block of rows and do not fill the last one; columns in parts."""
    num_tokens, cols = 3, 40 * 32
    cases = [matrix(*shape, cols) for shape in (("Q5_K", 48), ("IQ2_S", 128), ("Q5_K", 256))]
    # 20 items in each part of the columns: 16 and 4; the second program computes the last token twice
    blocks = GemvLaunch(rows=64, items=16, splits=2, warps=4, tokens=2)
    parts, words, weights = end_to_end(cases)
    x = rows_of_x(num_tokens, cols)
    op = functools.partial(kernels.gemv, parts=parts, blocks=blocks, interpret=INTERPRET)
    found = jax.jit(op, compiler_options=FAST)(x, words)
    for got, expected in zip(found, weights, strict=True):
        assert rel_err(got, np.asarray(x, np.float64) @ expected.T) < 1e-6


@pytest.mark.parametrize("type_name", ["IQ4_XS", "Q6_K", "Q5_K"])  # one scale an item, two, an offset
def test_whole_numbers_are_as_exact(type_name):
    num_tokens, cols = 3, 16 * 32
    case = matrix(type_name, 96, cols)  # tiles of 32 rows, in blocks of 64
    blocks = GemvLaunch(rows=64, items=8, splits=1, warps=4, tokens=2, whole_numbers=True)
    parts, words, (expected,) = end_to_end([case])
    x = rows_of_x(num_tokens, cols)
    op = functools.partial(kernels.gemv, parts=parts, blocks=blocks, interpret=INTERPRET)
    (got,) = jax.jit(op, compiler_options=FAST)(x, words)
    assert rel_err(got, np.asarray(x, np.float64) @ expected.T) < 1e-6


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_operands_are_rounded_from_nine_rows_on_and_only_then(backend):
    cols = 128
    cases = [matrix("Q8_0", rows, cols) for rows in (64, 8)]  # 8 rows are too few for tensor cores
    parts, words, weights = end_to_end(cases)
    for num_rows in (8, 9, 1100) if backend == "triton" else (8, 9):
        x = rows_of_x(num_rows, cols)
        op = functools.partial(quant_matmuls, parts=parts, backend=backend, interpret=INTERPRET)
        for got, expected in zip(jax.jit(op, compiler_options=FAST)(x, words), weights, strict=True):
            assert got.shape == (num_rows, len(expected))
            err = rel_err(got, np.asarray(x, np.float64) @ expected.T)
            assert 1e-4 < err < 5e-3 if num_rows > 8 else err < 1e-6


def test_wrong_shapes_are_named():
    layout, words, _ = matrix("Q5_K")
    with pytest.raises(ValueError, match=r"Q5_K 256 x 1024 in .* words"):
        quant_matmul(jnp.zeros((1, COLS)), jnp.asarray(words[:-1]), layout)
    more = jnp.concatenate([jnp.asarray(words), jnp.zeros(200, jnp.uint32)])
    for first, problem in ((128, ""), (256, "got .* words"), (4, "runs of 128"), (-128, "from -128 on")):
        call = functools.partial(quant_matmuls, jnp.zeros((1, COLS)), more, (PlanePart(layout, first),))
        if problem:
            with pytest.raises(ValueError, match=problem):
                call()
        else:
            call()
    with pytest.raises(ValueError, match=r"x\[1, 512\]"):
        quant_matmul(jnp.zeros((1, 512)), jnp.asarray(words), layout)


# rows of matrices that share their input, its columns, and the programs that they make
LAUNCHES = [
    ((248_320,), 2560, 3880),
    ((10_240, 6144, 48, 48), 2560, 258),
    ((12_288, 512, 512), 2560, 208),
    ((2560,), 6144, 240),
    ((640, 640), 2560, 100),
    ((2560,), 640, 160),
    ((320,), 10_240, 100),
    ((4,), 10_240, 20),
    ((10_240,), 320, 160),
]


@pytest.mark.parametrize(("rows", "cols", "programs"), LAUNCHES)
def test_chosen_blocks_fit_the_matrices_of_the_model(rows, cols, programs):
    layouts = [plane_layout("Q8_0", n, cols) for n in rows]
    for num_tokens in (1, 4, 5, 8):
        launch = choose_gemv_launch(num_tokens, layouts)
        assert -(-num_tokens // launch.tokens) == (1 if num_tokens <= 5 else 2)
        assert sum(launch.programs(layout) for layout in layouts) == programs
        assert all(layout.num_items % launch.splits == 0 for layout in layouts)
        assert all(n & (n - 1) == 0 < n for n in (launch.rows, launch.items, launch.warps))
        assert launch.whole_numbers == (rows == (248_320,))
    for layout in layouts:
        assert layout.tile_rows % choose_matmul_blocks(2048, layout).launch.rows == 0
    at_once = {n: choose_matmul_blocks(n, layouts[0]).rows for n in (9, 16, 17, 64, 65, 128, 192, 512)}
    assert at_once == {9: 16, 16: 16, 17: 32, 64: 64, 65: 128, 128: 128, 192: 64, 512: 128}


def test_matrices_of_one_input_share_launches():
    layouts = [plane_layout(*shape, 2560) for shape in (("Q6_K", 512), ("Q6_K", 48), ("Q5_K", 48))]
    firsts = itertools.accumulate((layout.num_words for layout in layouts), initial=0)
    parts = [PlanePart(layout, first) for layout, first in zip(layouts, firsts)]
    words = jax.ShapeDtypeStruct((sum(layout.num_words for layout in layouts),), jnp.uint32)
    for num_rows, launches in ((2, 1), (4, 2)):  # two codes, for two types
        x = jax.ShapeDtypeStruct((num_rows, 2560), jnp.float32)
        text = lower_for_cuda(lambda x, words: quant_matmuls(x, words, parts), x, words)
        assert text.count("__gpu$xla.gpu.triton") == launches


@pytest.mark.parametrize("num_rows", [2, 128, 1088])
def test_kernels_lower_for_a_gpu(num_rows):
    layout = plane_layout("Q5_K", 256, 2560)
    x = jax.ShapeDtypeStruct((num_rows, 2560), jnp.float32)
    words = jax.ShapeDtypeStruct((layout.num_words,), jnp.uint32)
    text = lower_for_cuda(lambda x, words: quant_matmul(x, words, layout), x, words)
    assert text.count("__gpu$xla.gpu.triton") == 1
    assert ("bf16[256,2560]" in text or "256x2560xbf16" in text) == (num_rows > 1024)  # decoded for XLA's product

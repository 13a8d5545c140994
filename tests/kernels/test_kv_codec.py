"""K/V codecs: sizes of the real geometry, round trips within stated bounds, ggml's own Q4_0 blocks, refusals."""

from __future__ import annotations

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.errors import ConfigError
from strata_jax.kernels.kv_codec import decode_k, decode_v, encode_k, encode_v, hadamard
from strata_jax.kernels.kv_codec.reference import q4_0_blocks
from strata_jax.kv_types import KV_TYPES, cell_bytes, sides
from tests.oracle import ggml, require

GEOMETRIES = [(2, 256), (1, 64), (3, 32), (1, 128)]


def cells(num_kv_heads: int, head_dim: int, num_cells: int = 33, seed: int = 0) -> np.ndarray:
    """Keys as models have them: heads of different size and a few outlying channels."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_cells, num_kv_heads, head_dim)) * np.exp(
        rng.standard_normal((num_cells, num_kv_heads, 1))
    )
    x[..., ::37] *= 8
    return x.astype(np.float32)


@functools.cache
def codec(kv_type: str, num_kv_heads: int, head_dim: int, side: int):
    encode, decode = ((encode_k, decode_k), (encode_v, decode_v))[side]
    return (
        jax.jit(lambda x: encode(x, kv_type)),
        jax.jit(lambda words: decode(words, kv_type, num_kv_heads, head_dim)),
    )


@pytest.mark.parametrize(
    ("kv_type", "total"), [("f32", 4096), ("f16", 2048), ("bf16", 2048), ("int8", 1056), ("k8v4", 816), ("q4_0", 576)]
)
def test_cell_of_the_real_geometry_takes_the_stated_bytes(kv_type, total):
    assert sum(cell_bytes(kv_type, 2, 256)) == total


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [*GEOMETRIES, (1, 1), (3, 17)])
def test_words_take_exactly_the_planned_bytes(kv_type, num_kv_heads, head_dim):
    if head_dim < 32 and kv_type in ("q4_0", "k8v4"):
        pytest.skip("refused: see the test of refusals")
    x = jax.ShapeDtypeStruct((5, num_kv_heads, head_dim), jnp.float32)
    shapes = [jax.eval_shape(lambda x, e=encode: e(x, kv_type), x) for encode in (encode_k, encode_v)]
    assert tuple(4 * s.shape[-1] for s in shapes) == cell_bytes(kv_type, num_kv_heads, head_dim)
    assert all(s.dtype == jnp.uint32 and s.shape[0] == 5 for s in shapes)


def test_sides_are_padded_to_whole_words():
    assert cell_bytes("int8", 1, 64) == (68, 68)  # 64 codes and a scale of 2 bytes, then 2 of padding
    assert cell_bytes("f16", 1, 17) == (36, 36)
    assert cell_bytes("k8v4", 1, 32) == (36, 20)


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), GEOMETRIES)
@pytest.mark.parametrize(("kv_type", "relative"), [("f32", 0.0), ("f16", 2.0**-11), ("bf16", 2.0**-8)])
def test_floats_round_once(kv_type, relative, num_kv_heads, head_dim):
    x = cells(num_kv_heads, head_dim)
    encode, decode = codec(kv_type, num_kv_heads, head_dim, 0)
    got = np.asarray(decode(encode(x)))
    assert got.shape == x.shape
    assert (np.abs(got - x) <= relative * np.abs(x) + (2.0**-25 if kv_type == "f16" else 0)).all()
    if kv_type == "f16":
        assert (got == x.astype(np.float16).astype(np.float32)).all()


def test_f16_clamps_what_it_cannot_hold():
    x = jnp.array([[[1e6, -1e6, 65504.0, 1.0]]])
    assert np.asarray(decode_v(encode_v(x, "f16"), "f16", 1, 4)).tolist() == [[[65504.0, -65504.0, 65504.0, 1.0]]]


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), GEOMETRIES)
def test_int8_error_is_at_most_half_a_step_of_its_group(num_kv_heads, head_dim):
    x = cells(num_kv_heads, head_dim)
    encode, decode = codec("int8", num_kv_heads, head_dim, 0)
    got = np.asarray(decode(encode(x)))
    group = min(64, head_dim)
    step = np.abs(x.reshape(-1, group)).max(-1, keepdims=True) / 127
    error = np.abs(got - x).reshape(-1, group)
    assert (error <= step * (0.5 + 2**-9)).all()
    assert (error.max(-1) > step[:, 0] * 0.25).mean() > 0.9, "the bound must be near what happens"


def test_int8_layout_is_codes_then_one_f16_scale_per_64_values():
    x = cells(2, 256, num_cells=4)
    raw = np.asarray(codec("int8", 2, 256, 0)[0](x)).view(np.uint8)
    codes, scales = raw[:, :512].view(np.int8), raw[:, 512:].copy().view(np.float16)
    largest = np.abs(x.reshape(4, 8, 64)).max(-1)
    assert (scales == (largest / np.float32(127)).astype(np.float16)).all()
    expected = np.round(x.reshape(4, 8, 64) / scales.astype(np.float32)[..., None])
    assert (codes.reshape(4, 8, 64) == np.clip(expected, -127, 127)).all()


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), GEOMETRIES)
def test_q4_0_blocks_equal_ggmls_encoding_of_the_rotated_heads(num_kv_heads, head_dim):
    require()
    x = cells(num_kv_heads, head_dim)
    rotated = np.asarray(jax.jit(hadamard)(x)).reshape(len(x), -1)
    expected = ggml.quantize(rotated, "Q4_0")
    assert (np.asarray(jax.jit(q4_0_blocks)(rotated)) == expected).all()

    words = np.asarray(codec("q4_0", num_kv_heads, head_dim, 0)[0](x))
    cell = words.view(np.uint8)[:, : expected.shape[-1]]
    assert (cell == expected).all()


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), GEOMETRIES)
def test_q4_0_error_is_at_most_a_step_in_the_rotated_basis(num_kv_heads, head_dim):
    x = cells(num_kv_heads, head_dim)
    encode, decode = codec("q4_0", num_kv_heads, head_dim, 0)
    got = np.asarray(decode(encode(x)))
    rotated, stored = (np.asarray(hadamard(jnp.asarray(v))).reshape(-1, 32) for v in (x, got))
    step = np.abs(rotated).max(-1, keepdims=True) / 8
    assert (np.abs(stored - rotated) <= step * (1 + 2**-9)).all()  # a whole step only at the end away from -8
    assert np.sqrt(((got - x) ** 2).mean() / (x**2).mean()) < 0.12


def test_rotation_helps_where_a_few_channels_stand_out():
    x = cells(2, 256)
    x[..., ::37] *= 4
    rotated = np.asarray(codec("q4_0", 2, 256, 0)[1](codec("q4_0", 2, 256, 0)[0](x)))
    blocks = jax.jit(q4_0_blocks)(x.reshape(len(x), -1))
    require()
    plain = ggml.dequantize(np.asarray(blocks), "Q4_0").reshape(x.shape)
    assert ((rotated - x) ** 2).mean() < 0.7 * ((plain - x) ** 2).mean()


@pytest.mark.parametrize("head_dim", [1, 2, 32, 64, 128, 256])
def test_hadamard_is_the_normalised_sylvester_matrix_and_its_own_inverse(head_dim):
    matrix = np.asarray(jax.jit(hadamard)(jnp.eye(head_dim)))
    expected = np.array([[(-1.0) ** (i & j).bit_count() for j in range(head_dim)] for i in range(head_dim)])
    np.testing.assert_allclose(matrix, expected / np.sqrt(head_dim), rtol=1e-6)
    x = cells(1, head_dim)
    np.testing.assert_allclose(np.asarray(hadamard(hadamard(jnp.asarray(x)))), x, atol=4e-6 * np.abs(x).max())


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("side", [0, 1])
def test_what_was_decoded_encodes_to_the_same_words(kv_type, side):
    encode, decode = codec(kv_type, 2, 256, side)
    words = np.asarray(encode(cells(2, 256)))
    assert (np.asarray(encode(decode(words))) == words).all()


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_zero_cells_stay_zero(kv_type):
    for side in (0, 1):
        encode, decode = codec(kv_type, 2, 256, side)
        assert (np.asarray(decode(encode(np.zeros((3, 2, 256), np.float32)))) == 0).all()


def test_k8v4_stores_keys_as_int8_and_values_as_q4_0():
    assert sides("k8v4") == ("int8", "q4_0")
    x = cells(2, 256)
    for side, same_as in enumerate(("int8", "q4_0")):
        words = codec("k8v4", 2, 256, side)[0](x)
        assert (np.asarray(words) == np.asarray(codec(same_as, 2, 256, side)[0](x))).all()


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_pages_and_single_cells_encode_alike(kv_type):
    x = cells(2, 256, num_cells=12)
    encode, decode = codec(kv_type, 2, 256, 0)
    words, values = np.asarray(encode(x)), np.asarray(decode(encode(x)))
    assert (np.asarray(encode(x.reshape(3, 4, 2, 256))) == words.reshape(3, 4, -1)).all()
    assert (np.asarray(encode(x[5])) == words[5]).all()
    assert (np.asarray(decode(words.reshape(3, 4, -1))) == values.reshape(3, 4, 2, 256)).all()
    assert (np.asarray(decode(words[5])) == values[5]).all()


@pytest.mark.parametrize(
    ("kv_type", "head_dim", "message"),
    [
        ("q4_0", 80, r"q4_0 in blocks of 32 .* head_dim 80 is not a multiple of 32 \(16 left over\).*f32, f16 or bf16"),
        ("k8v4", 80, r"int8 in blocks of 64 .* head_dim 80 is not a multiple of 64 \(16 left over\)"),
        ("int8", 80, r"blocks of 64 .* head_dim 80 is not a multiple of 64 \(16 left over\)"),
        ("q4_0", 17, r"head_dim 17 is not a multiple of 32 \(17 left over\).*int8 would work"),
        ("q4_0", 192, r"head_dim 192 lies between 128 and 256; .*int8 would work"),
        ("q8_0", 80, r"kv.type='q8_0' is unknown; known: f32, f16, bf16, int8, q4_0, k8v4"),
        ("f16", 0, r"got 32 heads of 0"),
    ],
)
def test_K06_a_head_that_is_no_multiple_of_the_block_is_refused(kv_type, head_dim, message):
    """K06: no half blocks; the refusal names the head size and the block."""
    with pytest.raises(ConfigError, match=message):
        cell_bytes(kv_type, 32, head_dim)
    if head_dim:
        with pytest.raises(ConfigError, match=message):
            encode_k(jnp.zeros((2, 32, head_dim)), kv_type)
        with pytest.raises(ConfigError, match=message):
            decode_v(jnp.zeros((2, 32), jnp.uint32), kv_type, 32, head_dim)


def test_words_of_another_type_are_refused_with_both_sizes():
    words = encode_k(jnp.zeros((3, 2, 256)), "int8")
    with pytest.raises(ValueError, match=r"K of a kv.type=f16 .* uint32\[256\] \(1024 bytes\), got uint32\[132\]"):
        decode_k(words, "f16", 2, 256)
    with pytest.raises(ValueError, match="power of two, got 80"):
        hadamard(jnp.zeros((80,)))


def test_sizes_can_be_planned_without_jax():
    code = "import sys, strata_jax.kv_types as k; k.cell_bytes('q4_0', 2, 256); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

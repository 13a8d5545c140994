"""Every block decoder against two oracles nobody here wrote: gguf-py's numpy decoders and ggml's own in C."""

from __future__ import annotations

import functools

import gguf.quants
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from strata_jax.errors import FormatError
from strata_jax.gguf.blocks import ENGINE_TYPES, block_type
from strata_jax.kernels.dequant import dequantize, dequantize_words, isolated
from strata_jax.kernels.dequant.reference import DECODERS
from tests.oracle import ggml, require

TYPES = sorted(ENGINE_TYPES)
ROW_LEN = 512


@functools.cache
def jitted(type_name: str):
    return jax.jit(lambda blocks: dequantize(blocks, type_name))


def random_rows(type_name: str, num_rows: int, row_len: int = ROW_LEN, seed: int = 0) -> np.ndarray:
    """Bytes without any meaning: scales take every bit pattern, subnormal, infinite and NaN among them."""
    block = block_type(type_name)
    size = (num_rows, row_len // block.block_len * block.block_bytes)
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def encoded_rows(type_name: str, num_rows: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((num_rows, ROW_LEN)) * np.exp(2 * rng.standard_normal((num_rows, 1)))
    return ggml.quantize(values.astype(np.float32), type_name)


def gguf_py(rows: np.ndarray, type_name: str) -> np.ndarray:
    if type_name == "Q2_0":  # unknown to gguf 0.19.0; the format in numpy
        blocks = rows.reshape(-1, 18)
        scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        codes = (blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
        with np.errstate(invalid="ignore"):
            return ((codes.reshape(-1, 64).astype(np.float32) - 1) * scale).reshape(len(rows), -1)
    with np.errstate(invalid="ignore", over="ignore"):
        return gguf.quants.dequantize(rows, GGMLQuantizationType[type_name])


def assert_same_bits(got: jax.Array | np.ndarray, expected: np.ndarray) -> None:
    """Equal to the bit, signs of zero included; a NaN equals a NaN of any payload."""
    got = np.asarray(got)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype == np.float32
    same = (got.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(got) & np.isnan(expected))
    where = np.argwhere(~same)
    assert same.all(), (
        f"{len(where)} of {same.size} differ, first at {where[0]}: {got[~same][:4]} {expected[~same][:4]}"
    )


def test_there_is_a_decoder_for_every_type_the_engine_takes():
    assert set(DECODERS) == ENGINE_TYPES


@pytest.mark.parametrize("type_name", TYPES)
def test_encoded_weights_decode_as_both_oracles_do(type_name):
    require()
    rows = encoded_rows(type_name, 6)
    got = jitted(type_name)(rows)
    assert np.isfinite(got).all()
    assert np.std(got) > 0.1
    assert_same_bits(got, gguf_py(rows, type_name))
    assert_same_bits(got, ggml.dequantize(rows, type_name))


@pytest.mark.parametrize("type_name", TYPES)
def test_random_bytes_decode_as_both_oracles_do(type_name):
    require()
    rows = random_rows(type_name, 160)
    got = jitted(type_name)(rows)
    assert_same_bits(got, gguf_py(rows, type_name))
    assert_same_bits(got, ggml.dequantize(rows, type_name))


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q8_0", "Q2_0", "IQ4_NL", "IQ3_S", "Q6_K"])
def test_all_65536_bit_patterns_of_a_scale_decode_exactly(type_name):
    patterns = np.arange(65536, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    block = block_type(type_name)
    rows = np.repeat(random_rows(type_name, 1, block.block_len), 65536, axis=0)
    at = 208 if type_name == "Q6_K" else 0  # elsewhere a block starts with its scale
    rows[:, at : at + 2] = patterns
    assert_same_bits(jax.jit(lambda b: dequantize(b, type_name))(rows), gguf_py(rows, type_name))


@pytest.mark.parametrize("type_name", TYPES)
def test_words_decode_as_bytes_and_padding_is_not_read(type_name):
    block = block_type(type_name)
    row_len = max(block.block_len, 3 * block.block_len if block.block_len < 256 else 256)
    rows = random_rows(type_name, 5, row_len, seed=2)
    num_bytes = rows.shape[-1]
    num_words = -(-num_bytes // 4) + 2
    padded = np.full((5, 4 * num_words), 0xFF, np.uint8)
    padded[:, :num_bytes] = rows
    words = padded.view(np.uint32)
    got = jax.jit(lambda w: dequantize_words(w, type_name, num_bytes))(words)
    assert_same_bits(got, np.asarray(jitted(type_name)(rows)))
    assert num_bytes % 4 or block.block_bytes % 4 == 0, "the case must cover a partly filled last word"


@pytest.mark.parametrize("type_name", ["F32", "Q8_0", "Q5_1", "Q4_K", "IQ4_XS", "IQ2_XS"])
def test_leading_dimensions_are_free(type_name):
    rows = random_rows(type_name, 12, seed=3)
    flat = np.asarray(jitted(type_name)(rows))
    assert_same_bits(jitted(type_name)(rows.reshape(2, 3, 2, -1)), flat.reshape(2, 3, 2, -1))
    assert_same_bits(jitted(type_name)(rows[0]), flat[0])
    assert_same_bits(jax.jit(jax.vmap(lambda b: dequantize(b, type_name)))(rows), flat)
    assert dequantize(jnp.zeros((0, rows.shape[-1]), jnp.uint8), type_name).shape == (0, ROW_LEN)


@pytest.mark.parametrize("type_name", ["Q4_K", "IQ3_S"])
def test_a_loop_may_decode_a_slice_it_chooses_at_run_time(type_name):
    rows = jnp.asarray(random_rows(type_name, 8, seed=4))
    order = jnp.array([5, 0, 7])

    def step(carry: None, row: jax.Array) -> tuple[None, jax.Array]:
        return carry, isolated(lambda r, i: dequantize(jax.lax.dynamic_slice_in_dim(r, i, 1), type_name)[0], rows, row)

    _, got = jax.jit(lambda order: jax.lax.scan(step, None, order))(order)
    assert_same_bits(got, np.asarray(jitted(type_name)(rows))[[5, 0, 7]])


def test_other_result_types_round_once_from_float32():
    rows = encoded_rows("Q4_K", 4)
    exact = jitted("Q4_K")(rows)
    got = jax.jit(lambda b: dequantize(b, "Q4_K", dtype=jnp.bfloat16))(rows)
    assert got.dtype == jnp.bfloat16
    assert (np.asarray(got) == np.asarray(exact.astype(jnp.bfloat16))).all()


@pytest.mark.parametrize("type_name", TYPES)
def test_decoding_needs_little_more_memory_than_packed_bytes_and_result(type_name):
    rows = random_rows(type_name, 64, 1024)
    num_weights = 64 * 1024
    memory = jitted(type_name).lower(rows).compile().memory_analysis()
    assert memory is not None
    assert memory.output_size_in_bytes == 4 * num_weights
    assert memory.temp_size_in_bytes <= 1.5 * num_weights


def test_only_cpu_programs_hold_calls_that_are_not_inlined():
    rows = jax.ShapeDtypeStruct((2, 144), jnp.uint8)
    exported = {
        platform: jax.export.export(jitted("Q4_K"), platforms=[platform])(rows).mlir_module()
        for platform in ("cpu", "cuda")
    }
    assert 'inlineable = "false"' in exported["cpu"]
    assert "inlineable" not in exported["cuda"]


def test_the_reshape_after_a_decoder_is_not_fused_into_its_loop():
    with jax.default_device(jax.devices("cpu")[0]):
        text = jitted("Q4_K").lower(random_rows("Q4_K", 4)).compile().as_text()
    assert text is not None
    entry = text[text.index("ENTRY ") :]
    assert " call(" in entry
    assert " fusion(" not in entry


def test_a_partial_block_is_refused_with_its_numbers():
    with pytest.raises(ValueError, match=r"IQ3_S row of 300 bytes .* blocks of 110 bytes: 80 left over; 220 bytes"):
        dequantize(jnp.zeros((2, 300), jnp.uint8), "IQ3_S")


def test_an_unknown_type_is_refused_with_the_known_ones():
    with pytest.raises(FormatError, match=r"'Q3_K'; there is one for F32, F16, .*Q2_0"):
        dequantize(jnp.zeros((110,), jnp.uint8), "Q3_K")
    with pytest.raises(FormatError, match="'unknown\\(153\\)'"):
        dequantize_words(jnp.zeros((110,), jnp.uint32), "unknown(153)", 440)


def test_the_wrong_container_is_refused():
    with pytest.raises(ValueError, match=r"uint8, got uint32.*dequantize_words"):
        dequantize(jnp.zeros((18,), jnp.uint32), "Q4_0")
    with pytest.raises(ValueError, match=r"uint32, got uint8"):
        dequantize_words(jnp.zeros((20,), jnp.uint8), "Q4_0", 18)
    with pytest.raises(ValueError, match=r"36 bytes of Q4_0 do not fit 8 words \(32 bytes\)"):
        dequantize_words(jnp.zeros((8,), jnp.uint32), "Q4_0", 36)

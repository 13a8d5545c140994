"""The block table against published sizes, and row sizes."""

from __future__ import annotations

import pytest
from gguf.constants import GGML_QUANT_SIZES

from strata_jax.errors import FormatError
from strata_jax.gguf.blocks import BLOCK_TYPES, ENGINE_TYPES, block_type, row_bytes

# type number, weights per block, bytes per block: of the formats' definitions
PUBLISHED = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "BF16": (30, 1, 2),
    "Q8_0": (8, 32, 34),
    "Q6_K": (14, 256, 210),
    "Q5_K": (13, 256, 176),
    "Q4_K": (12, 256, 144),
    "Q4_0": (2, 32, 18),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "IQ4_NL": (20, 32, 18),
    "IQ4_XS": (23, 256, 136),
    "IQ3_S": (21, 256, 110),
    "IQ3_XXS": (18, 256, 98),
    "IQ2_S": (22, 256, 82),
    "IQ2_XS": (17, 256, 74),
    "IQ2_XXS": (16, 256, 66),
    "Q2_0": (42, 64, 18),
}


def test_engine_types_have_the_published_sizes() -> None:
    assert set(PUBLISHED) == ENGINE_TYPES
    for name, expected in PUBLISHED.items():
        found = block_type(name)
        assert (found.ggml_id, found.block_len, found.block_bytes) == expected
        assert BLOCK_TYPES[found.ggml_id] is found


def test_every_type_of_the_gguf_package_is_known() -> None:
    assert {int(q) for q in GGML_QUANT_SIZES} | {42} == set(BLOCK_TYPES)
    assert len({bt.name for bt in BLOCK_TYPES.values()}) == len(BLOCK_TYPES)


@pytest.mark.parametrize(
    ("name", "width", "num_bytes"),
    [("IQ3_S", 2560, 1100), ("IQ4_NL", 640, 360), ("Q2_0", 640, 180), ("IQ4_NL", 160, 90), ("F16", 160, 320)],
)
def test_row_bytes_of_the_real_model(name: str, width: int, num_bytes: int) -> None:
    assert row_bytes(block_type(name), width) == num_bytes


def test_a_row_that_blocks_do_not_fill_is_refused() -> None:
    with pytest.raises(FormatError, match=r"640 weights .* IQ3_S: .* 256 weights, 128 would be left over"):
        row_bytes(block_type("IQ3_S"), 640)
    with pytest.raises(FormatError, match="-32"):
        row_bytes(block_type("Q8_0"), -32)


def test_unknown_type_names_list_the_known_ones() -> None:
    with pytest.raises(FormatError, match=r"'IQ9_Z' is unknown; known types: .*IQ3_S"):
        block_type("IQ9_Z")

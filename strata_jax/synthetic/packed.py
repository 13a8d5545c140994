"""Random packed blocks: any bytes that a type's decoder accepts, with scales that give the weights a stated size.

Codes, signs and group scales are random bytes, since every one of them is valid; only the block scales are set, so no
weight is infinite or NaN. Types whose codes are not centred get block scales of both signs, and types with a minimum
get the one that centres them, so that no sum over a row has a bias. Layouts: ggml's, as `kernels/dequant` reads them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_jax.errors import FormatError
from strata_jax.gguf.blocks import block_type, row_bytes

# Root mean square of the weights of random blocks whose block scale is 1
UNIT_RMS: dict[str, float] = {
    "Q8_0": 73.9, "Q6_K": 1365.0, "Q5_K": 337.0, "Q4_K": 168.4, "Q4_0": 4.64, "Q5_0": 9.25, "Q5_1": 9.23,
    "IQ4_NL": 67.4, "IQ4_XS": 1248.0, "IQ3_S": 140.1, "IQ3_XXS": 142.7, "IQ2_S": 56.3, "IQ2_XS": 55.9,
    "IQ2_XXS": 53.3, "Q2_0": 1.225,
}  # fmt: skip
FLOAT_TYPES = ("F32", "F16", "BF16")
SCALE_SPREAD = (0.6, 1.4)  # of one block's scale around the mean; uniform
_SPREAD_RMS = 1.0263  # root mean square of the above
_SCALE_AT = {"Q6_K": 208}  # byte of the block scale, 0 elsewhere
_MINIMUM = {"Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5}  # second f16, in block scales: centres the codes
_SIGNED_SCALES = ("Q8_0", "Q6_K", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS", "Q2_0")  # their codes have a mean

MARKED_WEIGHTS = 16  # weights at the start of a row that `mark_rows` sets
MARKED_GROUP = 32  # weights that it overwrites in most types, the smallest group that has a scale
# how much larger the block scale of a marked block is, and the marked weight in block scales
_MARK = {
    "Q8_0": (2.0, 127.0), "Q6_K": (1.0, 127.0 * 31), "Q5_K": (1.0, 63.0 * 31), "Q4_K": (1.0, 63.0 * 15),
    "IQ4_XS": (1.0, 31.0 * 113),
}  # fmt: skip
_MARK_FLOAT = 3.0  # in standard deviations
MARK_TYPES = (*FLOAT_TYPES, *_MARK)


def random_rows(
    rng: np.random.Generator, num_rows: int, row_length: int, type_name: str, rms: float
) -> NDArray[np.uint8]:
    """Draw u8[num_rows, row_bytes], packed rows of `row_length` weights whose root mean square is `rms`.

    Raises FormatError for a type without a decoder, or one whose blocks do not fill a row.
    """
    block = block_type(type_name)
    num_bytes = row_bytes(block, row_length)
    if type_name in FLOAT_TYPES:
        return float_rows(rng.standard_normal((num_rows, row_length), np.float32) * np.float32(rms), type_name)
    if type_name not in UNIT_RMS:
        known = ", ".join((*FLOAT_TYPES, *UNIT_RMS))
        raise FormatError(f"random blocks of {type_name} cannot be made; of {known} they can")
    packed = _random_bytes(rng, num_rows * num_bytes).reshape(-1, block.block_bytes)
    scale = rng.uniform(*SCALE_SPREAD, len(packed)).astype(np.float32) * np.float32(unit_scale(type_name, rms))
    if type_name in _SIGNED_SCALES:
        scale *= 1 - 2 * rng.integers(0, 2, len(packed), np.int8)
    _set_scales(packed, scale, type_name)
    if type_name in ("Q4_K", "Q5_K"):  # the code of each group's minimum is that of its scale, so the group is centred
        packed[:, 8:12] = packed[:, 4:8]
        packed[:, 12:16] = (packed[:, 12:16] & 15) * 17
    return packed.reshape(num_rows, num_bytes)


def unit_scale(type_name: str, rms: float) -> float:
    """Return the mean block scale that gives random blocks this root mean square."""
    return rms / (UNIT_RMS[type_name] * _SPREAD_RMS)


def mark_rows(rows: NDArray[np.uint8], type_name: str, column: NDArray[np.integer], rms: float) -> float:
    """Overwrite the first `MARKED_WEIGHTS` weights of every row, in place: one value in `column`, 0 in the others.

    The whole first block gets one scale, so that the value is the same in every row; types with groups of 32 weights
    have 32 weights overwritten. IQ4_XS has no code for 0: the others then are 1/113 of the value.

    Args:
        rows: u8[N, row_bytes] as `random_rows` draws them with this `rms`.
        column: i[N], each below `MARKED_WEIGHTS`.

    Returns:
        the value, about 3 to 6 times `rms`.

    Raises:
        FormatError: a type that this cannot be done for.
    """
    if type_name not in MARK_TYPES:
        raise FormatError(f"rows of {type_name} cannot be marked; of {', '.join(MARK_TYPES)} they can")
    every = np.arange(len(rows))
    if type_name in FLOAT_TYPES:
        values = np.zeros((len(rows), MARKED_WEIGHTS), np.float32)
        values[every, column] = 1.0
        marked = float_rows(values * np.float32(_MARK_FLOAT * rms), type_name)
        rows[:, : marked.shape[1]] = marked
        return float(_float_values(marked, type_name).max())
    first = rows[:, : block_type(type_name).block_bytes]
    if type_name == "Q8_0":
        first[:, 2:34] = 0
        first[every, 2 + column] = 127
    elif type_name == "Q6_K":  # code 32 is 0
        first[:, :MARKED_WEIGHTS] &= 0xF0
        first[:, 128 : 128 + MARKED_WEIGHTS] = first[:, 128 : 128 + MARKED_WEIGHTS] & 0xFC | 2
        first[every, column] |= 15
        first[every, 128 + column] |= 3
        first[:, 192] = 127
    elif type_name == "IQ4_XS":
        first[:, 2] |= 3
        first[:, 4] |= 15
        first[:, 8:24] = 0x88  # code 8 is 1
        first[every, 8 + column] |= 15
    else:  # Q4_K, Q5_K
        codes = 16 if type_name == "Q4_K" else 48
        first[:, 4] |= 63
        first[:, 8] &= 0xC0
        first[:, codes : codes + 32] &= 0xF0
        first[every, codes + column] |= 15
        if type_name == "Q5_K":
            first[:, 16:48] &= 0xFE
            first[every, 16 + column] |= 1
    boost, codes_value = _MARK[type_name]
    scale = np.float32(np.float16(boost * unit_scale(type_name, rms)))
    _set_scales(first, np.full(len(rows), scale), type_name)
    return float(codes_value * scale)


def rescaled(rows: NDArray[np.uint8], type_name: str, factor: float) -> NDArray[np.uint8]:
    """Return packed rows whose weights are `factor` times as large, up to the rounding of their block scales."""
    if type_name in FLOAT_TYPES:
        return float_rows(_float_values(rows, type_name) * np.float32(factor), type_name)
    made = rows.copy().reshape(-1, block_type(type_name).block_bytes)
    fields = [_SCALE_AT.get(type_name, 0), *([2] if type_name in _MINIMUM else [])]
    for at in fields:
        scale = made[:, at : at + 2].copy().view(np.float16).astype(np.float32)
        made[:, at : at + 2] = (scale * np.float32(factor)).astype(np.float16).view(np.uint8)
    return made.reshape(rows.shape)


def _set_scales(packed: NDArray[np.uint8], scale: NDArray[np.float32], type_name: str) -> None:
    """Write the block scales, and the minima that centre the codes, of u8[N, block_bytes]."""
    at = _SCALE_AT.get(type_name, 0)
    stored = scale.astype(np.float16)
    packed[:, at : at + 2] = stored[:, None].view(np.uint8)
    if type_name in _MINIMUM:
        minimum = stored.astype(np.float32) * np.float32(_MINIMUM[type_name])
        packed[:, 2:4] = minimum.astype(np.float16)[:, None].view(np.uint8)


def _random_bytes(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    words = rng.integers(0, 2**64, -(-count // 8), np.uint64)
    return words.view(np.uint8)[:count]


def float_rows(values: NDArray[np.float32], type_name: str) -> NDArray[np.uint8]:
    """f32[N, n] -> u8[N, row_bytes] of a float type; BF16 is cut, not rounded: the values are random."""
    if type_name == "BF16":
        return np.ascontiguousarray(values.view(np.uint16)[..., 1::2]).view(np.uint8)
    return np.ascontiguousarray(values.astype(np.float16 if type_name == "F16" else np.float32)).view(np.uint8)


def _float_values(rows: NDArray[np.uint8], type_name: str) -> NDArray[np.float32]:
    if type_name == "BF16":
        return (np.ascontiguousarray(rows).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(rows).view(np.float16 if type_name == "F16" else np.float32).astype(np.float32)

"""Storage types of the K/V cache and their bytes per cell. Pure: the planner prices cells with it, without JAX.

A *cell* holds one token's keys and values of one layer. Not here: encoding and decoding (`kernels/kv_codec`).

Layout of one side (K or V) of a cell, `H` K/V heads of `d` values, padded with zeros to whole 32-bit words:

* ``f32``, ``f16``, ``bf16``: the values in order.
* ``int8``: `H d` signed codes, then one f16 scale per group of ``min(64, d)`` consecutive values of a head.
* ``q4_0``: `H d / 32` ggml Q4_0 blocks (f16 scale, sixteen bytes of 4-bit codes) of the Hadamard-rotated heads.
"""

from __future__ import annotations

from strata_jax.errors import ConfigError

SIDES: dict[str, tuple[str, str]] = {
    "f32": ("f32", "f32"),
    "f16": ("f16", "f16"),
    "bf16": ("bf16", "bf16"),
    "int8": ("int8", "int8"),
    "q4_0": ("q4_0", "q4_0"),
    "k8v4": ("int8", "q4_0"),
}
"""The formats of K and of V for each value of ``kv.type``."""

KV_TYPES: tuple[str, ...] = tuple(SIDES)

INT8_GROUP = 64
"""Most values that share one int8 scale; a smaller head has one scale."""

Q4_BLOCK = 32
Q4_BLOCK_BYTES = 18
_VALUE_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


def sides(kv_type: str) -> tuple[str, str]:
    """Return the formats of K and V for `kv_type`. Raises ConfigError for an unknown one."""
    if kv_type not in SIDES:
        raise ConfigError(f"kv.type={kv_type!r} is unknown; known: {', '.join(KV_TYPES)}")
    return SIDES[kv_type]


def cell_bytes(kv_type: str, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Return the bytes of K and of V in one cell of one layer, each a multiple of 4.

    Args:
        kv_type: one of `KV_TYPES`.
        num_kv_heads: K/V heads of the layer, at least 1.
        head_dim: values per head, at least 1.

    Raises:
        ConfigError: unknown type, or `head_dim` does not divide into the type's blocks (a head is never padded).
    """
    k_format, v_format = sides(kv_type)
    if num_kv_heads < 1 or head_dim < 1:
        raise ConfigError(f"a K/V cell needs at least 1 head of 1 value, got {num_kv_heads} heads of {head_dim}")
    return (
        _side_bytes(kv_type, k_format, num_kv_heads, head_dim),
        _side_bytes(kv_type, v_format, num_kv_heads, head_dim),
    )


def int8_group(head_dim: int) -> int:
    """Return how many consecutive values of a head share one int8 scale."""
    return min(INT8_GROUP, head_dim)


def _side_bytes(kv_type: str, side: str, num_kv_heads: int, head_dim: int) -> int:
    num_values = num_kv_heads * head_dim
    if side in _VALUE_BYTES:
        num_bytes = num_values * _VALUE_BYTES[side]
    elif side == "int8":
        group = int8_group(head_dim)
        _refuse_remainder(kv_type, side, head_dim, group)
        num_bytes = num_values + num_values // group * 2
    else:
        _refuse_remainder(kv_type, side, head_dim, Q4_BLOCK)
        if head_dim & (head_dim - 1):
            below = 1 << (head_dim.bit_length() - 1)
            raise ConfigError(
                f"kv.type={kv_type} rotates each head by a Hadamard matrix, which needs a power of two: head_dim "
                f"{head_dim} lies between {below} and {2 * below}; {_alternatives(head_dim)} would work"
            )
        num_bytes = num_values // Q4_BLOCK * Q4_BLOCK_BYTES
    return (num_bytes + 3) // 4 * 4


def _refuse_remainder(kv_type: str, side: str, head_dim: int, block: int) -> None:
    if head_dim % block:
        raise ConfigError(
            f"kv.type={kv_type} stores {side} in blocks of {block} values within a head: head_dim {head_dim} is not a "
            f"multiple of {block} ({head_dim % block} left over) and heads are not padded; "
            f"{_alternatives(head_dim)} would work"
        )


def _alternatives(head_dim: int) -> str:
    fits_int8 = head_dim % int8_group(head_dim) == 0
    return "kv.type=f32, f16, bf16 or int8" if fits_int8 else "kv.type=f32, f16 or bf16"

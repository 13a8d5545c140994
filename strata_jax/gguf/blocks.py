"""Block formats of GGUF tensors: how many weights a block holds and how many bytes it takes.

Not here: decoding (``kernels/dequant``). The table is the ``gguf`` package's own, plus type 42, which release 0.19.0
does not know. Q2_0: 64 weights in 18 bytes, one f16 scale and 2-bit codes.
"""

from __future__ import annotations

from dataclasses import dataclass

from gguf.constants import GGML_QUANT_SIZES

from strata_jax.errors import FormatError


@dataclass(frozen=True, slots=True)
class BlockType:
    """One storage type. A row of ``n`` weights is ``n / block_len`` blocks of ``block_bytes`` bytes."""

    ggml_id: int
    name: str
    block_len: int
    block_bytes: int


BLOCK_TYPES: dict[int, BlockType] = {
    **{int(q): BlockType(int(q), q.name, length, size) for q, (length, size) in GGML_QUANT_SIZES.items()},
    42: BlockType(42, "Q2_0", 64, 18),
}

# fmt: off
ENGINE_TYPES: frozenset[str] = frozenset((
    "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "Q5_0", "Q5_1",
    "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "Q2_0",
))
# fmt: on
"""The types the engine decodes. A file may hold others: it can be inspected and priced, not run."""

_BY_NAME: dict[str, BlockType] = {bt.name: bt for bt in BLOCK_TYPES.values()}


def block_type(name: str) -> BlockType:
    """Return the block type called `name`, for example ``"IQ3_S"``. Raises FormatError for an unknown name."""
    found = _BY_NAME.get(name)
    if found is None:
        raise FormatError(f"tensor type {name!r} is unknown; known types: {', '.join(sorted(_BY_NAME))}")
    return found


def row_bytes(bt: BlockType, n_elements: int) -> int:
    """Return the bytes of a row of `n_elements` weights. Raises FormatError if blocks do not fill the row exactly."""
    if n_elements < 0 or n_elements % bt.block_len:
        raise FormatError(
            f"a row of {n_elements} weights cannot be stored as {bt.name}: "
            f"its blocks hold {bt.block_len} weights, {n_elements % bt.block_len} would be left over"
        )
    return n_elements // bt.block_len * bt.block_bytes

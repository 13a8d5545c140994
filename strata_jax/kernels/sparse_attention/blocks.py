"""Block sizes of sparse attention: a program's tile of cells and, for windows, how a token's cells are split."""

from __future__ import annotations

from dataclasses import dataclass

from strata_jax.memory.attention_kernels import WINDOW_PIECE_CELLS
from strata_jax.memory.layout import MAX_WINDOW_TOKENS


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes are powers of two.

    Attributes:
        tile_cells: cells that a program holds at a time.
        split_cells: cells that a program reads in all, the others going to further programs; 0 = all of a token's.
        num_parts: of operands of products, see `split_dot`; 1 = rounded to bfloat16, 3 = float32.
        warps: of a program.
    """

    tile_cells: int
    split_cells: int
    num_parts: int
    warps: int


# bench/kernels_attention.py on an H200. All windows have one split, so that a token's sums do not depend on the
# window's size. Chunks: 2.06 ms for 2,048 tokens at context 8,192, where 64 cells and 8 warps took 2.37, 64 and 4 2.23.
WINDOW = Blocks(tile_cells=32, split_cells=WINDOW_PIECE_CELLS, num_parts=2, warps=4)
CHUNK = Blocks(tile_cells=32, split_cells=0, num_parts=1, warps=4)


def blocks_for(num_tokens: int) -> Blocks:
    """Return the sizes for a window or a chunk of so many tokens."""
    return WINDOW if num_tokens <= MAX_WINDOW_TOKENS else CHUNK

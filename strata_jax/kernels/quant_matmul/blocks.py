"""How dense products in planes are cut into programs. Chosen by counting for an H200; only some were measured there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata_jax.kernels.expert_gemv.blocks import LaunchBlocks
from strata_jax.kernels.planes import PlaneLayout
from strata_jax.kernels.quant_matmul.tiles import THREAD_ROWS

MIN_TILE_ROWS = 16  # of weights, on tensor cores
MAX_TOKENS_AT_ONCE = 5  # of a program: its code grows with them, and so does the time to compile it
_LEFT_ROWS = 64
_FEWEST_PROGRAMS = 96  # of a launch: most of 132 multiprocessors have one
_MOST_SPLIT_PROGRAMS = 264  # two for each
_WARPS = 8
_ROWS = (64, 32, 16)  # of a program: threads of one item read the same values of x, so more are better
_FEWEST_ITEMS = 16  # of a split: one pass of a program of 64 rows
# Weights from which on whole numbers pay, with the launch that packs x: a head of 248,320 rows in IQ4_XS takes an H200
# 119, 152, 219 and 226 us for one to four tokens instead of 174, 218, 267 and 312; for products of 42 M weights it is
# 1 to 4 us less or more.
_FEWEST_WHOLE = 2**28
_WHOLE_ITEMS = 8


@dataclass(frozen=True, slots=True)
class MatmulBlocks:
    """How a product of many rows is cut: ``rows`` of x by those of the weights in ``launch``."""

    rows: int
    launch: LaunchBlocks

    @property
    def swap(self) -> bool:
        """Whether the weights are the left operand: that has 64 rows on Hopper's tensor cores, the right one any."""
        return self.rows < _LEFT_ROWS


@dataclass(frozen=True, slots=True)
class GemvLaunch:
    """How products of few rows with matrices of the same columns are cut.

    Attributes:
        rows: of a program, whatever the matrix' tiles; powers of two.
        items: of 32 columns, that a program takes at a time. splits: equal parts of the columns.
        tokens: rows of x that one program multiplies by.
        whole_numbers: products are of whole numbers, x is packed first; no part of the columns has an item too many.
    """

    rows: int
    items: int
    splits: int
    warps: int
    tokens: int
    whole_numbers: bool = False

    def row_blocks(self, layout: PlaneLayout) -> int:
        return -(-layout.rows // self.rows)

    def programs(self, layout: PlaneLayout) -> int:
        """Of a matrix and one group of tokens."""
        return self.row_blocks(layout) * self.splits


def choose_gemv_launch(num_tokens: int, layouts: Sequence[PlaneLayout], *, whole_numbers: bool = True) -> GemvLaunch:
    """Return the blocks of a product of few rows with matrices of the same columns.

    The largest blocks of rows that fill a GPU; where there are too few rows for large ones, the columns are split.

    Args:
        whole_numbers: they may be chosen.
    """
    num_items = layouts[0].num_items
    choices = [(rows, splits) for rows in _ROWS for splits in (1, _splits(_programs(layouts, rows), num_items))]
    most = min(_FEWEST_PROGRAMS, max(splits * _programs(layouts, rows) for rows, splits in choices))
    rows, splits = next((rows, splits) for rows, splits in choices if splits * _programs(layouts, rows) >= most)
    items = 1 << (num_items // splits - 1).bit_length()  # of a program, rounded up to a power of two
    warps = min(_WARPS, max(1, items * rows // (32 * THREAD_ROWS)))
    at_once = max(1, warps * 32 * THREAD_ROWS // rows)
    tokens = -(-num_tokens // -(-num_tokens // MAX_TOKENS_AT_ONCE))
    large = sum(layout.rows * layout.cols for layout in layouts) >= _FEWEST_WHOLE
    if whole_numbers and large and num_items % _WHOLE_ITEMS == 0:
        return GemvLaunch(
            _ROWS[0], _WHOLE_ITEMS, 1, _WHOLE_ITEMS * _ROWS[0] // (32 * THREAD_ROWS), tokens, whole_numbers=True
        )
    return GemvLaunch(rows, min(items, at_once), splits, warps, tokens)


def choose_matmul_blocks(num_rows: int, layout: PlaneLayout) -> MatmulBlocks:
    """Return the blocks for ``num_rows`` rows of x; 64 at a time where 128 would not fill the last ones."""
    weight_rows = min(64, layout.tile_rows)
    if num_rows > 64 and not 0 < num_rows % 128 <= 64:
        return MatmulBlocks(128, LaunchBlocks(weight_rows, 8))
    rows = next((rows for rows in (16, 32) if num_rows <= rows), _LEFT_ROWS)
    return MatmulBlocks(rows, LaunchBlocks(weight_rows, 4))


def choose_decode_blocks(layout: PlaneLayout) -> LaunchBlocks:
    """Return the blocks that decode a matrix: four items of 64 rows, 16 bytes a thread."""
    return LaunchBlocks(min(64, layout.tile_rows), 2)


def _programs(layouts: Sequence[PlaneLayout], rows: int) -> int:
    return sum(-(-layout.rows // rows) for layout in layouts)


def _splits(num_programs: int, num_items: int) -> int:
    """Return the largest number of equal parts of a row that does not make too many or too short programs."""
    fit = (n for n in range(1, num_items // _FEWEST_ITEMS + 1) if num_items % n == 0)
    return max((n for n in fit if n * num_programs <= _MOST_SPLIT_PROGRAMS), default=1)

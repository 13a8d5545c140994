"""Block sizes of the kernels that score and choose."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes are powers of two.

    Attributes:
        score_blocks, score_rows: of a tile of scores: blocks, and most rows (tokens x index heads).
        score_programs: programs that a launch aims at; each takes every n-th tile of blocks.
        choose_blocks: scores that a program which chooses holds in registers; further ones are read anew in each pass.
        split_tokens: most tokens whose scores, if there are more than that, are split among programs, whose choices
            one more then chooses from.
        score_warps, choose_warps: of a program; ``choose_warps`` at most, one for each ``choose_warp_blocks`` scores.
    """

    score_blocks: int = 64
    score_rows: int = 64
    score_programs: int = 264
    choose_blocks: int = 8192
    split_tokens: int = 8
    score_warps: int = 4
    choose_warps: int = 16
    choose_warp_blocks: int = 256


DEFAULT = Blocks()
"""Not measured yet: two programs for each of 132 multiprocessors, 16 scores a thread."""

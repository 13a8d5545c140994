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
    choose_warp_blocks: int = 1024


DEFAULT = Blocks()
"""`bench/kernels_attention.py index` on an H200: fewer warps choose faster; tiles of 32 blocks score a window of 2,800
tokens in 3.1 us instead of 4.1, one of 131,072 in 13.2 instead of 11.5."""

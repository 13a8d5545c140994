"""Which expert each slot holds at the start, and how large the slots are. Pure arithmetic.

Slot i holds the expert of rank i and is as large as the experts of its block. Without a ranking the blocks take turns:
expert 0 of every block, then expert 1 of every block, and so on. With one, slots follow it; experts that it does not
name come last, in turns, and get no slot at the start. A ranking that leaves out the draft block, as those of the
original do, says nothing about its experts: it then gets as many slots as a layer has on average, one after every
`num_layers` ranked experts, in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from strata_jax.memory.expert_ranking import Expert, ExpertRanking


@dataclass(frozen=True, slots=True, eq=False)
class SlotOrder:
    """The experts of all loaded blocks in the order in which they get slots.

    Attributes:
        expert: i32[R], ``block * num_experts + expert`` of each rank.
        num_experts: of a block.
        num_ranked: the ranks that slots may hold: all, or those that a ranking names.
        end_pages: i64[R + 1], the arena pages of the first n slots.
    """

    expert: NDArray[np.int32]
    num_experts: int
    num_ranked: int
    end_pages: NDArray[np.int64]

    @property
    def block(self) -> NDArray[np.int32]:
        """i32[R], the block of each rank."""
        return self.expert // np.int32(self.num_experts)

    def pages(self, num_slots: int) -> int:
        """Return the arena pages of the first slots."""
        return int(self.end_pages[num_slots])

    def slots_with(self, num_pages: int) -> int:
        """Return how few of the first slots have at least so many pages; all of them if they have fewer."""
        return min(len(self.expert), int(np.searchsorted(self.end_pages, num_pages)))

    def pairs(self, num_slots: int) -> Iterator[Expert]:
        """Give the (block, expert) of each of the first slots."""
        return (divmod(code, self.num_experts) for code in self.expert[:num_slots].tolist())

    def slots_by_block(self, num_slots: int) -> list[int]:
        """Return how many of the first slots belong to each block."""
        num_blocks = len(self.expert) // self.num_experts
        return np.bincount(self.block[:num_slots], minlength=num_blocks).tolist()


@lru_cache(maxsize=32)
def slot_order(pages_per_expert: tuple[int, ...], num_experts: int, ranking: ExpertRanking | None = None) -> SlotOrder:
    """Return the order in which experts get slots.

    Args:
        pages_per_expert: pages of a slot of each loaded block, the draft block's last.
        ranking: of a model with these blocks, see `ExpertRanking.model_problem`; None: blocks take turns.
    """
    num_blocks = len(pages_per_expert)
    rank = np.arange(num_blocks * num_experts, dtype=np.int32)
    turns = rank % num_blocks * num_experts + rank // num_blocks
    order, num_ranked = turns, len(turns)
    if ranking is not None:
        ranked = _ranked(ranking, num_blocks)
        named = np.zeros(len(turns), np.bool_)
        named[ranked] = True
        order, num_ranked = np.concatenate([ranked, turns[~named[turns]]]), len(ranked)
    end_pages = np.zeros(len(order) + 1, np.int64)
    np.cumsum(np.asarray(pages_per_expert, np.int64)[order // num_experts], out=end_pages[1:])
    order = order.astype(np.int32)
    for array in (order, end_pages):
        array.setflags(write=False)
    return SlotOrder(order, num_experts, num_ranked, end_pages)


def _ranked(ranking: ExpertRanking, num_blocks: int) -> NDArray[np.int32]:
    """Return i32[:], the ranked experts of the blocks that are loaded, with the draft block's among them."""
    pairs = np.array(ranking.pairs, np.int32).reshape(-1, 2)
    pairs = pairs[pairs[:, 0] < num_blocks]
    ranked = pairs[:, 0] * np.int32(ranking.num_experts) + pairs[:, 1]
    if num_blocks <= ranking.num_layers or ranking.with_draft:
        return ranked
    places = np.arange(ranking.num_layers, len(ranked) + 1, ranking.num_layers)
    draft = ranking.num_layers * ranking.num_experts + np.arange(len(places), dtype=np.int32)
    return np.insert(ranked, places, draft)

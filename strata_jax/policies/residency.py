"""Which expert is worth which slot: heat, the coldest that can make room, the hottest that fits. Pure array work."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from strata_jax.policies.state import SlotTable

USAGE_WEIGHT = 2**20


def heat(ranks: NDArray[np.int32], usage: NDArray[np.float32] | None) -> NDArray[np.float64]:
    """Return f64[:], usage * 2^20 - rank of each expert; higher is hotter (planning notes 6.3)."""
    cold = -ranks.astype(np.float64)
    return cold if usage is None else cold + USAGE_WEIGHT * usage[ranks].astype(np.float64)


class ColdestSlots:
    """The occupied slots from `first` on by heat and size: finds the coldest one that is large enough.

    There are few distinct slot sizes, so each has its own heap. At most `takes` slots are taken, so no heap needs more.
    """

    def __init__(
        self, slots: SlotTable, first: int, usage: NDArray[np.float32] | None, occupant: NDArray[np.int32], takes: int
    ) -> None:
        region = first + np.flatnonzero(occupant[first : slots.num_present] >= 0)
        keys, self._size = heat(occupant[region], usage), slots.sizes()
        self._heaps: dict[int, list[tuple[float, int]]] = {}
        for size in np.unique(self._size[region]):
            same = self._size[region] == size
            coldest = np.argsort(keys[same], kind="stable")[:takes]
            self._heaps[int(size)] = list(zip(keys[same][coldest].tolist(), region[same][coldest].tolist()))

    def take_if_colder(self, key: float, num_bytes: int) -> int | None:
        """Return the coldest slot of at least `num_bytes` if it is colder than `key`; it now has that key."""
        best = min((each[0] for size, each in self._heaps.items() if size >= num_bytes and each), default=None)
        if best is None or best[0] >= key:
            return None
        slot = best[1]
        heapq.heapreplace(self._heaps[int(self._size[slot])], (key, slot))
        return slot


def hottest_that_fit(
    slot_sizes: Iterable[int], rank_bytes: NDArray[np.int64], resident: NDArray[np.int32]
) -> list[int]:
    """Return for each slot the hottest expert of the profile that is not resident and fits, -1 where none does."""
    absent = np.ones(len(rank_bytes), bool)
    absent[resident] = False
    ranks = np.flatnonzero(absent)
    sizes = rank_bytes[ranks]
    queues = {int(size): iter(ranks[sizes == size].tolist()) for size in np.unique(sizes)}
    heads = {size: next(queue, None) for size, queue in queues.items()}
    chosen: list[int] = []
    for room in slot_sizes:
        fitting = [(rank, size) for size, rank in heads.items() if rank is not None and size <= room]
        if not fitting:
            chosen.append(-1)
            continue
        rank, size = min(fitting)
        heads[size] = next(queues[size], None)
        chosen.append(rank)
    return chosen

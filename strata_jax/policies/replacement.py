"""Replacement inside the round: which residents leave for experts that a window had to read anyway. Pure.

Every expert has a value, a decayed count of its uses and the round of the last one. In each layer the experts that a
window asks for and does not find compete with residents that it does not ask for: the most valuable newcomer takes the
slot of the least valuable of these, as long as its count is not below. Slots never change their layer, and a window's
experts are never victims. Counting every use for good is frequency (decay 1); forgetting all but this window's (decay
0) leaves the order of last uses, which is LRU: the two rules are one with two numbers.

`strata_jax/kernels/replace_experts` does the same for one layer on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

CLOCK_LIMIT = 2**30


class Replacement(StrEnum):
    """Rules that work inside the round."""

    LRU = "lru"
    LFU_DECAY = "lfu_decay"


@dataclass(frozen=True, slots=True, eq=False)
class ExpertValues:
    """What experts are worth.

    Attributes:
        count: f32[L, X], uses, multiplied by the decay every round.
        last: i32[L, X], the round of the last use; before the first one -1 - (rank in the layer).
        clock: rounds so far.
    """

    count: NDArray[np.float32]
    last: NDArray[np.int32]
    clock: int = 0


def first_values(rank: NDArray[np.int32]) -> ExpertValues:
    """Return the values before the first round, from i32[L, X]: each expert's rank in its layer, 0 = hottest."""
    return ExpertValues(np.zeros(rank.shape, np.float32), (-1 - rank).astype(np.int32))


def ranks_in_layer(codes: NDArray[np.int32], num_layers: int, num_experts: int) -> NDArray[np.int32]:
    """Return i32[L, X], the rank of each expert in its layer, from the codes ``layer * X + expert``, hottest first.

    Experts that are not among the codes follow in order of their numbers.
    """
    codes = np.asarray(codes, np.int64)
    place = np.full(num_layers * num_experts, len(codes), np.int64)
    place[codes] = np.arange(len(codes))
    order = np.argsort(place.reshape(num_layers, num_experts), axis=1, kind="stable")
    rank = np.empty((num_layers, num_experts), np.int32)
    np.put_along_axis(rank, order, np.arange(num_experts, dtype=np.int32)[None, :], axis=1)
    return rank


def counted(values: ExpertValues, uses: NDArray[np.int32], decay: float) -> ExpertValues:
    """Return the values after a window that used each expert i32[L, X] times; blocks without a use stay as they are."""
    if values.clock >= CLOCK_LIMIT:
        raise ValueError(f"{values.clock:,} rounds: the clock of last uses ends at {CLOCK_LIMIT:,}")
    factor = np.where(np.any(uses > 0, axis=1, keepdims=True), np.float32(decay), np.float32(1))
    count = values.count * factor + uses.astype(np.float32)
    return ExpertValues(count, np.where(uses > 0, np.int32(values.clock), values.last), values.clock + 1)


def replaced(
    held: NDArray[np.bool_], uses: NDArray[np.int32], values: ExpertValues
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return (layers, newcomers, victims), i64[n] each: who takes whose slot after a window.

    Args:
        held: bool[L, X], the residents. uses: i32[L, X], of the window. values: with the window counted.
    """
    newcomers, victims = (uses > 0) & ~held, held & (uses == 0)
    layers = np.flatnonzero(newcomers.any(axis=1) & victims.any(axis=1))
    if not len(layers):
        return layers, layers, layers
    # counts are not negative, so their bits order like numbers; equal values: the higher expert is worth less
    worth = (values.count[layers].view(np.int32).astype(np.int64) << 32) + values.last[layers]
    num = int(newcomers[layers].sum(axis=1).max())
    top = np.iinfo(np.int64).max
    leaving = _smallest(np.where(victims[layers], worth, top), num, higher_first=True)
    coming = _smallest(np.where(newcomers[layers], -worth, top), num, higher_first=False)
    rows = np.arange(len(layers))[:, None]
    paired = newcomers[layers][rows, coming] & victims[layers][rows, leaving]
    paired &= values.count[layers][rows, coming] >= values.count[layers][rows, leaving]
    at, place = np.nonzero(paired)
    return layers[at], coming[at, place], leaving[at, place]


def _smallest(keys: NDArray[np.int64], num: int, *, higher_first: bool) -> NDArray[np.int64]:
    """Return i64[L, num], the columns of each row's smallest keys in order; equal ones by column."""
    if higher_first:
        return keys.shape[1] - 1 - np.argsort(keys[:, ::-1], axis=1, kind="stable")[:, :num]
    return np.argsort(keys, axis=1, kind="stable")[:, :num]

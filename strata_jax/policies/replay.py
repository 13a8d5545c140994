"""Hit rates of residency policies on recorded routing: every window of a trace is looked up, then slots change. Pure.

Shapes: n tokens, L layers, X experts, K experts per token. A window is some neighbouring tokens; an expert that several
of them ask for is read once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata_jax.policies.adaptive import swap_pairs
from strata_jax.policies.policy import AdaptSettings
from strata_jax.policies.replacement import ExpertValues, counted, replaced

NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class Replay:
    """What a trace has cost.

    Attributes:
        lookups, hits: (token, expert) pairs, and those that found a slot.
        distinct: different experts of each window and layer. reads: those without a slot. copies: experts copied into
            slots beside that; a policy that fills slots with what is read anyway has none.
        windows: in all.
    """

    lookups: int = 0
    hits: int = 0
    distinct: int = 0
    reads: int = 0
    copies: int = 0
    windows: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.lookups if self.lookups else 0.0

    @property
    def link_experts(self) -> float:
        """Experts that cross the link in a window, all layers: reads and copies."""
        return (self.reads + self.copies) / self.windows if self.windows else 0.0

    def with_window(self, uses: NDArray[np.int32], held: NDArray[np.bool_], copies: int = 0) -> Replay:
        """Return the sums with a window that used each expert i32[L, X] times while ``held`` were resident."""
        used = uses > 0
        return Replay(
            self.lookups + int(uses.sum()),
            self.hits + int(uses[held].sum()),
            self.distinct + int(used.sum()),
            self.reads + int((used & ~held).sum()),
            self.copies + copies,
            self.windows + 1,
        )


def window_uses(experts: NDArray[np.int32], num_experts: int, rows: int = 1) -> Iterator[NDArray[np.int32]]:
    """Yield i32[L, X], how many tokens of each window used each expert, from i32[n, L, K]; a last part is left out."""
    _, layers, _ = experts.shape
    base = num_experts * np.arange(layers, dtype=np.int32)[None, :, None]
    for first in range(0, len(experts) - rows + 1, rows):
        codes = (experts[first : first + rows] + base).ravel()
        counts = np.bincount(codes, minlength=layers * num_experts)
        yield counts.astype(np.int32).reshape(layers, num_experts)


def hottest(uses: NDArray[np.int64], slots: int) -> NDArray[np.bool_]:
    """Return bool[L, X], the experts of a fixed choice: ``slots`` in all, as even as can be, the most used per layer.

    Equal uses: the lower number first.
    """
    layers, num_experts = uses.shape
    each = np.full(layers, slots // layers)
    each[: slots % layers] += 1
    held = np.zeros(uses.shape, np.bool_)
    for layer, num in enumerate(each.tolist()):
        held[layer, np.argsort(-uses[layer], kind="stable")[: min(num, num_experts)]] = True
    return held


def replay_static(experts: NDArray[np.int32], held: NDArray[np.bool_], rows: int = 1) -> Replay:
    """Nothing changes."""
    found = Replay()
    for uses in window_uses(experts, held.shape[1], rows):
        found = found.with_window(uses, held)
    return found


def replay_adaptive(
    experts: NDArray[np.int32], held: NDArray[np.bool_], settings: AdaptSettings, rows: int = 1
) -> Replay:
    """Swaps between rounds, as `AdaptiveSlots` decides them; every swap is a copy of its own."""
    layers, num_experts = held.shape
    held = held.copy()
    occupant = np.flatnonzero(held.ravel()).astype(np.int32)
    rank_layer = np.repeat(np.arange(layers), num_experts)
    usage = np.zeros(held.size, np.float32)
    on_the_way: list[tuple[int, int, int]] = []  # due round, slot, expert
    found = Replay()
    for idx, uses in enumerate(window_uses(experts, num_experts, rows), start=1):
        found = found.with_window(uses, held)
        usage += uses.ravel()
        decide = idx % settings.every_rounds == 0
        if decide:
            usage *= np.float32(settings.decay)
        for _, slot, expert in [swap for swap in on_the_way if swap[0] <= idx]:
            occupant[slot], held.reshape(-1)[expert] = expert, True
        on_the_way = [swap for swap in on_the_way if swap[0] > idx]
        if decide:
            pairs = swap_pairs(usage, occupant, [expert for _, _, expert in on_the_way], rank_layer, settings)
            for _, slot, expert in pairs:
                held.reshape(-1)[occupant[slot]] = False
                occupant[slot] = -1
                on_the_way.append((idx + settings.lag_rounds, slot, expert))
            found = _with_copies(found, len(pairs))
    return found


def replay_replacing(
    experts: NDArray[np.int32], held: NDArray[np.bool_], values: ExpertValues, decay: float, rows: int = 1
) -> Replay:
    """What a window had to read takes the slots of what is worth less: see `replaced`."""
    held, found = held.copy(), Replay()
    for uses in window_uses(experts, held.shape[1], rows):
        found = found.with_window(uses, held)
        values = counted(values, uses, decay)
        layers, coming, leaving = replaced(held, uses, values)
        held[layers, leaving], held[layers, coming] = False, True
    return found


def replay_farthest(experts: NDArray[np.int32], held: NDArray[np.bool_], rows: int = 1) -> Replay:
    """The bound: after each window the slots keep, of residents and of what was read, what is used again soonest.

    With all of the future known, and free to leave what was read without a slot, no policy that only keeps what it has
    read makes fewer reads (Belady's rule; every expert of a layer has the same size).
    """
    num_experts = held.shape[1]
    windows = [uses > 0 for uses in window_uses(experts, num_experts, rows)]
    next_use = np.full(held.shape, NEVER, np.int32)
    after: list[NDArray[np.int32]] = []
    for idx in range(len(windows) - 1, -1, -1):
        after.append(next_use[windows[idx]])
        next_use[windows[idx]] = idx
    held, found, num_held = held.copy(), Replay(), held.sum(axis=1)
    for used, uses, later in zip(windows, window_uses(experts, num_experts, rows), reversed(after), strict=True):
        found = found.with_window(uses, held)
        next_use[used] = later
        for layer in np.flatnonzero((used & ~held).any(axis=1)):
            candidates = np.flatnonzero(held[layer] | used[layer])
            soonest = candidates[np.argsort(next_use[layer, candidates], kind="stable")]
            held[layer] = False
            held[layer, soonest[: num_held[layer]]] = True
    return found


def _with_copies(found: Replay, copies: int) -> Replay:
    return Replay(found.lookups, found.hits, found.distinct, found.reads, found.copies + copies, found.windows)

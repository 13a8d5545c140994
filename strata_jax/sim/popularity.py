"""How often each expert is asked for: hit rates by slots, distinct experts of several rows, bytes a chunk touches.

A curve with two parameters says what share of all look-ups the hottest experts take; it was fitted on the published
hit rates. How far neighbouring rows of a window ask for the same experts comes from the published growth of their
union. A recorded routing trace takes the place of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from strata_jax.errors import ConfigError
from strata_jax.memory.strata.sizes import PackSizes
from strata_jax.policies.replacement import first_values, ranks_in_layer
from strata_jax.policies.replay import Replay, replay_replacing
from strata_jax.sim.trace import RoutingTrace

NUM_BINS = 300  # groups of neighbouring ranks that are counted together, finer where experts are hot
CACHED_RESIDENCIES = 16
CURVE_EXPERTS = 512  # experts of a layer in the models whose hit rates the curve was fitted on


@dataclass(frozen=True, slots=True)
class PopularityCurve:
    """Share of look-ups by the hottest experts: H(f) = 1 - (1 - f^a)^b of the hottest share f of all experts.

    Fitted on the 12 published hit rates (11 slot counts, 1 to 12,693 of 24,576 experts; rows alias-ctl-1slot,
    alias-ctl-auto-alias, alias-prod-default, alias-prod-alias, h3090-iq3s, h3090-elastic, h3090-udiq4, h3090-udq4 and
    grow-t-*-8k and -64k; midpoints of ranges): median error 1.0 point, largest 4.6 points (h3090-iq3s, 0.8 points
    outside its range). They were measured with adaptive slots, so it is the curve of slots that have adapted.

    Attributes:
        second_row, later_row: new experts of a window's second row and of later rows, as a share of what a row alone
            asks for. From the published unions of distinct misses, 1.75, 2.4 and 3.05 times for 2, 3 and 4 rows
            (planning notes 4.1): a row repeats 25 % of the row before it, and 10 % of the one before that.
    """

    a: float = 0.7906
    b: float = 4.6035
    second_row: float = 0.75
    later_row: float = 0.65

    def hit_rate(self, share: float) -> float:
        """Share of look-ups that find the hottest `share` of all experts."""
        return float(1 - (1 - min(1.0, max(0.0, share)) ** self.a) ** self.b)

    def independent_rows(self, rows: float) -> float:
        """How many unrelated rows ask for as many distinct experts as `rows` neighbouring ones."""
        if rows <= 1:
            return max(0.0, rows)
        if rows <= 2:
            return 1 + (rows - 1) * self.second_row
        return 1 + self.second_row + (rows - 2) * self.later_row

    def look_up_shares(self, num_ranks: int, num_experts: int = CURVE_EXPERTS) -> NDArray[np.float64]:
        """Return f64[num_ranks], the share of all look-ups that goes to each rank, hottest first; the sum is 1.

        num_experts: of a layer. With fewer than the curve was fitted on, a model has the hottest part of the curve:
            the 256 experts of the Coder model decode as if they were the hot half of 512 (rows h5070-coder-*).
        """
        reach = min(1.0, num_experts / CURVE_EXPERTS)
        edges = np.arange(num_ranks + 1, dtype=np.float64) / num_ranks * reach
        return np.diff(1 - (1 - edges**self.a) ** self.b) / self.hit_rate(reach)


def fit_curve(points: Sequence[tuple[float, float]], start: PopularityCurve | None = None) -> PopularityCurve:
    """Return the curve nearest to (share of experts with a slot, hit rate) points: least squares in hit rate.

    Raises ConfigError with fewer than two points.
    """
    from scipy.optimize import least_squares

    if len(points) < 2:
        raise ConfigError(f"popularity: {len(points)} hit rates given; a curve of two parameters needs at least 2.")
    base = start or PopularityCurve()
    share, hits = np.array(points, dtype=np.float64).T
    found = least_squares(lambda p: 1 - (1 - share ** p[0]) ** p[1] - hits, [base.a, base.b], bounds=(0.05, 50.0))
    return PopularityCurve(float(found.x[0]), float(found.x[1]), base.second_row, base.later_row)


class ExpertTraffic:
    """The demand for every rank of a pack, and what follows from it for a set of resident experts.

    replacement_decay: factor of use counts where rounds replace residents; None: they do not.
    """

    def __init__(
        self,
        sizes: PackSizes,
        curve: PopularityCurve,
        trace: RoutingTrace | None = None,
        replacement_decay: float | None = None,
    ) -> None:
        if replacement_decay is not None and trace is None:
            raise ValueError("replacement inside the round needs a routing trace: the curve has no order of look-ups")
        self.trace, self.replacement_decay = trace, replacement_decay
        self.num_layers, self.num_experts = sizes.num_layers, sizes.num_experts
        self.curve = curve
        self.rank_bytes = np.asarray(sizes.rank_bytes, dtype=np.float64)
        self.num_ranks = len(self.rank_bytes)
        self.look_ups_per_row = sizes.num_layers * sizes.num_experts_used
        self.trace_ranks: NDArray[np.int32] | None = None
        if trace is None:
            self.shares = curve.look_up_shares(self.num_ranks, sizes.num_experts)
        else:
            self.trace_ranks = trace.ranks(sizes.num_layers, sizes.num_experts)
            counts = np.bincount(self.trace_ranks.ravel(), minlength=self.num_ranks).astype(np.float64)
            self.shares = counts / counts.sum()
            self.look_ups_per_row = self.trace_ranks.shape[1]
        self.row_odds = np.minimum(1.0, self.shares * self.look_ups_per_row)
        self.bin_starts = np.unique(np.geomspace(1, self.num_ranks, NUM_BINS).astype(np.int64)) - 1
        widths = np.diff(np.append(self.bin_starts, self.num_ranks))
        self.bin_odds = np.add.reduceat(self.row_odds, self.bin_starts) / widths
        self.total_bytes = float(self.rank_bytes.sum())
        self._known: dict[bytes, Residency] = {}

    def residency(self, occupant: NDArray[np.int32]) -> Residency:
        """Return what follows when exactly the ranks in `occupant` (-1: empty) are resident; kept for repeats."""
        key = occupant.tobytes()
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= CACHED_RESIDENCIES:
                del self._known[next(iter(self._known))]
            made = Residency if self.replacement_decay is None else ReplacedResidency
            found = self._known[key] = made(self, self.mask(occupant))
        return found

    def mask(self, occupant: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return bool[ranks], whether each rank is among `occupant`."""
        held = np.zeros(self.num_ranks, dtype=np.bool_)
        held[occupant[occupant >= 0]] = True
        return held


class Residency:
    """Hits, distinct misses and bytes for one set of resident experts."""

    def __init__(self, traffic: ExpertTraffic, held: NDArray[np.bool_]) -> None:
        self._traffic = traffic
        self.held = held
        self.hit_rate = self._held_share = float(traffic.shares[held].sum())
        odds = traffic.row_odds
        self.hottest_absent_odds = float(odds[~held].max(initial=0.0))
        self.coldest_present_odds = float(odds[held].min(initial=1.0))
        starts = traffic.bin_starts
        missing = (~held).astype(np.float64)
        self._missing_count = np.add.reduceat(missing, starts)
        self._missing_bytes = np.add.reduceat(missing * traffic.rank_bytes, starts)
        self._all_count = np.diff(np.append(starts, traffic.num_ranks)).astype(np.float64)
        self._rows: dict[int, tuple[float, float]] = {}
        self.resident_bytes = float(traffic.rank_bytes[held].sum())
        self.missing_bytes = traffic.total_bytes - self.resident_bytes

    @property
    def resident_share(self) -> float:
        """Resident share of the pack's expert bytes."""
        return self.resident_bytes / self._traffic.total_bytes

    def distinct_per_layer(self, rows: int) -> tuple[float, float]:
        """Return (distinct experts, distinct missing experts) that `rows` neighbouring rows ask a layer for."""
        if rows not in self._rows:
            self._rows[rows] = self._replayed(rows) if self._traffic.trace_ranks is not None else self._expected(rows)
        return self._rows[rows]

    def touched_missing_bytes(self, tokens: int) -> float:
        """Return the bytes of missing experts that at least one of `tokens` prompt tokens asks for, all layers."""
        return float(self._missing_bytes @ self._touched(tokens))

    def share_of_misses(self, chosen: NDArray[np.bool_]) -> float:
        """Return the share of missed look-ups that goes to the missing experts among `chosen`."""
        missed = 1 - self._held_share
        return float(self._traffic.shares[chosen & ~self.held].sum() / missed) if missed > 1e-12 else 0.0

    def _touched(self, rows: int) -> NDArray[np.float64]:
        odds = self._traffic.bin_odds
        return np.asarray(1 - (1 - odds) ** self._traffic.curve.independent_rows(rows))

    def _expected(self, rows: int) -> tuple[float, float]:
        touched, layers = self._touched(rows), self._traffic.num_layers
        return float(self._all_count @ touched) / layers, float(self._missing_count @ touched) / layers

    def _replayed(self, rows: int) -> tuple[float, float]:
        picks = self._traffic.trace_ranks
        assert picks is not None
        num_windows = len(picks) // rows
        if num_windows == 0:
            raise ConfigError(_too_short(len(picks), rows))
        windows = np.sort(picks[: num_windows * rows].reshape(num_windows, -1), axis=1)
        first = np.ones(windows.shape, dtype=np.bool_)
        first[:, 1:] = windows[:, 1:] != windows[:, :-1]
        per_layer = num_windows * self._traffic.num_layers
        return float(first.sum()) / per_layer, float((first & ~self.held[windows]).sum()) / per_layer


class ReplacedResidency(Residency):
    """The same where rounds replace residents: a replay of the trace that begins with these.

    What a prompt finds is still the residents at the start. They are ranked as the trace is.
    """

    def __init__(self, traffic: ExpertTraffic, held: NDArray[np.bool_]) -> None:
        super().__init__(traffic, held)
        self._replays: dict[int, Replay] = {}
        self.hit_rate = self._replay(1).hit_rate

    def distinct_per_layer(self, rows: int) -> tuple[float, float]:
        """Return (distinct experts, distinct missing experts) that `rows` neighbouring rows ask a layer for."""
        found = self._replay(rows)
        per_layer = found.windows * self._traffic.num_layers
        return found.distinct / per_layer, found.reads / per_layer

    def _replay(self, rows: int) -> Replay:
        if rows not in self._replays:
            traffic = self._traffic
            trace, decay = traffic.trace, traffic.replacement_decay
            assert trace is not None
            assert decay is not None
            if len(trace.experts) < rows:
                raise ConfigError(_too_short(len(trace.experts), rows))
            shape = traffic.num_layers, traffic.num_experts
            order = trace.rank_order(*shape)
            held = np.zeros(traffic.num_ranks, np.bool_)
            held[order] = self.held
            start = first_values(ranks_in_layer(order, *shape))
            self._replays[rows] = replay_replacing(trace.experts, held.reshape(shape), start, decay, rows)
        return self._replays[rows]


def _too_short(tokens: int, rows: int) -> str:
    return f"routing trace: {tokens} tokens are recorded, fewer than a window of {rows} rows."


@lru_cache(maxsize=8)
def expert_traffic(
    sizes: PackSizes,
    curve: PopularityCurve,
    trace: RoutingTrace | None = None,
    replacement_decay: float | None = None,
) -> ExpertTraffic:
    """Return the traffic of a pack, kept for the next simulation of the same one."""
    return ExpertTraffic(sizes, curve, trace, replacement_decay)

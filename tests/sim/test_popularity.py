"""Expert popularity: the published hit rates and unions, residency with holes, recorded routing."""

from __future__ import annotations

import statistics
import struct
from pathlib import Path

import numpy as np
import pytest

from strata_jax.errors import ConfigError, FormatError
from strata_jax.memory.strata.sizes import PackSizes, pack_sizes
from strata_jax.presets import preset_geometry
from strata_jax.sim.popularity import ExpertTraffic, PopularityCurve, fit_curve
from strata_jax.sim.trace import RoutingTrace, read_routing_trace

ALL = 24_576
# (slots, published hit rate; midpoints of ranges), rows in the order of the documentation of `PopularityCurve`
PUBLISHED = [
    (1, 0.002), (749, 0.249), (508, 0.208), (749, 0.259), (7935, 0.8655), (2870, 0.593), (6362, 0.8645), (4844, 0.81),
    (11_055, 0.968), (12_693, 0.983), (11_055, 0.983), (12_363, 0.983),
]  # fmt: skip


@pytest.fixture(scope="module")
def sizes() -> PackSizes:
    return pack_sizes(preset_geometry("qwen38_flash", "iq3_s"))


@pytest.fixture(scope="module")
def traffic(sizes: PackSizes) -> ExpertTraffic:
    return ExpertTraffic(sizes, PopularityCurve())


def top(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


def test_the_curve_is_what_a_fit_on_the_published_hit_rates_gives() -> None:
    found = fit_curve([(slots / ALL, hits) for slots, hits in PUBLISHED])
    assert found.a == pytest.approx(PopularityCurve().a, abs=2e-3)
    assert found.b == pytest.approx(PopularityCurve().b, abs=2e-2)


def test_the_stated_errors_of_the_curve_hold(traffic: ExpertTraffic) -> None:
    errors = [abs(traffic.residency(top(slots)).hit_rate - hits) for slots, hits in PUBLISHED]
    assert statistics.median(errors) < 0.012
    assert max(errors) < 0.047


def test_a_fit_needs_two_points() -> None:
    with pytest.raises(ConfigError, match="1 hit rates given"):
        fit_curve([(0.1, 0.5)])


def test_neighbouring_rows_ask_for_the_published_unions(traffic: ExpertTraffic) -> None:
    for slots, within in ((11_055, 0.01), (7935, 0.02), (2870, 0.04), (508, 0.07)):
        held = traffic.residency(top(slots))
        one = held.distinct_per_layer(1)[1]
        assert one == pytest.approx(10 * (1 - held.hit_rate), rel=0.02)
        for rows, union in ((2, 1.75), (3, 2.4), (4, 3.05)):
            assert held.distinct_per_layer(rows)[1] / one == pytest.approx(union, rel=within)


def test_distinct_experts_never_exceed_the_layers(traffic: ExpertTraffic) -> None:
    distinct, missing = traffic.residency(top(0)).distinct_per_layer(100_000)
    assert missing == pytest.approx(distinct)
    assert 400 < missing <= 512


def test_a_hole_costs_the_share_of_its_rank(traffic: ExpertTraffic) -> None:
    whole = traffic.residency(top(5000))
    costs = []
    for rank in (0, 100, 4000):
        ranks = top(5000)
        ranks[rank] = -1
        held = traffic.residency(ranks)
        assert whole.hit_rate - held.hit_rate == pytest.approx(traffic.shares[rank], rel=1e-9)
        assert held.hottest_absent_odds == pytest.approx(traffic.row_odds[rank])
        costs.append(whole.hit_rate - held.hit_rate)
    assert costs[0] > 3 * costs[1] > 6 * costs[2]


def test_chunks_touch_more_bytes_the_longer_they_are_and_never_more_than_are_missing(
    traffic: ExpertTraffic, sizes: PackSizes
) -> None:
    held = traffic.residency(top(700))
    touched = [held.touched_missing_bytes(tokens) for tokens in (1, 4, 64, 256, 512, 1023)]
    assert touched == sorted(touched)
    assert touched[-1] < held.missing_bytes == pytest.approx(sizes.rank_bytes[700:].sum())
    assert held.resident_share == pytest.approx(1 - held.missing_bytes / sizes.rank_bytes.sum())


def test_the_binned_sums_are_those_over_all_ranks(traffic: ExpertTraffic, sizes: PackSizes) -> None:
    ranks = np.delete(top(3000), slice(10, 40))
    held = traffic.residency(ranks.astype(np.int32))
    for tokens in (4, 300):
        rows = PopularityCurve().independent_rows(tokens)
        odds = 1 - (1 - traffic.row_odds[~held.held]) ** rows
        exact = float(odds @ sizes.rank_bytes[~held.held])
        assert held.touched_missing_bytes(tokens) == pytest.approx(exact, rel=2e-3)


def test_share_of_misses_counts_only_what_is_missing(traffic: ExpertTraffic) -> None:
    held = traffic.residency(top(1000))
    chosen = np.zeros(ALL, dtype=bool)
    chosen[:1000] = True
    assert held.share_of_misses(chosen) == 0
    chosen[:] = True
    assert held.share_of_misses(chosen) == pytest.approx(1)


def write_trace(path: Path, experts: np.ndarray) -> Path:
    """Write experts[tokens, layers, k] as records of layer, k, ids and weights."""
    raw = b""
    for token in experts:
        for layer, ids in enumerate(token):
            raw += struct.pack(f"<2i{len(ids)}i{len(ids)}f", layer, len(ids), *ids, *([0.1] * len(ids)))
    path.write_bytes(raw)
    return path


def recorded(sizes: PackSizes, tokens: int = 40) -> np.ndarray:
    rng = np.random.default_rng(5)
    picks = [[rng.permutation(60)[: sizes.num_experts_used] for _ in range(sizes.num_layers)] for _ in range(tokens)]
    return np.array(picks, dtype=np.int32)


def test_a_recorded_trace_is_replayed_exactly(tmp_path: Path, sizes: PackSizes) -> None:
    experts = recorded(sizes)
    trace = read_routing_trace(write_trace(tmp_path / "routing.bin", experts))
    assert np.array_equal(trace.experts, experts)
    traffic = ExpertTraffic(sizes, PopularityCurve(), trace)
    counts = np.bincount((experts + 512 * np.arange(48)[None, :, None]).ravel(), minlength=ALL)
    assert traffic.residency(top(500)).hit_rate == pytest.approx(np.sort(counts)[::-1][:500].sum() / counts.sum())
    held = traffic.residency(top(500))
    hottest = set(np.argsort(-counts, kind="stable")[:500].tolist())
    missing = 0
    for window in range(0, 40, 4):
        asked = {(layer, int(e)) for t in range(window, window + 4) for layer in range(48) for e in experts[t, layer]}
        missing += sum(layer * 512 + e not in hottest for layer, e in asked)
    assert held.distinct_per_layer(4)[1] == pytest.approx(missing / 10 / 48)
    with pytest.raises(ConfigError, match="40 tokens are recorded"):
        held.distinct_per_layer(41)


def test_rounds_that_replace_residents_are_replayed_from_those_at_the_start(sizes: PackSizes) -> None:
    experts, each = recorded(sizes), 20
    order = np.random.default_rng(1).permutation(ALL).astype(np.int32)  # of a given ranking: it cannot know the trace
    trace = RoutingTrace(experts, order)
    rank_of = np.argsort(order)
    start = np.argsort(rank_of.reshape(48, 512), axis=1)[:, :each]  # the hottest of every layer
    hits = reads = 0
    for layer in range(48):
        recent = dict.fromkeys(reversed(start[layer].tolist()))
        for token in experts[:, layer]:
            asked = sorted(int(e) for e in token)
            hits += sum(e in recent for e in asked)
            reads += sum(e not in recent for e in asked)
            victims = [e for e in recent if e not in asked]
            for leaving, coming in zip(victims, [e for e in asked if e not in recent]):
                del recent[leaving]
                recent[coming] = None
            for e in reversed(asked):
                recent[e] = recent.pop(e)
    occupant = rank_of[(start + 512 * np.arange(48)[:, None]).ravel()].astype(np.int32)
    held = ExpertTraffic(sizes, PopularityCurve(), trace, replacement_decay=0.0).residency(occupant)
    assert held.hit_rate == hits / experts.size
    assert held.distinct_per_layer(1) == (sizes.num_experts_used, reads / 40 / 48)
    static = ExpertTraffic(sizes, PopularityCurve(), trace).residency(occupant)
    assert held.hit_rate > static.hit_rate + 0.1
    assert held.touched_missing_bytes(100) == static.touched_missing_bytes(100)
    assert held.share_of_misses(~held.held) == static.share_of_misses(~held.held) == pytest.approx(1)
    with pytest.raises(ConfigError, match="40 tokens are recorded"):
        held.distinct_per_layer(41)
    with pytest.raises(ValueError, match="needs a routing trace"):
        ExpertTraffic(sizes, PopularityCurve(), replacement_decay=0.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([0], "at least one record"),
        ([0, 5000, 1, 1], "5000 experts"),
        ([0, 1, 7, 0, 0], "no whole number of records"),
        ([0, 1, 7, 0, 1, 2, 7, 0], "another number of experts"),
        ([0, 1, 7, 0, 2, 1, 7, 0], "not those of layers 0 to 2"),
        ([0, 1, -7, 0], "numbered from 0"),
    ],
)
def test_broken_traces_are_refused(tmp_path: Path, words: list[int], message: str) -> None:
    path = tmp_path / "routing.bin"
    path.write_bytes(struct.pack(f"<{len(words)}i", *words))
    with pytest.raises(FormatError, match=message):
        read_routing_trace(path)


def test_a_trace_of_another_model_is_refused(sizes: PackSizes) -> None:
    with pytest.raises(FormatError, match="it has 3 layers"):
        ExpertTraffic(sizes, PopularityCurve(), RoutingTrace(np.zeros((2, 3, 10), dtype=np.int32)))
    with pytest.raises(FormatError, match="cannot be read"):
        read_routing_trace(Path("nowhere.bin"))

"""What a decode round costs: dense weights, hits beside misses, two roads for misses, whole experts only."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from math import floor

import pytest

from strata_jax.memory.strata.request import ExpertTier
from strata_jax.memory.strata.sizes import PackSizes, pack_sizes
from strata_jax.presets import preset_geometry
from strata_jax.sim.decode_cost import (
    RoundFacts,
    auto_pcie_frac,
    cpu_expert_ms,
    dense_ms,
    expected_pulls,
    pull_ms_per_byte,
    round_cost,
)
from strata_jax.sim.profile import Profile, load_profile

FACTS = RoundFacts(3, 4096, 0.5, 20.0, 10.0, 0.5, drafts=2)


@pytest.fixture(scope="module")
def sizes() -> PackSizes:
    return pack_sizes(preset_geometry("qwen38_flash", "iq3_s"))


@pytest.fixture(scope="module")
def profile() -> Profile:
    return load_profile("rtx3090")


def test_probed_links_decide_the_share_over_pcie(profile: Profile) -> None:
    assert auto_pcie_frac(profile) == 0.55
    assert auto_pcie_frac(load_profile("rtx5060ti")) == pytest.approx(0.55 * 14.1 / 20)


def test_the_roads_of_misses_run_side_by_side(profile: Profile, sizes: PackSizes) -> None:
    cost = round_cost(profile, sizes, FACTS)
    hits_ms = cost.gpu_ms - dense_ms(profile, sizes, FACTS)
    assert cost.total_ms == pytest.approx(dense_ms(profile, sizes, FACTS) + max(hits_ms + cost.pcie_ms, cost.cpu_ms))
    assert cost.cpu_experts_per_layer + expected_pulls(10.0, 0.5) == pytest.approx(10.0)
    assert cost.cpu_ms == pytest.approx(cost.cpu_experts_per_layer * 48 * cpu_expert_ms(profile, sizes))
    assert cost.pcie_share == pytest.approx(expected_pulls(10.0, 0.5) / 20)
    only_cpu = round_cost(profile, sizes, replace(FACTS, pcie_frac=0.0))
    assert only_cpu.pcie_ms == 0
    assert only_cpu.cpu_experts_per_layer == 10


def test_hits_cost_the_bandwidth_and_misses_more(profile: Profile, sizes: PackSizes) -> None:
    all_hit = round_cost(profile, sizes, replace(FACTS, distinct_misses=0.0))
    bandwidth = profile["hbm_gb_s"] * profile["hbm_share"] * 1e6
    hits_ms = 20 * 48 * sizes.mean_blob_bytes / bandwidth
    assert all_hit.total_ms == pytest.approx(dense_ms(profile, sizes, FACTS) + hits_ms)
    assert all_hit.total_ms < round_cost(profile, sizes, FACTS).total_ms


def test_dense_part_counts_every_byte_once(profile: Profile, sizes: PackSizes) -> None:
    one = replace(FACTS, rows=1, drafts=0, context=0)
    bandwidth = profile["hbm_gb_s"] * profile["hbm_share"] * 1e6
    assert dense_ms(profile, sizes, one) == pytest.approx(
        profile["launch_ms"] + (sizes.dense_bytes + sizes.head_bytes) / bandwidth
    )
    more = dense_ms(profile, sizes, replace(one, context=100_000)) - dense_ms(profile, sizes, one)
    keys, cells = 100_000 / 4 * 128 * 4 * 12, sizes.index_top_k * 1056 * 12
    assert more == pytest.approx((keys + cells) / bandwidth)
    draft = dense_ms(profile, sizes, replace(one, drafts=1, draft_vocab=1000)) - dense_ms(profile, sizes, one)
    read = sizes.drafter_dense_bytes + sizes.drafter_expert_bytes * 10 / 512 + 1000 * sizes.head_row_bytes
    assert draft == pytest.approx(profile["draft_ms"] + read / bandwidth)


def test_pulls_are_whole_experts() -> None:
    """Closed form against drawing."""
    rng = random.Random(5)
    for mean, frac in ((0.85, 0.34), (2.6, 0.2), (7.6, 0.2), (10.0, 0.55)):
        draws = []
        for _ in range(40_000):
            left, count = rng.expovariate(1), 0
            while left < mean:
                left, count = left + rng.expovariate(1), count + 1
            draws.append(floor(frac * count + 1e-9))
        assert expected_pulls(mean, frac) == pytest.approx(statistics.mean(draws), rel=0.03)
    assert expected_pulls(5.0, 0.0) == 0
    assert expected_pulls(5.0, 1.0) == 5.0
    assert expected_pulls(0.0, 0.5) == 0


def test_unregistered_memory_is_pulled_slower(profile: Profile) -> None:
    whole = pull_ms_per_byte(profile, 1.0, ExpertTier.ARENA)
    assert whole == pytest.approx(1e-6 / (25 * min(1.0, profile["copy_share"] * profile["pull_share"])))
    assert pull_ms_per_byte(profile, 0.0, ExpertTier.ARENA) == pytest.approx(whole / profile["pull_unpinned_share"])
    assert pull_ms_per_byte(profile, 1.0, ExpertTier.RESIDENT) == pytest.approx(1e-6 / profile["bounce_gb_s"])


def test_files_are_read_after_all(profile: Profile, sizes: PackSizes) -> None:
    plain = round_cost(profile, sizes, FACTS).total_ms
    miss_bytes = 10 * 48 * sizes.mean_blob_bytes
    filed = round_cost(profile, sizes, replace(FACTS, file_share=0.25))
    assert filed.total_ms - plain == pytest.approx(0.25 * miss_bytes / profile["file_gb_s"] / 1e6)
    mapped = round_cost(profile, sizes, replace(FACTS, tier=ExpertTier.MMAP))
    copied = round_cost(profile, sizes, replace(FACTS, tier=ExpertTier.RESIDENT))
    assert mapped.total_ms - copied.total_ms == pytest.approx(miss_bytes / profile["page_cache_gb_s"] / 1e6)


def test_the_cpu_is_bound_by_instructions_or_by_memory(profile: Profile, sizes: PackSizes) -> None:
    weights = 3 * 2560 * 640
    slow = profile.with_values(cpu_cores=1, cpu_core_gweights_s=1, ram_gb_s=1000)
    assert cpu_expert_ms(slow, sizes) == pytest.approx(weights / 1e6)
    starved = profile.with_values(cpu_cores=1000, ram_gb_s=10, ram_share=0.5)
    assert cpu_expert_ms(starved, sizes) == pytest.approx(sizes.mean_blob_bytes / 5e6)
    wide = replace(slow, isa="avx512")
    assert cpu_expert_ms(wide, sizes) == pytest.approx(weights / 1e6 / profile["cpu_avx512_ratio"])

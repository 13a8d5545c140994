"""What reading costs: copies hide behind computation as far as ring and tier allow; every term counted once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata_jax.memory.strata.request import ExpertTier, StrataRequest
from strata_jax.memory.strata.sizes import PackSizes, pack_sizes
from strata_jax.presets import preset_geometry
from strata_jax.sim.prefill_cost import (
    ChunkFacts,
    chunk_cost,
    copy_ms_per_byte,
    expert_gflop,
    head_load_ms,
    index_gflop,
    map_ms,
    move_ms,
    park_ms,
    refill_ms,
    relayout_ms,
    restore_ms,
    token_ms,
)
from strata_jax.sim.profile import Profile, load_profile

GB, MIB, GIB = 10**9, 2**20, 2**30
REQUEST = StrataRequest()
COPIES = StrataRequest(tier=ExpertTier.RESIDENT)


@pytest.fixture(scope="module")
def sizes() -> PackSizes:
    return pack_sizes(preset_geometry("qwen38_flash", "iq3_s"))


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Round numbers: 20 GB/s, 1 ms a token, ring without a limit."""
    flop = 2 * 3 * 2560 * (10 * 640 + 640) * 48 / 1e9
    return load_profile("rtx3090").with_values(
        pcie_gb_s=20, copy_share=1, copies_share=0.5, unpinned_share=0.5, tensor_tops=flop, prompt_share=1,
        scalar_tflops=100, index_share=0.1, overlap_share=0.8, overlap_copies_share=0.25, ring_share=1e6,
        staged_gb_s=10, segment_ms=0, chunk_ms=0, file_gb_s=2, hbm_gb_s=1000, hbm_share=0.8, page_cache_gb_s=5,
    )  # fmt: skip


def facts(**changes: object) -> ChunkFacts:
    base = ChunkFacts(1024, 0, 40 * GB, 0.0, streamed_all=True, ring_slots=384)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_the_work_of_a_token_follows_from_the_widths(sizes: PackSizes) -> None:
    assert expert_gflop(sizes) == pytest.approx(2 * 48 * 11 * 3 * 2560 * 640 / 1e9)
    assert index_gflop(sizes) == pytest.approx(12 * 4 * 128 * 2 / 4 / 1e9)


def test_copies_hide_behind_computation(profile: Profile, sizes: PackSizes) -> None:
    cost = chunk_cost(profile, sizes, REQUEST, facts(tokens=1000))
    compute = 1000 * token_ms(profile, sizes, 500)
    assert cost.copy_ms == pytest.approx(2000)
    assert cost.compute_ms == pytest.approx(compute)
    assert cost.total_ms == pytest.approx(2000 + compute - 0.8 * compute)  # the smaller part hides
    assert cost.copy_wait_ms == pytest.approx(2000 - 0.8 * compute)
    larger = chunk_cost(profile, sizes, REQUEST, facts(tokens=8000))
    assert larger.total_ms == pytest.approx(8000 * token_ms(profile, sizes, 4000) + 2000 - 0.8 * 2000)


def test_the_ring_bounds_how_far_copies_run_ahead(profile: Profile, sizes: PackSizes) -> None:
    tight = profile.with_values(ring_share=1.0)
    cost = chunk_cost(tight, sizes, REQUEST, facts(tokens=1000, ring_slots=8))
    ahead_ms = 8 * sizes.mean_blob_bytes * 48 / 20e9 * 1e3
    assert cost.total_ms == pytest.approx(cost.compute_ms + cost.copy_ms - ahead_ms)
    none = chunk_cost(tight, sizes, REQUEST, facts(tokens=1000, ring_slots=0))
    assert none.total_ms == pytest.approx(none.compute_ms + none.copy_ms)


def test_a_staged_chunk_hides_nothing_and_runs_at_the_hosts_pace(profile: Profile, sizes: PackSizes) -> None:
    cost = chunk_cost(profile, sizes, REQUEST, facts(tokens=512, streamed_all=False))
    assert cost.copy_ms == pytest.approx(4000)
    assert cost.total_ms == pytest.approx(cost.compute_ms + 4000)
    slow_link = profile.with_values(pcie_gb_s=5)
    assert chunk_cost(slow_link, sizes, REQUEST, facts(streamed_all=False)).copy_ms == pytest.approx(8000)


def test_copies_of_a_low_ram_tier_are_slower_and_hide_less(profile: Profile, sizes: PackSizes) -> None:
    arena = chunk_cost(profile, sizes, REQUEST, facts())
    copies = chunk_cost(profile, sizes, COPIES, facts())
    assert copies.copy_ms == pytest.approx(2 * arena.copy_ms)
    assert copies.total_ms == pytest.approx(copies.copy_ms + 0.75 * copies.compute_ms)
    mapped = chunk_cost(profile, sizes, StrataRequest(tier=ExpertTier.MMAP), facts())
    assert mapped.copy_ms == pytest.approx(copies.copy_ms + 8000)


def test_unregistered_memory_and_files_take_longer(profile: Profile, sizes: PackSizes) -> None:
    assert copy_ms_per_byte(profile, 1.0, ExpertTier.ARENA) * 20e9 == pytest.approx(1000)
    assert copy_ms_per_byte(profile, 0.0, ExpertTier.ARENA) * 20e9 == pytest.approx(2000)
    assert copy_ms_per_byte(profile, 0.5, ExpertTier.ARENA) * 20e9 == pytest.approx(1500)
    with_files = chunk_cost(profile, sizes, REQUEST, facts(file_bytes=4 * GB))
    assert with_files.copy_ms == pytest.approx(4000)
    staged_kv = chunk_cost(profile, sizes, REQUEST, facts(kv_staged_bytes=2 * GB))
    assert staged_kv.copy_ms == pytest.approx(2100)


def test_context_costs_the_indexer(profile: Profile, sizes: PackSizes) -> None:
    """12 layers x 4 heads x 128 x 2 / 4 operations a cell, at 10 % of 100 TFLOPS."""
    near, far = token_ms(profile, sizes, 0), token_ms(profile, sizes, 100_000)
    assert far - near == pytest.approx(3072 * 100_000 / 1e13 * 1e3)


def test_steps_around_a_prompt(profile: Profile) -> None:
    assert refill_ms(profile, REQUEST, 2 * GB) == pytest.approx(100)
    assert refill_ms(profile, REQUEST, 2 * GB, pinned_share=0.0) == pytest.approx(200)
    assert refill_ms(profile, COPIES, 2 * GB, file_bytes=GB) == pytest.approx(200 + 500)
    assert move_ms(profile, GB) == pytest.approx(2.5)
    common = load_profile("rtx_pro_2000_8gb")
    assert relayout_ms(common) == 20  # row alias-relayout
    assert head_load_ms(common, 417 * MIB) == pytest.approx(255, rel=0.005)  # row alias-head-load
    assert head_load_ms(common, 417 * MIB, pinned=True) < 25
    state = 984 * (12 * 1056 + 1536 + 1056) + 117_669_888 + 368_640
    assert restore_ms(common, state) == pytest.approx(26, rel=0.05)  # row own-val-restore
    assert park_ms(common, state) == restore_ms(common, state)
    assert map_ms(common, 4.3 * GIB) == pytest.approx(78, rel=0.01)  # planning notes 6.4


def test_a_larger_chunk_reads_faster_on_every_card(sizes: PackSizes) -> None:
    for name in ("rtx_pro_2000_8gb", "rtx3070ti", "rtx3090", "h200"):
        card = load_profile(name)
        rates = [t / chunk_cost(card, sizes, REQUEST, facts(tokens=t)).total_ms for t in (1024, 2048, 4096, 8192)]
        assert rates == sorted(rates), name

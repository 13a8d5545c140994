"""Sizes as the Strata rules see them, against published slots, blobs and state sizes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import planner_models
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_jax.errors import ConfigError, FormatError
from strata_jax.geometry import Geometry
from strata_jax.gguf.reader import open_gguf
from strata_jax.memory.strata.sizes import PackSizes, pack_sizes, rank_layers
from strata_jax.presets import preset_geometry
from strata_jax.quants import HotRanks
from strata_jax.synthetic import builtin_model_path

MIB, GIB = 2**20, 2**30


def flash(quant: str, **overrides: str) -> PackSizes:
    return pack_sizes(preset_geometry("qwen38_flash", quant, **overrides))


def test_widths_and_states_of_the_published_model() -> None:
    s = flash("iq3_xxs")
    assert (s.residual_width, s.query_width, s.kv_width, s.gdn_channels, s.gdn_value_width) == (
        10_240, 6_144, 512, 10_240, 6_144,
    )  # fmt: skip
    assert (s.num_attention_layers, s.num_recurrent_layers, s.num_draft_layers, s.index_block) == (12, 36, 1, 4)
    assert (s.recurrent_state_bytes, s.ple_history_bytes) == (117_669_888, 368_640)
    assert s.head_bytes == 437_043_200
    assert s.head_row_bytes == 1_760
    assert s.drafter_expert_bytes == 675 * MIB
    assert s.drafter_bytes / MIB == pytest.approx(839, abs=1)
    assert s.ple_row_bytes * s.ple_rows_per_token == 1_440
    assert s.num_ranks == 24_576


def test_parts_are_counted_once() -> None:
    geometry = preset_geometry("qwen38_flash", "ud_q4_k_xl")
    s = pack_sizes(geometry)
    parts = s.dense_bytes + s.embedding_bytes + s.head_bytes + s.total_expert_bytes + s.ple_table_bytes
    assert parts + s.drafter_expert_bytes + s.drafter_dense_bytes == geometry.total_bytes
    assert all(a + b == c for a, b, c in zip(s.gate_up_bytes, s.down_bytes, s.blob_bytes))
    assert s.blob_bytes[2] == s.max_blob_bytes == 3_993_600
    assert (s.max_gate_up_bytes, s.max_down_bytes) == (2_252_800, 1_740_800)


@pytest.mark.parametrize(
    ("quant", "requested", "slots"), [("iq3_s", 5_400, 7_056), ("iq2_xs", 13_000, 13_643), ("iq2_xs", 14_900, 15_628)]
)
def test_requested_slots_are_bytes_of_the_largest_blob(quant: str, requested: int, slots: int) -> None:
    s = flash(quant)
    assert s.slots_within(requested * s.max_blob_bytes) == pytest.approx(slots, rel=0.006)


@pytest.mark.parametrize(
    ("quant", "slots", "num_bytes"),
    [
        ("iq2_xs", 1_040, 1.41 * GIB), ("iq2_xs", 985, 1.33 * GIB), ("iq2_xs", 1_067, 1.45 * GIB),
        ("iq2_xs", 918, 1.25 * GIB), ("iq3_s", 7_056, 13_709 * MIB), ("iq3_s", 7_935, 15.04 * GIB),
        ("ud_iq4_xs", 6_362, 14.34 * GIB), ("ud_q4_k_xl", 4_844, 14.13 * GIB),
    ],
)  # fmt: skip
def test_bytes_of_published_caches(quant: str, slots: int, num_bytes: float) -> None:
    assert flash(quant).slots_bytes(0, slots) == pytest.approx(num_bytes, rel=0.006)


def test_largest_blobs() -> None:
    largest = {name: flash(name).max_blob_bytes for name in ("q2_0", "iq2_xs", "iq3_s", "nvfp4")}
    assert largest == {"q2_0": 1_382_400, "iq2_xs": 1_510_400, "iq3_s": 2_662_400, "nvfp4": 2_764_816}
    assert flash("nvfp4").rank_bytes[0] == 2_764_816 + 240  # a slot is a multiple of 256 bytes
    assert not flash("q2_0").mixed
    assert flash("iq2_xs").mixed


@pytest.mark.parametrize("quant", ["q2_0", "iq2_xs", "iq3_xxs", "iq3_s", "ud_iq4_xs", "ud_q4_k_xl", "nvfp4"])
def test_ranks_cover_every_expert(quant: str) -> None:
    s = flash(quant)
    assert s.rank_layer.dtype == np.int16
    assert np.bincount(s.rank_layer, minlength=48).tolist() == [512] * 48
    assert int(s.rank_end_bytes[-1]) == s.slots_bytes(0, s.num_ranks)
    assert np.array_equal(np.diff(s.rank_end_bytes), s.rank_bytes[1:])
    assert np.array_equal(s.rank_bytes // 256, -(-np.array(s.blob_bytes)[s.rank_layer] // 256))


def test_without_hot_ranks_every_prefix_has_the_mean() -> None:
    s = pack_sizes(preset_geometry("qwen38_flash", "iq3_s"), hot_ranks=())
    k = np.arange(1, s.num_ranks + 1)
    assert abs(s.rank_end_bytes - k * s.mean_blob_bytes).max() < 2 * s.max_blob_bytes


def test_hot_ranks_have_their_mean_and_the_rest_stays_even() -> None:
    s = pack_sizes(preset_geometry("qwen38_flash", "iq3_s"), hot_ranks=(HotRanks(5_000, 1_950_000),))
    assert s.slots_bytes(0, 5_000) / 5_000 == pytest.approx(1_950_000, abs=500)
    rest = (s.total_expert_bytes - s.slots_bytes(0, 5_000)) / (s.num_ranks - 5_000)
    assert s.slots_bytes(5_000, 10_000) / 5_000 == pytest.approx(rest, rel=1e-3)
    assert np.bincount(s.rank_layer).tolist() == [512] * 48


def test_hot_ranks_that_cannot_be() -> None:
    with pytest.raises(FormatError, match="always works"):
        rank_layers((100, 200), 8, (HotRanks(4, 300),))
    with pytest.raises(FormatError, match="are left"):
        rank_layers((100, 200), 8, (HotRanks(12, 110),))


@given(st.integers(0, 80 * GIB), st.integers(0, 30_000))
def test_slots_within_is_the_walk(cap_bytes: int, ranked: int) -> None:
    s = flash("iq3_s")
    slots = s.slots_within(cap_bytes, ranked)
    assert slots <= min(ranked, s.num_ranks)
    assert s.slots_bytes(0, slots) <= cap_bytes
    if slots < min(ranked, s.num_ranks):
        assert s.slots_bytes(0, slots + 1) > cap_bytes
    assert s.uniform_slots_within(cap_bytes, ranked) == min(cap_bytes // s.max_blob_bytes, ranked, s.num_ranks)


def test_bytes_of_a_range_of_slots() -> None:
    s = flash("iq2_xs")
    for first, end in itertools.combinations((0, 1, 500, 24_576), 2):
        assert s.slots_bytes(first, end) == int(s.rank_bytes[first:end].sum())
    assert s.slots_bytes(7, 7) == s.slots_bytes(9, 7) == 0
    assert s.slots_within(-1) == s.uniform_slots_within(-1) == 0


def test_the_built_in_model(tmp_path: Path) -> None:
    with open_gguf(builtin_model_path(tmp_path)) as file:
        geometry = Geometry.from_gguf(file)
    s = pack_sizes(geometry)
    assert s.num_ranks == geometry.num_layers * geometry.num_experts
    assert s.blob_bytes == tuple(geometry.expert_bytes(i) for i in range(geometry.num_layers))
    assert (s.num_attention_layers, s.num_recurrent_layers) == (2, 6)
    mtp = geometry.component_bytes()["MTP experts"] + geometry.component_bytes()["MTP without experts"]
    assert s.drafter_bytes - mtp == s.drafter_buffer_bytes == 55 * MIB // 10  # a tenth of the published width
    assert s.slots_within(10**12) == s.num_ranks


def test_a_tied_head_takes_the_embeddings_rows() -> None:
    s = pack_sizes(planner_models.with_tensors(planner_models.SMALL, tied=True))
    assert s.head_bytes == s.embedding_bytes == 512 * 64 * 4


def test_fused_gate_and_up_count_the_same() -> None:
    fused, apart = (
        pack_sizes(planner_models.with_tensors(planner_models.SMALL, fused=f)) for f in (frozenset({0, 2}), frozenset())
    )
    assert fused.blob_bytes == apart.blob_bytes
    assert fused.gate_up_bytes == apart.gate_up_bytes


def test_a_draft_only_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft-only"):
        pack_sizes(replace(planner_models.small(), has_trunk=False))


def test_sizes_are_summed_once_and_cannot_be_written() -> None:
    s = flash("iq2_xs")
    assert s is flash("iq2_xs")
    with pytest.raises(ValueError, match="read-only"):
        s.rank_bytes[0] = 1

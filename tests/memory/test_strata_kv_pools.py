"""Bytes of K/V, state, checkpoints and parked conversations against published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata_packs import MIB, pack

from strata_jax.errors import ConfigError
from strata_jax.geometry import attention_layer_indices
from strata_jax.memory.strata import kv_pools

GIB = 2**30
TYPES = ("f16", "int8", "k8v4", "q4_0")
DRAFTER = {"with_drafter": True}


@pytest.mark.parametrize(
    ("kv", "cell", "full_gib"), [("f16", 2_048, 6.50), ("int8", 1_056, 3.35), ("k8v4", 816, 2.65), ("q4_0", 576, 1.83)]
)
def test_cells_by_type_and_the_whole_window_with_the_drafters(kv: str, cell: int, full_gib: float) -> None:
    assert kv_pools.kv_cell_bytes(pack(), kv) == cell
    whole = 262_144 * kv_pools.kv_token_bytes(pack(), kv, with_drafter=True)
    assert whole / GIB == pytest.approx(full_gib, abs=0.005)


def test_a_token_has_cells_in_twelve_layers_and_the_draft_block_which_keeps_int8() -> None:
    assert kv_pools.kv_token_bytes(pack(), "int8", with_drafter=True) == 13_728
    assert kv_pools.kv_token_bytes(pack(), "k8v4", with_drafter=True) == 12 * 816 + 1_056
    assert len(kv_pools.pool_cell_bytes(pack(), "int8", with_drafter=True)) == 26
    assert set(kv_pools.pool_cell_bytes(pack(), "int8", with_drafter=True)) == {528}


@pytest.mark.parametrize(("cells", "gib"), [(16_384, 0.25), (32_768, 0.46), (262_144, 3.35)])
def test_mapped_pools(cells: int, gib: float) -> None:
    assert round(kv_pools.kv_mapped_bytes(pack(), "int8", cells) / GIB, 2) == gib


@pytest.mark.parametrize(
    ("low", "high", "chunks"),
    [(16_384, 32_768, 104), (16_384, 65_536, 312), (16_384, 106_496, 572), (4_096, 32_768, 182)],
)
def test_growth_in_chunks(low: int, high: int, chunks: int) -> None:
    assert kv_pools.pool_chunks(pack(), "int8", high) - kv_pools.pool_chunks(pack(), "int8", low) == chunks


@given(cells=st.integers(0, 300_000), kv=st.sampled_from(TYPES), drafter=st.booleans())
def test_pools_hold_their_cells_with_less_than_a_chunk_to_spare_each(cells: int, kv: str, drafter: bool) -> None:
    pools = kv_pools.pool_cell_bytes(pack(), kv, with_drafter=drafter)
    chunks = kv_pools.pool_chunks(pack(), kv, cells, 2 * MIB, drafter)
    assert sum(pools) == kv_pools.kv_token_bytes(pack(), kv, with_drafter=drafter)
    assert chunks == sum(-(-cells * b // (2 * MIB)) for b in pools)
    assert chunks <= kv_pools.pool_chunks(pack(), kv, cells + 1, 2 * MIB, drafter)
    fine = kv_pools.kv_mapped_bytes(pack(), kv, cells, 65_536, drafter)
    assert cells * sum(pools) <= fine <= chunks * 2 * MIB


@pytest.mark.parametrize(
    ("kv", "cells", "gib"), [("k8v4", 131_072, 1.20), ("int8", 131_072, 1.55), ("int8", 262_144, 3.09)]
)
def test_pinned_memory_of_streamed_kv(kv: str, cells: int, gib: float) -> None:
    assert kv_pools.kv_pinned_bytes(pack(), kv, cells) / GIB == pytest.approx(gib, abs=0.006)


def test_index_keys_rope_and_pages_of_the_whole_window() -> None:
    assert kv_pools.index_key_bytes(pack(), 262_144, drafter_rows=0) == 12 * (65_536 + 2) * 512
    assert kv_pools.rope_bytes(pack(), 262_144) == 64 * MIB
    assert kv_pools.page_table_bytes(pack(), 262_144, with_drafter=True) == 13 * 262_144


def test_a_session_of_32k_cells_costs_about_0_56_gib() -> None:
    items = kv_pools.session_bytes(pack(), 32_768, "int8", with_drafter=False)
    assert sum(items.values()) / GIB == pytest.approx(0.56, abs=0.01)
    assert items["recurrent state"] == 36 * 3_268_608
    assert all(b % 256 == 0 for b in items.values())


def test_an_elastic_session_maps_few_cells_and_sizes_the_rest_for_the_window() -> None:
    whole = kv_pools.session_bytes(pack(), 262_144, "int8")
    elastic = kv_pools.session_bytes(pack(), 262_144, "int8", mapped_cells=16_384)
    assert elastic["K/V"] == 260 * MIB
    assert {n for n in whole if whole[n] != elastic[n]} == {"K/V"}
    assert (whole["K/V"] - elastic["K/V"]) / GIB == pytest.approx(3.1, abs=0.01)


def test_a_streamed_session_keeps_resident_cells_and_a_sliding_draft_window() -> None:
    items = kv_pools.session_bytes(pack(), 131_072, "k8v4", resident_cells=20_480)
    ring = 32_768 + 4 * 6 + 64
    assert items["K/V"] == 12 * 20_480 * 816 + ring * 1_056
    more = kv_pools.session_bytes(pack(), 131_072, "k8v4", resident_cells=32_768)["K/V"]
    assert (more - items["K/V"]) / GIB == pytest.approx(0.11, abs=0.005)
    assert items["index keys"] == (12 * (32_768 + 2) + 2) * 512


def test_checkpoints_do_not_depend_on_the_context_and_images_do() -> None:
    assert kv_pools.checkpoint_bytes(pack()) == 117_669_888 + 12 * 3 * 512 + 368_640
    one = kv_pools.conversation_image_bytes(pack(), "int8", 10_000, checkpoints=1)
    two = kv_pools.conversation_image_bytes(pack(), "int8", 10_004, checkpoints=2)
    assert two - one == 4 * (13_728 + 1_536) + kv_pools.checkpoint_bytes(pack())


def test_p01_layers_without_attention_have_no_cells() -> None:
    layers = attention_layer_indices(64, 4)
    sizes = replace(pack(), num_layers=64, num_attention_layers=len(layers), num_kv_heads=4, head_dim=256)
    per_token = kv_pools.kv_token_bytes(sizes, "f16", with_drafter=False)
    assert per_token == 65_536
    assert 262_144 * per_token == 16 * GIB
    assert kv_pools.kv_mapped_bytes(sizes, "f16", 262_144, with_drafter=False) == 16 * GIB


@pytest.mark.parametrize("kv", ["int8", "k8v4", "q4_0"])
def test_k06_heads_that_blocks_do_not_divide_are_refused(kv: str) -> None:
    sizes = replace(pack(), head_dim=80, num_kv_heads=32)
    with pytest.raises(ConfigError, match=r"(?s)80.*32"):
        kv_pools.pool_chunks(sizes, kv, 4_096)
    with pytest.raises(ConfigError, match=r"(?s)80.*32"):
        kv_pools.session_bytes(sizes, 4_096, kv)
    assert kv_pools.kv_cell_bytes(sizes, "f16") == 2 * 32 * 80 * 2


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: kv_pools.pool_chunks(pack(), "int8", -1), "-1"),
        (lambda: kv_pools.pool_chunks(pack(), "int8", 1, 0), "got 0"),
        (lambda: kv_pools.kv_resident_bytes(pack(), "int8", 20_479), "20480"),
        (lambda: kv_pools.kv_cell_bytes(pack(), "q9"), "q9"),
        (lambda: kv_pools.session_bytes(pack(), 65_536, "int8", mapped_cells=4_096, resident_cells=32_768), "32768"),
        (lambda: kv_pools.conversation_image_bytes(pack(), "int8", -1), "-1"),
    ],
)
def test_impossible_settings_are_named(call, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call()

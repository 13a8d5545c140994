"""Prices of prompt buffers against published plans and the totals of planning notes 2.4."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strata_packs import IQ2_XS, IQ3_S, IQ3_XXS, MIB, STREAMED_Q4, pack

from strata_jax.errors import ConfigError
from strata_jax.memory.strata.prompt_buffers import (
    RING,
    _ringless_bytes,
    buffer_bytes,
    buffer_terms,
    old_owned_price_bytes,
    owned_bytes,
    request_bytes,
    request_owned_bytes,
)
from strata_jax.memory.strata.request import Version
from tests.calls import num_calls

OLD, NEW = Version.V0_1_35, Version.V0_1_41
TOTAL_TOKENS = (256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768)


def price(parts: tuple[int, int], tokens: int, cells: int, kv: str, streamed: bool, ring: int, version=NEW) -> float:
    num_bytes = buffer_bytes(
        pack(parts), tokens, context_cells=cells, kv_type=kv, kv_streamed=streamed, ring_slots=ring, version=version
    )
    return num_bytes / MIB


@pytest.mark.parametrize(
    ("parts", "tokens", "cells", "kv", "streamed", "ring", "version", "published_mib"),
    [
        (IQ2_XS, 1_280, 32_768, "int8", False, 351, NEW, 1_212),
        (IQ2_XS, 768, 131_072, "k8v4", True, 8, NEW, 597),
        (IQ2_XS, 1_024, 131_072, "k8v4", True, 384, NEW, 1_252),
        (IQ2_XS, 512, 131_072, "int8", True, 8, NEW, 519),
        (IQ3_S, 8_192, 262_144, "int8", True, 384, NEW, 4_485),
        (IQ3_S, 8_192, 262_144, "int8", False, 96, OLD, 3_805),
        ((1_254_400, 921_600), 512, 262_144, "q4_0", True, 8, NEW, 537),
    ],
)
def test_published_plans_are_met_within_two_percent(
    parts, tokens, cells, kv, streamed, ring, version, published_mib
) -> None:
    assert price(parts, tokens, cells, kv, streamed, ring, version) == pytest.approx(published_mib, rel=0.02)


@pytest.mark.parametrize(
    ("parts", "ring", "totals"),
    [
        (IQ2_XS, 384, (290, 379, 1_142, 1_522, 2_284, 3_806, 6_850, 12_938)),
        (IQ3_S, 384, (316, 405, 1_581, 1_962, 2_723, 4_245, 7_289, 13_378)),
        (IQ3_S, 0, (296, 385, 606, 987, 1_748, 3_270, 6_314, 12_403)),
    ],
)
def test_totals_of_the_planning_notes(parts, ring, totals) -> None:
    rings = [min(ring, 8) if t < 1_024 else ring for t in TOTAL_TOKENS]
    found = [round(price(parts, t, 262_144, "int8", False, r)) for t, r in zip(TOTAL_TOKENS, rings)]
    assert found == list(totals)


def test_the_extra_copy_of_the_old_release_is_the_only_difference_between_versions() -> None:
    args = (IQ3_S, 8_192, 262_144, "int8", False, 96)
    assert price(*args, OLD) - price(*args, NEW) == pytest.approx(8_192 * 10_240 * 4 / MIB, abs=0.001)


@pytest.mark.parametrize(("kv", "stage_mib"), [("int8", 264), ("q4_0", 144), ("k8v4", 204), ("f16", 512)])
def test_streamed_kv_stages_one_whole_layer(kv: str, stage_mib: int) -> None:
    added = price(IQ3_XXS, 512, 262_144, kv, True, 8) - price(IQ3_XXS, 512, 262_144, kv, False, 8)
    assert added == pytest.approx(stage_mib, abs=0.001)


def test_the_region_is_the_largest_set_of_a_layer_and_half_rows_stop_at_1023_tokens() -> None:
    def terms(tokens: int, cells: int):
        return buffer_terms(
            pack(), tokens, context_cells=cells, kv_type="int8", kv_streamed=False, ring_slots=8, version=NEW
        )

    assert "region of a layer (attention)" in terms(256, 262_144)  # 64 MiB of index scores
    assert "region of a layer (experts)" in terms(256, 32_768)
    one, two = (sum(terms(t, 32_768).values()) for t in (1_023, 1_024))
    three = sum(terms(1_022, 32_768).values())
    assert one - three == pytest.approx(389_000 + 64_000, rel=0.01)
    assert two - one == pytest.approx(389_000, rel=0.01)


@settings(max_examples=80, deadline=None)
@given(
    tokens=st.integers(1, 40_000),
    cells=st.integers(0, 300_000),
    kv=st.sampled_from(("f16", "int8", "k8v4", "q4_0")),
    streamed=st.booleans(),
    ring=st.integers(0, 512),
    version=st.sampled_from(Version),
)
def test_terms_sum_to_the_price_and_prices_grow_with_tokens_context_and_ring(
    tokens, cells, kv, streamed, ring, version
) -> None:
    def at(t: int, c: int, r: int) -> int:
        return buffer_bytes(pack(), t, context_cells=c, kv_type=kv, kv_streamed=streamed, ring_slots=r, version=version)

    here = at(tokens, cells, ring)
    terms = buffer_terms(
        pack(), tokens, context_cells=cells, kv_type=kv, kv_streamed=streamed, ring_slots=ring, version=version
    )
    assert sum(terms.values()) == here
    assert min(terms.values()) > 0
    assert at(tokens + 1, cells, ring) > here
    assert at(tokens, cells + 4, ring) >= here
    assert at(tokens, cells, ring + 1) - here == pytest.approx(pack().max_blob_bytes, abs=256)
    assert terms[RING] >= ring * pack().max_blob_bytes


def test_own_allocations_are_whole_two_mebibytes_and_a_little_more() -> None:
    own = request_owned_bytes(pack(), STREAMED_Q4, 2_048, 96)
    arena = request_bytes(pack(), STREAMED_Q4, 2_048, 96)
    assert own % (2 * MIB) == 0
    assert arena < own < arena + 60 * 2 * MIB
    assert own == owned_bytes(
        pack(), 2_048, context_cells=262_144, kv_type="q4_0", kv_streamed=True, ring_slots=96, version=NEW
    )


def test_the_old_price_of_own_buffers() -> None:
    assert old_owned_price_bytes(1_024) == 840 * MIB
    assert old_owned_price_bytes(24_576) == pytest.approx(16 * 2**30, rel=0.02)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": 0}, "at least 1"),
        ({"ring_slots": -1}, "-1"),
        ({"kv_type": "q9"}, "q9"),
        ({"context_cells": -4}, "-4"),
    ],
)
def test_impossible_settings_are_named(change, said) -> None:
    args = {"tokens": 512, "context_cells": 4_096, "kv_type": "int8", "ring_slots": 8} | change
    with pytest.raises(ConfigError, match=said):
        buffer_bytes(pack(), kv_streamed=False, version=NEW, **args)


def test_a_price_takes_few_calls_whatever_the_chunk_and_is_remembered() -> None:
    for tokens in range(1, 50_000, 1_000):
        price = partial(request_bytes, pack(), STREAMED_Q4, tokens, 96)
        _ringless_bytes.cache_clear()
        assert num_calls(price) < 400
        assert num_calls(price) < 30

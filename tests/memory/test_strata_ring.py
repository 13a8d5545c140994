"""Ring sizes by version, pinning, pack and user."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata_packs import IQ2_XS, IQ3_S, IQ3_XXS, PINNED, Q2_0, STREAMED_Q4, UNPINNED, pack

from strata_jax.errors import ConfigError
from strata_jax.memory.strata.request import Version
from strata_jax.memory.strata.ring import is_fused, is_pinned, request_ring, ring_cap_for, ring_slots

OLD, NEW = Version.V0_1_35, Version.V0_1_41


@pytest.mark.parametrize(
    ("parts", "tokens", "version", "pinned", "old_chunk", "slots"),
    [
        (IQ2_XS, 1_023, NEW, 1.0, None, 8),
        (IQ2_XS, 1_023, NEW, 1.0, 512, 8),  # small chunks stage, whatever the ring of larger ones
        (IQ2_XS, 1_024, NEW, 1.0, 1_024, 384),
        (IQ2_XS, 1_280, NEW, 1.0, 1_024, 351),  # published: 1,280 tokens with ring 351
        (IQ2_XS, 1_280, OLD, 1.0, 1_024, 384),
        (IQ2_XS, 1_280, OLD, 0.5, None, 96),
        (IQ3_S, 8_192, NEW, 1.0, 8_192, 384),
        (IQ3_S, 8_192, NEW, 1.0, 4_096, 199),
        (IQ3_S, 16_384, NEW, 1.0, 6_144, 384),  # a large old pick keeps the slots
        (IQ3_XXS, 2_048, NEW, 0.0, 1_024, 77),
        (IQ3_XXS, 2_048, NEW, 0.0, None, 96),
        (Q2_0, 1_024, NEW, 1.0, None, 1_024),
        (Q2_0, 1_280, NEW, 1.0, 1_024, 1_024),
        (Q2_0, 1_280, NEW, 0.0, 1_024, 256),
    ],
)
def test_ring_of_a_chunk(parts, tokens, version, pinned, old_chunk, slots) -> None:
    assert ring_slots(pack(parts), tokens, version, pinned_share=pinned, old_chunk=old_chunk) == slots


def test_the_pin_threshold_is_nine_tenths() -> None:
    assert is_pinned(0.9)
    assert not is_pinned(0.899)


def test_only_a_pack_of_canonical_experts_has_the_fused_ring() -> None:
    assert is_fused(pack(Q2_0))
    mixed = replace(pack(Q2_0), blob_bytes=(*pack(Q2_0).blob_bytes[1:], 1_408_000))
    assert not is_fused(mixed)


def test_streaming_may_start_at_smaller_chunks() -> None:
    request = replace(STREAMED_Q4, stream_min_tokens=512)
    assert request_ring(pack(), request, PINNED, 768) == 384
    assert request_ring(pack(), STREAMED_Q4, PINNED, 768) == 8


def test_a_given_ring_is_kept_for_chunks_that_stream_all() -> None:
    request = replace(STREAMED_Q4, ring_slots=48)
    assert request_ring(pack(), request, UNPINNED, 1_024, old_chunk=512) == 48
    assert request_ring(pack(), request, UNPINNED, 512) == 8


@pytest.mark.parametrize("given_ring", [0, 15, 513])
def test_a_ring_outside_the_engine_is_refused_with_the_limits(given_ring: int) -> None:
    with pytest.raises(ConfigError, match=rf"{given_ring} slots.*16 to 512"):
        request_ring(pack(), replace(STREAMED_Q4, ring_slots=given_ring), PINNED, 1_024)
    assert ring_slots(pack(Q2_0), 1_024, NEW, pinned_share=1.0, override=1_024) == 1_024


@given(blob=st.integers(50_000, 60_000_000).filter(lambda b: b != sum(Q2_0)), pinned=st.booleans())
def test_a_ring_sized_by_bytes_stays_within_bytes_and_limits(blob: int, pinned: bool) -> None:
    sizes = replace(pack(), blob_bytes=(blob,))
    slots = ring_cap_for(sizes, 1_024, NEW, pinned_share=float(pinned))
    budget = (384 if pinned else 96) * 1_382_400
    assert 16 <= slots <= 512
    assert slots == 16 or slots * blob <= budget
    assert slots == 512 or (slots + 1) * blob > budget

"""The prompt path with the head lent: the published plan, its boundary, and what goes beyond it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strata_packs import MIB, STREAMED_Q4, UNPINNED, pack, preset

from strata_jax.errors import DoesNotFit
from strata_jax.memory.strata.alias_path import ALIAS_CHUNKS, alias_candidates, hybrid_path
from strata_jax.memory.strata.borrow import SlotSizes, borrowed_path
from strata_jax.memory.strata.request import StrataRequest
from strata_jax.memory.strata.result import Layout

HEAD = 437_043_200
PUBLISHED = SlotSizes(749, 1_715_200)
RESERVE = 590 * MIB


def test_the_published_plan() -> None:
    found = hybrid_path(pack(), PUBLISHED, STREAMED_Q4, UNPINNED, RESERVE)
    assert (found.chunk_tokens, found.layout) == (2_048, Layout.HYBRID)
    assert (found.lent_slots, found.first_lent) == (748, 1)
    assert 40 * MIB < found.own_bytes < RESERVE - 512 * MIB
    assert found.own_bytes + found.lent_bytes == found.buffer_bytes
    sizes = preset("iq3_xxs")
    mixed = hybrid_path(sizes, SlotSizes.of(sizes, 749, uniform=False), STREAMED_Q4, UNPINNED, RESERVE)
    assert (mixed.chunk_tokens, mixed.lent_slots) == (2_048, 748)


def test_without_the_head_lent_the_same_card_reads_a_quarter() -> None:
    plain = borrowed_path(pack(), SlotSizes(508, 1_715_200), STREAMED_Q4, UNPINNED)
    assert plain is not None
    assert plain.chunk_tokens == 512
    same_slots = borrowed_path(pack(), PUBLISHED, STREAMED_Q4, UNPINNED)
    assert same_slots is not None
    assert same_slots.chunk_tokens < 2_048  # the alias wins by lending all but one slot, not only by more slots


def test_the_spare_memory_decides_at_the_byte() -> None:
    own = hybrid_path(pack(), PUBLISHED, STREAMED_Q4, UNPINNED, RESERVE).own_bytes
    exact = own + 512 * MIB
    assert hybrid_path(pack(), PUBLISHED, STREAMED_Q4, UNPINNED, exact).chunk_tokens == 2_048
    smaller = hybrid_path(pack(), PUBLISHED, STREAMED_Q4, UNPINNED, exact - 1)
    assert smaller.chunk_tokens == 1_536
    assert "2,048 tokens need" in smaller.why_not_larger
    assert smaller.own_bytes == 0
    assert smaller.lent_slots < 748
    less_spare = replace(STREAMED_Q4, alias_spare_mib=0)
    assert hybrid_path(pack(), PUBLISHED, less_spare, UNPINNED, own).chunk_tokens == 2_048


def test_a_cache_of_one_slot_puts_all_buffers_in_memory_of_their_own() -> None:
    found = hybrid_path(pack(), SlotSizes(1, 1_715_200), STREAMED_Q4, UNPINNED, 2_500 * MIB)
    assert (found.chunk_tokens, found.lent_slots, found.own_bytes) == (2_048, 0, found.buffer_bytes)


def test_too_little_memory_says_what_is_missing_and_what_would_work() -> None:
    with pytest.raises(DoesNotFit, match=r"512 tokens need .* missing.*head_alias.enabled=false") as caught:
        hybrid_path(pack(), SlotSizes(10, 1_715_200), STREAMED_Q4, UNPINNED, 600 * MIB)
    missing = caught.value.shortfall_bytes
    assert missing > 0
    enough = hybrid_path(pack(), SlotSizes(10, 1_715_200), STREAMED_Q4, UNPINNED, 600 * MIB + missing)
    assert enough.chunk_tokens == 512


def test_a_given_chunk_is_the_only_candidate() -> None:
    given_chunk = replace(STREAMED_Q4, chunk_tokens=768)
    assert alias_candidates(given_chunk, beyond=True) == (768,)
    assert hybrid_path(pack(), PUBLISHED, given_chunk, UNPINNED, RESERVE).chunk_tokens == 768


def test_beyond_the_original_larger_chunks_are_tried_on_the_grid() -> None:
    assert alias_candidates(STREAMED_Q4) == ALIAS_CHUNKS
    tried = alias_candidates(STREAMED_Q4, beyond=True)
    assert tried[:2] == (8_192, 7_936)
    assert tried[-4:] == (1_280, 1_024, 768, 512)
    assert set(ALIAS_CHUNKS) <= set(tried)
    assert alias_candidates(replace(STREAMED_Q4, chunk_auto_max=1_024)) == (1_024, 512)
    for beyond in (False, True):
        assert alias_candidates(replace(STREAMED_Q4, chunk_auto_max=300), beyond=beyond) == (300,), "never above auto:N"
    roomy = hybrid_path(pack(), PUBLISHED, STREAMED_Q4, UNPINNED, RESERVE + 200 * MIB, beyond=True)
    assert roomy.chunk_tokens == 2_560
    assert hybrid_path(pack(), PUBLISHED, STREAMED_Q4, UNPINNED, RESERVE + 200 * MIB).chunk_tokens == 2_048


def test_buffers_inside_the_head_leave_its_address_and_take_fewer_slots() -> None:
    """The cache stays at its size without the alias; the head's bytes hold a part of the buffers."""
    slots = SlotSizes(508, 1_715_200)
    found = hybrid_path(pack(), slots, STREAMED_Q4, UNPINNED, RESERVE, inside_head_bytes=HEAD)
    assert found.chunk_tokens == 2_048
    assert found.lent_slots <= 507
    assert HEAD + found.lent_bytes + found.own_bytes == pytest.approx(found.buffer_bytes, abs=1_715_200)
    small = hybrid_path(
        pack(), slots, replace(STREAMED_Q4, chunk_tokens=256), UNPINNED, RESERVE, inside_head_bytes=HEAD + 64 * MIB
    )
    assert (small.lent_slots, small.own_bytes) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(num_slots=st.integers(1, 3_000), free_mib=st.integers(0, 4_000), inside=st.sampled_from((0, HEAD)))
def test_the_parts_hold_the_buffers_and_nothing_larger_would_fit(num_slots: int, free_mib: int, inside: int) -> None:
    slots, free = SlotSizes(num_slots, 1_715_200), free_mib * MIB
    spare = max(0, free - 512 * MIB)
    request = STREAMED_Q4
    if not fits(slots, request, free, inside):
        assert not fits(slots, replace(request, chunk_tokens=512), free, inside)
        return
    found = hybrid_path(pack(), slots, request, UNPINNED, free, inside_head_bytes=inside)
    assert found.own_bytes <= spare
    assert found.lent_slots < num_slots
    assert inside + found.lent_bytes + found.own_bytes >= found.buffer_bytes
    assert found.own_bytes == 0 or found.lent_slots == num_slots - 1
    larger = [c for c in ALIAS_CHUNKS if c > found.chunk_tokens]
    assert not larger or not fits(slots, replace(request, chunk_tokens=larger[-1]), free, inside)


def fits(slots: SlotSizes, request: StrataRequest, free_bytes: int, inside: int) -> bool:
    try:
        hybrid_path(pack(), slots, request, UNPINNED, free_bytes, inside_head_bytes=inside)
    except DoesNotFit:
        return False
    return True

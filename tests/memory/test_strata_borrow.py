"""Which chunk borrows how many slots: published plans, the ladder of the 8 GB card, and properties."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strata_packs import IQ3_XXS, MIB, PINNED, STREAMED_Q4, UNPINNED, pack, preset

from strata_jax.errors import ConfigError
from strata_jax.memory.strata import ring
from strata_jax.memory.strata.borrow import (
    BORROW_CHUNKS,
    GRID_TOKENS,
    SlotSizes,
    borrowed_path,
    lend_pct,
    most_lent,
    old_pick,
    read_loan,
)
from strata_jax.memory.strata.prompt_buffers import request_bytes
from strata_jax.memory.strata.request import StrataRequest, Version
from strata_jax.memory.strata.result import Layout, PromptPath

LADDER = {(686, 745): 256, (590,): 512, (442, 667): 512, (331, 405): 768, (239, 295): 1_024, (147, 221): 1_280,
          (73, 110): 1_536, (0, 36): 1_792}  # fmt: skip
ANCHOR_SLOTS, ANCHOR_RESERVE_MIB = 508, 590
LEFT_BELOW_A_SLOT = 100_000  # what sizing the cache left over at the anchor: not published, less than a slot
QUICK = settings(max_examples=60, deadline=None)
REQUESTS = st.builds(
    StrataRequest,
    version=st.sampled_from(Version),
    context_cells=st.sampled_from((4_096, 32_768, 131_072, 262_144)),
    kv_type=st.sampled_from(("f16", "int8", "k8v4", "q4_0")),
    kv_resident_cells=st.sampled_from((0, 32_768)),
    chunk_auto_max=st.sampled_from((8_192, 16_384, 32_768)),
    stream_min_tokens=st.sampled_from((256, 512, 1_024)),
)
CARDS = st.sampled_from((PINNED, UNPINNED))


def uniform(num_slots: int) -> SlotSizes:
    return SlotSizes.of(pack(), num_slots, uniform=True)


def path(slots: SlotSizes, request: StrataRequest, card=PINNED, sizes=None) -> PromptPath:
    found = borrowed_path(sizes or pack(), slots, request, card)
    assert found is not None
    return found


def ladder_hits(sizes, request: StrataRequest, slots_at) -> int:
    """Return how many published range ends of reserve against chunk come out."""
    hits = 0
    for reserves, chunk in LADDER.items():
        for reserve in reserves:
            hits += path(slots_at((ANCHOR_RESERVE_MIB - reserve) * MIB), request, UNPINNED, sizes).chunk_tokens == chunk
    return hits


def one_size(extra_bytes: int) -> SlotSizes:
    budget = ANCHOR_SLOTS * sum(IQ3_XXS) + LEFT_BELOW_A_SLOT + extra_bytes
    return uniform(budget // sum(IQ3_XXS))


def of_the_preset(extra_bytes: int) -> SlotSizes:
    sizes = preset("iq3_xxs")
    cap = int(sizes.rank_end_bytes[ANCHOR_SLOTS - 1]) + LEFT_BELOW_A_SLOT + extra_bytes
    return SlotSizes.of(sizes, sizes.slots_within(cap // sizes.max_blob_bytes * sizes.max_blob_bytes), uniform=False)


def test_the_ladder_of_the_8_gb_card_with_a_ring_of_96() -> None:
    request = replace(STREAMED_Q4, ring_slots=96)
    assert lend_pct(request, UNPINNED) == 85
    assert ladder_hits(pack(), request, one_size) >= 13
    assert ladder_hits(preset("iq3_xxs"), request, of_the_preset) >= 13


def test_the_ladder_of_the_8_gb_card_with_the_ring_the_rules_give() -> None:
    assert ladder_hits(pack(), STREAMED_Q4, one_size) >= 14
    assert ladder_hits(preset("iq3_xxs"), STREAMED_Q4, of_the_preset) >= 14


def test_the_loan_of_the_8_gb_card() -> None:
    found = path(uniform(508), STREAMED_Q4, UNPINNED)
    assert (found.chunk_tokens, found.ring_slots) == (512, 8)
    assert found.lent_slots == pytest.approx(328, rel=0.02)
    sizes = preset("iq3_xxs")
    mixed = path(SlotSizes.of(sizes, 508, uniform=False), STREAMED_Q4, UNPINNED, sizes)
    assert mixed.lent_slots == pytest.approx(328, rel=0.015)


@pytest.mark.parametrize(
    ("slots", "cells", "kv", "resident", "given_chunk", "stream_min", "chunk", "lent", "ring_slots"),
    [
        (1_040, 32_768, "int8", 0, None, 1_024, 1_280, 873, 351),
        (985, 131_072, "k8v4", 32_768, None, 1_024, 768, 432, 8),
        (1_067, 131_072, "k8v4", 20_480, None, 1_024, 1_024, 900, 384),
        (918, 131_072, "int8", 32_768, None, 1_024, 512, 372, 8),
        (1_067, 131_072, "k8v4", 20_480, 768, 1_024, 768, 431, 8),
        (1_067, 131_072, "k8v4", 20_480, 768, 512, 768, 821, 384),
    ],
)
def test_published_plans_of_a_3070_ti(
    slots, cells, kv, resident, given_chunk, stream_min, chunk, lent, ring_slots
) -> None:
    request = StrataRequest(
        context_cells=cells, kv_type=kv, kv_resident_cells=resident, chunk_tokens=given_chunk,
        stream_min_tokens=stream_min,
    )  # fmt: skip
    sizes = preset("iq2_xs")
    found = path(SlotSizes.of(sizes, slots, uniform=False), request, PINNED, sizes)
    assert (found.chunk_tokens, found.ring_slots) == (chunk, ring_slots)
    assert found.lent_slots == pytest.approx(lent, rel=0.015)


@pytest.mark.parametrize(
    ("slots", "request_", "card", "lent"),
    [
        (7_935, StrataRequest(kv_resident_cells=32_768), PINNED, 2_324),
        (7_056, StrataRequest(version=Version.V0_1_35), UNPINNED, 1_972),
    ],
)
def test_published_loans_of_large_caches(slots, request_, card, lent) -> None:
    sizes = preset("iq3_s")
    found = path(SlotSizes.of(sizes, slots, uniform=False), request_, card, sizes)
    assert found.chunk_tokens == 8_192
    assert found.lent_slots == pytest.approx(lent, rel=0.015)


def test_the_grid_asks_for_a_full_ring_even_of_chunks_that_need_none() -> None:
    """768 tokens would fit with the 8 slots they use, yet 512 was published."""
    sizes = preset("iq2_xs")
    request = StrataRequest(context_cells=131_072, kv_type="int8", kv_resident_cells=32_768)
    slots = SlotSizes.of(sizes, 918, uniform=False)
    room = slots.tail_bytes(most_lent(918, 90))
    assert request_bytes(sizes, request, 768, 8) < room < request_bytes(sizes, request, 768, 351)
    assert path(slots, request, PINNED, sizes).chunk_tokens == 512


@QUICK
@given(num_slots=st.integers(200, 24_576), request=REQUESTS, card=CARDS)
def test_the_old_rule_takes_the_largest_chunk_that_fits(num_slots, request, card) -> None:
    slots, request = uniform(num_slots), replace(request, version=Version.V0_1_35)
    pct = lend_pct(request, card)

    def lends(chunk: int) -> bool:
        num_bytes = request_bytes(pack(), request, chunk, ring.request_ring(pack(), request, card, chunk))
        k = slots.tail_slots(num_bytes)
        return k is not None and k + 128 <= num_slots and 100 * k <= pct * num_slots

    limit = max(8_192, min(request.chunk_auto_max, request.context_cells))
    best = next((c for c in BORROW_CHUNKS if c <= limit and lends(c)), 0)
    found = borrowed_path(pack(), slots, request, card)
    assert (found.chunk_tokens if found else 0) == best == old_pick(pack(), slots, request, card)


@QUICK
@given(num_slots=st.integers(200, 24_576), request=REQUESTS, card=CARDS, sized=st.booleans())
def test_the_chosen_chunk_fits_and_the_next_on_the_grid_does_not(num_slots, request, card, sized) -> None:
    request = replace(request, version=Version.V0_1_41)
    sizes = preset("iq2_xs") if sized else pack()
    slots = SlotSizes.of(sizes, num_slots, uniform=not sized)
    found = borrowed_path(sizes, slots, request, card)
    assume(found is not None)
    assert found is not None
    most = most_lent(num_slots, lend_pct(request, card))
    assert found.layout is Layout.BORROWED
    assert found.own_bytes == 0
    assert 0 < found.lent_slots <= most
    assert found.first_lent == num_slots - found.lent_slots
    assert slots.tail_bytes(found.lent_slots - 1) < found.buffer_bytes <= slots.tail_bytes(found.lent_slots)
    assert found.buffer_bytes >= request_bytes(sizes, request, found.chunk_tokens, found.ring_slots)
    old = old_pick(sizes, slots, request, card)
    assert found.chunk_tokens >= old
    bigger = found.chunk_tokens + GRID_TOKENS
    if old and bigger <= max(8_192, min(request.chunk_auto_max, request.context_cells)):
        full = ring.ring_cap_for(sizes, old, request.version, pinned_share=card.pinned_share)
        by_bytes = 16 if old < 6_144 else 0
        assert request_bytes(sizes, request, bigger, full + by_bytes) > slots.tail_bytes(most)
        assert f"{bigger:,} tokens" in found.why_not_larger


@QUICK
@given(low=st.integers(130, 20_000), more=st.integers(0, 4_000), request=REQUESTS, card=CARDS)
def test_more_slots_never_give_a_smaller_old_pick(low, more, request, card) -> None:
    assert old_pick(pack(), uniform(low), request, card) <= old_pick(pack(), uniform(low + more), request, card)


@QUICK
@given(num_slots=st.integers(400, 9_000), context=st.integers(32_769, 200_000), card=CARDS)
def test_a_longer_context_never_gives_a_larger_chunk(num_slots, context, card) -> None:
    here, longer = (
        borrowed_path(pack(), uniform(num_slots), replace(STREAMED_Q4, version=Version.V0_1_35, context_cells=c), card)
        for c in (context, context + 32_768)
    )
    assert (longer.chunk_tokens if longer else 0) <= (here.chunk_tokens if here else 0)


def test_a_given_chunk_is_halved_until_128_slots_stay_and_no_share_is_asked_for() -> None:
    given_chunk = replace(STREAMED_Q4, chunk_tokens=4_096, version=Version.V0_1_35)
    needed = uniform(5_000).tail_slots(request_bytes(pack(), given_chunk, 4_096, 384))
    assert needed is not None
    at_most, one_less = uniform(needed + 128), uniform(needed + 127)
    assert 100 * needed > 90 * at_most.num_slots  # auto would refuse
    assert path(at_most, given_chunk).chunk_tokens == 4_096
    halved = path(one_less, given_chunk)
    assert halved.chunk_tokens == 2_048
    assert "prefill.chunk=4096" in halved.why_not_larger
    assert borrowed_path(pack(), one_less, given_chunk, PINNED, may_halve=False) is None


def test_a_tiny_cache_borrows_nothing() -> None:
    for num_slots in (0, 1, 128, 200):
        assert borrowed_path(pack(), uniform(num_slots), STREAMED_Q4, PINNED) is None
    given_chunk = replace(STREAMED_Q4, chunk_tokens=512)
    assert borrowed_path(pack(), uniform(128), given_chunk, PINNED) is None


def test_a_ring_may_be_as_short_as_16_when_even_small_chunks_stream_all() -> None:
    request = replace(STREAMED_Q4, stream_min_tokens=256)
    found = path(uniform(480), request, PINNED)
    assert 16 <= found.ring_slots < ring.ring_cap_for(pack(), 0, request.version, pinned_share=1.0)
    assert found.lent_slots <= most_lent(480, 90)
    room = uniform(480).tail_bytes(most_lent(480, 90))
    assert request_bytes(pack(), request, found.chunk_tokens + GRID_TOKENS, 16) > room


@pytest.mark.parametrize("off", [{"borrow": False}, {"profile": False}])
def test_borrowing_needs_a_profile_and_permission(off) -> None:
    assert borrowed_path(pack(), uniform(2_000), replace(STREAMED_Q4, **off), PINNED) is None


def test_larger_chunks_are_taken_only_when_asked_for_and_within_the_context() -> None:
    slots = uniform(24_576)
    plain = StrataRequest(chunk_auto_max=8_192)
    assert path(slots, plain).chunk_tokens == 8_192
    assert path(slots, replace(plain, chunk_auto_max=32_768)).chunk_tokens == 32_768
    assert path(slots, replace(plain, chunk_auto_max=32_768, context_cells=16_384)).chunk_tokens == 16_384
    assert path(slots, replace(plain, chunk_auto_max=32_768, context_cells=4_096)).chunk_tokens == 8_192


def test_a_short_prompt_borrows_fewer_slots() -> None:
    slots, sizes = uniform(3_000), pack()
    plan = path(slots, STREAMED_Q4)
    loans = [read_loan(sizes, slots, STREAMED_Q4, PINNED, plan, n) for n in (1, 256, 257, 1_000, 1_100, 10**6)]
    assert [loan.chunk_tokens for loan in loans[:5]] == [256, 256, 512, 1_024, 1_280]
    assert all(a.lent_slots <= b.lent_slots for a, b in pairwise(loans))
    assert loans[-1].lent_slots == plan.lent_slots
    for loan in loans:
        assert loan.first_lent == 3_000 - loan.lent_slots
        assert slots.tail_bytes(loan.lent_slots) >= loan.buffer_bytes
    assert loans[0].buffer_bytes == request_bytes(sizes, STREAMED_Q4, 256, 8)


@QUICK
@given(num_slots=st.integers(0, 24_576), need=st.integers(-5, 50 * 2**30), uniform_=st.booleans())
def test_the_last_slots_that_hold_an_amount_are_the_fewest(num_slots, need, uniform_) -> None:
    sizes = preset("iq3_s")
    slots = SlotSizes.of(sizes, num_slots, uniform=uniform_)
    k = slots.tail_slots(need)
    if k is None:
        assert need > slots.total_bytes
    else:
        assert slots.tail_bytes(k) >= need
        assert k == 0 or slots.tail_bytes(k - 1) < need
    expected = num_slots * sizes.max_blob_bytes if uniform_ else int(sizes.rank_bytes[:num_slots].sum())
    assert slots.total_bytes == expected


def test_more_slots_than_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="24577"):
        SlotSizes.of(pack(), 24_577, uniform=True)

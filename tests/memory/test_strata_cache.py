"""The size of the expert cache: the reserve ladder, sized and uniform slots, small cards, checks at opening."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strata_cases import BIG, pack

from strata_jax.memory.ledger import MIB
from strata_jax.memory.strata.cache import (
    CacheSize,
    Prices,
    bind_bytes,
    fill,
    give_back_bytes,
    least_slots,
    open_cache,
    size_cache,
)
from strata_jax.memory.strata.prompt_buffers import old_owned_price_bytes
from strata_jax.memory.strata.request import StrataRequest
from strata_jax.memory.strata.sizes import PackSizes

GIB = 2**30
IQ2_XS, IQ3_S, NVFP4 = pack("iq2_xs"), pack("iq3_s"), pack("nvfp4")
QUICK = settings(max_examples=80, deadline=None)


def sized(free_bytes: int, request: StrataRequest, sizes: PackSizes = IQ2_XS, prompt_bytes: int = 0) -> CacheSize:
    prices = Prices(bind_bytes(sizes, request), prompt_bytes, 290 * MIB)
    return size_cache(sizes, request, free_bytes, prices)


def test_the_bind_is_draft_rows_and_window_logits() -> None:
    assert bind_bytes(IQ2_XS, StrataRequest()) == 6 * 248_320 * 4 + 106_299 * (1_360 + 4)
    narrow = StrataRequest(suffix_draft=0, draft_vocab=40_525)
    assert bind_bytes(IQ3_S, narrow) == 4 * 248_320 * 4 + 40_525 * (2_100 + 4)
    assert bind_bytes(IQ2_XS, StrataRequest(spec_window=8)) == 8 * 248_320 * 4 + 106_299 * 1_364, "eight rows at most"
    assert bind_bytes(IQ2_XS, StrataRequest(mtp=False, spec_window=2)) == 4 * 248_320 * 4


@pytest.mark.parametrize(
    ("free_gib", "cache_gib"), [(2.24, 1.41), (2.16, 1.33), (2.27, 1.45), (2.07, 1.25)], ids=lambda v: str(v)
)
def test_published_free_memory_gives_the_published_cache(free_gib: float, cache_gib: float) -> None:
    found = sized(int(free_gib * GIB), StrataRequest())
    assert found.bytes / GIB == pytest.approx(
        cache_gib, abs=0.007
    )  # the row size was picked from the first of the four


def test_borrowed_buffers_cost_the_cache_nothing_and_own_ones_their_price() -> None:
    borrowing = sized(8 * GIB, StrataRequest())
    price = old_owned_price_bytes(2_048)
    own = sized(8 * GIB, StrataRequest(borrow=False), prompt_bytes=price)
    assert price == (160 + 2_048 * 680 // 1_024) * MIB
    assert own.reserve_bytes - borrowing.reserve_bytes == price
    assert borrowing.bytes - own.bytes == pytest.approx(price, abs=2 * IQ2_XS.max_blob_bytes)


def test_sized_slots_hold_more_experts_than_uniform_ones_in_the_same_bytes() -> None:
    mixed = sized(16 * GIB, StrataRequest(), IQ3_S)
    per_layer = sized(16 * GIB, StrataRequest(cache_per_layer=True), IQ3_S)
    unranked = sized(16 * GIB, StrataRequest(profile=False), IQ3_S)
    assert (mixed.uniform, per_layer.uniform, unranked.uniform) == (False, True, True)
    assert mixed.slots > 1.25 * unranked.slots
    assert per_layer.slots % IQ3_S.num_layers == 0
    assert 0 <= unranked.slots - per_layer.slots < IQ3_S.num_layers
    assert sized(16 * GIB, StrataRequest(), NVFP4).uniform, "experts of one size need no offsets"


@QUICK
@given(budget=st.integers(0, 40 * GIB), quant=st.sampled_from([IQ2_XS, IQ3_S, NVFP4]), per_layer=st.booleans())
def test_slots_fill_a_budget_and_one_more_would_not_fit(budget: int, quant: PackSizes, per_layer: bool) -> None:
    request = StrataRequest(cache_per_layer=per_layer)
    slots, num_bytes, uniform = fill(quant, request, budget, quant.num_ranks)
    assert num_bytes <= budget
    if slots < quant.num_ranks:
        step = quant.num_layers * quant.max_blob_bytes if per_layer else quant.max_blob_bytes if uniform else 0
        assert num_bytes + (step or int(quant.rank_bytes[slots])) > budget


def test_a_fixed_cache_is_a_byte_budget_and_never_takes_the_reserve() -> None:
    request = StrataRequest(expert_cache=5_400)
    found = sized(20 * GIB, request, IQ3_S)
    assert found.budget_bytes == 5_400 * 2_662_400
    assert found.slots > 6_900, "real slots are smaller than the largest"
    capped = sized(8 * GIB, request, IQ3_S)
    assert capped.bytes <= 8 * GIB - capped.reserve_bytes
    assert not capped.short_bytes
    assert "takes no more" in capped.notes[0]
    strict = sized(8 * GIB, replace(request, cap_expert_cache=False), IQ3_S)
    assert strict.short_bytes == 5_400 * 2_662_400 - (8 * GIB - strict.reserve_bytes)


def test_zero_slots_with_a_profile_mean_auto() -> None:
    auto = sized(8 * GIB, StrataRequest())
    assert sized(8 * GIB, StrataRequest(expert_cache=0)) == auto


def test_the_profile_is_a_ceiling() -> None:
    found = sized(20 * GIB, StrataRequest(ranked=3_000))
    assert found.slots == 3_000
    assert "profile ranks 3,000" in found.notes[0]
    assert sized(20 * GIB, StrataRequest(ranked=3_000, expert_cache=9_000)).slots == 3_000


def test_what_is_missing_is_told_to_the_byte() -> None:
    request = StrataRequest()
    reserve = 700 * MIB + bind_bytes(IQ2_XS, request)
    assert sized(reserve + IQ2_XS.max_blob_bytes, request).short_bytes == 0
    assert sized(reserve + IQ2_XS.max_blob_bytes - 1, request).short_bytes == 1
    per_layer = replace(request, cache_per_layer=True)
    assert sized(reserve + 48 * IQ2_XS.max_blob_bytes, per_layer).slots == 48
    assert sized(reserve + 48 * IQ2_XS.max_blob_bytes - 1, per_layer).short_bytes == 1


class TestSmallCards:
    """A default reserve shrinks so that the smallest loan and the slots that stay fit (#496)."""

    request = StrataRequest(reserve_given=False)
    least = least_slots(IQ2_XS, request, 290 * MIB)

    def free(self, reserve_mib: int) -> int:
        return reserve_mib * MIB + bind_bytes(IQ2_XS, self.request) + self.least * IQ2_XS.max_blob_bytes

    def test_the_least_cache_is_the_smallest_loan_and_128(self) -> None:
        assert self.least == -(-290 * MIB // 1_510_400) + 128
        assert least_slots(IQ2_XS, replace(self.request, borrow=False), 290 * MIB) == 1

    @pytest.mark.parametrize(("fits_mib", "kept_mib"), [(700, 700), (699, 699), (450, 450), (300, 300), (299, 700)])
    def test_it_shrinks_to_what_fits_but_not_below_300(self, fits_mib: int, kept_mib: int) -> None:
        found = sized(self.free(fits_mib), self.request)
        assert found.reserve_mib == kept_mib
        if kept_mib == fits_mib:
            assert found.slots >= self.least

    def test_a_given_reserve_is_kept(self) -> None:
        found = sized(self.free(450), replace(self.request, reserve_given=True))
        assert found.reserve_mib == 700
        assert found.slots < self.least


class TestOpening:
    """Slots are written once and free memory is read again (planning notes 2.3)."""

    def test_what_touching_reveals_is_given_back(self) -> None:
        request, free = StrataRequest(), 8 * GIB
        cache = sized(free, request)
        same, warnings = open_cache(IQ2_XS, request, BIG, cache, free)
        assert (same, warnings) == (cache, ())
        held_back = replace(BIG, touch_bytes=200 * MIB)
        opened, warnings = open_cache(IQ2_XS, request, held_back, cache, free)
        left = free - held_back.touch_bytes - opened.bytes
        assert left >= cache.reserve_bytes - 64 * MIB
        assert opened.bytes < cache.bytes - 200 * MIB
        assert "gave back" in warnings[0]

    def test_64_mib_may_be_missing(self) -> None:
        request, free = StrataRequest(), 8 * GIB
        cache = sized(free, request)
        slack = free - cache.bytes - cache.reserve_bytes + 64 * MIB
        assert open_cache(IQ2_XS, request, replace(BIG, touch_bytes=slack), cache, free)[0] == cache
        assert open_cache(IQ2_XS, request, replace(BIG, touch_bytes=slack + 1), cache, free)[0] != cache

    def test_a_reading_of_nearly_nothing_gives_a_gib_twice_then_a_quarter(self) -> None:
        reserve = 844 * MIB
        assert give_back_bytes(reserve - 64 * MIB, reserve, 8 * GIB, 0) == 0
        assert give_back_bytes(100 * MIB, reserve, 8 * GIB, 0) == (844 - 100 + 64) * MIB
        assert give_back_bytes(15 * MIB, reserve, 8 * GIB, 0) == 1024 * MIB
        assert give_back_bytes(15 * MIB, reserve, 8 * GIB, 1) == 1024 * MIB
        assert give_back_bytes(15 * MIB, reserve, 8 * GIB, 2) == 2 * GIB

    def test_too_little_beside_the_filled_cache_names_the_reserve_to_set(self) -> None:
        request = StrataRequest(reserve_mib=100, draft_vocab=1_000)
        cache = sized(8 * GIB, request)
        _, warnings = open_cache(IQ2_XS, request, BIG, cache, 8 * GIB)
        free_mib = (8 * GIB - cache.bytes) // MIB
        assert free_mib < 256
        assert f"hardware.vram_reserve_mib={100 + 512 - free_mib}" in warnings[0]
        ample = replace(request, reserve_mib=700)
        assert open_cache(IQ2_XS, ample, BIG, sized(8 * GIB, ample), 8 * GIB)[1] == ()


@QUICK
@given(
    free=st.integers(0, 40 * GIB),
    more=st.integers(0, 2 * GIB),
    reserve_given=st.booleans(),
    fixed=st.none() | st.integers(1, 20_000),
)
def test_more_free_memory_never_gives_fewer_slots(free: int, more: int, reserve_given: bool, fixed: int | None) -> None:
    request = StrataRequest(reserve_given=reserve_given, expert_cache=fixed)
    assert sized(free + more, request).slots >= sized(free, request).slots

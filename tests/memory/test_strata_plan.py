"""The Strata planner as a whole: bytes conserve, plans repeat, errors say what fits, growth and the lent head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strata_cases import BIG, GIB, LAPTOP, SMALL, pack, planned, unfit

from strata_jax.errors import ConfigError, DoesNotFit
from strata_jax.memory.ledger import MIB, PHASES, Memory, Origin, Owner, Phase
from strata_jax.memory.strata.kv_pools import kv_mapped_bytes
from strata_jax.memory.strata.plan import plan_strata, try_plan_strata
from strata_jax.memory.strata.request import Card, ExpertTier, GrowSettings, StrataRequest, Version
from strata_jax.memory.strata.result import Layout, StrataPlan
from strata_jax.memory.strata.table import strata_plan_table, strata_plan_text

IQ2_XS, IQ3_XXS, IQ3_S = pack("iq2_xs"), pack("iq3_xxs"), pack("iq3_s")
QUICK = settings(max_examples=60, deadline=None)
GROW = GrowSettings(enabled=True)

CARDS = st.builds(
    Card,
    name=st.just("any"),
    vram_bytes=st.integers(6 * GIB, 48 * GIB),
    taken_bytes=st.integers(0, 2 * GIB),
    late_bytes=st.sampled_from((0, 303 * MIB)),
    ram_bytes=st.sampled_from((0, 32 * GIB, 64 * GIB, 128 * GIB)),
    touch_bytes=st.sampled_from((0, 100 * MIB)),
    pinned_share=st.sampled_from((0.0, 1.0)),
    pinned_entry_bytes=st.sampled_from((0, 8)),
    os=st.sampled_from(("linux", "windows")),
)
REQUESTS = st.builds(
    StrataRequest,
    version=st.sampled_from(Version),
    context_cells=st.sampled_from((4_096, 32_768, 131_072, 262_144)),
    kv_type=st.sampled_from(("f16", "int8", "k8v4", "q4_0")),
    kv_resident_cells=st.sampled_from((0, 0, 20_480, 32_768)),
    expert_cache=st.none() | st.integers(0, 12_000),
    cap_expert_cache=st.booleans(),
    cache_per_layer=st.booleans(),
    chunk_tokens=st.none() | st.sampled_from((256, 1_000, 2_048, 8_192)),
    reserve_mib=st.sampled_from((0, 590, 700, 1_500)),
    reserve_given=st.booleans(),
    borrow=st.booleans(),
    own=st.sampled_from(("off", "auto", "on")),
    decide_at=st.sampled_from(("filled", "final")),
    head_alias=st.booleans(),
    alias_inside_head=st.booleans(),
    grow=st.sampled_from((GrowSettings(), GROW, replace(GROW, anywhere=False))),
    vram_elastic_mib=st.sampled_from((0, 512)),
    profile=st.booleans(),
    mtp=st.booleans(),
    vision=st.booleans(),
    token_graph=st.booleans(),
    tier=st.sampled_from(ExpertTier),
    conversation_budget=st.booleans(),
    conversation_mib=st.sampled_from((0, 2_048)),
)


def found_plan(card: Card, request: StrataRequest) -> StrataPlan:
    try:
        found = try_plan_strata(IQ3_XXS, card, request)
    except ConfigError:
        found = None
    assume(isinstance(found, StrataPlan))
    assert isinstance(found, StrataPlan)
    return found


@QUICK
@given(card=CARDS, request=REQUESTS)
def test_no_byte_is_lost_or_owned_twice(card: Card, request: StrataRequest) -> None:
    plan = found_plan(card, request)
    sums = {phase: plan.ledger.total_bytes(phase, Memory.DEVICE) for phase in PHASES}
    assert sums[Phase.START] == card.vram_bytes - plan.free_after_start_bytes + plan.overcommit_bytes
    assert min(plan.free_after_start_bytes, plan.overcommit_bytes) == 0
    assert max(sums.values()) <= card.vram_bytes + plan.peak_overcommit_bytes
    assert plan.overcommit_bytes <= plan.peak_overcommit_bytes
    assert plan.peak_overcommit_bytes == 0 or card.os == "windows"
    while_reading = plan.ledger.owner_bytes(Phase.PREFILL, Memory.DEVICE)
    assert while_reading[Owner.EXPERT_SLOTS] == plan.cache_bytes - plan.prompt.lent_bytes
    assert while_reading.get(Owner.PROMPT_BUFFERS, 0) == plan.prompt.lent_bytes + plan.prompt.own_bytes
    assert plan.prompt.lent_bytes + plan.prompt.own_bytes >= plan.prompt.buffer_bytes
    assert plan.prompt.first_lent + plan.prompt.lent_slots == plan.slots
    assert all(entry.rule for entry in plan.ledger.entries)
    assert {entry.origin for entry in plan.ledger.entries} <= {Origin.GIVEN, Origin.DEFAULT, Origin.COMPUTED}


@QUICK
@given(card=CARDS, request=REQUESTS)
def test_a_plan_is_planned_again_as_it_is(card: Card, request: StrataRequest) -> None:
    plan = found_plan(card, request)
    assert plan_strata(IQ3_XXS, plan.card, plan.request) == plan


@QUICK
@given(card=CARDS, request=REQUESTS)
def test_the_cache_leaves_the_reserve_and_what_comes_later(card: Card, request: StrataRequest) -> None:
    plan = found_plan(replace(card, touch_bytes=0), request)
    assert plan.cache_bytes <= plan.free_for_cache_bytes - plan.reserve_bytes
    later = plan.card.late_bytes + sum(
        e.peak_bytes for e in plan.ledger.entries if e.owner is Owner.LATE and e.item.startswith("page tables")
    )
    if plan.prompt.layout is Layout.BORROWED:
        assert plan.free_after_start_bytes >= plan.reserve_mib * MIB - later


@QUICK
@given(card=CARDS, more=st.integers(0, 8 * GIB), request=REQUESTS)
def test_more_device_memory_never_costs_slots(card: Card, more: int, request: StrataRequest) -> None:
    request = replace(request, grow=GrowSettings())
    less = found_plan(card, request)
    roomy = found_plan(replace(card, vram_bytes=card.vram_bytes + more), request)
    if not card.touch_bytes:  # what is given back comes in coarse steps
        assert roomy.slots >= less.slots


class TestBelongings:
    """Entries that depend on a setting."""

    def test_start_follows_the_order_of_allocation(self) -> None:
        plan = planned(IQ2_XS, BIG, StrataRequest(vision=True))
        owners = list(dict.fromkeys(e.owner for e in plan.ledger.entries if e.memory is Memory.DEVICE))
        order = [Owner.SYSTEM, Owner.DENSE, Owner.KV, Owner.DRAFTER, Owner.HEAD, Owner.EXPERT_SLOTS, Owner.DRAFT_BIND]
        assert [owner for owner in owners if owner in order] == order

    def test_streamed_kv_is_in_ram_and_needs_more_cells_than_are_resident(self) -> None:
        whole = planned(IQ2_XS, BIG, StrataRequest(context_cells=131_072, kv_type="k8v4"))
        streamed = planned(IQ2_XS, BIG, replace(whole.request, kv_resident_cells=32_768))
        assert streamed.kv_pinned_ram_bytes == 131_072 * 816 * 12
        assert streamed.kv_mapped_bytes < whole.kv_mapped_bytes / 2
        assert streamed.slots > whole.slots
        inert = planned(IQ2_XS, BIG, StrataRequest(context_cells=8_192, kv_resident_cells=20_480))
        assert inert.slots == planned(IQ2_XS, BIG, StrataRequest(context_cells=8_192)).slots
        assert inert.kv_pinned_ram_bytes == 0

    def test_pinned_ram_costs_page_tables_before_the_cache_as_arena_and_after_it_as_copies(self) -> None:
        card = replace(BIG, pinned_entry_bytes=8)
        arena = planned(IQ2_XS, card, StrataRequest())
        copies = planned(IQ2_XS, card, StrataRequest(tier=ExpertTier.RESIDENT))
        free = planned(IQ2_XS, BIG, StrataRequest(tier=ExpertTier.RESIDENT))
        tables = IQ2_XS.total_expert_bytes // 4096 * 8
        assert (copies.slots - arena.slots) * IQ2_XS.mean_blob_bytes == pytest.approx(tables, rel=0.05)
        assert copies.slots == free.slots
        paid = free.free_after_start_bytes - copies.free_after_start_bytes
        assert paid == -(-copies.ram_resident_bytes // 4096) * 8

    def test_elastic_cache_counts_segments_and_keeps_a_floor(self) -> None:
        plan = planned(IQ3_S, BIG, StrataRequest(vram_elastic_mib=512))
        assert plan.segments == -(-plan.cache_bytes // (512 * MIB))
        assert 128 < plan.floor_slots < 512
        assert planned(IQ3_S, BIG, StrataRequest()).segments == 0


class TestGrowth:
    """Elastic K/V: how much is mapped at the start, and when all of it is (planning notes 6.3)."""

    def test_only_the_first_cells_are_mapped_and_the_cache_gets_the_rest(self) -> None:
        fixed, grown = (planned(IQ2_XS, BIG, StrataRequest(grow=g)) for g in (GrowSettings(), GROW))
        assert (grown.kv_mapped_cells, grown.grow_refusal) == (16_384, None)
        assert grown.kv_mapped_bytes == kv_mapped_bytes(IQ2_XS, "int8", 16_384) == 130 * 2 * MIB
        assert grown.kv_max_bytes == kv_mapped_bytes(IQ2_XS, "int8", 262_144)
        assert (grown.slots - fixed.slots) * IQ2_XS.mean_blob_bytes / GIB == pytest.approx(3.1, abs=0.05)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"token_graph": False}, "token graph"),
            ({"kv_resident_cells": 32_768}, "kv.resident_cells=32768"),
            ({"profile": False}, "profile"),
            ({"tier": ExpertTier.MMAP, "grow": replace(GROW, anywhere=False)}, "files"),
            ({"vram_elastic_mib": 512, "grow": replace(GROW, anywhere=False)}, "elastic"),
        ],
        ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
    )
    def test_without_what_it_needs_the_whole_window_is_mapped_and_the_plan_says_so(
        self, change: dict[str, object], reason: str
    ) -> None:
        request = StrataRequest(**({"grow": GROW} | change))  # type: ignore[arg-type]
        plan = planned(IQ2_XS, BIG, request)
        without = planned(IQ2_XS, BIG, replace(request, grow=GrowSettings()))
        assert plan.kv_mapped_cells == 262_144, "a prompt of 32,036 tokens writes inside the mapped cells"
        assert plan.slots == without.slots
        assert plan.grow_refusal is not None
        assert reason in plan.grow_refusal
        assert plan.notes[0].startswith("K/V growth is off (")

    @pytest.mark.parametrize("change", [{"tier": ExpertTier.MMAP}, {"vram_elastic_mib": 512}], ids=str)
    def test_slots_that_pay_anywhere_grow_where_the_original_does_not(self, change: dict[str, Any]) -> None:
        plan = planned(IQ2_XS, BIG, StrataRequest(grow=GROW, **change))
        assert (plan.grow_refusal, plan.kv_mapped_cells) == (None, 16_384)

    def test_too_few_slots_to_take_from_map_the_whole_window(self) -> None:
        request = StrataRequest(context_cells=131_072, kv_type="q4_0", grow=GROW, expert_cache=100)
        plan = planned(IQ2_XS, BIG, request)
        assert plan.slots <= 128
        assert plan.kv_mapped_cells == 131_072
        assert plan.grow_refusal is not None
        assert "128" in plan.grow_refusal

    def test_as_upstream_only_slots_below_the_loan_count(self) -> None:
        alias = StrataRequest(context_cells=65_536, head_alias=True, grow=GROW)
        card = replace(BIG, vram_bytes=8_550 * MIB)
        anywhere = planned(IQ2_XS, card, alias)
        assert anywhere.grow_refusal is None
        assert anywhere.prompt.first_lent <= 128 < anywhere.slots
        below = planned(IQ2_XS, card, replace(alias, grow=replace(GROW, anywhere=False)))
        assert below.kv_mapped_cells == 65_536
        assert below.grow_refusal is not None
        assert f"{anywhere.prompt.first_lent} of" in below.grow_refusal

    def test_a_window_that_then_does_not_fit_is_refused_before_a_prompt_starts(self) -> None:
        request = StrataRequest(grow=GROW)
        card = replace(BIG, vram_bytes=8 * GIB)
        assert planned(IQ2_XS, card, request).kv_mapped_cells == 16_384
        with pytest.raises(DoesNotFit):
            plan_strata(IQ2_XS, card, replace(request, token_graph=False))


class TestLentHead:
    """The head's bytes serve the prompt (planning notes 6.2)."""

    def test_the_cache_takes_the_heads_bytes_and_decoding_overcommits(self) -> None:
        kept, lent = (planned(IQ3_XXS, LAPTOP, replace(SMALL, head_alias=on)) for on in (False, True))
        gained = lent.cache_bytes - kept.cache_bytes
        assert gained == pytest.approx(IQ3_XXS.head_bytes, abs=2 * IQ3_XXS.max_blob_bytes)
        assert lent.prompt.layout is Layout.HYBRID
        assert lent.prompt.first_lent == 1, "all slots but the first"
        head = [e.phase_bytes for e in lent.ledger.entries if e.owner is Owner.HEAD]
        assert head == [(0, 0, IQ3_XXS.head_bytes, IQ3_XXS.head_bytes)]
        assert lent.overcommit_bytes == 0 < lent.peak_overcommit_bytes
        assert any("0 MiB of device memory are free while decoding" in w for w in lent.warnings)

    def test_buffers_inside_the_head_leave_cache_and_free_memory_alone(self) -> None:
        kept = planned(IQ3_XXS, LAPTOP, SMALL)
        inside = planned(IQ3_XXS, LAPTOP, replace(SMALL, head_alias=True, alias_inside_head=True))
        assert inside.slots == kept.slots
        assert inside.prompt.chunk_tokens > kept.prompt.chunk_tokens
        assert inside.prompt.own_bytes >= IQ3_XXS.head_bytes
        assert inside.peak_overcommit_bytes == 0

    def test_it_contradicts_own_buffers_only(self) -> None:
        with pytest.raises(ConfigError, match=r"policy\.head_alias\.enabled=true and prefill\.own=on"):
            plan_strata(IQ3_XXS, LAPTOP, replace(SMALL, head_alias=True, own="on"))


class TestOwnBuffers:
    """Own buffers from what is spare (planning notes 6.1)."""

    fixed = StrataRequest(version=Version.V0_1_35, reserve_mib=1_536, expert_cache=5_400)
    card = replace(BIG, taken_bytes=3_250 * MIB, pinned_share=0.5)

    def test_a_fixed_cache_with_spare_memory_gets_them_and_keeps_its_slots(self) -> None:
        borrowed, own = (planned(IQ3_S, self.card, replace(self.fixed, own=o)) for o in ("off", "auto"))
        assert (borrowed.prompt.layout, own.prompt.layout) == (Layout.BORROWED, Layout.OWN)
        assert own.slots == borrowed.slots
        assert own.prompt.lent_slots == 0 < borrowed.prompt.lent_slots
        assert own.prompt.chunk_tokens == borrowed.prompt.chunk_tokens == 8_192

    def test_an_automatic_cache_leaves_nothing_to_spare(self) -> None:
        auto = replace(self.fixed, expert_cache=None, own="auto")
        assert planned(IQ3_S, self.card, auto).prompt.layout is Layout.BORROWED

    def test_deciding_on_the_final_ledger_keeps_the_reserve_that_deciding_early_breaks(self) -> None:
        base = planned(IQ3_S, self.card, replace(self.fixed, own="auto"))
        tight = replace(self.card, taken_bytes=self.card.taken_bytes + base.free_after_start_bytes - 1_400 * MIB)
        early, late = (planned(IQ3_S, tight, replace(base.request, decide_at=at)) for at in ("filled", "final"))
        assert early.prompt.layout is Layout.OWN
        assert early.free_after_start_bytes < 1_536 * MIB
        assert any("allocated afterwards: draft vocabulary rows" in w for w in early.warnings)
        assert late.prompt.layout is Layout.BORROWED
        assert late.free_after_start_bytes > 1_536 * MIB
        assert not any("afterwards" in w for w in late.warnings)

    def test_on_means_own_or_an_error(self) -> None:
        own = planned(IQ3_S, self.card, StrataRequest(own="on", grow=GrowSettings()))
        assert own.prompt.layout is Layout.OWN
        assert own.reserve_bytes > planned(IQ3_S, self.card, StrataRequest()).reserve_bytes + 1_500 * MIB
        found = unfit(IQ3_S, replace(self.card, vram_bytes=17 * GIB), StrataRequest(own="on", chunk_tokens=16_384))
        assert "prefill.own=on" in found.given
        assert "prefill.own=auto" in found.alternatives

    @pytest.mark.parametrize("chunk", [1_000, 3_000, 24_576])
    def test_a_given_chunk_is_kept(self, chunk: int) -> None:
        plan = planned(IQ2_XS, BIG, StrataRequest(own="on", chunk_tokens=chunk))
        assert (plan.prompt.layout, plan.prompt.chunk_tokens) == (Layout.OWN, chunk)

    def test_auto_below_the_smallest_of_the_list_takes_the_limit(self) -> None:
        plan = planned(IQ2_XS, BIG, StrataRequest(borrow=False, chunk_auto_max=256))
        assert (plan.prompt.layout, plan.prompt.chunk_tokens) == (Layout.OWN, 256)

    def test_later_releases_price_them_exactly(self) -> None:
        request = StrataRequest(borrow=False, chunk_tokens=24_576)
        old, new = (planned(IQ2_XS, BIG, replace(request, version=v)) for v in (Version.V0_1_41, Version.V0_1_43))
        assert old.reserve_bytes > 16 * GIB, "what issue #796 complains about"
        assert old.reserve_bytes - new.reserve_bytes > 6 * GIB
        assert new.prompt.chunk_tokens == old.prompt.chunk_tokens == 24_576
        found = unfit(IQ2_XS, replace(BIG, vram_bytes=20 * GIB), request)
        assert found.largest_chunk is not None
        assert found.largest_chunk < 24_576
        assert "prefill.borrow=true" in found.alternatives


class TestDoesNotFit:
    """What an error says; every value it names has been planned again."""

    def test_dense_weights_alone_are_too_large(self) -> None:
        card = replace(BIG, vram_bytes=6 * GIB)
        found = unfit(IQ2_XS, card, StrataRequest())
        message = found.message()
        assert found.shortfall_bytes == found.ledger.total_bytes(Phase.PREFILL, Memory.DEVICE) - card.vram_bytes
        assert f"{found.shortfall_bytes / MIB:,.1f} MiB" in message
        largest = [num for _, num in found.owners]
        assert largest == sorted(largest, reverse=True)
        assert len(largest) == 3
        assert all(str(owner) in message for owner, _ in found.owners)
        assert found.enough_alone() or found.together or "smaller quantisation" in message
        with pytest.raises(DoesNotFit) as raised:
            plan_strata(IQ2_XS, card, StrataRequest())
        assert raised.value.shortfall_bytes == found.shortfall_bytes

    def test_slots_fixed_by_the_user_stop_the_plan_and_are_named(self) -> None:
        request = StrataRequest(expert_cache=16_000, cap_expert_cache=False, reserve_mib=1_024)
        found = unfit(IQ2_XS, BIG, request)
        assert "cache.slots=16000 fixes" in found.message()
        assert "cache.slots=16000" in found.given
        free = planned(IQ2_XS, BIG, replace(request, expert_cache=1)).free_for_cache_bytes
        assert found.shortfall_bytes == 16_000 * 1_510_400 - (free - 1_024 * MIB - planned_bind(request))
        assert found.largest_slots is not None
        assert planned(IQ2_XS, BIG, replace(request, expert_cache=found.largest_slots))
        assert unfit(IQ2_XS, BIG, replace(request, expert_cache=found.largest_slots + 1))

    def test_experts_too_large_for_ram_name_another_tier(self) -> None:
        found = unfit(IQ3_S, replace(BIG, ram_bytes=32 * GIB), StrataRequest())
        assert found.shortage.memory is Memory.HOST
        assert found.alternatives == ("ram.tier=resident",)
        assert planned(IQ3_S, replace(BIG, ram_bytes=32 * GIB), StrataRequest(tier=ExpertTier.RESIDENT))

    @pytest.mark.parametrize(
        ("change", "phase"),
        [
            ({"reserve_mib": 200}, "at the start"),
            ({"head_alias": True}, "while decoding"),
            ({"expert_cache": 680, "cap_expert_cache": False, "reserve_mib": 200}, "at the start"),
        ],
    )
    def test_a_plan_that_takes_more_than_the_card_has_stops_where_nothing_is_paged(
        self, change: dict[str, Any], phase: str
    ) -> None:
        request, card = replace(SMALL, **change), replace(LAPTOP, os="linux")
        paged = planned(IQ3_XXS, LAPTOP, request)
        found = unfit(IQ3_XXS, card, request)
        assert found.shortfall_bytes == paged.peak_overcommit_bytes > 0
        assert f"{found.shortfall_bytes:,} bytes" in found.message()
        assert f"{phase} it takes more than the card has, and linux pages no device memory" in found.message()
        worst = found.ledger.peak(Memory.DEVICE)[0]
        assert found.owners == paged.ledger.largest_owners(worst, Memory.DEVICE)
        assert len(found.owners) == 3
        assert all(f"{owner} {num_bytes / MIB:,.1f} MiB" in found.message() for owner, num_bytes in found.owners)
        with pytest.raises(DoesNotFit, match="device memory"):
            plan_strata(IQ3_XXS, card, request)

    @pytest.mark.parametrize(
        "change", [{"reserve_mib": 200}, {"head_alias": True}, {"own": "auto"}, {"expert_cache": 700}], ids=str
    )
    def test_the_smallest_reserve_that_keeps_a_plan_within_the_card_is_named(self, change: dict[str, Any]) -> None:
        request, card = replace(SMALL, **({"reserve_mib": 100} | change)), replace(LAPTOP, os="linux")
        found = unfit(IQ3_XXS, card, request)
        key, _, text = found.alternatives[0].partition("=")
        assert key == "hardware.vram_reserve_mib"
        assert int(text) > request.reserve_mib
        enough = planned(IQ3_XXS, card, replace(request, reserve_mib=int(text)))
        assert enough.peak_overcommit_bytes == 0
        assert not any("paged by the driver" in w for w in enough.warnings)
        assert unfit(IQ3_XXS, card, replace(request, reserve_mib=int(text) - 1)).shortage.overcommits

    def test_fixed_slots_that_overcommit_are_named_with_the_most_that_fit(self) -> None:
        request = replace(SMALL, expert_cache=680, cap_expert_cache=False, reserve_mib=200)
        card = replace(LAPTOP, os="linux")
        found = unfit(IQ3_XXS, card, request)
        assert found.given[0] == "cache.slots=680"
        assert found.largest_slots is not None
        assert found.largest_slots < 680
        assert planned(IQ3_XXS, card, replace(request, expert_cache=found.largest_slots))
        assert unfit(IQ3_XXS, card, replace(request, expert_cache=found.largest_slots + 1))
        assert not any("vram_reserve_mib" in text for text in found.alternatives), "it would shrink nothing"
        more = replace(card, vram_bytes=card.vram_bytes + found.shortfall_bytes)
        assert planned(IQ3_XXS, more, request).free_after_start_bytes == 0
        assert unfit(IQ3_XXS, replace(more, vram_bytes=more.vram_bytes - 1), request)

    def test_the_user_may_say_what_the_driver_does(self) -> None:
        request, linux = replace(SMALL, reserve_mib=200), replace(LAPTOP, os="linux")
        assert "policy.head_alias.spill=true" in unfit(IQ3_XXS, linux, request).message()
        paged = planned(IQ3_XXS, linux, replace(request, spill=True))
        assert any("must be paged by the driver" in w for w in paged.warnings)
        assert planned(IQ3_XXS, LAPTOP, replace(request, spill=True)).ledger == paged.ledger
        refused = unfit(IQ3_XXS, LAPTOP, replace(request, spill=False))
        assert "the driver (policy.head_alias.spill=false) pages no device memory" in refused.message()

    def test_missing_room_counts_what_is_taken_later_where_nothing_is_paged(self) -> None:
        request = replace(SMALL, expert_cache=2_000, cap_expert_cache=False, reserve_mib=100)
        windows, linux = (unfit(IQ3_XXS, replace(LAPTOP, os=os), request) for os in ("windows", "linux"))
        assert linux.shortfall_bytes > windows.shortfall_bytes
        more = replace(LAPTOP, os="linux", vram_bytes=LAPTOP.vram_bytes + linux.shortfall_bytes)
        assert planned(IQ3_XXS, more, request).free_after_start_bytes == 0
        assert unfit(IQ3_XXS, replace(more, vram_bytes=more.vram_bytes - 1), request).shortage.overcommits

    def test_a_smaller_reserve_is_named_only_if_it_still_covers_what_is_taken_later(self) -> None:
        card = replace(LAPTOP, os="linux", late_bytes=303 * MIB)
        request = replace(SMALL, reserve_mib=1_500, expert_cache=700, cap_expert_cache=False)
        reserve = [t for t in unfit(IQ3_XXS, LAPTOP, request).alternatives if "reserve" in t]
        assert reserve
        for text in unfit(IQ3_XXS, card, request).alternatives:
            if text.startswith("hardware.vram_reserve_mib="):
                mib = int(text.partition("=")[2])
                assert planned(IQ3_XXS, card, replace(request, reserve_mib=mib)).peak_overcommit_bytes == 0

    def test_a_larger_reserve_is_among_what_is_enough_together(self) -> None:
        request = replace(SMALL, context_cells=262_144, kv_type="f16", kv_resident_cells=0, reserve_mib=100)
        card = replace(LAPTOP, os="linux")
        found = unfit(IQ3_XXS, card, request)
        assert not found.enough_alone()
        assert "kv.type=q4_0" in found.together
        values = dict(text.split("=") for text in found.together)
        context, reserve = int(values["model.max_context"]), int(values["hardware.vram_reserve_mib"])
        changed = replace(request, kv_type="q4_0", context_cells=context, reserve_mib=reserve)
        assert planned(IQ3_XXS, card, changed).peak_overcommit_bytes == 0
        assert unfit(IQ3_XXS, card, replace(changed, reserve_mib=request.reserve_mib)).shortage.overcommits

    @settings(max_examples=25, deadline=None)
    @given(vram=st.integers(4 * GIB, 14 * GIB), request=REQUESTS)
    def test_every_value_named_fits_and_the_next_larger_does_not(self, vram: int, request: StrataRequest) -> None:
        card = replace(BIG, vram_bytes=vram)
        try:
            found = try_plan_strata(IQ3_XXS, card, request)
        except ConfigError:
            assume(False)
            return
        assume(not isinstance(found, StrataPlan))
        assert not isinstance(found, StrataPlan)
        assert found.shortfall_bytes > 0
        for field, value, step in (
            ("context_cells", found.largest_context, 256),
            ("chunk_tokens", found.largest_chunk, 256 if (found.largest_chunk or 0) >= 256 else 1),
            ("expert_cache", found.largest_slots, IQ3_XXS.num_layers if request.cache_per_layer else 1),
        ):
            if value is None:
                continue
            assert kept(card, request, field, value)
            given = getattr(request, field)
            if given and value + step < given:
                assert not kept(card, request, field, value + step)

    def test_a_context_is_named_that_fits_although_the_next_shorter_one_does_not(self) -> None:
        card = replace(BIG, vram_bytes=6_441_073_920)
        request = StrataRequest(
            version=Version.V0_1_35, context_cells=32_768, kv_type="f16", kv_resident_cells=0, chunk_tokens=1_000,
            reserve_mib=0, borrow=False, own="on", head_alias=False, profile=False, mtp=False, vision=False,
            token_graph=False, tier=ExpertTier.ARENA, conversation_budget=False, conversation_mib=0,
        )  # fmt: skip
        assert unfit(IQ3_XXS, card, request).largest_context == 1_024
        assert [kept(card, request, "context_cells", cells) for cells in (768, 1_024, 1_280)] == [False, True, False]

    @settings(max_examples=25, deadline=None)
    @given(vram=st.integers(4 * GIB, 14 * GIB), request=REQUESTS)
    def test_nothing_fits_is_said_only_where_nothing_does(self, vram: int, request: StrataRequest) -> None:
        card = replace(BIG, vram_bytes=vram)
        try:
            found = try_plan_strata(IQ3_XXS, card, request)
        except ConfigError:
            assume(False)
            return
        assume(not isinstance(found, StrataPlan) and not found.enough_alone())
        for field, values in (
            ("context_cells", (256, 1_024)), ("chunk_tokens", (1, 100, 256, 512)), ("expert_cache", (1, 48, 144)),
            ("reserve_mib", (0, 300)),
        ):  # fmt: skip
            for value in values:
                if value < (getattr(request, field) or 10**9):
                    assert not kept(card, request, field, value), (field, value)

    @pytest.mark.parametrize(
        "request_", [StrataRequest(), StrataRequest(head_alias=True), StrataRequest(borrow=False)], ids=str
    )
    def test_the_shortfall_is_what_more_memory_must_add(self, request_: StrataRequest) -> None:
        card = replace(BIG, vram_bytes=6 * GIB)
        found = unfit(IQ2_XS, card, request_)
        enough = replace(card, vram_bytes=card.vram_bytes + found.shortfall_bytes)
        assert planned(IQ2_XS, enough, request_)
        assert unfit(IQ2_XS, replace(enough, vram_bytes=enough.vram_bytes - 2 * MIB), request_)


def kept(card: Card, request: StrataRequest, field: str, value: int) -> bool:
    """Whether a plan fits with a setting as it is given."""
    changed: dict[str, Any] = {field: value}
    try:
        plan = try_plan_strata(IQ3_XXS, card, replace(request, **changed))
    except ConfigError:
        return False
    return isinstance(plan, StrataPlan) and (field != "chunk_tokens" or plan.prompt.chunk_tokens == value)


def planned_bind(request: StrataRequest) -> int:
    return request.window_rows * 248_320 * 4 + request.draft_vocab * 1_364


class TestChecks:
    """Settings that cannot be used are named together."""

    def test_all_problems_come_at_once(self) -> None:
        request = StrataRequest(context_cells=0, own="maybe", spec_window=9, kv_type="int3")
        with pytest.raises(ConfigError) as raised:
            plan_strata(IQ2_XS, BIG, request)
        message = str(raised.value)
        assert message.startswith("4 settings cannot be used")
        for part in ("model.max_context=0", "prefill.own=maybe", "spec.window=9", "kv.type=int3"):
            assert part in message

    def test_a_window_needs_a_slot(self) -> None:
        with pytest.raises(ConfigError, match=r"cache\.slots=0 .* spec\.window=4"):
            plan_strata(IQ2_XS, BIG, StrataRequest(expert_cache=0, profile=False))

    def test_the_context_is_the_models_at_most(self) -> None:
        with pytest.raises(ConfigError, match=r"model\.max_context=262145: must be from 1 to 262144"):
            plan_strata(IQ2_XS, BIG, StrataRequest(context_cells=262_145))


class TestWarnings:
    """What a user must see."""

    def test_little_memory_at_a_requests_start(self) -> None:
        assert any("less than 1,024 MiB" in w for w in planned(IQ2_XS, BIG, StrataRequest(reserve_mib=1_000)).warnings)
        assert planned(IQ2_XS, BIG, StrataRequest(reserve_mib=1_500)).warnings == ()

    def test_checkpoints_that_find_no_room_in_ram(self) -> None:
        roomy = planned(IQ2_XS, BIG, StrataRequest())
        needed = roomy.ledger.peak(Memory.HOST)[1]
        tight = planned(IQ2_XS, replace(BIG, ram_bytes=needed - 5 * MIB), StrataRequest(reserve_mib=1_500))
        assert any("checkpoints find no room in RAM: 5 MiB more" in w for w in tight.warnings)
        enough = planned(IQ2_XS, replace(BIG, ram_bytes=needed), StrataRequest(reserve_mib=1_500))
        assert enough.warnings == ()

    def test_memory_taken_late_that_the_reserve_does_not_cover(self) -> None:
        plan = planned(IQ3_XXS, LAPTOP, replace(SMALL, reserve_mib=200))
        assert plan.free_after_start_bytes == 0
        assert any("0 MiB of device memory are free while decoding" in w for w in plan.warnings)
        assert any("must be paged by the driver" in w for w in plan.warnings)


def test_the_table_shows_every_owner_what_is_left_and_the_warnings() -> None:
    plan = planned(IQ3_XXS, LAPTOP, replace(SMALL, head_alias=True))
    rows = {(row.name, row.memory): row.phase_bytes for row in strata_plan_table(plan)}
    assert rows["left", "device"][0] == plan.free_after_start_bytes
    assert rows["left", "device"][2] == -plan.peak_overcommit_bytes
    assert {owner for owner, memory in rows if memory == "device"} >= {"head", "expert slots", "K/V", "prompt buffers"}
    text = strata_plan_text(plan)
    assert all(f"- warning: {warning}" in text for warning in plan.warnings)
    assert "prompt chunk of 2,048 tokens" in text
    failed = unfit(IQ2_XS, replace(BIG, vram_bytes=6 * GIB), StrataRequest())
    assert failed.message() in strata_plan_text(failed)

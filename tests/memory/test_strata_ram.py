"""Host memory: the arena, copies of experts and their fallbacks, the conversations' share, container limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strata_cases import BIG, GIB, pack, planned

from strata_jax.hardware import ram_within_limit
from strata_jax.memory.ledger import MIB, Memory, Owner, Phase
from strata_jax.memory.strata.kv_pools import checkpoint_bytes
from strata_jax.memory.strata.ram import RamPlan, copies_budget, plan_ram
from strata_jax.memory.strata.request import Card, ExpertTier, StrataRequest, Version
from strata_jax.memory.strata.result import Layout, PromptPath

IQ3_S = pack("iq3_s")
SLOTS = 7_056
RESIDENT = StrataRequest(tier=ExpertTier.RESIDENT)
REST = IQ3_S.slots_bytes(SLOTS, IQ3_S.num_ranks)


def lending(slots: int) -> PromptPath:
    lent = IQ3_S.slots_bytes(SLOTS - slots, SLOTS)
    layout = Layout.BORROWED if slots else Layout.OWN
    return PromptPath(8_192, layout, 384, lent, 0, slots, SLOTS - slots, lent, "")


def ram(available: int, request: StrataRequest = RESIDENT, lent_slots: int = 1_972, slots: int = SLOTS) -> RamPlan:
    card = Card("host", 32 * GIB, ram_bytes=64 * GIB, ram_available_bytes=available)
    return plan_ram(IQ3_S, card, request, slots, lending(lent_slots), 0)


def test_an_arena_holds_all_experts_or_is_short() -> None:
    request = replace(RESIDENT, tier=ExpertTier.ARENA)
    found = ram(60 * GIB, request)
    assert found.arena_bytes == -(-IQ3_S.total_expert_bytes // (2 * MIB)) * 2 * MIB
    assert (found.short_bytes, found.resident_bytes, found.copies_from_slot) == (0, 0, SLOTS)
    assert ram(found.arena_bytes, request).short_bytes == 0
    assert ram(found.arena_bytes - 1, request).short_bytes == 1


def test_copies_of_what_has_no_slot_come_first_then_lent_slots_from_the_last_down() -> None:
    spare = IQ3_S.slots_bytes(SLOTS - 173, SLOTS)
    found = ram(REST + spare + 4096 * MIB)
    assert found.tier is ExpertTier.RESIDENT
    assert (found.resident_experts, found.copies_from_slot) == (IQ3_S.num_ranks - SLOTS, SLOTS - 173)
    assert found.resident_bytes == REST + spare
    assert ram(REST + spare + 4096 * MIB - 1).copies_from_slot == SLOTS - 172
    assert ram(60 * GIB).copies_from_slot == SLOTS - 1_972, "only lent slots"
    assert ram(60 * GIB, lent_slots=0).copies_from_slot == SLOTS


def test_a_given_budget_is_clipped_and_copies_no_lent_slots() -> None:
    given_bytes = replace(RESIDENT, resident_budget_bytes=50 * GIB)
    assert copies_budget(given_bytes, 40 * GIB) == 40 * GIB - 4096 * MIB - 256 * MIB
    assert copies_budget(given_bytes, 80 * GIB) == 50 * GIB
    assert copies_budget(RESIDENT, 40 * GIB) == 36 * GIB
    assert copies_budget(RESIDENT, None) is None
    found = ram(64 * GIB, given_bytes)
    assert (found.resident_bytes, found.copies_from_slot) == (REST, SLOTS)


def test_too_little_ram_keeps_the_hottest_then_files_only() -> None:
    some = ram(20 * GIB)
    assert some.tier is ExpertTier.RESIDENT
    budget = 16 * GIB
    assert some.resident_bytes == IQ3_S.slots_bytes(SLOTS, SLOTS + some.resident_experts) <= budget
    assert IQ3_S.slots_bytes(SLOTS, SLOTS + some.resident_experts + 1) > budget
    assert some.copies_from_slot == SLOTS
    assert f"the {some.resident_experts:,} hottest" in some.notes[0]
    none = ram(4 * GIB)
    assert (none.tier, none.resident_bytes, none.short_bytes) == (ExpertTier.MMAP, 0, 0)
    unranked = ram(20 * GIB, replace(RESIDENT, profile=False))
    assert (unranked.tier, unranked.resident_experts) == (ExpertTier.MMAP, 0)
    assert ram(64 * GIB, replace(RESIDENT, tier=ExpertTier.MMAP)).resident_bytes == 0


class TestConversations:
    """RAM for parked conversations (planning notes 2.9, 6.1)."""

    policy = replace(RESIDENT, conversation_budget=True, conversation_mib=2_048, conversation_slots=2)

    def test_copies_leave_budget_floor_and_margin_when_the_policy_is_on(self) -> None:
        assert ram(60 * GIB, self.policy).headroom_bytes == (2_048 + 2_560 + 256) * MIB
        assert ram(60 * GIB, replace(self.policy, conversation_budget=False)).headroom_bytes == 4096 * MIB

    @pytest.mark.parametrize(
        "change", [{"checkpoints": 0}, {"conversation_slots": 0}, {"tier": ExpertTier.ARENA}, {"conversation_mib": 0}]
    )
    def test_without_a_conversation_cache_the_headroom_stays(self, change: dict[str, int]) -> None:
        assert ram(60 * GIB, replace(self.policy, **change)).headroom_bytes == 4096 * MIB  # type: ignore[arg-type]

    def test_the_ledger_shows_no_more_than_can_be_admitted(self) -> None:
        kept = 6 * checkpoint_bytes(IQ3_S) + 2_560 * MIB
        found = ram(
            REST + kept + 1_000 * MIB, replace(self.policy, resident_headroom_bytes=0, conversation_budget=False)
        )
        assert found.conversation_bytes <= 1_000 * MIB
        assert "conversation.budget_mib=2048: only" in found.notes[-1]
        assert ram(60 * GIB, self.policy).conversation_bytes == 2_048 * MIB


def test_a_container_limit_is_the_ram_and_is_said() -> None:
    ram_bytes, source = ram_within_limit(256 * GIB, 32 * GIB)
    card = replace(BIG, ram_bytes=ram_bytes, ram_source=source)
    request = replace(RESIDENT, resident_headroom_bytes=4_864 * MIB)
    plan = planned(IQ3_S, card, request)
    assert card.ram_bytes == 32 * GIB
    assert plan.ram_resident_bytes <= 27.25 * GIB
    assert any("cgroup limit" in note and "32.00 GiB" in note for note in plan.notes)
    roomy = planned(IQ3_S, replace(BIG, ram_bytes=256 * GIB), request)
    assert not any("cgroup" in note for note in roomy.notes)


def test_available_ram_counts_where_it_is_less_than_there_is() -> None:
    some = planned(IQ3_S, replace(BIG, ram_bytes=64 * GIB, ram_available_bytes=20 * GIB), RESIDENT)
    more = planned(IQ3_S, replace(BIG, ram_bytes=64 * GIB), RESIDENT)
    assert some.ram_resident_bytes < 16 * GIB < more.ram_resident_bytes
    assert planned(IQ3_S, replace(BIG, ram_bytes=0), RESIDENT).tier is ExpertTier.RESIDENT, "unknown RAM is not checked"


def test_streamed_kv_is_pinned_before_copies_get_their_budget() -> None:
    card = replace(BIG, ram_bytes=30 * GIB)
    resident = planned(IQ3_S, card, replace(RESIDENT, expert_cache=3_000))
    streamed = planned(IQ3_S, card, replace(resident.request, kv_resident_cells=32_768))
    lost = resident.ram_resident_bytes - streamed.ram_resident_bytes
    assert lost == pytest.approx(streamed.kv_pinned_ram_bytes, abs=2 * IQ3_S.max_blob_bytes)
    assert streamed.ledger.owner_bytes(Phase.START, Memory.HOST)[Owner.KV] == streamed.kv_pinned_ram_bytes


def test_published_copies_with_and_without_a_loan() -> None:
    """own-ab-*.plan: 33.78 GiB when borrowing (RAM is fitted on it; 173 lent slots have a copy), 33.45 with own."""
    card = replace(BIG, taken_bytes=3_250 * MIB, ram_bytes=48 * GIB, ram_available_bytes=39_546 * MIB, pinned_share=0.0)
    request = StrataRequest(
        version=Version.V0_1_35, reserve_mib=1_536, expert_cache=5_400, tier=ExpertTier.RESIDENT,
        resident_headroom_bytes=4_864 * MIB,
    )  # fmt: skip
    borrowed, own = (planned(IQ3_S, card, replace(request, own=o)) for o in ("off", "auto"))
    assert borrowed.ram_resident_bytes / GIB == pytest.approx(33.78, abs=0.01)
    assert own.ram_resident_bytes / GIB == pytest.approx(33.45, abs=0.01)
    assert borrowed.slots - borrowed.ram_copies_from_slot == pytest.approx(173, abs=9)
    assert own.ram_copies_from_slot == own.slots


@settings(max_examples=60, deadline=None)
@given(available=st.integers(0, 64 * GIB), more=st.integers(0, 8 * GIB), slots=st.integers(2_000, 20_000))
def test_more_ram_never_means_fewer_copies(available: int, more: int, slots: int) -> None:
    less, roomy = (ram(num, slots=slots, lent_slots=0) for num in (available, available + more))
    assert roomy.resident_bytes >= less.resident_bytes
    assert less.resident_bytes <= max(0, available - 4096 * MIB)

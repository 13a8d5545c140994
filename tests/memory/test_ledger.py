"""Sums, limits and JSON of a ledger."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_jax.memory.ledger import (
    MIB,
    PHASES,
    Entry,
    Ledger,
    Limit,
    Memory,
    Origin,
    Owner,
    Phase,
    always,
    during,
    worst_shortfall,
)

BYTES = st.integers(0, 2**40)
ENTRIES = st.lists(
    st.builds(
        Entry,
        st.sampled_from(Owner),
        st.text(max_size=8),
        st.tuples(BYTES, BYTES, BYTES, BYTES),
        st.sampled_from(Memory),
        st.sampled_from(Origin),
        st.text(max_size=20),
    ),
    max_size=12,
    unique_by=lambda e: (e.owner, e.memory, e.item),
).map(lambda entries: Ledger(tuple(entries)))


@given(ledger=ENTRIES)
def test_owners_sum_to_the_total_in_every_phase_and_memory(ledger: Ledger) -> None:
    ledger.check()
    for phase in PHASES:
        parts = [ledger.total_bytes(phase, memory) for memory in Memory]
        assert sum(parts) == ledger.total_bytes(phase) == sum(ledger.owner_bytes(phase).values())
        for memory, part in zip(Memory, parts, strict=True):
            assert sum(ledger.owner_bytes(phase, memory).values()) == part


@given(ledger=ENTRIES)
def test_json_gives_the_same_ledger(ledger: Ledger) -> None:
    assert Ledger.from_json(json.loads(json.dumps(ledger.to_json()))) == ledger


@given(ledger=ENTRIES, budget=BYTES)
def test_shortfall_is_what_the_worst_phase_exceeds(ledger: Ledger, budget: int) -> None:
    found = worst_shortfall(ledger.entries, [Limit("device memory", (Memory.DEVICE,), budget)])
    peak = max(ledger.total_bytes(phase, Memory.DEVICE) for phase in PHASES)
    assert (found.short_bytes if found else 0) == max(0, peak - budget)
    assert ledger.peak(Memory.DEVICE)[1] == peak


def test_P10_shortfall_adds_what_the_weights_already_exceed() -> None:
    dense, least = 20 * 2**30, 3_046_637_568
    budget = dense - 1_868_787_708
    entries = [always(Owner.DENSE, "trunk", dense, ""), always(Owner.EXPERT_SLOTS, "slots and cells", least, "")]
    found = worst_shortfall(entries, [Limit("device memory", (Memory.DEVICE,), budget)])
    assert found is not None
    assert found.short_bytes == 4_915_425_276
    assert f"{found.short_bytes / MIB:.1f}" == "4687.7"


def test_P17_the_reserve_counts_against_the_free_memory() -> None:
    entries = [
        always(Owner.EXPERT_SLOTS, "slots", 24_840 * MIB, ""),
        always(Owner.RESERVE, "reserve", 1_024 * MIB, "", origin=Origin.GIVEN),
    ]
    found = worst_shortfall(entries, [Limit("device memory", (Memory.DEVICE,), 22_341 * MIB)])
    assert found is not None
    assert found.short_bytes == 3_523 * MIB


def test_bytes_of_one_phase_do_not_add_to_those_of_another() -> None:
    ledger = Ledger(
        (
            during(Phase.PREFILL, Owner.PROMPT_BUFFERS, "a", 30, ""),
            during(Phase.DECODE, Owner.DECODE_BUFFERS, "a", 20, ""),
            always(Owner.DENSE, "a", 5, ""),
        )
    )
    assert [ledger.total_bytes(phase) for phase in PHASES] == [5, 35, 25, 5]
    assert ledger.peak() == (Phase.PREFILL, 35)
    assert ledger.largest_owners(Phase.DECODE) == ((Owner.DECODE_BUFFERS, 20), (Owner.DENSE, 5))


def test_host_bytes_do_not_count_on_the_device_unless_they_are_one_memory() -> None:
    entries = [always(Owner.BANK, "experts", 100, "", memory=Memory.HOST), always(Owner.DENSE, "trunk", 10, "")]
    assert worst_shortfall(entries, [Limit("device memory", (Memory.DEVICE,), 10)]) is None
    both = worst_shortfall(entries, [Limit("host memory", (Memory.HOST, Memory.DEVICE), 105)])
    assert both is not None
    assert both.short_bytes == 5


@pytest.mark.parametrize(
    ("entries", "word"),
    [
        ([always(Owner.KV, "trunk", -1, "")], "negative"),
        ([always(Owner.KV, "trunk", 1, ""), always(Owner.KV, "trunk", 2, "")], "two entries"),
    ],
)
def test_check_names_the_entry_that_is_wrong(entries: list[Entry], word: str) -> None:
    with pytest.raises(ValueError, match=f"K/V / trunk.*{word}"):
        Ledger(tuple(entries)).check()

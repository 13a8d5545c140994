"""Which experts are copied ahead of a chunk, and how large their buffers are; what the plan says of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from strata_jax.errors import ConfigError
from strata_jax.memory.frame import make_frame
from strata_jax.memory.ledger import MIB, Memory, Owner, Phase
from strata_jax.memory.plan import MemoryPlan, plan
from strata_jax.memory.request import MovingMemory, Origin, PlanRequest
from strata_jax.memory.sizes import model_sizes
from strata_jax.memory.staging import (
    AUTO_SHARE,
    AUTO_TOKEN_BYTES,
    IN_PLACE_BYTES,
    LINE_BYTES,
    MIN_GROUP,
    MIN_ODDS,
    StageNeed,
    choose_ahead,
    choose_stage_bytes,
    groups_of,
    odds_of_use,
    reads_in_place,
)
from strata_jax.presets import preset_geometry

GIB = 2**30
MODEL = preset_geometry("synthetic_full", "iq2_xs")
BLOB = max(model_sizes(MODEL).blobs)
CARD = PlanRequest(context_cells=8192, chunk_tokens=2048, expert_kernels=True, device_budget_bytes=24 * GIB)


def test_the_likeliest_missing_experts_are_copied_ahead_in_groups() -> None:
    missing = np.array([True, True, False, True, True, True])
    odds = np.array([0.9, 0.95, 1.0, MIN_ODDS, 0.8, MIN_ODDS - 0.01])
    assert choose_ahead(missing, odds, 6).tolist() == [0, 1, 3, 4]
    assert choose_ahead(missing, odds, 2).tolist() == [0, 1]
    assert choose_ahead(missing, odds, 3).tolist() == [0, 1, 4]
    assert choose_ahead(~missing, odds, 6).tolist() == [2]
    assert [group.tolist() for group in groups_of(np.array([0, 1, 3, 4, 8]), 2)] == [[0, 1], [3, 4], [8]]
    assert [len(group) for group in groups_of(np.arange(13), 6)] == [5, 4, 4]
    assert [len(group) for group in groups_of(np.arange(12), 6)] == [6, 6]
    assert groups_of(np.arange(0), 6) == []


def test_a_block_that_is_expected_to_miss_little_reads_it_in_place() -> None:
    missing, odds = np.array([True, True, False]), np.array([0.5, 0.25, 1.0])
    most = int(IN_PLACE_BYTES / 0.75)
    assert reads_in_place(missing, odds, most)
    assert not reads_in_place(missing, odds, most + 2)
    assert not reads_in_place(~missing, odds, IN_PLACE_BYTES + 1)
    assert reads_in_place(np.zeros(3, bool), odds, 2**40)


def test_odds_follow_what_was_used_and_grow_with_the_chunk() -> None:
    nobody = odds_of_use(np.zeros(64), 0, 32, 8)
    assert nobody == pytest.approx(np.full(64, 1 - (1 - 8 / 64) ** 32))  # even odds before anything is known
    uses = np.zeros(64)
    uses[:2] = 1000, 20
    found = odds_of_use(uses, 1000, 512, 8)
    assert found[0] == pytest.approx(1)
    assert MIN_ODDS < found[1] <= 1
    assert found[2] < MIN_ODDS
    assert odds_of_use(uses, 1000, 8192, 8)[2] > found[2]


def test_auto_takes_a_part_of_what_is_left_and_at_most_what_two_blocks_miss() -> None:
    need = StageNeed(expert_bytes=1000, layer_bytes=100_000, num_blocks=40, mean_rows=0.02)
    assert choose_stage_bytes(None, need, 3_200_000) == 2 * (30_000 // LINE_BYTES) * LINE_BYTES  # 7/8 hold 70,000 each
    assert choose_stage_bytes(None, need, 3_200_000, slot_bytes=400_000) == 2 * (90_000 // LINE_BYTES) * LINE_BYTES
    assert choose_stage_bytes(None, need, 10_000_000) == 0  # nothing is missing
    assert choose_stage_bytes(None, need, 800_000) == 2 * (50_000 // LINE_BYTES) * LINE_BYTES
    # long chunks: what comes over the link before a block is routed, up to a third
    assert choose_stage_bytes(None, need, 800_000, 2) == 2 * (AUTO_TOKEN_BYTES // LINE_BYTES) * LINE_BYTES
    assert choose_stage_bytes(None, need, 480_000, 200) == 2 * (80_000 // LINE_BYTES) * LINE_BYTES
    # what given slots leave, unless they make room
    assert choose_stage_bytes(None, need, 800_000, slot_bytes=760_000) == 2 * (20_000 // LINE_BYTES) * LINE_BYTES
    assert choose_stage_bytes(None, need, 800_000, slot_bytes=900_000) == 0
    lent = choose_stage_bytes(None, need, 800_000, slot_bytes=900_000, lends=True)
    assert lent == 2 * (50_000 // LINE_BYTES) * LINE_BYTES
    least = MIN_GROUP * 2 * 2 * LINE_BYTES  # eight experts of two lines in each buffer
    assert choose_stage_bytes(None, need, 8 * least - 1) == 0
    assert choose_stage_bytes(None, need, 8 * least) == least
    assert choose_stage_bytes(None, need, None) == choose_stage_bytes(0, need, 10**9) == 0
    assert choose_stage_bytes(None, replace(need, expert_bytes=0), 10**9) == 0
    assert [need.stages(tokens) for tokens in (199, 200)] == [False, True]


def test_the_plan_owns_the_buffers_while_a_prompt_is_read() -> None:
    made = plan(MODEL, CARD)
    [entry] = [e for e in made.ledger.entries if e.item == "staged experts"]
    assert entry.owner is Owner.PROMPT_BUFFERS
    assert entry.memory is Memory.DEVICE
    assert entry.phase_bytes == (0, made.stage_bytes, 0, 0)
    missing = 49 * 512 - made.expert_slots
    assert made.stage_bytes == pytest.approx(2 * missing / 49 * BLOB, rel=0.15)
    few = plan(MODEL, replace(CARD, expert_slots=490)).stage_bytes
    assert few == pytest.approx(2 * 502 * BLOB, rel=0.01)
    assert any("missing experts are copied ahead" in note for note in made.notes)
    assert MemoryPlan.from_json(made.to_json()) == made
    assert plan(MODEL, made.as_request()) == made
    # slots pay for it
    without = plan(MODEL, replace(CARD, stage_bytes=0))
    assert (without.stage_bytes, without.staged_buckets, made.staged_buckets) == (0, (), (2048,))
    fewer = (without.slot_pages - made.slot_pages) * made.page_bytes
    assert abs(fewer - made.stage_bytes) <= 2 * max(made.pages_per_expert) * made.page_bytes
    for phase in (Phase.START, Phase.DECODE):
        totals = [sum(p.ledger.owner_bytes(phase, Memory.DEVICE).values()) for p in (made, without)]
        assert totals[1] - totals[0] == pytest.approx(fewer, abs=64 * 1024)


def test_given_slots_keep_their_bytes_and_long_chunks_get_larger_buffers() -> None:
    card = replace(CARD, device_budget_bytes=8 * GIB)
    long = plan(MODEL, replace(card, chunk_tokens=8192))
    assert long.stage_bytes == 8192 * AUTO_TOKEN_BYTES > long.expert_slots * BLOB / AUTO_SHARE
    most = plan(MODEL, replace(card, stage_bytes=0)).expert_slots
    for slots in (most, most - 100):
        made = plan(MODEL, replace(card, expert_slots=slots))
        assert made.expert_slots == slots
        assert made.stage_bytes <= (most - slots + 1) * BLOB
    assert made.stage_bytes > 80 * BLOB


def test_short_chunks_and_other_memories_stage_nothing() -> None:
    assert plan(MODEL, replace(CARD, chunk_tokens=64)).stage_bytes == 0
    assert plan(MODEL, replace(CARD, expert_kernels=False)).stage_bytes == 0
    assert plan(MODEL, replace(CARD, device_budget_bytes=None, shared_memory=True, expert_slots=0)).stage_bytes == 0
    given = plan(MODEL, replace(CARD, stage_bytes=64 * MIB))
    assert given.stage_bytes == 64 * MIB
    assert [c.origin for c in given.choices if c.field == "stage_bytes"] == [Origin.GIVEN]
    frame = make_frame(model_sizes(MODEL), CARD)
    assert [
        sum(e.item == "staged experts" for e in frame.prompt_entries(8192, bucket, GIB)) for bucket in (64, 2048)
    ] == [0, 1]
    # what fits without staging fits with auto
    _, needed = plan(MODEL, replace(CARD, expert_slots=0, stage_bytes=0)).ledger.peak(Memory.DEVICE)
    for more, stages in ((0, False), (2, False), (4, True)):  # a third of them has to hold two groups
        budget = needed + more * 2 * MIN_GROUP * BLOB
        made = plan(MODEL, replace(CARD, device_budget_bytes=budget, expert_slots=0))
        assert (made.stage_bytes > 0) is stages


def test_prompts_that_borrow_pay_for_staging_with_slots_too() -> None:
    lending = replace(CARD, device_budget_bytes=8 * GIB, moving=MovingMemory(lend=True, own="off"))
    made, without = plan(MODEL, lending), plan(MODEL, replace(lending, stage_bytes=0))
    assert made.stage_bytes > 100 * MIB
    lent = made.lent_bytes(made.lent_segments) - without.lent_bytes(without.lent_segments)
    assert abs(lent - made.stage_bytes) < 2 * BLOB * 4
    assert made.expert_slots == without.expert_slots


@pytest.mark.parametrize(
    ("stage_bytes", "changes", "message"),
    [
        (MIB, {}, rf"prefill.stage_mib=1 and experts of {BLOB / MIB:.2f} MiB: each of 2 buffers .*=3 or more, or 0"),
        (64 * MIB, {"expert_kernels": False}, "prefill.stage_mib=64 and engine.kernels: only kernels read staged"),
        (-1, {}, "prefill.stage_mib=.*: must be at least 0"),
    ],
)
def test_what_cannot_be_staged_is_named(stage_bytes: int, changes: dict[str, bool], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(MODEL, replace(CARD, stage_bytes=stage_bytes, **changes))

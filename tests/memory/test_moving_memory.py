"""Plans in which memory changes hands: loans cover prompts, slots cover the K/V, and a policy makes more fit."""

from __future__ import annotations

import json
from dataclasses import replace

import planner_models
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from strata_jax.engine.row_copies import block_rows
from strata_jax.errors import ConfigError, DoesNotFit
from strata_jax.memory.frame import make_frame
from strata_jax.memory.ledger import MIB, PHASES, Memory, Owner, Phase
from strata_jax.memory.plan import MemoryPlan, plan, try_plan
from strata_jax.memory.request import MovingMemory, PlanRequest
from strata_jax.memory.segments import MAX_SEGMENTS
from strata_jax.memory.sizes import model_sizes

SMALL = planner_models.small("F32")
MOVING = st.builds(
    MovingMemory,
    lend=st.booleans(),
    own=st.sampled_from(("auto", "off")),
    head_alias=st.booleans(),
    grow_init_cells=st.none() | st.integers(1, 2048),
    floor_slots=st.integers(0, 30),
    elastic_bytes=st.sampled_from((0, 0, 1, 200_000, MIB)),
    conversation_bytes=st.sampled_from((0, MIB)),
    checkpoints=st.integers(0, 4),
)
REQUESTS = st.builds(
    PlanRequest,
    context_cells=st.integers(16, 3000),
    chunk_tokens=st.none() | st.integers(8, 512),
    expert_slots=st.none() | st.integers(0, 64),
    page_bytes=st.sampled_from((2048, 5120, 16384)),
    kv_type=st.sampled_from(("f32", "int8")),
    spec_window=st.sampled_from((1, 4)),
    device_budget_bytes=st.none() | st.integers(5 * MIB, 20 * MIB),
    moving=MOVING,
)


def fitting(request: PlanRequest) -> MemoryPlan:
    found = try_plan(SMALL, request)
    assume(isinstance(found, MemoryPlan))
    assert isinstance(found, MemoryPlan)
    return found


@settings(max_examples=150, deadline=None)
@given(request=REQUESTS)
def test_what_moves_stays_within_the_budget_and_is_planned_the_same_again(request: PlanRequest) -> None:
    made = fitting(request)
    assert plan(SMALL, made.as_request()) == made
    assert MemoryPlan.from_json(json.loads(json.dumps(made.to_json()))) == made
    if request.device_budget_bytes is not None:
        assert max(made.ledger.total_bytes(phase, Memory.DEVICE) for phase in PHASES) <= request.device_budget_bytes
    start = made.ledger.owner_bytes(Phase.START, Memory.DEVICE)
    assert made.arena_bytes == start[Owner.EXPERT_SLOTS] + start[Owner.KV]
    assert len(made.segment_slots) <= MAX_SEGMENTS


@settings(max_examples=150, deadline=None)
@given(request=REQUESTS)
def test_the_loan_of_every_bucket_covers_its_buffers(request: PlanRequest) -> None:
    made = fitting(request)
    frame = make_frame(model_sizes(SMALL), made.request)
    budget, head = request.device_budget_bytes, made.ledger.owner_bytes(Phase.PREFILL, Memory.DEVICE)[Owner.HEAD]
    assert (head == 0) == request.moving.head_alias
    if not made.segment_slots or budget is None:
        return
    others = sum(
        num for owner, num in made.ledger.owner_bytes(Phase.START, Memory.DEVICE).items() if owner is not Owner.HEAD
    )
    for bucket, lent in zip(made.prefill_buckets, made.bucket_segments, strict=True):
        need = sum(e.peak_bytes for e in frame.prompt_entries(made.context_requested_cells, bucket))
        assert others + head - made.lent_bytes(lent) + need <= budget
        assert (bucket, lent) in made.loans()
    if not request.moving.elastic_bytes:
        assert made.bucket_segments[-1] == len(made.segment_slots)


@settings(max_examples=150, deadline=None)
@given(request=REQUESTS)
def test_slots_above_the_floor_can_pay_for_the_whole_window(request: PlanRequest) -> None:
    made = fitting(request)
    init = request.moving.grow_init_cells
    assert made.mapped_cells == made.context_cells or init is not None
    layout = made.arena
    core = made.expert_slots - sum(made.segment_slots)
    pages = sorted(layout.slot_num_pages[:core])[: max(0, core - request.moving.floor_slots)]
    missing = (layout.num_groups - layout.start_groups) * made.num_kv_layers
    assert sum(pages) >= missing
    if init is not None:
        assert made.mapped_cells >= min(init, made.context_requested_cells)


@settings(max_examples=150, deadline=None)
@given(request=REQUESTS)
def test_segments_that_can_be_given_back_leave_the_loan_and_the_core(request: PlanRequest) -> None:
    made = fitting(request)
    moving = request.moving
    sizes = [pages * made.page_bytes for pages in made.arena.array_pages]
    loan = made.lent_bytes(made.lent_segments)
    assert loan == sum(sizes[len(sizes) - made.lent_segments :] if made.lent_segments else [])
    if not moving.elastic_bytes:
        assert made.lent_segments == len(made.segment_slots)
        return
    assert made.expert_slots - sum(made.segment_slots) >= min(made.expert_slots, moving.floor_slots)
    givable = next((n for n in range(len(sizes) - 1, 0, -1) if sum(sizes[1 : len(sizes) - n]) >= loan), 0)
    noted = [note for note in made.notes if "can be given back" in note]
    assert noted[0].startswith("no part") == (givable == 0)
    for away_segments in range(givable + 1):
        for bucket, away in made.loans(away_segments):
            need = made.lent_bytes(dict(zip(made.prefill_buckets, made.bucket_segments or (0,) * 9))[bucket])
            lent = sum(sizes[len(sizes) - away : len(sizes) - away_segments])
            assert away <= len(sizes) - 1
            assert lent >= need


def test_without_a_loan_every_segment_has_the_size_that_was_asked_for() -> None:
    made = plan(SMALL, replace(FIXED, moving=MovingMemory(elastic_bytes=500_000)))
    sizes = [pages * made.page_bytes for pages in made.arena.array_pages[1:]]
    longest = max(made.pages_per_expert) * made.page_bytes
    assert len(sizes) > 2
    assert all(abs(size - 500_000) < longest for size in sizes)
    assert made.loans(1) == {(bucket, 1) for bucket in made.prefill_buckets}


def test_segments_grow_until_they_hold_the_loan_twice() -> None:
    moving = MovingMemory(lend=True, own="off", elastic_bytes=1)
    made = plan(SMALL, replace(FIXED, chunk_tokens=16, moving=moving))
    loan = made.lent_bytes(made.lent_segments)
    assert loan > 0
    assert made.lent_bytes(len(made.segment_slots)) >= 2 * loan


def test_blocks_of_pages_are_counted_while_a_conversation_is_parked() -> None:
    quiet = plan(SMALL, FIXED)
    parking = plan(SMALL, replace(FIXED, moving=MovingMemory(conversation_bytes=MIB)))
    more = parking.ledger.total_bytes(Phase.PARK, Memory.DEVICE) - quiet.ledger.total_bytes(Phase.PARK, Memory.DEVICE)
    large, _ = block_rows(parking.num_pages, parking.page_bytes)
    assert more == 2 * large * parking.page_bytes > 0
    least = max(parking.ledger.total_bytes(phase, Memory.DEVICE) for phase in PHASES)
    assert isinstance(try_plan(SMALL, replace(parking.request, device_budget_bytes=least)), MemoryPlan)


FIXED = PlanRequest(context_cells=2048, chunk_tokens=64, kv_type="f32", page_bytes=5120, expert_slots=60, spec_window=4)


@pytest.mark.parametrize(
    "moving",
    [
        MovingMemory(lend=True, own="off"),
        MovingMemory(lend=True, own="auto"),
        MovingMemory(head_alias=True),
        MovingMemory(grow_init_cells=128, floor_slots=8),
    ],
    ids=("borrow", "own auto", "head alias", "grow"),
)
def test_a_budget_that_fits_only_with_the_policy_fails_without_it(moving: MovingMemory) -> None:
    on, off = replace(FIXED, moving=moving), FIXED
    sizes = model_sizes(SMALL)

    def needs(request: PlanRequest) -> int:
        entries = make_frame(sizes, request).entries(2048, 64, 60)
        return max(sum(e.phase_bytes[i] for e in entries if e.memory is Memory.DEVICE) for i in range(len(PHASES)))

    low, high = 0, needs(off)
    while high - low > 1:  # the least budget with the policy
        middle = (low + high) // 2
        fits = isinstance(try_plan(SMALL, replace(on, device_budget_bytes=middle)), MemoryPlan)
        low, high = (low, middle) if fits else (middle, high)
    assert high < needs(off)
    made = plan(SMALL, replace(on, device_budget_bytes=high))
    assert max(made.ledger.total_bytes(phase, Memory.DEVICE) for phase in PHASES) <= high
    with pytest.raises(DoesNotFit):
        plan(SMALL, replace(off, device_budget_bytes=high))


def test_spare_memory_pays_before_slots_do() -> None:
    roomy = replace(FIXED, chunk_tokens=32, device_budget_bytes=64 * MIB)
    own = plan(SMALL, replace(roomy, moving=MovingMemory(lend=True, own="auto")))
    lent = plan(SMALL, replace(roomy, moving=MovingMemory(lend=True, own="off")))
    assert (own.prompt_layout, own.lent_slots, own.to_json()["prefill"]["layout"]) == ("own", 0, "own")
    assert (lent.prompt_layout, lent.to_json()["expert_cache"]["lent_slots"]) == ("borrowed", lent.lent_slots)
    assert lent.lent_slots > 0
    hybrid = plan(SMALL, replace(roomy, moving=MovingMemory(lend=True, own="off", head_alias=True)))
    assert 0 < hybrid.lent_slots < lent.lent_slots
    assert hybrid.to_json()["head"]["aliased"] is True
    assert hybrid.to_json()["prefill"]["layout"] == "hybrid"


def test_a_tied_head_cannot_be_lent() -> None:
    tied = planner_models.with_tensors(planner_models.SMALL, tied=True)
    with pytest.raises(ConfigError, match=r"policy\.head_alias\.enabled.*embedding"):
        plan(tied, replace(FIXED, moving=MovingMemory(head_alias=True)))

"""Properties of plans: they keep budgets and bytes, they are monotone, repeatable and survive JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import planner_models
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from strata_jax.errors import ConfigError
from strata_jax.geometry import Geometry
from strata_jax.kv_types import KV_TYPES
from strata_jax.memory.candidate import Frame
from strata_jax.memory.frame import make_frame
from strata_jax.memory.ledger import MIB, PHASES, Entry, Memory, Origin, Owner, Phase, phase_totals
from strata_jax.memory.plan import MemoryPlan, plan, try_plan
from strata_jax.memory.plan_choices import auto_chunks
from strata_jax.memory.request import Choice, PlanRequest
from strata_jax.memory.sizes import model_sizes
from strata_jax.memory.unfit import Unfit

REAL, SMALL = planner_models.real(), planner_models.small()
GIB = 2**30
QUICK = settings(max_examples=60, deadline=None)
ROOMY = PlanRequest(device_budget_bytes=32 * GIB, reserve_bytes=700 * MIB, host_budget_bytes=100 * GIB)

REQUESTS = st.builds(
    PlanRequest,
    context_cells=st.none() | st.integers(1, 4096),
    chunk_tokens=st.none() | st.integers(1, 700),
    chunk_auto_max=st.sampled_from((5, 64, 512, 2048)),
    expert_slots=st.none() | st.integers(0, 64),
    page_bytes=st.none() | st.sampled_from((2048, 3000, 16384, 65536)),
    kv_type=st.sampled_from(KV_TYPES),
    spec_window=st.integers(1, 8),
    all_logits=st.booleans(),
    device_budget_bytes=st.none() | st.integers(12 * MIB, 64 * MIB),
    reserve_bytes=st.integers(0, 2 * MIB),
    host_budget_bytes=st.none() | st.integers(12 * MIB, 64 * MIB),
    shared_memory=st.booleans(),
)


def fitting(request: PlanRequest, geometry: Geometry = SMALL) -> MemoryPlan:
    found = try_plan(geometry, request)
    assume(isinstance(found, MemoryPlan))
    assert isinstance(found, MemoryPlan)
    return found


@QUICK
@given(request=REQUESTS)
def test_a_plan_never_exceeds_a_budget_in_any_phase(request: PlanRequest) -> None:
    made = fitting(request)
    for phase in PHASES:
        device = made.ledger.total_bytes(phase, Memory.DEVICE)
        host = made.ledger.total_bytes(phase, Memory.HOST)
        if request.device_budget_bytes is not None:
            assert device <= request.device_budget_bytes
        if request.host_budget_bytes is not None:
            assert host + (device if request.is_shared else 0) <= request.host_budget_bytes
        assert all(free >= 0 for free in made.free_bytes(phase).values())


@QUICK
@given(request=REQUESTS)
def test_the_arena_is_what_its_owners_take(request: PlanRequest) -> None:
    made = fitting(request)
    owners = made.ledger.owner_bytes(Phase.START)
    assert made.arena_bytes == owners[Owner.EXPERT_SLOTS] + owners[Owner.KV]
    assert made.kv_first_page == made.slot_pages == sum(made.pages_per_expert[b] for b, _ in made.resident_pairs())
    assert made.kv_pages_per_layer * made.cells_per_page >= made.context_cells >= made.context_requested_cells
    assert made.num_pages >= max(made.pages_per_expert)  # an expert's program reads that many pages at a time
    pairs = list(made.resident_pairs())
    assert len(set(pairs)) == made.expert_slots
    assert all(block < made.num_blocks and expert < made.num_experts for block, expert in pairs)


@QUICK
@given(request=REQUESTS)
def test_given_settings_are_kept(request: PlanRequest) -> None:
    made = fitting(request)
    given_values = {
        "context_cells": made.context_requested_cells,
        "chunk_tokens": made.chunk_tokens,
        "expert_slots": made.expert_slots,
        "page_bytes": made.page_bytes,
    }
    for choice in made.choices:
        asked = getattr(request, choice.field)
        assert choice.value == given_values[choice.field]
        assert asked is None or asked == choice.value
        assert (choice.origin is Origin.GIVEN) == (asked is not None)
        assert choice.reason or asked is not None


@QUICK
@given(request=REQUESTS)
def test_planning_a_plan_again_gives_the_same_plan(request: PlanRequest) -> None:
    made = fitting(request)
    again = plan(SMALL, made.as_request())
    assert again == made
    assert json.dumps(again.to_json()) == json.dumps(made.to_json())
    assert again.as_request().given() == request.given()


@QUICK
@given(request=REQUESTS)
def test_json_gives_the_same_plan(request: PlanRequest) -> None:
    made = fitting(request)
    assert MemoryPlan.from_json(json.loads(json.dumps(made.to_json()))) == made


@QUICK
@given(request=REQUESTS, budget=st.integers(12 * MIB, 64 * MIB), more=st.integers(0, 16 * MIB))
def test_more_memory_never_gives_fewer_slots_beside_the_same_context_and_chunk(
    request: PlanRequest, budget: int, more: int
) -> None:
    request = replace(request, expert_slots=None, context_cells=500, chunk_tokens=64, host_budget_bytes=None)
    made = fitting(replace(request, device_budget_bytes=budget))
    richer = plan(SMALL, replace(request, device_budget_bytes=budget + more))
    assert richer.expert_slots >= made.expert_slots


@QUICK
@given(
    point=st.tuples(st.integers(1, 4000), st.integers(1, 600), st.integers(0, 70)),
    step=st.tuples(st.integers(0, 90), st.integers(0, 90), st.integers(0, 10)),
    request=REQUESTS,
)
def test_more_context_chunk_or_slots_never_take_fewer_bytes(
    point: tuple[int, int, int], step: tuple[int, int, int], request: PlanRequest
) -> None:
    frame = make_frame(model_sizes(SMALL), request)
    context, chunk, slots = (a + b for a, b in zip(point, step, strict=True))
    larger = (context, chunk, min(slots, frame.max_slots))
    before = sum_phases(frame.entries(*point[:2], min(point[2], frame.max_slots)))
    after = sum_phases(frame.entries(*larger))
    assert all(a <= b for a, b in zip(before, after, strict=True))


def sum_phases(entries: tuple) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*(e.phase_bytes for e in entries), strict=True))


@QUICK
@given(request=REQUESTS, context=st.integers(1, 4000), chunk=st.integers(1, 600), slots=st.integers(0, 80))
def test_what_searches_ask_for_is_what_the_entries_add_up_to(
    request: PlanRequest, context: int, chunk: int, slots: int
) -> None:
    frame = make_frame(model_sizes(SMALL), request)
    slots = min(slots, frame.max_slots)
    entries = frame.entries(context, chunk, slots)
    assert frame.phase_bytes(context, chunk, slots) == {memory: phase_totals(entries, (memory,)) for memory in Memory}


@QUICK
@given(request=REQUESTS, context=st.integers(1, 4000), chunk=st.integers(1, 600))
def test_slots_that_fit_are_the_most_that_fit(request: PlanRequest, context: int, chunk: int) -> None:
    frame = make_frame(model_sizes(SMALL), request)
    slots = frame.slots_that_fit(context, chunk)
    if slots is None:
        assert frame.shortfall(context, chunk, 0) is not None
    else:
        assert frame.shortfall(context, chunk, slots) is None
        assert slots == frame.max_slots or frame.shortfall(context, chunk, slots + 1) is not None


def test_weights_are_charged_as_loaded() -> None:
    made = plan(REAL, ROOMY)
    owners = made.ledger.owner_bytes(Phase.START)
    by_component = REAL.component_bytes()
    assert owners[Owner.EMBEDDING] == by_component["token_embd"]
    assert owners[Owner.HEAD] == by_component["output"]
    experts = by_component["routed experts"] + by_component["MTP experts"]
    assert owners[Owner.BANK] == experts  # every matrix of these types is whole words
    apart = ("routed experts", "MTP experts", "PLE table", "token_embd", "output", "MTP without experts")
    assert owners[Owner.DENSE] == sum(size for name, size in by_component.items() if name not in apart)
    # 36 GDN layers: 48 heads x 128 x 128 and 3 conv inputs of 10,240 channels, float32
    gdn = 36 * (48 * 128 * 128 + 3 * 10_240) * 4
    assert gdn == 117_669_888
    assert owners[Owner.RECURRENT_STATE] == gdn + 9 * 10_240 * 4 + 10_240 * 4


def test_int8_cells_of_13_layers_at_full_context() -> None:
    made = plan(REAL, replace(ROOMY, context_cells=262_144))
    assert made.cell_bytes == 1056
    assert made.num_kv_layers == 13
    assert made.cells_per_page == 60  # 62 fit, whole blocks of 4
    pages = -(-262_144 // 60)
    assert made.kv_pages == 13 * pages
    assert made.ledger.owner_bytes(Phase.START)[Owner.KV] == 13 * pages * 65_536
    keys = 13 * (262_144 // 4 + 1) * 128 * 4
    assert (
        made.ledger.owner_bytes(Phase.START)[Owner.INDEX_KEYS] == keys + 14 * 3 * 128 * 4
    )  # the draft block has two tails


def test_tied_head_costs_nothing() -> None:
    tied = planner_models.with_tensors(planner_models.SMALL, tied=True)
    made = plan(tied, ROOMY)
    assert made.ledger.owner_bytes(Phase.START)[Owner.HEAD] == 0


def test_a_half_precision_norm_is_charged_as_float32_and_a_dense_layers_indexer_not_at_all() -> None:
    base = planner_models.SMALL
    full = model_sizes(planner_models.with_tensors(base))
    dense = replace(base, compress_ratio=(0,) * 5)
    without = model_sizes(planner_models.with_tensors(dense))
    indexer = (base.index_heads * base.index_dim * base.embed_width + base.index_dim * base.embed_width) * 4
    indexer += 2 * base.index_dim * 4
    assert full.dense_bytes - without.dense_bytes == indexer
    half = planner_models.with_tensors(base, lambda name: "F16" if "conv1d" in name else "F32")
    assert model_sizes(half).dense_bytes == full.dense_bytes


def test_drafts_off_leaves_the_draft_block_out() -> None:
    on, off = plan(REAL, ROOMY), plan(REAL, replace(ROOMY, spec_window=1))
    assert (on.with_draft, on.num_blocks, on.num_kv_layers) == (True, 49, 13)
    assert (off.with_draft, off.num_blocks, off.num_kv_layers) == (False, 48, 12)
    assert Owner.DRAFTER not in off.ledger.owner_bytes(Phase.START)
    mtp = REAL.component_bytes()["MTP experts"]
    banks = [p.ledger.owner_bytes(Phase.START)[Owner.BANK] for p in (on, off)]
    assert banks[0] - banks[1] == mtp


def test_a_window_without_a_draft_block_is_said_to_decode_token_by_token() -> None:
    bare = replace(planner_models.SMALL, num_mtp_layers=0, recurrent=(True, True, True, False))
    bare = replace(bare, compress_ratio=(0, 0, 0, 4), expert_width=(64,) * 4)
    made = plan(planner_models.with_tensors(bare), ROOMY)
    assert not made.with_draft
    assert any("no draft block" in note for note in made.notes)


def test_mixed_expert_sizes_share_one_page_size_with_little_waste() -> None:
    made = plan(REAL, ROOMY)
    assert len(set(made.pages_per_expert)) == 3
    waste = 1 - sum(model_sizes(REAL).blobs) / (sum(made.pages_per_expert) * made.page_bytes)
    assert waste < 0.03


def test_auto_takes_context_then_chunk_then_slots() -> None:
    made = plan(REAL, ROOMY)
    assert made.context_cells == 262_144
    assert made.chunk_tokens == 512
    assert 0 < made.expert_slots < 49 * 512
    one_more = try_plan(REAL, replace(made.as_request(), expert_slots=made.expert_slots + 1))
    assert not isinstance(one_more, MemoryPlan)


def test_all_experts_are_resident_where_they_fit() -> None:
    made = plan(REAL, replace(ROOMY, device_budget_bytes=141 * GIB))
    assert made.expert_slots == 49 * 512
    assert "all experts fit" in choice(made, "expert_slots").reason


def choice(made: MemoryPlan, field: str) -> Choice:
    return next(c for c in made.choices if c.field == field)


def test_a_small_card_gets_kv_in_half_of_what_the_weights_leave() -> None:
    made = plan(REAL, replace(ROOMY, device_budget_bytes=8 * GIB))
    left = 8 * GIB - sum(e.peak_bytes for e in fixed_entries(REAL, ROOMY, 8 * GIB) if e.memory is Memory.DEVICE)
    assert kv_and_keys(made) <= left // 2
    assert made.context_cells < 262_144
    assert "half of" in choice(made, "context_cells").reason
    larger = replace(made.as_request(), context_cells=made.context_cells + 4, expert_slots=0)
    assert kv_and_keys(plan(REAL, larger)) > left // 2


def kv_and_keys(made: MemoryPlan) -> int:
    entries = (e for e in made.ledger.entries if e.owner is Owner.KV or e.item.startswith("blocks of"))
    return sum(e.peak_bytes for e in entries)


def fixed_entries(geometry: Geometry, request: PlanRequest, budget: int) -> tuple:
    return make_frame(model_sizes(geometry), replace(request, device_budget_bytes=budget)).fixed


def test_auto_context_leaves_room_for_given_slots() -> None:
    made = plan(REAL, replace(ROOMY, device_budget_bytes=16 * GIB, expert_slots=3200))
    assert (made.expert_slots, made.chunk_tokens) == (3200, 8)
    assert 1000 < made.context_cells < 262_144
    assert "what fits beside cache.slots=3200" in choice(made, "context_cells").reason
    longer = replace(made.as_request(), context_cells=made.context_cells + 4)
    assert not isinstance(try_plan(REAL, longer), MemoryPlan)


@QUICK
@given(request=REQUESTS)
def test_a_budget_of_exactly_what_a_plan_takes_gives_the_same_slots(request: PlanRequest) -> None:
    request = replace(request, context_cells=500, chunk_tokens=64, expert_slots=None, host_budget_bytes=None)
    made = fitting(replace(request, device_budget_bytes=30 * MIB))
    exact = replace(request, device_budget_bytes=made.ledger.peak(Memory.DEVICE)[1])
    assert plan(SMALL, exact).expert_slots == made.expert_slots


def test_tables_are_charged_for_every_expert_slot_and_page() -> None:
    made = plan(SMALL, PlanRequest(context_cells=4096, expert_slots=30))
    words = 5 * 16 + 30 + 2 * made.kv_pages_per_layer
    assert made.ledger.owner_bytes(Phase.START)[Owner.TABLES] == 4 * words


def test_a_smaller_chunk_is_chosen_with_the_reason_why_the_next_larger_failed() -> None:
    base = replace(ROOMY, context_cells=65_536, expert_slots=490)
    frame = make_frame(model_sizes(REAL), base)
    need = {
        tokens: max(sum_phases(tuple(e for e in frame.entries(65_536, tokens, 490) if e.memory is Memory.DEVICE)))
        for tokens in (256, 512)
    }
    made = plan(REAL, replace(base, device_budget_bytes=need[512] - MIB))
    assert made.chunk_tokens == 256
    assert "512 tokens need 1.0 MiB more" in choice(made, "chunk_tokens").reason
    assert plan(REAL, replace(base, device_budget_bytes=need[512])).chunk_tokens == 512


def test_chunks_that_auto_tries() -> None:
    assert auto_chunks(512, 10**6) == (512, 256, 128, 64, 32, 16, 8)
    assert auto_chunks(512, 100) == (128, 64, 32, 16, 8)  # no prompt is longer than the context
    assert auto_chunks(2048, 10**6)[0] == 2048
    assert auto_chunks(5, 10**6) == (5,)


def test_on_a_cpu_slots_are_a_second_copy_and_stay_few() -> None:
    cpu = PlanRequest(host_budget_bytes=4 * GIB)
    made = plan(SMALL, cpu)
    assert made.expert_slots == 5 * SMALL.num_experts_used
    assert plan(SMALL, replace(cpu, expert_slots=80)).expert_slots == 80
    assert "reserve" not in {str(owner) for owner in made.ledger.owner_bytes(Phase.START)}


def test_the_workload_sets_an_auto_context() -> None:
    made = plan(REAL, replace(ROOMY, workload_cells=18_001))
    assert made.context_cells == 18_432  # a multiple of 1,024: another prompt of about this length reuses the programs
    assert choice(made, "context_cells").origin is Origin.COMPUTED
    assert plan(REAL, replace(ROOMY, workload_cells=REAL.context_length - 1)).context_cells == REAL.context_length


def test_a_workload_gets_exactly_what_it_needs_where_the_grid_does_not_fit() -> None:
    request = replace(ROOMY, workload_cells=18_001, chunk_tokens=8, expert_slots=0)
    gridded = plan(REAL, request)
    _, needed_bytes = gridded.ledger.peak(Memory.DEVICE)
    tight = plan(REAL, replace(request, device_budget_bytes=needed_bytes - 1))
    assert (tight.context_requested_cells, tight.context_cells) == (18_001, 18_004)
    assert any("rounded up to 18,004" in note for note in tight.notes)


def test_a_chunk_above_the_context_is_used_as_given_and_noted() -> None:
    made = plan(SMALL, PlanRequest(context_cells=64, chunk_tokens=300))
    assert (made.chunk_tokens, made.prefill_buckets) == (300, (8, 64, 320))
    assert any("prefill.chunk=300 is more than the context of 64" in note for note in made.notes)


def test_a_short_context_without_slots_still_gives_an_arena_as_long_as_an_expert() -> None:
    made = plan(SMALL, PlanRequest(context_cells=8, expert_slots=0, page_bytes=1024))
    assert made.num_pages == max(made.pages_per_expert)
    assert made.spare_pages > 0


def test_logits_of_every_position_are_charged() -> None:
    one, every = (plan(SMALL, PlanRequest(chunk_tokens=512, all_logits=flag)) for flag in (False, True))
    assert every.ledger.peak_owner_bytes()[Owner.PROMPT_BUFFERS] >= one.ledger.peak_owner_bytes()[Owner.PROMPT_BUFFERS]
    big = replace(planner_models.SMALL, vocab_size=200_000)
    every = plan(planner_models.with_tensors(big), PlanRequest(chunk_tokens=512, all_logits=True))
    assert every.ledger.peak_owner_bytes()[Owner.PROMPT_BUFFERS] > 2 * 512 * 200_000 * 4


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"expert_slots": 81}, ("cache.slots=81", "5 blocks x 16 experts = 80", "cache.slots=80")),
        ({"context_cells": 5000}, ("model.max_context=5000", "context_length=4096")),
        ({"workload_cells": 5000}, ("workload needs 5000", "context_length=4096", "904")),
        (
            {"workload_cells": 300, "context_cells": 200},
            ("model.max_context=200", "needs 300", "model.max_context=300"),
        ),
        ({"chunk_tokens": 0}, ("prefill.chunk=0", "at least 1")),
        ({"expert_slots": -1}, ("cache.slots=-1", "at least 0")),
        ({"spec_window": 9}, ("spec.window=9", "1", "8")),
        ({"kv_type": "int4"}, ("kv.type=int4", "q4_0")),
        ({"page_bytes": 512}, ("engine.page_kib=0.5", "1024")),
        ({"page_bytes": 1024, "kv_type": "f32"}, ("engine.page_kib=1 ", "kv.type=f32", "2,048", "engine.page_kib=2")),
    ],
)
def test_contradictions_name_both_sides_and_what_would_work(wrong: dict, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(SMALL, PlanRequest(**wrong))
    for word in words:
        assert word in str(caught.value)


def test_all_contradictions_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(SMALL, PlanRequest(expert_slots=81, context_cells=5000, spec_window=9))
    assert "3 settings cannot be used" in str(caught.value)


def test_K06_a_head_that_does_not_fill_blocks_is_refused_by_the_planner() -> None:
    odd = planner_models.with_tensors(replace(planner_models.SMALL, head_dim=80, num_kv_heads=32, num_heads=32))
    with pytest.raises(ConfigError, match="80") as caught:
        plan(odd, PlanRequest(kv_type="q4_0"))
    assert "32" in str(caught.value)


def test_a_draft_only_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft block only"):
        plan(replace(SMALL, has_trunk=False), PlanRequest())


def test_planning_imports_no_jax() -> None:
    code = "import sys, strata_jax.memory.table; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@settings(max_examples=10, deadline=None)
@given(slots=st.integers(0, 49 * 512))
def test_pairs_of_a_large_model_are_counted_not_walked(slots: int) -> None:
    made = plan(REAL, replace(ROOMY, expert_slots=slots, device_budget_bytes=200 * GIB))
    rounds, rest = divmod(slots, 49)
    assert rounds * sum(made.pages_per_expert) + sum(made.pages_per_expert[:rest]) == made.slot_pages


def test_many_plans_price_each_prompt_buffer_once() -> None:
    """Cost is bounded by counting: budgets vary over 100 plans, yet no (chunk, context) is priced twice."""
    from strata_jax.memory import buffers

    buffers.prompt_buffers.cache_clear()
    model_sizes.cache_clear()
    request = replace(ROOMY, context_cells=65_536)
    for idx in range(100):
        plan(REAL, replace(request, device_budget_bytes=(12_000 + 50 * idx) * MIB))
    info = buffers.prompt_buffers.cache_info()
    assert info.misses <= len(auto_chunks(512, 65_536))
    assert model_sizes.cache_info().misses == 1


def test_searches_make_no_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that does not fit asks for hundreds of candidates; it writes down the two that its message needs."""
    made, make = [], Frame.slot_entries

    def counting(frame: Frame, *candidate: Any) -> tuple[Entry, ...]:
        made.append(candidate)
        return make(frame, *candidate)

    monkeypatch.setattr(Frame, "slot_entries", counting)
    assert isinstance(try_plan(REAL, replace(ROOMY, expert_slots=25_000)), Unfit)
    assert len(made) <= 3

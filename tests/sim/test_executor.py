"""The simulator's stages: what each costs and moves, on published cards, against counts made by hand."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest

from strata_jax.errors import ConfigError
from strata_jax.memory.strata.plan import plan_strata
from strata_jax.memory.strata.request import MIB, ExpertTier, GrowSettings, StrataRequest
from strata_jax.memory.strata.result import StrataPlan
from strata_jax.memory.strata.sizes import PackSizes, pack_sizes
from strata_jax.policies.policy import Compat, PolicyParameters
from strata_jax.policies.stack import policy_stack
from strata_jax.presets import preset_geometry
from strata_jax.sim.decoding import average_round
from strata_jax.sim.executor import SimOptions, simulate
from strata_jax.sim.machine import Machine, experts_in_ram
from strata_jax.sim.profile import load_profile
from strata_jax.sim.requests import SimRequest, agent_loop, follow_up, forced, single, taking_turns
from strata_jax.sim.results import SimRun
from strata_jax.sim.trace import RoutingTrace
from tests.calls import num_calls

LAPTOP = StrataRequest(kv_type="q4_0", kv_resident_cells=32_768, reserve_mib=590, draft_vocab=40_525, checkpoints=3)
GROW = StrataRequest(reserve_mib=17_884, grow=GrowSettings(enabled=True))


class Lines:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []

    def event(self, kind: str, **values: Any) -> None:
        self.events.append({"kind": kind, **values})

    def metric(self, kind: str, **values: Any) -> None:
        self.metrics.append({"kind": kind, **values})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in (*self.events, *self.metrics) if line["kind"] == kind]


@lru_cache
def sizes_of(quant: str) -> PackSizes:
    return pack_sizes(preset_geometry("qwen38_flash", quant))


def run(
    request: StrataRequest,
    requests: list[SimRequest],
    *,
    card: str = "rtx_pro_2000_8gb",
    quant: str = "iq3_xxs",
    compat: Compat = Compat.UPSTREAM,
    parameters: PolicyParameters | None = None,
    sink: Lines | None = None,
    **options: Any,
) -> tuple[SimRun, StrataPlan]:
    sizes, profile = sizes_of(quant), load_profile(card)
    plan = plan_strata(sizes, profile.card(), request)
    stack = policy_stack(sizes, plan, compat=compat, parameters=parameters)
    return simulate(plan, sizes, profile, stack, requests, options=SimOptions(**options), sink=sink), plan


def grown(requests: list[SimRequest], sink: Lines | None = None, **settings: Any) -> tuple[SimRun, StrataPlan]:
    """Run on the 16 GB stand-in with elastic K/V."""
    return run(replace(GROW, **settings), requests, card="rtx5090_as_16gb", quant="iq2_xs", sink=sink)


def test_a_larger_chunk_saves_the_copies_of_the_passes_it_saves() -> None:
    copies = {}
    for chunk in (1024, 2048):
        lines = Lines()
        run(replace(LAPTOP, chunk_tokens=chunk, head_alias=True, short_read_tokens=0), [single(16_389, 1)], sink=lines)
        passes = [line for line in lines.of("chunk") if line["num_tokens"] == chunk]
        assert len(passes) == 16_384 // chunk
        copies[chunk] = sum(line["copy_ms"] for line in passes) / len(passes)
        assert sum(line["num_tokens"] for line in lines.of("chunk")) == 16_388
    # a pass streams everything that is missing, whatever its size: half the passes, half the copies
    assert copies[2048] == pytest.approx(copies[1024], rel=0.05)


def test_small_chunks_copy_only_what_their_tokens_ask_for() -> None:
    def copied(tokens: int) -> float:
        lines = Lines()
        run(replace(LAPTOP, short_read_tokens=0), [single(tokens, 1, tail_tokens=0)], sink=lines)
        (line,) = lines.of("chunk")
        return float(line["copy_ms"])

    few, some, many = copied(9), copied(65), copied(513)
    assert few < 0.5 * some
    assert some < 0.8 * many


def test_lent_slots_hold_no_experts_while_a_prompt_is_read_and_get_the_same_ones_back() -> None:
    lines = Lines()
    done, plan = run(LAPTOP, [single(8000, 64)], sink=lines)
    (result,) = done.requests
    kinds = [line["kind"] for line in lines.events if line["kind"] in ("lend", "return", "refill")]
    assert kinds == ["lend", "return", "refill"]
    lent = lines.of("lend")[0]["count"]
    assert lent >= plan.prompt.lent_slots - 1
    assert lines.of("refill")[0]["count"] == lent
    traffic_share = result.prompt_hits / result.prompt_lookups
    assert traffic_share < 0.7 * (result.hit_rate or 0)
    assert done.state.resident_ranks().tolist() == list(range(plan.slots))
    assert 0 < result.refill_ms < result.prompt_ms


def test_growth_inside_decoding_happens_at_the_first_token_that_needs_it() -> None:
    rows = 4
    prompt = 16_000
    last = 16_384 - rows - 64  # the last position whose window and margin fit
    fits = single(prompt, last - prompt + 2)  # tokens at prompt - 1 ... last
    lines = Lines()
    done, _ = grown([fits], lines)
    assert done.requests[0].growth_cells == 0
    one_more = replace(fits, output_tokens=fits.output_tokens + 1)
    lines = Lines()
    done, _ = grown([one_more], lines)
    assert done.requests[0].growth_cells == 8192
    assert done.requests[0].kv_mapped_cells == 24_576
    (grew,) = lines.of("map_cells")
    after = [line for line in lines.of("round") if line["time_s"] >= grew["time_s"]]
    assert [line["position"] for line in after] == [last + 1]
    assert done.requests[0].given_slots > 0
    assert done.requests[0].growth_ms > 0


def test_growth_takes_the_slots_that_the_cells_need_and_lowers_hits_by_their_share() -> None:
    done, plan = grown([single(44, 64, name="a"), single(31_700, 64, name="b")])
    small, large = done.requests
    assert (small.kv_mapped_cells, large.kv_mapped_cells) == (16_384, 32_768)
    chunks = 104  # 26 pools from 16,384 to 32,768 int8 cells in 2 MiB chunks
    per_slot = plan.cache_bytes / plan.slots
    assert large.given_slots == pytest.approx(chunks * 2 * MIB / per_slot, rel=0.05)
    assert (large.hit_rate or 0) < (small.hit_rate or 0)
    assert len(done.state.resident_ranks()) == plan.slots - large.given_slots


def test_decoding_from_event_to_event_is_decoding_round_by_round() -> None:
    request = single(20_000, 3001)
    done, plan = run(LAPTOP, [request])
    (result,) = done.requests
    sizes, profile = sizes_of("iq3_xxs"), load_profile("rtx_pro_2000_8gb")
    stack = policy_stack(sizes, plan, compat=Compat.UPSTREAM)
    machine = Machine.build(plan, sizes, profile, stack, SimOptions())
    mix = SimOptions().drafts.rounds(4, 0.5)
    held, position, stepped = machine.residency(done.state), 20_000.0, 0.0
    while position < 23_000:
        share = min(1.0, (23_000 - position) / mix.tokens)
        stepped += share * average_round(machine, done.state, held, mix, round(position)).ms
        position += mix.tokens
    assert result.decode_ms == pytest.approx(stepped, rel=2e-3)
    assert result.rounds == pytest.approx(1 + 3000 / mix.tokens)
    assert result.draft_accepted_tokens == pytest.approx(3001 - result.rounds)


def test_forced_tokens_take_one_row_each_and_no_drafts() -> None:
    done, _ = run(LAPTOP, [forced(1000, 300)])
    (result,) = done.requests
    assert (result.rounds, result.draft_tokens) == (300, 0)
    assert result.lookups == 300 * 480
    assert (result.decode_tok_s or 0) < (run(LAPTOP, [single(1000, 300)])[0].requests[0].decode_tok_s or 0)


def test_a_follow_up_continues_the_live_session() -> None:
    first = single(5000, 100)
    done, _ = run(LAPTOP, [first, follow_up(first, 200, name="next")])
    result = done.requests[1]
    assert (result.reuse, result.reused_tokens, result.fresh_tokens) == ("live", 5099, 200)


def test_a_prompt_that_differs_in_the_answer_goes_on_from_the_last_turn() -> None:
    first = single(29_842, 768)
    done, _ = run(LAPTOP, [first, follow_up(first, 31, name="next", common=29_837)])
    result = done.requests[1]
    assert (result.reuse, result.reused_tokens, result.fresh_tokens) == ("checkpoint", 29_837, 31)
    assert result.chunks == 0  # short reads go through decode windows
    assert result.refill_ms == 0
    without = run(replace(LAPTOP, checkpoints=0), [first, follow_up(first, 31, name="next", common=29_837)])[0]
    assert without.requests[1].reused_tokens == 0


def test_agents_that_take_turns_are_parked_and_restored_when_there_is_a_budget() -> None:
    turns = taking_turns([60_000, 15_000, 0], ["a", "b", "a"], fresh_tokens=300)
    parked, _ = grown(turns, conversation_mib=8192, conversation_slots=2)
    alone, _ = grown(turns)
    assert [r.reuse for r in parked.requests] == ["none", "none", "parked"]
    assert [r.reuse for r in alone.requests] == ["none", "none", "none"]
    back, again = parked.requests[2], alone.requests[2]
    assert back.restore_ms > 0
    assert back.ttft_ms == pytest.approx(back.park_ms + back.restore_ms + back.prompt_ms + back.first_round_ms)
    assert back.ttft_ms < 0.3 * again.ttft_ms
    # K/V: grown for the long one, trimmed for the short one, grown again before the restore
    assert [r.kv_mapped_cells for r in parked.requests] == [65_536, 16_384, 65_536]
    assert parked.requests[1].returned_slots == parked.requests[0].given_slots > 0


def test_short_reads_touch_no_loan_and_cost_windows_of_six_rows() -> None:
    lines = Lines()
    done, _ = run(LAPTOP, [single(45, 1)], sink=lines)
    assert not lines.of("lend")
    assert not lines.of("chunk")
    twice, _ = run(LAPTOP, [single(39, 1)])
    # 40 + 4 tokens are seven windows and one; 34 + 4 are six and one
    assert done.requests[0].prompt_ms > twice.requests[0].prompt_ms
    batched, _ = run(replace(LAPTOP, short_read_tokens=0), [single(45, 1)])
    assert batched.requests[0].chunks == 2


def test_head_alias_unloads_the_head_reads_and_loads_it_before_the_first_window() -> None:
    lines = Lines()
    request = replace(LAPTOP, head_alias=True, short_read_tokens=0)
    done, plan = run(request, [single(2000, 16, name="a"), single(2000, 16, name="b")], sink=lines)
    kinds = [line["kind"] for line in lines.events if line["kind"] in ("unload_head", "load_head")]
    assert kinds == ["unload_head", "load_head", "unload_head", "load_head"]  # the first at start
    assert [r.relayout_ms for r in done.requests] == [0, pytest.approx(20)]
    assert done.requests[1].head_load_ms == pytest.approx(255, rel=0.02)
    fast, _ = run(request, [single(2000, 16)], head_pinned=True)
    assert fast.requests[0].head_load_ms < 25
    assert plan.prompt.chunk_tokens == 2048
    assert any("0 MiB of device memory are free while decoding" in w for w in done.warnings)


def test_little_free_memory_is_warned_of_when_a_request_starts() -> None:
    done, plan = run(LAPTOP, [single(100, 1, name="a"), single(100, 1, name="b")])
    assert plan.free_after_start_mib < 1024
    assert sum("free when a request starts" in w for w in done.warnings) == 1
    assert done.requests[0].free_mib == pytest.approx(plan.free_after_start_mib)
    roomy, _ = run(StrataRequest(reserve_mib=4000), [single(100, 1)], card="rtx5090", quant="iq2_xs")
    assert roomy.warnings == ()


def test_every_line_is_marked_and_the_clock_never_goes_back() -> None:
    lines = Lines()
    done, _ = grown([single(17_800, 4000, name="a"), single(44, 64, name="b")], lines, conversation_mib=4096)
    every = [*lines.events, *lines.metrics]
    assert all(line["executor"] == "sim" and line["calibrated"] is True for line in every)
    for written in (lines.events, lines.metrics):
        times = [line["time_s"] for line in written]
        assert times == sorted(times)
    assert lines.metrics[-1]["time_s"] * 1000 == pytest.approx(done.total_ms)
    assert done.summary()["extra"]["executor"] == "sim"
    total = sum(r.ttft_ms + r.decode_ms for r in done.requests)
    assert done.total_ms == pytest.approx(total)


def test_a_sink_changes_nothing() -> None:
    requests = [single(9000, 300, name="a"), single(44, 64, name="b")]
    assert run(LAPTOP, requests, sink=Lines())[0].requests == run(LAPTOP, requests)[0].requests


def test_memory_events_conserve_the_cards_bytes() -> None:
    lines = Lines()
    _, plan = grown([single(31_700, 64)], lines, conversation_mib=4096)
    sums = {sum(line["owners"].values()) for line in lines.of("memory")}
    assert sums == {plan.card.vram_bytes}


def test_noise_is_off_by_default_seeded_and_as_wide_as_stated() -> None:
    requests = [single(3000, 64, name=str(index)) for index in range(300)]
    quiet = run(LAPTOP, requests)[0]
    assert len({round(r.prompt_ms, 6) for r in quiet.requests}) == 1
    first, again, other = (run(LAPTOP, requests, noise=0.09, seed=seed)[0] for seed in (1, 1, 2))
    assert first.requests == again.requests != other.requests
    exact = quiet.requests[0]
    decode = [math.log(r.decode_ms / exact.decode_ms) for r in first.requests]
    prompt = [math.log(r.prompt_ms / exact.prompt_ms) for r in first.requests]
    assert statistics.stdev(decode) == pytest.approx(0.09, rel=0.15)
    assert statistics.stdev(prompt) == pytest.approx(0.03, rel=0.15)
    assert statistics.mean(decode) == pytest.approx(0, abs=0.02)


def test_memory_that_other_programs_take_costs_hits_and_speed() -> None:
    request = StrataRequest(kv_resident_cells=32_768, vram_elastic_mib=512)
    whole, plan = run(request, [single(4096, 256)], card="rtx3090", quant="iq3_s")
    less, _ = run(request, [single(4096, 256)], card="rtx3090", quant="iq3_s", vram_change_bytes=10_240 * MIB)
    assert less.state.slots.num_present < 0.5 * plan.slots
    assert (less.requests[0].hit_rate or 0) < (whole.requests[0].hit_rate or 0) - 0.2
    assert (less.requests[0].decode_tok_s or 0) < 0.8 * (whole.requests[0].decode_tok_s or 0)


def test_lent_experts_without_a_copy_in_ram_are_read_from_files_once_a_prompt() -> None:
    sizes, profile = sizes_of("iq3_s"), load_profile("rtx5090")
    request = StrataRequest(expert_cache=5400, reserve_mib=1536, tier=ExpertTier.RESIDENT)
    plan = plan_strata(sizes, profile.card(ram_mib=65_536), request)
    prompt = single(17_944, 16)
    blobs, times = {}, {}
    for copied in (0, 500, plan.prompt.lent_slots):
        some = replace(plan, ram_copies_from_slot=plan.slots - copied)
        assert experts_in_ram(some, sizes)[: plan.slots].sum() == copied
        (result,) = simulate(some, sizes, profile, policy_stack(sizes, some), [prompt]).requests
        blobs[copied], times[copied] = result.file_blobs, result.prompt_ms
    assert blobs[0] - blobs[500] == 500
    assert blobs[plan.prompt.lent_slots] == plan.slots + plan.ram_resident_experts - sizes.num_ranks == 0
    assert times[0] > times[500] > times[plan.prompt.lent_slots]


def test_slots_that_missed_hot_experts_get_them_back_by_adaptation() -> None:
    lines = Lines()
    request = replace(GROW, grow=GrowSettings(), vram_elastic_mib=0)
    sizes, profile = sizes_of("iq2_xs"), load_profile("rtx5090_as_16gb")
    plan = plan_strata(sizes, profile.card(), request)
    stack = policy_stack(sizes, plan)
    cold = stack.initial_state()
    occupant = cold.slots.occupant.copy()
    occupant[:50] = range(plan.slots, plan.slots + 50)  # the hottest experts are out, cold ones in their slots

    class Stand(type(stack)):  # type: ignore[misc]
        def initial_state(self, *, ram_available_bytes: int | None = None) -> Any:
            return replace(cold, slots=replace(cold.slots, occupant=occupant))

    stand = Stand(**{each.name: getattr(stack, each.name) for each in fields(stack)})
    done = simulate(plan, sizes, profile, stand, [single(44, 400)], sink=lines)
    assert lines.of("swap_expert")
    held = set(done.state.resident_ranks().tolist())
    assert len(held & set(range(50))) > 40
    first, last = lines.of("round")[1], lines.of("round")[-1]
    assert last["hits"] / last["lookups"] > first["hits"] / first["lookups"]


def test_files_are_cached_as_far_as_the_ram_reaches() -> None:
    sizes, profile = sizes_of("iq3_s"), load_profile("rtx5090")
    plan = plan_strata(sizes, profile.card(ram_mib=65_536), StrataRequest(reserve_mib=1536, tier=ExpertTier.MMAP))
    held = []
    for ram_gib in (4, 24, 96):
        cached = experts_in_ram(replace(plan, card=replace(plan.card, ram_bytes=ram_gib * 1024 * MIB)), sizes)
        assert not cached[: plan.slots].any()
        held.append(int(cached.sum()))
    assert held == sorted(set(held))
    assert held[-1] == sizes.num_ranks - plan.slots


def test_recorded_routing_takes_the_place_of_the_popularity_curve() -> None:
    sizes = sizes_of("iq3_xxs")
    experts = np.random.default_rng(3).integers(0, 40, (32, sizes.num_layers, sizes.num_experts_used))
    trace = RoutingTrace(experts.astype(np.int32))
    replayed, plan = run(LAPTOP, [single(100, 64)], trace=trace)
    counts = np.bincount(trace.ranks(sizes.num_layers, sizes.num_experts).ravel())
    assert replayed.requests[0].hit_rate == pytest.approx(counts[: plan.slots].sum() / counts.sum())
    modelled, _ = run(LAPTOP, [single(100, 64)])
    assert (replayed.requests[0].hit_rate or 0) > (modelled.requests[0].hit_rate or 0) + 0.1


def test_requests_beyond_the_context_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"need 262,152 cells; model\.max_context=262,144"):
        run(LAPTOP, [single(262_000, 144)])


def test_spilled_memory_is_paid_for_only_when_asked() -> None:
    request = replace(LAPTOP, head_alias=True, short_read_tokens=0)
    plain, spilled = (run(request, [single(2000, 64)], spill=spill)[0].requests[0] for spill in (False, True))
    assert spilled.decode_ms > 1.02 * plain.decode_ms


def test_simulations_take_few_calls_a_request_and_need_no_jax() -> None:
    requests = [single(30_000, 256)]
    run(LAPTOP, requests)
    sizes, profile = sizes_of("iq3_xxs"), load_profile("rtx_pro_2000_8gb")
    plan = plan_strata(sizes, profile.card(), LAPTOP)
    stack = policy_stack(sizes, plan)
    assert num_calls(partial(simulate, plan, sizes, profile, stack, requests)) < 4_000
    loop = agent_loop({"1-64": 614, "65-512": 955, "513-2048": 618, "2049-8192": 277}, num_requests=2649)
    few, many = (num_calls(partial(simulate, plan, sizes, profile, stack, loop[:n])) for n in (100, 400))
    assert few < 2_000 * 100
    assert many < 5 * few, "a request costs no more because others came before"
    code = "import sys, strata_jax.sim.executor, strata_jax.sim.workload; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

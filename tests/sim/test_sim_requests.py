"""Simulated requests: the published orders and mixes, what conversations share, segments and checkpoints."""

from __future__ import annotations

import math
import statistics
from collections import Counter

import pytest
import yaml

from strata_jax.config.schema import WorkloadConfig
from strata_jax.errors import ConfigError
from strata_jax.policies.prompt_segments import CheckpointRule, segments
from strata_jax.sim.requests import (
    SimRequest,
    agent_loop,
    document_follow_up,
    follow_up,
    from_order,
    single,
    taking_turns,
)
from strata_jax.sim.workload import sim_requests
from strata_jax.workloads import DATA_FILE

BUCKETS = {"1-64": 614, "65-512": 955, "513-2048": 618, "2049-8192": 277}


def workload(name: str, **settings: object) -> list[SimRequest]:
    return sim_requests(WorkloadConfig(name=name, **settings))  # type: ignore[arg-type]


def test_agent_loop_has_the_published_mix_of_fresh_tokens() -> None:
    requests = workload("agent_loop")
    assert len(requests) == 2649
    assert Counter(r.label for r in requests) == {**BUCKETS, "8193+": 2649 - sum(BUCKETS.values())}
    for request in requests:
        fresh = request.prompt_tokens - request.common_tokens
        low, _, high = request.label.partition("-")
        assert (fresh >= 8193) if not high else int(low) <= fresh <= int(high)
    assert max(r.prompt_tokens for r in requests) <= 150_000
    assert Counter(r.label for r in workload("agent_loop_default"))["65-512"] == 409


def test_sizes_within_a_bucket_follow_one_log_normal_law() -> None:
    law = statistics.NormalDist(math.log(284), 2.3)
    requests = agent_loop(BUCKETS, num_requests=2649)
    for name in BUCKETS:
        low, high = map(int, name.split("-"))
        ends = [math.log(max(0.5, end - 10)) for end in (low - 0.5, high + 0.5)]
        middle = law.inv_cdf((law.cdf(ends[0]) + law.cdf(ends[1])) / 2)
        fresh = [r.prompt_tokens - r.common_tokens for r in requests if r.label == name]
        assert statistics.median(fresh) == pytest.approx(10 + math.exp(middle), rel=0.2)


def test_the_size_law_gives_the_published_counts_it_was_fitted_on() -> None:
    law = statistics.NormalDist(math.log(284), 2.3)
    both = [614 + 293, 955 + 409, 618 + 278, 277 + 118, 3849 - 3562]
    ends = [law.cdf(math.log(end + 0.5 - 10)) for end in (10, 64, 512, 2048, 8192, 150_000)]
    whole = ends[-1] - ends[0]
    for count, low, high in zip(both, ends, ends[1:], strict=False):
        assert (high - low) / whole == pytest.approx(count / sum(both), abs=0.026)


def test_agent_loop_continues_whole_sessions_and_is_deterministic_in_its_seed() -> None:
    first, again, other = (agent_loop(BUCKETS, num_requests=2649, seed=seed) for seed in (3, 3, 4))
    assert first == again != other
    before = {first[0].conversation: first[0]}
    for request in first[1:]:
        last = before.get(request.conversation)
        if last is not None:
            assert request.common_tokens == last.prompt_tokens + last.output_tokens - 1
        else:
            assert request.common_tokens == 0
        before[request.conversation] = request


def test_agent_loop_says_what_does_not_stay_within_the_longest_prompt() -> None:
    with pytest.raises(ConfigError, match=r"does not stay within 9,000 tokens"):
        agent_loop(BUCKETS, num_requests=2649, max_prompt_tokens=9000)
    with pytest.raises(ConfigError, match="'many' is no range"):
        agent_loop({"many": 3})


def test_every_workload_of_the_data_can_be_simulated() -> None:
    names = [entry["id"] for entry in yaml.safe_load(DATA_FILE.read_text(encoding="utf-8"))["workloads"]]
    for name in names:
        requests = workload(name)
        assert requests
        assert len({(r.name, r.prompt_tokens) for r in requests}) >= len(requests) - 1
        assert all(r.common_tokens < r.prompt_tokens for r in requests)


def test_published_orders_have_their_published_lengths() -> None:
    assert [r.prompt_tokens for r in workload("port_check")] == [29842, 29868, 45, 45, 29842]
    assert workload("port_check")[1].common_tokens == 29837
    assert workload("grow_served")[-1].common_tokens == 31749
    assert workload("grow_served")[-1].conversation == workload("grow_served")[2].conversation
    (forced,) = workload("long_forced")
    assert (forced.prompt_tokens, forced.output_tokens, forced.drafts) == (29854, 3072, False)
    assert [r.prompt_tokens for r in workload("doc_18k")][1:] == [17944, 17944]
    assert workload("doc_18k_small")[1].prompt_tokens == 24 + 8 * 28


def test_agents_that_take_turns_continue_their_own_conversation() -> None:
    a, b, back = taking_turns([60_000, 15_000, 60_000], ["a", "b", "a"], fresh_tokens=100, output_tokens=50)
    assert (a.conversation, b.conversation, back.conversation) == ("a", "b", "a")
    assert back.common_tokens == 60_000 + 49
    assert back.prompt_tokens == back.common_tokens + 100
    assert workload("aba_agents")[2].common_tokens == 60_000 + 255


def test_input_settings_become_token_counts() -> None:
    assert workload("prompt", prompt_tokens=777)[0].prompt_tokens == 777
    assert workload("prompt", prompt="x" * 400)[0].prompt_tokens == 110
    assert workload("prompt", token_ids=[1, 2, 3], max_output_tokens=9)[0].output_tokens == 9
    assert not workload("prompt", token_ids=[1, 2], forced_token_ids=[3, 4, 5])[0].drafts
    assert {r.output_tokens for r in workload("agent_loop", max_output_tokens=64)} == {64}


def test_orders_that_make_no_sense_are_refused() -> None:
    for item in ("talk", {"prompts": 3}, {"fresh": 3}, {"follow_up_of": 5}):
        with pytest.raises(ConfigError, match="workload order"):
            from_order([item])
    with pytest.raises(ConfigError, match="0 prompt"):
        SimRequest("a", "a", 0, 1)
    with pytest.raises(ConfigError, match="5 common tokens of 4"):
        SimRequest("a", "a", 4, 1, common_tokens=5)


def test_a_question_about_a_document_continues_its_conversation() -> None:
    document, question = document_follow_up(1000, fresh_tokens=60, output_tokens=20)
    assert question.conversation == document.conversation
    assert (question.common_tokens, question.prompt_tokens) == (1019, 1079)


def test_segments_end_at_root_last_turn_and_before_the_last_token() -> None:
    request = SimRequest("a", "a", 50_000, 1, turns=(0, 900, 3000, 40_000, 49_995))
    parts = segments(request.prompt_tokens - 1, request.turns, 0, CheckpointRule())
    assert [(p.start, p.end) for p in parts] == [(0, 3000), (3000, 49_995), (49_995, 49_999)]
    assert [p.checkpoints for p in parts] == [(3000,), (16_384, 32_768, 49_152, 49_995), ()]


def test_segments_after_reuse_have_no_root_and_read_only_what_is_left() -> None:
    request = SimRequest("a", "a", 50_000, 1, turns=(0, 900, 3000, 49_995))
    assert [(p.start, p.end) for p in segments(request.prompt_tokens - 1, request.turns, 20_000, CheckpointRule())] == [
        (20_000, 49_995),
        (49_995, 49_999),
    ]
    assert segments(request.prompt_tokens - 1, request.turns, 49_999, CheckpointRule()) == []
    assert segments(request.prompt_tokens - 1, request.turns, 0, CheckpointRule(every=0))[1].checkpoints == (49_995,)


def test_the_published_follow_up_starts_at_the_last_turn_of_the_prompt_before() -> None:
    first = single(29_842)
    assert segments(first.prompt_tokens - 1, first.turns, 0, CheckpointRule())[-2].checkpoints[-1] == 29_837
    assert follow_up(first, 31, name="next", common=29_837).prompt_tokens == 29_868

"""policy=auto: what it tries, what it takes for given, what it chooses and why, and what it leaves behind."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines import plan as plan_pipeline
from pipelines import simulate as simulate_pipeline
from pipelines.choose import choose
from strata_jax.config import RunConfig
from strata_jax.config.resolve import searches
from strata_jax.errors import ConfigError, DoesNotFit
from strata_jax.memory.strata.result import StrataPlan
from strata_jax.report.record import RunRecord
from strata_jax.sim.executor import simulate
from strata_jax.sim.requests import SimRequest
from strata_jax.sim.search import (
    LEAST_GAIN,
    TIE_SHARE,
    Candidate,
    Facts,
    Search,
    best_of,
    search_policies,
    total_ms,
)
from strata_jax.sim.search_space import SWITCHES, label, sample, typed, with_settings
from strata_jax.sim.search_words import candidate_rows, changes, search_json, search_markdown, why
from strata_jax.sim.setup import complete_setup, plan_or_unfit, requests_of, sim_inputs

Compose = Callable[..., RunConfig]
CARD = "hardware=rtx5090_as_16gb"
LAPTOP = (
    "hardware=rtx_pro_2000_8gb", "quant=iq3_xxs", "kv.type=q4_0", "kv.resident_cells=32768",
    "hardware.vram_reserve_mib=590", "spec.draft_vocab=40525",
)  # fmt: skip


def facts(ms: float, *, free_mib: float = 700.0, slots: int = 100) -> Facts:
    return Facts(
        total_ms=ms, prompt_ms=ms / 2, decode_ms=ms / 2, switch_ms=0.0, refill_ms=0.0, copy_wait_ms=0.0, head_ms=0.0,
        growth_ms=0.0, fresh_tokens=1_000, reused_tokens=0, output_tokens=100, hit_rate=0.5, slots=slots,
        chunk_tokens=512, layout="borrowed", lent_slots=10, own_mib=0.0, kv_start_cells=1_024, free_mib=free_mib,
        reserve_mib=500.0, warnings=(),
    )  # fmt: skip


def on(*names: str, **more: object) -> dict[str, object]:
    return {f"policy.{name}.enabled": name in names for name in ("head_alias", "kv_grow")} | more


def run_whole(config: RunConfig) -> float:
    """The simulated ms of the whole workload of settings without a search."""
    inputs = sim_inputs(config)
    plan = plan_or_unfit(config, inputs)
    assert isinstance(plan, StrataPlan)
    setup = complete_setup(config, inputs, plan)
    done = simulate(plan, inputs.sizes, inputs.profile, setup.stack, inputs.requests, options=setup.options)
    return done.total_ms


def test_of_candidates_that_no_fit_can_tell_apart_the_simplest_is_taken() -> None:
    plain, one, two = (
        Candidate(on(), facts(1_000 * (1 + 0.8 * TIE_SHARE))),
        Candidate(on("kv_grow"), facts(1_000)),
        Candidate(on("kv_grow", "head_alias"), facts(999.5)),
    )
    assert best_of([plain, one, two]) is plain
    assert best_of([Candidate(on(), facts(1_100)), one, two]) is one
    assert best_of([Candidate(on(), None, DoesNotFit("no", shortfall_bytes=1)), two]) is two
    assert best_of([]) is None


def test_the_reserve_comes_before_speed_unless_nothing_keeps_it() -> None:
    slow, fast = Candidate(on(), facts(2_000)), Candidate(on("head_alias"), facts(1_000, free_mib=100))
    assert best_of([slow, fast]) is slow
    assert best_of([fast]) is fast


def test_every_combination_is_a_row_and_repeats_say_so(compose_config: Compose) -> None:
    search = search_policies(compose_config([CARD, "policy=auto", "workload=chat"]))
    tried = {tuple(sorted(k for k, v in c.settings.items() if v is True)) for c in search.candidates}
    assert len({names for names in tried if len(names) <= 6}) >= 2 ** (len(SWITCHES) + 1)
    own = next(c for c in search.candidates if c.label == "own_prefill")
    assert own.same_as == "baseline"  # an automatic cache leaves nothing spare
    assert own.facts == search.plain.facts
    assert len(candidate_rows(search, distinct=True)) < len(candidate_rows(search)) == len(search.candidates)


def test_given_switches_and_parameters_are_kept_by_every_candidate(compose_config: Compose) -> None:
    given = [
        "policy.kv_grow.enabled=false",
        "policy.head_alias.enabled=true",
        "prefill.chunk=1024",
        "prefill.borrow=true",
    ]
    config = compose_config([CARD, "policy=auto", "workload=chat", *given])
    search = search_policies(config)
    for candidate in search.candidates:
        assert not {"policy.kv_grow.enabled", "policy.head_alias.enabled", "prefill.chunk"} & set(candidate.settings)
        assert candidate.facts is None or candidate.facts.chunk_tokens <= 1_024
    assert search.chosen is not None
    chosen = with_settings(config, search.chosen.settings)
    assert (chosen.policy.kv_grow.enabled, chosen.policy.head_alias.enabled) == (False, True)
    assert not searches(chosen)


def test_a_setting_that_a_switch_steers_is_a_constraint_too(compose_config: Compose) -> None:
    config = compose_config(
        [CARD, "policy=auto", "kv.grow.enabled=false", "prefill.own='off'", "conversation.budget_mib=0"]
    )
    policy = config.policy
    assert (policy.kv_grow.enabled, policy.prefill_own.enabled, policy.conversation_budget.enabled) == (
        False,
        False,
        False,
    )
    assert policy.head_alias.enabled == "auto"


def test_auto_switches_belong_to_the_search_alone(compose_config: Compose) -> None:
    with pytest.raises(ConfigError, match=r"policy\.kv_grow\.enabled=auto and policy=baseline"):
        compose_config([CARD, "policy.kv_grow.enabled=auto"])
    with pytest.raises(ConfigError, match="policy=auto and memory_model=xla"):
        compose_config([CARD, "policy=auto", "memory_model=xla"])


def test_the_16_gb_card_grows_its_kv_and_the_reason_names_slots_and_hits(compose_config: Compose) -> None:
    config = compose_config([CARD, "policy=auto"])
    search = search_policies(config)
    assert search.chosen is not None
    assert search.chosen.settings["policy.kv_grow.enabled"] is True
    chosen, plain = search.chosen.facts, search.plain.facts
    assert chosen is not None
    assert plain is not None
    assert chosen.slots > 1.5 * plain.slots
    assert chosen.keeps_reserve
    reasons = "\n".join(why(config, search))
    assert f"{chosen.slots:,} expert slots instead of {plain.slots:,}" in reasons
    assert f"{chosen.hit_rate:.1%} of look-ups hit" in reasons
    assert "Without kv_grow: " in reasons
    assert "With own_prefill: nothing changes" in reasons


def test_a_short_chat_on_a_card_that_holds_the_experts_needs_no_policy(compose_config: Compose) -> None:
    config = compose_config(["hardware=rtx5090", "policy=auto", "workload=chat"])
    search = search_policies(config)
    assert search.chosen is search.plain
    assert "No other candidate" in why(config, search)[0]


def test_on_the_laptop_the_head_serves_prompts_without_touching_the_reserve(compose_config: Compose) -> None:
    config = compose_config([*LAPTOP, "policy=auto"])
    search = search_policies(config)
    assert search.chosen is not None
    assert search.chosen.facts is not None
    assert search.chosen.label.startswith("head_alias (inside the head)")
    grown = next(c for c in search.candidates if c.label == "head_alias")
    assert grown.facts is not None
    assert grown.facts.free_mib == 0  # as published: nothing is free while decoding
    assert total_ms(grown) < total_ms(search.chosen)
    assert any("leaves 0 MiB free where the reserve asks for" in reason for reason in why(config, search))
    refused = [c for c in search.candidates if c.settings["policy.kv_grow.enabled"]]
    assert {type(c.error) for c in refused} == {ConfigError}
    assert all("K/V lies in RAM" in str(c.error) for c in refused)


def test_the_choice_on_a_sample_is_no_slower_on_the_whole_loop_than_any_preset(compose_config: Compose) -> None:
    small = [CARD, "workload=agent_loop_default"]
    config = compose_config([*small, "policy=auto"])
    search = search_policies(config)
    assert search.chosen is not None
    assert search.num_sampled < search.num_requests == 1_200
    chosen = run_whole(with_settings(config, search.chosen.settings))
    for preset in ("baseline", "kv_grow"):
        assert chosen <= run_whole(compose_config([*small, f"policy={preset}"])) * (1 + LEAST_GAIN), preset


def test_the_search_is_deterministic_and_tries_few_settings_on_few_requests(compose_config: Compose) -> None:
    config = compose_config([CARD, "policy=auto", "workload=agent_loop", "executor.noise=0.2"])
    first = search_policies(config)
    assert 1 < len(first.candidates) < 150
    assert first.num_sampled < first.num_requests / 20
    assert search_policies(config) == first


def test_samples_are_whole_conversations_with_the_longest_request(compose_config: Compose) -> None:
    requests = requests_of(compose_config([CARD, "workload=agent_loop"]))
    chosen = sample(requests, 40)
    names = {r.conversation for r in chosen}
    assert 40 <= len(chosen) < 120
    assert [r for r in requests if r.conversation in names] == list(chosen)
    assert max(r.prompt_tokens for r in chosen) == max(r.prompt_tokens for r in requests)
    few = [SimRequest(f"r{i}", f"c{i}", 10, 5) for i in range(5)]
    assert sample(few, 40) == tuple(few)
    many = [SimRequest(f"r{i}", f"c{i}", 10, 5) for i in range(500)]
    places = [int(r.name[1:]) for r in sample(many, 16)]
    assert max(b - a for a, b in itertools.pairwise(places)) < 80


def test_the_run_directory_has_the_candidates_and_the_chosen_plan_runs(tmp_path: Path, compose_config: Compose) -> None:
    config = compose_config([CARD, "policy=auto", "workload=chat", "report.plots=false"])
    with RunRecord.open(tmp_path, config) as record:
        record.update(**simulate_pipeline.run(config, record))
    auto = json.loads((tmp_path / "auto.json").read_text(encoding="utf-8"))
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    plan = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert summary["extra"]["auto"]["settings"] == auto["settings"]
    assert plan["expert_cache"]["slots"] == auto["chosen"]["slots"]
    assert summary["extra"]["simulated_s"] == pytest.approx(auto["chosen"]["total_ms"] / 1000)
    assert "kv_grow" in summary["extra"]["policies"]
    text = (tmp_path / "auto.md").read_text(encoding="utf-8")
    assert all(f"| {row['label']} |" in text for row in auto["candidates"])
    assert all(reason in text for reason in auto["why"])
    # the settings it prints give the same plan without a search
    again = compose_config([CARD, "workload=chat", *auto["settings"]])
    inputs = sim_inputs(again)
    assert plan_or_unfit(again, inputs).slots == auto["chosen"]["slots"]  # type: ignore[union-attr]


def test_planning_alone_searches_too(tmp_path: Path, compose_config: Compose) -> None:
    config = compose_config([CARD, "policy=auto", "workload=chat", "pipeline=plan"])
    with RunRecord.open(tmp_path, config) as record:
        extra = plan_pipeline.run(config, record)["extra"]
    assert extra["auto"]["choice"].startswith("kv_grow")
    assert (tmp_path / "auto.md").is_file()


def test_when_nothing_fits_every_row_has_its_reason(tmp_path: Path, compose_config: Compose) -> None:
    config = compose_config(["hardware=rtx_pro_2000_8gb", "quant=ud_q4_k_xl", "kv.type=f16", "policy=auto"])
    with (
        pytest.raises(DoesNotFit, match=r"policy=auto: none of \d+ candidates") as error,
        RunRecord.open(tmp_path, config) as record,
    ):
        choose(config, record)
    assert error.value.shortfall_bytes > 0
    auto = json.loads((tmp_path / "auto.json").read_text(encoding="utf-8"))
    assert auto["chosen"] is None
    assert all(row["reason"] and not row["fits"] for row in auto["candidates"])


def test_the_nearest_miss_is_named(compose_config: Compose) -> None:
    search = search_policies(compose_config(["hardware=rtx_pro_2000_8gb", "workload=agent_loop", "policy=auto"]))
    error = search.error()
    assert isinstance(error, DoesNotFit)
    assert "The nearest, head_alias + kv_grow" in str(error)
    assert ").." not in str(error)
    assert any("elastic K/V can never map" in str(candidate.error) for candidate in search.candidates)
    assert "kv.resident_cells=20480" in str(error)  # what the plan suggests
    assert 0 < error.shortfall_bytes < search.plain.error.shortfall_bytes  # type: ignore[union-attr]


def test_a_workload_beyond_the_context_is_a_setting_to_correct(compose_config: Compose) -> None:
    config = compose_config([CARD, "policy=auto", "model.max_context=4096"])
    search = search_policies(config)
    assert search.chosen is None
    assert isinstance(search.error(), ConfigError)


def test_with_upstream_refusals_are_rows(compose_config: Compose) -> None:
    config = compose_config([CARD, "policy=auto", "workload=chat", "policy.compat=upstream", "upstream.batch=2"])
    search = search_policies(config)
    alias = [c for c in search.candidates if c.settings["policy.head_alias.enabled"]]
    assert all(c.facts is None and "upstream.batch" in str(c.error) for c in alias)
    grow = next(c for c in search.candidates if c.label == "kv_grow")
    assert grow.same_as == "baseline"
    assert any("policy.kv_grow is off" in note for note in grow.notes)


def test_words_say_which_quantity_changed() -> None:
    before, after = facts(1_000, slots=100), facts(500, slots=200)
    assert changes(before, before) == []
    said = " ".join(changes(before, after))
    assert "200 expert slots instead of 100" in said
    assert "decoding takes 0.25 s instead of 0.50 s" in said
    assert label({"policy.kv_grow.enabled": True, "kv.grow.init_cells": 4096}) == "kv_grow, init_cells=4096"
    assert typed({"prefill.borrow": False, "kv.grow.init_cells": 4096}) == [
        "prefill.borrow=false",
        "kv.grow.init_cells=4096",
    ]


def test_a_search_reads_as_json_and_markdown(compose_config: Compose) -> None:
    config = compose_config([CARD, "policy=auto", "workload=chat"])
    unfit = Candidate(on(), None, DoesNotFit("the plan does not fit. More.", shortfall_bytes=2**20))
    search = Search((unfit, Candidate(on("kv_grow"), facts(1_000))), None, {}, 1, 1)
    assert "1 MiB short: the plan does not fit" in search_markdown(config, search)
    assert search_json(config, search)["candidates"][0]["reason"] == "the plan does not fit. More."

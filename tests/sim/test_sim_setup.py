"""From settings to planner, policies and simulator: every setting of the simulator arrives where it counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from strata_jax.config import RunConfig, all_settings
from strata_jax.config.checks import value_of
from strata_jax.errors import ConfigError, DoesNotFit
from strata_jax.memory.strata.plan import try_plan_strata
from strata_jax.memory.strata.request import ExpertTier, Version
from strata_jax.memory.strata.result import StrataPlan
from strata_jax.memory.strata.unfit import StrataUnfit
from strata_jax.sim.executor import simulate
from strata_jax.sim.machine import Machine
from strata_jax.sim.setup import complete_setup, plan_or_unfit, policy_parameters, sim_inputs, sim_options
from strata_jax.synthetic import write_synthetic_gguf

Compose = Callable[[Sequence[str]], RunConfig]
MIB = 2**20
CONF = Path(__file__).resolve().parents[2] / "conf"
GROW = ("policy=kv_grow",)
ELASTIC = ("policy.vram_elastic.enabled=true",)

# setting -> another value, what else it needs, and where it must arrive: request, card, profile, parameters, options
ARRIVALS: list[tuple[str, tuple[str, ...], str, object]] = [
    ("memory_model=strata_0_1_35", (), "request.version", Version.V0_1_35),
    ("model.max_context=65536", (), "request.context_cells", 65_536),
    ("kv.type=q4_0", (), "request.kv_type", "q4_0"),
    ("kv.resident_cells=32768", (), "request.kv_resident_cells", 32_768),
    ("cache.slots=5400", (), "request.expert_cache", 5_400),
    ("cache.per_layer=true", (), "request.cache_per_layer", True),
    ("cache.profile=none", (), "request.profile", False),
    ("cache.ranked=4000", (), "request.ranked", 4_000),
    ("prefill.chunk=512", (), "request.chunk_tokens", 512),
    ("prefill.chunk=auto:16384", (), "request.chunk_auto_max", 16_384),
    ("hardware.vram_reserve_mib=590", (), "request.reserve_mib", 590),
    ("hardware.vram_reserve_mib=700", (), "request.reserve_given", True),
    ("prefill.borrow=false", (), "request.borrow", False),
    ("policy=own_prefill", (), "request.own", "auto"),
    ("prefill.own='on'", ("policy=own_prefill",), "request.own", "on"),
    ("policy.prefill_own.decide_at=final", ("policy=own_prefill",), "request.decide_at", "final"),
    ("policy=head_alias", (), "request.head_alias", True),
    ("policy.head_alias.spare_mib=256", (), "request.alias_spare_mib", 256),
    ("policy.head_alias.inside_head=true", (), "request.alias_inside_head", True),
    ("policy.head_alias.large_chunks=false", (), "request.alias_beyond", False),
    ("kv.grow.init_cells=4096", GROW, "request.grow.init_cells", 4_096),
    ("kv.grow.step_cells=4096", GROW, "request.grow.step_cells", 4_096),
    ("kv.grow.floor_slots=256", GROW, "request.grow.floor_slots", 256),
    ("kv.grow.hysteresis_steps=3", GROW, "request.grow.hysteresis_steps", 3),
    ("policy.vram_elastic.enabled=true", (), "request.vram_elastic_mib", 512),
    ("policy.vram_elastic.segment_mib=256", ("policy.vram_elastic.enabled=true",), "request.vram_elastic_mib", 256),
    ("prefill.stream_min_tokens=512", (), "request.stream_min_tokens", 512),
    ("prefill.ring_slots=96", (), "request.ring_slots", 96),
    ("prefill.lend_pct=80", (), "request.lend_pct", 80),
    ("prefill.short_read_tokens=0", (), "request.short_read_tokens", 0),
    ("spec.window=2", (), "request.spec_window", 2),
    ("spec.suffix_draft=0", (), "request.suffix_draft", 0),
    ("spec.draft_vocab=40525", (), "request.draft_vocab", 40_525),
    ("upstream.mtp=false", (), "request.mtp", False),
    ("conversation.prompt_cache.checkpoints=3", (), "request.checkpoints", 3),
    ("ram.tier=resident", (), "request.tier", ExpertTier.RESIDENT),
    ("ram.resident_budget_mib=1000", (), "request.resident_budget_bytes", 1_000 * MIB),
    ("ram.resident_headroom_mib=4864", (), "request.resident_headroom_bytes", 4_864 * MIB),
    ("policy=conversation_budget", (), "request.conversation_budget", True),
    ("conversation.budget_mib=2816", (), "request.conversation_mib", 2_816),
    ("conversation.slots=2", (), "request.conversation_slots", 2),
    ("conversation.min_free_mib=1000", (), "request.conversation_min_free_mib", 1_000),
    ("hardware.vram_mib=20000", (), "card.vram_bytes", 20_000 * MIB),
    ("hardware.vram_taken_mib=123", (), "card.taken_bytes", 123 * MIB),
    ("hardware.ram_mib=65536", (), "card.ram_bytes", 65_536 * MIB),
    ("hardware.ram_available_mib=40000", (), "card.ram_available_bytes", 40_000 * MIB),
    ("hardware.os=windows", (), "card.os", "windows"),
    ("hardware.pinned_share=0.5", (), "card.pinned_share", 0.5),
    ("hardware.pcie_gb_s=12.5", (), "profile.values.pcie_gb_s", 12.5),
    ("hardware.hbm_gb_s=500", (), "profile.values.hbm_gb_s", 500.0),
    ("hardware.ram_gb_s=40", (), "profile.values.ram_gb_s", 40.0),
    ("hardware.file_gb_s=3", (), "profile.values.file_gb_s", 3.0),
    ("hardware.cores=4", (), "profile.values.cpu_cores", 4.0),
    ("policy.head_alias.min_fresh_tokens=99", (), "parameters.alias_min_fresh_tokens", 99),
    ("policy.head_alias.spill=true", (), "request.spill", True),
    ("kv.grow.anywhere=false", GROW, "parameters.grow_anywhere", False),
    ("kv.grow.keep_restorable=true", GROW, "parameters.keep_restorable", True),
    ("kv.grow.request_margin_cells=512", GROW, "parameters.request_margin_cells", 512),
    ("kv.grow.round_margin_cells=32", GROW, "parameters.round_margin_cells", 32),
    ("cache.adapt.every_rounds=8", ("cache.replacement=adaptive",), "parameters.adapt.every_rounds", 8),
    ("cache.adapt.swaps=12", ("cache.replacement=adaptive",), "parameters.adapt.swaps", 12),
    ("spec.min_p=0.5", (), "options.spec_min_p", 0.5),
    ("cache.pcie_frac=0.25", (), "options.pcie_frac", 0.25),
    ("conversation.prompt_cache.every=4096", (), "options.checkpoints.every", 4_096),
    ("conversation.prompt_cache.root=512", (), "options.checkpoints.root", 512),
    ("policy.vram_elastic.wanted_mib=2000", ELASTIC, "options.vram_change_bytes", 2_000 * MIB),
    ("policy.head_alias.pinned=false", (), "options.head_pinned", False),
    ("hardware.os_effects=true", (), "options.spill", True),
    ("executor.noise=0.1", (), "options.noise", 0.1),
    ("executor.seed=7", (), "options.seed", 7),
]


def arrived(config: RunConfig, where: str) -> object:
    """Return what a place of the simulation holds for these settings."""
    inputs = sim_inputs(config)
    roots = {
        "request": inputs.request,
        "card": inputs.card,
        "profile": inputs.profile,
        "parameters": policy_parameters(config),
        "options": sim_options(config),
    }
    root, *names = where.split(".")
    found: object = roots[root]
    for name in names:
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    return found


@pytest.mark.parametrize(("override", "needs", "where", "expected"), ARRIVALS, ids=[a[0] for a in ARRIVALS])
def test_a_setting_arrives_where_it_counts(
    override: str, needs: tuple[str, ...], where: str, expected: object, compose_config: Compose
) -> None:
    base = ["hardware=rtx3090", *needs]
    assert arrived(compose_config([*base, override]), where) == expected
    if override != "hardware.vram_reserve_mib=700":
        without = [text for text in base if text.partition("=")[0] != override.partition("=")[0]]
        assert arrived(compose_config(without), where) != expected, "the default must differ, or this says nothing"


def test_upstream_compatibility_changes_the_defaults(compose_config: Compose) -> None:
    native = sim_inputs(compose_config(["hardware=rtx3090", "policy=kv_grow"])).request
    upstream = sim_inputs(compose_config(["hardware=rtx3090", "policy=kv_grow", "policy.compat=upstream"])).request
    assert (native.grow.anywhere, upstream.grow.anywhere) == (True, False)
    assert (native.cap_expert_cache, upstream.cap_expert_cache) == (False, True)
    parameters = policy_parameters(compose_config(["hardware=rtx3090", "policy.compat=upstream"]))
    assert parameters.alias_min_fresh_tokens == 0


def test_what_the_original_switches_off_is_off_and_said(compose_config: Compose) -> None:
    settings = ["hardware=rtx3090", "policy=kv_grow", "policy.compat=upstream", "upstream.peer_device=1"]
    inputs = sim_inputs(compose_config(settings))
    assert inputs.request.grow.enabled is False
    assert ["policy.kv_grow is off" in note for note in inputs.notes] == [True]


def test_what_the_original_refuses_is_an_error(compose_config: Compose) -> None:
    settings = ["hardware=rtx3090", "policy=head_alias", "policy.compat=upstream", "upstream.batch=2"]
    with pytest.raises(ConfigError, match=r"policy\.head_alias: upstream\.batch above 1"):
        sim_inputs(compose_config(settings))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["workload.prompt_tokens=4096", "model.max_context=4096", "workload.max_output_tokens=100"],
            ["model.max_context=4096", "4,196 tokens", "by 108", "model.max_context=4204"],
        ),
        (["workload.prompt_tokens=262144"], ["model.max_context=262144", "262,144 at most"]),
    ],
)
def test_a_request_longer_than_the_context_is_refused_with_numbers(
    overrides: list[str], words: list[str], compose_config: Compose
) -> None:
    with pytest.raises(ConfigError) as refused:
        sim_inputs(compose_config(["hardware=rtx5090", *overrides]))
    assert [word for word in words if word not in str(refused.value)] == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cache.slots=0", "cache.slots=0 counts as auto"),
        ("kv.resident_cells=100", "kv.resident_cells=100 became 20480"),
        ("kv.resident_cells=32768", ""),
    ],
)
def test_a_number_that_is_read_as_another_one_is_said(override: str, words: str, compose_config: Compose) -> None:
    notes = sim_inputs(compose_config(["hardware=rtx5090", override])).notes
    assert (words in notes[0]) if words else notes == ()


def test_native_contradictions_are_errors_not_downgrades(compose_config: Compose) -> None:
    with pytest.raises(ConfigError, match=r"policy\.kv_grow.*kv\.resident_cells"):
        sim_inputs(compose_config(["hardware=rtx3090", "policy=kv_grow", "kv.resident_cells=32768"]))


def test_a_model_file_is_simulated_from_its_header(compose_config: Compose, tmp_path: Path) -> None:
    path = tmp_path / "nano.gguf"
    write_synthetic_gguf(path, preset="nano", seed=0)
    config = compose_config(["hardware=rtx3090", f"model.path={path}", "workload.prompt_tokens=100"])
    inputs = sim_inputs(config)
    assert inputs.request.context_cells == inputs.geometry.context_length
    assert inputs.request.draft_vocab == inputs.geometry.vocab_size
    plan = plan_or_unfit(config, inputs)
    assert isinstance(plan, StrataPlan)
    assert plan.pack == inputs.geometry.name


@pytest.mark.parametrize("memory_model", ["strata_0_1_35", "strata_0_1_41", "strata_0_1_43", "xla"])
def test_every_memory_model_runs_to_its_end(memory_model: str, compose_config: Compose) -> None:
    config = compose_config(["hardware=rtx3090", f"memory_model={memory_model}", "workload=chat"])
    inputs = sim_inputs(config)
    plan = plan_or_unfit(config, inputs)
    assert isinstance(plan, StrataPlan)
    setup = complete_setup(config, inputs, plan)
    done = simulate(plan, inputs.sizes, inputs.profile, setup.stack, inputs.requests, options=setup.options)
    assert done.requests[0].output_tokens == 256


def test_requests_are_run_as_often_as_asked_each_time_anew(compose_config: Compose) -> None:
    once = sim_inputs(compose_config(["hardware=rtx3090"])).requests
    twice = sim_inputs(compose_config(["hardware=rtx3090", "workload.requests=2"])).requests
    assert len(twice) == 2 * len(once)
    assert not {r.conversation for r in twice[: len(once)]} & {r.conversation for r in twice[len(once) :]}
    plain = [replace(r, name="", conversation="") for r in once]
    assert [replace(r, name="", conversation="") for r in twice] == plain * 2


def test_a_card_that_no_profile_knows_is_an_error_that_names_those_there_are(compose_config: Compose) -> None:
    with pytest.raises(ConfigError, match=r"rtx9999.*rtx5090"):
        sim_inputs(compose_config(["hardware=rtx3090", "hardware.name=rtx9999"]))


def test_every_setting_of_the_simulator_is_tested_here_or_listed(compose_config: Compose) -> None:
    """A setting that only the simulator honours and that nothing reads would be a promise without effect."""
    tested = {override.partition("=")[0] for override, *_ in ARRIVALS}
    elsewhere = {
        "hardware.profile_file", "kv.grow.enabled", "cache.replacement", "policy.compat",
        "policy.prefill_own.enabled", "policy.conversation_budget.enabled", "policy.head_alias.enabled",
        "policy.kv_grow.enabled", "executor.routing_trace", "workload.prompt_tokens", "upstream.mtp",
        "cache.adapt.decay", "cache.adapt.least_usage", "cache.adapt.gap", "cache.adapt.lag_rounds",
    }  # fmt: skip
    only_sim = {n for n, s in all_settings().items() if s.field.metadata["executors"] == ("sim",)}
    upstream = {name for name in only_sim if name.startswith("upstream.")}
    assert sorted(only_sim - tested - elsewhere - upstream) == []
    assert value_of(compose_config([]), "upstream.batch") == 1


CARDS = sorted(path.stem for path in (CONF / "hardware").glob("*.yaml") if path.stem != "local")
PRESETS = sorted(path.stem for path in (CONF / "policy").glob("*.yaml") if path.stem not in ("auto", "baseline"))


@pytest.mark.parametrize("card", CARDS)
def test_a_preset_plans_on_every_card_where_the_baseline_does(card: str, compose_config: Compose) -> None:
    fits = {}
    for preset in ("baseline", *PRESETS):
        config = compose_config([f"hardware={card}", f"policy={preset}"])
        fits[preset] = isinstance(plan_or_unfit(config, sim_inputs(config)), StrataPlan)
    assert len(fits) > 4
    assert not fits["baseline"] or all(fits.values()), fits


@pytest.mark.parametrize(
    ("overrides", "reserve_mib"),
    [
        ((), 1_024),
        (("quant.head=Q6_K",), 1_198),  # 700 and a head of 497 MiB
        (("policy.head_alias.spill=true",), 700),
        (("hardware.os=windows",), 700),
        (("policy.head_alias.inside_head=true",), 700),
        (("policy.compat=upstream",), 700),
        (("hardware.vram_reserve_mib=800",), 800),
    ],
)
def test_the_automatic_reserve_has_room_for_a_lent_head_that_comes_back(
    overrides: tuple[str, ...], reserve_mib: int, compose_config: Compose
) -> None:
    inputs = sim_inputs(compose_config(["hardware=rtx5060ti", "policy=head_alias", *overrides]))
    assert inputs.request.reserve_mib == reserve_mib
    said = [note for note in inputs.notes if "hardware.vram_reserve_mib=auto is" in note]
    assert len(said) == (reserve_mib > 1_000)
    assert all(f"{reserve_mib:,} MiB" in note for note in said)


def test_a_request_that_elastic_kv_can_never_map_is_found_before_the_run(compose_config: Compose) -> None:
    settings = ["hardware=rtx_pro_2000_8gb", "policy=kv_grow", "workload=aba_agents"]
    config = compose_config(settings)
    inputs = sim_inputs(config)
    found = plan_or_unfit(config, inputs)
    assert isinstance(found, StrataUnfit)
    missing_mib = found.shortfall_bytes / MIB
    assert 0 < missing_mib < 1_024
    assert "61,023 tokens (prompt and output) of a.2" in found.message()
    assert len(found.owners) == 3
    assert not [text for text in found.given if "auto" in text or "reserve" in text], "what is auto is not held fixed"
    plan = try_plan_strata(inputs.sizes, inputs.card, inputs.request)
    assert isinstance(plan, StrataPlan)
    setup = complete_setup(config, inputs, plan)
    with pytest.raises(DoesNotFit, match=f"{missing_mib:,.0f} MiB are missing"):
        simulate(plan, inputs.sizes, inputs.profile, setup.stack, inputs.requests, options=setup.options)
    assert found.enough_alone()
    for offer in found.enough_alone():
        runs_to_its_end(compose_config([*settings, offer]))
    longest = int(found.message().partition("a prompt of ")[2].split(".")[0].replace(",", ""))
    for tokens, fits in ((longest, True), (longest + 256, False)):
        one = compose_config([*settings[:2], f"workload.prompt_tokens={tokens}", "workload.max_output_tokens=1"])
        assert isinstance(plan_or_unfit(one, sim_inputs(one)), StrataPlan) is fits


def runs_to_its_end(config: RunConfig) -> None:
    inputs = sim_inputs(config)
    plan = plan_or_unfit(config, inputs)
    assert isinstance(plan, StrataPlan), config
    setup = complete_setup(config, inputs, plan)
    simulate(plan, inputs.sizes, inputs.profile, setup.stack, inputs.requests, options=setup.options)


@pytest.mark.parametrize(("overrides", "pages"), [((), False), (("policy.head_alias.spill=true",), True)])
def test_a_driver_that_is_said_to_page_costs_what_it_moves_out(
    overrides: tuple[str, ...], pages: bool, compose_config: Compose
) -> None:
    config = compose_config(["hardware=rtx3090", "policy=head_alias", "hardware.os_effects=true", *overrides])
    inputs = sim_inputs(config)
    plan = plan_or_unfit(config, inputs)
    assert isinstance(plan, StrataPlan)
    setup = complete_setup(config, inputs, plan)
    machine = Machine.build(plan, inputs.sizes, inputs.profile, setup.stack, setup.options)
    full = replace(setup.stack.initial_state(), free_bytes=0)
    assert (machine.spilled_ms(full) > 0) is pages

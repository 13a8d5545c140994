"""Rows become plans and requests by what they state, wherever it is stated."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import pytest

from strata_jax.memory.strata.request import MIB, ExpertTier, Version
from strata_jax.reproduce import asks, measure, outcome, quantities, stated, tables, translate
from strata_jax.reproduce.asks import nominal_tokens
from strata_jax.reproduce.rows import Cell, Row, load_rows
from strata_jax.reproduce.translate import (
    NotTranslatable,
    preset_names,
    rule_request,
    strata_version,
    without_policies,
)

CELL = Cell("prefill_tok_s", "tok/s", 100.0)


def row(kind: str = "throughput", cells: tuple[Cell, ...] = (CELL,), **parts: Mapping[str, Any]) -> Row:
    base: dict[str, Mapping[str, Any]] = {
        "hardware": {"gpu": "RTX 3090", "vram_mib": 24576},
        "software": {"engine": "Strata", "version": "0.1.41"},
        "model": {"name": "Qwen3.8-Flash-Next", "quant": "IQ3_S"},
        "settings": {"max_context": 32768},
        "workload": {"prompt_tokens": 4096, "reused_tokens": 0},
    }
    return Row(
        id="new-row", source="new_table", kind=kind, table="somewhere", case="", cells=cells, **{**base, **parts}
    )


def request_of(**settings: Any) -> Any:
    return translate.translate(row(settings=settings))[0].scenario.request


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.1.26", Version.V0_1_35), ("0.1.39", Version.V0_1_35), ("0.1.40.3", Version.V0_1_41),
        ("0.1.41", Version.V0_1_41), ("0.1.43.1", Version.V0_1_43),
    ],
)  # fmt: skip
def test_versions_have_the_memory_model_of_their_rules(text: str, version: Version) -> None:
    assert strata_version(text) is version


def test_a_version_that_is_not_stated_is_not_guessed() -> None:
    with pytest.raises(NotTranslatable, match="version"):
        strata_version(None)


@pytest.mark.parametrize(
    ("name", "quant", "wanted"),
    [
        ("Qwen3.8-Flash-Next", "IQ2_XS (ISTA)", ("qwen38_flash", "iq2_xs")),
        ("Qwen3.8-Flash-Next", "UD-Q4_K_XL", ("qwen38_flash", "ud_q4_k_xl")),
        ("Qwen3.8-Flash-Next Coder", "IQ1_M (256 experts)", ("qwen38_coder", "iq1_m")),
    ],
)
def test_presets_by_name(name: str, quant: str, wanted: tuple[str, str]) -> None:
    assert preset_names({"name": name, "quant": quant}) == wanted


def test_engine_flags_become_constraints() -> None:
    request = request_of(
        max_context=131072, kv="k8v4", kv_resident=20480, prefill=768, expert_cache=5400, vram_reserve_mib=1500,
        spec=2, suffix_draft=0, draft_vocab="en", prompt_cache=3, short_read=0, conversation_cache_mib=4096,
    )  # fmt: skip
    assert (request.context_cells, request.kv_type, request.kv_resident_cells) == (131072, "k8v4", 20480)
    assert (request.chunk_tokens, request.expert_cache, request.reserve_mib) == (768, 5400, 1500)
    assert request.reserve_given
    assert (request.spec_window, request.suffix_draft, request.draft_vocab) == (2, 0, 40525)
    assert (request.checkpoints, request.short_read_tokens, request.conversation_mib) == (3, 0, 4096)


def test_auto_leaves_the_choice_to_the_planner() -> None:
    request = request_of(max_context=32768, prefill="auto", expert_cache="auto")
    assert request.chunk_tokens is None
    assert request.expert_cache is None
    assert not request.reserve_given
    assert request.reserve_mib == 700


def test_environment_switches() -> None:
    def with_env(**env: Any) -> Any:
        return translate.translate(row(settings={"max_context": 32768, "env": env}))[0].scenario

    assert with_env(STRATA_KV_GROW=1).request.grow.enabled
    assert not with_env(STRATA_KV_GROW="0").request.grow.enabled
    grow = with_env(STRATA_KV_GROW=1, STRATA_KV_GROW_INIT=4096, STRATA_KV_GROW_STEP=2048, STRATA_KV_GROW_FLOOR=64)
    assert (grow.request.grow.init_cells, grow.request.grow.step_cells, grow.request.grow.floor_slots) == (
        4096,
        2048,
        64,
    )
    assert with_env(STRATA_PREFILL_STREAM_MIN=512).request.stream_min_tokens == 512
    assert with_env(STRATA_PREFILL_RING=96).request.ring_slots == 96
    assert with_env(STRATA_PREFILL_LEND_PCT=80).request.lend_pct == 80
    assert with_env(STRATA_ARENA_REGISTER=0).machine.pin == "none"
    assert with_env(STRATA_ARENA_PIN_GIB="auto").machine.pin == "auto"
    resident = with_env(STRATA_RESIDENT_HEADROOM_GIB=4.75).request
    assert resident.tier is ExpertTier.RESIDENT
    assert resident.resident_headroom_bytes == 4864 * MIB
    assert with_env(STRATA_PREFILL_OWN_AUTO=1).request.own == "auto"
    assert with_env(STRATA_PREFILL_OWN_AUTO="0").request.own == "off"


def test_the_environment_overrides_the_flag_of_growth() -> None:
    settings = {"max_context": 32768, "kv_grow": True, "env": {"STRATA_KV_GROW": "0"}}
    assert not translate.translate(row(settings=settings))[0].scenario.request.grow.enabled


def test_the_fork_tries_own_buffers_by_default() -> None:
    software = {"engine": "Strata", "version": "0.1.35", "build": "fork with own-buffer planner"}
    fork = translate.translate(row(software=software))[0].scenario.request
    assert fork.own == "auto"
    assert fork.conversation_budget
    assert request_of(max_context=32768).own == "off"


def test_a_varied_setting_is_run_at_both_ends() -> None:
    cases = translate.translate(row(settings={"max_context": 32768, "vram_reserve_mib": {"min": 100, "max": 200}}))
    assert [case.scenario.request.reserve_mib for case in cases] == [100, 200]
    assert [case.end for case in cases] == ["vram_reserve_mib=100", "vram_reserve_mib=200"]


def test_tiers() -> None:
    assert request_of(max_context=32768).tier is ExpertTier.ARENA
    assert request_of(max_context=32768, mmap_experts=True).tier is ExpertTier.MMAP
    budget = request_of(max_context=32768, resident_budget_gib=71)
    assert budget.tier is ExpertTier.RESIDENT
    assert budget.resident_budget_bytes == 71 * 1024 * MIB
    assert request_of(max_context=32768, resident_budget_gib=None).tier is ExpertTier.ARENA


def test_the_head_flag_has_no_short_reads_and_its_other_arm_has() -> None:
    scenario = translate.translate(row(settings={"max_context": 32768, "prefill_head_alias": True}))[0].scenario
    assert scenario.request.head_alias
    assert scenario.request.short_read_tokens == 0
    other = without_policies(scenario).request
    assert not other.head_alias
    assert other.short_read_tokens == 64


def test_a_type_above_a_length_depends_on_the_prompt() -> None:
    def kv(tokens: int) -> str:
        settings = {"kv": "int8 above 4K"}
        found = translate.translate(row(settings=settings, workload={"prompt_tokens": tokens, "reused_tokens": 0}))
        return found[0].scenario.request.kv_type

    assert kv(4096) == "f16"
    assert kv(4097) == "int8"


def test_round_binary_sizes_are_windows_and_decimal_ones_are_counts() -> None:
    assert nominal_tokens(32768) == 32036  # the published pair
    assert nominal_tokens(17800) == 17800


def test_a_prompt_given_as_a_range_is_two_cases() -> None:
    cases = translate.translate(row(workload={"prompt_tokens": {"min": 45, "max": 46}, "reused_tokens": 0}))
    assert [case.scenario.ask.prompt_tokens for case in cases] == [45, 46]
    assert {case.end for case in cases} == {""}


def test_the_last_segment_is_a_read_that_goes_on() -> None:
    workload = {"prompt_tokens": 63958, "segments": [63035, 923], "part": "second segment"}
    ask = translate.translate(row(workload=workload))[0].scenario.ask
    assert (ask.prompt_tokens, ask.reused_tokens) == (63958, 63035)
    requests = outcome.requests_of(translate.translate(row(workload=workload))[0].scenario)
    assert requests[-1].prompt_tokens - requests[-1].common_tokens == 923


def test_nothing_asked_is_a_plan_and_an_unstated_prompt_is_marked() -> None:
    plan = translate.translate(row("memory", (Cell("lent_slots", "slots", 3.0),), workload={}))[0]
    assert plan.scenario.ask.name == ""
    speed = translate.translate(row(workload={"output_tokens": 256}))[0]
    assert not speed.focus.stated


def test_other_engines_and_rows_without_a_machine_have_their_own_words() -> None:
    with pytest.raises(NotTranslatable, match=r"another engine: llama\.cpp"):
        translate.translate(row(software={"engine": "llama.cpp", "version": None}))
    with pytest.raises(NotTranslatable, match="no machine"):
        translate.translate(row(hardware={}))


def test_the_rule_of_the_headroom_needs_no_machine() -> None:
    found = next(
        each
        for each in load_rows(["prefill_own_auto"])
        if not each.hardware and "conversation_cache_mib" in each.settings
    )
    request = rule_request(found)
    assert request.tier is ExpertTier.RESIDENT
    assert request.conversation_budget


def test_what_a_source_leaves_out_is_filled_in_visibly_and_never_over_a_stated_value() -> None:
    by_id = {each.id: each for each in load_rows(["kv_grow"])}
    silent = stated.stated(by_id["grow-sp-fixed.plan"])
    assert silent.settings["vram_reserve_mib"] == 1500
    assert any("1,500 MiB" in text for text in silent.assumptions)
    given = stated.stated(by_id["grow-sp16-fixed.plan"])
    assert given.settings["vram_reserve_mib"] == 17884
    assert given.assumptions == ()


@pytest.mark.parametrize("module", [translate, asks, measure, outcome, quantities, stated, tables])
def test_nothing_is_keyed_by_a_row_or_case(module: Any) -> None:
    """A name of a row, a case or a table of the data in these modules would be a constant keyed by it."""
    text = inspect.getsource(module)
    names = {each.id for each in load_rows()} | {each.case for each in load_rows() if each.case}
    words = set(re.findall(r"[a-z0-9][a-z0-9._-]+", text))
    assert not names & words


def test_every_row_is_translated_or_says_why_not() -> None:
    rows = load_rows()
    reasons = set()
    for each in rows:
        siblings = [other for other in rows if each.case and other.case == each.case and other is not each]
        try:
            assert translate.translate(each, siblings)
        except NotTranslatable as problem:
            reasons.add(str(problem))
    assert reasons == {"another engine: llama.cpp", "no machine", "expert_cache is fixed, size not stated"}

"""Every combination that the original refuses or turns off, one case for each row of the table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strata_jax.memory.strata.request import ExpertTier, GrowSettings, StrataRequest
from strata_jax.policies.policy import Compat
from strata_jax.policies.refusals import RULES, Effect, Rule, Switches, broken_rules, downgrades, refusals

ALIAS: dict[str, Any] = {"head_alias": True, "short_read_tokens": 0}
GROW: dict[str, Any] = {"grow": GrowSettings(enabled=True)}
ELASTIC: dict[str, Any] = {"vram_elastic_mib": 512}
SPLIT: dict[str, Any] = {"layer_split": True, "layer_cuts": (24,)}

# flag, part of its message, request, switches: in the order of RULES
CASES: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
    ("policy.head_alias", "needs a server", ALIAS, {"serve": False}),
    ("policy.head_alias", "layer_split", ALIAS, SPLIT),
    ("policy.head_alias", "batch", ALIAS, {"batch": 2}),
    ("policy.head_alias", "pipeline_windows", ALIAS, {"pipeline_windows": 2}),
    ("policy.head_alias", "short_read_tokens", ALIAS | {"short_read_tokens": 1}, {}),
    ("policy.head_alias", "cache.slots fixed", ALIAS | {"expert_cache": 2}, {}),
    ("policy.head_alias", "upstream.mtp=false", ALIAS | {"mtp": False}, {}),
    ("policy.head_alias", "no_native_head", ALIAS, {"no_native_head": True}),
    ("policy.kv_grow", "more than one device", GROW, {"devices": 2}),
    ("policy.kv_grow", "kv.resident_cells", GROW | {"kv_resident_cells": 32_768}, {}),
    ("policy.kv_grow", "no expert profile", GROW | {"profile": False}, {}),
    ("policy.kv_grow", "resident CPU experts", GROW, {"resident_cpu_experts": True}),
    ("policy.kv_grow", "cache.slots=0", GROW | {"expert_cache": 0}, {}),
    ("policy.kv_grow", "helper devices", GROW, {"remote_caches": True}),
    ("policy.kv_grow", "VMM", GROW, {"vmm": False}),
    ("policy.kv_grow", "upstream.batch", GROW, {"batch": 2}),
    ("policy.kv_grow", "upstream.vram_elastic", GROW | ELASTIC, {}),
    ("policy.kv_grow", "upstream.peer_device", GROW, {"peer_device": True}),
    ("policy.kv_grow", "low-RAM tier", GROW | {"tier": ExpertTier.RESIDENT}, {}),
    ("policy.kv_grow", "token_graph=false", GROW | {"token_graph": False}, {}),
    ("policy.kv_grow", "live memory", GROW, {"live_memory": True}),
    ("upstream.vram_elastic", "needs a server", ELASTIC, {"serve": False}),
    ("upstream.vram_elastic", "more than one device", ELASTIC, SPLIT),
    ("upstream.vram_elastic", "helper devices", ELASTIC, {"peer_device": True}),
    ("upstream.vram_elastic", "below 64 MiB", {"vram_elastic_mib": 63}, {}),
    ("upstream.vram_elastic", "HIP", ELASTIC, {"device_host": "hip"}),
    ("upstream.vram_elastic", "live memory", ELASTIC, {"live_memory": True}),
    ("prefill.own", "more than one device", {"own": "auto"}, {"devices": 2}),
    ("prefill.own", "no expert profile", {"own": "auto", "profile": False}, {}),
    ("prefill.own", "prefill.borrow=false", {"own": "on"}, {"prefill_borrow": False}),
    ("upstream.shared_expert_arena", "two owners", {}, {"shared_expert_arena": True, "mmap_experts": True}),
    ("upstream.resident_cpu_experts", "mapped expert files", {}, {"resident_cpu_experts": True}),
    ("upstream.resident_cpu_experts", "helper devices", {}, {"resident_cpu_experts": True, "remote_caches": True}),
    ("model.path", "native pack", {}, {"native_shards": False}),
    ("upstream.layer_split", "needs a server", {}, SPLIT | {"serve": False}),
    ("upstream.layer_split", "cuts must increase", {}, {"layer_split": True, "layer_cuts": (24, 24)}),
    ("conversation.budget_mib", "two devices", {"conversation_mib": 1}, {"split_device": 0}),
    ("upstream.peer_device", "split or caches", {}, {"peer_device": True, "remote_caches": True}),
    ("upstream.remote_expert_opt", "needs a server", {}, {"remote_expert_opt": True, "serve": False}),
    ("upstream.cpu_oracle", "expert cache", {}, {"cpu_oracle": True}),
    ("upstream.no_capture", "upstream.pool", {}, {"no_capture": True, "pool": True}),
    ("pipeline=serve", "spec.window", {"spec_window": 1}, {"prefill": False}),
    ("spec.window", "token_graph", {"token_graph": False}, {}),
    ("upstream.ple_io", "Windows", {}, {"ple_io": "ram", "os": "windows"}),
    ("model.max_context", "8 cells", {"context_cells": 4_096}, {"context_needed": 4_089}),
    ("upstream.adapt_async", "several sequences", {}, {"adapt_async": True, "batch": 2}),
    ("upstream.batch_mtp", "upstream.batch above 1", {}, {"batch_mtp": True}),
    ("upstream.live_memory", "asynchronous swaps", {}, {"live_memory": True, "adapt_async": True}),
)


def name_of(case: tuple[str, str, dict[str, Any], dict[str, Any]]) -> str:
    return f"{case[0]}: {case[1]}"


@pytest.mark.parametrize(("rule", "case"), list(zip(RULES, CASES, strict=True)), ids=map(name_of, CASES))
def test_each_rule_is_broken_by_its_case_alone(
    rule: Rule, case: tuple[str, str, dict[str, Any], dict[str, Any]]
) -> None:
    flag, part, asked, switched = case
    request, switches = replace(StrataRequest(), **asked), replace(Switches(), **switched)
    assert rule.flag == flag
    assert part in rule.message
    assert rule in list(broken_rules(request, switches, Compat.UPSTREAM))
    assert (rule in list(broken_rules(request, switches, Compat.NATIVE))) is rule.physical
    said = refusals(request, switches, Compat.UPSTREAM)
    logged = downgrades(request, switches, Compat.UPSTREAM)
    if rule.effect is Effect.FATAL:
        assert any(line.startswith(f"{flag}: {rule.message}") for line in said)
        if not rule.physical:
            assert any(rule.native in line and "policy.compat=native" in line for line in said)
    else:
        assert logged[flag] == f"{flag} is off ({rule.message})"
    assert (rule.physical and rule.effect is Effect.FATAL) <= any(
        line.startswith(f"{flag}: ") for line in refusals(request, switches, Compat.NATIVE)
    )


@pytest.mark.parametrize("asked", [{}, ALIAS, GROW, ELASTIC, {"own": "auto"}, {"conversation_mib": 2_048}])
@pytest.mark.parametrize("compat", list(Compat))
def test_each_policy_alone_is_allowed(asked: dict[str, Any], compat: Compat) -> None:
    request = replace(StrataRequest(), **asked)
    assert refusals(request, Switches(), compat) == []
    assert downgrades(request, Switches(), compat) == {}


def test_a_rule_of_a_policy_says_nothing_when_the_policy_is_off() -> None:
    assert refusals(replace(StrataRequest(), expert_cache=100, mtp=False), Switches(batch=2), Compat.UPSTREAM) == []


def test_limits_of_a_fixed_cache_and_of_the_context_are_exact() -> None:
    request = replace(StrataRequest(), **ALIAS)
    assert refusals(replace(request, expert_cache=1), Switches(), Compat.UPSTREAM) == []
    cells = replace(StrataRequest(), context_cells=4_096)
    assert refusals(cells, Switches(context_needed=4_088), Compat.NATIVE) == []
    assert refusals(cells, Switches(context_needed=4_089), Compat.NATIVE) != []


def test_all_broken_rules_are_reported_and_a_flag_is_off_once() -> None:
    request = replace(StrataRequest(), **ALIAS, **GROW, kv_resident_cells=32_768, profile=False)
    switches = Switches(batch=2, pipeline_windows=2)
    assert len([line for line in refusals(request, switches, Compat.NATIVE) if "head_alias" in line]) == 2
    assert downgrades(request, switches, Compat.NATIVE)["policy.kv_grow"].count("is off") == 1

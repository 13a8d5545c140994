"""Settings of simulated cards: what a card brings along, what `auto` becomes, and what cannot both hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from strata_jax.config import RunConfig
from strata_jax.config.choices import ExecutorName, MemoryModelName
from strata_jax.errors import ConfigError

CONF = Path(__file__).resolve().parents[1] / "conf"
Compose = Callable[[Sequence[str]], RunConfig]


def refusal(build: Compose, *overrides: str) -> str:
    """Return the message for settings that are refused."""
    with pytest.raises(ConfigError) as caught:
        build(overrides)
    return str(caught.value)


def test_a_card_brings_model_types_memory_model_and_workload(compose_config: Compose) -> None:
    config = compose_config(["hardware=rtx5090", "policy=kv_grow"])
    assert (config.model.name, config.quant.name, config.kv.type.name) == ("qwen38_flash", "iq2_xs", "int8")
    assert config.memory_model.name is MemoryModelName.strata_0_1_41
    assert config.executor.name is ExecutorName.sim
    assert config.workload.name == "doc_follow_up"
    assert config.kv.grow.enabled is True


def test_this_machine_is_the_device(compose_config: Compose) -> None:
    config = compose_config([])
    assert config.executor.name is ExecutorName.device
    assert (config.model.name, config.quant.name) == ("builtin_tiny", "file")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["quant=iq3_s"], ("qwen38_flash", "iq3_s")),
        (["model=qwen38_coder"], ("qwen38_coder", "iq1_m")),
        (["model=qwen38_coder", "quant=q2_0"], ("qwen38_coder", "q2_0")),
        (["model=builtin_tiny"], ("builtin_tiny", "file")),
        (["model.path=x.gguf"], ("qwen38_flash", "file")),
    ],
)
def test_explicit_choices_win_whatever_their_order(
    overrides: list[str], expected: tuple[str, str], compose_config: Compose
) -> None:
    for arguments in (["hardware=rtx3090", *overrides], [*overrides, "hardware=rtx3090"]):
        config = compose_config(arguments)
        assert (config.model.name, config.quant.name) == expected


def test_a_model_and_a_workload_chosen_for_a_card_stay(compose_config: Compose) -> None:
    config = compose_config(["workload=chat", "memory_model=xla", "hardware=h200"])
    assert (config.workload.name, config.memory_model.name) == ("chat", MemoryModelName.xla)
    assert config.prefill.borrow is False
    assert config.conversation.prompt_cache.checkpoints == 0


def test_the_32_gb_card_stands_in_for_16_gb_by_its_reserve(compose_config: Compose) -> None:
    assert compose_config(["hardware=rtx5090_as_16gb"]).hardware.vram_reserve_mib == 17_884


@pytest.mark.parametrize("path", sorted((CONF / "policy").glob("*.yaml")), ids=lambda path: path.stem)
def test_policy_presets_switch_on_what_they_are_called(path: Path, compose_config: Compose) -> None:
    policy = compose_config(["hardware=rtx5090", f"policy={path.stem}"]).policy
    switches = {
        "own_prefill": policy.prefill_own.enabled,
        "conversation_budget": policy.conversation_budget.enabled,
        "head_alias": policy.head_alias.enabled,
        "kv_grow": policy.kv_grow.enabled,
    }
    wanted = set(switches) if path.stem == "all" else {path.stem} & set(switches)
    assert {name for name, is_on in switches.items() if is_on is True} == wanted
    assert all(is_on == "auto" for is_on in switches.values()) is (path.stem == "auto")


def test_presets_compose_with_switches_and_parameters(compose_config: Compose) -> None:
    config = compose_config(
        ["hardware=rtx5090", "policy=kv_grow", "policy.head_alias.enabled=true", "kv.grow.step_cells=4096"]
    )
    assert (config.policy.kv_grow.enabled, config.policy.head_alias.enabled) == (True, True)
    assert config.kv.grow.step_cells == 4096


@pytest.mark.parametrize(("compat", "tokens"), [("native", 64), ("upstream", 0)])
def test_short_reads_make_room_for_the_originals_head_alias(compat: str, tokens: int, compose_config: Compose) -> None:
    config = compose_config(["hardware=rtx5090", "policy=head_alias", f"policy.compat={compat}"])
    assert config.prefill.short_read_tokens == tokens


@pytest.mark.parametrize(
    ("overrides", "both"),
    [
        (["policy=kv_grow", "kv.grow.enabled=false"], ["kv.grow.enabled=false", "policy.kv_grow.enabled=true"]),
        (["kv.grow.enabled=true"], ["kv.grow.enabled=true", "policy.kv_grow.enabled=false"]),
        (["policy=own_prefill", "prefill.own='off'"], ["prefill.own=off", "policy.prefill_own.enabled=true"]),
        (["policy.kv_grow.enabled=auto"], ["policy.kv_grow.enabled=auto", "policy=baseline"]),
        (["prefill.own='on'"], ["prefill.own=on", "policy.prefill_own.enabled=false"]),
        (
            ["policy.conversation_budget.enabled=true", "conversation.budget_mib=0"],
            ["policy.conversation_budget.enabled=true", "conversation.budget_mib=0"],
        ),
        (["policy=kv_grow", "memory_model=xla"], ["policy.kv_grow.enabled=true", "memory_model=xla"]),
        (["kv.type=f32"], ["kv.type=f32", "memory_model=strata_0_1_41"]),
        (["upstream.batch=2"], ["upstream.batch=2", "policy.compat=native"]),
        (["executor=device"], ["hardware=rtx5090", "executor=device"]),
        (["executor=device"], ["memory_model=strata_0_1_41", "executor=device"]),
        (["executor=device"], ["model=qwen38_flash", "executor=device"]),
        (["pipeline=logits", "workload.token_ids=[1]"], ["pipeline=logits", "executor=sim"]),
        (["pipeline=inspect"], ["pipeline=inspect", "model=qwen38_flash"]),
        (["pipeline=calibrate"], ["pipeline=calibrate", "hardware=rtx5090"]),
        (["pipeline=reproduce"], ["pipeline=reproduce", "reproduce=NAME"]),
        (["reproduce=kv_grow"], ["hardware.name=rtx5090", "reproduce=kv_grow"]),
        (["pipeline=grid"], ["pipeline=grid", "grid.axes"]),
        (["grid.axes=['spec.window=1,2']"], ["grid.axes", "pipeline=generate"]),
        (["quant=iq3_s", "model.path=x.gguf"], ["quant=iq3_s", "model.path"]),
        (["workload.prompt_tokens=5", "workload.prompt=hi"], ["workload.prompt_tokens", "workload.prompt "]),
    ],
)
def test_contradictions_name_both_sides(overrides: list[str], both: list[str], compose_config: Compose) -> None:
    message = refusal(compose_config, "hardware=rtx5090", *overrides)
    assert [words for words in both if words not in message] == []


def test_upstream_switches_are_accepted_where_they_count(compose_config: Compose) -> None:
    config = compose_config(["hardware=rtx5090", "policy.compat=upstream", "upstream.batch=2"])
    assert config.upstream.batch == 2


def test_a_reproduction_sets_its_pipeline(compose_config: Compose) -> None:
    config = compose_config(["reproduce=kv_grow"])
    assert (config.pipeline.name.name, config.reproduce.name) == ("reproduce", "kv_grow")

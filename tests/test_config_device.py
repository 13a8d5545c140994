"""Every setting and every pair of settings that a run on this machine's device refuses, and what it says instead."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import reduce

import pytest

from strata_jax.config import RunConfig, all_settings
from strata_jax.config.checks import show
from strata_jax.config.executors import executor_contradictions
from strata_jax.config.fields import BOTH, IN_SIM
from strata_jax.config.keys import Setting
from strata_jax.config.resolve import resolve
from strata_jax.errors import ConfigError

Compose = Callable[[Sequence[str]], RunConfig]

SEARCHED = ("prefill_own", "conversation_budget", "head_alias", "kv_grow")  # policies that policy=auto decides about
IDS = "workload.token_ids=[1,2]"


def another_value(setting: Setting) -> object:
    """A value other than the default, in range."""
    metadata, default = setting.field.metadata, setting.default
    kinds = getattr(setting.hint, "__args__", (setting.hint,))
    if isinstance(kinds[0], type) and issubclass(kinds[0], enum.Enum):
        return next(choice for choice in kinds[0] if choice is not default)
    if isinstance(metadata["available"], tuple):
        return next(text for text in metadata["available"] if text != default)
    if bool in kinds:
        return default is not True
    if metadata["low"] is not None:
        return next(number for number in (metadata["low"], metadata["high"]) if number != default)
    return ["x"] if getattr(setting.hint, "__origin__", None) is list else "x"


def message_of(build: Compose, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        build(overrides)
    return str(caught.value)


ONLY_SIMULATED = [setting for setting in all_settings().values() if setting.field.metadata["executors"] == IN_SIM]


@pytest.mark.parametrize("setting", ONLY_SIMULATED, ids=lambda setting: setting.name)
def test_a_setting_that_only_the_simulator_honours_is_refused_with_its_value(setting: Setting) -> None:
    config, value = resolve(RunConfig()), another_value(setting)
    *nodes, leaf = setting.name.split(".")
    setattr(reduce(getattr, nodes, config), leaf, value)
    lines = executor_contradictions(config)
    assert (
        f"{setting.name}={show(value)} and executor=device: this version honours {setting.name} only with executor=sim."
        in lines
    )


def test_every_setting_says_who_honours_it() -> None:
    kinds = {setting.field.metadata["executors"] for setting in all_settings().values()}
    assert {BOTH, IN_SIM} <= kinds
    assert len(ONLY_SIMULATED) > 40


# settings, what the message names of them, and what it says would work
CONTRADICTIONS: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    # the machine
    (("executor=device", "hardware=rtx5090"), ("hardware=rtx5090", "executor=device"), "hardware=local, or"),
    (("memory_model=strata_0_1_41",), ("memory_model=strata_0_1_41", "executor=device"), "need executor=sim"),
    (("model=qwen38_flash",), ("model=qwen38_flash", "executor=device"), "Give model.path=FILE.gguf"),
    (("model=qwen38_flash", "pipeline=logits", IDS), ("model=qwen38_flash", "pipeline=logits"), "model.path=FILE.gguf"),
    (("pipeline=grid", "grid.axes=['spec.window=1,2']"), ("pipeline=grid", "executor=device"), "hardware=rtx5090"),
    (("hardware.vram_mib=100", "hardware.vram_reserve_mib=100"),
     ("hardware.vram_reserve_mib=100", "hardware.vram_mib=100"), "Lower the reserve"),
    (("hardware.vram_mib=700",), ("hardware.vram_reserve_mib=700", "hardware.vram_mib=700"), "Lower the reserve"),
    (("hardware.ram_mib=512", "hardware.ram_reserve_mib=512"), ("ram_reserve_mib=512", "ram_mib=512"),
     "Lower the reserve"),
    (("engine.mem_fraction=0.5", "hardware.vram_mib=4096"), ("engine.mem_fraction=0.5", "hardware.vram_mib=4096"),
     "Leave one at auto"),
    (("engine.mem_fraction=0.5", "engine.platform=cpu"), ("engine.mem_fraction=0.5", "engine.platform=cpu"),
     "Leave one out"),
    # policies
    (("policy=auto",), ("policy=auto", "executor=device"), "Search with executor=sim, or name a policy"),
    *(((f"policy.{name}.enabled=auto",), (f"policy.{name}.enabled=auto", "policy=baseline"),
       "Give true or false, or choose policy=auto") for name in SEARCHED),
    *(((f"policy.{name}.enabled=true", f"pipeline={pipeline}", *given),
       (f"policy.{name}.enabled=true", f"pipeline={pipeline}"), "Leave one out")
      for name in (*SEARCHED, "vram_elastic")
      for pipeline, *given in (("logits", IDS), ("parity",), ("inspect",))),
    (("policy=kv_grow", "kv.grow.enabled=false"), ("kv.grow.enabled=false", "policy.kv_grow.enabled=true"),
     "Leave kv.grow.enabled at auto"),
    (("kv.grow.enabled=true", "policy.kv_grow.enabled=false"), ("kv.grow.enabled=true", "policy.kv_grow.enabled=false"),
     "policy=kv_grow switches it on"),
    (("policy=own_prefill", "prefill.own=off"), ("prefill.own=off", "policy.prefill_own.enabled=true"),
     "Leave prefill.own at auto"),
    (("policy=conversation_budget", "conversation.budget_mib=0"),
     ("policy.conversation_budget.enabled=true", "conversation.budget_mib=0"), "Give conversation.budget_mib"),
    (("policy=kv_grow", "kv.resident_cells=64"), ("kv.resident_cells=64", "policy.kv_grow.enabled=true"),
     "Leave one of them out"),
    (("kv.grow.enabled=true", "kv.resident_cells=64"), ("kv.resident_cells=64", "kv.grow.enabled=true"),
     "Leave one of them out"),
    (("upstream.batch=2",), ("upstream.batch=2", "executor=device"), "only with executor=sim"),
    (("upstream.batch=2",), ("upstream.batch=2", "policy.compat=native"), "Add policy.compat=upstream"),
    # jobs
    (("pipeline=reproduce",), ("pipeline=reproduce", "reproduce=NAME"), "reproduce=kv_grow"),
    (("grid.axes=['spec.window=1,2']",), ("grid.axes=", "pipeline=generate"), "Leave one out"),
    (("pipeline=logits",), ("pipeline=logits", "workload="), "Add workload.token_ids="),
    (("pipeline=logits", IDS, "workload.requests=2"), ("workload.requests=2", "pipeline=logits"), "Leave requests out"),
    (("pipeline=logits", IDS, "workload.temperature=1"), ("workload.temperature=1", "pipeline=logits"),
     "Leave temperature out"),
    (("spec.window=1", "spec.min_p=0.5"), ("spec.window=1", "spec.min_p=0.5"), "Leave one out"),
    (("workload.batching=step",), ("workload.batching=step", "pipeline=generate"), "pipeline=logits"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "named", "works"), CONTRADICTIONS, ids=[" ".join(case[0]) for case in CONTRADICTIONS]
)
def test_two_settings_that_the_device_cannot_honour_together_are_both_named_with_what_works(
    given: tuple[str, ...], named: tuple[str, ...], works: str, compose_config: Compose
) -> None:
    message = message_of(compose_config, *given)
    lines = [line for line in message.splitlines() if all(name in line for name in named)]
    assert lines, message
    assert any(works in line for line in lines), message

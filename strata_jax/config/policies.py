"""Policy switches against the settings they steer; what upstream refuses beyond that is in `strata_jax/policies/`."""

from __future__ import annotations

from itertools import islice

from strata_jax.config.checks import show, value_of
from strata_jax.config.choices import Compat, ExecutorName, OwnBuffers, PipelineName
from strata_jax.config.executors import executor_of, has_strata_memory
from strata_jax.config.fields import AUTO
from strata_jax.config.keys import all_settings
from strata_jax.config.schema import RunConfig

SWITCHES = ("prefill_own", "conversation_budget", "head_alias", "kv_grow", "vram_elastic")
# nodes of what a published row says itself
ROW_NODES = (
    "hardware", "ram", "model", "quant", "kv", "cache", "prefill", "policy", "conversation", "spec", "upstream",
    "workload", "memory_model",
)  # fmt: skip
ALWAYS_HONOURED = ("upstream.mtp", "upstream.token_graph")  # they change what is allocated, also natively


def enabled_policies(config: RunConfig) -> list[str]:
    """Return the names of the policies that are switched on."""
    return [name for name in SWITCHES if getattr(config.policy, name).enabled is True]


def policy_contradictions(config: RunConfig) -> list[str]:
    """Return a message for every pair of policy settings that cannot both hold."""
    return _switches_and_nodes(config) + _memory_model(config) + _on_device(config) + _inert(config) + _jobs(config)


def _switches_and_nodes(config: RunConfig) -> list[str]:
    problems = []
    policy, grow = config.policy, config.kv.grow.enabled
    if isinstance(grow, bool) and isinstance(policy.kv_grow.enabled, bool) and grow != policy.kv_grow.enabled:
        problems.append(
            f"kv.grow.enabled={show(grow)} and policy.kv_grow.enabled={show(policy.kv_grow.enabled)}: they say opposite"
            " things. Leave kv.grow.enabled at auto; policy=kv_grow switches it on."
        )
    own = config.prefill.own
    given_own = isinstance(policy.prefill_own.enabled, bool) and own is not OwnBuffers.auto
    if given_own and (own is OwnBuffers.on) != policy.prefill_own.enabled:
        problems.append(
            f"prefill.own={own.name} and policy.prefill_own.enabled={show(policy.prefill_own.enabled)}: they say"
            " opposite things. Leave prefill.own at auto; policy=own_prefill switches it on."
        )
    if policy.conversation_budget.enabled is True and config.conversation.budget_mib == 0:
        problems.append(
            "policy.conversation_budget.enabled=true and conversation.budget_mib=0: there is no budget to set aside."
            " Give conversation.budget_mib, such as 2048."
        )
    wanted_mib, elastic = policy.vram_elastic.wanted_mib, policy.vram_elastic.enabled or config.upstream.vram_elastic
    if wanted_mib is not None and not elastic:
        problems.append(
            f"policy.vram_elastic.wanted_mib={wanted_mib} and policy.vram_elastic.enabled=false: no part of the cache"
            " can be given back. Set policy.vram_elastic.enabled=true, or leave policy.vram_elastic.wanted_mib out."
        )
    searched = [name for name in SWITCHES if getattr(policy, name).enabled == AUTO]
    if searched and policy.name != AUTO:
        problems.append(
            f"policy.{searched[0]}.enabled=auto and policy={policy.name}: only policy=auto searches. Give true or"
            " false, or choose policy=auto."
        )
    return problems


def _on_device(config: RunConfig) -> list[str]:
    if executor_of(config) is not ExecutorName.device:
        return []
    problems = []
    if config.policy.name == AUTO or any(getattr(config.policy, name).enabled == AUTO for name in SWITCHES):
        problems.append(
            "policy=auto and executor=device: the search runs on the simulator. Search with executor=sim, or name a"
            " policy."
        )
    asked = [f"policy.{name}.enabled=true" for name in enabled_policies(config)]
    if asked and config.pipeline.name not in (PipelineName.generate, PipelineName.plan):
        problems.append(
            f"{asked[0]} and pipeline={config.pipeline.name.name}: policies move memory while text is generated. Leave"
            " one out."
        )
    switches = {"policy.kv_grow.enabled": config.policy.kv_grow.enabled, "kv.grow.enabled": config.kv.grow.enabled}
    grows = next((name for name, value in switches.items() if value is True), None)
    if config.kv.resident_cells and grows is not None:
        problems.append(
            f"kv.resident_cells={config.kv.resident_cells:,} and {grows}=true: the cells on the device are a window of"
            " the sequence or grow with it. Leave one of them out."
        )
    return problems


def _memory_model(config: RunConfig) -> list[str]:
    if has_strata_memory(config) or executor_of(config) is not ExecutorName.sim:
        return []
    asked = [f"policy.{name}.enabled=true" for name in enabled_policies(config)]
    asked += ["policy=auto"] if config.policy.name == AUTO else []
    asked += [f"kv.resident_cells={config.kv.resident_cells:,}"] if config.kv.resident_cells else []
    asked += ["prefill.borrow=true"] if config.prefill.borrow is True else []
    return [
        f"{setting} and memory_model=xla: this version moves memory only under strata memory models. Use"
        " memory_model=strata_0_1_41."
        for setting in asked
    ]


def _inert(config: RunConfig) -> list[str]:
    if config.policy.compat is Compat.upstream:
        return []
    return [
        f"{setting.name}={show(value_of(config, setting.name))} and policy.compat=native: the switch only expresses"
        " what the original refuses. Add policy.compat=upstream, or leave it out."
        for setting in all_settings().values()
        if setting.name.startswith("upstream.")
        and setting.name not in ALWAYS_HONOURED
        and value_of(config, setting.name) != setting.default
    ]


def _jobs(config: RunConfig) -> list[str]:
    problems = []
    pipeline, grid = config.pipeline.name, config.grid
    if pipeline is PipelineName.reproduce and config.reproduce.name is None:
        problems.append("pipeline=reproduce and no reproduce=NAME: say which tables, such as reproduce=kv_grow.")
    if pipeline is not PipelineName.reproduce and config.reproduce.name is not None:
        problems.append(
            f"reproduce={config.reproduce.name} and pipeline={pipeline.name}: a reproduction has its own pipeline."
            " Leave pipeline out."
        )
    if pipeline is PipelineName.reproduce and config.reproduce.name is not None:
        given = (
            f"{setting.name}={show(value_of(config, setting.name))}"
            for setting in all_settings().values()
            if setting.name.split(".")[0] in ROW_NODES and value_of(config, setting.name) != setting.default
        )
        problems += [
            f"{text} and reproduce={config.reproduce.name}: published rows bring their own machine, model, workload and"
            " policy. Leave such settings out."
            for text in islice(given, 1)
        ]
    if pipeline is PipelineName.grid and not grid.axes:
        problems.append("pipeline=grid and grid.axes=[]: nothing varies. Give axes, or start from experiment=grid.")
    if pipeline is not PipelineName.grid and grid.axes:
        problems.append(
            f"grid.axes={show(grid.axes)} and pipeline={pipeline.name}: only pipeline=grid reads them. Leave one out."
        )
    return problems

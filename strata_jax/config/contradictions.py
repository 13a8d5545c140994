"""Settings that cannot both hold; each message names both sides. Nothing here looks at a device or a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from strata_jax.config.cache import cache_contradictions
from strata_jax.config.checks import join_problems, show, value_problems
from strata_jax.config.choices import Batching, ExecutorName, PipelineName, Platform
from strata_jax.config.executors import executor_contradictions, executor_of
from strata_jax.config.fields import AUTO
from strata_jax.config.policies import policy_contradictions
from strata_jax.config.schema import RunConfig
from strata_jax.errors import ConfigError

# The keys that say what is asked; at most one of them may be given.
INPUT_SOURCES = ("prompt", "prompt_file", "messages_file", "token_ids", "token_ids_file", "prompt_tokens")
VRAM_RESERVE_MIB = 700  # for the desktop and other programs, when nothing is given


def check(config: RunConfig) -> None:
    """Raise one ConfigError that lists every setting out of range, not available or in contradiction with another."""
    problems = value_problems(config) + contradictions(config)
    if problems:
        raise ConfigError(join_problems(problems))


def contradictions(config: RunConfig) -> list[str]:
    """Return a message for every pair of settings that cannot both hold."""
    rules: Iterable[Callable[[RunConfig], list[str]]] = (
        _input_contradictions,
        _sampling_contradictions,
        _pipeline_contradictions,
        _machine_contradictions,
        executor_contradictions,
        cache_contradictions,
        policy_contradictions,
    )
    return [problem for rule in rules for problem in rule(config)]


def given_sources(config: RunConfig) -> list[str]:
    """Return the dotted names of the workload's input keys that have a value."""
    return [f"workload.{key}" for key in INPUT_SOURCES if getattr(config.workload, key) is not None]


def _input_contradictions(config: RunConfig) -> list[str]:
    problems: list[str] = []
    workload = config.workload
    sources = given_sources(config)
    if len(sources) > 1:
        problems.append(f"{' and '.join(sources)} are both given; a workload has one input. Keep one of them.")
    if sources and workload.records is not None:
        problems.append(
            f"{sources[0]} and workload.records={workload.records} are both given;"
            " records only count in a document workload. Leave one out."
        )
    bare = [name for name in sources if name.startswith("workload.token_ids")]
    if not workload.apply_chat_template:
        if workload.messages_file is not None:
            problems.append(
                "workload.messages_file and workload.apply_chat_template=false: messages need the chat template."
                " Leave apply_chat_template at true, or give the text as workload.prompt."
            )
        bare.append("workload.apply_chat_template=false")
    if bare:
        for key in ("enable_thinking", "reasoning_effort"):
            if getattr(workload, key):
                problems.append(
                    f"workload.{key}={show(getattr(workload, key))} and {bare[0]}: {key} is an option of the chat"
                    " template, which is not applied here. Leave one out."
                )
    for key in ("token_ids", "forced_token_ids"):
        ids = getattr(workload, key)
        if ids is not None and not ids:
            problems.append(f"workload.{key}=[]: give at least one token id, or null.")
        if ids and min(ids) < 0:
            problems.append(f"workload.{key}: token ids are not negative, found {min(ids)}.")
    for key in ("prompt", "prompt_file", "messages_file", "token_ids_file"):
        if getattr(workload, key) == "":
            problems.append(f"workload.{key}='': give a text that is not empty, or null.")
    if "" in workload.stop:
        problems.append("workload.stop: an empty text would stop at once. Leave it out.")
    max_context = config.model.max_context
    if isinstance(max_context, int) and workload.token_ids and len(workload.token_ids) > max_context:
        problems.append(
            f"workload.token_ids has {len(workload.token_ids):,} ids and model.max_context={max_context:,};"
            f" raise max_context to {len(workload.token_ids) + 1:,} or more."
        )
    return problems


def _sampling_contradictions(config: RunConfig) -> list[str]:
    problems: list[str] = []
    workload = config.workload
    if workload.temperature == 0.0:
        for key, neutral in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            value = getattr(workload, key)
            if value != neutral:
                problems.append(
                    f"workload.{key}={show(value)} and workload.temperature=0: greedy decoding takes the"
                    " likeliest token,"
                    f" so {key} has no effect. Set a temperature above 0 or leave {key} out."
                )
    if workload.forced_token_ids is not None:
        count = len(workload.forced_token_ids)
        if workload.temperature != 0.0:
            problems.append(
                f"workload.forced_token_ids and workload.temperature={workload.temperature}: forced tokens are"
                " not sampled."
                " Leave one out."
            )
        if isinstance(workload.max_output_tokens, int) and workload.max_output_tokens != count:
            problems.append(
                f"workload.forced_token_ids has {count:,} ids and"
                f" workload.max_output_tokens={workload.max_output_tokens:,};"
                " leave max_output_tokens at auto."
            )
        for key in ("stop", "ignore_eos"):
            if getattr(workload, key):
                problems.append(
                    f"workload.forced_token_ids and workload.{key}={show(getattr(workload, key))}: a forced"
                    f" continuation runs to its end. Leave {key} out."
                )
    return problems


def _pipeline_contradictions(config: RunConfig) -> list[str]:
    problems: list[str] = []
    workload, pipeline = config.workload, config.pipeline.name
    if workload.batching is not Batching.chunk and pipeline is not PipelineName.logits:
        problems.append(
            f"workload.batching={workload.batching.name} and pipeline={pipeline.name}: batching only counts for"
            " pipeline=logits."
        )
    if pipeline is PipelineName.logits:
        if not given_sources(config):
            problems.append(
                f"pipeline=logits and workload={workload.name}: logits are computed for one input. Add"
                " workload.token_ids=[...], workload.token_ids_file=FILE or workload.prompt=TEXT."
            )
        if workload.forced_token_ids is not None:
            problems.append(
                "pipeline=logits and workload.forced_token_ids: nothing is generated. Put all ids in"
                " workload.token_ids."
            )
    if pipeline in (PipelineName.inspect, PipelineName.logits, PipelineName.parity) and workload.requests != 1:
        problems.append(
            f"workload.requests={workload.requests} and pipeline={pipeline.name}: only pipeline=generate runs the"
            " requests more than once. Leave requests out."
        )
    if pipeline in (PipelineName.logits, PipelineName.inspect):
        for key, neutral in (("temperature", 0.0), ("stop", []), ("ignore_eos", False)):
            value = getattr(workload, key)
            if value != neutral:
                problems.append(
                    f"workload.{key}={show(value)} and pipeline={pipeline.name}: nothing is generated, so {key} has no"
                    f" effect. Leave {key} out."
                )
    if config.spec.window == 1 and config.spec.min_p != 0.0:
        problems.append(
            f"spec.window=1 and spec.min_p={config.spec.min_p}: without drafts min_p has no effect. Leave one out."
        )
    if config.model.path is not None and config.model.seed != 0:
        problems.append(
            f"model.path={show(config.model.path)} and model.seed={config.model.seed}: the seed makes the weights of a"
            " built-in model. Leave one out."
        )
    return problems


def _machine_contradictions(config: RunConfig) -> list[str]:
    problems: list[str] = []
    hardware, engine = config.hardware, config.engine
    reserve_mib = VRAM_RESERVE_MIB if isinstance(hardware.vram_reserve_mib, str) else hardware.vram_reserve_mib
    planner_decides = executor_of(config) is ExecutorName.sim and hardware.vram_reserve_mib == AUTO
    if isinstance(hardware.vram_mib, int) and reserve_mib >= hardware.vram_mib and not planner_decides:
        problems.append(
            f"hardware.vram_reserve_mib={reserve_mib:,} and hardware.vram_mib={hardware.vram_mib:,}:"
            " the reserve leaves no device memory. Lower the reserve."
        )
    if (
        isinstance(hardware.ram_mib, int)
        and isinstance(hardware.ram_reserve_mib, int)
        and hardware.ram_reserve_mib >= hardware.ram_mib
    ):
        problems.append(
            f"hardware.ram_reserve_mib={hardware.ram_reserve_mib:,} and hardware.ram_mib={hardware.ram_mib:,}:"
            " the reserve leaves no memory. Lower the reserve."
        )
    if engine.mem_fraction != AUTO:
        if hardware.vram_mib != AUTO:
            problems.append(
                f"engine.mem_fraction={show(engine.mem_fraction)} and hardware.vram_mib={hardware.vram_mib}: both"
                " set how"
                " much device memory is used. Leave one at auto."
            )
        if engine.platform is Platform.cpu:
            problems.append(
                f"engine.mem_fraction={show(engine.mem_fraction)} and engine.platform=cpu: the fraction is one of"
                " a GPU's"
                " memory. Leave one out."
            )
    return problems

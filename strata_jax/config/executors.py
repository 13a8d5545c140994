"""Who carries a run out, and the settings that the other executor does not honour."""

from __future__ import annotations

from strata_jax.config.checks import show, value_of
from strata_jax.config.choices import ExecutorName, KvType, MemoryModelName, PipelineName
from strata_jax.config.fields import BOTH
from strata_jax.config.keys import all_settings
from strata_jax.config.schema import RunConfig

LOCAL = "local"
FILE_MODELS = ("builtin_tiny",)  # presets that are files; the others are geometry without weights
SYNTHETIC_MODELS = ("synthetic_full", "synthetic_small")  # ... but for these, whose weights are made as they are read
NEED_WEIGHTS = (PipelineName.inspect, PipelineName.logits, PipelineName.parity)
NEED_FILE = (PipelineName.inspect, PipelineName.parity)
OF_PRESETS = {"ram.tier": ("conversation_budget", "resident")}  # what a preset of policies sets for where it counts
STRATA_KV_TYPES = (KvType.f16, KvType.int8, KvType.k8v4, KvType.q4_0)


def executor_of(config: RunConfig) -> ExecutorName:
    """Return who carries the run out: as given, else the device on this machine and the simulator for any other."""
    if config.executor.name is not ExecutorName.auto:
        return config.executor.name
    return ExecutorName.device if config.hardware.name == LOCAL else ExecutorName.sim


def is_preset(config: RunConfig) -> bool:
    """Say whether the model is a geometry without a file."""
    return config.model.path is None and config.model.name not in FILE_MODELS


def is_synthetic(config: RunConfig) -> bool:
    """Say whether the model is a published shape with random weights."""
    return config.model.path is None and config.model.name in SYNTHETIC_MODELS


def has_strata_memory(config: RunConfig) -> bool:
    """Say whether the memory model is one of the original's."""
    return config.memory_model.name is not MemoryModelName.xla


def executor_contradictions(config: RunConfig) -> list[str]:
    """Return a message for every setting that the run's executor does not honour."""
    pipeline = config.pipeline.name
    if pipeline in (PipelineName.reproduce, PipelineName.calibrate):
        return _own_scenarios(config)
    executor = executor_of(config)
    problems = _not_honoured(config, executor) + _of_synthetic_models(config)
    if is_synthetic(config) and pipeline in NEED_FILE:
        problems.append(
            f"model={config.model.name} and pipeline={pipeline.name}: there is no file to look into. Give"
            " model.path=FILE.gguf."
        )
    elif (
        is_preset(config) and not is_synthetic(config) and (executor is ExecutorName.device or pipeline in NEED_WEIGHTS)
    ):
        problems.append(
            f"model={config.model.name} and {_cause(config, pipeline)}: the preset has a geometry and no weights. Give"
            " model.path=FILE.gguf, or simulate with executor=sim."
        )
    if executor is ExecutorName.device:
        return problems + _on_device(config)
    return problems + _in_sim(config)


def preset_notes(config: RunConfig) -> list[str]:
    """Return a line for every setting that a preset brings along and that has no effect on the run's executor."""
    if executor_of(config) is not ExecutorName.device:
        return []
    return [
        f"{name}={value} of policy={preset} has no effect here: on the device all experts are in host memory"
        for name, (preset, value) in OF_PRESETS.items()
        if config.policy.name == preset and show(value_of(config, name)) == value
    ]


def _of_synthetic_models(config: RunConfig) -> list[str]:
    """Return a message for every setting of synthetic models that is given for another one."""
    if is_synthetic(config):
        return []
    names = [
        name
        for name in all_settings()
        if (name in ("model.layers", "model.experts") or name.startswith("model.routing."))
        and value_of(config, name) != all_settings()[name].default
    ]
    model = config.model.path or config.model.name
    return [
        f"{name}={show(value_of(config, name))} and model={model}: only synthetic models can be given it. Choose model="
        f"{' or model='.join(SYNTHETIC_MODELS)}, or leave it out."
        for name in names
    ]


def _not_honoured(config: RunConfig, executor: ExecutorName) -> list[str]:
    problems = []
    for setting in all_settings().values():
        executors = setting.field.metadata["executors"]
        value = value_of(config, setting.name)
        if OF_PRESETS.get(setting.name) == (config.policy.name, show(value)):
            continue
        if executors != BOTH and executor.name not in executors and value != setting.default:
            problems.append(
                f"{setting.name}={show(value)} and executor={executor.name}: this version honours {setting.name} only"
                f" with executor={executors[0]}."
            )
    return problems


def _on_device(config: RunConfig) -> list[str]:
    problems = []
    if config.hardware.name != LOCAL:
        problems.append(
            f"hardware={config.hardware.name} and executor=device: the device is the one in this machine. Use"
            " hardware=local, or executor=sim."
        )
    if has_strata_memory(config):
        problems.append(
            f"memory_model={config.memory_model.name.name} and executor=device: what runs here allocates as XLA does."
            " In this version strata memory models need executor=sim."
        )
    if config.pipeline.name is PipelineName.grid:
        problems.append(
            "pipeline=grid and executor=device: a grid is made of simulations. Choose a card, such as"
            " hardware=rtx5090, or executor=sim."
        )
    return problems


def _in_sim(config: RunConfig) -> list[str]:
    problems = []
    pipeline = config.pipeline.name
    if pipeline in (PipelineName.logits, PipelineName.parity):
        problems.append(
            f"pipeline={pipeline.name} and executor=sim{_why_sim(config)}: a simulation computes no logits. Use"
            " executor=device and hardware=local."
        )
    if has_strata_memory(config) and config.kv.type not in STRATA_KV_TYPES:
        problems.append(
            f"kv.type={config.kv.type.name} and memory_model={config.memory_model.name.name}: it prices"
            f" {', '.join(kind.name for kind in STRATA_KV_TYPES)}. Choose one of these, or memory_model=xla."
        )
    return problems


def _own_scenarios(config: RunConfig) -> list[str]:
    pipeline = config.pipeline.name
    if pipeline is PipelineName.calibrate and config.hardware.name != LOCAL:
        return [
            f"pipeline=calibrate and hardware={config.hardware.name}: this machine is what can be measured. Leave"
            " hardware at local."
        ]
    return []


def _cause(config: RunConfig, pipeline: PipelineName) -> str:
    return f"pipeline={pipeline.name}" if pipeline in NEED_WEIGHTS else f"executor=device{_why_device(config)}"


def _why_device(config: RunConfig) -> str:
    return " (auto, on hardware=local)" if config.executor.name is ExecutorName.auto else ""


def _why_sim(config: RunConfig) -> str:
    return f" (auto, for hardware={config.hardware.name})" if config.executor.name is ExecutorName.auto else ""

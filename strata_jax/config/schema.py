"""The schema of every setting: type, default, range, unit and help text.

This is the only list of settings. `checks.py` reads the ranges, `help.py` prints the help texts, `keys.py` suggests
names. Plain dataclasses, because OmegaConf turns frozen ones into read-only nodes that a group option cannot be merged
into. A setting that only one executor honours says so in `executors`; `checks.py` makes the other refuse it.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata_jax.config.behaviour import (
    CacheConfig,
    ConversationConfig,
    KvConfig,
    PolicyConfig,
    PrefillConfig,
    SpecConfig,
    UpstreamConfig,
)
from strata_jax.config.choices import (
    Batching,
    Compat,
    DecideAt,
    ExecutorName,
    Kernels,
    KvType,
    MemoryModelName,
    OwnBuffers,
    PipelineName,
    Platform,
    Replacement,
    Tier,
)
from strata_jax.config.fields import AUTO, AUTO_AT_MOST, node
from strata_jax.config.job import (
    GridConfig,
    PipelineConfig,
    ReportConfig,
    ReproduceConfig,
    SweepConfig,
    WorkloadConfig,
)
from strata_jax.config.machine import (
    EngineConfig,
    ExecutorConfig,
    HardwareConfig,
    MemoryModelConfig,
    ModelConfig,
    QuantConfig,
    RamConfig,
)

__all__ = [
    "AUTO",
    "AUTO_AT_MOST",
    "Batching",
    "CacheConfig",
    "Compat",
    "ConversationConfig",
    "DecideAt",
    "EngineConfig",
    "ExecutorConfig",
    "ExecutorName",
    "GridConfig",
    "HardwareConfig",
    "Kernels",
    "KvConfig",
    "KvType",
    "MemoryModelConfig",
    "MemoryModelName",
    "ModelConfig",
    "OwnBuffers",
    "PipelineConfig",
    "PipelineName",
    "Platform",
    "PolicyConfig",
    "PrefillConfig",
    "QuantConfig",
    "RamConfig",
    "Replacement",
    "ReportConfig",
    "ReproduceConfig",
    "RunConfig",
    "SpecConfig",
    "SweepConfig",
    "Tier",
    "UpstreamConfig",
    "WorkloadConfig",
]


@dataclass
class RunConfig:
    hardware: HardwareConfig = node(HardwareConfig, "the machine to plan for")
    ram: RamConfig = node(RamConfig, "experts in host memory")
    model: ModelConfig = node(ModelConfig, "the model file or preset")
    quant: QuantConfig = node(QuantConfig, "weight types")
    kv: KvConfig = node(KvConfig, "keys and values")
    cache: CacheConfig = node(CacheConfig, "expert slots on the device")
    prefill: PrefillConfig = node(PrefillConfig, "reading the prompt")
    policy: PolicyConfig = node(PolicyConfig, "what moves while running")
    conversation: ConversationConfig = node(ConversationConfig, "parked conversations")
    spec: SpecConfig = node(SpecConfig, "drafts of the MTP block")
    upstream: UpstreamConfig = node(UpstreamConfig, "switches of the original engine, only to express what it refuses")
    workload: WorkloadConfig = node(WorkloadConfig, "what is asked of the model")
    executor: ExecutorConfig = node(ExecutorConfig, "device or simulator")
    engine: EngineConfig = node(EngineConfig, "JAX and the arena")
    memory_model: MemoryModelConfig = node(MemoryModelConfig, "prices of the memory planner")
    pipeline: PipelineConfig = node(PipelineConfig, "which pipeline runs")
    reproduce: ReproduceConfig = node(ReproduceConfig, "published tables to repeat")
    grid: GridConfig = node(GridConfig, "many simulations in one job")
    sweep: SweepConfig = node(SweepConfig, "runs with -m")
    report: ReportConfig = node(ReportConfig, "pictures")

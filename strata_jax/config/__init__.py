"""Settings: the schema and its checks. `load.py`, which is not imported here, leads from Hydra to a `RunConfig`."""

from strata_jax.config.checks import show
from strata_jax.config.contradictions import check, given_sources
from strata_jax.config.keys import all_settings, nearest_name
from strata_jax.config.schema import (
    AUTO,
    Batching,
    CacheConfig,
    EngineConfig,
    HardwareConfig,
    KvConfig,
    KvType,
    MemoryModelName,
    ModelConfig,
    PipelineName,
    Platform,
    PrefillConfig,
    RunConfig,
    SpecConfig,
    WorkloadConfig,
)

__all__ = [
    "AUTO",
    "Batching",
    "CacheConfig",
    "EngineConfig",
    "HardwareConfig",
    "KvConfig",
    "KvType",
    "MemoryModelName",
    "ModelConfig",
    "PipelineName",
    "Platform",
    "PrefillConfig",
    "RunConfig",
    "SpecConfig",
    "WorkloadConfig",
    "all_settings",
    "check",
    "given_sources",
    "nearest_name",
    "show",
]

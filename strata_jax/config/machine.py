"""Settings of the machine, the model and who computes."""

from __future__ import annotations

from dataclasses import dataclass

from strata_jax.config.choices import ExecutorName, Kernels, MemoryModelName, Platform, Tier
from strata_jax.config.fields import AUTO, IN_SIM, ON_DEVICE, node, setting

MAX_MIB = 16_777_216


@dataclass
class HardwareConfig:
    name: str = setting("local", "hardware profile; local: this machine")
    profile_file: str | None = setting(
        None, "profile written by pipeline=calibrate; takes the place of the named one", executors=IN_SIM
    )
    vram_mib: int | str = setting(
        AUTO,
        "device memory; smaller than the real one lets a card stand in for a smaller card",
        unit="MiB",
        low=1,
        high=MAX_MIB,
    )
    vram_reserve_mib: int | str = setting(
        AUTO,
        "device memory left free for the desktop and other programs; auto: 700, less on small cards where strata"
        " memory models allow it, 1,024 or more for a lent head where no driver pages memory",
        unit="MiB",
        low=0,
        high=MAX_MIB,
    )
    vram_taken_mib: int | str = setting(
        AUTO,
        "device memory that other programs and the driver hold; auto: the profile's",
        unit="MiB",
        low=0,
        high=MAX_MIB,
        executors=IN_SIM,
    )
    ram_mib: int | str = setting(
        AUTO,
        "host memory; auto: the profile's, on this machine the smaller of its memory and the container's limit",
        unit="MiB",
        low=64,
        high=1_073_741_824,
    )
    ram_available_mib: int | str = setting(
        AUTO,
        "host memory available at the start, for RAM pressure; auto: all but what the profile says is in use",
        unit="MiB",
        low=0,
        high=1_073_741_824,
        executors=IN_SIM,
    )
    ram_reserve_mib: int | str = setting(
        AUTO,
        "host memory left free; auto: a quarter of it, 4,864 at most",
        unit="MiB",
        low=0,
        high=1_073_741_824,
    )
    cores: int | str = setting(AUTO, "CPU cores that compute experts", low=1, high=4096, executors=IN_SIM)
    os: str = setting(
        AUTO, "operating system; auto: the profile's", available=(AUTO, "linux", "windows"), executors=IN_SIM
    )
    os_effects: bool = setting(
        False, "slow down where Windows would move device memory out; off: a warning only", executors=IN_SIM
    )
    pcie_gb_s: float | int | str = setting(
        AUTO, "host to device, pinned memory; auto: the profile's", unit="GB/s", low=0.1, high=1000, executors=IN_SIM
    )
    hbm_gb_s: float | int | str = setting(
        AUTO, "device memory; auto: the profile's", unit="GB/s", low=1, high=100_000, executors=IN_SIM
    )
    ram_gb_s: float | int | str = setting(
        AUTO, "host memory; auto: the profile's", unit="GB/s", low=1, high=10_000, executors=IN_SIM
    )
    file_gb_s: float | int | str = setting(
        AUTO, "expert files to RAM; auto: the profile's", unit="GB/s", low=0.01, high=1000, executors=IN_SIM
    )
    pinned_share: float | int | str = setting(
        AUTO, "share of the experts in pinned memory; auto: the profile's", low=0, high=1, executors=IN_SIM
    )


@dataclass
class RamConfig:
    tier: Tier = setting(
        Tier.auto,
        "where experts without a slot live; arena: all in RAM; resident: files and RAM copies; mmap: files; auto:"
        " arena if it fits",
        executors=IN_SIM,
    )
    resident_budget_mib: int | str = setting(
        AUTO, "most RAM copies in tier resident", unit="MiB", low=0, high=1_073_741_824, executors=IN_SIM
    )
    resident_headroom_mib: int = setting(
        4096, "RAM that resident copies leave free", unit="MiB", low=0, high=1_073_741_824, executors=IN_SIM
    )


@dataclass
class RoutingConfig:
    zipf: float | int | str = setting(
        AUTO,
        "popularity of a synthetic model's experts by rank, exponent; auto: the curve of published hit rates",
        low=0,
        high=4,
        executors=ON_DEVICE,
    )
    drift: float = setting(
        0.0,
        "share of a layer's experts that change places from topic to topic, in a synthetic model",
        low=0,
        high=1,
        executors=ON_DEVICE,
    )


@dataclass
class ModelConfig:
    name: str = setting("builtin_tiny", "geometry preset used when model.path is not given")
    path: str | None = setting(None, "a GGUF file (any shard of a split one); takes the place of the preset")
    max_context: int | str = setting(
        AUTO,
        "K/V cells to reserve; auto: what the workload needs; with strata memory models the model's whole context",
        unit="tokens",
        low=8,
        high=16_777_216,
    )
    seed: int = setting(0, "seed of the weights of a built-in or synthetic model", low=0, high=4_294_967_295)
    layers: int | str = setting(AUTO, "layers of a synthetic model; auto: as the preset has", low=4, high=1023)
    experts: int | str = setting(
        AUTO, "experts in each layer of a synthetic model; auto: as the preset has", low=2, high=65_536
    )
    routing: RoutingConfig = node(RoutingConfig, "how a synthetic model's look-ups are spread over its experts")


@dataclass
class QuantConfig:
    name: str = setting("file", "weight types of a preset; file: as the model file has them")
    head: str = setting(AUTO, "type of a preset's output head; auto: as the quantisation has it")
    dense: str = setting(AUTO, "type of a preset's dense weights; auto: as the quantisation has it")
    ple: str = setting(AUTO, "type of a preset's n-gram table; auto: as the quantisation has it")


@dataclass
class ExecutorConfig:
    name: ExecutorName = setting(
        ExecutorName.auto, "who carries the plan out; auto: device on this machine, sim for any other card"
    )
    seed: int = setting(0, "seed of drafts' luck and noise", low=0, high=4_294_967_295, executors=IN_SIM)
    noise: float = setting(
        0.0, "spread of simulated times, standard deviation as a share", low=0, high=0.5, executors=IN_SIM
    )
    routing_trace: str | None = setting(
        None, "recorded routing to replay instead of the expert popularity model", executors=IN_SIM
    )


@dataclass
class EngineConfig:
    platform: Platform = setting(
        Platform.auto, "what JAX computes on; auto: a GPU if there is one, else the CPU", executors=ON_DEVICE
    )
    mem_fraction: float | int | str = setting(
        AUTO,
        "share of the device's memory that JAX may take; auto: (vram - reserve) / vram. "
        "The vendor libraries need some memory outside of this share",
        low=0.01,
        high=0.98,
        executors=ON_DEVICE,
    )
    preallocate: bool = setting(
        True, "take the device memory at the start instead of growing into it", executors=ON_DEVICE
    )
    compilation_cache_dir: str | None = setting(
        AUTO,
        "compiled programs are kept here; auto: the user's cache directory; null: not kept",
        executors=ON_DEVICE,
    )
    page_kib: int | str = setting(
        AUTO, "page of the expert arena; auto: the planner's choice", unit="KiB", low=4, high=65536
    )
    kernels: Kernels = setting(
        Kernels.auto,
        "what computes experts, dense products, attention and recurrences; auto: triton on an NVIDIA GPU for all types"
        " and sizes that it has, else reference. triton on a CPU interprets the kernels, which is slow: for tests",
    )
    check: bool = setting(
        False, "check the memory ledger against the device after every request (slower)", executors=ON_DEVICE
    )


@dataclass
class MemoryModelConfig:
    name: MemoryModelName = setting(
        MemoryModelName.xla, "how prompt buffers are priced; strata_*: as that release of the original does"
    )

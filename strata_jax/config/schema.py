"""The schema of every setting: type, default, range, unit and help text.

This is the only list of settings. `checks.py` reads the ranges, `help.py` prints the help texts, `keys.py` suggests
names. Plain dataclasses, because OmegaConf turns frozen ones into read-only nodes that a group option cannot be merged
into. A setting whose `available` metadata is False, or a tuple, exists so that names stay stable; `checks.py` refuses
the values that this version cannot honour.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

AUTO = "auto"
AUTO_AT_MOST = "auto:N"  # how the form `auto, but N at most` is shown; N is a number


def setting(
    default: Any,
    help_text: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    words: tuple[str, ...] = (),
    available: bool | tuple[Any, ...] = True,
) -> Any:
    """Return a dataclass field with help text, unit, inclusive range, accepted words and available values."""
    metadata = {
        "help": help_text,
        "unit": unit,
        "low": low,
        "high": high,
        "words": words or ((AUTO,) if default == AUTO else ()),
        "available": available,
    }
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def node(schema: type, help_text: str) -> Any:
    """Return a dataclass field that holds a nested group of settings."""
    return field(default_factory=schema, metadata={"help": help_text})


class KvType(Enum):
    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    int8 = "int8"
    q4_0 = "q4_0"
    k8v4 = "k8v4"


class Batching(Enum):
    chunk = "chunk"
    step = "step"


class PipelineName(Enum):
    generate = "generate"
    inspect = "inspect"
    logits = "logits"
    parity = "parity"
    plan = "plan"


class ExecutorName(Enum):
    auto = "auto"
    device = "device"
    sim = "sim"


class MemoryModelName(Enum):
    xla = "xla"
    strata_0_1_35 = "strata_0_1_35"
    strata_0_1_41 = "strata_0_1_41"
    strata_0_1_43 = "strata_0_1_43"


class Platform(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class OwnBuffers(Enum):
    auto = "auto"
    on = "on"
    off = "off"


class Compat(Enum):
    native = "native"
    upstream = "upstream"


class Replacement(Enum):
    static = "static"
    lru = "lru"
    lfu = "lfu"


@dataclass
class HardwareConfig:
    name: str = setting("local", "name of the hardware profile; local describes this machine", available=("local",))
    vram_mib: int | str = setting(
        AUTO,
        "device memory; smaller than the real one lets a card stand in for a smaller card",
        unit="MiB",
        low=64,
        high=16_777_216,
    )
    vram_reserve_mib: int = setting(
        700, "device memory left free for the desktop and other programs", unit="MiB", low=0, high=16_777_216
    )
    ram_mib: int | str = setting(
        AUTO,
        "host memory; auto: the smaller of the machine's memory and the container's limit",
        unit="MiB",
        low=64,
        high=1_073_741_824,
    )
    ram_reserve_mib: int | str = setting(
        AUTO, "host memory left free; auto: a quarter of it, 4,864 at most", unit="MiB", low=0, high=1_073_741_824
    )
    cores: int | str = setting(AUTO, "CPU cores to plan with, for the simulator", low=1, high=4096, available=False)
    os: str = setting(AUTO, "operating system of the profile", available=False)
    pcie_gb_s: float | int | str = setting(
        AUTO, "host to device bandwidth, for the simulator", unit="GB/s", available=False
    )
    hbm_gb_s: float | int | str = setting(
        AUTO, "device memory bandwidth, for the simulator", unit="GB/s", available=False
    )


@dataclass
class ModelConfig:
    name: str = setting(
        "builtin_tiny", "geometry preset used when model.path is not given", available=("builtin_tiny",)
    )
    path: str | None = setting(None, "a GGUF file (any shard of a split one); takes the place of the preset")
    max_context: int | str = setting(
        AUTO,
        "K/V cells to reserve; auto: what the workload needs, within the model's limit",
        unit="tokens",
        low=8,
        high=16_777_216,
    )
    seed: int = setting(0, "seed of the weights of a built-in model", low=0, high=4_294_967_295)


@dataclass
class QuantConfig:
    name: str = setting("file", "weight types; file: as the model file has them", available=("file",))
    head: str = setting("file", "type of the output head", available=False)
    dense: str = setting("file", "type of the dense weights", available=False)
    ple: str = setting("file", "type of the n-gram table", available=False)


@dataclass
class KvGrowConfig:
    enabled: bool = setting(False, "grow the K/V in steps instead of reserving all of it", available=False)
    init_cells: int = setting(16384, "cells mapped at the start", unit="cells", available=False)
    step_cells: int = setting(8192, "cells added at a time", unit="cells", available=False)
    floor_slots: int = setting(128, "expert slots that growth never takes", unit="slots", available=False)
    hysteresis_steps: int = setting(2, "spare steps kept before cells are given back", unit="steps", available=False)


@dataclass
class KvConfig:
    type: KvType = setting(KvType.int8, "storage of keys and values; k8v4: int8 keys, q4_0 values")
    grow: KvGrowConfig = node(KvGrowConfig, "elastic K/V")
    resident_cells: int = setting(0, "cells kept on the device, the rest in RAM; 0: all", unit="cells", available=False)


@dataclass
class CacheConfig:
    slots: int | str = setting(
        AUTO,
        "expert slots on the device; auto: as many as fit, on a CPU those of one token",
        unit="experts",
        low=0,
        high=1_048_576,
    )
    replacement: Replacement = setting(
        Replacement.static, "which expert leaves when another one comes in", available=("static",)
    )
    profile: str | None = setting(None, "file with expert usage counts to fill the slots from", available=False)


@dataclass
class PrefillConfig:
    chunk: int | str = setting(
        AUTO,
        "prompt tokens computed at a time; auto: the largest that fits; auto:N: N at most",
        unit="tokens",
        low=1,
        high=65536,
        words=(AUTO, AUTO_AT_MOST),
    )
    own: OwnBuffers = setting(OwnBuffers.auto, "own prompt buffers instead of borrowed expert slots", available=False)
    borrow: bool = setting(False, "borrow expert slots as prompt buffers", available=False)
    short_read_tokens: int = setting(
        0, "prompts up to this length are read without borrowing", unit="tokens", available=False
    )


@dataclass
class PolicySwitch:
    enabled: bool = setting(False, "use this policy", available=False)


@dataclass
class PolicyConfig:
    name: str = setting("baseline", "preset; baseline: nothing moves after the start", available=("baseline",))
    compat: Compat = setting(
        Compat.native, "upstream: refuse the combinations that the original refuses", available=False
    )
    prefill_own: PolicySwitch = node(PolicySwitch, "own prompt buffers from spare device memory")
    conversation_budget: PolicySwitch = node(PolicySwitch, "RAM set aside for parked conversations")
    head_alias: PolicySwitch = node(PolicySwitch, "the head's bytes serve the prompt while it is read")
    kv_grow: PolicySwitch = node(PolicySwitch, "elastic K/V paid for by cold expert slots")


@dataclass
class PromptCacheConfig:
    checkpoints: int = setting(0, "recurrent-state checkpoints per conversation", available=False)
    every: int = setting(0, "tokens between checkpoints", unit="tokens", available=False)
    root: str | None = setting(None, "directory of prompt checkpoints", available=False)


@dataclass
class ConversationConfig:
    budget_mib: int = setting(0, "RAM for parked conversations; 0: none are parked", unit="MiB", available=False)
    slots: int = setting(4, "parked conversations", available=False)
    min_free_mib: int = setting(2560, "RAM that parking leaves free", unit="MiB", available=False)
    prompt_cache: PromptCacheConfig = node(PromptCacheConfig, "reuse of prompt prefixes")


@dataclass
class SpecConfig:
    window: int = setting(4, "tokens verified in one decode step; 1: no drafts", unit="tokens", low=1, high=8)
    min_p: float = setting(0.0, "a draft below this probability is not verified", low=0.0, high=1.0)
    draft_vocab: int | str = setting(
        AUTO, "ids the drafter may propose; auto: the whole vocabulary", unit="ids", available=False
    )


@dataclass
class UpstreamConfig:
    batch: int = setting(1, "parallel requests", available=False)
    pipeline_windows: int = setting(0, "pipelined verify windows", available=False)
    layer_split: str | None = setting(None, "layers per device", available=False)
    peer_device: int | None = setting(None, "helper device for experts", available=False)
    vram_elastic: bool = setting(False, "cache resized at run time", available=False)
    token_graph: bool = setting(False, "whole-token graph", available=False)
    pool: bool = setting(False, "pooled buffers", available=False)
    no_native_head: bool = setting(False, "head computed elsewhere", available=False)
    mtp: bool = setting(True, "draft block loaded", available=False)


@dataclass
class WorkloadConfig:
    name: str = setting("doc_18k_small", "which requests to run; see data/workloads.yaml")
    prompt: str | None = setting(None, "text of one user message")
    prompt_file: str | None = setting(None, "file with the text of one user message")
    messages_file: str | None = setting(None, "JSON file: a list of {role, content} messages")
    token_ids: list[int] | None = setting(None, "token ids of the prompt, as they are")
    token_ids_file: str | None = setting(None, "file with the token ids: JSON list, or numbers between spaces, or .npy")
    forced_token_ids: list[int] | None = setting(
        None, "continuation to force after the prompt, one step each, no drafts"
    )
    records: int | None = setting(None, "records of a document workload; null: as published", low=1, high=1_000_000)
    requests: int = setting(1, "times the list of requests is run", low=1, high=1_000_000)
    apply_chat_template: bool = setting(True, "render a prompt as a user message; false: continue the bare text")
    enable_thinking: bool = setting(False, "chat template option: let the model think first")
    reasoning_effort: str | None = setting(None, "chat template option, passed on as it is")
    max_output_tokens: int | str = setting(
        AUTO, "tokens to generate; auto: as published, else 128", unit="tokens", low=1, high=1_048_576
    )
    temperature: float = setting(0.0, "0: greedy, else the sampling temperature", low=0.0, high=100.0)
    top_k: int = setting(0, "keep the k likeliest tokens; 0: all", low=0, high=16_777_216)
    top_p: float = setting(1.0, "keep the likeliest tokens up to this probability", low=1e-6, high=1.0)
    min_p: float = setting(0.0, "drop tokens below this share of the likeliest", low=0.0, high=1.0)
    seed: int = setting(0, "seed of the sampler", low=0, high=4_294_967_295)
    stop: list[str] = setting([], "texts that end the output and are not shown")
    ignore_eos: bool = setting(False, "go on after an end token")
    batching: Batching = setting(Batching.chunk, "pipeline=logits: read the prompt in chunks or token by token")


@dataclass
class ExecutorConfig:
    name: ExecutorName = setting(
        ExecutorName.auto, "who carries the plan out; auto: device on the local machine", available=("auto", "device")
    )


@dataclass
class EngineConfig:
    platform: Platform = setting(Platform.auto, "what JAX computes on; auto: a GPU if there is one, else the CPU")
    mem_fraction: float | int | str = setting(
        AUTO,
        "share of the device's memory that JAX may take; auto: (vram - reserve) / vram. "
        "The vendor libraries need some memory outside of this share",
        low=0.01,
        high=0.98,
    )
    preallocate: bool = setting(True, "take the device memory at the start instead of growing into it")
    compilation_cache_dir: str | None = setting(
        AUTO, "compiled programs are kept here; auto: the user's cache directory; null: not kept"
    )
    page_kib: int | str = setting(
        AUTO, "page of the expert arena; auto: the planner's choice", unit="KiB", low=4, high=65536
    )
    check: bool = setting(False, "check the memory ledger against the device after every request (slower)")


@dataclass
class MemoryModelConfig:
    name: MemoryModelName = setting(MemoryModelName.xla, "how prompt buffers are priced", available=("xla",))


@dataclass
class PipelineConfig:
    name: PipelineName = setting(PipelineName.generate, "what to do")


@dataclass
class RunConfig:
    hardware: HardwareConfig = node(HardwareConfig, "the machine to plan for")
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

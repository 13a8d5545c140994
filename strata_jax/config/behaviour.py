"""Settings of memory and what moves in it: K/V, expert cache, prompt reading, policies, conversations, drafts."""

from __future__ import annotations

from dataclasses import dataclass

from strata_jax.config.choices import Compat, DecideAt, KvType, OwnBuffers, Replacement
from strata_jax.config.fields import AUTO, IN_SIM, ON_DEVICE, node, setting

USE = "use this policy; auto: policy=auto decides"


@dataclass
class KvGrowConfig:
    enabled: bool | str = setting(
        AUTO, "grow the K/V in steps instead of reserving all of it; auto: as policy.kv_grow says"
    )
    init_cells: int | str = setting(
        AUTO,
        "cells mapped at the start; auto: 16,384, on the device a sixteenth of the context at most",
        unit="cells",
        low=4,
        high=16_777_216,
    )
    step_cells: int | str = setting(
        AUTO,
        "cells added at a time; auto: 8,192, on the device a thirty-second of the context at most",
        unit="cells",
        low=4,
        high=16_777_216,
    )
    floor_slots: int | str = setting(
        AUTO,
        "expert slots that growth never takes; auto: 128, on the device the experts of one token at most",
        unit="slots",
        low=0,
        high=1_048_576,
    )
    hysteresis_steps: int = setting(2, "spare steps kept before cells are given back", unit="steps", low=0, high=1024)
    anywhere: bool | str = setting(
        AUTO,
        "the coldest slots pay, wherever they lie; false: those just under the loan, as in the original; auto: on the"
        " device yes, in simulations only where none lie there, never with policy.compat=upstream",
    )
    keep_restorable: bool = setting(False, "trimming leaves what the longest parked conversation needs")
    request_margin_cells: int = setting(256, "cells mapped beyond a prompt", unit="cells", low=0, high=1_048_576)
    round_margin_cells: int = setting(64, "cells mapped beyond a decode window", unit="cells", low=0, high=1_048_576)


@dataclass
class KvConfig:
    type: KvType = setting(KvType.int8, "storage of keys and values; k8v4: int8 keys, q4_0 values")
    grow: KvGrowConfig = node(KvGrowConfig, "elastic K/V")
    resident_cells: int = setting(
        0,
        "cells kept on the device, the last ones, the others in RAM; at least what a chunk or a round writes and a page"
        " more, with strata memory models 20,480; 0: all",
        unit="cells",
        low=0,
        high=16_777_216,
    )


@dataclass
class AdaptConfig:
    every_rounds: int = setting(4, "rounds between decisions", unit="rounds", low=1, high=1_000_000)
    swaps: int = setting(96, "most swaps at a decision", unit="experts", low=0, high=1_048_576)
    decay: float = setting(0.7, "factor of all usage counters at a decision", low=0, high=1)
    least_usage: float = setting(2.0, "usage a candidate has at least", low=0, high=1e6)
    gap: float = setting(1.5, "usage by which it exceeds its victim's", low=0, high=1e6)
    lag_rounds: int = setting(1, "rounds until a copy may land", unit="rounds", low=0, high=1000)


@dataclass
class CacheConfig:
    slots: int | str = setting(
        AUTO,
        "expert slots on the device; auto: as many as fit, on a CPU those of one token. Strata memory models take N"
        " as the bytes of N largest experts",
        unit="experts",
        low=0,
        high=1_048_576,
    )
    per_layer: bool = setting(False, "equal slots for every layer, all of the largest size", executors=IN_SIM)
    replacement: Replacement = setting(
        Replacement.static,
        "which expert leaves when another one comes in; static: none; adaptive: swaps by decayed usage between rounds;"
        " lru, lfu_decay: inside the round, a missed expert takes the slot of the one of its layer that was used"
        " longest ago, or least often of late",
    )
    lfu_decay: float = setting(
        0.98, "factor of all counts of uses at every round, with cache.replacement=lfu_decay", low=0, high=1
    )
    adapt: AdaptConfig = node(AdaptConfig, "cache.replacement=adaptive")
    pcie_frac: float | int | str = setting(
        AUTO,
        "share of decode misses that the device reads over PCIe; auto: by the link's rate",
        low=0,
        high=1,
        executors=IN_SIM,
    )
    profile: str = setting(
        AUTO,
        "file with a ranking of experts, of this project or STRP: the hottest get the slots, and no others; auto: in"
        " simulations the popularity model's, on the device blocks take turns; none: no ranking, simulations only",
    )
    profile_save: str | None = setting(
        None,
        "file that the ranking learned in this run is written to at its end; uses are counted for it, whatever"
        " cache.replacement is",
        executors=ON_DEVICE,
    )
    ranked: int | str = setting(
        AUTO,
        "experts of the ranking that may have slots; auto: all that it holds",
        unit="experts",
        low=1,
        high=1_048_576,
        executors=IN_SIM,
    )


@dataclass
class PrefillConfig:
    chunk: int | str = setting(
        AUTO,
        "prompt tokens computed at a time; auto: the largest that fits, up to 8,192 (on a CPU: 512); auto:N: N at most",
        unit="tokens",
        low=1,
        high=65536,
        words=(AUTO, "auto:N"),
    )
    own: OwnBuffers = setting(
        OwnBuffers.auto,
        "own prompt buffers from spare device memory; auto: as policy.prefill_own says; on: own or an error",
    )
    borrow: bool | str = setting(
        AUTO,
        "prompt buffers may borrow expert slots; auto: yes with strata memory models, on the device with a policy that"
        " moves device memory; false: their own, always",
    )
    short_read_tokens: int | str = setting(
        AUTO,
        "reads up to this length go through decode windows; auto: 64 with strata memory models, 0 where"
        " head_alias with policy.compat=upstream needs it",
        unit="tokens",
        low=0,
        high=65536,
    )
    ring_slots: int | str = setting(
        AUTO, "staging slots of streamed experts", unit="slots", low=1, high=65536, executors=IN_SIM
    )
    lend_pct: int | str = setting(
        AUTO,
        "most slots that may be lent; auto: 90, or 85 without pinned experts",
        unit="%",
        low=1,
        high=100,
        executors=IN_SIM,
    )
    stage_mib: int | str = setting(
        AUTO,
        "device memory through which experts are copied ahead of the blocks of a chunk; auto: a share of what the"
        " weights leave on a GPU with kernels, else 0; 0: they are read in place",
        unit="MiB",
        low=0,
        high=1_048_576,
        executors=ON_DEVICE,
    )
    stream_min_tokens: int = setting(
        1024, "chunks from this size on stream every expert", unit="tokens", low=1, high=65536, executors=IN_SIM
    )


@dataclass
class PrefillOwnPolicy:
    enabled: bool | str = setting(False, USE, words=(AUTO,))
    decide_at: DecideAt = setting(
        DecideAt.filled,
        "decide when the cache has been filled, as the original does, or on the final ledger",
        executors=IN_SIM,
    )


@dataclass
class ConversationBudgetPolicy:
    enabled: bool | str = setting(False, USE, words=(AUTO,))


@dataclass
class HeadAliasPolicy:
    enabled: bool | str = setting(False, USE, words=(AUTO,))
    min_fresh_tokens: int | str = setting(
        AUTO,
        "shorter reads keep the head; auto: 0 with policy.compat=upstream, else the break-even by the cost model",
        unit="tokens",
        low=0,
        high=16_777_216,
    )
    spare_mib: int | str = setting(
        AUTO,
        "device memory that the hybrid layout leaves free; auto: 512 with policy.compat=upstream, else the reserve",
        unit="MiB",
        low=0,
        high=1_048_576,
        executors=IN_SIM,
    )
    pinned: bool | str = setting(
        AUTO,
        "the head comes back from pinned memory at the link's rate; auto: yes, but not with policy.compat=upstream",
        executors=IN_SIM,
    )
    spill: bool | str = setting(
        AUTO,
        "the driver may page device memory, so that a plan or the head's load may exceed the card; auto: as the"
        " operating system lets it",
        executors=IN_SIM,
    )
    inside_head: bool | str = setting(
        AUTO,
        "prompt buffers lie inside the head's own bytes instead of a cache that grew by them; auto: no",
        executors=IN_SIM,
    )
    large_chunks: bool | str = setting(
        AUTO,
        "try every chunk on the grid of 256 tokens; auto: yes, but with policy.compat=upstream the original's four, up"
        " to 2,048",
        executors=IN_SIM,
    )


@dataclass
class KvGrowPolicy:
    enabled: bool | str = setting(False, f"{USE}; its parameters are kv.grow.*", words=(AUTO,))


@dataclass
class VramElasticPolicy:
    enabled: bool = setting(False, "use this policy")
    segment_mib: int = setting(
        512,
        "segment of the elastic cache; strata memory models take 64 at least, the device makes them larger where eight"
        " would not hold the prompt's loan twice",
        unit="MiB",
        low=1,
        high=1_048_576,
    )
    wanted_mib: int | None = setting(
        None,
        "device memory that other programs want free before the first request, the reserve included",
        unit="MiB",
        low=0,
        high=16_777_216,
    )


@dataclass
class PolicyConfig:
    name: str = setting("baseline", "preset; auto: search policies and parameters with the simulator")
    compat: Compat = setting(
        Compat.native, "upstream: refuse the combinations that the original refuses", executors=IN_SIM
    )
    prefill_own: PrefillOwnPolicy = node(PrefillOwnPolicy, "own prompt buffers from spare device memory")
    conversation_budget: ConversationBudgetPolicy = node(
        ConversationBudgetPolicy, "RAM set aside for parked conversations"
    )
    head_alias: HeadAliasPolicy = node(HeadAliasPolicy, "the head's bytes serve the prompt while it is read")
    kv_grow: KvGrowPolicy = node(KvGrowPolicy, "elastic K/V paid for by cold expert slots")
    vram_elastic: VramElasticPolicy = node(VramElasticPolicy, "cache segments given back to the driver")


@dataclass
class PromptCacheConfig:
    checkpoints: int | str = setting(
        AUTO,
        "recurrent-state checkpoints per conversation; auto: 6 with strata memory models, on the device where"
        " conversations are parked",
        low=0,
        high=1024,
    )
    every: int = setting(16_384, "tokens between checkpoints", unit="tokens", low=1, high=16_777_216)
    root: int = setting(
        2_048,
        "the first turn boundary from here on is kept for good",
        unit="tokens",
        low=0,
        high=16_777_216,
    )


@dataclass
class ConversationConfig:
    budget_mib: int | str = setting(
        AUTO,
        "RAM for parked conversations; 0: none are parked; auto: 2,048 with policy.conversation_budget, else 0",
        unit="MiB",
        low=0,
        high=1_073_741_824,
    )
    slots: int = setting(4, "parked conversations", low=0, high=4096)
    min_free_mib: int = setting(2560, "RAM that parking leaves free", unit="MiB", low=0, high=1_073_741_824)
    prompt_cache: PromptCacheConfig = node(PromptCacheConfig, "reuse of prompt prefixes")


@dataclass
class SpecConfig:
    window: int = setting(4, "tokens verified in one decode step; 1: no drafts", unit="tokens", low=1, high=8)
    min_p: float = setting(0.0, "a draft below this probability is not verified", low=0.0, high=1.0)
    draft_vocab: int | str = setting(
        AUTO,
        "ids the drafter may propose; auto: 106,299 with strata memory models, else the whole vocabulary",
        unit="ids",
        low=1,
        high=16_777_216,
        executors=IN_SIM,
    )
    suffix_draft: int | str = setting(
        AUTO,
        "shortest repeated text that drafts a continuation; 0: none; auto: 3 with strata memory models",
        unit="tokens",
        low=0,
        high=64,
        executors=IN_SIM,
    )


@dataclass
class UpstreamConfig:
    batch: int = setting(1, "parallel requests", low=1, high=1024, executors=IN_SIM)
    batch_mtp: bool = setting(False, "drafts with parallel requests", executors=IN_SIM)
    pipeline_windows: int = setting(0, "pipelined verify windows", low=0, high=2, executors=IN_SIM)
    devices: int = setting(1, "devices in use", low=1, high=64, executors=IN_SIM)
    layer_split: str | None = setting(None, "first layers of the later devices, such as '16,32'", executors=IN_SIM)
    split_device: int | None = setting(None, "device of the second part", low=0, high=64, executors=IN_SIM)
    peer_device: int | None = setting(None, "helper device for experts", low=0, high=64, executors=IN_SIM)
    remote_caches: bool = setting(False, "expert caches on helper devices", executors=IN_SIM)
    remote_expert_opt: bool = setting(False, "experts placed on helper devices by use", executors=IN_SIM)
    vram_elastic: bool = setting(False, "cache resized at run time; policy.vram_elastic does it", executors=IN_SIM)
    token_graph: bool = setting(True, "decoding as one graph, with the residency table on the device", executors=IN_SIM)
    pool: bool = setting(False, "pooled buffers", executors=IN_SIM)
    no_native_head: bool = setting(False, "head computed elsewhere", executors=IN_SIM)
    mtp: bool = setting(True, "draft block loaded", executors=IN_SIM)
    serve: bool = setting(True, "a server, rather than one prompt", executors=IN_SIM)
    shared_expert_arena: bool = setting(False, "experts shared between processes", executors=IN_SIM)
    mmap_experts: bool = setting(False, "experts in mapped files", executors=IN_SIM)
    resident_cpu_experts: bool = setting(False, "RAM copies for the CPU's experts", executors=IN_SIM)
    cpu_oracle: bool = setting(False, "every expert on the CPU, for comparison", executors=IN_SIM)
    no_capture: bool = setting(False, "no captured graphs", executors=IN_SIM)
    adapt_async: bool = setting(False, "swaps from a thread of their own", executors=IN_SIM)
    live_memory: bool = setting(False, "memory given and taken while running", executors=IN_SIM)
    stage_own_buffers: bool = setting(False, "own prompt buffers of a stage", executors=IN_SIM)
    vmm: bool = setting(True, "the device can map memory in parts", executors=IN_SIM)
    ple_io: str = setting(
        "direct", "how the n-gram table is read", available=("direct", "mmap", "ram"), executors=IN_SIM
    )
    device_host: str = setting("cuda", "runtime of the device", available=("cuda", "hip", "sycl"), executors=IN_SIM)

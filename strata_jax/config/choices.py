"""Closed sets of values. Enums, because OmegaConf has no Literal; the names are what is typed on the command line."""

from __future__ import annotations

from enum import Enum


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
    grid = "grid"
    reproduce = "reproduce"
    calibrate = "calibrate"


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


class Kernels(Enum):
    auto = "auto"
    reference = "reference"
    triton = "triton"


class OwnBuffers(Enum):
    auto = "auto"
    on = "on"
    off = "off"


class DecideAt(Enum):
    filled = "filled"
    final = "final"


class Compat(Enum):
    native = "native"
    upstream = "upstream"


class Replacement(Enum):
    static = "static"
    adaptive = "adaptive"
    lru = "lru"
    lfu_decay = "lfu_decay"


class Tier(Enum):
    auto = "auto"
    arena = "arena"
    resident = "resident"
    mmap = "mmap"

"""What the policy matrix is made of: the models and requests, the policies, and what turns each of them on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from strata_jax.files import replaced_on_success
from strata_jax.geometry import Geometry
from strata_jax.gguf.reader import open_gguf
from strata_jax.gguf.source import WeightSource
from strata_jax.memory.layout import KIB
from strata_jax.memory.ledger import MIB
from strata_jax.memory.plan import MemoryPlan, plan
from strata_jax.memory.request import MovingMemory, PlanRequest
from strata_jax.policies.device import DeviceSettings
from strata_jax.policies.moves import MoveKind
from strata_jax.policies.policy import AdaptSettings
from strata_jax.presets import model_shape, resized_geometry
from strata_jax.synthetic import write_synthetic_gguf
from strata_jax.synthetic.full import SyntheticModel
from strata_jax.synthetic.routing import RoutingSkew
from strata_jax.synthetic.shapes import ModelShape

WINDOWS = "read_windows"  # counted like a move
RESIDENT_CHUNK_TOKENS = 128  # where configurations choose
TOKEN_IDS = 480  # those above are special
PACKED_MODEL = "synthetic_small"


@dataclass(frozen=True)
class Ask:
    """A request: the fresh tokens of a conversation; without `returns` the first of it, and one of the prompts."""

    conversation: str
    fresh_tokens: int
    returns: bool = False

    @property
    def name(self) -> str:
        return f"{self.conversation}{'*' * self.returns}"


@dataclass(frozen=True)
class Case:
    """A model, a card and requests, the same for every configuration.

    Attributes:
        model: sizes of a synthetic model in place of its preset's.
        quant: None: a file of float32 weights, preset `nano`, computed by the reference on a CPU; else random packed
            weights of `PACKED_MODEL` in a quantisation of `data/quants`, computed by the kernels.
        echo_mtp: of a file; makes its drafts right some of the time. None: plain random weights, on which rounding has
            more effect.
        stage_bytes: buffers through which a prompt's missing experts are copied ahead.
        chunk_tokens: None: the planner chooses within `budget_bytes`, and all that is claimed is closeness.
        seed: of the prompts.
        every, root: where states are stored (`CheckpointRule`).
    """

    name: str
    asks: tuple[Ask, ...]
    model: Mapping[str, int]
    context_cells: int
    chunk_tokens: int | None
    slots: int
    page_bytes: int
    init_cells: int
    every: int
    root: int
    budget_bytes: int
    segment_bytes: int
    quant: str | None = None
    kv_type: str = "f32"
    stage_bytes: int = 0
    output_tokens: int = 64
    spec_window: int = 4
    chunk_auto_max: int = 512
    echo_mtp: float | None = 0.1
    floor_slots: int = 16
    short_tokens: int = 32
    seed: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens that are read or decoded."""
        return sum(ask.fresh_tokens + self.output_tokens for ask in self.asks)


@dataclass(frozen=True)
class Policy:
    """What turns a policy on, and the moves that it must make while the requests are served.

    Attributes:
        moving, settings, request: fields of `MovingMemory`, `DeviceSettings`, `PlanRequest`, from the case.
        moves: by the policy that must be off for them ("": whatever else is on).
        wanted_segments: how many segments of the cache others want before each request, in turn.
        excludes: policies that it cannot be on with.
    """

    moving: Callable[[Case], dict[str, Any]] = lambda case: {}
    settings: Callable[[Case], dict[str, Any]] = lambda case: {}
    request: Callable[[Case], dict[str, Any]] = lambda case: {}
    moves: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    wanted_segments: tuple[int, ...] = ()
    excludes: tuple[str, ...] = ()


M = MoveKind
POLICIES: Mapping[str, Policy] = {
    "borrow": Policy(lambda case: {"lend": True}, moves={"own": (M.LEND, M.RETURN, M.REFILL)}),
    "own": Policy(lambda case: {"own": "auto"}, moves={"head_alias": (M.ALLOC_BUFFERS,)}),
    "head_alias": Policy(
        lambda case: {"head_alias": True},
        moves={"": (M.UNLOAD_HEAD, M.LOAD_HEAD), "own": (M.ALLOC_BUFFERS, M.FREE_BUFFERS)},
    ),
    "kv_grow": Policy(
        lambda case: {"grow_init_cells": case.init_cells},
        moves={"": (M.EVICT, M.MAP_CELLS, M.TRIM_CELLS, M.REFILL)},
    ),
    "conversations": Policy(
        lambda case: {"conversation_bytes": 64 * MIB, "checkpoints": 4},
        moves={"": (M.PARK, M.RESTORE, M.CHECKPOINT)},
    ),
    "adaptive": Policy(
        settings=lambda case: {"adapt": AdaptSettings(every_rounds=2, least_usage=1.0, gap=0.5)},
        moves={"": (M.EVICT, M.SWAP_EXPERT)},
    ),
    "short_reads": Policy(settings=lambda case: {"short_read_tokens": case.short_tokens}, moves={"": (WINDOWS,)}),
    "vram_elastic": Policy(
        lambda case: {"elastic_bytes": case.segment_bytes},
        moves={"": (M.GIVE_SEGMENT, M.TAKE_SEGMENT)},
        wanted_segments=(0, 2),
    ),
    "kv_residence": Policy(
        lambda case: {"resident_cells": case.init_cells}, moves={"": (M.SPILL_CELLS,)}, excludes=("kv_grow",)
    ),
}  # fmt: skip


def configurations() -> dict[str, tuple[str, ...]]:
    """The policies of every configuration by its name: none, each, every pair, and as many as go together."""
    some = [names for num in (1, 2) for names in combinations(POLICIES, num) if together(names) == names]
    lending = tuple(name for name in POLICIES if name != "own")
    return {
        "baseline": (), **{"+".join(names): names for names in some}, "all": together(POLICIES),
        "all_but_own": together(lending), "all_in_a_window": together(("kv_residence", *lending)),
    }  # fmt: skip


def together(names: Iterable[str]) -> tuple[str, ...]:
    """Those of the names, the first ones first, that no earlier one excludes or is excluded by."""
    chosen: list[str] = []
    for name in names:
        clash = any(name in POLICIES[other].excludes or other in POLICIES[name].excludes for other in chosen)
        chosen += [] if clash or name in chosen else [name]
    return tuple(chosen)


def open_model(case: Case, folder: Path) -> tuple[WeightSource, Geometry]:
    """Open the case's model; if it is a file that is not in the folder, it is written first."""
    geometry = geometry_of(case, folder)
    if case.quant is None:
        return open_gguf(model_file(case, folder)), geometry
    return SyntheticModel(packed_shape(case), geometry, RoutingSkew(zipf=0)), geometry


def geometry_of(case: Case, folder: Path) -> Geometry:
    """The sizes and types of the case's model."""
    if case.quant is None:
        return Geometry.from_gguf(open_gguf(model_file(case, folder)))
    return resized_geometry(PACKED_MODEL, packed_shape(case), case.quant)


def packed_shape(case: Case) -> ModelShape:
    """The sizes of a model of packed weights."""
    return replace(model_shape(PACKED_MODEL), **case.model)


def model_file(case: Case, folder: Path) -> Path:
    """The file of a model of float weights; it is written unless it is there."""
    path = folder / f"model-{digest([dict(case.model), case.echo_mtp])}.gguf"
    if not path.exists():
        with replaced_on_success(path) as scratch:
            write_synthetic_gguf(scratch, preset="nano", echo_mtp=case.echo_mtp, overrides=dict(case.model))
    return path


def planned(case: Case, geometry: Geometry, policies: Sequence[str]) -> MemoryPlan:
    """The plan of a configuration."""
    moving: dict[str, Any] = {"own": "off", "floor_slots": case.floor_slots}
    request: dict[str, Any] = {}
    for name in policies:
        moving |= POLICIES[name].moving(case)
        request |= POLICIES[name].request(case)
    request |= {
        "chunk_tokens": case.chunk_tokens, "chunk_auto_max": case.chunk_auto_max, "expert_slots": case.slots,
        "device_budget_bytes": case.budget_bytes, "moving": MovingMemory(**moving),
    }  # fmt: skip
    return plan(geometry, request_of(case, **request))


def settings_of(case: Case, policies: Sequence[str]) -> DeviceSettings:
    """The settings of a configuration's policies."""
    values: dict[str, Any] = {
        "grow_step_cells": case.init_cells, "request_margin_cells": 16, "round_margin_cells": 8,
        "alias_min_fresh_tokens": 0, "conversation_min_free_mib": 1,
    }  # fmt: skip
    for name in policies:
        values |= POLICIES[name].settings(case)
    return DeviceSettings(**values)


def missing_moves(policies: Sequence[str], seen: Mapping[str, int]) -> list[str]:
    """The moves that policies should have made and did not."""
    wanted: set[str] = {
        kind for name in policies for without, kinds in POLICIES[name].moves.items() if without not in policies
        for kind in kinds
    }  # fmt: skip
    return sorted(str(kind) for kind in wanted if not seen.get(kind))


def prompts_of(case: Case) -> dict[str, tuple[int, ...]]:
    """The fresh tokens of every conversation's first request and, with a star, of its return."""
    return {
        ask.name: tuple(np.random.default_rng([case.seed, idx]).integers(0, TOKEN_IDS, ask.fresh_tokens).tolist())
        for idx, ask in enumerate(case.asks)
    }


def request_of(case: Case, **more: Any) -> PlanRequest:
    """What the plans of all configurations have in common, and more."""
    return PlanRequest(
        context_cells=case.context_cells, kv_type=case.kv_type, page_bytes=case.page_bytes,
        spec_window=case.spec_window, expert_kernels=case.quant is not None, stage_bytes=case.stage_bytes, **more,
    )  # fmt: skip


def resident_request(case: Case, geometry: Geometry) -> PlanRequest:
    """The plan's request where every expert is resident and nothing moves."""
    num_blocks = geometry.num_blocks if case.spec_window > 1 else geometry.num_layers
    chunk_tokens = case.chunk_tokens or RESIDENT_CHUNK_TOKENS
    return request_of(case, chunk_tokens=chunk_tokens, expert_slots=num_blocks * geometry.num_experts)


def digest(value: Any) -> str:
    """A short name for plain data."""
    return hashlib.sha256(as_json(value).encode()).hexdigest()[:16]


def as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


FULL = Case(
    name="fixed",
    asks=(
        Ask("24", 24), Ask("2048", 2_048), Ask("24", 9, returns=True), Ask("8192", 8_192),
        Ask("2048", 300, returns=True), Ask("16384", 16_384), Ask("8192", 40, returns=True), Ask("44", 44),
    ),
    model={
        "num_layers": 3, "full_attention_interval": 3, "ple_layer": 0, "context_length": 16_896, "num_kv_heads": 1,
        "num_experts": 64, "expert_width": 128,
    },
    context_cells=16_896, chunk_tokens=128, slots=192, page_bytes=16_384, init_cells=2_048, every=4_096, root=2_048,
    budget_bytes=38 * MIB, segment_bytes=2 * MIB,
)  # fmt: skip
KERNELS = replace(
    FULL, name="kernels", quant="iq2_xs", kv_type="int8",
    # sizes that all kernels can have: two blocks of 256 weights in a row
    model={
        "num_layers": 3, "full_attention_interval": 3, "ple_layer": 0, "context_length": 16_896, "vocab_size": 8_192,
        "embed_width": 512, "num_heads": 8, "gdn_value_heads": 4, "expert_width": 256, "shared_expert_width": 128,
        "mixer_rank": 128, "index_top_k": 256,
    },
    budget_bytes=64 * MIB, stage_bytes=2 * MIB,
)  # fmt: skip
CASES = {
    "fixed": FULL,
    "chosen": replace(FULL, name="chosen", chunk_tokens=None, budget_bytes=33 * MIB, echo_mtp=None),
    "kernels": KERNELS,
    # so little that a CPU can compile and run what interprets the kernels; drafts would double it
    "kernels_short": replace(
        KERNELS, name="kernels_short", quant="iq3_s",
        asks=(Ask("24", 24), Ask("100", 100), Ask("24", 5, returns=True), Ask("40", 40), Ask("100", 9, returns=True)),
        model={
            "num_layers": 2, "full_attention_interval": 2, "ple_layer": 0, "num_experts": 16, "vocab_size": 1_024,
            "embed_width": 128, "num_heads": 2, "num_kv_heads": 1, "gdn_value_heads": 4, "gdn_head_dim": 32,
            "expert_width": 128, "shared_expert_width": 128, "mixer_rank": 64, "index_heads": 2,
        },
        context_cells=192, chunk_tokens=16, spec_window=1, slots=28, page_bytes=4_096, init_cells=64, every=32, root=32,
        output_tokens=8, floor_slots=4, short_tokens=8, budget_bytes=8 * MIB, segment_bytes=96 * KIB,
        stage_bytes=256 * KIB,
    ),
}  # fmt: skip
FAULTY = (
    ("all_but_own", "refill:copied:2"), ("all", "restore:prepared:2"), ("conversations", "restore:copied:1"),
    ("adaptive", "swap_expert:copied:3"),
)  # fmt: skip

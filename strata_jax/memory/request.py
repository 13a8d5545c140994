"""What a plan is asked for: settings that are constraints or auto (None), the budgets, and checks between them.

One setting, one name: the fields carry their command-line keys in `KEYS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any

from strata_jax.errors import ConfigError
from strata_jax.kv_types import KV_TYPES
from strata_jax.memory.expert_kernels import PAGE_MULTIPLE_BYTES
from strata_jax.memory.expert_ranking import ExpertRanking
from strata_jax.memory.layout import KIB, MAX_WINDOW_TOKENS, MIN_PAGE_BYTES, WORD_BYTES
from strata_jax.memory.ledger import MIB, Limit, Memory, Origin
from strata_jax.memory.sizes import ModelSizes
from strata_jax.memory.slot_order import slot_order

MIN_CONTEXT_CELLS = 8
# A GPU streams the experts of a chunk, which takes as long for any number of tokens; a CPU computes, and larger chunks
# gain nothing there. 8,192 is what the original's auto tries at most (planning notes 2.6).
AUTO_CHUNK_MAX_TOKENS, GPU_AUTO_CHUNK_MAX_TOKENS = 512, 8_192

KEYS: Mapping[str, str] = MappingProxyType(
    {
        "context_cells": "model.max_context",
        "chunk_tokens": "prefill.chunk",
        "expert_slots": "cache.slots",
        "page_bytes": "engine.page_kib",
        "stage_bytes": "prefill.stage_mib",
        "kv_type": "kv.type",
        "spec_window": "spec.window",
        "reserve_bytes": "hardware.vram_reserve_mib",
        "device_budget_bytes": "hardware.vram_mib",
        "host_budget_bytes": "hardware.ram_mib",
    }
)


@dataclass(frozen=True, slots=True)
class Choice:
    """A value of the plan and where it comes from: given, or computed for the reason stated."""

    field: str
    value: int
    origin: Origin
    reason: str

    @property
    def key(self) -> str:
        """The command-line key that sets it."""
        return KEYS[self.field]


@dataclass(frozen=True, slots=True)
class MovingMemory:
    """What may change hands while the engine runs; by default nothing does.

    Attributes:
        lend: prompt buffers may borrow the last expert slots. own: auto lends only what spare device memory does not
            pay; off lends as if there were none.
        head_alias: the head's bytes serve prompts.
        grow_init_cells: K/V cells mapped at the start, the rest being paid for by slots later; None: all are mapped.
        floor_slots: slots that growth never takes.
        elastic_bytes: least size of segments of the expert cache that can be given back to the allocator; 0: none can.
        resident_cells: K/V cells of each attention layer on the device, all of them having a place in RAM; 0: no limit.
        conversation_bytes: RAM for parked conversations. checkpoints: stored states of each conversation.
        replacement_decay: factor of use counts each round where rounds themselves replace experts, 0 for the least
            recently used; None: they do not.
    """

    lend: bool = False
    own: str = "auto"
    head_alias: bool = False
    grow_init_cells: int | None = None
    floor_slots: int = 0
    elastic_bytes: int = 0
    resident_cells: int = 0
    conversation_bytes: int = 0
    checkpoints: int = 0
    replacement_decay: float | None = None

    @property
    def on_device(self) -> bool:
        """Whether device memory changes hands."""
        grows = self.grow_init_cells is not None
        return self.lend or self.head_alias or grows or self.elastic_bytes > 0 or self.resident_cells > 0


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Settings and budgets. A given value is a constraint, None lets the planner choose.

    Attributes:
        context_cells: K/V cells per attention layer.
        workload_cells: cells that the workload is known to need; auto takes them, a smaller given context is an error.
        chunk_tokens: prompt tokens computed at a time. It may exceed the context: it then is never filled.
        chunk_auto_max: auto takes no larger chunk.
        expert_slots: (block, expert) pairs on the device.
        page_bytes: page of the arena.
        spec_window: tokens of a decode window; 1 leaves the draft block out.
        all_logits: whether prompts return the logits of every position.
        device_budget_bytes: device memory, the reserve included; None where the device has no memory of its own.
        reserve_bytes: device memory to leave alone.
        host_budget_bytes: RAM that may be taken; None leaves it unchecked.
        shared_memory: device memory is a part of the RAM, as on a CPU.
        expert_kernels: experts and dense matrices are held in planes and computed by kernels, where there are some; so
            are attention, the gated delta net and the mixers.
        stage_bytes: buffers through which a prompt's missing experts are copied ahead; 0: there are none.
        moving: what may change hands while the engine runs.
        ranking: experts in the order in which they get slots, which there cannot be more of; None: blocks take turns.
        decided: choices of an earlier plan; a value that is still the same keeps its origin and reason.
    """

    context_cells: int | None = None
    workload_cells: int | None = None
    chunk_tokens: int | None = None
    chunk_auto_max: int = AUTO_CHUNK_MAX_TOKENS
    expert_slots: int | None = None
    page_bytes: int | None = None
    kv_type: str = "int8"
    spec_window: int = 4
    all_logits: bool = False
    device_budget_bytes: int | None = None
    reserve_bytes: int = 0
    reserve_origin: Origin = Origin.GIVEN
    host_budget_bytes: int | None = None
    shared_memory: bool = False
    expert_kernels: bool = False
    stage_bytes: int | None = None
    moving: MovingMemory = MovingMemory()
    ranking: ExpertRanking | None = None
    decided: tuple[Choice, ...] = ()

    @property
    def is_shared(self) -> bool:
        return self.shared_memory or self.device_budget_bytes is None

    def limits(self) -> tuple[Limit, ...]:
        """Return the budgets that a plan must keep."""
        limits: list[Limit] = []
        if self.device_budget_bytes is not None:
            limits.append(Limit("device memory", (Memory.DEVICE,), self.device_budget_bytes))
        if self.host_budget_bytes is not None:
            both = (Memory.HOST, Memory.DEVICE)
            limits.append(Limit("host memory", both if self.is_shared else (Memory.HOST,), self.host_budget_bytes))
        return tuple(limits)

    def given(self) -> dict[str, int]:
        """Return the fields that a user fixed, with their values."""
        decided = {choice.field: choice for choice in self.decided if choice.origin is not Origin.GIVEN}
        found: dict[str, int] = {}
        for name in ("context_cells", "chunk_tokens", "expert_slots", "page_bytes"):
            value = getattr(self, name)
            if value is not None and not (name in decided and decided[name].value == value):
                found[name] = value
        return found

    def choice(self, field: str, value: int) -> Choice:
        """Return the choice for a value that this request holds: given, or as an earlier plan decided it."""
        for choice in self.decided:
            if choice.field == field and choice.value == value:
                return choice
        return Choice(field, value, Origin.GIVEN, "")

    def to_json(self) -> dict[str, Any]:
        """Return plain data for a JSON file."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["reserve_origin"] = str(self.reserve_origin)
        data["moving"] = asdict(self.moving)
        data["ranking"] = None if self.ranking is None else self.ranking.to_json()
        data["decided"] = [asdict(choice) | {"origin": str(choice.origin)} for choice in self.decided]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any], ranking: ExpertRanking | None = None) -> PlanRequest:
        """Return the request that `to_json` gave `data` for. Raises ConfigError if `ranking` is not the one it names.

        ranking: the one of the request, of which `data` has the digest only.
        """
        decided = tuple(Choice(**(d | {"origin": Origin(d["origin"])})) for d in data["decided"])
        moving = MovingMemory(**data["moving"])
        origin = Origin(data["reserve_origin"])
        known = ExpertRanking.named_in(data["ranking"], ranking)
        parts = {"reserve_origin": origin, "decided": decided, "moving": moving, "ranking": known}
        return cls(**(dict(data) | parts))


def check_request(request: PlanRequest, sizes: ModelSizes) -> None:
    """Raise one ConfigError that lists every value out of range and every contradiction, each naming both sides."""
    problems = [*_value_problems(request), *_contradictions(request, sizes)]
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError(f"{len(problems)} settings cannot be used:\n" + "\n".join(f"  - {p}" for p in problems))


def setting_text(field: str, value: int) -> str:
    """Return a setting as it is typed on the command line, in the unit of its key."""
    unit = {"page_bytes": KIB, "stage_bytes": MIB}.get(field, 1)
    return f"{KEYS[field]}={value // unit}"


def _value_problems(r: PlanRequest) -> list[str]:
    problems: list[str] = []
    lows = {"context_cells": 1, "workload_cells": 1, "chunk_tokens": 1, "chunk_auto_max": 1, "expert_slots": 0}
    lows |= {"device_budget_bytes": 0, "host_budget_bytes": 0, "reserve_bytes": 0, "stage_bytes": 0}
    for name, low in lows.items():
        value = getattr(r, name)
        if value is not None and value < low:
            problems.append(f"{KEYS.get(name, name)}={value}: must be at least {low}")
    if r.moving.resident_cells < 0:
        problems.append(f"kv.resident_cells={r.moving.resident_cells}: must be at least 0 (all cells on the device)")
    if not 1 <= r.spec_window <= MAX_WINDOW_TOKENS:
        problems.append(f"spec.window={r.spec_window}: must be from 1 (no drafts) to {MAX_WINDOW_TOKENS}")
    if r.kv_type not in KV_TYPES:
        problems.append(f"kv.type={r.kv_type}: must be one of {', '.join(KV_TYPES)}")
    if r.page_bytes is not None and (r.page_bytes < MIN_PAGE_BYTES or r.page_bytes % WORD_BYTES):
        problems.append(
            f"engine.page_kib={r.page_bytes / KIB:g} ({r.page_bytes} bytes): a page must have at least {MIN_PAGE_BYTES}"
            f" bytes, a multiple of {WORD_BYTES}"
        )
    elif r.page_bytes is not None and r.expert_kernels and r.page_bytes % PAGE_MULTIPLE_BYTES:
        problems.append(
            f"engine.page_kib={r.page_bytes / KIB:g} ({r.page_bytes} bytes) and engine.kernels: the kernels read whole"
            f" lines of {PAGE_MULTIPLE_BYTES} bytes of a page. Set engine.page_kib to a whole number, or"
            " engine.kernels=reference"
        )
    return problems


def _contradictions(r: PlanRequest, sizes: ModelSizes) -> list[str]:
    g, problems = sizes.geometry, []
    longest = g.context_length
    if r.context_cells is not None and r.context_cells > longest:
        problems.append(
            f"model.max_context={r.context_cells} and the model's context_length={longest}: the model was made for at"
            f" most {longest} tokens. Set model.max_context={longest} or less"
        )
    if r.workload_cells is not None and r.workload_cells > longest:
        problems.append(
            f"the workload needs {r.workload_cells} tokens of context and the model's context_length={longest}: shorten"
            f" the prompt or set workload.max_output_tokens lower, by {r.workload_cells - longest} tokens together"
        )
    elif r.workload_cells is not None and r.context_cells is not None and r.workload_cells > r.context_cells:
        problems.append(
            f"model.max_context={r.context_cells} and the workload, which needs {r.workload_cells} tokens: set"
            f" model.max_context={r.workload_cells}"
        )
    with_draft = r.spec_window > 1 and g.num_mtp_layers > 0
    blocks = sizes.blocks(with_draft)
    if r.expert_slots is not None and r.expert_slots > blocks * g.num_experts:
        problems.append(
            f"cache.slots={r.expert_slots} and the model's {blocks} blocks x {g.num_experts} experts ="
            f" {blocks * g.num_experts}: there cannot be more slots than experts. Set"
            f" cache.slots={blocks * g.num_experts} or less"
        )
    if r.ranking is not None:
        problems += _ranking_problems(r, r.ranking, sizes, blocks)
    if r.moving.resident_cells and r.moving.grow_init_cells is not None:
        problems.append(
            f"kv.resident_cells={r.moving.resident_cells} and policy.kv_grow.enabled=true: cells on the device either"
            " grow with the sequence or are a window of it. Leave one of them out"
        )
    if r.moving.head_alias and not sizes.head_bytes:
        problems.append(
            "policy.head_alias.enabled=true and this model: its head is the embedding, so that unloading it frees"
            " nothing. Set policy.head_alias.enabled=false"
        )
    if not g.has_trunk:
        problems.append(
            f"model {g.name!r} holds the draft block only, no layers that read a prompt: set model.path to the file"
            " with the whole model"
        )
    return problems


def _ranking_problems(r: PlanRequest, ranking: ExpertRanking, sizes: ModelSizes, num_blocks: int) -> list[str]:
    g = sizes.geometry
    problem = ranking.model_problem(g.name, g.num_layers, g.num_experts)
    if problem is not None:
        return [problem]
    ranked = slot_order((1,) * num_blocks, g.num_experts, ranking).num_ranked
    if r.expert_slots is None or not ranked < r.expert_slots <= num_blocks * g.num_experts:
        return []
    return [
        f"cache.slots={r.expert_slots} and cache.profile={ranking.file}: it ranks {ranked} experts of the loaded"
        f" blocks, and only ranked ones get a slot. Set cache.slots={ranked} or less, or give a ranking of more experts"
    ]

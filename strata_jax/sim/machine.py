"""What stays the same during a simulation, and its journal: the simulated clock, events, metrics and warnings."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from strata_jax.memory.strata.request import ExpertTier
from strata_jax.memory.strata.result import StrataPlan
from strata_jax.memory.strata.sizes import PackSizes
from strata_jax.policies.ledger_now import owner_bytes
from strata_jax.policies.moves import Move, MoveKind
from strata_jax.policies.policy import PolicyContext
from strata_jax.policies.prompt_segments import CheckpointRule
from strata_jax.policies.stack import PolicyStack
from strata_jax.policies.state import MemoryState, Step, initial_slots
from strata_jax.sim.acceptance import DraftModel
from strata_jax.sim.decode_cost import auto_pcie_frac
from strata_jax.sim.os_effects import spill_bytes, spill_ms
from strata_jax.sim.popularity import ExpertTraffic, PopularityCurve, Residency, expert_traffic
from strata_jax.sim.profile import Profile
from strata_jax.sim.trace import RoutingTrace

LOW_FREE_MIB = 1_024  # free device memory below which upstream warns when a request begins (0.1.43.1)


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Choices of a simulation that no plan holds.

    Attributes:
        spec_min_p: a draft below this confidence is not verified.
        pcie_frac: share of decode misses that the device reads over PCIe; None: by the probed rate.
        checkpoints: when states are stored; how many are kept is the plan's.
        head_pinned: the head comes back from pinned memory at the link's rate; None: unless the original is imitated.
        vram_change_bytes: other programs want this much free before the first request; None: no change.
        spill: model what Windows does when device memory is nearly full: what it moves out is read over PCIe once a
            round and once a chunk.
        noise: standard deviation of the logarithm of a factor with median 1 on the decode times of each request,
            drawn from `seed`; prompts vary a third as much. 0: none. Published repeats of decoding vary by 3-20 %,
            those of prompts by 1-5 %.
        trace: recorded routing that takes the place of the popularity curve.
        replacement_decay: factor of use counts where rounds replace residents, for which a trace is needed.
    """

    spec_min_p: float = 0.5
    pcie_frac: float | None = None
    checkpoints: CheckpointRule = field(default_factory=CheckpointRule)
    head_pinned: bool | None = None
    vram_change_bytes: int | None = None
    spill: bool = False
    noise: float = 0.0
    seed: int = 0
    curve: PopularityCurve = field(default_factory=PopularityCurve)
    drafts: DraftModel = field(default_factory=DraftModel)
    trace: RoutingTrace | None = None
    replacement_decay: float | None = None


class Sink(Protocol):
    """Where events and metrics go: `RunRecord` is one."""

    def event(self, kind: str, **values: Any) -> None: ...

    def metric(self, kind: str, **values: Any) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """A card, a model and a plan, as the stages of a request need them."""

    plan: StrataPlan
    sizes: PackSizes
    profile: Profile
    stack: PolicyStack
    options: SimOptions
    traffic: ExpertTraffic
    in_ram: NDArray[np.bool_]
    pcie_frac: float

    @classmethod
    def build(
        cls, plan: StrataPlan, sizes: PackSizes, profile: Profile, stack: PolicyStack, options: SimOptions
    ) -> Machine:
        """Put the parts together and find out which experts have a copy in RAM."""
        traffic = expert_traffic(sizes, options.curve, options.trace, options.replacement_decay)
        frac = auto_pcie_frac(profile) if options.pcie_frac is None else options.pcie_frac
        return cls(plan, sizes, profile, stack, options, traffic, experts_in_ram(plan, sizes), frac)

    @property
    def ctx(self) -> PolicyContext:
        return self.stack.ctx

    def residency(self, state: MemoryState) -> Residency:
        """Return what the experts that can be used at present answer for."""
        return self.traffic.residency(state.resident_ranks())

    def spilled_ms(self, state: MemoryState) -> float:
        """Return what a pass over all weights pays for memory that the system has moved out; 0 unless asked for."""
        if not self.options.spill:
            return 0.0
        return spill_ms(self.profile, spill_bytes(self.plan.request.spills_on(self.plan.card), state.free_bytes))


def experts_in_ram(plan: StrataPlan, sizes: PackSizes) -> NDArray[np.bool_]:
    """Return bool[ranks], whether an expert has a copy in RAM (planning notes 2.8).

    An arena holds all of them. Otherwise those without a slot have copies, the hottest first, as many as the plan has;
    then the occupants of the last slots. Files only: the page cache holds what the RAM left by the plan can.
    """
    if plan.tier is ExpertTier.ARENA:
        return np.ones(sizes.num_ranks, dtype=np.bool_)
    copies = np.zeros(sizes.num_ranks, dtype=np.bool_)
    occupant = initial_slots(sizes, plan).occupant
    copies[occupant[occupant >= 0]] = True
    absent = np.flatnonzero(~copies)
    copies[:] = False
    if plan.tier is ExpertTier.RESIDENT:
        last = occupant[plan.ram_copies_from_slot :]
        copies[last[last >= 0]] = True
        copies[absent[: plan.ram_resident_experts]] = True
        return copies
    room = plan.card.ram_bytes - plan.kv_pinned_ram_bytes - plan.conversation_budget_bytes - plan.expert_headroom_bytes
    cached = np.searchsorted(np.cumsum(sizes.rank_bytes[absent]), max(0, room), side="right")
    copies[absent[: int(cached)]] = True
    return copies


@dataclass(slots=True, eq=False)
class Journal:
    """The simulated clock and everything that is written down. Without a sink only warnings are kept."""

    machine: Machine
    sink: Sink | None = None
    now_ms: float = 0.0
    warnings: dict[str, None] = field(default_factory=dict)

    def event(self, kind: str, **values: Any) -> None:
        """Write an event at the present simulated time."""
        if self.sink is not None:
            self.sink.event(kind, **self._tags(), **values)

    def metric(self, kind: str, **values: Any) -> None:
        """Write a metric at the present simulated time."""
        if self.sink is not None:
            self.sink.metric(kind, **self._tags(), **values)

    def loaded(self, state: MemoryState) -> None:
        """Write what each owner of device memory got at the start."""
        if self.sink is not None:
            for owner, num_bytes in owner_bytes(self.machine.sizes, self.machine.plan, state).items():
                self.event("load", owner=str(owner), bytes=num_bytes)

    def memory(self, state: MemoryState, phase: str) -> None:
        """Write who owns the device memory now."""
        if self.sink is not None:
            owners = owner_bytes(self.machine.sizes, self.machine.plan, state)
            self.event("memory", phase=phase, owners={str(owner): count for owner, count in owners.items()})

    def warn(self, text: str, detail: str = "") -> None:
        """Keep a warning that begins with `text`, once, and write it as an event the first time."""
        if not any(known.startswith(text) for known in self.warnings):
            self.warnings[text + detail] = None
            self.event("warning", text=text + detail)

    def carry_out(self, step: Step, ms_of: Callable[[Move], float]) -> dict[MoveKind, float]:
        """Write a step's moves, each with its time, advance the clock, and return the ms by kind."""
        spent: dict[MoveKind, float] = {}
        for move in step.moves:
            ms = ms_of(move)
            self.now_ms += ms
            spent[move.kind] = spent.get(move.kind, 0.0) + ms
            if self.sink is not None:
                detail = dict(move.detail)
                self.event(
                    move.kind.value, owner=move.owner, bytes=move.bytes, count=move.count, first=move.first,
                    last=move.last, cause=move.cause, conversation=move.conversation, ms=ms, **detail,
                )  # fmt: skip
        for note in step.notes:
            self.event("note", text=note)
        return spent

    def _tags(self) -> dict[str, Any]:
        return {"time_s": self.now_ms / 1000, "executor": "sim", "calibrated": self.machine.profile.calibrated}


def noise_factors(options: SimOptions, num_requests: int) -> list[tuple[float, float]]:
    """Return each request's factors of prompt and decode times; all 1 without noise."""
    if options.noise <= 0:
        return [(1.0, 1.0)] * num_requests
    rng = random.Random(options.seed)
    return [
        (math.exp(rng.gauss(0, options.noise / 3)), math.exp(rng.gauss(0, options.noise))) for _ in range(num_requests)
    ]

"""The memory ledger: every byte has an owner, in every phase of a run.

A ledger is data: entries with bytes per phase, where each number comes from and the rule that gave it. It decides
nothing (``plan.py`` does) and measures nothing. All sizes are integer bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MIB = 2**20


class Owner(StrEnum):
    """Who bytes belong to."""

    SYSTEM = "other programs and driver"
    RESERVE = "reserve"
    DENSE = "dense weights"
    EMBEDDING = "embedding"
    HEAD = "head"
    DRAFTER = "drafter"
    EXPERT_SLOTS = "expert slots"
    KV = "K/V"
    INDEX_KEYS = "index keys"
    RECURRENT_STATE = "recurrent state"
    TABLES = "tables"
    PROMPT_BUFFERS = "prompt buffers"
    DECODE_BUFFERS = "decode buffers"
    DRAFT_BIND = "draft vocabulary rows"
    LATE = "taken after the cache is sized"
    BANK = "expert bank"
    RESIDENT_COPIES = "resident expert copies"
    CHECKPOINTS = "checkpoints"
    CONVERSATIONS = "parked conversations"
    FREE = "free"


class Memory(StrEnum):
    """Where bytes lie."""

    DEVICE = "device"
    HOST = "host"


class Phase(StrEnum):
    """The phases of a run; memory is planned for the worst of them."""

    START = "start"
    PREFILL = "prefill"
    DECODE = "decode"
    PARK = "park"


class Origin(StrEnum):
    """Where a number comes from."""

    GIVEN = "given"
    DEFAULT = "default"
    COMPUTED = "computed"
    ESTIMATED = "estimated"


PHASES: tuple[Phase, ...] = tuple(Phase)


@dataclass(frozen=True, slots=True)
class Entry:
    """Bytes of one item of one owner in each phase.

    Attributes:
        item: what it is, unique within its owner and memory.
        phase_bytes: bytes in the order of `PHASES`.
        rule: the formula, with its numbers.
    """

    owner: Owner
    item: str
    phase_bytes: tuple[int, int, int, int]
    memory: Memory
    origin: Origin
    rule: str

    @property
    def peak_bytes(self) -> int:
        return max(self.phase_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for a JSON file."""
        return {
            "owner": str(self.owner),
            "item": self.item,
            "memory": str(self.memory),
            "origin": str(self.origin),
            "rule": self.rule,
            "bytes": dict(zip(map(str, PHASES), self.phase_bytes, strict=True)),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Entry:
        """Return the entry that `to_json` gave `data` for."""
        start, prefill, decode, park = (int(data["bytes"][phase]) for phase in PHASES)
        return cls(
            Owner(data["owner"]), data["item"], (start, prefill, decode, park), Memory(data["memory"]),
            Origin(data["origin"]), data["rule"],
        )  # fmt: skip


def always(owner: Owner, item: str, num_bytes: int, rule: str, memory: Memory = Memory.DEVICE,
           origin: Origin = Origin.COMPUTED) -> Entry:  # fmt: skip
    """Return an entry that takes the same bytes in every phase."""
    return Entry(owner, item, (num_bytes, num_bytes, num_bytes, num_bytes), memory, origin, rule)


def during(phase: Phase, owner: Owner, item: str, num_bytes: int, rule: str,
           origin: Origin = Origin.ESTIMATED) -> Entry:  # fmt: skip
    """Return an entry of device memory that is taken in one phase only."""
    start, prefill, decode, park = (num_bytes if each is phase else 0 for each in PHASES)
    return Entry(owner, item, (start, prefill, decode, park), Memory.DEVICE, origin, rule)


@dataclass(frozen=True, slots=True)
class Ledger:
    """All entries of a plan."""

    entries: tuple[Entry, ...]

    def total_bytes(self, phase: Phase, *memories: Memory) -> int:
        """Return the bytes of a phase in the given memories (none given: in all)."""
        idx = PHASES.index(phase)
        return sum(e.phase_bytes[idx] for e in self.entries if not memories or e.memory in memories)

    def peak(self, *memories: Memory) -> tuple[Phase, int]:
        """Return the phase that needs most in the given memories, the earliest of equals, and its bytes."""
        totals = phase_totals(self.entries, memories)
        worst = max(totals)
        return PHASES[totals.index(worst)], worst

    def owner_bytes(self, phase: Phase, *memories: Memory) -> dict[Owner, int]:
        """Return the bytes of each owner in a phase, owners without an entry left out."""
        idx = PHASES.index(phase)
        totals: dict[Owner, int] = {}
        for e in self.entries:
            if not memories or e.memory in memories:
                totals[e.owner] = totals.get(e.owner, 0) + e.phase_bytes[idx]
        return totals

    def peak_owner_bytes(self) -> dict[Owner, int]:
        """Return the bytes of every owner in the phase in which it needs most; 0 for owners without an entry."""
        peaks = dict.fromkeys(Owner, 0)
        for phase in PHASES:
            for owner, num_bytes in self.owner_bytes(phase).items():
                peaks[owner] = max(peaks[owner], num_bytes)
        return peaks

    def largest_owners(self, phase: Phase, *memories: Memory, count: int = 3) -> tuple[tuple[Owner, int], ...]:
        """Return the owners with most bytes in a phase, largest first."""
        ranked = sorted(self.owner_bytes(phase, *memories).items(), key=lambda pair: -pair[1])
        return tuple(pair for pair in ranked if pair[1] > 0)[:count]

    def check(self) -> None:
        """Raise ValueError if an entry is negative or an item has two entries; sums conserve bytes by construction."""
        seen: set[tuple[Owner, Memory, str]] = set()
        for e in self.entries:
            key = (e.owner, e.memory, e.item)
            if min(e.phase_bytes) < 0:
                raise ValueError(f"ledger: {e.owner} / {e.item} has negative bytes {e.phase_bytes}")
            if key in seen:
                raise ValueError(f"ledger: {e.owner} / {e.item} ({e.memory}) has two entries")
            seen.add(key)

    def to_json(self) -> list[dict[str, Any]]:
        """Return plain data for a JSON file."""
        return [e.to_json() for e in self.entries]

    @classmethod
    def from_json(cls, data: Sequence[dict[str, Any]]) -> Ledger:
        """Return the ledger that `to_json` gave `data` for."""
        return cls(tuple(Entry.from_json(entry) for entry in data))


def phase_totals(entries: Iterable[Entry], memories: Sequence[Memory] = ()) -> tuple[int, int, int, int]:
    """Return the bytes of each phase in the given memories (none given: in all)."""
    start = prefill = decode = park = 0
    for e in entries:
        if not memories or e.memory in memories:
            a, b, c, d = e.phase_bytes
            start, prefill, decode, park = start + a, prefill + b, decode + c, park + d
    return start, prefill, decode, park


@dataclass(frozen=True, slots=True)
class Limit:
    """The bytes that the entries of some memories may take together.

    Attributes:
        name: how messages call it.
        memories: whose entries count; both where device memory is a part of host memory.
    """

    name: str
    memories: tuple[Memory, ...]
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class Shortfall:
    """By how much a ledger exceeds a limit, in the phase that needs most."""

    limit: Limit
    phase: Phase
    needed_bytes: int

    @property
    def short_bytes(self) -> int:
        return self.needed_bytes - self.limit.budget_bytes


def worst_shortfall(entries: Iterable[Entry], limits: Sequence[Limit]) -> Shortfall | None:
    """Return the largest excess over any limit, or None if the entries fit all of them."""
    entries = tuple(entries)
    return worst_excess({memory: phase_totals(entries, (memory,)) for memory in Memory}, limits)


def worst_excess(by_memory: Mapping[Memory, tuple[int, int, int, int]], limits: Sequence[Limit]) -> Shortfall | None:
    """Return the largest excess over any limit, or None. by_memory: the bytes of each phase."""
    found: list[Shortfall] = []
    for limit in limits:
        totals = [sum(phase) for phase in zip(*(by_memory[memory] for memory in limit.memories))]
        worst = max(totals)
        if worst > limit.budget_bytes:
            found.append(Shortfall(limit, PHASES[totals.index(worst)], worst))
    return max(found, key=lambda s: s.short_bytes, default=None)

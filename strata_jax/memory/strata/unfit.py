"""A Strata plan that does not fit: by how much, who takes the memory, and which settings would fit.

Every value named here has been planned again and fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata_jax.errors import ConfigError, DoesNotFit
from strata_jax.memory.ledger import MIB, Ledger, Memory, Owner, Phase
from strata_jax.memory.plan_keys import undecided
from strata_jax.memory.strata.request import StrataRequest
from strata_jax.memory.strata.what_fits import (
    KEYS,
    ReadTokens,
    alternatives,
    larger_reserve,
    largest_chunk,
    largest_context,
    largest_slots,
    together,
)

WHILE = {
    Phase.START: "at the start",
    Phase.PREFILL: "while a prompt is read",
    Phase.DECODE: "while decoding",
    Phase.PARK: "while parked",
}


@dataclass(frozen=True, slots=True)
class Shortage:
    """What the planner found when it could not go on.

    Attributes:
        memory: what is short. needed_bytes: all that must be there; budget_bytes: what there is.
        what: the item that found no room. ledger: what is needed, the reserve and that item included.
        slots: expert slots for which there was room; 0: not known.
        phase: the phase whose largest owners are named.
        reserve_mib: the reserve of a plan in which every item found room and `phase` still takes too much (`what` says
            so); None: an item found no room.
    """

    memory: Memory
    needed_bytes: int
    budget_bytes: int
    what: str
    ledger: Ledger
    slots: int = 0
    phase: Phase = Phase.PREFILL
    reserve_mib: int | None = None

    @property
    def short_bytes(self) -> int:
        return self.needed_bytes - self.budget_bytes

    @property
    def overcommits(self) -> bool:
        """Whether every item found room, but the driver would have to page device memory."""
        return self.reserve_mib is not None


@dataclass(frozen=True, slots=True)
class StrataUnfit:
    """Why a request cannot be planned on a card.

    Attributes:
        owners: the three largest owners of the memory that is short, with their bytes.
        given: the settings held fixed, as typed.
        largest_context, largest_chunk, largest_slots: most that fits with the other settings as they are, each planned
            again; None where nothing does.
        alternatives: other settings, each enough on its own. together: enough when set at once, where none is alone.
    """

    shortage: Shortage
    owners: tuple[tuple[Owner, int], ...]
    given: tuple[str, ...]
    largest_context: int | None
    largest_chunk: int | None
    largest_slots: int | None
    alternatives: tuple[str, ...]
    together: tuple[str, ...]

    @property
    def shortfall_bytes(self) -> int:
        return self.shortage.short_bytes

    @property
    def ledger(self) -> Ledger:
        return self.shortage.ledger

    def enough_alone(self) -> tuple[str, ...]:
        """Return the settings of which each is enough, as typed."""
        largest = {
            "expert_cache": self.largest_slots,
            "context_cells": self.largest_context,
            "chunk_tokens": self.largest_chunk,
        }
        return (*(f"{KEYS[f]}={v}" for f, v in largest.items() if v is not None), *self.alternatives)

    def message(self) -> str:
        """Return the text for the user: shortfall, largest owners, fixed settings, what would fit."""
        s = self.shortage
        where = "device memory" if s.memory is Memory.DEVICE else "host memory"
        owners = ", ".join(f"{owner} {num_bytes / MIB:,.1f} MiB" for owner, num_bytes in self.owners)
        parts = [
            f"the plan does not fit the {where}: {s.what}. It needs {s.needed_bytes / MIB:,.1f} MiB, there are"
            f" {s.budget_bytes / MIB:,.1f} MiB: {self.shortfall_bytes / MIB:,.1f} MiB ({self.shortfall_bytes:,} bytes)"
            " too few.",
            f"Most of it: {owners}.",
            f"Held fixed: {', '.join(self.given)}.",
        ]
        alone = self.enough_alone()
        if alone:
            parts.append(f"Each of these is enough on its own (checked): {'; '.join(alone)}.")
        elif self.together:
            parts.append(f"Enough together (checked): {' '.join(self.together)}.")
        else:
            more = "hardware.vram_mib" if s.memory is Memory.DEVICE else "hardware.ram_mib"
            parts.append(
                "No context, chunk or number of slots is small enough. Use a smaller quantisation (quant=...) or a"
                f" machine with more memory ({more})."
            )
        if s.overcommits:
            parts.append("A driver that pages device memory runs it, slowly: policy.head_alias.spill=true says so.")
        return " ".join(parts)

    def error(self) -> DoesNotFit:
        """Return the exception that says all this."""
        return DoesNotFit(self.message(), shortfall_bytes=self.shortfall_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for ``plan.json`` and sweep rows."""
        return {
            "fits": False,
            "shortfall_mib": self.shortfall_bytes / MIB,
            **undecided(),
            "shortfall_bytes": self.shortfall_bytes,
            "limit": f"{self.shortage.memory} memory",
            "owners": {str(owner): num_bytes for owner, num_bytes in self.owners},
            "given": list(self.given),
            "largest": {
                "context_cells": self.largest_context,
                "chunk_tokens": self.largest_chunk,
                "expert_slots": self.largest_slots,
            },
            "alternatives": list(self.alternatives),
            "together": list(self.together),
            "message": self.message(),
            "ledger": self.ledger.to_json(),
        }


def explain(request: StrataRequest, shortage: Shortage, read_tokens: ReadTokens, *, slot_step: int = 1) -> StrataUnfit:
    """Say why a request does not fit.

    Args:
        read_tokens: plans a request again; ConfigError counts as what does not fit.
        slot_step: slots that belong together where every layer has equally many.
    """

    def chunk(other: StrataRequest) -> int:
        try:
            return read_tokens(other)
        except ConfigError:
            return 0

    largest = {
        "context_cells": largest_context(request, chunk),
        "chunk_tokens": largest_chunk(request, chunk),
        "expert_cache": largest_slots(request, shortage.slots, chunk, slot_step if request.cache_per_layer else 1),
    }
    others = tuple(alternatives(request, shortage.memory, chunk))
    if shortage.reserve_mib is not None:
        least = shortage.reserve_mib - (-shortage.short_bytes // MIB)
        larger = larger_reserve(request, shortage.reserve_mib, least, chunk)
        others = others if larger is None else (f"{KEYS['reserve_mib']}={larger}", *others)
    alone = others or any(value is not None for value in largest.values())
    return StrataUnfit(
        shortage=shortage,
        owners=shortage.ledger.largest_owners(shortage.phase, shortage.memory),
        given=given_settings(request),
        largest_context=largest["context_cells"],
        largest_chunk=largest["chunk_tokens"],
        largest_slots=largest["expert_cache"],
        alternatives=others,
        together=() if alone else together(request, chunk),
    )


def given_settings(request: StrataRequest) -> tuple[str, ...]:
    """Return the settings that a plan must keep, as typed; those that hold back most first. What is auto is not."""
    values: dict[str, Any] = {}
    if request.expert_cache is not None:
        values["expert_cache"] = request.expert_cache
    if request.chunk_tokens is not None:
        values["chunk_tokens"] = request.chunk_tokens
    if request.cache_per_layer:
        values["cache_per_layer"] = "true"
    values |= {"context_cells": request.context_cells, "kv_type": request.kv_type}
    if request.kv_resident_cells > 0:
        values["kv_resident_cells"] = request.kv_resident_cells
    if request.own == "on":
        values["own"] = request.own
    if not request.borrow:
        values["borrow"] = "false"
    if request.reserve_given:
        values["reserve_mib"] = request.reserve_mib
    return tuple(f"{KEYS[name]}={value}" for name, value in values.items())

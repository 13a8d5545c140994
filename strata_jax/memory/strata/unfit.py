"""A Strata plan that does not fit: by how much, who takes the memory, and which settings would fit.

Every value named here has been planned again and fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from strata_jax.errors import ConfigError, DoesNotFit
from strata_jax.memory.layout import largest_where
from strata_jax.memory.ledger import MIB, Ledger, Memory, Owner, Phase
from strata_jax.memory.strata.request import MIN_RESIDENT_CELLS, ExpertTier, StrataRequest

CONTEXT_STEP_CELLS = 256
CHUNK_STEP_TOKENS = 256
KEYS = {
    "context_cells": "model.max_context",
    "chunk_tokens": "prefill.chunk",
    "expert_cache": "cache.slots",
    "kv_type": "kv.type",
    "kv_resident_cells": "kv.resident_cells",
    "reserve_mib": "hardware.vram_reserve_mib",
    "borrow": "prefill.borrow",
    "own": "prefill.own",
    "cache_per_layer": "cache.per_layer",
}
_SMALLER_KV = {"f32": "f16", "f16": "int8", "bf16": "int8", "int8": "k8v4", "k8v4": "q4_0"}

Fits = Callable[[StrataRequest], bool]


@dataclass(frozen=True, slots=True)
class Shortage:
    """What the planner found when it could not go on.

    Attributes:
        memory: what is short. needed_bytes: all that must be there; budget_bytes: what there is.
        what: the item that found no room. ledger: what is needed, the reserve and that item included.
    """

    memory: Memory
    needed_bytes: int
    budget_bytes: int
    what: str
    ledger: Ledger


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
        return self.shortage.needed_bytes - self.shortage.budget_bytes

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
        return " ".join(parts)

    def error(self) -> DoesNotFit:
        """Return the exception that says all this."""
        return DoesNotFit(self.message(), shortfall_bytes=self.shortfall_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for ``plan.json`` and sweep rows."""
        return {
            "fits": False,
            "shortfall_mib": self.shortfall_bytes / MIB,
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


def explain(request: StrataRequest, shortage: Shortage, fits: Fits) -> StrataUnfit:
    """Say why a request does not fit. fits: plans a request and says whether it fits; ConfigError counts as no."""

    def allowed(other: StrataRequest) -> bool:
        try:
            return fits(other)
        except ConfigError:
            return False

    largest = {name: _largest(request, name, allowed) for name in ("context_cells", "chunk_tokens", "expert_cache")}
    alternatives = tuple(_alternatives(request, shortage, allowed))
    alone = alternatives or any(value is not None for value in largest.values())
    return StrataUnfit(
        shortage=shortage,
        owners=shortage.ledger.largest_owners(Phase.PREFILL, shortage.memory),
        given=given_settings(request),
        largest_context=largest["context_cells"],
        largest_chunk=largest["chunk_tokens"],
        largest_slots=largest["expert_cache"],
        alternatives=alternatives,
        together=() if alone else _together(request, allowed),
    )


def given_settings(request: StrataRequest) -> tuple[str, ...]:
    """Return the settings that a plan must keep, as typed; those that hold back most first."""
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
    if request.own != "off":
        values["own"] = request.own
    if not request.borrow:
        values["borrow"] = "false"
    values["reserve_mib"] = request.reserve_mib
    return tuple(f"{KEYS[name]}={value}" for name, value in values.items())


def _largest(request: StrataRequest, field: str, fits: Fits) -> int | None:
    """Return the largest smaller value of a field that fits: contexts and chunks in steps of 256, slots one by one."""
    value = getattr(request, field)
    if value is None:
        return None
    step = {"context_cells": CONTEXT_STEP_CELLS, "chunk_tokens": CHUNK_STEP_TOKENS}.get(field, 1)

    def smaller_fits(steps: int) -> bool:
        change: dict[str, Any] = {field: steps * step}
        return fits(replace(request, **change))

    found = largest_where(smaller_fits, 1, (value - 1) // step)
    return None if found is None else found * step


def _alternatives(request: StrataRequest, shortage: Shortage, fits: Fits) -> Iterator[str]:
    """Give settings that are enough on their own."""
    if shortage.memory is Memory.HOST:
        for tier in (ExpertTier.RESIDENT, ExpertTier.MMAP):
            if tier is not request.tier and fits(replace(request, tier=tier)):
                yield f"ram.tier={tier}"
                break
        return
    kv_type = request.kv_type
    while kv_type in _SMALLER_KV:
        kv_type = _SMALLER_KV[kv_type]
        if fits(replace(request, kv_type=kv_type)):
            yield f"kv.type={kv_type}"
            break
    if not request.kv_streamed and fits(replace(request, kv_resident_cells=MIN_RESIDENT_CELLS)):
        yield f"kv.resident_cells={MIN_RESIDENT_CELLS}"
    if not request.grow.enabled and fits(replace(request, grow=replace(request.grow, enabled=True))):
        yield "kv.grow.enabled=true"
    if not request.borrow and fits(replace(request, borrow=True)):
        yield "prefill.borrow=true"
    if request.own == "on" and fits(replace(request, own="auto")):
        yield "prefill.own=auto"
    short_mib = -(-(shortage.needed_bytes - shortage.budget_bytes) // MIB)
    reserve_mib = request.reserve_mib - short_mib
    if reserve_mib >= 0 and fits(replace(request, reserve_mib=reserve_mib, reserve_given=True)):
        yield f"hardware.vram_reserve_mib={reserve_mib}"


def _together(request: StrataRequest, fits: Fits) -> tuple[str, ...]:
    """Return the smallest K/V and an automatic chunk and cache, with the largest context beside them, if they fit."""
    changes: dict[str, Any] = {"kv_type": "q4_0", "chunk_tokens": None, "expert_cache": None, "borrow": True}
    least = replace(request, **changes, own="off", kv_resident_cells=0, cache_per_layer=False)
    context = request.context_cells
    if not fits(least):
        shorter = _largest(least, "context_cells", fits)
        if shorter is None:
            return ()
        context = shorter
    texts = {"kv_type": "q4_0", "chunk_tokens": "auto", "expert_cache": "auto", "borrow": "true"}
    said = [f"{KEYS[name]}={texts[name]}" for name, value in changes.items() if getattr(request, name) != value]
    if request.own != "off":
        said.append("prefill.own=off")
    if request.kv_resident_cells:
        said.append("kv.resident_cells=0")
    if request.cache_per_layer:
        said.append("cache.per_layer=false")
    if context != request.context_cells:
        said.append(f"model.max_context={context}")
    return tuple(said)

"""A plan that does not fit: by how much, who takes the memory, and which settings would fit.

Every value named here has been planned again and fits. The values come from the inverse questions that the planner
itself asks (``candidate.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from strata_jax.errors import ConfigError
from strata_jax.kv_types import KV_TYPES, cell_bytes
from strata_jax.memory import layout
from strata_jax.memory.candidate import Frame
from strata_jax.memory.ledger import MIB, Ledger, Memory, Owner, Phase, Shortfall
from strata_jax.memory.plan_keys import undecided
from strata_jax.memory.request import MIN_CONTEXT_CELLS, PlanRequest, setting_text

Fits = Callable[[PlanRequest], bool]

_WHILE = {
    Phase.START: "from the start",
    Phase.PREFILL: "while a prompt is read",
    Phase.DECODE: "while decoding",
    Phase.PARK: "while parked",
}


@dataclass(frozen=True, slots=True)
class Unfit:
    """Why a request cannot be planned within its budgets.

    Attributes:
        shortfall: the limit exceeded most, by the smallest plan that the given settings allow.
        ledger: that smallest plan.
        owners: the three largest owners and their bytes in the phase of the shortfall.
        given: the settings that the user fixed, as typed.
        largest_context: most cells that fit with the other settings as they are; None if none does.
        largest_chunk, largest_slots: the same for the chunk and the slots.
        alternatives: other settings, each enough on its own.
        together: settings that are enough when set at once, where none is on its own; empty if not even those are.
        smallest_bytes: what the model needs under the exceeded limit with the least of everything.
    """

    shortfall: Shortfall
    ledger: Ledger
    owners: tuple[tuple[Owner, int], ...]
    given: tuple[str, ...]
    largest_context: int | None
    largest_chunk: int | None
    largest_slots: int | None
    alternatives: tuple[str, ...]
    together: tuple[str, ...]
    smallest_bytes: int

    @property
    def shortfall_bytes(self) -> int:
        return self.shortfall.short_bytes

    def enough_alone(self) -> tuple[str, ...]:
        """Return the settings of which each is enough, as typed."""
        largest = {
            "expert_slots": self.largest_slots,
            "context_cells": self.largest_context,
            "chunk_tokens": self.largest_chunk,
        }
        return (*(setting_text(f, v) for f, v in largest.items() if v is not None), *self.alternatives)

    def message(self) -> str:
        """Return the text for the user: shortfall, largest owners, fixed settings, what would fit."""
        s = self.shortfall
        owners = ", ".join(f"{owner} {num_bytes / MIB:,.1f} MiB" for owner, num_bytes in self.owners)
        parts = [
            f"the plan does not fit the {s.limit.name}: it needs {s.needed_bytes / MIB:,.1f} MiB {_WHILE[s.phase]},"
            f" there are {s.limit.budget_bytes / MIB:,.1f} MiB: {s.short_bytes / MIB:,.1f} MiB"
            f" ({s.short_bytes:,} bytes) too few.",
            f"Most of it: {owners}.",
        ]
        if self.given:
            parts.append(f"Fixed by you: {', '.join(self.given)}.")
        alone = self.enough_alone()
        if alone:
            parts.append(f"Each of these is enough on its own (checked): {'; '.join(alone)}.")
        elif self.together:
            parts.append(f"Enough together (checked): {' '.join(self.together)}.")
        else:
            more = "hardware.vram_mib" if s.limit.memories == (Memory.DEVICE,) else "hardware.ram_mib"
            parts.append(
                f"No context, chunk or number of slots is small enough: the least that this model needs is"
                f" {self.smallest_bytes / MIB:,.1f} MiB. Use a file with a smaller quantisation (model.path) or a"
                f" machine with more memory ({more})."
            )
        return " ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for ``plan.json`` and sweep rows."""
        return {
            "fits": False,
            "shortfall_mib": self.shortfall_bytes / MIB,
            **undecided(),
            "shortfall_bytes": self.shortfall_bytes,
            "limit": self.shortfall.limit.name,
            "phase": str(self.shortfall.phase),
            "owners": {str(owner): num_bytes for owner, num_bytes in self.owners},
            "given": list(self.given),
            "largest": {
                "context_cells": self.largest_context,
                "chunk_tokens": self.largest_chunk,
                "expert_slots": self.largest_slots,
            },
            "enough_alone": list(self.enough_alone()),
            "enough_together": list(self.together),
            "message": self.message(),
            "ledger": self.ledger.to_json(),
        }


def explain(frame: Frame, point: tuple[int, int, int], fits: Fits) -> Unfit:
    """Say why a request does not fit.

    Args:
        point: the smallest (context, chunk, slots) that the request allows.
        fits: plans a request and says whether it fits.
    """
    request, ledger = frame.request, Ledger(frame.entries(*point))
    shortfall = frame.shortfall(*point)
    if shortfall is None:
        raise ValueError(f"the candidate {point} fits; there is nothing to explain")
    largest = {name: value for name, value in _largest(frame, point) if fits(_changed(request, name, value))}
    alternatives = tuple(_alternatives(frame, point, shortfall, fits))
    together = () if largest or alternatives else _together(frame, point, fits)
    least = Ledger(frame.entries(min(point[0], MIN_CONTEXT_CELLS), 1, 0))
    return Unfit(
        shortfall=shortfall,
        ledger=ledger,
        owners=ledger.largest_owners(shortfall.phase, *shortfall.limit.memories),
        given=tuple(setting_text(name, value) for name, value in request.given().items()),
        largest_context=largest.get("context_cells"),
        largest_chunk=largest.get("chunk_tokens"),
        largest_slots=largest.get("expert_slots"),
        alternatives=alternatives,
        together=together,
        smallest_bytes=least.peak(*shortfall.limit.memories)[1],
    )


def _largest(frame: Frame, point: tuple[int, int, int]) -> Iterator[tuple[str, int]]:
    """Give the largest slots, context and chunk that fit while the other two stay as they are."""
    context, chunk, slots = point
    fewer = frame.slots_that_fit(context, chunk) if slots else None
    if fewer is not None:
        yield "expert_slots", fewer
    shorter = _largest_context(frame, context, chunk, slots)
    if shorter is not None:
        yield "context_cells", shorter
    smaller = layout.largest_where(lambda t: frame.shortfall(context, t, slots) is None, 1, chunk - 1)
    if smaller is not None:
        yield "chunk_tokens", smaller


def _changed(request: PlanRequest, field: str, value: int) -> PlanRequest:
    changes: dict[str, Any] = {field: value}
    return replace(request, **changes)


def _largest_context(frame: Frame, context: int, chunk: int, slots: int) -> int | None:
    """The largest context in whole blocks below the present one; none where the workload needs the present one."""
    if frame.request.workload_cells is not None:
        return None
    block = frame.block_cells
    low, high = -(-MIN_CONTEXT_CELLS // block), (context - 1) // block
    found = layout.largest_where(lambda n: frame.shortfall(n * block, chunk, slots) is None, low, high)
    return None if found is None else found * block


def _alternatives(frame: Frame, point: tuple[int, int, int], shortfall: Shortfall, fits: Fits) -> Iterator[str]:
    """Give one smaller K/V type, drafts off, the K/V in host memory, and a smaller reserve, where each is enough."""
    request, g = frame.request, frame.sizes.geometry
    for kv_type in _smaller_kv_types(request.kv_type, g.num_kv_heads, g.head_dim):
        if _allowed(fits, replace(request, kv_type=kv_type)):
            yield f"kv.type={kv_type}"
            break
    if frame.with_draft and _allowed(fits, replace(request, spec_window=1)):
        yield "spec.window=1"
    window = _window(frame, point)
    if window is not None and _allowed(fits, window):
        yield f"kv.resident_cells={window.moving.resident_cells}"
    reserve_mib = (request.reserve_bytes - shortfall.short_bytes) // MIB
    if request.device_budget_bytes is not None and reserve_mib >= 0:
        smaller = replace(request, reserve_bytes=reserve_mib * MIB)
        if _allowed(fits, smaller):
            yield f"hardware.vram_reserve_mib={reserve_mib}"


def _window(frame: Frame, point: tuple[int, int, int]) -> PlanRequest | None:
    """The request with the fewest K/V cells on the device, if there are fewer than now and RAM is another memory."""
    context, chunk, _ = point
    moving, least = frame.request.moving, frame.least_resident_cells(chunk)
    if frame.request.is_shared or moving.grow_init_cells is not None or least >= frame.first_cells(context):
        return None
    return replace(frame.request, moving=replace(moving, resident_cells=least))


def _together(frame: Frame, point: tuple[int, int, int], fits: Fits) -> tuple[str, ...]:
    """No slots, the smallest usual chunk and the largest context beside them, if that is enough."""
    chunk = min(point[1], layout.SMALL_BUCKET_TOKENS)
    context = point[0] if frame.request.workload_cells is not None else _largest_context(frame, point[0], chunk, 0)
    if context is None:
        return ()
    if not fits(replace(frame.request, expert_slots=0, chunk_tokens=chunk, context_cells=context)):
        return ()
    changes = {"expert_slots": (point[2], 0), "chunk_tokens": (point[1], chunk), "context_cells": (point[0], context)}
    return tuple(setting_text(name, after) for name, (before, after) in changes.items() if before != after)


def _smaller_kv_types(kv_type: str, num_kv_heads: int, head_dim: int) -> list[str]:
    """The K/V types with smaller cells than the present one, the largest first."""
    sizes: dict[str, int] = {}
    for other in KV_TYPES:
        try:
            sizes[other] = sum(cell_bytes(other, num_kv_heads, head_dim))
        except ConfigError:
            continue  # heads of this width have no blocks of that type
    present = sizes[kv_type]
    return sorted((t for t, size in sizes.items() if size < present), key=lambda t: -sizes[t])


def _allowed(fits: Fits, request: PlanRequest) -> bool:
    try:
        return fits(request)
    except ConfigError:
        return False

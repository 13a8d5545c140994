"""A Strata plan as JSON and back: stable groups for readers, then all that is needed to read the plan again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from enum import Enum
from typing import Any

from strata_jax.errors import FormatError
from strata_jax.memory.ledger import MIB, Ledger
from strata_jax.memory.strata.request import Card, ExpertTier, GrowSettings, StrataRequest, Version
from strata_jax.memory.strata.result import Layout, PromptPath, StrataPlan

_NESTED = ("card", "request", "prompt", "ledger", "notes", "warnings")


def to_json(plan: StrataPlan) -> dict[str, Any]:
    """Return plain data for ``plan.json``.

    The keys up to `ledger` are stable and the same for every planner; `detail` holds the fields of the plan.
    """
    p = plan.prompt
    return {
        "fits": True,
        "shortfall_mib": 0.0,
        "model": plan.pack,
        "memory_model": str(plan.request.version),
        "expert_cache": {"slots": plan.slots, "bytes": plan.cache_bytes, "lent_slots": p.lent_slots},
        "prefill": {
            "chunk_tokens": p.chunk_tokens,
            "buffer_mib": p.buffer_bytes / MIB,
            "layout": str(p.layout),
            "ring_slots": p.ring_slots,
        },
        "kv": {
            "type": plan.request.kv_type,
            "mapped_cells": plan.kv_mapped_cells,
            "mapped_mib": plan.kv_mapped_bytes / MIB,
            "max_cells": plan.request.context_cells,
            "max_mib": plan.kv_max_bytes / MIB,
        },
        "head": {"mib": plan.head_bytes / MIB, "aliased": plan.head_aliased},
        "ram": {
            "expert_headroom_mib": plan.expert_headroom_bytes / MIB,
            "conversation_budget_mib": plan.conversation_budget_bytes / MIB,
            "resident_mib": plan.ram_resident_bytes / MIB,
        },
        "free_after_start_mib": plan.free_after_start_bytes / MIB,
        "overcommit_mib": plan.peak_overcommit_bytes / MIB,
        "notes": list(plan.notes),
        "warnings": list(plan.warnings),
        "ledger": plan.ledger.to_json(),
        "card": _plain(asdict(plan.card)),
        "request": _plain(asdict(plan.request)),
        "prompt": _plain(asdict(plan.prompt)),
        "detail": {f.name: _plain(getattr(plan, f.name)) for f in fields(plan) if f.name not in _NESTED},
    }


def from_json(data: Mapping[str, Any]) -> StrataPlan:
    """Return the plan that `to_json` gave `data` for. Raises FormatError if it is not such data."""
    try:
        request = dict(data["request"])
        request |= {
            "version": Version(request["version"]),
            "tier": ExpertTier(request["tier"]),
            "grow": GrowSettings(**request["grow"]),
        }
        prompt = dict(data["prompt"])
        detail = dict(data["detail"])
        return StrataPlan(
            card=Card(**data["card"]),
            request=StrataRequest(**request),
            prompt=PromptPath(**(prompt | {"layout": Layout(prompt["layout"])})),
            ledger=Ledger.from_json(data["ledger"]),
            notes=tuple(data["notes"]),
            warnings=tuple(data["warnings"]),
            **(detail | {"tier": ExpertTier(detail["tier"])}),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"not a plan that memory_model=strata_* wrote: {type(error).__name__}: {error}. Give a plan.json of such a"
            " run whose plan fits"
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Enum) else value

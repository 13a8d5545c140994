"""The stable groups of ``plan.json``, the same for every planner and for plans that do not fit (docs/plan_json.md)."""

from __future__ import annotations

from typing import Any

GROUPS: dict[str, tuple[str, ...]] = {
    "expert_cache": ("slots", "bytes", "lent_slots"),
    "prefill": ("chunk_tokens", "buffer_mib", "layout", "ring_slots"),
    "kv": ("mapped_cells", "mapped_mib", "max_cells", "max_mib"),
    "head": ("mib", "aliased"),
    "ram": ("expert_headroom_mib", "conversation_budget_mib", "resident_mib"),
}


def undecided() -> dict[str, Any]:
    """Return the groups of a plan that does not fit: every key is there, nothing has been decided."""
    groups: dict[str, Any] = {name: dict.fromkeys(keys) for name, keys in GROUPS.items()}
    return groups | {"free_after_start_mib": None}

"""What kinds of figures there are, how close counts as reproduced, and what a whole table must reach.

The tolerance of a cell follows from the kind of its metric, never from the row it stands in.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Quantity(StrEnum):
    """Kinds of figures that are judged alike."""

    CHUNK = "prompt chunk"
    SLOTS = "expert slots"
    MIB = "memory"
    FREE = "free memory"
    EVENTS = "events"
    PREFILL = "prefill tok/s"
    PROMPT_TIME = "prompt time"
    BUCKET_TIME = "prompt time of production buckets"
    DECODE = "decode"
    SHARE = "share of experts"
    STEP_TIME = "time of one step"
    CHANGE = "change between arms"


@dataclass(frozen=True, slots=True)
class Rule:
    """How close is close.

    Attributes:
        tolerance: largest relative error of a cell that passes. slack: absolute error, in the metric's unit, that
            passes as well; for figures that are small differences of large ones, or percentages.
        median, p90: what the median and the 90th percentile of |error| over all cells must not exceed.
        share: share of the cells that must pass.
    """

    tolerance: float
    slack: float = 0.0
    median: float | None = None
    p90: float | None = None
    share: float | None = None


RULES: dict[Quantity, Rule] = {
    Quantity.CHUNK: Rule(0.0, share=0.85),
    Quantity.SLOTS: Rule(0.015, share=0.90),
    Quantity.MIB: Rule(0.02),
    Quantity.FREE: Rule(0.02, slack=64.0),  # MiB: the slack that the engine itself allows when it checks its reserve
    Quantity.EVENTS: Rule(0.05),
    Quantity.PREFILL: Rule(0.12, median=0.04, p90=0.12),
    Quantity.PROMPT_TIME: Rule(0.12),
    Quantity.BUCKET_TIME: Rule(0.25),
    Quantity.DECODE: Rule(0.20, median=0.08, p90=0.20),
    Quantity.SHARE: Rule(0.05, slack=3.0),  # percentage points
    Quantity.STEP_TIME: Rule(0.25),
    Quantity.CHANGE: Rule(0.15, slack=5.0),  # percentage points
}

SPEEDS = (Quantity.PREFILL, Quantity.PROMPT_TIME, Quantity.BUCKET_TIME, Quantity.DECODE)

QUANTITY_OF: dict[str, Quantity] = {
    "prompt_chunk_tokens": Quantity.CHUNK,
    "expert_cache_slots": Quantity.SLOTS,
    "expert_cache_full_slots": Quantity.SLOTS,
    "lent_slots": Quantity.SLOTS,
    "ring_slots": Quantity.SLOTS,
    "expert_cache_mib": Quantity.MIB,
    "expert_cache_full_mib": Quantity.MIB,
    "expert_cache_gib": Quantity.MIB,
    "lent_gib": Quantity.MIB,
    "own_buffers_mib": Quantity.MIB,
    "kv_vram_gib": Quantity.MIB,
    "kv_pinned_ram_gib": Quantity.MIB,
    "arena_mib": Quantity.MIB,
    "ram_resident_experts_gib": Quantity.MIB,
    "ram_headroom_mib": Quantity.MIB,
    "ram_headroom_gib": Quantity.MIB,
    "needed_gib": Quantity.MIB,
    "vram_free_for_cache_gib": Quantity.MIB,
    "vram_free_gain_gib": Quantity.MIB,
    "vram_free_gib": Quantity.MIB,
    "vram_used_after_load_mib": Quantity.MIB,
    "vram_used_max_mib": Quantity.MIB,
    "vram_used_peak_mib": Quantity.MIB,
    "vram_free_after_start_mib": Quantity.FREE,
    "vram_free_at_capture_mib": Quantity.FREE,
    "vram_free_at_request_mib": Quantity.FREE,
    "vram_free_after_call_mib": Quantity.FREE,
    "vram_free_min_mib": Quantity.FREE,
    "kv_mapped_before_cells": Quantity.EVENTS,
    "kv_mapped_cells": Quantity.EVENTS,
    "given_slots": Quantity.EVENTS,
    "returned_slots": Quantity.EVENTS,
    "refilled_slots": Quantity.EVENTS,
    "moved_experts": Quantity.EVENTS,
    "resident_experts": Quantity.EVENTS,
    "ram_resident_experts": Quantity.EVENTS,
    "reused_tokens": Quantity.EVENTS,
    "chunks_count": Quantity.EVENTS,
    "file_blob_reads": Quantity.EVENTS,
    "crossover_fresh_tokens": Quantity.EVENTS,
    "prefill_tok_s": Quantity.PREFILL,
    "prompt_ms": Quantity.PROMPT_TIME,
    "prompt_s": Quantity.PROMPT_TIME,
    "ttft_s": Quantity.PROMPT_TIME,
    "total_s": Quantity.PROMPT_TIME,
    "decode_tok_s": Quantity.DECODE,
    "round_ms": Quantity.DECODE,
    "hit_rate_pct": Quantity.SHARE,
    "pcie_share_pct": Quantity.SHARE,
    "cpu_experts_per_layer": Quantity.STEP_TIME,
    "copy_wait_ms": Quantity.STEP_TIME,
    "head_load_ms": Quantity.STEP_TIME,
    "relayout_ms": Quantity.STEP_TIME,
    "restore_ms": Quantity.STEP_TIME,
    "added_prompt_s": Quantity.STEP_TIME,
    "prefill_change_pct": Quantity.CHANGE,
    "decode_change_pct": Quantity.CHANGE,
    "prompt_time_change_pct": Quantity.CHANGE,
}


def quantity_of(metric: str, *, bucket: bool) -> Quantity | None:
    """Return the kind of a metric, or None for one that is not compared. bucket: of requests within a size range."""
    found = QUANTITY_OF.get(metric)
    return Quantity.BUCKET_TIME if bucket and found is Quantity.PROMPT_TIME else found

"""Checks of a Strata request: values out of range and settings that contradict each other, all named in one error."""

from __future__ import annotations

from collections.abc import Iterator

from strata_jax.errors import ConfigError
from strata_jax.kv_types import KV_TYPES
from strata_jax.memory.strata.request import MAX_WINDOW_ROWS, Card, StrataRequest
from strata_jax.memory.strata.sizes import PackSizes

OWN = ("auto", "on", "off")
DECIDE_AT = ("filled", "final")
MIN_SEGMENT_MIB = 64


def check_request(sizes: PackSizes, card: Card, request: StrataRequest) -> None:
    """Raise one ConfigError that lists every value out of range and every contradiction, each naming both sides."""
    problems = [*_card_problems(card), *_value_problems(sizes, request), *_contradictions(request)]
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError(f"{len(problems)} settings cannot be used:\n" + "\n".join(f"  - {p}" for p in problems))


def _card_problems(card: Card) -> Iterator[str]:
    for name in ("vram_bytes", "taken_bytes", "late_bytes", "ram_bytes", "touch_bytes", "pinned_entry_bytes"):
        if getattr(card, name) < 0:
            yield f"hardware {card.name}: {name}={getattr(card, name)}: must be at least 0"
    if not 0 <= card.pinned_share <= 1:
        yield f"hardware {card.name}: pinned_share={card.pinned_share}: must be from 0 to 1"
    if card.vmm_chunk_bytes < 1:
        yield f"hardware {card.name}: vmm_chunk_bytes={card.vmm_chunk_bytes}: must be at least 1"


def _value_problems(sizes: PackSizes, r: StrataRequest) -> Iterator[str]:
    ranges: dict[str, tuple[int | None, int, int | None]] = {
        "model.max_context": (r.context_cells, 1, sizes.context_length),
        "kv.resident_cells": (r.kv_resident_cells, 0, None),
        "cache.slots": (r.expert_cache, 0, None),
        "prefill.chunk": (r.chunk_tokens, 1, None),
        "prefill.chunk=auto:N": (r.chunk_auto_max, 1, None),
        "hardware.vram_reserve_mib": (r.reserve_mib, 0, None),
        "policy.head_alias.spare_mib": (r.alias_spare_mib, 0, None),
        "kv.grow.init_cells": (r.grow.init_cells, 1, None),
        "kv.grow.step_cells": (r.grow.step_cells, 1, None),
        "kv.grow.floor_slots": (r.grow.floor_slots, 1, None),
        "kv.grow.hysteresis_steps": (r.grow.hysteresis_steps, 0, None),
        "ranked experts of the profile": (r.ranked, 1, None),
        "share of slots that may be lent": (r.lend_pct, 1, 100),
        "prefill.short_read_tokens": (r.short_read_tokens, 0, None),
        "spec.window": (r.spec_window, 1, MAX_WINDOW_ROWS),
        "spec.draft_vocab": (r.draft_vocab, 1, sizes.vocab_size),
        "conversation.prompt_cache.checkpoints": (r.checkpoints, 0, None),
        "conversation.budget_mib": (r.conversation_mib, 0, None),
        "conversation.slots": (r.conversation_slots, 0, None),
        "conversation.min_free_mib": (r.conversation_min_free_mib, 0, None),
    }
    for name, (value, low, high) in ranges.items():
        if value is None:
            continue
        if high is not None and not low <= value <= high:
            yield f"{name}={value}: must be from {low} to {high}"
        elif value < low:
            yield f"{name}={value}: must be at least {low}"
    if r.kv_type not in KV_TYPES:
        yield f"kv.type={r.kv_type}: must be one of {', '.join(KV_TYPES)}"
    if r.own not in OWN:
        yield f"prefill.own={r.own}: must be one of {', '.join(OWN)}"
    if r.decide_at not in DECIDE_AT:
        yield f"policy.prefill_own.decide_at={r.decide_at}: must be one of {', '.join(DECIDE_AT)}"
    if r.vram_elastic_mib and r.vram_elastic_mib < MIN_SEGMENT_MIB:
        yield f"policy.vram_elastic.segment_mib={r.vram_elastic_mib}: must be 0 (off) or at least {MIN_SEGMENT_MIB}"


def _contradictions(r: StrataRequest) -> Iterator[str]:
    if r.head_alias and r.own == "on":
        yield (
            "policy.head_alias.enabled=true and prefill.own=on: the lent head is used together with borrowed slots. Set"
            " prefill.own=auto, or policy.head_alias.enabled=false"
        )
    if r.expert_cache == 0 and not r.profile:
        yield (
            f"cache.slots=0 without an expert profile and spec.window={r.spec_window}: a verify window needs at least"
            " one expert slot. Set cache.slots=1 or more, or auto"
        )

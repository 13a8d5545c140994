"""What a simulation gives: one result a request, under the names of real runs, and the fields of summary.json."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from strata_jax.policies.state import MemoryState


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One simulated request. Times are in ms of simulated time; numbers of rounds, drafts and hits are expected values.

    Attributes:
        reuse: what the reused tokens came from: live, checkpoint, parked, parked checkpoint, or none.
        ttft_ms: parking, restoring, the prompt and the first decode round.
        prompt_ms: reading the fresh tokens: K/V growth, chunks and windows, refill, relayout and head load.
        first_round_ms: the first round, one row; decode_ms: all rounds after it.
        chunks: prompt chunks read; chunk_tokens: tokens of the largest.
        lookups, hits: of decoding; prompt_lookups, prompt_hits: of prompts, resident experts while slots are lent.
        hit_rate: hits over lookups of decoding. pcie_share: share of look-ups read over PCIe while decoding.
        cpu_experts_per_layer: distinct experts a layer and round that the CPU computes.
        copy_wait_ms: time that reading waited for expert copies. refill_ms, relayout_ms, head_load_ms, growth_ms:
            parts of prompt_ms; growth inside decoding is in decode_ms.
        growth_cells: cells mapped for this request; given_slots, moved_experts: what that took from the cache;
            returned_slots: slots that came back when it began.
        file_blobs: experts read from files while the prompt was read.
        free_mib: free device memory when the request began; free_decode_mib: least while decoding.
    """

    request: str
    label: str
    conversation: str
    reuse: str
    start_ms: float
    prompt_tokens: int
    fresh_tokens: int
    reused_tokens: int
    output_tokens: int
    finish_reason: str
    ttft_ms: float
    prompt_ms: float
    first_round_ms: float
    decode_ms: float
    park_ms: float
    restore_ms: float
    refill_ms: float
    relayout_ms: float
    head_load_ms: float
    growth_ms: float
    copy_wait_ms: float
    chunks: int
    chunk_tokens: int
    rounds: float
    draft_tokens: float
    draft_accepted_tokens: float
    lookups: float
    hits: float
    prompt_lookups: float
    prompt_hits: float
    pcie_share: float
    cpu_experts_per_layer: float
    growth_cells: int
    kv_mapped_cells: int
    given_slots: int
    returned_slots: int
    moved_experts: int
    file_blobs: int
    free_mib: float
    free_decode_mib: float
    moves: int

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.lookups if self.lookups else None

    @property
    def prompt_tok_s(self) -> float | None:
        """Fresh tokens a second; includes refill, growth and head load (planning notes 7.4)."""
        return 1000 * self.fresh_tokens / self.prompt_ms if self.prompt_ms > 0 and self.fresh_tokens else None

    @property
    def decode_tok_s(self) -> float | None:
        """Generated tokens a second, the first round included, as the original counts them (planning notes 7.4)."""
        total_ms = self.first_round_ms + self.decode_ms
        return 1000 * self.output_tokens / total_ms if total_ms > 0 and self.output_tokens else None

    @property
    def round_ms(self) -> float | None:
        """Time of a decode round, on average over all rounds."""
        return (self.first_round_ms + self.decode_ms) / self.rounds if self.rounds else None

    def to_json(self) -> dict[str, Any]:
        """Return all fields and rates, for metrics.jsonl."""
        rates = {name: getattr(self, name) for name in ("hit_rate", "prompt_tok_s", "decode_tok_s", "round_ms")}
        return {item.name: getattr(self, item.name) for item in fields(self)} | rates


@dataclass(frozen=True, slots=True)
class SimRun:
    """A finished simulation.

    Attributes:
        calibrated: whether the profile was fitted on this card's own measurements.
        state: the memory at the end. total_ms: simulated time. warnings: what a user must see, each once.
    """

    profile: str
    calibrated: bool
    requests: tuple[RequestResult, ...]
    state: MemoryState
    total_ms: float
    warnings: tuple[str, ...]

    def summary(self) -> dict[str, Any]:
        """Return fields of summary.json; medians over requests, sums of tokens, and what only a simulation has."""
        every = self.requests
        counted = ("prompt_tokens", "fresh_tokens", "reused_tokens", "output_tokens")
        drafted = ("draft_tokens", "draft_accepted_tokens")
        return {
            "num_requests": len(every),
            **{name: sum(getattr(r, name) for r in every) for name in counted},
            **{name: round(sum(getattr(r, name) for r in every)) for name in drafted},
            "ttft_ms": _median([r.ttft_ms for r in every]),
            "prompt_tok_s": _median([r.prompt_tok_s for r in every]),
            "decode_tok_s": _median(
                [1000 * (r.output_tokens - 1) / r.decode_ms if r.decode_ms > 0 else None for r in every]
            ),
            "hit_rate": _share(every, "hits", "lookups"),
            "prompt_hit_rate": _share(every, "prompt_hits", "prompt_lookups"),
            "extra": {
                "executor": "sim",
                "calibrated": self.calibrated,
                "profile": self.profile,
                "simulated_s": self.total_ms / 1000,
                "pcie_share": _mean_by_rounds(every, "pcie_share"),
                "cpu_experts_per_layer": _mean_by_rounds(every, "cpu_experts_per_layer"),
                **{f"{name}_ms": sum(getattr(r, f"{name}_ms") for r in every) for name in STAGES},
                "growth_cells": sum(r.growth_cells for r in every),
                "given_slots": sum(r.given_slots for r in every),
                "returned_slots": sum(r.returned_slots for r in every),
                "warnings": list(self.warnings),
            },
        }


STAGES = ("prompt", "decode", "copy_wait", "refill", "relayout", "head_load", "restore", "park", "growth")


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _share(every: Sequence[RequestResult], hits: str, lookups: str) -> float | None:
    total = sum(getattr(r, lookups) for r in every)
    return sum(getattr(r, hits) for r in every) / total if total else None


def _mean_by_rounds(every: Sequence[RequestResult], name: str) -> float | None:
    rounds = sum(r.rounds for r in every)
    return sum(getattr(r, name) * r.rounds for r in every) / rounds if rounds else None

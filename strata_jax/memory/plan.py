"""The planner: context, chunk, slots and pages that a model gets within the budgets, as data the engine allocates from.

Pure and deterministic: no clock, no device, no JAX. Given settings are constraints; what is auto is filled in the order
page size, context, chunk, slots. A plan that does not fit is an `Unfit` with what would fit (``unfit.py``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

from strata_jax.errors import DoesNotFit
from strata_jax.geometry import Geometry
from strata_jax.memory.candidate import Frame
from strata_jax.memory.cell_window import check_window
from strata_jax.memory.expert_ranking import ExpertRanking
from strata_jax.memory.frame import make_frame
from strata_jax.memory.ledger import MIB, Ledger, Memory, Owner, Phase
from strata_jax.memory.plan_choices import choose_chunk, choose_context, choose_slots, stage_choice
from strata_jax.memory.plan_notes import plan_notes
from strata_jax.memory.request import Choice, PlanRequest, check_request
from strata_jax.memory.segments import ArenaLayout, arena_layout
from strata_jax.memory.sizes import model_sizes
from strata_jax.memory.slot_order import SlotOrder, slot_order
from strata_jax.memory.unfit import Unfit, explain


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the engine allocates.

    The arena's core holds the slots from page 0 on, then the K/V pages layer by layer, then spare pages; slots of
    segments lie behind it (``segments.py``).

    Attributes:
        request: the request with every auto value filled in; planning it again gives this plan.
        context_requested_cells: the context before rounding up to whole index blocks.
        spec_window: tokens of a decode window as asked for; without a draft block (`with_draft`) windows have one.
        pages_per_expert: pages of a slot of each loaded block.
        slot_pages: pages of all slots.
        kv_pages_per_layer: pages of each of the `num_kv_layers` attention layers, the draft block's last.
        choices: each chosen setting with its origin and reason.
        segment_slots: how many of the last slots lie in each segment that can be lent or given back.
        bucket_segments: how many of the last segments a prompt in chunks of each of `prefill_buckets` borrows; empty:
            none.
        kv_mapped_cells: cells that have pages at the start; None: all. Where it is a window (`keeps_cells_in_host`),
            it slides over the sequence.
        prompt_base_bytes: what prompt buffers have without a loan and with the head loaded, where something is lent.
        stage_bytes: buffers through which missing experts are copied ahead of chunks, while a prompt is read.
        staged_buckets: those of `prefill_buckets` whose programs take staged experts.
    """

    model: str
    request: PlanRequest
    context_cells: int
    context_requested_cells: int
    chunk_tokens: int
    prefill_buckets: tuple[int, ...]
    expert_slots: int
    num_blocks: int
    num_experts: int
    with_draft: bool
    spec_window: int
    kv_type: str
    page_bytes: int
    pages_per_expert: tuple[int, ...]
    slot_pages: int
    num_kv_layers: int
    kv_pages_per_layer: int
    spare_pages: int
    cells_per_page: int
    cell_bytes: int
    ledger: Ledger
    choices: tuple[Choice, ...]
    notes: tuple[str, ...]
    segment_slots: tuple[int, ...] = ()
    bucket_segments: tuple[int, ...] = ()
    kv_mapped_cells: int | None = None
    prompt_base_bytes: int = 0
    stage_bytes: int = 0
    staged_buckets: tuple[int, ...] = ()

    @property
    def lent_segments(self) -> int:
        """How many of the last segments a full chunk borrows."""
        return self.bucket_segments[-1] if self.bucket_segments else 0

    @property
    def lent_slots(self) -> int:
        """Slots that a full chunk borrows."""
        return sum(self.segment_slots[len(self.segment_slots) - self.lent_segments :])

    @property
    def mapped_cells(self) -> int:
        """K/V cells that have pages at the start."""
        return self.context_cells if self.kv_mapped_cells is None else self.kv_mapped_cells

    @property
    def keeps_cells_in_host(self) -> bool:
        """Whether host memory has a place for every K/V cell, the device only for `mapped_cells` of them."""
        return self.request.moving.resident_cells > 0 and self.mapped_cells < self.context_cells

    @property
    def prompt_layout(self) -> str:
        """Where prompt buffers lie, in the words of `plan.json`."""
        return "hybrid" if self.request.moving.head_alias else "borrowed" if self.lent_slots else "own"

    def bucket(self, num_tokens: int) -> int:
        """Return the rows of the program that reads a part of a prompt: the smallest that holds it."""
        return next(size for size in self.prefill_buckets if size >= num_tokens)

    def lent_bytes(self, num_segments: int) -> int:
        """Return the bytes of the last segments."""
        arena = self.arena
        return sum(arena.array_pages[len(arena.array_pages) - num_segments :]) * self.page_bytes if num_segments else 0

    def loans(self, segments_given: int = 0) -> frozenset[tuple[int, int]]:
        """Return each (bucket, segments away) that a prompt can meet: its last chunk may be of a smaller bucket.

        Args:
            segments_given: how many of the last segments are given back; the next ones are lent then, as many as have
                the bytes of the loan.
        """
        sizes = self.arena.array_pages[1:][: len(self.segment_slots) - segments_given][::-1]
        reach = (0, *accumulate(sizes))
        lent = [
            segments_given + bisect_left(reach, self.lent_bytes(n) // self.page_bytes)
            for n in self.bucket_segments or (0,) * len(self.prefill_buckets)
        ]
        return frozenset((bucket, away) for i, bucket in enumerate(self.prefill_buckets) for away in {*lent[i:]})

    @property
    def order(self) -> SlotOrder:
        """The experts of all blocks in the order in which they get slots."""
        return slot_order(self.pages_per_expert, self.num_experts, self.request.ranking)

    @property
    def kv_first_page(self) -> int:
        return self.arena.kv_first_page

    @property
    def kv_pages(self) -> int:
        """Pages of the whole context."""
        return self.num_kv_layers * self.kv_pages_per_layer

    @property
    def num_pages(self) -> int:
        return self.arena.num_pages

    @property
    def arena(self) -> ArenaLayout:
        """Where slots and K/V pages lie at the start."""
        return arena_layout(
            pages_per_expert=self.pages_per_expert,
            slot_blocks=self.order.block[: self.expert_slots].tolist(),
            segment_slots=self.segment_slots,
            num_kv_layers=self.num_kv_layers,
            context_cells=self.context_cells,
            kv_mapped_cells=self.mapped_cells,
            cells_per_page=self.cells_per_page,
            spare_pages=self.spare_pages,
            page_bytes=self.page_bytes,
            has_window=self.keeps_cells_in_host,
        )

    @property
    def arena_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    def resident_pairs(self) -> Iterator[tuple[int, int]]:
        """Give the (block, expert) of each slot, in the order of the slots."""
        return self.order.pairs(self.expert_slots)

    def free_bytes(self, phase: Phase) -> dict[str, int]:
        """Return what a phase leaves of each budget."""
        return {
            limit.name: limit.budget_bytes - self.ledger.total_bytes(phase, *limit.memories)
            for limit in self.request.limits()
        }

    def as_request(self) -> PlanRequest:
        """Return the request that gives this plan again, with every value filled in."""
        return self.request

    def to_json(self) -> dict[str, Any]:
        """Return plain data for ``plan.json``: stable groups for readers, then all that `from_json` needs."""
        peak = self.ledger.peak_owner_bytes()
        free = {name: num_bytes / MIB for name, num_bytes in self.free_bytes(Phase.START).items()}
        return {
            "fits": True,
            "shortfall_mib": 0.0,
            "model": self.model,
            "expert_cache": {
                "slots": self.expert_slots,
                "bytes": self.slot_pages * self.page_bytes,
                "lent_slots": self.lent_slots,
            },
            "prefill": {
                "chunk_tokens": self.chunk_tokens,
                "buckets": list(self.prefill_buckets),
                "buffer_mib": peak[Owner.PROMPT_BUFFERS] / MIB,
                "layout": self.prompt_layout,
                "ring_slots": 0,
            },
            "kv": {
                "type": self.kv_type,
                "mapped_cells": self.mapped_cells,
                "mapped_mib": self.ledger.owner_bytes(Phase.START, Memory.DEVICE)[Owner.KV] / MIB,
                "max_cells": self.context_cells,
                "max_mib": self.kv_pages * self.page_bytes / MIB,
            },
            "head": {"mib": peak[Owner.HEAD] / MIB, "aliased": self.request.moving.head_alias},
            "ram": {
                "expert_headroom_mib": 0.0,
                "conversation_budget_mib": self.request.moving.conversation_bytes / MIB,
                "resident_mib": peak[Owner.BANK] / MIB,
            },
            "free_after_start_mib": next(iter(free.values()), None),
            "free_after_start_by_limit_mib": free,
            "choices": [asdict(c) | {"key": c.key, "origin": str(c.origin)} for c in self.choices],
            "notes": list(self.notes),
            "ledger": self.ledger.to_json(),
            "request": self.request.to_json(),
            "layout": {name: _plain(getattr(self, name)) for name in _LAYOUT_FIELDS},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], ranking: ExpertRanking | None = None) -> MemoryPlan:
        """Return the plan that `to_json` gave `data` for.

        ranking: the one that it follows, of which `data` has the digest only; ConfigError if it is another one.
        """
        fields: dict[str, Any] = dict(data["layout"])
        names = ("prefill_buckets", "pages_per_expert", "segment_slots", "bucket_segments", "staged_buckets")
        fields |= {name: tuple(fields[name]) for name in names}
        request = PlanRequest.from_json(data["request"], ranking)
        return cls(
            model=data["model"], request=request, ledger=Ledger.from_json(data["ledger"]), choices=request.decided,
            notes=tuple(data["notes"]), **fields,
        )  # fmt: skip


_LAYOUT_FIELDS = (
    "context_cells", "context_requested_cells", "chunk_tokens", "prefill_buckets", "expert_slots", "num_blocks",
    "num_experts", "with_draft", "spec_window", "kv_type", "page_bytes", "pages_per_expert", "slot_pages",
    "num_kv_layers", "kv_pages_per_layer", "spare_pages", "cells_per_page", "cell_bytes",
    "segment_slots", "bucket_segments", "kv_mapped_cells", "prompt_base_bytes", "stage_bytes", "staged_buckets",
)  # fmt: skip


def plan(geometry: Geometry, request: PlanRequest) -> MemoryPlan:
    """Plan a model's memory.

    Raises:
        ConfigError: values out of range or in contradiction; all of them are named.
        DoesNotFit: the given settings need more than the budgets, with what would fit.
    """
    outcome = try_plan(geometry, request)
    if isinstance(outcome, Unfit):
        raise DoesNotFit(outcome.message(), shortfall_bytes=outcome.shortfall_bytes)
    return outcome


def try_plan(geometry: Geometry, request: PlanRequest) -> MemoryPlan | Unfit:
    """Plan a model's memory, or say why it does not fit: a sweep makes a row of either. Raises ConfigError."""
    found = _solve(geometry, request)
    if isinstance(found, MemoryPlan):
        return found
    frame, point = found
    return explain(frame, point, fits=lambda other: isinstance(_solve(geometry, other), MemoryPlan))


def _solve(geometry: Geometry, request: PlanRequest) -> MemoryPlan | tuple[Frame, tuple[int, int, int]]:
    """Return the plan, or the frame with the smallest (context, chunk, slots) that the request allows."""
    sizes = model_sizes(geometry)
    check_request(request, sizes)
    frame = make_frame(sizes, request)
    context = choose_context(frame)
    chunk = choose_chunk(frame, context.value)
    check_window(frame, context.value, chunk.value)
    slots = choose_slots(frame, context.value, chunk.value)
    if frame.shortfall(context.value, chunk.value, slots.value) is not None:
        return frame, (context.value, chunk.value, slots.value)
    return _assemble(frame, context, chunk, slots)


def _assemble(frame: Frame, context: Choice, chunk: Choice, slots: Choice) -> MemoryPlan:
    ledger = Ledger(frame.entries(context.value, chunk.value, slots.value))
    ledger.check()
    choices: tuple[Choice, ...] = (frame.page_choice, context, chunk, slots)
    stage_bytes = frame.stage_bytes(context.value, chunk.value)
    if stage_bytes:
        choices = (*choices, stage_choice(frame, stage_bytes))
    pieces = frame.pieces(context.value, chunk.value, slots.value)
    moves = frame.request.moving.on_device
    resolved = replace(
        frame.request, page_bytes=frame.page_bytes, context_cells=context.value, chunk_tokens=chunk.value,
        expert_slots=slots.value, stage_bytes=stage_bytes, decided=choices,
    )  # fmt: skip
    g, buckets = frame.sizes.geometry, frame.buckets(chunk.value)
    return MemoryPlan(
        model=g.name,
        request=resolved,
        context_cells=frame.num_cells(context.value),
        context_requested_cells=context.value,
        chunk_tokens=chunk.value,
        prefill_buckets=buckets,
        expert_slots=slots.value,
        num_blocks=len(frame.pages),
        num_experts=g.num_experts,
        with_draft=frame.with_draft,
        spec_window=frame.request.spec_window,
        kv_type=frame.request.kv_type,
        page_bytes=frame.page_bytes,
        pages_per_expert=frame.pages,
        slot_pages=frame.order.pages(slots.value),
        num_kv_layers=len(frame.sizes.attention_layers(frame.with_draft)),
        kv_pages_per_layer=frame.kv_pages_per_layer(context.value),
        spare_pages=frame.spare_pages(pieces.mapped_cells, slots.value),
        cells_per_page=frame.cells_per_page,
        cell_bytes=frame.cell_bytes,
        ledger=ledger,
        choices=choices,
        notes=plan_notes(frame, context, chunk, slots, pieces),
        segment_slots=pieces.segment_slots,
        bucket_segments=pieces.bucket_segments if pieces.segment_slots else (),
        kv_mapped_cells=pieces.mapped_cells if moves else None,
        prompt_base_bytes=pieces.base_bytes if moves else 0,
        stage_bytes=stage_bytes,
        staged_buckets=tuple(bucket for bucket in buckets if stage_bytes and frame.stage_need.stages(bucket)),
    )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value

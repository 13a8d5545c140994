"""What a Strata plan is asked for: a card, and settings that are constraints or auto (None). Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from strata_jax.memory.ledger import MIB

MIN_RESIDENT_CELLS = 20_480
MAX_WINDOW_ROWS = 8
SUFFIX_ROWS = 2


class Version(StrEnum):
    """Memory models: prices and choosers changed between releases (planning notes 2.4-2.6)."""

    V0_1_35 = "strata_0_1_35"
    V0_1_41 = "strata_0_1_41"
    V0_1_43 = "strata_0_1_43"


class ExpertTier(StrEnum):
    """Where experts that have no slot live (planning notes 2.8)."""

    ARENA = "arena"  # one pinned copy of all experts
    RESIDENT = "resident"  # files, and RAM copies of what the cache does not hold
    MMAP = "mmap"  # files and the page cache only


@dataclass(frozen=True, slots=True)
class Card:
    """A machine as the planner sees it. Bytes are integers.

    Attributes:
        vram_bytes: device memory as the driver reports it.
        taken_bytes: device memory that others hold before anything is allocated: desktop, driver, context, modules.
        late_bytes: device memory taken after the cache is sized that no rule reserves (about 303 MiB, measured from
            the published chunk table of an 8 GB card).
        ram_bytes: RAM within the container's limit; ram_available_bytes: what is available at start.
        ram_source: where `ram_bytes` comes from, as `hardware.ram_within_limit` says it.
        touch_bytes: device memory found missing once the slots have been written (WDDM hands it out on first touch).
        pinned_share: share of the expert arena that is registered with the device.
        pinned_entry_bytes: device memory per 4 KiB page of RAM that is registered with the device. A Linux host with
            73,450 MiB in one arena lost 47 slots of 2.99 MiB to it, which is 8 B a page; 0 where nothing shows it.
        vmm_chunk_bytes: granularity of mapped memory.
    """

    name: str
    vram_bytes: int
    taken_bytes: int = 0
    late_bytes: int = 0
    ram_bytes: int = 0
    ram_available_bytes: int | None = None
    ram_source: str = "host memory"
    touch_bytes: int = 0
    os: str = "linux"
    pinned_share: float = 1.0
    pinned_entry_bytes: int = 0
    vmm_chunk_bytes: int = 2 * MIB


def pages_memory(card: Card, spill: bool | None) -> bool:
    """Say whether device memory beyond the card goes to RAM; spill: as given, None: WDDM does, other drivers do not."""
    return card.os == "windows" if spill is None else spill


@dataclass(frozen=True, slots=True)
class GrowSettings:
    """Elastic K/V (planning notes 6.3). anywhere: any slot may pay; otherwise those below the loan, as upstream's."""

    enabled: bool = False
    init_cells: int = 16_384
    step_cells: int = 8_192
    floor_slots: int = 128
    hysteresis_steps: int = 2
    anywhere: bool = True


@dataclass(frozen=True, slots=True)
class StrataRequest:
    """Settings of one plan. None lets the planner choose; everything else is a constraint.

    Attributes:
        expert_cache: slots of the largest blob, a byte budget (planning notes 2.2); None: auto.
        cap_expert_cache: a budget above what is free shrinks to it, as upstream's does; otherwise it does not fit.
        cache_per_layer: equal slots per layer, uniform slot size.
        chunk_tokens: prompt chunk; None: auto up to `chunk_auto_max`.
        reserve_given: an explicit reserve is kept exactly; the default may shrink on small cards (#496).
        own: own prompt buffers from spare device memory: auto, on or off; decide_at: filled (when the cache has been
            filled) or final (on the final ledger).
        alias_inside_head: prompt buffers lie inside the head's own bytes instead of a cache that grew by them.
        alias_beyond: any chunk on the grid of 256 tokens with the head lent; upstream tries four, 2,048 tokens at most.
        borrow: prompt buffers may borrow expert slots. profile: a ranked profile exists. ranked: pairs it ranks.
        vram_elastic_mib: segment size of the elastic cache; 0: off.
        stream_min_tokens: chunks from this size on stream all experts. ring_slots, lend_pct: overrides.
        draft_vocab: rows of the drafter's vocabulary.
        token_graph: decoding runs as one graph with a residency table on the device.
        resident_budget_bytes: cap of RAM copies in tier resident.
        spill: the driver moves device memory to RAM where a plan takes more than the card has; None: as the card's
            operating system does (`spills_on`).
    """

    version: Version = Version.V0_1_41
    context_cells: int = 262_144
    kv_type: str = "int8"
    kv_resident_cells: int = 0
    expert_cache: int | None = None
    cap_expert_cache: bool = True
    cache_per_layer: bool = False
    chunk_tokens: int | None = None
    chunk_auto_max: int = 8_192
    reserve_mib: int = 700
    reserve_given: bool = True
    borrow: bool = True
    own: str = "off"
    decide_at: str = "filled"
    head_alias: bool = False
    alias_spare_mib: int = 512
    alias_inside_head: bool = False
    alias_beyond: bool = False
    grow: GrowSettings = GrowSettings()
    vram_elastic_mib: int = 0
    profile: bool = True
    ranked: int | None = None
    stream_min_tokens: int = 1_024
    ring_slots: int | None = None
    lend_pct: int | None = None
    short_read_tokens: int = 64
    spec_window: int = 4
    suffix_draft: int = 3
    draft_vocab: int = 106_299
    mtp: bool = True
    token_graph: bool = True
    vision: bool = False
    checkpoints: int = 6
    tier: ExpertTier = ExpertTier.ARENA
    resident_budget_bytes: int | None = None
    resident_headroom_bytes: int = 4096 * MIB
    conversation_budget: bool = False
    conversation_mib: int = 0
    conversation_slots: int = 4
    conversation_min_free_mib: int = 2_560
    spill: bool | None = None

    @property
    def kv_streamed(self) -> bool:
        """Whether the K/V lies in RAM and only some cells in device memory (planning notes 1.5, mode 1).

        A resident part that holds the whole context leaves nothing to stream.
        """
        return 0 < self.resident_cells < self.context_cells

    @property
    def resident_cells(self) -> int:
        """Cells in device memory of a streamed K/V, no fewer than a selection needs; 0 when it was not asked for."""
        return max(self.kv_resident_cells, MIN_RESIDENT_CELLS) if self.kv_resident_cells > 0 else 0

    def spills_on(self, card: Card) -> bool:
        """Whether a card's driver moves device memory to RAM instead of refusing it: WDDM does, if nothing is given."""
        return pages_memory(card, self.spill)

    @property
    def window_rows(self) -> int:
        """Most rows of a verify window: prompt lookup widens it by two, eight at most (planning notes 1.6, 4.2)."""
        if self.spec_window < 1:
            return 0
        return min(MAX_WINDOW_ROWS, self.spec_window + (SUFFIX_ROWS if self.suffix_draft > 0 else 0))

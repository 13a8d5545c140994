"""What reading a prompt costs: chunks that compute while experts are copied in, and what surrounds them.

A chunk that streams all missing experts runs the copies ahead of the computation, as far as the ring of staging slots
allows; a smaller one copies the experts its tokens asked for, layer by layer, with nothing to hide behind (planning
notes 5.3). The numbers are a profile's; every formula here holds for all cards.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata_jax.memory.strata.request import ExpertTier, StrataRequest
from strata_jax.memory.strata.sizes import PackSizes
from strata_jax.sim.profile import Profile

GIB = 2**30
MS_PER_GB_S = 1e-6  # bytes / (GB/s) in ms


@dataclass(frozen=True, slots=True)
class ChunkFacts:
    """One chunk of a prompt.

    Attributes:
        tokens: of the chunk. position: tokens before it.
        streamed_bytes: experts copied to the device for it. resident_share: share of expert bytes that need no copy.
        streamed_all: all missing experts are streamed; else only those that got tokens are staged.
        ring_slots: staging slots; they bound how far copies run ahead.
        kv_staged_bytes: K/V that is brought in from RAM for the chunk, all layers.
        file_bytes: the part of `streamed_bytes` that must be read from files first.
        pinned_share: share of the experts in RAM that is registered with the device.
    """

    tokens: int
    position: int
    streamed_bytes: float
    resident_share: float
    streamed_all: bool
    ring_slots: int
    kv_staged_bytes: float = 0.0
    file_bytes: float = 0.0
    pinned_share: float = 1.0


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """Time of one chunk in ms: copies and computation alone, the wait for copies, and all of it."""

    total_ms: float
    copy_ms: float
    compute_ms: float
    copy_wait_ms: float


def chunk_cost(profile: Profile, sizes: PackSizes, request: StrataRequest, facts: ChunkFacts) -> ChunkCost:
    """Return the time of one chunk.

    total = compute + copy - hidden, where copies hide behind computation only when all experts are streamed:
    hidden = min(overlap x min(compute, copy), what the ring lets run ahead). Single copies of a low-RAM tier go through
    staging threads, which hide less, whatever the ring.
    """
    copies = request.tier is not ExpertTier.ARENA
    ms_per_byte = copy_ms_per_byte(profile, facts.pinned_share, request.tier)
    if not facts.streamed_all:  # one by one, at the pace of the host or of the link
        ms_per_byte = MS_PER_GB_S / min(profile["pcie_gb_s"], profile["staged_gb_s"])
    copy_ms = facts.streamed_bytes * ms_per_byte
    copy_ms += facts.kv_staged_bytes * copy_ms_per_byte(profile, 1.0, ExpertTier.ARENA)
    copy_ms += facts.file_bytes * MS_PER_GB_S / profile["file_gb_s"]
    compute_ms = profile["chunk_ms"] + facts.tokens * token_ms(profile, sizes, facts.position + facts.tokens / 2)
    hidden_ms = 0.0
    if facts.streamed_all:
        overlap = profile["overlap_copies_share" if copies else "overlap_share"]
        ring_bytes = profile["ring_share"] * facts.ring_slots * sizes.mean_blob_bytes * sizes.num_layers
        hidden_ms = overlap * min(compute_ms, copy_ms)
        if not copies:
            hidden_ms = min(hidden_ms, ring_bytes * ms_per_byte)
    return ChunkCost(compute_ms + copy_ms - hidden_ms, copy_ms, compute_ms, copy_ms - hidden_ms)


def token_ms(profile: Profile, sizes: PackSizes, context: float) -> float:
    """Return the computation of one prompt token at a context, in ms.

    The products of its experts at the card's share of the tensor rate (dense layers are in the share: they grow with
    the same widths), and the indexer's scores over all pooled keys before it at a share of the scalar rate.
    """
    products_ms = expert_gflop(sizes) / (profile["tensor_tops"] * profile["prompt_share"])
    return products_ms + context * index_gflop(sizes) / (profile["scalar_tflops"] * profile["index_share"])


def expert_gflop(sizes: PackSizes) -> float:
    """Return the expert products of one token in GFLOP: gate, up and down of the routed and the shared expert."""
    width = sizes.num_experts_used * sizes.expert_width + sizes.shared_expert_width
    return 2 * 3 * sizes.embed_width * width * sizes.num_layers / 1e9


def index_gflop(sizes: PackSizes) -> float:
    """Return the indexer's scores of one token and one context cell in GFLOP, all attention layers."""
    per_key = 2 * sizes.index_heads * sizes.index_dim / max(1, sizes.index_block)
    return per_key * sizes.num_attention_layers / 1e9


def copy_ms_per_byte(profile: Profile, pinned_share: float, tier: ExpertTier) -> float:
    """Return ms per byte from RAM to the device.

    pinned_share: share of an arena in registered memory; the rest passes a staging thread. Single RAM copies pass one
    too, and mapped files come out of the page cache first.
    """
    pinned_gb_s = profile["pcie_gb_s"] * profile["copy_share"]
    if tier is not ExpertTier.ARENA:
        from_cache = MS_PER_GB_S / profile["page_cache_gb_s"] if tier is ExpertTier.MMAP else 0.0
        return MS_PER_GB_S / (pinned_gb_s * profile["copies_share"]) + from_cache
    unpinned_gb_s = pinned_gb_s * profile["unpinned_share"]
    return MS_PER_GB_S * (pinned_share / pinned_gb_s + (1 - pinned_share) / unpinned_gb_s)


def segment_ms(profile: Profile) -> float:
    """Return the fixed time of one batched segment (planning notes 5.1): launches, tables, the first graph."""
    return profile["segment_ms"]


def refill_ms(
    profile: Profile,
    request: StrataRequest,
    num_bytes: float,
    *,
    file_bytes: float = 0.0,
    pinned_share: float = 1.0,
) -> float:
    """Return the time to copy experts back into slots; `file_bytes` of them have no RAM copy and are read first."""
    copy_ms = num_bytes * copy_ms_per_byte(profile, pinned_share, request.tier)
    return copy_ms + file_bytes * MS_PER_GB_S / profile["file_gb_s"]


def relayout_ms(profile: Profile) -> float:
    """Return the time to unload the head and lay the prompt path out again (row alias-relayout)."""
    return profile["relayout_ms"]


def head_load_ms(profile: Profile, head_bytes: float, *, pinned: bool = False) -> float:
    """Return the time to bring the output head back, from pinned memory at the link's rate or as the original does.

    The original's median is 255 ms for 417 MiB (row alias-head-load).
    """
    rate = profile["pcie_gb_s"] * profile["copy_share"] if pinned else profile["head_load_gb_s"]
    return head_bytes * MS_PER_GB_S / rate


def park_ms(profile: Profile, num_bytes: float) -> float:
    """Return the time to copy a conversation's state to RAM."""
    return num_bytes * MS_PER_GB_S / profile["session_gb_s"]


def restore_ms(profile: Profile, num_bytes: float) -> float:
    """Return the time to bring a conversation or a checkpoint back (row own-val-restore)."""
    return num_bytes * MS_PER_GB_S / profile["session_gb_s"]


def map_ms(profile: Profile, num_bytes: float) -> float:
    """Return the time to map or unmap device memory (planning notes 6.4: 78 ms for 4.3 GiB)."""
    return num_bytes / GIB * profile["map_ms_per_gib"]


def move_ms(profile: Profile, num_bytes: float) -> float:
    """Return the time to copy experts from slot to slot: every byte is read and written once."""
    return 2 * num_bytes * MS_PER_GB_S / (profile["hbm_gb_s"] * profile["hbm_share"])

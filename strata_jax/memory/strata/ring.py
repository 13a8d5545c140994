"""How many experts the ring of a prompt chunk stages (planning notes 2.5).

Small chunks stage only the experts that got tokens, through a few slots. From `stream_min_tokens` on a chunk streams
every expert that is not resident, ahead of use, through a ring; releases from 0.1.40 on size the ring of a chunk that
grew beyond the old rule's pick by bytes instead of slots.
"""

from __future__ import annotations

from strata_jax.errors import ConfigError
from strata_jax.memory.strata.request import Card, StrataRequest, Version
from strata_jax.memory.strata.sizes import PackSizes

STAGE_SLOTS = 8
DEFAULT_SLOTS = 384
FUSED_SLOTS = 1_024
UNPINNED_PART = 4  # a ring for memory that is not pinned has a quarter of the slots
MIN_SLOTS = 16
MAX_SLOTS = 512
STREAM_MIN_TOKENS = 1_024
BYTE_UNIT = 1_382_400  # the canonical Q2_0 expert
BYTES_UP_TO_CHUNK = 6_144
PIN_THRESHOLD = 0.9
_Q2_0_BLOCK_BYTES, _Q2_0_BLOCK = 18, 64


def is_pinned(pinned_share: float) -> bool:
    """Whether enough of the expert arena is registered with the device to count as pinned."""
    return pinned_share >= PIN_THRESHOLD


def is_fused(sizes: PackSizes) -> bool:
    """Whether all experts are canonical Q2_0, for which the fused path and its longer ring exist."""
    weights = 3 * sizes.embed_width * sizes.expert_width
    canonical = weights // _Q2_0_BLOCK * _Q2_0_BLOCK_BYTES
    return all(blob == canonical for blob in sizes.blob_bytes)


def default_slots(sizes: PackSizes, pinned_share: float) -> int:
    """Return the ring that streams all experts: 384, 1,024 for the fused path, a quarter when not pinned."""
    slots = FUSED_SLOTS if is_fused(sizes) else DEFAULT_SLOTS
    return slots if is_pinned(pinned_share) else slots // UNPINNED_PART


def max_slots(sizes: PackSizes) -> int:
    """Return the longest ring."""
    return FUSED_SLOTS if is_fused(sizes) else MAX_SLOTS


def ring_cap_for(sizes: PackSizes, old_chunk: int, version: Version, *, pinned_share: float) -> int:
    """Return the ring of chunks larger than `old_chunk`, the old rule's pick; 0 when that found none.

    From 0.1.40 on it has the bytes of the default ring for canonical experts, so large experts get fewer slots; an
    old pick of 6,144 tokens or more keeps the slots.
    """
    default = default_slots(sizes, pinned_share)
    if version is Version.V0_1_35 or old_chunk >= BYTES_UP_TO_CHUNK:
        return default
    return min(max(MIN_SLOTS, default * BYTE_UNIT // sizes.max_blob_bytes), max_slots(sizes))


def ring_slots(
    sizes: PackSizes,
    tokens: int,
    version: Version,
    *,
    pinned_share: float,
    stream_min_tokens: int = STREAM_MIN_TOKENS,
    override: int | None = None,
    old_chunk: int | None = None,
) -> int:
    """Return the ring slots of a chunk of `tokens`.

    Args:
        pinned_share: share of the expert arena that is registered with the device.
        stream_min_tokens: chunks from here on stream all experts; smaller ones have 8 slots.
        override: a ring given by the user.
        old_chunk: the old rule's pick; chunks above it have the ring of `ring_cap_for`. None: all have the default.

    Raises:
        ConfigError: `override` is outside what the engine takes.
    """
    if override is not None and not MIN_SLOTS <= override <= max_slots(sizes):
        raise ConfigError(f"a ring of {override} slots is given; it takes {MIN_SLOTS} to {max_slots(sizes)}")
    if tokens < stream_min_tokens:
        return STAGE_SLOTS
    if override is not None:
        return override
    if old_chunk is None or tokens <= old_chunk:
        return default_slots(sizes, pinned_share)
    return ring_cap_for(sizes, old_chunk, version, pinned_share=pinned_share)


def request_ring(
    sizes: PackSizes, request: StrataRequest, card: Card, tokens: int, *, old_chunk: int | None = None
) -> int:
    """Return `ring_slots` of a chunk under a request's settings on a card."""
    return ring_slots(
        sizes,
        tokens,
        request.version,
        pinned_share=card.pinned_share,
        stream_min_tokens=request.stream_min_tokens,
        override=request.ring_slots,
        old_chunk=old_chunk,
    )

"""Which prompt path a plan gets: a lent head, own buffers from what is spare, borrowed slots, or own buffers instead.

Planning notes 2.6, 6.1, 6.2. The choosers themselves are in ``borrow.py``, ``own_buffers.py`` and ``alias_path.py``.
"""

from __future__ import annotations

from dataclasses import replace

from strata_jax.errors import DoesNotFit
from strata_jax.memory.strata import ring
from strata_jax.memory.strata.alias_path import hybrid_path
from strata_jax.memory.strata.borrow import BORROW_CHUNKS, SlotSizes, borrowed_path
from strata_jax.memory.strata.cache import CacheSize
from strata_jax.memory.strata.own_buffers import (
    INIT_SPARE_BYTES,
    NO_PROFILE_CHUNK,
    independent_path,
    own_candidates,
    own_path,
)
from strata_jax.memory.strata.prompt_buffers import old_owned_price_bytes, request_bytes, request_owned_bytes
from strata_jax.memory.strata.request import MIB, Card, StrataRequest, Version
from strata_jax.memory.strata.result import PromptPath
from strata_jax.memory.strata.sizes import PackSizes

OWNED_SLACK_BYTES = 64 * MIB


def borrows(request: StrataRequest) -> bool:
    """Whether prompt buffers may borrow slots, so that the cache is not charged for them (planning notes 2.2).

    Lending needs the residency table on the device.
    """
    return request.borrow and request.profile and request.token_graph and request.own != "on"


def smallest_loan_bytes(sizes: PackSizes, request: StrataRequest, card: Card) -> int:
    """Return the prompt buffers of the smallest chunk that borrowing tries."""
    tokens = BORROW_CHUNKS[-1]
    return request_bytes(sizes, request, tokens, ring.request_ring(sizes, request, card, tokens))


def prompt_price_bytes(sizes: PackSizes, request: StrataRequest, card: Card) -> int:
    """Return what the cache leaves for own prompt buffers; 0 when they borrow from it (planning notes 2.2, 2.10).

    An automatic chunk is priced as the first that is tried, 2,048 tokens at most. Later releases charge what the
    buffers take and 64 MiB.
    """
    if borrows(request):
        return 0
    request = _alone(request)
    first = max(own_candidates(request))
    tokens = request.chunk_tokens or min(first, NO_PROFILE_CHUNK)
    if request.version is Version.V0_1_43:
        exact = request_owned_bytes(sizes, request, tokens, ring.request_ring(sizes, request, card, tokens))
        return -(-exact // MIB) * MIB + OWNED_SLACK_BYTES
    return old_owned_price_bytes(tokens)


def choose_path(
    sizes: PackSizes, card: Card, request: StrataRequest, cache: CacheSize, after_fill: int, later_bytes: int
) -> PromptPath | int:
    """Return the prompt path of a filled cache, or the bytes that the smallest one would need to be free.

    Args:
        after_fill: bytes free when the cache has been filled. later_bytes: what is allocated after the decision.
    """
    slots = SlotSizes.of(sizes, cache.slots, uniform=cache.uniform)
    if request.head_alias:
        return _with_lent_head(sizes, card, request, slots, after_fill)
    reserve = cache.reserve_mib * MIB
    free = after_fill - (later_bytes if request.decide_at == "final" else 0)
    if borrows(request):
        borrowed = borrowed_path(sizes, slots, request, card)
        own = None
        if request.own == "auto":
            held = borrowed.chunk_tokens if borrowed else 0
            own = independent_path(sizes, slots, request, card, free, reserve, held)
        found = own or borrowed or own_path(sizes, slots, request, card, after_fill)
        return found or _smallest_own(sizes, request, card)
    alone = _alone(request)
    least = request.chunk_tokens or 0  # with own=on nothing is borrowed instead, and a given chunk is kept
    own = independent_path(sizes, slots, alone, card, free, reserve, least) if request.own == "on" else None
    return own or own_path(sizes, slots, alone, card, after_fill) or _smallest_own(sizes, alone, card)


def _alone(request: StrataRequest) -> StrataRequest:
    """Return the request of a path that shall not borrow, rather than cannot."""
    return replace(request, borrow=False) if request.own == "on" else request


def _with_lent_head(
    sizes: PackSizes, card: Card, request: StrataRequest, slots: SlotSizes, after_fill: int
) -> PromptPath | int:
    """Return the hybrid layout; own memory then is inside the head's bytes first, where the cache did not take them."""
    inside = sizes.head_bytes if request.alias_inside_head else 0
    try:
        path = hybrid_path(
            sizes, slots, request, card, after_fill, inside_head_bytes=inside, beyond=request.alias_beyond
        )
    except DoesNotFit as error:
        return max(0, after_fill) + error.shortfall_bytes
    return replace(path, own_bytes=path.own_bytes + min(inside, path.buffer_bytes))


def _smallest_own(sizes: PackSizes, request: StrataRequest, card: Card) -> int:
    tokens = min(own_candidates(request))
    own = request_owned_bytes(sizes, request, tokens, ring.request_ring(sizes, request, card, tokens))
    return own + INIT_SPARE_BYTES

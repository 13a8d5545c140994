"""Prompt buffers in memory of their own: the independent chooser, the list without borrowing, the RAM headroom.

The independent chooser (planning notes 6.1) never costs a slot: after the cache has been filled it takes what is free
above the reserve, if that holds at least the chunk that borrowing gives. The list (2.6) is what a prompt path without
borrowing tries.
"""

from __future__ import annotations

from collections.abc import Iterable

from strata_jax.errors import ConfigError
from strata_jax.memory.strata import ring
from strata_jax.memory.strata.borrow import BORROW_CHUNKS, SlotSizes, auto_limit_tokens
from strata_jax.memory.strata.prompt_buffers import request_bytes, request_owned_bytes
from strata_jax.memory.strata.request import MIB, Card, StrataRequest
from strata_jax.memory.strata.result import Layout, PromptPath
from strata_jax.memory.strata.sizes import PackSizes

OWN_CHUNKS = (6_144, 4_096, 3_072, 2_048, 1_536, 1_024, 512)
NO_PROFILE_CHUNK = 2_048
NOTHING_TO_LEND_CHUNK = 1_024
INIT_SPARE_BYTES = 512 * MIB
HEADROOM_MARGIN_BYTES = 256 * MIB
MAX_BYTES = 2**64 - 1


def choose_own_chunk(
    candidates: Iterable[tuple[int, int]], free_bytes: int, reserve_bytes: int, max_chunk: int, borrowed_chunk: int
) -> int:
    """Return the largest chunk whose own buffers fit in what is free above the reserve; 0: borrow (planning notes 6.1).

    Equality fits. A chunk smaller than borrowing gives never wins. The order of the candidates does not matter.

    Args:
        candidates: (chunk, bytes of its buffers); a chunk or bytes that are not positive do not count.
        max_chunk: no larger chunk is taken; 0: none at all.
        borrowed_chunk: the chunk that borrowing gives; 0 when it gives none.
    """
    if free_bytes <= reserve_bytes or max_chunk <= 0:
        return 0
    available = free_bytes - reserve_bytes
    return max(
        (
            chunk
            for chunk, num_bytes in candidates
            if 0 < chunk <= max_chunk and chunk >= borrowed_chunk and 0 < num_bytes <= available
        ),
        default=0,
    )


def expert_headroom_bytes(existing_bytes: int, budget_bytes: int, floor_bytes: int, enabled: bool) -> int:
    """Return the RAM that resident experts leave free, so that parked conversations find room (planning notes 6.1).

    max(existing, budget + floor + 256 MiB), which stops at the largest 64-bit number; `existing_bytes` when the
    conversation cache is off or has no budget.

    Raises:
        ConfigError: a negative amount.
    """
    if min(existing_bytes, budget_bytes, floor_bytes) < 0:
        raise ConfigError(
            f"headroom ({existing_bytes}), conversation budget ({budget_bytes}) and minimum free RAM ({floor_bytes})"
            " cannot be negative"
        )
    if not enabled or budget_bytes == 0:
        return existing_bytes
    return max(existing_bytes, min(budget_bytes + floor_bytes + HEADROOM_MARGIN_BYTES, MAX_BYTES))


def independent_path(
    sizes: PackSizes,
    slots: SlotSizes,
    request: StrataRequest,
    card: Card,
    free_bytes: int,
    reserve_bytes: int,
    borrowed_chunk: int,
) -> PromptPath | None:
    """Return own buffers that cost no slot, or None where borrowing stays (planning notes 6.1).

    Args:
        free_bytes: free at the point of decision: when the cache has been filled, or on the final ledger.
        reserve_bytes: the reserve that the user set; what is allocated later is not in it.
        borrowed_chunk: the chunk that borrowing gives, 0 when it gives none.
    """
    cap = auto_limit_tokens(request) if request.chunk_tokens is None else request.chunk_tokens
    cap = min(cap, request.context_cells)
    listed = BORROW_CHUNKS if request.chunk_tokens is None else (*BORROW_CHUNKS, request.chunk_tokens)
    prices = {c: _arena_bytes(sizes, request, card, c) for c in listed}
    chunk = choose_own_chunk(prices.items(), free_bytes, reserve_bytes, cap, borrowed_chunk)
    if not chunk:
        return None
    larger = [c for c in prices if chunk < c <= cap]
    why = f"no chunk above {cap:,} tokens was asked for or has a context"
    if larger:
        why = (
            f"own buffers for {min(larger):,} tokens need {prices[min(larger)] / MIB:,.1f} MiB;"
            f" {(free_bytes - reserve_bytes) / MIB:,.1f} MiB are free above the reserve"
        )
    if request.chunk_tokens not in (None, chunk):
        why = f"prefill.chunk={request.chunk_tokens} is given and too large: {why}"
    return _path(sizes, slots, request, card, chunk, prices[chunk], why)


def own_candidates(request: StrataRequest) -> tuple[int, ...]:
    """Return the chunks a path without borrowing tries, largest first (planning notes 2.6).

    A given chunk, or a limit below all of them, is the only one. Without a profile auto starts at 2,048, where slots
    exist but none can be lent at 1,024, where borrowing is off at the list's largest.
    """
    if request.chunk_tokens is not None:
        return (request.chunk_tokens,)
    start = OWN_CHUNKS[0]
    if not request.profile:
        start = NO_PROFILE_CHUNK
    elif request.borrow or not request.token_graph:
        start = NOTHING_TO_LEND_CHUNK
    limit = min(start, auto_limit_tokens(request))
    return tuple(c for c in OWN_CHUNKS if c <= limit) or (limit,)


def own_path(
    sizes: PackSizes, slots: SlotSizes, request: StrataRequest, card: Card, free_bytes: int
) -> PromptPath | None:
    """Return own buffers for the largest chunk of the list that leaves 512 MiB free, or None (planning notes 2.6).

    free_bytes: free when the prompt path is opened.
    """

    available, why = free_bytes - INIT_SPARE_BYTES, ""
    for chunk in own_candidates(request):
        num_bytes = request_owned_bytes(sizes, request, chunk, ring.request_ring(sizes, request, card, chunk))
        if num_bytes <= available:
            why = why or f"own buffers start at {chunk:,} tokens here"
            return _path(sizes, slots, request, card, chunk, num_bytes, why)
        why = (
            f"own buffers for {chunk:,} tokens need {num_bytes / MIB:,.1f} MiB; {max(0, available) / MIB:,.1f} MiB are"
            f" free beside the {INIT_SPARE_BYTES // MIB} MiB that must stay"
        )
    return None


def _arena_bytes(sizes: PackSizes, request: StrataRequest, card: Card, chunk: int) -> int:
    return request_bytes(sizes, request, chunk, ring.request_ring(sizes, request, card, chunk))


def _path(
    sizes: PackSizes, slots: SlotSizes, request: StrataRequest, card: Card, chunk: int, num_bytes: int, why: str
) -> PromptPath:
    return PromptPath(
        chunk_tokens=chunk,
        layout=Layout.OWN,
        ring_slots=ring.request_ring(sizes, request, card, chunk),
        buffer_bytes=num_bytes,
        own_bytes=num_bytes,
        lent_slots=0,
        first_lent=slots.num_slots,
        lent_bytes=0,
        why_not_larger=why,
    )

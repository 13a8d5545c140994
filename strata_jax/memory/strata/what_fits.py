"""Which settings of a Strata plan would fit where the given ones do not; each is planned again before it is named.

What fits is asked for by a function, so that these are searches and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from strata_jax.memory.layout import largest_where
from strata_jax.memory.ledger import MIB, Memory
from strata_jax.memory.strata.borrow import auto_limit_tokens
from strata_jax.memory.strata.request import MIN_RESIDENT_CELLS, ExpertTier, StrataRequest

CONTEXT_STEP_CELLS = 256
CHUNK_STEP_TOKENS = 256
MOST_MIB = 2**22
"""No search for enough memory goes beyond this (4 TiB)."""
MOST_MORE_MIB = 4_096
"""No search for a larger reserve goes further beyond the first that it tries."""
KEYS = {
    "context_cells": "model.max_context",
    "chunk_tokens": "prefill.chunk",
    "expert_cache": "cache.slots",
    "kv_type": "kv.type",
    "kv_resident_cells": "kv.resident_cells",
    "reserve_mib": "hardware.vram_reserve_mib",
    "borrow": "prefill.borrow",
    "own": "prefill.own",
    "cache_per_layer": "cache.per_layer",
}
_SMALLER_KV = {"f32": "f16", "f16": "int8", "bf16": "int8", "int8": "k8v4", "k8v4": "q4_0"}

ReadTokens = Callable[[StrataRequest], int]
"""The prompt chunk of a request's plan; 0 where it does not fit."""


def enough_bytes(first: int, is_enough: Callable[[int], bool]) -> int:
    """Return the least memory to add that is enough: `first`, or whole MiB where that is not; `first` if nothing is.

    first: what the first item that found no room lacks, so that no less is enough.
    """
    if is_enough(first):
        return first
    low = first // MIB
    high = 2 * low + 1
    while not is_enough(high * MIB):
        low, high = high, 2 * high
        if high > MOST_MIB:
            return first
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle * MIB) else (middle, high)
    return high * MIB


def largest_context(request: StrataRequest, chunk: ReadTokens) -> int | None:
    """Return the longest shorter context that fits, in steps of 256 cells."""

    def fits(steps: int) -> bool:
        return bool(chunk(replace(request, context_cells=steps * CONTEXT_STEP_CELLS)))

    most = (request.context_cells - 1) // CONTEXT_STEP_CELLS
    steps = largest_where(fits, 1, most)
    if steps is None and request.own == "on":
        # what a shorter context leaves may go to slots instead of the buffers, which then do not fit any more
        steps = next((n for n in range(most, 1, -1) if fits(n)), None)
    return None if steps is None else steps * CONTEXT_STEP_CELLS


def largest_chunk(request: StrataRequest, chunk: ReadTokens) -> int | None:
    """Return the largest chunk that fits as it is given, below a given one: in steps of 256 tokens, or below 256."""
    limit = auto_limit_tokens(request) if request.chunk_tokens is None else request.chunk_tokens - 1

    def fits(tokens: int) -> bool:
        return chunk(replace(request, chunk_tokens=tokens)) == tokens

    steps = largest_where(lambda n: fits(n * CHUNK_STEP_TOKENS), 1, limit // CHUNK_STEP_TOKENS)
    return largest_where(fits, 1, min(limit, CHUNK_STEP_TOKENS)) if steps is None else steps * CHUNK_STEP_TOKENS


def largest_slots(request: StrataRequest, room_slots: int, chunk: ReadTokens, step: int) -> int | None:
    """Return the most slots that fit, fewer than were given or than auto came to, in steps of `step`.

    room_slots: slots for which there was room; 0: not known.
    """
    given = request.expert_cache
    most = ((given - 1) if given else room_slots) // step

    def fits(steps: int) -> bool:
        return bool(chunk(replace(request, expert_cache=steps * step)))

    room = room_slots // step
    if 0 < room < most and fits(room) and not fits(room + 1):
        return room * step
    steps = largest_where(fits, 1, most)
    return None if steps is None else steps * step


def alternatives(request: StrataRequest, memory: Memory, fits: ReadTokens) -> Iterator[str]:
    """Give settings that are enough on their own."""
    if memory is Memory.HOST:
        for tier in (ExpertTier.RESIDENT, ExpertTier.MMAP):
            if tier is not request.tier and fits(replace(request, tier=tier)):
                yield f"ram.tier={tier}"
                break
        return
    kv_type = request.kv_type
    while kv_type in _SMALLER_KV:
        kv_type = _SMALLER_KV[kv_type]
        if fits(replace(request, kv_type=kv_type)):
            yield f"kv.type={kv_type}"
            break
    grows = request.grow.enabled
    if not request.kv_streamed and not grows and fits(replace(request, kv_resident_cells=MIN_RESIDENT_CELLS)):
        yield f"kv.resident_cells={MIN_RESIDENT_CELLS}"
    if fits(replace(request, grow=replace(request.grow, enabled=not grows))):
        yield f"policy.kv_grow.enabled={str(not grows).lower()}"
    if not request.borrow and fits(replace(request, borrow=True)):
        yield "prefill.borrow=true"
    if request.own == "on" and fits(replace(request, own="auto")):
        yield "prefill.own=auto"
    if request.expert_cache and fits(replace(request, expert_cache=None)):
        yield "cache.slots=auto"
    if request.cache_per_layer and fits(replace(request, cache_per_layer=False)):
        yield "cache.per_layer=false"
    if request.head_alias and fits(replace(request, head_alias=False)):
        yield "policy.head_alias.enabled=false"
    paged = replace(request, spill=True)  # a reserve may be too small as well: of those that leave room, the largest
    reserve_mib = largest_where(lambda mib: bool(fits(_reserving(paged, mib))), 0, request.reserve_mib - 1)
    if reserve_mib is not None and fits(_reserving(request, reserve_mib)):
        yield f"hardware.vram_reserve_mib={reserve_mib}"


def larger_reserve(request: StrataRequest, too_small_mib: int, first_mib: int, fits: ReadTokens) -> int | None:
    """Return the smallest reserve that keeps a plan within the card, in MiB; None where none does.

    What is kept free pays for what no rule reserves and for a lent head that comes back.

    Args:
        too_small_mib: does not fit. first_mib: tried first; larger ones follow, up to `MOST_MORE_MIB` more.
    """
    more = 0
    while not fits(_reserving(request, first_mib + more)):
        more = 2 * more or 1
        if more > MOST_MORE_MIB:
            return None
    low, high = too_small_mib, first_mib + more
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(_reserving(request, middle)) else (middle, high)
    return high


def _reserving(request: StrataRequest, reserve_mib: int) -> StrataRequest:
    return replace(request, reserve_mib=reserve_mib, reserve_given=True)


def together(request: StrataRequest, fits: ReadTokens) -> tuple[str, ...]:
    """Return the smallest K/V and an automatic chunk and cache, with the largest context beside them, if they fit.

    With a larger reserve where only that keeps such a plan within the card.
    """
    changes: dict[str, Any] = {"kv_type": "q4_0", "chunk_tokens": None, "expert_cache": None, "borrow": True}
    least = replace(request, **changes, own="off", kv_resident_cells=0, cache_per_layer=False)
    context, reserve_mib = request.context_cells, request.reserve_mib
    smallest = replace(least, context_cells=min(context, CONTEXT_STEP_CELLS))
    if not fits(least) and not fits(smallest):
        larger = larger_reserve(smallest, reserve_mib, reserve_mib + 1, fits)
        if larger is None:
            return ()
        reserve_mib, least = larger, _reserving(least, larger)
    if not fits(least):
        shorter = largest_context(least, fits)
        if shorter is None:
            return ()
        context = shorter
    texts = {"kv_type": "q4_0", "chunk_tokens": "auto", "expert_cache": "auto", "borrow": "true"}
    said = [f"{KEYS[name]}={texts[name]}" for name, value in changes.items() if getattr(request, name) != value]
    if request.own != "off":
        said.append("prefill.own=off")
    if request.kv_resident_cells:
        said.append("kv.resident_cells=0")
    if request.cache_per_layer:
        said.append("cache.per_layer=false")
    if context != request.context_cells:
        said.append(f"model.max_context={context}")
    if reserve_mib != request.reserve_mib:
        said.append(f"{KEYS['reserve_mib']}={reserve_mib}")
    return tuple(said)

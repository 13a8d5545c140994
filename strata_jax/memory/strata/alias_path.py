"""The prompt path while the output head is lent: nearly all slots, and own memory for the rest (planning notes 6.2).

The head is needed by decode windows only, so it is unloaded while a prompt is read. The cache is sized as if its
bytes were free, every slot but the first may be lent, and what the slots do not hold is allocated on its own.
"""

from __future__ import annotations

from strata_jax.errors import DoesNotFit
from strata_jax.memory.layout import align_down
from strata_jax.memory.strata.borrow import GRID_TOKENS, SlotSizes, auto_limit_tokens, held_ring, old_pick
from strata_jax.memory.strata.prompt_buffers import request_bytes
from strata_jax.memory.strata.request import MIB, Card, StrataRequest
from strata_jax.memory.strata.result import Layout, PromptPath
from strata_jax.memory.strata.sizes import PackSizes

ALIAS_CHUNKS = (2_048, 1_536, 1_024, 512)
KEPT_SLOTS = 1


def alias_candidates(request: StrataRequest, *, beyond: bool = False) -> tuple[int, ...]:
    """Return the chunks to try, largest first; a given chunk, or a limit below all of them, is the only one.

    beyond: the whole grid of 256 tokens up to what auto may take, where the original has four sizes.
    """
    if request.chunk_tokens is not None:
        return (request.chunk_tokens,)
    limit = auto_limit_tokens(request)
    if beyond:
        grid = range(align_down(limit, GRID_TOKENS), ALIAS_CHUNKS[-1] - GRID_TOKENS, -GRID_TOKENS)
        return tuple(grid) or (limit,)
    return tuple(c for c in ALIAS_CHUNKS if c <= limit) or (limit,)


def hybrid_path(
    sizes: PackSizes,
    slots: SlotSizes,
    request: StrataRequest,
    card: Card,
    free_bytes: int,
    *,
    inside_head_bytes: int = 0,
    beyond: bool = False,
) -> PromptPath:
    """Return the largest chunk whose buffers fit in lent slots and in what is free less `request.alias_spare_mib`.

    Args:
        slots: the cache's; slot 0 is never lent.
        free_bytes: device memory free when the path is opened, the head being unloaded.
        inside_head_bytes: buffers lie in the head's own allocation first, so that no slot has taken its bytes and the
            head's address stays. 0: the original, where the cache has grown into them.
        beyond: see `alias_candidates`.

    Raises:
        DoesNotFit: not even the smallest chunk fits.
    """
    lendable = max(0, slots.num_slots - KEPT_SLOTS) if request.borrow and request.profile else 0
    spare_bytes = max(0, free_bytes - request.alias_spare_mib * MIB)
    available = slots.tail_bytes(lendable) + inside_head_bytes + spare_bytes
    old = old_pick(sizes, slots, request, card)
    why, needed = f"{ALIAS_CHUNKS[0]:,} tokens is the largest chunk with the head lent", 0
    for chunk in alias_candidates(request, beyond=beyond):
        ring_slots, held = held_ring(sizes, request, card, chunk, old)
        needed = request_bytes(sizes, request, chunk, held)
        if needed <= available:
            return _path(slots, lendable, chunk, ring_slots, needed, inside_head_bytes, why)
        holders = _holders(slots, lendable, inside_head_bytes, spare_bytes)
        why = f"{chunk:,} tokens need {needed / MIB:,.1f} MiB; {holders}"
    raise DoesNotFit(
        f"policy.head_alias: {why}, so {(needed - available) / MIB:,.1f} MiB are missing. More slots, a smaller chunk"
        " or policy.head_alias.enabled=false would work",
        shortfall_bytes=needed - available,
    )


def _path(
    slots: SlotSizes, lendable: int, chunk: int, ring_slots: int, needed: int, inside_head: int, why: str
) -> PromptPath:
    outside = max(0, needed - inside_head)
    fewest = slots.tail_slots(outside)
    lent = lendable if fewest is None else min(fewest, lendable)
    lent_bytes = slots.tail_bytes(lent)
    return PromptPath(
        chunk_tokens=chunk,
        layout=Layout.HYBRID,
        ring_slots=ring_slots,
        buffer_bytes=needed,
        own_bytes=max(0, outside - lent_bytes),
        lent_slots=lent,
        first_lent=slots.num_slots - lent,
        lent_bytes=lent_bytes,
        why_not_larger=why,
    )


def _holders(slots: SlotSizes, lendable: int, inside_head: int, spare: int) -> str:
    head = f", {inside_head / MIB:,.1f} MiB in the head's allocation" if inside_head else ""
    return (
        f"{slots.tail_bytes(lendable) / MIB:,.1f} MiB lie in the {lendable:,} slots that may be lent{head} and"
        f" {spare / MIB:,.1f} MiB are free"
    )

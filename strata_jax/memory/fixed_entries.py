"""The ledger's entries that depend on neither context, chunk nor slots: weights, states, the bank, parked state."""

from __future__ import annotations

from functools import lru_cache

from strata_jax.memory.ledger import PHASES, Entry, Memory, Origin, Owner, Phase, always
from strata_jax.memory.request import MovingMemory, PlanRequest
from strata_jax.memory.sizes import (
    F32_BYTES,
    ModelSizes,
    bank_bytes,
    gdn_state_bytes,
    index_tail_bytes,
    ple_state_bytes,
)


def but_not(phase: Phase, owner: Owner, item: str, num_bytes: int, rule: str) -> Entry:
    """Return an entry that takes the same bytes in every phase but one."""
    start, prefill, decode, park = (0 if each is phase else num_bytes for each in PHASES)
    return Entry(owner, item, (start, prefill, decode, park), Memory.DEVICE, Origin.COMPUTED, rule)


def reserve_entries(request: PlanRequest) -> tuple[Entry, ...]:
    """Return what is left alone of a device budget."""
    if request.device_budget_bytes is None:
        return ()
    rule = "left to the desktop and other programs"
    return (always(Owner.RESERVE, "reserve", request.reserve_bytes, rule, origin=request.reserve_origin),)


@lru_cache(maxsize=32)
def model_entries(sizes: ModelSizes, with_draft: bool, moving: MovingMemory) -> tuple[Entry, ...]:
    """Return weights, states, the bank and what parking takes. Cached: they are the same for many requests."""
    g, entries = sizes.geometry, []
    stored = "as stored; vectors and convolution kernels as float32"
    entries.append(always(Owner.DENSE, "trunk", sizes.dense_bytes, stored))
    entries.append(always(Owner.EMBEDDING, "rows", sizes.embedding_bytes, "token_embd as stored"))
    head = "output as stored" if sizes.head_bytes else "0: the head uses the embedding"
    if moving.head_alias:
        rule = f"{head}; unloaded while a prompt is read"
        entries.append(but_not(Phase.PREFILL, Owner.HEAD, "rows", sizes.head_bytes, rule))
        entries.append(always(Owner.BANK, "head", sizes.head_bytes, "copy to load it from", memory=Memory.HOST))
    else:
        entries.append(always(Owner.HEAD, "rows", sizes.head_bytes, head))
    if moving.conversation_bytes:
        rule = "conversation.budget_mib"
        entries.append(
            always(Owner.CONVERSATIONS, "parked", moving.conversation_bytes, rule, Memory.HOST, Origin.GIVEN)
        )
    if moving.checkpoints:
        each = _checkpoint_bytes(sizes, with_draft)
        rule = f"{moving.checkpoints} states x {each:,} B"
        entries.append(always(Owner.CHECKPOINTS, "live", moving.checkpoints * each, rule, memory=Memory.HOST))
    if with_draft:
        entries.append(always(Owner.DRAFTER, "draft block", sizes.drafter_bytes, f"{stored}; without its experts"))
    num_gdn = len(g.recurrent_layers)
    if num_gdn:
        each = gdn_state_bytes(g)
        entries.append(
            always(Owner.RECURRENT_STATE, "GDN", num_gdn * each, f"{num_gdn} GDN layers x {each:,} B of float32")
        )
    if g.ple_layer is not None:
        rule = "inputs the n-gram convolution looks back to, float32"
        entries.append(always(Owner.RECURRENT_STATE, "n-gram convolution", ple_state_bytes(g), rule))
    width = g.num_streams * g.embed_width
    entries.append(always(Owner.RECURRENT_STATE, "hidden row", width * F32_BYTES, f"C*E {width:,} x 4 B"))
    for ratio, count in sizes.sparse_ratios(with_draft):
        rule = f"{count} sparse layers x ({ratio} - 1) raw keys x {g.index_dim} x 4 B"
        tails = count * index_tail_bytes(g, ratio)
        entries.append(always(Owner.INDEX_KEYS, f"incomplete blocks of {ratio}", tails, rule))
    if with_draft and g.compress_ratio[-1]:
        ratio = g.compress_ratio[-1]
        rule = f"the draft block's ({ratio} - 1) raw keys x {g.index_dim} x 4 B at the last committed token"
        entries.append(always(Owner.INDEX_KEYS, "draft block before its last token", index_tail_bytes(g, ratio), rule))
    blocks = sizes.blocks(with_draft)
    if moving.replacement_decay is not None:
        rule = f"decayed uses and last use of {g.num_experts} experts of {blocks} blocks, 8 B each, and a clock"
        entries.append(always(Owner.TABLES, "use of experts", 8 * blocks * g.num_experts + 4, rule))
    rule = f"{g.num_experts} experts of {blocks} blocks, packed, matrices padded to 4 B"
    entries.append(always(Owner.BANK, "experts", bank_bytes(sizes, with_draft), rule, memory=Memory.HOST))
    return tuple(entries)


def _checkpoint_bytes(sizes: ModelSizes, with_draft: bool) -> int:
    """Return the bytes of a stored state: all of a sequence but its cells and the keys of complete index blocks."""
    g = sizes.geometry
    tails = sum(count * index_tail_bytes(g, ratio) for ratio, count in sizes.sparse_ratios(with_draft))
    hidden = g.num_streams * g.embed_width * F32_BYTES
    return len(g.recurrent_layers) * gdn_state_bytes(g) + ple_state_bytes(g) + tails + hidden

"""What the planner decides, in this order: context, chunk, slots, staging buffers. Given settings are constraints."""

from __future__ import annotations

from strata_jax.memory import layout
from strata_jax.memory.candidate import Frame
from strata_jax.memory.cell_window import window_holds
from strata_jax.memory.ledger import MIB, Memory, Origin
from strata_jax.memory.request import MIN_CONTEXT_CELLS, Choice, setting_text
from strata_jax.memory.staging import AUTO_MOST_SHARE, AUTO_SHARE, NUM_BUFFERS

SMALLEST_AUTO_CHUNK_TOKENS = 8
CONTEXT_GRID_CELLS = 1024


def choose_context(frame: Frame) -> Choice:
    """Given, or what the workload needs, or the model's length with the K/V in half of what the weights leave.

    Less than that where given slots or a given chunk leave less.
    """
    r, block = frame.request, frame.block_cells
    if r.context_cells is not None:
        return r.choice("context_cells", r.context_cells)
    if r.workload_cells is not None:
        return _workload_context(frame, r.workload_cells)
    longest = frame.sizes.geometry.context_length
    full = layout.align_up(longest, block) // block
    least = min(full, -(-MIN_CONTEXT_CELLS // block))
    room = frame.room_bytes(frame.fixed)
    half = None if room is None else max(0, room) // 2

    def takes_half(num_blocks: int) -> bool:
        cells = num_blocks * block
        entries = frame.context_entries(cells, frame.first_cells(cells))
        return half is None or sum(e.peak_bytes for e in entries if e.memory is Memory.DEVICE) <= half

    def fits(num_blocks: int) -> bool:
        cells = num_blocks * block
        return frame.shortfall(cells, _least_chunk(frame, cells), r.expert_slots or 0) is None

    blocks = layout.largest_where(takes_half, least, full) or least
    if not fits(blocks):
        blocks = layout.largest_where(fits, least, blocks) or least
        reason = f"what fits beside {', '.join(setting_text(*pair) for pair in r.given().items()) or 'the weights'}"
    elif blocks == full:
        reason = "the model's context_length"
    else:
        reason = f"K/V and index keys may take half of the {2 * (half or 0) / MIB:,.1f} MiB that the weights leave"
    if blocks < full:
        reason += f"; the model's context_length is {longest:,}"
    return Choice("context_cells", min(longest, blocks * block), Origin.COMPUTED, reason)


def _least_chunk(frame: Frame, context_cells: int) -> int:
    r = frame.request
    return r.chunk_tokens or auto_chunks(r.chunk_auto_max, context_cells)[-1]


def _workload_context(frame: Frame, needed_cells: int) -> Choice:
    """What the workload needs, on a grid where memory allows: compiled programs depend on the number of cells."""
    r, longest = frame.request, frame.sizes.geometry.context_length
    gridded = min(longest, layout.align_up(needed_cells, CONTEXT_GRID_CELLS))
    if gridded != needed_cells and frame.shortfall(gridded, _least_chunk(frame, gridded), r.expert_slots or 0) is None:
        reason = f"the workload needs {needed_cells:,}; on a grid of {CONTEXT_GRID_CELLS:,}, to reuse compiled programs"
        return Choice("context_cells", gridded, Origin.COMPUTED, reason)
    return Choice("context_cells", needed_cells, Origin.COMPUTED, "what the workload needs")


def auto_chunks(chunk_auto_max: int, context_cells: int) -> tuple[int, ...]:
    """Return the chunks that auto tries, largest first: powers of two from 8 up to the first that holds the context."""
    tried: list[int] = []
    size = SMALLEST_AUTO_CHUNK_TOKENS
    while size <= chunk_auto_max:
        tried.append(size)
        if size >= context_cells:
            break
        size *= 2
    return tuple(reversed(tried)) or (chunk_auto_max,)


def choose_chunk(frame: Frame, context_cells: int) -> Choice:
    """Given, or the largest that fits beside the slots of one token's experts; without them if nothing else fits."""
    r = frame.request
    if r.chunk_tokens is not None:
        return r.choice("chunk_tokens", r.chunk_tokens)
    every = auto_chunks(r.chunk_auto_max, context_cells)
    tried = tuple(tokens for tokens in every if window_holds(frame, context_cells, tokens)) or every[-1:]
    floors = (r.expert_slots,) if r.expert_slots is not None else (_one_token_slots(frame), 0)
    for num_slots in floors:
        for idx, tokens in enumerate(tried):
            if _fits_beside(frame, context_cells, tokens, num_slots):
                reason = _chunk_reason(frame, tried, idx, context_cells, num_slots)
                return Choice("chunk_tokens", tokens, Origin.COMPUTED, reason)
    return Choice("chunk_tokens", tried[-1], Origin.COMPUTED, "the smallest that auto tries")


def _fits_beside(frame: Frame, context_cells: int, tokens: int, num_slots: int) -> bool:
    """Whether a chunk fits beside at least so many slots; where prompts borrow, of all the slots that there can be."""
    if frame.request.moving.lend and frame.request.expert_slots is None:
        most = frame.slots_that_fit(context_cells, tokens)
        return most is not None and most >= num_slots
    return frame.shortfall(context_cells, tokens, num_slots) is None


def _chunk_reason(frame: Frame, tried: tuple[int, ...], idx: int, context_cells: int, num_slots: int) -> str:
    if idx:
        larger = frame.shortfall(context_cells, tried[idx - 1], num_slots)
        short = larger.short_bytes / MIB if larger else 0.0
        return f"{tried[idx - 1]:,} tokens need {short:,.1f} MiB more than there are beside {num_slots:,} slots"
    if tried[0] >= context_cells:
        return f"no prompt is longer than the context of {context_cells:,} cells"
    if tried[0] < auto_chunks(frame.request.chunk_auto_max, context_cells)[0]:
        return f"the largest that kv.resident_cells={frame.request.moving.resident_cells:,} holds beside a page"
    return f"the largest that auto tries; prefill.chunk=auto:{2 * tried[0]} allows more"


def _one_token_slots(frame: Frame) -> int:
    """Slots for as many experts of every block as one token uses."""
    return min(len(frame.pages) * frame.sizes.geometry.num_experts_used, frame.max_slots)


def choose_slots(frame: Frame, context_cells: int, chunk_tokens: int) -> Choice:
    """Given, or all that fit; where device and host memory are one, only those of one token."""
    r = frame.request
    if r.expert_slots is not None:
        return r.choice("expert_slots", r.expert_slots)
    fitting = frame.slots_that_fit(context_cells, chunk_tokens) or 0
    if r.device_budget_bytes is None and fitting > _one_token_slots(frame):
        reason = "the experts of one token: here a slot is a second copy in the same memory and saves no transfer"
        return Choice("expert_slots", _one_token_slots(frame), Origin.COMPUTED, reason)
    if r.ranking is not None and fitting == frame.max_slots < len(frame.order.expert):
        reason = f"all experts that cache.profile={r.ranking.file} ranks"
        return Choice("expert_slots", fitting, Origin.COMPUTED, reason)
    if fitting == frame.max_slots:
        return Choice("expert_slots", fitting, Origin.COMPUTED, "all experts fit")
    return Choice("expert_slots", fitting, Origin.COMPUTED, f"as many of {frame.max_slots:,} experts as fit")


def stage_choice(frame: Frame, stage_bytes: int) -> Choice:
    """Given, or a share of what is left."""
    if frame.request.stage_bytes is not None:
        return frame.request.choice("stage_bytes", stage_bytes)
    left = f"weights, context and prompt buffers leave, for long chunks up to 1/{AUTO_MOST_SHARE}"
    reason = f"1/{AUTO_SHARE} of what {left}, but no more than {NUM_BUFFERS} blocks miss or given slots leave"
    return Choice("stage_bytes", stage_bytes, Origin.COMPUTED, reason)

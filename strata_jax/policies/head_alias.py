"""Head alias: while a prompt is read, the output head's bytes belong to the prompt (planning notes 6.2).

The cache is planned as if the head took nothing. At start the drafter binds its vocabulary rows and the head is
unloaded. A request unloads it if it is loaded, borrows slots and allocates the rest of the buffers on its own (hybrid
layout), reads, refills, frees the own part, and loads the head before its first decode window.

Beyond the original: a read with few fresh tokens leaves a loaded head where it is when its buffers fit in slots alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from strata_jax.errors import DoesNotFit, StrataError
from strata_jax.memory.ledger import MIB
from strata_jax.policies.moves import Move, MoveKind
from strata_jax.policies.policy import CHUNK_GRID_TOKENS, Compat, Policy, PolicyContext
from strata_jax.policies.state import MemoryState, RequestFacts, Step


class HeadAlias(Policy):
    """Unload the head for prompts, load it for decoding."""

    name = "head_alias"

    def on_start(self, ctx: PolicyContext, state: MemoryState) -> Step:
        """The drafter has copied its rows: unload the head."""
        return self._unload(ctx, state, "", "drafter bound")

    def before_read(self, ctx: PolicyContext, state: MemoryState, facts: RequestFacts, fresh_tokens: int) -> Step:
        """Unload the head if it is loaded and allocate the own part of the buffers, unless the read is short."""
        if state.head_loaded and self.keeps_head(ctx, state, fresh_tokens):
            return Step(state, notes=(f"{fresh_tokens:,} fresh tokens: the head stays",))
        step = self._unload(ctx, state, facts.conversation, f"read {fresh_tokens:,} fresh tokens")
        own = self._own_bytes(ctx, state, fresh_tokens)
        if not own or state.own_buffer_bytes:
            return step
        free = step.state.free_bytes
        if own > free and not can_spill(ctx):
            raise DoesNotFit(
                f"the own part of the prompt buffers needs {own / MIB:,.1f} MiB; with the head unloaded"
                f" {max(0, free) / MIB:,.1f} MiB are free; set policy.head_alias.enabled=false or a smaller"
                " prefill.chunk",
                shortfall_bytes=own - max(0, free),
            )
        move = Move(
            MoveKind.ALLOC_BUFFERS, "prompt buffers", own, cause=f"{self.name}: hybrid layout",
            conversation=facts.conversation,
        )  # fmt: skip
        return step.then(Step(replace(step.state, own_buffer_bytes=own, free_bytes=free - own), (move,)))

    def after_read(self, ctx: PolicyContext, state: MemoryState, facts: RequestFacts) -> Step:
        """Free the own part and load the head before the first decode window."""
        step = Step(state)
        if state.own_buffer_bytes and ctx.plan.prompt.layout == "hybrid":
            freed = state.own_buffer_bytes
            move = Move(
                MoveKind.FREE_BUFFERS, "prompt buffers", freed, cause=f"{self.name}: prompt read",
                conversation=facts.conversation,
            )  # fmt: skip
            step = Step(replace(state, own_buffer_bytes=0, free_bytes=state.free_bytes + freed), (move,))
        return step.then(self._load(ctx, step.state, facts.conversation))

    def before_round(
        self, ctx: PolicyContext, state: MemoryState, position: int, window: int, used: NDArray[np.int32] | None = None
    ) -> Step:
        """A window needs the head: load it if no read did."""
        return self._load(ctx, state, "")

    def keeps_head(self, ctx: PolicyContext, state: MemoryState, fresh_tokens: int) -> bool:
        """Whether a read leaves the head: below the threshold, and its buffers fit in lendable slots alone."""
        if fresh_tokens >= ctx.parameters.alias_min_fresh_tokens:
            return False
        need = ctx.buffer_bytes(ctx.read_tokens(state, fresh_tokens))
        return need <= state.slots.lendable_bytes(state.slots.top)

    def _own_bytes(self, ctx: PolicyContext, state: MemoryState, fresh_tokens: int) -> int:
        """Return what lendable slots do not hold of the read's buffers; only the hybrid layout has such a part."""
        if ctx.plan.prompt.layout != "hybrid":
            return 0
        need = ctx.buffer_bytes(ctx.read_tokens(state, fresh_tokens))
        lendable = 0 if ctx.parameters.own_first else state.slots.lendable_bytes(state.slots.top)
        return min(max(0, need - lendable), ctx.plan.prompt.own_bytes)

    def _unload(self, ctx: PolicyContext, state: MemoryState, conversation: str, why: str) -> Step:
        if not state.head_loaded:
            return Step(state)
        head = ctx.plan.head_bytes
        move = Move(MoveKind.UNLOAD_HEAD, "head", head, cause=f"{self.name}: {why}", conversation=conversation)
        return Step(replace(state, head_loaded=False, free_bytes=state.free_bytes + head), (move,))

    def _load(self, ctx: PolicyContext, state: MemoryState, conversation: str) -> Step:
        if state.head_loaded:
            return Step(state)
        head, free = ctx.plan.head_bytes, state.free_bytes
        if head > free and not can_spill(ctx):
            raise DoesNotFit(
                f"the head needs {head / MIB:,.1f} MiB to decode and {max(0, free) / MIB:,.1f} MiB are free; set"
                f" hardware.vram_reserve_mib larger by {-(-(head - max(0, free)) // MIB):,}, or"
                " policy.head_alias.enabled=false",
                shortfall_bytes=head - max(0, free),
            )
        move = Move(
            MoveKind.LOAD_HEAD, "head", head, cause=f"{self.name}: decode window follows", conversation=conversation
        )
        after = free - head
        full = after <= 0 and not ctx.parameters.own_first  # what this project's engine leaves free is not seen here
        notes = ("0 MiB of device memory are free while decoding",) if full else ()
        return Step(replace(state, head_loaded=True, free_bytes=after), (move,), notes)


def can_spill(ctx: PolicyContext) -> bool:
    """Whether the driver lets allocations exceed device memory and moves others out to RAM, as the plan assumes."""
    return ctx.plan.request.spills_on(ctx.plan.card)


def check_head_address(compat: Compat, bound: int, loaded: int) -> None:
    """Raise if captured graphs hold an address that the reloaded head does not have (planning notes 6.2, guard).

    The original stops and is restarted; programs that take the head as an argument need no guard (native).
    """
    if compat is Compat.UPSTREAM and bound != loaded:
        raise StrataError(
            f"the head was bound at {bound:#x} and has been loaded at {loaded:#x}; the decode graphs embed the first:"
            " restart, or set policy.compat=native or policy.head_alias.enabled=false"
        )


def break_even_tokens(ctx: PolicyContext, cycle_ms: float) -> int:
    """Return the least fresh tokens for which unloading the head is no slower than keeping it.

    A cycle of unload, relayout and load costs `cycle_ms`. A read whose buffers lendable slots hold alone has the same
    chunk, the same loan and the same refill either way, so that it keeps the head; the first length whose buffers they
    do not hold needs the head's bytes. Beyond the context, so that no read unloads the head, where slots hold the whole
    chunk.
    """
    if cycle_ms <= 0:
        return 0
    step = CHUNK_GRID_TOKENS
    grid = ctx.parameters.read_grid or range(step, ctx.plan.prompt.chunk_tokens + step, step)
    below = 0
    for tokens in grid:
        if ctx.buffer_bytes(tokens) > ctx.plan.prompt.lent_bytes:
            return below + 1
        below = tokens
    return ctx.plan.request.context_cells + 1

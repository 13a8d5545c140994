"""Own prompt buffers from spare device memory: nothing is lent, nothing is refilled (planning notes 6.1).

The planner decides (`memory/strata/own_buffers.py`): only when the cache has been filled, only a chunk no smaller than
borrowing gives, only bytes above the reserve. Here the decision is carried out: one allocation, kept for the run.
"""

from __future__ import annotations

from dataclasses import replace

from strata_jax.errors import DoesNotFit
from strata_jax.memory.ledger import MIB
from strata_jax.policies.moves import Move, MoveKind
from strata_jax.policies.policy import Policy, PolicyContext
from strata_jax.policies.state import MemoryState, Step, own_at_start_bytes


class OwnPrefill(Policy):
    """Allocate the prompt buffers at start; every later hook has nothing to do."""

    name = "prefill_own"

    def on_start(self, ctx: PolicyContext, state: MemoryState) -> Step:
        """Allocate the buffers from free memory.

        Raises DoesNotFit when the memory that was free at the decision has been taken since.
        """
        own = own_at_start_bytes(ctx.plan)
        if not own or state.own_buffer_bytes:
            return Step(state)
        if own > state.free_bytes and ctx.plan.card.os != "windows":
            raise DoesNotFit(
                f"own prompt buffers need {own / MIB:,.1f} MiB and {max(0, state.free_bytes) / MIB:,.1f} MiB are free;"
                " set prefill.own=off or a smaller prefill.chunk",
                shortfall_bytes=own - max(0, state.free_bytes),
            )
        move = Move(
            MoveKind.ALLOC_BUFFERS, "prompt buffers", own, cause=f"{self.name}: spare device memory above the reserve",
            detail=(("chunk_tokens", ctx.plan.prompt.chunk_tokens),),
        )  # fmt: skip
        return Step(replace(state, own_buffer_bytes=own, free_bytes=state.free_bytes - own), (move,))

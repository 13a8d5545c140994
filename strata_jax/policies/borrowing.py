"""Baseline: prompt buffers borrow the last slots of the expert cache (planning notes 2.7).

Lent experts are streamed like any miss; afterwards the same experts are copied back into the same slots. How many
slots are lent follows the read, not only the plan: a short read borrows less.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from strata_jax.errors import DoesNotFit
from strata_jax.memory.ledger import MIB
from strata_jax.policies.moves import Move, MoveKind
from strata_jax.policies.policy import Policy, PolicyContext
from strata_jax.policies.state import GIVEN, MemoryState, RequestFacts, Step


class Borrowing(Policy):
    """Lend slots while a prompt is read, and refill them."""

    name = "borrowing"

    def before_read(self, ctx: PolicyContext, state: MemoryState, facts: RequestFacts, fresh_tokens: int) -> Step:
        """Lend as many slots from the end as the read needs, never below the first lendable one."""
        tokens = ctx.read_tokens(state, fresh_tokens)
        need = max(0, ctx.buffer_bytes(tokens) - state.own_buffer_bytes)
        first = state.slots.loan_first(need)
        if need and (first is None or first < state.slots.top):
            first = state.slots.top
        if not need or first is None or (state.lent_from is not None and state.lent_from <= first):
            return Step(state)
        lendable = state.slots.lendable_bytes(first)
        if lendable < need:
            raise DoesNotFit(
                f"a read of {tokens:,} tokens needs {need / MIB:,.1f} MiB of prompt buffers; slots {first:,} to"
                f" {state.slots.num_present:,} have {lendable / MIB:,.1f} MiB; set prefill.chunk to a smaller value",
                shortfall_bytes=need - lendable,
            )
        before = 0 if state.lent_from is None else state.slots.lendable_bytes(state.lent_from)
        last = state.slots.num_present if state.lent_from is None else state.lent_from
        move = Move(
            MoveKind.LEND, "expert slots", lendable - before,
            count=int(np.count_nonzero(state.slots.occupant[first:last] != GIVEN)), first=first, last=last,
            cause=f"{self.name}: read {fresh_tokens:,} fresh tokens", conversation=facts.conversation,
            detail=(("chunk_tokens", tokens), ("buffer_bytes", need)),
        )  # fmt: skip
        return Step(replace(state, lent_from=first), (move,))

    def after_read(self, ctx: PolicyContext, state: MemoryState, facts: RequestFacts) -> Step:
        """Return the slots and copy the same experts back into them."""
        if state.lent_from is None:
            return Step(state)
        first, last = state.lent_from, state.slots.num_present
        occupants = state.slots.occupant[first:last]
        ranks = occupants[occupants >= 0]
        moves = [
            Move(
                MoveKind.RETURN, "expert slots", state.slots.lendable_bytes(first),
                count=int(np.count_nonzero(occupants != GIVEN)),
                first=first, last=last, cause=f"{self.name}: prompt read", conversation=facts.conversation,
            )
        ]  # fmt: skip
        if len(ranks):
            copied = int(ctx.rank_bytes[ranks].sum())
            moves.append(
                Move(
                    MoveKind.REFILL, "expert slots", copied, count=len(ranks), first=first, last=last,
                    cause=f"{self.name}: same experts, same slots", conversation=facts.conversation,
                )
            )  # fmt: skip
        return Step(replace(state, lent_from=None), tuple(moves))

"""Policies of one run, composed: which are on, in which order their hooks run, and why.

Order of `before_*` and `on_*` hooks (``after_read`` runs it backwards, so that reads nest):

1. short reads: may claim a read, then no other policy prepares one; what an earlier segment holds is returned first;
2. conversation budget: parks the outgoing session before anything is sized for the new one;
3. adaptive slots: swaps on their way land before tables change;
4. elastic K/V: trims once a session is parked, grows before a restore and before a prompt, while slots are not lent;
5. elastic cache: segments, between prompts only;
6. own prefill: allocated once at start;
7. head alias: unloads the head and allocates the own part, so that
8. borrowing lends only what is still missing. Afterwards slots are returned and refilled, then the own part is freed,
   then the head is loaded: the reverse order.

Interactions, pair by pair (the original's refusals are in ``refusals.py``):

| pair | what happens |
| --- | --- |
| own + borrowing | own buffers exclude the loan: a plan has one of them |
| own + head alias | the hybrid layout has the own part; with permanent own buffers the alias only unloads |
| own + elastic K/V | no loan: every slot above the floor may pay |
| own + elastic cache | segments may go down to one slot |
| head alias + borrowing | the loan is extended by the own part |
| head alias + elastic K/V | where too little lies under the loan slots pay anywhere, or all cells are mapped |
| head alias + elastic cache | the loan is planned again with the own part |
| elastic K/V + borrowing | the K/V takes slots under the loan; anywhere, the loan starts lower or the chunk shrinks |
| elastic K/V + elastic cache | segments that hold slots of the K/V stay; the original refuses the pair |
| elastic K/V + conversations | grown before a restore, trimmed when parked; `keep_restorable` leaves its cells |
| elastic K/V + adaptive | swaps land before growth; use decides who is hot |
| short reads + any | claimed reads touch no loan and no head; a window loads an unloaded head |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from strata_jax.memory.strata import kv_pools, prompt_buffers
from strata_jax.memory.strata.borrow import SlotSizes, held_ring, old_pick
from strata_jax.memory.strata.request import Version
from strata_jax.memory.strata.result import Layout
from strata_jax.policies.adaptive import AdaptiveSlots
from strata_jax.policies.borrowing import Borrowing
from strata_jax.policies.conversation_budget import ConversationBudget, find_parked
from strata_jax.policies.head_alias import HeadAlias
from strata_jax.policies.kv_grow import KvGrow
from strata_jax.policies.own_prefill import OwnPrefill
from strata_jax.policies.policy import Compat, Policy, PolicyContext, PolicyParameters, Prices
from strata_jax.policies.short_reads import ShortReads
from strata_jax.policies.state import MemoryState, RequestFacts, Step, initial_slots, initial_state
from strata_jax.policies.vram_elastic import VramElastic

if TYPE_CHECKING:
    from strata_jax.memory.strata.result import StrataPlan
    from strata_jax.memory.strata.sizes import PackSizes

ORDER: tuple[type[Policy], ...] = (
    ShortReads, ConversationBudget, AdaptiveSlots, KvGrow, VramElastic, OwnPrefill, HeadAlias, Borrowing,
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class PolicyStack:
    """The policies of a run in order, and what they share. Hooks have the names of `Policy`'s.

    `round_policies`: those that do something before a decode window, of which there are many.
    """

    ctx: PolicyContext
    policies: tuple[Policy, ...]
    round_policies: tuple[Policy, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(policy.name for policy in self.policies)

    def initial_state(self, *, ram_available_bytes: int | None = None) -> MemoryState:
        """Return the memory when the cache has been filled, with the granularity that the K/V is mapped in."""
        return initial_state(
            self.ctx.sizes, self.ctx.plan, ram_available_bytes=ram_available_bytes, chunk_bytes=self.ctx.granule_bytes
        )

    def on_start(self, state: MemoryState) -> Step:
        """Make the engine ready."""
        return self._run(state, lambda policy, now: policy.on_start(self.ctx, now))

    def reads_by_windows(self, facts: RequestFacts, fresh_tokens: int) -> bool:
        """Whether decode windows read a segment of `fresh_tokens` tokens."""
        return any(policy.claims_read(self.ctx, facts, fresh_tokens) for policy in self.policies)

    def on_request(self, state: MemoryState, facts: RequestFacts) -> Step:
        """Start a request: park and trim when it switches, grow and restore when its session is parked, then grow."""
        step = Step(state)
        if facts.switches:
            step = step.then(self._run(step.state, lambda policy, now: policy.on_park(self.ctx, now, facts)))
            step = step.then(self._run(step.state, lambda policy, now: policy.after_park(self.ctx, now, facts)))
        image = find_parked(step.state, facts.conversation) if step.state.live is None else None
        if image is not None and ConversationBudget.name in self.names:
            tokens = max(image.tokens, facts.reused_tokens)  # its prompt may continue another's state
            step = step.then(
                self._run(step.state, lambda policy, now: policy.before_restore(self.ctx, now, facts, tokens))
            )
            step = step.then(self._run(step.state, lambda policy, now: policy.on_restore(self.ctx, now, facts)))
        return step.then(self._run(step.state, lambda policy, now: policy.on_request(self.ctx, now, facts)))

    def before_read(self, state: MemoryState, facts: RequestFacts, fresh_tokens: int) -> Step:
        """Prepare a segment. One that decode windows read returns what an earlier segment of the prompt holds."""
        if self.reads_by_windows(facts, fresh_tokens):
            return self.after_read(state, facts)
        return self._run(state, lambda policy, now: policy.before_read(self.ctx, now, facts, fresh_tokens))

    def after_read(self, state: MemoryState, facts: RequestFacts) -> Step:
        """Return what the prompt held, in reverse order: decode windows follow."""
        return self._run(state, lambda policy, now: policy.after_read(self.ctx, now, facts), backwards=True)

    def before_round(
        self, state: MemoryState, position: int, window: int, used: NDArray[np.int32] | None = None
    ) -> Step:
        """Prepare a decode window; `used`: ranks of the previous window's experts, once for each token."""
        step = Step(state)
        for policy in self.round_policies:
            step = step.then(policy.before_round(self.ctx, step.state, position, window, used))
        return step

    def after_request(self, state: MemoryState, facts: RequestFacts, tokens: int) -> Step:
        """Note that the live session now holds `tokens` tokens."""
        return self._run(state, lambda policy, now: policy.after_request(self.ctx, now, facts, tokens))

    def on_vram_change(self, state: MemoryState, reserve_bytes: int) -> Step:
        """Other programs are to find `reserve_bytes` free."""
        return self._run(state, lambda policy, now: policy.on_vram_change(self.ctx, now, reserve_bytes))

    def _run(self, state: MemoryState, hook: Callable[[Policy, MemoryState], Step], *, backwards: bool = False) -> Step:
        step = Step(state)
        for policy in reversed(self.policies) if backwards else self.policies:
            step = step.then(hook(policy, step.state))
        return step


def policy_stack(
    sizes: PackSizes,
    plan: StrataPlan,
    *,
    compat: Compat = Compat.NATIVE,
    parameters: PolicyParameters | None = None,
    prices: Prices | None = None,
) -> PolicyStack:
    """Return the policies that a plan turns on, in `ORDER`.

    Args:
        prices: sizes of the memory model; None: the Strata rules.
        parameters: of the policies; slots pay for cells anywhere, unless that is given, where native compatibility
            and the plan allow it and the slots under the loan could not pay for the whole window.
    """
    parameters, prices = parameters or PolicyParameters(), prices or strata_prices(sizes, plan)
    if parameters.grow_anywhere is None:
        anywhere = (
            compat is Compat.NATIVE and plan.request.grow.anywhere and not _loan_leaves_enough(sizes, plan, prices)
        )
        parameters = replace(parameters, grow_anywhere=anywhere)
    ctx = PolicyContext(sizes, plan, prices, compat, parameters)
    request, prompt = plan.request, plan.prompt
    wanted = {
        ShortReads: request.short_read_tokens > 0,
        ConversationBudget: True,  # keeps the live session and its checkpoints; a budget of 0 parks nothing
        AdaptiveSlots: parameters.adapt.every_rounds > 0 and parameters.adapt.swaps > 0,
        KvGrow: request.grow.enabled and plan.grow_refusal is None,
        VramElastic: request.vram_elastic_mib > 0,
        OwnPrefill: prompt.layout is Layout.OWN,
        HeadAlias: plan.head_aliased,
        Borrowing: prompt.lent_slots > 0,
    }
    policies = tuple(policy() for policy in ORDER if wanted[policy])
    rounds = tuple(policy for policy in policies if type(policy).before_round is not Policy.before_round)
    return PolicyStack(ctx, policies, rounds)


def _loan_leaves_enough(sizes: PackSizes, plan: StrataPlan, prices: Prices) -> bool:
    """Whether the slots between the floor and the loan could pay for the whole window."""
    slots, chunk = initial_slots(sizes, plan), plan.card.vmm_chunk_bytes
    floor = min(plan.request.grow.floor_slots, slots.top)
    chunks = prices.kv_chunks(plan.request.context_cells, chunk) - prices.kv_chunks(plan.kv_mapped_cells, chunk)
    return int(slots.offset_bytes[slots.top]) // chunk + -int(slots.offset_bytes[floor]) // chunk >= chunks


def strata_prices(sizes: PackSizes, plan: StrataPlan) -> Prices:
    """Return the sizes of the Strata memory models for a plan's request."""
    request = plan.request
    slots = SlotSizes.of(sizes, plan.slots, uniform=plan.uniform)
    grid = request.chunk_tokens is None and request.version is not Version.V0_1_35
    old = old_pick(sizes, slots, request, plan.card) if grid else None

    def buffer_bytes(tokens: int) -> int:
        held = held_ring(sizes, request, plan.card, tokens, tokens if old is None else old)[1]
        return prompt_buffers.request_bytes(sizes, request, tokens, held)

    return Prices(
        buffer_bytes=buffer_bytes,
        kv_chunks=lambda cells, chunk_bytes: kv_pools.pool_chunks(
            sizes, request.kv_type, cells, chunk_bytes, with_drafter=request.mtp
        ),
        image_bytes=lambda tokens, checkpoints: kv_pools.conversation_image_bytes(
            sizes, request.kv_type, tokens, checkpoints, with_drafter=request.mtp
        ),
        checkpoint_bytes=kv_pools.checkpoint_bytes(sizes),
    )

"""What every policy is: a set of pure hooks, each from the memory and what happens next to a step of moves.

A hook returns a `Step`: the memory after its moves, the moves in order, lines for the log. It never carries anything
out: an executor does, and publishes the new state when every move has succeeded. A hook that cannot do what it must
raises `DoesNotFit`; the state it was given is untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from strata_jax.policies.state import MemoryState, RequestFacts, Step, expert_bytes

if TYPE_CHECKING:
    from strata_jax.memory.strata.result import StrataPlan
    from strata_jax.memory.strata.sizes import PackSizes

CHUNK_GRID_TOKENS = 256
PAGE_BYTES = 65_536


class Compat(StrEnum):
    """Whether combinations that the original refuses are refused (planning notes 3.2, 6.2, 6.3)."""

    NATIVE = "native"
    UPSTREAM = "upstream"


@dataclass(frozen=True, slots=True)
class AdaptSettings:
    """Adaptive slots (planning notes 4.4).

    Attributes:
        every_rounds: rounds between decisions; 0: never. swaps: most swaps at once; 0: none.
        decay: factor of all counters at a decision. least_usage: a candidate's counter at least. gap: by how much it
            exceeds its victim's. lag_rounds: rounds until a copy may land, so that runs are reproducible (#463).
    """

    every_rounds: int = 4
    swaps: int = 96
    decay: float = 0.7
    least_usage: float = 2.0
    gap: float = 1.5
    lag_rounds: int = 1


@dataclass(frozen=True, slots=True)
class PolicyParameters:
    """Parameters of the policies that no plan holds.

    Attributes:
        alias_min_fresh_tokens: reads with fewer fresh tokens leave the head where it is; 0: every read unloads it, as
            in the original.
        grow_anywhere: the K/V takes the coldest slots wherever they lie (its pages are table entries); False: just
            under the loan, in whole chunks, as the original; None: `policy_stack` decides.
        page_bytes: unit in which slots pay anywhere.
        pages_stay: unmapped K/V memory that no slot takes back stays the K/V's, as it always does where slots pay
            anywhere; False: it is free again.
        read_grid: token counts that prompt buffers are laid out for, ascending; empty: multiples of 256.
        own_first: with the head unloaded, its bytes serve the prompt before slots do; False: slots first, as published.
        keep_restorable: trimming leaves what the longest parked conversation needs; False: as published.
        request_margin_cells, round_margin_cells: cells beyond a prompt and beyond a decode window.
    """

    alias_min_fresh_tokens: int = 0
    grow_anywhere: bool | None = None
    page_bytes: int = PAGE_BYTES
    pages_stay: bool = False
    read_grid: tuple[int, ...] = ()
    own_first: bool = False
    keep_restorable: bool = False
    request_margin_cells: int = 256
    round_margin_cells: int = 64
    adapt: AdaptSettings = field(default_factory=AdaptSettings)


@dataclass(frozen=True, slots=True)
class Prices:
    """Sizes that depend on the memory model, as functions.

    Attributes:
        buffer_bytes: prompt buffers of a chunk of so many tokens, ring included.
        kv_chunks: (cells, chunk_bytes) -> chunks of all K/V pools with so many cells.
        image_bytes: (tokens, checkpoints) -> RAM of a parked conversation.
        checkpoint_bytes: RAM of one stored state.
    """

    buffer_bytes: Callable[[int], int]
    kv_chunks: Callable[[int, int], int]
    image_bytes: Callable[[int, int], int]
    checkpoint_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class PolicyContext:
    """What does not change during a run."""

    sizes: PackSizes
    plan: StrataPlan
    prices: Prices
    compat: Compat = Compat.NATIVE
    parameters: PolicyParameters = PolicyParameters()

    @property
    def rank_bytes(self) -> NDArray[np.int64]:
        """i64[R], the bytes a slot needs for the expert of each profile rank."""
        return expert_bytes(self.sizes, self.plan.uniform)

    @property
    def grows_anywhere(self) -> bool:
        """Whether any slot can pay for K/V cells, rather than those just under the loan."""
        return bool(self.parameters.grow_anywhere)

    @property
    def granule_bytes(self) -> int:
        """Unit of memory in which the K/V is mapped."""
        return self.parameters.page_bytes if self.grows_anywhere else self.plan.card.vmm_chunk_bytes

    @property
    def least_chunk_tokens(self) -> int:
        """The smallest chunk that a shrunk cache must have a loan for; where chunks are fixed, the only one."""
        return self.parameters.read_grid[-1] if self.parameters.read_grid else CHUNK_GRID_TOKENS

    @property
    def guest_bytes(self) -> int:
        """Prompt buffers that a lent head makes room for: the own part of the hybrid layout."""
        return self.plan.prompt.own_bytes if self.plan.prompt.layout == "hybrid" else 0

    def spendable_bytes(self, state: MemoryState) -> int:
        """Return the free memory that may be taken for good: what is free when a lent head and its guest need most."""
        if not self.plan.head_aliased:
            return max(0, state.free_bytes)
        guest = self.guest_bytes
        alone = state.free_bytes + (self.plan.head_bytes if state.head_loaded else 0)
        alone += state.own_buffer_bytes if guest else 0
        return max(0, alone - max(self.plan.head_bytes, guest))

    def kv_chunks(self, cells: int) -> int:
        """Return the chunks of all K/V pools with `cells` mapped cells."""
        return self.prices.kv_chunks(cells, self.granule_bytes)

    def read_tokens(self, state: MemoryState, fresh_tokens: int) -> int:
        """Return the tokens that prompt buffers are laid out for: the chunk, or a short read on the 256-token grid.

        want = min(chunk, round_up_256(fresh tokens)) (planning notes 2.7).
        """
        grid = self.parameters.read_grid
        if grid:
            return next((tokens for tokens in grid if tokens >= fresh_tokens), grid[-1])
        rounded = -(-fresh_tokens // CHUNK_GRID_TOKENS) * CHUNK_GRID_TOKENS
        return min(state.chunk_tokens or self.plan.prompt.chunk_tokens, max(CHUNK_GRID_TOKENS, rounded))

    def buffer_bytes(self, tokens: int) -> int:
        """Return the prompt buffers of `tokens` tokens: the plan's own number for its chunk, never more for fewer."""
        prompt = self.plan.prompt
        if tokens >= prompt.chunk_tokens:
            return prompt.buffer_bytes
        return min(prompt.buffer_bytes, self.prices.buffer_bytes(tokens))


class Policy:
    """A policy without moves: every hook leaves the memory as it is. Subclasses override what they need.

    `name` is the cause that moves and messages carry.
    """

    name = "policy"

    def on_start(self, ctx: PolicyContext, state: MemoryState) -> Step:
        """The cache has been filled and the head bound; afterwards the engine is ready."""
        return Step(state)

    def claims_read(self, ctx: PolicyContext, facts: RequestFacts, fresh_tokens: int) -> bool:
        """Whether a read is done through decode windows, so that no policy prepares a prompt path for it."""
        return False

    def on_park(self, ctx: PolicyContext, state: MemoryState, facts: RequestFacts) -> Step:
        """A request switches away from the live session."""
        return Step(state)

    def after_park(self, ctx: PolicyContext, state: MemoryState, facts: RequestFacts) -> Step:
        """The outgoing session has been parked or dropped."""
        return Step(state)

    def before_restore(self, ctx: PolicyContext, state: MemoryState, facts: RequestFacts, tokens: int) -> Step:
        """A parked session of `tokens` tokens is about to be restored."""
        return Step(state)

    def on_restore(self, ctx: PolicyContext, state: MemoryState, facts: RequestFacts) -> Step:
        """The session of the request is restored, if it is parked."""
        return Step(state)

    def on_request(self, ctx: PolicyContext, state: MemoryState, facts: RequestFacts) -> Step:
        """A request starts; its session is live."""
        return Step(state)

    def before_read(self, ctx: PolicyContext, state: MemoryState, facts: RequestFacts, fresh_tokens: int) -> Step:
        """`fresh_tokens` tokens are about to be read in chunks."""
        return Step(state)

    def after_read(self, ctx: PolicyContext, state: MemoryState, facts: RequestFacts) -> Step:
        """Chunks have been read and decode windows follow. Called in the reverse order of `before_read`."""
        return Step(state)

    def before_round(
        self, ctx: PolicyContext, state: MemoryState, position: int, window: int, used: NDArray[np.int32] | None = None
    ) -> Step:
        """A decode window of `window` tokens at `position` follows.

        used: i32[:], ranks of the experts of the previous window, once for each token that used them.
        """
        return Step(state)

    def after_request(self, ctx: PolicyContext, state: MemoryState, facts: RequestFacts, tokens: int) -> Step:
        """The live session now holds `tokens` tokens."""
        return Step(state)

    def on_vram_change(self, ctx: PolicyContext, state: MemoryState, reserve_bytes: int) -> Step:
        """Other programs are to find `reserve_bytes` free."""
        return Step(state)


def refit_chunk(ctx: PolicyContext, state: MemoryState, first: int) -> MemoryState | None:
    """Return the state with the largest chunk of the plan's that slots from `first` on and own buffers can hold.

    Slots paid for K/V or given to the driver shrink the loan; the chunk follows on the 256-token grid. None if not
    even the smallest fits. Plans that lend nothing keep their chunk.
    """
    prompt = ctx.plan.prompt
    if not prompt.lent_slots:
        return state
    room = state.slots.lendable_bytes(first) + ctx.guest_bytes
    tokens = prompt.chunk_tokens
    while tokens > 0 and ctx.buffer_bytes(tokens) > room:
        tokens = -(-tokens // CHUNK_GRID_TOKENS) * CHUNK_GRID_TOKENS - CHUNK_GRID_TOKENS
    if tokens <= 0:
        return None
    return state if tokens == state.chunk_tokens else replace(state, chunk_tokens=tokens)

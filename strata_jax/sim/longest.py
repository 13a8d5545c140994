"""Whether elastic K/V can ever map the cells of a workload's longest request: found before anything runs.

Asks the policies themselves, on the memory of an engine that has just started: what they cannot map then, they cannot
map later, when conversations are parked and heads are back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata_jax.errors import DoesNotFit
from strata_jax.memory.layout import largest_where
from strata_jax.memory.strata.result import StrataPlan
from strata_jax.memory.strata.sizes import PackSizes
from strata_jax.policies.kv_grow import KvGrow, ensure
from strata_jax.policies.policy import Compat, PolicyParameters
from strata_jax.policies.stack import PolicyStack, policy_stack
from strata_jax.policies.state import MemoryState
from strata_jax.sim.decoding import round_mix
from strata_jax.sim.executor import CONTEXT_SLACK
from strata_jax.sim.machine import SimOptions
from strata_jax.sim.requests import SimRequest

STEP_TOKENS = 256  # in which the longest possible request is looked for


@dataclass(frozen=True, slots=True, eq=False)
class LongestRequest:
    """A check of plans against the requests that will come."""

    sizes: PackSizes
    compat: Compat
    parameters: PolicyParameters
    options: SimOptions
    requests: Sequence[SimRequest]

    def missing_bytes(self, plan: StrataPlan) -> int:
        """Return the device memory without which the longest request cannot be served; 0: it can.

        A window that is shorter than the request lacks at least one byte, so that no search for settings names it.
        """
        request = self._longest()
        if request is None:
            return 0
        if request.prompt_tokens + request.output_tokens + CONTEXT_SLACK > plan.request.context_cells:
            return 1
        try:
            stack, state = self._start(plan)
            self._map(stack, state, request)
        except DoesNotFit as error:
            return max(1, error.shortfall_bytes)
        return 0

    def what(self, plan: StrataPlan) -> str:
        """Return, for a message, which request has no room, and the longest that has."""
        request = self._longest()
        if request is None:
            return ""
        total = request.prompt_tokens + request.output_tokens
        text = f"elastic K/V can never map the {total:,} tokens (prompt and output) of {request.name}"
        steps = largest_where(lambda n: self._maps(plan, n * STEP_TOKENS), 1, total // STEP_TOKENS)
        return text if steps is None else f"{text}; it could map those of a prompt of {steps * STEP_TOKENS:,}"

    def _longest(self) -> SimRequest | None:
        return max(self.requests, key=lambda r: (r.prompt_tokens + r.output_tokens, r.prompt_tokens), default=None)

    def _start(self, plan: StrataPlan) -> tuple[PolicyStack, MemoryState]:
        stack = policy_stack(self.sizes, plan, compat=self.compat, parameters=self.parameters)
        if KvGrow.name not in stack.names:
            return stack, stack.initial_state()
        return stack, stack.on_start(stack.initial_state()).state

    def _map(self, stack: PolicyStack, state: MemoryState, request: SimRequest) -> None:
        """Map as `KvGrow` does before a prompt and before the last window. Raises DoesNotFit."""
        if KvGrow.name not in stack.names:
            return
        parameters, prompt = stack.ctx.parameters, request.prompt_tokens
        state = ensure(stack.ctx, state, prompt + parameters.request_margin_cells).state
        if request.output_tokens > 1:
            rows = round_mix(stack.ctx.plan.request, request, self.options).max_rows
            last = prompt + request.output_tokens - 2
            ensure(stack.ctx, state, last + rows + parameters.round_margin_cells)

    def _maps(self, plan: StrataPlan, prompt_tokens: int) -> bool:
        try:
            stack, state = self._start(plan)
            ensure(stack.ctx, state, prompt_tokens + stack.ctx.parameters.request_margin_cells)
        except DoesNotFit:
            return False
        return True

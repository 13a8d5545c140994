"""Short reads: a few fresh tokens go through decode windows and touch no loan and no head (planning notes 5.1)."""

from __future__ import annotations

from strata_jax.policies.policy import Policy, PolicyContext
from strata_jax.policies.state import RequestFacts


class ShortReads(Policy):
    """Claim reads of at most `StrataRequest.short_read_tokens` fresh tokens of text."""

    name = "short_reads"

    def claims_read(self, ctx: PolicyContext, facts: RequestFacts, fresh_tokens: int) -> bool:
        """Whether decode windows read these tokens."""
        return facts.text_only and 0 < fresh_tokens <= ctx.plan.request.short_read_tokens

"""What a run has learned about its experts, as a ranking for the next one (planning notes 4.4, #477). Pure.

With adaptive slots residents come first, since they have won their slots; then the others by heat, which is decayed
use; then by their rank before. Where slots stay as they are, being resident says nothing: then experts come by how
often they were used in the whole run, without decay.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_jax.memory.expert_ranking import ExpertRanking
from strata_jax.memory.plan import MemoryPlan
from strata_jax.policies.state import MemoryState

USAGE_DIGITS = 6


def learned_ranking(plan: MemoryPlan, state: MemoryState, uses: NDArray[np.int64] | None) -> ExpertRanking | None:
    """Return the ranking of the experts of all loaded blocks that a run ends with; None: no use was counted.

    Args:
        state: the memory at the end; its counters say whether slots have adapted.
        uses: i64[L', X], how often each expert was used; None: not counted.
    """
    order, prior = plan.order, plan.request.ranking
    adaptive = state.usage is not None
    slots = "static slots" if plan.request.moving.replacement_decay is None else "slots that rounds refill"
    if state.usage is not None:
        usage, behind = state.usage.astype(np.float64), ~_residents(state)
    elif uses is not None and uses.any():
        usage, behind = uses.reshape(-1)[order.expert].astype(np.float64), np.zeros(uses.size, np.bool_)
    else:
        return None
    ranks = np.lexsort((np.arange(len(usage)), -usage, behind))
    pairs = (divmod(code, order.num_experts) for code in order.expert[ranks].tolist())
    return ExpertRanking(
        num_layers=plan.num_blocks - plan.with_draft,
        num_experts=plan.num_experts,
        with_draft=plan.with_draft,
        pairs=tuple(pairs),
        model=plan.model,
        usage=tuple(round(number, USAGE_DIGITS) for number in usage[ranks].tolist()),
        provenance={
            "learned_with": "adaptive slots, uses decayed" if adaptive else f"{slots}, uses of the whole run",
            "slots": plan.expert_slots,
            "prior_digest": None if prior is None else prior.digest,
        },
    )


def _residents(state: MemoryState) -> NDArray[np.bool_]:
    """Return bool[R]: experts in slots, lent ones too, and those on their way into one."""
    assert state.usage is not None
    resident = np.zeros(len(state.usage), np.bool_)
    resident[state.slots.occupant[state.slots.occupant >= 0]] = True
    resident[[swap.incoming for swap in state.pending]] = True
    return resident

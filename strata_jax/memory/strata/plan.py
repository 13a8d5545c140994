"""The Strata planner: what the original allocates at start, in its order, and what the choosers make of the rest.

Pure and deterministic: no clock, no device. Everything before the expert cache takes what it takes, the cache takes
the rest less what comes after it, prompt buffers borrow from the cache or use what is spare (planning notes 2).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from strata_jax.memory.ledger import Entry, Ledger, Memory, Origin, Owner, Phase
from strata_jax.memory.strata.attempt import Attempt, Decided
from strata_jax.memory.strata.checks import check_request
from strata_jax.memory.strata.request import Card, StrataRequest
from strata_jax.memory.strata.result import StrataPlan
from strata_jax.memory.strata.sizes import PackSizes
from strata_jax.memory.strata.unfit import Shortage, StrataUnfit, explain
from strata_jax.memory.strata.what_fits import enough_bytes


def plan_strata(sizes: PackSizes, card: Card, request: StrataRequest) -> StrataPlan:
    """Plan a model's memory on a card as the original does.

    Raises:
        ConfigError: values out of range or in contradiction; all of them are named.
        DoesNotFit: the settings need more than there is, with what would fit.
    """
    outcome = try_plan_strata(sizes, card, request)
    if isinstance(outcome, StrataUnfit):
        raise outcome.error()
    return outcome


class PlanCheck(Protocol):
    """What else must be true of a plan: it has the memory that requests ask for later."""

    def missing_bytes(self, plan: StrataPlan) -> int: ...

    def what(self, plan: StrataPlan) -> str: ...


def try_plan_strata(
    sizes: PackSizes, card: Card, request: StrataRequest, *, check: PlanCheck | None = None
) -> StrataPlan | StrataUnfit:
    """Plan a model's memory, or say why it does not fit, for sweeps. Raises ConfigError.

    check: a plan in which it finds device memory missing does not fit, nor is it named as one that would.
    """
    found = _decide(sizes, card, request)
    if isinstance(found, Decided):
        plan = found.plan()
        missing = 0 if check is None else check.missing_bytes(plan)
        if check is None or not missing:
            return plan
        shortage = Shortage(
            Memory.DEVICE, card.vram_bytes + missing, card.vram_bytes, check.what(plan), plan.ledger, plan.slots,
            Phase.DECODE,
        )  # fmt: skip
    else:
        shortage = _whole(sizes, card, request, found)

    def read_tokens(other: StrataRequest) -> int:
        decided = _decide(sizes, card, other)
        if not isinstance(decided, Decided) or (check is not None and check.missing_bytes(decided.plan())):
            return 0
        return decided.path.chunk_tokens

    return explain(request, shortage, read_tokens, slot_step=sizes.num_layers)


def growth_refusal(request: StrataRequest) -> str | None:
    """Return why K/V that was asked to grow cannot, as far as the settings tell; None if it can or need not.

    The conditions of planning notes 6.3; slots that pay anywhere (`grow.anywhere`) need neither experts in RAM nor the
    cache for themselves. What is short of them once slots are counted, `plan_strata` finds.
    """
    if not request.grow.enabled:
        return None
    under_loan = not request.grow.anywhere
    reasons = {
        f"kv.resident_cells={request.kv_resident_cells}: the K/V lies in RAM": request.kv_resident_cells > 0,
        "there is no expert profile": not request.profile,
        f"experts without a slot stay in files ({request.tier})": under_loan and request.tier is not request.tier.ARENA,
        "the cache is elastic already (upstream.vram_elastic)": under_loan and request.vram_elastic_mib > 0,
        "the token graph is off, so there is no residency table on the device": not request.token_graph,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _decide(sizes: PackSizes, card: Card, request: StrataRequest) -> Decided | Shortage:
    """Decide; where growth turns out to be impossible, decide again with the whole window mapped at the start."""
    check_request(sizes, card, request)
    refusal = growth_refusal(request)
    grows = request.grow.enabled and refusal is None and request.grow.init_cells < request.context_cells
    found = Attempt(sizes, card, request, grows).decide()
    if grows and isinstance(found, Decided) and found.slots_that_pay <= request.grow.floor_slots:
        refusal = (
            f"{found.slots_that_pay:,} of {found.cache.slots:,} slots can pay for cells and"
            f" kv.grow.floor_slots={request.grow.floor_slots} of them must stay"
        )
        found = Attempt(sizes, card, request, grows=False).decide()
    if isinstance(found, Shortage) or refusal is None:
        return found
    return replace(found, grow_refusal=refusal)


def _whole(sizes: PackSizes, card: Card, request: StrataRequest, found: Shortage) -> Shortage:
    """Return the shortage with all that is missing, rather than only what the first item without room lacks.

    Checked by planning on a card with so much more; its plan is the ledger then. Where that plan takes even more than
    such a card has, and no driver pages it, this is missing too. A plan that only overcommits is whole already.
    """
    if found.overcommits:
        return found
    paged = replace(request, spill=True)

    def with_more(num_bytes: int) -> Decided | Shortage:
        if found.memory is Memory.DEVICE:
            return _decide(sizes, replace(card, vram_bytes=card.vram_bytes + num_bytes), paged)
        available = None if card.ram_available_bytes is None else card.ram_available_bytes + num_bytes
        larger = replace(card, ram_bytes=card.ram_bytes + num_bytes, ram_available_bytes=available)
        return _decide(sizes, larger, paged)

    def is_enough(num_bytes: int) -> bool:
        decided = with_more(num_bytes)
        return isinstance(decided, Decided) or decided.memory is not found.memory

    first = found.short_bytes
    enough = enough_bytes(first, is_enough)
    decided = with_more(enough)
    if isinstance(decided, Shortage):
        return found
    entries = [e for e in decided.plan().ledger.entries if e.memory is found.memory]
    needed = found.budget_bytes + enough
    if found.memory is Memory.DEVICE and not request.spills_on(card):
        needed = max(needed, Ledger(tuple(entries)).peak(found.memory)[1])
    if needed == found.needed_bytes:
        return found
    left = [max(0, needed - Ledger(tuple(entries)).total_bytes(phase)) for phase in Phase]
    rule = "the reserve, and what slots of whole experts leave (2.2)"
    rest = Entry(Owner.RESERVE, "left free", (left[0], left[1], left[2], left[3]), found.memory, Origin.COMPUTED, rule)
    return replace(found, needed_bytes=needed, ledger=Ledger((*entries, rest)))

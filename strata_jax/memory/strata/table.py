"""A Strata plan as a table: rows of owners, columns of phases; plain text for logs and ``plan.txt``."""

from __future__ import annotations

from collections.abc import Sequence

from strata_jax.memory.ledger import Limit, Memory
from strata_jax.memory.strata.ram import available_bytes
from strata_jax.memory.strata.result import StrataPlan
from strata_jax.memory.strata.unfit import StrataUnfit
from strata_jax.memory.table import PlanRow, ledger_rows, rows_text


def strata_plan_table(plan: StrataPlan | StrataUnfit, *, detail: bool = False) -> tuple[PlanRow, ...]:
    """Return one row per owner (per item with `detail`), then the sum and what is left of each memory."""
    return ledger_rows(plan.ledger, _limits(plan), detail=detail)


def strata_plan_text(plan: StrataPlan | StrataUnfit, *, detail: bool = False) -> str:
    """Return the table in MiB as plain text, with warnings and notes, or the message of a plan that does not fit."""
    if isinstance(plan, StrataUnfit):
        notes: tuple[str, ...] = (plan.message(),)
    else:
        notes = (*(f"warning: {text}" for text in plan.warnings), *plan.notes)
    return rows_text(strata_plan_table(plan, detail=detail), notes)


def _limits(plan: StrataPlan | StrataUnfit) -> Sequence[Limit]:
    if isinstance(plan, StrataUnfit):
        s = plan.shortage
        return (Limit(f"{s.memory} memory", (s.memory,), s.budget_bytes),)
    limits = [Limit("device memory", (Memory.DEVICE,), plan.card.vram_bytes)]
    ram = available_bytes(plan.card)
    if ram is not None:
        limits.append(Limit("host memory", (Memory.HOST,), ram))
    return limits

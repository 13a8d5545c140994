"""A plan as a table: rows of owners, columns of phases; plain text for logs and ``plan.txt``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata_jax.memory.ledger import MIB, PHASES, Ledger, Limit, Memory, Origin, Owner, phase_totals
from strata_jax.memory.plan import MemoryPlan
from strata_jax.memory.unfit import Unfit


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One line of the table.

    Attributes:
        name: an owner, with its item in a detailed table, or what is summed.
        phase_bytes: bytes in the order of `PHASES`.
        origin: of the least certain number in it; None for sums.
    """

    name: str
    memory: str
    phase_bytes: tuple[int, ...]
    origin: Origin | None
    rule: str


_CERTAINTY = (Origin.ESTIMATED, Origin.COMPUTED, Origin.DEFAULT, Origin.GIVEN)


def plan_table(plan: MemoryPlan | Unfit, *, detail: bool = False) -> tuple[PlanRow, ...]:
    """Return one row per owner (per item with `detail`), then the sum and what is left of each budget."""
    limits = plan.request.limits() if isinstance(plan, MemoryPlan) else (plan.shortfall.limit,)
    return ledger_rows(plan.ledger, limits, detail=detail)


def ledger_rows(ledger: Ledger, limits: Sequence[Limit], *, detail: bool = False) -> tuple[PlanRow, ...]:
    """Return the rows of a ledger under some limits."""
    rows: list[PlanRow] = []
    for memory in Memory:
        for owner in Owner:
            entries = [e for e in ledger.entries if e.owner is owner and e.memory is memory]
            if detail:
                rows += [PlanRow(f"{owner}: {e.item}", memory, e.phase_bytes, e.origin, e.rule) for e in entries]
            elif entries:
                origin = min((e.origin for e in entries), key=_CERTAINTY.index)
                rules = "; ".join(e.rule for e in entries)
                rows.append(PlanRow(str(owner), memory, phase_totals(entries), origin, rules))
    for limit in limits:
        where = " + ".join(limit.memories)
        totals = phase_totals(ledger.entries, limit.memories)
        rows.append(PlanRow(f"sum, {limit.name}", where, totals, None, f"of {limit.budget_bytes:,} B"))
        rows.append(PlanRow("left", where, tuple(limit.budget_bytes - total for total in totals), None, ""))
    return tuple(rows)


def plan_text(plan: MemoryPlan | Unfit, *, detail: bool = False) -> str:
    """Return the table in MiB as plain text, with the notes of a plan or the message of one that does not fit."""
    notes = plan.notes if isinstance(plan, MemoryPlan) else (plan.message(),)
    return rows_text(plan_table(plan, detail=detail), notes)


def rows_text(rows: Sequence[PlanRow], notes: Sequence[str]) -> str:
    """Return rows in MiB as plain text, and the notes below them."""
    header: tuple[str, ...] = ("owner", "memory", *(f"{phase} MiB" for phase in PHASES), "from")
    lines: list[tuple[str, ...]] = [header]
    for row in rows:
        cells = (f"{num_bytes / MIB:,.2f}" for num_bytes in row.phase_bytes)
        lines.append((row.name, row.memory, *cells, str(row.origin or "")))
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    numeric = range(2, 2 + len(PHASES))
    text = [
        "  ".join(c.rjust(w) if i in numeric else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip()
        for line in lines
    ]
    return "\n".join([*text, *(f"- {note}" for note in notes)]) + "\n"

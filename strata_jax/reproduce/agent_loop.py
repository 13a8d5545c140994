"""The agent loop of a table in two arms: what the source compares band by band."""

from __future__ import annotations

from dataclasses import dataclass

from strata_jax.reproduce.bootstrap import BandedChange
from strata_jax.reproduce.measure import LOOP_RATES, loop_change
from strata_jax.reproduce.outcome import Outcomes
from strata_jax.reproduce.plan_figures import NoFigure
from strata_jax.reproduce.rows import PublishedTable
from strata_jax.reproduce.translate import NotTranslatable, translate

LOOP = "agent_loop"
REPEAT_SIGMA = 0.05  # of decode times, a third of it for prompts: published repeats vary by 3-20 % and 1-5 %


@dataclass(frozen=True, slots=True)
class LoopChanges:
    """Changes of prompt and decode rates that the policies of a row bring; None where a band has too few requests."""

    row_id: str
    prompt: BandedChange | None
    decode: BandedChange | None


def loop_changes(table: PublishedTable, outcomes: Outcomes, samples: int) -> LoopChanges | None:
    """Return the banded changes of the table's published comparison of an agent loop, or None if it has none."""
    for row in table.rows:
        if not any(cell.ci95 for cell in row.cells):
            continue
        try:
            case = translate(row)[0]
        except NotTranslatable:
            continue
        if case.scenario.ask.name == LOOP:
            try:
                changes = {metric: loop_change(metric, case, outcomes, samples) for metric in LOOP_RATES}
            except NoFigure:
                return None
            return LoopChanges(row.id, changes["prefill_tok_s"], changes["decode_tok_s"])
    return None

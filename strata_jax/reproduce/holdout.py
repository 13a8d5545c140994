"""Leave one table out: refit without it, then compare with it. The honest test of the fitted numbers.

Refitted are the profiles' fitted numbers and the expert popularity curve. What a text does to drafts and the sizes of a
quantisation's hot experts stay as they are: the first is stated by the rows or the mean of all, the second is memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strata_jax.reproduce.compare import Compared, Score, reference, scores
from strata_jax.reproduce.outcome import Outcomes
from strata_jax.reproduce.rows import PublishedTable
from strata_jax.reproduce.translate import NotTranslatable, translate
from strata_jax.sim.popularity import PopularityCurve, fit_curve

HIT_RATE = "hit_rate_pct"

CompareTable = Callable[[PublishedTable, Outcomes], list[Compared]]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The cells of a table that its own fit had not seen, and their scores."""

    table: str
    cells: tuple[Compared, ...]

    @property
    def scores(self) -> list[Score]:
        return scores(self.cells)


def leave_out(held: PublishedTable, every: Sequence[PublishedTable], compare: CompareTable) -> HeldOut:
    """Return the comparison of one table under numbers that were fitted to the others of `every`."""
    from strata_jax.sim.fit import fit_all  # it compares rows through this package

    others = [table for table in every if table.name != held.name]
    outcomes = Outcomes(fit_all(without_table=held.name).profiles(), curve=refitted_curve(others))
    return HeldOut(held.name, tuple(compare(held, outcomes)))


def refitted_curve(tables: Sequence[PublishedTable]) -> PopularityCurve:
    """Return the popularity curve fitted on the hit rates of some tables and the slots that their plans have."""
    outcomes = Outcomes()
    points = []
    for row in (row for table in tables for row in table.rows):
        rates = [reference(cell) for cell in row.cells if cell.metric == HIT_RATE]
        if not rates or rates[0] is None:
            continue
        try:
            planned = outcomes.planned(translate(row)[0].scenario)
        except NotTranslatable:
            continue
        if planned.plan is not None:
            points.append((planned.plan.slots / planned.sizes.num_ranks, rates[0] / 100))
    return fit_curve(points)

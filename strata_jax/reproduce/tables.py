"""A whole published table against plans and simulations, cell by cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import median
from typing import Any

import yaml

from strata_jax.errors import StrataError
from strata_jax.memory.strata.ram import headroom
from strata_jax.memory.strata.request import MIB
from strata_jax.reproduce.asks import Focus
from strata_jax.reproduce.basis import Basis
from strata_jax.reproduce.compare import Compared, Origin, Ours, Verdict, judge, reference
from strata_jax.reproduce.measure import measure
from strata_jax.reproduce.outcome import Outcomes
from strata_jax.reproduce.plan_figures import NoFigure
from strata_jax.reproduce.quantities import SPEEDS, Quantity, quantity_of
from strata_jax.reproduce.rows import FOLDER, Cell, PublishedTable, Row
from strata_jax.reproduce.translate import Case, NotTranslatable, Scenario, rule_request, translate

RAM_RULE = {"ram_headroom_mib": MIB, "ram_headroom_gib": 1024 * MIB}  # figures of rows that name no machine
OF_PROMPT_LENGTH = ("prefill_tok_s", "prompt_ms", "prompt_s", "ttft_s", "total_s", "file_blob_reads")
MeasuredRun = tuple[Scenario, Focus, Quantity]
Repeats = Mapping[tuple[Scenario, str], Mapping[str, Any]]


def compare_table(table: PublishedTable, outcomes: Outcomes, basis: Basis | None = None) -> list[Compared]:
    """Return every cell of a table, compared. basis: the cells that numbers were fitted on."""
    cases = {row.id: _cases(row, table.rows) for row in table.rows}
    repeats = _repeats(table.rows, cases)
    fitted = _fitted_runs(table.rows, cases, basis) if basis else frozenset()
    cells = []
    for row in table.rows:
        for cell in row.cells:
            seen = basis is not None and basis.holds(row.id, cell.metric)
            seen = seen or not fitted.isdisjoint(_runs(cases[row.id], cell.metric))
            compared = _compared(row, cell, cases[row.id], outcomes, repeats)
            cells.append(replace(compared, origin=Origin.FITTED if seen else Origin.PREDICTED))
    return cells


def _fitted_runs(
    rows: Sequence[Row], cases: Mapping[str, tuple[Case, ...] | str], basis: Basis
) -> frozenset[MeasuredRun]:
    """Return the runs that numbers were fitted on: a prompt's rate and its time are one measurement, as are repeats."""
    return frozenset(
        run
        for row in rows
        for cell in row.cells
        if basis.holds(row.id, cell.metric)
        for run in _runs(cases[row.id], cell.metric)
    )


def _runs(cases: tuple[Case, ...] | str, metric: str) -> list[MeasuredRun]:
    quantity = quantity_of(metric, bucket=False)
    if isinstance(cases, str) or quantity not in SPEEDS:
        return []
    family = Quantity.DECODE if quantity is Quantity.DECODE else Quantity.PREFILL
    return [(case.scenario, case.focus, family) for case in cases]


@lru_cache(maxsize=1)
def not_compared() -> Mapping[str, tuple[Verdict, str]]:
    """Return the metrics that no plan or simulation can be held to: metric -> (status, why)."""
    raw = yaml.safe_load((FOLDER / "rules" / "not_compared.yaml").read_text(encoding="utf-8"))
    return {metric: (Verdict(status), ", ".join(why)) for metric, (status, *why) in raw.items()}


def _cases(row: Row, rows: Sequence[Row]) -> tuple[Case, ...] | str:
    """Return the runs behind a row, or why there are none."""
    siblings = [other for other in rows if row.case and other.case == row.case and other is not row]
    try:
        return translate(row, siblings)
    except NotTranslatable as problem:
        return str(problem)


def _compared(
    row: Row, cell: Cell, cases: tuple[Case, ...] | str, outcomes: Outcomes,
    repeats: Repeats,
) -> Compared:  # fmt: skip
    base = Compared(
        table=row.source, place=row.table, row_id=row.id, metric=cell.metric, unit=cell.unit, quantity=None,
        theirs=reference(cell), bounds=cell.bounds, ours=(), error=None, verdict=Verdict.NOT_STATED,
    )  # fmt: skip
    if cell.metric in not_compared():
        verdict, why = not_compared()[cell.metric]
        return replace(base, verdict=verdict, reason=why)
    if isinstance(cases, str):
        if cell.metric in RAM_RULE:
            return _judged(base, cell, Quantity.MIB, (Ours(headroom(rule_request(row)) / RAM_RULE[cell.metric]),))
        verdict = Verdict.OTHER_ENGINE if cases.startswith("another engine") else Verdict.NOT_STATED
        return replace(base, verdict=verdict, reason=cases)
    quantity = quantity_of(cell.metric, bucket=any(case.focus.fresh is not None for case in cases))
    if quantity is None:
        return replace(base, verdict=Verdict.NOT_REPRODUCED, reason="no plan or simulation has this figure")
    if cell.metric in OF_PROMPT_LENGTH and not (cases[0].scenario.ask.name and cases[0].focus.stated):
        return replace(base, reason="the length of the prompt is not stated")
    base = replace(
        base, varied=any(case.end for case in cases),
        confounders=tuple(dict.fromkeys(text for case in cases for text in case.confounders)),
    )  # fmt: skip
    if quantity is Quantity.DECODE and len(cases) == 1:
        base = replace(base, **repeats.get((cases[0].scenario, cell.metric), {}))
    return _judged(base, cell, quantity, tuple(_figure(cell.metric, case, outcomes) for case in cases))


def _judged(base: Compared, cell: Cell, quantity: Quantity, ours: tuple[Ours, ...]) -> Compared:
    error, verdict = judge(cell, quantity, ours, theirs=base.theirs, bounds=base.bounds)
    reason = "; ".join(dict.fromkeys(figure.reason for figure in ours if figure.reason))
    return replace(base, quantity=quantity, ours=ours, error=error, verdict=verdict, reason=reason)


def _figure(metric: str, case: Case, outcomes: Outcomes) -> Ours:
    try:
        return Ours(measure(metric, case, outcomes), case.end)
    except (NoFigure, StrataError) as problem:
        return Ours(None, case.end, str(problem))


def _repeats(rows: Sequence[Row], cases: Mapping[str, tuple[Case, ...] | str]) -> Repeats:
    """Return what several rows publish of one run: the median of their decode figures, the range and their number.

    Rows whose scenarios are equal are repeats of one measurement, in the same table.
    """
    values: dict[tuple[Scenario, str], list[float]] = {}
    bounds: dict[tuple[Scenario, str], list[float]] = {}
    for row in rows:
        behind = cases[row.id]
        if isinstance(behind, str) or len(behind) != 1 or behind[0].focus.fresh is not None:
            continue
        for cell in row.cells:
            middle = reference(cell)
            if quantity_of(cell.metric, bucket=False) is Quantity.DECODE and middle is not None:
                key = (behind[0].scenario, cell.metric)
                values.setdefault(key, []).extend(cell.values or [middle])
                bounds.setdefault(key, []).extend(cell.bounds or (middle, middle))
    return {
        key: {"theirs": median(found), "bounds": (min(bounds[key]), max(bounds[key])), "repeats": len(found)}
        for key, found in values.items()
        if len(found) > 1
    }

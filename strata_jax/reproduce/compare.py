"""Published figures beside ours: the error of each cell, whether it passes, and what a table adds up to. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from strata_jax.reproduce.quantities import RULES, SPEEDS, Quantity, Rule
from strata_jax.reproduce.rows import Cell


class Verdict(StrEnum):
    """What became of a published cell."""

    PASS = "pass"
    FAIL = "fail"
    NEEDS_WEIGHTS = "needs weights"
    NOT_REPRODUCED = "not reproduced"
    NOT_STATED = "not stated"  # the source leaves out what a run would need
    INPUT = "input"  # a setting or a size of the workload, put in rather than got out
    OTHER_ENGINE = "other engine"


class Origin(StrEnum):
    """Whether numbers of a profile were fitted on the row."""

    FITTED = "fitted"
    PREDICTED = "predicted"


@dataclass(frozen=True, slots=True)
class Ours:
    """Our figure at one end of what varied; `end` is empty where nothing did. value None: no figure, `reason` why."""

    value: float | None
    end: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Compared:
    """A published cell, our figures, and the judgement.

    Attributes:
        theirs: what errors are against: the figure, the median of published repeats, or the middle of a range.
        bounds: the published range; anything inside it passes.
        error: relative error of our figure, positive when ours is larger; the larger one of two ends.
        repeats: published runs behind `theirs`.
    """

    table: str
    place: str
    row_id: str
    metric: str
    unit: str
    quantity: Quantity | None
    theirs: float | None
    bounds: tuple[float, float] | None
    ours: tuple[Ours, ...]
    error: float | None
    verdict: Verdict
    origin: Origin = Origin.PREDICTED
    reason: str = ""
    repeats: int = 1
    varied: bool = False
    confounders: tuple[str, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether the cell is a comparison at all."""
        return self.verdict in (Verdict.PASS, Verdict.FAIL)


def reference(cell: Cell) -> float | None:
    """Return what a cell's errors are against: its value, the median of its runs, or the middle of its range."""
    if cell.value is not None and not isinstance(cell.value, bool):
        return float(cell.value)
    if cell.values:
        return float(median(cell.values))
    return None if cell.low is None or cell.high is None else (cell.low + cell.high) / 2


def judge(cell: Cell, quantity: Quantity, ours: Sequence[Ours], *, theirs: float | None = None,
          bounds: tuple[float, float] | None = None) -> tuple[float | None, Verdict]:  # fmt: skip
    """Return (error, verdict) of our figures against a cell.

    theirs, bounds: in place of the cell's own, where several rows publish repeats of one run.
    A figure passes inside the published range, within the relative tolerance of its kind, within the kind's slack, or
    within half a unit of the last digit that the source printed. A cell passes when our figures at all its ends do; two
    ends of a varied setting are held against the two ends of a published range.
    """
    target = reference(cell) if theirs is None else theirs
    bounds = cell.bounds if bounds is None else bounds
    values = [figure.value for figure in ours if figure.value is not None]
    if target is None or len(values) < len(ours) or not values:
        return None, Verdict.FAIL
    rule = RULES[quantity]
    varied = any(figure.end for figure in ours)
    if varied and len(values) == 2 and bounds is not None and cell.value is None:  # each end has a published figure
        pairs = list(zip(sorted(values), bounds, strict=True))
    else:
        pairs = [(value, target) for value in values]
    errors = [relative_error(value, want) for value, want in pairs]
    passed = all(_passes(value, want, bounds, rule, half_digit(want, cell.approx)) for value, want in pairs)
    return max(errors, key=abs), Verdict.PASS if passed else Verdict.FAIL


def relative_error(value: float, theirs: float) -> float:
    """Return ours over theirs minus one; against a published 0, 0 for 0 and otherwise one for each unit."""
    return value / theirs - 1.0 if theirs else value


def half_digit(theirs: float, approx: bool) -> float:
    """Return half a unit of the last printed digit, half a unit of the second digit for figures given as `about`."""
    if not theirs:
        return 0.5
    if approx:
        return 0.5 * 10.0 ** (math.floor(math.log10(abs(theirs))) - 1)
    text = repr(float(theirs))
    decimals = 0 if text.endswith(".0") or "e" in text else len(text.partition(".")[2])
    return 0.5 * 10.0**-decimals


def _passes(value: float, want: float, bounds: tuple[float, float] | None, rule: Rule, rounding: float) -> bool:
    if bounds is not None and bounds[0] <= value <= bounds[1]:
        return True
    return abs(value - want) <= max(rule.tolerance * abs(want), rule.slack) + (rounding if rule.tolerance else 0.0)


@dataclass(frozen=True, slots=True)
class Score:
    """What the cells of one kind add up to; errors as fractions, None without cells."""

    quantity: Quantity
    cells: int
    passed: int
    predicted: int
    median: float | None
    p90: float | None

    @property
    def share(self) -> float | None:
        return self.passed / self.cells if self.cells else None

    def shortfalls(self) -> list[str]:
        """Return what the kind as a whole was to reach and did not, in words."""
        rule, missed = RULES[self.quantity], []
        if rule.share is not None and self.share is not None and self.share < rule.share:
            missed.append(f"{self.share:.0%} of cells pass, {rule.share:.0%} wanted")
        for name, limit, value in (("median", rule.median, self.median), ("90th percentile", rule.p90, self.p90)):
            if limit is not None and value is not None and value > limit:
                missed.append(f"{name} {value:.1%} > {limit:.0%}")
        return missed


def scores(cells: Iterable[Compared], *, only_predicted: bool = False) -> list[Score]:
    """Return the score of each kind that has cells, in the order of the kinds."""
    groups: dict[Quantity, list[Compared]] = {}
    for cell in cells:
        if cell.counts and cell.quantity is not None and not (only_predicted and cell.origin is Origin.FITTED):
            groups.setdefault(cell.quantity, []).append(cell)
    return [_score(quantity, groups[quantity]) for quantity in Quantity if quantity in groups]


def _score(quantity: Quantity, cells: Sequence[Compared]) -> Score:
    errors = sorted(abs(cell.error) for cell in cells if cell.error is not None and math.isfinite(cell.error))
    return Score(
        quantity,
        cells=len(cells),
        passed=sum(cell.verdict is Verdict.PASS for cell in cells),
        predicted=sum(cell.origin is Origin.PREDICTED for cell in cells),
        median=percentile(errors, 0.5),
        p90=percentile(errors, 0.9),
    )


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Return the linearly interpolated percentile of ascending values, None without values."""
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def predicted_share(cells: Iterable[Compared]) -> float | None:
    """Return the share of speed rows none of whose figures was fitted on; a row counts once."""
    origin: dict[str, bool] = {}
    for cell in cells:
        if cell.counts and cell.quantity in SPEEDS:
            origin[cell.row_id] = origin.get(cell.row_id, True) and cell.origin is Origin.PREDICTED
    return sum(origin.values()) / len(origin) if origin else None


def ladders(cells: Iterable[Compared]) -> Mapping[tuple[str, str], tuple[int, int]]:
    """Return (ends met, ends) of the prompt chunk for every place of a table in which a setting varied.

    An end is one value of the setting; a row of the same place in which nothing varied is one end.
    """
    groups: dict[tuple[str, str], list[Compared]] = {}
    for cell in cells:
        if cell.quantity is Quantity.CHUNK and cell.counts:
            groups.setdefault((cell.table, cell.place), []).append(cell)
    return {
        key: (
            sum(figure.value == cell.theirs for cell in group for figure in cell.ours),
            sum(len(cell.ours) for cell in group),
        )
        for key, group in groups.items()
        if any(cell.varied for cell in group)
    }

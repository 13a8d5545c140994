"""Fit the numbers of hardware profiles to published rows: deterministic least squares over the path that reproduces.

`data/profiles/fit_rows.yaml` says which numbers are fitted on which rows. A row counts through the same translation,
plan, simulation and measure as in the comparison, so a number cannot fit one thing and predict another. Numbers are
per card or common to all cards; nothing is keyed by a row. No JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.optimize import least_squares

from strata_jax.errors import FormatError
from strata_jax.reproduce.compare import reference
from strata_jax.reproduce.measure import measure
from strata_jax.reproduce.outcome import Outcomes
from strata_jax.reproduce.rows import Row, load_tables
from strata_jax.reproduce.translate import Case, translate
from strata_jax.sim.profile import FOLDER, Profile, load_profile, profile_for_gpu, profile_names
from strata_jax.sim.profile_file import UNITS, Number

WITHIN = 2.0  # expected distance from the start, as a share, of numbers that do not say: hardly any pull
STEP = 1e-3  # of a finite difference, in logarithms
MAX_ROUNDS = 30


@dataclass(frozen=True, slots=True)
class Bounded:
    """How one number is searched: bounds and start, all above 0, and how far from the start it is expected, a share."""

    low: float
    high: float
    start: float
    within: float = WITHIN


@dataclass(frozen=True, slots=True)
class FitGroup:
    """Numbers that are fitted together on the same rows.

    Attributes:
        spread: relative error at which a row starts to count less than in proportion.
    """

    name: str
    metrics: tuple[str, ...]
    spread: float
    common: Mapping[str, Bounded]
    card: Mapping[str, Bounded]
    rows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """One published figure that is fitted on. card: profile of its machine."""

    row: str
    card: str
    metric: str
    cases: tuple[Case, ...]
    value: float


@dataclass(frozen=True, slots=True)
class Fit:
    """What a fit came to.

    Attributes:
        common, cards: fitted numbers, of all cards and by profile name. errors: relative error by (row, metric).
        cards without rows keep the median of the fitted ones as a default.
    """

    common: Mapping[str, Number]
    cards: Mapping[str, Mapping[str, Number]]
    errors: Mapping[tuple[str, str], float]

    def profile(self, name: str) -> Profile:
        """Return a profile with the fitted numbers in place."""
        profile = load_profile(name)
        own = self.cards.get(profile.fit_name, {})
        return profile.with_numbers({**self.common, **own}, calibrated=bool(own))

    def profiles(self) -> Callable[[str], Profile | None]:
        """Return the look-up that the comparison uses: the profile of a GPU by the name of a source."""

        def find(gpu: str) -> Profile | None:
            found = profile_for_gpu(gpu)
            return None if found is None else self.profile(found.name)

        return find


@lru_cache(maxsize=1)
def fit_groups() -> tuple[FitGroup, ...]:
    """Return the groups of fit_rows.yaml. Raises FormatError for an unknown number or bounds in disorder."""
    raw = yaml.safe_load((FOLDER / "fit_rows.yaml").read_text(encoding="utf-8"))
    groups = []
    for name, entry in raw["groups"].items():
        numbers = [{key: _bounded(key, item) for key, item in entry[part].items()} for part in ("common", "card")]
        groups.append(
            FitGroup(
                name, tuple(entry["metrics"]), float(entry["spread"]), numbers[0], numbers[1], tuple(entry["rows"])
            )
        )
    return tuple(groups)


def fitted_rows() -> frozenset[str]:
    """Return the ids of all rows that a number of some profile was fitted on; every other row is a prediction."""
    return frozenset(
        row for name in profile_names() for number in load_profile(name).numbers.values() for row in number.rows
    )


def fit_all(without_table: str = "") -> Fit:
    """Fit every group, one after the other; `without_table` leaves the rows of one published source out.

    Raises FormatError if a row of fit_rows.yaml does not exist or has none of the group's metrics.
    """
    fit = Fit(_starts(), {}, {})
    for group in fit_groups():
        fit = fit_group(group, targets_of(group, without_table), fit)
    return fit


def targets_of(group: FitGroup, without_table: str = "") -> tuple[Target, ...]:
    """Return the published figures that a group is fitted on."""
    rows: dict[str, tuple[str, Row, list[Row]]] = {}
    for table in load_tables():
        for row in table.rows:
            same_case = [each for each in table.rows if row.case and each.case == row.case and each is not row]
            rows[row.id] = (table.name, row, same_case)
    targets = []
    for row_id in group.rows:
        if row_id not in rows:
            raise FormatError(f"fit_rows.yaml: there is no published row {row_id!r}")
        table_name, row, siblings = rows[row_id]
        cells = [cell for cell in row.cells if cell.metric in group.metrics]
        if not cells:
            raise FormatError(f"fit_rows.yaml: row {row_id} has none of {', '.join(group.metrics)}")
        if table_name == without_table:
            continue
        cases = translate(row, siblings)
        card = profile_for_gpu(cases[0].scenario.machine.gpu)
        assert card is not None
        for cell in cells:
            value = reference(cell)
            assert value is not None
            targets.append(Target(row_id, card.fit_name, cell.metric, cases, value))
    return tuple(targets)


def fit_group(group: FitGroup, targets: Sequence[Target], base: Fit) -> Fit:
    """Fit one group on top of an earlier fit, by least squares of log(ours / theirs) with bounds and a soft loss."""
    cards = sorted({target.card for target in targets})
    keys = [("", name) for name in group.common] + [(card, name) for card in cards for name in group.card]
    spans = [group.common[name] if not card else group.card[name] for card, name in keys]
    problem = _Problem(group, targets, base, keys, spans)
    start = np.log([span.start for span in spans])
    found = least_squares(
        problem.residuals,
        start,
        jac=problem.jacobian,
        bounds=([np.log(span.low) for span in spans], [np.log(span.high) for span in spans]),
        loss="soft_l1",
        f_scale=1.0,
        max_nfev=MAX_ROUNDS,
    )
    values = dict(zip(keys, np.exp(found.x).tolist(), strict=True))
    errors = {
        (target.row, target.metric): float(np.expm1(error * group.spread))
        for target, error in zip(targets, problem.errors(found.x), strict=True)
    }
    return _with_numbers(base, group, cards, values, errors)


class _Problem:
    """Residuals of a group and their derivatives; a card's own numbers only move its own rows."""

    def __init__(
        self,
        group: FitGroup,
        targets: Sequence[Target],
        base: Fit,
        keys: Sequence[tuple[str, str]],
        spans: Sequence[Bounded],
    ) -> None:
        self.group, self.targets, self.base, self.keys = group, targets, base, keys
        self.starts = np.log([span.start for span in spans])
        self.pulls = 1 / np.log1p([span.within for span in spans])
        self.plans = Outcomes()
        for target in targets:
            for case in target.cases:
                self.plans.planned(case.scenario)

    def errors(self, x: NDArray[np.float64], card: str = "") -> NDArray[np.float64]:
        """Return log(ours / theirs) over the spread; `card`: 0 for the rows of all other cards."""
        values = dict(zip(self.keys, np.exp(x).tolist(), strict=True))

        def find(gpu: str) -> Profile | None:
            found = profile_for_gpu(gpu)
            if found is None:
                return None
            own = {name: value for (of, name), value in values.items() if of in ("", found.fit_name)}
            return self.base.profile(found.name).with_values("search", "fitted", **own)

        outcomes = self.plans.with_profiles(find)
        result = np.zeros(len(self.targets))
        for place, target in enumerate(self.targets):
            if not card or target.card == card:
                ours = [measure(target.metric, case, outcomes) for case in target.cases]
                result[place] = float(np.mean(np.log(ours))) - np.log(target.value)
        return result / self.group.spread

    def residuals(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the errors of all rows, then the distance of every number from its start in what is expected."""
        return np.concatenate([self.errors(x), (x - self.starts) * self.pulls])

    def jacobian(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the derivatives by forward differences."""
        at = self.errors(x)
        rows = len(self.targets)
        result = np.zeros((rows + len(x), len(x)))
        for column, (card, _) in enumerate(self.keys):
            moved = x.copy()
            moved[column] += STEP
            mine = np.array([not card or target.card == card for target in self.targets])
            result[:rows][mine, column] = (self.errors(moved, card)[mine] - at[mine]) / STEP
            result[rows + column, column] = self.pulls[column]
        return result


def _with_numbers(
    base: Fit,
    group: FitGroup,
    cards: Sequence[str],
    values: Mapping[tuple[str, str], float],
    errors: Mapping[tuple[str, str], float],
) -> Fit:
    """Return the fit with a group's numbers: what was found, and medians as defaults of cards without rows."""
    rows = tuple(dict.fromkeys(row for row, _ in errors))
    card_of_row = {target.row: target.card for target in targets_of(group)}
    source = f"least squares, group {group.name} of fit_rows.yaml"

    def number(name: str, value: float, own: Collection[str]) -> Number:
        seen = [abs(error) for (row, _), error in errors.items() if row in own]
        return Number(value, UNITS[name], "fitted", source, tuple(own), 100 * median(seen))

    common = {name: number(name, values["", name], rows) for name in group.common}
    for name in group.card:
        middle = median(values[card, name] for card in cards)
        common[name] = Number(middle, UNITS[name], "default", f"median of {len(cards)} fitted cards")
    fitted = dict(base.cards)
    for card in cards:
        own = tuple(row for row in rows if card_of_row[row] == card)
        found = {name: number(name, values[card, name], own) for name in group.card}
        fitted[card] = {**fitted.get(card, {}), **found}
    return Fit({**base.common, **common}, fitted, {**base.errors, **errors})


def _starts() -> dict[str, Number]:
    """Return every fitted number at its start, so that a fit does not depend on what the files hold at present."""
    spans = {name: span for group in fit_groups() for name, span in {**group.common, **group.card}.items()}
    return {name: Number(span.start, UNITS[name], "default", "start of the fit") for name, span in spans.items()}


def _bounded(name: str, entry: Mapping[str, Any]) -> Bounded:
    low, high, start = (float(value) for value in (*entry["bounds"], entry["start"]))
    within = float(entry.get("within", WITHIN))
    if name not in UNITS or not 0 < low <= start <= high or within <= 0:
        raise FormatError(f"fit_rows.yaml: {name} needs a known name, 0 < low <= start <= high and within above 0")
    return Bounded(low, high, start, within)

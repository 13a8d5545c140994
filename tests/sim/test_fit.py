"""The fit: which rows it uses, that it finds numbers that made the rows, that files hold what it gives."""

from __future__ import annotations

from collections import Counter
from statistics import median

import pytest

from strata_jax.reproduce.measure import measure
from strata_jax.reproduce.outcome import Outcomes
from strata_jax.reproduce.rows import load_tables
from strata_jax.reproduce.translate import NotTranslatable, translate
from strata_jax.sim import fit as fitting
from strata_jax.sim.fit import Bounded, Fit, FitGroup, Target, fit_group, fit_groups, fitted_rows, targets_of
from strata_jax.sim.fit_memory import fit_memory
from strata_jax.sim.profile import common_numbers, load_profile, profile_for_gpu

SPEEDS = (
    "prefill_tok_s",
    "decode_tok_s",
    "round_ms",
    "prompt_s",
    "prompt_ms",
    "prefill_change_pct",
    "decode_change_pct",
)


def test_at_least_half_of_the_speed_rows_of_every_table_are_predictions() -> None:
    fitted = fitted_rows()
    for table in load_tables():
        speeds: Counter[tuple[str, bool]] = Counter()
        for row in table.rows:
            if not any(cell.metric in SPEEDS for cell in row.cells):
                continue
            try:
                translate(row)
            except NotTranslatable:
                continue
            speeds["all", row.id in fitted] += 1
            speeds[row.table, row.id in fitted] += 1
        for part in {part for part, _ in speeds}:
            assert speeds[part, True] <= speeds[part, False], f"{table.name}: {part}: {speeds}"


def test_every_fitted_row_exists_and_counts() -> None:
    for group in fit_groups():
        targets = targets_of(group)
        assert {target.row for target in targets} == set(group.rows)
        assert len(group.rows) == len(set(group.rows))
        assert len(targets) > len(group.common) + len(group.card)


def test_a_table_can_be_left_out() -> None:
    group = fit_groups()[0]
    left = targets_of(group, "rtx3070ti_8gb")
    assert not any(target.row.startswith("h3070ti") for target in left)
    assert {target.row for target in left} < {target.row for target in targets_of(group)}


def made_up(name: str) -> tuple[FitGroup, tuple[Target, ...], dict[str, float]]:
    """Rows of one card whose values come from known numbers."""
    truth = {"copy_share": 0.7, "prompt_share": 0.04}
    rows = (
        "h3070ti-b1-a-16384.speed",
        "h3070ti-b3-c-4096.speed",
        "h3070ti-b4-d-16384.speed",
        "h3070ti-b2-b-4096.speed",
    )
    spans = {"copy_share": Bounded(0.3, 1.2, 0.95), "prompt_share": Bounded(0.01, 0.2, 0.08)}
    group = FitGroup(name, ("prefill_tok_s",), 0.05, {}, spans, rows)
    outcomes = Outcomes(lambda gpu: load_profile("rtx3070ti").with_values(**truth))
    return (
        group,
        tuple(
            Target(t.row, t.card, t.metric, t.cases, measure(t.metric, t.cases[0], outcomes)) for t in targets_of(group)
        ),
        truth,
    )


def test_numbers_that_made_the_rows_are_found() -> None:
    group, targets, truth = made_up("prefill")
    base = Fit(dict(common_numbers()), {"rtx3070ti": {}}, {})
    found = fit_group(group, targets, base)
    for name, value in truth.items():
        number = found.cards["rtx3070ti"][name]
        assert number.value == pytest.approx(value, rel=0.02)
        assert number.mark == "fitted"
        assert set(number.rows) == set(group.rows)
    assert max(abs(error) for error in found.errors.values()) < 0.005
    again = fit_group(group, targets, base)
    assert again.cards == found.cards  # to the last bit


def test_cards_without_rows_get_the_middle_of_the_others() -> None:
    group, targets, _ = made_up("prefill")
    found = fit_group(group, targets, Fit(dict(common_numbers()), {}, {}))
    assert not found.profile("rtx3090").calibrated
    assert found.profile("rtx3070ti").calibrated
    assert found.profile("rtx3090")["copy_share"] == found.cards["rtx3070ti"]["copy_share"].value
    assert found.profile("rtx3090").numbers["copy_share"].mark == "default"
    by_gpu = found.profiles()
    assert by_gpu("RTX 9999") is None


def test_what_the_files_say_about_their_fit_is_true() -> None:
    """The stated errors of common numbers are those of the files themselves."""
    outcomes = Outcomes(profile_for_gpu)
    for group in fit_groups():
        errors = []
        for target in targets_of(group):
            ours = [measure(target.metric, case, outcomes) for case in target.cases]
            errors.append(abs(median(ours) / target.value - 1))
        stated = common_numbers()[next(iter(group.common))].error_pct
        assert stated is not None
        assert 100 * median(errors) == pytest.approx(stated, abs=0.5)
        assert 100 * median(errors) < (3 if group.name == "prefill" else 6)


def test_memory_numbers_make_the_published_plans() -> None:
    for card, numbers in fit_memory().items():
        for name, number in numbers.items():
            assert load_profile(card)[name] == pytest.approx(number.value, abs=1.01), (card, name)


def test_unknown_rows_and_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    group = fit_groups()[0]
    wrong = FitGroup(group.name, group.metrics, group.spread, {}, {}, ("no-such-row",))
    with pytest.raises(fitting.FormatError, match="no-such-row"):
        targets_of(wrong)
    odd = FitGroup(group.name, group.metrics, group.spread, {}, {}, ("h3090-iq3s.hits",))
    with pytest.raises(fitting.FormatError, match="has none of"):
        targets_of(odd)

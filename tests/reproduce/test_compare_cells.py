"""Errors, tolerances, ends of ranges, repeats, and what cells add up to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_jax.reproduce.compare import (
    Compared,
    Origin,
    Ours,
    Verdict,
    half_digit,
    judge,
    ladders,
    percentile,
    predicted_share,
    reference,
    scores,
)
from strata_jax.reproduce.quantities import RULES, Quantity, quantity_of
from strata_jax.reproduce.rows import Cell

PREFILL = Quantity.PREFILL


def speed(value: float | None = 100.0, **fields: object) -> Cell:
    return Cell("prefill_tok_s", "tok/s", value, **fields)  # type: ignore[arg-type]


def test_errors_are_against_the_value_the_median_of_runs_or_the_middle() -> None:
    assert reference(speed(100.0, low=90.0, high=130.0)) == 100.0
    assert reference(speed(None, values=(95.7, 94.2, 128.2))) == 95.7
    assert reference(speed(None, low=90.0, high=110.0)) == 100.0
    assert reference(Cell("answers_ok", "bool", True)) is None


@pytest.mark.parametrize(("value", "verdict"), [(112.4, Verdict.PASS), (112.6, Verdict.FAIL), (87.6, Verdict.PASS)])
def test_a_cell_passes_within_the_tolerance_of_its_kind(value: float, verdict: Verdict) -> None:
    error, found = judge(speed(), PREFILL, [Ours(value)])
    assert found is verdict
    assert error == pytest.approx(value / 100 - 1)


def test_inside_the_published_range_passes_however_far_from_the_median() -> None:
    cell = Cell("decode_tok_s", "tok/s", 100.0, 70.0, 140.0)
    assert judge(cell, Quantity.DECODE, [Ours(139.0)])[1] is Verdict.PASS
    assert judge(cell, Quantity.DECODE, [Ours(141.0)])[1] is Verdict.FAIL


def test_a_chunk_is_exact_at_both_ends() -> None:
    cell = Cell("prompt_chunk_tokens", "tokens", 512.0)
    assert judge(cell, Quantity.CHUNK, [Ours(512, "a"), Ours(512, "b")])[1] is Verdict.PASS
    assert judge(cell, Quantity.CHUNK, [Ours(512, "a"), Ours(256, "b")])[1] is Verdict.FAIL
    assert judge(cell, Quantity.CHUNK, [Ours(512.4)])[1] is Verdict.FAIL


def test_two_ends_of_a_setting_are_held_against_two_ends_of_a_range() -> None:
    cell = Cell("vram_free_after_start_mib", "MiB", None, 383.0, 683.0)
    error, verdict = judge(cell, Quantity.FREE, [Ours(690.0, "high"), Ours(380.0, "low")])
    assert verdict is Verdict.PASS
    assert error == pytest.approx(690 / 683 - 1)
    assert judge(cell, Quantity.FREE, [Ours(383.0, "low"), Ours(383.0, "high")])[1] is Verdict.PASS  # inside the range
    assert judge(cell, Quantity.FREE, [Ours(300.0, "low"), Ours(683.0, "high")])[1] is Verdict.FAIL


def test_without_a_figure_a_cell_fails() -> None:
    assert judge(speed(), PREFILL, [Ours(None, reason="does not fit")]) == (None, Verdict.FAIL)
    assert judge(speed(), PREFILL, [Ours(100.0, "a"), Ours(None, "b")]) == (None, Verdict.FAIL)


@pytest.mark.parametrize(("theirs", "half"), [(1.41, 0.005), (508.0, 0.5), (0.9, 0.05), (0.0, 0.5)])
def test_printed_digits_leave_half_a_unit(theirs: float, half: float) -> None:
    assert half_digit(theirs, approx=False) == pytest.approx(half)


def test_rounded_figures_leave_half_a_unit_of_their_second_digit() -> None:
    assert half_digit(7060.0, approx=True) == pytest.approx(50.0)


def test_production_buckets_have_a_tolerance_of_their_own() -> None:
    assert quantity_of("prompt_ms", bucket=True) is Quantity.BUCKET_TIME
    assert quantity_of("prompt_ms", bucket=False) is Quantity.PROMPT_TIME
    assert RULES[Quantity.BUCKET_TIME].tolerance == 0.25
    assert quantity_of("load_s", bucket=False) is None


def cell_of(error: float, verdict: Verdict = Verdict.PASS, **fields: object) -> Compared:
    base = Compared("t", "p", "row", "prefill_tok_s", "tok/s", PREFILL, 100.0, None, (Ours(1.0),), error, verdict)
    return replace(base, **fields)  # type: ignore[arg-type]


def test_scores_take_absolute_errors_and_leave_other_statuses_out() -> None:
    cells = [cell_of(-0.02), cell_of(0.04), cell_of(0.30, Verdict.FAIL), cell_of(9.0, Verdict.NEEDS_WEIGHTS)]
    (score,) = scores(cells)
    assert (score.cells, score.passed) == (3, 2)
    assert score.median == pytest.approx(0.04)
    assert score.p90 == pytest.approx(0.04 + 0.8 * 0.26)
    assert score.shortfalls() == ["90th percentile 24.8% > 12%"]


def test_scores_of_predictions_only() -> None:
    cells = [cell_of(0.0, origin=Origin.FITTED), cell_of(0.5, Verdict.FAIL)]
    (score,) = scores(cells, only_predicted=True)
    assert score.cells == 1
    assert score.median == 0.5


def test_a_row_counts_once_towards_the_share_of_predictions() -> None:
    cells = [cell_of(0.0, row_id="a", origin=Origin.FITTED), cell_of(0.0, row_id="b"), cell_of(0.1, row_id="b")]
    assert predicted_share(cells) == 0.5
    assert predicted_share([cell_of(0.0, quantity=Quantity.SLOTS)]) is None


def test_a_row_with_one_fitted_cell_is_no_prediction() -> None:
    cells = [cell_of(0.0, row_id="a", origin=Origin.FITTED), cell_of(0.0, row_id="a")]
    assert predicted_share(cells) == 0.0


def test_ladders_count_ends() -> None:
    chunk = {"metric": "prompt_chunk_tokens", "quantity": Quantity.CHUNK, "theirs": 512.0}
    both = cell_of(0.0, varied=True, ours=(Ours(512.0, "a"), Ours(256.0, "b")), **chunk)
    single = cell_of(0.0, ours=(Ours(512.0),), **chunk)
    elsewhere = cell_of(0.0, place="q", ours=(Ours(512.0),), **chunk)
    assert ladders([both, single, elsewhere]) == {("t", "p"): (2, 3)}


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_percentiles_lie_within_the_values(values: list[float], share: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, share)
    assert found is not None
    assert ordered[0] <= found <= ordered[-1]

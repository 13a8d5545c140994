"""Published tables through planner and simulator: what must come out, and what a run leaves behind."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines import reproduce
from strata_jax.config.schema import RunConfig
from strata_jax.errors import ConfigError
from strata_jax.memory.strata.plan import try_plan_strata
from strata_jax.memory.strata.unfit import StrataUnfit
from strata_jax.report.record import RunRecord
from strata_jax.reproduce.agent_loop import loop_changes
from strata_jax.reproduce.basis import Basis, fitted_basis
from strata_jax.reproduce.compare import Compared, Origin, Verdict, ladders, predicted_share, scores
from strata_jax.reproduce.holdout import refitted_curve
from strata_jax.reproduce.outcome import Outcomes
from strata_jax.reproduce.pictures import draw
from strata_jax.reproduce.quantities import Quantity
from strata_jax.reproduce.report import closing_lines, csv_text, remarks
from strata_jax.reproduce.rows import TABLES, load_tables
from strata_jax.reproduce.tables import compare_table, not_compared
from strata_jax.reproduce.translate import translate


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return Outcomes()


@pytest.fixture(scope="module")
def cells(outcomes: Outcomes) -> dict[str, list[Compared]]:
    basis = fitted_basis()
    return {table.name: compare_table(table, outcomes, basis) for table in load_tables()}


@pytest.fixture(scope="module")
def every(cells: dict[str, list[Compared]]) -> list[Compared]:
    return [cell for found in cells.values() for cell in found]


def find(every: list[Compared], row_id: str, metric: str) -> Compared:
    return next(cell for cell in every if (cell.row_id, cell.metric) == (row_id, metric))


def test_every_published_cell_has_one_verdict(every: list[Compared]) -> None:
    assert len(every) == 805
    silent = [cell for cell in every if not cell.counts and not cell.reason]
    assert silent == []


@pytest.mark.parametrize("quantity", [Quantity.CHUNK, Quantity.SLOTS])
def test_plans_reach_their_share(every: list[Compared], quantity: Quantity) -> None:
    score = next(score for score in scores(every) if score.quantity is quantity)
    assert score.shortfalls() == []


@pytest.mark.parametrize("quantity", [Quantity.PREFILL, Quantity.DECODE])
def test_speeds_reach_their_errors(every: list[Compared], quantity: Quantity) -> None:
    score = next(score for score in scores(every) if score.quantity is quantity)
    assert score.shortfalls() == []


def test_the_readme_shows_the_errors_of_this_version(every: list[Compared]) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    shown = 0
    for score in scores(every):
        lines = [line for line in readme.splitlines() if line.startswith(f"| {score.quantity} |")]
        if not lines:
            continue
        cells, passed, median, p90, predicted = (part.strip(" %") for part in lines[0].split("|")[2:-1])
        assert (int(cells), int(passed), int(predicted)) == (score.cells, score.passed, score.predicted), score
        assert (float(median), float(p90)) == pytest.approx((100 * score.median, 100 * score.p90), abs=0.06), score
        shown += 1
    assert shown >= 8


def test_the_production_buckets_come_out_under_one_size_law(every: list[Compared]) -> None:
    found = [cell for cell in every if cell.quantity is Quantity.BUCKET_TIME]
    assert len(found) == 8
    assert all(cell.verdict is Verdict.PASS for cell in found)


def test_the_ladder_of_the_small_card(every: list[Compared]) -> None:
    ((met, ends),) = ladders(every).values()
    assert ends == 15
    assert met >= 13


@pytest.mark.parametrize("table", TABLES)
def test_at_least_half_of_the_speed_rows_are_predictions(cells: dict[str, list[Compared]], table: str) -> None:
    share = predicted_share(cells[table])
    assert share is not None
    assert share >= 0.5


def test_memory_moves_as_published(every: list[Compared]) -> None:
    events = [cell for cell in every if cell.metric in ("kv_mapped_cells", "given_slots", "returned_slots")]
    assert len(events) >= 18
    assert all(cell.verdict is Verdict.PASS for cell in events), [c.row_id for c in events if c.verdict is Verdict.FAIL]


def test_what_needs_weights_is_not_compared(every: list[Compared]) -> None:
    assert find(every, "grow-t-diverge", "first_different_index").verdict is Verdict.NEEDS_WEIGHTS
    assert find(every, "own-ab-answers", "answers_ok").verdict is Verdict.NEEDS_WEIGHTS
    plateau = find(every, "alias-prod-default.plateaus", "decode_slow_plateau_tok_s")
    assert plateau.verdict is Verdict.NOT_REPRODUCED
    assert "does not know why" in plateau.reason


def test_repeats_of_one_run_are_judged_by_their_median(every: list[Compared]) -> None:
    cell = find(every, "own-auto-official.decode-rev", "decode_tok_s")
    assert cell.repeats == 4
    assert cell.theirs == pytest.approx((95.7 + 121.2) / 2)
    assert cell.bounds == (94.2, 128.2)


def test_a_plan_of_a_refused_cache_says_what_was_missing(every: list[Compared]) -> None:
    assert find(every, "hepyc-fail-3600", "needed_gib").verdict is Verdict.PASS
    assert find(every, "hepyc-fail-2400", "lent_slots").verdict is Verdict.PASS


def test_a_published_run_that_failed_for_memory_is_refused_by_our_planner(outcomes: Outcomes) -> None:
    """hepyc-fail-2400: the original starts, and its first request finds the card over-committed (Linux)."""
    table = next(table for table in load_tables() if table.name == "rtx5060ti_epyc")
    row = next(row for row in table.rows if row.id == "hepyc-fail-2400")
    outcome = outcomes.planned(translate(row)[0].scenario)
    made = outcome.plan
    assert made is not None
    found = try_plan_strata(outcome.sizes, made.card, replace(made.request, spill=None))
    assert isinstance(found, StrataUnfit)
    assert found.shortage.overcommits
    assert found.shortfall_bytes == made.peak_overcommit_bytes
    assert "cache.slots=2400" in found.given
    assert found.largest_slots is not None


def test_equal_scenarios_are_simulated_once(outcomes: Outcomes, cells: dict[str, list[Compared]]) -> None:
    assert len(outcomes._runs) < 200 < sum(cell.counts for found in cells.values() for cell in found)


def test_a_fitted_rate_makes_the_time_of_the_same_prompt_fitted_too(cells: dict[str, list[Compared]]) -> None:
    table = next(table for table in load_tables() if table.name == "rtx3070ti_8gb")
    basis = Basis({"a number": ("h3070ti-b1-a-4096.speed:prefill_tok_s",)})
    origin = {(c.row_id, c.metric): c.origin for c in compare_table(table, Outcomes(), basis)}
    assert origin["h3070ti-b1-a-4096.speed", "prefill_tok_s"] is Origin.FITTED
    assert origin["h3070ti-b1-a-4096.time", "ttft_s"] is Origin.FITTED
    assert origin["h3070ti-b1-a-4096.speed", "decode_tok_s"] is Origin.PREDICTED
    assert origin["h3070ti-b1-a-16384.speed", "prefill_tok_s"] is Origin.PREDICTED


def test_the_basis_only_names_cells_that_exist() -> None:
    rows = {row.id: {cell.metric for cell in row.cells} for table in load_tables() for row in table.rows}
    basis = fitted_basis()
    for name, patterns in basis.patterns.items():
        matched = any(basis.holds(row, metric) for row, metrics in rows.items() for metric in metrics)
        assert matched, (name, patterns)


def test_metrics_that_are_not_compared_exist() -> None:
    published = {cell.metric for table in load_tables() for row in table.rows for cell in row.cells}
    assert set(not_compared()) <= published


def test_the_agent_loop_changes_within_bands(outcomes: Outcomes) -> None:
    table = next(table for table in load_tables() if table.name == "prefill_head_alias")
    found = loop_changes(table, outcomes, 200)
    assert found is not None
    assert found.prompt is not None
    assert found.prompt.low <= found.prompt.change <= found.prompt.high
    assert found.prompt.change > 0.8  # the prompt more than doubles with the published build, 1.25
    assert len(found.prompt.bands) >= 5
    assert loop_changes(load_tables(["rtx3090_128gb"])[0], outcomes, 200) is None


def test_the_popularity_curve_is_refitted_without_a_table() -> None:
    tables = load_tables()
    whole = refitted_curve(tables)
    less = refitted_curve([table for table in tables if table.name != "rtx3090_128gb"])
    assert whole.hit_rate(0.1) != less.hit_rate(0.1)
    assert abs(whole.hit_rate(0.1) - less.hit_rate(0.1)) < 0.1


def test_pictures_are_the_same_for_the_same_figures(tmp_path: Path, cells: dict[str, list[Compared]]) -> None:
    assert draw("a table", cells["kv_grow"], tmp_path / "one.svg")
    assert draw("a table", cells["kv_grow"], tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    nothing = [replace(cell, verdict=Verdict.NEEDS_WEIGHTS) for cell in cells["kv_grow"]]
    assert not draw("a table", nothing, tmp_path / "none.svg")


def test_texts_say_what_was_fitted_and_what_counts_nowhere(every: list[Compared]) -> None:
    text = "\n".join(closing_lines(every, fitted_basis()))
    assert "`needs weights` and count nowhere" in text
    assert "of 805 cells were fitted on" in text
    assert any("1,500 MiB as in the later checks" in note for note in remarks(every))
    lines = list(csv.DictReader(csv_text(every).splitlines()))
    assert len(lines) == 805
    assert {line["verdict"] for line in lines} == {str(verdict) for verdict in Verdict}


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    config = RunConfig()
    config.reproduce.tables, config.reproduce.cases = ["prefill_head_alias"], ["alias-plan-default"]
    config.reproduce.bootstrap_samples = 0
    with RunRecord.open(tmp_path / "run", {}) as record:
        record.update(**reproduce.run(config, record))
    return tmp_path / "run"


def test_a_run_leaves_tables_and_a_picture(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared = json.loads((finished / "comparison.json").read_text(encoding="utf-8"))
    assert {cell["metric"] for cell in compared["cells"]} == {"expert_cache_slots", "lent_slots", "prompt_chunk_tokens"}
    assert "| alias-slots-default | expert_cache_slots [slots] | 508 |" in (finished / "comparison.md").read_text()
    assert (finished / "prefill_head_alias.svg").read_text(encoding="utf-8").startswith("<?xml")
    extra = json.loads((finished / "summary.json").read_text(encoding="utf-8"))["extra"]
    assert extra["executor"] == "sim"
    assert extra["verdicts"]["pass"] == 3


def test_a_case_that_is_not_there_is_refused(tmp_path: Path) -> None:
    config = RunConfig()
    config.reproduce.cases = ["no-such-case"]
    with RunRecord.open(tmp_path / "run", {}) as record, pytest.raises(ConfigError, match="no-such-case"):
        reproduce.run(config, record)

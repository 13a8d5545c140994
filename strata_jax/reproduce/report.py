"""The comparison as tables: on the terminal, as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from strata_jax.report.tables import table
from strata_jax.reproduce.basis import Basis
from strata_jax.reproduce.bootstrap import BandedChange
from strata_jax.reproduce.compare import Compared, Origin, Score, Verdict, ladders, predicted_share, scores
from strata_jax.reproduce.holdout import HeldOut
from strata_jax.reproduce.quantities import RULES, SPEEDS, Quantity
from strata_jax.reproduce.rows import PublishedTable

COLUMNS = ("row", "metric", "theirs", "ours", "error", "allowed", "verdict", "basis")


def cell_rows(cells: Sequence[Compared]) -> list[tuple[str, ...]]:
    """Return a line of text per cell, in the order of `COLUMNS`."""
    return [
        (
            cell.row_id,
            f"{cell.metric} [{cell.unit}]",
            _theirs(cell),
            _ours(cell),
            _percent(cell.error),
            _allowed(cell),
            str(cell.verdict),
            str(cell.origin) if cell.counts else "-",
        )
        for cell in cells
    ]


def comparison_table(published: PublishedTable, cells: Sequence[Compared]) -> Table:
    """Return the table of one published source for a terminal: the cells that are compared, in short words."""
    built = Table(
        title=f"{published.name}: {published.title}", title_justify="left", title_style="bold", box=SIMPLE_HEAD
    )
    for column in ("row", "metric"):
        built.add_column(column, overflow="fold")
    for column in ("theirs", "ours", "error"):
        built.add_column(column, justify="right", overflow="fold")
    built.add_column("verdict", no_wrap=True)
    for cell in cells:
        if cell.counts:
            ours = " / ".join("-" if f.value is None else _number(f.value) for f in cell.ours)
            verdict = "pass" if cell.verdict is Verdict.PASS else "FAIL"
            basis = ", fitted" if cell.origin is Origin.FITTED else ""
            built.add_row(cell.row_id, cell.metric, _theirs(cell), ours, _percent(cell.error), verdict + basis)
    return built


def remarks(cells: Iterable[Compared]) -> list[str]:
    """Return why cells were not compared or failed for want of a figure, and the confounders, each with its rows."""
    rows_of: dict[str, list[str]] = {}
    for cell in cells:
        texts = [*cell.confounders]
        if cell.verdict is not Verdict.PASS and cell.reason:
            texts.append(f"{cell.metric}: {cell.verdict}: {cell.reason}")
        for text in texts:
            ids = rows_of.setdefault(text, [])
            if cell.row_id not in ids:
                ids.append(cell.row_id)
    return [f"{text} ({_some(ids)})" for text, ids in rows_of.items()]


def score_rows(cells: Sequence[Compared]) -> list[tuple[str, ...]]:
    """Return a line per kind: cells, passes, errors of all cells and of the predicted ones, and what was missed."""
    predicted = {score.quantity: score for score in scores(cells, only_predicted=True)}
    return [_score_row(score, predicted.get(score.quantity)) for score in scores(cells)]


SCORE_COLUMNS = (
    "kind", "cells", "pass", "median |error|", "p90 |error|", "predicted", "median of these", "p90 of these", "target",
)  # fmt: skip


def score_table(title: str, cells: Sequence[Compared]) -> Table:
    """Return the scores of some cells, kind by kind."""
    return table(title, SCORE_COLUMNS, score_rows(cells))


def markdown_scores(title: str, cells: Sequence[Compared]) -> str:
    """Return the scores of some cells as a Markdown section."""
    return f"## {title}\n\n{markdown_table(SCORE_COLUMNS, score_rows(cells))}"


def closing_lines(cells: Sequence[Compared], basis: Basis) -> list[str]:
    """Return the honest summary: what was reached, what was fitted and on what, what counts nowhere."""
    lines = []
    for (name, place), (met, ends) in ladders(cells).items():
        lines.append(f"{name}, {place}: the chunk is exact at {met} of {ends} ends.")
    for name in dict.fromkeys(cell.table for cell in cells):
        share = predicted_share(cell for cell in cells if cell.table == name)
        if share is not None:
            lines.append(f"{name}: {share:.0%} of its speed rows are predictions, the others were fitted on.")
    for verdict in Verdict:
        count = sum(cell.verdict is verdict for cell in cells)
        if count and verdict not in (Verdict.PASS, Verdict.FAIL):
            lines.append(f"{count} cells have the status `{verdict}` and count nowhere.")
    fitted = [cell for cell in cells if basis.holds(cell.row_id, cell.metric)]
    numbers = {name for cell in fitted for name in basis.numbers_of(cell.row_id, cell.metric)}
    lines.append(
        f"{len(fitted)} of {len(cells)} cells were fitted on, by {len(numbers)} numbers; comparison.json lists which."
    )
    missed = [f"{score.quantity}: {text}" for score in scores(cells) for text in score.shortfalls()]
    lines.append("Not reached: " + "; ".join(missed) + "." if missed else "Every target of every kind is reached.")
    return lines


def band_table(title: str, change: BandedChange) -> Table:
    """Return the comparison of two arms band by band, with 95 % intervals."""
    rows: list[tuple[Any, ...]] = []
    for band in change.bands:
        counts = (f"{band.low_tokens // 1024}K+", band.num_before, band.num_after)
        rows.append((*counts, band.before_tok_s, band.after_tok_s, *_interval(band.change, band.low, band.high)))
    counts = ("all bands", sum(b.num_before for b in change.bands), sum(b.num_after for b in change.bands))
    rows.append((*counts, None, None, *_interval(change.change, change.low, change.high)))
    return table(title, ("context", "before", "after", "before tok/s", "after tok/s", "change", "95 % interval"), rows)


def held_out_table(results: Sequence[HeldOut]) -> Table:
    """Return the errors on tables that a refit had not seen."""
    rows = [
        (item.table, str(score.quantity), score.cells, _percent(score.median), _percent(score.p90), score.passed)
        for item in results
        for score in item.scores
        if score.quantity in SPEEDS
    ]
    return table("Left out one at a time: refitted without the table, then compared with it",
                 ("table", "kind", "cells", "median |error|", "p90 |error|", "pass"), rows)  # fmt: skip


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(str(value).replace("|", "\\|") for value in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def csv_text(cells: Sequence[Compared]) -> str:
    """Return every cell as CSV, with raw numbers."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(
        ("table", "place", "row", "metric", "unit", "kind", "theirs", "low", "high", "repeats", "ours",
         "ours_other_end", "error", "verdict", "basis", "reason", "confounders")
    )  # fmt: skip
    for cell in cells:
        low, high = cell.bounds or (None, None)
        ours = [figure.value for figure in cell.ours] + [None, None]
        writer.writerow(
            (cell.table, cell.place, cell.row_id, cell.metric, cell.unit, cell.quantity or "", cell.theirs, low, high,
             cell.repeats, ours[0], ours[1], cell.error, cell.verdict, cell.origin if cell.counts else "", cell.reason,
             "; ".join(cell.confounders))
        )  # fmt: skip
    return buffer.getvalue()


def _score_row(score: Score, predicted: Score | None) -> tuple[str, ...]:
    rule = RULES[score.quantity]
    target = [f"{rule.share:.0%} pass"] if rule.share is not None else []
    if rule.median is not None:
        target.append(f"median {rule.median:.0%}, p90 {rule.p90:.0%}")
    missed = score.shortfalls()
    verdict = " and ".join(target) + (": missed" if missed else ": reached") if target else "-"
    return (
        str(score.quantity),
        str(score.cells),
        f"{score.passed} ({score.share:.0%})",
        _percent(score.median),
        _percent(score.p90),
        str(score.predicted),
        _percent(predicted.median if predicted else None),
        _percent(predicted.p90 if predicted else None),
        verdict,
    )


def _theirs(cell: Compared) -> str:
    text = "-" if cell.theirs is None else _number(cell.theirs)
    if cell.bounds is not None:
        text += f" ({_number(cell.bounds[0])} - {_number(cell.bounds[1])})"
    return text + (f", {cell.repeats} runs" if cell.repeats > 1 else "")


def _ours(cell: Compared) -> str:
    parts = [_number(f.value) + (f" at {f.end}" if f.end else "") for f in cell.ours if f.value is not None]
    return "; ".join(parts) or "-"


def _allowed(cell: Compared) -> str:
    if cell.quantity is None or not cell.counts:
        return "-"
    rule = RULES[cell.quantity]
    if not rule.tolerance:
        return "exact"
    slack = f" or {rule.slack:g}{' MiB' if cell.quantity is Quantity.FREE else ' points'}" if rule.slack else ""
    return f"{rule.tolerance * 100:g} %{slack}"


def _interval(change: float, low: float, high: float) -> tuple[str, str]:
    return f"{change:+.0%}", f"{low:+.0%} to {high:+.0%}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:+.1f} %" if value < 0 else f"{value * 100:.1f} %"


def _number(value: float) -> str:
    if float(value).is_integer() and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"


def _some(items: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"

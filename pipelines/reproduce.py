"""Repeat published tables: plan and simulate what every row states, and print theirs, ours and the error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from strata_jax.config.fields import AUTO
from strata_jax.config.schema import RunConfig
from strata_jax.errors import ConfigError
from strata_jax.report.progress import slow_step
from strata_jax.report.record import RunRecord
from strata_jax.report.tables import console, table_text
from strata_jax.reproduce import report
from strata_jax.reproduce.agent_loop import REPEAT_SIGMA, loop_changes
from strata_jax.reproduce.basis import Basis, fitted_basis
from strata_jax.reproduce.compare import Compared, Verdict, scores
from strata_jax.reproduce.holdout import leave_out
from strata_jax.reproduce.outcome import Outcomes
from strata_jax.reproduce.pictures import draw
from strata_jax.reproduce.rows import TABLES, PublishedTable, load_tables
from strata_jax.reproduce.tables import compare_table


def run(config: RunConfig, record: RunRecord) -> dict[str, Any]:
    """Compare the chosen tables cell by cell; write comparison.{csv,md,json} and a picture per table."""
    tables, basis, outcomes = _chosen(config), fitted_basis(), Outcomes()
    written: list[str] = []
    every: list[Compared] = []
    for table in tables:
        cells = compare_table(table, outcomes, basis)
        every += cells
        _show_table(table, cells, written)
        _show_loop(config, table, outcomes, written)
        if config.report.plots in (True, AUTO):
            draw(f"{table.name}: {table.title}", cells, record.directory / f"{table.name}.svg")
    if config.reproduce.holdout:
        _show_holdout(tables, basis, written)
    closing = report.closing_lines(every, basis)
    console().print(report.score_table("All tables together", every))
    for line in closing:
        console().print(line, markup=False)
    written += [report.markdown_scores("All tables together", every), "\n".join(f"- {line}" for line in closing)]
    record.write_text("comparison.md", "\n".join(written))
    record.write_text("comparison.csv", report.csv_text(every))
    record.write_json("comparison.json", {"cells": every, "scores": scores(every), "fitted_on": basis.patterns})
    return {"extra": _extra(tables, every, closing)}


def _chosen(config: RunConfig) -> tuple[PublishedTable, ...]:
    """Return the tables of the settings, with only the cases asked for. ConfigError for a case that is not there."""
    tables = load_tables(config.reproduce.tables or TABLES)
    wanted = set(config.reproduce.cases)
    if not wanted:
        return tables
    missing = wanted - {row.case for table in tables for row in table.rows}
    if missing:
        raise ConfigError(
            f"reproduce.cases: {', '.join(sorted(missing))} is in none of {', '.join(t.name for t in tables)}."
            " The column `row` of comparison.csv shows rows; their cases are in data/published/."
        )
    kept = (replace(t, rows=tuple(row for row in t.rows if row.case in wanted)) for t in tables)
    return tuple(table for table in kept if table.rows)


def _show_table(table: PublishedTable, cells: list[Compared], written: list[str]) -> None:
    screen = console()
    screen.print(report.comparison_table(table, cells))
    notes = report.remarks(cells)
    for note in notes:
        screen.print(f"  {note}", markup=False)
    screen.print(report.score_table(f"{table.name} in short", cells))
    written += [
        f"# {table.name}: {table.title}\n",
        report.markdown_table(report.COLUMNS, report.cell_rows(cells)),
        "\n".join(f"- {note}" for note in notes) + "\n",
        report.markdown_scores(f"{table.name} in short", cells),
    ]


def _show_loop(config: RunConfig, table: PublishedTable, outcomes: Outcomes, written: list[str]) -> None:
    """Print the agent loop of both arms band by band, with bootstrap intervals, where the table compares one."""
    if not config.reproduce.bootstrap_samples:
        return
    changes = loop_changes(table, outcomes.with_noise(REPEAT_SIGMA), config.reproduce.bootstrap_samples)
    for what, change in (("prompt", changes.prompt), ("decode", changes.decode)) if changes else ():
        if change is not None:
            built = report.band_table(
                f"Agent loop, {what} tok/s: medians within 16K bands of context (noise {REPEAT_SIGMA:.0%})",
                change,
            )
            console().print(built)
            written.append(f"```\n{table_text(built)}```\n")


def _show_holdout(tables: tuple[PublishedTable, ...], basis: Basis, written: list[str]) -> None:
    results = []
    for held in tables:
        with slow_step(f"fitting without {held.name}"):
            results.append(leave_out(held, load_tables(), lambda table, found: compare_table(table, found, basis)))
    built = report.held_out_table(results)
    console().print(built)
    written.append(f"```\n{table_text(built)}```\n")


def _extra(tables: tuple[PublishedTable, ...], cells: list[Compared], closing: list[str]) -> dict[str, Any]:
    verdicts = {str(verdict): sum(cell.verdict is verdict for cell in cells) for verdict in Verdict}
    return {"executor": "sim", "tables": [table.name for table in tables], "verdicts": verdicts, "closing": closing}

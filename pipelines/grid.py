"""Many simulations in one job: every combination of the axes is planned and simulated, then one table, one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.choose import choose
from strata_jax.config.points import Point, grid_points
from strata_jax.config.schema import RunConfig
from strata_jax.errors import DoesNotFit, StrataError
from strata_jax.memory.strata.plan_json import to_json
from strata_jax.memory.strata.unfit import StrataUnfit
from strata_jax.report.progress import SlowProgress
from strata_jax.report.record import RunRecord
from strata_jax.report.sweep import csv_text, given_text, make_row, markdown_text, short_result
from strata_jax.report.sweep_plots import CHOSEN, draw_sweep
from strata_jax.report.tables import console, table
from strata_jax.sim.executor import simulate
from strata_jax.sim.setup import complete_setup, plan_or_unfit, sim_inputs

CONF = Path(__file__).resolve().parents[1] / "conf"
SHOWN_ROWS = 20


def run(config: RunConfig, record: RunRecord) -> dict[str, Any]:
    """Simulate the grid, write grid.csv and grid.md as it goes to its end, draw, and return the summary.

    Raises DoesNotFit, after that, if points do not fit and sweep.unfit_is_error is on.
    """
    rows: list[dict[str, Any]] = []
    progress = SlowProgress()
    try:
        for point in grid_points(config.grid, _command_line(), CONF):
            rows.append(_row(len(rows), point, config))
            progress.at(f"{len(rows):,} points: {given_text(rows[-1])}: {short_result(rows[-1])}")
    finally:  # also what an interrupted grid has done
        record.write_text("grid.csv", csv_text(rows))
        record.write_text("grid.md", markdown_text(rows))
    pictures = draw_sweep(rows, record.directory, config.grid.plot_y, name="grid") if config.sweep.plots else []
    _print(rows, config.grid.plot_y, [record.directory / "grid.csv", *pictures])
    bad = [row for row in rows if row["is_error"]]
    record.update(
        extra={"executor": "sim", "points": len(rows), "without_result": sum(r["status"] != "ok" for r in rows)}
    )
    if bad:
        raise DoesNotFit(
            f"{len(bad):,} of {len(rows):,} points have no result; the first: {given_text(bad[0])}: {bad[0]['reason']}"
            " The others are in grid.csv. sweep.unfit_is_error=false accepts points that do not fit."
        )
    return {}


def _row(idx: int, point: Point, config: RunConfig) -> dict[str, Any]:
    """Plan and simulate one point; what does not fit or cannot be set is a row with its reason."""
    summary: dict[str, Any] = {}
    plan: dict[str, Any] = {}
    error: StrataError | None = point.error
    if point.config is not None:
        try:
            summary, plan, error = _simulate(point.config)
        except StrataError as refusal:
            error = refusal
    return make_row(idx, point.overrides, summary, plan, error, unfit_is_error=config.sweep.unfit_is_error)


def _simulate(config: RunConfig) -> tuple[dict[str, Any], dict[str, Any], StrataError | None]:
    config, _ = choose(config)
    inputs = sim_inputs(config)
    found = plan_or_unfit(config, inputs)
    if isinstance(found, StrataUnfit):
        return {}, found.to_json(), found.error()
    setup = complete_setup(config, inputs, found)
    done = simulate(found, inputs.sizes, inputs.profile, setup.stack, inputs.requests, options=setup.options)
    return done.summary(), to_json(found), None


def _command_line() -> Sequence[str]:
    """The overrides of the command line, or none where Hydra did not start the run."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def _print(rows: Sequence[dict[str, Any]], measures: Sequence[str], files: Sequence[Path]) -> None:
    """Print the best points by the first measure, and where everything is."""
    done = [row for row in rows if row["values"].get(measures[0]) is not None]
    best = sorted(done, key=lambda row: -row["values"][measures[0]])[:SHOWN_ROWS]
    axes = list(dict.fromkeys(key for row in rows for key in row["overrides"]))
    columns = (*(key.rpartition(".")[2] for key in axes), *measures, *CHOSEN)
    cells = [
        (*(row["overrides"].get(key) for key in axes), *(row["values"].get(name) for name in (*measures, *CHOSEN)))
        for row in best
    ]
    title = f"{len(rows):,} points, {len(rows) - len(done):,} without a result; the best by {measures[0]}"
    console().print(table(title, columns, cells))
    print(*files, sep="\n")

"""Hydra's callback around a sweep: it makes the directory of the table, and the pictures at the end.

Named in conf/config.yaml. Hydra keeps neither the jobs' return values nor the sweep's directory for the program that
called it, so the directory goes into an environment variable.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NoReturn, TextIO

from hydra import compose
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from strata_jax.config.load import to_config
from strata_jax.errors import ConfigError, StrataError
from strata_jax.report.sweep import (
    DIRECTORY_VARIABLE,
    MARKDOWN_FILE,
    Status,
    hold_sweep,
    kept_job,
    load_rows,
    start_table,
)
from strata_jax.report.sweep_plots import draw_sweep

EXIT_REFUSED = 2
_held: list[TextIO] = []  # of the sweep of this process; no attribute, as launchers send the callback to their workers


def check_resumed(config: DictConfig, directory: Path) -> None:
    """Raise ConfigError where a job to come has the number of one that finished with other settings.

    Before any job starts, as Hydra numbers jobs in order: a row of the table that is there would be replaced. Only for
    sweepers that try all combinations of the given values; others choose as they go.
    """
    sweeper = config.hydra.sweeper
    if not sweeper._target_.endswith("QuickSweeper") and not sweeper._target_.endswith("BasicSweeper"):
        return
    given = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    hydra = GlobalHydra.instance().hydra
    parser = OverridesParser.create(config_loader=None if hydra is None else hydra.config_loader)
    parsed = parser.parse_overrides([*given, *config.hydra.overrides.task])
    (jobs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    for row in load_rows(directory):
        if row["status"] == Status.OK.value and row["job"] < len(jobs):
            composed = compose(config.hydra.job.config_name, overrides=jobs[row["job"]])
            kept_job(Path(row["directory"]), to_config(composed))


def _refuse(error: StrataError) -> NoReturn:
    """End the program; Hydra turns any other exception of a callback into a warning."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(EXIT_REFUSED)


class SweepTable(Callback):
    """Starts and finishes the table of a sweep; the jobs add the rows."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        directory = Path(str(config.hydra.sweep.dir)).absolute()
        try:
            _held.append(hold_sweep(directory))
        except ConfigError as error:
            _refuse(error)
        if config.sweep.resume:
            try:
                check_resumed(config, directory)
            except StrataError as error:
                _refuse(error)
        start_table(directory, resume=bool(config.sweep.resume))
        os.environ[DIRECTORY_VARIABLE] = str(directory)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        directory = Path(os.environ[DIRECTORY_VARIABLE])
        rows = load_rows(directory)
        pictures = draw_sweep(rows, directory) if config.sweep.plots else []
        unfinished = sum(row["status"] != "ok" for row in rows)
        print(
            f"{len(rows)} jobs, {unfinished} without a result: {directory / MARKDOWN_FILE}",
            *(f"  {path.name}" for path in pictures),
            sep="\n",
        )
        while _held:
            _held.pop().close()

"""Hydra's callback around a sweep: it makes the directory of the table, and the pictures at the end.

Named in conf/config.yaml. Hydra keeps neither the jobs' return values nor the sweep's directory for the program that
called it, so the directory goes into an environment variable.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, TextIO

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from strata_jax.errors import ConfigError
from strata_jax.report.sweep import DIRECTORY_VARIABLE, MARKDOWN_FILE, hold_sweep, load_rows, start_table
from strata_jax.report.sweep_plots import draw_sweep

EXIT_REFUSED = 2
_held: list[TextIO] = []  # of the sweep of this process; no attribute, as launchers send the callback to their workers


class SweepTable(Callback):
    """Starts and finishes the table of a sweep; the jobs add the rows."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        directory = Path(str(config.hydra.sweep.dir)).absolute()
        try:
            _held.append(hold_sweep(directory))
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(EXIT_REFUSED)  # Hydra turns any other exception of a callback into a warning
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

"""Run strata-jax: `python run.py [group=option ...] [key=value ...]`. `python run.py --help` lists the settings.

Neither JAX nor Hydra is imported for `--help`, and JAX not before the settings have been checked.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata_jax.config.help import help_text
from strata_jax.errors import StrataError

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONF = Path(__file__).resolve().parent / "conf"

EXIT_OK, EXIT_REFUSED, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE, EXIT_TERMINATED = 0, 2, 130, 141, 143

log = logging.getLogger("run")


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code. Bugs keep their traceback (exit code 1)."""
    try:
        if "--help" in arguments or "-h" in arguments:
            print(help_text(CONF), flush=True)
            return EXIT_OK
        return run_hydra(arguments)
    except StrataError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except BrokenPipeError:  # whoever read the output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails again when it flushes
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt as error:
        print(f"interrupted: {str(error) or 'by the keyboard'}", file=sys.stderr)
        return EXIT_TERMINATED if "SIGTERM" in str(error) else EXIT_INTERRUPTED


def run_hydra(arguments: Sequence[str]) -> int:
    """Let Hydra compose the settings and run one job, or the jobs of a sweep. Raises the refusals as they are."""
    import hydra
    from hydra._internal.utils import get_args_parser
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    from strata_jax.config.load import check_overrides, explain, find_groups, register
    from strata_jax.errors import ConfigError
    from strata_jax.report.sweep import DIRECTORY_VARIABLE

    os.environ.pop(DIRECTORY_VARIABLE, None)  # a sweep's own jobs may start this program again
    register()
    given = get_args_parser().parse_args(arguments)
    if not given.shell_completion:
        folders = [CONF, *([Path(given.config_dir)] if given.config_dir else [])]
        check_overrides(given.overrides, find_groups(folders), multirun=given.multirun)
    refusals: list[StrataError] = []

    @hydra.main(version_base="1.3", config_path="conf", config_name="config")
    def job(composed: DictConfig) -> None:
        context = HydraConfig.get()
        if context.mode is RunMode.MULTIRUN:
            run_sweep_job(composed, context)
            return
        try:
            run_job(composed, Path(context.runtime.output_dir))
        except StrataError as error:
            refusals.append(error)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach `main` as they are; Hydra would print some and exit with 1
    try:
        job()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
    if refusals:
        raise refusals[0]
    return sweep_status()


def run_job(composed: DictConfig, directory: Path, *, in_sweep: bool = False) -> None:
    """Check the settings, then run the chosen pipeline with a record in `directory`.

    in_sweep: what it prints goes to output.txt, and pictures are only drawn when asked for.
    """
    from omegaconf import OmegaConf

    from pipelines import run_pipeline
    from strata_jax.config.load import to_config
    from strata_jax.report.record import RunRecord
    from strata_jax.report.timeline import draw_memory

    with RunRecord.open(directory, OmegaConf.to_container(composed, resolve=False)) as record:
        config = to_config(composed)
        if config.report.plots == "auto":
            config.report.plots = not in_sweep
        record.update(settings=config, pipeline=config.pipeline.name)
        with contextlib.ExitStack() as stack:
            if in_sweep:
                output = stack.enter_context((directory / "output.txt").open("w", encoding="utf-8"))
                stack.enter_context(contextlib.redirect_stdout(output))
            record.update(**run_pipeline(config, record))
        if config.report.plots:
            draw_memory(directory)


def run_sweep_job(composed: DictConfig, context: Any) -> None:
    """Run one job of a sweep and add its row to the sweep's table, also when it fails.

    Expected errors are shown at once and end the job only; bugs go on to Hydra, which runs the other jobs first.
    context: Hydra's settings of the job.
    """
    from strata_jax.config.load import to_config
    from strata_jax.report.sweep import add_row, job_row, kept_job, short_result

    directory, overrides = Path(context.runtime.output_dir), list(context.overrides.task)
    error: Exception | None = None
    kept = False
    try:
        kept = bool(composed.sweep.resume) and kept_job(directory, to_config(composed))
        if not kept:
            run_job(composed, directory, in_sweep=True)
    except StrataError as refusal:
        log.error("job %s (%s): %s", context.job.num, " ".join(overrides), refusal)
        error = refusal
    except Exception as bug:
        error = bug
        raise
    finally:
        row = job_row(context.job.num, overrides, directory, error, unfit_is_error=bool(composed.sweep.unfit_is_error))
        add_row(Path(str(context.sweep.dir)), row)
    if error is None:
        done = "kept" if kept else short_result(row)
        print(f"job {context.job.num} ({' '.join(overrides)}): {done}", flush=True)


def sweep_status() -> int:
    """Return the exit code of the sweep that has ended: 2 if a job has no result; 0 without a sweep."""
    from strata_jax.report.sweep import DIRECTORY_VARIABLE, load_rows

    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory is None:
        return EXIT_OK
    return EXIT_REFUSED if any(row["is_error"] for row in load_rows(Path(directory))) else EXIT_OK


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows "?", and the run goes on
    sys.exit(main(sys.argv[1:]))

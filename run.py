"""Run strata-jax: `python run.py [group=option ...] [key=value ...]`. `python run.py --help` lists the settings.

Neither JAX nor Hydra is imported for `--help`, and JAX not before the settings have been checked.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from strata_jax.config.help import help_text
from strata_jax.errors import StrataError

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONF = Path(__file__).resolve().parent / "conf"

EXIT_OK, EXIT_REFUSED, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE, EXIT_TERMINATED = 0, 2, 130, 141, 143

log = logging.getLogger("run")


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code. Bugs keep their traceback (exit code 1)."""
    if "--help" in arguments or "-h" in arguments:
        print(help_text(CONF))
        return EXIT_OK
    try:
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

    register()
    given = get_args_parser().parse_args(arguments)
    if not given.shell_completion:
        folders = [CONF, *([Path(given.config_dir)] if given.config_dir else [])]
        check_overrides(given.overrides, find_groups(folders), multirun=given.multirun)
    refusals: list[StrataError] = []

    @hydra.main(version_base="1.3", config_path="conf", config_name="config")
    def job(composed: DictConfig) -> None:
        context = HydraConfig.get()
        try:
            run_job(composed, Path(context.runtime.output_dir))
        except StrataError as error:
            if context.mode is RunMode.MULTIRUN:  # Hydra runs the other jobs, then raises the first error again
                log.error("job %s (%s): %s", context.job.num, " ".join(context.overrides.task), error)
                raise
            refusals.append(error)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach `main` as they are; Hydra would print some and exit with 1
    try:
        job()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
    if refusals:
        raise refusals[0]
    return EXIT_OK


def run_job(composed: DictConfig, directory: Path) -> None:
    """Check the settings, then run the chosen pipeline with a record in `directory`."""
    from omegaconf import OmegaConf

    from pipelines import run_pipeline
    from strata_jax.config.load import to_config
    from strata_jax.report.record import RunRecord

    with RunRecord.open(directory, OmegaConf.to_container(composed, resolve=False)) as record:
        config = to_config(composed)
        record.update(pipeline=config.pipeline.name)
        record.update(**run_pipeline(config, record))


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows "?", and the run goes on
    sys.exit(main(sys.argv[1:]))

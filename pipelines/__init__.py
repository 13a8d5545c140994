"""What runs, one file per pipeline. `run.py` calls `run_pipeline`; a pipeline is imported when it is chosen."""

from __future__ import annotations

from typing import Any

from strata_jax.config.schema import ExecutorName, PipelineName, RunConfig
from strata_jax.report.record import RunRecord


def run_pipeline(config: RunConfig, record: RunRecord) -> dict[str, Any]:
    """Run the chosen pipeline and return the fields of summary.json that it fills.

    config: resolved, so that its executor is not `auto`.
    """
    match config.pipeline.name:
        case PipelineName.generate if config.executor.name is ExecutorName.sim:
            from pipelines import simulate

            return simulate.run(config, record)
        case PipelineName.generate:
            from pipelines import generate

            return generate.run(config, record)
        case PipelineName.inspect:
            from pipelines import inspect

            return inspect.run(config, record)
        case PipelineName.logits:
            from pipelines import logits

            return logits.run(config, record)
        case PipelineName.parity:
            from pipelines import parity

            return parity.run(config, record)
        case PipelineName.plan:
            from pipelines import plan

            return plan.run(config, record)
        case PipelineName.grid:
            from pipelines import grid

            return grid.run(config, record)
        case PipelineName.reproduce:
            from pipelines import reproduce

            return reproduce.run(config, record)
        case PipelineName.calibrate:
            from pipelines import calibrate

            return calibrate.run(config, record)

"""Say how large a model is and what would go where, from the file's header alone. JAX is not started."""

from __future__ import annotations

from typing import Any

from pipelines import simulate
from pipelines.assemble import make_plan, open_model, read_prompts
from pipelines.choose import choose
from strata_jax.config.schema import ExecutorName, RunConfig
from strata_jax.geometry import Geometry, size_table
from strata_jax.report.record import RunRecord
from strata_jax.report.tables import console, table, table_text
from strata_jax.sim.setup import sim_inputs


def run(config: RunConfig, record: RunRecord) -> dict[str, Any]:
    """Print and write the size table, then the plan; a plan that does not fit leaves the size table behind."""
    if config.executor.name is ExecutorName.sim:
        return _plan_card(config, record)
    file, geometry = open_model(config)
    record.update(model=geometry.name)
    _write_sizes(geometry, record)
    # Without a given context, the plan needs to know how long the workload's prompts are.
    prompts = [] if isinstance(config.model.max_context, int) else read_prompts(config, file, geometry)[0]
    make_plan(config, geometry, prompts, record)
    return {"extra": {"model_bytes": geometry.total_bytes}}


def _plan_card(config: RunConfig, record: RunRecord) -> dict[str, Any]:
    """Plan for another card: the simulator's plan, with nothing simulated."""
    config, choice = choose(config, record)
    inputs = sim_inputs(config)
    record.update(model=inputs.sizes.name)
    _write_sizes(inputs.geometry, record)
    simulate.make_plan(config, inputs, record)
    return {"extra": {"model_bytes": inputs.geometry.total_bytes, "calibrated": inputs.profile.calibrated, **choice}}


def _write_sizes(geometry: Geometry, record: RunRecord) -> None:
    rows = size_table(geometry)
    cells = [(row.component, row.num_tensors, row.num_parameters, row.num_bytes, " ".join(row.types)) for row in rows]
    totals = (
        sum(row.num_tensors for row in rows),
        sum(row.num_parameters for row in rows),
        sum(row.num_bytes for row in rows),
    )
    columns = ("component", "tensors", "parameters", "bytes", "types")
    built = table(f"Sizes of {geometry.name}", columns, [*cells, ("all", *totals, "")])
    console().print(built)
    record.write_json("sizes.json", {"model": geometry.name, "components": rows, "total_bytes": totals[2]})
    record.write_text("sizes.txt", table_text(built))

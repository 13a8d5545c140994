"""The main job of another card: plan, then let the requests run through the simulator. Nothing is loaded, no JAX."""

from __future__ import annotations

from typing import Any

from pipelines.choose import choose
from strata_jax.config.schema import RunConfig
from strata_jax.memory.strata.plan_json import to_json
from strata_jax.memory.strata.result import StrataPlan
from strata_jax.memory.strata.table import strata_plan_text
from strata_jax.memory.strata.unfit import StrataUnfit
from strata_jax.report.record import RunRecord
from strata_jax.report.tables import console, result_table, table
from strata_jax.sim.executor import simulate
from strata_jax.sim.results import RequestResult, SimRun
from strata_jax.sim.setup import SimInputs, complete_setup, plan_or_unfit, sim_inputs

MAX_ROWS = 30  # of the table of requests


def run(config: RunConfig, record: RunRecord) -> dict[str, Any]:
    """Plan, simulate the workload's requests in order, and return the summary.

    policy=auto searches first. Raises DoesNotFit when the plan does not fit; plan.json then says by how much.
    """
    config, choice = choose(config, record)
    inputs = sim_inputs(config)
    plan = make_plan(config, inputs, record)
    setup = complete_setup(config, inputs, plan)
    done = simulate(
        plan, inputs.sizes, inputs.profile, setup.stack, inputs.requests, options=setup.options, sink=record
    )
    summary = done.summary()
    summary["extra"] |= {"policies": list(setup.stack.names), **choice}
    record.update(model=inputs.sizes.name, device=device_name(done), **summary)
    console().print(request_table(done))
    console().print(result_table(record.summary))
    for warning in done.warnings:
        print(f"warning: {warning}")
    return {}


def make_plan(config: RunConfig, inputs: SimInputs, record: RunRecord) -> StrataPlan:
    """Plan the memory, print the plan and write it down. Raises DoesNotFit with what would fit."""
    found = plan_or_unfit(config, inputs)
    notes = (*inputs.notes, *((UNCALIBRATED.format(inputs.profile.title),) if not inputs.profile.calibrated else ()))
    text = strata_plan_text(found) + "".join(f"- {note}\n" for note in notes)
    marks = {"executor": "sim", "calibrated": inputs.profile.calibrated, "hardware": inputs.profile.name}
    if isinstance(found, StrataUnfit):
        record.write_plan({**found.to_json(), **marks}, text)
        raise found.error()
    record.write_plan({**to_json(found), **marks}, text)
    print(f"Memory plan of {inputs.sizes.name} on {inputs.profile.title}\n{text}")
    record.write_json("hardware.json", {"profile": inputs.profile.name, "numbers": inputs.profile.describe(), **marks})
    return found


UNCALIBRATED = "{} is not calibrated: no published run of this card was there to fit its numbers on"


def device_name(done: SimRun) -> str:
    """Return what computed, for summary.json."""
    return f"simulated {done.profile}" + ("" if done.calibrated else " (uncalibrated)")


def request_table(done: SimRun) -> Any:
    """Return the first requests of a simulation as a table."""
    shown = done.requests[:MAX_ROWS]
    more = f", the first {MAX_ROWS} of {len(done.requests):,}" if len(done.requests) > MAX_ROWS else ""
    columns = ("request", "prompt", "reused", "output", "ttft ms", "prompt tok/s", "decode tok/s", "hits", "K/V cells")
    return table(f"Simulated requests{more}", columns, [_row(request) for request in shown])


def _row(r: RequestResult) -> tuple[Any, ...]:
    return (
        r.request, r.prompt_tokens, r.reused_tokens, r.output_tokens, r.ttft_ms, r.prompt_tok_s, r.decode_tok_s,
        r.hit_rate, r.kv_mapped_cells,
    )  # fmt: skip

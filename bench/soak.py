"""Do policies on the device stay exact and leak nothing over a thousand random operations?

Held fixed: a synthetic model of two layers and its draft block whose drafts are right some of the time, 40 expert slots
of 48, a context of 512 cells, chunks of 16 tokens. Three configurations take turns: all policies, where 16 cells are
mapped at the start and slots anywhere pay for the others; the same with slots just under the loan; a window of 40 cells
on the device in place of growth. Hypothesis draws the operations (`tests/engine/policy_machine.py`): requests of six
conversations that go on, branch, are cancelled or left; faults in every move at every stage, some of which take the
arena with them; other programs that want memory; RAM that comes, goes and is unknown. Every request is compared bit by
bit with an engine in which nothing moves; accounts are compared after every operation, live arrays too, and at the end
of each run nothing may be left.

    python bench/soak.py [--operations 1000] [--seed 1] [--save bench/results/soak_cpu.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from strata_jax.runtime import with_free_early

STEPS = 40  # operations of one run, then everything is dropped
RUNS_AT_A_TIME = 5


def main() -> None:
    os.environ["XLA_FLAGS"] = with_free_early(os.environ.get("XLA_FLAGS", ""))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        row = soak(Path(folder), options.operations, options.seed)
    print(json.dumps(row, indent=2))
    if options.save:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps(row, indent=2) + "\n")


def soak(folder: Path, operations: int, seed: int) -> dict[str, Any]:
    """Run the machine for so many operations, or up to three times as many until a fault has been met at every point.

    What goes wrong raises.
    """
    import jax
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis import seed as with_seed
    from hypothesis.stateful import run_state_machine_as_test

    from strata_jax.synthetic import write_synthetic_gguf
    from tests.engine.policy_machine import CONFIGURATIONS, FAULT_POINTS, Machine, Tally
    from tests.engine.policy_runs import SMALL, Engines

    path, tally, started = folder / "model.gguf", Tally(), time.perf_counter()
    write_synthetic_gguf(path, preset="nano", seed=0, echo_mtp=0.1, overrides=SMALL)
    engines, by_configuration = Engines(path), Counter[str]()
    how = settings(
        max_examples=RUNS_AT_A_TIME, stateful_step_count=STEPS, deadline=None, database=None,
        phases=(Phase.generate,), suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    for number, name in enumerate(cycle(CONFIGURATIONS)):
        before, missed = sum(tally.operations.values()), [point for point in FAULT_POINTS if not tally.faults[point]]
        if before >= operations and (not missed or before >= 3 * operations):
            break
        machine = type("Soak", (Machine,), {"engines": engines, "policies": CONFIGURATIONS[name], "tally": tally})
        run_state_machine_as_test(with_seed(1000 * seed + number)(machine), settings=how)
        by_configuration[name] += sum(tally.operations.values()) - before
        print(f"{sum(tally.operations.values()):,} operations", file=sys.stderr, flush=True)
    return {
        "device": jax.devices()[0].device_kind, "platform": jax.devices()[0].platform, "jax": jax.__version__,
        "python": platform.python_version(), "seed": seed, "seconds": round(time.perf_counter() - started, 1),
        "configurations": {name: list(policies) for name, policies in CONFIGURATIONS.items()},
        "by_configuration": dict(by_configuration), "operations": sum(tally.operations.values()),
        "by_operation": in_order(tally.operations),
        "requests": sum(tally.requests.values()), "by_ending": in_order(tally.requests),
        "by_source_of_reused_tokens": in_order(tally.reused), "prompt_tokens": tally.prompt_tokens,
        "output_tokens": tally.output_tokens, "moves": in_order(tally.moves),
        "faults": sum(tally.faults.values()), "faults_by_point": in_order(tally.faults),
        "points_without_a_fault": [" ".join(point) for point in missed],
        "runtimes": tally.runtimes, "engine_stops": tally.stops, "compared": tally.compared,
        "differences": tally.differences, "arrays_left": tally.arrays_left, "bytes_left": tally.bytes_left,
    }  # fmt: skip


def in_order(counts: Counter[Any]) -> dict[str, int]:
    """Return counts by name, the largest first."""
    return {name if isinstance(name, str) else " ".join(name): num for name, num in counts.most_common()}


if __name__ == "__main__":
    main()

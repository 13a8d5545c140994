"""How long do 1,000 memory plans of a large model take?

Held fixed: a model of 48 layers x 512 experts with a draft block, seven sizes of experts, everything `auto`. Varied:
the device memory, so that no two plans are the same; then the context as well, so that no prompt buffer is priced
twice; then plans that do not fit, each of which is explained with values that fit. The same for the planner of the
strata memory models, on a card of 32 GB: reserves varied, reserves and contexts, growth that pays or does not, what
does not fit. The bound: 2 s for 1,000 plans on 2 cores, so that sweeps and searches are cheap. Run it from the
repository: ``python bench/plan_speed.py``.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from strata_jax.memory.ledger import MIB
from strata_jax.memory.plan import MemoryPlan, try_plan
from strata_jax.memory.request import PlanRequest
from strata_jax.memory.strata.plan import try_plan_strata
from strata_jax.memory.strata.request import Card, GrowSettings, StrataRequest
from strata_jax.memory.strata.result import StrataPlan
from strata_jax.memory.strata.sizes import pack_sizes
from strata_jax.presets import preset_geometry

NUM_PLANS = 1000
BOUND_S = 2.0
REPEATS = 3


def request(idx: int, *, context_cells: int | None = None, expert_slots: int | None = None) -> PlanRequest:
    """Return the request of one plan; budgets go from 10,000 MiB up in steps of 20 MiB."""
    return PlanRequest(
        context_cells=context_cells, expert_slots=expert_slots, device_budget_bytes=(10_000 + 20 * idx) * MIB,
        reserve_bytes=700 * MIB, host_budget_bytes=2**37,
    )  # fmt: skip


CASES: dict[str, Callable[[int], PlanRequest]] = {
    "budgets": lambda idx: request(idx),
    "budgets and contexts": lambda idx: request(idx, context_cells=32_768 + 4 * idx),
    "do not fit": lambda idx: request(idx % 500, expert_slots=25_000),
}


CARD = Card("32 GB", 32_607 * MIB, 1_685 * MIB, ram_bytes=2**37)
GROW = GrowSettings(enabled=True)
STRATA_CASES: dict[str, Callable[[int], StrataRequest]] = {
    "strata, reserves": lambda idx: StrataRequest(reserve_mib=20 * idx),
    "strata, contexts": lambda idx: StrataRequest(reserve_mib=20 * idx, context_cells=32_768 + 4 * idx),
    "strata, policies": lambda idx: StrataRequest(reserve_mib=20 * idx, own="auto", grow=GROW),
    "strata, do not fit": lambda idx: StrataRequest(expert_cache=24_000 + idx % 500, cap_expert_cache=False),
}


def main() -> None:
    """Measure each case, print a table and one JSON line."""
    geometry = preset_geometry("qwen38_flash", "iq3_s")
    sizes = pack_sizes(preset_geometry("qwen38_flash", "iq2_xs"))
    cases: dict[str, Callable[[int], bool]] = {
        name: lambda idx, make=make: isinstance(try_plan(geometry, make(idx)), MemoryPlan)
        for name, make in CASES.items()
    }
    cases |= {
        name: lambda idx, make=make: isinstance(try_plan_strata(sizes, CARD, make(idx)), StrataPlan)
        for name, make in STRATA_CASES.items()
    }
    result: dict[str, object] = {"num_plans": NUM_PLANS, "bound_s": BOUND_S, "python": platform.python_version()}
    for name, fits in cases.items():
        times: list[float] = []
        fitting = 0
        for _ in range(REPEATS):
            started = time.perf_counter()
            fitting = sum(fits(idx) for idx in range(NUM_PLANS))
            times.append(time.perf_counter() - started)
        median = statistics.median(times)
        spread = f"{min(times):.2f} to {max(times):.2f} s in {REPEATS} runs"
        print(f"{name:22} {median:6.2f} s for {NUM_PLANS} plans, {fitting} fit; {spread}")
        result[name] = {"median_s": round(median, 3), "min_s": round(min(times), 3), "fit": fitting}
    print(json.dumps(result))


if __name__ == "__main__":
    main()

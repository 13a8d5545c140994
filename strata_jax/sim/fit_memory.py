"""Device memory that no planning rule explains, from published plans: what others hold, and what goes missing later.

Both are one number per card, found by closed form: a plan's cache differs from the published one by exactly what was
assumed wrongly about the memory taken before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import median

import yaml

from strata_jax.errors import FormatError
from strata_jax.memory.strata.request import MIB
from strata_jax.memory.strata.result import StrataPlan
from strata_jax.memory.strata.sizes import PackSizes
from strata_jax.reproduce.compare import reference
from strata_jax.reproduce.outcome import Outcomes
from strata_jax.reproduce.rows import Row, load_rows
from strata_jax.reproduce.translate import translate
from strata_jax.sim.profile import FOLDER, profile_for_gpu
from strata_jax.sim.profile_file import UNITS, Number

GIB = 2**30
SOURCES = {
    "vram_taken_mib": "driver, context, modules and desktop: what makes the published caches come out",
    "vram_late_mib": "gone between sizing the cache and the end of the start, by the free memory published for both",
}


def fit_memory() -> Mapping[str, Mapping[str, Number]]:
    """Return by profile name the numbers of the section `memory` of fit_rows.yaml, fitted on the rows it names."""
    rows = {row.id: row for row in load_rows()}
    wanted = yaml.safe_load((FOLDER / "fit_rows.yaml").read_text(encoding="utf-8"))["memory"]
    found: dict[str, dict[str, Number]] = defaultdict(dict)
    outcomes = Outcomes()
    for name, row_ids in wanted.items():
        values: dict[str, list[tuple[str, float]]] = defaultdict(list)
        for row_id in row_ids:
            if row_id not in rows:
                raise FormatError(f"fit_rows.yaml: there is no published row {row_id!r}")
            card, value = _value(name, rows[row_id], outcomes)
            values[card].append((row_id, value))
        for card, points in values.items():
            middle = median(value for _, value in points)
            used = tuple(row_id for row_id, _ in points)
            found[card][name] = Number(round(middle), UNITS[name], "fitted", SOURCES[name], used)
    return found


def _value(name: str, row: Row, outcomes: Outcomes) -> tuple[str, float]:
    """Return (profile name, MiB) that would make our plan say what the row says."""
    scenario = translate(row)[0].scenario
    outcome = outcomes.planned(scenario)
    profile, plan = profile_for_gpu(scenario.machine.gpu), outcome.plan
    cells = {cell.metric: reference(cell) for cell in row.cells}
    if profile is None or plan is None:
        raise FormatError(f"fit_rows.yaml: row {row.id} has no plan here")
    if name == "vram_late_mib":
        free_mib = cells.get("vram_free_after_start_mib")
        if free_mib is None:
            raise FormatError(f"fit_rows.yaml: row {row.id} does not say what is free after the start")
        return profile.fit_name, profile[name] + plan.free_after_start_bytes / MIB - free_mib
    return profile.fit_name, profile[name] + _excess_bytes(plan, outcome.sizes, cells) / MIB


def _excess_bytes(plan: StrataPlan, sizes: PackSizes, cells: Mapping[str, float | None]) -> float:
    """Return by how much our memory for the cache is larger than the published one.

    Published slots fill their memory but for half a slot on average; a cache of automatic size is supposed.
    """
    slots, free_gib = cells.get("expert_cache_slots"), cells.get("vram_free_for_cache_gib")
    if slots:
        theirs = slots * sizes.max_blob_bytes if plan.uniform else float(sizes.rank_end_bytes[round(slots) - 1])
        ours = plan.free_for_cache_bytes - plan.reserve_bytes
        return ours - theirs - sizes.mean_blob_bytes / 2
    if free_gib is None:
        raise FormatError("fit_rows.yaml: a memory row needs expert_cache_slots or vram_free_for_cache_gib")
    return plan.free_for_cache_bytes - free_gib * GIB

"""policy=auto: search, say what was chosen and why, and go on with it. No JAX."""

from __future__ import annotations

from typing import Any

from strata_jax.config.resolve import searches
from strata_jax.config.schema import RunConfig
from strata_jax.report.record import RunRecord
from strata_jax.report.tables import console, table
from strata_jax.sim.search import Search, search_policies
from strata_jax.sim.search_space import typed, with_settings
from strata_jax.sim.search_words import (
    COLUMNS,
    MAX_ROWS,
    OBJECTIVE,
    candidate_rows,
    sampling,
    search_json,
    search_markdown,
    why,
)


def choose(config: RunConfig, record: RunRecord | None = None) -> tuple[RunConfig, dict[str, Any]]:
    """Return the settings to run with, and what to note of the choice in the summary.

    Settings that leave nothing to a search come back as they are. With a record the candidates are printed and
    auto.json and auto.md are written, also when nothing fits.

    Raises DoesNotFit or ConfigError when no candidate can run the workload.
    """
    if not searches(config):
        return config, {}
    search = search_policies(config)
    if record is not None:
        record.write_json("auto.json", search_json(config, search))
        record.write_text("auto.md", search_markdown(config, search))
        _print(config, search)
    if search.chosen is None:
        raise search.error()
    settings = typed(search.chosen.settings)
    noted = {"choice": search.chosen.label, "settings": settings, "candidates": len(search.candidates)}
    return with_settings(config, search.chosen.settings), {"auto": noted}


def _print(config: RunConfig, search: Search) -> None:
    rows = candidate_rows(search, distinct=True)
    left = len(search.candidates) - min(len(rows), MAX_ROWS)
    title = f"policy=auto: {OBJECTIVE}. {sampling(search)}"
    console().print(table(title, COLUMNS, rows[:MAX_ROWS]))
    print(f"{left:,} more candidates, repeats among them, are in auto.md")
    print(*(f"- {reason}" for reason in why(config, search)), "", sep="\n")

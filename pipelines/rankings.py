"""Rankings of experts in a run on the device: the one that slots follow, and the one that the run has learned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from strata_jax.config.cache import ranking_file
from strata_jax.config.schema import RunConfig
from strata_jax.geometry import Geometry
from strata_jax.memory.expert_ranking import ExpertRanking
from strata_jax.memory.ranking_file import check_target, ranking_text, read_ranking, write_ranking
from strata_jax.report.record import RunRecord

if TYPE_CHECKING:
    from strata_jax.engine.runtime import Runtime

USED_FILE = "expert_ranking.json"


def given_ranking(config: RunConfig, record: RunRecord) -> ExpertRanking | None:
    """Read the ranking that cache.profile names, and keep it beside plan.json, which has its digest only."""
    file = ranking_file(config)
    if file is None:
        return None
    ranking = read_ranking(Path(file).expanduser())
    record.write_text(USED_FILE, ranking_text(ranking))
    return ranking


def check_learned_target(config: RunConfig, geometry: Geometry) -> None:
    """Make sure that the ranking this run learns may be written. Raises ConfigError."""
    target = _target(config)
    if target is not None:
        check_target(target, geometry.name, geometry.num_layers, geometry.num_experts)


def save_learned(config: RunConfig, runtime: Runtime | None, record: RunRecord) -> None:
    """Write what the run has learned so far, where cache.profile_save asks for it."""
    target = _target(config)
    if target is None:
        return
    ranking = None if runtime is None else runtime.learned()
    if ranking is None:
        note = f"cache.profile_save={target}: no decode window ran, so nothing was learned; the file stays as it was"
        record.event("note", text=note)
        print(f"- {note}")
        return
    write_ranking(target, ranking)
    record.event("ranking_saved", file=str(target), digest=ranking.digest, ranked=len(ranking.pairs))


def _target(config: RunConfig) -> Path | None:
    return None if config.cache.profile_save is None else Path(config.cache.profile_save).expanduser()

"""A given ranking of experts in simulations: the ranks that the popularity model deals out otherwise."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from strata_jax.config.cache import ranking_file
from strata_jax.config.fields import AUTO
from strata_jax.config.schema import RunConfig
from strata_jax.errors import ConfigError
from strata_jax.geometry import Geometry
from strata_jax.memory.expert_ranking import ExpertRanking
from strata_jax.memory.ranking_file import read_ranking
from strata_jax.memory.slot_order import SlotOrder, slot_order
from strata_jax.memory.strata.sizes import PackSizes


def ranking_of(config: RunConfig, geometry: Geometry) -> ExpertRanking | None:
    """Return the ranking of experts that cache.profile names; None: no file is named.

    Raises ConfigError or FormatError: it cannot be read, or is another model's.
    """
    file = ranking_file(config)
    if file is None:
        return None
    ranking = read_ranking(Path(file).expanduser())
    problem = ranking.model_problem(geometry.name, geometry.num_layers, geometry.num_experts)
    if problem is not None:
        raise ConfigError(problem)
    return ranking


def num_ranked(config: RunConfig, ranking: ExpertRanking) -> int:
    """Return how many experts of the trunk may have slots: what the file ranks, or fewer as given."""
    found, asked = trunk_order(ranking).num_ranked, config.cache.ranked
    given = found if asked == AUTO else int(asked)
    if given > found:
        raise ConfigError(
            f"cache.ranked={given} and cache.profile={ranking.file}: it ranks {found} experts of the trunk."
            f" Set cache.ranked={found} or less, or leave it at auto"
        )
    return given


def ranking_note(ranking: ExpertRanking, ranked: int | None) -> str:
    """Return the plan's line on the ranking that it follows."""
    return f"slots follow cache.profile={ranking.file}: {ranked or 0:,} experts ranked, digest {ranking.digest[:12]}"


def trunk_order(ranking: ExpertRanking) -> SlotOrder:
    """Return the order of the trunk's experts; the draft block's have no slots in the original's cache.

    Its pages mean nothing: slots of the original's cache are no pages.
    """
    return slot_order((1,) * ranking.num_layers, ranking.num_experts, ranking)


@lru_cache(maxsize=16)
def ranked_sizes(sizes: PackSizes, ranking: ExpertRanking) -> PackSizes:
    """Return the sizes whose rank r is the expert that a ranking has there, unranked ones last. Kept for repeats."""
    rank_layer = trunk_order(ranking).block.astype(np.int16)
    slot_bytes = np.zeros(sizes.num_layers, np.int64)
    slot_bytes[sizes.rank_layer] = sizes.rank_bytes
    rank_bytes = slot_bytes[rank_layer]
    rank_end_bytes = np.cumsum(rank_bytes)
    for array in (rank_layer, rank_bytes, rank_end_bytes):
        array.setflags(write=False)
    return replace(sizes, rank_layer=rank_layer, rank_bytes=rank_bytes, rank_end_bytes=rank_end_bytes)

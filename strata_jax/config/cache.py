"""Settings of the expert cache that cannot both hold; each message names both sides."""

from __future__ import annotations

from strata_jax.config.behaviour import AdaptConfig, CacheConfig
from strata_jax.config.checks import show
from strata_jax.config.choices import ExecutorName, PipelineName, Replacement
from strata_jax.config.executors import executor_of, has_strata_memory
from strata_jax.config.fields import AUTO
from strata_jax.config.schema import RunConfig

NO_RANKING = "none"


def ranking_file(config: RunConfig) -> str | None:
    """Return the file with the ranking of experts; None where no file is given."""
    return None if config.cache.profile in (AUTO, NO_RANKING) else config.cache.profile


def replacement_decay(config: RunConfig) -> float | None:
    """Return the factor of use counts where rounds replace experts: 0 is LRU; None: they do not."""
    return {Replacement.lru: 0.0, Replacement.lfu_decay: config.cache.lfu_decay}.get(config.cache.replacement)


def cache_contradictions(config: RunConfig) -> list[str]:
    """Return a message for every pair of cache settings that cannot both hold."""
    problems = []
    cache, pipeline = config.cache, config.pipeline.name
    on_device = executor_of(config) is ExecutorName.device
    for name, value in (("profile", cache.profile), ("profile_save", cache.profile_save)):
        if value == "":
            problems.append(f"cache.{name}='': name a file, or leave it out.")
    if cache.profile == NO_RANKING and on_device:
        problems.append(
            "cache.profile=none and executor=device: the device needs no ranking, blocks take turns without one. Leave"
            " cache.profile at auto."
        )
    if ranking_file(config) and cache.per_layer:
        problems.append(
            f"cache.profile={show(cache.profile)} and cache.per_layer=true: equal slots for every layer do not follow a"
            " ranking over all layers. Leave one out."
        )
    if cache.profile_save and pipeline is not PipelineName.generate:
        problems.append(
            f"cache.profile_save={show(cache.profile_save)} and pipeline={pipeline.name}: only pipeline=generate learns"
            " a ranking. Leave one out."
        )
    if cache.ranked != AUTO and ranking_file(config) and not has_strata_memory(config):
        problems.append(
            f"cache.ranked={cache.ranked} and memory_model=xla: it plans with all that {show(cache.profile)} ranks."
            " Leave cache.ranked at auto, or use memory_model=strata_0_1_41."
        )
    return problems + _replacement_contradictions(config)


def _replacement_contradictions(config: RunConfig) -> list[str]:
    cache, problems = config.cache, []
    rule = f"cache.replacement={cache.replacement.name}"
    if cache.lfu_decay != CacheConfig().lfu_decay and cache.replacement is not Replacement.lfu_decay:
        problems.append(
            f"cache.lfu_decay={cache.lfu_decay:g} and {rule}: only lfu_decay counts uses so. Leave one out."
        )
    if replacement_decay(config) is None:
        return problems
    for name, neutral in vars(AdaptConfig()).items():
        if getattr(cache.adapt, name) != neutral:
            problems.append(
                f"cache.adapt.{name}={show(getattr(cache.adapt, name))} and {rule}: swaps between rounds are those of"
                " cache.replacement=adaptive; inside the round nothing waits. Leave one out."
            )
    if executor_of(config) is ExecutorName.sim and config.executor.routing_trace is None:
        problems.append(
            f"{rule}, executor=sim and no executor.routing_trace: what replacement gains lies in the order of look-ups,"
            " which the popularity curve does not have; it is that of slots which have adapted already. Give a trace,"
            " or leave cache.replacement at static."
        )
    return problems

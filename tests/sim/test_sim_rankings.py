"""cache.profile=FILE in simulations: slot sizes, the ceiling, and hit rates of a routing trace follow the ranking."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from strata_jax.config import RunConfig
from strata_jax.errors import ConfigError
from strata_jax.memory.expert_ranking import ExpertRanking
from strata_jax.memory.ranking_file import write_ranking
from strata_jax.memory.strata.result import StrataPlan
from strata_jax.sim.popularity import ExpertTraffic, PopularityCurve
from strata_jax.sim.setup import SimInputs, complete_setup, plan_or_unfit, sim_inputs, sim_options
from strata_jax.sim.trace import RoutingTrace

Compose = Callable[[Sequence[str]], RunConfig]
LAYERS, EXPERTS = 48, 512
MODEL = ("hardware=rtx3090", "model=qwen38_flash", "quant=iq3_s")


def every_pair(order: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The experts of whole layers, one layer after the other."""
    return tuple((layer, expert) for layer in order for expert in range(EXPERTS))


def ranking(pairs: tuple[tuple[int, int], ...]) -> ExpertRanking:
    return ExpertRanking(LAYERS, EXPERTS, False, pairs)


@pytest.fixture
def inputs(compose_config: Compose, tmp_path: Path) -> Callable[..., SimInputs]:
    """Return the inputs of a simulation with a ranking in a file."""

    def make(known: ExpertRanking, *overrides: str) -> SimInputs:
        write_ranking(tmp_path / "r.json", known)
        return sim_inputs(compose_config([*MODEL, f"cache.profile={tmp_path / 'r.json'}", *overrides]))

    return make


def test_slots_have_the_sizes_that_the_ranking_gives_them(
    inputs: Callable[..., SimInputs], compose_config: Compose
) -> None:
    config = compose_config(MODEL)
    plain = sim_inputs(config).sizes
    by_size = sorted(range(LAYERS), key=lambda layer: (plain.blob_bytes[layer], layer))
    slots = []
    for order in (by_size, by_size[::-1]):
        found = inputs(ranking(every_pair(order)))
        assert found.sizes.rank_layer[::EXPERTS].tolist() == order
        assert sorted(found.sizes.rank_bytes) == sorted(plain.rank_bytes)
        assert found.sizes.rank_end_bytes[-1] == plain.rank_end_bytes[-1]
        made = plan_or_unfit(config, found)
        assert isinstance(made, StrataPlan)
        slots.append(made.slots)
    usual = plan_or_unfit(config, sim_inputs(config))
    assert isinstance(usual, StrataPlan)
    assert slots[0] > usual.slots > slots[1]  # small experts first, mixed, large ones first


@pytest.mark.parametrize(("overrides", "most"), [((), 3_000), (("cache.ranked=2000",), 2_000)])
def test_what_the_file_ranks_is_a_ceiling(
    inputs: Callable[..., SimInputs], compose_config: Compose, overrides: tuple[str, ...], most: int
) -> None:
    found = inputs(ranking(every_pair(range(LAYERS))[:3_000]), *overrides)
    made = plan_or_unfit(compose_config(MODEL), found)
    assert isinstance(made, StrataPlan)
    assert made.slots == found.request.ranked == most
    assert any(
        f"{most:,} experts ranked, digest {found.ranking and found.ranking.digest[:12]}" in n for n in found.notes
    )


def test_more_than_the_file_ranks_is_refused(inputs: Callable[..., SimInputs]) -> None:
    with pytest.raises(ConfigError, match=r"cache\.ranked=3001 and cache\.profile=.*it ranks 3000 .*ranked=3000"):
        inputs(ranking(every_pair(range(LAYERS))[:3_000]), "cache.ranked=3001")
    with pytest.raises(ConfigError, match="learned on the model 'another'"):
        inputs(replace(ranking(()), model="another"))
    with pytest.raises(ConfigError, match="47 layers with 512 each"):
        inputs(ExpertRanking(47, 512, False, ()))


def test_a_draft_blocks_ranks_are_left_out(inputs: Callable[..., SimInputs]) -> None:
    known = ExpertRanking(LAYERS, EXPERTS, True, ((48, 7), (3, 1), (48, 0), (0, 2)))
    found = inputs(known)
    assert found.request.ranked == 2
    assert found.sizes.rank_layer[:2].tolist() == [3, 0]


def test_hit_rates_of_a_trace_follow_the_ranking(inputs: Callable[..., SimInputs], compose_config: Compose) -> None:
    rng = np.random.default_rng(1)
    picks = [[rng.permutation(40)[:10] for _ in range(LAYERS)] for _ in range(30)]
    trace = RoutingTrace(np.array(picks, np.int32))
    counts = np.bincount((trace.experts + EXPERTS * np.arange(LAYERS)[None, :, None]).ravel(), minlength=24_576)
    hottest = np.argsort(-counts, kind="stable")
    rates = []
    for codes in (hottest, hottest[::-1]):
        known = ranking(tuple(divmod(int(code), EXPERTS) for code in codes))
        sizes = inputs(known).sizes
        ranked = replace(trace, order=codes.astype(np.int32))
        held = ExpertTraffic(sizes, PopularityCurve(), ranked).residency(np.arange(1_000, dtype=np.int32))
        rates.append(held.hit_rate)
        assert held.hit_rate == pytest.approx(counts[codes[:1_000]].sum() / counts.sum())
    alone = ExpertTraffic(sim_inputs(compose_config(MODEL)).sizes, PopularityCurve(), trace)
    assert alone.residency(np.arange(1_000, dtype=np.int32)).hit_rate == pytest.approx(rates[0])
    assert rates[1] == 0 < rates[0]


def test_the_simulator_replays_a_trace_in_the_rankings_order(
    inputs: Callable[..., SimInputs], compose_config: Compose, tmp_path: Path
) -> None:
    words: list[int] = []
    for _ in range(8):
        for layer in range(LAYERS):
            words += [layer, 1, layer, 0]  # expert number `layer` of each layer, weight 0
    np.array(words, "<i4").tofile(tmp_path / "trace.bin")
    pairs = list(every_pair(range(LAYERS)))
    random.Random(4).shuffle(pairs)
    found = inputs(ranking(tuple(pairs)))
    config = compose_config([*MODEL, f"executor.routing_trace={tmp_path / 'trace.bin'}"])
    made = plan_or_unfit(config, found)
    assert isinstance(made, StrataPlan)
    trace = complete_setup(config, found, made).options.trace
    assert trace is not None
    assert trace.ranks(LAYERS, EXPERTS)[0].tolist() == [pairs.index((layer, layer)) for layer in range(LAYERS)]
    alone = sim_options(config).trace
    assert alone is not None
    assert sorted(alone.ranks(LAYERS, EXPERTS)[0].tolist()) == list(range(LAYERS))


def test_the_xla_memory_model_follows_the_ranking_too(
    inputs: Callable[..., SimInputs], compose_config: Compose
) -> None:
    settings = ("memory_model=xla", "kv.type=int8")
    config = compose_config([*MODEL, *settings])
    made = plan_or_unfit(config, inputs(ranking(every_pair(range(LAYERS))[:960]), *settings))
    assert isinstance(made, StrataPlan)
    assert made.slots == 960 + 960 // LAYERS  # the draft block has as many as a layer

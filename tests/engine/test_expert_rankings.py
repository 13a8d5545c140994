"""A ranking decides which experts have slots and nothing else; a run learns one that serves it better the next time."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from strata_jax.engine.engine import Engine
from strata_jax.engine.runtime import Runtime
from strata_jax.geometry import Geometry
from strata_jax.gguf.reader import open_gguf
from strata_jax.memory.expert_ranking import ExpertRanking
from strata_jax.memory.plan import plan
from strata_jax.memory.ranking_file import ranking_text
from strata_jax.memory.request import PlanRequest
from strata_jax.policies.device import DeviceSettings
from strata_jax.policies.moves import MoveKind
from strata_jax.policies.policy import AdaptSettings
from tests.engine.policy_runs import (
    NUM_BLOCKS,
    NUM_EXPERTS,
    REQUEST,
    RULE,
    SMALL,
    Ask,
    Reference,
    Run,
    Sink,
    as_loaded,
    planned,
    settings_of,
    tokens,
)
from tests.oracle.models import ModelStore

LAYERS = NUM_BLOCKS - 1
SLOTS = 18
ASKS = (Ask("a", tokens(44, 1)), Ask("b", tokens(124, 2), 24), Ask("a", tokens(12, 3), 24))


@pytest.fixture(scope="module")
def path(models: ModelStore) -> Path:
    """Experts of three sizes, drafts that are right some of the time."""
    return models.synthetic("nano", 0, echo_mtp=0.1, overrides=SMALL | {"expert_width": [32, 64, 96]})


def shuffled(num_blocks: int, seed: int) -> ExpertRanking:
    pairs = [(block, expert) for block in range(num_blocks) for expert in range(NUM_EXPERTS)]
    random.Random(seed).shuffle(pairs)
    return ExpertRanking(LAYERS, NUM_EXPERTS, num_blocks > LAYERS, tuple(pairs), file="shuffled")


def load(path: Path, request: PlanRequest) -> Engine:
    file = open_gguf(path)
    geometry = Geometry.from_gguf(file)
    return Engine.load(file, geometry, plan(geometry, request))


def test_under_policies_a_ranking_moves_other_experts_and_no_bit(path: Path) -> None:
    policies = ("borrow", "kv_grow", "adaptive")
    ranking, sink = shuffled(NUM_BLOCKS, 1), Sink()
    request = replace(planned(path, policies).request, spec_window=2, ranking=ranking, decided=())
    engine = load(path, request)
    assert len(set(engine.plan.pages_per_expert)) == 3
    held = [engine.residency.expert_in(slot) for slot in range(engine.plan.expert_slots)]
    assert held == list(ranking.pairs[: engine.plan.expert_slots])
    runtime = Runtime.start(engine, settings_of(policies), rule=RULE, sink=sink, check=True, count_uses=True)
    roomy = PlanRequest(**REQUEST | {"spec_window": 2}, expert_slots=NUM_BLOCKS * NUM_EXPERTS)
    reference = Reference(load(path, roomy))
    run = Run(runtime, reference)
    for ask in ASKS:
        run.serve(ask)
    assert run.differences == []
    assert {
        MoveKind.EVICT, MoveKind.SWAP_EXPERT, MoveKind.LEND, MoveKind.RETURN, MoveKind.REFILL, MoveKind.MAP_CELLS
    } <= set(sink.kinds())  # fmt: skip
    learned = runtime.learned()
    assert learned is not None
    assert sorted(learned.pairs) == sorted(ranking.pairs)
    held = [engine.residency.expert_in(slot) for slot in range(engine.plan.expert_slots)]
    residents = {pair for pair in held if pair is not None}
    on_the_way = len(runtime.state.pending)
    assert residents <= set(learned.pairs[: len(residents) + on_the_way])
    split = len(residents) + on_the_way
    for part in (learned.usage[:split], learned.usage[split:]):
        assert list(part) == sorted(part, reverse=True)
    assert max(learned.usage) > 0
    assert learned.provenance["prior_digest"] == ranking.digest


class Learner:
    """One engine for runs that start from different rankings: experts of one size, so that every arena is the same."""

    def __init__(self, path: Path) -> None:
        self.geometry = Geometry.from_gguf(open_gguf(path))
        self.engine = load(path, self.request(None))

    def request(self, ranking: ExpertRanking | None) -> PlanRequest:
        return PlanRequest(**(REQUEST | {"spec_window": 1}), expert_slots=SLOTS, ranking=ranking)

    def start(self, ranking: ExpertRanking | None, settings: DeviceSettings) -> Runtime:
        self.engine.plan = plan(self.geometry, self.request(ranking))
        as_loaded(self.engine)
        return Runtime.start(self.engine, settings, check=True, count_uses=True)

    def decoded(
        self, ranking: ExpertRanking | None, settings: DeviceSettings, seeds: tuple[int, ...]
    ) -> tuple[tuple[int, ...], int, int, ExpertRanking]:
        """Return the tokens, look-ups and hits of the decode windows of a run, and what it learned."""
        runtime = self.start(ranking, settings)
        emitted: list[int] = []
        lookups = hits = 0
        for seed in seeds:
            reading = runtime.read(tokens(44, seed), conversation=str(seed))
            for record in runtime.decode(reading, max_tokens=64):
                emitted += record.emitted
                lookups, hits = lookups + record.lookups, hits + record.hits
            runtime.finish(reading)
        learned = runtime.learned()
        assert learned is not None
        return tuple(emitted), lookups, hits, learned


@pytest.fixture(scope="module")
def learner(models: ModelStore) -> Learner:
    return Learner(models.synthetic("nano", 0, echo_mtp=0.1, overrides=SMALL))


ADAPTIVE = DeviceSettings(adapt=AdaptSettings(every_rounds=2, least_usage=1.0, gap=0.5))


def test_a_static_run_that_starts_from_what_it_learned_finds_more_experts_in_slots(learner: Learner) -> None:
    text, lookups, hits, learned = learner.decoded(None, DeviceSettings(), (1, 2))
    again, same_lookups, more_hits, relearned = learner.decoded(learned, DeviceSettings(), (1, 2))
    assert (again, same_lookups) == (text, lookups)
    assert more_hits > hits
    assert sum(learned.usage) == lookups
    assert sum(learned.usage[:SLOTS]) == more_hits  # no other choice of experts has more
    assert relearned.usage == learned.usage  # uses of a run do not depend on who had slots
    assert list(learned.usage) == sorted(learned.usage, reverse=True)


def test_an_adaptive_run_that_starts_from_what_it_learned_finds_more_experts_in_slots(learner: Learner) -> None:
    text, lookups, hits, learned = learner.decoded(None, ADAPTIVE, (1,))
    again, same_lookups, more_hits, _ = learner.decoded(learned, ADAPTIVE, (1,))
    assert (again, same_lookups) == (text, lookups)
    assert more_hits > hits


def test_runs_learn_the_same_every_time(learner: Learner) -> None:
    first, second = (learner.decoded(shuffled(LAYERS, 3), ADAPTIVE, (1,)) for _ in range(2))
    assert first == second
    assert ranking_text(first[3]) == ranking_text(second[3])


def test_without_a_decode_window_nothing_is_learned(learner: Learner) -> None:
    runtime = learner.start(None, DeviceSettings())
    assert runtime.learned() is None
    runtime.finish(runtime.read(tokens(16, 1)))
    assert runtime.learned() is None


def test_bytes_in_the_slots_are_those_of_the_ranked_experts(learner: Learner) -> None:
    ranking = shuffled(LAYERS, 2)
    learner.start(ranking, DeviceSettings())
    engine, layout = learner.engine, learner.engine.plan.arena
    arena = np.asarray(engine.arena)
    for slot, (block, expert) in enumerate(ranking.pairs[:SLOTS]):
        blob = np.asarray(engine.banks[block].blobs[expert]).reshape(-1)
        first = layout.slot_first_page[slot]
        found = arena[first : first + layout.slot_num_pages[slot]].reshape(-1)
        assert np.array_equal(found[: len(blob)], blob), (slot, block, expert)

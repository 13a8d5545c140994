"""Which expert gets which slot: in turns without a ranking, and as a ranking says."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_jax.errors import ConfigError
from strata_jax.gguf.layout import EXPERT_STACKS
from strata_jax.memory.expert_ranking import ExpertRanking
from strata_jax.memory.plan import MemoryPlan, plan, try_plan
from strata_jax.memory.request import MovingMemory, PlanRequest
from strata_jax.memory.slot_order import slot_order
from tests.memory.planner_models import SMALL, with_tensors

PAGES = st.lists(st.integers(1, 50), min_size=1, max_size=8).map(tuple)
LAYERS, EXPERTS = 4, 16


def types(name: str) -> str:
    """Experts of three sizes."""
    return ("F32", "F16", "Q4_0")[int(name.split(".")[1]) % 3] if name.endswith(EXPERT_STACKS) else "F32"


MODEL = with_tensors(SMALL, types)
SKEWED = tuple((layer, expert) for layer in (2, 0, 3, 1) for expert in range(EXPERTS - 1, -1, -1))


def ranking(pairs: tuple[tuple[int, int], ...] = SKEWED, *, with_draft: bool = False) -> ExpertRanking:
    return ExpertRanking(LAYERS, EXPERTS, with_draft, pairs, file="r.json")


REQUEST = PlanRequest(
    context_cells=256, chunk_tokens=64, spec_window=1, device_budget_bytes=2**30, page_bytes=4096, ranking=ranking()
)


@given(pages=PAGES, num_experts=st.integers(1, 40), data=st.data())
def test_without_a_ranking_blocks_take_turns(pages: tuple[int, ...], num_experts: int, data: st.DataObject) -> None:
    order = slot_order(pages, num_experts)
    slots = data.draw(st.integers(0, len(pages) * num_experts))
    walked = [(slot % len(pages), slot // len(pages)) for slot in range(slots)]
    assert list(order.pairs(slots)) == walked
    assert order.pages(slots) == sum(pages[block] for block, _ in walked)
    assert order.num_ranked == len(pages) * num_experts
    assert order.slots_by_block(slots) == [sum(block == b for block, _ in walked) for b in range(len(pages))]


@given(data=st.data(), pages=PAGES, num_experts=st.integers(1, 12))
def test_slots_follow_a_ranking_and_hold_every_expert_once(
    data: st.DataObject, pages: tuple[int, ...], num_experts: int
) -> None:
    every = [(layer, expert) for layer in range(len(pages)) for expert in range(num_experts)]
    shuffled = data.draw(st.permutations(every))
    pairs = tuple(shuffled[: data.draw(st.integers(0, len(every)))])
    order = slot_order(pages, num_experts, ExpertRanking(len(pages), num_experts, False, pairs))
    assert tuple(order.pairs(len(pairs))) == pairs
    assert sorted(order.pairs(len(every))) == every
    assert order.num_ranked == len(pairs)
    assert [order.pages(n) for n in range(len(every) + 1)] == [
        0, *accumulate(pages[block] for block, _ in order.pairs(len(every)))
    ]  # fmt: skip
    need = data.draw(st.integers(0, 2 * order.pages(len(every))))
    fewest = order.slots_with(need)
    assert order.pages(fewest) >= need or fewest == len(every)
    assert fewest == 0 or order.pages(fewest - 1) < need


def test_a_draft_block_without_ranks_gets_the_slots_of_a_layer() -> None:
    pairs = tuple((layer, expert) for expert in range(3) for layer in (1, 0))
    made = slot_order((1, 1, 1), 4, ExpertRanking(2, 4, False, pairs))
    assert list(made.pairs(9)) == [(1, 0), (0, 0), (2, 0), (1, 1), (0, 1), (2, 1), (1, 2), (0, 2), (2, 2)]
    assert made.num_ranked == 9
    assert list(made.pairs(12))[9:] == [(0, 3), (1, 3), (2, 3)]


def test_ranks_of_a_draft_block_count_only_where_it_is_loaded() -> None:
    known = ExpertRanking(2, 2, True, ((2, 1), (0, 0), (2, 0), (1, 1)))
    assert list(slot_order((1, 1, 1), 2, known).pairs(4)) == [(2, 1), (0, 0), (2, 0), (1, 1)]
    alone = slot_order((1, 1), 2, known)
    assert (list(alone.pairs(2)), alone.num_ranked) == ([(0, 0), (1, 1)], 2)


# --- plans


def test_slots_have_the_size_of_the_experts_that_the_ranking_puts_there() -> None:
    made = plan(MODEL, replace(REQUEST, expert_slots=20))
    assert len(set(made.pages_per_expert)) > 1
    assert tuple(made.resident_pairs()) == SKEWED[:20]
    assert made.arena.slot_num_pages == tuple(made.pages_per_expert[block] for block, _ in SKEWED[:20])
    assert made.slot_pages == sum(made.arena.slot_num_pages)
    assert made.slot_pages != plan(MODEL, replace(REQUEST, expert_slots=20, ranking=None)).slot_pages


@pytest.mark.parametrize("window", [1, 4])
def test_a_ranking_is_a_ceiling_on_the_slots(window: int) -> None:
    short = replace(REQUEST, spec_window=window, ranking=ranking(SKEWED[:20]))
    most = 20 + (5 if window > 1 else 0)  # one of the draft block's after every four
    made = plan(MODEL, short)
    assert made.expert_slots == most
    reason = next(choice.reason for choice in made.choices if choice.field == "expert_slots")
    assert "cache.profile=r.json ranks" in reason
    assert any(f"{most} of {16 * made.num_blocks} experts ranked" in note for note in made.notes)
    assert plan(MODEL, replace(short, expert_slots=most)).expert_slots == most
    with pytest.raises(ConfigError) as error:
        plan(MODEL, replace(short, expert_slots=most + 1))
    assert f"cache.slots={most + 1} and cache.profile=r.json: it ranks {most} experts" in str(error.value)
    assert f"cache.slots={most} or less" in str(error.value)


def test_on_a_cpu_a_short_ranking_limits_the_slots_of_one_token() -> None:
    request = replace(REQUEST, device_budget_bytes=None, ranking=ranking(SKEWED[:5]))
    assert plan(MODEL, request).expert_slots == 5


@pytest.mark.parametrize(
    ("given_ranking", "message"),
    [
        (ExpertRanking(5, 16, False, (), file="x"), "it ranks the experts of 5 layers with 16 each; the model small"),
        (ExpertRanking(4, 8, False, (), file="x"), "4 layers with 8 each; the model small has 4 layers with 16"),
        (ExpertRanking(4, 16, False, (), "other", file="x"), "learned on the model 'other'; this one is 'small'"),
    ],
)  # fmt: skip
def test_another_models_ranking_is_refused(given_ranking: ExpertRanking, message: str) -> None:
    with pytest.raises(ConfigError, match=r"cache\.profile=x") as error:
        plan(MODEL, replace(REQUEST, ranking=given_ranking))
    assert message in str(error.value)


def test_a_plan_in_a_file_has_the_digest_and_comes_back_with_the_ranking_only() -> None:
    made = plan(MODEL, replace(REQUEST, expert_slots=20))
    text = json.dumps(made.to_json())
    assert ranking().digest in text
    assert len(text) < len(json.dumps(plan(MODEL, replace(REQUEST, expert_slots=20, ranking=None)).to_json())) + 500
    back = MemoryPlan.from_json(json.loads(text), ranking())
    assert back == made
    assert tuple(back.resident_pairs()) == SKEWED[:20]
    with pytest.raises(ConfigError, match=r"r\.json with digest .* none is given"):
        MemoryPlan.from_json(json.loads(text))
    other = ranking((*SKEWED[1:], SKEWED[0]))
    with pytest.raises(ConfigError, match=other.digest[:12]):
        MemoryPlan.from_json(json.loads(text), other)
    plain = plan(MODEL, replace(REQUEST, ranking=None))
    with pytest.raises(ConfigError, match="made without a ranking"):
        MemoryPlan.from_json(json.loads(json.dumps(plain.to_json())), other)


SMALL_FIRST = tuple((layer, expert) for layer in (2, 0, 3, 1) for expert in range(EXPERTS))


@given(
    pairs=st.permutations(SMALL_FIRST).map(tuple) | st.just(SMALL_FIRST) | st.just(SMALL_FIRST[::-1]),
    slots=st.integers(8, 64),
    chunk=st.sampled_from((64, 256)),
    grow=st.sampled_from((None, 32)),
)
def test_arenas_of_any_order_hold_what_moves(
    pairs: tuple[tuple[int, int], ...], slots: int, chunk: int, grow: int | None
) -> None:
    """Segments begin at slots, every array holds the largest expert, and the ledger has every page."""
    moving = MovingMemory(lend=True, own="off", grow_init_cells=grow, floor_slots=4)
    request = replace(REQUEST, expert_slots=slots, chunk_tokens=chunk, moving=moving, ranking=ranking(pairs))
    made = try_plan(MODEL, request)
    if not isinstance(made, MemoryPlan):
        return  # more is to be borrowed than these slots have
    arena = made.arena
    assert min(arena.array_pages) >= max(made.pages_per_expert)
    assert sum(arena.slot_num_pages) == made.slot_pages == made.order.pages(slots)
    assert made.lent_bytes(arena.num_segments) == sum(arena.array_pages[1:]) * made.page_bytes
    assert [made.pages_per_expert[block] for block, _ in made.resident_pairs()] == list(arena.slot_num_pages)


def test_a_core_of_the_smallest_experts_still_holds_the_largest() -> None:
    """The program that applies an expert reads as many pages as the largest one has."""
    moving = MovingMemory(lend=True, own="off", floor_slots=4)
    made = plan(MODEL, replace(REQUEST, context_cells=16, expert_slots=20, moving=moving, ranking=ranking(SMALL_FIRST)))
    assert made.segment_slots
    assert made.arena.core_pages >= max(made.pages_per_expert) > 4 * min(made.pages_per_expert) + made.kv_pages

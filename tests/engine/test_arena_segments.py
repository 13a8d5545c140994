"""The arena in pieces: where slots and pages lie, who owns them, and programs that read several arrays."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.engine.arena import read_pages
from strata_jax.engine.residency import Fill, PageMove, Residency, first_residency
from strata_jax.errors import ConfigError
from strata_jax.memory.segments import ArenaLayout, arena_layout

PAGES = (3, 2, 4)  # slots of three blocks
NUM_EXPERTS = 6


def layout(**changes: object) -> ArenaLayout:
    """Ten slots, the last five in two segments; K/V of two layers, three of seven groups mapped."""
    settings: dict = {
        "pages_per_expert": PAGES, "slot_blocks": [slot % 3 for slot in range(10)], "segment_slots": (3, 2),
        "num_kv_layers": 2, "context_cells": 26, "kv_mapped_cells": 10, "cells_per_page": 4, "spare_pages": 1,
        "page_bytes": 512,
    }  # fmt: skip
    return arena_layout(**(settings | changes))


def tables(num_filled: int = 10, **changes: object) -> Residency:
    pairs = [(slot % 3, slot // 3) for slot in range(num_filled)]
    return first_residency(layout(**changes), PAGES, NUM_EXPERTS, pairs)


# --- layout


def test_slots_come_first_then_cells_then_segments() -> None:
    made = layout()
    assert made.slot_first_page[:5] == (0, 3, 5, 9, 12)
    assert made.kv_first_page == 14
    assert made.array_pages == (14 + 2 * 3 + 1, 4 + 3 + 2, 4 + 3)
    assert made.slot_first_page[5:] == (21, 25, 28, 30, 34)
    assert [made.locate(page) for page in (0, 20, 21, 29, 30, 36)] == [(0, 0), (0, 20), (1, 0), (1, 8), (2, 0), (2, 6)]
    assert [list(made.slots_of_segment(i)) for i in (0, 1)] == [[5, 6, 7], [8, 9]]
    assert (made.start_groups, made.num_groups, made.cells(3), made.cells(7)) == (3, 7, 12, 26)


def test_without_segments_it_is_one_array_with_all_cells() -> None:
    made = layout(segment_slots=(), kv_mapped_cells=26)
    assert made.array_pages == (14 + 16 + 14 + 1,)
    assert made.slot_first_page == (0, 3, 5, 9, 12, 14, 18, 21, 23, 27)
    assert made.kv_first_page == 30


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segment_slots": (1,) * 9}, "9 segments; an arena has 8"),
        ({"segment_slots": (8, 3)}, "11 slots; there are 10"),
        ({"segment_slots": (4, 1)}, "segment 1 has 3 pages; it needs the 4"),
        ({"slot_blocks": (0, 1, 2, 0), "segment_slots": (4,), "kv_mapped_cells": 4}, "core of the arena has 3 pages"),
    ],
    ids=["many", "more than all", "short segment", "short core"],
)
def test_layouts_that_programs_cannot_read_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout(**changes)


# --- owners


def test_every_page_has_the_owner_that_the_layout_gives_it() -> None:
    found = tables()
    found.check()
    owners = found.owners()
    assert Counter(owners[owners < 10].tolist()) == {-1: 1} | {slot: PAGES[slot % 3] for slot in range(10)}
    assert sorted(owners[owners >= 10]) == [10 + layer * 7 + group for layer in (0, 1) for group in (0, 1, 2)]
    assert found.free_pages().tolist() == [20]
    assert found.mapped_cells == 12
    assert found.expert_in(4) == (1, 1)


def broken(**arrays: object) -> Residency:
    return replace(tables(9), **arrays)


def edited(name: str, place: object, value: int) -> Residency:
    array = getattr(tables(9), name).copy()
    array[place] = value
    return broken(**{name: array})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda: edited("kv_pages", (0, 1), 16), "has 2 owners"),
        (lambda: edited("kv_pages", (0, 1), 3), "has 2 owners"),
        (lambda: edited("kv_pages", (0, 1), 99), "outside"),
        (lambda: edited("kv_pages", (0, 1), -1), "no prefix"),
        (lambda: edited("kv_pages", (0, 3), 20), "no prefix"),
        (lambda: edited("slot_of", (0, 0), -1), "disagree"),
        (lambda: edited("slot_of", (2, 5), 9), "disagree"),
        (lambda: edited("occupant", 9, 1), "disagree"),
        (lambda: edited("slot_page", 9, -1), "no slot's"),
        (lambda: edited("slot_page", 4, 20), "2 owners|not where"),
        (lambda: edited("slot_page", 0, -1), "belongs to the K/V"),
        (lambda: broken(segments=1), "is lent"),
        (lambda: broken(expert_pages=np.array([3, 2, 5], np.int32)), "too small"),
    ],
)
def test_what_must_hold_of_the_tables_is_checked(state, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        state().check()


# --- edits


def test_edits_that_cannot_be_are_refused_and_change_nothing() -> None:
    before = tables(9)
    for edit, message in (
        (lambda: before.filled([Fill(0, 5, 0)]), "slot 0 holds"),
        (lambda: before.filled([Fill(0, 0, 9)]), "in slot 0 already"),
        (lambda: before.filled([Fill(2, 5, 9)]), "too small"),
        (lambda: before.filled([Fill(0, 4, 9), Fill(0, 5, 9)]), "holds"),
        (lambda: before.lent(3), "segments"),
        (lambda: before.taken_back(1), "segments"),
        (lambda: before.lent(1).filled([Fill(0, 5, 9)]), "lent"),
        (lambda: before.mapped(27), "context has 26"),
        (lambda: before.mapped(20), "4 pages more; 1 are free"),
        (lambda: before.mapped(20, [5]), "in a segment"),
        (lambda: before.mapped(20, [3, 3]), "already"),
        (lambda: before.trimmed(13), "12 are mapped"),
    ):
        with pytest.raises(ValueError, match=message):
            edit()
    before.check()
    assert before.segments == 2
    assert (before.occupant >= 0).sum() == 9


def test_lent_slots_lose_their_experts_and_come_back_empty() -> None:
    start = tables()
    lent = start.lent(1)
    lent.check()
    assert lent.residents(range(8)) == start.residents(range(8))
    assert lent.residents([8, 9]) == ()
    assert (lent.slot_of >= 0).sum() == 8
    assert lent.num_present == 8
    back = lent.taken_back(1)
    back.check()
    again = back.filled(start.residents([8, 9]))
    assert np.array_equal(again.slot_of, start.slot_of)


def test_slots_pay_for_cells_and_come_back_when_they_are_trimmed() -> None:
    start = tables()
    assert start.slots_to_pay(14, [4, 3]) == (4,)
    assert start.slots_to_pay(20, [4, 3]) == (4, 3)
    assert start.slots_to_pay(26, [4]) is None
    grown = start.mapped(20, [4, 3])
    grown.check()
    assert (grown.mapped_cells, len(grown.free_pages())) == (20, 1 + 2 + 3 - 4)
    assert grown.residents([3, 4]) == ()
    assert grown.slots_to_pay(26, [4, 3, 2]) == (2,)
    assert np.array_equal(grown.kv_pages[:, :3], start.kv_pages[:, :3])
    trimmed, moves, slots = grown.trimmed(12)
    trimmed.check()
    assert (slots, moves) == ((3, 4), ())
    assert trimmed.mapped_cells == 12
    assert trimmed.free_pages().tolist() == [20]


def test_pages_in_the_way_are_moved_when_slots_are_put_together() -> None:
    grown = tables().mapped(26, [0, 1, 2])  # 9 pages and the spare one for 4 groups of 2 layers
    trimmed, moves, slots = grown.trimmed(16)
    trimmed.check()
    assert trimmed.mapped_groups == 4
    kept = {int(p) for p in grown.kv_pages[:, :4].reshape(-1)}
    assert {move.source for move in moves} <= kept
    assert not {move.target for move in moves} & kept
    where = {move.source: move.target for move in moves}
    moved = [[where.get(int(p), int(p)) for p in row] for row in grown.kv_pages[:, :4]]
    assert moved == trimmed.kv_pages[:, :4].tolist()
    # 10 pages are not a slot's; 2 groups need 2 of them; the slots of 2, 3 and 4 pages cannot all come back
    assert sum(PAGES[slot] for slot in slots) + len(trimmed.free_pages()) == 8
    assert len(slots) == 2


def test_a_thousand_random_edits_lose_nothing() -> None:
    rng = np.random.default_rng(0)
    now, done = tables(num_filled=0, spare_pages=3), Counter()
    bytes_at = np.full(now.layout.num_pages, -1)  # what the pages hold: which cells

    def move(moves: tuple[PageMove, ...]) -> None:
        bytes_at[[m.target for m in moves]] = bytes_at[[m.source for m in moves]]

    def cells() -> np.ndarray:
        return np.arange(2 * 7).reshape(2, 7)[:, : now.mapped_groups]

    bytes_at[now.kv_pages[:, :3]] = cells()
    for _ in range(1000):
        slots, before = rng.permutation(10).tolist(), now
        edit = str(rng.choice(["fill", "evict", "lend", "return", "map", "trim"]))
        try:
            if edit == "fill":
                now = now.filled([Fill(int(rng.integers(3)), int(rng.integers(6)), slots[0])])
            elif edit == "evict":
                now = now.evicted(slots[:2])
            elif edit == "lend":
                now = now.lent(1)
            elif edit == "return":
                now = now.taken_back(1)
            elif edit == "map":
                wanted = int(rng.integers(1, 27))
                now = now.mapped(wanted, now.slots_to_pay(wanted, slots) or ())
                new = slice(before.mapped_groups, now.mapped_groups)
                bytes_at[now.kv_pages[:, new]] = cells()[:, new]
            else:
                now, moves, _ = now.trimmed(int(rng.integers(0, 27)))
                move(moves)
                done["move"] += len(moves)
        except ValueError:
            continue
        done[edit] += now is not before
        now.check()
        np.testing.assert_array_equal(bytes_at[now.kv_pages[:, : now.mapped_groups]], cells())
    assert len(done) == 7
    assert min(done.values()) >= 30, done


# --- several arrays in a program


def test_pages_are_read_from_the_array_that_they_lie_in() -> None:
    pages = np.arange(11 * 3, dtype=np.uint32).reshape(11, 3)
    arrays = tuple(jnp.asarray(part) for part in np.split(pages, [5, 9]))
    read = jax.jit(read_pages, static_argnames="count")
    for first in (0, 1, 3, 5, 7, 9):
        np.testing.assert_array_equal(read(arrays, jnp.int32(first), count=2), pages[first : first + 2])


def test_one_array_is_read_without_a_choice() -> None:
    jaxpr = jax.make_jaxpr(lambda a, page: read_pages((a,), page, 2))(jnp.zeros((5, 3), jnp.uint32), jnp.int32(1))
    assert {str(eqn.primitive) for eqn in jaxpr.eqns} <= {
        "dynamic_slice",
        "lt",
        "add",
        "select_n",
        "convert_element_type",
    }

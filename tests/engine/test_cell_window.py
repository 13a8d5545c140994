"""The window of K/V pages as tables: wherever a sequence goes on, every live cell is where they say. No device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from strata_jax.engine.cell_window import slid, window_before
from strata_jax.engine.residency import Residency, first_residency
from strata_jax.memory.segments import arena_layout

LAYERS, CELLS, GROUPS, SIZE = 3, 4, 13, 5  # the last page is cut by the context
CONTEXT = GROUPS * CELLS - 3


def tables() -> Residency:
    layout = arena_layout(
        pages_per_expert=(2, 1), slot_blocks=(0, 1, 0), segment_slots=(), num_kv_layers=LAYERS, context_cells=CONTEXT,
        kv_mapped_cells=SIZE * CELLS, cells_per_page=CELLS, spare_pages=1, page_bytes=64, has_window=True,
    )  # fmt: skip
    return first_residency(layout, (2, 1), 2, [(0, 0), (1, 0), (0, 1)])


class Shadow:
    """What lies where, and what should: group by group, numbered by when it was last written."""

    def __init__(self) -> None:
        self.now, self.clock = tables(), 0
        self.arena = np.full(self.now.layout.num_pages, -1)
        self.store, self.truth = np.full(LAYERS * GROUPS, -1), np.zeros((LAYERS, GROUPS), int)

    def go_on(self, live: int, end: int) -> bool:
        """Write the cells from ``live`` to ``end``; returns whether the window had to move."""
        slide = slid(self.now, live, end)
        if slide is not None:
            assert len(set(slide.pages.tolist())) == len(set(slide.rows.tolist())) == len(slide.rows)
            if slide.forward:
                self.store[slide.rows] = self.arena[slide.pages]
            else:
                self.arena[slide.pages] = self.store[slide.rows]
            self.check(live)  # the old tables stay valid until the new ones are published
            self.now = slide.residency
        self.now.check()
        self.check(live)
        first, last = live // CELLS, -(-end // CELLS)
        self.clock += 1
        self.truth[:, first:last] = self.clock
        pages = self.now.kv_pages[:, first:last]
        assert (pages >= 0).all(), "a cell is to be written that has no page"
        self.arena[pages] = self.clock
        self.check(end)
        return slide is not None

    def check(self, live: int) -> None:
        groups = np.arange(-(-live // CELLS))
        pages = self.now.kv_pages[:, groups]
        rows = np.stack([self.now.store_rows(layer, groups) for layer in range(LAYERS)])
        np.testing.assert_array_equal(np.where(pages >= 0, self.arena[pages], self.store[rows]), self.truth[:, groups])


@pytest.mark.parametrize("seed", range(20))
def test_live_cells_are_where_the_tables_say_wherever_a_sequence_goes_on(seed: int) -> None:
    shadow, rng, live, moved = Shadow(), np.random.default_rng(seed), 0, 0
    for _ in range(200):
        if rng.random() < 0.2:  # go back, far or a little, or begin anew
            live = int(rng.choice([0, rng.integers(0, live + 1), max(0, live - rng.integers(0, 6))]))
        end = min(CONTEXT, live + int(rng.integers(1, (SIZE - 1) * CELLS + 1)))
        if end > live:
            moved += shadow.go_on(live, end)
            live = end - int(rng.integers(0, min(3, end - live)))  # rejected drafts
    assert moved > 20


def test_the_window_ends_with_what_is_written_and_moves_no_further_than_it_must() -> None:
    now = tables()
    assert slid(now, 0, SIZE * CELLS) is None
    slide = slid(now, SIZE * CELLS - 1, SIZE * CELLS + 1)
    assert slide is not None
    assert (slide.forward, slide.residency.first_group, slide.num_cells) == (True, 1, CELLS)
    assert slide.rows.tolist() == [0, GROUPS, 2 * GROUPS]
    assert slide.pages.tolist() == now.kv_pages[:, 0].tolist() == slide.residency.kv_pages[:, SIZE].tolist()
    back = slid(slide.residency, 2, 5)
    assert back is not None
    assert (back.forward, back.residency.first_group, back.num_cells) == (False, 0, CELLS)
    anew = slid(slide.residency, 0, 5)
    assert anew is not None
    assert (len(anew.pages), anew.num_cells) == (0, 0)  # nothing is worth a copy
    assert window_before(now, CONTEXT).first_group == GROUPS - SIZE
    assert window_before(window_before(now, CONTEXT), 3).first_group == 0


def test_what_a_window_cannot_do_is_refused() -> None:
    now = tables()
    with pytest.raises(ValueError, match="cells 3 to 21 are to be written; the window has 5 pages of 4 cells"):
        slid(now, 3, SIZE * CELLS + 1)
    for edit in (lambda: now.mapped(CONTEXT), lambda: now.trimmed(4)):
        with pytest.raises(ValueError, match="are a window"):
            edit()
    still = replace(now, layout=replace(now.layout, has_window=False))
    with pytest.raises(ValueError, match="are no window"):
        window_before(still, CONTEXT)
    torn = now.kv_pages.copy()
    torn[:, 2] = -1
    with pytest.raises(ValueError, match="no run that all layers share"):
        replace(now, kv_pages=torn).check()
    moved = window_before(now, CONTEXT)
    with pytest.raises(ValueError, match="no prefix that all layers share"):
        replace(moved, layout=still.layout).check()

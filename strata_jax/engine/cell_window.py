"""Where the window of K/V cells on the device goes next, and which groups of cells are copied for it. Pure.

The window is as many groups in a row as each attention layer has pages; the others are rows of the store in host
memory, where a row is valid while its group has no page.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata_jax.engine.residency import Residency


@dataclass(frozen=True, slots=True, eq=False)
class Slide:
    """The window of K/V cells moved to another place.

    Attributes:
        residency: the tables then.
        forward: whether cells leave for the store; else they come from there.
        pages, rows: i32[n], the pages that are copied to rows of the store, or from them.
        num_cells: of each layer that are copied.
    """

    residency: Residency
    forward: bool
    pages: NDArray[np.int32]
    rows: NDArray[np.int32]
    num_cells: int


def slid(now: Residency, live_cells: int, end: int) -> Slide | None:
    """Return the window that holds the cells from ``live_cells`` to ``end``, the sequence going on from there.

    It ends with the last of them, and reaches back as far as it is long; what it loses at its end is past the
    sequence's. None if the present one holds them.
    """
    cells, size, old = now.layout.cells_per_page, now.mapped_groups, now.first_group
    first, last = live_cells // cells, now.layout.groups(end)
    if old <= first and last <= old + size:
        return None
    if last - first > size:
        raise ValueError(
            f"cells {live_cells:,} to {end:,} are to be written; the window has {size} pages of {cells} cells"
        )
    leaving, coming = _changes(now, end)
    forward, live = coming[0] > old, now.layout.groups(live_cells)
    groups = np.array([group for group in (leaving if forward else coming) if group < live], np.int64)
    moved = now.with_window(leaving, coming)
    places = (now if forward else moved).kv_pages[:, groups]
    rows = np.concatenate([now.store_rows(layer, groups) for layer in range(len(now.kv_pages))])
    return Slide(moved, forward, places.reshape(-1), rows, len(groups) * cells)


def window_before(now: Residency, end: int) -> Residency:
    """Return the tables with the window over the last cells before ``end``, whatever is in it."""
    return now.with_window(*_changes(now, end))


def _changes(now: Residency, end: int) -> tuple[list[int], list[int]]:
    """The groups that leave and that come if the window is to end with the last cell before ``end``."""
    size, old = now.mapped_groups, now.first_group
    new = max(0, now.layout.groups(end) - size)
    here, there = range(old, old + size), range(new, new + size)
    return [group for group in here if group not in there], [group for group in there if group not in here]

"""`kv.resident_cells`: the whole K/V in host memory and a window of the last cells on the device. Checks and texts.

A chunk or a round writes its cells into the window, wherever in a page it begins; so the window holds that many cells
and a page more. Where the window is not smaller than the context everything is on the device, as without the setting.
"""

from __future__ import annotations

from strata_jax.errors import ConfigError
from strata_jax.memory.candidate import Frame
from strata_jax.memory.ledger import MIB


def window_holds(frame: Frame, context_cells: int, chunk_tokens: int) -> bool:
    """Whether all cells are on the device or the window is large enough for a chunk and a round."""
    if not frame.keeps_cells_in_host(context_cells):
        return True
    return frame.least_resident_cells(chunk_tokens) <= frame.first_cells(context_cells)


def check_window(frame: Frame, context_cells: int, chunk_tokens: int) -> None:
    """Raise ConfigError, with what would work, if a chunk or a round writes more cells than the window has."""
    if window_holds(frame, context_cells, chunk_tokens):
        return
    page, least = frame.cells_per_page, frame.least_resident_cells(chunk_tokens)
    given, cells = frame.request.moving.resident_cells, frame.num_cells(context_cells)
    writes = least - page
    what = f"prefill.chunk={chunk_tokens}: a chunk"
    smaller = f", or prefill.chunk={frame.first_cells(context_cells) - page} or less"
    if writes > chunk_tokens or not window_holds(frame, context_cells, 1):
        what, smaller = f"spec.window={frame.request.spec_window}: a round", ""
    more = f"kv.resident_cells={least} or more" if least < cells else "kv.resident_cells=0, all cells on the device"
    raise ConfigError(
        f"kv.resident_cells={given} and {what} writes up to {writes} K/V cells of every attention layer and may begin"
        f" inside a page of {page}, so {least} cells must be on the device. Set {more}{smaller}"
    )


def window_note(frame: Frame, context_cells: int, mapped_cells: int) -> str | None:
    """Say where the cells are, for the plan; None without the setting."""
    given, cells = frame.request.moving.resident_cells, frame.num_cells(context_cells)
    if not given:
        return None
    if not frame.keeps_cells_in_host(context_cells):
        return f"kv.resident_cells={given:,}: the context has {cells:,} cells, all of them are on the device"
    rounded = "" if mapped_cells == given else f", whole pages of {frame.cells_per_page:,}"
    size = frame.kv_pages(cells) * frame.page_bytes / MIB
    return (
        f"kv.resident_cells={given:,}: the last {mapped_cells:,} of {cells:,} cells of each attention layer are on the"
        f" device{rounded}; all have a place in host memory ({size:,.1f} MiB)"
    )

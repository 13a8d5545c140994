"""A frame for candidates of a plan: all of a model and a request that does not depend on context, chunk and slots."""

from __future__ import annotations

from functools import lru_cache

from strata_jax.errors import ConfigError
from strata_jax.kv_types import cell_bytes
from strata_jax.memory import layout
from strata_jax.memory.candidate import Frame
from strata_jax.memory.fixed_entries import model_entries, reserve_entries
from strata_jax.memory.ledger import Memory, phase_totals
from strata_jax.memory.request import Choice, Origin, PlanRequest
from strata_jax.memory.sizes import ModelSizes
from strata_jax.memory.slot_order import slot_order
from strata_jax.memory.staging import choose_stage_bytes, stage_need


def make_frame(sizes: ModelSizes, request: PlanRequest) -> Frame:
    """Work out all that does not depend on context, chunk and slots. `request` has passed `check_request`."""
    g = sizes.geometry
    with_draft = request.spec_window > 1 and g.num_mtp_layers > 0
    cell = sum(cell_bytes(request.kv_type, g.num_kv_heads, g.head_dim))
    blobs = sizes.blobs[: sizes.blocks(with_draft)]
    if request.page_bytes is None:
        value, waste = _auto_page(blobs, cell, sizes.block_cells)
        reason = f"largest power of two up to 64 KiB that wastes < 3 % of the slots ({waste:.2f} %)"
        if waste >= 100 * layout.MAX_SLOT_WASTE_FRAC:
            reason = f"none wastes < 3 % of the slots; this one wastes least ({waste:.2f} %)"
        page_choice = Choice("page_bytes", value, Origin.COMPUTED, reason)
    else:
        page_choice = request.choice("page_bytes", request.page_bytes)
    per_page = layout.cells_per_page(page_choice.value, cell, sizes.block_cells)
    if per_page == 0:
        needed = sizes.block_cells * cell
        raise ConfigError(
            f"engine.page_kib={page_choice.value / layout.KIB:g} and kv.type={request.kv_type}: a page of"
            f" {page_choice.value:,} bytes does not hold one block of {sizes.block_cells} cells of {cell:,} bytes; it"
            f" needs {needed:,}. Set engine.page_kib={-(-needed // layout.KIB)} or more"
        )
    pages = _pages(blobs, page_choice.value)
    fixed = (*reserve_entries(request), *model_entries(sizes, with_draft, request.moving))
    need = stage_need(sizes, with_draft=with_draft, expert_kernels=request.expert_kernels)
    choose_stage_bytes(request.stage_bytes, need, None)  # refuses what cannot be staged, also where chunks are short
    return Frame(
        sizes=sizes,
        request=request,
        with_draft=with_draft,
        page_choice=page_choice,
        cell_bytes=cell,
        cells_per_page=per_page,
        pages=pages,
        order=slot_order(pages, sizes.geometry.num_experts, request.ranking),
        most_pages=max(pages),
        limits=request.limits(),
        fixed=fixed,
        fixed_bytes={memory: phase_totals(fixed, (memory,)) for memory in Memory},
    )


@lru_cache(maxsize=64)
def _auto_page(blobs: tuple[int, ...], cell: int, block_cells: int) -> tuple[int, float]:
    """Return the page size in bytes that auto takes and the percentage of the slots that it wastes."""
    value = layout.choose_page_bytes(blobs, cell, block_cells)
    return value, 100 * layout.slot_waste_frac(blobs, value)


@lru_cache(maxsize=64)
def _pages(blobs: tuple[int, ...], page_bytes: int) -> tuple[int, ...]:
    return tuple(layout.pages_per_expert(blob, page_bytes) for blob in blobs)

"""What the planner charges for experts by kernels, and for those that have none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata_jax.memory.buffers import Cells, prompt_parts
from strata_jax.memory.frame import make_frame
from strata_jax.memory.request import PlanRequest
from strata_jax.memory.sizes import model_sizes
from strata_jax.presets import preset_geometry


def test_kernels_price_rows_sorted_by_expert_and_their_outputs() -> None:
    """Counted by hand for chunks of 512 and windows of 4 tokens; nothing decoded, of all but the shared expert."""
    sizes = model_sizes(preset_geometry("synthetic_full", "iq3_xxs"))
    cells = Cells(4096, 16, 1088, expert_kernels=True)

    def priced(rows: int) -> dict[str, int]:
        parts = prompt_parts(sizes, rows, cells, with_draft=True, logits_rows=1)
        assert "experts" not in parts
        return {term.item: term.num_bytes for term in parts["experts by kernels"]}

    chunk, window = priced(512), priced(4)
    assert chunk.pop("router and shared expert") == 512 * (2 * 512 + 3 * 640 + 2 * 2560) * 4
    assert chunk == {
        "hidden rows": 2 * (512 * 10 + 128) * 640 * 2,
        "expert outputs": (512 * 10 + 128) * 2560 * 2,
        "sorted pairs": (8 * 5120 + 8 * 512) * 4,
    }
    assert window["hidden rows and expert outputs"] == 4 * 10 * (640 + 2560) * 4
    nothing = prompt_parts(sizes, 512, replace(cells, expert_kernels=False), with_draft=True, logits_rows=1)
    assert sum(t.num_bytes for t in nothing["experts"]) > 2 * sum(chunk.values())


@pytest.mark.parametrize(
    ("tokens", "cells", "counted_mb"),
    [  # XLA's own counts on an H200 (jax 0.11.2): temporaries and outputs of a GDN, an attention and the draft block
        (512, 30_656, (122.7, 107.4, 141.4)),
        (1024, 30_656, (192.5, 181.8, 234.4)),
        (2048, 30_656, (409.4, 369.0, 473.5)),
        (2048, 131_072, (409.4, 588.5, 706.1)),
        (4096, 30_656, (778.9, 706.6, 933.2)),
        (8192, 30_656, (1471.5, 1396.3, 1837.2)),
    ],
)
def test_a_chunk_by_kernels_is_priced_a_little_above_what_xla_needs(
    tokens: int, cells: int, counted_mb: tuple[float, ...]
) -> None:
    """Four layers of full width, with the draft block and without: at most 1 % of an 8 GB card more than is needed."""
    geometry = preset_geometry("synthetic_full", "iq2_xs", num_layers=4)
    for window, counted in ((4, counted_mb), (1, counted_mb[:2])):
        request = PlanRequest(
            context_cells=cells, chunk_tokens=tokens, expert_kernels=True, spec_window=window, stage_bytes=0
        )
        frame = make_frame(model_sizes(geometry), request)
        priced_mb = sum(e.peak_bytes for e in frame.prompt_entries(cells, tokens)) / 1e6
        assert max(counted) <= priced_mb <= max(counted) + 0.01 * 8151 * 2**20 / 1e6, window


def test_blocks_without_a_kernel_are_priced_beside_those_with_one() -> None:
    sizes = model_sizes(preset_geometry("synthetic_full", "nvfp4"))  # its draft block alone has a kernel
    cells = Cells(4096, 16, 1088, expert_kernels=True)
    with_draft, without = (prompt_parts(sizes, 512, cells, with_draft=d, logits_rows=1) for d in (True, False))
    assert {"experts", "experts by kernels"} <= set(with_draft)
    assert "experts" in without
    assert "experts by kernels" not in without

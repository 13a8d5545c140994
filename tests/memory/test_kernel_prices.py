"""What the planner charges for experts by kernels, and for those that have none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata_jax.memory.buffers import Cells, prompt_parts
from strata_jax.memory.candidate import make_frame
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
        "hidden rows": (512 * 10 + 128) * 640 * 2,
        "expert outputs": (512 * 10 + 128) * 2560 * 2,
        "sorted pairs": (8 * 5120 + 8 * 512) * 4,
    }
    assert window["hidden rows and expert outputs"] == 4 * 10 * (640 + 2560) * 4
    nothing = prompt_parts(sizes, 512, replace(cells, expert_kernels=False), with_draft=True, logits_rows=1)
    assert sum(t.num_bytes for t in nothing["experts"]) > 2 * sum(chunk.values())


@pytest.mark.parametrize(
    ("tokens", "cells", "counted_mb"),
    [  # XLA's own counts for one H200 (jax 0.11.2): temporaries and outputs of a GDN, an attention and the draft block
        (512, 8192, (107.7, 110.7, 145.0)),
        (2048, 8192, (434.2, 370.4, 513.2)),
        (2048, 131_072, (434.2, 588.5, 706.1)),
        (8192, 30_208, (1482.0, 1425.9, 1887.1)),
    ],
)
def test_a_chunk_by_kernels_is_priced_a_little_above_what_xla_needs(
    tokens: int, cells: int, counted_mb: tuple[float, ...]
) -> None:
    """Four layers of full width and the draft block: at most a fifth more than is needed, and one decoded matrix."""
    geometry = preset_geometry("synthetic_full", "iq2_xs", num_layers=4)
    request = PlanRequest(context_cells=cells, chunk_tokens=tokens, expert_kernels=True, spec_window=4, stage_bytes=0)
    frame = make_frame(model_sizes(geometry), request)
    priced_mb = sum(e.peak_bytes for e in frame.prompt_entries(cells, tokens)) / 1e6
    assert max(counted_mb) <= priced_mb <= 1.2 * max(counted_mb) + 66


def test_blocks_without_a_kernel_are_priced_beside_those_with_one() -> None:
    sizes = model_sizes(preset_geometry("synthetic_full", "nvfp4"))  # its draft block alone has a kernel
    cells = Cells(4096, 16, 1088, expert_kernels=True)
    with_draft, without = (prompt_parts(sizes, 512, cells, with_draft=d, logits_rows=1) for d in (True, False))
    assert {"experts", "experts by kernels"} <= set(with_draft)
    assert "experts" in without
    assert "experts by kernels" not in without

"""What the planner charges for experts by kernels, and for those that have none."""

from __future__ import annotations

from dataclasses import replace

from strata_jax.memory.buffers import Cells, prompt_parts
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


def test_blocks_without_a_kernel_are_priced_beside_those_with_one() -> None:
    sizes = model_sizes(preset_geometry("synthetic_full", "nvfp4"))  # its draft block alone has a kernel
    cells = Cells(4096, 16, 1088, expert_kernels=True)
    with_draft, without = (prompt_parts(sizes, 512, cells, with_draft=d, logits_rows=1) for d in (True, False))
    assert {"experts", "experts by kernels"} <= set(with_draft)
    assert "experts" in without
    assert "experts by kernels" not in without

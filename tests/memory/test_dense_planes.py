"""Which dense matrices are held in planes, and what products with them need besides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata_jax.memory.buffers import Cells, prompt_parts
from strata_jax.memory.dense_planes import MAX_KERNEL_ROWS, dense_planes
from strata_jax.memory.sizes import model_sizes
from strata_jax.presets import preset_geometry

SIZES = model_sizes(preset_geometry("synthetic_full", "iq3_xxs"))
PROJECT = 2560 * 5120  # BF16, of the draft block
INDEXER = 512 * 2560  # BF16
QUERIES = 12_288 * 2560


@pytest.mark.parametrize(
    ("type_name", "rows", "cols", "tile_rows"),
    [
        ("Q6_K", 10_240, 2560, 128),
        ("Q6_K", 48, 2560, 16),
        ("Q6_K", 4, 10_240, 4),
        ("Q6_K", 6, 2560, None),  # a thread loads four rows
        ("Q5_1", 10_240, 320, 128),
        ("Q5_1", 1024, 96, None),  # three half-word scales a row: planes would be larger
        ("BF16", 512, 2560, None),
        ("Q6_K", 256, 96, None),  # no whole block
    ],
)
def test_planes_where_they_have_the_bytes_of_the_file(
    type_name: str, rows: int, cols: int, tile_rows: int | None
) -> None:
    layout = dense_planes(type_name, rows, cols)
    assert (layout and layout.tile_rows) == tile_rows
    if layout is not None:
        assert layout.num_words * 4 == rows * layout.row_bytes


def test_temporaries_of_products() -> None:
    cells = Cells(4096, 16, 1088, expert_kernels=True)

    def terms(rows: int, cells: Cells, *, with_draft: bool = True) -> dict[str, int]:
        parts = prompt_parts(SIZES, rows, cells, with_draft=with_draft, logits_rows=1)
        part = parts.get("product", parts["GDN"])
        return {term.item: term.num_bytes for term in part if term.item != "projections and outputs"}

    stored = {"decoded matrix": PROJECT * 5}
    assert terms(8, cells) == stored
    assert terms(8, cells, with_draft=False) == {"decoded matrix": INDEXER * 5}
    assert terms(MAX_KERNEL_ROWS, cells) == stored | {"rounded input": MAX_KERNEL_ROWS * 10_240 * 2}
    assert terms(2048, cells, with_draft=False) == {"decoded matrix": QUERIES * 2, "rounded input": 2048 * 10_240 * 2}
    assert terms(2048, replace(cells, expert_kernels=False)) == {"decoded matrix": 16 * 2**20 * 5}

"""Arithmetic of pages, slots and chunks, each function against a count by hand or its inverse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_jax.geometry import attention_layer_indices
from strata_jax.kv_types import cell_bytes
from strata_jax.memory import layout

PAGES = st.lists(st.integers(1, 50), min_size=1, max_size=8)


def test_P01_only_attention_layers_are_charged_kv() -> None:
    layers = attention_layer_indices(64, full_attention_interval=4)
    per_cell = sum(cell_bytes("f16", 4, 256))
    per_token = layout.kv_bytes_per_token(len(layers), per_cell)
    assert per_token == 65_536
    assert per_token * 262_144 == 16 * 2**30
    # a page that cells fill exactly adds nothing to that
    page_cells = layout.cells_per_page(65_536, per_cell, block_cells=4)
    pages = len(layers) * layout.kv_pages_per_layer(262_144, page_cells)
    assert pages * 65_536 == 16 * 2**30


def test_blob_pads_each_matrix_to_words() -> None:
    assert layout.blob_bytes([110, 110, 18]) == 112 + 112 + 20


def test_whole_pages_hold_an_expert() -> None:
    assert [layout.pages_per_expert(n, 1024) for n in (1, 1024, 1025)] == [1, 1, 2]


@given(page_bytes=st.integers(1, 2**18), cell=st.integers(1, 3000).map(lambda n: 4 * n), block=st.integers(1, 16))
def test_a_page_holds_whole_blocks_of_cells(page_bytes: int, cell: int, block: int) -> None:
    cells = layout.cells_per_page(page_bytes, cell, block)
    assert cells % block == 0
    assert cells * cell <= page_bytes < (cells + block) * cell


@given(cells=st.integers(1, 10**6), page_cells=st.integers(1, 500))
def test_cells_in_pages_inverts_pages_of_a_layer(cells: int, page_cells: int) -> None:
    pages = layout.kv_pages_per_layer(cells, page_cells)
    assert layout.cells_in_pages(pages, page_cells) >= cells > layout.cells_in_pages(pages - 1, page_cells)


def test_word_offsets_of_keys_and_values_never_overlap() -> None:
    page_bytes, k_bytes, v_bytes = 1024, 68, 36
    page_cells = layout.cells_per_page(page_bytes, k_bytes + v_bytes, 4)
    owner: dict[int, tuple[str, int]] = {}
    for cell in range(2 * page_cells):
        page = 7 + cell // page_cells
        key = layout.key_word_offset(page, cell, page_bytes, page_cells, k_bytes)
        value = layout.value_word_offset(page, cell, page_bytes, page_cells, k_bytes, v_bytes)
        for first, words, side in ((key, k_bytes // 4, "k"), (value, v_bytes // 4, "v")):
            for word in range(first, first + words):
                assert page * 256 <= word < (page + 1) * 256
                assert owner.setdefault(word, (side, cell)) == (side, cell)


def test_cells_of_a_page_are_a_multiple_of_every_block_size() -> None:
    assert layout.cell_block([4, 0, 6]) == 12
    assert layout.cell_block([0, 0]) == 1


def test_page_is_the_largest_that_wastes_little() -> None:
    # 40 KiB wastes 37.5 % of 64 KiB and 16.7 % of 16 KiB pages, nothing of 8 KiB pages
    assert layout.choose_page_bytes([40 * 1024], cell_bytes=64, block_cells=4) == 8 * 1024
    assert layout.choose_page_bytes([64 * 1024 * 40], cell_bytes=64, block_cells=4) == 64 * 1024


def test_page_holds_one_block_of_cells_whatever_it_wastes() -> None:
    assert layout.choose_page_bytes([40 * 1024], cell_bytes=4096, block_cells=4) == 16 * 1024
    assert layout.choose_page_bytes([40 * 1024], cell_bytes=32 * 1024, block_cells=4) == 128 * 1024


@given(blobs=st.lists(st.integers(100, 5_000_000), min_size=1, max_size=6), cell=st.integers(1, 1024))
def test_page_wastes_less_than_3_percent_or_least(blobs: list[int], cell: int) -> None:
    chosen = layout.choose_page_bytes(blobs, 4 * cell, 4)
    assert layout.cells_per_page(chosen, 4 * cell, 4) > 0
    waste = layout.slot_waste_frac(blobs, chosen)
    others = [2**n for n in range(10, 17) if layout.cells_per_page(2**n, 4 * cell, 4) > 0]
    assert waste < 0.03 or waste <= min(layout.slot_waste_frac(blobs, size) for size in others)
    assert all(layout.slot_waste_frac(blobs, size) >= 0.03 for size in others if size > chosen)


@pytest.mark.parametrize(
    ("chunk", "buckets"),
    [(1, (1,)), (7, (7,)), (8, (8,)), (20, (8, 20)), (64, (8, 64)), (100, (8, 64, 128)), (512, (8, 64, 512))],
)
def test_buckets_of_a_chunk(chunk: int, buckets: tuple[int, ...]) -> None:
    assert layout.prefill_buckets(chunk) == buckets


@pytest.mark.parametrize(("chunk", "buckets"), [(8, (8,)), (16, (16,)), (20, (16, 20)), (512, (16, 64, 512))])
def test_buckets_of_programs_made_of_kernels_are_longer_than_windows(chunk: int, buckets: tuple[int, ...]) -> None:
    assert layout.prefill_buckets(chunk, kernels=True) == buckets


@given(chunk=st.integers(1, 5000))
def test_every_part_of_a_prompt_has_a_bucket_that_the_recurrent_layers_accept(chunk: int) -> None:
    buckets = layout.prefill_buckets(chunk)
    assert buckets[-1] >= chunk
    assert len(buckets) <= 3
    assert all(size <= 64 or size % 64 == 0 for size in buckets)


@given(limit=st.integers(0, 100), low=st.integers(0, 50), high=st.integers(0, 120))
def test_largest_where_finds_the_border(limit: int, low: int, high: int) -> None:
    expected = max((n for n in range(low, high + 1) if n <= limit), default=None)
    assert layout.largest_where(lambda n: n <= limit, low, high) == expected

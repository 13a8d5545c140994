"""Prompt chunks through packed experts: sorting, tiles and interpreted kernels, against decoded float64."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.gguf.blocks import block_type
from strata_jax.kernels.dequant import grids
from strata_jax.kernels.expert_gemv import ExpertLayout, LaunchBlocks, expert_layout
from strata_jax.kernels.grouped_matmul import (
    Blocks,
    Source,
    arena_sources,
    choose_blocks,
    combine,
    grouped_down,
    grouped_swiglu,
    sort_pairs,
    tile_map,
    triton,
)
from strata_jax.kernels.grouped_matmul.blocks import RINGS
from strata_jax.kernels.planes import PLANE_TYPES, decode_planes
from strata_jax.kernels.quant_matmul import PlanePart
from tests.kernels.lowering import lower_for_cuda
from tests.kernels.place import INTERPRET
from tests.kernels.test_quant_matmul import random_words, rel_err

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton backend:DeprecationWarning")
WIDTH, EXPERT_WIDTH, NUM_EXPERTS, NUM_USED, NUM_TOKENS = 256, 128, 6, 3, 25
PAGE_WORDS = 1152
BLOCKS = Blocks(16, LaunchBlocks(64, 4), LaunchBlocks(64, 4), swap=False)


@dataclass
class Case:
    """Experts in an arena of two arrays of pages, the tokens' experts, and what a right answer is."""

    layout: ExpertLayout
    arrays: tuple[jax.Array, jax.Array]
    pages: jax.Array
    u: jax.Array
    ids: np.ndarray
    weights: list[list[np.ndarray]]  # per expert: gate, up, down in float64

    def hidden(self, rows: np.ndarray, expert: int) -> np.ndarray:
        x = np.asarray(self.u, np.float64)[rows]
        gate, up = (x @ w.T for w in self.weights[expert][:2])
        return gate / (1 + np.exp(-gate)) * up


@functools.cache
def make_case(gate_type: str = "IQ3_XXS", down_type: str = "Q2_0", page_words: int = PAGE_WORDS) -> Case:
    rng = np.random.default_rng(5)
    layout = expert_layout(gate_type, gate_type, down_type, WIDTH, EXPERT_WIDTH)
    per_expert = -(-layout.num_words // page_words)
    assert per_expert > 3
    assert layout.firsts[2] % page_words  # a matrix begins and ends inside a page
    arena = rng.integers(0, 2**32, (2 + NUM_EXPERTS * per_expert, page_words), np.uint32)
    pages, weights = 2 + per_expert * rng.permutation(NUM_EXPERTS), []
    for expert, page in enumerate(pages):
        words = [random_words(part, 10 * expert + i) for i, part in enumerate(layout.parts)]
        arena[page : page + per_expert].reshape(-1)[: layout.num_words] = np.concatenate(words)
        weights.append([np.asarray(decode(w, part), np.float64) for w, part in zip(words, layout.parts)])
    # expert 3 has no rows, expert 0 more than a tile; the last two tokens are padding
    choices = [[0, 1, 2], [0, 2, 4], [0, 4, 5], [0, 1, 5]]
    ids = np.array([choices[rng.integers(4)] for _ in range(NUM_TOKENS)], np.int32)
    ids[-2:] = NUM_EXPERTS
    u = jnp.asarray(rng.standard_normal((NUM_TOKENS, WIDTH)) / 64, jnp.bfloat16)
    split = 2 + 2 * per_expert
    arrays = (jnp.asarray(arena[:split]), jnp.asarray(arena[split:]))
    return Case(layout, arrays, jnp.asarray(pages, jnp.int32), u, ids, weights)


decode = jax.jit(decode_planes, static_argnums=1)


def test_pairs_are_sorted_by_expert_and_tiles_cover_every_row_once():
    rng = np.random.default_rng(6)
    ids = np.array([rng.choice([0, 1, 2, 4, 5], NUM_USED, replace=False) for _ in range(NUM_TOKENS)], np.int32)
    ids[-2:] = NUM_EXPERTS
    pairs = sort_pairs(jnp.asarray(ids), NUM_EXPERTS, 16)
    token_of, row_of, count = (np.asarray(v) for v in (pairs.token_of, pairs.row_of, pairs.count))
    assert count.tolist() == [(ids == e).sum() for e in range(NUM_EXPERTS)]
    assert len(token_of) == ids.size + 16
    for t, k in np.ndindex(*ids.shape):
        assert token_of[row_of[t, k]] == t
    assert sorted(row_of.reshape(-1).tolist()) == list(range(ids.size))
    by_row = np.sort(ids.reshape(-1))
    for tile_rows in (16, 4):
        tiles = tile_map(pairs, tile_rows)
        num = int(tiles.num[0])
        seen = np.zeros(ids.size, int)
        for expert, first, rows in zip(tiles.expert[:num], tiles.first[:num], tiles.count[:num]):
            assert 0 < rows <= tile_rows
            assert (by_row[first : first + rows] == expert).all()
            seen[first : first + rows] += 1
        np.testing.assert_array_equal(seen, by_row < NUM_EXPERTS)
        assert num <= len(tiles.expert)


def test_the_worst_routing_still_fits_the_tile_map():
    """Every expert one row more than whole tiles: the most tiles there can be."""
    ids = jnp.asarray(np.repeat(np.arange(8), 17).reshape(-1, 1).astype(np.int32))
    tiles = tile_map(sort_pairs(ids, 8, 16), 16)
    assert int(tiles.num[0]) == 16 <= len(tiles.expert)
    assert int(tiles.count[:16].sum()) == 8 * 17


def test_experts_are_found_in_the_array_that_holds_their_first_page():
    arrays = [jnp.zeros((pages, 8), jnp.uint32) for pages in (3, 4)]
    pages = jnp.array([6, -1, 0, 3, 2], jnp.int32)
    core, segment = arena_sources(arrays, pages)
    assert core.words is arrays[0]
    assert segment.words is arrays[1]
    assert core.lines.tolist() == [-1, -1, 0, -1, 2]
    assert segment.lines.tolist() == [3, -1, -1, 0, -1]


@pytest.mark.parametrize(("gate_type", "down_type", "swap"), [("IQ3_XXS", "Q2_0", False), ("Q8_0", "Q8_0", True)])
def test_kernels_fill_the_rows_of_their_experts_and_no_others(gate_type, down_type, swap):
    case = make_case(gate_type, down_type)
    blocks = Blocks(16, LaunchBlocks(64, 4), LaunchBlocks(128, 4), swap)
    parts = [PlanePart(part, first) for part, first in zip(case.layout.parts, case.layout.firsts)]
    pairs = sort_pairs(jnp.asarray(case.ids), NUM_EXPERTS, blocks.rows)
    num_rows = case.ids.size + blocks.rows
    source = arena_sources(case.arrays, case.pages)[1]
    chosen = [expert for expert in np.flatnonzero(source.lines >= 0) if (case.ids == expert).any()]
    assert 0 in chosen
    assert 1 < len(chosen) < NUM_EXPERTS - 1
    tiles = tile_map(pairs, blocks.rows)
    h = jnp.full((num_rows, EXPERT_WIDTH), 7, jnp.bfloat16)
    operands = (tiles, source)
    h = triton.swiglu(case.u, pairs.token_of, *operands, (parts[0], parts[1]), h, blocks, interpret=INTERPRET)
    y = triton.down(h, *operands, parts[2], jnp.full((num_rows, WIDTH), 7, jnp.float32), blocks, interpret=INTERPRET)
    by_row = np.append(np.sort(case.ids.reshape(-1)), np.full(blocks.rows, NUM_EXPERTS))
    others = ~np.isin(by_row, chosen)
    h, y = np.asarray(h, np.float64), np.asarray(y)
    assert (h[others] == 7).all()
    assert (y[others] == 7).all()
    for expert in chosen:
        rows = np.flatnonzero(by_row == expert)
        assert rel_err(h[rows], case.hidden(np.asarray(pairs.token_of)[rows], expert)) < 5e-3
        assert rel_err(y[rows], h[rows] @ case.weights[expert][2].T) < 5e-3


def test_a_chunk_with_experts_in_the_arena_and_in_a_buffer_gives_each_token_its_weighted_sum():
    """The op as a chunk uses it (plain jnp on a CPU): sources by one call or by several, then the sum over each token's
    experts."""
    case = make_case("Q8_0", "Q8_0")
    streamed = np.array([4, 1])
    pages = case.pages.at[streamed].set(-1)
    arena = jnp.concatenate(case.arrays)
    blobs = [np.asarray(arena)[case.pages[e] :].reshape(-1)[: case.layout.num_words] for e in (*streamed, 0)]
    places = jnp.full(NUM_EXPERTS, -1, jnp.int32).at[streamed].set(jnp.arange(2))
    sources = [*arena_sources([arena], pages), Source(jnp.asarray(np.stack(blobs)), places)]

    @partial(jax.jit, static_argnames="at_once")
    def chunk(u: jax.Array, ids: jax.Array, shares: jax.Array, at_once: bool) -> jax.Array:
        pairs = sort_pairs(ids, NUM_EXPERTS, BLOCKS.rows)
        h = jnp.full((ids.size + BLOCKS.rows, EXPERT_WIDTH), jnp.nan, jnp.bfloat16)
        y = jnp.full((ids.size + BLOCKS.rows, WIDTH), jnp.nan, jnp.float32)
        tiles = tile_map(pairs, BLOCKS.rows)
        for some in [sources] if at_once else [[source] for source in sources]:
            h = grouped_swiglu(u, pairs.token_of, tiles, some, case.layout, h, BLOCKS)
            y = grouped_down(h, tiles, some, case.layout, y, BLOCKS)
        return combine(y, pairs, shares)

    shares = np.random.default_rng(2).random(case.ids.shape).astype(np.float32)
    got, again = (chunk(case.u, jnp.asarray(case.ids), jnp.asarray(shares), at_once) for at_once in (True, False))
    np.testing.assert_array_equal(got, again)
    expected = np.zeros((NUM_TOKENS, WIDTH))
    for t in range(NUM_TOKENS - 2):
        for k, expert in enumerate(case.ids[t]):
            expected[t] += shares[t, k] * (case.hidden(np.array([t]), expert) @ case.weights[expert][2].T)[0]
    assert rel_err(got, expected) < 5e-3  # the last tokens have no expert: their rows are what they were, not 0


def test_what_does_not_fit_is_named():
    layout = expert_layout("IQ3_XXS", "IQ3_XXS", "Q2_0", WIDTH, EXPERT_WIDTH)
    pairs = sort_pairs(jnp.zeros((4, 1), jnp.int32), NUM_EXPERTS, 16)
    u, h = jnp.zeros((4, WIDTH), jnp.bfloat16), jnp.zeros((20, EXPERT_WIDTH), jnp.bfloat16)
    sources = [Source(jnp.zeros((9, PAGE_WORDS), jnp.uint32), jnp.zeros(NUM_EXPERTS, jnp.int32))]
    odd = sources[0]._replace(words=sources[0].words[:, :1000])
    tiles = tile_map(pairs, 16)
    with pytest.raises(ValueError, match="128 x 256, the operands need 64 x 256"):
        grouped_swiglu(u, pairs.token_of, tiles, sources, layout, h[:, :64], BLOCKS)
    large = Blocks(16, LaunchBlocks(256, 4), LaunchBlocks(64, 4), False)
    with pytest.raises(ValueError, match="256 rows of weights do not divide tiles of 128 rows"):
        grouped_swiglu(u, pairs.token_of, tiles, sources, layout, h, large)
    with pytest.raises(ValueError, match="result has 4 rows, the operand 20"):
        grouped_swiglu(u, pairs.token_of, tiles, sources, layout, h[:4], BLOCKS)
    with pytest.raises(ValueError, match="there is no source of experts"):
        grouped_down(h, tiles, [], layout, jnp.zeros((20, WIDTH)), BLOCKS)
    with pytest.raises(ValueError, match=r"whole runs of 128 words a line, got uint32\[9, 1000\]"):
        grouped_down(h, tiles, [*sources, odd], layout, jnp.zeros((20, WIDTH)), BLOCKS)


def test_blocks_follow_the_load_the_gpu_and_the_planes():
    assert [choose_blocks(rows, 64, "NVIDIA H200").rows for rows in (10, 40, 160)] == [32, 64, 128]
    assert choose_blocks(160, 128, "another").rows == 64
    rings = RINGS["NVIDIA H200"] if jax.__version_info__[:2] == (0, 11) else None
    assert [choose_blocks(rows, 128, "NVIDIA H200").rings for rows in (10, 40, 160)] == [rings] * 3
    narrow = choose_blocks(40, 32, "NVIDIA H200")
    assert narrow.rings is None
    assert (narrow.swiglu.rows, narrow.down.rows) == (32, 32)


@pytest.mark.parametrize("tokens", [512, 2048])  # weights first, and rows first
def test_products_of_the_model_lower_for_a_gpu(tokens):
    layout = expert_layout("Q8_0", "Q8_0", "Q2_0", 2560, 640)
    text = lower_layer(layout, tokens, choose_blocks(tokens * 10 / 512, layout.tile_rows, "another"))
    assert text.count("triton") >= 2
    assert "mosaic_gpu" not in text


@pytest.mark.parametrize(("gate_type", "down_type"), [("IQ2_XS", "Q2_0"), ("IQ2_S", "IQ4_NL"), ("Q8_0", "Q8_0")])
def test_products_of_the_model_lower_for_hopper(gate_type, down_type):
    """Shared memory suffices, whatever the types: Q8_0 has the most words, IQ2_S the largest tables."""
    layout = expert_layout(gate_type, gate_type, down_type, 2560, 640)
    text = lower_layer(layout, 512, ring_blocks())
    assert text.count("@mosaic_gpu") == 2
    assert "triton" not in text


def test_experts_of_several_sources_take_one_launch_of_mosaic_and_several_of_triton():
    layout = expert_layout("IQ2_XS", "IQ2_XS", "Q2_0", 2560, 640)
    assert lower_layer(layout, 512, ring_blocks(), num_sources=3).count("@mosaic_gpu") == 2
    single, several = (lower_layer(layout, 512, replace(ring_blocks(), rings=None), n).count("triton") for n in (1, 3))
    assert several == 3 * single


def test_matrices_that_mosaic_does_not_take_are_left_to_triton():
    text = lower_layer(expert_layout("Q8_0", "Q4_0", "Q2_0", 2560, 640), 512, ring_blocks())
    assert text.count("@mosaic_gpu") == 1  # down; gate and up are of two types


def ring_blocks() -> Blocks:
    if jax.__version_info__ < (0, 11):
        pytest.skip(f"the Mosaic kernel does not lower with jax {jax.__version__}")
    rings = RINGS["NVIDIA H200"]
    return Blocks(rings[0].rows[-1], LaunchBlocks(64, 4), LaunchBlocks(128, 8), swap=False, rings=rings)


def lower_layer(layout: ExpertLayout, tokens: int, blocks: Blocks, num_sources: int = 1) -> str:
    rows = tokens * 10 + blocks.rows

    def layer(u: jax.Array, ids: jax.Array, sources: list[Source]) -> jax.Array:
        pairs = sort_pairs(ids, 512, blocks.rows)
        tiles = tile_map(pairs, blocks.rows)
        h = jnp.zeros((rows, 640), jnp.bfloat16)
        h = grouped_swiglu(u, pairs.token_of, tiles, sources, layout, h, blocks, backend="mosaic")
        y = jnp.zeros((rows, 2560), jnp.bfloat16)
        return grouped_down(h, tiles, sources, layout, y, blocks, backend="mosaic")

    shape = jax.ShapeDtypeStruct
    return lower_for_cuda(
        layer,
        shape((tokens, 2560), jnp.bfloat16),
        shape((tokens, 10), jnp.int32),
        [Source(shape((100_000, 4096 >> i), jnp.uint32), shape((512,), jnp.int32)) for i in range(num_sources)],
    )


@pytest.mark.parametrize("type_name", ["IQ2_XXS", "IQ2_XS", "IQ2_S"])
def test_selectors_hold_the_codebook_and_its_signs(type_name):
    fragments = pytest.importorskip("strata_jax.kernels.grouped_matmul.fragments")
    selectors, negative = (table[:, :1] >> (4 * np.arange(8)) for table in fragments.shared_tables(type_name))
    assert (np.array([8, 25, 43])[selectors & 15] == grids.magnitudes(type_name)).all()
    bits = np.arange(len(negative))[:, None] >> np.arange(8) & 1
    if type_name != "IQ2_S":
        assert ((negative >> 2 & 1).sum(1) % 2 == 0).all()
        bits, negative = bits[:, :7], negative[:, :7]
    assert (negative & 15 == 4 * bits).all()


@pytest.mark.parametrize("type_name", ["IQ2_XS", "Q2_0"])
def test_columns_are_ordered_as_threads_hold_weights(type_name):
    """Thread q of a quad has item q; wgmma takes columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of each 16 from it."""
    fragments = pytest.importorskip("strata_jax.kernels.grouped_matmul.fragments")
    got = fragments.permute_columns(jnp.arange(256)[None], type_name)[0]
    for at, col in enumerate(np.asarray(got)):
        step, half, k, quad, two = at // 128, at // 64 % 2, at // 8 % 8, at // 2 % 4, at % 2
        weight = k + 8 * two if type_name == "Q2_0" else 2 * k + two
        assert col == 128 * step + 32 * quad + 16 * half + weight


def several_sources(case: Case) -> list[Source]:
    """The arena's arrays, of which some experts are elsewhere: in host memory, lines as long as a blob."""
    elsewhere = np.array([1, 4])
    pages = case.pages.at[elsewhere].set(-1)
    blobs = np.zeros((NUM_EXPERTS, -(-case.layout.num_words // 128) * 128), np.uint32)
    arena = np.concatenate(case.arrays)
    for expert in elsewhere:
        words = arena[case.pages[expert] :].reshape(-1)[: case.layout.num_words]
        blobs[expert, : len(words)] = words
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    lines = jnp.full(NUM_EXPERTS, -1, jnp.int32).at[elsewhere].set(elsewhere)
    return [*arena_sources(case.arrays, pages), Source(jax.device_put(blobs, host), lines)]


@pytest.mark.skipif(INTERPRET or jax.devices()[0].compute_capability != "9.0", reason="the kernel is for Hopper")
@pytest.mark.parametrize("gate_type", PLANE_TYPES)
def test_mosaic_fills_the_rows_of_its_experts_and_no_others(gate_type):
    blocks = ring_blocks()
    whole_blocks = EXPERT_WIDTH % block_type(gate_type).block_len == 0
    case = make_case(gate_type, gate_type if whole_blocks else "Q2_0", 13 * 128)
    pairs = sort_pairs(jnp.asarray(case.ids), NUM_EXPERTS, blocks.rows)
    tiles, num_rows = tile_map(pairs, blocks.rows), case.ids.size + blocks.rows
    source = arena_sources(case.arrays, case.pages)[1]
    chosen = [expert for expert in np.flatnonzero(source.lines >= 0) if (case.ids == expert).any()]
    operands = (tiles, [source], case.layout)
    h = jnp.full((num_rows, EXPERT_WIDTH), 7, jnp.bfloat16)
    h = grouped_swiglu(case.u, pairs.token_of, *operands, h, blocks, backend="mosaic")
    by_row = np.append(np.sort(case.ids.reshape(-1)), np.full(blocks.rows, NUM_EXPERTS))
    others, hidden = ~np.isin(by_row, chosen), np.asarray(h, np.float64)
    assert (hidden[others] == 7).all()
    everywhere = several_sources(case)
    whole, y = jnp.zeros_like(h), jnp.zeros((num_rows, WIDTH))
    whole = grouped_swiglu(case.u, pairs.token_of, tiles, everywhere, case.layout, whole, blocks, backend="mosaic")
    y = grouped_down(whole, tiles, everywhere, case.layout, y, blocks, backend="mosaic")
    every = np.asarray(whole, np.float64)
    np.testing.assert_array_equal(every[~others], hidden[~others])
    for expert in np.unique(by_row[by_row < NUM_EXPERTS]):
        rows = np.flatnonzero(by_row == expert)
        assert rel_err(every[rows], case.hidden(np.asarray(pairs.token_of)[rows], expert)) < 5e-3
        assert rel_err(y[rows], every[rows] @ case.weights[expert][2].T) < 5e-3
    for dtype, bound in ((jnp.float32, 5e-3), (jnp.bfloat16, 1e-2)):
        y = grouped_down(h, *operands, jnp.full((num_rows, WIDTH), 7, dtype), blocks, backend="mosaic")
        y = np.asarray(y, np.float64)
        assert (y[others] == 7).all()
        for expert in chosen:
            rows = np.flatnonzero(by_row == expert)
            assert rel_err(hidden[rows], case.hidden(np.asarray(pairs.token_of)[rows], expert)) < 5e-3
            assert rel_err(y[rows], hidden[rows] @ case.weights[expert][2].T) < bound

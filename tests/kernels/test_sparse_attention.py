"""Attention over kept blocks in packed cells against float64: formats, pages in disorder, a store, poison, pieces."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.kernels.kv_codec import decode_k, decode_v, encode_k, encode_v, hadamard
from strata_jax.kernels.sparse_attention import Blocks, blocks_for, sparse_attention
from strata_jax.kernels.sparse_attention.cells import Side
from strata_jax.kv_types import SIDES, cell_bytes
from strata_jax.memory.attention_kernels import MIN_SIDE, TILES_OF_HEAD
from tests.kernels.lowering import lower_for_cuda
from tests.kernels.place import INTERPRET

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton backend:DeprecationWarning")

GROUPS, HEADS, RATIO, KEPT, CELLS, PAGE_CELLS = 2, 3, 4, 9, 101, 12
POSITIONS = np.array([0, 2, 3, 34, 39, 55, CELLS - 1], np.int32)
WINDOW = Blocks(tile_cells=16, split_cells=32, num_parts=2, warps=4)
CHUNK = Blocks(tile_cells=16, split_cells=0, num_parts=1, warps=4)
POISON = np.uint32(0xFFFFFFFF)  # NaN as a scale, a float16 and a float32


@dataclass
class Layer:
    """Cells of one layer, half of their groups in a store, the tokens' queries and their kept blocks."""

    kv_type: str
    head_dim: int

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        shape, kind = (CELLS, GROUPS, self.head_dim), self.kv_type
        k, v = (rng.standard_normal(shape, np.float32) for _ in range(2))

        @jax.jit
        def packed(k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
            words = encode_k(k, kind), encode_v(v, kind)
            return *words, decode_k(words[0], kind, *shape[1:]), decode_v(words[1], kind, *shape[1:])

        *words, self.k, self.v = map(np.asarray, packed(k, v))
        num_groups = -(-CELLS // PAGE_CELLS)
        sizes = [num_bytes // 4 for num_bytes in cell_bytes(kind, GROUPS, self.head_dim)]
        page_words = PAGE_CELLS * sum(sizes) + 3
        self.arena, self.store = (np.full((num_groups + 3, page_words), POISON, np.uint32) for _ in range(2))
        pages = rng.permutation(num_groups + 3)[:num_groups]
        self.pages = np.where(np.arange(num_groups) % 3 == 1, -1, pages).astype(np.int32)
        for cell in range(CELLS):
            group, place = divmod(cell, PAGE_CELLS)
            line = self.arena[self.pages[group]] if self.pages[group] >= 0 else self.store[2 + group]
            for side, first in zip((0, 1), (0, PAGE_CELLS * sizes[0])):
                line[first + place * sizes[side] :][: sizes[side]] = words[side][cell]
        self.q = (2 * rng.standard_normal((len(POSITIONS), GROUPS, HEADS, self.head_dim)) / self.head_dim**0.5).astype(
            np.float32
        )
        self.blocks = np.full((len(POSITIONS), KEPT), 10**6, np.int32)
        for row, position in enumerate(POSITIONS):
            best = np.sort(rng.permutation((position + 1) // RATIO)[:KEPT])
            self.blocks[row, : len(best)] = best

    def expected(self) -> np.ndarray:
        out = np.zeros(self.q.shape)
        for row, position in enumerate(POSITIONS):
            complete = (position + 1) // RATIO
            cells = [RATIO * b + i for b in self.blocks[row, : min(KEPT, complete)] for i in range(RATIO)]
            cells += range(complete * RATIO, position + 1)
            for group in range(GROUPS):
                scores = self.q[row, group].astype(np.float64) @ self.k[cells, group].T
                weight = np.exp(scores - scores.max(1, keepdims=True))
                out[row, group] = weight / weight.sum(1, keepdims=True) @ self.v[cells, group]
        return out

    def attend(self, backend: str = "triton", **options: object) -> np.ndarray:
        store = jnp.asarray(self.store), jnp.int32(2)
        call = partial(
            sparse_attention, ratio=RATIO, kv_type=self.kv_type, cells_per_page=PAGE_CELLS, backend=backend, **options
        )
        return np.asarray(jax.jit(call)(self.q, self.arena, self.pages, self.blocks, POSITIONS, store=store))


def far(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(
    ("kv_type", "head_dim", "sizes", "least", "most"),
    [("k8v4", 128, WINDOW, 1e-7, 1e-5), ("f16", 32, CHUNK, 1e-4, 1e-2)],
    ids=["in pieces, as of a window", "whole, as of a chunk"],
)
def test_attention_equals_float64_wherever_cells_lie(
    kv_type: str, head_dim: int, sizes: Blocks, least: float, most: float
) -> None:
    layer = Layer(kv_type, head_dim)
    expected = layer.expected()
    assert far(layer.attend("reference"), expected) < 1e-6
    assert least < far(layer.attend(sizes=sizes, interpret=INTERPRET), expected) < most


@pytest.mark.parametrize("fmt", sorted(set(sum(SIDES.values(), ()))))
def test_every_format_is_decoded_in_registers_as_in_jnp(fmt: str) -> None:
    head_dim = max(64, MIN_SIDE * TILES_OF_HEAD[fmt])
    side = Side(fmt, GROUPS, head_dim)
    x = np.random.default_rng(2).standard_normal((5, GROUPS, head_dim), np.float32)

    @jax.jit
    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        words = encode_k(x, fmt)
        values = decode_k(words, fmt, GROUPS, head_dim)
        return words, hadamard(values) if fmt == "q4_0" else values  # in a kernel, q4_0 stays rotated

    words, expected = both(x)
    columns = np.concatenate([side.columns(tile) for tile in range(side.num_tiles)])
    np.testing.assert_array_equal(np.sort(columns), np.arange(head_dim))
    for head in range(GROUPS):
        tiles = jax.jit(lambda words, head: side.decode(lambda word: words[:, word], head))(words, head)
        assert {tile.shape for tile in tiles} == {(5, head_dim // TILES_OF_HEAD[fmt])}
        np.testing.assert_allclose(
            np.concatenate(tiles, 1), np.asarray(expected)[:, head, columns], atol=2e-6 if fmt == "q4_0" else 0
        )


@pytest.mark.parametrize("tokens", [1, 4, 512])
def test_the_models_sizes_lower_for_a_gpu(tokens: int) -> None:
    shape = jax.ShapeDtypeStruct
    # an arena beyond 2^32 bytes, 262,144 cells in pages of 60
    args = (
        shape((tokens, 2, 12, 256), jnp.float32), shape((100_000, 16_384), jnp.uint32), shape((4370,), jnp.int32),
        shape((tokens, 512), jnp.int32), shape((tokens,), jnp.int32),
    )  # fmt: skip
    text = lower_for_cuda(
        partial(sparse_attention, ratio=4, kv_type="int8", cells_per_page=60, backend="triton"), *args
    )
    assert text.count("__gpu$xla.gpu.triton") == (1 if tokens > 8 else 2)


def test_a_window_is_cut_into_the_same_pieces_whatever_its_size() -> None:
    assert len({blocks_for(tokens) for tokens in range(1, 9)}) == 1
    assert blocks_for(8).split_cells
    assert not blocks_for(9).split_cells


def test_operands_that_do_not_fit_are_refused() -> None:
    q, arena, pages = jnp.zeros((2, 2, 3, 64)), jnp.zeros((3, 999), jnp.uint32), jnp.zeros(4, jnp.int32)
    blocks, positions = jnp.zeros((2, 5), jnp.int32), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"q is f32\[T, G, h, d\], got float32\[2, 2, 3\]"):
        sparse_attention(q[..., 0], arena, pages, blocks, positions, 4, "int8", 12)
    with pytest.raises(ValueError, match=r"blocks are i32\[2, k\], got int32\[1, 5\]"):
        sparse_attention(q, arena, pages, blocks[:1], positions, 4, "int8", 12)
    with pytest.raises(ValueError, match="blocks of 5 cells: a page of 12 cells must hold whole blocks"):
        sparse_attention(q, arena, pages, blocks, positions, 5, "int8", 12)
    with pytest.raises(ValueError, match="tiles of 32 and pieces of 48 cells"):
        sparse_attention(q, arena, pages, blocks, positions, 4, "int8", 12, sizes=Blocks(32, 48, 3, 4))

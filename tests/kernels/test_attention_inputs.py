"""Norms, rotation, new cells and new block keys in one launch, against plain jnp and float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.kernels.attention_inputs import AttentionInputs, CellShape, Norms, Projections, attention_inputs
from strata_jax.kernels.attention_inputs.packing import pack, values_at
from strata_jax.kernels.kv_codec import encode_k
from strata_jax.kv_types import SIDES, cell_bytes
from tests.kernels.lowering import lower_for_cuda
from tests.kernels.place import INTERPRET

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton backend:DeprecationWarning")

GROUPS, HEADS, HEAD, INDEX_HEADS, INDEX, RATIO = 2, 6, 64, 4, 16, 4
PAGE_CELLS, CELLS, NUM_PAGES = 8, 96, 15
UNMAPPED = 1  # this group of cells has no page
POISON = np.uint32(0xFFFFFFFF)


class Case:
    def __init__(self, kv_type: str, tokens: int, start: int, count: int, head: int = HEAD) -> None:
        rng = np.random.default_rng(tokens)

        def random(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        self.shape = CellShape(kv_type, GROUPS, PAGE_CELLS, CELLS, RATIO, 16, 1e4, 1e-6)
        self.projected = Projections(
            random(tokens, HEADS * 2 * head), random(tokens, GROUPS * head), random(tokens, GROUPS * head),
            random(tokens, INDEX_HEADS * INDEX), random(tokens, INDEX),
        )  # fmt: skip
        self.norms = Norms(*(1 + 0.1 * random(size) for size in (head, head, INDEX, INDEX)))
        self.tail, self.start, self.count = random(RATIO - 1, INDEX), np.int32(start), np.int32(count)
        self.pages = rng.permutation(NUM_PAGES)[: CELLS // PAGE_CELLS].astype(np.int32)
        self.pages[UNMAPPED] = -1
        page_words = PAGE_CELLS * sum(cell_bytes(kv_type, GROUPS, head)) // 4 + 3
        self.arena = np.full((NUM_PAGES, page_words), POISON)
        self.keys = np.full((CELLS // RATIO + 1, INDEX), np.nan, np.float32)

    def __call__(self, backend: str) -> AttentionInputs:
        call = partial(attention_inputs, shape=self.shape, backend=backend, interpret=INTERPRET)
        args = self.projected, self.norms, self.tail, self.pages, self.start, self.count, self.arena, self.keys
        return jax.tree.map(np.asarray, jax.jit(call)(*args))


# a block that begins in the tail, a row that is not real, a group without a page; the context ends, a side is rotated
CASES = [("int8", 9, 15, 8, HEAD), ("k8v4", 4, 93, 4, 128)]


@pytest.mark.parametrize(("kv_type", "tokens", "start", "count", "head"), CASES)
def test_the_kernel_makes_what_jnp_makes(kv_type: str, tokens: int, start: int, count: int, head: int) -> None:
    case = Case(kv_type, tokens, start, count, head)
    expected, found = case("reference"), case("triton")
    for name in ("q", "index_q", "keys", "raw"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=1e-6, err_msg=name)
    for name in ("arena", "positions", "seen"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    positions = np.arange(start, start + count)
    written = sum(position < CELLS and position // PAGE_CELLS != UNMAPPED for position in positions)
    assert (found.arena != POISON).sum() <= written * sum(cell_bytes(kv_type, GROUPS, head)) // 4
    assert ((found.arena != POISON).any(1)).sum() == len(
        {p // PAGE_CELLS for p in positions if p < CELLS and p // PAGE_CELLS != UNMAPPED}
    )
    complete = [block for block in range(CELLS // RATIO) if start < (block + 1) * RATIO <= start + count]
    assert np.flatnonzero(~np.isnan(found.keys[:, 0])).tolist() == complete


def test_queries_and_block_keys_equal_float64() -> None:
    case = Case("f32", 3, 6, 3)
    found = case("triton")

    def turned(x: np.ndarray, gamma: np.ndarray, position: int) -> np.ndarray:
        x = gamma * x / np.sqrt((x**2).mean() + 1e-6)
        half = case.shape.rope_dim // 2
        angle = position * 1e4 ** (-np.arange(half) / half)
        low, high = x[:half].copy(), x[half : 2 * half].copy()
        x[:half] = low * np.cos(angle) - high * np.sin(angle)
        x[half : 2 * half] = high * np.cos(angle) + low * np.sin(angle)
        return x

    queries = case.projected.query_gate.reshape(3, HEADS, 2 * HEAD)[..., :HEAD].astype(np.float64)
    for token in range(3):
        for head in range(HEADS):
            expected = turned(queries[token, head], case.norms.q, 6 + token) / 8
            np.testing.assert_allclose(found.q[token].reshape(HEADS, HEAD)[head], expected, atol=2e-6)
    raw = np.concatenate([case.tail, case.projected.index_k]).astype(np.float64)  # of positions 3 to 8
    np.testing.assert_allclose(found.keys[1], turned(raw[1:5].mean(0), case.norms.index_k, 4), atol=2e-6)
    assert np.isnan(found.keys[[0, 2]]).all()
    assert (found.positions.tolist(), found.seen.tolist()) == ([6, 7, 8], [1, 2, 2])


@pytest.mark.parametrize("fmt", sorted(set(sum(SIDES.values(), ())) - {"q4_0"}))
def test_every_format_is_packed_as_in_jnp(fmt: str) -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((7, GROUPS, HEAD)) * 10.0 ** rng.integers(-3, 6, (7, GROUPS, 1))).astype(np.float32)
    x[0], x[1, 0, 0] = 0, 1e30  # no scale; a scale beyond float16

    @jax.jit
    def packed(cell: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        return pack(fmt, [cell[head, at] for head, at in values_at(fmt, GROUPS, HEAD)])

    with jax.default_device(jax.devices("cpu")[0]):  # a GPU divides in a way that depends on what is fused
        expected = np.asarray(jax.jit(lambda x: encode_k(x, fmt))(x))
        for cell, words in zip(x, expected, strict=True):
            found = np.full(words.shape, POISON)
            for at, part in packed(cell):
                found[np.asarray(at)] = part
            np.testing.assert_array_equal(found, words)


@pytest.mark.parametrize("tokens", [1, 512])
def test_the_models_sizes_lower_for_a_gpu(tokens: int) -> None:
    f32, i32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32), partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    projected = Projections(*(f32((tokens, size)) for size in (12_288, 512, 512, 512, 128)))
    norms = Norms(*(f32((size,)) for size in (256, 256, 128, 128)))
    shape = CellShape("int8", 2, 60, 262_144, 4, 64, 1e7, 1e-6)
    text = lower_for_cuda(
        partial(attention_inputs, shape=shape, backend="triton"), projected, norms, f32((3, 128)), i32((4370,)),
        i32(()), i32(()), jax.ShapeDtypeStruct((100_000, 16_384), jnp.uint32), f32((65_537, 128)),
    )  # fmt: skip
    assert text.count("__gpu$xla.gpu.triton") == 1


def test_operands_that_do_not_fit_are_refused() -> None:
    case = Case("int8", 2, 0, 2)

    def refused(message: str, **changes: object) -> None:
        given = {
            "projected": case.projected, "norms": case.norms, "tail": case.tail, "pages": case.pages,
            "start": case.start, "count": case.count, "arena": case.arena, "keys": case.keys, "shape": case.shape,
        }  # fmt: skip
        with pytest.raises(ValueError, match=message):
            attention_inputs(**{**given, **changes})  # type: ignore[arg-type]

    refused(r"k and v are f32\[2, 128\], got \[2, 64\]", projected=replace(case.projected, k=np.zeros((2, 64))))
    refused(r"query_gate .* H a multiple of 2 heads", projected=replace(case.projected, query_gate=np.zeros((2, 384))))
    refused(r"index_q and index_k are", projected=replace(case.projected, index_k=np.zeros((2, 8))))
    refused(r"tail and keys are f32\[3, 16\]", tail=case.tail[:2])
    refused("blocks of 1 cells: at least 2", shape=replace(case.shape, ratio=1))
    refused("rope_dim=18: an even number", shape=replace(case.shape, rope_dim=18))

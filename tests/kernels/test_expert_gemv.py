"""The expert kernels in Pallas' interpreter against float64 products of the packed blocks.

Few pairs of types, since test_planes decodes every type, and few sizes, since compiling is what costs.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.gguf.blocks import block_type
from strata_jax.kernels.expert_gemv import (
    Blocks,
    ExpertLayout,
    LaunchBlocks,
    expert_gemv,
    expert_layout,
    pack_expert,
    pack_input,
    plan_window,
    triton,
)
from strata_jax.kernels.expert_gemv.blocks import DEFAULT, blocks_for
from strata_jax.kernels.expert_gemv.vectors import VectorRows, down_rows, input_rows
from tests.kernels.lowering import lower_for_cuda
from tests.kernels.place import INTERPRET
from tests.kernels.test_dequant import gguf_py

pytestmark = pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
E, F, X, K = 256, 64, 12, 3
PAGE_WORDS = 256
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # compile, not run
BLOCKS = Blocks(LaunchBlocks(rows=32, warps=1), LaunchBlocks(rows=64, warps=1))


def random_packed(type_name: str, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """Random codes under scales that give weights near 1 / sqrt(cols)."""
    block = block_type(type_name)
    packed = rng.integers(0, 256, (rows, cols // block.block_len, block.block_bytes), dtype=np.uint8)
    at = 208 if type_name == "Q6_K" else 0
    size = (rows, cols // block.block_len, 2 if type_name in ("Q5_1", "Q5_K", "Q4_K") else 1)

    def scaled(scale: float) -> np.ndarray:
        scales = (scale * rng.uniform(0.5, 1.0, size) * rng.choice([-1, 1], size)).astype(np.float16)
        packed[..., at : at + 2 * size[2]] = scales.view(np.uint8)
        return packed.reshape(rows, -1)

    return scaled(1 / np.sqrt(cols) / np.std(gguf_py(scaled(1.0), type_name)))


@functools.cache
def compiled(layout: ExpertLayout, backend: str):
    call = functools.partial(expert_gemv, layout=layout, backend=backend, blocks=BLOCKS, interpret=INTERPRET)
    return jax.jit(call, compiler_options=FAST)


class Case:
    """Experts in a bank, some of them in an arena of a core and a segment whose other pages hold rubbish."""

    def __init__(self, gate_up: str, down: str, resident: dict[int, int], fused: bool = False):
        rng = np.random.default_rng(0)
        self.layout = expert_layout(gate_up, gate_up, down, E, F)
        self.parts = [
            (random_packed(gate_up, F, E, rng), random_packed(gate_up, F, E, rng), random_packed(down, E, F, rng))
            for _ in range(X)
        ]
        self.types = (gate_up, gate_up, down)
        bank = np.stack(
            [
                pack_expert((np.concatenate((gate, up)), down) if fused else (gate, up, down), self.layout)
                for gate, up, down in self.parts
            ]
        )
        num_pages = -(-self.layout.num_words // PAGE_WORDS)
        core, segment = (np.full((4 * num_pages, PAGE_WORDS), 0xFFFFFFFF, np.uint32) for _ in range(2))
        pages = np.full(X, -1, np.int32)
        for expert, slot in resident.items():
            array, first = (core, slot * num_pages) if slot < 4 else (segment, (slot - 4) * num_pages)
            pages[expert] = slot * num_pages
            array[first : first + num_pages].reshape(-1)[: self.layout.num_words] = bank[expert]
            bank[expert] = 0xFFFFFFFF  # must not be read
        self.arrays = (jnp.asarray(core), jnp.asarray(segment))
        self.bank, self.pages = jnp.asarray(bank), jnp.asarray(pages)

    def run(self, u, ids, weights, backend="triton"):
        return np.asarray(compiled(self.layout, backend)(u, ids, weights, self.arrays, self.bank, self.pages))

    def expected(self, u, ids, weights):
        """In float64 from the packed blocks of the file."""
        out = np.zeros(u.shape)
        for t, k in np.ndindex(ids.shape):
            if ids[t, k] == X:
                continue
            parts = zip(self.parts[ids[t, k]], self.types)
            gate, up, down = (gguf_py(packed, name).astype(np.float64) for packed, name in parts)
            x = np.asarray(u[t], np.float64)
            g = gate @ x
            out[t] += weights[t, k] * (down @ (g / (1 + np.exp(-g)) * (up @ x)))
        return out


def window(num_tokens: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    u = rng.standard_normal((num_tokens, E)).astype(np.float32)
    ids = np.sort(np.stack([rng.permutation(X)[:K] for _ in range(num_tokens)]), axis=1).astype(np.int32)
    return u, ids, rng.uniform(0.1, 1.0, ids.shape).astype(np.float32)


def assert_close(got, expected, limit=5e-7):
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < limit


RESIDENT = {1: 0, 2: 5, 7: 3, 9: 1}


@pytest.mark.parametrize(("gate_up", "down"), [("IQ3_XXS", "IQ4_NL"), ("IQ2_S", "Q5_1")])
def test_a_token_gets_the_weighted_sum_of_its_experts(gate_up, down):
    u, _, weights = window(1, seed=3)
    ids = np.asarray([[1, 2, 4]], np.int32)  # in the core, in the segment, in the bank
    case = Case(gate_up, down, RESIDENT)
    assert_close(case.run(u, ids, weights), case.expected(u, ids, weights))


def test_tokens_of_a_window_share_experts_and_leave_places_unused():
    u, _, weights = window(4, seed=4)
    ids = np.asarray([[0, 2, X], [1, 2, 4], [2, X, X], [2, 3, 4]], np.int32)  # 2 and 4 by four tokens and by two
    case = Case("Q2_0", "Q2_0", RESIDENT)
    expected = case.expected(u, ids, weights)
    assert_close(case.run(u, ids, weights), expected)
    assert_close(case.run(u, ids, weights, backend="reference"), expected)
    assert (case.run(u, np.full_like(ids, X), weights) == 0).all()
    u[1, 5] = np.nan  # whole numbers have none, yet it must not look like an answer
    got = case.run(u, ids, weights)
    assert np.isnan(got[1]).all()
    assert_close(got[[0, 2, 3]], expected[[0, 2, 3]])


def test_rows_of_no_pair_stay_unwritten():
    """What the interpreter has not written is NaN."""
    case = Case("Q2_0", "Q2_0", RESIDENT)
    h = np.random.default_rng(6).standard_normal((4, F)).astype(np.float32)

    def down(h, ids):
        x = pack_input(h, down_rows(case.layout))
        operands = (plan_window(ids, case.pages), case.arrays, case.bank, case.pages, case.layout, BLOCKS.down)
        return triton.down(x, *operands, max_tokens=4, interpret=INTERPRET)

    got = np.asarray(jax.jit(down, compiler_options=FAST)(h, np.asarray([[4], [4], [4], [X]], np.int32)))
    assert_close(got[:3], h[:3] @ gguf_py(case.parts[4][2], "Q2_0").T)
    assert np.isnan(got[3]).all()


def test_the_bits_do_not_depend_on_where_experts_lie():
    u, _, weights = window(1, seed=5)
    ids = np.asarray([[0, 2, 9]], np.int32)
    cases = [Case("IQ3_XXS", "IQ4_NL", where) for where in ({}, RESIDENT, {0: 6, 2: 1, 9: 2})]
    cases.append(Case("IQ3_XXS", "IQ4_NL", {9: 7}, fused=True))
    first, *others = (case.run(u, ids, weights) for case in cases)
    assert_close(first, cases[0].expected(u, ids, weights))
    for other in others:
        np.testing.assert_array_equal(first.view(np.uint32), other.view(np.uint32))


def test_a_window_is_planned_expert_by_expert_missing_ones_first():
    ids = np.asarray([[1, 4, 7], [0, 4, X], [4, 7, 9]], np.int32)
    pages = np.full(X, -1, np.int32)
    pages[[0, 4]] = 8, 16
    plan = jax.jit(plan_window)(ids, pages)
    assert plan.experts.tolist() == [1, 7, 9, 0, 4, 0, 0, 0, 0]
    assert plan.first_row.tolist() == [0, 1, 3, 4, 5, 8, 8, 8, 8, 8]
    assert plan.token_of.tolist()[:8] == [0, 0, 2, 2, 1, 0, 1, 2]
    assert plan.row_of.tolist() == [[0, 5, 1], [4, 6, 9], [7, 2, 3]]


def test_gate_and_up_may_want_their_codes_in_other_orders():
    layout = expert_layout("Q2_0", "Q8_0", "IQ4_NL", E, F)
    assert input_rows(layout) == VectorRows(("strided", "consecutive"))
    assert down_rows(layout).orders == ("interleaved",)
    rng = np.random.default_rng(7)
    parts = [
        random_packed(name, *shape, rng) for name, shape in (("Q2_0", (F, E)), ("Q8_0", (F, E)), ("IQ4_NL", (E, F)))
    ]
    bank = jnp.asarray(pack_expert(parts, layout))[None]
    u = rng.standard_normal((1, E)).astype(np.float32)
    gate, up, down = (gguf_py(part, name).astype(np.float64) for part, name in zip(parts, ("Q2_0", "Q8_0", "IQ4_NL")))
    x = np.asarray(u[0], np.float64)
    one = np.ones((1, 1), np.float32)
    arrays, none = (jnp.zeros((1, PAGE_WORDS), jnp.uint32),), jnp.full(1, -1, jnp.int32)
    got = compiled(layout, "triton")(u, np.zeros((1, 1), np.int32), one, arrays, bank, none)
    g = gate @ x
    assert_close(np.asarray(got)[0], down @ (g / (1 + np.exp(-g)) * (up @ x)))


def test_the_models_layer_lowers_for_a_gpu():
    layout = expert_layout("IQ3_XXS", "IQ3_XXS", "Q2_0", 2560, 640)
    shape = jax.ShapeDtypeStruct
    text = lower_for_cuda(
        functools.partial(expert_gemv, layout=layout),
        shape((2, 2560), jnp.float32),
        shape((2, 10), jnp.int32),
        shape((2, 10), jnp.float32),
        [shape((2048, 4096), jnp.uint32)] * 3,
        shape((512, layout.num_words), jnp.uint32),
        shape((512,), jnp.int32),
    )
    assert text.count("triton") >= 2


def test_blocks_are_those_of_the_table_and_never_wider_than_a_tile():
    one, more = (blocks_for("NVIDIA H200", 128, tokens) for tokens in (1, 2))
    assert one == Blocks(LaunchBlocks(32, 8), LaunchBlocks(128, 4))
    assert more == Blocks(LaunchBlocks(32, 4), LaunchBlocks(128, 4))
    assert blocks_for("another GPU", 128, 8) == DEFAULT[-1][1]
    assert blocks_for("NVIDIA H200", 32, 2) == Blocks(LaunchBlocks(32, 4), LaunchBlocks(32, 4))
    assert LaunchBlocks(16, 2).items_at_once(80) == 16
    assert LaunchBlocks(128, 4).items_at_once(20) == 4
    assert LaunchBlocks(32, 4).items_at_once(20) == 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"u": np.zeros((9, E), np.float32)}, r"u is f32\[T, 256\] with T from 1 to 8, got float32\[9, 256\]"),
        ({"u": jnp.zeros((2, E), jnp.bfloat16)}, r"u is f32\[T, 256\] .* got bfloat16\[2, 256\]"),
        ({"weights": np.zeros((2, 4), np.float32)}, r"\[2, K\], got int32\[2, 3\] and float32\[2, 4\]"),
        ({"ids": np.zeros((2, K), np.uint8)}, r"i32 and f32 .* got uint8\[2, 3\] and"),
        ({"bank": np.zeros((X, 5), np.uint32)}, r"bank is u32\[12, \d+\], got uint32\[12, 5\]"),
        ({"pages": np.zeros(X, np.uint32)}, r"pages is i32\[X\], got uint32\[12\]"),
        ({"arrays": ()}, r"one or more arrays .* got \[\]"),
        ({"arrays": (np.zeros((4, 96), np.uint32),)}, r"pages of 96 words are no whole lines of 64 words"),
        ({"backend": "mosaic"}, r"backend='mosaic' is unknown; known: reference, triton"),
        ({"blocks": Blocks(LaunchBlocks(32, 1), LaunchBlocks(128, 1))}, r"down: 128 rows .* tile of 64 rows"),
        ({"blocks": Blocks(LaunchBlocks(16, 1), LaunchBlocks(64, 1))}, r"gate_up: 16 rows .* no whole items of 32"),
    ],
)
def test_what_does_not_fit_is_named(changed, message):
    layout = expert_layout("Q2_0", "Q2_0", "Q2_0", E, F)
    u, ids, weights = window(2)
    arrays = (np.zeros((4, PAGE_WORDS), np.uint32),)
    bank, pages = np.zeros((X, layout.num_words), np.uint32), np.full(X, -1, np.int32)
    given = {"u": u, "ids": ids, "weights": weights, "arrays": arrays, "bank": bank, "pages": pages}
    with pytest.raises(ValueError, match=message):
        expert_gemv(**(given | {"layout": layout} | changed))

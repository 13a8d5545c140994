"""Experts by kernels, interpreted on the CPU: the same answers as the reference, wherever an expert lies.

One block has types whose planes have the packed bytes at these widths, the others have not. The kernels multiply
a window in float32 and a chunk with operands rounded to bfloat16.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.engine import expert_kernels
from strata_jax.engine.engine import Engine
from strata_jax.engine.experts import mixture
from strata_jax.engine.session import Session
from strata_jax.errors import ConfigError
from strata_jax.geometry import Geometry
from strata_jax.gguf.blocks import block_type
from strata_jax.gguf.planes import PLANE_TYPES
from strata_jax.kernels import backend
from strata_jax.kernels.expert_gemv import ExpertLayout
from strata_jax.kernels.grouped_matmul.blocks import DEFAULT, TABLE
from strata_jax.kernels.planes import from_planes
from strata_jax.memory.expert_kernels import choose_kernels, kernel_problem
from strata_jax.memory.layout import MAX_GROUP_ROWS
from strata_jax.memory.plan import plan
from strata_jax.memory.request import PlanRequest
from strata_jax.presets import model_shape, preset_geometry, resized_geometry
from strata_jax.synthetic.full import SyntheticModel
from tests.kernels.lowering import lower_for_cuda

LAYERS, EXPERTS = 2, 16
PROMPT, CHUNK, NEW = 8, 32, 16
# of the largest value
WINDOW_TOLERANCE, CHUNK_TOLERANCE, LOGITS_TOLERANCE = 1e-4, 1e-2, 1e-4
NONE = np.full(EXPERTS, -1, np.int32)


def with_experts(geometry: Geometry, types: dict[int, tuple[str, str]]) -> Geometry:
    """Give blocks other types of experts: (gate and up, down)."""
    tensors = dict(geometry.tensor_types)
    for layer, (gate_up, down) in types.items():
        for part, name in (("gate", gate_up), ("up", gate_up), ("down", down)):
            tensor = tensors[f"blk.{layer}.ffn_{part}_exps.weight"]
            block = block_type(name)
            num_bytes = tensor.num_parameters // block.block_len * block.block_bytes
            tensors[tensor.name] = replace(tensor, type_name=name, num_bytes=num_bytes)
    return replace(geometry, tensor_types=tensors)


# only block 1 has a kernel: interpreted kernels take seconds to compile, block by block
LAYER, TYPES = 1, ("Q8_0", "IQ4_NL")


@pytest.fixture(scope="module")
def model() -> SyntheticModel:
    """A GDN block with the n-gram table and an attention block, whose experts have a kernel."""
    small = model_shape("synthetic_small", num_experts=EXPERTS)
    shape = replace(small, num_layers=LAYERS, full_attention_interval=2, ple_layer=0)
    return SyntheticModel(shape, with_experts(resized_geometry("synthetic_small", shape, "q2_0"), {LAYER: TYPES}))


def load(model: SyntheticModel, *, kernels: bool) -> Engine:
    request = PlanRequest(
        context_cells=128, chunk_tokens=CHUNK, kv_type="f32", expert_slots=LAYERS * EXPERTS, spec_window=1,
        all_logits=True, expert_kernels=kernels,
    )  # fmt: skip
    return Engine.load(model, model.geometry, plan(model.geometry, request))


@pytest.fixture(scope="module")
def reference(model: SyntheticModel) -> Engine:
    return load(model, kernels=False)


@pytest.fixture(scope="module")
def by_kernel(model: SyntheticModel) -> Engine:
    return load(model, kernels=True)


class Routed:
    """What a block's experts give for the first ``count`` of some random tokens, the arena lying in two arrays."""

    def __init__(self, engine: Engine, num_tokens: int) -> None:
        g, self.engine = engine.geometry, engine
        u = np.random.default_rng(num_tokens).standard_normal((num_tokens, g.embed_width), np.float32)
        w, self.pages = engine.weights.blocks[LAYER].whole().experts, np.asarray(engine.tables.expert_pages(LAYER))
        assert (self.pages >= 0).all()
        self.cut = int(np.sort(self.pages)[EXPERTS // 2])
        self.run = jax.jit(lambda *args: mixture(jnp.asarray(u), w, *args, g)[0])

    def __call__(self, count: int, pages: np.ndarray | None = None, *, bank_flip: int = 0, arena_flip: int = 0
                 ) -> np.ndarray:  # fmt: skip
        bank, arena = self.engine.banks[LAYER], self.engine.arena ^ jnp.uint32(arena_flip)
        bank = replace(bank, blobs=bank.blobs ^ jnp.uint32(bank_flip))
        where = jnp.asarray(self.pages if pages is None else pages)
        return np.asarray(self.run(bank, (arena[: self.cut], arena[self.cut :]), where, jnp.int32(count)))


def far(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference as a part of the largest value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(("num_tokens", "count", "tolerance"), [(2, 1, WINDOW_TOLERANCE), (32, 27, CHUNK_TOLERANCE)])
def test_experts_give_what_the_reference_gives_wherever_they_lie(
    num_tokens: int, count: int, tolerance: float, by_kernel: Engine, reference: Engine
) -> None:
    bank = by_kernel.banks[LAYER]
    assert isinstance(bank.layout, ExpertLayout)
    assert bank.blobs.shape == reference.banks[LAYER].blobs.shape
    plain, kernel = Routed(reference, num_tokens), Routed(by_kernel, num_tokens)
    alone, kernel_alone = plain(0), kernel(0)  # the shared expert
    for real in (count, num_tokens):
        expected, found = plain(real) - alone, kernel(real) - kernel_alone
        assert np.abs(expected).max() > 0.1 * np.abs(alone).max()
        assert far(found, expected) < tolerance
        assert not found[real:].any()
    # residency does not change a bit, and the copy that the tables name is the one that is read
    everywhere, half = kernel(num_tokens), np.where(np.arange(EXPERTS) % 2, kernel.pages, NONE)
    for pages in (half, NONE):
        np.testing.assert_array_equal(kernel(num_tokens, pages), everywhere)
    np.testing.assert_array_equal(kernel(num_tokens, bank_flip=0x01010101), everywhere)
    np.testing.assert_array_equal(kernel(num_tokens, NONE, arena_flip=0x01010101), everywhere)
    assert not np.array_equal(kernel(num_tokens, half, bank_flip=0x01010101), everywhere)
    assert not np.array_equal(kernel(num_tokens, half, arena_flip=0x01010101), everywhere)


def test_text_is_the_references(by_kernel: Engine, reference: Engine, model: SyntheticModel) -> None:
    """Through decode windows alone: a chunk's programs would take as long again to compile."""
    prompt = model.topic_tokens(0, PROMPT)
    texts, logits = [], []
    for engine in (reference, by_kernel):
        session = Session(engine)
        session.read_windows(prompt)
        logits.append(session.last_logits())
        rounds = list(session.decode(logits[-1], max_tokens=NEW))
        texts.append([token for record in rounds for token in record.emitted])
        assert sum(record.hits for record in rounds) == sum(record.lookups for record in rounds) > 0
    assert 0 < far(logits[1], logits[0]) < LOGITS_TOLERANCE
    assert len(texts[0]) == NEW
    assert texts[1] == texts[0]


def test_blocks_without_a_kernel_stay_as_packed(by_kernel: Engine) -> None:
    assert [isinstance(bank.layout, ExpertLayout) for bank in by_kernel.banks] == [False, True]
    counts = {"num_layers": 4, "num_experts": EXPERTS}
    geometry = with_experts(preset_geometry("synthetic_small", "q2_0", **counts), {LAYER: TYPES})
    used, notes = choose_kernels("auto", geometry, on_gpu=True, spec_window=1)
    assert used
    assert [("3 blocks, 0 first are computed by the reference: an expert takes" in note) for note in notes] == [True]
    with pytest.raises(ConfigError, match=r"engine.kernels=triton and .* no kernel for the experts of 3 blocks, 0 fi"):
        choose_kernels("triton", geometry, on_gpu=True, spec_window=1)
    unknown = with_experts(geometry, {3: ("F16", "F16")})
    assert kernel_problem(unknown, 3) == (
        f"ffn_gate_exps.weight: no planes for type 'F16'; there are for {', '.join(PLANE_TYPES)}"
    )
    all_known = with_experts(geometry, dict.fromkeys(range(4), TYPES))
    assert choose_kernels("triton", all_known, on_gpu=False, spec_window=1) == (True, ())
    with pytest.raises(ConfigError, match="experts of block 4 "):
        choose_kernels("triton", all_known, on_gpu=False, spec_window=2)  # the draft block is loaded then
    assert choose_kernels("auto", geometry, on_gpu=False, spec_window=2) == (False, ())
    assert choose_kernels("reference", geometry, on_gpu=True, spec_window=2) == (False, ())
    none = with_experts(geometry, {LAYER: ("Q2_0", "Q2_0")})
    assert choose_kernels("auto", none, on_gpu=True, spec_window=1)[0] is False
    request = PlanRequest(context_cells=128, expert_kernels=True, page_bytes=5000)
    with pytest.raises(ConfigError, match=r"engine.page_kib=4.88281 \(5000 bytes\) and engine.kernels: the kernels"):
        plan(geometry, request)


def test_planes_hold_the_experts_of_the_source(by_kernel: Engine, model: SyntheticModel) -> None:
    bank = by_kernel.banks[LAYER]
    assert isinstance(bank.layout, ExpertLayout)
    for expert in (0, EXPERTS - 1):
        blob = np.asarray(bank.fetch(jnp.int32(expert)))
        for part, layout, first in zip(("gate", "up", "down"), bank.layout.parts, bank.layout.firsts, strict=True):
            packed = from_planes(blob[first : first + layout.num_words], layout)
            np.testing.assert_array_equal(packed, model.data(f"blk.{LAYER}.ffn_{part}_exps.weight")[expert])


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("num_tokens", [1, CHUNK])
def test_blocks_of_one_layout_are_lowered_once(
    num_tokens: int, by_kernel: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of a program for a GPU has one copy of the kernels for two blocks."""
    monkeypatch.setattr(backend, "interprets", lambda: False)
    bank, pages = by_kernel.banks[LAYER], by_kernel.arena.shape
    layout = bank.layout
    assert isinstance(layout, ExpertLayout)
    num_used = by_kernel.geometry.num_experts_used

    def one(u: jax.Array, scores: jax.Array, arena: jax.Array, words: jax.Array, pages: jax.Array) -> jax.Array:
        if num_tokens == 1:
            routing = expert_kernels.route(scores, u, u[0], pages, jnp.int32(1), num_used, layout)
            return expert_kernels.window(routing, (arena,), words, pages, layout)
        ids, weights = expert_kernels.choose(scores, num_used)
        return expert_kernels.chunk(u, ids, weights, (arena,), words, pages, layout)

    def two(u: jax.Array, *rest: jax.Array) -> Any:
        return sum(one(factor * u, *rest) for factor in (2.0, 3.0))

    shape = jax.ShapeDtypeStruct
    text = lower_for_cuda(
        two, shape((num_tokens, by_kernel.geometry.embed_width), jnp.float32),
        shape((num_tokens, EXPERTS), jnp.float32), shape(pages, jnp.uint32), shape(bank.blobs.shape, jnp.uint32),
        shape((EXPERTS,), jnp.int32),
    )  # fmt: skip
    kernels = re.findall(r"stablehlo.custom_call @\S*triton\S*\(", text)
    assert len(kernels) == (3 if num_tokens == 1 else 5)  # routing, two products; of a chunk, for arena and bank
    assert len(re.findall(r"call @_(?:window|start)\(", text)) == 2
    assert len(re.findall(r"call @_(?:route|choose)\(", text)) == 2


def test_all_block_sizes_are_within_what_the_plan_prices() -> None:
    for table in (*TABLE.values(), DEFAULT):
        assert max(blocks.rows for _, blocks in table) <= MAX_GROUP_ROWS

"""Replacement on the device: reference and interpreted kernel against the policy's own arithmetic, window by window."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.kernels.replace_experts import ResidentTables, replace_experts
from strata_jax.policies.replacement import counted, first_values, ranks_in_layer, replaced
from strata_jax.policies.replay import window_uses
from strata_jax.synthetic.routing import RoutingSkew
from strata_jax.synthetic.routing_trace import draw_trace
from tests.kernels.lowering import lower_for_cuda
from tests.kernels.place import INTERPRET

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

LAYERS, EXPERTS, USED, ROWS = 2, 20, 3, 2
MAX_FETCHES = ROWS * USED
KERNELS = {
    "reference": partial(replace_experts, backend="reference"),
    "interpreted": partial(replace_experts, backend="triton", interpret=INTERPRET),
}


def first_tables(each: int) -> tuple[ResidentTables, np.ndarray, np.ndarray]:
    """Tables with some experts of each block in slots, the first pages of slots, and the ranks of experts."""
    rng = np.random.default_rng(each)
    codes = rng.permutation(LAYERS * EXPERTS).astype(np.int32)
    rank = ranks_in_layer(codes, LAYERS, EXPERTS)
    slot_of = np.full((LAYERS, EXPERTS), -1, np.int32)
    slot_of[rank < each] = rng.permutation(LAYERS * each)
    values = first_values(rank)
    tables = ResidentTables(*map(jnp.asarray, (slot_of, values.count, values.last)), jnp.zeros(1, jnp.int32))
    return tables, (100 + 7 * rng.permutation(LAYERS * each)).astype(np.int32), rank


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("each", "decay"), [(8, 0.0), (8, 0.5), (4, 1.0), (EXPERTS, 0.5)])
def test_the_device_decides_as_the_policy(each: int, decay: float, name: str) -> None:
    tables, slot_page, rank = first_tables(each)
    values, before = first_values(rank), np.asarray(tables.slot_of)
    trace = draw_trace(RoutingSkew(0.8), num_layers=LAYERS, num_experts=EXPERTS, num_used=USED, num_tokens=36,
                       conversation_tokens=12, seed=each)  # fmt: skip
    run = jax.jit(partial(KERNELS[name], decay=decay, max_fetches=MAX_FETCHES), donate_argnums=0)
    moved, windows = 0, [*window_uses(trace.experts, EXPERTS, ROWS)]
    windows.insert(5, np.zeros_like(windows[0]))  # of a round that was told nothing
    for uses in windows:
        held = before >= 0
        values = counted(values, uses, decay)
        layers, coming, leaving = replaced(held, uses, values)
        for layer in range(LAYERS):
            done = run(tables, jnp.array([layer], jnp.int32), jnp.asarray(uses[layer]), jnp.asarray(slot_page))
            mine = layers == layer
            new, old = coming[mine], leaving[mine]
            slots = before[layer].copy()
            slots[new], slots[old] = slots[old], -1
            num = int(done.num_fetches[0])
            assert np.asarray(done.experts).tolist() == [*new.tolist(), *[0] * (MAX_FETCHES - num)]
            assert np.asarray(done.fetch_pages)[:num].tolist() == slot_page[before[layer][old]].tolist()
            assert np.asarray(done.tables.slot_of)[layer].tolist() == slots.tolist()
            assert np.asarray(done.pages).tolist() == np.where(slots < 0, -1, slot_page[slots]).tolist()
            tables, before = done.tables, np.asarray(done.tables.slot_of)
            moved += num
        assert np.array_equal(tables.count, values.count)
        assert np.array_equal(tables.last, values.last)
        tables = replace(tables, clock=tables.clock + 1)
    assert np.array_equal(np.sort(before[before >= 0]), np.arange(LAYERS * each))
    assert moved == 0 if each == EXPERTS else moved > 5


def test_what_does_not_fit_is_refused() -> None:
    tables, slot_page, _ = first_tables(4)
    run = partial(replace_experts, slot_page=jnp.asarray(slot_page))
    uses, block = jnp.zeros(EXPERTS, jnp.int32), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=r"layer is i32\[1\], got int32\[\]"):
        run(tables, jnp.int32(0), uses, decay=0.5, max_fetches=2)
    with pytest.raises(ValueError, match=r"uses is i32\[20\], got float32\[20\]"):
        run(tables, block, uses.astype(jnp.float32), decay=0.5, max_fetches=2)
    with pytest.raises(ValueError, match=r"decay=1.5: must be from 0 to 1"):
        run(tables, block, uses, decay=1.5, max_fetches=2)
    with pytest.raises(ValueError, match="max_fetches=21: must be from 1 to the 20 experts"):
        run(tables, block, uses, decay=0.5, max_fetches=21)


def test_the_kernel_is_lowered_for_cuda_in_one_launch() -> None:
    def shape(*dims: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    tables = ResidentTables(shape(49, 512), shape(49, 512, dtype=jnp.float32), shape(49, 512), shape(1))
    text = lower_for_cuda(
        partial(replace_experts, decay=0.98, max_fetches=10, backend="triton"),
        tables,
        shape(1),
        shape(512),
        shape(4_000),
    )
    assert text.count("__gpu$xla.gpu.triton") == 1
    assert text.count("output_operand_alias<") == 3

"""Dense matrices in planes: loaded with the bytes of the file, looked up and multiplied as those that stay stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.engine.joined import Joined
from strata_jax.engine.load import load_weights
from strata_jax.engine.matrix import Matrix, linears, take_rows
from strata_jax.engine.model import Weights
from strata_jax.geometry import Geometry
from strata_jax.gguf.blocks import block_type
from strata_jax.gguf.layout import OUTPUT, TOKEN_EMBD
from strata_jax.gguf.tensors import TensorInfo
from strata_jax.memory.dense_planes import dense_planes
from strata_jax.memory.sizes import model_sizes
from strata_jax.presets import model_shape, preset_geometry
from strata_jax.synthetic.full import SyntheticModel

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton backend:DeprecationWarning")
COUNTS = {"num_layers": 4, "num_experts": 16}
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # compile, not run


def with_type(geometry: Geometry, names: tuple[str, ...], type_name: str) -> Geometry:
    """Store some tensors in another type."""
    tensors, block = dict(geometry.tensor_types), block_type(type_name)
    for name in names:
        num_bytes = tensors[name].num_parameters // block.block_len * block.block_bytes
        tensors[name] = replace(tensors[name], type_name=type_name, num_bytes=num_bytes)
    return replace(geometry, tensor_types=tensors)


@pytest.fixture(scope="module")
def model() -> SyntheticModel:
    geometry = with_type(preset_geometry("synthetic_small", "q2_0", **COUNTS), (TOKEN_EMBD, OUTPUT), "Q8_0")
    return SyntheticModel(model_shape("synthetic_small", **COUNTS), geometry)


@pytest.fixture(scope="module")
def stored(model: SyntheticModel) -> Weights:
    return load_weights(model, model.geometry, with_draft=True)


@pytest.fixture(scope="module")
def in_planes(model: SyntheticModel) -> Weights:
    return load_weights(model, model.geometry, with_draft=True, kernels=True)


def whole(tree: Any) -> Any:
    """Weights with their matrices' words, wherever these are joined."""
    found = jax.tree.map(lambda x: x.whole() if isinstance(x, Joined) else x, tree, is_leaf=is_joined)
    return whole(found) if any(map(is_joined, jax.tree.leaves(found, is_leaf=is_joined))) else found


def is_joined(x: Any) -> bool:
    return isinstance(x, Joined)


def matrices(weights: Weights) -> Iterator[tuple[str, Matrix]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(whole(weights), is_leaf=lambda x: isinstance(x, Matrix))
    return ((jax.tree_util.keystr(path), leaf) for path, leaf in leaves if isinstance(leaf, Matrix))


def test_planes_have_the_bytes_of_the_file_and_its_rows(
    model: SyntheticModel, stored: Weights, in_planes: Weights
) -> None:
    expected, found = dict(matrices(stored)), dict(matrices(in_planes))
    assert found.keys() == expected.keys()
    types = set()
    for name, w in found.items():
        same = expected[name]
        num_bytes = w.data.nbytes if w.planes is None else 4 * w.planes.layout.num_words
        assert (w.rows, w.cols, w.type_name, num_bytes) == (same.rows, same.cols, same.type_name, same.data.nbytes)
        assert same.planes is None
        assert same.many_rows == "float32"
        if name == ".embed":  # rows are looked up there, nothing is multiplied
            assert w.planes is None
            continue
        layout = None if w.planes is None else w.planes.layout
        assert layout == dense_planes(w.type_name, w.rows, w.cols)
        decides = name.endswith(".router") or ".indexer." in name
        assert w.many_rows == ("float32" if layout is not None else "exact" if decides else "rounded")
        if layout is not None and (w.type_name, layout.tile_rows) not in types:
            types.add((w.type_name, layout.tile_rows))
            ids = jnp.asarray([w.rows - 1, 0, 2, 2])
            np.testing.assert_array_equal(take_rows(w, ids), take_rows(same, ids))
    assert types >= {("Q5_K", 4), ("Q5_K", 32), ("Q8_0", 32), ("Q8_0", 64), ("Q8_0", 128)}
    sizes = model_sizes(model.geometry)
    planned = sizes.dense_bytes + sizes.embedding_bytes + sizes.head_bytes + sizes.drafter_bytes
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(in_planes)) == planned
    for w in in_planes.blocks:  # one array of words, and matrices as stored or small ones
        few = [x for x in jax.tree.leaves(w.parts, is_leaf=lambda x: isinstance(x, Matrix)) if isinstance(x, Matrix)]
        assert w.words is not None
        assert any(x.data is None for x in few)
        assert len(jax.tree.leaves(w)) == 1 + len(jax.tree.leaves(w.parts)) < len(jax.tree.leaves(w.whole()))
    assert sizes.stored_tile_weights == (1280 * 256, 1280 * 256)  # Q5_K of 256 columns: planes would be larger
    assert sizes.plane_tile_weights == 2048 * 256  # the head


@pytest.mark.parametrize(("num_tokens", "tolerance"), [(3, 1e-5), (40, 1e-2)])
def test_one_input_is_multiplied_by_matrices_of_every_kind(
    num_tokens: int, tolerance: float, stored: Weights, in_planes: Weights
) -> None:
    """In planes (two launches' worth of types), as packed, as floats: each result in its place."""

    def some(w: Weights) -> tuple[Matrix, ...]:
        e = w.blocks[1].whole().experts
        assert w.head is not None
        return e.shared_gate, w.blocks[3].whole().token_mixer.k, e.shared_up, e.router, w.head  # type: ignore[union-attr]

    assert [w.planes is not None for w in some(in_planes)] == [True, False, True, False, True]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((num_tokens, 256), np.float32))
    product = jax.jit(linears, compiler_options=FAST)
    errors = []
    for found, expected in zip(product(x, some(in_planes)), product(x, some(stored)), strict=True):
        assert found.shape == expected.shape
        errors.append(float(jnp.abs(found - expected).max() / jnp.abs(expected).max()))
    assert max(errors) < tolerance
    assert errors[3] < 2e-6  # experts are chosen by it
    assert all((error > 1e-4) == (num_tokens > 32) for i, error in enumerate(errors) if i != 3)


class Tied:
    """A model whose head is its embedding."""

    def __init__(self, model: SyntheticModel) -> None:
        self.data = model.data
        self.tensors: Mapping[str, TensorInfo] = {name: t for name, t in model.tensors.items() if name != OUTPUT}


def test_a_head_that_is_the_embedding_is_held_once(model: SyntheticModel, stored: Weights) -> None:
    source: Any = Tied(model)
    tied = load_weights(source, model.geometry, with_draft=False, kernels=True)
    assert tied.head is not None
    assert tied.head.planes is not None
    assert tied.head.data is tied.embed.data
    ids = jnp.asarray([5, 2047])
    np.testing.assert_array_equal(take_rows(tied.embed, ids), take_rows(stored.embed, ids))


def test_a_tensor_that_cannot_be_read_is_an_error_of_loading(model: SyntheticModel) -> None:
    source: Any = Tied(model)

    def data(name: str) -> np.ndarray:
        if name == "blk.2.ssm_out.weight":
            raise OSError("the file ends in blk.2.ssm_out.weight")
        return model.data(name)

    source.data = data
    with pytest.raises(OSError, match=r"the file ends in blk\.2\.ssm_out"):
        load_weights(source, model.geometry, with_draft=False, kernels=True)

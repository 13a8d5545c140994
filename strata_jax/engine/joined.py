"""The matrices of a part of the model that kernels multiply by, end to end in one array.

Each array that a program is given takes the host some microseconds, and a block has more than a dozen such matrices:
told of one array instead, the host starts a round of 48 blocks in two thirds of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.engine.matrix import Matrix
from strata_jax.kernels.quant_matmul import PlanePart

Part = TypeVar("Part")  # a pytree of matrices and arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Joined(Generic[Part]):
    """Weights whose matrices in planes have their words in one array.

    Attributes:
        words: u32[n]; None where there is no such matrix.
        parts: the weights; matrices in planes have no words of their own, but say where theirs begin.
    """

    words: jax.Array | None
    parts: Part

    def whole(self) -> Part:
        """The weights, all matrices with their words; for use within a program, where they stay one argument."""
        return _of_matrices(lambda w: w if w.planes is None else replace(w, data=self.words), self.parts)


def join(part: Part) -> Joined[Part]:
    """Put the words of all matrices in planes, which are in host memory, into one array of the device.

    Those whose tiles have more rows come first: each then begins with a whole tile row, and nothing is padded.
    """
    leaves = jax.tree.leaves(part, is_leaf=_whole_leaf)
    found = [(w.planes.layout, w) for w in leaves if isinstance(w, Matrix) and w.planes is not None]
    found.sort(key=lambda pair: -pair[0].tile_rows)
    first, without_words = 0, dict[int, Any]()
    for layout, w in found:
        without_words[id(w)] = replace(w, data=cast("Any", None), planes=PlanePart(layout, first))
        first += layout.num_words
    words = jnp.asarray(np.concatenate([w.data for _, w in found])) if found else None
    return Joined(words, _of_matrices(lambda w: without_words.get(id(w), w), part))


def _of_matrices(change: Any, part: Part) -> Part:
    return jax.tree.map(lambda leaf: change(leaf) if isinstance(leaf, Matrix) else leaf, part, is_leaf=_whole_leaf)


def _whole_leaf(node: Any) -> bool:
    return isinstance(node, Matrix | Joined)

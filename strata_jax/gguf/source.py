"""Where weights come from: an open GGUF file, or a synthetic model in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from strata_jax.gguf.tensors import TensorInfo


class WeightSource(Protocol):
    """What the engine and the pipelines ask of a model's file."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Keys of the header."""

    def data(self, name: str) -> NDArray[np.uint8]:
        """Return the packed bytes of a tensor, u8[*shape[:-1], row_bytes]."""

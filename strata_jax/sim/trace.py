"""Recorded routing: which experts each token asked for, read from a trace file (planning notes 4.5)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata_jax.errors import FormatError

MAX_EXPERTS_A_RECORD = 1024
WORD_BYTES = 4


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """Experts of recorded tokens.

    Attributes:
        experts: i32[tokens, layers, k], the experts that each token asked each layer for.
        order: i32[R], ``layer * num_experts + expert`` of each rank of a given ranking; None: ranks are by use in this
            trace.
    """

    experts: NDArray[np.int32]
    order: NDArray[np.int32] | None = None

    def ranks(self, num_layers: int, num_experts: int) -> NDArray[np.int32]:
        """Return i32[tokens, layers * k]: the look-ups as ranks, as `order` has them or by use here.

        Ties go to the lower layer, then to the lower expert. Raises FormatError if the trace is another model's.
        """
        tokens, layers, _ = self.experts.shape
        pairs = self.experts + num_experts * np.arange(layers, dtype=np.int32)[None, :, None]
        order = self.rank_order(num_layers, num_experts)
        rank_of = np.empty(len(order), dtype=np.int32)
        rank_of[order] = np.arange(len(order), dtype=np.int32)
        return np.asarray(rank_of[pairs].reshape(tokens, -1))

    def rank_order(self, num_layers: int, num_experts: int) -> NDArray[np.int32]:
        """Return i32[R], ``layer * num_experts + expert`` of each rank, as `ranks` has them; raises what it does."""
        layers = self.experts.shape[1]
        if layers != num_layers or int(self.experts.max()) >= num_experts:
            raise FormatError(
                f"routing trace: it has {layers} layers and experts up to {int(self.experts.max())}, the model has "
                f"{num_layers} layers of {num_experts} experts"
            )
        if self.order is not None:
            return self.order
        pairs = self.experts + num_experts * np.arange(layers, dtype=np.int32)[None, :, None]
        counts = np.bincount(pairs.ravel(), minlength=num_layers * num_experts)
        return np.argsort(-counts, kind="stable").astype(np.int32)


def read_routing_trace(path: Path) -> RoutingTrace:
    """Read a trace: records of int32 layer, int32 k, k int32 expert ids and k float32 weights, little endian.

    A token's records follow each other from layer 0 on, and all have the same k. Raises FormatError otherwise.
    """
    words = np.frombuffer(_read(path), dtype="<i4")
    if len(words) < 2:
        raise FormatError(
            f"{path}: a routing trace has at least one record of 16 bytes, found {WORD_BYTES * len(words)}"
        )
    k = int(words[1])
    if not 1 <= k <= MAX_EXPERTS_A_RECORD:
        raise FormatError(f"{path}: the first record has {k} experts; 1 to {MAX_EXPERTS_A_RECORD} can be")
    width = 2 + 2 * k
    if len(words) % width:
        raise FormatError(f"{path}: {len(words)} words are no whole number of records of {width} words (k={k})")
    records = words.reshape(-1, width)
    if (records[:, 1] != k).any():
        raise FormatError(f"{path}: record {int(np.argmax(records[:, 1] != k))} has another number of experts than {k}")
    layers = records[:, 0]
    num_layers = int(layers.max()) + 1
    if len(layers) % num_layers or (layers.reshape(-1, num_layers) != np.arange(num_layers)).any():
        raise FormatError(f"{path}: the records of a token are not those of layers 0 to {num_layers - 1} in order")
    ids = records[:, 2 : 2 + k].reshape(-1, num_layers, k)
    if int(ids.min()) < 0:
        raise FormatError(f"{path}: it has the expert {int(ids.min())}; experts are numbered from 0")
    return RoutingTrace(np.ascontiguousarray(ids, dtype=np.int32))


def _read(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) % WORD_BYTES:
        raise FormatError(f"{path}: {len(raw)} bytes are no whole number of 4-byte words")
    return raw

"""The n-gram table (PLE): which rows a token reads, and what they add to the residual streams.

Row numbers are 64-bit hashes, computed on the host; the rows are gathered from the memory-mapped file, still packed,
and go to the device as an argument of the step. Shapes: T tokens, C streams, E model width, n table rows per token.
Source: qwen4exp (`ple.*` keys, `ple_*` and `per_layer_token_embd` tensors).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.engine.layers import rms_norm
from strata_jax.engine.matrix import NATIVE_DTYPES, Matrix, decode_rows, linears
from strata_jax.geometry import Geometry
from strata_jax.gguf.layout import PLE_TABLE
from strata_jax.memory.sizes import PLE_DILATION as DILATION
from strata_jax.memory.sizes import model_sizes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PleWeights:
    """Projections and norms of the one block that reads the table; ``row_type`` is the table's ggml type."""

    key: Matrix
    value: Matrix
    norm_key: jax.Array
    norm_query: jax.Array
    norm_conv: jax.Array
    conv: jax.Array  # f32[C*E, taps]
    row_type: str = field(metadata={"static": True})


def history_rows(g: Geometry) -> int:
    """Rows of convolution history that the state keeps."""
    return DILATION * (g.ple_conv_kernel - 1)


def table_rows(tokens: Sequence[int], start: int, count: int, g: Geometry) -> np.ndarray:
    """Row numbers u64[count, n] for the tokens at positions ``start ..`` of the sequence ``tokens``.

    A context token before the sequence start, or at or behind a boundary token, is replaced by the boundary id.
    """
    span = g.ple_ngram_size
    ids = np.full(count + span - 1, g.ple_boundary_id, np.uint64)
    first = max(0, start - (span - 1))
    ids[span - 1 - (start - first) :] = np.asarray(tokens[first : start + count], np.uint64)
    boundary = np.uint64(g.ple_boundary_id)
    cut = np.zeros(count, bool)
    multipliers = np.asarray(g.ple_multipliers, np.uint64)
    mixed = ids[span - 1 :] * multipliers[0]
    found = []
    for n in range(1, span):
        context = ids[span - 1 - n : span - 1 - n + count]
        cut = cut | (context == boundary)
        mixed = mixed ^ (np.where(cut, boundary, context) * multipliers[n])
        found.append(mixed)
    sizes, offsets = (np.asarray(x, np.uint64).reshape(span - 1, 1, -1) for x in (g.ple_vocab_sizes, g.ple_offsets))
    rows = np.stack(found)[:, :, None] % sizes + offsets
    return rows.transpose(1, 0, 2).reshape(count, -1)


def rows_of(words: jax.Array, g: Geometry) -> jax.Array:
    """Take packed rows out of the words i32[T, n] of a window: as `apply` takes them."""
    table, num_tokens = g.tensor_types[PLE_TABLE], words.shape[0]
    row_bytes = table.num_bytes // table.shape[0]
    packed = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(num_tokens, -1)
    packed = packed[:, : model_sizes(g).table_row_bytes].reshape(num_tokens, -1, row_bytes)
    if table.type_name not in NATIVE_DTYPES:
        return packed
    dtype = jnp.dtype(NATIVE_DTYPES[table.type_name])
    return jax.lax.bitcast_convert_type(packed.reshape(*packed.shape[:2], -1, dtype.itemsize), dtype)


def apply(
    streams: jax.Array, packed_rows: jax.Array, w: PleWeights, history: jax.Array, g: Geometry
) -> tuple[jax.Array, jax.Array]:
    """Add the table's contribution to ``streams: f32[T, C, E]``.

    Args:
        packed_rows: u8[T, n, row_bytes], or the table's own float type [T, n, row_width].
        history: f32[history_rows, C*E], the convolution's last inputs.

    Returns:
        the streams and all convolution inputs f32[history_rows + T, C*E] (for `advance`).
    """
    num_tokens, num_streams, width = streams.shape
    e = decode_rows(packed_rows, w.row_type).reshape(num_tokens, -1)
    shape = (num_streams, width)
    key, value = linears(e, (w.key, w.value))
    key = rms_norm(key.reshape(num_tokens, *shape), w.norm_key.reshape(shape), g.rms_eps)
    query = rms_norm(streams, w.norm_query.reshape(shape), g.rms_eps)
    score = jnp.sum(key * query, axis=-1) / width**0.5
    gate = jax.nn.sigmoid(jnp.sign(score) * jnp.sqrt(jnp.maximum(jnp.abs(score), 1e-6)))
    p = gate[:, :, None] * value[:, None, :]
    z = rms_norm(p, w.norm_conv.reshape(shape), g.rms_eps).reshape(num_tokens, -1)
    inputs = jnp.concatenate([history, z])
    conv = sum(inputs[DILATION * k : DILATION * k + num_tokens] * w.conv[:, k] for k in range(g.ple_conv_kernel))
    return streams + p + jax.nn.silu(conv).reshape(streams.shape), inputs


def advance(inputs: jax.Array, count: jax.Array, g: Geometry) -> jax.Array:
    """The history after the first ``count`` tokens."""
    return jax.lax.dynamic_slice_in_dim(inputs, count, history_rows(g))

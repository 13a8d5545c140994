"""A model of the published shape with random weights, made as it is read: what `Engine.load` would find in a file.

Every tensor has the name, shape and type that the quantisation gives it, and random packed blocks (`packed.py`). Dense
weights are drawn whole. Experts repeat: each stack is a pool of a few dozen distinct experts, so that tens of gigabytes
are copied, not drawn; the bytes that a run moves and the products that it computes are the same.

Three things are not random. **Routing**: the first weights of every embedding row say which topic its token belongs to;
no sublayer writes to these columns and no mixer gates them, so the topic reaches every router as a constant, through
which the router's first columns act as biases (`routing.py`). **Text**: the head's row of a token is the embedding of
the token before it on a round trip through the topic, so a greedy continuation meets every token once instead of going
in a short circle. **Drafts**: the draft block sees the same, with so much noise that a stated share of drafts is right.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from strata_jax.errors import ConfigError
from strata_jax.geometry import Geometry
from strata_jax.gguf.blocks import block_type
from strata_jax.gguf.layout import EXPERT_STACKS, OUTPUT, PLE_TABLE, TOKEN_EMBD, split_block_name
from strata_jax.gguf.tensors import TensorInfo
from strata_jax.synthetic import packed, tokenizer
from strata_jax.synthetic.routing import (
    LOGIT_NOISE,
    RoutingSkew,
    look_up_odds,
    places,
    router_biases,
)
from strata_jax.synthetic.shapes import ModelShape
from strata_jax.synthetic.tensors import (
    ALWAYS_F32,
    SUBLAYER_OUTPUTS,
    TensorSpec,
    tensor_specs,
    tensor_values,
    value_scale,
)

NOTE = "the weights are synthetic: random blocks of the stated types and sizes; times and bytes are real, text is not"
DISTINCT_EXPERTS = 61  # of a stack; a prime, so that neighbouring blocks and experts differ
DRAFT_AGREEMENT = 0.7  # share of first drafts that are the trunk's own choice
OUTPUT_SCALE = 0.3  # of all that is added to the streams: keeps their size near the embedding's through the depth
_EMBEDDING_RMS = value_scale("embedding", 1)

# Measured on `synthetic_small`: mean squares of what a sublayer adds to a stream, over OUTPUT_SCALE squared, and of the
# router's input over that of a gate of one half times a normalised stream
_GDN_ADDS, _ATTENTION_ADDS, _EXPERTS_ADD, _PLE_ADDS = 0.19, 0.02, 0.012, 0.39
_GATED_SQUARE = 0.97
_GATE_SPREAD = 1.04  # mean square of a mixer's gates over the square of their mean


class SyntheticModel:
    """The weights, in the place of an open GGUF file (`gguf.reader.GGUFFile`): same names, shapes, types and bytes.

    Attributes:
        tensors: name to shape and type.
        metadata: tokenizer and chat template, keys as in a file.
        odds: f64[X], how often a token asks a block for each of its experts, the same in every block and topic.
    """

    def __init__(self, shape: ModelShape, geometry: Geometry, skew: RoutingSkew | None = None, seed: int = 0) -> None:
        """Describe a model; nothing is drawn yet.

        Args:
            geometry: of `shape`, with the types of a quantisation (`presets.preset_geometry`).

        Raises:
            ConfigError: types of embedding and head that this cannot be done with, or odds that do not exist.
            FormatError: a type that the engine cannot decode.
        """
        geometry.check_engine_types()
        self.shape, self.geometry, self.skew, self.seed = shape, geometry, skew or RoutingSkew(), seed
        self.paths = (Path(geometry.name),)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {t.name: TensorInfo(t.name, t.shape, block_type(t.type_name).ggml_id, 0, 0)
             for t in geometry.tensor_types.values()}
        )  # fmt: skip
        self._specs = {spec.name: spec for spec in tensor_specs(shape)}
        _check_types(self.tensors)
        self._vocabulary = tokenizer.build_vocabulary(shape.vocab_size)
        self._num_plain = shape.vocab_size - len(tokenizer.CONTROL_TOKENS) - len(tokenizer.VISIBLE_SPECIAL_TOKENS)
        self.metadata: Mapping[str, Any] = MappingProxyType(_metadata(self._vocabulary))
        self.odds = look_up_odds(self.skew, shape.num_experts, shape.num_experts_used)
        self._biases = router_biases(self.odds, LOGIT_NOISE, shape.num_experts_used)

    # --- what a file gives

    def data(self, name: str) -> NDArray[np.uint8]:
        """Return the packed bytes of a tensor, u8[*shape[:-1], row_bytes], the same ones every time.

        Raises KeyError for a name that the model does not have.
        """
        if name == PLE_TABLE:
            return self._table
        info = self.tensors[name]
        block = split_block_name(name)
        if block is not None and block[1] in EXPERT_STACKS:
            return self.expert_pool(name)[self.expert_ids(block[0])]
        return self._rows(info, self._specs[name]).reshape(*info.shape[:-1], info.row_bytes)

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @functools.cached_property
    def _table(self) -> NDArray[np.uint8]:
        """The n-gram table, kept: every step reads rows of it."""
        return self._rows(self.tensors[PLE_TABLE], self._specs[PLE_TABLE])

    # --- experts

    def expert_pool(self, name: str) -> NDArray[np.uint8]:
        """Return the distinct experts of a stack, u8[n, rows, row_bytes]; expert e of block b is `expert_ids(b)[e]`."""
        info = self.tensors[name]
        part = name.split(".", 2)[2]
        scale = value_scale("matrix", info.shape[-1]) * (OUTPUT_SCALE if part.endswith(SUBLAYER_OUTPUTS) else 1.0)
        num = min(DISTINCT_EXPERTS, info.shape[0])
        return _expert_pool(part, info.type_name, (num, *info.shape[1:]), scale, self.skew.num_topics, self.seed)

    def expert_ids(self, layer: int) -> NDArray[np.int64]:
        """Return i64[X], which member of the pool each expert of a block is."""
        num = min(DISTINCT_EXPERTS, self.shape.num_experts)
        return (np.arange(self.shape.num_experts) + 17 * layer) % num

    # --- tokens

    def topic_of(self, tokens: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the topic of each token: equal ranges of the vocabulary, text and special tokens in the first."""
        size = self._num_plain // self.skew.num_topics
        topics = np.minimum(np.asarray(tokens, np.int64) // size, self.skew.num_topics - 1)
        return np.where(np.asarray(tokens) < self._num_plain, topics, 0)

    def topic_tokens(self, topic: int, count: int, seed: int = 0) -> list[int]:
        """Draw tokens of one topic, for the prompt of a conversation about it.

        Raises ConfigError for a topic that the model does not have.
        """
        if not 0 <= topic < self.skew.num_topics:
            raise ConfigError(
                f"topic {topic}: this model has topics 0 to {self.skew.num_topics - 1} (model.routing.drift="
                f"{self.skew.drift:g})"
            )
        first, stop = self._topic_range(topic)
        return np.random.default_rng([self.seed, topic, seed]).integers(first, stop, count).tolist()

    def next_tokens(self) -> NDArray[np.int64]:
        """Return i64[plain tokens], the token that the text goes on with after each: one round trip a topic."""
        following = np.empty(self._num_plain, np.int64)
        for topic in range(self.skew.num_topics):
            first, stop = self._topic_range(topic)
            size = stop - first
            step = next(s for s in range(round(0.382 * size), size) if math.gcd(s, size) == 1)
            following[first:stop] = first + (np.arange(size) + step) % size
        return following

    def _topic_range(self, topic: int) -> tuple[int, int]:
        size = self._num_plain // self.skew.num_topics
        return topic * size, self._num_plain if topic == self.skew.num_topics - 1 else (topic + 1) * size

    # --- dense tensors

    def _rows(self, info: TensorInfo, spec: TensorSpec) -> NDArray[np.uint8]:
        """Return u8[rows, row_bytes]."""
        name, topics = info.name, self.skew.num_topics
        if name == TOKEN_EMBD:
            return self._embedding()[0]
        if name == OUTPUT:
            return self._head(info)
        if spec.kind == "router":
            return _as_rows(self._router(info, spec), info.type_name)
        if name.endswith("nextn.eh_proj.weight"):
            return _as_rows(self._draft_projection(info), info.type_name)
        scale = OUTPUT_SCALE if name.endswith((*SUBLAYER_OUTPUTS, "ple_conv1d.weight")) else 1.0
        if spec.kind in ALWAYS_F32:
            values = tensor_values(spec, self.shape, self.seed) * np.float32(scale)
            if name.endswith(("hc_ffn_norm.weight", "nextn.enorm.weight")):
                values.reshape(-1, self.shape.embed_width)[:, :topics] = 1
            return _as_rows(np.atleast_2d(values), info.type_name)
        scale *= value_scale(spec.kind, info.shape[-1])
        rows = packed.random_rows(self._rng(name), info.shape[0], info.shape[-1], info.type_name, scale)
        if name.endswith(SUBLAYER_OUTPUTS):
            rows[:topics] = 0  # bytes of 0 are weights of 0 in every type
        if name.endswith("hc_ffn_up.weight"):
            rows.reshape(self.shape.num_streams, self.shape.embed_width, -1)[:, :topics] = 0  # a gate of one half
        return rows

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, *name.encode()])

    def _embedding(self) -> tuple[NDArray[np.uint8], float]:
        """Return the rows and the value that marks a token's topic."""
        info = self.tensors[TOKEN_EMBD]
        num_rows, width = info.shape
        rows = packed.random_rows(self._rng(TOKEN_EMBD), num_rows, width, info.type_name, _EMBEDDING_RMS)
        return rows, packed.mark_rows(rows, info.type_name, self.topic_of(np.arange(len(rows))), _EMBEDDING_RMS)

    @functools.cached_property
    def _mark(self) -> float:
        """The value in the column of a token's topic, from a row of the embedding."""
        info = self.tensors[TOKEN_EMBD]
        rows = packed.random_rows(self._rng(TOKEN_EMBD), 1, info.shape[1], info.type_name, _EMBEDDING_RMS)
        return packed.mark_rows(rows, info.type_name, np.zeros(1, np.int64), _EMBEDDING_RMS)

    def _head(self, info: TensorInfo) -> NDArray[np.uint8]:
        rms = value_scale("head", info.shape[-1])
        rows = packed.random_rows(self._rng(OUTPUT), info.shape[0], info.shape[1], info.type_name, rms)
        embedding = packed.rescaled(self._embedding()[0], info.type_name, rms / _EMBEDDING_RMS)
        rows[self.next_tokens()] = embedding[: self._num_plain]
        return rows

    def _router(self, info: TensorInfo, spec: TensorSpec) -> NDArray[np.float32]:
        """Return f32[X, E]: a column of biases for each topic, noise of a known size in all other columns."""
        layer = int(info.name.split(".")[1])
        num_experts, width = info.shape
        constant = self._topic_input(layer)
        length = math.sqrt(_GATED_SQUARE * (0.25 * width - constant**2))  # of the input without the constant
        noise = LOGIT_NOISE / length
        values = self._rng(info.name).standard_normal(info.shape, np.float32) * np.float32(noise)
        for topic in range(self.skew.num_topics):
            order = places(self.skew, topic, layer, num_experts, self.seed)
            values[:, topic] = self._biases[order] / constant
        return values

    def _draft_projection(self, info: TensorInfo) -> NDArray[np.float32]:
        """Return f32[E, 2 E]: the embedding as it is, and noise from the hidden row before it."""
        width, topics = self.shape.embed_width, self.skew.num_topics
        values = np.zeros(info.shape, np.float32)
        values[:, :width] = np.eye(width)
        noise = self._rng(info.name).standard_normal((width, width), np.float32)
        values[:, width:] = noise * np.float32(_draft_noise(self.shape) / math.sqrt(width))
        values[:topics, width:] = 0
        return values

    # --- sizes of the streams

    def _topic_input(self, layer: int) -> float:
        """Return the constant that the column of a token's topic has in the input of a block's router."""
        if layer < self.shape.num_layers:
            return 0.5 * self._mark / math.sqrt(self.stream_square(layer))
        mark = self._mark / math.sqrt(self.stream_square(-1))  # the draft block normalises the embedding
        return 0.5 * mark / math.sqrt(1 + _draft_noise(self.shape) ** 2 + OUTPUT_SCALE**2 * _ATTENTION_ADDS)

    def stream_square(self, layer: int) -> float:
        """Return the mean square of the streams before the experts of a trunk block; -1: of the embedding."""
        shape = self.shape
        square = _EMBEDDING_RMS**2 * (1 - packed.MARKED_GROUP / shape.embed_width) + self._mark**2 / shape.embed_width
        for i in range(layer + 1):
            added = _GDN_ADDS if shape.is_recurrent(i) else _ATTENTION_ADDS
            added += (_EXPERTS_ADD if i else 0) + (_PLE_ADDS if i == shape.ple_layer else 0)
            square += OUTPUT_SCALE**2 * added
        return square


@functools.lru_cache(maxsize=16)
def _expert_pool(
    part: str, type_name: str, shape: tuple[int, int, int], scale: float, num_topics: int, seed: int
) -> NDArray[np.uint8]:
    """Draw u8[n, rows, row_bytes]; kept, since blocks of one kind share it."""
    num, rows, cols = shape
    rng = np.random.default_rng([seed, *f"{part} {type_name}".encode()])
    pool = packed.random_rows(rng, num * rows, cols, type_name, scale).reshape(num, rows, -1)
    if part.endswith(SUBLAYER_OUTPUTS):
        pool[:, :num_topics] = 0
    pool.flags.writeable = False
    return pool


def _draft_noise(shape: ModelShape) -> float:
    """Return the size of the noise, beside an embedding of size 1, that makes a share of the drafts wrong.

    A draft is right where the head's row of the right token, which lies along the embedding, scores above the largest
    of V random rows; marked columns tell no tokens apart.
    """
    largest = float(ndtri(1 - math.log(2) / shape.vocab_size))  # median, in standard deviations of a score
    ahead = largest + float(ndtri(DRAFT_AGREEMENT))
    return math.sqrt(max(0.0, (shape.embed_width - packed.MARKED_GROUP) / (_GATE_SPREAD * ahead**2) - 1))


def _as_rows(values: NDArray[np.float32], type_name: str) -> NDArray[np.uint8]:
    return packed.float_rows(np.ascontiguousarray(values, np.float32), type_name)


def _check_types(tensors: Mapping[str, TensorInfo]) -> None:
    embedding, head = tensors[TOKEN_EMBD].type_name, tensors[OUTPUT].type_name
    if embedding not in packed.MARK_TYPES or head != embedding:
        raise ConfigError(
            f"a synthetic model with an embedding of {embedding} and a head of {head}: the head repeats rows of the"
            f" embedding, so both must have one type, of {', '.join(packed.MARK_TYPES)}. Leave quant.head at auto"
        )
    for name, info in tensors.items():
        if name.endswith(("ffn_gate_inp.weight", "eh_proj.weight")) and info.type_name not in packed.FLOAT_TYPES:
            raise ConfigError(
                f"a synthetic model with {name} stored as {info.type_name}: its values are chosen, so it must be one of"
                f" {', '.join(packed.FLOAT_TYPES)}"
            )


def _metadata(vocabulary: tokenizer.Vocabulary) -> dict[str, Any]:
    end_of_text = vocabulary.id_of(tokenizer.END_OF_TEXT)
    ids = {"bos": end_of_text, "eos": vocabulary.id_of(tokenizer.END_OF_TURN), "padding": end_of_text}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": np.array([int(kind) for kind in vocabulary.types], np.int32),
        "tokenizer.ggml.merges": vocabulary.merges,
        **{f"tokenizer.ggml.{name}_token_id": value for name, value in ids.items()},
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": tokenizer.CHAT_TEMPLATE,
    }

"""Prompts streamed behind compute: missing experts of the next block are copied while this one is computed.

The host runs a chunk block by block. A block's program is started once its copies have arrived; copies for the next
block go to the other buffer as soon as the program that read it before is done. So the link copies without a pause
while copying takes longer than computing, and the device computes without one while computing does.
Sizes and choices: ``memory/staging.py``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from strata_jax.engine.experts import ExpertCounts, LayerBank, Staged
from strata_jax.engine.host_copies import HostCopies, Run, address, host_copies
from strata_jax.errors import ConfigError
from strata_jax.kernels.expert_gemv import ExpertLayout
from strata_jax.memory.layout import WORD_BYTES
from strata_jax.memory.staging import (
    LINE_BYTES,
    NUM_BUFFERS,
    buffer_lines,
    choose_staged,
    expected_reads,
    expert_lines,
)

if TYPE_CHECKING:
    from strata_jax.engine.engine import Engine

LINE_WORDS = LINE_BYTES // WORD_BYTES
MAX_COPY_BYTES = 4 * 2**20  # what a program gets from the host waits for no more than one of them
POLL_S = 5e-5


@dataclass
class Staging:
    """What an engine keeps from prompt to prompt: who copies, and how often prompts used each expert.

    Attributes:
        sources: where the bank of each block lies whose experts kernels compute.
        uses: f64[L', X], of the tokens counted in ``num_tokens``.
    """

    copies: HostCopies
    sources: dict[int, int]
    uses: NDArray[np.float64]
    num_tokens: int = 0

    @classmethod
    def of(cls, banks: Sequence[LayerBank]) -> Staging:
        """Find out who copies from where.

        Raises:
            ConfigError: the driver does not copy, or JAX does not say where the bank lies.
        """
        try:
            sources = {layer: address(banks[layer].blobs) for layer in next_staged(banks)}
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"prefill.stage_mib: JAX {jax.__version__} does not say where the bank lies ({error}), so that nothing"
                " can be copied from it ahead of chunks. Set prefill.stage_mib=0"
            ) from error
        return cls(host_copies(), sources, np.zeros((len(banks), banks[0].blobs.shape[0])))

    def count(self, counts: list[ExpertCounts], num_tokens: int) -> None:
        """Note which experts the blocks of a chunk have used."""
        self.uses += np.stack([np.asarray(block.uses) for block in counts])
        self.num_tokens += num_tokens


class Stage(Protocol):
    """What a chunk asks for each block whose experts kernels compute."""

    def take(self, layer: int, following: int | None, num_tokens: int) -> Staged:
        """Return what is staged for a block, arrived; its program is to be started next.

        Args:
            following: the block whose experts are to be copied next, for ``num_tokens`` tokens; None: there is none.
        """

    def started(self, result: Any) -> None:
        """Note a result of the program that reads what was taken last."""


@dataclass
class Stager:
    """Copies experts ahead of the blocks of a prompt. Buffers are filled by turns; see `staged_prompt`.

    Attributes:
        buffers: u32[lines, 128] each; JAX does not know that they change.
        copied: bytes and experts so far.
    """

    engine: Engine
    staging: Staging
    buffers: tuple[jax.Array, ...]
    copied: tuple[int, int] = (0, 0)
    _readers: list[Any] = field(default_factory=lambda: [None] * NUM_BUFFERS, init=False)
    _arriving: dict[int, tuple[int, NDArray[np.int32]]] = field(default_factory=dict, init=False)
    _next: tuple[int, int] | None = field(default=None, init=False)
    _taken: int | None = field(default=None, init=False)
    _turn: int = field(default=0, init=False)

    def take(self, layer: int, following: int | None, num_tokens: int) -> Staged:
        self._next = None if following is None else (following, num_tokens)
        nothing = np.full(self.engine.geometry.num_experts, -1, np.int32)
        buffer, lines = self._arriving.pop(layer, (None, nothing))
        self._taken, waiting = buffer, not self._start_next()
        if buffer is None:
            return Staged(self.buffers[0], lines)
        while waiting and not self.staging.copies.done(buffer):
            time.sleep(POLL_S)
            waiting = not self._start_next()
        self.staging.copies.wait(buffer)
        return Staged(self.buffers[buffer], lines)

    def started(self, result: Any) -> None:
        if self._taken is not None:
            self._readers[self._taken] = result
        if not self._start_next():
            jax.block_until_ready(self._readers[self._turn])
            self._start_next()

    def close(self) -> None:
        """Wait for what is on its way and free the buffers."""
        for buffer in range(NUM_BUFFERS):
            self.staging.copies.wait(buffer)
        for array in self.buffers:
            array.delete()

    def _start_next(self) -> bool:
        """Start the copies that are asked for, if their buffer is free; returns whether none are left to start."""
        if self._next is None:
            return True
        reader = self._readers[self._turn]
        if reader is not None and not reader.is_ready():
            return False
        (layer, num_tokens), self._next = self._next, None
        experts, lines = self._choose(layer, num_tokens)
        if len(experts):
            blob_bytes = self.engine.banks[layer].blobs.shape[1] * WORD_BYTES
            target, source = address(self.buffers[self._turn]), self.staging.sources[layer]
            runs = copy_runs(experts, target, source, blob_bytes)
            self.staging.copies.start(self._turn, runs)
            self.copied = self.copied[0] + len(experts) * blob_bytes, self.copied[1] + len(experts)
            self._arriving[layer] = self._turn, lines
            self._turn = (self._turn + 1) % NUM_BUFFERS
        return True

    def _choose(self, layer: int, num_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The experts of a block to copy, and the line where each of its experts will start, -1 = nowhere."""
        engine, staging = self.engine, self.staging
        residency, num_used = engine.residency, engine.geometry.num_experts_used
        each = expert_lines(engine.banks[layer].blobs.shape[1] * WORD_BYTES)
        reads = expected_reads(staging.uses[layer], staging.num_tokens, num_tokens, num_used)
        experts = choose_staged(~residency.resident(layer), reads, self.buffers[0].shape[0] // each)
        lines = np.full(engine.geometry.num_experts, -1, np.int32)
        lines[experts] = each * np.arange(len(experts))
        return experts, lines


@dataclass(frozen=True)
class StageShapes:
    """Staged experts by their shapes alone, to compile programs."""

    num_lines: int
    num_experts: int

    def take(self, layer: int, following: int | None, num_tokens: int) -> Staged:
        words: Any = jax.ShapeDtypeStruct((self.num_lines, LINE_WORDS), jnp.uint32)
        return Staged(words, np.full(self.num_experts, -1, np.int32))

    def started(self, result: Any) -> None:
        return


@contextmanager
def staged_prompt(engine: Engine, num_tokens: list[int]) -> Iterator[Stager | None]:
    """Within the context a prompt is read, in chunks of so many tokens; None: nothing is copied ahead of any."""
    staging = engine.staging
    if staging is None or not any(stages(engine, tokens) for tokens in num_tokens):
        yield None
        return
    shape = buffer_lines(engine.plan.stage_bytes), LINE_WORDS
    buffers = tuple(jnp.zeros(shape, jnp.uint32).block_until_ready() for _ in range(NUM_BUFFERS))
    stager = Stager(engine, staging, buffers)
    try:
        yield stager
    finally:
        stager.close()


def stages(engine: Engine, num_tokens: int) -> bool:
    """Whether the program for a chunk of so many tokens takes staged experts."""
    return num_tokens > 0 and engine.plan.bucket(num_tokens) in engine.plan.staged_buckets


def next_staged(banks: Sequence[LayerBank]) -> dict[int, int | None]:
    """Return the blocks whose experts can be staged, each with the one after it."""
    layers = [layer for layer, bank in enumerate(banks) if isinstance(bank.layout, ExpertLayout)]
    return dict(zip(layers, [*layers[1:], None]))


def copy_runs(experts: NDArray[np.int64], target: int, source: int, blob_bytes: int) -> Iterator[Run]:
    """Give the copies of experts, ascending, from a bank at one address to a buffer at another, neighbours together."""
    each = expert_lines(blob_bytes) * LINE_BYTES
    breaks = np.diff(experts, prepend=-2) != 1 if each == blob_bytes else np.ones(len(experts), bool)
    firsts = np.flatnonzero(breaks).tolist()
    for first, end in zip(firsts, [*firsts[1:], len(experts)]):
        to, start, left = target + first * each, source + int(experts[first]) * blob_bytes, (end - first) * blob_bytes
        while left > 0:
            size = min(left, MAX_COPY_BYTES)
            yield to, start, size
            to, start, left = to + size, start + size, left - size

"""Prompts streamed behind compute: missing experts come through a ring of buffers while blocks are computed.

The host runs a chunk block by block. What a block misses comes in groups, each as large as a buffer, and a program for
each group computes its experts (`experts.OpenExperts`); the next copies go to a buffer as soon as the program that has
read it is done. The likeliest experts of a block fill the buffers while the block before is computed and this one is
routed; the host waits for the routing, and then copies what is needed and not there. So no byte is copied that is not
used, but for some of the first groups, and the link has a pause only while both buffers wait for the routing. A block
that is expected to miss little is not waited for: the program that computes residents reads the others where they lie.
Sizes and choices: ``memory/staging.py``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from strata_jax.engine.experts import LayerBank
from strata_jax.engine.host_copies import HostCopies, Run, address, host_copies
from strata_jax.errors import ConfigError
from strata_jax.kernels.expert_gemv import ExpertLayout
from strata_jax.memory.layout import WORD_BYTES
from strata_jax.memory.staging import (
    LINE_BYTES,
    NUM_BUFFERS,
    buffer_lines,
    choose_ahead,
    expert_lines,
    groups_of,
    odds_of_use,
    reads_in_place,
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

    def count(self, uses: NDArray[np.integer], num_tokens: int) -> None:
        """Note how often a chunk has used each expert of each block: i32[L', X]."""
        self.uses += uses
        self.num_tokens += num_tokens


class Group(NamedTuple):
    """Experts of a block that fill one buffer, ascending."""

    layer: int
    experts: NDArray[np.int64]


class Staged(NamedTuple):
    """Experts that can be computed: words u32[lines, words_per_line] of a buffer that a group has arrived in, and the
    line where each expert starts i32[X], -1 = elsewhere."""

    words: jax.Array
    lines: NDArray[np.int32]


class Stage(Protocol):
    """What a chunk asks for each block whose experts kernels compute."""

    def in_place(self, layer: int, num_tokens: int) -> bool:
        """Whether the block's missing experts are read where they lie, by the program that computes the others."""

    def groups(
        self, layer: int, num_tokens: int, uses: jax.Array, following: tuple[int, int] | None
    ) -> Iterator[Staged]:
        """Give the groups of a block, each when it has arrived; its program is to be started before the next step.
        There are none where experts are read in place.

        Args:
            uses: i32[X] of the block's routing, how often each expert is used; waited for if experts are copied.
            following: the block whose experts are to be copied next, and for how many tokens; None: there is none.
        """

    def started(self, result: Any) -> None:
        """Note a result of the program that reads the last group."""

    def go_on(self) -> None:
        """Start the copies that can be started; to be called between programs."""


@dataclass
class Stager:
    """Copies experts ahead of the programs that compute them. Buffers are filled by turns; see `staged_prompt`.

    Attributes:
        buffers: u32[lines, 128] each; JAX does not know that they change.
        copied: bytes and experts so far.
    """

    engine: Engine
    staging: Staging
    buffers: tuple[jax.Array, ...]
    copied: tuple[int, int] = (0, 0)
    _ahead: int | None = field(default=None, init=False)  # the next block, once it is known how its experts come
    _in_place: bool = field(default=False, init=False)  # it reads them where they lie
    _queue: deque[Group] = field(default_factory=deque, init=False)
    _under_way: deque[tuple[int, Group]] = field(default_factory=deque, init=False)
    _readers: list[Any] = field(default_factory=lambda: [None] * NUM_BUFFERS, init=False)
    _taken: int | None = field(default=None, init=False)  # the buffer of the last group
    _turn: int = field(default=0, init=False)

    def in_place(self, layer: int, num_tokens: int) -> bool:
        if self._ahead != layer:
            self._copy_ahead(layer, num_tokens)
        return self._in_place

    def groups(
        self, layer: int, num_tokens: int, uses: jax.Array, following: tuple[int, int] | None
    ) -> Iterator[Staged]:
        in_place = self.in_place(layer, num_tokens)
        self._ahead = None
        if in_place:
            if following is not None:
                self._copy_ahead(*following)
            self.go_on()
            return
        needed = ~self.engine.residency.resident(layer) & (self._wait_for(uses) > 0)
        self._queue.clear()  # guesses that nothing has been copied of
        for _, group in self._under_way:
            needed[group.experts] = False
        self._queue_groups(layer, np.flatnonzero(needed))
        left = len(self._under_way) + len(self._queue)
        if following is not None:
            self._copy_ahead(*following)
        for _ in range(left):
            yield self._next()
        self.go_on()

    def started(self, result: Any) -> None:
        assert self._taken is not None
        self._readers[self._taken] = result
        self.go_on()

    def go_on(self) -> None:
        while self._queue and self._start_one():
            pass

    def close(self) -> None:
        """Wait for what is on its way and free the buffers."""
        for buffer in range(NUM_BUFFERS):
            self.staging.copies.wait(buffer)
        for array in self.buffers:
            array.delete()

    def _next(self) -> Staged:
        """Wait for the next group; meanwhile copies go on."""
        copies = self.staging.copies
        while not self._under_way:
            if not self._start_one():
                jax.block_until_ready(self._readers[self._turn])
        buffer, group = self._under_way[0]
        self._go_on_until(lambda: copies.done(buffer))
        copies.wait(buffer)
        self._under_way.popleft()
        self._taken = buffer
        lines = np.full(self.engine.geometry.num_experts, -1, np.int32)
        lines[group.experts] = self._expert_lines(group.layer) * np.arange(len(group.experts))
        return Staged(self.buffers[buffer], lines)

    def _start_one(self) -> bool:
        """Start the copies of the group that comes next, if its buffer is free; returns whether it was."""
        buffer, reader = self._turn, self._readers[self._turn]
        if any(number == buffer for number, _ in self._under_way) or not (reader is None or reader.is_ready()):
            return False
        group = self._queue.popleft()
        blob_bytes = self._blob_bytes(group.layer)
        target, source = address(self.buffers[buffer]), self.staging.sources[group.layer]
        self.staging.copies.start(buffer, copy_runs(group.experts, target, source, blob_bytes))
        self.copied = self.copied[0] + len(group.experts) * blob_bytes, self.copied[1] + len(group.experts)
        self._readers[buffer] = None
        self._under_way.append((buffer, group))
        self._turn = (buffer + 1) % NUM_BUFFERS
        return True

    def _copy_ahead(self, layer: int, num_tokens: int) -> None:
        """Decide how a block that is still to be routed gets what it misses; if copied, the likeliest comes first."""
        engine, staging = self.engine, self.staging
        odds = odds_of_use(staging.uses[layer], staging.num_tokens, num_tokens, engine.geometry.num_experts_used)
        missing = ~engine.residency.resident(layer)
        self._ahead, self._in_place = layer, reads_in_place(missing, odds, self._blob_bytes(layer))
        if not self._in_place:
            self._queue_groups(layer, choose_ahead(missing, odds, NUM_BUFFERS * self._group_experts(layer)))

    def _queue_groups(self, layer: int, experts: NDArray[np.int64]) -> None:
        self._queue.extend(Group(layer, group) for group in groups_of(experts, self._group_experts(layer)))

    def _wait_for(self, array: Any) -> NDArray[np.int32]:
        """Wait for an array from the device; meanwhile copies go on."""
        array.copy_to_host_async()
        self._go_on_until(array.is_ready)
        return np.asarray(jax.block_until_ready(array))

    def _go_on_until(self, done: Callable[[], bool]) -> None:
        """Start copies until something is done or none is left to start: then the caller can simply wait."""
        self.go_on()
        while self._queue and not done():
            time.sleep(POLL_S)
            self.go_on()

    def _group_experts(self, layer: int) -> int:
        """Experts of a block that a buffer holds."""
        return self.buffers[0].shape[0] // self._expert_lines(layer)

    def _blob_bytes(self, layer: int) -> int:
        return self.engine.banks[layer].blobs.shape[1] * WORD_BYTES

    def _expert_lines(self, layer: int) -> int:
        return expert_lines(self._blob_bytes(layer))


@dataclass(frozen=True)
class StageShapes:
    """What a block is given by its shapes alone, to compile programs: those that read experts in place, or groups."""

    num_lines: int
    banks: Sequence[LayerBank]
    all_in_place: bool

    def in_place(self, layer: int, num_tokens: int) -> bool:
        return self.all_in_place

    def groups(
        self, layer: int, num_tokens: int, uses: jax.Array, following: tuple[int, int] | None
    ) -> Iterator[Staged]:
        words: Any = jax.ShapeDtypeStruct((self.num_lines, LINE_WORDS), jnp.uint32)
        if not self.all_in_place:
            yield Staged(words, np.full(self.banks[layer].blobs.shape[0], -1, np.int32))

    def started(self, result: Any) -> None:
        return

    def go_on(self) -> None:
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

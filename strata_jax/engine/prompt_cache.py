"""What is stored of conversations, and which of it a prompt can continue (planning notes 7.3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from strata_jax.engine.session import Session
from strata_jax.engine.snapshots import Checkpoint, Image


@dataclass(frozen=True, slots=True, eq=False)
class ParkedConversation:
    """A sequence in host memory; a larger ``order`` is more recent, a pinned one is not evicted."""

    name: str
    image: Image
    checkpoints: tuple[Checkpoint, ...]
    order: int
    pinned: bool = False

    @property
    def tokens(self) -> int:
        return len(self.image.token_ids)

    @property
    def token_ids(self) -> np.ndarray:
        return self.image.token_ids

    @property
    def bytes(self) -> int:
        """All its arrays; a checkpoint that another conversation holds too counts in both."""
        return distinct_bytes(self.arrays())

    def is_prefix_of(self, tokens: Sequence[int]) -> bool:
        """Whether a sequence begins with all its tokens."""
        return common_prefix(self.image.token_ids, tokens) == self.tokens

    def arrays(self) -> Iterator[np.ndarray]:
        """Every array it holds."""
        return chain(self.image.arrays(), checkpoint_arrays(self.checkpoints))


@dataclass(slots=True, eq=False)
class LiveConversation:
    """The sequence on the device."""

    name: str
    session: Session
    checkpoints: tuple[Checkpoint, ...] = ()
    pinned: bool = False

    @property
    def token_ids(self) -> Sequence[int]:
        return self.session.tokens


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The longest usable prefix of a prompt.

    Attributes:
        tokens: how long it is. source: ``live``, ``checkpoint`` (of the live session), ``parked`` or ``none``.
        holder: whose state it is. checkpoint: which of its states; None: the last one.
    """

    tokens: int = 0
    source: str = "none"
    holder: LiveConversation | ParkedConversation | None = None
    checkpoint: Checkpoint | None = None


def longest_match(prompt: Sequence[int], *holders: LiveConversation | ParkedConversation) -> Match:
    """Return the longest prefix of a prompt for which a holder has an exact state, the first of equals.

    The last token of the prompt is not part of it.
    """
    ids, found = np.asarray(prompt, np.int32), Match()
    for holder in holders:
        limit = min(common_prefix(holder.token_ids, ids), len(ids) - 1)
        is_live = isinstance(holder, LiveConversation)
        if found.tokens < len(holder.token_ids) <= limit:
            found = Match(len(holder.token_ids), "live" if is_live else "parked", holder)
        usable = (c for c in holder.checkpoints if found.tokens < c.num_tokens <= limit)
        best = max(usable, key=lambda c: c.num_tokens, default=None)
        if best is not None:
            found = Match(best.num_tokens, "checkpoint" if is_live else "parked", holder, best)
    return found


def common_prefix(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """Return how many leading tokens two sequences share."""
    count = min(len(a), len(b))
    differ = np.asarray(a[:count], np.int32) != np.asarray(b[:count], np.int32)
    return int(np.argmax(differ)) if differ.any() else count


def checkpoint_arrays(checkpoints: Iterable[Checkpoint]) -> Iterator[np.ndarray]:
    """Return the arrays of checkpoints."""
    return chain.from_iterable(c.arrays.values() for c in checkpoints)


def distinct_bytes(arrays: Iterable[np.ndarray]) -> int:
    """Return the bytes of arrays, shared ones once."""
    return sum({id(x): x.nbytes for x in arrays}.values())

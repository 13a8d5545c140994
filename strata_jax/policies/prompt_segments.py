"""The segments in which a prompt is read, and the checkpoints stored on the way (planning notes 5.1). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class CheckpointRule:
    """When states are stored: every `every` tokens of a long read (0: never), first turn boundary from `root` on."""

    every: int = 16_384
    root: int = 2_048


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) that are read in one go.

    Attributes:
        checkpoints: positions in (start, end] at which the state is stored; a chunk ends at each of them.
    """

    start: int
    end: int
    checkpoints: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return self.end - self.start

    def parts(self) -> list[tuple[int, int]]:
        """Return the runs (start, end) of tokens between checkpoints."""
        cuts = [self.start, *self.checkpoints]
        cuts += [self.end] if cuts[-1] != self.end else []
        return list(pairwise(cuts))


def turn_positions(token_ids: Sequence[int], turn_id: int | None) -> tuple[int, ...]:
    """Return where turns start: the positions of the token that opens one, the very first token apart."""
    return tuple(i for i, token in enumerate(token_ids) if token == turn_id and i > 0)


def segments(prompt_tokens: int, turns: Sequence[int], reused: int, rule: CheckpointRule | None) -> list[Segment]:
    """Return the segments of a prompt of which `reused` tokens need not be read.

    They end at the root (only when nothing is reused), at the start of the last turn and at the end. A state is stored
    at the end of all but the last, and at every multiple of `rule.every` inside. Which positions beyond `reused` these
    are does not depend on how much was reused, the root apart. Without a rule there is one segment.

    Args:
        turns: positions of turn starts, ascending.
    """
    if rule is None:
        return [Segment(reused, prompt_tokens)]
    root = next((turn for turn in turns if turn >= rule.root), prompt_tokens) if reused == 0 else prompt_tokens
    ends = sorted({end for end in (root, *turns[-1:], prompt_tokens) if reused < end <= prompt_tokens})
    found, start = [], reused
    for end in ends:
        inside = range(start - start % rule.every + rule.every, end, rule.every) if rule.every else ()
        found.append(Segment(start, end, (*inside, end) if end != prompt_tokens else tuple(inside)))
        start = end
    return found

"""The segments of a read and the checkpoints that it stores on the way (planning notes 5.1). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from strata_jax.sim.requests import SimRequest


@dataclass(frozen=True, slots=True)
class CheckpointRule:
    """When states are stored: every `every` tokens of a long read (0: never), first turn boundary from `root` on."""

    every: int = 16_384
    root: int = 2_048


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) that are read in one go.

    Attributes:
        checkpoints: positions in (start, end] at which the state is stored.
    """

    start: int
    end: int
    checkpoints: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.end - self.start


def segments(request: SimRequest, reused: int, rule: CheckpointRule) -> list[Segment]:
    """Return the segments of a prompt of which `reused` tokens need not be read.

    They end at the root (only when nothing is reused), at the last turn token and before the last prompt token, which
    is the first decode window. A state is stored at the end of all but the last, and every so often inside.
    """
    last = request.prompt_tokens - 1
    root = next((turn for turn in request.turns if turn >= rule.root), last) if reused == 0 else last
    ends = sorted({end for end in (root, *request.turns[-1:], last) if reused < end <= last})
    found, start = [], reused
    for end in ends:
        inside = range(start - start % rule.every + rule.every, end, rule.every) if rule.every else ()
        found.append(Segment(start, end, (*inside, end) if end != last else tuple(inside)))
        start = end
    return found

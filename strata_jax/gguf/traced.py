"""Text that knows which of its characters the chat template wrote itself.

`TracedText` is an ordinary string to whoever reads it. Joining, cutting and stripping keep the origin of every
character; any other operation gives a text of unknown origin, which counts as not the template's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsIndex

MAX_CHARS = 64 * 2**20
Runs = tuple[tuple[int, bool], ...]


class TracedText(str):
    """A string with the origin of its characters.

    Attributes:
        runs: (length, written by the template) of one stretch of characters after the other.
    """

    __slots__ = ("runs",)
    runs: Runs

    def __new__(cls, text: str, runs: Runs | None = None) -> TracedText:
        """Make a text; without ``runs`` nothing in it is the template's."""
        made = super().__new__(cls, text)
        made.runs = ((len(text), False),) if runs is None else runs
        return made

    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, str) or hasattr(other, "__html__"):
            return NotImplemented  # text marked as HTML escapes what it is added to
        return joined((self, other))

    def __radd__(self, other: Any) -> Any:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> TracedText:
        return joined([self] * count.__index__())

    def __rmul__(self, count: SupportsIndex) -> TracedText:
        return self * count

    def __mod__(self, values: Any) -> TracedText:
        given = (
            tuple(values.values()) if isinstance(values, dict) else values if isinstance(values, tuple) else (values,)
        )
        return self._same_origin(super().__mod__(values), *given)

    def __getitem__(self, index: Any) -> TracedText:
        text = super().__getitem__(index)
        if isinstance(index, slice) and index.step in (None, 1):
            start, stop, _ = index.indices(len(self))
            return TracedText(text, _cut(self.runs, start, max(start, stop)))
        if isinstance(index, slice):
            return self._same_origin(text)
        start = range(len(self))[index]
        return TracedText(text, _cut(self.runs, start, start + 1))

    def strip(self, chars: str | None = None, /) -> TracedText:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> TracedText:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> TracedText:
        return self[: len(super().rstrip(chars))]

    def join(self, parts: Iterable[str], /) -> TracedText:
        between: list[str] = []
        for part in parts:
            between += [self, part] if between else [part]
        return joined(between)

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        parts = super().split(sep, maxsplit)
        if sep is None:
            return parts
        found, start = [], 0
        for part in parts:
            found.append(self[start : start + len(part)])
            start += len(part) + len(sep)
        return found

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> TracedText:
        if not old:
            return self._same_origin(super().replace(old, new, count), new)
        return TracedText(new, runs_of(new)).join(self.split(old, count))

    def upper(self) -> TracedText:
        return self._same_origin(super().upper())

    def lower(self) -> TracedText:
        return self._same_origin(super().lower())

    def capitalize(self) -> TracedText:
        return self._same_origin(super().capitalize())

    def title(self) -> TracedText:
        return self._same_origin(super().title())

    def _same_origin(self, result: str, *given: object) -> TracedText:
        """Return a result that is the template's if this text and all that was given is wholly the template's."""
        whole = all(isinstance(text, TracedText) and all(own for _, own in text.runs) for text in (self, *given))
        return TracedText(result, ((len(result), whole),))


def template_text(text: str) -> TracedText:
    """Return a text that the template wrote."""
    return TracedText(text, ((len(text), True),))


def runs_of(text: str) -> Runs:
    return text.runs if isinstance(text, TracedText) else ((len(text), False),)


def joined(parts: Iterable[str]) -> TracedText:
    """Join texts, keeping the origin of each. Raises ValueError for more than `MAX_CHARS` characters."""
    parts = list(parts)
    num_chars = sum(map(len, parts))
    if num_chars > MAX_CHARS:
        raise ValueError(f"it asks for {num_chars:,} characters in a text; the limit is {MAX_CHARS:,}")
    merged: list[tuple[int, bool]] = []
    for part in parts:
        for length, own in runs_of(part):
            if merged and merged[-1][1] == own:
                merged[-1] = (merged[-1][0] + length, own)
            elif length:
                merged.append((length, own))
    return TracedText("".join(parts), tuple(merged))


def _cut(runs: Runs, start: int, stop: int) -> Runs:
    kept, at = [], 0
    for length, own in runs:
        low, high = max(at, start), min(at + length, stop)
        if low < high:
            kept.append((high - low, own))
        at += length
    return tuple(kept)

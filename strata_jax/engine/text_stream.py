"""Tokens to text as they come: whole UTF-8 characters only, and nothing of a stop text.

All that was shown is the decoded text up to the first place where a stop text begins, however the bytes were cut into
tokens. Bytes that are no UTF-8 become U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from strata_jax.errors import ConfigError


class TextStream:
    """Turns a stream of token ids into pieces of text that may be shown at once.

    Attributes:
        stopped: a stop text was reached; what follows is dropped.
        num_tokens: tokens pushed so far.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = ()) -> None:
        if any(not text for text in stop):
            raise ConfigError("workload.stop holds an empty text, which would stop every output at once; remove it")
        self.stopped = False
        self.num_tokens = 0
        self._token_bytes = token_bytes
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def push(self, token_id: int) -> str:
        """Take a token and return the text to show now: nothing while a character or a stop text may be incomplete."""
        if self.stopped:
            return ""
        self.num_tokens += 1
        self._held += self._decoder.decode(self._token_bytes(token_id))
        return self._release(final=False)

    def finish(self) -> str:
        """End the stream and return what was held back."""
        if self.stopped:
            return ""
        self._held += self._decoder.decode(b"", final=True)
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        held, end = self._held, len(self._held)
        found = min((at for at in (held.find(text) for text in self._stop) if at >= 0), default=end + 1)
        open_at = end if final else min((end - _overlap(held, text) for text in self._stop), default=end)
        if found <= open_at:
            shown, self._held, self.stopped = held[:found], "", True
            return shown
        # where a stop text may yet begin before one that was found, what comes next decides between them
        shown, self._held = held[:open_at], held[open_at:]
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that a stop text begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

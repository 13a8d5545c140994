"""A line for whatever takes long: said when it has taken a second, and again, with the time, when it is done."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

SLOW_S = 1.0


@contextmanager
def slow_step(what: str) -> Iterator[None]:
    """Log ``what`` if the block is still running after `SLOW_S` seconds, and how long it took."""
    timer = threading.Timer(SLOW_S, lambda: log.info("%s ...", what))
    timer.daemon = True
    started = time.perf_counter()
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    seconds = time.perf_counter() - started
    if seconds > SLOW_S:
        log.info("%s: %.1f s", what, seconds)


class SlowProgress:
    """Says where a long loop is, at most once a second, and nothing of loops that are done sooner."""

    def __init__(self) -> None:
        self._said_s = time.perf_counter()

    def at(self, where: str) -> None:
        """Log ``where`` if a second has passed since the last line."""
        now_s = time.perf_counter()
        if now_s - self._said_s > SLOW_S:
            self._said_s = now_s
            log.info("%s", where)

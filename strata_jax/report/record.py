"""The record of one run: a directory that says what was planned, what happened and what came out.

Everything is written when it happens, so an interrupted run leaves what it had. One line of a `.jsonl` file is one
event; each carries `schema_version`. `summary.json` has the same keys in every run (see `summary.py`).
"""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any

from strata_jax.errors import ConfigError, StrataError
from strata_jax.files import replaced_on_success
from strata_jax.report.environment import describe_environment
from strata_jax.report.plain import plain
from strata_jax.report.summary import SCHEMA_VERSION, check_fields, complete

try:
    import fcntl
except ImportError:  # Windows has no advisory locks: there, two runs in one given directory are not noticed
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

OWN_FILES = (
    "plan.json",
    "plan.txt",
    "expert_ranking.json",
    "sizes.json",
    "sizes.txt",
    "events.jsonl",
    "metrics.jsonl",
    "summary.json",
    "environment.json",
    "hardware.json",
    "logits.npy",
    "inspect.json",
    "parity.json",
    "parity.txt",
    "output.txt",
    "memory.svg",
    "comparison.csv",
    "comparison.md",
    "comparison.json",
    "policy.json",
    "auto.json",
    "auto.md",
    "grid.csv",
    "grid.md",
)
TEXT_FOLDER = "text"
LOCK_FILE = ".record.lock"


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived: end like an interrupt from the keyboard, with another exit code."""


class RunRecord:
    """Writes the files of one run directory. Use `RunRecord.open`, which also writes the summary of runs that fail."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self.directory = directory
        self._clock = clock
        self._start_s = clock()
        self._summary: dict[str, Any] = {}
        self._streams: dict[str, IO[str]] = {}

    @classmethod
    @contextmanager
    def open(
        cls, directory: Path, settings: Any, clock: Callable[[], float] = time.perf_counter
    ) -> Iterator[RunRecord]:
        """Open the record of a run; on leaving write summary.json and environment.json, whatever happened.

        directory: may exist and may hold an earlier record, which is replaced. A directory that another run is writing
            to is refused with ConfigError.
        settings: the configuration (a dataclass or a mapping), for summary.json's `settings`.
        """
        directory.mkdir(parents=True, exist_ok=True)
        with _exclusive(directory), _terminate_as_exception():
            record = cls(directory, clock)
            record._clear_earlier()
            record._summary["settings"] = plain(settings)
            record.write_json("environment.json", describe_environment())
            try:
                yield record
            except KeyboardInterrupt as error:
                record._close("interrupted", error)
                raise
            except BaseException as error:
                record._close("failed", error)
                raise
            record._close("ok", None)

    @property
    def summary(self) -> dict[str, Any]:
        """The fields of summary.json so far."""
        return dict(self._summary)

    def elapsed_s(self) -> float:
        """Return the seconds since the record was opened."""
        return self._clock() - self._start_s

    def write_plan(self, plan: Mapping[str, Any], text: str) -> None:
        """Write plan.json (the plan's own keys beside `schema_version`) and plan.txt (the table that was printed)."""
        self.write_json("plan.json", {"schema_version": SCHEMA_VERSION, **plan})
        self.write_text("plan.txt", text)

    def event(self, kind: str, **values: Any) -> None:
        """Append one line to events.jsonl: a move or a change of state, with its bytes and ms."""
        self._append("events.jsonl", kind, values)

    def metric(self, kind: str, **values: Any) -> None:
        """Append one line to metrics.jsonl: `kind` is request, chunk or round."""
        self._append("metrics.jsonl", kind, values)

    def update(self, **fields: Any) -> None:
        """Set fields of summary.json; a later value replaces an earlier one. Unknown names are a bug (TypeError)."""
        check_fields(fields)
        self._summary.update(plain(fields))

    def append_text(self, request: str, piece: str) -> None:
        """Append generated text to text/<request>.txt."""
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", request).strip(".") or "request"
        path = self.directory / TEXT_FOLDER / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8", newline="") as stream:
            stream.write(piece)

    def write_json(self, name: str, value: Any) -> Path:
        """Write a JSON file into the run directory, replacing it in one step, and return its path."""
        path = self.directory / name
        with replaced_on_success(path) as unfinished:
            unfinished.write_text(json.dumps(plain(value), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        return path

    def write_text(self, name: str, text: str) -> Path:
        """Write a text file into the run directory, with a line end at its end, and return its path."""
        path = self.directory / name
        path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
        return path

    def save_array(self, name: str, array: Any) -> Path:
        """Write <name>.npy into the run directory and return its path."""
        import numpy as np  # not needed by runs that only plan

        path = self.directory / f"{name}.npy"
        np.save(path, array, allow_pickle=False)
        return path

    def _append(self, name: str, kind: str, values: Mapping[str, Any]) -> None:
        line = {"schema_version": SCHEMA_VERSION, "kind": kind, "time_s": round(self.elapsed_s(), 6), **values}
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = (self.directory / name).open("a", encoding="utf-8")
        stream.write(json.dumps(plain(line), allow_nan=False) + "\n")
        stream.flush()

    def _clear_earlier(self) -> None:
        """Remove the files of an earlier record; refuse to touch files of these names that are no record's."""
        present = [self.directory / name for name in OWN_FILES if (self.directory / name).exists()]
        texts = self.directory / TEXT_FOLDER
        if not present and not texts.exists():
            return
        if not _is_record(self.directory / "environment.json"):
            names = ", ".join(path.name for path in present) or f"{TEXT_FOLDER}/"
            raise ConfigError(
                f"hydra.run.dir={self.directory}: it holds {names}, which no earlier run wrote. Choose another"
                " directory, or move them away."
            )
        log.warning("%s holds the record of an earlier run; it is replaced", self.directory)
        for path in [*present, *sorted(texts.glob("*.txt"))]:
            path.unlink()

    def _close(self, status: str, error: BaseException | None) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._summary["status"] = status
        self._summary["wall_s"] = round(self.elapsed_s(), 3)
        self._summary["peak_ram_bytes"] = peak_ram_bytes()
        if error is not None:
            message = str(error) or ("stopped by a signal" if status == "interrupted" else "")
            expected = isinstance(error, StrataError | KeyboardInterrupt)
            self._summary["error"] = {"type": type(error).__name__, "message": message, "expected": expected}
        self.write_json("environment.json", describe_environment())
        self.write_json("summary.json", complete(self._summary))


def _is_record(environment: Path) -> bool:
    """Say whether an environment.json is one that `RunRecord` wrote."""
    try:
        found = json.loads(environment.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"schema_version", "packages", "command"} <= set(found)


def peak_ram_bytes() -> int | None:
    """Return the largest resident size of this process so far, or None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """Hold the directory for this process; the lock goes with the process, also when it is killed."""
    if fcntl is None:
        yield
        return
    with (directory / LOCK_FILE).open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"hydra.run.dir={directory}: another run is writing to this directory. Wait for it, or choose"
                " another one."
            ) from None
        yield


@contextmanager
def _terminate_as_exception() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that a stopped run still writes its summary."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Terminated("stopped by SIGTERM")

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)

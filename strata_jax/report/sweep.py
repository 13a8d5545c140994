"""The table of a sweep: one row for each job, on disk as soon as the job has ended, whichever process it ran in.

`sweep.jsonl` is appended to, and the readable `sweep.csv` and `sweep.md` are written anew from it, under a lock; a
sweep that is killed has the rows of all jobs that ended. A job whose row comes twice (a resumed sweep) counts once.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO

from strata_jax.errors import ConfigError, DoesNotFit, StrataError
from strata_jax.files import replaced_on_success
from strata_jax.memory.ledger import MIB
from strata_jax.report.plain import plain
from strata_jax.report.tables import format_value

try:
    import fcntl
except ImportError:  # Windows: parallel jobs of one sweep could lose a line of the tables, never a run directory
    fcntl = None  # type: ignore[assignment]

ROWS_FILE, CSV_FILE, MARKDOWN_FILE, LOCK_FILE = "sweep.jsonl", "sweep.csv", "sweep.md", ".sweep.lock"
RUNNING_FILE = ".sweep.running"  # locked from the first job of a sweep to its last
PICTURES = "sweep_*.svg"
DIRECTORY_VARIABLE = "STRATA_SWEEP_DIR"  # how Hydra's callback tells run.py where the sweep is

# nodes of the settings that say how a sweep is reported, not what a job computes
REPORTING = ("sweep", "report")

SUMMARY_COLUMNS = (
    "num_requests",
    "ttft_ms",
    "prompt_tok_s",
    "decode_tok_s",
    "hit_rate",
    "prompt_hit_rate",
    "median_run_s",
    "peak_device_bytes",
)
PLAN_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "slots": ("expert_cache", "slots"),
    "chunk_tokens": ("prefill", "chunk_tokens"),
    "layout": ("prefill", "layout"),
    "lent_slots": ("expert_cache", "lent_slots"),
    "kv_mapped_mib": ("kv", "mapped_mib"),
    "free_after_start_mib": ("free_after_start_mib",),
    "shortfall_mib": ("shortfall_mib",),
}
LAST_COLUMNS = ("wall_s", "directory", "reason")


class Status(StrEnum):
    """How a job ended."""

    OK = "ok"
    UNFIT = "unfit"  # the plan needs more memory than there is
    REFUSED = "refused"  # a setting or a file does not allow it
    FAILED = "failed"  # a bug


def status_of(error: BaseException | None) -> Status:
    """Return the status for what a job raised."""
    if error is None:
        return Status.OK
    if isinstance(error, DoesNotFit):
        return Status.UNFIT
    return Status.REFUSED if isinstance(error, StrataError) else Status.FAILED


def hold_sweep(directory: Path) -> TextIO:
    """Make the directory of a sweep and take it for this process until the returned file is closed.

    Raises ConfigError if another sweep has it: both would write the same tables.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stream = (directory / RUNNING_FILE).open("w", encoding="utf-8")
    if fcntl is not None:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.close()
            raise ConfigError(
                f"hydra.sweep.dir={directory}: another sweep is running there. Wait for it, or choose another one."
            ) from None
    return stream


def start_table(directory: Path, *, resume: bool) -> None:
    """Make the directory of a sweep; without `resume` the table of an earlier sweep there is removed."""
    directory.mkdir(parents=True, exist_ok=True)
    if not resume:
        for path in [directory / ROWS_FILE, directory / CSV_FILE, directory / MARKDOWN_FILE, *directory.glob(PICTURES)]:
            path.unlink(missing_ok=True)


def job_row(
    job: int, overrides: Sequence[str], directory: Path, error: BaseException | None, *, unfit_is_error: bool
) -> dict[str, Any]:
    """Return the row of a job that has ended, from what it left in its directory."""
    summary, plan = _read_json(directory / "summary.json"), _read_json(directory / "plan.json")
    return make_row(job, overrides, summary, plan, error, unfit_is_error=unfit_is_error, directory=str(directory))


def make_row(
    job: int,
    overrides: Sequence[str],
    summary: Mapping[str, Any],
    plan: Mapping[str, Any],
    error: BaseException | None,
    *,
    unfit_is_error: bool,
    directory: str = "",
) -> dict[str, Any]:
    """Return a row: the settings, what summary.json and plan.json say, how it ended."""
    extra = summary.get("extra") or {}
    if "calibrated" in plan:
        extra = {"calibrated": plan["calibrated"]} | extra
    values = {name: summary.get(name) for name in SUMMARY_COLUMNS}
    values |= {name: value for name, value in extra.items() if isinstance(value, int | float | str | bool)}
    values |= {name: _inside(plan, keys) for name, keys in PLAN_COLUMNS.items()}
    status = status_of(error)
    if status is Status.UNFIT and not values["shortfall_mib"]:  # the plan fits, and a request does not
        values["shortfall_mib"] = (getattr(error, "shortfall_bytes", 0) / MIB) or None
    return {
        "job": job,
        "status": status.value,
        "is_error": status is not Status.OK and (unfit_is_error or status is not Status.UNFIT),
        "overrides": {
            key: value for key, value in map(split_override, overrides) if key.split(".")[0] not in REPORTING
        },
        "values": values,
        "wall_s": summary.get("wall_s"),
        "directory": directory,
        "reason": ""
        if error is None
        else f"{type(error).__name__}: {error}"
        if status is Status.FAILED
        else str(error),
    }


def split_override(text: str) -> tuple[str, str]:
    """Return key and value of an override text."""
    key, _, value = text.partition("=")
    return key.lstrip("+~"), value


def add_row(directory: Path, row: Mapping[str, Any]) -> None:
    """Append a row and write the tables anew. Safe between processes."""
    with _locked(directory):
        with (directory / ROWS_FILE).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(plain(row), allow_nan=False) + "\n")
        rows = load_rows(directory)
        for name, text in ((CSV_FILE, csv_text(rows)), (MARKDOWN_FILE, markdown_text(rows))):
            with replaced_on_success(directory / name) as unfinished:
                unfinished.write_text(text, encoding="utf-8")


def load_rows(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of a sweep in the order of the jobs. A line cut off by a crash is left out."""
    path = directory / ROWS_FILE
    rows: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows[row["job"]] = row
    return [rows[job] for job in sorted(rows)]


def columns_of(rows: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the names of the settings that the jobs were given, and those of the values that some job has."""
    overrides: dict[str, None] = {}
    values: dict[str, None] = {}
    for row in rows:
        overrides |= dict.fromkeys(row["overrides"])
        values |= dict.fromkeys(name for name, value in row["values"].items() if value is not None)
    known = [*SUMMARY_COLUMNS, *PLAN_COLUMNS]
    ordered = [name for name in known if name in values] + [name for name in values if name not in known]
    return list(overrides), ordered


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as CSV: job, status, settings, values, seconds, directory, reason."""
    overrides, values = columns_of(rows)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["job", "status", *overrides, *values, *LAST_COLUMNS])
    for row in rows:
        given = [row["overrides"].get(name, "") for name in overrides]
        found = [_blank(row["values"].get(name)) for name in values]
        writer.writerow([row["job"], row["status"], *given, *found, *(_blank(row[name]) for name in LAST_COLUMNS)])
    return stream.getvalue()


def markdown_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table; the whole reasons of jobs that did not finish stand below it.

    Where a card has no fit, a column says which rows are calibrated.
    """
    overrides, values = columns_of(rows)
    shown = [name for name in values if name in SUMMARY_COLUMNS or name in PLAN_COLUMNS]
    if any(is_uncalibrated(row["values"]) for row in rows):
        shown.append("calibrated")
    heads = ["job", "status", *overrides, *shown]
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]
    for row in rows:
        cells = [str(row["job"]), row["status"], *(row["overrides"].get(name, "") for name in overrides)]
        cells += [_cell(row["values"].get(name)) for name in shown]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    ended = [row for row in rows if row["reason"]]
    if ended:
        lines += ["", "Jobs that did not finish:", ""]
        lines += [f"- {row['job']} ({given_text(row)}): {' '.join(row['reason'].split())}" for row in ended]
    return "\n".join(lines) + "\n"


def given_text(row: Mapping[str, Any]) -> str:
    """Return a row's settings as they were typed."""
    return " ".join(f"{key}={value}" for key, value in row["overrides"].items())


def short_result(row: Mapping[str, Any]) -> str:
    """Return how a job went in a few words, for the line on the terminal."""
    parts = [
        f"{text} {format_value(row['values'][name])} {unit}".rstrip()
        for name, text, unit in (
            ("chunk_tokens", "chunk", ""),
            ("slots", "slots", ""),
            ("prompt_tok_s", "prompt", "tok/s"),
            ("decode_tok_s", "decode", "tok/s"),
        )
        if row["values"].get(name) is not None
    ]
    return ", ".join([row["status"], *parts, *(["uncalibrated"] if is_uncalibrated(row["values"]) else [])])


def is_uncalibrated(values: Mapping[str, Any]) -> bool:
    """Say whether a row was simulated for a card without a fit; false where nothing was simulated."""
    return values.get("calibrated") is False


def kept_job(directory: Path, settings: Any) -> bool:
    """Say whether a job of an earlier sweep with these settings finished in `directory`.

    settings: as given to the job's record. Raises ConfigError if a job with other settings finished there: Hydra
    numbers jobs in order, so a resumed sweep must be the same command, or one with values added at its end.
    """
    summary = _read_json(directory / "summary.json")
    if summary.get("status") != "ok":
        return False
    wanted, found = _without_reporting(plain(settings)), _without_reporting(summary.get("settings") or {})
    if wanted == found:
        return True
    name = next((key for key in wanted if wanted[key] != found.get(key)), "settings")
    raise ConfigError(
        f"sweep.resume=true and hydra.sweep.dir={directory.parent}: its job {directory.name} finished with another"
        f" {name}. Repeat the command of that sweep (values may be added to its first setting), or choose another"
        " directory."
    )


def _without_reporting(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in REPORTING}


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with (directory / LOCK_FILE).open("w", encoding="utf-8") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _inside(tree: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _blank(value: Any) -> Any:
    return "" if value is None else value


def _cell(value: Any) -> str:
    return "" if value is None else format_value(value)

"""The files of hardware profiles: which numbers there are, how they are checked, and how a profile is written."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from strata_jax.errors import ConfigError, FormatError

MARKS = ("datasheet", "published", "fitted", "measured", "default")

# The numbers of a profile and their units. A file that names another one is refused.
UNITS: Mapping[str, str] = {
    "vram_mib": "MiB",
    "vram_taken_mib": "MiB",
    "vram_late_mib": "MiB",
    "vmm_chunk_mib": "MiB",
    "ram_mib": "MiB",
    "ram_used_mib": "MiB",
    "hbm_gb_s": "GB/s",
    "hbm_share": "share",
    "tensor_tops": "TOPS",
    "prompt_share": "share",
    "scalar_tflops": "TFLOPS",
    "index_share": "share",
    "pcie_gb_s": "GB/s",
    "copy_share": "share",
    "copies_share": "share",
    "unpinned_share": "share",
    "pull_share": "share",
    "pull_unpinned_share": "share",
    "bounce_gb_s": "GB/s",
    "pinned_share": "share",
    "overlap_share": "share",
    "overlap_copies_share": "share",
    "ring_share": "share",
    "staged_gb_s": "GB/s",
    "segment_ms": "ms",
    "chunk_ms": "ms",
    "relayout_ms": "ms",
    "launch_ms": "ms",
    "row_ms": "ms",
    "draft_ms": "ms",
    "cpu_cores": "cores",
    "cpu_core_gweights_s": "Gweights/s",
    "cpu_avx512_ratio": "ratio",
    "ram_gb_s": "GB/s",
    "ram_share": "share",
    "file_gb_s": "GB/s",
    "page_cache_gb_s": "GB/s",
    "head_load_gb_s": "GB/s",
    "session_gb_s": "GB/s",
    "map_ms_per_gib": "ms/GiB",
}
CARD_NUMBERS = ("copy_share", "prompt_share", "cpu_core_gweights_s")  # what a calibration determines
TEXTS = ("name", "title", "like", "gpus", "os", "cpu", "isa", "notes", "calibrated", "numbers")


@dataclass(frozen=True, slots=True)
class Number:
    """One number of a profile.

    Attributes:
        mark: datasheet, published (stated by a source), fitted (so that published rows come out), measured (on this
            machine) or default (an assumption for all cards).
        rows: published rows it was fitted on. error_pct: median error of those rows with it.
    """

    value: float
    unit: str
    mark: str
    source: str
    rows: tuple[str, ...] = ()
    error_pct: float | None = None


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the file's mapping. Raises ConfigError if there is no file, FormatError if it holds something else."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"hardware.profile_file: there is no file {path}; pipeline=calibrate writes one") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FormatError(f"{path.name}: no YAML: {error}") from None
    if not isinstance(raw, dict):
        raise FormatError(f"{path.name}: a profile is a mapping, this is a {type(raw).__name__}")
    return raw


def read_numbers(raw: Any, where: str) -> dict[str, Number]:
    """Return checked numbers. Raises FormatError naming the file and the entry."""
    if not isinstance(raw, dict):
        raise FormatError(f"{where}: numbers is a mapping of names to value, mark and source")
    return {name: _number(name, entry, where) for name, entry in raw.items()}


def _number(name: str, entry: Any, where: str) -> Number:
    if name not in UNITS:
        near = difflib.get_close_matches(name, UNITS, 1)
        raise FormatError(f"{where}: unknown number {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
    keys = {"value", "unit", "mark", "source", "rows", "error_pct"}
    if not isinstance(entry, dict) or set(entry) - keys or not {"value", "mark", "source"} <= set(entry):
        raise FormatError(f"{where}: {name} needs value, mark and source, and may have unit, rows and error_pct")
    value = entry["value"]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise FormatError(f"{where}: {name} is {value!r}; a number from 0 on works")
    if entry["mark"] not in MARKS:
        raise FormatError(f"{where}: {name} has mark {entry['mark']!r}; marks: {', '.join(MARKS)}")
    if entry.get("unit", UNITS[name]) != UNITS[name]:
        raise FormatError(f"{where}: {name} is in {entry['unit']!r}, it must be in {UNITS[name]}")
    error = entry.get("error_pct")
    return Number(
        float(value),
        UNITS[name],
        str(entry["mark"]),
        str(entry["source"]),
        tuple(str(row) for row in entry.get("rows", ())),
        None if error is None else float(error),
    )


def profile_yaml(texts: Mapping[str, Any], numbers: Mapping[str, Number], comment: str = "") -> str:
    """Return the text of a profile file; numbers fitted on the same rows share one list of them.

    texts: entries of `TEXTS` without the numbers.
    """
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += [f"{key}: {_inline(value)}" for key, value in texts.items()]
    lists: dict[tuple[str, ...], str] = {}
    lines.append("numbers:" if numbers else "numbers: {}")
    for name, number in numbers.items():
        entry = f"value: {_short(number.value)}, unit: {_inline(number.unit)}, mark: {number.mark}"
        entry += f", source: {_inline(number.source)}"
        if number.rows:
            known = lists.get(number.rows)
            if known is None:
                known = lists[number.rows] = f"rows_{len(lists) + 1}"
                entry += f", rows: &{known} {_flow(number.rows)}"
            else:
                entry += f", rows: *{known} "
        if number.error_pct is not None:
            entry += f", error_pct: {_short(number.error_pct)}"
        lines.append(f"  {name}: {{{entry}}}")
    return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    """Return a value as it may stand inside a flow mapping."""
    if isinstance(value, list | tuple):
        return _flow(value)
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    plain = re.fullmatch(r"[A-Za-z][\w ./()+=-]*", text) and yaml.safe_load(text) == text
    return text if plain else "'" + text.replace("'", "''") + "'"


def _flow(values: Sequence[Any]) -> str:
    return "[" + ", ".join(_inline(value) for value in values) + "]"


def _short(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"

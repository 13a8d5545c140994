"""The published tables as rows: read from data/published/, checked, and never changed.

One file is one published source. What a field means: data/published/README.md and the notes at the top of each file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from strata_jax.errors import ConfigError, FormatError

FOLDER = Path(__file__).resolve().parents[2] / "data" / "published"

# the published policies first, then reports of other machines
POLICY_TABLES = ("prefill_own_auto", "prefill_head_alias", "kv_grow")
TABLES = (*POLICY_TABLES, "rtx3070ti_8gb", "rtx3090_128gb", "rtx5060ti_epyc", "rtx5070_matrix")

KINDS = ("memory", "throughput", "latency", "parity", "event")
STATS = ("median", "mean", "single", "max", "min", "p90", "sum")

# A metric's ending fixes its unit; the first match wins.
UNIT_OF_ENDING: Mapping[str, str] = {
    "_tok_s": "tok/s", "_gb_s": "GB/s", "_gib_s": "GiB/s", "_mib": "MiB", "_gib": "GiB", "_mb": "MB", "_gb": "GB",
    "_bytes": "B", "_ms": "ms", "_s": "s", "_h": "h", "_pct": "%", "_tokens": "tokens", "_cells": "cells",
    "_slots": "slots", "_experts": "experts", "_reads": "reads", "_requests": "requests", "_layers": "layers",
    "_w": "W", "_c": "degC", "_identical": "bool", "_ok": "bool", "_count": "count", "_ratio": "ratio",
    "_per_layer": "experts/layer", "_per_round": "per round", "_per_window": "per window", "_frac": "fraction",
    "_nats": "nats", "_index": "index",
}  # fmt: skip

_ROW_KEYS = {"id", "case", "kind", "table", "hardware", "software", "model", "settings", "workload", "results", "notes"}
_NEEDED = _ROW_KEYS - {"case", "table", "notes"}
_CELL_KEYS = {"metric", "value", "unit", "range", "ci95", "values", "stat", "trials", "approx", "derived"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One published figure.

    Attributes:
        value: the figure, None where only a range or single runs are published.
        low, high: range over trials. values: every run, in the published order. ci95: interval of a change.
        derived: the source computed it from other figures.
    """

    metric: str
    unit: str
    value: float | bool | None = None
    low: float | None = None
    high: float | None = None
    values: tuple[float, ...] = ()
    ci95: tuple[float, float] | None = None
    stat: str = ""
    trials: int | None = None
    approx: bool = False
    derived: bool = False

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The published interval: the range, else the extremes of the single runs, else the confidence interval."""
        if self.low is not None and self.high is not None:
            return self.low, self.high
        if len(self.values) > 1:
            return min(self.values), max(self.values)
        return self.ci95


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One published row: what ran, with which settings, and the figures. `source` is the file's name."""

    id: str
    source: str
    kind: str
    table: str
    case: str
    hardware: Mapping[str, Any]
    software: Mapping[str, Any]
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    workload: Mapping[str, Any]
    cells: tuple[Cell, ...]
    notes: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class PublishedTable:
    """One file: its rows, and what its source leaves unclear."""

    name: str
    title: str
    link: str
    notes: tuple[str, ...]
    constants: Mapping[str, Any]
    rows: tuple[Row, ...] = field(repr=False)


def unit_of(metric: str) -> str | None:
    """Return the unit that a metric's ending fixes, or None."""
    return next((unit for ending, unit in UNIT_OF_ENDING.items() if metric.endswith(ending)), None)


def load_tables(names: Sequence[str] = TABLES, folder: Path = FOLDER) -> tuple[PublishedTable, ...]:
    """Return the named tables.

    Raises ConfigError for a name that is not there, FormatError for a file that breaks the schema.
    """
    unknown = [name for name in names if not (folder / f"{name}.yaml").is_file()]
    if unknown:
        have = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
        raise ConfigError(f"reproduce.tables: there is no published table {', '.join(unknown)}; there are {have}.")
    tables = tuple(_read(folder / f"{name}.yaml") for name in names)
    seen: dict[str, str] = {}
    for each in tables:
        for identity in [*(row.id for row in each.rows), *each.constants]:
            if identity in seen:
                raise FormatError(f"{each.name}.yaml: id {identity} is also in {seen[identity]}.yaml")
            seen[identity] = each.name
    return tables


def load_rows(names: Sequence[str] = TABLES, folder: Path = FOLDER) -> tuple[Row, ...]:
    """Return the rows of the named tables, in the order of the files."""
    return tuple(row for each in load_tables(names, folder) for row in each.rows)


@lru_cache(maxsize=32)
def _read(path: Path) -> PublishedTable:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    document = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    if not isinstance(document, dict) or not {"source", "notes", "rows"} <= set(document):
        raise FormatError(f"{path.name}: a published table has the keys source, notes and rows")
    constants = {item["id"]: item["value"] for item in document.get("constants") or []}
    rows = tuple(_row(path, item) for item in document["rows"])
    notes = tuple(document["notes"])
    return PublishedTable(path.stem, document["source"], document.get("link", ""), notes, constants, rows)


def _row(path: Path, item: Mapping[str, Any]) -> Row:
    where = f"{path.name}: row {item.get('id')}"
    missing, extra = sorted(_NEEDED - set(item)), sorted(set(item) - _ROW_KEYS)
    if missing or extra:
        raise FormatError(f"{where}: missing {missing}, not in the schema {extra}")
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", item["id"]):
        raise FormatError(f"{where}: an id is lower case letters, digits and . _ -")
    if item["kind"] not in KINDS:
        raise FormatError(f"{where}: kind {item['kind']!r} is not one of {', '.join(KINDS)}")
    parts: dict[str, Mapping[str, Any]] = {}
    for key in ("hardware", "software", "model", "settings", "workload"):
        if not isinstance(item[key], dict):
            raise FormatError(f"{where}: {key} is not a mapping")
        parts[key] = MappingProxyType(item[key])
    cells = tuple(_cell(where, result) for result in item["results"])
    if not cells:
        raise FormatError(f"{where}: no results")
    return Row(
        id=item["id"], source=path.stem, kind=item["kind"], table=item.get("table", ""), case=item.get("case", ""),
        cells=cells, notes=str(item.get("notes", "")), **parts,
    )  # fmt: skip


def _cell(where: str, result: Mapping[str, Any]) -> Cell:
    extra = sorted(set(result) - _CELL_KEYS)
    metric = str(result.get("metric"))
    if extra:
        raise FormatError(f"{where}: {metric} has keys that are not in the schema: {extra}")
    if unit_of(metric) is None or result.get("unit") != unit_of(metric):
        raise FormatError(f"{where}: {metric} is given in {result.get('unit')!r}, its name says {unit_of(metric)!r}")
    if result.get("stat", "") not in ("", *STATS):
        raise FormatError(f"{where}: {metric} has the unknown statistic {result['stat']!r}")
    low, high = _interval(where, metric, result.get("range"))
    ci95 = _interval(where, metric, result.get("ci95"))
    values = tuple(float(value) for value in result.get("values", ()))
    value = result.get("value")
    if value is None and low is None and not values:
        raise FormatError(f"{where}: {metric} has no value, range or values")
    if low is not None and high is not None and value is not None and not low <= value <= high:
        raise FormatError(f"{where}: {metric} = {value} is outside its range {low} to {high}")
    return Cell(
        metric, str(result["unit"]), value, low, high, values, None if ci95[0] is None else (ci95[0], ci95[1] or 0.0),
        result.get("stat", ""), result.get("trials"), bool(result.get("approx")), bool(result.get("derived")),
    )  # fmt: skip


def _interval(where: str, metric: str, pair: Any) -> tuple[float | None, float | None]:
    if pair is None:
        return None, None
    numeric = isinstance(pair, list) and len(pair) == 2 and all(isinstance(x, int | float) for x in pair)
    if not numeric or pair[0] > pair[1]:
        raise FormatError(f"{where}: {metric} has the interval {pair!r}; an interval is [low, high]")
    return float(pair[0]), float(pair[1])

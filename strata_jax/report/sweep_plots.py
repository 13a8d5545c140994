"""Pictures of a sweep or a grid: speed against every setting that varies, one line for each combination of the others.

matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata_jax.report.style import LINE_COLOURS, UNCALIBRATED, new_figure, save
from strata_jax.report.sweep import is_uncalibrated

MAX_LINES = 8  # more lines in one picture cannot be told apart
MAX_HEADING = 130  # letters
MAX_TICK_LETTERS = 36  # names side by side under an axis; more of them are turned
MEASURES: Mapping[str, str] = {
    "prompt_tok_s": "prompt, tok/s",
    "decode_tok_s": "decode, tok/s",
    "ttft_ms": "first token, ms",
    "hit_rate": "hit rate",
}
# what the planner chose, worth an axis of its own when it varies
CHOSEN: Mapping[str, str] = {"chunk_tokens": "prompt chunk, tokens", "slots": "expert slots"}


@dataclass(frozen=True, slots=True)
class Point:
    """A job: its settings and its values."""

    settings: Mapping[str, str]
    values: Mapping[str, Any]


def draw_sweep(
    rows: Sequence[Mapping[str, Any]],
    directory: Path,
    measures: Sequence[str] = ("prompt_tok_s", "decode_tok_s"),
    name: str = "sweep",
) -> list[Path]:
    """Draw one picture for every setting that varies and for the chosen chunk and slots; return their paths.

    Args:
        rows: of the sweep's table; where none has a speed, nothing is drawn. Those without are crosses on the axis.
        measures: what the panels show. name: what the files' names begin with.
    """
    points = [Point(_marked(row), row["values"]) for row in rows]
    if not any(_has(point.values, measure) for point in points for measure in measures):
        return []
    varying = varying_settings(points)
    paths = []
    for key in varying:
        others = [other for other in varying if other != key]
        path = directory / f"{name}_{_file_name(key)}.svg"
        if all(_number(point.settings.get(key)) is not None for point in points):
            _draw_lines(points, key, key, others, measures, path)
        else:
            _draw_bars(points, key, others, measures, path)
        paths.append(path)
    for column, label in CHOSEN.items():
        if len({point.values.get(column) for point in points} - {None}) > 1:
            path = directory / f"{name}_{column}.svg"
            _draw_scatter(points, column, label, varying, measures, path)
            paths.append(path)
    return paths


def varying_settings(points: Sequence[Point]) -> list[str]:
    """Return the settings with more than one value over the points, in their order."""
    names = dict.fromkeys(name for point in points for name in point.settings)
    return [name for name in names if len({point.settings.get(name) for point in points}) > 1]


def group_points(points: Sequence[Point], others: Sequence[str]) -> dict[str, list[Point]]:
    """Return the points by their values of the other settings; the label is what is typed."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        label = " ".join(f"{name.split('.')[-1]}={point.settings.get(name, '')}" for name in others)
        groups.setdefault(label, []).append(point)
    return groups


def _marked(row: Mapping[str, Any]) -> dict[str, str]:
    """The settings of a row, with a mark behind a card that has no fit."""
    mark = UNCALIBRATED if is_uncalibrated(row["values"]) else ""
    return {
        key: value + mark if key in ("hardware", "hardware.name") else value for key, value in row["overrides"].items()
    }


def _heading(figure: Any, points: Sequence[Point]) -> None:
    """Say above the panels what all points have in common."""
    names = dict.fromkeys(name for point in points for name in point.settings)
    common = [
        f"{name}={value}"
        for name in names
        if len(found := {point.settings.get(name) for point in points}) == 1 and (value := next(iter(found)))
    ]
    lost = any(not point.values.get("decode_tok_s") and not point.values.get("prompt_tok_s") for point in points)
    text = ", ".join([*common, *(["x: no result"] if lost else [])])
    text = text if len(text) <= MAX_HEADING else text[: MAX_HEADING - 3] + "..."
    if text:
        figure.suptitle(text, x=0.01, ha="left", size=9)


def _draw_lines(
    points: Sequence[Point], key: str, label: str, others: Sequence[str], measures: Sequence[str], path: Path
) -> None:
    """A line for each combination of the other settings; of more than can be told apart, medians and ranges."""
    figure, axes = new_figure(len(measures))
    groups = group_points(points, others)
    crowded = len(groups) > MAX_LINES
    if crowded:
        groups = group_points(points, _words(points, others)[:1])
    for axis, measure in zip(axes, measures, strict=True):
        for idx, (name, group) in enumerate(groups.items()):
            at: dict[float, list[float]] = {}
            for point in group:
                x = _number(point.settings[key])
                if x is not None and _has(point.values, measure):
                    at.setdefault(x, []).append(point.values[measure])
            xs, colour = sorted(at), LINE_COLOURS[idx % len(LINE_COLOURS)]
            if crowded:
                axis.fill_between(
                    xs, [min(at[x]) for x in xs], [max(at[x]) for x in xs], color=colour, alpha=0.12, lw=0
                )
            axis.plot(
                xs, [statistics.median(at[x]) for x in xs], "o-", ms=4, color=colour, label=name or None,
                lw=1.6 + 0.8 * (len(groups) - 1 - idx),  # lines that coincide stay visible
            )  # fmt: skip
            if not crowded:
                _crosses(axis, [_number(p.settings[key]) for p in group if not _has(p.values, measure)], colour)
        _finish(axis, label, MEASURES.get(measure, measure))
    if crowded:
        axes[0].set_title("median and range over the other settings", fontsize=9, loc="left", color="#555555")
    _legend(figure, axes[0], groups)
    _heading(figure, points)
    save(figure, path)


def _draw_bars(points: Sequence[Point], key: str, others: Sequence[str], measures: Sequence[str], path: Path) -> None:
    """Bars for a setting that is no number; with more lines than can be told apart, the range over them as a stroke."""
    figure, axes = new_figure(len(measures))
    names = list(dict.fromkeys(str(point.settings.get(key, "")) for point in points))
    crowded = sum(map(len, names)) > MAX_TICK_LETTERS
    groups = group_points(points, others)
    for axis, measure in zip(axes, measures, strict=True):
        if len(groups) > MAX_LINES:
            for x, name in enumerate(names):
                found = sorted(
                    p.values[measure] for p in points if p.settings.get(key, "") == name and _has(p.values, measure)
                )
                if found:
                    axis.plot([x, x], [found[0], found[-1]], color="#9db4cf", lw=6, solid_capstyle="round")
                    axis.plot([x], [statistics.median(found)], "o", color="#1f3a5f")
        else:
            width = 0.8 / len(groups)
            for idx, (label, group) in enumerate(groups.items()):
                value_of = {str(p.settings.get(key, "")): p.values[measure] for p in group if _has(p.values, measure)}
                places = [names.index(name) + (idx - (len(groups) - 1) / 2) * width for name in value_of]
                axis.bar(places, list(value_of.values()), width * 0.92, color=LINE_COLOURS[idx], label=label or None)
                lost = [names.index(str(p.settings.get(key, ""))) for p in group if not _has(p.values, measure)]
                _crosses(axis, [at + (idx - (len(groups) - 1) / 2) * width for at in lost], LINE_COLOURS[idx])
        axis.set_xticks(range(len(names)), names, rotation=20 if crowded else 0, ha="right" if crowded else "center")
        _finish(axis, key, MEASURES.get(measure, measure))
    _legend(figure, axes[0], groups)
    _heading(figure, points)
    save(figure, path)


def _draw_scatter(
    points: Sequence[Point], column: str, label: str, varying: Sequence[str], measures: Sequence[str], path: Path
) -> None:
    """Speed against what the planner chose, coloured by the setting that is no number, if there is one."""
    figure, axes = new_figure(len(measures))
    groups = group_points(points, _words(points, varying)[:1])
    for axis, measure in zip(axes, measures, strict=True):
        for idx, (name, group) in enumerate(groups.items()):
            pairs = [
                (p.values[column], p.values[measure])
                for p in group
                if _has(p.values, column) and _has(p.values, measure)
            ]
            axis.scatter(
                [x for x, _ in pairs], [y for _, y in pairs], s=22, alpha=0.75, lw=0,
                color=LINE_COLOURS[idx % len(LINE_COLOURS)], label=name or None,
            )  # fmt: skip
        _finish(axis, label, MEASURES.get(measure, measure))
    _legend(figure, axes[0], groups)
    _heading(figure, points)
    save(figure, path)


def _crosses(axis: Any, places: Sequence[float | None], colour: str) -> None:
    """Mark on the axis the settings without a result."""
    if places:
        axis.plot(places, [0.0] * len(places), "x", ms=6, mew=1.5, color=colour, clip_on=False, zorder=3)


def _words(points: Sequence[Point], names: Sequence[str]) -> list[str]:
    """Return the settings among `names` that have a value which is no number."""
    return [name for name in names if any(_number(point.settings.get(name)) is None for point in points)]


def _finish(axis: Any, x_label: str, y_label: str) -> None:
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    axis.set_ylim(bottom=0)
    axis.set_axisbelow(True)
    axis.grid(axis="y", color="#dddddd", lw=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any, axis: Any, groups: Mapping[str, Any]) -> None:
    if 1 < len(groups) <= MAX_LINES:
        figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)


def _has(values: Mapping[str, Any], name: str) -> bool:
    return isinstance(values.get(name), int | float)


def _number(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def _file_name(key: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", key).strip("_")

"""memory.svg: who owned the device memory over time, with the requests above it. Read from what a run has written.

Simulated runs, and runs under policies, write a `memory` event at every change. Other runs have no such events: their
memory is the plan's, phase by phase, at the times of the requests. matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata_jax.memory.ledger import MIB, Memory, Owner, Phase
from strata_jax.report.style import OWNER_GROUPS, UNCALIBRATED, save

PICTURE = "memory.svg"
GIB = 1024 * MIB
SMALL_MODEL_BYTES = 2 * GIB  # below this the axis is in MiB
MAX_REQUESTS = 24  # a long run is shown from its beginning: more requests cannot be told apart
MAX_OUTLINED_STEPS = 200
LABEL_SHARE_PER_LETTER = 0.0068


@dataclass(frozen=True, slots=True)
class Moment:
    """Owners of device memory from a time on, in bytes."""

    time_s: float
    owners: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Span:
    """A request: it begins, its first token comes, it ends."""

    name: str
    start_s: float
    first_s: float
    end_s: float


def draw_memory(directory: Path, name: str = PICTURE) -> Path | None:
    """Draw the picture of a run that left its files in `directory`; None if nothing there says who owned what.

    name: of the picture; its ending chooses the format.
    """
    spans = read_spans(_lines(directory / "metrics.jsonl"))
    lines = [line for line in _lines(directory / "events.jsonl") if line["kind"] == "memory"]
    moments = [Moment(float(line["time_s"]), line["owners"]) for line in lines]
    simulated = bool(lines) and lines[0].get("executor") != "device"
    plan = _read(directory / "plan.json")
    if not moments:
        moments = phase_moments(plan, spans)
    if not moments:
        return None
    path = directory / name
    reserve_mib = (plan.get("request") or {}).get("reserve_mib", 0)
    moments, spans, note = first_part(moments, spans)
    _draw(moments, spans, path, title=_title(plan) + note, simulated=simulated, reserve_bytes=reserve_mib * MIB)
    return path


def read_spans(lines: Sequence[Mapping[str, Any]]) -> list[Span]:
    """Return the requests of metrics.jsonl. A line is written when its request ends."""
    spans = []
    for line in lines:
        if line["kind"] != "request":
            continue
        end_s = float(line["time_s"])
        if "start_ms" in line:
            start_s = line["start_ms"] / 1000
        else:
            start_s = end_s - (line["ttft_ms"] + line["decode_ms"]) / 1000
        spans.append(Span(str(line["request"]), start_s, min(end_s, start_s + line["ttft_ms"] / 1000), end_s))
    return spans


def phase_moments(plan: Mapping[str, Any], spans: Sequence[Span]) -> list[Moment]:
    """Return the plan's owners phase by phase: the start, then each request's prompt and decoding."""
    owners = {phase: _phase_owners(plan, phase) for phase in (Phase.START, Phase.PREFILL, Phase.DECODE)}
    if not spans or not owners[Phase.START]:
        return []
    moments = [Moment(0.0, owners[Phase.START])]
    for span in spans:
        moments += [Moment(span.start_s, owners[Phase.PREFILL]), Moment(span.first_s, owners[Phase.DECODE])]
        moments += [Moment(span.end_s, owners[Phase.START])]
    return moments


def first_part(moments: Sequence[Moment], spans: Sequence[Span]) -> tuple[list[Moment], list[Span], str]:
    """Return what is drawn, the first `MAX_REQUESTS` requests, and a note if that is not all."""
    if len(spans) <= MAX_REQUESTS:
        return list(moments), list(spans), ""
    shown = list(spans[:MAX_REQUESTS])
    kept = [moment for moment in moments if moment.time_s <= shown[-1].end_s]
    return kept, shown, f" (the first {MAX_REQUESTS} of {len(spans):,} requests)"


def grouped_bytes(owners: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by the groups of `OWNER_GROUPS`, all of them, in that order. Unknown owners are a bug (KeyError)."""
    group_of = {str(owner): group.name for group in OWNER_GROUPS for owner in group.owners}
    found = {group.name: 0 for group in OWNER_GROUPS}
    for owner, num_bytes in owners.items():
        found[group_of[owner]] += num_bytes
    return found


def _draw(
    moments: Sequence[Moment], spans: Sequence[Span], path: Path, *, title: str, simulated: bool, reserve_bytes: int
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2), layout="constrained")
    requests, memory = figure.subplots(2, 1, sharex=True, height_ratios=(1, 11))
    end_s = max([moments[-1].time_s, *(span.end_s for span in spans)]) or 1.0
    start_s = 0.0 if simulated else moments[0].time_s  # a model that is loaded owns nothing yet
    _draw_memory(memory, moments, end_s, reserve_bytes)
    memory.set_xlim(start_s, end_s)
    memory.set_xlabel("simulated time, s" if simulated else "time, s")
    _draw_requests(requests, spans, start_s, end_s)
    requests.set_title(title, loc="left", fontsize=11)
    save(figure, path)


def _draw_memory(axis: Any, moments: Sequence[Moment], end_s: float, reserve_bytes: int) -> None:
    times = [moment.time_s for moment in moments] + [end_s]
    columns = [grouped_bytes(moment.owners) for moment in moments]
    columns.append(columns[-1])
    total = max(sum(column.values()) for column in columns)
    unit, divisor = ("MiB", MIB) if total < SMALL_MODEL_BYTES else ("GiB", GIB)
    below = [0.0] * len(times)
    for group in OWNER_GROUPS:
        sizes = [column[group.name] / divisor for column in columns]
        if not any(sizes):
            continue
        top = [a + b for a, b in zip(below, sizes)]
        label = f"{group.name}  {_range(sizes, unit)}"
        axis.fill_between(times, below, top, step="post", color=group.colour, lw=0, label=label)
        if len(times) <= MAX_OUTLINED_STEPS:
            axis.step(times, top, where="post", color="white", lw=0.5)
        below = top
    if reserve_bytes:
        label = f"to be kept free  {_range([reserve_bytes / divisor], unit)}"
        axis.axhline((total - reserve_bytes) / divisor, color="#b03a2e", lw=1, ls=(0, (5, 3)), label=label)
    axis.set_ylim(0, total / divisor)
    axis.set_ylabel(f"device memory, {unit}")
    axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(
        handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9,
        labelspacing=0.9,
    )  # fmt: skip


def _draw_requests(axis: Any, spans: Sequence[Span], start_s: float, end_s: float) -> None:
    """A bar for each request, dark while the prompt is read, light while it decodes; its name where there is room."""
    axis.set_ylim(0, 1)
    axis.set_yticks([])
    axis.tick_params(bottom=False, labelbottom=False)
    axis.spines[:].set_visible(False)
    for span in spans:
        parts = ((span.start_s, span.first_s, "#5a6b7d", "white"), (span.first_s, span.end_s, "#c3ccd6", "#222222"))
        for begin_s, stop_s, colour, _ in parts:
            axis.barh(0.5, stop_s - begin_s, left=begin_s, height=0.8, color=colour, lw=0)
        axis.plot([span.end_s, span.end_s], [0.05, 0.95], color="white", lw=1.2)
        begin_s, stop_s, _, ink = max(parts, key=lambda part: part[1] - part[0])
        room = (stop_s - begin_s) / (end_s - start_s) / LABEL_SHARE_PER_LETTER
        names = (span.name, span.name.partition(".")[0], span.name.rpartition(".")[2])
        name = next((text for text in names if len(text) <= room), "")
        axis.text((begin_s + stop_s) / 2, 0.47, name, ha="center", va="center", fontsize=8, color=ink)
    axis.text(
        1.01, 0.5, "dark: prompt, light: decode", transform=axis.transAxes, va="center", fontsize=8, color="#555555"
    )


def _range(sizes: Sequence[float], unit: str) -> str:
    digits = 2 if unit == "GiB" else 1
    low, high = f"{min(sizes):,.{digits}f}", f"{max(sizes):,.{digits}f}"
    return f"{high} {unit}" if low == high else f"{low} - {high} {unit}"


def _title(plan: Mapping[str, Any]) -> str:
    parts = [str(plan[key]) for key in ("model", "memory_model") if plan.get(key)]
    card = plan.get("card")
    if isinstance(card, Mapping) and card.get("name"):
        parts.insert(0, str(card["name"]) + (UNCALIBRATED if plan.get("calibrated") is False else ""))
    return "Who owned the device memory" + (f": {', '.join(parts)}" if parts else "")


def _phase_owners(plan: Mapping[str, Any], phase: Phase) -> dict[str, int]:
    """Bytes of device memory by owner in a phase of a plan's ledger."""
    found: dict[str, int] = {}
    for entry in plan.get("ledger") or ():
        if entry.get("memory") == str(Memory.DEVICE) and entry["owner"] != str(Owner.RESERVE):
            found[entry["owner"]] = found.get(entry["owner"], 0) + int(entry["bytes"][str(phase)])
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

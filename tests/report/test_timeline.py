"""memory.svg: every byte of every event is in the picture, requests above, long runs from their beginning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strata_jax.memory.ledger import MIB, Owner
from strata_jax.report.style import OWNER_GROUPS
from strata_jax.report.timeline import MAX_REQUESTS, Moment, Span, draw_memory, first_part, grouped_bytes, read_spans


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write a .jsonl file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def memory_event(time_s: float, **mib: int) -> dict[str, Any]:
    """Return a `memory` event; keywords are names of `Owner`."""
    owners = {str(Owner[name]): size * MIB for name, size in mib.items()}
    return {"kind": "memory", "time_s": time_s, "phase": "decode", "owners": owners}


def test_every_owner_belongs_to_one_group_with_a_colour_of_its_own() -> None:
    owners = [owner for group in OWNER_GROUPS for owner in group.owners]
    assert sorted(owners) == sorted(Owner)
    assert len({group.colour for group in OWNER_GROUPS}) == len(OWNER_GROUPS)


def test_grouping_conserves_bytes_and_an_unknown_owner_is_a_bug() -> None:
    owners = {str(owner): 2**i for i, owner in enumerate(Owner)}
    assert sum(grouped_bytes(owners).values()) == sum(owners.values())
    with pytest.raises(KeyError):
        grouped_bytes({"nobody": 1})


def test_a_simulated_run_is_drawn_with_its_requests(tmp_path: Path) -> None:
    events = [
        memory_event(0.0, DENSE=3000, EXPERT_SLOTS=5000, FREE=192),
        memory_event(1.0, DENSE=3000, EXPERT_SLOTS=4000, PROMPT_BUFFERS=1000, FREE=192),
        {"kind": "refill", "time_s": 2.0},
        memory_event(2.5, DENSE=3000, EXPERT_SLOTS=5000, FREE=192),
    ]
    write_lines(tmp_path / "events.jsonl", events)
    request = {"kind": "request", "time_s": 9.0, "request": "first", "start_ms": 500.0, "ttft_ms": 2000.0}
    write_lines(tmp_path / "metrics.jsonl", [request | {"decode_ms": 6500.0}])
    plan = {"model": "a model", "card": {"name": "a card"}, "request": {"reserve_mib": 700}}
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    path = draw_memory(tmp_path)
    assert path == tmp_path / "memory.svg"
    picture = path.read_text(encoding="utf-8")
    assert "uncalibrated" not in picture
    (tmp_path / "plan.json").write_text(json.dumps(plan | {"calibrated": False}), encoding="utf-8")
    draw_memory(tmp_path, "marked.svg")
    assert "a card (uncalibrated), a model" in (tmp_path / "marked.svg").read_text(encoding="utf-8")
    for words in ("a card, a model", "simulated time, s", "first", "3.91 - 4.88 GiB", "0.00 - 0.98 GiB", "0.68 GiB"):
        assert words in picture, words
    for group in ("dense weights", "expert slots", "prompt buffers", "free"):
        colour = next(found.colour for found in OWNER_GROUPS if found.name == group)
        assert colour in picture
    assert "K/V and index keys" not in picture, "an owner without bytes"


def test_a_run_on_the_device_is_drawn_from_its_plan(tmp_path: Path) -> None:
    entry = {"owner": "prompt buffers", "memory": "device", "item": "all", "origin": "computed", "rule": ""}
    sizes = {"start": 0, "prefill": 30 * MIB, "decode": 0, "park": 0}
    ledger = [entry | {"bytes": sizes}, entry | {"memory": "host", "owner": "expert bank", "bytes": sizes}]
    (tmp_path / "plan.json").write_text(json.dumps({"ledger": ledger}), encoding="utf-8")
    request = {"kind": "request", "time_s": 9.0, "request": "first", "ttft_ms": 2000.0, "decode_ms": 1000.0}
    write_lines(tmp_path / "metrics.jsonl", [request])
    path = draw_memory(tmp_path)
    assert path is not None
    picture = path.read_text(encoding="utf-8")
    assert "0.0 - 30.0 MiB" in picture
    assert "simulated" not in picture


def test_a_run_that_only_planned_has_no_picture(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"ledger": []}), encoding="utf-8")
    assert draw_memory(tmp_path) is None
    assert not (tmp_path / "memory.svg").exists()


def test_spans_of_real_and_simulated_requests() -> None:
    simulated = {"kind": "request", "time_s": 9.0, "request": "a", "start_ms": 1000.0, "ttft_ms": 3000.0}
    real = {"kind": "request", "time_s": 9.0, "request": "b", "ttft_ms": 3000.0, "decode_ms": 4000.0}
    spans = read_spans([simulated, {"kind": "round", "time_s": 1.0}, real])
    assert spans == [Span("a", 1.0, 4.0, 9.0), Span("b", 2.0, 5.0, 9.0)]


def test_a_long_run_is_shown_from_its_beginning() -> None:
    spans = [Span(str(i), float(i), i + 0.5, i + 1.0) for i in range(1000)]
    moments = [Moment(i / 10, {}) for i in range(10_000)]
    kept, shown, note = first_part(moments, spans)
    assert len(shown) == MAX_REQUESTS
    assert kept[-1].time_s == shown[-1].end_s
    assert "1,000" in note
    assert first_part(moments[:3], spans[:2]) == (moments[:3], spans[:2], "")

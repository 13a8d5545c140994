"""The table of a sweep: rows from what jobs leave, safe between processes, readable after a crash."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from strata_jax.errors import ConfigError, DoesNotFit
from strata_jax.report.sweep import (
    add_row,
    csv_text,
    hold_sweep,
    job_row,
    kept_job,
    load_rows,
    make_row,
    markdown_text,
    short_result,
    start_table,
    status_of,
)
from strata_jax.report.sweep_plots import Point, draw_sweep, group_points, varying_settings


def row(job: int, overrides: list[str], **values: Any) -> dict[str, Any]:
    """Return a row of a job that finished with these values."""
    return {
        "job": job,
        "status": "ok",
        "is_error": False,
        "overrides": dict(text.split("=", 1) for text in overrides),
        "values": values,
        "wall_s": 0.1,
        "directory": str(job),
        "reason": "",
    }


def finished_job(directory: Path, **summary: Any) -> Path:
    """Write what a finished job leaves."""
    directory.mkdir(parents=True)
    settings = {"spec": {"window": 4}, "sweep": {"resume": False}}
    text = json.dumps({"status": "ok", "settings": settings, "wall_s": 1.5, **summary})
    (directory / "summary.json").write_text(text, encoding="utf-8")
    return directory


def test_a_row_holds_settings_speeds_and_what_the_planner_chose(tmp_path: Path) -> None:
    directory = finished_job(tmp_path / "3", prompt_tok_s=812.5, extra={"pcie_share": 0.25, "warnings": ["x"]})
    plan = {"expert_cache": {"slots": 508}, "prefill": {"chunk_tokens": 512, "layout": "borrowed"}}
    (directory / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    made = job_row(3, ["kv.type=int8", "+x.y=1", "sweep.resume=true"], directory, None, unfit_is_error=True)
    assert made["overrides"] == {"kv.type": "int8", "x.y": "1"}
    assert (made["status"], made["is_error"], made["reason"], made["wall_s"]) == ("ok", False, "", 1.5)
    assert made["values"]["prompt_tok_s"] == 812.5
    assert made["values"]["pcie_share"] == 0.25
    assert (made["values"]["slots"], made["values"]["chunk_tokens"]) == (508, 512)
    assert "warnings" not in made["values"]


@pytest.mark.parametrize(
    ("error", "status", "accepted"),
    [
        (None, "ok", False),
        (DoesNotFit("too big"), "unfit", False),
        (ConfigError("wrong"), "refused", True),
        (ZeroDivisionError("a bug"), "failed", True),
    ],
)
def test_only_what_does_not_fit_can_be_accepted(
    error: Exception | None, status: str, accepted: bool, tmp_path: Path
) -> None:
    assert status_of(error).value == status
    made = job_row(0, [], tmp_path, error, unfit_is_error=False)
    assert made["is_error"] is accepted
    assert job_row(0, [], tmp_path, error, unfit_is_error=True)["is_error"] is (error is not None)


def test_csv_has_a_column_for_every_setting_and_value(tmp_path: Path) -> None:
    rows = [row(0, ["a.b=1"], prompt_tok_s=5.0), row(1, ["a.b=x,y", "c=2"], slots=7)]
    rows[1] |= {"status": "unfit", "reason": "no room, at all\nsecond line"}
    read = list(csv.DictReader(io.StringIO(csv_text(rows))))
    assert list(read[0]) == ["job", "status", "a.b", "c", "prompt_tok_s", "slots", "wall_s", "directory", "reason"]
    assert (read[0]["prompt_tok_s"], read[0]["slots"], read[0]["c"]) == ("5.0", "", "")
    assert (read[1]["a.b"], read[1]["reason"]) == ("x,y", "no room, at all\nsecond line")


def test_markdown_is_one_line_a_job_with_reasons_below() -> None:
    rows = [row(0, ["a=1|2"], prompt_tok_s=5123.4), row(1, ["a=3"]) | {"status": "unfit", "reason": "no\nroom"}]
    lines = markdown_text(rows).splitlines()
    assert lines[0] == "| job | status | a | prompt_tok_s |"
    assert lines[2] == "| 0 | ok | 1\\|2 | 5,123.4 |"
    assert lines[-1] == "- 1 (a=3): no room"
    assert len({line.replace("\\|", "").count("|") for line in lines[:4]}) == 1


def _add_many(directory: Path, first: int) -> None:
    for job in range(first, first + 20):
        add_row(directory, row(job, [f"a={job}"], prompt_tok_s=float(job)))


def test_rows_of_parallel_processes_are_all_there(tmp_path: Path) -> None:
    start_table(tmp_path, resume=False)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_add_many, args=(tmp_path, 20 * k)) for k in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [found["job"] for found in load_rows(tmp_path)] == list(range(60))
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 61


def test_a_line_cut_off_by_a_crash_is_left_out_and_a_later_row_counts(tmp_path: Path) -> None:
    start_table(tmp_path, resume=False)
    add_row(tmp_path, row(0, ["a=1"], prompt_tok_s=1.0))
    with (tmp_path / "sweep.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('{"job": 1, "stat\n')
    start_table(tmp_path, resume=True)
    add_row(tmp_path, row(0, ["a=1"], prompt_tok_s=2.0))
    assert [found["values"]["prompt_tok_s"] for found in load_rows(tmp_path)] == [2.0]
    start_table(tmp_path, resume=False)
    assert load_rows(tmp_path) == []
    assert not (tmp_path / "sweep.csv").exists()


def test_a_job_is_kept_if_it_finished_with_the_same_settings(tmp_path: Path) -> None:
    directory = finished_job(tmp_path / "0")
    assert kept_job(directory, {"spec": {"window": 4}, "sweep": {"resume": True}})
    with pytest.raises(ConfigError, match=r"sweep\.resume=true.*job 0 finished with another spec"):
        kept_job(directory, {"spec": {"window": 1}, "sweep": {"resume": True}})
    assert not kept_job(tmp_path / "1", {"spec": {"window": 4}})
    failed = finished_job(tmp_path / "2", status="failed")
    assert not kept_job(failed, {"spec": {"window": 1}})


def test_pictures_are_drawn_for_what_varies(tmp_path: Path) -> None:
    rows = [
        row(i, [f"hardware.vram_reserve_mib={reserve}", f"policy={name}", "quant=q"],
            prompt_tok_s=100.0 + i, decode_tok_s=10.0 + i, slots=500 - reserve, chunk_tokens=512)
        for i, (reserve, name) in enumerate([(0, "a"), (100, "a"), (0, "b"), (100, "b")])
    ]  # fmt: skip
    rows.append(row(4, ["hardware.vram_reserve_mib=999", "policy=a", "quant=q"]) | {"status": "unfit"})
    drawn = {path.name for path in draw_sweep(rows, tmp_path)}
    assert drawn == {"sweep_hardware_vram_reserve_mib.svg", "sweep_policy.svg", "sweep_slots.svg"}
    picture = (tmp_path / "sweep_hardware_vram_reserve_mib.svg").read_text(encoding="utf-8")
    assert "policy=a" in picture
    assert "prompt, tok/s" in picture
    again = draw_sweep(rows, tmp_path / "..")
    assert (again[0]).read_bytes() == (tmp_path / again[0].name).read_bytes(), "the same data, the same bytes"
    assert draw_sweep(rows[4:], tmp_path) == []


def test_a_setting_without_a_result_is_a_cross_and_what_is_common_stands_above(tmp_path: Path) -> None:
    rows = [row(i, ["hardware=rtx4090", f"policy={name}", "quant=q"], prompt_tok_s=100.0, calibrated=False)
            for i, name in enumerate("ab")]  # fmt: skip
    rows.insert(0, row(2, ["hardware=rtx4090", "policy=c", "quant=q"], calibrated=False) | {"status": "unfit"})
    (path,) = draw_sweep(rows, tmp_path, measures=["prompt_tok_s"])
    picture = path.read_text(encoding="utf-8")
    assert "hardware=rtx4090 (uncalibrated), quant=q, x: no result" in picture
    assert picture.index(">c<") < picture.index(">a<"), "in the order of the jobs"


def test_a_card_without_a_fit_is_marked_in_the_table_and_on_the_line() -> None:
    rows = [
        row(0, ["hardware=h200"], slots=7, calibrated=False),
        row(1, ["hardware=rtx5090"], slots=7, calibrated=True),
    ]
    lines = markdown_text(rows).splitlines()
    assert lines[0].endswith("| calibrated |")
    assert [line.split(" | ")[-1] for line in lines[2:]] == ["no |", "yes |"]
    assert [short_result(r).endswith("uncalibrated") for r in rows] == [True, False]
    assert "calibrated" not in markdown_text(rows[1:])


def test_a_plan_alone_says_whether_its_card_is_calibrated() -> None:
    made = make_row(0, [], {}, {"calibrated": False}, None, unfit_is_error=True)
    assert made["values"]["calibrated"] is False


@pytest.mark.parametrize(("plan_mib", "error_mib", "shown"), [(0.0, 245, 245.0), (2507.0, 0, 2507.0), (0.0, 0, None)])
def test_the_shortfall_of_a_request_is_shown_where_the_plan_fits(
    plan_mib: float, error_mib: int, shown: float | None
) -> None:
    error = DoesNotFit("too long", shortfall_bytes=error_mib * 2**20)
    made = make_row(0, [], {}, {"shortfall_mib": plan_mib}, error, unfit_is_error=True)
    assert made["values"]["shortfall_mib"] == shown


def test_a_directory_has_one_sweep_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match=r"hydra\.sweep\.dir=.*another sweep is running there")
    with hold_sweep(tmp_path / "new"), refused:
        hold_sweep(tmp_path / "new")
    hold_sweep(tmp_path / "new").close()


def test_lines_are_the_combinations_of_the_other_settings() -> None:
    points = [Point({"a": str(a), "b": b}, {}) for a in (1, 2) for b in ("x", "y")]
    assert varying_settings(points) == ["a", "b"]
    assert {name: len(group) for name, group in group_points(points, ["b"]).items()} == {"b=x": 2, "b=y": 2}

"""pipeline=grid: every combination is a row with the numbers of a run of its own; what does not fit is one too."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pipelines import run_pipeline
from strata_jax.config import RunConfig
from strata_jax.config.points import grid_points, parse_axes
from strata_jax.config.schema import GridConfig
from strata_jax.errors import ConfigError
from strata_jax.report.record import RunRecord

REPOSITORY = Path(__file__).resolve().parents[2]
CONF = REPOSITORY / "conf"
Compose = Callable[[Sequence[str]], RunConfig]


def run(directory: Path, *overrides: str) -> tuple[int, str, list[dict[str, str]]]:
    """Run a grid as a user does; exit code, stderr and the rows of its table."""
    command = [sys.executable, str(REPOSITORY / "run.py"), f"hydra.run.dir={directory}", *overrides]
    done = subprocess.run(command, cwd=directory.parent, capture_output=True, text=True, check=False, timeout=300)
    with (directory / "grid.csv").open(encoding="utf-8", newline="") as stream:
        return done.returncode, done.stderr, list(csv.DictReader(stream))


def test_every_combination_is_a_row_with_the_numbers_of_its_own_run(compose_config: Compose, tmp_path: Path) -> None:
    axes = "grid.axes=['policy=baseline,kv_grow','hardware=rtx3090,rtx5090','spec.window=1,4']"
    code, err, rows = run(tmp_path / "grid", "pipeline=grid", "hardware=h200", axes)
    assert code == 0, err
    assert [(row["policy"], row["hardware"], row["spec.window"]) for row in rows] == [
        (policy, card, window)
        for policy in ("baseline", "kv_grow")
        for card in ("rtx3090", "rtx5090")
        for window in ("1", "4")
    ]
    alone = compose_config(["hardware=rtx3090", "policy=kv_grow", "spec.window=1", "workload=doc_follow_up"])
    with RunRecord.open(tmp_path / "alone", alone) as record:
        record.update(**run_pipeline(alone, record))
    summary = json.loads((tmp_path / "alone" / "summary.json").read_text(encoding="utf-8"))
    row = rows[4]
    assert float(row["decode_tok_s"]) == pytest.approx(summary["decode_tok_s"])
    assert float(row["prompt_tok_s"]) == pytest.approx(summary["prompt_tok_s"])
    assert len({row["decode_tok_s"] for row in rows}) == len(rows)
    assert {"grid.md", "grid_policy.svg", "grid_spec_window.svg"} <= {p.name for p in (tmp_path / "grid").iterdir()}


def test_points_that_do_not_fit_are_rows_and_make_the_exit_status_non_zero_unless_accepted(tmp_path: Path) -> None:
    small = ("pipeline=grid", "hardware=rtx3090", "workload=chat")
    both = "grid.axes=['hardware.vram_reserve_mib=700,30000','spec.window=4,99']"
    code, err, rows = run(tmp_path / "a", *small, both)
    assert code == 2
    assert "3 of 4 points have no result" in err
    assert [row["status"] for row in rows] == ["ok", "refused", "unfit", "refused"]
    one = "grid.axes=['hardware.vram_reserve_mib=700,30000']"
    code, _, rows = run(tmp_path / "b", *small, one, "sweep.unfit_is_error=false")
    assert code == 0
    assert [row["status"] for row in rows] == ["ok", "unfit"]
    assert "does not fit" in rows[1]["reason"]


def test_skipped_combinations_are_left_out() -> None:
    grid = GridConfig(axes=["policy=baseline,own_prefill", "spec.window=1,2"], skip=["policy=baseline spec.window=2"])
    points = list(grid_points(grid, ["hardware=rtx3090"], CONF))
    assert [point.overrides for point in points] == [
        ("policy=baseline", "spec.window=1"), ("policy=own_prefill", "spec.window=1"),
        ("policy=own_prefill", "spec.window=2"),
    ]  # fmt: skip


def test_values_have_the_types_of_the_schema_and_wrong_ones_are_points_with_an_error() -> None:
    grid = GridConfig(axes=["kv.type=int8,f8", "spec.min_p=0", "cache.slots=auto,100", "kv.grow.enabled=auto"])
    points = list(grid_points(grid, ["hardware=rtx3090"], CONF))
    assert [point.error is None for point in points] == [True, True, False, False]
    first = points[0].config
    assert first is not None
    assert (first.kv.type.name, first.spec.min_p, first.cache.slots, first.kv.grow.enabled) == (
        "int8",
        0.0,
        "auto",
        False,
    )
    assert isinstance(first.spec.min_p, float)
    assert "kv.type=f8: must be one of" in str(points[2].error)


def test_an_axis_takes_the_place_of_the_same_override() -> None:
    grid = GridConfig(axes=["spec.window=2,3"])
    points = list(grid_points(grid, ["hardware=rtx3090", "spec.window=4", "kv.type=q4_0"], CONF))
    found = [(p.config.spec.window, p.config.kv.type.name) for p in points if p.config is not None]
    assert found == [(2, "q4_0"), (3, "q4_0")]


@pytest.mark.parametrize(
    ("axis", "says"),
    [
        ("spec.widnow=1,2", "nearest is spec.window"),
        ("nonsense", "an axis looks like"),
        ("sweep.resume=true,false", "no axis"),
        ("grid.skip=[],[]", "no axis"),
    ],
)
def test_what_is_no_axis_is_refused(axis: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_axes([axis], {"policy"})


@pytest.mark.slow
def test_the_dense_grid_has_a_thousand_points(tmp_path: Path) -> None:
    code, err, rows = run(tmp_path / "grid", "experiment=grid")
    assert code == 0, err
    assert len(rows) == 1000


@pytest.mark.slow
def test_the_grid_of_own_buffers_runs(tmp_path: Path) -> None:
    code, err, rows = run(tmp_path / "grid", "experiment=own_ab_grid")
    assert code == 0, err
    assert {row["layout"] for row in rows if row["policy"] == "own_prefill"} == {"own", "borrowed"}
    assert {row["layout"] for row in rows if row["policy"] == "baseline"} == {"borrowed"}

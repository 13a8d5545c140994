"""Sweeps from the command line: every job has a row, whatever becomes of it; parallel, resumed, without JAX."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
CARD = ("hardware=rtx3070ti", "model.max_context=32768", "workload=chat")

# Runs run.py as a program in which importing JAX fails.
WITHOUT_JAX = f"""
import runpy, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib"):
            raise AssertionError("JAX was imported")
sys.meta_path.insert(0, Blocker())
sys.path.insert(0, {str(REPOSITORY)!r})
sys.argv[0] = {str(REPOSITORY / "run.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(directory: Path, *arguments: str, timeout_s: float = 240) -> tuple[int, str, str]:
    """Run the command line in `directory` without JAX; exit code, stdout, stderr."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX, *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def table(directory: Path) -> list[dict[str, str]]:
    """Return the rows of sweep.csv."""
    with (directory / "sweep.csv").open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_simulated_run_needs_no_jax_and_draws_its_memory(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, *CARD, "hydra.run.dir=run")
    assert (code, err) == (0, "")
    assert "Simulated requests" in out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["settings"]["executor"]["name"] == "sim"
    assert summary["settings"]["quant"]["name"] == "iq2_xs"
    assert "expert slots" in (tmp_path / "run" / "memory.svg").read_text(encoding="utf-8")


def test_W01_a_setting_that_does_not_fit_is_a_row_and_the_others_run(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "-m", *CARD, "hardware.vram_mib=8151,100,16384", "hydra.sweep.dir=sweep")
    assert code == 2
    assert "job 1 (" in err
    assert "hardware.vram_mib=100" in err
    assert "does not fit" in err
    assert "Traceback" not in err
    rows = table(tmp_path / "sweep")
    assert [(row["hardware.vram_mib"], row["status"]) for row in rows] == [
        ("8151", "ok"), ("100", "unfit"), ("16384", "ok"),
    ]  # fmt: skip
    assert "does not fit" in rows[1]["reason"]
    assert float(rows[1]["shortfall_mib"]) > 0
    assert int(rows[0]["slots"]) < int(rows[2]["slots"])
    assert rows[0]["reason"] == ""
    assert out.count("job ") == 2, "a line for each job that finished"
    markdown = (tmp_path / "sweep" / "sweep.md").read_text(encoding="utf-8")
    assert "| 1 | unfit |" in markdown
    assert "Jobs that did not finish" in markdown
    pictures = {path.name for path in (tmp_path / "sweep").glob("*.svg")}
    assert {"sweep_hardware_vram_mib.svg", "sweep_slots.svg"} <= pictures
    assert not list((tmp_path / "sweep").glob("*/memory.svg")), "no picture for each job unless asked for"
    assert "Memory plan" in (tmp_path / "sweep" / "0" / "output.txt").read_text(encoding="utf-8")


def test_unfit_jobs_can_be_accepted_but_not_refused_ones(tmp_path: Path) -> None:
    accepted = ("sweep.unfit_is_error=false", "sweep.plots=false")
    code, _, _ = run(tmp_path, "-m", *CARD, "hardware.vram_mib=8151,100", *accepted, "hydra.sweep.dir=a")
    assert code == 0
    code, _, _ = run(tmp_path, "-m", *CARD, "spec.window=4,99", *accepted, "hydra.sweep.dir=b")
    assert code == 2
    assert [row["status"] for row in table(tmp_path / "b")] == ["ok", "refused"]
    assert not list(tmp_path.glob("*/*.svg"))


def test_a_resumed_sweep_keeps_finished_jobs_and_runs_the_rest(tmp_path: Path) -> None:
    same = ("-m", *CARD, "hydra.sweep.dir=sweep", "sweep.plots=false", "sweep.unfit_is_error=false")
    assert run(tmp_path, *same, "hardware.vram_mib=8151,100")[0] == 0
    first = (tmp_path / "sweep" / "0" / "summary.json").stat().st_mtime_ns
    code, out, err = run(tmp_path, *same, "hardware.vram_mib=8151,100,9000", "sweep.resume=true")
    assert code == 0, err
    assert "vram_mib=8151 sweep.resume=true): kept" in out.replace("True", "true")
    assert "job 1" not in out, "what did not fit is tried again"
    assert (tmp_path / "sweep" / "0" / "summary.json").stat().st_mtime_ns == first
    assert [row["status"] for row in table(tmp_path / "sweep")] == ["ok", "unfit", "ok"]

    before = {path: path.read_bytes() for path in (tmp_path / "sweep").rglob("*") if path.is_file()}
    code, out, err = run(tmp_path, *same, "hardware.vram_mib=8151,100,9001", "sweep.resume=true")
    assert code == 2
    assert err.startswith("error: sweep.resume=true"), "before the first job"
    assert "job 2 finished with another hardware" in err
    assert out == ""
    after = {path: path.read_bytes() for path in (tmp_path / "sweep").rglob("*") if path.is_file()}
    assert after == before, "nothing is overwritten"
    code, _, err = run(tmp_path, *same, "hardware.vram_mib=99,100", "spec.window=99", "sweep.resume=true")
    assert code == 2
    assert "spec.window=99" in err, "a job that would be refused does not replace one that finished"
    assert {path: path.read_bytes() for path in before} == before
    assert json.loads((tmp_path / "sweep" / "0" / "summary.json").read_text())["status"] == "ok", "not overwritten"


def test_resume_needs_to_know_which_sweep(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "-m", *CARD, "spec.window=1,4", "sweep.resume=true")
    assert code == 2
    assert "sweep.resume=true and no hydra.sweep.dir" in err
    assert list(tmp_path.iterdir()) == []


def test_settings_that_jax_reads_once_cannot_be_swept_in_one_process(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "-m", "engine.mem_fraction=0.5,0.6")
    assert code == 2
    assert "engine.mem_fraction=0.5,0.6" in err
    assert "hydra/launcher=joblib" in err


def test_an_option_that_does_not_exist_is_refused_before_any_job(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "-m", *CARD, "policy=baseline,typo", "hydra.sweep.dir=sweep")
    assert code == 2
    assert "policy=typo" in err
    assert "job" not in out


def test_directories_have_safe_names_whatever_the_values(tmp_path: Path) -> None:
    (tmp_path / "a,b").mkdir()
    text = tmp_path / "a,b" / "x=1 y.txt"
    text.write_text("hello", encoding="utf-8")
    code, _, err = run(
        tmp_path, "-m", *CARD[:2], f'workload.prompt_file="{text}"', "spec.window=1,4", "hydra.sweep.dir=sweep"
    )
    assert code == 0, err
    names = {path.name for path in (tmp_path / "sweep").iterdir() if path.is_dir()}
    assert names == {"0", "1"}


@pytest.mark.skipif(importlib.util.find_spec("joblib") is None, reason="needs the extra `sweep`")
def test_parallel_jobs_share_one_table(tmp_path: Path) -> None:
    reserves = "700,800,900,1000,99999"
    code, _, err = run(
        tmp_path, "-m", *CARD, f"hardware.vram_reserve_mib={reserves}", "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2", "hydra.sweep.dir=sweep",
    )  # fmt: skip
    assert code == 2, err
    rows = table(tmp_path / "sweep")
    assert [row["job"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "ok", "unfit"]


@pytest.mark.skipif(importlib.util.find_spec("joblib") is not None, reason="the extra `sweep` is installed")
def test_a_launcher_that_is_not_installed_says_which_extra_brings_it(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "-m", *CARD, "spec.window=1,4", "hydra/launcher=joblib")
    assert code == 2
    assert err == 'error: hydra/launcher=joblib: it is not installed: pip install -e ".[sweep]"\n'


def documented_simulations() -> list[str]:
    """Return the README's commands that simulate one run or sweep, without a file of the user's own."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if line.startswith("    python run.py")]
    skipped = ("model.path", "launcher", "experiment", "reproduce", "resume")
    return [line for line in lines if "hardware=" in line and not any(word in line for word in skipped)]


@pytest.mark.slow
@pytest.mark.parametrize("line", documented_simulations())
def test_documented_simulations_run(line: str, tmp_path: Path) -> None:
    code, _, err = run(tmp_path, *shlex.split(line, comments=True)[2:])
    problems = [text for text in err.splitlines() if not text.startswith("policy=auto: ")]  # a long search is told of
    assert (code, problems) == (0, [])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra `ray`")
def test_jobs_on_a_local_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray writes a token there
    monkeypatch.setenv("RAY_TMPDIR", os.environ.get("RAY_TMPDIR", str(tmp_path)[:40]))
    code, _, err = run(
        tmp_path, "-m", *CARD, "hardware.vram_reserve_mib=700,99999,900", "hydra/launcher=ray",
        "+hydra.launcher.ray.init.num_cpus=2", "+hydra.launcher.ray.init.include_dashboard=false",
        "hydra.sweep.dir=sweep", timeout_s=280,
    )  # fmt: skip
    assert code == 2, err
    assert [row["status"] for row in table(tmp_path / "sweep")] == ["ok", "unfit", "ok"]

"""The command line, in processes of its own: exit codes, what is printed where, and what is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

# Runs run.py as a program after `preparation`, which may replace parts of it.
WRAPPER = """
import runpy, sys
sys.path.insert(0, {root!r})
{preparation}
sys.argv = [{script!r}, *sys.argv[1:]]
runpy.run_path({script!r}, run_name="__main__")
"""

FIXED_CLOCK = """
import datetime, hydra.core.utils
class Fixed(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime(2026, 1, 2, 3, 4, 5, 6)
hydra.core.utils.datetime = Fixed
import omegaconf
"""

NO_WORK = """
import pipelines
pipelines.run_pipeline = lambda config, record: {"output_tokens": config.spec.window}
"""


def start(directory: Path, *arguments: str, preparation: str = NO_WORK) -> subprocess.Popen[str]:
    """Start run.py in `directory` with parts of it replaced."""
    script = str(REPOSITORY / "run.py")
    code = WRAPPER.format(root=str(REPOSITORY), script=script, preparation=preparation)
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=directory,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(directory: Path, *arguments: str, preparation: str = NO_WORK) -> tuple[int, str, str]:
    """Run run.py to its end and return exit code, stdout and stderr."""
    process = start(directory, *arguments, preparation=preparation)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def summaries(directory: Path) -> list[dict[str, object]]:
    """Return every summary below `directory`, in the order of their paths."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.rglob("summary.json"))]


def test_help_needs_neither_jax_nor_hydra(tmp_path: Path) -> None:
    check = """
import atexit
atexit.register(lambda: print(sorted(sys.modules.keys() & {"jax", "hydra", "omegaconf", "numpy"})))
"""
    code, out, err = run(tmp_path, "--help", preparation=check)
    assert (code, err) == (0, "")
    assert "workload.prompt=" in out
    assert out.splitlines()[-1] == "[]"


def test_C01_refusal_is_one_message_with_exit_code_2_before_any_work(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "+planner.vram_reserve_mb=590")
    assert code == 2
    assert out == ""
    assert err == (
        "error: planner.vram_reserve_mb: there is no such setting. The nearest is hardware.vram_reserve_mib.\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_run_leaves_a_record_and_settings_that_are_wrong_together_leave_one_too(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "spec.window=3")
    assert (code, err) == (0, "")
    (summary,) = summaries(tmp_path)
    assert (summary["status"], summary["output_tokens"], summary["pipeline"]) == ("ok", 3, "generate")
    (directory,) = tmp_path.glob("outputs/*/*")
    assert {".hydra", "run.log", "summary.json", "environment.json"} <= {path.name for path in directory.iterdir()}
    assert (directory / ".hydra" / "overrides.yaml").read_text(encoding="utf-8") == "- spec.window=3\n"

    code, _, err = run(tmp_path, "spec.window=99", "hydra.run.dir=refused")
    assert code == 2
    assert err.startswith("error: spec.window=99")
    (refused,) = summaries(tmp_path / "refused")
    assert refused["status"] == "failed"


def test_a_bug_keeps_its_traceback_and_exits_with_1(tmp_path: Path) -> None:
    bug = "import pipelines\ndef broken(config, record):\n    record.event('fill')\n    return 1 / 0\n"
    code, _, err = run(tmp_path, preparation=bug + "pipelines.run_pipeline = broken\n")
    assert code == 1
    assert "ZeroDivisionError" in err
    assert "in broken" in err
    (summary,) = summaries(tmp_path)
    assert summary["error"] == {"type": "ZeroDivisionError", "message": "division by zero", "expected": False}
    assert len(list(tmp_path.rglob("events.jsonl"))) == 1


def test_sigterm_leaves_a_summary_and_exits_with_143(tmp_path: Path) -> None:
    wait = "import pipelines, time\ndef wait(config, record):\n    print('ready', flush=True)\n    time.sleep(60)\n"
    process = start(tmp_path, preparation=wait + "pipelines.run_pipeline = wait\n")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "Traceback" not in err
    assert [summary["status"] for summary in summaries(tmp_path)] == ["interrupted"]


def test_one_refused_job_of_a_sweep_is_shown_and_the_others_run(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "-m", "spec.window=1,99,2")
    assert code == 2
    assert "job 1 (spec.window=99): spec.window=99: must be" in err
    assert "Traceback" not in err
    assert [(summary["status"], summary["output_tokens"]) for summary in summaries(tmp_path)] == [
        ("ok", 1),
        ("failed", None),
        ("ok", 2),
    ]


@pytest.mark.parametrize("arguments", [(), ("-m", "spec.window=1,2")], ids=["run", "sweep"])
def test_W04_runs_started_at_the_same_instant_write_to_different_directories(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    both = [start(tmp_path, *arguments, preparation=FIXED_CLOCK + NO_WORK) for _ in range(2)]
    results = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    records = sorted(path.parent for path in tmp_path.rglob("summary.json"))
    jobs = 2 if arguments else 1
    assert len(records) == 2 * jobs
    assert all("03-04-05-000006" in str(path) for path in records), "the clock was not fixed"
    assert len({path if jobs == 1 else path.parent for path in records}) == 2


def test_given_run_directory_may_be_the_present_one_without_hydras_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep", encoding="utf-8")
    for _ in range(2):
        code, _, err = run(tmp_path, "hydra.run.dir=.", "hydra.output_subdir=null")
        assert code == 0, err
    names = {path.name for path in tmp_path.iterdir()}
    assert {"summary.json", "run.log", "mine.txt"} <= names
    assert not {".hydra", "outputs"} & names


def test_hydras_own_views_work(tmp_path: Path) -> None:
    code, out, _ = run(tmp_path, "--cfg", "job", "experiment=no_drafts")
    assert code == 0
    assert "window: 1" in out
    code, out, _ = run(tmp_path, "--info", "defaults-tree")
    assert code == 0
    assert "doc_18k_small" in out
    code, out, err = run(tmp_path, "-sc", "install=bash")
    assert (code, err) == (0, "")
    assert list(tmp_path.iterdir()) == []

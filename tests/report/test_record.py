"""The run directory: complete after success, honest after failure, and never shared."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata_jax.config import KvType, RunConfig
from strata_jax.errors import ConfigError, DoesNotFit
from strata_jax.report import RunRecord, Terminated
from strata_jax.report.plain import plain
from strata_jax.report.summary import FIELDS


def read(directory: Path, name: str) -> Any:
    """Return a JSON file of the run directory."""
    return json.loads((directory / name).read_text(encoding="utf-8"))


def test_a_finished_run_leaves_every_file(tmp_path: Path) -> None:
    with RunRecord.open(tmp_path, RunConfig()) as record:
        record.write_plan({"owners": {"head": 3}}, "a table")
        record.event("fill", bytes=5, ms=0.5)
        record.metric("request", ttft_ms=np.float32(1.5))
        record.append_text("first", "Grü")
        record.append_text("first", "ße\r\n")
        record.save_array("logits", np.zeros((2, 3), np.float32))
        record.update(prompt_tok_s=12.5, fresh_tokens=np.int64(7), reused_tokens=0)
    assert read(tmp_path, "plan.json") == {"schema_version": 1, "owners": {"head": 3}}
    assert (tmp_path / "plan.txt").read_text(encoding="utf-8") == "a table\n"
    assert (tmp_path / "text" / "first.txt").read_bytes() == "Grüße\r\n".encode()
    assert np.load(tmp_path / "logits.npy").shape == (2, 3)
    line = json.loads((tmp_path / "metrics.jsonl").read_text(encoding="utf-8"))
    assert (line["schema_version"], line["kind"], line["ttft_ms"]) == (1, "request", 1.5)
    summary = read(tmp_path, "summary.json")
    assert list(summary) == ["schema_version", *FIELDS]
    assert (summary["status"], summary["error"], summary["fresh_tokens"]) == ("ok", None, 7)
    assert summary["settings"]["kv"]["type"] == "int8"
    environment = read(tmp_path, "environment.json")
    assert {"python", "packages", "cpu", "git", "variables", "device"} <= set(environment)
    assert {"jax", "jaxlib", "numpy", "gguf"} <= set(environment["packages"])


@pytest.mark.parametrize(
    ("error", "status", "expected"),
    [
        (DoesNotFit("too big by 3 MiB"), "failed", True),
        (ZeroDivisionError("a bug"), "failed", False),
        (KeyboardInterrupt(), "interrupted", True),
    ],
)
def test_a_run_that_ends_early_keeps_what_it_had(
    error: BaseException, status: str, expected: bool, tmp_path: Path
) -> None:
    def run() -> None:
        with RunRecord.open(tmp_path, {}) as record:
            record.event("fill", bytes=5)
            record.append_text("r", "half a")
            record.update(output_tokens=3)
            raise error

    with pytest.raises(type(error)):
        run()
    summary = read(tmp_path, "summary.json")
    assert (summary["status"], summary["output_tokens"]) == (status, 3)
    assert summary["error"]["type"] == type(error).__name__
    assert summary["error"]["message"] == (str(error) or "stopped by a signal")
    assert summary["error"]["expected"] is expected
    assert (tmp_path / "events.jsonl").read_text(encoding="utf-8").count("\n") == 1
    assert (tmp_path / "text" / "r.txt").read_text(encoding="utf-8") == "half a"


def test_sigterm_is_an_interruption_and_the_old_handler_comes_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), RunRecord.open(tmp_path, {}):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    assert read(tmp_path, "summary.json")["status"] == "interrupted"


def test_lines_are_on_disk_while_the_run_goes_on(tmp_path: Path) -> None:
    with RunRecord.open(tmp_path, {}) as record:
        record.metric("chunk", tokens=64)
        assert json.loads((tmp_path / "metrics.jsonl").read_text(encoding="utf-8"))["tokens"] == 64


def test_W04_two_runs_cannot_write_to_one_directory(tmp_path: Path) -> None:
    with RunRecord.open(tmp_path, {}) as first:
        first.event("fill")
        with pytest.raises(ConfigError, match="another run is writing"), RunRecord.open(tmp_path, {}):
            pass
        first.event("fill")
    assert (tmp_path / "events.jsonl").read_text(encoding="utf-8").count("\n") == 2


def test_an_earlier_record_in_a_given_directory_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep", encoding="utf-8")
    for _ in range(2):
        with RunRecord.open(tmp_path, {}) as record:
            record.event("fill")
            record.append_text("r", "x")
    assert (tmp_path / "events.jsonl").read_text(encoding="utf-8").count("\n") == 1
    assert (tmp_path / "text" / "r.txt").read_text(encoding="utf-8") == "x"
    assert (tmp_path / "mine.txt").read_text(encoding="utf-8") == "keep"


def test_a_field_that_the_summary_does_not_have_is_a_bug(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="tokens_per_second"), RunRecord.open(tmp_path, {}) as record:
        record.update(tokens_per_second=3)


def test_text_file_names_cannot_leave_the_run_directory(tmp_path: Path) -> None:
    with RunRecord.open(tmp_path / "run", {}) as record:
        record.append_text("../../evil", "x")
        record.append_text("..", "y")
    assert sorted(path.name for path in (tmp_path / "run" / "text").iterdir()) == ["_.._evil.txt", "request.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_values_become_plain_json() -> None:
    value = {KvType.f16: [np.arange(2), float("nan"), Path("a"), {3, 1}], "b": (True, None, np.bool_(False))}
    assert plain(value) == {"f16": [[0, 1], None, "a", [1, 3]], "b": [True, None, False]}
    with pytest.raises(TypeError, match="object"):
        plain(object())


def test_files_that_no_run_wrote_are_refused_not_deleted(tmp_path: Path) -> None:
    for name in ("logits.npy", "summary.json", "text/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    with (
        pytest.raises(ConfigError, match=r"it holds summary\.json, logits\.npy, which no earlier run wrote"),
        RunRecord.open(tmp_path, {}),
    ):
        pass
    assert (tmp_path / "text" / "notes.txt").read_text() == "{}"
    assert (tmp_path / "logits.npy").read_text() == "{}"

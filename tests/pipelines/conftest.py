"""Pipelines as the command line runs them: in this process, or as a program with a cache folder of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines import run_pipeline
from strata_jax.config import RunConfig
from strata_jax.report.record import RunRecord
from tests.oracle.models import ModelStore, llama_oracle, models

__all__ = ["llama_oracle", "models"]

REPOSITORY = Path(__file__).resolve().parents[2]
# a GDN layer with the n-gram table, an attention layer and the draft block, whose drafts are right some of the time
SMALL: dict[str, object] = {
    "num_layers": 2, "full_attention_interval": 2, "ple_layer": 0, "num_experts": 4, "num_experts_used": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Finished:
    """A run that ended, and the record it left."""

    directory: Path
    out: str
    err: str = ""
    code: int = 0

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text(encoding="utf-8"))

    def lines(self, name: str, kind: str) -> list[dict[str, Any]]:
        """The lines of a .jsonl file that are of a kind."""
        text = (self.directory / name).read_text(encoding="utf-8")
        return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]

    def text(self, request: str) -> str:
        path = self.directory / "text" / f"{request}.txt"
        with path.open(encoding="utf-8", newline="") as stream:
            return stream.read()

    @property
    def emitted(self) -> list[int]:
        """The tokens of all rounds."""
        return [token for line in self.lines("metrics.jsonl", "round") for token in line["emitted"]]

    @property
    def logits(self) -> np.ndarray:
        return np.load(self.directory / "logits.npy")


@pytest.fixture(scope="session")
def small_model(models: ModelStore) -> Path:
    return models.synthetic("nano", 0, echo_mtp=0.1, overrides=SMALL)


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a program, with a cache folder that the workers share."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return {**os.environ, "XDG_CACHE_HOME": str(shared / "cache"), "COLUMNS": "120"}


@pytest.fixture
def command_line(environment: dict[str, str], tmp_path: Path) -> Callable[..., Finished]:
    """Run `python run.py` in an empty directory, to its end."""

    def run(*arguments: str) -> Finished:
        command = [sys.executable, str(REPOSITORY / "run.py"), "hydra.run.dir=run", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False, timeout=300)
        return Finished(tmp_path / "run", done.stdout.decode(), done.stderr.decode(), done.returncode)

    return run


@pytest.fixture
def run_here(compose_config: Callable[[Sequence[str]], RunConfig], tmp_path: Path) -> Callable[..., Finished]:
    """Run a pipeline in this process."""

    def run(*arguments: str, directory: str = "run") -> Finished:
        config = compose_config(arguments)
        out = io.StringIO()
        with contextlib.redirect_stdout(out), RunRecord.open(tmp_path / directory, config) as record:
            record.update(pipeline=config.pipeline.name)
            record.update(**run_pipeline(config, record))
        return Finished(tmp_path / directory, out.getvalue())

    return run

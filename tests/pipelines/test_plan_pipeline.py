"""pipeline=plan: sizes that agree with the file, a plan, and no JAX."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines import assemble
from strata_jax.config import RunConfig
from strata_jax.hardware import GIB, Gpu, Hardware, describe_local
from strata_jax.synthetic import write_synthetic_gguf
from tests.pipelines.conftest import Finished

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small model file."""
    path = tmp_path_factory.mktemp("model") / "nano.gguf"
    write_synthetic_gguf(path, preset="nano", seed=0)
    return path


def run(directory: Path, *arguments: str) -> tuple[int, str, str]:
    """Run run.py as a user does, with a check at exit that JAX was not imported."""
    script = str(REPOSITORY / "run.py")
    code = (
        f"import atexit, runpy, sys; sys.path.insert(0, {str(REPOSITORY)!r}); sys.argv[0] = {script!r}\n"
        "atexit.register(lambda: print('jax' in sys.modules))\n"
        f"runpy.run_path({script!r}, run_name='__main__')"
    )
    command = [sys.executable, "-c", code, "pipeline=plan", "hydra.run.dir=run", *arguments]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_sizes_and_plan_are_printed_and_written_from_the_header_alone(model: Path, tmp_path: Path) -> None:
    code, out, err = run(tmp_path, f"model.path={model}", "workload.token_ids=[1,2,3]")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "False", "JAX was imported"
    sizes = json.loads((tmp_path / "run" / "sizes.json").read_text(encoding="utf-8"))
    assert sizes["total_bytes"] == sum(row["num_bytes"] for row in sizes["components"])
    assert 0 < model.stat().st_size - sizes["total_bytes"] < 200_000, "what is not tensors is the header"
    for name in ("sizes.txt", "plan.txt"):
        for line in (tmp_path / "run" / name).read_text(encoding="utf-8").splitlines():
            assert line in out
    plan = json.loads((tmp_path / "run" / "plan.json").read_text(encoding="utf-8"))
    assert plan["fits"] is True


def test_a_plan_that_does_not_fit_is_an_outcome_and_leaves_the_sizes(model: Path, tmp_path: Path) -> None:
    code, _, err = run(tmp_path, f"model.path={model}", "model.max_context=4096", "hardware.vram_mib=701")
    assert code == 2
    assert err.startswith("error: the plan does not fit")
    assert (tmp_path / "run" / "sizes.json").is_file()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["error"]["type"]) == ("failed", "DoesNotFit")
    plan = json.loads((tmp_path / "run" / "plan.json").read_text(encoding="utf-8"))
    assert plan["fits"] is False
    assert plan["shortfall_mib"] > 0
    assert plan["message"] in (tmp_path / "run" / "plan.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(("gpu", "chunk_tokens"), [(Gpu("Some GPU", 16 * GIB, 16 * GIB), 4_096), (None, 512)], ids=str)
def test_auto_tries_larger_chunks_where_a_gpu_streams_experts(
    model: Path, run_here: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch, gpu: Gpu | None, chunk_tokens: int
) -> None:
    def machine(config: RunConfig) -> Hardware:
        return replace(describe_local(look_for_gpu=False), gpu=gpu, vram_bytes=16 * GIB)

    monkeypatch.setattr(assemble, "describe_target", machine)
    done = run_here("pipeline=plan", f"model.path={model}", "model.max_context=4096", "engine.kernels=reference")
    plan = json.loads((done.directory / "plan.json").read_text(encoding="utf-8"))
    assert plan["prefill"]["chunk_tokens"] == chunk_tokens

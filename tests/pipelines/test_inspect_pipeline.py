"""Looking into a file: everything in its header is shown, also where the file cannot be run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from strata_jax.errors import FormatError
from tests.gguf.tiny_writer import small_file
from tests.pipelines.conftest import Finished


def test_inspect_shows_metadata_and_tensors(run_here: Callable[..., Finished], small_model: Path) -> None:
    done = run_here("pipeline=inspect", f"model.path={small_model}")
    found = json.loads((done.directory / "inspect.json").read_text())
    assert found["metadata"]["general.architecture"] == "qwen4exp"
    assert found["metadata"]["tokenizer.ggml.tokens"].startswith("512 values: ")
    assert {"name": "token_embd.weight", "shape": [512, 64], "type": "F32", "bytes": 512 * 64 * 4} in found["tensors"]
    assert "blk.0.ssm_out.weight" in done.out


def test_G07_a_tensor_of_an_unknown_type_is_shown_and_only_a_plan_refuses_it(
    run_here: Callable[..., Finished], tmp_path: Path
) -> None:
    file = small_file()
    file.tensors[1].ggml_id = 153
    path = file.write(tmp_path / "fork.gguf")
    done = run_here("pipeline=inspect", f"model.path={path}")
    tensors = json.loads((done.directory / "inspect.json").read_text())["tensors"]
    assert [(t["type"], t["bytes"] is None) for t in tensors] == [
        ("F32", False),
        ("unknown(153)", True),
        ("F32", False),
    ]
    with pytest.raises(FormatError):
        run_here("pipeline=plan", f"model.path={path}", directory="plan")

"""The documents: every command in them composes, every grid has points, and the recipes for adding things work."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from strata_jax.config import RunConfig
from strata_jax.config.load import check_overrides, find_groups, register, to_config
from strata_jax.config.points import grid_points
from strata_jax.memory.strata.plan import plan_strata
from strata_jax.memory.strata.request import MIB, Card, StrataRequest
from strata_jax.memory.strata.sizes import pack_sizes
from strata_jax.policies.invariants import check_state
from strata_jax.policies.policy import Policy
from strata_jax.policies.stack import PolicyStack, policy_stack
from strata_jax.policies.state import RequestFacts
from strata_jax.presets import preset_geometry

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ADDING = (DOCS / "adding.md").read_text(encoding="utf-8")
OWN_NAMES = ("rtx4060", "model.gguf", "FILE")  # examples that a reader has to have
Compose = Callable[..., RunConfig]


def documented() -> list[str]:
    """Return the arguments of every run.py command in the documents, without comments."""
    lines = [
        line for path in (*sorted(DOCS.glob("*.md")), ROOT / "README.md") for line in path.read_text().splitlines()
    ]
    found = re.findall(r"python run\.py +([^`#\n]*)", "\n".join(lines))
    return sorted({command.strip() for command in found} - {""})


def experiments() -> list[str]:
    return sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("command", [c for c in documented() if not any(name in c for name in OWN_NAMES)])
def test_documented_commands_compose(command: str, compose_config: Compose) -> None:
    arguments = [a for a in shlex.split(command) if a not in ("-m", "--help", "...")]
    if "-m" in command.split() or any(a.startswith(("hydra", "[")) for a in arguments):
        register()
        check_overrides(arguments, find_groups([ROOT / "conf"]), multirun=True)
        return
    compose_config(arguments)


@pytest.mark.parametrize("name", experiments())
def test_every_point_of_an_experiment_is_a_valid_setting(name: str) -> None:
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "conf")):
        composed = compose("config", overrides=[f"experiment={name}"])
        config = to_config(composed)
        if not config.grid.axes:
            return
        points = list(grid_points(OmegaConf.to_object(composed.grid), [f"experiment={name}"], ROOT / "conf"))  # type: ignore[arg-type]
    assert points
    assert [point.error for point in points if point.error is not None] == []
    for skip in config.grid.skip:
        assert not any(set(skip.split()) <= set(point.overrides) for point in points)
        every = {text.partition("=")[0] for text in skip.split()}
        assert every <= {text.partition("=")[0] for text in points[0].overrides}, f"{skip} names no axis"
    for axis in config.grid.axes:  # a value that is in no point was misspelt in `skip`
        assert any(text.startswith(axis.partition("=")[0] + "=") for text in points[0].overrides)


def test_baseline_points_are_not_repeated_where_the_switch_does_not_count() -> None:
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "conf")):
        composed = compose("config", overrides=["experiment=alias_cards"])
        points = list(grid_points(OmegaConf.to_object(composed.grid), ["experiment=alias_cards"], ROOT / "conf"))  # type: ignore[arg-type]
    for card in {point.overrides[0] for point in points}:
        assert len([p for p in points if p.overrides[0] == card]) == 4, card


def copied(directory: Path) -> Path:
    """Return a copy of the program with the files of docs/adding.md in it."""
    for name in ("conf", "data", "pipelines", "strata_jax", "hydra_plugins"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "run.py", directory)
    blocks = re.findall(r"<!-- (file|append): (\S+) -->\n```yaml\n(.*?)```", ADDING, re.DOTALL)
    assert len(blocks) == 6
    for kind, name, text in blocks:
        path = directory / name
        assert path.exists() is (kind == "append"), name
        path.write_text((path.read_text(encoding="utf-8") if kind == "append" else "") + text, encoding="utf-8")
    return directory


def test_a_card_a_quantisation_and_a_workload_are_added_by_files_alone(tmp_path: Path) -> None:
    program = copied(tmp_path)
    (command,) = [c for c in documented() if "rtx4060" in c]
    done = subprocess.run(
        [sys.executable, "run.py", *shlex.split(command), "report.plots=false", "hydra.run.dir=out"],
        cwd=program, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((program / "out" / "summary.json").read_text(encoding="utf-8"))
    assert summary["device"] == "simulated rtx4060 (uncalibrated)"
    assert "iq4_mix" in summary["model"].lower().replace(" ", "_") or "IQ4_XS with Q8_0" in summary["model"]
    lines = (program / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    requests = [json.loads(line) for line in lines if '"kind": "request"' in line]
    assert [(r["conversation"], r["prompt_tokens"]) for r in requests[:2]] == [("a", 9_000), ("b", 7_000)]
    assert requests[2]["fresh_tokens"] in (64, requests[2]["prompt_tokens"])  # parked, or read again
    assert (program / "out" / "auto.md").is_file()


def test_a_policy_written_as_the_document_says_runs_in_a_stack() -> None:
    (source,) = re.findall(r"<!-- policy -->\n```python\n(.*?)```", ADDING, re.DOTALL)
    module: dict[str, object] = {}
    exec(compile(source, "free_floor.py", "exec"), module)
    added = module["FreeFloor"]
    assert isinstance(added, type)
    assert issubclass(added, Policy)
    sizes = pack_sizes(preset_geometry("qwen38_flash", "iq2_xs"))
    card = Card("test", 16_384 * MIB, ram_bytes=100_000 * MIB, ram_available_bytes=100_000 * MIB)
    plan = plan_strata(sizes, card, StrataRequest(context_cells=32_768, reserve_mib=100))
    usual = policy_stack(sizes, plan)
    stack = PolicyStack(usual.ctx, (*usual.policies, added()), usual.round_policies)
    state = stack.on_start(stack.initial_state()).state
    facts = RequestFacts("a", "a", 3_000, 10, 0, 3_000, False)
    step = stack.before_read(stack.on_request(state, facts).state, facts, 3_000)
    check_state(sizes, plan, step.state)
    assert step.notes[-1].endswith("MiB below the floor")
    assert step.moves == usual.before_read(usual.on_request(state, facts).state, facts, 3_000).moves

"""cache.profile and cache.profile_save on the device: a run learns a ranking, and the next one starts from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pipelines import generate
from strata_jax.config import RunConfig
from strata_jax.errors import ConfigError
from strata_jax.memory.expert_ranking import ExpertRanking
from strata_jax.memory.plan import MemoryPlan
from strata_jax.memory.ranking_file import read_ranking, write_ranking
from tests.pipelines.conftest import Finished

RUN = (
    "workload.prompt='The quick brown fox'", "workload.ignore_eos=true", "workload.max_output_tokens=24",
    "cache.slots=6", "prefill.chunk=32", "kv.type=f32", "engine.check=true", "spec.window=2",
)  # fmt: skip
ADAPTIVE = (
    "cache.replacement=adaptive",
    "cache.adapt.every_rounds=2",
    "cache.adapt.least_usage=1",
    "cache.adapt.gap=0.5",
)
MOVES = ("evict", "swap_expert")


def test_a_run_starts_from_what_the_last_one_learned(
    run_here: Callable[..., Finished], small_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "learned.json"
    model = f"model.path={small_model}"
    first = run_here(model, *RUN, f"cache.profile_save={file}", directory="first")
    learned = read_ranking(file)
    assert (learned.num_layers, learned.num_experts, learned.with_draft) == (2, 4, True)
    assert len(learned.pairs) == 12
    saved = first.lines("events.jsonl", "ranking_saved")
    assert [(line["file"], line["digest"], line["ranked"]) for line in saved] == [(str(file), learned.digest, 12)]
    # the file is used and written again: the record keeps what was used
    second = run_here(model, *RUN, f"cache.profile={file}", f"cache.profile_save={file}", directory="second")
    assert second.emitted == first.emitted
    assert second.summary["hit_rate"] > first.summary["hit_rate"]
    assert "slots follow cache.profile=" in second.out
    used = read_ranking(second.directory / "expert_ranking.json")
    assert used == learned
    plan = MemoryPlan.from_json(json.loads((second.directory / "plan.json").read_text()), used)
    assert tuple(plan.resident_pairs()) == learned.pairs[:6]
    assert read_ranking(file).provenance["prior_digest"] == learned.digest


def test_an_interrupted_run_keeps_what_it_has_learned(
    run_here: Callable[..., Finished], small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "learned.json"
    shown = 0

    def stop(piece: str, name: str, record: object) -> None:
        nonlocal shown
        shown += 1
        if shown == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(generate, "_show", stop)
    with pytest.raises(KeyboardInterrupt):
        run_here(f"model.path={small_model}", *RUN, f"cache.profile_save={file}", directory="stopped")
    partly = read_ranking(file)
    assert sum(partly.usage) > 0
    assert json.loads((tmp_path / "stopped" / "summary.json").read_text())["status"] == "interrupted"


def test_nothing_is_written_where_nothing_was_learned(
    run_here: Callable[..., Finished], small_model: Path, tmp_path: Path
) -> None:
    one = (*(text for text in RUN if "max_output" not in text), "workload.max_output_tokens=1")
    done = run_here(f"model.path={small_model}", *one, f"cache.profile_save={tmp_path / 'r.json'}")
    assert "no decode window ran, so nothing was learned" in done.out
    assert not (tmp_path / "r.json").exists()


def test_another_models_file_is_refused_before_the_run(
    run_here: Callable[..., Finished], small_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "r.json"
    file.write_text("notes")
    with pytest.raises(ConfigError, match="exists and is no ranking of experts"):
        run_here(f"model.path={small_model}", *RUN, f"cache.profile_save={file}", directory="a")
    assert file.read_text() == "notes"
    assert not (tmp_path / "a" / "plan.json").exists()
    with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
        run_here(f"model.path={small_model}", *RUN, f"cache.profile={tmp_path / 'none'}", directory="b")


def test_processes_with_one_seed_learn_the_same_bytes(
    command_line: Callable[..., Finished], small_model: Path, tmp_path: Path
) -> None:
    sampled = (*RUN, *ADAPTIVE, "workload.temperature=0.8", "workload.seed=5", f"model.path={small_model}")
    found = []
    for name in ("one", "two"):
        done = command_line(*sampled, f"cache.profile_save={tmp_path / name}", f"hydra.run.dir={name}_run")
        assert done.code == 0, done.err
        record = Finished(tmp_path / f"{name}_run", done.out)
        events = (record.directory / "events.jsonl").read_text().splitlines()
        moves = [(e["kind"], e["bytes"], e["cause"]) for e in map(json.loads, events) if e["kind"] in MOVES]
        found.append((record.emitted, moves, (tmp_path / name).read_bytes()))
    assert found[0] == found[1]
    assert {kind for kind, *_ in found[0][1]} == set(MOVES)


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("cache.profile=none", "executor=device"), "cache.profile=none and executor=device: the device needs no ranking"),
    (("cache.profile=''",), "cache.profile='': name a file"),
    (("cache.profile_save=''",), "cache.profile_save='': name a file"),
    (
        ("cache.profile_save=f", "pipeline=plan"),
        "cache.profile_save=f and pipeline=plan: only pipeline=generate learns",
    ),
    (("cache.profile_save=f", "hardware=rtx3090"), "only with executor=device"),
    (("cache.profile=f", "cache.per_layer=true", "hardware=rtx3090"), "cache.profile=f and cache.per_layer=true"),
    (
        ("cache.profile=f", "cache.ranked=5", "hardware=rtx3090", "memory_model=xla"),
        "cache.ranked=5 and memory_model=xla",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_settings_that_contradict_each_other(
    compose_config: Callable[[Sequence[str]], RunConfig], overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        compose_config(overrides)
    assert message in str(error.value)


def test_a_short_ranking_limits_the_slots_and_says_so(
    run_here: Callable[..., Finished], small_model: Path, tmp_path: Path
) -> None:
    write_ranking(tmp_path / "short.json", ExpertRanking(2, 4, False, ((1, 3), (0, 0))))
    settings = (f"model.path={small_model}", "workload.prompt=hi", f"cache.profile={tmp_path / 'short.json'}")
    planned = run_here(*settings, "pipeline=plan", directory="plan")
    plan = json.loads((planned.directory / "plan.json").read_text())
    assert plan["expert_cache"]["slots"] == 3  # one of the draft block's after one of each layer
    with pytest.raises(ConfigError, match=r"cache\.slots=4 and cache\.profile=.*it ranks 3 experts"):
        run_here(*settings, "pipeline=plan", "cache.slots=4", directory="more")

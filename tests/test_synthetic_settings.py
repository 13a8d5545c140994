"""Settings of synthetic models: who may be given them, what a run says about its weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines import plan as plan_pipeline
from pipelines.assemble import open_model
from strata_jax import runtime
from strata_jax.config import RunConfig
from strata_jax.config.executors import SYNTHETIC_MODELS
from strata_jax.errors import ConfigError
from strata_jax.hardware import describe_local
from strata_jax.presets import SYNTHETIC_MODELS as PRESETS
from strata_jax.report.record import RunRecord
from strata_jax.sim.setup import geometry_of
from strata_jax.synthetic.full import NOTE, SyntheticModel

Compose = Callable[[Sequence[str]], RunConfig]


def test_both_lists_of_synthetic_models_agree() -> None:
    assert SYNTHETIC_MODELS == PRESETS


def test_counts_and_skew_reach_the_model(compose_config: Compose, capsys: pytest.CaptureFixture[str]) -> None:
    config = compose_config([
        "model=synthetic_small", "quant=iq3_s", "model.layers=12", "model.experts=32", "model.routing.zipf=0.7",
        "model.routing.drift=0.25", "model.seed=3",
    ])  # fmt: skip
    source, geometry = open_model(config)
    assert isinstance(source, SyntheticModel)
    assert (geometry.num_layers, geometry.num_experts, source.seed) == (12, 32, 3)
    assert (source.skew.zipf, source.skew.drift) == (0.7, 0.25)
    assert geometry.tensor_types["blk.0.ffn_up_exps.weight"].type_name in ("IQ2_S", "IQ3_XXS", "IQ3_S")
    out = capsys.readouterr().out
    assert NOTE in out
    assert "Zipf 0.7, drift 0.25" in out


def test_the_simulator_plans_the_same_geometry(compose_config: Compose) -> None:
    settings = ["model=synthetic_small", "quant=q2_0", "model.layers=8", "model.experts=32"]
    simulated = geometry_of(compose_config([*settings, "executor=sim", "hardware=rtx3070ti", "workload=prompt",
                                            "workload.prompt_tokens=100"]))  # fmt: skip
    assert open_model(compose_config(settings))[1] is simulated


def test_the_full_model_is_planned_on_a_card_that_is_stood_in_for(
    compose_config: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(describe_local(look_for_gpu=False), ram_bytes=128 * 2**30)
    monkeypatch.setattr(runtime, "describe_local", lambda **_: machine)
    config = compose_config([
        "model=synthetic_full", "quant=iq3_xxs", "pipeline=plan", "hardware.vram_mib=8151",
        "model.max_context=32768", "executor=device",
    ])  # fmt: skip
    with RunRecord.open(tmp_path / "run", config) as record:
        plan_pipeline.run(config, record)
    made = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert made["fits"]
    assert made["expert_cache"]["slots"] > 100
    assert "weights are synthetic" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.layers=8"], "model.layers=8 and model=builtin_tiny: only synthetic models"),
        (
            ["model=qwen38_flash", "executor=sim", "hardware=rtx3090", "model.experts=64"],
            "model.experts=64 and model=qwen38_flash",
        ),
        (["model.routing.drift=0.5"], "model.routing.drift=0.5 and model=builtin_tiny"),
        (["model=synthetic_small", "model.routing.zipf=5"], "model.routing.zipf=5: must be"),
        (["model=synthetic_small", "pipeline=parity"], "model=synthetic_small and pipeline=parity: there is no file"),
        (["model=qwen38_flash"], "the preset has a geometry and no weights"),
        (["model=synthetic_full", "executor=sim", "hardware=rtx3090", "model.routing.zipf=1"], "model.routing.zipf=1"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(settings: list[str], message: str, compose_config: Compose) -> None:
    with pytest.raises(ConfigError) as error:
        compose_config(settings)
    assert message in str(error.value)

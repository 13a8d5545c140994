"""Settings: names, ranges, contradictions, and the files in conf/."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from strata_jax.config import KvType, RunConfig, all_settings, check, nearest_name
from strata_jax.config.checks import allowed, auto_limit
from strata_jax.config.help import GROUP_ORDER, first_comment, help_text
from strata_jax.config.load import explain, quoted_example
from strata_jax.config.resolve import resolve
from strata_jax.errors import ConfigError

CONF = Path(__file__).resolve().parents[1] / "conf"
Compose = Callable[[Sequence[str]], RunConfig]

KEY_TABLE = """
hardware.vram_mib hardware.vram_reserve_mib hardware.ram_mib hardware.pcie_gb_s hardware.hbm_gb_s hardware.os
model.path model.max_context kv.type kv.grow.enabled kv.grow.init_cells kv.grow.step_cells kv.grow.floor_slots
kv.grow.hysteresis_steps kv.resident_cells cache.slots cache.replacement cache.profile prefill.chunk prefill.own
prefill.borrow prefill.short_read_tokens prefill.stage_mib policy.compat policy.prefill_own.enabled
policy.conversation_budget.enabled policy.head_alias.enabled policy.kv_grow.enabled conversation.budget_mib
conversation.slots conversation.min_free_mib
conversation.prompt_cache.checkpoints conversation.prompt_cache.every conversation.prompt_cache.root spec.window
spec.min_p spec.draft_vocab upstream.batch upstream.pipeline_windows upstream.layer_split upstream.peer_device
upstream.vram_elastic upstream.token_graph upstream.pool upstream.no_native_head upstream.mtp workload.name
workload.prompt workload.prompt_file workload.messages_file workload.token_ids workload.forced_token_ids
workload.records workload.requests workload.seed engine.check
"""


def refusal(build: Compose, *overrides: str) -> str:
    """Return the message that `run.py` would print for these overrides."""
    try:
        build(overrides)
    except ConfigError as error:
        return str(error)
    except (HydraException, OmegaConfBaseException) as error:
        return explain(error)
    pytest.fail(f"{overrides} was accepted")


def test_the_defaults_compose_and_pass_every_check(compose_config: Compose) -> None:
    config = compose_config([])
    assert config == resolve(RunConfig())


def test_every_documented_key_exists() -> None:
    assert [name for name in KEY_TABLE.split() if name not in all_settings()] == []


# what an option needs besides itself, because it would say nothing or contradict a default alone
NEEDS = {
    "workload=prompt": ["workload.prompt=hi"],
    "workload=token_ids": ["workload.token_ids=[1]"],
    "pipeline=logits": ["workload.token_ids=[1]"],
    "pipeline=grid": ["hardware=rtx5090", "grid.axes=['spec.window=1,2']"],
    "pipeline=reproduce": ["reproduce.name=kv_grow"],
    "executor=sim": ["hardware=rtx5090"],
}
ON_A_CARD = ("policy", "memory_model", "quant", "model")  # groups whose options may need a simulated card
LOCAL_OPTIONS = ("memory_model=xla", "quant=file", "model=builtin_tiny", "policy=baseline")


@pytest.mark.parametrize(
    "path",
    sorted(path for path in CONF.glob("*/*.yaml") if path.parent.name != "hydra"),
    ids=lambda path: f"{path.parent.name}={path.stem}",
)
def test_every_option_composes_and_says_what_it_is(path: Path, compose_config: Compose) -> None:
    assert first_comment(path), f"{path} needs a first line that says what the option is"
    group, choice = path.parent.name, f"{path.parent.name}={path.stem}"
    card = ["hardware=rtx5090"] if group in ON_A_CARD and choice not in LOCAL_OPTIONS else []
    config = compose_config([*card, choice, *NEEDS.get(choice, [])])
    node = getattr(config, group, None)
    if node is not None and choice not in ("executor=auto",):
        assert getattr(node.name, "value", node.name) == path.stem


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_C01_misspelt_setting_is_refused_also_with_plus(prefix: str, compose_config: Compose) -> None:
    message = refusal(compose_config, f"{prefix}planner.vram_reserve_mb=590")
    assert "planner.vram_reserve_mb" in message
    assert "hardware.vram_reserve_mib" in message


def test_unknown_key_that_came_in_by_another_way_is_refused() -> None:
    """A plugin or an API call can add keys without an override text: the composed tree is checked too."""
    from hydra import compose, initialize_config_dir

    from strata_jax.config.load import register, to_config

    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        composed = compose("config", overrides=["++spec.widnow=3", "++extra.node=1"])
    with pytest.raises(ConfigError, match=r"spec\.widnow.*spec\.window") as caught:
        to_config(composed)
    assert "extra" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("prefil.chunk", "prefill.chunk"),
        ("model.context", "model.max_context"),
        ("chunk", "prefill.chunk"),
        ("workload.max_tokens", "workload.max_output_tokens"),
        ("zzz.qqq", None),
    ],
)
def test_nearest_name_is_looked_for_in_all_nodes(name: str, nearest: str | None) -> None:
    assert nearest_name(name, all_settings()) == nearest


@pytest.mark.parametrize(
    ("override", "must_say"),
    [
        ("spec.window=9", ["spec.window=9", "1 to 8"]),
        ("spec.window=0", ["spec.window=0", "1 to 8"]),
        ("spec.window=null", ["spec.window=null", "1 to 8"]),
        ("spec.min_p=1.5", ["spec.min_p=1.5", "0.0 to 1.0"]),
        ("spec.min_p=nan", ["spec.min_p=nan", "0.0 to 1.0"]),
        ("prefill.chunk=abc", ["prefill.chunk=abc", "1 to 65,536 tokens", "auto"]),
        ("prefill.chunk=1.5", ["prefill.chunk=1.5", "integer"]),
        ("prefill.chunk=auto:0", ["prefill.chunk=auto:0", "auto:N"]),
        ("kv.type=f8", ["kv.type=f8", "f32, f16, bf16, int8, q4_0, k8v4"]),
        ("cache.slots=auto:5", ["cache.slots=auto:5", "auto"]),
        ("workload.token_ids=[a]", ["workload.token_ids", "list of integers"]),
        ("workload.seed=-1", ["workload.seed=-1", "0 to 4,294,967,295"]),
        ("kv=int8", ["kv=int8", "kv.type"]),
        ("~spec.window", ["spec.window", "cannot be removed"]),
        ("reproduce=typo", ["reproduce=typo", "kv_grow"]),
        ("policy=kv_gorw", ["policy=kv_gorw", "baseline"]),
        ("kv.grow.enabled=maybe", ["kv.grow.enabled=maybe", "true or false or auto"]),
        ("hardware.os=dos", ["hardware.os=dos", "linux"]),
        ("kv={typ: f16}", ["kv.typ", "kv.type"]),
    ],
)
def test_a_wrong_value_is_refused_with_name_value_and_limit(
    override: str, must_say: list[str], compose_config: Compose
) -> None:
    message = refusal(compose_config, override)
    assert [words for words in must_say if words not in message] == []


@pytest.mark.parametrize("value", ["100", "-0.1", "1.0"])
def test_C03_memory_fraction_outside_its_range_is_refused(value: str, compose_config: Compose) -> None:
    message = refusal(compose_config, f"engine.mem_fraction={value}")
    assert f"engine.mem_fraction={value}" in message
    assert "0.01 to 0.98" in message


@pytest.mark.parametrize(
    "override",
    [
        "policy.compat=upstream",
        "upstream.mtp=false",
        "cache.per_layer=true",
        "prefill.lend_pct=80",
        "hardware.pcie_gb_s=25",
        "workload.prompt_tokens=100",
    ],
)
def test_what_only_the_simulator_honours_is_refused_on_the_device_naming_both(
    override: str, compose_config: Compose
) -> None:
    message = refusal(compose_config, override)
    assert override in message
    assert "executor=device" in message
    assert "executor=sim" in message


@pytest.mark.parametrize(
    "override", ["engine.check=true", "workload.ignore_eos=true", "workload.stop=['x']", "engine.platform=cpu"]
)
def test_what_only_the_device_honours_is_refused_in_simulations(override: str, compose_config: Compose) -> None:
    message = refusal(compose_config, "hardware=rtx5090", override)
    assert override.partition("=")[0] in message
    assert "executor=sim" in message
    assert "only with executor=device" in message


def test_a_value_that_no_executor_has_is_refused(compose_config: Compose) -> None:
    assert "it has direct, mmap, ram" in refusal(compose_config, "hardware=rtx5090", "upstream.ple_io=tape")


@pytest.mark.parametrize(
    ("overrides", "both"),
    [
        (["workload.prompt=a", "workload.token_ids=[1]"], ["workload.prompt", "workload.token_ids"]),
        (["workload.prompt_file=a", "workload.messages_file=b"], ["workload.prompt_file", "workload.messages_file"]),
        (["workload.prompt=a", "workload.records=3"], ["workload.prompt", "workload.records=3"]),
        (["workload.prompt=a", "workload=doc_18k"], ["workload.prompt", "workload=doc_18k"]),
        (["workload.top_k=20"], ["workload.top_k=20", "workload.temperature=0"]),
        (["workload.token_ids=[1]", "workload.enable_thinking=true"], ["enable_thinking=true", "workload.token_ids"]),
        (["workload.messages_file=b", "workload.apply_chat_template=false"], ["messages_file", "apply_chat_template"]),
        (["workload.batching=step"], ["workload.batching=step", "pipeline=generate"]),
        (["pipeline=logits"], ["pipeline=logits", "workload.token_ids"]),
        (
            ["cache.replacement=lru", "cache.adapt.swaps=12"],
            ["cache.replacement=lru", "cache.adapt.swaps=12", "cache.replacement=adaptive"],
        ),
        (["cache.replacement=lru", "cache.lfu_decay=0.9"], ["cache.lfu_decay=0.9", "cache.replacement=lru"]),
        (["cache.lfu_decay=0.9"], ["cache.lfu_decay=0.9", "cache.replacement=static"]),
        (
            ["cache.replacement=lfu_decay", "hardware=rtx5090"],
            ["cache.replacement=lfu_decay", "executor=sim", "executor.routing_trace"],
        ),
        (["model.path=x.gguf", "model.seed=1"], ["model.path=x.gguf", "model.seed=1"]),
        (["hardware.vram_mib=600"], ["hardware.vram_mib=600", "hardware.vram_reserve_mib=700"]),
        (["engine.mem_fraction=0.5", "hardware.vram_mib=8151"], ["engine.mem_fraction=0.5", "hardware.vram_mib=8151"]),
        (["engine.mem_fraction=0.5", "engine.platform=cpu"], ["engine.mem_fraction=0.5", "engine.platform=cpu"]),
        (["model.max_context=8", "workload.token_ids=[1,2,3,4,5,6,7,8,9]"], ["workload.token_ids", "max_context=8"]),
        (["workload.forced_token_ids=[1]", "workload.temperature=1"], ["forced_token_ids", "workload.temperature=1"]),
        (
            ["workload.forced_token_ids=[1]", "workload.max_output_tokens=2"],
            ["forced_token_ids", "max_output_tokens=2"],
        ),
    ],
)
def test_a_contradiction_names_both_settings(overrides: list[str], both: list[str], compose_config: Compose) -> None:
    message = refusal(compose_config, *overrides)
    assert [words for words in both if words not in message] == []


def test_all_problems_are_reported_together(compose_config: Compose) -> None:
    message = refusal(compose_config, "spec.window=99", "workload.top_k=3", "engine.mem_fraction=2.0")
    assert message.startswith("3 settings")
    assert [
        name for name in ("spec.window=99", "workload.top_k=3", "engine.mem_fraction=2.0") if name not in message
    ] == []


@pytest.mark.parametrize("value", ["a,b", "a b=c", "/x y/z=1,2.gguf", "it's", '1, "two"', "C:\\new, x", "(a", "${a"])
def test_a_text_that_hydra_cannot_read_says_how_to_quote_it(value: str, compose_config: Compose) -> None:
    message = refusal(compose_config, f"workload.prompt={value}")
    assert "quote" in message
    shown = message[message.index("workload.prompt=", 1) - 1 :]
    assert shlex.split(shown)[0] == shlex.split(quoted_example(f"workload.prompt={value}"))[0]
    if "$" not in value:  # an interpolation stays one inside quotes
        assert compose_config(shlex.split(shown)).workload.prompt == value


def test_values_from_the_command_line_arrive_typed(compose_config: Compose) -> None:
    config = compose_config(["kv.type=f16", "prefill.chunk=64", "cache.slots=auto", "workload.stop=['a','b']"])
    assert config.kv.type is KvType.f16
    assert (config.prefill.chunk, config.cache.slots, config.workload.stop) == (64, "auto", ["a", "b"])


def test_every_setting_has_help_a_default_in_range_and_words_for_its_values() -> None:
    check(RunConfig())
    for name, setting in all_settings().items():
        assert setting.help_text, name
        assert allowed(setting), name
        low, high = setting.field.metadata["low"], setting.field.metadata["high"]
        assert (low is None) == (high is None), f"{name} has half a range"


@pytest.mark.parametrize(
    ("value", "limit"), [("auto:16384", 16384), ("auto", None), ("auto:-1", None), ("auto:x", None)]
)
def test_auto_with_a_limit(value: str, limit: int | None) -> None:
    assert auto_limit(value) == limit


def test_help_names_every_setting_and_option() -> None:
    text = help_text(CONF)
    assert [name for name in all_settings() if f"{name}=" not in text] == []
    options = [path for group in GROUP_ORDER for path in (CONF / group).glob("*.yaml")]
    assert [path for path in options if f"{path.parent.name}={path.stem}" not in text] == []
    assert max(len(line) for line in text.splitlines()) <= 130
    assert " * hardware=local " in text


@pytest.mark.parametrize("policy", ["own_prefill", "conversation_budget", "head_alias", "kv_grow", "all"])
def test_policies_run_on_the_device(policy: str, compose_config: Compose) -> None:
    config = compose_config([f"policy={policy}"])
    assert config.executor.name.name == "device"
    assert config.prefill.borrow is (policy != "conversation_budget")
    assert config.kv.grow.enabled is (policy in ("kv_grow", "all"))
    parks = policy in ("conversation_budget", "all")
    assert (config.conversation.budget_mib, config.conversation.prompt_cache.checkpoints) == (
        (2048, 6) if parks else (0, 0)
    )


def test_a_search_for_policies_needs_the_simulator(compose_config: Compose) -> None:
    message = refusal(compose_config, "policy=auto")
    assert "policy=auto" in message
    assert "executor=sim" in message


def test_policies_move_memory_while_text_is_generated(compose_config: Compose) -> None:
    message = refusal(compose_config, "policy=kv_grow", "pipeline=logits", "workload.token_ids=[1]")
    assert "policy.kv_grow.enabled=true and pipeline=logits" in message


def documented_commands() -> list[str]:
    """Return the `python run.py` lines of the README and of the help text."""
    texts = [(CONF.parent / "README.md").read_text(encoding="utf-8"), help_text(CONF)]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return [line for line in lines if line.startswith("python run.py") and "[" not in line.split("#")[0][:22]]


@pytest.mark.parametrize("line", documented_commands())
def test_every_documented_command_composes(line: str, compose_config: Compose) -> None:
    words = re.split(r"\s{3,}", line)[0]  # what follows three spaces explains the command
    arguments = shlex.split(words, comments=True)[2:]
    if "--help" in arguments:
        return
    arguments = [text for text in arguments if not text.startswith("hydra/launcher=")]  # plugins are optional
    sweep = arguments[:1] == ["-m"]
    overrides = [text.split(",")[0] for text in arguments[1:]] if sweep else arguments
    compose_config(overrides)

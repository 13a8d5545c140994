"""From the command line and YAML to a checked `RunConfig`, and from Hydra's exceptions to messages for users."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from strata_jax.config.checks import allowed, join_problems
from strata_jax.config.contradictions import INPUT_SOURCES, check
from strata_jax.config.keys import all_nodes, all_settings, unknown_key_message, unknown_keys
from strata_jax.config.resolve import resolve
from strata_jax.config.schema import RunConfig
from strata_jax.errors import ConfigError

CLIENT_SETTINGS = ("engine.platform", "engine.mem_fraction", "engine.preallocate")  # fixed when JAX starts
PLUGIN_EXTRAS = {"hydra/launcher": {"joblib": "sweep", "ray": "ray"}}  # options that an extra of this package brings
SCHEMA_NAME = "schema"  # the first entry of the defaults list in conf/config.yaml


def register() -> None:
    """Make the schema and the `pid` resolver known to Hydra. May be called again."""
    ConfigStore.instance().store(name=SCHEMA_NAME, node=RunConfig)
    # Cached, so that the jobs of one sweep agree on their directory whichever process they run in.
    OmegaConf.register_new_resolver("pid", lambda: os.getpid(), use_cache=True, replace=True)


def to_config(composed: DictConfig) -> RunConfig:
    """Return the typed configuration of a composed tree; ConfigError for unknown or impossible settings."""
    tree = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=False))
    unknown = unknown_keys(tree)
    if unknown:
        raise ConfigError(join_problems([unknown_key_message(name) for name in unknown]))
    removed = [name for name in all_settings() if not _has(tree, name)]
    if removed:
        raise ConfigError(
            f"{', '.join(removed[:4])}: a setting cannot be removed. Set it to another value, or to null."
        )
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    if not isinstance(config, RunConfig):
        raise TypeError(f"the primary config must extend the schema, got {type(config).__name__}")
    check(config)
    return resolve(config)


def check_overrides(overrides: Sequence[str], groups: Iterable[str], *, multirun: bool) -> None:
    """Raise one ConfigError for all override texts that cannot be read or that name no setting.

    Runs before Hydra composes anything, and looks through the `+` and `++` prefixes that Hydra lets pass.
    """
    known_groups = set(groups)
    parser = OverridesParser.create()
    problems: list[str] = []
    parsed: list[Override] = []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except (HydraException, OmegaConfBaseException):
            problems.append(_unreadable(text))
    for override in parsed:
        name = override.key_or_group
        is_group = name in known_groups or name.startswith("hydra/")
        if not is_group and name.split(".")[0] != "hydra" and name not in all_settings() and name not in all_nodes():
            problems.append(unknown_key_message(name, known_groups))
        elif override.is_delete() and not is_group:
            problems.append(f"{override.input_line}: a setting cannot be removed. Set it to another value, or to null.")
        elif name in all_nodes() and not is_group and not isinstance(override.value(), dict):
            inside = [setting for setting in all_settings() if setting.startswith(name + ".")]
            problems.append(
                f"{override.input_line}: {name} is a set of settings. Name one of them: {', '.join(inside)}."
            )
        elif override.is_sweep_override() and not multirun:
            problems.append(
                f"{override.input_line}: the comma makes this a list of values to try one after the other. To try them,"
                f" add -m. To keep the comma in the text, quote twice: {quoted_example(override.input_line or '')}"
            )
    given = [f"workload.{key}" for key in INPUT_SOURCES if any(o.key_or_group == f"workload.{key}" for o in parsed)]
    named = [o for o in parsed if o.key_or_group == "workload" and o.value() not in ("prompt", "token_ids", None)]
    if given and named:
        problems.append(f"{given[0]} and {named[0].input_line}: both say what is asked of the model. Keep one of them.")
    path = next((o for o in parsed if o.key_or_group == "model.path" and o.value() is not None), None)
    quant = next((o for o in parsed if o.key_or_group.split(".")[0] == "quant"), None)
    if path is not None and quant is not None and quant.value() != "file":
        problems.append(f"model.path and {quant.input_line}: a file has the types that it has. Leave one of them out.")
    if multirun:
        problems += _sweep_problems(parsed)
    if problems:
        raise ConfigError(join_problems(problems))


def quoted_example(text: str) -> str:
    """Return an override text with its value quoted for Hydra and the whole quoted for the shell."""
    key, _, value = text.partition("=")
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        value = value[1:-1]
    return shlex.quote(f"{key}={QuotedString(value, Quote.double).with_quotes()}")


def find_groups(directories: Iterable[Path]) -> set[str]:
    """Return the names of the config groups (folders) below the given directories."""
    return {
        str(path.relative_to(root))
        for root in directories
        for path in (root.rglob("*") if root.is_dir() else ())
        if path.is_dir()
    }


def explain(error: BaseException) -> str:
    """Return the message for an exception that Hydra or OmegaConf raised while composing."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    if isinstance(error, OverrideParseException):
        return _unreadable(str(error.override))
    if isinstance(error, MissingConfigException):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        if group in PLUGIN_EXTRAS and option in PLUGIN_EXTRAS[group]:
            return f'{group}={option}: it is not installed: pip install -e ".[{PLUGIN_EXTRAS[group][option]}]"'
        if group and error.options:
            return f"{group}={option}: there is no such option; this version has {', '.join(error.options)}."
        return " ".join(str(error).split("Config search path")[0].split())
    for item in chain:
        name = str(getattr(item, "full_key", None) or "").split("[")[0]
        if name in all_settings():
            setting = all_settings()[name]
            return f"{name}={_value_in(item)}: must be {allowed(setting)}. ({setting.help_text})"
        if name and name not in all_nodes() and name.split(".")[0] != "hydra":
            return unknown_key_message(name)
    return "\n".join(dict.fromkeys(str(item).strip() for item in chain if str(item).strip()))


def _has(tree: Any, name: str) -> bool:
    """Say whether a nested mapping has an entry of this dotted name."""
    for part in name.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True


def _sweep_problems(parsed: Sequence[Override]) -> list[str]:
    """Say what cannot be swept: settings that JAX reads once, in one process; a sweep to resume that is not named."""
    given = {override.key_or_group: override for override in parsed}
    problems = []
    launcher = given.get("hydra/launcher")
    if launcher is None or launcher.value() == "basic":
        for name in CLIENT_SETTINGS:
            if name in given and given[name].is_sweep_override():
                problems.append(
                    f"-m and {given[name].input_line}: JAX reads {name} once in a process, and the jobs of this sweep"
                    " share one. Add hydra/launcher=joblib, or start one run for each value."
                )
    resume = given.get("sweep.resume")
    if resume is not None and resume.value() is True and "hydra.sweep.dir" not in given:
        problems.append("sweep.resume=true and no hydra.sweep.dir=DIR: say which sweep goes on.")
    return problems


def _unreadable(text: str) -> str:
    if "=" not in text.lstrip("+~"):
        return f"{text}: not of the form key=value. `python run.py --help` shows examples."
    return (
        f"{text}: cannot be read. A value with a comma, an equals sign, a space, a bracket or a quote needs"
        " quotes for Hydra"
        f" inside quotes for the shell: {quoted_example(text)}"
    )


def _value_in(error: BaseException) -> str:
    """Return the offending value, which OmegaConf only gives inside its text: Value 'x' of type ..."""
    if "not Optional" in str(error):
        return "null"
    parts = str(error).split("'")
    return parts[1] if len(parts) > 2 and "alue" in parts[0] else "?"

"""The points of a grid: every combination of the axes' values as a configuration of its own, without Hydra's cost.

Axes are written as `-m` takes them. Hydra composes once for each combination of group options (`policy=a,b`); values
of single settings are then put in, checked and resolved, a few milliseconds a point.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from strata_jax.config.checks import join_problems
from strata_jax.config.choices import PipelineName
from strata_jax.config.contradictions import check
from strata_jax.config.keys import all_settings, unknown_key_message
from strata_jax.config.load import explain, find_groups
from strata_jax.config.resolve import resolve
from strata_jax.config.schema import GridConfig, RunConfig
from strata_jax.errors import ConfigError

OWN_NODES = ("grid", "sweep", "report", "reproduce", "pipeline", "experiment")  # they make no point of their own


@dataclass(frozen=True, slots=True)
class Point:
    """One combination. `config` is None where `error` says why the settings cannot be used."""

    overrides: tuple[str, ...]
    config: RunConfig | None
    error: ConfigError | None


@dataclass(frozen=True, slots=True)
class Axis:
    """A setting or group and its values, as typed and as Python values."""

    key: str
    is_group: bool
    texts: tuple[str, ...]
    values: tuple[Any, ...]


def parse_axes(axes: Sequence[str], groups: set[str]) -> list[Axis]:
    """Return the axes of a grid. Raises one ConfigError for all that cannot be read or name nothing."""
    parser = OverridesParser.create()
    problems: list[str] = []
    found: list[Axis] = []
    for text in axes:
        try:
            override = parser.parse_override(text)
        except (HydraException, OmegaConfBaseException):
            problems.append(f"grid.axes: {text!r} cannot be read; an axis looks like 'prefill.chunk=256,512'.")
            continue
        key = override.key_or_group
        if key.split(".")[0] in OWN_NODES:
            problems.append(f"grid.axes: {key} is no axis; it says how the grid is run.")
        elif key not in groups and key not in all_settings():
            problems.append("grid.axes: " + unknown_key_message(key, groups))
        else:
            texts, values = _values(override)
            found.append(Axis(key, key in groups, texts, values))
    if problems:
        raise ConfigError(join_problems(problems))
    return found


def grid_points(grid: GridConfig, base_overrides: Sequence[str], conf: Path) -> Iterator[Point]:
    """Yield the points of a grid, group options outermost, leaving out what `grid.skip` names.

    Args:
        base_overrides: of the command line; they hold for every point unless an axis has the same key.
        conf: the folder with the configuration.
    """
    axes = parse_axes(grid.axes, find_groups([conf]))
    chosen = [axis for axis in axes if axis.is_group]
    plain = [axis for axis in axes if not axis.is_group]
    kept = [text for text in base_overrides if text.lstrip("+~").partition("=")[0] not in {axis.key for axis in axes}]
    skipped = [frozenset(text.split()) for text in grid.skip]
    for options in itertools.product(*(axis.texts for axis in chosen)):
        base = _compose([*kept, *options], conf)
        for places in itertools.product(*(range(len(axis.texts)) for axis in plain)):
            overrides = (*options, *(axis.texts[place] for axis, place in zip(plain, places)))
            if any(skip <= set(overrides) for skip in skipped):
                continue
            values = {axis.key: axis.values[place] for axis, place in zip(plain, places)}
            yield _point(base, overrides, values)


def _point(base: RunConfig, overrides: tuple[str, ...], values: dict[str, Any]) -> Point:
    config = copy.deepcopy(base)
    config.pipeline.name = PipelineName.generate
    config.grid = GridConfig()
    try:
        for key, value in values.items():
            _put(config, key, value)
        check(config)
    except ConfigError as error:
        return Point(overrides, None, error)
    return Point(overrides, resolve(config), None)


def _put(config: RunConfig, key: str, value: Any) -> None:
    """Set one setting, with the type that the schema has."""
    *nodes, last = key.split(".")
    owner: Any = config
    for name in nodes:
        owner = getattr(owner, name)
    hint = all_settings()[key].hint
    if isinstance(hint, type) and issubclass(hint, Enum):
        if str(value) not in hint.__members__:
            raise ConfigError(f"{key}={value}: must be one of {', '.join(hint.__members__)}.")
        value = hint[str(value)]
    elif hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    elif isinstance(hint, type) and not isinstance(value, hint):
        raise ConfigError(f"{key}={value}: must be of type {hint.__name__}.")
    setattr(owner, last, value)


def _compose(overrides: Sequence[str], conf: Path) -> RunConfig:
    """Compose as the command line would: with the Hydra that runs already, or one of its own."""
    running = GlobalHydra.instance().is_initialized()
    context = nullcontext() if running else initialize_config_dir(version_base="1.3", config_dir=str(conf))
    try:
        with context:
            return cast(RunConfig, OmegaConf.to_object(compose("config", overrides=list(overrides))))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error


def _values(override: Override) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    key = override.get_key_element()
    if not override.is_sweep_override():
        return (f"{key}={override.get_value_element_as_str()}",), (override.value(),)
    words = tuple(override.sweep_string_iterator())
    parser = OverridesParser.create()
    return tuple(f"{key}={word}" for word in words), tuple(parser.parse_override(f"{key}={w}").value() for w in words)

"""What policy=auto may vary: the switches and parameters that were left at `auto`. What is given stays as it is.

The reserve is never varied: it is the user's word on how much of the device others need.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata_jax.config.checks import show, value_of
from strata_jax.config.choices import Compat, OwnBuffers
from strata_jax.config.fields import AUTO
from strata_jax.config.resolve import resolve
from strata_jax.config.schema import RunConfig
from strata_jax.sim.requests import SimRequest

Settings = Mapping[str, Any]  # dotted setting -> value

INSIDE = "policy.head_alias.inside_head"
BORROW = "prefill.borrow"
HEAD_ALIAS = "policy.head_alias.enabled"

# Words for a table; a switch that is off, or a parameter at its default, has none.
SWITCHES: Mapping[str, str] = {
    "policy.prefill_own.enabled": "own_prefill",
    "policy.conversation_budget.enabled": "conversation_budget",
    HEAD_ALIAS: "head_alias",
    "policy.kv_grow.enabled": "kv_grow",
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A setting that is varied once the policies are chosen, where `needs` is switched on ("": always)."""

    setting: str
    needs: str
    values: tuple[Any, ...]
    unset: Any = AUTO


PARAMETERS: tuple[Parameter, ...] = (
    Parameter("prefill.chunk", "", ("auto:1024", "auto:2048", "auto:4096", "auto:16384", "auto:32768")),
    Parameter("kv.grow.init_cells", "policy.kv_grow.enabled", (4_096, 8_192, 32_768, 65_536)),
    Parameter("kv.grow.step_cells", "policy.kv_grow.enabled", (2_048, 4_096, 16_384, 32_768)),
    Parameter("policy.head_alias.min_fresh_tokens", HEAD_ALIAS, (0, 512, 1_024, 2_048)),
    Parameter("prefill.own", "policy.prefill_own.enabled", (OwnBuffers.on,), OwnBuffers.auto),
)


def free_switches(config: RunConfig) -> list[str]:
    """Return the settings of policies that are left to the search, borrowing among them."""
    return [name for name in (*SWITCHES, BORROW) if value_of(config, name) == AUTO]


def switch_settings(config: RunConfig) -> Iterator[Settings]:
    """Yield every combination of the free switches, the plain one first; the head's bytes serve in two ways."""
    free = free_switches(config)
    orders = [(True, False) if name == BORROW else (False, True) for name in free]
    for values in itertools.product(*orders):
        settings = dict(zip(free, values, strict=True))
        yield from _both_ways(config, settings)


def flipped(config: RunConfig, settings: Settings) -> Iterator[Settings]:
    """Yield the settings with one free switch turned the other way; the head's bytes then serve in both ways."""
    for name in free_switches(config):
        turned = {**settings, name: not settings[name]}
        if name == HEAD_ALIAS:
            turned.pop(INSIDE, None)
            yield from _both_ways(config, turned)
        else:
            yield turned


def _both_ways(config: RunConfig, settings: Settings) -> Iterator[Settings]:
    """Yield the settings, and with the head lent also the variant where prompt buffers lie inside its bytes."""
    yield settings
    free = value_of(config, INSIDE) == AUTO and config.policy.compat is Compat.native
    if free and settings.get(HEAD_ALIAS, config.policy.head_alias.enabled) is True:
        yield {**settings, INSIDE: True}


def parameters(config: RunConfig, settings: Settings) -> Iterator[Parameter]:
    """Yield the parameters that count with these switches and were not given."""
    upstream = config.policy.compat is Compat.upstream
    for parameter in PARAMETERS:
        if value_of(config, parameter.setting) != parameter.unset:
            continue
        if upstream and parameter.setting.endswith("min_fresh_tokens"):
            continue  # the original has no threshold
        if not parameter.needs or settings.get(parameter.needs, value_of(config, parameter.needs)) is True:
            yield parameter


def with_settings(config: RunConfig, settings: Settings) -> RunConfig:
    """Return a resolved copy of the configuration with the settings put in."""
    changed = copy.deepcopy(config)
    for name, value in settings.items():
        *nodes, last = name.split(".")
        owner: Any = changed
        for node in nodes:
            owner = getattr(owner, node)
        setattr(owner, last, value)
    return resolve(changed)


def sample(requests: Sequence[SimRequest], least: int) -> tuple[SimRequest, ...]:
    """Return all requests, or whole conversations evenly spread over them with at least so many requests.

    The conversation with the longest request is always among them, so that a plan that cannot hold it is found out.
    """
    if len(requests) <= least:
        return tuple(requests)
    names = list(dict.fromkeys(request.conversation for request in requests))
    longest = max(requests, key=lambda r: r.prompt_tokens + r.output_tokens).conversation
    sizes = dict.fromkeys(names, 0)
    for request in requests:
        sizes[request.conversation] += 1
    chosen, count = {longest}, sizes[longest]
    for index in _spread(len(names)):
        if count >= least:
            break
        if names[index] not in chosen:
            chosen.add(names[index])
            count += sizes[names[index]]
    return tuple(request for request in requests if request.conversation in chosen)


def label(settings: Settings) -> str:
    """Return settings as a reader names them: the policies, then what else differs."""
    policies = [word for name, word in SWITCHES.items() if settings.get(name) is True]
    if settings.get(INSIDE):
        policies = [f"{word} (inside the head)" if word == "head_alias" else word for word in policies]
    parts = [" + ".join(policies) or "baseline"]
    if settings.get(BORROW) is False:
        parts.append("no borrowing")
    parts += [f"{name.rpartition('.')[2]}={show(settings[name])}" for name in settings if _is_parameter(name)]
    return ", ".join(parts)


def typed(settings: Settings) -> list[str]:
    """Return the settings as they are typed to repeat a choice without the search."""
    return [f"{name}={show(value)}" for name, value in settings.items()]


def complexity(settings: Settings) -> int:
    """Return how many policies and parameters differ from the plain setting: of equals the simplest is chosen."""
    return sum(value is True for name, value in settings.items() if name != BORROW) + sum(
        value is not True for name, value in settings.items() if name == BORROW or _is_parameter(name)
    )


def _is_parameter(name: str) -> bool:
    return any(parameter.setting == name for parameter in PARAMETERS)


def _spread(count: int) -> Iterator[int]:
    """Yield 0 ... count - 1 so that every prefix is spread evenly: halves, quarters, eighths."""
    seen: set[int] = set()
    parts = 1
    while len(seen) < count:
        for part in range(parts):
            index = min(count - 1, (2 * part + 1) * count // (2 * parts))
            if index not in seen:
                seen.add(index)
                yield index
        parts *= 2
        if parts > 2 * count:
            yield from (index for index in range(count) if index not in seen)
            return

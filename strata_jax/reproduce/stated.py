"""What a row states, with what its source leaves out filled in from data/published/rules/inferred.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml

from strata_jax.reproduce.rows import FOLDER, Row

PARTS = ("hardware", "software", "model", "settings", "workload")

# Software builds whose name says that own prompt buffers are tried by default (the fork of the proposal).
OWN_BUFFER_BUILD = "own-buffer planner"


@dataclass(frozen=True, slots=True)
class Stated:
    """A row's five parts after filling in, and why each filling was needed."""

    hardware: Mapping[str, Any]
    software: Mapping[str, Any]
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    workload: Mapping[str, Any]
    env: Mapping[str, Any]
    assumptions: tuple[str, ...]


def stated(row: Row) -> Stated:
    """Return what a row states; a value of the source is never replaced."""
    parts = {part: dict(getattr(row, part)) for part in PARTS}
    parts["settings"]["env"] = dict(parts["settings"].get("env") or {})
    assumptions = []
    for rule in inferred():
        if _concerns(rule["when"], row) and _fill(parts, rule["set"]):
            assumptions.append(rule["why"])
    env = parts["settings"].pop("env")
    return Stated(**parts, env=env, assumptions=tuple(assumptions))


@lru_cache(maxsize=1)
def inferred() -> tuple[Mapping[str, Any], ...]:
    """Return the rules that fill in what sources leave out."""
    return tuple(yaml.safe_load((FOLDER / "rules" / "inferred.yaml").read_text(encoding="utf-8")))


def _concerns(when: Mapping[str, Any], row: Row) -> bool:
    for key, wanted in when.items():
        have = getattr(row, key)
        if isinstance(wanted, Mapping):
            if any(name not in have or have[name] != value for name, value in wanted.items()):
                return False
        elif have != wanted:
            return False
    return True


def _fill(target: dict[str, Any], values: Mapping[str, Any]) -> bool:
    """Put values where there are none; say whether anything was missing."""
    filled = False
    for key, value in values.items():
        if isinstance(value, Mapping):
            filled = _fill(target[key], value) or filled
        elif target.get(key) is None:
            target[key] = value
            filled = True
    return filled

"""The dotted names of all settings, the nearest name to a misspelt one, and the keys that no schema knows.

Hydra checks plain overrides against the schema but lets `+typo=1` and `++typo=1` through, so names are checked here.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any

from strata_jax.config.schema import RunConfig

SUGGESTION_MIN_RATIO = 0.6
LEAF_DISCOUNT = 0.95  # the same last word under another node counts a little less than the whole name


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the schema: its dotted name, its dataclass field and its resolved type."""

    name: str
    field: Field[Any]
    hint: Any

    @property
    def help_text(self) -> str:
        return str(self.field.metadata["help"])

    @property
    def default(self) -> Any:
        return default_of(self.field)


def default_of(item: Field[Any]) -> Any:
    """Return a field's default, from its factory if it has one."""
    return item.default_factory() if callable(item.default_factory) else item.default


@cache
def all_settings(schema: type = RunConfig, prefix: str = "") -> Mapping[str, Setting]:
    """Return every leaf setting by its dotted name, in the order of the schema."""
    found: dict[str, Setting] = {}
    hints = typing.get_type_hints(schema)
    for item in fields(schema):
        hint = hints[item.name]
        name = prefix + item.name
        if is_dataclass(hint) and isinstance(hint, type):
            found.update(all_settings(hint, name + "."))
        else:
            found[name] = Setting(name, item, hint)
    return found


@cache
def all_nodes() -> frozenset[str]:
    """Return the dotted names of the groups of settings, e.g. `kv` and `kv.grow`."""
    return frozenset(name.rsplit(".", depth)[0] for name in all_settings() for depth in range(1, name.count(".") + 1))


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known dotted name that is most like `name`, or None if none is alike."""
    leaf = name.rsplit(".", 1)[-1]

    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, name, candidate).ratio()
        last = difflib.SequenceMatcher(None, leaf, candidate.rsplit(".", 1)[-1]).ratio()
        return max((whole + last) / 2, last * LEAF_DISCOUNT)

    best = max(known, key=likeness, default=None)
    return best if best is not None and likeness(best) >= SUGGESTION_MIN_RATIO else None


def unknown_key_message(name: str, groups: Iterable[str] = ()) -> str:
    """Say that no setting is called `name` and which one is nearest."""
    nearest = nearest_name(name, [*all_settings(), *groups])
    hint = f"The nearest is {nearest}." if nearest else "`python run.py --help` lists them all."
    return f"{name}: there is no such setting. {hint}"


def unknown_keys(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names in a composed configuration that the schema does not have."""
    found: list[str] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name in all_nodes():
            found += unknown_keys(value, name + ".") if isinstance(value, Mapping) else [name]
        elif name not in all_settings():
            found.append(name)
    return found

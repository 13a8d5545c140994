"""Ranges and availability of single settings; every problem is collected so that a user sees them all at once.

Nothing here looks at a device, a file or the environment.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from strata_jax.config.keys import Setting, all_settings
from strata_jax.config.schema import AUTO, AUTO_AT_MOST, RunConfig


def join_problems(problems: list[str]) -> str:
    """Return one message for one problem, a counted list for several."""
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} settings cannot be used:\n" + "\n".join(f"  - {problem}" for problem in problems)


def value_problems(config: RunConfig) -> list[str]:
    """Return a message for every single value that is out of range or that this version does not have."""
    problems = (value_problem(setting, value_of(config, setting.name)) for setting in all_settings().values())
    return [problem for problem in problems if problem]


def value_of(config: RunConfig, name: str) -> Any:
    """Return the value of a dotted setting name."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def value_problem(setting: Setting, value: Any) -> str | None:
    """Return what is wrong with one value, or None."""
    if value == setting.default:
        return None
    available = setting.field.metadata["available"]
    if available is not True and show(value) not in available:
        return f"{setting.name}={show(value)}: this version does not have that; it has {', '.join(available)}."
    if isinstance(value, str) and _is_number_or_word(setting):
        fits = value == AUTO or (AUTO_AT_MOST in setting.field.metadata["words"] and auto_limit(value) is not None)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        low, high = setting.field.metadata["low"], setting.field.metadata["high"]
        fits = (low is None or value >= low) and (high is None or value <= high)  # false for NaN
    else:
        fits = True
    return None if fits else f"{setting.name}={show(value)}: must be {allowed(setting)}. ({setting.help_text})"


def auto_limit(value: str) -> int | None:
    """Return N of a value `auto:N`, or None if it is not of this form."""
    word, _, number = value.partition(":")
    return int(number) if word == AUTO and number.isascii() and number.isdigit() and int(number[:10]) > 0 else None


def allowed(setting: Setting) -> str:
    """Return the accepted values of a setting in words: its range with the unit, its words, or its choices."""
    meta = setting.field.metadata
    if isinstance(setting.hint, type) and issubclass(setting.hint, Enum):
        return "one of " + ", ".join(item.name for item in setting.hint)
    parts: list[str] = []
    kind = "an integer" if "float" not in str(setting.hint) else "a number"
    if meta["low"] is not None:
        parts.append(f"{kind} from {meta['low']:,} to {meta['high']:,}{' ' + meta['unit'] if meta['unit'] else ''}")
    elif setting.hint is bool or "bool" in str(setting.hint):
        parts.append("true or false")
    elif setting.hint in (int, float):
        parts.append(kind)
    elif "list[int]" in str(setting.hint):
        parts.append("a list of integers such as [1,2,3]")
    elif "list[str]" in str(setting.hint):
        parts.append("a list of texts such as ['a','b']")
    elif meta["available"] is not True:
        parts.append("one of " + ", ".join(meta["available"]))
    else:
        parts.append("a text")
    if _is_number_or_word(setting):
        parts.extend(meta["words"])
    if "None" in str(setting.hint):
        parts.append("null")
    return " or ".join(parts)


def show(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    if isinstance(value, Enum):
        return value.name
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        head = ",".join(show(item) for item in value[:4])
        return f"[{head}{',...' if len(value) > 4 else ''}]"
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_number_or_word(setting: Setting) -> bool:
    text = str(setting.hint)
    return "str" in text and any(kind in text for kind in ("int", "float", "bool")) and "list" not in text

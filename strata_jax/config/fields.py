"""How a setting is declared: a dataclass field with help text, unit, range, accepted words and who honours it."""

from __future__ import annotations

from dataclasses import field
from typing import Any

AUTO = "auto"
AUTO_AT_MOST = "auto:N"  # how the form `auto, but N at most` is shown; N is a number

# Who honours a setting; the other executor refuses every value but the default.
BOTH = ("device", "sim")
ON_DEVICE = ("device",)
IN_SIM = ("sim",)


def setting(
    default: Any,
    help_text: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    words: tuple[str, ...] = (),
    available: bool | tuple[str, ...] = True,
    executors: tuple[str, ...] = BOTH,
) -> Any:
    """Return a dataclass field.

    Args:
        low, high: inclusive range. words: texts that a number may be replaced by.
        available: the values that this version has; True: all.
        executors: who honours values other than the default.
    """
    metadata = {
        "help": help_text,
        "unit": unit,
        "low": low,
        "high": high,
        "words": words or ((AUTO,) if default == AUTO else ()),
        "available": available,
        "executors": executors,
    }
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def node(schema: type, help_text: str) -> Any:
    """Return a dataclass field that holds a nested group of settings."""
    return field(default_factory=schema, metadata={"help": help_text})

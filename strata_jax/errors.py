"""The three families of expected errors; everything else is a bug and keeps its traceback."""

from __future__ import annotations


class StrataError(Exception):
    """An outcome the user can act on. The message says what failed, the value, the limit and what would work."""


class ConfigError(StrataError):
    """A setting is unknown, out of range or contradicts another one."""


class DoesNotFit(StrataError):
    """A plan needs more memory than there is. Carries the shortfall in bytes."""

    def __init__(self, message: str, *, shortfall_bytes: int = 0) -> None:
        super().__init__(message)
        self.shortfall_bytes = shortfall_bytes


class FormatError(StrataError):
    """A file is broken, hostile or of a kind that this program does not read."""

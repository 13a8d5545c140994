"""Values as JSON has them: dataclasses, enums, paths and numpy scalars become plain; NaN and infinity become null."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any


def plain(value: Any) -> Any:
    """Return `value` made of dict, list, str, int, float, bool and None only. Unknown kinds are a TypeError."""
    if value is None or isinstance(value, bool | str | int):
        return value.name if isinstance(value, Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, PurePath):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    to_list = getattr(value, "tolist", None)  # numpy scalars and arrays
    if to_list is not None:
        return plain(to_list())
    raise TypeError(f"cannot write a {type(value).__name__} as JSON")

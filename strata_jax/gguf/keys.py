"""Typed access to metadata keys: each getter checks presence, type and range and names the key when one is wrong."""

from __future__ import annotations

import math
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from strata_jax.errors import FormatError
from strata_jax.gguf.metadata import Metadata

MAX_INT = 2**31 - 1


class Keys:
    """The metadata of one file, read by key with the checks of a format that others write."""

    def __init__(self, metadata: Metadata, source: str) -> None:
        self.metadata = metadata
        self.source = source

    def has(self, key: str) -> bool:
        return key in self.metadata

    def fail(self, key: str, expected: str) -> NoReturn:
        if key not in self.metadata:
            raise FormatError(f"{self.source}: key {key!r} is missing; expected {expected}")
        found = self._number(key) if self._array(key) is None else self._array(key)
        shown = found[:20].tolist() if isinstance(found, np.ndarray) else found
        more = " and more" if isinstance(found, np.ndarray) and len(found) > 20 else ""
        value = "" if found is None else f"{shown}{more}, "
        raise FormatError(
            f"{self.source}: key {key!r} is {value}{self.metadata.type_of(key)} "
            f"at byte {self.metadata.offset_of(key)}; expected {expected}"
        )

    def text(self, key: str) -> str:
        if key not in self.metadata or self.metadata.type_of(key) != "string":
            self.fail(key, "a string")
        return str(self.metadata[key])

    def integer(self, key: str, low: int = 1, high: int = MAX_INT) -> int:
        """Return a scalar integer of any width within `low` to `high`, both included."""
        value = self._number(key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.fail(key, f"an integer from {low} to {high}")
        return value

    def positive_float(self, key: str) -> float:
        value = self._number(key)
        if value is None or isinstance(value, bool) or not 0 < value < math.inf:
            self.fail(key, "a finite number above 0")
        return float(value)

    def integers(self, key: str, count: int, low: int, high: int) -> tuple[int, ...]:
        """Return an array of `count` integers (or booleans) of any width within `low` to `high`."""
        value = self._array(key)
        expected = f"an array of {count} integers from {low} to {high}"
        if value is None or value.dtype.kind not in "iub" or len(value) != count:
            self.fail(key, expected)
        found = tuple(int(v) for v in value)
        if not all(low <= v <= high for v in found):
            self.fail(key, expected)
        return found

    def is_array(self, key: str) -> bool:
        return key in self.metadata and self.metadata.count_of(key) is not None

    def _number(self, key: str) -> int | float | None:
        """Return a scalar that is not a string; a hostile string can be as long as the file and is not decoded here."""
        if key not in self.metadata or self.is_array(key) or self.metadata.type_of(key) == "string":
            return None
        value = self.metadata[key]
        return value if isinstance(value, int | float) else None

    def _array(self, key: str) -> NDArray[np.generic] | None:
        if not self.is_array(key) or self.metadata.type_of(key).startswith("string"):
            return None
        value = self.metadata[key]
        return value if isinstance(value, np.ndarray) else None

"""Programs that engines of one test file share: what is made from the same is traced and compiled once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strata_jax.engine.program_store import ProgramStore, StoredProgram

_MISSING = object()


class SharedPrograms(ProgramStore):
    """A `ProgramStore` in the memory of this process.

    The names of a store are made from a package whose source stays as it is. So while a test has put something else in
    the place of a module's value, whatever it is, programs have no name and engines make their own.
    """

    def __init__(self) -> None:
        super().__init__(Path())
        self.made: dict[str, Any] = {}
        self.as_imported: dict[str, dict[str, Any]] = {}

    def name(self, f: Callable, args: tuple, donate: tuple[int, ...], out_shardings: Any) -> str:
        return "" if self._patched() else super().name(f, args, donate, out_shardings)

    def find(self, name: str, args: tuple) -> StoredProgram | None:
        program = self.made.get(name)
        return None if program is None else StoredProgram(program.out_info, lambda: program)

    def compile(self, name: str, lowered: Any, args: tuple) -> Any:
        program = lowered.compile()
        if name:
            self.made[name] = program
        return program

    def _patched(self) -> bool:
        """Whether a module of the package has another value than when it was first seen."""
        found = False
        for name, module in list(sys.modules.items()):
            if name.startswith("strata_jax") and module is not None:
                known, now = self.as_imported.setdefault(name, {}), vars(module)
                found |= any(now.get(key, _MISSING) is not value for key, value in known.items())
                known |= {key: value for key, value in now.items() if key not in known}
        return found


PROGRAMS = SharedPrograms()

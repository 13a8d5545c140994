"""Which published cells numbers were fitted on: those that profiles list, and those of the curves of all cards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import yaml

from strata_jax.reproduce.rows import FOLDER
from strata_jax.sim.profile import Profile, common_numbers, load_profile, profile_names


@dataclass(frozen=True, slots=True)
class Basis:
    """Names of fitted numbers -> patterns of cells: `row`, or `row:metric`."""

    patterns: Mapping[str, Sequence[str]]

    def holds(self, row_id: str, metric: str) -> bool:
        """Whether anything was fitted on a cell."""
        names = (row_id, f"{row_id}:{metric}")
        return any(fnmatchcase(name, p) for found in self.patterns.values() for p in found for name in names)

    def numbers_of(self, row_id: str, metric: str) -> list[str]:
        """Return the names of the numbers that were fitted on a cell."""
        names = (row_id, f"{row_id}:{metric}")
        return [key for key, found in self.patterns.items() if any(fnmatchcase(n, p) for p in found for n in names)]


def fitted_basis(profiles: Iterable[Profile] | None = None) -> Basis:
    """Return what the given profiles (None: all of them) and the shared curves were fitted on."""
    from strata_jax.sim.fit import fit_groups  # it compares rows through this package

    known = [load_profile(name) for name in profile_names()] if profiles is None else list(profiles)
    metrics = {name: group.metrics for group in fit_groups() for name in (*group.common, *group.card)}
    patterns: dict[str, tuple[str, ...]] = {}
    for profile in known:
        for name, number in profile.numbers.items():
            if number.rows:
                cells = (f"{row}:{metric}" for row in number.rows for metric in metrics.get(name, ("*",)))
                shared_by_all = number is common_numbers().get(name)
                patterns[name if shared_by_all else f"{name} of {profile.name}"] = tuple(cells)
    shared = yaml.safe_load((FOLDER / "rules" / "fitted.yaml").read_text(encoding="utf-8"))
    return Basis({**patterns, **{name: tuple(rows) for name, rows in shared.items()}})

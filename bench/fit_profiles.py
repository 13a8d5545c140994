"""Fit the hardware profiles to the published rows, print how well that works, and with --write update data/profiles.

    python bench/fit_profiles.py [--write]

Deterministic and idempotent: what the files hold for fitted numbers at present does not enter.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import yaml

from strata_jax.sim.fit import Fit, fit_all
from strata_jax.sim.fit_memory import fit_memory
from strata_jax.sim.profile import FOLDER, load_profile, profile_names
from strata_jax.sim.profile_file import UNITS, Number, profile_yaml, read_numbers

HEADER = "Written by bench/fit_profiles.py: numbers marked fitted are replaced by every fit, the others are kept."


def main() -> None:
    """Fit, print and perhaps write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="update data/profiles")
    arguments = parser.parse_args()
    if arguments.write:
        for name, numbers in fit_memory().items():  # speeds are fitted on the plans that follow from it
            rewrite(name, numbers)
        load_profile.cache_clear()
    fit = fit_all()
    show(fit)
    if arguments.write:
        rewrite("common", fit.common)
        for name, numbers in fit.cards.items():
            rewrite(name, numbers)
    print(f"{len(profile_names())} profiles, {len(fit.cards)} of them calibrated")


def show(fit: Fit) -> None:
    """Print fitted numbers and the error of every row they were fitted on."""
    for name, number in fit.common.items():
        print(f"{name:24} {number.value:10.4g} {number.unit:12} {number.mark}")
    for card, numbers in fit.cards.items():
        print(card, ", ".join(f"{name} {number.value:.4g}" for name, number in numbers.items()))
    for (row, metric), error in fit.errors.items():
        print(f"{row:32} {metric:16} {error:+7.1%}")


def rewrite(name: str, numbers: Mapping[str, Number]) -> None:
    """Put numbers into a profile's file; texts and all other numbers stay."""
    path = FOLDER / f"{name}.yaml"
    raw: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    kept = read_numbers(raw.pop("numbers"), path.name)
    if name != "common":
        raw["calibrated"] = True
    text = profile_yaml(raw, {name: {**kept, **numbers}[name] for name in UNITS if name in {**kept, **numbers}}, HEADER)
    read_numbers(yaml.safe_load(text)["numbers"], path.name)  # nothing is written that could not be read
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Hardware profiles: what the simulator knows of a card and the machine around it, every number with its origin.

`data/profiles/NAME.yaml` holds one machine, `data/profiles/common.yaml` the numbers that all cards share and the
defaults of what a card's file leaves out. A card without fitted numbers of its own is `calibrated: false`, and every
result made with it says so. Pure data, no JAX.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from strata_jax.errors import ConfigError, FormatError
from strata_jax.memory.strata.request import MIB, Card
from strata_jax.sim.profile_file import CARD_NUMBERS, TEXTS, UNITS, Number, read_mapping, read_numbers

FOLDER = Path(__file__).resolve().parents[2] / "data" / "profiles"
COMMON = "common"


@dataclass(frozen=True, eq=False)
class Profile:
    """A card and its machine.

    Attributes:
        gpus: names by which drivers and sources call the card. isa: instruction set of the CPU's expert kernels.
        calibrated: whether numbers of its own were fitted or measured.
        fit_name: the profile whose fitted numbers it shares: its own name, or that of the card it stands for.
        numbers: all of `UNITS`, the card's own over the common ones.
    """

    name: str
    title: str
    gpus: tuple[str, ...]
    os: str
    cpu: str
    isa: str
    calibrated: bool
    notes: tuple[str, ...]
    numbers: Mapping[str, Number]
    fit_name: str
    values: Mapping[str, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", {name: number.value for name, number in self.numbers.items()})

    def __getitem__(self, name: str) -> float:
        """Return a number's value in its unit."""
        return self.values[name]

    def with_values(self, source: str = "given", mark: str = "published", **values: float | None) -> Profile:
        """Return the profile with other values, e.g. from `hardware.pcie_gb_s`; None keeps the profile's own.

        Raises ConfigError for an unknown name.
        """
        changed = dict(self.numbers)
        for name, value in values.items():
            if name not in UNITS:
                raise ConfigError(f"hardware profile: {name!r} is no number of a profile; known: {', '.join(UNITS)}")
            if value is not None:
                changed[name] = Number(float(value), UNITS[name], mark, source)
        return replace(self, numbers=changed)

    def with_numbers(self, numbers: Mapping[str, Number], *, calibrated: bool) -> Profile:
        """Return the profile with other numbers, origins included."""
        return replace(self, numbers={**self.numbers, **numbers}, calibrated=calibrated)

    def card(
        self,
        *,
        vram_mib: float | None = None,
        taken_mib: float | None = None,
        ram_mib: float | None = None,
        ram_available_mib: float | None = None,
        pinned_share: float | None = None,
        os: str | None = None,
    ) -> Card:
        """Return the machine as the planner sees it; given values take the place of the profile's."""
        ram = self["ram_mib"] if ram_mib is None else ram_mib
        available = ram - self["ram_used_mib"] if ram_available_mib is None else ram_available_mib
        return Card(
            name=self.name,
            vram_bytes=round((self["vram_mib"] if vram_mib is None else vram_mib) * MIB),
            taken_bytes=round((self["vram_taken_mib"] if taken_mib is None else taken_mib) * MIB),
            late_bytes=round(self["vram_late_mib"] * MIB),
            ram_bytes=round(ram * MIB),
            ram_available_bytes=max(0, round(available * MIB)),
            os=self.os if os is None else os,
            pinned_share=self["pinned_share"] if pinned_share is None else pinned_share,
            vmm_chunk_bytes=round(self["vmm_chunk_mib"] * MIB),
        )

    def describe(self) -> list[dict[str, Any]]:
        """Return one row per number with its origin, for tables and plan files."""
        return [
            {
                "number": name,
                "value": number.value,
                "unit": number.unit,
                "mark": number.mark,
                "source": number.source,
                "rows": list(number.rows),
                "error_pct": number.error_pct,
            }
            for name, number in self.numbers.items()
        ]


def profile_names() -> tuple[str, ...]:
    """Return the names that `load_profile` knows."""
    names = (path.stem for path in FOLDER.glob("*.yaml"))
    return tuple(sorted(name for name in names if name not in (COMMON, "fit_rows")))


@lru_cache(maxsize=64)
def load_profile(name: str) -> Profile:
    """Return a profile by name. Raises ConfigError with the nearest name, FormatError if its file is broken."""
    known = profile_names()
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"hardware.name={name!r} has no profile{hint} Profiles: {', '.join(known)}. For another card run"
            " pipeline=calibrate on it and give hardware.profile_file."
        )
    return read_profile(FOLDER / f"{name}.yaml")


def read_profile(path: Path) -> Profile:
    """Return the profile in a file, e.g. one that pipeline=calibrate wrote.

    `like: NAME` takes over what the file leaves out from another profile instead of from the common numbers.
    Raises ConfigError if there is no such file, FormatError naming the entry that is wrong.
    """
    raw = read_mapping(path)
    base = load_profile(str(raw["like"])) if "like" in raw else None
    unknown = set(raw) - set(TEXTS)
    if unknown:
        raise FormatError(f"{path.name}: unknown entries {sorted(unknown)}; known: {', '.join(TEXTS)}")
    needed = {"name", "title", "numbers"} | (set() if base else {"os", "calibrated"})
    missing = needed - set(raw)
    if missing:
        raise FormatError(f"{path.name}: {sorted(missing)} are missing")
    own = read_numbers(raw["numbers"], path.name)
    numbers = {**(base.numbers if base else common_numbers()), **own}
    absent = set(UNITS) - set(numbers)
    if absent:
        raise FormatError(f"{path.name}: neither it nor {COMMON}.yaml has {sorted(absent)}")
    calibrated = bool(raw["calibrated"]) if "calibrated" in raw else bool(base and base.calibrated)
    if calibrated and not any(numbers[name].mark in ("fitted", "measured") for name in CARD_NUMBERS):
        raise FormatError(f"{path.name}: calibrated, but none of {', '.join(CARD_NUMBERS)} is fitted or measured")
    return Profile(
        name=str(raw["name"]),
        title=str(raw["title"]),
        gpus=tuple(str(gpu) for gpu in raw.get("gpus", ())),
        os=str(raw.get("os", base.os if base else "")),
        cpu=str(raw.get("cpu", base.cpu if base else "not stated")),
        isa=str(raw.get("isa", base.isa if base else "avx2")),
        calibrated=calibrated,
        notes=tuple(str(note) for note in raw.get("notes", ())),
        numbers={name: numbers[name] for name in UNITS},
        fit_name=base.fit_name if base else str(raw["name"]),
    )


@lru_cache(maxsize=1)
def common_numbers() -> Mapping[str, Number]:
    """Return the numbers that all cards share unless their file has its own."""
    path = FOLDER / f"{COMMON}.yaml"
    return read_numbers(read_mapping(path)["numbers"], path.name)


def profile_for_gpu(gpu: str) -> Profile | None:
    """Return the profile of a card by the name a driver or a source gives it, or None if there is none.

    The most specific name wins: `RTX 5090 emulating a 16 GB card` is not the plain RTX 5090.
    """
    words = _words(gpu)
    best: tuple[int, str] | None = None
    for name in profile_names():
        for known in load_profile(name).gpus:
            wanted = _words(known)
            if wanted <= words and (best is None or len(wanted) > best[0]):
                best = (len(wanted), name)
    return load_profile(best[1]) if best else None


def borrowed_profile(gpu: str, like: Profile) -> Profile:
    """Return another card's profile for a card that has none: marked as not calibrated, with a note saying so."""
    return replace(
        like,
        name=f"{like.name} (borrowed)",
        title=gpu,
        calibrated=False,
        notes=(f"{gpu} has no profile; the numbers are those of {like.title}", *like.notes),
    )


def _words(text: str) -> frozenset[str]:
    """Return the words of a card's name without its maker, `16GB` and `16 GB` alike."""
    text = re.sub(r"(\d+)\s*(gib|gb)\b", r"\1gb", text.lower())
    return frozenset(re.findall(r"[a-z0-9]+", text)) - {"nvidia", "geforce", "gpu", "generation", "a"}

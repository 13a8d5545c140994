"""Quantisations as data: `data/quants/NAME.yaml` says which types a pack's tensors have and how sure each part is.

A new quantisation is one new file there. Each section carries a mark: ``published`` (stated by a source),
``inferred`` (follows from published sizes, stated how) or ``fitted`` (chosen so that the named published rows come
out). Not here: widths and counts of models and the tensors that follow (``presets.py``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from strata_jax.errors import ConfigError, FormatError
from strata_jax.gguf.blocks import BLOCK_TYPES, BlockType

FOLDER = Path(__file__).resolve().parents[1] / "data" / "quants"
MARKS = ("published", "inferred", "fitted", "default")
DENSE_ROLES = (
    "default",
    "mixers",
    "GDN",
    "attention",
    "indexers",
    "routers",
    "shared experts",
    "PLE layer",
    "PLE conv",
)
_SECTIONS = ("experts", "hot_ranks", "dense", "head", "embedding", "ple")

PRICED_TYPES: Mapping[str, BlockType] = {
    **{bt.name: bt for bt in BLOCK_TYPES.values()},
    "FP8": BlockType(-1, "FP8", 1, 1),  # tables of one byte a value; no GGUF type
    "NVFP4": BlockType(40, "NVFP4", 16, 9),  # 16 codes of 4 bits and their scale; GGUF packs four such groups a block
}
"""Types that can be priced: every GGUF type, and those that only other packs have."""

_NARROW = {"Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0"}
"""What stands in for a 256-wide type where rows are no multiple of 256; IQ4_NL for all others (qwen4exp notes 10)."""


@dataclass(frozen=True, slots=True)
class LayerTypes:
    """Types of the routed experts of some layers: named ones, or a count that is spread evenly over the rest."""

    gate_up: str
    down: str
    count: int
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HotRanks:
    """The next `ranks` of a pack's popularity profile, whose blobs have another mean size than the pack has."""

    ranks: int
    mean_blob_bytes: int


@dataclass(frozen=True, slots=True)
class Mark:
    """How sure a section of the data is, and by what."""

    mark: str
    source: str


@dataclass(frozen=True, slots=True, eq=False)
class Quant:
    """One quantisation. `dense` maps a role to its type; `published` holds the totals that sources state."""

    name: str
    title: str
    experts: tuple[LayerTypes, ...]
    blob_tail_bytes: int
    hot_ranks: tuple[HotRanks, ...]
    dense: Mapping[str, str]
    head: str
    embedding: str
    ple: str
    published: Mapping[str, int | float]
    marks: Mapping[str, Mark]

    @property
    def num_layers(self) -> int:
        """Layers that `experts` describes."""
        return sum(entry.count for entry in self.experts)


def priced_type(name: str) -> BlockType:
    """Return the type called `name`. Raises ConfigError naming the nearest one if it is unknown."""
    found = PRICED_TYPES.get(name)
    if found is None:
        raise ConfigError(f"weight type {name!r} is unknown{nearest(name, PRICED_TYPES)}; known: {_list(PRICED_TYPES)}")
    return found


def fitting_type(name: str, row_length: int) -> BlockType:
    """Return the type called `name`, or what stands in for it where its blocks do not divide a row of `row_length`."""
    wanted = priced_type(name)
    if row_length % wanted.block_len == 0:
        return wanted
    narrow = priced_type(_NARROW.get(name, "IQ4_NL"))
    if row_length % narrow.block_len:
        return priced_type("F16")
    return narrow


def quant_names() -> tuple[str, ...]:
    """Return the names of all quantisations that have a data file."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


@lru_cache(maxsize=64)
def load_quant(name: str) -> Quant:
    """Return the quantisation called `name`.

    Raises:
        ConfigError: no such file. The message names the nearest one.
        FormatError: the file lacks a section, or names an unknown role, mark or type.
    """
    known = quant_names()
    if name not in known:
        raise ConfigError(
            f"quant={name!r} is unknown{nearest(name, known)}; known: {_list(known)}. "
            "A new one is one file in data/quants/"
        )
    path = FOLDER / f"{name}.yaml"
    with path.open(encoding="utf-8") as file:
        return parse_quant(yaml.safe_load(file), str(path.name))


def parse_quant(data: Mapping[str, Any], source: str) -> Quant:
    """Return the quantisation that the content of a data file describes; FormatError names what is wrong in it."""
    try:
        marks = {s: Mark(str(data[s]["mark"]), str(data[s]["source"])) for s in _SECTIONS if s in data}
        quant = Quant(
            name=str(data["name"]),
            title=str(data["title"]),
            experts=tuple(_layer_types(entry) for entry in data["experts"]["layers"]),
            blob_tail_bytes=int(data["experts"].get("blob_tail_bytes", 0)),
            hot_ranks=tuple(HotRanks(**entry) for entry in data.get("hot_ranks", {}).get("segments", ())),
            dense=dict(data["dense"]["types"]),
            head=str(data["head"]["type"]),
            embedding=str(data["embedding"]["type"]),
            ple=str(data["ple"]["type"]),
            published=dict(data.get("published", {})),
            marks=marks,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"{source}: {type(error).__name__} {error}; see data/quants/README.md for the fields"
        ) from None
    wrong = [m.mark for m in marks.values() if m.mark not in MARKS]
    wrong += [role for role in quant.dense if role not in DENSE_ROLES]
    wrong += [t for t in _types(quant) if t not in PRICED_TYPES]
    if wrong or "default" not in quant.dense:
        raise FormatError(f"{source}: {wrong or 'no dense.types.default'}: see data/quants/README.md for what is known")
    return quant


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the closest known name, or nothing."""
    names = list(known)
    close = difflib.get_close_matches(name.lower(), names, n=1) or difflib.get_close_matches(name.upper(), names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _layer_types(entry: Mapping[str, Any]) -> LayerTypes:
    layers = tuple(int(i) for i in entry.get("layers", ()))
    return LayerTypes(str(entry["gate_up"]), str(entry["down"]), int(entry.get("count", len(layers))), layers)


def _types(quant: Quant) -> list[str]:
    experts = [t for entry in quant.experts for t in (entry.gate_up, entry.down)]
    return [*experts, *quant.dense.values(), quant.head, quant.embedding, quant.ple]


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))

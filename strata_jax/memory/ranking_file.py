"""Files of expert rankings: read this project's own and the original's `STRP`; write this project's own.

Own format, version 1: a JSON object, written with one entry per line, the same bytes for the same ranking.

    format      "strata-jax expert ranking"
    version     1
    model       name in the model's file, or null: any model of these sizes
    num_layers  layers of the trunk
    num_experts experts of each layer
    with_draft  whether the draft block is ranked too, as layer number num_layers
    pairs       [[layer, expert], ...], each at most once, the hottest first
    usage       how often each of the pairs was used, or [] where that is not known
    provenance  texts and integers by name, for readers

`STRP` (planning notes 4.5), little endian: magic, u32 version = 1, layers, experts, slots, ranked; then ranked times
u16 layer and u16 expert, the hottest first; then an i32 for each expert of each layer, its rank or -1. Experts ranked
beyond the slots that the file was made for may have -1 as well.
"""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from strata_jax.errors import ConfigError, FormatError
from strata_jax.files import replaced_on_success
from strata_jax.memory.expert_ranking import Expert, ExpertRanking

FORMAT = "strata-jax expert ranking"
VERSION = 1
STRP_MAGIC = b"STRP"
STRP_VERSION = 1
MAX_FILE_BYTES = 64 * 2**20
MAX_LAYERS = 4_096
MAX_EXPERTS = 65_536  # of a layer: STRP numbers them with 16 bits
_HEADER = struct.Struct("<4s5I")
_KEYS = ("format", "version", "model", "num_layers", "num_experts", "with_draft", "pairs", "usage", "provenance")


def read_ranking(path: Path) -> ExpertRanking:
    """Read a ranking of either format, checked as far as that is possible without its model.

    Raises:
        ConfigError: the file cannot be read. FormatError: it is neither format, broken, or contradicts itself.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise FormatError(
                f"{path}: {path.stat().st_size:,} bytes; a ranking of experts has {MAX_FILE_BYTES:,} at most"
            )
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: the ranking of experts cannot be read: {error.strerror}") from None
    return parse_strp(raw, str(path)) if raw[:4] == STRP_MAGIC else parse_own(raw, str(path))


def parse_strp(raw: bytes, file: str) -> ExpertRanking:
    """Return the ranking in the bytes of an `STRP` file. Raises FormatError."""
    if len(raw) < _HEADER.size:
        raise FormatError(f"{file}: {len(raw)} bytes; the header of an STRP file has {_HEADER.size}")
    magic, version, num_layers, num_experts, slots, num_ranked = _HEADER.unpack_from(raw)
    if magic != STRP_MAGIC:
        raise FormatError(f"{file}: it begins with {magic!r}; an STRP file begins with {STRP_MAGIC!r}")
    if version != STRP_VERSION:
        raise FormatError(f"{file}: STRP version {version}; this program reads version {STRP_VERSION}")
    _check_sizes(file, num_layers, num_experts)
    total = num_layers * num_experts
    if num_ranked > total:
        raise FormatError(f"{file}: {num_ranked} ranked experts; {num_layers} layers of {num_experts} have {total}")
    expected = _HEADER.size + 4 * num_ranked + 4 * total
    if len(raw) != expected:
        raise FormatError(
            f"{file}: {len(raw)} bytes; an STRP file of {num_ranked} ranked experts of {total} has {expected}"
        )
    pairs = np.frombuffer(raw, "<u2", 2 * num_ranked, _HEADER.size).reshape(-1, 2).astype(np.int64)
    table = np.frombuffer(raw, "<i4", total, _HEADER.size + 4 * num_ranked)
    ranked = tuple((layer, expert) for layer, expert in pairs.tolist())
    _check_pairs(file, ranked, num_layers, num_experts)
    _check_table(file, table, pairs[:, 0] * num_experts + pairs[:, 1], num_experts, slots)
    origin: dict[str, str | int | None] = {"read_from": f"STRP version {version}", "slots": slots}
    return ExpertRanking(num_layers, num_experts, False, ranked, provenance=origin, file=file)


def parse_own(raw: bytes, file: str) -> ExpertRanking:
    """Return the ranking in the bytes of a file of this project's format. Raises FormatError."""
    try:
        data = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{file}: no ranking of experts: neither STRP nor JSON ({str(error)[:80]}). cache.profile_save=FILE writes"
            " one"
        ) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FormatError(f'{file}: no ranking of experts: it must be a JSON object with "format": "{FORMAT}"')
    if not _is_integer(data.get("version")) or data["version"] != VERSION:
        raise FormatError(f"{file}: version {_short(data.get('version'))}; this program reads version {VERSION}")
    missing, unknown = [k for k in _KEYS if k not in data], [k for k in data if k not in _KEYS]
    if missing or unknown:
        raise FormatError(f"{file}: entries missing: {_short(missing)}; unknown: {_short(unknown)}")
    sizes = [data["num_layers"], data["num_experts"]]
    if not all(map(_is_integer, sizes)):
        raise FormatError(f"{file}: num_layers and num_experts are {_short(sizes)}; they must be integers")
    _check_sizes(file, *sizes)
    if not isinstance(data["with_draft"], bool):
        raise FormatError(f"{file}: with_draft is {_short(data['with_draft'])}; it must be true or false")
    if not (data["model"] is None or isinstance(data["model"], str)):
        raise FormatError(f"{file}: model is {_short(data['model'])}; it must be a text or null")
    pairs = _own_pairs(file, data["pairs"])
    _check_pairs(file, pairs, data["num_layers"] + data["with_draft"], data["num_experts"])
    return ExpertRanking(
        data["num_layers"], data["num_experts"], data["with_draft"], pairs, data["model"],
        _own_usage(file, data["usage"], len(pairs)), _own_provenance(file, data["provenance"]), file,
    )  # fmt: skip


def ranking_text(ranking: ExpertRanking) -> str:
    """Return the contents of a file of this project's format."""
    values = {
        "format": FORMAT,
        "version": VERSION,
        "model": ranking.model,
        "num_layers": ranking.num_layers,
        "num_experts": ranking.num_experts,
        "with_draft": ranking.with_draft,
        "pairs": ranking.pairs,
        "usage": ranking.usage,
        "provenance": dict(ranking.provenance),
    }
    lines = (f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in values.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_ranking(path: Path, ranking: ExpertRanking) -> None:
    """Write a ranking in one step: readers see the whole file, and after a failure the earlier one is untouched.

    Raises ConfigError: the file cannot be written.
    """
    try:
        with replaced_on_success(path) as unfinished:
            unfinished.write_text(ranking_text(ranking), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: the ranking of experts cannot be written: {error.strerror}") from None


def check_target(path: Path, model: str, num_layers: int, num_experts: int) -> None:
    """Make sure, before a run, that its ranking may be written: into a folder, over nothing but the same model's.

    Raises ConfigError.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"cache.profile_save={path}: there is no folder {path.parent}. Make it, or name another")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(
            f"cache.profile_save={path}: the folder {path.parent} cannot be written to. Name another file"
        )
    if not path.exists():
        return
    try:
        found = read_ranking(path)
        with path.open("rb") as stream:
            is_strp = stream.read(len(STRP_MAGIC)) == STRP_MAGIC
    except (OSError, ConfigError, FormatError) as error:
        raise ConfigError(
            f"cache.profile_save={path}: the file exists and is no ranking of experts ({error}). Name another file"
        ) from None
    if is_strp:
        raise ConfigError(
            f"cache.profile_save={path}: the file exists and is an STRP file, which would be lost. Name another file"
        )
    if (found.model, found.num_layers, found.num_experts) != (model, num_layers, num_experts):
        other = "an unnamed model" if found.model is None else _short(found.model)
        raise ConfigError(
            f"cache.profile_save={path}: the file exists and ranks the experts of {other}, {found.num_layers} layers of"
            f" {found.num_experts}; this model is {model!r}, {num_layers} layers of {num_experts}. Name another file"
        )


def _check_sizes(file: str, num_layers: int, num_experts: int) -> None:
    for what, value, most in (("layers", num_layers, MAX_LAYERS), ("experts a layer", num_experts, MAX_EXPERTS)):
        if not 1 <= value <= most:
            raise FormatError(f"{file}: {_short(value)} {what}; 1 to {most} can be")


def _check_pairs(file: str, pairs: tuple[Expert, ...], num_layers: int, num_experts: int) -> None:
    seen: dict[Expert, int] = {}
    for rank, (layer, expert) in enumerate(pairs):
        if not (0 <= layer < num_layers and 0 <= expert < num_experts):
            raise FormatError(
                f"{file}: rank {rank} is expert {_short(expert)} of layer {_short(layer)}; there are layers 0 to"
                f" {num_layers - 1} with experts 0 to {num_experts - 1}"
            )
        if seen.setdefault((layer, expert), rank) != rank:
            raise FormatError(
                f"{file}: ranks {seen[layer, expert]} and {rank} are both expert {expert} of layer {layer}"
            )


def _check_table(file: str, table: np.ndarray, codes: np.ndarray, num_experts: int, slots: int) -> None:
    expected = np.full(len(table), -1, np.int64)
    expected[codes] = np.arange(len(codes))
    wrong = (table != expected) & ~((table == -1) & (expected >= slots))
    if wrong.any():
        layer, expert = divmod(int(np.argmax(wrong)), num_experts)
        at = layer * num_experts + expert
        rank = f"has rank {expected[at]}" if expected[at] >= 0 else "is not ranked"
        raise FormatError(f"{file}: the table gives expert {expert} of layer {layer} rank {table[at]}; it {rank}")


def _own_pairs(file: str, value: Any) -> tuple[Expert, ...]:
    if not isinstance(value, list):
        raise FormatError(f"{file}: pairs is {_short(value)}; it must be a list of [layer, expert]")
    for rank, pair in enumerate(value):
        if not (isinstance(pair, list) and len(pair) == 2 and all(map(_is_integer, pair))):
            raise FormatError(f"{file}: rank {rank} is {_short(pair)}; it must be [layer, expert]")
    return tuple((layer, expert) for layer, expert in value)


def _own_usage(file: str, value: Any, num_pairs: int) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) not in (0, num_pairs):
        count = len(value) if isinstance(value, list) else _short(value)
        raise FormatError(f"{file}: usage has {count} numbers for {num_pairs} pairs; give one for each, or none")
    for rank, number in enumerate(value):
        if not _is_number(number) or not 0 <= number < math.inf:
            raise FormatError(f"{file}: the usage of rank {rank} is {_short(number)}; it must be a number from 0 on")
    return tuple(map(float, value))


def _own_provenance(file: str, value: Any) -> dict[str, str | int | None]:
    if not isinstance(value, dict):
        raise FormatError(f"{file}: provenance is {_short(value)}; it must be an object")
    for key, entry in value.items():
        if not (entry is None or isinstance(entry, str) or _is_integer(entry)):
            raise FormatError(f"{file}: provenance has {_short(key)}: {_short(entry)}; texts, integers and null work")
    return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    # an integer beyond a float's range is no number here
    return isinstance(value, float) or (_is_integer(value) and abs(value) < 2**63)


def _short(value: Any) -> str:
    """Return a value of a hostile file in few characters."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")

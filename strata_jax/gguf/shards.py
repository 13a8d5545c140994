"""Find and check the files of a split GGUF (``NAME-00001-of-0000N.gguf``); any of them may be given."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from strata_jax.errors import FormatError
from strata_jax.gguf.cursor import Buffer
from strata_jax.gguf.header import Header, read_scalar_int

_SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

Opened = tuple[Buffer, Header]


def open_shards(path: Path, open_one: Callable[[Path], Opened]) -> tuple[tuple[Path, ...], tuple[Opened, ...]]:
    """Open the set that `path` belongs to, in shard order. Raises FormatError for a set that is not complete."""
    given = open_one(path)
    buffer, header = given
    match = _SHARD_NAME.fullmatch(path.name)
    count = read_scalar_int(buffer, header.values, "split.count", path) if "split.count" in header.values else 0
    if count < 0:
        raise FormatError(f"{path}: split.count is {count}; expected the number of shards")
    if count == 0:  # not split, or merged from a split set, which leaves a count of 0
        if match and int(match["count"]) > 1 and "split.count" not in header.values:
            raise FormatError(
                f"{path}: the name says shard {int(match['number'])} of {int(match['count'])}, but the file has no "
                f"split.count. Rename it if it is a whole model, else split the model again with llama-gguf-split"
            )
        return (path,), (given,)
    number = header.shard_idx + 1
    if not 1 <= number <= count:
        raise FormatError(f"{path}: split.no is {number - 1}; with split.count {count} it must be 0 to {count - 1}")
    if count > 1 and (match is None or (int(match["number"]), int(match["count"])) != (number, count)):
        raise FormatError(
            f"{path}: this is shard {number} of {count} (split.no {number - 1}), so its name must end in "
            f"-{number:05d}-of-{count:05d}.gguf for the other shards to be found; give the files their names back"
        )
    paths = [path]
    if match is not None and count > 1:
        paths = [path.with_name(f"{match['prefix']}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
        missing = [str(p) for p in paths if not p.exists()]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise FormatError(
                f"{path}: {len(missing)} of {count} shards are missing: {', '.join(missing[:3])}{more}. "
                f"All shards must lie in one folder"
            )
    opened = tuple(given if p == path else open_one(p) for p in paths)
    _check_set(paths, opened, count)
    return tuple(paths), opened


def _check_set(paths: list[Path], opened: tuple[Opened, ...], count: int) -> None:
    total = sum(len(header.tensors) for _, header in opened)
    home: dict[str, Path] = {}
    for idx, (path, (buffer, header)) in enumerate(zip(paths, opened, strict=True)):
        for key, expected in (("split.no", idx), ("split.count", count), ("split.tensors.count", total)):
            found = read_scalar_int(buffer, header.values, key, path)
            if found != expected:
                where = "the shards hold together" if key == "split.tensors.count" else "this shard of the set needs"
                raise FormatError(
                    f"{path}: {key} is {found} (at byte {header.values[key].start}); {where} {expected}. "
                    f"The shards do not belong to one model"
                )
        for info in header.tensors:
            if info.name in home:
                raise FormatError(f"{path}: tensor {info.name!r} is also in {home[info.name]}; a set holds each once")
            home[info.name] = path

"""The built-in model: made once per user from a seed, kept in the user's cache, checked before every reuse.

Its drafts are partly accepted, so that one short run exercises prefill, drafts, verification and rollback.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from strata_jax.errors import ConfigError
from strata_jax.files import replaced_on_success

from .writer import write_synthetic_gguf

PRESET = "builtin"
ECHO_MTP = 0.1  # about a fifth of greedy drafts are accepted (3 drafts a round, measured with llama.cpp, 2026-11)
CONTENT_VERSION = 1  # raise it when the bytes of the file change for the same seed


def builtin_model_path(cache_dir: str | Path | None = None, seed: int = 0) -> Path:
    """Return the built-in model's file, writing it first if it is missing or damaged.

    Several processes may call this at once: each writes a file of its own and moves it into place, and all write the
    same bytes.

    Args:
        cache_dir: folder to keep it in; None for `$XDG_CACHE_HOME/strata-jax/models`, or `~/.cache/...` without it.
        seed: chooses the weights.
    Raises:
        ConfigError: the folder cannot be written.
    """
    folder = _default_cache_dir() if cache_dir is None else Path(cache_dir)
    path = folder / f"{PRESET}-v{CONTENT_VERSION}-seed{seed}.gguf"
    if _is_intact(path):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_synthetic_gguf(path, preset=PRESET, seed=seed, echo_mtp=ECHO_MTP)
        with replaced_on_success(_record_of(path)) as record:
            record.write_text(json.dumps(_fingerprint(path)) + "\n")
    except OSError as error:
        raise ConfigError(
            f"the built-in model cannot be written to {folder}: {error}. Set XDG_CACHE_HOME to a folder that you can "
            "write to, with 200 MB of free space, or name a file of yours with model.path=FILE.gguf"
        ) from error
    return path


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "strata-jax" / "models"


def _record_of(path: Path) -> Path:
    return path.with_suffix(".json")


def _fingerprint(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {"num_bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _is_intact(path: Path) -> bool:
    """Compare the file with the record written beside it; a missing or unreadable record counts as damage."""
    try:
        recorded = json.loads(_record_of(path).read_text())
        return path.stat().st_size == recorded["num_bytes"] and _fingerprint(path) == recorded
    except (OSError, ValueError, TypeError, KeyError):
        return False

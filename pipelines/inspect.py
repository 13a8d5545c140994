"""Show what a model file holds: metadata and tensors, also of a file that this program cannot run."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipelines.assemble import model_path
from strata_jax.config.schema import RunConfig
from strata_jax.errors import FormatError
from strata_jax.gguf.reader import TensorInfo, open_gguf
from strata_jax.report.record import RunRecord
from strata_jax.report.tables import console, table

MAX_SHOWN_CHARS = 60


def run(config: RunConfig, record: RunRecord) -> dict[str, Any]:
    """Print and write metadata and tensors, from the header alone."""
    with open_gguf(model_path(config)) as file:
        metadata = [(key, _shown(value)) for key, value in file.metadata.items()]
        tensors = [(t.name, list(t.shape), t.type_name, _num_bytes(t)) for t in file.tensors.values()]
        paths = [str(path) for path in file.paths]
    console().print(table(f"Metadata of {paths[0]}", ("key", "value"), metadata))
    console().print(table("Tensors", ("name", "shape", "type", "bytes"), [(n, str(s), t, b) for n, s, t, b in tensors]))
    names = ("name", "shape", "type", "bytes")
    record.write_json(
        "inspect.json",
        {"files": paths, "metadata": dict(metadata), "tensors": [dict(zip(names, t, strict=True)) for t in tensors]},
    )
    return {"extra": {"num_tensors": len(tensors), "num_metadata_keys": len(metadata)}}


def _shown(value: Any) -> str:
    """A value in one line; long ones by their beginning and their size."""
    if isinstance(value, np.ndarray) or (isinstance(value, list | tuple) and len(value) > 8):
        return f"{len(value):,} values: {', '.join(str(x) for x in value[:8])}{', ...' if len(value) > 8 else ''}"
    text = " ".join(str(value).split())
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}... ({len(text):,} characters)"


def _num_bytes(tensor: TensorInfo) -> int | None:
    try:
        return tensor.num_bytes
    except FormatError:
        return None  # a type whose size nobody here knows

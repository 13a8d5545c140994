"""Engines for the tests: small models, planned and loaded as the pipelines do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strata_jax.engine.engine import Engine
from strata_jax.geometry import Geometry
from strata_jax.gguf.reader import open_gguf
from strata_jax.memory.plan import plan
from strata_jax.memory.request import PlanRequest
from tests.engine.shared_programs import PROGRAMS
from tests.oracle.models import llama_oracle, models

__all__ = ["llama_oracle", "models"]

LoadEngine = Callable[..., Engine]


def load(path: Path, **settings: object) -> Engine:
    """Load a model with float32 K/V, all experts resident, windows of two tokens (fewer drafts to compile) and every
    choice overridable."""
    file = open_gguf(path)
    geometry = Geometry.from_gguf(file)
    window = settings.get("spec_window", 2)
    blocks = geometry.num_layers + (geometry.num_mtp_layers if window != 1 else 0)
    request: dict = {
        "context_cells": 512, "chunk_tokens": 64, "kv_type": "f32", "all_logits": True, "spec_window": window,
        "expert_slots": blocks * geometry.num_experts,
    }  # fmt: skip
    return Engine.load(file, geometry, plan(geometry, PlanRequest(**(request | settings))), program_store=PROGRAMS)


@pytest.fixture(scope="module", autouse=True)
def shared_programs() -> Iterator[None]:
    """Programs are shared within a file: those of all files would take much memory."""
    yield
    PROGRAMS.made.clear()


@pytest.fixture(scope="session")
def load_engine() -> LoadEngine:
    """Return `load`, keeping each engine for the session: compiled programs are the slow part."""
    kept: dict = {}

    def get(path: Path, **settings: object) -> Engine:
        key = (path, tuple(sorted(settings.items())))
        if key not in kept:
            kept[key] = load(path, **settings)
        return kept[key]

    return get

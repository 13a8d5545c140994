"""Models and oracles for the tests of what a GGUF holds."""

from __future__ import annotations

from tests.oracle.models import llama_oracle, models

__all__ = ["llama_oracle", "models"]

"""The oracle tests' fixtures."""

from __future__ import annotations

from tests.oracle.models import llama_oracle as llama_oracle
from tests.oracle.models import models as models

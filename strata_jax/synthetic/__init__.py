"""Small random-weight `qwen4exp` models: for the built-in model, the tests and the benchmarks.

Nothing here imports JAX. The tensors of a file depend only on the arguments and on NumPy's random streams, and each
tensor has a stream of its own, so it does not change when others are added or left out.
"""

from __future__ import annotations

from .builtin import builtin_model_path as builtin_model_path
from .shapes import PRESETS as PRESETS
from .shapes import ModelShape as ModelShape
from .shapes import shape_for as shape_for
from .writer import write_synthetic_gguf as write_synthetic_gguf

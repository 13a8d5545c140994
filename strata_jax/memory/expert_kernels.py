"""Which blocks' routed experts the GPU kernels can compute: a question of types and sizes alone.

The kernels (``kernels/expert_gemv``, ``kernels/grouped_matmul``) read planes (``gguf/planes.py``) in lines of as many
words as rows are interleaved. Planes take the place of the packed matrices in bank and arena, so they must have their
bytes. No JAX here: the planner asks, too.
"""

from __future__ import annotations

from functools import lru_cache

from strata_jax.errors import ConfigError, FormatError
from strata_jax.geometry import Geometry
from strata_jax.gguf.layout import EXPERT_STACKS, FUSED_EXPERTS
from strata_jax.gguf.planes import MAX_TILE_ROWS, plane_layout
from strata_jax.memory.layout import WORD_BYTES
from strata_jax.memory.sizes import model_sizes

MIN_TILE_ROWS = 16  # a product on tensor cores takes no narrower tile
PAGE_MULTIPLE_BYTES = MAX_TILE_ROWS * WORD_BYTES  # pages are whole lines, whatever the model's widths

KERNELS = ("auto", "reference", "triton")


@lru_cache(maxsize=1024)
def kernel_problem(geometry: Geometry, layer: int) -> str | None:
    """Return why the kernels cannot compute the experts of a block; None if they can."""
    g, width = geometry, geometry.expert_width[layer]
    tile_rows = min(g.embed_width & -g.embed_width, width & -width, MAX_TILE_ROWS)
    if tile_rows < MIN_TILE_ROWS:
        return (
            f"model width {g.embed_width:,} and expert width {width:,} are not both multiples of {MIN_TILE_ROWS} rows"
        )
    num_words = 0
    for part in EXPERT_STACKS:
        tensor = g.tensor_types.get(f"blk.{layer}.{part}")
        if tensor is None:
            continue
        rows, cols = tensor.shape[1:]
        # gate above up are two matrices to the kernels
        rows, matrices = (rows // 2, 2) if part == FUSED_EXPERTS else (rows, 1)
        try:
            num_words += matrices * plane_layout(tensor.type_name, rows, cols, tile_rows).num_words
        except (FormatError, ValueError) as error:
            return f"{part}: {error}"
    blob = model_sizes(g).blobs[layer]
    if num_words * WORD_BYTES != blob:
        return f"an expert takes {num_words * WORD_BYTES:,} bytes in planes, {blob:,} as packed: rows of so few blocks"
    return None


def kernel_layers(geometry: Geometry, num_blocks: int) -> tuple[bool, ...]:
    """Say of each of the first blocks whether the kernels can compute its experts."""
    return tuple(kernel_problem(geometry, layer) is None for layer in range(num_blocks))


def choose_kernels(wanted: str, geometry: Geometry, *, on_gpu: bool, spec_window: int) -> tuple[bool, tuple[str, ...]]:
    """Decide `engine.kernels`: whether experts are computed by kernels where there are some, and notes on where not.

    Args:
        on_gpu: whether the run computes on an NVIDIA GPU.

    Raises:
        ConfigError: `triton` for a model with a block that has no kernel.
    """
    if wanted not in KERNELS:
        raise ConfigError(f"engine.kernels={wanted}: must be one of {', '.join(KERNELS)}")
    if wanted == "reference" or (wanted == "auto" and not on_gpu):
        return False, ()
    g = geometry
    num_blocks = g.num_blocks if spec_window > 1 else g.num_layers
    problems: dict[str, list[int]] = {}
    for layer in range(num_blocks):
        problem = kernel_problem(g, layer)
        if problem is not None:
            problems.setdefault(problem, []).append(layer)
    if not problems:
        return True, ()
    if wanted == "triton":
        problem, layers = next(iter(problems.items()))
        raise ConfigError(
            f"engine.kernels=triton and model {g.name!r}: there is no kernel for the experts of {_named(layers)}"
            f" ({problem}). Set engine.kernels=auto, which computes them by the reference, or engine.kernels=reference"
        )
    notes = tuple(
        f"engine.kernels=auto: the experts of {_named(layers)} are computed by the reference: {problem}"
        for problem, layers in problems.items()
    )
    return sum(map(len, problems.values())) < num_blocks, notes


def _named(layers: list[int]) -> str:
    return f"block {layers[0]}" if len(layers) == 1 else f"{len(layers)} blocks, {layers[0]} first"

"""Quantised weights stay packed: no program keeps float copies of more than one matrix at a time."""

from __future__ import annotations

from strata_jax.engine.session import Session
from tests.engine.conftest import load
from tests.oracle.models import ModelStore


def test_programs_hold_one_decoded_matrix_at_a_time(models: ModelStore, llama_oracle: None) -> None:
    engine = load(models.quantized("q4_0"), context_cells=64, chunk_tokens=8, expert_slots=4)
    session = Session(engine)
    list(session.decode(session.prefill([1, 2, 3]), max_tokens=3))
    g = engine.geometry
    matrices = [t.num_parameters for t in g.tensor_types.values() if len(t.shape) == 2 and t.type_name == "Q4_0"]
    as_float_bytes = 4 * sum(matrices)
    for key, program in engine.programs.compiled.items():
        if key[0] in ("decode", "decode end", "first_window"):
            temporaries = program.memory_analysis().temp_size_in_bytes
            assert temporaries < as_float_bytes / 4, f"{key} holds {temporaries:,} of {as_float_bytes:,} bytes"

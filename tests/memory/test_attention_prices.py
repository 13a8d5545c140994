"""What the planner charges for sparse attention by kernels, and where it charges the reference's temporaries."""

from __future__ import annotations

from dataclasses import replace

from strata_jax.memory.attention_kernels import attention_notes
from strata_jax.memory.buffers import Cells, prompt_parts
from strata_jax.memory.sizes import model_sizes
from strata_jax.presets import preset_geometry


def test_kernels_price_scores_once_and_nothing_decoded() -> None:
    """Counted by hand: 24 heads of 256, 2 K/V heads, 4 index heads of 128, 512 of 32,769 blocks kept."""
    sizes = model_sizes(preset_geometry("synthetic_full", "iq3_xxs"))
    cells = Cells(131_072, 60, 1056, expert_kernels=True, kv_type="int8")

    def priced(rows: int, cells: Cells) -> dict[str, int]:
        parts = prompt_parts(sizes, rows, cells, with_draft=True, logits_rows=1)
        return {term.item: term.num_bytes for term in parts["sparse attention 4"]}

    chunk, window = priced(2048, cells), priced(4, cells)
    projections = 3 * 6144 + 2 * 512 + 2 * 512 + 2 * 128
    assert chunk["projections and queries"] == 2048 * projections * 4
    assert chunk["index scores, then output"] == 2048 * (32_769 * 9 // 8 + 512) * 4
    assert window["index scores, then output"] == 4 * (34 * 6144 + 512) * 4  # 33 pieces of 64 cells and their sum
    assert "K/V gathered and scored" not in chunk
    for other in (replace(cells, expert_kernels=False), replace(cells, kv_type="q4_0")):
        gathers = "K/V gathered and scored" in priced(2048, other)
        assert gathers == (not other.expert_kernels)  # heads of 256 have kernels for every type


def test_layers_without_a_kernel_are_named() -> None:
    g = preset_geometry("synthetic_full", "iq3_xxs", num_layers=8)
    assert attention_notes(g, "q4_0") == ()
    dense = replace(g, compress_ratio=tuple(0 if layer == 3 else r for layer, r in enumerate(g.compress_ratio)))
    told = "engine.kernels: attention in block 3 is computed by the reference: dense attention is computed by the"
    assert [note.startswith(told) for note in attention_notes(dense, "int8")] == [True]
    narrow = attention_notes(replace(g, head_dim=96), "int8")
    assert [("blocks 3, 7, 8 " in note, "96 is no power of two" in note) for note in narrow] == [(True, True)]

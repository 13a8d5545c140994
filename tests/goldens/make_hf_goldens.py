#!/usr/bin/env python3
"""Make the goldens of this folder: logits of Hugging Face transformers for the parity cases of `tests.oracle.models`.

    python -m venv VENV && VENV/bin/pip install torch==2.13.0 transformers==5.24.0 gguf==0.19.0 numpy pytest
    VENV/bin/python tests/goldens/make_hf_goldens.py            # in the repository's root; about a minute on 2 cores

transformers is kept out of the test install, so its results are stored. Each `hf_PRESET_SEED_TOKENSEED.npz` holds the
prompt, the chosen positions, their F32 logits, and the narrowest router and index cuts over the whole prompt. The same
weights go to both engines: the GGUF's tensors are un-folded into the checkpoint's names and layout here. transformers
has no draft block.

Configuration keys that are easy to get wrong: the sigmoid gate after a GDN block (`output_gate_type`), the 1-based
`ple_layer_ids`, `eos_token_id` as the n-gram boundary, `partial_rotary_factor` inside `rope_parameters`, all five
`indexer_*` keys, and layer types named `indexed_attention` (older checkpoints say `full_attention`, which is rewritten
on loading).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpForCausalLM,
    Qwen4ExpTextQSAIndexer,
    Qwen4ExpTextTopKRouter,
)

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from strata_jax.synthetic import ModelShape, shape_for, write_synthetic_gguf  # noqa: E402
from tests.oracle.models import PARITY_CASES, boundary_id  # noqa: E402

# the first tokens, both sides of the first block and of the sparse budget, around boundary tokens, the last tokens
POSITIONS = (0, 1, 3, 4, 34, 35, 36, 39, 63, 64, 79, 80, 81, 82, 160, 161, 162, 240, 242, 243, 320, 397, 398, 399)


def main() -> None:
    """Write one golden file per parity case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    for case in PARITY_CASES:
        shape = shape_for(case.preset)
        with tempfile.TemporaryDirectory() as folder:
            path = write_synthetic_gguf(Path(folder) / "model.gguf", preset=case.preset, seed=case.seed, mtp=False)
            model = load_gguf(path, shape)
        cuts = Cuts(model, shape)
        logits = model(torch.tensor([case.token_ids]), use_cache=False).logits[0].numpy()
        target = args.out / f"hf_{case.preset}_{case.seed}_{case.token_seed}.npz"
        np.savez_compressed(
            target,
            token_ids=np.array(case.token_ids, np.int32),
            positions=np.array(POSITIONS, np.int32),
            logits=logits[list(POSITIONS)].astype(np.float32),
            router_margin=np.float32(min(cuts.router)),
            index_margin=np.float32(min(cuts.index)),
        )
        print(
            f"{target.name}: std {logits.std():.3f}, margins {min(cuts.router):.2e} {min(cuts.index):.2e}", flush=True
        )


def load_gguf(path: Path, shape: ModelShape) -> Qwen4ExpForCausalLM:
    """Build the transformers model with the weights of an F32 file without a draft block."""
    model = Qwen4ExpForCausalLM(config_for(shape)).float().eval()
    tensors = {t.name: np.array(t.data, np.float32) for t in gguf.GGUFReader(path).tensors}
    state = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in unfold(tensors, shape).items()}
    result = model.load_state_dict(state, strict=False)
    missing = [name for name in result.missing_keys if not name.endswith(("inv_freq", "layer_multipliers"))]
    missing = [name for name in missing if "ngram_heads_" not in name]
    if missing or result.unexpected_keys or tensors:
        raise ValueError(f"missing {missing}, unexpected {result.unexpected_keys}, unused {sorted(tensors)}")
    return model


def config_for(shape: ModelShape) -> Qwen4ExpTextConfig:
    """Translate the sizes of a synthetic model."""
    options: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.embed_width,
        "num_hidden_layers": shape.num_layers,
        "layer_types": [
            "linear_attention" if shape.is_recurrent(layer) else "indexed_attention"
            for layer in range(shape.num_layers)
        ],
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context_length,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_base,
            "partial_rotary_factor": shape.rope_dim / shape.head_dim,
            "mrope_section": list(shape.rope_sections[:3]),
            "mrope_interleaved": True,
        },
        "linear_conv_kernel_dim": shape.conv_kernel,
        "linear_key_head_dim": shape.gdn_head_dim,
        "linear_value_head_dim": shape.gdn_head_dim,
        "linear_num_key_heads": shape.gdn_key_heads,
        "linear_num_value_heads": shape.gdn_value_heads,
        "output_gate_type": "sigmoid",
        "moe_intermediate_size": shape.expert_width,
        "shared_expert_intermediate_size": shape.shared_expert_width,
        "num_experts_per_tok": shape.num_experts_used,
        "num_experts": shape.num_experts,
        "hc_count": shape.num_streams,
        "hc_lowrank": shape.mixer_rank,
        "ple_layer_ids": [] if shape.ple_layer is None else [shape.ple_layer + 1],
        "ple_conv_kernel_size": shape.ple_conv_kernel,
        "ngram_size": shape.ple_ngram_size,
        "heads_per_ngram": shape.ple_heads_per_ngram,
        "ngram_vocab_size_base": shape.ple_table_base,
        "seed": shape.ple_seed,
        "split_ngram_parts": 1,
        "eos_token_id": boundary_id(shape.vocab_size),
        "indexer_n_heads": shape.index_heads,
        "indexer_kv_heads": 1,
        "indexer_head_dim": shape.index_dim,
        "indexer_budget": shape.index_top_k,
        "indexer_compress_ratio": shape.compress_ratio,
        "tie_word_embeddings": False,
    }
    return Qwen4ExpTextConfig(**options)


def unfold(tensors: dict[str, np.ndarray], shape: ModelShape) -> dict[str, np.ndarray]:
    """Undo the converter's changes; takes every tensor it uses out of `tensors`."""
    take = tensors.pop
    state = {
        "model.embed_tokens.weight": take("token_embd.weight"),
        "lm_head.weight": take("output.weight"),
        "model.hyper_connection_mixer.hc_norm.weight": take("output_hc_norm.weight") - 1,
        "model.hyper_connection_mixer.input_mix_weight_down.weight": take("output_hc_down.weight"),
        "model.hyper_connection_mixer.input_mix_weight_up.weight": take("output_hc_up.weight"),
    }
    if shape.ple_layer is not None:
        table = f"model.layers.{shape.ple_layer}.ple.ple_embedding.ngram_embedding.weight"
        state[table] = take("per_layer_token_embd.weight")
    for layer in range(shape.num_layers):
        prefix = f"blk.{layer}."
        block = {name.removeprefix(prefix): take(name) for name in list(tensors) if name.startswith(prefix)}
        parts = {**_mixers(block), **_moe(block)}
        parts |= _gdn(block, shape) if shape.is_recurrent(layer) else _attention(block)
        parts |= _ple(block) if layer == shape.ple_layer else {}
        if block:
            raise ValueError(f"block {layer} has tensors without a place: {sorted(block)}")
        state |= {f"model.layers.{layer}.{name}": value for name, value in parts.items()}
    return state


def _mixers(block: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    parts: dict[str, np.ndarray] = {}
    for ours, theirs in (("hc_attn", "attn_hyper_connection"), ("hc_ffn", "mlp_hyper_connection")):
        parts[f"{theirs}.hc_norm.weight"] = block.pop(f"{ours}_norm.weight") - 1
        parts[f"{theirs}.input_mix_weight_down.weight"] = block.pop(f"{ours}_down.weight")
        parts[f"{theirs}.input_mix_weight_up.weight"] = block.pop(f"{ours}_up.weight")
        parts[f"{theirs}.block_inject_weight.weight"] = block.pop(f"{ours}_inject.weight")
    return parts


def _moe(block: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    gate_up = np.concatenate([block.pop("ffn_gate_exps.weight"), block.pop("ffn_up_exps.weight")], axis=1)
    return {
        "mlp.gate.weight": block.pop("ffn_gate_inp.weight"),
        "mlp.experts.gate_up_proj": gate_up,
        "mlp.experts.down_proj": block.pop("ffn_down_exps.weight"),
        "mlp.shared_expert_gate.weight": block.pop("ffn_gate_inp_shexp.weight")[None],
        "mlp.shared_expert.gate_proj.weight": block.pop("ffn_gate_shexp.weight"),
        "mlp.shared_expert.up_proj.weight": block.pop("ffn_up_shexp.weight"),
        "mlp.shared_expert.down_proj.weight": block.pop("ffn_down_shexp.weight"),
    }


def _gdn(block: dict[str, np.ndarray], shape: ModelShape) -> dict[str, np.ndarray]:
    keys, per_key = shape.gdn_key_heads, shape.gdn_value_heads // shape.gdn_key_heads
    key_rows = 2 * keys * shape.gdn_head_dim

    def untile(values: np.ndarray, axis: int = 0) -> np.ndarray:
        """Reorder value heads from (h mod keys) order to the checkpoint's, where a key head owns consecutive ones."""
        values = np.moveaxis(values, axis, 0)
        heads = values.reshape(per_key, keys, -1, *values.shape[1:])
        return np.moveaxis(heads.swapaxes(0, 1).reshape(values.shape), 0, axis)

    def untile_rows_after_keys(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values[:key_rows], untile(values[key_rows:])])

    return {
        "linear_attn.in_proj_qkv.weight": untile_rows_after_keys(block.pop("attn_qkv.weight")),
        "linear_attn.in_proj_z.weight": untile(block.pop("attn_gate.weight")),
        "linear_attn.in_proj_b.weight": untile(block.pop("ssm_beta.weight")),
        "linear_attn.in_proj_a.weight": untile(block.pop("ssm_alpha.weight")),
        "linear_attn.conv1d.weight": untile_rows_after_keys(block.pop("ssm_conv1d.weight"))[:, None],
        "linear_attn.dt_bias": untile(block.pop("ssm_dt.bias")),
        "linear_attn.A_log": np.log(-untile(block.pop("ssm_a"))),
        "linear_attn.norm.weight": block.pop("ssm_norm.weight"),  # the one norm that is not stored plus one
        "linear_attn.out_proj.weight": untile(block.pop("ssm_out.weight"), axis=1),
    }


def _attention(block: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    index = np.concatenate([block.pop("indexer.q_proj.weight"), block.pop("indexer.k_proj.weight")])
    return {
        "self_attn.q_proj.weight": block.pop("attn_q.weight"),
        "self_attn.k_proj.weight": block.pop("attn_k.weight"),
        "self_attn.v_proj.weight": block.pop("attn_v.weight"),
        "self_attn.o_proj.weight": block.pop("attn_output.weight"),
        "self_attn.q_norm.weight": block.pop("attn_q_norm.weight") - 1,
        "self_attn.k_norm.weight": block.pop("attn_k_norm.weight") - 1,
        "self_attn.indexer.index_qk_proj.weight": index,
        "self_attn.indexer.q_layernorm.weight": block.pop("indexer.q_norm.weight") - 1,
        "self_attn.indexer.k_layernorm.weight": block.pop("indexer.k_norm.weight") - 1,
    }


def _ple(block: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    norms = {f"ple.norm_{part}.weight": block.pop(f"ple_norm_{part}.weight") - 1 for part in ("key", "query", "conv")}
    return {
        **norms,
        "ple.key_proj.weight": block.pop("ple_key.weight"),
        "ple.value_proj.weight": block.pop("ple_value.weight"),
        "ple.conv1d.weight": block.pop("ple_conv1d.weight")[:, None],
    }


@dataclass(slots=True)
class Cuts:
    """Watches a model and records the width of every cut that routers and indexers make."""

    model: Qwen4ExpForCausalLM
    shape: ModelShape
    router: list[float] = field(default_factory=lambda: [np.inf])
    index: list[float] = field(default_factory=lambda: [np.inf])

    def __post_init__(self) -> None:
        for module in self.model.modules():
            if isinstance(module, Qwen4ExpTextTopKRouter):
                module.register_forward_hook(self._on_router)
            if isinstance(module, Qwen4ExpTextQSAIndexer):
                module.register_forward_hook(self._on_indexer, with_kwargs=True)

    def _on_router(self, module: torch.nn.Module, args: Sequence[Any], output: Sequence[torch.Tensor]) -> None:
        ordered = output[0].softmax(-1).sort(-1, descending=True).values
        used = self.shape.num_experts_used
        self.router.append(float((ordered[:, used - 1] - ordered[:, used]).min()))

    def _on_indexer(
        self, module: Qwen4ExpTextQSAIndexer, args: Sequence[Any], kwargs: Mapping[str, Any], output: torch.Tensor
    ) -> None:
        """Score all blocks of all tokens at once; a token past the budget has a cut."""
        hidden, (cos, sin) = args[0][0], (x[0] for x in args[1])
        ratio, width = self.shape.compress_ratio, self.shape.index_dim
        kept = self.shape.index_top_k // ratio
        projected = module.index_qk_proj(hidden)
        queries = module.q_layernorm(projected[:, :-width].unflatten(-1, (-1, width)))
        num_blocks = len(hidden) // ratio
        keys = module.k_layernorm(projected[: num_blocks * ratio, -width:].unflatten(0, (num_blocks, ratio)).mean(1))
        queries = _rotate(queries, cos[:, None], sin[:, None])
        keys = _rotate(keys, cos[: num_blocks * ratio : ratio], sin[: num_blocks * ratio : ratio])
        scores = torch.einsum("thd,bd->tbh", queries, keys).relu().sum(-1) / width**0.5
        for token, row in enumerate(scores):
            visible = row[: (token + 1) // ratio].sort(descending=True).values
            if len(visible) > kept:
                self.index.append(float(visible[kept - 1] - visible[kept]))


def _rotate(values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the leading dimensions, half-split pairs."""
    width = cos.shape[-1]
    turned, rest = values[..., :width], values[..., width:]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)


if __name__ == "__main__":
    main()

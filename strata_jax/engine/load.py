"""From a GGUF file to device pytrees: dense weights as stored or in planes, experts into the bank."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.engine.attention import AttentionWeights, IndexerWeights
from strata_jax.engine.experts import BlobLayout, BlobPart, ExpertWeights, LayerBank
from strata_jax.engine.gdn import GdnWeights
from strata_jax.engine.joined import Joined, join
from strata_jax.engine.layers import MixerWeights
from strata_jax.engine.matrix import ManyRows, Matrix, from_bytes
from strata_jax.engine.model import BlockWeights, DraftWeights, Weights
from strata_jax.engine.ple import PleWeights
from strata_jax.engine.spread import spread_blobs
from strata_jax.geometry import Geometry
from strata_jax.gguf.layout import OUTPUT, PLE_TABLE, TOKEN_EMBD
from strata_jax.gguf.source import WeightSource
from strata_jax.kernels.expert_gemv import ExpertLayout, expert_layout, pack_expert
from strata_jax.kernels.planes import to_planes
from strata_jax.kernels.quant_matmul import PlanePart
from strata_jax.memory.dense_planes import dense_planes
from strata_jax.memory.expert_kernels import kernel_layers
from strata_jax.memory.layout import WORD_BYTES, pages_per_expert
from strata_jax.memory.sizes import model_sizes
from strata_jax.synthetic.full import SyntheticModel

_MAX_READERS = 8  # threads; each holds the matrices of one block, packed and in planes


@dataclass(frozen=True)
class _Reader:
    """Reads dense tensors.

    Attributes:
        kernels: hold matrices in planes where the kernels can multiply by them; their words stay in host memory.
    """

    file: WeightSource
    kernels: bool

    def matrix(self, name: str, *, looked_up: bool = False, decides: bool = False) -> Matrix:
        """Read a matrix; one of which only rows are ``looked_up`` stays as stored.

        Args:
            decides: experts or blocks are chosen by its products, which keep float32's accuracy where it is as stored.
        """
        info, raw = self.file.tensors[name], self.file.data(name)
        rows, cols = info.shape[-2:]
        planes = dense_planes(info.type_name, rows, cols) if self.kernels and not looked_up else None
        many_rows: ManyRows = "float32"
        if self.kernels and planes is None:
            many_rows = "exact" if decides else "rounded"
        if planes is not None:
            return Matrix(to_planes(raw, planes), info.type_name, cols, PlanePart(planes))  # type: ignore[arg-type]
        return from_bytes(raw, info.type_name, cols, many_rows)

    def array(self, name: str) -> jax.Array:
        """A small tensor (norm, convolution, bias) as float32, whatever its float type in the file."""
        info = self.file.tensors[name]
        return jnp.asarray(from_bytes(self.file.data(name), info.type_name, info.shape[-1]).data, jnp.float32)


def load_model(
    file: WeightSource,
    g: Geometry,
    num_blocks: int,
    page_bytes: int,
    sharding: jax.sharding.Sharding | None,
    *,
    with_draft: bool,
    kernels: bool = False,
) -> tuple[Weights, tuple[LayerBank, ...]]:
    """Do `load_weights` and `load_banks` at a time: pinning the bank's memory takes as long as all the rest."""
    with ThreadPoolExecutor(1) as pool:
        banks = pool.submit(load_banks, file, g, num_blocks, page_bytes, sharding, kernels=kernels)
        return load_weights(file, g, with_draft=with_draft, kernels=kernels), banks.result()


def load_weights(file: WeightSource, g: Geometry, *, with_draft: bool, kernels: bool = False) -> Weights:
    """Read everything but the routed experts and the n-gram table.

    Args:
        kernels: hold matrices in planes where the kernels can multiply by them; else, and the others, as stored.
    """
    r, tied = _Reader(file, kernels), OUTPUT not in file.tensors
    with ThreadPoolExecutor(min(_MAX_READERS, os.cpu_count() or 1)) as pool:  # numpy lets others run while it copies
        embed = pool.submit(lambda: _alone(r.matrix(TOKEN_EMBD, looked_up=not tied)))
        head = embed if tied else pool.submit(lambda: _alone(r.matrix(OUTPUT)))
        draft = pool.submit(_draft, r, g) if with_draft else None
        blocks = tuple(pool.map(lambda layer: _block(r, g, layer), range(g.num_layers)))
        out_mixer = join(_mixer(r, "output_hc", inject=False))
        return Weights(embed.result(), head.result(), out_mixer, blocks, None if draft is None else draft.result())


def _alone(w: Matrix) -> Matrix:
    """A matrix in an array of its own."""
    return replace(w, data=jnp.asarray(w.data))


def load_banks(
    file: WeightSource,
    g: Geometry,
    num_blocks: int,
    page_bytes: int,
    sharding: jax.sharding.Sharding | None,
    *,
    kernels: bool = False,
) -> tuple[LayerBank, ...]:
    """Copy the packed experts of the first blocks into host memory, one blob per expert.

    Args:
        kernels: hold them in planes where the kernels can compute them.

    Raises:
        RuntimeError: blobs in planes do not have the bytes that the planner counts.
    """
    by_kernel = kernel_layers(g, num_blocks) if kernels else (False,) * num_blocks
    planned, distinct, banks = model_sizes(g).blobs, {}, []
    for layer in range(num_blocks):
        layout = plane_layout_of(file, layer) if by_kernel[layer] else blob_layout(file, layer)
        if by_kernel[layer] and layout.num_words * WORD_BYTES != planned[layer]:
            raise RuntimeError(
                f"block {layer}: an expert in planes has {layout.num_words * WORD_BYTES:,} bytes, the plan counts"
                f" {planned[layer]:,}"
            )
        if isinstance(file, SyntheticModel):
            if layout not in distinct:  # blocks of the same types have the same pool
                distinct[layout] = _blobs([file.expert_pool(name) for name in _expert_tensors(file, layer)], layout)
            blobs = spread_blobs(distinct[layout], file.expert_ids(layer), sharding)
        else:
            blobs = jax.device_put(_blobs([file.data(name) for name in _expert_tensors(file, layer)], layout), sharding)
        banks.append(LayerBank(blobs, layout, pages_per_expert(layout.num_words * WORD_BYTES, page_bytes)))
    return tuple(banks)


def blob_layout(file: WeightSource, layer: int) -> BlobLayout:
    """Where each packed matrix of one expert of this block lies in its blob."""
    parts, first_word = [], 0
    for name in _expert_tensors(file, layer):
        info = file.tensors[name]
        num_bytes = info.num_bytes // info.shape[0]
        parts.append(BlobPart(info.type_name, info.shape[1], info.shape[2], first_word, num_bytes))
        first_word += parts[-1].num_words
    return BlobLayout(_join_gate_up(parts), first_word)


def plane_layout_of(file: WeightSource, layer: int) -> ExpertLayout:
    """Where each matrix of one expert of this block lies in its blob in planes."""
    first, *_, down = (file.tensors[name] for name in _expert_tensors(file, layer))
    up = file.tensors[_expert_tensors(file, layer)[-2]]  # gate above up: one tensor
    return expert_layout(first.type_name, up.type_name, down.type_name, width=down.shape[1], expert_width=down.shape[2])


def _blobs(stacks: list[np.ndarray], layout: BlobLayout | ExpertLayout) -> np.ndarray:
    """Join packed matrices u8[N, rows, row_bytes] of N experts into blobs u32[N, blob_words]."""
    if isinstance(layout, ExpertLayout):
        planes = np.empty((len(stacks[0]), layout.num_words), np.uint32)
        for expert, blob in enumerate(planes):
            pack_expert([stack[expert] for stack in stacks], layout, out=blob)
        return planes
    blobs = np.zeros((len(stacks[0]), layout.num_words * 4), np.uint8)
    offset = 0
    for stack in stacks:
        raw = stack.reshape(len(stack), -1)
        blobs[:, offset : offset + raw.shape[1]] = raw
        offset += -(-raw.shape[1] // 4) * 4
    return blobs.view(np.uint32)


def _expert_tensors(file: WeightSource, layer: int) -> list[str]:
    prefix = f"blk.{layer}.ffn_"
    fused = f"{prefix}gate_up_exps.weight"
    first = [fused] if fused in file.tensors else [f"{prefix}gate_exps.weight", f"{prefix}up_exps.weight"]
    return [*first, f"{prefix}down_exps.weight"]


def _join_gate_up(parts: list[BlobPart]) -> tuple[BlobPart, ...]:
    """Treat gate and up of one type, lying end to end, as one matrix: one product instead of two."""
    if len(parts) == 2:
        return tuple(parts)
    gate, up, down = parts
    if gate.type_name != up.type_name or gate.num_bytes % 4:
        return tuple(parts)
    both = BlobPart(gate.type_name, gate.rows + up.rows, gate.cols, gate.first_word, gate.num_bytes + up.num_bytes)
    return (both, down)


def _block(r: _Reader, g: Geometry, layer: int) -> Joined[BlockWeights]:
    p = f"blk.{layer}."
    weights = BlockWeights(
        attn_mixer=_mixer(r, f"{p}hc_attn"),
        ffn_mixer=_mixer(r, f"{p}hc_ffn"),
        token_mixer=_gdn(r, p) if g.recurrent[layer] else _attention(r, g, layer),
        experts=ExpertWeights(
            router=r.matrix(f"{p}ffn_gate_inp.weight", decides=True),
            shared_router=r.array(f"{p}ffn_gate_inp_shexp.weight").reshape(-1),
            shared_gate=r.matrix(f"{p}ffn_gate_shexp.weight"),
            shared_up=r.matrix(f"{p}ffn_up_shexp.weight"),
            shared_down=r.matrix(f"{p}ffn_down_shexp.weight"),
        ),
        ple=join(_ple(r, p)) if layer == g.ple_layer else None,
    )
    return join(weights)


def _mixer(r: _Reader, prefix: str, *, inject: bool = True) -> MixerWeights:
    return MixerWeights(
        norm=r.array(f"{prefix}_norm.weight"),
        down=r.matrix(f"{prefix}_down.weight"),
        up=r.matrix(f"{prefix}_up.weight"),
        inject=r.matrix(f"{prefix}_inject.weight") if inject else None,
    )


def _gdn(r: _Reader, p: str) -> GdnWeights:
    return GdnWeights(
        qkv=r.matrix(f"{p}attn_qkv.weight"),
        gate=r.matrix(f"{p}attn_gate.weight"),
        conv=r.array(f"{p}ssm_conv1d.weight"),
        beta=r.matrix(f"{p}ssm_beta.weight"),
        alpha=r.matrix(f"{p}ssm_alpha.weight"),
        dt_bias=r.array(f"{p}ssm_dt.bias"),
        a=r.array(f"{p}ssm_a"),
        norm=r.array(f"{p}ssm_norm.weight"),
        out=r.matrix(f"{p}ssm_out.weight"),
    )


def _attention(r: _Reader, g: Geometry, layer: int) -> AttentionWeights:
    p = f"blk.{layer}."
    ratio = g.compress_ratio[layer]
    indexer = None
    if ratio:
        indexer = IndexerWeights(
            q=r.matrix(f"{p}indexer.q_proj.weight", decides=True),
            k=r.matrix(f"{p}indexer.k_proj.weight", decides=True),
            q_norm=r.array(f"{p}indexer.q_norm.weight"),
            k_norm=r.array(f"{p}indexer.k_norm.weight"),
        )
    return AttentionWeights(
        q=r.matrix(f"{p}attn_q.weight"),
        k=r.matrix(f"{p}attn_k.weight"),
        v=r.matrix(f"{p}attn_v.weight"),
        out=r.matrix(f"{p}attn_output.weight"),
        q_norm=r.array(f"{p}attn_q_norm.weight"),
        k_norm=r.array(f"{p}attn_k_norm.weight"),
        indexer=indexer,
        ratio=ratio,
    )


def _ple(r: _Reader, p: str) -> PleWeights:
    return PleWeights(
        key=r.matrix(f"{p}ple_key.weight"),
        value=r.matrix(f"{p}ple_value.weight"),
        norm_key=r.array(f"{p}ple_norm_key.weight"),
        norm_query=r.array(f"{p}ple_norm_query.weight"),
        norm_conv=r.array(f"{p}ple_norm_conv.weight"),
        conv=r.array(f"{p}ple_conv1d.weight"),
        row_type=r.file.tensors[PLE_TABLE].type_name,
    )


def _draft(r: _Reader, g: Geometry) -> DraftWeights:
    p = f"blk.{g.num_layers}.nextn."
    return DraftWeights(
        block=_block(r, g, g.num_layers),
        embed_norm=r.array(f"{p}enorm.weight"),
        hidden_norm=r.array(f"{p}hnorm.weight"),
        project=_alone(r.matrix(f"{p}eh_proj.weight")),
        out_mixer=join(_mixer(r, f"{p}hc_head", inject=False)),
    )

"""ggml's own block encoders and decoders, and GGUF files made with them.

Types are named as in ggml ("IQ3_S"). Type 42, `Q2_0`, is in ggml but not in gguf 0.19.0; it is made known to that
package only while a file is read here, so that no test passes because of it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from strata_jax.files import replaced_on_success

from .glibc import loadable_library_dir

Q2_0_ID, Q2_0_BLOCK_LEN, Q2_0_BLOCK_BYTES = 42, 64, 18
_FLOATS = ("F32", "F16", "BF16")

# what llama.cpp's quantiser takes when rows do not hold whole blocks; F16 when that does not fit either
FALLBACK = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **dict.fromkeys(("Q2_K", "Q3_K"), "Q4_0"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
# tensors that stay F32 in every recipe, as in published files
_ALWAYS_F32 = re.compile(
    r"_norm\.weight|ffn_gate_inp|ssm_conv1d|ssm_a$|ssm_dt|ple_conv1d|ple_norm|nextn\.(enorm|hnorm)|hc_\w+_inject|"
    r"ssm_alpha|ssm_beta"
)

Rules = Sequence[tuple[str, str]]  # (regular expression searched in the tensor's name, type); the first match wins


def _whole(type_name: str) -> Rules:
    return [(".", type_name)]


def _experts(type_name: str) -> Rules:
    """Experts of one type, the rest as published files have it."""
    return [
        (r"ffn_(gate|up|gate_up|down)_exps", type_name),
        ("per_layer_token_embd", "IQ4_NL"),
        (r"token_embd|output\.weight", "Q6_K"),
        ("indexer", "F16"),
        ("blk", "Q5_K"),
        (".", "Q8_0"),
    ]


_WHOLE_TYPES = ("F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "Q5_0", "Q5_1", "IQ4_NL")
_EXPERT_TYPES = ("Q2_0", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "Q2_K", "Q3_K")
RECIPES: dict[str, Rules] = {
    **{name.lower(): _whole(name) for name in _WHOLE_TYPES},
    **{name.lower(): _experts(name) for name in _EXPERT_TYPES},
    # like the published GSQ-RCO IQ3_S file: types of gate/up and of down differ from layer to layer
    "gsq": [
        (r"blk\.[048]\.ffn_(gate|up)_exps", "IQ2_S"),
        (r"blk\.[15]\.ffn_(gate|up)_exps", "IQ3_XXS"),
        (r"blk\.[26]\.ffn_(gate|up)_exps", "IQ3_S"),
        (r"blk\.[37]\.ffn_(gate|up)_exps", "IQ4_XS"),
        (r"blk\.[25]\.ffn_down_exps", "Q2_0"),
        ("ffn_down_exps", "IQ4_NL"),
        ("per_layer_token_embd", "IQ4_NL"),
        (r"token_embd|output\.weight", "Q6_K"),
        ("indexer", "BF16"),
        ("hc_", "Q8_0"),
        ("blk", "Q6_K"),
    ],
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: row-major shape, type, and its rows as bytes u8[..., row_bytes]."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    rows: np.ndarray


def block_size(type_name: str) -> tuple[int, int]:
    """Return (weights, bytes) of one block."""
    if type_name == "Q2_0":
        return Q2_0_BLOCK_LEN, Q2_0_BLOCK_BYTES
    return gguf.GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]


def quantize(values: np.ndarray, type_name: str) -> np.ndarray:
    """Encode f32[..., n] to u8[..., row_bytes] with ggml; types that need an importance matrix get a uniform one."""
    values = np.ascontiguousarray(values, np.float32)
    if type_name in _FLOATS:
        encoded = gguf.quants.quantize(values, GGMLQuantizationType[type_name])
        return encoded.view(np.uint8)
    block_len, block_bytes = block_size(type_name)
    row_len = values.shape[-1]
    if row_len % block_len:
        raise ValueError(f"{type_name} has blocks of {block_len}, rows of {row_len} do not fit")
    out = np.empty((*values.shape[:-1], row_len // block_len * block_bytes), np.uint8)
    importance = np.ones(row_len, np.float32)
    num_bytes = _base().ggml_quantize_chunk(
        _type_id(type_name),
        values.ctypes.data,
        out.ctypes.data,
        0,
        values.size // row_len,
        row_len,
        importance.ctypes.data if _base().ggml_quantize_requires_imatrix(_type_id(type_name)) else None,
    )
    if num_bytes != out.nbytes:
        raise RuntimeError(f"ggml wrote {num_bytes} bytes of {type_name}, expected {out.nbytes}")
    return out


def dequantize(rows: np.ndarray, type_name: str) -> np.ndarray:
    """Decode u8[..., row_bytes] to f32[..., n] with ggml's reference decoder."""
    rows = np.ascontiguousarray(rows, np.uint8)
    block_len, block_bytes = block_size(type_name)
    out = np.empty((*rows.shape[:-1], rows.shape[-1] // block_bytes * block_len), np.float32)
    if type_name == "F32":
        return rows.view(np.float32).reshape(out.shape)
    _decoder(type_name)(rows.ctypes.data, out.ctypes.data, out.size)
    return out


def quantize_gguf(
    src: str | Path, dst: str | Path, recipe: str | Rules, *, repeat_experts: bool = False
) -> Counter[str]:
    """Write a quantised variant of a file and count its tensors by type.

    Args:
        src: any file that `read_tensors` reads.
        dst: where to write; replaced in one step.
        recipe: a key of `RECIPES`, or rules.
        repeat_experts: encode one expert per stack and repeat it: for measurements with types that encode slowly.
    """
    rules = RECIPES[recipe] if isinstance(recipe, str) else recipe

    def convert(tensor: StoredTensor, type_name: str) -> np.ndarray:
        values = dequantize(tensor.rows, tensor.type_name)
        if repeat_experts and values.ndim == 3 and type_name not in _FLOATS:
            return np.repeat(quantize(values[:1], type_name), len(values), axis=0)
        return quantize(values, type_name)

    return rewrite_gguf(src, dst, lambda tensor: _type_for(tensor, rules), convert)


def expand_gguf(src: str | Path, dst: str | Path) -> None:
    """Write a file with every tensor decoded to F32: by gguf-py, which is independent of ggml, and for Q2_0 by ggml."""

    def convert(tensor: StoredTensor, _: str) -> np.ndarray:
        if tensor.type_name == "Q2_0":
            return dequantize(tensor.rows, "Q2_0").view(np.uint8)
        ggml_type = GGMLQuantizationType[tensor.type_name]
        rows = tensor.rows.view(np.float32 if tensor.type_name == "F32" else np.float16 if ggml_type == 1 else np.uint8)
        values = np.ascontiguousarray(gguf.quants.dequantize(rows, ggml_type), np.float32)
        return values.view(np.uint8)

    rewrite_gguf(src, dst, lambda _: "F32", convert)


def rewrite_gguf(
    src: str | Path,
    dst: str | Path,
    type_for: Callable[[StoredTensor], str],
    convert: Callable[[StoredTensor, str], np.ndarray],
) -> Counter[str]:
    """Copy a file's metadata and write each tensor as `convert(tensor, type_for(tensor))`, u8[..., row_bytes]."""
    counts: Counter[str] = Counter()
    with replaced_on_success(Path(dst)) as unfinished, _q2_0_known():
        reader = gguf.GGUFReader(src)
        writer = gguf.GGUFWriter(unfinished, reader.fields["general.architecture"].contents())
        try:
            _copy_metadata(reader, writer)
            planned: list[tuple[StoredTensor, str]] = []
            for tensor in _tensors(reader):
                type_name = type_for(tensor)
                block_len, block_bytes = block_size(type_name)
                num_bytes = int(np.prod(tensor.shape, dtype=np.int64)) // block_len * block_bytes
                type_id = GGMLQuantizationType(_type_id(type_name))
                writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), num_bytes, type_id)
                planned.append((tensor, type_name))
                counts[type_name] += 1
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor, type_name in planned:
                writer.write_tensor_data(convert(tensor, type_name))
        finally:
            writer.close()
    return counts


def read_tensors(path: str | Path) -> list[StoredTensor]:
    """List a file's tensors with gguf-py; the rows are views on the mapped file."""
    with _q2_0_known():
        return list(_tensors(gguf.GGUFReader(path)))


def _type_for(tensor: StoredTensor, rules: Rules) -> str:
    if len(tensor.shape) < 2 or _ALWAYS_F32.search(tensor.name):
        return "F32"
    type_name = next((name for pattern, name in rules if re.search(pattern, tensor.name)), "F32")
    for candidate in (type_name, FALLBACK.get(type_name, type_name)):
        if tensor.shape[-1] % block_size(candidate)[0] == 0:
            return candidate
    return "F16"


def _tensors(reader: gguf.GGUFReader) -> Iterator[StoredTensor]:
    for tensor in reader.tensors:
        shape = tuple(int(d) for d in reversed(tensor.shape))
        rows = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(*shape[:-1], -1)
        yield StoredTensor(tensor.name, shape, _type_name(tensor.tensor_type), rows)


def _copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", "general.file_type"):
            item_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], item_type)


@functools.cache
def _base() -> ctypes.CDLL:
    base = ctypes.CDLL(os.fspath(loadable_library_dir() / "libggml-base.so.0"))
    base.ggml_quantize_chunk.restype = ctypes.c_size_t
    base.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    base.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    return base


def _decoder(type_name: str) -> Callable[[int, int, int], None]:
    names = {"F16": "ggml_fp16_to_fp32_row", "BF16": "ggml_bf16_to_fp32_row"}
    lower = type_name.lower().replace("_k", "_K")
    function = getattr(_base(), names.get(type_name, f"dequantize_row_{lower}"))
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    return function


def _type_id(type_name: str) -> int:
    return Q2_0_ID if type_name == "Q2_0" else int(GGMLQuantizationType[type_name])


def _type_name(ggml_type: int) -> str:
    return "Q2_0" if int(ggml_type) == Q2_0_ID else GGMLQuantizationType(ggml_type).name


@contextmanager
def _q2_0_known() -> Iterator[None]:
    """Let gguf-py read and write type 42 inside the block."""
    by_value = GGMLQuantizationType._value2member_map_
    if Q2_0_ID in by_value:
        yield
        return
    member = int.__new__(GGMLQuantizationType, Q2_0_ID)
    member._name_, member._value_ = "Q2_0", Q2_0_ID
    by_value[Q2_0_ID] = member
    gguf.GGML_QUANT_SIZES[member] = (Q2_0_BLOCK_LEN, Q2_0_BLOCK_BYTES)
    try:
        yield
    finally:
        del by_value[Q2_0_ID]
        del gguf.GGML_QUANT_SIZES[member]

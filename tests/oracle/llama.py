"""llama.cpp on the CPU as a numerical reference: logits, greedy text, any tensor of the graph, the draft block.

Driven through `libllama` directly. F32 files agree with an exact implementation to about 1e-5 at a logit deviation of
1.4. On quantised files llama.cpp rounds activations to 8 bits and differs from exact products by up to 0.35, so compare
tightly only with the F32 expansion of a file (`ggml.expand_gguf`).
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .glibc import loadable_library_dir

GGML_TYPE_IDS = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}
SHOW_LOG_VARIABLE = "STRATA_ORACLE_LOG"  # set it to see llama.cpp's warnings and errors
_MTP_CONTEXT = 1
_LOG_LEVEL_WARN, _LOG_LEVEL_CONT = 3, 5
_NUMPY_DTYPES = {0: np.float32, 1: np.float16, 24: np.int8, 25: np.int16, 26: np.int32, 27: np.int64, 28: np.float64}


class _TensorHead(ctypes.Structure):
    """The leading fields of `struct ggml_tensor`."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    ]


@dataclass(frozen=True, slots=True)
class Native:
    """The loaded libraries: `ffi` and `lib` for llama.h, the rest for what that header lacks."""

    ffi: Any
    lib: Any
    base: ctypes.CDLL
    set_hidden: Any
    get_hidden: Any
    log_callback: Any


@functools.cache
def native() -> Native:
    """Load the libraries once per process."""
    from llama_cpp_py_sync._cffi_bindings import get_ffi

    folder = loadable_library_dir()
    ffi: Any = get_ffi()
    lib: Any = ffi.dlopen(str(folder / "libllama.so"))
    base = ctypes.CDLL(str(folder / "libggml-base.so.0"))
    base.ggml_get_name.argtypes, base.ggml_get_name.restype = [ctypes.c_void_p], ctypes.c_char_p
    base.ggml_nbytes.argtypes, base.ggml_nbytes.restype = [ctypes.c_void_p], ctypes.c_size_t
    base.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    # the wide hidden rows that feed a draft block are reached through C++ functions that llama.h does not declare
    cxx = ctypes.CDLL(str(folder / "libllama.so"))
    set_hidden = cxx["_Z26llama_set_embeddings_nextnP13llama_contextbb"]
    set_hidden.argtypes, set_hidden.restype = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool], None
    get_hidden = cxx["_Z30llama_get_embeddings_nextn_ithP13llama_contexti"]
    get_hidden.argtypes, get_hidden.restype = [ctypes.c_void_p, ctypes.c_int32], ctypes.POINTER(ctypes.c_float)
    show = bool(os.environ.get(SHOW_LOG_VARIABLE))

    @ffi.callback("void(enum ggml_log_level, const char *, void *)")
    def log(level: int, text: Any, _: Any) -> None:
        if show and level >= _LOG_LEVEL_WARN and level != _LOG_LEVEL_CONT:
            sys.stderr.write(ffi.string(text).decode("utf-8", "replace"))

    lib.llama_log_set(log, ffi.NULL)
    lib.llama_backend_init()
    return Native(ffi, lib, base, set_hidden, get_hidden, log)


class Model:
    """A loaded file. Close it, or use it as a context manager through `contextlib.closing`."""

    def __init__(self, path: str | Path, *, load_mtp: bool = False) -> None:
        self.native = native()
        ffi, lib = self.native.ffi, self.native.lib
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        params.load_mtp = load_mtp
        self.handle = lib.llama_model_load_from_file(str(path).encode(), params)
        if self.handle == ffi.NULL:
            raise RuntimeError(f"llama.cpp could not load {path}; set {SHOW_LOG_VARIABLE}=1 to see why")
        self.vocab = lib.llama_model_get_vocab(self.handle)
        self.num_tokens = lib.llama_vocab_n_tokens(self.vocab)
        self.hidden_width = lib.llama_model_n_embd_out(self.handle)

    def close(self) -> None:
        """Free the model; its contexts must be closed before."""
        if self.handle != self.native.ffi.NULL:
            self.native.lib.llama_model_free(self.handle)
            self.handle = self.native.ffi.NULL

    def tokenize(self, text: str, *, parse_special: bool = True, add_special: bool = False) -> list[int]:
        """Encode text to token ids."""
        data = text.encode()
        buffer = self.native.ffi.new("llama_token[]", len(data) + 8)
        count = self.native.lib.llama_tokenize(
            self.vocab, data, len(data), buffer, len(data) + 8, add_special, parse_special
        )
        return [buffer[i] for i in range(count)]

    def token_bytes(self, token_id: int, *, special: bool = True) -> bytes:
        """Return the bytes that a token stands for; control tokens give b"" unless `special`."""
        buffer = self.native.ffi.new("char[]", 256)
        count = self.native.lib.llama_token_to_piece(self.vocab, token_id, buffer, 256, 0, special)
        return bytes(self.native.ffi.buffer(buffer, count)[:])

    def detokenize(self, token_ids: Iterable[int]) -> bytes:
        """Concatenate the bytes of tokens, control tokens included."""
        return b"".join(self.token_bytes(token_id) for token_id in token_ids)


class Context:
    """One sequence decoded by a model: K/V cells, recurrent states, logits.

    Args:
        model: where the weights are.
        num_cells: capacity in tokens.
        batch_tokens: most tokens of one `run`.
        num_threads: 1 by default: test workers share the cores, and idle llama.cpp threads spin.
        kv: K/V cell type, a key of `GGML_TYPE_IDS`, or one for K and one for V.
        draft_for: the trunk's context, which makes this one the draft block's.
        num_rollbacks: how many tokens `remove` can undo of the recurrent state.
        watch: regular expression of graph tensors to record in `seen`, as (name, array) in order of computation.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_cells: int = 512,
        batch_tokens: int = 512,
        kv: str | tuple[str, str] = "f32",
        num_threads: int = 1,
        flash: bool = False,
        draft_for: Context | None = None,
        num_rollbacks: int = 0,
        watch: str | None = None,
    ) -> None:
        self.model, self.native = model, model.native
        ffi, lib = self.native.ffi, self.native.lib
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = num_cells, batch_tokens, batch_tokens
        params.n_seq_max, params.kv_unified = 1, True
        params.n_threads = params.n_threads_batch = num_threads
        key_type, value_type = (kv, kv) if isinstance(kv, str) else kv
        params.type_k, params.type_v = GGML_TYPE_IDS[key_type], GGML_TYPE_IDS[value_type]
        params.flash_attn_type = int(flash)
        params.n_rs_seq = num_rollbacks
        if draft_for is not None:
            params.ctx_type = _MTP_CONTEXT
            params.ctx_other = draft_for.handle
        self.seen: list[tuple[str, np.ndarray]] = []
        if watch is not None:
            params.cb_eval = self._watch_callback = self._make_watcher(re.compile(watch))
        self.handle = lib.llama_init_from_model(model.handle, params)
        if self.handle == ffi.NULL:
            raise RuntimeError(f"llama.cpp could not create a context; set {SHOW_LOG_VARIABLE}=1 to see why")
        self._address = int(ffi.cast("uintptr_t", self.handle))
        self._memory = lib.llama_get_memory(self.handle)
        self.batch_tokens = lib.llama_n_batch(self.handle)

    def close(self) -> None:
        """Free the context."""
        if self.handle != self.native.ffi.NULL:
            self.native.lib.llama_free(self.handle)
            self.handle = self.native.ffi.NULL

    def clear(self) -> None:
        """Forget the sequence."""
        self.native.lib.llama_memory_clear(self._memory, True)

    def keep_hidden(self, *, only_outputs: bool) -> None:
        """Make `hidden` available for the next runs, for every token or only for those with logits."""
        self.native.set_hidden(self._address, True, only_outputs)

    def hidden(self, row: int) -> np.ndarray:
        """Return the wide residual row f32[num_streams * width] of one token of the last run."""
        return np.ctypeslib.as_array(self.native.get_hidden(self._address, row), (self.model.hidden_width,)).copy()

    def remove(self, first_position: int) -> bool:
        """Drop the tokens from a position on; False when the recurrent state cannot go back that far."""
        return bool(self.native.lib.llama_memory_seq_rm(self._memory, 0, first_position, -1))

    def state_bytes(self) -> int:
        """Size of the sequence's saved state."""
        return self.native.lib.llama_state_seq_get_size(self.handle, 0)

    def run(
        self,
        token_ids: Sequence[int],
        first_position: int,
        *,
        rows: Literal["all", "last"] = "all",
        hidden: np.ndarray | None = None,
    ) -> np.ndarray:
        """Decode one batch and return f32 logits, [T, V] or [1, V].

        Args:
            token_ids: T ids at consecutive positions.
            first_position: position of the first one.
            rows: which tokens' logits to return.
            hidden: f32[T, num_streams * width], for a draft block's context: the row paired with each token.
        """
        ffi, lib = self.native.ffi, self.native.lib
        count = len(token_ids)
        wanted = range(count) if rows == "all" else range(count - 1, count)
        batch = lib.llama_batch_ext_init(self.handle)
        kept: list[Any] = []  # what the batch points to must outlive it
        try:
            for i, token_id in enumerate(token_ids):
                idx = lib.llama_batch_ext_add_token(batch, 0, int(token_id))
                lib.llama_batch_ext_set_pos(batch, idx, ffi.new("llama_pos[4]", [first_position + i] * 3 + [0]))
                lib.llama_batch_ext_set_output_logits(batch, idx, i in wanted)
                if hidden is not None:
                    row = np.ascontiguousarray(hidden[i], np.float32)
                    state = ffi.new("struct llama_embd *", [ffi.cast("float *", row.ctypes.data), 1, row.size])
                    kept += [row, state]
                    if not lib.llama_batch_ext_set_embd_state(batch, idx, state[0]):
                        raise RuntimeError("llama.cpp refused the hidden row of a draft batch")
            code = lib.llama_process(self.handle, 1, batch)
            if code != 0:
                raise RuntimeError(f"llama_process returned {code} for {count} tokens at position {first_position}")
            return np.stack([self._logits(i) for i in wanted])
        finally:
            lib.llama_batch_ext_free(batch)

    def prefill(self, token_ids: Sequence[int], *, rows: Literal["all", "last"] = "all") -> np.ndarray:
        """Decode a prompt from position 0 in as many batches as needed; returns the logits of `run`, joined."""
        starts = range(0, len(token_ids), self.batch_tokens)
        return np.concatenate([self.run(token_ids[i : i + self.batch_tokens], i, rows=rows) for i in starts])

    def _logits(self, row: int) -> np.ndarray:
        num_bytes = 4 * self.model.num_tokens
        pointer = self.native.lib.llama_get_logits_ith(self.handle, row)
        return np.frombuffer(self.native.ffi.buffer(pointer, num_bytes), np.float32).copy()

    def _make_watcher(self, pattern: re.Pattern[str]) -> Any:
        ffi, base = self.native.ffi, self.native.base

        @ffi.callback("bool(struct ggml_tensor *, bool, void *)")
        def watch(tensor: Any, ask: bool, _: Any) -> bool:
            address = int(ffi.cast("uintptr_t", tensor))
            name = base.ggml_get_name(address).decode()
            if ask:
                return pattern.fullmatch(name) is not None
            self.seen.append((name, _tensor_values(base, address)))
            return True

        return watch


def logits(path: str | Path, token_ids: Sequence[int], *, kv: str | tuple[str, str] = "f32") -> np.ndarray:
    """Return f32[T, V] logits of one prompt, computed in one batch."""
    with closing(Model(path)) as model, closing(_context_for(model, len(token_ids), kv)) as context:
        return context.run(token_ids, 0)


def dump(path: str | Path, token_ids: Sequence[int], names: str) -> tuple[np.ndarray, list[tuple[str, np.ndarray]]]:
    """Return the logits of one batch and every graph tensor whose name matches the regular expression `names`."""
    with closing(Model(path)) as model, closing(_context_for(model, len(token_ids), "f32", watch=names)) as context:
        return context.run(token_ids, 0), context.seen


def mtp_logits(path: str | Path, token_ids: Sequence[int]) -> np.ndarray:
    """Return the draft block's f32[T, V] logits for every position of a prompt.

    Position p is fed token p and the trunk's wide hidden row of position p-1 (zeros for the first), in one batch.
    """
    return mtp_dump(path, token_ids, None)[0]


def mtp_dump(
    path: str | Path, token_ids: Sequence[int], names: str | None
) -> tuple[np.ndarray, list[tuple[str, np.ndarray]]]:
    """Like `mtp_logits`, and return the draft graph's tensors whose names match."""
    count = len(token_ids)
    with (
        closing(Model(path, load_mtp=True)) as model,
        closing(_context_for(model, count, "f32")) as trunk,
        closing(_context_for(model, count, "f32", draft_for=trunk, watch=names)) as draft,
    ):
        trunk.keep_hidden(only_outputs=False)
        draft.keep_hidden(only_outputs=True)
        trunk.run(token_ids, 0)
        return draft.run(token_ids, 0, hidden=_shifted(trunk, count)), draft.seen


def greedy(path: str | Path, prompt_ids: Sequence[int], num_tokens: int, *, kv: str = "f32") -> list[int]:
    """Return the most likely continuation, one token at a time, without drafts."""
    total = len(prompt_ids) + num_tokens
    with closing(Model(path)) as model, closing(_context_for(model, total, kv)) as context:
        row = context.prefill(prompt_ids, rows="last")[-1]
        out: list[int] = []
        for i in range(num_tokens):
            out.append(int(row.argmax()))
            row = context.run(out[-1:], len(prompt_ids) + i)[-1]
        return out


@dataclass(frozen=True, slots=True)
class DraftedText:
    """What a draft-and-verify loop produced, and how many drafts it took."""

    token_ids: list[int]
    num_drafted: int
    num_accepted: int
    num_rounds: int


def speculative(
    path: str | Path,
    prompt_ids: Sequence[int],
    num_tokens: int,
    *,
    num_drafts: int,
    draft_path: str | Path | None = None,
) -> DraftedText:
    """Continue greedily with `num_drafts` drafts a round; in F32 the text equals that of `greedy`.

    Args:
        draft_path: a file with only the draft block; None takes the block of `path`.
    """
    count = len(prompt_ids)
    total = count + num_tokens + num_drafts + 1
    with (
        closing(Model(path, load_mtp=draft_path is None)) as model,
        closing(Model(draft_path or path, load_mtp=True)) as draft_model,
        closing(_context_for(model, total, "f32", num_rollbacks=num_drafts)) as trunk,
        closing(_context_for(draft_model, total, "f32", draft_for=trunk)) as draft,
    ):
        trunk.keep_hidden(only_outputs=False)
        draft.keep_hidden(only_outputs=True)
        out = [int(trunk.run(prompt_ids, 0)[-1].argmax())]
        draft.run(prompt_ids, 0, rows="last", hidden=_shifted(trunk, count))
        last_hidden, position = trunk.hidden(count - 1), count  # `position` is where out[-1] goes
        num_accepted = num_rounds = 0
        while len(out) < num_tokens:
            drafts = _draft(draft, out[-1], position, last_hidden, num_drafts)
            draft.remove(position)  # rows made from the draft block's own hidden state are rewritten below
            window = [out[-1], *drafts]
            choices = trunk.run(window, position).argmax(-1).tolist()
            rows = np.stack([trunk.hidden(i) for i in range(len(window))])
            accepted = next((i for i in range(num_drafts) if choices[i] != drafts[i]), num_drafts)
            paired = np.concatenate([last_hidden[None], rows[:accepted]])
            draft.run(window[: accepted + 1], position, rows="last", hidden=paired)
            if accepted < num_drafts and not trunk.remove(position + accepted + 1):
                raise RuntimeError(f"llama.cpp could not go back to position {position + accepted}")
            out += [*drafts[:accepted], choices[accepted]]
            last_hidden, position = rows[accepted], position + accepted + 1
            num_accepted, num_rounds = num_accepted + accepted, num_rounds + 1
        return DraftedText(out[:num_tokens], num_rounds * num_drafts, num_accepted, num_rounds)


def _draft(draft: Context, token_id: int, position: int, hidden: np.ndarray, num_drafts: int) -> list[int]:
    drafts: list[int] = []
    for step in range(num_drafts):
        token_id = int(draft.run([token_id], position + step, hidden=hidden[None])[-1].argmax())
        hidden = draft.hidden(0)
        drafts.append(token_id)
    return drafts


def _shifted(trunk: Context, count: int) -> np.ndarray:
    """Pair each token of the last run with the hidden row before it; the first gets zeros."""
    rows = np.stack([trunk.hidden(i) for i in range(count)])
    return np.concatenate([np.zeros_like(rows[:1]), rows[:-1]])


def _context_for(model: Model, num_tokens: int, kv: str | tuple[str, str], **options: Any) -> Context:
    cells = max(256, num_tokens + 8)
    return Context(model, num_cells=cells, batch_tokens=cells, kv=kv, **options)


def _tensor_values(base: ctypes.CDLL, address: int) -> np.ndarray:
    """Copy a graph tensor into a row-major array without leading ones; types NumPy lacks come as raw bytes."""
    head = ctypes.cast(address, ctypes.POINTER(_TensorHead)).contents
    raw = np.empty(base.ggml_nbytes(address), np.uint8)
    base.ggml_backend_tensor_get(address, raw.ctypes.data, 0, raw.size)
    dtype = _NUMPY_DTYPES.get(head.type)
    if dtype is None:
        return raw
    values = np.lib.stride_tricks.as_strided(raw.view(dtype), tuple(head.ne)[::-1], tuple(head.nb)[::-1]).copy()
    while values.ndim > 1 and values.shape[0] == 1:
        values = values[0]
    return values

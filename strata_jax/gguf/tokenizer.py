"""The tokenizer that a GGUF carries: byte-level BPE through the `tokenizers` library.

Text is cut at the file's special tokens first (longest first, as llama.cpp does), then split by the pre-tokenizer's
pattern and merged. CONTROL tokens are only recognised where the caller allows it; USER_DEFINED ones always are. Source
of the keys: the GGUF specification's `tokenizer.ggml.*`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from strata_jax.errors import ConfigError, FormatError

PREFIX = "tokenizer.ggml."
KNOWN_MODELS = ("gpt2",)
_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# A pattern for each value of tokenizer.ggml.pre; qwen35 counts combining marks as letters, qwen2 does not.
PATTERNS: Mapping[str, str] = {
    "qwen2": rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    "qwen35": (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
    ),
}
# Names of end-of-text tokens whose id a file may give only by their text.
END_TEXTS = ("<|endoftext|>", "<|im_end|>")
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back.

    Attributes:
        tokens: the text of every id, in the file's byte-level alphabet for normal tokens.
        types: i32[num_tokens], values of `TokenType`.
        eos_ids: ids that end a generation.
        bos_id: the start token, or None.
        add_bos: whether a prompt begins with the start token.
    """

    tokens: Sequence[str]
    types: np.ndarray
    eos_ids: frozenset[int]
    bos_id: int | None
    add_bos: bool
    _bpe: tokenizers.Tokenizer
    _specials: tuple[tuple[str, int, bool], ...]

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build the tokenizer from a file's metadata. Raises FormatError naming the key that is missing or wrong."""
        model, pre = _text(metadata, "model"), _text(metadata, "pre")
        if model not in KNOWN_MODELS:
            raise FormatError(f"{PREFIX}model={model!r}: this program reads {', '.join(KNOWN_MODELS)}")
        if pre not in PATTERNS:
            raise FormatError(f"{PREFIX}pre={pre!r}: this program knows the pre-tokenizers {', '.join(PATTERNS)}")
        tokens = list(_texts(metadata, "tokens"))
        types = _types(metadata, len(tokens))
        vocab = {text: i for i, text in enumerate(tokens)}
        if len(vocab) != len(tokens):
            twice = next(i for i, text in enumerate(tokens) if vocab[text] != i)
            raise FormatError(f"{PREFIX}tokens: {tokens[twice]!r} stands at {twice} and at {vocab[tokens[twice]]}")
        ids = {key: _id(metadata, key, len(tokens)) for key in (*END_KEYS, "bos_token_id", "padding_token_id")}
        is_control = lambda text: text in vocab and types[vocab[text]] == TokenType.CONTROL  # noqa: E731
        ends = {ids[key] for key in END_KEYS} | {vocab[text] for text in END_TEXTS if is_control(text)}
        special = list(np.flatnonzero((types == TokenType.CONTROL) | (types == TokenType.USER_DEFINED)))
        special.sort(key=lambda i: len(tokens[i].encode()), reverse=True)
        return cls(
            tokens=tokens,
            types=types,
            eos_ids=frozenset(i for i in ends if i is not None),
            bos_id=ids["bos_token_id"],
            add_bos=bool(metadata.get(f"{PREFIX}add_bos_token", False)),
            _bpe=_build(vocab, _merges(metadata, vocab), PATTERNS[pre]),
            _specials=tuple((tokens[i], int(i), types[i] == TokenType.CONTROL) for i in special if tokens[i]),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def control_texts(self) -> tuple[str, ...]:
        """The texts of all CONTROL tokens."""
        return tuple(text for text, _, control in self._specials if control)

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Return the ids of a text. Without ``parse_special`` no CONTROL token comes out, whatever the text says."""
        ids: list[int] = []
        for piece in self.split_special(text, parse_special=parse_special):
            ids += [piece] if isinstance(piece, int) else self.encode_plain(piece)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text in which special tokens are not looked for."""
        try:
            return self._bpe.encode(text, add_special_tokens=False).ids if text else []
        except (UnicodeEncodeError, TypeError) as error:
            raise ConfigError(f"the text is not valid Unicode (it holds half of a surrogate pair): {error}") from error

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a whole prompt, special tokens recognised, with one start token if the file wants it."""
        return self.with_bos(self.encode(text, parse_special=True))

    def with_bos(self, ids: list[int]) -> list[int]:
        """Put the start token in front if the file wants one and the text did not write it."""
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def split_special(self, text: str, *, parse_special: bool) -> list[str | int]:
        """Cut a text at its special tokens: pieces of text, and ids."""
        pieces: list[str | int] = [text]
        for special, token_id, control in self._specials:
            if special not in text or (control and not parse_special):
                continue
            cut: list[str | int] = []
            for piece in pieces:
                if isinstance(piece, int) or special not in piece:
                    cut.append(piece)
                    continue
                for i, part in enumerate(piece.split(special)):
                    cut += [token_id, part] if i else [part]
            pieces = cut
        return [piece for piece in pieces if piece != ""]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token adds to the text: nothing for control and unused tokens."""
        kind, text = self.types[token_id], self.tokens[token_id]
        if kind in (TokenType.CONTROL, TokenType.UNUSED, TokenType.UNKNOWN):
            return b""
        if kind == TokenType.USER_DEFINED:
            return text.encode()
        return b"".join(_BYTE_OF[c].to_bytes() if c in _BYTE_OF else c.encode() for c in text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", "replace")


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE files (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF: Mapping[str, int] = _byte_alphabet()


def _build(vocab: dict[str, int], merges: list[tuple[str, str]], pattern: str) -> tokenizers.Tokenizer:
    bpe = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    return bpe


def _merges(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for i, line in enumerate(_texts(metadata, "merges")):
        left, _, right = line[1:].partition(" ")  # a part may itself begin with a space only in broken files
        left = line[:1] + left
        if not right or left not in vocab or right not in vocab or left + right not in vocab:
            raise FormatError(f"{PREFIX}merges: entry {i}, {line!r}, does not join two tokens of the file into a third")
        merges.append((left, right))
    return merges


def _text(metadata: Mapping[str, Any], key: str) -> str:
    value = metadata.get(PREFIX + key)
    if not isinstance(value, str):
        found = "is missing" if value is None else f"is a {type(value).__name__}, expected a string"
        raise FormatError(f"{PREFIX}{key} {found}; the file has no usable tokenizer")
    return value


def _texts(metadata: Mapping[str, Any], key: str) -> Sequence[str]:
    value = metadata.get(PREFIX + key)
    if isinstance(value, str) or not isinstance(value, Sequence) or not value or not isinstance(value[0], str):
        found = "is missing" if value is None else "is not a list of strings, or is empty"
        raise FormatError(f"{PREFIX}{key} {found}; the file has no usable tokenizer")
    return value


def _types(metadata: Mapping[str, Any], num_tokens: int) -> np.ndarray:
    value = metadata.get(f"{PREFIX}token_type")
    if value is None:
        return np.full(num_tokens, TokenType.NORMAL, np.int32)
    types = np.asarray(value)
    if types.dtype.kind not in "iu" or types.shape != (num_tokens,):
        raise FormatError(f"{PREFIX}token_type: expected {num_tokens} integers (one a token), found {types.size}")
    return types.astype(np.int32)


def _id(metadata: Mapping[str, Any], key: str, num_tokens: int) -> int | None:
    value = metadata.get(PREFIX + key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < num_tokens:
        raise FormatError(f"{PREFIX}{key}={value!r}: expected an id from 0 to {num_tokens - 1}")
    return int(value)

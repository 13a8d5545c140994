"""The tokenizer that a GGUF carries: byte-level BPE through the `tokenizers` library.

Text is cut at the file's special tokens first (longest first, as llama.cpp does), then split by the pre-tokenizer's
pattern and merged. CONTROL and UNKNOWN tokens are only recognised where the caller allows it; USER_DEFINED ones always
are; UNUSED ones never come out. The ids are those of llama.cpp, but for characters newer than its Unicode tables
(those of Unicode 16), which `tokenizers` already knows as letters or marks. Text is taken as it is, not normalised.
Source of the keys: the GGUF specification's `tokenizer.ggml.*`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Regex, models, pre_tokenizers

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
# Texts of end tokens: these end a generation and are CONTROL tokens whatever else the file says, as in llama.cpp.
END_TEXTS = ("<|endoftext|>", "<|im_end|>")
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
ID_KEYS = (*END_KEYS, "bos_token_id", "padding_token_id")
MAX_SPACE_RUN = 4_000_000  # the pattern's matcher gives up after 10 million steps back in one run (onig 6.9)


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
        eos_id, bos_id, pad_id: the end, start and padding token of the file's own keys, or None.
        add_bos: whether a prompt begins with the start token.
    """

    tokens: Sequence[str]
    types: np.ndarray
    eos_ids: frozenset[int]
    eos_id: int | None
    bos_id: int | None
    pad_id: int | None
    add_bos: bool
    _bpe: tokenizers.Tokenizer
    _specials: tuple[tuple[str, int, bool], ...]

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build the tokenizer from a file's metadata. Raises FormatError naming the key that is missing or wrong."""
        _choice(metadata, "model", KNOWN_MODELS)
        pattern = PATTERNS[_choice(metadata, "pre", tuple(PATTERNS))]
        tokens = _texts(metadata, "tokens")
        vocab = {text: i for i, text in enumerate(tokens)}
        if len(vocab) != len(tokens):
            first = next(i for i, text in enumerate(tokens) if vocab[text] != i)
            raise FormatError(
                f"{PREFIX}tokens: expected every text once, found {tokens[first]!r} as token {first} and as token "
                f"{vocab[tokens[first]]}"
            )
        types = _types(metadata, len(tokens))
        types[[vocab[text] for text in END_TEXTS if text in vocab]] = TokenType.CONTROL
        ids = {key: _id(metadata, key, len(tokens)) for key in ID_KEYS}
        add_bos = _flag(metadata, "add_bos_token")
        if add_bos and ids["bos_token_id"] is None:
            raise FormatError(f"{PREFIX}add_bos_token is true and {PREFIX}bos_token_id is missing; expected an id")
        ends = {ids[key] for key in END_KEYS} | {vocab.get(text) for text in END_TEXTS}
        return cls(
            tokens=tokens,
            types=types,
            eos_ids=frozenset(i for i in ends if i is not None),
            eos_id=ids["eos_token_id"],
            bos_id=ids["bos_token_id"],
            pad_id=ids["padding_token_id"],
            add_bos=add_bos,
            _bpe=_build(_plain_tokens(vocab, types), _merges(metadata, vocab, types), pattern),
            _specials=_special_tokens(tokens, types),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def control_texts(self) -> tuple[str, ...]:
        """The texts of all tokens that only ``parse_special`` brings out."""
        return tuple(text for text, _, control in self._specials if control)

    def is_hidden(self, token_id: int) -> bool:
        """Whether only ``parse_special`` brings the token out: CONTROL and UNKNOWN."""
        return self.types[token_id] in (TokenType.CONTROL, TokenType.UNKNOWN)

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Return the ids of a text. Without ``parse_special`` no CONTROL token comes out, whatever the text says.

        Raises ConfigError for text that is not Unicode, and for a run of spaces that the splitter cannot take.
        """
        _check_text(text)
        ids: list[int] = []
        for piece in self.split_special(text, parse_special=parse_special):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._bpe.encode(piece, add_special_tokens=False).ids
        return ids

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
        """Return the bytes a token adds to the text: nothing for control, unknown and unused tokens."""
        if not 0 <= token_id < len(self.tokens):
            raise ValueError(f"token id {token_id}: this vocabulary has the ids 0 to {len(self.tokens) - 1}")
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


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the text is not valid Unicode: character {error.start} is U+{ord(text[error.start]):04X}, half of a "
            "surrogate pair. Give the whole character, or U+FFFD in its place"
        ) from error
    if len(text) > MAX_SPACE_RUN:
        longest = max((len(run.group()) for run in re.finditer(r"\s+", text)), default=0)
        if longest > MAX_SPACE_RUN:
            raise ConfigError(
                f"the text has {longest:,} spaces or line ends in a row; the tokenizer takes {MAX_SPACE_RUN:,} at most"
            )


def _build(vocab: dict[str, int], merges: list[tuple[str, str]], pattern: str) -> tokenizers.Tokenizer:
    bpe = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return bpe


def _special_tokens(tokens: Sequence[str], types: np.ndarray) -> tuple[tuple[str, int, bool], ...]:
    """Return (text, id, hidden) of the tokens that are matched before splitting, longest first."""
    kinds = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    found = [i for i in np.flatnonzero(np.isin(types, kinds)).tolist() if tokens[i]]
    found.sort(key=lambda i: len(tokens[i].encode()), reverse=True)
    return tuple((tokens[i], i, types[i] != TokenType.USER_DEFINED) for i in found)


def _plain_tokens(vocab: Mapping[str, int], types: np.ndarray) -> dict[str, int]:
    """Return the vocabulary that splitting and merging may produce; it must hold every byte."""
    hidden = {int(i) for i in np.flatnonzero(~np.isin(types, (TokenType.NORMAL, TokenType.USER_DEFINED)))}
    plain = {text: i for text, i in vocab.items() if i not in hidden}
    missing = [byte for char, byte in _BYTE_OF.items() if char not in plain]
    if missing:
        raise FormatError(
            f"{PREFIX}tokens: expected a normal token for each of the 256 bytes, found none for {len(missing)} of "
            f"them, the first 0x{min(missing):02x}: text with these bytes would be lost"
        )
    return plain


def _merges(metadata: Mapping[str, Any], vocab: Mapping[str, int], types: np.ndarray) -> list[tuple[str, str]]:
    """Return the pairs in order; of equal ones the first counts."""
    merges: dict[tuple[str, str], None] = {}
    plain = np.isin(types, (TokenType.NORMAL, TokenType.USER_DEFINED)).tolist()
    for i, line in enumerate(_texts(metadata, "merges")):
        split = line.find(" ", 1)  # a part has at least one character, which in broken files is a space
        left, right = line[: max(split, 0)], line[split + 1 :]
        ids = vocab.get(left), vocab.get(right), vocab.get(left + right)
        if split < 0 or not all(token_id is not None and plain[token_id] for token_id in ids):
            raise FormatError(
                f"{PREFIX}merges: entry {i} is {line!r}; expected two normal tokens of the file with a space between "
                "them, whose texts together are a third"
            )
        merges[left, right] = None
    return list(merges)


def _choice(metadata: Mapping[str, Any], key: str, known: Sequence[str]) -> str:
    value = metadata.get(PREFIX + key)
    if not isinstance(value, str) or value not in known:
        raise FormatError(f"{PREFIX}{key}: expected {' or '.join(known)}, found {_shown(value)}")
    return value


def _texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(PREFIX + key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise FormatError(f"{PREFIX}{key}: expected a list of strings, found {_shown(value)}")
    return value


def _types(metadata: Mapping[str, Any], num_tokens: int) -> np.ndarray:
    value = metadata.get(f"{PREFIX}token_type")
    if value is None:
        return np.full(num_tokens, TokenType.NORMAL, np.int32)
    types = np.asarray(value)
    if types.dtype.kind not in "iu" or types.shape != (num_tokens,):
        raise FormatError(
            f"{PREFIX}token_type: expected {num_tokens} integers, one for each token, found {_shown(value)}"
        )
    wrong = np.flatnonzero((types < min(TokenType)) | (types > max(TokenType)))
    if wrong.size:
        raise FormatError(
            f"{PREFIX}token_type: expected values from {min(TokenType):d} to {max(TokenType):d}, found "
            f"{types[wrong[0]]} for token {wrong[0]}"
        )
    return types.astype(np.int32)


def _id(metadata: Mapping[str, Any], key: str, num_tokens: int) -> int | None:
    value = metadata.get(PREFIX + key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < num_tokens:
        raise FormatError(f"{PREFIX}{key}: expected an id from 0 to {num_tokens - 1}, found {_shown(value)}")
    return int(value)


def _flag(metadata: Mapping[str, Any], key: str) -> bool:
    value = metadata.get(PREFIX + key, False)
    if not isinstance(value, bool):
        raise FormatError(f"{PREFIX}{key}: expected true or false, found {_shown(value)}")
    return value


def _shown(value: object) -> str:
    """Say what a key holds, briefly: a hostile file may hold megabytes."""
    if value is None:
        return "no such key"
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else f"{value[:60]!r} and {len(value) - 60:,} more characters"
    if isinstance(value, list | np.ndarray):
        kind = value.dtype.name if isinstance(value, np.ndarray) else type(value[0]).__name__ if value else "no"
        return f"a list of {len(value)} {kind} values"
    return f"{value!r} ({type(value).__name__})"

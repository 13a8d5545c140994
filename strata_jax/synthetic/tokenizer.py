"""A byte-level BPE vocabulary learned from a few lines of text, stored the way `qwen4exp` files store theirs.

It has the real vocabulary's structure, not its size: 256 byte tokens, merges, unused padding, and the special tokens at
the end. Files keep it in `tokenizer.ggml.*`; the reader is `strata_jax.gguf.tokenizer`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from gguf import TokenType

from strata_jax.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
IMAGE_PAD = "<|image_pad|>"
CONTROL_TOKENS = (
    END_OF_TEXT,
    "<|im_start|>",
    END_OF_TURN,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    IMAGE_PAD,
    "<|video_pad|>",
)
VISIBLE_SPECIAL_TOKENS = (  # matched before splitting like control tokens, but shown as text
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
CHAT_TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"
)
# Changing this text changes the merges, and with them every stored token sequence of the tests.
_TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog. A small model reads a small text and learns which pairs of\n"
    "letters go together. In the beginning there were only bytes, and each byte was a token of its own; then the most\n"
    "frequent pairs were merged, and merged again, until the common words were single tokens. Numbers such as "
    "2048 and\n"
    "4096 stay digits. def main(args): return [x * 2 for x in range(10) if x % 3 != 0]  # code, with spaces "
    "and symbols\n"
    "What is the capital of France? The capital of France is Paris. What is two plus two? Two plus two is four.\n"
)
_TRAINING_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token texts in the byte alphabet, their `TokenType` values, and the merges ("a b"), best first."""

    tokens: list[str]
    types: list[TokenType]
    merges: list[str]

    def id_of(self, token: str) -> int:
        """Return the id of a token's exact text."""
        return self.tokens.index(token)


def byte_alphabet() -> dict[int, str]:
    """Map each byte to the printable character that stands for it in a byte-level BPE (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)}


def build_vocabulary(vocab_size: int) -> Vocabulary:
    """Learn merges until `vocab_size` tokens exist; what the text cannot supply becomes unused padding."""
    specials = [*CONTROL_TOKENS, *VISIBLE_SPECIAL_TOKENS]
    num_merges = vocab_size - 256 - len(specials)
    if num_merges < 0:
        raise ConfigError(
            f"vocab_size {vocab_size} is too small: 256 bytes and {len(specials)} special tokens need room"
        )
    alphabet = byte_alphabet()
    tokens = sorted(alphabet.values(), key=ord)
    words = [[alphabet[byte] for byte in word.encode()] for word in _split_words(_TRAINING_TEXT * _TRAINING_REPEATS)]
    merges: list[str] = []
    while len(merges) < num_merges:
        counts = Counter(pair for word in words for pair in itertools.pairwise(word))
        if not counts:
            break
        left, right = max(sorted(counts), key=lambda pair: counts[pair])
        merges.append(f"{left} {right}")
        tokens.append(left + right)
        for word in words:
            _merge_pair(word, left, right)
    types = [TokenType.NORMAL] * len(tokens)
    num_padding = vocab_size - len(specials) - len(tokens)
    tokens += [f"[PAD{len(tokens) + i}]" for i in range(num_padding)]
    types += [TokenType.UNUSED] * num_padding
    tokens += specials
    types += [TokenType.CONTROL] * len(CONTROL_TOKENS) + [TokenType.USER_DEFINED] * len(VISIBLE_SPECIAL_TOKENS)
    return Vocabulary(tokens, types, merges)


def _split_words(text: str) -> list[str]:
    """Cut text into letters-with-one-leading-space and single other characters."""
    words: list[str] = []
    word = ""
    for char in text:
        joins = char.isalpha() and (not word or word[-1].isalpha() or word == " ")
        if joins:
            word += char
        else:
            if word:
                words.append(word)
            word = char
    return [*words, word]


def _merge_pair(word: list[str], left: str, right: str) -> None:
    """Replace every (left, right) of a word by its concatenation, left to right, in place."""
    i = 0
    while i < len(word) - 1:
        if word[i] == left and word[i + 1] == right:
            word[i : i + 2] = [left + right]
        i += 1

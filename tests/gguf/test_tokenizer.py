"""The tokenizer against llama.cpp's on the same vocabulary, and what it refuses.

`dense` vocabularies have a token for every pair of bytes, merged in random order, so that a wrong cut between two words
changes the ids; the synthetic model's has few tokens but the structure of a real one.
"""

from __future__ import annotations

import itertools
import random
import unicodedata
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jax.errors import ConfigError, FormatError
from strata_jax.gguf import tokenizer as tokenizer_module
from strata_jax.gguf.chat import ChatTemplate
from strata_jax.gguf.reader import open_gguf
from strata_jax.gguf.tokenizer import PATTERNS, Tokenizer, TokenType
from strata_jax.synthetic.tokenizer import CONTROL_TOKENS, VISIBLE_SPECIAL_TOKENS, build_vocabulary, byte_alphabet
from tests.oracle import llama
from tests.oracle.models import ModelStore

KEY = "tokenizer.ggml."
SPECIALS = (*CONTROL_TOKENS, *VISIBLE_SPECIAL_TOKENS)
CORPUS = (
    "",
    " ",
    "The quick brown fox jumps over the lazy dog.",
    "I'm you're we've she'll he'd it's don't I'M YOU'RE WE'VE SHE'LL HE'D IT'S DON'T 'tis 'Re'vE 's's '\u017f",
    "0 1 12 123 1234567890 3.14159 1,000,000 0x1F \u0661\u0662\u0663 \u00bd \u2167 \u4e00\u4e8c",
    "a  b   c    d\te\t\tf \t g\n\nh\r\ni\rj \n k\n \n\n  l  \n",
    "   leading and trailing   ",
    "\n\n\n\r\n\r\n \u00a0\u2003\u3000\u200b\u2028\u2029\x0b\x0c\x1c\x1f\x85",
    "def f(x: int) -> str:\n\treturn f'{x!r}' if x != 0 else \"\\n\"  # comment\n\n\nclass A(B):\n    pass\n",
    "#include <stdio.h>\nint main(void) { for (;;) { i++; a[i] |= ~b << 2; } /* x */ }\r\n",
    "Z\u00fcrich na\u00efve caf\u00e9 cafe\u0301 e\u0301\u0302 \u0301start \u1e9e \u0130 \u0131",
    "Привет, мир! Γειά σου κόσμε",
    "你好，世界。こんにちは世界 안녕하세요 한",
    "مرحبا بالعَالَم שָׁלוֹם",
    "नमस्ते दुनिया สวัสดีชาวโลก",
    "😸 👨\u200d👩\u200d👧 🇩🇪 ❤\ufe0f 👍🏽👍 x😸y",
    "\x00 a\x00b \x00\x00\x7f\x80 \ufffd\ufeff\ue000\U000f0000\U0010ffff",
    "!!!???... --- ***\n\n ===\r\n$$$ \u20ac5 \u00a3\u00a5 \u2211\u222b\u221a \u2192 (a) [b] {c} <d> a_b a-b a/b",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n<|endoftext|>",
    "x<|im_start|><|im_start|>y <think> z</think>\n<tool_call>{}</tool_call><|im_start|",
    "<|im_start|> <|im_en d|> <|IM_START|> <<|im_end|>> <|<|im_end|>im_end|> <think<think>> </think",
)
words = st.one_of(
    st.sampled_from(
        (
            *("'s", "'T", "'re", "'VE", "'ll", " ", "  ", "\t", "\n", "\r\n", "\r", "0", "42", "a", "The", " dog", "_"),
            *("\u0301", "é", "你", "😸", "\u200d", "\u00a0", "\x00", "...", "=", "\u0e31", "\u0661"),
        )
    ),
    st.sampled_from(SPECIALS),
    st.sampled_from(SPECIALS).map(lambda text: text[1:]),
    st.sampled_from(SPECIALS).map(lambda text: text[:-1]),
    # of the characters that every version of the tables classifies alike
    st.text(st.characters(codec="utf-8").filter(lambda c: unicodedata.ucd_3_2_0.category(c) != "Cn"), max_size=4),
)


class Vocabulary(llama.Model):
    """A file's vocabulary in llama.cpp, without the weights."""

    def __init__(self, path: Path) -> None:
        self.native = llama.native()
        ffi, lib = self.native.ffi, self.native.lib
        params = lib.llama_model_default_params()
        params.vocab_only = True
        self.handle = lib.llama_model_load_from_file(str(path).encode(), params)
        assert self.handle != ffi.NULL
        self.vocab = lib.llama_model_get_vocab(self.handle)
        self.num_tokens = lib.llama_vocab_n_tokens(self.vocab)


def synthetic_metadata(**changes: Any) -> dict[str, Any]:
    """The tokenizer keys of a synthetic model; a change of None takes a key out."""
    vocabulary = build_vocabulary(512)
    keys = {
        "model": "gpt2",
        "pre": "qwen35",
        "tokens": vocabulary.tokens,
        "token_type": np.array(vocabulary.types, np.int32),
        "merges": vocabulary.merges,
        "bos_token_id": vocabulary.id_of("<|endoftext|>"),
        "eos_token_id": vocabulary.id_of("<|im_end|>"),
        "padding_token_id": vocabulary.id_of("<|endoftext|>"),
        "add_bos_token": False,
    }
    return {KEY + key: value for key, value in (keys | changes).items() if value is not None}


def dense_metadata(pre: str) -> dict[str, Any]:
    """A vocabulary of every byte, every pair of bytes, and many longer tokens, with merges in random order."""
    alphabet = list(byte_alphabet().values())
    chance = random.Random(1)
    pairs = list(itertools.product(alphabet, repeat=2))
    chance.shuffle(pairs)
    longer = {}
    while len(longer) < 4000:
        left, right = chance.choice(pairs), chance.choice(pairs)
        longer["".join(left + right)] = ("".join(left), "".join(right))
    joins = [*pairs, *longer.values()]
    tokens = [*alphabet, *("".join(join) for join in joins), *SPECIALS]
    types = [TokenType.NORMAL] * (len(tokens) - len(SPECIALS))
    types += [TokenType.CONTROL] * len(CONTROL_TOKENS) + [TokenType.USER_DEFINED] * len(VISIBLE_SPECIAL_TOKENS)
    return synthetic_metadata(
        pre=pre,
        tokens=tokens,
        token_type=np.array(types, np.int32),
        merges=[f"{left} {right}" for left, right in joins],
        **{f"{name}_token_id": tokens.index("<|im_end|>") for name in ("bos", "eos", "padding")},
    )


def write_vocabulary(metadata: dict[str, Any], path: Path) -> None:
    writer = GGUFWriter(path, "qwen4exp")
    writer.add_tokenizer_model(metadata[KEY + "model"])
    writer.add_tokenizer_pre(metadata[KEY + "pre"])
    writer.add_token_list(metadata[KEY + "tokens"])
    writer.add_token_types(metadata[KEY + "token_type"].tolist())
    writer.add_token_merges(metadata[KEY + "merges"])
    writer.add_bos_token_id(metadata[KEY + "bos_token_id"])
    writer.add_eos_token_id(metadata[KEY + "eos_token_id"])
    writer.add_add_bos_token(metadata[KEY + "add_bos_token"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.fixture(scope="module")
def pairs(
    models: ModelStore, llama_oracle: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[Tokenizer, llama.Model]]]:
    """Our tokenizer and llama.cpp's, read from the same files."""
    folder = tmp_path_factory.mktemp("vocabularies")
    paths = {"synthetic": models.synthetic("nano")}
    for pre in PATTERNS:
        paths[pre] = folder / f"{pre}.gguf"
        write_vocabulary(dense_metadata(pre), paths[pre])
    with ExitStack() as stack:
        found = {}
        for name, path in paths.items():
            metadata = stack.enter_context(open_gguf(path)).metadata
            found[name] = (Tokenizer.from_gguf(metadata), stack.enter_context(closing(Vocabulary(path))))
        yield found


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(synthetic_metadata())


VOCABULARIES = ["synthetic", *PATTERNS]


# --- equal to llama.cpp


@pytest.mark.parametrize("parse_special", [True, False])
@pytest.mark.parametrize("name", VOCABULARIES)
def test_corpus_gives_llama_cpps_ids(name: str, parse_special: bool, pairs: Any) -> None:
    ours, theirs = pairs[name]
    for text in (*CORPUS, "\n".join(CORPUS), "".join(CORPUS), " ".join(CORPUS * 5)):
        assert ours.encode(text, parse_special=parse_special) == theirs.tokenize(text, parse_special=parse_special), (
            text
        )


@settings(max_examples=300, deadline=None)
@given(st.lists(words, max_size=12).map("".join), st.booleans(), st.sampled_from(VOCABULARIES))
def test_any_text_gives_llama_cpps_ids(pairs: Any, text: str, parse_special: bool, name: str) -> None:
    ours, theirs = pairs[name]
    assert ours.encode(text, parse_special=parse_special) == theirs.tokenize(text, parse_special=parse_special)


@pytest.mark.parametrize("name", PATTERNS)
def test_every_kind_of_character_is_split_as_in_llama_cpp(name: str, pairs: Any) -> None:
    ours, theirs = pairs[name]
    stable = [c for c in map(chr, range(0x110000)) if unicodedata.ucd_3_2_0.category(c) not in ("Cn", "Cs", "Co")]
    for c in (*stable[:1500], *stable[1500::40]):
        text = f"a{c}b {c} 1{c}2  {c}\n{c}'{c}s {c}'s{c}{c} \u0301{c}x{c}  y{c}\r\n {c}!!{c}\n\nABC{c}GHI"
        assert ours.encode(text, parse_special=True) == theirs.tokenize(text), hex(ord(c))


@pytest.mark.parametrize("name", PATTERNS)
def test_contractions_are_cut_off_in_any_case_as_in_llama_cpp(name: str, pairs: Any) -> None:
    ours, theirs = pairs[name]
    spellings = {"".join(case) for word in ("s", "t", "re", "ve", "m", "ll", "d", "n", "l") for case in cases_of(word)}
    for spelling, following in itertools.product(sorted(spellings), "abcdefghijkl"):
        text = f"x'{spelling}{following} '{spelling}{following}z"
        assert ours.encode(text, parse_special=True) == theirs.tokenize(text), text


def cases_of(word: str) -> Iterator[tuple[str, ...]]:
    return itertools.product(*((letter, letter.upper()) for letter in word))


def test_marks_are_letters_for_qwen35_only(pairs: Any) -> None:
    ids = {name: pairs[name][0].encode("ab\u0301\u0301cd\u0301", parse_special=False) for name in PATTERNS}
    assert ids["qwen2"] != ids["qwen35"]


def test_token_bytes_are_llama_cpps(pairs: Any) -> None:
    for name, step in (("synthetic", 1), ("qwen35", 97)):
        ours, theirs = pairs[name]
        for token_id in range(0, ours.num_tokens, step):
            if ours.types[token_id] != TokenType.UNUSED:  # llama.cpp shows [PAD123]
                assert ours.token_bytes(token_id) == theirs.token_bytes(token_id, special=False), token_id


def test_a_twice_listed_merge_counts_where_it_stands_first(tmp_path: Path, llama_oracle: None) -> None:
    metadata = synthetic_metadata()
    merges = metadata[KEY + "merges"]
    metadata[KEY + "merges"] = [*merges, *reversed(merges)]
    write_vocabulary(metadata, tmp_path / "m.gguf")
    ours = Tokenizer.from_gguf(metadata)
    with closing(Vocabulary(tmp_path / "m.gguf")) as theirs:
        for text in CORPUS:
            assert ours.encode(text, parse_special=True) == theirs.tokenize(text)


def test_end_texts_are_control_tokens_whatever_the_file_says(tmp_path: Path, llama_oracle: None) -> None:
    metadata = synthetic_metadata(eos_token_id=0, bos_token_id=0)
    ends = [metadata[KEY + "tokens"].index(text) for text in ("<|endoftext|>", "<|im_end|>")]
    metadata[KEY + "token_type"][ends] = [TokenType.NORMAL, TokenType.USER_DEFINED]
    write_vocabulary(metadata, tmp_path / "m.gguf")
    ours = Tokenizer.from_gguf(metadata)
    assert ours.eos_ids == {0, *ends}
    with closing(Vocabulary(tmp_path / "m.gguf")) as theirs:
        for text, parse_special in itertools.product(CORPUS, (True, False)):
            expected = theirs.tokenize(text, parse_special=parse_special)
            assert ours.encode(text, parse_special=parse_special) == expected


# --- properties


@settings(max_examples=200, deadline=None)
@given(st.lists(words, max_size=12).map("".join))
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, parse_special=False)
    assert tokenizer.decode(ids) == text
    assert not any(tokenizer.is_hidden(i) or tokenizer.types[i] == TokenType.UNUSED for i in ids)


def test_unused_tokens_never_come_out(tokenizer: Tokenizer) -> None:
    unused = [i for i in range(512) if tokenizer.types[i] == TokenType.UNUSED]
    assert unused
    for token_id, parse_special in itertools.product(unused, (True, False)):
        assert token_id not in tokenizer.encode(tokenizer.tokens[token_id], parse_special=parse_special)
        assert tokenizer.token_bytes(token_id) == b""


def test_only_control_tokens_need_to_be_asked_for(tokenizer: Tokenizer) -> None:
    ids = {text: tokenizer.tokens.index(text) for text in ("<|im_start|>", "<think>")}
    assert tokenizer.encode("<|im_start|><think>", parse_special=True) == list(ids.values())
    plain = tokenizer.encode("<|im_start|><think>", parse_special=False)
    assert ids["<|im_start|>"] not in plain
    assert plain[-1] == ids["<think>"]
    assert tokenizer.decode(list(ids.values())) == "<think>"


def test_broken_bytes_decode_to_replacement_characters(tokenizer: Tokenizer) -> None:
    lone = tokenizer.tokens.index(byte_alphabet()[0xF0])
    assert tokenizer.decode([lone, tokenizer.tokens.index("a")]) == "\ufffda"


def test_ids_that_end_a_generation() -> None:
    tokenizer = Tokenizer.from_gguf(synthetic_metadata(eot_token_id=7, eom_token_id=np.uint32(9)))
    assert tokenizer.eos_ids == {7, 9, tokenizer.tokens.index("<|endoftext|>"), tokenizer.tokens.index("<|im_end|>")}
    assert tokenizer.eos_id == tokenizer.tokens.index("<|im_end|>")


@pytest.mark.parametrize("token_id", [-1, 512])
def test_an_id_outside_the_vocabulary_has_no_bytes(tokenizer: Tokenizer, token_id: int) -> None:
    with pytest.raises(ValueError, match=f"token id {token_id}: this vocabulary has the ids 0 to 511"):
        tokenizer.token_bytes(token_id)


@pytest.mark.parametrize("text", ["\ud83d", "ok \udc00!", "\ud83d\ude38", "<|im_start|>\udfff"])
def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(ConfigError, match=r"character \d+ is U\+D[89A-F][0-9A-F]{2}, half of a surrogate pair"):
        tokenizer.encode(text, parse_special=True)


def test_more_spaces_than_the_splitter_takes_are_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "MAX_SPACE_RUN", 1000)
    assert tokenizer.decode(tokenizer.encode("a" + " " * 1000 + "b" * 2000, parse_special=False))[1:-2000] == " " * 1000
    with pytest.raises(ConfigError, match=r"1,001 spaces or line ends in a row; the tokenizer takes 1,000 at most"):
        tokenizer.encode("a" + " \n" * 500 + " b", parse_special=False)


# --- the start token


def leading_start_tokens(ids: list[int], bos_id: int) -> int:
    return len(list(itertools.takewhile(lambda i: i == bos_id, ids)))


def test_T01_exactly_one_start_token() -> None:
    writes = "{{ bos_token }}{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
    silent = writes.removeprefix("{{ bos_token }}")
    counts = []
    for add_bos, source in ((True, writes), (True, silent), (False, silent)):
        tokenizer = Tokenizer.from_gguf(synthetic_metadata(add_bos_token=add_bos))
        assert tokenizer.bos_id is not None
        ids = ChatTemplate(source, tokenizer).encode_messages([{"role": "user", "content": "hi"}])
        counts.append(leading_start_tokens(ids, tokenizer.bos_id))
    assert counts == [1, 1, 0]


@pytest.mark.parametrize(("add_bos", "count"), [(True, 1), (False, 0)])
def test_T01_a_bare_prompt_too(add_bos: bool, count: int) -> None:
    tokenizer = Tokenizer.from_gguf(synthetic_metadata(add_bos_token=add_bos))
    assert tokenizer.bos_id is not None
    assert leading_start_tokens(tokenizer.encode_prompt("hi"), tokenizer.bos_id) == count
    assert leading_start_tokens(tokenizer.encode_prompt("<|endoftext|>hi"), tokenizer.bos_id) == 1


# --- files that are wrong

TOKENS = build_vocabulary(512).tokens
MERGE = build_vocabulary(512).merges[0]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model: expected gpt2, found no such key"),
    ({"model": "llama"}, "model: expected gpt2, found 'llama'"),
    ({"model": 3}, r"model: expected gpt2, found 3 \(int\)"),
    ({"pre": None}, "pre: expected qwen2 or qwen35, found no such key"),
    ({"pre": "qwen36"}, "pre: expected qwen2 or qwen35, found 'qwen36'"),
    ({"pre": "q" * 10**6}, "pre: expected qwen2 or qwen35, found 'q{60}' and 999,940 more characters"),
    ({"tokens": None}, "tokens: expected a list of strings, found no such key"),
    ({"tokens": []}, "tokens: expected a list of strings, found a list of 0 no values"),
    ({"tokens": np.arange(512)}, "tokens: expected a list of strings, found a list of 512 int64 values"),
    ({"tokens": "abc"}, "tokens: expected a list of strings, found 'abc'"),
    ({"tokens": [*TOKENS[:-1], TOKENS[5]]}, "tokens: expected every text once, found .* as token 5 and as token 511"),
    ({"tokens": ["xyz", *TOKENS[1:]]}, "tokens: expected a normal token for each of the 256 bytes, found none for 1 "),
    ({"token_type": np.ones(511, np.int32)}, "token_type: expected 512 integers.* found a list of 511 int32 values"),
    (
        {"token_type": np.ones(512, np.float32)},
        "token_type: expected 512 integers.* found a list of 512 float32 values",
    ),
    ({"token_type": np.full(512, 7)}, "token_type: expected values from 1 to 6, found 7 for token 0"),
    ({"token_type": np.full(512, 2**32 + 1)}, "token_type: expected values from 1 to 6, found 4294967297 for token 0"),
    ({"token_type": np.full(512, 5)}, "tokens: expected a normal token for each of the 256 bytes, found none for 256"),
    ({"merges": None}, "merges: expected a list of strings, found no such key"),
    ({"merges": ["a b c"]}, "merges: entry 0 is 'a b c'; expected two normal tokens"),
    ({"merges": [MERGE, "ab"]}, "merges: entry 1 is 'ab'; expected two normal tokens"),
    ({"merges": [MERGE, "th "]}, "merges: entry 1 is 'th '; expected two normal tokens"),
    ({"merges": [" th"]}, "merges: entry 0 is ' th'; expected two normal tokens"),
    ({"merges": [""]}, "merges: entry 0 is ''; expected two normal tokens"),
    ({"merges": ["q zz"]}, "merges: entry 0 is 'q zz'; expected two normal tokens"),
    ({"merges": ["q q"]}, "merges: entry 0 is 'q q'; expected two normal tokens"),
    ({"eos_token_id": 512}, r"eos_token_id: expected an id from 0 to 511, found 512 \(int\)"),
    ({"bos_token_id": -1}, r"bos_token_id: expected an id from 0 to 511, found -1 \(int\)"),
    ({"eot_token_id": True}, r"eot_token_id: expected an id from 0 to 511, found True \(bool\)"),
    ({"eom_token_id": 1.0}, r"eom_token_id: expected an id from 0 to 511, found 1.0 \(float\)"),
    ({"padding_token_id": "5"}, "padding_token_id: expected an id from 0 to 511, found '5'"),
    ({"add_bos_token": 1}, r"add_bos_token: expected true or false, found 1 \(int\)"),
    (
        {"add_bos_token": True, "bos_token_id": None},
        "add_bos_token is true and .*bos_token_id is missing; expected an id",
    ),
]


@pytest.mark.parametrize(
    ("changes", "message"), WRONG, ids=lambda value: ",".join(value) if isinstance(value, dict) else ""
)
def test_a_wrong_key_is_named_with_expected_and_found(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=rf"tokenizer\.ggml\.{message}"):
        Tokenizer.from_gguf(synthetic_metadata(**changes))


def test_a_merge_may_not_make_a_control_or_an_unused_token() -> None:
    for kind in (TokenType.CONTROL, TokenType.UNUSED, TokenType.UNKNOWN):
        metadata = synthetic_metadata()
        joined = metadata[KEY + "merges"][0].replace(" ", "")
        metadata[KEY + "token_type"][metadata[KEY + "tokens"].index(joined)] = kind
        with pytest.raises(FormatError, match=r"tokenizer\.ggml\.merges: entry 0 is"):
            Tokenizer.from_gguf(metadata)


def test_token_types_are_optional() -> None:
    """Then only the texts that end a generation are control tokens."""
    tokenizer = Tokenizer.from_gguf(synthetic_metadata(token_type=None))
    assert tokenizer.control_texts == ("<|endoftext|>", "<|im_end|>")

"""Requests: the published documents as data, and the inputs that settings give."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from strata_jax.config import RunConfig, WorkloadConfig
from strata_jax.errors import ConfigError, FormatError
from strata_jax.workloads import Request, load_workload, read_messages, read_token_ids, requests_of

RECORD_7 = (
    "Record 0007: The warehouse has blue boxes, green triangles and red circles. Check the count and retain the label."
)


def requests(**settings: object) -> list[Request]:
    """Return the requests for these workload settings."""
    return requests_of(RunConfig(workload=WorkloadConfig(**settings)))  # type: ignore[arg-type]


def content(request: Request) -> str:
    """Return the text of a request with one message."""
    assert request.messages is not None
    assert [message["role"] for message in request.messages] == ["user"]
    return request.messages[0]["content"]


def test_small_document_is_a_question_and_two_documents_of_eight_records() -> None:
    warm, first, measured = requests(name="doc_18k_small")
    assert [request.name for request in (warm, first, measured)] == ["warm_question", "first", "measured"]
    assert content(warm) == "Answer only the number: 17 times 23."
    assert content(first).startswith("Read the following records. At the end answer only OK.\nRecord 0000: The")
    assert content(measured).startswith("Separate document. Read it carefully and answer only OK.\nRecord 0000: The")
    assert content(first).splitlines()[1:] == content(measured).splitlines()[1:]
    assert content(first).splitlines()[-1] == RECORD_7
    assert len(content(first).splitlines()) == 9


def test_published_document_has_640_records_and_greedy_short_output() -> None:
    _, first, _ = requests(name="doc_18k")
    assert len(content(first).splitlines()) == 641
    assert content(first).endswith("retain the label.")
    assert first.max_output_tokens == 16
    assert first.sampling.temperature == 0 == load_workload("doc_18k")["temperature"]
    assert first.chat_options == {"enable_thinking": False}


def test_given_settings_win_over_published_ones() -> None:
    _, first, _ = requests(name="doc_18k", records=2, max_output_tokens=5, temperature=0.5, top_k=3)
    assert len(content(first).splitlines()) == 3
    assert (first.max_output_tokens, first.sampling.temperature, first.sampling.top_k) == (5, 0.5, 3)


def test_published_workloads_without_a_runtime_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"workload\.name=long_forced.*data only"):
        requests(name="long_forced")
    with pytest.raises(ConfigError, match=r"workload\.name=nonsense.*doc_18k_small"):
        requests(name="nonsense")
    with pytest.raises(ConfigError, match=r"workload=prompt and no workload\.prompt"):
        requests(name="prompt")


def test_a_prompt_is_a_user_message_or_bare_text() -> None:
    (chat,) = requests(prompt="hi", reasoning_effort="low", enable_thinking=True)
    assert (content(chat), chat.max_output_tokens) == ("hi", 128)
    assert chat.chat_options == {"enable_thinking": True, "reasoning_effort": "low"}
    (bare,) = requests(prompt="hi", apply_chat_template=False)
    assert (bare.prompt, bare.messages) == ("hi", None)


def test_forced_tokens_set_the_output_length() -> None:
    (request,) = requests(token_ids=[1, 2], forced_token_ids=[3, 4, 5])
    assert (request.token_ids, request.forced_token_ids, request.max_output_tokens) == ((1, 2), (3, 4, 5), 3)


def test_a_request_has_exactly_one_input() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        Request(name="x", max_output_tokens=1)


def test_inputs_come_from_files(tmp_path: Path) -> None:
    prompt = tmp_path / "p.txt"
    prompt.write_text("grüße\n", encoding="utf-8")
    assert content(requests(prompt_file=str(prompt))[0]) == "grüße\n"
    messages = tmp_path / "m.json"
    messages.write_text(json.dumps([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]))
    assert [message["role"] for message in requests(messages_file=str(messages))[0].messages or ()] == [
        "system",
        "user",
    ]
    ids = tmp_path / "ids.txt"
    for text in ("[1, 2, 3]", "1 2\n3", "1,2,3"):
        ids.write_text(text, encoding="utf-8")
        assert requests(token_ids_file=str(ids))[0].token_ids == (1, 2, 3)
    np.save(tmp_path / "ids.npy", np.array([1, 2, 3], np.int32))
    assert read_token_ids(tmp_path / "ids.npy") == (1, 2, 3)


@pytest.mark.parametrize("text", ["", "[]", "[1, -2]", "[1.5]", "[true]", "one two", "[1, 2", '{"a": 1}'])
def test_broken_token_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FormatError, match=r"ids\.txt"):
        read_token_ids(path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '["hi"]', '[{"role": "user"}]', '[{"role": 3, "content": ""}]'])
def test_broken_message_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FormatError, match=r"m\.json"):
        read_messages(path)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        requests(prompt_file=str(tmp_path / "missing.txt"))
    (tmp_path / "b.txt").write_bytes(b"ok\xff")
    with pytest.raises(FormatError, match="not UTF-8 text at byte 2"):
        requests(prompt_file=str(tmp_path / "b.txt"))
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(FormatError, match=r"x\.npy"):
        read_token_ids(tmp_path / "x.npy")

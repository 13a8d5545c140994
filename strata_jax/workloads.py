"""The requests of a run: from a workload in `data/workloads.yaml`, or from the input that the settings give."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from strata_jax.config.contradictions import given_sources
from strata_jax.config.schema import WorkloadConfig
from strata_jax.errors import ConfigError, FormatError
from strata_jax.sampling import Sampling

DATA_FILE = Path(__file__).resolve().parents[1] / "data" / "workloads.yaml"
DEFAULT_OUTPUT_TOKENS = 128
MAX_INPUT_FILE_BYTES = 256 * 2**20
INPUT_WORKLOADS = ("prompt", "token_ids")  # names that say "my input follows"; the input itself is in another key

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Exactly one of messages, prompt and token_ids is set; a `prompt` gets no chat template.

    Attributes:
        conversation: whose conversation it begins or goes on with; None: it stands alone.
        continues: the prompt is a further turn behind all that the conversation has so far.
        prompt_tokens: the prompt is cut to so many tokens.
    """

    name: str
    max_output_tokens: int
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    forced_token_ids: tuple[int, ...] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    chat_options: Mapping[str, Any] = field(default_factory=dict)
    conversation: str | None = None
    continues: bool = False
    prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if sum(source is not None for source in (self.messages, self.prompt, self.token_ids)) != 1:
            raise ValueError(f"request {self.name} needs exactly one of messages, prompt and token_ids")


def build_requests(config: WorkloadConfig, sources: Sequence[str], data_file: Path = DATA_FILE) -> list[Request]:
    """Return the requests of one run of the workload, in order; `config.requests` (how often) is not applied.

    sources: the input keys that are set, from `given_sources`.
    """
    if sources:
        return [_request_from_input(config, sources[0].removeprefix("workload."))]
    if config.name in INPUT_WORKLOADS:
        raise ConfigError(f"workload={config.name} and no workload.{config.name}: add workload.{config.name}=...")
    return _document_requests(config, data_file)


def requests_of(config: Any, data_file: Path = DATA_FILE) -> list[Request]:
    """Return the requests of a whole run configuration."""
    return build_requests(config.workload, given_sources(config), data_file)


def load_workload(name: str, data_file: Path = DATA_FILE) -> dict[str, Any]:
    """Return one entry of the workload data with what it inherits through `like`; ConfigError for unknown names."""
    entries = _entries(data_file)
    if name not in entries:
        raise ConfigError(f"workload.name={name}: there is no such workload; there are {', '.join(entries)}.")
    entry = entries[name]
    return {**load_workload(entry["like"], data_file), **entry} if "like" in entry else dict(entry)


def read_token_ids(path: Path) -> tuple[int, ...]:
    """Return the ids in a file: a JSON list, numbers between spaces or lines, or a one-dimensional .npy of integers."""
    if path.suffix == ".npy":
        import numpy as np  # only for this kind of file

        try:
            array = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise FormatError(f"{path}: not a readable .npy file: {error}") from error
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise FormatError(f"{path}: expected a list of integers, found shape {array.shape} of {array.dtype}")
        ids = [int(value) for value in array]
    else:
        text = _read_text(path).strip()
        try:
            ids = json.loads(text) if text.startswith("[") else [int(word) for word in text.replace(",", " ").split()]
        except ValueError as error:
            raise FormatError(f"{path}: expected token ids, a JSON list or numbers between spaces: {error}") from error
    if not ids or not all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in ids):
        raise FormatError(f"{path}: expected at least one token id, each an integer of 0 or more")
    return tuple(ids)


def read_messages(path: Path) -> tuple[Message, ...]:
    """Return the chat messages in a JSON file: a list of objects with `role` and `content`, or {"messages": list}."""
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise FormatError(f"{path}: not valid JSON: {error}") from error
    messages = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(messages, list) or not messages:
        raise FormatError(f"{path}: expected a list of messages with role and content")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise FormatError(f'{path}: message {index} is not an object like {{"role": "user", "content": "..."}}')
    return tuple(messages)


@cache  # a grid asks a thousand times
def _entries(data_file: Path) -> Mapping[str, dict[str, Any]]:
    return {entry["id"]: entry for entry in yaml.safe_load(data_file.read_text(encoding="utf-8"))["workloads"]}


def _request_from_input(config: WorkloadConfig, source: str) -> Request:
    common = _common(config, DEFAULT_OUTPUT_TOKENS)
    if source in ("token_ids", "token_ids_file"):
        given = config.token_ids
        ids = tuple(given) if given is not None else read_token_ids(Path(str(config.token_ids_file)))
        return Request(name="token_ids", token_ids=ids, **common)
    if source == "messages_file":
        messages = read_messages(Path(str(config.messages_file)))
        return Request(name="messages", messages=messages, chat_options=_chat_options(config), **common)
    text = config.prompt if config.prompt is not None else _read_text(Path(str(config.prompt_file)))
    if not text:
        raise FormatError(f"{config.prompt_file}: the file is empty")
    return _text_request("prompt", text, config)


def _document_requests(config: WorkloadConfig, data_file: Path) -> list[Request]:
    entry = load_workload(config.name, data_file)
    if not entry.get("runnable"):
        raise ConfigError(
            f"workload.name={config.name}: this version has it as data only. It can run doc_18k_small, doc_18k and"
            " conversations."
        )
    if "agents" in entry:
        return list(_agents(entry, config))
    count = config.records if config.records is not None else int(entry["records"])
    records = "\n".join(entry["record"].format(i=index) for index in range(count))
    texts = {"warm_question": entry["warm_question"]}
    texts |= {name: prefix + records for name, prefix in entry["prefixes"].items()}
    return [_text_request(name, texts[name], config, int(entry["max_output_tokens"])) for name in entry["order"]]


def _agents(entry: Mapping[str, Any], config: WorkloadConfig) -> Iterator[Request]:
    """Yield the requests of agents that take turns: a document for each, then further turns."""
    common, seen = _common(config, int(entry["max_output_tokens"])), set[str]()
    for index, (tokens, agent) in enumerate(zip(entry["order"], entry["agents"], strict=True)):
        length = int(entry["fresh_tokens"] if agent in seen else tokens)
        lines = (f"{agent} {index}", *(entry["record"].format(i=i) for i in range(length)))  # a line has many tokens
        yield Request(
            name=f"{agent}.{index}", prompt="\n".join(lines), conversation=agent, continues=agent in seen,
            prompt_tokens=length, **common,
        )  # fmt: skip
        seen.add(agent)


def _text_request(
    name: str, text: str, config: WorkloadConfig, default_output_tokens: int = DEFAULT_OUTPUT_TOKENS
) -> Request:
    common = _common(config, default_output_tokens)
    if not config.apply_chat_template:
        return Request(name=name, prompt=text, **common)
    message = {"role": "user", "content": text}
    return Request(name=name, messages=(message,), chat_options=_chat_options(config), **common)


def _common(config: WorkloadConfig, default_output_tokens: int) -> dict[str, Any]:
    forced = tuple(config.forced_token_ids) if config.forced_token_ids is not None else None
    given = config.max_output_tokens
    return {
        "max_output_tokens": len(forced) if forced else given if isinstance(given, int) else default_output_tokens,
        "forced_token_ids": forced,
        "sampling": Sampling(config.temperature, config.top_k, config.top_p, config.min_p, config.seed),
        "stop": tuple(config.stop),
        "ignore_eos": config.ignore_eos,
    }


def _chat_options(config: WorkloadConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"enable_thinking": config.enable_thinking}
    if config.reasoning_effort is not None:
        options["reasoning_effort"] = config.reasoning_effort
    return options


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_INPUT_FILE_BYTES:
            raise FormatError(
                f"{path}: {path.stat().st_size:,} bytes; an input file has {MAX_INPUT_FILE_BYTES:,} at most"
            )
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 text at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from error

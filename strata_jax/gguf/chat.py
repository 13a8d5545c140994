"""The chat template that a GGUF carries: rendered with sandboxed Jinja; only the template writes control tokens.

A message may contain the text of a control token. Such text is broken with a mark before rendering, so that it is not
recognised afterwards, and the mark is taken out of the plain text before that is encoded. Where the template joins
harmless pieces into a control token all the same, the messages are rendered again with every first character of a
control token replaced, which leaves no way for a token to begin in a message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from strata_jax.errors import ConfigError, FormatError
from strata_jax.gguf.tokenizer import Tokenizer

KEY = "tokenizer.chat_template"
MAX_RENDERED_CHARS = 64 * 2**20
_MARKS = (chr(0xF0000), 0xFFFFD - 0xF0000)  # a private-use plane: the mark is a character that no message holds


class ChatTemplate:
    """Messages to token ids."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], undefined=jinja2.ChainableUndefined
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, strftime_now=lambda form: datetime.now().strftime(form))
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise FormatError(f"{KEY}: line {error.lineno}: {error.message}") from error
        self._tokenizer = tokenizer

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate:
        """Build the template of a file; FormatError where it has none or a broken one."""
        source = metadata.get(KEY)
        if not isinstance(source, str) or not source:
            raise FormatError(
                f"{KEY} is missing: the file has no chat template. Give the bare text with workload.prompt=... "
                "workload.apply_chat_template=false"
            )
        return cls(source, tokenizer)

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """Render and encode a conversation.

        Args:
            messages: each with ``role`` and ``content`` (text, or a list of ``{"type": "text", "text": ...}``).
            options: passed to the template as they are, e.g. ``enable_thinking``, ``tools``.

        Raises:
            ConfigError: messages of another shape, or what the template itself refuses.
        """
        _check(messages)
        given = {"messages": list(messages), **options}
        mark, first = _unused_characters(given, 2)
        marked = _map_text(given, lambda text: _break_tokens(text, self._tokenizer.control_texts, mark))
        pieces = self._split(marked, add_generation_prompt)
        firsts = {text[0] for text in self._tokenizer.control_texts}
        if any(c in text for text in _texts(given) for c in firsts):
            hidden = {c: first + str(i) + first for i, c in enumerate(sorted(firsts))}
            safe = self._split(_map_text(given, lambda text: _replace(text, hidden)), add_generation_prompt)
            if [p for p in safe if isinstance(p, int)] != [p for p in pieces if isinstance(p, int)]:
                shown = {new: old for old, new in hidden.items()}
                pieces = [p if isinstance(p, int) else _replace(p, shown) for p in safe]
        ids: list[int] = []
        for piece in pieces:
            text = piece if isinstance(piece, int) else piece.replace(mark, "")
            ids += [text] if isinstance(text, int) else self._tokenizer.encode(text, parse_special=False)
        return self._tokenizer.with_bos(ids)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the rendered text. Raises ConfigError with the template's own message."""
        bos = self._tokenizer.bos_id
        names = {"bos_token": "" if bos is None else self._tokenizer.tokens[bos], "eos_token": ""}
        parts, length = [], 0
        try:
            for part in self._template.generate(messages=messages, **names, **options):
                parts.append(part)
                length += len(part)
                if length > MAX_RENDERED_CHARS:
                    raise ConfigError(f"{KEY}: more than {MAX_RENDERED_CHARS:,} characters for these messages")
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError, RecursionError) as error:
            raise ConfigError(f"the chat template refuses these messages: {error}") from error
        return "".join(parts)

    def _split(self, given: dict[str, Any], add_generation_prompt: bool) -> list[str | int]:
        """Render, and cut at control tokens."""
        text = self.render(add_generation_prompt=add_generation_prompt, **given)
        return self._tokenizer.split_special(text, parse_special=True)


def _check(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise ConfigError("there are no messages: give at least one with role and content")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError(f"message {i} is not an object with a role, like role: user, content: ...")
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and "tool_calls" in message):
            raise ConfigError(f"message {i}: content must be text or a list of parts, found {type(content).__name__}")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ConfigError(f"message {i}: a part of its content is not text; this program reads text only")


def _break_tokens(text: str, control_texts: Sequence[str], mark: str) -> str:
    """Put the mark behind the first character of whatever begins, or may go on to become, a control token."""
    starts = {t[:2] for t in control_texts}
    out = []
    for i, c in enumerate(text):
        out.append(c)
        pair = text[i : i + 2]
        if pair in starts or (len(pair) == 1 and any(s.startswith(pair) for s in starts)):
            out.append(mark)
    return "".join(out)


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_text(item, change) if key != "role" else item for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_text(item, change) for item in value]
    return value


def _texts(value: Any) -> list[str]:
    found: list[str] = []
    _map_text(value, lambda text: found.append(text) or text)  # type: ignore[func-returns-value]
    return found


def _replace(text: str, changes: Mapping[str, str]) -> str:
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


def _unused_characters(value: Any, count: int) -> list[str]:
    used = set("".join(_texts(value)))
    first, span = _MARKS
    return [c for c in (chr(ord(first) + i) for i in range(span)) if c not in used][:count]


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)

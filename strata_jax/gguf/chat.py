"""The chat template that a GGUF carries: messages to token ids; only the template writes control tokens.

The rendered text remembers which of its characters the template wrote (`strata_jax.gguf.traced`). A control token is
one whose characters are all the template's own; the same text with a single character from a message, a tool or an
option is encoded as plain text. So nothing that a message holds can make a control token, nor take one away, whatever
the template joins, cuts or removes; and text without control tokens in it is encoded exactly as the whole rendering
would be.

A role counts as the template's text, since templates build tokens from it (`'<|' + role + '|>'`). So a role must look
like a name, and one that is the inside of a control token is taken only if it is in `ROLES`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from strata_jax.errors import ConfigError, FormatError
from strata_jax.gguf.template import RENDER_ERRORS, TemplateEnvironment
from strata_jax.gguf.tokenizer import Tokenizer
from strata_jax.gguf.traced import template_text

KEY = "tokenizer.chat_template"
ROLE = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
ROLES = frozenset(
    ("system", "developer", "user", "assistant", "tool", "function", "ipython", "model", "observation", "environment")
)
Runs = list[tuple[str, bool]]


class ChatTemplate:
    """Messages to token ids."""

    def __init__(self, source: str, tokenizer: Tokenizer, now: Callable[[], datetime] = datetime.now) -> None:
        self._environment = TemplateEnvironment(now)
        try:
            self._template, self._literals = self._environment.compile_traced(source)
        except jinja2.TemplateSyntaxError as error:
            raise FormatError(f"{KEY}: line {error.lineno}: {error.message}") from error
        except (MemoryError, RecursionError, SyntaxError) as error:
            raise FormatError(f"{KEY}: the template is nested too deeply: {error}") from error
        self._tokenizer = tokenizer
        token_ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
        self._names = {key: template_text("" if i is None else tokenizer.tokens[i]) for key, i in token_ids.items()}
        self._inner = {text.strip("<|>[]/") for text in tokenizer.control_texts} - ROLES

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate:
        """Build the template of a file; FormatError where it has none or a broken one."""
        source = metadata.get(KEY)
        if not isinstance(source, str) or not source:
            found = "is missing" if source is None else "is empty" if source == "" else "is not a string"
            raise FormatError(
                f"{KEY} {found}: the file has no chat template. Give the bare text with workload.prompt=... "
                "workload.apply_chat_template=false"
            )
        return cls(source, tokenizer)

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """Render and encode a conversation, with one start token in front if the file wants one.

        Args:
            messages: each with ``role`` and ``content`` (text, or a list of ``{"type": "text", "text": ...}``).
            options: passed to the template as they are, e.g. ``enable_thinking``, ``tools``.

        Raises:
            ConfigError: messages of another shape, or what the template itself refuses.
            FormatError: a template whose control tokens cannot be told from a message's text.
        """
        runs = self._render(messages, {"add_generation_prompt": add_generation_prompt, **options})
        pieces = self._pieces(runs)
        if _ids(pieces) != self._all_control_ids(runs):
            self._check_is_traced(messages, {"add_generation_prompt": add_generation_prompt, **options})
        ids: list[int] = []
        for piece in pieces:
            ids += [piece] if isinstance(piece, int) else self._tokenizer.encode(piece, parse_special=False)
        return self._tokenizer.with_bos(ids)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """Return the rendered text; arguments and errors as for `encode_messages`."""
        runs = self._render(messages, {"add_generation_prompt": add_generation_prompt, **options})
        return "".join(text for text, _ in runs)

    def _render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Runs:
        self._check(messages)
        taken = sorted(self._names.keys() & options.keys())
        if taken:
            raise ConfigError(f"chat option {taken[0]}: this name belongs to a token of the model; leave it out")
        given = [{**message, "role": template_text(message["role"])} for message in messages]
        values = {"tools": None, "documents": None, **options, **self._names, "messages": given}
        try:
            return self._environment.runs(self._template, values)
        except RENDER_ERRORS as error:
            reason = str(error) or type(error).__name__
            raise ConfigError(f"the model's chat template refuses these messages: {reason}") from error

    def _pieces(self, runs: Runs) -> list[str | int]:
        """Return the control tokens that the template wrote, and the text between them."""
        pieces: list[str | int] = []
        for text, own in runs:
            for piece in self._control_split(text) if own else (text,):
                if isinstance(piece, str) and pieces and isinstance(pieces[-1], str):
                    pieces[-1] += piece
                else:
                    pieces.append(piece)
        return pieces

    def _control_split(self, text: str) -> list[str | int]:
        """Cut at control tokens. Tokens that are matched in any text stay text: they may go on in the next stretch."""
        hidden = self._tokenizer.is_hidden
        pieces = self._tokenizer.split_special(text, parse_special=True)
        return [p if isinstance(p, str) or hidden(p) else self._tokenizer.tokens[p] for p in pieces]

    def _all_control_ids(self, runs: Runs) -> list[int]:
        """Return what a plain reading of the text takes for control tokens."""
        return _ids(self._control_split("".join(text for text, _ in runs)))

    def _check_is_traced(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> None:
        """Tell a message with a control token's text from a template that makes tokens in a way that is not traced.

        The latter makes them from harmless messages as well.
        """
        keep = {text for text in self._literals if ROLE.fullmatch(text)}
        harmless = _harmless({"messages": messages, **options}, keep)
        try:
            runs = self._render(harmless.pop("messages"), harmless)
        except ConfigError:
            return  # the template needs the real text: nothing can be said, and the text stays plain
        missed = Counter(self._all_control_ids(runs)) - Counter(_ids(self._pieces(runs)))
        if missed:
            token = self._tokenizer.tokens[min(missed)]
            raise FormatError(
                f"{KEY}: the template makes the control token {token!r} by an operation that mixes its own text with "
                "a message's; tokens are recognised where the template joins its own texts, names of roles "
                "included, with + or ~ or join"
            )

    def _check(self, messages: Sequence[Mapping[str, Any]]) -> None:
        if isinstance(messages, str | Mapping) or not messages:
            raise ConfigError("there are no messages: give a list with at least one, each with role and content")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ConfigError(f"message {i} is not an object with a role, like role: user, content: ...")
            role, content = message["role"], message.get("content")
            if not ROLE.fullmatch(role) or role in self._inner:
                raise ConfigError(
                    f"message {i}: role {role[:60]!r} is not a name of letters, digits, _ and - that stands for a "
                    "speaker; use system, user, assistant or tool"
                )
            if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
                raise ConfigError(
                    f"message {i}: content must be text or a list of parts, found {type(content).__name__}"
                )
            for part in content if isinstance(content, list) else ():
                if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise ConfigError(
                        f"message {i}: a part of its content is not like type: text, text: ...; this program reads "
                        "text only"
                    )


def _ids(pieces: Sequence[str | int]) -> list[int]:
    return [piece for piece in pieces if isinstance(piece, int)]


def _harmless(value: Any, keep: set[str]) -> Any:
    """Return the same structure with other texts; names of roles and texts that the template asks for stay."""
    if isinstance(value, str):
        return value if value in keep else "x"
    if isinstance(value, Mapping):
        return {
            key if ROLE.fullmatch(str(key)) else f"x{i}": item if key == "role" else _harmless(item, keep)
            for i, (key, item) in enumerate(value.items())
        }
    if isinstance(value, list | tuple):
        return [_harmless(item, keep) for item in value]
    return value

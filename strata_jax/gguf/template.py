"""Jinja for chat templates as Hugging Face renders them, sandboxed, bounded, and tracing what the template wrote.

A template is somebody else's program. It sees the values it is given and nothing of Python behind them (Jinja's
immutable sandbox; no loader, so no files). Bounded are the characters of the output (`MAX_CHARS`), those of a text or
list built with an operator, the turns of loops plus the calls (`MAX_STEPS`), the numbers given to calls, and the depth
of recursion. Not bounded are a width written
inside a format string, and the time of one filter or method on a large value.

To trace, the literals of the parsed template are replaced by calls that return them as `TracedText`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format, do_join
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from strata_jax.gguf.traced import MAX_CHARS, TracedText, joined, runs_of, template_text

MAX_ITEMS = 2**20
MAX_STEPS = 20_000_000  # a turn of a loop is 1, a call 10: about 1 s of empty loops, 10-30 s of calls on one core
CALL_STEPS = 10
MAX_EXPONENT = 64
MAX_NUMBER_BITS = 4096
MAX_WIDTH = 10_000  # of padding: an argument of a filter, or written in a format
# What a template can raise on values it does not expect.
RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles one template and renders it, one rendering at a time."""

    concat = staticmethod(joined)  # used by compiled templates for macros, blocks and captured text
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock])
        self.filters["tojson"] = _to_json
        self.filters["join"] = _join
        self.filters["format"] = _format
        for name in ("center", "indent", "wordwrap"):
            self.filters[name] = _narrow(self.filters[name])
        self.globals.update(raise_exception=_raise, strftime_now=lambda form: now().strftime(form))
        self.steps = 0

    def compile_traced(self, source: str) -> tuple[jinja2.Template, frozenset[str]]:
        """Return the template, and its literals in expressions."""
        tree = self.parse(source)
        literals = frozenset(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
        traced = _Trace().visit(tree)
        traced.set_environment(self)
        return self.template_class.from_code(self, self.compile(traced), self.make_globals(None)), literals

    def runs(self, template: jinja2.Template, values: Mapping[str, Any]) -> list[tuple[str, bool]]:
        """Render to stretches of text, each with whether the template wrote it. Raises one of `RENDER_ERRORS`."""
        self.steps = 0
        parts, num_chars = [], 0
        for part in template.generate(values):
            parts.append(part)
            num_chars += len(part)
            _limit(num_chars, MAX_CHARS, "characters of output")
        text = joined(parts)
        found, at = [], 0
        for length, own in text.runs:
            found.append((str.__getitem__(text, slice(at, at + length)), own))
            at += length
        return found

    literal = staticmethod(template_text)

    def counted(self, items: Iterable[Any]) -> list[Any]:
        """Take a loop's items into account."""
        found = list(items)
        self._step(len(found))
        return found

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self._step(CALL_STEPS)
        for value in (*args, *kwargs.values()):
            if isinstance(value, int):
                _limit(abs(value), MAX_CHARS, "as a number given to a call")
        if isinstance(__obj, LoopContext) and args:  # a recursive loop goes on with these items
            args = (__self.counted(args[0]), *args[1:])
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, range):
            __self._step(len(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _limit(abs(right), MAX_EXPONENT, "as an exponent")
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            _limit(bits, MAX_NUMBER_BITS, "bits in a number")
        if operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
            _limit(len(left) + len(right), MAX_ITEMS, "items in a value")
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple) and isinstance(other, int):
                    _limit(len(one) * other, _most(one), "characters or items in a value")
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
        return super().call_binop(context, operator, left, right)

    def _step(self, count: int) -> None:
        self.steps += count
        _limit(self.steps, MAX_STEPS, "turns of loops and calls")


class GenerationBlock(Extension):
    """`{% generation %}`: marks the assistant's text for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Trace(NodeTransformer):
    """Makes literals traced, `~` keep origins, and loops counted."""

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        return _call("literal", node, node) if isinstance(node.value, str) else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return _call("literal", node, nodes.Const(node.data))

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        texts = [nodes.Filter(item, "string", [], [], None, None) for item in node.nodes]
        return _call("concat", node, nodes.List(texts))

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _call("counted", node, node.iter)
        return node


def _call(name: str, node: nodes.Node, argument: nodes.Node) -> nodes.Node:
    return nodes.Call(nodes.EnvironmentAttribute(name), [argument], [], None, None).set_lineno(node.lineno, True)


def _limit(found: int, most: int, what: str) -> None:
    if found > most:
        raise jinja2.TemplateRuntimeError(f"it asks for {found:,} {what}; the limit is {most:,}")


def _most(value: object) -> int:
    return MAX_CHARS if isinstance(value, str) else MAX_ITEMS


@jinja2.pass_eval_context
def _join(eval_ctx: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    return cast(str, do_join(eval_ctx, value, TracedText(d, runs_of(d)), attribute))  # in async mode only: a coroutine


def _narrow(pad: Callable[..., str]) -> Callable[..., str]:
    """Limit the numbers a padding filter takes."""

    @functools.wraps(pad)
    def limited(*args: Any, **kwargs: Any) -> str:
        for value in (*args, *kwargs.values()):
            if isinstance(value, int):
                _limit(abs(value), MAX_WIDTH, "characters of padding")
        return pad(*args, **kwargs)

    return limited


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    _check_widths(str(value))
    return do_format(value, *args, **kwargs)


def _check_widths(form: str) -> None:
    for digits in re.findall(r"\d+", form):
        if len(digits) > len(str(MAX_WIDTH)):
            raise jinja2.TemplateRuntimeError(f"a format asks for a width above {MAX_WIDTH:,}")
    if re.search(r"%[^%a-zA-Z]*\*", form):
        raise jinja2.TemplateRuntimeError("a format takes its width from an argument; write the width")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers does: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> Iterator[str]:
    raise jinja2.TemplateError(message)

"""Chat templates: rendered in a sandbox with the same switches and helpers as transformers."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, Protocol

from jinja2 import TemplateError, meta
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from deployments.ingress.errors import invalid

# What a template may raise over messages that it did not expect.
_TEMPLATE_FAULTS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError,
                    ValueError, RecursionError)  # fmt: skip


class TemplateText(Protocol):
    """What is known of a template without rendering it."""

    source: str
    knows_tools: bool


class GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        """Drop the two marks and keep what lies between them."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training: unescaped, where Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """One model's chat template; special tokens are variables of every rendering."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template; a broken one raises jinja2.TemplateSyntaxError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self._template = environment.from_string(source)
        read = meta.find_undeclared_variables(environment.parse(source))
        self.knows_tools = "tools" in read
        self._special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt for these messages; `variables` may override add_generation_prompt."""
        values: dict[str, Any] = {"add_generation_prompt": True, "tools": None}
        values |= self._special_tokens
        values |= variables or {}
        values["messages"] = messages
        try:
            return self._template.render(values)
        except _TEMPLATE_FAULTS as fault:
            raise invalid(f"the chat template refused the messages: {fault}", "messages") from fault

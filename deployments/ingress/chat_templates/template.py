"""Chat templates, rendered like transformers' `apply_chat_template`."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn, Protocol

import msgspec
from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from deployments.ingress.chat_templates.continuations import continued, marked
from deployments.ingress.chat_templates.message_forms import Forms, Message
from deployments.ingress.http.errors import RequestError, invalid

# Exceptions of a template for messages that it does not support.
_TEMPLATE_FAULTS = (TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError,
                    RuntimeError, TypeError, ValueError)  # fmt: skip
# The names of a message's reasoning; the most common one first.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_MAX_FAULT = 500


class Conversation(msgspec.Struct, frozen=True):
    """The input of a chat template.

    messages: as the client wrote them.
    variables: other variables of the template.
    tools_text: describes the tools to a model whose template reads no tools; "" for none.
    continues: the field of the last message that the answer continues; "" for a new message.
    """

    messages: list[dict[str, Any]]
    variables: dict[str, Any] = {}
    tools_text: str = ""
    continues: str = ""


class TemplateText(Protocol):
    """A template that can be inspected without rendering it.

    source: its text.
    """

    source: str

    def reads(self, variable: str) -> bool:
        """Whether the template uses this variable."""
        ...


class _GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's text for training. It is a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        """Parse to a block that renders the text between the two marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> Any:
        return caller()


class _MakeDict:
    """`dict` in templates. Not the class itself, which would give access to its methods."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As `dict.fromkeys`."""
        return dict.fromkeys(*args)


class _PlainNamespace(Namespace):
    """`namespace` in templates, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        given = dict(*rest, **kwargs)
        for name in given:
            _refuse_hidden(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        """Set one name."""
        _refuse_hidden(name)
        super().__setitem__(name, value)


def _refuse_hidden(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have {name!r}: it begins with an underscore")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON like in the training data; Jinja's own filter would escape it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _MakeDict(),
        "namespace": _PlainNamespace,
    }
    return environment


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: variables of every rendering. Raises jinja2.TemplateSyntaxError."""
        self.source = source
        self._environment = _environment()
        self._template = self._environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        self._forms = Forms(self._render_test)

    @cached_property
    def _variables(self) -> frozenset[str]:
        parsed = self._environment.parse(self.source)
        return frozenset(meta.find_undeclared_variables(parsed))

    def reads(self, variable: str) -> bool:
        """Whether the template uses this variable."""
        return variable in self._variables

    def render(self, conversation: Conversation) -> str:
        """The prompt; RequestError if the template refuses the messages."""
        messages = [_without_nulls(message) for message in conversation.messages]
        if "developer" not in self.source:
            messages = [_as_system(message) for message in messages]
        messages = self._forms.fitted(messages, conversation.tools_text)
        messages = [_aliased(message) for message in messages]
        if not conversation.continues:
            return self._run(messages, conversation.variables)
        last, text = marked(messages[-1], conversation.continues, self.source)
        rendered = self._run([*messages[:-1], last], conversation.variables)
        return continued(rendered, text)

    def _run(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        values: dict[str, Any] = {"add_generation_prompt": True, "tools": None, "documents": None}
        values |= self._special_tokens
        values |= variables
        values["messages"] = messages
        try:
            return self._template.render(values)
        except _TEMPLATE_FAULTS as fault:
            reason = str(fault)[:_MAX_FAULT]
            raise invalid(
                f"the chat template refused the messages: {reason}", "messages"
            ) from fault

    def _render_test(self, messages: Sequence[Message]) -> str:
        """Render test messages; "" if the template refuses them."""
        try:
            return self._run(messages, {"add_generation_prompt": False})
        except RequestError:
            return ""


def _without_nulls(message: Message) -> dict[str, Any]:
    """The message without its null fields; an answer without calls has a content.

    Clients send null for unset fields; most templates expect them to be absent, but not the content
    of an answer, which servers write as null where it was all reasoning.
    """
    plain = {name: value for name, value in message.items() if value is not None}
    if plain["role"] == "assistant" and not plain.get("tool_calls"):
        plain.setdefault("content", "")
    return plain


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    """A developer message with the older name of its role."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _aliased(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under all names that templates read."""
    found = next((message[name] for name in _REASONING if name in message), None)
    if found is None:
        return message
    return {"thinking": found, **message, "reasoning_content": found}
